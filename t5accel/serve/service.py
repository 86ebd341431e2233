"""Texts in front of a scheduler: tokenization, handles and decoded results."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request

from t5accel.decoding.backend import Backend
from t5accel.decoding.streaming import IncrementalDetokenizer
from t5accel.decoding.token_constraints import NO_CONSTRAINTS
from t5accel.models.languages import Languages
from t5accel.serve.metrics import Metrics
from t5accel.serve.middleware import HTTPError, log
from t5accel.serve.request import GenerationResult, RequestHandle
from t5accel.serve.scheduler import Scheduler
from t5accel.serve.schemas import Generate, seed_of
from t5accel.serve.settings import Settings
from t5accel.serve.stops import StopStrings, TextStream
from t5accel.tokenization import before_end

CHARACTERS = 32  # of a text, for each token that a source may have; more are not tokenised
SMALL = 1000  # characters or tokens that take less than a millisecond, whatever they are
EVENTS_S = 0.02  # of one stream: tokens that come sooner after each other are one event


class Service:
    """A scheduler, and texts in place of tokens.

    Args:
        backend, tokenizer: as of `api.open_backend`.
        settings: all limits.
    """

    def __init__(self, backend: Backend, tokenizer: Any, settings: Settings):
        self.settings, self.tokenizer, self.metrics = settings, tokenizer, Metrics()
        self.backend, self.rules, self.languages = (
            backend,
            getattr(backend, "rules", NO_CONSTRAINTS),
            Languages(tokenizer),
        )
        self.ends = self.rules.eos_tokens(backend.eos_token_id)
        self.started_s = int(time.time())
        self.scheduler = Scheduler(backend, settings.limits, observe=self.metrics.observe, notify=self._notify)
        self.metrics.watch(self.scheduler)
        self.loop: asyncio.AbstractEventLoop | None = None
        self._worker = ThreadPoolExecutor(1, "t5accel-tokenizer")  # one: not every tokenizer bears two threads

    def _notify(self, tickets: Sequence[RequestHandle]) -> None:
        """From the engine's thread to the one that serves, which is woken for a stream's end, or not too often."""
        now = time.monotonic()
        if due := [ticket for ticket in tickets if ticket.is_done or now >= ticket.next_event_at]:
            for ticket in due:
                ticket.next_event_at = now + EVENTS_S
            self.loop.call_soon_threadsafe(lambda: [ticket.listener() for ticket in due if ticket.listener])

    async def submit(self, asked: Generate) -> list[RequestHandle]:
        """A ticket for each text. What can be refused is refused before any text is tokenised."""
        texts = [asked.text] if isinstance(asked.text, str) else asked.text
        if not 1 <= len(texts) <= self.settings.max_texts:
            raise HTTPError(
                422, f"The request holds {len(texts)} texts; give 1 to {self.settings.max_texts}.", param="text"
            )
        prefix = self.settings.prefix if asked.prefix is None else asked.prefix
        texts = [prefix + text for text in texts]
        stops, first = self.stops(asked), self.languages.target(self.backend, asked.tgt_lang, asked.forced_bos_token)
        language = None if asked.src_lang is None else self.languages.source(asked.src_lang)
        most = CHARACTERS * self.settings.max_source_tokens
        longest = max(map(len, texts))
        if longest > most and not asked.truncate:
            raise _too_long(f"A text has {longest} characters, and {most} are allowed")
        # With a source of one token, the shortest there is, anything else that is wrong shows.
        least = asked.job([0], seed_of(asked), self.settings.deadline_s, self.rules, stops)
        least = replace(least, **first) if first else least
        self.scheduler.require_place(least, len(texts))
        # One by one, so that other requests' texts come between those of a large one.
        sources = [
            await self.beside(self._tokens, text[:most], asked.truncate, language, size=min(longest, most) * len(texts))
            for text in texts
        ]
        jobs = [replace(least, input_ids=tokens) for tokens in sources]
        tickets = self.scheduler.submit_all(jobs)
        if self.settings.log_texts:
            log.info("requests %s: %s", [ticket.number for ticket in tickets], json.dumps(texts, ensure_ascii=False))
        return tickets

    async def beside(self, function: Callable[..., Any], *arguments: Any, size: int) -> Any:
        """What a function returns that may take long: beside the event loop, one after another.

        Args:
            function, arguments: what is called.
            size: characters or tokens of the request. For few of them another thread would cost more than the call.
        """
        if size <= SMALL:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)

    def _tokens(self, text: str, truncate: bool, language: int | None = None) -> list[int]:
        most, batch = self.settings.max_source_tokens, self.tokenizer([text], return_tensors="np", padding=True)
        ids, mask = batch["input_ids"], batch["attention_mask"]
        if language is not None:
            ids = self.languages.set_language(ids, mask, language)
        tokens = ids[0][mask[0] == 1].tolist()
        if len(tokens) <= most:
            return tokens
        if not truncate:
            raise _too_long(f"A source has {len(tokens)} tokens, and {most} are allowed")
        end = self.backend.eos_token_id
        closing = tokens[-2:] if tokens[-2] == end != tokens[-1] else [end]  # in mBART the language stands behind it
        return [*tokens[: max(most - len(closing), 0)], *closing]

    def close(self) -> None:
        """End its threads."""
        self.scheduler.close()
        self._worker.shutdown(wait=False, cancel_futures=True)

    def stops(self, asked: Generate) -> StopStrings | None:
        """The request's stop strings."""
        return StopStrings(asked.stops, partial(self._decoded, asked)) if asked.stops else None

    def _decoded(self, asked: Generate, rows: Sequence[Sequence[int]]) -> list[str]:
        if not asked.skip_special_tokens:
            rows = [before_end(row, self.ends) for row in rows]
        return self.tokenizer.batch_decode(rows, skip_special_tokens=asked.skip_special_tokens)

    async def texts(self, answers: Sequence[GenerationResult], asked: Generate) -> list[str]:
        """Decoded, up to the first stop string."""
        tokens, stops = [answer.tokens for answer in answers], self.stops(asked)
        found = await self.beside(self._decoded, asked, tokens, size=sum(map(len, tokens)))
        if stops is not None:
            found = [stops.cut(text) for text in found]
        if self.settings.log_texts:
            log.info("answers: %s", json.dumps(found, ensure_ascii=False))
        return found

    async def answered(self, tickets: Sequence[RequestHandle], request: Request) -> None:
        """Until all are done, or one has failed, or the client has gone; then the others' rows are free, too."""
        news, gone = asyncio.Event(), asyncio.create_task(_disconnect(request))
        gone.add_done_callback(lambda _: news.set())
        for ticket in tickets:
            ticket.listener = news.set
        try:
            while not all(ticket.is_done for ticket in tickets):
                await news.wait()
                news.clear()
                if gone.done() and not all(ticket.is_done for ticket in tickets):
                    raise ConnectionResetError
                for ticket in tickets:
                    if ticket.error is not None:
                        raise ticket.error
        finally:
            gone.cancel()
            for ticket in tickets:
                ticket.cancel()
        for ticket in tickets:
            ticket.result(0)

    async def pieces(self, tickets: Sequence[RequestHandle], asked: Generate) -> AsyncIterator[tuple[int, str, bool]]:
        """The texts of tickets as they come: which one's, new text, and whether that was the last of it.

        The text is empty where a ticket has its first token and no whole word yet. Raises the error of the first ticket
        that fails; at the end of the iteration all are cancelled.
        """
        shown = dict(skip_special_tokens=asked.skip_special_tokens, ends=self.ends)
        open_ones = [
            TextStream(*numbered, IncrementalDetokenizer(self.tokenizer, **shown)) for numbered in enumerate(tickets)
        ]
        news = asyncio.Event()
        for ticket in tickets:
            ticket.listener = news.set
        try:
            while open_ones:
                for one in open_ones:
                    if (piece := one.piece()) is not None:
                        yield one.index, piece, one.is_done
                open_ones = [one for one in open_ones if not one.is_done]
                if open_ones:
                    await news.wait()
                    news.clear()
        finally:
            for ticket in tickets:
                ticket.cancel()


def _too_long(what: str) -> HTTPError:
    what += ": shorten it, or ask for truncate."
    return HTTPError(413, what, param="text", code="context_length_exceeded")


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def timings(ticket: RequestHandle) -> dict[str, float | None]:
    """Seconds since it was submitted.

    >>> from t5accel.serve.request import GenerationRequest
    >>> request = GenerationRequest([5, 1])
    >>> timings(RequestHandle(request, 1, submitted_s=1.0, joined_s=1.5, first_token_s=1.75, done_s=3.0))
    {'queue_s': 0.5, 'first_token_s': 0.75, 'total_s': 2.0}
    """
    moments = {"queue_s": ticket.joined_s, "first_token_s": ticket.first_token_s, "total_s": ticket.done_s}
    return {name: None if at is None else round(at - ticket.submitted_s, 6) for name, at in moments.items()}
