"""Changing finished graphs: products are found, nodes replaced, unread ones dropped, and a broken graph refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from t5accel.errors import ExportError
from t5accel.graphs.builder import GraphBuilder
from t5accel.graphs.rewriting import WeightMatMul, check_graph, drop_unused, find_matmuls, rewrite_nodes

WEIGHT = np.array([[1, 2], [3, 4], [5, 7]], dtype=np.float32)  # (K, N) = (3, 2)
X = np.array([[1, -2, 0.5], [0, 3, 4]], dtype=np.float32)


def run(graph: GraphBuilder, **feeds: np.ndarray) -> list[np.ndarray]:
    """All outputs, by ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.add_session_config_entry("session.x64quantprecision", "1")  # as `open_session`
    session = onnxruntime.InferenceSession(
        graph.proto().SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, feeds)


def operators(graph: GraphBuilder) -> list[str]:
    return [node.op_type for node in graph.nodes]


def two_nodes(transposed: bool = False) -> GraphBuilder:
    """``z`` is minus ``x`` (N, 3) times a weight."""
    graph = GraphBuilder("two")
    x = graph.input("x", "float32", ["N", 3])
    stored = np.ascontiguousarray(WEIGHT.T) if transposed else WEIGHT
    weight = graph.weight("w", stored)
    y = graph.op("MatMul", x, graph.op("Transpose", weight, perm=[1, 0]) if transposed else weight, output="y")
    graph.output(graph.op("Neg", y, output="z"), "float32", ["N", 2])
    return graph


def branches() -> GraphBuilder:
    """``z`` (3,) is ``a + w`` if ``yes``, else ``-b``; ``a`` is twice ``x``, ``b`` its square, ``c`` for nobody."""
    graph = GraphBuilder("branches")
    x, yes = graph.input("x", "float32", [3]), graph.input("yes", "bool", [])
    graph.op("Add", x, x, output="a")
    graph.op("Mul", x, x, output="b")
    graph.op("Abs", "b", output="c")
    then, otherwise = graph.branch("then"), graph.branch("otherwise")
    then.output(then.op("Add", "a", then.weight("w", WEIGHT[:, 0]), output="z_then"), "float32", [3])
    otherwise.output(otherwise.op("Neg", "b", output="z_otherwise"), "float32", [3])
    graph.if_else(yes, then, otherwise, ["z"])
    graph.output("z", "float32", [3])
    graph.weight("nobody's", WEIGHT)
    return graph


# Products


@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_is_found(transposed: bool) -> None:
    graph = two_nodes(transposed)
    (found,) = find_matmuls(graph)
    assert found == WeightMatMul(graph.nodes[-2], ("w",), transposed)
    np.testing.assert_array_equal(run(graph, x=X)[0], -X @ WEIGHT)


def test_what_is_no_product_with_a_weight() -> None:
    graph = GraphBuilder("none")
    x = graph.input("x", "float32", [3, 3])
    graph.op("MatMul", x, x)
    graph.op("MatMul", graph.weight("left", WEIGHT.T), x)
    graph.op("MatMul", x, graph.weight("vector", WEIGHT[:, 0]))
    graph.op("MatMul", x, graph.weight("stack", np.zeros((2, 3, 4), np.float32)))
    graph.op("MatMul", x, graph.op("Transpose", x, perm=[1, 0]))
    graph.op("MatMul", x, graph.op("Neg", graph.weight("w", WEIGHT)))
    graph.op("Add", x, graph.weight("same", np.eye(3, dtype=np.float32)))
    assert find_matmuls(graph) == []
    graph.op("MatMul", x, "w")
    graph.op("MatMul", x, graph.op("Transpose", graph.weight("flipped", WEIGHT.T), perm=[1, 0]))
    graph.op("MatMul", x, "w")
    assert [(product.weight, product.transposed) for product in find_matmuls(graph)] == [
        ("w", False), ("flipped", True), ("w", False)
    ]  # fmt: skip


# Other nodes in the place of one


