"""Sampling on the device: the distribution, the draws and the answers of `sample` on other runtimes."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import own_generate
from test_sampling import SAMPLINGS, WARM
from test_torch_static import with_graphs
from test_torch_static_beams import host_is_not_asked

from t5accel.backends import torch_static_loops
from t5accel.backends.hf_generate import AcceleratedT5
from t5accel.backends.torch_eager import TorchEager
from t5accel.backends.torch_static import TorchStatic
from t5accel.backends.torch_static_loops import (
    _NUMBERS,
    TIES,
    last_of,
    likeliest,
    penalised,
    probabilities,
    sample_token,
)
from t5accel.decoding import sampling as distribution
from t5accel.decoding.sampling import SamplingParams, sample
from t5accel.errors import EngineError
from t5accel.parity import assert_close, assert_varied

__all__ = ["host_is_not_asked", "with_graphs"]  # fixtures

TOP = {"top-k and top-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.9), "WARM": WARM}


def on_device(
    logits: np.ndarray, history: np.ndarray | None, sampling: SamplingParams, device: str = "cpu", *, few: bool = False
) -> np.ndarray:
    """The device's `probabilities`, summing to 1; by the likeliest tokens, if ``few`` and these are enough."""
    seen, given = None, torch.from_numpy(logits).to(device)
    if history is not None:
        seen = torch.zeros(logits.shape, dtype=torch.bool, device=device)
        seen.scatter_(1, torch.from_numpy(history).to(device), True)
    numbers = {name: torch.tensor(getattr(sampling, name), dtype=torch.float64, device=device) for name in _NUMBERS}
    scores = penalised(given, seen, numbers)
    odds = probabilities(scores, last_of(scores, sampling.top_k), sampling, numbers)
    if few and 0 < sampling.top_k < logits.shape[1] - TIES:
        scores, last, tokens, ties = likeliest(scores, sampling.top_k)
        if not ties:
            odds = torch.zeros_like(odds).scatter_(1, tokens, probabilities(scores, last, sampling, numbers))
    return (odds / odds.sum(dim=-1, keepdim=True)).cpu().numpy()


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    seed=st.integers(0, 2**16), vocab_size=st.integers(2, 300), spread=st.sampled_from([0.1, 1.0, 8.0]),
    is_rounded=st.booleans(),
    sampling=st.builds(
        SamplingParams, temperature=st.sampled_from([1.0, 0.3, 2.0, 1e-9]), top_k=st.integers(0, 60),
        top_p=st.sampled_from([1.0, 0.9, 0.3, 1e-9]), min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    ),
)  # fmt: skip
def test_the_distribution_is_the_hosts(
    seed: int, vocab_size: int, spread: float, is_rounded: bool, sampling: SamplingParams
) -> None:
    """Equal logits, too, of which those in bfloat16 have many, and forbidden tokens."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(3, vocab_size)).astype(np.float32) * spread
    logits[:, rng.integers(vocab_size)] = -np.inf
    if is_rounded:
        logits = torch.from_numpy(logits).bfloat16().float().numpy()
    history = rng.integers(0, vocab_size, (3, 4)) if sampling.repetition_penalty != 1 else None
    expected = distribution.probabilities(logits, history, sampling)
    assert_close(on_device(logits, history, sampling), expected, atol=1e-9)
    assert_close(on_device(logits, history, sampling, few=True), expected, atol=1e-9)
    uniform = rng.random(3)
    found, _ = sample_token(torch.from_numpy(expected), torch.from_numpy(uniform)[:, None])
    np.testing.assert_array_equal(found[:, 0].numpy(), distribution.sample_token(expected, uniform))


def test_a_token_without_odds_is_never_drawn() -> None:
    """Not even where a GPU's sums, added up in parallel, fall by the last bit behind the last token."""
    odds = torch.tensor([[0.0, 0.1, 0.7, 0.2, 0.0, 0.0]], dtype=torch.float64)
    for uniform in (0.0, 0.5, np.nextafter(1, 0)):
        found, _ = sample_token(odds, torch.tensor([[uniform]], dtype=torch.float64))
        assert odds[0, found] > 0


