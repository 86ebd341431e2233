"""The GPU suite without a GPU: the same cells at toy size, its file, its time, and what it refuses to time."""

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refused import refused

from bench import harness, systems
from bench import results as records
from bench.gpu import measurement as measuring
from bench.gpu import suite
from bench.gpu.cells import PUBLISHED, PUBLISHED_BATCHES, RUNTIMES, Cell, cells_for
from bench.profiling import Prices
from bench.roofline import decoder_weights_per_step
from bench.systems import GRAPH, REFERENCE, STATIC, SYSTEMS, THEIRS, ModelOnDevice
from t5accel import machine
from t5accel.errors import InputError, MissingPackageError
from t5accel.models.families import SIZES
from t5accel.models.random_init import RANDOM_SIZES
from t5accel.models.sizes import T5Dims

ROOT = Path(__file__).resolve().parents[2]
ON_GPUS = (systems.TENSORRT, systems.KERNEL, systems.THEIR_DRAWS, systems.DRAWN)
ON_CPU = [one.name for one in systems.ON_DEVICE if one.name not in ON_GPUS]
H100, T4 = (9, 0), (7, 5)


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
    return Cell(f"toy, {measured}", measured, model=toy, **{"dtype": "float32", **sizes, **more})


def run(path: Path, cells: list[Cell], **options: Any) -> tuple[list[dict[str, Any]], str]:
    said: list[str] = []
    rows = suite.run_suite(path, device="cpu", cells=cells, say=said.append, **{"rounds": 3, "minutes": 5, **options})
    return rows, "\n".join(said)


# The cells


@pytest.mark.parametrize("capability", [H100, T4])
def test_every_cell_names_what_there_is_and_is_proven_before(capability: tuple[int, int]) -> None:
    cells = cells_for(capability)
    assert len({one.name for one in cells}) == len(cells)
    for one in cells:
        assert {*one.systems} <= SYSTEMS.keys()
        assert one.systems[0] in THEIRS or one.measured in ("requests", "throughput")
        assert one.model.removeprefix("random:") in {*RANDOM_SIZES, *SIZES}
        before = [c for c in cells[: cells.index(one)] if c.measured in ("equality", "draws")]
        # What makes no difference to a step may be proven in fp32 alone; a batch is one of GRAPH's.
        proven = {systems.BATCHES} | {name for c in before if c.dtype in (one.dtype, "float32") for name in c.systems}
        assert {*one.systems} - {*THEIRS} <= proven or one.measured in ("equality", "draws", "floor"), one.name
        if one.model in ("random:flan-t5-xl", *(f"random:{size}" for size in SIZES)) and one.measured != "equality":
            assert one.model in {c.model for c in before}, f"{one.name} has no comparison of its own"


def test_without_bf16_of_its_own_a_card_is_measured_in_fp16() -> None:
    on_t4, on_h100 = cells_for(T4), cells_for(H100)
    assert {cell.dtype for cell in on_t4} == {"float32", "float16"}
    assert next(cell for cell in on_t4 if cell.name == "t5-small").dtype == "float16"
    named = {cell.name.replace("bfloat16", "float16") for cell in on_h100}
    assert named == {cell.name for cell in on_t4} and len(on_t4) == len({cell.name for cell in on_t4})


# Equality


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_all_systems_are_equal_at_toy_size(toy: str, tmp_path: Path, dtype: str) -> None:
    names = tuple(name for name in ON_CPU if dtype in SYSTEMS[name].dtypes and name != systems.COMPILED)
    subject = ModelOnDevice(toy, dtype, "cpu", tmp_path)
    rows = measuring.equality(cell(toy, "equality", dtype=dtype, systems=names, new_tokens=12, batch=4), subject)
    assert [row["system"] for row in rows] == list(names)
    assert not [row["failed"] for row in rows if "failed" in row]
    for row in rows:
        assert row["of"] == 48 and row["distinct"] > 3
        assert row["equal"] == 48 if dtype == "float32" else row["equal"] > 4
        assert (row["error"] > 0) == (dtype != "float32" or row["system"] not in THEIRS)


