"""The bookkeeping of unequal pasts: gathered by its indices, plain tensors hold what plain lists hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t5accel.checks import check_vocabulary
from t5accel.decoding.backend import PastLengths, right_aligned
from t5accel.errors import InputError

events = st.lists(
    st.tuples(st.sampled_from(["append", "append", "rollback", "reorder", "select_sources"]), st.integers(0, 2**16))
)


@settings(deadline=None, max_examples=80)
@given(batch=st.integers(1, 4), rows=st.integers(1, 3), events=events)
def test_the_indices_gather_what_lists_would_hold(batch: int, rows: int, events: list[tuple[str, int]]) -> None:
    histories, lists = PastLengths.empty(batch, rows), [[[] for _ in range(rows)] for _ in range(batch)]
    tensor, last, count = np.zeros((batch, rows, 0), dtype=np.int64), 0, 0
    for event, seed in events:
        rng, before = np.random.default_rng(seed), histories
        was = (before.padding.copy(), before.width, before.last, before.ragged)
        if event == "append":
            last = int(rng.integers(1, 4))
            new = np.arange(count, count + len(lists) * rows * last).reshape(len(lists), rows, last)  # no number twice
            count += new.size
            histories, tensor = histories.appended(last), np.concatenate([tensor, new], axis=2)
            for source, chosen in zip(lists, new.tolist(), strict=True):
                for row, tokens in zip(source, chosen, strict=True):
                    row.extend(tokens)
        elif event == "rollback":
            accepted = rng.integers(0, last + 1, (len(lists), rows))
            histories, index = histories.trimmed(accepted)
            assert (index is None) == (accepted == last).all()
            tensor = tensor if index is None else np.take_along_axis(tensor, index, axis=2)
            for source, chosen in zip(lists, accepted.tolist(), strict=True):
                for row, kept in zip(source, chosen, strict=True):
                    del row[len(row) - last + kept :]
            last = 0
        elif event == "reorder":
            chosen = rng.integers(0, rows, (len(lists), rows))
            histories, index = histories.reordered(chosen)
            assert (index is None) == (chosen == np.arange(rows)).all()
            if index is not None:
                assert index.shape == (len(lists) * rows,)
                tensor = tensor.reshape(len(index), tensor.shape[2])[index].reshape(tensor.shape)
            lists = [[list(source[row]) for row in order] for source, order in zip(lists, chosen.tolist(), strict=True)]
        else:
            kept = rng.integers(0, len(lists), rng.integers(1, len(lists) + 1))
            histories, index = histories.kept(kept)
            tensor, lists = tensor[index], [[list(row) for row in lists[source]] for source in kept]
            histories, unused = histories.narrowed()
            tensor = tensor[..., unused:]
            assert histories.width == max(len(row) for source in lists for row in source)
        assert (was[0] == before.padding).all() and was[1:] == (before.width, before.last, before.ragged)
        lengths = [[len(row) for row in source] for source in lists]
        assert histories.lengths.tolist() == lengths and histories.shape == (len(lists), rows)
        assert histories.width == tensor.shape[2] and histories.last == last
        assert histories.ragged == histories.padding.any()
        mask = histories.mask()
        assert mask.dtype == np.int64
        np.testing.assert_array_equal(mask, right_aligned(np.array(lengths), tensor.shape[2]))
        flat = [tensor[b, k][mask[b, k] == 1].tolist() for b in range(len(lists)) for k in range(rows)]
        assert flat == [row for source in lists for row in source]


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
