"""Text requests in front of a scheduler."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request

from t5accel.decoding.backend import Backend
from t5accel.decoding.streaming import IncrementalDetokenizer
from t5accel.decoding.token_constraints import NO_CONSTRAINTS
from t5accel.errors import DeadlineError
from t5accel.models.prefixes import Languages
from t5accel.serve.limits import SchedulerLimits
from t5accel.serve.middleware import HTTPError
from t5accel.serve.monitoring import Metrics, log
from t5accel.serve.request import GenerationResult, RequestHandle
from t5accel.serve.scheduler import Scheduler
from t5accel.serve.schemas import Generate
from t5accel.serve.settings import Settings
from t5accel.tokenization import before_end

CHARACTERS = 32  # of a text, for each token that a source may have; more are not tokenised
SMALL = 1000  # characters or tokens that take less than a millisecond
EVENTS_S = 0.02  # of one stream: tokens that come sooner after each other are one event


class TextService:
    """What every service of texts has; a base class."""

    def __init__(self, tokenizer: Any, settings: Settings):
        self.settings, self.tokenizer, self.metrics = settings, tokenizer, Metrics()
        self.started_s = int(time.time())
        self.loop: asyncio.AbstractEventLoop | None = None
        self._worker = ThreadPoolExecutor(1, "t5accel-tokenizer")  # one: not every tokenizer bears two threads

    def texts_with(
        self, prefix: str, given: str | list[str], name: str, tokens: int, *, cut: bool = False
    ) -> list[str]:
        """The texts of the field ``name``, each with the prefix, up to the characters that so many tokens may have.

        ``HTTPError``: no text, too many, or one that is too long and may not be cut.
        """
        texts = [given] if isinstance(given, str) else given
        if not 1 <= len(texts) <= self.settings.max_texts:
            message = f"{name} must hold 1 to {self.settings.max_texts} texts, got {len(texts)} texts."
            raise HTTPError(422, message, param=name)
        most = CHARACTERS * tokens
        if not cut and (longest := len(prefix) + max(map(len, texts))) > most:
            raise too_long(f"A text must have at most {most} characters, got {longest}", name)
        prefix = prefix[:most]  # before it is copied for each text
        return [(prefix + text)[:most] for text in texts]

    async def in_worker(self, function: Callable[..., Any], *arguments: Any, size: int) -> Any:
        """Call a slow function outside the event loop; ``size`` counts characters or tokens."""
        if size <= SMALL:  # another thread would cost more than the call
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)


class Service(TextService):
    """A scheduler that takes and returns texts."""

    def __init__(self, backend: Backend, tokenizer: Any, settings: Settings):
        super().__init__(tokenizer, settings)
        self.backend, self.languages = backend, Languages(tokenizer)
        self.rules = getattr(backend, "rules", NO_CONSTRAINTS)
        self.ends = self.rules.eos_tokens(backend.eos_token_id)
        positions = getattr(backend, "positions", None) or math.inf
        self.limits = SchedulerLimits(
            rows=settings.max_batch_rows,
            key_value_bytes=None if settings.key_value_mb is None else settings.key_value_mb * 10**6,
            queue=settings.max_queue,
            queued_tokens=settings.max_queued_tokens,
            beams=settings.max_beams,
            source_tokens=min(settings.max_source_tokens, getattr(backend, "max_source_tokens", None) or positions),
            new_tokens=min(settings.max_new_tokens, positions),
            max_prefill_stall_s=settings.max_prefill_stall_ms / 1e3,
            prefill_share=settings.prefill_share,
            encoder_cache_bytes=settings.encoder_cache_mb * 10**6,
        )
        self.scheduler = Scheduler(backend, self.limits, observe=self.metrics.observe, notify=self._notify)
        self.metrics.watch(self.scheduler)

    def close(self) -> None:
        self.scheduler.close()
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _notify(self, handles: Sequence[RequestHandle]) -> None:
        # From the engine's thread to the event loop, which is woken for a stream's end, or not too often.
        now = time.monotonic()
        if due := [handle for handle in handles if handle.is_done or now >= handle.next_event_at]:
            for handle in due:
                handle.next_event_at = now + EVENTS_S
            self.loop.call_soon_threadsafe(lambda: [handle.listener() for handle in due if handle.listener])

    async def submit(self, asked: Generate, new_tokens: int = 64) -> list[RequestHandle]:
        """Return a handle for each text; refuse bad requests before tokenization."""
        arrived_s = time.monotonic()
        if asked.max_new_tokens is None:  # what server and model allow
            asked = asked.model_copy(update={"max_new_tokens": min(new_tokens, self.limits.new_tokens)})
        prefix = self.settings.prefix if asked.prefix is None else asked.prefix
        texts = self.texts_with(prefix, asked.text, "text", self.limits.source_tokens, cut=asked.truncate)
        stops = self._stops(asked)
        first = self.languages.target(self.backend, asked.tgt_lang, asked.forced_bos_token)
        language = None if asked.src_lang is None else self.languages.source(asked.src_lang)
        # With a source of one token, the shortest possible, all other mistakes show.
        least = asked.to_request([0], self.settings.deadline_s, self.rules, stops, **first)
        self.scheduler.require_place(least, len(texts))
        # One by one, so that other requests' texts come between those of a large one.
        size = max(map(len, texts)) * len(texts)
        sources = [await self.in_worker(self._tokens, text, asked.truncate, language, size=size) for text in texts]
        requests = [replace(least, input_ids=tokens, index=index) for index, tokens in enumerate(sources)]
        handles = self.scheduler.submit_all(requests, arrived_s)
        if self.settings.log_texts:
            log.info("requests %s: %s", [handle.number for handle in handles], json.dumps(texts, ensure_ascii=False))
        return handles

    def _tokens(self, text: str, truncate: bool, language: int | None = None) -> list[int]:
        most, batch = self.limits.source_tokens, self.tokenizer([text], return_tensors="np", padding=True)
        ids, mask = batch["input_ids"], batch["attention_mask"]
        if language is not None:
            ids = self.languages.set_language(ids, mask, language)
        tokens = ids[0][mask[0] == 1].tolist()
        if len(tokens) <= most:
            return tokens
        if not truncate:
            raise too_long(f"A source must have at most {most} tokens, got {len(tokens)}", "text")
        end = self.backend.eos_token_id
        closing = tokens[-2:] if tokens[-2] == end != tokens[-1] else [end]  # in mBART the language stands behind it
        return [*tokens[: max(most - len(closing), 0)], *closing]

    def _stops(self, asked: Generate) -> StopStrings | None:
        return StopStrings(asked.stops, partial(self._decoded, asked)) if asked.stops else None

    def _decoded(self, asked: Generate, rows: Sequence[Sequence[int]]) -> list[str]:
        if not asked.skip_special_tokens:
            rows = [before_end(row, self.ends) for row in rows]
        return self.tokenizer.batch_decode(rows, skip_special_tokens=asked.skip_special_tokens)

    async def texts(self, answers: Sequence[GenerationResult], asked: Generate) -> list[str]:
        """Decode results, up to the first stop string."""
        tokens, stops = [answer.tokens for answer in answers], self._stops(asked)
        found = await self.in_worker(self._decoded, asked, tokens, size=sum(map(len, tokens)))
        if stops is not None:
            found = [stops.cut(text) for text in found]
        if self.settings.log_texts:
            log.info("answers: %s", json.dumps(found, ensure_ascii=False))
        return found

    async def wait(self, handles: Sequence[RequestHandle], request: Request) -> None:
        """Wait until all are done, one fails, or the client disconnects."""
        news = _news_of(handles)

        async def all_done() -> None:
            while len([handle.result(0) for handle in handles if handle.is_done]) < len(handles):  # or raises an error
                await news.wait()
                news.clear()

        try:
            await unless_disconnected(all_done(), request.receive)
        finally:
            for handle in handles:  # after a failure or a disconnect the others' rows are free, too
                handle.cancel()

    async def pieces(self, handles: Sequence[RequestHandle], asked: Generate) -> AsyncIterator[tuple[int, str, bool]]:
        """Yield index, new text and whether it is the last, per handle.

        The text is empty where a handle has its first token and no whole word yet. Raises the error of the first handle
        that fails; at the end of the iteration all are cancelled.
        """
        options = dict(skip_special_tokens=asked.skip_special_tokens, ends=self.ends)
        streams = {
            index: TextStream(handle, IncrementalDetokenizer(self.tokenizer, **options))
            for index, handle in enumerate(handles)
        }
        news = _news_of(handles)
        try:
            while streams:
                for index, stream in [*streams.items()]:
                    if (piece := stream.piece()) is not None:
                        yield index, piece, stream.is_done
                    if stream.is_done:
                        del streams[index]
                        if self.settings.log_texts:
                            await self.texts(handles[index].answers, asked)
                if streams:
                    await news.wait()
                    news.clear()
        finally:
            for handle in handles:
                handle.cancel()


def _news_of(handles: Sequence[RequestHandle]) -> asyncio.Event:
    news = asyncio.Event()
    for handle in handles:
        handle.listener = news.set
    return news


def too_long(what: str, name: str) -> HTTPError:
    """The refusal of a text of the field ``name``."""
    return HTTPError(413, f"{what}: shorten or split it.", param=name, code="context_length_exceeded")


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(work: Awaitable[Any], receive: Any, deadline_s: float | None = None) -> Any:
    """The result of ``work``; ``ConnectionResetError``: the client left before; ``DeadlineError``: it took too long."""
    doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait([doing, gone], timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ConnectionResetError if gone.done() else DeadlineError(f"Not done within its {deadline_s:g} s.")
        return doing.result()
    finally:
        doing.cancel()
        gone.cancel()


class StopStrings:
    """Stopping criterion of several non-empty texts, over a decoder of rows.

    >>> letters = StopStrings(["; "], lambda rows: ["".join(map(chr, row)) for row in rows])
    >>> letters([*b"one;"]), letters([*b"one; "]), letters.cut("one; two"), letters.held("one;")
    (False, True, 'one', 1)
    """

    def __init__(self, texts: Sequence[str], decode: Callable[[Sequence[Sequence[int]]], list[str]]):
        self._texts, self._decode = tuple(texts), decode
        # A token is a byte at least, but for spaces that decoding tidies away, and special tokens.
        # The last ones decide: the criterion is asked after each token.
        self._longest = 8 + 2 * max(len(text.encode()) for text in texts)

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Whether tokens hold a stop string; asked after each token."""
        return self._holds(tokens[-self._longest :]) and (len(tokens) <= self._longest or self._holds(tokens))

    def _holds(self, tokens: Sequence[int]) -> bool:
        (found,) = self._decode([tokens])
        return any(text in found for text in self._texts)

    def cut(self, found: str) -> str:
        return found[: min((at for text in self._texts if (at := found.find(text)) >= 0), default=len(found))]

    def held(self, found: str) -> int:
        """How many last characters of a text may begin a stop string."""
        most = min(len(found), max(map(len, self._texts)) - 1)
        ends = (found[-size:] for size in range(most, 0, -1))
        return next((len(end) for end in ends if any(text.startswith(end) for text in self._texts)), 0)


class TextStream:
    """The text of a streaming request, up to a possible stop string."""

    def __init__(self, handle: RequestHandle, pieces: IncrementalDetokenizer):
        self._handle, self._sent, self._text = handle, 0, pieces
        self._stops, self._kept = handle.request.stopping_criterion, ""
        self.is_done = self._has_stopped = False

    def piece(self) -> str | None:
        """The new text, if there is any, without an end that may begin a stop string."""
        done, new = self._handle.is_done, self._handle.tokens[self._sent :]  # in this order
        is_first = bool(new) and not self._sent
        self._sent += len(new)
        piece = self._text.add(new)
        if done:
            self._handle.result(0)
            self.is_done = True
            piece += self._text.flush()
        if self._stops is not None:
            piece = self._before_stops(piece)
        return piece if piece or done or is_first else None

    def _before_stops(self, piece: str) -> str:
        if self._has_stopped:
            return ""
        whole = self._kept + piece
        text = self._stops.cut(whole)
        self._has_stopped = text != whole
        certain = len(text) - (0 if self.is_done or self._has_stopped else self._stops.held(text))
        self._kept = text[certain:]
        return text[:certain]
