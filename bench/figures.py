"""Tables, pictures and a page, drawn from recorded rows alone."""

from __future__ import annotations

import base64
import html
import io
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from math import log, nan
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import TYPE_CHECKING, Any

from bench.ladder import fastest, inside, way_to
from bench.peers import int8_for, peer_results
from bench.results import format_table, html_table, step_ms
from t5accel import machine
from t5accel.errors import InputError, MissingPackageError, install
from t5accel.timing import Comparison, Ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bench.peers import PeerResult

Rows = Sequence[Mapping[str, Any]]
Columns = Mapping[str, Callable[[Mapping[str, Any]], str]]

LATENCY, THROUGHPUT, ASIDE, OUTSIDE = "#2a6f97", "#e09f3e", "#b8c2cc", "#c1666b"
PALETTE = (LATENCY, OUTSIDE, THROUGHPUT, "#5b8e55", "#7a5c99", "#555555")
DPI = 110  # of the pictures in notebooks
TASKS = {"translation": LATENCY, "summaries": THROUGHPUT, "questions": "#9e2a2b"}
COMPOSED = {"summaries": "composed reports", "questions": "composed questions"}
SCATTERED = 1.5  # the largest ratio of a round over the smallest one from which on a median says little
WIDEST = 4.0  # the ratio at which a colour of the heat map is full, either way


def _or_dash(key: str, text: str, unit: float = 1) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: text.format(row[key] / unit) if key in row else "–"


def _range(samples: Sequence[float] | None) -> str:
    return f"{min(samples):.2f}–{max(samples):.2f}" if samples else "–"


_SIZES = {"MB": _or_dash("size_bytes", "{:.0f}", 1e6), "peak MB": _or_dash("peak_memory_bytes", "{:.0f}", 1e6)}
_SCORES = {"BLEU": _or_dash("bleu", "{:.1f}"), "ROUGE-L": _or_dash("rougeL", "{:.1f}"),
           "EM": _or_dash("exact_match", "{:.1f}")}  # fmt: skip
BOARD: Columns = {
    "technique": lambda row: row["system"],
    "precision": lambda row: row["precision"],
    "ms/token": lambda row: f"{step_ms(row):.2f}",
    "tokens/s": _or_dash("tokens_per_s", "{:.0f}"),
    "ratio": _or_dash("ratio", "{:.2f}x"),
    "range": lambda row: _range(row.get("ratio_samples")),
    **_SIZES, **_SCORES,
}  # fmt: skip
LADDER: Columns = {
    "rung": lambda row: row["rung"],
    "on": lambda row: row.get("on", "–"),
    "batch": lambda row: str(row["batch"]),
    "ms/text": lambda row: f"{median(row['latency_s']) / row['texts'] * 1e3:.1f}",
    "tokens/s": _or_dash("tokens_per_s", "{:.0f}"),
    "factor": _or_dash("factor", "{:.2f}"),
    "in all": _or_dash("ratio", "{:.1f}"),
    **_SIZES, **_SCORES,
    "gate": lambda row: {True: "inside", False: "outside", None: "–"}[row.get("inside")],
}  # fmt: skip
_ALIKE = ("model", "batch", "beams", "source_tokens", "new_tokens", "threads", "reference")


def table(rows: Rows | Comparison) -> str:
    """A comparison, the rungs of a ladder, the rows of a board, or any rows with the same keys, as a table of text.

    A comparison shows median ms, the median ratio to the first system, its range and the number of pairs. Raises
    ``InputError`` without rows, and for rows of several ladders or of unequal work.

    >>> print(table([{"format": "fp32", "MB": 44.04}, {"format": "int8", "MB": 11.6}]))
    format    MB
    ------  ----
    fp32    44.0
    int8    11.6
    """
    if isinstance(rows, Comparison):
        rows = [_speed(rows, name) for name in rows.latencies]
    if rows and not {"rung", "system"} & rows[0].keys():
        texts = [[_cell(value) for value in row.values()] for row in rows]
        left = [place for place, value in enumerate(rows[0].values()) if isinstance(value, str)]
        return "\n".join(format_table([list(rows[0]), *texts], left=left, rule=True))
    columns = LADDER if rows and "rung" in rows[0] else BOARD
    _require_alike(rows, ("cell",) if columns is LADDER else _ALIKE)
    lines = [list(columns), *([text(row) for text in columns.values()] for row in rows)]
    return "\n".join(format_table(lines, left=(0, 1) if columns is LADDER else (0,), rule=True))


