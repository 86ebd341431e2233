"""A queue of requests in front of the one thread that computes."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from t5accel.errors import EngineError, ShuttingDownError
from t5accel.serve.limits import SchedulerLimits
from t5accel.serve.request import RequestHandle

Observe = Callable[[str, float], None]
RECENT = 64  # finished requests by which the rate is measured
LONGEST_RETRY_S = 120
ENDS = (KeyboardInterrupt, SystemExit)  # any other exception concerns one request, even one that is no `Exception`


class RequestQueue:
    """Takes requests from any thread, and serves them in steps by its own; a base class.

    A subclass puts handles into ``_queue``, begins the thread with `_start`, and in `_advance` moves handles to
    ``_running`` and finishes them.
    """

    static_reason = ""  # why requests wait for the running batch

    def __init__(
        self,
        backend: Any,
        limits: SchedulerLimits,
        observe: Observe = lambda name, value: None,
        notify: Callable[[Sequence[RequestHandle]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.backend, self.limits = backend, limits
        self._observe, self._notify, self._clock = observe, notify or _notify_listeners, clock
        self._changed = threading.Condition()  # guards the queue and the end
        self._queue: list[tuple[tuple[float, int], RequestHandle]] = []  # sorted: the older, after head starts
        self._submitted = 0
        self.is_open = True  # new requests are accepted
        self._ends_at = math.inf
        self._thread: threading.Thread | None = None
        # Below: written by the engine's thread alone.
        self._running: dict[RequestHandle, Any] = {}
        self._finished: deque[float] = deque(maxlen=RECENT)
        self._updates: dict[int, RequestHandle] = {}
        self.encoded = 0  # sources
        self.reused = 0  # sources found in the encoder cache
        self.failures = 0  # rounds in which the backend raised
        self._began_s: float | None = None  # when the current step began

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

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
        return len(self._running)

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread is running."""
        return self._thread is not None and self._thread.is_alive()

    def busy_s(self) -> float:
        """Seconds since the current step began; 0 between steps."""
        began = self._began_s
        return 0.0 if began is None else self._clock() - began

    def retry_after_s(self) -> int:
        """Estimated seconds until the queue has a place."""
        times = list(self._finished)
        if len(times) < 2 or times[-1] <= times[0]:
            return 1
        rate = (len(times) - 1) / (times[-1] - times[0])
        return min(max(1, math.ceil(len(self._queue) / rate)), LONGEST_RETRY_S)

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
        """One iteration: evict, admit, compute. Returns True while work remains.

        Raises the error of a backend that has lost its device.
        """
        self._began_s = now = self._clock()
        failures = self.failures
        try:
            self._evict(now)
            self._advance()
        except ENDS:
            raise
        except BaseException as error:  # the batch may be in any state
            self._fail_all(error)
        updates, self._updates = list(self._updates.values()), {}
        self._began_s = None  # before the notification, whose receiver may ask at once
        if updates:
            self._notify(updates)
        if self.failures > failures and hasattr(self.backend, "require_device"):
            self.backend.require_device()
        return bool(self._running or self._queue)

    def _advance(self) -> None:
        raise NotImplementedError

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="t5accel-engine", daemon=True)
        self._thread.start()

    def _require_place(self, requests: int, tokens: int) -> None:
        if not self.is_open:
            raise ShuttingDownError("The server is shutting down and takes no more requests.")
        self.limits.require_place(
            [handle.request for _, handle in list(self._queue)], requests, tokens, self.retry_after_s
        )

    def _handle(self, request: Any, sequences: Sequence[Any] = ()) -> RequestHandle:
        """Number a request that is queued now."""
        now = self._clock()
        self._submitted += 1
        deadline = None if request.deadline_s is None else now + request.deadline_s
        return RequestHandle(request, self._submitted, now, deadline, sequences)

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
                self.is_open, waiting, self._queue = False, self._queue, []
            for handle in [*self._running, *(handle for _, handle in waiting)]:
                handle.finish(self._clock(), error=EngineError(f"The engine's thread has ended: {error!r:.200}"))
            self._running = {}
            raise

    def _evict(self, now: float) -> None:
        """Fail cancelled and late requests; after the grace period all."""
        late = None
        if now >= self._ends_at:
            late = ShuttingDownError("The server was shut down before this request was done.")

        def errors_of(handles: Iterable[RequestHandle]) -> dict[RequestHandle, Exception]:
            return {handle: error for handle in handles if (error := handle.cancellation_error(now) or late)}

        with self._changed:
            errors = errors_of([handle for _, handle in self._queue])
            if errors:
                self._queue = [entry for entry in self._queue if entry[1] not in errors]
        errors |= errors_of(self._running)
        for handle, error in errors.items():
            self._fail(handle, error)

    def _fail(self, handle: RequestHandle, error: Exception) -> None:
        self._running.pop(handle, None)
        handle.finish(self._clock(), error=error)
        self._updates[handle.number] = handle
        self._observe(type(error).__name__, 1)

    def _fail_all(self, error: BaseException) -> None:
        self.failures += 1
        for handle in list(self._running):
            self._fail(handle, engine_error(error))

    def _finish(self, handle: RequestHandle, now: float, answers: list[Any]) -> None:
        del self._running[handle]
        handle.finish(now, answers)
        self._finished.append(now)
        self._updates[handle.number] = handle
        self._observe("total_s", now - handle.submitted_s)
        self._observe("finished", 1)


def engine_error(error: BaseException) -> EngineError:
    """What a client is told of an error of the engine."""
    found = EngineError(f"The engine failed: {type(error).__name__}.")
    found.__cause__ = error  # its message may quote the request's text
    return found


def _notify_listeners(handles: Sequence[RequestHandle]) -> None:
    for handle in handles:
        if handle.listener is not None:
            handle.listener()
