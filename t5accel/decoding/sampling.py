"""Sampling, as transformers' ``generate(do_sample=True)``, with its logits processors in its order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from t5accel.checks import as_count, is_number
from t5accel.decoding.backend import NOT_FINITE, Backend, State, shrunk
from t5accel.decoding.beam import FIRST_RUN, MAX_RUN_STEPS
from t5accel.decoding.request import GenerationInputs, Step, StepStream, collects_steps
from t5accel.decoding.token_constraints import is_eos
from t5accel.errors import EngineError, InputError


@dataclass(frozen=True)
class SamplingParams:
    """Changes of the next-token distribution, in this order; by default none.

    Raises ``InputError`` if a value is out of bounds.

    Attributes:
        repetition_penalty: above 0. Positive logits of tokens in the history are divided by it, negative ones
            multiplied (Keskar et al. 2019).
        temperature: above 0. Logits are divided by it: below 1 likely tokens become likelier.
        top_k: keep so many of the likeliest tokens, and all that are as likely as the last of them; 0 keeps all.
        top_p: above 0, at most 1. Keep the likeliest tokens whose probabilities sum to top_p (Holtzman et al. 2020).
        min_p: 0 to 1. Keep tokens that are at least so many times as likely as the likeliest (Nguyen et al. 2025).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        as_count(self.top_k, "top_k", at_least=0)
        for name in ("temperature", "repetition_penalty"):
            if not 1e-30 <= _number(self, name) <= 1e30:
                raise InputError(
                    f"{name} must be a number above 0, from 1e-30 to 1e30, got {getattr(self, name)!r:.80}. For the "
                    "likeliest token at every step use greedy()."
                )
        if not 0 < _number(self, "top_p") <= 1:
            raise InputError(f"top_p must be a number above 0 and at most 1, got {self.top_p!r}.")
        if not 0 <= _number(self, "min_p") <= 1:
            raise InputError(f"min_p must be a number from 0 to 1, got {self.min_p!r}.")


def probabilities(
    logits: np.ndarray, history: np.ndarray | None, sampling: SamplingParams, *, history_mask: np.ndarray | None = None
) -> np.ndarray:
    """Compute the distribution that next tokens are drawn from: (…, V) float64.

    The numbers are those of transformers' ``LogitsProcessor`` classes, but in float64: a token at the very edge of
    ``top_p`` or ``min_p``, within float32's rounding, may fall on the other side.

    ``logits`` (…, V) are not changed; ``EngineError`` if a row's maximum is not finite. ``history`` (…, L) has the
    tokens of each row so far, with the start token as in transformers, 0 in ``history_mask`` marks padding;
    ``repetition_penalty`` alone needs it.
    """
    scores = np.array(logits, dtype=np.float64)
    vocab_size = scores.shape[-1]
    if sampling.repetition_penalty != 1:
        seen = _seen(history, history_mask, scores.shape)
        penalised = np.where(scores < 0, scores * sampling.repetition_penalty, scores / sampling.repetition_penalty)
        np.copyto(scores, penalised, where=seen)
    highest = scores.max(axis=-1, keepdims=True)
    if not np.isfinite(highest).all():
        raise EngineError(NOT_FINITE)
    scores -= highest  # before the division, which might overflow
    scores /= sampling.temperature
    if 0 < sampling.top_k < vocab_size:
        last = vocab_size - sampling.top_k
        scores[scores < np.partition(scores, last, axis=-1)[..., last, None]] = -np.inf
    odds = np.exp(scores)
    odds /= odds.sum(axis=-1, keepdims=True)
    if sampling.top_p < 1:
        for row in odds.reshape(-1, vocab_size):
            _keep_nucleus(row, sampling.top_p)
    if sampling.min_p > 0:
        odds[odds < sampling.min_p * odds.max(axis=-1, keepdims=True)] = 0
    odds /= odds.sum(axis=-1, keepdims=True)
    return odds


