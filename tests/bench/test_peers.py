"""Peers: equal tokens first, pairs within rounds, resumed where it stopped, failures named; and what is drawn of it."""

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TINY

from bench import peers
from bench.harness import paired_ratio
from bench.peers import GRID, GRIDS, OPTIMUM, OURS, PEERS, REFERENCE, PeerResult, Worker, int8_for, peer_results
from bench.results import checked
from t5accel.errors import InputError, PeerError
from t5accel.models.families import BEYOND_T5
from t5accel.models.random_init import random_model, random_t5
from t5accel.precision.recipes import RECIPES
from t5accel.timing import Work

ROOT = Path(__file__).resolve().parents[2]
CELL = Work(batch=2, source_tokens=5, new_tokens=4)
TOKENS = np.array([[5, 6, 7, 8], [9, 10, 11, 12]])


def system(name: str, precision: str = "fp32") -> peers.PeerSystem:
    return peers.PeerSystem(name, "eager", "somewhere", precision)


def answering(tokens: np.ndarray, asked: list[np.ndarray] | None = None) -> Any:
    """A worker that gives these tokens, and notes what it was asked."""

    def generate(ids: np.ndarray, cell: Work) -> np.ndarray:
        assert cell == CELL
        if asked is not None:
            asked.append(ids)
        return tokens

    return generate


def fails(ids: np.ndarray, cell: Work) -> np.ndarray:
    raise PeerError("out of memory")


def cell_rows(rounds: int = 1, **workers: Any) -> list[dict[str, Any]]:
    systems = {system(name): worker for name, worker in workers.items()}
    return peers.measure_cell(CELL, systems, rounds=rounds, model="toy", threads=2)


def test_all_read_the_same_sources_and_our_rows_say_by_which_recipe():
    asked: list[np.ndarray] = []
    rows = cell_rows(3, a=answering(TOKENS, asked), b=answering(TOKENS, asked))
    assert len(asked) == 2 * (1 + 3) and all((ids == asked[0]).all() for ids in asked)
    assert asked[0].shape == (2, 5) and asked[0].min() >= 3
    for entry in rows:
        assert peers.cell_of(checked(entry)) == CELL and (entry["model"], entry["threads"]) == ("toy", 2)
    assert paired_ratio(rows, "b", "a")["ratio"] == rows[1]["ratio"]
    ours = next(system for system in PEERS if system.name == "t5accel int8 for throughput")
    rows = peers.measure_cell(CELL, {PEERS[0]: answering(TOKENS), ours: answering(TOKENS)}, rounds=1, model="toy")
    assert "recipe_hash" not in rows[0] and rows[1]["recipe_hash"] == RECIPES["int8-dynamic"].hash


def test_other_tokens_are_counted_and_not_hidden():
    wrong = TOKENS.copy()
    wrong[0, 3] = 99
    rows = cell_rows(a=answering(TOKENS), b=answering(wrong))
    assert [(entry["equal"], entry["of"]) for entry in rows] == [(8, 8), (7, 8)]
    assert "*" in peers.table(rows).splitlines()[1]
    rows[1]["precision"] = "int8"  # of which nobody expects all
    assert "*" not in peers.table(rows)


def test_a_system_that_fails_or_does_less_is_a_row_that_says_why():
    rows = cell_rows(a=answering(TOKENS), b=fails, c=answering(TOKENS[:, :2]))
    assert "out of memory" in rows[1]["failed"] and "(2, 2) instead of (2, 4)" in rows[2]["failed"]
    assert "latency_s" not in rows[1] and peers.table(rows).splitlines()[1].split()[-3:] == ["–", "!", "!"]
    assert paired_ratio(rows, "a", "b") is None and paired_ratio(rows, "b", "a") is None
    with pytest.raises(PeerError, match="memory"):
        cell_rows(a=fails, b=answering(TOKENS))
    with pytest.raises(InputError, match="degenerate"):
        cell_rows(a=answering(np.full((2, 4), 7)), b=answering(TOKENS))


