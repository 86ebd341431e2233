"""fp16: what is converted and what is not, by a probe of real numbers; and a model whose numbers are too large."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from programs import forced
from refused import refused
from test_export import histories, teacher_forced
from test_gate import MODELS, lost
from test_rewriting import operators, run

from bench.baselines.rescale import scale_residual_stream
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import ExportError, InputError
from t5accel.graphs.builder import GraphBuilder
from t5accel.graphs.contract import DECODER, ENCODER, WEIGHTS, decoder_spec, encoder_spec
from t5accel.graphs.export import export_model
from t5accel.graphs.layers import LOWEST
from t5accel.graphs.manifest import read_manifest
from t5accel.graphs.rewriting import load_graphs
from t5accel.precision.calibration import (
    CalibrationSample,
    collect_ranges,
)
from t5accel.precision.fp16 import LARGEST, MARGIN, convert_graph_fp16, export_fp16, nodes_in_fp32
from t5accel.precision.recipes import RECIPES, Recipe, Scheme, recipe_from_json

ONE_THREAD = SessionSettings(threads=1)
ERROR, OTHERS = 4e-3, 0.02  # of fp16, with its 11 bits: in units of the logits' spread, and of other tokens


def by_numpy(graph: GraphBuilder, **feeds: np.ndarray) -> list[np.ndarray]:
    """All outputs, by ONNX's own evaluator: fp16 is numpy's fp16 there, on whatever machine."""
    with np.errstate(over="ignore", invalid="ignore"):
        return ReferenceEvaluator(graph.proto()).run(None, feeds)


# Two nodes


def square_root_of_square() -> GraphBuilder:
    graph = GraphBuilder("two")
    x = graph.input("x", "float32", ["N"])
    graph.output(graph.op("Sqrt", graph.op("Mul", x, x, output="square"), output="y"), "float32", ["N"])
    return graph


def test_two_nodes_in_fp16() -> None:
    graph = square_root_of_square()
    convert_graph_fp16(graph)
    assert operators(graph) == ["Mul", "Sqrt"]
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.inputs, *graph.outputs)}
    assert types == {"x": onnx.TensorProto.FLOAT16, "y": onnx.TensorProto.FLOAT16}
    onnx.checker.check_model(graph.proto(), full_check=True)
    (y,) = by_numpy(graph, x=np.array([3, -200, 300, 1e-5], dtype=np.float16))
    assert y.dtype == np.float16 and y[:2].tolist() == [3, 200]
    assert np.isinf(y[2]) and y[3] == 0, "90,000 is beyond the end, and 1e-10 below the beginning"


def test_two_nodes_that_stay_in_fp32() -> None:
    graph = square_root_of_square()
    convert_graph_fp16(graph, ["Mul:square", "Sqrt:y"])
    assert operators(graph) == ["Cast", "Mul", "Sqrt", "Cast"], "one cast for both operands, none in between"
    onnx.checker.check_model(graph.proto(), full_check=True)
    x = np.array([3, -200, 300, 1e-5], dtype=np.float16)
    for y in (by_numpy(graph, x=x)[0], run(graph, x=x)[0]):
        assert y.dtype == np.float16
        np.testing.assert_allclose(y, np.abs(x), rtol=1e-3)


def test_weights_are_stored_in_fp16_whoever_reads_them() -> None:
    graph = GraphBuilder("weights")
    x, weight = graph.input("x", "float32", ["N", 2]), np.array([[1 / 3, np.inf], [-3e38, 1e-9]], dtype=np.float32)
    one = graph.op("MatMul", x, graph.weight("w", weight), output="one")
    graph.output(graph.op("MatMul", one, "w", output="two"), "float32", ["N", 2])
    graph.output(graph.op("Add", one, graph.constant(np.float32(2)), output="three"), "float32", ["N", 2])
    convert_graph_fp16(graph, ["MatMul:two"])
    assert {name: array.dtype.name for name, array in graph.weights.items()} == {
        "w.fp16": "float16", "constant_0.fp16": "float16"}  # fmt: skip
    np.testing.assert_array_equal(
        graph.weights["w.fp16"], np.array([[1 / 3, LARGEST], [-LARGEST, 1e-9]], dtype=np.float16))  # fmt: skip
    assert Counter(operators(graph)) == {"MatMul": 2, "Add": 1, "Cast": 3}, "of the weight, of `one`, of `two`"
    onnx.checker.check_model(graph.proto(), full_check=True)


@pytest.mark.parametrize("value", [1e6, -7e4, np.nan])
def test_a_weight_beyond_fp16_is_refused(value: float) -> None:
    graph = GraphBuilder("weights")
    weight = graph.weight("w", np.array([[1, value]], dtype=np.float32))
    graph.output(graph.op("Add", graph.input("x", "float32", ["N", 2]), weight, output="y"), "float32", ["N", 2])
    with pytest.raises(InputError, match="w must lie within ±65504 for fp16"):
        convert_graph_fp16(graph)


def test_logits_leave_in_fp32_and_integers_stay() -> None:
    graph = GraphBuilder("logits")
    ids = graph.input("ids", "int64", ["N"])
    padded = graph.op("Cast", graph.op("Sub", graph.constant(1), ids), to=onnx.TensorProto.FLOAT)
    masked = graph.op("Mul", padded, graph.constant(LOWEST), output="masked")
    graph.output(graph.op("Neg", masked, output="logits"), "float32", ["N"])
    graph.output(graph.op("Shape", masked, output="shape"), "int64", [1])
    convert_graph_fp16(graph)
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.inputs, *graph.outputs)}
    assert types == {"ids": onnx.TensorProto.INT64, "logits": onnx.TensorProto.FLOAT, "shape": onnx.TensorProto.INT64}
    assert operators(graph).count("Cast") == 2, "that of the mask, to fp16 now, and one of the logits"
    onnx.checker.check_model(graph.proto(), full_check=True)
    for logits, shape in (by_numpy(graph, ids=np.array([1, 0])), run(graph, ids=np.array([1, 0]))):
        assert logits.dtype == np.float32 and logits.tolist() == [0, LARGEST] and shape.tolist() == [2]


# Which nodes stay


def norm_and_product() -> GraphBuilder:
    """A sum, T5's norm of it, and a feed-forward's two products, which it is added to."""
    graph = GraphBuilder("decoder")
    x = graph.input("x", "float32", ["N", 8])
    hidden = graph.op("Add", x, x, output="sum")
    mean = graph.op("ReduceMean", graph.op("Pow", hidden, graph.constant(np.float32(2))), graph.constant([-1]))
    root = graph.op("Sqrt", graph.op("Add", mean, graph.constant(np.float32(1e-6)), output="safe"))
    normed = graph.op(
        "Mul", graph.op("Div", hidden, root), graph.weight("norm", np.ones(8, np.float32)), output="normed"
    )
    rng = np.random.default_rng(0)
    for part in ("wi", "wo"):
        name = f"decoder.block.0.layer.2.DenseReluDense.{part}.weight.T"
        normed = graph.op("MatMul", normed, graph.weight(name, rng.normal(size=(8, 8)).astype(np.float32)), output=part)
    graph.output(graph.op("Add", hidden, normed, output="y"), "float32", ["N", 8])
    return graph


def test_what_is_known_of_t5_stays_in_fp32() -> None:
    graph = norm_and_product()
    kept = nodes_in_fp32(graph)
    assert [name.split(":")[0] for name in kept] == ["Add", "Pow", "ReduceMean", "Add", "Sqrt", "Div", "MatMul"]
    assert {"Add:sum", "Add:safe", "MatMul:wo"} <= set(kept) and not {"MatMul:wi", "Mul:normed", "Add:y"} & set(kept)
    before = by_numpy(graph, x=np.full((1, 8), 500, dtype=np.float32))[0]
    naive, half = norm_and_product(), norm_and_product()
    convert_graph_fp16(naive)
    convert_graph_fp16(half, kept)
    x = np.full((1, 8), 500, dtype=np.float16)
    np.testing.assert_allclose(by_numpy(half, x=x)[0], before, rtol=2e-3, atol=1)
    assert np.abs(by_numpy(naive, x=x)[0].astype(float) - before).max() > 1, "squares of 1,000 are beyond the end"


def test_what_a_probe_has_seen_stays_in_fp32() -> None:
    graph = norm_and_product()
    assert not {"MatMul:wi", "Add:y"} & set(nodes_in_fp32(graph, {"wi": LARGEST / MARGIN * 0.99, "y": 100.0}))
    for value in (LARGEST / MARGIN * 1.01, 1e9, float("inf"), float("nan")):
        assert "MatMul:wi" in nodes_in_fp32(graph, {"wi": value})
        assert "Add:y" in nodes_in_fp32(graph, {"y": value})
    assert {"Mul:normed", "MatMul:wi"} <= set(nodes_in_fp32(graph, {"normed": 1e9})), "who makes it and who reads it"
    assert nodes_in_fp32(graph, {"of another graph": 1e9}) == nodes_in_fp32(graph)


# Whole exports


@pytest.fixture(scope="module")
def half(exported, tmp_path_factory) -> Callable[..., Path]:
    """``half(model)``: that tiny model's export in fp16. Shared: do not write."""

    @cache
    def convert(model: str = "deeper-decoder") -> Path:
        kind, sizes = MODELS[model]
        folder = tmp_path_factory.mktemp("half") / "fp16"
        export_fp16(exported(kind, **sizes), folder)
        return folder

    return convert


