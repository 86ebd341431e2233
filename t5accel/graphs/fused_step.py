"""A decoder step in ONNX Runtime's own fused operators, on keys and values that stay where they are.

`layers` writes the step in operators of the standard, for every runtime and any number of new tokens: its history grows
by ``Concat``, so that each step copies all keys and values, and a layer is some forty nodes. Here a layer is a dozen:

- **Buffers of a capacity.** ``DecoderMaskedMultiHeadAttention`` writes the new token's key and value into a column of
  the memory that it reads, which is bound as input and output alike. Nothing is copied.
- Queries, keys and values are **one product**, as are the two of a gated feed-forward layer.
- A residual and the norm behind it are one node, ``SkipSimplifiedLayerNormalization`` or ``SkipLayerNormalization``,
  which also adds a bias.
- The rows of a source are the queries of one ``MultiHeadAttention`` over its keys and values, which are not repeated.

The price: one new token at a time, the same column for all rows (a shorter history is masked in front), and float32.
"""

from __future__ import annotations

from t5accel.graphs.builder import ORT_DOMAIN, GraphBuilder
from t5accel.graphs.contract import step_spec
from t5accel.graphs.layers import LOWEST, T5Layers
from t5accel.graphs.weights import T5Weights


def step_graph(weights: T5Weights) -> GraphBuilder:
    """One new token for each row, on buffers that stay: the graph of `contract.step_spec`.

    >>> from t5accel.graphs.export import t5_weights
    >>> from t5accel.models.random_init import random_t5
    >>> model = random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    >>> graph = step_graph(t5_weights(model))
    >>> len(graph.nodes), graph.nodes[-3].op_type
    (43, 'SkipSimplifiedLayerNormalization')
    """
    layers, hidden = headless_step(weights)
    layers.head(hidden, output="logits")
    return layers.graph


def headless_step(weights: T5Weights, *, shortlist: bool = False) -> tuple[T5Layers, str]:
    """A step to which a head is still to be added, as `layers.headless_decoder`.

    Returns:
        The layers, in their graph, and the name of what the head reads: (R, 1, d_model), normed and scaled.
    """
    graph, dims = GraphBuilder("decoder_step"), weights.dims
    graph.declare(step_spec(dims, shortlist=shortlist))
    layers = _StepLayers(graph, weights, "decoder")
    residual = layers.embed(numbers=layers.positions.one_step())  # (R, 1, d_model)
    norms = [f"decoder.block.{layer}.layer.{part}.layer_norm.weight"
             for layer in range(dims.decoder_layers) for part in range(3)]  # fmt: skip
    normed = residual
    if weights.family.norm_first:  # then what stands behind each sum is the norm of the part that follows
        normed = layers.norm(residual, norms.pop(0))
        norms.append("decoder.final_layer_norm.weight")
    biases, mask, per_source = layers.biases.one_step(), layers.positions.visible_mask(), layers.rows_by_source()
    for layer in range(dims.decoder_layers):
        found = layers.attend_to_columns(normed, layer, biases[layer], mask)
        normed, residual = layers.add_and_norm(residual, *found, norms[3 * layer])
        found = layers.attend_to_source(normed, layer, per_source)
        normed, residual = layers.add_and_norm(residual, *found, norms[3 * layer + 1])
        found = layers.dense(normed, f"decoder.block.{layer}.layer.2.DenseReluDense")
        scale = weights.logit_scale if layer + 1 == dims.decoder_layers else 1.0
        normed, residual = layers.add_and_norm(residual, *found, norms[3 * layer + 2], scale)
    return layers, normed


