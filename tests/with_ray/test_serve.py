"""Replicas of the server on Ray Serve, of which some are killed: `make test-ray`."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import httpx
import psutil
import pytest

from bench.serving.load import ask
from bench.serving.servers import Asked, Running, Server, together
from t5accel.api import open_backend

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "build/servers/ray/bin/python"
LIMIT_S = 120
TEXTS = ("I am tired.", "Where is my bag?", "We have two cats.", "She reads a book.", "The house is small.", "Help me.")
BODIES = [dict(text=f"translate English to French: {text}", max_new_tokens=5 + 9 * i, min_new_tokens=4 * i)
          for i, text in enumerate(TEXTS)]  # fmt: skip
Start = Callable[..., Running]


def started(model: Path, log: Path, **flags: int) -> Running:
    """On two cores at most two replicas of one thread each."""
    given = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    command = [str(PYTHON), "-m", "t5accel", "serve", "--engine=ray", f"--model={model}", "--port={port}", *given]
    return Running(Server("Ray", command, streams=True), log)


@pytest.fixture(scope="module")
def server(exported_mini: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("ray") / "log"
    with started(exported_mini, log, replicas=2, replicas_min=2) as running:
        inside = psutil.Process(running.process.pid).children(recursive=True)
        yield running
        running.process.send_signal(signal.SIGTERM)
        running.process.wait(timeout=60)
        gone, left = psutil.wait_procs(inside, timeout=30)
        assert not left, "it ended, and what it started is still there"


@pytest.fixture(scope="module")
def expected(exported_mini: Path) -> list[tuple[str, int]]:
    """One by one, in this process."""
    backend, tokenizer, _ = open_backend(exported_mini, progress=False)
    found = [together(backend, tokenizer, [Asked(**body)])[0] for body in BODIES]
    assert len({text for text, _ in found}) == len(BODIES)
    return found


def replicas(running: Running) -> list[psutil.Process]:
    """Their processes."""
    found = []
    for one in psutil.Process(running.process.pid).children(recursive=True):
        try:
            found += [one] if "ServeReplica" in " ".join(one.cmdline()) else []
        except psutil.Error:
            pass
    return found


def until(count: int, running: Running) -> list[psutil.Process]:
    """So many replicas are there, and one of them is ready."""
    ends = time.monotonic() + LIMIT_S
    while time.monotonic() < ends:
        found = replicas(running)
        try:
            with urlopen(running.url + "/health/ready", timeout=10) as response:
                if len(found) == count and response.status == 200:
                    return found
        except OSError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"{len(found)} replicas, not {count}: {running.log.read_text()[-3000:]}")


def outcome(url: str, body: dict[str, Any]) -> tuple[str, int] | HTTPError:
    try:
        return ask(url, body)
    except HTTPError as error:
        return error


def events(url: str, body: dict[str, Any]) -> Iterator[str]:
    with urlopen(Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"}), timeout=60) as answer:
        yield from (line.decode().strip() for line in answer)


def test_answers_and_streams_are_ours_and_both_replicas_work(server: Running, expected: list[tuple[str, int]]) -> None:
    before = {one: one.cpu_times().user for one in until(2, server)}
    url = server.url + "/generate"
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda i: ask(url, BODIES[i % len(BODIES)]), range(120)))
    assert found == expected * 20
    assert all(one.cpu_times().user > before[one] + 0.05 for one in before), "one replica did all the work"
    lines = [json.loads(line[6:]) for line in events(url, {**BODIES[5], "stream": True}) if line.startswith("data: ")]
    assert len(lines) > 1 and "".join(line["text"] for line in lines) == expected[5][0]
    with urlopen(server.url + "/v1/models") as response:
        assert json.load(response)["data"][0]["object"] == "model"


def test_a_refusal_is_that_of_the_replica_and_a_size_that_of_the_front(server: Running) -> None:
    for path, body, status in (
        ("/generate", {**BODIES[0], "max_new_tokens": 0}, 422),
        ("/generate", {"text": "a " * 600}, 413),
        # Refused by its head, while it is still being sent: urllib would report the closed pipe and not the answer.
        ("/generate", {"text": "a" * 2**21}, 413),
        ("/nowhere", BODIES[0], 404),
    ):
        assert httpx.post(server.url + path, json=body, timeout=60).status_code == status, str(body)[:80]


def test_a_replica_killed_under_load_loses_no_request(server: Running, expected: list[tuple[str, int]]) -> None:
    url, victims, ended = server.url + "/generate", until(2, server), threading.Event()
    found: list[tuple[int, Any]] = []

    def client(number: int) -> None:
        while not ended.is_set():
            found.append((number % len(BODIES), outcome(url, BODIES[number % len(BODIES)])))

    with ThreadPoolExecutor(12) as pool:
        waiting = [pool.submit(client, number) for number in range(12)]
        for victim in victims:  # one, and when another one is in its place, the other
            time.sleep(2)
            count = len(found)
            victim.kill()
            until(2, server)
            assert len(found) > count, "nobody was answered in the meantime"
        ended.set()
        for one in waiting:
            one.result(timeout=LIMIT_S)
    again = [one for _, one in found if isinstance(one, HTTPError)]
    assert all(one.code == 503 and one.headers["Retry-After"] for one in again), {one.code for one in again}
    assert all(one == expected[i] for i, one in found if not isinstance(one, HTTPError))
    assert "a replica was lost with a request" in server.log.read_text(), "no kill hit a request"
    assert len(found) > 100 > 10 * len(again)


def test_a_stream_whose_replica_is_lost_ends_with_an_error_to_try_again(server: Running) -> None:
    until(2, server)
    lines = events(server.url + "/generate", dict(BODIES[0], max_new_tokens=500, min_new_tokens=500, stream=True))
    first = next(lines)
    for one in replicas(server):
        one.kill()
    rest = list(lines)
    assert first.startswith("data: ") and rest[-3] == "event: error" and "replica_lost" in rest[-2]
    until(2, server)


@pytest.mark.long
def test_more_replicas_as_requests_wait(exported_mini: Path, tmp_path: Path) -> None:
    body, ended = dict(BODIES[0], max_new_tokens=60, min_new_tokens=60), threading.Event()
    with (
        started(exported_mini, tmp_path / "log", replicas=2, max_batch_rows=1) as running,
        ThreadPoolExecutor(8) as pool,
    ):
        assert len(replicas(running)) == 1

        def client() -> None:
            while not ended.is_set():
                ask(running.url + "/generate", body)

        waiting = [pool.submit(client) for _ in range(8)]
        until(2, running)
        ended.set()
        for one in waiting:
            one.result(timeout=LIMIT_S)
