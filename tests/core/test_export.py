"""The exported graphs: transformers' logits for every kind of model, by their contract, weights in either place."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from conftest import KINDS
from programs import PROGRAM, check_program, forced, prune_heads, pruned_and_silenced
from refused import refused
from silence import quiet
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.torch_static import TorchStatic
from t5accel.checks import read_json_object
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import (
    ExportError,
    InputError,
    ModelUnavailableError,
    NotT5Error,
    UnknownModelError,
)
from t5accel.graphs.contract import DECODER, ENCODER, WEIGHTS, decoder_spec, encoder_spec
from t5accel.graphs.export import backend_logits, check_logits, export_model, source_hash, t5_weights
from t5accel.graphs.export_folder import LARGEST_INSIDE
from t5accel.graphs.layers import decoder_graph, encoder_graph
from t5accel.graphs.manifest import read_manifest
from t5accel.models.families import BEYOND_T5
from t5accel.models.random_init import random_model
from t5accel.models.sizes import T5Dims
from t5accel.models.t5_math import logit_scale, relative_position_bucket
from t5accel.parity import ParityError, assert_close

V5 = int(transformers.__version__.split(".")[0]) >= 5

# ByT5 as it is published, but small: of type t5, gated, untied, 384 tokens, an encoder three times as deep.
BYT5 = dict(vocab_size=384, d_model=24, d_kv=8, d_ff=56, num_heads=3, num_layers=6, num_decoder_layers=2)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in KINDS},
    "byt5": ("gated-untied", BYT5),
    "gelu": ("deeper-decoder", dict(feed_forward_proj="gelu")),
    "silu": ("gated-untied", dict(feed_forward_proj="gated-silu")),
    "mt5-tied": ("mt5", dict(tie_word_embeddings=True)),
    "umt5-tied": ("umt5", dict(tie_word_embeddings=True)),
    "short-reach": ("umt5", dict(relative_attention_num_buckets=8, relative_attention_max_distance=20)),
}


@pytest.fixture(params=MODELS)
def variant(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Arguments of ``tiny_t5`` and ``exported``, for each kind of model that we claim to export."""
    return MODELS[request.param]


def sessions(*graphs: Path | bytes) -> list[onnxruntime.InferenceSession]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return [
        onnxruntime.InferenceSession(
            str(graph) if isinstance(graph, Path) else graph, options, providers=["CPUExecutionProvider"]
        )
        for graph in graphs
    ]


def by_contract(batch: Any, new: np.ndarray, *graphs: Path | bytes, garbage: int = 0, scale: float = 1.0) -> np.ndarray:
    """What a stranger does with the two graphs: all tokens at once, behind masked garbage; logits (B, K, T, V)."""
    (encoder, decoder), rng = sessions(*graphs), np.random.default_rng(9)
    feeds = {"input_ids": new, "attention_mask": batch[1], "past_mask": np.zeros((*new.shape[:2], garbage), np.int64)}
    for tensor in decoder.get_inputs():
        if tensor.name.startswith(("past_key", "past_value")):
            shape = (*new.shape[:2], tensor.shape[2], garbage, tensor.shape[4])
            feeds[tensor.name] = scale * rng.standard_normal(shape).astype(np.float32)
    names = [tensor.name for tensor in encoder.get_outputs()]
    cross = encoder.run(names, dict(zip(("input_ids", "attention_mask"), batch, strict=True)))
    return decoder.run(["logits"], {**feeds, **dict(zip(names, cross, strict=True))})[0]


@torch.inference_mode()
def teacher_forced(model: Any, ids: np.ndarray, mask: np.ndarray, new: np.ndarray) -> np.ndarray:
    """transformers' logits (B, K, T, V) for K histories (B, K, T) of each source; checked to vary."""
    batch, rows, length = new.shape
    repeated = [torch.as_tensor(array.repeat(rows, 0)) for array in (ids, mask)]
    logits = model(
        input_ids=repeated[0], attention_mask=repeated[1], decoder_input_ids=torch.as_tensor(new.reshape(-1, length)),
        use_cache=False,
    ).logits.float().numpy()  # fmt: skip
    assert len(np.unique(logits.argmax(-1))) > 8, "equality on a reference that does not vary is no evidence"
    return logits.reshape(batch, rows, length, -1)


