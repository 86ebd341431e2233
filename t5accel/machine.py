"""Facts about this machine, and its measured rates."""

# Everything is looked up or measured at each call and nothing is kept on disk: a container's limits, a noisy neighbour
# and a laptop's battery all change the answer.

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
import timeit
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from t5accel.checks import as_count
from t5accel.errors import InputError, MissingPackageError

# Instruction sets that decide how fast int8 and bf16 run: x86 names first, then those of 64-bit Arm (Linux spelling).
CPU_FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
CPU_FLAGS += ("asimd", "asimddp", "i8mm", "bf16", "sve")

PACKAGES = ("t5accel", "torch", "transformers", "tokenizers", "numpy", "onnx", "onnxscript", "onnxruntime")
PACKAGES += ("onnxruntime-gpu", "optimum", "optimum-onnx", "ctranslate2", "openvino", "optimum-intel", "tensorrt")


def _read(path: Path) -> str | None:
    with suppress(OSError):
        return path.read_text(errors="replace")
    return None


def _cgroup_folders(controller: str, root: Path) -> Iterator[Path]:
    """The folders with limits of this process, innermost first, for cgroup v2, v1 and both mixed."""
    # A container often sees the host's path in /proc/self/cgroup and its own limits at the mount point, so missing
    # folders are harmless and the walk always ends at the mount point.
    mounts = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "0::/").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        inner = [part for part in path.split("/") if part not in ("", "..")]
        # v2 names no controller; beside v1 it is mounted one folder down.
        for mount in (mounts / controllers, mounts / controller) if controllers else (mounts, mounts / "unified"):
            for depth in range(len(inner), -1, -1):
                yield mount.joinpath(*inner[:depth])


def _numbers(text: str | None) -> list[float]:
    """Every word as a number; the kernel writes "max" or -1 for no limit."""
    return [math.inf if word in ("max", "-1") else float(word) for word in (text or "").split()]


def cpu_threads(root: str | os.PathLike[str] = "/") -> int:
    """The number of usable threads: the smaller of core affinity and the container's CPU quota, rounded up.

    `root` is the folder that holds `proc/` and `sys/` (for tests).

    >>> 1 <= cpu_threads() <= os.cpu_count()
    True
    """
    limits = [float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)]
    for folder in _cgroup_folders("cpu", Path(root)):
        limit = _numbers(_read(folder / "cpu.max"))
        limit = limit or _numbers(_read(folder / "cpu.cfs_quota_us")) + _numbers(_read(folder / "cpu.cfs_period_us"))
        if len(limit) == 2 and limit[1] > 0:
            limits.append(limit[0] / limit[1])
    return max(1, math.ceil(min(limits)))


def memory_bytes(root: str | os.PathLike[str] = "/") -> int:
    """The memory that this process may use: the machine's, or the container's smaller limit."""
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):  # the GPU suite runs without psutil
        limits: list[float] = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    else:
        import psutil

        limits = [psutil.virtual_memory().total]
    for folder in _cgroup_folders("memory", Path(root)):
        limits += _numbers(_read(folder / "memory.max")) + _numbers(_read(folder / "memory.limit_in_bytes"))
    return int(min(limits))


def _macos_cpu() -> str | None:
    if sys.platform != "darwin":
        return None
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


