"""The decoder with a second head of 8 bits, from whose near logits a short list of likely tokens is drawn.

At batch 1 a step takes as long as its weights take to be read, and of those of t5-small's shape four in ten are the
head's: 66 MB, to find the one largest logit. A copy of the head in 8 bits is a quarter of that. It tells which few
tokens can be the likeliest, and `decoding.certified_argmax` proves which one is.
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
WIDEST = 1 << 16  # d_model: below, a sum of all products fits into 32 bits, with and without the zero point's share
SMALLEST_BYTES = 32 << 20  # a head of less is quickly read as it is
ROWS_AT_ONCE = 4096  # of the head, while it is quantised: what is computed with takes 8 times its place


@dataclass(frozen=True)
class QuantizedHead:
    """The head in integers, one scale for each row: row i is ``scales[i] * integers[:, i]``.

    Attributes:
        integers: (d_model, V) int8, as a product needs it.
        scales: (V,) float32.
        largest_row: the largest Euclidean norm of a row of the quantised head.
        largest_error: the largest one of what was lost of a row.
    """

    integers: np.ndarray
    scales: np.ndarray
    largest_row: float
    largest_error: float

    @property
    def bounds(self) -> dict[str, float]:
        """What `decoding.certified_argmax.OutputHead` has to know about it."""
        return {"largest_row": self.largest_row, "largest_error": self.largest_error}


def quantize_head(rows: np.ndarray) -> QuantizedHead:
    """Round each row of a head (V, d_model) float32 to integers of at most ``LEVELS``.

    The bounds are not those of ideal rounding. They are measured on what came out, in float64, and rounded up: so they
    hold whatever the weights are.

    Raises:
        InputError: the head is wider than sums in integers allow, or holds what is no finite number.

    >>> head = quantize_head(np.array([[1, -0.5], [0, 0], [3, 4]], dtype=np.float32))
    >>> head.integers.T.tolist(), head.scales.tolist()
    ([[64, -32], [0, 0], [48, 64]], [0.015625, 1.0, 0.0625])
    >>> round(head.largest_row, 5), round(head.largest_error, 5)
    (5.0, 0.0)
    """
    if rows.shape[1] > WIDEST:
        raise InputError(f"A shortlist needs d_model of at most {WIDEST}; this model's is {rows.shape[1]}.")
    integers, scales = np.empty(rows.shape[::-1], dtype=np.int8), np.ones(len(rows), dtype=np.float32)
    largest = np.zeros(2)
    for first in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        exact = rows[part].astype(np.float64)
        peaks = np.abs(exact).max(axis=1, initial=0)
        if not np.isfinite(peaks).all():
            raise InputError("The model's head holds infinity or NaN, of which there is no shortlist: leave it out.")
        scale = (peaks / LEVELS).astype(np.float32)
        scale[scale == 0] = 1  # of zeros, and of a row so tiny that 32 bits have no scale for it
        whole = np.rint(exact / scale[:, None]).clip(-LEVELS, LEVELS)
        near = whole * scale[:, None].astype(np.float64)
        integers[:, part], scales[part] = whole.T, scale
        largest = np.maximum(largest, [np.linalg.norm(array, axis=1).max() for array in (near, exact - near)])
    return QuantizedHead(integers, scales, *(float(norm) for norm in largest * (1 + 2.0**-20)))


def shortlist_graph(weights: T5Weights, head: QuantizedHead, *, step: bool = False) -> GraphBuilder:
    """The decoder's layers, stored once with those of ``decoder.onnx``, and an ``If`` between the two heads.

    All operators are those of the standard, unless it is the fused ``step`` (`step.step_graph`) that has both heads.
    ONNX Runtime makes one of the last four, which never writes the integers.

    >>> from t5accel.graphs.export import t5_weights
    >>> from t5accel.models.random_init import random_t5
    >>> weights = t5_weights(random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32)))
    >>> graph = shortlist_graph(weights, quantize_head(weights.array(weights.head)))
    >>> [node.op_type for node in graph.proto().graph.node][-3:]
    ['Mul', 'Transpose', 'If']
    """
    if step:
        spec = step_spec(weights.dims, shortlist=True)
        layers, hidden = headless_step(weights, shortlist=True)
    else:
        spec = shortlist_spec(weights.dims)
        layers, hidden = headless_decoder("decoder_shortlist", weights, spec)
    add_heads(layers, hidden, spec, head)
    return layers.graph


def add_heads(layers: T5Layers, hidden: str, spec: GraphSpec, head: QuantizedHead) -> None:
    """The outputs that stand before the history in ``contract.shortlist_spec``, or in that of a step with a shortlist.

    Args:
        layers: of a graph that has the inputs of ``spec``.
        hidden: (…, T, d_model), what the head reads.
        spec: of the graph.
        head: in integers.
    """
    graph = layers.graph
    outputs = spec.outputs[: 1 + len(SHORTLIST_EXTRAS)]
    empty = {tensor.name: (0, 0, *tensor.shape[2:]) for tensor in outputs[1:]}
    positions = len(outputs[0].shape) - 2
    # Outside of its branch: in there ONNX Runtime would compute the transpose ahead, too, and never let go of it.
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
    sums = near.op("MatMulInteger", integers, near.weight("shortlist.integers", head.integers), zero)
    scales = near.op("Mul", scale, near.weight("shortlist.scales", head.scales))
    layers.logits(near, "Mul", near.op("Cast", sums, to=TensorProto.FLOAT), scales, output="near_logits")

    for tensor in outputs:
        near.output(f"near_{tensor.name}", tensor.dtype, tensor.shape)
        exact.output(f"exact_{tensor.name}", tensor.dtype, empty.get(tensor.name, tensor.shape))
    graph.if_else("exact", exact, near, [tensor.name for tensor in outputs])


def drop_shortlist(graph: GraphBuilder) -> None:
    """Undo `add_heads`: only the exact logits are left, and what belongs to the others goes.

    >>> from t5accel.graphs.export import t5_weights
    >>> from t5accel.models.random_init import random_t5
    >>> weights = t5_weights(random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32)))
    >>> graph = shortlist_graph(weights, quantize_head(weights.array(weights.head)), step=True)
    >>> drop_shortlist(graph)
    >>> graph.nodes[-1].op_type, graph.inputs[-1].name, [output.name for output in graph.outputs][:2]
    ('MatMul', 'cross_value_0', ['logits', 'present_key_0'])
    """
    (choice,) = (node for node in graph.nodes if node.op_type == "If")
    (exact,) = (branch.g for branch in choice.attribute if branch.name == "then_branch")
    graph.nodes.remove(choice)
    for node in exact.node:
        if node.op_type != "Identity":  # the product, and its bias
            graph.op(node.op_type, *node.input, output=node.output[0].removeprefix("exact_"))
    graph.inputs = [tensor for tensor in graph.inputs if tensor.name != "exact"]
    graph.outputs = [tensor for tensor in graph.outputs if tensor.name not in SHORTLIST_EXTRAS]
    drop_unused(graph)


def maybe_quantize_head(weights: T5Weights, wanted: bool | None) -> QuantizedHead | None:
    """The quantised head of a model if it is ``wanted``; for ``None``, if it pays and can be had.

    Raises:
        InputError: ``wanted`` is something else; or it is true, and the head is so small that it lies inside the
            graphs, as may its bias; or as `quantized`.

    >>> from types import SimpleNamespace
    >>> rows = np.ones((300, 8), np.float32)
    >>> maybe_quantize_head(SimpleNamespace(head="lm_head.weight", head_bias=None, array=lambda name: rows), None)
    """
    if wanted is not None and not isinstance(wanted, bool):
        raise InputError(f"shortlist is {wanted!r:.80}; give True, False, or None for where it pays.")
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