def row(name: str, seconds: list[float], cell: Work = CELL, precision: str = "fp32") -> dict[str, Any]:
    about = {"system": name, "precision": precision, "model": "random:toy", "batch": cell.batch,
             "source_tokens": cell.source_tokens, "beams": cell.beams, "new_tokens": cell.new_tokens,
             "equal": 1, "of": 1}  # fmt: skip
    timed = {"latency_s": seconds, "ratio_samples": [4 / each for each in seconds]}  # beside a reference that takes 4 s
    return about | (timed if seconds else {"failed": "no memory"})


def test_we_stand_beside_the_best_peer_of_our_precision():
    other = Work(1, 32, 8, beams=4)
    rows = [row(OURS, [1, 1, 1]), row(peers.OURS_GENERATE, [0.5] * 3), row(REFERENCE, [3, 3, 3]),
            row(OPTIMUM, [2, 1.5, 9]), row("tiny", [0.1] * 3, precision="int8"), row("broken", []),
            row(OURS, [2.0], other), row(OPTIMUM, [1.0], other)]  # fmt: skip
    assert list(peer_results(rows)) == [PeerResult(CELL, OPTIMUM, 2, "toy"), PeerResult(other, OPTIMUM, 0.5, "toy")]
    assert [*map(str, peer_results(rows))] == ["2.00x (1.50–9.00)", "0.50x (0.50–0.50)"]
    assert list(peer_results(rows, precision="int8")) == [PeerResult(CELL, "tiny", 0.1, "toy")]
    twice_as_slow = {"latency_s": [2, 2, 2], "ratio_samples": [4, 4, 4]}  # in a later run, when the reference was, too
    again = [one | twice_as_slow if one["system"] == OURS else one for one in rows[:4]]
    assert list(peer_results(again)) == [PeerResult(CELL, OPTIMUM, 2, "toy")]
    (alone,) = peer_results(rows, ours=peers.OURS_GENERATE, peers=[REFERENCE])
    assert alone == PeerResult(CELL, REFERENCE, 6, "toy")
    another = {"model": "random:another"}
    rows += [entry | another | {"ratio_samples": [1.0]} for entry in rows if entry["system"] == OPTIMUM]
    rows += [row(OURS, [1]) | another]
    assert [(one.model, one.ratio) for one in peer_results(rows)] == [("toy", 2), ("toy", 0.5), ("another", 4)]


def test_the_grids_have_systems_for_every_cell_behind_the_reference():
    assert len(GRID) == 18 and set(peers.QUICK) < set(GRID) and len({s.name for s in PEERS}) == len(PEERS)
    assert {int8_for(cell) for cell in GRID} <= {s.name for s in PEERS if s.ours and s.precision.startswith("int8")}
    assert all(s.precision in RECIPES for s in PEERS if s.ours)
    greedy = {cell for cell in GRID if cell.beams == 1}
    for one in PEERS:
        if one.name.startswith(peers.LLAMA_CPP):
            assert {cell for cell in GRID if one.cells(cell)} == {cell for cell in greedy if cell.batch == 1}
        if one.name.startswith((peers.TRANSFORMERS_JS, peers.OURS_EXACT)):
            assert {cell for cell in GRID if one.cells(cell)} == greedy
    floats, integers = GRIDS["cpu"].systems()
    assert floats[0] == integers[0] == PEERS[0] and PEERS[0].name == REFERENCE and {*floats} | {*integers} == {*PEERS}
    assert {s.precision for s in floats} == {"fp32"} and "fp32" not in {s.precision for s in integers[1:]}
    groups = GRIDS["families"].systems()
    assert [group[0].name for group in groups] == [REFERENCE] * 2
    assert [{s.precision.removesuffix("-dynamic") for s in group[1:]} for group in groups] == [{"fp32"}, {"int8"}]
    named = {int8_for(cell) for cell in GRIDS["families"].cells}.union(*GRIDS["families"].groups)
    assert named <= {s.name for group in groups for s in group}
    (gemma,) = GRIDS["gemma"].systems()
    assert gemma[0].name == "transformers 5" and "transformers4" not in {s.environment for s in gemma}
    ((only,),) = [[s.name for s in group[1:]] for group in GRIDS["families"].systems([OPTIMUM])]
    assert only == OPTIMUM


