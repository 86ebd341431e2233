"""The ONNX Runtime backends: transformers' own logits, however their tensors are held, handed over and gathered."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import psutil
import pytest
import torch
from programs import ATOL, PROGRAM, Watched, check_as_it_was, check_program, histories_of, logits_after_all
from refused import refused
from test_encoder_cache import check, in_threads, logits_of, tokens_of

from bench.baselines.ort_cuda_graph import OrtCaptured
from bench.profiling import bytes_per_step
from t5accel.backends import ort_cuda as ort_pointers
from t5accel.backends import ort_memory as encoder_slices
from t5accel.backends.ort_cuda import OrtPointers, bind_tensor
from t5accel.backends.ort_iobinding import OrtBound
from t5accel.backends.ort_memory import run_into
from t5accel.backends.ort_numpy import OrtNumpy, OrtSource, expand_index_to_heads
from t5accel.backends.ort_session import SessionSettings, open_session
from t5accel.backends.torch_eager import TorchEager
from t5accel.decoding.encoder_cache import EncoderCache
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import ExportError, InputError, MissingPackageError
from t5accel.graphs.export import export_model
from t5accel.models.sizes import T5Dims
from t5accel.parity import assert_close

ROOT = Path(__file__).resolve().parents[2]
ONE_THREAD = SessionSettings(threads=1)
RUNTIMES = [OrtNumpy, OrtBound, OrtPointers]


@pytest.fixture(scope="session", params=RUNTIMES, ids=lambda runtime: runtime.__name__)
def runtime(request: pytest.FixtureRequest) -> type[OrtNumpy]:
    return request.param


@pytest.fixture
def own(runtime, exported) -> OrtNumpy:
    """A backend that the test may patch."""
    return runtime(exported("deeper-decoder"), settings=ONE_THREAD)


def as_numpy(backend: OrtNumpy, tensors: list[Any]) -> list[np.ndarray]:
    arrays = map(backend._array, tensors)
    return [np.array(array.numpy() if isinstance(array, torch.Tensor) else array) for array in arrays]


# Logits under teacher forcing


def test_the_ways_agree_to_the_last_bit(opened, padded_batch) -> None:
    """The session computes the same, whichever way its tensors came."""
    new = histories_of(6, 2, 5)
    logits = [logits_after_all(opened(runtime), *padded_batch, new) for runtime in RUNTIMES]
    for other in logits[1:]:
        np.testing.assert_array_equal(other, logits[0])


def test_the_past_of_the_step_before_is_let_go(runtime, exported) -> None:
    """Between two steps there is one past in memory. Its tensors are so large that the system has them back at once.

    The least of several steps counts, after one that loads what is loaded once: other tests' memory comes and goes.
    """
    backend = runtime(exported("shallower-decoder"), settings=SessionSettings(threads=1, arena=False))
    batch, rows, length, process = 64, 32, 160, psutil.Process()
    state = backend.new_state(backend.encode(np.full((batch, 1), 5), np.ones((batch, 1), dtype=np.int64)), rows)
    backend.step(state, np.full((batch, rows, 1), 7))
    before = process.memory_info().rss
    state.rows = state.rows.appended(length)
    state.past = [backend._hold(backend._zeros((batch, rows, 4, length + 1, 12))) for _ in range(2)]
    pasts = []
    for _ in range(4):
        backend.step(state, np.full((batch, rows, 1), 7))
        size = sum(backend._array(past).nbytes for past in state.past)
        assert size > 120e6
        pasts.append((process.memory_info().rss - before) / size)
    assert min(pasts[1:]) < 1.7, f"two would be twice as much (zeros, before the first, take none): {pasts}"


# Any mixture of steps, trims, reorderings and leaving sources


@pytest.mark.parametrize("side", ["right", "left"])
def test_large_batches_are_encoded_in_slices(own, tiny_t5, padded_batch, monkeypatch, side: str) -> None:
    """A few rows at a time, none longer than its slice has to be; those of full length are not copied."""
    ids, mask = padded_batch if side == "right" else (array[:, ::-1] for array in padded_batch)
    seen: list[tuple[tuple[int, ...], bool]] = []

    def noted(session: Any, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> None:
        seen.append((inputs["input_ids"].shape, all(array.base is not None for array in outputs.values())))
        run_into(session, inputs, outputs)

    monkeypatch.setattr("t5accel.backends.ort_numpy.run_into", noted)
    monkeypatch.setattr(encoder_slices, "TOKENS", 26)
    check_program(own, tiny_t5(), ids, mask, 2, PROGRAM)
    rows, longest = ids.shape
    shapes = [(2, longest), (2, 7), (2, 8)] if side == "right" else [(2, longest)] * 3
    assert seen == [(shape, shape[1] == longest) for shape in shapes]
    seen.clear()
    monkeypatch.setattr(encoder_slices, "TOKENS", 1)
    check_program(own, tiny_t5(), ids, mask, 1, PROGRAM)
    assert len(seen) == rows


def test_large_batches_are_encoded_by_openvino(exported, tiny_t5, kind: str, padded_batch, monkeypatch) -> None:
    """The same graph on another runtime, for slices; small batches stay where they were."""
    backend = OrtNumpy(exported(kind), settings=SessionSettings(threads=1, openvino=True))
    own = OrtNumpy(exported(kind), settings=SessionSettings(threads=1))
    small = [backend.encode(*padded_batch).inputs, own.encode(*padded_batch).inputs]
    assert all((small[0][name] == small[1][name]).all() for name in own.cross_names)
    monkeypatch.setattr(encoder_slices, "TOKENS", 26)
    monkeypatch.setattr(backend, "encoder", None)
    check_program(backend, tiny_t5(kind), *padded_batch, 2, PROGRAM)
    with pytest.raises(AssertionError):  # another model's encoder
        backend.openvino = OrtNumpy(exported(kind, seed=2), settings=SessionSettings(threads=1, openvino=True)).openvino
        check_program(backend, tiny_t5(kind), *padded_batch, 2, PROGRAM)


Broken = Callable[[OrtNumpy], dict[str, Callable[..., Any]]]


def left_aligned(backend: OrtNumpy) -> dict[str, Callable[..., Any]]:
    """After a ragged trim the shorter histories end too early: their relative positions are wrong."""

    def rollback(state: Any, accepted: np.ndarray) -> None:
        type(backend).rollback(backend, state, accepted)
        width, shape = state.rows.width, state.rows.shape
        index = (np.arange(width) + state.rows.padding.reshape(-1, 1)) % max(width, 1)
        flat = backend._from_host(expand_index_to_heads(index, 4, width))
        state.past = [backend._gathered(past, 4, flat, (*shape, 4, width)) for past in state.past]
        state.rows = dataclasses.replace(state.rows, padding=np.zeros_like(state.rows.padding), ragged=False)

    return {"rollback": rollback}


def with_past_mask(change: Callable[[np.ndarray], np.ndarray]) -> Broken:
    """It attends to the garbage in front of the shorter histories."""

    def broken(backend: OrtNumpy) -> dict[str, Callable[..., Any]]:
        def run_decoder(state: Any, new: np.ndarray, past_mask: np.ndarray) -> Any:
            return type(backend)._run_decoder(backend, state, new, change(past_mask))

        return {"_run_decoder": run_decoder}

    return broken


def past_alone_kept(backend: OrtNumpy) -> dict[str, Callable[..., Any]]:
    """The histories of the kept sources go on, with the first sources."""

    def select_sources(state: Any, sources: np.ndarray) -> None:
        source = state.source
        type(backend).select_sources(backend, state, sources)
        fresh = backend.new_state(source)
        type(backend).select_sources(backend, fresh, np.arange(len(sources)))
        state.source, state.binding = fresh.source, None

    return {"select_sources": select_sources}


BROKEN: dict[str, Broken] = {
    "no mask of the past": with_past_mask(np.ones_like),
    "the mask of other sources": with_past_mask(lambda mask: mask[:, ::-1].copy()),
    "left-aligned past": left_aligned,
    "keeps the wrong cross-attention": past_alone_kept,
    "the past of another layer": lambda backend: {
        "past_names": [*backend.past_names[2:], *backend.past_names[:2]], "outputs": backend.outputs
    },
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_backend_is_caught(own, tiny_t5, padded_batch, broken: str) -> None:
    check_program(own, tiny_t5(), *padded_batch, 3, PROGRAM)
    vars(own).update(BROKEN[broken](own))
    with pytest.raises(AssertionError, match="not close"):
        check_program(own, tiny_t5(), *padded_batch, 3, PROGRAM)


# Bad input


def test_what_cannot_be_opened_or_encoded(runtime, exported, padded_batch, tmp_path: Path) -> None:
    open_ = partial(runtime, exported("deeper-decoder"), settings=ONE_THREAD)
    backend = open_(max_source_tokens=9)
    assert backend.encode(*padded_batch).mask.shape == (6, 9)
    with pytest.raises(InputError, match="max_source_tokens"):
        backend.encode(np.full((1, 10), 5), np.ones((1, 10), dtype=np.int64))
    refused(open_, "max_source_tokens", 0, -1, 1.5, "9", True)
    refused(open_, "settings", "cpu", {"threads": 1}, 1, match="SessionSettings")
    refused(runtime, "folder", None, 5, "", b"x")
    refused(runtime, "folder", tmp_path, match="no export", error=ExportError)


def test_settings_say_what_is_wrong() -> None:
    for name, wrong in (("threads", [0, 1.5, 5000]), ("device", ["tpu", [], None]), ("spinning", [1]),
                        ("arena", ["no"]), ("memory_pattern", [None])):  # fmt: skip
        refused(SessionSettings, name, *wrong)


@pytest.mark.parametrize("options", [dict(spinning=False), dict(memory_pattern=True), dict(arena=False), dict()])
def test_settings_change_no_number(runtime, exported, opened, padded_batch, options: dict[str, Any]) -> None:
    backend = runtime(
        exported("deeper-decoder"), settings=SessionSettings(**{"threads": 2, **options}) if options else None
    )
    assert_close(logits_of(backend, padded_batch), logits_of(opened(runtime), padded_batch), atol=ATOL)


def test_a_damaged_graph_is_no_graph_and_nothing_is_printed(tmp_path: Path, capfd) -> None:
    (tmp_path / "decoder.onnx").write_bytes(b"no graph")
    with pytest.raises(ExportError, match=r"decoder\.onnx cannot be run on device='cpu'"):
        open_session(tmp_path / "decoder.onnx", ONE_THREAD)
    assert capfd.readouterr() == ("", "")


# Devices


def test_bound_says_who_runs_on_cuda(exported) -> None:
    with pytest.raises(InputError, match="OrtPointers"):
        OrtBound(exported("deeper-decoder"), settings=SessionSettings(device="cuda"))


cpu_only = pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="this onnxruntime has CUDA"
)


@cpu_only
@pytest.mark.parametrize("runtime", [OrtNumpy, OrtPointers])
def test_cuda_needs_its_onnxruntime(runtime: type[OrtNumpy], exported) -> None:
    with pytest.raises(MissingPackageError, match=r"no CUDAExecutionProvider.*\[gpu\]"):
        runtime(exported("deeper-decoder"), settings=SessionSettings(device="cuda"))


@cpu_only
@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_session_that_fell_back_to_the_cpu_is_refused(exported, monkeypatch, capfd) -> None:
    """As where the libraries of CUDA are missing: onnxruntime goes on without."""
    everything = onnxruntime.get_available_providers()
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", *everything])
    with pytest.raises(MissingPackageError, match="could not load CUDAExecutionProvider"):
        OrtNumpy(exported("deeper-decoder"), settings=SessionSettings(device="cuda"))
    assert capfd.readouterr().out == ""


@cpu_only
def test_a_session_that_fails_on_cuda_says_why_and_prints_nothing(exported, monkeypatch, capfd) -> None:
    """As where there is no GPU: onnxruntime would print that, and try the CPU."""
    everything, create = onnxruntime.get_available_providers(), onnxruntime.InferenceSession._create_inference_session

    def fail_on_cuda(self: Any, providers: list[str], *arguments: Any) -> None:
        if providers == ["CUDAExecutionProvider"]:
            raise RuntimeError("CUDA failure 100")
        create(self, providers, *arguments)

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", *everything])
    monkeypatch.setattr(onnxruntime.InferenceSession, "_create_inference_session", fail_on_cuda)
    with pytest.raises(ExportError, match="cannot be run on device='cuda' .*CUDA failure 100"):
        OrtNumpy(exported("deeper-decoder"), settings=SessionSettings(device="cuda"))
    assert capfd.readouterr() == ("", "")


def test_pointers_on_cuda_need_a_torch_that_sees_a_gpu(exported, monkeypatch) -> None:
    from t5accel.backends import ort_numpy as ort

    monkeypatch.setattr(ort, "open_session", lambda *_: None)
    monkeypatch.setattr(ort, "require_contract", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingPackageError, match="needs a torch with CUDA"):
        OrtPointers(exported("deeper-decoder"), settings=SessionSettings(device="cuda"))


@pytest.mark.parametrize("runtime", [OrtNumpy, OrtPointers, OrtCaptured])
def test_a_umt5_is_refused_on_cuda_where_it_was_wrong(runtime: type[OrtNumpy], exported, monkeypatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(ExportError, match=r"is a UMT5, whose first step .* which takes PyTorch"):
        runtime(exported("umt5"), settings=SessionSettings(device="cuda"))
    with pytest.raises(MissingPackageError, match="has no CUDAExecutionProvider"):
        runtime(exported("mt5"), settings=SessionSettings(device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("runtime", [OrtNumpy, OrtPointers])
def test_on_cuda(runtime: type[OrtNumpy], exported, tiny_t5, kind: str, padded_batch) -> None:
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA: install t5accel[gpu]")
    if kind == "umt5":
        pytest.skip("refused: test_a_umt5_is_refused_on_cuda_where_it_was_wrong")
    backend = runtime(exported(kind), settings=SessionSettings(device="cuda"))
    check_program(backend, tiny_t5(kind), *padded_batch, 3, PROGRAM)
    check(EncoderCache(backend), TorchEager(tiny_t5(kind)), [padded_batch])
    if runtime is OrtPointers:
        state = backend.new_state(backend.encode(*padded_batch))
        backend.step(state, histories_of(6, 1, 2))
        assert all(tensor.device.type == "cuda" for tensor in [*state.past, *state.source.inputs.values()])


# The encoder cache


def test_split_and_join(opened, runtime, padded_batch) -> None:
    backend = opened(runtime)
    source = backend.encode(*padded_batch)
    rows, dims = backend.split(source), backend.dims
    assert all(row.mask.all() and len(row.mask) == 1 for row in rows)
    keys = [as_numpy(backend, [row.inputs["cross_key_1"]])[0] for row in rows]
    assert [key.shape for key in keys] == [(1, 4, n, 12) for n in (9, 5, 3, 7, 2, 8)]
    joined = backend.join([rows[4], backend.join([rows[1], rows[2]]), rows[2]])
    assert joined.mask.tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0]]
    for name, value in joined.inputs.items():
        array = as_numpy(backend, [value])[0]
        if name == "attention_mask":
            np.testing.assert_array_equal(array, joined.mask)
        else:
            assert not array[0, :, 2:].any() and array[0, :, :2].any()
            np.testing.assert_array_equal(array[1:2], as_numpy(backend, [rows[1].inputs[name]])[0])
            np.testing.assert_array_equal(array[3:, :, :3], as_numpy(backend, [rows[2].inputs[name]])[0])
    whole = backend.join(rows)
    for name, value in whole.inputs.items():
        kept = as_numpy(backend, [source.inputs[name]])[0]
        real = source.mask if name == "attention_mask" else source.mask[:, None, :, None]
        np.testing.assert_array_equal(as_numpy(backend, [value])[0], kept * real)
    assert backend.source_bytes(source) == 6 * 9 * (2 * sum(dims.cross_heads) * dims.d_kv * 4 + 8)


def test_splitting_and_joining_make_new_memory(opened, runtime, padded_batch) -> None:
    backend = opened(runtime)
    source = backend.encode(*padded_batch)
    parts = [*backend.split(source), backend.join([source])]

    def addresses(of: OrtSource) -> set[int]:
        arrays = (backend._array(value) for value in of.inputs.values())
        return {array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data for array in arrays}

    own = addresses(source)
    assert len(own) == 7 and not any(own & addresses(part) for part in parts)
    single = backend.encode(*(array[:1] for array in padded_batch))
    assert not addresses(single) & (addresses(backend.join([single])) | addresses(backend.split(single)[0]))


# Greedy search, threads


def test_threads_share_a_backend(opened, runtime, padded_batch) -> None:
    """Each decodes sources of its own; one encodes and starts, too, and one decodes a source that all share."""
    backend, (ids, mask) = opened(runtime), padded_batch
    shared, new = backend.encode(ids, mask), histories_of(6, 2, 6)
    begin = threading.Barrier(4)

    def decode(source: Any, tokens: np.ndarray) -> list[np.ndarray]:
        state, logits = backend.new_state(source, 2), []
        for chunk in np.split(tokens, 6, axis=2):
            logits.append(backend.step(state, chunk))
            backend.reorder(state, np.array([[1, 0]] * len(tokens)))
        return logits

    expected = [
        decode(shared, new),
        *(decode(backend.encode(ids[i : i + 2], mask[i : i + 2]), new[:2]) for i in (0, 2, 4)),
    ]

    def work(number: int) -> None:
        begin.wait(timeout=30)
        for _ in range(12):
            rows = slice(2 * number - 2, 2 * number)
            source = shared if number == 0 else backend.encode(ids[rows], mask[rows])
            for one, other in zip(decode(source, new if number == 0 else new[:2]), expected[number], strict=True):
                assert_close(one, other, atol=1e-5)

    in_threads(*(lambda number=number: work(number) for number in range(4)))


# A failure on the way


GATHERING = {  # what is asked for, and of how many tensors
    "reorder": (np.array([[1, 0]] * 6), 6),
    "rollback": (np.array([[1, 3]] * 6), 6),
    "select_sources": (np.array([4, 1]), 12),
}


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
@pytest.mark.parametrize("method", GATHERING)
def test_a_gathering_that_fails_leaves_the_state_as_it_was(
    own, tiny_t5, padded_batch, monkeypatch, method: str, share: float
) -> None:
    argument, tensors = GATHERING[method]
    state = own.new_state(own.encode(*padded_batch), 2)
    own.step(state, np.full((6, 2, 3), 5))
    hold, calls = own._hold, []

    def failing(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) > int(share * tensors):
            raise MemoryError
        return hold(*arguments)

    monkeypatch.setattr(own, "_hold", failing)
    with pytest.raises(MemoryError):
        getattr(own, method)(state, argument)
    monkeypatch.undo()
    check_as_it_was(own, state, tiny_t5(), padded_batch)


def test_an_encoder_that_fails_leaves_nothing(own, padded_batch) -> None:
    def fail(run: Callable[..., Any], *arguments: Any) -> None:
        run(*arguments)
        raise RuntimeError("no memory")

    cache, session = EncoderCache(own), own.encoder
    own.encoder = Watched(session, fail)
    with pytest.raises(RuntimeError, match="no memory"):
        cache.encode(*padded_batch)
    own.encoder = session
    assert cache.size_bytes == 0
    tokens_of(cache, padded_batch)


# Addresses


def unchecked(binding: Any, name: str, tensor: torch.Tensor, *, is_output: bool = False, **_: Any) -> None:
    """How it is often written: the address, and the shape that the tensor says it has."""
    element = np.int64 if tensor.dtype == torch.int64 else np.float32
    bind = binding.bind_output if is_output else binding.bind_input
    bind(name, "cpu", 0, element, tuple(tensor.shape), tensor.data_ptr())


def test_an_address_knows_no_strides(opened, tiny_t5, padded_batch, monkeypatch) -> None:
    """The classic silent bug: the same values at other strides give other logits, and nobody says a word."""
    backend, new = opened(OrtPointers), histories_of(6, 2, 4)
    state = backend.new_state(backend.encode(*padded_batch), 2)
    backend.step(state, new)
    good = state.past
    strided = [past.transpose(3, 4).contiguous().transpose(3, 4) for past in good]
    assert all(torch.equal(a, b) and a.stride() != b.stride() for a, b in zip(strided, good, strict=True))
    rows, next_tokens = state.rows, new[:, :, :1]
    expected = backend.step(state, next_tokens)

    state.rows, state.past = rows, strided
    with pytest.raises(InputError, match="past_key_0"):
        backend.step(state, next_tokens)
    assert state.rows is rows and state.past is strided

    monkeypatch.setattr(ort_pointers, "bind_tensor", unchecked)
    silently_wrong = backend.step(state, next_tokens)
    assert np.isfinite(silently_wrong).all() and np.abs(silently_wrong - expected).max() > 0.1
    state.rows, state.past = rows, good
    np.testing.assert_array_equal(backend.step(state, next_tokens), expected)


@pytest.mark.parametrize("is_output", [False, True], ids=["input", "output"])
def test_what_is_not_bound(is_output: bool) -> None:
    options = dict(dtype=torch.float32, device=torch.device("cpu"), is_output=is_output)
    call, zeros = partial(bind_tensor, None, "past_key_0", **options), torch.zeros(2, 3)
    refused(call, "tensor", zeros.T, torch.zeros(4, 3)[::2], torch.zeros(1, 3).expand(2, 3), match="strides")
    for dtype in ("float64", "float16", "int64"):
        wrong = zeros.to(getattr(torch, dtype))
        refused(call, "tensor", wrong, match=f"{dtype}; the graph takes torch.float32")
    refused(call, "tensor", zeros.to("meta"), match="on meta; the session runs on cpu")
    refused(call, "tensor", zeros.numpy(), match="is a ndarray")
    refused(call, "tensor", None, match="is a NoneType")
    refused(partial(call, tensor=zeros), "dtype", torch.complex64, match="to be bound as torch.complex64")


class Recorder:
    """Writes down the calls of several objects in their order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **_: self.calls.append((name, arguments))


