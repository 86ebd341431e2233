"""Batched generation from texts sorted by length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from t5accel.backends.model_defaults import by_defaults
from t5accel.checks import as_count
from t5accel.decoding.backend import Backend
from t5accel.decoding.request import check_positions
from t5accel.decoding.token_constraints import NO_CONSTRAINTS, is_eos
from t5accel.errors import InputError, JobError, T5AccelError, first_line
from t5accel.models.prefixes import Languages
from t5accel.serve.batch.formats import RejectedRow
from t5accel.serve.batch.output import RESUME
from t5accel.serve.request import padded
from t5accel.tokenization import decode, tokenize

CHARACTERS = 100_000  # of the texts that are tokenised together, padding counted
PER_TOKEN = 1000  # characters of a text, for each token that it may have; more are not tokenised


@dataclass(frozen=True)
class GeneratedText:
    """A generated text, and its tokens with the end token."""

    text: str
    tokens: int


def batches(lengths: Sequence[int], most_tokens: int) -> Iterator[list[int]]:
    """Group indices into batches of at most ``most_tokens`` padded tokens."""
    # As fairseq's --max-tokens; a longer text goes alone.
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    first = 0  # the longest texts come first: memory runs out at the beginning or never
    while first < len(order):
        rows = max(1, most_tokens // max(1, lengths[order[first]]))
        yield order[first : first + rows]
        first += rows


class BatchGenerator:
    """Generates answers to texts by the model's ``generation_config``; see `model_defaults.by_defaults`.

    The same input always makes the same batches, and so the same answers, unless the model samples. Texts longer than
    ``max_source_tokens`` are rejected; ``batch_tokens`` counts padded source tokens times the beams. ``InputError``:
    there is no tokenizer, a language or token is unknown, or a bound is wrong.

    >>> from t5accel.api import open_backend
    >>> answer = BatchGenerator(*open_backend("mini", progress=False)[:2], max_source_tokens=10)
    >>> answer(["translate English to French: I am tired.", "translate English to French: " + "very " * 9 + "tired."])
    [GeneratedText(text='Je suis fatigué.', tokens=5), RejectedRow(reason='17 tokens, and at most 10 are allowed')]
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Any,
        *,
        beams: int | None = None,
        max_new_tokens: int = 64,
        max_source_tokens: int | None = None,
        batch_tokens: int = 4096,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        forced_bos_token: str | None = None,
        skip_special_tokens: bool = True,
    ):
        if tokenizer is None:
            raise InputError("This model has no tokenizer (random weights have none): a batch job reads texts.")
        self.backend, self.tokenizer = backend, tokenizer
        self._rules = getattr(backend, "rules", NO_CONSTRAINTS)
        self.beams = self._rules.num_beams if beams is None else as_count(beams, "beams", at_least=1)
        self.draws = beams is None and any(one.startswith("do_sample=") for one in self._rules.unsupported)
        self.max_new_tokens = as_count(max_new_tokens, "max_new_tokens", at_least=1)
        self.batch_tokens = as_count(batch_tokens, "batch_tokens", at_least=1)
        check_positions(backend, self.max_new_tokens)
        self._languages, self._skips = Languages(tokenizer), skip_special_tokens
        self._language = None if src_lang is None else self._languages.source(src_lang)
        first = self._languages.target(backend, tgt_lang, forced_bos_token)
        self._search = by_defaults(backend, max_new_tokens=self.max_new_tokens, num_beams=beams, **first)
        limits = [getattr(backend, "max_source_tokens", None)]
        if max_source_tokens is not None:
            limits.append(as_count(max_source_tokens, "max_source_tokens", at_least=1))
        self.max_source_tokens = min((limit for limit in limits if limit is not None), default=None)
        self.entries = getattr(backend, "source_vocab_size", backend.vocab_size)

    def __call__(
        self, texts: Sequence[str], on_batch: Callable[[int, int], Any] | None = None
    ) -> list[GeneratedText | RejectedRow]:
        """Return an answer or a rejection for each text.

        ``on_batch`` gets the answered texts and new tokens of each batch. ``JobError``: the model fails on any text.
        """
        found: list[GeneratedText | RejectedRow | None] = [None] * len(texts)
        sources: list[tuple[int, np.ndarray]] = []
        for place, ids in self._tokenised(texts):
            if isinstance(ids, RejectedRow):
                found[place] = ids
            elif not len(ids):
                found[place] = RejectedRow("a text of which the tokenizer makes no token")
            elif self.max_source_tokens is not None and len(ids) > self.max_source_tokens:
                found[place] = RejectedRow(f"{len(ids)} tokens, and at most {self.max_source_tokens} are allowed")
            elif ids.max() >= self.entries:
                found[place] = RejectedRow(f"token {ids.max()}, for which the model has no entry")
            else:
                sources.append((place, ids))
        sources.sort(key=lambda source: source[0])  # texts of one length go together as they stand in the file
        for chosen, tokens in self.tokens([ids for _, ids in sources]):
            if isinstance(tokens, RejectedRow):
                for i in chosen:
                    found[sources[i][0]] = tokens
                continue
            ends = is_eos(tokens, self._rules.eos_tokens(self.backend.eos_token_id))
            counts = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, ends.shape[1])
            answered = 0
            for i, text, count in zip(chosen, self._decoded(tokens), counts, strict=True):
                found[sources[i][0]] = text if isinstance(text, RejectedRow) else GeneratedText(text, int(count))
                answered += not isinstance(text, RejectedRow)
            if on_batch is not None:
                on_batch(answered, int(counts.sum()))
        return found

    def tokens(self, sources: list[np.ndarray]) -> Iterator[tuple[list[int], np.ndarray | RejectedRow]]:
        """Yield indices of sources, and their (B, L) new tokens or a rejection."""
        for chosen in batches([len(ids) for ids in sources], self.batch_tokens // self.beams):
            yield from self._each_or_why(chosen, sources)

    def _each_or_why(
        self, chosen: list[int], sources: list[np.ndarray]
    ) -> Iterator[tuple[list[int], np.ndarray | RejectedRow]]:
        found: np.ndarray | RejectedRow
        try:
            found = self._generated([sources[i] for i in chosen])
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # what native libraries raise need not be an Exception
            if len(chosen) > 1:  # the others are not to blame
                for i in chosen:
                    yield from self._each_or_why([i], sources)
                return
            self._check_model(error)
            found = RejectedRow(f"the model fails on it ({first_line(error)})")
        yield chosen, found

    def _check_model(self, error: BaseException) -> None:
        # If the model fails on a single token, too, no text is to blame.
        try:
            self._generated([np.zeros(1, dtype=np.int64)])
        except (T5AccelError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            raise JobError(f"The model fails on any text ({first_line(error)}). {RESUME}") from error

    def _tokenised(self, texts: Sequence[str]) -> Iterator[tuple[int, np.ndarray | RejectedRow]]:
        """Yield places and ids; similar lengths are tokenized together, as tokenizers pad."""
        for places in batches([len(text) for text in texts], CHARACTERS):
            yield from zip(places, _each(self._ids, [texts[place] for place in places]), strict=True)

    def _ids(self, texts: list[str]) -> list[np.ndarray]:
        longest, most = max(map(len, texts)), PER_TOKEN * (self.max_source_tokens or math.inf)
        if longest > most:
            raise InputError(f"{longest} characters, and at most {most} are allowed")
        ids, masks = tokenize(self.tokenizer, texts)
        if self._language is not None:
            ids = self._languages.set_language(ids, masks, self._language)
        return [row[mask.astype(bool)] for row, mask in zip(ids, masks, strict=True)]

    def _decoded(self, tokens: np.ndarray) -> list[str | RejectedRow]:
        ends = self._rules.eos_tokens(self.backend.eos_token_id)
        return _each(partial(decode, self.tokenizer, skip_special_tokens=self._skips, ends=ends), tokens)

    def _generated(self, sources: list[np.ndarray]) -> np.ndarray:
        return self._search(*padded(sources, self.backend.pad_token_id))


def _each(function: Callable[[Any], Sequence[Any]], items: Any) -> list[Any]:
    """Apply a tokenizer to all items; after a failure, to each one alone."""
    try:
        return [*function(items)]
    except InputError as error:
        if len(items) == 1:
            return [RejectedRow(str(error))]
        return [result for i in range(len(items)) for result in _each(function, items[i : i + 1])]
