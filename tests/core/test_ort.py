"""What the ONNX Runtime backends do with sessions, memory, devices and addresses.

`test_conformance` compares their logits with transformers'.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import pickle
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import psutil
import pytest
import torch
from programs import ATOL, PROGRAM, check_as_it_was, check_program, histories_of
from refused import refused
from test_encoder_cache import check, in_threads, logits_of

from bench.baselines.ort_cuda_graph import OrtCaptured
from bench.baselines.ort_iobinding import OrtBound
from t5accel import machine
from t5accel.backends import ort_cuda, ort_memory
from t5accel.backends.openvino_encoder import BF16_FLAGS
from t5accel.backends.ort_cuda import OrtPointers, bind_tensor
from t5accel.backends.ort_memory import run_into
from t5accel.backends.ort_numpy import OrtNumpy, OrtSource
from t5accel.backends.ort_session import SessionSettings, open_session
from t5accel.backends.torch_eager import TorchEager
from t5accel.decoding.encoder_cache import EncoderCache
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import ExportError, InputError, MissingPackageError
from t5accel.graphs.export import export_model
from t5accel.parity import assert_close

ROOT = Path(__file__).resolve().parents[2]
ONE_THREAD = SessionSettings(threads=1)
BF16 = bool(BF16_FLAGS & {*(machine.facts(gpu=False)["cpu_flags"] or ())})


@pytest.fixture(scope="session", params=[OrtNumpy, OrtPointers], ids=lambda runtime: runtime.__name__)
def runtime(request: pytest.FixtureRequest) -> type[OrtNumpy]:
    return request.param


@pytest.fixture
def own(runtime, exported) -> OrtNumpy:
    """A backend that the test may patch."""
    return runtime(exported("deeper-decoder"), settings=ONE_THREAD)


# Memory


def test_the_earlier_past_is_freed(runtime, exported) -> None:
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


# Large batches


@pytest.mark.parametrize("side", ["right", "left"])
def test_large_batches_are_encoded_in_slices(own, tiny_t5, padded_batch, monkeypatch, side: str) -> None:
    """Rows of about one length at a time, padded to the longest; neighbours of full length are not copied."""
    ids, mask = padded_batch if side == "right" else (array[:, ::-1] for array in padded_batch)
    seen: list[tuple[tuple[int, ...], bool]] = []

    def noted(session: Any, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> None:
        seen.append((inputs["input_ids"].shape, all(array.base is not None for array in outputs.values())))
        run_into(session, inputs, outputs)

    monkeypatch.setattr("t5accel.backends.ort_numpy.run_into", noted)
    monkeypatch.setattr(ort_memory, "SLICE_TOKENS", 26)
    check_program(own, tiny_t5(), ids, mask, 2, PROGRAM)
    rows, longest = ids.shape
    # On the right the lengths are 9 and 8 (no neighbours), 7 and 5, 3 and 2; on the left all reach the last column.
    shapes = [(2, longest), (2, 7), (2, 3)] if side == "right" else [(2, longest)] * 3
    assert seen == [(shape, side == "left") for shape in shapes]
    seen.clear()
    monkeypatch.setattr(ort_memory, "SLICE_TOKENS", 1)
    check_program(own, tiny_t5(), ids, mask, 1, PROGRAM)
    assert len(seen) == rows


def test_a_long_source_does_not_pad_short_ones(own, tiny_t5, monkeypatch) -> None:
    """A small batch is sliced, too, where padding would take longer than another call."""
    mask = np.ones((5, 40), dtype=np.int64)
    mask[[0, 1, 3, 4], 6:] = 0
    ids = np.random.default_rng(1).integers(3, 300, mask.shape) * mask
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        "t5accel.backends.ort_numpy.run_into",
        lambda session, inputs, outputs: (seen.append(inputs["input_ids"].shape), run_into(session, inputs, outputs)),
    )
    check_program(own, tiny_t5(), ids, mask, 2, PROGRAM)
    assert seen == [(1, 40), (4, 6)]


def test_large_batches_are_encoded_by_openvino(exported, tiny_t5, padded_batch, monkeypatch) -> None:
    settings = SessionSettings(threads=1, openvino=True)
    backend = OrtNumpy(exported(), settings=settings)
    small = [one.encode(*padded_batch).inputs for one in (backend, OrtNumpy(exported(), settings=ONE_THREAD))]
    assert all((small[0][name] == small[1][name]).all() for name in backend.cross_names), "on ONNX Runtime"
    monkeypatch.setattr(ort_memory, "SLICE_TOKENS", 26)
    monkeypatch.setattr(backend, "encoder", None)
    check_program(backend, tiny_t5(), *padded_batch, 2, PROGRAM)
    backend.openvino = OrtNumpy(exported(seed=2), settings=settings).openvino
    with pytest.raises(AssertionError):  # another model's encoder
        check_program(backend, tiny_t5(), *padded_batch, 2, PROGRAM)


@pytest.mark.skipif(not BF16, reason="needs a CPU that multiplies bf16")
def test_every_batch_is_encoded_in_bf16_where_that_was_asked_for(exported, padded_batch, monkeypatch) -> None:
    """Small batches as well: an answer must not depend on the size of its batch."""
    settings = SessionSettings(threads=1, openvino=True, encoder_precision="bf16")
    backend, exact = OrtNumpy(exported(), settings=settings), OrtNumpy(exported(), settings=ONE_THREAD)
    monkeypatch.setattr(backend, "encoder", None)
    (ids, mask), real = padded_batch, padded_batch[1].astype(bool)
    found, expected = backend.encode(ids, mask).inputs, exact.encode(ids, mask).inputs
    for name in backend.cross_names:
        one, other = (np.moveaxis(each[name], 1, 2)[real] for each in (found, expected))
        assert 1e-4 < np.linalg.norm(one - other) / np.linalg.norm(other) < 0.05


def test_bf16_is_refused_on_a_cpu_without_it(exported, monkeypatch) -> None:
    monkeypatch.setattr("t5accel.machine.facts", lambda **_: {"cpu_flags": ["avx2"]})
    with pytest.raises(InputError, match="encoder_precision must be 'fp32' on this CPU"):
        OrtNumpy(exported(), settings=SessionSettings(openvino=True, encoder_precision="bf16"))


# Bad input


def test_invalid_arguments(runtime, exported, padded_batch, tmp_path: Path) -> None:
    few = runtime(exported(), settings=ONE_THREAD, max_source_tokens=9)
    assert few.encode(*padded_batch).mask.shape == (6, 9)
    with pytest.raises(InputError, match="max_source_tokens"):
        few.encode(np.full((1, 10), 5), np.ones((1, 10), dtype=np.int64))
    refused(runtime, "folder", tmp_path, match="no export", error=ExportError)
    with pytest.raises(InputError, match="OrtPointers"):
        OrtBound(exported(), settings=SessionSettings(device="cuda"))


@pytest.mark.parametrize("options", [dict(threads=2, spinning=False), dict(arena=False)])
def test_settings_change_no_number(exported, opened, padded_batch, options: dict[str, Any]) -> None:
    backend = OrtNumpy(exported(), settings=SessionSettings(**{"threads": 1, **options}))
    assert_close(logits_of(backend, padded_batch), logits_of(opened(OrtNumpy), padded_batch), atol=ATOL)


def test_a_run_may_outlive_its_backend(tiny_t5, padded_batch, tmp_path: Path) -> None:
    """ONNX Runtime only points to the weights that both graphs share."""
    export_model(tiny_t5(), tmp_path / "export", external_threshold_bytes=0)
    backend = OrtNumpy(tmp_path / "export", settings=ONE_THREAD)
    encoder, names = backend.encoder, backend.cross_names
    inputs = dict(zip(("input_ids", "attention_mask"), padded_batch, strict=True))
    before = encoder.run(names, inputs)
    assert backend._weights and encoder.weights is backend._weights
    backend.close()
    gc.collect()
    for found, expected in zip(encoder.run(names, inputs), before, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_damaged_graph_is_refused_and_nothing_is_printed(tmp_path: Path, capfd) -> None:
    (tmp_path / "decoder.onnx").write_bytes(b"no graph")
    with pytest.raises(ExportError, match=r"decoder\.onnx"):
        open_session(tmp_path / "decoder.onnx", ONE_THREAD)
    assert capfd.readouterr() == ("", "")


# Devices


cpu_only = pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="this onnxruntime has CUDA"
)
CUDA = SessionSettings(device="cuda")


@pytest.fixture
def listed_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime says that it has CUDA."""
    everything = onnxruntime.get_available_providers()
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", *everything])


