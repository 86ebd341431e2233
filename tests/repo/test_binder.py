"""binder/ and environment.yml by a schema of our own: repo2docker accepts misspelt keys and made-up packages."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# file -> what comes from conda, and the extras that pip installs on top
ENVIRONMENTS = {
    "environment.yml": ({"python", "pip"}, ["gpu", "course", "optimum"]),
    "binder/environment.yml": ({"python", "pip", "pytorch-cpu"}, ["cpu", "course", "optimum"]),
}


def faults(text: str, folder: Path, from_conda: set[str], extras: list[str]) -> list[str]:
    """What is wrong with an environment.yml that lies in ``folder``; an empty list when nothing is."""
    try:
        environment = yaml.safe_load(text)
    except yaml.YAMLError as error:
        return [str(error)]
    if not isinstance(environment, dict) or list(environment) != ["name", "channels", "dependencies"]:
        return ["its keys are name, channels and dependencies"]
    found = []
    if environment["name"] != "t5accel" or environment["channels"] != ["conda-forge", "nodefaults"]:
        found.append("the name is t5accel, the channels are conda-forge and nodefaults")
    plain = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    nested = [entry for entry in environment["dependencies"] if not isinstance(entry, str)]
    for entry in plain:
        if not re.fullmatch(r"[a-z0-9-]+((=|>=)\d+(\.\d+)*)?", entry):
            found.append(f"{entry!r} is no requirement of conda")
    names = [re.split(r"[=<>]", entry)[0] for entry in plain]
    if sorted(names) != sorted(from_conda):
        found.append(f"conda brings {from_conda}, not {names}")
    pythons = [entry.split("=")[-1].split(".") for entry in plain if re.fullmatch(r"python=3\.\d+", entry)]
    lowest = PROJECT["requires-python"].removeprefix(">=").split(".")
    if len(pythons) != 1 or [int(part) for part in pythons[0]] < [int(part) for part in lowest]:
        found.append("one python=3.N that pyproject.toml allows")
    if len(nested) != 1 or list(nested[0]) != ["pip"] or not isinstance(nested[0]["pip"], list):
        return [*found, "one list under pip, and no other list"]
    for entry in nested[0]["pip"]:
        if constraints := re.fullmatch(r"-c (\S+)", entry):
            if not (folder / constraints[1]).is_file():
                found.append(f"there is no {constraints[1]}")
        elif ours := re.fullmatch(r"-e (\.{1,2})\[([a-z,]+)\]", entry):
            if not (folder / ours[1] / "pyproject.toml").is_file():
                found.append(f"{ours[1]} is not the checkout")
            if ours[2].split(",") != extras or not set(extras) <= PROJECT["optional-dependencies"].keys():
                found.append(f"the extras are {extras}")
        else:
            found.append(f"{entry!r} is a dependency outside pyproject.toml")
    if sum(entry.startswith("-e ") for entry in nested[0]["pip"]) != 1:
        found.append("pip installs the checkout, once")
    return found


@pytest.mark.parametrize("file", ENVIRONMENTS)
def test_conda_environments_are_thin_faces_on_pyproject(file: str) -> None:
    path = ROOT / file
    assert faults(path.read_text(encoding="utf-8"), path.parent, *ENVIRONMENTS[file]) == []


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


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("name:", "nmae:"), ("conda-forge", "conda-forgr"), ("python=3.11", "python=3.10"), ("  - pip\n", ""),
        ("  - pip:\n", "  - pip:\n      - requests\n"), ("constraints", "no-such-constraints"),
        ("-e .", "-e elsewhere/."), ("course,", "coarse,"), ("  - pip:\n", "  - pip: [\n"),
    ],
)  # fmt: skip
def test_the_schema_catches(good: str, bad: str) -> None:
    path = ROOT / "binder/environment.yml"
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert good in text
    assert faults(text.replace(good, bad), path.parent, *ENVIRONMENTS["binder/environment.yml"])


def test_start_hands_over(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [ROOT / "binder/start", "bash", "-c", 'echo "$OMP_NUM_THREADS $1"', "bash", "two words"]
    answer = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    threads, words = answer.stdout.strip().split(" ", 1)
    assert int(threads) >= 1 and words == "two words"
