"""Recorded GPU runs drawn, from made-up files: one card and two, whole and partial; and GPUs by name."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import pytest

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bench.gpu import figures as pictures
from bench.gpu.cards import DATASHEET, bandwidth, recorded_cards, slug
from bench.gpu.cells import LENGTHS, cells_for
from bench.systems import GRAPH, NAIVE, RECOMPUTE, REFERENCE, STATIC
from t5accel.errors import InputError

CELLS = cells_for((9, 0))

SMALL = {REFERENCE: 1.0, STATIC: 0.5, GRAPH: 0.1}
CACHE = {REFERENCE: 1.0, NAIVE: 2.0, RECOMPUTE: 0.4, GRAPH: 0.2}
FLOOR = {"kernels": 130, "eager_kernels": 430.0, "launch_s": 4e-6, "replayed_s": 2e-6, "bytes_per_s": 3e12,
         "bytes_per_step": 67_000_000, "floor_s": 0.0003}  # fmt: skip
PREDICTED = {"kernels": 120, "eager_kernels": 422, "launch_s": 5e-6, "replayed_s": 1e-6}


def card(name: str, *, speed: float = 1.0, without: Callable[[str, str], bool] = lambda cell, system: False) -> Any:
    """A file of the GPU suite; some systems of some cells failed."""
    cells = {"t5-small": (SMALL, 128)} | {f"cache, {length} tokens": (CACHE, length) for length in LENGTHS}
    rows: list[dict[str, Any]] = []
    for cell, (systems, tokens) in cells.items():
        for system, seconds in systems.items():
            row = {"cell": cell, "measured": "speed", "system": system, "new_tokens": tokens}
            timed = {"latency_s": [seconds / speed * noise for noise in (1, 1.1, 0.9)],
                     "ratio_samples": [next(iter(systems.values())) / seconds] * 3}  # fmt: skip
            rows.append(row | ({"failed": "out of memory"} if without(cell, system) else timed))
    rows.append({"cell": "t5-small, floor", "measured": "floor", "system": GRAPH, "new_tokens": 128, **FLOOR})
    return {"machine": {"gpu": {"name": name}}, "rows": rows}


ONE = {"h100": card("NVIDIA H100 80GB HBM3")}
TWO = ONE | {"h200": card("NVIDIA H200", speed=2.0)}
PARTIAL = {"h100": card("NVIDIA H100 80GB HBM3", without=lambda cell, system: system == GRAPH or "512" in cell)}
NOTHING = {"h100": {"machine": {"gpu": {"name": "NVIDIA H100 80GB HBM3"}}, "rows": []}}


@pytest.fixture
def axis() -> Any:
    figure, axis = plt.subplots()
    yield axis
    figure.canvas.draw()  # what cannot be drawn raises here
    plt.close(figure)


def test_bars_of_two_cards_and_cells(axis: Any) -> None:
    pictures.bars(axis, TWO, ["t5-small", "cache, 16 tokens"])
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels[0] == f"t5-small: {STATIC}" and len(labels) == 5 and len(axis.patches) == 10
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["h100", "h200"]
    centres = [bar.get_y() + bar.get_height() / 2 for bar in axis.patches]
    assert len(set(centres)) == 10, "bars of two cards lie on each other"
    axis.clear()
    pictures.bars(axis, {**TWO, "h200": PARTIAL["h100"]}, ["t5-small"])
    assert [bar.get_width() for bar in axis.patches] == pytest.approx([2, 10, 2]), "what failed is left out"
    assert [text.get_text() for text in axis.texts] == ["2.0x", "10.0x", "2.0x"]


@pytest.mark.parametrize("cards", [{}, {"h100": card("NVIDIA H100", without=lambda cell, system: system == REFERENCE)}])
def test_nothing_to_draw_is_said(axis: Any, cards: Any) -> None:
    pictures.bars(axis, cards, ["t5-small", "t5-base"])
    assert "t5-base" in axis.texts[0].get_text() and not axis.patches
    pictures.by_length(axis, {}, {"h100": lambda length: 1.0})
    assert not axis.lines


def test_lines_by_length(axis: Any) -> None:
    pictures.by_length(axis, {"h200": PARTIAL["h100"]})
    assert GRAPH not in {line.get_label() for line in axis.lines}, "which failed"
    axis.clear()
    pictures.by_length(axis, ONE, {"h100": lambda length: length * 1e-6, "t4": lambda length: 1.0})
    lines = {line.get_label(): line for line in axis.lines}
    assert {*lines} == {NAIVE, REFERENCE, RECOMPUTE, GRAPH, f"h100: {RECOMPUTE}, predicted"}
    assert lines[GRAPH].get_xdata().tolist() == [*LENGTHS]
    assert lines[GRAPH].get_ydata() == pytest.approx([0.2 / length * 1e3 for length in LENGTHS])
    assert lines[f"h100: {RECOMPUTE}, predicted"].get_ydata() == pytest.approx([length * 1e-3 for length in LENGTHS])


@pytest.mark.parametrize("cards", [TWO, PARTIAL, NOTHING])
def test_the_overview_shows_cells_of_the_suite(cards: Any) -> None:
    figure = pictures.overview(cards)
    figure.canvas.draw()
    assert len(figure.axes) == bool(pictures.times_as_fast(cards, pictures.PANELS[0])) + 1, "the rest was not timed"
    plt.close(figure)
    drawn = {cell for cells in pictures.PANELS for cell in cells} | {f"cache, {length} tokens" for length in LENGTHS}
    assert drawn <= {cell.name for cell in CELLS if cell.measured in ("speed", "compile", "requests")}


def test_published_figures_stand_beside_ours_and_are_called_published() -> None:
    assert pictures.beside_published(TWO) == ""
    rows = [{"cell": f"bart-large, batch {batch}", "system": GRAPH, "latency_s": [1.0], "tokens_per_s": batch * 1000.0}
            for batch in (32, 128)]  # fmt: skip
    head, *theirs, ours, source = pictures.beside_published({"h100": {"rows": rows}}).splitlines()
    assert head.split()[-3:] == ["32", "64", "128"] and ours.split()[-3:] == ["32,000", "–", "128,000"]
    assert [line.split()[-3:] for line in theirs] == [["10,662", "16,209", "23,518"], ["12,611", "22,007", "31,544"]]
    assert all("published" in line for line in theirs) and source.endswith("No measurement of ours.")


def test_a_bar_is_relative_to_the_row_s_own_reference() -> None:
    rows = [{"cell": "in flight, 64 rows", "system": name, "reference": "batches", "latency_s": [1.0], "ratio": ratio}
            for name, ratio in (("batches", 1.0), ("in flight", 40.0))]  # fmt: skip
    assert pictures.times_as_fast({"h100": {"rows": rows}}, ["in flight, 64 rows"]) == {"in flight": {"h100": 40.0}}


def test_floors_stand_beside_predictions_from_the_recorded_card() -> None:
    first, second = pictures.floors(TWO, PREDICTED).split("\n\n")
    lines = {line[: line.index("  ")]: line.split()[-2:] for line in first.splitlines()}
    assert first.startswith("h100, t5-small, floor") and second.startswith("h200")
    assert lines["kernels of a captured step"] == ["120", "130"] and lines["GB/s"] == ["3350", "3000"]
    assert lines["µs for a kernel in a graph"] == ["1", "2"]
    assert lines["ms a step, at least"] == ["0.14", "0.3"], "120 kernels of 1 µs, and 67 MB at 3,350 GB/s"
    assert lines["ms a step"] == ["–", "0.7812"]
    assert "4800" in second


def test_what_failed_is_listed() -> None:
    assert pictures.failed(ONE) == ""
    lines = pictures.failed({**TWO, "h200": PARTIAL["h100"]}).splitlines()
    assert lines[0] == f"h200: t5-small: {GRAPH}: out of memory" and len(lines) == 1 + 3 + 4


@pytest.mark.parametrize(("name", "expected"), [
    ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA H100 NVL", "h100-nvl"),
    ("NVIDIA H200", "h200"), ("NVIDIA H20", "h20"), ("Tesla T4", "t4"), ("NVIDIA T4", "t4"),
    ("NVIDIA A100-SXM4-40GB", "a100"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA A100 80GB PCIe", "a100-pcie"),
    ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090-laptop"),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx-4070-ti-super"), ("NVIDIA L40S", "l40s"), ("NVIDIA L4", "l4"),
    ("NVIDIA A10", "a10"), ("NVIDIA A10G", "a10g"), ("Tesla V100-SXM2-16GB", "v100"),
    ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"), ("AMD Instinct MI300X", "mi300x"),
    ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "h100-mig-3g-40gb"), ("NVIDIA Graphics", "nvidia-graphics"),
])  # fmt: skip
def test_slug(name: str, expected: str) -> None:
    assert slug(name) == expected


def test_bandwidth_is_the_driver_s_then_the_datasheet_s() -> None:
    assert bandwidth({"name": "NVIDIA H100 80GB HBM3"}) == DATASHEET["h100"] == 3.35e12
    assert bandwidth({"name": "NVIDIA H100 PCIe"}) == 2.0e12
    assert bandwidth({"name": "NVIDIA H200", "bus_bytes_per_s": 4.9e12}) == 4.9e12
    assert bandwidth({"name": "NVIDIA H200", "bus_bytes_per_s": None}) == 4.8e12
    assert bandwidth({"name": "NVIDIA A100-SXM4-40GB", "memory_bytes": 42_300_000_000}) == 1.555e12
    assert bandwidth({"name": "NVIDIA A100-SXM4-80GB", "memory_bytes": 85_100_000_000}) == 2.039e12
    assert bandwidth({"name": "NVIDIA H100 80GB HBM3 MIG 3g.40gb"}) is None, "a part of a card is not the card"
    with pytest.raises(InputError, match="name"):
        slug(" - ")


def test_recorded_cards_are_those_of_files_named_after_them(tmp_path: Path) -> None:
    assert recorded_cards(tmp_path) == {}
    for file, gpu in {
        "gpu-h200.json": {"name": "NVIDIA H200"}, "gpu-h100.json": {"name": "NVIDIA H100 80GB HBM3"},
        "gpu-h100-4f0-1700000000.json": {"name": "NVIDIA H100 80GB HBM3"},  # put aside
        "gpu-rehearsal.json": None, "scoreboard.json": {"name": "NVIDIA H200"},
    }.items():  # fmt: skip
        (tmp_path / file).write_text(json.dumps({"machine": {"gpu": gpu}, "commit": file, "rows": []}))
    cards = recorded_cards(tmp_path)
    assert {card: record["commit"] for card, record in cards.items()} == {
        "h100": "gpu-h100.json", "h200": "gpu-h200.json",
    }  # fmt: skip


def test_importing_it_is_light() -> None:
    asked = "import sys, bench.gpu.cards; print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
