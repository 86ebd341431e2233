"""Draft verification: one decoder call checks several proposed tokens (blockwise decoding, Stern et al. 2018)."""

# A call that reads T tokens costs hardly more than one that reads a single token, as long as T is small: both read all
# weights once. So a right draft token is almost free. A wrong one costs its share of a call, and the draft tokens after
# it are discarded.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from t5accel.decoding.backend import Backend, State
from t5accel.decoding.request import GenerationInputs, Step
from t5accel.decoding.token_constraints import NO_CONSTRAINTS, TokenConstraints, truncate_at_eos

Drafts = list[list[int]]  # the proposed next tokens of each row; any number of them, or none


class Drafter(Protocol):
    """Proposes next tokens. ``rows`` are indices into the result; the decoder state holds these rows only."""

    def propose(self, rows: Sequence[int], rooms: Sequence[int], blocked: Sequence[int]) -> Drafts:
        """At most ``rooms[i]`` tokens for each row, with no end token among its next ``blocked[i]``."""

    def update(self, rows: Sequence[int], drafts: Drafts, found: Drafts) -> None:
        """Learn the tokens of each row: its accepted draft tokens and one more."""

    def keep(self, places: np.ndarray) -> None:
        """Keep only these of the state's rows. (n,) int64."""


class Verifier(Protocol):
    """Calls the decoder, accepts draft tokens and chooses the token after them."""

    def __call__(
        self, state: State, tokens: np.ndarray, rows: Sequence[int], drafts: Drafts, blocked: Sequence[int]
    ) -> Drafts:
        """For each row its accepted draft tokens and one more.

        ``tokens`` (n, u + m) are u unread tokens and the drafts, padded on the right to the longest, m. No end token
        may be among a row's next ``blocked[i]``.
        """


def verify_drafts(backend: Backend, request: GenerationInputs, drafter: Drafter, verify: Verifier) -> Iterator[Step]:
    """Draft, verify and roll back wrong tokens until every row has ended; yields a step for each decoder call.

    Rows accept different numbers of tokens, so their pasts become unequally long: the backend, which needs
    ``rollback`` and
    ``select_sources``, aligns them to the right and masks the padding. Ended rows leave as soon as they are half
    of the batch.

    >>> class Counter:  # a toy backend: the next token is the last one plus one, and 5 is the end
    ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 8, 0, 5, 0
    ...     def encode(self, input_ids, attention_mask): return input_ids
    ...     def new_state(self, source, rows_per_source=1): return None
    ...     def step(self, state, input_ids): return np.eye(9, dtype=np.float32)[input_ids + 1]
    ...     def rollback(self, state, accepted): print("keeps", accepted.tolist(), "of what it has just read")
    >>> class Fixed:  # a toy drafter
    ...     def propose(self, rows, rooms, blocked): return [[1, 2, 7]]
    ...     def update(self, rows, drafts, found): print("found", found)
    >>> request = GenerationInputs.checked(Counter(), [[3]], max_new_tokens=4)
    >>> steps = verify_drafts(Counter(), request, Fixed(), GreedyVerifier(Counter()))
    >>> next(steps).tokens.tolist()
    [1, 2, 3]
    >>> next(steps).tokens.tolist()
    found [[1, 2, 3]]
    keeps [[3]] of what it has just read
    [4]
    """
    pad, ends = backend.pad_token_id, request.eos_token_ids
    state = backend.new_state(backend.encode(request.ids, request.mask))
    active = list(range(len(request.ids)))  # the row of the result of each row in the state
    remaining = [request.max_new_tokens] * len(active)  # tokens that may still come, by row of the result
    optional = request.max_new_tokens - request.min_new_tokens
    unread = request.prefix  # (n, u) tokens that the state has not read
    while True:
        blocked = [remaining[row] - optional for row in active]
        drafts = drafter.propose(active, [max(remaining[row] - 1, 0) for row in active], blocked)
        width = max(map(len, drafts))
        tokens = unread
        if width:
            tokens = np.full((len(active), unread.shape[1] + width), pad, dtype=np.int64)
            tokens[:, : unread.shape[1]] = unread
            for place, draft in enumerate(drafts):
                tokens[place, unread.shape[1] : unread.shape[1] + len(draft)] = draft
        found = [
            _apply_constraints(request, request.max_new_tokens - remaining[row], new)
            for row, new in zip(active, verify(state, tokens, active, drafts, blocked), strict=True)
        ]
        step_rows, step_tokens, accepted = [], [], 0
        for row, new in zip(active, found, strict=True):
            if remaining[row]:
                kept = truncate_at_eos(new, ends)
                remaining[row] = 0 if kept[-1] in ends else remaining[row] - len(kept)
                step_rows += [row] * len(kept)
                step_tokens += kept
                accepted += min(len(kept), len(new) - 1)
        yield Step(np.array(step_rows), np.array(step_tokens), sum(map(len, drafts)), accepted)
        open_places = [place for place, row in enumerate(active) if remaining[row]]
        if not open_places:
            return
        drafter.update(active, drafts, found)
        if 2 * len(open_places) <= len(active):
            places = np.array(open_places)
            backend.select_sources(state, places)
            drafter.keep(places)
            active = [active[place] for place in open_places]
            found = [found[place] for place in open_places]
        if width:
            lengths = [len(new) + unread.shape[1] - 1 for new in found]
            # An ended row stays as long as the longest open one: then often nothing has to be rolled back.
            longest = max(length for length, row in zip(lengths, active, strict=True) if remaining[row])
            lengths = [length if remaining[row] else longest for length, row in zip(lengths, active, strict=True)]
            if min(lengths) < tokens.shape[1]:
                backend.rollback(state, np.array(lengths)[:, None])
        unread = np.array([[new[-1] if remaining[row] else pad] for row, new in zip(active, found, strict=True)])


