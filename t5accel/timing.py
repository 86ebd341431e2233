"""Interleaved timing of equal work, with all raw samples, as in huggingface/optimum-benchmark."""

# Machines drift, so two systems are never timed one after the other: `compare` runs them A B, B A, A B, ... in one
# process and divides within each round.

from __future__ import annotations

import gc
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from statistics import median
from time import perf_counter
from typing import Any

from t5accel.checks import as_count
from t5accel.errors import InputError, UnequalWorkError


@dataclass(frozen=True)
class Work:
    """The work of a timed run; comparable runs are equal in every field."""

    batch: int
    source_tokens: int
    new_tokens: int  # generated per sequence, without the start token
    beams: int = 1
    threads: int | None = None  # None: not set
    forced_length: bool = True  # False for prompt lookup and speculative decoding, timed up to their natural end

    def __post_init__(self) -> None:
        for name in ("batch", "source_tokens", "new_tokens", "beams", "threads"):
            value = getattr(self, name)
            if name != "threads" or value is not None:
                object.__setattr__(self, name, as_count(value, f"Work.{name}", at_least=1))

    def differences(self, other: Work) -> list[str]:
        """One line per field that differs, with both values."""
        pairs = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return [f"{name} is {mine!r} and {theirs!r}" for name, mine, theirs in pairs if mine != theirs]


@dataclass(frozen=True)
class Latency:
    """Raw samples in seconds, at least one, each finite and above zero.

    >>> print(Latency((0.0123, 0.0119, 0.0130, 0.0121, 0.0125)))
    12.3 ms (11.9–13.0, n=5)
    """

    samples_s: tuple[float, ...]

    def __post_init__(self) -> None:
        samples = tuple(float(sample) for sample in self.samples_s)
        if not samples:
            raise InputError("Latency.samples_s must have at least one sample, in seconds, got none.")
        for position, sample in enumerate(samples):
            if not (math.isfinite(sample) and sample > 0):
                raise InputError(
                    f"Latency.samples_s must be finite and above 0, got {sample!r} at {position}. If the clock is too "
                    "coarse for your call, time several calls as one."
                )
        object.__setattr__(self, "samples_s", samples)

    @property
    def median_s(self) -> float:
        return median(self.samples_s)

    @property
    def min_s(self) -> float:
        return min(self.samples_s)

    @property
    def max_s(self) -> float:
        return max(self.samples_s)

    def __str__(self) -> str:
        size = self.median_s
        if size >= 1:
            factor, unit = 1.0, "s"
        elif size >= 1e-3:
            factor, unit = 1e3, "ms"
        else:
            factor, unit = 1e6, "µs"
        digits = 2 if size * factor < 10 else 1 if size * factor < 100 else 0
        mid, low, high = (f"{value * factor:.{digits}f}" for value in (size, self.min_s, self.max_s))
        return f"{mid} {unit} ({low}–{high}, n={len(self.samples_s)})"


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Collect garbage now, and not inside a sample."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _timed(run: Callable[[], Any], synchronize: Callable[[], Any] | None) -> tuple[float, Any]:
    if synchronize:
        synchronize()  # else this sample pays for what was queued on the device before it
    start = perf_counter()
    returned = run()
    if synchronize:
        synchronize()  # CUDA calls return before they are done
    return perf_counter() - start, returned


def _require_callables(run: Any, synchronize: Any) -> None:
    if not callable(run):
        raise InputError(f"run must be a function of no arguments, such as lambda: f(x), got {run!r}.")
    if synchronize is not None and not callable(synchronize):
        raise InputError(f"synchronize must be None or a function such as torch.cuda.synchronize, got {synchronize!r}.")


def measure(
    run: Callable[[], Any], *, warmup: int = 2, repeats: int = 5, synchronize: Callable[[], Any] | None = None
) -> Latency:
    """Call `run` `warmup` times, then `repeats` times measured; to say which of two is faster use `compare`.

    On a GPU pass `synchronize=torch.cuda.synchronize`: it is called before the clock starts and before it stops.
    """
    _require_callables(run, synchronize)
    warmup, repeats = as_count(warmup, "warmup", at_least=0), as_count(repeats, "repeats", at_least=1)
    with _collector_paused():
        for _ in range(warmup):
            _timed(run, synchronize)
        return Latency(tuple(_timed(run, synchronize)[0] for _ in range(repeats)))


