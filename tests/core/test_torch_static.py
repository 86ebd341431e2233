"""Static buffers: numbers are transformers', and buffers are used again, by one state at a time."""

from __future__ import annotations

import copy
import gc
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from programs import ATOL, teacher_forced
from refused import refused
from test_drafting import check_equals_greedy

from t5accel.backends import torch_static, torch_static_buffers, torch_static_loops, torch_static_rows
from t5accel.backends.torch_eager import TorchEager
from t5accel.backends.torch_static import BUCKETS, TorchStatic
from t5accel.backends.torch_static_buffers import MAX_QUEUED_STEPS
from t5accel.decoding.greedy_search import STEPS_PER_SYNC, greedy
from t5accel.parity import assert_close, assert_varied

SMALL = (8, 16, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fewer_bits_stay_near(tiny_t5, padded_batch, dtype: torch.dtype) -> None:
    model = tiny_t5()
    new = np.random.default_rng(2).integers(3, 300, (6, 1, 4))
    exact, near = (TorchStatic(one, buckets=SMALL) for one in (model, copy.deepcopy(model).to(dtype)))
    expected, found = (backend.step(backend.new_state(backend.encode(*padded_batch)), new) for backend in (exact, near))
    assert found.dtype == np.float32 and np.isfinite(found).all()
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert 0 < error < 0.05


def test_places_beyond_a_row_are_never_read(tiny_t5, padded_batch) -> None:
    """Places beyond a row's length hold large numbers, which a missing mask would show."""
    backend = TorchStatic(tiny_t5(), buckets=SMALL)
    new = np.random.default_rng(3).integers(3, 300, (6, 1, 3))
    source = backend.encode(*padded_batch)
    clean, dirty = backend.new_state(source), backend.new_state(source)
    with torch.inference_mode():
        dirty.buffers.self_kv.memory.fill_(1e4)
    assert_close(backend.step(dirty, new), backend.step(clean, new), atol=ATOL)


# Greedy steps


def check_eager_tokens(backend: Any, model: Any, batch: Any, search: Any = greedy, **options: Any) -> None:
    """A search finds the same tokens with this backend as with `TorchEager`."""
    expected, found = (search(one, *batch, **options) for one in (TorchEager(model), backend))
    assert_varied(expected.sequences)
    np.testing.assert_array_equal(found.sequences, expected.sequences)
    if expected.scores is not None:
        np.testing.assert_allclose(found.scores, expected.scores, atol=1e-4)


def test_greedy_reads_the_tokens_only_now_and_then(tiny_t5, padded_batch) -> None:
    backend, asked = TorchStatic(tiny_t5()), []
    run = backend.run_greedy
    backend.run_greedy = lambda state, k, **options: (asked.append(k), run(state, k, **options))[1]
    found = greedy(backend, *padded_batch, min_new_tokens=40, max_new_tokens=40)
    assert asked == [STEPS_PER_SYNC, STEPS_PER_SYNC, 40 - 1 - 2 * STEPS_PER_SYNC] and found.decoder_calls == 40


def test_on_the_trained_model_rows_end_in_the_middle_of_a_run(mini) -> None:
    model, tokenizer = mini
    texts = [f"translate English to French: {text}" for text in ("I am tired.", "Where is my bag?", "Yes.")]
    inputs = tokenizer(texts, return_tensors="np", padding=True)
    batch = inputs["input_ids"], inputs["attention_mask"]
    expected = greedy(TorchEager(model), *batch, max_new_tokens=30).sequences
    assert len({len(row[row != 0]) for row in expected}) > 1
    check_eager_tokens(TorchStatic(model), model, batch, max_new_tokens=30)


def test_a_run_is_bounded_and_counted(tiny_t5, padded_batch) -> None:
    backend = TorchStatic(tiny_t5())
    state = backend.new_state(backend.encode(*padded_batch), 2)
    first = backend.run_greedy(state, 1000)
    assert first.shape == (6, 2, MAX_QUEUED_STEPS) and (state.rows.lengths == MAX_QUEUED_STEPS).all()
    assert (first[:, 0] == first[:, 1]).all(), "rows of one source began alike"
    again = backend.new_state(backend.encode(*padded_batch), 2)
    pieces = [backend.run_greedy(again, k) for k in (1, 30, 33)]
    np.testing.assert_array_equal(np.concatenate(pieces, axis=2), first)


def test_a_suppressed_token_does_not_come_and_only_while_it_is_suppressed(tiny_t5, padded_batch) -> None:
    backend = TorchStatic(tiny_t5())
    source = backend.encode(*padded_batch)
    free = backend.run_greedy(backend.new_state(source), 8)
    token = int(free[0, 0, 0])
    without = backend.run_greedy(backend.new_state(source), 8, suppressed=token)
    assert token not in without[0] and (without[:, :, 0] == free[:, :, 0])[free[:, :, 0] != token].all()
    np.testing.assert_array_equal(backend.run_greedy(backend.new_state(source), 8), free)


# Buffers


def test_buffers_are_used_again_when_a_state_is_gone_and_not_before(tiny_t5, padded_batch) -> None:
    backend = TorchStatic(tiny_t5())
    source = backend.encode(*padded_batch)
    first, second = backend.new_state(source), backend.new_state(source)
    addresses = [state.buffers.self_kv.memory.data_ptr() for state in (first, second)]
    assert addresses[0] != addresses[1]
    new = np.random.default_rng(6).integers(3, 300, (6, 1, 4))
    expected = backend.step(first, new)
    del second
    gc.collect()
    third = backend.new_state(source)
    assert third.buffers.self_kv.memory.data_ptr() == addresses[1]
    assert_close(backend.step(third, new), expected, atol=0)


def test_a_longer_answer_moves_to_a_larger_bucket_and_gives_the_smaller_back(tiny_t5, padded_batch) -> None:
    model = tiny_t5()
    backend = TorchStatic(model, buckets=SMALL)
    source = backend.encode(*padded_batch)
    state = backend.new_state(source)
    small = state.buffers
    tokens = backend.run_greedy(state, 20)
    assert state.buffers.width == 32 and backend.new_state(source).buffers is small
    wide = TorchStatic(model)
    np.testing.assert_array_equal(tokens, wide.run_greedy(wide.new_state(wide.encode(*padded_batch)), 20))


def test_memory_that_is_not_in_use_is_bounded(tiny_t5, with_graphs, monkeypatch) -> None:
    """Buffers and encoders of other shapes go, the longest unused first; the last one stays, however large."""
    backend = with_graphs(tiny_t5(), buckets=SMALL)
    rng = np.random.default_rng(1)

    def answer(batch: int) -> None:
        ids = rng.integers(3, 300, (batch, 5))
        found, expected = (greedy(one, ids, max_new_tokens=7).sequences for one in (backend, TorchEager(tiny_t5())))
        np.testing.assert_array_equal(found, expected)

    for batch in (2, 3, 4):
        answer(batch)
    assert {buffers.shape[0] for buffers in backend._free} == {shape[0] for shape in backend._encoders} == {2, 3, 4}
    size = max(buffers.size_bytes for buffers in backend._free)
    monkeypatch.setattr(torch_static, "KEPT_BYTES", size + size // 4)
    answer(2)
    assert [buffers.shape[0] for buffers in backend._free] == [2], "of 4 and 2 the sum is too much"
    monkeypatch.setattr(torch_static, "KEPT_BYTES", 10 * size)
    for batch in (3, 4, 5):
        answer(batch)
    assert len(backend._free) > 1 and len(backend._encoders) > 1
    monkeypatch.setattr(Replay, "size_bytes", 11 * size)
    answer(6)
    assert [buffers.shape[0] for buffers in backend._free] == [6] == [shape[0] for shape in backend._encoders], (
        "graphs' own memory counts"
    )
    monkeypatch.setattr(Replay, "size_bytes", 0)
    monkeypatch.setattr(torch_static, "KEPT_BYTES", 0)
    answer(5)
    assert [buffers.shape[0] for buffers in backend._free] == [5] == [shape[0] for shape in backend._encoders]


def test_a_new_shape_takes_the_memory_of_unused_ones(tiny_t5, padded_batch, monkeypatch) -> None:
    backend = TorchStatic(tiny_t5(), buckets=SMALL)
    greedy(backend, *padded_batch, max_new_tokens=4)
    assert backend._free
    new, fails = backend.decoder.new_buffers, [True]

    def scarce(**shape: int) -> Any:
        if fails and fails.pop():
            raise torch.cuda.OutOfMemoryError("no memory")
        return new(**shape)

    monkeypatch.setattr(backend.decoder, "new_buffers", scarce)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    check_eager_tokens(backend, tiny_t5(), [one[:2] for one in padded_batch], min_new_tokens=7, max_new_tokens=7)
    assert len(backend._free) == 1


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError("no"), RuntimeError("CUDA error: out of memory")])
def test_a_capture_takes_the_memory_of_unused_buffers(tiny_t5, padded_batch, with_graphs, monkeypatch, error) -> None:
    backend = with_graphs(tiny_t5(), buckets=SMALL)
    greedy(backend, *padded_batch, max_new_tokens=4)
    capture, fails = torch_static.capture_graph, [True]

    def scarce(*given: Any) -> Any:
        if backend._free and fails and fails.pop():
            raise type(error)(*error.args)  # one that keeps no frames
        return capture(*given)

    monkeypatch.setattr(torch_static, "capture_graph", scarce)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    check_eager_tokens(backend, tiny_t5(), [one[:2] for one in padded_batch], min_new_tokens=7, max_new_tokens=7)
    assert not fails and len(backend._free) == 1


