"""The bundled evaluation sets (frozen JSONL files under ``data/eval``), and text scores over them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import count
from typing import TYPE_CHECKING, Any

from bench.results import DATA
from t5accel import machine
from t5accel.checks import as_count
from t5accel.errors import InputError, MissingPackageError, install
from t5accel.metrics import UNANSWERABLE, bleu, exact_match, f1, floor_warning, rouge, sacrebleu_score
from t5accel.models.prefixes import CONTEXT, QUESTION, SUMMARIZE, TRANSLATE

if TYPE_CHECKING:
    import datasets

NAMES = ("translation", "summaries", "questions")
MAIN_SCORES = ("bleu", "rougeL", "exact_match")  # one for each set, in the order of `NAMES`
LENGTH_BUCKETS = {"3-5": (3, 5), "6-8": (6, 8), "9-14": (9, 14)}  # words of an English source, ends included

_LIST_FIELD = {"translation": "references", "summaries": "references", "questions": "answers"}


def rows(name: str, *, limit: int | None = None) -> list[dict[str, Any]]:
    """The rows of one evaluation set, in the order of its file.

    ``translation`` and ``summaries`` have ``{"id", "source", "references": [...]}``, ``questions`` has ``{"id",
    "question", "context", "answers": [...]}``; an unanswerable one has no answers. `source_text` adds T5's prefix.

    Args:
        limit: keep the first ``limit`` rows of each `group`, so that a short look stays as mixed as the whole.
    """
    _check_name(name)
    if limit is not None:
        limit = as_count(limit, "limit", at_least=1)
    path = DATA / "eval" / f"{name}.jsonl"
    if not path.is_file():
        raise InputError(f"The evaluation set {name!r} is not at {path}. Use a full checkout.")
    # Lines end with \n alone: str.splitlines would also cut at U+2028 and its like, which JSON allows in a string.
    found = [json.loads(line) for line in path.read_bytes().removesuffix(b"\n").split(b"\n")]
    if limit is None:
        return found
    kept: dict[str | None, int] = {}
    result = []
    for row in found:
        key = group(name, row)
        kept[key] = kept.get(key, 0) + 1
        if kept[key] <= limit:
            result.append(row)
    return result


def dataset(name: str) -> datasets.Dataset:
    """The same rows as a ``datasets.Dataset``, in memory, without a network.

    With a network, a set from the Hugging Face hub takes the place of the bundled one after one ``map``::

        squad = datasets.load_dataset("rajpurkar/squad_v2", split="validation")
        squad = squad.map(lambda row: {"answers": row["answers"]["text"]}, remove_columns=["title", "answers"])
        sources = [source_text("questions", row) for row in squad]

    >>> dataset("questions").column_names
    ['id', 'question', 'context', 'answers']
    """
    table = rows(name)
    try:
        import datasets
    except ImportError as error:
        raise MissingPackageError(f"datasets is not installed: {install('course')}. rows() does without.") from error
    return datasets.Dataset.from_list(table)


def source_text(name: str, row: dict[str, Any]) -> str:
    """The model's input: the text of a row behind T5's own prefix."""
    _check_name(name)
    if name == "questions":
        return f"{QUESTION}{row['question']}{CONTEXT}{row['context']}"
    return (TRANSLATE if name == "translation" else SUMMARIZE) + row["source"]


def sources_of_length(tokenizer: Any, batch: int, source_tokens: int, *, seed: int = 0) -> list[list[int]]:
    """Text of an exact length, to time a trained model on: on noise it may repeat one token.

    Returns ``batch`` rows of ``source_tokens`` ids: the prefix, reports in an order drawn by ``seed``, cut to the
    length, and the end token. Each row begins with another report.
    """
    reports = [row["source"] for row in rows("summaries")]
    random.Random(seed).shuffle(reports)
    prefix, *encoded = tokenizer([SUMMARIZE, *reports])["input_ids"]
    found = []
    for first in range(batch):
        text, end = list(prefix[:-1]), prefix[-1]
        for place in count(first):
            if len(text) >= source_tokens - 1:
                break
            text += encoded[place % len(encoded)][:-1]
        found.append([*text[: source_tokens - 1], end])
    return found


def references(name: str, row: dict[str, Any]) -> list[str]:
    """Every accepted output, at least one; `UNANSWERABLE` for a question without answers."""
    _check_name(name)
    accepted = list(row[_LIST_FIELD[name]])
    return accepted or [UNANSWERABLE] if name == "questions" else accepted


def half(row: dict[str, Any]) -> str | None:
    """``"seen"`` or ``"unseen"``, by the row's id: did the bundled model's training hold its names and topics?

    ``None`` for translations, which have no halves.
    """
    match = re.search(r"-(seen|unseen)-\d+$", row["id"])
    return match[1] if match else None


def group(name: str, row: dict[str, Any]) -> str | None:
    """The part of the set that a row is scored with: a key of `LENGTH_BUCKETS` for translations, else its `half`."""
    _check_name(name)
    if name != "translation":
        return half(row)
    words = len(row["source"].split())
    return next((bucket for bucket, (low, high) in LENGTH_BUCKETS.items() if low <= words <= high), None)


def _check_name(name: str) -> None:
    if name not in NAMES:
        raise InputError(f"name must be an evaluation set, got {name!r}. Choose one of {', '.join(NAMES)}.")


@dataclass(frozen=True)
class TranslationQuality:
    """Scores of the translation set, and by `LENGTH_BUCKETS`."""

    rows: int
    bleu: float
    chrf: float
    bleu_by_length: dict[str, float]
    rows_by_length: dict[str, int]
    bleu_signature: str  # sacrebleu's version, tokens and references: scores compare where signatures are equal
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
    """Scores of the summaries; ``None`` for a part without rows, as in a limited run."""

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
    """Scores of the questions; ``None`` for a part without rows, as in a limited run."""

    all: AnswerScores
    seen: AnswerScores | None
    unseen: AnswerScores | None
    has_answer: AnswerScores | None
    no_answer: AnswerScores | None


@dataclass(frozen=True)
class QualityReport:
    """Scores of the bundled sets; ``None`` for a set that was left out."""

    translation: TranslationQuality | None
    summaries: SummaryQuality | None
    questions: QuestionQuality | None
    limit: int | None  # rows of each length bucket or half; None for the full sets

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, numbers and texts, one key for each field."""
        return asdict(self)

    @property
    def warning(self) -> str:
        """A sentence where a main score is too low for a comparison to mean anything; else empty."""
        found = {
            "bleu": self.translation and self.translation.bleu,
            "rougeL": self.summaries and self.summaries.all.rougeL,
            "exact_match": self.questions and self.questions.all.exact_match,
        }
        return floor_warning({name: score for name, score in found.items() if score is not None}, "The model")

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
    generate: Callable[[list[str]], list[str]], *, names: Sequence[str] = NAMES, batch_size: int = 32,
    limit: int | None = None, progress: bool = False,
) -> QualityReport:  # fmt: skip
    """Run ``generate`` over the bundled evaluation sets and score its outputs.

    Args:
        generate: from up to ``batch_size`` texts, T5's prefix included, to as many texts.
        limit: only the first ``limit`` rows of each length bucket (translation) or half; recorded in the report.

    >>> evaluate(lambda texts: ["unanswerable"] * len(texts), names=["questions"]).questions.all
    AnswerScores(rows=200, exact_match=23.5, f1=23.5)
    """
    if isinstance(names, str) or not names or len({*map(str, names)}) != len(names):
        raise InputError(f"names must be a list of different names out of {', '.join(NAMES)}, got {names!r}.")
    batch_size = as_count(batch_size, "batch_size", at_least=1)
    sets = {name: rows(name, limit=limit) for name in names}  # every argument is checked before the slow part
    score = {"translation": _translation, "summaries": _summaries, "questions": _questions}
    parts: dict[str, Any] = dict.fromkeys(NAMES)
    with machine.progress_bar(shown=progress, total=sum(map(len, sets.values())), desc="scoring", unit="text") as bar:
        for name, of_set in sets.items():
            texts = _generated(generate, [source_text(name, row) for row in of_set], batch_size, bar)
            parts[name] = score[name](_Scored(of_set, texts, [references(name, row) for row in of_set]))
    return QualityReport(**parts, limit=limit)


