"""Batch jobs on a Ray cluster of this machine, and what kills them: `make test-ray`."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from filelock import FileLock

from bench import evaluation
from bench.serving.servers import free_port
from t5accel.serve.batch.job import JobSettings, ModelSource, run
from t5accel.serve.batch.output import DONE

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "build/servers/ray/bin/python"
SETTINGS = JobSettings(prefix="translate English to French: ", beams=4, max_new_tokens=24, shard_rows=5)
ROWS, SHARDS = 360, 73  # and a broken row
LIMIT_S = 240  # of one run, on cores that others may use, too
PROGRAM = f"""
import sys
from dataclasses import replace
from functools import partial
from t5accel.serve.batch.job import ModelSource, JobSettings
from t5accel.serve.batch.job import in_this_process, run
from t5accel.serve.ray_batch import on_ray
from t5accel.errors import T5AccelError
given, out, model, engine, silent_s, shard_rows = sys.argv[1:]
settings = replace({SETTINGS!r}, shard_rows=int(shard_rows))
engine = in_this_process if engine == "local" else partial(on_ray, unhealthy_after_s=float(silent_s))
try:
    print(run(given, out, ModelSource(model, threads=1), settings, engine=engine)[0])
except T5AccelError as error:
    sys.exit(f"{{type(error).__name__}}: {{error}}")
"""
Start = Callable[..., subprocess.Popen]


def files(folder: Path) -> dict[str, bytes]:
    """All that a job wrote, by name."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def answers(found: dict[str, bytes]) -> list[bytes]:
    """The lines of all shards, of whatever size."""
    return b"".join(found[name] for name in sorted(found) if name.startswith("part")).splitlines()