@pytest.mark.parametrize("model", MODELS)
def test_logits_and_tokens_are_near_those_of_fp32(exported, half, padded_batch, model: str) -> None:
    kind, sizes = MODELS[model]
    new = histories(6, 2, 9)
    expected = forced(exported(kind, **sizes), padded_batch, new, [3, 4])
    actual = forced(half(model), padded_batch, new, [3, 4])
    assert actual.dtype == np.float32
    error, other = lost(actual, expected)
    assert 1e-5 < error < ERROR and other <= OTHERS
    blind = forced(half(model), [padded_batch[0], np.ones_like(padded_batch[1])], new)
    assert lost(blind, expected)[0] > 10 * ERROR, "the mask should reach it"


def in_fp16(folder: Path, batch: Any, new: np.ndarray) -> np.ndarray:
    """Logits (B, 1, T, V), by ONNX's own evaluator.

    On a CPU without arithmetic for fp16 ONNX Runtime (1.31) computes in fp32 and leaves out the casts in between, so
    that nothing overflows there: what a GPU makes of the same file, it does not tell.
    """
    manifest, feeds = read_manifest(folder), dict(zip(("input_ids", "attention_mask"), batch, strict=True))
    encoder, decoder = (ReferenceEvaluator(str(folder / name)) for name in (ENCODER, DECODER))
    with np.errstate(over="ignore", invalid="ignore"):
        cross = dict(zip(encoder.output_names, encoder.run(None, feeds), strict=True))
        assert {array.dtype for array in cross.values()} == {np.dtype(np.float16)}
        past = {f"past_{part}_{layer}": np.zeros((*new.shape[:2], heads, 0, manifest.dims.d_kv), np.float16)
                for layer, heads in enumerate(manifest.dims.decoder_heads) for part in ("key", "value")}  # fmt: skip
        given = {"input_ids": new, "attention_mask": batch[1], "past_mask": np.zeros((*new.shape[:2], 0), np.int64)}
        return decoder.run(["logits"], {**given, **past, **cross})[0]


