"""A backend that encodes each text once: a cache of encoder outputs around another backend."""

# The idea is that of `CachedT5` wrappers, whose caller passes a text's encoder output back. Here the cache finds it by
# the row's content, whichever batch it comes in.

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from t5accel.checks import as_count
from t5accel.decoding.backend import VOCABULARY, Backend, Source, State, check_backend

_HOLE = -1  # for a masked position between two tokens; no token has a negative id


def row_keys(input_ids: np.ndarray, attention_mask: np.ndarray) -> list[bytes]:
    """Compute keys that determine each row's encoder output; arrays are (B, S) int64.

    >>> ids = np.array([[0, 5, 6], [5, 6, 0], [5, 0, 6]])
    >>> left, right, hole = row_keys(ids, (ids != 0).astype(np.int64))
    >>> left == right, left == hole
    (True, False)
    """
    # Padding at either end is dropped, because T5 knows distances only; between two tokens it moves them apart.
    marked = np.where(attention_mask, input_ids, _HOLE)
    first = attention_mask.argmax(axis=1)
    end = attention_mask.shape[1] - attention_mask[:, ::-1].argmax(axis=1)
    return [row[start:stop].tobytes() for row, start, stop in zip(marked, first, end, strict=True)]


class EncoderCache:
    """A `Backend` that keeps encoder outputs of rows; the wrapped backend does everything else.

    Missing rows are encoded in one batch, each once. Beyond ``max_bytes`` (outputs on their device, and keys; 0 keeps
    nothing) the least recently used rows are dropped, and all rows when the backend's ``fingerprint`` changes;
    `TorchEager.fingerprint` lists changes of weights that it cannot see, for which there is `clear`. A row that was
    encoded in another batch differs by rounding. Threads may share a cache: a hit does not wait for the encoder, and
    two threads that miss the same row both encode it.

    Raises ``InputError`` if the backend lacks ``split``, ``join``, ``source_bytes`` or ``fingerprint``.
    """

    vocab_size: int
    pad_token_id: int
    eos_token_id: int
    decoder_start_token_id: int

    def __init__(self, backend: Backend, *, max_bytes: int = 256_000_000):
        check_backend(backend, ("split", "join", "source_bytes", "fingerprint"))
        self.backend, self.max_bytes = backend, as_count(max_bytes, "max_bytes", at_least=0)
        for name in VOCABULARY:  # set, because from Python 3.12 on isinstance(..., Backend) does not ask __getattr__
            setattr(self, name, getattr(backend, name))
        self.hits = 0  # rows that needed no encoding, duplicates of a row in the same batch included
        self.misses = 0  # rows that were encoded; a row whose encoding raised counts as neither
        self.size_bytes = 0
        self._rows: OrderedDict[bytes, tuple[Source, int]] = OrderedDict()  # with their sizes, the oldest use first
        self._fingerprint = backend.fingerprint()
        self._lock = threading.Lock()  # guards all of the above, and is not held while the backend encodes

    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> Source:
        keys = self._keys(input_ids, attention_mask)
        if not self.max_bytes and len({*keys}) == len(keys):
            source = self.backend.encode(input_ids, attention_mask)
            with self._lock:
                self.misses += len(keys)
            return source
        with self._lock:
            fingerprint = self.backend.fingerprint()
            if fingerprint != self._fingerprint:
                self._drop()
                self._fingerprint = fingerprint
            kept = self._rows
            found = {key: kept[key][0] for key in keys if key in kept}
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        if missing:
            found.update(zip(missing, self._encode_rows(missing), strict=True))
        with self._lock:
            self.hits += len(keys) - len(missing)
            self.misses += len(missing)
            if kept is self._rows:  # otherwise all rows were dropped meanwhile, and these have the old weights
                for key in dict.fromkeys(keys):
                    self._keep_row(key, found[key])
        return self.backend.join([found[key] for key in keys])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy without the rows."""
        return partial(EncoderCache, max_bytes=self.max_bytes), (self.backend,)

    def holds(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> list[bool]:
        """Return for each row whether it is cached; does not count as a use."""
        with self._lock:
            return [key in self._rows for key in self._keys(input_ids, attention_mask)]

    def clear(self) -> None:
        """Drop all rows, also those that are being encoded; ``hits`` and ``misses`` continue."""
        with self._lock:
            self._drop()

    def new_state(self, source: Source, rows_per_source: int = 1) -> State:
        return self.backend.new_state(source, rows_per_source)

    def step(self, state: State, input_ids: np.ndarray) -> np.ndarray:
        return self.backend.step(state, input_ids)

    def reorder(self, state: State, rows: np.ndarray) -> None:
        self.backend.reorder(state, rows)

    def rollback(self, state: State, accepted: np.ndarray) -> None:
        self.backend.rollback(state, accepted)

    def select_sources(self, state: State, sources: np.ndarray) -> None:
        self.backend.select_sources(state, sources)

    def __getattr__(self, name: str) -> Any:  # optional methods, model, device …
        if name == "backend":  # not set yet, as while being unpickled
            raise AttributeError(name)
        return getattr(self.backend, name)

    def _keys(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> list[bytes]:
        # Absolute positions count columns, or (M2M100) tokens that are not the pad id: all before a row's last token.
        if hasattr(self.backend, "positions"):
            input_ids = np.where(attention_mask, input_ids, -1 - input_ids)
            attention_mask = np.maximum.accumulate(attention_mask[:, ::-1], axis=1)[:, ::-1]
        return row_keys(input_ids, attention_mask)

    def _encode_rows(self, keys: Sequence[bytes]) -> list[Source]:
        rows = [np.frombuffer(key, dtype=np.int64) for key in keys]
        marked = np.full((len(rows), max(map(len, rows))), -1 - self.pad_token_id, dtype=np.int64)
        for target, row in zip(marked, rows, strict=True):
            target[: len(row)] = row
        mask = (marked >= 0).astype(np.int64)
        return self.backend.split(self.backend.encode(np.where(mask, marked, -1 - marked), mask))

    def _keep_row(self, key: bytes, row: Source) -> None:
        if key in self._rows:
            self._rows.move_to_end(key)
            return
        size = self.backend.source_bytes(row) + len(key)
        if size <= self.max_bytes:
            self._rows[key] = row, size
            self.size_bytes += size
        while self.size_bytes > self.max_bytes:
            self.size_bytes -= self._rows.popitem(last=False)[1][1]

    def _drop(self) -> None:
        self._rows, self.size_bytes = OrderedDict(), 0  # a new dictionary: an encode in progress sees the difference
