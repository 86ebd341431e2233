"""Middleware between Gradio and a browser: no foreign hosts, no files, no requests of other sites.

The demo's page sends JSON to a few addresses. Gradio offers many more, among them uploads of any size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

# In the page that Gradio sends: connections to other hosts, for its fonts, and for pages inside of others.
_FOREIGN = re.compile(
    rb'<link\s+rel="(?:preconnect|dns-prefetch)"[^>]*>|<script[^>]*\bsrc="https?://[^>]*>\s*</script>'
)
# And should another release fetch something new, the browser refuses.
_POLICY = b"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:"

_READING = {"GET", "HEAD", "OPTIONS"}
# The only addresses that the page and Gradio's client post to.
_POSTED_TO = re.compile(r"/gradio_api/(?:queue/join|cancel|reset|(?:run|api|call)/[^/]+|call/v2/[^/]+)/?")
# What Gradio reads or writes files for, or fetches from other hosts, on a mere GET.
_CLOSED = re.compile(
    r"/gradio_api/(?:upload|upload_progress|file|stream|proxy|deep_link|custom_component)(?:[/=].*)?", re.DOTALL
)
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
MAX_BODY_BYTES = 1_000_000


def error_response(method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str] | None:
    """Status and sentence for a request that the page never makes; ``None`` for one that it may make.

    Args:
        path: decoded, without the query.
        headers: by name in lower case.

    >>> error_response("POST", "/gradio_api/upload", {})
    (403, 'The demo takes no files.')
    """
    if _CLOSED.fullmatch(path):
        return 403, "The demo takes no files."
    if method in _READING:
        return None
    if method != "POST":
        return 405, f"The method must be GET or POST, got {method}."
    if not _POSTED_TO.fullmatch(path):
        return 403, "The demo's page does not post to this address."
    if not _is_own_page(headers):
        return 403, "The request comes from a page of another site."
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return 415, "The body must be JSON."
    length = headers.get("content-length", "")
    if "transfer-encoding" in headers or not (length.isascii() and length.isdigit()):
        return 411, "The request must say the length of its body."
    if len(length) > 15 or int(length) > MAX_BODY_BYTES:
        return 413, f"The body must have at most {MAX_BODY_BYTES} bytes."
    return None


def _is_own_page(headers: Mapping[str, str]) -> bool:
    """Whether a request comes from the demo's page, or from a program that is no browser."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:  # browsers send it over https and to this machine
        return site in ("same-origin", "none")
    if origin is None:
        return True
    try:
        found = urlsplit(origin)
        # Over plain http another name than this machine's may be a foreign name that was made to point here.
        return found.netloc == headers.get("host") and (found.scheme == "https" or found.hostname in _LOOPBACK)
    except ValueError:
        return False


class BlockExternalResources:
    """An ASGI application around Gradio's: it refuses what the page never asks, and strips links to other hosts."""

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        named = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if refused := error_response(scope["method"], scope["path"], named):
            return await _refuse(send, *refused)
        start: dict[str, Any] = {}
        body = bytearray()

        async def filtered(message: dict[str, Any]) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
                headers = dict(message["headers"])
                if not headers.get(b"content-type", b"").startswith(b"text/html"):
                    await send(message)
            elif not dict(start["headers"]).get(b"content-type", b"").startswith(b"text/html"):
                await send(message)
            else:
                body.extend(message.get("body", b""))
                if not message.get("more_body"):
                    page = _FOREIGN.sub(b"", bytes(body))
                    kept = [(name, value) for name, value in start["headers"] if name != b"content-length"]
                    added = [(b"content-length", str(len(page)).encode()), (b"content-security-policy", _POLICY)]
                    await send({**start, "headers": [*kept, *added]})
                    await send({"type": "http.response.body", "body": page})

        await self._app(scope, receive, filtered)


async def _refuse(send: Any, status: int, sentence: str) -> None:
    body = sentence.encode()
    # The body is not read, so the connection cannot be used again.
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode()),
               (b"connection", b"close")]  # fmt: skip
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