@pytest.mark.parametrize("model", ["deeper-decoder", "gated-untied", "umt5"])
def test_the_same_by_arithmetic_in_fp16(exported, half, padded_batch, model: str) -> None:
    kind, sizes = MODELS[model]
    new = histories(6, 1, 5)
    error, other = lost(in_fp16(half(model), padded_batch, new), forced(exported(kind, **sizes), padded_batch, new))
    assert error < 3 * ERROR and other <= 2 * OTHERS


def test_keys_and_values_are_of_fp16(exported, half) -> None:
    for model in ("deeper-decoder", "umt5"):
        manifest, backend = read_manifest(half(model)), OrtNumpy(half(model), settings=ONE_THREAD)
        assert manifest.graphs == {ENCODER: encoder_spec(manifest.dims, "float16"),
                                   DECODER: decoder_spec(manifest.dims, "float16")}  # fmt: skip
        assert backend.dtype == np.float16
        types = {"int64": "tensor(int64)", "float32": "tensor(float)", "float16": "tensor(float16)"}
        for name, session in ((ENCODER, backend.encoder), (DECODER, backend.decoder)):
            spec = manifest.graphs[name]
            declared = [(v.name, v.type, tuple(v.shape)) for v in (*session.get_inputs(), *session.get_outputs())]
            assert declared == [(t.name, types[t.dtype], t.shape) for t in (*spec.inputs, *spec.outputs)]
        floats = {v.name for v in backend.decoder.get_outputs() if v.type == "tensor(float)"}
        assert floats == {"logits"}
        onnx.checker.check_model(str(half(model) / DECODER), full_check=True)


