"""Ladders from the naive loop to the fastest way that we know: what their rungs are, and what every rung has to do.

Each rung adds one idea to another one, so that its factor has a name. What climbs a ladder is `climb.climb`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from t5accel import tasks
from t5accel.bench import BenchConfig, source_batch
from t5accel.checkpoints import BUNDLED
from t5accel.checks import as_count
from t5accel.decoding.tokenizer_file import TokenizerFile
from t5accel.errors import InputError
from t5accel.techniques import LOOKUP, TECHNIQUES, THROUGHPUT, Generate, Subject, Technique

MODEL, STUDENT = "mini", "mini-d1"
AT_ONCE = 32  # texts of a batch, where many are answered together


@dataclass(frozen=True)
class Rung:
    """A way of generating, and the rung that it adds an idea to.

    Attributes:
        name: of this rung, once in a ladder.
        adds: the idea, in a few words.
        on: the name of the rung that it is added to; ``None`` for the first one.
        technique: how it generates. In fp32 and with the ladder's own model it has to give the first rung's tokens.
        model: another than the ladder's, with the same tokenizer.
        batch: texts that are answered at once. More than one is throughput: the first answer comes with the last.
    """

    name: str
    adds: str
    on: str | None
    technique: Technique
    model: str | None = None
    batch: int = 1

    def __post_init__(self) -> None:
        as_count(self.batch, "batch", at_least=1)

    @property
    def is_exact(self) -> bool:
        """Whether it has to give the first rung's tokens."""
        return self.technique.recipe.name == "fp32" and self.model is None


class Job(Protocol):
    """What every rung of a ladder does."""

    is_forced: bool

    def answering(self, subject: Subject) -> Callable[[Generate, int], np.ndarray]:
        """From a way of generating and how many texts it gets at once to its tokens, (N, L) int64, padded with 0."""

    def longest_source(self, subject: Subject) -> int:
        """Tokens of the longest text."""

    def once(self, batch: int) -> Job:
        """The same for a single batch, as the memory is measured on."""


@dataclass(frozen=True)
class Forced:
    """One source of an exact length, and so many new tokens.

    >>> Forced(new_tokens=256).is_forced
    True
    """

    new_tokens: int = 64
    source_tokens: int = 64
    seed: int = 0
    is_forced = True

    def answering(self, subject: Subject) -> Callable[[Generate, int], np.ndarray]:
        """As `Job` has it; ``InputError`` for more than the one text at once."""
        config = BenchConfig(source_tokens=self.source_tokens, new_tokens=self.new_tokens, seed=self.seed)
        ids, mask = source_batch(subject, config)

        def answers(generate: Generate, batch: int) -> np.ndarray:
            if batch != 1:
                raise InputError(f"batch is {batch}: a forced job has one source, so give rungs with a batch of 1.")
            return generate(ids, mask, self.new_tokens, self.new_tokens)

        return answers

    def longest_source(self, subject: Subject) -> int:
        """As `Job` has it."""
        return self.source_tokens

    def once(self, batch: int) -> Forced:
        """Itself."""
        return self


