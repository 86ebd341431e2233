"""What the ONNX Runtime backends hand out and take back: the encoder's work on a batch, and the state of a decoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from t5accel.backends.ort.memory import Spare
from t5accel.decoding.histories import Histories


@dataclass(frozen=True)
class OrtSource:
    """The encoder's work on B sources.

    Attributes:
        inputs: what the decoder is handed for it at every step, by name, as its backend holds tensors: keys and values
            of cross-attention, each (B, H_i, S, d_kv), and ``attention_mask`` (B, S).
        mask: (B, S) int64, on the host.
    """

    inputs: dict[str, Any]
    mask: np.ndarray


@dataclass
class OrtState:
    """A decoder state: which source, how long each row's past is, and the keys and values of self-attention.

    Attributes:
        past: layer by layer, each (B, K, H_i, P, d_kv), as the backend holds tensors.
        binding: of `bound` and `pointers`, to which the source's tensors are bound.
        spare: for reordered pasts on the host.
        token: (B, K) int64, of `captured`: chosen and not read yet.
    """

    source: OrtSource
    rows: Histories
    past: list[Any]
    binding: Any = field(default=None, repr=False)
    spare: Spare = field(default_factory=Spare, repr=False)
    token: np.ndarray | None = None
