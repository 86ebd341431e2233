"""Measure every technique on one job: equal output first, then time, memory and quality, as rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Protocol

import numpy as np

from bench import tasks
from bench.harness import Way, measured, memory_alone
from bench.precision import generated_scores
from bench.results import Row
from bench.techniques import NAMED, REFERENCE, Generate, Subject, Technique, choose
from t5accel import machine
from t5accel.decoding.backend import as_count
from t5accel.errors import InputError
from t5accel.models.load import BUNDLED
from t5accel.timing import Work
from t5accel.tokenization import TokenizerFile

# From a way of generating and how many texts it gets at once to its tokens, (N, L) int64, padded with 0. It can be
# sent to another process, where the memory is measured.
Answers = Callable[[Generate, int], np.ndarray]


class Job(Protocol):
    """What every technique, or every rung of a ladder, does."""

    def answers(self, subject: Subject) -> Answers:
        """The job on the subject's tokens."""

    def work(self, subject: Subject) -> Work:
        """What it amounts to."""

    def once(self, batch: int) -> Job:
        """The same for a single batch, as the memory is measured on."""


@dataclass(frozen=True)
class Forced:
    """Sources of an exact length, and so many new tokens for each: text where the model has a tokenizer, else noise.

    >>> Forced(batch=2, source_tokens=8, new_tokens=256).work(Subject("mini", 0, threads=1)).new_tokens
    256
    """

    new_tokens: int = 64
    source_tokens: int = 64
    batch: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("new_tokens", "source_tokens", "batch"):
            as_count(getattr(self, name), name, at_least=1)

    def answers(self, subject: Subject) -> Answers:
        """As `Job` has it; ``InputError`` where another number of texts is wanted at once."""
        if subject.tokenizer is None:
            random = np.random.default_rng(self.seed)  # from 3 up, ids are ordinary tokens
            ids = random.integers(3, subject.model.config.vocab_size, (self.batch, self.source_tokens))
        else:  # a trained model need not answer noise with more than one token, again and again
            texts = tasks.sources_of_length(subject.tokenizer, self.batch, self.source_tokens, seed=self.seed)
            ids = np.array(texts, dtype=np.int64)
        return partial(_forced, ids, self.new_tokens)

    def work(self, subject: Subject) -> Work:
        return Work(self.batch, self.source_tokens, self.new_tokens, threads=subject.threads)

    def once(self, batch: int) -> Forced:
        return self


def _forced(ids: np.ndarray, new_tokens: int, generate: Generate, batch: int) -> np.ndarray:
    if batch != len(ids):
        raise InputError(f"batch is {batch}; this forced job has {len(ids)} sources, which are answered at once.")
    return generate(ids, np.ones_like(ids), new_tokens, new_tokens)


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

    def answers(self, subject: Subject) -> Answers:
        return partial(_natural, subject.export(), self.sources(), self.longest)

    def work(self, subject: Subject) -> Work:
        longest = _tokenizer(subject.export())(self.sources())["input_ids"].shape[1]
        return Work(self.texts, longest, self.longest, threads=subject.threads, forced_length=False)

    def once(self, batch: int) -> Natural:
        return replace(self, texts=min(batch, self.texts))


_tokenizer = cache(TokenizerFile)


def _natural(folder: Path, texts: Sequence[str], longest: int, generate: Generate, batch: int) -> np.ndarray:
    tokenizer, found = _tokenizer(folder), np.zeros((len(texts), longest), dtype=np.int64)
    for first in range(0, len(texts), batch):
        given = tokenizer(texts[first : first + batch])
        rows = generate(given["input_ids"], given["attention_mask"], 0, longest)
        tokenizer.batch_decode(rows, skip_special_tokens=True)
        found[first : first + len(rows), : rows.shape[1]] = rows
    return found


