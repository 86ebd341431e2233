"""Encoder and decoder step as ONNX graphs, built node by node from a checkpoint's weights, not traced.

Methods take and return names of values. Shapes: B sources, K rows per source, S source positions, T new and P past
decoder positions, H heads. Decoder rows have their own axis, (B, K, T, …), or are the batch, (R, T, …), R = B * K.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import TensorProto, numpy_helper

from t5accel.errors import NotT5Error
from t5accel.graphs.builder import GraphBuilder
from t5accel.graphs.contract import GraphSpec, decoder_spec, encoder_only_spec, encoder_spec
from t5accel.graphs.weights import T5Weights
from t5accel.models.t5_math import relative_position_bucket

LOWEST = np.finfo(np.float32).min  # added to a score, it makes the softmax ignore the position


def mask_with_new(graph: GraphBuilder, axis: int) -> str:
    """``past_mask`` extended along ``axis`` by ones for the new tokens: (…, P + T)."""
    ones = numpy_helper.from_array(np.array([1], dtype=np.int64))
    own = graph.op("ConstantOfShape", graph.op("Shape", "input_ids"), value=ones)
    return graph.op("Concat", "past_mask", own, axis=axis)


class Positions:
    """Absolute position ids as nodes; ``None`` where positions are relative, as T5's are."""

    # A history shorter than its neighbours' is padded in front and masked, so a token's column says nothing about its
    # position. The mask does: a new token's position is the number of real tokens before it.

    def __init__(self, graph: GraphBuilder, weights: T5Weights):
        self.graph, self.weights = graph, weights
        self.family, self.pad = weights.family, weights.pad_token_id
        self.first = self.family.first_position(self.pad)

    def source(self) -> str | None:
        """Positions of ``input_ids`` (B, S): (1, S), or (B, S) where padding is not counted."""
        if self.family.is_relative:
            return None
        graph = self.graph
        if not self.family.positions_skip_padding:
            # Not (S,): of rows that a Range numbers ONNX Runtime 1.31 makes a Slice that it cannot run.
            first = graph.constant(self.first)
            numbers = graph.op("Range", first, graph.op("Add", graph.size("input_ids", 1), first), graph.constant(1))
            return graph.op("Unsqueeze", numbers, graph.constant([0]))
        is_padding = graph.op("Equal", "input_ids", graph.constant(self.pad))
        real = graph.op("Cast", graph.op("Not", is_padding), to=TensorProto.INT64)
        counted = graph.op("Add", graph.op("CumSum", real, graph.constant(1)), graph.constant(self.first - 1))
        return graph.op("Where", is_padding, graph.constant(self.pad), counted)

    def with_past(self) -> str | None:
        """Positions of the new tokens ``input_ids`` (B, K, T) behind ``past_mask`` (B, K, P): (B, K, T)."""
        if self.family.is_relative:
            return None
        graph = self.graph
        real = graph.op("ReduceSum", mask_with_new(graph, 2), graph.constant([-1]), keepdims=1)  # T are the new ones
        first = graph.constant(self.first)
        numbers = graph.op("Range", graph.op("Sub", first, graph.size("input_ids", 2)), first, graph.constant(1))
        return self._limited(graph.op("Add", real, numbers))

    def visible_mask(self) -> str:
        """Columns 0 … P of ``past_mask`` (R, M), of which the last is the new token's own: (R, P + 1)."""
        graph = self.graph
        end = graph.op("Add", graph.op("Cast", "past_length", to=TensorProto.INT64), graph.constant([1]))
        return graph.op("Slice", "past_mask", graph.constant([0]), end, graph.constant([1]))

    def one_step(self) -> str | None:
        """Position of one new token ``input_ids`` (R, 1) at column ``past_length``: (R, 1)."""
        if self.family.is_relative:
            return None
        graph = self.graph
        so_far = graph.op("ReduceSum", self.visible_mask(), graph.constant([-1]), keepdims=1)
        numbers = graph.op("Add", graph.op("Cast", so_far, to=TensorProto.INT64), graph.constant(self.first - 1))
        return self._limited(numbers)

    def _limited(self, numbers: str) -> str:
        """Decoder positions limited to the table; padding keeps its own where the family skips it."""
        # A finished row that stays in the batch for the others may outgrow the table.
        last = len(self.weights.array("decoder.embed_positions.weight")) - 1
        numbers = self.graph.op("Min", numbers, self.graph.constant(last))
        if not self.family.positions_skip_padding:
            return numbers
        is_padding = self.graph.op("Equal", "input_ids", self.graph.constant(self.pad))
        return self.graph.op("Where", is_padding, self.graph.constant(self.pad), numbers)


