"""The two graphs on ONNX Runtime, fed with numpy arrays; without torch and transformers."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from t5accel.backends import ort_memory as memory
from t5accel.backends.ort_memory import BufferPool, ScratchBuffer, encode_in_slices, length_slices, run_into
from t5accel.backends.ort_session import SessionSettings, open_session, require_contract, shared_weights, shortlist_of
from t5accel.checks import as_count
from t5accel.decoding.backend import PastLengths, SuppressedTokens, expand_index_to_heads
from t5accel.decoding.greedy_search import argmax_tokens
from t5accel.decoding.token_constraints import TokenConstraints
from t5accel.errors import ExportError, InputError
from t5accel.graphs.contract import (
    DECODER,
    ENCODER,
    SHORTLIST,
    SHORTLIST_OUTPUTS,
    STEP,
    as_folder,
    kv_names,
    shortlist_spec,
    step_spec,
)
from t5accel.graphs.manifest import Manifest, read_manifest
from t5accel.graphs.ort_levels import require_runnable_here
from t5accel.models.spec import ModelSpec


@dataclass(frozen=True)
class OrtSource:
    """The encoder's output for B sources."""

    # By name: keys and values of cross-attention, each (B, H_i, S, d_kv), and ``attention_mask`` (B, S).
    inputs: dict[str, Any]
    mask: np.ndarray  # (B, S) int64, on the host


@dataclass
class OrtState:
    """A decoder state: its source, the lengths of its rows, and the keys and values of self-attention."""

    source: OrtSource
    rows: PastLengths
    past: list[Any]  # layer by layer, each (B, K, H_i, P, d_kv), as the backend holds tensors
    binding: Any = field(default=None, repr=False)  # of subclasses that bind the source's tensors once
    scratch: ScratchBuffer = field(default_factory=ScratchBuffer, repr=False)  # for reordered pasts
    token: np.ndarray | None = None  # (B, K) int64, of subclasses with ``run_greedy``: chosen and not read yet


