"""The GPU suite: cells in order of priority, each kept as soon as it is measured, within a few minutes.

``t5accel bench --suite gpu --json FILE``, or ``python -m t5accel.gpu.suite --json FILE`` on a machine that has torch,
transformers and numpy and nothing else. The same command goes on where an interrupted run stopped.
"""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from t5accel.errors import InputError, MissingPackageError, T5AccelError
from t5accel.gpu.cells import CELLS, Cell
from t5accel.gpu.measure import let_go, measure
from t5accel.gpu.systems import Subject
from t5accel.lab.rows import aligned, here, rows_so_far, today, write_json

MINUTES = 8.0
RESERVE_S = 10.0  # for the end of a cell and for the table


def run_suite(
    path: str | os.PathLike[str],
    *,
    device: str = "cuda",
    cells: Sequence[Cell] = CELLS,
    minutes: float = MINUTES,
    rounds: int = 5,
    say: Callable[[str], Any] = print,
) -> list[dict[str, Any]]:
    """Measure what is not measured yet, and keep every cell's rows in a file.

    Args:
        path: the file of results; rows of another machine, version or commit are put aside.
        device: ``"cuda"``, or ``"cpu"`` to try it out.
        cells: by default all of `cells.CELLS`.
        minutes: no cell is begun that would not end in time.
        rounds: of the timing, at most.
        say: takes a line for each cell, and the table.

    Returns:
        All rows of the file.

    Raises:
        MissingPackageError: there is no GPU.
        InputError: ``minutes`` is not above 0, or ``path`` is a file of something else.
    """
    if not minutes > 0:
        raise InputError(f"minutes is {minutes!r}; give more than 0.")
    if device == "cuda" and not torch.cuda.is_available():
        raise MissingPackageError("This suite needs a GPU and a torch that sees it, and there is none here.")
    conditions = here() | {"suite": 1, "device": device}  # as they are now: a tracked file makes the commit dirty
    rows = rows_so_far(path, conditions)
    command = "t5accel bench --suite gpu --json FILE" + (f" --minutes {minutes:g}" if minutes != MINUTES else "")
    end = perf_counter() + 60 * minutes - RESERVE_S
    with TemporaryDirectory() as scratch, caches_in(scratch):
        subject: Subject | None = None
        for cell in cells:
            if cell.name in {row["cell"] for row in rows}:
                continue
            if (left := end - perf_counter()) < cell.least_s:
                say(f"{cell.name}: not begun, {max(left, 0):.0f} s are left")
                continue
            if subject is None or (subject.name, subject.floats) != (cell.model, cell.floats):
                subject = None  # before the next one is there
                let_go(device)
                subject = Subject(cell.model, cell.floats, device, Path(scratch))
            begun = perf_counter()
            refused = unequal(rows, cell.floats)
            found = measure(cell, subject, refused=refused, seconds=end - perf_counter(), rounds=rounds)
            let_go(device)
            if not found:
                say(f"{cell.name}: too slow for the time that is left")
                continue
            rows += found
            write_json(path, {**conditions, "date": today(), "command": command, "rows": rows})
            say(f"{cell.name}: {perf_counter() - begun:.0f} s")
    say(f"\n{table(rows)}")
    return rows


@contextmanager
def caches_in(folder: str) -> Iterator[None]:
    """Where engines and compiled code are kept meanwhile, unless somebody has said where.

    Compiling is timed from nothing, and the usual place for engines needs one package more to be found.
    """
    named = ("T5ACCEL_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    ours = {name: f"{folder}/{name}" for name in named if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


def unequal(rows: Sequence[Mapping[str, Any]], floats: str) -> dict[str, str]:
    """The systems that failed the comparison of outputs in these floats, and what was said of them."""
    compared = (row for row in rows if row["measured"] == "equality" and row["floats"] == floats)
    return {row["system"]: row["failed"] for row in compared if "failed" in row}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each system of each cell, and what failed.

    >>> print(table([{"cell": "t5-small", "measured": "speed", "system": "a", "latency_s": [0.5, 0.7, 0.6],
    ...               "new_tokens": 100, "ratio": None, "tokens_per_s": 167.0}]))
    cell      system  ms a step  tokens/s  ratio
    t5-small  a            6.00       167  1.00x
    """
    lines, notes = [("cell", "system", "ms a step", "tokens/s", "ratio")], []
    for row in rows:
        if "failed" in row:
            notes.append(f"{row['cell']}: {row['system']}: {row['failed']}")
        elif row["measured"] == "equality":
            error = f", error of logits {row['error']:.1e}" if "error" in row else ""
            notes.append(f"{row['cell']}: {row['system']}: {row['equal']} of {row['of']} tokens{error}")
        elif row["measured"] == "floor" and "floor_s" in row:
            notes.append(
                f"{row['cell']}: {row['kernels']} kernels a step (eager {row['eager_kernels']:.0f}), "
                f"{row['replayed_s'] * 1e6:.2f} µs each in a graph and {row['launch_s'] * 1e6:.2f} one by one, "
                f"{row['bytes_per_step'] / 1e6:.0f} MB: at least {row['floor_s'] * 1e3:.3f} ms"
            )
        elif row["measured"] == "compile":
            steps = row["break_even_steps"]
            after = "never" if steps is None else f"after {steps:,.0f} steps"
            notes.append(f"{row['cell']}: {row['compile_s']:.0f} s to compile, won back {after}")
        elif "latency_s" in row:
            ratio = row["ratio"]["median"] if row["ratio"] else 1.0
            step = median(row["latency_s"]) / row["new_tokens"] * 1e3
            lines.append((row["cell"], row["system"], f"{step:.2f}", f"{row['tokens_per_s']:.0f}", f"{ratio:.2f}x"))
    shown = aligned(lines, left=(0, 1)) if len(lines) > 1 else []
    return "\n".join([*notes, *([""] if notes and shown else []), *shown])


def run_in_time(path: str | os.PathLike[str], minutes: float = MINUTES, *, grace_s: float = 45.0) -> None:
    """The suite; and the end of this process some seconds after its time, whatever it waits for.

    A compiler or a driver may not come back. What was measured before is in the file.
    """

    def stop() -> None:
        print(f"{minutes:g} minutes are over and a cell has not come back; the rows before it are kept.", flush=True)
        os._exit(3)

    timer = threading.Timer(60 * minutes + grace_s, stop)
    timer.daemon = True
    timer.start()
    try:
        run_suite(path, minutes=minutes)
    finally:
        timer.cancel()


def main(arguments: Sequence[str] | None = None) -> None:
    """The suite from the command line."""
    parser = argparse.ArgumentParser(description="Measure on a GPU; ends within the given minutes.")
    parser.add_argument("--json", type=Path, required=True, help="the file of results")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    given = parser.parse_args(arguments)
    try:
        run_in_time(given.json, given.minutes)
    except T5AccelError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
