"""Change a finished graph: find its products with weights, put other nodes in their place, and check what came out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

import onnx

from t5accel.errors import ExportError
from t5accel.graphs.builder import GraphBuilder


@dataclass(frozen=True)
class Product:
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


def products(graph: GraphBuilder) -> list[Product]:
    """All MatMul nodes whose second operand is a weight, its transpose, or several joined, in order.

    >>> import numpy as np
    >>> graph = GraphBuilder("two")
    >>> hidden = graph.op("MatMul", graph.input("x", "float32", ["N", 2]), graph.weight("w", np.eye(2)))
    >>> _ = graph.op("MatMul", hidden, graph.op("Transpose", graph.weight("v", np.eye(2)), perm=[1, 0]))
    >>> [(product.weight, product.transposed) for product in products(graph)]
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
            found.append(Product(node, weights, transposed=kind == "Transpose"))
    return found


def rebuild(graph: GraphBuilder, change: Callable[[GraphBuilder, onnx.NodeProto], bool]) -> None:
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
    check(graph)


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


def check(graph: GraphBuilder) -> None:
    """Raise ``ExportError`` unless every value is made once, before it is read, and each node is one of its set.

    Nodes of ONNX Runtime's own set are checked by ONNX Runtime alone, when it opens the graph.

    >>> graph = GraphBuilder("late")
    >>> _ = graph.op("Neg", "y", output="z")
    >>> _ = graph.op("Neg", graph.input("x", "float32", ["N"]), output="y")
    >>> graph.output("z", "float32", ["N"])
    >>> check(graph)
    Traceback (most recent call last):
    t5accel.errors.ExportError: Graph late: Neg:z reads y, which is made after it.
    >>> sort(graph)
    >>> check(graph)
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


def sort(graph: GraphBuilder) -> None:
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
