"""Encode each text once: a backend around any backend that keeps encoder outputs, row by row.

The idea is that of the ``CachedT5`` wrappers, whose caller hands a text's encoder output back to skip the encoder.
Here the cache finds it: by what the row says, whichever batch it comes in, and only while the weights are the same.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from t5accel.checks import as_count
from t5accel.decoding.backend import Backend, Source, State
from t5accel.errors import InputError

_NUMBERS = ("vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id")
_NEEDED = ("encode", "split", "join", "source_bytes", "fingerprint", *_NUMBERS)
_HOLE = -1  # stands for a masked position between two tokens; no token has this id


def row_keys(input_ids: np.ndarray, attention_mask: np.ndarray) -> list[bytes]:
    """What decides each row's encoder output: its tokens and their distances. Two (B, S) int64 -> B keys.

    Padding at either end is dropped, because T5 knows distances only. What a masked position holds does not matter;
    between two tokens it is kept as a hole, because it moves them apart.

    >>> ids = np.array([[0, 5, 6], [5, 6, 0], [5, 0, 6]])
    >>> left, right, hole = row_keys(ids, (ids != 0).astype(np.int64))
    >>> left == right, left == hole
    (True, False)
    """
    marked = np.where(attention_mask, input_ids, _HOLE)
    first = attention_mask.argmax(axis=1)
    end = attention_mask.shape[1] - attention_mask[:, ::-1].argmax(axis=1)
    return [row[start:stop].tobytes() for row, start, stop in zip(marked, first, end, strict=True)]


class EncoderCache:
    """A `Backend` that encodes only rows whose encoder output it does not hold; the wrapped one does everything else.

    Each row is looked up by `row_keys`, the missing ones are encoded in one batch, each once, and the batch's source is
    joined from the rows. The least recently used rows leave when ``max_bytes`` is exceeded; a single row larger than
    that is not kept. If the backend's ``fingerprint`` changed, all rows are dropped before the lookup; for changes of
    weights that it cannot see (`TorchEager.fingerprint` lists them) there is `clear`.

    Threads may share it: a hit does not wait for the encoder, and two threads that miss the same row both encode it.
    Encoded in another batch, a row's numbers differ by rounding, as they do without a cache.

    Args:
        backend: any backend with the optional methods ``split``, ``join``, ``source_bytes`` and ``fingerprint``.
        max_bytes: memory for encoder outputs and keys, on the device that holds them; 0 keeps nothing.

    Attributes:
        hits: rows so far that needed no encoding, twins of a row in the same batch included.
        misses: rows that were encoded; one that raised counts as neither.
        size_bytes: memory of the rows that are kept.

    Raises:
        InputError: the backend lacks methods, or ``max_bytes`` is not an integer of at least 0. Where the backend's
            ``encode`` raises, the cache is as before.

    >>> class Toy:  # a toy backend whose source is a list of rows
    ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 9, 0, 1, 0
    ...     def encode(self, input_ids, attention_mask):
    ...         print("encodes", input_ids.tolist())
    ...         return [ids[mask > 0] * 10 for ids, mask in zip(input_ids, attention_mask)]
    ...     def split(self, source): return [[row] for row in source]
    ...     def join(self, sources): return [row for source in sources for row in source]
    ...     def source_bytes(self, source): return sum(row.nbytes for row in source)
    ...     def fingerprint(self): return "these weights"
    >>> cache = EncoderCache(Toy())
    >>> source = cache.encode(np.array([[5, 6, 1]]), np.array([[1, 1, 1]]))
    encodes [[5, 6, 1]]
    >>> ids = np.array([[7, 1, 0, 0], [0, 5, 6, 1], [7, 1, 0, 0]])
    >>> cache.encode(ids, (ids != 0).astype(np.int64))
    encodes [[7, 1]]
    [array([70, 10]), array([50, 60, 10]), array([70, 10])]
    >>> cache.hits, cache.misses, cache.size_bytes
    (2, 2, 80)
    """

    def __init__(self, backend: Backend, *, max_bytes: int = 256_000_000):
        missing = [name for name in _NEEDED if not hasattr(backend, name)]
        if missing:
            raise InputError(
                f"{type(backend).__name__} cannot be cached, it lacks {', '.join(missing)}: give a backend that offers "
                "them, such as TorchEager."
            )
        self.backend, self.max_bytes = backend, as_count(max_bytes, "max_bytes", at_least=0)
        for name in _NUMBERS:  # set, because from Python 3.12 on isinstance(..., Backend) does not ask __getattr__
            setattr(self, name, getattr(backend, name))
        self.hits = self.misses = self.size_bytes = 0
        self._rows: OrderedDict[bytes, tuple[Source, int]] = OrderedDict()  # with their bytes; the oldest use first
        self._fingerprint = backend.fingerprint()
        self._lock = threading.Lock()  # guards all of the above, and is not held while the backend encodes

    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> Source:
        keys = row_keys(input_ids, attention_mask)
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
            if kept is self._rows:  # otherwise all was dropped meanwhile, and these rows are of the old weights
                for key in dict.fromkeys(keys):
                    self._keep_row(key, found[key])
        return self.backend.join([found[key] for key in keys])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and copied without what it keeps."""
        return partial(EncoderCache, max_bytes=self.max_bytes), (self.backend,)

    def holds(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> list[bool]:
        """For each of B rows whether it is kept at the moment; asks for nothing and moves nothing."""
        with self._lock:
            return [key in self._rows for key in row_keys(input_ids, attention_mask)]

    def clear(self) -> None:
        """Forget all rows, also those being encoded at the moment; ``hits`` and ``misses`` count on."""
        with self._lock:
            self._drop()

    def start(self, source: Source, rows_per_source: int = 1) -> State:
        return self.backend.start(source, rows_per_source)

    def step(self, state: State, input_ids: np.ndarray) -> np.ndarray:
        return self.backend.step(state, input_ids)

    def reorder(self, state: State, rows: np.ndarray) -> None:
        self.backend.reorder(state, rows)

    def trim(self, state: State, accepted: np.ndarray) -> None:
        self.backend.trim(state, accepted)

    def keep(self, state: State, sources: np.ndarray) -> None:
        self.backend.keep(state, sources)

    def __getattr__(self, name: str) -> Any:  # what only some backends offer: run_greedy, model, device …
        if name == "backend":  # not set yet, as while being unpickled
            raise AttributeError(name)
        return getattr(self.backend, name)

    def _encode_rows(self, keys: Sequence[bytes]) -> list[Source]:
        rows = [np.frombuffer(key, dtype=np.int64) for key in keys]
        marked = np.full((len(rows), max(map(len, rows))), _HOLE, dtype=np.int64)
        for target, row in zip(marked, rows, strict=True):
            target[: len(row)] = row
        mask = (marked != _HOLE).astype(np.int64)
        return self.backend.split(self.backend.encode(np.where(mask, marked, self.pad_token_id), mask))

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