class OrtNumpy:
    """A `Backend` over an export that hands all arrays to the session at every step and takes all of them back.

    On a CPU that copies nothing: the session reads contiguous arrays where they lie, and its results become arrays.
    Threads may share a backend; a state belongs to one of them.

    Args:
        verify: hash every file before it is used.
        manifest: of that folder, already read and checked.
        max_source_tokens: refuse longer sources, whose attention grows with the square of their length; at most the
            model's positions.

    Raises ``ExportError`` for a missing or damaged export or one optimised for another machine, and
    ``MissingPackageError`` without the onnxruntime of the device.
    """

    vocab_size: int  # this and the next three by `__getattr__`; stated for type checkers
    pad_token_id: int
    eos_token_id: int
    decoder_start_token_id: int
    devices: tuple[str, ...] = ("cpu", "cuda")
    _takes_shortlist = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        settings: SessionSettings | None = None,
        verify: bool = True,
        manifest: Manifest | None = None,
        max_source_tokens: int | None = None,
    ):
        self.folder = as_folder(folder)
        self.settings = SessionSettings() if settings is None else settings
        if not isinstance(self.settings, SessionSettings) or self.settings.device not in self.devices:
            raise InputError(
                f"settings must be SessionSettings with device {' or '.join(self.devices)}, got {settings!r}. "
                "On 'cuda' give OrtPointers, which keeps the tensors there between steps."
            )
        if max_source_tokens is not None:
            as_count(max_source_tokens, "max_source_tokens", at_least=1)
        self.max_source_tokens = max_source_tokens
        self.manifest = read_manifest(self.folder, verify=verify) if manifest is None else manifest
        self.manifest.require_whole_model(self.folder)
        require_runnable_here(self.manifest, self.folder, self.settings.device)
        if (level := self.settings.graph_optimization) in ("disable", "basic"):
            from t5accel.precision.recipes import recipe_from_json

            if (recipe := recipe_from_json(self.manifest.recipe)).saturates:  # see `open_session`
                raise InputError(
                    f"graph_optimization must be 'extended', 'layout' or 'all' for {recipe.name!r}, got {level!r}: "
                    "below, sums of its products saturate on x86 without VNNI."
                )
        spec = ModelSpec.of_manifest(self.manifest)
        spec.describe(self)
        if spec.positions is not None:
            self.max_source_tokens = min(spec.positions, max_source_tokens or spec.positions)
        layers, heads = self.dims.decoder_layers, (self.dims.cross_heads, self.dims.decoder_heads)
        self.cross_names, self.past_names = kv_names("cross", layers), kv_names("past", layers)
        self.outputs = ["logits", *kv_names("present", layers)]
        self.cross_heads, self.past_heads = ([n for n in by_layer for _ in range(2)] for by_layer in heads)
        self.dtype = np.dtype(self.manifest.graphs[DECODER].outputs[-1].dtype)  # of keys and values
        self._cross_pool = BufferPool()
        on_cpu = self.settings.device == "cpu"
        self._weights = shared_weights(self.folder, self.manifest) if on_cpu else {}
        wanted = on_cpu and self._takes_shortlist and self.settings.shortlist
        self.shortlist = shortlist_of(self.folder, self.manifest, self._weights) if wanted else None
        # The decoder first: while it opens, its head is in memory twice.
        self._open_decoder()
        self.encoder = self._open(ENCODER)
        self.openvino = self._open_openvino() if self.settings.openvino else None

    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> OrtSource:
        ids, mask = np.ascontiguousarray(input_ids), np.ascontiguousarray(attention_mask)
        if self.max_source_tokens is not None and ids.shape[1] > self.max_source_tokens:
            raise InputError(
                f"A source must have at most max_source_tokens, {self.max_source_tokens}, got {ids.shape[1]}. "
                "Shorten or split it."
            )
        slices = length_slices(mask, memory.SLICE_TOKENS) if self.settings.device == "cpu" else []
        if len(slices) > 1 or self.settings.encoder_precision != "fp32":
            return self._encoded_in_slices(ids, mask, slices)
        return self._source(self._run_encoder(ids, mask), mask)

    def new_state(self, source: OrtSource, rows_per_source: int = 1) -> OrtState:
        rows = PastLengths.empty(len(source.mask), rows_per_source)
        empty = [self._zeros((*rows.shape, heads, 0, self.dims.d_kv)) for heads in self.past_heads]
        return OrtState(source, rows, [self._hold(array) for array in empty])

    def step(self, state: OrtState, input_ids: np.ndarray) -> np.ndarray:
        new = np.ascontiguousarray(input_ids)
        logits, past = self._run_decoder(state, new, state.rows.mask())
        state.rows, state.past = state.rows.appended(new.shape[2]), past
        return logits

    def next_tokens(self, state: OrtState, input_ids: np.ndarray, *, suppressed: SuppressedTokens = None) -> np.ndarray:
        """The likeliest next token of each row: by the shortlist where that is certain, else by all logits."""
        new, mask, tokens = np.ascontiguousarray(input_ids), state.rows.mask(), None
        if self.shortlist and self.shortlist.is_worthwhile(new.shape[0] * new.shape[1]):
            results, past = self._run_step(state, new, mask, SHORTLIST_OUTPUTS, exact=False)
            tokens = self.shortlist.choose(results, suppressed)
        if tokens is None:
            logits, past = self._run_decoder(state, new, mask)
            tokens = argmax_tokens(logits[:, :, -1], suppressed)
        state.rows, state.past = state.rows.appended(new.shape[2]), past
        return tokens.reshape(new.shape[:2])

    def reorder(self, state: OrtState, rows: np.ndarray) -> None:
        lengths, index = state.rows.reordered(rows)
        if index is not None:
            count = len(state.past)
            state.past = self._gather_past(state, 2, [self._from_host(index)] * count, [lengths.shape] * count)
        state.rows = lengths

    def rollback(self, state: OrtState, accepted: np.ndarray) -> None:
        lengths, index = state.rows.trimmed(accepted)
        if index is not None and not lengths.ragged and not state.rows.ragged:  # all rows lose their last ones
            state.past = [self._hold(self._array(past)[..., : lengths.width, :]) for past in state.past]
        elif index is not None:
            (batch, rows, width), by_heads = index.shape, {}
            for heads in set(self.past_heads):
                flat = expand_index_to_heads(index.reshape(-1, width), heads, state.rows.width)
                by_heads[heads] = self._from_host(flat)
            indices = [by_heads[heads] for heads in self.past_heads]
            shapes = [(batch, rows, heads, width) for heads in self.past_heads]
            state.past = self._gather_past(state, 4, indices, shapes)
        state.rows = lengths

    def select_sources(self, state: OrtState, sources: np.ndarray) -> None:
        lengths, kept = state.rows.kept(sources)
        lengths, unused = lengths.narrowed()
        index = self._from_host(kept)
        past = [self._gathered(past, 1, index, kept.shape) for past in state.past]
        if unused:
            past = [self._hold(self._array(one)[..., unused:, :]) for one in past]
        cross = [self._gathered(state.source.inputs[name], 1, index, kept.shape) for name in self.cross_names]
        source = self._source(cross, state.source.mask[kept])
        state.source, state.rows, state.past, state.binding = source, lengths, past, None

    def add_sources(self, state: OrtState, source: OrtSource) -> None:
        before = len(state.rows.padding)
        joined, lengths = self.join([state.source, source]), state.rows.placed(before + np.arange(len(source.mask)))
        past = []
        for heads, held in zip(self.past_heads, state.past, strict=True):
            longer = self._zeros((*lengths.shape, heads, lengths.width, self.dims.d_kv))
            longer[:before] = self._array(held)
            past.append(self._hold(longer))
        state.source, state.rows, state.past, state.binding = joined, lengths, past, None

    def replace_sources(self, state: OrtState, source: OrtSource, places: np.ndarray) -> None:
        before = len(state.rows.padding)
        order = np.arange(max(before, 1 + int(places.max())))
        order[places] = before + np.arange(places.size)
        held = state.source, state.rows, state.past, state.binding
        self.add_sources(state, source)
        try:
            self.select_sources(state, order)
        except BaseException:
            state.source, state.rows, state.past, state.binding = held
            raise

    def reorder_sources(self, state: OrtState, sources: np.ndarray) -> None:
        lengths, kept = state.rows.kept(sources)
        state.past = [self._gathered(past, 1, self._from_host(kept), kept.shape) for past in state.past]
        state.rows = lengths

    def split(self, source: OrtSource) -> list[OrtSource]:
        """One source per row with its own copy of the unmasked positions (cross-attention knows no positions)."""
        arrays, rows = [self._array(source.inputs[name]) for name in self.cross_names], []
        for row, real in enumerate(source.mask.astype(bool)):
            positions = np.flatnonzero(real)[None]
            cross = []
            for array, heads in zip(arrays, self.cross_heads, strict=True):
                index = self._from_host(expand_index_to_heads(positions, heads, len(real)))
                taken = self._take(array[row : row + 1], 3, index)
                cross.append(self._hold(taken.reshape(1, heads, positions.size, self.dims.d_kv)))
            rows.append(self._source(cross, np.ones_like(positions)))
        return rows

    def join(self, sources: Sequence[OrtSource]) -> OrtSource:
        """One new batch of all rows, padded on the right with zeros and masked there."""
        batch = sum(len(source.mask) for source in sources)
        longest = max(source.mask.shape[1] for source in sources)
        mask = np.zeros((batch, longest), dtype=np.int64)
        cross = [self._zeros((batch, heads, longest, self.dims.d_kv)) for heads in self.cross_heads]
        first = 0
        for source in sources:
            count, length = source.mask.shape
            rows = slice(first, first + count)
            mask[rows, :length] = source.mask
            for array, name in zip(cross, self.cross_names, strict=True):
                array[rows, :, :length] = self._array(source.inputs[name])
            first += count
        return self._source([self._hold(array) for array in cross], mask)

    def source_bytes(self, source: OrtSource) -> int:
        return sum(self._array(value).nbytes for value in source.inputs.values())

    def fingerprint(self) -> Hashable:
        """Always the same: the weights of a session do not change."""
        return self.manifest.source["sha256"], json.dumps(self.manifest.recipe, sort_keys=True)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy by the folder, which the copy opens again."""
        place = type(self), self.folder.absolute(), self.settings, self.max_source_tokens
        return _reopen, (*place, self.manifest.files, self.rules)

    def close(self) -> None:
        """Free sessions, weights and buffers. Later use raises ``InputError``; closing again is allowed."""
        self.__dict__ = {"is_closed": True}

    def __getattr__(self, name: str) -> Any:
        if self.__dict__.get("is_closed"):
            raise InputError("This backend is closed: open the export again.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # How tensors are held and handed to the sessions. Subclasses replace these methods.

    def _open_decoder(self) -> None:
        self.decoder = self._open(SHORTLIST if self.shortlist else DECODER)

    def _open(self, graph: str) -> Any:
        session = open_session(self.folder / graph, self.settings, self._weights)
        if graph == SHORTLIST:
            spec = shortlist_spec(self.dims)
        elif graph == STEP:
            spec = step_spec(self.dims, shortlist=bool(self.manifest.shortlist))
        else:
            spec = self.manifest.graphs[graph]
        require_contract(session, spec, self.folder / graph)
        return session

    def _open_openvino(self) -> Any:
        from t5accel.backends.openvino_encoder import OpenvinoEncoder

        if (there := self.manifest.recipe["name"]) != "fp32":
            raise InputError(f"The export must be in fp32 with openvino=True, got {there} in {self.folder}.")
        settings = self.settings
        return OpenvinoEncoder(self.folder / ENCODER, threads=settings.threads, precision=settings.encoder_precision)

    def _run_encoder(self, ids: np.ndarray, mask: np.ndarray) -> list[Any]:
        return self.encoder.run(self.cross_names, {"input_ids": ids, "attention_mask": mask})

    def _run_decoder(self, state: OrtState, new: np.ndarray, past_mask: np.ndarray) -> tuple[np.ndarray, list[Any]]:
        """Tokens (B, K, T) and mask (B, K, P) -> logits on the host, and the longer past; changes no state."""
        (logits,), present = self._run_step(state, new, past_mask, self.outputs[:1])
        return logits, present

    def _run_step(
        self, state: OrtState, new: np.ndarray, past_mask: np.ndarray, results: list[str], exact: bool = True
    ) -> tuple[list[np.ndarray], list[Any]]:
        """The same for any outputs ``results`` in place of the logits."""
        feeds = {"input_ids": new, "past_mask": past_mask, **state.source.inputs}
        feeds.update(zip(self.past_names, state.past, strict=True))
        if self.shortlist:
            feeds["exact"] = np.array(exact)
        found = self.decoder.run([*results, *self.outputs[1:]], feeds)
        return found[: len(results)], found[len(results) :]

    def _gather_past(self, state: OrtState, axes: int, indices: list[Any], shapes: list[tuple[int, ...]]) -> list[Any]:
        """`_gathered` for every tensor of the past."""
        blocks = [as_blocks(self._array(past), axes) for past in state.past]
        found = state.scratch.gather(blocks, indices)
        return [self._hold(new.reshape(*shape, *new.shape[1:])) for new, shape in zip(found, shapes, strict=True)]

    def _hold(self, array: Any) -> Any:
        """A tensor as sources and states keep it."""
        return np.ascontiguousarray(array)

    def _array(self, held: Any) -> Any:
        """A kept tensor, to read and not to write to, without a copy."""
        return held

    def _from_host(self, array: np.ndarray) -> Any:
        """A numpy array on the tensors' device."""
        return array

    def _zeros(self, shape: tuple[int, ...]) -> Any:
        return np.zeros(shape, dtype=self.dtype)

    def _take(self, array: Any, axes: int, index: Any) -> Any:
        return as_blocks(array, axes).take(index, axis=0)

    def _encoded_in_slices(self, ids: np.ndarray, mask: np.ndarray, slices: list[tuple[np.ndarray, int]]) -> OrtSource:
        shapes = [(len(ids), heads, ids.shape[1], self.dims.d_kv) for heads in self.cross_heads]
        cross = self._cross_pool.arrays(shapes, self.dtype)
        by_openvino = self.openvino and (ids.size > memory.SLICE_TOKENS or self.settings.encoder_precision != "fp32")
        run = self.openvino.run_into if by_openvino else partial(run_into, self.encoder)
        encode_in_slices(run, ids, mask, dict(zip(self.cross_names, cross, strict=True)), slices)
        return self._source([self._hold(self._from_host(array)) for array in cross], mask)

    def _source(self, cross: Sequence[Any], mask: np.ndarray) -> OrtSource:
        inputs = dict(zip(self.cross_names, cross, strict=True), attention_mask=self._hold(self._from_host(mask)))
        return OrtSource(inputs, mask)

    def _gathered(self, held: Any, axes: int, index: Any, shape: tuple[int, ...]) -> Any:
        """The blocks numbered ``index`` of all that the first ``axes`` dimensions count: (*shape, …)."""
        taken = self._take(self._array(held), axes, index)
        return self._hold(taken.reshape(*shape, *taken.shape[1:]))


def as_blocks(array: Any, axes: int) -> Any:
    """Flatten the first ``axes`` dimensions.

    >>> as_blocks(np.zeros((2, 3, 4)), 2).shape
    (6, 4)
    """
    return array.reshape(math.prod(array.shape[:axes]), *array.shape[axes:])


def _reopen(
    kind: type[OrtNumpy],
    folder: Path,
    settings: SessionSettings,
    max_source_tokens: int | None,
    files: Mapping[str, Any],
    rules: TokenConstraints,
) -> OrtNumpy:
    backend = kind(folder, settings=settings, max_source_tokens=max_source_tokens)
    if backend.manifest.files != files:
        raise ExportError(f"{folder} holds another export than when the backend was pickled. Pickle it again.")
    backend.rules = rules
    return backend
