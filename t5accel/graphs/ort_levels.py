"""ONNX Runtime's levels of graph optimisation, and where a graph that was optimised ahead of time may run.

Each level includes those before it:

- ``disable``: the graph runs as it is written.
- ``basic``: what can be computed now is, what is not needed goes, equal constants become one. All that is left are
  operators of the ONNX standard, which every runtime knows.
- ``extended``: patterns of them become operators of ONNX Runtime's own, called contrib operators. Which patterns do
  depends on the device.
- ``layout``: tensors are laid out for this CPU as well: those of convolutions in blocks as wide as its vectors.
- ``all``: whatever else a release has. In 1.31, fp16 weights become fp32 where the CPU has no arithmetic for them.

T5 has no convolutions: in fp32 the last three make the same graph of it, to the last byte.
"""

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

LEVELS = {
    "disable": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "layout": "ORT_ENABLE_LAYOUT",
    "all": "ORT_ENABLE_ALL",
}


def as_level(value: Any, name: str) -> str:
    """``value`` if it is one of ``LEVELS``, else ``InputError``.

    >>> as_level("basic", "level")
    'basic'
    """
    if not isinstance(value, str) or value not in LEVELS:
        raise InputError(f"{name} is {value!r}; give one of {', '.join(LEVELS)}.")
    return value


def import_onnxruntime() -> ModuleType:
    """The package, or ``MissingPackageError``."""
    if not find_spec("onnxruntime"):
        raise MissingPackageError(f"ONNX graphs need onnxruntime: {install('cpu')} (or [gpu]).")
    import onnxruntime

    return onnxruntime


def optimization_level(level: str) -> onnxruntime.GraphOptimizationLevel:
    """ONNX Runtime's own value for one of ``LEVELS``.

    Raises:
        InputError: this onnxruntime is older than the level.
        MissingPackageError: there is no onnxruntime.
    """
    onnxruntime = import_onnxruntime()
    value = getattr(onnxruntime.GraphOptimizationLevel, LEVELS[level], None)
    if value is None:  # "layout" came with 1.23; before, it was part of "all" alone
        raise InputError(f"onnxruntime {onnxruntime.__version__} has no level {level!r}: give 'extended' or 'all'.")
    return value


def this_machine(device: str = "cpu") -> dict[str, str]:
    """What ONNX Runtime's choices depend on, as texts: ``device``, ``architecture``, ``cpu``, ``instruction_sets``.

    >>> sorted(this_machine())
    ['architecture', 'cpu', 'device', 'instruction_sets']
    """
    from t5accel import machine

    facts = machine.facts(gpu=False)
    return {
        "device": device,
        "architecture": platform.machine() or "unknown",
        "cpu": facts["cpu"] or "unknown",
        "instruction_sets": " ".join(facts["cpu_flags"] or ["unknown"]),
    }


def require_runnable_here(manifest: Manifest, folder: Path, device: str = "cpu") -> None:
    """Refuse an export that was optimised for another machine, or by another ONNX Runtime, or is known to fail there.

    Contrib operators are ONNX Runtime's own business: no standard describes them, a release may change them, and which
    ones were put in, and how weights were laid out for them, was decided for one device and the vector instructions of
    one CPU. So a graph that holds any runs where all of that is the same, and one of standard operators runs anywhere.
    The model of the CPU has to be the same, too, because ``machine.CPU_FLAGS`` are not all instruction sets there are.

    Raises:
        ExportError: it was optimised for something else; the message says for what, and what is here. Or it is a UMT5,
            whose first step ONNX Runtime computes wrongly on CUDA.
        MissingPackageError: there is no onnxruntime.
    """
    if device == "cuda" and read_json_object(folder / "config.json", ExportError).get("model_type") == "umt5":
        # 1.30.0 on an H100: logits of a tiny one off by as much as they are large, where those of T5s, mT5s and gated
        # ones are right to 1e-4. Which node does it is not known; on a CPU the same graphs are right.
        raise ExportError(
            f"{folder} is a UMT5, whose first step ONNX Runtime's CUDA provider computed wrongly where it was tried "
            "(release 1.30.0): run the model itself, not an export, by accelerate(…, device='cuda') in 'fp32', 'fp16' "
            "or 'bf16', which takes PyTorch; or run this on device='cpu'."
        )
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
