"""Profiles of a decoding step: operators called, kernels launched, and what those cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from t5accel.backends.torch_static_buffers import capture_graph
from t5accel.checks import as_count
from t5accel.graphs.contract import decoder_spec, kv_names
from t5accel.graphs.ort_levels import import_onnxruntime
from t5accel.graphs.weights import T5Weights
from t5accel.models.sizes import T5Dims
from t5accel.timing import measure

# A small decoder on a large GPU waits for the host, which takes longer to launch a kernel than the GPU to run it. So
# the least time of a step is a number of launches times the price of one, plus the bytes it reads over the bandwidth.

_NO_KERNEL = ("aten.empty", "aten.detach", "aten.lift_fresh", "aten._unsafe_view", "aten.is_same_size")
_ONE_KERNEL = ("aten.rms_norm",)  # on a GPU; on a CPU it is made of six


def operators(run: Callable[[], Any]) -> Counter[str]:
    """Count the operators of a function that compute something, by name.

    Views and allocations are left out. On a GPU nearly all others launch one kernel: a prediction that needs no GPU.
    `kernels` counts the real ones.
    """
    found: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(func.overloadpacket)
            if name not in _ONE_KERNEL:
                with self:  # composite operators are counted by their parts
                    result = func.decompose(*args, **(kwargs or {}))
                if result is not NotImplemented:
                    return result
            if not func.is_view and not name.startswith(_NO_KERNEL):
                found[name] += 1
            return func(*args, **(kwargs or {}))

    with torch.inference_mode(), Count():
        run()
    return found


@torch.inference_mode()
def kernels(run: Callable[[], Any]) -> Counter[str]:
    """Count the kernels and copies that a function runs on the GPU, by name."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    on_device = (event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    return Counter(event.name for event in on_device)


@dataclass(frozen=True)
class Prices:
    """Times of a GPU: a launched kernel, a kernel in a replayed graph, and its bandwidth."""

    launch_s: float
    replayed_s: float
    bytes_per_s: float

    def floor_s(self, kernels: int, bytes_read: int) -> float:
        """Return the least time of a captured step."""
        return kernels * self.replayed_s + bytes_read / self.bytes_per_s


def dependent(count: int, device: torch.device, width: int = 512) -> Callable[[], torch.Tensor]:
    """Make a chain of small kernels, each reading the last one's output.

    An empty one is too cheap a measure: in a graph it takes 1 µs, one that reduces a few hundred numbers 2 or 3 µs.

    >>> operators(dependent(6, torch.device("cpu"))).total()
    6
    """
    start, weight = torch.ones(1, width, device=device), torch.ones(width, device=device)

    def row() -> torch.Tensor:
        x = start
        for _ in range(count // 2):
            x = functional.rms_norm(x, (width,), weight, 1e-6) + start
        return x

    return row


@torch.inference_mode()
def prices(device: torch.device, *, count: int = 1000, repeats: int = 20, size_bytes: int = 1 << 30) -> Prices:
    """Measure launches, replays and a copy of ``size_bytes``, more than the caches hold."""
    row = dependent(count, device)
    graph = capture_graph(row, lambda: None, device)
    source = torch.ones(size_bytes // 4, device=device)
    target = torch.empty_like(source)
    launched, replayed, copied = (
        measure(run, repeats=repeats, synchronize=torch.cuda.synchronize).median_s
        for run in (row, graph.replay, lambda: target.copy_(source))
    )
    return Prices(launched / count, replayed / count, 2 * size_bytes / copied)


def step_feeds(
    dims: T5Dims, *, batch: int = 1, rows: int = 1, past: int = 32, new: int = 1, source: int = 64
) -> dict[str, np.ndarray]:
    """Draw random inputs of a decoder; sizes are B, K, P, T and S."""
    counts = {"batch": batch, "rows": rows, "past": past, "new": new, "source": source}
    checked = [as_count(count, name, at_least=int(name != "past")) for name, count in counts.items()]
    sizes, rng = dict(zip("BKPTS", checked, strict=True)), np.random.default_rng(0)
    feeds = {}
    for tensor in decoder_spec(dims).inputs:
        shape = tuple(sizes.get(size, size) for size in tensor.shape)
        if tensor.name == "input_ids":
            feeds[tensor.name] = rng.integers(0, dims.vocab_size, shape)
        elif tensor.name.endswith("mask"):
            feeds[tensor.name] = np.ones(shape, dtype=np.int64)
        else:
            feeds[tensor.name] = rng.standard_normal(shape, dtype=np.float32)
    return feeds


def logits_of(weights: T5Weights, input_ids: np.ndarray, attention_mask: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Compute logits (B, T, V) of ``tokens`` (B, T) by both graphs, built in memory.

    The description in ``weights`` may be wrong: then so are the logits, or the graphs do not run.
    """
    from t5accel.graphs.layers import decoder_graph, encoder_graph  # onnx, which the GPU suite does without

    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    encoder, decoder = (
        onnxruntime.InferenceSession(
            graph(weights).proto().SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        for graph in (encoder_graph, decoder_graph)
    )
    cross = kv_names("cross", weights.dims.decoder_layers)
    source = dict(input_ids=input_ids, attention_mask=attention_mask)
    found = dict(zip(cross, encoder.run(cross, source), strict=True))
    empty = step_feeds(weights.dims, batch=len(input_ids), past=0, source=input_ids.shape[1])
    return decoder.run(["logits"], {**empty, **source, **found, "input_ids": tokens[:, None]})[0][:, 0]
