"""Lookup: greedy search's tokens from fewer calls where text is copied, and hardly a wasted guess where it is not."""

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
from test_drafting import RUNTIMES, Machine, sources

from bench import tasks
from t5accel.backends.ort_iobinding import OrtBound
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.torch_eager import TorchEager
from t5accel.decoding.backend import Generated
from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.ngram_lookup import FIXED, VERIFYING, NgramDrafter, NgramIndex, best_length, prompt_lookup
from t5accel.decoding.request import GenerationInputs
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
def test_the_tokens_are_greedy_searchs(seed: int, batch, copies, ends, longest, ngram: int, most: int, data) -> None:
    options: dict[str, Any] = dict(max_new_tokens=longest, min_new_tokens=data.draw(st.integers(0, longest)))
    if data.draw(st.booleans(), "prefix"):
        options["decoder_input_ids"] = np.random.default_rng(seed).integers(2, 12, (batch, 3))
    ids, mask = sources(seed, batch)
    backend = Machine(copies, ends, seed)
    expected = greedy(backend, ids, mask, **options)
    found = prompt_lookup(backend, ids, mask, max_ngram=ngram, max_draft=most, **options)
    np.testing.assert_array_equal(found.sequences, expected.sequences)
    assert found.decoder_calls <= expected.decoder_calls
    assert 0 <= found.accepted <= found.drafted


def test_copied_text_takes_few_calls() -> None:
    source = random.Random(0).sample(range(2, 400), 60)

    class Copies(Machine):
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


def test_text_that_does_not_copy_is_hardly_guessed_at() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(2, 400, (8, 60))

    class Writes(Machine):
        vocab_size = 400

        def next(self, source: list[int], past: list[int]) -> np.ndarray:
            return np.random.default_rng([len(past), source[0]]).normal(size=400)

    for row in ids:
        machine = Writes()
        found = prompt_lookup(machine, row[None], max_new_tokens=60, min_new_tokens=60)
        wasted = sum(count - 1 for _, count in machine.shapes)
        assert wasted <= 8 and sum(count > 1 for _, count in machine.shapes) <= 3
        assert found.decoder_calls >= 58


promised = st.lists(st.tuples(st.integers(1, 12), st.floats(0, 1)), max_size=6)


@settings(max_examples=200)
@given(promised, st.integers(0, 6))
def test_the_length_brings_the_most_tokens_for_its_time(promises: list[tuple[int, float]], others: int) -> None:
    rows = len(promises) + others
    if not rows:
        return

    def rate(length: int) -> float:
        tokens = rows + sum(odds**n for longest, odds in promises for n in range(1, min(length, longest) + 1))
        return tokens / (FIXED + rows * (1 + length) + (VERIFYING if length else 0))

    found = best_length(promises, rows)
    assert rate(found) == pytest.approx(max(rate(length) for length in range(13)))
    assert best_length(promises, rows + 5) <= found, "a row that guesses nothing makes guesses dearer"


def test_what_keeps_failing_is_no_longer_guessed() -> None:
    class Almost(Machine):
        """Writes its source, but after every third token something else."""

        vocab_size = 400

        def next(self, source: list[int], past: list[int]) -> np.ndarray:
            return np.eye(400)[source[len(past)] if len(past) % 3 else 3 + len(past)]

    source = random.Random(0).sample(range(100, 400), 90)
    found = prompt_lookup(Almost(), [source], max_new_tokens=80)
    assert found.accepted < 10 and found.drafted < 30 and found.decoder_calls > 70
    always = prompt_lookup(Machine(copies=1.0, ends=0.0), *sources(2, 1), max_new_tokens=64)
    assert always.drafted > 30


def test_its_own_output_is_searched_too() -> None:
    class Circles(Machine):
        def next(self, source: list[int], past: list[int]) -> np.ndarray:
            return np.eye(12)[2 + len(past) % 7]

    found = prompt_lookup(Circles(), [[11]], max_new_tokens=42)
    assert found.accepted > 15 and found.decoder_calls < 25
    np.testing.assert_array_equal(found.sequences, greedy(Circles(), [[11]], max_new_tokens=42).sequences)


def test_padding_is_not_searched() -> None:
    machine = Machine(copies=0.0)
    ids, mask = np.array([[0, 5, 0, 5, 0, 5], [3, 4, 5, 6, 7, 8]]), np.array([[0, 0, 0, 0, 0, 1], [1] * 6])
    prompt_lookup(machine, ids, mask, max_new_tokens=1)
    first = Machine(copies=0.0)
    prompt_lookup(first, ids, mask, max_new_tokens=12)
    assert first.shapes[0] == (2, 1), "the start token is a padding token, and nothing follows it in a source"