@pytest.mark.parametrize("is_output", [False, True], ids=["input", "output"])
def test_an_empty_tensor_is_not_bound_by_its_address(is_output: bool) -> None:
    for shape in ((2, 1, 4, 0, 12), (0,)):
        tensor, recorder = torch.zeros(shape), Recorder()
        assert tensor.data_ptr() == 0
        bind_tensor(recorder, "x", tensor, dtype=torch.float32, device=torch.device("cpu"), is_output=is_output)
        ((name, (_, value)),) = recorder.calls
        assert name == ("bind_ortvalue_output" if is_output else "bind_ortvalue_input")
        assert tuple(value.shape()) == shape and value.data_type() == "tensor(float)"


def test_the_device_is_waited_for_before_binding_and_after_the_run(exported, monkeypatch) -> None:
    """The order of calls on CUDA, played on the CPU."""
    backend, recorder = OrtPointers(exported("deeper-decoder"), settings=ONE_THREAD), Recorder()
    monkeypatch.setattr(torch.cuda, "synchronize", recorder.synchronize)
    monkeypatch.setattr(ort_pointers, "bind_tensor", recorder.bind_tensor)
    backend.device = torch.device("cuda", 0)
    backend._run(recorder, recorder, {"input_ids": None}, {"logits": None})
    names = [name for name, _ in recorder.calls]
    assert names == ["synchronize", "bind_tensor", "bind_tensor", "run_with_iobinding", "synchronize_outputs"]


