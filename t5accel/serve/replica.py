"""A replica: the server's application, with its scheduler and model, in an actor of Ray Serve that knows no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from t5accel.errors import EngineError
from t5accel.serve.server import opened
from t5accel.serve.settings import Settings

Message = dict[str, Any]


class Replica:
    """Holds a model, whose requests join a running batch.

    Args:
        settings: as of `serve.server.opened`, and raises as that.

    >>> replica = Replica(Settings())
    >>> async def ask(path: str) -> list[Message]:
    ...     return [message async for message in replica({"method": "GET", "path": path, "headers": []}, b"")]
    >>> [message.get("status") for message in asyncio.run(ask("/health/ready"))]
    [200, None]
    >>> replica.check_health()
    >>> replica.__del__()
    """

    def __init__(self, settings: Settings):
        self._app, self._stuck_s = opened(settings), settings.stuck_s
        self._service = self._app.state.service

    async def __call__(self, request: Message, body: bytes) -> AsyncIterator[Message]:
        """A request's scope, as far as it travels, and its body -> the application's ASGI messages, as they come.

        Whoever stops reading is to the application a client that has gone.
        """
        self._service.loop = asyncio.get_running_loop()
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        given, gone = [{"type": "http.request", "body": body, "more_body": False}], asyncio.Event()

        async def receive() -> Message:
            if given:
                return given.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        scope = {"type": "http", "asgi": {"version": "3.0"}, "scheme": "http", "query_string": b"", "root_path": ""}
        scope |= {"client": None, "server": None, **request}
        work = asyncio.ensure_future(self._app(scope, receive, messages.put))
        work.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
            await work
        finally:
            gone.set()

    def check_health(self) -> None:
        """Ray Serve asks every few seconds, and puts another replica in the place of one that raises."""
        scheduler = self._service.scheduler
        if not scheduler.is_alive or scheduler.busy_s() >= self._stuck_s:
            raise EngineError(f"The engine's thread has ended, or is at one step for {scheduler.busy_s():.0f} s.")

    def __del__(self) -> None:
        if service := getattr(self, "_service", None):
            service.close()
