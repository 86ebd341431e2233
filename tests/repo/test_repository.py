"""The house rules that a parser can check: floors, light imports, one list of dependencies, targets that exist."""

import fnmatch
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest
from conftest import ONCE
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from t5accel import errors

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "t5accel"


def test_the_package_and_pyproject_agree_on_the_version() -> None:
    text = (PACKAGE / "__init__.py").read_text(encoding="utf-8")
    assert re.search(r'^__version__ = "(.*)"$', text, re.MULTILINE).group(1) == PYPROJECT["project"]["version"]


# ---------------------------------------------------------------------------------------------------- tracked files


def tracked_files() -> Iterator[Path]:
    """Every file that .gitignore does not name (its patterns are plain), found without git."""
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split() if not line.startswith("#")]

    def is_ignored(name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in [".git", *ignored])

    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if not is_ignored(name)]
        yield from (Path(folder) / name for name in files if not is_ignored(name))


def test_files_name_no_registry_and_no_path_of_one_machine() -> None:
    hosts = [
        "py" + "pi.org", "python" + "hosted.org", "download." + "pytorch.org", "ana" + "conda.org", "npm" + "js.org",
    ]  # fmt: skip
    forbidden = re.compile(r"(?<![\w.~-])/(?:root|home|work|opt|Users)/|" + "|".join(map(re.escape, hosts)))
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # weights and pictures
        found = forbidden.search(text)
        line = text.count("\n", 0, found.start()) + 1 if found else 0
        assert not found, f"{path.relative_to(ROOT)}:{line} names {found.group()!r}"


# ------------------------------------------------------------------------------------------- one list of dependencies

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PYPROJECT["project"]["optional-dependencies"]
RELEASE_CHECK = (ROOT / "scripts/release_check").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def requirements_of(extras: list[str]) -> Iterator[Requirement]:
    """What the package needs with these extras; an extra may name others as ``t5accel[...]``."""
    for text in PYPROJECT["project"]["dependencies"] + [text for extra in extras for text in EXTRAS[extra]]:
        wanted = Requirement(text)
        if wanted.name == "t5accel":
            yield from requirements_of(sorted(wanted.extras))
        else:
            yield wanted


@pytest.mark.parametrize(
    ("variable", "file"), [("EXTRAS", "requirements/constraints.txt"), ("EXTRAS_V5", "requirements/constraints-v5.txt")]
)
def test_constraints_pin_every_dependency(variable: str, file: str) -> None:
    lines = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
    for line in lines:
        assert re.fullmatch(r"[\w.-]+==[\w.!]+", line), f"{file}: {line!r} is no plain pin"
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    assert len(pins) == len(lines), f"{file} names a package twice"
    extras = re.search(rf"^{variable} := (\S+)$", MAKEFILE, re.MULTILINE).group(1).split(",")
    for wanted in requirements_of(extras):
        pinned = pins.get(canonicalize_name(wanted.name))
        assert pinned, f"{file} does not pin {wanted.name}: make constraints"
        assert wanted.specifier.contains(pinned), f"{file} pins {wanted.name} to {pinned}, pyproject wants {wanted}"


@pytest.mark.parametrize("line", ["", "-v5"])
def test_every_pin_but_torch_has_hashes(line: str) -> None:
    """torch has another build, with hashes of its own, for each processor."""
    constraints, hashes = ((ROOT / f"requirements/{name}{line}.txt").read_text() for name in ("constraints", "hashes"))
    pins = {canonicalize_name(pin) for pin in constraints.splitlines() if not pin.startswith(("#", "torch=="))}
    lines = [line for line in hashes.replace("\\\n", "").splitlines() if not line.startswith("#")]
    hashed = [re.fullmatch(r"(\S+==\S+)(?:\s+--hash=sha256:[0-9a-f]{64})+", line)[1] for line in lines]
    assert {canonicalize_name(pin) for pin in hashed} == pins and len(hashed) == len(pins), "make constraints"


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="pins are resolved on the oldest Python")
def test_every_tested_version_runs_on_the_oldest_python() -> None:
    """Debian 12 has 3.11.2, and a pin for 3.11.5 would end `make` there."""
    oldest = PYPROJECT["project"]["requires-python"].removeprefix(">=") + ".0"
    installed = [(dist.name, dist.metadata["Requires-Python"]) for dist in distributions()]
    assert not [name for name, wanted in installed if wanted and oldest not in SpecifierSet(wanted)]


def test_the_two_lines_of_transformers_are_the_ones_that_are_promised() -> None:
    assert re.search(r"^transformers==4\.57\.", (ROOT / "requirements/constraints.txt").read_text(), re.MULTILINE)
    assert re.search(r"^transformers==5\.", (ROOT / "requirements/constraints-v5.txt").read_text(), re.MULTILINE)


