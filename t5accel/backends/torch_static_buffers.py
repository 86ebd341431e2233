"""Buffers that never move or grow, so that captured CUDA graphs can be replayed on them.

A graph holds addresses and sizes, so nothing may depend on the length of an answer: the KV cache has a place for every
position, each row knows how many places are real, and attention masks the others. The price is that it reads them all.
The gain: the host, which takes longer to launch a small decoder's kernels than a GPU to run them, launches a step once.
The idea is that of gpt-fast (PyTorch team 2023) and of transformers' StaticCache.

Shapes: B sources, K rows that share one, R = B * K, S source positions, W places for new positions, d = d_kv.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any, TypeVar

import torch

from t5accel.decoding.backend import SuppressedTokens

KEPT_BYTES = 4 * 2**30  # of buffers not in use, of encoders, of running rows, each with their graphs' own memory
MAX_QUEUED_STEPS = 64  # tokens that the buffers hold before the host has to read them
OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED")  # in other errors of CUDA and cuBLAS
Made = TypeVar("Made")
Method = TypeVar("Method", bound=Callable[..., Any])
WARM_UP_STEPS = 2  # before a graph is captured; libraries choose their kernels in them
_CAPTURING = threading.Lock()  # a graph would hold whatever another thread queues on the side stream meanwhile


@cache
def side_stream(device: torch.device) -> Any:
    """The one stream on which everything is warmed up and captured."""
    return torch.cuda.Stream(device)


@contextmanager
def plain_mode(device: torch.device) -> Iterator[None]:
    """Inference mode without autocast, whose casts a captured step would keep for later calls."""
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        yield


def in_plain_mode(method: Method) -> Method:
    """Run a method of an object with a ``device`` in `plain_mode`."""

    @wraps(method)
    def run(own: Any, *arguments: Any, **options: Any) -> Any:
        with plain_mode(own.device):
            return method(own, *arguments, **options)

    return run


@dataclass(frozen=True)
class CapturedGraph:
    """A captured step; ``size_bytes`` is its own memory, the workspace of its products included."""

    graph: Any
    size_bytes: int

    def replay(self) -> None:
        self.graph.replay()


def capture_graph(step: Callable[[], Any], undo: Callable[[], Any], device: torch.device) -> CapturedGraph:
    """Capture a step as a ``torch.cuda.CUDAGraph``, after a few steps of warming up on the `side_stream`.

    The step must keep to memory that stays and make the host wait for nothing. ``undo`` restores that memory after
    each step of warming up, also one that fails. Threads take turns; other work on the GPU goes on meanwhile.
    """
    with _CAPTURING, torch.cuda.device(device), plain_mode(device):
        current, side, graph = torch.cuda.current_stream(device), side_stream(device), torch.cuda.CUDAGraph()
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                for _ in range(WARM_UP_STEPS):
                    try:
                        step()
                    finally:
                        undo()
        finally:
            current.wait_stream(side)
        with _by_itself(), torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            before = torch.cuda.memory_reserved(device)
            step()
            size_bytes = torch.cuda.memory_reserved(device) - before
    return CapturedGraph(graph, size_bytes)


@contextmanager
def _by_itself() -> Iterator[None]:
    """Capture a graph whose products have a workspace of their own, and that no garbage collection disturbs."""
    # cuBLAS keeps one workspace for each stream. Graphs that share it would race, and torch frees it with the first of
    # them (pytorch/pytorch#193402). Freed before and behind a capture, it is made in the graph's own memory.
    free_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)  # a build for CPUs has none
    collects = gc.isenabled()
    gc.disable()  # a graph that is destroyed meanwhile invalidates the capture
    try:
        free_workspaces()
        yield
    finally:
        free_workspaces()
        if collects:
            gc.enable()


def made(make: Callable[[], Made], *unused: Any) -> Made:
    """What ``make`` returns, which may take the device's memory from the lists and dictionaries ``unused``."""
    try:
        return make()
    except RuntimeError as error:  # what its traceback holds is free only behind this clause
        if not (isinstance(error, torch.cuda.OutOfMemoryError) or any(said in str(error) for said in OUT_OF_MEMORY)):
            raise
    gc.collect()  # states in reference cycles give their buffers back
    for kept in unused:
        kept.clear()
    torch.cuda.empty_cache()
    return make()


