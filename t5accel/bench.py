"""Measure every technique that exists: equal output first, then interleaved timing, memory and quality, as rows."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from t5accel import machine, quality, tasks
from t5accel.checkpoints import BUNDLED
from t5accel.checks import as_count
from t5accel.decoding.text import text_to_text
from t5accel.errors import InputError
from t5accel.records import commit, today
from t5accel.scoreboard import Results, Row
from t5accel.techniques import REFERENCE, TECHNIQUES, Generate, Subject, Technique, choose
from t5accel.timing import Candidate, Latency, Work, compare


@dataclass(frozen=True)
class BenchConfig:
    """What is measured. ``quality_limit`` rows per bucket are scored (``None``: all, 0: none); speed needs none."""

    model: str = "mini"
    batch: int = 1
    source_tokens: int = 64
    new_tokens: int = 64
    rounds: int = 5
    threads: int | None = None
    quality_limit: int | None = None
    peak_memory: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "source_tokens", "new_tokens", "rounds"):
            as_count(getattr(self, name), name, at_least=1)
        as_count(self.seed, "seed", at_least=0)
        for name, at_least in (("threads", 1), ("quality_limit", 0)):  # None has a meaning of its own
            if getattr(self, name) is not None:
                as_count(getattr(self, name), name, at_least=at_least)


def bench(config: BenchConfig, *, techniques: Sequence[Technique] | None = None, command: str = "") -> Results:
    """Prove the techniques equal on one batch, then time them interleaved, and score them on the bundled model.

    Those in other numbers than fp32, and students, do not have to be equal: their rows say how many tokens they share.
    By default all techniques are measured that there are for this model.

    Raises:
        ParityError: two techniques in fp32 do not give the same tokens; nothing is timed then.
        InputError: the reference is missing among the techniques, or its output is degenerate, or the peak memory of a
            technique was asked for that is not one of ``TECHNIQUES``.
    """
    import torch

    techniques = choose([], model=config.model) if techniques is None else techniques
    names = [technique.name for technique in techniques]
    if REFERENCE not in names:
        raise InputError(f"The techniques {names} lack the reference, {REFERENCE!r}.")
    if config.peak_memory and (own := set(names) - {technique.name for technique in TECHNIQUES}):
        raise InputError(f"peak_memory is for {REFERENCE!r} and its like, not for {sorted(own)}: set it to False.")
    threads = config.threads or machine.cpu_threads()
    torch.set_num_threads(threads)
    subject = Subject(config.model, config.seed, threads)
    ids, mask = source_batch(subject, config)
    work = Work(
        batch=config.batch, source_tokens=config.source_tokens, new_tokens=config.new_tokens, threads=threads
    )  # fmt: skip

    generators = {technique.name: technique.build(technique.measured_on(subject)) for technique in techniques}
    outputs = {name: g(ids, mask, config.new_tokens, config.new_tokens) for name, g in generators.items()}
    expected = outputs[REFERENCE]
    quality.assert_varied(expected)
    for technique in techniques:
        if technique.exact:
            quality.parity(outputs[technique.name], expected, atol=0)

    def candidate(name: str) -> Candidate:
        def run() -> Work:
            out = generators[name](ids, mask, config.new_tokens, config.new_tokens)
            return Work(
                batch=len(out), source_tokens=ids.shape[1], new_tokens=out.shape[1], threads=torch.get_num_threads()
            )

        return Candidate(name, run, work)

    others = [candidate(name) for name in names if name != REFERENCE]
    comparison = compare(candidate(REFERENCE), *others, rounds=config.rounds)

    cpu = machine.facts()
    label = f"{cpu['cpu']}, {threads} threads"
    versions = machine.versions()
    rows = []
    for technique in techniques:
        latency: Latency = comparison.latencies[technique.name]
        ratio = comparison.ratios.get(technique.name)
        base, peak = _memory(config, technique, threads, ids, mask) if config.peak_memory else (None, None)
        rows.append(
            Row(
                technique=technique.name, backend=technique.backend, model=config.model,
                precision=technique.recipe.name, recipe=technique.recipe.hash, batch=config.batch, beams=1,
                source_tokens=config.source_tokens, new_tokens=config.new_tokens, threads=threads,
                latency_s=latency.samples_s, tokens_per_s=config.batch * config.new_tokens / latency.median_s,
                bytes_on_disk=technique.bytes_on_disk(technique.measured_on(subject)), base_memory_bytes=base,
                peak_memory_bytes=peak,
                quality=_quality(generators[technique.name], subject.tokenizer, config), reference=REFERENCE,
                ratio=None if ratio is None else ratio.to_json(),
                equality=_equality(outputs[technique.name], expected),
                machine=label, versions=versions,
            )
        )  # fmt: skip
    return Results(
        machine=cpu, versions=versions, date=today(), commit=commit(),
        command=command or f"bench({config})", rows=tuple(rows),
    )  # fmt: skip


def _equality(output: np.ndarray, expected: np.ndarray) -> str:
    equal = int((output == expected).sum()) if output.shape == expected.shape else 0
    return f"{equal} of {expected.size} greedy tokens equal to {REFERENCE}, {len(np.unique(expected))} distinct"


def source_batch(subject: Subject, config: BenchConfig) -> tuple[np.ndarray, np.ndarray]:
    """What a model reads while it is timed, and a mask of ones, both (batch, source_tokens) int64.

    Text where it has a tokenizer: a trained model need not answer noise with more than one token, again and again.
    """
    if subject.tokenizer is None:
        return random_batch(subject.model.config.vocab_size, config)
    ids = tasks.sources_of_length(subject.tokenizer, config.batch, config.source_tokens, seed=config.seed)
    return np.array(ids, dtype=np.int64), np.ones((config.batch, config.source_tokens), dtype=np.int64)


def random_batch(vocab_size: int, config: BenchConfig) -> tuple[np.ndarray, np.ndarray]:
    """Seeded token ids and a mask of ones, both (batch, source_tokens) int64; ids from 3 up are ordinary tokens.

    >>> ids, mask = random_batch(100, BenchConfig(batch=2, source_tokens=5))
    >>> ids.shape, int(ids.min()) >= 3, int(mask.sum())
    ((2, 5), True, 10)
    """
    ids = np.random.default_rng(config.seed).integers(3, vocab_size, (config.batch, config.source_tokens))
    return ids, np.ones_like(ids)


def _quality(generate: Generate, tokenizer: Any, config: BenchConfig) -> dict[str, Any] | None:
    if tokenizer is None or config.quality_limit == 0 or config.model not in BUNDLED:
        return None  # quality is that of the bundled models, on the sets that they were made for
    texts = text_to_text(tokenizer, lambda ids, mask: generate(ids, mask, 0, 64))
    return quality.evaluate(texts, limit=config.quality_limit).to_json()


def _memory(config: BenchConfig, technique: Technique, threads: int, *batch: np.ndarray) -> tuple[int | None, ...]:
    return memory_alone(technique.libraries, threads, _generate_once, config, technique.name, threads, *batch)


def _generate_once(config: BenchConfig, name: str, threads: int, ids: np.ndarray, mask: np.ndarray) -> None:
    technique = next(technique for technique in TECHNIQUES if technique.name == name)
    subject = technique.measured_on(Subject(config.model, config.seed, threads))
    technique.build(subject)(ids, mask, config.new_tokens, config.new_tokens)


def memory_alone(
    libraries: Sequence[str], threads: int, once: Callable[..., Any], *given: Any
) -> tuple[int | None, int | None]:
    """The bytes that libraries take by themselves, and the most that a process had after it then called ``once``.

    It is a process of its own: the peak of this one would be that of the hungriest technique before.

    Args:
        libraries: are imported first.
        threads: of torch, if it is one of them.
        once: is called with all that is ``given``; both have to be what `pickle` takes.

    >>> base, peak = memory_alone(["numpy"], 1, len, [1, 2])
    >>> base is None or base <= peak
    True
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_used, libraries, threads, once, given).result()


def _used(
    libraries: Sequence[str], threads: int, once: Callable[..., Any], given: Sequence[Any]
) -> tuple[int | None, int | None]:
    loaded = {library: import_module(library) for library in libraries}
    if "torch" in loaded:
        loaded["torch"].set_num_threads(threads)
    base = machine.resident_memory_bytes()
    once(*given)
    return base, machine.peak_memory_bytes()
