"""The sampling distribution equals transformers'; draws follow it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from t5accel.decoding import sampling as distribution
from t5accel.decoding.sampling import SamplingParams, probabilities, sample_token
from t5accel.parity import ParityError, assert_close

ALL = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.4)
EACH: dict[str, SamplingParams] = {
    "nothing": SamplingParams(), "hot": SamplingParams(temperature=1.9), "cold": SamplingParams(temperature=0.3),
    "top-k": SamplingParams(top_k=5), "top-k of more than there are": SamplingParams(top_k=10**6),
    "top-p": SamplingParams(top_p=0.8), "a tiny top-p": SamplingParams(top_p=1e-6), "min-p": SamplingParams(min_p=0.2),
    "min-p of 1": SamplingParams(min_p=1.0), "penalty": SamplingParams(repetition_penalty=1.7),
    "reward": SamplingParams(repetition_penalty=0.6), "all": ALL,
}  # fmt: skip


def reference(logits: np.ndarray, history: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """The same by transformers' classes, put together as its ``generate`` does: (R, V), (R, L) -> (R, V)."""
    from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration
    from transformers.generation import LogitsProcessorList

    sizes = dict(d_model=4, d_kv=2, d_ff=4, num_heads=1, num_layers=1, vocab_size=8, decoder_start_token_id=0)
    config = GenerationConfig(
        do_sample=True, temperature=float(sampling.temperature), top_k=sampling.top_k, top_p=sampling.top_p,
        min_p=sampling.min_p or None, repetition_penalty=float(sampling.repetition_penalty),
    )  # fmt: skip
    found = T5ForConditionalGeneration(T5Config(**sizes))._get_logits_processor(config, input_ids_seq_length=1)
    scores = LogitsProcessorList(found)(torch.as_tensor(history), torch.as_tensor(logits, dtype=torch.float32))
    return scores.softmax(dim=-1).double().numpy()


def example(seed: int, rows: int = 6, vocab_size: int = 300, spread: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(rows, vocab_size)) * spread).astype(np.float32)
    return logits, rng.integers(0, vocab_size, (rows, 9))


def check(logits: np.ndarray, history: np.ndarray, sampling: SamplingParams) -> None:
    assert_close(probabilities(logits, history, sampling), reference(logits, history, sampling), atol=2e-6)


@pytest.mark.parametrize("name", EACH)
def test_equals_transformers(name: str) -> None:
    for seed in range(4):
        logits, history = example(seed)
        check(logits, history, EACH[name])
        odds = probabilities(logits, history, EACH[name])
        assert odds.dtype == np.float64 and odds.shape == logits.shape
        np.testing.assert_allclose(odds.sum(axis=-1), 1, atol=1e-12)
        plain = probabilities(logits, history, SamplingParams())
        if name not in ("nothing", "top-k of more than there are"):
            assert np.abs(odds - plain).max() > 1e-3, "the option should change something"


def edges(logits: np.ndarray, history: np.ndarray, sampling: SamplingParams) -> bool:
    """Whether a token lies so near to the edge of top-p or min-p that float32's rounding may decide."""
    before = probabilities(logits, history, SamplingParams(sampling.temperature, sampling.top_k, 1.0, 0.0,
                                                     sampling.repetition_penalty))  # fmt: skip
    sums = np.sort(before, axis=-1).cumsum(axis=-1)
    near_p = np.abs(sums - (1 - sampling.top_p)).min() < 1e-5
    ratio = before / before.max(axis=-1, keepdims=True)
    return bool(near_p or np.abs(ratio - sampling.min_p).min() < 1e-5)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    seed=st.integers(0, 2**16),
    vocab_size=st.sampled_from([2, 3, 17, 300]),
    spread=st.sampled_from([0.1, 1.0, 8.0]),
    sampling=st.builds(
        SamplingParams, temperature=st.floats(0.2, 4), top_k=st.integers(0, 30), top_p=st.floats(0.05, 1),
        min_p=st.floats(0, 0.9), repetition_penalty=st.floats(0.5, 3),
    ),
)  # fmt: skip
def test_random_params_equal_transformers(seed: int, vocab_size: int, spread: float, sampling: SamplingParams) -> None:
    logits, history = example(seed, vocab_size=vocab_size, spread=spread)
    assume(not edges(logits, history, sampling))
    check(logits, history, sampling)


def test_suppressed_tokens_stay_suppressed() -> None:
    logits, history = example(5)
    logits[:, 7] = -np.inf
    history[:, 0] = 7
    for sampling in EACH.values():
        odds = probabilities(logits, history, sampling)
        assert (odds[:, 7] == 0).all() and np.isfinite(odds).all()
        check(logits, history, sampling)


def test_padding_of_the_history_does_not_count() -> None:
    logits, history = example(2)
    mask = np.arange(9) < np.array([9, 1, 4, 2, 8, 3])[:, None]
    padded = probabilities(logits, history, ALL, history_mask=mask)
    for row, real in enumerate(mask):
        alone = probabilities(logits[row : row + 1], history[row : row + 1, real], ALL)
        np.testing.assert_array_equal(padded[row : row + 1], alone)
    assert np.abs(padded - probabilities(logits, history, ALL)).max() > 1e-3, "the mask should matter"
    np.testing.assert_array_equal(probabilities(logits, history * mask + 900 * ~mask, ALL, history_mask=mask), padded)


BROKEN: dict[str, tuple[str, Any]] = {
    "no top-p": ("_keep_nucleus", lambda odds, top_p: None),
    "the penalty sees all tokens": ("_seen", lambda tokens, mask, shape: np.ones(shape, dtype=bool)),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_distribution_is_caught(monkeypatch, broken: str) -> None:
    monkeypatch.setattr(distribution, *BROKEN[broken])
    with pytest.raises(ParityError, match="not close"):
        check(*example(0), ALL)


# Draws


def test_draws_follow_the_odds() -> None:
    odds = np.array([0.0, 0.2, 0.0, 0.5, 0.3, 0.0])
    uniform = (np.arange(1000) + 0.5) / 1000
    tokens = sample_token(np.tile(odds, (1000, 1)), uniform)
    assert tokens.dtype == np.int64
    assert np.bincount(tokens, minlength=6).tolist() == [0, 200, 0, 500, 300, 0]
    np.testing.assert_array_equal(sample_token(np.tile(odds * 7, (1000, 1)), uniform), tokens)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from([0.0, 0.0, 1e-300, 1e-17, 0.3, 1.0, 5.0]), min_size=1, max_size=6), st.floats(0, 1))
def test_impossible_tokens_are_never_drawn(odds: list[float], uniform: float) -> None:
    assume(sum(odds) > 0)
    for number in (uniform, 0.0, np.nextafter(1.0, 0), 1.0):
        assert odds[int(sample_token(np.array(odds), number))] > 0


def test_the_smallest_top_p_keeps_one_of_equal_tokens() -> None:
    assert sorted(probabilities(np.zeros((1, 4)), None, SamplingParams(top_p=1e-17))[0]) == [0, 0, 0, 1]
