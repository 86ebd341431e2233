"""The bookkeeping of unequal pasts, which `test_conformance` runs in any mixture of operations."""

from __future__ import annotations

import numpy as np
import pytest

from t5accel.checks import check_vocabulary
from t5accel.decoding.backend import PastLengths
from t5accel.errors import InputError


def test_a_trim_leaves_no_position_that_is_nobodys() -> None:
    rows, _ = PastLengths.empty(2, 2).appended(3).trimmed(np.array([[1, 2], [1, 1]]))
    assert rows.width == 2 and rows.padding.tolist() == [[1, 0], [1, 1]]
    rows, index = rows.appended(2).trimmed(np.zeros((2, 2), dtype=np.int64))
    assert rows.width == 2 and index.tolist() == [[[0, 1]] * 2] * 2
    rows, index = PastLengths.empty(2, 1).appended(3).trimmed(np.array([[0], [0]]))
    assert rows.width == 0 and not rows.ragged and index.shape == (2, 1, 0)


def test_after_a_trim_there_is_no_last_step() -> None:
    rows, _ = PastLengths.empty(1, 1).appended(3).trimmed(np.array([[2]]))
    assert rows.last == 0 and rows.trimmed(np.array([[0]]))[1] is None


@pytest.mark.parametrize("ids", [[-1], [300], [0, 300], [299, -1], [2**62], [-(2**63)], [2**63 - 1]])
def test_ids_outside_of_the_vocabulary(ids: list[int]) -> None:
    array = np.array(ids, dtype=np.int64)
    with pytest.raises(InputError, match=rf"0 … 299, got {min(ids)} … {max(ids)}"):
        check_vocabulary(array, 300)
    every_second = np.zeros((len(ids), 2), dtype=np.int64)
    every_second[:, 0] = ids
    with pytest.raises(InputError, match="0 … 299"):
        check_vocabulary(every_second[::-1, ::-1], 300)
    check_vocabulary(every_second[:, 1], 1)
