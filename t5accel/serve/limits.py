"""Admission limits of a scheduler."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from t5accel.checks import is_number
from t5accel.errors import InputError, QueueFullError
from t5accel.precision.recipes import Recipe
from t5accel.serve.request import GenerationRequest, set_counts

LONGEST_RETRY_S = 120
COLUMNS = 64  # sources and buffers are laid out in multiples of it
RAGGED = 1.5  # columns that a batch may have for each of its longest history, before they are moved together


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of a scheduler, all of them maxima."""

    rows: int = 32  # of the batch: one for a greedy request, K for K beams or samples
    # Of the KV caches of all rows, each as long as the longest. Buffers grow by doubling: the process may hold twice
    # as much.
    key_value_bytes: int | None = None
    queue: int = 256
    queued_tokens: int | None = None  # source and new tokens times rows. Default: ``queue`` of the longest requests
    beams: int | None = None  # or samples, of a request. Default: ``rows``
    source_tokens: int = 512
    new_tokens: int = 512
    # Encoding time between two steps of running requests; a single longer source is encoded alone.
    max_prefill_stall_s: float = 0.05
    # Share of the time for new requests while others run. Below 1 there is a pause of at most ``max_prefill_stall_s``
    # after each admission, so that running requests go on.
    prefill_share: float = 1.0
    encoder_cache_bytes: int = 256_000_000

    def __post_init__(self) -> None:
        at_least_1 = ("rows", "queue", "source_tokens", "new_tokens", "key_value_bytes", "queued_tokens", "beams")
        set_counts(self, dict.fromkeys(at_least_1, 1) | {"encoder_cache_bytes": 0})
        if not is_number(self.max_prefill_stall_s) or not 0 <= self.max_prefill_stall_s < 1e6:
            raise InputError(f"max_prefill_stall_s must be seconds of at least 0, got {self.max_prefill_stall_s!r}.")
        if not is_number(self.prefill_share) or not 0 < self.prefill_share <= 1:
            raise InputError(f"prefill_share must be above 0 and at most 1, got {self.prefill_share!r}.")

    def check(self, request: GenerationRequest, key_value_bytes: KVCacheBytes) -> None:
        """Raise ``InputError`` for a request that can never run."""
        ids, new = len(request.input_ids), request.max_new_tokens
        answers = "num_beams" if request.sampling is None else "num_return_sequences"
        rows = self.rows if self.beams is None else min(self.beams, self.rows)
        for what, given, most in (
            ("input_ids", ids, self.source_tokens),
            (answers, request.rows, rows),
            ("max_new_tokens", new, self.new_tokens),
        ):
            if given > most:
                raise InputError(f"{what} must be at most {most}, got {given}.")
        if self.key_value_bytes is not None:
            size = key_value_bytes(request.rows, ids, new)
            if size > self.key_value_bytes:
                raise InputError(
                    f"A request must need at most {self.key_value_bytes} bytes of KV cache, got {size} "
                    f"({request.rows} rows, {ids} source tokens, {new} new tokens)."
                )

    def require_place(self, waiting: tuple[int, int], more: tuple[int, int], wait_s: float) -> None:
        """As `require_place`, for requests and tokens: how many wait, and how many come."""
        most_tokens = self.queued_tokens
        if most_tokens is None:
            most_tokens = max(self.queue, self.rows) * (self.source_tokens + self.new_tokens)
        require_place("requests", waiting[0], more[0], self.queue, wait_s)
        require_place("tokens", waiting[1], more[1], most_tokens, wait_s)


def require_place(what: str, waiting: int, more: int, most: int, wait_s: float) -> None:
    """Raise ``QueueFullError``, or ``InputError`` for more than an empty queue takes.

    ``wait_s`` is the estimate of the seconds until there is a place.
    """
    if more > most:
        raise InputError(f"The request must count as at most {most} {what}, got {more}. Send it in parts.")
    if waiting + more > most:
        retry = min(max(1, math.ceil(wait_s)), LONGEST_RETRY_S)
        raise QueueFullError(f"{waiting} {what} are waiting and {most} may: try again in {retry} s.", retry)


class KVCacheBytes:
    """KV-cache bytes of a batch, from the backend's ``dims``; 0 without.

    >>> class Dims: cross_heads, decoder_heads, d_kv = (8,) * 6, (8,) * 6, 64
    >>> class Toy: dims, dtype = Dims, None
    >>> KVCacheBytes(Toy)(rows=1, source_tokens=512, new_tokens=100) == (512 + 192) * 6 * 2 * 8 * 64 * 4
    True
    """

    def __init__(self, backend: Any):
        dims = getattr(backend, "dims", None)
        head_bytes = 2 * getattr(dims, "d_kv", 0) * getattr(getattr(backend, "dtype", None), "itemsize", 4)
        self._cross_bytes = head_bytes * sum(getattr(dims, "cross_heads", ()))
        self._self_bytes = head_bytes * sum(getattr(dims, "decoder_heads", ()))
        self._shape_for = getattr(backend, "shape_for", None) or _columns  # a device has fixed shapes

    def __call__(self, rows: int, source_tokens: int, new_tokens: int) -> int:
        """Bytes of ``rows`` rows padded to the longest source and result."""
        rows, longest, columns = self._shape_for(rows, source_tokens, new_tokens)
        return rows * (longest * self._cross_bytes + columns * self._self_bytes)


def _columns(rows: int, source_tokens: int, new_tokens: int) -> tuple[int, int, int]:
    return rows, -(-source_tokens // COLUMNS) * COLUMNS, -(-int(RAGGED * new_tokens) // COLUMNS) * COLUMNS


class EncoderLatency:
    """Measured encoding time per token, for each power of two of lengths."""

    def __init__(self) -> None:
        self._per_token: dict[int, float] = {}

    def seconds(self, length: int) -> float:
        """Estimate for one source of this length; infinity before the first measurement."""
        return self._per_token.get(length_bucket(length), math.inf) * length

    def update(self, length: int, sources: int, seconds: float) -> None:
        new, key = seconds / (length * sources), length_bucket(length)
        old = self._per_token.get(key, new)
        self._per_token[key] = old + (new - old) * (0.5 if new > old else 0.1)  # a stall is worse than a pause


def length_bucket(length: int) -> int:
    """Power of two of a length: about one cost per token."""
    return (length - 1).bit_length()


def needs_unbatched_encoding(recipe: Recipe) -> bool:
    """Whether sources must be encoded one by one, without padding.

    ``InputError``: the results of the decoder, too, would depend on the rest of the batch ("int8-dynamic").
    """
    # The encoders of "int8" and "int4" take the scale of their activations over the whole batch.
    if "decoder" in recipe.batch_dependent_stacks:
        raise InputError(
            f"precision must be one whose answers do not depend on other requests, got {recipe.name!r}: its decoder "
            "scales activations over the whole batch. Give 'int8', 'int8-per-token' or 'int4'."
        )
    return "encoder" in recipe.batch_dependent_stacks
