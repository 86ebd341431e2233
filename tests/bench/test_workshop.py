"""What the participants' notebooks say about the tasks, on small notebooks and on the stubs of the course."""

from pathlib import Path

import nbformat
import pytest
from test_bench_commands import call, refused

from bench import workshop
from bench.workshop import NOT_YET, SOLVED, UNCLEAR, UNTOUCHED, TaskState, report, task_states

ROOT = Path(__file__).resolve().parents[2]
SET_UP = f"import sys; sys.path.insert(0, {str(ROOT)!r})"
STUB = 'def double(x):\n    """Twice x."""\n    # Think of a sum.\n    raise NotImplementedError("write me")'
CHECK = "from bench.teaching import your_turn\nwith your_turn('double'):\n    assert double(2) == 4, 'not twice'"
RIGHT, WRONG = "def double(x):\n    return x + x", "def double(x):\n    return x"
OPEN, DONE = "double: not solved yet (NotImplementedError: write me)\n", "double: solved.\n"
FAILS = "double: not solved yet (AssertionError: not twice)\n"


@pytest.fixture(autouse=True)
def the_course_has_this_check(monkeypatch):
    monkeypatch.setattr(workshop, "_checks_of_the_course", lambda name: {CHECK})


def saved(folder: Path, *cells: tuple[str, int | None, str]) -> Path:
    """A notebook of cells, each with the count and the output that were saved with it."""
    code = [nbformat.v4.new_code_cell(source, execution_count=count) for source, count, _ in cells]
    for cell, (*_, text) in zip(code, cells, strict=True):
        cell.outputs = [nbformat.v4.new_output("stream", text=text)] if text else []
    path = folder / "00_task.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Why?"), *code]), path)
    return path


def state(folder: Path, **options) -> tuple[str, str]:
    ((found,), _) = task_states(folder, **options)
    assert (found.notebook, found.task) == ("00_task", "double")
    return found.status, found.why


@pytest.mark.parametrize(
    ("cells", "status", "why"),
    [
        ([(STUB, 2, ""), (CHECK, 3, OPEN)], UNTOUCHED, ""),
        ([(STUB, None, ""), (CHECK, None, "")], UNTOUCHED, ""),
        ([(f"%%time\n{STUB}", 2, ""), (CHECK, 3, DONE)], UNCLEAR, "its stub is unchanged"),
        ([(STUB, 2, ""), (CHECK, 3, DONE)], UNCLEAR, "its stub is unchanged"),  # what an older run has left
        ([(RIGHT, 2, ""), (CHECK, 3, DONE)], SOLVED, ""),
        ([(WRONG, 2, ""), (CHECK, 3, FAILS)], NOT_YET, "AssertionError: not twice"),
        ([(RIGHT, 2, ""), (CHECK, 3, OPEN)], UNCLEAR, "not run since"),  # edited, saved, never run
        ([(RIGHT, 4, ""), (CHECK, 3, FAILS)], UNCLEAR, "not run since"),
        ([(RIGHT, None, ""), (CHECK, 3, DONE)], UNCLEAR, "not run since"),
        ([(RIGHT, 2, ""), (CHECK, None, "")], UNCLEAR, "not run since"),
        ([(RIGHT, 2, ""), (CHECK, 3, "")], UNCLEAR, "no result"),
        ([(RIGHT, 2, ""), (CHECK.replace("4", "5"), 3, DONE)], UNCLEAR, "its check was edited"),
        ([(STUB, 2, ""), (RIGHT, 3, ""), (CHECK, 4, DONE)], SOLVED, ""),  # in a cell of the reader's own
        ([(STUB, 2, ""), (CHECK, 3, OPEN), (RIGHT, 4, ""), (CHECK, 5, DONE)], SOLVED, ""),
        ([(RIGHT, 2, ""), (STUB, 3, ""), (CHECK, 4, DONE)], UNCLEAR, "the stub ran last"),
        ([(RIGHT, 2, ""), (STUB, 3, ""), (CHECK, 4, OPEN)], NOT_YET, "NotImplementedError: write me"),
        ([(CHECK, 4, OPEN)], UNCLEAR, "no cell defines it"),
    ],
)  # fmt: skip
def test_what_was_saved_is_believed_only_where_it_can_be_true(tmp_path, cells, status, why):
    saved(tmp_path, *cells)
    found = state(tmp_path)
    assert found[0] == status and why in found[1]


