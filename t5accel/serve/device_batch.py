"""The running batch of a device that takes several steps without the host, in preallocated rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from t5accel.decoding.backend import Source
from t5accel.serve.running_batch import RunningBatch, RunningSequence, each_alone, place_rows

MAX_STEPS = 8  # between two readings of a device's tokens
MAX_CHUNK_S = 0.02  # of these steps, by `MANY_ROWS`, and less by fewer: newcomers and streams wait that long
MANY_ROWS = 32
SHRINK_AFTER_STEPS = 256  # steps in shapes that are larger than needed, before rows move to a smaller one
LENGTH, TOKEN, SHORTEST, SOURCE = range(4)  # of each row's column in the table; the device gets the first three
IDLE = np.array([[0], [0], [-1], [0]])


class DeviceRunningBatch(RunningBatch):
    """A `RunningBatch` with several steps per call, over the rows of ``backend.in_flight()``; warmed for ``rows``.

    The more rows there are, the more steps, up to `MAX_STEPS` within `MAX_CHUNK_S`: streams wait for these. Samples and
    beams need the host after each step: with any of them, all rows take one.

    >>> from t5accel.backends.torch_static import TorchStatic
    >>> from t5accel.models.load import load_model
    >>> from t5accel.serve.request import GenerationRequest
    >>> from t5accel.serve.running_batch import GreedySequence
    >>> batch = DeviceRunningBatch(backend := TorchStatic(load_model("random:t5-small")[0]))
    >>> part = GreedySequence(backend, GenerationRequest([100, 1], max_new_tokens=2))
    >>> batch.add(batch.encoder.encode(np.array([[100, 1]]), np.ones((1, 2), dtype=np.int64)), [part])
    >>> batch.step(), batch.step() == [part], len(part.tokens)
    ([], True, 2)
    """

    call_tokens = 512  # see `RunningBatch`; a device computes small batches as fast as one row

    def __init__(self, backend: Any, rows: int = 0, *, clock: Callable[[], float] = time.perf_counter):
        super().__init__(backend)
        self.joins_running, self.encoder = True, backend.in_flight()
        if rows:  # capture the graphs for up to this many rows of short requests
            self.encoder.warm(rows)
        self._positions = getattr(backend, "positions", None) or math.inf
        self._clock, self._step_s = clock, 0.0
        self._table = np.tile(IDLE, self.encoder.shape[0])
        self._oversized_steps = 0  # in a row, for which a smaller shape is enough

    @property
    def rows(self) -> int:
        return sum(part.rows.size for part in self.parts)

    def add(self, source: Source, parts: Sequence[RunningSequence]) -> None:
        """Start sequences; ``encoder`` must have encoded the source."""
        count = sum(part.count for part in parts)
        self._fit(rows=self.rows + count, source=source.width, ahead=1)
        where = np.flatnonzero(self._table[SOURCE] == 0)[:count]
        self.encoder.add_sources(where, source)
        place_rows(parts, where)
        for part in parts:
            shortest = part.shortest if part.is_greedy else -1
            self._table[:, part.rows] = [[0], [part.start], [shortest], [source.width]]
        self.parts += parts

    def remove(self, parts: Sequence[RunningSequence]) -> None:
        for part in parts:
            self._table[:, part.rows] = IDLE
        leaving = set(parts)
        self.parts = [part for part in self.parts if part not in leaving]

    def clear(self) -> None:
        self.remove(self.parts)

    def step(self) -> list[RunningSequence]:
        greedy = [part for part in self.parts if part.is_greedy]
        others = [part for part in self.parts if not part.is_greedy]
        count = 1 if others else self._count()
        self._fit(rows=self.rows, source=1, ahead=count)
        first = [part for part in greedy if not part.tokens]
        forced = [(int(part.rows[0]), part.forced_token) for part in first if part.forced_token is not None]
        began = self._clock()
        found = self.encoder.run(self._table[:SOURCE], count, tuple(zip(*forced, strict=True)) or ((), ()))
        self._update_step_time((self._clock() - began) / count)
        logits = self.encoder.logits(np.concatenate([part.rows for part in others])) if others else None  # may raise
        tokens = found.tolist()
        self._table[LENGTH, self._table[SOURCE] > 0] += count  # from here on a step is not taken again
        self.steps, self.tokens = count, 0
        self._table[TOKEN] = found[:, -1]
        for row, token in forced if count == 1 else ():
            self._table[TOKEN, row] = token

        def append(part: RunningSequence) -> None:
            for token in tokens[part.rows[0]]:
                self.tokens += 1
                part.append(token)
                if part.is_done:
                    break

        each_alone(greedy, append)
        if others:
            self.tokens += len(logits)
            self._advance(others, logits, self._table[TOKEN])
        return self._finished()

    def _reorder(self, moved: np.ndarray, order: np.ndarray) -> None:
        self.encoder.reorder_sources(moved, order[moved])

    def _count(self) -> int:
        count = min(MAX_STEPS, max(part.missing for part in self.parts))
        # A row that ends within these steps goes on to their end: not into larger buffers, nor beyond all positions.
        room = min(self.encoder.shape[2], self._positions) - int(self._table[LENGTH].max())
        count = min(count, room) if room > 0 else 1
        share = min(1.0, self.rows / MANY_ROWS)
        return max(1, min(count, int(share * (MAX_CHUNK_S / self._step_s if self._step_s else MAX_STEPS))))

    def _update_step_time(self, step_s: float) -> None:
        # The shortest recent step: a pause of the host is not the device's time.
        old = self._step_s
        self._step_s = step_s if not old or step_s < old else old + 0.1 * (step_s - old)

    def _fit(self, rows: int, source: int, ahead: int) -> None:
        longest = int(self._table[LENGTH].max(initial=0)) + ahead
        wanted = self.encoder.shape_for(rows, max(source, int(self._table[SOURCE].max(initial=0))), longest)
        held = self.encoder.shape
        fits = all(new <= old for new, old in zip(wanted, held, strict=True))
        self._oversized_steps = self._oversized_steps + ahead if fits and wanted != held and self.rows else 0
        if fits and self.rows and self._oversized_steps < SHRINK_AFTER_STEPS:
            return
        if wanted != held:
            kept = np.concatenate([part.rows for part in self.parts]) if self.parts else np.empty(0, dtype=np.int64)
            self.encoder.fit(wanted, kept)
            table = np.tile(IDLE, wanted[0])
            table[:, : kept.size] = self._table[:, kept]
            self._table, self._oversized_steps = table, 0
            place_rows(self.parts, np.arange(kept.size))
