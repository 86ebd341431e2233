"""Equal outputs pass, and whatever differs, is NaN, or is too dull to prove anything is refused with a reason."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import refused

from t5accel.errors import InputError, T5AccelError
from t5accel.parity import ParityError, assert_close, assert_varied

# the machine may be busy with other work: a slow example is no failure
unhurried = settings(deadline=None, max_examples=60)


def test_what_is_refused() -> None:
    refused(assert_varied, "sequences", [], np.zeros((0, 4), int), [[0.5, 1.5, 2.5]], [[1, 2], [3]], 5, match="")
    refused(partial(assert_varied, [[5, 6, 7]]), "at_least", 0)
    refused(partial(assert_close, [1.0], [1.0]), "atol", -1.0, np.nan, np.inf)
    refused(partial(assert_close, [1.0], [1.0], atol=0.0), "rtol", -1.0)
    pairs = (([], []), (["a"], ["a"]), ([[1.0], []], [1.0]), (None, [1.0]))
    refused(lambda pair: assert_close(*pair, atol=1.0), "pair", *pairs, match="")


def test_assert_varied_refuses_degenerate_outputs() -> None:
    assert_varied(np.array([[7, 8, 9, 1, 0]]))
    assert_varied([7, 8, 9])
    assert_varied([[5, 5, 5], [7, 8, 9]])
    assert_varied([[7, 7, 8]], at_least=2)
    assert_varied([[0, 1, 2]], ignore=())
    for degenerate in ([[7, 7, 7, 1, 0]], [[5, 5], [6, 6], [7, 7]], [[8, 9, 8, 1, 0]]):
        with pytest.raises(InputError, match="degenerate output is no evidence"):
            assert_varied(degenerate)


def test_parity_returns_the_largest_difference() -> None:
    a = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 3, 4)
    b = a.copy()
    b[1, 2, 3] += 1e-3
    assert assert_close(a, b, atol=1e-2) == pytest.approx(1e-3, rel=1e-3)
    assert assert_close(a, a.astype(np.float16), atol=1e-3) <= 1e-3
    assert assert_close([True, False], [True, False], atol=0) == 0
    assert assert_close(1.5, 1.0, atol=0, rtol=0.5) == 0.5
    assert assert_close([-np.inf, 1], [-np.inf, 1], atol=0) == 0  # masked logits
    with pytest.raises(ParityError):  # whose difference float64 rounds to 0
        assert_close([2**53], [2**53 + 1], atol=0)


def test_parity_error_informs() -> None:
    expected = np.ones((2, 3), np.float32) * 2
    actual = expected.astype(np.float64)
    actual[1, 2], actual[0, 1] = 2.5, 2.001
    with pytest.raises(ParityError) as caught:
        assert_close(actual, expected, atol=1e-4)
    for fact in ("2 of 6", "shape (2, 3)", "float64 against float32", "max abs 0.5", "max rel 0.25", "worst at (1, 2)",
                 "actual 2.5", "expected 2.0", "atol=0.0001"):  # fmt: skip
        assert fact in str(caught.value)
    assert isinstance(caught.value, AssertionError) and isinstance(caught.value, T5AccelError)


@pytest.mark.parametrize(("actual", "expected", "where"), [
    ([1.0, np.nan], [1.0, 1.0], r"worst at \(1,\)"), ([1.0, 1.0], [np.nan, 1.0], r"worst at \(0,\)"),
    ([np.nan], [np.nan], "nan"), ([np.inf], [1.0], "inf"), ([1.0], [np.inf], "inf"), ([np.inf], [-np.inf], "inf"),
    ([9.0, np.nan], [1.0, np.nan], r"2 of 2 .*worst at \(1,\)"), (3.0, 1.0, r"worst at \(\)"),
])  # fmt: skip
def test_parity_never_accepts_nan_or_a_lone_infinity(actual, expected, where: str) -> None:
    with pytest.raises(ParityError, match=where):
        assert_close(actual, expected, atol=0.5, rtol=0.5)


@unhurried
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8), st.floats(0, 10), st.data())
def test_parity_agrees_with_numpy(expected, atol, data) -> None:
    actual = [x + data.draw(st.floats(-12, 12)) for x in expected]
    if np.allclose(actual, expected, atol=atol, rtol=0):
        assert assert_close(actual, expected, atol=atol) == np.abs(np.subtract(actual, expected)).max()
    else:
        with pytest.raises(ParityError):
            assert_close(actual, expected, atol=atol)
