"""Static KV buffers: growth, reuse, copies, and rows that join and leave.

`test_conformance` compares its logits with transformers' in any mixture of operations.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t5accel.backends.ort_memory import BufferPool
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.ort_static import COLUMNS, OrtStatic
from t5accel.decoding.beam import beam_search
from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.ngram_lookup import prompt_lookup
from t5accel.errors import ExportError, InputError
from t5accel.graphs.contract import STEP
from t5accel.graphs.export import export_model, t5_weights
from t5accel.graphs.fused_step import step_graph
from t5accel.parity import assert_close
from t5accel.precision.convert import convert_export

ONE_THREAD = SessionSettings(threads=1)
PRECISIONS = ("fp32", "int8", "int4")


@pytest.fixture(scope="module")
def folder_of(tiny_t5, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By precision, exports with a step, of one tiny model that does not end."""
    root = tmp_path_factory.mktemp("static")
    export_model(tiny_t5(eos_token_id=299), root / "fp32", step=True)
    for precision in PRECISIONS[1:]:
        convert_export(root / "fp32", root / precision, precision)
    return root.joinpath


@pytest.fixture(scope="module")
def opened(folder_of) -> dict[str, OrtStatic]:
    return {precision: OrtStatic(folder_of(precision), settings=ONE_THREAD) for precision in PRECISIONS}


@pytest.fixture
def own(folder_of) -> OrtStatic:
    """One that the test may change."""
    return OrtStatic(folder_of("fp32"), settings=ONE_THREAD)


def tokens_of(backend: Any, state: Any, first: np.ndarray, count: int) -> list[np.ndarray]:
    """So many greedy steps: (B, K) each."""
    found = [first]
    for _ in range(count):
        found.append(backend.next_tokens(state, found[-1][:, :, None]))
    return found[1:]


# The graph


def test_no_weight_is_stored_twice(opened) -> None:
    for backend in opened.values():
        assert (backend.folder / STEP).stat().st_size < 100_000, "they lie in the file that all graphs share"


def test_a_step_is_a_third_of_the_nodes(tiny_t5) -> None:
    kinds = [node.op_type for node in step_graph(t5_weights(tiny_t5())).nodes]
    assert kinds.count("DecoderMaskedMultiHeadAttention") == kinds.count("MultiHeadAttention") == 3
    assert kinds.count("SkipSimplifiedLayerNormalization") == 9
    assert len(kinds) < 90


@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_in_integers_it_is_nearer_to_the_portable_graph_than_fp32_is(folder_of, precision: str, padded_batch) -> None:
    """Activations are rounded at each step, so the least difference in floats may move a rounding, and logits."""
    ids, mask = padded_batch
    new = np.random.default_rng(5).integers(3, 300, (6, 1, 12))

    def logits(kind: type[OrtNumpy], precision: str = precision) -> np.ndarray:
        backend = kind(folder_of(precision), settings=ONE_THREAD)
        source = OrtNumpy(folder_of(precision), settings=ONE_THREAD).encode(ids, mask)
        state = backend.new_state(source)
        return np.concatenate([backend.step(state, new[:, :, i : i + 1]) for i in range(12)], axis=2)

    def distance(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.sqrt(np.square(a - b).mean()))

    portable, fused, exact = logits(OrtNumpy), logits(OrtStatic), logits(OrtNumpy, "fp32")
    assert 0 < 2 * distance(fused, portable) < distance(exact, portable)


@pytest.mark.parametrize("level", ["disable", "basic"])
def test_a_level_at_which_products_of_8_bits_may_saturate_is_refused(folder_of, level: str) -> None:
    with pytest.raises(InputError, match="graph_optimization must be 'extended'"):
        OrtStatic(folder_of("int8"), settings=SessionSettings(graph_optimization=level))


# Buffers


