"""How many tokens to guess next, from how the last guesses did: no clock, so that the same text is guessed the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from t5accel.checks import as_count
from t5accel.decoding.backend import Backend, State
from t5accel.decoding.drafting import Drafts, GreedyVerifier, mask_eos, verify_drafts
from t5accel.decoding.request import GenerationInputs, Step, StepStream, collects_steps
from t5accel.decoding.sampling import Sampling, draw, generators, probabilities
from t5accel.errors import InputError

FIRST = 4
MAX_PAUSE = 15


class AdaptiveDraftLength:
    """The length of one row's next draft.

    - A draft that was right to its end lets the next one be twice as long.
    - Else the next one is as long as what was accepted and one more.
    - A draft that was wrong from the start is followed by a pause: of 1 step after one of them, 3 after two in a row,
      then 7, then 15. Text that cannot be guessed is therefore hardly ever guessed at, and text that can be guessed
      again is noticed.

    Args:
        most: upper bound.

    >>> length = AdaptiveDraftLength(most=16)
    >>> length.next(), length.update(4, accepted=4), length.next(), length.update(8, accepted=2), length.next()
    (4, None, 8, None, 3)
    >>> length.update(3, accepted=0), length.next(), length.next()
    (None, 0, 1)
    """

    __slots__ = ("_failures", "_length", "_most", "_pause")

    def __init__(self, most: int):
        self._most, self._length, self._failures, self._pause = most, min(FIRST, most), 0, 0

    def next(self) -> int:
        """For the next step; asked once for each. 0 in a pause."""
        if self._pause:
            self._pause -= 1
            return 0
        return self._length

    def update(self, drafted: int, accepted: int) -> None:
        """Of a draft of ``drafted`` tokens the first ``accepted`` were right."""
        if accepted:
            self._failures = 0
            self._length = min(2 * self._length if accepted == drafted else accepted + 1, self._most)
        else:
            self._failures += 1
            self._length, self._pause = 1, min(2**self._failures - 1, MAX_PAUSE)


# A smaller model as a drafter: it guesses token by token, and its state is kept in step with what was accepted.


class DraftModel:
    """A `drafts.Drafter` that guesses the tokens that are likeliest to a model of the same vocabulary.

    A backend can go back by its last call only. Therefore the first call of a draft reads what is known, for good; each
    further one forgets the guesses that the last one read and reads all of them, one more than before. What was
    accepted of the last call's stays. So a draft of m tokens takes m calls that read 1, 1, 2, … m - 1 tokens, and what
    the state lacks in the end (the last guess, and what came in place of a wrong one) is read by the next draft.

    Args:
        backend: of the smaller model.
        request: as of the larger one.
        most: upper bound on the guesses of one row.
    """

    def __init__(self, backend: Backend, request: GenerationInputs, most: int):
        self._backend, self._ends = backend, request.eos_token_ids
        self._state = backend.start(backend.encode(request.ids, request.mask))
        self._lengths = [AdaptiveDraftLength(most) for _ in request.ids]  # by row of the result
        self._unread = request.prefix.tolist()  # by row of the state: what it has not read
        self._guesses: list[np.ndarray] = []  # (n,) each

    def propose(self, rows: Sequence[int], rooms: Sequence[int], blocked: Sequence[int]) -> Drafts:
        self._guesses = []
        wanted = [min(room, self._lengths[row].next()) if room else 0 for row, room in zip(rows, rooms, strict=True)]
        drafts: Drafts = [[] for _ in rows]
        open_places = [place for place, most in enumerate(wanted) if most]
        if not open_places:
            return drafts
        logits = self._read_what_is_known()
        while True:
            allowed = [count - len(self._guesses) for count in blocked]
            logits = mask_eos(logits[:, None], self._ends, allowed)[:, 0]
            guesses = self._pick(logits, rows, open_places)
            self._guesses.append(guesses)
            for place in open_places:
                drafts[place].append(int(guesses[place]))
            open_places = [
                place
                for place in open_places
                if len(drafts[place]) < wanted[place] and drafts[place][-1] not in self._ends
            ]
            if not open_places:
                return drafts
            if len(self._guesses) > 1:
                self._backend.trim(self._state, np.zeros((len(rows), 1), dtype=np.int64))
            logits = self._backend.step(self._state, np.stack(self._guesses, axis=1)[:, None])[:, 0, -1]

    def update(self, rows: Sequence[int], drafts: Drafts, found: Drafts) -> None:
        if not self._guesses:
            for unread, answer in zip(self._unread, found, strict=True):
                unread += answer
            return
        read = len(self._guesses) - 1
        kept = [min(len(answer) - 1, read) for answer in found]
        for row, draft, answer in zip(rows, drafts, found, strict=True):
            if draft:
                self._lengths[row].update(len(draft), len(answer) - 1)
        if min(kept) < read:
            self._backend.trim(self._state, np.array(kept)[:, None])
        self._unread = [answer[count:] for answer, count in zip(found, kept, strict=True)]

    def keep(self, places: np.ndarray) -> None:
        self._backend.keep(self._state, places)
        self._unread = [self._unread[place] for place in places]

    def _read_what_is_known(self) -> np.ndarray:
        """The logits (n, V) after each row's last known token. Rows lack different numbers of tokens, at least one."""
        counts = np.array([len(unread) for unread in self._unread])
        tokens = np.full((len(counts), counts.max()), self._backend.pad_token_id, dtype=np.int64)
        tokens[np.arange(counts.max()) < counts[:, None]] = [token for unread in self._unread for token in unread]
        logits = self._backend.step(self._state, tokens[:, None])[np.arange(len(counts)), 0, counts - 1]
        if counts.min() < counts.max():
            self._backend.trim(self._state, counts[:, None])
        return logits

    def _pick(self, logits: np.ndarray, rows: Sequence[int], places: Sequence[int]) -> np.ndarray:
        """The guesses (n,), from logits (n, V); only those at ``places`` matter."""
        return logits.argmax(axis=1)


