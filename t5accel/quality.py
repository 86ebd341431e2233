"""Does a faster model still do its work? Text scores, agreement of tokens, closeness of tensors, and a report.

Every score runs from 0 to 100, higher is better. `evaluate` takes a function from texts to texts, so this module knows
no runtime. ``predictions`` are N texts and ``references`` N lists of accepted texts, which may differ in length.
"""

from __future__ import annotations

import importlib
import re
import string
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from t5accel import tasks
from t5accel.errors import InputError, MissingPackageError, T5AccelError

Texts, References = Sequence[str], Sequence[Sequence[str]]


class ParityError(T5AccelError, AssertionError):
    """Two tensors that should be equal are not; the message says by how much and where."""


def bleu(predictions: Texts, references: References) -> float:
    """Corpus BLEU as sacrebleu computes it (13a tokens, exponential smoothing, case kept).

    A corpus without any 4-gram has BLEU 0 even when perfect: score whole sets, not single short sentences.

    Raises:
        InputError: no rows, unequal counts, or a row without a reference.
        MissingPackageError: sacrebleu is not installed.

    >>> round(bleu(["Le chat dort bien."], [["Le chat dort.", "Le chat dort bien."]]), 6)
    100.0
    """
    return _sacrebleu("BLEU", predictions, references)[0]


def chrf(predictions: Texts, references: References) -> float:
    """Corpus chrF as sacrebleu computes it (character 6-grams, no word n-grams, beta 2). Errors as `bleu`.

    >>> round(chrf(["Le chat dort."], [["Le chat dort."]]), 6)
    100.0
    """
    return _sacrebleu("CHRF", predictions, references)[0]


