"""Middleware that takes from a page what it would fetch from other hosts.

It is for Gradio's pages: their fonts, and a script for pages that stand inside of others.
"""

from __future__ import annotations

import re
from typing import Any

# In the page that Gradio sends: connections to other hosts, for its fonts, and for pages inside of others.
_FOREIGN = re.compile(
    rb'<link\s+rel="(?:preconnect|dns-prefetch)"[^>]*>|<script[^>]*\bsrc="https?://[^>]*>\s*</script>'
)
# And should another release fetch something new, the browser refuses.
_POLICY = b"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:"


class AtHome:
    """An ASGI application around another one, whose pages of HTML lose links and scripts of other hosts."""

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
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
