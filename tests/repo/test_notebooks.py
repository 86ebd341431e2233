"""Hygiene of the notebooks as they are committed: read, never run (`make course` runs them)."""

import ast
import importlib.util
import re
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BOOTSTRAP = (ROOT / "scripts" / "bootstrap_cell.py").read_text(encoding="utf-8")
# The first thirteen are from before the rules of CONTRIBUTING were made stricter; newer ones keep those.
FIRST_THIRTEEN = {f"{number:02}" for number in (*range(12), 16)}
LONGEST_CELL, LONGEST_CELL_NOW, MEDIAN_CELL_NOW = 25, 20, 8  # lines
MOST_OWN_NAMES, MOST_WORDS = 15, 2200
LARGEST_FILE = 300_000
# Guarded imports: optimum is absent on transformers 5.x, google.colab everywhere else than there.
MAY_BE_ABSENT = {"optimum", "google"}
VOLATILE = {"widgets", "execution", "ExecuteTime", "executionInfo", "outputId", "papermill", "vscode", "scrolled"}
ABSOLUTE_PATH = re.compile(r"(?<![\w.~:/-])/(?:root|home|work|opt|Users|tmp|mnt|var)/|\b[A-Z]:\\\\?\w")

# The road of CONTRIBUTING.md: each step is a heading, in words that fit the notebook.
ROAD = {
    "question": r"question|what do we want|\bask",
    "prediction": r"predict|expect|estimate|guess",
    "equality check": r"equal|identical|\bsame\b|agree|parity",
    "measurement": r"measur|timing|how fast|how long",
    "surprise": r"surpris|unexpected|did not see coming",
    "exercises": r"exercise|your turn",
}


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def headings(path: Path) -> list[tuple[int, str]]:
    """(level, text) of the headings in markdown cells; `#` inside fenced code is none."""
    found = []
    for cell in read(path).cells:
        if cell.cell_type == "markdown":
            prose = re.sub(r"^```.*?^```", "", cell.source, flags=re.MULTILINE | re.DOTALL)
            found += [(len(marks), text) for marks, text in re.findall(r"^(#{1,6})\s+(.*)$", prose, re.MULTILINE)]
    return found


def each_notebook(test):
    return pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)(test)


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS, "notebooks/ holds no notebook: the other tests of this file would have tested nothing"
    for path in NOTEBOOKS:
        assert re.fullmatch(r"\d\d_[a-z0-9_]+", path.stem), f"{path.name}: name it NN_topic.ipynb"


@each_notebook
def test_format_and_size(path: Path) -> None:
    nbformat.validate(read(path))
    assert path.stat().st_size < LARGEST_FILE


@each_notebook
def test_says_for_which_problem_it_is(path: Path) -> None:
    about = read(path).metadata["t5accel"]
    assert about.keys() == {"problem", "technique", "task", "hardware", "minutes"}
    assert about["problem"].endswith((".", "?")) and about["technique"]
    assert about["hardware"] in (["CPU"], ["CPU", "GPU"])
    assert about["task"] == ["any"] or {*about["task"]} <= {"translation", "summaries", "questions"}
    workshop = (ROOT / "docs" / "WORKSHOP.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| {path.stem} \|.*\| {about['minutes']} min \|$", workshop, re.MULTILINE)


@each_notebook
def test_was_run_once_from_top_to_bottom(path: Path) -> None:
    counts = [cell.execution_count for cell in code_cells(path)]
    assert counts == list(range(1, len(counts) + 1)), "restart the kernel and run all cells (empty cells have to go)"


@each_notebook
def test_no_error_is_committed(path: Path) -> None:
    for number, cell in enumerate(code_cells(path), 1):
        assert not [out for out in cell.outputs if out.output_type == "error"], f"code cell {number} failed"


@each_notebook
def test_code_cells_are_short(path: Path) -> None:
    for number, cell in enumerate(code_cells(path)[1:], 2):  # the first one installs
        lines = len(cell.source.splitlines())
        assert lines <= LONGEST_CELL, f"code cell {number} has {lines} lines: move what others need into t5accel"


def own_names(source: str) -> set[str]:
    """What a cell imports from this repository."""
    tree = ast.parse(TransformerManager().transform_cell(source))
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    ours = ("t5accel", "bench", "training")
    return {alias.name for node in froms if node.module.split(".")[0] in ours for alias in node.names}


