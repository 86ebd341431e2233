"""What a step asks of a device: operators and kernels counted, and what launching one costs.

A small decoder on a large GPU waits for the host, which takes longer to ask for a kernel than the GPU to run it. So the
least time of a step is a number of launches times the price of one, plus the bytes it reads over the bandwidth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from t5accel.backends.cuda_graphs import captured
from t5accel.timing import measure

_NO_KERNEL = ("aten.empty", "aten.detach", "aten.lift_fresh", "aten._unsafe_view", "aten.is_same_size")
_ONE_KERNEL = ("aten.rms_norm",)  # on a GPU; on a CPU it is made of six


def operators(run: Callable[[], Any]) -> Counter[str]:
    """The operators that a function calls and that compute something, by name.

    Views (transposes, slices) are left out, and what only makes memory. On a GPU nearly all of the others launch one
    kernel: a prediction that needs no GPU. `kernels` counts what really ran.

    >>> x = torch.ones(2, 3)
    >>> dict(operators(lambda: (x.T @ x).relu()))
    {'aten.mm': 1, 'aten.relu': 1}
    """
    found: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(func.overloadpacket)
            if name not in _ONE_KERNEL:
                with self:  # what is made of other operators is seen as those
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
    """The kernels that a function runs on the GPU, by name, as torch's profiler sees them; copies count."""
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
    """What a GPU takes, in seconds: a kernel that the host asks for, one in a graph; and bytes read a second."""

    launch_s: float
    replayed_s: float
    bytes_per_s: float

    def floor_s(self, kernels: int, bytes_read: int) -> float:
        """The least time of a captured step.

        >>> found = Prices(launch_s=5e-6, replayed_s=1e-6, bytes_per_s=4e12).floor_s(kernels=100, bytes_read=80_000_000)
        >>> f"{found * 1e6:.0f} µs"
        '120 µs'
        """
        return kernels * self.replayed_s + bytes_read / self.bytes_per_s


def dependent(count: int, device: torch.device, width: int = 512) -> Callable[[], torch.Tensor]:
    """A row of small kernels as a step has them, norms and sums in turn, each of which reads what the last one wrote.

    An empty kernel would be too cheap a measure: in a graph one that does nothing takes about a microsecond, one that
    loads a few hundred numbers and reduces them two or three.

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
    """Measure them now: a row of `dependent` kernels, and a copy within the device.

    Args:
        device: a GPU.
        count: of kernels in a row.
        repeats: of which the median counts.
        size_bytes: that are copied, read and written; far more than its caches hold.
    """
    row = dependent(count, device)
    graph = captured(row, lambda: None, device)
    source = torch.ones(size_bytes // 4, device=device)
    target = torch.empty_like(source)
    launched, replayed, copied = (
        measure(run, repeats=repeats, synchronize=torch.cuda.synchronize).median_s
        for run in (row, graph.replay, lambda: target.copy_(source))
    )
    return Prices(launched / count, replayed / count, 2 * size_bytes / copied)
