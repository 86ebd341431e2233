"""The two graphs as TensorRT engines, which read and write torch's tensors on the GPU, on torch's own stream."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
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
from t5accel.precision.recipes import recipe_from_json

# For which sizes and in which numbers TensorRT shall build an export's two graphs: a plan, in plain Python.
# An engine is built for a range of sizes of every input that varies, and it is tuned for one of them (a *profile*).
# It runs any size in the range and no other. Sizes that belong together have to agree: the axis that is called S in
# one input is the S of all others. So a plan says a range for each axis once, and the inputs' shapes follow from the
# export's contract. Nothing here needs TensorRT.


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Range:
    """From which size to which, and the one that is tuned for.

    Raises ``InputError`` unless 0 <= least <= usual <= most, all integers.

    >>> Range(1, 64, 512).holds(100), Range(1, 64, 512).holds(0)
    (True, False)
    """

    least: int
    usual: int
    most: int

    def __post_init__(self) -> None:
        least, usual, most = (as_count(getattr(self, size.name), size.name, at_least=0) for size in fields(self))
        if not least <= usual <= most:
            raise InputError(f"least is {least}, usual {usual} and most {most}: give them in rising order.")

    def holds(self, size: int) -> bool:
        """Whether an engine that was built for this range takes it."""
        return self.least <= size <= self.most


@dataclass(frozen=True)
class Sizes:
    """The range of every axis that varies, by the names of `graphs.contract`.

    Attributes:
        B: sources at once.
        K: rows for each of them: beams, samples, drafts.
        S: source positions.
        T: new positions of a step.
        P: past positions; from 0, for the first step has none.

    Raises ``InputError`` for a range that leaves out 0 past positions, or in which B, K, S or T may be 0.
    """

    B: Range = Range(1, 1, 8)
    K: Range = Range(1, 1, 4)
    S: Range = Range(1, 64, 512)
    T: Range = Range(1, 1, 16)
    P: Range = Range(0, 32, 512)

    def __post_init__(self) -> None:
        for field in fields(self):
            found = getattr(self, field.name)
            if not isinstance(found, Range):
                raise InputError(f"{field.name} is {found!r}; give a Range.")
            if field.name == "P" and found.least:
                raise InputError(f"P begins at {found.least}; the first step has no past: let it begin at 0.")
            if field.name != "P" and not found.least:
                raise InputError(f"{field.name} begins at 0; give at least 1.")


@dataclass(frozen=True)
class GraphPlan:
    """What an engine of one graph is built for.

    Attributes:
        profile: for each input the shapes (least, usual, most); fixed axes are the same in all three.
        dtypes: of every input and output; a strongly typed engine has those of its graph and no others.
    """

    profile: Mapping[str, tuple[Shape, Shape, Shape]]
    dtypes: Mapping[str, str]

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raise ``InputError`` for shapes that the engine does not take; the message names the input and its range.

        >>> one = GraphPlan({"input_ids": ((1, 1), (1, 64), (8, 512))}, {"input_ids": "int64"})
        >>> one.check({"input_ids": (9, 64)})
        Traceback (most recent call last):
        t5accel.errors.InputError: input_ids is of shape (9, 64); this engine takes (1, 1) to (8, 512). Build ...
        """
        if missing := sorted(self.profile.keys() - shapes.keys()):
            raise InputError(f"There is no shape for {missing[0]}; the engine reads {', '.join(self.profile)}.")
        for name, (least, _, most) in self.profile.items():
            given = tuple(shapes[name])
            inside = len(given) == len(least) and all(
                low <= size <= high for low, size, high in zip(least, given, most, strict=True)
            )
            if not inside:
                raise InputError(
                    f"{name} is of shape {given}; this engine takes {least} to {most}. Build one for other Sizes."
                )


