"""Drawings of ideas, for the notebooks; what was measured is drawn by `bench.figures`."""

from __future__ import annotations

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
