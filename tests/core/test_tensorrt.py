"""The TensorRT backend without TensorRT: a stand-in with its calls runs the graphs on the CPU, by addresses."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import ATOL, PROGRAM, check_program, operations

import t5accel.backends.tensorrt as module
from t5accel.backends.tensorrt import Engine, Range, Sizes, TensorRT
from t5accel.backends.torch_eager import TorchEager
from t5accel.decoding.backend import Backend
from t5accel.decoding.beam import beam_search
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import ExportError, InputError, MissingPackageError
from t5accel.parity import assert_varied

KINDS = {"tensor(float)": ("FLOAT", np.float32), "tensor(int64)": ("INT64", np.int64)}
SIZES = Sizes(B=Range(1, 1, 6), K=Range(1, 1, 4), S=Range(1, 9, 16), T=Range(1, 1, 16), P=Range(0, 8, 64))


class Context:
    """Knows shapes and addresses, as TensorRT's does: nothing of the tensors themselves."""

    def __init__(self, session: Any):
        self.session, self.shapes, self.addresses = session, {}, {}
        self.types = {tensor.name: KINDS[tensor.type][1] for tensor in (*session.get_inputs(), *session.get_outputs())}

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return True

    def infer_shapes(self) -> list[str]:
        return [tensor.name for tensor in self.session.get_inputs() if tensor.name not in self.shapes]

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address, f"{name} has no address"
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        feeds = {name: self._at(name, shape).copy() for name, shape in self.shapes.items()}
        for tensor, found in zip(self.session.get_outputs(), self.session.run(None, feeds), strict=True):
            if found.size:
                self._at(tensor.name, found.shape)[...] = found
        return True

    def _at(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        kind, count = np.dtype(self.types[name]), math.prod(shape)
        memory = (ctypes.c_byte * (count * kind.itemsize)).from_address(self.addresses[name])
        return np.frombuffer(memory, kind, count).reshape(shape)


class Logger:
    Severity = SimpleNamespace(ERROR=1)


def stand_in(**changes: Any) -> Any:
    """Like the module ``tensorrt``, as far as the backend asks; an engine is an ONNX graph."""

    def deserialize(data: bytes) -> Any:
        session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
        types = {t.name: f"DataType.{KINDS[t.type][0]}" for t in (*session.get_inputs(), *session.get_outputs())}
        engine = dict(get_tensor_dtype=types.__getitem__, create_execution_context=lambda: Context(session))
        return SimpleNamespace(**{**engine, **changes})

    runtime = SimpleNamespace(deserialize_cuda_engine=deserialize)
    return SimpleNamespace(ILogger=Logger, Runtime=lambda log: runtime)


@pytest.fixture
def on_cpu(exported: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., TensorRT]:
    """``on_cpu(kind)``: the backend over that export, with graphs in the place of engines."""

    def build(kind: str = "deeper-decoder", **changes: Any) -> TensorRT:
        folder = exported(kind)
        monkeypatch.setattr(module, "cached_engines", lambda *_, **__: {p.name: p for p in folder.glob("*.onnx")})
        return TensorRT(folder, sizes=SIZES, trt=stand_in(**changes), device="cpu")

    return build


def test_satisfies_the_protocol(on_cpu: Any) -> None:
    assert isinstance(on_cpu(), Backend)


def test_a_program_with_everything_in_it(on_cpu: Any, tiny_t5: Any, kind: str, padded_batch: Any) -> None:
    check_program(on_cpu(kind), tiny_t5(kind), *padded_batch, 2, PROGRAM)


@settings(deadline=None, max_examples=10)
@given(program=st.lists(operations, min_size=1, max_size=6), rows=st.integers(1, 3))
def test_any_program_gives_transformers_logits(tiny_t5: Any, padded_batch: Any, program: Any, rows: int, exported: Any):
    folder = exported("deeper-decoder")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "cached_engines", lambda *_, **__: {p.name: p for p in folder.glob("*.onnx")})
        backend = TensorRT(folder, sizes=SIZES, trt=stand_in(), device="cpu")
    check_program(backend, tiny_t5(), *padded_batch, rows, program)


def test_tokens_and_scores_of_searches(on_cpu: Any, tiny_t5: Any, padded_batch: Any) -> None:
    backend, model = on_cpu(), TorchEager(tiny_t5())
    expected, found = (greedy(one, *padded_batch, max_new_tokens=20).sequences for one in (model, backend))
    assert_varied(expected)
    np.testing.assert_array_equal(found, expected)
    beams = [beam_search(one, *padded_batch, num_beams=3, max_new_tokens=12) for one in (model, backend)]
    np.testing.assert_array_equal(beams[1].sequences, beams[0].sequences)
    np.testing.assert_allclose(beams[1].scores, beams[0].scores, atol=ATOL)


def test_sizes_outside_of_the_plan_are_refused_before_anything_runs(on_cpu: Any, padded_batch: Any) -> None:
    backend = on_cpu()
    ids = np.full((1, 17), 5)
    with pytest.raises(InputError, match=r"input_ids is of shape \(1, 17\)"):
        backend.encode(ids, np.ones_like(ids))
    state = backend.new_state(backend.encode(*padded_batch))
    with pytest.raises(InputError, match=r"input_ids is of shape \(6, 1, 17\)"):
        backend.step(state, np.full((6, 1, 17), 5))
    assert (state.rows.lengths == 0).all()


@pytest.mark.parametrize(("changes", "message"), [
    ({"get_tensor_dtype": lambda name: "DataType.HALF"}, "is HALF in .*; (int64|float32) was asked for"),
])  # fmt: skip
def test_engines_of_other_numbers_are_refused(on_cpu: Any, changes: Any, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        on_cpu(**changes)


def test_an_engine_that_cannot_be_loaded(tmp_path: Path, on_cpu: Any) -> None:
    trt = stand_in()
    trt.Runtime = lambda log: SimpleNamespace(deserialize_cuda_engine=lambda data: None)
    (tmp_path / "one.engine").write_bytes(b"")
    with pytest.raises(ExportError, match="cannot be loaded here: it did not say why"):
        Engine(trt, tmp_path / "one.engine", on_cpu().plan.graphs["encoder.onnx"])


@pytest.mark.parametrize(("call", "message"), [("infer_shapes", "does not know the shapes of x"),
                                               ("execute_async_v3", "could not run")])  # fmt: skip
def test_what_tensorrt_refuses_is_an_error_and_changes_nothing(on_cpu: Any, padded_batch: Any, call: str, message: str):
    backend = on_cpu()
    state = backend.new_state(backend.encode(*padded_batch))
    setattr(backend.decoder.context, call, lambda *_: ["x"] if call == "infer_shapes" else False)
    with pytest.raises(ExportError, match=message):
        backend.step(state, np.full((6, 1, 1), 5))
    assert (state.rows.lengths == 0).all() and state.past[0].shape[3] == 0


def test_without_a_gpu_one_sentence_says_so(exported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingPackageError, match="on an NVIDIA GPU, and this torch sees none"):
        TensorRT(exported("deeper-decoder"), trt=stand_in())
