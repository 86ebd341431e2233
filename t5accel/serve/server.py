"""The server process: uvicorn with timeouts and a graceful shutdown."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import math
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from t5accel.api import open_backend
from t5accel.checks import check_utf8
from t5accel.encoder import AcceleratedEncoder
from t5accel.errors import InputError
from t5accel.machine import cpu_threads
from t5accel.models.load import require_tokenizer
from t5accel.precision.recipes import as_recipe
from t5accel.serve import embeddings
from t5accel.serve.app import make_app
from t5accel.serve.limits import needs_unbatched_encoding
from t5accel.serve.middleware import HEALTH, HTTPError, error_response
from t5accel.serve.monitoring import RateLimit, configure, log, open_log
from t5accel.serve.settings import EMBED_PRECISIONS, OF_ONE, Settings, is_loopback, refuse_misspelt

UNREAD = 64 * 1024  # bytes of an answer that the system keeps for a client; others stay in our memory
SLOWEST = 1024  # bytes a second that leave our memory, in lumps of half of `UNREAD`; a client that takes less is gone
RESERVE = 32  # connections beyond the limit, which get answers about health alone
BACKLOG = 100  # connections that the system keeps until they are accepted; CPython accepts as many at once
OTHER_FILES = 64  # of the interpreter, the model, the log
PIECES, PIECE = 512, 512  # pieces that any body may have, and bytes for each one beyond them
THREADS_PER_CORE = 4
# Python lets a busy thread go on for 5 ms before another may run; for the engine these are steps of a small model.
SWITCH_S = 0.0005
ARE_YOU_THERE = b"HTTP/1.1 100 Continue\r\n\r\n"  # nothing to a client that reads, a reset from one that has gone


def _raw(error: HTTPError) -> bytes:
    """Bytes of an error response for a connection without a parsed request."""
    answer = error_response(error)
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", "connection: close"]
    lines += [f"{name}: {value}" for name, value in answer.headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + answer.body


TOO_SLOW = _raw(HTTPError(408, "The head of the request did not arrive in time."))
MALFORMED = _raw(HTTPError(400, "The request must be valid HTTP/1.1, with a body in few pieces. Send it whole."))


class Parser(h11.Connection):
    """Refuses a body in very many pieces, which block the event loop."""

    _pieces = _bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._pieces = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._pieces, self._bytes = self._pieces + 1, self._bytes + len(event.data)
            if self._pieces > PIECES + self._bytes // PIECE:
                raise h11.RemoteProtocolError("too many pieces")
        return event


class TimeoutH11Protocol(H11Protocol):
    """HTTP protocol that closes connections with late request headers or unread responses.

    With all connections in use, the longest idle one is closed; with none idle a new one gets health responses only.
    """

    header_timeout_s = write_timeout_s = 10.0
    most = 1000
    idle: dict[TimeoutH11Protocol, None]  # of all connections of one server, the longest idle first
    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _gone: asyncio.TimerHandle | None = None
    _has_ended = False  # the client sends no more

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.conn = Parser(h11.SERVER, self.config.h11_max_incomplete_event_size)

    def connection_made(self, transport: Any) -> None:
        others = len(self.connections)
        if others >= self.most and not self._make_room():
            if others >= self.most + RESERVE:
                self.transport = transport
                transport.abort()
                return
            self.app = _only_health(self.app, self.most)
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # writing pauses whenever anything is unread, however little
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD)
        self.idle[self] = None
        self._await_head(True)

    def _make_room(self) -> bool:
        oldest = next(iter(self.idle), None)
        if oldest is None:
            return False
        self.connections.discard(oldest)
        del self.idle[oldest]
        oldest.transport.abort()  # to close would be to wait until it has read all
        return True

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_head(self._note())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.idle.pop(self, None)  # idle since now
        if self._note() and self._has_ended:
            self.transport.close()

    def _note(self) -> bool:
        """Update and return whether the connection is idle."""
        is_idle = (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing()
        if not is_idle:
            self.idle.pop(self, None)
        elif self in self.connections:
            self.idle.setdefault(self)
        return is_idle

    def eof_received(self) -> bool:
        """Return whether the connection stays open for a response."""
        # A half-closed client may still read; one that has gone resets the connection when anything is sent.
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.scope["http_version"] != "1.1":
            return False
        self._has_ended = True
        if not cycle.response_started:
            self.transport.write(ARE_YOU_THERE)
            self._look(0.05)
        return True

    def _look(self, after_s: float) -> None:
        # Nothing is read from a half-closed connection, so its error has to be polled.
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        elif not self.cycle.response_started:
            self._gone = self.loop.call_later(after_s, self._look, min(2 * after_s, 1.0))

    def connection_lost(self, exc: Exception | None) -> None:
        self.idle.pop(self, None)
        for timer in (self._late, self._unread, self._gone):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)  # which resumes writing

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._watch_reader()

    def _watch_reader(self, before: float = math.inf) -> None:
        left = self.transport.get_write_buffer_size()
        if before - left < SLOWEST * self.write_timeout_s:
            self.transport.abort()
        else:
            self._unread = self.loop.call_later(self.write_timeout_s, self._watch_reader, left)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def _await_head(self, awaited: bool) -> None:
        if awaited and self._late is None:
            self._late = self.loop.call_later(self.header_timeout_s, self._end_with, TOO_SLOW)
        elif not awaited and self._late is not None:
            self._late.cancel()
            self._late = None

    def send_400_response(self, msg: str) -> None:
        self._end_with(MALFORMED)  # even while a request is being answered

    def _end_with(self, answer: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(answer)
        self.transport.close()


def _only_health(app: Any, most: int) -> Any:
    full = HTTPError(503, f"All {most} connections are in use: try again in 1 s.", Retry_After="1", Connection="close")

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await (app if scope["path"] in HEALTH else error_response(full))(scope, receive, send)

    return answer


class Server(uvicorn.Server):
    """A server that finishes its requests after SIGTERM, within a grace period."""

    def __init__(self, config: uvicorn.Config, scheduler: Any, grace_s: float):
        super().__init__(config)
        self._scheduler, self._grace_s, self._ends_at = scheduler, grace_s, 0.0
        self._before: set[asyncio.Task[None]] = set()

    async def on_tick(self, counter: int) -> bool:
        if not await super().on_tick(counter):
            return False
        if not self._ends_at:
            self._ends_at = time.monotonic() + self._grace_s
            self._scheduler.drain(self._grace_s)
            self._before = set(self.server_state.tasks)  # later ones are refused, and nobody waits for them
        self._before &= self.server_state.tasks
        idle = not (self._scheduler.running or self._scheduler.waiting or self._before)
        return idle or self.force_exit or time.monotonic() >= self._ends_at + 1


def checked(settings: Settings, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ``InputError`` for bad settings, before a model is opened.

    >>> checked(Settings(host="0.0.0.0"), {})
    Traceback (most recent call last):
    t5accel.errors.InputError: host must be this machine's without T5ACCEL_API_KEY, got '0.0.0.0'. Set ...
    """
    refuse_misspelt(environment)
    key = settings.api_key.get_secret_value() if settings.api_key else environment.get("T5ACCEL_API_KEY")
    if key == "":
        raise InputError("T5ACCEL_API_KEY must not be empty. Set a key, or unset it to serve without one.")
    if key is not None and not re.fullmatch("[!-~]+", key):
        raise InputError(
            f"T5ACCEL_API_KEY must be printable ASCII without blanks, got {len(key)} characters of which some are not "
            "(is there a newline at its end?). Set another one, or unset it."
        )
    if key is None and not is_loopback(settings.host):
        if not settings.allow_unauthenticated:
            raise InputError(
                f"host must be this machine's without T5ACCEL_API_KEY, got {settings.host!r}. Set the key, or give "
                "--allow-unauthenticated to serve everybody."
            )
        log.warning("no API key is set: every machine that reaches host %s may send requests", settings.host)
    for (kind, value), names in OF_ONE.items():
        if (own := getattr(settings, kind)) != value:
            for name in names:
                if (given := getattr(settings, name)) != Settings.model_fields[name].default:
                    hint = f"Give --{kind} {value}, or leave it out."
                    raise InputError(f"{name} must be unset with {kind} {own}, got {given!r:.80}. {hint}")
    if settings.task == "generate":
        recipe = as_recipe(settings.precision or "fp32")
        needs_unbatched_encoding(recipe)
    elif settings.precision not in (None, *EMBED_PRECISIONS):
        allowed = ", ".join(EMBED_PRECISIONS)
        raise InputError(f"precision must be one of {allowed} with task embed, got {settings.precision!r:.80}.")
    if settings.device == "cuda":
        if recipe.integers:
            raise InputError(f"precision must be bf16, fp16 or fp32 on cuda, got {recipe.name}. Give --precision bf16.")
        if settings.engine != "local":
            raise InputError(f"engine must be local on cuda, got {settings.engine!r}. Leave --engine out.")
    for name in ("prefix", "model", "served_model_name"):
        check_utf8(getattr(settings, name) or "", name)
    for host in map(str.strip, settings.allowed_hosts.split(",")):
        if not re.fullmatch(r"[^:/*\s]*|\*|[\da-fA-F.]*:[\da-fA-F.]*:[\da-fA-F:.]*", host):  # the last: IPv6
            raise InputError(f"allowed_hosts must be names without a port or pattern, or *, got {host!r:.80}.")
    if settings.max_beams > settings.max_batch_rows and "max_beams" in settings.model_fields_set:
        raise InputError(
            f"max_beams must be at most max_batch_rows, {settings.max_batch_rows}, got {settings.max_beams}: each beam "
            "is a row. Raise --max-batch-rows."
        )
    cores = cpu_threads()
    if settings.threads is not None and settings.threads > THREADS_PER_CORE * cores:
        raise InputError(
            f"threads must be at most {THREADS_PER_CORE * cores}, {THREADS_PER_CORE} for each core of this process, "
            f"got {settings.threads}. Leave --threads out to use all cores."
        )
    _allow_files(settings.connections)


