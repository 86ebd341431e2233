"""Batch jobs on a Ray cluster of this machine, and what kills them: `make test-ray`."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from t5accel import tasks
from t5accel.batch.job import Model, Settings
from t5accel.batch.run import run
from t5accel.errors import JobError

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = Settings(prefix="translate English to French: ", max_new_tokens=24, shard_rows=10)
LIMIT_S = 240  # a dead actor may hang a pool for ever
os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # for cores that others use, too
PROGRAM = """
import sys
from t5accel.batch.job import Model, Settings
from t5accel.batch.run import run
settings = Settings(prefix="translate English to French: ", max_new_tokens=24, shard_rows=10)
print(run(sys.argv[1], sys.argv[2], Model(sys.argv[3]), settings, engine="ray")[0])
"""


def files(folder: Path) -> dict[str, bytes]:
    """All that a job wrote, by name."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("given") / "in.jsonl"
    texts = [row["source"] for row in tasks.rows("translation", limit=40)]
    lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)]
    path.write_text("\n".join([*lines[:5], "broken", *lines[5:]]) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def expected(given: Path, exported_mini: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the local engine writes."""
    out = tmp_path_factory.mktemp("expected") / "out"
    done, _ = run(given, out, Model(str(exported_mini), threads=1), SETTINGS)
    assert done.answered == 120 and done.rejected == 1
    return files(out)


@pytest.fixture
def start(given: Path, exported_mini: Path) -> Iterator[Callable[[Path], subprocess.Popen]]:
    """Begins a job in a process group of its own, which ends with the test."""
    started = []

    def begin(out: Path) -> subprocess.Popen:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])}
        command = [sys.executable, "-c", PROGRAM, given, out, exported_mini]
        started.append(subprocess.Popen(
            command, env=environment, start_new_session=True, stdout=subprocess.PIPE, text=True, cwd=ROOT
        ))  # fmt: skip
        return started[-1]

    yield begin
    for process in started:
        end(tree(process))


def tree(process: subprocess.Popen) -> list[psutil.Process]:
    """A driver and all that it started; Ray's own processes among them."""
    try:
        whole = psutil.Process(process.pid)
        return [*whole.children(recursive=True), whole]
    except psutil.NoSuchProcess:
        return []


def end(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass


def wait_for(shards: int, out: Path, process: subprocess.Popen) -> None:
    """Until so many are done."""
    limit = time.monotonic() + LIMIT_S
    while len(list(out.glob("part-*"))) < shards and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.02)


def test_ray_writes_what_the_local_engine_writes(start: Any, expected: dict[str, bytes], tmp_path: Path) -> None:
    process = start(tmp_path / "out")
    printed, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0 and printed.startswith("Done(answered=120, rejected=1, tokens=")
    assert files(tmp_path / "out") == expected


def test_one_engine_goes_on_with_what_the_other_began(
    start: Any, given: Path, exported_mini: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    process = start(tmp_path / "out")
    wait_for(2, tmp_path / "out", process)
    end(tree(process))
    process.wait(timeout=60)
    assert 2 <= len(list((tmp_path / "out").glob("part-*")))
    deadline = time.monotonic() + 30  # an actor whose driver is gone may still end its shard
    while left := [p for p in psutil.process_iter(["cmdline"]) if f"{tmp_path}" in " ".join(p.info["cmdline"] or [])]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    _, before = run(given, tmp_path / "out", Model(str(exported_mini), threads=1), SETTINGS)
    assert before >= 20 and files(tmp_path / "out") == expected


@pytest.mark.parametrize("whom", ["driver", "actor"])
def test_a_job_goes_on_after_its_driver_or_an_actor_was_killed(
    whom: str, start: Any, expected: dict[str, bytes], tmp_path: Path
) -> None:
    rng = random.Random(whom)
    process = start(tmp_path / "out")
    wait_for(rng.randint(1, 4), tmp_path / "out", process)
    found = tree(process)
    actors = [one for one in found if "MapWorker" in name_of(one)]
    if whom == "driver":
        end(found)
        process.wait(timeout=60)
        process = start(tmp_path / "out")
    else:
        assert actors, [name_of(one) for one in found]
        end(actors[:1])
    try:
        process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:  # a pool that hangs: whoever waits for it ends it, and begins again
        end(tree(process))
        process = start(tmp_path / "out")
        process.communicate(timeout=LIMIT_S)
    if process.returncode:  # the pool gave up; the same command goes on
        process = start(tmp_path / "out")
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0 and files(tmp_path / "out") == expected


def name_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_what_an_actor_refuses_is_said_in_a_sentence(
    given: Path, exported_mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from t5accel.batch import run as running

    path = tmp_path / "in.jsonl"
    path.write_bytes(given.read_bytes())
    real = running.on_ray

    def vanished(*arguments: Any) -> Any:
        path.unlink()
        return real(*arguments)

    monkeypatch.setattr(running, "on_ray", vanished)
    with pytest.raises(JobError, match="in.jsonl cannot be read: No such file"):
        run(path, tmp_path / "out", Model(str(exported_mini), threads=1), SETTINGS, engine="ray")
