"""Speculative decoding: one decoder call of a model verifies several tokens that a faster drafter proposed."""

# A call that reads T tokens costs hardly more than one that reads a single token, as long as T is small: both read all
# weights once. So a right draft token is almost free; a wrong one costs its share of a call, and the draft tokens after
# it are discarded (blockwise decoding, Stern et al. 2018). Leviathan, Kalman and Matias (2023) and Chen et al. (2023)
# found how sampled drafts are accepted or replaced so that the output has exactly the larger model's distribution.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from t5accel.checks import as_count
from t5accel.decoding.backend import VOCABULARY, Backend, State
from t5accel.decoding.request import GenerationInputs, Step, StepStream, collects_steps
from t5accel.decoding.sampling import SamplingParams, generators, probabilities, sample_token
from t5accel.decoding.token_constraints import NO_CONSTRAINTS, TokenConstraints, truncate_at_eos
from t5accel.errors import InputError

FIRST = 4  # the length of a row's first draft
MAX_PAUSE = 15

Drafts = list[list[int]]  # the proposed next tokens of each row; any number of them, or none


@collects_steps
def speculative(
    backend: Backend,
    draft: Backend,
    input_ids: Any,
    attention_mask: Any = None,
    *,
    sampling: SamplingParams | None = None,
    seed: int = 0,
    max_draft: int = 8,
    max_new_tokens: int = 64,
    min_new_tokens: int | None = None,
    decoder_input_ids: Any = None,
    forced_bos_token_id: int | None = None,
    decoder_start_token_id: int | None = None,
) -> StepStream:
    """Generate with ``backend``, sped up by the drafts of a faster model.

    Without ``sampling`` the tokens are those of `greedy` on ``backend`` up to rounding (see `prompt_lookup`), whatever
    the draft model proposes. With ``sampling`` every row is distributed as `sample` would draw it (see
    `accept_or_resample`). Arguments that are not listed here are those of `greedy`.

    Args:
        draft: a backend of a model with the same vocabulary and special tokens.
        sampling: applied to both models' distributions; ``None`` chooses the most probable token.
        seed: at least 0; each row has its own random generator.
        max_draft: the most draft tokens of a row for one call.

    Returns:
        ``sequences`` (B, L) int64, ``decoder_calls`` of ``backend`` alone, ``drafted`` and ``accepted``.

    Raises:
        InputError: as for `greedy`, or ``draft`` has another vocabulary or other special tokens.

    >>> class Counter:  # a toy backend whose next token is the last one plus one; it is its own draft model
    ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 6, 0, 5, 0
    ...     def encode(self, input_ids, attention_mask): return input_ids
    ...     def new_state(self, source, rows_per_source=1): return None
    ...     def step(self, state, input_ids): return np.eye(6, dtype=np.float32)[(input_ids + 1) % 6]
    ...     def select_sources(self, state, sources): pass
    ...     def rollback(self, state, accepted): pass
    >>> found = speculative(Counter(), Counter(), [[3]], max_new_tokens=8)
    >>> found.sequences.tolist(), found.decoder_calls, found.accepted
    ([[1, 2, 3, 4, 5]], 1, 4)
    """
    most = as_count(max_draft, "max_draft", at_least=1)
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise InputError(f"sampling must be a SamplingParams, or None for the most probable tokens, got {sampling!r}.")
    bounds: dict[str, Any] = dict(
        max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens, decoder_input_ids=decoder_input_ids,
        forced_bos_token_id=forced_bos_token_id, decoder_start_token_id=decoder_start_token_id,
        methods=("rollback", "select_sources"),
    )  # fmt: skip
    request = GenerationInputs.checked(backend, input_ids, attention_mask, **bounds)
    GenerationInputs.checked(draft, input_ids, attention_mask, drafts_only=True, **bounds)
    for name in VOCABULARY:
        theirs, ours = getattr(draft, name), getattr(backend, name)
        if theirs != ours:
            raise InputError(
                f"The draft's {name} must be the model's, {ours}, got {theirs}. Give a model with the same tokenizer, "
                "such as a student."
            )
    draws = generators(seed, len(request.ids))

    def steps() -> Iterator[Step]:  # a generator, so that the draft encodes when the first step is requested
        drafter = DraftModel(draft, request, most, sampling, draws)
        verify: Verifier = GreedyVerifier(backend, request.rules)
        if sampling is not None:
            verify = RejectionSampler(backend, drafter, request, sampling)
        yield from verify_drafts(backend, request, drafter, verify)

    return StepStream(request.prefix[:, 1:], backend.pad_token_id, steps())


