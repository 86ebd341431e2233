"""Greedy search, equal to transformers' ``generate(num_beams=1, do_sample=False)``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from t5accel.decoding.backend import Backend, State, SuppressedTokens
from t5accel.decoding.request import GenerationInputs, Step, StepStream, collects_steps
from t5accel.decoding.token_constraints import is_eos

STEPS_PER_SYNC = 16  # steps of run_greedy between two checks for rows that have ended


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
    """Choose the most probable token at every step.

    Args:
        input_ids: (B, S) integers, numpy, torch or lists.
        attention_mask: (B, S), by default 1 where ``input_ids`` is not the pad id, and everywhere if that ends answers.
        max_new_tokens: each row ends with an end token or after this many.
        min_new_tokens: no end token before this many; by default the model's minimum.
        decoder_input_ids: (B, T) prefix, all with or all without the start token; part of the result, but not new.
        forced_bos_token_id: the first new token unless a prefix is given, such as NLLB's target language. By default
            the model's; its other token constraints always hold.
        decoder_start_token_id: the decoder's first input, such as mBART-25's target language. By default the model's.

    Returns:
        ``sequences`` (B, L) int64, without the start token, padded on the right.

    Raises:
        InputError: an argument is invalid, or the model's ``generation_config`` sets an unsupported constraint.

    >>> class Counter:  # a toy backend whose next token is the last one plus one
    ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 6, 0, 5, 0
    ...     def encode(self, input_ids, attention_mask): return input_ids
    ...     def new_state(self, source, rows_per_source=1): return None
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
    """Yield the steps of `greedy`, from a new ``state`` if the source is encoded already."""
    next_tokens = getattr(backend, "next_tokens", None) or partial(_next_tokens, backend)
    run_greedy = getattr(backend, "run_greedy", None)
    if state is None:
        state = backend.new_state(backend.encode(request.ids, request.mask))
    active = np.arange(len(request.prefix))  # the row of the result that each row of the state writes to
    is_open = np.ones(len(active), dtype=bool)
    step_input, length, forced = request.prefix, 0, None
    while True:
        suppressed = request.suppressed(length)
        if run_greedy is None or not length or forced is not None:
            found = next_tokens(state, step_input[:, None, :], suppressed=suppressed)
        else:
            bound = request.max_new_tokens if length >= request.min_new_tokens else request.min_new_tokens
            found = run_greedy(state, min(bound - length, STEPS_PER_SYNC), suppressed=suppressed)[:, 0]
        for tokens in found.T:  # tokens after a row's end are dropped
            if (forced := request.forced_token(length)) is not None:
                tokens = np.full_like(tokens, forced)
            yield Step(active[is_open], tokens[is_open])
            length += 1
            is_open &= ~is_eos(tokens, request.eos_token_ids)
            open_rows = np.count_nonzero(is_open)
            if not open_rows or length == request.max_new_tokens:
                return
        if 2 * open_rows <= len(active):
            kept = np.flatnonzero(is_open)
            backend.select_sources(state, kept)
            active, tokens, is_open = active[kept], tokens[kept], is_open[kept]
        step_input = np.where(is_open, tokens, backend.pad_token_id)[:, None]


def argmax_tokens(logits: np.ndarray, suppressed: SuppressedTokens = None) -> np.ndarray:
    """Arg-max of (…, V) logits without ``suppressed``; of equal ones the lowest id."""
    if suppressed is not None:
        logits = logits.copy()
        logits[..., suppressed] = -np.inf
    return logits.argmax(axis=-1)


def _next_tokens(backend: Backend, state: State, input_ids: np.ndarray, *, suppressed: SuppressedTokens) -> np.ndarray:
    return argmax_tokens(backend.step(state, input_ids)[:, :, -1], suppressed)
