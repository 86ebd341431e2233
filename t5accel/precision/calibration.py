"""Calibration: the range of every value that an fp32 export computes on real inputs.

For fp16 it shows which values exceed 65,504, for static int8 the range of each product's input.
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

from t5accel.checks import as_batch, as_integers, check_vocabulary
from t5accel.errors import InputError
from t5accel.graphs.builder import GraphBuilder
from t5accel.graphs.contract import WEIGHTS, kv_names
from t5accel.graphs.export_folder import WeightsLayout
from t5accel.graphs.layers import LOWEST
from t5accel.graphs.manifest import Manifest
from t5accel.graphs.ort_levels import import_onnxruntime
from t5accel.graphs.rewriting import find_matmuls, float_values
from t5accel.precision.recipes import group_of
from t5accel.precision.source_export import STACKS, Fp32Export

_LOW, _HIGH = ".probe.low", ".probe.high"


class CalibrationSample(NamedTuple):
    """A batch: ``input_ids`` and ``attention_mask`` (B, S), and the decoder's input (B, T), start token first."""

    input_ids: np.ndarray
    attention_mask: np.ndarray
    decoder_input_ids: np.ndarray


def as_calibration_sample(value: Any, *, vocab_size: int, pad_token_id: int = 0) -> CalibrationSample:
    """``value`` with int64 arrays; raises ``InputError`` for wrong shapes, types and ids."""
    if not isinstance(value, tuple) or len(value) != 3:
        raise InputError(
            f"A CalibrationSample must have input_ids, attention_mask and decoder_input_ids, got {value!r:.80}."
        )
    ids, mask = as_batch(*value[:2], pad_token_id=pad_token_id, vocab_size=vocab_size)
    tokens = as_integers(value[2], "decoder_input_ids", rank=2)
    if len(tokens) != len(ids) or not tokens.shape[1]:
        raise InputError(f"decoder_input_ids must have shape ({len(ids)}, at least 1), got {tokens.shape}.")
    check_vocabulary(tokens, vocab_size, "decoder_input_ids")
    return CalibrationSample(ids, mask, tokens)


@dataclass(frozen=True)
class TensorRange:
    """The lowest and highest number of one value of a graph, ``"encoder"`` or ``"decoder"``.

    ``operator`` computes it. ``place`` is the group of the last weight multiplied by before it (``decoder.3.wo``), and
    ``weight`` the value's own one, if it is a product with a weight.
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
        return max(-self.low, self.high)


def collect_ranges(folder: str | os.PathLike[str], examples: Iterable[CalibrationSample]) -> list[TensorRange]:
    """The range of each float of an fp32 export over all examples, in the order of the graphs.

    Raises ``ExportError`` for a damaged or missing export, ``InputError`` for one that is not in fp32 and for bad or no
    examples.

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
    cross = kv_names("cross", manifest.dims.decoder_layers)
    limits: dict[tuple[str, str], tuple[float, float]] = {}
    with _sessions(graphs) as sessions:
        for given in examples:
            sample = as_calibration_sample(
                given, vocab_size=manifest.dims.vocab_size, pad_token_id=manifest.tokens["pad_token_id"]
            )
            source = {"input_ids": sample.input_ids, "attention_mask": sample.attention_mask}
            found = sessions["encoder"].run([*cross, *watched["encoder"]], source)
            _widen(limits, "encoder", watched["encoder"], found[len(cross) :])
            feeds = _decoder_feeds(sample, dict(zip(cross, found, strict=False)), manifest)
            _widen(limits, "decoder", watched["decoder"], sessions["decoder"].run(watched["decoder"], feeds))
    if not limits:
        raise InputError("examples must hold at least one CalibrationSample, got none.")
    return [
        TensorRange(stack, *about, *limits[stack, about[0]])
        for stack, graph in graphs.items()
        for about in _about(graph)
        if (stack, about[0]) in limits
    ]


def max_magnitudes(seen: Iterable[TensorRange], graph: str) -> dict[str, float]:
    """The largest magnitude of each value of one graph, for `fp16.nodes_in_fp32`."""
    return {one.value: one.max_abs for one in seen if one.graph == graph}


def ranges_by_graph(seen: Iterable[TensorRange]) -> dict[str, dict[str, tuple[float, float]]]:
    """By graph and value the lowest and highest number, for `gate.quantize_export`."""
    found: dict[str, dict[str, tuple[float, float]]] = {stack: {} for stack in STACKS}
    for one in seen:
        found[one.graph][one.value] = one.low, one.high
    return found


def _watch(graph: GraphBuilder) -> list[str]:
    """Add the extremes of all floats to the outputs, attention masks excepted, and return their names."""
    added: list[str] = []
    zero, mask = graph.constant(np.float32(0)), graph.constant(np.float32(LOWEST / 2))
    floats = float_values(graph)
    for value in [name for node in graph.nodes for name in node.output if name in floats]:
        real = graph.op("Where", graph.op("Less", value, mask), zero, value)
        for suffix, operator in ((_LOW, "ReduceMin"), (_HIGH, "ReduceMax")):
            added.append(graph.op(operator, real, keepdims=0, output=value + suffix))
            graph.output(added[-1], "float32", [])
    return added


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
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # keeps every value
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


def _decoder_feeds(
    sample: CalibrationSample, cross: Mapping[str, np.ndarray], manifest: Manifest
) -> dict[str, np.ndarray]:
    """All target tokens in one step from an empty history."""
    batch, dims = len(sample.input_ids), manifest.dims
    feeds = {
        "input_ids": sample.decoder_input_ids[:, None],
        "attention_mask": sample.attention_mask,
        "past_mask": np.zeros((batch, 1, 0), np.int64),
        **cross,
    }
    for layer, heads in enumerate(dims.decoder_heads):
        for part in ("key", "value"):
            feeds[f"past_{part}_{layer}"] = np.zeros((batch, 1, heads, 0, dims.d_kv), np.float32)
    return feeds


def _widen(
    limits: dict[tuple[str, str], tuple[float, float]], stack: str, watched: list[str], found: list[np.ndarray]
) -> None:
    extremes = dict(zip(watched, found, strict=True))
    for name in watched:
        if name.endswith(_LOW):
            value = name.removesuffix(_LOW)
            low, high = limits.get((stack, value), (np.inf, -np.inf))
            limits[stack, value] = min(low, float(extremes[name])), max(high, float(extremes[value + _HIGH]))
