"""A router in front of replicas, of which Ray Serve chooses one."""

# A request goes to a replica as a whole: when the replica dies before any of the response was sent, another one gets
# the same request. A stream that has begun ends with an event that tells the client to send the request again.

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

from fastapi.responses import JSONResponse, PlainTextResponse

from t5accel.errors import ClusterError, DeadlineError, EngineError, InputError, QueueFullError, ShuttingDownError
from t5accel.serve.batch.job import ModelSource
from t5accel.serve.middleware import HEALTH, HTTPError, RequestLimits, error_response, replayed
from t5accel.serve.monitoring import TEXT_FORMAT, Metrics, configure, log
from t5accel.serve.ray_batch import connected, workers_for
from t5accel.serve.server import bound, checked, create_app, run_server
from t5accel.serve.service import unless_disconnected
from t5accel.serve.settings import Settings

Message = dict[str, Any]
Ask = Callable[[Message, bytes], AsyncIterator[Message]]
TRIES = 3  # a request that kills its replica must not kill all of them
PAUSE_S = 0.2  # before a retry: others know by then that the replica is dead
READY_S = 5.0  # for any replica to say that it is ready
TRAVELS = ("method", "path", "raw_path", "query_string", "headers", "http_version", "server")
ROUTES = {"/generate", "/v1/completions", "/v1/models", "/", "/docs", "/openapi.json", "/metrics", *HEALTH}
TAKEN: Message = {"type": "taken"}  # a replica's first message


class Replica:
    """The server's application in an actor of Ray Serve, without HTTP.

    >>> replica = Replica(Settings())
    >>> async def ask(path: str) -> list[Message]:
    ...     return [message async for message in replica({"method": "GET", "path": path, "headers": []}, b"")]
    >>> [message.get("status") for message in asyncio.run(ask("/health/ready"))]
    [None, 200, None]
    >>> replica.check_health()
    >>> replica.__del__()
    """

    def __init__(self, settings: Settings):
        self._app, self._unhealthy_after_s = create_app(settings), settings.unhealthy_after_s
        self._service = self._app.state.service

    async def __call__(self, request: Message, body: bytes) -> AsyncIterator[Message]:
        """Yield `TAKEN` and the application's ASGI messages; closing the iterator disconnects."""
        yield TAKEN
        self._service.loop = asyncio.get_running_loop()
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()

        async def disconnect() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        scope = {"type": "http", "asgi": {"version": "3.0"}, "scheme": "http", "query_string": b"", "root_path": ""}
        scope |= {"client": None, "server": None, **request}
        work = asyncio.ensure_future(self._app(scope, replayed(body, disconnect), messages.put))
        work.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
            await work
        finally:
            gone.set()

    def check_health(self) -> None:
        """Raise if the engine is dead or stuck; Ray Serve replaces it."""
        scheduler = self._service.scheduler
        if not scheduler.is_alive or scheduler.busy_s() >= self._unhealthy_after_s:
            raise EngineError(f"The engine's thread has ended, or is at one step for {scheduler.busy_s():.0f} s.")

    def __del__(self) -> None:
        if service := getattr(self, "_service", None):
            service.close()


class ReplicaLostError(Exception):
    """A replica died with a request."""