def test_buffers_grow_and_keep_the_past(own, folder_of, padded_batch) -> None:
    ids, mask = padded_batch
    count = 2 * COLUMNS + 5
    portable = OrtNumpy(folder_of("fp32"), settings=ONE_THREAD)
    found, expected = (greedy(b, ids, mask, max_new_tokens=count, min_new_tokens=count) for b in (own, portable))
    np.testing.assert_array_equal(found.sequences, expected.sequences)


def test_the_next_call_reuses_the_memory(own, padded_batch) -> None:
    ids, mask = padded_batch

    def address(count: int) -> int:
        state = own.new_state(own.encode(ids, mask))
        tokens_of(own, state, np.zeros((6, 1), dtype=np.int64), count)
        return next(iter(state.buffers.capacity.values())).ctypes.data

    grown = address(COLUMNS + 1)
    assert address(3) == address(COLUMNS + 1) == grown, "it is not allocated a second time, and need not grow again"


def test_contents_of_unused_memory_are_never_read(own, padded_batch, monkeypatch) -> None:
    """NaN in a masked column would give NaN: a rule of the operator."""
    ids, mask = padded_batch
    clean = run_with_guests(own, ids, mask)
    arrays = BufferPool.arrays

    def planted(pool: BufferPool, shapes: Any, dtype: Any) -> list[np.ndarray]:
        found = arrays(pool, shapes, dtype)
        for array in found:
            array[...] = np.nan
        return found

    monkeypatch.setattr(BufferPool, "arrays", planted)
    np.testing.assert_array_equal(run_with_guests(own, ids, mask), clean)