def test_of_a_greedy_step_only_the_token_comes_to_the_host(exported, tiny_t5, padded_batch, monkeypatch) -> None:
    backend, shapes = OrtPointers(exported(), settings=ONE_THREAD), []
    to_host = backend._to_host
    monkeypatch.setattr(backend, "_to_host", lambda tensor: (shapes.append(tuple(tensor.shape)), to_host(tensor))[1])
    options = dict(min_new_tokens=5, max_new_tokens=9)
    found = greedy(backend, *padded_batch, **options).sequences
    assert {*shapes} == {(6, 1)} and len(shapes) >= 5
    expected = greedy(TorchEager(tiny_t5()), *padded_batch, **options).sequences
    np.testing.assert_array_equal(found, expected)


def test_its_tensors_are_contiguous_after_every_operation(opened, padded_batch) -> None:
    backend, new = opened(OrtPointers), histories_of(6, 2, 3)
    state = backend.new_state(backend.encode(*padded_batch), 2)
    for change in (
        lambda: backend.step(state, new),
        lambda: backend.rollback(state, np.array([[1, 3]] * 6)),
        lambda: backend.reorder(state, np.array([[1, 1]] * 6)),
        lambda: backend.select_sources(state, np.array([5, 2])),
        lambda: backend.step(state, new[:2]),
    ):
        change()
        assert all(tensor.is_contiguous() for tensor in [*state.past, *state.source.inputs.values()])


