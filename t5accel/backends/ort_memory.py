"""How memory is used: again, for fresh memory costs a page fault for every few kilobytes; on huge pages; and in slices.

**Again.** On a virtual machine that has to ask its host for each page, fresh memory costs many times as much (`Pool`,
`Spare`).

**On huge pages**, where Linux lets a process ask for them. A decoding step reads every weight of the decoder once. On
pages of 4 KiB the processor has to look up an address every four kilobytes, on pages of 2 MiB hardly ever, and reading
gets faster. ONNX Runtime allocates its packed weights with plain ``malloc``, which most systems back with small pages;
so we ask for the exchange once they are there (``MADV_COLLAPSE``, Linux 6.1). It takes about a millisecond per
megabyte, once (`huge_pages`).

**In slices.** A large batch is encoded a few rows at a time. The scores of attention grow with the square of the
source, (B, H, S, S): of 32 sources of 512 tokens they are 268 MB in every layer, written and read several times. Of a
few rows they stay in the processor's caches (`encode_in_slices`).
"""

from __future__ import annotations

import ctypes
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

RunInto = Callable[[Mapping[str, np.ndarray], Mapping[str, np.ndarray]], None]


class Pool:
    """One set of large arrays, handed out again once nobody holds any of them.

    What is handed out holds a reference to the memory, and so does whatever is sliced from it: the memory is free when
    it has no more references than it was made with. Threads may share a pool. It keeps the last set until
    it goes itself.

    >>> pool = Pool()
    >>> first = pool.arrays([(2, 3)], np.float32)
    >>> first[0][:] = 7
    >>> part = first[0][1, :2]
    >>> del first
    >>> second = pool.arrays([(2, 3)], np.float32)  # `part` still holds the memory: this is another
    >>> second[0][:] = 8
    >>> address = second[0].ctypes.data
    >>> del second
    >>> part.tolist(), pool.arrays([(3, 1)], np.float32)[0].ctypes.data == address
    ([7.0, 7.0], True)
    """

    def __init__(self) -> None:
        self._memory: list[np.ndarray] = []
        self._unused: list[int] = []
        self._lock = threading.Lock()

    def arrays(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype | type) -> list[np.ndarray]:
        """Contiguous arrays of these shapes, which hold whatever there was."""
        sizes = [math.prod(shape) for shape in shapes]
        with self._lock:
            if not self._fits(sizes, np.dtype(dtype)):
                self._memory = [np.empty(size, dtype) for size in sizes]
                self._unused = _references(self._memory)
            return [
                memory[:size].reshape(shape) for memory, size, shape in zip(self._memory, sizes, shapes, strict=True)
            ]

    def unused(self) -> list[int]:
        """The sizes of the set that would be handed out again, empty if there is none that nobody holds."""
        with self._lock:
            return [memory.size for memory in self._memory] if _references(self._memory) == self._unused else []

    def _fits(self, sizes: Sequence[int], dtype: np.dtype) -> bool:
        same = len(sizes) == len(self._memory) and all(memory.dtype == dtype for memory in self._memory)
        large = same and all(memory.size >= size for memory, size in zip(self._memory, sizes, strict=True))
        return large and _references(self._memory) == self._unused


class Spare:
    """Memory that rows are gathered into again and again: fresh memory costs a page fault for every 4 KB of it.

    What was gathered is handed to the next step, whose results lie elsewhere; after it the memory is free again.

    >>> spare, past = Spare(), [np.array([[1.0], [2.0]])]
    >>> first = spare.gathered(past, [np.array([1, 1])])
    >>> second = spare.gathered(first, [np.array([0])])  # `first` is in use, so it is not written to
    >>> first[0].tolist(), second[0].tolist()
    ([[2.0], [2.0]], [[2.0]])
    """

    def __init__(self) -> None:
        self._memory: list[np.ndarray] = []  # one flat array for each that is gathered

    def gathered(self, arrays: Sequence[np.ndarray], indices: Sequence[np.ndarray]) -> list[np.ndarray]:
        """``[array[index] for array, index in …]``, of numbers (n,) each, in memory that none of the arrays uses."""
        self._memory += [np.empty(0, array.dtype) for array in arrays[len(self._memory) :]]
        results = []
        for number, (array, index) in enumerate(zip(arrays, indices, strict=True)):
            shape = (index.size, *array.shape[1:])
            size, memory = math.prod(shape), self._memory[number]
            if memory.size < size or np.may_share_memory(memory, array):
                memory = self._memory[number] = np.empty(2 * size, array.dtype)  # as a past grows by every step
            result = memory[:size].reshape(shape)
            results.append(
                array.take(index, axis=0, out=result, mode="clip")
            )  # other modes write to fresh memory first
        return results