# The index


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30), st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=4),
    st.integers(1, 4),
)  # fmt: skip
def test_a_match_is_where_the_longest_ngram_came_last(begin: list[int], more: list[list[int]], ngram: int) -> None:
    text, tokens = NgramIndex(list(begin), ngram), list(begin)
    for part in [[], *more]:
        text.extend(part)
        tokens += part
        assert text.tokens == tokens
        expected = next(
            (
                place
                for n in range(min(ngram, len(tokens)), 0, -1)
                for place in range(len(tokens) - 1, n - 1, -1)
                if tokens[place - n : place] == tokens[len(tokens) - n :]
            ),
            None,
        )
        place, run = text.match()
        if expected is None:
            assert run == 0
        else:
            assert place == expected and 1 <= run
            assert tokens[place - run : place] == tokens[len(tokens) - run :]


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
    for name in tasks.NAMES:
        texts = [tasks.source_text(name, row) for row in tasks.rows(name)[:8]]
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
def test_the_bundled_model_says_the_same(exported_mini, runtime: type) -> None:
    check_lossless(exported_mini, runtime)


@pytest.mark.parametrize("bits", [8, 4])
def test_integer_weights_are_lossless_where_products_are_those_of_floats(precise, bits: int) -> None:
    check_lossless(precise(in_blocks(bits, level=1)))


@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_rounded_activations_say_nearly_the_same(precise, recipe: str) -> None:
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


def test_the_bundled_model_by_torch(mini) -> None:
    model, tokenizer = mini
    backend = TorchEager(model)
    texts = [tasks.source_text("summaries", row) for row in tasks.rows("summaries")[:3]]
    ids, mask = (tokenizer(texts, return_tensors="np", padding=True)[name] for name in ("input_ids", "attention_mask"))
    expected, found = greedy(backend, ids, mask), prompt_lookup(backend, ids, mask)
    assert_varied(expected.sequences)
    np.testing.assert_array_equal(found.sequences, expected.sequences)
    assert found.decoder_calls < expected.decoder_calls / 1.5 and found.accepted > 20


# Bad input


def test_no_options() -> None:
    call = partial(prompt_lookup, Machine(), [[3]])
    refused(call, "max_ngram", 0, 2.0, 10**9)
    refused(call, "max_draft", 0, None)
    refused(call, "max_new_tokens", 0)
    refused(call, "min_new_tokens", 70)
    refused(call, "decoder_input_ids", [[12]], match="0 … 11")


def test_an_answer_does_not_depend_on_its_batch() -> None:
    ids, mask = sources(4, 6)
    together = prompt_lookup(Machine(ends=0.1), ids, mask, max_new_tokens=25).sequences
    assert_varied(together)
    for row, (source, real) in enumerate(zip(ids, mask, strict=True)):
        alone = prompt_lookup(Machine(ends=0.1), source[None, : real.sum()], max_new_tokens=25).sequences[0]
        np.testing.assert_array_equal(alone, together[row, : len(alone)])
        assert not together[row, len(alone) :].any()


# Looking only where it may pay


def test_a_batch_that_finds_nothing_looks_less_often_and_one_row_always(monkeypatch) -> None:
    looks: list[int] = []
    look = NgramDrafter._guess
    monkeypatch.setattr(NgramDrafter, "_guess", lambda self, row, most: (looks.append(row), look(self, row, most))[1])
    for rows, expected in ((1, 30), (2, 15), (8, 8)):
        request = GenerationInputs.checked(Machine(0.0, 0.0, 0), np.full((rows, 1), 7), max_new_tokens=64)
        copier, looks[:] = NgramDrafter(request, 3, 12), []
        for call in range(30):
            drafts = copier.propose(range(rows), [60] * rows, [0] * rows)
            assert not any(drafts)
            copier.update(range(rows), drafts, [[100 + 40 * row + call] for row in range(rows)])
        assert len(looks) == pytest.approx(expected * rows, abs=2 * rows)


def test_what_came_while_it_rested_is_looked_up_later() -> None:
    rows = 8
    request = GenerationInputs.checked(Machine(0.0, 0.0, 0), np.full((rows, 1), 7), max_new_tokens=64)
    copier, drafts = NgramDrafter(request, 3, 12), []
    text = [*range(20, 36)] * 3  # nothing comes twice in the first sixteen calls
    for token in text:
        drafts.append(copier.propose(range(rows), [60] * rows, [0] * rows))
        copier.update(range(rows), drafts[-1], [[token]] * rows)
    assert not any(map(any, drafts[:17])) and any(map(any, drafts[17:]))
    for call, found in enumerate(drafts):
        for draft in filter(None, found):
            assert draft == text[call : call + len(draft)]
