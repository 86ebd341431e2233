"""A model repository of ours on the real Triton Inference Server: `make test-triton`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from bench.serving.load import ask
from bench.serving.servers import Asked, Running, together
from bench.serving.triton import triton_server, write_repository
from t5accel.api import open_backend

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ("I am tired.", "Where is my bag?", "We have two cats.", "She reads a book.", "The house is small.", "Help me.")
BODIES = [dict(text=f"translate English to French: {text}", max_new_tokens=5 + 4 * i, min_new_tokens=i)
          for i, text in enumerate(TEXTS)]  # fmt: skip


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_repository(tmp_path_factory.mktemp("triton"), "mini", threads=1)
    return write_repository(folder, "mini", precision="int8", version=2, threads=1)


@pytest.fixture(scope="module", params=[False, True], ids=["dynamic batching", "iterative sequences"])
def triton(request: pytest.FixtureRequest, repository: Path) -> Iterator[Running]:
    server = triton_server(ROOT / "build/servers/triton", repository, "mini", in_flight=request.param)
    with Running(server, repository.parent / "triton.log") as running:
        yield running


def expected(precision: str) -> list[tuple[str, int]]:
    backend, tokenizer, _ = open_backend("mini", precision=precision, progress=False)
    return [together(backend, tokenizer, [Asked(**body)])[0] for body in BODIES]


@pytest.mark.parametrize(("version", "precision"), [("/versions/1", "fp32"), ("/versions/2", "int8"), ("", "int8")])
def test_every_version_answers_as_we_do(triton: Running, version: str, precision: str) -> None:
    url = triton.url + version + triton.server.path
    with ThreadPoolExecutor(len(BODIES)) as pool:
        found = list(pool.map(lambda body: ask(url, body), BODIES))
    assert found == expected(precision) and len({text for text, _ in found}) == len(BODIES)


def test_bad_values_are_refused_with_a_sentence_and_the_next_request_is_answered(triton: Running) -> None:
    url = triton.url + triton.server.path
    with pytest.raises(HTTPError) as refused:
        ask(url, {**BODIES[0], "max_new_tokens": 0})
    assert "max_new_tokens" in refused.value.read().decode()
    assert ask(url, BODIES[1])[1] > 0


def test_requests_share_batches(triton: Running) -> None:
    """Dynamic batching runs fewer batches than requests; in flight a short one overtakes a long one."""
    url = triton.url + triton.server.path
    long, short = (dict(BODIES[1], max_new_tokens=n, min_new_tokens=n) for n in (300, 3))
    times: dict[int, float] = {}

    def timed(body: dict[str, Any]) -> None:
        assert ask(url, body)[1] == body["max_new_tokens"]
        times[body["max_new_tokens"]] = time.perf_counter()

    def executions() -> int:
        with urlopen(f"{triton.url}/versions/2/stats") as response:
            return json.load(response)["model_stats"][0]["execution_count"]

    before = executions()
    with ThreadPoolExecutor(12) as pool:
        first = pool.submit(timed, long)
        time.sleep(0.1)
        list(pool.map(timed, [short] * 8))
        first.result()
    if triton.server.streams:
        assert times[3] < times[300], "it waited for the long one"
        events = [line for line in _lines(url, {**BODIES[0], "stream": True}) if line.startswith(b"data: ")]
        assert len(events) > 3 and json.loads(events[-1][6:])["tokens"] == len(events)
    else:
        assert executions() - before < 9


def _lines(url: str, body: dict[str, Any]) -> list[bytes]:
    with urlopen(Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"}), timeout=60) as answer:
        return answer.read().splitlines()