class Drafter(Protocol):
    """Proposes next tokens. ``rows`` are rows of the result; the decoder's state holds only these."""

    def propose(self, rows: Sequence[int], rooms: Sequence[int], blocked: Sequence[int]) -> Drafts:
        """Propose at most ``rooms[i]`` tokens a row, no end among the first ``blocked[i]``."""

    def update(self, rows: Sequence[int], drafts: Drafts, found: Drafts) -> None:
        """Learn the new tokens of each row: its accepted draft tokens and one more."""

    def keep(self, places: np.ndarray) -> None:
        """Keep only these of the state's rows. (n,) int64."""


# Calls the decoder with a state and tokens (n, u + m): u unread tokens and the drafts, padded on the right to m. From
# the rows of the result, their drafts and ``blocked`` as in `Drafter.propose` it returns each row's accepted draft
# tokens and one more.
Verifier = Callable[[State, np.ndarray, Sequence[int], Drafts, Sequence[int]], Drafts]


def verify_drafts(backend: Backend, request: GenerationInputs, drafter: Drafter, verify: Verifier) -> Iterator[Step]:
    """Draft, verify and roll back wrong tokens; yield a step for each decoder call.

    Rows accept different numbers of tokens, so their pasts become unequally long (see `Backend.rollback`). Ended rows
    leave when they are half of the batch.
    """
    pad, ends = backend.pad_token_id, request.eos_token_ids
    state = backend.new_state(backend.encode(request.ids, request.mask))
    active = list(range(len(request.ids)))  # the row of the result of each row in the state
    remaining = [request.max_new_tokens] * len(active)  # how many more tokens each row may get
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
    """Accepts the most probable tokens."""

    def __init__(self, backend: Backend, rules: TokenConstraints = NO_CONSTRAINTS):
        self._step, self._next_tokens = backend.step, getattr(backend, "next_tokens", None)
        self._step_tokens = getattr(backend, "step_tokens", None)
        self._ends, self._rules = rules.eos_tokens(backend.eos_token_id), rules

    def __call__(
        self, state: State, tokens: np.ndarray, rows: Sequence[int], drafts: Drafts, blocked: Sequence[int]
    ) -> Drafts:
        width = 1 + max(map(len, drafts))
        choose = self._next_tokens if width == 1 else self._step_tokens
        if choose is not None and (max(blocked) <= 0 or min(blocked) >= width):
            # The same tokens are suppressed everywhere: the backend may choose, and hand over no logits.
            suppressed = self._rules.suppressed(self._ends if blocked[0] > 0 else ())
            best = choose(state, tokens[:, None], suppressed=suppressed)
            best = best if width == 1 else best[:, 0, -width:]
            return [_accepted_prefix(draft, row) for draft, row in zip(drafts, best.tolist(), strict=True)]
        logits = self._step(state, tokens[:, None])[:, 0, -width:]
        logits = mask_eos(logits, self._ends, blocked, self._rules.suppress_tokens)
        return [_accepted_prefix(draft, row) for draft, row in zip(drafts, logits.argmax(axis=2).tolist(), strict=True)]


