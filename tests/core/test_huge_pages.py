"""Weights on huge pages: moved, unchanged, and never an error where a system does not take part."""

from __future__ import annotations

import mmap
import platform
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from t5accel.backends import ort_memory as module
from t5accel.backends.ort_memory import huge_pages
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.decoding.greedy_search import greedy
from t5accel.graphs.export import export_model
from t5accel.models.random_init import random_t5

SIZE = 64 << 20
MEMORY = Path("/proc/self/smaps_rollup")


def huge_bytes() -> int:
    """How much of this process's own memory lies on huge pages; 0 where the system does not say."""
    found = re.search(r"^AnonHugePages:\s+(\d+) kB", MEMORY.read_text() if MEMORY.exists() else "", re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def written_memory(size: int = SIZE) -> tuple[mmap.mmap, np.ndarray]:
    """Private memory as malloc gets it for large pieces, with something in it. numpy asks for huge pages by itself."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, dtype=np.int64)
    array[:] = np.arange(array.size)
    return memory, array


def moved(enabled: bool = True) -> int:
    """How many bytes more lie on huge pages after 64 MiB were written to."""
    before = huge_bytes()
    with huge_pages(enabled):
        memory, array = written_memory()
    grown = huge_bytes() - before
    assert (array == np.arange(array.size)).all()
    del array
    memory.close()
    return grown


@pytest.fixture
def linux_that_collapses() -> None:
    if sys.platform != "linux" or tuple(map(int, platform.release().split(".")[:2])) < (6, 1):
        pytest.skip("MADV_COLLAPSE came with Linux 6.1")
    if not module.PAGE_SIZE.exists() or "[never]" in (module.PAGE_SIZE.parent / "enabled").read_text():
        pytest.skip("huge pages are switched off here")


def test_what_was_allocated_inside_is_moved(linux_that_collapses):
    if moved() < SIZE // 2:
        pytest.skip("the system declined: too little memory is left in one piece")
    assert moved(enabled=False) < SIZE // 8 or "[always]" in (module.PAGE_SIZE.parent / "enabled").read_text()


def test_what_was_there_before_is_left_alone(linux_that_collapses):
    memory, array = written_memory()
    before = huge_bytes()
    with huge_pages():
        pass
    assert huge_bytes() - before < SIZE // 8
    del array
    memory.close()


@pytest.mark.parametrize("name", ["MAPS", "PAGE_SIZE"])
def test_other_systems_change_nothing(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(module, name, Path("/nowhere/at/all"))
    moved()


@pytest.mark.parametrize(
    ("before", "new"),
    [([], [(10, 20)]), ([(10, 20)], []), ([(0, 12), (18, 30)], [(12, 18)]), ([(0, 10), (20, 25)], [(10, 20)]),
     ([(12, 14), (14, 15)], [(10, 12), (15, 20)])],
)  # fmt: skip
def test_only_what_is_new(before: list[tuple[int, int]], new: list[tuple[int, int]]):
    assert module._without(before, 10, 20) == new


def test_the_same_tokens_with_and_without(tmp_path: Path):
    """24 MB of weights in the head alone, so that there is something to move."""
    model = random_t5(dict(d_model=64, d_kv=16, d_ff=64, num_heads=4, num_layers=1, vocab_size=100_000))
    export_model(model, tmp_path / "export")
    tokens = [
        greedy(OrtNumpy(tmp_path / "export", settings=SessionSettings(huge_pages=on)), [[5, 8, 1]],
               min_new_tokens=8, max_new_tokens=8).sequences
        for on in (True, False)
    ]  # fmt: skip
    np.testing.assert_array_equal(*tokens)
