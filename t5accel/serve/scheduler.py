"""Continuous batching: requests join a running batch between two steps and leave it when they end.

A request's tokens never depend on its neighbours, except where rounding breaks a near-tie: the last bits of a logit
may differ, and with products rounded to 8 bits ("int8", "int4") one of their steps.
"""

from __future__ import annotations

import bisect
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from t5accel.decoding.backend import Backend, Source
from t5accel.decoding.encoder_cache import EncoderCache
from t5accel.decoding.request import GenerationInputs
from t5accel.decoding.token_constraints import NO_CONSTRAINTS
from t5accel.decoding.topk import BeamTopK
from t5accel.errors import EngineError, ShuttingDownError
from t5accel.serve.device_batch import running_batch
from t5accel.serve.limits import (
    COLUMNS,
    EncoderLatency,
    KVCacheBytes,
    SchedulerLimits,
    head_start_s,
    length_bucket,
    needs_unbatched_encoding,
    size_with,
    tokens_of,
)
from t5accel.serve.request import GenerationRequest, RequestHandle
from t5accel.serve.running_batch import GreedySequence, RunningSequence, sequences_for

Observe = Callable[[str, float], None]
RECENT = 64  # finished jobs by which the rate is measured
LONGEST_RETRY_S = 120
ENDS = (KeyboardInterrupt, SystemExit)  # any other exception is of one request, also those that are no `Exception`


