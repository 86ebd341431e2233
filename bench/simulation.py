"""Servers that answer in running batches, simulated: queues, replicas and failures, from the times of a measured round.

A replica works in rounds, as `serve.scheduler` does: whoever waits joins while there are rows, and every row gets a
token. A router knows how many jobs each replica has. One that fails loses its batch and its queue; all of that is sent
to others, from the beginning, and nothing more comes until the replica is back. Events are SimPy's (Team SimPy,
simpy.readthedocs.io).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import simpy

from t5accel.checks import as_count
from t5accel.errors import InputError


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
