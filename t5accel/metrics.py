"""Text scores from 0 to 100: of N predictions against N lists of accepted texts.

Other arguments raise ``InputError``, a missing optional package ``MissingPackageError``.
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

    >>> round(bleu(["Le chat dort bien."], [["Le chat dort.", "Le chat dort bien."]]), 6)
    100.0
    """
    return sacrebleu_score("BLEU", predictions, references)[0]


def chrf(predictions: Texts, references: References) -> float:
    """Corpus chrF as sacrebleu computes it (character 6-grams, no word n-grams, beta 2)."""
    return sacrebleu_score("CHRF", predictions, references)[0]


def rouge(predictions: Texts, references: References, *, any_script: bool = False) -> dict[str, float]:
    """Mean F-measures ``{"rouge1", "rouge2", "rougeL"}`` of rouge-score, without stemming.

    Each row takes its best reference for each measure. As published, ROUGE drops all characters but a-z and 0-9; with
    ``any_script`` words are of letters and digits of any script.
    """
    texts, accepted = _checked(predictions, references)
    kinds = ("rouge1", "rouge2", "rougeL")
    tokenizer = _AnyScript() if any_script else None
    scorer = _optional("rouge_score.rouge_scorer", "rouge-score").RougeScorer(kinds, tokenizer=tokenizer)
    scores = [scorer.score_multi(targets, text) for text, targets in zip(texts, accepted, strict=True)]
    return {kind: 100 * float(np.mean([row[kind].fmeasure for row in scores])) for kind in kinds}


def exact_match(predictions: Texts, references: References) -> float:
    """Share of answers equal to a reference after SQuAD's normalisation: case, punctuation, articles, spaces.

    "No answer" is "unanswerable" or "" as a prediction, and ``["unanswerable"]`` or ``[]`` as a reference.
    """
    return _answer_score(lambda text, reference: float(text == reference), predictions, references)


def f1(predictions: Texts, references: References) -> float:
    """Mean overlap of normalised words with the best reference, as in SQuAD v2."""
    return _answer_score(_row_f1, predictions, references)


def same_text(predictions: Texts, references: References) -> float:
    """Share of texts equal to a reference but for spaces and Unicode normalisation."""
    texts, accepted = _checked(predictions, references)
    return 100 * float(np.mean([_even(text) in map(_even, row) for text, row in zip(texts, accepted, strict=True)]))


# Scores of a user's own rows, in any language; the bundled evaluation sets are scored as published.
ROW_SCORES: dict[str, Callable[[Texts, References], float]] = {
    "bleu": bleu,
    "chrf": chrf,
    "rougeL": lambda predictions, references: rouge(predictions, references, any_script=True)["rougeL"],
    "exact_match": same_text,
}
# A model that knows nothing scores a few tenths by chance, and so does a ruined one.
MIN_MEANINGFUL_SCORE = 5.0


def floor_warning(scores: Mapping[str, float], what: str) -> str:
    """A warning if ``what`` has a score of `ROW_SCORES` too low to show a loss; else an empty text."""
    known = {name: score for name, score in scores.items() if name in ROW_SCORES}
    low = [f"{name} {score:.2f}" for name, score in known.items() if score < MIN_MEANINGFUL_SCORE]
    if not low:
        return ""
    return (
        f"{what} scores {', '.join(low)}: below {MIN_MEANINGFUL_SCORE:g} points no loss can show, so this says nothing "
        "about quality. Give rows of a task that the model knows, or train it further."
    )


def sacrebleu_score(metric: str, predictions: Texts, references: References) -> tuple[float, str]:
    """A corpus score of `sacrebleu.metrics`, such as ``"BLEU"``, and sacrebleu's signature of it."""
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
    """A tokenizer for rouge-score."""

    def tokenize(self, text: str) -> list[str]:
        return re.findall(r"[^\W_]+", unicodedata.normalize("NFC", text).lower())


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
        raise InputError(f"predictions and references must be lists, got others ({error}).") from error
    if isinstance(predictions, str) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"predictions must be a list of texts, got {predictions!r:.80}.")
    if not texts or len(texts) != len(accepted):
        raise InputError(f"predictions must be as many as references, 1 or more, got {len(texts)} and {len(accepted)}.")
    for i, row in enumerate(accepted):
        # a bare text would pass as a list of its letters
        if not isinstance(row, (list, tuple)) or not all(isinstance(text, str) for text in row):
            raise InputError(f"references[{i}] must be a list of accepted texts, got {row!r:.80}.")
        if not row and not empty_allowed:
            raise InputError(f"references[{i}] must not be empty, got {row!r}. Give at least one accepted text.")
    return texts, accepted


def _optional(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(f"{package} is not installed: pip install {package}.") from error
