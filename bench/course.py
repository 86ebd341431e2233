"""Run the course: execute every notebook in order, keep the executed copies, and write the scoreboard page."""

from __future__ import annotations

import html
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

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
    for cell in book.cells:  # outputs that a failed run leaves are from this run
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    out.mkdir(parents=True, exist_ok=True)
    copy = out / notebook.name
    own = len(book.cells)
    book.cells += _solution_cells(book, notebook)
    finished_s = []

    def on_executed(cell_index: int, **_: object) -> None:
        if cell_index < own:  # what is appended is not the notebook's time
            finished_s.append(time.perf_counter())
            on_cell()

    client = NotebookClient(
        book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(notebook.parent)}},
        on_cell_executed=on_executed,
        # Over plain TCP every kernel warns that others on this machine may listen.
        config=Config({"KernelManager": {"transport_encryption": "auto"}} if zmq.has("curve") else {}),
    )  # fmt: skip
    started = time.perf_counter()
    try:
        with TemporaryDirectory(ignore_cleanup_errors=True) as scratch:  # a kernel is killed before it clears its own
            client.execute(env=os.environ | {"TMPDIR": scratch})
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise NotebookError(f"{notebook.name} failed; the copy as far as it ran is {copy}.\n{error}") from error
    finally:
        appended = book.cells[own:]
        del book.cells[own:]
        nbformat.write(book, copy)
    _require_solved(notebook, book.cells, appended)
    return NotebookRun(notebook.name, max(finished_s, default=started) - started, copy)


def _is_task(cell: Any) -> bool:
    return "your-turn" in cell.metadata.get("tags", [])


def _solution_cells(book: Any, notebook: Path) -> list[Any]:
    """The code of ``solutions/NAME.py``: the reader's tasks, their checks again, then the exercises."""
    import nbformat

    path = notebook.parent / "solutions" / f"{notebook.stem}.py"
    if not path.exists():
        return []
    task, *exercises = re.split(r"^# %%.*\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    checks = [cell for cell in book.cells if _is_task(cell)]
    cells = [nbformat.v4.new_code_cell(task)]
    cells += [nbformat.v4.new_code_cell(check.source, metadata={"tags": ["your-turn"]}) for check in checks]
    return cells + [nbformat.v4.new_code_cell(exercise) for exercise in exercises]


def _require_solved(notebook: Path, cells: list[Any], appended: list[Any]) -> None:
    """Every check of a task must fail on the notebook's stub and pass on its solution."""
    for found, word in ((cells, ": not solved yet ("), (appended, ": solved.")):
        for cell in filter(_is_task, found):
            said = "".join(output.get("text", "") for output in cell.outputs)
            if word not in said:
                raise NotebookError(f"{notebook.name}: a task's check must print {word!r}, got {said!r}.")


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
