"""What very many texts cost, and how many replicas hold a rate: arithmetic on recorded rows, beside named assumptions.

Speeds are measured on two threads of one machine. That many such machines, or all cores of a larger one, do as well is
an assumption, as are prices and failures: they are parameters, with their date, and nobody measured them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, expm1
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import simpy

from bench import tasks
from bench.results import aligned, chosen, recorded
from bench.serving.rates import keeps_up, knees
from bench.serving.servers import Asked, together
from t5accel.checks import as_count
from t5accel.decoding.backend import Backend
from t5accel.errors import InputError

# Servers that answer in running batches, simulated: queues, replicas and failures, from the times of a measured
# round.
# A replica works in rounds, as `serve.scheduler` does: whoever waits joins while there are rows, and every row gets a
# token. A router knows how many jobs each replica has. One that fails loses its batch and its queue; all of that is
# sent to others, from the beginning, and nothing more comes until the replica is back. Events are SimPy's (Team
# SimPy, simpy.readthedocs.io).


@dataclass(frozen=True)
class Pace:
    """A round takes ``step_s``, ``row_s`` more for each row that takes part, and ``join_s`` for each that joins."""

    step_s: float
    row_s: float = 0.0
    join_s: float = 0.0
    rows: int = 32  # at most


@dataclass(frozen=True)
class Failures:
    """Of each replica, at random moments, ``every_s`` apart in the mean; it is back after ``restart_s``."""

    every_s: float
    restart_s: float


@dataclass
class Outcome:
    """What became of the jobs."""

    latency_s: list[float] = field(default_factory=list)  # from arrival to last token, in the order of their ends
    repeated: int = 0  # how often a job was sent again since its replica had failed
    failures: int = 0  # of replicas


@dataclass(eq=False)
class _Job:
    came_s: float
    tokens: int
    left: int = 0


class _Replica:
    def __init__(self, environment: simpy.Environment, pace: Pace, outcome: Outcome, send: Callable[[_Job], None]):
        self.environment, self.pace, self.outcome, self.send = environment, pace, outcome, send
        self.waiting: deque[_Job] = deque()
        self.running: list[_Job] = []
        self.is_up, self.news = True, environment.event()
        self.process = environment.process(self._work())

    def take(self, job: _Job) -> None:
        job.left = job.tokens
        self.waiting.append(job)
        if not self.news.triggered:
            self.news.succeed()

    def _work(self) -> Iterator[simpy.Event]:
        while True:
            try:
                yield from self._rounds()
            except simpy.Interrupt as failure:
                lost, self.running, self.waiting, self.is_up = [*self.running, *self.waiting], [], deque(), False
                self.outcome.failures += 1
                self.outcome.repeated += len(lost)
                for job in lost:
                    self.send(job)
                yield self.environment.timeout(failure.cause)
                self.is_up = True

    def _rounds(self) -> Iterator[simpy.Event]:
        while True:
            if not (self.waiting or self.running):
                self.news = self.environment.event()
                yield self.news
            pace, joining = self.pace, min(len(self.waiting), self.pace.rows - len(self.running))
            self.running += [self.waiting.popleft() for _ in range(joining)]
            yield self.environment.timeout(pace.step_s + pace.row_s * len(self.running) + pace.join_s * joining)
            for job in self.running:
                job.left -= 1
                if not job.left:
                    self.outcome.latency_s.append(self.environment.now - job.came_s)
            self.running = [job for job in self.running if job.left]


def simulate(
    pace: Pace, rate_per_s: float, tokens: Sequence[int], *, replicas: int = 1, seconds: float = 30.0,
    looked_at: int = 2, failures: Failures | None = None, seed: int = 0,
) -> Outcome:  # fmt: skip
    """Jobs at random moments (a Poisson process) for so many seconds, until the last of them is answered.

    Args:
        pace: of a replica.
        rate_per_s: of jobs, for all replicas together.
        tokens: new tokens of a job, drawn from these.
        looked_at: replicas that the router draws; it takes the one with the fewest jobs. Two do nearly as well as all
            (Mitzenmacher 2001, The Power of Two Choices in Randomized Load Balancing). A job for which all of them are
            down goes to whichever is up, or waits.

    Raises:
        InputError: a number is not above 0, or there are no tokens.

    >>> calm, rush = (simulate(Pace(step_s=0.002, rows=8), rate, tokens=[20]).latency_s for rate in (10.0, 190.0))
    >>> sum(calm) / len(calm) < 0.045 < sum(rush) / len(rush)
    True
    """
    for name, count in (("replicas", replicas), ("looked_at", looked_at), ("pace.rows", pace.rows)):
        as_count(count, name, at_least=1)
    if not (rate_per_s > 0 and seconds > 0 and pace.step_s > 0 and tokens and min(tokens) > 0):
        given = f"rate_per_s {rate_per_s}, seconds {seconds}, step_s {pace.step_s}, tokens {tokens!r:.60}"
        raise InputError(f"{given}: give numbers above 0.")
    rng, environment, outcome = random.Random(seed), simpy.Environment(), Outcome()

    def send(job: _Job) -> None:
        drawn = [replica for replica in rng.sample(house, min(looked_at, replicas)) if replica.is_up]
        there = drawn or [replica for replica in house if replica.is_up] or house  # who is down has a queue, too
        min(there, key=lambda replica: len(replica.waiting) + len(replica.running)).take(job)

    house = [_Replica(environment, pace, outcome, send) for _ in range(replicas)]

    def arrivals() -> Iterator[simpy.Event]:
        yield environment.timeout(rng.expovariate(rate_per_s))
        while environment.now < seconds:
            send(_Job(environment.now, rng.choice(tokens)))
            yield environment.timeout(rng.expovariate(rate_per_s))

    def failing(replica: _Replica, failures: Failures) -> Iterator[simpy.Event]:
        yield environment.timeout(rng.expovariate(1 / failures.every_s))
        while environment.now < seconds:
            replica.process.interrupt(failures.restart_s)
            yield environment.timeout(failures.restart_s + rng.expovariate(1 / failures.every_s))

    environment.process(arrivals())
    for replica in house if failures else ():
        environment.process(failing(replica, failures))
    environment.run()
    return outcome


ASSUMED = "November 2026"  # of prices and failures: round numbers, in the range of what clouds ask
STORAGE = 0.023  # dollars a month for 10^9 bytes that lie there
BYTES_PER_TOKEN = 4  # of English in a vocabulary of 32,000, where random weights have no text
SHARD_ROWS = 2000  # of a job this large: `serve.batch.job.Settings` has smaller ones, for machines that fail often


@dataclass(frozen=True)
class Speed:
    """How fast texts of a kind were answered.

    Attributes:
        texts_per_s, tokens_per_s: of all threads together; tokens are new ones.
        read_bytes, written_bytes: of a text and its answer, as they lie in files.
        file: of the recorded row.
    """

    name: str
    texts_per_s: float
    tokens_per_s: float
    threads: int
    read_bytes: float
    written_bytes: float
    file: str


@dataclass(frozen=True)
class Rent:
    """A machine, as it is assumed: its cores, dollars an hour, and hours from one failure to the next, in the mean."""

    name: str
    cores: int
    dollars_per_h: float
    fails_every_h: float


RENTS = (
    Rent("by the hour", 32, 1.60, 2000.0),
    Rent("may be taken back", 32, 0.60, 12.0),
    Rent("by the month", 48, 0.60, 2000.0),
)


@dataclass(frozen=True)
class Bill:
    """What a job takes.

    Attributes:
        shard_s: of one shard on one worker, which has as many threads as were measured.
        repeated: of all shards, how many are begun once more, in the mean.
        dollars: for the machines, what is repeated included.
        read_bytes_per_s: of one machine, all cores at work.
    """

    core_hours: float
    machine_hours: float
    dollars: float
    shards: int
    shard_s: float
    repeated: float
    read_bytes: float
    written_bytes: float
    read_bytes_per_s: float

    @property
    def storage_dollars(self) -> float:
        """A month, for input and output."""
        return (self.read_bytes + self.written_bytes) / 1e9 * STORAGE


def bill(speed: Speed, rent: Rent, texts: int, *, shard_rows: int = SHARD_ROWS) -> Bill:
    """What so many texts take on machines of a kind that fail at random moments (a Poisson process).

    A shard of T hours on a machine that fails every M hours succeeds at once with probability exp(-T / M). It is begun
    exp(T / M) times in the mean, and takes M * (exp(T / M) - 1) hours instead of T: what a failure destroys is the
    shard that was being answered.

    >>> speed = Speed("short", 100.0, 700.0, threads=2, read_bytes=50, written_bytes=80, file="")
    >>> found = bill(speed, Rent("rented", 32, 1.6, 2000.0), 10**9)
    >>> round(found.core_hours), round(found.machine_hours), round(found.dollars), found.shard_s
    (5556, 174, 278, 20.0)
    """
    as_count(texts, "texts", at_least=1)
    shard_s = shard_rows / speed.texts_per_s
    exposed = shard_s / 3600 / rent.fails_every_h
    hours = texts / speed.texts_per_s / 3600 * speed.threads * (expm1(exposed) / exposed)  # of a core
    machine_hours, shards = hours / rent.cores, -(-texts // shard_rows)
    return Bill(
        hours, machine_hours, machine_hours * rent.dollars_per_h, shards, shard_s, shards * expm1(exposed),
        texts * speed.read_bytes, texts * speed.written_bytes,
        speed.texts_per_s / speed.threads * rent.cores * speed.read_bytes,
    )  # fmt: skip


def attempts(hours: float, fails_every_h: float) -> float:
    """How often something of so many hours is begun until it is done once, if a failure loses all of it.

    >>> round(attempts(1, 12), 3), round(attempts(48, 12))
    (1.087, 55)
    """
    return exp(hours / fails_every_h)


def speeds() -> list[Speed]:
    """What is recorded, from short texts to long ones; what is not recorded is missing."""
    found = []
    jobs = [*chosen(recorded("batch.json")["rows"], measured="job", system="t5accel batch")]
    if jobs:
        row = max(jobs, key=lambda row: row["texts"])
        found.append(Speed(
            f"a sentence ({row['model']}, {row['precision']})", row["answers_per_s"], row["tokens_per_s"],
            row["threads"], row["input_bytes"] / row["texts"], row["output_bytes"] / row["texts"], "batch.json",
        ))  # fmt: skip
    ladder = chosen(recorded("ladder.json")["rows"], rung="student, batches")
    for row in ladder:
        reports = tasks.rows("summaries")
        read = sum(len(one["source"].encode()) for one in reports) / len(reports)
        answer = sum(len(one["references"][0].encode()) for one in reports) / len(reports)
        found.append(Speed(
            f"a report ({row['model']}, {row['precision']})", row["texts"] / median(row["latency_s"]),
            row["tokens_per_s"], row["threads"], read, read + answer, "ladder.json",
        ))  # fmt: skip
    peers = recorded("peers-cpu.json")["rows"]
    for row in chosen(peers, system="t5accel int8", batch=32, source_tokens=512, beams=1):
        read, answer = (row[key] * BYTES_PER_TOKEN for key in ("source_tokens", "new_tokens"))
        found.append(Speed(
            "512 tokens (t5-small's size, int8)", row["batch"] / median(row["latency_s"]), row["tokens_per_s"],
            row["threads"], read, read + answer, "peers-cpu.json",
        ))  # fmt: skip
    return found


def costs(found: Sequence[Speed], texts: int = 10**9, rents: Sequence[Rent] = RENTS) -> str:
    """A table: a line for each kind of text on each kind of machine, with what one machine reads a second."""
    lines = [("texts", "on machines", "core hours", "$", "TB", "$ a month", "shard, s", "begun again", "MB/s")]
    for speed in found:
        for rent in rents:
            one = bill(speed, rent, texts)
            lines.append((
                speed.name, rent.name, f"{one.core_hours:,.0f}", f"{one.dollars:,.0f}",
                f"{(one.read_bytes + one.written_bytes) / 1e12:.2f}", f"{one.storage_dollars:.0f}",
                f"{one.shard_s:.1f}", f"{one.repeated:,.1f}", f"{one.read_bytes_per_s / 1e6:.1f}",
            ))  # fmt: skip
    return "\n".join(aligned(lines, left=(0, 1), rule=True))


def measured_speeds(found: Sequence[Speed]) -> str:
    """A table of what the costs rest on."""
    lines = [("texts", "texts/s, a core", "new tokens/s, a core", "bytes read", "written", "from")]
    for one in found:
        a_core = (f"{one.texts_per_s / one.threads:.1f}", f"{one.tokens_per_s / one.threads:.0f}")
        lines.append((one.name, *a_core, f"{one.read_bytes:.0f}", f"{one.written_bytes:.0f}", one.file))
    return "\n".join(aligned(lines, left=(0, 5), rule=True))


def simulated(pace: Pace, rate_per_s: float, tokens: Sequence[int], limit_s: float, **how: Any) -> dict[str, Any]:
    """A simulated load as a row, with the keys of a measured one. ``how`` is as of `simulation.simulate`."""
    outcome = simulate(pace, rate_per_s, tokens, **how)
    p99 = float(np.percentile(outcome.latency_s, 99)) if outcome.latency_s else np.inf
    return {"measured": "simulation", "rate_per_s": rate_per_s, "answered": len(outcome.latency_s), "unanswered": 0,
            "limit_s": limit_s, "p99_s": round(p99, 4)}  # fmt: skip


def knee(
    pace: Pace, tokens: Sequence[int], limit_s: float, *, replicas: int = 1, seconds: float = 30.0,
    failures: Failures | None = None, closer: int = 5,
) -> dict[str, Any]:  # fmt: skip
    """The highest rate at which 99 of 100 simulated answers come within a limit, as the row of that load.

    Args:
        pace, tokens, replicas, seconds, failures: as of `simulation.simulate`.
        limit_s: from a job's arrival to its last token.
        closer: how often the range between a rate that is kept up with and one that is not is halved.

    Raises:
        InputError: not even a hundredth of the capacity is kept up with.

    >>> row = knee(Pace(0.002, row_s=0.0001, rows=8), [20], 0.5, seconds=10)
    >>> 100 < row["rate_per_s"] < 8 / (20 * 0.0028) and row["p99_s"] <= 0.5
    True
    """
    mean = sum(tokens) / len(tokens)
    capacity = replicas / ((pace.step_s / pace.rows + pace.row_s) * mean + pace.join_s)
    low, high, found = capacity / 100, capacity, None
    for halving in range(closer + 1):
        rate = (low + high) / 2 if halving else low
        row = simulated(pace, rate, tokens, limit_s, replicas=replicas, seconds=seconds, failures=failures)
        if keeps_up(row):
            low, found = rate, row
        elif halving:
            high = rate
        else:
            raise InputError(
                f"limit_s is {limit_s}, and p99 is {row['p99_s']} s at {rate:.3g} jobs a second: give more."
            )
    return found


def measured_pace(backend: Backend, tokenizer: Any, text: str, *, repeats: int = 5) -> Pace:
    """What a step costs on this machine, how much more for each row, and what a newcomer with this text takes.

    Medians of whole answers of 40 tokens and of 8, by one row and by 16; a first token is a newcomer and a step.

    >>> from t5accel.api import open_backend
    >>> backend, tokenizer, _ = open_backend("mini", progress=False)
    >>> pace = measured_pace(backend, tokenizer, "translate English to French: I am tired.", repeats=1)
    >>> pace.rows, 0 < pace.step_s < 1
    (32, True)
    """

    def seconds(rows: int, new: int) -> float:
        times = []
        for _ in range(repeats):
            began = perf_counter()
            together(backend, tokenizer, [Asked(text, new, new)] * rows)
            times.append(perf_counter() - began)
        return median(times)

    one, many = ((seconds(rows, 40) - seconds(rows, 8)) / 32 for rows in (1, 16))
    row_s = max((many - one) / 15, 0.0)
    return Pace(one - row_s, row_s, max(seconds(1, 1) - one, 0.0))


def pace_of(row: Mapping[str, Any]) -> Pace:
    """Of a recorded row."""
    return Pace(**{key: row["settings"][key] for key in ("step_s", "row_s", "join_s", "rows")})


def knees_table() -> str:
    """Simulated knees beside the measured one of the serving chapter, from what is recorded."""
    rows = recorded("scale.json")["rows"]
    served = knees(recorded("serving.json")["rows"], "mini").get("t5accel serve")
    lines = [("replicas", "requests/s", "for each", "p99 there, s", "where they fail")]
    lines.append(("1, measured", *((f"{served:.0f}",) * 2 if served else ("not recorded yet", "–")), "–", "–"))
    calm = [row for row in chosen(rows, measured="simulation") if "every_s" not in row["settings"]]
    for row in calm:
        count = row["settings"]["replicas"]
        same = [one["settings"] for one in rows if one["settings"].get("replicas") == count]
        failing = next((one for one in rows if one["settings"] in same and "every_s" in one["settings"]), None)
        lines.append((
            f"{count:,}, simulated", f"{row['rate_per_s']:,.0f}", f"{row['rate_per_s'] / count:.0f}",
            f"{row['p99_s']:.2f}", f"{failing['rate_per_s']:,.0f}" if failing else "–",
        ))  # fmt: skip
    return "\n".join(aligned(lines, rule=True))
