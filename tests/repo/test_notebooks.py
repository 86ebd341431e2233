"""Hygiene of the notebooks as they are committed: read, never run (`make course` runs them)."""

import ast
import base64
import importlib.util
import io
import json
import re
from pathlib import Path
from statistics import median

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from PIL import Image
from script import load_script

badges = load_script("badges")

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
LARGEST_FILE = 300_000
LONGEST_S = 45  # as recorded on two cores of a quiet machine
OURS = ("t5accel", "bench", "training")
SHARED = ("bench.figures", "bench.drawings", "bench.results", "bench.teaching")
# Guarded imports: optimum is absent on transformers 5.x, google.colab outside Colab; TensorRT-RTX and Ray have
# environments of their own.
MAY_BE_ABSENT = {"optimum", "google", "openai", "torchao", "tensorrt_rtx", "ray"}
VOLATILE = {"widgets", "execution", "ExecuteTime", "executionInfo", "outputId", "papermill", "vscode", "scrolled"}
ABSOLUTE_PATH = re.compile(r"(?<![\w.~:/-])/(?:root|home|work|opt|Users|tmp|mnt|var)/|\b[A-Z]:\\\\?\w")


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def each_notebook(test):
    return pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)(test)


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS, "notebooks/ holds no notebook: the other tests of this file would have tested nothing"
    for path in NOTEBOOKS:
        assert re.fullmatch(r"\d\d_[a-z0-9_]+", path.stem), f"{path.name}: name it NN_topic.ipynb"


@each_notebook
def test_it_is_small_and_was_run_once_from_top_to_bottom_without_an_error(path: Path) -> None:
    nbformat.validate(read(path))
    assert path.stat().st_size < LARGEST_FILE
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    assert len(re.findall(r"^#\s", prose, re.MULTILINE)) == 1, "exactly one H1"
    for number, cell in enumerate(code_cells(path), 1):
        assert cell.execution_count == number, "restart the kernel and run all cells (empty cells have to go)"
        assert not [out for out in cell.outputs if out.output_type == "error"], f"code cell {number} failed"
        assert "stderr" not in {out.get("name") for out in cell.outputs}, f"code cell {number} warns: mend the cause"
        installs = re.search(r"^\s*[!%].*\bpip3?\s+install\b", cell.source, re.MULTILINE)
        assert number == 1 or not installs, f"code cell {number}: only the first one installs"


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
def test_a_recorded_date_is_that_of_the_file_as_it_is(path: Path) -> None:
    """A cell that reads a file of results and prints a date ran before the file was recorded again, if they differ."""
    for number, cell in enumerate(code_cells(path), 1):
        printed = re.findall(r"\b20\d\d-\d\d-\d\d\b", "".join(output.get("text", "") for output in cell.outputs))
        for file in re.findall(r'\bload_results\("([^"]+)"\)', cell.source) if printed else ():
            date = json.loads((ROOT / "data" / "results" / file).read_text(encoding="utf-8"))["date"]
            assert date in printed, f"code cell {number}: {file} is of {date}, the output of {printed}: run it again"


def own_names(source: str) -> set[str]:
    """What a cell imports from this repository, without the helpers that every notebook shares."""
    tree = ast.parse(TransformerManager().transform_cell(source))
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    froms = [node for node in froms if node.module not in SHARED]
    names = {alias.name for node in froms if node.module.split(".")[0] in OURS for alias in node.names}
    plain = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return names | {name for name in plain if name.split(".")[0] in OURS}


def code_lines(source: str) -> int:
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in source.splitlines())


def words_in(text: str) -> int:
    """Words of prose: no code blocks, no addresses."""
    prose = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
    return len(re.findall(r"\b[\w'’-]+\b", re.sub(r"(?<=\])\([^)]+\)", " ", prose)))


def section(book: nbformat.NotebookNode, title: str) -> str:
    """Prose and output of the cells from a second-level heading that starts with `title` to the next one."""
    texts, inside = [], False
    for cell in book.cells:
        if cell.cell_type == "markdown" and re.search(r"^## ", cell.source, re.MULTILINE):
            inside = bool(re.search(rf"^## {title}", cell.source, re.MULTILINE))
        if inside:
            outputs = "".join(output.get("text", "") for output in cell.get("outputs", []))
            texts.append(cell.source if cell.cell_type == "markdown" else outputs)
    return "\n".join(texts)


