"""Text scores: BLEU, chrF, ROUGE, and SQuAD's exact match and F1.

Every score runs from 0 to 100, higher is better. ``predictions`` are N texts and ``references`` N lists of accepted
texts, which may differ in length.
"""

from __future__ import annotations

import importlib
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from t5accel.errors import InputError, MissingPackageError

Texts, References = Sequence[str], Sequence[Sequence[str]]
UNANSWERABLE = "unanswerable"  # what a model writes when the context does not hold the answer


def bleu(predictions: Texts, references: References) -> float:
    """Corpus BLEU as sacrebleu computes it (13a tokens, exponential smoothing, case kept).

    A corpus without any 4-gram has BLEU 0 even when perfect: score whole sets, not single short sentences.

    Raises:
        InputError: no rows, unequal counts, or a row without a reference.
        MissingPackageError: sacrebleu is not installed.

    >>> round(bleu(["Le chat dort bien."], [["Le chat dort.", "Le chat dort bien."]]), 6)
    100.0
    """
    return sacrebleu_score("BLEU", predictions, references)[0]


def chrf(predictions: Texts, references: References) -> float:
    """Corpus chrF as sacrebleu computes it (character 6-grams, no word n-grams, beta 2). Errors as `bleu`.

    >>> round(chrf(["Le chat dort."], [["Le chat dort."]]), 6)
    100.0
    """
    return sacrebleu_score("CHRF", predictions, references)[0]


def rouge(predictions: Texts, references: References, *, any_script: bool = False) -> dict[str, float]:
    """Mean ROUGE F-measures of rouge-score, no stemming; each row takes its best reference for each measure.

    Args:
        any_script: words are of letters and digits of any script. As published, ROUGE drops all but a-z and 0-9.

    Returns:
        ``{"rouge1", "rouge2", "rougeL"}``.

    Raises:
        InputError: no rows, unequal counts, or a row without a reference.
        MissingPackageError: rouge-score is not installed.

    >>> rouge(["a strike is over"], [["A strike is over."]])
    {'rouge1': 100.0, 'rouge2': 100.0, 'rougeL': 100.0}
    """
    texts, accepted = _checked(predictions, references)
    kinds = ("rouge1", "rouge2", "rougeL")
    tokenizer = _AnyScript() if any_script else None
    scorer = _optional("rouge_score.rouge_scorer", "rouge-score").RougeScorer(kinds, tokenizer=tokenizer)
    scores = [scorer.score_multi(targets, text) for text, targets in zip(texts, accepted, strict=True)]
    return {kind: 100 * float(np.mean([row[kind].fmeasure for row in scores])) for kind in kinds}


def exact_match(predictions: Texts, references: References) -> float:
    """Share of answers equal to a reference after SQuAD's normalisation: case, punctuation, articles, spaces.

    No answer is written "unanswerable" or "" by a model, and ``["unanswerable"]`` or ``[]`` as a reference.

    Raises:
        InputError: no rows or unequal counts.

    >>> exact_match(["The Eiffel Tower!", "Unanswerable.", "Rome", ""], [["eiffel tower"], [], [], ["Paris"]])
    50.0
    """
    return _answer_score(_row_exact_match, predictions, references)


def f1(predictions: Texts, references: References) -> float:
    """Mean overlap of normalised words with the best reference, as in SQuAD v2; no answer counts all or nothing.

    Raises:
        InputError: no rows or unequal counts.

    >>> f1(["in a big pot", "unanswerable"], [["a pot"], []])
    75.0
    """
    return _answer_score(_row_f1, predictions, references)


def same_text(predictions: Texts, references: References) -> float:
    """Share of texts that are those of a reference, letter by letter; only spaces and Unicode's forms are evened out.

    Raises:
        InputError: no rows or unequal counts.

    >>> same_text(["Il a faim. ", "a cat", "42"], [["Il a faim."], ["cat"], ["41", "42"]])
    66.66666666666666
    """
    texts, accepted = _checked(predictions, references)
    return 100 * float(np.mean([_even(text) in map(_even, row) for text, row in zip(texts, accepted, strict=True)]))


