"""Run real inputs through an export and record how large each of its numbers becomes.

For fp16 it tells what passes 65,504, for static int8 which range each product's input has.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto

from t5accel.checks import as_batch, as_integers, check_vocabulary
from t5accel.errors import InputError
from t5accel.graphs.builder import GraphBuilder
from t5accel.graphs.contract import WEIGHTS, kv_names
from t5accel.graphs.export_folder import WeightsLayout
from t5accel.graphs.layers import LOWEST
from t5accel.graphs.manifest import Manifest
from t5accel.graphs.ort_levels import import_onnxruntime
from t5accel.graphs.rewriting import find_matmuls
from t5accel.precision.recipes import group_of
from t5accel.precision.source_export import STACKS, Fp32Export


class CalibrationSample(NamedTuple):
    """A batch: ``input_ids`` and ``attention_mask`` (B, S), and what the decoder is given (B, T), start token first."""

    input_ids: np.ndarray
    attention_mask: np.ndarray
    decoder_input_ids: np.ndarray


def as_calibration_sample(value: Any, *, vocab_size: int, pad_token_id: int = 0) -> CalibrationSample:
    """``value`` as an `Example` of int64 arrays, for what hands it to graphs or to a backend.

    Raises:
        InputError: it is no tuple of three, or one is of a wrong shape or type, or holds ids outside the vocabulary.

    >>> as_calibration_sample(([[5, 1]], None, [[0]]), vocab_size=9).attention_mask.tolist()
    [[1, 1]]
    """
    if not isinstance(value, tuple) or len(value) != 3:
        raise InputError(
            f"{value!r:.80} is no CalibrationSample: give input_ids, attention_mask and decoder_input_ids."
        )
    ids, mask = as_batch(*value[:2], pad_token_id=pad_token_id, vocab_size=vocab_size)
    tokens = as_integers(value[2], "decoder_input_ids", rank=2)
    if len(tokens) != len(ids) or not tokens.shape[1]:
        raise InputError(f"decoder_input_ids has shape {tokens.shape}; give ({len(ids)}, at least 1).")
    check_vocabulary(tokens, vocab_size, "decoder_input_ids")
    return CalibrationSample(ids, mask, tokens)


@dataclass(frozen=True)
class TensorRange:
    """One value of a graph.

    Attributes:
        graph: ``"encoder"`` or ``"decoder"``.
        value: its name.
        operator: that yields it.
        place: the layer, as the group of the last product with a weight before it: ``decoder.3.wo``.
        weight: by which it was multiplied, if it is a product with one.
        low, high: the lowest and the highest number seen.
    """

    graph: str
    value: str
    operator: str
    place: str
    weight: str | None
    low: float
    high: float

    @property
    def max_abs(self) -> float:
        """The magnitude."""
        return max(-self.low, self.high)


def collect_ranges(folder: str | os.PathLike[str], examples: Iterable[CalibrationSample]) -> list[TensorRange]:
    """What each float of an export in fp32 became at most, over all examples, in the order of the graphs.

    Raises:
        ExportError: there is no export, or it is damaged.
        InputError: it is not in fp32; there are no examples, or one is of a wrong shape or type, or holds tokens that
            are not in the vocabulary.
        MissingPackageError: there is no onnxruntime.

    >>> from t5accel.graphs.export import export_model
    >>> ids = np.array([[100, 200, 1]])
    >>> with TemporaryDirectory() as folder:
    ...     _ = export_model("mini", f"{folder}/mini")
    ...     seen = collect_ranges(f"{folder}/mini", [CalibrationSample(ids, np.ones_like(ids), np.array([[0, 50]]))])
    >>> max(seen, key=lambda one: one.max_abs).operator  # the squares in a norm
    'Pow'
    """
    export = Fp32Export.read(folder)
    manifest, graphs = export.manifest, export.graphs()
    watched = {stack: _watch(graph) for stack, graph in graphs.items()}
    limits: dict[tuple[str, str], tuple[float, float]] = {}
    with _sessions(graphs) as sessions:
        for given in examples:
            example = as_calibration_sample(
                given, vocab_size=manifest.dims.vocab_size, pad_token_id=manifest.tokens["pad_token_id"]
            )
            feeds = {"input_ids": example.input_ids, "attention_mask": example.attention_mask}
            cross = _names(manifest)
            found = sessions["encoder"].run([*cross, *watched["encoder"]], feeds)
            _update(limits, "encoder", watched["encoder"], found[len(cross) :])
            decoder = _decoder_feeds(example, feeds, dict(zip(cross, found, strict=False)), manifest)
            found = sessions["decoder"].run(watched["decoder"], decoder)
            _update(limits, "decoder", watched["decoder"], found)
    if not limits:
        raise InputError("There are no examples: give at least one.")
    return [
        TensorRange(stack, *about, *limits[stack, about[0]])
        for stack, graph in graphs.items()
        for about in _about(graph)
        if (stack, about[0]) in limits
    ]


def max_magnitudes(seen: Iterable[TensorRange], graph: str) -> dict[str, float]:
    """The largest magnitude of each value of one graph, as `precision.nodes_in_fp32` takes it."""
    return {one.value: one.max_abs for one in seen if one.graph == graph}


def ranges_by_graph(seen: Iterable[TensorRange]) -> dict[str, dict[str, tuple[float, float]]]:
    """By graph and value the lowest and highest number, as `quantize.quantize_export` takes them."""
    found: dict[str, dict[str, tuple[float, float]]] = {stack: {} for stack in STACKS}
    for one in seen:
        found[one.graph][one.value] = one.low, one.high
    return found


_LOW, _HIGH = "{}.probe.low", "{}.probe.high"


def _watch(graph: GraphBuilder) -> list[str]:
    """Add the extremes of all floats to the outputs, and return their names. What masks attention is left aside."""
    added: list[str] = []
    zero, mask = graph.constant(np.float32(0)), graph.constant(np.float32(LOWEST / 2))
    for value in _float_values(graph):
        real = graph.op("Where", graph.op("Less", value, mask), zero, value)
        for name, operator in ((_LOW, "ReduceMin"), (_HIGH, "ReduceMax")):
            added.append(graph.op(operator, real, keepdims=0, output=name.format(value)))
            graph.output(added[-1], "float32", [])
    return added


def _float_values(graph: GraphBuilder) -> list[str]:
    inferred = onnx.shape_inference.infer_shapes(graph.skeleton()).graph
    floats = {
        value.name
        for value in (*inferred.value_info, *inferred.output)
        if value.type.tensor_type.elem_type == TensorProto.FLOAT
    }
    return [name for node in graph.nodes for name in node.output if name in floats]


def _about(graph: GraphBuilder) -> Iterator[tuple[str, str, str, str | None]]:
    """Of each value its name, operator, place and weight."""
    weights = {product.node.name: product.weight for product in find_matmuls(graph)}
    place = "embedding"
    for node in graph.nodes:
        weight = weights.get(node.name)
        place = (group_of(weight) if weight else None) or place
        for name in node.output:
            yield name, node.op_type, place, weight


@contextmanager
def _sessions(graphs: Mapping[str, GraphBuilder]) -> Iterator[dict[str, Any]]:
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # every value is there
    options.log_severity_level = 3
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        layout = WeightsLayout.plan(graphs, 0)
        layout.write(Path(folder) / WEIGHTS)
        sessions = {}
        for stack, graph in graphs.items():
            path = Path(folder) / f"{stack}.onnx"
            path.write_bytes(graph.proto(layout.references()).SerializeToString())
            sessions[stack] = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        yield sessions


def _names(manifest: Manifest) -> list[str]:
    return kv_names("cross", manifest.dims.decoder_layers)


def _decoder_feeds(
    example: CalibrationSample, source: Mapping[str, np.ndarray], cross: Mapping[str, np.ndarray], manifest: Manifest
) -> dict[str, np.ndarray]:
    batch, dims = len(example.input_ids), manifest.dims
    empty = {
        f"past_{part}_{layer}": np.zeros((batch, 1, heads, 0, dims.d_kv), np.float32)
        for layer, heads in enumerate(dims.decoder_heads)
        for part in ("key", "value")
    }
    return {
        "input_ids": example.decoder_input_ids[:, None], "attention_mask": source["attention_mask"],
        "past_mask": np.zeros((batch, 1, 0), np.int64), **empty, **cross,
    }  # fmt: skip


def _update(
    limits: dict[tuple[str, str], tuple[float, float]], stack: str, watched: list[str], found: list[np.ndarray]
) -> None:
    extremes = dict(zip(watched, found, strict=True))
    for name in watched:
        if name.endswith(".probe.low"):
            value = name.removesuffix(".probe.low")
            low, high = limits.get((stack, value), (np.inf, -np.inf))
            now = float(extremes[name]), float(extremes[_HIGH.format(value)])
            limits[stack, value] = min(low, now[0]), max(high, now[1])
