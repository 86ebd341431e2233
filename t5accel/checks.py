"""Validation of arguments and files: counts, numbers, token ids, batches, JSON; each error says what to give.

The public functions ask here once, before any work; what lies behind them trusts what it is handed. Only what takes
arrays needs numpy, so that a module copied for its counts alone brings no library with it.
"""

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
    if mask.view("uint64").max() > 1:
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


def check_file(path: Path, error: type[T5AccelError], advice: str = "") -> int:
    """The size in bytes of a regular file, or of the one that a link leads to.

    Anything else is refused before it is opened: reading a named pipe, a socket or a terminal waits forever.

    Args:
        path: the file.
        error: the class of what is raised.
        advice: what to do about it, a sentence for the end of the message.

    Raises:
        error: the file is missing, cannot be reached, or is not a regular file.

    >>> check_file(Path("no-such-file"), InputError)
    Traceback (most recent call last):
    t5accel.errors.InputError: no-such-file is missing.
    """
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
    """The JSON object in a file.

    Args:
        path, error, advice: as in `check_file`.

    Raises:
        error: as in `check_file`; or the file holds no JSON, nests it too deeply, or holds something else than an
            object.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder) / "config.json"
    ...     _ = path.write_text('{"d_model": 8}')
    ...     read_json_object(path, InputError)
    {'d_model': 8}
    """
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
