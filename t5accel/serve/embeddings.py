"""A server of embeddings: texts of similar length are computed together."""

# The queue is the event loop's own, so it needs no lock; one thread beside it computes one batch after the other.

from __future__ import annotations

import asyncio
import base64
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, Field

from t5accel.encoder import AcceleratedEncoder
from t5accel.errors import EngineError, InputError, QueueFullError, ShuttingDownError
from t5accel.serve.app import add_get_routes, empty_app, post, require_model
from t5accel.serve.limits import require_place
from t5accel.serve.middleware import HTTPError
from t5accel.serve.monitoring import log
from t5accel.serve.request import padded
from t5accel.serve.scheduler import engine_error
from t5accel.serve.schemas import Asked, unsupported
from t5accel.serve.service import TextService, too_long, unless_disconnected
from t5accel.serve.settings import Settings
from t5accel.tokenization import tokenize

SIMILAR = 2  # times that the longest text of a batch may be as long as the shortest
SHORT = 16  # tokens: shorter texts count as so long


class Embeddings(Asked):
    """Embed one or several texts, for OpenAI's clients."""

    model: str
    input: str | list[str] = Field(description="One text, or a list of them.")
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="A list of numbers, or the bytes of float32, little-endian, in base64."
    )
    dimensions: int | None = Field(None, description="Only the number that the model has.")
    user: str | None = Field(None, description="Ignored.")
    deadline_s: float | None = Field(
        None, gt=0, lt=1e9, description="Not one of OpenAI's. Seconds within which all must be done, else status 504."
    )


class Embedding(BaseModel):
    """The embedding of one text."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="In the asked encoding_format.")


class EmbeddingsUsage(BaseModel):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    """The response of /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


