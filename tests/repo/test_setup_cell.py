"""The first code cell of every notebook, run by IPython with fakes of git and pip where a notebook may be opened."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from script import load_script

ROOT = Path(__file__).resolve().parents[2]
SETUP = load_script("badges").SETUP
RUN = """
import os, sys
from IPython.core.interactiveshell import InteractiveShell
sys.path[:] = [entry for entry in sys.path if not os.path.exists(os.path.join(entry, "t5accel"))]
if os.environ.get("COLAB"):
    sys.modules["google.colab"] = sys
result = InteractiveShell.instance().run_cell(os.environ["CELL"])
result.raise_error()
import bench, t5accel
print(bench.__file__, t5accel.__file__, sep="\\n")
"""
FAKE = """#!/bin/sh
echo "$(basename "$0") $*" >> "$LOG"
if [ "$(basename "$0")" = pip ]; then exit; fi
mkdir -p course/t5accel course/bench
touch course/t5accel/__init__.py course/bench/__init__.py
"""


def run(folder: Path, tmp_path: Path, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the cell in a folder; returns the process and the commands that the fakes were given."""
    fakes, log = tmp_path / "fakes", tmp_path / "log"
    fakes.mkdir()
    for name in ("git", "pip"):
        (fakes / name).write_text(FAKE)
        (fakes / name).chmod(0o755)
    path = f"{fakes}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "LOG": str(log), "CELL": SETUP, "IPYTHONDIR": str(tmp_path), **variables}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-c", RUN]
    answer = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return answer, log.read_text().splitlines() if log.exists() else []


def test_in_a_checkout_it_finds_the_course_beside_the_notebooks_and_installs_nothing(tmp_path: Path) -> None:
    answer, asked = run(ROOT / "notebooks", tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert asked == [] and [Path(name).resolve().parents[1] for name in answer.stdout.splitlines()] == [ROOT, ROOT]


@pytest.mark.skipif(os.name == "nt", reason="Colab runs Linux")
def test_on_colab_it_clones_the_course_and_installs_it_for_editing(tmp_path: Path) -> None:
    content = tmp_path / "content"
    content.mkdir()
    answer, asked = run(content, tmp_path, COLAB="1")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert asked == [
        "git clone -q --depth=1 https://github.com/owner/name course",
        "pip install -q -e course[cpu,notebooks]",
    ]
    found = answer.stdout.splitlines()[-2:]
    assert [(content / name).resolve().parents[1] for name in found] == [content / "course"] * 2