def done(out: Path) -> int:
    """Shards with a record: Ray hands them to the driver some time after their files were written."""
    path = out / DONE
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [row["source"] for row in evaluation.rows("translation", limit=40)] * 3
    assert len(texts) == ROWS
    lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)]
    path = tmp_path_factory.mktemp("given") / "in.jsonl"
    path.write_text("\n".join([*lines[:5], "broken", *lines[5:]]) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def expected(given: Path, exported_mini: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the local engine writes, in this environment."""
    out = tmp_path_factory.mktemp("expected") / "out"
    answered, _ = run(given, out, ModelSource(str(exported_mini), threads=1), SETTINGS)
    found = files(out)
    assert [json.loads(line)["id"] for line in answers(found)] == list(range(ROWS)) and answered.rejected == 1, (
        "every row once"
    )
    return found


@pytest.fixture
def start(given: Path, exported_mini: Path) -> Iterator[Start]:
    """Begins a job in a process group of its own; what is left of it ends with the test."""
    started: list[subprocess.Popen] = []

    def begin(
        out: Path, engine: str = "ray", silent_s: float = LIMIT_S, path: Path = given, rows: int = SETTINGS.shard_rows
    ) -> subprocess.Popen:
        process = subprocess.Popen(
            [PYTHON, "-c", PROGRAM, path, out, exported_mini, engine, str(silent_s), str(rows)], start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=out.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        end(tree(process))


def tree(process: subprocess.Popen) -> list[psutil.Process]:
    """A driver and all that it started, Ray's own processes among them."""
    try:
        whole = psutil.Process(process.pid)
        return [whole, *whole.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def named(process: subprocess.Popen, name: str) -> list[psutil.Process]:
    """Those of them whose command has this in it."""
    found = []
    for one in tree(process):
        try:
            found += [one] if name in " ".join(one.cmdline()) else []
        except psutil.Error:
            pass
    return found


def end(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass


VICTIMS: dict[str, Callable[[subprocess.Popen], list[psutil.Process]]] = {
    "the driver": lambda process: tree(process)[:1], "an actor": lambda process: named(process, "MapWorker")[:1],
    "who counts the beats": lambda process: named(process, "ray::Heartbeat"),
    "a machine": lambda process: named(process, "raylet/raylet"), "all of it": tree,
}  # fmt: skip


def said(process: subprocess.Popen) -> tuple[str, str]:
    return process.communicate(timeout=LIMIT_S)


def wait_for(shards: int, out: Path, process: subprocess.Popen) -> None:
    """Until so many are done."""
    limit = time.monotonic() + LIMIT_S
    while done(out) < shards and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.02)


def killed(start: Start, out: Path, expected: dict[str, bytes], times: int, seed: int = 0) -> None:
    """Kill one victim after the other at random moments, each time with the same command again."""
    rng, whom = random.Random(seed), list(VICTIMS)
    names, hit, process = rng.sample(whom, times), 0, start(out)
    for name in names:
        writing = rng.random() < 0.7
        if writing:
            wait_for(min(done(out) + rng.randint(1, SHARDS // times), SHARDS - 3), out, process)
        time.sleep(rng.uniform(0, 0.3 if writing else 8))  # else it may be starting
        victims = VICTIMS[name](process) if process.poll() is None else []
        hit += bool(victims)
        end(victims)
        if name in ("the driver", "a machine", "all of it") or process.poll() is not None:
            if name != "the driver":
                said(process)
            process = start(out)  # at once: what the driver left may be at work for a moment
    printed, errors = said(process)
    if process.returncode:  # Ray gave up, in a sentence
        assert "the same command goes on" in errors, errors
        assert said(process := start(out)) and process.returncode == 0
    assert 2 * hit > times, f"{hit} of {names}"
    assert files(out) == expected


def test_ray_writes_what_the_local_engine_writes(start: Start, expected: dict[str, bytes], tmp_path: Path) -> None:
    process = start(tmp_path / "out")
    printed, errors = said(process)
    assert process.returncode == 0 and printed.startswith(f"ShardStats(answered={ROWS}, rejected=1, tokens="), errors
    assert files(tmp_path / "out") == expected
    assert "Traceback" not in errors and "INFO" not in errors


ON_CLUSTER = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}


@pytest.fixture
def cluster() -> Iterator[str]:
    """The address of one that is there already and knows the package."""
    port = free_port()
    command = ["start", "--head", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2", "--block"]
    quiet = ["--include-dashboard=false", "--disable-usage-stats", f"--object-store-memory={200 << 20}"]
    process = subprocess.Popen(
        [PYTHON.with_name("ray"), *command, *quiet], start_new_session=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env=ON_CLUSTER,
    )  # fmt: skip
    yield f"127.0.0.1:{port}"
    end(tree(process))


def test_the_command_gives_shards_to_a_cluster_that_is_there(cluster, given, exported_mini, expected, tmp_path) -> None:
    command = [PYTHON, "-m", "t5accel", "batch", given, tmp_path / "out", "--model", exported_mini, "--threads", "1"]
    command += ["--prefix", SETTINGS.prefix, "--beams", SETTINGS.beams, "--max-new-tokens", SETTINGS.max_new_tokens]
    command += ["--engine", "ray", "--address", cluster]
    limit = time.monotonic() + LIMIT_S
    while True:
        process = subprocess.run([*map(str, command)], env=ON_CLUSTER, capture_output=True, text=True, timeout=LIMIT_S)
        if "No cluster of Ray" not in process.stderr or time.monotonic() > limit:  # it may be starting
            break
        time.sleep(1)
    assert process.returncode == 0, process.stderr
    assert answers(files(tmp_path / "out")) == answers(expected)


@pytest.mark.parametrize("engines", [("local", "ray"), ("ray", "local")], ids=" then ".join)
def test_one_engine_goes_on_with_what_the_other_began(engines, start: Start, expected, tmp_path) -> None:
    out = tmp_path / "out"
    process = start(out, engines[0])
    wait_for(3, out, process)
    end(tree(process))
    process.wait(timeout=60)
    before = done(out)
    assert 3 <= before < SHARDS
    process = start(out, engines[1])
    printed, errors = said(process)
    assert process.returncode == 0, errors
    assert files(out) == expected and f"answered={ROWS}" not in printed


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3, 4))])
def test_kills_lose_no_row_and_do_none_twice(start: Start, expected, tmp_path: Path, seed: int) -> None:
    killed(start, tmp_path / "out", expected, 3 if seed == 0 else len(VICTIMS), seed)  # or each victim once


def test_an_actor_that_is_stuck_ends_the_job_and_the_same_command_goes_on(start: Start, expected, tmp_path) -> None:
    out = tmp_path / "out"
    process = start(out, silent_s=6)
    wait_for(2, out, process)
    stopped = named(process, "MapWorker")
    for one in stopped:
        one.send_signal(signal.SIGSTOP)
    _, errors = said(process)
    end(stopped)
    assert process.returncode == 1 and "JobError: Nothing was heard of any actor for" in errors, errors
    process = start(out)
    assert said(process) and process.returncode == 0 and files(out) == expected


def test_an_input_that_vanishes_is_said_in_a_sentence_and_loses_nothing(start, given: Path, expected, tmp_path) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out"
    path.write_bytes(given.read_bytes())
    process = start(out, path=path)
    wait_for(2, out, process)
    path.rename(tmp_path / "away")
    _, errors = said(process)
    assert process.returncode == 1
    sentence = f"JobError: {path} cannot be read: No such file or directory. What is done is kept."
    assert errors.splitlines()[-1] == sentence
    (tmp_path / "away").rename(path)
    process = start(out, path=path)
    assert said(process) and process.returncode == 0 and files(out) == expected


def test_a_second_job_on_one_output_is_refused(start: Start, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".lock"):
        process = start(tmp_path / "out")
        assert "InputError: Another job is writing to" in said(process)[1] and process.returncode == 1


@pytest.mark.long
def test_ten_times_the_rows_take_no_more_memory(start: Start, tmp_path: Path) -> None:
    peaks: list[dict[str, int]] = []
    for copies in (2, 20):
        path = tmp_path / f"in{copies}.txt"
        path.write_text("I am tired.\nWhere is my bag?\nWe have two cats.\n" * 50 * copies, encoding="utf-8")
        process, peak = start(tmp_path / f"out{copies}", path=path, rows=50), {"driver": 0, "actor": 0}
        while process.poll() is None:
            for name, of in (("driver", tree(process)[:1]), ("actor", named(process, "MapWorker"))):
                peak[name] = max([peak[name], *(own(one) for one in of)])
            time.sleep(0.2)
        assert process.returncode == 0, said(process)
        peaks.append(peak)
    assert all(peaks[1][name] < 1.1 * peaks[0][name] for name in ("driver", "actor")), peaks


def own(process: psutil.Process) -> int:
    """Bytes of memory that no file and no other process stands behind.

    Ray's object store is left out, which has a limit of its own; as "unique" it counts with the driver's once the
    others that shared it have ended.
    """
    try:
        info = process.memory_info()
    except psutil.Error:
        return 0
    return info.rss - info.shared
