"""The HTTP application: routes in front of a scheduler."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from t5accel.decoding.backend import Backend
from t5accel.errors import EngineError, T5AccelError
from t5accel.serve import schemas
from t5accel.serve.middleware import HTTPError, RequestLimits, ValidationError, error_response
from t5accel.serve.monitoring import TEXT_FORMAT, log
from t5accel.serve.request import RequestHandle
from t5accel.serve.running_batch import ENDS
from t5accel.serve.schemas import Completion, Generate
from t5accel.serve.service import Service, TextService, unless_disconnected
from t5accel.serve.settings import Settings

VERSION = getattr(sys.modules["t5accel"], "__version__", "unknown")  # not imported: the package stands above
DONE = "data: [DONE]\n\n"
CLOSED = "default-src 'none'; style-src 'unsafe-inline'"  # a page that fetches nothing
ABOUT = "Send JSON as Content-Type: application/json and, where the server has a key, Authorization: Bearer KEY."
LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}  # some clients divide events at these, too
BYTES = 64  # of a body, that are parsed in the time of one character tokenised


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False).translate(LINE_ENDS)}\n\n"


def _timings(handle: RequestHandle) -> dict[str, float | None]:
    moments = {"queue_s": handle.joined_s, "first_token_s": handle.first_token_s, "total_s": handle.done_s}
    return {name: None if at is None else round(at - handle.submitted_s, 6) for name, at in moments.items()}


def _refusal(error: BaseException, **options: Any) -> Response:
    """The response to an error; one that ends the process is raised."""
    if isinstance(error, (*ENDS, asyncio.CancelledError, GeneratorExit)):
        raise error
    if isinstance(error, ConnectionError) and not isinstance(error, T5AccelError):
        return Response(status_code=499)
    if isinstance(error, EngineError) or not isinstance(error, T5AccelError | HTTPError | ValidationError):
        # A line in the log without the error's message, which might hold a request's text.
        cause = error.__cause__ or error
        where = (traceback.extract_tb(cause.__traceback__) or [None])[-1]
        place = f"{where.filename}:{where.lineno}" if where else "an unknown place"
        whose = "the engine's" if isinstance(error, EngineError) else "unexpected"
        log.error("%s %s at %s", whose, type(cause).__name__, place)
    return error_response(error, **options)


async def _streamed(pieces: AsyncIterator[Any], events: Callable[[int, str, bool], str], request: Request) -> Response:
    """Server-sent events; a failure before the first has its own status, and a client may leave before it."""
    first = await unless_disconnected(anext(pieces), request.receive)  # else the pieces end, which cancels the handles

    async def body() -> AsyncIterator[str]:
        try:
            yield events(*first)
            async for piece in pieces:
                yield events(*piece)
        except BaseException as error:
            yield "event: error\ndata: " + _refusal(error).body.decode().translate(LINE_ENDS) + "\n\n"
        finally:
            await pieces.aclose()

    return StreamingResponse(body(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def empty_app(service: TextService) -> FastAPI:
    """An application with limits and without routes; its lifespan ends the engine's thread."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.loop = asyncio.get_running_loop()
        yield
        await asyncio.to_thread(service.close)

    # A redirect would go to whatever the Host header says. FastAPI's own pages fetch their scripts from other hosts.
    app = FastAPI(
        title="t5accel",
        version=VERSION,
        description=ABOUT,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.add_middleware(RequestLimits, settings=service.settings, metrics=service.metrics)
    return app


def post(
    app: FastAPI, path: str, schema: type[BaseModel], shape: type[BaseModel], event: type[BaseModel] | None = None
) -> Callable[..., Any]:
    """Add a route that reads ``schema``, and answers errors in OpenAI's shape."""
    service, content = app.state.service, {"application/json": {"schema": schemas.inlined(schema.model_json_schema())}}
    is_openai = path.startswith("/v1/")
    errors = (400, 404 if is_openai else 422, 408, 413, 415, 429, 500, 503, 504)

    def add(answer: Callable[[Any, Request], Awaitable[Response]]) -> None:
        async def route(request: Request) -> Response:
            try:
                body = await request.body()
                size = len(body) // BYTES
                return await answer(await service.in_worker(schema.model_validate_json, body, size=size), request)
            except BaseException as error:  # a panic of a tokenizer in Rust is no Exception
                return _refusal(error, fields=schema.model_fields, openai=is_openai)

        route.__name__, route.__doc__ = answer.__name__, schema.__doc__
        app.post(
            path,
            openapi_extra={"requestBody": {"content": content, "required": True}},
            response_model=None,
            responses=schemas.openapi_responses(shape, *errors, event=event),
        )(route)

    return add


def require_model(asked: str, name: str) -> None:
    """Raise ``HTTPError`` for any model but the one that is served."""
    if asked != name:
        message = f"There is no model {asked[:80]!r} here, but {name!r}."
        raise HTTPError(404, message, param="model", code="model_not_found")


def add_get_routes(app: FastAPI) -> None:
    """Add the routes that every server has, behind its own."""
    service = app.state.service
    scheduler, settings, name = service.scheduler, service.settings, service.settings.public_name
    model = {"id": name, "object": "model", "created": service.started_s, "owned_by": "t5accel"}

    get, responses = partial(app.get, response_model=None), schemas.openapi_responses

    @get("/v1/models", responses=responses(schemas.ModelList))
    async def models() -> Any:
        """List the model that is served."""
        return {"object": "list", "data": [model]}

    @get("/v1/models/{name:path}", responses=responses(schemas.ModelCard, 404, 422))
    async def one_model(name: str) -> Any:
        """Describe the model of this name."""
        if name == model["id"]:
            return model
        return error_response(HTTPError(404, "There is no such model.", code="model_not_found"))

    @get("/health/live", responses=responses(schemas.Alive, is_open=True))
    async def live() -> Response:
        """Whether the engine works; 503: restart the server."""
        alive = scheduler.is_alive and scheduler.busy_s() < settings.unhealthy_after_s
        return JSONResponse({"alive": alive}, 200 if alive else 503)

    @get("/health", responses=responses(schemas.Ready, is_open=True))
    @get("/health/ready", responses=responses(schemas.Ready, is_open=True))
    async def ready() -> Response:
        """Whether to send requests here, and the load; 503: not now."""
        is_ready = scheduler.is_open and scheduler.is_alive
        load = {
            "ready": is_ready,
            "waiting": scheduler.waiting,
            "running": scheduler.running,
            "rows": scheduler.rows,
            "continuous": not scheduler.static_reason,
        }
        return JSONResponse(load, 200 if is_ready else 503)

    @get("/", responses=responses(schemas.About))
    async def about() -> Any:
        """What this server is, and its routes."""
        return {"name": "t5accel", "version": VERSION, "model": name, "routes": routes()}

    @get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(schemas.page(app.openapi()), headers={"Content-Security-Policy": CLOSED})

    @app.exception_handler(HTTPException)
    async def unknown_route(request: Request, error: HTTPException) -> Response:
        found = HTTPError(error.status_code, f"{error.detail}. The routes are {', '.join(routes())}.")
        found.headers = dict(error.headers or {})
        return error_response(found)

    @get("/metrics", response_class=Response, responses=responses(None))
    async def metrics() -> Response:
        """The counters, for Prometheus."""
        return PlainTextResponse(service.metrics.text(), media_type=TEXT_FORMAT)

    def routes() -> list[str]:
        paths = app.openapi()["paths"].items()
        return [f"{method.upper()} {path}" for path, methods in paths for method in methods] + ["GET /docs"]


def make_app(backend: Backend, tokenizer: Any, settings: Settings) -> FastAPI:
    """The application around a backend; its lifespan ends the engine's thread.

    >>> from t5accel.api import open_backend
    >>> app = make_app(*open_backend("mini", progress=False)[:2], Settings())
    >>> sorted(path for path in app.openapi()["paths"] if path.startswith("/v1"))
    ['/v1/completions', '/v1/models', '/v1/models/{name}']
    >>> app.state.service.close()
    """
    service, name = Service(backend, tokenizer, settings), settings.public_name
    app = empty_app(service)

    @post(app, "/generate", Generate, schemas.GenerateResponse, schemas.GenerateEvent)
    async def generate(asked: Generate, request: Request) -> Response:
        handles = await service.submit(asked)
        if asked.stream:

            def events(index: int, piece: str, last: bool) -> str:
                event = {"index": index, "text": piece}
                if last:
                    handle = handles[index]
                    event |= {"tokens": len(handle.tokens), "ended": handle.answers[0].ended}
                    event["timings"] = _timings(handle)
                return _event(event)

            return await _streamed(service.pieces(handles, asked), events, request)
        await service.wait(handles, request)
        answers = [
            {
                "texts": await service.texts(handle.answers, asked),
                "scores": [None if answer.score == -math.inf else answer.score for answer in handle.answers],
                "tokens": [len(answer.tokens) for answer in handle.answers],
                "ended": [answer.ended for answer in handle.answers],
                "source_tokens": len(handle.request.input_ids),
                "encoder_reused": handle.reused,
                "timings": _timings(handle),
            }
            for handle in handles
        ]
        seed = handles[0].request.seed if asked.do_sample else None
        return JSONResponse({"model": name, "seed": seed, "answers": answers})

    @post(app, "/v1/completions", Completion, schemas.CompletionResponse, schemas.CompletionResponse)
    async def completions(asked: Completion, request: Request) -> Response:
        require_model(asked.model, name)
        wanted = asked.generate()
        handles = await service.submit(wanted, new_tokens=16)
        content: dict[str, Any] = {
            "id": f"cmpl-{service.started_s}-{handles[0].number}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": name,
        }

        def choice(index: int, text: str, ended: bool | None) -> dict[str, Any]:
            reason = None if ended is None else "stop" if ended else "length"
            return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

        def usage() -> dict[str, int]:
            given = sum(len(handle.request.input_ids) for handle in handles)
            written = sum(len(answer.tokens) for handle in handles for answer in handle.answers)
            return {"prompt_tokens": given, "completion_tokens": written, "total_tokens": given + written}

        if asked.stream:
            with_usage = asked.stream_options is not None and asked.stream_options.include_usage
            nulls = {"usage": None} if with_usage else {}
            streaming = len(handles)

            def events(index: int, piece: str, last: bool) -> str:
                nonlocal streaming
                ended = handles[index].answers[0].ended if last else None
                text = _event({**content, "choices": [choice(index, piece, ended)], **nulls})
                streaming -= last
                if not streaming:
                    text += _event({**content, "choices": [], "usage": usage()}) if with_usage else ""
                    text += DONE
                return text

            return await _streamed(service.pieces(handles, wanted), events, request)
        await service.wait(handles, request)
        answers = [answer for handle in handles for answer in handle.answers]
        both = zip(await service.texts(answers, wanted), answers, strict=True)
        choices = [choice(index, text, answer.ended) for index, (text, answer) in enumerate(both)]
        return JSONResponse({**content, "choices": choices, "usage": usage()})

    add_get_routes(app)
    return app
