"""The graphs of older layouts. In them rows are the batch, and each row has its own copy of what its source brings.

Shapes: R = B * K rows, S source positions, T new and P past decoder positions, V vocabulary entries, H_i heads of layer
i. The encoder runs on B sources; who starts K rows of each repeats its output, as transformers' ``generate`` does.

The decoders of those projects had no mask of their past, for histories of unequal length, as checking a draft leaves
them, were not foreseen. These have one, so that every layout can do what a `Backend` must.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from onnx import numpy_helper

from t5accel.graphs.builder import GraphBuilder
from t5accel.graphs.contract import DECODER, ENCODER, GraphSpec, TensorSpec, kv_names
from t5accel.graphs.layers import T5Layers
from t5accel.graphs.weights import T5Weights
from t5accel.models.sizes import T5Dims

WHOLE, LM_HEAD = "model.onnx", "lm_head.onnx"
INIT_DECODER, MERGED_DECODER = "init_decoder.onnx", "merged_decoder.onnx"


def encoder_states_graph(weights: T5Weights) -> GraphBuilder:
    """``input_ids``, ``attention_mask`` (B, S) -> ``last_hidden_state`` (B, S, d_model)."""
    tokens = ("B", "S")
    graph = _declared(
        "encoder",
        (_ints("input_ids", *tokens), _ints("attention_mask", *tokens)),
        (_floats("last_hidden_state", *tokens, weights.dims.d_model),),
    )
    T5Layers(graph, weights, "encoder").encoder(output="last_hidden_state")
    return graph


def lm_head_graph(weights: T5Weights) -> GraphBuilder:
    """``hidden_states`` (R, T, d_model), as transformers' decoder gives them -> ``logits`` (R, T, V).

    >>> from t5accel.graphs.export import t5_weights
    >>> from t5accel.models.random_init import random_t5
    >>> model = random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    >>> [node.op_type for node in lm_head_graph(t5_weights(model)).proto().graph.node]
    ['Mul', 'Transpose', 'MatMul']
    """
    dims = weights.dims
    graph = _declared("lm_head", (_floats("hidden_states", "R", "T", dims.d_model),), (_logits(dims),))
    scaled = graph.op("Mul", "hidden_states", graph.constant(np.float32(weights.logit_scale)))
    T5Layers(graph, weights, "decoder").head(scaled, output="logits")
    return graph


def init_decoder_graph(weights: T5Weights) -> GraphBuilder:
    """The first step: there is no history, and the keys and values of cross-attention are computed.

    ``input_ids`` (R, T), ``attention_mask`` (R, S), ``encoder_hidden_states`` (R, S, d_model) -> ``logits`` (R, T, V),
    ``present_key_i``, ``present_value_i`` (R, H_i, T, d_kv) and ``present_cross_key_i``, ``present_cross_value_i``
    (R, H_i, S, d_kv).
    """
    dims = weights.dims
    outputs = _step_outputs(dims, "T", cross=True)
    graph = _declared("init_decoder", (*_step_inputs(), _encoded(dims)), outputs)
    _first_step(graph, weights)
    return graph


def later_decoder_graph(weights: T5Weights) -> GraphBuilder:
    """A later step: the history and the cross tensors come in; the latter do not go out again.

    ``input_ids`` (R, T), ``attention_mask`` (R, S), ``past_mask`` (R, P), ``past_key_i``, ``past_value_i``
    (R, H_i, P, d_kv), ``cross_key_i``, ``cross_value_i`` (R, H_i, S, d_kv) -> ``logits`` (R, T, V), ``present_key_i``,
    ``present_value_i`` (R, H_i, P + T, d_kv).
    """
    dims = weights.dims
    graph = _declared("decoder", (*_step_inputs(), *_past_inputs(dims)), _step_outputs(dims, "P + T"))
    _later_step(graph, weights)
    return graph


def merged_decoder_graph(weights: T5Weights) -> GraphBuilder:
    """Both decoders behind an ``If`` on ``use_cache_branch`` (1,) bool; they read the same weights, which stand once.

    All inputs of both are asked for at every step: in the first one, give histories and cross tensors of no positions.
    As in optimum's ``decoder_model_merged`` the later steps give cross tensors of no rows: to hand on those that came
    in, a branch would have to copy them.
    """
    dims, chosen = weights.dims, TensorSpec("use_cache_branch", "bool", (1,))
    outputs = _step_outputs(dims, "P + T", cross=True)
    graph = _declared("merged_decoder", (*_step_inputs(), _encoded(dims), *_past_inputs(dims), chosen), outputs)
    first, later = graph.branch("first_step"), graph.branch("later_step")
    for branch in (first, later):
        for tensor in outputs:
            branch.output(f"{branch.name}_{tensor.name}", tensor.dtype, tensor.shape)
    _first_step(first, weights, "first_step_")
    _later_step(later, weights, "later_step_")
    for name, heads in zip(
        kv_names("later_step_present_cross", dims.decoder_layers), _twice(dims.cross_heads), strict=True
    ):
        none = np.zeros((0, heads, 1, dims.d_kv), dtype=np.float32)
        later.op("Constant", output=name, value=numpy_helper.from_array(none))
    graph.if_else("use_cache_branch", later, first, [tensor.name for tensor in outputs])
    return graph


def whole_graph(weights: T5Weights) -> GraphBuilder:
    """The complete model in one graph, without a cache: every step runs encoder and decoder over all tokens again.

    ``input_ids``, ``attention_mask`` (R, S), ``decoder_input_ids``, ``decoder_attention_mask`` (R, P) -> ``logits``
    (R, P, V).
    """
    inputs = [
        _ints(prefix + name, "R", positions)
        for prefix, positions in (("", "S"), ("decoder_", "P"))
        for name in ("input_ids", "attention_mask")
    ]
    graph = _declared("t5", inputs, (_floats("logits", "R", "P", weights.dims.vocab_size),))
    layers = T5Layers(graph, weights, "decoder")
    layers.cross_keys_and_values(T5Layers(graph, weights, "encoder").encoder(), "cross")
    hidden = layers.embed("decoder_input_ids")
    bias_of = layers.biases.full("decoder_input_ids", "decoder_attention_mask")
    hidden = layers.decoder(hidden, bias_of, layers.biases.mask_bias("attention_mask"), cross="cross")
    layers.head(hidden, output="logits")
    return graph


# For each layout its files, and what makes the graph in each.
LAYOUTS: Mapping[str, Mapping[str, Callable[[T5Weights], GraphBuilder]]] = {
    "whole": {WHOLE: whole_graph},
    "onnxt5": {ENCODER: encoder_states_graph, LM_HEAD: lm_head_graph},
    "fastt5": {ENCODER: encoder_states_graph, INIT_DECODER: init_decoder_graph, DECODER: later_decoder_graph},
    "merged": {ENCODER: encoder_states_graph, MERGED_DECODER: merged_decoder_graph},
}


def _first_step(graph: GraphBuilder, weights: T5Weights, prefix: str = "") -> None:
    """The nodes of the first step; the names of its outputs get ``prefix``."""
    layers = T5Layers(graph, weights, "decoder")
    layers.cross_keys_and_values("encoder_hidden_states", f"{prefix}present_cross")
    hidden = layers.decoder(
        layers.embed(), layers.biases.full("input_ids"), layers.biases.mask_bias("attention_mask"),
        cross=f"{prefix}present_cross", present=f"{prefix}present",
    )  # fmt: skip
    layers.head(hidden, output=f"{prefix}logits")


def _later_step(graph: GraphBuilder, weights: T5Weights, prefix: str = "") -> None:
    layers = T5Layers(graph, weights, "decoder")
    hidden = layers.decoder(
        layers.embed(), layers.biases.with_past(), layers.biases.mask_bias("attention_mask"),
        cross="cross", past="past", present=f"{prefix}present",
    )  # fmt: skip
    layers.head(hidden, output=f"{prefix}logits")


def _declared(name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> GraphBuilder:
    graph = GraphBuilder(name)
    graph.declare(GraphSpec(tuple(inputs), tuple(outputs)))
    return graph


def _ints(name: str, *shape: str) -> TensorSpec:
    return TensorSpec(name, "int64", shape)


def _floats(name: str, *shape: str | int) -> TensorSpec:
    return TensorSpec(name, "float32", shape)


def _step_inputs() -> tuple[TensorSpec, ...]:
    return _ints("input_ids", "R", "T"), _ints("attention_mask", "R", "S")


def _encoded(dims: T5Dims) -> TensorSpec:
    return _floats("encoder_hidden_states", "R", "S", dims.d_model)


def _logits(dims: T5Dims) -> TensorSpec:
    return _floats("logits", "R", "T", dims.vocab_size)


def _past_inputs(dims: T5Dims) -> tuple[TensorSpec, ...]:
    past = _keys_and_values(dims, "past", dims.decoder_heads, "P")
    return _ints("past_mask", "R", "P"), *past, *_keys_and_values(dims, "cross", dims.cross_heads, "S")


def _step_outputs(dims: T5Dims, length: str, *, cross: bool = False) -> tuple[TensorSpec, ...]:
    present = _keys_and_values(dims, "present", dims.decoder_heads, length)
    computed = _keys_and_values(dims, "present_cross", dims.cross_heads, "S") if cross else ()
    return _logits(dims), *present, *computed


def _keys_and_values(dims: T5Dims, prefix: str, heads: Sequence[int], length: str) -> tuple[TensorSpec, ...]:
    by_name = zip(kv_names(prefix, len(heads)), _twice(heads), strict=True)
    return tuple(_floats(name, "R", count, length, dims.d_kv) for name, count in by_name)


def _twice(heads: Sequence[int]) -> list[int]:
    """For keys and for values."""
    return [count for count in heads for _ in range(2)]
