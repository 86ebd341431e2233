"""Greedy search equals transformers on padded batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import ToyBackend, broken, own_generate

from t5accel.backends.torch_eager import TorchEager
from t5accel.decoding.backend import Backend, Generated
from t5accel.decoding.greedy_search import greedy
from t5accel.parity import assert_varied

ROOT = Path(__file__).resolve().parents[2]


# Equal to transformers


def generate(model: Any, ids: np.ndarray, mask: np.ndarray, **options: Any) -> np.ndarray:
    """What transformers generates, without the start token; checked to vary."""
    expected = own_generate(model, ids, mask, **options)[:, 1:].numpy()
    assert_varied(expected)
    return expected


def check_equals_generate(backend: Backend, model: Any, ids: np.ndarray, mask: np.ndarray, **options: Any) -> None:
    expected = generate(model, ids, mask, **options)
    np.testing.assert_array_equal(greedy(backend, ids, mask, **options).sequences, expected)


def end_positions(sequences: np.ndarray, end: int) -> list[int]:
    """Where the rows that end by themselves do so."""
    return [row.tolist().index(end) for row in sequences if end in row]


@pytest.fixture
def ending_t5(tiny_t5, ending) -> Callable[[str], Any]:
    return lambda kind: tiny_t5(kind, **ending(kind))


def test_min_new_tokens_defers_the_end(ending_t5, padded_batch) -> None:
    model = ending_t5("deeper-decoder")
    backend = TorchEager(model)
    end = model.config.eos_token_id
    at_least = min(end_positions(generate(model, *padded_batch, max_new_tokens=14), end)) + 3
    check_equals_generate(backend, model, *padded_batch, min_new_tokens=at_least, max_new_tokens=14)
    free, deferred = (
        greedy(backend, *padded_batch, min_new_tokens=n, max_new_tokens=14).sequences for n in (0, at_least)
    )
    assert end in free[:, :at_least] and end not in deferred[:, :at_least]


@pytest.mark.parametrize("with_start", [True, False])
def test_continues_a_prefix(tiny_t5, padded_batch, with_start: bool) -> None:
    model = tiny_t5()
    prefix = np.random.default_rng(5).integers(3, 300, (len(padded_batch[0]), 4))
    prefix[:, 0] = model.config.decoder_start_token_id if with_start else prefix[:, 0]
    options: dict[str, Any] = dict(decoder_input_ids=prefix, max_new_tokens=8, min_new_tokens=3)
    check_equals_generate(TorchEager(model), model, *padded_batch, **options)


@pytest.mark.parametrize("kind", ["deeper-decoder", "umt5"])
def test_an_answer_does_not_depend_on_its_batch(ending_t5, kind: str, padded_batch) -> None:
    backend, (ids, mask) = TorchEager(ending_t5(kind)), padded_batch
    together = greedy(backend, ids, mask, max_new_tokens=14).sequences
    assert_varied(together)
    assert len(np.unique(together, axis=0)) == len(ids), "sources should have different answers"
    for row, (source, real) in enumerate(zip(ids, mask, strict=True)):
        alone = greedy(backend, source[None, : real.sum()], max_new_tokens=14).sequences[0]
        np.testing.assert_array_equal(alone, together[row, : len(alone)])
        assert not together[row, len(alone) :].any()
    backwards = greedy(backend, ids[::-1], mask[::-1], max_new_tokens=14).sequences[::-1]
    np.testing.assert_array_equal(backwards, together)
    wider = (np.pad(array, ((0, 0), (0, 5))) for array in (ids, mask))
    np.testing.assert_array_equal(greedy(backend, *wider, max_new_tokens=14).sequences, together)


def test_accepts_lists_and_tensors_without_a_mask(tiny_t5, padded_batch) -> None:
    backend, (ids, mask) = TorchEager(tiny_t5()), padded_batch
    search = partial(greedy, backend, max_new_tokens=6)
    expected = search(ids, mask).sequences
    assert expected.dtype == np.int64
    tensors = torch.as_tensor(ids), torch.as_tensor(mask)
    for given_ids, given_mask in (
        (ids, None), (ids.tolist(), mask.tolist()), tensors, (ids.astype(np.uint16), mask == 1), (tensors[0], None),
    ):  # fmt: skip
        np.testing.assert_array_equal(search(given_ids, given_mask).sequences, expected)


def test_ids_at_masked_positions_do_not_matter(tiny_t5, padded_batch) -> None:
    ids, mask = padded_batch
    backend = TorchEager(tiny_t5())
    garbage = np.where(mask == 1, ids, 17)
    expected = greedy(backend, ids, mask, max_new_tokens=8).sequences
    assert_varied(expected)
    np.testing.assert_array_equal(greedy(backend, garbage, mask, max_new_tokens=8).sequences, expected)
    assert not np.array_equal(greedy(backend, garbage, max_new_tokens=8).sequences, expected), "the mask should matter"


BROKEN: dict[str, dict[str, Any]] = {
    "no mask": dict(encode=lambda self, ids, mask: TorchEager.encode(self, ids, np.ones_like(mask))),
    "keeps the wrong sources": dict(
        select_sources=lambda self, state, kept: TorchEager.select_sources(self, state, np.arange(len(kept)))),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_backend_is_caught(ending_t5, padded_batch, name: str) -> None:
    model = ending_t5("deeper-decoder")
    with pytest.raises(AssertionError, match="Mismatched elements|shapes"):
        for batch in (padded_batch, [array[::-1].copy() for array in padded_batch]):  # those that end are last in one
            check_equals_generate(broken(**BROKEN[name])(model), model, *batch, max_new_tokens=14)


# The loop on a toy backend


class Counter(ToyBackend):
    """Goes on from the source's first token, one up each step, and ends at 9."""

    vocab_size, eos_token_id = 10, 9

    def next(self, source: list[int], past: list[int]) -> np.ndarray:
        return np.eye(10)[source[0] + len(past) - 1]


def test_rows_end_pad_and_leave_the_batch() -> None:
    toy = Counter()
    result = greedy(toy, [[8], [5], [8], [2]], max_new_tokens=20)
    assert isinstance(result, Generated) and result.scores is None
    assert result.sequences.tolist() == [
        [8, 9, 0, 0, 0, 0, 0, 0], [5, 6, 7, 8, 9, 0, 0, 0], [8, 9, 0, 0, 0, 0, 0, 0], [2, 3, 4, 5, 6, 7, 8, 9],
    ]  # fmt: skip
    assert toy.calls.count("encode") == 1 and result.decoder_calls == 8
    assert [width for width, _ in toy.shapes] == [4, 4, 2, 2, 2, 1, 1, 1], (
        "finished rows should leave as soon as half of the batch is done"
    )


def test_a_generous_bound_costs_no_memory() -> None:
    assert greedy(Counter(), [[7]], max_new_tokens=10**15).sequences.tolist() == [[7, 8, 9]]
