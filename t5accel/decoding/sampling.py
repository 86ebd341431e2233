"""Sampling: every next token is drawn from the model's distribution, as transformers' ``generate(do_sample=True)``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from t5accel.checks import as_count
from t5accel.decoding.backend import Backend, State
from t5accel.decoding.beam import FIRST_RUN, LONGEST_RUN, shrunk
from t5accel.decoding.distribution import Sampling, as_sampling, draw, probabilities
from t5accel.decoding.request import Request, Step, Steps, from_steps
from t5accel.decoding.rules import ended


@from_steps
def sample(
    backend: Backend,
    input_ids: Any,
    attention_mask: Any = None,
    *,
    sampling: Sampling | None = None,
    seed: int = 0,
    num_return_sequences: int = 1,
    max_new_tokens: int = 64,
    min_new_tokens: int | None = None,
    decoder_input_ids: Any = None,
    forced_bos_token_id: int | None = None,
    decoder_start_token_id: int | None = None,
    **options: float,
) -> Steps:
    """Draw K answers to each source.

    The K rows of a source share its cross-attention. Every row has a random generator of its own, made from the seed,
    the source's place in the batch and the row's among the K. So the same call gives the same answers, more answers
    leave the first ones as they are, and those to one source do not depend on what else is in the batch, but for the
    rounding of logits. A backend that offers ``run_samples`` is asked for up to `LONGEST_RUN` steps at once, with the
    same draws.

    Args:
        backend, input_ids, attention_mask, max_new_tokens, min_new_tokens: see `greedy.greedy`.
        decoder_input_ids, forced_bos_token_id, decoder_start_token_id: likewise.
        sampling: what is changed in the distribution; by default nothing.
        seed: at least 0.
        num_return_sequences: K.
        options: the fields of `Sampling` by name, in place of one: ``sample(…, temperature=0.7, top_p=0.9)``.

    Returns:
        ``sequences`` (B * K, L) int64, the K answers to the first source, then those to the next. Rows that end early
        are padded; sources all of whose rows have ended leave the batch as soon as half of it is done.

    Raises:
        InputError: a shape, type or bound is wrong, or an option is unknown.

    >>> class Coin:  # a toy backend: 1 or 2, each as likely, without an end
    ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 4, 0, 3, 0
    ...     def encode(self, input_ids, attention_mask): return input_ids
    ...     def start(self, source, rows_per_source=1): return None
    ...     def step(self, state, input_ids): return np.log([[[[1e-9, 0.5, 0.5, 1e-9]]]]) + 0 * input_ids[..., None]
    ...     def keep(self, state, sources): pass
    >>> sample(Coin(), [[1]], seed=2, num_return_sequences=3, max_new_tokens=6).sequences.tolist()
    [[2, 1, 2, 2, 2, 1], [2, 2, 2, 1, 2, 1], [2, 2, 2, 2, 2, 2]]
    """
    sampling = as_sampling(sampling, options)
    rows_per_source = as_count(num_return_sequences, "num_return_sequences", at_least=1)
    request = Request.checked(
        backend, input_ids, attention_mask, max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens,
        decoder_input_ids=decoder_input_ids, forced_bos_token_id=forced_bos_token_id,
        decoder_start_token_id=decoder_start_token_id, methods=("keep",),
    )  # fmt: skip
    draws = generators(seed, len(request.ids), rows_per_source)
    given = np.repeat(request.prefix, rows_per_source, axis=0)
    steps = run_steps if hasattr(backend, "run_samples") else _steps
    return Steps(given[:, 1:], backend.pad_token_id, steps(backend, request, given, sampling, draws))


def generators(seed: int, batch: int, rows_per_source: int = 1) -> list[np.random.Generator]:
    """A random generator for each row of each source, row by row; which one depends on the seed and the two places.

    >>> one, another = generators(3, 1)[0], generators(3, 2, 5)[0]
    >>> one.random() == another.random()
    True
    """
    seed = as_count(seed, "seed", at_least=0)
    places = [(source, row) for source in range(batch) for row in range(rows_per_source)]
    return [np.random.default_rng(np.random.SeedSequence(seed, spawn_key=place)) for place in places]


def run_steps(
    backend: Backend, request: Request, given: np.ndarray, sampling: Sampling, draws: list[np.random.Generator],
    state: State | None = None,
) -> Iterator[Step]:  # fmt: skip
    """The steps of `sample` by ``run_samples``: several at a time, of which those after a row's end are dropped.

    Args:
        backend, request, sampling: as of `sample`.
        given: (B * K, T) int64, what each row begins with.
        draws: a generator for each row.
        state: of a source that is encoded already, if there is one.
    """
    batch, per_source = len(request.ids), len(draws) // len(request.ids)
    if state is None:
        state = backend.start(backend.encode(request.ids, request.mask), rows_per_source=per_source)
    rows = np.arange(len(draws)).reshape(batch, per_source)  # which row of the result each one in the state is
    is_open, history = np.ones(len(draws), dtype=bool), given
    unread, length, at_once = given, 0, FIRST_RUN  # (R, T), of all rows, in the state or not
    while True:
        if (forced := request.forced(length)) is not None:
            found = np.full((len(draws), 1), forced)
            for generator in draws:  # as everywhere, each token takes one number
                generator.random()
            unread = np.concatenate([unread, found], axis=1)
        else:
            count = request.rules.steps_alike(length, shortest=request.min_new_tokens, longest=request.max_new_tokens)
            uniform = np.array([draws[row].random(min(count, at_once)) for row in rows.ravel()])
            new = backend.run_samples(
                state, unread[rows], uniform.reshape(*rows.shape, -1), sampling=sampling,
                forbidden=request.forbidden(length), history=history[rows],
            )  # (n, K, count) # fmt: skip
            found = np.full((len(draws), new.shape[2]), backend.pad_token_id, dtype=np.int64)
            found[rows] = new
            unread, at_once = found[:, -1:], min(2 * at_once, LONGEST_RUN)
        history = np.concatenate([history, found], axis=1)
        for tokens in found.T:
            going = np.flatnonzero(is_open)
            yield Step(going, tokens[going])
            length += 1
            is_open[going[ended(tokens[going], request.ends)]] = False
            if not is_open.any() or length == request.max_new_tokens:
                return
        if (kept := shrunk(np.flatnonzero(is_open[rows].any(axis=1)), len(rows))) is not None:
            backend.keep(state, kept)
            rows = rows[kept]


def _steps(
    backend: Backend, request: Request, given: np.ndarray, sampling: Sampling, draws: list[np.random.Generator]
) -> Iterator[Step]:
    pad, batch, per_source = backend.pad_token_id, len(request.ids), len(draws) // len(request.ids)
    state = backend.start(backend.encode(request.ids, request.mask), rows_per_source=per_source)
    rows = np.arange(len(draws)).reshape(batch, per_source)  # which row of the result each one in the state is
    is_open = np.ones(len(draws), dtype=bool)
    history = given if sampling.repetition_penalty != 1 else None
    step_input, length = given.reshape(batch, per_source, -1), 0
    while True:
        places = np.flatnonzero(is_open[rows])
        going = rows.ravel()[places]
        logits = backend.step(state, step_input)[:, :, -1].reshape(rows.size, -1)[places]
        if (forbidden := request.forbidden(length)) is not None:
            logits[:, forbidden] = -np.inf
        odds = probabilities(logits, None if history is None else history[going], sampling)
        tokens = draw(odds, np.array([draws[row].random() for row in going]))
        if (forced := request.forced(length)) is not None:
            tokens = np.full_like(tokens, forced)
        yield Step(going, tokens)
        length += 1
        is_open[going[ended(tokens, request.ends)]] = False
        left = is_open[rows].any(axis=1)
        if not left.any() or length == request.max_new_tokens:
            return
        new = np.full(rows.size, pad, dtype=np.int64)
        new[places] = tokens
        if history is not None:
            column = np.full((len(draws), 1), pad, dtype=np.int64)
            column[rows.ravel(), 0] = new
            history = np.concatenate([history, column], axis=1)
        step_input = new.reshape(*rows.shape, 1)
        if 2 * left.sum() <= len(rows):
            kept = np.flatnonzero(left)
            backend.keep(state, kept)
            rows, step_input = rows[kept], step_input[kept]