@pytest.mark.parametrize("name", [*SAMPLINGS, *TOP])
def test_answers_are_those_of_other_runtimes(tiny_t5, padded_batch, host_is_not_asked, name: str) -> None:
    model, sampling = tiny_t5(), {**SAMPLINGS, **TOP}[name]
    options: dict[str, Any] = dict(sampling=sampling, seed=5, num_return_sequences=3, max_new_tokens=20)
    expected, found = (sample(one, *padded_batch, **options) for one in (TorchEager(model), TorchStatic(model)))
    assert_varied(expected.sequences)
    np.testing.assert_array_equal(found.sequences, expected.sequences)
    assert found.decoder_calls == expected.decoder_calls == 20


@settings(deadline=None, max_examples=15, derandomize=True)
@given(seed=st.integers(0, 2**16), data=st.data())
def test_answers_are_those_of_other_runtimes_whatever_is_asked(tiny_t5, seed: int, data: st.DataObject) -> None:
    model, rng = tiny_t5("umt5"), np.random.default_rng(seed)
    lengths = rng.integers(1, 9, rng.integers(1, 8))
    mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
    longest = data.draw(st.integers(1, 40))
    ends = tuple(rng.integers(2, 300, 30).tolist())  # some rows end at any time
    rules = replace(
        TorchEager(model).rules, eos_token_ids=tuple(dict.fromkeys((1, *ends))), suppress_tokens=(299,),
        forced_eos_token_id=data.draw(st.none() | st.just(1)),
    )  # fmt: skip
    options: dict[str, Any] = dict(
        sampling=SamplingParams(temperature=1.5, repetition_penalty=data.draw(st.sampled_from([1.0, 1.3]))), seed=seed,
        num_return_sequences=data.draw(st.integers(1, 3)), max_new_tokens=longest,
        min_new_tokens=data.draw(st.just(0) | st.integers(0, longest)),
        forced_bos_token_id=data.draw(st.none() | st.just(298).filter(lambda token: token not in ends)),
    )  # fmt: skip
    if width := data.draw(st.integers(0, 3)):
        options["decoder_input_ids"] = rng.integers(2, 300, (len(mask), width))
    backends = TorchEager(model), TorchStatic(model, buckets=(8, 16, 64))
    for backend in backends:
        backend.rules = rules
    ids = rng.integers(3, 300, mask.shape) * mask
    expected, found = (sample(one, ids, mask, **options) for one in backends)
    width = max(expected.sequences.shape[1], found.sequences.shape[1])
    a, b = (np.pad(one.sequences, ((0, 0), (0, width - one.sequences.shape[1]))) for one in (expected, found))
    differing = [row for row in range(len(a)) if (a[row] != b[row]).any()]
    for row in differing:  # a number drawn between two tokens falls to either of them by the last bit of a logit
        first = np.flatnonzero(a[row] != b[row])[0]
        assert abs(a[row, first] - b[row, first]) <= 2, (a[row], b[row])
    assert len(differing) <= 1 and (differing or found.decoder_calls == expected.decoder_calls)


def test_equal_tokens_beyond_those_that_are_looked_at_are_drawn_too(tiny_t5, padded_batch, monkeypatch) -> None:
    """Half of the vocabulary is as likely as the last token of top-k."""
    model = copy.deepcopy(tiny_t5())
    model.lm_head.weight.data[150:] = 0  # of 300 entries
    monkeypatch.setattr(torch_static_loops, "TIES", 3)
    options: dict[str, Any] = dict(top_k=140, temperature=20.0, seed=5, num_return_sequences=3, max_new_tokens=20)
    expected, found = (sample(one(model), *padded_batch, **options) for one in (TorchEager, TorchStatic))
    np.testing.assert_array_equal(found.sequences, expected.sequences)
    assert (found.sequences >= 150).any()


