"""The load generator: an open loop tells of a stall what a closed one hides."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import uvicorn
from test_bench_commands import call, refused

from bench.serving.load import Load, Outcome, ask, offer
from t5accel.errors import InputError

BODY = {"text": "a"}
ANSWER = b'{"answers": [{"texts": ["a"], "tokens": [3]}, {"texts": ["b", "c"], "tokens": [1, 1]}]}'
EVENTS = b'data: {"text": "a"}\n\ndata: {"text": "b", "tokens": 2}\n\n'


class Stalling:
    """An ASGI application that answers at once, but for one second in which it stands still."""

    def __init__(self) -> None:
        self.stalls_at = float("inf")
        self.status = 200
        self.seen: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            body = (await receive())["body"]
            self.seen.append(json.loads(body)["text"])
            if time.perf_counter() > self.stalls_at:
                self.stalls_at = float("inf")
                time.sleep(1)  # of the whole server
            streams = b"true" in body
            kind = [(b"content-type", b"text/event-stream" if streams else b"application/json")]
            await send({"type": "http.response.start", "status": self.status, "headers": kind})
            await send({"type": "http.response.body", "body": EVENTS if streams else ANSWER})


@pytest.fixture(scope="module")
def stalling() -> Iterator[tuple[str, Stalling]]:
    app = Stalling()
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:  # of TCP, or asyncio delays
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="critical", ws="none"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", app
        server.should_exit = True
        thread.join()


def test_the_closed_loop_hides_what_the_open_one_shows(stalling) -> None:
    url, app = stalling
    found = []
    for kind in (dict(rate_per_s=60.0), dict(clients=2)):
        app.stalls_at = time.perf_counter() + 0.3
        found.append(asyncio.run(offer(Load(url, [BODY], seconds=1.6, **kind))))
    opened, closed = found
    slow = [sum(latency > 0.1 for latency in outcome.latency_s) for outcome in found]
    assert slow[0] > 30 and slow[1] < slow[0] / 4, "sixty would have come in that second; two clients waited"
    assert opened.percentile_s(60) > 2 * closed.percentile_s(60)
    assert opened.statuses[200] == len(opened.latency_s) and opened.tokens == 5 * len(opened.latency_s)
    assert 0 < opened.goodput_per_s(0.1) < len(opened.latency_s) / opened.wall_s and 0 < opened.generator_cpu
    assert "tokens/s" in str(opened) and "x 200" in str(opened)


def test_streams_tell_when_they_began(stalling) -> None:
    outcome = asyncio.run(offer(Load(stalling[0], [{**BODY, "stream": True}], rate_per_s=40.0, seconds=0.5)))
    assert len(outcome.first_s) == len(outcome.latency_s) > 5 and outcome.tokens == 2 * len(outcome.latency_s)
    url = f"{stalling[0]}/generate"
    assert ask(url, BODY) == ("a b c", 5) and ask(url, {**BODY, "stream": True}) == ("ab", 2)


def test_refusals_are_no_answers(stalling) -> None:
    url, app = stalling
    app.status = 429
    outcome = asyncio.run(offer(Load(url, [BODY], rate_per_s=40.0, seconds=0.3)))
    app.status = 200
    assert outcome.statuses.keys() == {429} and not outcome.latency_s and np.isnan(outcome.percentile_s(99))


def test_percentiles_are_exact_and_may_be_of_some_requests(stalling) -> None:
    outcome = asyncio.run(offer(Load(stalling[0], [BODY, {"text": "b"}], rate_per_s=60.0, seconds=0.5)))
    assert {*outcome.asked} == {0, 1} and len(outcome.asked) == len(outcome.latency_s)
    assert max(outcome.percentile_s(100, among={number}) for number in (0, 1)) == max(outcome.latency_s)
    assert np.isnan(outcome.percentile_s(50, among={7}))
    assert Outcome(latency_s=[i / 100 for i in range(101)]).percentile_s(99) == pytest.approx(0.99)


def test_equal_loads_are_equal(stalling) -> None:
    url, app = stalling
    bodies = [{"text": letter} for letter in "abcdef"]
    seen = []
    for _ in range(2):
        app.seen = []
        asyncio.run(offer(Load(url, bodies, rate_per_s=50.0, seconds=0.5, seed=3)))
        seen.append(sorted(app.seen))
    assert seen[0] == seen[1] and len(set(seen[0])) > 3
    gaps = np.diff(Load(url, [BODY], rate_per_s=100.0, seconds=100.0).moments())
    assert gaps.mean() == pytest.approx(0.01, rel=0.05) and gaps.std() == pytest.approx(0.01, rel=0.05)


def test_the_command(stalling) -> None:
    result = call("load", stalling[0], "--rate", 30, "--seconds", 0.3, "--stream")
    assert result.exit_code == 0 and "x 200" in result.stdout
    assert "of a server on this machine" in refused("load", "http://example.org", "--rate", 1)


@pytest.mark.parametrize("options", [
    dict(), dict(rate_per_s=1.0, clients=1), dict(rate_per_s=-1.0), dict(clients=0), dict(rate_per_s=1e9),
    dict(rate_per_s=1.0, seconds=float("inf")), dict(rate_per_s=1.0, requests=[]),
    dict(rate_per_s=1.0, url="http://10.0.0.1:80"), dict(rate_per_s=1.0, url=5)], ids=str)  # fmt: skip
def test_no_load(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Load(**{"url": "http://127.0.0.1:1", "requests": [BODY], **options})
