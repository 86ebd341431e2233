"""What of Ray's side needs no Ray: actors, who watches them, a replica and the front. `make test-ray` has the rest."""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_batch import files, upper, write_lines
from test_server import TEXT, Letters, Slow
from typer.testing import CliRunner

from t5accel.cli import app as commands
from t5accel.errors import EngineError, InputError, JobError, T5AccelError, install
from t5accel.serve import ray_batch as pool
from t5accel.serve import ray_router as fronts
from t5accel.serve import ray_router as replicas
from t5accel.serve.app import make_app
from t5accel.serve.batch.job import Job, Model, Settings, Shard, run
from t5accel.serve.batch.output import ShardRecord, ShardStats
from t5accel.serve.middleware import RequestLimits
from t5accel.serve.ray_router import Message, Replica, ReplicaLostError, Router
from t5accel.serve.settings import Settings as Served


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "open", lambda self, settings: (upper, {"sha256": self.name}))


class Actors:
    """An engine that does what `on_ray` does without Ray: job and shards travel as bytes, in any order."""

    def __init__(self, before: Callable[[int], Any] = lambda count: None, what: dict[str, str] | None = None):
        self.before, self.what, self.beats = before, what, 0

    def beat(self) -> None:
        self.beats += 1

    def __call__(self, job: Job, pending: Sequence[Shard], *_: Any) -> Iterator[ShardRecord]:
        job = pickle.loads(pickle.dumps(replace(job, output=job.output.absolute(), what=self.what or job.what)))
        actor = pool.Actor(job, self.beat)
        for count, shard in enumerate(reversed(pending)):
            self.before(count)
            (made,) = actor({"shard": [pickle.dumps(shard)]})["made"]
            if isinstance(one := pickle.loads(made), T5AccelError):
                raise one
            yield one


@pytest.mark.usefixtures("toy")
def test_an_actor_does_shards_and_hands_back_what_it_refuses(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"text": "one"}, {"text": 2}, {"text": "three"}])
    settings, actors = Settings(shard_rows=2), Actors()
    assert run(path, tmp_path / "out", settings=settings, engine=actors) == (ShardStats(2, 1, 2), ShardStats())
    assert actors.beats == 1, "not more often than once a second"
    assert run(path, tmp_path / "local", settings=settings)[0] == ShardStats(2, 1, 2)
    assert files(tmp_path / "out") == files(tmp_path / "local")
    assert run(path, tmp_path / "out", settings=settings) == (ShardStats(), ShardStats(2, 1, 2)), (
        "the local engine finds all done"
    )
    for engine, kind, sentence in (
        (Actors(lambda _: path.rename(tmp_path / "away")), JobError, "No such file"),
        (Actors(what={"sha256": "another"}), InputError, "the model is another one"),
    ):
        with pytest.raises(kind, match=sentence):
            run(path, tmp_path / "new", settings=settings, engine=engine)
        if not path.exists():
            (tmp_path / "away").rename(path)


@pytest.mark.usefixtures("toy")
def test_an_actor_makes_no_folder_again_and_lost_shards_are_missed(tmp_path: Path) -> None:
    path, out, settings = tmp_path / "in.txt", tmp_path / "out", Settings(shard_rows=1)
    path.write_text("one\ntwo\nthree\n")
    with pytest.raises(JobError, match="is not the job's folder any more"):
        run(path, out, settings=settings, engine=Actors(lambda count: count == 1 and shutil.rmtree(out)))
    assert not out.exists()
    with pytest.raises(JobError, match="lacks part-000000.jsonl: 1 shards were not done"):
        run(path, out, settings=settings, engine=lambda *given: islice(Actors()(*given), 2))
    assert run(path, out, settings=settings)[0] == ShardStats(1, 0, 1)


def test_silence_ends_a_job_and_signs_of_life_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "BEAT_S", 0.01)
    asked: list[int] = []

    def beats() -> int | None:  # a sign of life, no answer, the same sign, and so on
        asked.append(len(asked))
        return None if len(asked) % 3 == 1 else len(asked) // 3

    def slow() -> Iterator[int]:
        yield 1
        while len(asked) < 30:
            pass
        yield 2

    assert list(pool._watched(slow(), beats, 0.2)) == [1, 2]

    def stuck() -> Iterator[int]:
        yield 1
        while not ended:
            pass

    ended: list[bool] = []
    with pytest.raises(JobError, match="Nothing was heard of any actor for 0 s. What is done is kept, and the same"):
        list(pool._watched(stuck(), lambda: 7, 0.1))
    ended.append(True)

    def broken() -> Iterator[int]:
        yield 1
        raise RuntimeError("first line\nthe last one says why")

    with pytest.raises(JobError, match=r"Ray gave up \(RuntimeError: the last one says why\). What is done is kept"):
        list(pool._watched(broken(), lambda: 7, 9))


