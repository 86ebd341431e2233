"""Saved graphs: counting their operators, checking where their weights lie, and reading them back to change them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Container, Iterable, Iterator
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


def count_nodes(path: str | os.PathLike[str]) -> Counter[str]:
    """How many nodes of each operator a graph has, those of its subgraphs included. No weights beside it are read.

    An operator outside the standard's main set has the name of its set in front: ``com.microsoft.FusedMatMul``.

    Raises:
        ExportError: the file is no graph.
        InputError: ``path`` is no path.

    >>> from tempfile import TemporaryDirectory
    >>> graph = GraphBuilder("double")
    >>> graph.output(graph.op("Add", graph.input("x", "float32", ["N"]), "x", output="y"), "float32", ["N"])
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder) / "double.onnx"
    ...     _ = path.write_bytes(graph.proto().SerializeToString())
    ...     count_nodes(path), contrib_operators(path)
    (Counter({'Add': 1}), [])
    """
    return Counter(_name(node) for node in _all_nodes(_load(path).graph.node))


def contrib_operators(path: str | os.PathLike[str]) -> list[str]:
    """Those operators of a graph, named as in `count_nodes`, that no ONNX standard has: ONNX Runtime's own.

    The standard is asked about each. A name does not tell: ONNX Runtime puts ``SimplifiedLayerNormalization``, which is
    its own, into the standard's main set.

    Raises:
        ExportError: the file is no graph.
        InputError: ``path`` is no path.
    """
    model = _load(path)
    versions = {entry.domain: entry.version for entry in model.opset_import}
    nodes = {(node.op_type, versions.get(node.domain, 1), node.domain): node for node in _all_nodes(model.graph.node)}
    return sorted(_name(node) for key, node in nodes.items() if not onnx.defs.has(*key))


def check_external_data(path: str | os.PathLike[str], files: Container[str] | None = None) -> None:
    """Refuse a graph that names weights anywhere but in a file beside it.

    A graph may name any file as that of its weights, ``../secret`` or a link to it, and what is converted from that
    graph would hold the content.

    Args:
        path: the graph. Its weights are not read.
        files: those that it may name; by default any.

    Raises:
        ExportError: the file is no graph; or it names another path than that of a regular file in the graph's folder,
            or one that is not among ``files``.
        InputError: ``path`` is no path.
    """
    _check_external_data(as_graph_path(path), _load(path), files)


def reread(paths: Iterable[Path], files: Container[str] | None = None) -> dict[str, GraphBuilder]:
    """Saved graphs, by the names of their files, as `folder.write_export` takes them.

    What lies beside a graph is mapped into memory, and has to stay until the graphs are written. Sets of operators that
    a graph names and does not use, as ONNX Runtime does, are left out: other runtimes would ask for them.

    Args:
        paths: the graphs.
        files: as in `check_external_data`.

    Raises:
        ExportError: as in `check_external_data`; or a weight is damaged.
    """
    graphs: dict[str, GraphBuilder] = {}
    seen: dict[str, np.ndarray] = {}
    for path in paths:
        model = _load(path)
        _check_external_data(path, model, files)
        weights = {tensor.name: _array(tensor, path) for tensor in model.graph.initializer}
        # An optimiser makes up names, which may mean another weight in another graph. In the file that both share, a
        # name means one. (Small weights stay inside the graphs.)
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
            opsets={entry.domain: entry.version for entry in model.opset_import if entry.domain in used},
            nodes=list(model.graph.node),
            inputs=list(model.graph.input),
            outputs=list(model.graph.output),
            _taken=frozenset({*weights, *(output for node in model.graph.node for output in node.output)}),
        )
    return graphs


def as_graph_path(value: Any) -> Path:
    """``value`` as the path of a graph; raises ``InputError`` for what no file system takes as a name."""
    try:
        return as_folder(value)
    except InputError as error:
        raise InputError(f"path is {value!r}; give the path of an ONNX graph as text or a Path.") from error


def _load(path: Any) -> onnx.ModelProto:
    """Without the weights that lie beside it."""
    file = as_graph_path(path)
    check_file(file, ExportError, "Give the path of an ONNX graph.")
    try:
        model = onnx.load(file, load_external_data=False)
    except Exception as error:  # what is no graph is an error of protobuf, which is not for us to import
        raise ExportError(f"{file} cannot be read as an ONNX graph: {error}") from error
    if not model.HasField("graph"):
        raise ExportError(f"{file} holds no ONNX graph.")
    return model


def _all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """These and those of their subgraphs: the branches of an If, the body of a Loop."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _all_nodes(graph.node)


def _name(node: onnx.NodeProto) -> str:
    return ".".join(filter(None, (node.domain, node.op_type)))


def _check_external_data(path: Path, model: onnx.ModelProto, files: Container[str] | None) -> None:
    for tensor in _constants(model.graph):  # `reread` would not carry their content along
        if tensor.data_location == TensorProto.EXTERNAL:
            raise ExportError(f"{path} has a constant, {tensor.name!r:.80}, in another file: keep it in the graph.")
    for tensor in model.graph.initializer:
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        name = _place(tensor).get("location", "")
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
            for inner in (attribute.g, *attribute.graphs):
                yield from inner.initializer
                yield from _constants(inner)
    for tensor in sparse:
        yield from (tensor.values, tensor.indices)


def _place(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def _array(tensor: TensorProto, path: Path) -> np.ndarray:
    try:
        if tensor.data_location != TensorProto.EXTERNAL:
            return numpy_helper.to_array(tensor)
        place = _place(tensor)
        dtype, shape = helper.tensor_dtype_to_np_dtype(tensor.data_type), tuple(tensor.dims)
        return np.memmap(path.parent / place["location"], dtype, "r", int(place.get("offset", 0)), shape)
    except (ValueError, TypeError, LookupError, OverflowError, OSError) as error:
        raise ExportError(f"The weight {tensor.name!r:.80} of {path} cannot be read: {error}.") from error
