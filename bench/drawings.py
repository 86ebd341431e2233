"""Drawings of ideas, for the notebooks; what was measured is drawn by `bench.figures`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

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


def rewritings(
    cases: Mapping[str, tuple[Sequence[str], Sequence[str]]], rows: Sequence[str] = ("as written", "rewritten")
) -> Figure:
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
    for row, text in enumerate(rows):
        axes = every[row, 0]
        axes.text(-0.2, 0.5, text, transform=axes.transAxes, rotation=90, va="center", fontsize=11)
    return figure


def _box(axes: Axes, place: tuple[float, float, float, float], text: str, colour: str, **options: Any) -> None:
    """A rounded box (left, bottom, width, height) with text in its middle."""
    from matplotlib.patches import FancyBboxPatch

    left, bottom, width, height = place
    axes.add_patch(
        FancyBboxPatch((left, bottom), width, height, boxstyle="round,pad=0,rounding_size=0.08", fc=colour, ec="none")
    )
    axes.text(left + width / 2, bottom + height / 2, text, ha="center", va="center", **{"fontsize": 11, **options})


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], bend: str = "arc3") -> None:
    style = {"arrowstyle": "-|>", "color": "#444444", "connectionstyle": bend, "shrinkA": 0, "shrinkB": 0, "lw": 1.3}
    axes.annotate("", end, start, arrowprops=style)


def t5_step() -> Figure:
    """One decoding step of a T5: the encoder that ran once, the decoder's loop, both caches and the head."""
    figure = blank_figure(10, 5.2)
    axes = figure.subplots()
    axes.set(xlim=(0, 12.4), ylim=(0, 6.3))
    axes.axis("off")
    _box(axes, (0, 0, 4.1, 6.3), "", "#f1f4f6")
    _box(axes, (6.75, 0, 5.65, 6.3), "", "#f1f4f6")
    axes.text(2.05, 5.98, "once for each text", ha="center", va="center", fontsize=12, fontweight="bold")
    axes.text(9.58, 5.98, "once for each new token", ha="center", va="center", fontsize=12, fontweight="bold")
    dark, light, kept = "#9cc4da", "#d9e8f0", "#f3c98b"
    _box(axes, (0.3, 0.25, 3.5, 0.75), "source tokens\n“… Where is my bag?”", "white")
    every_layer = "every layer: self-attention,\nfeed-forward; all tokens\nof the source at once"
    _box(axes, (0.3, 1.75, 3.5, 2.2), f"encoder\n\n{every_layer}", dark)
    _box(axes, (0.3, 4.7, 3.5, 0.75), "encoder output:\none vector per source token", "white")
    _box(axes, (4.4, 3.15, 2.05, 1.3), "cache of\ncross-attention\n(fixed)", kept)
    _box(axes, (4.4, 1.3, 2.05, 1.3), "cache of\nself-attention\n(grows)", kept)
    _box(axes, (7.0, 0.25, 3.1, 0.75), "the newest token\n“est”", "white")
    _box(axes, (7.0, 1.35, 3.1, 2.95), "", dark)
    axes.text(10.2, 2.8, "decoder,\nevery layer", va="center", fontsize=11)
    for bottom, name in ((1.5, "self-attention"), (2.45, "cross-attention"), (3.4, "feed-forward")):
        _box(axes, (7.15, bottom, 2.8, 0.75), name, light)
    _box(axes, (7.0, 4.7, 3.1, 0.75), "head: a score (logit)\nfor every known token", dark)
    _box(axes, (10.65, 4.7, 1.5, 0.75), "choice:\n“mon”", "white")
    for start, end in (((2.05, 1.0), (2.05, 1.75)), ((2.05, 3.95), (2.05, 4.7)), ((8.55, 1.0), (8.55, 1.35)),
                       ((8.55, 4.3), (8.55, 4.7)), ((10.1, 5.07), (10.65, 5.07)), ((6.45, 3.5), (7.15, 2.9)),
                       ((6.45, 2.15), (7.15, 2.0))):  # fmt: skip
        _arrow(axes, start, end)
    _arrow(axes, (7.15, 1.75), (6.45, 1.75))
    _arrow(axes, (3.8, 5.07), (5.4, 4.45), "angle,angleA=0,angleB=90,rad=6")
    _arrow(axes, (11.6, 4.7), (10.1, 0.62), "angle,angleA=90,angleB=0,rad=6")
    axes.text(11.6, 1.45, "next step", ha="center", va="bottom", fontsize=11, bbox={"fc": "#f1f4f6", "ec": "none"})
    axes.text(5.5, 4.75, "keys, values", ha="left", va="center", fontsize=11)
    return figure


