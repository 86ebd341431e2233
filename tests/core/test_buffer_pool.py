"""Buffers that are used again are never buffers in use."""

import gc
import threading

import numpy as np
import pytest

from t5accel.backends import ort_memory
from t5accel.backends.ort_memory import BufferPool, ScratchBuffer
from t5accel.backends.ort_numpy import OrtNumpy


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_a_pool_hands_out_free_memory_again_whatever_its_shape():
    pool = BufferPool()
    first = [address(array) for array in pool.arrays([(4, 5), (3, 2)], np.float32)]
    assert [address(array) for array in pool.arrays([(2, 10), (6,)], np.float32)] == first
    assert [array.shape for array in pool.arrays([(1, 1), (2, 1)], np.float32)] == [(1, 1), (2, 1)]


def test_a_pool_makes_new_memory_where_the_old_does_not_fit():
    pool = BufferPool()
    for shapes in ([(4, 5), (3, 2)], [(5, 5), (3, 2)], [(4, 5)], [(4, 5), (3, 2), (1,)]):
        assert [array.shape for array in pool.arrays(shapes, np.float32)] == shapes
    assert pool.arrays(shapes, np.float64)[0].dtype == np.float64


@pytest.mark.parametrize(
    "hold", [lambda a: a, lambda a: a[1:, 2], lambda a: a.T.reshape(-1), memoryview, lambda a: [[a]]]
)
def test_a_pool_leaves_alone_what_is_held_in_any_way(hold):
    pool = BufferPool()
    arrays = pool.arrays([(4, 5), (3, 2)], np.float32)
    arrays[0][:] = 7
    kept = hold(arrays[0])
    del arrays
    gc.collect()
    for _ in range(3):
        again = pool.arrays([(4, 5), (3, 2)], np.float32)
        again[0][:] = 8
        del again
    while isinstance(kept, list):
        kept = kept[0]
    assert (np.asarray(kept) == 7).all()


def test_threads_never_get_the_same_memory_at_once():
    pool, failures = BufferPool(), []

    def work(number: int) -> None:
        for turn in range(200):
            (array,) = pool.arrays([(64,)], np.int64)
            array[:] = number * 1000 + turn
            if len(set(array.tolist())) != 1:
                failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_rows_are_gathered_into_memory_that_the_step_before_used():
    spare, rng = ScratchBuffer(), np.random.default_rng(0)
    addresses = set()
    for width in range(1, 9):  # a past that grows by every step
        past = [rng.normal(size=(6, width)) for _ in range(2)]
        index = rng.integers(0, 6, 6)
        found = spare.gather(past, [index] * len(past))
        assert all((new == old[index]).all() for new, old in zip(found, past, strict=True))
        addresses.add(address(found[0]))
    assert len(addresses) < 5
    once = spare.gather(past, [index] * len(past))
    before = [array.copy() for array in once]
    twice = spare.gather(once, [index] * len(once))  # without a step between
    assert all((array == copy).all() for array, copy in zip(once, before, strict=True))
    assert all((new == old[index]).all() for new, old in zip(twice, before, strict=True))


def test_a_source_keeps_its_numbers_while_others_are_encoded(exported, monkeypatch):
    monkeypatch.setattr(ort_memory, "SLICE_TOKENS", 8)  # so that small batches are sliced
    backend, rng = OrtNumpy(exported("deeper-decoder")), np.random.default_rng(0)
    batches = [rng.integers(3, backend.vocab_size, (4, 6)) for _ in range(3)]
    sources = [backend.encode(ids, np.ones_like(ids)) for ids in batches]  # all of them are held
    copies = [{name: np.array(backend._array(held)) for name, held in source.inputs.items()} for source in sources]
    backend.encode(batches[0][::-1].copy(), np.ones_like(batches[0]))
    for ids, source, copied in zip(batches, sources, copies, strict=True):
        alone = OrtNumpy(backend.folder).encode(ids, np.ones_like(ids))
        for name, expected in alone.inputs.items():
            np.testing.assert_array_equal(backend._array(source.inputs[name]), copied[name])
            np.testing.assert_array_equal(backend._array(expected), copied[name])
    assert not np.array_equal(copies[0]["cross_key_0"], copies[1]["cross_key_0"])