def beyond_the_rules(book: nbformat.NotebookNode) -> list[str]:
    """What a notebook from now on may not have; its first code cell installs, and is not counted."""
    code = [cell.source for cell in book.cells if cell.cell_type == "code"][1:]
    lines = sorted(len(source.splitlines()) for source in code)
    prose = [cell.source for cell in book.cells if cell.cell_type == "markdown" and "<details>" not in cell.source]
    words, names = len(" ".join(prose).split()), set().union(*map(own_names, code))
    found = []
    if lines[-1] > LONGEST_CELL_NOW or lines[len(lines) // 2] > MEDIAN_CELL_NOW:
        found.append(f"code cells of {lines[len(lines) // 2]} lines in the middle and {lines[-1]} at most")
    if len(names) > MOST_OWN_NAMES:
        found.append(f"{len(names)} names of our own")
    if words > MOST_WORDS:
        found.append(f"{words} words")
    if not re.search(r"\]\(https?://", " ".join(prose)):
        found.append("no source that is linked")
    return found


def test_newer_notebooks_keep_the_stricter_rules() -> None:
    for path in NOTEBOOKS:
        if path.stem[:2] not in FIRST_THIRTEEN:
            assert not beyond_the_rules(read(path)), f"{path.name}: see CONTRIBUTING, Add a notebook"


def test_the_stricter_rules_catch_what_they_are_for() -> None:
    new = nbformat.v4
    bad = new.new_notebook(cells=[
        new.new_code_cell("bootstrap"), new.new_markdown_cell("word " * 2201),
        new.new_code_cell("from t5accel.x import " + ", ".join(f"n{i}" for i in range(16))),
        new.new_code_cell("\n".join(["1"] * 21)), new.new_code_cell("\n".join(["1"] * 21)),
    ])  # fmt: skip
    assert len(beyond_the_rules(bad)) == 4
    good = new.new_notebook(cells=[
        new.new_code_cell("\n".join(["bootstrap"] * 30)), new.new_markdown_cell("[a post](https://example.org)"),
        new.new_code_cell("1"),
    ])  # fmt: skip
    assert beyond_the_rules(good) == []


@each_notebook
def test_one_title_and_the_whole_road(path: Path) -> None:
    found = headings(path)
    assert [level for level, _ in found].count(1) == 1, "exactly one H1"
    sections = [text for level, text in found if level > 1]
    for step, words in ROAD.items():
        assert any(re.search(words, text, re.IGNORECASE) for text in sections), f"no heading for the {step}: {sections}"
    assert re.search(ROAD["exercises"], " ".join(sections[-3:]), re.IGNORECASE), "exercises close the notebook"


@each_notebook
def test_no_volatile_metadata(path: Path) -> None:
    notebook = read(path)
    assert not VOLATILE & notebook.metadata.keys()
    assert notebook.metadata.kernelspec.name == "python3"
    assert re.fullmatch(r"Python 3( \(ipykernel\))?", notebook.metadata.kernelspec.display_name)
    for number, cell in enumerate(notebook.cells, 1):
        assert not VOLATILE & cell.metadata.keys(), f"cell {number}: {VOLATILE & cell.metadata.keys()}"
        for output in cell.get("outputs", []):
            widgets = [kind for kind in output.get("data", {}) if "widget" in kind]
            assert not widgets, f"cell {number}: a widget shows nothing where no kernel runs (GitHub)"


@each_notebook
def test_no_path_of_one_machine(path: Path) -> None:
    for number, cell in enumerate(read(path).cells, 1):
        texts = [cell.source]
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            texts += [output.get("text", ""), *(str(data[kind]) for kind in data if not kind.startswith("image/"))]
        for text in texts:
            found = ABSOLUTE_PATH.search(text)
            assert not found, f"cell {number}: {text[found.start() : found.start() + 60]!r}"


@each_notebook
def test_imports_are_installed(path: Path) -> None:
    for number, cell in enumerate(code_cells(path), 1):
        tree = ast.parse(TransformerManager().transform_cell(cell.source))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"code cell {number}: a notebook is in no package"
                names = [node.module]
            else:
                continue
            for name in names:
                top = name.split(".")[0]
                assert not (ROOT / "notebooks" / f"{top}.py").exists(), f"{top} belongs into t5accel"
                whole = name if top == "t5accel" else top
                assert top in MAY_BE_ABSENT or importlib.util.find_spec(whole), f"code cell {number}: no {whole}"


@each_notebook
def test_the_first_code_cell_is_the_bootstrap(path: Path) -> None:
    stamped = re.compile(r'^REPOSITORY = "[^"]*"', re.MULTILINE)
    source = stamped.sub('REPOSITORY = "owner/name"', code_cells(path)[0].source)
    assert f"{source}\n".startswith(BOOTSTRAP), "copy scripts/bootstrap_cell.py into the first code cell"


def test_all_notebooks_carry_one_address() -> None:
    found = {re.search(r'^REPOSITORY = "(.*?)"', code_cells(path)[0].source, re.MULTILINE)[1] for path in NOTEBOOKS}
    assert len(found) == 1, f"make badges REPO=owner/name stamps them all: {found}"


@each_notebook
def test_nothing_is_installed_elsewhere(path: Path) -> None:
    for number, cell in enumerate(code_cells(path)[1:], 2):
        assert not re.search(r"\bpip3?\s+install\b", cell.source), f"code cell {number}: only the bootstrap installs"
