"""Encoder and decoder step as ONNX graphs, built from a checkpoint's weights, operator by operator.

Nothing is traced: no exporter has to understand transformers' code, and the graphs are those that we mean. The encoder
ends in the keys and values of cross-attention; the decoder takes one step (`contract`). Every layout's graphs are made
of `T5Layers`. What sets BART and its relatives apart from T5 are the switches of `models.families.Family`.

Methods take and return the names of values. Shapes: B sources, K rows per source, S source positions, T new and P past
decoder positions, H heads. The decoder's layers take rows of their own axis, (B, K, T, …), or, as most exports have it,
rows as the batch: (R, T, …) with R = B * K.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import TensorProto, numpy_helper

from t5accel.errors import NotT5Error
from t5accel.graphs.builder import GraphBuilder
from t5accel.graphs.contract import GraphSpec, decoder_spec, encoder_spec
from t5accel.graphs.weights import T5Weights
from t5accel.models.t5_math import relative_position_bucket

# The numbers of absolute positions, computed in the graph from masks: BART's and its relatives', where T5 has none.
# A history that is shorter than its neighbours' is padded in front and masked, so a token's column says nothing about
# its place in the text. The mask does: a new token's number is that of the real ones before it.


def mask_with_new(graph: GraphBuilder, axis: int) -> str:
    """The mask of a history and of the new tokens behind it along ``axis``, of which all are real: (…, P + T).

    >>> graph = GraphBuilder("decoder")
    >>> mask_with_new(graph, 2), [node.op_type for node in graph.nodes]
    ('concat_0', ['Shape', 'ConstantOfShape', 'Concat'])
    """
    ones = numpy_helper.from_array(np.array([1], dtype=np.int64))
    own = graph.op("ConstantOfShape", graph.op("Shape", "input_ids"), value=ones)
    return graph.op("Concat", "past_mask", own, axis=axis)


class Positions:
    """Numbers of rows in the table of positions, as nodes; ``None`` where the model has no such table.

    Args:
        graph: takes the nodes.
        weights: of the model.
    """

    def __init__(self, graph: GraphBuilder, weights: T5Weights):
        self.graph, self.weights, self.family, self.pad = graph, weights, weights.family, weights.pad_token_id
        self.first = self.family.first_position(self.pad)

    def of_source(self) -> str | None:
        """Of the tokens ``input_ids`` (B, S): (1, S), or (B, S) where padding is not counted."""
        if self.family.is_relative:
            return None
        graph = self.graph
        if not self.family.skips_padding:
            # Not (S,): of rows that a Range numbers ONNX Runtime 1.31 makes a Slice that it cannot run.
            first = graph.constant(self.first)
            numbers = graph.op("Range", first, graph.op("Add", graph.size("input_ids", 1), first), graph.constant(1))
            return graph.op("Unsqueeze", numbers, graph.constant([0]))
        is_padding = graph.op("Equal", "input_ids", graph.constant(self.pad))
        real = graph.op("Cast", graph.op("Not", is_padding), to=TensorProto.INT64)
        counted = graph.op("Add", graph.op("CumSum", real, graph.constant(1)), graph.constant(self.first - 1))
        return graph.op("Where", is_padding, graph.constant(self.pad), counted)

    def on_past(self) -> str | None:
        """Of the new tokens ``input_ids`` (B, K, T) behind those that ``past_mask`` (B, K, P) shows: (B, K, T)."""
        if self.family.is_relative:
            return None
        graph = self.graph
        real = graph.op("ReduceSum", mask_with_new(graph, 2), graph.constant([-1]), keepdims=1)  # T are the new ones
        first = graph.constant(self.first)
        numbers = graph.op("Range", graph.op("Sub", first, graph.size("input_ids", 2)), first, graph.constant(1))
        return self._of_decoder(graph.op("Add", real, numbers))

    def mask_so_far(self) -> str:
        """Of ``past_mask`` (R, M) the columns 0 … P, the last of which is the new token's own: (R, P + 1)."""
        graph = self.graph
        end = graph.op("Add", graph.op("Cast", "past_length", to=TensorProto.INT64), graph.constant([1]))
        return graph.op("Slice", "past_mask", graph.constant([0]), end, graph.constant([1]))

    def on_columns(self) -> str | None:
        """Of one new token ``input_ids`` (R, 1) at column ``past_length``: (R, 1)."""
        if self.family.is_relative:
            return None
        graph = self.graph
        so_far = graph.op("ReduceSum", self.visible_mask(), graph.constant([-1]), keepdims=1)
        numbers = graph.op("Add", graph.op("Cast", so_far, to=TensorProto.INT64), graph.constant(self.first - 1))
        return self._of_decoder(numbers)

    def _of_decoder(self, numbers: str) -> str:
        """The numbers, but for padding that the decoder reads where padding has none.

        None is beyond the table: what has ended, and stays in the batch for others' sake, may get longer than it.
        """
        last = len(self.weights.array("decoder.embed_positions.weight")) - 1
        numbers = self.graph.op("Min", numbers, self.graph.constant(last))
        if not self.family.skips_padding:
            return numbers
        is_padding = self.graph.op("Equal", "input_ids", self.graph.constant(self.pad))
        return self.graph.op("Where", is_padding, self.graph.constant(self.pad), numbers)


