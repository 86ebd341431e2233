"""Inspect, load, rewrite and check ONNX graphs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from t5accel.checks import check_file
from t5accel.errors import ExportError, InputError
from t5accel.graphs.builder import GraphBuilder
from t5accel.graphs.contract import as_folder
from t5accel.graphs.export_folder import ALIGNMENT

# Saved graphs


def count_nodes(path: str | os.PathLike[str]) -> Counter[str]:
    """Nodes of each operator in a graph file, subgraphs included; weights beside it are not read.

    Operators outside the standard's main set have their domain in front: ``com.microsoft.FusedMatMul``.
    """
    return Counter(_name(node) for node in _all_nodes(_load(path).graph.node))


def contrib_operators(path: str | os.PathLike[str]) -> list[str]:
    """Operators of a graph file that no ONNX standard has: ONNX Runtime's own."""
    # A name does not tell: ONNX Runtime puts its own SimplifiedLayerNormalization into the standard's main set.
    model = _load(path)
    versions = {entry.domain: entry.version for entry in model.opset_import}
    nodes = {(node.op_type, versions.get(node.domain, 1), node.domain): node for node in _all_nodes(model.graph.node)}
    return sorted(_name(node) for key, node in nodes.items() if not onnx.defs.has(*key))


def check_external_data(path: str | os.PathLike[str], files: Container[str] | None = None) -> None:
    """Refuse a graph file that keeps weights anywhere but in a regular file beside it, one of ``files`` if given."""
    _check_external_data(as_graph_path(path), _load(path), files)


def load_graphs(paths: Iterable[Path], files: Container[str] | None = None) -> dict[str, GraphBuilder]:
    """Saved graphs by file name, for `export_folder.write_export`; ``files`` as in `check_external_data`.

    Weights in files beside a graph are memory-mapped: keep the files until the graphs are written.
    """
    graphs: dict[str, GraphBuilder] = {}
    seen: dict[str, np.ndarray] = {}
    for path in paths:
        model = _load(path)
        _check_external_data(path, model, files)
        weights = {tensor.name: _array(tensor, path) for tensor in model.graph.initializer}
        # An optimiser's made-up name may mean another weight in another graph; in the weights file that graphs share,
        # a name means one. (Small weights stay inside the graphs.)
        renamed = {
            name: f"{path.stem}.{name}"
            for name, array in weights.items()
            if array.nbytes >= ALIGNMENT and name in seen and not np.array_equal(array, seen[name])
        }
        weights = {renamed.get(name, name): array for name, array in weights.items()}
        seen.update(weights)
        used = {""}
        for node in _all_nodes(model.graph.node):
            node.input[:] = [renamed.get(name, name) for name in node.input]
            used.add(node.domain)
        graphs[path.name] = GraphBuilder(
            model.graph.name,
            weights,
            # ONNX Runtime declares operator sets that it does not use, for which other runtimes would ask.
            opsets={entry.domain: entry.version for entry in model.opset_import if entry.domain in used},
            nodes=list(model.graph.node),
            inputs=list(model.graph.input),
            outputs=list(model.graph.output),
            _taken=frozenset({*weights, *(output for node in model.graph.node for output in node.output)}),
        )
    return graphs


def as_graph_path(value: Any) -> Path:
    """``value`` as the path of a graph file."""
    try:
        return as_folder(value)
    except InputError as error:
        raise InputError(f"path must be the path of an ONNX graph, got {value!r}.") from error


def _load(path: Any) -> onnx.ModelProto:
    """Without the weights that lie beside it."""
    file = as_graph_path(path)
    check_file(file, ExportError, "Give the path of an ONNX graph.")
    try:
        model = onnx.load(file, load_external_data=False)
    except Exception as error:  # protobuf's own, and protobuf is not ours to import
        raise ExportError(f"{file} cannot be read as an ONNX graph: {error}") from error
    if not model.HasField("graph"):
        raise ExportError(f"{file} holds no ONNX graph.")
    return model


def _all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes, and those of their subgraphs: the branches of an If, the body of a Loop."""
    for node in nodes:
        yield node
        for graph in _subgraphs(node):
            yield from _all_nodes(graph.node)


def _subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        yield from (attribute.g, *attribute.graphs)


def _name(node: onnx.NodeProto) -> str:
    return ".".join(filter(None, (node.domain, node.op_type)))


def _check_external_data(path: Path, model: onnx.ModelProto, files: Container[str] | None) -> None:
    # A graph may name any file, ../secret or a link to it, and a conversion of the graph would contain its content.
    for tensor in _constants(model.graph):  # `load_graphs` would not carry their content along
        if tensor.data_location == TensorProto.EXTERNAL:
            raise ExportError(f"{path} has a constant, {tensor.name!r:.80}, in another file: keep it in the graph.")
    for tensor in model.graph.initializer:
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        name = _location(tensor).get("location", "")
        plain = {PurePosixPath(name).name, PureWindowsPath(name).name} == {name} and name not in ("", "..")
        if not plain or "\0" in name or (files is not None and name not in files):
            raise ExportError(
                f"{path} names {name!r:.200} as the file of its weights, which is not a file of this export: make the "
                "export again from its model."
            )
        check_file(path.parent / name, ExportError)
        # In the cache of the model hub graphs and weights are links to files in one other folder.
        if (path.parent / name).resolve().parent not in (path.parent.resolve(), path.resolve().parent):
            raise ExportError(f"{path.parent / name} is a link out of its folder: put the file itself there.")


def _constants(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    """All of a graph's tensors but its initializers: in its nodes and subgraphs."""
    sparse = list(graph.sparse_initializer)
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            sparse += attribute.sparse_tensor, *attribute.sparse_tensors
        for inner in _subgraphs(node):
            yield from inner.initializer
            yield from _constants(inner)
    for tensor in sparse:
        yield from (tensor.values, tensor.indices)


