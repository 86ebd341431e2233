"""Speculative decoding: a smaller model drafts tokens, the larger one verifies them in one call."""

# Leviathan, Kalman and Matias (2023) and Chen et al. (2023) found how drafts can be sampled, and accepted or replaced,
# so that the output has exactly the larger model's distribution.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from t5accel.checks import as_count
from t5accel.decoding.backend import Backend, State
from t5accel.decoding.drafting import Drafts, GreedyVerifier, mask_eos, verify_drafts
from t5accel.decoding.request import GenerationInputs, Step, StepStream, collects_steps
from t5accel.decoding.sampling import SamplingParams, draw, generators, probabilities
from t5accel.errors import InputError

FIRST = 4  # the length of a row's first draft
MAX_PAUSE = 15
_SAME = ("vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id")


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

    Without ``sampling`` the tokens are those of `greedy` on ``backend``, whatever the draft model proposes and in any
    precision of it, up to the rounding that `prompt_lookup` explains. With ``sampling`` every row is distributed as
    `sample` would draw it (see `accept_or_resample`).

    Args:
        draft: a backend of a model with the same vocabulary.
        sampling: applied to both models' distributions; ``None`` chooses the most probable token.
        seed: at least 0; each row has a random generator of its own, made from the seed and its place.
        max_draft: the most draft tokens of a row for one call.

    The other arguments are those of `greedy`.

    Returns:
        ``sequences`` (B, L) int64, ``decoder_calls`` of ``backend`` alone, and how many tokens were ``drafted`` and
        ``accepted``.

    Raises:
        InputError: a shape, type or bound is wrong, or the models' vocabularies or special tokens differ.

    >>> class Counter:  # a toy backend: the next token is the last one plus one, and 5 is the end
    ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 8, 0, 5, 0
    ...     def encode(self, input_ids, attention_mask): return input_ids
    ...     def new_state(self, source, rows_per_source=1): return None
    ...     def step(self, state, input_ids): return np.eye(8, dtype=np.float32)[input_ids + 1]
    ...     def rollback(self, state, accepted): pass
    ...     def select_sources(self, state, sources): pass
    >>> found = speculative(Counter(), Counter(), [[3]])
    >>> found.sequences.tolist(), found.decoder_calls, found.drafted, found.accepted
    ([[1, 2, 3, 4, 5]], 1, 4, 4)
    """
    most = as_count(max_draft, "max_draft", at_least=1)
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise InputError(f"sampling must be a SamplingParams, or None for the most probable tokens, got {sampling!r}.")
    bounds: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": min_new_tokens,
        "decoder_input_ids": decoder_input_ids,
        "forced_bos_token_id": forced_bos_token_id,
        "decoder_start_token_id": decoder_start_token_id,
        "methods": ("rollback", "select_sources"),
    }
    request = GenerationInputs.checked(backend, input_ids, attention_mask, **bounds)
    GenerationInputs.checked(draft, input_ids, attention_mask, drafts_only=True, **bounds)
    for name in _SAME:
        theirs, ours = getattr(draft, name), getattr(backend, name)
        if theirs != ours:
            raise InputError(
                f"The draft's {name} must be the model's, {ours}, got {theirs}. Give a draft that was trained with the "
                "same tokenizer, such as a student of the model."
            )
    draws = generators(seed, len(request.ids))

    def steps() -> Iterator[Step]:  # a generator, so that the draft encodes when the first step is requested
        if sampling is None:
            yield from verify_drafts(
                backend, request, DraftModel(draft, request, most), GreedyVerifier(backend, request.rules)
            )
        else:
            drafter = SamplingDraftModel(draft, request, most, sampling, draws)
            yield from verify_drafts(backend, request, drafter, RejectionSampler(backend, drafter, request))

    return StepStream(request.prefix[:, 1:], backend.pad_token_id, steps())


class DraftModel:
    """A `Drafter` that proposes the most probable tokens of a smaller model, at most ``most`` a row and call.

    A backend can roll back its last call only. Therefore the first call of a draft reads what is known, for good; each
    further one rolls back the draft tokens that the last one read and reads all of them, one more than before. The
    accepted ones of the last call stay. So a draft of m tokens takes m calls that read 1, 1, 2, … m - 1 tokens, and the
    next draft reads what the state then lacks: the last draft token, and the one that replaced a wrong one.
    """

    def __init__(self, backend: Backend, request: GenerationInputs, most: int):
        self._backend, self._ends = backend, request.eos_token_ids
        self._state = backend.new_state(backend.encode(request.ids, request.mask))
        self._lengths = [AdaptiveDraftLength(most) for _ in request.ids]  # by row of the result
        self._unread = request.prefix.tolist()  # by row of the state
        self._proposed: list[np.ndarray] = []  # (n,) each

    def propose(self, rows: Sequence[int], rooms: Sequence[int], blocked: Sequence[int]) -> Drafts:
        self._proposed = []
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
        return logits.argmax(axis=1)


class SamplingDraftModel(DraftModel):
    """A `Drafter` that samples its tokens from a smaller model's distribution."""

    def __init__(
        self,
        backend: Backend,
        request: GenerationInputs,
        most: int,
        sampling: SamplingParams,
        draws: Sequence[np.random.Generator],
    ):
        super().__init__(backend, request, most)
        self.sampling, self.draws = sampling, draws  # a random generator for each row
        self.texts: list[list[int]] = request.prefix.tolist()  # each row's tokens so far, with the start token
        self.odds: list[np.ndarray] = []  # for each token of the last draft the distributions (n, V) it was drawn from

    def propose(self, rows: Sequence[int], rooms: Sequence[int], blocked: Sequence[int]) -> Drafts:
        self.odds = []
        return super().propose(rows, rooms, blocked)

    def update(self, rows: Sequence[int], drafts: Drafts, found: Drafts) -> None:
        super().update(rows, drafts, found)
        for row, new in zip(rows, found, strict=True):
            self.texts[row] += new

    def _choose(self, logits: np.ndarray, rows: Sequence[int], places: Sequence[int]) -> np.ndarray:
        proposed = [tokens.tolist() for tokens in self._proposed]
        texts = ([*self.texts[row], *(tokens[place] for tokens in proposed)] for place, row in enumerate(rows))
        odds = next_token_probs(logits, texts, self.sampling)
        self.odds.append(odds)
        uniform = np.zeros(len(rows))  # rows without a draft draw nothing: their draws do not depend on other rows
        for place in places:
            uniform[place] = self.draws[rows[place]].random()
        return draw(odds, uniform)


