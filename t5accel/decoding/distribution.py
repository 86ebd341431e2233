"""From logits to what a next token is drawn by, the numbers of transformers' processors in its order; and the draw."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from t5accel.checks import as_count, is_number
from t5accel.errors import InputError


@dataclass(frozen=True)
class Sampling:
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

    >>> Sampling(temperature=0.7, top_k=40).top_p
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


def as_sampling(sampling: Sampling | None, options: dict[str, Any]) -> Sampling:
    """``sampling``, or one of these options by name.

    Raises:
        InputError: both are given, an option is unknown or out of bounds, or ``sampling`` is no `Sampling`.

    >>> as_sampling(None, {"top_k": 5})
    Sampling(temperature=1.0, top_k=5, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    """
    names = [field.name for field in fields(Sampling)]
    unknown = [name for name in options if name not in names]
    if unknown:
        raise InputError(f"There is no option {', '.join(unknown)}; those of the distribution are {', '.join(names)}.")
    if sampling is None:
        return Sampling(**options)
    if not isinstance(sampling, Sampling):
        raise InputError(f"sampling is {sampling!r}; give a Sampling, or its options by name: {', '.join(names)}.")
    if options:
        raise InputError(f"{', '.join(options)} given beside a Sampling: write all of it into the Sampling.")
    return sampling


def probabilities(
    logits: np.ndarray, history: np.ndarray | None, sampling: Sampling, *, history_mask: np.ndarray | None = None
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
    >>> probabilities(logits, None, Sampling(top_k=2)).round(3).tolist()
    [[0.625, 0.375, 0.0, 0.0]]
    >>> probabilities(logits, np.array([[0, 0]]), Sampling(repetition_penalty=2.0, top_p=0.8)).round(3).tolist()
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


def _number(sampling: Sampling, name: str) -> float:
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
