"""Run the first cell of a stamped notebook as on Colab, where pip installs the course: `make test-colab`.

The environment around this script has torch, transformers, numpy and a kernel, and no course. git is told that the
repository's address on GitHub is a clone of this checkout's last commit, so what is not committed is not tested.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path

from jupyter_client.manager import start_new_kernel

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "colab"
REPOSITORY = "someone/t5-course"
BROUGHT_BY_COLAB = {"torch", "transformers", "numpy", "ipykernel"}
COLAB = "import sys; sys.modules['google.colab'] = sys"
LESSON = """
from pathlib import Path
import bench.results, t5accel
assert Path(t5accel.__file__).parents[1] == Path("course").resolve(), t5accel.__file__
assert bench.results.DATA.is_dir()
model, tokenizer = t5accel.load_model("mini")
inputs = tokenizer("translate English to French: I am tired.", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=24)[0], skip_special_tokens=True))
"""


def git(*arguments: str | Path, folder: Path = ROOT) -> None:
    """Run git quietly; raises when it fails."""
    name = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    subprocess.run(["git", *name, *arguments], cwd=folder, check=True)


def installed() -> dict[str, str]:
    """Name -> version of every distribution in this environment."""
    return {found.name.lower().replace("_", "-"): found.version for found in metadata.distributions()}


def stamped_clone() -> tuple[Path, str]:
    """A clone of the last commit with the address stamped and committed, and the first code cell of its notebook 00."""
    clone = FOLDER / "clone"
    git("clone", "--quiet", "--no-hardlinks", ROOT, clone)
    subprocess.run([sys.executable, clone / "scripts" / "badges.py", REPOSITORY], check=True, capture_output=True)
    git("commit", "--quiet", "--no-verify", "--all", "--message", "Stamp", folder=clone)
    book = json.loads((clone / "notebooks" / "00_start_here.ipynb").read_text(encoding="utf-8"))
    return clone, "".join(next(cell["source"] for cell in book["cells"] if cell["cell_type"] == "code"))


def run_in_kernel(cells: list[str], folder: Path, variables: dict[str, str]) -> str:
    """Run cells one after the other in a new kernel; returns what they print, raises what they raise."""
    printed: list[str] = []

    def collect(message: dict) -> None:
        if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
            printed.append(message["content"]["text"])

    quiet = subprocess.DEVNULL  # a kernel warns that it listens on TCP
    manager, client = start_new_kernel(cwd=str(folder), env={**os.environ, **variables}, stderr=quiet)
    try:
        for cell in cells:
            reply = client.execute_interactive(cell, timeout=600, output_hook=collect)["content"]
            if reply["status"] != "ok":
                raise RuntimeError("\n".join(reply["traceback"]))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return "".join(printed).strip()


def main() -> None:
    """Install through the cell, compare the environment before and after, and translate in the same kernel."""
    before = installed()
    assert before.keys() >= BROUGHT_BY_COLAB and not before.keys() & {"t5accel", "onnxruntime", "optimum", "jupyterlab"}
    assert util.find_spec("t5accel") is None, "this environment finds a t5accel already"
    clone, cell = stamped_clone()
    elsewhere = FOLDER / "content"  # no checkout around it
    elsewhere.mkdir()
    github = f"https://github.com/{REPOSITORY}"
    to_the_clone = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # `!pip` is this environment's
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{clone.as_uri()}.insteadOf",
        "GIT_CONFIG_VALUE_0": github,
    }
    french = run_in_kernel([COLAB, cell, LESSON, cell], elsewhere, to_the_clone)
    after = installed()
    changed = {name: (version, after.get(name)) for name, version in before.items() if after.get(name) != version}
    assert not changed, f"the first cell changed what was there: {changed}"
    added = after.keys() - before.keys()
    assert added >= {"t5accel", "onnxruntime", "datasets", "sacrebleu"}, f"the first cell added only {added}"
    assert not added & {"jupyterlab", "notebook", "jupyter-server", "ipywidgets"}, f"a notebook server came: {added}"
    assert french, "an empty translation"
    print(f"1 passed: the first cell added {len(added)} packages and changed none of {len(before)}. {french}")


if __name__ == "__main__":
    main()
