"""The scoreboard: measured rows, their file, and the table and picture drawn from them and from nothing else."""

from __future__ import annotations

import base64
import html
import io
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from t5accel.errors import InputError, MissingPackageError
from t5accel.lab.records import aligned, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Row:
    """One technique, measured: speed, size, memory and quality of the same recipe on the same machine.

    Attributes:
        technique: what a reader calls it; ``backend`` is the module or library that ran it.
        precision: ``"fp32"`` …; ``recipe`` names how it was reached (a hash once recipes have options).
        source_tokens, new_tokens: per sequence; the new ones were forced.
        latency_s: raw seconds of whole generations.
        bytes_on_disk: the weights as saved.
        base_memory_bytes: of a process of its own that has imported the libraries and nothing more.
        peak_memory_bytes: of the same process after it loaded the model and generated once; ``None`` if not measured.
        quality: a ``QualityReport`` as JSON, on the bundled model only.
        ratio: reference time over this time, pairwise, ``{"samples", "median", "min", "max"}``; ``None`` for the
            reference itself.
        equality: what was compared with the reference before timing, and what came out.
    """

    technique: str
    backend: str
    model: str
    precision: str
    recipe: str
    batch: int
    beams: int
    source_tokens: int
    new_tokens: int
    threads: int
    latency_s: tuple[float, ...]
    tokens_per_s: float
    bytes_on_disk: int
    peak_memory_bytes: int | None
    quality: dict[str, Any] | None
    reference: str
    ratio: dict[str, Any] | None
    equality: str
    machine: str
    versions: dict[str, str] = field(default_factory=dict)
    base_memory_bytes: int | None = None

    @property
    def ratio_median(self) -> float:
        return 1.0 if self.ratio is None else self.ratio["median"]


@dataclass(frozen=True)
class Results:
    """A file under ``data/results/``: rows with the machine, versions, commit and command that they came from."""

    machine: dict[str, Any]
    versions: dict[str, str]
    date: str
    commit: str | None
    command: str
    rows: tuple[Row, ...]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write JSON to ``path`` in one piece: an interrupted write leaves the old file."""
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Results:
        """Read what `write` wrote. Raises ``InputError`` that names the file and what is wrong with it."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            names = {f.name for f in fields(Row)}
            rows = tuple(
                Row(**{k: tuple(v) if k == "latency_s" else v for k, v in row.items() if k in names})
                for row in data["rows"]
            )
            return cls(**{f.name: data[f.name] for f in fields(cls) if f.name != "rows"}, rows=rows)
        except FileNotFoundError as error:
            raise InputError(f"No results at {path}: `t5accel bench --json {path}` writes them.") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path} is not a results file of this version ({error!r}): measure again.") from error


_HEADER = ("technique", "precision", "ms/token", "tokens/s", "ratio", "MB", "peak MB", "BLEU", "ROUGE-L", "EM")


def cells(row: Row) -> tuple[str, ...]:
    """The texts of a table line, in the order of the header; an en dash stands for what was not measured."""
    per_token = median(row.latency_s) / row.new_tokens * 1e3
    quality = row.quality or {}

    def score(*path: str) -> str:
        value: Any = quality
        for key in path:
            value = (value or {}).get(key)
        return "–" if value is None else f"{value:.1f}"

    peak = "–" if row.peak_memory_bytes is None else f"{row.peak_memory_bytes / 1e6:.0f}"
    return (
        row.technique, row.precision, f"{per_token:.2f}", f"{row.tokens_per_s:.0f}", f"{row.ratio_median:.2f}x",
        f"{row.bytes_on_disk / 1e6:.0f}", peak, score("translation", "bleu"), score("summaries", "all", "rougeL"),
        score("questions", "all", "exact_match"),
    )  # fmt: skip


def caption(rows: Sequence[Row]) -> str:
    """One line that says under which conditions the rows were measured."""
    _require(rows)
    first = rows[0]
    return (
        f"{first.model}, batch {first.batch}, beams {first.beams}, {first.source_tokens} source and "
        f"{first.new_tokens} forced new tokens, {first.threads} threads; ratio to {first.reference} in one run; "
        f"{first.machine}"
    )