class Scheduler:
    """Serves requests from any thread on one backend.

    With ``add_sources`` or ``in_flight`` of the backend requests join a running batch; else `static_reason` says
    why not.

    Args:
        observe: called by the engine's thread with a name and a number, such as ``("first_token_s", 0.02)``.
        notify: called after a step with the handles that have new tokens or an end. Default: calls their listeners.
        thread: ``False``: the caller runs `step`.

    Attributes:
        encoded, reused: sources that were encoded, and those found in the encoder cache.
        longest_stall_s: the longest wait of running rows for new sources to be encoded.

    Raises:
        InputError: results would depend on the rest of the batch ("int8-dynamic"), the model's ``generation_config``
            is not supported, or the smallest request exceeds ``key_value_bytes``.

    >>> class Counter:  # a toy backend whose next token is the last one plus one, and 8 is the end
    ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 9, 0, 8, 0
    ...     def encode(self, input_ids, attention_mask): return list(input_ids)
    ...     def new_state(self, source, rows_per_source=1): return list(source)
    ...     def add_sources(self, state, source): state += source
    ...     def select_sources(self, state, sources): state[:] = [state[i] for i in sources]
    ...     def step(self, state, input_ids): return np.eye(9, dtype=np.float32)[input_ids + 1]
    >>> with Scheduler(Counter()) as scheduler:
    ...     tickets = [scheduler.submit(GenerationRequest([5, 1], max_new_tokens=count)) for count in (3, 20)]
    ...     [answer.tokens for ticket in tickets for answer in ticket.result()]
    [[1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8]]
    """

    def __init__(
        self,
        backend: Backend,
        limits: SchedulerLimits | None = None,
        *,
        observe: Observe | None = None,
        notify: Callable[[Sequence[RequestHandle]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        thread: bool = True,
    ):
        getattr(backend, "rules", NO_CONSTRAINTS).require_supported()
        self.limits = limits or SchedulerLimits()
        self.backend, self._alone = backend, needs_unbatched_encoding(backend)
        self._batch = running_batch(backend, self.limits.rows)
        self._encoder: Any = self._batch.encoder
        if all(hasattr(backend, name) for name in ("split", "join", "source_bytes", "fingerprint")):
            self._encoder = EncoderCache(backend, max_bytes=self.limits.encoder_cache_bytes)
        static = f"static batches, as {type(backend).__name__} has no admit(): requests wait for the running batch"
        self.static_reason = "" if self._batch.joins_running else static
        self.key_value_bytes, self._pace = KVCacheBytes(self._batch.encoder), EncoderLatency()
        self.limits.check(GenerationRequest([0], max_new_tokens=1), self.key_value_bytes)
        self._continuations = BeamTopK(backend.vocab_size)
        self._observe = observe or (lambda name, value: None)
        self._notify = notify or _notify_listeners
        self._clock = clock
        self._changed = threading.Condition()  # guards what follows
        self._queue: list[tuple[tuple[float, int], RequestHandle]] = []  # sorted: the older, after head starts
        self._is_open, self._ends_at, self._submitted = True, math.inf, 0
        self._running: dict[RequestHandle, list[RunningSequence]] = {}  # of the engine's thread alone, as all below
        self._joins_from_s = -math.inf
        self._finished: deque[float] = deque(maxlen=RECENT)
        self._updates: dict[int, RequestHandle] = {}
        self.encoded = self.reused = self.failures = 0
        self.longest_stall_s = 0.0
        self._began_s: float | None = None  # when the current step began
        self._thread = threading.Thread(target=self._run, name="t5accel-engine", daemon=True) if thread else None
        if self._thread:
            self._thread.start()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close(grace_s=0)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self._batch.rows

    @property
    def places(self) -> list[int]:
        """The request number of each row; for callers of `step`."""
        found = {int(row): part.owner.number for part in self._batch.parts for row in part.rows}
        return [found[row] for row in sorted(found)]

    @property
    def is_open(self) -> bool:
        """Whether new requests are accepted."""
        return self._is_open

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread is running."""
        return self._thread is not None and self._thread.is_alive()

    def busy_s(self) -> float:
        """Seconds since the current step began; 0 between steps."""
        began = self._began_s
        return 0.0 if began is None else self._clock() - began

    def submit(self, job: GenerationRequest) -> RequestHandle:
        """Queue one request; see `submit_all`."""
        return self.submit_all([job])[0]

    def submit_all(self, jobs: Sequence[GenerationRequest]) -> list[RequestHandle]:
        """Queue all requests or none.

        Raises:
            InputError: a request does not fit the model or the limits, or all together exceed the queue.
            QueueFullError: the queue is full; the error says when to retry.
            ShuttingDownError: no more requests are accepted.
        """
        for job in jobs:
            self._check(job)
        with self._changed:
            self._require_place(len(jobs), sum(map(tokens_of, jobs)))
            tickets = []
            for job in jobs:
                now = self._clock()
                self._submitted += 1
                deadline = None if job.deadline_s is None else now + job.deadline_s
                ticket = RequestHandle(job, self._submitted, now, deadline)
                place = (now - head_start_s(job.priority), ticket.number)
                bisect.insort(self._queue, (place, ticket), key=lambda entry: entry[0])
                tickets.append(ticket)
            self._changed.notify_all()
        return tickets

    def require_place(self, job: GenerationRequest, count: int) -> None:
        """Raise as `submit_all` does for ``count`` requests of at least this size."""
        self._check(job)
        self._require_place(count, count * tokens_of(job))

    def _require_place(self, jobs: int, tokens: int) -> None:
        if not self._is_open:
            raise ShuttingDownError("The server is shutting down and takes no more requests.")
        self.limits.require_place([ticket.job for _, ticket in list(self._queue)], jobs, tokens, self.retry_after_s)

    def retry_after_s(self) -> int:
        """Estimated seconds until a place in the queue is free, from the rate of finished requests."""
        times = list(self._finished)
        if len(times) < 2 or times[-1] <= times[0]:
            return 1
        rate = (len(times) - 1) / (times[-1] - times[0])
        return min(max(1, math.ceil(len(self._queue) / rate)), LONGEST_RETRY_S)

    def drain(self, grace_s: float) -> None:
        """Accept no more requests; fail those that are not done within ``grace_s`` seconds."""
        with self._changed:
            self._is_open, self._ends_at = False, min(self._ends_at, self._clock() + grace_s)
            self._changed.notify_all()

    def close(self, grace_s: float = 0.0) -> None:
        """Drain, and wait for the engine's thread to end."""
        self.drain(grace_s)
        if self._thread:
            self._thread.join()

    def step(self) -> bool:
        """One iteration: evict, admit, decode. Returns True while work remains."""
        self._began_s = now = self._clock()
        try:
            self._evict(now)
            self._admit()
            if self._running:
                self._decode()
        except ENDS:
            raise
        except BaseException as error:  # the batch may be in any state
            self._fail_all(error)
        updates, self._updates = list(self._updates.values()), {}
        self._began_s = None  # before the notification, whose receiver may ask at once
        if updates:
            self._notify(updates)
        return bool(self._running or self._queue)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not (self._queue or self._running):
                        if not self._is_open:
                            return
                        self._changed.wait()
                self.step()
        except BaseException as error:  # of `notify`, or the interpreter ends: nobody may wait for ever
            with self._changed:
                self._is_open, waiting, self._queue = False, self._queue, []
            for ticket in [*self._running, *(ticket for _, ticket in waiting)]:
                ticket.finish(self._clock(), error=EngineError(f"The engine's thread has ended: {error!r:.200}"))
            self._running = {}
            raise

    def _check(self, job: GenerationRequest) -> None:
        ids = job.input_ids
        GenerationInputs.checked(self.backend, ids[None], np.ones_like(ids)[None], **job.bounds)
        self.limits.check(job, self.key_value_bytes)
        sequences_for(self.backend, job, self._continuations)

    def _evict(self, now: float) -> None:
        """Fail cancelled and late requests; after the grace period all."""
        ended = now >= self._ends_at
        with self._changed:
            leaving = [entry for entry in self._queue if ended or entry[1].is_over(now)]
            if leaving:
                self._queue = [entry for entry in self._queue if entry not in leaving]
        over = [ticket for ticket in self._running if ended or ticket.is_over(now)]
        for ticket in [*(entry[1] for entry in leaving), *over]:
            late = ShuttingDownError("The server was shut down before this request was done.")
            self._fail(ticket, ticket.cancellation_error(now) or late)

    def _fail(self, ticket: RequestHandle, error: Exception) -> None:
        parts = self._running.pop(ticket, [])
        ticket.finish(self._clock(), error=error)
        self._updates[ticket.number] = ticket
        self._observe(type(error).__name__, 1)
        self._batch.remove([part for part in parts if part in self._batch.parts])

    def _fail_all(self, error: BaseException) -> None:
        self.failures += 1
        running, self._running = self._running, {}
        self._batch.clear()
        for ticket in running:
            self._fail(ticket, _engine_error(error))

    def _admit(self) -> None:
        were_running, started = bool(self._running), self._clock()
        if were_running and started < self._joins_from_s:
            return
        chosen = self._choose()
        if not chosen:
            return
        for together in self._encoded_together(chosen):
            try:
                self._join(together)
            except ENDS:
                raise
            except BaseException as error:
                self.failures += 1
                for ticket in together if len(together) == 1 else []:
                    self._fail(ticket, _engine_error(error))
                for ticket in together if len(together) > 1 else []:  # perhaps one of them is to blame
                    try:
                        self._join([ticket])
                    except ENDS:
                        raise
                    except BaseException as its_own:
                        self._fail(ticket, _engine_error(its_own))
        stall = self._clock() - started
        self._joins_from_s = (
            started + stall + min(stall / self.limits.prefill_share - stall, self.limits.max_prefill_stall_s)
        )
        if were_running:
            self.longest_stall_s = max(self.longest_stall_s, stall)
            self._observe("stall_s", stall)

    def _choose(self) -> list[RequestHandle]:
        # No request overtakes one that does not fit: the large one would wait for ever.
        if self._running and not self._batch.joins_running:
            return []
        chosen: list[RequestHandle] = []
        lengths: dict[int, list[int]] = {}  # of the sources to encode, by the group that is padded together
        size = 0, 0, 0  # rows, the longest source and the longest answer
        for ticket in self._running:
            size = size_with(size, ticket.job)
        with self._changed:
            while self._queue:
                ticket = self._queue[0][1]
                if not self._fits(size := size_with(size, ticket.job)):
                    break
                ticket.reused = self._is_cached(ticket)
                if self._running and not ticket.reused:
                    length = len(ticket.job.input_ids)
                    new = {**lengths, _alike(length): [*lengths.get(_alike(length), []), length]}
                    # Of sources whose time is not known yet one is tried, alone.
                    seconds = sum(len(of) * self._pace.seconds(max(of)) for of in new.values())
                    if lengths and seconds > self.limits.max_prefill_stall_s:
                        break
                    lengths = new
                chosen.append(ticket)
                del self._queue[0]
        return chosen

    def _fits(self, size: tuple[int, int, int]) -> bool:
        most = self.limits.key_value_bytes
        return size[0] <= self.limits.rows and (most is None or self.key_value_bytes(*size) <= most)

    def _is_cached(self, ticket: RequestHandle) -> bool:
        ids = ticket.job.input_ids[None]
        return isinstance(self._encoder, EncoderCache) and self._encoder.holds(ids, np.ones_like(ids))[0]

    def _encoded_together(self, tickets: Sequence[RequestHandle]) -> list[list[RequestHandle]]:
        if not self._batch.joins_running:
            return [list(tickets)]
        if self._alone:
            return [[ticket] for ticket in tickets]
        by_length: dict[int, list[RequestHandle]] = {}
        for ticket in tickets:
            by_length.setdefault(_alike(len(ticket.job.input_ids)), []).append(ticket)
        return list(by_length.values())

    def _join(self, tickets: Sequence[RequestHandle]) -> None:
        source = self._encode(tickets)
        joined = self._clock()
        parts = {
            ticket: [
                RunningSequence(writer, ticket)
                for writer in sequences_for(self.backend, ticket.job, self._continuations)
            ]
            for ticket in tickets
        }
        self._batch.add(source, [part for of_one in parts.values() for part in of_one])
        self._running.update(parts)
        for ticket in tickets:
            ticket.joined_s = joined
            self._observe("queue_s", joined - ticket.submitted_s)

    def _encode(self, tickets: Sequence[RequestHandle]) -> Source:
        """Encode the sources once each, repeated for every row of their request."""
        if self._alone and len(tickets) > 1:
            return self.backend.join([self._encode([ticket]) for ticket in tickets])
        rows = [ticket.job.input_ids for ticket in tickets for _ in range(ticket.job.rows)]
        mask = (np.arange(max(map(len, rows))) < np.array([len(row) for row in rows])[:, None]).astype(np.int64)
        ids = np.full(mask.shape, self.backend.pad_token_id)
        ids[mask == 1] = np.concatenate(rows)
        started, missed = self._clock(), getattr(self._encoder, "misses", 0)
        captures = getattr(self._encoder, "captures", 0)
        source = self._encoder.encode(ids, mask)
        encoded = self._encoder.misses - missed if isinstance(self._encoder, EncoderCache) else len(tickets)
        if encoded and captures == getattr(self._encoder, "captures", 0):  # a graph is captured once
            self._pace.learn(mask.shape[1], encoded, self._clock() - started)
        self.encoded += encoded
        self.reused += len(tickets) - encoded
        return source

    def _decode(self) -> None:
        started = self._clock()
        try:
            ended = self._batch.step()
        except ENDS:
            raise
        except BaseException as error:  # the state is as it was: the last to come, who may be too much, goes
            self.failures += 1
            self._fail(next(reversed(self._running)), _engine_error(error))
            return
        now = self._clock()
        self._observe("step_s", (now - started) / self._batch.steps)
        self._observe("tokens", self._batch.tokens)
        for ticket, parts in self._running.items():
            if ticket.first_token_s is None:
                ticket.first_token_s = now
                self._observe("first_token_s", now - ticket.submitted_s)
            if ticket.job.stream and isinstance(writer := parts[0].writer, GreedySequence):
                ticket.tokens.extend(writer.tokens[len(ticket.tokens) :])
                self._updates[ticket.number] = ticket
        self._batch.remove(ended)
        for ticket in {part.owner: None for part in ended}:
            parts = self._running[ticket]
            errors = [part.error for part in parts if part.error is not None]
            if errors:
                self.failures += 1
                self._fail(ticket, _engine_error(errors[0]))
            elif all(part.writer.is_done for part in parts):
                del self._running[ticket]
                answers = [answer for part in parts for answer in part.writer.answers()]
                ticket.finish(now, answers)
                self._finished.append(now)
                self._updates[ticket.number] = ticket
                self._observe("total_s", now - ticket.submitted_s)
                self._observe("finished", 1)


def _alike(length: int) -> int:
    # Sources are padded together up to 64 tokens, or if at least half as long.
    return length_bucket(max(COLUMNS, length))


def _engine_error(error: BaseException) -> EngineError:
    found = EngineError(f"The engine failed: {type(error).__name__}.")
    found.__cause__ = error  # its message may quote the request's text
    return found


def _notify_listeners(tickets: Sequence[RequestHandle]) -> None:
    for ticket in tickets:
        if ticket.listener is not None:
            ticket.listener()
