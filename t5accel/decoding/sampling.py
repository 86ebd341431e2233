"""Sampling: every next token is drawn from the model's distribution, as transformers' ``generate(do_sample=True)``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from t5accel.checks import as_count, is_number
from t5accel.decoding.backend import Backend, State
from t5accel.decoding.beam import FIRST_RUN, LONGEST_RUN, shrunk
from t5accel.decoding.request import GenerationInputs, Step, StepStream, collects_steps
from t5accel.decoding.token_constraints import is_eos
from t5accel.errors import InputError

# From logits to what a next token is drawn by, the numbers of transformers' processors in its order; and the draw.


@dataclass(frozen=True)
class SamplingParams:
    """How next tokens are drawn; what is left alone changes nothing. In the order in which it is applied:

    Attributes:
        repetition_penalty: above 0. The positive logits of tokens that stand in the history are divided by it and the
            negative ones multiplied (Keskar et al. 2019).
        temperature: above 0. All logits are divided by it: below 1 likely tokens become likelier.
        top_k: only that many of the likeliest tokens stay, and those as likely as the last of them; 0 for all.
        top_p: above 0, at most 1. The unlikeliest tokens that have 1 - top_p together leave (Holtzman et al. 2020).
        min_p: 0 to 1. Tokens leave that are less likely than this times the likeliest one (Nguyen et al. 2025).

    Raises:
        InputError: a value is out of these bounds.

    >>> SamplingParams(temperature=0.7, top_k=40).top_p
    1.0
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        as_count(self.top_k, "top_k", at_least=0)
        for name in ("temperature", "repetition_penalty"):
            if not 0 < _number(self, name) < math.inf:
                raise InputError(
                    f"{name} is {getattr(self, name)!r}; give a number above 0, 1 for no change. For the likeliest "
                    "token at every step there is greedy()."
                )
        if not 0 < _number(self, "top_p") <= 1:
            raise InputError(f"top_p is {self.top_p!r}; give a number above 0 and at most 1, which keeps all tokens.")
        if not 0 <= _number(self, "min_p") <= 1:
            raise InputError(f"min_p is {self.min_p!r}; give a number from 0, which keeps all tokens, to 1.")


def as_sampling(sampling: SamplingParams | None, options: dict[str, Any]) -> SamplingParams:
    """``sampling``, or one of these options by name.

    Raises:
        InputError: both are given, an option is unknown or out of bounds, or ``sampling`` is no `SamplingParams`.

    >>> as_sampling(None, {"top_k": 5})
    SamplingParams(temperature=1.0, top_k=5, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    """
    names = [field.name for field in fields(SamplingParams)]
    unknown = [name for name in options if name not in names]
    if unknown:
        raise InputError(f"There is no option {', '.join(unknown)}; those of the distribution are {', '.join(names)}.")
    if sampling is None:
        return SamplingParams(**options)
    if not isinstance(sampling, SamplingParams):
        raise InputError(
            f"sampling is {sampling!r}; give a SamplingParams, or its options by name: {', '.join(names)}."
        )
    if options:
        raise InputError(f"{', '.join(options)} given beside SamplingParams: write all of it into the SamplingParams.")
    return sampling


def probabilities(
    logits: np.ndarray, history: np.ndarray | None, sampling: SamplingParams, *, history_mask: np.ndarray | None = None
) -> np.ndarray:
    """What the next token of each row is drawn by.

    These are the numbers of transformers' ``LogitsProcessor`` classes in its order, but in float64: a token at the very
    edge of ``top_p`` or ``min_p``, within float32's rounding, may fall on the other side.

    Args:
        logits: (…, V) floats, not changed; -inf for what is forbidden.
        history: (…, L) integers, the tokens of each row so far, the start token included as in transformers. ``None``
            will do where nothing is penalised.
        sampling: what to change.
        history_mask: (…, L), 0 where the history is padding; by default nowhere.

    Returns:
        (…, V) float64, which sums to 1.

    Raises:
        InputError: a penalty without a history, or one of another shape or vocabulary.

    >>> logits = np.log([[0.5, 0.3, 0.15, 0.05]])
    >>> probabilities(logits, None, SamplingParams(top_k=2)).round(3).tolist()
    [[0.625, 0.375, 0.0, 0.0]]
    >>> probabilities(logits, np.array([[0, 0]]), SamplingParams(repetition_penalty=2.0, top_p=0.8)).round(3).tolist()
    [[0.357, 0.429, 0.214, 0.0]]
    """
    scores = np.array(logits, dtype=np.float64)
    vocab_size = scores.shape[-1]
    if sampling.repetition_penalty != 1:
        seen = _seen(history, history_mask, scores.shape)
        penalised = np.where(scores < 0, scores * sampling.repetition_penalty, scores / sampling.repetition_penalty)
        np.copyto(scores, penalised, where=seen)
    scores -= scores.max(axis=-1, keepdims=True)  # before the division, which might overflow
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


