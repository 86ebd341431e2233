"""fp16 for the graphs of a T5, except where its numbers are too large: found by a probe, and recorded.

fp16 ends at 65,504. T5 was trained in bfloat16, which reaches as far as fp32, and its residual stream grows from layer
to layer: what ``wo`` yields, and the sums that go into the norms, pass that end in published checkpoints. There begins
infinity, the norm divides it by itself, and all that follows is NaN. So these are computed in fp32, whatever a probe
says, and so is whatever else a probe has seen near the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import numpy as np
import onnx
from onnx import TensorProto

from t5accel.errors import InputError
from t5accel.graphs.builder import GraphBuilder
from t5accel.graphs.manifest import Manifest
from t5accel.graphs.rewriting import check_graph, drop_unused, find_matmuls
from t5accel.precision.calibration import CalibrationSample, collect_ranges, max_magnitudes
from t5accel.precision.recipes import Recipe, as_recipe, group_of
from t5accel.precision.source_export import Fp32Export

LARGEST = float(np.finfo(np.float16).max)  # 65,504
MARGIN = 8.0  # other inputs than the probe's may be larger
# Of a norm, with the sum in front of them and that inside; the last one is a whole norm.
_BEFORE_NORM = ("Pow", "ReduceMean", "Sqrt", "Div", "LayerNormalization")


def nodes_in_fp32(graph: GraphBuilder, largest: Mapping[str, float] | None = None) -> list[str]:
    """The names of the nodes that have to be computed in fp32, in the order of the graph.

    Args:
        graph: in fp32.
        largest: of the graph's values the largest magnitude that a probe has seen (`probe.largest`).

    >>> graph = GraphBuilder("one")
    >>> weight = graph.weight("w", np.ones((8, 8), np.float32))
    >>> hidden = graph.op("MatMul", graph.input("x", "float32", ["N", 8]), weight)
    >>> _ = graph.op("Relu", hidden)
    >>> nodes_in_fp32(graph, {hidden: 70_000.0})
    ['MatMul:matmul_0', 'Relu:relu_0']
    """
    too_large = {name for name, value in (largest or {}).items() if not value * MARGIN < LARGEST}
    wo = {p.node.name: p.node.output[0] for p in find_matmuls(graph) if (group_of(p.weight) or "").endswith(".wo")}
    normed = {name for node in graph.nodes if node.op_type in _BEFORE_NORM for name in (*node.input, *node.output)}
    always = {node.name for node in graph.nodes if node.op_type in _BEFORE_NORM} | wo.keys()
    always |= {node.name for node in graph.nodes if node.op_type == "Add" and normed.intersection(node.output)}
    # What wo yields may get a bias before it is summed.
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
    naive: bool = False,
    overwrite: bool = False,
) -> Manifest:
    """Write a copy of an export in fp16; its manifest names the nodes that are computed in fp32, as ``"in_fp32"``.

    On a GPU that halves what is stored, read and moved. On a CPU ONNX Runtime computes in fp32 between casts where it
    has no fp16 arithmetic: as correct, half as large on disk, and not faster.

    Args:
        folder: an export in fp32 that is not optimised.
        out: takes the copy, by the rules of `export.export_model`: there whole or not at all, and kept if it is there.
        recipe: with ``floats`` "float16"; its ``kept`` groups are computed in fp32, too.
        examples: to probe (`probe`); without any, what is known of T5 decides alone.
        naive: convert everything, as a general converter does: to see what becomes of it.
        overwrite: replace another export that is in ``out``.

    Raises:
        ExportError: there is no export, it is damaged, or ``out`` is taken or cannot be written; nothing is left of the
            attempt.
        InputError: another argument is wrong.

    >>> from tempfile import TemporaryDirectory
    >>> from t5accel.graphs.export import export_model
    >>> with TemporaryDirectory() as folder:
    ...     before = export_model("mini", f"{folder}/fp32", external_threshold_bytes=0)
    ...     after = export_fp16(f"{folder}/fp32", f"{folder}/fp16")
    >>> round(after.size_bytes / before.size_bytes, 1), len(after.recipe["in_fp32"]) > 100
    (0.5, True)
    """
    source, recipe = Fp32Export.read(folder), as_recipe(recipe)
    if recipe.dtype != "float16" or recipe.integers:
        raise InputError(f"Recipe {recipe.name} is not one of fp16 alone: give one with dtype='float16', no integers.")
    target, examples = source.target(out), list(examples)
    seen = collect_ranges(folder, examples) if examples else []
    graphs, in_fp32 = source.graphs(), {}
    for stack, graph in graphs.items():
        groups = {p.node.name for p in find_matmuls(graph) if group_of(p.weight) in recipe.kept}
        needed = [] if naive else nodes_in_fp32(graph, max_magnitudes(seen, stack))
        in_fp32[stack] = sorted({*needed, *groups})
        convert_graph_fp16(graph, in_fp32[stack])
    nodes = [f"{stack} {name}" for stack, names in in_fp32.items() for name in names]
    notes = {"in_fp32": nodes, "probed": bool(examples), "gated": False}
    return source.write(target, graphs, recipe, notes, overwrite=overwrite)


def convert_graph_fp16(graph: GraphBuilder, in_fp32: Iterable[str] = ()) -> None:
    """Change a graph in place: floats become fp16, with casts around the nodes that stay.

    Weights are stored in fp16 everywhere, those of nodes in fp32 with a cast behind them, so that bytes halve. What
    lies beyond the end of fp16 is set to the end: of the weights, if any, and of what masks attention.

    Args:
        graph: in fp32. Its float inputs and outputs become fp16, too, all but ``logits``.
        in_fp32: the names of the nodes that are computed in fp32.

    Raises:
        ExportError: what came out is no valid graph.

    >>> graph = GraphBuilder("one")
    >>> hidden = graph.op("Mul", graph.input("x", "float32", ["N"]), graph.constant(np.float32(3e38)))
    >>> graph.output(graph.op("Neg", hidden, output="y"), "float32", ["N"])
    >>> convert_graph_fp16(graph, ["Neg:y"])
    >>> [node.op_type for node in graph.nodes], [array.tolist() for array in graph.weights.values()]
    (['Mul', 'Cast', 'Neg', 'Cast'], [65504.0])
    """
    _Fp16Converter(graph, frozenset(in_fp32)).run()


class _Fp16Converter:
    """One graph while it changes: which float value there is in which type."""

    def __init__(self, graph: GraphBuilder, in_fp32: frozenset[str]):
        self.graph, self.in_fp32 = graph, in_fp32
        inferred = onnx.shape_inference.infer_shapes(graph.skeleton()).graph
        values = (*inferred.value_info, *inferred.input, *inferred.output)
        self.floats = {value.name for value in values if value.type.tensor_type.elem_type == TensorProto.FLOAT}
        self.arrays = dict(graph.weights)
        self.floats |= {name for name, array in self.arrays.items() if array.dtype == np.float32}
        self.names: dict[tuple[str, int], str] = {}  # of a float value in fp32 or fp16

    def run(self) -> None:
        graph = self.graph
        before, graph.nodes = graph.nodes, []
        for value in graph.inputs:
            if value.name in self.floats:
                value.type.tensor_type.elem_type = TensorProto.FLOAT16
                self.names[value.name, TensorProto.FLOAT16] = value.name
        outputs = {value.name for value in graph.outputs}
        for value in graph.outputs:
            if value.name in self.floats and value.name != "logits":
                value.type.tensor_type.elem_type = TensorProto.FLOAT16
        types = {value.name: value.type.tensor_type.elem_type for value in graph.outputs}
        for node in before:
            self._convert(node, {name: types[name] for name in node.output if name in outputs & self.floats})
        drop_unused(graph)
        check_graph(graph)

    def _convert(self, node: onnx.NodeProto, declared: Mapping[str, int]) -> None:
        kind = TensorProto.FLOAT if node.name in self.in_fp32 else TensorProto.FLOAT16
        new = onnx.NodeProto()
        new.CopyFrom(node)
        new.input[:] = [self._as(name, kind) if name in self.floats else name for name in node.input]
        for attribute in new.attribute:
            if new.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = kind
        later = []
        for number, name in enumerate(node.output):
            if name not in self.floats:
                continue
            self.names[name, kind] = name
            if name in declared and declared[name] != kind:
                new.output[number] = self.names[name, kind] = f"{name}.computed"
                self.names[name, declared[name]] = name
                later.append((new.output[number], name, declared[name]))
        self.graph.nodes.append(new)
        for computed, name, wanted in later:
            self.graph.op("Cast", computed, output=name, to=wanted)

    def _as(self, name: str, kind: int) -> str:
        """The value of that name in one type, by a cast if it is not there yet."""
        if (name, kind) not in self.names:
            if name in self.arrays and (name, TensorProto.FLOAT16) not in self.names:
                half = self.arrays[name].clip(-LARGEST, LARGEST).astype(np.float16)
                self.names[name, TensorProto.FLOAT16] = self.graph.weight(f"{name}.fp16", half)
            if (name, kind) not in self.names:
                other = TensorProto.FLOAT + TensorProto.FLOAT16 - kind
                self.names[name, kind] = self.graph.op("Cast", self.names[name, other], to=kind)
        return self.names[name, kind]
