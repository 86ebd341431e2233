"""Which tasks of the course a participant has solved, by the notebooks as they were saved, or executed anew."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.course import execute, notebooks_in
from bench.results import DATA, format_table
from t5accel import machine
from t5accel.errors import InputError

TASK = re.compile(r"\byour_turn\(\s*[\"'](\w+)")  # the name of the function to write
LIMIT_S = 120  # for a cell: loops without an end are a usual mistake
SOLVED, NOT_YET, UNTOUCHED, UNCLEAR = "solved", "not solved yet", "untouched", "unclear"


@dataclass(frozen=True)
class TaskState:
    """A task, what is known about it, and why it is not solved, or not known to be."""

    notebook: str
    task: str
    status: str
    why: str = ""


def task_states(
    notebooks: Path, numbers: Sequence[str] = (), *, run_into: Path | None = None
) -> tuple[list[TaskState], bool]:
    """The state of each task in the notebooks with these numbers, by default all; and whether checks were compared.

    Without ``run_into`` what was saved is read, which knows nothing of edits after the last run. With it each notebook
    whose stub was changed is executed up to its check, into this folder. Raises ``InputError`` for an unknown number.
    """
    paths = notebooks_in(notebooks)
    for number in numbers:
        if number not in {path.name[:2] for path in paths}:
            raise InputError(f"A number must be that of a notebook in {notebooks}, such as 00, got {number}.")
    chosen = [path for path in paths if not numbers or path.name[:2] in numbers]
    states, compared = [], True
    for path in machine.progress_bar(chosen, shown=run_into is not None, unit="notebook"):
        checks = _checks_of_the_course(path.name)
        compared &= checks is not None
        states += _states_of(path, checks, run_into)
    return states, compared


def _states_of(path: Path, checks: set[str] | None, run_into: Path | None) -> Iterator[TaskState]:
    import nbformat

    try:
        book = nbformat.read(path, as_version=4)
    except ValueError as error:  # a conflict of git, half a file
        yield TaskState(path.stem, "–", UNCLEAR, f"it cannot be read: {str(error).partition(chr(10))[0]}")
        return
    cells, failed = _code(book), ""
    tasks = list(dict.fromkeys(task for cell in cells for task in TASK.findall(cell.source)))
    if not tasks:
        yield TaskState(path.stem, "–", UNCLEAR, "it has lost its check, the cell with your_turn")
    if run_into and any(_written(task, cells) for task in tasks):
        last = max(place for place, cell in enumerate(book.cells) if cell in cells and TASK.search(cell.source))
        run = execute(path, run_into, first=last + 1, timeout_s=LIMIT_S)
        cells, failed = _code(nbformat.read(run.copy, as_version=4)), run.failed
    for task in tasks:
        yield TaskState(path.stem, task, *_state(task, cells, checks, failed))


def _state(task: str, cells: list[Any], checks: set[str] | None, failed: str) -> tuple[str, str]:
    """Status and reason. ``failed`` is why an execution ended early; a notebook as saved has none."""
    check = max((cell for cell in cells if task in TASK.findall(cell.source)), key=_count)
    said = _said(task, check)
    definitions = [cell for cell in cells if _defines(task, cell.source)]
    if not definitions:
        return UNCLEAR, "no cell defines it"
    if not (written := _written(task, cells)):
        return (UNCLEAR, "its check says solved, and its stub is unchanged") if said == "" else (UNTOUCHED, "")
    if checks is not None and check.source.strip() not in checks:
        return UNCLEAR, "its check was edited: restore it"
    if failed and not (_count(check) and said is not None):
        return NOT_YET, f"the notebook ends before its check does: {failed}"
    if not all(0 < _count(cell) <= _count(check) for cell in written):
        return UNCLEAR, "edited, and its check was not run since"
    if said is None:
        return UNCLEAR, "its check was run and printed no result"
    ran = [cell for cell in definitions if _count(cell) <= _count(check)]
    in_force = max(ran, key=_count).source  # what the check has seen
    stub = _is_stub(task, in_force)
    if said == "":
        return (UNCLEAR, "its check says solved, and the stub ran last") if stub else (SOLVED, "")
    if "NotImplementedError" in said and "NotImplementedError" not in in_force:
        return UNCLEAR, "edited, and its check was not run since"
    return NOT_YET, said


def _code(book: Any) -> list[Any]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def _count(cell: Any) -> int:
    return cell.execution_count or 0


def _said(task: str, check: Any) -> str | None:
    """Why the check that was run is not solved, empty if it is; ``None`` if it printed neither."""
    text = "".join(output.get("text", "") for output in check.outputs)
    found = re.findall(rf"^{task}: (?:solved\.|not solved yet \((.*)\))$", text, re.MULTILINE)
    return found[-1] if found else None


def _defines(task: str, source: str) -> bool:
    return bool(re.search(rf"^(?:(?:def|class) {task}\b|{task}\s*=[^=])", source, re.MULTILINE))


def _written(task: str, cells: list[Any]) -> list[Any]:
    """The cells that define the function and are not the stub of the course."""
    return [cell for cell in cells if _defines(task, cell.source) and not _is_stub(task, cell.source)]


def _is_stub(task: str, source: str) -> bool:
    """Whether the function does nothing yet but raise; comments and the docstring do not count.

    >>> _is_stub("f", "def f():\\n    raise NotImplementedError"), _is_stub("f", "def f():\\n    return 1")
    (True, False)
    """
    try:
        tree = ast.parse(re.sub(r"^[%!].*$", "", source, flags=re.MULTILINE))
    except SyntaxError:
        return False
    defined = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == task]
    if not defined:
        return False
    body = defined[-1].body[ast.get_docstring(defined[-1]) is not None :]
    return len(body) == 1 and isinstance(body[0], ast.Raise)


def _checks_of_the_course(name: str) -> set[str] | None:
    """The sources of a notebook's checks in the last commit; ``None`` where there is no git, or no such notebook."""
    import nbformat

    command = ["git", "-C", str(DATA.parent), "show", f"HEAD:./notebooks/{name}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    except OSError:
        return None
    if done.returncode:
        return None
    cells = _code(nbformat.reads(done.stdout, as_version=4))
    return {cell.source.strip() for cell in cells if TASK.search(cell.source)}


def report(states: Sequence[TaskState], *, compared: bool, executed: bool) -> str:
    """The states as a table, counted, with what they rest on."""
    lines = [("notebook", "task", "status", "why"), *((s.notebook, s.task, s.status, s.why) for s in states)]
    counts = {one: sum(state.status == one for state in states) for one in (SOLVED, NOT_YET, UNTOUCHED, UNCLEAR)}
    rests = "Executed anew up to each check." if executed else (
        "As the notebooks were saved: an edit after the last run is not seen. --run executes what was edited."
    )  # fmt: skip
    rests += "" if compared else "\nWithout git the checks could not be compared with the course's own."
    told = ", ".join(f"{count} {status}" for status, count in counts.items())
    return "\n".join([*format_table(lines, left=range(4), rule=True), "", f"{told}.", rests])