def test_without_ray_or_with_an_address_for_nothing_the_commands_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exported_mini: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    path = write_lines(tmp_path / "in.jsonl", [{"text": "one"}])
    batch, model = ["batch", str(path), str(tmp_path / "out")], ["--model", str(exported_mini)]
    for command, sentence in (
        ([*batch, *model, "--engine", "ray"], install("ray")),
        ([*batch, *model, "--engine", "ray", "--stuck-s", "0"], "--stuck-s is 0.0; give seconds above 0"),
        ([*batch, *model, "--address", "here:1"], "--address here:1 is for Ray"),
        (["serve", *model, "--engine", "ray", "--port", "0"], install("ray")),
        (["serve", *model, "--address", "here:1"], "--address here:1 is for Ray"),
        (["serve", *model, "--engine", "ray", "--replicas-min", "3"], "min is 3 and replicas, the most"),
        (["serve", *model, "--engine", "spark"], "spark"),
    ):
        result = CliRunner().invoke(commands, command)
        assert result.exit_code == 2 and sentence in result.stderr, (command, result.output)


# --- a replica and the front, with a toy between ----------------------------------------------------------------------


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replica]:
    monkeypatch.setattr(replicas, "create_app", lambda settings: make_app(Slow(), Letters(), settings))
    made = Replica(Served(unhealthy_after_s=5))
    yield made
    made.__del__()


def asked(front: Router, content: dict[str, Any], **settings: Any) -> httpx.Response:
    """As behind a socket: with the guard around the front."""

    async def ask() -> httpx.Response:
        app = RequestLimits(front, Served(**settings), front.metrics)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.post("/generate", json=content)

    return asyncio.run(ask())


def test_what_a_replica_answers_passes_the_front_unchanged(replica: Replica) -> None:
    front = Router(replica)
    answer = asked(front, {"text": "bcd", "max_new_tokens": 5})
    assert answer.status_code == 200 and answer.json()["answers"][0]["tokens"] == [5] and front.running == 0
    stream = asked(front, {"text": "bcd", "max_new_tokens": 5, "stream": True})
    events = [json.loads(line[6:]) for line in stream.text.splitlines() if line]
    assert events[-1]["tokens"] == 5
    assert "".join(one["text"] for one in events) == answer.json()["answers"][0]["texts"][0]
    assert asked(front, {"text": "bcd", "max_new_tokens": 0}).status_code == 422
    assert asked(front, {"text": "b" * 9000}, body_kb=1).status_code == 413
    front.drain(0)
    assert asked(front, {"text": "bcd"}).status_code == 503


def test_a_client_that_goes_frees_its_row_in_the_replica(replica: Replica) -> None:
    async def begin_and_go() -> None:
        body = json.dumps({"text": TEXT, "max_new_tokens": 500, "stream": True}).encode()
        headers = [(b"content-type", b"application/json")]
        messages = replica({"method": "POST", "path": "/generate", "headers": headers}, body)
        assert [(await anext(messages))["type"], (await anext(messages))["type"]] == [
            "http.response.start", "http.response.body",
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
    """A front whose replicas are lost so often, each when it has handed out so many messages."""
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


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_request_whose_replica_is_lost_is_asked_again_and_then_refused(times: int, after: int) -> None:
    front, tried = losing(times, after)
    answer = asked(front, {"text": "b"})
    assert len(tried) == min(times + 1, fronts.TRIES) and front.running == 0
    assert all(request == tried[0] for request in tried)
    if times < fronts.TRIES:
        assert answer.status_code == 200 and answer.text == "123"
    else:
        assert answer.status_code == 503 and answer.headers["Retry-After"] == "1"
        assert answer.json()["error"]["code"] == "replica_lost"


def test_an_answer_that_has_begun_is_not_begun_again() -> None:
    front, tried = losing(1, 2)
    answer = asked(front, {"text": "b"})
    assert len(tried) == 1 and answer.text.startswith("1event: error\ndata: ") and "replica_lost" in answer.text


def test_a_front_without_a_replica_is_alive_and_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody(request: Message, body: bytes) -> AsyncIterator[Message]:
        await asyncio.sleep(60)
        yield {}

    async def both() -> list[int]:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(Router(nobody)), base_url="http://localhost"
        ) as client:
            return [(await client.get(path)).status_code for path in ("/health/live", "/health/ready", "/metrics")]

    monkeypatch.setattr(fronts, "READY_S", 0.1)
    assert asyncio.run(both()) == [200, 503, 200]
