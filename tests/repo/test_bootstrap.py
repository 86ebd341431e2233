"""The first code cell of every notebook, run in each of the places where a notebook may be opened."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CELL = (ROOT / "scripts" / "bootstrap_cell.py").read_text(encoding="utf-8")
STAMPED = CELL.replace('REPOSITORY = "owner/name"', 'REPOSITORY = "someone/t5-course"')

HIDE_COURSE = """
import sys
from importlib.util import find_spec
from pathlib import Path
sys.path[:] = [entry for entry in sys.path if not Path(entry, "t5accel", "__init__.py").exists()]
assert not find_spec("t5accel") and not find_spec("bench") and find_spec("torch"), "the test could not hide ours alone"
"""
WHERE = "\nimport t5accel; print(t5accel.__file__)"


def hide(*modules: str) -> str:
    return "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in modules)


def run(program: str, folder: Path, fake: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder, where ``python -m pip`` and ``git`` are fakes."""
    paths = os.pathsep.join(filter(None, [str(fake), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        "PYTHONPATH": paths,
        "PYTHONSAFEPATH": "",
        "PATH": f"{fake}{os.pathsep}{os.environ['PATH']}",
    }
    return subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True)


FAKE_PIP = """
import json, sys
from pathlib import Path
folder = Path(__file__).parents[1]
(folder / "asked.json").write_text(json.dumps(sys.argv[1:]))
if (folder / "fault").exists():
    sys.exit((folder / "fault").read_text())
"""
FAKE_GIT = f"""#!{sys.executable}
import sys
from pathlib import Path
package = Path(sys.argv[-1], "t5accel")
package.mkdir(parents=True)
(package / "__init__.py").write_text(f"CLONED = {{sys.argv[1:-1]}}")
"""


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A folder with a pip that records its arguments, and fails where ``fault`` exists; and a git that clones."""
    package = tmp_path / "fake" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(FAKE_PIP)
    (package.parent / "git").write_text(FAKE_GIT)
    (package.parent / "git").chmod(0o755)
    return package.parent


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder that no checkout surrounds."""
    folder = tmp_path / "content"
    folder.mkdir()
    return folder


def asked(fake: Path) -> list[str]:
    file = fake / "asked.json"
    return json.loads(file.read_text()) if file.exists() else []


def test_it_is_short_enough_to_be_read() -> None:
    assert len(CELL.splitlines()) <= 24
    assert CELL.count('REPOSITORY = "owner/name"\n') <= 1 and CELL.count("\nREPOSITORY = ") == 1
    assert "!" not in CELL.replace("!=", ""), "plain Python: it also runs where IPython's magics do not"


@pytest.mark.parametrize("cell", [CELL, STAMPED], ids=["unstamped", "stamped"])
def test_where_the_course_is_installed_it_does_nothing(cell: str, elsewhere: Path, fake: Path) -> None:
    program = f"import sys; before = list(sys.path)\n{cell}\nassert sys.path == before{WHERE}"
    answer = run(program, elsewhere, fake)
    assert answer.returncode == 0, answer.stderr
    assert Path(answer.stdout.strip()).parent.name == "t5accel" and not asked(fake)


@pytest.mark.parametrize("cell", [CELL, STAMPED], ids=["unstamped", "stamped"])
def test_in_a_checkout_it_finds_the_package_beside_the_notebooks(cell: str, fake: Path) -> None:
    answer = run(HIDE_COURSE + cell + WHERE, ROOT / "notebooks", fake)
    assert answer.returncode == 0, answer.stderr
    assert Path(answer.stdout.strip()) == ROOT / "t5accel" / "__init__.py" and not asked(fake)


@pytest.mark.parametrize("place", ["elsewhere", "a kernel without torch in a checkout"])
def test_without_an_address_one_sentence_says_what_to_do(place: str, elsewhere: Path, fake: Path) -> None:
    if place == "elsewhere":
        answer = run(HIDE_COURSE + CELL, elsewhere, fake)
    else:
        answer = run(HIDE_COURSE + hide("torch") + CELL, ROOT / "notebooks", fake)
    assert answer.returncode == 1 and not asked(fake)
    sentence = answer.stderr.strip().splitlines()[-1]
    assert sentence.startswith("ModuleNotFoundError: This kernel has no t5accel: ") and sentence.count(". ") == 0
    for advice in ("make lab", 'REPOSITORY = "owner/name"', "make badges REPO=owner/name"):
        assert advice in sentence
    assert answer.stderr.count("Traceback") == 1, "one error, not a chain of them"


def test_elsewhere_it_installs_the_course_and_keeps_what_is_there(elsewhere: Path, fake: Path) -> None:
    answer = run(
        HIDE_COURSE + hide("onnxruntime") + STAMPED + "\nimport t5accel; print(t5accel.CLONED)", elsewhere, fake
    )
    assert answer.returncode == 0, answer.stderr
    assert "https://github.com/someone/t5-course" in answer.stdout
    kept = [f"{name}=={metadata.version(name)}" for name in ("torch", "transformers", "numpy")]
    assert asked(fake) == ["install", *kept, "-e", f"{elsewhere / 't5accel-course'}[cpu,notebooks]"]


def test_elsewhere_it_adds_no_second_onnxruntime_and_asks_for_what_is_missing(elsewhere: Path, fake: Path) -> None:
    pytest.importorskip("onnxruntime")
    answer = run(HIDE_COURSE + hide("torch", "transformers") + STAMPED, elsewhere, fake)
    assert answer.returncode == 0, answer.stderr
    course = f"{elsewhere / 't5accel-course'}[notebooks]"
    assert asked(fake) == ["install", f"numpy=={metadata.version('numpy')}", "-e", course]


def test_a_failed_installation_shows_what_pip_says_and_may_be_tried_again(elsewhere: Path, fake: Path) -> None:
    (fake / "fault").write_text("ERROR: no such version")
    answer = run(HIDE_COURSE + STAMPED, elsewhere, fake)
    assert answer.returncode == 1
    assert "RuntimeError: The course could not be installed:\nERROR: no such version" in answer.stderr
    (fake / "fault").unlink()
    assert run(HIDE_COURSE + STAMPED, elsewhere, fake).returncode == 0, "the clone is there already"


def test_beside_a_folder_of_wheels_it_finds_the_bench(elsewhere: Path, fake: Path) -> None:
    """There t5accel is installed, and `bench` lies beside the notebooks."""
    (elsewhere.parent / "bench").mkdir()
    (elsewhere.parent / "bench/__init__.py").touch()
    answer = run(HIDE_COURSE + CELL + "\nimport bench; print(bench.__file__)", elsewhere, fake)
    assert answer.returncode == 0, answer.stderr
    assert Path(answer.stdout.strip()).parents[1] == elsewhere.parent and not asked(fake)
