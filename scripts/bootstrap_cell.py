import subprocess
import sys
from importlib import metadata, util
from pathlib import Path

REPOSITORY = "owner/name"  # of this course on GitHub; `make badges REPO=owner/name` fills it in

if not util.find_spec("t5accel"):
    if Path("../t5accel/__init__.py").exists() and util.find_spec("torch"):  # a checkout and a kernel that can run it
        sys.path.append(str(Path.cwd().parent))
    elif REPOSITORY == "owner/name":
        advice = 'run `make lab` in a checkout, or write the course\'s address above: REPOSITORY = "owner/name"'
        raise ModuleNotFoundError(f"This kernel has no t5accel: {advice} (`make badges REPO=owner/name` does it).")
    else:  # as on Colab: install the course; torch, transformers and numpy stay as they are
        same = [f"{lib}=={metadata.version(lib)}" for lib in ("torch", "transformers", "numpy") if util.find_spec(lib)]
        extras = "notebooks" if util.find_spec("onnxruntime") else "cpu,notebooks"
        course = f"t5accel[{extras}] @ git+https://github.com/{REPOSITORY}"
        pip = subprocess.run([sys.executable, "-m", "pip", "install", *same, course], capture_output=True, text=True)
        if pip.returncode:
            raise RuntimeError(f"t5accel could not be installed. pip says:\n{pip.stdout}{pip.stderr}")