class GreedyVerifier:
    """Accept a draft token if it is the most probable one after the tokens before it."""

    def __init__(self, backend: Backend, rules: TokenConstraints = NO_CONSTRAINTS):
        self._step, self._next_tokens = backend.step, getattr(backend, "next_tokens", None)
        self._ends, self._rules = rules.eos_tokens(backend.eos_token_id), rules

    def __call__(
        self, state: State, tokens: np.ndarray, rows: Sequence[int], drafts: Drafts, blocked: Sequence[int]
    ) -> Drafts:
        width = 1 + max(map(len, drafts))
        if width == 1 and self._next_tokens is not None and (max(blocked) <= 0 or min(blocked) > 0):
            # Without a draft the backend may find the tokens without computing all logits.
            suppressed = self._rules.suppressed(self._ends if blocked[0] > 0 else ())
            return self._next_tokens(state, tokens[:, None], suppressed=suppressed).tolist()
        logits = self._step(state, tokens[:, None])[:, 0, -width:]
        logits = mask_eos(logits, self._ends, blocked, self._rules.suppress_tokens)
        return [_accepted_prefix(draft, row) for draft, row in zip(drafts, logits.argmax(axis=2).tolist(), strict=True)]


def mask_eos(
    logits: np.ndarray, ends: tuple[int, ...], blocked: Sequence[int], never: tuple[int, ...] = ()
) -> np.ndarray:
    """The logits (n, w, V) with -inf for ``ends`` at each row's first ``blocked[i]`` positions, not in place.

    The tokens ``never`` get -inf everywhere. ``blocked`` may be negative, which counts as 0.
    """
    if max(blocked) <= 0 and not never:
        return logits
    logits = logits.copy()
    logits[..., never] = -np.inf
    early = np.arange(logits.shape[1]) < np.array(blocked)[:, None]  # (n, w)
    for end in ends:
        logits[early, end] = -np.inf
    return logits


def _apply_constraints(request: GenerationInputs, length: int, new: list[int]) -> list[int]:
    """The new tokens after ``length`` others, cut at the first one that a forced token replaces."""
    for place in range(len(new)):
        forced = request.forced_token(length + place)
        if forced is not None and new[place] != forced:
            return [*new[:place], forced]
    return new


def _accepted_prefix(draft: list[int], best: list[int]) -> list[int]:
    """The best tokens up to and including the first that the draft does not have."""
    count = 0
    for proposed, token in zip(draft, best, strict=False):
        if proposed != token:
            break
        count += 1
    return best[: count + 1]
