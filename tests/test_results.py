"""Recorded results keep their format, and what the model card says stands in them."""

import json
import re
from pathlib import Path

import pytest

from t5accel.ladder_picture import by_ladder, fastest
from t5accel.peers import GRID, OPTIMUM, OURS_GENERATE, cell_of, int8_for, standings
from t5accel.scoreboard import Results

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "data/results").glob("*.json"))


def read(name: str) -> dict:
    return json.loads((ROOT / "data/results" / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_says_where_it_comes_from(path: Path) -> None:
    data = read(path.name)
    assert {"machine", "versions", "date", "commit", "command", "rows"} <= data.keys()
    assert data["rows"] and data["machine"]["cpu"] and data["versions"]["torch"] and data["commit"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", data["date"])
    assert re.match(r"t5accel |python scripts/", data["command"])


@pytest.mark.parametrize("path", [p for p in FILES if p.stem.startswith("scoreboard-")], ids=lambda path: path.stem)
def test_a_scoreboard_holds_what_a_ratio_needs(path: Path) -> None:
    results = Results.read(path)
    assert len({(row.source_tokens, row.new_tokens, row.batch, row.beams, row.threads) for row in results.rows}) == 1
    for row in results.rows:
        assert len(row.latency_s) >= 3 and min(row.latency_s) > 0
        assert row.peak_memory_bytes > row.bytes_on_disk
        assert (row.quality is not None) == (row.model == "mini")
        assert (row.ratio is None) == (row.technique == row.reference)
        if row.quality:
            assert row.quality["limit"] is None, "a recorded board is scored on the full sets"


def test_what_the_engine_costs_and_what_the_readme_says_of_it() -> None:
    rows = read("engine.json")["rows"]
    kinds = {
        kind: [row for row in rows if row["measured"] == kind] for kind in ("export", "soak", "overhead", "footprint")
    }
    assert [row["model"] for row in kinds["export"]] == ["mini", "random:t5-small", "random:t5-base"]
    (soak,) = kinds["soak"]
    assert soak["generations"] == 2000 and soak["settled_after"] == 200 and len(soak["resident_bytes"]) > 15
    greedy, generate = kinds["overhead"]
    assert greedy["in_decoder_session_us"] < greedy["per_token_us"] < generate["per_token_us"]
    alone, whole = kinds["footprint"]
    assert not {"torch", "transformers"} & set(alone["packages"]) and "torch" in whole["packages"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for number in (
        f"{alone['import_s']:.2f} s", f"{whole['import_s']:.1f} s", f"{alone['installed_bytes'] / 1e6:.0f} MB",
        f"{whole['installed_bytes'] / 1e6:.0f} MB", f"{kinds['export'][2]['seconds']:.0f} s",
        f"{(generate['per_token_us'] - greedy['per_token_us']) / 1e3:.1f} ms", f"{soak['growth']:.1%}",
    ):  # fmt: skip
        assert number in text.replace("\n", " "), f"the README lacks {number}"


def test_the_card_of_the_model_tells_its_recorded_quality() -> None:
    quality = read("training-mini.json")["quality"]
    card = (ROOT / "data/mini-t5/README.md").read_text(encoding="utf-8")
    lines = {line.split("|")[1].strip(): line for line in card.splitlines() if line.startswith("| ")}
    by_length = quality["translation"]["bleu_by_length"]
    expected = {
        "300 sentences of our own": [quality["translation"]["bleu"], *by_length.values()],
        "200 reports": [quality["summaries"][half]["rougeL"] for half in ("all", "seen", "unseen")],
    }
    for start, values in expected.items():
        for value in values:
            assert f"{value:.1f}" in lines[start], f"the card's line {start!r} lacks {value:.1f}"
    (held_out,) = (line for name, line in lines.items() if name.startswith("held-out"))
    assert f"{quality['held_out']['bleu']:.1f}" in held_out
    exact = [quality["questions"][half]["exact_match"] for half in ("all", "seen", "unseen")]
    assert all(f"{value:.1f}" in card for value in exact)
    assert "Tatoeba" in card and "CC BY 2.0 FR" in card


def test_the_readme_says_how_high_the_ladders_are() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split()).split("## Two commands")[0]
    ladders = by_ladder(read("ladder.json")["rows"])
    ends = [
        (title, fastest(rows, at_once=at_once)["ratio"]["median"])
        for title, rows in ladders.items() for at_once in {row["batch"] > 1 for row in rows} if "64 forced" not in title
    ]  # fmt: skip
    assert len(ends) == 3
    for title, ratio in ends:
        assert f"{ratio:.0f} times" in text, f"{title}: {ratio:.0f}"


def test_the_run_of_the_bundled_model_learned() -> None:
    rows = read("training-mini.json")["rows"]
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})
    for task in ("translation", "summaries", "questions"):
        assert rows[-1][task] < rows[0][task]


def test_the_peers_were_measured_on_the_whole_grid_and_the_readme_says_how_we_stand() -> None:
    rows = read("peers-cpu.json")["rows"]
    assert {cell_of(row) for row in rows} == {*GRID}
    for row in rows:
        assert "failed" in row or len(row["latency_s"]) >= 3, f"{row['system']} in {cell_of(row)}"
        if row["precision"] == "fp32" and row["system"].startswith("t5accel"):
            assert row["agreement"] == 1, f"{row['system']} in {cell_of(row)}"
    fp32 = list(standings(rows))
    boards = [
        [standing for standing in fp32 if standing.cell.batch == 1],
        [standing for standing in fp32 if standing.cell.batch > 1],
        list(standings(rows, ours=int8_for, precision="int8")),
        # In the largest cell, where not all fit in memory together, these two were measured apart.
        [
            *standings(rows, ours=OURS_GENERATE, peers=[OPTIMUM]),
            *standings(read("peers-cpu-largest.json")["rows"], ours=OURS_GENERATE, peers=[OPTIMUM]),
        ],
    ]
    assert [len(board) for board in boards] == [6, 12, 18, 18]
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    section = text.split("## Beside its peers")[1].split(" ## ")[0]
    quoted = re.findall(r"(\d\.\d\d)–(\d\.\d\d) times", section)
    ratios = [[standing.ratio for standing in board] for board in boards]
    assert quoted == [(f"{min(each):.2f}", f"{max(each):.2f}") for each in ratios]
    for standing in fp32:
        assert standing.ratio >= 1 or f"{standing.cell}, {standing.ratio:.2f}x ({standing.peer})" in section
