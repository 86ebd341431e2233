"""Change a finished graph: find its products with weights, put other nodes in their place, and check what came out."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
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

# Saved graphs: counting their operators, checking where their weights lie, and reading them back to change them.


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


def load_graphs(paths: Iterable[Path], files: Container[str] | None = None) -> dict[str, GraphBuilder]:
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
    for tensor in _constants(model.graph):  # `load_graphs` would not carry their content along
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


@dataclass(frozen=True)
class WeightMatMul:
    """A node that multiplies by a weight, or by several side by side.

    Attributes:
        node: the MatMul.
        weights: the names of the arrays, by transformers' names where they are ours.
        transposed: the array is (N, K), and the product is with its transpose.
    """

    node: onnx.NodeProto
    weights: tuple[str, ...]
    transposed: bool = False

    @property
    def weight(self) -> str:
        """The only one, or the first of those that are joined: they all belong to one group."""
        return self.weights[0]


def find_matmuls(graph: GraphBuilder) -> list[WeightMatMul]:
    """All MatMul nodes whose second operand is a weight, its transpose, or several joined, in order.

    >>> import numpy as np
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


def rewrite_nodes(graph: GraphBuilder, change: Callable[[GraphBuilder, onnx.NodeProto], bool]) -> None:
    """Go through a graph node by node; ``change`` may add others in the place of one.

    Args:
        graph: is changed in place. Nodes and weights that nothing reads any more are dropped, and it is `checked`.
        change: gets the graph so far, to which it may add nodes, and the next node; returns whether it has replaced
            it. The new nodes have to yield the old one's outputs, by their names.

    Raises:
        ExportError: what came out is no valid graph.
    """
    before, graph.nodes = graph.nodes, []
    for node in before:
        if not change(graph, node):
            graph.nodes.append(node)
    drop_unused(graph)
    check_graph(graph)


def drop_unused(graph: GraphBuilder) -> None:
    """Drop nodes whose outputs nobody reads, and weights likewise."""
    wanted = {output.name for output in graph.outputs}
    kept = []
    for node in reversed(graph.nodes):
        if wanted.intersection(node.output):
            kept.append(node)
            wanted.update(_reads(node))
    graph.nodes = kept[::-1]
    graph.weights = {name: array for name, array in graph.weights.items() if name in wanted}
    graph.opsets = {domain: version for domain, version in graph.opsets.items() if not domain or _uses(graph, domain)}


def check_graph(graph: GraphBuilder) -> None:
    """Raise ``ExportError`` unless every value is made once, before it is read, and each node is one of its set.

    Nodes of ONNX Runtime's own set are checked by ONNX Runtime alone, when it opens the graph.

    >>> graph = GraphBuilder("late")
    >>> _ = graph.op("Neg", "y", output="z")
    >>> _ = graph.op("Neg", graph.input("x", "float32", ["N"]), output="y")
    >>> graph.output("z", "float32", ["N"])
    >>> check_graph(graph)
    Traceback (most recent call last):
    t5accel.errors.ExportError: Graph late: Neg:z reads y, which is made after it.
    >>> sort_nodes(graph)
    >>> check_graph(graph)
    """
    made = {value.name for value in graph.inputs} | graph.weights.keys() | {""}
    times = Counter(output for node in graph.nodes for output in node.output)
    for node in graph.nodes:
        for name in _reads(node):
            if name not in made:
                when = "after it" if name in times else "nowhere"
                raise ExportError(f"Graph {graph.name}: {node.name} reads {name}, which is made {when}.")
        for name in filter(None, node.output):
            if name in made:
                raise ExportError(f"Graph {graph.name}: {name} is made twice, the second time by {node.name}.")
            made.add(name)
    if missing := [output.name for output in graph.outputs if output.name not in made]:
        raise ExportError(f"Graph {graph.name}: nothing makes its output {missing[0]}.")
    try:
        # As if all weights lay elsewhere: their values do not matter, and a model of more than 2 GB cannot be checked.
        onnx.checker.check_model(graph.skeleton())
    except onnx.checker.ValidationError as error:
        raise ExportError(f"Graph {graph.name} is not valid: {error}") from error


def sort_nodes(graph: GraphBuilder) -> None:
    """Put the nodes in an order in which each stands after those that it reads; raises ``ExportError`` for a circle."""
    makers = {output: number for number, node in enumerate(graph.nodes) for output in node.output}
    needs = {
        number: [makers[name] for name in _reads(node) if name in makers] for number, node in enumerate(graph.nodes)
    }
    try:
        graph.nodes = [graph.nodes[number] for number in TopologicalSorter(needs).static_order()]
    except CycleError as error:
        circle = ", ".join(graph.nodes[number].name for number in error.args[1])
        raise ExportError(f"Graph {graph.name}: {circle} wait for each other.") from error


def _reads(node: onnx.NodeProto) -> Iterable[str]:
    """What a node needs, the branches of an If included."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            inside = {output for inner in graph.node for output in inner.output}
            for inner in graph.node:
                yield from (name for name in _reads(inner) if name not in inside)


def _uses(graph: GraphBuilder, domain: str) -> bool:
    return any(node.domain == domain for node in graph.nodes)
