"""Beam search on `TorchStatic` by runs of many steps: the sequences and scores of transformers."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import own_generate
from test_beam import ALL, ENDING, PENALTIES, RULES, check_equal, ending_t5, reference
from test_torch_static import with_graphs

from t5accel.backends import torch_static
from t5accel.backends.hf_generate import AcceleratedT5
from t5accel.backends.torch_eager import TorchEager
from t5accel.backends.torch_static import TorchStatic
from t5accel.backends.torch_static_loops import MAX_LOOPS, BeamLoop
from t5accel.decoding import beam
from t5accel.decoding.beam import beam_search
from t5accel.models.load import load_model
from t5accel.parity import assert_close

__all__ = ["ending_t5", "with_graphs"]  # fixtures


@pytest.fixture
def host_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that go to the host fail the test."""
    monkeypatch.setattr(TorchStatic, "step", lambda *_: pytest.fail("the host was asked"))


@pytest.fixture
def runs(host_is_not_asked: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The steps and sources of each run of beams."""
    seen: list[tuple[int, int]] = []
    run = TorchStatic.run_beams

    def counted(backend: Any, state: Any, input_ids: np.ndarray, *arguments: Any, **options: Any) -> Any:
        found = run(backend, state, input_ids, *arguments, **options)
        seen.append((len(found[0]), len(input_ids)))
        return found

    monkeypatch.setattr(TorchStatic, "run_beams", counted)
    return seen


# Equal to the loop on the host, which equals transformers


@settings(deadline=None, max_examples=15, derandomize=True)
@given(name=st.sampled_from([*ENDING]), seed=st.integers(0, 2**16), beams=st.integers(1, 8), data=st.data())
def test_equals_the_host_loop_whatever_is_asked(
    ending_t5, name: str, seed: int, beams: int, data: st.DataObject
) -> None:
    model, rng = ending_t5(name), np.random.default_rng(seed)
    lengths = rng.integers(1, 9, rng.integers(1, 6))
    mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
    longest = data.draw(st.integers(1, 40))
    other = st.none() | st.integers(2, 299)
    ends = (1, *data.draw(st.lists(st.integers(2, 299), max_size=2, unique=True)))
    never = tuple(data.draw(st.lists(st.integers(0, 299).filter(lambda token: token not in ends), max_size=5)))
    rules = replace(
        TorchEager(model).rules, eos_token_ids=ends if len(ends) > 1 else (), suppress_tokens=never,
        forced_eos_token_id=data.draw(st.none() | st.sampled_from(ends)), renormalize_logits=data.draw(st.booleans()),
    )  # fmt: skip
    options: dict[str, Any] = dict(
        num_beams=beams,
        num_return_sequences=data.draw(st.integers(1, beams)),
        length_penalty=data.draw(st.sampled_from(PENALTIES)),
        early_stopping=data.draw(st.sampled_from(RULES)),
        max_new_tokens=longest,
        min_new_tokens=data.draw(st.just(0) | st.integers(0, longest)),
        forced_bos_token_id=data.draw(other.filter(lambda token: token not in ends)),
        decoder_start_token_id=data.draw(other),
    )
    if width := data.draw(st.integers(0, 3)):
        options["decoder_input_ids"] = rng.integers(2, 300, (len(mask), width))
    backends = TorchEager(model), TorchStatic(model, buckets=(8, 16, 64))
    for backend in backends:
        backend.rules = rules
    ids = rng.integers(3, 300, mask.shape) * mask
    expected, found = (beam_search(one, ids, mask, **options) for one in backends)
    np.testing.assert_array_equal(found.sequences, expected.sequences)
    assert_close(found.scores, expected.scores, atol=1e-4, rtol=2e-6)


def test_a_vocabulary_smaller_than_the_candidates_is_left_to_the_host(tiny_t5) -> None:
    model = tiny_t5(vocab_size=9)
    ids = np.random.default_rng(1).integers(2, 9, (4, 6))
    for beams in (4, 8):  # eight want 16 candidates of nine
        expected, found = (
            beam_search(one, ids, num_beams=beams, num_return_sequences=beams, max_new_tokens=10)
            for one in (TorchEager(model), TorchStatic(model))
        )
        np.testing.assert_array_equal(found.sequences, expected.sequences)


def test_generate_searches_in_runs(ending_t5, padded_batch, runs) -> None:
    own = ending_t5("untied")
    model = AcceleratedT5.around(TorchStatic(own))
    ids, mask = (torch.as_tensor(array) for array in padded_batch)
    prefix = torch.randint(3, 300, (len(ids), 2), generator=torch.Generator().manual_seed(0))
    for options in (
        dict(), dict(num_return_sequences=2, early_stopping=True), dict(length_penalty=2.0, early_stopping="never"),
        dict(forced_bos_token_id=7, forced_eos_token_id=1, suppress_tokens=[9, 2000]), dict(renormalize_logits=True),
        dict(min_new_tokens=9, bad_words_ids=[[7], [1], [11]]), dict(min_length=5, decoder_input_ids=prefix),
    ):  # fmt: skip
        options = dict(num_beams=3, max_new_tokens=14, do_sample=False, **options)
        expected = own_generate(own, ids, mask, **options)
        assert torch.equal(model.generate(ids, attention_mask=mask, **options), expected)
        assert runs, options
        runs.clear()


def test_generate_leaves_the_rest_to_transformers(ending_t5, padded_batch, monkeypatch) -> None:
    own = ending_t5("tied")
    model = AcceleratedT5.around(TorchStatic(own))
    monkeypatch.setattr(TorchStatic, "run_beams", lambda *_, **__: pytest.fail("no run was expected"))
    ids, mask = (torch.as_tensor(array) for array in padded_batch)
    options = dict(num_beams=3, max_new_tokens=9, no_repeat_ngram_size=2)
    assert torch.equal(model.generate(ids, attention_mask=mask, **options), own_generate(own, ids, mask, **options))
    scored = model.generate(ids, attention_mask=mask, num_beams=3, max_new_tokens=9, return_dict_in_generate=True,
                            output_scores=True)  # fmt: skip
    assert scored.sequences_scores.shape == (6,)


# What a run is


def test_runs_grow_up_to_where_the_rules_change(tiny_t5, padded_batch, runs) -> None:
    backend, options = TorchStatic(tiny_t5()), dict(num_beams=2, max_new_tokens=70)
    batch = [array[:2] for array in padded_batch]
    beam_search(backend, *batch, min_new_tokens=70, **options)
    assert [steps for steps, _ in runs] == [8, 16, 32, 14]
    runs.clear()
    beam_search(backend, *batch, min_new_tokens=10, **options)
    assert [steps for steps, _ in runs][:3] == [8, 2, 32]


def test_sources_leave_between_runs(ending_t5, padded_batch, runs, monkeypatch) -> None:
    """The batch shrinks by powers of two."""
    model, batch = ending_t5("tied"), [np.concatenate([array] * 2) for array in padded_batch]
    monkeypatch.setattr(beam, "MAX_RUN_STEPS", 2)
    monkeypatch.setattr(beam, "FIRST_RUN", 2)
    expected = beam_search(TorchEager(model), *batch, **ALL)
    found = beam_search(TorchStatic(model), *batch, **ALL)
    np.testing.assert_array_equal(found.sequences, expected.sequences)
    widths = [batch for _, batch in runs]
    assert widths[0] == 12 and widths[-1] in (1, 2, 4) and widths == sorted(widths, reverse=True)


def test_replayed_steps_find_the_same(ending_t5, padded_batch, with_graphs) -> None:
    """From buffers that others used before, and that move to a larger bucket in the middle of a search."""
    model = ending_t5("tied")
    backend = with_graphs(model, buckets=(8, 16, 32))
    options: dict[str, Any] = dict(num_beams=3, num_return_sequences=3, max_new_tokens=30, length_penalty=2.0)
    expected = beam_search(TorchEager(model), *padded_batch, **options)
    captured = []
    for _ in range(2):
        found = beam_search(backend, *padded_batch, **options)
        captured.append(backend.captured)
        np.testing.assert_array_equal(found.sequences, expected.sequences)
        assert_close(found.scores, expected.scores, atol=1e-4)
    assert captured[0] == captured[1] > 1, "the second time all graphs are there"


def test_few_graphs_are_kept_for_each_shape(tiny_t5, padded_batch) -> None:
    backend = TorchStatic(tiny_t5())
    state = backend.new_state(backend.encode(*padded_batch), 2)
    start, scores = np.zeros((6, 2, 1), dtype=np.int64), np.zeros((6, 2), dtype=np.float32)
    for end in range(1, MAX_LOOPS + 3):
        backend.run_beams(state, start, scores, 1, ends=(end,))
    kept = [*state.buffers.loops.values()]
    assert len(kept) == MAX_LOOPS and all(isinstance(loop, BeamLoop) for loop in kept)
    assert [loop.ends.item() for loop in kept] == [3, 4, 5, 6]
    backend.run_beams(state, start, scores, 1, ends=(3,))
    assert [*state.buffers.loops.values()][-1] is kept[0]


def test_memory_is_freed_without_the_collector(tiny_t5, monkeypatch) -> None:
    """Which a device that has none left does not call."""
    monkeypatch.setattr(torch_static, "KEPT_BYTES", 0)
    backend, options = TorchStatic(copy.deepcopy(tiny_t5())), dict(num_beams=2, max_new_tokens=4)
    gc.collect()
    gc.disable()
    try:
        beam_search(backend, np.full((2, 3), 5), **options)
        first, weights = weakref.ref(backend._free[0]), weakref.ref(backend.decoder)
        beam_search(backend, np.full((3, 3), 5), **options)
        assert first() is None, "another shape took its place"
        del backend
        assert weights() is None
    finally:
        gc.enable()


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ENDING)
def test_a_gpu_finds_what_transformers_finds(ending_t5, padded_batch, name: str, rule: bool | str) -> None:
    model = ending_t5(name)
    backend = TorchStatic(copy.deepcopy(model).to("cuda"))
    for beams in (2, 4):
        options: dict[str, Any] = dict(num_beams=beams, num_return_sequences=2, early_stopping=rule, max_new_tokens=14)
        check_equal(beam_search(backend, *padded_batch, **options), reference(model, *padded_batch, **options))
    assert backend.captured


@pytest.mark.gpu
@pytest.mark.parametrize("beams", [2, 4])
def test_a_gpu_finds_what_transformers_finds_at_t5_smalls_size(beams: int) -> None:
    model = load_model("random:t5-small")[0]
    ids = np.random.default_rng(beams).integers(3, 32000, (8, 20))
    options: dict[str, Any] = dict(num_beams=beams, max_new_tokens=40)
    on_gpu = torch.as_tensor(ids, device="cuda")
    expected = model.to("cuda").generate(on_gpu, attention_mask=torch.ones_like(on_gpu), **options)[:, 1:].cpu().numpy()
    found = beam_search(TorchStatic(model), ids, **options)
    np.testing.assert_array_equal(found.sequences, expected)
