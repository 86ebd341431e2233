"""A decoder step in ONNX Runtime's fused operators, on KV buffers that stay in place.

`layers` writes a step in standard operators, some forty nodes a layer, whose ``Concat`` copies the KV cache at every
step. Here a layer is a dozen nodes and copies nothing, for one new token in fp32, at one column for all rows.
"""

from __future__ import annotations

from t5accel.graphs.builder import ORT_DOMAIN, GraphBuilder
from t5accel.graphs.contract import step_spec
from t5accel.graphs.layers import LOWEST, T5Layers
from t5accel.graphs.weights import T5Weights


def step_graph(weights: T5Weights) -> GraphBuilder:
    """One new token for each row, the graph of `contract.step_spec`."""
    layers, hidden = headless_step(weights)
    layers.head(hidden, output="logits")
    return layers.graph


def headless_step(weights: T5Weights, *, shortlist: bool = False) -> tuple[T5Layers, str]:
    """The step's layers in their graph, and the input of its head: (R, 1, d_model), normed and scaled."""
    graph, dims = GraphBuilder("decoder_step"), weights.dims
    graph.declare(step_spec(dims, shortlist=shortlist))
    layers = _StepLayers(graph, weights, "decoder")
    residual = layers.embed(numbers=layers.positions.one_step())  # (R, 1, d_model)
    norms = [
        f"decoder.block.{layer}.layer.{part}.layer_norm.weight"
        for layer in range(dims.decoder_layers)
        for part in range(3)
    ]
    normed = residual
    if weights.family.norm_first:  # then the norm behind each sum is that of the part that follows
        normed = layers.norm(residual, norms.pop(0))
        norms.append("decoder.final_layer_norm.weight")
    biases = layers.biases.one_step()
    mask = layers.positions.visible_mask()
    sources = graph.op("Shape", "attention_mask", start=0, end=1)
    # The shape (B, K, …) of cross-attention's queries; the last axis is left open.
    per_source = graph.op("Concat", sources, graph.constant([-1]), axis=0)
    for layer in range(dims.decoder_layers):
        attended = layers.self_attention_step(normed, layer, biases[layer], mask)
        normed, residual = layers.add_and_norm(residual, *attended, norms[3 * layer])
        attended = layers.cross_attention_step(normed, layer, per_source)
        normed, residual = layers.add_and_norm(residual, *attended, norms[3 * layer + 1])
        dense = layers.dense(normed, f"decoder.block.{layer}.layer.2.DenseReluDense")
        scale = weights.logit_scale if layer + 1 == dims.decoder_layers else 1.0
        normed, residual = layers.add_and_norm(residual, *dense, norms[3 * layer + 2], scale)
    return layers, normed


class _StepLayers(T5Layers):
    """The parts of a decoder layer in fused operators, for R rows with one new token each."""

    # Each part returns its product and the name of the bias that `add_and_norm` adds to it, or "".

    def add_and_norm(self, residual: str, product: str, bias: str, norm: str, scale: float = 1.0) -> tuple[str, str]:
        """residual + product + bias, normed and scaled, and the new residual: the sum, or its norm (post-norm)."""
        graph, normed, total = self.graph, self.graph.fresh("normed"), self.graph.fresh("residual")
        weights, is_layer = [self.norm_weight(norm, scale)], self.weights.family.norm == "layer"
        if is_layer:
            weights.append(self.weight(self.weights.bias(norm)))
        if bias:
            weights.append(self.weight(bias))
        first = self.weights.family.norm_first
        graph.multi_output_op(
            f"Skip{'' if is_layer else 'Simplified'}LayerNormalization",
            [residual, product, *weights],
            [normed, "", "", total] if first else [normed],
            domain=ORT_DOMAIN,
            epsilon=self.weights.norm_epsilon,
        )
        return normed, total if first else normed

    def self_attention_step(self, normed: str, layer: int, bias: str, mask: str) -> tuple[str, str]:
        graph, heads = self.graph, self.weights.dims.decoder_heads[layer]
        prefix = f"decoder.block.{layer}.layer.0.SelfAttention"
        names = [f"{prefix}.{part}.weight" for part in "qkv"]
        for name in names:
            self.require_heads(name, heads, axis=0)
        query, key, value = self.joint_linear(normed, names)
        attended = graph.fresh("attended")
        # The new key and value are written into a column of the buffers, which are bound as input and output alike.
        graph.multi_output_op(
            "DecoderMaskedMultiHeadAttention",
            [query, key, value, mask, bias, f"past_key_{layer}", f"past_value_{layer}", "past_length"],
            [attended, f"present_key_{layer}", f"present_value_{layer}"],
            domain=ORT_DOMAIN,
            num_heads=heads,
            scale=1.0,
            past_present_share_buffer=1,
            mask_filter_value=float(LOWEST),
        )
        return self.projection(attended, f"{prefix}.o.weight", heads)

    def cross_attention_step(self, normed: str, layer: int, per_source: str) -> tuple[str, str]:
        graph, heads = self.graph, self.weights.dims.cross_heads[layer]
        prefix, width = f"decoder.block.{layer}.layer.1.EncDecAttention", heads * self.weights.dims.d_kv
        self.require_heads(f"{prefix}.q.weight", heads, axis=0)
        shape = graph.op("Concat", per_source, graph.constant([width]), axis=0)
        # The rows of a source are queries of one attention over its keys and values, which are not repeated.
        query = graph.op("Reshape", self.linear(normed, f"{prefix}.q.weight"), shape)  # (B, K, H * d)
        attended = graph.op(
            "MultiHeadAttention",
            *(query, f"cross_key_{layer}", f"cross_value_{layer}", "", "attention_mask"),
            domain=ORT_DOMAIN,
            num_heads=heads,
            scale=1.0,
            mask_filter_value=float(LOWEST),
        )
        rows = graph.op("Reshape", attended, graph.constant([-1, 1, width]))
        return self.projection(rows, f"{prefix}.o.weight", heads)

    def dense(self, normed: str, prefix: str) -> tuple[str, str]:
        if self.weights.dims.gated:
            gate, inner = self.joint_linear(normed, [f"{prefix}.wi_{part}.weight" for part in (0, 1)])
            inner = self.graph.op("Mul", self.activation(gate), inner)
        else:
            inner = self.activation(self.linear(normed, f"{prefix}.wi.weight"))
        return self.product(inner, f"{prefix}.wo.weight")

    def projection(self, merged: str, name: str, heads: int) -> tuple[str, str]:
        self.require_heads(name, heads, axis=1)
        return self.product(merged, name)

    def product(self, hidden: str, name: str) -> tuple[str, str]:
        return self.graph.op("MatMul", hidden, self.transposed(name)), self.weights.bias(name) or ""

    def joint_linear(self, hidden: str, names: list[str]) -> list[str]:
        """Several linear layers of one input as one product, split again; a session joins the weights once."""
        graph, parts = self.graph, [self.graph.fresh("part") for _ in names]
        product = graph.op("MatMul", hidden, graph.op("Concat", *map(self.transposed, names), axis=1))
        if biases := [bias for name in names if (bias := self.weights.bias(name))]:
            product = graph.op("Add", product, graph.op("Concat", *map(self.weight, biases), axis=0))
        graph.multi_output_op("Split", [product], parts, axis=-1, num_outputs=len(parts))
        return parts
