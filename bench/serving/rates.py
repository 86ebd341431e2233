"""Servers under rising rates: rows, curves and knees.

The **knee** is the highest rate at which 99 of 100 answers come within a limit. Beyond it waiting times grow as long as
the load lasts, and say more about that than about the server.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

from bench.results import Row, filter_rows, format_table
from bench.serving.load import Load, ask, offer
from bench.serving.servers import Running
from t5accel.errors import InputError

SHORT, LONG, SHARE_LONG = (4, 8), 128, 10  # new tokens; one request in so many is long
STEP = 1.25  # from one rate to the next
MOST_POINTS = 8
FEWEST_ANSWERS = 100  # of a point, if that takes no more than …
MOST_SECONDS = 10.0  # … this, or the seconds that were asked for

BASELINE, STATIC, OURS = "FastAPI, transformers", "FastAPI, static batches", "t5accel serve"
Text = Callable[[np.random.Generator, int], str]  # a source of exactly so many tokens


def mixed_bodies(text: Text, count: int = 400, *, longest_source: int = 40, seed: int = 0) -> list[dict[str, Any]]:
    """Requests of which nine in ten want 4 to 8 tokens, and one wants 128; sources have 8 to 40. Lengths are forced.

    >>> [body["max_new_tokens"] > 8 for body in mixed_bodies(lambda rng, tokens: "a", 10)].count(True)
    1
    """
    rng, bodies = np.random.default_rng(seed), []
    for number in range(count):
        new = LONG if number % SHARE_LONG == 0 else int(rng.integers(SHORT[0], SHORT[1] + 1))
        source = text(rng, int(rng.integers(8, longest_source + 1)))
        bodies.append({"text": source, "max_new_tokens": new, "min_new_tokens": new})
    return bodies


def offered(running: Running, bodies: Sequence[Mapping[str, Any]], *, limit_s: float, **how: Any) -> Row:
    """Put a load on a server, as `Load` takes it in ``how``: what came of it."""
    load = Load(running.url, bodies, path=running.server.path, **how)
    outcome = asyncio.run(offer(load))
    short = {number for number, body in enumerate(load.requests) if body.get("max_new_tokens", LONG) <= SHORT[1]}
    answered = len(outcome.latency_s)
    row: dict[str, Any] = {
        "measured": "open loop" if load.clients is None else "closed loop", "forced": False,
        "seconds": load.seconds, "answered": answered, "unanswered": outcome.statuses.total() - answered,
        "answers_per_s": answered / outcome.wall_s, "goodput_per_s": outcome.goodput_per_s(limit_s), "limit_s": limit_s,
        "tokens_per_s": outcome.tokens / outcome.wall_s, "generator_cpu": outcome.generator_cpu,
        "sent_late_s": outcome.sent_late_s,
    }  # fmt: skip
    row |= {"rate_per_s": load.rate_per_s} if load.clients is None else {"clients": load.clients}
    if answered:
        row |= {"p50_s": outcome.percentile_s(50), "p99_s": outcome.percentile_s(99)}
        if short & {*outcome.asked}:
            row["short_p99_s"] = outcome.percentile_s(99, among=short)
    if outcome.first_s and load.requests[0].get("stream"):
        row |= {"first_p50_s": float(np.percentile(outcome.first_s, 50)),
                "first_p99_s": float(np.percentile(outcome.first_s, 99))}  # fmt: skip
    return {key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()}


def one_by_one(running: Running, bodies: Sequence[Mapping[str, Any]], *, unmeasured: int = 2) -> Row:
    """One request after the other: each one's seconds, their mean and deviation.

    Args:
        unmeasured: so many are sent beforehand, the first ones again, to a server that has not met this length.
    """
    url, times = running.url + running.server.path, []
    for body in (*bodies[:unmeasured], *bodies):
        began = time.perf_counter()
        ask(url, body)
        times.append(round(time.perf_counter() - began, 6))
    times = times[unmeasured:]
    return {
        "measured": "sequential", "batch": 1, "latency_s": times, "mean_s": fmean(times), "deviation_s": stdev(times),
        "p99_s": float(np.percentile(times, 99)),
    }  # fmt: skip


def keeps_up(row: Mapping[str, Any]) -> bool:
    """Whether 99 of 100 were answered, and within the limit."""
    return row["unanswered"] <= row["answered"] // 99 and row.get("p99_s", np.inf) <= row["limit_s"]


def knee(rows: Iterable[Mapping[str, Any]]) -> float:
    """The highest rate of these points at which a server kept up, with all below it; 0 if there is none.

    Of a rate that was offered twice the better time counts: what else a machine does can only be in the way.
    """
    kept: dict[float, bool] = {}
    for row in rows:
        kept[row["rate_per_s"]] = kept.get(row["rate_per_s"], False) or keeps_up(row)
    below = itertools.takewhile(lambda rate: kept[rate], sorted(kept))
    return max(below, default=0.0)


def knee_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The knee of a server's points in words: with a sign where it kept up at the highest rate that was tried."""
    found = knee(rows)
    return "≥ " * (found == max(row["rate_per_s"] for row in rows)) + f"{found:.3g}"


