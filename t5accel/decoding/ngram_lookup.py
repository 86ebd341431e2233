"""Lookup: what an answer copies from its source, or from itself, is guessed by looking it up there.

A summary, an answer or a correction repeats much of what it was made from. Where the last tokens of an answer occur in
the source, what follows there is a good guess at how the answer goes on, and it is free: no model makes it. The idea is
that of prompt lookup decoding (Saxena 2023) and LLMA (Yang et al. 2023), here for an encoder's source.
"""

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
# What a call takes, in units of what one more token of one row adds to it. Measured on two cores with the bundled model
# in fp32 and int8; models that are bound by memory, or a GPU, have more fixed cost, and drafts could be longer there.
FIXED, VERIFYING = 6.0, 1.0  # a call that reads nothing yet; what forgetting wrong guesses adds
PRIOR_WEIGHT = 8.0  # how many guesses of a row weigh as much as what its match makes one expect


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
    """Greedy search that guesses from the source and from what it has written itself.

    The last tokens of a row, the longest n-gram first, are searched in the row's source and in its output. What
    followed there, the last time, is the draft; one call of the decoder verifies it.

    How many tokens are guessed depends on what they promise. A guess is right with probability p, and the i-th guess of
    a draft counts only if all before it are right: it brings p^i tokens. All rows read as many tokens as the longest
    draft has, so the length m is chosen for the batch, as the one at which it gets the most tokens for its time:

        (rows + sum of p + p^2 + … + p^m over the rows that have a match) / (time of a call that reads m + 1 tokens)

    - p is (r - 1/2) / (r + 1) where a run of r tokens before the guess matches: 0.25 for one, 0.7 for four. It is
      averaged with how many of this row's guesses were right so far. So drafts grow while text is copied and guesses
      are right, and are not made at all where guesses keep failing; a longer match overcomes that.
    - The time of a call has a fixed part and a part for each token of each row (`FIXED`, `VERIFYING`). One row alone is
      worth a guess from p = 2/7 on; in a batch, where every token costs more, most rows have to be promising.

    Looking takes time for every row, and in a batch a single row's match hardly pays. So after looks in vain as many
    calls are made without one, one fewer than there are rows at most.

    Nothing is timed: the same batch is always guessed the same.

    The tokens are those of `greedy.greedy`, whatever is guessed, up to the rounding of floats: a call that reads
    several tokens rounds otherwise than one that reads a single token, so nearly equal logits can change places.
    Precisions that round activations, too, are not lossless: "int8-dynamic" rounds a whole call together, and for
    "int8" and "int4" ONNX Runtime has another kernel for a single token, unless their ``accuracy_level`` is 1. Their
    answers are as good, and mostly the same.

    Args:
        backend, input_ids, attention_mask, max_new_tokens, min_new_tokens: see `greedy.greedy`.
        forced_bos_token_id, decoder_start_token_id: likewise.
        max_ngram: the longest n-gram that is searched.
        max_draft: upper bound on the guesses of a row for one call.
        decoder_input_ids: as of `greedy.greedy`; also searched.

    Returns:
        ``sequences`` (B, L) int64, how many tokens were ``drafted``, and how many of them ``accepted``. Rows that end
        leave the batch as soon as half of it is done.

    Raises:
        InputError: a shape, type or bound is wrong.

    >>> class Counter:  # a toy backend: the next token is the last one plus one, and 9 is the end
    ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 12, 0, 9, 0
    ...     def encode(self, input_ids, attention_mask): return input_ids
    ...     def start(self, source, rows_per_source=1): return None
    ...     def step(self, state, input_ids): return np.eye(12, dtype=np.float32)[input_ids + 1]
    ...     def trim(self, state, accepted): pass
    ...     def keep(self, state, sources): pass
    >>> found = prompt_lookup(Counter(), [[1, 2, 3, 4, 5, 6, 7, 8]])
    >>> found.sequences.tolist(), found.decoder_calls, found.drafted, found.accepted
    ([[1, 2, 3, 4, 5, 6, 7, 8, 9]], 4, 7, 5)
    """
    longest = as_count(max_ngram, "max_ngram", at_least=1)
    if longest > MAX_MATCH:
        raise InputError(f"max_ngram is {longest}; give 1 to {MAX_MATCH}: longer matches tell nothing more.")
    most = as_count(max_draft, "max_draft", at_least=1)
    request = GenerationInputs.checked(
        backend, input_ids, attention_mask, max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens,
        decoder_input_ids=decoder_input_ids, forced_bos_token_id=forced_bos_token_id,
        decoder_start_token_id=decoder_start_token_id, methods=("trim", "keep"),
    )  # fmt: skip
    steps = verify_drafts(
        backend, request, NgramDrafter(request, longest, most), GreedyVerifier(backend, request.rules)
    )
    return StepStream(request.prefix[:, 1:], backend.pad_token_id, steps)


