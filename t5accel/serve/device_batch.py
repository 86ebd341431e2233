"""The running batch of a device that takes several steps without the host, in preallocated rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from t5accel.decoding.backend import Source
from t5accel.serve.running_batch import GreedySequence, RunningBatch, RunningSequence

MAX_STEPS = 8  # between two readings of a device's tokens
MAX_CHUNK_S = 0.02  # of these steps, by `MANY_ROWS`, and less by fewer: newcomers and streams wait that long
MANY_ROWS = 32
SHRINK_AFTER_STEPS = 256  # steps in shapes that are larger than needed, before rows move to a smaller one
LENGTH, TOKEN, SHORTEST, SOURCE = range(4)  # of each row's column in the table; the device gets the first three
IDLE = np.array([[0], [0], [-1], [0]])


def _place(parts: Sequence[RunningSequence], rows: np.ndarray) -> None:
    begin = 0
    for part in parts:
        end = begin + part.writer.rows
        part.rows = rows[begin:end]
        begin = end


def _is_greedy(part: RunningSequence) -> bool:
    return type(part.writer) is GreedySequence  # and no SampledSequence


class DeviceRunningBatch:
    """A `RunningBatch` with several steps per call, over the rows of ``backend.in_flight()``.

    The more rows there are, the more steps, up to `MAX_STEPS` within `MAX_CHUNK_S`: streams wait for these. Samples and
    beams need the host after each step: with any of them, all rows take one.

    >>> from t5accel.backends.torch_static import TorchStatic
    >>> from t5accel.models.load import load_model
    >>> from t5accel.serve.request import GenerationRequest
    >>> batch = DeviceRunningBatch(backend := TorchStatic(load_model("random:t5-small")[0]))
    >>> part = RunningSequence(GreedySequence(backend, GenerationRequest([100, 1], max_new_tokens=2)), "an owner")
    >>> batch.add(batch.encoder.encode(np.array([[100, 1]]), np.ones((1, 2), dtype=np.int64)), [part])
    >>> batch.step(), batch.step() == [part], len(part.writer.tokens)
    ([], True, 2)
    """

    joins_running = True
    call_tokens = 512  # see `RunningBatch`; a device computes small batches as fast as one row

    def __init__(self, backend: Any, *, clock: Callable[[], float] = time.perf_counter):
        self.encoder = self._device = backend.in_flight()
        self.parts: list[RunningSequence] = []
        self.rows, self.steps, self.tokens = 0, 1, 0
        self._positions = getattr(backend, "positions", None) or math.inf
        self._clock, self._step_s = clock, 0.0
        self._table = np.tile(IDLE, 0)
        self._oversized_steps = 0  # in a row, for which a smaller shape is enough

    def warm(self, rows: int) -> None:
        """Capture the graphs for up to this many rows of short requests."""
        self._device.warm(rows)
        self._table = np.tile(IDLE, self._device.shape[0])

    def add(self, source: Source, parts: Sequence[RunningSequence]) -> None:
        """Start sequences; ``encoder`` must have encoded the source."""
        count = sum(part.writer.rows for part in parts)
        self._fit(rows=self.rows + count, source=source.width, ahead=1)
        where = np.flatnonzero(self._table[SOURCE] == 0)[:count]
        self._device.add_sources(where, source)
        _place(parts, where)
        for part in parts:
            shortest = part.writer.shortest if _is_greedy(part) else -1
            self._table[:, part.rows] = [[0], [part.writer.start], [shortest], [source.width]]
        self.rows += count
        self.parts += parts

    def remove(self, parts: Sequence[RunningSequence]) -> None:
        """Remove sequences, done or not."""
        for part in parts:
            self._table[:, part.rows] = IDLE
            self.rows -= part.rows.size
        leaving = set(parts)
        self.parts = [part for part in self.parts if part not in leaving]

    def clear(self) -> None:
        """Remove all sequences."""
        self.remove(self.parts)

    def step(self) -> list[RunningSequence]:
        """Decode one or several tokens per row; return the sequences that are done or failed.

        An error of the backend is raised and leaves the batch unchanged.
        """
        greedy = [part for part in self.parts if _is_greedy(part)]
        others = [part for part in self.parts if not _is_greedy(part)]
        count = 1 if others else self._count()
        self._fit(rows=self.rows, source=1, ahead=count)
        first = [part for part in greedy if not part.writer.tokens]
        forced = [(int(one.rows[0]), one.writer.forced_token) for one in first if one.writer.forced_token is not None]
        began = self._clock()
        found = self._device.run(self._table[:SOURCE], count, tuple(zip(*forced, strict=True)) or ((), ()))
        self._update_step_time((self._clock() - began) / count)
        logits = self._device.logits(np.concatenate([part.rows for part in others])) if others else None  # may raise
        self._table[LENGTH, self._table[SOURCE] > 0] += count
        self.steps, self.tokens = count, 0
        self._table[TOKEN] = found[:, -1]
        for row, token in forced if count == 1 else ():
            self._table[TOKEN, row] = token
        tokens = found.tolist()
        for part in greedy:
            before = part.writer.missing
            try:
                part.writer.append_all(tokens[part.rows[0]])
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # of its stopping criterion; a panic of a Rust library is no Exception
                part.error = error
            self.tokens += before - part.writer.missing
        if others:
            self._advance(others, logits)
        return [part for part in self.parts if part.writer.is_done or part.error is not None]

    def _advance(self, parts: Sequence[RunningSequence], logits: np.ndarray) -> None:
        self.tokens += len(logits)
        order = np.arange(self._table.shape[1])
        for part in parts:
            part_logits, logits = logits[: part.rows.size], logits[part.rows.size :]
            try:
                self._table[TOKEN, part.rows], order[part.rows] = part.advanced(part_logits)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # the others go on
                part.error = error
        moved = np.flatnonzero(order != np.arange(order.size))
        if moved.size:
            try:
                self._device.reorder_sources(moved, order[moved])
            except Exception as error:
                for part in parts:
                    if np.isin(part.rows, moved).any():
                        part.error = error

    def _count(self) -> int:
        count = min(MAX_STEPS, max(part.writer.missing for part in self.parts))
        # A row that ends within these steps goes on to their end: not into larger buffers, nor beyond all positions.
        room = min(self._device.shape[2], self._positions) - int(self._table[LENGTH].max())
        count = min(count, room) if room > 0 else 1
        share = min(1.0, self.rows / MANY_ROWS)
        return max(1, min(count, int(share * (MAX_CHUNK_S / self._step_s if self._step_s else MAX_STEPS))))

    def _update_step_time(self, step_s: float) -> None:
        # The shortest recent step: a pause of the host is not the device's time.
        old = self._step_s
        self._step_s = step_s if not old or step_s < old else old + 0.1 * (step_s - old)

    def _fit(self, rows: int, source: int, ahead: int) -> None:
        longest = int(self._table[LENGTH].max(initial=0)) + ahead
        wanted = self._device.shape_for(rows, max(source, int(self._table[SOURCE].max(initial=0))), longest)
        held = self._device.shape
        fits = all(new <= old for new, old in zip(wanted, held, strict=True))
        self._oversized_steps = self._oversized_steps + ahead if fits and wanted != held and self.rows else 0
        if fits and self.rows and self._oversized_steps < SHRINK_AFTER_STEPS:
            return
        if wanted != held:
            kept = np.concatenate([part.rows for part in self.parts]) if self.parts else np.empty(0, dtype=np.int64)
            self._device.fit(wanted, kept)
            table = np.tile(IDLE, wanted[0])
            table[:, : kept.size] = self._table[:, kept]
            self._table, self._oversized_steps = table, 0
            _place(self.parts, np.arange(kept.size))


def running_batch(backend: Any, rows: int) -> RunningBatch | DeviceRunningBatch:
    """The running batch for a backend, warmed for ``rows`` rows."""
    if not hasattr(backend, "in_flight"):
        return RunningBatch(backend)
    batch = DeviceRunningBatch(backend)
    batch.warm(rows)
    return batch
