"""Sampling: the distribution of whole answers, seeds, and independence of rows."""

from __future__ import annotations

import math
from collections import Counter as Tally
from functools import partial
from typing import Any

import numpy as np
import pytest
from refused import refused

from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.torch_eager import TorchEager
from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.sampling import SamplingParams, probabilities, sample
from t5accel.errors import EngineError
from t5accel.parity import assert_varied

WARM = SamplingParams(temperature=1.3, top_k=40, top_p=0.95, min_p=0.001, repetition_penalty=1.2)


class Chain:
    """A toy backend of five tokens: what comes next depends on the last two. 1 is the end; histories may be ragged.

    Vectorised over its rows, so that there can be thousands of them.
    """

    vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 5, 0, 1, 0

    def __init__(self, seed: int = 0, spread: float = 1.0):
        self.logits = np.random.default_rng(seed).normal(size=(5, 5, 5)) * spread
        self.calls: list[tuple[int, int]] = []

    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> int:
        return len(input_ids)

    def new_state(self, source: int, rows_per_source: int = 1) -> dict[str, np.ndarray]:
        shape = (source, rows_per_source)
        return {"past": np.zeros((*shape, 40), dtype=np.int64), "length": np.zeros(shape, dtype=np.int64), "last": 0}

    def step(self, state: dict[str, Any], input_ids: np.ndarray) -> np.ndarray:
        self.calls.append((len(input_ids), input_ids.shape[2]))
        logits = []
        for tokens in np.moveaxis(input_ids, 2, 0):
            state["length"] = state["length"] + 1  # the past begins at place 1: before it stands a pad
            np.put_along_axis(state["past"], state["length"][..., None], tokens[..., None], axis=2)
            before = np.take_along_axis(state["past"], state["length"][..., None] - 1, axis=2)[..., 0]
            logits.append(self.logits[before, tokens])
        state["last"] = input_ids.shape[2]
        return np.stack(logits, axis=2)

    def rollback(self, state: dict[str, Any], accepted: np.ndarray) -> None:
        assert (accepted <= state["last"]).all() and (accepted >= 0).all()
        state["length"], state["last"] = state["length"] - state["last"] + accepted, 0

    def select_sources(self, state: dict[str, Any], sources: np.ndarray) -> None:
        state["past"], state["length"] = state["past"][sources], state["length"][sources]


def answer_odds(
    chain: Chain, sampling: SamplingParams, length: int, min_new_tokens: int = 0
) -> dict[tuple[int, ...], float]:
    """The probability of every answer of at most ``length`` tokens, padded to that, by going through all of them."""
    odds = {}

    def go(answer: tuple[int, ...], probability: float) -> None:
        if len(answer) == length or (answer and answer[-1] == chain.eos_token_id):
            odds[answer + (0,) * (length - len(answer))] = probability
            return
        text = (0, 0, *answer)  # a pad, the start token, and what came
        logits = chain.logits[text[-2], text[-1]].copy()
        if len(answer) < min_new_tokens:
            logits[chain.eos_token_id] = -np.inf
        for token, p in enumerate(probabilities(logits, np.array(text[1:]), sampling)):
            if p > 0:
                go((*answer, token), probability * p)

    go((), 1.0)
    assert math.isclose(sum(odds.values()), 1)
    return odds


def excess(sequences: np.ndarray, odds: dict[tuple[int, ...], float]) -> float:
    """Pearson's chi-square of answers against their probabilities, in standard deviations above its mean.

    Cells that expect fewer than 5 are put together. With an answer that cannot be, it is infinite.
    """
    seen = Tally(map(tuple, sequences.tolist()))
    if not seen.keys() <= odds.keys():
        return math.inf
    count = len(sequences)
    large = [(seen[answer], count * p) for answer, p in odds.items() if count * p >= 5]
    rest = count - sum(o for o, _ in large), count - sum(e for _, e in large)
    cells = [*large, rest] if rest[1] > 1 else large
    assert len(cells) > 10, "there should be something to tell apart"
    square, freedom = sum((o - e) ** 2 / e for o, e in cells), len(cells) - 1
    return (square - freedom) / math.sqrt(2 * freedom)


SAMPLINGS = {
    "plain": SamplingParams(), "warm": SamplingParams(temperature=1.6), "top-k": SamplingParams(top_k=4),
    "top-p": SamplingParams(top_p=0.9),
    "min-p": SamplingParams(min_p=0.25), "penalty": SamplingParams(repetition_penalty=1.8),
    "all": SamplingParams(temperature=1.4, top_k=4, top_p=0.97, min_p=0.02, repetition_penalty=1.5),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLINGS)
def test_answers_follow_the_models_distribution(name: str) -> None:
    chain, sampling = Chain(1), SAMPLINGS[name]
    found = sample(chain, [[2]] * 10, num_return_sequences=800, sampling=sampling, seed=3, max_new_tokens=3)
    assert found.sequences.shape == (8000, 3)
    assert abs(excess(found.sequences, answer_odds(chain, sampling, 3))) < 4
    if name != "plain":
        assert excess(found.sequences, answer_odds(chain, SamplingParams(), 3)) > 8, "the option should matter"
    forced = sample(chain, [[2]] * 8000, sampling=sampling, max_new_tokens=3, min_new_tokens=3)
    assert abs(excess(forced.sequences, answer_odds(chain, sampling, 3, min_new_tokens=3))) < 4


