"""Advice rests on recorded rows alone: the nearest run, what the gate lets pass, the fastest of that, and its row."""

import json
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from refused import refused
from typer.testing import CliRunner

from bench import advise as module
from bench.__main__ import app
from bench.advise import ADVISED, Advice, Need, line, recommend, report, weights_per_step
from bench.peers import PEERS
from bench.results import checked, load_results, write_json
from bench.systems import BOARD, CPU_REFERENCE, GRAPH, LOOKUP, ON_DEVICE, THEIR_LOOP, THROUGHPUT
from bench.systems import REFERENCE as GPU_REFERENCE
from t5accel import machine
from t5accel.errors import InputError, ModelUnavailableError, NotT5Error, UnknownModelError
from t5accel.models.random_init import RANDOM_SIZES, random_t5
from t5accel.precision.recipes import RECIPES

SCORES = {"bleu": 30.0, "rougeL": 60.0, "exact_match": 50.0}


def row(precision: str, ratio: float, **different: Any) -> dict[str, Any]:
    """A row of a board of mini, with whole scores."""
    system = "ONNX Runtime, our loop, numpy feeds" if precision == "fp32" else f"ONNX Runtime, our loop, {precision}"
    found = {
        "measured": "speed", "system": system, "reference": CPU_REFERENCE, "model": "mini", "precision": precision,
        "recipe_hash": RECIPES[precision].hash, "batch": 1, "beams": 1, "source_tokens": 64, "new_tokens": 64,
        "threads": 2, "latency_s": [1 / ratio], "ratio": ratio, "ratio_samples": [ratio], "size_bytes": 10_000_000,
        "equal": 64, "of": 64, **SCORES,
    }  # fmt: skip
    return {key: value for key, value in (found | different).items() if value is not None}