class KVCache:
    """Keys and values of every layer in one piece of memory, so that one operator copies them all.

    ``memory`` is flat, by default new and zero with the dtype and device of ``options``; ``layers`` are its views
    (2, N, H_i, P, d), keys first.

    >>> cache = KVCache([4, 4], rows=2, places=8, width=3)
    >>> cache.layers[0].shape, cache.stacked()[0].shape
    (torch.Size([2, 2, 4, 8, 3]), torch.Size([4, 2, 4, 8, 3]))
    """

    def __init__(
        self, heads: Sequence[int], rows: int, places: int, width: int, *, memory: torch.Tensor | None = None,
        **options: Any,
    ):  # fmt: skip
        self._sizes = (tuple(heads), rows, places, width)
        counts = [2 * rows * count * places * width for count in heads]
        self.memory = torch.zeros(sum(counts), **options) if memory is None else memory
        shapes = [(2, rows, count, places, width) for count in heads]
        self.layers = [part.view(shape) for part, shape in zip(self.memory.split(counts), shapes, strict=True)]

    def stacked(self) -> list[torch.Tensor]:
        """Views (n, N, H, P, d) of all layers: a single one if all have as many heads."""
        if len({*self._sizes[0]}) > 1:
            return self.layers
        return [self.memory.view(-1, *self.layers[0].shape[1:])]

    def clone(self) -> KVCache:
        return KVCache(*self._sizes, memory=self.memory.clone())

    def copy_(self, other: KVCache) -> None:
        """Take over the other's first places; places beyond them become zero."""
        if self._sizes == other._sizes:
            self.memory.copy_(other.memory)
            return
        for held, new in zip(self.layers, other.layers, strict=True):
            held[:, :, :, : new.shape[3]] = new
            held[:, :, :, new.shape[3] :] = 0

    def gather_(self, other: KVCache, index: torch.Tensor) -> None:
        """Copy row ``index[i]`` of the other, which may be this one, into row i, as many places as both have."""
        for held, given in zip(self.stacked(), other.stacked(), strict=True):
            places = min(held.shape[3], given.shape[3])
            held[:, : len(index), :, :places] = given[:, :, :, :places].index_select(1, index)

    def scatter_(self, other: KVCache, into: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy those rows of the other, which may be this one and has no more places, into the rows ``into``."""
        for held, given in zip(self.stacked(), other.stacked(), strict=True):
            held[:, :, :, : given.shape[3]].index_copy_(1, into, given.index_select(1, rows))

    def rows(self, index: torch.Tensor) -> KVCache:
        """Only those rows, in new memory."""
        heads, _, places, width = self._sizes
        parts = [layer.index_select(1, index).flatten() for layer in self.layers]
        return KVCache(heads, len(index), places, width, memory=torch.cat(parts))


@dataclass(eq=False)
class StaticBuffers:
    """Memory for one batch of a given shape, at addresses that stay."""

    shape: tuple[int, int, int, int]  # (B, K, S, W)
    cross_kv: KVCache  # of the sources: N = B, P = S
    source_bias: torch.Tensor  # (B, 1, 1, S), 0 where a source has a token
    self_kv: KVCache  # of the positions read: N = R, P = W
    offsets: torch.Tensor  # (W,) int64, each place less one: a position minus that is their distance, plus one
    lengths: torch.Tensor  # (R,) int64, real positions of each row
    token: torch.Tensor  # (R, 1) int64, chosen and not read yet
    generated: torch.Tensor  # (R, MAX_QUEUED_STEPS) int64, the tokens of a run
    count: torch.Tensor  # (1,) int64, the steps of a run so far
    logits: torch.Tensor  # (R, V) float32, after the last position
    logit_bias: torch.Tensor  # (V,) float32, -inf for suppressed tokens
    graph: Any = field(default=None, repr=False)  # the captured `StaticT5.advance`
    loops: dict[Any, Any] = field(default_factory=dict, repr=False)  # `torch_static_loops.Loop` by its options

    @property
    def width(self) -> int:
        return self.shape[3]

    @property
    def size_bytes(self) -> int:
        graphs = (self.graph, *(loop.graph for loop in self.loops.values()))
        own = sum(graph.size_bytes for graph in graphs if graph is not None)
        return self.cross_kv.memory.nbytes + self.self_kv.memory.nbytes + self.logits.nbytes + own

    def begin_run(self, suppressed: SuppressedTokens) -> None:
        """Count steps from 0, in which these tokens are not chosen."""
        self.count.zero_()
        self.logit_bias.zero_()
        if suppressed is not None:
            self.logit_bias[torch.as_tensor(suppressed, device=self.logit_bias.device)] = -torch.inf

    def append(self, token: torch.Tensor) -> None:
        """Note down each row's next token, (R, 1)."""
        self.token.copy_(token)
        self.generated.scatter_(1, self.count.expand(len(token), 1), token)
        self.count.add_(1)
