"""Drawings of ideas, for the notebooks; what was measured is drawn by `bench.figures`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bench.figures import blank_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def attention_work(steps: int = 8, source: int = 12) -> Figure:
    """Which keys and values a decoder computes in each step (dark) and which it only reads (light)."""
    from matplotlib.colors import ListedColormap

    lower = np.tril(np.ones((steps, steps)))
    panels = {
        "self-attention,\nno cache": 2 * lower,
        "self-attention,\ncache": lower + np.eye(steps),
        "cross-attention,\nno cache": np.full((steps, source), 2.0),
        "cross-attention,\ncache": np.vstack([np.full((1, source), 2.0), np.ones((steps - 1, source))]),
    }
    figure = blank_figure(10, 3)
    every = figure.subplots(1, 4, width_ratios=(steps, steps, source, source))
    for axes, (title, cells) in zip(every, panels.items(), strict=True):
        axes.imshow(cells, cmap=ListedColormap(["white", "#bcd7e6", "#1f5f87"]), vmin=0, vmax=2, aspect="auto")
        axes.set_xticks(np.arange(-0.5, cells.shape[1]), [])
        axes.set_yticks(np.arange(-0.5, steps), [])
        axes.grid(color="white", linewidth=1.5)
        axes.tick_params(length=0)
        axes.set_title(f"{title}: {int((cells == 2).sum())} computed", fontsize=11)
        axes.set_xlabel("source position" if "cross" in title else "output position", fontsize=11)
    every[0].set_ylabel("decoding step", fontsize=11)
    return figure


def rewritings(cases: Mapping[str, tuple[Sequence[str], Sequence[str]]]) -> Figure:
    """Chains of operators before (top) and after (bottom) an optimiser, a column for each titled case.

    Operators that only the second row has are orange.
    """
    figure = blank_figure(2.1 * len(cases) + 0.4, 4.6)
    longest = [max(len(chains[row]) for chains in cases.values()) for row in (0, 1)]
    every = figure.subplots(2, len(cases), squeeze=False, height_ratios=[n + 0.5 for n in longest])
    for column, (title, chains) in enumerate(cases.items()):
        for row, chain in enumerate(chains):
            axes = every[row, column]
            for place, operator in enumerate(chain):
                colour = "#bcd7e6" if operator in chains[0] else "#f3c98b"
                box = {"boxstyle": "round,pad=0.35", "fc": colour, "ec": "none"}
                text = re.sub(r"(?<=[a-z])(?=Layer)", "\n", operator)
                axes.text(0, -place, text, ha="center", va="center", fontsize=10, bbox=box)
                if place:
                    arrow = {"arrowstyle": "->", "color": "#777777"}
                    axes.annotate("", (0, 0.28 - place), (0, 0.72 - place), arrowprops=arrow)
            axes.set(xlim=(-1, 1), ylim=(0.2 - longest[row], 0.7))
            axes.axis("off")
        every[0, column].set_title(title, fontsize=11)
    for row, text in enumerate(("as written", "rewritten")):
        axes = every[row, 0]
        axes.text(-0.2, 0.5, text, transform=axes.transAxes, rotation=90, va="center", fontsize=11)
    return figure


def gantt(panels: Mapping[str, Sequence[tuple[int, int, int, int]]]) -> Figure:
    """A line for each request, below each other: it waits (pale), is computed (dark), is done but kept (orange).

    ``panels`` has, by title, the steps at which each request came, began, was computed and was handed out.
    """
    from matplotlib.ticker import MaxNLocator

    tallest = max(map(len, panels.values()))
    figure = blank_figure(9, 0.9 + len(panels) * (0.5 + 0.22 * tallest))
    every = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    kinds = {"waits": "#bcd7e6", "computed": "#1f5f87", "done, but kept": "#e09f3e"}
    for axes, (title, spans) in zip(every, panels.items(), strict=True):
        for place, marks in enumerate(spans):
            for (kind, colour), start, end in zip(kinds.items(), marks[:-1], marks[1:], strict=True):
                label = kind if axes is every[0] and not place else None
                axes.barh(place, end - start, left=start, color=colour, height=0.72, label=label)
        mean = sum(marks[-1] - marks[0] for marks in spans) / len(spans)
        last = max(marks[-1] for marks in spans)
        axes.set_title(f"{title}: {last} steps, {mean:.1f} from a request to its answer", fontsize=11, loc="left")
        axes.set_yticks(range(len(spans)), [str(place) for place in range(len(spans))])
        axes.set_ylim(len(spans) - 0.4, -0.6)
        axes.set_ylabel("request", fontsize=11)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
    every[-1].set_xlabel("decoding step", fontsize=11)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=10.5)
    return figure