def test_dependencies_are_listed_once() -> None:
    others = {"setup.py", "setup.cfg", "Pipfile", "requirements.txt", "requirements-dev.txt", "poetry.lock", "uv.lock"}
    assert not others & {path.name for path in tracked_files()}
    names = [canonicalize_name(Requirement(text).name) for texts in EXTRAS.values() for text in texts]
    names += [canonicalize_name(Requirement(text).name) for text in PYPROJECT["project"]["dependencies"]]
    names = [name for name in names if name != "t5accel"]  # an extra that takes another one in
    assert len(names) == len(set(names)), "pyproject.toml names a dependency twice"
    ours = {
        '-c $(2) -e ".[$(3)]"',
        '-c requirements/constraints.txt "$$(ls dist/*.whl)[cpu]"',
        '-c requirements/constraints.txt "$$(ls dist/*.tar.gz)[runtime]"',
        '--no-deps --force-reinstall "$$(ls dist/*.tar.gz)"',  # over the wheel, whose dependencies stay
        "-c requirements/constraints.txt --target $(@D) $(call extra,browser)",
        "-c requirements/constraints-v5.txt $(ON_COLAB)",
        "$(call extra,binder)",
        "$(call extra,supply)",
        "--target $(@D) $(call extra,tensorrt)",
        "--target $(@D) $(call extra,triton)",
        "-c requirements/constraints.txt $(call extra,site)",
        "-r $<",  # a peer's or a server's own list, which nothing of ours reads: see tests/bench/test_peers.py
    }
    for arguments in re.findall(r"pip\b.*? install (.*)", MAKEFILE):
        assert arguments.removeprefix("-qq ").split(" && ")[0] in ours, f"the Makefile installs {arguments!r}"
    on_colab = re.search(r"^ON_COLAB := (.*)$", MAKEFILE, re.MULTILINE).group(1).split()
    assert set(on_colab) <= set(names), "what Colab brings stands in pyproject.toml too"


