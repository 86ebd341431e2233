"""Equality of two outputs: closeness of tensors, non-degenerate references."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from t5accel.errors import InputError, T5AccelError


class ParityError(T5AccelError, AssertionError):
    """Two tensors differ; the message says by how much and where."""


def assert_varied(sequences: Any, at_least: int = 3, *, ignore: Collection[int] = (0, 1)) -> None:
    """Raise ``InputError`` for a degenerate reference, with which equality proves nothing.

    Some row of ``sequences``, (N, L) or (L,) integers, must hold ``at_least`` distinct tokens; ``ignore`` are T5's
    padding and end. Rows count one by one: a model that repeats a different token in each row is degenerate, too.

    >>> assert_varied([[17, 4, 9, 1, 0]])
    """
    tokens = _array(sequences, "sequences", "iu")
    if tokens.ndim not in (1, 2) or tokens.size == 0 or at_least < 1:
        raise InputError(f"sequences must be (N, L) tokens and at_least >= 1, got {tokens.shape} and {at_least}.")
    most = max(len(set(row.tolist()) - set(ignore)) for row in np.atleast_2d(tokens))
    if most < at_least:
        raise InputError(
            f"some row of sequences must have {at_least} distinct tokens, got at most {most}: equality on a degenerate "
            "output is no evidence. Change the seed, the inputs or the weights of the reference."
        )


def assert_close(actual: ArrayLike, expected: ArrayLike, *, atol: float, rtol: float = 0.0) -> float:
    """Check ``|actual - expected| <= atol + rtol * |expected|`` everywhere; return the largest absolute difference.

    NaN is never close, not even to NaN; an infinity is close to itself only. Dtypes may differ, shapes may not.
    torch tensors must be on the CPU, detached. Raises `ParityError`; ``InputError`` for empty or non-numeric arrays.

    >>> assert_close([1.0, 2.0], [1.0, 2.5], atol=1.0)
    0.5
    """
    for name, value in (("atol", atol), ("rtol", rtol)):
        if not 0 <= value < np.inf:
            raise InputError(f"{name} must be finite and not negative, got {value!r}.")
    a, e = _array(actual, "actual", "biuf"), _array(expected, "expected", "biuf")
    if a.shape != e.shape:
        raise ParityError(f"actual must have the shape of expected, {e.shape} {e.dtype}, got {a.shape} {a.dtype}.")
    if a.size == 0:
        raise InputError(f"actual and expected must not be empty, got shape {a.shape}.")
    equal, a64, e64 = a == e, a.astype(np.float64), e.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        difference = np.where(equal, 0.0, np.abs(a64 - e64))  # inf - inf would be NaN where both are the same infinity
        # a difference that float64 rounds to 0 proves nothing
        # a tolerance relative to an infinity is infinite and would accept any finite value: hence isfinite
        close = equal | (np.isfinite(difference) & (difference <= atol + rtol * np.abs(e64)) & (difference > 0))
        relative = np.where(equal, 0.0, difference / np.abs(e64))
    if close.all():
        return float(difference.max())
    # argmax finds the first NaN, if there is one, and else the largest difference among the places that are not close
    worst = np.unravel_index(np.argmax(np.where(close, -1.0, difference)), a.shape)
    raise ParityError(
        f"{int((~close).sum())} of {a.size} values are not close (atol={atol:g}, rtol={rtol:g}): shape {a.shape}, "
        f"dtype {a.dtype} against {e.dtype}, max abs {difference.max():.6g}, max rel {relative.max():.6g}, "
        f"worst at {tuple(map(int, worst))}: actual {a[worst]!s}, expected {e[worst]!s}"
    )


def _array(values: Any, name: str, kinds: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:  # ragged rows; tensors on a GPU, with a gradient, bfloat16
        raise InputError(
            f"{name} must be an array: {error}. Give rows of equal length, CPU tensors, detached."
        ) from error
    if array.dtype.kind not in kinds:
        raise InputError(f"{name} must hold {'integers' if kinds == 'iu' else 'numbers'}, got {array.dtype}.")
    return array