def _allow_files(connections: int) -> None:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    others = RESERVE + BACKLOG + OTHER_FILES
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if one == resource.RLIM_INFINITY else one for one in limits)
    if hard < connections + others:
        raise InputError(
            f"connections must be at most {max(hard - others, 0)} where {hard} files may be open, got {connections}. "
            f"Lower --connections, or raise the limit (ulimit -n {connections + others})."
        )
    if soft < connections + others:
        resource.setrlimit(resource.RLIMIT_NOFILE, (connections + others, limits[1]))


def bound(settings: Settings) -> list[socket.socket]:
    """Bind sockets without listening; ``InputError``: taken port, foreign host."""
    sockets: list[socket.socket] = []
    port = settings.port
    try:
        found = socket.getaddrinfo(settings.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((one[0], one[4]) for one in found):
            # With the protocol named: else asyncio leaves Nagle's delay on, 40 ms between two parts of an answer.
            made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            sockets.append(made)
            if os.name == "posix":  # elsewhere it would allow two servers on one port
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                made.bind((address[0], port, *address[2:]))
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL or len(found) == 1:
                    raise
                sockets.pop().close()  # "localhost" is ::1, too, also where IPv6 is switched off
                continue
            port = made.getsockname()[1]  # of port 0 the same for all addresses
    except OSError as error:
        for made in sockets:
            made.close()
        raise _not_served(settings, error) from error
    return sockets


def _not_served(settings: Settings, error: OSError) -> InputError:
    return InputError(
        f"host {settings.host!r} and port {settings.port} cannot be served: {error.strerror or error}. Give another "
        "--port or --host."
    )


def create_app(settings: Settings) -> FastAPI:
    """Open the model and make its application.

    ``InputError``: the model has no tokenizer, its answers would depend on other requests, or no request fits into
    ``key_value_mb``. Another ``T5AccelError``: the model cannot be opened.
    """
    require_tokenizer(settings.model)
    log.info("opening %s", settings.public_name)
    options = dict(
        precision=settings.precision,
        device=settings.device,
        threads=settings.threads,
        progress=settings.log_format == "text",
    )
    if settings.task == "embed":
        encoder = AcceleratedEncoder.from_pretrained(settings.model, **options)
        app, what = embeddings.make_app(encoder, settings), f"its encoder in {encoder.precision}"
    else:
        backend, tokenizer, what = open_backend(settings.model, **options)
        if tokenizer is None:
            raise InputError(f"{settings.model} has no tokenizer: a server of texts needs one beside the model.")
        app = make_app(backend, tokenizer, settings)
    sys.setswitchinterval(SWITCH_S)
    log.info("%s by %s, %s", settings.public_name, what, app.state.service.scheduler.static_reason or "running batches")
    return app


def run_server(app: Any, scheduler: Any, settings: Settings, sockets: list[socket.socket]) -> None:
    """Serve until SIGTERM or SIGINT, then drain; ``InputError``: taken port."""
    options = {
        "header_timeout_s": settings.header_timeout_s,
        "write_timeout_s": settings.write_timeout_s,
        "most": settings.connections,
        "idle": {},
    }
    config = uvicorn.Config(
        app,
        http=type("Connection", (TimeoutH11Protocol,), options),
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=64 * 1024,
        timeout_graceful_shutdown=5,
        backlog=BACKLOG,
    )
    for one in (logging.getLogger("asyncio"), logging.getLogger("uvicorn.error"), open_log):
        one.addFilter(RateLimit())
    for one in sockets:
        try:
            one.listen(BACKLOG)
        except OSError as error:
            raise _not_served(settings, error) from error
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        log.info("listening at http://%s:%s", host, one.getsockname()[1])
    try:
        Server(config, scheduler, settings.shutdown_grace_s).run(sockets)
    except KeyboardInterrupt:  # which uvicorn raises once it has ended in good order
        pass


def serve(settings: Settings) -> None:
    """Open the model and serve it; raises as `checked`, `bound` and `create_app`."""
    configure(settings.log_level, settings.log_format)
    checked(settings)
    sockets = bound(settings)
    try:
        app = create_app(settings)
        gc.collect()
        gc.freeze()  # else a collection now and then stops all answers for 0.2 s, to look at what was imported
        run_server(app, app.state.service.scheduler, settings, sockets)
    finally:
        for one in sockets:
            one.close()
