"""Prompt lookup: the tokens of greedy search in fewer calls where text is copied, and few drafts where it is not."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import refused
from test_drafting import RUNTIMES, ToyBackend, sources

from bench import evaluation
from bench.baselines.ort_iobinding import OrtBound
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.decoding.backend import Generated
from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.ngram_lookup import prompt_lookup
from t5accel.parity import assert_varied, token_agreement
from t5accel.precision.convert import convert_export
from t5accel.precision.recipes import Recipe, Scheme
from t5accel.tokenization import TokenizerFile

ONE_THREAD = SessionSettings(threads=1)


@settings(deadline=None, max_examples=150, derandomize=True)
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


# On runtimes and on the bundled model


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_equals_greedy_on_runtimes(opened, kind: str, padded_batch, runtime: Any) -> None:
    """With forty tokens to choose from, a lively model repeats itself often, and not for ever."""
    ids, mask = padded_batch[0] % 37 + 3 * padded_batch[1], padded_batch[1]
    drafted = accepted = 0
    backend = opened(runtime, kind, seed=5, vocab_size=40)
    for options, rows in (
        (dict(max_new_tokens=30), slice(6)),
        (dict(max_new_tokens=30), slice(2)),
        (dict(max_new_tokens=30), slice(2, 4)),
        (dict(max_new_tokens=16, min_new_tokens=16, max_ngram=1), slice(6)),
        (dict(max_new_tokens=9, decoder_input_ids=ids[:, :2] + 1), slice(6)),
    ):
        bounds_only = {key: value for key, value in options.items() if key != "max_ngram"}
        expected = greedy(backend, ids[rows], mask[rows], **bounds_only)
        assert_varied(expected.sequences)
        found = prompt_lookup(backend, ids[rows], mask[rows], **options)
        np.testing.assert_array_equal(found.sequences, expected.sequences)
        drafted, accepted = drafted + found.drafted, accepted + found.accepted
    assert 0 < accepted < drafted, "guesses should be accepted and rejected"


def in_blocks(bits: int, level: int) -> Recipe:
    """Weights only, in blocks of 32; at level 1 products are those of floats, at level 4 activations are rounded."""
    scheme = Scheme(bits=bits, block_size=32, accuracy_level=level)
    return Recipe(f"{bits}bits-level{level}", encoder=scheme, decoder=scheme, head=scheme, embedding=scheme)


@pytest.fixture(scope="module")
def precise(exported_mini, tmp_path_factory) -> Callable[[Recipe | str], Path]:
    """``precise(recipe)``: the bundled model's export in that precision."""

    @cache
    def convert(recipe: Recipe | str) -> Path:
        folder = tmp_path_factory.mktemp("precise") / "export"
        convert_export(exported_mini, folder, recipe)
        return folder

    return convert


def compared(folder: Path, runtime: type = OrtNumpy) -> Iterator[tuple[str, Generated, Generated]]:
    """Greedy search and lookup on texts of all three tasks, alone and in batches."""
    backend, tokenizer = runtime(folder, settings=ONE_THREAD), TokenizerFile(folder)
    for name in evaluation.NAMES:
        texts = [evaluation.source_text(name, row) for row in evaluation.rows(name)[:8]]
        for batch in (texts[:1], texts[1:2], texts[2:]):
            ids, mask = tokenizer(batch).values()
            yield name, greedy(backend, ids, mask), prompt_lookup(backend, ids, mask)


def check_lossless(folder: Path, runtime: type = OrtNumpy) -> None:
    calls, saved, found = Counter(), Counter(), Counter()
    for name, expected, guessed in compared(folder, runtime):
        np.testing.assert_array_equal(guessed.sequences, expected.sequences)
        calls[name] += guessed.decoder_calls
        saved[name] += expected.decoder_calls - guessed.decoder_calls
        found["accepted"] += guessed.accepted
        found["rejected"] += guessed.drafted - guessed.accepted
    assert saved["summaries"] > calls["summaries"] / 8 and min(saved.values()) >= 0
    assert found["accepted"] > 10 and found["rejected"] > 10


@pytest.mark.parametrize("runtime", [OrtNumpy, OrtBound])
def test_equals_greedy_on_the_bundled_model(exported_mini, runtime: type) -> None:
    check_lossless(exported_mini, runtime)


@pytest.mark.parametrize("bits", [8, 4])
def test_integer_weights_with_float_products_are_lossless(precise, bits: int) -> None:
    check_lossless(precise(in_blocks(bits, level=1)))


@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_rounded_activations_nearly_agree(precise, recipe: str) -> None:
    """A single token is multiplied by another kernel than several: the docstring says so, and here it is seen."""
    agreed = [
        token_agreement(found.sequences, expected.sequences, 0) for _, expected, found in compared(precise(recipe))
    ]
    assert np.mean(agreed) > 0.9
    backend = OrtNumpy(precise(recipe), settings=ONE_THREAD)
    source, tokens = backend.encode(*sources(0, 1)), np.array([[[0, 40, 50]]])
    state, other = backend.new_state(source), backend.new_state(source)
    together = backend.step(state, tokens)
    one_by_one = np.concatenate([backend.step(other, tokens[:, :, place : place + 1]) for place in range(3)], axis=2)
    assert np.abs(together - one_by_one).max() < 0.1 * one_by_one.std()


# Invalid input


def test_invalid_options() -> None:
    call = partial(prompt_lookup, ToyBackend(), [[3]])
    refused(call, "max_ngram", 0, 2.0, 10**9)
    refused(call, "max_draft", 0, None)
    refused(call, "max_new_tokens", 0)
    refused(call, "min_new_tokens", 70)
    refused(call, "decoder_input_ids", [[12]], match="0 … 11")
