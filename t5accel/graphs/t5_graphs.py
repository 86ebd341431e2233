"""T5's encoder and its decoder step as ONNX graphs, built from the weights of a checkpoint, operator by operator.

Nothing is traced: no exporter has to understand transformers' code, and the graphs are those that we mean. The encoder
ends in the keys and values of cross-attention; the decoder takes one step. Shapes are those of `contract`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from t5accel.checkpoints import T5Dims
from t5accel.errors import NotT5Error
from t5accel.graphs.builder import GraphBuilder
from t5accel.graphs.contract import GraphSpec, decoder_spec, encoder_spec

LOWEST = np.finfo(np.float32).min  # added to a score it makes the softmax ignore the position


@dataclass(frozen=True)
class T5Weights:
    """What the graphs are built from.

    Attributes:
        arrays: by transformers' names (``decoder.block.0.layer.1.EncDecAttention.q.weight`` …), fp32.
        dims: the sizes.
        activation: ``"relu"``, ``"gelu_new"``, ``"gelu"`` or ``"silu"``.
        norm_epsilon: of every layer norm.
        buckets, max_distance: of the relative position biases.
        logit_scale: what the decoder's output is multiplied by before the head.
        pruned_heads: for decoder and encoder layers that lost heads, which: ``{"decoder.0": (1, 5)}``.
    """

    arrays: Mapping[str, np.ndarray]
    dims: T5Dims
    activation: str
    norm_epsilon: float
    buckets: int
    max_distance: int
    logit_scale: float
    pruned_heads: Mapping[str, tuple[int, ...]]


def relative_position_bucket(
    distance: np.ndarray, *, bidirectional: bool, buckets: int, max_distance: int
) -> np.ndarray:
    """T5's bucket for each distance (key position minus query position), any shape, int64 in 0 … buckets - 1.

    Half of the buckets are one distance each, the others grow with its logarithm up to ``max_distance``, and all that
    is farther shares the last one (Raffel et al. 2020, section 2.1).

    >>> distances = np.array([0, -3, -20, -500])
    >>> relative_position_bucket(distances, bidirectional=False, buckets=32, max_distance=128).tolist()
    [0, 3, 17, 31]
    """
    side = np.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        side, distance = (distance > 0) * buckets, np.abs(distance)
    else:
        distance = -np.minimum(distance, 0)
    exact = buckets // 2
    # In fp32, as transformers computes it: in fp64 a distance on the border of two buckets may fall into the other.
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact)) / np.float32(
        math.log(max_distance / exact)
    )
    far = np.minimum(exact + (ratio * np.float32(buckets - exact)).astype(np.int64), buckets - 1)
    return side + np.where(distance < exact, distance, far)


def encoder_graph(weights: T5Weights) -> GraphBuilder:
    """``input_ids``, ``attention_mask`` (B, S) -> ``cross_key_i``, ``cross_value_i`` (B, H_i, S, d_kv)."""
    dims = weights.dims
    graph, spec = _declare("encoder", encoder_spec(dims))
    part = _Part(graph, weights, "encoder")
    hidden = part.embed()
    positions = graph.op("Range", graph.constant(0), part.size("input_ids", 1), graph.constant(1))
    padding = part.padding_bias("attention_mask")
    bias_of = part.position_biases(positions, positions, lambda bias: graph.op("Add", bias, padding))
    for layer in range(dims.encoder_layers):
        prefix = f"encoder.block.{layer}.layer.0"
        normed, heads = part.norm(hidden, f"{prefix}.layer_norm.weight"), dims.encoder_heads[layer]
        query, key, value = (part.heads(normed, f"{prefix}.SelfAttention.{name}.weight", heads) for name in "qkv")
        merged = part.merge_heads(part.attend(query, key, value, bias_of[layer]), heads)
        hidden = graph.op("Add", hidden, part.output(merged, f"{prefix}.SelfAttention.o.weight", heads))
        hidden = part.feed_forward(hidden, f"encoder.block.{layer}.layer.1")
    hidden = part.norm(hidden, "encoder.final_layer_norm.weight")
    for layer, heads in enumerate(dims.cross_heads):
        for name in ("key", "value"):
            projection = f"decoder.block.{layer}.layer.1.EncDecAttention.{name[0]}.weight"
            part.heads(hidden, projection, heads, output=f"cross_{name}_{layer}")
    return _finish(graph, spec)


def decoder_graph(weights: T5Weights) -> GraphBuilder:
    """One step: new tokens, masks, the history and the cross tensors -> logits and the longer history.

    The K rows of a source share its cross tensors: in cross-attention K and T fold into one axis of queries.
    """
    dims = weights.dims
    graph, spec = _declare("decoder", decoder_spec(dims))
    part = _Part(graph, weights, "decoder")
    hidden = part.embed()  # (B, K, T, d_model)

    past, new = part.size("past_mask", 2), part.size("input_ids", 2)
    total, zero, one = graph.op("Add", past, new), graph.constant(0), graph.constant(1)
    queries, keys = graph.op("Range", past, total, one), graph.op("Range", zero, total, one)
    # Garbage in front of a shorter history is masked here, the future by the last entry of the tables of biases.
    own = graph.op("ConstantOfShape", graph.op("Shape", "input_ids"), value=_scalar_tensor(1))
    history = graph.op("Concat", "past_mask", own, axis=2)
    history_bias = part.padding_bias(history, axes=(2, 3))  # (B, K, 1, 1, P + T)
    bias_of = part.position_biases(queries, keys, lambda bias: graph.op("Add", bias, history_bias))
    source_bias = part.padding_bias("attention_mask")

    rows = graph.op("Shape", "input_ids", start=1, end=2)
    for layer in range(dims.decoder_layers):
        prefix = f"decoder.block.{layer}.layer.0"
        normed, heads = part.norm(hidden, f"{prefix}.layer_norm.weight"), dims.decoder_heads[layer]
        query, key, value = (
            part.heads(normed, f"{prefix}.SelfAttention.{name}.weight", heads, rows=True) for name in "qkv"
        )
        key = graph.op("Concat", f"past_key_{layer}", key, axis=3, output=f"present_key_{layer}")
        value = graph.op("Concat", f"past_value_{layer}", value, axis=3, output=f"present_value_{layer}")
        merged = part.merge_heads(part.attend(query, key, value, bias_of[layer], rows=True), heads, rows=True)
        hidden = graph.op("Add", hidden, part.output(merged, f"{prefix}.SelfAttention.o.weight", heads))

        prefix, heads = f"decoder.block.{layer}.layer.1", dims.cross_heads[layer]
        normed = part.norm(hidden, f"{prefix}.layer_norm.weight")
        query = part.heads(normed, f"{prefix}.EncDecAttention.q.weight", heads)  # (B, H, K * T, d)
        attended = part.attend(query, f"cross_key_{layer}", f"cross_value_{layer}", source_bias)
        shape = graph.op("Concat", graph.constant([0]), rows, graph.constant([-1, heads * dims.d_kv]), axis=0)
        merged = graph.op("Reshape", graph.op("Transpose", attended, perm=[0, 2, 1, 3]), shape)
        hidden = graph.op("Add", hidden, part.output(merged, f"{prefix}.EncDecAttention.o.weight", heads))
        hidden = part.feed_forward(hidden, f"decoder.block.{layer}.layer.2")
    final = "decoder.final_layer_norm.weight"
    hidden = part.norm(hidden, final, scale=weights.logit_scale)
    if dims.tied:  # the embedding serves twice and is stored once
        head = graph.op("Transpose", part.weight("shared.weight"), perm=[1, 0])
        graph.op("MatMul", hidden, head, output="logits")
    else:
        part.linear(hidden, "lm_head.weight", output="logits")
    return _finish(graph, spec)


def _scalar_tensor(value: int) -> Any:
    from onnx import numpy_helper

    return numpy_helper.from_array(np.array([value], dtype=np.int64))


def _declare(name: str, spec: GraphSpec) -> tuple[GraphBuilder, GraphSpec]:
    graph = GraphBuilder(name)
    for tensor in spec.inputs:
        graph.input(tensor.name, tensor.dtype, tensor.shape)
    return graph, spec


def _finish(graph: GraphBuilder, spec: GraphSpec) -> GraphBuilder:
    for tensor in spec.outputs:
        graph.output(tensor.name, tensor.dtype, tensor.shape)
    return graph


class _Part:
    """The layers of the encoder or the decoder, as nodes of one graph."""

    def __init__(self, graph: GraphBuilder, weights: T5Weights, stack: str):
        self.graph, self.weights, self.stack = graph, weights, stack

    def array(self, name: str) -> np.ndarray:
        if name not in self.weights.arrays:
            raise NotT5Error(f"There is no weight {name}: wrapped models have to be unwrapped, adapters merged first.")
        return self.weights.arrays[name]

    def require_heads(self, name: str, heads: int, axis: int) -> None:
        width, d_kv = self.array(name).shape[axis], self.weights.dims.d_kv
        if width != heads * d_kv:
            raise NotT5Error(f"{name} is {width} wide; {heads} heads of d_kv = {d_kv} are {heads * d_kv}.")

    def weight(self, name: str) -> str:
        return self.graph.weight(name, self.array(name))

    def embed(self) -> str:
        """``input_ids`` (…) -> (…, d_model). Encoder and decoder share the table, unless they were untied."""
        own = f"{self.stack}.embed_tokens.weight"
        return self.graph.op("Gather", self.weight(own if own in self.weights.arrays else "shared.weight"), "input_ids")

    def size(self, tensor: str, axis: int) -> str:
        """One dimension as a number (a tensor of rank 0)."""
        return self.graph.op("Squeeze", self.graph.op("Shape", tensor, start=axis, end=axis + 1))

    def output(self, merged: str, name: str, heads: int) -> str:
        """What the heads found, (…, H * d_kv) -> (…, d_model)."""
        self.require_heads(name, heads, axis=1)
        return self.linear(merged, name)

    def linear(self, hidden: str, name: str, output: str | None = None) -> str:
        """(…, in) -> (…, out): torch keeps a Linear's weight as (out, in), a product needs it as (in, out)."""
        transposed = self.graph.weight(f"{name}.T", self.array(name).T)
        return self.graph.op("MatMul", hidden, transposed, output=output)

    def norm(self, hidden: str, name: str, scale: float = 1.0) -> str:
        """x / rms(x) * weight, in the form that ONNX Runtime fuses into one node."""
        graph = self.graph
        square = graph.op("Pow", hidden, graph.constant(np.float32(2)))
        mean = graph.op("ReduceMean", square, graph.constant([-1]), keepdims=1)
        root = graph.op("Sqrt", graph.op("Add", mean, graph.constant(np.float32(self.weights.norm_epsilon))))
        weight = graph.weight(name, self.array(name) * np.float32(scale))
        return graph.op("Mul", graph.op("Div", hidden, root), weight)

    def feed_forward(self, hidden: str, prefix: str) -> str:
        graph, dense = self.graph, f"{prefix}.DenseReluDense"
        normed = self.norm(hidden, f"{prefix}.layer_norm.weight")
        if self.weights.dims.gated:
            inner = self.activation(self.linear(normed, f"{dense}.wi_0.weight"))
            inner = graph.op("Mul", inner, self.linear(normed, f"{dense}.wi_1.weight"))
        else:
            inner = self.activation(self.linear(normed, f"{dense}.wi.weight"))
        return graph.op("Add", hidden, self.linear(inner, f"{dense}.wo.weight"))

    def activation(self, inner: str) -> str:
        graph, kind = self.graph, self.weights.activation
        if kind == "relu":
            return graph.op("Relu", inner)
        if kind in ("gelu", "gelu_new"):
            return graph.op("Gelu", inner, approximate="tanh" if kind == "gelu_new" else "none")
        if kind == "silu":
            return graph.op("Mul", inner, graph.op("Sigmoid", inner))
        raise NotT5Error(f"The activation is {kind!r}; there are relu, gelu, gelu_new and silu.")

    def heads(self, hidden: str, name: str, heads: int, *, rows: bool = False, output: str | None = None) -> str:
        """Project (B, …, d_model) to (B, H, n, d), all between folded into n; with ``rows`` to (B, K, H, T, d)."""
        self.require_heads(name, heads, axis=0)
        d_kv = self.weights.dims.d_kv
        shape = [0, 0, 0, heads, d_kv] if rows else [0, -1, heads, d_kv]
        split = self.graph.op("Reshape", self.linear(hidden, name), self.graph.constant(shape))
        return self.graph.op("Transpose", split, perm=[0, 1, 3, 2, 4] if rows else [0, 2, 1, 3], output=output)

    def merge_heads(self, attended: str, heads: int, *, rows: bool = False) -> str:
        """(B, H, n, d) -> (B, n, H * d); with ``rows``: (B, K, H, T, d) -> (B, K, T, H * d)."""
        together = self.graph.op("Transpose", attended, perm=[0, 1, 3, 2, 4] if rows else [0, 2, 1, 3])
        shape = [0] * (3 if rows else 2) + [heads * self.weights.dims.d_kv]
        return self.graph.op("Reshape", together, self.graph.constant(shape))

    def attend(self, query: str, key: str, value: str, bias: str, *, rows: bool = False) -> str:
        """softmax(q k' + bias) v. T5 does not divide by the root of d: its initialisation took that in."""
        graph = self.graph
        flipped = graph.op("Transpose", key, perm=[0, 1, 2, 4, 3] if rows else [0, 1, 3, 2])
        scores = graph.op("Add", graph.op("MatMul", query, flipped), bias)
        return graph.op("MatMul", graph.op("Softmax", scores, axis=-1), value)

    def padding_bias(self, mask: str, axes: tuple[int, ...] = (1, 2)) -> str:
        """A mask of 1 and 0 as a bias of 0 and the lowest number, with new axes of size 1 at ``axes``."""
        graph = self.graph
        padded = graph.op("Cast", graph.op("Sub", graph.constant(1), mask), to=1)
        return graph.op("Unsqueeze", graph.op("Mul", padded, graph.constant(LOWEST)), graph.constant(list(axes)))

    def position_biases(self, queries: str, keys: str, finish: Callable[[str], str]) -> list[str]:
        """For each layer the name of its biases (…, H, n, m), looked up by distance once where layers share them.

        T5 has one table, in its first layer; a pruned layer takes the rows of the heads that it kept. UMT5 has a table
        in every layer. The causal tables have one more entry, for the future: the lowest number.
        """
        graph, weights = self.graph, self.weights
        dims, reach, causal = weights.dims, weights.max_distance, self.stack == "decoder"
        distances = np.arange(-reach, (0 if causal else reach) + 1)
        bucket = relative_position_bucket(
            distances, bidirectional=not causal, buckets=weights.buckets, max_distance=reach
        )
        axis_0, axis_1 = graph.constant([0]), graph.constant([1])
        distance = graph.op("Sub", graph.op("Unsqueeze", keys, axis_0), graph.op("Unsqueeze", queries, axis_1))
        nearest = graph.op("Clip", distance, graph.constant(-reach), graph.constant(1 if causal else reach))
        index = graph.op("Add", nearest, graph.constant(reach))
        done: dict[str, str] = {}
        biases, source = [], ""
        for layer, heads in enumerate(dims.decoder_heads if causal else dims.encoder_heads):
            own = f"{self.stack}.block.{layer}.layer.0.SelfAttention.relative_attention_bias.weight"
            source = own if own in weights.arrays else source
            pruned = weights.pruned_heads.get(f"{self.stack}.{layer}", ())
            table = self.array(source)[bucket].T  # (H, distances)
            kept = [head for head in range(len(table)) if head not in pruned]
            if len(kept) != heads:
                raise NotT5Error(
                    f"{self.stack} layer {layer} has {heads} heads and {len(kept)} position biases: name the others "
                    "as its pruned_heads."
                )
            name = f"{source}.by_distance{kept if pruned else ''}"
            if name not in done:
                table = table[kept]
                if causal:
                    table = np.concatenate([table, np.full((heads, 1), LOWEST)], axis=1)
                looked_up = graph.op("Gather", graph.weight(name, table), index, axis=1)
                done[name] = finish(looked_up)
            biases.append(done[name])
        return biases