def test_a_notebook_that_cannot_be_read_or_has_lost_its_check_hides_no_other(tmp_path):
    saved(tmp_path, (RIGHT, 2, ""), (CHECK, 3, DONE))
    saved(tmp_path, (RIGHT, 2, "")).rename(tmp_path / "01_lost.ipynb")
    saved(tmp_path, (RIGHT, 2, ""), (CHECK, 3, DONE))
    (tmp_path / "02_half.ipynb").write_text('{"cells": [<<<<<<< HEAD')
    states, _ = task_states(tmp_path)
    assert [one.status for one in states] == [SOLVED, UNCLEAR, UNCLEAR]
    assert "lost its check" in states[1].why and "cannot be read" in states[2].why


@pytest.mark.parametrize(
    ("cells", "status", "why"),
    [
        ([RIGHT, CHECK, "1 / 0"], SOLVED, ""),  # what comes after the check does not matter
        ([WRONG, CHECK], NOT_YET, "AssertionError: not twice"),
        (["def double(x):\n    return x +", CHECK], NOT_YET, "ends before its check does: SyntaxError"),
        (["def double(x):\n    while True: pass", CHECK], NOT_YET, "ends before its check does: CellTimeoutError"),
    ],
)
def test_run_executes_what_was_edited_up_to_its_check(tmp_path, monkeypatch, cells, status, why):
    monkeypatch.setattr(workshop, "LIMIT_S", 3)
    path = saved(tmp_path, (SET_UP, 1, ""), *((cell, n, DONE) for n, cell in enumerate(cells, 2)))
    before = path.read_bytes()
    found = state(tmp_path, run_into=tmp_path / "out")
    assert found[0] == status and why in found[1]
    assert path.read_bytes() == before and (tmp_path / "out" / path.name).exists()


def test_run_leaves_untouched_notebooks_alone(tmp_path):
    saved(tmp_path, (STUB, 2, ""), (CHECK, 3, OPEN))
    assert state(tmp_path, run_into=tmp_path / "out") == (UNTOUCHED, "") and not (tmp_path / "out").exists()


def test_every_stub_of_the_course_is_untouched_and_an_edit_of_it_is_seen(tmp_path, monkeypatch):
    monkeypatch.undo()
    states, _ = task_states(ROOT / "notebooks")
    assert {one.status for one in states} == {UNTOUCHED} and len(states) == len([*ROOT.glob("notebooks/*.ipynb")])
    for path in ROOT.glob("notebooks/*.ipynb"):
        text = path.read_text(encoding="utf-8")
        assert text.count('raise NotImplementedError(\\"write me\\")') == 1
        (tmp_path / path.name).write_text(text.replace('raise NotImplementedError(\\"write me\\")', "return 1"))
    states, _ = task_states(tmp_path)
    assert {one.why for one in states} == {"edited, and its check was not run since"}


def test_checks_are_compared_with_the_last_commit_or_the_report_says_that_they_were_not(tmp_path, monkeypatch):
    monkeypatch.undo()
    if (ROOT / ".git").exists():
        (check,) = workshop._checks_of_the_course("00_start_here.ipynb")
        assert 'your_turn("typical_s")' in check
    monkeypatch.setattr(workshop, "DATA", tmp_path / "data")
    saved(tmp_path, (RIGHT, 2, ""), (CHECK, 3, DONE))
    states, compared = task_states(tmp_path)
    assert not compared and "could not be compared" in report(states, compared=compared, executed=False)


def test_the_command_prints_the_table_and_refuses_an_unknown_number(tmp_path):
    saved(tmp_path, (WRONG, 2, ""), (CHECK, 3, FAILS))
    shown = call("workshop", "00", "--notebooks", tmp_path)
    assert shown.exit_code == 0 and "00_task   double  not solved yet  AssertionError: not twice" in shown.stdout
    assert "0 solved, 1 not solved yet, 0 untouched, 0 unclear." in shown.stdout and "--run" in shown.stdout
    (tmp_path / "00_task.ipynb").rename(tmp_path / "00_task_here.ipynb")
    for number in ("77", "00_task"):
        assert f"such as 00, got {number}" in refused("workshop", number, "--notebooks", str(tmp_path))
    assert "--run" not in report([TaskState("00_a", "f", SOLVED)], compared=True, executed=True)
