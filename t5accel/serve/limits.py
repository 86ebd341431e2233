"""Admission limits: rows, KV-cache bytes, and how long prefill may stall running requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from t5accel.checks import as_count, is_number
from t5accel.errors import InputError, QueueFullError
from t5accel.precision.recipes import Recipe, recipe_from_json
from t5accel.serve.request import GenerationRequest

COLUMNS = 64  # sources and buffers are laid out in multiples of it
HEAD_START_S = 10.0  # of the highest priority
RAGGED = 1.5  # columns that a batch may have for each of its longest history, before they are moved together


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of a scheduler, all of them maxima.

    Attributes:
        rows: of the batch: one for a greedy request, K for K beams or samples.
        key_value_bytes: of the KV caches of all rows, each as long as the longest. Buffers grow by doubling: the
            process may hold up to twice as much.
        queued_tokens: of the queue, as `tokens_of` counts. Default: ``queue`` of the longest one-row requests.
        beams: beams or samples of a request. Default: ``rows``.
        max_prefill_stall_s: encoding time between two steps of running requests; a single longer source is encoded
            alone.
        prefill_share: share of the time, about, for new requests while others run. After each admission there is a
            pause of at most ``max_prefill_stall_s``, so that under load new sources are encoded together.

    >>> SchedulerLimits(rows=8).queue
    256
    """

    rows: int = 32
    key_value_bytes: int | None = None
    queue: int = 256
    queued_tokens: int | None = None
    beams: int | None = None
    source_tokens: int = 512
    new_tokens: int = 512
    max_prefill_stall_s: float = 0.05
    prefill_share: float = 1.0
    encoder_cache_bytes: int = 256_000_000

    def __post_init__(self) -> None:
        for name in ("rows", "queue", "source_tokens", "new_tokens"):
            as_count(getattr(self, name), name, at_least=1)
        as_count(self.encoder_cache_bytes, "encoder_cache_bytes", at_least=0)
        for name in ("key_value_bytes", "queued_tokens", "beams"):
            if getattr(self, name) is not None:
                as_count(getattr(self, name), name, at_least=1)
        if not is_number(self.max_prefill_stall_s) or not 0 <= self.max_prefill_stall_s < 1e6:
            raise InputError(
                f"max_prefill_stall_s is {self.max_prefill_stall_s!r}; give seconds, 0 for one source at a time."
            )
        if not is_number(self.prefill_share) or not 0 < self.prefill_share <= 1:
            raise InputError(f"prefill_share is {self.prefill_share!r}; give a number above 0 and up to 1.")

    @property
    def most_queued_tokens(self) -> int:
        """``queued_tokens`` or its default, in which the largest request fits.

        >>> SchedulerLimits().most_queued_tokens
        262144
        """
        of_one = self.source_tokens + self.new_tokens
        return max(self.queue, self.rows) * of_one if self.queued_tokens is None else self.queued_tokens

    def check(self, job: GenerationRequest, key_value_bytes: KVCacheBytes) -> None:
        """Raise ``InputError`` for a request that can never run."""
        ids, new = len(job.input_ids), job.max_new_tokens
        answers = "num_beams" if job.sampling is None else "num_return_sequences"
        rows = self.rows if self.beams is None else min(self.beams, self.rows)
        for what, given, most in (
            ("The job has {} input_ids", ids, self.source_tokens),
            (answers + " is {}", job.rows, rows),
            ("max_new_tokens is {}", new, self.new_tokens),
        ):
            if given > most:
                raise InputError(f"{what.format(given)}; at most {most} are allowed here.")
        if self.key_value_bytes is not None and (size := key_value_bytes(job.rows, ids, new)) > self.key_value_bytes:
            raise InputError(
                f"A request of {job.rows} rows, {ids} source tokens and {new} new tokens needs {size} bytes of keys "
                f"and values; {self.key_value_bytes} are allowed here."
            )

    def require_place(
        self, waiting: Sequence[GenerationRequest], jobs: int, tokens: int, retry_s: Callable[[], int]
    ) -> None:
        """Raise if the queue has no place.

        Raises:
            InputError: the queue never has room for this many.
            QueueFullError: the queue is too full now.
        """
        most, work = self.most_queued_tokens, sum(map(tokens_of, waiting))
        for what, now, more, may in (("requests", len(waiting), jobs, self.queue), ("tokens", work, tokens, most)):
            if more > may:
                raise InputError(f"The request counts as {more} {what}, and {may} may wait. Send it in parts.")
            if now + more > may:
                retry = retry_s()
                raise QueueFullError(f"{now} {what} are waiting and {may} may: try again in {retry} s.", retry)


