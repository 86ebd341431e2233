"""Which row of a decoder state has how long a past: the bookkeeping of a batch, apart from any tensors of a runtime."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from t5accel.decoding.backend import right_aligned


@dataclass(frozen=True)
class Histories:
    """B sources of K rows each, whose pasts end together at the right of ``width`` positions (P).

    It never changes. A method returns what the histories are afterwards, and where that moves
    anything, an index to gather the runtime's tensors by. So a runtime gathers first, and takes over both at the end:
    if something fails between (no memory, an interrupt), its state is still the one from before.

    Attributes:
        padding: (B, K) int64, how many positions in front of each row's past are not real.
        width: P.
        last: T of the last step, of which `trimmed` may drop some.
        ragged: whether there is any padding.

    >>> rows = Histories.empty(batch=1, rows_per_source=2).appended(3)
    >>> rows, index = rows.trimmed(np.array([[1, 3]]))  # row 0 keeps one of three positions, moved to the right end
    >>> index.tolist(), rows.mask().tolist()
    ([[[0, 0, 0], [0, 1, 2]]], [[[0, 0, 1], [1, 1, 1]]])
    """

    padding: np.ndarray
    width: int = 0
    last: int = 0
    ragged: bool = False

    @classmethod
    def empty(cls, batch: int, rows_per_source: int) -> Histories:
        """Nothing yet."""
        return cls(np.zeros((batch, rows_per_source), dtype=np.int64))

    @property
    def shape(self) -> tuple[int, int]:
        """(B, K)."""
        return self.padding.shape

    @property
    def lengths(self) -> np.ndarray:
        """(B, K) int64, how many of the last positions are real."""
        return self.width - self.padding

    def mask(self) -> np.ndarray:
        """(B, K, P) int64: 1 where a past position is real."""
        if not self.ragged:
            return np.ones((*self.padding.shape, self.width), dtype=np.int64)
        return right_aligned(self.lengths, self.width)

    def appended(self, count: int) -> Histories:
        """Every row has ``count`` more positions."""
        return Histories(self.padding, self.width + count, count, self.ragged)

    def reordered(self, rows: np.ndarray) -> tuple[Histories, np.ndarray | None]:
        """Row k of source b goes on as row ``rows[b, k]`` of the same source.

        Returns:
            The histories, and (B * K,) int64: for each row which one of all rows it was; ``None`` where all stay.
        """
        if (rows == np.arange(self.shape[1])).all():
            return self, None
        flat = (np.arange(self.shape[0])[:, None] * self.shape[1] + rows).ravel()
        return self._with_padding(self.padding.ravel()[flat].reshape(self.shape)), flat

    def kept(self, sources: np.ndarray) -> tuple[Histories, np.ndarray]:
        """Only these sources (n,) stay, in this order; returns the histories, and ``sources`` to gather by."""
        return self._with_padding(self.padding[sources]), sources

    def trimmed(self, accepted: np.ndarray) -> tuple[Histories, np.ndarray | None]:
        """Of the last step keep the first ``accepted[b, k]`` positions.

        Returns:
            The histories, and (B, K, P') int64: the old position of each new one; ``None`` where all stay. In front of
            a shorter history it points anywhere, and `mask` is 0 there.
        """
        dropped = self.last - accepted
        if not dropped.any():
            return Histories(self.padding, self.width, 0, self.ragged), None
        ends = self.width - dropped  # of the rows' pasts; all of them move to the new right end
        lengths = ends - self.padding
        width = int(lengths.max())
        index = np.maximum(np.arange(width) + (ends - width)[..., None], 0)
        padding = width - lengths
        return Histories(padding, width, 0, bool(padding.any())), index

    def _with_padding(self, padding: np.ndarray) -> Histories:
        return Histories(padding, self.width, self.last, bool(padding.any()))


def of_each_head(index: np.ndarray, heads: int, width: int) -> np.ndarray:
    """Positions within rows -> the same positions of each head, counted through (R, H, width): (R, n) -> (R * H * n,).

    >>> of_each_head(np.array([[0, 2]]), heads=2, width=3).tolist()
    [0, 2, 3, 5]
    """
    first = np.arange(len(index) * heads).reshape(len(index), heads, 1) * width
    return (first + index[:, None, :]).ravel()