class NgramDrafter:
    """A `drafts.Drafter` that guesses that a row goes on as its source, or as it did before itself.

    Args:
        request: whose sources are copied from.
        max_ngram, max_draft: as of `prompt_lookup`.
    """

    def __init__(self, request: GenerationInputs, max_ngram: int, max_draft: int):
        sources = [ids[mask == 1].tolist() for ids, mask in zip(request.ids, request.mask, strict=True)]
        self._texts = [
            NgramIndex([*source, *prefix], max_ngram)
            for source, prefix in zip(sources, request.prefix.tolist(), strict=True)
        ]
        # By row of the result: of the guesses that were looked at (those after a wrong one were not), how many were
        # right; both begin as if the match had been believed PRIOR_WEIGHT times, see _guess.
        self._right, self._tried = [0] * len(sources), [0] * len(sources)
        self._most = max_draft
        self._news: Drafts = [[] for _ in sources]  # what the texts do not have yet
        self._in_vain, self._rest = 0, 0  # looks since something was guessed; calls before the next look

    def propose(self, rows: Sequence[int], rooms: Sequence[int], blocked: Sequence[int]) -> Drafts:
        if self._rest:
            self._rest -= 1
            return [[] for _ in rows]
        found = [
            self._guess(row, min(room, self._most)) if room else ([], 0.0)
            for row, room in zip(rows, rooms, strict=True)
        ]
        length = best_length([(len(draft), odds) for draft, odds in found if draft], len(rows))
        self._in_vain = 0 if length else self._in_vain + 1
        self._rest = max(min(self._in_vain, len(rows)) - 1, 0)
        return [draft[:length] for draft, _ in found]

    def update(self, rows: Sequence[int], drafts: Drafts, found: Drafts) -> None:
        for row, draft, answer in zip(rows, drafts, found, strict=True):
            self._news[row] += answer
            if draft:
                self._right[row] += len(answer) - 1
                self._tried[row] += min(len(answer), len(draft))

    def keep(self, places: np.ndarray) -> None:
        pass  # rows are known by their places in the result

    def _guess(self, row: int, most: int) -> tuple[list[int], float]:
        """What may follow, and how likely each of its tokens is right if those before it are."""
        text = self._texts[row]
        if self._news[row]:
            text.extend(self._news[row])
            self._news[row] = []
        place, run = text.match()
        if not run:
            return [], 0.0
        odds = (PRIOR_WEIGHT * (run - 0.5) / (run + 1) + self._right[row]) / (PRIOR_WEIGHT + self._tried[row])
        return text.tokens[place : place + most], odds


def best_length(promises: Sequence[tuple[int, float]], rows: int) -> int:
    """How many tokens to guess in a call, so that it brings the most tokens for its time; 0 for none.

    Args:
        promises: of each row that has a draft its length, and how likely each of its tokens is right.
        rows: in the batch.

    >>> best_length([(9, 0.9)], 1), best_length([(9, 0.5)], 1), best_length([(9, 0.2)], 1)
    (9, 2, 0)
    >>> best_length([(9, 0.9)], 8), best_length([(9, 0.9)] * 8, 8)
    (0, 3)
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
    """A growing text that knows where each of its n-grams was last followed by something.

    Args:
        tokens: to begin with.
        max_ngram: n of the longest.

    >>> text = NgramIndex([5, 6, 7, 8, 5, 6], max_ngram=2)
    >>> text.match()  # 7 stands at 2; the two tokens before it match
    (2, 2)
    >>> text.extend([9, 8])
    >>> text.match()
    (4, 1)
    """

    __slots__ = ("_after", "tokens")

    def __init__(self, tokens: list[int], max_ngram: int):
        self.tokens = tokens
        # For each n: from an n-gram to the place after it. zip() ends with the shortest, so the last n-gram, which
        # nothing follows yet, is not there.
        self._after = [
            dict(zip(zip(*(tokens[first:] for first in range(n)), strict=False), range(n, len(tokens)), strict=False))
            for n in range(1, max_ngram + 1)
        ]

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens, each of which follows the n-grams before it."""
        for token in tokens:
            end = len(self.tokens)
            for n, after in enumerate(self._after, start=1):
                after[tuple(self.tokens[end - n :])] = end
            self.tokens.append(token)

    def match(self) -> tuple[int, int]:
        """Where what comes last has come before: the place after it, and how many tokens match; 0 if none does."""
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
