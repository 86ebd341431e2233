"""Greedy search: at every step the likeliest token, as transformers' ``generate(num_beams=1, do_sample=False)``."""

from __future__ import annotations

from typing import Any

import numpy as np

from t5accel.decoding.backend import Backend, Generated, as_batch, as_count, as_integers
from t5accel.errors import InputError

_NEEDED = ("vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id", "encode", "start", "step")


def greedy(
    backend: Backend,
    input_ids: Any,
    attention_mask: Any = None,
    *,
    max_new_tokens: int = 64,
    min_new_tokens: int = 0,
    decoder_input_ids: Any = None,
) -> Generated:
    """Generate until every row ends or ``max_new_tokens`` are there.

    Args:
        backend: any runtime that satisfies `Backend`.
        input_ids: (B, S) integers, numpy or torch.
        attention_mask: (B, S), by default 1 where ``input_ids`` is not the pad id.
        max_new_tokens: upper bound on the length L of the result.
        min_new_tokens: the end token is forbidden before that many; equal to ``max_new_tokens`` it forces the length.
        decoder_input_ids: (B, T) a prefix to go on from, with or without the start token in front; it is part of the
            returned sequences (without the start token) and not counted as new.

    Returns:
        ``sequences`` (B, L) int64. Rows that end early are padded; they leave the batch as soon as half of it is done.

    Raises:
        InputError: a shape, type or bound is wrong.

    >>> import numpy as np
    >>> class Counter:  # a toy backend whose next token is the last one plus one, and which ends after 4
    ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 6, 0, 5, 0
    ...     def encode(self, input_ids, attention_mask): return input_ids
    ...     def start(self, source, rows_per_source=1): return None
    ...     def step(self, state, input_ids): return np.eye(6, dtype=np.float32)[input_ids + 1]
    >>> greedy(Counter(), [[3]], max_new_tokens=8).sequences.tolist()
    [[1, 2, 3, 4, 5]]
    """
    missing = [name for name in _NEEDED if not hasattr(backend, name)]
    if missing:
        raise InputError(
            f"{type(backend).__name__} is no backend, it lacks {', '.join(missing)}: wrap a model in TorchEager."
        )
    ids, mask = as_batch(input_ids, attention_mask, pad_token_id=backend.pad_token_id)
    longest = as_count(max_new_tokens, "max_new_tokens", at_least=1)
    shortest = as_count(min_new_tokens, "min_new_tokens", at_least=0)
    if shortest > longest:
        raise InputError(f"min_new_tokens is {shortest}, more than max_new_tokens, {longest}.")
    if ids.max() >= backend.vocab_size:
        raise InputError(f"input_ids holds {ids.max()}; the model's vocabulary has {backend.vocab_size} entries.")
    prefix = _prefix(backend, decoder_input_ids, len(ids))

    state = backend.start(backend.encode(ids, mask))
    columns = [prefix[:, 1:]]  # grows as it goes: max_new_tokens may be far more than is ever needed
    active = np.arange(len(ids))  # which row of the result each row of the state writes to
    unfinished = np.ones(len(ids), dtype=bool)
    step_input, length = prefix, 0
    while length < longest:
        logits = backend.step(state, step_input[:, None, :])[:, 0, -1]
        if length < shortest:
            logits = logits.copy()
            logits[:, backend.eos_token_id] = -np.inf
        tokens = np.where(unfinished[active], logits.argmax(axis=-1), backend.pad_token_id)
        column = np.full((len(ids), 1), backend.pad_token_id, dtype=np.int64)
        column[active, 0] = tokens
        columns.append(column)
        length += 1
        unfinished[active[tokens == backend.eos_token_id]] = False
        left = unfinished[active]
        if not left.any():
            break
        if 2 * left.sum() <= len(active):
            kept = np.flatnonzero(left)
            backend.keep(state, kept)
            active, tokens = active[kept], tokens[kept]
        step_input = tokens[:, None]
    return Generated(np.concatenate(columns, axis=1), decoder_calls=length)


def _prefix(backend: Backend, decoder_input_ids: Any, batch: int) -> np.ndarray:
    """(B, T) with the start token in front."""
    start = np.full((batch, 1), backend.decoder_start_token_id, dtype=np.int64)
    if decoder_input_ids is None:
        return start
    given = as_integers(decoder_input_ids, "decoder_input_ids", rank=2)
    if len(given) != batch or not given.shape[1]:
        raise InputError(
            f"decoder_input_ids has shape {given.shape}; give one non-empty row for each of {batch} sources."
        )
    if given.min() < 0 or given.max() >= backend.vocab_size:
        raise InputError(f"decoder_input_ids must lie in 0 … {backend.vocab_size - 1}.")
    has_start = (given[:, 0] == backend.decoder_start_token_id).all()
    return given if has_start else np.concatenate([start, given], axis=1)
