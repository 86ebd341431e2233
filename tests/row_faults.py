"""Faults in rows that join and leave, planted by the tests of the backend and of the scheduler alike."""

from typing import Any

import numpy as np
import pytest

from t5accel.backends.ort_memory import KVBuffers
from t5accel.backends.ort_static import FusedDecoder
from t5accel.decoding.backend import PastLengths


def stale_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there before a row came is taken for its history."""
    real = PastLengths.placed

    def placed(self: PastLengths, places: np.ndarray) -> PastLengths:
        padding = real(self, places).padding
        padding[places] = 0
        return self._with_padding(padding)

    monkeypatch.setattr(PastLengths, "placed", placed)


def shifted_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that moves to the left goes one column too far."""
    real = FusedDecoder._row_copies

    def moves(self: FusedDecoder, state: Any, rows: np.ndarray, first: int, shift: int = 0) -> list[Any]:
        found = real(self, state, rows, first, shift)
        return [(array, where, np.roll(new, -1, axis=3)) for array, where, new in found] if shift else found

    monkeypatch.setattr(FusedDecoder, "_row_copies", moves)


def cross_row_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that takes another's place reads the other's source."""
    real = KVBuffers.flush

    def flush(self: KVBuffers) -> None:
        self.pending_copies = [move for move in self.pending_copies if move[0].ndim == 5]
        real(self)

    monkeypatch.setattr(KVBuffers, "flush", flush)
