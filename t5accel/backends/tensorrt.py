"""The two graphs as TensorRT engines, which read and write torch's tensors on the GPU, on torch's own stream."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from t5accel.backends.ort_cuda import OrtPointers
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.tensorrt_engines import TYPES, cached_engines, load_tensorrt, log_of
from t5accel.backends.tensorrt_plan import GraphPlan, Sizes, plan
from t5accel.errors import ExportError, InputError, MissingPackageError
from t5accel.graphs.manifest import read_manifest


class Engine:
    """An engine and its context: shapes and addresses are set anew for every run.

    Args:
        trt: the module that built it.
        path: of the serialized engine.
        graph_plan: what it was built for; other shapes are refused with its words, before TensorRT is asked.

    Raises:
        ExportError: this TensorRT or this GPU cannot load it, or its tensors have other types than planned.
    """

    def __init__(self, trt: ModuleType, path: Path, graph_plan: GraphPlan):
        self.plan, self.log = graph_plan, log_of(trt)
        self._runtime = trt.Runtime(self.log)  # has to outlive the engine
        self.engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self.engine is None:
            raise ExportError(f"{path} cannot be loaded here: {self.log.last}. Delete it, and it is built again.")
        for name, dtype in graph_plan.dtypes.items():
            found = str(self.engine.get_tensor_dtype(name)).split(".")[-1]
            if found != TYPES[dtype]:
                raise ExportError(f"{name} is {found} in {path}; {dtype} was asked for.")
        self.context = self.engine.create_execution_context()

    def io_binding(self) -> None:
        """There is none: `OrtPointers` then hands over everything at every run."""

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor], stream: int) -> None:
        """Queue a run on a stream of the device. The tensors have to stay until it is over.

        Raises:
            InputError: a shape is outside of the plan.
            ExportError: TensorRT refuses to run.
        """
        self.plan.check({name: tuple(tensor.shape) for name, tensor in inputs.items()})
        for name, tensor in inputs.items():
            self.context.set_input_shape(name, tuple(tensor.shape))
        if unknown := self.context.infer_shapes():
            raise ExportError(f"TensorRT does not know the shapes of {', '.join(unknown)}: {self.log.last}")
        for name, tensor in (*inputs.items(), *outputs.items()):
            # An empty tensor has no address, and TensorRT wants one that is not 0; it reads nothing there.
            place = tensor if tensor.numel() else tensor.new_empty(1)
            self.context.set_tensor_address(name, place.data_ptr())
        if not self.context.execute_async_v3(stream):
            raise ExportError(f"TensorRT could not run: {self.log.last}")


class TensorRT(OrtPointers):
    """A `Backend` on TensorRT, over an export in fp32 or fp16; its engines are built at the first use and kept.

    Args:
        folder: an export in the two-graph layout.
        sizes: the ranges that engines are built for; by default `tensorrt_plan.Sizes()`. Other sizes are refused.
        trt: ``tensorrt`` or ``tensorrt_rtx``; by default the one that is installed.
        verify, max_source_tokens: as of `OrtNumpy`.
        device: ``"cuda"``; the CPU is for tests with another module in TensorRT's place.

    Raises:
        MissingPackageError: TensorRT is not installed, or there is no GPU.
        ExportError, InputError: as `tensorrt_engines.build_engine`, and as `OrtNumpy`.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, sizes: Sizes | None = None, trt: ModuleType | None = None,
        verify: bool = True, max_source_tokens: int | None = None, device: str = "cuda",
    ):  # fmt: skip
        if device == "cuda" and not torch.cuda.is_available():
            raise MissingPackageError("TensorRT runs its engines on an NVIDIA GPU, and this torch sees none.")
        self.trt = load_tensorrt() if trt is None else trt
        self.plan = plan(read_manifest(folder, verify=False), sizes)
        settings = SessionSettings(device=device)
        super().__init__(folder, settings=settings, verify=verify, max_source_tokens=max_source_tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        raise InputError("Engines of TensorRT are of this process: open the model where it is needed.")

    def _open(self, graph: str) -> Engine:
        engines = cached_engines(self.folder, self.plan, trt=self.trt)
        return Engine(self.trt, engines[graph], self.plan.graphs[graph])

    def _run(
        self, session: Engine, binding: None, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
    ) -> None:
        for name, tensor in (*inputs.items(), *outputs.items()):
            if not tensor.is_contiguous():
                raise InputError(f"{name} has strides {tensor.stride()}: give tensor.contiguous().")
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        session.run(inputs, outputs, stream)
