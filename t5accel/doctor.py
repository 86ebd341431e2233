"""Check an installation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import psutil

from t5accel import machine
from t5accel.errors import InputError, T5AccelError, install
from t5accel.graphs.export_cache import ENVIRONMENT, cache_folder
from t5accel.models.load import BUNDLED, data_folder

RTX = ((8, 6), (8, 9))  # compute capabilities that TensorRT-RTX runs on, beside 12.x


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    ok: bool | None  # None: something optional is absent
    found: str
    needed_for: str
    remedy: str = ""


def _package(module: str, distribution: str, needed_for: str, extra: str = "", *, required: bool = False) -> Check:
    if find_spec(module) is not None:
        found = None
        with suppress(Exception):  # a source tree has no version, nor has a damaged installation
            found = metadata.version(distribution)
        return Check(distribution, True, found or "present", needed_for)
    remedy = install(extra) if extra else f"pip install {distribution}"
    return Check(distribution, False if required else None, "missing", needed_for, remedy)


def _gradio() -> Check:
    check = _package("gradio", "gradio", "python -m bench demo")
    # It needs transformers 5, which would push the course's transformers aside.
    return check if check.ok else replace(check, remedy="make demo, which has a separate environment")


def _python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    return Check("python", sys.version_info >= (3, 11), found, "everything", "install Python 3.11 or newer")


def _of_torch(name: str) -> Check:
    is_needed = find_spec("onnxruntime") is None  # which runs exports alone
    return _package(name, name, "exporting, training, generate()", "cpu", required=is_needed)


def _transformers() -> Check:
    check = _of_torch("transformers")
    if check.ok and check.found != "present":  # of a source tree no version is known
        major, minor = map(int, re.findall(r"\d+", check.found)[:2])
        if not (4, 57) <= (major, minor) < (5, 40):
            return Check(check.name, False, check.found, check.needed_for, "pip install 'transformers>=4.57,<5.40'")
    return check


def _onnxruntime() -> Check:
    needed_for, installed = "running exports", {}
    for name in ("onnxruntime", "onnxruntime-gpu"):
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    if len(installed) == 2:
        remedy = f"pip uninstall {' '.join(installed)}, then install one: they overwrite each other's files"
        return Check("onnxruntime", False, "both onnxruntime and onnxruntime-gpu", needed_for, remedy)
    if not installed:
        optional = None if find_spec("torch") else False
        return Check("onnxruntime", optional, "missing", needed_for, f"{install('cpu')} (or [gpu])")
    ((name, version),) = installed.items()
    return Check("onnxruntime", True, f"{name} {version or 'present'}", needed_for)


def _bundled_model() -> Check:
    needed_for = "everything offline: load_model('mini')"
    try:
        folder = data_folder() / BUNDLED["mini"]
    except T5AccelError as error:
        return Check("bundled model", False, "missing", needed_for, str(error))
    missing = [n for n in ("config.json", "model.safetensors", "tokenizer.json") if not (folder / n).is_file()]
    if missing:
        return Check("bundled model", False, f"{', '.join(missing)} missing", needed_for, "install t5accel again")
    size = (folder / "model.safetensors").stat().st_size
    return Check("bundled model", True, f"{size / 1e6:.0f} MB of weights", needed_for)


def _gpu() -> Check:
    try:
        gpu = machine.facts()["gpu"] if find_spec("torch") else None
    except (ImportError, OSError) as error:  # torch is there and does not load, as with a driver library missing
        return Check("GPU", False, "torch does not load", "everything", f"install torch again ({error})")
    if gpu is None:
        return Check("GPU", None, "none", "the GPU notebooks, which show recorded results without one")
    return Check("GPU", True, gpu["name"], "the GPU notebooks")


def _tensorrt() -> Check:
    # TensorRT and TensorRT-RTX are two libraries; the second runs on some cards only and comes from PyPI.
    needed_for = "runtime='tensorrt'"
    for module, distribution in (("tensorrt", "tensorrt"), ("tensorrt_rtx", "tensorrt-rtx")):
        if (check := _package(module, distribution, needed_for)).ok:
            return check
    gpu = machine.facts()["gpu"] if _gpu().ok else None
    if gpu is None:
        return Check("tensorrt", None, "missing", needed_for, "use a machine with an NVIDIA GPU")
    major, minor = gpu["capability"]
    if (major, minor) in RTX or major == 12:
        return Check("tensorrt", None, "missing", needed_for, "pip install tensorrt-rtx-cu13, which runs on this card")
    remedy = f"install tensorrt from NVIDIA's index; tensorrt-rtx does not run on compute capability {major}.{minor}"
    return Check("tensorrt", None, "missing", needed_for, remedy)


def _processor() -> Check:
    cores = psutil.cpu_count(logical=False) or "unknown"
    return Check("processor", True, f"{machine.cpu_threads()} threads, {cores} cores", "every timing")


def _cache() -> Check:
    needed_for, remedy = "exports, which are made once", f"set {ENVIRONMENT} to a folder that can be written"
    try:
        folder = cache_folder()
    except InputError:
        return Check("cache", False, "no home directory", needed_for, remedy)
    there = next(path for path in (folder, *folder.parents) if not _is_missing(path))
    writable = os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)
    return Check("cache", writable, str(folder), needed_for, remedy)


def _is_missing(path: Path) -> bool:
    try:
        os.lstat(path)
    except OSError as error:  # others, as of a name too long, show that it cannot be made either
        return isinstance(error, FileNotFoundError)
    return False


def _node() -> Check:
    needed_for, remedy = "the web page", "install Node.js 20.11 or newer"
    if (node := shutil.which("node")) is None:
        return Check("node", None, "missing", needed_for, remedy)
    found = ""
    with suppress(OSError, ValueError):  # no program, or no text
        found = subprocess.run([node, "--version"], capture_output=True, text=True).stdout.strip()
    new_enough = [int(number) for number in re.findall(r"\d+", found)[:2]] >= [20, 11]
    return Check("node", True if new_enough else None, found or "does not run", needed_for, remedy)


# Optional packages: module, distribution, what needs it, and the extra that brings it.
_OPTIONAL = (
    ("openvino", "openvino", "runtime='openvino'", "openvino"),
    ("optimum", "optimum-onnx", "the cells that show optimum beside ours", "optimum"),
    ("datasets", "datasets", "evaluation.dataset()", "course"),
    ("evaluate", "evaluate", "the metric modules in data/metrics", "course"),
    ("sacrebleu", "sacrebleu", "BLEU and chrF, as in t5accel quantize", "course"),
    ("rouge_score", "rouge-score", "quality: ROUGE", "course"),
    ("matplotlib", "matplotlib", "plots", "course"),
    ("fastapi", "fastapi", "t5accel serve", "serving"),
    ("uvicorn", "uvicorn", "t5accel serve", "serving"),
    ("pyarrow", "pyarrow", "Parquet in t5accel batch", "batch"),
    ("ray", "ray", "--engine ray", "ray"),
    ("jupyterlab", "jupyterlab", "make lab", "course"),
    ("nbclient", "nbclient", "make course", "course"),
)
CHECKS: tuple[Callable[[], Check], ...] = (
    partial(_package, "t5accel", "t5accel", "everything"),
    _python,
    _processor,
    _cache,
    partial(_of_torch, "torch"),
    _transformers,
    partial(_package, "tokenizers", "tokenizers", "tokenising", required=True),
    _bundled_model,
    partial(_package, "onnx", "onnx", "exporting", required=True),
    _onnxruntime,
    *(partial(_package, *optional) for optional in _OPTIONAL),
    _node,
    _gradio,
    _gpu,
    _tensorrt,
)


def diagnose() -> list[Check]:
    """Run every check, without changing or downloading anything.

    >>> [check.name for check in diagnose()][:2]
    ['t5accel', 'python']
    """
    return [_reported(check) for check in CHECKS]


def _reported(check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # a damaged library may raise anything
        name = check.args[:2][-1] if isinstance(check, partial) else check.__name__.strip("_").replace("_", " ")
        found = f"{type(error).__name__}: {error}".splitlines()[0]
        return Check(name, False, found, "a sound installation", "install it again")


def report(checks: list[Check]) -> str:
    """A plain-text table of the findings, with a remedy for each that is not ok.

    >>> print(report([Check("matplotlib", None, "missing", "plots", "pip install matplotlib")]))
    - matplotlib   missing   for plots; to get it: pip install matplotlib
    """
    width, found = (max(len(getattr(check, name)) for check in checks) for name in ("name", "found"))
    marks = {True: "+", False: "!", None: "-"}
    lines = []
    for check in checks:
        remedy = f"; to get it: {check.remedy}" if check.remedy and not check.ok else ""
        text = f"{marks[check.ok]} {check.name:<{width}}   {check.found:<{found}}   for {check.needed_for}{remedy}"
        lines.append(text)
    return "\n".join(lines)