class SamplingDraftModel(DraftModel):
    """A `drafts.Drafter` that draws its guesses from a model's distribution.

    Args:
        backend, request, most: as of `DraftModel`.
        sampling: what is changed in the distribution.
        draws: the random generator of each row.

    Attributes:
        odds: of the last draft, for each guess the distributions (n, V) that it was drawn from.
        texts: each row's tokens so far, with the start token.
    """

    def __init__(
        self,
        backend: Backend,
        request: GenerationInputs,
        most: int,
        sampling: Sampling,
        draws: Sequence[np.random.Generator],
    ):
        super().__init__(backend, request, most)
        self.sampling, self.draws = sampling, draws
        self.texts, self.odds = request.prefix.tolist(), []

    def propose(self, rows: Sequence[int], rooms: Sequence[int], blocked: Sequence[int]) -> Drafts:
        self.odds: list[np.ndarray] = []
        return super().propose(rows, rooms, blocked)

    def update(self, rows: Sequence[int], drafts: Drafts, found: Drafts) -> None:
        super().update(rows, drafts, found)
        for row, answer in zip(rows, found, strict=True):
            self.texts[row] += answer

    def _pick(self, logits: np.ndarray, rows: Sequence[int], places: Sequence[int]) -> np.ndarray:
        said = [guesses.tolist() for guesses in self._guesses]
        histories = ([*self.texts[row], *(each[place] for each in said)] for place, row in enumerate(rows))
        odds = next_token_probs(logits, histories, self.sampling)
        self.odds.append(odds)
        uniform = np.zeros(len(rows))  # rows that guess nothing draw nothing: their draws do not depend on the others
        for place in places:
            uniform[place] = self.draws[rows[place]].random()
        return draw(odds, uniform)


