"""Buffers and their reuse, huge pages for weights, and encoding large batches in slices."""

from __future__ import annotations

import ctypes
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

RunInto = Callable[[Mapping[str, np.ndarray], Mapping[str, np.ndarray]], None]
PendingCopy = tuple[np.ndarray, Any, np.ndarray]  # the array, where in it, and the new values

# Buffers are used again because fresh memory costs a page fault for every 4 KB, many times as much on virtual machines.


class BufferPool:
    """One set of large arrays, handed out again once nothing refers to them. Threads may share it.

    >>> pool = BufferPool()
    >>> first = pool.arrays([(2, 3)], np.float32)
    >>> part, address = first[0][1, :2], first[0].ctypes.data
    >>> del first
    >>> pool.arrays([(2, 3)], np.float32)[0].ctypes.data == address  # `part` still refers to the memory
    False
    """

    def __init__(self) -> None:
        self._memory: list[np.ndarray] = []
        self._free_counts: list[int] = []  # references to the arrays while nobody else holds any
        self._lock = threading.Lock()

    def arrays(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype | type) -> list[np.ndarray]:
        """Contiguous arrays of these shapes, with arbitrary contents."""
        sizes = [math.prod(shape) for shape in shapes]
        with self._lock:
            if not self._fits(sizes, np.dtype(dtype)):
                self._memory = [np.empty(size, dtype) for size in sizes]
                self._free_counts = _references(self._memory)
            # What is sliced from an array refers to its memory, too.
            return [
                memory[:size].reshape(shape) for memory, size, shape in zip(self._memory, sizes, shapes, strict=True)
            ]

    def unused(self) -> list[int]:
        """The sizes of the arrays that would be handed out again; empty while they are in use."""
        with self._lock:
            is_free = _references(self._memory) == self._free_counts
            return [memory.size for memory in self._memory] if is_free else []

    def _fits(self, sizes: Sequence[int], dtype: np.dtype) -> bool:
        held = self._memory
        large = len(sizes) == len(held) and all(array.size >= size for array, size in zip(held, sizes, strict=True))
        return large and all(array.dtype == dtype for array in held) and _references(held) == self._free_counts


@dataclass
class KVBuffers:
    """The past of R rows in M columns, and the other arrays that a step reads and writes."""

    # By H, keys and values in turn of all layers with H heads: (n, R', H, M, d_kv) float32, R' >= R.
    capacity: dict[int, np.ndarray]
    mask: np.ndarray  # (R, M) int32, 0 in front of a row's past
    source_mask: np.ndarray  # (B, S) int32
    tokens: np.ndarray  # (R, 1) int64
    length: np.ndarray  # (1,) int32, the column that the step writes
    results: dict[str, np.ndarray]  # the graph's outputs, by name
    padding: np.ndarray | None = None  # of the `PastLengths` that both masks show
    pending_copies: list[PendingCopy] = field(default_factory=list, repr=False)
    bindings: dict[str, tuple[Any, list[Any]]] = field(default_factory=dict, repr=False)

    @property
    def kv(self) -> dict[int, np.ndarray]:
        """The rows of ``capacity`` in use: (n, R, H, M, d_kv) each."""
        return {heads: group[:, : len(self.tokens)] for heads, group in self.capacity.items()}

    def flush(self) -> None:
        """Write the pending copies. Safe to interrupt and call again."""
        while self.pending_copies:
            array, where, new = self.pending_copies[-1]
            array[where] = new
            self.pending_copies.pop()


class ScratchBuffer:
    """Memory that rows are gathered into at every reordering; a step writes the next past elsewhere."""

    def __init__(self) -> None:
        self._memory: list[np.ndarray] = []  # one flat array for each gathered one

    def gather(self, arrays: Sequence[np.ndarray], indices: Sequence[np.ndarray]) -> list[np.ndarray]:
        """``[array[index] for array, index in …]``, of numbers (n,) each, in memory that none of the arrays uses."""
        self._memory += [np.empty(0, array.dtype) for array in arrays[len(self._memory) :]]
        results = []
        for number, (array, index) in enumerate(zip(arrays, indices, strict=True)):
            shape = (index.size, *array.shape[1:])
            size, memory = math.prod(shape), self._memory[number]
            if memory.size < size or np.may_share_memory(memory, array):
                memory = self._memory[number] = np.empty(2 * size, array.dtype)  # a past grows by every step
            # Modes other than "clip" write to fresh memory first.
            results.append(array.take(index, axis=0, out=memory[:size].reshape(shape), mode="clip"))
        return results


def _references(arrays: Sequence[np.ndarray]) -> list[int]:
    return [sys.getrefcount(array) for array in arrays]  # this function's own references included


# A decoding step reads every weight of the decoder once. On pages of 2 MiB the processor looks up far fewer addresses
# than on pages of 4 KiB. ONNX Runtime allocates packed weights by plain malloc, which most systems back with small
# pages, so they are exchanged once they are there. That takes about a millisecond per megabyte, once.

