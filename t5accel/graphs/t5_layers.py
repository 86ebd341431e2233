"""T5's layers as nodes of an ONNX graph, built from a checkpoint's weights: what every layout's graphs are made of.

Methods take and return the names of values. Shapes: B sources, K rows per source, S source positions, T new and P past
decoder positions, H heads. The decoder's layers take rows of their own axis, (B, K, T, …), or, as most exports have it,
rows as the batch: (R, T, …) with R = B * K.
"""

from __future__ import annotations

import numpy as np

from t5accel.errors import NotT5Error
from t5accel.graphs.attention_bias import AttentionBiases
from t5accel.graphs.builder import GraphBuilder
from t5accel.graphs.t5_weights import T5Weights


class T5Layers:
    """The layers of the encoder or of the decoder, as nodes of one graph.

    Args:
        graph: takes the nodes and the weights.
        weights: of the model.
        stack: ``"encoder"`` or ``"decoder"``.

    >>> from t5accel.graphs.export import t5_weights
    >>> from t5accel.lively import random_t5
    >>> model = random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    >>> layers = T5Layers(GraphBuilder("embedding"), t5_weights(model), "encoder")
    >>> layers.embed("input_ids"), layers.graph.weights["shared.weight"].shape
    ('gather_0', (32, 8))
    """

    def __init__(self, graph: GraphBuilder, weights: T5Weights, stack: str):
        self.graph, self.weights, self.stack = graph, weights, stack
        self.biases = AttentionBiases(graph, weights, stack)

    # Whole stacks

    def embed(self, tokens: str = "input_ids") -> str:
        """Token ids (…) -> (…, d_model). Encoder and decoder share the table, unless they were untied."""
        own = f"{self.stack}.embed_tokens.weight"
        return self.graph.op("Gather", self.weight(own if own in self.weights.arrays else "shared.weight"), tokens)

    def encoder(self, output: str | None = None) -> str:
        """``input_ids`` and ``attention_mask`` (B, S) -> the encoder's output (B, S, d_model), called ``output``."""
        hidden = self.embed()
        bias_of = self.biases.among("input_ids", "attention_mask")
        for layer in range(self.weights.dims.encoder_layers):
            hidden = self.self_attention(hidden, layer, bias_of[layer])
            hidden = self.feed_forward(hidden, f"encoder.block.{layer}.layer.1")
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
        return self.norm(hidden, "decoder.final_layer_norm.weight", scale=self.weights.logit_scale)

    def head(self, hidden: str, *, output: str, by_rows: bool = False) -> None:
        """The decoder's output (…, T, d_model), normed and scaled -> logits (…, T, V)."""
        self.graph.op("MatMul", hidden, self.head_weight(by_rows=by_rows), output=output)

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
        normed = self.norm(hidden, f"{prefix}.layer_norm.weight")
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
        return graph.op("Add", hidden, self.output(merged, f"{prefix}.SelfAttention.o.weight", heads))

    def cross_attention(
        self, hidden: str, layer: int, cross: str, source_bias: str, per_source: str | None = None
    ) -> str:
        """The same with the source's keys and values, ``cross_key_i`` …; ``per_source`` is K, where it has an axis."""
        graph, prefix = self.graph, f"decoder.block.{layer}.layer.1"
        heads, d_kv = self.weights.dims.cross_heads[layer], self.weights.dims.d_kv
        normed = self.norm(hidden, f"{prefix}.layer_norm.weight")
        query = self.heads(normed, f"{prefix}.EncDecAttention.q.weight", heads)  # (B, H, K * T, d)
        attended = self.attend(query, f"{cross}_key_{layer}", f"{cross}_value_{layer}", source_bias)
        if per_source:
            shape = graph.op("Concat", graph.constant([0]), per_source, graph.constant([-1, heads * d_kv]), axis=0)
            merged = graph.op("Reshape", graph.op("Transpose", attended, perm=[0, 2, 1, 3]), shape)
        else:
            merged = self.merge_heads(attended, heads)
        return graph.op("Add", hidden, self.output(merged, f"{prefix}.EncDecAttention.o.weight", heads))

    # Operators on a weight

    def require_heads(self, name: str, heads: int, axis: int) -> None:
        width, d_kv = self.weights.array(name).shape[axis], self.weights.dims.d_kv
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
        return self.graph.op("MatMul", hidden, self.transposed(name), output=output)

    def transposed(self, name: str) -> str:
        return self.graph.weight(f"{name}.T", self.weights.array(name).T)

    def norm(self, hidden: str, name: str, scale: float = 1.0, output: str | None = None) -> str:
        """x / rms(x) * weight, in the form that ONNX Runtime fuses into one node."""
        graph = self.graph
        square = graph.op("Pow", hidden, graph.constant(np.float32(2)))
        mean = graph.op("ReduceMean", square, graph.constant([-1]), keepdims=1)
        root = graph.op("Sqrt", graph.op("Add", mean, graph.constant(np.float32(self.weights.norm_epsilon))))
        weight = graph.weight(name, self.weights.array(name) * np.float32(scale))
        return graph.op("Mul", graph.op("Div", hidden, root), weight, output=output)

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
