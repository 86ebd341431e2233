"""Cost of very large jobs, and simulated fleets of servers."""

# Speeds are measured on two threads of one machine. That many such machines, or all cores of a larger one, do as well
# is an assumption.

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import expm1
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import simpy

from bench import evaluation
from bench.results import filter_rows, format_table, load_results
from bench.serving.rates import keeps_up, knees
from bench.serving.servers import Asked, together
from t5accel.checks import as_count
from t5accel.decoding.backend import Backend
from t5accel.errors import InputError

# Simulated servers with continuous batching. A replica works in rounds, as `serve.scheduler` does: waiting jobs join
# while there are rows, and every row gets a token. A router knows how many jobs each replica has. A replica that fails
# loses its batch and its queue; those jobs start again elsewhere, and nothing more comes until the replica is back.
# Events are SimPy's (Team SimPy, simpy.readthedocs.io).


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
    """Result of a simulation."""

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
    """Simulate a Poisson process of jobs for so many seconds, until the last job is answered.

    ``rate_per_s`` is for all replicas together; the new tokens of a job are drawn from ``tokens``. The router draws
    ``looked_at`` replicas and takes the one with the fewest jobs: two do nearly as well as all (Mitzenmacher 2001, The
    Power of Two Choices in Randomized Load Balancing). Where all of them are down, a job goes to one that is up.
    """
    for name, count in (("replicas", replicas), ("looked_at", looked_at), ("pace.rows", pace.rows)):
        as_count(count, name, at_least=1)
    if not (rate_per_s > 0 and seconds > 0 and pace.step_s > 0 and tokens and min(tokens) > 0):
        given = f"{rate_per_s}, {seconds}, {pace.step_s} and {tokens!r:.60}"
        raise InputError(f"rate_per_s, seconds, pace.step_s and tokens must be numbers above 0, got {given}.")
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


# Prices and failures are assumptions of November 2026: round numbers, in the range of what clouds ask.
STORAGE = 0.023  # dollars a month for 10^9 stored bytes
BYTES_PER_TOKEN = 4  # of English in a vocabulary of 32,000, where random weights have no text
SHARD_ROWS = 2000  # of a job this large: `serve.batch.job.JobSettings` has smaller ones, for machines that fail often


@dataclass(frozen=True)
class Speed:
    """Measured speed for one kind of text."""

    name: str
    texts_per_s: float  # of all threads together
    tokens_per_s: float  # new ones
    threads: int
    read_bytes: float  # of a text, in its file
    written_bytes: float  # of its answer
    file: str  # of the recorded row


@dataclass(frozen=True)
class MachinePrice:
    """An assumed machine."""

    name: str
    cores: int
    dollars_per_h: float
    fails_every_h: float  # in the mean


MACHINE_PRICES = (
    MachinePrice("by the hour", 32, 1.60, 2000.0),
    MachinePrice("may be taken back", 32, 0.60, 12.0),
    MachinePrice("by the month", 48, 0.60, 2000.0),
)


