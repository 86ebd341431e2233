"""Continuous batching: requests join a running batch between two steps.

A request's tokens never depend on its neighbours, except where rounding breaks a near-tie: the last bits of a logit
may differ, and with products rounded to 8 bits ("int8", "int4") one of their steps.
"""

from __future__ import annotations

import bisect
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from t5accel.checks import check_vocabulary
from t5accel.decoding.backend import Backend, Source, check_backend
from t5accel.decoding.beam import BeamTopK
from t5accel.decoding.encoder_cache import EncoderCache
from t5accel.decoding.request import check_positions, checked_bounds
from t5accel.decoding.token_constraints import NO_CONSTRAINTS
from t5accel.errors import EngineError, ShuttingDownError
from t5accel.precision.recipes import recipe_from_json
from t5accel.serve.device_batch import DeviceRunningBatch
from t5accel.serve.limits import EncoderLatency, KVCacheBytes, SchedulerLimits, needs_unbatched_encoding
from t5accel.serve.request import GenerationRequest, RequestHandle, padded
from t5accel.serve.running_batch import ENDS, GreedySequence, RunningBatch, RunningSequence, sequences_for

Observe = Callable[[str, float], None]
RECENT = 64  # finished requests by which the rate is measured


class Scheduler:
    """Serves requests from any thread on one backend.

    With ``add_sources`` or ``in_flight`` of the backend requests join a running batch; else `static_reason` says
    why not. ``observe`` is called by the engine's thread with a name and a number, such as ``("first_token_s", 0.02)``;
    ``notify`` after a step with the handles that have new tokens or an end (default: calls their listeners). With
    ``thread=False`` the caller runs `step`.

    ``InputError``: results would depend on the rest of the batch ("int8-dynamic"), the model's ``generation_config`` is
    not supported, or the smallest request exceeds ``key_value_bytes``.

    >>> class Counter:  # a toy backend whose next token is the last one plus one, and 8 is the end
    ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 9, 0, 8, 0
    ...     def encode(self, input_ids, attention_mask): return list(input_ids)
    ...     def new_state(self, source, rows_per_source=1): return list(source)
    ...     def add_sources(self, state, source): state += source
    ...     def select_sources(self, state, sources): state[:] = [state[i] for i in sources]
    ...     def step(self, state, input_ids): return np.eye(9, dtype=np.float32)[input_ids + 1]
    >>> with Scheduler(Counter()) as scheduler:
    ...     handles = [scheduler.submit(GenerationRequest([5, 1], max_new_tokens=count)) for count in (3, 20)]
    ...     [answer.tokens for handle in handles for answer in handle.result()]
    [[1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8]]
    """

    def __init__(
        self,
        backend: Backend,
        limits: SchedulerLimits | None = None,
        *,
        observe: Observe = lambda name, value: None,
        notify: Callable[[Sequence[RequestHandle]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        thread: bool = True,
    ):
        check_backend(backend)
        getattr(backend, "rules", NO_CONSTRAINTS).require_supported()
        self.backend, self._source_entries = backend, getattr(backend, "source_vocab_size", backend.vocab_size)
        self.limits = limits or SchedulerLimits()
        recipe = getattr(getattr(backend, "manifest", None), "recipe", None)
        self._encodes_alone = bool(recipe) and needs_unbatched_encoding(recipe_from_json(recipe))
        on_device = hasattr(backend, "in_flight")
        self._batch = DeviceRunningBatch(backend, self.limits.rows) if on_device else RunningBatch(backend)
        self._encoder: Any = self._batch.encoder
        if all(hasattr(backend, name) for name in ("split", "join", "source_bytes", "fingerprint")):
            self._encoder = EncoderCache(backend, max_bytes=self.limits.encoder_cache_bytes)
        self.static_reason = ""
        if not self._batch.joins_running:
            name = type(backend).__name__
            self.static_reason = f"static batches, as {name} has no add_sources(): requests wait for the running batch"
        self._key_value_bytes = KVCacheBytes(self._batch.encoder)
        self.limits.check(GenerationRequest([0], max_new_tokens=1), self._key_value_bytes)
        self._pace = EncoderLatency()
        self._continuations = BeamTopK(backend.vocab_size)
        self._observe, self._notify, self._clock = observe, notify or _notify_listeners, clock
        self._changed = threading.Condition()  # guards the queue and the end
        self._queue: list[RequestHandle] = []  # sorted
        self.queued_tokens = 0  # of the waiting requests
        self._submitted = 0
        self.is_open = True  # new requests are accepted
        self._ends_at = math.inf
        # Below: written by the engine's thread alone.
        self._running: dict[RequestHandle, Sequence[RunningSequence]] = {}
        self._joins_from_s = -math.inf
        self._finished: deque[float] = deque(maxlen=RECENT)  # when, without the seconds that were idle
        self._idle_s, self._idle_from_s = 0.0, math.inf
        self._updates: dict[int, RequestHandle] = {}
        self.encoded = 0  # sources
        self.reused = 0  # sources found in the encoder cache
        self.failures = 0  # rounds in which the backend raised
        self._began_s: float | None = None  # when the current step began
        self._thread = threading.Thread(target=self._run, name="t5accel-engine", daemon=True) if thread else None
        if self._thread:
            self._thread.start()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def rows(self) -> int:
        return self._batch.rows

    @property
    def places(self) -> list[int]:
        """The request number of each row; for callers of `step`."""
        found = {int(row): part.owner.number for part in self._batch.parts for row in part.rows}
        return [found[row] for row in sorted(found)]

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def busy_s(self) -> float:
        """Seconds since the current step began; 0 between steps."""
        began = self._began_s
        return 0.0 if began is None else self._clock() - began

    def submit(self, request: GenerationRequest) -> RequestHandle:
        """Queue one request; see `submit_all`."""
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[GenerationRequest], arrived_s: float | None = None) -> list[RequestHandle]:
        """Queue all requests or none; their times and deadlines begin at ``arrived_s`` of the clock, by default now.

        ``InputError``: a request does not fit the model or the limits, or all together exceed the queue.
        ``QueueFullError`` says when to retry. ``ShuttingDownError``: no more requests are accepted.
        """
        sequences = [self._sequences(request) for request in requests]
        with self._changed:
            self._require_place(len(requests), sum(request.most_tokens for request in requests))
            handles = []
            for request, of_request in zip(requests, sequences, strict=True):
                now = self._clock() if arrived_s is None else arrived_s
                self._submitted += 1
                deadline = None if request.deadline_s is None else now + request.deadline_s
                handles.append(RequestHandle(request, self._submitted, now, deadline, of_request))
                for sequence in of_request:
                    sequence.owner = handles[-1]
                bisect.insort(self._queue, handles[-1], key=lambda handle: handle.place)
                self.queued_tokens += request.most_tokens
            self._changed.notify_all()
        return handles

    def require_place(self, request: GenerationRequest, count: int) -> None:
        """Raise as `submit_all` does for ``count`` requests of at least this size."""
        self._sequences(request)
        self._require_place(count, count * request.most_tokens)

    def _sequences(self, request: GenerationRequest) -> list[RunningSequence]:
        check_vocabulary(request.input_ids, self._source_entries)
        checked_bounds(self.backend, **request.bounds)
        self.limits.check(request, self._key_value_bytes)
        check_positions(self.backend, request.max_new_tokens)
        return sequences_for(self.backend, request, self._continuations)

    def _require_place(self, requests: int, tokens: int) -> None:
        if not self.is_open:
            raise ShuttingDownError("The server is shutting down and takes no more requests.")
        times = list(self._finished)  # by whose rate the queue will have a place
        wait_s = self.waiting * (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 1.0
        self.limits.require_place((self.waiting, self.queued_tokens), (requests, tokens), wait_s)

    def drain(self, grace_s: float) -> None:
        """Accept no more requests; fail unfinished ones after ``grace_s`` seconds."""
        with self._changed:
            self.is_open, self._ends_at = False, min(self._ends_at, self._clock() + grace_s)
            self._changed.notify_all()

    def close(self) -> None:
        """Fail all requests, and wait for the engine's thread to end."""
        self.drain(0)
        if self._thread:
            self._thread.join()

    def step(self) -> bool:
        """One iteration: evict, admit, decode. Returns True while work remains.

        Raises the error of a backend that has lost its device.
        """
        self._began_s = now = self._clock()
        self._idle_s += max(0.0, now - self._idle_from_s)
        failures = self.failures
        try:
            self._evict(now)
            self._admit()
            if self._running:
                self._decode()
        except ENDS:
            raise
        except BaseException as error:  # the batch may be in any state
            self.failures += 1
            running, self._running = self._running, {}
            self._batch.clear()
            for handle in running:
                self._fail(handle, engine_error(error))
        updates, self._updates = list(self._updates.values()), {}
        self._began_s = None  # before the notification, whose receiver may ask at once
        if updates:
            self._notify(updates)
        if self.failures > failures and hasattr(self.backend, "require_device"):
            self.backend.require_device()
        is_busy = bool(self._running or self._queue)
        self._idle_from_s = math.inf if is_busy else self._clock()
        return is_busy

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not (self._queue or self._running):
                        if not self.is_open:
                            return
                        self._changed.wait()
                self.step()
        except BaseException as error:  # of `notify`, or the interpreter ends: nobody may wait for ever
            with self._changed:
                self.is_open, waiting, self._queue, self.queued_tokens = False, self._queue, [], 0
            for handle in [*self._running, *waiting]:
                handle.finish(self._clock(), error=EngineError(f"The engine's thread has ended: {error!r:.200}"))
            self._running = {}
            raise

    def _evict(self, now: float) -> None:
        """Fail cancelled and late requests; after the grace period all."""
        late = None
        if now >= self._ends_at:
            late = ShuttingDownError("The server was shut down before this request was done.")

        with self._changed:
            handles = [*self._queue, *self._running]
            errors = {handle: error for handle in handles if (error := handle.cancellation_error(now) or late)}
            if errors:
                self._queue = [handle for handle in self._queue if handle not in errors]
                self.queued_tokens = sum(handle.request.most_tokens for handle in self._queue)
        for handle, error in errors.items():
            self._fail(handle, error)

    def _fail(self, handle: RequestHandle, error: Exception) -> None:
        parts = self._running.pop(handle, [])
        handle.finish(self._clock(), error=error)
        self._updates[handle.number] = handle
        self._observe(type(error).__name__, 1)
        self._batch.remove([part for part in parts if part in self._batch.parts])

    def _admit(self) -> None:
        were_running, started = bool(self._running), self._clock()
        if were_running and started < self._joins_from_s:
            return
        chosen = self._choose()
        if not chosen:
            return
        for handles in self._encoded_together(chosen):
            if (error := self._join(handles)) is None:
                continue
            self.failures += 1
            for handle in handles:
                own = error if len(handles) == 1 else self._join([handle])  # perhaps one of several is to blame
                if own is not None:
                    self._fail(handle, engine_error(own))
        stall = self._clock() - started
        pause = min(stall / self.limits.prefill_share - stall, self.limits.max_prefill_stall_s)
        self._joins_from_s = started + stall + pause
        if were_running:
            self._observe("stall_s", stall)

    def _choose(self) -> list[RequestHandle]:
        # No request overtakes one that does not fit: the large one would wait for ever.
        if not self._queue or (self._running and not self._batch.joins_running):
            return []
        chosen: list[RequestHandle] = []
        seconds = 0.0  # to encode their sources
        size = _size(self._running)
        with self._changed:
            while self._queue:
                handle = self._queue[0]
                size = _size([handle], size)
                if not self._fits(*size):
                    break
                handle.reused = self._is_cached(handle)
                if self._running and not handle.reused:
                    # Of sources whose time is not known yet one is tried, alone.
                    seconds += self._pace.seconds(_source_tokens(handle))
                    if seconds > self.limits.max_prefill_stall_s and not all(each.reused for each in chosen):
                        break
                chosen.append(handle)
                del self._queue[0]
                self.queued_tokens -= handle.request.most_tokens
        return chosen

    def _fits(self, rows: int, source: int, new: int) -> bool:
        most = self.limits.key_value_bytes
        return rows <= self.limits.rows and (most is None or self._key_value_bytes(rows, source, new) <= most)

    def _is_cached(self, handle: RequestHandle) -> bool:
        ids = handle.request.input_ids[None]
        return isinstance(self._encoder, EncoderCache) and self._encoder.holds(ids, np.ones_like(ids))[0]

    def _encoded_together(self, handles: list[RequestHandle]) -> list[list[RequestHandle]]:
        if not self._batch.joins_running:
            return [handles]
        if self._encodes_alone:
            return [[handle] for handle in handles]
        groups: list[list[RequestHandle]] = []
        longest = padding = 0
        for handle in sorted(handles, key=_source_tokens):
            padding += (_source_tokens(handle) - longest) * len(groups[-1]) if groups else 0
            longest = _source_tokens(handle)
            if not groups or padding > self._batch.call_tokens:  # another call takes less time than the padding
                groups.append([])
                padding = 0
            groups[-1].append(handle)
        return groups

    def _join(self, handles: list[RequestHandle]) -> BaseException | None:
        """Encode sources and add their rows; return the error, if any."""
        try:
            source = self._encode(handles)
            joined = self._clock()
            self._batch.add(source, [part for handle in handles for part in handle.sequences])
        except ENDS:
            raise
        except BaseException as error:  # the batch is unchanged
            return error
        for handle in handles:
            self._running[handle] = handle.sequences
            handle.joined_s = joined
            self._observe("queue_s", joined - handle.submitted_s)
        return None

    def _encode(self, handles: Sequence[RequestHandle]) -> Source:
        """Encode the sources once each, repeated for every row of their request."""
        if self._encodes_alone and len(handles) > 1:
            return self.backend.join([self._encode([handle]) for handle in handles])
        rows = [handle.request.input_ids for handle in handles for _ in range(handle.request.rows)]
        ids, mask = padded(rows, self.backend.pad_token_id)
        started, missed = self._clock(), getattr(self._encoder, "misses", 0)
        captures = getattr(self._encoder, "captures", 0)
        source = self._encoder.encode(ids, mask)
        encoded = self._encoder.misses - missed if isinstance(self._encoder, EncoderCache) else len(handles)
        if encoded and captures == getattr(self._encoder, "captures", 0):  # a graph is captured once
            self._pace.update(mask.shape[1], encoded, self._clock() - started)
        self.encoded += encoded
        self.reused += len(handles) - encoded
        return source

    def _decode(self) -> None:
        started = self._clock()
        try:
            ended = self._batch.step()
        except ENDS:
            raise
        except BaseException as error:  # the state is as it was: the last to come, who may be too much, goes
            self.failures += 1
            self._fail(next(reversed(self._running)), engine_error(error))
            return
        now = self._clock()
        self._observe("step_s", (now - started) / self._batch.steps)
        self._observe("tokens", self._batch.tokens)
        for handle, parts in self._running.items():
            if handle.first_token_s is None:
                handle.first_token_s = now
                self._observe("first_token_s", now - handle.submitted_s)
            if handle.request.stream and isinstance(parts[0], GreedySequence):
                handle.tokens.extend(parts[0].tokens[len(handle.tokens) :])
                self._updates[handle.number] = handle
        self._batch.remove(ended)
        for handle in {part.owner: None for part in ended}:
            parts = self._running[handle]
            error = next((part.error for part in parts if part.error is not None), None)
            if error is not None:
                self.failures += 1
                self._fail(handle, engine_error(error))
            elif (late := handle.cancellation_error(now)) is not None:
                self._fail(handle, late)
            elif all(part.is_done for part in parts):
                answers = [answer for part in parts for answer in part.answers()]
                del self._running[handle]
                handle.finish(now, answers)
                self._finished.append(now - self._idle_s)
                self._updates[handle.number] = handle
                self._observe("total_s", now - handle.submitted_s)
                self._observe("finished", 1)


def _size(handles: Iterable[RequestHandle], beside: tuple[int, int, int] = (0, 0, 0)) -> tuple[int, int, int]:
    """Rows, and the longest source and result, of requests and of those whose size is given."""
    rows, source, new = beside
    for handle in handles:
        rows += handle.request.rows
        source, new = max(source, len(handle.request.input_ids)), max(new, handle.request.max_new_tokens)
    return rows, source, new


def _source_tokens(handle: RequestHandle) -> int:
    return len(handle.request.input_ids)


def engine_error(error: BaseException) -> EngineError:
    """An error of a request that says no more than the kind of this one."""
    if isinstance(error, EngineError):  # our own, which quotes no text
        return error
    found = EngineError(f"The engine failed: {type(error).__name__}.")
    found.__cause__ = error  # its message may quote the request's text
    return found


def _notify_listeners(handles: Sequence[RequestHandle]) -> None:
    for handle in handles:
        if handle.listener is not None:
            handle.listener()
