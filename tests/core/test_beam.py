"""Beam search equals transformers, sequences and scores; broken searches are caught.

Where two continuations are equally likely to the last bit, either choice is right and the two sides may differ: a test
that meets two of them within rounding must take another seed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import ToyBackend, own_generate

from t5accel.backends.torch_eager import TorchEager
from t5accel.decoding.backend import Generated
from t5accel.decoding.beam import BeamTopK, FinishedHypotheses, beam_search
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import EngineError
from t5accel.parity import assert_close, assert_varied

Batch = tuple[np.ndarray, np.ndarray]
LONGEST = 14
ALL: dict[str, Any] = dict(num_beams=4, num_return_sequences=4, max_new_tokens=LONGEST)
PENALTIES = [0.0, 0.6, 1.0, 2.0, -1.0]
RULES: list[bool | str] = [False, True, "never"]
# Kind, seed and how likely the end token is made: of each, some answers are short, some long, some never end.
ENDING = {"tied": ("deeper-decoder", 1, 0.03), "untied": ("gated-untied", 2, 0.1), "umt5": ("umt5", 1, 0.03)}


@pytest.fixture(scope="module")
def ending_t5(tiny_t5, padded_batch) -> Callable[[str], Any]:
    """``ending_t5(name)``: a model of ``ENDING``. The head's row of the end token points where hidden states lie."""

    @cache
    def build(name: str) -> Any:
        kind, seed, odds = ENDING[name]
        model = copy.deepcopy(tiny_t5(kind, seed=seed))
        seen: list[torch.Tensor] = []
        hook = model.lm_head.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].flatten(0, 1)))
        with torch.no_grad():
            greedy(TorchEager(model), *padded_batch, min_new_tokens=10, max_new_tokens=10)
            hook.remove()
            hidden = torch.cat(seen)
            mean = hidden.mean(dim=0)
            logit = torch.logsumexp(model.lm_head(hidden), dim=1).mean() + math.log(odds)
            model.lm_head.weight[model.config.eos_token_id] = mean / mean.square().sum() * logit
        return model

    return build