def test_the_session_writes_into_our_tensors(opened, padded_batch, monkeypatch) -> None:
    """Nothing is copied on the way: what a step returns as past is what was bound."""
    backend = opened(OrtPointers)
    bound: dict[str, torch.Tensor] = {}

    def recording(binding: Any, name: str, tensor: torch.Tensor, **options: Any) -> None:
        bound[name] = tensor
        bind_tensor(binding, name, tensor, **options)

    monkeypatch.setattr(ort_pointers, "bind_tensor", recording)
    state = backend.new_state(backend.encode(*padded_batch))
    for _ in range(2):
        before = state.past
        backend.step(state, histories_of(6, 1, 2))
        assert all(bound[name] is tensor for name, tensor in zip(backend.past_names, before, strict=True))
        assert all(bound[name] is tensor for name, tensor in zip(backend.outputs[1:], state.past, strict=True))
        assert all(bound[name] is state.source.inputs[name] for name in backend.cross_names)
    bound.clear()
    backend.step(state, histories_of(6, 1, 2))
    assert not bound.keys() & set(backend.cross_names), "cross-attention is bound once"


# Bytes


def by_kind(sizes: dict[str, int]) -> dict[str, int]:
    kinds: dict[str, int] = {}
    for name, size in sizes.items():
        start = name.split("_")[0]
        is_self = start in ("past", "present") and name != "past_mask"
        kind = "self_attention" if is_self else "cross_attention" if start == "cross" else name
        kinds[kind] = kinds.get(kind, 0) + size
    return kinds


