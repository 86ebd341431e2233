"""Prompt-lookup decoding (Saxena 2023; LLMA, Yang et al. 2023) for encoder-decoders."""

# A summary, an answer or a correction repeats much of its source. Where the last tokens of the output occur in the
# source, the tokens after them are a good draft that needs no model.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from t5accel.checks import as_count
from t5accel.decoding.backend import Backend
from t5accel.decoding.request import GenerationInputs, StepStream, collects_steps
from t5accel.decoding.speculation import Drafts, GreedyVerifier, verify_drafts
from t5accel.errors import InputError

MAX_MATCH = 16  # tokens: how far back a match is followed, and the longest n-gram; longer ones tell nothing more
# The cost of a call, in units of the cost of one more token of one row. Measured on two cores with the bundled
# model in fp32 and int8; memory-bound models and GPUs have more fixed cost, and drafts could be longer there.
FIXED, VERIFYING = 6.0, 1.0  # a call without tokens; rolling back wrong tokens
PRIOR_WEIGHT = 8.0  # the number of a row's draft tokens that weigh as much as the probability that its match suggests


@collects_steps
def prompt_lookup(
    backend: Backend,
    input_ids: Any,
    attention_mask: Any = None,
    *,
    max_ngram: int = 3,
    max_draft: int = 12,
    max_new_tokens: int = 64,
    min_new_tokens: int | None = None,
    decoder_input_ids: Any = None,
    forced_bos_token_id: int | None = None,
    decoder_start_token_id: int | None = None,
) -> StepStream:
    """Greedy search with drafts copied from the source and from the output so far.

    The last tokens of a row, the longest n-gram first, are searched in its source (unless that has a vocabulary of its
    own), prefix and output; the tokens after their last occurrence are the draft. The result is that of `greedy` up to
    rounding: a call that reads several tokens rounds differently from one that reads a single token, so nearly equal
    logits may change places. Precisions that round activations are not lossless either: "int8-dynamic" rounds a whole
    call together, and for "int8" and "int4" ONNX Runtime has another kernel for a single token, unless their
    ``accuracy_level`` is 1. Their answers are as good, and mostly the same. Arguments not listed are those of `greedy`.

    Args:
        max_ngram: the longest n-gram to search, at most 16.
        max_draft: the most draft tokens of a row for one call.

    Returns:
        ``sequences`` (B, L) int64, and how many tokens were ``drafted`` and ``accepted``.

    Raises:
        InputError: as for `greedy`, or the backend cannot roll back.

    >>> class Counter:  # a toy backend whose next token is the last one plus one
    ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 6, 0, 5, 0
    ...     def encode(self, input_ids, attention_mask): return input_ids
    ...     def new_state(self, source, rows_per_source=1): return None
    ...     def step(self, state, input_ids): return np.eye(6, dtype=np.float32)[(input_ids + 1) % 6]
    ...     def select_sources(self, state, sources): pass
    ...     def rollback(self, state, accepted): pass
    >>> found = prompt_lookup(Counter(), [[1, 2, 3, 4]], max_new_tokens=8)  # two tokens are copied
    >>> found.sequences.tolist(), found.decoder_calls, found.accepted
    ([[1, 2, 3, 4, 5]], 3, 2)
    """
    longest = as_count(max_ngram, "max_ngram", at_least=1)
    if longest > MAX_MATCH:
        raise InputError(f"max_ngram must be 1 to {MAX_MATCH}, got {longest}.")
    most = as_count(max_draft, "max_draft", at_least=1)
    request = GenerationInputs.checked(
        backend, input_ids, attention_mask, max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens,
        decoder_input_ids=decoder_input_ids, forced_bos_token_id=forced_bos_token_id,
        decoder_start_token_id=decoder_start_token_id, methods=("rollback", "select_sources"),
    )  # fmt: skip
    is_shared = getattr(backend, "source_vocab_size", backend.vocab_size) == backend.vocab_size
    drafter = NgramDrafter(request, longest, most, copies_source=is_shared)
    steps = verify_drafts(backend, request, drafter, GreedyVerifier(backend, request.rules))
    return StepStream(request.prefix[:, 1:], backend.pad_token_id, steps)


