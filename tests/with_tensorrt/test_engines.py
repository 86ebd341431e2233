"""Real TensorRT-RTX parses and builds the bundled model's graphs, and refuses what does not fit. Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import onnx
import pytest

from t5accel.backends import tensorrt as tensorrt_engines
from t5accel.backends.tensorrt import GraphPlan, Plan, Range, Sizes, build_engine, cached_engines, plan
from t5accel.errors import ExportError, InputError
from t5accel.graphs.export import export_model
from t5accel.graphs.manifest import read_manifest
from t5accel.precision.convert import convert_export
from t5accel.precision.recipes import RECIPES

# A small range builds in seconds.
SIZES = Sizes(B=Range(1, 1, 2), K=Range(1, 1, 2), S=Range(1, 16, 64), T=Range(1, 1, 2), P=Range(0, 8, 32))


@pytest.fixture(scope="module")
def trt() -> Any:
    return import_module("tensorrt_rtx")  # not skipped where it is missing: then nothing would have been tested


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports") / "fp32"
    export_model("mini", folder)
    return folder


@pytest.fixture(scope="module")
def fp16(fp32: Path) -> Path:
    convert_export(fp32, fp32.with_name("fp16"), RECIPES["fp16"])
    return fp32.with_name("fp16")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("T5ACCEL_CACHE", str(tmp_path))
    yield tmp_path / "exports"


def planned(folder: Path) -> Plan:
    return plan(read_manifest(folder), SIZES)


@pytest.mark.parametrize("graph", ["encoder.onnx", "decoder.onnx"])
def test_both_graphs_are_built_in_the_numbers_of_the_export(trt: Any, fp32: Path, fp16: Path, graph: str) -> None:
    engines = [build_engine(folder / graph, planned(folder).graphs[graph], trt=trt) for folder in (fp32, fp16)]
    sizes = [len(engine) for engine in engines]
    weights = (fp32 / graph).stat().st_size
    assert sizes[0] > 0.9 * weights, "an engine holds its graph's weights"
    assert sizes[1] < 0.75 * sizes[0], "and in fp16 about half of their bytes"


def test_engines_are_kept_and_a_failure_leaves_none(trt: Any, fp32: Path, cache: Path, monkeypatch) -> None:
    wanted = Plan({"encoder.onnx": planned(fp32).graphs["encoder.onnx"]}, SIZES, "one")
    built: list[bytes] = []
    build = tensorrt_engines.build_engine
    monkeypatch.setattr(tensorrt_engines, "build_engine", lambda *a, **k: (built.append(build(*a, **k)), built[-1])[1])
    first = cached_engines(fp32, wanted, trt=trt, device="no GPU")
    again = cached_engines(fp32, wanted, trt=trt, device="no GPU")
    assert first == again and len(built) == 1 and first["encoder.onnx"].read_bytes() == built[0]
    assert cached_engines(fp32, replace(wanted, source="two"), trt=trt, device="no GPU") != first and len(built) == 2

    def fails(*_: Any, **__: Any) -> bytes:
        raise ExportError("no")

    monkeypatch.setattr(tensorrt_engines, "build_engine", fails)
    before = sorted(cache.iterdir())
    with pytest.raises(ExportError, match="no"):
        cached_engines(fp32, replace(wanted, source="three"), trt=trt, device="no GPU")
    assert [path for path in sorted(cache.iterdir()) if path.is_dir()] == [path for path in before if path.is_dir()]


def test_another_precision_than_the_plans_is_refused(trt: Any, fp32: Path, fp16: Path) -> None:
    with pytest.raises(ExportError, match="must be float32 by the plan, got .*HALF"):
        build_engine(fp16 / "decoder.onnx", planned(fp32).graphs["decoder.onnx"], trt=trt)


def test_another_models_plan_is_refused(trt: Any, fp32: Path, tmp_path: Path) -> None:
    export_model("mini-d1", tmp_path / "d1")
    with pytest.raises(InputError, match="Only one of graph and profile has the inputs .*past_key_1"):
        build_engine(fp32 / "decoder.onnx", planned(tmp_path / "d1").graphs["decoder.onnx"], trt=trt)


def test_a_profile_that_misses_an_input_is_refused(trt: Any, fp32: Path) -> None:
    right = planned(fp32).graphs["encoder.onnx"]
    profile = {name: shapes for name, shapes in right.profile.items() if name != "attention_mask"}
    with pytest.raises(InputError, match="inputs attention_mask"):
        build_engine(fp32 / "encoder.onnx", GraphPlan(profile, right.dtypes), trt=trt)


def test_a_fixed_axis_does_not_vary(trt: Any, fp32: Path) -> None:
    right = planned(fp32).graphs["decoder.onnx"]
    least, usual, most = right.profile["past_key_0"]
    profile = {**right.profile, "past_key_0": (least, usual, (*most[:2], most[2] + 1, *most[3:]))}
    with pytest.raises((InputError, ExportError), match="TensorRT"):  # whichever of profile and engine it refuses
        build_engine(fp32 / "decoder.onnx", GraphPlan(profile, right.dtypes), trt=trt)


def test_an_operator_that_tensorrt_does_not_know_is_refused_in_its_words(trt: Any, fp32: Path, tmp_path: Path) -> None:
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy")
    node = onnx.helper.make_node("Unheard", ["x"], ["y"], domain="of")
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "bad", [x], [y])), tmp_path / "bad.onnx")
    with pytest.raises(ExportError, match="TensorRT cannot parse .*bad.onnx: .*Unheard"):
        build_engine(tmp_path / "bad.onnx", planned(fp32).graphs["encoder.onnx"], trt=trt)


def test_products_of_fp32_keep_their_bits(trt: Any, fp32: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFloat-32 is on by default: factors of 10 bits in what the export calls fp32."""
    configs = []

    class Builder(trt.Builder):
        def create_builder_config(self) -> Any:
            configs.append(super().create_builder_config())
            return configs[-1]

    monkeypatch.setattr(trt, "Builder", Builder)
    build_engine(fp32 / "encoder.onnx", planned(fp32).graphs["encoder.onnx"], trt=trt)
    (config,) = configs
    assert not config.get_flag(trt.BuilderFlag.TF32)
