"""Prompt-lookup decoding (Saxena 2023; LLMA, Yang et al. 2023) from an encoder's source."""

# A summary, an answer or a correction repeats much of its source. Where the last tokens of the output occur in the
# source, the tokens after them are a good draft, and a free one: no model computes it.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from t5accel.checks import as_count
from t5accel.decoding.backend import Backend
from t5accel.decoding.drafting import Drafts, GreedyVerifier, verify_drafts
from t5accel.decoding.request import GenerationInputs, StepStream, collects_steps
from t5accel.errors import InputError

MAX_MATCH = 16  # tokens: how far back a match is followed, and the longest n-gram
# The cost of a call, in units of what one more token of one row adds to it. Measured on two cores with the bundled
# model in fp32 and int8; memory-bound models and GPUs have more fixed cost, and drafts could be longer there.
FIXED, VERIFYING = 6.0, 1.0  # a call that reads nothing yet; what rolling back wrong tokens adds
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

    The last tokens of a row, the longest n-gram first, are searched in its source and output; what followed their last
    occurrence is the draft. The tokens are those of `greedy`, up to rounding: a call that reads several tokens rounds
    differently from one that reads a single token, so nearly equal logits may change places. Precisions that round
    activations are not lossless either: "int8-dynamic" rounds a whole call together, and for "int8" and "int4" ONNX
    Runtime has another kernel for a single token, unless their ``accuracy_level`` is 1. Their answers are as good, and
    mostly the same.

    Args:
        max_ngram: the longest n-gram to search, at most 16.
        max_draft: the most draft tokens of a row for one call.
        decoder_input_ids: see `greedy`, as for the other arguments; also searched.

    Returns:
        ``sequences`` (B, L) int64, and how many tokens were ``drafted`` and ``accepted``.

    >>> class Counter:  # a toy backend: the next token is the last one plus one, and 9 is the end
    ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 12, 0, 9, 0
    ...     def encode(self, input_ids, attention_mask): return input_ids
    ...     def new_state(self, source, rows_per_source=1): return None
    ...     def step(self, state, input_ids): return np.eye(12, dtype=np.float32)[input_ids + 1]
    ...     def rollback(self, state, accepted): pass
    ...     def select_sources(self, state, sources): pass
    >>> found = prompt_lookup(Counter(), [[1, 2, 3, 4, 5, 6, 7, 8]])
    >>> found.sequences.tolist(), found.decoder_calls, found.drafted, found.accepted
    ([[1, 2, 3, 4, 5, 6, 7, 8, 9]], 4, 7, 5)
    """
    longest = as_count(max_ngram, "max_ngram", at_least=1)
    if longest > MAX_MATCH:
        raise InputError(f"max_ngram must be 1 to {MAX_MATCH}, got {longest}: longer matches tell nothing more.")
    most = as_count(max_draft, "max_draft", at_least=1)
    request = GenerationInputs.checked(
        backend,
        input_ids,
        attention_mask,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        decoder_input_ids=decoder_input_ids,
        forced_bos_token_id=forced_bos_token_id,
        decoder_start_token_id=decoder_start_token_id,
        methods=("rollback", "select_sources"),
    )
    drafter = NgramDrafter(request, longest, most)
    steps = verify_drafts(backend, request, drafter, GreedyVerifier(backend, request.rules))
    return StepStream(request.prefix[:, 1:], backend.pad_token_id, steps)


class NgramDrafter:
    """A `Drafter` that continues each row as its source, or as the row's own earlier output.

    The length of the drafts follows from their expected gain (`best_length`). A draft token is right with probability
    p = (r - 1/2) / (r + 1) after a match of r tokens (0.25 for one, 0.7 for four), averaged with the share of the row's
    draft tokens that were right so far. So drafts grow while text is copied, and stop where they keep failing, unless a
    longer match overcomes that. No clock is read: the same batch always gets the same drafts.
    """

    def __init__(self, request: GenerationInputs, max_ngram: int, max_draft: int):
        sources = [ids[mask == 1].tolist() for ids, mask in zip(request.ids, request.mask, strict=True)]
        self._texts = [
            NgramIndex([*source, *prefix], max_ngram)
            for source, prefix in zip(sources, request.prefix.tolist(), strict=True)
        ]
        # By row of the result: of the draft tokens that were verified (those after a wrong one were not), how many were
        # right. PRIOR_WEIGHT is added to both in _guess.
        self._right, self._tried = [0] * len(sources), [0] * len(sources)
        self._most = max_draft
        self._unindexed: Drafts = [[] for _ in sources]
        self._in_vain, self._rest = 0, 0  # searches since the last draft; calls before the next search

    def propose(self, rows: Sequence[int], rooms: Sequence[int], blocked: Sequence[int]) -> Drafts:
        if self._rest:
            self._rest -= 1
            return [[] for _ in rows]
        found = [
            self._guess(row, min(room, self._most)) if room else ([], 0.0)
            for row, room in zip(rows, rooms, strict=True)
        ]
        length = best_length([(len(draft), odds) for draft, odds in found if draft], len(rows))
        # A search takes time for every row, and in a batch a single row's match hardly pays. So each search in vain
        # delays the next one by one call more, by at most rows - 1.
        self._in_vain = 0 if length else self._in_vain + 1
        self._rest = max(min(self._in_vain, len(rows)) - 1, 0)
        return [draft[:length] for draft, _ in found]

    def update(self, rows: Sequence[int], drafts: Drafts, found: Drafts) -> None:
        for row, draft, new in zip(rows, drafts, found, strict=True):
            self._unindexed[row] += new
            if draft:
                self._right[row] += len(new) - 1
                self._tried[row] += min(len(new), len(draft))

    def keep(self, places: np.ndarray) -> None:
        pass  # everything is indexed by rows of the result

    def _guess(self, row: int, most: int) -> tuple[list[int], float]:
        """Up to ``most`` next tokens, and the probability of each if those before it are right."""
        text = self._texts[row]
        if self._unindexed[row]:
            text.extend(self._unindexed[row])
            self._unindexed[row] = []
        place, run = text.match()
        if not run:
            return [], 0.0
        odds = (PRIOR_WEIGHT * (run - 0.5) / (run + 1) + self._right[row]) / (PRIOR_WEIGHT + self._tried[row])
        return text.tokens[place : place + most], odds


def best_length(promises: Sequence[tuple[int, float]], rows: int) -> int:
    """The draft length that brings the most tokens per unit of time; 0 for no draft.

    ``promises`` are, for each of the ``rows`` that has a draft, its length and the probability p of each of its tokens.
    The i-th token counts only if all before it are right: it brings p^i tokens. All rows read as many tokens as the
    longest draft has, so the length m is one for the batch: the one that maximises (rows + sum of p + … + p^m) / (time
    of a call that reads m + 1 tokens). One row alone is worth a draft from p = 2/7 on; in a batch, where every token
    costs more, most rows must be promising.

    >>> best_length([(9, 0.9)], 1), best_length([(9, 0.5)], 1), best_length([(9, 0.2)], 1)
    (9, 2, 0)
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
    """A growing text that knows the place after the last occurrence of each of its n-grams, n <= ``max_ngram``.

    >>> text = NgramIndex([5, 6, 7, 8, 5, 6], max_ngram=2)
    >>> text.match()  # 7 stands at 2; the two tokens before it match
    (2, 2)
    """

    __slots__ = ("_after", "tokens")

    def __init__(self, tokens: list[int], max_ngram: int):
        self.tokens = tokens
        # For each n: from an n-gram to the place after it. zip() stops at the shortest, so the last n-gram, which
        # nothing follows yet, is not included.
        self._after = [
            dict(zip(zip(*(tokens[first:] for first in range(n)), strict=False), range(n, len(tokens)), strict=False))
            for n in range(1, max_ngram + 1)
        ]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens; each follows the n-grams before it."""
        for token in tokens:
            end = len(self.tokens)
            for n, after in enumerate(self._after, start=1):
                after[tuple(self.tokens[end - n :])] = end
            self.tokens.append(token)

    def match(self) -> tuple[int, int]:
        """The place after an earlier occurrence of the last tokens, and how many match (0: none)."""
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
