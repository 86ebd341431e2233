import subprocess
import sys
from importlib import metadata, util
from pathlib import Path

REPOSITORY = "owner/name"  # of this course on GitHub; `make badges REPO=owner/name` fills it in

if not (util.find_spec("t5accel") and util.find_spec("bench")):
    course = Path.cwd().parent
    if not ((course / "bench").exists() and util.find_spec("torch")):  # no checkout, or a kernel that cannot run it
        if REPOSITORY == "owner/name":
            advice = 'run `make lab` in a checkout, or write the course\'s address above: REPOSITORY = "owner/name"'
            raise ModuleNotFoundError(f"This kernel has no t5accel: {advice} (`make badges REPO=owner/name` does it).")
        course = Path("t5accel-course").resolve()  # as on Colab; torch, transformers and numpy stay as they are
        same = [f"{lib}=={metadata.version(lib)}" for lib in ("torch", "transformers", "numpy") if util.find_spec(lib)]
        extras = "notebooks" if util.find_spec("onnxruntime") else "cpu,notebooks"
        clone = ["git", "clone", "--depth=1", f"https://github.com/{REPOSITORY}", str(course)]
        install = [sys.executable, "-m", "pip", "install", *same, "-e", f"{course}[{extras}]"]
        for command in [install] if course.exists() else [clone, install]:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"The course could not be installed:\n{done.stdout}{done.stderr}")
    sys.path.insert(0, str(course))