def mask_eos(
    logits: np.ndarray, ends: tuple[int, ...], blocked: Sequence[int], never: tuple[int, ...] = ()
) -> np.ndarray:
    """Mask ``ends`` at the first ``blocked[i]`` positions, and ``never`` everywhere, in (n, w, V) logits.

    Negative ``blocked`` count as 0; the argument is not changed.
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
    """Cut the new tokens after ``length`` others at the first one that a forced token replaces."""
    for place in range(len(new)):
        forced = request.forced_token(length + place)
        if forced is not None and new[place] != forced:
            return [*new[:place], forced]
    return new


def _accepted_prefix(draft: list[int], best: list[int]) -> list[int]:
    """The best tokens up to and including the first that differs from the draft."""
    count = next((i for i, pair in enumerate(zip(draft, best, strict=False)) if pair[0] != pair[1]), len(draft))
    return best[: count + 1]


class DraftModel:
    """A `Drafter` that proposes a smaller model's most probable or sampled tokens."""

    # A backend can roll back its last call only. So the first call of a draft reads the known tokens, for good; each
    # further one rolls back the draft tokens of the last one and reads all of them, one more than before. A draft of m
    # tokens takes m calls that read 1, 1, 2, … m - 1 tokens; accepted ones of the last call stay, and the next draft
    # reads the rest: the last draft token, and the one that replaced a wrong one.

    def __init__(
        self,
        backend: Backend,
        request: GenerationInputs,
        most: int,
        sampling: SamplingParams | None = None,
        draws: Sequence[np.random.Generator] = (),
    ):
        self._backend, self._ends = backend, request.eos_token_ids
        self._state = backend.new_state(backend.encode(request.ids, request.mask))
        self._sampling, self.draws = sampling, draws  # a random generator for each row
        self.texts: list[list[int]] = request.prefix.tolist()  # each row's tokens so far, with the start token
        self.odds: list[np.ndarray] = []  # of each token of the last draft: the distributions (n, V) it was drawn from
        self._lengths = [AdaptiveDraftLength(most) for _ in request.ids]  # by row of the result
        self._unread = request.prefix.tolist()  # by row of the state
        self._proposed: list[np.ndarray] = []  # (n,) each

    def propose(self, rows: Sequence[int], rooms: Sequence[int], blocked: Sequence[int]) -> Drafts:
        self._proposed, self.odds = [], []
        wanted = [min(room, self._lengths[row].next()) if room else 0 for row, room in zip(rows, rooms, strict=True)]
        drafts: Drafts = [[] for _ in rows]
        open_places = [place for place, most in enumerate(wanted) if most]
        if not open_places:
            return drafts
        logits = self._read_known_tokens()
        while True:
            still_blocked = [count - len(self._proposed) for count in blocked]
            logits = mask_eos(logits[:, None], self._ends, still_blocked)[:, 0]
            proposed = self._choose(logits, rows, open_places)
            self._proposed.append(proposed)
            for place in open_places:
                drafts[place].append(int(proposed[place]))
            open_places = [
                place
                for place in open_places
                if len(drafts[place]) < wanted[place] and drafts[place][-1] not in self._ends
            ]
            if not open_places:
                return drafts
            if len(self._proposed) > 1:
                self._backend.rollback(self._state, np.zeros((len(rows), 1), dtype=np.int64))
            logits = self._backend.step(self._state, np.stack(self._proposed, axis=1)[:, None])[:, 0, -1]

    def update(self, rows: Sequence[int], drafts: Drafts, found: Drafts) -> None:
        for row, new in zip(rows, found, strict=True):
            self.texts[row] += new
        if not self._proposed:
            for unread, new in zip(self._unread, found, strict=True):
                unread += new
            return
        read = len(self._proposed) - 1
        kept = [min(len(new) - 1, read) for new in found]
        for row, draft, new in zip(rows, drafts, found, strict=True):
            if draft:
                self._lengths[row].update(len(draft), len(new) - 1)
        if min(kept) < read:
            self._backend.rollback(self._state, np.array(kept)[:, None])
        self._unread = [new[count:] for new, count in zip(found, kept, strict=True)]

    def keep(self, places: np.ndarray) -> None:
        self._backend.select_sources(self._state, places)
        self._unread = [self._unread[place] for place in places]

    def _read_known_tokens(self) -> np.ndarray:
        """The logits (n, V) after each row's last known token; rows have different numbers of unread tokens, >= 1."""
        counts = np.array([len(unread) for unread in self._unread])
        tokens = np.full((len(counts), counts.max()), self._backend.pad_token_id, dtype=np.int64)
        tokens[np.arange(counts.max()) < counts[:, None]] = [token for unread in self._unread for token in unread]
        logits = self._backend.step(self._state, tokens[:, None])[np.arange(len(counts)), 0, counts - 1]
        if counts.min() < counts.max():
            self._backend.rollback(self._state, counts[:, None])
        return logits

    def _choose(self, logits: np.ndarray, rows: Sequence[int], places: Sequence[int]) -> np.ndarray:
        """Draft tokens (n,) from logits (n, V); only those at ``places`` matter."""
        if self._sampling is None:
            return logits.argmax(axis=1)
        proposed = [tokens.tolist() for tokens in self._proposed]
        texts = ([*self.texts[row], *(tokens[place] for tokens in proposed)] for place, row in enumerate(rows))
        odds = next_token_probs(logits, texts, self._sampling)
        self.odds.append(odds)
        uniform = np.zeros(len(rows))  # rows without a draft draw nothing: their draws do not depend on other rows
        for place in places:
            uniform[place] = self.draws[rows[place]].random()
        return sample_token(odds, uniform)


