"""Which row of a decoder state has how long a past: the bookkeeping of a batch, apart from any tensors of a runtime."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from t5accel.decoding.backend import as_count, as_integers, right_aligned
from t5accel.errors import InputError


@dataclass
class Histories:
    """B sources of K rows each, whose pasts end together at the right of ``width`` positions (P).

    Every method checks its argument, keeps its own numbers, and returns what the runtime needs for its tensors.

    Attributes:
        lengths: (B, K) int64, how many of the last positions are real.
        width: P.
        last: T of the last step, of which `trim` may drop some.

    >>> rows = Histories.empty(batch=1, rows_per_source=2)
    >>> rows.append(3)
    >>> rows.trim([[1, 3]]).tolist()  # row 0 keeps one of its three positions, and it moves to the right end
    [[[0, 0, 0], [0, 1, 2]]]
    >>> rows.mask().tolist()
    [[[0, 0, 1], [1, 1, 1]]]
    """

    lengths: np.ndarray
    width: int = 0
    last: int = 0

    @classmethod
    def empty(cls, batch: int, rows_per_source: int) -> Histories:
        """Nothing yet. Raises ``InputError`` for less than one row."""
        return cls(np.zeros((batch, as_count(rows_per_source, "rows_per_source", at_least=1)), dtype=np.int64))

    def check_step(self, input_ids: np.ndarray, vocab_size: int) -> np.ndarray:
        """``input_ids`` as (B, K, T) int64, T >= 1, in the vocabulary; raises ``InputError``."""
        new = as_integers(input_ids, "input_ids", rank=3)
        if new.shape[:2] != self.lengths.shape or not new.shape[2]:
            raise InputError(f"input_ids has shape {new.shape}; this state takes {(*self.lengths.shape, 'T >= 1')}.")
        check_vocabulary(new, vocab_size)
        return new

    def append(self, count: int) -> None:
        """Every row has ``count`` more positions."""
        self.lengths, self.width, self.last = self.lengths + count, self.width + count, count

    def mask(self) -> np.ndarray:
        """(B, K, P) int64: 1 where a past position is real."""
        return right_aligned(self.lengths, self.width)

    def reorder(self, rows: np.ndarray) -> np.ndarray:
        """Row k of source b goes on as row ``rows[b, k]`` of the same source; returns ``rows``, checked."""
        rows = self._per_row(rows, "rows", highest=self.lengths.shape[1] - 1)
        self.lengths = np.take_along_axis(self.lengths, rows, axis=1)
        return rows

    def keep(self, sources: np.ndarray) -> np.ndarray:
        """Only these sources stay, in this order; returns ``sources``, checked."""
        sources = as_integers(sources, "sources", rank=1)
        if not sources.size or sources.min() < 0 or sources.max() >= len(self.lengths):
            raise InputError(
                f"sources is {sources.tolist()}; give at least one index in 0 … {len(self.lengths) - 1}."
            )
        self.lengths = self.lengths[sources]
        return sources

    def trim(self, accepted: np.ndarray) -> np.ndarray | None:
        """Of the last step keep the first ``accepted[b, k]`` positions.

        Returns:
            (B, K, P') the old position of each new one, to gather by; ``None`` where all stay as they are. In front of
            a shorter history it points anywhere; `mask` is 0 there.
        """
        accepted = self._per_row(accepted, "accepted", highest=self.last)
        dropped = self.last - accepted
        self.lengths = self.lengths - dropped
        self.last, old_width = 0, self.width
        if not dropped.any():
            return None
        self.width = int(self.lengths.max())
        # The end of a row moves from old_width - dropped to width.
        index = np.arange(self.width) + (old_width - dropped - self.width)[..., None]
        return np.maximum(index, 0)

    def _per_row(self, values: np.ndarray, name: str, *, highest: int) -> np.ndarray:
        values = as_integers(values, name, rank=2)
        if values.shape != self.lengths.shape or values.min() < 0 or values.max() > highest:
            raise InputError(
                f"{name} of shape {values.shape}: give shape {self.lengths.shape} with values in 0 … {highest}."
            )
        return values


def check_vocabulary(ids: np.ndarray, vocab_size: int) -> None:
    """Raise ``InputError`` for an id outside 0 … vocab_size - 1: a runtime may crash on it, or read what lies beyond."""
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise InputError(f"input_ids must lie in 0 … {vocab_size - 1}; {ids.min()} … {ids.max()} were given.")
