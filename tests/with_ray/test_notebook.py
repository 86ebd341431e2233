"""The cells of notebook 31 that need Ray print what the notebook says that they printed: `make test-ray`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "build/servers/ray/bin/python"
BEFORE = "import os\nfrom pathlib import Path\nfolder, sentences = Path.cwd(), ['a text'] * 200\n"


def test_the_recorded_outputs_are_those_of_the_cells(tmp_path: Path) -> None:
    cells = nbformat.read(ROOT / "notebooks/31_scaling_out.ipynb", as_version=4).cells
    start = next(number for number, cell in enumerate(cells) if "class Answer:" in cell.source)
    taken = cells[start : start + 5]
    program = "\n".join(cell.source for cell in taken if cell.cell_type == "code")
    recorded = re.findall(
        r"```text\n(.*?)```", "\n".join(cell.source for cell in taken if cell.cell_type == "markdown"), re.DOTALL
    )
    assert len(recorded) == 2 and "ray.data" in program and "serve.run" in program
    (tmp_path / "program.py").write_text(BEFORE + program, encoding="utf-8")
    run = subprocess.run([PYTHON, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    # Ray tells of the dead workers between them.
    told = [line for line in run.stdout.splitlines() if re.match(r"\d+ rows, |\w+ -> ", line)]
    assert told == "".join(recorded).splitlines(), run.stdout[-3000:]