def speed(row: Mapping[str, Any], unit: str = "ms", per: float = 1) -> dict[str, Any]:
    """The columns of a comparison from a recorded row; ``per`` divides its times, as by the number of tokens.

    >>> speed({"latency_s": [0.4, 0.5, 0.6], "ratio": 2.0, "ratio_samples": [1.9, 2.0, 2.4]}, "ms a token", per=10)
    {'ms a token': 50.0, 'ratio': '2.00x', '(min–max)': '(1.90–2.40)', 'n': 3}
    """
    ms, samples = median(row["latency_s"]) * 1e3 / per, row["ratio_samples"]
    spread = "" if {*samples} == {1} else f"({_range(samples)})"  # a reference has none
    return {unit: ms, "ratio": f"{row['ratio']:.2f}x", "(min–max)": spread, "n": len(samples)}


def _speed(found: Comparison, name: str) -> dict[str, Any]:
    times = found.latencies[name].samples_s
    samples = found.ratios[name].samples if name in found.ratios else [1] * len(times)
    return {"": name, **speed({"latency_s": times, "ratio": found.ratio(name), "ratio_samples": samples})}


def _cell(value: object) -> str:
    """Three digits of a float, everything else as it is."""
    if not isinstance(value, float):
        return str(value)
    digits = 2 if value == 0 else max(0, min(4, 2 - math.floor(math.log10(abs(value)))))
    return f"{value:.{digits}f}"


def board(rows: Rows, facts: Mapping[str, Any] | None = None) -> str:
    """The `table` of a board below its conditions; ``facts`` of the machine, by default of this one."""
    return f"{caption(rows, facts)}\n\n{table(rows)}"


def scattered(rows: Rows) -> list[str]:
    """The systems with too much spread over the rounds for a ratio.

    >>> scattered([{"system": "steady", "ratio_samples": [2, 2.1]}, {"system": "shaken", "ratio_samples": [1, 4]}])
    ['shaken']
    """
    samples = {row["system"]: row.get("ratio_samples") or [1.0] for row in rows}
    return [system for system, found in samples.items() if max(found) > SCATTERED * min(found)]


def caption(rows: Rows, facts: Mapping[str, Any] | None = None) -> str:
    """The conditions of a board in one line."""
    _require_alike(rows, _ALIKE)
    first, facts = rows[0], machine.facts(gpu=False) if facts is None else facts
    return (
        f"{first['model']}, batch {first['batch']}, beams {first['beams']}, {first['source_tokens']} source and "
        f"{first['new_tokens']} forced new tokens, {first['threads']} threads; ratio to {first['reference']} in one "
        f"run; {facts['cpu']}, {first['threads']} threads"
    )


def _require_alike(rows: Rows, keys: Sequence[str]) -> None:
    if not rows:
        raise InputError("rows must not be empty. Measure some first (`python -m bench board`).")
    for key in keys:
        values = dict.fromkeys(str(row.get(key)) for row in rows)
        if len(values) > 1:
            raise InputError(f"rows must share one {key}, got {', '.join(sorted(values))}. Show them apart.")