def run_with_guests(backend: OrtStatic, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    state = backend.new_state(backend.encode(ids[:2], mask[:2]))
    first = tokens_of(backend, state, np.zeros((2, 1), dtype=np.int64), 3)[-1]
    backend.add_sources(state, backend.encode(ids[2:4], mask[2:4]))
    return tokens_of(backend, state, np.concatenate([first, np.zeros_like(first)]), 4)[-1]


def test_beams_copy_only_the_columns_that_differ(opened, padded_batch) -> None:
    """Beams have nearly all of their history in common."""
    ids, mask = padded_batch
    backend = opened["fp32"]
    state = backend.new_state(backend.encode(ids[:1], mask[:1]), 3)
    for token in (0, 7, 8):
        backend.next_tokens(state, np.full((1, 3, 1), token))
    backend.next_tokens(state, np.array([[[4], [5], [6]]]))
    backend.reorder(state, np.array([[1, 1, 0]]))
    copied = [new.shape for _, _, new in state.buffers.pending_copies]
    assert [shape[3] for shape in copied] == [1] * len(copied), "the column in which they differ"
    assert [shape[1] for shape in copied] == [2] * len(copied), "rows 0 and 2"
    state.buffers.flush()
    for group in state.buffers.kv.values():
        np.testing.assert_array_equal(group[:, 0, :, :4], group[:, 1, :, :4])
        assert (group[:, 2, :, 3] != group[:, 1, :, 3]).any()


def test_interrupted_copies_are_made_again(own, padded_batch) -> None:
    ids, mask = padded_batch
    new = np.random.default_rng(1).integers(3, 300, (6, 2, 4))

    def after(cut: bool) -> np.ndarray:
        state = own.new_state(own.encode(ids, mask), 2)
        for i in range(3):
            own.step(state, new[:, :, i : i + 1])
        own.reorder(state, np.array([[1, 0]] * 6))
        if cut:
            array, where, value = state.buffers.pending_copies[-1]
            array[where] = value  # as if the process had been interrupted before it was taken off the list
        return own.step(state, new[:, :, 3:])

    np.testing.assert_array_equal(after(cut=True), after(cut=False))


def test_a_long_prefix_is_written_to_the_buffers(own, folder_of, padded_batch) -> None:
    ids, mask = padded_batch
    prefix = np.random.default_rng(2).integers(3, 298, (6, COLUMNS + 9))
    portable = OrtNumpy(folder_of("fp32"), settings=ONE_THREAD)
    found, expected = (greedy(b, ids, mask, decoder_input_ids=prefix, max_new_tokens=9) for b in (own, portable))
    np.testing.assert_array_equal(found.sequences, expected.sequences)
    state = own.new_state(own.encode(ids, mask))
    own.next_tokens(state, prefix[:, None])
    assert state.buffers is not None and not state.past


# Which graph


def test_the_portable_graph_is_opened_on_demand(own, folder_of, padded_batch) -> None:
    ids, mask = padded_batch
    prefix = np.full((6, 3), 9)
    greedy(own, ids, mask, max_new_tokens=4, decoder_input_ids=prefix)
    beam_search(own, ids, mask, max_new_tokens=4, num_beams=3)
    assert own._portable is None
    new, portable = np.random.default_rng(4).integers(3, 298, (6, 1, 4)), OrtNumpy(folder_of("fp32"))
    logits = []
    for backend in (own, portable):  # a draft: several tokens behind the first
        state = backend.new_state(backend.encode(ids, mask))
        backend.step(state, new[:, :, :1])
        logits.append(backend.step(state, new[:, :, 1:]))
    assert own._portable is not None
    assert_close(*logits, atol=1e-4)


@pytest.mark.parametrize("precision, reason", [("fp32", "has no"), ("fp16", "float32")])
def test_without_a_step_it_says_why(exported, tmp_path: Path, padded_batch, precision: str, reason: str) -> None:
    folder = exported()
    if precision == "fp16":
        convert_export(folder, tmp_path / "fp16", "fp16")
        folder = tmp_path / "fp16"
    backend = OrtStatic(folder, settings=ONE_THREAD)
    assert reason in backend.why_portable
    for search in (greedy, beam_search, prompt_lookup):
        found, expected = (search(b, *padded_batch, max_new_tokens=5) for b in (backend, OrtNumpy(folder)))
        np.testing.assert_array_equal(found.sequences, expected.sequences)


def test_an_older_onnxruntime_takes_the_portable_graph(folder_of, padded_batch, monkeypatch) -> None:
    monkeypatch.setattr("onnxruntime.__version__", "1.30.0")
    backend = OrtStatic(folder_of("fp32"), settings=ONE_THREAD)
    assert "1.31" in backend.why_portable
    assert greedy(backend, *padded_batch, max_new_tokens=3).decoder_calls == 3


def test_a_damaged_step_is_refused(folder_of, tmp_path: Path) -> None:
    folder = shutil.copytree(folder_of("fp32"), tmp_path / "damaged")
    (folder / STEP).write_bytes(b"\0" * (folder / STEP).stat().st_size)
    with pytest.raises(ExportError, match=STEP):
        OrtStatic(folder, verify=False)


def test_a_shortlist_chooses_the_same_tokens(tiny_t5, tmp_path: Path, padded_batch) -> None:
    export_model(tiny_t5(eos_token_id=299), tmp_path / "both", shortlist=True, step=True)
    near = OrtStatic(tmp_path / "both", settings=ONE_THREAD)
    exact = OrtStatic(tmp_path / "both", settings=SessionSettings(threads=1, shortlist=False))
    found, expected = (greedy(b, *padded_batch, max_new_tokens=20, min_new_tokens=20) for b in (near, exact))
    np.testing.assert_array_equal(found.sequences, expected.sequences)
    assert near.shortlist.steps.total() == 20
    first = np.zeros((6, 1, 1), dtype=np.int64)
    logits = [b.step(b.new_state(b.encode(*padded_batch)), first) for b in (near, exact)]
    np.testing.assert_array_equal(*logits)


# Rows that join and leave


@st.composite
def visits(draw: st.DrawFn) -> list[tuple[str, int]]:
    """What happens between steps: somebody joins, leaves or is replaced, or so many steps go by."""
    kinds = st.sampled_from(["join", "leave", "replace", "steps", "steps"])
    return draw(st.lists(st.tuples(kinds, st.integers(0, 99)), min_size=3, max_size=14))


def alone(backend: Any, ids: np.ndarray, count: int) -> tuple[list[int], list[float]]:
    """Its greedy tokens, and by how much the best logit leads at each step, in standard deviations of all."""
    state, token, tokens, leads = backend.new_state(backend.encode(ids, np.ones_like(ids))), 0, [], []
    for _ in range(count):
        logits = backend.step(state, np.full((1, 1, 1), token))[0, 0, 0]
        token = int(logits.argmax())
        second, first = np.sort(logits)[-2:]
        tokens.append(token)
        leads.append(float((first - second) / logits.std()))
    return tokens, leads


def together(backend: Any, sources: list[np.ndarray], program: list[tuple[str, int]]) -> dict[int, list[int]]:
    """By visitor, the tokens of a state that they join and leave."""
    answers: dict[int, list[int]] = {0: []}
    inside, state = [0], backend.new_state(backend.encode(sources[0], np.ones_like(sources[0])))
    tokens = np.zeros((1, 1), dtype=np.int64)
    for what, number in [*program, ("steps", 6)]:
        if what == "join" and len(answers) < len(sources):
            coming = len(answers)
            backend.add_sources(state, backend.encode(sources[coming], np.ones_like(sources[coming])))
            tokens = np.concatenate([tokens, np.zeros((1, 1), dtype=np.int64)])
            inside.append(coming)
            answers[coming] = []
        elif what == "replace" and len(answers) < len(sources):  # and a second one follows behind the last
            coming = [*range(len(answers), len(sources))][:2]
            places = np.array([number % len(inside), len(inside)])[: len(coming)]
            encoded = [backend.encode(sources[i], np.ones_like(sources[i])) for i in coming]
            backend.replace_sources(state, backend.join(encoded), places)
            tokens = np.concatenate([tokens, np.zeros((len(coming) - 1, 1), dtype=np.int64)])
            tokens[places] = 0
            inside[places[0]], answers[coming[0]] = coming[0], []
            for one in coming[1:]:
                inside.append(one)
                answers[one] = []
        elif what == "leave" and len(inside) > 1:
            kept = np.roll(np.delete(np.arange(len(inside)), number % len(inside)), number)  # in any order
            backend.select_sources(state, kept)
            inside, tokens = [inside[i] for i in kept], tokens[kept]
        elif what == "steps":
            for _ in range(number % 9):
                tokens = backend.next_tokens(state, tokens[:, :, None])
                for visitor, token in zip(inside, tokens[:, 0].tolist(), strict=True):
                    answers[visitor].append(token)
    return answers


# A row alone may choose between two tokens that are so near to each other that the others' company decides.
TIE = {"fp32": 1e-4, "int8": 0.06, "int4": 0.06}


def check_visits(backend: Any, precision: str, seed: int, program: list[tuple[str, int]], longest: int = 80) -> int:
    """That everybody's tokens are those of staying alone; returns how many ended in a tie."""
    rng = np.random.default_rng(seed)
    sources = [rng.integers(3, 298, (1, length)) for length in rng.integers(1, longest, 6)]
    ties = 0
    for visitor, tokens in together(backend, sources, program).items():
        expected, leads = alone(backend, sources[visitor], len(tokens))
        different = np.flatnonzero(np.array(tokens) != np.array(expected))
        if different.size:
            assert leads[different[0]] < TIE[precision], f"visitor {visitor} differs at its token {different[0]}"
            ties += 1
    return ties


@pytest.mark.parametrize("precision", PRECISIONS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), program=visits(), longest=st.sampled_from([80, 80, 400]))
def test_rows_join_and_leave_unnoticed(opened, precision: str, seed: int, program: Any, longest: int) -> None:
    check_visits(opened[precision], precision, seed, program, longest if precision == "fp32" else 80)


