"""Steps of fixed sizes on ONNX Runtime: tokens are transformers', whatever lies in the places that are not real."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from programs import ATOL, PROGRAM, check_program, teacher_forced
from test_torch_static import check_eager_tokens

from bench.baselines import ort_cuda_graph as captured_module
from bench.baselines.ort_cuda_graph import MULTIPLE, OrtCaptured
from t5accel.backends.ort_session import SessionSettings, open_session
from t5accel.decoding.backend import Backend
from t5accel.errors import ExportError
from t5accel.parity import assert_close


def greedy_by_hand(model: Any, ids: np.ndarray, mask: np.ndarray, histories: list[list[int]], count: int) -> np.ndarray:
    """transformers' greedy tokens after histories that begin with whatever was read: (R, count)."""
    histories = [list(history) for history in histories]
    for _ in range(count):
        logits = teacher_forced(model, ids, mask, histories)
        for row, history in enumerate(histories):
            history.append(int(logits[row, len(history) - 1].argmax()))
    return np.array([history[-count:] for history in histories])


def test_satisfies_the_protocol_and_greedy_gives_eager_tokens(exported, tiny_t5, kind: str, padded_batch) -> None:
    backend = OrtCaptured(exported(kind))
    assert isinstance(backend, Backend) and callable(backend.run_greedy)
    check_program(backend, tiny_t5(kind), *padded_batch, 2, PROGRAM)
    # More positions need the second size of the past.
    backend, length = OrtCaptured(exported(kind)), MULTIPLE + 16
    check_eager_tokens(backend, tiny_t5(kind), padded_batch, min_new_tokens=length, max_new_tokens=length)
    assert len(backend.fixed) == 2


def test_a_run_goes_on_from_a_ragged_past_that_was_reordered_and_kept(exported, tiny_t5, padded_batch) -> None:
    (ids, mask), model = padded_batch, tiny_t5()
    backend, rng = OrtCaptured(exported()), np.random.default_rng(2)
    state = backend.new_state(backend.encode(ids, mask), 2)
    new = rng.integers(3, 300, (6, 2, 5))
    backend.step(state, new)
    accepted = rng.integers(1, 6, (6, 2))
    backend.rollback(state, accepted)
    last = rng.integers(3, 300, (6, 2, 1))
    chosen = backend.next_tokens(state, last)
    swap, kept = np.array([[1, 0]] * 6), np.array([4, 0, 5])
    backend.reorder(state, swap)
    backend.select_sources(state, kept)
    found = backend.run_greedy(state, 7)
    histories = [
        [*new[source, 1 - row, : accepted[source, 1 - row]].tolist(), int(last[source, 1 - row, 0]),
         int(chosen[source, 1 - row])]
        for source in kept for row in range(2)
    ]  # fmt: skip
    expected = greedy_by_hand(model, ids[kept].repeat(2, 0), mask[kept].repeat(2, 0), histories, 7)
    assert len(np.unique(expected)) > 8
    np.testing.assert_array_equal(found.reshape(6, 7), expected)
    more = rng.integers(3, 300, (3, 2, 2))  # the past that a run leaves is one to go on from
    whole = [[*history, *tokens[:-1], *after] for history, tokens, after in
             zip(histories, expected.tolist(), more.reshape(6, 2).tolist(), strict=True)]  # fmt: skip
    logits = teacher_forced(model, ids[kept].repeat(2, 0), mask[kept].repeat(2, 0), whole)
    ends = np.stack([logits[row, len(history) - 2 : len(history)] for row, history in enumerate(whole)])
    assert_close(backend.step(state, more).reshape(6, 2, -1), ends, atol=ATOL)


def test_what_is_not_real_is_never_read(exported, padded_batch) -> None:
    backend = OrtCaptured(exported())
    source = backend.encode(*padded_batch)
    expected = backend.run_greedy(backend.new_state(source), 12)
    (fixed,) = backend.fixed.values()
    with torch.inference_mode():
        for name, tensor in fixed.inputs.items():
            if name.startswith(("past_key", "past_value", "cross")):
                tensor.fill_(1e4)
    np.testing.assert_array_equal(backend.run_greedy(backend.new_state(source), 12), expected)
    fill = backend._fill
    backend._fill = lambda *given: (fill(*given), fixed.inputs["past_mask"].fill_(1))  # the mask is what keeps it out
    assert (backend.run_greedy(backend.new_state(source), 12) != expected).any()