class _StepLayers(T5Layers):
    """The parts of a decoder layer in fused operators, for R rows with one new token each."""

    def add_and_norm(self, residual: str, found: str, bias: str, norm: str, scale: float = 1.0) -> tuple[str, str]:
        """(the norm of the sum, the stream): the sum itself, where norms come first, else its norm.

        Args:
            residual: the stream so far.
            found: a product to be added to it.
            bias: of that product; empty if it has none.
            norm: the name of the norm's weight.
            scale: of what is normed.
        """
        graph, normed, total = self.graph, self.graph.fresh("normed"), self.graph.fresh("residual")
        weights, is_layer = [self.norm_weight(norm, scale)], self.weights.family.norm == "layer"
        if is_layer:
            weights.append(self.weight(self.weights.bias(norm)))
        if bias:
            weights.append(self.weight(bias))
        first = self.weights.family.norm_first
        graph.multi_output_op(
            f"Skip{'' if is_layer else 'Simplified'}LayerNormalization", [residual, found, *weights],
            [normed, "", "", total] if first else [normed], domain=ORT_DOMAIN, epsilon=self.weights.norm_epsilon,
        )  # fmt: skip
        return normed, total if first else normed

    def rows_by_source(self) -> str:
        """The shape (B, K, …) as which the queries of cross-attention are read, all behind in one axis."""
        sources = self.graph.op("Shape", "attention_mask", start=0, end=1)
        return self.graph.op("Concat", sources, self.graph.constant([-1]), axis=0)

    # Parts of a layer: what each found, and the name of a bias that is still to be added, or nothing.

    def attend_to_columns(self, normed: str, layer: int, bias: str, mask: str) -> tuple[str, str]:
        graph, dims = self.graph, self.weights.dims
        prefix, heads = f"decoder.block.{layer}.layer.0.SelfAttention", dims.decoder_heads[layer]
        names = [f"{prefix}.{part}.weight" for part in "qkv"]
        for name in names:
            self.require_heads(name, heads, axis=0)
        parts = self.at_once(normed, names)
        attended = graph.fresh("attended")
        graph.multi_output_op(
            "DecoderMaskedMultiHeadAttention",
            [*parts, mask, bias, f"past_key_{layer}", f"past_value_{layer}", "past_length"],
            [attended, f"present_key_{layer}", f"present_value_{layer}"],
            domain=ORT_DOMAIN, num_heads=heads, scale=1.0, past_present_share_buffer=1, mask_filter_value=float(LOWEST),
        )  # fmt: skip
        return self.output(attended, f"{prefix}.o.weight", heads)

    def attend_to_source(self, normed: str, layer: int, per_source: str) -> tuple[str, str]:
        graph, heads = self.graph, self.weights.dims.cross_heads[layer]
        prefix, width = f"decoder.block.{layer}.layer.1.EncDecAttention", heads * self.weights.dims.d_kv
        self.require_heads(f"{prefix}.q.weight", heads, axis=0)
        shape = graph.op("Concat", per_source, graph.constant([width]), axis=0)
        query = graph.op("Reshape", self.linear(normed, f"{prefix}.q.weight"), shape)  # (B, K, H * d)
        attended = graph.op(
            "MultiHeadAttention", query, f"cross_key_{layer}", f"cross_value_{layer}", "", "attention_mask",
            domain=ORT_DOMAIN, num_heads=heads, scale=1.0, mask_filter_value=float(LOWEST),
        )  # fmt: skip
        rows = graph.op("Reshape", attended, graph.constant([-1, 1, width]))
        return self.output(rows, f"{prefix}.o.weight", heads)

    def dense(self, normed: str, prefix: str) -> tuple[str, str]:
        if self.weights.dims.gated:
            gate, inner = self.at_once(normed, [f"{prefix}.wi_{part}.weight" for part in (0, 1)])
            inner = self.graph.op("Mul", self.activation(gate), inner)
        else:
            inner = self.activation(self.linear(normed, f"{prefix}.wi.weight"))
        return self.product(inner, f"{prefix}.wo.weight")

    def output(self, merged: str, name: str, heads: int) -> tuple[str, str]:
        self.require_heads(name, heads, axis=1)
        return self.product(merged, name)

    def product(self, hidden: str, name: str) -> tuple[str, str]:
        return self.graph.op("MatMul", hidden, self.transposed(name)), self.weights.bias(name) or ""

    def at_once(self, hidden: str, names: list[str]) -> list[str]:
        """Several products of one input as one, and its parts; a session joins the weights when it is opened."""
        graph, parts = self.graph, [self.graph.fresh("part") for _ in names]
        product = graph.op("MatMul", hidden, graph.op("Concat", *map(self.transposed, names), axis=1))
        if biases := [bias for name in names if (bias := self.weights.bias(name))]:
            product = graph.op("Add", product, graph.op("Concat", *map(self.weight, biases), axis=0))
        graph.multi_output_op("Split", [product], parts, axis=-1, num_outputs=len(parts))
        return parts
