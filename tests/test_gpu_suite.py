"""The GPU suite without a GPU: the same cells at toy size, its file, its time, and what it refuses to time."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from t5accel import machine
from t5accel.checkpoints import T5Dims
from t5accel.errors import InputError, MissingPackageError
from t5accel.gpu import measure as measuring
from t5accel.gpu import suite, systems
from t5accel.gpu.cells import CELLS, LENGTHS, RUNTIMES, Cell
from t5accel.gpu.systems import COMPILED, GRAPH, RECOMPUTE, REFERENCE, STATIC, SYSTEMS, Subject
from t5accel.lab import rows as records
from t5accel.lively import RANDOM_SIZES

ROOT = Path(__file__).resolve().parents[1]
ON_CPU = [name for name in SYSTEMS if name != systems.TENSORRT]


@pytest.fixture(scope="module")
def toy(tiny_t5, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny model, as one that the suite may be asked for."""
    folder = tmp_path_factory.mktemp("toy")
    tiny_t5("gated-untied", num_layers=2, num_decoder_layers=2).save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("T5ACCEL_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))  # which the suite would set, for the whole process


def cell(toy: str, measured: str = "speed", **more: Any) -> Cell:
    sizes = dict(batch=2, source_tokens=9, new_tokens=6, least_s=0.0)
    return Cell(f"toy, {measured}", measured, model=toy, **{"floats": "float32", **sizes, **more})


def run(path: Path, cells: list[Cell], **options: Any) -> tuple[list[dict[str, Any]], str]:
    said: list[str] = []
    rows = suite.run_suite(path, device="cpu", cells=cells, say=said.append, **{"rounds": 3, "minutes": 5, **options})
    return rows, "\n".join(said)


# The cells


def test_cells_come_in_the_order_of_what_matters() -> None:
    names = [cell.name for cell in CELLS]
    assert len({*names}) == len(names)
    assert CELLS[0].measured == "equality" and [c.name for c in CELLS if c.measured == "compile"] == names[-1:]
    order = ["equality, float32", "t5-small", f"cache, {LENGTHS[0]} tokens", "t5-base", "flan-t5-large",
             "t5-small, batch 8", "t5-small, batch 64", "t5-small, 4 beams", "t5-small, source 512"]  # fmt: skip
    assert [name for name in names if name in order] == order
    small = CELLS[names.index("t5-small")]
    assert (small.floats, small.batch, small.beams) == ("bfloat16", 1, 1)


def test_every_cell_names_what_there_is() -> None:
    for one in CELLS:
        assert {*one.systems} <= SYSTEMS.keys() and one.systems[0] == REFERENCE
        assert one.model.removeprefix("random:") in RANDOM_SIZES
        before = CELLS[: CELLS.index(one)]
        proven = {name for c in before if c.measured == "equality" and c.floats == one.floats for name in c.systems}
        assert {*one.systems} - {COMPILED} <= proven or one.measured in ("equality", "floor"), one.name


# Equality


@pytest.mark.parametrize("floats", ["float32", "float16", "bfloat16"])
def test_all_systems_are_equal_at_toy_size(toy: str, tmp_path: Path, floats: str) -> None:
    names = tuple(name for name in ON_CPU if floats in SYSTEMS[name].floats and name != COMPILED)
    subject = Subject(toy, floats, "cpu", tmp_path)
    rows = measuring.equality(cell(toy, "equality", floats=floats, systems=names, new_tokens=12, batch=4), subject)
    assert [row["system"] for row in rows] == list(names)
    assert not [row["failed"] for row in rows if "failed" in row]
    for row in rows:
        assert row["of"] == 48 and row["distinct"] > 3
        assert row["equal"] == 48 if floats == "float32" else row["equal"] > 4
        assert (row["error"] > 0) == (floats != "float32" or row["system"] not in (REFERENCE, systems.NAIVE))


def test_what_is_not_equal_is_not_timed(toy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(subject: Subject) -> Any:
        inner = SYSTEMS[GRAPH].build(subject)
        return lambda *arguments: np.roll(inner(*arguments), 1, axis=1)

    monkeypatch.setitem(SYSTEMS, STATIC, replace(SYSTEMS[STATIC], build=shifted))
    rows, said = run(tmp_path / "rows.json", [cell(toy, "equality"), cell(toy)])
    (unequal,) = [row for row in rows if row["measured"] == "equality" and "failed" in row]
    assert unequal["system"] == STATIC and "ParityError" in unequal["failed"] and unequal["equal"] < unequal["of"]
    timed = {row["system"]: row for row in rows if row["measured"] == "speed"}
    assert "latency_s" not in timed[STATIC] and timed[STATIC]["failed"] == unequal["failed"]
    assert "latency_s" in timed[GRAPH] and f"{STATIC}: ParityError" in said


def test_wrong_logits_are_not_equal_even_if_tokens_are(toy: str, tmp_path: Path, monkeypatch) -> None:
    inner = measuring._by_steps
    monkeypatch.setattr(measuring, "_by_steps", lambda *arguments: inner(*arguments) * 1.2)
    for floats in ("float32", "bfloat16"):
        rows = measuring.equality(cell(toy, "equality", floats=floats), Subject(toy, floats, "cpu", tmp_path))
        assert {row["system"] for row in rows if "failed" in row} == {STATIC, GRAPH}


def test_a_comparison_that_would_not_notice_a_missing_mask_is_refused(toy: str, tmp_path: Path, monkeypatch) -> None:
    inner = measuring.batch_of
    monkeypatch.setattr(measuring, "batch_of", lambda *arguments: (inner(*arguments)[0], np.ones((2, 9), dtype=int)))
    with pytest.raises(InputError, match="without the mask"):
        measuring.equality(cell(toy, "equality"), Subject(toy, "float32", "cpu", tmp_path))


# Speed


def test_rows_of_speed(toy: str, tmp_path: Path) -> None:
    rows, said = run(tmp_path / "rows.json", [cell(toy, systems=(REFERENCE, GRAPH, RECOMPUTE))])
    assert [row["system"] for row in rows] == [REFERENCE, GRAPH, RECOMPUTE]
    for row in rows:
        assert len(row["latency_s"]) == 3 and row["equal"] == row["of"] == 12
        expected = 2 * 6 / sorted(row["latency_s"])[1]
        assert row["tokens_per_s"] == pytest.approx(expected)
        assert (row["ratio"] is None) == (row["system"] == REFERENCE)
    pairs = zip(rows[0]["latency_s"], rows[1]["latency_s"], strict=True)
    assert rows[1]["ratio"]["samples"] == pytest.approx([theirs / ours for theirs, ours in pairs])
    assert f"{rows[1]['ratio']['median']:.2f}x" in said


def test_beams_are_those_of_transformers(toy: str, tmp_path: Path) -> None:
    rows, _ = run(tmp_path / "rows.json", [cell(toy, beams=3)])
    assert all(row["beams"] == 3 and row["equal"] == row["of"] for row in rows)


def test_a_system_that_fails_has_a_row_that_says_why(toy: str, tmp_path: Path, monkeypatch) -> None:
    def broken(subject: Subject) -> Any:
        raise RuntimeError("no kernel image\nfor this device")

    monkeypatch.setitem(SYSTEMS, STATIC, replace(SYSTEMS[STATIC], build=broken))
    rows, _ = run(tmp_path / "rows.json", [cell(toy)])
    assert [row.get("failed") for row in rows] == [None, "RuntimeError: no kernel image", None]
    with pytest.raises(MissingPackageError):
        SYSTEMS[systems.TENSORRT].build(Subject(toy, "float32", "cpu", tmp_path))


def test_what_onnx_has_no_floats_for_is_said(toy: str, tmp_path: Path) -> None:
    rows, _ = run(tmp_path / "rows.json", [cell(toy, floats="bfloat16", systems=(REFERENCE, GRAPH, systems.FED))])
    assert rows[2]["failed"] == "it does not run in bfloat16"


def test_the_price_of_compiling() -> None:
    usual = {"system": GRAPH, "cell": "c", "new_tokens": 100, "latency_s": [0.2], "first_s": 1.0}
    fast = {"system": COMPILED, "cell": "c", "new_tokens": 100, "latency_s": [0.1], "first_s": 30.1}
    (row,) = measuring.price_of_compiling([usual, fast])
    assert row["compile_s"] == pytest.approx(30.0) and row["saves_s_per_step"] == pytest.approx(0.001)
    assert row["break_even_steps"] == pytest.approx(30_000)
    (never,) = measuring.price_of_compiling([usual, fast | {"latency_s": [0.3]}])
    assert never["break_even_steps"] is None
    assert measuring.price_of_compiling([usual, {**fast, "failed": "no compiler"}][:1]) == []
    assert "won back after 30,000 steps" in suite.table([row]) and "won back never" in suite.table([never])


def test_the_floor_counts_what_a_step_reads(toy: str, tmp_path: Path) -> None:
    subject = Subject(toy, "bfloat16", "cpu", tmp_path)
    row = measuring.floor(cell(toy, "floor", floats="bfloat16", batch=3), subject)
    dims = T5Dims.of(subject.model)
    cached = 3 * dims.d_kv * (9 * sum(dims.cross_heads) + 64 * sum(dims.decoder_heads))
    assert row["bytes_per_step"] == 2 * (machine.decoder_weights_per_step(dims) + 2 * cached)
    assert 0 < row["operators"] < row["eager_operators"] and "floor_s" not in row


# The file and the time


def test_every_cell_is_kept_at_once_and_a_second_run_goes_on(toy: str, tmp_path: Path, monkeypatch) -> None:
    path, cells = tmp_path / "rows.json", [replace(cell(toy), name=name) for name in ("one", "two", "three")]
    measure, begun = measuring.measure, []

    def until_the_third(one: Cell, *arguments: Any, **options: Any) -> Any:
        begun.append(one.name)
        if one.name == "three" and begun.count("three") == 1:
            raise KeyboardInterrupt
        return measure(one, *arguments, **options)

    monkeypatch.setattr(suite, "measure", until_the_third)
    with pytest.raises(KeyboardInterrupt):
        run(path, cells)
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert [row["cell"] for row in kept["rows"]] == ["one"] * 3 + ["two"] * 3
    assert {name: kept[name] for name in records.here()} == records.here() and "--suite gpu" in kept["command"]
    rows, _ = run(path, cells)
    assert begun == ["one", "two", "three", "three"] and rows[:6] == kept["rows"] and len(rows) == 9


def test_cells_that_do_not_fit_are_not_begun(toy: str, tmp_path: Path, monkeypatch) -> None:
    slow, short = replace(cell(toy), name="slow", least_s=1e6), replace(cell(toy), name="short")
    rows, said = run(tmp_path / "rows.json", [slow, short])
    assert {row["cell"] for row in rows} == {"short"} and "slow: not begun" in said
    monkeypatch.setattr(measuring, "_rounds", lambda *_: 2)
    rows, said = run(tmp_path / "other.json", [short])
    assert rows == [] and "short: too slow for the time that is left" in said and not (tmp_path / "other.json").exists()


def test_fewer_rounds_where_time_is_short() -> None:
    clock = iter([0.0, 10.0])
    original, measuring.perf_counter = measuring.perf_counter, lambda: next(clock)
    try:  # one run takes 10 s; of 60 left one is gone, and one more is for warming up
        assert measuring._rounds([lambda: None], 5, 60.0) == 4
    finally:
        measuring.perf_counter = original


@pytest.mark.parametrize("minutes", [0, -1, float("nan")])
def test_no_minutes(tmp_path: Path, minutes: float) -> None:
    with pytest.raises(InputError, match="minutes is"):
        suite.run_suite(tmp_path / "rows.json", minutes=minutes)


def test_a_cell_that_does_not_come_back_is_ended(tmp_path: Path) -> None:
    program = (
        "import time\nfrom t5accel.gpu import suite\n"
        "suite.run_suite = lambda *_, **__: time.sleep(60)\n"
        f"suite.run_in_time({str(tmp_path / 'x.json')!r}, 0.001, grace_s=0.2)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 3 and "the rows before it are kept" in done.stdout


# Without a GPU, and without most packages


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", [["-m", "t5accel", "bench", "--suite", "gpu"], ["-m", "t5accel.gpu.suite"]])
def test_without_a_gpu_one_sentence_says_so(tmp_path: Path, command: list[str]) -> None:
    asked = [sys.executable, *command, "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(asked, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2 and not (tmp_path / "rows.json").exists()
    assert done.stderr.endswith("This suite needs a GPU and a torch that sees it, and there is none here.\n")
    assert len(done.stderr.splitlines()) == 1


def test_the_suite_wants_a_file() -> None:
    asked = [sys.executable, "-m", "t5accel", "bench", "--suite", "gpu"]
    done = subprocess.run(asked, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2 and "give --json FILE" in done.stderr


BLOCKED = ("datasets", "evaluate", "rouge_score", "sacrebleu", "platformdirs", "typer", "onnx", "onnxruntime",
           "matplotlib", "pydantic", "psutil")  # fmt: skip


def test_torch_transformers_and_numpy_are_enough(toy: str, tmp_path: Path) -> None:
    program = f"""
import sys
sys.modules.update(dict.fromkeys({BLOCKED!r}))  # as if they were not installed
from t5accel.gpu.cells import Cell, RUNTIMES, REFERENCE, GRAPH, RECOMPUTE
from t5accel.gpu.suite import run_suite
sizes = dict(model={toy!r}, floats="float32", batch=2, source_tokens=9, new_tokens=5, least_s=0.0)
systems = (REFERENCE, GRAPH, RECOMPUTE, *RUNTIMES)
cells = [Cell("equality", "equality", systems=systems, **sizes), Cell("speed", "speed", systems=systems, **sizes)]
run_suite({str(tmp_path / "rows.json")!r}, device="cpu", cells=cells, rounds=3)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["rows"]
    timed = [row["system"] for row in rows if row.get("latency_s")]
    assert timed == [REFERENCE, GRAPH, RECOMPUTE]
    failed = {row["system"]: row["failed"] for row in rows if "failed" in row and row["cell"] == "speed"}
    assert failed.keys() == {*RUNTIMES}
    assert {said.split(":")[0] for said in failed.values()} <= {"MissingPackageError", "ModuleNotFoundError"}
