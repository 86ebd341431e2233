"""Speculative decoding: greedy tokens with any draft model, and the model's own distribution with sampling."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import refused
from test_drafting import RUNTIMES, ToyBackend, sources
from test_greedy_search import Counter
from test_sampling import SAMPLINGS, Chain, answer_odds, excess

from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.torch_eager import TorchEager
from t5accel.decoding import speculation
from t5accel.decoding.backend import Generated
from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.sampling import SamplingParams
from t5accel.decoding.speculation import DraftModel, accept_or_resample, speculative
from t5accel.errors import InputError
from t5accel.graphs.export import export_model
from t5accel.parity import assert_varied

ONE_THREAD = SessionSettings(threads=1)


class Hasty(ToyBackend):
    """A toy's draft: the same, but for every token after which it does not look at the source again."""

    def next(self, source: list[int], past: list[int]) -> np.ndarray:
        logits = super().next(source, past)
        return np.roll(logits, 1) if past[-1] % 4 == 3 else logits


@settings(deadline=None, max_examples=100, derandomize=True)
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


def test_the_draft_model_reads_the_accepted_tokens() -> None:
    """What it reads must be what was accepted: else a draft that is the model itself would be wrong at times."""
    for seed in range(8):
        ids, mask = sources(seed, 5)
        draft = Hasty(seed=seed)
        found = speculative(ToyBackend(seed=seed), draft, ids, mask, max_new_tokens=40)
        assert 0 < found.accepted < found.drafted
        # Row by row, with nothing but the text: a guess is what the draft says after all that came before it.
        alone = [
            speculative(ToyBackend(seed=seed), Hasty(seed=seed), ids[[row]], mask[[row]], max_new_tokens=40)
            for row in range(5)
        ]
        assert sum(one.accepted for one in alone) == found.accepted
        assert sum(one.drafted for one in alone) == found.drafted


