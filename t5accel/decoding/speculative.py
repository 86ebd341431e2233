"""Speculative decoding: a smaller model guesses, the larger one verifies all guesses at once.

Leviathan, Kalman and Matias (2023) and Chen et al. (2023) found how guesses can be drawn at random and accepted or
replaced so that what comes out has exactly the larger model's distribution.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from t5accel.checks import as_count
from t5accel.decoding.backend import Backend, State
from t5accel.decoding.distribution import Sampling, draw
from t5accel.decoding.draft_model import Guesser, RandomGuesser, odds_after
from t5accel.decoding.drafting import Drafts, Likeliest, verified, without
from t5accel.decoding.request import Request, Step, Steps, from_steps
from t5accel.decoding.sampling import generators
from t5accel.errors import InputError

_SAME = ("vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id")


@from_steps
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
) -> Steps:
    """Generate with ``backend``, helped by the guesses of a faster model.

    Without ``sampling`` the tokens are those of `greedy.greedy` on ``backend``, whatever the draft guesses and in
    whichever precision it is, but for the rounding of floats that `lookup.lookup` explains.

    With ``sampling`` every row is distributed as `sampling.sample` would draw it. Guesses are drawn from the draft's
    distribution q and accepted with probability min(1, p / q), p being that of ``backend``; in place of the first one
    that is not, a token is drawn from max(0, p - q), normalised. Both are changed in the same way before that
    (temperature, top-k, …), so a guess that p excludes is never accepted.

    How long a row's next draft is depends on how its last ones did (`draft_lengths.DraftLength`). The draft has a state
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
    request = Request.checked(backend, input_ids, attention_mask, **bounds)
    Request.checked(draft, input_ids, attention_mask, guesses=True, **bounds)
    for name in _SAME:
        theirs, ours = getattr(draft, name), getattr(backend, name)
        if theirs != ours:
            raise InputError(
                f"The draft's {name} is {theirs} and the model's {ours}: give a draft that was trained with the same "
                "tokenizer, such as a student of the model."
            )
    draws = generators(seed, len(request.ids))
    return Steps(request.prefix[:, 1:], backend.pad_token_id, _steps(backend, draft, request, most, sampling, draws))


def _steps(
    backend: Backend,
    draft: Backend,
    request: Request,
    most: int,
    sampling: Sampling | None,
    draws: list[np.random.Generator],
) -> Iterator[Step]:
    if sampling is None:
        yield from verified(backend, request, Guesser(draft, request, most), Likeliest(backend, request.rules))
    else:
        guesser = RandomGuesser(draft, request, most, sampling, draws)
        yield from verified(backend, request, guesser, Rejection(backend, guesser, request))


class Rejection:
    """The `drafts.Choice` of speculative sampling.

    Args:
        backend: of the model whose distribution it shall be.
        guesser: which drew the guesses.
        request: whose ends and rules count.
    """

    def __init__(self, backend: Backend, guesser: RandomGuesser, request: Request):
        self._step, self._guesser = backend.step, guesser
        self._ends, self._never = request.ends, request.rules.suppress_tokens

    def __call__(
        self, state: State, tokens: np.ndarray, rows: Sequence[int], drafts: Drafts, blocked: Sequence[int]
    ) -> Drafts:
        guesser, width = self._guesser, 1 + max(map(len, drafts))
        logits = without(self._step(state, tokens[:, None])[:, 0, -width:], self._ends, blocked, self._never)
        histories = (
            [*guesser.texts[row], *draft[:count]]
            for row, draft in zip(rows, drafts, strict=True)
            for count in range(width)
        )
        odds = odds_after(logits.reshape(-1, logits.shape[-1]), histories, guesser.sampling).reshape(logits.shape)
        return [
            accept(draft, [each[place] for each in guesser.odds], odds[place], guesser.draws[row])
            for place, (row, draft) in enumerate(zip(rows, drafts, strict=True))
        ]


def accept(
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
    >>> accept([0, 1], certain[[0, 1]], certain[[0, 2, 1]], np.random.default_rng(0))
    [0, 2]
    """
    for count, guess in enumerate(draft):
        p, q = ours[count], theirs[count]
        if random.random() * q[guess] >= p[guess]:
            missing = np.maximum(p - q, 0)
            # Nothing is missing where p and q are equal but for rounding; then the guess is as good as any.
            return [*draft[:count], int(draw(missing if missing.any() else p, random.random()))]
    return [*draft, int(draw(ours[len(draft)], random.random()))]
