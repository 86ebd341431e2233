"""Running the course, on tiny notebooks in a folder of their own and with a bench that measures nothing."""

import json
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from test_figures import RECORD, ROWS

from bench import course
from bench.course import NotebookRun, execute, notebooks_in, run_course, summary
from bench.figures import board
from bench.results import write_json
from t5accel.errors import InputError, MissingPackageError, install

ROOT = Path(__file__).resolve().parents[2]


def write_notebook(path: Path, *cells: str) -> Path:
    book = nbformat.v4.new_notebook()
    book.cells = [nbformat.v4.new_markdown_cell("# A title"), *map(nbformat.v4.new_code_cell, cells)]
    nbformat.write(book, path)
    return path


def outputs(path: Path) -> list[str]:
    """What each code cell printed."""
    cells = nbformat.read(path, as_version=4).cells
    return ["".join(out.get("text", "") for out in cell.outputs) for cell in cells if cell.cell_type == "code"]


@pytest.fixture
def folder(tmp_path):
    notebooks = tmp_path / "notebooks"
    notebooks.mkdir()
    write_notebook(notebooks / "01_second.ipynb", "print('café')")
    write_notebook(notebooks / "00_first.ipynb", "x = 6", "import os; print(x * 7, os.path.basename(os.getcwd()))")
    write_notebook(notebooks / "draft.ipynb", "raise ValueError('not numbered: not run')")
    return notebooks


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """What bench was called with; recorded results are looked for in tmp_path."""
    calls = []
    monkeypatch.setattr(course, "bench", lambda *given, **options: calls.append((given, options)) or ROWS)
    monkeypatch.setattr(course, "DATA", tmp_path)
    monkeypatch.setattr("bench.results.DATA", tmp_path)
    return calls


def test_the_course_leaves_executed_copies_a_page_and_the_board(folder, measured, tmp_path):
    write_json(tmp_path / "results" / "scoreboard-big-machine.json", RECORD)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    out = tmp_path / "build" / "course"

    runs, shown = run_course(folder, out)

    assert [run.name for run in runs] == ["00_first.ipynb", "01_second.ipynb"] and shown == board(ROWS)
    assert [run.copy for run in runs] == [out / "00_first.ipynb", out / "01_second.ipynb"]
    assert all(run.seconds > 0 for run in runs)
    assert outputs(out / "00_first.ipynb") == ["", "42 notebooks\n"]  # run in its own folder, state kept between cells
    assert outputs(out / "01_second.ipynb") == ["café\n"]
    assert {path: path.read_bytes() for path in folder.iterdir()} == before  # the originals stay as they are
    assert sorted(p.name for p in out.iterdir()) == [
        "00_first.ipynb", "01_second.ipynb", "course.json", "report.json", "scoreboard.html", "scoreboard.json",
    ]  # fmt: skip
    record = json.loads((out / "course.json").read_text(encoding="utf-8"))
    assert [row["notebook"] for row in record["rows"]] == ["00_first.ipynb", "01_second.ipynb"]
    assert [row["seconds"] for row in record["rows"]] == [round(run.seconds, 1) for run in runs]
    assert json.loads((out / "scoreboard.json").read_text(encoding="utf-8")) == record | {"rows": ROWS}
    page = (out / "scoreboard.html").read_text(encoding="utf-8")
    for expected in ("Measured now", "Recorded in full: scoreboard-big-machine", "00_first.ipynb", "01_second.ipynb"):
        assert expected in page
    (((model, _), options),) = measured
    assert model == "mini" and options["limit"] and not options["peak_memory"]
    assert record["command"] == "python -m bench course"


def test_a_failing_notebook_does_not_stop_the_next_and_the_report_has_its_error(folder, measured, tmp_path):
    write_notebook(folder / "00_first.ipynb", "print('before')", "1 / 0", "print('after')")
    runs, _ = run_course(folder, tmp_path / "out")
    assert outputs(tmp_path / "out" / "00_first.ipynb") == ["before\n", "", ""]
    assert outputs(tmp_path / "out" / "01_second.ipynb") == ["café\n"] and measured
    assert "1 / 0" in runs[0].details and summary(runs).splitlines()[-1].startswith("00_first.ipynb: FAILED after")
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    failed, passed = report["rows"]
    assert failed["status"] == "failed" and failed["failed"] == "ZeroDivisionError: division by zero"
    assert passed["status"] == "passed" and "failed" not in passed and passed["seconds"] == round(runs[1].seconds, 1)
    assert {"torch", "transformers", "onnxruntime", "numpy"} <= report["versions"].keys()
    assert report["machine"]["python"] and report["command"] == "python -m bench course"
    record = json.loads((tmp_path / "out" / "course.json").read_text(encoding="utf-8"))
    assert record["rows"] == [passed]  # how long the other takes is not known
    page = (tmp_path / "out" / "scoreboard.html").read_text(encoding="utf-8")
    assert "<td>failed</td>" in page and "ZeroDivisionError: division by zero" in page