def table(rows: Sequence[Row]) -> str:
    """A plain-text table with its caption.

    Raises ``InputError`` when the rows were not measured under equal conditions: one table, one kind of work.

    >>> row = Row(
    ...     technique="cache", backend="torch", model="mini", precision="fp32", recipe="fp32", batch=1, beams=1,
    ...     source_tokens=8, new_tokens=10, threads=2, latency_s=(0.05, 0.04, 0.06), tokens_per_s=200.0,
    ...     bytes_on_disk=35_500_000, peak_memory_bytes=None, quality=None, reference="cache", ratio=None,
    ...     equality="10 tokens", machine="a laptop",
    ... )
    >>> print(table([row]).splitlines()[-1])
    cache           fp32      5.00       200  1.00x  36        –     –        –   –
    """
    _require(rows)
    lines = [_HEADER, *map(cells, rows)]
    return "\n".join([caption(rows), "", *aligned(lines, rule=True)])


def plot(rows: Sequence[Row], path: str | os.PathLike[str] | None = None) -> Figure:
    """Bars of the ratio to the reference with the range over rounds; saved if ``path`` is given.

    Raises ``InputError`` as `table` does, and for a file name whose ending is no picture's.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError("Drawing needs matplotlib: pip install 't5accel[course]'.") from error

    _require(rows)
    figure = Figure(figsize=(8, 0.9 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    ratios = [row.ratio_median for row in rows]
    low = [m - (row.ratio["min"] if row.ratio else m) for m, row in zip(ratios, rows, strict=True)]
    high = [(row.ratio["max"] if row.ratio else m) - m for m, row in zip(ratios, rows, strict=True)]
    colours = ["#9aa5b1" if row.ratio is None else "#2a6f97" for row in rows]
    axes.barh(range(len(rows)), ratios, xerr=(low, high), color=colours, ecolor="#333333", capsize=3)
    axes.set_yticks(range(len(rows)), [f"{row.technique} ({row.precision})" for row in rows])
    axes.invert_yaxis()
    axes.axvline(1.0, color="#333333", linewidth=0.8)
    axes.set_xlim(0, 1.18 * max(m + h for m, h in zip(ratios, high, strict=True)))
    for y, (value, extra) in enumerate(zip(ratios, high, strict=True)):
        axes.annotate(f"{value:.2f}x", (value + extra, y), xytext=(6, 0), textcoords="offset points", va="center")
    first = rows[0]
    axes.set_xlabel(f"speed, as a ratio to {first.reference} (longer is faster)")
    axes.set_title(
        f"{first.model}, batch {first.batch}, {first.source_tokens} source and {first.new_tokens} new tokens, "
        f"{first.threads} threads", fontsize=10,
    )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        try:
            figure.savefig(path, dpi=150)
        except ValueError as error:  # an unknown ending
            raise InputError(f"Cannot draw to {path}: {error}.") from error
    return figure


def page(boards: Sequence[tuple[str, Results]], notes: str = "") -> str:
    """A self-contained HTML page: for each titled board its picture, table, machine and command. ``notes`` is HTML."""
    parts = []
    for title, results in boards:
        picture = io.BytesIO()
        plot(results.rows).savefig(picture, format="png", dpi=120)
        encoded = base64.b64encode(picture.getvalue()).decode()
        head = "".join(f"<th>{html.escape(name)}</th>" for name in _HEADER)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(row)) + "</tr>" for row in results.rows
        )
        versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
        parts.append(
            f"<h2>{html.escape(title)}</h2><p>{html.escape(caption(results.rows))}</p>"
            f'<img alt="Speed of each technique as a ratio to the reference" src="data:image/png;base64,{encoded}">'
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            f"<p><small>{html.escape(results.date)}; commit {html.escape(results.commit or 'unknown')}; "
            f"<code>{html.escape(results.command)}</code>; {html.escape(versions)}</small></p>"
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


_CONDITIONS = ("model", "batch", "beams", "source_tokens", "new_tokens", "threads", "reference", "machine")


def _require(rows: Sequence[Row]) -> None:
    if not rows:
        raise InputError("There are no rows to show: measure some first (`t5accel bench`).")
    for name in _CONDITIONS:
        values = {getattr(row, name) for row in rows}
        if len(values) > 1:
            raise InputError(f"The rows differ in {name} ({', '.join(map(str, sorted(values)))}): show them apart.")
