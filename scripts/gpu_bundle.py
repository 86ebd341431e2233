"""Gather in a folder what the GPU suite needs on a machine without a network: package, bench, a loop.

    python scripts/gpu_bundle.py build/gpu     # `make gpu-bundle`

Copy the folder there (it is one or two megabytes) and call ``sh run.sh`` in it, with OUT naming where the file of
results goes. The machine needs a GPU, and torch, transformers and numpy for Python 3.11 or newer. Models are seeded
random ones, made on the spot, so no weights travel.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from bench.results import commit

ROOT = Path(__file__).resolve().parents[1]
RUN = """\
# Runs the GPU suite until it is through, at most TRIES times MINUTES; each try goes on where the last one stopped.
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PYTHONPATH=. T5ACCEL_COMMIT={commit}
out=$(cd "${{OUT:-.}}" && pwd) && cd "$(dirname "$0")" || exit 1
try=0
while [ $try -lt "${{TRIES:-3}}" ]; do
    try=$((try + 1))
    python3 -m bench.gpu.suite --json "$out" --minutes "${{MINUTES:-7}}" "$@"
    code=$?
    [ $code -ne 0 ] && [ $code -ne 2 ] || exit $code  # 0: it is through or out of time; 2: asked wrongly
done
exit $code
"""


def write_bundle(folder: Path) -> int:
    """Write the folder anew; returns its bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    for source in [*(ROOT / "t5accel").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]:
        target = folder / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    (folder / "run.sh").write_text(RUN.format(commit=commit() or "unknown"), encoding="utf-8")
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/gpu_bundle.py FOLDER")
    size = write_bundle(Path(sys.argv[1]))
    print(f"{sys.argv[1]}: {size / 1e6:.1f} MB")
