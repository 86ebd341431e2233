"""Drawings of ideas, for the notebooks; what was measured is drawn by `bench.figures`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bench.figures import blank_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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


# For each graph of a layout: what goes in, its name, and when it runs.
_SPLITS = {
    "whole": [("source, all tokens so far", "model", "in every step")],
    "three graphs": [
        ("source", "encoder", "once"),
        ("encoder's output", "decoder", "in the first step"),
        ("past", "decoder with past", "in all later steps"),
    ],
    "merged": [
        ("source", "encoder", "once"),
        ("encoder's output, past", "decoder, with an If", "in every step"),
    ],
    "two graphs": [
        ("source", "encoder, with cross", "once"),
        ("cross, past", "decoder with past", "in every step"),
    ],
}
_PARTS = {"embedding": "#e09f3e", "encoder": "#9aa5b1", "cross": "#c1666b", "decoder": "#2a6f97"}


def split_layouts(layouts: Mapping[str, Sequence[Sequence[str]]], mb: Mapping[str, float]) -> Figure:
    """The graphs of each layout with the weights that each one stores; ``mb`` says how many megabytes a part has."""
    from matplotlib.patches import Patch

    figure = blank_figure(11, 4.8)
    for axes, (layout, graphs) in zip(figure.subplots(1, len(layouts)), layouts.items(), strict=True):
        seen: set[str] = set()
        for place, (held, (flow, name, when)) in enumerate(zip(graphs, _SPLITS[layout], strict=True)):
            top = -2.3 * place
            _arrow(axes, top, flow)
            axes.text(0.04, top - 0.3, name, fontsize=11, va="center")
            axes.text(0.04, top - 0.66, when, fontsize=10, va="center", color="#555555")
            _blocks(axes, top, held, seen, mb, shared=layout == "two graphs")
            seen |= {*held}
        _arrow(axes, -2.3 * len(graphs), "logits")
        axes.set(xlim=(-0.02, 1.02), ylim=(-7.1, 0.85))
        axes.set_title(layout, loc="left", fontsize=12)
        axes.axis("off")
    labels = {"cross": "keys and values of cross-attention", "embedding": "embedding and head"}
    handles = [
        Patch(color=colour, label=f"{labels.get(part, part)}, {mb[part]:.0f} MB") for part, colour in _PARTS.items()
    ]
    handles.append(Patch(facecolor="#dddddd", edgecolor="#333333", hatch="////", label="stored once more"))
    handles.append(Patch(color=_PARTS["embedding"], alpha=0.35, label="not stored again: one file for both"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=10.5)
    return figure


def _arrow(axes: Axes, top: float, label: str) -> None:
    axes.annotate("", (0.08, top), (0.08, top + 0.65), arrowprops={"arrowstyle": "->", "color": "#555555"})
    axes.text(0.14, top + 0.36, label, fontsize=10, va="center", color="#333333")


def _blocks(
    axes: Axes, top: float, held: Sequence[str], seen: set[str], mb: Mapping[str, float], *, shared: bool
) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((0, top - 1.6), 1, 1.6, facecolor="#f4f6f8", edgecolor="#555555", zorder=0))
    left = 0.04
    for part in held:
        width = 0.92 * mb[part] / sum(mb.values())
        again = {"alpha": 0.35 if shared else 0.5, "hatch": None if shared else "////", "edgecolor": "#333333"}
        style = again if part in seen else {}
        axes.add_patch(Rectangle((left, top - 1.45), width, 0.55, linewidth=0, facecolor=_PARTS[part], **style))
        left += width


def handed_over(sizes: Mapping[str, int]) -> Figure:
    """What crosses between a program and a runtime in each step, fed and bound; ``sizes`` are bytes of five tensors."""
    from matplotlib.patches import Rectangle

    stays = ("past", "source", "longer past")
    figure = blank_figure(11, 4.4)
    for axes, bound in zip(figure.subplots(1, 2), (False, True), strict=True):
        for left, width, title in ((0, 0.9, "your program"), (2.9, 1.6, "ONNX Runtime")):
            axes.add_patch(Rectangle((left, 0), width, 5.6, facecolor="#f4f6f8", edgecolor="#555555"))
            axes.text(left + width / 2, 5.75, title, fontsize=11, ha="center")
        for place, (name, size) in enumerate(sizes.items()):
            y, out = 5.0 - 1.1 * place, "logits" in name or "longer" in name
            label = f"{name}, {size / 1e6:.2f} MB" if size > 1e4 else f"{name}, {size} B"
            if bound and name in stays:
                axes.text(3.7, y, f"{name} stays", fontsize=11, ha="center", va="center", color="#5b8e55")
                continue
            start, end = (2.85, 0.95) if out else (0.95, 2.85)
            style = {"arrowstyle": "-|>", "color": "#c1666b" if size > 1e6 / 2 else "#2a6f97"}
            axes.annotate("", (end, y), (start, y), arrowprops={**style, "lw": 1 + max(0, np.log10(size / 1e3))})
            axes.text(1.9, y + 0.18, label, fontsize=10.5, ha="center")
        axes.set(xlim=(-0.05, 4.55), ylim=(-0.1, 6.2))
        axes.set_title("bound: what stays is named once" if bound else "fed: everything, in every step", loc="left")
        axes.axis("off")
    return figure