@pytest.mark.parametrize(("given", "extras"), [((), "cpu,course,optimum"), (("EXTRAS=cpu,course",), "cpu,course")])
def test_the_wheelhouse_holds_the_tested_versions(given: tuple[str, ...], extras: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}  # `make test` sets it
    command = ["make", "-n", "wheelhouse", *given]
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    (gather,) = re.findall(r"^.* -m pip .* wheel (.*)", answer.stdout.replace("\\\n", " "), re.MULTILINE)
    assert "-c requirements/constraints.txt" in gather and f'".[{extras}]"' in gather
    assert set(extras.split(",")) <= EXTRAS.keys() and f'wheelhouse_note.py "{extras}"' in answer.stdout
    note = [sys.executable, "scripts/wheelhouse_note.py", extras]
    text = subprocess.run(note, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f'pip install --no-index --find-links wheelhouse "t5accel[{extras}]"' in text


def test_what_extras_bring() -> None:
    """Marian's class imports sentencepiece, and conversions of other families' vocabularies do."""
    of_cpu, brought = (
        {canonicalize_name(wanted.name) for wanted in requirements_of([extra])} for extra in ("cpu", "notebooks")
    )
    assert "sentencepiece" in of_cpu
    assert not brought & {"jupyterlab", "notebook", "ipykernel", "ipywidgets"}, "on Colab these stay as they are"

    for variable in ("EXTRAS", "EXTRAS_V5"):
        extras = re.search(rf"^{variable} := (\S+)$", MAKEFILE, re.MULTILINE).group(1).split(",")
        assert "cpu" in extras and "gpu" not in extras, "the two runtimes exclude each other"


def test_no_word_is_misspelt() -> None:
    """pyproject.toml says where, and which words are ours; `make lint` says the same."""
    command = [sys.executable, "-m", "codespell_lib"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert subprocess.run([*command, "-"], cwd=ROOT, input="a wrong adress", capture_output=True, text=True).returncode


# ------------------------------------------------------------------------------------- commands that documents mention


def test_what_windows_users_type_is_what_make_runs() -> None:
    table = (ROOT / "docs/WORKSHOP.md").read_text(encoding="utf-8").split("### On Windows\n")[1].split("\n## ")[0]
    told = re.findall(r"^\| `make ([a-z]+)` \| `(.*)` \|$", table, re.MULTILINE)
    assert {"translate", "course", "lab", "test"} <= {target for target, _ in told}
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    for target, command in told:
        answer = subprocess.run(["make", "-n", target], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert command.replace("\\Scripts\\", "/bin/") in answer.stdout.splitlines(), target
    (extras,) = re.findall(r'-m pip install -c requirements/constraints.txt -e "\.\[(.*?)\]"`', table)
    assert f"EXTRAS := {extras}\n" in MAKEFILE


TARGETS = dict(re.findall(r"^([a-z][a-z0-9-]*):.*?(?:## (.*))?$", MAKEFILE, re.MULTILINE))


def code_in(markdown: str) -> Iterator[str]:
    """The lines of fenced blocks and the inline code spans."""
    for block in re.findall(r"^```[^\n]*\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL):
        yield from block.splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_make_target_that_is_mentioned_exists(document: str) -> None:
    mentioned = set()
    for code in code_in((ROOT / document).read_text(encoding="utf-8")):
        for arguments in re.findall(r"(?:^|&& |\$ )make((?: +[\w./=-]+)+)", code.split("#")[0]):
            mentioned |= {word for word in arguments.split() if "=" not in word and not word.startswith("-")}
    assert {"course", "test"} <= mentioned, f"{document} should show the two commands"
    assert mentioned <= TARGETS.keys(), f"{document} mentions targets that the Makefile lacks"


def test_every_target_is_explained_and_phony() -> None:
    phony = set(re.search(r"^\.PHONY: ((?:.*\\\n)*.*)$", MAKEFILE, re.MULTILINE).group(1).replace("\\\n", " ").split())
    assert phony == TARGETS.keys()
    assert all(TARGETS.values()), "`make help` needs a sentence for each target"


def test_ci_runs_what_we_promise() -> None:
    commands = re.findall(r"^scripts/timed (make .*)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    on_one_line = 'make test-v5 ONLY="not long and not once"'
    others = ["make test-bench", on_one_line, "make test-wheel", "make course", "make site"]
    assert commands == ["make lint", "make test", *others]
    assert 'test-v5 ONLY="long or once" TESTS="$ALL_TESTS"' in RELEASE_CHECK  # a release has them on both
    assert not [name for name in ONCE if not (ROOT / f"tests/core/test_{name}.py").is_file()]
    (rest,) = re.findall(r"for target in (.*); do", RELEASE_CHECK.replace("\\\n", ""))
    targets = {
        name for name in re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE) if name.startswith(("test", "course"))
    }
    run = {*rest.split()} | {command.split()[1] for command in commands}
    assert run - targets == {"lint", "site"} and targets <= run, "nobody runs some target"


def test_a_release_check_goes_on_behind_a_failure_and_lists_how_each_part_went(tmp_path: Path) -> None:
    found = {version.split()[-1] for version in PYPROJECT["project"]["classifiers"] if "Python :: 3." in version}
    (pythons,) = re.findall(r"^PYTHONS := (.*)$", MAKEFILE, re.MULTILINE)
    assert {f"python{version}" for version in found} == {*pythons.split()}
    for name, code in ((".ci/run", "exit 0"), ("make", 'test "$2" != test-web'), ("scripts/release_check", None)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(RELEASE_CHECK if code is None else f"#!/bin/sh\n{code}\n")
        path.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ALL_TESTS": "", "PYTHONS": "python3 python0"}
    answer = subprocess.run([tmp_path / "scripts/release_check"], env=environment, capture_output=True, text=True)
    outcomes = re.findall(r"^(\w+).*?: (.+)$", answer.stdout.split("\n\n")[1], re.MULTILINE)
    assert answer.returncode == 1
    assert [rest for outcome, rest in outcomes if outcome == "FAILED"] == ["make --no-print-directory test-web"]
    assert [rest.split(",")[0] for outcome, rest in outcomes if outcome == "SKIPPED"] == ["the wheel with python0"]
    passed = [rest.replace("make --no-print-directory ", "") for outcome, rest in outcomes if outcome == "passed"]
    assert passed[0] == ".ci/run" and passed[-3:] == ["test-wheel PYTHON=python3", "sbom", "audit"]
    (tmp_path / "make").write_text("#!/bin/sh\nexit 0\n")
    assert subprocess.run([tmp_path / "scripts/release_check"], env=environment, capture_output=True).returncode == 0


def test_the_wheel_runs_readmes_example(tmp_path: Path) -> None:
    shown = subprocess.run(["make", "-n", "test-wheel"], cwd=ROOT, capture_output=True, text=True).stdout
    extraction, *others = re.findall(r"&& (awk .*?README\.md) >", shown)
    code = subprocess.run(["bash", "-c", extraction], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"## One line\n\n```python\n{code}```\n" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(others) == 1, "once with the wheel, once with the source archive"


@pytest.mark.parametrize("script", [".ci/run", "scripts/chromium", "binder/postBuild", "binder/start"])
def test_scripts_are_executable_and_strict(script: str) -> None:
    text = (ROOT / script).read_text(encoding="utf-8")
    assert os.access(ROOT / script, os.X_OK), f"chmod +x {script}"
    assert text.startswith("#!/usr/bin/env bash\n") and "\nset -euo pipefail\n" in text
    subprocess.run(["bash", "-n", ROOT / script], check=True)


def test_commands_that_install_us_work_from_a_checkout_until_there_is_an_address(monkeypatch) -> None:
    """One place knows how: `errors.install`."""
    assert shlex.split(errors.install("cpu,demo"))[:3] == ["pip", "install", ".[cpu,demo]"]
    places = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "t5accel").rglob("*.py")]
    by_name = {
        place.name for place in places if re.search(r"pip install\W+t5accel\b", place.read_text(encoding="utf-8"))
    }
    assert not by_name or errors.ADDRESS, f"t5accel is on no index: {by_name}"
    monkeypatch.setattr(errors, "ADDRESS", "t5accel")
    assert errors.install("cpu,demo") == 'pip install "t5accel[cpu,demo]"'