@pytest.mark.parametrize("past", [0, 4])
def test_the_bytes_of_a_step_are_those_of_its_arrays(exported, kind: str, padded_batch, monkeypatch, past: int) -> None:
    backend, new = OrtNumpy(exported(kind), settings=ONE_THREAD), histories_of(6, 2, 4)
    expected = bytes_per_step(backend.dims, batch=6, rows=2, past=past, new=3, source=9)
    state = backend.new_state(backend.encode(*padded_batch), 2)
    if past:
        backend.step(state, new)
    handed_in: dict[str, int] = {}
    taken_back: dict[str, int] = {}

    def weigh(run: Callable[..., Any], names: list[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        results = run(names, feeds)
        handed_in.update((name, array.nbytes) for name, array in feeds.items())
        taken_back.update((name, array.nbytes) for name, array in zip(names, results, strict=True))
        return results

    backend.decoder = Watched(backend.decoder, weigh)
    backend.step(state, new[:, :, :3])
    assert by_kind(handed_in) == expected["fed"].handed_in
    assert by_kind(taken_back) == expected["fed"].taken_back
    both = sum(handed_in.values()) + sum(taken_back.values())
    assert both == expected["fed"].size_bytes > expected["bound"].size_bytes

    bound = OrtBound(exported(kind), settings=ONE_THREAD)
    state, handed_in = bound.new_state(bound.encode(*padded_batch), 2), {}
    if past:
        bound.step(state, new)
    bind = onnxruntime.IOBinding.bind_cpu_input
    monkeypatch.setattr(
        onnxruntime.IOBinding,
        "bind_cpu_input",
        lambda self, name, array: (handed_in.__setitem__(name, array.nbytes), bind(self, name, array)),
    )
    logits = bound.step(state, new[:, :, :3])
    assert handed_in == expected["bound"].handed_in
    assert {"logits": logits.nbytes} == expected["bound"].taken_back
    assert expected["bound"].size_bytes == logits.nbytes + sum(handed_in.values())


def test_bytes_of_unequal_layers_and_half_precision() -> None:
    dims = T5Dims(100, 8, 6, (2,), (1, 3), (2, 1), (16,), (16, 16), gated=False, tied=True)
    step = bytes_per_step(dims, batch=2, rows=3, past=5, new=1, source=7, element_bytes=2)
    assert step["fed"].handed_in == {
        "input_ids": 2 * 3 * 8,
        "past_mask": 2 * 3 * 5 * 8,
        "self_attention": 2 * 3 * 5 * (1 + 3) * 6 * 2 * 2,
        "cross_attention": 2 * 7 * (2 + 1) * 6 * 2 * 2,
        "attention_mask": 2 * 7 * 8,
    }
    assert step["fed"].taken_back == {"logits": 2 * 3 * 100 * 4, "self_attention": 2 * 3 * 6 * (1 + 3) * 6 * 2 * 2}
    assert step["bound"].handed_in == {"input_ids": 48, "past_mask": 240}
    assert step["bound"].taken_back == {"logits": 2400}


def test_no_count() -> None:
    dims = T5Dims(100, 8, 6, (2,), (2,), (2,), (16,), (16,), gated=False, tied=True)
    call = partial(bytes_per_step, dims, batch=1, rows=1, past=0, new=1, source=1, element_bytes=4)
    for name in ("batch", "rows", "past", "new", "source", "element_bytes"):
        refused(call, name, -1, 1.5, "3", None)


# Without torch and transformers

PROGRAM_WITHOUT = """
import sys
ALLOWED = sys.stdlib_module_names | {"numpy", "onnxruntime", "tokenizers", "t5accel"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in ALLOWED:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
for name in ("torch", "transformers", "onnx", "safetensors", "tqdm", "filelock", "huggingface_hub", "psutil"):
    assert name not in sys.modules
    try:
        __import__(name)
    except ImportError:
        continue
    raise AssertionError(f"{name} should be blocked")

from RUNTIME_MODULE import RUNTIME
from t5accel.backends.ort_session import SessionSettings
from t5accel.decoding.greedy_search import greedy
from t5accel.tokenization import text_to_text
from t5accel.tokenization import TokenizerFile

backend = RUNTIME(sys.argv[1], settings=SessionSettings(threads=1))
translate = text_to_text(
    TokenizerFile(sys.argv[1]), lambda ids, mask: greedy(backend, ids, mask, max_new_tokens=24).sequences
)
print(*translate(sys.argv[2:]), sep="\\n")
heavy = {"torch", "transformers", "onnx", "safetensors", "tqdm", "filelock", "huggingface_hub", "psutil"}
assert not heavy & {name.split(".")[0] for name in sys.modules}
"""


@pytest.mark.parametrize("runtime", [OrtNumpy, OrtBound])
def test_translates_without_torch_and_transformers(runtime: type[OrtNumpy], exported_mini, mini) -> None:
    model, tokenizer = mini
    texts = ["translate English to German: The house is small.", "translate English to German: I do not know."]
    program = PROGRAM_WITHOUT.replace("RUNTIME_MODULE", runtime.__module__)
    answer = subprocess.run(
        [sys.executable, "-c", program.replace("RUNTIME", runtime.__name__), exported_mini, *texts],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
    )
    assert answer.returncode == 0, answer.stderr
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    expected = tokenizer.batch_decode(
        model.generate(**batch, max_new_tokens=24, do_sample=False, num_beams=1), skip_special_tokens=True
    )
    assert answer.stdout.splitlines() == expected and len(set(expected)) == 2
    assert answer.stderr == ""


# ------------------------------------------------------------------------------------------- copies and other processes


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
@pytest.mark.parametrize("wrap", [lambda one: one, partial(EncoderCache, max_bytes=1000)], ids=["bare", "cached"])
def test_a_copy_opens_the_folder_again(runtime, exported, padded_batch, copied, wrap) -> None:
    settings = SessionSettings(threads=1, spinning=False)
    own = runtime(exported(), settings=settings, max_source_tokens=9)
    own.rules = dataclasses.replace(own.rules, suppress_tokens=(7,))
    found = copied(wrap(own))
    assert type(found) is type(wrap(own)) and found is not own
    assert (found.settings, found.max_source_tokens, found.rules) == (settings, 9, own.rules)
    np.testing.assert_array_equal(*(greedy(one, *padded_batch, max_new_tokens=6).sequences for one in (own, found)))


def test_a_pickle_is_of_the_export_that_was_there(exported, tiny_t5, tmp_path: Path) -> None:
    shutil.copytree(exported(), tmp_path / "export")
    pickled = pickle.dumps(OrtNumpy(tmp_path / "export", settings=ONE_THREAD))
    export_model(tiny_t5(seed=2), tmp_path / "export", overwrite=True)
    with pytest.raises(ExportError, match="holds another export than when the backend was pickled"):
        pickle.loads(pickled)
    shutil.rmtree(tmp_path / "export")
    with pytest.raises(ExportError, match="no export"):
        pickle.loads(pickled)


FORKED = """
import os, signal, sys, threading
import numpy as np
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.ort_static import OrtStatic
from t5accel.decoding.greedy_search import greedy

backend = OrtStatic(sys.argv[1], settings=SessionSettings(threads=2))
ids = np.random.default_rng(0).integers(3, 300, (40, 60))
answer = lambda: greedy(backend, ids, max_new_tokens=3, min_new_tokens=3).sequences.tolist()
expected = answer()

def child():
    signal.alarm(30)
    try:
        return 0 if answer() == expected else 1
    except Exception as error:
        return 3 if type(error).__name__ == "InputError" and "forked while another thread" in str(error) else 2

def forked():
    process = os.fork()
    if not process:
        os._exit(child())
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

assert forked() == 0  # nothing ran
stop = threading.Event()
def work():
    while not stop.is_set():
        answer()
thread = threading.Thread(target=work, daemon=True)
thread.start()
seen = []
sessions = [backend.encoder, backend.decoder]
while 3 not in seen and len(seen) < 50:
    while not any(session.threads for session in sessions):
        pass
    seen.append(forked())
stop.set()
thread.join()
assert {*seen} <= {0, 3} and 3 in seen, seen
assert answer() == expected  # the parent goes on
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_fork_in_the_middle_of_a_run_is_refused_and_does_not_hang(exported) -> None:
    subprocess.run([sys.executable, "-c", FORKED, str(exported())], check=True, timeout=120)


def test_both_sessions_read_one_embedding(tiny_t5, padded_batch, tmp_path: Path) -> None:
    """Of an export with a file of weights; that it is this one which is read shows when it is another."""
    export_model(tiny_t5(), tmp_path / "inside")
    export_model(tiny_t5(), tmp_path / "beside", external_threshold_bytes=0)
    inside, beside = (OrtNumpy(tmp_path / name, settings=ONE_THREAD) for name in ("inside", "beside"))
    assert inside._weights == {} and list(beside._weights) == ["shared.weight"]
    tokens = np.random.default_rng(1).integers(3, 300, (6, 1, 4))
    logits = [backend.step(backend.new_state(backend.encode(*padded_batch)), tokens) for backend in (inside, beside)]
    assert (logits[0] == logits[1]).all()
    other = np.array(beside._weights["shared.weight"].numpy()[::-1])
    weights = {"shared.weight": onnxruntime.OrtValue.ortvalue_from_numpy(other)}
    for graph in ("encoder", "decoder"):
        session = open_session(tmp_path / "beside" / f"{graph}.onnx", ONE_THREAD, weights)
        setattr(beside, graph, session)
        changed = beside.step(beside.new_state(beside.encode(*padded_batch)), tokens)
        assert np.abs(changed - logits[0]).max() > 0.1, f"the {graph} should read what it is given"
        logits[0] = changed
