"""Validation of arguments and files, done once by public functions."""

# Only functions that take arrays import numpy, so that a module copied for its counts alone needs no library.

from __future__ import annotations

import json
import operator
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5accel.errors import InputError, T5AccelError

if TYPE_CHECKING:
    import numpy as np

MAX_JSON_BYTES = 1 << 28  # the largest published tokenizer.json is a tenth of it; more would fill the memory
_JSON_NAMES = {bool: "true or false", list: "a list", str: "a text", type(None): "null"}


def as_count(value: Any, name: str, *, at_least: int) -> int:
    """The argument called ``name`` as an int; accepts Python and NumPy integers, and rejects bool and float.

    >>> as_count(0, "threads", at_least=1)
    Traceback (most recent call last):
    t5accel.errors.InputError: threads must be an integer of at least 1, got 0.
    """
    try:
        count = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = None
    if count is None or count < at_least:
        raise InputError(f"{name} must be an integer of at least {at_least}, got {value!r:.80}.")
    return count


def check_utf8(text: str, name: str) -> None:
    """Raise ``InputError`` for a text that is not UTF-8, as bytes of a command line may be."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{name} must be UTF-8, got {text!r:.80}. Convert it.") from error


def is_number(value: Any) -> bool:
    """Whether a value is one real number of Python or NumPy; bool is not."""
    import numpy as np

    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def as_integers(values: Any, name: str, *, rank: int) -> np.ndarray:
    """``values`` as an int64 array of that rank; accepts numpy, torch (any device) and nested lists."""
    import numpy as np

    try:
        array = np.asarray(values.detach().cpu().numpy() if hasattr(values, "detach") else values)
    except ValueError as error:
        raise InputError(f"{name} must not be ragged. Pad its rows to one length.") from error
    except (TypeError, RuntimeError) as error:  # bfloat16, sparse and meta tensors
        raise InputError(f"{name} must be an array of integers: {error}") from error
    if array.ndim != rank:
        raise InputError(f"{name} must have {rank} dimensions, got shape {array.shape}.")
    if array.dtype.kind not in ("iub" if array.size else "iubf"):  # an empty list becomes an array of floats
        raise InputError(f"{name} must be integers, got {array.dtype}.")
    if array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
        raise InputError(f"{name} must fit in 64 bits with a sign, got {array.max()}.")
    return array.astype(np.int64, copy=False)


def as_batch(
    input_ids: Any, attention_mask: Any = None, *, vocab_size: int, pad_token_id: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask as two contiguous (B, S) int64 arrays in memory of their own: the caller may write to theirs.

    The mask is by default 1 where ``input_ids`` is not the pad id, and has at least one 1 in each row.
    """
    import numpy as np

    ids = as_integers(input_ids, "input_ids", rank=2)
    if not ids.size:
        raise InputError(f"input_ids must have at least one source of at least one token, got shape {ids.shape}.")
    check_vocabulary(ids, vocab_size)
    if attention_mask is None:
        mask = (ids != pad_token_id).astype(np.int64)
    else:
        mask = as_integers(attention_mask, "attention_mask", rank=2)
    if mask.shape != ids.shape:
        raise InputError(f"attention_mask must have the shape of input_ids, {ids.shape}, got {mask.shape}.")
    if mask.view("uint64").max() > 1:
        raise InputError("attention_mask must hold 0 (padding) and 1 (token) only, got other values.")
    empty = np.flatnonzero(mask.sum(axis=1) == 0)
    if empty.size:
        raise InputError(f"attention_mask must keep a token of each source, got all zero in row {empty[0]}.")
    return np.array(ids, order="C"), np.array(mask, order="C")


def check_vocabulary(ids: np.ndarray, vocab_size: int, name: str = "input_ids") -> None:
    """Raise ``InputError`` for an id outside 0 … vocab_size - 1. ``ids``: int64, any shape, not empty."""
    # A runtime may crash on such an id, or read beyond its table.
    if ids.view("uint64").max() >= vocab_size:  # one pass for both ends: read without a sign, a negative id is huge
        raise InputError(f"{name} must lie in 0 … {vocab_size - 1}, got {ids.min()} … {ids.max()}.")


def check_file(path: Path, error: type[T5AccelError], advice: str = "") -> int:
    """The size in bytes of a regular file, links followed; else raises ``error`` with ``advice`` at the end."""
    # Checked before it is opened: reading a named pipe, a socket or a terminal waits forever.
    try:
        facts = os.stat(path)
    except FileNotFoundError as cause:
        raise error(f"{path} is missing. {advice}".rstrip()) from cause
    except (OSError, ValueError) as cause:  # a ValueError: no name that a file can have
        raise error(f"{path} cannot be read: {getattr(cause, 'strerror', None) or cause}. {advice}".rstrip()) from cause
    if not stat.S_ISREG(facts.st_mode):
        raise error(f"{path} must be a regular file, got {_kind(facts.st_mode)}. {advice}".rstrip())
    return facts.st_size


def read_json_object(path: Path, error: type[T5AccelError], advice: str = "") -> dict[str, Any]:
    """The JSON object in a file; arguments and errors as in `check_file`."""
    size = check_file(path, error, advice)
    if size > MAX_JSON_BYTES:
        raise error(f"{path} must have at most {MAX_JSON_BYTES} bytes, got {size}. {advice}".rstrip())
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise error(f"{path} cannot be read: {cause.strerror or cause}. {advice}".rstrip()) from cause
    except RecursionError as cause:
        raise error(f"{path} is damaged: its JSON is nested too deeply. {advice}".rstrip()) from cause
    except ValueError as cause:  # no JSON, or no text at all
        raise error(f"{path} is damaged: it holds no JSON ({cause}). {advice}".rstrip()) from cause
    if not isinstance(content, dict):
        got = _JSON_NAMES.get(type(content), "a number")
        raise error(f"{path} must hold a JSON object, got {got}. {advice}".rstrip())
    return content


def _kind(mode: int) -> str:
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a named pipe", stat.S_ISSOCK: "a socket"}
    return next((name for is_kind, name in kinds.items() if is_kind(mode)), "a device")