def blank_figure(width: float, height: float) -> Figure:
    """An empty figure that a notebook shows without pyplot; sizes in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(f"Drawing needs matplotlib: {install('course')}.") from error

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=DPI)
            return file.getvalue()

    return Picture(figsize=(width, height), layout="constrained", dpi=DPI)


def plot(
    series: Mapping[str, Any], *, xlabel: str, ylabel: str = "", title: str = "", log: str = "",
    predicted: Collection[str] = (),
) -> Figure:  # fmt: skip
    """A line for each (x, y) of ``series``, or a bar for each number or `Ratio`, with its range.

    ``log`` names logarithmic axes ("x", "y" or "xy"); names in ``predicted`` are drawn as dotted lines or pale bars.
    """
    from matplotlib import rc_context
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    with rc_context({"font.size": 11, "axes.titlesize": 12, "legend.fontsize": 10.5}):
        bars = not any(isinstance(value, tuple) for value in series.values())
        figure = blank_figure(8, 0.9 + 0.42 * len(series) if bars else 3.8)
        axes = figure.subplots()
        for place, (name, value) in enumerate(series.items()):
            colour = PALETTE[place % len(PALETTE)]
            if bars:
                _bar(axes, place, value, ASIDE if name in predicted else LATENCY)
            else:
                style = {"linestyle": ":"} if name in predicted else {"marker": "o", "markersize": 4}
                axes.plot(*value, color=colour, label=name, linewidth=2, **style)
        if bars:
            axes.set_yticks(range(len(series)), list(series))
            axes.invert_yaxis()
            axes.margins(x=0.15)
        else:
            axes.legend(frameon=False)
        for axis in log:
            axes.set(**{f"{axis}scale": "log"})
            ticks = getattr(axes, f"{axis}axis")
            ticks.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ticks.set_major_formatter(StrMethodFormatter("{x:g}"))
            ticks.set_minor_formatter(NullFormatter())
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.set_title(title, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        return figure


def _bar(axes: Axes, place: int, value: Any, colour: str) -> None:
    middle, end, text = value, value, _cell(value)
    if isinstance(value, Ratio):
        middle, end, text = value.median, value.max, f"{value.median:.2f}x ({value.min:.2f}–{value.max:.2f})"
        axes.plot([value.min, value.max], [place, place], color="#333333", linewidth=1.5)
    axes.barh(place, middle, color=colour, height=0.62, zorder=0)
    axes.annotate(text, (end, place), xytext=(5, 0), textcoords="offset points", va="center")


def _saved(figure: Figure, path: str | os.PathLike[str] | None) -> Figure:
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        try:
            figure.savefig(path, dpi=150)
        except ValueError as error:  # an unknown ending
            raise InputError(f"Cannot draw to {path}: {error}.") from error
    return figure


def plot_board(rows: Rows, path: str | os.PathLike[str] | None = None) -> Figure:
    """Bars of the ratio to the reference with the range over rounds; saved if ``path`` is given."""
    _require_alike(rows, _ALIKE)
    figure = blank_figure(8, 0.9 + 0.5 * len(rows))
    axes, first = figure.subplots(), rows[0]
    ratios = [row["ratio"] for row in rows]
    low, high = ([abs(end(row["ratio_samples"]) - row["ratio"]) for row in rows] for end in (min, max))
    colours = ["#9aa5b1" if row["system"] == row["reference"] else LATENCY for row in rows]
    axes.barh(range(len(rows)), ratios, xerr=(low, high), color=colours, ecolor="#333333", capsize=3)
    axes.set_yticks(range(len(rows)), [f"{row['system']} ({row['precision']})" for row in rows])
    axes.invert_yaxis()
    axes.axvline(1.0, color="#333333", linewidth=0.8)
    axes.set_xlim(0, 1.18 * max(m + h for m, h in zip(ratios, high, strict=True)))
    for y, (value, extra) in enumerate(zip(ratios, high, strict=True)):
        axes.annotate(f"{value:.2f}x", (value + extra, y), xytext=(6, 0), textcoords="offset points", va="center")
    axes.set_xlabel(f"speed, as a ratio to {first['reference']} (longer is faster)")
    axes.set_title(
        f"{first['model']}, batch {first['batch']}, {first['source_tokens']} source and {first['new_tokens']} new "
        f"tokens, {first['threads']} threads", fontsize=10,
    )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    return _saved(figure, path)


def page(boards: Sequence[tuple[str, Mapping[str, Any]]], notes: str = "") -> str:
    """A self-contained HTML page: for each titled file of results its picture, table, machine and command.

    ``notes`` is HTML that goes on top.
    """
    parts = []
    for title, record in boards:
        rows, picture = record["rows"], io.BytesIO()
        plot_board(rows).savefig(picture, format="png", dpi=120)
        encoded = base64.b64encode(picture.getvalue()).decode()
        cells = html_table([list(BOARD), *([text(row) for text in BOARD.values()] for row in rows)])
        versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        parts.append(
            f"<h2>{html.escape(title)}</h2><p>{html.escape(caption(rows, record['machine']))}</p>"
            f'<img alt="Speed of each technique as a ratio to the reference" src="data:image/png;base64,{encoded}">'
            f"{cells}"
            f"<p><small>{html.escape(record['date'])}; commit {html.escape(record['commit'] or 'unknown')}; "
            f"<code>{html.escape(record['command'])}</code>; {html.escape(versions)}</small></p>"
        )
    style = (
        "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
        "table{border-collapse:collapse;font-variant-numeric:tabular-nums}th,td{padding:.3rem .6rem;text-align:right;"
        "border-bottom:1px solid #ddd}th:first-child,td:first-child{text-align:left}img{max-width:100%}"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>t5accel scoreboard</title>'
        f"<style>{style}</style></head><body><h1>t5accel scoreboard</h1>{notes}{''.join(parts)}</body></html>\n"
    )


def plot_ladders(ladders: Mapping[str, Rows], path: str | os.PathLike[str] | None = None) -> Figure:
    """A panel for each titled ladder: a bar for each rung, from the speed of the rung below to its own.

    The axis is logarithmic, so equal factors are bars of equal length. Colours mark the path to the fastest rung, the
    rungs beside it, those that answer many texts at once, and those outside the gate.
    """
    if not ladders:
        raise InputError("ladders must not be empty. Climb one first.")
    for rows in ladders.values():
        _require_alike(rows, ("cell",))
    heights = [len(rows) + 1.6 for rows in ladders.values()]
    figure = blank_figure(9, 0.3 * sum(heights) + 0.5)
    panels = figure.subplots(len(ladders), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    top = max(max(row["ratio_samples"]) for rows in ladders.values() for row in rows)
    kinds = {LATENCY: "on the way to the fastest", ASIDE: "tried beside it", THROUGHPUT: "many texts at once",
             OUTSIDE: "outside the gate"}  # fmt: skip
    drawn: dict[str, Any] = {}  # a bar of each colour
    for axes, (title, rows) in zip(panels, ladders.items(), strict=True):
        drawn |= _ladder(axes, rows)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlim(0.8, max(top, 10) * 4)  # room for the last label
    panels[-1].set_xlabel("times as fast as the naive loop (logarithmic: equal factors, equal lengths)")
    if len(drawn) > 1:
        handles = [(drawn[colour], kind) for colour, kind in kinds.items() if colour in drawn]
        figure.legend(*zip(*handles, strict=True), loc="outside lower center", ncols=4, frameon=False)
    return _saved(figure, path)


def _ladder(axes: Axes, rows: Rows) -> dict[str, Any]:
    ends = [fastest(rows, at_once=at_once) for at_once in (False, True) if inside(rows, at_once=at_once)]
    taken = {row["rung"] for end in ends for row in way_to(rows, end["rung"])}
    places = {row["rung"]: place for place, row in enumerate(rows)}
    speeds = {row["rung"]: row["ratio"] for row in rows}
    drawn: dict[str, Any] = {}
    for place, row in enumerate(rows):
        speed, on = row["ratio"], row.get("on")
        below = speeds.get(on, 0.8)
        colour = OUTSIDE if row.get("inside") is False else THROUGHPUT if row["batch"] > 1 else LATENCY
        colour = colour if row["rung"] in taken or colour == OUTSIDE else ASIDE
        drawn[colour] = axes.barh(place, speed - below, left=below, color=colour, height=0.62)
        if on is not None:
            axes.plot([below, below], [places[on] + 0.31, place + 0.31], color="#8795a1", linewidth=0.8)
        short = f"{speed:.1f}" if speed < 10 else f"{speed:.0f}"
        text = f"x{row['factor']:.2f}, in all {short}" if on else "1"
        low, high = min(row["ratio_samples"]), max(row["ratio_samples"])
        axes.plot([low, high], [place, place], color="#333333", linewidth=1.2)  # the range over the rounds
        axes.annotate(text, (max(high, below), place), xytext=(5, 0), textcoords="offset points", va="center",
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip
    axes.set_xscale("log")
    axes.axvline(100, color="#8795a1", linewidth=0.8, linestyle=":", zorder=0)
    axes.set_xticks([1, 10, 100], ["1", "10", "100"])
    axes.minorticks_off()
    axes.set_yticks(range(len(rows)), [row["adds"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return drawn


def plot_standings(boards: Mapping[str, Sequence[PeerResult]], path: str | os.PathLike[str] | None = None) -> Figure:
    """Heat maps of our results against peers: batches down, sources across, a panel for each number of beams.

    With several models, models down and batches across. Blue cells are ours, red ones the peer's.
    """
    boards = {title: standings for title, standings in boards.items() if standings}
    if not boards:
        raise InputError("boards must hold results. Measure peers first (`make peers`).")
    beams = sorted({one.cell.beams for standings in boards.values() for one in standings})
    models = len({one.model for standings in boards.values() for one in standings})
    figure = blank_figure(4.4 * len(beams) + 0.6, (2.9 + 0.3 * (models - 1)) * len(boards) + 0.3)
    panels = figure.subplots(len(boards), len(beams), squeeze=False)
    for panel, (title, these) in zip(panels, boards.items(), strict=True):
        for axes, number in zip(panel, beams, strict=True):
            if not (shown := [one for one in these if one.cell.beams == number]):
                axes.axis("off")
                continue
            _heat_map(axes, shown)
            axes.set_title(f"{title}\n{'greedy' if number == 1 else f'{number} beams'}", fontsize=10)
    return _saved(figure, path)


def plot_peers(runs: Mapping[str, Rows], path: str | os.PathLike[str] | None = None) -> Figure:
    """Our engine over the best peers in fp32 and in int8, as `plot_standings`, from recorded rows by title."""
    boards = {}
    for title, rows in runs.items():
        boards[f"{title}\nfp32 over the best fp32 peer"] = list(peer_results(rows))
        boards[f"{title}\nint8 over the best int8 peer"] = list(peer_results(rows, ours=int8_for, precision="int8"))
    return plot_standings(boards, path)


def plot_shades(
    shades: Sequence[Sequence[float]], texts: Sequence[Sequence[str]], down: Sequence[str], across: Sequence[str],
    title: str,
) -> Figure:  # fmt: skip
    """A table of texts on shades of blue, from white for 0 or NaN to dark for the largest."""
    figure = blank_figure(1.25 * len(across) + 0.6, 0.5 * len(down) + 1.1)
    axes = figure.subplots()
    _shade(axes, shades, texts, down, across, cmap="Blues", vmin=0)
    axes.set_title(title, fontsize=10)
    return figure


def _shade(axes: Axes, shades: Any, texts: Sequence[Sequence[str]], down: Any, across: Any, **how: Any) -> None:
    axes.imshow(shades, aspect="auto", alpha=0.75, **how)
    for y, row in enumerate(texts):
        for x, text in enumerate(row):
            axes.text(x, y, text, ha="center", va="center")
    axes.set_xticks(range(len(across)), across)
    axes.set_yticks(range(len(down)), down)


def _heat_map(axes: Axes, standings: Sequence[PeerResult]) -> None:
    by_model = len({one.model for one in standings}) > 1
    found = {
        (one.model, one.cell.batch) if by_model else (one.cell.batch, one.cell.source_tokens): one for one in standings
    }
    down, across = list(dict.fromkeys(row for row, _ in found)), sorted({column for _, column in found})
    cells = [[found.get((row, column)) for column in across] for row in down]
    logs = [[log(one.ratio) / log(WIDEST) if one else nan for one in row] for row in cells]
    texts = [[f"{one}\n{fill(one.peer, 16)}" if one else "not measured" for one in row] for row in cells]
    _shade(axes, logs, texts, down, across, cmap="RdBu", vmin=-1, vmax=1)
    axes.set(xlabel="batch" if by_model else "source tokens", ylabel="" if by_model else "batch")


def plot_losses(rows: Rows, path: str | os.PathLike[str] | None = None) -> Figure:
    """Held-out loss of a training run by step, in nats per token, a line for each task; saved if ``path`` is given.

    Vertical lines mark new stages; dashed lines are the losses on composed reports and questions.
    """
    if not rows:
        raise InputError("There are no rows to draw: log.jsonl is empty until the first validation.")
    figure = blank_figure(8, 3.6)
    axes = figure.subplots()
    steps = [row["step"] for row in rows]
    for task, colour in TASKS.items():
        axes.plot(steps, [row[task] for row in rows], label=task, color=colour, linewidth=2)
        other = COMPOSED.get(task)
        if composed := [(row["step"], row[other]) for row in rows if other in row]:
            axes.plot(*zip(*composed, strict=True), label=other, color=colour, linewidth=1.5, linestyle="--")
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
    axes.legend(frameon=False, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    return _saved(figure, path)
