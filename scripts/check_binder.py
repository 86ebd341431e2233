"""What Binder would build from binder/, as far as it can be known without Docker and conda: `make test-binder`.

repo2docker prints the Dockerfile that it would build, and pip resolves what binder/environment.yml asks of it. The
environment around this script has both; torch is the constraints' version, as conda brings one before pip runs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]
BINDER = ROOT / "binder"
# In this order: the environment, then the image's own test, then the script that every session starts with.
STEPS = (
    r'env update -p \$\{NB_PYTHON_PREFIX\} --file "binder/environment\.yml"',
    r"^RUN \./binder/postBuild$",
    r'^ENV R2D_ENTRYPOINT="\$\{REPO_DIR\}/binder/start"$',
)
EXPECTED = {"t5accel", "torch", "transformers", "onnxruntime", "optimum-onnx", "datasets", "jupyterlab", "ipykernel"}


def run(*command: str | Path, folder: Path) -> tuple[str, str]:
    """What a command writes to its two outputs; ends this script when the command fails."""
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if answer.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{answer.stdout}{answer.stderr}")
    return answer.stdout, answer.stderr


def check_dockerfile(environment: list[str | dict[str, list[str]]]) -> str:
    """Every step of ``STEPS`` stands in the Dockerfile, in order; returns the Python version that it builds for."""
    tool = Path(sys.executable).parent / "repo2docker"
    dockerfile, log = run(tool, "--no-build", "--debug", ".", folder=ROOT)
    at = [match.start() if (match := re.search(step, dockerfile, re.MULTILINE)) else -1 for step in STEPS]
    assert -1 not in at and at == sorted(at), f"the Dockerfile lacks or misplaces steps: {at}\n{dockerfile}"
    built_for = re.search(r"^Building conda environment for python=([\d.]+)$", log, re.MULTILINE)
    assert built_for and f"python={built_for[1]}" in environment, log
    return built_for[1]


def check_pip(requirements: list[str]) -> dict[str, str]:
    """Let pip resolve the requirements without installing; returns name -> version of what it would install."""
    ours = [entry for entry in requirements if entry.startswith("-e ..")]
    assert ours, f"binder/environment.yml does not install the checkout: {requirements}"
    options = [
        "install",
        "--dry-run",
        "--quiet",
        "--ignore-installed",
        "--report",
        "-",
        "-c",
        "../requirements/constraints.txt",
    ]
    answer, _ = run(sys.executable, "-m", "pip", *options, *" ".join(requirements).split(), folder=BINDER)
    found = {item["metadata"]["name"]: item["metadata"]["version"] for item in json.loads(answer)["install"]}
    found = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found.items()}
    assert found.keys() >= EXPECTED, f"pip would not install {EXPECTED - found.keys()}"
    assert "onnxruntime-gpu" not in found, "two distributions of onnxruntime"
    return found


def main() -> None:
    """Both checks."""
    environment = YAML(typ="safe").load(BINDER / "environment.yml")["dependencies"]
    (requirements,) = (entry["pip"] for entry in environment if not isinstance(entry, str))
    python = check_dockerfile(environment)
    found = check_pip(requirements)
    print(
        f"2 passed: repo2docker would build binder/ for Python {python}, with postBuild and start; pip would bring "
        f"{len(found)} packages, transformers {found['transformers']} among them"
    )


if __name__ == "__main__":
    main()