class Router:
    """ASGI application that hands requests to replicas and retries lost ones.

    ``ask(request, body)`` yields the response's messages; it raises ``ReplicaLostError`` if the request may be retried.
    Its first message must come within ``deadline_s`` seconds.
    """

    waiting = 0

    def __init__(self, ask: Ask, deadline_s: float = 120.0):
        self._ask, self._deadline_s, self._is_open = ask, deadline_s, True
        self._limits: set[asyncio.Timeout] = set()
        self.running = 0
        self.metrics = Metrics()

    def drain(self, grace_s: float) -> None:
        """Accept no more requests; end unfinished ones after ``grace_s`` seconds."""
        self._is_open = False
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time() + grace_s)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": message["type"] + ".complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        body = (await receive()).get("body", b"")  # whole: the middleware has read it
        if scope["path"] in ROUTES:
            scope["route"] = SimpleNamespace(path=scope["path"])
        if scope["path"] == "/health/live":
            await JSONResponse({"alive": True})(scope, receive, send)
        elif scope["path"] == "/metrics":
            await PlainTextResponse(self.metrics.text(), media_type=TEXT_FORMAT)(scope, receive, send)
        elif not self._is_open:
            error = ShuttingDownError("The server is shutting down and takes no more requests.")
            await error_response(error)(scope, receive, send)
        else:
            self.running += 1
            try:
                await self._answer(scope, body, receive, send)
            finally:
                self.running -= 1

    async def _answer(self, scope: Any, body: bytes, receive: Any, send: Any) -> None:
        limit = READY_S if scope["path"] in ("/health", "/health/ready") else None
        try:
            await unless_disconnected(self._try_replicas(scope, body, receive, send), receive, limit)
        except DeadlineError:
            await JSONResponse({"ready": False}, 503)(scope, receive, send)

    async def _try_replicas(self, scope: Any, body: bytes, receive: Any, send: Any) -> None:
        request, began, ended = {name: scope[name] for name in TRAVELS if name in scope}, None, False
        for tried in range(TRIES):
            await asyncio.sleep(PAUSE_S * tried)
            messages = self._ask(request, body)
            try:
                async with asyncio.timeout(self._deadline_s) as limit:
                    self._limits.add(limit)
                    async for message in messages:
                        if self._is_open and not limit.expired():
                            limit.reschedule(None)  # a replica has it, and keeps its deadline
                        if message["type"] == "http.response.start":
                            began = message  # held back: with the first piece of a body it is sent
                        elif message != TAKEN:
                            if began:
                                await send(began)
                            began = {}
                            await send(message)
                            ended = not message.get("more_body", False)
                return
            except Exception as raised:
                if ended:
                    return
                late = DeadlineError(f"No replica has taken the request within {self._deadline_s:g} s.")
                cut = late if self._is_open else ShuttingDownError("The server was shut down before the answer.")
                error = cut if limit.expired() else raised
                lost = isinstance(error, ReplicaLostError)
                if lost:
                    log.warning("a replica was lost with a request to %s: %s", request["path"], error)
                if began == {}:  # only streams have more than one message
                    event = b"event: error\ndata: " + error_response(_lost() if lost else error).body + b"\n\n"
                    await send({"type": "http.response.body", "body": event, "more_body": False})
                    return
                if not lost:
                    await error_response(error)(scope, receive, send)
                    return
            finally:
                self._limits.discard(limit)
                await messages.aclose()
        await error_response(_lost())(scope, receive, send)


def _lost() -> HTTPError:
    message = "The replica that was at this request was lost: send it again."
    return HTTPError(503, message, code="replica_lost", Retry_After="1")


def _asking(handle: Any, ray: Any) -> Ask:
    from ray.serve.exceptions import BackPressureError, RayServeException

    async def ask(request: Message, body: bytes) -> AsyncIterator[Message]:
        answer = handle.remote(request, body)
        try:
            async for message in answer:
                yield message
        except BackPressureError as error:
            raise QueueFullError("All replicas have as many requests as may wait: try again in 1 s.", 1) from error
        except ray.exceptions.RayTaskError as error:
            raise EngineError(f"A replica failed: {type(error.cause).__name__}.") from error
        except (ray.exceptions.RayError, RayServeException) as error:
            raise ReplicaLostError(type(error).__name__) from error
        except (asyncio.CancelledError, GeneratorExit):  # the client has gone
            answer.cancel()
            raise

    return ask


def serve(settings: Settings) -> None:
    """Start replicas of ``settings.threads`` threads (default 1), and serve until SIGTERM or SIGINT.

    All machines of a cluster must have t5accel installed and see the model under the same path. Raises as `connected`
    and `server.serve`, and ``InputError`` for too few cores.
    """
    configure(settings.log_level, settings.log_format)
    checked(settings)
    threads, least, most = settings.threads or 1, settings.replicas_min, settings.replicas
    if least > most:
        raise InputError(f"replicas_min must be at most replicas, {most}, got {least}. Raise --replicas.")
    settings = settings.model_copy(update={"model": ModelSource(settings.model).absolute().name, "threads": threads})
    sockets = bound(settings)
    create_app(settings).state.service.close()  # raises here what replicas would raise, and makes the export
    name = f"t5accel-{socket.gethostname()}-{settings.port or os.getpid()}"
    with connected(settings.address) as ray:
        from ray import serve

        workers_for(ray, least, threads, settings.address)
        deployment = serve.deployment(Replica).options(
            name="Replica",
            ray_actor_options={"num_cpus": threads},
            graceful_shutdown_timeout_s=settings.shutdown_grace_s,
            max_ongoing_requests=settings.max_batch_rows + settings.max_queue,
            max_queued_requests=settings.max_queue,
            health_check_period_s=5,
            health_check_timeout_s=settings.unhealthy_after_s,
            autoscaling_config=dict(
                min_replicas=least, max_replicas=most, target_ongoing_requests=settings.max_batch_rows
            ),
        )
        try:
            serve.start(proxy_location="Disabled")
            handle = serve.run(deployment.bind(settings), name=name, route_prefix=None)
        except Exception as error:
            why = str(error).strip().partition("\n")[0]
            raise ClusterError(f"No replica could be started: {why:.300}") from error
        try:
            front = Router(_asking(handle.options(stream=True), ray), settings.deadline_s)
            run_server(RequestLimits(front, settings, front.metrics), front, settings, sockets)
        finally:
            serve.delete(name)
