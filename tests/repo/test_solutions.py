"""The solutions that stand folded away below the exercises of the extras; `make course` runs those of the core."""

import re
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
NOTEBOOKS = [path for path in NOTEBOOKS if not (path.parent / "solutions" / f"{path.stem}.py").exists()]
NOTEBOOKS = [path for path in NOTEBOOKS if path.stem[:2] != "26"]  # its solutions use the notebook's variables


def solutions() -> list[tuple[str, str]]:
    """(name, code) of every Python block in a markdown cell that is tagged "solution"."""
    found = []
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        marked = [cell for cell in cells if "solution" in cell.metadata.get("tags", [])]
        for number, cell in enumerate(marked, 1):
            (code,) = re.findall(r"^```python\n(.*?)^```", cell.source, re.MULTILINE | re.DOTALL)
            found.append((f"{path.stem}-{number}", code))
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_exercise_has_a_solution_that_asserts(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    exercises = re.findall(r"^\d+\. ", text.split("\n## Exercises", 1)[1].split("<details>", 1)[0], re.MULTILINE)
    own = [code for name, code in solutions() if name.startswith(path.stem)]
    assert exercises and len(exercises) == len(own), f"{len(exercises)} exercises, {len(own)} solutions"
    assert all("assert" in code for code in own), "a solution without an assertion is not tested"


@pytest.mark.parametrize(("name", "code"), solutions(), ids=[name for name, _ in solutions()])
def test_solution(name: str, code: str) -> None:
    exec(compile(code, name, "exec"), {"__name__": name})
