"""The first code cell of every notebook, run in each of the places where a notebook may be opened."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CELL = (ROOT / "scripts" / "bootstrap_cell.py").read_text(encoding="utf-8")
STAMPED = CELL.replace('REPOSITORY = "owner/name"', 'REPOSITORY = "someone/t5-course"')

HIDE_COURSE = """
import sys
from importlib.util import find_spec
from pathlib import Path
sys.path[:] = [entry for entry in sys.path if not Path(entry, "t5accel", "__init__.py").exists()]
assert find_spec("t5accel") is None and find_spec("torch"), "the test could not hide t5accel alone"
"""
WHERE = "\nimport t5accel; print(t5accel.__file__)"


def hide(*modules: str) -> str:
    return "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in modules)


def run(program: str, folder: Path, pip: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder, where ``python -m pip`` is the fake one."""
    paths = os.pathsep.join(filter(None, [str(pip), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": ""}
    return subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def pip(tmp_path: Path) -> Path:
    """A folder with a pip that writes down what it is asked, and fails if the folder holds a file ``fault``."""
    package = tmp_path / "fake" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import json, sys\n"
        "from pathlib import Path\n"
        "folder = Path(__file__).parents[1]\n"
        "(folder / 'asked.json').write_text(json.dumps(sys.argv[1:]))\n"
        "if (folder / 'fault').exists():\n"
        "    sys.exit((folder / 'fault').read_text())\n"
    )
    return package.parent


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder that no checkout surrounds."""
    folder = tmp_path / "content"
    folder.mkdir()
    return folder


def asked(pip: Path) -> list[str]:
    file = pip / "asked.json"
    return json.loads(file.read_text()) if file.exists() else []


def test_it_is_short_enough_to_be_read() -> None:
    assert len(CELL.splitlines()) <= 20
    assert CELL.count('REPOSITORY = "owner/name"\n') <= 1 and CELL.count("\nREPOSITORY = ") == 1
    assert "!" not in CELL.replace("!=", ""), "plain Python: it also runs where IPython's magics do not"


@pytest.mark.parametrize("cell", [CELL, STAMPED], ids=["unstamped", "stamped"])
def test_where_the_course_is_installed_it_does_nothing(cell: str, elsewhere: Path, pip: Path) -> None:
    program = f"import sys; before = list(sys.path)\n{cell}\nassert sys.path == before{WHERE}"
    answer = run(program, elsewhere, pip)
    assert answer.returncode == 0, answer.stderr
    assert Path(answer.stdout.strip()).parent.name == "t5accel" and not asked(pip)


@pytest.mark.parametrize("cell", [CELL, STAMPED], ids=["unstamped", "stamped"])
def test_in_a_checkout_it_finds_the_package_beside_the_notebooks(cell: str, pip: Path) -> None:
    answer = run(HIDE_COURSE + cell + WHERE, ROOT / "notebooks", pip)
    assert answer.returncode == 0, answer.stderr
    assert Path(answer.stdout.strip()) == ROOT / "t5accel" / "__init__.py" and not asked(pip)


@pytest.mark.parametrize("place", ["elsewhere", "a kernel without torch in a checkout"])
def test_without_an_address_one_sentence_says_what_to_do(place: str, elsewhere: Path, pip: Path) -> None:
    if place == "elsewhere":
        answer = run(HIDE_COURSE + CELL, elsewhere, pip)
    else:
        answer = run(HIDE_COURSE + hide("torch") + CELL, ROOT / "notebooks", pip)
    assert answer.returncode == 1 and not asked(pip)
    sentence = answer.stderr.strip().splitlines()[-1]
    assert sentence.startswith("ModuleNotFoundError: This kernel has no t5accel: ") and sentence.count(". ") == 0
    for advice in ("make lab", 'REPOSITORY = "owner/name"', "make badges REPO=owner/name"):
        assert advice in sentence
    assert answer.stderr.count("Traceback") == 1, "one error, not a chain of them"


def test_elsewhere_it_installs_the_course_and_keeps_what_is_there(elsewhere: Path, pip: Path) -> None:
    answer = run(HIDE_COURSE + hide("onnxruntime") + STAMPED, elsewhere, pip)
    assert answer.returncode == 0, answer.stderr
    kept = [f"{name}=={metadata.version(name)}" for name in ("torch", "transformers", "numpy")]
    course = "t5accel[cpu,notebooks] @ git+https://github.com/someone/t5-course"
    assert asked(pip) == ["install", *kept, course]
    assert not list(elsewhere.iterdir()), "it leaves no file behind"


def test_elsewhere_it_adds_no_second_onnxruntime_and_asks_for_what_is_missing(elsewhere: Path, pip: Path) -> None:
    pytest.importorskip("onnxruntime")
    answer = run(HIDE_COURSE + hide("torch", "transformers") + STAMPED, elsewhere, pip)
    assert answer.returncode == 0, answer.stderr
    course = "t5accel[notebooks] @ git+https://github.com/someone/t5-course"
    assert asked(pip) == ["install", f"numpy=={metadata.version('numpy')}", course]


def test_a_failed_installation_shows_what_pip_says(elsewhere: Path, pip: Path) -> None:
    (pip / "fault").write_text("ERROR: no such repository")
    answer = run(HIDE_COURSE + STAMPED, elsewhere, pip)
    assert answer.returncode == 1
    assert "RuntimeError: t5accel could not be installed. pip says:\nERROR: no such repository" in answer.stderr
