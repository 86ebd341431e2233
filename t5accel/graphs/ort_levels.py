"""ONNX Runtime's graph optimisation levels, and where an optimised graph may run."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from t5accel.checks import read_json_object
from t5accel.errors import ExportError, InputError, MissingPackageError, install

if TYPE_CHECKING:
    import onnxruntime

    from t5accel.graphs.manifest import Manifest

# Each level includes those before it. T5 has no convolutions: in fp32 the last three give the same graph.
LEVELS = {
    "disable": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",  # folds constants and drops unused nodes; the result is standard ONNX
    "extended": "ORT_ENABLE_EXTENDED",  # fuses patterns into contrib operators, which depend on the device
    "layout": "ORT_ENABLE_LAYOUT",  # lays out convolutions' tensors in blocks as wide as this CPU's vectors
    "all": "ORT_ENABLE_ALL",  # what else a release has: in 1.31, fp16 weights become fp32 where the CPU lacks fp16
}


def as_level(value: Any, name: str) -> str:
    """``value`` if it is one of ``LEVELS``, else ``InputError``.

    >>> as_level("basic", "level")
    'basic'
    """
    if not isinstance(value, str) or value not in LEVELS:
        raise InputError(f"{name} must be one of {', '.join(LEVELS)}, got {value!r}.")
    return value


def import_onnxruntime() -> ModuleType:
    """Import onnxruntime, or raise ``MissingPackageError``."""
    if not find_spec("onnxruntime"):
        raise MissingPackageError(f"ONNX graphs need onnxruntime: {install('cpu')} (or [gpu]).")
    import onnxruntime

    return onnxruntime


def optimization_level(level: str) -> onnxruntime.GraphOptimizationLevel:
    """ONNX Runtime's value of one of `LEVELS`; raises ``InputError`` if this release is older than the level."""
    onnxruntime = import_onnxruntime()
    value = getattr(onnxruntime.GraphOptimizationLevel, LEVELS[level], None)
    if value is None:  # "layout" came with 1.23; before, it was part of "all" alone
        raise InputError(f"onnxruntime {onnxruntime.__version__} has no level {level!r}: give 'extended' or 'all'.")
    return value


def plain_session(path: Path, *, once: bool = False) -> onnxruntime.InferenceSession:
    """A session on the CPU without optimisation, which keeps every value; ``once`` if it serves a single run."""
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if once:  # preparing weights for many runs would cost more than this run, and their memory again
        options.add_session_config_entry("session.disable_prepacking", "1")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def this_machine(device: str = "cpu") -> dict[str, str]:
    """The hardware facts that ONNX Runtime's optimiser depends on."""
    from t5accel import machine

    facts = machine.facts(gpu=False)
    return {
        "device": device,
        "architecture": platform.machine() or "unknown",
        "cpu": facts["cpu"] or "unknown",
        "instruction_sets": " ".join(facts["cpu_flags"] or ["unknown"]),
    }


def require_runnable_here(manifest: Manifest, folder: Path, device: str = "cpu") -> None:
    """Raise ``ExportError`` for an export optimised for another machine or ONNX Runtime, or known to fail here."""
    if device == "cuda" and read_json_object(folder / "config.json", ExportError).get("model_type") == "umt5":
        # 1.30.0 on an H100: logits of a tiny one off by as much as they are large, where those of T5s, mT5s and gated
        # ones are right to 1e-4. Which node does it is not known; on a CPU the same graphs are right.
        raise ExportError(
            f"{folder} is a UMT5, whose first step ONNX Runtime's CUDA provider computed wrongly where it was tried "
            "(release 1.30.0): run the model itself, not an export, by accelerate(…, device='cuda') in 'fp32', 'fp16' "
            "or 'bf16', which takes PyTorch; or run this on device='cpu'."
        )
    # No standard describes contrib operators, and a release may change them; which ones were put in, and the layout of
    # their weights, was decided for one device and CPU. The CPU's model must match as well, because machine.CPU_FLAGS
    # are not all instruction sets.
    optimized = manifest.optimized
    if not optimized.get("contrib_operators"):
        return
    made_for = _facts(optimized["onnxruntime"], optimized["machine"])
    here = _facts(import_onnxruntime().__version__, this_machine(device))
    if made_for != here:
        differing = [key for key in {**made_for, **here} if made_for.get(key) != here.get(key)]
        there, now = (", ".join(f"{key} {facts.get(key)}" for key in differing) for facts in (made_for, here))
        raise ExportError(
            f"{folder} was optimised (by {optimized['tool']}, level {optimized['level']}) for {there}; here is {now}. "
            "Run the portable export that it was made from, which is as fast, or optimise that one here."
        )


def _facts(version: str, of_machine: Mapping[str, str]) -> dict[str, str]:
    return {"onnxruntime": version, **{key.replace("_", " "): value for key, value in of_machine.items()}}