def sample_token(odds: np.ndarray, uniform: Any) -> np.ndarray:
    """Draw tokens (…) by inverting the distribution function at ``uniform`` numbers (…) in [0, 1).

    Odds (…, V) need not sum to 1; a token with odds 0 is never drawn.
    """
    sums = odds.cumsum(axis=-1)
    total = sums[..., -1]
    wanted = np.minimum(np.asarray(uniform) * total, np.nextafter(total, 0))  # a product may round up to the total
    return (sums <= wanted[..., None]).sum(axis=-1)


def _number(sampling: SamplingParams, name: str) -> float:
    """The value, or NaN if it is not a number: then no bound holds."""
    value = getattr(sampling, name)
    return value if is_number(value) else math.nan


def _seen(tokens: np.ndarray, mask: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
    """(…, V) bool: the tokens in the history of each row."""
    vocab_size = shape[-1]
    seen = np.zeros((*shape[:-1], vocab_size + 1), dtype=bool)  # the last column is for padding
    np.put_along_axis(seen, tokens if mask is None else np.where(mask, tokens, vocab_size), True, axis=-1)
    return seen[..., :-1]


def _keep_nucleus(odds: np.ndarray, top_p: float) -> None:
    """Zero the smallest of (V,) probabilities that sum to at most 1 - top_p; the largest stays."""
    # Only tokens from (1 - top_p) / V on are sorted: all others together have less than 1 - top_p.
    leaving = 1 - top_p
    near = np.flatnonzero(odds >= leaving / len(odds))
    rising = near[np.argsort(odds[near], kind="stable")]
    values = odds[rising]
    stays = (1 - values.sum()) + values.cumsum() > leaving
    stays[-1] = True
    odds[:] = 0
    odds[rising[stays]] = values[stays]


@collects_steps
def sample(
    backend: Backend,
    input_ids: Any,
    attention_mask: Any = None,
    *,
    sampling: SamplingParams | None = None,
    seed: int = 0,
    num_return_sequences: int = 1,
    max_new_tokens: int = 64,
    min_new_tokens: int | None = None,
    decoder_input_ids: Any = None,
    forced_bos_token_id: int | None = None,
    decoder_start_token_id: int | None = None,
    **options: float,
) -> StepStream:
    """Draw K answers to each source.

    Every row has its own random generator, made from the seed, the source's place in the batch and the row's among the
    K. So a call is reproducible, and answers depend neither on ``num_return_sequences`` nor on other sources, except by
    the rounding of logits. Arguments that are not listed here are those of `greedy`.

    Args:
        sampling: changes of the distribution; by default none.
        seed: at least 0.
        num_return_sequences: K.
        options: the fields of `SamplingParams` by name instead: ``sample(…, temperature=0.7, top_p=0.9)``.

    Returns:
        ``sequences`` (B * K, L) int64, padded on the right, the K answers to the first source first.

    Raises:
        InputError: as for `greedy`, or an option of `SamplingParams` is unknown or out of range.

    >>> class Coin:  # a toy backend: 1 or 2, each as likely, without an end
    ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 4, 0, 3, 0
    ...     def encode(self, input_ids, attention_mask): return input_ids
    ...     def new_state(self, source, rows_per_source=1): return None
    ...     def step(self, state, input_ids): return np.log([[[[1e-9, 0.5, 0.5, 1e-9]]]]) + 0 * input_ids[..., None]
    ...     def select_sources(self, state, sources): pass
    >>> sample(Coin(), [[1]], seed=2, num_return_sequences=3, max_new_tokens=6).sequences.tolist()
    [[2, 1, 2, 2, 2, 1], [2, 2, 2, 1, 2, 1], [2, 2, 2, 2, 2, 2]]
    """
    names = [field.name for field in fields(SamplingParams)]
    if unknown := options.keys() - {*names}:
        raise InputError(f"Options of sampling must be of {', '.join(names)}, got {', '.join(sorted(unknown))}.")
    if sampling is not None and (options or not isinstance(sampling, SamplingParams)):
        raise InputError(f"sampling must be a SamplingParams, without its options beside it, got {sampling!r}.")
    sampling = sampling or SamplingParams(**options)
    rows_per_source = as_count(num_return_sequences, "num_return_sequences", at_least=1)
    request = GenerationInputs.checked(
        backend, input_ids, attention_mask, max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens,
        decoder_input_ids=decoder_input_ids, forced_bos_token_id=forced_bos_token_id,
        decoder_start_token_id=decoder_start_token_id, methods=("select_sources",),
    )  # fmt: skip
    draws = generators(seed, len(request.ids), rows_per_source)
    given = np.repeat(request.prefix, rows_per_source, axis=0)
    return StepStream(given[:, 1:], backend.pad_token_id, run_steps(backend, request, given, sampling, draws))


def generators(seed: int, batch: int, rows_per_source: int = 1) -> list[np.random.Generator]:
    """Make a random generator for each row of each source."""
    seed = as_count(seed, "seed", at_least=0)
    return [generator(seed, source, row) for source in range(batch) for row in range(rows_per_source)]


def generator(seed: int, source: int, row: int) -> np.random.Generator:
    """Make the random generator of one row of one source."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(source, row)))


def run_steps(
    backend: Any,
    request: GenerationInputs,
    given: np.ndarray,
    sampling: SamplingParams,
    draws: list[np.random.Generator],
    state: State | None = None,
) -> Iterator[Step]:
    """Yield the steps of `sample`: several at a time by ``run_samples``, where the backend has it.

    ``given`` (B * K, T) is the prefix of each row; ``state`` is new, for a source that is encoded already.
    """
    batch, per_source = len(request.ids), len(draws) // len(request.ids)
    if state is None:
        state = backend.new_state(backend.encode(request.ids, request.mask), rows_per_source=per_source)
    rows = np.arange(len(draws)).reshape(batch, per_source)  # the row of the result of each row in the state
    is_open, history = np.ones(len(draws), dtype=bool), given
    unread, length, at_once = given, 0, FIRST_RUN  # unread: (B * K, T), also of rows that left the state
    on_device = hasattr(backend, "run_samples")
    while True:
        if (forced := request.forced_token(length)) is not None:
            found = np.full((len(draws), 1), forced)
            for generator in draws:  # as everywhere, each token takes one number
                generator.random()
            unread = np.concatenate([unread, found], axis=1)
        else:
            count = request.rules.steps_until_change(
                length, shortest=request.min_new_tokens, longest=request.max_new_tokens
            )
            count = min(count, at_once) if on_device else 1
            uniform = np.array([draws[row].random(count) for row in rows.ravel()]).reshape(*rows.shape, count)
            found = np.full((len(draws), count), backend.pad_token_id, dtype=np.int64)
            suppressed = request.suppressed(length)
            if on_device:
                found[rows] = backend.run_samples(
                    state, unread[rows], uniform, sampling=sampling, suppressed=suppressed, history=history[rows]
                )
            else:
                places = is_open[rows]  # (n, K)
                logits = backend.step(state, unread[rows])[:, :, -1][places]
                if suppressed is not None:
                    logits[:, suppressed] = -np.inf
                odds = probabilities(logits, history[rows][places], sampling)
                found[rows[places], 0] = sample_token(odds, uniform[places, 0])
            unread, at_once = found[:, -1:], min(2 * at_once, MAX_RUN_STEPS)
        history = np.concatenate([history, found], axis=1)
        for tokens in found.T:
            going = np.flatnonzero(is_open)
            yield Step(going, tokens[going])
            length += 1
            is_open[going[is_eos(tokens[going], request.eos_token_ids)]] = False
            if not is_open.any() or length == request.max_new_tokens:
                return
        kept = np.flatnonzero(is_open[rows].any(axis=1))
        if on_device:
            kept = shrunk(kept, len(rows))
        if kept is not None and 2 * len(kept) <= len(rows):
            backend.select_sources(state, kept)
            rows = rows[kept]
