"""TensorRT plans, and the backend without TensorRT: a stand-in runs the graphs on the CPU by addresses."""

from __future__ import annotations

import ctypes
import math
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from programs import ATOL, PROGRAM, check_program
from refused import refused

import t5accel.backends.tensorrt as module
from bench.baselines.optimized_export import optimize_export
from t5accel.backends.tensorrt import Engine, Range, Sizes, TensorRT, plan
from t5accel.backends.torch_eager import TorchEager
from t5accel.decoding.backend import Backend
from t5accel.decoding.beam import beam_search
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import ExportError, InputError, MissingPackageError
from t5accel.graphs.contract import decoder_spec, encoder_spec
from t5accel.graphs.manifest import Manifest, read_manifest
from t5accel.parity import assert_varied
from t5accel.precision.convert import convert_export
from t5accel.precision.recipes import RECIPES

KINDS = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
SIZES = Sizes(B=Range(1, 1, 6), K=Range(1, 1, 4), S=Range(1, 9, 16), T=Range(1, 1, 16), P=Range(0, 8, 64))


class Context:
    """Knows shapes and addresses, as TensorRT's does: nothing of the tensors themselves."""

    def __init__(self, session: Any):
        self.session, self.shapes, self.addresses = session, {}, {}
        self.types = {tensor.name: KINDS[tensor.type] for tensor in (*session.get_inputs(), *session.get_outputs())}

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


def stand_in() -> Any:
    """Like the module ``tensorrt``, as far as the backend asks; an engine is an ONNX graph."""

    def deserialize(data: bytes) -> Any:
        session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
        return SimpleNamespace(create_execution_context=lambda: Context(session))

    runtime = SimpleNamespace(deserialize_cuda_engine=deserialize)
    return SimpleNamespace(ILogger=Logger, Runtime=lambda log: runtime)


@pytest.fixture
def on_cpu(exported: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., TensorRT]:
    """``on_cpu()``: the backend over an export, with graphs in the place of engines."""

    def build() -> TensorRT:
        folder = exported()
        monkeypatch.setattr(module, "cached_engines", lambda *_, **__: {p.name: p for p in folder.glob("*.onnx")})
        return TensorRT(folder, sizes=SIZES, trt=stand_in(), device="cpu")

    return build


def test_a_program_with_everything_in_it(on_cpu: Any, tiny_t5: Any, padded_batch: Any) -> None:
    backend = on_cpu()
    assert isinstance(backend, Backend)
    check_program(backend, tiny_t5(), *padded_batch, 2, PROGRAM)


def test_tokens_and_scores_of_searches(on_cpu: Any, tiny_t5: Any, padded_batch: Any) -> None:
    backend, model = on_cpu(), TorchEager(tiny_t5())
    expected, found = (greedy(one, *padded_batch, max_new_tokens=20).sequences for one in (model, backend))
    assert_varied(expected)
    np.testing.assert_array_equal(found, expected)
    beams = [beam_search(one, *padded_batch, num_beams=3, max_new_tokens=12) for one in (model, backend)]
    np.testing.assert_array_equal(beams[1].sequences, beams[0].sequences)
    np.testing.assert_allclose(beams[1].scores, beams[0].scores, atol=ATOL)


def test_threads_take_turns_at_a_context(on_cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, texts = on_cpu(), np.random.default_rng(1).integers(3, 300, (2, 2, 9))
    expected = [greedy(backend, ids, max_new_tokens=6).sequences for ids in texts]
    place = Context.set_tensor_address
    monkeypatch.setattr(Context, "set_tensor_address", lambda self, *given: (time.sleep(0.001), place(self, *given))[1])
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda ids: greedy(backend, ids, max_new_tokens=6).sequences, texts)]
    np.testing.assert_array_equal(found, expected)


def test_sizes_outside_of_the_plan_are_refused_before_anything_runs(on_cpu: Any, padded_batch: Any) -> None:
    backend = on_cpu()
    ids = np.full((1, 17), 5)
    with pytest.raises(InputError, match="input_ids"):
        backend.encode(ids, np.ones_like(ids))
    state = backend.new_state(backend.encode(*padded_batch))
    with pytest.raises(InputError, match="input_ids"):
        backend.step(state, np.full((6, 1, 17), 5))
    assert (state.rows.lengths == 0).all()


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