@dataclass(frozen=True)
class Plan:
    """What the engines of an export are built for.

    Attributes:
        graphs: by file name.
        sizes: that the profiles were made of.
        source: the sha256 of every file that an engine is built from.
    """

    graphs: Mapping[str, GraphPlan]
    sizes: Sizes
    source: str

    def key(self, *, version: str, device: str) -> str:
        """What an engine is kept under: 16 hexadecimal digits of all that it depends on.

        Args:
            version: of TensorRT, as ``"tensorrt 11.0.0"``.
            device: the GPU, by name and compute capability, or what the engine is built for without one.
        """
        facts = {**asdict(self), "version": version, "device": device}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def plan(manifest: Manifest, sizes: Sizes | None = None) -> Plan:
    """The plan for an export's encoder and decoder.

    Args:
        manifest: of an export in floats; engines take their numbers from the graphs.
        sizes: ranges; by default `Sizes()`.

    Raises:
        InputError: the export's weights are integers, or its graphs were optimised for ONNX Runtime.

    >>> from tempfile import TemporaryDirectory
    >>> from t5accel.graphs.export import export_model
    >>> with TemporaryDirectory() as folder:
    ...     decoder = plan(export_model("mini", f"{folder}/mini")).graphs["decoder.onnx"]
    >>> decoder.profile["past_key_0"], decoder.dtypes["past_key_0"]
    (((1, 1, 8, 0, 32), (1, 1, 8, 32, 32), (8, 4, 8, 512, 32)), 'float32')
    """
    sizes = Sizes() if sizes is None else sizes
    if not isinstance(sizes, Sizes):
        raise InputError(f"sizes is {sizes!r}; give tensorrt_plan.Sizes.")
    recipe = manifest.recipe
    if recipe_from_json(recipe).integers:
        raise InputError(f"This export is in {recipe['name']}: give one whose weights are floats, in fp32 or fp16.")
    if manifest.optimized:
        raise InputError("This export was optimised for ONNX Runtime: give the one that it was made from.")
    graphs = {name: _graph_plan(manifest.graphs[name], sizes) for name in (ENCODER, DECODER)}
    read = {name: entry["sha256"] for name, entry in manifest.files.items() if name in (ENCODER, DECODER, WEIGHTS)}
    return Plan(graphs, sizes, json.dumps(read, sort_keys=True))


def _graph_plan(spec: GraphSpec, sizes: Sizes) -> GraphPlan:
    def at(shape: tuple[Any, ...], which: str) -> Shape:
        return tuple(getattr(getattr(sizes, axis), which) if isinstance(axis, str) else axis for axis in shape)

    profile = {
        tensor.name: (at(tensor.shape, "least"), at(tensor.shape, "usual"), at(tensor.shape, "most"))
        for tensor in spec.inputs
    }
    return GraphPlan(profile, {tensor.name: tensor.dtype for tensor in (*spec.inputs, *spec.outputs)})


# TensorRT engines of an export's two graphs: built for a plan, checked, and kept.
# `tensorrt` (10 and 11) builds for the GPU that is there; `tensorrt_rtx` also on a machine without one. An engine
# runs on the version and GPU that it was built for, so both are in the name that it is kept under. Engines are
# strongly typed: their numbers are those of the graph, and TensorRT chooses none by itself.


MODULES = ("tensorrt", "tensorrt_rtx")
WORKSPACE_BYTES = 1 << 30  # that a kernel may use for itself
# TensorRT's names of types, by those of the contract.
TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int64": "INT64", "int32": "INT32", "bool": "BOOL"}


def load_tensorrt(name: str | None = None) -> ModuleType:
    """The module ``tensorrt`` or ``tensorrt_rtx``: the one that is named, or the first that is installed.

    Raises:
        MissingPackageError: TensorRT is not installed.
        InputError: it is called otherwise.

    >>> load_tensorrt("onnxruntime")
    Traceback (most recent call last):
    t5accel.errors.InputError: name is 'onnxruntime'; give one of tensorrt, tensorrt_rtx, or None.
    """
    if name is not None and name not in MODULES:
        raise InputError(f"name is {name!r}; give one of {', '.join(MODULES)}, or None.")
    for candidate in MODULES if name is None else (name,):
        try:
            return import_module(candidate)
        except ImportError:
            continue
    raise MissingPackageError(
        f"{name or 'TensorRT'} is not installed: pip install tensorrt-cu13 on a machine with an NVIDIA GPU, or "
        "tensorrt-rtx-cu13, which also builds engines without one."
    )