def same_logits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Within 1e-4, or more where the logits themselves are larger than 1, as those of an untied head are here."""
    assert_close(actual, expected, atol=1e-4 * max(1.0, float(expected.std())))


def histories(batch: int, rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(1).integers(3, 300, (batch, rows, length))


# Equal to transformers


def test_logits_behind_garbage(tiny_t5, exported, variant, padded_batch) -> None:
    kind, sizes = variant
    folder, new = exported(kind, **sizes), histories(6, 3, 9)
    expected = teacher_forced(tiny_t5(kind, **sizes), *padded_batch, new)
    for garbage in ({}, dict(garbage=4), dict(garbage=2, scale=1e4)):
        actual = by_contract(padded_batch, new, folder / ENCODER, folder / DECODER, **garbage)
        assert actual.dtype == np.float32
        same_logits(actual, expected)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in KINDS])
def test_a_program_of_operations(tiny_t5, exported, name: str, padded_batch) -> None:
    """Of variants; of the kinds themselves, `test_conformance` does it."""
    kind, sizes = MODELS[name]
    backend = OrtNumpy(exported(kind, **sizes), settings=SessionSettings(threads=1))
    check_program(backend, tiny_t5(kind, **sizes), *padded_batch, 3, PROGRAM)


LONG_SOURCE = np.random.default_rng(3).integers(3, 300, (2, 200))
LONG_MASK = (np.arange(200) < np.array([[200], [170]])).astype(np.int64)


@pytest.mark.parametrize("name", ["deeper-decoder", "umt5", "short-reach"])
def test_distances_beyond_the_reach(tiny_t5, exported, name: str) -> None:
    kind, sizes = MODELS[name]
    new = histories(2, 2, 200)
    expected = teacher_forced(tiny_t5(kind, **sizes), LONG_SOURCE, LONG_MASK, new)
    same_logits(forced(exported(kind, **sizes), (LONG_SOURCE, LONG_MASK), new, [150, 151]), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_models_in_16_bits_and_in_training_become_fp32_without_dropout(tiny_t5, padded_batch, tmp_path, dtype) -> None:
    half = copy.deepcopy(tiny_t5(d_model=40, dropout_rate=0.5)).to(dtype).train()  # 40 ** -0.5 is far from a bfloat16
    half.encoder.eval()
    manifest = export_model(half, tmp_path / "half")
    assert {tensor.dtype for tensor in manifest.graphs[ENCODER].outputs} == {"float32"}
    new = histories(6, 2, 5)
    expected = teacher_forced(copy.deepcopy(half).float().eval(), *padded_batch, new)
    same_logits(forced(tmp_path / "half", padded_batch, new), expected)
    assert half.training and not half.encoder.training and half.shared.weight.dtype == dtype, "left as it was"


def test_encoder_and_decoder_with_embeddings_of_their_own(tiny_t5, padded_batch) -> None:
    model = copy.deepcopy(tiny_t5())
    model.decoder.embed_tokens = torch.nn.Embedding.from_pretrained(model.shared.weight.detach().roll(1, 0))
    new = histories(6, 1, 5)
    expected, weights = teacher_forced(model, *padded_batch, new), t5_weights(model)
    graphs = [build(weights).proto().SerializeToString() for build in (encoder_graph, decoder_graph)]
    same_logits(by_contract(padded_batch, new, *graphs), expected)


@pytest.mark.parametrize("kind", ["deeper-decoder", "gated-untied", "mt5", "umt5"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_logit_scale_is_the_models(tiny_t5, kind: str, tied: bool) -> None:
    model = tiny_t5(kind, tie_word_embeddings=tied)
    always = V5 and not hasattr(model.config, "scale_decoder_outputs")
    scaled = {"mt5": tied and not V5, "umt5": tied or always}.get(kind, tied)
    assert logit_scale(model) == (32**-0.5 if scaled else 1.0)
    # The rule is transformers': ones in place of the decoder's output, and no head.
    ones = torch.ones((1, 1, 32), dtype=torch.float64)
    decoded, start = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=ones), torch.zeros((1, 1)).long()
    with (
        torch.inference_mode(),
        patch.object(model.decoder, "forward", lambda *_, **__: decoded),
        patch.object(model.lm_head, "forward", lambda hidden: hidden),
    ):
        asked = model(encoder_outputs=(ones,), decoder_input_ids=start, return_dict=True).logits
    assert float(asked[0, 0, 0]) == logit_scale(model)


def test_buckets_are_those_of_transformers() -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = np.arange(-300, 301)
    for bidirectional in (True, False):
        for buckets in (4, 8, 16, 31, 32, 64):
            for reach in (20, 64, 100, 128, 256, 300):
                options = dict(bidirectional=bidirectional, max_distance=reach)
                expected = T5Attention._relative_position_bucket(
                    torch.as_tensor(distances), num_buckets=buckets, **options
                ).numpy()
                actual = relative_position_bucket(distances, buckets=buckets, **options)
                assert actual.dtype == np.int64 and len(np.unique(actual)) > buckets // 3
                np.testing.assert_array_equal(actual, expected, err_msg=f"{buckets=}, {options}")


# The contract, as it is read off the files


def declared(session: onnxruntime.InferenceSession) -> list[tuple[str, str, tuple[Any, ...]]]:
    dtypes = {"tensor(int64)": "int64", "tensor(float)": "float32"}
    return [(v.name, dtypes[v.type], tuple(v.shape)) for v in (*session.get_inputs(), *session.get_outputs())]


def test_the_files_keep_the_contract(tiny_t5, exported, variant) -> None:
    kind, sizes = variant
    folder, dims = exported(kind, **sizes), T5Dims.of(tiny_t5(kind, **sizes))
    manifest = read_manifest(folder)
    assert manifest.dims == dims
    for name, spec in ((ENCODER, encoder_spec(dims)), (DECODER, decoder_spec(dims))):
        (session,) = sessions(folder / name)
        assert declared(session) == [dataclasses.astuple(tensor) for tensor in (*spec.inputs, *spec.outputs)]
        assert manifest.graphs[name] == spec
        onnx.checker.check_model(str(folder / name), full_check=True)
        model = onnx.load(folder / name)
        assert model.producer_name == "t5accel" and model.ir_version == 9
        assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", manifest.opset)]
        assert {node.domain for node in model.graph.node} == {""}, "nothing but standard operators"


def test_the_contract_in_plain_words(exported) -> None:
    encoder, decoder = sessions(
        exported() / ENCODER, exported() / DECODER
    )  # 2 layers in the encoder, 3 in the decoder, 4 heads of 12
    layers = range(3)
    cross = [(f"cross_{x}_{i}", "float32", ("B", 4, "S", 12)) for i in layers for x in ("key", "value")]
    past = [(f"past_{x}_{i}", "float32", ("B", "K", 4, "P", 12)) for i in layers for x in ("key", "value")]
    present = [(f"present_{x}_{i}", "float32", ("B", "K", 4, "P + T", 12)) for i in layers for x in ("key", "value")]
    mask = ("attention_mask", "int64", ("B", "S"))
    assert declared(encoder) == [("input_ids", "int64", ("B", "S")), mask, *cross]
    assert declared(decoder) == [
        ("input_ids", "int64", ("B", "K", "T")), mask, ("past_mask", "int64", ("B", "K", "P")), *past, *cross,
        ("logits", "float32", ("B", "K", "T", 300)), *present,
    ]  # fmt: skip


# Pruned heads


PRUNED = {  # layer 0 keeps the table of biases for all
    "encoder.block.0.layer.0.SelfAttention": {3},
    "encoder.block.1.layer.0.SelfAttention": {0, 2},
    "decoder.block.0.layer.0.SelfAttention": {1},
    "decoder.block.2.layer.0.SelfAttention": {0, 1, 2},
    "decoder.block.1.layer.1.EncDecAttention": {0, 3},
}


@pytest.mark.parametrize("kind", ["deeper-decoder", "gated-untied", "umt5"])
def test_pruned_heads(tiny_t5, padded_batch, tmp_path, kind: str) -> None:
    pruned, silenced = pruned_and_silenced(tiny_t5(kind), PRUNED)
    dims = export_model(pruned, tmp_path / "pruned", check_logits=False).dims  # pruned by hand, torch cannot run it
    assert (dims.encoder_heads, dims.decoder_heads, dims.cross_heads) == ((3, 2), (3, 4, 1), (4, 2, 4))
    assert ("past_key_0", "float32", ("B", "K", 3, "P", 12)) in declared(*sessions(tmp_path / "pruned" / DECODER))
    new = histories(6, 3, 9)
    expected = teacher_forced(silenced, *padded_batch, new)
    same_logits(forced(tmp_path / "pruned", padded_batch, new, [3, 4]), expected)
    with pytest.raises(ParityError):
        same_logits(teacher_forced(tiny_t5(kind), *padded_batch, new), expected)
    assert greedy(OrtNumpy(tmp_path / "pruned"), *padded_batch, max_new_tokens=3).decoder_calls == 3


# What a model computes with and no graph reads


class Adapted(torch.nn.Linear):
    """A projection with a bottleneck beside it."""

    def __init__(self, like: torch.nn.Linear):
        super().__init__(like.in_features, like.out_features, bias=False)
        self.weight = like.weight
        self.down, self.up = torch.nn.Linear(like.in_features, 2), torch.nn.Linear(2, like.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.up(self.down(x))


def add_head_bias(model: Any) -> None:
    model.lm_head.bias = torch.nn.Parameter(torch.ones(300))


def add_adapter(model: Any) -> None:
    attention = model.encoder.block[0].layer[0].SelfAttention
    attention.q = Adapted(attention.q)


@pytest.mark.parametrize(
    "kind, change, name",
    [
        ("t5", add_head_bias, r"lm_head\.bias"), ("t5", add_adapter, r"q\.down\.bias and 3 more"),
        ("t5", lambda model: model.encoder.register_buffer("scale", torch.ones(1)), r"encoder\.scale"),
        ("bart", lambda model: model.add_module("calibration", torch.nn.Linear(2, 2)), r"calibration\.bias"),
    ],
)  # fmt: skip
def test_weights_that_no_graph_reads_are_refused_by_name(tiny_t5, tmp_path, kind: str, change, name: str) -> None:
    model = copy.deepcopy(tiny_t5()) if kind == "t5" else tiny_bart()
    change(model)
    with pytest.raises(NotT5Error, match=name):
        export_model(model, tmp_path / "export", check_logits=False)
    assert not (tmp_path / "export").exists()


def tiny_bart() -> Any:
    stacks = {f"{stack}_{name}": size for stack in ("encoder", "decoder")
              for name, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 8))}  # fmt: skip
    sizes = dict(d_model=8, vocab_size=32, max_position_embeddings=16, **stacks)
    return random_model(BEYOND_T5["bart"], sizes, seed=1)


def scale_the_head(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, logits: logits * 1.5)


def override_forward(model: Any) -> None:
    forward = model.encoder.forward
    model.encoder.forward = lambda *args, **kwargs: (lambda found: type(found)(-found[0]))(forward(*args, **kwargs))


@pytest.mark.parametrize("change", [scale_the_head, override_forward])
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_hooks_and_overridden_forwards_are_found_by_the_logits(tiny_t5, tmp_path, kind: str, change) -> None:
    model = copy.deepcopy(tiny_t5()) if kind == "t5" else tiny_bart()
    change(model if kind == "t5" or change is scale_the_head else model.model)
    with pytest.raises(ExportError, match="other logits than the model itself.*check_logits=False"):
        export_model(model, tmp_path / "export")
    assert not [*tmp_path.iterdir()] or [path.name for path in tmp_path.iterdir()] == [".export.lock"]
    assert export_model(model, tmp_path / "export", check_logits=False).files


def test_a_model_that_cannot_be_run_is_said_to(tiny_t5, tmp_path) -> None:
    model = copy.deepcopy(tiny_t5())
    model.encoder.forward = lambda *_, **__: 1 / 0
    with pytest.raises(ExportError, match="cannot be run.*division by zero"):
        export_model(model, tmp_path / "export")


def test_the_captured_steps_of_a_gpu_are_compared_with_the_model(tiny_t5) -> None:
    model = copy.deepcopy(tiny_t5())
    backend = TorchStatic(model)
    check_logits(model, backend_logits(backend))
    add_head_bias(model)
    with pytest.raises(ExportError, match="other logits"):
        check_logits(model, backend_logits(backend))


WRONG_HEADS: dict[str, Callable[[Any], Any]] = {  # three heads of 12, where the others have four
    "unnamed": lambda a: (prune_heads(a, {1}), setattr(a, "pruned_heads", set())),
    "named and still there": lambda a: setattr(a, "pruned_heads", {1}),
    "k": lambda a: setattr(a, "k", torch.nn.Linear(32, 36, bias=False)),
    "o": lambda a: setattr(a, "o", torch.nn.Linear(36, 32, bias=False)),
    "no multiple of d_kv": lambda a: prune_heads(a, {4}, d_kv=11),
}


@pytest.mark.parametrize("wrong", WRONG_HEADS)
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_wrong_heads_are_refused(tiny_t5, tmp_path, stack: str, wrong: str) -> None:
    model = copy.deepcopy(tiny_t5())
    WRONG_HEADS[wrong](getattr(model, stack).block[1].layer[0].SelfAttention)
    refused(lambda model: export_model(model, tmp_path / "wrong"), "model", model, match="heads", error=NotT5Error)
    assert not list(tmp_path.iterdir())


# Where the weights lie


def references(path: Path) -> dict[str, tuple[str, int, int]]:
    """By name the file, offset and length of a graph's external weights."""
    found = {}
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entry = {item.key: item.value for item in tensor.external_data}
            found[tensor.name] = entry["location"], int(entry["offset"]), int(entry["length"])
    return found


