"""What is added to the scores of attention: T5's biases by relative position, the lowest number where none may look.

As nodes of an ONNX graph that work for any length: each layer's bias is a look-up by distance in a table that was
reckoned when the graph was built.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import TensorProto, numpy_helper

from t5accel.errors import NotT5Error
from t5accel.graphs.builder import GraphBuilder
from t5accel.graphs.t5_weights import T5Weights
from t5accel.t5.rules import relative_position_bucket

LOWEST = np.finfo(np.float32).min  # added to a score it makes the softmax ignore the position


class AttentionBiases:
    """The biases of one stack's self-attention, one for each layer, and of masks, as nodes of one graph.

    Args:
        graph: takes the nodes and the tables.
        weights: of the model.
        stack: ``"encoder"``, where all see all, or ``"decoder"``, where none sees what comes later.
    """

    def __init__(self, graph: GraphBuilder, weights: T5Weights, stack: str):
        self.graph, self.weights, self.stack = graph, weights, stack

    def of_mask(self, mask: str, axes: tuple[int, ...] = (1, 2)) -> str:
        """A mask of 1 and 0 as a bias of 0 and the lowest number, with new axes of size 1 at ``axes``."""
        graph = self.graph
        padded = graph.op("Cast", graph.op("Sub", graph.constant(1), mask), to=TensorProto.FLOAT)
        return graph.op("Unsqueeze", graph.op("Mul", padded, graph.constant(LOWEST)), graph.constant(list(axes)))

    def among(self, tokens: str, mask: str | None = None) -> list[str]:
        """Of positions 0 … n - 1 on each other, where token ids and mask are (B, n): for each layer (B, H, n, n).

        Without a mask, (H, n, n).
        """
        graph = self.graph
        positions = graph.op("Range", graph.constant(0), graph.size(tokens, 1), graph.constant(1))
        masked = self.of_mask(mask) if mask else None
        return self._by_layer(positions, positions, lambda bias: graph.op("Add", bias, masked) if masked else bias)

    def on_past(self, *, rows: bool = False) -> list[str]:
        """Of T new positions on P past ones and on each other: for each layer (R, H, T, P + T).

        It reads ``input_ids`` (R, T) and ``past_mask`` (R, P). With ``rows``, R is two axes everywhere, B and K.
        """
        graph, axis = self.graph, 2 if rows else 1
        past, new = graph.size("past_mask", axis), graph.size("input_ids", axis)
        total, zero, one = graph.op("Add", past, new), graph.constant(0), graph.constant(1)
        queries, keys = graph.op("Range", past, total, one), graph.op("Range", zero, total, one)
        # Garbage in front of a shorter history is masked here, the future by the last entry of the tables of biases.
        ones = numpy_helper.from_array(np.array([1], dtype=np.int64))
        own = graph.op("ConstantOfShape", graph.op("Shape", "input_ids"), value=ones)
        history = graph.op("Concat", "past_mask", own, axis=axis)
        history_bias = self.of_mask(history, axes=(axis, axis + 1))  # (R, 1, 1, P + T)
        return self._by_layer(queries, keys, lambda bias: graph.op("Add", bias, history_bias))

    def _by_layer(self, queries: str, keys: str, finish: Callable[[str], str]) -> list[str]:
        """For each layer the name of its biases (…, H, n, m), looked up by distance once where layers share them.

        T5 has one table, in its first layer; a pruned layer takes the rows of the heads that it kept. UMT5 has a table
        in every layer. The causal tables have one more entry, for the future: the lowest number.
        """
        graph, weights = self.graph, self.weights
        dims, reach, causal = weights.dims, weights.max_distance, self.stack == "decoder"
        distances = np.arange(-reach, (0 if causal else reach) + 1)
        bucket = relative_position_bucket(
            distances, bidirectional=not causal, buckets=weights.buckets, max_distance=reach
        )
        axis_0, axis_1 = graph.constant([0]), graph.constant([1])
        distance = graph.op("Sub", graph.op("Unsqueeze", keys, axis_0), graph.op("Unsqueeze", queries, axis_1))
        nearest = graph.op("Clip", distance, graph.constant(-reach), graph.constant(1 if causal else reach))
        index = graph.op("Add", nearest, graph.constant(reach))
        done: dict[str, str] = {}
        biases, source = [], ""
        for layer, heads in enumerate(dims.decoder_heads if causal else dims.encoder_heads):
            own = f"{self.stack}.block.{layer}.layer.0.SelfAttention.relative_attention_bias.weight"
            source = own if own in weights.arrays else source
            pruned = weights.pruned_heads.get(f"{self.stack}.{layer}", ())
            table = weights.array(source)[bucket].T  # (H, distances)
            kept = [head for head in range(len(table)) if head not in pruned]
            if len(kept) != heads:
                raise NotT5Error(
                    f"{self.stack} layer {layer} has {heads} heads and {len(kept)} position biases: name the others "
                    "as its pruned_heads."
                )
            name = f"{source}.by_distance{kept if pruned else ''}"
            if name not in done:
                table = table[kept]
                if causal:
                    table = np.concatenate([table, np.full((heads, 1), LOWEST)], axis=1)
                looked_up = graph.op("Gather", graph.weight(name, table), index, axis=1)
                done[name] = finish(looked_up)
            biases.append(done[name])
        return biases