class NgramDrafter:
    """A `Drafter` that copies from each row's source and earlier output.

    A draft token is right with probability p = (r - 1/2) / (r + 1) after a match of r tokens (0.25 for one, 0.7 for
    four), averaged with the row's share of right draft tokens so far; `best_length` weighs its gain. No clock is read:
    the same batch always gets the same drafts.
    """

    def __init__(self, request: GenerationInputs, max_ngram: int, max_draft: int, *, copies_source: bool = True):
        # Ids of another vocabulary mean something else, and the decoder may have no entry for them.
        mask = (request.mask == 1) & copies_source
        sources = [ids[real].tolist() for ids, real in zip(request.ids, mask, strict=True)]
        self._texts = [
            NgramIndex([*source, *prefix], max_ngram)
            for source, prefix in zip(sources, request.prefix.tolist(), strict=True)
        ]
        # By row of the result: draft tokens that were right, of those that were verified (not after a wrong one).
        self._right, self._tried = [0] * len(sources), [0] * len(sources)
        self._most = max_draft
        self._failed_searches = self._calls_to_skip = 0  # since the last draft; before the next search

    def propose(self, rows: Sequence[int], rooms: Sequence[int], blocked: Sequence[int]) -> Drafts:
        if self._calls_to_skip:
            self._calls_to_skip -= 1
            return [[] for _ in rows]
        found = [
            self._guess(row, min(room, self._most)) if room else ([], 0.0)
            for row, room in zip(rows, rooms, strict=True)
        ]
        length = best_length([(len(draft), odds) for draft, odds in found if draft], len(rows))
        # A search takes time for every row, and in a batch a single row's match hardly pays. So each failed search
        # delays the next one by one more call, at most rows - 1.
        self._failed_searches = 0 if length else self._failed_searches + 1
        self._calls_to_skip = max(min(self._failed_searches, len(rows)) - 1, 0)
        return [draft[:length] for draft, _ in found]

    def update(self, rows: Sequence[int], drafts: Drafts, found: Drafts) -> None:
        for row, draft, new in zip(rows, drafts, found, strict=True):
            self._texts[row].extend(new)
            if draft:
                self._right[row] += len(new) - 1
                self._tried[row] += min(len(new), len(draft))

    def keep(self, places: np.ndarray) -> None:
        pass  # everything is indexed by rows of the result

    def _guess(self, row: int, most: int) -> tuple[list[int], float]:
        """Up to ``most`` next tokens, and the probability of each if those before it are right."""
        text = self._texts[row]
        place, run = text.match()
        if not run:
            return [], 0.0
        odds = (PRIOR_WEIGHT * (run - 0.5) / (run + 1) + self._right[row]) / (PRIOR_WEIGHT + self._tried[row])
        return text.tokens[place : place + most], odds


def best_length(promises: Sequence[tuple[int, float]], rows: int) -> int:
    """Return the draft length with the most tokens per unit of time.

    ``promises`` are the length and each token's probability p of the drafts in a batch of ``rows``. The i-th token
    counts only if all before it are right, so it brings p^i tokens. All rows read as many tokens as the longest draft
    has; the result maximises (rows + sum of p + … + p^m) / (time of a call that reads m + 1 tokens). One row alone is
    worth a draft from p = 2/7 on; in a batch, where every token costs more, most rows must be promising.
    """
    if not promises:
        return 0
    best, length, tokens = rows / (FIXED + rows), 0, float(rows)
    time = FIXED + VERIFYING + rows
    for count in range(1, max(longest for longest, _ in promises) + 1):
        tokens += sum(odds**count for longest, odds in promises if longest >= count)
        time += rows
        if tokens / time > best:
            best, length = tokens / time, count
    return length


class NgramIndex:
    """A growing text with an index of its n-grams, n <= ``max_ngram``."""

    __slots__ = ("_after", "tokens")

    def __init__(self, tokens: list[int], max_ngram: int):
        self.tokens = tokens
        # For each n: from an n-gram to the place after it, without the last n-gram (zip() stops at the shortest).
        self._after = [
            dict(zip(zip(*(tokens[first:] for first in range(n)), strict=False), range(n, len(tokens)), strict=False))
            for n in range(1, max_ngram + 1)
        ]

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            for n, after in enumerate(self._after, start=1):
                after[tuple(self.tokens[end - n :])] = end
            self.tokens.append(token)

    def match(self) -> tuple[int, int]:
        """Return the place after the last tokens' last occurrence, and how many match, or 0."""
        tokens, end = self.tokens, len(self.tokens)
        place, run = end, 0
        for n, after in enumerate(self._after, start=1):  # where n tokens match, so do the last n - 1 of them
            longer = after.get(tuple(tokens[end - n :]))
            if longer is None:
                break
            place, run = longer, n
        while 0 < run < min(place, MAX_MATCH) and tokens[place - 1 - run] == tokens[end - 1 - run]:
            run += 1
        return place, run
