"""Are two outputs the same? Agreement of tokens, closeness of tensors, and a check that equality means something."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from t5accel.errors import InputError, T5AccelError


class ParityError(T5AccelError, AssertionError):
    """Two tensors that should be equal are not; the message says by how much and where."""


def token_agreement(sequences_a: ArrayLike, sequences_b: ArrayLike, pad_token_id: int) -> float:
    """Share (0 to 1) of positions at which two outputs hold the same token.

    Counted are the positions at which at least one of the two is not padding: a row that stops early disagrees with
    the rest of the longer one, and padding agrees with nothing.

    Args:
        sequences_a, sequences_b: ``(N, L_a)`` and ``(N, L_b)`` integers, padded on the right; L_a and L_b may differ.

    Raises:
        InputError: not two integer matrices of equally many rows, or nothing but padding.

    >>> token_agreement([[5, 6, 7, 1]], [[5, 9, 1]], pad_token_id=0)
    0.25
    """
    a, b = _array(sequences_a, "sequences_a", "iu"), _array(sequences_b, "sequences_b", "iu")
    if a.ndim != 2 or b.ndim != 2 or len(a) != len(b):
        raise InputError(f"sequences have the shapes {a.shape} and {b.shape}: both must be (N, L) with the same N")
    length = max(a.shape[1], b.shape[1])
    a, b = (np.pad(x, ((0, 0), (0, length - x.shape[1])), constant_values=pad_token_id) for x in (a, b))
    counted = (a != pad_token_id) | (b != pad_token_id)
    if not counted.any():
        raise InputError("both outputs are nothing but padding: their agreement says nothing")
    return float((a == b)[counted].mean())


def assert_varied(sequences: Any, at_least: int = 3, *, ignore: Collection[int] = (0, 1)) -> None:
    """Refuse a degenerate reference: some row must hold ``at_least`` distinct tokens, or equality proves nothing.

    Rows are looked at one by one: a model that repeats another token in each row is as degenerate as one that repeats
    the same.

    Args:
        sequences: ``(N, L)`` or ``(L,)`` integers.
        ignore: tokens that do not count; T5's padding (0) and end of sequence (1).

    Raises:
        InputError: the output does not vary, is empty, or is not of integers.

    >>> assert_varied([[17, 4, 9, 1, 0]])
    """
    tokens = _array(sequences, "sequences", "iu")
    if tokens.ndim not in (1, 2) or tokens.size == 0 or at_least < 1:
        raise InputError(f"sequences of shape {tokens.shape}, at_least={at_least}: give (N, L) tokens, at_least >= 1")
    most = max(len(set(row.tolist()) - set(ignore)) for row in np.atleast_2d(tokens))
    if most < at_least:
        raise InputError(
            f"equality on a degenerate output is no evidence: no row has more than {most} distinct tokens, wanted "
            f"{at_least}. Change the seed, the inputs or the weights of the reference"
        )


def assert_close(actual: ArrayLike, expected: ArrayLike, *, atol: float, rtol: float = 0.0) -> float:
    """Check ``|actual - expected| <= atol + rtol * |expected|`` everywhere; return the largest absolute difference.

    NaN is never close, not even to NaN; an infinity is close to itself only. Dtypes may differ, shapes may not.

    Args:
        actual, expected: numbers of any equal shape, at least one; torch tensors must be on the CPU, detached.

    Raises:
        ParityError: (an AssertionError) with shape, dtypes, max abs, max rel, the worst place and both values there.
        InputError: empty or non-numeric arrays, or a tolerance that is negative or not finite.

    >>> assert_close([1.0, 2.0], [1.0, 2.5], atol=1.0)
    0.5
    """
    for name, value in (("atol", atol), ("rtol", rtol)):
        if not 0 <= value < np.inf:
            raise InputError(f"{name}={value!r}: a tolerance is finite and not negative")
    a, e = _array(actual, "actual", "biuf"), _array(expected, "expected", "biuf")
    if a.shape != e.shape:
        raise ParityError(f"shapes differ: actual {a.shape} {a.dtype}, expected {e.shape} {e.dtype}")
    if a.size == 0:
        raise InputError(f"arrays of shape {a.shape} hold nothing to compare")
    equal, a64, e64 = a == e, a.astype(np.float64), e.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        difference = np.where(equal, 0.0, np.abs(a64 - e64))  # inf - inf would be NaN where both are the same infinity
        # a tolerance relative to an infinity is infinite and would accept any finite value: hence isfinite
        close = equal | (np.isfinite(difference) & (difference <= atol + rtol * np.abs(e64)))
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
        raise InputError(f"{name} is no array: {error}. Give rows of equal length, CPU tensors, detached") from error
    if array.dtype.kind not in kinds:
        raise InputError(f"{name} has dtype {array.dtype}: {'integers' if kinds == 'iu' else 'numbers'} are needed")
    return array