@dataclass(frozen=True)
class Candidate:
    """One system in a comparison; if `run` returns a `Work`, `compare` checks it against `work` at every call."""

    name: str
    run: Callable[[], Any]
    work: Work

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name):
            raise InputError(f"Candidate.name must be a text that is not empty, got {self.name!r}.")
        _require_callables(self.run, None)
        if not isinstance(self.work, Work):
            raise InputError(f"Candidate.work must be a t5accel.timing.Work, got {self.work!r}.")

    def _sample(self, synchronize: Callable[[], Any] | None) -> float:
        seconds, returned = _timed(self.run, synchronize)
        if isinstance(returned, Work) and returned != self.work:
            raise UnequalWorkError(
                f"{self.name!r} did other work than it declared: {'; '.join(self.work.differences(returned))} "
                "(declared and done). Force the length (min_new_tokens == max_new_tokens), or declare the true work."
            )
        return seconds


@dataclass(frozen=True)
class Ratio:
    """Reference time over candidate time, one sample per round: above 1 is faster."""

    samples: tuple[float, ...]
    median: float
    min: float
    max: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Ratio:
        return cls(tuple(samples), median(samples), min(samples), max(samples))

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.min:.2f}–{self.max:.2f}, n={len(self.samples)})"


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`: `latencies` by name, the reference first, and `ratios` of the others."""

    reference: str
    work: Work
    latencies: dict[str, Latency]
    ratios: dict[str, Ratio]

    def ratio(self, name: str) -> float:
        """The median of the ratios reference / `name`: 2.0 is twice as fast as the reference."""
        if name not in self.latencies:
            raise InputError(f"name must be one of {', '.join(self.latencies)}, got {name!r}.")
        return 1.0 if name == self.reference else self.ratios[name].median

    def __str__(self) -> str:
        rows = [(name, str(latency), str(self.ratios.get(name, "1.00x"))) for name, latency in self.latencies.items()]
        name_width, time_width = (max(len(row[column]) for row in rows) for column in (0, 1))
        return "\n".join(f"{name:<{name_width}}  {time:<{time_width}}  {ratio}" for name, time, ratio in rows)


def compare(
    reference: Candidate,
    *others: Candidate,
    warmup: int = 1,
    rounds: int = 5,
    synchronize: Callable | None = None,
    on_sample: Callable[[str], Any] | None = None,
) -> Comparison:
    """Time the candidates interleaved, once per round, and divide within each round.

    `synchronize` as in `measure`; `on_sample` is called with a name before its sample. Raises UnequalWorkError if the
    declared works differ, or a run returns another `Work` than declared.

    >>> work = Work(batch=1, source_tokens=64, new_tokens=64)
    >>> ours, theirs = Candidate("ours", lambda: work, work), Candidate("theirs", lambda: work, work)
    >>> found = compare(theirs, ours, rounds=3)
    >>> list(found.latencies), len(found.ratios["ours"].samples)
    (['theirs', 'ours'], 3)
    """
    candidates = (reference, *others)
    names = [candidate.name for candidate in candidates]
    if len(names) < 2:
        raise InputError(f"compare needs at least one rival, got {names[0]!r} alone. Use measure for a single run.")
    if len(set(names)) < len(names):
        raise InputError(f"Candidate.name must be used once, got {names}. Rename one of the equal ones.")
    warmup, rounds = as_count(warmup, "warmup", at_least=0), as_count(rounds, "rounds", at_least=1)
    _require_callables(reference.run, synchronize)
    for other in others:
        if differences := reference.work.differences(other.work):
            raise UnequalWorkError(
                f"{reference.name!r} and {other.name!r} must do the same work: {'; '.join(differences)}. Make these "
                "equal: a ratio would mean nothing."
            )
    samples: dict[str, list[float]] = {name: [] for name in names}
    with _collector_paused():
        for candidate in candidates * warmup:
            candidate._sample(synchronize)
        for turn in range(rounds):
            # Every second round goes backwards, so that no candidate always runs on the caches and the clock frequency
            # that the same rival left behind.
            for candidate in candidates if turn % 2 == 0 else candidates[::-1]:
                if on_sample is not None:
                    on_sample(candidate.name)
                samples[candidate.name].append(candidate._sample(synchronize))
    latencies = {name: Latency(tuple(seconds)) for name, seconds in samples.items()}
    ratios = {name: Ratio.of([*map(operator.truediv, samples[names[0]], samples[name])]) for name in names[1:]}
    return Comparison(reference.name, reference.work, latencies, ratios)
