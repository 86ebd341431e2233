"""The GPU suite: cells in order of priority, each kept as soon as it is measured, within a few minutes.

``python -m bench.gpu.suite --json FILE`` on a machine that has torch, transformers and numpy and nothing else. The same
command goes on where an interrupted run stopped, and tries again what failed in it. It ends with 0 when it is through
or its minutes are over, with 3 when a cell has not come back, and with 4 when the device is lost for this process: then
a new one can go on (`scripts/gpu_bundle.py` writes such a loop).
"""

from __future__ import annotations

import argparse
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from bench.gpu.cells import Cell, cells_for
from bench.gpu.measurement import PRECISIONS, failed, let_go, measure
from bench.harness import error_line
from bench.results import Row, environment, format_table, get_path, rows_so_far, step_ms, write_rows
from bench.systems import SMALL, THEIRS, ModelOnDevice
from t5accel.errors import InputError, MissingPackageError, T5AccelError

MINUTES = 8.0
RESERVE_S = 10.0  # for the end of a cell and for the table
SUITE = 3  # rows of another suite are measured again
NOT_BACK = "it has not come back: the process ended here"
CONDITIONS = ("suite", "device", "machine.gpu.name", "versions.torch", "versions.transformers")  # of all rows of a file

# Vendors, product lines, memory sizes and form factors. What tells faster cards from slower ones stays: PCIe, NVL, Ti.
_DROPPED = re.compile(r"nvidia|amd|tesla|geforce|quadro|radeon|instinct|graphics|gpu|generation|\d+gb|hbm\d*e?|sxm\d*")


class DeviceLostError(T5AccelError):
    """After an error that stays, as an address outside of memory, this process can do no more on its GPU."""