def test_a_text_whose_numbers_overflow_spoils_no_later_one(tiny_t5, with_graphs) -> None:
    """NaN shows through a mask: in the cache, and in an encoder's buffer behind a shorter text."""
    model = copy.deepcopy(tiny_t5("gated-untied"))
    model.shared.weight.data[7] = torch.inf
    good, bad = np.array([[20, 21, 1]]), np.array([[20, 21, 22, 7, 1]])
    expected = greedy(TorchEager(model), good, max_new_tokens=5).sequences
    for backend in (TorchStatic(model, buckets=SMALL), with_graphs(model, buckets=SMALL)):
        greedy(backend, bad, max_new_tokens=5)
        np.testing.assert_array_equal(greedy(backend, good, max_new_tokens=5).sequences, expected)


NEW = np.random.default_rng(5).integers(3, 300, (6, 1, 3))
CALLS = {
    "step": lambda backend, state: backend.step(state, NEW),
    "next_tokens": lambda backend, state: backend.next_tokens(state, NEW),
    "step_tokens": lambda backend, state: backend.step_tokens(state, NEW),
    "run_greedy": lambda backend, state: backend.run_greedy(state, 4),
    "run_samples": lambda backend, state: backend.run_samples(
        state, NEW, np.full((6, 1, 4), 0.5), sampling=torch_static_loops.SamplingParams()
    ),
}


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError("no memory"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_fails_midway_leaves_the_state_as_it_was(
    tiny_t5, padded_batch, monkeypatch, name: str, error: BaseException
) -> None:
    """After the last token was read, before anything is returned; also where the state has just moved."""
    backend = TorchStatic(tiny_t5(), buckets=(4, 16))
    failed, right = (backend.new_state(backend.encode(*padded_batch)) for _ in range(2))
    for state in (failed, right):
        backend.run_greedy(state, 3)
    read, called = backend.decoder.read, []

    def fails(*given: Any) -> Any:
        hidden = read(*given)
        called.append(1)
        if len(called) == (2 if name.startswith("run") else 1):
            raise error
        return hidden

    with monkeypatch.context() as patch:
        patch.setattr(backend.decoder, "read", fails)
        with pytest.raises(type(error)):
            CALLS[name](backend, failed)
    found, expected = (backend.run_greedy(state, 5) for state in (failed, right))
    np.testing.assert_array_equal(found, expected)
    assert failed.rows.lengths.tolist() == right.rows.lengths.tolist()


def test_lengths_beyond_the_last_bucket(tiny_t5, padded_batch) -> None:
    model = tiny_t5()
    backend = TorchStatic(model, buckets=(4,))
    check_eager_tokens(backend, model, padded_batch, min_new_tokens=11, max_new_tokens=11)
    assert backend._bucket(11) == 12 and TorchStatic(model)._bucket(1) == BUCKETS[0]


# Graphs, without a GPU: a replay calls the captured step again


class Replay:
    """In place of a captured graph: the same step on the same buffers."""

    size_bytes = 0

    def __init__(self, step: Any, undo: Any, device: Any):
        self.step, self.replayed = step, 0
        step()
        undo()

    def replay(self) -> None:
        self.replayed += 1
        with torch.inference_mode():
            self.step()


@pytest.fixture
def with_graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``with_graphs(model, **options)``: a `TorchStatic` whose graphs call the step again."""

    def build(model: Any, **options: Any) -> TorchStatic:
        backend = TorchStatic(model, **options)
        for module in (torch_static, torch_static_loops, torch_static_rows):
            monkeypatch.setattr(module, "capture_graph", torch.inference_mode()(lambda *given: Replay(*given)))
        backend.graphs = True
        return backend

    return build


def test_a_captured_encoder_gives_transformers_logits(tiny_t5, kind: str, padded_batch, with_graphs) -> None:
    """In padded buckets that other texts used before; and a source stays the same when others are encoded."""
    model, (ids, mask) = tiny_t5(kind), padded_batch
    backend = with_graphs(model, buckets=SMALL)
    rng = np.random.default_rng(8)
    longer = rng.integers(3, 300, (len(ids), 14)), np.ones((len(ids), 14), dtype=int)
    sources = [backend.encode(*texts) for texts in (longer, (ids, mask))]
    assert len(backend._encoders) == 1 and sources[0].mask.shape == sources[1].mask.shape == (6, 16)
    new = rng.integers(3, 300, (6, 1, 4))
    for source, texts in zip(sources, (longer, (ids, mask)), strict=True):
        expected = teacher_forced(model, *texts, new[:, 0])
        assert_close(backend.step(backend.new_state(source), new)[:, 0], expected, atol=ATOL)
    backend.encode(rng.integers(3, 300, (6, 17)), np.ones((6, 17), dtype=int))
    assert [*backend._encoders] == [(6, 16), (6, 32)]


def test_threads_take_turns_at_a_captured_encoder(tiny_t5, with_graphs) -> None:
    backend, texts = with_graphs(tiny_t5(), buckets=SMALL), np.random.default_rng(4).integers(3, 300, (2, 2, 5))
    expected = [backend.encode(ids, np.ones_like(ids)).cross_kv.memory for ids in texts]
    (encoder,) = backend._encoders.values()
    replay = encoder.graph.replay
    encoder.graph.replay = lambda: (time.sleep(0.05), replay())
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda ids: backend.encode(ids, np.ones_like(ids)).cross_kv.memory, texts)]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_replayed_step_gives_eager_tokens(tiny_t5, kind: str, padded_batch, with_graphs) -> None:
    model = tiny_t5(kind)
    backend = with_graphs(model, buckets=SMALL)
    check_eager_tokens(backend, model, padded_batch, min_new_tokens=20, max_new_tokens=20)
    assert backend.captured == 2  # places for 8, and for 32, since as many steps as are asked for at once need them


@pytest.mark.parametrize("shortest", [0, 12])
def test_drafts_are_verified_without_logits_on_the_host(
    tiny_t5, kind: str, padded_batch, with_graphs, monkeypatch, shortest: int
) -> None:
    """In captured steps of 2, 4 or 8 tokens. Logits go to the host where an end is forbidden in a part of a draft."""
    if not shortest:
        monkeypatch.setattr(TorchStatic, "step", lambda *_: pytest.fail("the host was asked"))
    for backend in (TorchStatic(tiny_t5(kind), buckets=SMALL), with_graphs(tiny_t5(kind), buckets=SMALL)):
        found = check_equals_greedy(backend, *padded_batch, min_new_tokens=shortest, max_new_tokens=12 + shortest)
        assert_varied(found.sequences)
        assert 0 < found.accepted < found.drafted
    sizes = {key[1] for buffers in backend._free for key in buffers.loops}
    assert sizes <= {2, 4, 8} and len(sizes) > 1


def test_all_is_captured_in_inference_mode_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream that products run on keeps a workspace; and a graph may not write to inference tensors."""
    made, modes, waited = [], [], []

    class Stream(nullcontext):
        def __init__(self, device: Any):
            super().__init__()
            made.append(device)

        def wait_stream(self, other: Any) -> None:
            waited.append(other)

    class Graph(nullcontext):
        def __init__(self, graph: Any, stream: Any, capture_error_mode: str):
            super().__init__()
            assert capture_error_mode == "thread_local", "other threads may work on the GPU"
            modes.append(stream)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: side)
    device = torch.device("cuda", 7)
    side = torch_static_buffers.side_stream(device)
    for _ in range(2):
        torch_static_buffers.capture_graph(
            lambda: modes.append(torch.is_inference_mode_enabled()), lambda: None, device
        )
    assert made == [device] and modes == [True, True, side, True] * 2
    undone = []
    with pytest.raises(KeyboardInterrupt):
        torch_static_buffers.capture_graph(MagicMock(side_effect=KeyboardInterrupt), lambda: undone.append(1), device)
    torch_static_buffers.side_stream.cache_clear()
    assert undone and len(waited) == 6, "after a step that fails as well"


