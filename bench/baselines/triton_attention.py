"""Attention of one query per row as one kernel: writes the cache, adds biases, masks.

PyTorch's attention is three kernels for a step of one token, and reads all places. Here every row and head is a program
that reads only the real ones. Needs Triton; with ``TRITON_INTERPRET=1`` it runs on a CPU, slowly, for tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch.nn import functional

from t5accel.backends.torch_static import TorchStatic
from t5accel.backends.torch_static_model import Slot, StaticT5
from t5accel.errors import InputError
from t5accel.models.sizes import require_t5

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK = 64  # places that are looked at together


@triton.jit
def _taken_in(scores, real, where, most, total, mixed):
    """The running softmax after a block: its largest score, the sum of weights, and the weighted sum of values."""
    scores = tl.where(real, scores, float("-inf"))
    higher = tl.maximum(most, tl.max(scores, 0))
    weights, fade = tl.exp(scores - higher), tl.exp(most - higher)
    held = tl.load(where, mask=real[:, None], other=0.0).to(tl.float32)
    return higher, total * fade + tl.sum(weights, 0), mixed * fade + tl.sum(weights[:, None] * held, 0)


@triton.jit
def _own(projected, keys, values, lengths, biases, out, heads, width, columns, d: tl.constexpr, block: tl.constexpr):
    row, head = tl.program_id(0), tl.program_id(1)
    dims, last = tl.arange(0, d), tl.load(lengths + row).to(tl.int32)
    here = ((row * 3) * heads + head) * d + dims  # projected: (R, 3, H, d)
    query = tl.load(projected + here).to(tl.float32)
    key, value = tl.load(projected + here + heads * d), tl.load(projected + here + 2 * heads * d)
    start = (row * heads + head) * width * d  # keys and values: (R, H, W, d)
    tl.store(keys + start + last * d + dims, key)
    tl.store(values + start + last * d + dims, value)
    # The new position, whose key need not be read again, begins the running softmax.
    most = tl.sum(query * key.to(tl.float32), 0) + tl.load(biases + head * columns + 1).to(tl.float32)
    total, mixed = 1.0, value.to(tl.float32)
    for first in range(0, last, block):
        places = first + tl.arange(0, block)
        real = places < last
        index = start + places[:, None] * d + dims[None, :]
        distance = tl.minimum(last - places + 1, columns - 1)  # column 0 is the future's, which is not looked at
        scores = tl.sum(query[None, :] * tl.load(keys + index, mask=real[:, None], other=0.0).to(tl.float32), 1)
        scores += tl.load(biases + head * columns + distance, mask=real, other=0.0).to(tl.float32)
        most, total, mixed = _taken_in(scores, real, values + index, most, total, mixed)
    tl.store(out + (row * heads + head) * d + dims, (mixed / total).to(out.dtype.element_ty))


@triton.jit
def _cross(query, keys, values, bias, out, heads, source, rows, d: tl.constexpr, block: tl.constexpr):
    row, head = tl.program_id(0), tl.program_id(1)
    text, dims = row // rows, tl.arange(0, d)
    asked = tl.load(query + (row * heads + head) * d + dims).to(tl.float32)
    start = (text * heads + head) * source * d  # keys and values: (B, H, S, d)
    most, total, mixed = float("-inf"), 0.0, tl.zeros((d,), tl.float32)
    for first in range(0, source, block):
        places = first + tl.arange(0, block)
        there = places < source
        index = start + places[:, None] * d + dims[None, :]
        scores = tl.sum(asked[None, :] * tl.load(keys + index, mask=there[:, None], other=0.0).to(tl.float32), 1)
        scores += tl.load(bias + text * source + places, mask=there, other=0.0).to(tl.float32)
        most, total, mixed = _taken_in(scores, there, values + index, most, total, mixed)
    tl.store(out + (row * heads + head) * d + dims, (mixed / total).to(out.dtype.element_ty))


def attend_own(
    projected: torch.Tensor, memory: torch.Tensor, lengths: torch.Tensor, biases: torch.Tensor
) -> torch.Tensor:
    """Append a position to every row and attend to all of it.

    Args:
        projected: (R, 3, H, d), contiguous: the new position's query, key and value. d is a power of two.
        memory: (2, R, H, W, d), contiguous: the row's keys and values; the new ones are written at ``lengths``.
        lengths: (R,) int64, how many positions are real before this one, below W.
        biases: (H, distances + 1): in column 1 + n what is added at distance n; the last column holds for all beyond.

    Returns:
        (R, H * d).
    """
    rows, _, heads, d = projected.shape
    out = torch.empty((rows, heads * d), dtype=projected.dtype, device=projected.device)
    _own[(rows, heads)](projected, memory[0], memory[1], lengths, biases, out, heads, memory.shape[3], biases.shape[1],
                        d, BLOCK)  # fmt: skip
    return out


def attend_cross(query: torch.Tensor, memory: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Attend to the sources: K = R / B rows share one.

    Args:
        query: (R, H, d), contiguous. d is a power of two.
        memory: (2, B, H, S, d), contiguous.
        bias: (B, 1, 1, S), contiguous: added to scores; a large negative number where there is no token.

    Returns:
        (R, H * d).
    """
    rows, heads, d = query.shape
    batch, source = memory.shape[1], memory.shape[3]
    out = torch.empty((rows, heads * d), dtype=query.dtype, device=query.device)
    _cross[(rows, heads)](query, memory[0], memory[1], bias, out, heads, source, rows // batch, d, BLOCK)
    return out


class TritonT5(StaticT5):
    """`StaticT5` whose steps of one token attend by these kernels in place of PyTorch's operators.

    Raises:
        InputError: the size of a head is no power of two.
        NotT5Error: the model is of another family.
    """

    def __init__(self, model: PreTrainedModel):
        require_t5(model.config, type(model).__name__)
        super().__init__(model)
        if self.dims.d_kv & (self.dims.d_kv - 1):
            raise InputError(f"d_kv must be a power of two for our kernel, got {self.dims.d_kv}: use TorchStatic.")

    def read(self, slot: Slot, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.shape[1] > 1:
            return super().read(slot, tokens)
        heads, hidden = (-1, self.dims.d_kv), self._embedded(self.decoder, tokens, slot.lengths[:, None])
        for layer, own, cross in zip(self.layers, slot.own.layers, slot.cross.layers, strict=True):
            projected = functional.linear(self._before(hidden, layer.norms[0])[:, 0], *layer.qkv)
            found = attend_own(projected.unflatten(-1, (3, *heads)), own, slot.lengths, layer.biases)
            hidden = self._after(hidden, found, layer.o, layer.norms[0])
            query = functional.linear(self._before(hidden, layer.norms[1])[:, 0], *layer.cross_q).unflatten(-1, heads)
            hidden = self._after(hidden, attend_cross(query, cross, slot.source_bias), layer.cross_o, layer.norms[1])
            hidden = self._feed_forward(hidden, layer)
        slot.lengths.add_(1)
        return self._before(hidden, self.decoder.last_norm)


class TorchTriton(TorchStatic):
    """`TorchStatic` over `TritonT5`."""

    runs = TritonT5
