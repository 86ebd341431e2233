"""Weights rounded to integers: in blocks that have a scale each, or with a scale for each output."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from t5accel.errors import InputError

SHRUNK = np.linspace(1.0, 0.75, 11, dtype=np.float32)  # of the scale that reaches the largest weight of a block
ROWS_AT_ONCE = 2048  # so that what is computed with takes little memory


@dataclass(frozen=True)
class QuantizedBlocks:
    """A weight (N, K) in integers, of which each block of one output has a scale, as MatMulNBits takes it.

    Attributes:
        integers: (N, blocks, bytes of a block) uint8: of 8 bits one each, of 4 bits two in a byte, the first one low.
            The integer 2 ** (bits - 1) stands for 0.
        scales: (N, blocks) float32.
        bits: 4 or 8.
        block_size: how many weights a block has.
    """

    integers: np.ndarray
    scales: np.ndarray
    bits: int
    block_size: int

    def floats(self) -> np.ndarray:
        """What the integers stand for: (N, K), or wider, where the last block was filled up with zeros."""
        codes = self.integers
        if self.bits == 4:
            codes = np.stack([codes & 15, codes >> 4], axis=-1)
        centred = codes.reshape(*self.scales.shape, self.block_size).astype(np.float32) - (1 << (self.bits - 1))
        return (centred * self.scales[:, :, None]).reshape(len(self.scales), -1)


def quantize_blocks(weight: np.ndarray, bits: int, block_size: int) -> QuantizedBlocks:
    """Round (N, K) float32 weights in blocks of ``block_size`` along K.

    With 8 bits a scale is such that the largest weight of the block is reached. With 4 bits that wastes levels on a
    single large weight: of ``SHRUNK`` scales that one is taken which loses least, in squares, over the block. The
    integers reach from -2 ** (bits - 1) to one less than its opposite, so a scale may be negative: then the largest
    weight, whatever its sign, gets the level that has no opposite.

    Raises:
        InputError: the weight is no matrix, or holds what is no finite number.

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
        extreme = np.take_along_axis(part, np.abs(part).argmax(axis=2)[:, :, None], axis=2)
        scale = extreme / np.float32(-half)
        best, lost = scale, np.full(scale.shape, np.inf, dtype=np.float32)
        for share in SHRUNK if bits == 4 else SHRUNK[:1]:
            tried = scale * share
            with np.errstate(over="ignore"):  # of numbers whose squares 32 bits do not hold, the first scale is taken
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
    """Round (K, N) float32 weights to -127 … 127, with ``reduce_range`` to -64 … 64.

    Raises:
        InputError: the weight is no matrix, or holds what is no finite number.

    >>> quantize_channels(np.array([[1.0, -4.0], [-2.0, 0.0]], np.float32)).integers.tolist()
    [[64, -127], [-127, 0]]
    """
    _check(weight)
    largest = np.abs(weight).max(axis=0 if per_channel else None, initial=0)
    levels = 64 if reduce_range else 127
    scales = np.where(largest > 0, largest / np.float32(levels), 1).astype(np.float32)
    scales = np.where(scales > 0, scales, 1).astype(np.float32)  # of weights so tiny that 32 bits have no scale
    return QuantizedChannels(np.rint(weight / scales).clip(-levels, levels).astype(np.int8), scales)


def _levels(part: np.ndarray, scale: np.ndarray, half: int) -> np.ndarray:
    """(N, blocks, block_size) weights, (N, blocks, 1) scales -> integers as floats, -half … half - 1."""
    divisor = np.where(scale == 0, np.float32(1), scale)
    return np.rint(part / divisor).clip(-half, half - 1)


def _check(weight: np.ndarray) -> None:
    if weight.ndim != 2 or not weight.size or not np.isfinite(weight).all():
        raise InputError(f"A weight of shape {weight.shape} has to be a matrix of finite numbers to be quantised.")
