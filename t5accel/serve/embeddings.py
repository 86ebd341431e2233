"""A server of embeddings: texts of similar length are computed together."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from fastapi import FastAPI, Request, Response

from t5accel.checks import check_vocabulary
from t5accel.encoder import AcceleratedEncoder
from t5accel.errors import EngineError
from t5accel.serve import schemas
from t5accel.serve.app import add_get_routes, empty_app, post, require_model
from t5accel.serve.batch.generate import padded
from t5accel.serve.limits import SchedulerLimits
from t5accel.serve.middleware import HTTPError
from t5accel.serve.monitoring import log
from t5accel.serve.request import RequestHandle
from t5accel.serve.request_queue import ENDS, Observe, RequestQueue, engine_error
from t5accel.serve.service import CHARACTERS, TextService
from t5accel.serve.settings import Settings
from t5accel.tokenization import tokenize

SIMILAR = 2.0  # times that the longest text of a batch may be as long as the shortest
SHORT = 16  # tokens: shorter texts count as so long


@dataclass(frozen=True)
class EmbeddingRequest:
    """One text's tokens."""

    input_ids: np.ndarray  # (S,) without padding
    deadline_s: float | None = None

    @property
    def most_tokens(self) -> int:
        """The work."""
        return len(self.input_ids)


