"""What is measured on a GPU: transformers, our ways on torch; ONNX Runtime and TensorRT where they are installed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bench.baselines.ort_cuda_graph import OrtCaptured
from bench.baselines.torch_recompute import TorchRecompute
from t5accel.backends.ort_cuda import OrtPointers
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.torch_eager import TorchEager
from t5accel.backends.torch_static import TorchStatic
from t5accel.decoding.beam import beam_search
from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.sampling import SamplingParams, sample
from t5accel.models.load import cast_model, load_model
from t5accel.serve.limits import SchedulerLimits
from t5accel.serve.request import GenerationRequest
from t5accel.serve.scheduler import Scheduler

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from t5accel.decoding.backend import Backend

SMALL = "random:t5-small"
SAMPLING = SamplingParams(temperature=0.8, top_k=50, top_p=0.95)  # of what is timed
# (input_ids (B, S), attention_mask (B, S), new tokens, beams) -> exactly so many new tokens (B, L), int64 numpy
Generate = Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]


@dataclass
class ModelOnDevice:
    """A model of one dtype on one device, and what was built on it: built once, for compilers and captures take long.

    Attributes:
        name: as `models.load.load_model` knows it.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        device: ``"cuda"``, or ``"cpu"`` for tests.
        scratch: a folder for exports.
        first_s: how long the first generation of a system took, with all that was built or compiled for it.
    """

    name: str
    dtype: str
    device: str
    scratch: Path
    first_s: dict[str, float] = field(default_factory=dict)
    _built: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def model(self) -> PreTrainedModel:
        """Random weights are drawn on the device, which takes no time, save those of `SMALL`, whose export has them."""
        if self.name == SMALL or not self.name.startswith("random:"):
            return cast_model(load_model(self.name)[0], self.dtype, self.device)
        if self.device == "cuda":
            torch.cuda.manual_seed(0)
        with torch.device(self.device):
            model = load_model(self.name)[0]
        return cast_model(model, self.dtype, self.device)

    @cached_property
    def export(self) -> Path:
        """The folder of the ONNX export in this dtype, of which there is none in bf16."""
        from t5accel.graphs.export import export_model
        from t5accel.precision.convert import convert_export  # which needs onnx

        name = self.name.replace(":", "-").replace(os.sep, "-")
        whole, half = self.scratch / f"{name}-fp32", self.scratch / f"{name}-fp16"
        export_model(self.name, whole, external_threshold_bytes=0)
        if self.dtype == "float32":
            return whole
        convert_export(whole, half, "fp16")
        return half

    def backend(self, name: str) -> Backend:
        """The backend of one of `SYSTEMS`, whose logits can be looked at."""
        return self.once(name, SYSTEMS[name].backend)

    def once(self, name: str, build: Callable[[ModelOnDevice], Any]) -> Any:
        """What was built under this name, or is built now."""
        if name not in self._built:
            self._built[name] = build(self)
        return self._built[name]

    def forget(self, name: str) -> None:
        """Let go of a backend and the memory that it keeps for shapes of before."""
        self._built.pop(name, None)

    def generate(self, name: str, *arguments: Any) -> np.ndarray:
        """What a system generates; arguments and result are those of `Generate`."""
        begun = perf_counter()
        found = SYSTEMS[name].build(self)(*arguments)
        self.first_s.setdefault(name, perf_counter() - begun)
        return found


@dataclass(frozen=True)
class System:
    """A way of generating.

    Attributes:
        name: what a reader calls it.
        build: returns the function that is timed; raises where something is missing.
        backend: whose logits are compared with transformers', for ours.
        dtypes: that it takes.
    """

    name: str
    build: Callable[[ModelOnDevice], Generate]
    backend: Callable[[ModelOnDevice], Backend] | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")


def _transformers(use_cache: bool) -> Callable[[ModelOnDevice], Generate]:
    def build(subject: ModelOnDevice) -> Generate:
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


def _ours(name: str, backend: Callable[[ModelOnDevice], Backend], **more: Any) -> System:
    def build(subject: ModelOnDevice) -> Generate:
        running = subject.backend(name)

        def generate(ids: np.ndarray, mask: np.ndarray, new_tokens: int, beams: int) -> np.ndarray:
            length = dict(min_new_tokens=new_tokens, max_new_tokens=new_tokens)
            if beams == 1:
                return greedy(running, ids, mask, **length).sequences
            return beam_search(running, ids, mask, num_beams=beams, **length).sequences

        return generate

    return System(name, build, backend, **more)


def _static(**options: Any) -> Callable[[ModelOnDevice], Backend]:
    return lambda subject: TorchStatic(subject.model, **options)


def _triton(subject: ModelOnDevice) -> Backend:
    from bench.baselines.triton_attention import TorchTriton  # which needs Triton

    return TorchTriton(subject.model)


def _recompute(subject: ModelOnDevice) -> Generate:
    running = subject.once(f"{RECOMPUTE}, all of it", lambda subject: TorchRecompute(subject.model))
    return lambda ids, mask, new_tokens, beams: running.generate(ids, mask, new_tokens=new_tokens)


def _onnx(kind: type[OrtNumpy]) -> Callable[[ModelOnDevice], Backend]:
    return lambda subject: kind(subject.export, settings=SessionSettings(device=subject.device))


def _eager(subject: ModelOnDevice) -> Backend:
    return TorchEager(subject.model)


def _their_draws(subject: ModelOnDevice) -> Generate:
    model = subject.model

    def generate(ids: np.ndarray, mask: np.ndarray, new_tokens: int, beams: int) -> np.ndarray:
        out = model.generate(
            input_ids=torch.as_tensor(ids, device=model.device), do_sample=True, temperature=SAMPLING.temperature,
            attention_mask=torch.as_tensor(mask, device=model.device), top_k=SAMPLING.top_k, top_p=SAMPLING.top_p,
            min_new_tokens=new_tokens, max_new_tokens=new_tokens,
        )  # fmt: skip
        return out[:, 1:].cpu().numpy()

    return generate


def _drawn(subject: ModelOnDevice) -> Generate:
    running = subject.backend(GRAPH)

    def generate(ids: np.ndarray, mask: np.ndarray, new_tokens: int, beams: int) -> np.ndarray:
        length = dict(min_new_tokens=new_tokens, max_new_tokens=new_tokens)
        return sample(running, ids, mask, sampling=SAMPLING, **length).sequences

    return generate


def scheduler(subject: ModelOnDevice, rows: int) -> Scheduler:
    """One with so many rows, and a backend of its own for them; nothing is encoded once for two rounds."""
    limits = SchedulerLimits(rows=rows, queue=4096, encoder_cache_bytes=0)
    return Scheduler(subject.once(f"{FLIGHT}, {rows} rows", _static()), limits)


def jobs(ids: np.ndarray, mask: np.ndarray, lengths: np.ndarray) -> list[GenerationRequest]:
    """A request for each text (B, S), for exactly so many (B,) new tokens."""
    return [GenerationRequest(text[seen > 0], min_new_tokens=int(length), max_new_tokens=int(length))
            for text, seen, length in zip(ids, mask, lengths, strict=True)]  # fmt: skip


def _in_flight(subject: ModelOnDevice) -> Generate:
    """Half as many rows as texts, so that requests wait, leave and join."""

    def generate(ids: np.ndarray, mask: np.ndarray, new_tokens: int, beams: int) -> np.ndarray:
        with scheduler(subject, max(1, len(ids) // 2)) as serving:
            tickets = serving.submit_all(jobs(ids, mask, np.full(len(ids), new_tokens)))
            return np.array([ticket.result(timeout_s=60)[0].tokens for ticket in tickets])

    return generate


def _their_batches(subject: ModelOnDevice) -> Generate:
    return SYSTEMS[REFERENCE].build(subject)


def _our_batches(subject: ModelOnDevice) -> Generate:
    return SYSTEMS[GRAPH].build(subject)


def _tensorrt(subject: ModelOnDevice) -> Backend:
    from t5accel.backends.tensorrt import (  # it imports torch, which other systems do without
        Range,
        Sizes,
        TensorRT,  # which needs onnx, too
    )

    sizes = Sizes(B=Range(1, 1, 4), K=Range(1, 1, 1), S=Range(1, 64, 64), T=Range(1, 1, 8), P=Range(0, 64, 160))
    return TensorRT(subject.export, sizes=sizes)


IN_ONNX = ("float32", "float16")
REFERENCE, NAIVE = "transformers, cache", "transformers, no cache"
STATIC, GRAPH, RECOMPUTE = "static cache", "static cache, CUDA graph", "no cache, CUDA graph"
COMPILED = "static cache, torch.compile, CUDA graph"
KERNEL = "static cache, own attention kernel, CUDA graph"
FED, BOUND, CAPTURED = "ONNX Runtime, numpy feeds", "ONNX Runtime, bound", "ONNX Runtime, CUDA graph"
TENSORRT = "TensorRT"
EAGER = "torch, growing cache"
THEIR_DRAWS, DRAWN = "transformers, sampling", "static cache, CUDA graph, sampling"
THEIR_BATCHES, BATCHES, FLIGHT = "transformers, batches", "static cache, CUDA graph, batches", "requests in flight"
THEIRS = (REFERENCE, NAIVE, THEIR_DRAWS, THEIR_BATCHES)  # with which ours are compared

SYSTEMS = {
    system.name: system
    for system in (
        System(REFERENCE, _transformers(use_cache=True)),
        System(NAIVE, _transformers(use_cache=False)),
        _ours(STATIC, _static(graphs=False)),
        _ours(GRAPH, _static()),
        System(RECOMPUTE, _recompute, _static(graphs=False)),  # the same decoder
        _ours(EAGER, _eager),
        System(THEIR_DRAWS, _their_draws),
        System(DRAWN, _drawn, _static(graphs=False)),
        System(THEIR_BATCHES, _their_batches),
        System(BATCHES, _our_batches, _static()),
        System(FLIGHT, _in_flight, _static(graphs=False)),
        _ours(COMPILED, _static(compile=True)),
        _ours(KERNEL, _triton),
        _ours(FED, _onnx(OrtNumpy), dtypes=IN_ONNX),
        _ours(BOUND, _onnx(OrtPointers), dtypes=IN_ONNX),
        _ours(CAPTURED, _onnx(OrtCaptured), dtypes=IN_ONNX),
        _ours(TENSORRT, _tensorrt, dtypes=IN_ONNX),
    )
}
