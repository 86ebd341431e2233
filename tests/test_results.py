"""Recorded results keep their format, and what the model card says stands in them."""

import json
import re
from pathlib import Path

import pytest

from t5accel.lab.ladder import by_ladder, fastest
from t5accel.lab.peers import GRID, OPTIMUM, OURS_GENERATE, cell_of, int8_for, named, standings

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
    rows = read(path.name)["rows"]
    for key in ("model", "source_tokens", "new_tokens", "batch", "beams", "threads", "reference"):
        assert len({row[key] for row in rows}) == 1
    for row in rows:
        assert len(row["latency_s"]) >= 3 and row["peak_memory_bytes"] > row["size_bytes"]
        assert ("bleu" in row) == (row["model"] == "mini") and (row["ratio"] == 1) == (
            row["system"] == row["reference"]
        )
        assert "limit" not in row, "a recorded board is scored on the full sets"


def test_what_the_engine_costs_and_what_the_readme_says_of_it() -> None:
    rows = read("engine.json")["rows"]
    kinds = {
        kind: [row for row in rows if row["measured"] == kind] for kind in ("export", "soak", "overhead", "footprint")
    }
    assert [row["model"] for row in kinds["export"]] == ["mini", "random:t5-small", "random:t5-base"]
    (soak,) = kinds["soak"]
    assert soak["settings"] == {"generations": 2000, "settled_after": 200} and len(soak["resident_bytes"]) > 15
    loops = {(row["system"], row["cell"]): row["us_per_token"] for row in kinds["overhead"]}
    greedy, generate = loops["greedy()", "in all"], loops["generate()", "in all"]
    assert loops["greedy()", "in the decoder session"] < greedy < generate
    alone, whole = kinds["footprint"]
    assert not {"torch", "transformers"} & set(alone["packages"]) and "torch" in whole["packages"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for number in (
        f"{alone['seconds']:.2f} s", f"{whole['seconds']:.1f} s", f"{alone['size_bytes'] / 1e6:.0f} MB",
        f"{whole['size_bytes'] / 1e6:.0f} MB", f"{kinds['export'][2]['seconds']:.0f} s",
        f"{(generate - greedy) / 1e3:.1f} ms", f"{soak['growth']:.1%}",
    ):  # fmt: skip
        assert number in text.replace("\n", " "), f"the README lacks {number}"


def test_the_card_of_the_model_tells_its_recorded_quality() -> None:
    quality, of_pairs = (row for row in read("training-mini.json")["rows"] if row["measured"] == "quality")
    card = (ROOT / "data/mini-t5/README.md").read_text(encoding="utf-8")
    lines = {line.split("|")[1].strip(): line for line in card.splitlines() if line.startswith("| ")}
    expected = {
        "300 sentences of our own": ["bleu", "bleu_3-5", "bleu_6-8", "bleu_9-14"],
        "200 reports": ["rougeL", "rougeL_seen", "rougeL_unseen"],
    }
    for start, names in expected.items():
        for name in names:
            assert f"{quality[name]:.1f}" in lines[start], f"the card's line {start!r} lacks {name}"
    (held_out,) = (line for name, line in lines.items() if name.startswith("held-out"))
    assert f"{of_pairs['bleu']:.1f}" in held_out
    assert all(f"{quality[name]:.1f}" in card for name in ("exact_match", "exact_match_seen", "exact_match_unseen"))
    assert "Tatoeba" in card and "CC BY 2.0 FR" in card


def test_the_readme_says_how_high_the_ladders_are() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split()).split("## Two commands")[0]
    ladders = by_ladder(read("ladder.json")["rows"])
    ends = [
        (title, fastest(rows, at_once=at_once)["ratio"])
        for title, rows in ladders.items() for at_once in {row["batch"] > 1 for row in rows} if "64 forced" not in title
    ]  # fmt: skip
    assert len(ends) == 3
    for title, ratio in ends:
        assert f"{ratio:.0f} times" in text, f"{title}: {ratio:.0f}"


def test_the_run_of_the_bundled_model_learned() -> None:
    rows = [row for row in read("training-mini.json")["rows"] if row["measured"] == "training"]
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})
    for task in ("translation", "summaries", "questions"):
        assert rows[-1][task] < rows[0][task]


def test_the_peers_were_measured_on_the_whole_grid_and_the_readme_says_how_we_stand() -> None:
    rows = read("peers-cpu.json")["rows"]
    assert {cell_of(row) for row in rows} == {*GRID}
    for row in rows:
        assert "failed" in row or len(row["latency_s"]) >= 3, f"{row['system']} in {cell_of(row)}"
        if row["precision"] == "fp32" and row["system"].startswith("t5accel"):
            assert row["equal"] == row["of"], f"{row['system']} in {cell_of(row)}"
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
        assert standing.ratio >= 1 or f"{named(standing.cell)}, {standing.ratio:.2f}x ({standing.peer})" in section
