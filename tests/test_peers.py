"""Peers: equal tokens first, pairs within rounds, resumed where it stopped, failures named; and what is drawn of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from script import load_script

from t5accel.errors import InputError, PeerError
from t5accel.graphs.recipes import RECIPES
from t5accel.heat_map import plot_standings
from t5accel.peers import (
    GRID,
    OPTIMUM,
    OURS,
    OURS_EXACT,
    OURS_GENERATE,
    QUICK,
    REFERENCE,
    SYSTEMS,
    Answer,
    Cell,
    Standing,
    System,
    Worker,
    _row,
    cell_of,
    int8_for,
    measure_cell,
    pairwise,
    standings,
    table,
)

ROOT = Path(__file__).resolve().parents[1]
CELL = Cell(batch=2, source_tokens=5, beams=1, new_tokens=4)
TOKENS = np.array([[5, 6, 7, 8], [9, 10, 11, 12]])


class Fake:
    """A system that takes these seconds, one after the other, and notes when it was asked."""

    def __init__(self, name: str, seconds: list[float], diary: list[str], tokens: np.ndarray = TOKENS):
        self.name, self.seconds, self.diary, self.tokens = name, iter(seconds), diary, tokens
        self.asked: list[np.ndarray] = []

    def __call__(self, ids: np.ndarray, cell: Cell) -> Answer:
        assert cell == CELL
        self.diary.append(self.name)
        self.asked.append(ids)
        return Answer(next(self.seconds), self.tokens)


def system(name: str, precision: str = "fp32") -> System:
    return System(name, "eager", "somewhere", precision)


def test_rivals_are_interleaved_on_the_same_sources_after_a_round_that_does_not_count():
    diary: list[str] = []
    a, b = Fake("a", [9, 1, 2, 3], diary), Fake("b", [9, 2, 6, 3], diary)
    rows = measure_cell(CELL, {system("a"): a, system("b"): b}, rounds=3)
    assert "".join(diary) == "ab" + "ab" + "ba" + "ab"
    assert [row["latency_s"] for row in rows] == [[1, 2, 3], [2, 6, 3]]
    assert pairwise(rows, ours="a", peer="b") == 2
    (first, *others) = [*a.asked, *b.asked]
    assert first.shape == (2, 5) and first.min() >= 3
    assert all((ids == first).all() for ids in others)


def test_other_tokens_are_counted_and_not_hidden():
    wrong = TOKENS.copy()
    wrong[0, 3] = 99
    rows = measure_cell(
        CELL, {system("a"): Fake("a", [1] * 2, []), system("b"): Fake("b", [1] * 2, [], wrong)}, rounds=1
    )
    assert [row["agreement"] for row in rows] == [1.0, 7 / 8]
    assert "*250.00" in table(rows).splitlines()[1]
    rows[1]["precision"] = "int8"  # of which nobody expects all
    assert "*" not in table(rows)


def fails(ids: np.ndarray, cell: Cell) -> Answer:
    raise PeerError("out of memory")


def test_a_system_that_fails_is_a_row_that_says_why():
    rows = measure_cell(CELL, {system("a"): Fake("a", [1, 2], []), system("b"): fails}, rounds=1)
    assert rows[1]["latency_s"] == [] and rows[1]["failed"] == "out of memory"
    assert pairwise(rows, ours="a", peer="b") is None and pairwise(rows, ours="b", peer="a") is None
    assert table(rows).splitlines()[1].endswith("!")


def test_a_system_that_ends_while_it_is_timed_keeps_no_times():
    class Mortal(Fake):
        def __call__(self, ids: np.ndarray, cell: Cell) -> Answer:
            if len(self.asked) == 2:
                raise PeerError("killed")
            return super().__call__(ids, cell)

    rows = measure_cell(CELL, {system("a"): Fake("a", [1] * 4, []), system("b"): Mortal("b", [1] * 4, [])}, rounds=3)
    assert rows[1]["failed"] == "killed" and rows[1]["latency_s"] == [] and rows[1]["agreement"] == 1
    assert len(rows[0]["latency_s"]) == 3 and pairwise(rows, ours="a", peer="b") is None


def test_less_work_is_no_comparison():
    short = Fake("b", [1, 1], [], TOKENS[:, :2])
    rows = measure_cell(CELL, {system("a"): Fake("a", [1, 2], []), system("b"): short}, rounds=1)
    assert rows[1]["latency_s"] == [] and "(2, 2) instead of (2, 4)" in rows[1]["failed"]


def test_a_degenerate_reference_is_no_evidence():
    with pytest.raises(InputError, match="degenerate"):
        measure_cell(CELL, {system("a"): Fake("a", [1, 1], [], np.full((2, 4), 7))}, rounds=1)
    with pytest.raises(PeerError, match="memory"):
        measure_cell(CELL, {system("a"): fails}, rounds=1)
    for rounds, systems in ((0, {system("a"): fails}), (1, {})):
        with pytest.raises(InputError, match="at least one"):
            measure_cell(CELL, systems, rounds=rounds)


def row(name: str, seconds: list[float], cell: Cell = CELL, precision: str = "fp32") -> dict[str, Any]:
    return {"system": name, "precision": precision, "batch": cell.batch, "source_tokens": cell.source_tokens,
            "beams": cell.beams, "new_tokens": cell.new_tokens, "latency_s": seconds, "agreement": 1.0}  # fmt: skip


def test_we_stand_beside_the_best_peer_of_our_precision():
    other = Cell(1, 32, 4, 8)
    rows = [row(OURS, [1, 1, 1]), row(OURS_GENERATE, [0.5] * 3), row(REFERENCE, [3, 3, 3]), row(OPTIMUM, [2, 1.5, 9]),
            row("tiny", [0.1] * 3, precision="int8"), row("broken", []), row(OURS, [2.0], other),
            row(OPTIMUM, [1.0], other)]  # fmt: skip
    assert list(standings(rows)) == [Standing(CELL, OPTIMUM, 2), Standing(other, OPTIMUM, 0.5)]
    assert list(standings(rows, precision="int8")) == [Standing(CELL, "tiny", 0.1)]
    assert list(standings(rows, ours=OURS_GENERATE, peers=[REFERENCE])) == [Standing(CELL, REFERENCE, 6)]


def test_the_grid_is_that_of_the_protocol():
    assert {(c.batch, c.source_tokens, c.beams) for c in GRID} == {
        (batch, source, beams) for batch in (1, 8, 32) for source in (32, 128, 512) for beams in (1, 4)
    }
    assert len(GRID) == 18 and set(QUICK) < set(GRID)
    assert SYSTEMS[0].name == REFERENCE and [s.name for s in SYSTEMS if s.ours][:3] == [OURS, OURS_GENERATE, OURS_EXACT]
    assert {(s.precision, s.ours) for s in SYSTEMS} >= {("int8", True), ("int8", False), ("int4", True)}
    assert {int8_for(cell) for cell in GRID} <= {s.name for s in SYSTEMS if s.ours and s.precision == "int8"}
    assert len({s.name for s in SYSTEMS}) == len(SYSTEMS)
    everywhere = [s for s in SYSTEMS if all(map(s.cells, GRID))]
    assert {s.name for s in SYSTEMS} - {s.name for s in everywhere} == {"torch.compile, static cache", OURS_EXACT}


def test_every_environment_has_its_list_with_exact_versions():
    wanted = {s.environment for s in SYSTEMS if not s.ours}
    lists = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "peers").glob("*.txt")}
    assert lists.keys() == wanted
    for text in lists.values():
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        assert lines and all(line.count("==") == 1 for line in lines)
        assert any(line.startswith("torch==2.13.0") for line in lines)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"PEERS := {' '.join(dict.fromkeys(s.environment for s in SYSTEMS if not s.ours))}\n" in makefile


def test_a_heat_map_shows_every_cell_of_every_board(tmp_path: Path):
    board = [Standing(cell, "OpenVINO", 0.8 + number / 10) for number, cell in enumerate(GRID)]
    figure = plot_standings({"one": board, "two": board[:6], "none": []}, tmp_path / "there/map.png")
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert len(texts) == 24 and "0.80x\nOpenVINO" in texts
    assert (tmp_path / "there/map.png").stat().st_size > 10_000
    with pytest.raises(InputError, match="make peers"):
        plot_standings({"none": []})


# Workers: the real script, with the engines that the test environment has.


def start(engine: str, folder: Path, model: Path) -> Worker:
    command = [sys.executable, str(ROOT / "scripts/peer_worker.py"), engine, str(model), "--scratch",
               str(folder / "scratch"), "--threads", "1"]  # fmt: skip
    environment = {"T5ACCEL_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return Worker(command, log=folder / f"{engine}.log", environment=environment)


@pytest.fixture(scope="module")
def workers(tiny_t5, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    folder = tmp_path_factory.mktemp("workers")
    tiny_t5("shallower-decoder").save_pretrained(folder / "model")
    started = {engine: start(engine, folder, folder / "model") for engine in ("eager", "ours", "ours-generate")}
    yield started
    for worker in started.values():
        worker.close()
        assert worker.process.returncode == 0


@pytest.mark.parametrize("beams", [1, 3])
def test_workers_generate_what_transformers_does(workers: dict[str, Worker], beams: int):
    cell = Cell(batch=2, source_tokens=6, beams=beams, new_tokens=7)
    ids = np.random.default_rng(0).integers(3, 300, (2, 6))
    answers = {engine: worker(ids, cell) for engine, worker in workers.items()}
    assert len(np.unique(answers["eager"].tokens)) > 3
    for answer in answers.values():
        assert answer.seconds > 0
        np.testing.assert_array_equal(answer.tokens, answers["eager"].tokens)


def test_a_worker_tells_its_versions(workers: dict[str, Worker]):
    for worker in workers.values():
        assert {"numpy", "torch", "transformers", "onnxruntime"} <= worker.versions.keys()


def test_a_worker_says_why_it_cannot_generate_and_stays(workers: dict[str, Worker]):
    cell = Cell(batch=1, source_tokens=2, beams=1, new_tokens=3)
    with pytest.raises(PeerError, match="index out of range"):
        workers["eager"](np.array([[5, 10**6]]), cell)
    assert workers["eager"](np.array([[5, 6]]), cell).tokens.shape == (1, 3)


def test_a_worker_says_why_it_does_not_come_up(tmp_path: Path):
    with pytest.raises(PeerError, match="(?s)eager.*nowhere"):
        start("eager", tmp_path, tmp_path / "nowhere")


@pytest.fixture
def script() -> Any:
    return load_script("peers")


def test_an_interrupted_grid_goes_on_in_its_order(script: Any, tmp_path: Path):
    path, conditions = tmp_path / "rows.json", {"commit": "abc", "rounds": 3}
    script.write_json(path, script.content(conditions, [row(OURS, [1], GRID[1]), row(OURS, [1], GRID[0])]))
    assert [cell_of(entry) for entry in script.rows_so_far(path, conditions)] == [GRID[0], GRID[1]]
    assert {"date", "command", "rows"} <= json.loads(path.read_text(encoding="utf-8")).keys()


def test_a_missing_environment_is_named(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/peers.py"), "--build", str(tmp_path), "--json", str(tmp_path / "x.json")],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode != 0 and "transformers4/bin/python is missing: `make peers`" in done.stderr
    assert not (tmp_path / "x.json").exists()


def test_our_rows_say_by_which_recipe() -> None:
    rows = {system.name: _row(system, GRID[0]) for system in SYSTEMS}
    assert rows["t5accel int8 for throughput"]["recipe"] == "int8-dynamic"
    for system in SYSTEMS:
        row = rows[system.name]
        assert ("hash" in row) == system.ours
        if system.ours:
            assert row["hash"] == RECIPES[row["recipe"]].hash
