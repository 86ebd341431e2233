"""Round weights to integers, with a scale for each block or for each output channel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from t5accel.errors import InputError

SHRUNK = np.linspace(1.0, 0.75, 11, dtype=np.float32)  # factors of the scale that reaches a block's largest weight
ROWS_AT_ONCE = 2048  # bounds the memory of intermediate results


@dataclass(frozen=True)
class QuantizedBlocks:
    """A weight (N, K) with a scale for each block of one output, as MatMulNBits takes it.

    ``integers`` are (N, blocks, bytes of a block) uint8, two of 4 bits in a byte, the first one low, with the zero
    point 2 ** (bits - 1). ``scales`` are (N, blocks) float32.
    """

    integers: np.ndarray
    scales: np.ndarray
    bits: int
    block_size: int

    def floats(self) -> np.ndarray:
        """Dequantised, (N, K); wider where the last block was padded with zeros."""
        codes = self.integers
        if self.bits == 4:
            codes = np.stack([codes & 15, codes >> 4], axis=-1)
        centred = codes.reshape(*self.scales.shape, self.block_size).astype(np.float32) - (1 << (self.bits - 1))
        return (centred * self.scales[:, :, None]).reshape(len(self.scales), -1)


def quantize_blocks(weight: np.ndarray, bits: int, block_size: int) -> QuantizedBlocks:
    """Round (N, K) float32 weights in blocks of ``block_size`` along K.

    >>> blocks = quantize_blocks(np.array([[-8.0, 7.0, 0.5, 0.0]], np.float32), bits=4, block_size=16)
    >>> blocks.floats()[0, :4].tolist(), blocks.scales.tolist()
    ([-8.0, 7.0, 0.0, 0.0], [[1.0]])
    """
    _check(weight)
    outputs, inputs = weight.shape
    count, half = -(-inputs // block_size), 1 << (bits - 1)
    integers = np.empty((outputs, count, block_size * bits // 8), dtype=np.uint8)
    scales = np.empty((outputs, count), dtype=np.float32)
    for first in range(0, outputs, ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        part = np.zeros((len(weight[rows]), count * block_size), dtype=np.float32)
        part[:, :inputs] = weight[rows]
        part = part.reshape(len(part), count, block_size)
        # Levels reach from -half to half - 1. A negative scale gives the largest weight, whatever its sign, the level
        # that has no opposite.
        extreme = np.take_along_axis(part, np.abs(part).argmax(axis=2)[:, :, None], axis=2)
        scale = extreme / np.float32(-half)
        best, lost = scale, np.full(scale.shape, np.inf, dtype=np.float32)
        # In 4 bits, reaching a single large weight wastes levels: take the scale with the least squared error.
        for share in SHRUNK if bits == 4 else SHRUNK[:1]:
            tried = scale * share
            with np.errstate(over="ignore"):  # where squares overflow 32 bits, the first scale is taken
                error = np.square(_levels(part, tried, half) * tried - part).sum(axis=2, keepdims=True)
            best, lost = np.where(error < lost, tried, best), np.minimum(error, lost)
        codes = (_levels(part, best, half) + half).astype(np.uint8)
        integers[rows] = codes if bits == 8 else codes[:, :, ::2] | codes[:, :, 1::2] << 4
        scales[rows] = best[:, :, 0]
    return QuantizedBlocks(integers, scales, bits, block_size)


@dataclass(frozen=True)
class QuantizedChannels:
    """A weight (K, N) in int8, as MatMulInteger takes it: times ``scales``, (N,) or (), float32."""

    integers: np.ndarray
    scales: np.ndarray


def quantize_channels(weight: np.ndarray, *, per_channel: bool = True, reduce_range: bool = False) -> QuantizedChannels:
    """Round (K, N) float32 weights to -127 … 127, with ``reduce_range`` to -64 … 64."""
    _check(weight)
    largest = np.abs(weight).max(axis=0 if per_channel else None, initial=0)
    levels = 64 if reduce_range else 127
    scales = np.where(largest > 0, largest / np.float32(levels), 1).astype(np.float32)
    scales = np.where(scales > 0, scales, 1).astype(np.float32)  # weights so tiny that their scale underflows
    return QuantizedChannels(np.rint(weight / scales).clip(-levels, levels).astype(np.int8), scales)


def _levels(part: np.ndarray, scale: np.ndarray, half: int) -> np.ndarray:
    """(N, blocks, block_size) weights, (N, blocks, 1) scales -> integers as floats, -half … half - 1."""
    divisor = np.where(scale == 0, np.float32(1), scale)
    return np.rint(part / divisor).clip(-half, half - 1)


def _check(weight: np.ndarray) -> None:
    if weight.ndim != 2 or not weight.size or not np.isfinite(weight).all():
        raise InputError(f"A weight must be a matrix of finite numbers to be quantised, got shape {weight.shape}.")
