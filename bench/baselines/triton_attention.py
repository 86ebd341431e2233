"""Attention of one query per row as one Triton kernel: writes the cache, adds biases, masks.

PyTorch's attention is three kernels for a step of one token, and reads all places. Here every row and head is a program
that reads only the real ones. With ``TRITON_INTERPRET=1`` it runs on a CPU, slowly, for tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch.nn import functional

from t5accel.backends.torch_static import TorchStatic
from t5accel.backends.torch_static_buffers import StaticBuffers
from t5accel.backends.torch_static_model import StaticT5
from t5accel.errors import InputError
from t5accel.models.sizes import require_t5

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK = 64  # places that are read together


@triton.jit
def _online_softmax(scores, real, where, running_max, total, acc):
    """The running softmax after a block: its largest score, the sum of weights, and the weighted sum of values."""
    scores = tl.where(real, scores, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(scores, 0))
    weights, rescale = tl.exp(scores - new_max), tl.exp(running_max - new_max)
    values = tl.load(where, mask=real[:, None], other=0.0).to(tl.float32)
    return new_max, total * rescale + tl.sum(weights, 0), acc * rescale + tl.sum(weights[:, None] * values, 0)


@triton.jit
def _self_attention_kernel(
    projected, keys, values, lengths, biases, out, heads, width, columns, d: tl.constexpr, block: tl.constexpr
):
    row, head = tl.program_id(0), tl.program_id(1)
    dims, last = tl.arange(0, d), tl.load(lengths + row).to(tl.int32)
    here = ((row * 3) * heads + head) * d + dims  # projected: (R, 3, H, d)
    query = tl.load(projected + here).to(tl.float32)
    key, value = tl.load(projected + here + heads * d), tl.load(projected + here + 2 * heads * d)
    start = (row * heads + head) * width * d  # keys and values: (R, H, W, d)
    tl.store(keys + start + last * d + dims, key)
    tl.store(values + start + last * d + dims, value)
    # The new position, whose key need not be read again, begins the running softmax.
    running_max = tl.sum(query * key.to(tl.float32), 0) + tl.load(biases + head * columns + 1).to(tl.float32)
    total, acc = 1.0, value.to(tl.float32)
    for first in range(0, last, block):
        places = first + tl.arange(0, block)
        real = places < last
        index = start + places[:, None] * d + dims[None, :]
        distance = tl.minimum(last - places + 1, columns - 1)  # column 0 is the future's, which is not read
        scores = tl.sum(query[None, :] * tl.load(keys + index, mask=real[:, None], other=0.0).to(tl.float32), 1)
        scores += tl.load(biases + head * columns + distance, mask=real, other=0.0).to(tl.float32)
        running_max, total, acc = _online_softmax(scores, real, values + index, running_max, total, acc)
    tl.store(out + (row * heads + head) * d + dims, (acc / total).to(out.dtype.element_ty))


@triton.jit
def _cross_attention_kernel(
    queries, keys, values, bias, out, heads, source, rows, d: tl.constexpr, block: tl.constexpr
):
    row, head = tl.program_id(0), tl.program_id(1)
    text, dims = row // rows, tl.arange(0, d)
    query = tl.load(queries + (row * heads + head) * d + dims).to(tl.float32)
    start = (text * heads + head) * source * d  # keys and values: (B, H, S, d)
    running_max, total, acc = float("-inf"), 0.0, tl.zeros((d,), tl.float32)
    for first in range(0, source, block):
        places = first + tl.arange(0, block)
        real = places < source
        index = start + places[:, None] * d + dims[None, :]
        scores = tl.sum(query[None, :] * tl.load(keys + index, mask=real[:, None], other=0.0).to(tl.float32), 1)
        scores += tl.load(bias + text * source + places, mask=real, other=0.0).to(tl.float32)
        running_max, total, acc = _online_softmax(scores, real, values + index, running_max, total, acc)
    tl.store(out + (row * heads + head) * d + dims, (acc / total).to(out.dtype.element_ty))


def self_attention(
    projected: torch.Tensor, memory: torch.Tensor, lengths: torch.Tensor, biases: torch.Tensor
) -> torch.Tensor:
    """Append a position to every row and attend to all of it: (R, H * d). All tensors but ``lengths`` are contiguous.

    Args:
        projected: (R, 3, H, d): the new position's query, key and value. d is a power of two.
        memory: (2, R, H, W, d): the row's keys and values; the new ones are written at ``lengths``.
        lengths: (R,) int64, how many positions are real before this one, below W.
        biases: (H, distances + 1): column 1 + n is added at distance n; the last column holds for all beyond.
    """
    rows, _, heads, d = projected.shape
    out = torch.empty((rows, heads * d), dtype=projected.dtype, device=projected.device)
    _self_attention_kernel[(rows, heads)](
        projected, memory[0], memory[1], lengths, biases, out, heads, memory.shape[3], biases.shape[1], d, BLOCK
    )
    return out


def cross_attention(queries: torch.Tensor, memory: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Attend to the sources, of which K = R / B rows share one: (R, H * d). All tensors are contiguous.

    Args:
        queries: (R, H, d). d is a power of two.
        memory: (2, B, H, S, d).
        bias: (B, 1, 1, S): added to scores; a large negative number where there is no token.
    """
    rows, heads, d = queries.shape
    batch, source = memory.shape[1], memory.shape[3]
    out = torch.empty((rows, heads * d), dtype=queries.dtype, device=queries.device)
    _cross_attention_kernel[(rows, heads)](
        queries, memory[0], memory[1], bias, out, heads, source, rows // batch, d, BLOCK
    )
    return out


class TritonT5(StaticT5):
    """`StaticT5` whose steps of one token attend by these kernels in place of PyTorch's operators."""

    def __init__(self, model: PreTrainedModel):
        require_t5(model.config, type(model).__name__)
        super().__init__(model)
        if self.dims.d_kv & (self.dims.d_kv - 1):
            raise InputError(f"d_kv must be a power of two for our kernel, got {self.dims.d_kv}: use TorchStatic.")

    def read(self, buffers: StaticBuffers, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.shape[1] > 1:
            return super().read(buffers, tokens)
        heads, hidden = (-1, self.dims.d_kv), self._embed(self.decoder, tokens, buffers.lengths[:, None])
        caches = zip(self.decoder.layers, buffers.self_kv.layers, buffers.cross_kv.layers, strict=True)
        for layer, self_kv, cross_kv in caches:
            projected = functional.linear(self._before(hidden, layer.norms[0])[:, 0], *layer.qkv)
            attended = self_attention(projected.unflatten(-1, (3, *heads)), self_kv, buffers.lengths, layer.biases)
            hidden = self._after(hidden, attended, layer.o, layer.norms[0])
            query = functional.linear(self._before(hidden, layer.norms[1])[:, 0], *layer.cross_q).unflatten(-1, heads)
            attended = cross_attention(query, cross_kv, buffers.source_bias)
            hidden = self._after(hidden, attended, layer.cross_o, layer.norms[1])
            hidden = self._feed_forward(hidden, layer)
        buffers.lengths.add_(1)
        return self._before(hidden, self.decoder.last_norm)


class TorchTriton(TorchStatic):
    """`TorchStatic` over `TritonT5`."""

    def __init__(self, model: PreTrainedModel, **options: Any):
        super().__init__(model, **options)
        self.decoder = TritonT5(model)
