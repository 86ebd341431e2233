"""Drafts: tokens are guessed, and one call of the decoder verifies all guesses. What lookup and speculation share.

A call that reads T tokens costs hardly more than one that reads a single token, as long as T is small: both read all
weights once. So a right guess yields a token almost for nothing. A wrong guess costs its share of a call, and what
follows it is thrown away. The idea is that of blockwise decoding (Stern, Shazeer and Uszkoreit, 2018).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from t5accel.decoding.backend import Backend, State
from t5accel.decoding.request import GenerationInputs, Step
from t5accel.decoding.token_constraints import NO_CONSTRAINTS, TokenConstraints, truncate_at_eos

Drafts = list[list[int]]  # for each row the tokens that are guessed to come next; any number of them, also none


class Drafter(Protocol):
    """Guesses how rows go on. Rows are numbered as in the result; the state has those that were kept."""

    def propose(self, rows: Sequence[int], rooms: Sequence[int], blocked: Sequence[int]) -> Drafts:
        """At most ``rooms[i]`` tokens for each row; no end token may be among its next ``blocked[i]``."""

    def update(self, rows: Sequence[int], drafts: Drafts, found: Drafts) -> None:
        """What really came: the right guesses of each row and one token more."""

    def keep(self, places: np.ndarray) -> None:
        """Of the rows in the state only these stay. (n,) int64."""


class Verifier(Protocol):
    """Calls the decoder, and says which guesses are right and what comes after them."""

    def __call__(
        self, state: State, tokens: np.ndarray, rows: Sequence[int], drafts: Drafts, blocked: Sequence[int]
    ) -> Drafts:
        """For each row as many of its guesses as are right, and one token more.

        Args:
            state: of the decoder; it reads all tokens.
            tokens: (n, u + m): what it has not read yet, then the draft, filled up on the right.
            rows: as in the result.
            drafts: of each row, the longest of m tokens.
            blocked: no end token may be among so many of a row's next tokens.
        """


def verify_drafts(backend: Backend, request: GenerationInputs, drafter: Drafter, choose: Verifier) -> Iterator[Step]:
    """Guess, verify, forget the wrong guesses, until every row has ended.

    Rows accept different numbers of guesses, so their histories become unequally long: the backend aligns them to the
    right and masks the rest (``trim``). Rows that have ended leave the batch as soon as half of it has.

    Args:
        backend: with ``trim`` and ``keep``.
        request: checked.
        drafter: where the guesses come from.
        choose: by which rule they are right, such as `GreedyVerifier`.

    Yields:
        A step for each call of the decoder.

    >>> class Counter:  # a toy backend: the next token is the last one plus one, and 5 is the end
    ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 8, 0, 5, 0
    ...     def encode(self, input_ids, attention_mask): return input_ids
    ...     def start(self, source, rows_per_source=1): return None
    ...     def step(self, state, input_ids): return np.eye(9, dtype=np.float32)[input_ids + 1]
    ...     def trim(self, state, accepted): print("keeps", accepted.tolist(), "of what it has just read")
    >>> class Fixed:  # a toy drafter
    ...     def propose(self, rows, rooms, blocked): return [[1, 2, 7]]
    ...     def update(self, rows, drafts, found): print("learns", found)
    >>> request = GenerationInputs.checked(Counter(), [[3]], max_new_tokens=4)
    >>> steps = verify_drafts(Counter(), request, Fixed(), GreedyVerifier(Counter()))
    >>> next(steps).tokens.tolist()
    [1, 2, 3]
    >>> next(steps).tokens.tolist()
    learns [[1, 2, 3]]
    keeps [[3]] of what it has just read
    [4]
    """
    pad, ends = backend.pad_token_id, request.eos_token_ids
    state = backend.start(backend.encode(request.ids, request.mask))
    active = list(range(len(request.ids)))  # which row of the result each one in the state is
    left = [request.max_new_tokens] * len(active)  # by row of the result: how many tokens may still come
    bound = request.min_new_tokens - request.max_new_tokens
    unread = request.prefix  # (n, u) what the state has not read yet
    while True:
        blocked = [bound + left[row] for row in active]
        drafts = drafter.propose(active, [max(left[row] - 1, 0) for row in active], blocked)
        width = max(map(len, drafts))
        tokens = unread
        if width:
            tokens = np.full((len(active), unread.shape[1] + width), pad, dtype=np.int64)
            tokens[:, : unread.shape[1]] = unread
            for place, draft in enumerate(drafts):
                tokens[place, unread.shape[1] : unread.shape[1] + len(draft)] = draft
        found = choose(state, tokens, active, drafts, blocked)
        rows, new, accepted = [], [], 0
        found = [
            _apply_constraints(request, request.max_new_tokens - left[row], answer)
            for row, answer in zip(active, found, strict=True)
        ]
        for row, answer in zip(active, found, strict=True):
            if left[row]:
                kept = truncate_at_eos(answer, ends)
                left[row] = 0 if kept[-1] in ends else left[row] - len(kept)
                rows += [row] * len(kept)
                new += kept
                accepted += min(len(kept), len(answer) - 1)
        yield Step(np.array(rows), np.array(new), sum(map(len, drafts)), accepted)
        going = [place for place, row in enumerate(active) if left[row]]
        if not going:
            return
        drafter.update(active, drafts, found)
        if 2 * len(going) <= len(active):
            places = np.array(going)
            backend.keep(state, places)
            drafter.keep(places)
            active, found = [active[place] for place in going], [found[place] for place in going]
        if width:
            lengths = [len(answer) + unread.shape[1] - 1 for answer in found]
            # What has ended stays as long as the longest of the others: often nothing has to be cut then.
            longest = max(length for length, row in zip(lengths, active, strict=True) if left[row])
            lengths = [length if left[row] else longest for length, row in zip(lengths, active, strict=True)]
            if min(lengths) < tokens.shape[1]:
                backend.trim(state, np.array(lengths)[:, None])
        unread = np.array([[answer[-1] if left[row] else pad] for row, answer in zip(active, found, strict=True)])


class GreedyVerifier:
    """Greedy search's `Verifier`: a guess is right if it is the likeliest token after those before it.

    Where nothing is guessed, a backend that offers ``next_tokens`` is asked for tokens, which it may find without
    computing all logits.

    >>> class Counter:  # its next token is the last one plus one
    ...     eos_token_id = 5
    ...     def step(self, state, input_ids): return np.eye(8, dtype=np.float32)[input_ids + 1]
    >>> GreedyVerifier(Counter())(None, np.array([[1, 2, 3, 6], [4, 9 - 4, 0, 0]]), [0, 1], [[2, 3, 6], [5]], [0, 0])
    [[2, 3, 4], [5, 6]]
    """

    def __init__(self, backend: Backend, rules: TokenConstraints = NO_CONSTRAINTS):
        self._step, self._next_tokens = backend.step, getattr(backend, "next_tokens", None)
        self._ends, self._rules = rules.eos_tokens(backend.eos_token_id), rules

    def __call__(
        self, state: State, tokens: np.ndarray, rows: Sequence[int], drafts: Drafts, blocked: Sequence[int]
    ) -> Drafts:
        width = 1 + max(map(len, drafts))
        if width == 1 and self._next_tokens is not None and (max(blocked) <= 0 or min(blocked) > 0):
            forbidden = self._rules.suppressed(self._ends if blocked[0] > 0 else ())
            return self._next_tokens(state, tokens[:, None], forbidden=forbidden).tolist()
        logits = mask_eos(
            self._step(state, tokens[:, None])[:, 0, -width:], self._ends, blocked, self._rules.suppress_tokens
        )
        return [_accepted_prefix(draft, row) for draft, row in zip(drafts, logits.argmax(axis=2).tolist(), strict=True)]


def _apply_constraints(request: GenerationInputs, length: int, answer: list[int]) -> list[int]:
    """The answer behind ``length`` new tokens, up to the first one that has to be another, and that."""
    for place in range(len(answer)):
        forced = request.forced_token(length + place)
        if forced is not None and answer[place] != forced:
            return [*answer[:place], forced]
    return answer


def mask_eos(
    logits: np.ndarray, ends: tuple[int, ...], blocked: Sequence[int], never: tuple[int, ...] = ()
) -> np.ndarray:
    """The logits with -inf for end tokens at the first ``blocked[i]`` positions of row i; a copy where that is any.

    Args:
        logits: (n, w, V), not written to.
        ends: the tokens.
        blocked: for each row; nothing where it is 0 or less.
        never: tokens with -inf everywhere.

    >>> mask_eos(np.zeros((2, 2, 2)), (1,), [0, 1]).tolist()
    [[[0.0, 0.0], [0.0, 0.0]], [[0.0, -inf], [0.0, 0.0]]]
    """
    if max(blocked) <= 0 and not never:
        return logits
    logits = logits.copy()
    logits[..., never] = -np.inf
    early = np.arange(logits.shape[1]) < np.array(blocked)[:, None]  # (n, w)
    for end in ends:
        logits[early, end] = -np.inf
    return logits


def _accepted_prefix(draft: list[int], likeliest: list[int]) -> list[int]:
    """The likeliest tokens up to the first that was not guessed, and that one."""
    count = 0
    for guess, token in zip(draft, likeliest, strict=False):
        if guess != token:
            break
        count += 1
    return likeliest[: count + 1]