def size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["deeper-decoder", "gated-untied", "umt5"])
def test_external_weights_are_stored_once(tiny_t5, exported, padded_batch, kind: str) -> None:
    sizes = dict(vocab_size=3000)
    inside, outside = exported(kind, **sizes), exported(kind, **sizes, external_threshold_bytes=0)
    model = tiny_t5(kind, **sizes)
    assert not (inside / WEIGHTS).exists() and read_manifest(outside).files.keys() >= {ENCODER, DECODER, WEIGHTS}
    encoder, decoder = references(outside / ENCODER), references(outside / DECODER)
    assert not references(inside / ENCODER) and not references(inside / DECODER)
    assert encoder.keys() & decoder.keys() == {"shared.weight"} and encoder["shared.weight"] == decoder["shared.weight"]

    everything = {**encoder, **decoder}
    assert {location for location, _, _ in everything.values()} == {WEIGHTS}
    data, end = (outside / WEIGHTS).read_bytes(), 0
    for name, (_, offset, length) in sorted(everything.items(), key=lambda item: item[1][1]):
        assert offset % 4096 == 0 and offset - end < 4096, "pages that can be mapped, and no gaps between them"
        end = offset + length
        if not name.endswith((".by_distance", "final_layer_norm.weight")):
            weight = model.get_parameter(name.removesuffix(".T")).detach().numpy()
            assert data[offset:end] == (weight.T if name.endswith(".T") else weight).tobytes(), name
    assert len(data) == -(-end // 4096) * 4096
    large = {name for name, weight in model.named_parameters() if weight.nbytes >= 4096 and "bias" not in name}
    assert {name.removesuffix(".T") for name in everything if "by_distance" not in name} == large
    assert size_bytes(outside) < size_bytes(inside) - 3000 * 32 * 4 // 2

    new = histories(6, 3, 9)
    logits = [forced(folder, padded_batch, new, [3, 4]) for folder in (inside, outside)]
    np.testing.assert_array_equal(*logits)
    same_logits(logits[1], teacher_forced(model, *padded_batch, new))
    for name in (ENCODER, DECODER):
        onnx.checker.check_model(str(outside / name), full_check=True)


def test_the_threshold_is_the_size_of_the_larger_graph(tiny_t5, tmp_path) -> None:
    weights = t5_weights(tiny_t5())
    largest = max(graph.size_bytes for graph in (encoder_graph(weights), decoder_graph(weights)))
    at, below = (export_model(tiny_t5(), tmp_path / str(t), external_threshold_bytes=t) for t in (largest, largest - 1))
    assert WEIGHTS not in at.files and WEIGHTS in below.files and at.source == below.source


# Silence


def test_nothing_is_said_unasked(tiny_t5, padded_batch, tmp_path, capfd) -> None:
    with quiet():
        export_model(tiny_t5("umt5"), tmp_path / "tiny")
        export_model(tiny_t5("umt5"), tmp_path / "tiny")
        export_model(tiny_t5("umt5"), tmp_path / "outside", external_threshold_bytes=0)
        for folder in (tmp_path / "tiny", tmp_path / "outside"):
            forced(folder, padded_batch, histories(6, 1, 5))
    assert capfd.readouterr() == ("", "")


def test_the_bundled_model_and_its_tokenizer(mini, tmp_path, capfd) -> None:
    model, tokenizer = mini
    with quiet():
        by_name = export_model("mini", tmp_path / "by name")
        tokenizer(["a long text", "a"], padding=True, truncation=True, max_length=2)  # leaves no trace
        by_value = export_model(model, tmp_path / "by value", tokenizer=tokenizer, name="mini")
    assert capfd.readouterr() == ("", "")
    assert by_name == by_value and by_name.source["name"] == "mini"
    assert {"tokenizer.json", "tokenizer_config.json"} <= by_name.files.keys()
    with quiet():
        config = transformers.AutoConfig.from_pretrained(tmp_path / "by name")
        loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "by name")
        generation = transformers.GenerationConfig.from_pretrained(tmp_path / "by name")
    assert T5Dims.of(transformers.T5ForConditionalGeneration(config)) == by_name.dims
    assert generation.decoder_start_token_id == by_name.tokens["decoder_start_token_id"] == 0
    text = "translate English to German: The house is small."
    assert loaded(text).input_ids == tokenizer(text).input_ids