def noisy(model: Any, scale: float, seed: int = 0) -> Any:
    """A copy that mostly agrees: every weight of the decoder is off by a little."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.decoder.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * scale)
    return other


RUNS: list[dict[str, Any]] = [
    dict(max_new_tokens=20),
    dict(max_new_tokens=12, min_new_tokens=12, max_draft=3),
    dict(max_new_tokens=9, decoder_input_ids=np.random.default_rng(5).integers(3, 300, (6, 3))),
]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_equals_greedy_on_runtimes(tiny_t5, opened, kind: str, padded_batch, tmp_path, runtime: Any) -> None:
    backend, draft = opened(runtime, kind), TorchEager(noisy(tiny_t5(kind), 0.05))
    if runtime is not TorchEager:
        export_model(draft.model, tmp_path / "draft")
        draft = runtime(tmp_path / "draft", settings=ONE_THREAD)
    drafted = accepted = 0
    for options in RUNS:
        bounds_only = {key: value for key, value in options.items() if key != "max_draft"}
        expected = greedy(backend, *padded_batch, **bounds_only)
        assert_varied(expected.sequences)
        found = speculative(backend, draft, *padded_batch, **options)
        np.testing.assert_array_equal(found.sequences, expected.sequences)
        drafted, accepted = drafted + found.drafted, accepted + found.accepted
        same = speculative(backend, backend, *padded_batch, **options)
        np.testing.assert_array_equal(same.sequences, expected.sequences)
        assert same.accepted == same.drafted and same.decoder_calls < expected.decoder_calls
    assert 0 < accepted < drafted


class NoRollback(ToyBackend):
    def rollback(self, state: dict[str, Any], accepted: np.ndarray) -> None:
        state["last"] = 0


class SelectsTheFirst(ToyBackend):
    def select_sources(self, state: dict[str, Any], kept: np.ndarray) -> None:
        super().select_sources(state, np.arange(len(kept)))


@pytest.mark.parametrize("broken", ["rollback", "select_sources", "lacks"])
def test_a_draft_model_with_a_wrong_past_is_caught(monkeypatch, broken: str) -> None:
    def check(kind: type[ToyBackend]) -> Generated:
        found = [
            speculative(ToyBackend(ends=0.1), kind(ends=0.1), *sources(seed, 6), max_new_tokens=30) for seed in range(4)
        ]
        assert all(one.accepted == one.drafted > 0 for one in found), "the draft is the model itself"
        return found

    check(ToyBackend)
    learn = DraftModel.update

    def without_what_it_lacks(self: DraftModel, rows: Any, drafts: Any, found: Any) -> None:
        learn(self, rows, drafts, found)
        self._unread = [unread[-1:] for unread in self._unread]

    if broken == "lacks":
        monkeypatch.setattr(DraftModel, "update", without_what_it_lacks)
    with pytest.raises(AssertionError, match="the draft is the model itself"):
        check({"rollback": NoRollback, "select_sources": SelectsTheFirst}.get(broken, ToyBackend))


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


def accepts_all(draft: Any, theirs: Any, ours: Any, random: np.random.Generator) -> list[int]:
    return [*draft, *accept_or_resample([], [], ours[len(draft) :], random)]


def replaces_from_p(draft: Any, theirs: Any, ours: Any, random: np.random.Generator) -> list[int]:
    return accept_with(lambda p, q: p, draft, theirs, ours, random)


def replaces_with_the_wrong_sign(draft: Any, theirs: Any, ours: Any, random: np.random.Generator) -> list[int]:
    return accept_with(lambda p, q: np.maximum(q - p, 0), draft, theirs, ours, random)


def accept_with(missing: Any, draft: Any, theirs: Any, ours: Any, random: np.random.Generator) -> list[int]:
    for count, (guess, q, p) in enumerate(zip(draft, theirs, ours, strict=False)):
        if random.random() * q[guess] >= p[guess]:
            rest = missing(p, q)
            return [*draft[:count], int(random.choice(len(rest), p=rest / rest.sum()))]
    return [*draft, int(random.choice(len(ours[0]), p=ours[len(draft)]))]


def ignores_the_draft(draft: Any, theirs: Any, ours: Any, random: np.random.Generator) -> list[int]:
    uniform = [np.full(len(q), 1 / len(q)) for q in theirs]
    return accept_or_resample(draft, uniform, ours, random)


RULES = {
    "accepts everything": accepts_all, "replaces from p": replaces_from_p,
    "the wrong sign": replaces_with_the_wrong_sign, "takes the draft for uniform": ignores_the_draft,
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_caught(monkeypatch, rule: str) -> None:
    monkeypatch.setattr(speculation, "accept_or_resample", RULES[rule])
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


def test_draws_on_runtimes(tiny_t5, exported, padded_batch) -> None:
    """With one token left by top-k it is greedy search; with all of them, rows differ and guesses are accepted."""
    backend, draft = OrtNumpy(exported(), settings=ONE_THREAD), TorchEager(noisy(tiny_t5(), 0.05))
    options: dict[str, Any] = dict(max_new_tokens=16)
    single = speculative(backend, draft, *padded_batch, sampling=SamplingParams(top_k=1), **options)
    np.testing.assert_array_equal(single.sequences, greedy(backend, *padded_batch, **options).sequences)
    free = speculative(backend, draft, *padded_batch, sampling=SamplingParams(repetition_penalty=1.1), **options)
    assert_varied(free.sequences)
    assert 0 < free.accepted < free.drafted
    assert (free.sequences != single.sequences[:, : free.sequences.shape[1]]).any()


# Invalid input


@pytest.mark.parametrize("name", ["vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id"])
def test_a_draft_of_another_model(name: str) -> None:
    draft = ToyBackend()
    setattr(draft, name, 11)
    with pytest.raises(InputError, match=f"{name} .* got 11"):
        speculative(ToyBackend(), draft, [[3]])
    assert draft.calls == []


def test_invalid_options() -> None:
    call = partial(speculative, ToyBackend(), ToyBackend(), [[3]])
    refused(call, "max_draft", 0)
    refused(call, "seed", -1)
    refused(call, "sampling", 0.7)
    refused(call, "max_new_tokens", 0)
    refused(call, "decoder_input_ids", [[12]], match="0 … 11")
    refused(partial(speculative, ToyBackend(), input_ids=[[3]]), "draft", None, "mini-d1", 5, match="must be a Backend")
    refused(
        partial(speculative, draft=Counter(), input_ids=[[3]]), "backend", Counter(), match="Counter.* lacks rollback"
    )
