"""What may join a running batch, and when: rows, bytes of keys and values, and for how long others stand still."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from t5accel.checks import as_count, is_number
from t5accel.errors import InputError, QueueFullError
from t5accel.precision.recipes import Recipe, recipe_from_json
from t5accel.serve.request import Job

COLUMNS = 64  # sources and buffers are laid out in multiples of it
HEAD_START_S = 10.0  # of the highest priority
RAGGED = 1.5  # columns that a batch may have for each of its longest history, before they are moved together


@dataclass(frozen=True)
class Limits:
    """What a scheduler keeps to.

    Attributes:
        rows: of the batch, at most: a greedy job takes one, K beams or K drawn answers take K.
        key_value_bytes: of self- and cross-attention of all rows, each counted as long as the longest; ``None``: no
            limit. Buffers grow by doubling, so that the process may hold up to twice as much.
        queue: jobs that may wait; more are refused.
        queued_tokens: of all jobs that wait, as `tokens_of` counts them; ``None``: as many as ``queue`` jobs of one row
            have that are as long as may be.
        beams: of a job, or as many drawn answers; ``None``: ``rows``.
        source_tokens, new_tokens: of a job, at most.
        stall_s: while others run, encoders of newcomers take no longer than that before the next step; a single source
            that needs more is encoded all the same, alone.
        join_share: of the time, about, that goes into letting others in while some run. After each time nobody joins
            for a while, ``stall_s`` at most, so that under load newcomers are encoded together.
        encoder_cache_bytes: for encoder outputs that are used again.

    Raises:
        InputError: a value is out of bounds.

    >>> Limits(rows=8).queue
    256
    """

    rows: int = 32
    key_value_bytes: int | None = None
    queue: int = 256
    queued_tokens: int | None = None
    beams: int | None = None
    source_tokens: int = 512
    new_tokens: int = 512
    stall_s: float = 0.05
    join_share: float = 1.0
    encoder_cache_bytes: int = 256_000_000

    def __post_init__(self) -> None:
        for name in ("rows", "queue", "source_tokens", "new_tokens"):
            as_count(getattr(self, name), name, at_least=1)
        as_count(self.encoder_cache_bytes, "encoder_cache_bytes", at_least=0)
        for name in ("key_value_bytes", "queued_tokens", "beams"):
            if getattr(self, name) is not None:
                as_count(getattr(self, name), name, at_least=1)
        if not is_number(self.stall_s) or not 0 <= self.stall_s < 1e6:
            raise InputError(f"stall_s is {self.stall_s!r}; give seconds, 0 for one source at a time.")
        if not is_number(self.join_share) or not 0 < self.join_share <= 1:
            raise InputError(f"join_share is {self.join_share!r}; give a number above 0 and up to 1.")

    @property
    def most_queued_tokens(self) -> int:
        """What ``queued_tokens`` comes to; the largest job fits, where nothing is said.

        >>> Limits().most_queued_tokens
        262144
        """
        of_one = self.source_tokens + self.new_tokens
        return max(self.queue, self.rows) * of_one if self.queued_tokens is None else self.queued_tokens

    def check(self, job: Job, key_value_bytes: KeyValueBytes) -> None:
        """Raise ``InputError`` for a job that is too large, whatever else runs."""
        ids, new = len(job.input_ids), job.max_new_tokens
        answers = "num_beams" if job.sampling is None else "num_return_sequences"
        rows = self.rows if self.beams is None else min(self.beams, self.rows)
        for what, given, most in (("The job has {} input_ids", ids, self.source_tokens),
                                  (answers + " is {}", job.rows, rows),
                                  ("max_new_tokens is {}", new, self.new_tokens)):  # fmt: skip
            if given > most:
                raise InputError(f"{what.format(given)}; at most {most} are allowed here.")
        if self.key_value_bytes is not None and (size := key_value_bytes(job.rows, ids, new)) > self.key_value_bytes:
            raise InputError(
                f"A request of {job.rows} rows, {ids} source tokens and {new} new tokens needs {size} bytes of keys "
                f"and values; {self.key_value_bytes} are allowed here."
            )

    def require_place(self, waiting: Sequence[Job], jobs: int, tokens: int, retry_s: Callable[[], int]) -> None:
        """Raise where so many jobs of so much work would be too many beside those that wait.

        Raises:
            InputError: they would be too many at any time.
            QueueFullError: they are too many now.
        """
        most, work = self.most_queued_tokens, sum(map(tokens_of, waiting))
        for what, now, more, may in (("requests", len(waiting), jobs, self.queue), ("tokens", work, tokens, most)):
            if more > may:
                raise InputError(f"The request counts as {more} {what}, and {may} may wait. Send it in parts.")
            if now + more > may:
                retry = retry_s()
                raise QueueFullError(f"{now} {what} are waiting and {may} may: try again in {retry} s.", retry)


def tokens_of(job: Job) -> int:
    """The work of a job, as far as it is known before: the source and the longest answer, in each row.

    >>> tokens_of(Job([5, 1], num_beams=4, max_new_tokens=10))
    48
    """
    return job.rows * (len(job.input_ids) + job.max_new_tokens)


def size_with(size: tuple[int, int, int], job: Job) -> tuple[int, int, int]:
    """Rows, longest source and longest answer of a batch of that size that a job joins.

    >>> size_with((1, 9, 10), Job([5, 1], num_beams=4, max_new_tokens=20))
    (5, 9, 20)
    """
    rows, source, new = size
    return rows + job.rows, max(source, len(job.input_ids)), max(new, job.max_new_tokens)


def head_start_s(priority: int) -> float:
    """By how much a job goes before others that came earlier: bounded, so that nobody waits for ever.

    >>> head_start_s(0), head_start_s(1), head_start_s(-1), head_start_s(10**6) < HEAD_START_S
    (0.0, 5.0, -5.0, True)
    """
    return HEAD_START_S * priority / (1 + abs(priority))


class KeyValueBytes:
    """The memory that rows take.

    Args:
        backend: one whose ``dims`` say how many heads its layers have; of another it is not known, and counts as 0.
            Where it has memory of fixed shapes, ``shape_for`` says of which.

    >>> class Dims: cross_heads, decoder_heads, d_kv = (8,) * 6, (8,) * 6, 64
    >>> class Toy: dims, dtype = Dims, None
    >>> KeyValueBytes(Toy)(rows=1, source_tokens=512, new_tokens=100) == (512 + 192) * 6 * 2 * 8 * 64 * 4
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
        """Of so many rows, as long as the longest source and as wide as the longest answer may make the batch."""
        rows, longest, columns = self._shape_for(rows, source_tokens, new_tokens)
        return rows * (longest * self._cross + columns * self._self)