LOWEST = np.finfo(np.float32).min  # added to a score it makes the softmax ignore the position


class AttentionBiases:
    """The biases of one stack's self-attention, one for each layer, and of masks, as nodes of one graph.

    Args:
        graph: takes the nodes and the tables.
        weights: of the model.
        stack: ``"encoder"``, where all see all, or ``"decoder"``, where none sees what comes later.
    """

    def __init__(self, graph: GraphBuilder, weights: T5Weights, stack: str):
        self.graph, self.weights, self.stack = graph, weights, stack

    def of_mask(self, mask: str, axes: tuple[int, ...] = (1, 2)) -> str:
        """A mask of 1 and 0 as a bias of 0 and the lowest number, with new axes of size 1 at ``axes``."""
        graph = self.graph
        padded = graph.op("Cast", graph.op("Sub", graph.constant(1), mask), to=TensorProto.FLOAT)
        return graph.op("Unsqueeze", graph.op("Mul", padded, graph.constant(LOWEST)), graph.constant(list(axes)))

    def among(self, tokens: str, mask: str | None = None) -> list[str]:
        """Of positions 0 … n - 1 on each other, where token ids and mask are (B, n): for each layer (B, H, n, n).

        Without a mask, (H, n, n).
        """
        if not self.weights.family.is_relative:
            return [self.mask_bias(mask)] * self.weights.dims.encoder_layers
        graph = self.graph
        positions = graph.op("Range", graph.constant(0), graph.size(tokens, 1), graph.constant(1))
        masked = self.mask_bias(mask) if mask else None
        return self._by_layer(positions, positions, lambda bias: graph.op("Add", bias, masked) if masked else bias)

    def on_past(self, *, rows: bool = False) -> list[str]:
        """Of T new positions on P past ones and on each other: for each layer (R, H, T, P + T).

        It reads ``input_ids`` (R, T) and ``past_mask`` (R, P). With ``rows``, R is two axes everywhere, B and K.
        """
        graph, axis = self.graph, 2 if rows else 1
        past, new = graph.size("past_mask", axis), graph.size("input_ids", axis)
        total, zero, one = graph.op("Add", past, new), graph.constant(0), graph.constant(1)
        queries, keys = graph.op("Range", past, total, one), graph.op("Range", zero, total, one)
        # Garbage in front of a shorter history is masked here, the future by the last entry of the tables of biases.
        history_bias = self.mask_bias(mask_with_new(graph, axis), axes=(axis, axis + 1))  # (R, 1, 1, P + T)
        return self._by_layer(queries, keys, lambda bias: graph.op("Add", bias, history_bias))

    def on_columns(self) -> list[str]:
        """Of one new token at column P, ``past_length`` (1,), on the columns 0 … P: for each layer (1, H, 1, P + 1).

        Empty names where positions are not in the scores.
        """
        if not self.weights.family.is_relative:
            return [""] * self.weights.dims.decoder_layers
        graph, one = self.graph, self.graph.constant(1)
        past = graph.op("Squeeze", graph.op("Cast", "past_length", to=TensorProto.INT64))
        total = graph.op("Add", past, one)
        queries, keys = graph.op("Range", past, total, one), graph.op("Range", graph.constant(0), total, one)
        return self._by_layer(queries, keys, lambda bias: graph.op("Unsqueeze", bias, graph.constant([0])))

    def _by_layer(self, queries: str, keys: str, finish: Callable[[str], str]) -> list[str]:
        """For each layer the name of its biases (…, H, n, m), looked up by distance once where layers share them.

        T5 has one table, in its first layer; UMT5 has one in every layer. After pruning, each layer has a table of the
        heads that it kept, with columns that other layers have as well: those are looked up once, for all layers, and
        each takes its heads' maps out of what was found.
        """
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
        """For each layer the biases of its heads by distance, (H, distances).

        The causal ones have one more entry, for the future: the lowest number. It is all that is left of the table
        where positions are not in the scores: one row for all heads.
        """
        if not self.weights.family.is_relative:
            return [np.array([[0, LOWEST]], dtype=np.float32)] * self.weights.dims.decoder_layers
        weights, reach, causal = self.weights, self.weights.max_distance, self.stack == "decoder"
        distances = np.arange(-reach, (0 if causal else reach) + 1)
        bucket = relative_position_bucket(
            distances, bidirectional=not causal, buckets=weights.buckets, max_distance=reach
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
                    f"{self.stack} layer {layer} has {heads} heads and {len(table)} position biases: name the others "
                    "as its pruned_heads."
                )
            tables.append(np.concatenate([table, np.full((heads, 1), LOWEST)], axis=1) if causal else table)
        return tables


