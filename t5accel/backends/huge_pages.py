"""Keep a session's weights on huge pages, where Linux lets a process ask for them.

A decoding step reads every weight of the decoder once. On pages of 4 KiB the processor has to look up an address every
four kilobytes, on pages of 2 MiB hardly ever, and reading gets faster. ONNX Runtime allocates its packed weights with
plain ``malloc``, which most systems back with small pages; so we ask for the exchange once they are there
(``MADV_COLLAPSE``, Linux 6.1). It takes about a millisecond per megabyte, once.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAPS, MEMORY = Path("/proc/self/maps"), Path("/proc/self/smaps_rollup")
PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
MADV_COLLAPSE = 25
# Smaller pieces hold no weights: a thread's stack has 8 MiB, and would be made whole by this.
SMALLEST = 16 << 20

Range = tuple[int, int]  # of addresses, the second one excluded


@contextmanager
def huge_pages(enabled: bool = True) -> Iterator[None]:
    """What is allocated in the ``with`` block, and still there at its end, is moved to huge pages.

    Where the system declines (it is not Linux 6.1 or later, huge pages are switched off, memory is in pieces) the pages
    stay as they are: results never depend on it, and `huge_bytes` tells. What other threads allocate meanwhile may be
    moved, too.

    >>> with huge_pages():
    ...     weights = bytearray(64 << 20)
    >>> huge_bytes() >= 0
    True
    """
    before = _private_memory() if enabled else []
    yield
    if enabled:
        for start, end in _private_memory():
            for first, last in _without(before, start, end):
                _collapse(first, last)


def huge_bytes() -> int:
    """How much of this process's own memory lies on huge pages; 0 where that cannot be told."""
    try:
        found = re.search(r"^AnonHugePages:\s+(\d+) kB", MEMORY.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def _private_memory() -> list[Range]:
    """The writable ranges of this process that no file lies behind."""
    try:
        lines = MAPS.read_text().splitlines()
    except OSError:
        return []
    found = (re.fullmatch(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0\s*(?:\[heap\])?", line) for line in lines)
    return [(int(match[1], 16), int(match[2], 16)) for match in found if match]


def _without(before: list[Range], start: int, end: int) -> list[Range]:
    """What of ``start`` … ``end`` none of the ranges ``before``, which are sorted, covers: it is new.

    >>> _without([(2, 3), (5, 9)], 0, 7)
    [(0, 2), (3, 5)]
    """
    new, reached = [], start
    for first, last in before:
        if last <= reached or first >= end:
            continue
        if first > reached:
            new.append((reached, first))
        reached = last
    if reached < end:
        new.append((reached, end))
    return new


def _collapse(start: int, end: int) -> None:
    """Whole huge pages within ``start`` … ``end``. A refusal costs nothing but the speed, and is no error."""
    if sys.platform != "linux" or end - start < SMALLEST or not PAGE_SIZE.exists():
        return
    page = int(PAGE_SIZE.read_text())
    first, last = -(-start // page) * page, end // page * page
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.madvise(first, last - first, MADV_COLLAPSE)