MAPS = Path("/proc/self/maps")
PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
MADV_COLLAPSE = 25  # Linux 6.1
MIN_COLLAPSED_BYTES = 16 << 20  # smaller pieces hold no weights; a thread's stack of 8 MiB would be made resident


@contextmanager
def huge_pages(enabled: bool = True) -> Iterator[None]:
    """Move what is allocated in the ``with`` block, and still there at its end, to huge pages.

    Where the system declines, the pages stay as they are. What other threads allocate meanwhile may move, too.
    """
    before = _private_memory() if enabled else []
    yield
    if enabled:
        for start, end in _private_memory():
            for first, last in _without(before, start, end):
                _collapse(first, last)


def _private_memory() -> list[tuple[int, int]]:
    """The writable address ranges of this process that no file lies behind."""
    try:
        lines = MAPS.read_text().splitlines()
    except OSError:
        return []
    found = (re.fullmatch(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0\s*(?:\[heap\])?", line) for line in lines)
    return [(int(match[1], 16), int(match[2], 16)) for match in found if match]


def _without(before: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """The parts of ``start`` … ``end`` that no range of ``before``, which is sorted, covers."""
    new, reached = [], start
    for first, last in before:
        if last <= reached or first >= end:
            continue
        if first > reached:
            new.append((reached, first))
        reached = last
    if reached < end:
        new.append((reached, end))
    return new


def _collapse(start: int, end: int) -> None:
    """Exchange the whole huge pages within ``start`` … ``end``. The system may refuse, which is no error."""
    if sys.platform != "linux" or end - start < MIN_COLLAPSED_BYTES or not PAGE_SIZE.exists():
        return
    page = int(PAGE_SIZE.read_text())
    first, last = -(-start // page) * page, end // page * page
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.madvise(first, last - first, MADV_COLLAPSE)


# Attention scores grow with the square of the source: of 32 sources of 512 tokens they are 268 MB in every layer. Those
# of a few rows stay in the processor's caches. Of 512 to 4,096 this is the fastest for sources of 128 and 512 tokens.
SLICE_TOKENS = 2048
CALL_TOKENS = 32  # an encoder call takes about as long as so many more tokens of another one


def length_slices(mask: np.ndarray, most_tokens: int) -> list[tuple[np.ndarray, int]]:
    """The cheapest slices of a (B, S) mask's rows, longest first, and the columns that each needs.

    >>> length_slices(np.array([[1, 1] + [0] * 98, [1] * 100, [1] * 3 + [0] * 97]), 2048)
    [(array([1]), 100), (array([2, 0]), 3)]
    """
    lengths = ((mask != 0) * np.arange(1, mask.shape[1] + 1)).max(axis=1).clip(1)
    order = np.argsort(-lengths, kind="stable")
    widths, costs, begins = lengths[order].tolist(), [0], []
    for end in range(1, len(order) + 1):
        # Of the first `end` rows, where the last slice begins: at one row, or at what fits and costs least in all.
        cost, begin = costs[end - 1] + widths[end - 1] + CALL_TOKENS, end - 1
        for earlier in range(end - 2, -1, -1):
            tokens = (end - earlier) * widths[earlier]
            if tokens > most_tokens:
                break
            if (other := costs[earlier] + tokens + CALL_TOKENS) <= cost:
                cost, begin = other, earlier
        costs.append(cost)
        begins.append(begin)
    slices, end = [], len(order)
    while end:
        begin = begins[end - 1]
        slices.append((order[begin:end], widths[begin]))
        end = begin
    return slices[::-1]


def encode_in_slices(
    run_into: RunInto, ids: np.ndarray, mask: np.ndarray, arrays: Mapping[str, np.ndarray],
    slices: Sequence[tuple[np.ndarray, int]],
) -> None:  # fmt: skip
    """Run an encoder on `length_slices` of (B, S) sources.

    ``run_into(inputs, outputs)`` computes some rows of ``arrays``, contiguous (B, H, S, d_kv) by output name. Behind a
    shorter slice they become zero.
    """
    for rows, longest in slices:
        inputs = {
            "input_ids": np.ascontiguousarray(ids[rows, :longest]),
            "attention_mask": np.ascontiguousarray(mask[rows, :longest]),
        }
        together = slice(rows[0], rows[-1] + 1)
        if longest == ids.shape[1] and (np.diff(rows) == 1).all():  # contiguous: no copy
            run_into(inputs, {name: array[together] for name, array in arrays.items()})
            continue
        parts = {
            name: np.empty((len(rows), array.shape[1], longest, *array.shape[3:]), array.dtype)
            for name, array in arrays.items()
        }
        run_into(inputs, parts)
        for name, array in arrays.items():
            array[rows, :, :longest], array[rows, :, longest:] = parts[name], 0


def run_into(session: InferenceSession, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None:
    """Run a session that writes its results to these contiguous arrays."""
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_cpu_input(name, array)
    for name, array in outputs.items():
        binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    session.run_with_iobinding(binding)