def test_the_manifest_names_what_stayed(exported, half) -> None:
    manifest = read_manifest(half())
    assert recipe_from_json(manifest.recipe) == RECIPES["fp16"] and manifest.recipe["gated"] is False
    assert manifest.recipe["probed"] is False
    graphs = load_graphs([exported() / ENCODER, exported() / DECODER])
    expected = [f"{stack} {name}" for stack, file in (("encoder", ENCODER), ("decoder", DECODER))
                for name in sorted(nodes_in_fp32(graphs[file]))]  # fmt: skip
    assert manifest.recipe["in_fp32"] == expected and len(expected) > 60
    wo = [name for name in expected if name.startswith("encoder MatMul")]
    assert len(wo) == 2


def test_bytes_halve(tiny_t5, tmp_path: Path) -> None:
    export_model(tiny_t5(vocab_size=3000), tmp_path / "fp32", external_threshold_bytes=0)
    export_fp16(tmp_path / "fp32", tmp_path / "fp16")
    before, after = (read_manifest(tmp_path / name) for name in ("fp32", "fp16"))
    assert after.files[WEIGHTS]["size_bytes"] < 0.55 * before.files[WEIGHTS]["size_bytes"], "in whole pages"
    assert after.shared.keys() == {"shared.weight.fp16"} and after.shared["shared.weight.fp16"]["dtype"] == "float16"
    for name in (ENCODER, DECODER):
        weights = [load_graphs([tmp_path / folder / name])[name].weights for folder in ("fp32", "fp16")]
        floats = [sum(array.nbytes for array in of.values() if array.dtype.kind == "f") for of in weights]
        assert floats[0] == 2 * floats[1], "those of nodes in fp32 too"
        assert not [name for name, array in weights[1].items() if array.dtype == np.float32]
    backend = OrtNumpy(tmp_path / "fp16", settings=ONE_THREAD)
    assert list(backend._weights) == ["shared.weight.fp16"]
    assert greedy(backend, [[5, 6, 1]], max_new_tokens=3).decoder_calls == 3


def test_recipes_that_are_not_of_fp16(exported, tmp_path: Path) -> None:
    call, mixed = partial(export_fp16, exported(), tmp_path / "new"), Recipe("mixed", dtype="float16", decoder=Scheme())
    refused(call, "recipe", "fp32", "bf16", "int8", mixed, Recipe("other"))
    refused(call, "recipe", "float16", None, 16, match="precision")
    assert not list(tmp_path.iterdir())


# The probe


@contextmanager
def watching(model: Any) -> Iterator[dict[str, tuple[float, float]]]:
    """What torch's Linear layers yield: by the name of the weight the lowest and the highest number."""
    seen: dict[str, tuple[float, float]] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: Any, __: Any, output: torch.Tensor) -> None:
            low, high = seen.get(name, (np.inf, -np.inf))
            seen[name] = min(low, output.min().item()), max(high, output.max().item())

        return hook

    hooks = [module.register_forward_hook(note(name)) for name, module in model.named_modules()
             if isinstance(module, torch.nn.Linear)]  # fmt: skip
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("model", ["deeper-decoder", "byt5"])
def test_the_probe_sees_what_torch_computes(tiny_t5, exported, padded_batch, model: str) -> None:
    kind, sizes = MODELS[model]
    own, (ids, mask) = tiny_t5(kind, **sizes), padded_batch
    new = histories(6, 1, 7)[:, 0]
    examples = [CalibrationSample(ids, mask, new), CalibrationSample(ids[:2, :3], mask[:2, :3], new[2:4])]
    with watching(own) as expected:
        for one in examples:
            teacher_forced(own, *one[:2], one.decoder_input_ids[:, None])
    seen = collect_ranges(exported(kind, **sizes), iter(examples))
    by_weight = {one.weight: one for one in seen if one.weight}
    head = "shared.weight" if "shared.weight" in by_weight else "lm_head.weight.T"
    assert by_weight.keys() == {head if name == "lm_head" else f"{name}.weight.T" for name in expected}
    for name, (low, high) in expected.items():
        one = by_weight[head if name == "lm_head" else f"{name}.weight.T"]
        assert one.operator == "MatMul" and low < 0 < high
        assert (one.low, one.high) == (pytest.approx(low, rel=1e-3, abs=1e-4), pytest.approx(high, rel=1e-3, abs=1e-4))
        assert one.max_abs == max(-one.low, one.high)
    assert all(one.low > -1e6 for one in seen), "masks are left aside"


