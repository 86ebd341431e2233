"""Recorded GPU runs as they are shown: bars, the cost of a token by length, tables; several cards side by side.

A run may lack cells, and a cell systems: what is not there is not drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from bench.gpu.cards import bandwidth
from bench.gpu.cells import FAMILIES, LENGTHS, PUBLISHED, PUBLISHED_BATCHES, PUBLISHED_BY
from bench.harness import paired_ratio
from bench.profiling import Prices
from bench.results import format_table, step_ms
from bench.systems import GRAPH, NAIVE, RECOMPUTE, REFERENCE, STATIC

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = Mapping[str, Any]  # the content of a file of the GPU suite
Cards = Mapping[str, Record]  # by the card's short name; see `cards.recorded_cards`

CARD_COLOURS = ("#2a6f97", "#e09f3e", "#6b8f71", "#7b5ea7", "#c1666b")
LINES = {NAIVE: "#8d99ae", REFERENCE: "#c1666b", RECOMPUTE: "#e09f3e", GRAPH: "#2a6f97"}
STYLES = ("-", "--", "-.", ":")


PANELS = (
    ("t5-small", "t5-base", "flan-t5-large"),
    ("t5-small, 4 beams", "t5-small, 8 x 4 beams", "t5-small, sampling"),
    FAMILIES,
    ("in flight, 64 rows",),
    ("runtimes, float32", "runtimes, float16"),
    ("t5-small, torch.compile", "t5-small, own kernel"),
    ("t5-small, batch 8", "t5-small, batch 64", "t5-small, source 512"),
)


def timed(record: Record, cell: str) -> dict[str, Mapping[str, Any]]:
    """The rows of a cell that have a time, by their system.

    >>> rows = [{"cell": "t5-small", "system": "a", "latency_s": [0.1]}, {"cell": "t5-small", "system": "b"}]
    >>> timed({"rows": rows}, "t5-small").keys()
    dict_keys(['a'])
    """
    return {row["system"]: row for row in record["rows"] if row["cell"] == cell and row.get("latency_s")}


def overview(cards: Cards, predicted: Mapping[str, Callable[[int], float]] | None = None) -> Figure:
    """All of the runs on one figure: `bars` of each panel that was timed, and below them `by_length`."""
    from matplotlib import pyplot

    found = {cells: times_as_fast(cards, cells) for cells in PANELS}
    bars_of = {cells: len(one) * len(set().union(*one.values())) for cells, one in found.items() if one}
    heights = [*(0.55 + 0.18 * count for count in bars_of.values()), 2.2]
    figure, axes = pyplot.subplots(
        len(heights), 1, figsize=(9, sum(heights)), dpi=51, height_ratios=heights, layout="constrained", squeeze=False
    )
    for axis, cells in zip(axes[:, 0], bars_of, strict=False):
        bars(axis, cards, cells)
    for axis in axes[:-2, 0]:
        axis.set_xlabel("")  # said once, below the last bars
    for axis in axes[1:-1, 0]:
        if legend := axis.get_legend():  # said once, above the first ones: all cards have them
            legend.remove()
    by_length(axes[-1, 0], cards, predicted)
    figure.suptitle(", ".join(cards), fontsize=9)
    return figure


def times_as_fast(cards: Cards, cells: Sequence[str]) -> dict[str, dict[str, float]]:
    """By the name of a bar, for each card: how many times as fast as transformers a system is."""
    found: dict[str, dict[str, float]] = {}
    for cell in cells:
        for card, record in cards.items():
            rows = timed(record, cell)
            for system, row in rows.items():
                theirs = row.get("reference", REFERENCE)
                if system == theirs or theirs not in rows or (system == STATIC and cell != "t5-small"):
                    continue  # what launching costs is shown once
                paired = paired_ratio(rows.values(), system, theirs)  # None where they did not take turns
                if (value := (paired or row).get("ratio")) is not None:
                    found.setdefault(system if len(cells) == 1 else f"{cell}: {system}", {})[card] = value
    return found


def bars(axis: Axes, cards: Cards, cells: Sequence[str]) -> None:
    """For each system of these cells a bar for each card: how many times as fast as transformers."""
    found = times_as_fast(cards, cells)
    if not found:
        return _say(axis, f"not timed in any recorded run: {', '.join(cells)}")
    timed_on = [card for card in cards if any(card in values for values in found.values())]
    width = 0.8 / len(timed_on)
    for shift, card in enumerate(timed_on):
        places = [place + shift * width for place, values in enumerate(found.values()) if card in values]
        values = [values[card] for values in found.values() if card in values]
        colour = CARD_COLOURS[[*cards].index(card) % len(CARD_COLOURS)]
        drawn = axis.barh(places, values, 0.92 * width, color=colour, label=card)
        axis.bar_label(drawn, fmt="%.1fx", padding=3, fontsize=8)
    axis.axvline(1, color="#444444", linewidth=0.8)
    axis.set_yticks([place + 0.4 - width / 2 for place in range(len(found))], list(found))
    axis.tick_params(axis="y", labelsize=8)
    axis.set(xlabel="times as fast as transformers", ylim=(len(found) - 0.3, -0.3 - width / 2))
    axis.margins(x=0.12)
    if len(cards) > 1:
        axis.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(timed_on))


def beside_published(cards: Cards) -> str:
    """Tokens a second in the cells that others have published: theirs, as they say, and ours, as measured.

    >>> row = {"cell": "flan-t5-xl, batch 32", "system": GRAPH, "latency_s": [1.0], "tokens_per_s": 5000.0}
    >>> print(beside_published({"h100": {"rows": [row]}}).splitlines()[1])
    flan-t5-xl  TensorRT-LLM, its PyTorch backend, published  3,312  4,184  4,768
    """
    lines = [("tokens/s", "batch", *map(str, PUBLISHED_BATCHES))]
    for model, theirs in PUBLISHED.items():
        ours = {}
        for card, record in cards.items():
            rows = [timed(record, f"{model}, batch {batch}").get(GRAPH) for batch in PUBLISHED_BATCHES]
            if any(rows):
                ours[card] = [f"{row['tokens_per_s']:,.0f}" if row else "–" for row in rows]
        if ours:
            lines += [(model, f"{name}, published", *(f"{value:,.0f}" for value in values))
                      for name, values in theirs.items()]  # fmt: skip
            lines += [(model, f"ours, {card}", *values) for card, values in ours.items()]
    if len(lines) == 1:
        return ""
    return "\n".join([*format_table(lines, left=(0, 1)), f"Published: {PUBLISHED_BY}. No measurement of ours."])


def by_length(axis: Axes, cards: Cards, predicted: Mapping[str, Callable[[int], float]] | None = None) -> None:
    """What a token costs, with a cache and without, by the length of the text: a line for each system and card.

    Args:
        axis: to draw on.
        cards: recorded runs.
        predicted: of some cards, by number of tokens: the seconds of a captured step that computes all again.
    """
    lengths: set[int] = set()
    for style, (card, record) in zip(cycle(STYLES), cards.items(), strict=False):
        for system, colour in LINES.items():
            rows = {length: timed(record, f"cache, {length} tokens").get(system) for length in LENGTHS}
            points = {length: step_ms(row) for length, row in rows.items() if row}
            lengths |= points.keys()
            if points:
                label = system if len(cards) == 1 else f"{card}: {system}"
                axis.loglog([*points], [*points.values()], f"o{style}", color=colour, label=label)
    if not lengths:
        return _say(axis, "the cache was not timed in any recorded run")
    for card, seconds in (predicted or {}).items():
        if card in cards:
            ms = [seconds(length) * 1e3 for length in LENGTHS]
            label = f"{card}: {RECOMPUTE}, predicted"
            axis.loglog(LENGTHS, ms, ":", color=LINES[RECOMPUTE], alpha=0.6, label=label)
    axis.set(xlabel="tokens of the text", ylabel="ms a token", xticks=sorted(lengths))
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def floors(cards: Cards, predicted: Mapping[str, float]) -> str:
    """What a captured step was predicted to take, and what it took: a table for each card; – for what is missing.

    Args:
        cards: recorded runs.
        predicted: ``kernels`` and ``eager_kernels`` of a step, ``launch_s`` and ``replayed_s`` of one of them. The
            bandwidth is that of the recorded card.
    """
    tables = []
    for card, record in cards.items():
        for row in (row for row in record["rows"] if row["measured"] == "floor" and "failed" not in row):
            theirs = dict(predicted)
            if rate := bandwidth(record["machine"]["gpu"]):
                theirs["bytes_per_s"] = rate
                if {"kernels", "replayed_s"} <= predicted.keys() and "bytes_per_step" in row:
                    found = Prices(predicted.get("launch_s", 0.0), predicted["replayed_s"], rate)
                    theirs["floor_s"] = found.floor_s(predicted["kernels"], row["bytes_per_step"])
            mine = dict(row)
            if found := timed(record, row["cell"].removesuffix(", floor")).get(GRAPH):
                mine["step_s"] = step_ms(found) / 1e3
            lines = [(f"{card}, {row['cell']}", "predicted", "measured")]
            for name, (key, unit) in _FLOOR.items():
                shown = (f"{value[key] * unit:.4g}" if value.get(key) is not None else "–" for value in (theirs, mine))
                lines.append((name, *shown))
            tables.append("\n".join(format_table(lines)))
    return "\n\n".join(tables)


_FLOOR = {
    "kernels of a captured step": ("kernels", 1), "kernels of an eager step": ("eager_kernels", 1),
    "µs to launch a kernel": ("launch_s", 1e6), "µs for a kernel in a graph": ("replayed_s", 1e6),
    "GB/s": ("bytes_per_s", 1e-9), "ms a step, at least": ("floor_s", 1e3), "ms a step": ("step_s", 1e3),
}  # fmt: skip


def failed(cards: Cards) -> str:
    """A line for each system that was not timed, or not equal, and what was said of it."""
    rows = ((card, row) for card, record in cards.items() for row in record["rows"] if "failed" in row)
    return "\n".join(f"{card}: {row['cell']}: {row['system']}: {row['failed']}" for card, row in rows)


def _say(axis: Axes, text: str) -> None:
    axis.set_axis_off()
    axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes)