@each_notebook
def test_it_keeps_the_budgets(path: Path) -> None:
    """See CONTRIBUTING, Add a notebook. The first code cell sets up and is not counted."""
    book = read(path)
    code = code_cells(path)[1:]
    lines = sorted(code_lines(cell.source) for cell in code)
    prose = "\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")
    names = set().union(*(own_names(cell.source) for cell in code))
    data = [output.get("data", {}) for cell in code for output in cell.get("outputs", [])]
    pictures = [Image.open(io.BytesIO(base64.b64decode(one["image/png"]))) for one in data if "image/png" in one]
    everything = prose + "".join(output.get("text", "") for cell in code for output in cell.get("outputs", []))
    assert len(code) <= 20 and median(lines) <= 8 and lines[-1] <= 20
    assert words_in(prose) <= 1800
    assert len(names) <= 12, f"names of our own: {sorted(names)}"
    assert len(pictures) <= 3 and all(picture.info.get("dpi", (0,))[0] >= 99 for picture in pictures)
    for word in ("You will be able to", "Needs", "Minutes", "GPU"):
        assert f"**{word}" in book.cells[0].source
    for title in ("Predict", "Your turn", "What we saw", "Take it home", "Exercises", "Sources"):
        assert section(book, title), f"no section {title!r}"
    assert 4 <= len(set(re.findall(r"\]\((https?://[^)]+)\)", section(book, "Sources")))) <= 8, "linked sources"
    assert any("your-turn" in cell.metadata.get("tags", []) for cell in code)
    predicted = {*re.findall(r"\*\*Prediction (\d)", prose)}
    assert predicted == {*re.findall(r"Prediction (\d) \w+:", section(book, "What we saw"))} != set()
    history = r"\bC\d\d[a-d]?\b|-dirty\b|CHANGELOG|CONTRIBUTING"
    assert not re.search(history, everything), "the project's history or a claim's identifier"
    recorded = json.loads((ROOT / "data" / "results" / "course.json").read_text(encoding="utf-8"))["rows"]
    assert next(row["seconds"] for row in recorded if row["notebook"] == path.name) <= LONGEST_S


def test_links_into_the_glossary_name_a_term() -> None:
    anchors = re.findall(r'^\| <a id="([a-z0-9-]+)"></a>', GLOSSARY, re.MULTILINE)
    assert len(anchors) == len({*anchors}) == len(re.findall(r"^\| ", GLOSSARY, re.MULTILINE)) - 1  # and the head
    for path in NOTEBOOKS:
        found = re.findall(r"glossary\.md#([^)]*)\)", "\n".join(cell.source for cell in read(path).cells))
        assert {*found} <= {*anchors} and len(found) == len({*found}) <= 12, f"{path.name}: each term once, at most 12"


@each_notebook
def test_your_turn_and_every_exercise_have_a_solution(path: Path) -> None:
    solved = (path.parent / "solutions" / f"{path.stem}.py").read_text(encoding="utf-8")
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    exercises = re.findall(r"^\d+\. ", text.split("\n## Exercises")[1].split("\n## ")[0], re.MULTILINE)
    titles = re.findall(r"^# %% (Your turn|Exercise \d+)", solved, re.MULTILINE)
    assert titles == ["Your turn", *(f"Exercise {number + 1}" for number in range(len(exercises)))]


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
def test_the_first_code_cell_sets_up(path: Path) -> None:
    source = badges.ADDRESS.sub("https://github.com/owner/name", code_cells(path)[0].source)
    assert f"{source}\n" == badges.SETUP, "copy SETUP of scripts/badges.py into the first code cell"


def test_all_notebooks_carry_one_address() -> None:
    found = {badges.ADDRESS.search(code_cells(path)[0].source)[0] for path in NOTEBOOKS}
    assert len(found) == 1, f"make badges REPO=owner/name stamps them all: {found}"