class EmbeddingService(TextService):
    """Embeds the texts of waiting requests in batches; each result is that of the text alone, but for last bits.

    ``InputError``: the model has no tokenizer, or modules behind the encoder that are not applied here.
    """

    # What the routes, the metrics and the process ask of a scheduler.
    static_reason = "batches of texts of similar length"
    is_open = is_alive = True
    encoded = reused = failures = 0

    def __init__(self, encoder: AcceleratedEncoder, settings: Settings):
        encoder.embed([], pooling=settings.pooling)  # raises what it would raise of any text
        super().__init__(encoder.tokenizer, settings)
        self.encoder, self.scheduler = encoder, self
        limits = (settings.max_source_tokens, encoder.max_source_tokens)
        self._most = min(limit for limit in limits if limit is not None)
        self._queue: dict[asyncio.Future[np.ndarray], np.ndarray] = {}  # tokens (S,) of each text, the oldest first
        self._batch: dict[asyncio.Future[np.ndarray], np.ndarray] = {}
        self._engine = ThreadPoolExecutor(1, "t5accel-engine")
        self._work: asyncio.Task[None] | None = None
        self._began_s, self._texts_per_s = 0.0, math.inf
        self.metrics.watch(self)

    waiting = property(lambda self: len(self._queue))
    rows = running = property(lambda self: len(self._batch))

    def busy_s(self) -> float:
        return time.monotonic() - self._began_s if self.running else 0.0

    def drain(self, grace_s: float) -> None:
        self.is_open = False
        if self.loop:
            self.loop.call_soon_threadsafe(self.loop.call_later, grace_s, self._fail_all)

    def close(self) -> None:
        self.drain(0)
        self._engine.shutdown()
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def embed(self, asked: Embeddings, request: Request) -> tuple[list[np.ndarray], int]:
        """The embeddings (d_model,) of the texts, and the number of their tokens."""
        texts = self.texts_with(self.settings.prefix, asked.input, "input", self._most)
        self._require_place(len(texts))
        futures: dict[asyncio.Future[np.ndarray], np.ndarray] = {}
        started = time.monotonic()

        async def all_done() -> list[np.ndarray]:
            size = max(map(len, texts)) * len(texts)
            sources = [await self.in_worker(self._tokens, text, size=size) for text in texts]
            self._require_place(len(texts))
            if self.settings.log_texts:
                log.info("texts: %s", json.dumps(texts, ensure_ascii=False))
            futures.update((self.loop.create_future(), tokens) for tokens in sources)
            self._queue |= futures
            if self._work is None or self._work.done():
                self._work = self.loop.create_task(self._serve())
            return await asyncio.gather(*futures)

        deadline_s = self.settings.deadline_s if asked.deadline_s is None else asked.deadline_s
        try:
            vectors = await unless_disconnected(all_done(), request.receive, deadline_s)
        except Exception as error:
            if not isinstance(error, HTTPError | InputError | QueueFullError | ShuttingDownError):  # refusals
                self.metrics.observe(type(error).__name__, 1)
            raise
        finally:
            for future in futures:  # after a failure or a disconnect the others are not computed
                future.cancel()
                self._queue.pop(future, None)
        self.metrics.observe("total_s", time.monotonic() - started)
        self.metrics.observe("finished", 1)
        return vectors, sum(map(len, futures.values()))

    def _require_place(self, texts: int) -> None:
        if not self.is_open:
            raise ShuttingDownError("The server is shutting down and takes no more requests.")
        require_place("texts", self.waiting, texts, self.settings.max_queue, self.waiting / self._texts_per_s)

    def _tokens(self, text: str) -> np.ndarray:
        ids, mask = tokenize(self.tokenizer, [text])
        if (length := int(mask.sum())) > self._most:
            raise too_long(f"A text must have at most {self._most} tokens, got {length}", "input")
        ids, mask = self.encoder.checked(ids, mask)
        return ids[mask == 1]

    async def _serve(self) -> None:
        while self._queue:
            self._batch = self._choose()
            self._began_s = time.monotonic()
            found = await self.loop.run_in_executor(self._engine, self._compute, [*self._batch.values()])
            self._texts_per_s = self.running / max(time.monotonic() - self._began_s, 1e-6)
            for future, vector in zip(self._batch, found, strict=True):
                if not future.done():
                    (future.set_exception if isinstance(vector, EngineError) else future.set_result)(vector)
            self._batch = {}

    def _choose(self) -> dict[asyncio.Future[np.ndarray], np.ndarray]:
        # The oldest text goes first, so that none waits for ever; beside it those that are padded little.
        first = shortest = longest = len(next(iter(self._queue.values())))
        chosen: dict[asyncio.Future[np.ndarray], np.ndarray] = {}
        for future, tokens in sorted(self._queue.items(), key=lambda entry: abs(len(entry[1]) - first)):
            shortest, longest = min(shortest, len(tokens)), max(longest, len(tokens))
            too_many = (len(chosen) + 1) * longest > self.settings.batch_tokens
            if chosen and (too_many or longest > SIMILAR * max(shortest, SHORT)):
                break
            chosen[future] = self._queue.pop(future)
        return chosen

    def _compute(self, sources: list[np.ndarray]) -> list[np.ndarray | EngineError]:
        options = dict(pooling=self.settings.pooling, normalize=self.settings.normalize)
        try:
            vectors = self.encoder.embed_ids(*padded(sources, self.encoder.pad_token_id), **options)
        except BaseException as error:  # a panic of a native library is no Exception
            self.failures += 1
            if len(sources) > 1:  # perhaps one of them is to blame
                return [one for source in sources for one in self._compute([source])]
            return [engine_error(error)]
        self.encoded += len(sources)
        self.metrics.observe("tokens", sum(map(len, sources)))
        endless = EngineError("The embedding is not finite: serve the model in fp32 or bf16.")
        return [vector if np.isfinite(vector).all() else endless for vector in vectors]

    def _fail_all(self) -> None:
        for future in [*self._queue, *self._batch]:
            if not future.done():
                future.set_exception(ShuttingDownError("The server was shut down before this request was done."))


def make_app(encoder: AcceleratedEncoder, settings: Settings) -> FastAPI:
    """The application around an encoder; its lifespan ends the engine's thread.

    >>> app = make_app(AcceleratedEncoder.from_pretrained("mini", progress=False), Settings(task="embed"))
    >>> sorted(path for path in app.openapi()["paths"] if path.startswith("/v1"))
    ['/v1/embeddings', '/v1/models', '/v1/models/{name}']
    >>> app.state.service.close()
    """
    service, name, width = EmbeddingService(encoder, settings), settings.public_name, encoder.dims.d_model
    app = empty_app(service)

    @post(app, "/v1/embeddings", Embeddings, EmbeddingsResponse)
    async def embeddings(asked: Embeddings, request: Request) -> Response:
        require_model(asked.model, name)
        if asked.dimensions not in (None, width):
            message = f"dimensions must be {width} or null, got {asked.dimensions}. Leave it out."
            raise unsupported("dimensions", message)
        vectors, tokens = await service.embed(asked, request)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}

        def body() -> bytes:
            if asked.encoding_format == "base64":
                given = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
            else:
                given = [vector.tolist() for vector in vectors]
            data = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(given)]
            return json.dumps({"object": "list", "data": data, "model": name, "usage": usage}).encode()

        return Response(await service.in_worker(body, size=width * len(vectors)), media_type="application/json")

    add_get_routes(app)
    return app