def build_engine(graph: str | os.PathLike[str], graph_plan: GraphPlan, *, trt: ModuleType | None = None) -> bytes:
    """A graph as a serialized engine.

    Args:
        graph: the ONNX file, its weights beside it.
        graph_plan: the sizes that it is built for, and the types that it has to have.
        trt: by default `load_tensorrt`'s.

    Raises:
        ExportError: TensorRT cannot parse or build it, or has other inputs, outputs or types than the plan; the message
            has TensorRT's own words. Or the graph's weights are not in a file beside it.
        InputError: the profile does not fit the graph.
        MissingPackageError: TensorRT is not installed.
    """
    trt = load_tensorrt() if trt is None else trt
    check_external_data(graph)
    log = log_of(trt)
    builder = trt.Builder(log)
    network = builder.create_network(_strongly_typed(trt))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(os.fspath(graph)):
        errors = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
        raise ExportError(f"TensorRT cannot parse {graph}: {errors or log.last}")
    _require_types(trt, network, graph_plan)
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, WORKSPACE_BYTES)
    config.clear_flag(trt.BuilderFlag.TF32)  # on by default: products of fp32 with factors of 10 bits
    profile = builder.create_optimization_profile()
    for name, shapes in graph_plan.profile.items():
        profile.set_shape(name, *shapes)
    if not profile or config.add_optimization_profile(profile) < 0:  # which an unordered profile does not say by itself
        raise InputError(f"TensorRT refuses the profile of {graph}: {log.last}")
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise ExportError(f"TensorRT cannot build {graph} for this profile: {log.last}")
    return bytes(engine)


def cached_engines(
    folder: str | os.PathLike[str], plan: Plan, *, trt: ModuleType | None = None, device: str | None = None
) -> dict[str, Path]:
    """The engines of an export's graphs, built at the first call and kept in the user's cache folder.

    Args:
        folder: the export.
        plan: as `tensorrt_plan.plan` made it for this export.
        trt: by default `load_tensorrt`'s.
        device: what they are built for; by default the GPU that torch sees.

    Returns:
        By the graphs' file names the engines' files.

    Raises:
        ExportError: as `build_engine`; or the cache cannot be written.
        InputError, MissingPackageError: as `build_engine`.
    """
    trt = load_tensorrt() if trt is None else trt
    key = plan.key(version=f"{trt.__name__} {trt.__version__}", device=_device() if device is None else device)
    kept = cache_folder() / f"{ENGINES}{key}"
    names = {graph: Path(graph).with_suffix(".engine").name for graph in plan.graphs}
    with locked(kept):
        if not all((kept / name).is_file() for name in names.values()):
            with staged(kept) as there:
                for graph, graph_plan in plan.graphs.items():
                    (there / names[graph]).write_bytes(build_engine(as_folder(folder) / graph, graph_plan, trt=trt))
    return {graph: kept / name for graph, name in names.items()}


def _require_types(trt: ModuleType, network: Any, graph_plan: GraphPlan) -> None:
    """What the parser found must be what the contract says: names, types, and which axes vary."""
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    found = {tensor.name: tensor for tensor in (*inputs, *outputs)}
    if missing := sorted({*graph_plan.profile} ^ {tensor.name for tensor in inputs}):
        raise InputError(f"Only one of graph and profile has the inputs {', '.join(missing)}: take plan()'s.")
    if missing := sorted({*graph_plan.dtypes} ^ {*found}):
        raise ExportError(f"The graph and the plan differ in {', '.join(missing)}: the plan is of another export.")
    for name, dtype in graph_plan.dtypes.items():
        if dtype not in TYPES:
            raise InputError(f"The plan says {dtype!r} for {name}; a graph's tensors are of {', '.join(TYPES)}.")
        if found[name].dtype != getattr(trt.DataType, TYPES[dtype]):
            raise ExportError(f"{name} is {found[name].dtype} in TensorRT; the plan says {dtype}.")
    for tensor in inputs:
        least, usual, most = graph_plan.profile[tensor.name]
        fixed = tuple(tensor.shape)
        if any(not low <= size <= high for low, size, high in zip(least, usual, most, strict=True)):
            raise InputError(f"{tensor.name} has sizes from {least} over {usual} to {most}: they have to rise.")
        if len(fixed) != len(least) or any(
            size >= 0 and not low == size == high for size, low, high in zip(fixed, least, most, strict=True)
        ):
            raise InputError(f"{tensor.name} is of shape {fixed} in the graph, and the profile has {least} to {most}.")


def _strongly_typed(trt: ModuleType) -> int:
    """Flags of a network; since TensorRT 11, and in TensorRT-RTX, there is no other kind."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def log_of(trt: ModuleType) -> Any:
    """A logger that keeps the ``last`` error in place of printing all."""

    class Log(trt.ILogger):
        last = "it did not say why"

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                self.last = message

    return Log()


def _device() -> str:
    import torch

    if not torch.cuda.is_available():
        return "no GPU"
    return f"{torch.cuda.get_device_name()} {torch.cuda.get_device_capability()}"


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