class T5Layers:
    """The layers of the encoder or of the decoder, as nodes of one graph.

    Args:
        graph: takes the nodes and the weights.
        weights: of the model.
        stack: ``"encoder"`` or ``"decoder"``.

    >>> from t5accel.graphs.export import t5_weights
    >>> from t5accel.models.random_init import random_t5
    >>> model = random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    >>> layers = T5Layers(GraphBuilder("embedding"), t5_weights(model), "encoder")
    >>> layers.embed("input_ids"), layers.graph.weights["shared.weight"].shape
    ('gather_0', (32, 8))
    """

    def __init__(self, graph: GraphBuilder, weights: T5Weights, stack: str):
        self.graph, self.weights, self.stack = graph, weights, stack
        self.biases, self.positions = AttentionBiases(graph, weights, stack), Positions(graph, weights)

    # Whole stacks

    def embed(self, tokens: str = "input_ids", numbers: str | None = None) -> str:
        """Token ids (…) -> (…, d_model). Encoder and decoder share the table, unless they were untied.

        Args:
            tokens: the ids.
            numbers: of their positions (`Positions`), to be added where they are not in the scores.
        """
        graph, own = self.graph, f"{self.stack}.embed_tokens.weight"
        hidden = graph.op("Gather", self.weight(own if own in self.weights.arrays else "shared.weight"), tokens)
        if numbers is None:
            return hidden
        if self.weights.embedding_scale != 1:
            hidden = graph.op("Mul", hidden, graph.constant(np.float32(self.weights.embedding_scale)))
        hidden = graph.op(
            "Add", hidden, graph.op("Gather", self.weight(f"{self.stack}.embed_positions.weight"), numbers)
        )
        return (
            self.norm(hidden, f"{self.stack}.layernorm_embedding.weight")
            if self.weights.family.norm_embedding
            else hidden
        )

    def encoder(self, output: str | None = None) -> str:
        """``input_ids`` and ``attention_mask`` (B, S) -> the encoder's output (B, S, d_model), called ``output``."""
        hidden = self.embed(numbers=self.positions.source())
        bias_of = self.biases.full("input_ids", "attention_mask")
        for layer in range(self.weights.dims.encoder_layers):
            hidden = self.self_attention(hidden, layer, bias_of[layer])
            hidden = self.feed_forward(hidden, f"encoder.block.{layer}.layer.1")
        if not self.weights.family.norm_first:
            return hidden
        return self.norm(hidden, "encoder.final_layer_norm.weight", output=output)

    def cross_keys_and_values(self, encoded: str, prefix: str) -> None:
        """The encoder's output (B, S, d_model) -> for each decoder layer ``prefix_key_i``, ``prefix_value_i``."""
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
        """The decoder's layers on embedded tokens (R, T, d_model), with ``rows`` (B, K, T, d_model).

        The K rows of a source share its cross tensors: in cross-attention K and T fold into one axis of queries.

        Args:
            hidden: the embedded tokens.
            bias_of: for each layer, of self-attention.
            source_bias: of cross-attention.
            cross: its keys and values are called ``cross_key_i`` … if this is ``"cross"``.
            past: so are those of the history, in front of which the new ones are put; by default there is no history.
            present: so shall those be called that self-attention has read, for the next step.
            rows: K is an axis of its own.

        Returns:
            What the head reads, in the shape of ``hidden``: already scaled and normed.
        """
        graph, dims = self.graph, self.weights.dims
        per_source = graph.op("Shape", "input_ids", start=1, end=2) if rows else None
        for layer in range(dims.decoder_layers):
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
        """The node that makes logits, and what is added to them, if anything is, in a graph or in a branch of it."""
        bias = self.weights.head_bias
        products = graph.op(kind, *inputs, output=None if bias else output)
        if bias:
            graph.op("Add", products, graph.weight(bias, self.weights.array(bias)), output=output)

    def head_weight(self, *, by_rows: bool = False) -> str:
        """The head's weight as a product takes it: (d_model, V).

        With ``by_rows`` it is stored as (V, d_model) in any case, a row for each token: for who reads single ones.
        """
        if self.weights.dims.tied or by_rows:  # the embedding serves twice and is stored once
            return self.graph.op("Transpose", self.weight(self.weights.head), perm=[1, 0])
        return self.transposed(self.weights.head)

    # Parts of a layer

    def self_attention(
        self, hidden: str, layer: int, bias: str, *, past: str | None = None, present: str | None = None,
        rows: bool = False,
    ) -> str:  # fmt: skip
        """A layer's norm, self-attention and residual; names as of `decoder`."""
        graph, dims, prefix = self.graph, self.weights.dims, f"{self.stack}.block.{layer}.layer.0"
        heads = (dims.encoder_heads if self.stack == "encoder" else dims.decoder_heads)[layer]
        normed = self.read(hidden, f"{prefix}.layer_norm.weight")
        kept = {name: f"{present}_{name}_{layer}" if present else None for name in ("key", "value")}
        query, key, value = (
            self.heads(
                normed, f"{prefix}.SelfAttention.{name[0]}.weight", heads, rows=rows,
                output=None if past else kept.get(name),
            )
            for name in ("query", "key", "value")
        )  # fmt: skip
        if past:
            key, value = (
                graph.op("Concat", f"{past}_{name}_{layer}", new, axis=3 if rows else 2, output=kept[name])
                for name, new in (("key", key), ("value", value))
            )
        merged = self.merge_heads(self.attend(query, key, value, bias, rows=rows), heads, rows=rows)
        found = self.output(merged, f"{prefix}.SelfAttention.o.weight", heads)
        return self.add(hidden, found, f"{prefix}.layer_norm.weight")

    def cross_attention(
        self, hidden: str, layer: int, cross: str, source_bias: str, per_source: str | None = None
    ) -> str:
        """The same with the source's keys and values, ``cross_key_i`` …; ``per_source`` is K, where it has an axis."""
        graph, prefix = self.graph, f"decoder.block.{layer}.layer.1"
        heads, d_kv = self.weights.dims.cross_heads[layer], self.weights.dims.d_kv
        normed = self.read(hidden, f"{prefix}.layer_norm.weight")
        query = self.heads(normed, f"{prefix}.EncDecAttention.q.weight", heads)  # (B, H, K * T, d)
        attended = self.attend(query, f"{cross}_key_{layer}", f"{cross}_value_{layer}", source_bias)
        if per_source:
            shape = graph.op("Concat", graph.constant([0]), per_source, graph.constant([-1, heads * d_kv]), axis=0)
            merged = graph.op("Reshape", graph.op("Transpose", attended, perm=[0, 2, 1, 3]), shape)
        else:
            merged = self.merge_heads(attended, heads)
        found = self.output(merged, f"{prefix}.EncDecAttention.o.weight", heads)
        return self.add(hidden, found, f"{prefix}.layer_norm.weight")

    def read(self, hidden: str, norm: str) -> str:
        """What a part of a layer reads of the stream: its norm, where norms come first."""
        return self.norm(hidden, norm) if self.weights.family.norm_first else hidden

    def add(self, hidden: str, found: str, norm: str) -> str:
        """The stream with what a part of a layer found, normed behind it where norms do not come first."""
        total = self.graph.op("Add", hidden, found)
        return total if self.weights.family.norm_first else self.norm(total, norm)

    # Operators on a weight

    def require_heads(self, name: str, heads: int, axis: int) -> None:
        width, d_kv = self.weights.array(name).shape[axis], self.weights.d_kv(name)
        if width != heads * d_kv:
            raise NotT5Error(f"{name} is {width} wide; {heads} heads of d_kv = {d_kv} are {heads * d_kv}.")

    def weight(self, name: str) -> str:
        return self.graph.weight(name, self.weights.array(name))

    def output(self, merged: str, name: str, heads: int) -> str:
        """What the heads found, (…, H * d_kv) -> (…, d_model)."""
        self.require_heads(name, heads, axis=1)
        return self.linear(merged, name)

    def linear(self, hidden: str, name: str, output: str | None = None) -> str:
        """(…, in) -> (…, out): torch keeps a Linear's weight as (out, in), a product needs it as (in, out)."""
        bias = self.weights.bias(name)
        product = self.graph.op("MatMul", hidden, self.transposed(name), output=None if bias else output)
        return self.graph.op("Add", product, self.weight(bias), output=output) if bias else product

    def transposed(self, name: str) -> str:
        return self.graph.weight(f"{name}.T", self.weights.array(name).T)

    def norm(self, hidden: str, name: str, scale: float = 1.0, output: str | None = None) -> str:
        """x / rms(x) * weight, in the form that ONNX Runtime fuses into one node; or the family's other norm."""
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

    def feed_forward(self, hidden: str, prefix: str) -> str:
        graph, dense = self.graph, f"{prefix}.DenseReluDense"
        normed = self.read(hidden, f"{prefix}.layer_norm.weight")
        if self.weights.dims.gated:
            inner = self.activation(self.linear(normed, f"{dense}.wi_0.weight"))
            inner = graph.op("Mul", inner, self.linear(normed, f"{dense}.wi_1.weight"))
        else:
            inner = self.activation(self.linear(normed, f"{dense}.wi.weight"))
        return self.add(hidden, self.linear(inner, f"{dense}.wo.weight"), f"{prefix}.layer_norm.weight")

    def activation(self, inner: str) -> str:
        graph, kind = self.graph, self.weights.activation
        if kind == "relu":
            return graph.op("Relu", inner)
        if kind in ("gelu", "gelu_new"):
            return graph.op("Gelu", inner, approximate="tanh" if kind == "gelu_new" else "none")
        if kind in ("silu", "swish"):
            return graph.op("Mul", inner, graph.op("Sigmoid", inner))
        raise NotT5Error(f"The activation is {kind!r}; there are relu, gelu, gelu_new and silu.")

    def heads(self, hidden: str, name: str, heads: int, *, rows: bool = False, output: str | None = None) -> str:
        """Project (B, …, d_model) to (B, H, n, d), all between folded into n; with ``rows`` to (B, K, H, T, d)."""
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
        """softmax(q k' + bias) v. Nothing divides by the root of d: that is in the weights, T5's by their making."""
        graph = self.graph
        flipped = graph.op("Transpose", key, perm=[0, 1, 2, 4, 3] if rows else [0, 1, 3, 2])
        scores = graph.op("Add", graph.op("MatMul", query, flipped), bias)
        return graph.op("MatMul", graph.op("Softmax", scores, axis=-1), value)


