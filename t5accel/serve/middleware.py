"""Middleware with the limits of requests, and the shape of errors."""

# An ASGI server hands on what a client sends as slowly as it comes and as much as it is. Here both have their limits.

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
from collections.abc import Collection
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError

from t5accel import errors
from t5accel.serve.monitoring import Metrics, log, open_log
from t5accel.serve.settings import Settings, is_loopback

OPEN = ("/docs",)  # equal for every server, and a browser sends no key
HEALTH = ("/health", "/health/live", "/health/ready")
# The status of each error, and headers. After a shutdown another server may answer; this one waits for nobody.
STATUS: dict[type[Exception], tuple[int, dict[str, str]]] = {
    errors.InputError: (422, {}),
    errors.QueueFullError: (429, {}),
    errors.DeadlineError: (504, {}),
    errors.ShuttingDownError: (503, {"Retry_After": "1", "Connection": "close"}),
    errors.CancelledError: (499, {}),
    errors.EngineError: (500, {}),
}
# Fields by the names of our arguments, which messages begin with; and those of OpenAI's interface.
FIELDS = {"forced_bos_token_id": "forced_bos_token"}
OPENAI_FIELDS = {**FIELDS, "text": "prompt", "max_new_tokens": "max_tokens", "num_return_sequences": "n"}
_OF_UNION = re.compile(r"str|bool|(list|literal)\[.*\]")  # what pydantic puts behind a field of several types
TYPES = {401: "authentication_error", 429: "rate_limit_error"}  # of errors; others by the class of their status


class HTTPError(Exception):
    """An error with its status and the field to blame."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None, **headers: str):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def error_response(error: BaseException, *, fields: Collection[str] = (), openai: bool = False) -> JSONResponse:
    """Any error in OpenAI's shape; an unexpected one without its message. ``fields`` are those of the request.

    For ``openai`` bad values are 400, as OpenAI's clients expect, a source that is too long among them.

    >>> error_response(errors.QueueFullError("Full.", 7)).headers["retry-after"]
    '7'
    >>> wrong = errors.InputError("forced_bos_token_id must be a token.")
    >>> error_response(wrong, fields=["forced_bos_token"]).body[:70]
    b'{"error":{"message":"forced_bos_token must be a token.","type":"invali'
    """
    if isinstance(error, ValidationError):  # what pydantic says of the first field, without the given value
        found = error.errors(include_url=False, include_context=False, include_input=False)
        names = [".".join(str(part) for part in one["loc"] if not _OF_UNION.fullmatch(str(part))) for one in found]
        said = dict.fromkeys(one["msg"] for one, name in zip(found, names, strict=True) if name == names[0])
        name = names[0][:80] or None
        error = HTTPError(422, f"{name or 'The body'}: {'; or '.join(said)}.", param=name)
    if not isinstance(error, HTTPError):
        status, headers = next((STATUS[kind] for kind in STATUS if isinstance(error, kind)), (500, {}))
        if isinstance(error, errors.QueueFullError):
            headers = {"Retry_After": str(error.retry_after_s)}
        message = str(error) if type(error) in STATUS else f"Unexpected {type(error).__name__}."
        error = HTTPError(status, message, **headers)
    status, message, param = error.status, str(error), error.param
    if openai and status in (413, 422):
        status = 400
    names, word = OPENAI_FIELDS if openai else FIELDS, message.partition(" must ")[0]
    param = names.get(param, param)
    if (name := names.get(word, word)) in fields:
        message, param = name + message.removeprefix(word), name
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    content = {"message": message, "type": kind, "param": param, "code": error.code}
    return JSONResponse({"error": content}, status, headers=error.headers)


class RequestLimits:
    """ASGI middleware around the application. Health is answered without a key, before a body is read."""

    def __init__(self, app: Any, settings: Settings, metrics: Metrics):
        self.app, self.settings, self.metrics = app, settings, metrics
        self._key = settings.api_key.get_secret_value().encode() if settings.api_key else b""
        further = {name.strip().lower().rstrip(".") for name in settings.allowed_hosts.split(",")} - {""}
        checks_host = "*" not in further and (further or is_loopback(settings.host))
        self._hosts = {settings.host.lower(), "localhost", "127.0.0.1", "::1", *further} if checks_host else None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status, told = time.perf_counter(), 0, log

        async def sent(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self.metrics.responded(_route(scope), status)
            await send(message)

        try:
            try:
                head = dict(scope["headers"])
                if b"transfer-encoding" in head and b"content-length" in head:
                    raise HTTPError(400, "Give a Transfer-Encoding or a Content-Length, not both.")
                if scope["path"] in HEALTH:
                    body, told = b"", open_log
                else:
                    self._check_head(scope, head)
                    body = await self._body(head, receive)
            except HTTPError as error:
                response, told = error_response(error), open_log
                response.headers["Connection"] = "close"  # the rest of the body would be read as the next request
                await response(scope, receive, sent)
            else:
                await self.app(scope, replayed(body, receive), sent)
        except ConnectionError:
            pass  # the client has gone
        finally:
            passed = (time.perf_counter() - started) * 1e3
            told = open_log if 400 <= status < 500 else told  # refusals cost a client nothing
            is_probe = 0 < status < 400 and scope["path"] in (*HEALTH, "/metrics")
            level = logging.DEBUG if is_probe else logging.INFO
            told.log(level, "%s %s %s %.0f ms", scope["method"][:8], _route(scope), status or "cut off", passed)

    def _check_head(self, scope: Any, head: dict[bytes, bytes]) -> None:
        """Raise for everything that can be refused before a body is read."""
        host = head.get(b"host")
        own = (scope.get("server") or ("",))[0]  # the address of the socket; of an application under test its client's
        if self._hosts is not None and host is not None and _name_in(host) not in {*self._hosts, own}:
            # A page of a foreign name that its owner lets point here could read the answers: DNS rebinding.
            raise HTTPError(421, "The Host header names no host of this server: see --allowed-hosts.")
        if self._key and scope["path"] not in OPEN:
            scheme, _, given = head.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(b" "), self._key):
                raise HTTPError(401, "Give the API key as Authorization: Bearer KEY.", WWW_Authenticate="Bearer")
        kind = head.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if scope["method"] == "POST" and kind != b"application/json":  # which no page sends elsewhere without asking
            raise HTTPError(415, "Give Content-Type: application/json, and JSON as the body.")
        if head.get(b"content-encoding", b"identity").lower() != b"identity":
            raise HTTPError(415, "Leave Content-Encoding out, and send the body as it is.")

    async def _body(self, head: dict[bytes, bytes], receive: Any) -> bytes:
        most = self.settings.body_kb * 1024
        size, body, more = int(head.get(b"content-length", b"0")), bytearray(), True
        try:
            async with asyncio.timeout(self.settings.body_timeout_s):
                while more and size <= most:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ConnectionError
                    body += message.get("body", b"")
                    size, more = max(size, len(body)), message.get("more_body", False)
        except TimeoutError as error:
            raise HTTPError(408, f"The body did not arrive within {self.settings.body_timeout_s:g} s.") from error
        if size > most:
            raise HTTPError(413, f"The body has more than {most} bytes.")
        return bytes(body)


def replayed(body: bytes, receive: Any) -> Any:
    """Another ``receive``, whose first message is a whole body."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return messages.pop() if messages else await receive()

    return again


def _name_in(host: bytes) -> str:
    """A Host header without its port."""
    name = host.decode("latin-1").lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].removesuffix(".")


def _route(scope: Any) -> str:
    # The pattern: a client's own path may hold any text.
    return getattr(scope.get("route"), "path", "unknown")