LONG = [("steps", 5), ("join", 0), ("steps", 6), ("join", 0), ("steps", 4), ("leave", 0), ("steps", 8), ("join", 0),
        ("steps", 7), ("leave", 1), ("steps", 8), ("join", 0), ("steps", 8)]  # fmt: skip


@pytest.mark.parametrize("precision", PRECISIONS)
def test_ties_are_rare(opened, precision: str) -> None:
    ties = sum(check_visits(opened[precision], precision, seed, LONG) for seed in range(6))
    assert ties <= {"fp32": 0}.get(precision, 10), "of 30 visitors"


@pytest.mark.parametrize("kind", [OrtNumpy, OrtStatic])
def test_joining_a_state_that_has_not_begun(folder_of, kind: type[OrtNumpy]) -> None:
    backend = kind(folder_of("fp32"), settings=ONE_THREAD)
    check_visits(backend, "fp32", 0, [("join", 0), ("join", 0), *LONG])


def visitor(backend: OrtStatic, length: int) -> Any:
    ids = np.random.default_rng(length).integers(3, 298, (1, length))
    return backend.encode(ids, np.ones_like(ids))


def test_only_newcomers_are_copied_until_one_is_longer_than_the_capacity(own) -> None:
    source = partial(visitor, own)
    state = own.new_state(source(20))
    tokens = tokens_of(own, state, np.zeros((1, 1), dtype=np.int64), 2)[-1]
    own.add_sources(state, source(30))
    room = state.cross_capacity
    assert room, "the first one makes room"
    own.select_sources(state, np.array([1]))
    own.add_sources(state, source(32))
    assert state.cross_capacity is room, "there is room for this one"
    place = next(iter(state.buffers.capacity.values()))
    own.next_tokens(state, np.array([[[tokens[0, 0]]], [[0]]]))
    assert next(iter(state.buffers.capacity.values())) is place
    own.add_sources(state, source(70))
    assert state.cross_capacity is not room