def test_what_draws_among_all_tokens_is_captured_after_a_run_of_any_length(
    tiny_t5, padded_batch, with_graphs, monkeypatch
) -> None:
    model = copy.deepcopy(tiny_t5())
    model.lm_head.weight.data[150:] = 0  # equal tokens, more than are looked at
    monkeypatch.setattr(torch_static_loops, "TIES", 3)
    start, uniform = np.zeros((6, 1, 1), int), np.random.default_rng(1).random((6, 1, distribution.MAX_RUN_STEPS))
    found, expected = (
        backend.run_samples(backend.new_state(backend.encode(*padded_batch)), start, uniform,
                            sampling=SamplingParams(top_k=140, temperature=20.0))
        for backend in (with_graphs(model), TorchStatic(model))
    )  # fmt: skip
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("top_k", [0, 40])
def test_logits_that_are_not_finite_are_an_error(tiny_t5, padded_batch, with_graphs, top_k: int) -> None:
    model = copy.deepcopy(tiny_t5())
    model.lm_head.weight.data[5] = torch.nan
    for backend in (TorchStatic(model), with_graphs(model)):
        with pytest.raises(EngineError, match="logits must be finite"):
            sample(backend, *padded_batch, top_k=top_k, max_new_tokens=4)


def test_one_graph_draws_by_any_numbers(tiny_t5, padded_batch, with_graphs) -> None:
    model = tiny_t5()
    backend = with_graphs(model)
    for sampling in (SamplingParams(top_p=0.9), SamplingParams(top_p=0.6), SamplingParams(top_p=0.9, temperature=2.0)):
        options: dict[str, Any] = dict(sampling=sampling, seed=1, max_new_tokens=12)
        found, expected = (sample(one, *padded_batch, **options).sequences for one in (backend, TorchEager(model)))
        np.testing.assert_array_equal(found, expected)
    assert backend.captured == 2, "one for nucleus alone, and one with a temperature"


def test_generate_draws_on_the_device_by_torchs_seed(tiny_t5, padded_batch, host_is_not_asked, monkeypatch) -> None:
    monkeypatch.setattr(AcceleratedT5, "_draws_on_the_device", lambda self: True)
    model = AcceleratedT5.around(TorchStatic(tiny_t5()))
    ids, mask = (torch.as_tensor(array) for array in padded_batch)
    options: dict[str, Any] = dict(
        attention_mask=mask, do_sample=True, temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.3,
        num_return_sequences=2, max_new_tokens=12,
    )  # fmt: skip
    state = torch.get_rng_state()
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(model.generate(ids, **options))
    torch.manual_seed(1)
    drawn = int(torch.randint(2**62, ()))
    torch.set_rng_state(state)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    sampling = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.3)
    expected = sample(TorchEager(tiny_t5()), ids, mask, sampling=sampling, seed=drawn, num_return_sequences=2,
                      max_new_tokens=12)  # fmt: skip
    np.testing.assert_array_equal(found[0][:, 1:].numpy(), expected.sequences)


def test_on_a_cpu_generate_draws_as_transformers(tiny_t5, padded_batch, random_state_put_back, monkeypatch) -> None:
    monkeypatch.setattr(TorchStatic, "run_samples", lambda *_, **__: pytest.fail("no run was expected"))
    own = tiny_t5()
    model = AcceleratedT5.around(TorchStatic(own))
    ids, mask = (torch.as_tensor(array) for array in padded_batch)
    torch.manual_seed(3)
    found = model.generate(ids, attention_mask=mask, do_sample=True, max_new_tokens=9)
    torch.manual_seed(3)
    assert torch.equal(found, own_generate(own, ids, mask, do_sample=True, max_new_tokens=9))


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*SAMPLINGS, *TOP])
def test_a_gpu_draws_the_same(tiny_t5, padded_batch, name: str) -> None:
    model, sampling = copy.deepcopy(tiny_t5()).to("cuda"), {**SAMPLINGS, **TOP}[name]
    options: dict[str, Any] = dict(sampling=sampling, seed=5, num_return_sequences=3, max_new_tokens=20)
    expected, found = (sample(one, *padded_batch, **options) for one in (TorchEager(tiny_t5()), TorchStatic(model)))
    agree = (found.sequences == expected.sequences).all(axis=1)
    assert agree.mean() > 0.9, "logits differ by rounding, which may move a draw"
    logits = np.random.default_rng(0).normal(size=(8, 32128)).astype(np.float32)
    history = np.arange(80).reshape(8, 10)
    expected_odds = distribution.probabilities(logits, history, sampling)
    seen = history if sampling.repetition_penalty != 1 else None
    for few in (False, True):
        assert_close(on_device(logits, seen, sampling, "cuda", few=few), expected_odds, atol=1e-6)