def draw(odds: np.ndarray, uniform: Any) -> np.ndarray:
    """The token at which the odds, added up, first exceed a uniform number: by inverting the distribution function.

    Args:
        odds: (…, V), not negative and not all zero; they need not sum to 1.
        uniform: (…) numbers from 0 to below 1.

    Returns:
        (…) int64, always a token with odds above 0.

    >>> draw(np.array([[0, 0.5, 0, 0.5], [3, 0, 0, 1]]), np.array([0.0, 0.8])).tolist()
    [1, 3]
    """
    sums = odds.cumsum(axis=-1)
    total = sums[..., -1]
    wanted = np.minimum(np.asarray(uniform) * total, np.nextafter(total, 0))  # a product may round up to the total
    return (sums <= wanted[..., None]).sum(axis=-1)


def _number(sampling: SamplingParams, name: str) -> float:
    """The value, or NaN for what is no number, so that no bound holds."""
    value = getattr(sampling, name)
    return value if is_number(value) else math.nan


def _seen(history: Any, mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    """(…, V) bool: which tokens stand in the history of each row."""
    if history is None:
        raise InputError("repetition_penalty needs the history: give the tokens of each row so far, or leave it 1.")
    tokens = np.asarray(history)
    real = np.ones(tokens.shape, dtype=bool) if mask is None else np.asarray(mask).astype(bool)
    if tokens.shape[:-1] != shape[:-1] or real.shape != tokens.shape or tokens.dtype.kind not in "iu":
        raise InputError(
            f"history and its mask have the shapes {tokens.shape} and {real.shape}, logits {shape}: give integers "
            "(…, L) for logits (…, V), and a mask of their shape."
        )
    vocab_size = shape[-1]
    if tokens[real].size and not 0 <= tokens[real].min() <= tokens[real].max() < vocab_size:
        raise InputError(f"history holds tokens outside of 0 … {vocab_size - 1}.")
    seen = np.zeros((*shape[:-1], vocab_size + 1), dtype=bool)  # the last column is for padding
    np.put_along_axis(seen, np.where(real, tokens, vocab_size), True, axis=-1)
    return seen[..., :-1]


def _keep_nucleus(odds: np.ndarray, top_p: float) -> None:
    """Of (V,) probabilities set the smallest to zero, as long as these sum up to at most 1 - top_p; the largest stays.

    Only those above (1 - top_p) / V are sorted: all others together are less than what has to go.
    """
    leaving = 1 - top_p
    near = np.flatnonzero(odds > leaving / len(odds))
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
        options: the fields of `SamplingParams` by name, in place of one: ``sample(…, temperature=0.7, top_p=0.9)``.

    Returns:
        ``sequences`` (B * K, L) int64, the K answers to the first source, then those to the next. Rows that end early
        are padded; sources all of whose rows have ended leave the batch as soon as half of it is done.

    Raises:
        InputError: a shape, type or bound is wrong, or an option is unknown.

    >>> class Coin:  # a toy backend: 1 or 2, each as likely, without an end
    ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 4, 0, 3, 0
    ...     def encode(self, input_ids, attention_mask): return input_ids
    ...     def new_state(self, source, rows_per_source=1): return None
    ...     def step(self, state, input_ids): return np.log([[[[1e-9, 0.5, 0.5, 1e-9]]]]) + 0 * input_ids[..., None]
    ...     def select_sources(self, state, sources): pass
    >>> sample(Coin(), [[1]], seed=2, num_return_sequences=3, max_new_tokens=6).sequences.tolist()
    [[2, 1, 2, 2, 2, 1], [2, 2, 2, 1, 2, 1], [2, 2, 2, 2, 2, 2]]
    """
    sampling = as_sampling(sampling, options)
    rows_per_source = as_count(num_return_sequences, "num_return_sequences", at_least=1)
    request = GenerationInputs.checked(
        backend, input_ids, attention_mask, max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens,
        decoder_input_ids=decoder_input_ids, forced_bos_token_id=forced_bos_token_id,
        decoder_start_token_id=decoder_start_token_id, methods=("select_sources",),
    )  # fmt: skip
    draws = generators(seed, len(request.ids), rows_per_source)
    given = np.repeat(request.prefix, rows_per_source, axis=0)
    steps = run_steps if hasattr(backend, "run_samples") else _steps
    return StepStream(given[:, 1:], backend.pad_token_id, steps(backend, request, given, sampling, draws))


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
    backend: Backend, request: GenerationInputs, given: np.ndarray, sampling: SamplingParams,
    draws: list[np.random.Generator],
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
        state = backend.new_state(backend.encode(request.ids, request.mask), rows_per_source=per_source)
    rows = np.arange(len(draws)).reshape(batch, per_source)  # which row of the result each one in the state is
    is_open, history = np.ones(len(draws), dtype=bool), given
    unread, length, at_once = given, 0, FIRST_RUN  # (R, T), of all rows, in the state or not
    while True:
        if (forced := request.forced_token(length)) is not None:
            found = np.full((len(draws), 1), forced)
            for generator in draws:  # as everywhere, each token takes one number
                generator.random()
            unread = np.concatenate([unread, found], axis=1)
        else:
            count = request.rules.steps_alike(length, shortest=request.min_new_tokens, longest=request.max_new_tokens)
            uniform = np.array([draws[row].random(min(count, at_once)) for row in rows.ravel()])
            new = backend.run_samples(
                state, unread[rows], uniform.reshape(*rows.shape, -1), sampling=sampling,
                suppressed=request.suppressed(length), history=history[rows],
            )  # (n, K, count) # fmt: skip
            found = np.full((len(draws), new.shape[2]), backend.pad_token_id, dtype=np.int64)
            found[rows] = new
            unread, at_once = found[:, -1:], min(2 * at_once, LONGEST_RUN)
        history = np.concatenate([history, found], axis=1)
        for tokens in found.T:
            going = np.flatnonzero(is_open)
            yield Step(going, tokens[going])
            length += 1
            is_open[going[is_eos(tokens[going], request.eos_token_ids)]] = False
            if not is_open.any() or length == request.max_new_tokens:
                return
        if (kept := shrunk(np.flatnonzero(is_open[rows].any(axis=1)), len(rows))) is not None:
            backend.select_sources(state, kept)
            rows = rows[kept]


def _steps(
    backend: Backend,
    request: GenerationInputs,
    given: np.ndarray,
    sampling: SamplingParams,
    draws: list[np.random.Generator],
) -> Iterator[Step]:
    pad, batch, per_source = backend.pad_token_id, len(request.ids), len(draws) // len(request.ids)
    state = backend.new_state(backend.encode(request.ids, request.mask), rows_per_source=per_source)
    rows = np.arange(len(draws)).reshape(batch, per_source)  # which row of the result each one in the state is
    is_open = np.ones(len(draws), dtype=bool)
    history = given if sampling.repetition_penalty != 1 else None
    step_input, length = given.reshape(batch, per_source, -1), 0
    while True:
        places = np.flatnonzero(is_open[rows])
        going = rows.ravel()[places]
        logits = backend.step(state, step_input)[:, :, -1].reshape(rows.size, -1)[places]
        if (suppressed := request.suppressed(length)) is not None:
            logits[:, suppressed] = -np.inf
        odds = probabilities(logits, None if history is None else history[going], sampling)
        tokens = draw(odds, np.array([draws[row].random() for row in going]))
        if (forced := request.forced_token(length)) is not None:
            tokens = np.full_like(tokens, forced)
        yield Step(going, tokens)
        length += 1
        is_open[going[is_eos(tokens, request.eos_token_ids)]] = False
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
            backend.select_sources(state, kept)
            rows, step_input = rows[kept], step_input[kept]