def test_a_newcomer_takes_a_place_and_nothing_is_bound_anew(own) -> None:
    state = own.new_state(visitor(own, 20))
    own.add_sources(state, visitor(own, 30))
    tokens_of(own, state, np.zeros((2, 1), dtype=np.int64), 5)
    buffers, bound = state.buffers, dict(state.buffers.bindings)
    own.replace_sources(state, visitor(own, 25), np.array([0]))
    tokens_of(own, state, np.zeros((2, 1), dtype=np.int64), 2)
    assert state.buffers is buffers and bound and bound.items() <= buffers.bindings.items()
    assert state.rows.lengths.ravel().tolist() == [2, 7]
    own.replace_sources(state, visitor(own, 9), np.array([0, 1])[1:])
    own.replace_sources(state, visitor(own, 9), np.array([0]))
    assert state.rows.width == 0, "no column is left that somebody reads"


def test_the_capacity_doubles(own) -> None:
    """Else every newcomer would copy all rows that are there."""
    state, laid = own.new_state(visitor(own, 20)), []
    for _ in range(20):
        before, place = state.cross_capacity, state.buffers and next(iter(state.buffers.capacity.values()))
        own.add_sources(state, visitor(own, 20))
        room = next(iter(state.buffers.capacity.values()))
        laid.append((state.cross_capacity is not before, place is not None and room is not place))
    assert sum(cross for cross, _ in laid) <= 5 and sum(rows for _, rows in laid) <= 5
    own.next_tokens(state, np.zeros((21, 1, 1), dtype=np.int64))


def test_a_long_source_is_not_read_after_it_has_left(own) -> None:
    state = own.new_state(visitor(own, 30))
    tokens_of(own, state, np.zeros((1, 1), dtype=np.int64), 2)
    own.add_sources(state, visitor(own, 300))
    own.add_sources(state, visitor(own, 70))
    assert state.source.mask.shape == (3, 304)
    own.select_sources(state, np.array([0, 2]))
    assert state.source.mask.shape == (2, 80), "as long as the longest of those who are there"
    check_visits(own, "fp32", 5, [("join", 0), ("steps", 3), ("leave", 0), ("steps", 4), *LONG])
