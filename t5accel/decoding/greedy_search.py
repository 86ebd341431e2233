"""Greedy search: at every step the likeliest token, as transformers' ``generate(num_beams=1, do_sample=False)``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from t5accel.decoding.backend import Backend, Forbidden, State
from t5accel.decoding.request import GenerationInputs, Step, StepStream, collects_steps
from t5accel.decoding.token_constraints import is_eos

STEPS_PER_SYNC = 16  # steps between two looks at which rows have ended, where a backend takes several without the host


@collects_steps
def greedy(
    backend: Backend,
    input_ids: Any,
    attention_mask: Any = None,
    *,
    max_new_tokens: int = 64,
    min_new_tokens: int | None = None,
    decoder_input_ids: Any = None,
    forced_bos_token_id: int | None = None,
    decoder_start_token_id: int | None = None,
) -> StepStream:
    """Generate until every row has ended or has ``max_new_tokens``.

    A backend that offers ``next_tokens`` is asked for tokens, which it may find without computing all logits; one that
    offers ``run_greedy``, for up to `STEPS_PER_SYNC` of them at once, of which those after a row's end are dropped.

    Args:
        backend: any runtime that satisfies `Backend`.
        input_ids: (B, S) integers, numpy or torch.
        attention_mask: (B, S), by default 1 where ``input_ids`` is not the pad id.
        max_new_tokens: upper bound on the length L of the result.
        min_new_tokens: no end token is chosen before that many; equal to ``max_new_tokens`` it forces the length. By
            default the model's own minimum (`rules`).
        decoder_input_ids: (B, T) a prefix to go on from, with or without the start token in front; it is part of the
            returned sequences (without the start token) and not counted as new.
        forced_bos_token_id: the first new token, where no prefix is given: in NLLB and mBART the language to write. By
            default what the model's own `rules` say; these hold in any case.
        decoder_start_token_id: what the decoder reads first: in mBART of 25 languages the one to write. By default the
            model's own.

    Returns:
        ``sequences`` (B, L) int64. Rows that end early are padded; they leave the batch as soon as half of it is done.

    Raises:
        InputError: a shape, type or bound is wrong, or the model's ``generation_config`` asks for what no loop of ours
            applies (`TokenConstraints.require_supported`).

    >>> import numpy as np
    >>> class Counter:  # a toy backend whose next token is the last one plus one, and which ends after 4
    ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 6, 0, 5, 0
    ...     def encode(self, input_ids, attention_mask): return input_ids
    ...     def start(self, source, rows_per_source=1): return None
    ...     def step(self, state, input_ids): return np.eye(6, dtype=np.float32)[input_ids + 1]
    >>> greedy(Counter(), [[3]], max_new_tokens=8).sequences.tolist()
    [[1, 2, 3, 4, 5]]
    """
    request = GenerationInputs.checked(
        backend, input_ids, attention_mask, max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens,
        decoder_input_ids=decoder_input_ids, forced_bos_token_id=forced_bos_token_id,
        decoder_start_token_id=decoder_start_token_id,
    )  # fmt: skip
    return StepStream(request.prefix[:, 1:], backend.pad_token_id, greedy_steps(backend, request))


def greedy_steps(backend: Backend, request: GenerationInputs, state: State | None = None) -> Iterator[Step]:
    """The steps of `greedy`, from the ``state`` of a source that is encoded already, if one is given."""
    next_tokens = getattr(backend, "next_tokens", None) or partial(_next_tokens, backend)
    run_greedy = getattr(backend, "run_greedy", None)
    if state is None:
        state = backend.start(backend.encode(request.ids, request.mask))
    active = np.arange(len(request.prefix))  # which row of the result each row of the state writes to
    is_open = np.ones(len(active), dtype=bool)  # those that have ended stay in the state until half of it has
    step_input, length, forced = request.prefix, 0, None
    while True:
        forbidden = request.suppressed(length)
        if run_greedy is None or not length or forced is not None:
            found = next_tokens(state, step_input[:, None, :], forbidden=forbidden)
        else:
            bound = request.max_new_tokens if length >= request.min_new_tokens else request.min_new_tokens
            found = run_greedy(state, min(bound - length, STEPS_PER_SYNC), forbidden=forbidden)[:, 0]
        for tokens in found.T:
            if (forced := request.forced_token(length)) is not None:
                tokens = np.full_like(tokens, forced)
            yield Step(active[is_open], tokens[is_open])
            length += 1
            is_open &= ~is_eos(tokens, request.eos_token_ids)
            left = np.count_nonzero(is_open)
            if not left or length == request.max_new_tokens:
                return
        if 2 * left <= len(active):
            kept = np.flatnonzero(is_open)
            backend.keep(state, kept)
            active, tokens, is_open = active[kept], tokens[kept], is_open[kept]
        step_input = np.where(is_open, tokens, backend.pad_token_id)[:, None]


def argmax_tokens(logits: np.ndarray, forbidden: Forbidden = None) -> np.ndarray:
    """The token of the largest logit: (…, V) -> (…) int64; the lowest id where some are equal, never ``forbidden``.

    >>> argmax_tokens(np.array([[1.0, 3.0, 3.0]])).tolist(), argmax_tokens(np.array([[1.0, 3.0, 3.0]]), forbidden=1).tolist()
    ([1], [2])
    """
    if forbidden is not None:
        logits = logits.copy()
        logits[..., forbidden] = -np.inf
    return logits.argmax(axis=-1)


def _next_tokens(backend: Backend, state: State, input_ids: np.ndarray, *, forbidden: Forbidden) -> np.ndarray:
    """By a step, for a backend that does not offer it: (B, K, T) -> (B, K)."""
    return argmax_tokens(backend.step(state, input_ids)[:, :, -1], forbidden)