def reference(model: Any, ids: np.ndarray, mask: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """transformers' sequences without the start token, and their scores. What follows an end is made padding."""
    given = len(options.get("decoder_input_ids", [[0]])[0])
    outputs = own_generate(model, ids, mask, return_dict_in_generate=True, output_scores=True, **options)
    sequences = outputs.sequences[:, 1:].numpy().copy()
    new = sequences[:, -(outputs.sequences.shape[1] - given) :]
    ends = new == model.config.eos_token_id
    new[ends.cumsum(axis=1) - ends > 0] = model.config.pad_token_id
    return sequences, outputs.sequences_scores.numpy()


def check_equal(result: Generated, expected: tuple[np.ndarray, np.ndarray]) -> None:
    sequences, scores = expected
    np.testing.assert_array_equal(result.sequences, sequences)
    assert_close(result.scores, scores, atol=1e-5, rtol=2e-6)  # with a penalty of -1 they come near -1000
    assert result.scores.dtype == np.float32 and result.sequences.dtype == np.int64


def check_equals_generate(backend: Any, model: Any, ids: np.ndarray, mask: np.ndarray, **options: Any) -> None:
    check_equal(beam_search(backend, ids, mask, **options), reference(model, ids, mask, **options))


def lengths_of(sequences: np.ndarray) -> np.ndarray:
    return (sequences != 0).sum(axis=1)


# Equal to transformers


@pytest.mark.parametrize("name", ENDING)
def test_the_reference_varies(ending_t5, padded_batch, name: str) -> None:
    """Else equality would prove nothing of the beams, the penalties, the rules or what is kept of the ended."""
    model = ending_t5(name)
    found = {rule: reference(model, *padded_batch, early_stopping=rule, **ALL) for rule in RULES}
    sequences, scores = found[False]
    assert_varied(sequences)
    assert len(np.unique(sequences, axis=0)) > 12, "answers should differ between sources and beams"
    assert len(set(lengths_of(sequences))) >= 5, "answers should end at different lengths"
    longest = lengths_of(sequences).reshape(-1, 4).max(axis=1)
    assert (longest < LONGEST).any() and (longest == LONGEST).any(), "some sources should stop early and some not"
    assert not np.array_equal(found[True][1], scores) and not np.array_equal(found["never"][1], scores)
    first = {penalty: reference(model, *padded_batch, length_penalty=penalty, **ALL)[0][::4] for penalty in PENALTIES}
    widths = [lengths_of(first[penalty]).sum() for penalty in (-1.0, 0.0, 1.0, 2.0)]
    assert widths == sorted(widths) and widths[0] < widths[-1], "the penalty should decide which answers win"
    alone = greedy(TorchEager(model), *padded_batch, max_new_tokens=LONGEST).sequences
    assert alone.shape != first[1.0].shape or (alone != first[1.0]).any(), "more beams should find other answers"


@settings(deadline=None, max_examples=60, derandomize=True)
@given(name=st.sampled_from([*ENDING]), seed=st.integers(0, 2**16), beams=st.integers(2, 8), data=st.data())
def test_equals_generate(ending_t5, name: str, seed: int, beams: int, data: st.DataObject) -> None:
    model, rng = ending_t5(name), np.random.default_rng(seed)
    lengths = rng.integers(1, 9, rng.integers(1, 6))
    mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
    longest = data.draw(st.integers(1, LONGEST))
    options: dict[str, Any] = dict(
        num_beams=beams,
        num_return_sequences=data.draw(st.integers(1, beams)),
        length_penalty=data.draw(st.sampled_from(PENALTIES)),
        early_stopping=data.draw(st.sampled_from(RULES)),
        max_new_tokens=longest,
        min_new_tokens=data.draw(st.just(0) | st.integers(0, longest)),
    )
    check_equals_generate(TorchEager(model), model, rng.integers(3, 300, mask.shape) * mask, mask, **options)


@pytest.mark.parametrize("vocab_size", [5, 9, 12])
def test_equals_generate_with_hardly_more_tokens_than_beams(tiny_t5, vocab_size: int) -> None:
    model = tiny_t5(vocab_size=vocab_size)
    ids = np.random.default_rng(1).integers(2, vocab_size, (4, 6))
    options: dict[str, Any] = dict(num_beams=vocab_size - 1, num_return_sequences=vocab_size - 1, max_new_tokens=10)
    for least in (0, 3):
        check_equals_generate(TorchEager(model), model, ids, np.ones_like(ids), min_new_tokens=least, **options)


@pytest.mark.parametrize("with_start", [True, False])
def test_continues_a_prefix(ending_t5, padded_batch, with_start: bool) -> None:
    model = ending_t5("tied")
    prefix = np.random.default_rng(5).integers(3, 300, (len(padded_batch[0]), 4))
    prefix[:, 0] = model.config.decoder_start_token_id if with_start else prefix[:, 0]
    options: dict[str, Any] = dict(decoder_input_ids=prefix, min_new_tokens=2, **ALL)
    check_equals_generate(TorchEager(model), model, *padded_batch, **options)


@pytest.mark.parametrize("name", ENDING)
def test_one_beam_is_greedy_search(ending_t5, padded_batch, name: str) -> None:
    model = ending_t5(name)
    result = beam_search(TorchEager(model), *padded_batch, num_beams=1, max_new_tokens=9, length_penalty=2.0)
    alone = greedy(TorchEager(model), *padded_batch, max_new_tokens=9)
    np.testing.assert_array_equal(result.sequences, alone.sequences)
    assert result.decoder_calls == alone.decoder_calls
    ids, mask = (torch.as_tensor(array) for array in padded_batch)
    with torch.no_grad():
        labels = torch.as_tensor(result.sequences)
        logits = model(input_ids=ids, attention_mask=mask, labels=labels).logits.log_softmax(dim=-1)
    tokens = logits.gather(2, labels[..., None])[..., 0].numpy() * (result.sequences != 0)
    assert_close(result.scores, tokens.sum(axis=1) / lengths_of(result.sequences) ** 2.0, atol=1e-5)


# Broken searches fail the same check

BROKEN: dict[str, tuple[Any, str, Any]] = {
    "no reordering": (TorchEager, "reorder", lambda self, state, rows: None),
    "no length penalty": (FinishedHypotheses, "_penalty", lambda self, length: np.float32(1)),
    "stops at once": (FinishedHypotheses, "update_done", lambda self, *_: self.is_open.fill(False)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_search_is_caught(ending_t5, padded_batch, monkeypatch, name: str) -> None:
    model = ending_t5("umt5")
    expected = reference(model, *padded_batch, **ALL)
    monkeypatch.setattr(*BROKEN[name])
    with pytest.raises((AssertionError, EngineError), match="not equal|Mismatched elements|shapes|not close|finite"):
        check_equal(beam_search(TorchEager(model), *padded_batch, **ALL), expected)


# The loop on a toy backend


class Toy(ToyBackend):
    """All answers to source n have n tokens and the end."""

    def next(self, source: list[int], past: list[int]) -> np.ndarray:
        odds = np.full(12, 1e-6)
        odds[2:4] = (0.9, 0.08) if past[-1] == 3 else (0.5, 0.33)
        odds[1] = 30.0 if source[0] < len(past) else 1e-6
        return np.log(odds)


def test_sources_that_stop_leave_the_batch() -> None:
    toy = Toy()
    ids = [[3], [6], [2], [6], [5], [7]]
    result = beam_search(toy, ids, num_beams=2, early_stopping=True, max_new_tokens=20)
    assert lengths_of(result.sequences).tolist() == [4, 7, 3, 7, 6, 8], "the end token counts"
    assert toy.calls.count("encode") == 1 and result.decoder_calls == 8
    widths = [width for width, _ in toy.shapes]
    assert widths == [6, 6, 6, 6, 4, 4, 3, 1], "they leave as soon as a quarter of the batch has stopped"
    for row, source in enumerate(ids):
        alone = beam_search(Toy(), [source], num_beams=2, early_stopping=True, max_new_tokens=20)
        assert alone.sequences[0].tolist() == result.sequences[row, : alone.sequences.shape[1]].tolist()
        assert alone.scores[0] == result.scores[row]


def test_reorders_only_when_the_order_changes() -> None:
    toy = Toy()
    beam_search(toy, [[9]], num_beams=2, min_new_tokens=8, max_new_tokens=8)
    orders = [call for call in toy.calls if isinstance(call, list)]
    assert len(orders) == 1 and orders != [[[0, 1]]], "before the second step all are equal, after it the order stays"
    toy = Toy()
    beam_search(toy, [[9]], num_beams=1, max_new_tokens=8)
    assert not [call for call in toy.calls if isinstance(call, list)]


@settings(deadline=None, max_examples=25)
@given(st.sampled_from([np.nan, np.inf, -np.inf]), st.integers(0, 2**16))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_logits_that_are_not_finite_are_left_out_or_refused(value: float, seed: int) -> None:
    class Broken(Toy):
        def step(self, state: Any, input_ids: np.ndarray) -> np.ndarray:
            rng = np.random.default_rng([seed, len(self.calls)])
            logits = super().step(state, input_ids)
            logits[rng.random(logits.shape) < rng.choice([0.1, 1.0])] = value
            return logits

    try:
        result = beam_search(Broken(), [[9], [4]], num_beams=3, num_return_sequences=2, max_new_tokens=6)
    except EngineError as error:
        assert "logits must be finite" in str(error)
    else:
        assert len(result.sequences) == len(result.scores) == 4 and np.isfinite(result.scores[::2]).all()


# Top-k


@settings(deadline=None, max_examples=60)
@given(
    vocab_size=st.integers(2, 40) | st.sampled_from([299, 300, 1009, 32128]),
    batch=st.integers(1, 4),
    rows=st.integers(1, 8),
    count=st.integers(1, 16),
    scale=st.sampled_from([0.1, 3.0, 1000.0]),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
def test_top_k_equals_a_sort(vocab_size, batch, rows, count, scale, seed, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((batch, rows, 2, vocab_size)) * scale).astype(np.float32)[:, :, 0]  # strided
    scores = -rng.random((batch, rows)).astype(np.float32) * 9
    suppressed = data.draw(st.none() | st.integers(0, vocab_size - 1))
    if suppressed is not None and data.draw(st.booleans()):
        logits[:, :, suppressed] += 3 * scale
    before, processed = logits.copy(), data.draw(st.booleans())
    found, row, token = BeamTopK(vocab_size).best(logits, scores, count, suppressed=suppressed, processed=processed)
    np.testing.assert_array_equal(logits, before)
    total = 0 if processed else np.logaddexp.reduce(logits.astype(np.float64), axis=2, keepdims=True)
    exact = logits - total + scores[:, :, None]
    if suppressed is not None:
        exact[:, :, suppressed] = -np.inf
    flat = exact.reshape(batch, -1)
    count = min(count, flat.shape[1])
    assert found.shape == row.shape == token.shape == (batch, count) and found.dtype == np.float32
    assert_close(found, -np.sort(-flat, axis=1)[:, :count], atol=2e-5, rtol=2e-6)
    assert_close(found, np.take_along_axis(flat, row * vocab_size + token, axis=1), atol=2e-5, rtol=2e-6)
    assert all(len(set(chosen)) == count for chosen in (row * vocab_size + token).tolist()), "none twice"


def test_top_k_of_less_permitted_tokens_stays_in_the_vocabulary() -> None:
    """1009 is a prime: no grid holds it, and its places behind the vocabulary are as unlikely as suppressed tokens."""
    never = tuple({*range(1009)} - {1, 5, 6})
    logits, scores = np.zeros((1, 2, 1009), dtype=np.float32), np.zeros((1, 2))
    found, _, tokens = BeamTopK(1009).best(logits, scores, 16, suppressed=never)
    assert tokens.max() < 1009 and sorted(tokens[np.isfinite(found)].tolist()) == [1, 1, 5, 5, 6, 6]


def test_accepts_numbers_of_numpy() -> None:
    options = dict(num_beams=np.int64(2), num_return_sequences=np.int32(2), length_penalty=np.float32(0.5))
    assert beam_search(Toy(), [[3]], max_new_tokens=np.int64(4), **options).sequences.shape == (2, 4)