def _columns(rows: int, source_tokens: int, new_tokens: int) -> tuple[int, int, int]:
    return rows, -(-source_tokens // COLUMNS) * COLUMNS, -(-int(RAGGED * new_tokens) // COLUMNS) * COLUMNS


class EncoderPace:
    """How long it takes to encode, learnt on the way: seconds a token, for each power of two of the source's length.

    >>> pace = EncoderPace()
    >>> pace.seconds(100)
    inf
    >>> pace.learn(100, 2, 0.5)
    >>> pace.seconds(128)
    0.32
    """

    def __init__(self) -> None:
        self._per_token: dict[int, float] = {}

    def seconds(self, length: int) -> float:
        """For one source of this length; infinity if none like it was encoded yet."""
        return self._per_token.get(bucket(length), math.inf) * length

    def learn(self, length: int, sources: int, seconds: float) -> None:
        """So many sources, the longest of this length, took so long together."""
        new, key = seconds / (length * sources), bucket(length)
        old = self._per_token.get(key, new)
        self._per_token[key] = old + (new - old) * (0.5 if new > old else 0.1)  # a stall is worse than a pause


def bucket(length: int) -> int:
    """The power of two of a length: what is alike enough to take as long for each token.

    >>> bucket(64), bucket(65), bucket(128)
    (6, 7, 7)
    """
    return (length - 1).bit_length()


def encodes_alone(backend: Any) -> bool:
    """Whether sources must be encoded one by one, because the encoder's numbers depend on what else is in its batch.

    Integers whose scale is found over a whole batch do, as in the encoders of the "int8" and "int4" recipes: alone and
    without padding, a source always has the same scales.

    Raises:
        InputError: so do the decoder's numbers ("int8-dynamic"): what others write would change an answer.

    >>> encodes_alone(object())
    False
    """
    content = getattr(getattr(backend, "manifest", None), "recipe", None)
    return must_encode_alone(recipe_from_json(content)) if content else False


def must_encode_alone(recipe: Recipe) -> bool:
    """The same of a recipe, before there is a backend.

    >>> from t5accel.precision.recipes import RECIPES
    >>> must_encode_alone(RECIPES["int8"])
    True
    """
    if "decoder" in recipe.batch_dependent_stacks:
        raise InputError(
            f"precision {recipe.name!r} finds the scale of what the decoder multiplies over the whole batch, so "
            "that an answer would depend on who else is being served: give 'int8' or 'int4', which do not."
        )
    return "encoder" in recipe.batch_dependent_stacks
