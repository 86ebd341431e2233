"""Memory that is used again. Fresh memory costs a page fault for every few kilobytes of it, and many times as much on a
virtual machine that has to ask its host for the page.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence

import numpy as np


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