def encoder_graph(weights: T5Weights) -> GraphBuilder:
    """``input_ids``, ``attention_mask`` (B, S) -> ``cross_key_i``, ``cross_value_i`` (B, H_i, S, d_kv)."""
    graph = GraphBuilder("encoder")
    graph.declare(encoder_spec(weights.dims))
    layers = T5Layers(graph, weights, "encoder")
    layers.cross_keys_and_values(layers.encoder(), "cross")
    return graph


def decoder_graph(weights: T5Weights, *, head_by_rows: bool = False) -> GraphBuilder:
    """One step: new tokens, masks, the history and the cross tensors -> logits and the longer history.

    Args:
        weights: of the model.
        head_by_rows: store the head's weight as (V, d_model), as `T5Layers.head_weight` explains.

    >>> from t5accel.graphs.export import t5_weights
    >>> from t5accel.models.random_init import random_t5
    >>> model = random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    >>> [output.name for output in decoder_graph(t5_weights(model)).proto().graph.output]
    ['logits', 'present_key_0', 'present_value_0']
    """
    layers, hidden = headless_decoder("decoder", weights, decoder_spec(weights.dims))
    layers.head(hidden, output="logits", by_rows=head_by_rows)
    return layers.graph


def headless_decoder(name: str, weights: T5Weights, spec: GraphSpec) -> tuple[T5Layers, str]:
    """A graph with the decoder's layers, to which a head is still to be added.

    Args:
        name: of the graph.
        weights: of the model.
        spec: the inputs and outputs, those of `contract.decoder_spec` among them.

    Returns:
        The layers, in their graph, and the name of what the head reads: (B, K, T, d_model), normed and scaled.
    """
    graph = GraphBuilder(name)
    graph.declare(spec)
    layers = T5Layers(graph, weights, "decoder")
    hidden = layers.embed(numbers=layers.positions.with_past())  # (B, K, T, d_model)
    bias_of = layers.biases.with_past(rows=True)
    source_bias = layers.biases.mask_bias("attention_mask")
    hidden = layers.decoder(hidden, bias_of, source_bias, cross="cross", past="past", present="present", rows=True)
    return layers, hidden
