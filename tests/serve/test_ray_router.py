"""Actors, replicas and the router without Ray; `make test-ray` has the rest."""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_batch import files, write_lines
from test_batch import toy as toy  # a fixture
from test_server import TEXT, Letters, Slow
from typer.testing import CliRunner

from t5accel.cli import app as commands
from t5accel.errors import EngineError, InputError, JobError, T5AccelError, install
from t5accel.serve import ray_batch, ray_router
from t5accel.serve.app import make_app
from t5accel.serve.batch.job import Job, JobSettings, Shard, run
from t5accel.serve.batch.output import ShardRecord, ShardStats
from t5accel.serve.middleware import RequestLimits
from t5accel.serve.ray_router import ROUTES, Message, Replica, ReplicaLostError, Router
from t5accel.serve.settings import Settings as Served


class Actors:
    """`on_ray` without Ray: job and shards are pickled, in reverse order."""

    def __init__(self, before: Callable[[int], Any] = lambda count: None, what: dict[str, str] | None = None):
        self.before, self.what, self.beats = before, what, 0

    def beat(self) -> None:
        self.beats += 1

    def __call__(self, job: Job, pending: Sequence[Shard], *_: Any) -> Iterator[ShardRecord]:
        job = pickle.loads(pickle.dumps(replace(job, what=self.what or job.what)))
        actor = ray_batch.Actor(job, self.beat)
        for count, shard in enumerate(reversed(pending)):
            self.before(count)
            (made,) = actor({"shard": [pickle.dumps(shard)]})["made"]
            if isinstance(one := pickle.loads(made), T5AccelError):
                raise one
            yield one


@pytest.mark.usefixtures("toy")
def test_an_actor_answers_shards_and_returns_errors(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"text": "one"}, {"text": 2}, {"text": "three"}])
    settings, actors = JobSettings(shard_rows=2), Actors()
    assert run(path, tmp_path / "out", settings=settings, engine=actors) == (ShardStats(2, 1, 2), ShardStats())
    assert actors.beats == 1, "not more often than once a second"
    assert run(path, tmp_path / "local", settings=settings)[0] == ShardStats(2, 1, 2)
    assert files(tmp_path / "out") == files(tmp_path / "local")
    assert run(path, tmp_path / "out", settings=settings) == (ShardStats(), ShardStats(2, 1, 2)), "all is done"
    for engine, kind, sentence in (
        (Actors(lambda _: path.rename(tmp_path / "away")), JobError, "No such file"),
        (Actors(what={"sha256": "another"}), InputError, "model of an actor must be"),
    ):
        with pytest.raises(kind, match=sentence):
            run(path, tmp_path / "new", settings=settings, engine=engine)
        if not path.exists():
            (tmp_path / "away").rename(path)


@pytest.mark.usefixtures("toy")
def test_removed_folders_and_lost_shards_end_the_job(tmp_path: Path) -> None:
    path, out, settings = tmp_path / "in.txt", tmp_path / "out", JobSettings(shard_rows=1)
    path.write_text("one\ntwo\nthree\n")
    with pytest.raises(JobError, match="is not the job's folder any more"):
        run(path, out, settings=settings, engine=Actors(lambda count: count == 1 and shutil.rmtree(out)))
    assert not out.exists()
    with pytest.raises(JobError, match="lacks part-000000.jsonl: 1 shards were not done"):
        run(path, out, settings=settings, engine=lambda *given: islice(Actors()(*given), 2))
    assert run(path, out, settings=settings)[0] == ShardStats(1, 0, 1)


def test_missing_heartbeats_end_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_batch, "BEAT_S", 0.01)
    asked: list[int] = []

    def beats() -> int | None:  # a sign of life, no answer, the same sign, and so on
        asked.append(len(asked))
        return None if len(asked) % 3 == 1 else len(asked) // 3

    def rows(goes_on: Callable[[], bool], error: Exception | None = None) -> Iterator[int]:
        yield 1
        while goes_on():
            time.sleep(0.001)
        if error:
            raise error
        yield 2

    assert list(ray_batch._watched(rows(lambda: len(asked) < 30), beats, 0.2)) == [1, 2]
    ended: list[bool] = []
    with pytest.raises(JobError, match="Nothing was heard of any actor for 0 s. What is done is kept, and the same"):
        list(ray_batch._watched(rows(lambda: not ended), lambda: 7, 0.1))
    ended.append(True)
    broken = rows(lambda: False, RuntimeError("first line\nthe last one says why"))
    with pytest.raises(JobError, match=r"Ray gave up \(RuntimeError: the last one says why\). What is done is kept"):
        list(ray_batch._watched(broken, lambda: 7, 9))


