"""Prompt lookup: the tokens of greedy search in fewer calls where text is copied, and few drafts where it is not."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import ToyBackend
from test_drafting import sources

from bench import evaluation
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.ngram_lookup import prompt_lookup
from t5accel.parity import assert_varied
from t5accel.precision.convert import convert_export
from t5accel.precision.recipes import Recipe, Scheme
from t5accel.tokenization import TokenizerFile


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    seed=st.integers(0, 2**16), batch=st.integers(1, 6), copies=st.sampled_from([0.0, 0.7, 1.0]),
    ends=st.sampled_from([0.0, 0.05, 0.3]), longest=st.integers(1, 30), ngram=st.integers(1, 5),
    most=st.integers(1, 12), data=st.data(),
)  # fmt: skip
def test_equals_greedy(seed: int, batch, copies, ends, longest, ngram: int, most: int, data) -> None:
    options: dict[str, Any] = dict(max_new_tokens=longest, min_new_tokens=data.draw(st.integers(0, longest)))
    if data.draw(st.booleans(), "prefix"):
        options["decoder_input_ids"] = np.random.default_rng(seed).integers(2, 12, (batch, 3))
    ids, mask = sources(seed, batch)
    backend = ToyBackend(copies, ends, seed)
    expected = greedy(backend, ids, mask, **options)
    found = prompt_lookup(backend, ids, mask, max_ngram=ngram, max_draft=most, **options)
    np.testing.assert_array_equal(found.sequences, expected.sequences)
    assert found.decoder_calls <= expected.decoder_calls
    assert 0 <= found.accepted <= found.drafted


def test_copied_text_takes_few_calls() -> None:
    source = random.Random(0).sample(range(2, 400), 60)

    class Copies(ToyBackend):
        vocab_size = 400

        def next(self, source: list[int], past: list[int]) -> np.ndarray:
            here = source.index(past[-1]) + 1 if past[-1] else 10  # it begins to copy in the middle
            return np.eye(400)[source[here] if here < 50 else 1]

    expected = greedy(Copies(), [source], max_new_tokens=60)
    found = prompt_lookup(Copies(), [source], max_new_tokens=60)
    np.testing.assert_array_equal(found.sequences, expected.sequences)
    assert_varied(found.sequences)
    assert expected.decoder_calls == 41 and found.decoder_calls < 10
    assert found.accepted > 30


def test_text_without_copies_is_hardly_drafted() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(2, 400, (8, 60))

    class Writes(ToyBackend):
        vocab_size = 400

        def next(self, source: list[int], past: list[int]) -> np.ndarray:
            return np.random.default_rng([len(past), source[0]]).normal(size=400)

    for row in ids:
        toy = Writes()
        found = prompt_lookup(toy, row[None], max_new_tokens=60, min_new_tokens=60)
        wasted = sum(count - 1 for _, count in toy.shapes)
        assert wasted <= 8 and sum(count > 1 for _, count in toy.shapes) <= 3
        assert found.decoder_calls >= 58


def test_searches_its_own_output() -> None:
    class Circles(ToyBackend):
        def next(self, source: list[int], past: list[int]) -> np.ndarray:
            return np.eye(12)[2 + len(past) % 7]

    found = prompt_lookup(Circles(), [[11]], max_new_tokens=42)
    assert found.accepted > 15 and found.decoder_calls < 25
    np.testing.assert_array_equal(found.sequences, greedy(Circles(), [[11]], max_new_tokens=42).sequences)


def test_a_vocabulary_of_the_sources_own_is_not_copied() -> None:
    class Two(ToyBackend):
        source_vocab_size = 40

        def next(self, source: list[int], past: list[int]) -> np.ndarray:
            assert max(past) < 12, "the decoder should have an entry for every token that it reads"
            return np.eye(12)[(past[-1] + 1) % 12 or 2]

    found = prompt_lookup(Two(), [[2, 3, 30, 31]], max_new_tokens=9, min_new_tokens=9, decoder_input_ids=[[2]])
    assert found.sequences.tolist() == [[2, 3, 4, 5, 6, 7, 8, 9, 10, 11]] and not found.drafted


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_equals_greedy_on_the_bundled_model(exported_mini, tmp_path: Path, bits: int | None) -> None:
    """On texts of all three tasks, alone and in batches; in integers, where products are those of floats."""
    folder = exported_mini if bits is None else tmp_path / "blocks"
    if bits:
        scheme = Scheme(bits=bits, block_size=32, accuracy_level=1)
        recipe = Recipe("blocks", encoder=scheme, decoder=scheme, head=scheme, embedding=scheme)
        convert_export(exported_mini, folder, recipe)
    backend, tokenizer = OrtNumpy(folder, settings=SessionSettings(threads=1)), TokenizerFile(folder)
    calls, saved, accepted, drafted = Counter(), Counter(), 0, 0
    for name in evaluation.NAMES:
        texts = [evaluation.source_text(name, row) for row in evaluation.rows(name)[:8]]
        for batch in (texts[:1], texts[1:2], texts[2:]):
            ids, mask = tokenizer(batch).values()
            expected, found = greedy(backend, ids, mask), prompt_lookup(backend, ids, mask)
            np.testing.assert_array_equal(found.sequences, expected.sequences)
            calls[name] += found.decoder_calls
            saved[name] += expected.decoder_calls - found.decoder_calls
            accepted, drafted = accepted + found.accepted, drafted + found.drafted
    assert saved["summaries"] > calls["summaries"] / 8 and min(saved.values()) >= 0
    assert accepted > 10 and drafted - accepted > 10
