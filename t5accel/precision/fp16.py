"""Convert an export to fp16, except the nodes whose numbers are too large for it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import numpy as np
import onnx
from onnx import TensorProto

from t5accel.errors import InputError
from t5accel.graphs.builder import GraphBuilder
from t5accel.graphs.manifest import Manifest
from t5accel.graphs.rewriting import find_matmuls, float_values, rewrite_nodes
from t5accel.models.families import GEMMAS
from t5accel.precision.calibration import CalibrationSample, collect_ranges
from t5accel.precision.recipes import Recipe, as_recipe, group_of
from t5accel.precision.source_export import Fp32Export

LARGEST = float(np.finfo(np.float16).max)  # 65,504
MASKED = 1e30  # constants beyond it hide tokens; no weight is as large
MARGIN = 8.0  # other inputs may give larger numbers than the calibration's
# The operators of T5's norm; the last one is a whole norm.
_BEFORE_NORM = ("Pow", "ReduceMean", "Sqrt", "Div", "LayerNormalization")


def nodes_in_fp32(graph: GraphBuilder, largest: Mapping[str, float] | None = None) -> list[str]:
    """The nodes of an fp32 graph that must stay in fp32, given the largest magnitude of its values."""
    # T5 was trained in bfloat16, which reaches as far as fp32, and its residual stream grows from layer to layer: in
    # published checkpoints wo's products and the sums that go into the norms exceed 65,504. Infinity begins there, the
    # norm divides it by itself, and the rest is NaN. So these stay in fp32 whatever calibration has seen.
    too_large = {name for name, value in (largest or {}).items() if not value * MARGIN < LARGEST}
    wo = {p.node.name: p.node.output[0] for p in find_matmuls(graph) if (group_of(p.weight) or "").endswith(".wo")}
    normed = {name for node in graph.nodes if node.op_type in _BEFORE_NORM for name in (*node.input, *node.output)}
    always = {node.name for node in graph.nodes if node.op_type in _BEFORE_NORM} | wo.keys()
    # The sum in front of a norm, and the one inside it.
    always |= {node.name for node in graph.nodes if node.op_type == "Add" and normed.intersection(node.output)}
    # wo's products may get a bias before they are summed.
    biased = (node for node in graph.nodes if node.op_type == "Add" and node.input[1] in graph.weights)
    always |= {node.name for node in biased if node.input[0] in wo.values()}
    return [
        node.name for node in graph.nodes if node.name in always or too_large.intersection((*node.input, *node.output))
    ]


def export_fp16(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    recipe: Recipe | str = "fp16",
    *,
    examples: Iterable[CalibrationSample] = (),
    overwrite: bool = False,
) -> Manifest:
    """Write a copy of an fp32 export in fp16; its manifest lists the nodes in fp32 as ``"in_fp32"``.

    Nodes known to overflow in T5, or seen to with ``examples``, stay in fp32. Where a CPU has no fp16 arithmetic, ONNX
    Runtime computes in fp32 between casts: correct, half the size on disk, and not faster. Raises ``ExportError`` if
    the export is missing or damaged, or ``out`` is taken or cannot be written, ``InputError`` for another recipe.
    """
    source, recipe = Fp32Export.read(folder), as_recipe(recipe)
    if recipe.dtype != "float16" or recipe.integers:
        raise InputError(f"recipe must have dtype='float16' and no integers, got {recipe.name}.")
    if (kind := source.manifest.family.get("model_type")) in GEMMAS:
        # Gemma's residual stream exceeds its range, and angles of positions its digits.
        raise InputError(f"fp16 is not for a {kind}, whose numbers exceed it: give fp32, int8 or int4.")
    target, examples = source.target(out), list(examples)
    seen = collect_ranges(folder, examples) if examples else []
    graphs, in_fp32 = source.graphs(), {}
    for stack, graph in graphs.items():
        largest = {entry.value: entry.max_abs for entry in seen if entry.graph == stack}
        in_fp32[stack] = sorted({*nodes_in_fp32(graph, largest)})
        convert_graph_fp16(graph, in_fp32[stack])
    nodes = [f"{stack} {name}" for stack, names in in_fp32.items() for name in names]
    notes = {"in_fp32": nodes, "probed": bool(examples), "gated": False}
    return source.write(target, graphs, recipe, notes, overwrite=overwrite)


def convert_graph_fp16(graph: GraphBuilder, in_fp32: Iterable[str] = ()) -> None:
    """Convert a graph in place to fp16, with casts around the nodes that stay ``in_fp32``.

    Float inputs and outputs become fp16, except ``logits``. All weights are stored in fp16; infinities, and constants
    that stand for them, become its largest numbers. Raises ``InputError`` for other weights beyond these.

    >>> graph = GraphBuilder("one")
    >>> hidden = graph.op("Mul", graph.input("x", "float32", ["N"]), graph.constant(np.float32(3e38)))
    >>> graph.output(graph.op("Neg", hidden, output="y"), "float32", ["N"])
    >>> convert_graph_fp16(graph, ["Neg:y"])
    >>> [node.op_type for node in graph.nodes], [array.tolist() for array in graph.weights.values()]
    (['Mul', 'Cast', 'Neg', 'Cast'], [65504.0])
    """
    rewrite_nodes(graph, _Fp16Converter(graph, frozenset(in_fp32)).convert)


class _Fp16Converter:
    """Tracks under which name each float value exists in fp32 and in fp16."""

    def __init__(self, graph: GraphBuilder, in_fp32: frozenset[str]):
        self.graph, self.in_fp32 = graph, in_fp32
        self.floats = float_values(graph)
        self.arrays = dict(graph.weights)
        self.names: dict[tuple[str, int], str] = {}  # by value and type
        self.declared: dict[str, int] = {}  # the types of float outputs
        for value in graph.inputs:
            if value.name in self.floats:
                value.type.tensor_type.elem_type = TensorProto.FLOAT16
                self.names[value.name, TensorProto.FLOAT16] = value.name
        for value in graph.outputs:
            if value.name in self.floats:
                if value.name != "logits":
                    value.type.tensor_type.elem_type = TensorProto.FLOAT16
                self.declared[value.name] = value.type.tensor_type.elem_type

    def convert(self, graph: GraphBuilder, node: onnx.NodeProto) -> bool:
        """Add a node in its type; for `rewrite_nodes`."""
        kind = TensorProto.FLOAT if node.name in self.in_fp32 else TensorProto.FLOAT16
        new = onnx.NodeProto()
        new.CopyFrom(node)
        new.input[:] = [self._as(name, kind) if name in self.floats else name for name in node.input]
        for attribute in new.attribute:
            if new.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = kind
        casts = []  # of outputs that are declared in the other type
        for number, name in enumerate(node.output):
            if name not in self.floats:
                continue
            self.names[name, kind] = name
            if self.declared.get(name, kind) != kind:
                new.output[number] = self.names[name, kind] = f"{name}.computed"
                self.names[name, self.declared[name]] = name
                casts.append((new.output[number], name, self.declared[name]))
        graph.nodes.append(new)
        for computed, name, wanted in casts:
            graph.op("Cast", computed, output=name, to=wanted)
        return True

    def _as(self, name: str, kind: int) -> str:
        """The name of a value in one type, cast if it does not exist yet."""
        if (name, kind) not in self.names:
            if name in self.arrays and (name, TensorProto.FLOAT16) not in self.names:
                array = self.arrays[name]
                size = np.abs(array)
                outside = size[(size > LARGEST) & (size < MASKED) | np.isnan(size)]
                if outside.size:
                    raise InputError(
                        f"{name} must lie within ±{LARGEST:g} for fp16, got {outside.max():g}. Give fp32 or int8."
                    )
                half = array.clip(-LARGEST, LARGEST).astype(np.float16)
                self.names[name, TensorProto.FLOAT16] = self.graph.weight(f"{name}.fp16", half)
            if (name, kind) not in self.names:
                other = TensorProto.FLOAT + TensorProto.FLOAT16 - kind
                self.names[name, kind] = self.graph.op("Cast", self.names[name, other], to=kind)
        return self.names[name, kind]
