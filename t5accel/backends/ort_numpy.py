"""The two graphs on ONNX Runtime, fed with numpy arrays: the way most people do it. Neither torch nor transformers.

Siblings that keep the tensors elsewhere between steps: `bound` and, for a GPU, `pointers`.
"""

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
from t5accel.backends.ort_memory import Pool, Spare, encode_in_slices, run_into
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


@dataclass(frozen=True)
class OrtSource:
    """The encoder's work on B sources.

    Attributes:
        inputs: what the decoder is handed for it at every step, by name, as its backend holds tensors: keys and values
            of cross-attention, each (B, H_i, S, d_kv), and ``attention_mask`` (B, S).
        mask: (B, S) int64, on the host.
    """

    inputs: dict[str, Any]
    mask: np.ndarray


@dataclass
class OrtState:
    """A decoder state: which source, how long each row's past is, and the keys and values of self-attention.

    Attributes:
        past: layer by layer, each (B, K, H_i, P, d_kv), as the backend holds tensors.
        binding: of `bound` and `pointers`, to which the source's tensors are bound.
        spare: for reordered pasts on the host.
        token: (B, K) int64, of `captured`: chosen and not read yet.
    """

    source: OrtSource
    rows: PastLengths
    past: list[Any]
    binding: Any = field(default=None, repr=False)
    spare: Spare = field(default_factory=Spare, repr=False)
    token: np.ndarray | None = None


class OrtNumpy:
    """A `Backend` over an export: every step hands all arrays to the session and takes all of them back.

    On a CPU that moves no data: the session reads contiguous arrays where they lie, and its results are handed out as
    arrays without a copy. To and from a GPU all of it crosses the bus at every step; `traffic` counts the bytes.

    Threads may share a backend; a state belongs to one of them. A method that raises leaves the state as it was.

    Args:
        folder: an export in the two-graph layout.
        settings: threads, memory and device of both sessions.
        verify: hash every file before it is used.
        manifest: of that folder, where it was read and checked already.
        max_source_tokens: refuse longer sources, whose attention grows with the square of their length; at most what
            the model has positions for.

    Attributes:
        shortlist: by which ``next_tokens`` finds tokens faster, if the export has one, and ``settings`` want it.

    Raises:
        ExportError: there is no export, it is damaged, or optimised for another machine.
        MissingPackageError: onnxruntime is not installed, or not the one for the device.

    >>> from tempfile import TemporaryDirectory
    >>> from t5accel.decoding.greedy_search import greedy
    >>> from t5accel.graphs.export import export_model
    >>> with TemporaryDirectory() as folder:
    ...     _ = export_model("mini", f"{folder}/mini")
    ...     greedy(OrtNumpy(f"{folder}/mini"), [[100, 200, 1]], min_new_tokens=5, max_new_tokens=5).sequences.shape
    (1, 5)
    """

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
        self.folder, self.settings = as_folder(folder), SessionSettings() if settings is None else settings
        if not isinstance(self.settings, SessionSettings) or self.settings.device not in self.devices:
            raise InputError(
                f"settings is {settings!r}: {type(self).__name__} takes SessionSettings with a device of "
                f"{', '.join(self.devices)}. On 'cuda' OrtPointers keeps the tensors between steps."
            )
        if max_source_tokens is not None:
            as_count(max_source_tokens, "max_source_tokens", at_least=1)
        self.max_source_tokens = max_source_tokens
        self.manifest = read_manifest(self.folder, verify=verify) if manifest is None else manifest
        require_runnable_here(self.manifest, self.folder, self.settings.device)
        self.dims = self.manifest.dims
        self.vocab_size, self.rules = self.dims.vocab_size, TokenConstraints.from_json(self.manifest.rules)
        if family := self.manifest.family:
            self.source_vocab_size, self.positions = family["source_vocab_size"], family["positions"]
            self.max_source_tokens = min(self.positions, max_source_tokens or self.positions)
        self.pad_token_id = self.manifest.tokens["pad_token_id"]
        self.eos_token_id = self.manifest.tokens["eos_token_id"]
        self.decoder_start_token_id = self.manifest.tokens["decoder_start_token_id"]
        on_cpu = self.settings.device == "cpu"
        self._weights = shared_weights(self.folder, self.manifest) if on_cpu else {}
        wanted = on_cpu and self._takes_shortlist and self.settings.shortlist
        self.shortlist = shortlist_of(self.folder, self.manifest, self._weights) if wanted else None
        # The decoder first: while it is opened its head is in memory twice, and then nothing else is there yet.
        self._open_decoder()
        self.encoder = self._open(ENCODER)
        self.openvino = self._open_openvino() if self.settings.openvino else None
        layers = self.dims.decoder_layers
        self.cross_names, self.past_names = kv_names("cross", layers), kv_names("past", layers)
        self.cross_heads, self.past_heads = (
            [heads for heads in by_layer for _ in range(2)]
            for by_layer in (self.dims.cross_heads, self.dims.decoder_heads)
        )
        self.outputs = ["logits", *kv_names("present", layers)]
        self._spare = Pool()
        self.dtype = np.dtype(self.manifest.graphs[DECODER].outputs[-1].dtype)  # of keys and values

    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> OrtSource:
        ids, mask = np.ascontiguousarray(input_ids), np.ascontiguousarray(attention_mask)
        if self.max_source_tokens is not None and ids.shape[1] > self.max_source_tokens:
            raise InputError(
                f"A source of {ids.shape[1]} tokens is longer than max_source_tokens, {self.max_source_tokens}: "
                "shorten or split it."
            )
        if ids.size > memory.TOKENS and self.settings.device == "cpu":
            return self._encoded_in_slices(ids, mask)
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
        """By the shortlist, if there is one and it pays; else, or where that is not certain, by all exact logits."""
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
        histories, index = state.rows.reordered(rows)
        if index is not None:
            state.past = self._reordered(state, self._from_host(index))
        state.rows = histories

    def rollback(self, state: OrtState, accepted: np.ndarray) -> None:
        histories, index = state.rows.trimmed(accepted)
        if index is not None and not histories.ragged and not state.rows.ragged:  # all rows lose their last ones
            state.past = [self._hold(self._array(past)[..., : histories.width, :]) for past in state.past]
        elif index is not None:
            flat, positions = index.reshape(-1, index.shape[2]), state.rows.width
            by_heads = {heads: expand_index_to_heads(flat, heads, positions) for heads in set(self.past_heads)}
            state.past = self._trimmed(state, index.shape, by_heads)
        state.rows = histories

    def select_sources(self, state: OrtState, sources: np.ndarray) -> None:
        histories, kept = state.rows.kept(sources)
        index = self._from_host(kept)
        past = [self._gathered(past, 1, index, kept.shape) for past in state.past]
        cross = [self._gathered(state.source.inputs[name], 1, index, kept.shape) for name in self.cross_names]
        source = self._source(cross, state.source.mask[kept])
        state.source, state.rows, state.past, state.binding = source, histories, past, None

    def add_sources(self, state: OrtState, source: OrtSource) -> None:
        joined, histories = self.join([state.source, source]), state.rows.joined(len(source.mask))
        past = []
        for heads, held in zip(self.past_heads, state.past, strict=True):
            longer = self._zeros((*histories.shape, heads, histories.width, self.dims.d_kv))
            longer[: len(state.rows.padding)] = self._array(held)
            past.append(self._hold(longer))
        state.source, state.rows, state.past, state.binding = joined, histories, past, None

    def reorder_sources(self, state: OrtState, sources: np.ndarray) -> None:
        """As ``select_sources`` with some sources twice and others not at all, but what is equal for both is left
        alone."""
        histories, kept = state.rows.kept(sources)
        state.past = [self._gathered(past, 1, self._from_host(kept), kept.shape) for past in state.past]
        state.rows = histories

    def split(self, source: OrtSource) -> list[OrtSource]:
        """One source per row with its own copy of the unmasked positions (cross-attention knows no positions)."""
        arrays = [self._array(source.inputs[name]) for name in self.cross_names]
        rows = []
        for row, real in enumerate(source.mask.astype(bool)):
            positions = np.flatnonzero(real)[None]
            flat = {
                heads: self._from_host(expand_index_to_heads(positions, heads, len(real)))
                for heads in set(self.cross_heads)
            }
            cross = [
                self._hold(self._take(array[row : row + 1], 3, flat[heads], (1, heads, positions.size)))
                for array, heads in zip(arrays, self.cross_heads, strict=True)
            ]
            rows.append(self._source(cross, np.ones_like(positions)))
        return rows

    def join(self, sources: Sequence[OrtSource]) -> OrtSource:
        """The rows of all of them as one new batch, padded on the right with zeros and masked there."""
        batch, longest = sum(len(source.mask) for source in sources), max(source.mask.shape[1] for source in sources)
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
        """Pickled and copied by its folder: the copy opens that again, and has threads and memory of its own."""
        return _reopened, (type(self), self.folder.absolute(), self.settings, self.max_source_tokens,
                           self.manifest.files, self.rules)  # fmt: skip

    def close(self) -> None:
        """Free sessions, weights and buffers. Later use raises ``InputError``; closing again is allowed."""
        self.__dict__ = {"is_closed": True}

    def __getattr__(self, name: str) -> Any:
        if self.__dict__.get("is_closed"):
            raise InputError("This backend is closed: open the export again.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # How tensors are held, and handed to the sessions: here as numpy arrays. What the siblings replace.

    def _open_decoder(self) -> None:
        self.decoder = self._open(SHORTLIST if self.shortlist else DECODER)

    def _open(self, graph: str) -> Any:
        session, path = open_session(self.folder / graph, self.settings, self._weights), self.folder / graph
        specs = {
            **self.manifest.graphs, SHORTLIST: shortlist_spec(self.dims),
            STEP: step_spec(self.dims, shortlist=bool(self.manifest.shortlist)),
        }  # fmt: skip
        require_contract(session, specs[graph], path)
        return session

    def _open_openvino(self) -> Any:
        from t5accel.backends.openvino_encoder import OpenvinoEncoder

        if (there := self.manifest.recipe["name"]) != "fp32":
            raise InputError(f"openvino=True encodes in fp32, and {self.folder} is an export in {there}.")
        return OpenvinoEncoder(self.folder / ENCODER, threads=self.settings.threads)

    def _run_encoder(self, ids: np.ndarray, mask: np.ndarray) -> list[Any]:
        return self.encoder.run(self.cross_names, {"input_ids": ids, "attention_mask": mask})

    def _run_decoder(self, state: OrtState, new: np.ndarray, past_mask: np.ndarray) -> tuple[np.ndarray, list[Any]]:
        """(B, K, T) tokens and (B, K, P) mask -> the logits on the host, and the longer past. Changes nothing."""
        (logits,), present = self._run_step(state, new, past_mask, self.outputs[:1])
        return logits, present

    def _run_step(
        self, state: OrtState, new: np.ndarray, past_mask: np.ndarray, results: list[str], exact: bool = True
    ) -> tuple[list[np.ndarray], list[Any]]:
        """The same for any results that come before the longer past."""
        feeds = {"input_ids": new, "past_mask": past_mask, **state.source.inputs}
        feeds.update(zip(self.past_names, state.past, strict=True))
        if self.shortlist:
            feeds["exact"] = np.array(exact)
        found = self.decoder.run([*results, *self.outputs[1:]], feeds)
        return found[: len(results)], found[len(results) :]

    def _reordered(self, state: OrtState, index: Any) -> list[Any]:
        """The past whose rows, counted through, are those numbered ``index`` (B * K,)."""
        arrays = [self._array(past) for past in state.past]
        flat = [array.reshape(index.size, *array.shape[2:]) for array in arrays]
        rows = state.spare.gathered(flat, [index] * len(flat))
        return [self._hold(new.reshape(array.shape)) for new, array in zip(rows, arrays, strict=True)]

    def _trimmed(self, state: OrtState, shape: tuple[int, ...], by_heads: Mapping[int, np.ndarray]) -> list[Any]:
        """The past (B, K, P') whose positions, counted through all rows and heads, are those numbered in the index."""
        flat = [self._array(past).reshape(-1, self.dims.d_kv) for past in state.past]
        found = state.spare.gathered(flat, [by_heads[heads] for heads in self.past_heads])
        batch, rows, width = shape
        return [self._hold(new.reshape(batch, rows, heads, width, -1))
                for new, heads in zip(found, self.past_heads, strict=True)]  # fmt: skip

    def _hold(self, array: Any) -> Any:
        """What was computed, as it is kept in sources and states."""
        return np.ascontiguousarray(array)

    def _array(self, held: Any) -> Any:
        """The other way, without a copy: to compute with, not to write to."""
        return held

    def _from_host(self, array: np.ndarray) -> Any:
        """A numpy array where the tensors are."""
        return array

    def _zeros(self, shape: tuple[int, ...]) -> Any:
        return np.zeros(shape, dtype=self.dtype)

    def _take(self, array: Any, axes: int, index: Any, shape: tuple[int, ...]) -> Any:
        """Of the blocks over which the first ``axes`` dimensions count, those numbered ``index``: `shape` of blocks."""
        block = array.shape[axes:]
        return array.reshape(math.prod(array.shape[:axes]), *block).take(index, axis=0).reshape(*shape, *block)

    # The same for all

    def _encoded_in_slices(self, ids: np.ndarray, mask: np.ndarray) -> OrtSource:
        shapes = [(len(ids), heads, ids.shape[1], self.dims.d_kv) for heads in self.cross_heads]
        cross = self._spare.arrays(shapes, self.dtype)
        run = self.openvino.run_into if self.openvino else partial(run_into, self.encoder)
        encode_in_slices(run, ids, mask, dict(zip(self.cross_names, cross, strict=True)))
        return self._source([self._hold(self._from_host(array)) for array in cross], mask)

    def _source(self, cross: Sequence[Any], mask: np.ndarray) -> OrtSource:
        inputs = dict(zip(self.cross_names, cross, strict=True), attention_mask=self._hold(self._from_host(mask)))
        return OrtSource(inputs, mask)

    def _gathered(self, held: Any, axes: int, index: Any, shape: tuple[int, ...]) -> Any:
        return self._hold(self._take(self._array(held), axes, index, shape))


def _reopened(
    kind: type[OrtNumpy], folder: Path, settings: SessionSettings, most: int | None, files: Mapping[str, Any],
    rules: TokenConstraints,
) -> OrtNumpy:  # fmt: skip
    """What `OrtNumpy.__reduce__` describes; raises ``ExportError`` if the folder holds another export now."""
    backend = kind(folder, settings=settings, max_source_tokens=most)
    if backend.manifest.files != files:
        raise ExportError(f"{folder} holds another export than when the backend was pickled: pickle it again.")
    backend.rules = rules
    return backend
