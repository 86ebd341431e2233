"""Ladders as they are shown: the way to the fastest rung, a table, and a picture; from rows of `climb.climb` only."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5accel.errors import InputError, MissingPackageError
from t5accel.records import aligned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]

LATENCY, THROUGHPUT, ASIDE, OUTSIDE = "#2a6f97", "#e09f3e", "#b8c2cc", "#c1666b"


def by_ladder(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each ladder, by what they call it.

    >>> by_ladder([dict(ladder="a"), dict(ladder="b"), dict(ladder="a")]).keys()
    dict_keys(['a', 'b'])
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["ladder"], []).append(row)
    return found


def fastest(rows: Rows, *, at_once: bool = False) -> Mapping[str, Any]:
    """The row of the highest ratio among those inside the gate.

    Args:
        rows: of one ladder.
        at_once: look at rungs that answer many texts at once, instead of those that answer one at a time.

    Raises:
        InputError: there is no such rung.

    >>> rows = [dict(rung=name, batch=1, inside=inside, ratio=dict(median=ratio))
    ...         for name, inside, ratio in (("naive", True, 1.0), ("int8", True, 20.0), ("student", False, 40.0))]
    >>> fastest(rows)["rung"]
    'int8'
    """
    able = _able(rows, at_once)
    if not able:
        raise InputError(f"No rung of {[row['rung'] for row in rows]} is inside the gate with that batch.")
    return max(able, key=lambda row: row["ratio"]["median"])


def _able(rows: Rows, at_once: bool) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["inside"] and (row["batch"] > 1) == at_once]


def way_to(rows: Rows, rung: str) -> list[Mapping[str, Any]]:
    """From the first rung to this one, each on the one before.

    Raises ``InputError`` for a rung that is not there.

    >>> rows = [dict(rung="naive", on=None), dict(rung="aside", on="naive"), dict(rung="cache", on="naive")]
    >>> [row["rung"] for row in way_to(rows, "cache")]
    ['naive', 'cache']
    """
    by_name = {row["rung"]: row for row in rows}
    way, name = [], rung
    while name is not None:
        if name not in by_name:
            raise InputError(f"There is no rung {name!r}; there are {', '.join(map(repr, by_name))}.")
        way.append(by_name[name])
        name = by_name[name]["on"]
    return way[::-1]


def account(rows: Rows, rung: str) -> str:
    """The factors on the way to a rung, their product, and the ratio that was measured between its ends.

    >>> rows = [dict(rung=name, adds=name, on=on, factor=dict(median=factor), ratio=dict(median=ratio))
    ...         for name, on, factor, ratio in (("naive", None, 1, 1), ("cache", "naive", 2.5, 2.5),
    ...                                         ("8 bits", "cache", 4, 10.2))]
    >>> print(account(rows, "8 bits"))
    2.50 (cache) x 4.00 (8 bits) = 10.0; measured from end to end: 10.2 times
    """
    steps = way_to(rows, rung)[1:]
    factors = [row["factor"]["median"] for row in steps]
    named = " x ".join(f"{factor:.2f} ({row['adds']})" for row, factor in zip(steps, factors, strict=True))
    measured = steps[-1]["ratio"]["median"] if steps else 1.0
    return f"{named} = {prod(factors):.1f}; measured from end to end: {measured:.1f} times"


_HEADER = ("rung", "on", "batch", "ms/text", "tokens/s", "factor", "in all", "MB", "peak MB", "BLEU", "ROUGE-L", "EM",
           "gate")  # fmt: skip


def table(rows: Rows) -> str:
    """A line for each rung; an en dash stands for what was not measured.

    Raises ``InputError`` without rows, and for rows of more than one ladder.

    >>> row = dict(
    ...     ladder="toy", rung="naive", on=None, batch=1, ms_per_text=400.0, tokens_per_s=100.0,
    ...     factor=dict(median=1.0), ratio=dict(median=1.0), size_bytes=35e6, peak_memory_bytes=None, quality=None,
    ...     inside=True,
    ... )
    >>> print(" ".join(table([row]).splitlines()[-1].split()))
    naive – 1 400.0 100 1.00 1.0 35 – – – – inside
    """
    _require_one_ladder(rows)
    lines = [_HEADER, *map(_cells, rows)]
    return "\n".join(aligned(lines, left=(0, 1), rule=True))


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    scores = [(row["quality"] or {}).get(name) for name in ("bleu", "rougeL", "exact_match")]
    peak = row["peak_memory_bytes"]
    return (
        row["rung"], row["on"] or "–", str(row["batch"]), f"{row['ms_per_text']:.1f}", f"{row['tokens_per_s']:.0f}",
        f"{row['factor']['median']:.2f}", f"{row['ratio']['median']:.1f}", f"{row['size_bytes'] / 1e6:.0f}",
        "–" if peak is None else f"{peak / 1e6:.0f}",
        *("–" if score is None else f"{score:.1f}" for score in scores),
        {True: "inside", False: "outside", None: "–"}[row["inside"]],
    )  # fmt: skip


def plot_ladders(ladders: Mapping[str, Rows], path: str | os.PathLike[str] | None = None) -> Figure:
    """A panel for each titled ladder: a bar for each rung, from the speed of the rung below to its own.

    The axis is logarithmic, so equal factors are bars of equal length. Colours tell what is on the way to the fastest
    rung, what was tried beside it, what answers many texts at once, and what is outside the gate.

    Raises:
        InputError: no ladders, or rows of several in one.
        MissingPackageError: matplotlib is not installed.

    >>> rows = [dict(ladder="toy", rung=name, adds=name, on=on, batch=1, inside=True, factor=dict(median=ratio),
    ...              ratio=dict(median=ratio, min=ratio, max=ratio))
    ...         for name, on, ratio in (("naive", None, 1.0), ("cache", "naive", 2.5))]
    >>> figure = plot_ladders({"a toy": rows})
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['1', 'x2.50, in all 2.5']
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError("Drawing needs matplotlib: pip install 't5accel[course]'.") from error

    if not ladders:
        raise InputError("There are no ladders to draw: climb one first.")
    for rows in ladders.values():
        _require_one_ladder(rows)
    heights = [len(rows) + 1.6 for rows in ladders.values()]
    figure = Figure(figsize=(9, 0.3 * sum(heights) + 0.5), layout="constrained")
    panels = figure.subplots(len(ladders), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    top = max(row["ratio"]["max"] for rows in ladders.values() for row in rows)
    for axes, (title, rows) in zip(panels, ladders.items(), strict=True):
        _panel(axes, rows)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlim(0.8, max(top, 10) * 4)  # room for the last label
    panels[-1].set_xlabel("times as fast as the naive loop (logarithmic: equal factors, equal lengths)")
    kinds = {LATENCY: "on the way to the fastest", ASIDE: "tried beside it", THROUGHPUT: "many texts at once",
             OUTSIDE: "outside the gate"}  # fmt: skip
    drawn = {bar.get_facecolor(): bar for axes in panels for bar in axes.patches}
    handles = [(bar, kinds[_hex(colour)]) for colour, bar in drawn.items()]
    handles.sort(key=lambda pair: list(kinds.values()).index(pair[1]))
    if len(handles) > 1:
        figure.legend(*zip(*handles, strict=True), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    return figure


def _panel(axes: Axes, rows: Rows) -> None:
    ends = [fastest(rows, at_once=at_once) for at_once in (False, True) if _able(rows, at_once)]
    taken = {row["rung"] for end in ends for row in way_to(rows, end["rung"])}
    places = {row["rung"]: place for place, row in enumerate(rows)}
    speeds = {row["rung"]: row["ratio"]["median"] for row in rows}
    for place, row in enumerate(rows):
        speed, below = speeds[row["rung"]], speeds.get(row["on"], 0.8)
        colour = OUTSIDE if row["inside"] is False else THROUGHPUT if row["batch"] > 1 else LATENCY
        colour = colour if row["rung"] in taken or colour == OUTSIDE else ASIDE
        axes.barh(place, speed - below, left=below, color=colour, height=0.62)
        if row["on"] is not None:
            axes.plot([below, below], [places[row["on"]] + 0.31, place + 0.31], color="#8795a1", linewidth=0.8)
        text = f"x{row['factor']['median']:.2f}, in all {_short(speed)}" if row["on"] else "1"
        low, high = row["ratio"]["min"], row["ratio"]["max"]
        axes.plot([low, high], [place, place], color="#333333", linewidth=1.2)  # the range over the rounds
        axes.annotate(text, (max(high, below), place), xytext=(5, 0), textcoords="offset points", va="center",
                      fontsize=9, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip
    axes.set_xscale("log")
    axes.axvline(100, color="#8795a1", linewidth=0.8, linestyle=":", zorder=0)
    axes.set_xticks([1, 10, 100], ["1", "10", "100"])
    axes.minorticks_off()
    axes.set_yticks(range(len(rows)), [row["adds"] for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _short(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"


def _hex(colour: tuple[float, ...]) -> str:
    from matplotlib.colors import to_hex

    return to_hex(colour)


def _require_one_ladder(rows: Rows) -> None:
    names = {row["ladder"] for row in rows}
    if len(names) != 1:
        raise InputError(f"The rows are of {len(names)} ladders ({', '.join(sorted(names))}): show one at a time.")
