"""A process that serves: uvicorn, with what it does not watch, and an end that lets running requests finish."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from t5accel.api import open_backend
from t5accel.errors import InputError
from t5accel.serving.app import make_app
from t5accel.serving.guard import log
from t5accel.serving.settings import Settings

UNREAD = 64 * 1024  # bytes that wait for a client in our memory and in the system's, each
# Python lets a busy thread go on for 5 ms before another may run; for the engine these are steps of a small model.
SWITCH_S = 0.0005
LOG = "%(asctime)s %(name)s %(message)s"
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Connection(H11Protocol):
    """One client. The head of a request arrives in time, and little of an answer waits to be read, and not for long.

    To the application a client that is cut off is one that has gone.
    """

    head_s = write_s = 10.0
    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=UNREAD)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD)
        self._await_head(True)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_head(self.cycle is None or self.cycle.response_complete)

    def connection_lost(self, exc: Exception | None) -> None:
        self._await_head(False)
        super().connection_lost(exc)  # which resumes writing

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self._unread or self.loop.call_later(self.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def _await_head(self, awaited: bool) -> None:
        if awaited and self._late is None:
            self._late = self.loop.call_later(self.head_s, self._give_up)
        elif not awaited and self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        if not self.transport.is_closing():
            self.transport.write(TOO_SLOW)
            self.transport.close()


class Server(uvicorn.Server):
    """After SIGTERM it answers 503, and ends when nothing runs any more, or at the end of the grace."""

    def __init__(self, config: uvicorn.Config, scheduler: Any, grace_s: float):
        super().__init__(config)
        self._scheduler, self._grace_s, self._ends_at = scheduler, grace_s, 0.0

    async def on_tick(self, counter: int) -> bool:
        if not await super().on_tick(counter):
            return False
        if not self._ends_at:
            self._ends_at = time.monotonic() + self._grace_s
            self._scheduler.drain(self._grace_s)
        idle = not (self._scheduler.running or self._scheduler.waiting or self.server_state.tasks)
        return idle or self.force_exit or time.monotonic() >= self._ends_at + 1


def opened(settings: Settings) -> FastAPI:
    """The application around the model that the settings name.

    Raises:
        InputError: the model has no tokenizer, or its answers would depend on who else is served.
        ExportError, NotT5Error, UnknownModelError, ModelUnavailableError: as of `api.open_backend`.
    """
    backend, tokenizer, what = open_backend(settings.model, precision=settings.precision, threads=settings.threads)
    if tokenizer is None:
        raise InputError(f"{settings.model} has no tokenizer: a server of texts needs one beside the model.")
    app = make_app(backend, tokenizer, settings)
    sys.setswitchinterval(SWITCH_S)
    log.info("%s by %s, %s", settings.model, what, app.state.service.scheduler.why_static or "running batches")
    return app


def listen(app: Any, scheduler: Any, settings: Settings) -> None:
    """Hand requests to an application until SIGTERM or SIGINT; ``scheduler`` says what runs, and is told to drain."""
    patient = type("Connection", (Connection,), {"head_s": settings.head_s, "write_s": settings.write_s})
    config = uvicorn.Config(
        app, host=settings.host, port=settings.port, http=patient, loop="asyncio", ws="none", lifespan="on",
        log_config=None, access_log=False, server_header=False, limit_concurrency=settings.connections,
        h11_max_incomplete_event_size=64 * 1024, timeout_graceful_shutdown=5,
    )  # fmt: skip
    Server(config, scheduler, settings.grace_s).run()


def serve(settings: Settings) -> None:
    """Open the model and serve; raises as `opened`.

    >>> serve(Settings(model="mini", precision="int8-dynamic"))
    Traceback (most recent call last):
    t5accel.errors.InputError: precision 'int8-dynamic' finds the scale of what the decoder multiplies ...
    """
    logging.basicConfig(level=logging.INFO, format=LOG)
    listen(app := opened(settings), app.state.service.scheduler, settings)
