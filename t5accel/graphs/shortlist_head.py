"""A decoder with a second output head in 8 bits, which shortlists the likeliest tokens.

At batch 1 a step takes as long as reading its weights, four tenths of which are the head's in t5-small. A copy in 8
bits is a quarter of that; `decoding.certified_argmax` proves which of the shortlisted tokens is the likeliest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from t5accel.errors import InputError
from t5accel.graphs.builder import GraphBuilder
from t5accel.graphs.contract import SHORTLIST_EXTRAS, GraphSpec, shortlist_spec, step_spec
from t5accel.graphs.export_folder import ALIGNMENT
from t5accel.graphs.fused_step import headless_step
from t5accel.graphs.layers import T5Layers, headless_decoder
from t5accel.graphs.rewriting import drop_unused
from t5accel.graphs.weights import T5Weights

# 7 of the 8 bits. CPUs without VNNI add products of two neighbours in 16 bits, and saturate: with hidden states of 8
# bits, 2 * 255 * 64 is the most that fits. An approximation that depends on the CPU could not be certified.
LEVELS = 64
WIDEST = 1 << 16  # the largest d_model whose sums of products fit into 32 bits, with and without the zero point
SMALLEST_BYTES = 32 << 20  # a smaller head is read quickly as it is
ROWS_AT_ONCE = 4096  # bounds the memory of quantisation, 8 times that of the rows


@dataclass(frozen=True)
class QuantizedHead:
    """The head in integers: row i is ``scales[i] * integers[:, i]``."""

    integers: np.ndarray  # (d_model, V) int8, as a product needs it
    scales: np.ndarray  # (V,) float32
    largest_row: float  # largest Euclidean norm of a quantised row
    largest_error: float  # largest Euclidean norm of a row's rounding error

    @property
    def bounds(self) -> dict[str, float]:
        """Arguments of `decoding.certified_argmax.OutputHead`."""
        return {"largest_row": self.largest_row, "largest_error": self.largest_error}


def quantize_head(rows: np.ndarray) -> QuantizedHead:
    """Round each row of a head (V, d_model) float32 to integers of at most ``LEVELS``.

    Raises ``InputError`` for a head that is too wide, or not finite.

    >>> head = quantize_head(np.array([[1, -0.5], [0, 0], [3, 4]], dtype=np.float32))
    >>> head.integers.T.tolist(), head.scales.tolist()
    ([[64, -32], [0, 0], [48, 64]], [0.015625, 1.0, 0.0625])
    >>> round(head.largest_row, 5), round(head.largest_error, 5)
    (5.0, 0.0)
    """
    if rows.shape[1] > WIDEST:
        raise InputError(f"d_model must be at most {WIDEST} for a shortlist, got {rows.shape[1]}. Leave it out.")
    integers, scales = np.empty(rows.shape[::-1], dtype=np.int8), np.ones(len(rows), dtype=np.float32)
    largest = np.zeros(2)
    for first in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        exact = rows[part].astype(np.float64)
        peaks = np.abs(exact).max(axis=1, initial=0)
        if not np.isfinite(peaks).all():
            raise InputError("The head must be finite for a shortlist, got infinity or NaN. Leave it out.")
        scale = (peaks / LEVELS).astype(np.float32)
        scale[scale == 0] = 1  # zeros, and rows so tiny that their scale underflows
        whole = np.rint(exact / scale[:, None]).clip(-LEVELS, LEVELS)
        near = whole * scale[:, None].astype(np.float64)
        integers[:, part], scales[part] = whole.T, scale
        largest = np.maximum(largest, [np.linalg.norm(array, axis=1).max() for array in (near, exact - near)])
    # Bounds measured on the result, in float64 and rounded up, hold for any weights.
    return QuantizedHead(integers, scales, *(float(norm) for norm in largest * (1 + 2.0**-20)))


def shortlist_graph(weights: T5Weights, head: QuantizedHead, *, step: bool = False) -> GraphBuilder:
    """The decoder with an ``If`` between both heads, in standard operators or, with ``step``, as the fused step."""
    if step:
        spec = step_spec(weights.dims, shortlist=True)
        layers, hidden = headless_step(weights, shortlist=True)
    else:
        spec = shortlist_spec(weights.dims)
        layers, hidden = headless_decoder("decoder_shortlist", weights, spec)
    add_heads(layers, hidden, spec, head)
    return layers.graph


def add_heads(layers: T5Layers, hidden: str, spec: GraphSpec, head: QuantizedHead) -> None:
    """Add both heads: the outputs of ``spec`` in front of the KV cache, computed from ``hidden`` (…, T, d_model)."""
    graph = layers.graph
    outputs = spec.outputs[: 1 + len(SHORTLIST_EXTRAS)]
    empty = {tensor.name: (0, 0, *tensor.shape[2:]) for tensor in outputs[1:]}
    positions = len(outputs[0].shape) - 2
    # Outside its branch: inside, ONNX Runtime would compute the transpose ahead as well, and never free it.
    table = layers.head_weight(by_rows=True)
    exact, near = graph.branch("exact"), graph.branch("near")
    layers.logits(exact, "MatMul", hidden, table, output="exact_logits")
    for name, shape in empty.items():
        exact.op("Identity", exact.constant(np.zeros(shape, dtype=np.float32)), output=f"exact_{name}")

    last = near.op("Gather", hidden, near.constant([-1]), axis=positions, output="near_hidden")
    integers, scale, zero = quantized_hidden = "integers", "scale", "zero"
    near.multi_output_op("DynamicQuantizeLinear", [last], quantized_hidden)
    lost = near.op("Sub", last, near.op("DequantizeLinear", *quantized_hidden))
    for value, name in ((last, "near_norm"), (lost, "near_error")):
        near.op("ReduceL2", value, near.constant([-1]), keepdims=0, output=name)
    # ONNX Runtime fuses the next four nodes into one, which never writes the integers.
    sums = near.op("MatMulInteger", integers, near.weight("shortlist.integers", head.integers), zero)
    scales = near.op("Mul", scale, near.weight("shortlist.scales", head.scales))
    layers.logits(near, "Mul", near.op("Cast", sums, to=TensorProto.FLOAT), scales, output="near_logits")

    for tensor in outputs:
        near.output(f"near_{tensor.name}", tensor.dtype, tensor.shape)
        exact.output(f"exact_{tensor.name}", tensor.dtype, empty.get(tensor.name, tensor.shape))
    graph.if_else("exact", exact, near, [tensor.name for tensor in outputs])


def drop_shortlist(graph: GraphBuilder) -> None:
    """Undo `add_heads`, leaving the exact logits."""
    (choice,) = (node for node in graph.nodes if node.op_type == "If")
    (exact,) = (branch.g for branch in choice.attribute if branch.name == "then_branch")
    graph.nodes.remove(choice)
    for node in exact.node:
        if node.op_type != "Identity":  # the product and its bias
            graph.op(node.op_type, *node.input, output=node.output[0].removeprefix("exact_"))
    graph.inputs = [tensor for tensor in graph.inputs if tensor.name != "exact"]
    graph.outputs = [tensor for tensor in graph.outputs if tensor.name not in SHORTLIST_EXTRAS]
    drop_unused(graph)


def maybe_quantize_head(weights: T5Weights, wanted: bool | None) -> QuantizedHead | None:
    """The quantised head if ``wanted``; for ``None``, if it is worthwhile and possible.

    Raises ``InputError`` where a wanted head, or its bias, is too small to be mapped from a file.
    """
    if wanted is not None and not isinstance(wanted, bool):
        raise InputError(f"shortlist must be True, False, or None for where it pays, got {wanted!r:.80}.")
    if wanted is False:
        return None
    parts = [weights.array(name) for name in (weights.head, weights.head_bias) if name]
    rows, size = parts[0], min(part.nbytes for part in parts)
    if wanted and size < ALIGNMENT:
        what = "head" if rows.nbytes == size else "bias"
        raise InputError(f"A {what} of {size} bytes cannot be mapped from a file: leave the shortlist out.")
    if not wanted and (rows.nbytes < SMALLEST_BYTES or size < ALIGNMENT or rows.shape[1] > WIDEST):
        return None
    return quantize_head(rows) if wanted or all(np.isfinite(part).all() for part in parts) else None
