"""Text scores over the bundled evaluation sets, for any function from texts to texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from bench import tasks
from t5accel import machine
from t5accel.checks import as_count
from t5accel.errors import InputError
from t5accel.metrics import bleu, exact_match, f1, floor_warning, rouge, sacrebleu_score


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


MAIN_SCORES = ("bleu", "rougeL", "exact_match")  # of each set the one that stands for it, in the order of `tasks.NAMES`


def evaluate(
    generate: Callable[[list[str]], list[str]], *, names: Sequence[str] = tasks.NAMES, batch_size: int = 32,
    limit: int | None = None, progress: bool = False,
) -> QualityReport:  # fmt: skip
    """Run ``generate`` over the bundled evaluation sets and score what it writes.

    Args:
        generate: from up to ``batch_size`` texts, T5's prefix included, to as many texts.
        limit: only the first ``limit`` rows of each length bucket (translation) or half; recorded in the report.

    >>> evaluate(lambda texts: ["unanswerable"] * len(texts), names=["questions"]).questions.all
    AnswerScores(rows=200, exact_match=23.5, f1=23.5)
    """
    if isinstance(names, str) or not names or len({*map(str, names)}) != len(names):
        raise InputError(f"names={names!r}: give a list of different names out of {', '.join(tasks.NAMES)}")
    batch_size = as_count(batch_size, "batch_size", at_least=1)
    sets = {name: tasks.rows(name, limit=limit) for name in names}  # every argument is checked before the slow part
    parts: dict[str, Any] = dict.fromkeys(tasks.NAMES)
    with machine.progress_bar(shown=progress, total=sum(map(len, sets.values())), desc="scoring", unit="text") as bar:
        for name, rows in sets.items():
            texts = _generated(generate, [tasks.source_text(name, row) for row in rows], batch_size, bar)
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
        sacrebleu_score(metric, scored.predictions, scored.references) for metric in ("BLEU", "CHRF")
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


def _generated(generate: Callable[[list[str]], list[str]], sources: list[str], batch_size: int, bar: Any) -> list[str]:
    texts: list[str] = []
    for start in range(0, len(sources), batch_size):
        batch = sources[start : start + batch_size]
        answer = generate(list(batch))
        if not isinstance(answer, (list, tuple)) or not all(isinstance(text, str) for text in answer):
            raise InputError(f"generate must return a list of texts, one for each source, not {answer!r:.200}")
        if len(answer) != len(batch):
            raise InputError(f"generate returned {len(answer)} texts for {len(batch)} sources: one each is needed")
        texts += answer
        bar.update(len(batch))
    return texts
