"""What the ONNX Runtime backends hand out and take back: the encoder's work on a batch, and the state of a decoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from t5accel.decoding.histories import Histories


@dataclass(frozen=True)
class OrtSource:
    """The encoder's work on B sources.

    Attributes:
        inputs: what the decoder is handed for it at every step, by name, as its backend holds tensors: keys and values
            of cross-attention, each (B, H_i, S, d_kv), and ``attention_mask`` (B, S).
        mask: (B, S) int64, on the host.
        owner: the backend that encoded it.
    """

    inputs: dict[str, Any]
    mask: np.ndarray
    owner: Any


class Spare:
    """Memory that rows are gathered into again and again: fresh memory costs a page fault for every 4 KB of it.

    What was gathered is handed to the next step, whose results lie elsewhere; after it the memory is free again.

    >>> spare, past = Spare(), [np.array([[1.0], [2.0]])]
    >>> first = spare.gathered(past, np.array([1, 1]))
    >>> second = spare.gathered(first, np.array([0, 1]))  # `first` is in use, so it is not written to
    >>> first[0].tolist(), second[0].tolist()
    ([[2.0], [2.0]], [[2.0], [2.0]])
    """

    def __init__(self) -> None:
        self._memory: list[np.ndarray] = []  # one flat array for each that is gathered

    def gathered(self, arrays: list[np.ndarray], index: np.ndarray) -> list[np.ndarray]:
        """``[array[index] for array in arrays]``, where each stays as long, in memory that none of them uses."""
        self._memory += [np.empty(0, array.dtype) for array in arrays[len(self._memory) :]]
        results = []
        for number, array in enumerate(arrays):
            memory = self._memory[number]
            if memory.size < array.size or np.may_share_memory(memory, array):
                memory = self._memory[number] = np.empty(2 * array.size, array.dtype)  # as a past grows by every step
            result = memory[: array.size].reshape(array.shape)
            results.append(
                array.take(index, axis=0, out=result, mode="clip")
            )  # other modes write to fresh memory first
        return results


@dataclass
class OrtState:
    """A decoder state: which source, how long each row's past is, and the keys and values of self-attention.

    Attributes:
        past: layer by layer, each (B, K, H_i, P, d_kv), as the backend holds tensors.
        binding: of `ort_bound` and `ort_pointers`, to which the source's tensors are bound.
        spare: for reordered pasts on the host.
    """

    source: OrtSource
    rows: Histories
    past: list[Any]
    binding: Any = field(default=None, repr=False)
    spare: Spare = field(default_factory=Spare, repr=False)
