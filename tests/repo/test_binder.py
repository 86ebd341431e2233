"""binder/ and environment.yml, of which repo2docker accepts misspelt keys and made-up packages."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# file -> what comes from conda, and the extras that pip installs on top
ENVIRONMENTS = {
    "environment.yml": ({"python", "pip"}, ["gpu", "course", "optimum"]),
    "binder/environment.yml": ({"python", "pip", "pytorch-cpu"}, ["cpu", "course", "optimum"]),
}


@pytest.mark.parametrize("file", ENVIRONMENTS)
def test_conda_environments_are_thin_faces_on_pyproject(file: str) -> None:
    path, (from_conda, extras) = ROOT / file, ENVIRONMENTS[file]
    environment = yaml.safe_load(path.read_text(encoding="utf-8"))
    *plain, by_pip = environment.pop("dependencies")
    assert environment == {"name": "t5accel", "channels": ["conda-forge", "nodefaults"]}
    versions = dict(re.fullmatch(r"([a-z0-9-]+)(?:=|>=|$)([\d.]*)", entry).groups() for entry in plain)
    assert versions.keys() == from_conda and versions["python"] in SpecifierSet(PROJECT["requires-python"])
    constraints, ours = by_pip["pip"]
    assert [*by_pip] == ["pip"] and (path.parent / constraints.removeprefix("-c ")).is_file()
    where, brought = re.fullmatch(r"-e (\.{1,2})\[([a-z,]+)\]", ours).groups()
    assert (path.parent / where).resolve() == ROOT and brought.split(",") == extras
    assert {*extras} <= PROJECT["optional-dependencies"].keys()


PLATFORMS = {  # as uv calls them -> what markers ask for
    "x86_64-manylinux_2_28": ("linux", "x86_64"), "aarch64-manylinux_2_28": ("linux", "aarch64"),
    "aarch64-apple-darwin": ("darwin", "arm64"), "x86_64-pc-windows-msvc": ("win32", "AMD64"),
}  # fmt: skip


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_gpu_extra_brings_the_one_runtime_that_has_wheels_there(platform: str) -> None:
    system, processor = PLATFORMS[platform]
    where = {"sys_platform": system, "platform_machine": processor}
    wanted = [Requirement(text) for text in PROJECT["optional-dependencies"]["gpu"]]
    brought = [str(one).split(";")[0] for one in wanted if one.marker is None or one.marker.evaluate(where)]
    assert brought[0] == "t5accel[torch]" and len(brought) == 2
    assert brought[1].startswith("onnxruntime-gpu" if processor in ("x86_64", "AMD64") else "t5accel[runtime]")


@pytest.mark.long
@pytest.mark.parametrize("platform", PLATFORMS)
def test_environment_yml_resolves(platform: str, tmp_path: Path) -> None:
    """Without installing; on macOS from release 14, which torch's wheels ask for."""
    pytest.importorskip("uv")
    extras = [part for name in ENVIRONMENTS["environment.yml"][1] for part in ("--extra", name)]
    wheels = [part for name in ("onnxruntime", "onnxruntime-gpu", "torch") for part in ("--only-binary", name)]
    command = ["uv", "pip", "compile", "pyproject.toml", *extras, *wheels, "-c", "requirements/constraints.txt"]
    command += ["--python-platform", platform, "--python-version", "3.11.9", "-q", "-o", str(tmp_path / "found.txt")]
    environment = os.environ | {"MACOSX_DEPLOYMENT_TARGET": "14.0"}
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def pins(name: str) -> set[str]:
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    return {line for line in lines if not line.startswith("#")}


def test_binder_has_the_tested_versions_of_all_that_pip_brings() -> None:
    assert pins("constraints-binder.txt") < pins("constraints.txt")
    left_out = {line.split("==")[0].lower() for line in pins("constraints.txt") - pins("constraints-binder.txt")}
    by_conda = "torch numpy filelock fsspec jinja2 markupsafe mpmath networkx sympy typing_extensions"
    assert left_out - {"setuptools"} == set(by_conda.split()), "make constraints"


def test_start_hands_over_with_telemetry_off(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"]}
    told = 'echo "$OMP_NUM_THREADS $ORT_DISABLE_TELEMETRY $HF_HUB_DISABLE_TELEMETRY $1"'
    command = [ROOT / "binder/start", "bash", "-c", told, "bash", "two words"]
    answer = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    threads, *others, words = answer.stdout.strip().split(" ", 3)
    assert int(threads) >= 1 and others == ["1", "1"] and words == "two words"