# Scores of anybody's rows, in any language; those of the bundled evaluation sets are as published.
ROW_SCORES: dict[str, Callable[[Texts, References], float]] = {
    "bleu": bleu,
    "chrf": chrf,
    "rougeL": lambda predictions, references: rouge(predictions, references, any_script=True)["rougeL"],
    "exact_match": same_text,
}
# Points of a hundred. A model that knows nothing scores a few tenths by chance, and so does one that was ruined.
MIN_MEANINGFUL_SCORE = 5.0


def floor_warning(scores: Mapping[str, float], what: str) -> str:
    """A sentence where scores are too low to show a loss; else an empty text.

    Args:
        scores: by name; those that are not in `ROW_SCORES` are left aside.
        what: whose scores they are.

    >>> floor_warning({"bleu": 43.0}, "The model")
    ''
    >>> floor_warning({"bleu": 0.19}, "The model")  # doctest: +ELLIPSIS
    'The model scores bleu 0.19: below 5 points no loss can show, so this says nothing about quality. ...'
    """
    low = [
        f"{name} {score:.2f}" for name, score in scores.items() if name in ROW_SCORES and score < MIN_MEANINGFUL_SCORE
    ]
    if not low:
        return ""
    return (
        f"{what} scores {', '.join(low)}: below {MIN_MEANINGFUL_SCORE:g} points no loss can show, so this says nothing "
        "about quality. Give rows of a task that the model knows, or train it further."
    )


def sacrebleu_score(metric: str, predictions: Texts, references: References) -> tuple[float, str]:
    """A corpus score of `sacrebleu.metrics`, say ``"BLEU"``, with sacrebleu's signature of it. Errors as `bleu`."""
    texts, accepted = _checked(predictions, references)
    scorer = getattr(_optional("sacrebleu.metrics", "sacrebleu"), metric)()
    # sacrebleu wants streams (every first reference, every second …), padded with None
    score = scorer.corpus_score(texts, list(zip_longest(*accepted))).score
    return float(score), str(scorer.get_signature())


def _answer_score(score: Callable[[str, str], float], predictions: Texts, references: References) -> float:
    best = []
    for text, accepted in zip(*_checked(predictions, references, empty_allowed=True), strict=True):
        # as in SQuAD's script, a reference that normalises to nothing counts only where there is no other
        targets = [target for target in map(_normal_answer, accepted) if target] or [""]
        best.append(max(score(_normal_answer(text), target) for target in targets))
    return 100 * float(np.mean(best))


def _even(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


class _AnyScript:
    """What rouge-score takes for a tokenizer."""

    def tokenize(self, text: str) -> list[str]:
        return re.findall(r"[^\W_]+", unicodedata.normalize("NFC", text).lower())


def _row_exact_match(prediction: str, reference: str) -> float:
    return float(prediction == reference)


def _row_f1(prediction: str, reference: str) -> float:
    a, b = prediction.split(), reference.split()
    if not a or not b:  # "no answer" is right or wrong, never half right
        return float(a == b)
    return 2 * (Counter(a) & Counter(b)).total() / (len(a) + len(b))  # = 2PR / (P + R)


def _normal_answer(text: str) -> str:
    """The normalisation of SQuAD v2's own evaluation script, in its order; "unanswerable" becomes ""."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    text = " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())
    return "" if text == UNANSWERABLE else text


def _checked(predictions: Any, references: Any, *, empty_allowed: bool = False) -> tuple[list[str], list[list[str]]]:
    """Both as lists, which numpy, pandas and datasets columns are not."""
    try:
        texts, accepted = list(predictions), list(references)
    except TypeError as error:
        raise InputError(f"predictions and references must be lists ({error})") from error
    if isinstance(predictions, str) or not all(isinstance(text, str) for text in texts):
        raise InputError("predictions must be a list of texts")
    if not texts or len(texts) != len(accepted):
        raise InputError(f"{len(texts)} predictions, {len(accepted)} references: give equally many, at least one")
    for i, row in enumerate(accepted):
        # a bare text would pass as a list of its letters
        if not isinstance(row, (list, tuple)) or not all(isinstance(text, str) for text in row):
            raise InputError(f"references[{i}] must be a list of accepted texts, not {row!r:.80}")
        if not row and not empty_allowed:
            raise InputError(f"references[{i}] is empty: give at least one accepted text")
    return texts, accepted


def _optional(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(f"{package} is not installed: pip install {package}.") from error