@dataclass(frozen=True)
class Natural:
    """Texts of a bundled evaluation set, drawn by a seed; an answer ends where the model ends it.

    From texts to texts: the tokenizer's time is part of it.

    Attributes:
        task: one of `tasks.NAMES`.
        texts: how many are drawn.
        longest: an answer has no more tokens.

    Raises:
        InputError: there is no such task, or it has fewer texts.

    >>> sources = Natural("summaries", texts=2).sources()
    >>> len(sources), sources[0][:11]
    (2, 'summarize: ')
    """

    task: str = "summaries"
    texts: int = 64
    longest: int = 64
    seed: int = 0
    is_forced = False

    def __post_init__(self) -> None:
        for name in ("texts", "longest"):
            as_count(getattr(self, name), name, at_least=1)
        if self.texts > len(tasks.rows(self.task)):
            raise InputError(f"texts is {self.texts}; {self.task} has {len(tasks.rows(self.task))}.")

    def sources(self) -> list[str]:
        """The texts that are drawn, in the order of the set, T5's prefix included."""
        rows = tasks.rows(self.task)
        drawn = np.random.default_rng(self.seed).choice(len(rows), self.texts, replace=False)
        return [tasks.source_text(self.task, rows[place]) for place in sorted(drawn.tolist())]

    def answering(self, subject: Subject) -> Callable[[Generate, int], np.ndarray]:
        """As `Job` has it."""
        tokenizer, texts = TokenizerFile(subject.export()), self.sources()

        def answers(generate: Generate, batch: int) -> np.ndarray:
            found = np.zeros((len(texts), self.longest), dtype=np.int64)
            for first in range(0, len(texts), batch):
                given = tokenizer(texts[first : first + batch])
                rows = generate(given["input_ids"], given["attention_mask"], 0, self.longest)
                tokenizer.batch_decode(rows, skip_special_tokens=True)
                found[first : first + len(rows), : rows.shape[1]] = rows
            return found

        return answers

    def longest_source(self, subject: Subject) -> int:
        """As `Job` has it."""
        return TokenizerFile(subject.export())(self.sources())["input_ids"].shape[1]

    def once(self, batch: int) -> Natural:
        """For as many texts as are answered at once."""
        return replace(self, texts=min(batch, self.texts))


WAYS = {technique.name: technique for technique in (*TECHNIQUES, LOOKUP, THROUGHPUT)}

_LOOP, _INT8 = "ONNX Runtime, our loop", WAYS["ONNX Runtime, our loop, int8"]
_BELOW = (
    Rung("naive", "the naive loop", None, WAYS["transformers without cache"]),
    Rung("cache", "a cache of keys and values", "naive", WAYS["transformers with cache"]),
    Rung("onnx", "our graphs, ONNX Runtime", "cache", WAYS["ONNX Runtime, generate()"]),
    Rung("loop", "our own loop", "onnx", WAYS[f"{_LOOP}, all logits"]),
)


def forced_rungs() -> tuple[Rung, ...]:
    """For random weights at a published size: no student, nothing to look up, one text at once.

    >>> [rung.name for rung in forced_rungs()]
    ['naive', 'cache', 'onnx', 'loop', 'shortlist', 'bound', 'int8', 'int4']
    """
    return (
        *_BELOW,
        Rung("shortlist", "a shortlist for the head", "loop", WAYS[f"{_LOOP}, numpy feeds"]),
        Rung("bound", "bound buffers", "shortlist", WAYS[f"{_LOOP}, bound"]),
        Rung("int8", "8 bits", "shortlist", _INT8),
        Rung("int4", "4 bits in place of 8", "int8", WAYS[f"{_LOOP}, int4"]),
    )


def natural_rungs(student: str | None = None) -> tuple[Rung, ...]:
    """For the bundled model and real texts; first those of latency, then those that answer many texts at once.

    Args:
        student: a smaller model with the same tokenizer; by default `STUDENT` where it is bundled, else none.

    >>> [rung.name for rung in natural_rungs(student="mini") if rung.model]
    ['student', 'student, lookup', 'student, batches']
    >>> {rung.batch for rung in natural_rungs() if "batches" in rung.name}
    {32}
    """
    student = student or (STUDENT if STUDENT in BUNDLED else None)
    rungs = [
        *_BELOW,
        Rung("int8", "8 bits", "loop", _INT8),
        Rung("int4", "4 bits in place of 8", "int8", WAYS[f"{_LOOP}, int4"]),
        Rung("lookup", "drafts copied from the source", "int8", LOOKUP),
        Rung("naive, batches", f"{AT_ONCE} texts at once, naive", "naive", _BELOW[0].technique, batch=AT_ONCE),
        Rung("batches", f"{AT_ONCE} texts at once", "int8", _INT8, batch=AT_ONCE),
        Rung("dynamic, batches", "8 bits tuned for throughput", "batches", THROUGHPUT, batch=AT_ONCE),
    ]
    if student is not None:
        rungs[7:7] = [
            Rung("student", "a student", "int8", _INT8, student),
            Rung("student, lookup", "drafts, with the student", "student", LOOKUP, student),
        ]
        last = ("student, batches", "a student, in batches", "dynamic, batches")
        rungs.append(Rung(*last, THROUGHPUT, student, AT_ONCE))
    return tuple(rungs)
