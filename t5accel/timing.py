"""Time calls so that the numbers can be trusted: raw samples kept, equal work enforced, rivals interleaved.

Machines drift, so two systems are never timed one after the other: `compare` runs them A B, B A, A B, ... in one
process and divides within each round. A ratio between runs that did different work means nothing: asking for it raises.
Keeping the raw samples in a value is a habit of huggingface/optimum-benchmark (`trackers/latency.py`).
"""

from __future__ import annotations

import gc
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from statistics import median
from time import perf_counter
from typing import Any, ClassVar

from t5accel.checks import as_count
from t5accel.errors import InputError, UnequalWorkError


@dataclass(frozen=True)
class Work:
    """What a timed run does, all of it: two runs may be compared only when every field is equal.

    `new_tokens` counts the tokens generated per sequence, without the start token. `threads=None` means that nobody set
    them. `forced_length=False` marks the named exception (lookup and speculative decoding stop at their natural end).

    Raises InputError for a count below 1.
    """

    batch: int
    source_tokens: int
    new_tokens: int
    beams: int = 1
    threads: int | None = None
    forced_length: bool = True

    def __post_init__(self) -> None:
        for name in ("batch", "source_tokens", "new_tokens", "beams", "threads"):
            value = getattr(self, name)
            if name != "threads" or value is not None:
                object.__setattr__(self, name, as_count(value, f"Work.{name}", at_least=1))

    def differences(self, other: Work) -> list[str]:
        """One line per field that differs, with both values.

        >>> Work(1, 64, 64).differences(Work(1, 64, 32, beams=4))
        ['new_tokens is 64 and 32', 'beams is 1 and 4']
        """
        pairs = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return [f"{name} is {mine!r} and {theirs!r}" for name, mine, theirs in pairs if mine != theirs]


@dataclass(frozen=True)
class Latency:
    """Raw samples in seconds, at least one, each above zero.

    Raises InputError when there is no sample, or one that is zero, negative, infinite or NaN.

    >>> latency = Latency((0.0123, 0.0119, 0.0130, 0.0121, 0.0125))
    >>> print(latency)
    12.3 ms (11.9–13.0, n=5)
    >>> print(latency.per(64))
    192 µs (186–203, n=5)
    """

    unit: ClassVar[str] = "s"
    samples_s: tuple[float, ...]

    def __post_init__(self) -> None:
        samples = tuple(float(sample) for sample in self.samples_s)
        if not samples:
            raise InputError("Latency got no samples; give at least one, in seconds")
        for position, sample in enumerate(samples):
            if not (math.isfinite(sample) and sample > 0):
                raise InputError(
                    f"sample {position} of Latency is {sample!r}; each must be a finite number of seconds above 0 "
                    "(when the clock is too coarse for your call, time several calls as one)"
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

    @property
    def spread(self) -> float:
        """(max - min) / median: 0 when all samples agree, 0.1 when they lie within a tenth of the median."""
        return (self.max_s - self.min_s) / self.median_s

    def per(self, count: int) -> Latency:
        """The same samples divided by `count`, e.g. by the new tokens: seconds per token."""
        count = as_count(count, "count", at_least=1)
        return Latency(tuple(sample / count for sample in self.samples_s))

    def __str__(self) -> str:
        size = self.median_s
        factor, unit = (1, "s") if size >= 1 else (1e3, "ms") if size >= 1e-3 else (1e6, "µs")
        digits = 2 if size * factor < 10 else 1 if size * factor < 100 else 0
        mid, low, high = (f"{value * factor:.{digits}f}" for value in (size, self.min_s, self.max_s))
        return f"{mid} {unit} ({low}–{high}, n={len(self.samples_s)})"

    def to_json(self) -> dict[str, Any]:
        """A dict that `json.dump` takes; seconds throughout."""
        derived = {name: getattr(self, name) for name in ("median_s", "min_s", "max_s", "spread")}
        return {"unit": self.unit, "samples_s": list(self.samples_s), **derived}


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Collect once, then keep the garbage collector from stopping the world inside somebody's sample."""
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
        raise InputError(f"run is {run!r}, which cannot be called; give a function of no arguments, e.g. lambda: f(x)")
    if synchronize is not None and not callable(synchronize):
        raise InputError(f"synchronize is {synchronize!r}; give None or a function such as torch.cuda.synchronize")


def measure(
    run: Callable[[], Any], *, warmup: int = 2, repeats: int = 5, synchronize: Callable[[], Any] | None = None
) -> Latency:
    """Call `run` `warmup` times unmeasured, then `repeats` times measured; its result is not looked at.

    On a GPU pass `synchronize=torch.cuda.synchronize`: it is called before the clock starts and before it stops.
    To say that one system is faster than another use `compare`. Raises InputError for `repeats` < 1, `warmup` < 0 or
    something that cannot be called; what `run` raises passes through.

    >>> len(measure(lambda: sum(range(1000)), repeats=3).samples_s)
    3
    """
    _require_callables(run, synchronize)
    warmup, repeats = as_count(warmup, "warmup", at_least=0), as_count(repeats, "repeats", at_least=1)
    with _collector_paused():
        for _ in range(warmup):
            _timed(run, synchronize)
        return Latency(tuple(_timed(run, synchronize)[0] for _ in range(repeats)))


@dataclass(frozen=True)
class Candidate:
    """One system in a comparison: a name, a function of no arguments, and the work that the function does.

    When `run` returns a `Work`, that is what it really did, and `compare` checks it against `work` at every call: an
    output of another length is then caught while timing. Anything else that it returns is dropped.
    """

    name: str
    run: Callable[[], Any]
    work: Work

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name):
            raise InputError(f"the name of a Candidate is {self.name!r}; give a text that is not empty")
        _require_callables(self.run, None)
        if not isinstance(self.work, Work):
            raise InputError(f"the work of {self.name!r} is {self.work!r}; give a t5accel.timing.Work")

    def _sample(self, synchronize: Callable[[], Any] | None) -> float:
        seconds, returned = _timed(self.run, synchronize)
        if isinstance(returned, Work) and returned != self.work:
            raise UnequalWorkError(
                f"{self.name!r} did other work than it declared: {'; '.join(self.work.differences(returned))} "
                "(declared and done); force the length (min_new_tokens == max_new_tokens) or declare what it does"
            )
        return seconds