def next_token_probs(logits: np.ndarray, histories: Iterable[Sequence[int]], sampling: Sampling) -> np.ndarray:
    """`distribution.probabilities` after histories of unequal lengths, which are only looked at if that matters.

    Args:
        logits: (R, V).
        histories: R of them.
        sampling: what is changed.

    >>> next_token_probs(np.zeros((2, 2)), [[0], [1, 1]], Sampling(temperature=2.0)).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    if sampling.repetition_penalty == 1:
        return probabilities(logits, None, sampling)
    texts = list(histories)
    lengths = np.array([len(text) for text in texts])
    mask = np.arange(lengths.max()) < lengths[:, None]
    tokens = np.zeros(mask.shape, dtype=np.int64)
    tokens[mask] = [token for text in texts for token in text]
    return probabilities(logits, tokens, sampling, history_mask=mask)


# Speculative decoding: a smaller model guesses, the larger one verifies all guesses at once.
# Leviathan, Kalman and Matias (2023) and Chen et al. (2023) found how guesses can be drawn at random and accepted or
# replaced so that what comes out has exactly the larger model's distribution.


_SAME = ("vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id")


@collects_steps
def speculative(
    backend: Backend,
    draft: Backend,
    input_ids: Any,
    attention_mask: Any = None,
    *,
    sampling: Sampling | None = None,
    seed: int = 0,
    max_draft: int = 8,
    max_new_tokens: int = 64,
    min_new_tokens: int | None = None,
    decoder_input_ids: Any = None,
    forced_bos_token_id: int | None = None,
    decoder_start_token_id: int | None = None,
) -> StepStream:
    """Generate with ``backend``, helped by the guesses of a faster model.

    Without ``sampling`` the tokens are those of `greedy.greedy` on ``backend``, whatever the draft guesses and in
    whichever precision it is, but for the rounding of floats that `prompt_lookup` explains.

    With ``sampling`` every row is distributed as `sampling.sample` would draw it. Guesses are drawn from the draft's
    distribution q and accepted with probability min(1, p / q), p being that of ``backend``; in place of the first one
    that is not, a token is drawn from max(0, p - q), normalised. Both are changed in the same way before that
    (temperature, top-k, …), so a guess that p excludes is never accepted.

    How long a row's next draft is depends on how its last ones did (`draft_lengths.AdaptiveDraftLength`). The draft has a state
    of its own. It can go back by one call only, as every backend; therefore it reads its guesses again with each
    further one, and keeps of them what was accepted.

    Args:
        backend, input_ids, attention_mask, max_new_tokens, min_new_tokens: see `greedy.greedy`.
        decoder_input_ids, forced_bos_token_id, decoder_start_token_id: likewise.
        draft: a backend of a model with the same vocabulary, which guesses; the model of ``backend`` decides.
        sampling: how to draw; ``None`` takes the likeliest token.
        seed: at least 0, of the draws; each row has a generator of its own, made of the seed and its place.
        max_draft: upper bound on the guesses for one call.

    Returns:
        ``sequences`` (B, L) int64; ``decoder_calls`` of ``backend``, not of the draft; how many tokens were ``drafted``
        and ``accepted``.

    Raises:
        InputError: a shape, type or bound is wrong, or the two models have other vocabularies or special tokens.

    >>> class Counter:  # a toy backend: the next token is the last one plus one, and 5 is the end
    ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 8, 0, 5, 0
    ...     def encode(self, input_ids, attention_mask): return input_ids
    ...     def start(self, source, rows_per_source=1): return None
    ...     def step(self, state, input_ids): return np.eye(8, dtype=np.float32)[input_ids + 1]
    ...     def trim(self, state, accepted): pass
    ...     def keep(self, state, sources): pass
    >>> found = speculative(Counter(), Counter(), [[3]])
    >>> found.sequences.tolist(), found.decoder_calls, found.drafted, found.accepted
    ([[1, 2, 3, 4, 5]], 1, 4, 4)
    """
    most = as_count(max_draft, "max_draft", at_least=1)
    if sampling is not None and not isinstance(sampling, Sampling):
        raise InputError(f"sampling is {sampling!r}; give a Sampling, or None for the likeliest tokens.")
    bounds: dict[str, Any] = dict(
        max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens, decoder_input_ids=decoder_input_ids,
        forced_bos_token_id=forced_bos_token_id, decoder_start_token_id=decoder_start_token_id,
        methods=("trim", "keep"),
    )  # fmt: skip
    request = GenerationInputs.checked(backend, input_ids, attention_mask, **bounds)
    GenerationInputs.checked(draft, input_ids, attention_mask, guesses=True, **bounds)
    for name in _SAME:
        theirs, ours = getattr(draft, name), getattr(backend, name)
        if theirs != ours:
            raise InputError(
                f"The draft's {name} is {theirs} and the model's {ours}: give a draft that was trained with the same "
                "tokenizer, such as a student of the model."
            )
    draws = generators(seed, len(request.ids))
    return StepStream(
        request.prefix[:, 1:], backend.pad_token_id, _steps(backend, draft, request, most, sampling, draws)
    )


def _steps(
    backend: Backend,
    draft: Backend,
    request: GenerationInputs,
    most: int,
    sampling: Sampling | None,
    draws: list[np.random.Generator],
) -> Iterator[Step]:
    if sampling is None:
        yield from verify_drafts(
            backend, request, DraftModel(draft, request, most), GreedyVerifier(backend, request.rules)
        )
    else:
        guesser = SamplingDraftModel(draft, request, most, sampling, draws)
        yield from verify_drafts(backend, request, guesser, RejectionSampler(backend, guesser, request))


class RejectionSampler:
    """The `drafts.Verifier` of speculative sampling.

    Args:
        backend: of the model whose distribution it shall be.
        guesser: which drew the guesses.
        request: whose ends and rules count.
    """

    def __init__(self, backend: Backend, guesser: SamplingDraftModel, request: GenerationInputs):
        self._step, self._guesser = backend.step, guesser
        self._ends, self._never = request.eos_token_ids, request.rules.suppress_tokens

    def __call__(
        self, state: State, tokens: np.ndarray, rows: Sequence[int], drafts: Drafts, blocked: Sequence[int]
    ) -> Drafts:
        guesser, width = self._guesser, 1 + max(map(len, drafts))
        logits = mask_eos(self._step(state, tokens[:, None])[:, 0, -width:], self._ends, blocked, self._never)
        histories = (
            [*guesser.texts[row], *draft[:count]]
            for row, draft in zip(rows, drafts, strict=True)
            for count in range(width)
        )
        odds = next_token_probs(logits.reshape(-1, logits.shape[-1]), histories, guesser.sampling).reshape(logits.shape)
        return [
            accept_or_resample(draft, [each[place] for each in guesser.odds], odds[place], guesser.draws[row])
            for place, (row, draft) in enumerate(zip(rows, drafts, strict=True))
        ]


def accept_or_resample(
    draft: Sequence[int], theirs: Sequence[np.ndarray], ours: Sequence[np.ndarray], random: np.random.Generator
) -> list[int]:
    """How many guesses stay, and what comes after them: together distributed as if all were drawn from ``ours``.

    A guess x that was drawn from q stays with probability min(1, p(x) / q(x)). Thus x comes out with probability
    min(p(x), q(x)); what is missing of p(x) is max(0, p(x) - q(x)), and that is what replaces a guess that goes.

    Args:
        draft: m guesses.
        theirs: for each at least, the distribution q (V,) that it was drawn from.
        ours: m + 1 distributions p (V,) at least: at each guess, and after the last.
        random: of this row.

    Returns:
        1 to m + 1 tokens.

    >>> certain = np.eye(3)
    >>> accept_or_resample([0, 1], certain[[0, 1]], certain[[0, 2, 1]], np.random.default_rng(0))
    [0, 2]
    """
    for count, guess in enumerate(draft):
        p, q = ours[count], theirs[count]
        if random.random() * q[guess] >= p[guess]:
            missing = np.maximum(p - q, 0)
            # Nothing is missing where p and q are equal but for rounding; then the guess is as good as any.
            return [*draft[:count], int(draw(missing if missing.any() else p, random.random()))]
    return [*draft, int(draw(ours[len(draft)], random.random()))]
