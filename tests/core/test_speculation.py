"""Speculative decoding: greedy tokens with any draft model, and the model's own distribution with sampling."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import ToyBackend, lacking
from refused import refused
from test_drafting import sources
from test_sampling import SAMPLINGS, Chain, answer_odds, excess

from t5accel.backends.ort_session import SessionSettings
from t5accel.decoding import speculation
from t5accel.decoding.backend import Generated
from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.sampling import SamplingParams
from t5accel.decoding.speculation import DraftModel, speculative
from t5accel.errors import InputError

ONE_THREAD = SessionSettings(threads=1)


class Hasty(ToyBackend):
    """A toy's draft: the same, but for every token after which it does not look at the source again."""

    def next(self, source: list[int], past: list[int]) -> np.ndarray:
        logits = super().next(source, past)
        return np.roll(logits, 1) if past[-1] % 4 == 3 else logits


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    seed=st.integers(0, 2**16), batch=st.integers(1, 5), ends=st.sampled_from([0.0, 0.05, 0.3]),
    longest=st.integers(1, 25), most=st.integers(1, 9), data=st.data(),
)  # fmt: skip
def test_any_draft_model_gives_the_tokens_of_greedy_search(seed, batch, ends, longest, most: int, data) -> None:
    options: dict[str, Any] = dict(max_new_tokens=longest, min_new_tokens=data.draw(st.integers(0, longest)))
    if data.draw(st.booleans(), "prefix"):
        options["decoder_input_ids"] = np.random.default_rng(seed).integers(2, 12, (batch, 3))
    draft = data.draw(st.sampled_from([ToyBackend, Hasty]), "draft")(
        ends=ends, seed=seed + data.draw(st.integers(0, 1))
    )
    ids, mask = sources(seed, batch)
    expected = greedy(ToyBackend(ends=ends, seed=seed), ids, mask, **options)
    found = speculative(ToyBackend(ends=ends, seed=seed), draft, ids, mask, max_draft=most, **options)
    np.testing.assert_array_equal(found.sequences, expected.sequences)
    assert found.decoder_calls <= expected.decoder_calls
    if type(draft) is ToyBackend and draft.seed == seed:
        assert found.accepted == found.drafted, "a draft that is the model itself is always right"


# With sampling: exact in distribution

ROWS, LENGTH = 6_000, 3


def drawn(sampling: SamplingParams, *, rows: int = ROWS, draft_seed: int = 2, **options: Any) -> Generated:
    """Many answers by a chain whose draft is another chain, of tokens that are three and more guesses long."""
    return speculative(
        Chain(1), Chain(draft_seed), [[2]] * rows, sampling=sampling, seed=4,
        **{"max_new_tokens": LENGTH, "max_draft": 2, **options},
    )  # fmt: skip


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_distribution_is_the_models(name: str) -> None:
    sampling = SAMPLINGS[name]
    found = drawn(sampling)
    assert found.sequences.shape == (ROWS, LENGTH)
    assert 0.1 * found.drafted < found.accepted < 0.9 * found.drafted, "guesses should be accepted and rejected"
    odds = answer_odds(Chain(1), sampling, LENGTH)
    assert abs(excess(found.sequences, odds)) < 4
    other = answer_odds(Chain(2), sampling, LENGTH)
    assert excess(found.sequences, other) > 20, "the draft's distribution should be another"


def test_a_minimum_holds_for_both_models() -> None:
    found = drawn(SamplingParams(), min_new_tokens=LENGTH)
    assert abs(excess(found.sequences, answer_odds(Chain(1), SamplingParams(), LENGTH, min_new_tokens=LENGTH))) < 4


def test_a_draft_that_is_the_model_is_always_right() -> None:
    for sampling in SAMPLINGS.values():
        found = drawn(sampling, rows=300, draft_seed=1, max_new_tokens=12)
        assert found.accepted == found.drafted > 300


def test_a_broken_rule_is_caught(monkeypatch) -> None:
    """One that takes the draft for uniform."""
    rule = speculation.accept_or_resample
    uniform = lambda draft, theirs, *more: rule(draft, [np.full(len(q), 1 / len(q)) for q in theirs], *more)  # noqa: E731
    monkeypatch.setattr(speculation, "accept_or_resample", uniform)
    assert excess(drawn(SamplingParams()).sequences, answer_odds(Chain(1), SamplingParams(), LENGTH)) > 20


def test_a_draft_without_the_penalty_is_still_exact_but_a_model_without_it_is_not(monkeypatch) -> None:
    odds = answer_odds(Chain(1), SAMPLINGS["penalty"], LENGTH)
    choose, probs = DraftModel._choose, speculation.next_token_probs

    def plain(logits: np.ndarray, texts: Any, sampling: SamplingParams) -> np.ndarray:
        return probs(logits, texts, SamplingParams())

    def chooses_without_it(self: DraftModel, *arguments: Any) -> np.ndarray:
        with monkeypatch.context() as patch:
            patch.setattr(speculation, "next_token_probs", plain)
            return choose(self, *arguments)

    monkeypatch.setattr(DraftModel, "_choose", chooses_without_it)
    assert abs(excess(drawn(SAMPLINGS["penalty"]).sequences, odds)) < 4
    monkeypatch.setattr(speculation, "next_token_probs", plain)
    assert excess(drawn(SAMPLINGS["penalty"]).sequences, odds) > 10


# Invalid input


@pytest.mark.parametrize("name", ["vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id"])
def test_a_draft_of_another_model(name: str) -> None:
    draft = ToyBackend()
    setattr(draft, name, 11)
    with pytest.raises(InputError, match=f"{name} .* got 11"):
        speculative(ToyBackend(), draft, [[3]])
    assert draft.calls == []


def test_a_backend_without_rollback() -> None:
    poor = lacking(ToyBackend, "rollback")
    refused(partial(speculative, draft=ToyBackend(), input_ids=[[3]]), "backend", poor, match="lacks rollback")
