"""The two graphs as TensorRT engines, which read and write torch's tensors on the GPU, on torch's own stream."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from t5accel.backends.ort_cuda import OrtPointers
from t5accel.backends.ort_session import SessionSettings
from t5accel.checks import as_count
from t5accel.errors import ExportError, InputError, MissingPackageError
from t5accel.graphs.atomic_write import locked, staged
from t5accel.graphs.contract import DECODER, ENCODER, WEIGHTS, GraphSpec, as_folder
from t5accel.graphs.export_cache import ENGINES, cache_folder
from t5accel.graphs.manifest import Manifest, read_manifest
from t5accel.graphs.rewriting import check_external_data
from t5accel.models.families import GEMMAS
from t5accel.precision.recipes import recipe_from_json

Shape = tuple[int, ...]
MODULES = ("tensorrt", "tensorrt_rtx")  # 10 and 11, for the GPU that is there; and RTX, which also builds without one
WORKSPACE_BYTES = 1 << 30  # that a kernel may use for itself
# TensorRT's names of types, by the contract's.
TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int64": "INT64", "int32": "INT32", "bool": "BOOL"}

# An engine is built for a range of sizes of every input, and tuned for one of them (a *profile*). Sizes that belong
# together must agree: the axis S of one input is the S of all others. So a plan has a range for each axis, and the
# inputs' shapes follow from the export's contract.


@dataclass(frozen=True)
class Range:
    """The least and most size of an axis, and the one to tune for: 0 <= least <= usual <= most."""

    least: int
    usual: int
    most: int

    def __post_init__(self) -> None:
        least, usual, most = (as_count(getattr(self, size.name), size.name, at_least=0) for size in fields(self))
        if not least <= usual <= most:
            raise InputError(f"least, usual and most must rise, got {least}, {usual} and {most}.")


@dataclass(frozen=True)
class Sizes:
    """The range of every axis that varies, by the names of `graphs.contract`."""

    B: Range = Range(1, 1, 8)  # sources
    K: Range = Range(1, 1, 4)  # rows of each source: beams, samples
    S: Range = Range(1, 64, 512)  # source positions
    T: Range = Range(1, 1, 16)  # new positions of a step
    P: Range = Range(0, 32, 512)  # past positions

    def __post_init__(self) -> None:
        for field in fields(self):
            found = getattr(self, field.name)
            if not isinstance(found, Range):
                raise InputError(f"{field.name} must be a Range, got {found!r}.")
            if field.name == "P" and found.least:
                raise InputError(f"P must begin at 0, for the first step has no past, got {found.least}.")
            if field.name != "P" and not found.least:
                raise InputError(f"{field.name} must begin at 1 or more, got 0.")


@dataclass(frozen=True)
class GraphPlan:
    """The shapes and types that an engine of one graph is built for."""

    profile: Mapping[str, tuple[Shape, Shape, Shape]]  # by input, the least, usual and most shape
    dtypes: Mapping[str, str]  # by input and output

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raise ``InputError`` for inputs whose shapes the engine does not take.

        >>> one = GraphPlan({"input_ids": ((1, 1), (1, 64), (8, 512))}, {"input_ids": "int64"})
        >>> one.check({"input_ids": (9, 64)})
        Traceback (most recent call last):
        t5accel.errors.InputError: input_ids must be of shape (1, 1) to (8, 512), got (9, 64). Build an engine for ...
        """
        for name, (least, _, most) in self.profile.items():
            given = shapes[name]
            if any(not low <= size <= high for low, size, high in zip(least, given, most, strict=True)):
                raise InputError(
                    f"{name} must be of shape {least} to {most}, got {given}. Build an engine for other Sizes."
                )