def test_settings_of_published_models_neither_warn_nor_stop_it(tiny_t5, tmp_path, capfd) -> None:
    model = copy.deepcopy(tiny_t5())
    model.config.num_beams = 4  # belongs into the other file: transformers 4 warns of it and 5 refuses to save it
    model.generation_config.temperature = 0.5  # without do_sample: both refuse to save it
    with quiet():
        manifest = export_model(model, tmp_path / "x")
    assert capfd.readouterr() == ("", "")
    assert {"config.json", "generation_config.json"} <= manifest.files.keys()
    assert json.loads((tmp_path / "x" / "generation_config.json").read_text())["temperature"] == 0.5


def test_progress_goes_to_standard_error(tiny_t5, tmp_path, monkeypatch, capfd) -> None:
    with quiet():
        export_model(tiny_t5(), tmp_path / "file", name="tiny", progress=True)
        assert capfd.readouterr() == ("", ""), "a bar is for a terminal"
        monkeypatch.setattr("t5accel.machine.watches_stderr", lambda: True)
        export_model(tiny_t5(), tmp_path / "x", name="tiny", progress=True, external_threshold_bytes=0)
    out, err = capfd.readouterr()
    assert out == "" and "exporting tiny" in err and "100%" in err


# What cannot be exported


def test_what_is_no_t5_and_wrong_options(tiny_t5, tmp_path, offline) -> None:
    t5, config = tiny_t5(), tiny_t5().config
    bert = transformers.BertConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)

    def call(model: Any = t5, **options: Any) -> Any:
        return export_model(model, tmp_path / "new" / "folder", **options)

    def configured(name: str, value: Any) -> Any:
        model = copy.deepcopy(t5)
        setattr(model.config, name, value)
        setattr(model.generation_config, name, value)
        return model

    for model, error, match in (
        (transformers.BertModel(bert), NotT5Error, "bert"),
        (torch.nn.Linear(2, 2), NotT5Error, "Linear"),
        (transformers.T5EncoderModel(copy.deepcopy(config)), NotT5Error, "T5EncoderModel"),
        (transformers.T5Model(copy.deepcopy(config)), NotT5Error, "T5Model"),
        (None, InputError, "None"),
        (copy.deepcopy(t5).to("meta"), InputError, "meta"),
        (configured("dense_act_fn", "tanh"), NotT5Error, "tanh"),
        (configured("eos_token_id", None), InputError, "eos_token_id"),
        (configured("decoder_start_token_id", None), InputError, "start_token"),
        ("no such model", UnknownModelError, "no such model"),
        ("", UnknownModelError, "non-empty"),
        ("google-t5/t5-small", ModelUnavailableError, "t5-small"),
    ):
        refused(call, "model", model, match=match, error=error)
    refused(call, "external_threshold_bytes", -1, LARGEST_INSIDE + 1, "0")
    refused(call, "name", 5, b"t5")
    refused(call, "tokenizer", "mini")
    assert not list(tmp_path.iterdir()), "nothing is written, not even the folder above"


