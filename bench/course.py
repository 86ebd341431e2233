"""Run the course: execute every notebook in order, keep the executed copies, report on each, measure a scoreboard."""

from __future__ import annotations

import html
import json
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from bench import figures as draw
from bench.results import DATA, LIBRARIES, Row, html_table, load_results, provenance, write_rows
from bench.scoreboard import Forced, bench
from t5accel import machine
from t5accel.errors import InputError, MissingPackageError, install

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S = 45.0  # what a notebook may take on two cores


@dataclass(frozen=True)
class NotebookRun:
    """An executed copy, how long it took, and why it ended early, if it did."""

    name: str
    seconds: float
    copy: Path
    peak_memory_bytes: int = 0  # of the kernel's process, without processes that the notebook starts
    failed: str = ""  # the error in one line
    details: str = ""  # its cell and traceback, where it has them


def notebooks_in(folder: Path) -> list[Path]:
    """The numbered notebooks of a folder, in order. Raises ``InputError`` if there is none."""
    found = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    if not found:
        raise InputError(f"No numbered notebook in {folder}: run this in a checkout of the course, or name its folder.")
    return found


def execute(
    notebook: Path, out: Path, *, first: int | None = None, timeout_s: int = 600,
    on_cell: Callable[[], None] = lambda: None,
) -> NotebookRun:  # fmt: skip
    """Execute one notebook in its own folder and write the executed copy to ``out``, as far as it ran.

    With ``first`` only that many cells are run, without the solutions. Only what the cells do wrong is in the result:
    a notebook that cannot be read raises.
    """
    try:
        import nbformat
        import psutil
        import zmq
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
        from traitlets.config import Config
    except ImportError as error:
        raise MissingPackageError(f"Running notebooks needs nbclient: {install('course')}.") from error

    book = nbformat.read(notebook, as_version=4)
    book.cells = book.cells[:first]
    for cell in book.cells:  # outputs that a failed run leaves are from this run
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    out.mkdir(parents=True, exist_ok=True)
    copy = out / notebook.name
    own = len(book.cells)
    book.cells += _solution_cells(book, notebook) if first is None else []
    finished_s, peaks, failed, details = [], [0], "", ""

    def on_executed(cell_index: int, **_: object) -> None:
        if cell_index < own:  # what is appended counts neither as the notebook's time nor as its memory
            finished_s.append(time.perf_counter())
            with suppress(psutil.Error):  # a kernel that has just died
                peaks.append(machine.peak_memory_bytes(client.km.provisioner.pid))
            on_cell()

    client = NotebookClient(
        book, timeout=timeout_s, kernel_name="python3", resources={"metadata": {"path": str(notebook.parent)}},
        on_cell_executed=on_executed,
        # Over plain TCP every kernel warns that others on this machine may listen.
        config=Config({"KernelManager": {"transport_encryption": "auto"}} if zmq.has("curve") else {}),
    )  # fmt: skip
    started = time.perf_counter()
    try:
        with TemporaryDirectory(ignore_cleanup_errors=True) as scratch:  # a kernel is killed before it clears its own
            client.execute(env=os.environ | {"TMPDIR": scratch})
    except CellExecutionError as error:
        failed, details = f"{error.ename}: {error.evalue}", str(error)
    except (CellTimeoutError, DeadKernelError) as error:
        failed = f"{type(error).__name__}: {error}"
    finally:
        appended = book.cells[own:]
        del book.cells[own:]
        nbformat.write(book, copy)
    if not failed and first is None:
        failed = _unsolved(book.cells, appended)
    ended = time.perf_counter() if failed else max(finished_s, default=started)
    return NotebookRun(notebook.name, ended - started, copy, max(peaks), failed.partition("\n")[0], details)


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


def _unsolved(cells: list[Any], appended: list[Any]) -> str:
    """Why not every check of a task fails on the notebook's stub and passes on its solution; else nothing."""
    for found, word in ((cells, ": not solved yet ("), (appended, ": solved.")):
        for cell in filter(_is_task, found):
            said = "".join(output.get("text", "") for output in cell.outputs)
            if word not in said:
                return f"A task's check must print {word!r}, got {said!r}."
    return ""


def run_course(notebooks: Path, out: Path) -> tuple[list[NotebookRun], str]:
    """Execute every notebook and measure a first, quick scoreboard; returns the runs and the scoreboard as text.

    Writes the executed copies, ``report.json`` (status, seconds and memory of each), ``course.json`` (its rows that
    passed), ``scoreboard.json`` and ``scoreboard.html`` to ``out``. Recorded results, measured at length on a quiet
    machine, are shown below the live ones.
    """
    import nbformat

    books = notebooks_in(notebooks)
    cells = sum(sum(cell.cell_type == "code" for cell in nbformat.read(book, as_version=4).cells) for book in books)
    runs = []
    with machine.progress_bar(total=cells, unit="cell") as bar:
        for book in books:
            bar.set_description(book.stem)
            runs.append(execute(book, out, on_cell=bar.update))
    command = "python -m bench course"
    reported = [_reported(run) for run in runs]
    write_rows(out / "report.json", reported, command=command)
    write_rows(out / "course.json", [row for row in reported if "failed" not in row], command=command)
    # Live and short: a few rows of each evaluation set, three rounds. The recorded board is the full measurement.
    rows = bench("mini", Forced(), rounds=3, limit=10, peak_memory=False)
    write_rows(out / "scoreboard.json", rows, command=command)
    report, live = (json.loads((out / name).read_text(encoding="utf-8")) for name in ("report.json", "scoreboard.json"))
    boards = [("Measured now, quick", live)]
    for path in sorted((DATA / "results").glob("scoreboard-*.json")):
        boards.append((f"Recorded in full: {path.stem}", load_results(path.name)))
    (out / "scoreboard.html").write_text(draw.page(boards, notes=_report_page(report)), encoding="utf-8")
    return runs, draw.board(rows)


def _reported(run: NotebookRun) -> Row:
    found = {"measured": "course", "notebook": run.name, "status": "failed" if run.failed else "passed",
             "seconds": round(run.seconds, 1), "peak_memory_bytes": run.peak_memory_bytes}  # fmt: skip
    return found | ({"failed": run.failed} if run.failed else {})


def _report_page(report: dict[str, Any]) -> str:
    """The notebooks' part of the page, in HTML."""
    lines = [
        (row["notebook"], row["status"], f"{row['seconds']:.0f}", f"{row['peak_memory_bytes'] / 1e6:.0f}",
         row.get("failed", ""))
        for row in report["rows"]
    ]  # fmt: skip
    head = ("notebook", "status", "s", "peak MB of the kernel", "error")
    about = f"Python {report['machine']['python']}; {provenance(report, (*LIBRARIES, 'numpy'))}"
    return f"<h2>Notebooks</h2>{html_table([head, *lines])}<p><small>{html.escape(about)}</small></p>"


def summary(runs: list[NotebookRun]) -> str:
    """One line a notebook, with a remark where it took longer than it may; those that failed come last."""
    lines = []
    for run in sorted(runs, key=lambda run: bool(run.failed)):
        if run.failed:
            lines.append(f"{run.name}: FAILED after {run.seconds:.0f} s, {run.failed}; see {run.copy}")
        else:
            late = "" if run.seconds <= LIMIT_S else f", over the limit of {LIMIT_S:.0f} s"
            lines.append(f"{run.name}: {run.seconds:.0f} s, {run.peak_memory_bytes / 1e6:.0f} MB{late}")
    return "\n".join(lines)