class AttentionBiases:
    """Position and mask biases of one stack's self-attention, one for each layer; the decoder's are causal."""

    def __init__(self, graph: GraphBuilder, weights: T5Weights, stack: str):
        self.graph, self.weights, self.stack = graph, weights, stack

    def mask_bias(self, mask: str, axes: tuple[int, ...] = (1, 2)) -> str:
        """A mask of 1 and 0 as biases of 0 and `LOWEST`, with new axes of size 1 at ``axes``."""
        graph = self.graph
        padded = graph.op("Cast", graph.op("Sub", graph.constant(1), mask), to=TensorProto.FLOAT)
        return graph.op("Unsqueeze", graph.op("Mul", padded, graph.constant(LOWEST)), graph.constant(list(axes)))

    def full(self, tokens: str, mask: str | None = None) -> list[str]:
        """Biases of positions 0 … n - 1 on each other, for tokens (B, n): (B, H, n, n), without a mask (H, n, n)."""
        if not self.weights.family.is_relative:
            return [self.mask_bias(mask)] * self.weights.dims.encoder_layers
        graph = self.graph
        positions = graph.op("Range", graph.constant(0), graph.size(tokens, 1), graph.constant(1))
        masked = self.mask_bias(mask) if mask else None
        return self._by_layer(positions, positions, lambda bias: graph.op("Add", bias, masked) if masked else bias)

    def with_past(self, *, rows: bool = False) -> list[str]:
        """Biases of T new positions on P past ones and each other: (R, H, T, P + T); with ``rows``, R is B and K."""
        graph, axis = self.graph, 2 if rows else 1
        past, new = graph.size("past_mask", axis), graph.size("input_ids", axis)
        total = graph.op("Add", past, new)
        zero, one = graph.constant(0), graph.constant(1)
        queries, keys = graph.op("Range", past, total, one), graph.op("Range", zero, total, one)
        # Garbage in front of a shorter history is masked here, the future by the last entry of the bias tables.
        history_bias = self.mask_bias(mask_with_new(graph, axis), axes=(axis, axis + 1))  # (R, 1, 1, P + T)
        return self._by_layer(queries, keys, lambda bias: graph.op("Add", bias, history_bias))

    def one_step(self) -> list[str]:
        """Biases of one new token on columns 0 … P: (1, H, 1, P + 1); empty names where positions are absolute."""
        if not self.weights.family.is_relative:
            return [""] * self.weights.dims.decoder_layers
        graph, one = self.graph, self.graph.constant(1)
        past = graph.op("Squeeze", graph.op("Cast", "past_length", to=TensorProto.INT64))
        total = graph.op("Add", past, one)
        queries, keys = graph.op("Range", past, total, one), graph.op("Range", graph.constant(0), total, one)
        return self._by_layer(queries, keys, lambda bias: graph.op("Unsqueeze", bias, graph.constant([0])))

    def _by_layer(self, queries: str, keys: str, finish: Callable[[str], str]) -> list[str]:
        """For each layer its biases (…, H, n, m), looked up by distance."""
        # T5 has one table, in its first layer; UMT5 one in every layer. A pruned T5's layers keep different heads of
        # one table: heads that layers share are looked up once, and each layer gathers its own from the result.
        graph = self.graph
        reach, causal = self.weights.max_distance, self.stack == "decoder"
        axis_0, axis_1 = graph.constant([0]), graph.constant([1])
        distance = graph.op("Sub", graph.op("Unsqueeze", keys, axis_0), graph.op("Unsqueeze", queries, axis_1))
        nearest = graph.op("Clip", distance, graph.constant(-reach), graph.constant(1 if causal else reach))
        index = graph.op("Add", nearest, graph.constant(reach))

        def look_up(layer: int, table: np.ndarray) -> str:
            name = f"{self._prefix(layer)}.relative_attention_bias.weight.by_distance"
            return finish(graph.op("Gather", graph.weight(name, table), index, axis=1))

        tables = self._tables()
        different = {head.tobytes(): head for table in tables for head in table}
        if len(different) == sum(map(len, tables)):
            return [look_up(layer, table) for layer, table in enumerate(tables)]
        place = {head: number for number, head in enumerate(different)}
        every = look_up(0, np.stack(list(different.values())))
        biases, done = [], {tuple(range(len(place))): every}
        for table in tables:
            own = tuple(place[head.tobytes()] for head in table)
            if own not in done:
                done[own] = graph.op("Gather", every, graph.constant(own), axis=-3)
            biases.append(done[own])
        return biases

    def _prefix(self, layer: int) -> str:
        return f"{self.stack}.block.{layer}.layer.0.SelfAttention"

    def _tables(self) -> list[np.ndarray]:
        """For each layer its heads' biases by distance (H, distances); causal ones end in `LOWEST`, the future."""
        if not self.weights.family.is_relative:  # one row for all heads, the causal mask alone
            return [np.array([[0, LOWEST]], dtype=np.float32)] * self.weights.dims.decoder_layers
        weights, reach, causal = self.weights, self.weights.max_distance, self.stack == "decoder"
        distance = np.arange(-reach, (0 if causal else reach) + 1)
        bucket = relative_position_bucket(
            distance, bidirectional=not causal, buckets=weights.buckets, max_distance=reach
        )
        tables, source = [], ""
        for layer, heads in enumerate(weights.dims.decoder_heads if causal else weights.dims.encoder_heads):
            own = f"{self._prefix(layer)}.relative_attention_bias.weight"
            source = own if own in weights.arrays else source
            table = weights.array(source)[bucket].T
            pruned = weights.pruned_heads.get(f"{self.stack}.{layer}", ())
            table = table[[head for head in range(len(table)) if head not in pruned]]
            if len(table) != heads:
                raise NotT5Error(
                    f"{self.stack} layer {layer} must have a position bias for each of its {heads} heads, got "
                    f"{len(table)}. Name the removed heads as its pruned_heads."
                )
            tables.append(np.concatenate([table, np.full((heads, 1), LOWEST)], axis=1) if causal else table)
        return tables