def _location(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def _array(tensor: TensorProto, path: Path) -> np.ndarray:
    try:
        if tensor.data_location != TensorProto.EXTERNAL:
            return numpy_helper.to_array(tensor)
        place = _location(tensor)
        dtype, shape = helper.tensor_dtype_to_np_dtype(tensor.data_type), tuple(tensor.dims)
        return np.memmap(path.parent / place["location"], dtype, "r", int(place.get("offset", 0)), shape)
    except (ValueError, TypeError, LookupError, OverflowError, OSError) as error:
        raise ExportError(f"The weight {tensor.name!r:.80} of {path} cannot be read: {error}.") from error


# Rewriting


@dataclass(frozen=True)
class WeightMatMul:
    """A MatMul by one weight, or by several concatenated; ``transposed`` weights are stored as (N, K)."""

    node: onnx.NodeProto
    weights: tuple[str, ...]  # concatenated ones belong to one group
    transposed: bool = False

    @property
    def weight(self) -> str:
        return self.weights[0]


def find_matmuls(graph: GraphBuilder) -> list[WeightMatMul]:
    """All MatMul nodes whose second operand is a weight, its transpose, or several concatenated, in order.

    >>> graph = GraphBuilder("two")
    >>> hidden = graph.op("MatMul", graph.input("x", "float32", ["N", 2]), graph.weight("w", np.eye(2)))
    >>> _ = graph.op("MatMul", hidden, graph.op("Transpose", graph.weight("v", np.eye(2)), perm=[1, 0]))
    >>> [(product.weight, product.transposed) for product in find_matmuls(graph)]
    [('w', False), ('v', True)]
    """
    made_by = {output: node for node in graph.nodes for output in node.output}
    found = []
    for node in graph.nodes:
        if node.op_type != "MatMul":
            continue
        maker = made_by.get(node.input[1])
        kind = maker.op_type if maker is not None else None
        weights = tuple(maker.input) if kind in ("Transpose", "Concat") else (node.input[1],)
        if all(name in graph.weights and graph.weights[name].ndim == 2 for name in weights):
            found.append(WeightMatMul(node, weights, transposed=kind == "Transpose"))
    return found


def float_values(graph: GraphBuilder) -> set[str]:
    """The names of a graph's fp32 values, weights included, by shape inference."""
    inferred = onnx.shape_inference.infer_shapes(graph.skeleton()).graph
    values = (*inferred.value_info, *inferred.input, *inferred.output)
    found = {value.name for value in values if value.type.tensor_type.elem_type == TensorProto.FLOAT}
    return found | {name for name, array in graph.weights.items() if array.dtype == np.float32}


def rewrite_nodes(graph: GraphBuilder, change: Callable[[GraphBuilder, onnx.NodeProto], bool]) -> None:
    """Rewrite a graph in place, node by node; then drop unread nodes and weights, and check it.

    ``change`` gets the graph so far and the next node, and returns whether it has added nodes in its place,
    with its outputs' names.
    """
    before, graph.nodes = graph.nodes, []
    for node in before:
        if not change(graph, node):
            graph.nodes.append(node)
    drop_unused(graph)
    check_graph(graph)


def drop_unused(graph: GraphBuilder) -> None:
    """Drop nodes, weights and operator sets that nothing uses."""
    wanted = {output.name for output in graph.outputs}
    kept = []
    for node in reversed(graph.nodes):
        if wanted.intersection(node.output):
            kept.append(node)
            wanted.update(_reads(node))
    graph.nodes = kept[::-1]
    graph.weights = {name: array for name, array in graph.weights.items() if name in wanted}
    domains = {"", *(node.domain for node in graph.nodes)}
    graph.opsets = {domain: version for domain, version in graph.opsets.items() if domain in domains}


def check_graph(graph: GraphBuilder) -> None:
    """Raise ``ExportError`` unless ONNX's checker accepts the graph: every value is made once, before it is read."""
    try:
        # Of ONNX Runtime's own operators it knows only the names of values, and onnx 1.16 misses an output that
        # nothing makes: a session checks both when it opens the graph.
        # Without the weights: their values do not matter, and a model of more than 2 GB cannot be checked.
        onnx.checker.check_model(graph.skeleton())
    except onnx.checker.ValidationError as error:
        raise ExportError(f"Graph {graph.name} is not valid: {' '.join(str(error).split())}") from error


def _reads(node: onnx.NodeProto) -> Iterable[str]:
    """Names that a node reads, those that the branches of an If read from outside included."""
    yield from node.input
    for graph in _subgraphs(node):
        inside = {output for inner in graph.node for output in inner.output}
        for inner in graph.node:
            yield from (name for name in _reads(inner) if name not in inside)
