"""TensorRT engines of an export's two graphs: built for a plan, checked, and kept.

`tensorrt` (10 and 11) builds for the GPU that is there; `tensorrt_rtx` also on a machine without one. An engine runs on
the version and GPU that it was built for, so both are in the name that it is kept under. Engines are strongly typed:
their numbers are those of the graph, and TensorRT chooses none by itself.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from t5accel.backends.tensorrt_plan import GraphPlan, Plan
from t5accel.errors import ExportError, InputError, MissingPackageError
from t5accel.graphs.atomic_write import locked, staged
from t5accel.graphs.contract import as_folder
from t5accel.graphs.export_cache import ENGINES, cache_folder
from t5accel.graphs.saved_graph import check_external_data

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
