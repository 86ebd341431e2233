"""What this machine is, how fast it reads and multiplies, and the least time that a decoding step can take on it.

Everything is looked up or measured when it is asked for and nothing is kept on disk: a container's limits, a noisy
neighbour and a laptop's battery all change the answer. What cannot be found out is `None`, never a guess.
"""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
import timeit
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from t5accel.errors import InputError, MissingPackageError

# Instruction sets that decide how fast int8 and bf16 run: x86 names first, then those of 64-bit Arm (Linux spelling).
CPU_FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
CPU_FLAGS += ("asimd", "asimddp", "i8mm", "bf16", "sve")

PACKAGES = ("t5accel", "torch", "transformers", "tokenizers", "numpy", "onnx", "onnxscript", "onnxruntime")
PACKAGES += ("onnxruntime-gpu", "optimum", "optimum-onnx", "ctranslate2", "openvino", "optimum-intel", "tensorrt")

_WEIGHT_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5}  # of one weight


def _read(path: Path) -> str | None:
    with suppress(OSError):
        return path.read_text(errors="replace")
    return None


def _cgroup_folders(controller: str, root: Path) -> Iterator[Path]:
    """The folders whose limits bind this process, innermost first, for cgroup v2, v1 and the two mixed.

    A container often sees the host's path in /proc/self/cgroup and its own limits at the mount point, so folders that
    are missing are harmless and the walk always ends at the mount point.
    """
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
    """Every word as a number; "max" and -1 are the kernel's ways to say "no limit"."""
    return [math.inf if word in ("max", "-1") else float(word) for word in (text or "").split()]


def cpu_threads(root: str | os.PathLike[str] = "/") -> int:
    """How many threads can really run at once: the least of core affinity and the container's CPU quota, at least 1.

    A quota of 1.5 cores counts as 2 threads. `root` is the folder that holds `proc/` and `sys/` (for tests).
    """
    limits = [float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)]
    for folder in _cgroup_folders("cpu", Path(root)):
        limit = _numbers(_read(folder / "cpu.max"))
        limit = limit or _numbers(_read(folder / "cpu.cfs_quota_us")) + _numbers(_read(folder / "cpu.cfs_period_us"))
        if len(limit) == 2 and limit[1] > 0:
            limits.append(limit[0] / limit[1])
    return max(1, math.ceil(min(limits)))


def _psutil() -> Any:
    return import_module("psutil") if find_spec("psutil") else None


def memory_bytes(root: str | os.PathLike[str] = "/") -> int | None:
    """The memory this process may use: the machine's, or the container's limit where that is less."""
    limits: list[float] = []
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    elif psutil := _psutil():
        limits.append(psutil.virtual_memory().total)
    for folder in _cgroup_folders("memory", Path(root)):
        limits += _numbers(_read(folder / "memory.max")) + _numbers(_read(folder / "memory.limit_in_bytes"))
    least = min(limits, default=math.inf)
    return None if math.isinf(least) else int(least)


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
        "driver": (_nvidia_smi("driver_version") or [None])[0],
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def _nvidia_smi(*fields: str) -> list[str] | None:
    """What the driver's program says of the first GPU that this process sees."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    command = ["nvidia-smi", f"--id={first}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    with suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return [value.strip() for value in done.stdout.strip().split(",")]
    return None


def gpu_clocks_mhz() -> dict[str, int]:
    """The GPU's clocks as they are now, ``{"sm", "memory"}`` in MHz, so ask under load; empty where nobody knows."""
    found = _nvidia_smi("clocks.sm", "clocks.mem") or []
    return {name: int(value) for name, value in zip(("sm", "memory"), found, strict=False) if value.isdigit()}


def facts(root: str | os.PathLike[str] = "/", *, gpu: bool = True) -> dict[str, Any]:
    """What a recorded measurement must say about its machine; `None` where unknown.

    Keys: cpu, logical_cores, usable_threads, memory_bytes, cpu_flags (those of CPU_FLAGS that are present; Linux), os,
    python, gpu (of torch's CUDA device: name, memory_bytes, capability, sm_count, bus_bytes_per_s, driver, cuda, cudnn;
    imports torch if installed; `gpu=False`: not asked).
    """
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
    """The versions of those of PACKAGES that are installed, read from their metadata: nothing is imported."""
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def resident_memory_bytes() -> int | None:
    """The memory that this process occupies now."""
    if statm := _read(Path("/proc/self/statm")):
        return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    psutil = _psutil()
    return psutil.Process().memory_info().rss if psutil else None


