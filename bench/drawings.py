"""Drawings of ideas, for the notebooks; what was measured is drawn by `bench.figures`."""

from __future__ import annotations

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


def rounding_levels(cases: Mapping[str, tuple[np.ndarray, int]], bits: int = 4, top: float = 0.65) -> Figure:
    """Numbers, the values that their block's scale allows, and what rounding makes of them.

    ``cases`` maps a title to a row and its block size; numbers above ``top`` are named, not drawn.
    """
    figure = blank_figure(10, 3.2)
    largest = 2 ** (bits - 1) - 1
    for axes, (title, (row, block)) in zip(figure.subplots(1, len(cases), sharey=True), cases.items(), strict=True):
        scales = np.abs(row.reshape(-1, block)).max(axis=1) / largest
        for place, scale in enumerate(scales):
            levels = np.arange(-largest, largest + 1) * scale
            axes.hlines(levels, place * block - 0.5, (place + 1) * block - 0.5, color="#bcd7e6", linewidth=1.2)
        near = np.rint(row / np.repeat(scales, block)) * np.repeat(scales, block)
        axes.vlines(range(len(row)), row, near, color="#c1666b", linewidth=2)
        axes.plot(row, "o", color="#1f5f87", label="number")
        axes.plot(near, "x", color="#c1666b", markersize=8, markeredgewidth=2, label="rounded")
        for place in np.flatnonzero(row > top):
            axes.annotate(f"{row[place]:g}", (place, top), (place, 0.72 * top), ha="center", fontsize=11,
                          color="#1f5f87", arrowprops={"arrowstyle": "->"})  # fmt: skip
        axes.set(ylim=(-top, top), xticks=[])
        axes.set_title(title, fontsize=11)
        axes.tick_params(labelsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=11)
    return figure


def next_token_probabilities(words: Sequence[str], teacher: np.ndarray, student: np.ndarray, label: int) -> Figure:
    """What a label, and a teacher at temperatures 1 and 2, say of the teacher's likeliest next tokens.

    ``words`` are those tokens, ``teacher`` and ``student`` logits of the whole vocabulary; the student's are points.
    """

    def shares(logits: np.ndarray, temperature: float) -> np.ndarray:
        powers = np.exp((logits.astype(float) - logits.max()) / temperature)
        return powers / powers.sum()

    order = np.argsort(-teacher)[: len(words)]
    rows = [word.strip("▁") or "(space)" for word in words]
    panels = {"the label": ((np.arange(len(teacher)) == label).astype(float), None)}
    panels |= {f"the teacher, T = {t}": (shares(teacher, t), shares(student, t)) for t in (1, 2)}
    figure = blank_figure(10, 3.2)
    every = figure.subplots(1, 3, sharey=True)
    for axes, (title, (bars, points)) in zip(every, panels.items(), strict=True):
        axes.barh(rows, bars[order], color="#2a6f97" if points is not None else "#b8c2cc")
        if points is not None:
            axes.plot(points[order], range(len(rows)), "o", color="#e09f3e", label="student")
            axes.legend(frameon=False, loc="lower right", fontsize=11)
        axes.set_title(title, fontsize=12)
        axes.set_xlabel(f"probability (other words: {1 - bars[order].sum():.0%})", fontsize=11)
        axes.tick_params(labelsize=11)
        axes.set_xlim(0)
        axes.locator_params(axis="x", nbins=4)
        axes.spines[["top", "right"]].set_visible(False)
    every[0].invert_yaxis()
    return figure


def quality_beside_speed(models: Mapping[str, tuple[float, float]]) -> Figure:
    """Each model's quality in % of the first one's over its speed, named at its point."""
    figure = blank_figure(9, 4)
    axes = figure.subplots()
    placed: list[tuple[float, float]] = []  # of names, which move up where they would overlap
    first = next(iter(models))
    for name, (speed, quality) in sorted(models.items(), key=lambda item: item[1][1]):
        axes.plot(speed, quality, "*" if name == first else "o", color="#1f5f87", markersize=14 if name == first else 8)
        height = max([quality, *(y + 6 for x, y in placed if abs(speed - x) < 0.5 and y > quality - 6)])
        placed.append((speed, height))
        axes.annotate(name, (speed, height), xytext=(12, 0), textcoords="offset points", va="center", fontsize=11)
    axes.set(xlim=(0.8, 1.5 * max(speed for speed, _ in models.values())), ylim=(0, 110))
    axes.set_xlabel("times the speed of the first", fontsize=11)
    axes.set_ylabel("mean score, % of the first", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