@dataclass(frozen=True)
class Ratio:
    """Reference time over candidate time, one sample per round, and their median, min and max: above 1 is faster."""

    samples: tuple[float, ...]
    median: float
    min: float
    max: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Ratio:
        """Of a sample for each round."""
        return cls(tuple(samples), median(samples), min(samples), max(samples))

    def to_json(self) -> dict[str, Any]:
        """A dict that `json.dump` takes."""
        return {**asdict(self), "samples": list(self.samples)}

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.min:.2f}–{self.max:.2f}, n={len(self.samples)})"


@dataclass(frozen=True)
class Comparison:
    """What `compare` found: `latencies` by name (the reference first) and, for every other name, `ratios`."""

    reference: str
    work: Work
    latencies: dict[str, Latency]
    ratios: dict[str, Ratio]

    def ratio(self, name: str) -> float:
        """The median of the pairwise ratios reference / `name`: 2.0 is twice as fast; the reference itself is 1.0."""
        if name not in self.latencies:
            raise InputError(f"{name!r} was not compared; choose from {', '.join(self.latencies)}")
        return 1.0 if name == self.reference else self.ratios[name].median

    def __str__(self) -> str:
        rows = [(name, str(latency), str(self.ratios.get(name, "1.00x"))) for name, latency in self.latencies.items()]
        name_width, time_width = (max(len(row[column]) for row in rows) for column in (0, 1))
        return "\n".join(f"{name:<{name_width}}  {time:<{time_width}}  {ratio}" for name, time, ratio in rows)

    def to_json(self) -> dict[str, Any]:
        """A dict that `json.dump` takes: seconds for latencies, plain numbers for ratios."""
        latencies = {name: latency.to_json() for name, latency in self.latencies.items()}
        ratios = {name: ratio.to_json() for name, ratio in self.ratios.items()}
        return {"reference": self.reference, "work": asdict(self.work), "latencies": latencies, "ratios": ratios}


def compare(
    reference: Candidate,
    *others: Candidate,
    warmup: int = 1,
    rounds: int = 5,
    synchronize: Callable | None = None,
    on_sample: Callable[[str], Any] | None = None,
) -> Comparison:
    """Time the candidates interleaved in this process and divide within each round.

    Every candidate runs once per round; every second round goes backwards, so that nobody always runs on the caches and
    the clock frequency that the same rival left behind. `synchronize`: as in `measure`.

    Raises UnequalWorkError before anything runs when the declared works differ, and while timing when a run returns a
    `Work` other than the declared one; InputError for `rounds` < 1, `warmup` < 0, no rival, or a name used twice.

    >>> work = Work(batch=1, source_tokens=64, new_tokens=64)
    >>> ours, theirs = Candidate("ours", lambda: work, work), Candidate("theirs", lambda: work, work)
    >>> found = compare(theirs, ours, rounds=3)
    >>> list(found.latencies), list(found.ratios), len(found.ratios["ours"].samples)
    (['theirs', 'ours'], ['ours'], 3)
    """
    candidates = (reference, *others)
    names = [candidate.name for candidate in candidates]
    if len(names) < 2:
        raise InputError(f"compare got {names[0]!r} alone; give at least one rival, or use measure for a single run")
    if len(set(names)) < len(names):
        raise InputError(f"compare got the names {names}; each must be used once: rename one of the equal ones")
    warmup, rounds = as_count(warmup, "warmup", at_least=0), as_count(rounds, "rounds", at_least=1)
    _require_callables(reference.run, synchronize)
    for other in others:
        if differences := reference.work.differences(other.work):
            raise UnequalWorkError(
                f"{reference.name!r} and {other.name!r} do not do the same work: {'; '.join(differences)}; "
                "make these equal, a ratio would mean nothing"
            )
    samples: dict[str, list[float]] = {name: [] for name in names}
    with _collector_paused():
        for candidate in candidates * warmup:
            candidate._sample(synchronize)
        for turn in range(rounds):
            for candidate in candidates if turn % 2 == 0 else candidates[::-1]:
                if on_sample is not None:
                    on_sample(candidate.name)
                samples[candidate.name].append(candidate._sample(synchronize))
    latencies = {name: Latency(tuple(seconds)) for name, seconds in samples.items()}
    ratios = {name: Ratio.of([*map(operator.truediv, samples[names[0]], samples[name])]) for name in names[1:]}
    return Comparison(reference.name, reference.work, latencies, ratios)
