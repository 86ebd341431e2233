"""Build an ONNX graph node by node, with its weights inside or in a file beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from t5accel.graphs.contract import GraphSpec

# The newest operator used is Gelu (20). ONNX Runtime 1.17 and later run it, web and mobile builds included.
OPSET = 20
ORT_DOMAIN = "com.microsoft"  # ONNX Runtime's own set of operators
_SMALL = 1024  # bytes: shapes, axes and the like
IR_VERSION = 9  # what ONNX 1.15 wrote, the first with opset 20: older readers refuse newer ones


@dataclass
class GraphBuilder:
    """A graph under construction: `op` adds a node and returns its output's name, so that calls nest.

    >>> graph = GraphBuilder("double")
    >>> graph.input("x", "float32", ["N"])
    'x'
    >>> graph.output(graph.op("Mul", "x", graph.constant(np.float32(2)), output="y"), "float32", ["N"])
    >>> [node.op_type for node in graph.proto().graph.node]
    ['Mul']
    """

    name: str
    weights: dict[str, np.ndarray] = field(default_factory=dict)  # by name, in the order of first use
    opsets: dict[str, int] = field(default_factory=lambda: {"": OPSET})  # by domain; the standard's is ""
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    _constants: dict[tuple[str, tuple[int, ...], bytes], str] = field(default_factory=dict)
    _used: dict[str, int] = field(default_factory=dict)
    _taken: frozenset[str] = frozenset()  # names in a graph that was read from a file

    def input(self, name: str, dtype: str, shape: Sequence[str | int]) -> str:
        """Declare an input; strings in ``shape`` name dimensions that vary."""
        self.inputs.append(helper.make_tensor_value_info(name, _onnx_type(dtype), shape))
        return name

    def output(self, name: str, dtype: str, shape: Sequence[str | int]) -> None:
        """Declare the value ``name`` an output."""
        self.outputs.append(helper.make_tensor_value_info(name, _onnx_type(dtype), shape))

    def declare(self, spec: GraphSpec) -> None:
        for tensor in spec.inputs:
            self.input(tensor.name, tensor.dtype, tensor.shape)
        for tensor in spec.outputs:
            self.output(tensor.name, tensor.dtype, tensor.shape)

    def op(self, kind: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        """Add a node with one output and return the output's name, a fresh one by default."""
        name = output or self.fresh(kind)
        self.multi_output_op(kind, inputs, [name], **attributes)
        return name

    def multi_output_op(self, kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> None:
        """Add a node with several outputs; an empty name leaves one out."""
        self.nodes.append(helper.make_node(kind, inputs, outputs, name=f"{kind}:{outputs[0]}", **attributes))
        if domain := attributes.get("domain"):
            self.opsets.setdefault(domain, 1)

    def size(self, tensor: str, axis: int) -> str:
        """One dimension, as a scalar."""
        return self.op("Squeeze", self.op("Shape", tensor, start=axis, end=axis + 1))

    def constant(self, value: Any) -> str:
        """A small array or number; equal ones are stored once."""
        array = np.asarray(value)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = name = self.fresh("constant")
            self.weights[name] = array
        return self._constants[key]

    def weight(self, name: str, array: np.ndarray) -> str:
        """A weight; a name used twice means the same array, stored once."""
        self.weights.setdefault(name, array)
        return name

    def branch(self, name: str) -> GraphBuilder:
        """A branch for `if_else`; it sees this graph's values and adds its weights to this graph."""
        return GraphBuilder(name, self.weights, _constants=self._constants, _used=self._used)

    def if_else(self, condition: str, then: GraphBuilder, otherwise: GraphBuilder, outputs: Sequence[str]) -> None:
        """Add an ``If`` on a boolean scalar, with new names for the branches' outputs.

        No name may occur in a branch and in this graph.
        """
        branches = {"then_branch": then._graph(), "else_branch": otherwise._graph()}
        self.nodes.append(helper.make_node("If", [condition], outputs, name=f"If:{outputs[0]}", **branches))

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for array in self.weights.values())

    def proto(self, external: dict[str, tuple[str, int, int]] | None = None) -> onnx.ModelProto:
        """The finished model; ``external`` weights, by name their file, offset and length, are left out."""
        external = external or {}
        tensors = []
        for name, array in self.weights.items():
            if name in external:
                tensors.append(_external_tensor(name, array, *external[name]))
            else:
                tensors.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        opsets = [helper.make_opsetid(domain, version) for domain, version in self.opsets.items()]
        model = helper.make_model(self._graph(tensors), opset_imports=opsets, producer_name="t5accel")
        model.ir_version = IR_VERSION
        return model

    def skeleton(self) -> onnx.ModelProto:
        """The model with its large weights as inputs, for checks and shape inference."""
        small = {name: array for name, array in self.weights.items() if array.nbytes <= _SMALL}
        others = [
            helper.make_tensor_value_info(name, _onnx_type(array.dtype), array.shape)
            for name, array in self.weights.items()
            if name not in small
        ]
        return replace(self, weights=small, inputs=[*self.inputs, *others]).proto()

    def _graph(self, tensors: Sequence[TensorProto] = ()) -> onnx.GraphProto:
        return helper.make_graph(self.nodes, self.name, self.inputs, self.outputs, tensors)

    def fresh(self, kind: str) -> str:
        while True:
            self._used[kind] = number = self._used.get(kind, -1) + 1
            if (name := f"{kind.lower()}_{number}") not in self._taken:
                return name


def _onnx_type(dtype: str) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def _external_tensor(name: str, array: np.ndarray, location: str, offset: int, length: int) -> TensorProto:
    tensor = TensorProto(name=name, data_type=_onnx_type(array.dtype), dims=array.shape)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor
