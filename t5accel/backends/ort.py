"""The two graphs on ONNX Runtime, fed with numpy arrays: the way most people do it. Neither torch nor transformers.

`ort_bound` does the same through IOBinding.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from t5accel.backends.ort_session import SessionSettings, open_session
from t5accel.decoding.backend import as_batch, as_count
from t5accel.decoding.histories import Histories, check_vocabulary
from t5accel.errors import InputError
from t5accel.graphs.contract import DECODER, ENCODER, names
from t5accel.graphs.manifest import read_manifest


@dataclass(frozen=True)
class OrtSource:
    """The encoder's work on B sources.

    Attributes:
        cross: keys and values of cross-attention, layer by layer, each (B, H_i, S, d_kv).
        mask: (B, S) int64.
        owner: the backend that encoded it.
    """

    cross: list[Any]
    mask: np.ndarray
    owner: Any


@dataclass
class OrtState:
    """A decoder state: which source, how long each row's past is, and the keys and values of self-attention.

    Attributes:
        past: layer by layer, each (B, K, H_i, P, d_kv).
        bound: of `ort_bound`, the binding that holds the source's tensors.
    """

    source: OrtSource
    rows: Histories
    past: list[Any]
    bound: Any = field(default=None, repr=False)


class OrtNumpy:
    """A `Backend` over an export: every step hands all arrays to the session and takes all of them back.

    Args:
        folder: an export in the two-graph layout.
        settings: threads and memory of both sessions.
        verify: hash every file before it is used.
        max_source_tokens: refuse longer sources, whose attention grows with the square of their length.

    Raises:
        ExportError: there is no export, or it is damaged.
        MissingPackageError: onnxruntime is not installed.

    >>> from tempfile import TemporaryDirectory
    >>> from t5accel.decoding.greedy import greedy
    >>> from t5accel.graphs.export import export_t5
    >>> with TemporaryDirectory() as folder:
    ...     _ = export_t5("mini", f"{folder}/mini")
    ...     greedy(OrtNumpy(f"{folder}/mini"), [[100, 200, 1]], max_new_tokens=5).sequences.shape
    (1, 5)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        settings: SessionSettings | None = None,
        verify: bool = True,
        max_source_tokens: int | None = None,
    ):
        self.folder, self.settings = Path(folder), settings or SessionSettings()
        if max_source_tokens is not None:
            as_count(max_source_tokens, "max_source_tokens", at_least=1)
        self.max_source_tokens = max_source_tokens
        self.manifest = read_manifest(folder, verify=verify)
        self.dims = self.manifest.dims
        self.vocab_size = self.dims.vocab_size
        self.pad_token_id = self.manifest.tokens["pad_token_id"]
        self.eos_token_id = self.manifest.tokens["eos_token_id"]
        self.decoder_start_token_id = self.manifest.tokens["decoder_start_token_id"]
        self.encoder = open_session(self.folder / ENCODER, self.settings)
        self.decoder = open_session(self.folder / DECODER, self.settings)
        layers = self.dims.decoder_layers
        self.cross_names, self.past_names = names("cross", layers), names("past", layers)
        self.outputs = ["logits", *names("present", layers)]

    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> OrtSource:
        ids, mask = as_batch(input_ids, attention_mask, pad_token_id=self.pad_token_id)
        check_vocabulary(ids, self.vocab_size)
        if self.max_source_tokens is not None and ids.shape[1] > self.max_source_tokens:
            raise InputError(
                f"A source of {ids.shape[1]} tokens is longer than max_source_tokens, {self.max_source_tokens}: shorten "
                "or split it."
            )
        # Copies, because the caller may write to its arrays and the graphs read them later.
        ids, mask = (np.array(array, order="C") for array in (ids, mask))
        return OrtSource(self._run_encoder(ids, mask), mask, self)

    def start(self, source: OrtSource, rows_per_source: int = 1) -> OrtState:
        self._check_source(source)
        rows = Histories.empty(len(source.mask), rows_per_source)
        shape = (*rows.lengths.shape, 0, 0, self.dims.d_kv)
        past = []
        for heads in self.dims.decoder_heads:
            empty = np.empty((*shape[:2], heads, 0, shape[4]), dtype=np.float32)
            past += [self._hold(empty), self._hold(empty)]
        return self._bind(OrtState(source, rows, past))

    def step(self, state: OrtState, input_ids: np.ndarray) -> np.ndarray:
        self._check_state(state)
        new = np.ascontiguousarray(state.rows.check_step(input_ids, self.vocab_size))
        logits, state.past = self._run_decoder(state, new)
        state.rows.append(new.shape[2])
        return logits

    def reorder(self, state: OrtState, rows: np.ndarray) -> None:
        self._check_state(state)
        index = state.rows.reorder(rows)
        if (index != np.arange(index.shape[1])).any():
            first = np.arange(len(index))[:, None]
            state.past = [self._hold(self._array(past)[first, index]) for past in state.past]

    def trim(self, state: OrtState, accepted: np.ndarray) -> None:
        self._check_state(state)
        index = state.rows.trim(accepted)
        if index is not None:
            where = index[:, :, None, :, None]
            state.past = [self._hold(np.take_along_axis(self._array(past), where, axis=3)) for past in state.past]

    def keep(self, state: OrtState, sources: np.ndarray) -> None:
        self._check_state(state)
        index = state.rows.keep(sources)
        state.past = [self._hold(self._array(past)[index]) for past in state.past]
        cross = [self._hold(self._array(tensor)[index]) for tensor in state.source.cross]
        state.source = OrtSource(cross, state.source.mask[index], self)
        self._bind(state)

    def split(self, source: OrtSource) -> list[OrtSource]:
        """One source per row with its own copy of the unmasked positions (cross-attention knows no positions)."""
        self._check_source(source)
        arrays = [self._array(tensor) for tensor in source.cross]
        return [
            OrtSource([self._hold(a[row : row + 1][:, :, real]) for a in arrays], source.mask[row : row + 1, real], self)
            for row, real in enumerate(source.mask.astype(bool))
        ]

    def join(self, sources: Sequence[OrtSource]) -> OrtSource:
        """The rows of all of them as one new batch, padded on the right with zeros and masked there."""
        for source in sources:
            self._check_source(source)
        if not sources:
            raise InputError("There are no sources to join: give at least one.")
        longest = max(source.mask.shape[1] for source in sources)

        def padded(array: np.ndarray, axis: int) -> np.ndarray:
            missing = [(0, longest - array.shape[axis] if axis == number else 0) for number in range(array.ndim)]
            return np.pad(array, missing)

        cross = [
            self._hold(np.concatenate([padded(self._array(tensor), 2) for tensor in tensors]))
            for tensors in zip(*(source.cross for source in sources), strict=True)
        ]
        return OrtSource(cross, np.concatenate([padded(source.mask, 1) for source in sources]), self)

    def source_bytes(self, source: OrtSource) -> int:
        return source.mask.nbytes + sum(self._array(tensor).nbytes for tensor in source.cross)

    def fingerprint(self) -> Hashable:
        """Always the same: the weights of a session do not change."""
        return self.manifest.source["sha256"], tuple(sorted(self.manifest.recipe.items()))

    # What `ort_bound` does in another way

    def _run_encoder(self, ids: np.ndarray, mask: np.ndarray) -> list[Any]:
        return self.encoder.run(self.cross_names, {"input_ids": ids, "attention_mask": mask})

    def _run_decoder(self, state: OrtState, new: np.ndarray) -> tuple[np.ndarray, list[Any]]:
        feeds = {"input_ids": new, "attention_mask": state.source.mask, "past_mask": state.rows.mask()}
        feeds |= zip(self.past_names, state.past, strict=True)
        feeds |= zip(self.cross_names, state.source.cross, strict=True)
        logits, *present = self.decoder.run(self.outputs, feeds)
        return logits, present

    def _bind(self, state: OrtState) -> OrtState:
        return state

    def _hold(self, array: np.ndarray) -> Any:
        return np.ascontiguousarray(array)

    def _array(self, value: Any) -> np.ndarray:
        return value

    def _check_source(self, source: OrtSource) -> None:
        if getattr(source, "owner", None) is not self:
            raise InputError("This source was encoded by another backend: encode it with this one.")

    def _check_state(self, state: OrtState) -> None:
        if not isinstance(state, OrtState) or state.source.owner is not self:
            raise InputError("This state was not started by this backend: give what its start() returned.")