@cpu_only
@pytest.mark.parametrize("runtime", [OrtNumpy, OrtPointers])
def test_cuda_needs_its_onnxruntime(runtime: type[OrtNumpy], exported) -> None:
    with pytest.raises(MissingPackageError, match=r"no CUDAExecutionProvider.*\[gpu\]"):
        runtime(exported(), settings=CUDA)


@cpu_only
@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_session_that_fell_back_to_the_cpu_is_refused(exported, listed_cuda, capfd) -> None:
    """Where the libraries of CUDA are missing, onnxruntime goes on without."""
    with pytest.raises(MissingPackageError, match="could not load CUDAExecutionProvider"):
        OrtNumpy(exported(), settings=CUDA)
    assert capfd.readouterr().out == ""


@cpu_only
def test_a_session_that_fails_on_cuda_says_why_and_prints_nothing(exported, listed_cuda, monkeypatch, capfd) -> None:
    """Where there is no GPU, onnxruntime would print that, and try the CPU."""
    create = onnxruntime.InferenceSession._create_inference_session

    def fail_on_cuda(self: Any, providers: list[str], *arguments: Any) -> None:
        if providers == ["CUDAExecutionProvider"]:
            raise RuntimeError("CUDA failure 100")
        create(self, providers, *arguments)

    monkeypatch.setattr(onnxruntime.InferenceSession, "_create_inference_session", fail_on_cuda)
    with pytest.raises(ExportError, match="device='cuda' .*CUDA failure 100"):
        OrtNumpy(exported(), settings=CUDA)
    assert capfd.readouterr() == ("", "")