class EmbeddingScheduler(RequestQueue):
    """Embeds texts from any thread on one encoder; results are those of each text alone, but for last bits.

    ``observe``, ``notify`` and ``thread`` are those of `scheduler.Scheduler`.

    >>> encoder = AcceleratedEncoder.from_pretrained("mini", progress=False)
    >>> with EmbeddingScheduler(encoder, Settings()) as scheduler:
    ...     (handle,) = scheduler.submit_all([EmbeddingRequest(np.array([5, 1]))])
    ...     handle.result()[0].shape
    (256,)
    """

    static_reason = "batches of texts of similar length"

    def __init__(
        self,
        encoder: AcceleratedEncoder,
        settings: Settings,
        *,
        observe: Observe = lambda name, value: None,
        notify: Callable[[Sequence[RequestHandle]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        thread: bool = True,
    ):
        queued_tokens = settings.max_queued_tokens or settings.max_queue * settings.max_source_tokens
        limits = SchedulerLimits(queue=settings.max_queue, queued_tokens=queued_tokens)
        super().__init__(encoder, limits, observe, notify, clock)
        self._batch_tokens = settings.batch_tokens
        self._embed = partial(encoder.embed_ids, pooling=settings.pooling, normalize=settings.normalize)
        if thread:
            self._start()

    def require_place(self, texts: int, tokens: int) -> None:
        """Raise as `submit_all` does for so many texts of so many tokens together."""
        self._require_place(texts, tokens)

    def submit_all(self, requests: Sequence[EmbeddingRequest]) -> list[RequestHandle]:
        """Queue all requests or none.

        ``InputError``: all together exceed the queue. ``QueueFullError`` says when to retry. ``ShuttingDownError``: no
        more requests are accepted.
        """
        with self._changed:
            self._require_place(len(requests), sum(request.most_tokens for request in requests))
            handles = [self._handle(request) for request in requests]
            self._queue += [((handle.submitted_s, handle.number), handle) for handle in handles]
            self._changed.notify_all()
        return handles

    def _advance(self) -> None:
        chosen, now = self._choose(), self._clock()
        self._running = dict.fromkeys(chosen)
        for handle in chosen:
            handle.joined_s = now
            self._observe("queue_s", now - handle.submitted_s)
        if chosen:
            self._compute(chosen)

    def _choose(self) -> list[RequestHandle]:
        # The oldest text goes first, so that none waits for ever; beside it those that are padded little.
        chosen: list[RequestHandle] = []
        with self._changed:
            lengths = {handle: len(handle.request.input_ids) for _, handle in self._queue}
            first = next(iter(lengths.values()), 0)
            shortest = longest = first
            for handle in sorted(lengths, key=lambda handle: abs(lengths[handle] - first)):
                shortest, longest = min(shortest, lengths[handle]), max(longest, lengths[handle])
                is_padded = longest > SIMILAR * max(shortest, SHORT)
                if chosen and (is_padded or (len(chosen) + 1) * longest > self._batch_tokens):
                    break
                chosen.append(handle)
                del lengths[handle]
            self._queue = [entry for entry in self._queue if entry[1] in lengths]
        return chosen

    def _compute(self, handles: list[RequestHandle]) -> None:
        sources = [handle.request.input_ids for handle in handles]
        try:
            vectors = self._embed(*padded(sources, self.backend.pad_token_id))
        except ENDS:
            raise
        except BaseException as error:
            self.failures += 1
            if len(handles) == 1:
                self._fail(handles[0], engine_error(error))
                return
            for handle in handles:  # perhaps one of them is to blame
                self._compute([handle])
            return
        now = self._clock()
        self.encoded += len(handles)
        self._observe("tokens", sum(map(len, sources)))
        for handle, vector in zip(handles, vectors, strict=True):
            if np.isfinite(vector).all():
                self._finish(handle, now, [vector])
            else:
                self.failures += 1
                self._fail(handle, EngineError("The embedding is not finite: serve the model in fp32 or bf16."))


class EmbeddingService(TextService):
    """A scheduler that takes texts.

    ``InputError``: the model has no tokenizer, or modules behind the encoder that are not applied here.
    """

    def __init__(self, encoder: AcceleratedEncoder, settings: Settings):
        encoder.embed([], pooling=settings.pooling)  # raises what it would raise of any text
        super().__init__(encoder.tokenizer, settings, partial(EmbeddingScheduler, encoder, settings))
        self.encoder = encoder
        limits = (settings.max_source_tokens, encoder.max_source_tokens)
        self._most = min(limit for limit in limits if limit is not None)

    async def submit(self, asked: schemas.Embeddings) -> list[RequestHandle]:
        """Return a handle for each text; refuse bad requests before tokenization."""
        texts = self.checked_texts(asked.input, None, "input")
        most, longest = CHARACTERS * self._most, max(map(len, texts))
        if longest > most:
            raise _too_long(f"A text has {longest} characters, and {most} are allowed")
        self.scheduler.require_place(len(texts), len(texts))
        size = longest * len(texts)
        sources = [await self.in_worker(self._tokens, text, size=size) for text in texts]
        deadline_s = self.settings.deadline_s if asked.deadline_s is None else asked.deadline_s
        handles = self.scheduler.submit_all([EmbeddingRequest(tokens, deadline_s) for tokens in sources])
        if self.settings.log_texts:
            log.info("requests %s: %s", [handle.number for handle in handles], json.dumps(texts, ensure_ascii=False))
        return handles

    def _tokens(self, text: str) -> np.ndarray:
        ids, mask = tokenize(self.tokenizer, [text])
        tokens = ids[mask == 1]
        if len(tokens) > self._most:
            raise _too_long(f"A text has {len(tokens)} tokens, and {self._most} are allowed")
        if not len(tokens):
            raise HTTPError(422, "input must hold texts of which the tokenizer makes tokens.", param="input")
        check_vocabulary(tokens, self.encoder.source_vocab_size)
        return tokens


def _too_long(what: str) -> HTTPError:
    return HTTPError(413, f"{what}: shorten or split it.", param="input", code="context_length_exceeded")


def make_app(encoder: AcceleratedEncoder, settings: Settings) -> FastAPI:
    """The application around an encoder; its lifespan ends the engine's thread.

    >>> app = make_app(AcceleratedEncoder.from_pretrained("mini", progress=False), Settings())
    >>> sorted(path for path in app.openapi()["paths"] if path.startswith("/v1"))
    ['/v1/embeddings', '/v1/models', '/v1/models/{name}']
    >>> app.state.service.close()
    """
    service, name, width = EmbeddingService(encoder, settings), settings.public_name, encoder.dims.d_model
    app = empty_app(service)

    def body_of(handles: Sequence[RequestHandle], encoding_format: str) -> bytes:
        given = [handle.answers[0].astype("<f4", copy=False) for handle in handles]
        if encoding_format == "base64":
            vectors = [base64.b64encode(vector.tobytes()).decode() for vector in given]
        else:
            vectors = [vector.tolist() for vector in given]
        tokens = sum(len(handle.request.input_ids) for handle in handles)
        data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return json.dumps({"object": "list", "data": data, "model": name, "usage": usage}).encode()

    @post(app, "/v1/embeddings", schemas.Embeddings, schemas.EmbeddingsResponse)
    async def embeddings(asked: schemas.Embeddings, request: Request) -> Response:
        require_model(asked.model, name)
        if asked.dimensions not in (None, width):
            message = f"dimensions must be {width} or null, got {asked.dimensions}. Leave it out."
            raise schemas.unsupported("dimensions", message)
        handles = await service.submit(asked)
        await service.wait(handles, request)
        body = await service.in_worker(body_of, handles, asked.encoding_format, size=width * len(handles))
        return Response(body, media_type="application/json")

    add_get_routes(app)
    return app