def course_map(parts: Mapping[str, tuple[float, float, str]]) -> Figure:
    """For each part of a generation a bar of ms, a mark at the least ms if any, and the notebooks that attack it."""
    figure = blank_figure(9.5, 0.9 + 0.55 * len(parts))
    axes = figure.subplots()
    longest = max(ms for ms, _, _ in parts.values())
    for place, (ms, least, notebooks) in enumerate(parts.values()):
        axes.barh(place, ms, color="#2a6f97", height=0.6, label=None if place else "measured")
        axes.text(max(ms, least) + longest / 60, place, notebooks, va="center", fontsize=11)
    marks = {place: least for place, (_, least, _) in enumerate(parts.values()) if least}  # some parts read no weights
    low, high = ([place + half for place in marks] for half in (-0.38, 0.38))
    axes.vlines([*marks.values()], low, high, color="#e09f3e", lw=4, label="least time")
    axes.set_yticks(range(len(parts)), list(parts), fontsize=11)
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.75)
    axes.set_xlabel("ms for one text", fontsize=11)
    axes.legend(frameon=False, fontsize=11, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def beam_tree() -> Figure:
    """Two beams in the language of five words: kept (blue), dropped (grey) and ended (orange) beginnings."""
    nodes = {  # text, step, height, probability, parent, kept
        "": ("(start)", 0, 2.6, 1, None, True),
        "the": ("the", 1, 3.7, 0.6, "", True), "a": ("a", 1, 1.2, 0.4, "", True),
        "tc": ("the cat", 2, 4.6, 0.24, "the", True), "td": ("the dog", 2, 3.65, 0.21, "the", False),
        "t.": ("the .", 2, 2.7, 0.15, "the", False), "ac": ("a cat", 2, 1.6, 0.36, "a", True),
        "ad": ("a dog", 2, 0.65, 0.04, "a", False), "tc.": ("the cat .", 3, 4.6, 0.216, "tc", True),
        "ac.": ("a cat .", 3, 1.6, 0.324, "ac", True),
    }  # fmt: skip
    figure = blank_figure(9, 3.6)
    axes = figure.subplots()
    for name, (text, x, y, odds, parent, kept) in nodes.items():
        colour = "#f3c98b" if name in ("tc.", "ac.") else "#bcd7e6" if kept else "#eceff2"
        place, ink = (x - 0.22, y - 0.38, 0.44, 0.76), "black" if kept else "#777777"
        _box(axes, place, f"{text}\n{odds:.3g}", colour, color=ink)
        if parent is not None:
            _arrow(axes, (nodes[parent][1] + 0.22, nodes[parent][2]), (x - 0.22, y))
    axes.set(xlim=(-0.3, 3.3), ylim=(0.1, 5.1), yticks=[])
    axes.set_xticks(range(4), ["", "step 1", "step 2", "step 3"], fontsize=11)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    return figure


def stacked(rows: Mapping[str, Mapping[str, float]], xlabel: str) -> Figure:
    """A bar for each row, divided into its named parts."""
    figure = blank_figure(8.5, 1.3 + 0.5 * len(rows))
    axes = figure.subplots()
    colours = ("#2a6f97", "#9cc4da", "#c1666b", "#e09f3e", "#b8c2cc")
    for place, parts in enumerate(rows.values()):
        left = 0.0
        for colour, (name, size) in zip(colours, parts.items(), strict=False):
            axes.barh(place, size, left=left, color=colour, height=0.6, label=None if place else name)
            left += size
    axes.set_yticks(range(len(rows)), list(rows), fontsize=11)
    axes.invert_yaxis()
    axes.set_xlabel(xlabel, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=11, ncols=5, loc="outside upper center")
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
            _flow(axes, top, flow)
            axes.text(0.04, top - 0.3, name, fontsize=11, va="center")
            axes.text(0.04, top - 0.66, when, fontsize=10, va="center", color="#555555")
            _blocks(axes, top, held, seen, mb, shared=layout == "two graphs")
            seen |= {*held}
        _flow(axes, -2.3 * len(graphs), "logits")
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


def _flow(axes: Axes, top: float, label: str) -> None:
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
        axes.set_title("bound: tensors that stay, once" if bound else "fed: everything, in every step", loc="left")
        axes.axis("off")
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


def next_token_probabilities(
    tokens: Sequence[str], teacher: np.ndarray, student: np.ndarray, label: int, student_name: str = "a model"
) -> Figure:
    """What a label, and a teacher at temperatures 1 and 2, say of the teacher's likeliest next tokens.

    ``tokens`` are these, ``teacher`` and ``student`` logits of the whole vocabulary; the student's are points.
    """

    def shares(logits: np.ndarray, temperature: float) -> np.ndarray:
        powers = np.exp((logits.astype(float) - logits.max()) / temperature)
        return powers / powers.sum()

    order = np.argsort(-teacher)[: len(tokens)]
    rows = [token.strip("▁") or "(space)" for token in tokens]
    panels = {"the label": ((np.arange(len(teacher)) == label).astype(float), None)}
    panels |= {f"the teacher, T = {t}": (shares(teacher, t), shares(student, t)) for t in (1, 2)}
    figure = blank_figure(10, 3.2)
    every = figure.subplots(1, 3, sharey=True)
    for axes, (title, (bars, points)) in zip(every, panels.items(), strict=True):
        axes.barh(rows, bars[order], color="#2a6f97" if points is not None else "#b8c2cc")
        if points is not None:
            axes.plot(points[order], range(len(rows)), "o", color="#e09f3e", label=f"{student_name} (student)")
        axes.set_title(title, fontsize=12)
        axes.set_xlabel(f"probability (other tokens: {1 - bars[order].sum():.0%})", fontsize=11)
        axes.tick_params(labelsize=11)
        axes.set_xlim(0)
        axes.locator_params(axis="x", nbins=4)
        axes.spines[["top", "right"]].set_visible(False)
    every[1].legend(frameon=False, loc="lower right", fontsize=11)
    every[0].invert_yaxis()
    return figure


def quality_beside_speed(models: Mapping[str, tuple[float, float]]) -> Figure:
    """Quality over speed, both compared with the teacher, which is the first of ``models``; names beside the points."""
    figure = blank_figure(9, 4)
    axes = figure.subplots()
    placed: list[tuple[float, float]] = []  # of names, which move up where they would overlap; lines lead to them
    first, fastest = next(iter(models)), max(speed for speed, _ in models.values())
    for name, (speed, quality) in sorted(models.items(), key=lambda item: item[1][1]):
        axes.plot(speed, quality, "*" if name == first else "o", color="#1f5f87", markersize=14 if name == first else 8)
        height = max([quality, *(y + 6.5 for x, y in placed if abs(speed - x) < 0.5 and y > quality - 6.5)])
        placed.append((speed, height))
        left = 2 * speed > 1 + fastest + 0.2  # there is no room on the right
        beside = speed + (-0.07 if left else 0.07)
        axes.plot([speed, beside], [quality, height], color="#8a94a0", linewidth=1, zorder=0)
        side = dict(va="center", ha="right" if left else "left", fontsize=11)
        axes.annotate(name, (beside, height), xytext=(-4 if left else 4, 0), textcoords="offset points", **side)
    axes.set(xlim=(0.8, fastest + 0.2), ylim=(0, 110))
    axes.set_xlabel("times the teacher's speed", fontsize=11)
    axes.set_ylabel("mean score, % of the teacher's", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
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
        axes.set_yticks([0.5, 1.5], ["GPU: kernels", "host: calls"], fontsize=11)
        axes.set(xlim=(0, (kernels + 1) * launch), ylim=(0, 2))
        axes.set_xticks([])
        axes.set_title(title, loc="left", fontsize=12)
        axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
        axes.tick_params(length=0)
    every[1].set_xlabel("time", fontsize=11)
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
        axes.set_title(f"{title}: {last} steps, an answer after {mean:.1f} on average", fontsize=11, loc="left")
        axes.set_yticks(range(len(spans)), [str(place) for place in range(len(spans))])
        axes.set_ylim(len(spans) - 0.4, -0.6)
        axes.set_ylabel("request", fontsize=11)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
    every[-1].set_xlabel("decoding step", fontsize=11)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=10.5)
    return figure


def profile_box(ranges: Mapping[str, Sequence[int]], narrower: Mapping[str, int], wide: str = "input_ids") -> Figure:
    """The sizes that an engine accepts, over two axes of (MIN, OPT, MAX): another input is narrower than ``wide``."""
    from matplotlib.patches import Rectangle

    (x_name, (x_least, x_usual, x_most)), (y_name, (y_least, y_usual, y_most)) = reversed(ranges.items())
    x_less, y_less = narrower.get(x_name, x_most), narrower.get(y_name, y_most)
    figure = blank_figure(8, 3.2)
    axes = figure.subplots()
    for right, top, colour, text in (
        (x_most, y_most, "#bcd7e6", f"in the range of {wide} only"),
        (x_less, y_less, "#2a6f97", "in the ranges of both inputs"),
    ):
        axes.add_patch(Rectangle((x_least, y_least), right - x_least, top - y_least, facecolor=colour))
        dark = colour == "#2a6f97"
        axes.text((x_least + right) / 2, top - 0.12 * (y_most - y_least), text, ha="center", va="center", fontsize=11,
                  color="white" if dark else "black")  # fmt: skip
    axes.plot(x_usual, y_usual, "o", color="#e09f3e", markersize=9, clip_on=False,
              label=f"tuned for: {y_name} {y_usual}, {x_name} {x_usual}")  # fmt: skip
    axes.plot((x_least + x_most) / 2, y_less + 1, "X", color="#c1666b", markersize=11,
              label=f"refused at run time: {y_name} {y_less + 1}")  # fmt: skip
    axes.set(xlim=(0, 1.1 * x_most), ylim=(y_least - 0.5, 1.15 * y_most), yticks=range(y_least, y_most + 1))
    axes.set_xlabel(x_name, fontsize=11)
    axes.set_ylabel(y_name, fontsize=11)
    axes.legend(frameon=False, fontsize=11, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.spines[["top", "right"]].set_visible(False)
    return figure