def _references(arrays: Sequence[np.ndarray]) -> list[int]:
    """How many each has, those of this function included."""
    return [sys.getrefcount(array) for array in arrays]


MAPS, MEMORY = Path("/proc/self/maps"), Path("/proc/self/smaps_rollup")
PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
MADV_COLLAPSE = 25
# Smaller pieces hold no weights: a thread's stack has 8 MiB, and would be made whole by this.
SMALLEST = 16 << 20

Range = tuple[int, int]  # of addresses, the second one excluded


@contextmanager
def huge_pages(enabled: bool = True) -> Iterator[None]:
    """What is allocated in the ``with`` block, and still there at its end, is moved to huge pages.

    Where the system declines (it is not Linux 6.1 or later, huge pages are switched off, memory is in pieces) the pages
    stay as they are: results never depend on it, and `huge_bytes` tells. What other threads allocate meanwhile may be
    moved, too.

    >>> with huge_pages():
    ...     weights = bytearray(64 << 20)
    >>> huge_bytes() >= 0
    True
    """
    before = _private_memory() if enabled else []
    yield
    if enabled:
        for start, end in _private_memory():
            for first, last in _without(before, start, end):
                _collapse(first, last)


def huge_bytes() -> int:
    """How much of this process's own memory lies on huge pages; 0 where that cannot be told."""
    try:
        found = re.search(r"^AnonHugePages:\s+(\d+) kB", MEMORY.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def _private_memory() -> list[Range]:
    """The writable ranges of this process that no file lies behind."""
    try:
        lines = MAPS.read_text().splitlines()
    except OSError:
        return []
    found = (re.fullmatch(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0\s*(?:\[heap\])?", line) for line in lines)
    return [(int(match[1], 16), int(match[2], 16)) for match in found if match]


def _without(before: list[Range], start: int, end: int) -> list[Range]:
    """What of ``start`` … ``end`` none of the ranges ``before``, which are sorted, covers: it is new.

    >>> _without([(2, 3), (5, 9)], 0, 7)
    [(0, 2), (3, 5)]
    """
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
    """Whole huge pages within ``start`` … ``end``. A refusal costs nothing but the speed, and is no error."""
    if sys.platform != "linux" or end - start < SMALLEST or not PAGE_SIZE.exists():
        return
    page = int(PAGE_SIZE.read_text())
    first, last = -(-start // page) * page, end // page * page
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.madvise(first, last - first, MADV_COLLAPSE)


# Of 512 to 4,096 the fastest for sources of 128 and of 512 tokens. Smaller batches are encoded at once.
TOKENS = 2048


def encode_in_slices(run_into: RunInto, ids: np.ndarray, mask: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
    """Run an encoder on slices of (B, S) sources, each as long as its own longest row.

    Args:
        run_into: computes the arrays of its second argument from ``input_ids`` and ``attention_mask``, int64.
        ids, mask: contiguous, int64.
        arrays: by the names of what is computed, where that goes: (B, H, S, d_kv) each, contiguous. A slice of full
            length is written where it belongs, without a copy; behind a shorter one there are zeros.

    >>> def doubled(inputs, outputs):
    ...     outputs["cross_key_0"][:] = 2 * inputs["input_ids"][:, None, :, None]
    >>> ids, keys = np.full((8, 512), 9), np.empty((8, 1, 512, 1))
    >>> encode_in_slices(doubled, ids, np.ones_like(ids), {"cross_key_0": keys})
    >>> float(keys.min()), float(keys.max())
    (18.0, 18.0)
    """
    batch, length = ids.shape
    rows_at_once = max(1, TOKENS // length)
    for first in range(0, batch, rows_at_once):
        rows = slice(first, first + rows_at_once)
        longest = 1 + np.flatnonzero(mask[rows].any(axis=0)).max(initial=0)
        inputs = {
            "input_ids": np.ascontiguousarray(ids[rows, :longest]),
            "attention_mask": np.ascontiguousarray(mask[rows, :longest]),
        }
        places = {name: array[rows, :, :longest] for name, array in arrays.items()}
        if longest == length:
            run_into(inputs, places)
            continue
        parts = {name: np.empty(place.shape, place.dtype) for name, place in places.items()}
        run_into(inputs, parts)
        for name, array in arrays.items():
            array[rows, :, :longest], array[rows, :, longest:] = parts[name], 0


def run_into(session: InferenceSession, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None:
    """Run a session whose results are written to these arrays, which are contiguous."""
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_cpu_input(name, array)
    for name, array in outputs.items():
        binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    session.run_with_iobinding(binding)