def run_suite(
    path: str | os.PathLike[str],
    *,
    device: str = "cuda",
    cells: Sequence[Cell] | None = None,
    only: str = "*",
    minutes: float = MINUTES,
    rounds: int = 5,
    say: Callable[[str], Any] = print,
) -> list[Row]:
    """Measure what is not measured yet, then again what failed before this run, and keep every cell's rows in a file.

    Args:
        path: the file of results, or a folder, which gets ``gpu-<card>.json``; a new one has no dot in its name. Rows
            of another card, torch, transformers or suite are put aside.
        device: ``"cuda"``, or ``"cpu"`` to try it out.
        cells: by default `cells.cells_for` this card.
        only: cells whose name fits this pattern, such as ``"runtimes*"``.
        minutes: no cell is begun that would not end in time.
        rounds: of the timing, at most.
        say: takes a line for each cell, and the table.

    Returns:
        All rows of the file.

    Raises:
        MissingPackageError: there is no GPU.
        InputError: ``minutes`` is not above 0, no cell is called as ``only`` says, or ``path`` is a file of something
            else.
        DeviceLostError: nothing more can be done in this process.
    """
    if not minutes > 0:
        raise InputError(f"minutes must be more than 0, got {minutes!r}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise MissingPackageError("This suite needs a GPU and a torch that sees it, and there is none here.")
    if cells is None:
        cells = cells_for(torch.cuda.get_device_capability() if device == "cuda" else None)
    if not (chosen := [cell for cell in cells if fnmatchcase(cell.name, only)]):
        names = "\n".join(f"  {cell.name}" for cell in cells)
        raise InputError(f"No cell is called as only={only!r} says; there are\n{names}")
    torch.set_float32_matmul_precision("highest")  # some images of containers allow TF32, which is not fp32
    about = environment() | {"suite": SUITE, "device": device}  # as it is now: a tracked file makes the commit dirty
    path = Path(path)
    if path.is_dir() or not (path.suffix or path.exists()):
        path /= f"gpu-{slug(torch.cuda.get_device_name()) if device == 'cuda' else 'none'}.json"
    book = Book(path, about)
    end = perf_counter() + 60 * minutes - RESERVE_S
    again = [cell for cell in chosen if any("failed" in row for row in book.of(cell))]
    todo = [cell for cell in chosen if not book.of(cell)] + again
    with TemporaryDirectory() as scratch, caches_in(scratch):
        subject: ModelOnDevice | None = None
        for cell in todo:
            refused = unequal(book.rows, cell)
            if cell in again and cell.measured not in ("equality", "draws") and not _may_change(book.of(cell), refused):
                continue
            if (left := end - perf_counter()) < cell.least_s:
                say(f"{cell.name}: not begun, {max(left, 0):.0f} s are left")
                continue
            if subject is None or (subject.name, subject.dtype) != (cell.model, cell.dtype):
                subject = None  # before the next one is there
                let_go(device)
                subject = ModelOnDevice(cell.model, cell.dtype, device, Path(scratch))
            begun = perf_counter()
            with book.open(cell):
                try:
                    found = measure(cell, subject, refused=refused, seconds=end - perf_counter(), rounds=rounds)
                except Exception as error:
                    found, subject = failed(cell, error_line(error)), None  # what was built may be half done
                book.keep(cell, found)
            if any("failed" in row for row in found):
                _require_device(device)
            let_go(device)
            say(
                f"{cell.name}: {perf_counter() - begun:.0f} s"
                if found
                else f"{cell.name}: too slow for the time that is left"
            )
    say(f"\n{table(book.rows)}")
    return book.rows


def slug(name: str) -> str:
    """The short name of a card, by which its files are called.

    ``name`` is what torch or the driver reports. Raises ``InputError`` where it has no letter or digit.

    >>> slug("NVIDIA H100 80GB HBM3"), slug("NVIDIA H100 PCIe"), slug("NVIDIA A100-SXM4-40GB")
    ('h100', 'h100-pcie', 'a100')
    >>> slug("Tesla T4"), slug("NVIDIA GeForce RTX 4090"), slug("NVIDIA L40S")
    ('t4', 'rtx-4090', 'l40s')
    """
    words = [word for word in re.split(r"[\s_-]+", name.lower()) if word]
    kept = [word for word in words if not _DROPPED.fullmatch(word)] or words
    found = re.sub(r"[^a-z0-9]+", "-", " ".join(kept)).strip("-")
    if not found:
        raise InputError(f"The GPU's name must be that which torch reports, such as 'NVIDIA H200', got {name!r}.")
    return found


class Book:
    """The file of results and its rows, by cell.

    Args:
        path: of the file, which may be there.
        about: what it says of itself: machine, versions, commit, suite and device.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]):
        self.path, self.about = path, about
        self.rows = rows_so_far(path, {name: get_path(about, name) for name in CONDITIONS})

    def of(self, cell: Cell) -> list[Row]:
        """A cell's rows."""
        return [row for row in self.rows if row["cell"] == cell.name]

    @contextmanager
    def open(self, cell: Cell) -> Iterator[None]:
        """While a cell is measured the file says that it has not come back, for a process that is ended cannot."""
        before = list(self.rows)
        if not self.of(cell):
            self._write([*before, *failed(cell, NOT_BACK)])
        try:
            yield
        except BaseException:  # an interrupt: as if it had not been begun
            self._write(before)
            raise

    def keep(self, cell: Cell, found: list[Row]) -> None:
        """Rows in place of those that the cell had, unless more of these failed; none leave what there was."""
        had = self.of(cell)
        if found and (not had or _failures(found) <= _failures(had)):
            rows = [row | {"commit": self.about["commit"] or "unknown"} for row in found]
            self.rows = [row for row in self.rows if row["cell"] != cell.name] + rows
        self._write(self.rows)

    def _write(self, rows: list[Row]) -> None:
        if rows:
            write_rows(self.path, rows, command="python -m bench.gpu.suite --json FILE", **self.about)
        else:
            self.path.unlink(missing_ok=True)


def _failures(rows: list[Row]) -> int:
    return sum("failed" in row for row in rows)


def _may_change(rows: list[Row], refused: Mapping[str, str]) -> bool:
    """Whether a failed system may do better now: one that is not equal is not even begun."""
    return any("failed" in row and row["system"] not in refused for row in rows)


def _require_device(device: str) -> None:
    try:
        if device == "cuda":
            torch.zeros(1, device=device).item()
    except RuntimeError as error:
        raise DeviceLostError(
            f"This process has lost its GPU ({error_line(error)}): start it again, and it goes on."
        ) from error


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


def unequal(rows: Sequence[Mapping[str, Any]], cell: Cell) -> dict[str, str]:
    """Systems of ours that failed a comparison of outputs which a cell rests on, and what was said of them.

    It rests on those of its own model and of t5-small's size, in its own dtype and in fp32, greedy and with as many
    beams. transformers is what they are compared with; it is never refused.
    """
    precisions = {PRECISIONS[cell.dtype], PRECISIONS["float32"]}
    proofs = (
        row for row in rows
        if row["measured"] == "equality" and row["model"] in (cell.model, SMALL) and row["precision"] in precisions
        and row["beams"] in (1, cell.beams)
    )  # fmt: skip
    return {row["system"]: row["failed"] for row in proofs if "failed" in row and row["system"] not in THEIRS}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each system of each cell, and what failed.

    >>> print(table([{"cell": "t5-small", "measured": "speed", "system": "a", "latency_s": [0.5, 0.7, 0.6],
    ...               "new_tokens": 100, "ratio": 1.0, "tokens_per_s": 167.0}]))
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
        elif row["measured"] == "floor":
            notes += _floor_notes(row)
        elif row["measured"] == "compile":
            steps = row.get("break_even_steps")
            after = "never" if steps is None else f"after {steps:,.0f} steps"
            notes.append(f"{row['cell']}: {row['compile_s']:.0f} s to compile, won back {after}")
        elif "latency_s" in row:
            # A text that is read whole has no steps, and requests in flight share theirs.
            step = f"{step_ms(row):.2f}" if "new_tokens" in row and row.get("forced", True) else "–"
            ratio = f"{row['ratio']:.2f}x" if "ratio" in row else "–"
            lines.append((row["cell"], row["system"], step, f"{row['tokens_per_s']:.0f}", ratio))
            if "answers_per_s" in row:
                notes.append(f"{row['cell']}: {row['system']}: {row['answers_per_s']:,.0f} requests a second")
    shown = format_table(lines, left=(0, 1)) if len(lines) > 1 else []
    return "\n".join([*notes, *([""] if notes and shown else []), *shown])


def _floor_notes(row: Mapping[str, Any]) -> Iterator[str]:
    if "floor_s" in row:
        yield (
            f"{row['cell']}: {row.get('kernels', row['operators'])} kernels a step, "
            f"{row['replayed_s'] * 1e6:.2f} µs each in a graph and {row['launch_s'] * 1e6:.2f} one by one, "
            f"{row['bytes_per_step'] / 1e6:.0f} MB: at least {row['floor_s'] * 1e3:.3f} ms"
        )
    yield from (f"{row['cell']}: {name}" for name in row.get("kernel_names", ())[:12])
    yield from (f"{row['cell']}: without {what}" for what in row.get("lacks", ()))


def run_in_time(
    path: str | os.PathLike[str], minutes: float = MINUTES, *, only: str = "*", grace_s: float = 45.0
) -> None:
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
        run_suite(path, minutes=minutes, only=only)
    finally:
        timer.cancel()


def main(arguments: Sequence[str] | None = None) -> None:
    """The suite from the command line."""
    parser = argparse.ArgumentParser(description="Measure on a GPU; ends within the given minutes.")
    parser.add_argument("--json", type=Path, required=True, help="the file of results, or its folder")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--only", default="*", help="cells whose name fits this pattern")
    given = parser.parse_args(arguments)
    try:
        run_in_time(given.json, given.minutes, only=given.only)
    except DeviceLostError as error:
        parser.exit(4, f"{error}\n")
    except T5AccelError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