def _gpu() -> dict[str, Any] | None:
    if not find_spec("torch") or not (torch := import_module("torch")).cuda.is_available():
        return None
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    # Two transfers for each tick of the memory's clock; newer releases of torch know clock (kHz) and width (bits).
    bus = 2000 * getattr(device, "memory_clock_rate", 0) * getattr(device, "memory_bus_width", 0) / 8
    return {
        "name": device.name,
        "memory_bytes": device.total_memory,
        "capability": [device.major, device.minor],
        "sm_count": device.multi_processor_count,
        "bus_bytes_per_s": bus or None,
        "driver": next(iter(nvidia_smi("driver_version")), None),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def nvidia_smi(*fields: str) -> list[str]:
    """The values of nvidia-smi's ``fields`` for the first GPU that this process sees; empty if unknown."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    command = ["nvidia-smi", f"--id={first}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    with suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return [value.strip() for value in done.stdout.strip().split(",")]
    return []


def facts(root: str | os.PathLike[str] = "/", *, gpu: bool = True) -> dict[str, Any]:
    """The facts that a recorded measurement states about its machine; `gpu` imports torch, if it is installed."""
    pairs = (line.partition(":") for line in (_read(Path(root) / "proc/cpuinfo") or "").splitlines())
    cpuinfo = {key.strip(): value.strip() for key, _, value in pairs}
    flags = (cpuinfo.get("flags") or cpuinfo.get("Features") or "").split()  # Arm kernels call them features
    return {
        "cpu": cpuinfo.get("model name") or _macos_cpu() or platform.processor() or None,
        "logical_cores": os.cpu_count(),
        "usable_threads": cpu_threads(root),
        "memory_bytes": memory_bytes(root),
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in flags] if flags else None,
        "os": platform.platform(),
        "python": platform.python_version(),
        "gpu": _gpu() if gpu else None,
    }


def versions() -> dict[str, str]:
    """The versions of the installed PACKAGES, without importing them."""
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def resident_memory_bytes() -> int:
    """The memory that this process occupies now."""
    import psutil

    return psutil.Process().memory_info().rss


def peak_memory_bytes(pid: int | None = None) -> int:
    """The most memory that a process, by default this one, has occupied since it started."""
    # Linux hands `ru_maxrss` down to child processes: a small child of a big parent reports the parent's peak. The
    # kernel's VmHWM belongs to this process alone.
    for line in (_read(Path(f"/proc/{pid or 'self'}/status")) or "").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    if pid is None and find_spec("resource"):
        peak = import_module("resource").getrusage(0).ru_maxrss  # 0 is RUSAGE_SELF
        return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, the others KiB
    import psutil

    found = psutil.Process(pid).memory_info()
    return getattr(found, "peak_wset", found.rss)  # Windows; of another process macOS tells only what it occupies now


def watches_stderr() -> bool:
    """Whether stderr is a terminal or a notebook, where a progress bar is seen."""
    ipython = sys.modules.get("IPython")
    in_notebook = ipython is not None and hasattr(ipython.get_ipython(), "kernel")
    return in_notebook or (sys.stderr is not None and sys.stderr.isatty())


def progress_bar(items: Iterable[Any] | None = None, *, shown: bool = True, **options: Any) -> Any:
    """tqdm's bar, hidden where nobody would see it; ``options`` are tqdm's."""
    from tqdm import tqdm

    return tqdm(items, disable=not (shown and watches_stderr()), **options)


def _best_s(run: Callable[[], Any]) -> float:
    run()  # the first call touches fresh pages and starts threads
    return min(timeit.repeat(run, number=1, repeat=9))


def read_rates(size_bytes: int = 256 << 20, passes: int = 9) -> list[float]:
    """Bytes per second of matrix-vector products with a matrix of this size (at least 1 MiB), one per pass.

    Such a product reads its matrix once and hardly computes, as a decoding step does with its weights: give their
    bytes, for weights that fit in the last-level cache are read many times faster than from memory. It runs on the
    threads of numpy's BLAS: all, unless OPENBLAS_NUM_THREADS or OMP_NUM_THREADS limited them before numpy's import.
    """
    as_count(size_bytes, "size_bytes", at_least=1 << 20)
    as_count(passes, "passes", at_least=1)
    matrix = np.ones((size_bytes >> 13, 2048), np.float32)
    vector, out = np.ones(2048, np.float32), np.empty(len(matrix), np.float32)
    again = max(1, (64 << 20) // matrix.nbytes)  # else waking the threads is what a small size would measure

    def read() -> None:
        for _ in range(again):
            np.dot(matrix, vector, out=out)

    read()  # the first call touches fresh pages and starts threads
    return [again * matrix.nbytes / seconds for seconds in timeit.repeat(read, number=1, repeat=passes)]


def bandwidth_bytes_per_s(size_bytes: int = 256 << 20) -> float:
    """The best of the `read_rates`, for the floor of a roofline."""
    # Other processes make a pass slower, and nothing goes below a floor. A floor from a busy moment and a time from a
    # quiet one still contradict each other: then measure both in turn.
    return max(read_rates(size_bytes))


def gemm_flops_per_s(n: int = 1024, dtype: str = "float32") -> float:
    """Operations per second of an (n, n) x (n, n) product on the CPU, measured now: the best of nine.

    Uses torch with its own thread count if it is installed, else numpy, which has no 16-bit types.
    """
    allowed = ("float32", "float64", "float16", "bfloat16")
    if dtype not in allowed:
        raise InputError(f"dtype must be one of {', '.join(allowed)}, got {dtype!r}.")
    as_count(n, "n", at_least=1)
    if find_spec("torch"):
        torch = import_module("torch")
        matrix = torch.ones(n, n, dtype=getattr(torch, dtype))
        out: Any = torch.empty_like(matrix)
        return 2 * n**3 / _best_s(lambda: torch.mm(matrix, matrix, out=out))
    if dtype in ("float16", "bfloat16"):
        raise MissingPackageError(f"dtype {dtype!r} needs torch: numpy has no fast 16-bit product; pip install torch.")
    square = np.ones((n, n), dtype)
    return 2 * n**3 / _best_s(lambda: square @ square)