def test_two_states_take_turns(exported, padded_batch) -> None:
    backend = OrtCaptured(exported())
    ids, mask = padded_batch
    sources = [backend.encode(ids, mask), backend.encode(ids[::-1], mask[::-1])]
    alone = [backend.run_greedy(backend.new_state(source), 9) for source in sources]
    states = [backend.new_state(source) for source in sources]
    pieces = [[backend.run_greedy(state, 3) for state in states] for _ in range(3)]
    for whole, *parts in zip(alone, *pieces, strict=True):
        np.testing.assert_array_equal(np.concatenate(parts, axis=2), whole)
    assert len(backend.fixed) == 1


def test_a_run_that_fails_leaves_the_state_as_it_was(exported, padded_batch, monkeypatch) -> None:
    backend = OrtCaptured(exported())
    source = backend.encode(*padded_batch)
    states = [backend.new_state(source) for _ in range(2)]
    for state in states:
        backend.run_greedy(state, 3)
    (fixed,) = backend.fixed.values()
    left = [2]

    def fail() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("no memory")
        type(fixed).choose_and_move(fixed)

    monkeypatch.setattr(fixed, "choose_and_move", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        backend.run_greedy(states[0], 5)
    monkeypatch.undo()
    np.testing.assert_array_equal(backend.run_greedy(states[0], 4), backend.run_greedy(states[1], 4))


def test_runs_are_queued_and_not_waited_for(exported, monkeypatch) -> None:
    """By default ONNX Runtime waits for the device after every run: then the host cannot ask ahead."""
    asked: dict[str, str] = {}
    options = SimpleNamespace(add_run_config_entry=asked.__setitem__)
    backend = OrtCaptured(exported(), settings=SessionSettings(threads=1))
    backend._stream = "as on a GPU"
    backend._captured = SimpleNamespace(io_binding=lambda: None, run_with_iobinding=lambda *_: None)
    monkeypatch.setattr(backend, "_bind", lambda *_: None)
    monkeypatch.setattr(onnxruntime, "RunOptions", lambda: options)
    monkeypatch.setattr(captured_module, "capture_graph", lambda *_: "a graph")
    fixed = captured_module.Fixed(backend, 1, 1, 64, 64)
    backend._prepare(fixed)
    assert asked["disable_synchronize_execution_providers"] == "1" and "gpu_graph_id" in asked
    assert (fixed.between, fixed.options) == ("a graph", options)


@pytest.mark.parametrize(("given", "tf32"), [({}, "0"), ({"use_tf32": "1"}, "1")])
def test_on_cuda_fp32_is_fp32_unless_it_is_asked_for_otherwise(monkeypatch, given: dict[str, str], tf32: str) -> None:
    """ONNX Runtime would round the factors of every product to 10 bits, an error ten times what we allow."""
    asked: list[Any] = []

    def session(path: str, options: Any, *, providers: Any, provider_options: Any, **more: Any) -> Any:
        asked.append(provider_options)
        return SimpleNamespace(get_providers=lambda: providers, disable_fallback=lambda: None)

    monkeypatch.setattr("t5accel.backends.ort_session.session_class", lambda: session)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    open_session("decoder.onnx", SessionSettings(device="cuda"), provider_options=given)
    assert asked == [[{"use_tf32": tf32}]]


@pytest.mark.gpu
def test_on_cuda(exported, tiny_t5, kind: str, padded_batch) -> None:
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA: install t5accel[gpu]")
    if kind == "umt5":
        pytest.skip("refused: test_a_umt5_is_refused_on_cuda_where_it_was_wrong")
    try:
        backend = OrtCaptured(exported(kind), settings=SessionSettings(device="cuda"))
    except ExportError as error:
        pytest.skip(f"this onnxruntime does not capture the graph: {error}")
    for _ in range(2):  # captured, and replayed from the first step on
        check_eager_tokens(backend, tiny_t5(kind), padded_batch, min_new_tokens=40, max_new_tokens=40)
