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


def launch_timeline(kernels: int = 6, launch: float = 1.0, kernel: float = 0.35) -> Figure:
    """The host and the GPU over time: kernels launched one by one, and replayed as a graph."""
    figure = blank_figure(9, 3.1)
    every = figure.subplots(2, 1, sharex=True)
    for axes, title in zip(every, ("launched one by one", "replayed as a CUDA graph"), strict=True):
        graph = "graph" in title
        asked = [(0.0, launch)] if graph else [(place * launch, launch) for place in range(kernels)]
        first = [launch + place * (kernel + 0.06 if graph else launch) for place in range(kernels)]
        axes.broken_barh(asked, (1.1, 0.8), facecolor="#c1666b", edgecolor="white", linewidth=1.5)
        axes.broken_barh([(begin, kernel) for begin in first], (0.1, 0.8), facecolor="#2a6f97")
        end = first[-1] + kernel
        axes.axvline(end, color="#777777", linestyle=":")
        axes.text(end + 0.06, 1.0, "token", va="center", fontsize=11)
        axes.set_yticks([0.5, 1.5], ["GPU: kernels", "host: launches"], fontsize=11)
        axes.set(xlim=(0, (kernels + 1) * launch), ylim=(0, 2))
        axes.set_xticks([])
        axes.set_title(title, loc="left", fontsize=12)
        axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
        axes.tick_params(length=0)
    every[1].set_xlabel("time", fontsize=11)
    return figure


def profile_box(ranges: Mapping[str, Sequence[int]], narrower: Mapping[str, int]) -> Figure:
    """The sizes that an engine takes, over two axes of (least, usual, most); a second input has less room."""
    from matplotlib.patches import Rectangle

    (x_name, (x_least, x_usual, x_most)), (y_name, (y_least, y_usual, y_most)) = reversed(ranges.items())
    x_less, y_less = narrower.get(x_name, x_most), narrower.get(y_name, y_most)
    figure = blank_figure(8, 3.2)
    axes = figure.subplots()
    for right, top, colour, text in (
        (x_most, y_most, "#bcd7e6", "first input"), (x_less, y_less, "#2a6f97", "both inputs: what the engine takes"),
    ):  # fmt: skip
        axes.add_patch(Rectangle((x_least, y_least), right - x_least, top - y_least, facecolor=colour))
        dark = colour == "#2a6f97"
        axes.text((x_least + right) / 2, top - 0.12 * (y_most - y_least), text, ha="center", va="center", fontsize=11,
                  color="white" if dark else "black")  # fmt: skip
    axes.plot(x_usual, y_usual, "o", color="#e09f3e", markersize=9, clip_on=False, label="tuned for")
    axes.plot((x_least + x_most) / 2, y_less + 1, "X", color="#c1666b", markersize=11, label="refused at run time")
    axes.set(xlim=(0, 1.1 * x_most), ylim=(0, 1.15 * y_most), yticks=range(y_least, y_most + 1))
    axes.set_xlabel(x_name, fontsize=11)
    axes.set_ylabel(y_name, fontsize=11)
    axes.legend(frameon=False, fontsize=11, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.spines[["top", "right"]].set_visible(False)
    return figure