def test_without_ray_or_with_an_address_for_nothing_the_commands_say_so(tmp_path, monkeypatch, exported_mini) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    path = write_lines(tmp_path / "in.jsonl", [{"text": "one"}])
    batch, model = ["batch", str(path), str(tmp_path / "out")], ["--model", str(exported_mini)]
    for command, sentence in (
        ([*batch, *model, "--engine", "ray"], install("ray")),
        ([*batch, *model, "--engine", "ray", "--unhealthy-after-s", "0"], "-after-s must be seconds above 0"),
        ([*batch, *model, "--engine", "ray", "--unhealthy-after-s", "nan"], "-after-s must be seconds above 0"),
        ([*batch, *model, "--address", "here:1"], "--address must be unset with engine local"),
        ([*batch, *model, "--unhealthy-after-s", "5"], "--unhealthy-after-s must be unset with engine local"),
        (["serve", *model, "--engine", "ray", "--port", "0"], install("ray")),
        (["serve", *model, "--address", "here:1"], "--address must be unset with engine local"),
        (["serve", *model, "--engine", "ray", "--replicas-min", "3"], "must be at most replicas, 2, got 3"),
        (["serve", *model, "--engine", "spark"], "spark"),
    ):
        result = CliRunner().invoke(commands, command)
        assert result.exit_code == 2 and sentence in result.stderr, (command, result.output)


# --- a replica and the front, with a toy between ----------------------------------------------------------------------


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replica]:
    monkeypatch.setattr(ray_router, "create_app", lambda settings: make_app(Slow(), Letters(), settings))
    made = Replica(Served(unhealthy_after_s=5))
    yield made
    made.__del__()


def asked(front: Router, content: dict[str, Any], **settings: Any) -> httpx.Response:
    """Ask the router behind its middleware."""

    async def ask() -> httpx.Response:
        app = RequestLimits(front, Served(**settings), front.metrics)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.post("/generate", json=content)

    return asyncio.run(ask())


def test_the_router_passes_responses_unchanged(replica: Replica) -> None:
    front = Router(replica)
    answer = asked(front, {"text": "bcd", "max_new_tokens": 5})
    assert answer.status_code == 200 and answer.json()["answers"][0]["tokens"] == [5] and front.running == 0
    stream = asked(front, {"text": "bcd", "max_new_tokens": 5, "stream": True})
    events = [json.loads(line[6:]) for line in stream.text.splitlines() if line]
    assert events[-1]["tokens"] == 5
    assert "".join(one["text"] for one in events) == answer.json()["answers"][0]["texts"][0]
    assert asked(front, {"text": "bcd", "max_new_tokens": 0}).status_code == 422
    assert asked(front, {"text": "b" * 9000}, body_kb=1).status_code == 413
    assert b'{route="/generate",status="200"} 2.0' in front.metrics.text(), "replicas alone have the other metrics"
    assert ROUTES == {route.path for route in replica._app.routes if "{" not in route.path}
    front.drain(0)
    assert asked(front, {"text": "bcd"}).status_code == 503


def test_a_front_and_its_replicas_accept_the_same_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Served(allowed_hosts="a.example")
    monkeypatch.setattr(ray_router, "create_app", lambda settings: make_app(Slow(), Letters(), settings))
    replica = Replica(settings)
    app = RequestLimits(front := Router(replica), settings, front.metrics)

    async def ask() -> int:  # the socket's own address is the host's of an application under test
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://10.0.0.5") as client:
            return (await client.post("/generate", json={"text": "b", "max_new_tokens": 2})).status_code

    assert asyncio.run(ask()) == 200
    replica.__del__()


