"""Draw the curves of a training run from its recorded rows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5accel.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TASKS = {"translation": "#2a6f97", "summaries": "#e09f3e", "questions": "#9e2a2b"}


def plot_losses(rows: Sequence[dict[str, Any]], path: str | os.PathLike[str] | None = None) -> Figure:
    """Validation loss by step, one line a task, as a matplotlib figure; saved if ``path`` is given.

    Args:
        rows: lines of ``log.jsonl``: ``step`` and, for each task, nats per token on held-out batches. Where ``stage``
            changes, a line says so.

    Raises:
        InputError: there are no rows.

    >>> rows = [{"step": step, "translation": 3.0, "summaries": 2.0, "questions": 1.0} for step in (1, 2)]
    >>> figure = plot_losses(rows)
    >>> [line.get_label() for line in figure.axes[0].lines]
    ['translation', 'summaries', 'questions']
    """
    from matplotlib.figure import Figure

    if not rows:
        raise InputError("There are no rows to draw: log.jsonl is empty until the first validation.")
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    steps = [row["step"] for row in rows]
    for task, colour in TASKS.items():
        values = [row[task] for row in rows]
        axes.plot(steps, values, label=task, color=colour, linewidth=2)
    axes.set_xlabel("optimiser steps")
    axes.set_ylabel("validation loss, nats per token")
    axes.set_ylim(0, None)
    axes.set_xlim(0, steps[-1] * 1.07)
    top = axes.get_ylim()[1]
    height = 0.0
    for last in sorted(rows[-1][task] for task in TASKS):
        height = max(last, height)
        axes.annotate(f"{last:.2f}", (steps[-1], height), xytext=(6, 0), textcoords="offset points", va="center")
        height += 0.06 * top  # so that no two of them overlap
    for before, row in pairwise(rows):
        if row.get("stage") != before.get("stage"):
            axes.axvline(before["step"], color="grey", linewidth=1, linestyle=":")
            axes.annotate(
                f"stage {row['stage']}", (before["step"], top), xytext=(4, 0), textcoords="offset points", va="top",
                color="grey",
            )  # fmt: skip
    axes.legend(frameon=False, loc="upper center")
    axes.spines[["top", "right"]].set_visible(False)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    return figure