def rouge(predictions: Texts, references: References) -> dict[str, float]:
    """Mean ROUGE F-measures of rouge-score, no stemming; each row takes its best reference for each measure.

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
    scorer = _optional("rouge_score.rouge_scorer", "rouge-score").RougeScorer(kinds)
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


def token_agreement(sequences_a: ArrayLike, sequences_b: ArrayLike, pad_token_id: int) -> float:
    """Share (0 to 1) of positions at which two outputs hold the same token.

    Counted are the positions at which at least one of the two is not padding: a row that stops early disagrees with
    the rest of the longer one, and padding agrees with nothing.

    Args:
        sequences_a, sequences_b: ``(N, L_a)`` and ``(N, L_b)`` integers, padded on the right; L_a and L_b may differ.

    Raises:
        InputError: not two integer matrices of equally many rows, or nothing but padding.

    >>> token_agreement([[5, 6, 7, 1]], [[5, 9, 1]], pad_token_id=0)
    0.25
    """
    a, b = _array(sequences_a, "sequences_a", "iu"), _array(sequences_b, "sequences_b", "iu")
    if a.ndim != 2 or b.ndim != 2 or len(a) != len(b):
        raise InputError(f"sequences have the shapes {a.shape} and {b.shape}: both must be (N, L) with the same N")
    length = max(a.shape[1], b.shape[1])
    a, b = (np.pad(x, ((0, 0), (0, length - x.shape[1])), constant_values=pad_token_id) for x in (a, b))
    counted = (a != pad_token_id) | (b != pad_token_id)
    if not counted.any():
        raise InputError("both outputs are nothing but padding: their agreement says nothing")
    return float((a == b)[counted].mean())


def assert_varied(sequences: Any, at_least: int = 3, *, ignore: Collection[int] = (0, 1)) -> None:
    """Refuse a degenerate reference: some row must hold ``at_least`` distinct tokens, or equality proves nothing.

    Rows are looked at one by one: a model that repeats another token in each row is as degenerate as one that repeats
    the same.

    Args:
        sequences: ``(N, L)`` or ``(L,)`` integers.
        ignore: tokens that do not count; T5's padding (0) and end of sequence (1).

    Raises:
        InputError: the output does not vary, is empty, or is not of integers.

    >>> assert_varied([[17, 4, 9, 1, 0]])
    """
    tokens = _array(sequences, "sequences", "iu")
    if tokens.ndim not in (1, 2) or tokens.size == 0 or at_least < 1:
        raise InputError(f"sequences of shape {tokens.shape}, at_least={at_least}: give (N, L) tokens, at_least >= 1")
    most = max(len(set(row.tolist()) - set(ignore)) for row in np.atleast_2d(tokens))
    if most < at_least:
        raise InputError(
            f"equality on a degenerate output is no evidence: no row has more than {most} distinct tokens, wanted "
            f"{at_least}. Change the seed, the inputs or the weights of the reference"
        )


def parity(actual: ArrayLike, expected: ArrayLike, *, atol: float, rtol: float = 0.0) -> float:
    """Check ``|actual - expected| <= atol + rtol * |expected|`` everywhere; return the largest absolute difference.

    NaN is never close, not even to NaN; an infinity is close to itself only. Dtypes may differ, shapes may not.

    Args:
        actual, expected: numbers of any equal shape, at least one; torch tensors must be on the CPU, detached.

    Raises:
        ParityError: (an AssertionError) with shape, dtypes, max abs, max rel, the worst place and both values there.
        InputError: empty or non-numeric arrays, or a tolerance that is negative or not finite.

    >>> parity([1.0, 2.0], [1.0, 2.5], atol=1.0)
    0.5
    """
    for name, value in (("atol", atol), ("rtol", rtol)):
        if not 0 <= value < np.inf:
            raise InputError(f"{name}={value!r}: a tolerance is finite and not negative")
    a, e = _array(actual, "actual", "biuf"), _array(expected, "expected", "biuf")
    if a.shape != e.shape:
        raise ParityError(f"shapes differ: actual {a.shape} {a.dtype}, expected {e.shape} {e.dtype}")
    if a.size == 0:
        raise InputError(f"arrays of shape {a.shape} hold nothing to compare")
    equal, a64, e64 = a == e, a.astype(np.float64), e.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        difference = np.where(equal, 0.0, np.abs(a64 - e64))  # inf - inf would be NaN where both are the same infinity
        # a tolerance relative to an infinity is infinite and would accept any finite value: hence isfinite
        close = equal | (np.isfinite(difference) & (difference <= atol + rtol * np.abs(e64)))
        relative = np.where(equal, 0.0, difference / np.abs(e64))
    if close.all():
        return float(difference.max())
    # argmax finds the first NaN, if there is one, and else the largest difference among the places that are not close
    worst = np.unravel_index(np.argmax(np.where(close, -1.0, difference)), a.shape)
    raise ParityError(
        f"{int((~close).sum())} of {a.size} values are not close (atol={atol:g}, rtol={rtol:g}): shape {a.shape}, "
        f"dtype {a.dtype} against {e.dtype}, max abs {difference.max():.6g}, max rel {relative.max():.6g}, "
        f"worst at {tuple(map(int, worst))}: actual {a[worst]!s}, expected {e[worst]!s}"
    )


@dataclass(frozen=True)
class TranslationQuality:
    """Scores of the translation set; buckets are words of the English source, `tasks.LENGTH_BUCKETS`."""

    rows: int
    bleu: float
    chrf: float
    bleu_by_length: dict[str, float]
    rows_by_length: dict[str, int]
    bleu_signature: str  # sacrebleu's own account of version, tokens and references: scores compare if these are equal
    chrf_signature: str


@dataclass(frozen=True)
class SummaryScores:
    """Means over ``rows`` summaries, each with its best reference."""

    rows: int
    rouge1: float
    rouge2: float
    rougeL: float  # noqa: N815 — the field's name for it


@dataclass(frozen=True)
class SummaryQuality:
    """A part without rows (possible in a limited run) is None."""

    all: SummaryScores
    seen: SummaryScores | None
    unseen: SummaryScores | None


@dataclass(frozen=True)
class AnswerScores:
    """Means over ``rows`` questions, each with its best reference."""

    rows: int
    exact_match: float
    f1: float


@dataclass(frozen=True)
class QuestionQuality:
    """A part without rows (possible in a limited run) is None."""

    all: AnswerScores
    seen: AnswerScores | None
    unseen: AnswerScores | None
    has_answer: AnswerScores | None
    no_answer: AnswerScores | None


@dataclass(frozen=True)
class QualityReport:
    """Scores of the bundled sets. A set that was not asked for is None.

    ``limit`` is None for the full sets, else the number of rows taken of each length bucket or half.
    """

    translation: TranslationQuality | None
    summaries: SummaryQuality | None
    questions: QuestionQuality | None
    limit: int | None

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, numbers and texts, ready for ``json.dump``; one key for each field."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [] if self.limit is None else [f"LIMITED to the first {self.limit} rows of each length bucket or half"]
        if self.translation is not None:
            t = self.translation
            lines.append(f"translation  all         {t.rows:4d}  BLEU {t.bleu:5.1f}  chrF {t.chrf:5.1f}")
            for name, score in t.bleu_by_length.items():
                lines.append(f"translation  {name + ' words':11s} {t.rows_by_length[name]:4d}  BLEU {score:5.1f}")
        for task, quality in (("summaries", self.summaries), ("questions", self.questions)):
            for part in fields(quality) if quality is not None else ():
                scores = getattr(quality, part.name)
                if scores is not None:
                    values = "  ".join(f"{k} {v:5.1f}" for k, v in asdict(scores).items() if k != "rows")
                    lines.append(f"{task:11s}  {part.name:11s} {scores.rows:4d}  {values}")
        return "\n".join(lines)


def evaluate(
    generate: Callable[[list[str]], list[str]], *, names: Sequence[str] = tasks.NAMES, batch_size: int = 32,
    limit: int | None = None,
) -> QualityReport:  # fmt: skip
    """Run ``generate`` over the bundled evaluation sets and score what it writes.

    Args:
        generate: from up to ``batch_size`` texts, T5's prefix included, to as many texts.
        names: which sets, some of `tasks.NAMES`.
        limit: only the first ``limit`` rows of each length bucket (translation) or half; recorded in the report.

    Raises:
        InputError: bad arguments, or ``generate`` returned another number of texts, or something that is no text.
        MissingPackageError: sacrebleu (translation) or rouge-score (summaries) is not installed.

    >>> evaluate(lambda texts: ["unanswerable"] * len(texts), names=["questions"]).questions.all
    AnswerScores(rows=200, exact_match=23.5, f1=23.5)
    """
    if isinstance(names, str) or not names or len({*map(str, names)}) != len(names):
        raise InputError(f"names={names!r}: give a list of different names out of {', '.join(tasks.NAMES)}")
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise InputError(f"batch_size={batch_size!r}: give a whole number of 1 or more")
    sets = {name: tasks.rows(name, limit=limit) for name in names}  # every argument is checked before the slow part
    parts: dict[str, Any] = dict.fromkeys(tasks.NAMES)
    for name, rows in sets.items():
        texts = _generated(generate, [tasks.source_text(name, row) for row in rows], batch_size)
        score = {"translation": _translation, "summaries": _summaries, "questions": _questions}[name]
        parts[name] = score(_Scored(rows, texts, [tasks.references(name, row) for row in rows]))
    return QualityReport(**parts, limit=limit)


@dataclass(frozen=True)
class _Scored:
    rows: list[dict[str, Any]]
    predictions: list[str]
    references: list[list[str]]

    def part(self, keep: Callable[[dict[str, Any]], bool]) -> tuple[list[str], list[list[str]]]:
        chosen = [i for i, row in enumerate(self.rows) if keep(row)]
        return [self.predictions[i] for i in chosen], [self.references[i] for i in chosen]


def _translation(scored: _Scored) -> TranslationQuality:
    by_length = {name: scored.part(lambda row, n=name: tasks.group("translation", row) == n)
                 for name in tasks.LENGTH_BUCKETS}  # fmt: skip
    (bleu_all, bleu_signature), (chrf_all, chrf_signature) = (
        _sacrebleu(metric, scored.predictions, scored.references) for metric in ("BLEU", "CHRF")
    )
    return TranslationQuality(
        len(scored.rows), bleu_all, chrf_all, {name: bleu(*part) for name, part in by_length.items() if part[0]},
        {name: len(part[0]) for name, part in by_length.items()}, bleu_signature, chrf_signature,
    )  # fmt: skip


def _summaries(scored: _Scored) -> SummaryQuality:
    def scores(predictions: list[str], references: list[list[str]]) -> SummaryScores | None:
        return SummaryScores(len(predictions), **rouge(predictions, references)) if predictions else None

    return SummaryQuality(
        scores(scored.predictions, scored.references),
        *(scores(*scored.part(lambda row, h=half: tasks.half(row) == h)) for half in ("seen", "unseen")),
    )


def _questions(scored: _Scored) -> QuestionQuality:
    def scores(keep: Callable[[dict[str, Any]], bool]) -> AnswerScores | None:
        part = scored.part(keep)
        return AnswerScores(len(part[0]), exact_match(*part), f1(*part)) if part[0] else None

    return QuestionQuality(
        scores(lambda row: True), scores(lambda row: tasks.half(row) == "seen"),
        scores(lambda row: tasks.half(row) == "unseen"), scores(lambda row: bool(row["answers"])),
        scores(lambda row: not row["answers"]),
    )  # fmt: skip


def _generated(generate: Callable[[list[str]], list[str]], sources: list[str], batch_size: int) -> list[str]:
    texts: list[str] = []
    for start in range(0, len(sources), batch_size):
        batch = sources[start : start + batch_size]
        answer = generate(list(batch))
        if not isinstance(answer, (list, tuple)) or not all(isinstance(text, str) for text in answer):
            raise InputError(f"generate must return a list of texts, one for each source, not {answer!r:.200}")
        if len(answer) != len(batch):
            raise InputError(f"generate returned {len(answer)} texts for {len(batch)} sources: one each is needed")
        texts += answer
    return texts


def _sacrebleu(metric: str, predictions: Texts, references: References) -> tuple[float, str]:
    """Score and signature. sacrebleu wants streams (first references, second …), padded with None."""
    texts, accepted = _checked(predictions, references)
    scorer = getattr(_optional("sacrebleu.metrics", "sacrebleu"), metric)()
    score = scorer.corpus_score(texts, list(zip_longest(*accepted))).score
    return float(score), str(scorer.get_signature())


def _answer_score(score: Callable[[str, str], float], predictions: Texts, references: References) -> float:
    best = []
    for text, accepted in zip(*_checked(predictions, references, empty_allowed=True), strict=True):
        # as in SQuAD's script, a reference that normalises to nothing counts only where there is no other
        targets = [target for target in map(_normal_answer, accepted) if target] or [""]
        best.append(max(score(_normal_answer(text), target) for target in targets))
    return 100 * float(np.mean(best))


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
    return "" if text == tasks.UNANSWERABLE else text


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


def _array(values: Any, name: str, kinds: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:  # ragged rows; tensors on a GPU, with a gradient, bfloat16
        raise InputError(f"{name} is no array: {error}. Give rows of equal length, CPU tensors, detached") from error
    if array.dtype.kind not in kinds:
        raise InputError(f"{name} has dtype {array.dtype}: {'integers' if kinds == 'iu' else 'numbers'} are needed")
    return array


def _optional(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(f"{package} is not installed: pip install {package}, or 't5accel[course]'") from error