def test_pointers_on_cuda_need_a_torch_that_sees_a_gpu(exported, monkeypatch) -> None:
    for name in ("open_session", "require_contract"):
        monkeypatch.setattr(f"t5accel.backends.ort_numpy.{name}", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingPackageError, match="torch with CUDA"):
        OrtPointers(exported(), settings=CUDA)


@pytest.mark.parametrize("runtime", [OrtNumpy, OrtPointers, OrtCaptured])
def test_a_umt5_is_refused_on_cuda_where_it_was_wrong(runtime: type[OrtNumpy], exported, monkeypatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(ExportError, match="UMT5"):
        runtime(exported("umt5"), settings=CUDA)
    with pytest.raises(MissingPackageError, match="no CUDAExecutionProvider"):
        runtime(exported("mt5"), settings=CUDA)


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


# The encoder cache and threads


def test_splitting_and_joining_make_new_memory(opened, runtime, padded_batch) -> None:
    """That they are the same sources is in `test_conformance`."""
    backend = opened(runtime)
    source, dims = backend.encode(*padded_batch), backend.dims
    parts = [*backend.split(source), backend.join([source])]
    assert [part.mask.shape for part in parts] == [(1, n) for n in (9, 5, 3, 7, 2, 8)] + [(6, 9)]
    assert backend.source_bytes(source) == 6 * 9 * (2 * sum(dims.cross_heads) * dims.d_kv * 4 + 8)

    def addresses(of: OrtSource) -> set[int]:
        arrays = (backend._array(value) for value in of.inputs.values())
        return {array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data for array in arrays}

    own = addresses(source)
    assert len(own) == 7 and not any(own & addresses(part) for part in parts)
    single = backend.encode(*(array[:1] for array in padded_batch))
    assert not addresses(single) & (addresses(backend.join([single])) | addresses(backend.split(single)[0]))


def test_threads_share_a_backend(opened, runtime, padded_batch) -> None:
    """Each decodes sources of their own; one encodes and starts, too, and one decodes a source that all share."""
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


GATHERING = {  # the argument, and the number of tensors
    "reorder": (np.array([[1, 0]] * 6), 6),
    "rollback": (np.array([[1, 3]] * 6), 6),
    "select_sources": (np.array([4, 1]), 12),
}


@pytest.mark.parametrize("share", [0, 0.99])
@pytest.mark.parametrize("method", GATHERING)
def test_a_failed_gather_leaves_the_state_as_it_was(
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


# Places and addresses


def test_a_place_that_is_taken_again_makes_no_past_longer(own, padded_batch, monkeypatch) -> None:
    ids, mask = padded_batch
    state, new = own.new_state(own.encode(ids[:1], mask[:1])), np.array([[[5]]])
    for _ in range(2):
        for _ in range(4):
            own.step(state, new)
        assert state.rows.width == 4
        own.replace_sources(state, own.encode(ids[1:2], mask[1:2]), np.array([0]))
    own.step(state, new)
    with monkeypatch.context() as patch:
        patch.setattr(own, "select_sources", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(MemoryError):
            own.replace_sources(state, own.encode(ids[:1], mask[:1]), np.array([0]))
    again = own.new_state(own.encode(ids[1:2], mask[1:2]))
    own.step(again, new)
    assert_close(own.step(state, new), own.step(again, new), atol=ATOL)


@pytest.mark.parametrize("is_output", [False, True], ids=["input", "output"])
def test_tensors_that_cannot_be_bound(is_output: bool) -> None:
    options = dict(dtype=torch.float32, device=torch.device("cpu"), is_output=is_output)
    call, zeros = partial(bind_tensor, None, "past_key_0", **options), torch.zeros(2, 3)
    strided = zeros.T, torch.zeros(4, 3)[::2], torch.zeros(1, 3).expand(2, 3)
    others = zeros.double(), zeros.half(), zeros.long(), zeros.to("meta"), zeros.numpy(), None
    refused(call, "tensor", *strided, *others, match="past_key_0")
    refused(partial(call, tensor=zeros), "dtype", torch.complex64, match="past_key_0")


class Recorder:
    """Writes down the calls of several objects in their order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **_: self.calls.append((name, arguments))


@pytest.mark.parametrize("is_output", [False, True], ids=["input", "output"])
@pytest.mark.parametrize("shape", [(2, 1, 4, 0, 12), (0,)])
def test_an_empty_tensor_is_not_bound_by_its_address(is_output: bool, shape: tuple[int, ...]) -> None:
    tensor, recorder = torch.zeros(shape), Recorder()
    bind_tensor(recorder, "x", tensor, dtype=torch.float32, device=torch.device("cpu"), is_output=is_output)
    ((name, (_, value)),) = recorder.calls
    assert name == ("bind_ortvalue_output" if is_output else "bind_ortvalue_input")
    assert tuple(value.shape()) == shape and value.data_type() == "tensor(float)"


def test_the_device_is_synchronized_before_binding_and_after_the_run(exported, monkeypatch) -> None:
    """The order of calls on CUDA, played on the CPU."""
    backend, recorder = OrtPointers(exported("deeper-decoder"), settings=ONE_THREAD), Recorder()
    monkeypatch.setattr(torch.cuda, "synchronize", recorder.synchronize)
    monkeypatch.setattr(ort_cuda, "bind_tensor", recorder.bind_tensor)
    backend.device = torch.device("cuda", 0)
    backend._run(recorder, recorder, {"input_ids": None}, {"logits": None})
    names = [name for name, _ in recorder.calls]
    assert names == ["synchronize", "bind_tensor", "bind_tensor", "run_with_iobinding", "synchronize_outputs"]


def test_a_greedy_step_copies_only_tokens_to_the_host(exported, tiny_t5, padded_batch, monkeypatch) -> None:
    backend, shapes = OrtPointers(exported(), settings=ONE_THREAD), []
    to_host = backend._to_host
    monkeypatch.setattr(backend, "_to_host", lambda tensor: (shapes.append(tuple(tensor.shape)), to_host(tensor))[1])
    options = dict(min_new_tokens=5, max_new_tokens=9)
    found = greedy(backend, *padded_batch, **options).sequences
    assert {*shapes} == {(6, 1)} and len(shapes) >= 5
    expected = greedy(TorchEager(tiny_t5()), *padded_batch, **options).sequences
    np.testing.assert_array_equal(found, expected)


def test_the_session_writes_into_bound_tensors(opened, padded_batch, monkeypatch) -> None:
    """A step returns as past what was bound, without a copy; cross-attention is bound once."""
    backend = opened(OrtPointers)
    bound: dict[str, torch.Tensor] = {}

    def recording(binding: Any, name: str, tensor: torch.Tensor, **options: Any) -> None:
        bound[name] = tensor
        bind_tensor(binding, name, tensor, **options)

    monkeypatch.setattr(ort_cuda, "bind_tensor", recording)
    state = backend.new_state(backend.encode(*padded_batch))
    for _ in range(2):
        before = state.past
        backend.step(state, histories_of(6, 1, 2))
        assert all(bound[name] is tensor for name, tensor in zip(backend.past_names, before, strict=True))
        assert all(bound[name] is tensor for name, tensor in zip(backend.outputs[1:], state.past, strict=True))
        assert all(bound[name] is state.source.inputs[name] for name in backend.cross_names)
    bound.clear()
    backend.step(state, histories_of(6, 1, 2))
    assert bound and not bound.keys() & set(backend.cross_names)


# Other processes


WITHOUT = """
import sys
ALLOWED = sys.stdlib_module_names | {"numpy", "onnxruntime", "tokenizers", "t5accel"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in ALLOWED:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.decoding.greedy_search import greedy
from t5accel.tokenization import TokenizerFile, text_to_text

backend = OrtNumpy(sys.argv[1], settings=SessionSettings(threads=1))
translate = text_to_text(
    TokenizerFile(sys.argv[1]), lambda ids, mask: greedy(backend, ids, mask, max_new_tokens=24).sequences
)
print(*translate(sys.argv[2:]), sep="\\n")
heavy = {"torch", "transformers", "onnx", "safetensors", "tqdm", "filelock", "huggingface_hub", "psutil"}
assert not heavy & {name.split(".")[0] for name in sys.modules}
"""


def test_translates_without_torch_and_transformers(exported_mini) -> None:
    texts = [f"translate English to French: {text}" for text in ("Where is my bag?", "I am tired.")]
    answer = subprocess.run(
        [sys.executable, "-c", WITHOUT, exported_mini, *texts], cwd=ROOT, capture_output=True, encoding="utf-8",
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.splitlines() == ["Où est mon sac ?", "Je suis fatigué."]


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


def test_a_pickle_of_another_export_is_refused(exported, tiny_t5, tmp_path: Path) -> None:
    shutil.copytree(exported(), tmp_path / "export")
    pickled = pickle.dumps(OrtNumpy(tmp_path / "export", settings=ONE_THREAD))
    export_model(tiny_t5(seed=2), tmp_path / "export", overwrite=True)
    with pytest.raises(ExportError, match="holds another export"):
        pickle.loads(pickled)
    shutil.rmtree(tmp_path / "export")
    with pytest.raises(ExportError, match="no export"):
        pickle.loads(pickled)


FORKED = """
import os, signal, sys, threading
import numpy as np
from t5accel.backends import ort_session
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

pauses, sleep = [], ort_session.time.sleep
ort_session.time.sleep = lambda seconds: (pauses.append(seconds), sleep(seconds))
first = forked()
assert first == 0 and pauses == [ort_session.SETTLE_S], (first, pauses)  # nothing ran
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