class T5Layers:
    """The layers of one stack, ``"encoder"`` or ``"decoder"``, as nodes of one graph."""

    def __init__(self, graph: GraphBuilder, weights: T5Weights, stack: str):
        self.graph, self.weights, self.stack = graph, weights, stack
        self.biases = AttentionBiases(graph, weights, stack)
        self.positions = Positions(graph, weights)

    # Whole stacks

    def embed(self, tokens: str = "input_ids", numbers: str | None = None) -> str:
        """Token ids (…) -> (…, d_model), with the embeddings of absolute positions ``numbers``, if there are any."""
        graph, own = self.graph, f"{self.stack}.embed_tokens.weight"
        hidden = graph.op("Gather", self.weight(own if own in self.weights.arrays else "shared.weight"), tokens)
        if numbers is None:
            return hidden
        if self.weights.embedding_scale != 1:
            hidden = graph.op("Mul", hidden, graph.constant(np.float32(self.weights.embedding_scale)))
        positions = graph.op("Gather", self.weight(f"{self.stack}.embed_positions.weight"), numbers)
        hidden = graph.op("Add", hidden, positions)
        if self.weights.family.norm_embedding:
            hidden = self.norm(hidden, f"{self.stack}.layernorm_embedding.weight")
        return hidden

    def encoder(self, output: str | None = None) -> str:
        """``input_ids`` and ``attention_mask`` (B, S) -> the encoder's output (B, S, d_model), called ``output``."""
        hidden = self.embed(numbers=self.positions.source())
        bias_of = self.biases.full("input_ids", "attention_mask")
        for layer in range(self.weights.dims.encoder_layers):
            hidden = self.self_attention(hidden, layer, bias_of[layer])
            hidden = self.feed_forward(hidden, f"encoder.block.{layer}.layer.1")
        if not self.weights.family.norm_first:
            return self.graph.op("Identity", hidden, output=output) if output else hidden
        return self.norm(hidden, "encoder.final_layer_norm.weight", output=output)

    def step(self) -> str:
        """The inputs of `contract.decoder_spec` -> the head's input (B, K, T, d_model), normed and scaled."""
        hidden = self.embed(numbers=self.positions.with_past())  # (B, K, T, d_model)
        bias_of = self.biases.with_past(rows=True)
        source_bias = self.biases.mask_bias("attention_mask")
        return self.decoder(hidden, bias_of, source_bias, cross="cross", past="past", present="present", rows=True)

    def cross_keys_and_values(self, encoded: str, prefix: str) -> None:
        """The encoder's output (B, S, d_model) -> ``prefix_key_i`` and ``prefix_value_i`` of each decoder layer."""
        for layer, heads in enumerate(self.weights.dims.cross_heads):
            for name in ("key", "value"):
                projection = f"decoder.block.{layer}.layer.1.EncDecAttention.{name[0]}.weight"
                self.heads(encoded, projection, heads, output=f"{prefix}_{name}_{layer}")

    def decoder(
        self,
        hidden: str,
        bias_of: list[str],
        source_bias: str,
        *,
        cross: str,
        past: str | None = None,
        present: str | None = None,
        rows: bool = False,
    ) -> str:
        """Embedded tokens (R, T, d_model), with ``rows`` (B, K, T, d_model) -> the head's input, normed and scaled.

        ``cross``, ``past`` and ``present`` are prefixes of the names of the cross-attention cache, the KV cache read,
        and the KV cache written (``cross_key_0`` …). Without ``past`` there is no history.
        """
        # The K rows of a source share its cross tensors: in cross-attention K and T fold into one axis of queries.
        per_source = self.graph.op("Shape", "input_ids", start=1, end=2) if rows else None
        for layer in range(self.weights.dims.decoder_layers):
            hidden = self.self_attention(hidden, layer, bias_of[layer], past=past, present=present, rows=rows)
            hidden = self.cross_attention(hidden, layer, cross, source_bias, per_source)
            hidden = self.feed_forward(hidden, f"decoder.block.{layer}.layer.2")
        if not self.weights.family.norm_first:
            return hidden
        return self.norm(hidden, "decoder.final_layer_norm.weight", scale=self.weights.logit_scale)

    def head(self, hidden: str, *, output: str, by_rows: bool = False) -> None:
        """The decoder's output (…, T, d_model), normed and scaled -> logits (…, T, V)."""
        self.logits(self.graph, "MatMul", hidden, self.head_weight(by_rows=by_rows), output=output)

    def logits(self, graph: GraphBuilder, kind: str, *inputs: str, output: str) -> None:
        """The node that computes logits, and the head's bias if there is one, in a graph or one of its branches."""
        bias = self.weights.head_bias
        products = graph.op(kind, *inputs, output=None if bias else output)
        if bias:
            graph.op("Add", products, graph.weight(bias, self.weights.array(bias)), output=output)

    def head_weight(self, *, by_rows: bool = False) -> str:
        """The head's weight (d_model, V), stored as (V, d_model) where it is tied or single rows are read."""
        if self.weights.dims.tied or by_rows:  # the embedding serves twice and is stored once
            return self.graph.op("Transpose", self.weight(self.weights.head), perm=[1, 0])
        return self.transposed(self.weights.head)

    # Parts of a layer, each with its norm and residual

    def self_attention(
        self,
        hidden: str,
        layer: int,
        bias: str,
        *,
        past: str | None = None,
        present: str | None = None,
        rows: bool = False,
    ) -> str:
        """Self-attention of one layer; arguments as in `decoder`."""
        graph, dims, prefix = self.graph, self.weights.dims, f"{self.stack}.block.{layer}.layer.0"
        heads = (dims.encoder_heads if self.stack == "encoder" else dims.decoder_heads)[layer]
        normed = self.pre_norm(hidden, f"{prefix}.layer_norm.weight")
        query = self.heads(normed, f"{prefix}.SelfAttention.q.weight", heads, rows=rows)
        outputs = {name: f"{present}_{name}_{layer}" if present else None for name in ("key", "value")}
        kv = {}
        for name, output in outputs.items():
            projection = f"{prefix}.SelfAttention.{name[0]}.weight"
            kv[name] = self.heads(normed, projection, heads, rows=rows, output=None if past else output)
        if past:
            axis = 3 if rows else 2
            for name, output in outputs.items():
                kv[name] = graph.op("Concat", f"{past}_{name}_{layer}", kv[name], axis=axis, output=output)
        attended = self.attend(query, kv["key"], kv["value"], bias, rows=rows)
        merged = self.merge_heads(attended, heads, rows=rows)
        projected = self.output(merged, f"{prefix}.SelfAttention.o.weight", heads)
        return self.add_residual(hidden, projected, f"{prefix}.layer_norm.weight")

    def cross_attention(self, hidden: str, layer: int, cross: str, bias: str, per_source: str | None = None) -> str:
        """Cross-attention of one layer; ``per_source`` is K, where it has an axis."""
        graph, prefix = self.graph, f"decoder.block.{layer}.layer.1"
        heads, d_kv = self.weights.dims.cross_heads[layer], self.weights.dims.d_kv
        normed = self.pre_norm(hidden, f"{prefix}.layer_norm.weight")
        query = self.heads(normed, f"{prefix}.EncDecAttention.q.weight", heads)  # (B, H, K * T, d)
        attended = self.attend(query, f"{cross}_key_{layer}", f"{cross}_value_{layer}", bias)
        if per_source:
            shape = graph.op("Concat", graph.constant([0]), per_source, graph.constant([-1, heads * d_kv]), axis=0)
            merged = graph.op("Reshape", graph.op("Transpose", attended, perm=[0, 2, 1, 3]), shape)
        else:
            merged = self.merge_heads(attended, heads)
        projected = self.output(merged, f"{prefix}.EncDecAttention.o.weight", heads)
        return self.add_residual(hidden, projected, f"{prefix}.layer_norm.weight")

    def feed_forward(self, hidden: str, prefix: str) -> str:
        graph, dense = self.graph, f"{prefix}.DenseReluDense"
        normed = self.pre_norm(hidden, f"{prefix}.layer_norm.weight")
        if self.weights.dims.gated:
            inner = self.activation(self.linear(normed, f"{dense}.wi_0.weight"))
            inner = graph.op("Mul", inner, self.linear(normed, f"{dense}.wi_1.weight"))
        else:
            inner = self.activation(self.linear(normed, f"{dense}.wi.weight"))
        return self.add_residual(hidden, self.linear(inner, f"{dense}.wo.weight"), f"{prefix}.layer_norm.weight")

    def pre_norm(self, hidden: str, norm: str) -> str:
        return self.norm(hidden, norm) if self.weights.family.norm_first else hidden

    def add_residual(self, hidden: str, branch: str, norm: str) -> str:
        """The sum, normed where the family's norms come behind it."""
        total = self.graph.op("Add", hidden, branch)
        return total if self.weights.family.norm_first else self.norm(total, norm)

    # Operators

    def require_heads(self, name: str, heads: int, axis: int) -> None:
        width, d_kv = self.weights.array(name).shape[axis], self.weights.d_kv(name)
        if width != heads * d_kv:
            raise NotT5Error(f"{name} must be {heads * d_kv} wide for {heads} heads of {d_kv}, got {width}.")

    def weight(self, name: str) -> str:
        return self.graph.weight(name, self.weights.array(name))

    def transposed(self, name: str) -> str:
        return self.graph.weight(f"{name}.T", self.weights.array(name).T)

    def output(self, merged: str, name: str, heads: int) -> str:
        """Merged heads (…, H * d_kv) -> (…, d_model)."""
        self.require_heads(name, heads, axis=1)
        return self.linear(merged, name)

    def linear(self, hidden: str, name: str, output: str | None = None) -> str:
        """(…, in) -> (…, out). torch stores the weight as (out, in), a product needs (in, out)."""
        bias = self.weights.bias(name)
        product = self.graph.op("MatMul", hidden, self.transposed(name), output=None if bias else output)
        return self.graph.op("Add", product, self.weight(bias), output=output) if bias else product

    def norm(self, hidden: str, name: str, scale: float = 1.0, output: str | None = None) -> str:
        """LayerNorm, or x / rms(x) * weight in the form that ONNX Runtime fuses into one node."""
        graph = self.graph
        if self.weights.family.norm == "layer":
            inputs = hidden, self.norm_weight(name, scale), self.weight(self.weights.bias(name))
            return graph.op("LayerNormalization", *inputs, axis=-1, epsilon=self.weights.norm_epsilon, output=output)
        square = graph.op("Pow", hidden, graph.constant(np.float32(2)))
        mean = graph.op("ReduceMean", square, graph.constant([-1]), keepdims=1)
        root = graph.op("Sqrt", graph.op("Add", mean, graph.constant(np.float32(self.weights.norm_epsilon))))
        return graph.op("Mul", graph.op("Div", hidden, root), self.norm_weight(name, scale), output=output)

    def norm_weight(self, name: str, scale: float = 1.0) -> str:
        return self.graph.weight(name, self.weights.array(name) * np.float32(scale))

    def activation(self, inner: str) -> str:
        graph, kind = self.graph, self.weights.activation
        if kind == "relu":
            return graph.op("Relu", inner)
        if kind in ("gelu", "gelu_new", "gelu_pytorch_tanh"):
            return graph.op("Gelu", inner, approximate="none" if kind == "gelu" else "tanh")
        if kind in ("silu", "swish"):
            return graph.op("Mul", inner, graph.op("Sigmoid", inner))
        raise NotT5Error(f"The activation must be relu, gelu, gelu_new or silu, got {kind!r}.")

    def heads(self, hidden: str, name: str, heads: int, *, rows: bool = False, output: str | None = None) -> str:
        """Project (B, …, d_model) to (B, H, n, d), all axes between folded into n; with ``rows`` to (B, K, H, T, d)."""
        self.require_heads(name, heads, axis=0)
        d_kv = self.weights.d_kv(name)
        shape = [0, 0, 0, heads, d_kv] if rows else [0, -1, heads, d_kv]
        split = self.graph.op("Reshape", self.linear(hidden, name), self.graph.constant(shape))
        return self.graph.op("Transpose", split, perm=[0, 1, 3, 2, 4] if rows else [0, 2, 1, 3], output=output)

    def merge_heads(self, attended: str, heads: int, *, rows: bool = False) -> str:
        """(B, H, n, d) -> (B, n, H * d); with ``rows``: (B, K, H, T, d) -> (B, K, T, H * d)."""
        together = self.graph.op("Transpose", attended, perm=[0, 1, 3, 2, 4] if rows else [0, 2, 1, 3])
        shape = [0] * (3 if rows else 2) + [heads * self.weights.d_kv(f"{self.stack}.")]
        return self.graph.op("Reshape", together, self.graph.constant(shape))

    def attend(self, query: str, key: str, value: str, bias: str, *, rows: bool = False) -> str:
        """softmax(q k' + bias) v. The weights already contain 1 / sqrt(d); T5 was trained without it."""
        graph = self.graph
        flipped = graph.op("Transpose", key, perm=[0, 1, 2, 4, 3] if rows else [0, 1, 3, 2])
        scores = graph.op("Add", graph.op("MatMul", query, flipped), bias)
        return graph.op("MatMul", graph.op("Softmax", scores, axis=-1), value)


