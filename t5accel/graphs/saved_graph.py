"""A graph read back from its file: its operators counted, and those told that are no standard's; its weights mapped."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from t5accel.errors import ExportError, InputError
from t5accel.graphs.build.builder import GraphBuilder
from t5accel.graphs.contract import as_folder
from t5accel.graphs.export.folder import ALIGNMENT


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


def reread(paths: Iterable[Path]) -> dict[str, GraphBuilder]:
    """Saved graphs, by the names of their files, as `folder.write_export` takes them.

    What lies beside a graph is mapped into memory, and has to stay until the graphs are written. Sets of operators that
    a graph names and does not use, as ONNX Runtime does, are left out: other runtimes would ask for them.

    Raises:
        ExportError: a file is no graph.
    """
    graphs: dict[str, GraphBuilder] = {}
    seen: dict[str, np.ndarray] = {}
    for path in paths:
        model = _load(path)
        weights = {tensor.name: _array(tensor, path.parent) for tensor in model.graph.initializer}
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


def _array(tensor: TensorProto, folder: Path) -> np.ndarray:
    if tensor.data_location != TensorProto.EXTERNAL:
        return numpy_helper.to_array(tensor)
    place = {entry.key: entry.value for entry in tensor.external_data}
    dtype, shape = helper.tensor_dtype_to_np_dtype(tensor.data_type), tuple(tensor.dims)
    return np.memmap(folder / place["location"], dtype, "r", int(place.get("offset", 0)), shape)