def test_the_peak_is_that_of_each_kernel_even_after_the_memory_is_freed(tmp_path):
    scratch = "from tempfile import mkdtemp\nopen('where.txt', 'w').write(mkdtemp())"
    big = write_notebook(tmp_path / "00_big.ipynb", "x = b'x' * (300 << 20)", "del x", "1 / 0")
    small = write_notebook(tmp_path / "01_small.ipynb", scratch)
    peaks = [execute(path, tmp_path / "out").peak_memory_bytes for path in (big, small)]
    assert peaks[0] > 300 << 20 > 200 << 20 > peaks[1] > 10 << 20
    assert not Path((tmp_path / "where.txt").read_text()).exists(), "nothing is left of a notebook's scratch folder"


@pytest.mark.parametrize("error", [DeadKernelError("Kernel died"), CellTimeoutError("A cell timed out")])
def test_a_dead_kernel_and_a_cell_without_end_are_reported_likewise(folder, tmp_path, monkeypatch, error):
    class Client:
        def __init__(self, *_, **__): ...

        def execute(self, **_):
            raise error

    monkeypatch.setattr("nbclient.NotebookClient", Client)
    run = execute(folder / "01_second.ipynb", tmp_path / "out")
    assert run.failed == f"{type(error).__name__}: {error}" and run.seconds > 0
    assert (tmp_path / "out" / "01_second.ipynb").is_file()


def test_only_numbered_notebooks_are_the_course_and_none_or_no_nbclient_is_refused(
    folder, tmp_path, measured, monkeypatch
):
    assert [path.name for path in notebooks_in(folder)] == ["00_first.ipynb", "01_second.ipynb"]
    for empty in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InputError, match="No numbered notebook in"):
            run_course(empty, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not measured
    monkeypatch.setitem(sys.modules, "nbclient", None)
    with pytest.raises(MissingPackageError, match=re.escape(install("course"))):
        execute(folder / "00_first.ipynb", tmp_path / "out")


def test_the_summary_remarks_on_what_takes_too_long():
    quick, slow = NotebookRun("00_a.ipynb", 3.2, Path(), 8_000_000), NotebookRun("01_b.ipynb", 45.6, Path())
    told = ["00_a.ipynb: 3 s, 8 MB", "01_b.ipynb: 46 s, 0 MB, over the limit of 45 s"]
    assert summary([quick, slow]).splitlines() == told


def test_a_task_fails_on_its_stub_and_passes_on_its_solution_and_exercises_run(tmp_path) -> None:
    book = nbformat.v4.new_notebook()
    stub = "def double(x):\n    raise NotImplementedError"
    check = "from bench.teaching import your_turn\nwith your_turn('double'):\n    assert double(2) == 4"
    tagged = nbformat.v4.new_code_cell(check, metadata={"tags": ["your-turn"]})
    set_up = f"import sys; sys.path.insert(0, {str(ROOT)!r})"
    book.cells = [*map(nbformat.v4.new_code_cell, (set_up, stub)), tagged]
    path = tmp_path / "00_task.ipynb"
    nbformat.write(book, path)
    solution = tmp_path / "solutions" / "00_task.py"
    solution.parent.mkdir()
    good = "# %% Your turn\ndef double(x):\n    return 2 * x\n# %% Exercise 1\nassert double(3) == 6\n"
    solution.write_text(good)
    run = execute(path, tmp_path / "out")
    assert outputs(run.copy) == ["", "", "double: not solved yet (NotImplementedError: no message)\n"]
    assert not run.failed
    for bad, word in ((good.replace("2 * x", "6"), "solved"), (good.replace("== 6", "== 7"), "AssertionError")):
        solution.write_text(bad)
        assert word in execute(path, tmp_path / "out").failed
    solution.write_text(good)
    book.cells[1].source = "def double(x):\n    return 2 * x"
    nbformat.write(book, path)
    assert "not solved yet" in execute(path, tmp_path / "out").failed
