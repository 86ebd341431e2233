"""What a runtime must offer so that every decoding algorithm works on it, and what an algorithm returns.

Shapes: B sources in the batch, K rows (beams, samples, drafts) that share one source, S source positions, T new and P
past decoder positions, V vocabulary entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from t5accel.errors import InputError

Source = Any  # what `encode` returns: belongs to the backend, opaque to the algorithms
State = Any  # the same for the decoder's state; methods that take one change it in place


@runtime_checkable
class Backend(Protocol):
    """One encoder-decoder on one runtime. Arrays are numpy, on the host.

    A backend may also offer ``run_greedy(state, k, *, forbidden=None) -> (B, K, n)``, n <= k greedy steps without
    returning to the host, of which the first reads what ``next_tokens`` or ``run_greedy`` chose last;
    ``next_tokens(state, input_ids, *, forbidden=None)``, a ``step`` that returns the likeliest next token of each row,
    (B, K) int64, as `greedy.likeliest` would find it in the logits at the last position; and the four methods that
    `encoder_cache.EncoderCache` builds on:

    - ``split(source) -> list[Source]``: one source per row, without its padding, in memory of its own.
    - ``join(sources) -> Source``: the rows of all of them as one batch, padded on the right with zeros and masked
      there, in new memory.
    - ``source_bytes(source) -> int``: the memory that it takes, on whichever device.
    - ``fingerprint() -> Hashable``: compares unequal to an earlier one if the encoder's weights were changed since.
    """

    vocab_size: int
    pad_token_id: int
    eos_token_id: int
    decoder_start_token_id: int

    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> Source:
        """Run the encoder once. Both arguments (B, S) int64; the mask is 1 for real tokens and 0 for padding."""

    def start(self, source: Source, rows_per_source: int = 1) -> State:
        """An empty decoder state (P = 0) with K = ``rows_per_source`` rows that share each source."""

    def step(self, state: State, input_ids: np.ndarray) -> np.ndarray:
        """Append T >= 1 tokens to every row: (B, K, T) int64 -> logits (B, K, T, V) float32, causal among the new."""

    def reorder(self, state: State, rows: np.ndarray) -> None:
        """Row k of source b goes on from the history of row ``rows[b, k]`` of the same source. (B, K) int64."""

    def trim(self, state: State, accepted: np.ndarray) -> None:
        """Of the positions of the last step keep the first ``accepted[b, k]`` (0 … T) in each row. (B, K) int64.

        Histories of unequal length are aligned to the right and masked, so that T5's relative positions stay right.
        """

    def keep(self, state: State, sources: np.ndarray) -> None:
        """Only these sources, in this order, stay in the batch (finished ones leave it). (n,) int64, n >= 1."""


@dataclass(frozen=True)
class Generated:
    """What an algorithm produced.

    Attributes:
        sequences: (N, L) int64, without the decoder's start token, right-padded with the pad id.
        scores: (N,) float, for beams the numbers of transformers' ``sequences_scores``; ``None`` where there are none.
        decoder_calls: how often the decoder ran.
        drafted: how many tokens were guessed before the decoder saw them, by `lookup` or `speculative`.
        accepted: how many of these turned out right.
    """

    sequences: np.ndarray
    decoder_calls: int
    scores: np.ndarray | None = None
    drafted: int = 0
    accepted: int = 0


def as_batch(input_ids: Any, attention_mask: Any = None, *, pad_token_id: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Check a batch and return it as two (B, S) int64 numpy arrays.

    Args:
        input_ids: (B, S) integers as numpy array, torch tensor or lists.
        attention_mask: (B, S) of zeros and ones; by default 1 where ``input_ids`` is not the pad id.

    Raises:
        InputError: empty batch, wrong rank or type, negative ids, a mask of another shape, with other values than 0 and
            1, or without a single 1 in a row.

    >>> as_batch([[5, 6, 0]])[1].tolist()
    [[1, 1, 0]]
    """
    ids = as_integers(input_ids, "input_ids", rank=2)
    if not ids.size:
        raise InputError(f"input_ids has shape {ids.shape}: give at least one source of at least one token.")
    if ids.min() < 0:
        raise InputError(f"input_ids holds {ids.min()}; token ids are not negative.")
    mask = (ids != pad_token_id).astype(np.int64) if attention_mask is None else as_integers(
        attention_mask, "attention_mask", rank=2)  # fmt: skip
    if mask.shape != ids.shape:
        raise InputError(f"attention_mask has shape {mask.shape} and input_ids {ids.shape}: they must be equal.")
    if not np.isin(mask, (0, 1)).all():
        raise InputError("attention_mask holds other values than 0 (padding) and 1 (token).")
    empty = np.flatnonzero(mask.sum(axis=1) == 0)
    if empty.size:
        raise InputError(f"attention_mask is all zero in row {empty[0]}: a source needs at least one token.")
    return ids, mask


def as_integers(values: Any, name: str, *, rank: int) -> np.ndarray:
    """``values`` as an int64 array of the given rank. Accepts numpy, torch (any device) and nested lists."""
    try:
        array = np.asarray(values.detach().cpu().numpy() if hasattr(values, "detach") else values)
    except ValueError as error:
        raise InputError(f"{name} is ragged: pad its rows to one length.") from error
    except (TypeError, RuntimeError) as error:  # bfloat16, sparse and meta tensors
        raise InputError(f"{name} is no array of integers: {error}") from error
    if array.ndim != rank:
        raise InputError(f"{name} is of shape {array.shape}; give {rank} dimensions of integers.")
    if array.dtype.kind not in ("iub" if array.size else "iubf"):  # an empty list becomes an array of floats
        raise InputError(f"{name} is of type {array.dtype}; give integers.")
    if array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
        raise InputError(f"{name} holds {array.max()}, more than 64 bits with a sign can.")
    return array.astype(np.int64, copy=False)


def as_count(value: Any, name: str, *, at_least: int) -> int:
    """``value`` as an int that is at least ``at_least``; raises ``InputError`` that names the argument."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < at_least:
        raise InputError(f"{name} is {value!r}; give an integer of at least {at_least}.")
    return int(value)


def right_aligned(lengths: np.ndarray, width: int) -> np.ndarray:
    """The mask of rows that end together: (…) lengths -> (…, width) int64, 1 on the last ``length`` positions.

    >>> right_aligned(np.array([1, 3]), 3).tolist()
    [[0, 0, 1], [1, 1, 1]]
    """
    return (np.arange(width) >= width - np.asarray(lengths)[..., None]).astype(np.int64)