class AdaptiveDraftLength:
    """The length of a row's next draft, adapted to its last ones' success.

    - After a right draft the length doubles; after a partly right one it is one more than the accepted tokens.
    - A draft that was wrong from the start is followed by a pause of 1 step, then 3, 7 and 15 if it repeats. So
      unpredictable text is hardly ever drafted, and text that becomes predictable again is noticed.

    No clock is read: the same text always gets the same drafts.
    """

    __slots__ = ("_failures", "_length", "_most", "_pause")

    def __init__(self, most: int):
        self._most, self._length = most, min(FIRST, most)
        self._failures = self._pause = 0

    def next(self) -> int:
        """Return the next draft's length, 0 in a pause; call it once a step."""
        if self._pause:
            self._pause -= 1
            return 0
        return self._length

    def update(self, drafted: int, accepted: int) -> None:
        """Learn how many of the ``drafted`` tokens were ``accepted``."""
        if accepted:
            self._failures = 0
            self._length = min(2 * self._length if accepted == drafted else accepted + 1, self._most)
        else:
            self._failures += 1
            self._length, self._pause = 1, min(2**self._failures - 1, MAX_PAUSE)


def next_token_probs(logits: np.ndarray, texts: Iterable[Sequence[int]], sampling: SamplingParams) -> np.ndarray:
    """`probabilities` (R, V) after R texts; they are read for penalties alone."""
    if sampling.repetition_penalty == 1:
        return probabilities(logits, None, sampling)
    histories = list(texts)
    lengths = np.array([len(history) for history in histories])
    mask = np.arange(lengths.max()) < lengths[:, None]
    tokens = np.zeros(mask.shape, dtype=np.int64)
    tokens[mask] = [token for history in histories for token in history]
    return probabilities(logits, tokens, sampling, history_mask=mask)


class RejectionSampler:
    """The `Verifier` of speculative sampling; the output has the distribution of ``backend``'s model."""

    def __init__(self, backend: Backend, drafter: DraftModel, request: GenerationInputs, sampling: SamplingParams):
        self._step, self._drafter, self._sampling = backend.step, drafter, sampling
        self._ends, self._never = request.eos_token_ids, request.rules.suppress_tokens

    def __call__(
        self, state: State, tokens: np.ndarray, rows: Sequence[int], drafts: Drafts, blocked: Sequence[int]
    ) -> Drafts:
        drafter, width = self._drafter, 1 + max(map(len, drafts))
        logits = mask_eos(self._step(state, tokens[:, None])[:, 0, -width:], self._ends, blocked, self._never)
        texts = (
            [*drafter.texts[row], *draft[:count]]
            for row, draft in zip(rows, drafts, strict=True)
            for count in range(width)
        )
        odds = next_token_probs(logits.reshape(-1, logits.shape[-1]), texts, self._sampling).reshape(logits.shape)
        return [
            accept_or_resample(draft, [each[place] for each in drafter.odds], odds[place], drafter.draws[row])
            for place, (row, draft) in enumerate(zip(rows, drafts, strict=True))
        ]


def accept_or_resample(
    draft: Sequence[int], theirs: Sequence[np.ndarray], ours: Sequence[np.ndarray], random: np.random.Generator
) -> list[int]:
    """Return the accepted draft tokens and one more, distributed as ``ours``.

    A token x drawn from q is accepted with probability min(1, p(x) / q(x)). Thus x comes out with probability
    min(p(x), q(x)); p(x) lacks max(0, p(x) - q(x)), and from that, normalised, the first rejected token is replaced.
    ``theirs`` are the distributions q (V,) of the m draft tokens, ``ours`` p (V,) at each of them and after the last.
    """
    for count, proposed in enumerate(draft):
        p, q = ours[count], theirs[count]
        if random.random() * q[proposed] >= p[proposed]:
            missing = np.maximum(p - q, 0)
            # Nothing is missing if p and q differ by rounding only; then p itself is right.
            return [*draft[:count], int(sample_token(missing if missing.any() else p, random.random()))]
    return [*draft, int(sample_token(ours[len(draft)], random.random()))]
