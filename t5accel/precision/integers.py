"""Store weights as integers, and compute with ONNX Runtime's integer operators.

`quantize_blocks` and `quantize_channels` round a weight, with a scale for each block or for each output channel;
`IntegerRewriter` replaces a graph's float products and look-ups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
from onnx import TensorProto

from t5accel.errors import InputError
from t5accel.graphs.builder import ORT_DOMAIN, GraphBuilder
from t5accel.graphs.rewriting import WeightMatMul, find_matmuls, rewrite_nodes
from t5accel.precision.recipes import EMBEDDING, Recipe, Scheme, group_of

SHRUNK = np.linspace(1.0, 0.75, 11, dtype=np.float32)  # factors of the scale that reaches a block's largest weight
ROWS_AT_ONCE = 2048  # bounds the memory of intermediate results
# By the name of a product's input: the lowest and the highest number that calibration has seen of it.
Ranges = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class QuantizedBlocks:
    """A weight (N, K) with a scale for each block of one output, as MatMulNBits takes it.

    ``integers`` are (N, blocks, bytes of a block) uint8, two of 4 bits in a byte, the first one low, with the zero
    point 2 ** (bits - 1). ``scales`` are (N, blocks) float32.
    """

    integers: np.ndarray
    scales: np.ndarray
    bits: int
    block_size: int

    def floats(self) -> np.ndarray:
        """Dequantised, (N, K); wider where the last block was padded with zeros."""
        codes = self.integers
        if self.bits == 4:
            codes = np.stack([codes & 15, codes >> 4], axis=-1)
        centred = codes.reshape(*self.scales.shape, self.block_size).astype(np.float32) - (1 << (self.bits - 1))
        return (centred * self.scales[:, :, None]).reshape(len(self.scales), -1)


def quantize_blocks(weight: np.ndarray, bits: int, block_size: int) -> QuantizedBlocks:
    """Round (N, K) float32 weights in blocks of ``block_size`` along K.

    >>> blocks = quantize_blocks(np.array([[-8.0, 7.0, 0.5, 0.0]], np.float32), bits=4, block_size=16)
    >>> blocks.floats()[0, :4].tolist(), blocks.scales.tolist()
    ([-8.0, 7.0, 0.0, 0.0], [[1.0]])
    """
    _check(weight)
    outputs, inputs = weight.shape
    count, half = -(-inputs // block_size), 1 << (bits - 1)
    integers = np.empty((outputs, count, block_size * bits // 8), dtype=np.uint8)
    scales = np.empty((outputs, count), dtype=np.float32)
    for first in range(0, outputs, ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        part = np.zeros((len(weight[rows]), count * block_size), dtype=np.float32)
        part[:, :inputs] = weight[rows]
        part = part.reshape(len(part), count, block_size)
        # Levels reach from -half to half - 1. A negative scale gives the largest weight, whatever its sign, the level
        # that has no opposite.
        extreme = np.take_along_axis(part, np.abs(part).argmax(axis=2)[:, :, None], axis=2)
        scale = extreme / np.float32(-half)
        best, lost = scale, np.full(scale.shape, np.inf, dtype=np.float32)
        # In 4 bits, reaching a single large weight wastes levels: take the scale with the least squared error.
        for share in SHRUNK if bits == 4 else SHRUNK[:1]:
            tried = scale * share
            with np.errstate(over="ignore"):  # where squares overflow 32 bits, the first scale is taken
                error = np.square(_levels(part, tried, half) * tried - part).sum(axis=2, keepdims=True)
            best, lost = np.where(error < lost, tried, best), np.minimum(error, lost)
        codes = (_levels(part, best, half) + half).astype(np.uint8)
        integers[rows] = codes if bits == 8 else codes[:, :, ::2] | codes[:, :, 1::2] << 4
        scales[rows] = best[:, :, 0]
    return QuantizedBlocks(integers, scales, bits, block_size)


@dataclass(frozen=True)
class QuantizedChannels:
    """A weight (K, N) in int8, as MatMulInteger takes it: times ``scales``, (N,) or (), float32."""

    integers: np.ndarray
    scales: np.ndarray


def quantize_channels(weight: np.ndarray, *, per_channel: bool = True, reduce_range: bool = False) -> QuantizedChannels:
    """Round (K, N) float32 weights to -127 … 127, with ``reduce_range`` to -64 … 64."""
    _check(weight)
    largest = np.abs(weight).max(axis=0 if per_channel else None, initial=0)
    levels = 64 if reduce_range else 127
    scales = np.where(largest > 0, largest / np.float32(levels), 1).astype(np.float32)
    scales = np.where(scales > 0, scales, 1).astype(np.float32)  # weights so tiny that their scale underflows
    return QuantizedChannels(np.rint(weight / scales).clip(-levels, levels).astype(np.int8), scales)


def _levels(part: np.ndarray, scale: np.ndarray, half: int) -> np.ndarray:
    """(N, blocks, block_size) weights, (N, blocks, 1) scales -> integers as floats, -half … half - 1."""
    divisor = np.where(scale == 0, np.float32(1), scale)
    return np.rint(part / divisor).clip(-half, half - 1)


def _check(weight: np.ndarray) -> None:
    if weight.ndim != 2 or not weight.size or not np.isfinite(weight).all():
        raise InputError(f"A weight must be a matrix of finite numbers to be quantised, got shape {weight.shape}.")


# Graphs


@dataclass
class IntegerRewriter:
    """Rewrites the graphs of one export by a recipe; a weight that several nodes read is quantised and stored once.

    ``ranges``, by graph, are needed for "static" products.
    """

    recipe: Recipe
    ranges: Mapping[str, Ranges] = field(default_factory=dict)
    _arrays: dict[str, np.ndarray] = field(default_factory=dict)  # by name in the graphs
    _inputs: dict[str, tuple[str, ...]] = field(default_factory=dict)  # dynamically quantised, of the current graph

    def rewrite(self, graph: GraphBuilder, stack: str) -> dict[str, str]:
        """Change one graph, ``"encoder"`` or ``"decoder"``, in place.

        Returns the group of each weight that is now in integers, by its old name. Raises ``InputError`` for a weight
        that is not finite and for a "static" product without a range.
        """
        by_node = {product.node.name: product for product in find_matmuls(graph)}
        changed: dict[str, str] = {}
        self._inputs = {}

        def change(graph: GraphBuilder, node: onnx.NodeProto) -> bool:
            if node.name in by_node:
                product = by_node[node.name]
                group = group_of(product.weight)
                scheme = self.recipe.scheme(group, stack) if group else None
                if scheme is not None:
                    self._multiply(graph, product, scheme, self.ranges.get(stack, {}))
                    changed.update(dict.fromkeys(product.weights, group))
                return scheme is not None
            if node.op_type != "Gather" or not _is_table(graph, node):
                return False
            scheme = self.recipe.scheme(EMBEDDING, stack)
            if scheme is not None:
                self._look_up(graph, node, scheme)
                changed.setdefault(node.input[0], EMBEDDING)
            return scheme is not None

        rewrite_nodes(graph, change)
        return changed

    def _multiply(self, graph: GraphBuilder, product: WeightMatMul, scheme: Scheme, ranges: Ranges) -> None:
        output = product.node.output[0]
        if scheme.method == "weight-only":
            self._multiply_blocks(graph, product, output, scheme)
        elif len(product.weights) == 1 or (scheme.method != "static" and scheme.per_channel):
            self._multiply_channels(graph, product, output, scheme, ranges)
        else:  # joined weights with a scale for each: one product a weight
            parts = [graph.fresh("part") for _ in product.weights]
            for weight, part in zip(product.weights, parts, strict=True):
                self._multiply_channels(graph, replace(product, weights=(weight,)), part, scheme, ranges)
            graph.op("Concat", *parts, axis=-1, output=output)

    def _multiply_channels(
        self, graph: GraphBuilder, product: WeightMatMul, output: str, scheme: Scheme, ranges: Ranges
    ) -> None:
        hidden = product.node.input[0]
        stored = []
        arrays = [graph.weights[name] for name in product.weights]
        for name, array in zip(product.weights, arrays, strict=True):
            stored.append(self._channels(graph, name, array.T if product.transposed else array, scheme))
        integers = _joined(graph, [integers for integers, _ in stored], 1)
        scales = _joined(graph, [scales for _, scales in stored], 0)
        if scheme.method == "static":
            if hidden not in ranges:
                raise InputError(f"ranges must hold {hidden}, which {product.weight} multiplies in a static scheme.")
            scale, zero = _affine(*ranges[hidden])
            parts = hidden, graph.constant(scale), graph.constant(zero)
            rounded = graph.op("DequantizeLinear", graph.op("QuantizeLinear", *parts), *parts[1:])
            # Where ONNX Runtime makes the weights uint8 (see `open_session`), it needs a zero point for each scale, and
            # no other node may read it.
            width = sum(array.shape[0 if product.transposed else 1] for array in arrays)
            zeros = graph.weight(graph.fresh("zeros"), np.zeros(width if scheme.per_channel else (), np.int8))
            weight = graph.op("DequantizeLinear", integers, scales, zeros, axis=1)
            graph.op("MatMul", rounded, weight, output=output)
            return
        if scheme.method == "per-token":
            numbers, scale, zero = self._per_token(graph, hidden)
            one = graph.constant(np.float32(1))
            product_of = graph.op("MatMulIntegerToFloat", numbers, integers, one, scales, zero, domain=ORT_DOMAIN)
            graph.op("Mul", product_of, scale, output=output)
            return
        if hidden not in self._inputs:  # once for queries, keys and values
            self._inputs[hidden] = tuple(f"{hidden}.{part}" for part in ("integers", "scale", "zero"))
            graph.multi_output_op("DynamicQuantizeLinear", [hidden], self._inputs[hidden])
        numbers, scale, zero = self._inputs[hidden]
        sums = graph.op("MatMulInteger", numbers, integers, zero)
        # ONNX Runtime fuses these with the operator above.
        graph.op("Mul", graph.op("Cast", sums, to=TensorProto.FLOAT), graph.op("Mul", scale, scales), output=output)

    def _per_token(self, graph: GraphBuilder, hidden: str) -> tuple[str, ...]:
        """(…, K) floats as uint8 around 128, the scale of each token (…, 1), and the zero point."""
        if hidden not in self._inputs:
            largest = graph.op("ReduceMax", graph.op("Abs", hidden), graph.constant([-1]), keepdims=1)
            scale = graph.op("Mul", largest, graph.constant(np.float32(1 / 127)))
            scale = graph.op("Max", scale, graph.constant(np.finfo(np.float32).tiny))  # of a token that is all zeros
            zero = graph.constant(np.uint8(128))
            numbers = graph.op("QuantizeLinear", graph.op("Div", hidden, scale), graph.constant(np.float32(1)), zero)
            self._inputs[hidden] = numbers, scale, zero
        return self._inputs[hidden]

    def _multiply_blocks(self, graph: GraphBuilder, product: WeightMatMul, output: str, scheme: Scheme) -> None:
        arrays = [graph.weights[name] for name in product.weights]
        rows = [array if product.transposed else array.T for array in arrays]  # (N, K)
        stored = [self._blocks(graph, *named, scheme) for named in zip(product.weights, rows, strict=True)]
        integers, scales = (_joined(graph, parts, 0) for parts in zip(*stored, strict=True))
        graph.op(
            "MatMulNBits",
            *(product.node.input[0], integers, scales),
            output=output,
            domain=ORT_DOMAIN,
            N=sum(map(len, rows)),
            K=rows[0].shape[1],
            bits=scheme.bits,
            block_size=scheme.block_size,
            accuracy_level=scheme.accuracy_level,
        )

    def _look_up(self, graph: GraphBuilder, node: onnx.NodeProto, scheme: Scheme) -> None:
        """Embedding rows in blocks, stored once with a tied head."""
        table, axis = graph.weights[node.input[0]], graph.constant([-1])
        integers, scales = self._blocks(graph, node.input[0], table, scheme)
        blocks = graph.op(
            "GatherBlockQuantized",
            *(integers, node.input[1], graph.op("Unsqueeze", scales, graph.constant([2]))),
            domain=ORT_DOMAIN,
            gather_axis=0,
            quantize_axis=2,
            block_size=scheme.block_size,
            bits=scheme.bits,
        )
        shape = graph.op("Concat", graph.op("Shape", node.input[1]), axis, axis=0)
        width = table.shape[1]
        if width % scheme.block_size == 0:
            graph.op("Reshape", blocks, shape, output=node.output[0])
        else:  # cut off the padding of the last block
            rows = graph.op("Reshape", blocks, shape)
            graph.op("Slice", rows, graph.constant([0]), graph.constant([width]), axis, output=node.output[0])

    def _blocks(self, graph: GraphBuilder, name: str, rows: np.ndarray, scheme: Scheme) -> tuple[str, str]:
        stem = f"{name}.{scheme.bits}bits.{scheme.block_size}"
        if f"{stem}.scales" not in self._arrays:
            blocks = quantize_blocks(np.asarray(rows), scheme.bits, scheme.block_size)
            self._arrays |= {f"{stem}.blocks": blocks.integers, f"{stem}.scales": blocks.scales}
        return self._weights(graph, f"{stem}.blocks", f"{stem}.scales")

    def _channels(self, graph: GraphBuilder, name: str, weight: np.ndarray, scheme: Scheme) -> tuple[str, str]:
        stem = f"{name}.8bits{'.channels' * scheme.per_channel}{'.reduced' * scheme.reduce_range}"
        if f"{stem}.scales" not in self._arrays:
            channels = quantize_channels(
                np.asarray(weight), per_channel=scheme.per_channel, reduce_range=scheme.reduce_range
            )
            self._arrays |= {f"{stem}.integers": channels.integers, f"{stem}.scales": channels.scales}
        return self._weights(graph, f"{stem}.integers", f"{stem}.scales")

    def _weights(self, graph: GraphBuilder, *names: str) -> tuple[str, str]:
        integers, scales = (graph.weight(name, self._arrays[name]) for name in names)
        return integers, scales


def _joined(graph: GraphBuilder, names: Sequence[str], axis: int) -> str:
    return names[0] if len(names) == 1 else graph.op("Concat", *names, axis=axis)


def _is_table(graph: GraphBuilder, node: onnx.NodeProto) -> bool:
    """Whether a Gather looks up token embeddings."""
    name = node.input[0]
    return name in graph.weights and (name == "shared.weight" or name.endswith("embed_tokens.weight"))


def _affine(low: float, high: float) -> tuple[np.float32, np.uint8]:
    """Scale and zero point with which 8 bits cover a range; 0 is exact."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / 255 or 1.0
    return np.float32(scale), np.uint8(round(-low / scale))