FP32, INT8, INT4 = row("fp32", 4.0, size_bytes=36_000_000), row("int8", 8.0), row("int4", 10.0, size_bytes=7_000_000)


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Advice from these rows alone; ``files`` holds more files of rows, by name."""
    monkeypatch.setattr(module, "DATA", tmp_path / "package")

    def advice(*rows: dict[str, Any], files: dict[str, list[dict[str, Any]]] | None = None, **need: Any) -> Advice:
        for name, content in ({"board": [*rows]} | (files or {})).items():
            about = {"machine": machine.facts(gpu=False), "versions": {}, "date": "2026-01-01", "commit": None}
            write_json(tmp_path / "package" / "results" / f"{name}.json", {**about, "rows": [*map(checked, content)]})
        return recommend(Need("random:t5-small" if need.pop("random", False) else "mini", **need))

    for name in ("weights_per_step", "weights_or_none"):
        monkeypatch.setattr(module, name, lambda name: {"mini": 5_000_000}.get(name, 40_000_000))
    return advice


def chosen(advice: Advice) -> str | None:
    return advice.recommended.row["precision"] if advice.recommended else None


def test_the_fastest_that_loses_no_more_than_allowed_is_taken_and_what_matters_decides(given: Any) -> None:
    rows = [FP32, row("int8", 8.0, bleu=29.5), row("int4", 10.0, bleu=28.5)]
    assert chosen(given(*rows)) == "int8"
    assert chosen(given(*rows, task="questions")) == "int4", "the score of another task does not count"
    assert chosen(given(*rows, max_loss={"bleu": 1.5})) == "int4"
    assert chosen(given(*rows, max_loss={"bleu": 0.4})) == "fp32"
    assert chosen(given(FP32, INT8, row("int4", 10.0, rougeL=40.0), max_loss={"bleu": 3})) == "int8"
    assert given(*rows).losses["int4"]["bleu"] == 1.5
    rows = [FP32, INT8, row("int4", 6.0, size_bytes=7_000_000)]
    assert chosen(given(*rows)) == "int8" and chosen(given(*rows, matters="memory")) == "int4"
    assert chosen(given(*rows, matters="quality")) == "fp32", "equal scores are no proof of equal tokens"
    peaks = [one | {"peak_memory_bytes": size} for one, size in zip(rows, (90, 70, 80), strict=True)]
    assert chosen(given(*peaks, matters="memory")) == "int8"
    assert chosen(given(FP32 | {"equal": 63})) is None
    assert chosen(given(row("fp32", 0.9))) is None
    assert "No recommendation" in report(given(row("fp32", 0.9)))


@pytest.mark.parametrize(
    "changed",
    [dict(recipe_hash="older"), dict(recipe_hash=None), dict(reference="another"), dict(system="a rival"),
     dict(latency_s=None, failed="no memory"), dict(bleu=None), dict(limit=8), dict(beams=4)],
)  # fmt: skip
def test_what_is_no_evidence_is_not_recommended(given: Any, changed: dict[str, Any]) -> None:
    assert chosen(given(FP32, row("int4", 10.0, **changed))) == "fp32"


def test_scores_of_one_file_belong_together(given: Any) -> None:
    elsewhere = [row("int4", 1.0, measured="quality", system=None, reference=None, latency_s=None)]
    bare = row("int4", 10.0, bleu=None)
    assert chosen(given(FP32, bare, files={"scores": elsewhere})) == "fp32", "that file has no fp32 to compare with"
    elsewhere.append(row("fp32", 1.0, measured="quality", system=None, reference=None, latency_s=None, bleu=30.5))
    assert chosen(given(FP32, bare, files={"scores": elsewhere})) == "int4"
    bare = [{key: value for key, value in one.items() if key not in SCORES} for one in (FP32, INT8)]
    advice = given(*bare)
    assert chosen(advice) == "fp32" and "the quality of int8 on this model" in report(advice)
    random = [one | {"model": "random:t5-small"} for one in bare]
    assert chosen(given(*random, random=True)) == "int8"


def test_the_nearest_run_is_taken_and_beyond_a_limit_none(given: Any) -> None:
    many = [row("fp32", 3.0, batch=32), row("int8-dynamic", 6.0, batch=32)]
    rows = [FP32, INT4, *many]
    assert chosen(given(*rows)) == "int4" and chosen(given(*rows, batch=24)) == "int8-dynamic"
    assert given(*rows, batch=16).far["batch"] == 2.0
    for far in (dict(batch=600), dict(new_tokens=1000)):
        advice = given(*rows, **far)
        assert advice.recommended is None and "too far" in report(advice)
    assert given(*rows, beams=4).recommended is None, "greedy search is no beam search"
    assert chosen(given(FP32, INT4, random=True)) is not None
    assert given(FP32, random=True).far["model size"] == 5 / 40
    assert given(*rows, device="cuda").recommended is None


def test_a_run_of_this_machine_goes_before_one_of_another(given: Any, tmp_path: Path) -> None:
    assert chosen(given(FP32, INT8, files={"zebra": [row("fp32", 4.0), row("int4", 7.0)]})) == "int8"
    board = tmp_path / "package" / "results" / "board.json"
    content = json.loads(board.read_text(encoding="utf-8"))
    write_json(board, content | {"machine": content["machine"] | {"cpu": "another"}})
    advice = recommend(Need("mini"))
    assert chosen(advice) == "int4" and "this machine" not in report(advice)
    (tmp_path / "package" / "results" / "zebra.json").unlink()
    assert "this machine" in report(recommend(Need("mini")))


def test_the_report_is_short_names_its_row_and_explains_on_demand(given: Any) -> None:
    advice = given(FP32, INT8, threads=4)
    short, long = report(advice), report(advice, explain=True)
    assert len(short.splitlines()) <= 15 and "board.json, row 1 (" in short and "2026-01-01" in short
    assert line(advice.need, "int8") in short and "threads=4" in short and "4 threads" in short
    assert long.splitlines()[:6] == short.splitlines()[:6] and "fp32, our loop" in long


def test_every_need_of_the_bundled_models_is_answered_in_fifteen_lines() -> None:
    for model in ("mini", "google-t5/t5-small", "random:t5-base"):
        for matters in module.MATTERS:
            advice = recommend(Need(model, matters=matters))
            assert len(report(advice).splitlines()) <= 15
            best = advice.recommended
            assert best.row == load_results(best.file)["rows"][best.number]
    beams = recommend(Need("random:t5-small", beams=4, source_tokens=128)).recommended
    assert beams.row["beams"] == 4 and beams.file.startswith("peers-")


def test_names_of_measured_systems_are_known() -> None:
    known = (one for one in (*BOARD, THEIR_LOOP, LOOKUP, THROUGHPUT) if not one.student)
    ours = {one.name for one in known if one.backend in ("backends.ort.numpy", "backends.hf")}
    assert ours - {"ONNX Runtime, our loop, all logits", "ONNX Runtime, transformers' loop"} <= ADVISED
    options = {"t5accel, all logits", "t5accel, OpenVINO's encoder"}  # which the line that is advised does not give
    assert {system.name for system in PEERS if system.ours} - options <= ADVISED


def test_invalid_needs_are_refused() -> None:
    for name, wrong in (("device", ["tpu"]), ("batch", [0]), ("beams", [1.5]), ("threads", [0]),
                        ("max_loss", [{"chrf": 1.0}, {"bleu": -1.0}, {"bleu": float("nan")}])):  # fmt: skip
        refused(Need, name, *wrong, match=f"^{name} ")
    refused(partial(Need, task="summaries"), "max_loss", {"bleu": 3.0}, match=r"^max_loss .* for rougeL, got .*bleu")


@pytest.mark.parametrize("content", ["{", '{"rows": 3}', '{"rows": [1]}', '{"rows": {"a": 1}}'])
def test_places_of_results_that_are_missing_or_damaged_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "mine.json").write_text(content)
    for place in (tmp_path, tmp_path / "mine.json"):
        with pytest.raises(InputError, match=r"mine\.json"):
            recommend(Need(), results=[place])
    with pytest.raises(InputError, match="nowhere"):
        recommend(Need(), results=[tmp_path / "nowhere"])


def test_the_size_of_a_model_is_read_from_its_configuration_alone(tmp_path: Path) -> None:
    small = random_t5(RANDOM_SIZES["t5-small"] | {"num_layers": 2, "num_decoder_layers": 1}).config
    small.save_pretrained(tmp_path)
    assert 0 < weights_per_step(str(tmp_path)) < weights_per_step("random:t5-small")
    assert weights_per_step("someone/nobody-downloaded-this") is None
    assert weights_per_step("facebook/bart-large-cnn") == weights_per_step("random:bart-large")
    assert weights_per_step("google/flan-t5-small") == weights_per_step("random:flan-t5-small")
    with pytest.raises(UnknownModelError):
        weights_per_step("random:nope")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(NotT5Error):
        weights_per_step(str(tmp_path))
    bart = {"model_type": "bart", "vocab_size": 90, "d_model": 8, "decoder_layers": 2, "decoder_ffn_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(bart))
    assert weights_per_step(str(tmp_path)) == 90 * 8 + 8 + 2 * 8 * (6 * 8 + 2 * 16 + 3)
    (tmp_path / "manifest.json").write_text("{}")
    refused(weights_per_step, "name", str(tmp_path), match="is an export")
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelUnavailableError):
        weights_per_step(str(tmp_path))


def test_models_of_ones_own_are_answered_by_their_sizes(tmp_path: Path) -> None:
    bart = recommend(Need("facebook/bart-large-cnn"))
    assert bart.recommended.row["model"] == "random:bart-base" and bart.family is None
    assert "bart-large" in report(bart) and "model size 0.3" in report(bart) and "int8" in report(bart)
    marian = recommend(Need("Helsinki-NLP/opus-mt-en-fr", beams=4)).recommended
    assert marian.row["model"] == "random:opus-mt" and marian.row["beams"] == 4
    sizes = dict(RANDOM_SIZES["t5-base"], model_type="t5", num_heads=10)
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    own = recommend(Need(str(tmp_path)))
    assert own.recommended and own.far["model size"] != 1 and "by its name" not in report(own)


def test_without_an_answer_the_command_that_gives_one_is_named(tmp_path: Path, cache_of_its_own: Any) -> None:
    """The command, and then the question again with its results."""
    sizes = dict(d_model=8, d_kv=4, d_ff=16, num_heads=2, num_layers=1, vocab_size=64)
    random_t5(sizes).save_pretrained(tmp_path / "own")
    need = Need(str(tmp_path / "own"), batch=2, source_tokens=8, new_tokens=4)
    nothing = report(recommend(need))
    (command,) = [text.split(": ", 1)[1] for text in nothing.splitlines() if text.startswith("Measure it: ")]
    json_file = tmp_path / "mine.json"
    fewer = shlex.split("--rounds 1 --quality-limit 0 --no-peak-memory --technique int8 --technique 'our loop'")
    arguments = shlex.split(command.replace("mine.json", str(json_file)))
    done = CliRunner().invoke(app, [*arguments[3:], *fewer])
    assert arguments[:3] == ["python", "-m", "bench"] and done.exit_code == 0, done.output
    content = json.loads(json_file.read_text(encoding="utf-8"))
    gpu = {"machine": content["machine"] | {"gpu": {"name": "a card that was not used"}}}
    rows = [row | ({"ratio": 3.0} if row["system"].endswith("numpy feeds") else {}) for row in content["rows"]]
    write_json(json_file, content | gpu | {"rows": rows})
    found = recommend(need, results=[json_file])
    assert found.recommended.file == "mine.json" and {*found.far.values()} == {1.0}
    unknown = report(recommend(Need("my/own-model")))
    assert "python -m bench board --model my/own-model" in unknown and "--results" in unknown


def test_a_gpu_is_answered_from_the_files_of_the_cards() -> None:
    assert set(module.ON_GPU) <= {system.name for system in ON_DEVICE} and module.GPU_REFERENCE == GPU_REFERENCE
    for need in (Need("random:t5-small", device="cuda"), Need("random:t5-base", device="cuda", beams=4)):
        best = recommend(need).recommended
        assert best.file.startswith("gpu-") and best.row["precision"] == "bf16"
        assert best.row == load_results(best.file)["rows"][best.number]
        assert 'device="cuda", precision="bf16"' in report(recommend(need))
    own = recommend(Need("google-t5/t5-small", device="cuda"))  # nobody scored bf16
    assert chosen(own) == "fp32" and own.unscored.row["precision"] == "bf16" and "bf16" in report(own)
    bart = report(recommend(Need("facebook/bart-base", device="cuda")))
    assert 'runtime="onnx"' in bart and "another family" in bart, "its steps are not captured"
    assert recommend(Need("google/umt5-small", device="cuda")).recommended.row["system"] == GRAPH
    beams = report(recommend(Need("mini", device="cuda", beams=4)))
    assert "No recommendation" in beams and "bf16" in beams and "bench.gpu.suite" in beams


@pytest.mark.parametrize("need", [dict(beams=4), dict(matters="throughput")])
def test_the_lines_of_python_are_a_whole_program(need: dict[str, Any], cache_of_its_own: Any) -> None:
    lines = [text[2:] for text in report(recommend(Need("mini", **need))).splitlines()[2:]]
    end = next(at for at, text in enumerate(lines) if text.startswith("sts on"))
    names: dict[str, Any] = {}
    exec("\n".join(lines[:end]), names)  # noqa: S102
    assert names["answers"].shape[0] == Need("mini", **need).batch