@dataclass(frozen=True)
class Plan:
    """The plans of an export's graphs, by file name."""

    graphs: Mapping[str, GraphPlan]
    sizes: Sizes
    source: str  # the sha256 of every file that the engines are built from

    def key(self, *, version: str, device: str) -> str:
        """The cache key of the engines: 16 hexadecimal digits of everything that they depend on."""
        # An engine runs on the version and the GPU that it was built for.
        facts = {**asdict(self), "version": version, "device": device}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def plan(manifest: Manifest, sizes: Sizes | None = None) -> Plan:
    """The plan for an export's encoder and decoder, whose types are the engines' types.

    Raises ``InputError`` for an export in integers or one optimised for ONNX Runtime.

    >>> from tempfile import TemporaryDirectory
    >>> from t5accel.graphs.export import export_model
    >>> with TemporaryDirectory() as folder:
    ...     decoder = plan(export_model("mini", f"{folder}/mini")).graphs["decoder.onnx"]
    >>> decoder.profile["past_key_0"], decoder.dtypes["past_key_0"]
    (((1, 1, 8, 0, 32), (1, 1, 8, 32, 32), (8, 4, 8, 512, 32)), 'float32')
    """
    sizes = Sizes() if sizes is None else sizes
    if not isinstance(sizes, Sizes):
        raise InputError(f"sizes must be Sizes, got {sizes!r}.")
    recipe = manifest.recipe
    if recipe_from_json(recipe).integers:
        raise InputError(f"The export must be in fp32 or fp16, got {recipe['name']}.")
    manifest.require_whole_model("the export")
    if (kind := manifest.family.get("model_type")) in GEMMAS:
        raise InputError(f"The export must be of no {kind} for TensorRT, got one. Give accelerate() device='cpu'.")
    if manifest.optimized:
        raise InputError("The export must be portable, got one optimised for ONNX Runtime. Give the one it came from.")
    graphs = {name: _graph_plan(manifest.graphs[name], sizes) for name in (ENCODER, DECODER)}
    read = {name: entry["sha256"] for name, entry in manifest.files.items() if name in (ENCODER, DECODER, WEIGHTS)}
    return Plan(graphs, sizes, json.dumps(read, sort_keys=True))


def _graph_plan(spec: GraphSpec, sizes: Sizes) -> GraphPlan:
    def shapes(axes: tuple[Any, ...]) -> tuple[Shape, ...]:
        ranges = [getattr(sizes, axis) if isinstance(axis, str) else Range(axis, axis, axis) for axis in axes]
        return tuple(tuple(getattr(r, which) for r in ranges) for which in ("least", "usual", "most"))

    profile = {tensor.name: shapes(tensor.shape) for tensor in spec.inputs}
    return GraphPlan(profile, {tensor.name: tensor.dtype for tensor in (*spec.inputs, *spec.outputs)})


def load_tensorrt() -> ModuleType:
    """Import ``tensorrt`` or ``tensorrt_rtx``, the first that is installed; raises ``MissingPackageError``."""
    for name in MODULES:
        with suppress(ImportError):
            return import_module(name)
    raise MissingPackageError(
        "TensorRT is not installed: pip install tensorrt-cu13 on a machine with an NVIDIA GPU, or tensorrt-rtx-cu13, "
        "which also builds engines without one."
    )


def build_engine(graph: str | os.PathLike[str], graph_plan: GraphPlan, *, trt: ModuleType) -> bytes:
    """Build the serialized engine of an ONNX file, whose weights lie beside it.

    Raises ``ExportError``, with TensorRT's own message, for a graph that it cannot parse or build, or whose types are
    not the plan's, and ``InputError`` for a profile that does not fit the graph.
    """
    check_external_data(graph)
    log = _log(trt)
    builder = trt.Builder(log)
    # Strongly typed: the graph's types and no others. Since TensorRT 11, and in TensorRT-RTX, there is no other kind.
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if flag is None else 1 << int(flag))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(os.fspath(graph)):
        errors = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
        raise ExportError(f"TensorRT cannot parse {graph}: {errors or log.last}")
    tensors = [network.get_input(i) for i in range(network.num_inputs)]
    if missing := sorted({*graph_plan.profile} ^ {tensor.name for tensor in tensors}):
        raise InputError(f"Only one of graph and profile has the inputs {', '.join(missing)}. Give plan()'s.")
    tensors += [network.get_output(i) for i in range(network.num_outputs)]
    if missing := sorted({*graph_plan.dtypes} - {tensor.name for tensor in tensors}):  # nothing would write these
        raise ExportError(f"The graph must have {', '.join(missing)} by the plan. Give the plan of this export.")
    for tensor in tensors:
        dtype = graph_plan.dtypes.get(tensor.name)
        if tensor.dtype != getattr(trt.DataType, TYPES.get(dtype, ""), None):
            raise ExportError(f"{tensor.name} must be {dtype} by the plan, got {tensor.dtype} in TensorRT.")
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, WORKSPACE_BYTES)
    config.clear_flag(trt.BuilderFlag.TF32)  # on by default: products of fp32 with factors of 10 bits
    profile = builder.create_optimization_profile()
    for name, shapes in graph_plan.profile.items():
        profile.set_shape(name, *shapes)
    if not profile or config.add_optimization_profile(profile) < 0:  # an unordered profile fails only here
        raise InputError(f"TensorRT refuses the profile of {graph}: {log.last}")
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise ExportError(f"TensorRT cannot build {graph} for this profile: {log.last}")
    return bytes(engine)