def bench(
    model: str = "mini", job: Forced = Forced(), *, techniques: Sequence[Technique] | None = None, rounds: int = 5,  # noqa: B008
    threads: int | None = None, limit: int | None = None, peak_memory: bool = True, seed: int = 0,
    progress: bool = False,
) -> list[Row]:  # fmt: skip
    """Prove the techniques equal on one job, then time them interleaved, and score them on the bundled model.

    Those in other numbers than fp32, and students, do not have to be equal: their rows say how many tokens they share.

    Args:
        model: as `checkpoints.load_t5` knows it.
        job: what all of them do.
        techniques: by default all that there are for this model.
        rounds: of the timing.
        threads: of torch and ONNX Runtime; by default those that this process may use.
        limit: rows of each length bucket or half that are scored; by default all, and with 0 none.
        peak_memory: measure it too, each technique in a process of its own.
        seed: of random weights.
        progress: show a bar on standard error.

    Raises:
        ParityError: two techniques in fp32 do not give the same tokens; nothing is timed then.
        InputError: the reference is missing among the techniques, or its output is degenerate, or the peak memory of a
            technique was asked for that is not one of ``NAMED``.
    """
    import torch

    techniques = choose([], model=model) if techniques is None else techniques
    names = [technique.name for technique in techniques]
    if REFERENCE not in names:
        raise InputError(f"The techniques {names} lack the reference, {REFERENCE!r}.")
    if peak_memory and (own := {*names} - NAMED.keys()):
        raise InputError(f"peak_memory is for {REFERENCE!r} and its like, not for {sorted(own)}: set it to False.")
    as_count(rounds, "rounds", at_least=1)
    threads = machine.cpu_threads() if threads is None else as_count(threads, "threads", at_least=1)
    if limit is not None:
        as_count(limit, "limit", at_least=0)
    torch.set_num_threads(threads)
    subject = Subject(model, seed, threads)
    answers, generators = job.answers(subject), {}
    ways = [as_way(t, t.name, t.measured_on(subject), answers, job.batch, generators) for t in techniques]
    ways.sort(key=lambda way: way.name != REFERENCE)  # which has to be the first one
    with machine.progress_bar(shown=progress, total=len(ways) * (rounds + 2), unit="step") as bar:

        def tell(doing: str, name: str) -> None:
            bar.set_description(f"{doing} {name}", refresh=False)
            bar.update()

        rows = measured(
            ways, job.work(subject), rounds=rounds, model=model, on_way=partial(tell, "built"),
            on_run=partial(tell, "timing"),
        )  # fmt: skip
        found = {row["system"]: row for row in rows}
        for technique in techniques:
            tell("scoring", technique.name)
            row = found[technique.name]
            row |= sizes(technique, technique.measured_on(subject), answers, job.batch, peak_memory)
            if subject.tokenizer is not None and limit != 0 and model in BUNDLED:  # whose sets these are
                row |= generated_scores(generators[technique.name], subject.tokenizer, limit=limit)
    return [found[name] for name in names]


def as_way(
    technique: Technique, name: str, subject: Subject, answers: Answers, batch: int, generators: dict[str, Generate],
    *, exact: bool | None = None,
) -> Way:  # fmt: skip
    """A technique on a job; ``generators`` takes its way of generating by ``name``, once it is built."""

    def build() -> Callable[[], np.ndarray]:
        generators[name] = technique.build(subject)
        return partial(answers, generators[name], batch)

    facts = {
        "backend": technique.backend, "precision": technique.recipe.name, "recipe_hash": technique.recipe.hash,
    }  # fmt: skip
    return Way(name, build, technique.exact if exact is None else exact, facts)


def sizes(technique: Technique, subject: Subject, answers: Answers, batch: int, peak_memory: bool) -> Row:
    """Bytes on disk and, where it is wanted, of memory: in a process of its own, which generates once."""
    row: Row = {"size_bytes": technique.bytes_on_disk(subject)}
    if peak_memory:
        given = (technique.name, subject.name, subject.seed, subject.threads, answers, batch)
        base, peak = memory_alone(technique.libraries, subject.threads, _generate_once, *given)
        row |= {} if base is None or peak is None else {"base_memory_bytes": base, "peak_memory_bytes": peak}
    return row


def _generate_once(technique: str, model: str, seed: int, threads: int, answers: Answers, batch: int) -> None:
    answers(NAMED[technique].build(Subject(model, seed, threads)), batch)