def test_where_the_probe_saw_it(exported, padded_batch) -> None:
    seen = collect_ranges(exported(), [CalibrationSample(*padded_batch, histories(6, 1, 4)[:, 0])])
    assert [one.graph for one in seen] == sorted((one.graph for one in seen), reverse=True), "the encoder comes first"
    assert len({(one.graph, one.value) for one in seen}) == len(seen) > 200
    assert seen[0].place == "embedding" and seen[0].operator == "Gather" and seen[0].weight is None
    wo = {one.weight: one.place for one in seen if one.weight and ".wo." in one.weight}
    assert len(wo) == 5 and wo["decoder.block.2.layer.2.DenseReluDense.wo.weight.T"] == "decoder.2.wo"
    assert any(one.value == "logits" and one.place == "lm_head" for one in seen)
    assert all(one.low >= 0 and one.high <= 1 for one in seen if one.operator == "Softmax")


def test_what_cannot_be_probed(exported, half, padded_batch, tmp_path: Path) -> None:
    one = CalibrationSample(*padded_batch, histories(6, 1, 4)[:, 0])
    ids, mask, tokens = one

    def convert(example: Any) -> Any:
        return export_fp16(exported(), tmp_path / "new", examples=[example])

    for wrong in (tokens[:, :0], tokens[:5], tokens * 0.5, None, tokens + 300):
        refused(convert, "example", one._replace(decoder_input_ids=wrong), match="decoder_input_ids")
    refused(convert, "example", one._replace(input_ids=ids + 300), one._replace(input_ids=ids * 0.5), match="input_ids")
    refused(convert, "example", one._replace(attention_mask=mask[:, :3]), match="attention_mask")
    refused(convert, "example", 5, tuple(one[:2]), match="CalibrationSample")
    assert not list(tmp_path.iterdir())
    refused(partial(collect_ranges, exported()), "examples", [])
    refused(lambda folder: collect_ranges(folder, [one]), "folder", half(), match="is in fp16 already")
    refused(
        lambda folder: collect_ranges(folder, [one]), "folder", tmp_path, match="holds no manifest", error=ExportError
    )


# A model whose numbers are too large


FACTOR = 4096.0  # with which the squares in the norms, and the sums, pass the end of fp16 and the embedding does not


@pytest.fixture(scope="module")
def enormous(tiny_t5, tmp_path_factory) -> Callable[[str], Path]:
    """``enormous(kind)``: the export of a tiny model with large numbers. Shared: do not write."""

    @cache
    def export(kind: str) -> Path:
        folder = tmp_path_factory.mktemp("enormous") / kind
        export_model(scale_residual_stream(tiny_t5(kind), FACTOR), folder)
        return folder

    return export


@pytest.mark.parametrize("kind", ["deeper-decoder", "gated-untied", "umt5"])
def test_the_list_of_a_probe_mends_what_a_general_converter_breaks(
    enormous, exported, padded_batch, tmp_path: Path, monkeypatch, kind: str
) -> None:
    new = histories(6, 1, 9)
    example = CalibrationSample(*padded_batch, new[:, 0])
    seen = collect_ranges(enormous(kind), [example])
    assert max(one.max_abs for one in seen) > LARGEST > max(
        one.max_abs for one in collect_ranges(exported(kind), [example]) if one.operator != "Pow")  # fmt: skip
    expected = forced(exported(kind), padded_batch, new)
    assert lost(forced(enormous(kind), padded_batch, new), expected)[0] < 1e-4, "in fp32 it is the same model"
    with monkeypatch.context() as patched:  # every node, as a general converter
        patched.setattr("t5accel.precision.fp16.nodes_in_fp32", lambda *_: [])
        naive = export_fp16(enormous(kind), tmp_path / "naive")
    mended = export_fp16(enormous(kind), tmp_path / "mended", examples=[example])
    assert naive.recipe["in_fp32"] == [] and mended.recipe["probed"] is True
    listed, known = set(mended.recipe["in_fp32"]), export_fp16(enormous(kind), tmp_path / "known").recipe["in_fp32"]
    assert set(known) < listed, "the probe finds more than what is known of T5"
    for actual in (in_fp16(tmp_path / "mended", padded_batch, new), forced(tmp_path / "mended", padded_batch, new)):
        error, other = lost(actual, expected)
        assert error < 3 * ERROR and other <= 2 * OTHERS
    wrong = in_fp16(tmp_path / "naive", padded_batch, new)
    assert not np.isfinite(wrong).all() or lost(wrong, expected)[0] > 0.1