def test_the_deadline_holds_until_a_replica_has_the_request_and_the_grace_period_to_the_end() -> None:
    async def answer(request: Message, body: bytes) -> AsyncIterator[Message]:
        if b"lost" not in body:
            yield ray_router.TAKEN
        if b"stream" in body:
            yield {"type": "http.response.start", "status": 200, "headers": []}
            yield {"type": "http.response.body", "body": b"1", "more_body": True}
        await asyncio.sleep(60)
        yield {}

    async def ask() -> list[httpx.Response]:
        app = RequestLimits(front := Router(answer, deadline_s=0.1), Served(), front.metrics)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            work = [asyncio.create_task(client.post("/generate", json={"text": one})) for one in ("lost", "", "stream")]
            late = await work[0]
            await asyncio.sleep(0.2)
            assert not (work[1].done() or work[2].done())
            front.drain(0.1)
            return [late, *await asyncio.gather(*work[1:])]

    late, ended, stream = asyncio.run(ask())
    assert late.status_code == 504 and "No replica has taken" in late.text
    assert ended.status_code == 503 and "shut down" in ended.text
    assert stream.text.startswith("1event: error\ndata: ") and "shut down" in stream.text


def test_a_disconnect_frees_the_row_in_the_replica(replica: Replica) -> None:
    async def begin_and_go() -> None:
        body = json.dumps({"text": TEXT, "max_new_tokens": 500, "stream": True}).encode()
        headers = [(b"content-type", b"application/json")]
        messages = replica({"method": "POST", "path": "/generate", "headers": headers}, body)
        assert [(await anext(messages))["type"] for _ in range(3)] == [
            "taken", "http.response.start", "http.response.body",
        ]  # fmt: skip
        scheduler = replica._service.scheduler
        assert scheduler.running == 1
        await messages.aclose()
        while scheduler.running:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(begin_and_go(), 20))


def test_a_replica_whose_engine_has_ended_is_not_healthy(replica: Replica) -> None:
    replica.check_health()
    replica._service.scheduler.close()
    with pytest.raises(EngineError, match="The engine's thread has ended"):
        replica.check_health()


def losing(times: int, after: int) -> tuple[Router, list[Message]]:
    """A router whose first replicas are lost after some messages."""
    tried: list[Message] = []

    async def answer(request: Message, body: bytes) -> AsyncIterator[Message]:
        tried.append(request)
        messages: list[Message] = [{"type": "http.response.start", "status": 200, "headers": []}]
        messages += [
            {"type": "http.response.body", "body": part, "more_body": part != b"3"} for part in (b"1", b"2", b"3")
        ]
        for count, message in enumerate(messages):
            if count == after and len(tried) <= times:
                raise ReplicaLostError("ActorDiedError")
            yield message

    return Router(answer), tried


@pytest.mark.parametrize(("times", "after"), [(2, 0), (2, 1), (3, 1)])
def test_lost_requests_are_retried_and_then_refused(times: int, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_router, "PAUSE_S", 0.001)
    front, tried = losing(times, after)
    answer = asked(front, {"text": "b"})
    assert len(tried) == min(times + 1, ray_router.TRIES) and front.running == 0
    assert all(request == tried[0] for request in tried)
    if times < ray_router.TRIES:
        assert answer.status_code == 200 and answer.text == "123"
    else:
        assert answer.status_code == 503 and answer.headers["Retry-After"] == "1"
        assert answer.json()["error"]["code"] == "replica_lost"


def test_a_started_stream_is_not_retried() -> None:
    front, tried = losing(1, 2)
    answer = asked(front, {"text": "b"})
    assert len(tried) == 1 and answer.text.startswith("1event: error\ndata: ") and "replica_lost" in answer.text


def test_a_router_without_replicas_is_alive_and_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody(request: Message, body: bytes) -> AsyncIterator[Message]:
        await asyncio.sleep(60)
        yield {}

    async def all_three() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(Router(nobody)), base_url="http://front") as client:
            return [(await client.get(path)).status_code for path in ("/health/live", "/health/ready", "/metrics")]

    monkeypatch.setattr(ray_router, "READY_S", 0.1)
    assert asyncio.run(all_three()) == [200, 503, 200]
