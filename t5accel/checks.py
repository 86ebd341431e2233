"""Arguments checked at the door: counts, numbers, token ids and batches, each with an error that says what to give.

The public functions ask here once, before any work; what lies behind them trusts what it is handed. Only what takes
arrays needs numpy, so that a module copied for its counts alone brings no library with it.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from t5accel.errors import InputError

if TYPE_CHECKING:
    import numpy as np


def as_count(value: Any, name: str, *, at_least: int) -> int:
    """``value`` as a plain int of at least ``at_least``. numpy's integers are welcome, bools and floats are not.

    Raises:
        InputError: it is something else; ``name`` says which argument.

    >>> as_count(3, "threads", at_least=1)
    3
    """
    try:
        count = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = None
    if count is None or count < at_least:
        raise InputError(f"{name} is {value!r:.80}; give an integer of at least {at_least}.")
    return count


def is_number(value: Any) -> bool:
    """Whether it is one real number, of Python's own or of numpy's; bools are not.

    >>> is_number(0.5), is_number(True), is_number("0.5")
    (True, False, False)
    """
    import numpy as np

    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def as_integers(values: Any, name: str, *, rank: int) -> np.ndarray:
    """``values`` as an int64 array with that many dimensions. Accepts numpy, torch (any device) and nested lists.

    Raises:
        InputError: ragged, of another rank or of another type.

    >>> as_integers([[5, 6]], "input_ids", rank=2).dtype
    dtype('int64')
    """
    import numpy as np

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


def as_batch(
    input_ids: Any, attention_mask: Any = None, *, pad_token_id: int = 0, vocab_size: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """A batch as two (B, S) int64 numpy arrays, contiguous and in memory of their own: the caller may write to theirs.

    Args:
        input_ids: (B, S) integers as numpy array, torch tensor or lists.
        attention_mask: (B, S) of zeros and ones; by default 1 where ``input_ids`` is not the pad id.
        pad_token_id: what fills up shorter sources.
        vocab_size: where given, ids from there on are refused, too.

    Raises:
        InputError: empty batch, wrong rank or type, ids outside the vocabulary, a mask of another shape, with other
            values than 0 and 1, or without a single 1 in a row.

    >>> as_batch([[5, 6, 0]])[1].tolist()
    [[1, 1, 0]]
    """
    import numpy as np

    ids = as_integers(input_ids, "input_ids", rank=2)
    if not ids.size:
        raise InputError(f"input_ids has shape {ids.shape}: give at least one source of at least one token.")
    if vocab_size is not None:
        check_vocabulary(ids, vocab_size)
    elif ids.min() < 0:
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
    return np.array(ids, order="C"), np.array(mask, order="C")


def check_vocabulary(ids: np.ndarray, vocab_size: int, name: str = "input_ids") -> None:
    """Raise ``InputError`` for an id outside 0 … vocab_size - 1: a runtime may crash on it, or read what lies beyond.

    Args:
        ids: int64, any shape, not empty.
        vocab_size: the number of entries.
        name: of the argument that holds them.

    >>> import numpy as np
    >>> check_vocabulary(np.array([0, 299]), 300)
    """
    if ids.view("uint64").max() >= vocab_size:  # one pass for both ends: read without a sign, a negative id is huge
        raise InputError(f"{name} must lie in 0 … {vocab_size - 1}; {ids.min()} … {ids.max()} were given.")