# Workers: the real script, with the engines that the test environment has.


def start(engine: str, folder: Path, model: Path, python: str | Path = sys.executable) -> Worker:
    command = [str(python), str(ROOT / "bench/peer_worker.py"), engine, str(model), "--scratch",
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
    """At a forced length, and where an answer ends by itself."""
    ids = np.random.default_rng(0).integers(3, 300, (2, 6))
    for texts, cell in ((ids, Work(2, 6, 7, beams)), (ids[:1], Work(1, 6, 40, beams, forced_length=False))):
        answers = {engine: worker(texts, cell) for engine, worker in workers.items()}
        assert len(np.unique(answers["eager"])) > 2
        for answer in answers.values():
            np.testing.assert_array_equal(answer, answers["eager"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("engine", "environment", "beams"),
    [
        ("torchao-int4", "torchao", (1, 4)),
        ("beam-search", "onnxruntime-beam-search", (1, 4)), ("beam-search-int8", "onnxruntime-beam-search", (1, 4)),
        ("llama-cpp", "llama-cpp", (1,)), ("llama-cpp-int8", "llama-cpp", (1,)),
        ("transformers-js", "transformers-js", (1,)), ("transformers-js-int8", "transformers-js", (1,)),
    ],
)  # fmt: skip
def test_peers_in_environments_of_their_own_say_what_transformers_does(
    engine: str, environment: str, beams: tuple[int, ...], tmp_path: Path
):
    python = ROOT / "build/peers" / environment / "bin/python"
    if not python.exists():
        pytest.skip(f"{python} is missing: `make peers` makes the environment.")
    sizes = dict(vocab_size=320, d_model=64, d_kv=32, num_heads=2, d_ff=128, num_decoder_layers=2)
    random_t5(TINY | sizes).save_pretrained(tmp_path / "model")
    ids = np.random.default_rng(0).integers(3, 300, (2, 6))
    pair = [start("eager", tmp_path, tmp_path / "model"), start(engine, tmp_path, tmp_path / "model", python)]
    with closing(pair[0]), closing(pair[1]):
        for k in beams:
            theirs, own = (worker(ids, Work(2, 6, 7, k)) for worker in pair)
            assert len(np.unique(theirs)) > 3 and own.shape == theirs.shape
            assert (own == theirs).mean() > 0.3 or "int4" in engine
            alone = Work(1, 6, 7, k, forced_length=False)
            theirs_alone, own_alone = ([until_end(worker(text[None], alone)[0]) for text in ids] for worker in pair)
            if "int" not in engine:
                np.testing.assert_array_equal(own, theirs)
                assert own_alone == theirs_alone
        if beams == (1,):
            with pytest.raises(PeerError, match="has no beam search"):
                pair[1](ids, Work(2, 6, 7, 4))


def until_end(tokens: np.ndarray) -> list[int]:
    """Without the end token, which some leave out, and what is behind it."""
    return list(takewhile(lambda token: token > 1, tokens))


def test_a_worker_says_why_it_cannot_generate_and_stays_or_does_not_come_up(workers: dict[str, Worker], tmp_path: Path):
    cell = Work(1, 2, 3)
    with pytest.raises(PeerError, match="index out of range"):
        workers["eager"](np.array([[5, 10**6]]), cell)
    assert workers["eager"](np.array([[5, 6]]), cell).shape == (1, 3)
    with pytest.raises(PeerError, match="(?s)eager.*nowhere"):
        start("eager", tmp_path, tmp_path / "nowhere")


@pytest.fixture
def script() -> Any:
    return import_module("bench.record.peers")


def test_an_interrupted_grid_goes_on_in_its_order(script: Any, tmp_path: Path):
    path, conditions = tmp_path / "rows.json", {"commit": "abc", "rounds": 3}
    first, second = GRIDS["families"].models[:2]
    rows = [
        row(OURS, [1], cell) | {"model": model} for cell in GRIDS["families"].cells[::-1] for model in (second, first)
    ]
    script.write(path, conditions, rows, "a command")
    places = [peers.model_and_cell(entry) for entry in script.rows_so_far(path, conditions)]
    assert places == [(model, cell) for model in (first, second) for cell in GRIDS["families"].cells]
    (small,) = GRIDS["cpu"].models
    script.write(path, conditions, [row(OURS, [1], GRID[number]) | {"model": small} for number in (1, 0)], "a command")
    assert [peers.cell_of(entry) for entry in script.rows_so_far(path, conditions)] == [GRID[0], GRID[1]]
    assert {"date", "command", "rows"} <= json.loads(path.read_text(encoding="utf-8")).keys()


def test_passes_over_parts_of_a_grid_make_one_file_that_names_each_command(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, model = tmp_path / "rows.json", "random:opus-mt"
    monkeypatch.setattr(script, "versions_of", lambda *_: {})
    monkeypatch.setattr(script, "save_model", lambda *_: None)
    monkeypatch.setattr(script, "start_all", lambda _, systems, *__: dict.fromkeys(systems))
    cell = dict(batch=1, source_tokens=128, new_tokens=64, beams=1)
    monkeypatch.setattr(script, "measure_cell", lambda _, workers, **__: [
        {"system": one.name, "model": model, **cell} for one in workers
    ])  # fmt: skip
    monkeypatch.setattr(script, "show", lambda *_: None)
    command = ["--grid", "families", "--models", model, "--cell", "1,128,1", "--systems"]
    for system in ("OpenVINO", "CTranslate2", "CTranslate2"):
        monkeypatch.setattr(sys, "argv", ["peers", "--json", str(out), *command, system])
        script.main()
    found = json.loads(out.read_text())
    assert sorted(row["system"] for row in found["rows"]) == ["CTranslate2", "OpenVINO", "transformers 4.57"]
    passes = [f"python -m bench.record.peers {' '.join(command)} {one}" for one in ("OpenVINO", "CTranslate2")]
    assert found["command"] == "; ".join(passes)
    monkeypatch.setattr(sys, "argv", ["peers", "--models", "random:t5-tiny"])
    with pytest.raises(InputError, match="--models must be of"):
        script.main()


def test_families_are_measured_as_they_are_published(script: Any, tmp_path: Path, monkeypatch):
    """A zero pad, from which CTranslate2 starts Marian, and no forced end; ours then says what transformers says."""
    sizes = dict(
        vocab_size=90, d_model=24, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, pad_token_id=89,
        decoder_attention_heads=2, eos_token_id=0, decoder_start_token_id=89, scale_embedding=True, encoder_ffn_dim=32,
        decoder_ffn_dim=32,
    )  # fmt: skip
    monkeypatch.setattr(script, "load_model", lambda name: (random_model(BEYOND_T5["marian"], sizes), None))
    script.save_model("random:tiny", tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text(encoding="utf-8"))
    assert (config["normalize_before"], config["normalize_embedding"]) == (False, False)
    started = [start(engine, tmp_path, tmp_path / "model") for engine in ("eager", "ours")]
    with closing(started[0]), closing(started[1]):
        for beams in (1, 4):
            ids = np.random.default_rng(0).integers(3, 80, (2, 6))
            theirs, ours = (worker(ids, Work(2, 6, 7, beams)) for worker in started)
            assert len(np.unique(theirs)) > 3 and 0 not in theirs
            np.testing.assert_array_equal(ours, theirs)


def test_a_missing_environment_is_named(script: Any, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["peers", "--build", str(tmp_path), "--json", str(tmp_path / "x.json")])
    with pytest.raises(PeerError, match="transformers4/bin/python is missing: `make peers`"):
        script.main()
    assert not (tmp_path / "x.json").exists()
