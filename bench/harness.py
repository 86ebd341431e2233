"""Build all systems, prove them equal, interleave them, return rows.

Nothing is timed before its output was compared with the reference's, and ratios are formed within rounds of one run.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from bench.results import Row
from t5accel import machine
from t5accel.errors import InputError, UnequalWorkError
from t5accel.parity import assert_close, assert_varied
from t5accel.timing import Candidate, Work, compare

FEWEST_ROUNDS = 3  # where time is short


@dataclass(frozen=True)
class Contender:
    """A system bound to the work of a comparison."""

    name: str  # the system, as a reader calls it
    build: Callable[[], Callable[[], Any]]  # loads, and returns the function to time; its output: new tokens (B, L)
    exact: bool = True  # its output must be the reference's; of others the row counts the equal tokens
    facts: Mapping[str, Any] = field(default_factory=dict)  # further keys of `results.Row`


def run_comparison(
    entries: Sequence[Contender], work: Work, *, rounds: int = 5, atol: float | None = 0.0, keep_going: bool = False,
    seconds: float | None = None, synchronize: Callable[[], Any] | None = None,
    on_built: Callable[[str], Any] | None = None, on_run: Callable[[str], Any] | None = None, **facts: Any,
) -> list[Row]:  # fmt: skip
    """Build every entry, prove it equal to the first one, time all of them interleaved, and return a row for each.

    Args:
        entries: the first one is the reference.
        work: what each run does. Where its length is forced, every run is checked against it. At natural length its
            ``new_tokens`` are the most of an answer; whole answers are compared, and tokens counted.
        atol: the most that an exact output, the first or the last one, may differ from the reference's; ``None``:
            outputs are not compared.
        keep_going: an entry that fails, or is not equal, has a row with ``failed`` and no time, and the others go on.
        seconds: the most time for all of this: it sets the rounds. Without time for `FEWEST_ROUNDS`, no row.
        synchronize: runs before the clock starts and before it stops, such as ``torch.cuda.synchronize``.
        facts: of all rows, in place of ``work`` where it means nothing; ``None`` omits a key.
    """
    started = perf_counter()
    if len(entries) < 2 or len({entry.name for entry in entries}) < len(entries):
        raise InputError(f"entries must be two or more with different names, got {[one.name for one in entries]}.")
    about = {"batch": work.batch, "beams": work.beams, "source_tokens": work.source_tokens,
             "new_tokens": work.new_tokens}  # fmt: skip
    about |= {"threads": work.threads, "forced": None if work.forced_length else False}
    rows: dict[str, Row] = {}
    runs: dict[str, Callable[[], Any]] = {}  # of entries without a failure
    expected: Any = None

    def attempt(name: str, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except Exception as error:  # of any runtime, one that is not installed included
            if not keep_going or name == entries[0].name:
                raise
            rows[name]["failed"] = error_line(error)
            runs.pop(name, None)
            return None

    def begin(entry: Contender) -> None:
        nonlocal expected
        begun = perf_counter()
        run = entry.build()
        output = run()
        rows[entry.name]["first_s"] = perf_counter() - begun
        expected = output if entry is entries[0] else expected
        if atol is not None:
            rows[entry.name] |= _compared(
                output, expected, work, exact=entry.exact, atol=atol, first=entry is entries[0]
            )
        runs[entry.name] = run

    for entry in entries:
        row: Row = {
            "measured": "speed",
            "system": entry.name,
            "reference": entries[0].name,
            **about,
            **facts,
            **entry.facts,
        }
        rows[entry.name] = {key: value for key, value in row.items() if value is not None}
        attempt(entry.name, partial(begin, entry))
        if on_built is not None:
            on_built(entry.name)
    if seconds is not None:
        begun = perf_counter()
        for name, run in [*runs.items()]:
            attempt(name, run)
        once = perf_counter() - begun
        possible = int((seconds - (perf_counter() - started)) / once)
        if possible < min(rounds, FEWEST_ROUNDS):
            return []
        rounds = min(rounds, possible)
    if len(runs) > 1:
        exact = {entry.name: entry.exact for entry in entries}

        def again(name: str, output: Any) -> None:
            _compared(output, expected, work, exact=exact[name], atol=atol, first=False)

        _timed(rows, runs, attempt, work, rounds, synchronize, on_run, check=None if atol is None else again)
    return list(rows.values())


def _compared(output: Any, expected: Any, work: Work, *, exact: bool, atol: float, first: bool) -> Row:
    tokens = _are_tokens(output)
    if not tokens and _are_tokens(expected):
        raise InputError(f"Its output must be tokens, as the reference's is, got {output!r:.80}.")
    if first and tokens:  # forced to go on, a row alone may repeat itself; short answers vary from text to text
        assert_varied(expected if work.forced_length else expected.reshape(1, -1))
    if tokens and not work.forced_length:  # the shorter one is filled up with zeros, the padding token of every T5
        longest = max(output.shape[1], expected.shape[1])
        output, expected = (np.pad(each, ((0, 0), (0, longest - each.shape[1]))) for each in (output, expected))
    if exact and not first:
        assert_close(output, expected, atol=atol)
    if not tokens:
        return {}
    if output.shape != expected.shape:
        raise InputError(f"It generated tokens of shape {output.shape} instead of {expected.shape}.")
    if work.forced_length:
        return {"equal": int((output == expected).sum()), "of": expected.size, "distinct": len(np.unique(expected))}
    equal = int((output == expected).all(axis=1).sum())
    return {"equal": equal, "of": len(expected), "new_tokens": int(np.count_nonzero(output))}


def _are_tokens(output: Any) -> bool:
    return np.issubdtype(np.asarray(output).dtype, np.integer)


def _timed(
    rows: dict[str, Row], runs: Mapping[str, Callable[[], Any]], attempt: Callable[..., Any], work: Work, rounds: int,
    synchronize: Callable[[], Any] | None, on_run: Callable[[str], Any] | None,
    check: Callable[[str, Any], None] | None,
) -> None:  # fmt: skip
    last: dict[str, Any] = {}

    def whole(name: str) -> Any:
        output, shape = runs[name](), (work.batch, work.new_tokens)
        if work.forced_length and check and _are_tokens(output) and np.shape(output) != shape:
            raise UnequalWorkError(f"{name!r} generated tokens of shape {np.shape(output)} instead of {shape}.")
        return output

    def once(name: str) -> None:
        last[name] = attempt(name, partial(whole, name)) if name in runs else None

    # Every entry has run before: no warm-up.
    timed = compare(*(Candidate(name, partial(once, name), work) for name in runs), warmup=0, rounds=rounds,
                    synchronize=synchronize, on_sample=on_run)  # fmt: skip
    reference = next(iter(timed.latencies.values()))
    for name in [*runs] if check else []:  # an output may change after the first, and comparing takes time
        attempt(name, partial(check, name, last[name]))
    for name in runs:
        row, latency = rows[name], timed.latencies[name]
        row |= {"latency_s": list(latency.samples_s), **ratio(reference.samples_s, latency.samples_s)}
        if "equal" in row:  # its output is tokens
            row["tokens_per_s"] = row["new_tokens"] * (work.batch if work.forced_length else 1) / latency.median_s


def ratio(slower: Sequence[float], faster: Sequence[float], name: str = "ratio") -> Row:
    """How many times as fast, by samples of the same rounds: the median, and each round's.

    >>> ratio([1.0, 3.0, 2.0], [1.0, 1.0, 1.0])
    {'ratio': 2.0, 'ratio_samples': [1.0, 3.0, 2.0]}
    """
    samples = [one / other for one, other in zip(slower, faster, strict=True)]
    return {name: median(samples), f"{name}_samples": samples}


def paired_ratio(rows: Iterable[Mapping[str, Any]], ours: str, other: str) -> Row | None:
    """How many times as fast as another system ours is, as `ratio`; ``None`` if one of them has no ratios.

    By their ratios to the reference: where memory does not hold all systems, each has a separate run beside it. In
    one run the reference's times cancel.
    """
    ratios = {row["system"]: row["ratio_samples"] for row in rows if row.get("ratio_samples")}
    return ratio(ratios[ours], ratios[other]) if {ours, other} <= ratios.keys() else None


def error_line(error: Exception) -> str:
    """An error in one line, for a row's ``failed``."""
    lines = str(error).strip().splitlines() or [""]
    end = f" … {lines[-1]}" if len(lines) > 1 else ""  # of a traceback that is quoted
    return f"{type(error).__name__}: {lines[0][:200]}{end[:200]}"


def memory_alone(
    libraries: Sequence[str], threads: int, once: Callable[..., Any], *given: Any
) -> tuple[int | None, int | None]:
    """Bytes of the libraries by themselves, and the peak of a process that has then called ``once(*given)``.

    It is a separate process: the peak of this one is that of the hungriest system so far. `pickle` sends the call.
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
