"""Run the course: execute every notebook in order, keep the executed copies, and write the scoreboard page."""

from __future__ import annotations

import html
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench import figures as draw
from bench.results import DATA, Row, load_results, write_rows
from bench.scoreboard import Forced, bench
from t5accel import machine
from t5accel.errors import InputError, MissingPackageError, T5AccelError, install

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S = 45.0  # what a notebook may take on two cores


class NotebookError(T5AccelError, RuntimeError):
    """A notebook did not run to its end; the message names the cell and shows its error."""


@dataclass(frozen=True)
class NotebookRun:
    """An executed copy and how long it took."""

    name: str
    seconds: float
    copy: Path


def notebooks_in(folder: Path) -> list[Path]:
    """The numbered notebooks of a folder, in order. Raises ``InputError`` if there is none."""
    found = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    if not found:
        raise InputError(f"No numbered notebook in {folder}: run this in a checkout of the course, or name its folder.")
    return found


def execute(notebook: Path, out: Path, *, on_cell: Callable[[], None] = lambda: None) -> NotebookRun:
    """Execute one notebook in its own folder and write the executed copy to ``out``.

    The copy is written even when a cell fails, so that the place can be looked at.
    """
    try:
        import nbformat
        import zmq
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
        from traitlets.config import Config
    except ImportError as error:
        raise MissingPackageError(f"Running notebooks needs nbclient: {install('course')}.") from error

    book = nbformat.read(notebook, as_version=4)
    out.mkdir(parents=True, exist_ok=True)
    copy = out / notebook.name
    client = NotebookClient(
        book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(notebook.parent)}},
        on_cell_executed=lambda **_: on_cell(),
        # Over plain TCP every kernel warns that others on this machine may listen.
        config=Config({"KernelManager": {"transport_encryption": "auto"}} if zmq.has("curve") else {}),
    )  # fmt: skip
    started = time.perf_counter()
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise NotebookError(f"{notebook.name} failed; the copy as far as it ran is {copy}.\n{error}") from error
    finally:
        nbformat.write(book, copy)
    return NotebookRun(notebook.name, time.perf_counter() - started, copy)


def run_course(
    notebooks: Path, out: Path, *, measure: Callable[[], list[Row]] | None = None
) -> tuple[list[NotebookRun], str]:
    """Execute every notebook and measure a first, quick scoreboard; returns the runs and the scoreboard as text.

    Writes the executed copies, ``course.json`` (seconds of each), ``scoreboard.json`` and ``scoreboard.html`` to
    ``out``. Recorded results, measured at length on a quiet machine, are shown below the live ones.
    """
    import nbformat

    books = notebooks_in(notebooks)
    cells = sum(sum(cell.cell_type == "code" for cell in nbformat.read(book, as_version=4).cells) for book in books)
    runs = []
    with machine.progress_bar(total=cells, unit="cell") as bar:
        for book in books:
            bar.set_description(book.stem)
            runs.append(execute(book, out, on_cell=bar.update))
    # Live and short: a few rows of each evaluation set, three rounds. The recorded board is the full measurement.
    rows = measure() if measure else bench("mini", Forced(), rounds=3, limit=10, peak_memory=False)
    write_rows(out / "scoreboard.json", rows, command="python -m bench course")
    live = json.loads((out / "scoreboard.json").read_text(encoding="utf-8"))
    boards = [("Measured now, quick", live)]
    for path in sorted((DATA / "results").glob("scoreboard-*.json")):
        boards.append((f"Recorded in full: {path.stem}", load_results(path.name)))
    seconds = [{"measured": "course", "notebook": run.name, "seconds": round(run.seconds, 1)} for run in runs]
    write_rows(out / "course.json", seconds, command="python -m bench course")
    items = "".join(f"<li>{html.escape(run.name)}: {run.seconds:.0f} s</li>" for run in runs)
    page = draw.page(boards, notes=f"<p>Notebooks</p><ul>{items}</ul>")
    (out / "scoreboard.html").write_text(page, encoding="utf-8")
    return runs, draw.board(rows)


def summary(runs: list[NotebookRun]) -> str:
    """One line a notebook, with a remark where it took longer than it may."""
    return "\n".join(
        f"{run.name}: {run.seconds:.0f} s" + ("" if run.seconds <= LIMIT_S else f", over the limit of {LIMIT_S:.0f} s")
        for run in runs
    )
