"""What is measured on a GPU: transformers, our ways on torch; ONNX Runtime and TensorRT where they are installed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from t5accel.backends.ort import OrtNumpy
from t5accel.backends.ort_captured import OrtCaptured
from t5accel.backends.ort_pointers import OrtPointers
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.torch_recompute import TorchRecompute
from t5accel.backends.torch_static import TorchStatic
from t5accel.checkpoints import in_floats, load_t5
from t5accel.decoding.beam import beam_search
from t5accel.decoding.greedy import greedy
from t5accel.graphs.tensorrt_plan import Range, Sizes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from t5accel.decoding.backend import Backend

# (input_ids (B, S), attention_mask (B, S), new tokens, beams) -> exactly so many new tokens (B, L), int64 numpy
Generate = Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]


@dataclass
class Subject:
    """A model in the floats and on the device that it is measured in; its export is written when it is asked for.

    Attributes:
        name: as `checkpoints.load_t5` knows it.
        floats: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        device: ``"cuda"``, or ``"cpu"`` for tests.
        scratch: a folder for exports.
    """

    name: str
    floats: str
    device: str
    scratch: Path

    @cached_property
    def model(self) -> PreTrainedModel:
        return in_floats(load_t5(self.name)[0], self.floats, self.device)

    @cached_property
    def export(self) -> Path:
        """The folder of the ONNX export in these floats, of which there is none in bf16."""
        from t5accel.graphs.convert import convert_export  # which needs onnx
        from t5accel.graphs.export import export_t5

        name = self.name.replace(":", "-").replace(os.sep, "-")
        whole, half = self.scratch / f"{name}-fp32", self.scratch / f"{name}-fp16"
        export_t5(self.name, whole, external_threshold_bytes=0)
        if self.floats == "float32":
            return whole
        convert_export(whole, half, "fp16")
        return half


@dataclass(frozen=True)
class System:
    """A way of generating.

    Attributes:
        name: what a reader calls it.
        build: returns the function that is timed; raises where something is missing.
        backend: whose logits are compared with transformers', for ours.
        floats: that it takes.
    """

    name: str
    build: Callable[[Subject], Generate]
    backend: Callable[[Subject], Backend] | None = None
    floats: tuple[str, ...] = ("float32", "bfloat16", "float16")


def _transformers(use_cache: bool) -> Callable[[Subject], Generate]:
    def build(subject: Subject) -> Generate:
        model = subject.model

        def generate(ids: np.ndarray, mask: np.ndarray, new_tokens: int, beams: int) -> np.ndarray:
            out = model.generate(
                input_ids=torch.as_tensor(ids, device=model.device), num_beams=beams, do_sample=False,
                attention_mask=torch.as_tensor(mask, device=model.device), use_cache=use_cache,
                min_new_tokens=new_tokens, max_new_tokens=new_tokens,
            )  # fmt: skip
            return out[:, 1:].cpu().numpy()

        return generate

    return build


def _ours(name: str, backend: Callable[[Subject], Backend], **more: Any) -> System:
    def build(subject: Subject) -> Generate:
        running = backend(subject)

        def generate(ids: np.ndarray, mask: np.ndarray, new_tokens: int, beams: int) -> np.ndarray:
            length = dict(min_new_tokens=new_tokens, max_new_tokens=new_tokens)
            if beams == 1:
                return greedy(running, ids, mask, **length).sequences
            return beam_search(running, ids, mask, num_beams=beams, **length).sequences

        return generate

    return System(name, build, backend, **more)


def _static(**options: Any) -> Callable[[Subject], Backend]:
    return lambda subject: TorchStatic(subject.model, **options)


def _recompute(subject: Subject) -> Generate:
    running = TorchRecompute(subject.model)
    return lambda ids, mask, new_tokens, beams: running.generate(ids, mask, new_tokens=new_tokens)


def _onnx(kind: type[OrtNumpy]) -> Callable[[Subject], Backend]:
    return lambda subject: kind(subject.export, settings=SessionSettings(device=subject.device))


def _tensorrt(subject: Subject) -> Backend:
    from t5accel.backends.tensorrt import TensorRT  # which needs onnx, too

    sizes = Sizes(B=Range(1, 1, 4), K=Range(1, 1, 1), S=Range(1, 64, 64), T=Range(1, 1, 8), P=Range(0, 64, 160))
    return TensorRT(subject.export, sizes=sizes)


IN_ONNX = ("float32", "float16")
REFERENCE, NAIVE = "transformers, cache", "transformers, no cache"
STATIC, GRAPH, RECOMPUTE = "static cache", "static cache, CUDA graph", "no cache, CUDA graph"
COMPILED = "static cache, torch.compile, CUDA graph"
FED, BOUND, CAPTURED = "ONNX Runtime, numpy feeds", "ONNX Runtime, bound", "ONNX Runtime, CUDA graph"
TENSORRT = "TensorRT"

SYSTEMS = {
    system.name: system
    for system in (
        System(REFERENCE, _transformers(use_cache=True)),
        System(NAIVE, _transformers(use_cache=False)),
        _ours(STATIC, _static(graphs=False)),
        _ours(GRAPH, _static()),
        System(RECOMPUTE, _recompute, _static(graphs=False)),  # the same decoder
        _ours(COMPILED, _static(compile=True)),
        _ours(FED, _onnx(OrtNumpy), floats=IN_ONNX),
        _ours(BOUND, _onnx(OrtPointers), floats=IN_ONNX),
        _ours(CAPTURED, _onnx(OrtCaptured), floats=IN_ONNX),
        _ours(TENSORRT, _tensorrt, floats=IN_ONNX),
    )
}