# Plans


@pytest.fixture(scope="module")
def manifest(exported: Any) -> Manifest:
    return read_manifest(exported("deeper-decoder"))


def test_every_input_has_a_profile_in_which_axes_agree(manifest: Manifest) -> None:
    sizes = Sizes(B=Range(1, 2, 3), K=Range(1, 4, 5), S=Range(6, 7, 8), T=Range(1, 9, 10), P=Range(0, 11, 12))
    found = plan(manifest, sizes)
    for name, spec in (("encoder.onnx", encoder_spec(manifest.dims)), ("decoder.onnx", decoder_spec(manifest.dims))):
        graph = found.graphs[name]
        assert list(graph.profile) == [tensor.name for tensor in spec.inputs]
        for tensor in spec.inputs:
            for which, shape in zip(("least", "usual", "most"), graph.profile[tensor.name], strict=True):
                expected = [
                    axis if isinstance(axis, int) else getattr(getattr(sizes, axis), which) for axis in tensor.shape
                ]
                assert list(shape) == expected
        assert graph.dtypes == {tensor.name: tensor.dtype for tensor in (*spec.inputs, *spec.outputs)}
        for shapes in zip(*graph.profile.values(), strict=True):
            graph.check(dict(zip(graph.profile, shapes, strict=True)))


def test_half_precision_is_in_the_plan(exported: Any, tmp_path: Path) -> None:
    convert_export(exported("deeper-decoder"), tmp_path / "fp16", RECIPES["fp16"])
    decoder = plan(read_manifest(tmp_path / "fp16")).graphs["decoder.onnx"]
    assert {decoder.dtypes[name] for name in ("past_key_0", "cross_value_2", "present_key_1")} == {"float16"}
    assert decoder.dtypes["input_ids"] == "int64" and decoder.dtypes["logits"] == "float32"


def test_exports_for_other_runtimes_are_refused(exported: Any, exported_mini: Path, tmp_path: Path) -> None:
    for name in ("int8", "int4"):
        convert_export(exported_mini, tmp_path / name, RECIPES[name])
    optimize_export(exported("deeper-decoder"), tmp_path / "optimised")
    for name in ("int8", "int4", "optimised"):
        with pytest.raises(InputError, match=name):
            plan(read_manifest(tmp_path / name))


def test_invalid_sizes(manifest: Manifest) -> None:
    bounds = ((2, 1, 3), (1, 4, 3), (-1, 0, 1), (1, 2.0, 3), (True, 1, 1), ("1", 2, 3), (None, 1, 2))
    refused(lambda bounds: Range(*bounds), "bounds", *bounds, match="least|usual|most")
    for axis, wrong in (("P", Range(1, 2, 3)), ("B", Range(0, 1, 2)), ("T", (1, 2, 3)), ("S", None)):
        refused(Sizes, axis, wrong)
    refused(partial(plan, manifest), "sizes", {"B": 1})
    check = plan(manifest).graphs["encoder.onnx"].check
    for batch, length in ((9, 64), (1, 0)):
        refused(check, "shapes", {"input_ids": (batch, length), "attention_mask": (batch, length)}, match="input_ids")


def test_the_key_changes_with_all_that_an_engine_depends_on(manifest: Manifest) -> None:
    first = plan(manifest)
    same, another = dict(version="tensorrt 11.0", device="H200 (9, 0)"), "L4 (8, 9)"
    others = [
        first.key(**{**same, "version": "tensorrt 11.1"}), first.key(**{**same, "device": another}),
        plan(manifest, Sizes(S=Range(1, 64, 1024))).key(**same), replace(first, source="another").key(**same),
        plan(replace(manifest, files={**manifest.files, "decoder.onnx": {"sha256": "0" * 64}})).key(**same),
    ]  # fmt: skip
    assert len({first.key(**same), *others}) == 6 and plan(manifest).key(**same) == first.key(**same)
    assert re.fullmatch(r"[0-9a-f]{16}", others[0])


def test_without_tensorrt_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(module, "import_module", missing)
    with pytest.raises(MissingPackageError, match="tensorrt-cu13"):
        module.load_tensorrt()