def swept(point: Callable[[float], Row], start: float, *, step: float = STEP, most: int = MOST_POINTS) -> Iterator[Row]:
    """Points of a curve around the knee: upward until the server no longer keeps up, or downward until it does.

    Downward by two steps at a time, and then one up again, so that the knee is known to one step in any case. Where it
    does not keep up a point is measured twice.
    """
    kept: list[bool] = []

    def tried(rate: float) -> Iterator[Row]:
        for _ in range(2):
            row = point(rate)
            yield row
            kept.append(keeps_up(row))
            if kept[-1]:
                return

    yield from tried(start)
    up, rate = kept[-1], start
    for _ in range(1, most):
        rate = rate * step if up else rate / step**2
        yield from tried(rate)
        if kept[-1] != up:
            break
    if not up and kept[-1]:
        yield from tried(rate * step)


def curve(
    running: Running, bodies: Sequence[Mapping[str, Any]], *, limit_s: float, seconds: float = 8.0, clients: int = 16,
    most: int = MOST_POINTS, fewest: int = FEWEST_ANSWERS,
) -> Iterator[Row]:  # fmt: skip
    """A server under the closed loop, and at rising rates of the open one, up to its knee.

    Args:
        seconds: of each point, and longer where few requests come.
        clients: of the closed loop, whose throughput is where the sweep begins, halved.
        fewest: answers of each, for which it may take longer.
    """
    closed = offered(running, bodies, limit_s=limit_s, clients=clients, seconds=seconds)
    yield closed
    if not closed["answered"]:
        raise InputError(f"{running.server.name} answered nothing: {closed}")

    def point(rate: float) -> Row:
        longer = max(seconds, min(fewest / rate, MOST_SECONDS))
        return offered(running, bodies, limit_s=limit_s, rate_per_s=rate, seconds=longer)

    yield from swept(point, closed["answers_per_s"] / 2, most=most)


def knees(rows: Sequence[Mapping[str, Any]], model: str) -> dict[str, float]:
    """By system, in the order of the rows."""
    points = [*filter_rows(rows, measured="open loop", cell="curve", model=model)]
    return {name: knee(filter_rows(points, system=name)) for name in dict.fromkeys(row["system"] for row in points)}


def table(rows: Sequence[Mapping[str, Any]], model: str) -> str:
    """A line for each server: its knee, that over the baseline's, and its times when nobody else asks."""
    found = knees(rows, model)
    alone = [*filter_rows(rows, measured="sequential", model=model)]
    lengths = sorted({row["source_tokens"] for row in alone})
    lines = [("server", "knee, /s", "over the baseline", *(f"{length} tokens" for length in lengths))]
    for name, rate in found.items():
        base = found.get(BASELINE)
        times = []
        for length in lengths:
            row = next(filter_rows(alone, system=name, source_tokens=length), None)
            times.append(f"{row['mean_s'] * 1e3:.1f} ± {row['deviation_s'] * 1e3:.1f} ms" if row else "–")
        points = [*filter_rows(rows, measured="open loop", cell="curve", model=model, system=name)]
        lines.append((name, knee_text(points), f"{rate / base:.1f}x" if base else "–", *times))
    return "\n".join(format_table(lines))


def targets(rows: Sequence[Mapping[str, Any]], model: str) -> list[tuple[str, str, float]]:
    """What a server of ours should reach, and what was measured; of what was not measured there is no entry.

    Nor is there one beside a server whose knee was not reached; where ours was not, the entry is the least it can be.
    """
    found, of_model = knees(rows, model), [*filter_rows(rows, model=model)]
    points = [*filter_rows(of_model, measured="open loop", cell="curve")]
    reached = {
        name: rate for name, rate in found.items() if not knee_text([*filter_rows(points, system=name)]).startswith("≥")
    }

    def row(measured: str, **more: Any) -> Mapping[str, Any]:
        return next(filter_rows(of_model, measured=measured, **{"system": OURS, **more}), {})

    def short_p99_s(system: str) -> float | None:
        rows = filter_rows(of_model, measured="open loop", cell="short beside long", system=system)
        return median(times) if (times := [row["short_p99_s"] for row in rows]) else None

    alone = [row("sequential", source_tokens=length) for length in (512, 32)]
    values = [
        ("knee over the baseline's", ">= 10", _ratio(found.get(OURS), reached.get(BASELINE))),
        ("knee over that of static batches", ">= 1.5", _ratio(found.get(OURS), reached.get(STATIC))),
        ("p99 of short answers beside long ones, of static batches over ours", ">= 3",
         _ratio(short_p99_s(STATIC), short_p99_s(OURS))),
        ("p99 of 512 source tokens over that of 32", "<= 3", _ratio(*(one.get("p99_s") for one in alone))),
        ("throughput with streams over that without", ">= 0.95", row("streaming").get("ratio")),
        ("ready after a kill, s", "<= 3", row("restart").get("seconds")),
        ("hostile requests without an answer", "<= 0", row("hostile").get("unanswered")),
    ]  # fmt: skip
    return [(what, wanted, value) for what, wanted, value in values if value is not None]


def is_met(wanted: str, value: float) -> bool:
    """Whether a measured value is what `targets` wants."""
    sign, bound = wanted.split()
    return value >= float(bound) if sign == ">=" else value <= float(bound)


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None
