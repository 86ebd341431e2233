"""The roofline of a decoding step: least time by the bytes it reads and its operations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from t5accel.checks import as_count
from t5accel.errors import InputError

# Of one weight, without the scales of quantised ones: an fp32 scale per 32 weights would add a quarter to int4.
_WEIGHT_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5}


def decoder_weights_per_step(dims: Any) -> int:
    """The number of decoder weights that a decoding step reads, for a `T5Dims` or an object like it."""
    # Counted: self-attention q, k, v, o; cross-attention q and o; feed-forward wi (twice if gated) and wo; the norms;
    # lm_head. Not counted: cross-attention k and v, which the encoder applies once per request; the embedding, of which
    # a step reads one row per sequence (so `tied` changes nothing); the relative position table.
    total = dims.vocab_size * dims.d_model + dims.d_model  # lm_head and the final norm
    for self_heads, cross_heads, width in zip(dims.decoder_heads, dims.cross_heads, dims.decoder_ff, strict=True):
        attention = (4 * self_heads + 2 * cross_heads) * dims.d_kv
        total += dims.d_model * (attention + (3 if dims.gated else 2) * width + 3)
    return total


@dataclass(frozen=True)
class Roofline:
    """The least time of a decoding step; `dataclasses.asdict` makes a row of it."""

    precision: str
    batch: int
    weight_bytes: int
    bytes_per_step: int  # weights and KV cache
    flops_per_step: int
    read_s: float
    compute_s: float
    floor_s: float  # the longer of the two above
    bound: str  # "bandwidth" or "compute": which one that is


def step_roofline(
    dims: Any,
    precision: str = "fp32",
    batch: int = 1,
    *,
    bandwidth: float,
    gemm: float,
    source_tokens: int = 64,
    position: int = 32,
    shortlist: bool = False,
) -> Roofline:
    """Divide a greedy decoding step's bytes and operations by the machine's rates.

    ``bandwidth`` is in bytes/s, ``gemm`` in operations/s **at that precision**. Each of ``batch`` sequences attends to
    ``source_tokens`` and to ``position`` tokens of its own. With ``shortlist`` the head is read as its copy in 8 bits.

    >>> from types import SimpleNamespace
    >>> small = SimpleNamespace(d_model=512, d_kv=64, vocab_size=32128, gated=False, tied=True,
    ...                         decoder_heads=(8,) * 6, cross_heads=(8,) * 6, decoder_ff=(2048,) * 6)
    >>> step = step_roofline(small, bandwidth=60e9, gemm=214e9)
    >>> step.weight_bytes, step.bytes_per_step, step.bound, round(step.floor_s * 1000, 1)
    (153917440, 156276736, 'bandwidth', 2.6)
    """
    # Weights that fit in the last-level cache can beat a floor of memory bandwidth: measure it at their size.
    if precision not in _WEIGHT_BYTES:
        raise InputError(f"precision must be one of {', '.join(_WEIGHT_BYTES)}, got {precision!r}.")
    for name, count in (("batch", batch), ("source_tokens", source_tokens), ("position", position)):
        as_count(count, name, at_least=1)
    for name, rate in (("bandwidth", bandwidth), ("gemm", gemm)):
        if not (math.isfinite(rate) and rate > 0):
            raise InputError(f"{name} must be a finite rate above 0, per second, got {rate!r}.")
    weights = decoder_weights_per_step(dims)
    pairs = batch * dims.d_kv * (position * sum(dims.decoder_heads) + source_tokens * sum(dims.cross_heads))
    weight_bytes = math.ceil(weights * _WEIGHT_BYTES[precision])
    if shortlist:  # without the few exact rows; a scale of 4 bytes for each token
        head = dims.vocab_size * dims.d_model
        weight_bytes += min(0, math.ceil(head * (1 - _WEIGHT_BYTES[precision])) + 4 * dims.vocab_size)
    cache_bytes = 2 * pairs * (2 if precision in ("fp16", "bf16") else 4)  # quantising weights leaves the cache in fp32
    step_bytes = weight_bytes + cache_bytes
    step_flops = 2 * weights * batch + 4 * pairs  # 2 per weight and sequence, 4 per cached pair of numbers
    read_s, compute_s = step_bytes / bandwidth, step_flops / gemm
    floor_s, bound = max((read_s, "bandwidth"), (compute_s, "compute"))
    return Roofline(precision, batch, weight_bytes, step_bytes, step_flops, read_s, compute_s, floor_s, bound)