def test_nodes_are_put_in_the_place_of_one() -> None:
    graph = two_nodes()
    before = run(graph, x=X)

    def in_two_halves(graph: GraphBuilder, node: onnx.NodeProto) -> bool:
        if node.op_type != "MatMul":
            return False
        halves = [
            graph.op("MatMul", node.input[0], graph.weight(f"half.{sign}", sign * WEIGHT / 2)) for sign in (3, -1)
        ]
        graph.op("Add", *halves, output=node.output[0])
        return True

    rewrite_nodes(graph, in_two_halves)
    assert operators(graph) == ["MatMul", "MatMul", "Add", "Neg"] and graph.weights.keys() == {"half.3", "half.-1"}
    np.testing.assert_allclose(run(graph, x=X), before)


CHANGES: dict[str, tuple[Callable[[GraphBuilder], Any], str]] = {
    "nothing in its place": (lambda graph: None, "two is not valid: .*input 'y' of node: name: Neg:z"),
    "twice": (
        lambda graph: [graph.op("Abs", "x", output="y"), graph.op("Neg", "x", output="y")],
        "'y' has been used as output names multiple times",
    ),
    "what comes later": (lambda graph: graph.op("Abs", "z", output="y"), "input 'z' of node: name: Abs:y"),
    "no such operator": (lambda graph: graph.op("Nonsense", "x", output="y"), "two is not valid: .*Nonsense"),
    "too many inputs": (lambda graph: graph.op("Abs", "x", "x", output="y"), "two is not valid: .*Abs"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_that_breaks_the_graph_is_refused(how: str) -> None:
    change, message = CHANGES[how]

    def replace(graph: GraphBuilder, node: onnx.NodeProto) -> bool:
        if node.op_type == "MatMul":
            change(graph)
        return node.op_type == "MatMul"

    with pytest.raises(ExportError, match=message):
        rewrite_nodes(two_nodes(), replace)


# What nobody reads


def test_what_nobody_reads_is_dropped() -> None:
    graph = two_nodes()
    for _ in range(3):  # a chain, of which only the end is read by nobody
        graph.op("Abs", graph.nodes[-1].output[0])
    graph.op("MatMul", "x", graph.weight("extra", WEIGHT))
    graph.op("QuickGelu", "y", domain="com.microsoft")
    before = run(two_nodes(), x=X)
    drop_unused(graph)
    assert operators(graph) == ["MatMul", "Neg"] and list(graph.weights) == ["w"] and graph.opsets == {"": 20}
    check_graph(graph)
    np.testing.assert_array_equal(run(graph, x=X), before)


def test_what_a_branch_reads_stays() -> None:
    graph = branches()
    drop_unused(graph)
    assert operators(graph) == ["Add", "Mul", "If"] and list(graph.weights) == ["w"]
    check_graph(graph)
    x = X[0]
    np.testing.assert_array_equal(run(graph, x=x, yes=np.array(True))[0], 2 * x + WEIGHT[:, 0])
    np.testing.assert_array_equal(run(graph, x=x, yes=np.array(False))[0], -(x**2))


# What is checked


def test_branches_are_looked_into() -> None:
    graph = branches()
    graph.nodes = [*graph.nodes[1:], graph.nodes[0]]
    with pytest.raises(ExportError, match="'a'"):
        check_graph(graph)
    graph = branches()
    del graph.weights["w"]
    with pytest.raises(ExportError, match="'w'"):
        check_graph(graph)


def test_weights_of_any_size_are_checked_without_being_copied() -> None:
    """A model of more than 2 GB cannot be serialised, which is what the checker does with it."""
    graph = GraphBuilder("large")
    huge = np.broadcast_to(np.float32(0), (40_000, 20_000))  # 3.2 GB, if anyone looked
    y = graph.op("MatMul", graph.input("x", "float32", ["N", 40_000]), graph.weight("w", huge))
    graph.output(y, "float32", ["N", 20_000])
    check_graph(graph)
    graph.output("nothing", "float32", ["N"])
    with pytest.raises(ExportError, match="Graph output 'nothing'"):
        check_graph(graph)


def test_circles_are_refused() -> None:
    graph = GraphBuilder("circle")
    x = graph.input("x", "float32", [3])
    graph.op("Add", x, "c", output="a")
    graph.op("Neg", "a", output="b")
    graph.op("Abs", "b", output="c")
    graph.output(graph.op("Neg", x, output="y"), "float32", [3])
    with pytest.raises(ExportError, match="Add:a"):
        check_graph(graph)
