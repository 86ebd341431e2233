"""Put integers in the place of a graph's weights: products and look-ups by a recipe, in ONNX Runtime's operators.

Everything here takes a finished graph apart, so it works on whatever graph has products with weights in it.
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
from t5accel.precision.integers import quantize_blocks, quantize_channels
from t5accel.precision.recipes import EMBEDDING, Recipe, Scheme, group_of

# By the name of what is multiplied: the lowest and the highest number that calibration has seen of it.
Ranges = Mapping[str, tuple[float, float]]


@dataclass
class IntegerRewriter:
    """Rewrites the graphs of one export by a recipe. A weight that several nodes read is quantised and stored once.

    Args:
        recipe: which parts, and how.
        ranges: by graph, for "static" products.

    >>> graph = GraphBuilder("decoder")
    >>> weight = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
    >>> product = graph.op("MatMul", graph.input("x", "float32", ["N", 32]), graph.weight("lm_head.weight.T", weight))
    >>> graph.output(product, "float32", ["N", 16])
    >>> changed = IntegerRewriter(Recipe("one", head=Scheme(block_size=32))).rewrite(graph, "decoder")
    >>> [node.op_type for node in graph.nodes], changed
    (['MatMulNBits'], {'lm_head.weight.T': 'lm_head'})
    """

    recipe: Recipe
    ranges: Mapping[str, Ranges] = field(default_factory=dict)
    _arrays: dict[str, np.ndarray] = field(default_factory=dict)  # by name in the graphs

    def rewrite(self, graph: GraphBuilder, stack: str) -> dict[str, str]:
        """Change one graph in place.

        Args:
            graph: the encoder's or the decoder's.
            stack: which of them, ``"encoder"`` or ``"decoder"``.

        Returns:
            The group of each weight that is now in integers, by its old name.

        Raises:
            ExportError: what came out is no valid graph.
            InputError: a weight holds what is no finite number; a "static" product was not calibrated.
        """
        by_node = {product.node.name: product for product in find_matmuls(graph)}
        changed: dict[str, str] = {}
        quantized: dict[str, tuple[str, ...]] = {}  # by the name of what is multiplied

        def change(graph: GraphBuilder, node: onnx.NodeProto) -> bool:
            if node.name in by_node:
                product = by_node[node.name]
                group = group_of(product.weight)
                scheme = self.recipe.scheme(group, stack) if group else None
                if scheme is None:
                    return False
                self._multiply(graph, product, scheme, self.ranges.get(stack, {}), quantized)
                changed.update(dict.fromkeys(product.weights, group))
                return True
            if node.op_type == "Gather" and _is_table(graph, node):
                scheme = self.recipe.scheme(EMBEDDING, stack)
                if scheme is None:
                    return False
                self._look_up(graph, node, scheme)
                changed.setdefault(node.input[0], EMBEDDING)
                return True
            return False

        rewrite_nodes(graph, change)
        return changed

    def _multiply(
        self, graph: GraphBuilder, product: WeightMatMul, scheme: Scheme, ranges: Ranges,
        quantized: dict[str, tuple[str, ...]],
    ) -> None:  # fmt: skip
        output = product.node.output[0]
        joined = scheme.method == "weight-only" or (scheme.method == "dynamic" and scheme.per_channel)
        if len(product.weights) > 1 and not joined:  # a scale for each
            parts = [replace(product, weights=(name,)) for name in product.weights]
            made = [graph.fresh("part") for _ in parts]
            for part, name in zip(parts, made, strict=True):
                self._product(graph, part, name, scheme, ranges, quantized)
            graph.op("Concat", *made, axis=-1, output=output)
        else:
            self._product(graph, product, output, scheme, ranges, quantized)

    def _product(
        self, graph: GraphBuilder, product: WeightMatMul, output: str, scheme: Scheme, ranges: Ranges,
        quantized: dict[str, tuple[str, ...]],
    ) -> None:  # fmt: skip
        hidden = product.node.input[0]
        if scheme.method == "weight-only":
            self._in_blocks(graph, product, output, scheme)
            return
        arrays = [graph.weights[name] for name in product.weights]
        stored = [
            self._channels(graph, name, array.T if product.transposed else array, scheme)
            for name, array in zip(product.weights, arrays, strict=True)
        ]
        integers, scales = (
            _joined(graph, parts, axis) for parts, axis in zip(zip(*stored, strict=True), (1, 0), strict=True)
        )
        if scheme.method == "static":
            if hidden not in ranges:
                raise InputError(f"{product.weight} has a static scheme, and {hidden} was not calibrated.")
            scale, zero = _affine(*ranges[hidden])
            parts = hidden, graph.constant(scale), graph.constant(zero)
            near = graph.op("DequantizeLinear", graph.op("QuantizeLinear", *parts), *parts[1:])
            weight = graph.op("DequantizeLinear", integers, scales, axis=1)
            graph.op("MatMul", near, weight, output=output)
            return
        if hidden not in quantized:  # once for queries, keys and values
            quantized[hidden] = tuple(f"{hidden}.{part}" for part in ("integers", "scale", "zero"))
            graph.multi_output_op("DynamicQuantizeLinear", [hidden], quantized[hidden])
        numbers, scale, zero = quantized[hidden]
        sums = graph.op("MatMulInteger", numbers, integers, zero)
        # ONNX Runtime makes one operator of these, and of the one above.
        graph.op("Mul", graph.op("Cast", sums, to=TensorProto.FLOAT), graph.op("Mul", scale, scales), output=output)

    def _in_blocks(self, graph: GraphBuilder, product: WeightMatMul, output: str, scheme: Scheme) -> None:
        arrays = [graph.weights[name] for name in product.weights]
        rows = [array if product.transposed else array.T for array in arrays]  # (N, K)
        stored = [self._blocks(graph, *named, scheme) for named in zip(product.weights, rows, strict=True)]
        integers, scales = (_joined(graph, parts, 0) for parts in zip(*stored, strict=True))
        graph.op(
            "MatMulNBits", product.node.input[0], integers, scales, output=output, domain=ORT_DOMAIN,
            N=sum(map(len, rows)), K=rows[0].shape[1], bits=scheme.bits, block_size=scheme.block_size,
            accuracy_level=scheme.accuracy_level,
        )  # fmt: skip

    def _look_up(self, graph: GraphBuilder, node: onnx.NodeProto, scheme: Scheme) -> None:
        """Rows of a table in blocks. It is the array that `_in_blocks` makes of a tied head."""
        table, axis = graph.weights[node.input[0]], graph.constant([-1])
        integers, scales = self._blocks(graph, node.input[0], table, scheme)
        blocks = graph.op(
            "GatherBlockQuantized", integers, node.input[1], graph.op("Unsqueeze", scales, graph.constant([2])),
            domain=ORT_DOMAIN, gather_axis=0, quantize_axis=2, block_size=scheme.block_size, bits=scheme.bits,
        )  # fmt: skip
        joined = graph.op("Concat", graph.op("Shape", node.input[1]), axis, axis=0)
        width = table.shape[1]
        padded = width % scheme.block_size != 0
        rows = graph.op("Reshape", blocks, joined, output=None if padded else node.output[0])
        if padded:
            graph.op("Slice", rows, graph.constant([0]), graph.constant([width]), axis, output=node.output[0])

    def _blocks(self, graph: GraphBuilder, name: str, rows: np.ndarray, scheme: Scheme) -> tuple[str, str]:
        stem = f"{name}.{scheme.bits}bits.{scheme.block_size}"
        if f"{stem}.scales" not in self._arrays:
            blocks = quantize_blocks(rows, scheme.bits, scheme.block_size)
            self._arrays |= {f"{stem}.blocks": blocks.integers, f"{stem}.scales": blocks.scales}
        return self._weights(graph, f"{stem}.blocks", f"{stem}.scales")

    def _channels(self, graph: GraphBuilder, name: str, weight: np.ndarray, scheme: Scheme) -> tuple[str, str]:
        stem = f"{name}.8bits{'.channels' * scheme.per_channel}{'.reduced' * scheme.reduce_range}"
        if f"{stem}.scales" not in self._arrays:
            channels = quantize_channels(weight, per_channel=scheme.per_channel, reduce_range=scheme.reduce_range)
            self._arrays |= {f"{stem}.integers": channels.integers, f"{stem}.scales": channels.scales}
        return self._weights(graph, f"{stem}.integers", f"{stem}.scales")

    def _weights(self, graph: GraphBuilder, *names: str) -> tuple[str, str]:
        integers, scales = (graph.weight(name, self._arrays[name]) for name in names)
        return integers, scales


def _joined(graph: GraphBuilder, names: Sequence[str], axis: int) -> str:
    return names[0] if len(names) == 1 else graph.op("Concat", *names, axis=axis)


def _is_table(graph: GraphBuilder, node: onnx.NodeProto) -> bool:
    """Whether a Gather looks up embeddings."""
    name = node.input[0]
    return name in graph.weights and (name == "shared.weight" or name.endswith("embed_tokens.weight"))


def _affine(low: float, high: float) -> tuple[np.float32, np.uint8]:
    """Scale and zero point with which 8 bits cover a range; 0 is exact.

    >>> _affine(-1.0, 1.55)
    (np.float32(0.01), np.uint8(100))
    """
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / 255 or 1.0
    return np.float32(scale), np.uint8(round(-low / scale))