@dataclass(frozen=True)
class _Scored:
    rows: list[dict[str, Any]]
    predictions: list[str]
    references: list[list[str]]

    def part(self, keep: Callable[[dict[str, Any]], bool]) -> tuple[list[str], list[list[str]]]:
        kept = [i for i, row in enumerate(self.rows) if keep(row)]
        return [self.predictions[i] for i in kept], [self.references[i] for i in kept]


def _translation(scored: _Scored) -> TranslationQuality:
    by_length = {bucket: scored.part(lambda row, b=bucket: group("translation", row) == b) for bucket in LENGTH_BUCKETS}
    bleu_all, bleu_signature = sacrebleu_score("BLEU", scored.predictions, scored.references)
    chrf_all, chrf_signature = sacrebleu_score("CHRF", scored.predictions, scored.references)
    return TranslationQuality(
        len(scored.rows), bleu_all, chrf_all, {name: bleu(*part) for name, part in by_length.items() if part[0]},
        {name: len(part[0]) for name, part in by_length.items()}, bleu_signature, chrf_signature,
    )  # fmt: skip


def _summaries(scored: _Scored) -> SummaryQuality:
    def scores(keep: Callable[[dict[str, Any]], bool]) -> SummaryScores | None:
        part = scored.part(keep)
        return SummaryScores(len(part[0]), **rouge(*part)) if part[0] else None

    return SummaryQuality(
        scores(lambda row: True), scores(lambda row: half(row) == "seen"), scores(lambda row: half(row) == "unseen")
    )


def _questions(scored: _Scored) -> QuestionQuality:
    def scores(keep: Callable[[dict[str, Any]], bool]) -> AnswerScores | None:
        part = scored.part(keep)
        return AnswerScores(len(part[0]), exact_match(*part), f1(*part)) if part[0] else None

    return QuestionQuality(
        scores(lambda row: True), scores(lambda row: half(row) == "seen"), scores(lambda row: half(row) == "unseen"),
        scores(lambda row: bool(row["answers"])), scores(lambda row: not row["answers"]),
    )  # fmt: skip


def _generated(generate: Callable[[list[str]], list[str]], sources: list[str], batch_size: int, bar: Any) -> list[str]:
    texts: list[str] = []
    for start in range(0, len(sources), batch_size):
        batch = sources[start : start + batch_size]
        answer = generate(list(batch))
        if not isinstance(answer, (list, tuple)) or not all(isinstance(text, str) for text in answer):
            raise InputError(f"generate must return a list of texts, one for each source, got {answer!r:.200}.")
        if len(answer) != len(batch):
            raise InputError(f"generate must return a text for each of {len(batch)} sources, got {len(answer)}.")
        texts += answer
        bar.update(len(batch))
    return texts
