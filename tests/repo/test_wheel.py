"""The built wheel carries the package and the bundled T5s, and works away from the checkout."""

import hashlib
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from t5accel.models.load import BUNDLED

ROOT = Path(__file__).resolve().parents[2]

MODEL_FILES = ("model.safetensors", "config.json", "tokenizer.json", "README.md")
TRANSLATE = """
import sys
from pathlib import Path
import t5accel
from t5accel import load_model

assert Path(t5accel.__file__).resolve().is_relative_to(Path(sys.argv[1]).resolve()), t5accel.__file__
model, tokenizer = load_model("mini")
inputs = tokenizer("translate English to French: I am tired.", return_tensors="pt")
tokens = model.generate(**inputs, max_new_tokens=24, num_beams=1, do_sample=False)
print(tokenizer.decode(tokens[0], skip_special_tokens=True))
"""


def build(folder: Path, *arguments: str) -> Path:
    command = [sys.executable, "-m", "build", "--no-isolation", *arguments, "--outdir", folder, ROOT]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"), "--wheel")


def contents(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def test_it_holds_the_package_and_the_bundled_t5s_alone(wheel: Path) -> None:
    carried = contents(wheel)
    expected = {"t5accel/py.typed"} | {
        f"t5accel/data/{model}/{name}" for model in BUNDLED.values() for name in MODEL_FILES
    }
    assert expected <= carried.keys()
    for name, digest in carried.items():
        if name.startswith("t5accel/data/"):
            assert name.split("/")[2] in BUNDLED.values()
            assert digest == hashlib.sha256((ROOT / name.removeprefix("t5accel/")).read_bytes()).hexdigest()
    top = {name.split("/")[0] for name in carried}
    assert {name for name in top if not name.endswith(".dist-info")} == {"t5accel"}, "nothing else in site-packages"
    licences = {Path(name).name for name in carried if "/licenses/" in name}
    assert licences == {"LICENSE", "NOTICE"}


def test_the_source_archive_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    assert contents(build(tmp_path)) == contents(wheel)  # without --wheel, build makes it from the source archive
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        carried = {name.partition("/")[2] for name in files.getnames()}
    assert {"LICENSE", "LICENSE-docs", "NOTICE", "CITATION.cff", "SECURITY.md", "README.md", "CHANGELOG.md"} <= carried


def test_it_translates_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "target", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = ["install", "-qq", "--no-deps", "--no-index", "--target", target, wheel]
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *install], check=True)
    environment = {**os.environ, "PYTHONPATH": str(target), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    answer = subprocess.run(
        [sys.executable, "-c", TRANSLATE, target], cwd=elsewhere, env=environment, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip(), "an empty translation"
