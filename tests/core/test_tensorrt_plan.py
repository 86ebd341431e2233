"""Plans for TensorRT, in plain Python: axes that agree, ranges that are ranges, keys that change with what matters."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from refused import refused

from bench.baselines.optimized_export import optimize_export
from t5accel.backends import tensorrt as tensorrt_engines
from t5accel.backends.tensorrt import Range, Sizes, plan
from t5accel.errors import InputError, MissingPackageError
from t5accel.graphs.contract import decoder_spec, encoder_spec
from t5accel.graphs.manifest import Manifest, read_manifest
from t5accel.precision.convert import convert_export
from t5accel.precision.recipes import RECIPES


@pytest.fixture(scope="module")
def manifest(exported: Any) -> Manifest:
    return read_manifest(exported("deeper-decoder"))


def test_every_input_has_a_profile_in_which_axes_agree(manifest: Manifest) -> None:
    sizes = Sizes(B=Range(1, 2, 3), K=Range(1, 4, 5), S=Range(6, 7, 8), T=Range(1, 9, 10), P=Range(0, 11, 12))
    found = plan(manifest, sizes)
    for name, spec in (("encoder.onnx", encoder_spec(manifest.dims)), ("decoder.onnx", decoder_spec(manifest.dims))):
        graph = found.graphs[name]
        assert list(graph.profile) == [tensor.name for tensor in spec.inputs]
        for tensor in spec.inputs:
            for which, shape in zip(("least", "usual", "most"), graph.profile[tensor.name], strict=True):
                expected = [
                    axis if isinstance(axis, int) else getattr(getattr(sizes, axis), which) for axis in tensor.shape
                ]
                assert list(shape) == expected
        assert graph.dtypes == {tensor.name: tensor.dtype for tensor in (*spec.inputs, *spec.outputs)}
        for shapes in zip(*graph.profile.values(), strict=True):
            graph.check(dict(zip(graph.profile, shapes, strict=True)))


def test_the_past_begins_at_nothing(manifest: Manifest) -> None:
    assert plan(manifest).graphs["decoder.onnx"].profile["past_mask"][0] == (1, 1, 0)


def test_half_precision_is_in_the_plan(exported: Any, tmp_path: Path) -> None:
    convert_export(exported("deeper-decoder"), tmp_path / "fp16", RECIPES["fp16"])
    decoder = plan(read_manifest(tmp_path / "fp16")).graphs["decoder.onnx"]
    assert {decoder.dtypes[name] for name in ("past_key_0", "cross_value_2", "present_key_1")} == {"float16"}
    assert decoder.dtypes["input_ids"] == "int64" and decoder.dtypes["logits"] == "float32"


def test_exports_for_other_runtimes_are_refused(exported: Any, exported_mini: Path, tmp_path: Path) -> None:
    for name in ("int8", "int4"):
        convert_export(exported_mini, tmp_path / name, RECIPES[name])
    optimize_export(exported("deeper-decoder"), tmp_path / "optimised")
    for name, match in (("int8", "This export is in int8"), ("int4", "This export is in int4"),
                        ("optimised", "optimised for ONNX Runtime")):  # fmt: skip
        with pytest.raises(InputError, match=match):
            plan(read_manifest(tmp_path / name))


def test_what_are_no_sizes(manifest: Manifest) -> None:
    bounds = ((2, 1, 3), (1, 4, 3), (-1, 0, 1), (1, 2.0, 3), (True, 1, 1), ("1", 2, 3), (None, 1, 2))
    refused(lambda bounds: Range(*bounds), "bounds", *bounds, match="least|usual|most")
    refused(Sizes, "P", Range(1, 2, 3), match="P begins at 1; the first step has no past")
    refused(Sizes, "B", Range(0, 1, 2), match="B begins at 0")
    refused(Sizes, "T", (1, 2, 3), match="T is")
    refused(Sizes, "S", None, match="S is")
    refused(partial(plan, manifest), "sizes", {"B": 1}, match="give tensorrt_plan.Sizes")
    check = plan(manifest).graphs["encoder.onnx"].check
    refused(check, "shapes", {"input_ids": (1, 64)}, match="no shape for attention_mask")
    refused(
        check, "shapes", {"input_ids": (9, 64), "attention_mask": (9, 64)}, match=r"input_ids is of shape \(9, 64\);"
    )
    refused(check, "shapes", {"input_ids": (1, 64), "attention_mask": (1, 64, 1)}, match="attention_mask is of shape")
    refused(check, "shapes", {"input_ids": (1, 0), "attention_mask": (1, 0)}, match="input_ids is of shape")


def test_the_key_changes_with_all_that_an_engine_depends_on(manifest: Manifest) -> None:
    first = plan(manifest)
    same, another = dict(version="tensorrt 11.0", device="H200 (9, 0)"), "L4 (8, 9)"
    others = [
        first.key(**{**same, "version": "tensorrt 11.1"}), first.key(**{**same, "device": another}),
        plan(manifest, Sizes(S=Range(1, 64, 1024))).key(**same), replace(first, source="another").key(**same),
        plan(replace(manifest, files={**manifest.files, "decoder.onnx": {"sha256": "0" * 64}})).key(**same),
    ]  # fmt: skip
    assert len({first.key(**same), *others}) == 6 and plan(manifest).key(**same) == first.key(**same)
    assert re.fullmatch(r"[0-9a-f]{16}", others[0])


def test_without_tensorrt_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(tensorrt_engines, "import_module", missing)
    with pytest.raises(MissingPackageError, match="tensorrt-cu13"):
        tensorrt_engines.load_tensorrt()
    with pytest.raises(MissingPackageError, match="tensorrt_rtx"):
        tensorrt_engines.load_tensorrt("tensorrt_rtx")