def tokens_of(job: GenerationRequest) -> int:
    """Upper bound of a request's work: source and new tokens, times rows.

    >>> tokens_of(GenerationRequest([5, 1], num_beams=4, max_new_tokens=10))
    48
    """
    return job.rows * (len(job.input_ids) + job.max_new_tokens)


def size_with(size: tuple[int, int, int], job: GenerationRequest) -> tuple[int, int, int]:
    """Rows, longest source and most new tokens of a batch after a request joins.

    >>> size_with((1, 9, 10), GenerationRequest([5, 1], num_beams=4, max_new_tokens=20))
    (5, 9, 20)
    """
    rows, source, new = size
    return rows + job.rows, max(source, len(job.input_ids)), max(new, job.max_new_tokens)


def head_start_s(priority: int) -> float:
    """Head start of a priority in the queue, bounded so that no request starves.

    >>> head_start_s(0), head_start_s(1), head_start_s(-1), head_start_s(10**6) < HEAD_START_S
    (0.0, 5.0, -5.0, True)
    """
    return HEAD_START_S * priority / (1 + abs(priority))


class KVCacheBytes:
    """KV-cache bytes of a batch, from the backend's ``dims``; 0 without them. ``shape_for`` gives fixed shapes.

    >>> class Dims: cross_heads, decoder_heads, d_kv = (8,) * 6, (8,) * 6, 64
    >>> class Toy: dims, dtype = Dims, None
    >>> KVCacheBytes(Toy)(rows=1, source_tokens=512, new_tokens=100) == (512 + 192) * 6 * 2 * 8 * 64 * 4
    True
    """

    def __init__(self, backend: Any):
        dims, item = getattr(backend, "dims", None), getattr(getattr(backend, "dtype", None), "itemsize", 4)
        self._shape_for = getattr(backend, "shape_for", None) or _columns
        self.is_known = all(hasattr(dims, name) for name in ("cross_heads", "decoder_heads", "d_kv"))
        self._cross, self._self = (
            2 * sum(heads) * dims.d_kv * item if self.is_known else 0
            for heads in ((dims.cross_heads, dims.decoder_heads) if self.is_known else ((), ()))
        )

    def __call__(self, rows: int, source_tokens: int, new_tokens: int) -> int:
        """Bytes of ``rows`` rows padded to the longest source and result."""
        rows, longest, columns = self._shape_for(rows, source_tokens, new_tokens)
        return rows * (longest * self._cross + columns * self._self)


def _columns(rows: int, source_tokens: int, new_tokens: int) -> tuple[int, int, int]:
    return rows, -(-source_tokens // COLUMNS) * COLUMNS, -(-int(RAGGED * new_tokens) // COLUMNS) * COLUMNS


class EncoderLatency:
    """Measured encoding time: seconds per token for each power of two of the source's length.

    >>> pace = EncoderLatency()
    >>> pace.seconds(100)
    inf
    >>> pace.learn(100, 2, 0.5)
    >>> pace.seconds(128)
    0.32
    """

    def __init__(self) -> None:
        self._per_token: dict[int, float] = {}

    def seconds(self, length: int) -> float:
        """Estimate for one source of this length; infinity before the first measurement."""
        return self._per_token.get(length_bucket(length), math.inf) * length

    def learn(self, length: int, sources: int, seconds: float) -> None:
        """Record the time of one encoder call."""
        new, key = seconds / (length * sources), length_bucket(length)
        old = self._per_token.get(key, new)
        self._per_token[key] = old + (new - old) * (0.5 if new > old else 0.1)  # a stall is worse than a pause


def length_bucket(length: int) -> int:
    """Power of two of a length; lengths of one bucket cost about the same per token.

    >>> length_bucket(64), length_bucket(65), length_bucket(128)
    (6, 7, 7)
    """
    return (length - 1).bit_length()


def needs_unbatched_encoding(backend: Any) -> bool:
    """Whether sources must be encoded one by one, without padding.

    The encoders of "int8" and "int4" take the scale of their activations over the whole batch.

    Raises:
        InputError: the decoder does so, too ("int8-dynamic").

    >>> needs_unbatched_encoding(object())
    False
    """
    content = getattr(getattr(backend, "manifest", None), "recipe", None)
    return recipe_needs_unbatched_encoding(recipe_from_json(content)) if content else False


def recipe_needs_unbatched_encoding(recipe: Recipe) -> bool:
    """`needs_unbatched_encoding` of a recipe.

    >>> from t5accel.precision.recipes import RECIPES
    >>> recipe_needs_unbatched_encoding(RECIPES["int8"])
    True
    """
    if "decoder" in recipe.batch_dependent_stacks:
        raise InputError(
            f"precision {recipe.name!r} finds the scale of what the decoder multiplies over the whole batch, so "
            "that an answer would depend on who else is being served: give 'int8' or 'int4', which do not."
        )
    return "encoder" in recipe.batch_dependent_stacks
