"""Pictures of serving: who has which row of a running batch at which step, and what a server takes at which rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.results import filter_rows
from t5accel.decoding.backend import Backend
from t5accel.serve.limits import SchedulerLimits
from t5accel.serve.request import GenerationRequest
from t5accel.serve.scheduler import Scheduler

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#2a6f97", "#e09f3e", "#2a9d8f", "#c1666b", "#7b5ea7", "#8d99ae", "#6b8f71", "#bc8034")


@dataclass(frozen=True)
class Watched:
    """A batch over time."""

    steps: list[list[int]]  # for each step the job in each row, by its place in the list of jobs
    came: list[int]  # for each job the step before which it came, and the one after which its answer was handed out
    done: list[int]

    @property
    def mean_wait(self) -> float:
        """Steps from a request to its answer."""
        return sum(done - came for done, came in zip(self.done, self.came, strict=True)) / len(self.done)

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


def draw_places(axes: Axes, watched: Watched, *, rows: int = 4, title: str = "") -> None:
    """Rows over steps: a colour for each job, and its number where it begins.

    >>> from matplotlib.figure import Figure
    >>> axes = Figure().subplots()
    >>> draw_places(axes, Watched([[0], [0, 1], [0]], [0, 1], [3, 2]))
    >>> len(axes.patches), axes.get_xlabel()
    (4, 'step')
    """
    seen: set[int] = set()
    for number, step in enumerate(watched.steps):
        for row, job in enumerate(step):
            colour = COLOURS[job % len(COLOURS)]
            axes.add_patch(_box(number, row, colour))
            if job not in seen:
                seen.add(job)
                axes.annotate(str(job), (number + 0.5, row), ha="center", va="center", color="white", fontsize=8)
    axes.set(xlim=(0, len(watched.steps)), ylim=(rows - 0.5, -0.5), xlabel="step", ylabel="row", yticks=range(rows))
    axes.set_title(f"{title}: {watched.mean_wait:.1f} steps from a request to its answer", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _box(step: int, row: int, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((step, row - 0.44), 1, 0.88, facecolor=colour, edgecolor="white", linewidth=0.5)


def draw_rates(axes: Axes, rows: Sequence[Mapping[str, Any]], model: str, *, key: str = "p99_s") -> None:
    """A line for each server: seconds over the rate that was offered, up to the knee; the limit is dashed."""
    points = [*filter_rows(rows, measured="open loop", cell="curve", model=model)]
    for place, name in enumerate(dict.fromkeys(row["system"] for row in points)):
        best: dict[float, float] = {}  # of a rate that was offered twice
        for row in filter_rows(points, system=name):
            best[row["rate_per_s"]] = min(row.get(key, math.inf), best.get(row["rate_per_s"], math.inf))
        axes.plot(
            *zip(*sorted(best.items()), strict=True),
            marker="o",
            markersize=4,
            label=name,
            color=COLOURS[place % len(COLOURS)],
        )
    limit = points[0]["limit_s"]
    axes.axhline(limit, color="#555555", linestyle="--", linewidth=1)
    axes.set(
        xscale="log", yscale="log", xlabel="requests offered a second", ylabel=f"{key.removesuffix('_s')}, seconds"
    )
    axes.set_title(f"{model}: {limit:g} s are allowed", fontsize=10, loc="left")
    axes.legend(fontsize=7, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