def job_cost(speed: Speed, machine: MachinePrice, texts: int, *, shard_rows: int = SHARD_ROWS) -> dict[str, float]:
    """Cost of a job on machines that fail at random moments (a Poisson process), repeated shards included.

    A shard of T hours on a machine that fails every M hours succeeds at once with probability exp(-T / M). It is begun
    exp(T / M) times in the mean, and takes M * (exp(T / M) - 1) hours instead of T: a failure destroys the running
    shard. ``shard_s`` is of one worker with the measured threads, ``storage_dollars`` a month's, for input and output.
    """
    as_count(texts, "texts", at_least=1)
    shard_s = shard_rows / speed.texts_per_s
    exposed = shard_s / 3600 / machine.fails_every_h
    machine_hours = texts / speed.texts_per_s / 3600 * speed.threads / machine.cores * (expm1(exposed) / exposed)
    stored_bytes = texts * (speed.read_bytes + speed.written_bytes)
    return {
        "machine_hours": machine_hours,
        "dollars": machine_hours * machine.dollars_per_h,
        "stored_bytes": stored_bytes,
        "storage_dollars": stored_bytes / 1e9 * STORAGE,
        "shard_s": shard_s,
        "repeated_shards": -(-texts // shard_rows) * expm1(exposed),  # in the mean
        "read_bytes_per_s": speed.texts_per_s / speed.threads * machine.cores * speed.read_bytes,  # of all cores
    }


def speeds() -> list[Speed]:
    """The recorded speeds, from short texts to long ones."""
    jobs = filter_rows(load_results("batch.json")["rows"], measured="job", system="t5accel batch")
    row = max(jobs, key=lambda row: row["texts"])
    found = [Speed(
        f"a sentence ({row['model']}, {row['precision']})", row["answers_per_s"], row["tokens_per_s"],
        row["threads"], row["input_bytes"] / row["texts"], row["output_bytes"] / row["texts"], "batch.json",
    )]  # fmt: skip
    (row,) = filter_rows(load_results("ladder-amd.json")["rows"], rung="student, batches")
    reports = evaluation.rows("summaries")
    read = sum(len(one["source"].encode()) for one in reports) / len(reports)
    answer = sum(len(one["references"][0].encode()) for one in reports) / len(reports)
    found.append(Speed(
        f"a report ({row['model']}, {row['precision']})", row["texts"] / median(row["latency_s"]),
        row["tokens_per_s"], row["threads"], read, read + answer, "ladder-amd.json",
    ))  # fmt: skip
    peers = load_results("peers-amd.json")["rows"]
    (row,) = filter_rows(peers, system="t5accel int8", batch=32, source_tokens=512, beams=1)
    read, answer = (row[key] * BYTES_PER_TOKEN for key in ("source_tokens", "new_tokens"))
    found.append(Speed(
        "512 tokens (t5-small's size, int8)", row["batch"] / median(row["latency_s"]), row["tokens_per_s"],
        row["threads"], read, read + answer, "peers-amd.json",
    ))  # fmt: skip
    return found


def costs(found: Sequence[Speed], texts: int = 10**9, machines: Sequence[MachinePrice] = MACHINE_PRICES) -> str:
    """A table: a line for each kind of text on each kind of machine, with the bytes a machine reads a second."""
    lines = [("texts", "on machines", "core hours", "$", "TB", "$ a month", "shard, s", "begun again", "MB/s")]
    for speed in found:
        for machine in machines:
            one = job_cost(speed, machine, texts)
            lines.append((
                speed.name, machine.name, f"{one['machine_hours'] * machine.cores:,.0f}", f"{one['dollars']:,.0f}",
                f"{one['stored_bytes'] / 1e12:.2f}", f"{one['storage_dollars']:.0f}", f"{one['shard_s']:.1f}",
                f"{one['repeated_shards']:,.1f}", f"{one['read_bytes_per_s'] / 1e6:.1f}",
            ))  # fmt: skip
    return "\n".join(format_table(lines, left=(0, 1), rule=True))


def measured_speeds(found: Sequence[Speed]) -> str:
    """A table of the speeds below the costs."""
    lines = [("texts", "texts/s, a core", "new tokens/s, a core", "bytes read", "written", "from")]
    for one in found:
        a_core = (f"{one.texts_per_s / one.threads:.1f}", f"{one.tokens_per_s / one.threads:.0f}")
        lines.append((one.name, *a_core, f"{one.read_bytes:.0f}", f"{one.written_bytes:.0f}", one.file))
    return "\n".join(format_table(lines, left=(0, 5), rule=True))


def knee(
    pace: Pace, tokens: Sequence[int], limit_s: float, *, replicas: int = 1, seconds: float = 30.0,
    failures: Failures | None = None, closer: int = 5,
) -> dict[str, Any]:  # fmt: skip
    """The highest rate at which 99 of 100 simulated answers come within a limit, as the row of that load.

    ``limit_s`` counts from a job's arrival to its last token. The range between a rate that is kept up with and a rate
    that is too high is halved ``closer`` times.
    """

    def load(rate_per_s: float) -> dict[str, Any]:
        found = simulate(pace, rate_per_s, tokens, replicas=replicas, seconds=seconds, failures=failures).latency_s
        p99 = float(np.percentile(found, 99)) if found else np.inf
        return {"measured": "simulation", "rate_per_s": rate_per_s, "answered": len(found), "unanswered": 0,
                "limit_s": limit_s, "p99_s": round(p99, 4)}  # fmt: skip

    mean = sum(tokens) / len(tokens)
    capacity = replicas / ((pace.step_s / pace.rows + pace.row_s) * mean + pace.join_s)
    low, high = capacity / 100, capacity
    found = load(low)
    if not keeps_up(found):
        raise InputError(f"limit_s must be more than {found['p99_s']}, which is p99 at {low:.3g} jobs a second.")
    for _ in range(closer):
        row = load((low + high) / 2)
        if keeps_up(row):
            low, found = row["rate_per_s"], row
        else:
            high = row["rate_per_s"]
    return found


def measured_pace(backend: Backend, tokenizer: Any, text: str, *, repeats: int = 5) -> Pace:
    """Measure a step, what each row adds, and what a new job with this text adds.

    Medians of whole answers of 40 tokens and of 8, by one row and by 16; a first token is a new job and a step.
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


def knees_table() -> str:
    """The recorded knees: the measured one of the serving chapter beside the simulated ones."""
    rows = load_results("scale.json")["rows"]
    served = f"{knees(load_results('serving.json')['rows'], 'mini')['t5accel serve']:.0f}"
    lines = [("replicas", "requests/s", "for each", "p99 there, s", "where they fail")]
    lines.append(("1, measured", served, served, "–", "–"))
    simulated = [*filter_rows(rows, measured="simulation")]
    failing = {row["settings"]["replicas"]: row["rate_per_s"] for row in simulated if "every_s" in row["settings"]}
    for row in simulated:
        count = row["settings"]["replicas"]
        if "every_s" not in row["settings"]:
            lines.append((
                f"{count:,}, simulated", f"{row['rate_per_s']:,.0f}", f"{row['rate_per_s'] / count:.0f}",
                f"{row['p99_s']:.2f}", f"{failing[count]:,.0f}" if count in failing else "–",
            ))  # fmt: skip
    return "\n".join(format_table(lines, rule=True))
