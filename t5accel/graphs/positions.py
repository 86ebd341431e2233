"""The numbers of absolute positions, computed in the graph from masks: BART's and its relatives', where T5 has none.

A history that is shorter than its neighbours' is padded in front and masked, so a token's column says nothing about its
place in the text. The mask does: a new token's number is that of the real ones before it.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, numpy_helper

from t5accel.graphs.builder import GraphBuilder
from t5accel.graphs.weights import T5Weights


def mask_with_new(graph: GraphBuilder, axis: int) -> str:
    """The mask of a history and of the new tokens behind it along ``axis``, of which all are real: (…, P + T).

    >>> graph = GraphBuilder("decoder")
    >>> mask_with_new(graph, 2), [node.op_type for node in graph.nodes]
    ('concat_0', ['Shape', 'ConstantOfShape', 'Concat'])
    """
    ones = numpy_helper.from_array(np.array([1], dtype=np.int64))
    own = graph.op("ConstantOfShape", graph.op("Shape", "input_ids"), value=ones)
    return graph.op("Concat", "past_mask", own, axis=axis)


class Positions:
    """Numbers of rows in the table of positions, as nodes; ``None`` where the model has no such table.

    Args:
        graph: takes the nodes.
        weights: of the model.
    """

    def __init__(self, graph: GraphBuilder, weights: T5Weights):
        self.graph, self.weights, self.family, self.pad = graph, weights, weights.family, weights.pad_token_id
        self.first = self.family.first_position(self.pad)

    def of_source(self) -> str | None:
        """Of the tokens ``input_ids`` (B, S): (1, S), or (B, S) where padding is not counted."""
        if self.family.is_relative:
            return None
        graph = self.graph
        if not self.family.skips_padding:
            # Not (S,): of rows that a Range numbers ONNX Runtime 1.31 makes a Slice that it cannot run.
            first = graph.constant(self.first)
            numbers = graph.op("Range", first, graph.op("Add", graph.size("input_ids", 1), first), graph.constant(1))
            return graph.op("Unsqueeze", numbers, graph.constant([0]))
        is_padding = graph.op("Equal", "input_ids", graph.constant(self.pad))
        real = graph.op("Cast", graph.op("Not", is_padding), to=TensorProto.INT64)
        counted = graph.op("Add", graph.op("CumSum", real, graph.constant(1)), graph.constant(self.first - 1))
        return graph.op("Where", is_padding, graph.constant(self.pad), counted)

    def on_past(self) -> str | None:
        """Of the new tokens ``input_ids`` (B, K, T) behind those that ``past_mask`` (B, K, P) shows: (B, K, T)."""
        if self.family.is_relative:
            return None
        graph = self.graph
        real = graph.op("ReduceSum", mask_with_new(graph, 2), graph.constant([-1]), keepdims=1)  # T are the new ones
        first = graph.constant(self.first)
        numbers = graph.op("Range", graph.op("Sub", first, graph.size("input_ids", 2)), first, graph.constant(1))
        return self._of_decoder(graph.op("Add", real, numbers))

    def mask_so_far(self) -> str:
        """Of ``past_mask`` (R, M) the columns 0 … P, the last of which is the new token's own: (R, P + 1)."""
        graph = self.graph
        end = graph.op("Add", graph.op("Cast", "past_length", to=TensorProto.INT64), graph.constant([1]))
        return graph.op("Slice", "past_mask", graph.constant([0]), end, graph.constant([1]))

    def on_columns(self) -> str | None:
        """Of one new token ``input_ids`` (R, 1) at column ``past_length``: (R, 1)."""
        if self.family.is_relative:
            return None
        graph = self.graph
        so_far = graph.op("ReduceSum", self.mask_so_far(), graph.constant([-1]), keepdims=1)
        numbers = graph.op("Add", graph.op("Cast", so_far, to=TensorProto.INT64), graph.constant(self.first - 1))
        return self._of_decoder(numbers)

    def _of_decoder(self, numbers: str) -> str:
        """The numbers, but for padding that the decoder reads where padding has none.

        None is beyond the table: what has ended, and stays in the batch for others' sake, may get longer than it.
        """
        last = len(self.weights.array("decoder.embed_positions.weight")) - 1
        numbers = self.graph.op("Min", numbers, self.graph.constant(last))
        if not self.family.skips_padding:
            return numbers
        is_padding = self.graph.op("Equal", "input_ids", self.graph.constant(self.pad))
        return self.graph.op("Where", is_padding, self.graph.constant(self.pad), numbers)