def test_what_is_not_equal_is_not_timed(toy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(subject: ModelOnDevice) -> Any:
        inner = SYSTEMS[GRAPH].build(subject)
        return lambda *arguments: np.roll(inner(*arguments), 1, axis=1)

    monkeypatch.setitem(SYSTEMS, STATIC, replace(SYSTEMS[STATIC], build=shifted))
    rows, said = run(tmp_path / "rows.json", [cell(toy, "equality"), cell(toy)])
    (unequal,) = [row for row in rows if row["measured"] == "equality" and "failed" in row]
    assert unequal["system"] == STATIC and "ParityError" in unequal["failed"] and unequal["equal"] < unequal["of"]
    timed = {row["system"]: row for row in rows if row["measured"] == "speed"}
    assert "latency_s" not in timed[STATIC] and timed[STATIC]["failed"] == unequal["failed"]
    assert "latency_s" in timed[GRAPH] and f"{STATIC}: ParityError" in said


def test_in_bf16_ours_may_be_as_far_away_as_transformers_and_a_quarter(toy: str, tmp_path: Path, monkeypatch) -> None:
    """At t5-small's size transformers' own bf16 is 5% away from its fp32: a fixed limit would refuse everybody.

    Farther away ours is refused, even if its tokens are equal, and in fp32 at once.
    """
    inner, scale = measuring._by_steps, 1.0
    monkeypatch.setattr(measuring, "_by_steps", lambda *arguments: inner(*arguments) * scale)

    def rows(dtype: str) -> list[dict[str, Any]]:
        return measuring.equality(cell(toy, "equality", dtype=dtype), ModelOnDevice(toy, dtype, "cpu", tmp_path))

    theirs, ours, _ = rows("bfloat16")
    assert "failed" not in ours and ours["allowed_error"] == pytest.approx(1.25 * theirs["error"])
    scale = 1 + 1.5 * theirs["error"]
    for dtype in ("bfloat16", "float32"):
        assert {row["system"] for row in rows(dtype) if "failed" in row} == {STATIC, GRAPH}


def test_what_a_cell_rests_on() -> None:
    """Its own model and t5-small, its own dtype and fp32, greedy search and its own beams; never on transformers."""
    failed = {"measured": "equality", "system": GRAPH, "precision": "fp32", "beams": 1, "failed": "why"}
    failed["model"] = systems.SMALL
    small, other = Cell("small", "speed"), Cell("other", "speed", model="random:bart-base")
    beams = replace(small, beams=4)
    for more, refused_cells in (({}, [small, other, beams]), ({"beams": 4}, [beams]), ({"precision": "fp16"}, []),
                                ({"model": "random:bart-base"}, [other])):  # fmt: skip
        assert [one for one in (small, other, beams) if suite.unequal([failed | more], one)] == refused_cells
    for theirs in (REFERENCE, systems.NAIVE):  # however large transformers' error in few bits is, ours are ratios to it
        assert not suite.unequal([failed | {"system": theirs, "precision": "bf16"}], small)


def test_draws_are_as_likely_as_transformers_says(toy: str, tmp_path: Path, monkeypatch) -> None:
    one = cell(toy, "draws", batch=1, new_tokens=3, systems=(systems.THEIR_DRAWS, systems.DRAWN))
    (row,) = measuring.draws(one, ModelOnDevice(toy, "float32", "cpu", tmp_path))
    assert "failed" not in row and row["measured"] == "equality" and row["equal"] == row["of"] == 1024
    assert row["distinct"] == 8 and row["error"] <= row["allowed_error"] < 0.1
    inner = measuring.sample
    wrong = lambda *arguments, sampling, **more: inner(*arguments, sampling=replace(sampling, temperature=1.5), **more)  # noqa: E731
    monkeypatch.setattr(measuring, "sample", wrong)
    (row,) = measuring.draws(one, ModelOnDevice(toy, "float32", "cpu", tmp_path))
    assert "ParityError" in row["failed"] and row["error"] > row["allowed_error"]


def test_requests_in_flight_are_equal_and_counted(toy: str, tmp_path: Path) -> None:
    of_requests = dict(systems=(systems.THEIR_BATCHES, systems.BATCHES, systems.FLIGHT), rows=3, requests=14, rounds=2)
    cells = [cell(toy, "equality", systems=(REFERENCE, systems.FLIGHT), batch=5),
             cell(toy, "requests", batch=2, new_tokens=12, **of_requests)]  # fmt: skip
    rows, said = run(tmp_path / "rows.json", cells)
    assert not [row["failed"] for row in rows if "failed" in row] and "requests a second" in said
    equal = [row for row in rows if row["measured"] == "equality"]
    assert [row["equal"] for row in equal] == [row["of"] for row in equal] == [30, 30]
    theirs, batches, flight = (row for row in rows if row["measured"] == "requests")
    assert (theirs["texts"], batches["texts"], flight["texts"]) == (2, 14, 14)
    for row in (theirs, batches, flight):
        assert row["answers_per_s"] == pytest.approx(row["texts"] / np.median(row["latency_s"]))
    assert flight["ratio"] == pytest.approx(flight["answers_per_s"] / theirs["answers_per_s"])
    assert [len(row["latency_s"]) for row in (theirs, batches, flight)] == [1, 2, 2]


def test_throughput_is_of_each_system_alone(toy: str, tmp_path: Path) -> None:
    one = cell(toy, "throughput", systems=(REFERENCE, GRAPH), batch=3, shortest_source=4, rounds=2)
    lengths = measuring.batch_of(one, 100)[1].sum(axis=1)
    assert lengths[0] == 9 and (lengths >= 4).all() and len({*lengths}) > 1
    rows, _ = run(tmp_path / "rows.json", [one, replace(one, name="alone", systems=(GRAPH,))])
    assert [row["measured"] for row in rows] == ["speed"] * 3 and [len(row["latency_s"]) for row in rows] == [1, 2, 2]
    assert rows[1]["tokens_per_s"] == pytest.approx(18 / np.median(rows[1]["latency_s"]))
    assert rows[1]["ratio"] == pytest.approx(rows[1]["tokens_per_s"] / rows[0]["tokens_per_s"])
    assert "ratio" not in rows[2]


def test_published_figures_have_a_cell_each_and_a_source() -> None:
    named = {one.name: one for one in cells_for(H100)}
    for model, theirs in PUBLISHED.items():
        for figures in theirs.values():
            assert len(figures) == len(PUBLISHED_BATCHES)
        for batch in PUBLISHED_BATCHES:
            one = named[f"{model}, batch {batch}"]
            assert (one.shortest_source, one.source_tokens, one.new_tokens) == (260, 440, 128) and GRAPH in one.systems


def test_a_comparison_that_would_not_notice_a_missing_mask_is_refused(toy: str, tmp_path: Path, monkeypatch) -> None:
    inner = measuring.batch_of
    monkeypatch.setattr(measuring, "batch_of", lambda *arguments: (inner(*arguments)[0], np.ones((2, 9), dtype=int)))
    with pytest.raises(InputError, match="without the mask"):
        measuring.equality(cell(toy, "equality"), ModelOnDevice(toy, "float32", "cpu", tmp_path))


def test_a_comparison_that_zeros_would_pass_is_refused(toy: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(measuring, "_error", lambda *_: 0.41)
    with pytest.raises(InputError, match="transformers. bfloat16 is 0.41 from fp32: this comparison proves nothing"):
        measuring.equality(cell(toy, "equality", dtype="bfloat16"), ModelOnDevice(toy, "bfloat16", "cpu", tmp_path))


# Speed


def test_rows_of_speed(toy: str, tmp_path: Path) -> None:
    cells = [cell(toy, systems=(REFERENCE, GRAPH, systems.RECOMPUTE)), replace(cell(toy, beams=3), name="beams")]
    found, said = run(tmp_path / "rows.json", cells)
    rows, beams = found[:3], found[3:]
    assert len(beams) == 3 and all(row["beams"] == 3 and row["equal"] == row["of"] for row in beams)
    assert [row["system"] for row in rows] == [REFERENCE, GRAPH, systems.RECOMPUTE]
    for row in rows:
        assert len(row["latency_s"]) == 3 and row["equal"] == row["of"] == 12
        assert row["tokens_per_s"] == pytest.approx(2 * 6 / sorted(row["latency_s"])[1])
    pairs = zip(rows[0]["latency_s"], rows[1]["latency_s"], strict=True)
    assert rows[1]["ratio_samples"] == pytest.approx([theirs / ours for theirs, ours in pairs])
    assert f"{rows[1]['ratio']:.2f}x" in said


def test_a_system_that_fails_has_a_row_that_says_why(toy: str, tmp_path: Path, monkeypatch) -> None:
    error = RuntimeError("no kernel image\nfor this device")
    monkeypatch.setitem(SYSTEMS, STATIC, replace(SYSTEMS[STATIC], build=raising(error)))
    without_floats = replace(cell(toy, dtype="bfloat16", systems=(REFERENCE, GRAPH, systems.FED)), name="of ONNX")
    rows, _ = run(tmp_path / "rows.json", [cell(toy), without_floats])
    assert [row.get("failed") for row in rows] == [
        None, "RuntimeError: no kernel image … for this device", None, None, None, "it does not run in bfloat16",
    ]  # fmt: skip
    with pytest.raises(MissingPackageError):
        SYSTEMS[systems.TENSORRT].build(ModelOnDevice(toy, "float32", "cpu", tmp_path))


def test_the_price_of_compiling() -> None:
    usual = {"system": GRAPH, "cell": "c", "new_tokens": 100, "latency_s": [0.2], "first_s": 1.0}
    fast = {"system": systems.COMPILED, "cell": "c", "new_tokens": 100, "latency_s": [0.1], "first_s": 30.1}
    (row,) = measuring.price_of_compiling([usual, fast])
    assert row["compile_s"] == pytest.approx(30.0) and row["saves_s_per_step"] == pytest.approx(0.001)
    assert row["break_even_steps"] == pytest.approx(30_000)
    (never,) = measuring.price_of_compiling([usual, fast | {"latency_s": [0.3]}])
    assert "break_even_steps" not in never
    assert measuring.price_of_compiling([usual, {**fast, "failed": "no compiler"}][:1]) == []
    assert "won back after 30,000 steps" in suite.table([row]) and "won back never" in suite.table([never])


def test_the_floor_counts_what_a_step_reads(toy: str, tmp_path: Path) -> None:
    subject = ModelOnDevice(toy, "bfloat16", "cpu", tmp_path)
    row = measuring.floor(cell(toy, "floor", dtype="bfloat16", batch=3), subject)
    dims = T5Dims.of(subject.model)
    cached = 3 * dims.d_kv * (9 * sum(dims.cross_heads) + 64 * sum(dims.decoder_heads))
    assert row["bytes_per_step"] == 2 * (decoder_weights_per_step(dims) + 2 * cached)
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
    assert {name: kept[name] for name in records.environment()} == records.environment()
    assert "bench.gpu.suite" in kept["command"]
    rows, _ = run(path, cells)
    assert begun == ["one", "two", "three", "three"] and rows[:6] == kept["rows"] and len(rows) == 9


@pytest.mark.long
def test_cells_that_do_not_fit_are_not_begun(toy: str, tmp_path: Path, monkeypatch) -> None:
    slow, short = replace(cell(toy), name="slow", least_s=1e6), replace(cell(toy), name="short")
    rows, said = run(tmp_path / "rows.json", [slow, short])
    assert {row["cell"] for row in rows} == {"short"} and "slow: not begun" in said
    monkeypatch.setattr(harness, "FEWEST_ROUNDS", 1000)
    rows, said = run(tmp_path / "other.json", [short])
    assert rows == [] and "short: too slow for the time that is left" in said and not (tmp_path / "other.json").exists()


def raising(error: Exception) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.long
def test_a_capture_that_fails_costs_its_cells_and_nothing_else(toy: str, tmp_path: Path, monkeypatch) -> None:
    """Also where all of a cell is built on it, and where nothing but the check of the mask would be left."""
    monkeypatch.setitem(SYSTEMS, GRAPH, replace(SYSTEMS[GRAPH], build=raising(RuntimeError("capture failed"))))
    monkeypatch.setattr(measuring, "TorchStatic", raising(RuntimeError("capture failed")))
    cells = [cell(toy, "equality"), cell(toy, "floor"), cell(toy)]
    rows, said = run(tmp_path / "rows.json", cells)
    assert {row["system"]: "failed" in row for row in rows if row["measured"] == "equality"} == {
        REFERENCE: False, STATIC: False, GRAPH: True}  # fmt: skip
    assert [row["failed"] for row in rows if row["measured"] == "floor"] == ["RuntimeError: capture failed"]
    assert [row["system"] for row in rows if "latency_s" in row] == [REFERENCE, STATIC]
    assert said.count("capture failed") == 3


def test_a_profiler_that_fails_leaves_the_rest_of_the_floor(toy: str, tmp_path: Path, monkeypatch) -> None:
    prices = Prices(launch_s=5e-6, replayed_s=2e-6, bytes_per_s=1e12)

    monkeypatch.setattr(measuring, "prices", lambda device: prices)
    monkeypatch.setattr(measuring, "kernels", raising(RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")))
    monkeypatch.setattr("bench.gpu.measurement.gpu_clocks_mhz", lambda: {"sm": 1980, "memory": 2619})
    subject = ModelOnDevice(toy, "bfloat16", "cpu", tmp_path)
    subject.model  # noqa: B018 (loaded on the CPU, before it is called something else)
    subject.device = "cuda"
    row = measuring.floor(cell(toy, "floor", dtype="bfloat16"), subject)
    assert row["floor_s"] == pytest.approx(row["operators"] * 2e-6 + row["bytes_per_step"] / 1e12)
    assert [said.split(":")[0] for said in row["lacks"]] == ["profiled", "profiled_eager", "copies"]
    assert row["clock_sm_mhz"] == 1980 and "INSUFFICIENT_PRIVILEGES" in suite.table([row])


@pytest.mark.long
def test_what_failed_is_tried_again_after_all_others(toy: str, tmp_path: Path, monkeypatch) -> None:
    path, cells = tmp_path / "rows.json", [replace(cell(toy), name=name) for name in ("one", "two")]
    begun, measure = [], measuring.measure

    def once(one: Cell, *arguments: Any, **options: Any) -> Any:
        begun.append(one.name)
        if begun == ["one"]:
            raise RuntimeError("out of memory")
        return measure(one, *arguments, **options)

    monkeypatch.setattr(suite, "measure", once)
    rows, _ = run(path, cells[:1])
    assert [row["failed"] for row in rows] == ["RuntimeError: out of memory"] * 3
    rows, _ = run(path, cells)
    assert begun == ["one", "two", "one"] and not [row for row in rows if "failed" in row]
    run(path, cells)
    assert begun == ["one", "two", "one"], "what is measured is not measured again"


def test_draws_that_failed_are_tried_again(toy: str, tmp_path: Path, monkeypatch) -> None:
    """Although their own row says that they are not equal. And a folder may be new."""
    one = cell(toy, "draws", batch=1, new_tokens=3, systems=(systems.THEIR_DRAWS, systems.DRAWN))
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "sample", raising(RuntimeError("out of memory")))
        rows, _ = run(tmp_path / "results", [one])
    assert [row["failed"] for row in rows] == ["RuntimeError: out of memory"]
    rows, _ = run(tmp_path / "results", [one])
    assert not [row for row in rows if "failed" in row] and (tmp_path / "results" / "gpu-none.json").is_file()


@pytest.mark.long
def test_what_fails_again_for_the_same_reason_is_not_measured_again(toy: str, tmp_path: Path, monkeypatch) -> None:
    path, cells = tmp_path / "rows.json", [cell(toy, "equality"), cell(toy)]
    monkeypatch.setitem(SYSTEMS, GRAPH, replace(SYSTEMS[GRAPH], build=raising(RuntimeError("no capture"))))
    before, _ = run(path, cells)
    begun, measure = [], measuring.measure
    with monkeypatch.context() as patch:
        patch.setattr(suite, "measure", raising(RuntimeError("all is lost")))
        assert run(path, cells)[0] == before, "a retry that does worse changes nothing"
    monkeypatch.setattr(suite, "measure", lambda one, *a, **k: (begun.append(one.name), measure(one, *a, **k))[1])
    again, _ = run(path, cells)
    assert begun == ["toy, equality"], "it is still not equal, so its speed is not asked for"
    assert [row for row in again if row["measured"] == "speed"] == [row for row in before if row["measured"] == "speed"]
    monkeypatch.undo()
    rows, _ = run(path, cells)
    assert not [row for row in rows if "failed" in row] and len(rows) == 6


@pytest.mark.long
def test_a_process_that_is_killed_leaves_a_row_that_says_so(toy: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    program = f"""
import os
from bench.gpu import suite
from bench.gpu.cells import Cell
suite.measure = lambda *a, **k: os._exit(139)
sizes = dict(model={toy!r}, dtype="float32", batch=2, source_tokens=9, new_tokens=6, least_s=0.0)
suite.run_suite({str(path)!r}, device="cpu", cells=[Cell("toy, speed", "speed", **sizes)])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 139
    left = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert {row["failed"] for row in left} == {suite.NOT_BACK}
    rows, _ = run(path, [replace(cell(toy), name="another"), cell(toy)])
    assert [row["cell"] for row in rows] == ["another"] * 3 + ["toy, speed"] * 3
    assert not [row for row in rows if "failed" in row]


def test_a_lost_device_ends_the_process_and_keeps_the_file(toy: str, tmp_path: Path, monkeypatch, capsys) -> None:
    lost = raising(RuntimeError("CUDA error: an illegal memory access was encountered"))
    for owner, name, value in (
        (suite, "measure", lost), (suite.torch, "zeros", lost), (suite.torch.cuda, "is_available", lambda: True),
        (suite.torch.cuda, "get_device_capability", lambda: H100), (suite, "let_go", lambda device: None),
        (machine, "_gpu", lambda: {"name": "a GPU"}),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, value)
    with pytest.raises(SystemExit) as ended:
        suite.main(["--json", str(tmp_path / "rows.json"), "--only", "t5-small"])
    assert ended.value.code == 4 and "lost its GPU" in capsys.readouterr().err
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["rows"]
    assert {row["cell"] for row in rows} == {"t5-small"} and all("illegal memory" in row["failed"] for row in rows)


def test_fp32_is_no_tf32(toy: str, tmp_path: Path, monkeypatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    run(tmp_path / "rows.json", [cell(toy, "equality")])
    assert asked == ["highest"]


def test_only_some_cells(toy: str, tmp_path: Path) -> None:
    cells = [replace(cell(toy), name=name) for name in ("cache, 8 tokens", "cache, 16 tokens", "t5-small")]
    rows, _ = run(tmp_path / "rows.json", cells, only="cache*")
    assert {row["cell"] for row in rows} == {"cache, 8 tokens", "cache, 16 tokens"}
    with pytest.raises(InputError, match="only='nothing' says; there are\n  cache, 8"):
        run(tmp_path / "rows.json", cells, only="nothing")
    refused(partial(suite.run_suite, tmp_path / "rows.json"), "minutes", 0, -1, float("nan"), match="minutes must be")


@pytest.mark.long
def test_other_commits_and_packages_go_on_and_another_card_does_not(toy: str, tmp_path: Path, monkeypatch) -> None:
    path, cells = tmp_path / "rows.json", [replace(cell(toy), name=name) for name in ("one", "two")]
    facts = records.environment()
    monkeypatch.setattr(suite, "environment", lambda: facts | {"commit": "one"})
    run(path, cells[:1])
    later = facts | {"commit": "two", "versions": facts["versions"] | {"onnxruntime-gpu": "1.31.1"}}
    later["machine"] = facts["machine"] | {"memory_bytes": 1, "os": "another kernel"}
    monkeypatch.setattr(suite, "environment", lambda: later)
    rows, _ = run(path, cells)
    assert [row["commit"] for row in rows] == ["one"] * 3 + ["two"] * 3
    other = facts | {"machine": facts["machine"] | {"gpu": {"name": "NVIDIA H200"}}}
    monkeypatch.setattr(suite, "environment", lambda: other)
    rows, _ = run(path, cells[:1])
    assert len(rows) == 3 and len([*tmp_path.glob("rows*.json")]) == 2


def test_a_cell_that_does_not_come_back_is_ended(tmp_path: Path) -> None:
    program = (
        "import time\nfrom bench.gpu import suite\n"
        "suite.run_suite = lambda *_, **__: time.sleep(60)\n"
        f"suite.run_in_time({str(tmp_path / 'x.json')!r}, 0.001, grace_s=0.2)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 3 and "the rows before it are kept" in done.stdout


# Without a GPU, and without most packages


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_sentence_says_so(tmp_path: Path) -> None:
    asked = [sys.executable, "-m", "bench.gpu.suite", "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(asked, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2 and not (tmp_path / "rows.json").exists()
    assert done.stderr.endswith("This suite needs a GPU and a torch that sees it, and there is none here.\n")
    assert len(done.stderr.splitlines()) == 1


def only_these(names: tuple[str, ...], folder: Path) -> Path:
    """A folder of installed packages that has these and what they require, and nothing else."""
    wanted, todo = set(), [*names]
    while todo:
        name = re.sub("[_.]+", "-", todo.pop()).lower()
        with suppress(metadata.PackageNotFoundError):
            if name not in wanted:
                needs = [need for need in metadata.requires(name) or () if "extra ==" not in need]
                todo += [re.match(r"[\w.-]+", need)[0] for need in needs]
                wanted.add(name)
    folder.mkdir()
    for name in wanted:
        for top in {file.parts[0] for file in metadata.files(name) if ".." not in file.parts}:
            there = metadata.distribution(name).locate_file(top)
            if not (folder / top).exists() and Path(there).exists():
                (folder / top).symlink_to(there)
    return folder


def test_the_bundle_alone_measures_with_torch_transformers_and_numpy(toy: str, tmp_path: Path) -> None:
    """Unpacked in a folder of its own, without git, a network, data, or any other package."""
    bundle = tmp_path / "bundle"
    command = [sys.executable, "scripts/gpu_bundle.py", str(bundle)]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    files = [file for file in bundle.rglob("*") if file.is_file()]
    assert {file.suffix for file in files} == {".py", ".sh"} and sum(file.stat().st_size for file in files) < 5e6
    assert re.search(r"\d\.\d MB", said)
    program = f"""
import importlib.util, sys, t5accel
assert not [name for name in ("onnx", "onnxruntime", "datasets", "sacrebleu") if importlib.util.find_spec(name)]
assert t5accel.__file__.startswith({str(bundle)!r}), t5accel.__file__
from bench.gpu.cells import Cell, RUNTIMES
from bench.systems import GRAPH, RECOMPUTE, REFERENCE, STATIC
from bench.gpu.suite import run_suite
from t5accel.models.load import load_model
assert load_model("random:flan-t5-small")[0].config.d_model == 512  # as the suite's own cells are named
sizes = dict(model={toy!r}, dtype="float32", batch=2, source_tokens=9, new_tokens=5, least_s=0.0)
systems = (REFERENCE, STATIC, GRAPH, RECOMPUTE, *RUNTIMES)
kinds = ("equality", "speed", "floor")
run_suite("rows.json", device="cpu", cells=[Cell(kind, kind, systems=systems, **sizes) for kind in kinds], rounds=3)
"""
    site = only_these(("torch", "transformers", "numpy"), tmp_path / "site")
    environment = {"T5ACCEL_COMMIT": "abc", "PATH": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{bundle}:{site}"}
    asked = [sys.executable, "-S", "-c", program]
    done = subprocess.run(asked, capture_output=True, text=True, cwd=bundle, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads((bundle / "rows.json").read_text(encoding="utf-8"))
    assert record["commit"] == "abc" and record["versions"].keys() == {"torch", "transformers", "tokenizers", "numpy"}
    timed = [row["system"] for row in record["rows"] if row.get("latency_s")]
    assert timed == [REFERENCE, STATIC, GRAPH, systems.RECOMPUTE]
    refused = {row["system"]: row["failed"] for row in record["rows"] if "failed" in row and row["cell"] == "speed"}
    assert refused.keys() == {*RUNTIMES}
    assert {said.split(":")[0] for said in refused.values()} <= {"MissingPackageError", "ModuleNotFoundError"}


@pytest.mark.parametrize(("codes", "tries", "ends"), [
    ("0", 1, 0), ("2", 1, 2), ("3 0", 2, 0), ("4 139 0", 3, 0), ("4 4 4 4", 3, 4)])  # fmt: skip
def test_the_loop_of_the_bundle_goes_on_after_what_a_new_process_can_mend(
    tmp_path: Path, codes: str, tries: int, ends: int
) -> None:
    bundle = tmp_path / "bundle"
    subprocess.run([sys.executable, "scripts/gpu_bundle.py", str(bundle)], cwd=ROOT, check=True, capture_output=True)
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f"""#!/bin/sh
n=$(cat {tmp_path}/n 2>/dev/null || echo 0); n=$((n + 1)); echo $n > {tmp_path}/n; echo "$@" >> {tmp_path}/asked
set -- {codes}; shift $((n - 1)); exit $1
""")
    python.chmod(0o755)
    (tmp_path / "out").mkdir()
    environment = os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}", "OUT": "out"}
    asked = ["sh", str(bundle / "run.sh"), "--only", "t5-small"]
    done = subprocess.run(asked, env=environment, cwd=tmp_path, check=False)
    calls = (tmp_path / "asked").read_text().splitlines()
    assert done.returncode == ends and len(calls) == tries
    assert f"--json {tmp_path}/out --minutes" in calls[0] and calls[0].endswith("--only t5-small")


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
    assert suite.slug(name) == expected
    with pytest.raises(InputError, match="name"):
        suite.slug(" - ")