# Which model it is


def test_the_hash_is_that_of_the_values(tiny_t5, tmp_path) -> None:
    def hash_of(model: Any) -> str:
        return source_hash(model, t5_weights(model))

    model = tiny_t5()
    model.save_pretrained(tmp_path)
    same = [copy.deepcopy(model), copy.deepcopy(model).double(), type(model).from_pretrained(tmp_path)]
    assert {hash_of(other) for other in same} == {hash_of(model)}
    others = [tiny_t5(seed=2), tiny_t5(eos_token_id=5), tiny_t5(layer_norm_epsilon=1e-5), tiny_t5("gated-untied")]
    others += [tiny_t5(relative_attention_max_distance=64), copy.deepcopy(model)]
    others[-1].decoder.block[2].layer[2].DenseReluDense.wo.weight.data[5, 7] += 1e-6
    hashes = {hash_of(other) for other in others}
    assert len(hashes) == len(others) and hash_of(model) not in hashes


# Files that are read


NOT_OBJECTS: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: None,
    **({"a named pipe": os.mkfifo} if hasattr(os, "mkfifo") else {}),
    "a folder": Path.mkdir,
    "nested too deeply": lambda path: path.write_text("[" * 100_000 + "]" * 100_000),
    "no JSON": lambda path: path.write_bytes(b'{"a": \xff}'),
    "null": lambda path: path.write_text("null"),
    "a number": lambda path: path.write_text("NaN"),
    "at most": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
}


@pytest.mark.parametrize("kind", NOT_OBJECTS)
def test_what_holds_no_json_object_is_refused_in_a_sentence(tmp_path, monkeypatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's name must be short
    NOT_OBJECTS[kind](Path("config.json"))
    with pytest.raises(ExportError, match=rf"^config\.json .*{kind}.* Export again\.$"):
        read_json_object(Path("config.json"), ExportError, "Export again.")


def test_a_model_with_tokens_outside_its_vocabulary_is_not_exported(tiny_t5, tmp_path) -> None:
    model = copy.deepcopy(tiny_t5())
    model.generation_config.forced_eos_token_id = 10**9
    with pytest.raises(ExportError, match="forced_eos_token_id is 1000000000"):
        export_model(model, tmp_path / "x")
    assert not (tmp_path / "x").exists()