def test_captures_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would hold whatever another thread queues on the side stream."""
    log: list[str] = []

    def step(name: str) -> None:
        log.append(name if gc.isenabled() else name.upper())
        time.sleep(0.01)

    for name in ("CUDAGraph", "current_stream", "stream", "graph", "device", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: MagicMock())
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: log.append("-"), raising=False)
    monkeypatch.setattr(torch_static_buffers, "side_stream", lambda device: MagicMock())
    capture = partial(torch_static_buffers.capture_graph, undo=int, device=torch.device("cpu"))
    with ThreadPoolExecutor(2) as pool:
        captures = [pool.submit(capture, partial(step, name)) for name in "ab"]
        for one in captures:
            one.result()
    assert "".join(log) in ("aa-A-bb-B-", "bb-B-aa-A-"), "own workspaces, and no garbage collection"
    assert gc.isenabled()


def test_autocast_changes_nothing_and_is_not_captured(tiny_t5, padded_batch, with_graphs) -> None:
    backend = with_graphs(tiny_t5(), buckets=SMALL)
    expected = TorchStatic(tiny_t5(), buckets=SMALL)
    rows = []
    for one, context in (
        (backend, torch.autocast("cpu", dtype=torch.bfloat16)),
        (backend, nullcontext()),
        (expected, nullcontext()),
    ):
        with context:
            state = one.new_state(one.encode(*padded_batch))
            rows.append(np.concatenate([one.step(state, NEW)[:, 0], one.step(state, NEW[:, :, :1])[:, 0]], axis=1))
            one.run_greedy(state, 2)
    for found in rows[:2]:
        assert_close(found, rows[2], atol=ATOL)


# Bad input


def test_bad_arguments(tiny_t5) -> None:
    refused(partial(TorchStatic, tiny_t5()), "buckets", (), (8, 8), (16, 8), (0,), (2.5,), "8", match="bucket")
    refused(partial(TorchStatic, tiny_t5()), "graphs", True, match="graphs=True")


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4])
def test_a_captured_graph_gives_eager_tokens(tiny_t5, padded_batch, rows: int) -> None:
    model = copy.deepcopy(tiny_t5()).to("cuda")
    graphs, plain = TorchStatic(model), TorchStatic(model, graphs=False)
    for _ in range(2):
        tokens = [one.run_greedy(one.new_state(one.encode(*padded_batch), rows), 40) for one in (graphs, plain)]
        np.testing.assert_array_equal(*tokens)
    check_eager_tokens(graphs, model, padded_batch, min_new_tokens=40, max_new_tokens=40)
    check_equals_greedy(TorchStatic(model), *padded_batch, max_new_tokens=40)
    assert 1 <= graphs.captured <= 3 and not plain.captured