def encoder_graph(weights: T5Weights) -> GraphBuilder:
    """``input_ids``, ``attention_mask`` (B, S) -> ``cross_key_i``, ``cross_value_i`` (B, H_i, S, d_kv)."""
    graph = GraphBuilder("encoder")
    graph.declare(encoder_spec(weights.dims))
    layers = (weights.layers or T5Layers)(graph, weights, "encoder")
    layers.cross_keys_and_values(layers.encoder(), "cross")
    return graph


def encoder_only_graph(weights: T5Weights) -> GraphBuilder:
    """``input_ids``, ``attention_mask`` (B, S) -> ``last_hidden_state`` (B, S, d_model)."""
    graph = GraphBuilder("encoder_only")
    graph.declare(encoder_only_spec(weights.dims))
    (weights.layers or T5Layers)(graph, weights, "encoder").encoder("last_hidden_state")
    return graph


def decoder_graph(weights: T5Weights, *, head_by_rows: bool = False) -> GraphBuilder:
    """One decoder step of `contract.decoder_spec`; ``head_by_rows`` as in `T5Layers.head_weight`."""
    layers, hidden = headless_decoder("decoder", weights, decoder_spec(weights.dims))
    layers.head(hidden, output="logits", by_rows=head_by_rows)
    return layers.graph


def headless_decoder(name: str, weights: T5Weights, spec: GraphSpec) -> tuple[T5Layers, str]:
    """The decoder's layers in a graph of ``spec``, and the input of its head: (B, K, T, d_model), normed and scaled."""
    graph = GraphBuilder(name)
    graph.declare(spec)
    layers = (weights.layers or T5Layers)(graph, weights, "decoder")
    return layers, layers.step()
