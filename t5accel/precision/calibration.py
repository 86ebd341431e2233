"""Calibration, the range of every value that an fp32 export computes on real inputs.

For fp16 it shows which values exceed 65,504, for static int8 the range of each product's input.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from t5accel.checks import as_batch, as_integers, check_vocabulary
from t5accel.errors import InputError
from t5accel.graphs.builder import GraphBuilder
from t5accel.graphs.contract import DECODER, empty_past, kv_names
from t5accel.graphs.export_folder import WeightsLayout, write_graphs
from t5accel.graphs.layers import LOWEST
from t5accel.graphs.ort_levels import plain_session
from t5accel.graphs.rewriting import find_matmuls, float_values
from t5accel.models.spec import ModelSpec
from t5accel.precision.recipes import group_of
from t5accel.precision.source_export import STACKS, Fp32Export


class CalibrationSample(NamedTuple):
    """A batch: ``input_ids`` and ``attention_mask`` (B, S), and the decoder's input (B, T), start token first."""

    input_ids: np.ndarray
    attention_mask: np.ndarray
    decoder_input_ids: np.ndarray


def as_calibration_sample(
    value: Any, *, vocab_size: int, pad_token_id: int = 0, source_vocab_size: int = 0, positions: int | None = None
) -> CalibrationSample:
    """``value`` with int64 arrays; raises ``InputError`` for wrong shapes, types and ids, and too many tokens."""
    if not isinstance(value, tuple) or len(value) != 3:
        raise InputError(
            f"A CalibrationSample must have input_ids, attention_mask and decoder_input_ids, got {value!r:.80}."
        )
    ids, mask = as_batch(*value[:2], pad_token_id=pad_token_id, vocab_size=source_vocab_size or vocab_size)
    tokens = as_integers(value[2], "decoder_input_ids", rank=2)
    if len(tokens) != len(ids) or not tokens.shape[1]:
        raise InputError(f"decoder_input_ids must have shape ({len(ids)}, at least 1), got {tokens.shape}.")
    check_vocabulary(tokens, vocab_size, "decoder_input_ids")
    longest = max(ids.shape[1], tokens.shape[1])
    if positions is not None and longest > positions:
        raise InputError(
            f"A CalibrationSample must have at most {positions} tokens, the model's positions, got {longest}."
        )
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
    >>> max(seen, key=lambda entry: entry.max_abs).operator  # the squares in a norm
    'Pow'
    """
    export = Fp32Export.read(folder)
    manifest, graphs = export.manifest, export.graphs()
    spec, pad = ModelSpec.of_manifest(manifest), manifest.tokens["pad_token_id"]
    entries = dict(vocab_size=spec.dims.vocab_size, source_vocab_size=spec.source_vocab_size or 0)
    about = {stack: list(_about(graph)) for stack, graph in graphs.items()}
    watched = {stack: _watch(graph) for stack, graph in graphs.items()}
    cross = kv_names("cross", manifest.dims.decoder_layers)
    limits: dict[tuple[str, str], tuple[float, float]] = {}

    def run(session: Any, stack: str, feeds: dict[str, np.ndarray], outputs: list[str]) -> list[np.ndarray]:
        values = watched[stack]
        extremes = [name + suffix for name in values for suffix in (".low", ".high")]
        found = session.run([*outputs, *extremes], feeds)
        numbers = map(float, found[len(outputs) :])
        for value, low, high in zip(values, numbers, numbers, strict=True):
            lowest, highest = limits.get((stack, value), (np.inf, -np.inf))
            limits[stack, value] = min(lowest, low), max(highest, high)
        return found[: len(outputs)]

    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        files = {STACKS[stack]: graph for stack, graph in graphs.items()}
        write_graphs(Path(folder), files, WeightsLayout.plan(files, 0))
        sessions = {stack: plain_session(Path(folder) / file) for stack, file in STACKS.items()}
        for given in examples:
            sample = as_calibration_sample(given, pad_token_id=pad, positions=spec.positions, **entries)
            source = {"input_ids": sample.input_ids, "attention_mask": sample.attention_mask}
            feeds = dict(zip(cross, run(sessions["encoder"], "encoder", source, cross), strict=True))
            feeds |= empty_past(manifest.graphs[DECODER], len(sample.input_ids))  # all target tokens in one step
            feeds |= {"input_ids": sample.decoder_input_ids[:, None], "attention_mask": sample.attention_mask}
            run(sessions["decoder"], "decoder", feeds, [])
    if not limits:
        raise InputError("examples must hold at least one CalibrationSample, got none.")
    return [
        TensorRange(stack, *entry, *limits[stack, entry[0]])
        for stack, entries in about.items()
        for entry in entries
        if (stack, entry[0]) in limits
    ]


def ranges_by_graph(seen: Iterable[TensorRange]) -> dict[str, dict[str, tuple[float, float]]]:
    """By graph and value the lowest and highest number, for `convert.quantize_export`."""
    found: dict[str, dict[str, tuple[float, float]]] = {stack: {} for stack in STACKS}
    for entry in seen:
        found[entry.graph][entry.value] = entry.low, entry.high
    return found


def _watch(graph: GraphBuilder) -> list[str]:
    """Add the extremes of all floats to the outputs, attention masks excepted, and return the floats' names."""
    zero, mask = graph.constant(np.float32(0)), graph.constant(np.float32(LOWEST / 2))
    floats = float_values(graph)
    values = [name for node in graph.nodes for name in node.output if name in floats]
    for value in values:
        real = graph.op("Where", graph.op("Less", value, mask), zero, value)
        for suffix, operator in ((".low", "ReduceMin"), (".high", "ReduceMax")):
            graph.output(graph.op(operator, real, keepdims=0, output=value + suffix), "float32", [])
    return values


def _about(graph: GraphBuilder) -> Iterator[tuple[str, str, str, str | None]]:
    """Name, operator, place and weight of each value."""
    weights = {product.node.name: product.weight for product in find_matmuls(graph)}
    place = "embedding"
    for node in graph.nodes:
        weight = weights.get(node.name)
        place = (group_of(weight) if weight else None) or place
        for name in node.output:
            yield name, node.op_type, place, weight