def peak_memory_bytes() -> int | None:
    """The most memory that this process has occupied since it started.

    Linux hands `ru_maxrss` down to child processes: a small child of a big parent reports the parent's peak. The
    kernel's VmHWM belongs to this process alone, so it is read first.
    """
    for line in (_read(Path("/proc/self/status")) or "").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    if find_spec("resource"):
        peak = import_module("resource").getrusage(0).ru_maxrss  # 0 is RUSAGE_SELF
        return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, the others KiB
    psutil = _psutil()
    return getattr(psutil.Process().memory_info(), "peak_wset", None) if psutil else None


def _require_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise InputError(f"{name} is {value!r}; give a whole number of at least {least}")


def _median_s(run: Callable[[], Any]) -> float:
    run()  # the first call touches fresh pages and starts threads
    return median(timeit.repeat(run, number=1, repeat=5))


def bandwidth_bytes_per_s(size_bytes: int = 256 << 20, threads: int | None = None) -> float:
    """Read bandwidth measured now, in bytes per second: every thread reduces its share of one array to its maximum.

    The default size is past the caches of most machines; a size below the last-level cache measures that cache.
    `threads=None` uses `cpu_threads()`. The maximum is taken because numpy's sum adds more slowly than memory delivers.
    The median of five passes counts. Raises InputError for a size under 1 MiB or `threads` < 1.
    """
    threads = cpu_threads() if threads is None else threads
    _require_count("size_bytes", size_bytes, 1 << 20)
    _require_count("threads", threads, 1)
    array = np.ones(size_bytes // 4, np.float32)
    shares = [share for share in np.array_split(array, threads) if share.size]
    again = max(1, (256 << 20) // array.nbytes)  # else waking the threads is what a small size would measure

    def read(share: np.ndarray) -> None:
        for _ in range(again):
            share.max()  # numpy's reductions let go of the GIL

    with ThreadPoolExecutor(threads) as pool:
        return again * array.nbytes / _median_s(lambda: list(pool.map(read, shares)))


def gemm_flops_per_s(n: int = 1024, dtype: str = "float32") -> float:
    """Rate of an (n, n) x (n, n) matrix product on the CPU, measured now: 2 n^3 operations over the median of five.

    Uses torch with its own thread count where it is installed, else numpy. Raises InputError for another `dtype` than
    float32, float64, float16 and bfloat16 or `n` < 1; MissingPackageError for the 16-bit ones without torch.
    """
    allowed = ("float32", "float64", "float16", "bfloat16")
    if dtype not in allowed:
        raise InputError(f"dtype is {dtype!r}; choose from {', '.join(allowed)}")
    _require_count("n", n, 1)
    if find_spec("torch"):
        torch = import_module("torch")
        matrix = torch.ones(n, n, dtype=getattr(torch, dtype))
        out: Any = torch.empty_like(matrix)
        return 2 * n**3 / _median_s(lambda: torch.mm(matrix, matrix, out=out))
    if dtype in ("float16", "bfloat16"):
        raise MissingPackageError(f"dtype {dtype!r} needs torch: numpy has no fast 16-bit product; pip install torch")
    square = np.ones((n, n), dtype)
    return 2 * n**3 / _median_s(lambda: square @ square)


def decoder_weights_per_step(dims: Any) -> int:
    """How many decoder weights one decoding step reads, for a `t5accel.checkpoints.T5Dims` or its look-alike.

    Counted: self-attention q, k, v, o; cross-attention q and o; feed-forward wi (twice if gated) and wo; the norms;
    lm_head. Not counted: cross-attention k and v, which the encoder applies once per request; the embedding, of which a
    step reads one row per sequence (so `tied` changes nothing); the relative position table.

    Raises InputError when the three per-layer tuples are not equally long.
    """
    layers = (dims.decoder_heads, dims.cross_heads, dims.decoder_ff)
    if len({len(values) for values in layers}) != 1:
        raise InputError(f"decoder_heads, cross_heads and decoder_ff are {layers}; give each one value per layer")
    total = dims.vocab_size * dims.d_model + dims.d_model  # lm_head and the final norm
    for self_heads, cross_heads, width in zip(*layers, strict=True):
        attention = (4 * self_heads + 2 * cross_heads) * dims.d_kv
        total += dims.d_model * (attention + (3 if dims.gated else 2) * width + 3)
    return total


@dataclass(frozen=True)
class Roofline:
    """The least time that one decoding step can take; `dataclasses.asdict` makes a row of it."""

    precision: str
    batch: int
    weight_bytes: int
    bytes_per_step: int  # weights and key/value cache
    flops_per_step: int
    read_s: float
    compute_s: float
    floor_s: float  # the longer of the two above
    bound: str  # "bandwidth" or "compute": which one that is


def roofline(
    dims: Any,
    precision: str = "fp32",
    batch: int = 1,
    *,
    bandwidth: float,
    gemm: float,
    source_tokens: int = 64,
    position: int = 32,
) -> Roofline:
    """Count the bytes and operations of one greedy decoding step, and divide by what the machine can do.

    `dims`: see `decoder_weights_per_step`. `bandwidth` in bytes/s, `gemm` in operations/s **at that precision**. Each
    of `batch` sequences attends to `position` tokens of its own and `source_tokens` of its source.

    Weights take 4 (fp32), 2 (fp16, bf16), 1 (int8) or 0.5 (int4) bytes. The scales of quantised weights are left out:
    one fp32 scale per 32 weights would add a quarter to int4. The cache is fp32 unless the precision is fp16 or bf16.
    Operations: 2 per weight and sequence, 4 per cached key-value pair of numbers. Weights that fit in the last-level
    cache can beat a floor of memory bandwidth: then pass `bandwidth_bytes_per_s(size_bytes=weight_bytes)`.

    t5-small at fp32: 38.48 million weights, 153.9 MB (154 MB by hand; the norms are 0.04 MB), plus 2.4 MB of cache.

    >>> from types import SimpleNamespace
    >>> small = SimpleNamespace(d_model=512, d_kv=64, vocab_size=32128, gated=False, tied=True,
    ...                         decoder_heads=(8,) * 6, cross_heads=(8,) * 6, decoder_ff=(2048,) * 6)
    >>> step = roofline(small, bandwidth=60e9, gemm=214e9)
    >>> step.weight_bytes, step.bytes_per_step, step.bound, round(step.floor_s * 1000, 1)
    (153917440, 156276736, 'bandwidth', 2.6)

    Raises InputError for an unknown precision, a count below 1, or a rate that is not a finite number above 0.
    """
    if precision not in _WEIGHT_BYTES:
        raise InputError(f"precision is {precision!r}; choose from {', '.join(_WEIGHT_BYTES)}")
    for name, count in (("batch", batch), ("source_tokens", source_tokens), ("position", position)):
        _require_count(name, count, 1)
    for name, rate in (("bandwidth", bandwidth), ("gemm", gemm)):
        if not (math.isfinite(rate) and rate > 0):
            raise InputError(f"{name} is {rate!r}; give a finite rate above 0, per second")
    weights = decoder_weights_per_step(dims)
    pairs = batch * dims.d_kv * (position * sum(dims.decoder_heads) + source_tokens * sum(dims.cross_heads))
    weight_bytes = math.ceil(weights * _WEIGHT_BYTES[precision])
    cache_bytes = 2 * pairs * (2 if precision in ("fp16", "bf16") else 4)  # quantising weights leaves the cache in fp32
    step_bytes, step_flops = weight_bytes + cache_bytes, 2 * weights * batch + 4 * pairs
    read_s, compute_s = step_bytes / bandwidth, step_flops / gemm
    floor_s, bound = max((read_s, "bandwidth"), (compute_s, "compute"))
    return Roofline(precision, batch, weight_bytes, step_bytes, step_flops, read_s, compute_s, floor_s, bound)
