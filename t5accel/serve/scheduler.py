"""Continuous batching: requests join a running batch between two steps.

A request's tokens never depend on its neighbours, except where rounding breaks a near-tie: the last bits of a logit
may differ, and with products rounded to 8 bits ("int8", "int4") one of their steps.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from t5accel.decoding.backend import Backend, Source
from t5accel.decoding.beam import BeamTopK
from t5accel.decoding.encoder_cache import EncoderCache
from t5accel.decoding.request import GenerationInputs
from t5accel.decoding.token_constraints import NO_CONSTRAINTS
from t5accel.precision.recipes import recipe_from_json
from t5accel.serve.device_batch import running_batch
from t5accel.serve.limits import (
    COLUMNS,
    EncoderLatency,
    KVCacheBytes,
    SchedulerLimits,
    length_bucket,
    needs_unbatched_encoding,
)
from t5accel.serve.request import GenerationRequest, RequestHandle
from t5accel.serve.request_queue import ENDS, Observe, RequestQueue, engine_error
from t5accel.serve.running_batch import GreedySequence, RunningSequence, Writer, sequences_for

HEAD_START_S = 10.0  # of the highest priority: bounded, so that no request starves


class Scheduler(RequestQueue):
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
        getattr(backend, "rules", NO_CONSTRAINTS).require_supported()
        super().__init__(backend, limits or SchedulerLimits(), observe, notify, clock)
        recipe = getattr(getattr(backend, "manifest", None), "recipe", None)
        self._encodes_alone = bool(recipe) and needs_unbatched_encoding(recipe_from_json(recipe))
        self._batch = running_batch(backend, self.limits.rows)
        self._encoder: Any = self._batch.encoder
        if all(hasattr(backend, name) for name in ("split", "join", "source_bytes", "fingerprint")):
            self._encoder = EncoderCache(backend, max_bytes=self.limits.encoder_cache_bytes)
        if not self._batch.joins_running:
            name = type(backend).__name__
            self.static_reason = f"static batches, as {name} has no add_sources(): requests wait for the running batch"
        self._key_value_bytes = KVCacheBytes(self._batch.encoder)
        self.limits.check(GenerationRequest([0], max_new_tokens=1), self._key_value_bytes)
        self._pace = EncoderLatency()
        self._continuations = BeamTopK(backend.vocab_size)
        # Below: written by the engine's thread alone.
        self._joins_from_s = -math.inf
        self.longest_stall_s = 0.0  # the longest wait of running rows for new sources to be encoded
        if thread:
            self._start()

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self._batch.rows

    @property
    def places(self) -> list[int]:
        """The request number of each row; for callers of `step`."""
        found = {int(row): part.owner.number for part in self._batch.parts for row in part.rows}
        return [found[row] for row in sorted(found)]

    def submit(self, request: GenerationRequest) -> RequestHandle:
        """Queue one request; see `submit_all`."""
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[GenerationRequest]) -> list[RequestHandle]:
        """Queue all requests or none.

        ``InputError``: a request does not fit the model or the limits, or all together exceed the queue.
        ``QueueFullError`` says when to retry. ``ShuttingDownError``: no more requests are accepted.
        """
        sequences = [self._sequences(request) for request in requests]
        with self._changed:
            self._require_place(len(requests), sum(request.most_tokens for request in requests))
            handles = []
            for request, of_request in zip(requests, sequences, strict=True):
                handle = self._handle(request, of_request)
                head_start_s = HEAD_START_S * request.priority / (1 + abs(request.priority))
                entry = (handle.submitted_s - head_start_s, handle.number), handle
                bisect.insort(self._queue, entry, key=lambda entry: entry[0])
                handles.append(handle)
            self._changed.notify_all()
        return handles

    def require_place(self, request: GenerationRequest, count: int) -> None:
        """Raise as `submit_all` does for ``count`` requests of at least this size."""
        self._sequences(request)
        self._require_place(count, count * request.most_tokens)

    def _sequences(self, request: GenerationRequest) -> list[Writer]:
        ids = request.input_ids
        GenerationInputs.checked(self.backend, ids[None], np.ones_like(ids)[None], **request.bounds)
        self.limits.check(request, self._key_value_bytes)
        return sequences_for(self.backend, request, self._continuations)

    def _advance(self) -> None:
        self._admit()
        if self._running:
            self._decode()

    def _fail(self, handle: RequestHandle, error: Exception) -> None:
        parts = self._running.get(handle, [])
        super()._fail(handle, error)
        self._batch.remove([part for part in parts if part in self._batch.parts])

    def _fail_all(self, error: BaseException) -> None:
        self._batch.clear()
        super()._fail_all(error)

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
            if len(handles) == 1:
                self._fail(handles[0], engine_error(error))
                continue
            for handle in handles:  # perhaps one of them is to blame
                if (error := self._join([handle])) is not None:
                    self._fail(handle, engine_error(error))
        stall = self._clock() - started
        pause = min(stall / self.limits.prefill_share - stall, self.limits.max_prefill_stall_s)
        self._joins_from_s = started + stall + pause
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
        for handle in self._running:
            size = _size_with(size, handle.request)
        with self._changed:
            while self._queue:
                handle = self._queue[0][1]
                if not self._fits(size := _size_with(size, handle.request)):
                    break
                handle.reused = self._is_cached(handle)
                if self._running and not handle.reused:
                    group, length = _padding_group(handle), len(handle.request.input_ids)
                    new = {**lengths, group: [*lengths.get(group, []), length]}
                    # Of sources whose time is not known yet one is tried, alone.
                    seconds = sum(len(of) * self._pace.seconds(max(of)) for of in new.values())
                    if lengths and seconds > self.limits.max_prefill_stall_s:
                        break
                    lengths = new
                chosen.append(handle)
                del self._queue[0]
        return chosen

    def _fits(self, size: tuple[int, int, int]) -> bool:
        most = self.limits.key_value_bytes
        return size[0] <= self.limits.rows and (most is None or self._key_value_bytes(*size) <= most)

    def _is_cached(self, handle: RequestHandle) -> bool:
        ids = handle.request.input_ids[None]
        return isinstance(self._encoder, EncoderCache) and self._encoder.holds(ids, np.ones_like(ids))[0]

    def _encoded_together(self, handles: list[RequestHandle]) -> list[list[RequestHandle]]:
        if not self._batch.joins_running:
            return [handles]
        if self._encodes_alone:
            return [[handle] for handle in handles]
        groups: dict[int, list[RequestHandle]] = {}
        for handle in handles:
            groups.setdefault(_padding_group(handle), []).append(handle)
        return list(groups.values())

    def _join(self, handles: list[RequestHandle]) -> BaseException | None:
        """Encode sources and add their rows; return the error, if any."""
        try:
            source = self._encode(handles)
            joined = self._clock()
            parts = {handle: [RunningSequence(one, handle) for one in handle.sequences] for handle in handles}
            self._batch.add(source, [part for of_one in parts.values() for part in of_one])
        except ENDS:
            raise
        except BaseException as error:  # the batch is unchanged
            return error
        self._running.update(parts)
        for handle in handles:
            handle.joined_s = joined
            self._observe("queue_s", joined - handle.submitted_s)
        return None

    def _encode(self, handles: Sequence[RequestHandle]) -> Source:
        """Encode the sources once each, repeated for every row of their request."""
        if self._encodes_alone and len(handles) > 1:
            return self.backend.join([self._encode([handle]) for handle in handles])
        rows = [handle.request.input_ids for handle in handles for _ in range(handle.request.rows)]
        mask = (np.arange(max(map(len, rows))) < np.array([len(row) for row in rows])[:, None]).astype(np.int64)
        ids = np.full(mask.shape, self.backend.pad_token_id)
        ids[mask == 1] = np.concatenate(rows)
        started, missed = self._clock(), getattr(self._encoder, "misses", 0)
        captures = getattr(self._encoder, "captures", 0)
        source = self._encoder.encode(ids, mask)
        encoded = self._encoder.misses - missed if isinstance(self._encoder, EncoderCache) else len(handles)
        if encoded and captures == getattr(self._encoder, "captures", 0):  # a graph is captured once
            self._pace.learn(mask.shape[1], encoded, self._clock() - started)
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
            if handle.request.stream and isinstance(writer := parts[0].writer, GreedySequence):
                handle.tokens.extend(writer.tokens[len(handle.tokens) :])
                self._updates[handle.number] = handle
        self._batch.remove(ended)
        for handle in {part.owner: None for part in ended}:
            parts = self._running[handle]
            error = next((part.error for part in parts if part.error is not None), None)
            if error is not None:
                self.failures += 1
                self._fail(handle, engine_error(error))
            elif all(part.writer.is_done for part in parts):
                self._finish(handle, now, [answer for part in parts for answer in part.writer.answers()])


def _size_with(size: tuple[int, int, int], request: GenerationRequest) -> tuple[int, int, int]:
    rows, source, new = size
    return rows + request.rows, max(source, len(request.input_ids)), max(new, request.max_new_tokens)


def _padding_group(handle: RequestHandle) -> int:
    # Sources are padded together up to 64 tokens, or if at least half as long.
    return length_bucket(max(COLUMNS, len(handle.request.input_ids)))
