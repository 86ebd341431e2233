"""Measure every technique that exists: equal output first, then interleaved timing, memory and quality, as rows."""

from __future__ import annotations

import multiprocessing
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from t5accel import machine, quality
from t5accel.backends.torch_eager import TorchEager
from t5accel.checkpoints import load_t5
from t5accel.decoding.backend import as_count
from t5accel.decoding.greedy import greedy
from t5accel.decoding.text import text_to_text
from t5accel.errors import InputError
from t5accel.scoreboard import Results, Row
from t5accel.timing import Candidate, Latency, Work, compare

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# (input_ids (B, S), attention_mask (B, S), shortest, longest) -> new tokens (B, L), all int64 numpy
Generate = Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]


@dataclass(frozen=True)
class Technique:
    """A way of generating: ``build`` takes a loaded model and returns the function that is timed."""

    name: str
    backend: str
    build: Callable[[PreTrainedModel], Generate]
    precision: str = "fp32"
    recipe: str = "fp32"


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


def _transformers(use_cache: bool) -> Callable[[PreTrainedModel], Generate]:
    def build(model: PreTrainedModel) -> Generate:
        import torch

        def generate(ids: np.ndarray, mask: np.ndarray, shortest: int, longest: int) -> np.ndarray:
            tensors = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
            out = model.generate(
                **tensors,
                use_cache=use_cache,
                num_beams=1,
                do_sample=False,
                min_new_tokens=shortest,
                max_new_tokens=longest,
            )
            return out[:, 1:].numpy()

        return generate

    return build


def _ours(use_cache: bool) -> Callable[[PreTrainedModel], Generate]:
    def build(model: PreTrainedModel) -> Generate:
        backend = TorchEager(model, use_cache=use_cache)

        def generate(ids: np.ndarray, mask: np.ndarray, shortest: int, longest: int) -> np.ndarray:
            return greedy(backend, ids, mask, min_new_tokens=shortest, max_new_tokens=longest).sequences

        return generate

    return build


REFERENCE = "transformers with cache"
TECHNIQUES = (
    Technique("transformers without cache", "transformers generate()", _transformers(use_cache=False)),
    Technique(REFERENCE, "transformers generate()", _transformers(use_cache=True)),
    Technique("our loop without cache", "backends.torch_eager", _ours(use_cache=False)),
    Technique("our loop with cache", "backends.torch_eager", _ours(use_cache=True)),
)


def choose(parts: Sequence[str]) -> tuple[Technique, ...]:
    """The techniques whose name holds one of ``parts``, and the reference; all without parts.

    Raises ``InputError`` for a part that no name holds.

    >>> [technique.name for technique in choose(["loop without"])]
    ['transformers with cache', 'our loop without cache']
    """
    for part in parts:
        if not any(part in technique.name for technique in TECHNIQUES):
            raise InputError(f"No technique is called {part!r}; there are {[t.name for t in TECHNIQUES]}.")
    return tuple(t for t in TECHNIQUES if not parts or t.name == REFERENCE or any(part in t.name for part in parts))


def bench(config: BenchConfig, *, techniques: Sequence[Technique] = TECHNIQUES, command: str = "") -> Results:
    """Prove the techniques equal on one batch, then time them interleaved, and score them on the bundled model.

    Raises:
        ParityError: two techniques do not give the same tokens; nothing is timed then.
        InputError: the reference is missing among the techniques, or its output is degenerate, or the peak memory of a
            technique was asked for that is not one of ``TECHNIQUES``.
    """
    import torch

    names = [technique.name for technique in techniques]
    if REFERENCE not in names:
        raise InputError(f"The techniques {names} lack the reference, {REFERENCE!r}.")
    if config.peak_memory and (own := set(names) - {technique.name for technique in TECHNIQUES}):
        raise InputError(f"peak_memory is for {REFERENCE!r} and its like, not for {sorted(own)}: set it to False.")
    threads = config.threads or machine.cpu_threads()
    torch.set_num_threads(threads)
    model, tokenizer = load_t5(config.model, seed=config.seed)
    ids, mask = random_batch(model.config.vocab_size, config)
    work = Work(
        batch=config.batch, source_tokens=config.source_tokens, new_tokens=config.new_tokens, threads=threads
    )  # fmt: skip

    generators = {technique.name: technique.build(model) for technique in techniques}
    outputs = {name: g(ids, mask, config.new_tokens, config.new_tokens) for name, g in generators.items()}
    expected = outputs[REFERENCE]
    quality.assert_varied(expected)
    for output in outputs.values():
        quality.parity(output, expected, atol=0)

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
    size = weight_bytes(model)
    rows = []
    for technique in techniques:
        latency: Latency = comparison.latencies[technique.name]
        ratio = comparison.ratios.get(technique.name)
        rows.append(
            Row(
                technique=technique.name, backend=technique.backend, model=config.model, precision=technique.precision,
                recipe=technique.recipe, batch=config.batch, beams=1, source_tokens=config.source_tokens,
                new_tokens=config.new_tokens, threads=threads, latency_s=latency.samples_s,
                tokens_per_s=config.batch * config.new_tokens / latency.median_s, bytes_on_disk=size,
                peak_memory_bytes=_peak_memory(config, technique.name) if config.peak_memory else None,
                quality=_quality(generators[technique.name], tokenizer, config), reference=REFERENCE,
                ratio=None if ratio is None else {**asdict(ratio), "samples": list(ratio.samples)},
                equality=f"{expected.size} greedy tokens equal to {REFERENCE}, {len(np.unique(expected))} distinct",
                machine=label, versions=versions,
            )
        )  # fmt: skip
    return Results(
        machine=cpu, versions=versions, date=datetime.now(UTC).strftime("%Y-%m-%d"), commit=_commit(),
        command=command or f"bench({config})", rows=tuple(rows),
    )  # fmt: skip


def random_batch(vocab_size: int, config: BenchConfig) -> tuple[np.ndarray, np.ndarray]:
    """Seeded token ids and a mask of ones, both (batch, source_tokens) int64; ids from 3 up are ordinary tokens.

    >>> ids, mask = random_batch(100, BenchConfig(batch=2, source_tokens=5))
    >>> ids.shape, int(ids.min()) >= 3, int(mask.sum())
    ((2, 5), True, 10)
    """
    ids = np.random.default_rng(config.seed).integers(3, vocab_size, (config.batch, config.source_tokens))
    return ids, np.ones_like(ids)


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights as ``save_pretrained`` writes them at the model's type: shared tensors count once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _quality(generate: Generate, tokenizer: Any, config: BenchConfig) -> dict[str, Any] | None:
    if tokenizer is None or config.quality_limit == 0 or config.model != "mini":
        return None  # quality is that of the bundled model, on the sets that it was made for
    texts = text_to_text(tokenizer, lambda ids, mask: generate(ids, mask, 0, 64))
    return quality.evaluate(texts, limit=config.quality_limit).to_json()


def _peak_memory(config: BenchConfig, technique: str) -> int | None:
    # A process of its own: the peak of this one would be that of the hungriest technique before.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_generate_once, config, technique).result()


def _generate_once(config: BenchConfig, name: str) -> int | None:
    import torch

    torch.set_num_threads(config.threads or machine.cpu_threads())
    model, _ = load_t5(config.model, seed=config.seed)
    technique = next(technique for technique in TECHNIQUES if technique.name == name)
    technique.build(model)(*random_batch(model.config.vocab_size, config), config.new_tokens, config.new_tokens)
    return machine.peak_memory_bytes()


def _commit() -> str | None:
    folder = Path(__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return None  # an installed wheel has no history
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