def cached_engines(
    folder: str | os.PathLike[str], plan: Plan, *, trt: ModuleType, device: str | None = None
) -> dict[str, Path]:
    """The engine files of an export's graphs, by graph, built by the first call and kept in the user's cache folder.

    ``device`` is what they are built for, by default the GPU that torch sees.
    """
    if device is None:
        has_gpu = torch.cuda.is_available()
        device = f"{torch.cuda.get_device_name()} {torch.cuda.get_device_capability()}" if has_gpu else "no GPU"
    key = plan.key(version=f"{trt.__name__} {trt.__version__}", device=device)
    kept = cache_folder() / f"{ENGINES}{key}"
    names = {graph: Path(graph).with_suffix(".engine").name for graph in plan.graphs}
    with locked(kept):
        if not all((kept / name).is_file() for name in names.values()):
            with staged(kept) as there:
                for graph, graph_plan in plan.graphs.items():
                    (there / names[graph]).write_bytes(build_engine(as_folder(folder) / graph, graph_plan, trt=trt))
    return {graph: kept / name for graph, name in names.items()}


def _log(trt: ModuleType) -> Any:
    """A logger that keeps the ``last`` error in place of printing."""

    class Log(trt.ILogger):
        last = "it did not say why"

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                self.last = message

    return Log()


class Engine:
    """A loaded engine; raises ``ExportError`` where this TensorRT or this GPU cannot load it."""

    def __init__(self, trt: ModuleType, path: Path, graph_plan: GraphPlan):
        self.plan, self.log = graph_plan, _log(trt)
        self._runtime = trt.Runtime(self.log)  # must outlive the engine
        self.engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self.engine is None:
            raise ExportError(f"{path} cannot be loaded here: {self.log.last}. Delete it, and it is built again.")
        self.context, self.lock = self.engine.create_execution_context(), threading.Lock()

    def io_binding(self) -> None:
        """Return nothing: `OrtPointers` then hands over all tensors at every run."""

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor], stream: int) -> None:
        """Queue a run on a stream of the device, under the ``lock``; keep the tensors until it has ended."""
        self.plan.check({name: tuple(tensor.shape) for name, tensor in inputs.items()})
        for name, tensor in inputs.items():
            self.context.set_input_shape(name, tuple(tensor.shape))
        if unknown := self.context.infer_shapes():
            raise ExportError(f"TensorRT does not know the shapes of {', '.join(unknown)}: {self.log.last}")
        for name, tensor in (*inputs.items(), *outputs.items()):
            # An empty tensor has address 0, which TensorRT refuses although it reads nothing there.
            place = tensor if tensor.numel() else tensor.new_empty(1)
            self.context.set_tensor_address(name, place.data_ptr())
        if not self.context.execute_async_v3(stream):
            raise ExportError(f"TensorRT could not run: {self.log.last}")


class TensorRT(OrtPointers):
    """A `Backend` on TensorRT over an export in fp32 or fp16, whose engines are built on first use and kept.

    ``sizes`` are the ranges to build for; others raise ``InputError``. ``device="cpu"`` is for tests with another
    module as ``trt``. Raises ``MissingPackageError`` without TensorRT or a GPU.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        sizes: Sizes | None = None,
        trt: ModuleType | None = None,
        verify: bool = True,
        max_source_tokens: int | None = None,
        device: str = "cuda",
    ):
        if device == "cuda" and not torch.cuda.is_available():
            raise MissingPackageError("TensorRT runs its engines on an NVIDIA GPU, and this torch sees none.")
        self.trt = load_tensorrt() if trt is None else trt
        self.plan = plan(read_manifest(folder, verify=False), sizes)
        settings = SessionSettings(device=device)
        super().__init__(folder, settings=settings, verify=verify, max_source_tokens=max_source_tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        raise InputError("TensorRT engines cannot be pickled or copied. Open the model where it is needed.")

    def _open(self, graph: str) -> Engine:
        engines = cached_engines(self.folder, self.plan, trt=self.trt)
        return Engine(self.trt, engines[graph], self.plan.graphs[graph])

    def _run(
        self, session: Engine, binding: None, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
    ) -> None:
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        with session.lock:  # the context has one set of shapes and addresses
            session.run(inputs, outputs, stream)
