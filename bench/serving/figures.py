"""A running batch, watched: who has which row at which step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from t5accel.decoding.backend import Backend
from t5accel.serve.limits import SchedulerLimits
from t5accel.serve.request import GenerationRequest
from t5accel.serve.scheduler import Scheduler


@dataclass(frozen=True)
class Watched:
    """A batch over time."""

    steps: list[list[int]]  # for each step the job in each row, by its place in the list of jobs
    came: list[int]  # for each job the step before which it came, and the one after which its answer was handed out
    done: list[int]

    @property
    def spans(self) -> list[tuple[int, int, int, int]]:
        """For each job the steps at which it came, had a row, had its last token and was handed out.

        >>> Watched([[0], [0, 1], [0]], [0, 1], [3, 3]).spans
        [(0, 0, 3, 3), (1, 1, 2, 3)]
        """
        busy = [[step for step, row in enumerate(self.steps) if job in row] for job in range(len(self.came))]
        return [(came, had[0], had[-1] + 1, done) for came, had, done in zip(self.came, busy, self.done, strict=True)]


class _Static:
    """A backend that nobody may join while it runs."""

    def __init__(self, backend: Backend):
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        if name == "add_sources":
            raise AttributeError(name)
        return getattr(self._backend, name)


def watch(
    backend: Backend, jobs: Sequence[tuple[int, GenerationRequest]], *, rows: int = 4, static: bool = False
) -> Watched:
    """Run jobs that come at given steps, and note after each step who had which row.

    Args:
        backend: with ``add_sources``.
        jobs: each with the step before which it comes, in order.
        static: those that are there form a batch, nobody joins it, and its answers are handed out when all are done.
    """
    steps: list[list[int]] = []

    def observe(name: str, value: float) -> None:
        if name == "step_s":  # before those leave who have ended
            steps.append([number - 1 for number in scheduler.places])

    scheduler = Scheduler(
        _Static(backend) if static else backend, SchedulerLimits(rows=rows), observe=observe, thread=False
    )
    waiting, tickets = [*jobs], []
    while waiting or not all(ticket.is_done for ticket in tickets):
        while waiting and waiting[0][0] <= len(steps):
            tickets.append(scheduler.submit(waiting.pop(0)[1]))
        count = len(steps)
        scheduler.step()
        if len(steps) == count:
            steps.append([])  # nobody was there
    done = [max(number for number, step in enumerate(steps) if job in step) + 1 for job in range(len(jobs))]
    if static:  # the batch ends with its longest answer
        done = [_end_of_batch(steps, number) for number in done]
    return Watched(steps, [came for came, _ in jobs], done)


def _end_of_batch(steps: Sequence[Sequence[int]], number: int) -> int:
    while number < len(steps) and set(steps[number]) & set(steps[number - 1]):
        number += 1
    return number