class AdaptiveDraftLength:
    """The length of one row's next draft, from the success of its last ones; at most ``most``.

    - A draft that was right to its end doubles the next one's length.
    - After another one the next is one longer than what was accepted.
    - A draft that was wrong from the start is followed by a pause: 1 step after one of them, 3 after two in a row, then
      7, then 15. So unpredictable text is hardly ever drafted, and text that becomes predictable again is noticed.

    No clock is read: the same text always gets the same drafts.
    """

    __slots__ = ("_failures", "_length", "_most", "_pause")

    def __init__(self, most: int):
        self._most, self._length = most, min(FIRST, most)
        self._failures = self._pause = 0

    def next(self) -> int:
        """The length for the next step, 0 in a pause; call it once a step."""
        if self._pause:
            self._pause -= 1
            return 0
        return self._length

    def update(self, drafted: int, accepted: int) -> None:
        """Learn that of ``drafted`` tokens the first ``accepted`` were right."""
        if accepted:
            self._failures = 0
            self._length = min(2 * self._length if accepted == drafted else accepted + 1, self._most)
        else:
            self._failures += 1
            self._length, self._pause = 1, min(2**self._failures - 1, MAX_PAUSE)


def next_token_probs(logits: np.ndarray, texts: Iterable[Sequence[int]], sampling: SamplingParams) -> np.ndarray:
    """`probabilities` (R, V) after R texts of unequal lengths, which are read only if ``sampling`` depends on them."""
    if sampling.repetition_penalty == 1:
        return probabilities(logits, None, sampling)
    histories = list(texts)
    lengths = np.array([len(history) for history in histories])
    mask = np.arange(lengths.max()) < lengths[:, None]
    tokens = np.zeros(mask.shape, dtype=np.int64)
    tokens[mask] = [token for history in histories for token in history]
    return probabilities(logits, tokens, sampling, history_mask=mask)


class RejectionSampler:
    """The `Verifier` of speculative sampling: outputs have the distribution of ``backend``'s model."""

    def __init__(self, backend: Backend, drafter: SamplingDraftModel, request: GenerationInputs):
        self._step, self._drafter = backend.step, drafter
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
        odds = next_token_probs(logits.reshape(-1, logits.shape[-1]), texts, drafter.sampling).reshape(logits.shape)
        return [
            accept_or_resample(draft, [each[place] for each in drafter.odds], odds[place], drafter.draws[row])
            for place, (row, draft) in enumerate(zip(rows, drafts, strict=True))
        ]


def accept_or_resample(
    draft: Sequence[int], theirs: Sequence[np.ndarray], ours: Sequence[np.ndarray], random: np.random.Generator
) -> list[int]:
    """The accepted draft tokens and one more, distributed as if all were drawn from ``ours``.

    A token x drawn from q is accepted with probability min(1, p(x) / q(x)). Thus x comes out with probability
    min(p(x), q(x)); p(x) lacks max(0, p(x) - q(x)), and from that, normalised, the first rejected token is replaced.
    So a token that p excludes is never accepted.

    ``theirs`` are the distributions q (V,) of the m draft tokens, ``ours`` p (V,) at each of them and after the last.

    >>> certain = np.eye(3)
    >>> accept_or_resample([0, 1], certain[[0, 1]], certain[[0, 2, 1]], np.random.default_rng(0))
    [0, 2]
    """
    for count, proposed in enumerate(draft):
        p, q = ours[count], theirs[count]
        if random.random() * q[proposed] >= p[proposed]:
            missing = np.maximum(p - q, 0)
            # Nothing is missing where p and q are equal but for rounding; then p itself will do.
            return [*draft[:count], int(draw(missing if missing.any() else p, random.random()))]
    return [*draft, int(draw(ours[len(draft)], random.random()))]