def test_a_prefix_counts_as_history() -> None:
    chain, sampling = Chain(1), SamplingParams(repetition_penalty=1.8)
    prefixed = sample(
        chain, [[2]] * 8000, sampling=sampling, max_new_tokens=2, decoder_input_ids=[[4]] * 8000
    ).sequences
    assert (prefixed[:, 0] == 4).all() and prefixed.shape == (8000, 3)
    whole = answer_odds(chain, sampling, 3)
    begun = {answer: p for answer, p in whole.items() if answer[0] == 4}
    given_four = {answer: p / sum(begun.values()) for answer, p in begun.items()}
    assert abs(excess(prefixed, given_four)) < 4


# Seeds and neighbours


def trimmed(sequences: np.ndarray) -> list[list[int]]:
    return [row[: np.flatnonzero(row)[-1] + 1].tolist() if row.any() else [] for row in sequences]


@pytest.mark.parametrize("runtime", [TorchEager, OrtNumpy])
def test_draws_depend_on_the_seed_and_place_alone(opened, padded_batch, runtime: Any) -> None:
    engine, (ids, mask) = opened(runtime), padded_batch
    options: dict[str, Any] = dict(sampling=WARM, seed=5, num_return_sequences=3, max_new_tokens=9)
    found = sample(engine, ids, mask, **options).sequences
    assert_varied(found)
    assert found.shape == (18, 9) and found.dtype == np.int64
    assert len(np.unique(found, axis=0)) == 18, "every row should have draws of its own"
    np.testing.assert_array_equal(sample(engine, ids, mask, **options).sequences, found)
    assert (sample(engine, ids, mask, **{**options, "seed": 6}).sequences[:, :5] != found[:, :5]).any(axis=1).all()
    others, other_mask = ids[::-1].copy(), mask[::-1].copy()
    others[2], other_mask[2] = ids[2], mask[2]
    again = sample(engine, others, other_mask, **options).sequences
    np.testing.assert_array_equal(again[6:9], found[6:9])
    assert (again[:6] != found[:6]).any(), "the others should be others"
    np.testing.assert_array_equal(sample(engine, ids[:2], mask[:2], **options).sequences, found[:6])
    fewer = sample(engine, ids, mask, **{**options, "num_return_sequences": 2}).sequences
    np.testing.assert_array_equal(fewer, found[[0, 1, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16]])


def test_with_one_token_left_it_is_greedy_search(tiny_t5, padded_batch) -> None:
    backend = TorchEager(tiny_t5())
    expected = greedy(backend, *padded_batch, max_new_tokens=12).sequences
    assert_varied(expected)
    for options in (dict(top_k=1), dict(top_p=1e-9), dict(min_p=1.0), dict(temperature=1e-9)):
        found = sample(backend, *padded_batch, num_return_sequences=2, max_new_tokens=12, **options)
        np.testing.assert_array_equal(found.sequences, expected.repeat(2, axis=0))


def test_options_by_name_equal_sampling_params() -> None:
    whole = sample(Chain(), [[2]] * 50, sampling=SamplingParams(temperature=0.5, top_k=3), max_new_tokens=5)
    names = sample(Chain(), [[2]] * 50, temperature=0.5, top_k=3, max_new_tokens=5)
    np.testing.assert_array_equal(whole.sequences, names.sequences)
    assert (whole.sequences != sample(Chain(), [[2]] * 50, max_new_tokens=5).sequences).any()


def test_sources_leave_when_all_their_rows_have_ended() -> None:
    chain = Chain(3)
    chain.logits[..., 0], chain.logits[..., 1] = -30, chain.logits[..., 1] + 1
    options: dict[str, Any] = dict(num_return_sequences=2, seed=1, max_new_tokens=30)
    found = sample(chain, [[2]] * 32, **options)
    answers = trimmed(found.sequences)
    ended = [answer for answer in answers if answer[-1] == 1]
    assert len(ended) > 40 and all(1 not in answer[:-1] for answer in ended)
    longest = np.array([len(answer) for answer in answers]).reshape(32, 2).max(axis=1)
    widths = [batch for batch, _ in chain.calls]
    assert len(widths) == found.decoder_calls == longest.max()
    assert len(set(widths)) > 2 and widths[0] == 32 and widths == sorted(widths, reverse=True)
    for step, width in enumerate(widths):
        assert (longest > step).sum() <= width < 2 * (longest > step).sum() or width == 32
    few = sample(chain, [[2]] * 3, **options).sequences
    assert trimmed(few) == answers[:6], "nobody should go on in another row's place"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_refused(value: float) -> None:
    chain = Chain()
    chain.logits[:] = value
    for top_p in (1.0, 0.9):
        refused(partial(sample, chain, [[2]], max_new_tokens=4), "top_p", top_p, match="finite", error=EngineError)


def test_prefixes_of_which_some_begin_with_the_start_are_refused() -> None:
    refused(partial(sample, Chain(), [[3], [3]]), "decoder_input_ids", [[0, 2], [3, 4]], match="in all rows or in none")
