"""The server: responses, limits with their statuses, hostile clients, and shutdown.

Most tests ask the application directly, around a toy. Sockets and signals need a server process, which serves the
bundled model in int8.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from test_scheduler import Joining
from typer.testing import CliRunner

import t5accel.serve.server
from bench.serving.fuzz import KINDS, fuzz_server, fuzz_under_load, head, malformed_request, request, send
from t5accel.cli import app as commands
from t5accel.decoding.sampling import SamplingParams, sample
from t5accel.decoding.token_constraints import TokenConstraints
from t5accel.errors import InputError
from t5accel.models.load import data_folder
from t5accel.serve import monitoring, schemas
from t5accel.serve.app import make_app
from t5accel.serve.middleware import HEALTH
from t5accel.serve.settings import Settings
from t5accel.tokenization import tokenizer_of

ROOT = Path(__file__).resolve().parents[2]
TEXT = "translate English to French: I am tired."


class Letters:
    """A toy tokenizer of `ToyBackend`'s vocabulary: a space and b to j are its tokens."""

    def __call__(self, texts: list[str], **_: Any) -> dict[str, np.ndarray]:
        rows = [[2 + ord(letter) % 10 for letter in text] or [2] for text in texts]
        mask = np.arange(max(map(len, rows))) < np.array([len(row) for row in rows])[:, None]
        ids = np.zeros(mask.shape, dtype=np.int64)
        ids[mask] = np.concatenate(rows)
        return {"input_ids": ids, "attention_mask": mask.astype(np.int64)}

    def batch_decode(self, rows: Any, skip_special_tokens: bool) -> list[str]:
        return ["".join(" bcdefghij"[token - 2] for token in row if token > 1) for row in rows]


class Slow(Joining):
    """A backend with slow steps and without end tokens."""

    def __init__(self, step_s: float = 0.002):
        super().__init__(ends=0)
        self.step_s = step_s

    def step(self, *arguments: Any) -> np.ndarray:
        time.sleep(self.step_s)
        return super().step(*arguments)


@asynccontextmanager
async def client_of(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application without sockets."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    async with app.router.lifespan_context(app):
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            yield client


@asynccontextmanager
async def served(backend: Any = None, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """A client of the application around a toy, and its scheduler."""
    app = make_app(backend or Joining(), Letters(), Settings(**settings))
    async with client_of(app) as client:
        yield client, app.state.service.scheduler


def asked(
    path: str = "/generate",
    *,
    backend: Any = None,
    headers: Any = (),
    content: Any = None,
    settings: Any = (),
    **fields,
) -> httpx.Response:
    """One response of a fresh application."""

    async def ask() -> httpx.Response:
        async with served(backend, **dict(settings)) as (client, _):
            body = json.dumps(fields) if content is None else content
            return await client.post(path, content=body, headers={"content-type": "application/json", **dict(headers)})

    return asyncio.run(ask())


def got(*paths: str, **options: Any) -> list[httpx.Response]:
    """The responses of a fresh application to several GET requests."""

    async def ask() -> list[httpx.Response]:
        async with served() as (client, _):
            return [await client.get(path, **options) for path in paths]

    return asyncio.run(ask())


def error_of(response: httpx.Response) -> dict[str, Any]:
    (error,) = response.json().values()
    assert error.keys() == {"message", "type", "param", "code"} and len(error["message"]) > 10
    return error


# Answers


def test_an_answer_for_each_text_with_its_times() -> None:
    found = asked(text=["hello", "bye"], max_new_tokens=9, num_beams=3, num_return_sequences=2)
    assert found.status_code == 200
    first, second = found.json()["answers"]
    assert len(first["texts"]) == len(second["scores"]) == 2 and first["source_tokens"] == 5
    assert first["scores"][0] >= first["scores"][1] and max(first["tokens"]) <= 9
    assert 0 <= first["timings"]["queue_s"] <= first["timings"]["first_token_s"] <= first["timings"]["total_s"]


@pytest.mark.parametrize(("path", "usual"), [("/generate", 64), ("/v1/completions", 16)])
def test_a_length_that_is_not_named_is_what_is_allowed(path: str, usual: int) -> None:
    fields = dict(text="hi") if usual == 64 else dict(prompt="hi", model="mini")
    short = Slow(0)
    short.positions = 7
    for backend, settings, tokens in ((Slow(0), {}, usual), (Slow(0), dict(max_new_tokens=9), 9), (short, {}, 7)):
        found = asked(path, **fields, backend=backend, settings=settings).json()
        assert tokens == (found["answers"][0]["tokens"][0] if usual == 64 else found["usage"]["completion_tokens"])


def test_fewer_beams_than_asked_for_have_no_score() -> None:
    backend = Joining()
    backend.rules = TokenConstraints(forced_eos_token_id=1)
    found = asked(text="a", max_new_tokens=1, num_beams=3, num_return_sequences=2, backend=backend)
    answer = found.json()["answers"][0]
    assert (answer["scores"], answer["tokens"], answer["ended"]) == ([0.0, None], [1, 0], [True, False])


def test_a_seed_repeats_samples() -> None:
    options = dict(text="hello", do_sample=True, temperature=2.0, num_return_sequences=3, max_new_tokens=20)
    first = asked(**options).json()
    again = asked(**options, seed=first["seed"]).json()
    assert first["answers"][0]["texts"] == again["answers"][0]["texts"] and len(set(again["answers"][0]["texts"])) > 1


def test_equal_texts_of_one_request_draw_their_own_tokens_as_in_sample() -> None:
    options = dict(do_sample=True, temperature=2.0, seed=5, num_return_sequences=2, max_new_tokens=20)
    answers = asked(text=["hello"] * 3, **options).json()["answers"]
    assert len({text for answer in answers for text in answer["texts"]}) == 6
    assert answers[0]["texts"] == asked(text="hello", **options).json()["answers"][0]["texts"]
    ids = Letters()(["hello"] * 3)
    found = sample(Joining(), **ids, sampling=SamplingParams(2.0), seed=5, num_return_sequences=2, max_new_tokens=20)
    assert [text for answer in answers for text in answer["texts"]] == Letters().batch_decode(found.sequences, True)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize(("path", "fields"), [
    ("/generate", dict(text="hi", max_new_tokens=500)),
    ("/v1/completions", dict(prompt="hi", model="mini", max_tokens=500)),
])  # fmt: skip
def test_an_error_in_a_stream_is_its_last_event(path: str, fields: dict[str, Any]) -> None:
    response = asked(path, stream=True, deadline_s=0.4, backend=Slow(0.01), **fields)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    assert "event: error" in response.text and "within its 0.4 s" in events_of(response)[-1]["error"]["message"]


def test_an_event_is_one_line_for_every_client(monkeypatch) -> None:
    lines = "a\u2028b\u2029c\x85d"
    monkeypatch.setattr(Letters, "batch_decode", lambda self, rows, skip_special_tokens: [lines] * len(rows))
    response = asked(text="hi", stream=True, max_new_tokens=3)
    assert "".join(event["text"] for event in events_of(response)) == lines


def test_the_page_of_the_interface_knows_the_fields() -> None:
    schema, page = got("/openapi.json", "/docs")
    body = schema.json()["paths"]["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"text", "num_beams", "stream", "priority", "deadline_s"} <= body["properties"].keys()
    assert page.status_code == 200 and all(f"<td>{name}</td>" in page.text for name in body["properties"])
    assert "/v1/completions" in page.text and not re.search("://|<script|<link|<img|src=|url\\(", page.text)
    assert page.headers["content-security-policy"].startswith("default-src 'none'")


def test_the_description_has_each_route_and_all_its_references_lead_somewhere() -> None:
    schema, about, health, missing = got("/openapi.json", "/", "/health", "/v1/chat/completions")
    description = schema.json()
    for path, methods in description["paths"].items():
        for responses in (operation["responses"] for operation in methods.values()):
            (kind, *_) = responses["200"]["content"].values()
            assert kind["schema"] and (path in HEALTH or "ErrorResponse" in str(responses["401"])), path
    for pointer in re.findall(r'"\$ref": "#/([^"]+)"', schema.text.replace(":", ": ")):
        found = description
        for name in pointer.split("/"):
            found = found[name]
        assert found["properties"]
    assert description["info"]["version"] == about.json()["version"] == t5accel.__version__
    assert health.json()["ready"] is True
    assert missing.status_code == 404 and "POST /v1/completions" in error_of(missing)["message"]


@pytest.mark.parametrize(("path", "body", "shape", "event"), [
    ("/generate", dict(text="hello", do_sample=True), schemas.GenerateResponse, schemas.GenerateEvent),
    ("/v1/completions", dict(prompt=["a", "b"], model="mini"), *[schemas.CompletionResponse] * 2),
])  # fmt: skip
def test_responses_are_as_they_are_described(path: str, body: dict[str, Any], shape: Any, event: Any) -> None:
    found, refused = asked(path, **body).json(), asked(path, **body, nothing=1).json()
    assert shape.model_validate(found).model_dump() == found
    assert schemas.ErrorResponse.model_validate(refused).model_dump() == refused
    for one in asked(path, **body, stream=True).text.split("\n\n")[:-1]:
        if one != "data: [DONE]":
            given = json.loads(one.removeprefix("data: "))
            assert event.model_validate(given).model_dump(exclude_unset=True) == given


# What OpenAI's clients send

NEUTRAL = dict(temperature=0, top_p=1, frequency_penalty=0, presence_penalty=0, n=1, best_of=1, logit_bias={},
               seed=None, stop=None, logprobs=None, echo=False, suffix="", user="somebody", stream=False,
               stream_options=None)  # fmt: skip


@pytest.mark.parametrize("neutral", [
    NEUTRAL, dict(stop=[]), dict.fromkeys({**NEUTRAL, "max_tokens": 0}),
    dict(frequency_penalty=0.0, n=2, best_of=2, temperature=1.0, seed=3),
], ids=str)  # fmt: skip
def test_openai_options_without_effect_are_accepted(neutral: dict[str, Any]) -> None:
    given = dict(model="mini", prompt="hello")
    plain = {name: neutral[name] for name in ("n", "temperature", "seed") if neutral.get(name)}
    found, expected = (asked("/v1/completions", **given, **more) for more in (neutral, plain))
    assert found.status_code == 200 and found.json()["choices"] == expected.json()["choices"]


@pytest.mark.parametrize(("fields", "match"), [
    (dict(prompt="a", frequency_penalty=0.5), "frequency_penalty must be 0 or null, got 0.5"),
    (dict(prompt="a", echo=True), "echo must be false or null, got true"),
    (dict(prompt="a", logprobs=0), "logprobs must be null, got 0"),
    (dict(prompt="a", logit_bias={str(i): "x" for i in range(50_000)}), "logit_bias must be {} or null"),
    (dict(prompt="a", suffix="end"), 'suffix must be "" or null'),
    (dict(prompt="a", best_of=2), "best_of must be n, 1, or null, got 2"),
    (dict(prompt="a", top_p=0.5), "top_p and n need a temperature"),
    (dict(prompt=[[5, 6], [7]]), "prompt must be a text .* Token ids are not supported"),
    (dict(prompt="a", stop=""), "stop must be up to 4 texts"),
    (dict(prompt="a", stop=["a"] * 5), "stop must be up to 4 texts"),
    (dict(prompt="a", stop=["a" * 300]), "stop must be up to 4 texts of 1 to 256"), (dict(), "prompt"),
    (dict(prompt=[]), "1 to 64 texts, got 0"), (dict(prompt="a" * 99), "20 tokens, got 99"),
    (dict(prompt="a", max_tokens=0), "^max_tokens must be .* at least 1, got 0"),
    (dict(prompt="a", max_tokens="4"), "max_tokens"),
    (dict(prompt="a", temperature=-1.0), "temperature"), (dict(prompt="a", stream_options={}), "stream_options"),
    (dict(prompt=5), "^prompt: .* valid string; or .* valid array"), (dict(prompt=[]), "^prompt must hold"),
    (dict(prompt="a", n=2, temperature=1.0, stream=True), "^n must be 1 with stream"),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_openai_s_clients_are_refused_by_name_and_with_openai_s_status(fields: dict[str, Any], match: str) -> None:
    response = asked("/v1/completions", model="mini", **fields, settings=dict(max_source_tokens=20))
    error = error_of(response)
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] in {*schemas.Completion.model_fields, None} and "text must" not in error["message"]
    assert re.search(match, error["message"])


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_stream_of_several_texts_says_which_one_each_piece_is_of(path: str) -> None:
    texts, is_openai = ["hello", "bye", "hi"], path != "/generate"
    fields, more = dict(text=texts, max_new_tokens=60), {}
    if is_openai:
        fields, more = dict(prompt=texts, model="mini", max_tokens=60), dict(stream_options={"include_usage": True})
    streamed = asked(path, **fields, **more, stream=True, backend=Slow())
    joined, ends = ["", "", ""], [0, 0, 0]
    blocks = [block.removeprefix("data: ") for block in streamed.text.split("\n\n")[:-1]]
    if is_openai:
        assert blocks.pop() == "[DONE]"
        assert json.loads(blocks.pop())["usage"]["completion_tokens"] == 180
    for event in map(json.loads, blocks):
        one = event["choices"][0] if is_openai else event
        joined[one["index"]] += one["text"]
        ends[one["index"]] += bool(one["finish_reason"] if is_openai else "tokens" in one)
    found = asked(path, **fields, backend=Slow()).json()
    expected = [one["text"] for one in found["choices"]] if is_openai else [one["texts"][0] for one in found["answers"]]
    assert joined == expected and ends == [1, 1, 1] and len(blocks) > 6


@pytest.mark.parametrize("drawn", [{}, dict(do_sample=True, seed=4, min_new_tokens=60)], ids=["greedy", "drawn"])
def test_an_answer_ends_before_a_stop_text_and_nothing_more_is_computed(drawn: dict[str, Any]) -> None:
    fields = dict(text="hello", max_new_tokens=60, **drawn)
    (whole,) = asked(**fields, backend=Slow(0)).json()["answers"][0]["texts"]
    for place in (1, 40):
        stop = whole[place : place + 4]
        answer = asked(**fields, backend=Slow(0), stop=["never", stop]).json()["answers"][0]
        at = whole.find(stop)
        assert answer["texts"] == [whole[:at]] and answer["ended"] == [True]
        assert answer["tokens"] == [at + len(stop)], "it ends with the token that completes the text"
        events = events_of(asked(**fields, backend=Slow(0.0005), stop=stop, stream=True))
        assert "".join(event["text"] for event in events) == whole[:at] and events[-1]["ended"]
    for stream in (False, True):
        unmet = asked(**fields, backend=Slow(0), stop="never", stream=stream)
        texts = unmet.json()["answers"][0]["texts"] if not stream else [event["text"] for event in events_of(unmet)]
        assert "".join(texts) == whole


# Refusals


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[" * 100_000, b"null", b'{"text": "\xff"}', b'{"text": "\\ud800"}',
                b'{"text": "a", "length_penalty": NaN}', b'{"text": "a", "seed": ' + b"9" * 5000 + b"}",
                b'{"text":' + b'{"a":' * 5000 + b"1"])  # fmt: skip
def test_malformed_bodies(content: bytes) -> None:
    response = asked(content=content)
    assert response.status_code == 422 and error_of(response)["type"] == "invalid_request_error"


def test_a_body_that_is_too_large() -> None:
    for headers in ({}, {"content-length": "5"}):  # as it says, and as it comes
        response = asked(content=b" " * 3000, headers=headers, settings=dict(body_kb=1))
        assert response.status_code == 413 and "1024 bytes" in error_of(response)["message"]


def test_a_deadline_that_passes() -> None:
    response = asked(text="a", max_new_tokens=500, deadline_s=0.2, backend=Slow(0.02))
    assert response.status_code == 504 and "within its 0.2 s" in error_of(response)["message"]
    default = asked(text="a", max_new_tokens=500, backend=Slow(0.02), settings=dict(deadline_s=0.1))
    assert default.status_code == 504


def test_a_deadline_and_the_times_begin_before_the_tokenizer(monkeypatch) -> None:
    usual = Letters.__call__
    monkeypatch.setattr(Letters, "__call__", lambda *given, **options: time.sleep(0.1) or usual(*given, **options))
    assert asked(text=["a", "b"], max_new_tokens=1).json()["answers"][0]["timings"]["total_s"] > 0.2
    assert asked(text=["a", "b"], max_new_tokens=1, deadline_s=0.15).status_code == 504


def test_a_long_prefix_is_not_copied_for_each_text() -> None:
    # Four bytes a character, 64 texts: 256 MB.
    fields = dict(text=["a"] * 64, prefix="x" * 1_000_000 + "\U0001f600", max_new_tokens=1)
    asked(text="a", max_new_tokens=1)
    tracemalloc.start()
    for truncate, status in ((True, 200), (False, 413)):
        assert asked(truncate=truncate, content=json.dumps(fields | {"truncate": truncate})).status_code == status
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 64e6


def test_an_engine_that_hangs_is_not_alive() -> None:
    async def ask() -> set[int]:
        async with served(Slow(0.6), unhealthy_after_s=0.1) as (client, _):
            statuses = set()
            working = asyncio.create_task(client.post("/generate", json=dict(text="a", max_new_tokens=1)))
            while not working.done():
                statuses.add((await client.get("/health/live")).status_code)
                await asyncio.sleep(0.02)
            assert (await client.get("/health/live")).status_code == 200
            return statuses

    assert asyncio.run(ask()) == {200, 503}


@pytest.mark.parametrize("key", ["", "geheim", "Bearer geheim", "bearer geheim", "Bearer geheimé", "Basic geheim"])
def test_the_key(key: str, monkeypatch) -> None:
    monkeypatch.setenv("T5ACCEL_API_KEY", "geheim")
    paths = ["/metrics", "/v1/models", "/openapi.json", "/nothing", "/docs", "/health/ready"]
    statuses = [response.status_code for response in got(*paths, headers={b"authorization": key.encode()})]
    is_right = key.lower() == "bearer geheim"
    assert statuses == ([200, 200, 200, 404, 200, 200] if is_right else [401, 401, 401, 401, 200, 200])


def test_texts_are_logged_on_request_and_probes_for_debugging_alone(caplog) -> None:
    caplog.set_level("INFO", "t5accel")
    got(*HEALTH, "/metrics", "/v1/models")
    assert [line[:18] for line in caplog.messages if line.startswith("GET")] == ["GET /v1/models 200"]
    for logger in (None, "t5accel"):
        caplog.set_level("DEBUG", logger)
    got("/metrics", "/health/live")
    asked(text="hello there")
    for line in ("GET /metrics 200", "GET /health/live 200", "POST /generate 200"):
        assert any(message.startswith(line) for message in caplog.messages)
    assert "hello" not in caplog.text
    assert asked(text="hello there", seed=1).status_code == 422
    assert (monitoring.open_log.name, "POST /generate 422") in [(one.name, one.message[:18]) for one in caplog.records]
    for stream in (False, True):
        caplog.clear()
        found = asked(text="hello there", stream=stream, settings=dict(log_texts=True))
        text = "".join(one["text"] for one in events_of(found)) if stream else found.json()["answers"][0]["texts"][0]
        assert "hello there" in caplog.text and f"answers: {json.dumps([text])}" in caplog.text


def test_a_line_of_the_log_is_a_text_or_an_object(monkeypatch, capsys) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monitoring.configure("info", "text")
    logging.getLogger("one").info("here")
    assert re.fullmatch(r"[\d-]+ [\d:,]+ INFO one here\n", capsys.readouterr().err)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    settings = Settings(log_level="WARNING", log_format="JSON")
    monitoring.configure(settings.log_level, settings.log_format)
    logging.getLogger("a").warning("one\n%s", "two")
    logging.getLogger("uvicorn.error").info("not written")
    thread = threading.Thread(target=int, args=("of two\nlines",))  # raises
    thread.start()
    thread.join()
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["level"], first["logger"], first["message"]) == ("warning", "a", "one\ntwo")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert second["level"] == "critical" and "ValueError" in second["exception"]


class Panic(BaseException):
    """A panic of a Rust tokenizer is no ``Exception``."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["tokenizer", "encoder", "step", "decoder", "decoder, asked for stop texts"])
def test_an_error_of_one_text_is_one_response(where: str, stream: bool, monkeypatch, caplog) -> None:
    failing = [1]

    def failing_at(owner: type, name: str, here: str) -> None:
        usual = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if failing and where.startswith(here):
                raise Panic("the secret text")
            return usual(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    failing_at(Letters, "__call__", "tokenizer")
    failing_at(Letters, "batch_decode", "decoder")
    failing_at(Joining, "encode", "encoder")
    failing_at(Joining, "step", "step")

    async def ask() -> list[httpx.Response]:
        async with served() as (client, scheduler):
            fields = dict(text="abc", stream=stream, **({"stop": "never"} if "stop" in where else {}))
            first = await client.post("/generate", json=fields)
            failing.clear()
            assert scheduler.is_alive
            return [first, await client.post("/generate", json=fields), await client.get("/metrics")]

    first, second, metrics = asyncio.run(ask())
    assert first.status_code == 500 or "event: error" in first.text
    assert "Panic" in first.text and second.status_code == 200 and "error" not in second.text
    assert re.search("Panic at .*test_server.py:", caplog.text) and "secret" not in first.text + caplog.text
    if where in ("encoder", "step"):
        assert "t5accel_engine_failures 1.0" in metrics.text
        assert 't5accel_failed_total{reason="EngineError"} 1.0' in metrics.text


def test_a_long_text_is_tokenised_beside_the_event_loop(monkeypatch) -> None:
    usual, release = Letters.__call__, threading.Event()
    monkeypatch.setattr(Letters, "__call__", lambda *args, **options: (release.wait(9), usual(*args, **options))[1])

    async def ask() -> tuple[int, list[int]]:
        async with served() as (client, _):
            long = dict(text="a" * 2000, truncate=True)
            working = asyncio.create_task(client.post("/generate", json=long))
            await asyncio.sleep(0.05)
            began = time.perf_counter()
            live = [(await client.get("/health/live")).status_code for _ in range(3)]
            assert time.perf_counter() - began < 5 and not working.done()
            release.set()
            return (await working).status_code, live

    assert asyncio.run(ask()) == (200, [200, 200, 200])


def scope_of(path: str, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    scope = {"type": "http", "asgi": {"version": "3.0"}, "method": "POST" if path == "/generate" else "GET"}
    scope |= {"path": path, "raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": b""}
    return scope | {"headers": list(headers), "client": None, "server": None, "http_version": "1.1"}


async def through_the_guard(path: str, *headers: tuple[bytes, bytes], **settings: Any) -> dict[bytes, bytes]:
    """The status and headers of the response to a request whose body never comes."""
    app, sent = make_app(Joining(), Letters(), Settings(**settings)), asyncio.Queue()

    async def receive() -> Any:
        if path != "/docs":
            await asyncio.sleep(9)
        return {"type": "http.request"}

    await asyncio.wait_for(app(scope_of(path, *headers), receive, sent.put), 2)
    app.state.service.close()
    start = sent.get_nowait()
    return {b"status": start["status"], **dict(start["headers"])}


HOST, JSON = (b"host", b"localhost:8000"), (b"content-type", b"application/json")


@pytest.mark.parametrize(("path", "headers", "status"), [
    ("/health/live", [(b"content-length", b"5")], 200), ("/health/live", [(b"host", b"evil.example")], 200),
    ("/generate", [HOST, JSON, (b"content-length", b"5")], 401), ("/generate", [(b"host", b"evil.example"), JSON], 421),
    ("/generate", [HOST, JSON, (b"content-length", b"5"), (b"transfer-encoding", b"chunked")], 400),
    ("/generate", [HOST, (b"authorization", b"BEARER  geheim"), (b"content-type", b"text/plain")], 415),
    ("/generate", [HOST, (b"authorization", b"bearer geheim")], 415),
    ("/generate", [HOST, JSON, (b"authorization", b"bearer geheim"), (b"content-encoding", b"gzip")], 415),
    ("/generate", [HOST, JSON, (b"authorization", b"bearer geheim"), (b"content-length", b"2000000")], 413),
], ids=str)  # fmt: skip
def test_bad_headers_are_refused_before_the_body_is_read(path: str, headers, status: int, monkeypatch) -> None:
    monkeypatch.setenv("T5ACCEL_API_KEY", "geheim")
    found = asyncio.run(through_the_guard(path, *headers))
    assert found[b"status"] == status and (status == 200 or found[b"connection"] == b"close")


@pytest.mark.parametrize(("settings", "host", "status"), [
    (dict(), b"localhost:80", 200), (dict(), b"[::1]:8000", 200), (dict(), b"127.0.0.1", 200),
    (dict(), b"localhost.evil.example", 421), (dict(allowed_hosts="a.example., b.example"), b"B.example:1", 200),
    (dict(allowed_hosts="a.example., fe80::1"), b"a.example.", 200),
    (dict(allowed_hosts="*"), b"evil.example", 200), (dict(host="0.0.0.0"), b"any.example", 200),
    (dict(host="0.0.0.0", allowed_hosts="a.example"), b"any.example", 421),
], ids=str)  # fmt: skip
def test_allowed_host_headers(settings: dict[str, Any], host: bytes, status: int) -> None:
    assert asyncio.run(through_the_guard("/docs", (b"host", host), **settings))[b"status"] == status


@pytest.mark.parametrize(("fields", "status", "match"), [
    (dict(), 422, "text"), (dict(text=5), 422, "text"), (dict(text=[]), 422, "1 to 64 texts, got 0"),
    (dict(text="a", num_beams="4"), 422, "num_beams"), (dict(text="a", num_beams=True), 422, "num_beams"),
    (dict(text="a", max_new_tokens=10**30), 422, "max_new_tokens"),
    (dict(text="a", temperature=0.5), 422, "temperature given without do_sample"),
    (dict(text="a", deadline_s=-1.0), 422, "deadline_s"),
    (dict(text="a", num_beams=2, stop="b"), 422, "num_beams must be 1 with stop"),
    (dict(text="a", length_penalty=2.0), 422, "length_penalty given without beams, and would do nothing"),
    (dict(text="a", do_sample=True, early_stopping="never"), 422, "early_stopping given without beams"),
    (dict(text="a", beams=4), 400, "beams is not supported"),
    (dict(text="a" * 700), 413, "at most 640 characters, got 700"),
    (dict(text=["a", "b" * 10**5]), 413, "640 characters, got 100000"),
    (dict(text=[5] * 100_000), 422, "text must be a text or a list of texts"),
    (dict(text=["a"] * 100_000), 422, "1 to 64 texts, got 100000"),
    (dict(text="a", **{f"f{i}": 1 for i in range(50_000)}), 400, "f0 is not supported"),
    (dict(text="a", num_beams=9), 422, "num_beams must be at most 8"),
    (dict(text="a", do_sample=True, num_return_sequences=9), 422, "num_return_sequences must be at most 8"),
    (dict(text=["a"] * 5, max_new_tokens=99), 422, "at most 400 tokens, got 500"),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_bad_requests_are_refused_before_tokenization(fields, status: int, match: str, monkeypatch) -> None:
    monkeypatch.setattr(Letters, "__call__", lambda *_, **__: pytest.fail("tokenised"))
    began = time.perf_counter()
    response = asked(**fields, settings=dict(max_source_tokens=20, max_queued_tokens=400))
    assert response.status_code == status and re.search(match, error_of(response)["message"])
    assert time.perf_counter() - began < 5


def test_a_stream_that_waits_leaves_the_queue_with_its_client() -> None:
    async def ask() -> None:
        async with served(Slow(0.01), max_batch_rows=1) as (client, scheduler):
            running = asyncio.create_task(client.post("/generate", json=dict(text="a", max_new_tokens=500)))
            while not scheduler.running:
                await asyncio.sleep(0.01)
            gone, body = asyncio.Event(), [json.dumps(dict(text="b", stream=True)).encode()]

            async def receive() -> dict[str, Any]:
                if body:
                    return {"type": "http.request", "body": body.pop()}
                await gone.wait()
                return {"type": "http.disconnect"}

            sent: asyncio.Queue[Any] = asyncio.Queue()
            streamed = asyncio.create_task(client._transport.app(scope_of("/generate", HOST, JSON), receive, sent.put))
            while not scheduler.waiting:
                await asyncio.sleep(0.01)
            gone.set()
            await streamed
            while scheduler.waiting:
                await asyncio.sleep(0.01)
            assert not running.done() and (await sent.get())["status"] == 499
            scheduler.drain(0)
            await running

    asyncio.run(ask())


def test_full_queues_and_closed_servers_say_when_to_retry_and_tokenise_nothing() -> None:
    async def ask() -> None:
        async with served(Slow(0.01), max_batch_rows=1, max_queue=1) as (client, scheduler):
            running = [asyncio.create_task(client.post("/generate", json=dict(text="a", max_new_tokens=500)))]
            while not scheduler.running:
                await asyncio.sleep(0.01)
            running.append(asyncio.create_task(client.post("/generate", json=dict(text="a"))))
            while not scheduler.waiting:
                await asyncio.sleep(0.01)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Letters, "__call__", lambda *_, **__: pytest.fail("tokenised"))
                full = await client.post("/generate", json=dict(text="a"))
            assert full.status_code == 429 and error_of(full)["type"] == "rate_limit_error"
            assert int(full.headers["retry-after"]) >= 1
            scheduler.drain(0)
            await asyncio.gather(*running)
            closed, ready = await client.post("/generate", json=dict(text="a")), await client.get("/health/ready")
            assert closed.status_code == ready.status_code == 503 and "shutting down" in error_of(closed)["message"]
            assert closed.headers["retry-after"] == "1" and closed.headers["connection"] == "close"

    asyncio.run(ask())


def test_a_source_is_as_long_as_the_model_reads() -> None:
    class Narrow(Joining):
        max_source_tokens = 10

        def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> Any:
            return super().encode(input_ids, attention_mask) if input_ids.shape[1] <= 10 else 1 / 0

    refused, cut = (asked(text="a" * 15, truncate=truncate, backend=Narrow()) for truncate in (False, True))
    assert refused.status_code == 413 and "at most 10 tokens, got 15" in error_of(refused)["message"]
    assert cut.json()["answers"][0]["source_tokens"] == 10


def test_a_long_source_is_cut_on_request_and_before_it_is_tokenised(monkeypatch) -> None:
    usual, lengths = Letters.__call__, []
    noting = lambda self, texts, **_: lengths.extend(map(len, texts)) or usual(self, texts)  # noqa: E731
    monkeypatch.setattr(Letters, "__call__", noting)
    response = asked(text="a" * 10**5, truncate=True, settings=dict(max_source_tokens=20))
    assert lengths == [640] and response.json()["answers"][0]["source_tokens"] == 20


def test_unknown_paths_and_methods_are_errors_in_the_usual_shape() -> None:
    missing, method, redirected = *got("/nothing", "/generate"), asked("/generate/")
    assert [one.status_code for one in (missing, method, redirected)] == [404, 405, 404]
    assert all(error_of(one)["type"] == "invalid_request_error" for one in (missing, method, redirected))
    assert method.headers["allow"] == "POST" and "location" not in redirected.headers


def test_the_folder_of_a_model_is_not_told(tmp_path: Path, monkeypatch, caplog) -> None:
    caplog.set_level("INFO", "t5accel")
    folder = tmp_path / "secret" / "translator"
    folder.mkdir(parents=True)
    names = {"translator": dict(model=str(folder)), "google/t5": dict(model="google/t5")}
    names["ours"] = dict(model=str(folder), served_model_name="ours")
    for name, settings in names.items():
        response = asked(text="a", settings=settings)
        assert response.json()["model"] == name and "secret" not in response.text
    monkeypatch.setattr(t5accel.serve.server, "open_backend", lambda *_, **__: (Joining(), Letters(), "a toy"))
    t5accel.serve.server.create_app(Settings(model=str(folder))).state.service.close()
    assert "translator by a toy" in caplog.text and "secret" not in caplog.text


# The command


def test_every_setting_is_a_flag_but_the_key() -> None:
    shown = CliRunner().invoke(commands, ["serve", "--help"], env={"COLUMNS": "200"}).stdout
    flags = {name for name in Settings.model_fields if f"--{name.replace('_', '-')} " in shown}
    assert flags == Settings.model_fields.keys() - {"api_key"}


def test_flags_win_over_the_environment(monkeypatch) -> None:
    given: list[Settings] = []
    monkeypatch.setattr(t5accel.serve.server, "serve", given.append)
    monkeypatch.setenv("T5ACCEL_MAX_BATCH_ROWS", "5")
    monkeypatch.setenv("T5ACCEL_MAX_QUEUE", "6")
    result = CliRunner().invoke(commands, ["serve", "--max-batch-rows", "7"])
    assert result.exit_code == 0 and (given[0].max_batch_rows, given[0].max_queue, given[0].host) == (7, 6, "127.0.0.1")
    result = CliRunner().invoke(commands, ["serve", "--max-batch-rows", "0"])
    assert result.exit_code == 2 and "--max-batch-rows must be greater than or equal to 1, got 0." in result.stderr


@pytest.mark.parametrize(("arguments", "environment", "match"), [
    (["--host", "0.0.0.0"], {}, "host must .* T5ACCEL_API_KEY, got '0.0.0.0'.*give --allow-unauthenticated"),
    ([], {"T5ACCEL_API_KEY": ""}, "T5ACCEL_API_KEY must not be empty"),
    ([], {"T5ACCEL_API_KEY": " "}, "T5ACCEL_API_KEY must be printable ASCII without blanks"),
    ([], {"T5ACCEL_API_KEY": "geheim\n"}, "newline"),
    ([], {"T5ACCEL_APIKEY": "geheim"}, "T5ACCEL_APIKEY is no setting. Rename it to T5ACCEL_API_KEY"),
    ([], {"T5ACCEL_MAX_BATCH_ROW": "8"}, "Rename it to T5ACCEL_MAX_BATCH_ROWS"),
    (["--threads", "100000"], {}, "threads must be at most .* got 100000"),
    (["--connections", "100000000"], {}, "connections must be at most .* got 100000000"),
    (["--deadline-s", "inf"], {}, "--deadline-s must be .*inf"),
    (["--precision", "int8-dynamic"], {}, "precision must .* got 'int8-dynamic'"),
    (["--device", "tpu"], {}, "device must be 'cpu' or 'cuda', got 'tpu'"),
    (["--device", "cuda", "--precision", "int8"], {}, "precision must be bf16, fp16 or fp32 on cuda, got int8"),
    (["--device", "cuda", "--engine", "ray"], {}, "engine must be local on cuda, got 'ray'"),
    (["--replicas-min", "2"], {}, "--replicas-min must be unset with engine local, got 2. Give --engine ray"),
    ([], {"T5ACCEL_REPLICAS": "4"}, "--replicas must be unset with engine local"),
    (["--device", "cuda", "--encoder-cache-mb", "9"], {}, "--encoder-cache-mb must be unset with device cuda"),
    (["--log-level", "loud"], {}, "--log-level must be 'debug', 'info'.*, got 'loud'"),
    ([], {"T5ACCEL_NEW_TOKENS": "8"}, "Rename it to T5ACCEL_MAX_NEW_TOKENS"),
    (["--allowed-hosts", "a.example,b.example:80"], {}, "must be names without a port .*'b.example:80'"),
    (["--allowed-hosts", "*.svc"], {}, "--allowed-hosts must be names without .* pattern, or \\*, got '\\*.svc'"),
    (["--max-beams", "33"], {}, "--max-beams must be at most max_batch_rows, 32, got 33"),
    (["--prefix", "\udcff: "], {}, "prefix must be UTF-8, got '.udcff: '"),
    (["--served-model-name", "mod\udce8le"], {}, "--served-model-name must be UTF-8"),
    (["--host", "no.such.host.invalid"], {"T5ACCEL_API_KEY": "a"}, "host 'no.such.host.invalid' and port 8000"),
], ids=str)  # fmt: skip
def test_bad_settings_are_refused_at_the_start(arguments: list[str], environment, match: str, monkeypatch) -> None:
    monkeypatch.setattr(t5accel.serve.server, "open_backend", lambda *_, **__: pytest.fail("opened"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(commands, ["serve", *arguments])
    assert result.exit_code == 2 and re.search(match, result.stderr) and result.stderr.count("\n") == 1
    assert "geheim" not in result.stderr


@pytest.mark.parametrize(("arguments", "environment", "warns"), [
    (["--host", "0.0.0.0", "--allow-unauthenticated"], {}, True),
    (["--host", "0.0.0.0"], {"T5ACCEL_API_KEY": "geheim"}, False),
    (["--host", "localhost"], {"T5ACCEL_SERVICE_HOST": "10.0.0.1", "T5ACCEL_CACHE": "/tmp"}, False),
])  # fmt: skip
def test_good_settings_are_served(arguments: list[str], environment, warns: bool, monkeypatch, caplog) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    opened: list[Settings] = []
    monkeypatch.setattr(t5accel.serve.server, "create_app", opened.append)
    CliRunner().invoke(commands, ["serve", "--port", "0", *arguments])
    assert len(opened) == 1 and ("no API key is set" in caplog.text) == warns


def test_a_port_in_use_is_one_sentence_also_where_it_is_taken_while_the_model_loads() -> None:
    """Two servers may bind one port as long as none listens."""
    (first,) = t5accel.serve.server.bound(Settings(port=0))
    with first:
        # asyncio switches Nagle's delay off where a socket names its protocol, which accepted ones take over.
        assert first.proto == socket.IPPROTO_TCP
        settings = Settings(port=first.getsockname()[1])
        second = t5accel.serve.server.bound(settings)
        first.listen()
        with pytest.raises(InputError, match=f"port {settings.port} cannot be served: .*in use"):
            t5accel.serve.server.run_server(None, None, settings, second)
        second[0].close()
        result = CliRunner().invoke(commands, ["serve", "--port", str(settings.port)])
    assert result.exit_code == 2 and re.search(f"port {settings.port} cannot be served: .*in use", result.stderr)
    assert result.stderr.count("\n") == 1


def test_torch_static_serves_what_the_cpu_engine_serves(mini, monkeypatch) -> None:
    """What `--device cuda` opens, here without graphs: greedy, streamed, beams, drawn, stop strings, metrics."""
    from t5accel.backends.torch_static import TorchStatic

    given: dict[str, Any] = {}

    def open_backend(name: str, **options: Any) -> Any:
        given.update(options)
        return TorchStatic(mini[0]), tokenizer_of(data_folder() / "mini-t5"), "torch"

    monkeypatch.setattr(t5accel.serve.server, "open_backend", open_backend)
    app = t5accel.serve.server.create_app(Settings(device="cuda", precision="bf16"))
    assert (given["device"], given["precision"]) == ("cuda", "bf16")

    async def ask() -> None:
        async with client_of(app) as client:
            for more in ({}, {"num_beams": 3}, {"do_sample": True, "top_k": 1}):
                found = await client.post("/generate", json={"text": TEXT, "max_new_tokens": 20, **more})
                assert found.json()["answers"][0]["texts"] == ["Je suis fatigué."]
            stopped = await client.post("/generate", json={"text": TEXT, "stop": "fatigué"})
            assert stopped.json()["answers"][0]["texts"] == ["Je suis "]
            streamed = await client.post("/generate", json={"text": TEXT, "stream": True})
            assert "".join(event["text"] for event in events_of(streamed)) == "Je suis fatigué."
            assert (await client.get("/health/ready")).json()["continuous"]
            assert "t5accel_token_seconds_count" in (await client.get("/metrics")).text

    asyncio.run(ask())


# A process of its own

# Says on standard error what it opens, once it has heard SIGUSR1.
WATCHED = """
import os, signal, sys
watched = []
def hook(event, arguments):
    if watched and event == "open":
        os.write(2, f"TOUCHED {arguments[0]!r}\\n".encode())
sys.addaudithook(hook)
signal.signal(signal.SIGUSR1, lambda *_: watched.append(1))
sys.argv[0] = "t5accel"
from t5accel.cli import app
app()
"""
LIMITS = dict(max_batch_rows=6, max_queue=40, max_source_tokens=64, max_new_tokens=4096, body_kb=64, body_timeout_s=1)
LIMITS |= dict(header_timeout_s=1, write_timeout_s=1, shutdown_grace_s=20)


class Process:
    """A server of the bundled model in int8."""

    def __init__(self, folder: Path, **limits: Any):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = limits.pop("port", free.getsockname()[1])
        given = {**LIMITS, **limits, "port": self.port}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        self.log_file = folder / f"server-{time.monotonic_ns()}.log"
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "T5ACCEL_CACHE": str(folder / "cache")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", WATCHED, "serve", "--precision=int8", "--threads=1", *flags], cwd=folder,
            env=environment, stdout=subprocess.DEVNULL, stderr=self.log_file.open("wb"),
        )  # fmt: skip
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=120)

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8")

    def ready(self) -> Process:
        while self.process.poll() is None:
            try:
                if self.client.get("/health/ready").status_code == 200:
                    return self
            except httpx.TransportError:
                time.sleep(0.05)
        raise AssertionError(self.log)

    def load(self) -> dict[str, Any]:
        return self.client.get("/health/ready").json()

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait, as long as it takes, for the load to be such."""
        while not condition(load := self.load()):
            time.sleep(0.01)
        return load

    def idle(self) -> None:
        self.until(lambda load: not load["rows"] and not load["waiting"])

    def socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=120)

    def end(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Process]:
    process = Process(folder).ready()
    yield process
    process.end()


def test_the_openai_package_is_served(server: Process) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    assert [model.id for model in client.models.list()] == ["mini"]
    assert client.models.retrieve("mini").owned_by == "t5accel"
    ask, both = client.completions.create, [TEXT, "translate English to French: Where is my bag?"]
    found = ask(model="mini", prompt=both)
    assert [choice.text for choice in found.choices] == ["Je suis fatigué.", "Où est mon sac ?"]
    assert {choice.finish_reason for choice in found.choices} == {"stop"} and found.usage.prompt_tokens == 21
    assert ask(model="mini", prompt=TEXT, max_tokens=2).choices[0].finish_reason == "length"
    chunks = list(ask(model="mini", prompt=TEXT, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "Je suis fatigué."
    assert chunks[-2].choices[0].finish_reason == "stop" and chunks[-1].usage.completion_tokens == 5
    assert len(ask(model="mini", prompt=TEXT, temperature=1.5, top_p=0.9, n=3, seed=4).choices) == 3
    as_langchain = dict(temperature=0.0, max_tokens=256, top_p=1, frequency_penalty=0, presence_penalty=0, n=1)
    found = ask(model="mini", prompt=[TEXT], **as_langchain, logit_bias={}, seed=None, stop=["\n", "guez"])
    assert found.choices[0].text == "Je suis fatigué."
    texts = ["", ""]
    for chunk in ask(model="mini", prompt=both, stream=True, stop=" fati"):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["Je suis", "Où est mon sac ?"]
    with pytest.raises(openai.NotFoundError):
        ask(model="gpt", prompt=TEXT)
    for refused, param, code in (
        (dict(prompt=TEXT, logprobs=2), "logprobs", "unsupported_parameter"),
        (dict(prompt="word " * 100), "prompt", "context_length_exceeded"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            ask(model="mini", **refused)
        assert (error.value.param, error.value.code) == (param, code)
    client.close()


ALLOWED = {200, 400, 404, 405, 408, 413, 415, 421, 422, 429, 504}  # statuses of hostile requests
LONG = dict(text=TEXT, max_new_tokens=4096, min_new_tokens=4096)


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnected_client_frees_its_row(server: Process, stream: bool) -> None:
    server.idle()
    connection = server.socket()
    connection.sendall(request({**LONG, "stream": stream}))
    server.until(lambda load: load["rows"] == 1)
    connection.close()
    server.until(lambda load: load["rows"] == 0)
    assert server.client.post("/generate", json=dict(text=TEXT)).json()["answers"][0]["texts"] == ["Je suis fatigué."]


def test_slow_heads_and_bodies_time_out(server: Process) -> None:
    models = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
    second = silent(server, models)  # the head of a second request, after the first response
    assert second.recv(65536).startswith(b"HTTP/1.1 200")
    second.sendall(b"GE")
    others = [silent(server, start) for start in (head("content-length: 50") + b"{", b"", models[:25])]
    for connection in (second, *others):
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        connection.close()
        # The body of the first response may arrive after its head, and so come in front.
        assert b"HTTP/1.1 408" in answer and b"connection: close" in answer.lower()


def test_two_hundred_hostile_requests(server: Process) -> None:
    """Each gets a response or is cut off; the server logs no text and opens no file."""
    good = dict(text=TEXT)
    for path, fields in (("/generate", good), ("/generate", {**good, "stream": True}), ("/nothing", {})):
        server.client.post(path, json=fields)  # what is imported when it is first needed
    for seed in range(KINDS):
        send(server.port, malformed_request(seed))
    server.process.send_signal(signal.SIGUSR1)
    time.sleep(0.2)
    found = fuzz_server(server.port)
    assert {*found.statuses} <= ALLOWED, found
    assert len(found.statuses) >= 5 and found.cut_off < 60 and found.cut_off + found.statuses.total() == 200
    server.idle()
    assert server.client.post("/generate", json=good).json()["answers"][0]["texts"] == ["Je suis fatigué."]
    assert server.process.poll() is None and "TOUCHED" not in server.log
    assert "tired" not in server.log and "passwd" not in server.log and "Traceback" not in server.log


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(folder: Path) -> None:
    server = Process(folder, shutdown_grace_s=120).ready()
    found: list[httpx.Response] = []
    asks = threading.Thread(target=lambda: found.append(httpx.post(f"{server.url}/generate", json=dict(
        LONG, max_new_tokens=1000, min_new_tokens=1000), timeout=300)))  # fmt: skip
    asks.start()
    server.until(lambda load: load["rows"] == 1)
    server.process.send_signal(signal.SIGTERM)
    server.until(lambda load: not load["ready"])
    late = server.client.post("/generate", json=dict(text=TEXT))
    assert late.status_code == 503 and "shutting down" in error_of(late)["message"]
    refused: list[bytes] = []

    def ask_again_and_again() -> None:  # who are refused keep nobody waiting
        while answer := send(server.port, request(dict(text=TEXT))):
            refused.append(answer)
            time.sleep(0.05)

    others = [threading.Thread(target=ask_again_and_again) for _ in range(2)]
    for other in others:
        other.start()
    asks.join()
    ended = time.monotonic()
    assert server.process.wait() in (0, -signal.SIGTERM) and time.monotonic() - ended < 4
    for other in others:
        other.join()
    assert refused and all(answer.startswith(b"HTTP/1.1 503") for answer in refused)
    assert found[0].json()["answers"][0]["tokens"] == [1000]
    server.end()


def test_a_killed_server_starts_again_on_its_port_and_ctrl_c_ends_it_in_good_order(folder: Path) -> None:
    killed = Process(folder).ready()
    assert killed.client.post("/generate", json=dict(text=TEXT)).status_code == 200
    killed.end()
    server = Process(folder, port=killed.port, shutdown_grace_s=0.3, log_format="json", log_level="debug").ready()
    with server.socket() as connection:
        connection.sendall(request(LONG))
        server.until(lambda load: load["rows"] == 1)
        server.process.send_signal(signal.SIGINT)
        assert b"503" in connection.recv(65536).split(b"\r\n")[0]
    assert server.process.wait() == 0
    lines = [json.loads(line) for line in server.log.splitlines()]
    assert {"t5accel.serve", "uvicorn.error"} <= {line["logger"] for line in lines}
    assert any(line["message"].startswith("GET /health/ready 200") for line in lines)
    server.end()


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[Process]:
    """A server with few connections."""
    process = Process(folder, connections=12, body_timeout_s=60, header_timeout_s=60).ready()
    yield process
    process.end()


READY = b"GET /health/ready HTTP/1.1\r\nhost: localhost\r\n\r\n"


def reply(server: Process, content: bytes, *, ends: bool = False) -> bytes:
    """All that comes back until the server closes the connection; with ``ends`` the client half-closes it."""
    with server.socket() as connection:
        connection.sendall(content)
        if ends:
            connection.shutdown(socket.SHUT_WR)
        found = b""
        while chunk := connection.recv(65536):
            found += chunk
        return found


def open_sockets(server: Process) -> int:
    count = 0
    for one in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            count += "socket:" in os.readlink(one)
    return count


def silent(server: Process, content: bytes) -> socket.socket:
    """A client that sends content and reads nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(content)
    return connection


def test_clients_that_do_not_read_are_cut_off(small: Process) -> None:
    """Small answers, which never reach a high-water mark, and connections that the server has closed already."""
    before = open_sockets(small)
    held = [silent(small, READY * 550 + end) for end in (b"", b"", b"nonsense\r\n\r\n")]
    while open_sockets(small) == before:
        time.sleep(0.01)
    began = time.monotonic()
    while open_sockets(small) > before:  # write_s is a second
        assert time.monotonic() - began < 9, "they stay"
        time.sleep(0.1)
    assert small.client.post("/generate", json=dict(text=TEXT)).status_code == 200
    for connection in held:
        connection.close()


def test_a_client_that_reads_steadily_is_not_cut_off() -> None:
    """It reads the rest of a large answer in four write time-outs, of which the last brings next to nothing."""
    sizes, aborted = [9000, 6000, 3000, 2999], asyncio.Event()
    transport = SimpleNamespace(get_write_buffer_size=lambda: sizes.pop(0), abort=aborted.set)

    async def watch() -> None:
        protocol = object.__new__(t5accel.serve.server.TimeoutH11Protocol)
        protocol.transport, protocol.loop, protocol.write_timeout_s = transport, asyncio.get_running_loop(), 0.02
        protocol.flow = SimpleNamespace(pause_writing=lambda: None)
        protocol.pause_writing()
        await asyncio.wait_for(aborted.wait(), 9)

    asyncio.run(watch())
    assert not sizes


def test_idle_connections_make_room(small: Process) -> None:
    size = len(small.log)
    held = [silent(small, content) for content in (b"", b"GET /hea") * 100]
    for _ in range(3):
        assert send(small.port, READY).startswith(b"HTTP/1.1 200")
        assert send(small.port, request(dict(text=TEXT))).startswith(b"HTTP/1.1 200")
    assert open_sockets(small) < 30 and len(small.log) - size < 10_000
    for connection in held:
        connection.close()


def test_full_connections_leave_health_checks(small: Process) -> None:
    slow = head("content-length: 50") + b"{"
    held = [silent(small, slow) for _ in range(11)]
    time.sleep(0.2)
    assert httpx.post(f"{small.url}/generate", json=dict(text=TEXT)).status_code == 200, "the twelfth"
    held.append(silent(small, slow))
    time.sleep(0.2)
    for _ in range(40):  # more than are kept beyond the limit: each leaves at once
        assert send(small.port, READY).startswith(b"HTTP/1.1 200")
    response = httpx.post(f"{small.url}/generate", json=dict(text=TEXT))
    assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
    assert "All 12 connections are in use" in error_of(response)["message"]
    for connection in held:
        connection.close()
    small.idle()


def test_a_body_in_many_pieces_is_cut_off(server: Process) -> None:
    for start in (head("transfer-encoding: chunked"), READY[:-2] + b"transfer-encoding: chunked\r\n\r\n"):
        found = b""
        with server.socket() as connection:
            try:
                connection.sendall(start + b"1\r\na\r\n" * 20_000)
                while chunk := connection.recv(65536):
                    found += chunk
            except ConnectionError:  # the server has not read all of it
                pass
        assert found[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 200", b""), found
    body = json.dumps(dict(text=TEXT)).encode()
    pieces = b"".join(b"1\r\n%c\r\n" % letter for letter in body) + b"0\r\n\r\n"
    assert b"fatigu" in reply(server, head("transfer-encoding: chunked", "connection: close") + pieces)


def test_half_closed_clients_get_responses(server: Process) -> None:
    server.idle()
    answer = reply(server, request(dict(text=TEXT, max_new_tokens=400, min_new_tokens=400)), ends=True)
    first, _, rest = answer.partition(b"\r\n\r\n")
    assert first == b"HTTP/1.1 100 Continue" and rest.startswith(b"HTTP/1.1 200") and b"fatigu" in rest
    assert reply(server, READY * 3, ends=True).count(b"HTTP/1.1 200") == 3
    assert reply(server, request(dict(text=TEXT, stream=True)), ends=True).count(b"data: ") >= 1
    assert reply(server, b"GET /health", ends=True) == b""


def test_contradicting_lengths_end_the_connection(server: Process) -> None:
    found = reply(server, head("content-length: 4", "transfer-encoding: chunked") + b"0\r\n\r\n" + READY)
    assert found.startswith(b"HTTP/1.1 400") and found.count(b"HTTP/1.1") == 1 and b'{"error"' in found


def test_a_limit_of_open_files_is_raised_or_named() -> None:
    program = """
import resource
from t5accel.serve.server import Settings, checked
for hard in (4096, 200):
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        checked(Settings(connections=1000))
    except ValueError as error:
        print(error)
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    raised, named, kept = found.stdout.splitlines()
    assert int(raised) >= 1000 and kept == "100" and re.search("connections must be at most 4 .* 1000", named)


# Says what the environment holds when ONNX Runtime is imported.
IMPORTED = """
import importlib.abc, os, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "onnxruntime":
            os.write(2, b"IMPORTED %s\\n" % os.environ.get("ORT_DISABLE_TELEMETRY", "without").encode())
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("start", ["t5accel.__main__", "t5accel.cli"])
def test_a_command_does_not_report_to_the_maker_of_onnx_runtime(start: str, tmp_path: Path) -> None:
    """The runtime reads the variable at import."""
    (tmp_path / "sitecustomize.py").write_text(IMPORTED)
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    program = f"import sys, typer; typer.Typer.__call__ = lambda *_: None; import {start}, onnxruntime"
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert found.stderr == "IMPORTED 1\n"


APART = ["unshare", "-rnm"]
LOOKS_UP = "import socket; socket.getaddrinfo('seen.invalid', 1)"


@pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run([*APART, "true"], capture_output=True).returncode != 0,
    reason="needs namespaces of its own",
)
def test_a_server_looks_up_no_name_and_stores_no_report(folder: Path, tmp_path: Path) -> None:
    """Without the variable ONNX Runtime asks for its maker's address some seconds after a session was opened, and
    stores unsent reports below these folders.
    """
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment |= {"PYTHONPATH": str(ROOT), "T5ACCEL_CACHE": str(folder / "cache"), "HOME": str(tmp_path),
                    "XDG_CACHE_HOME": str(tmp_path / ".cache"), "TMPDIR": str(tmp_path)}  # fmt: skip
    serve = ["-m", "t5accel", "serve", "--precision=int8", "--threads=1", "--port=0"]
    found = {}
    for ready, seconds, command in (("listening at", "10", serve), ("not known", "0", ["-c", LOOKS_UP])):
        watched = [*APART, sys.executable, str(ROOT / "tests" / "lookups.py"), seconds, ready, sys.executable, *command]
        run = subprocess.run(watched, env=environment, capture_output=True, text=True, timeout=300)
        assert ready in run.stderr, run.stderr
        found[ready] = {*run.stdout.split()}
    assert found == {"listening at": set(), "not known": {"seen.invalid"}}
    written = [path.name for path in tmp_path.rglob("*")]
    assert ".ses" not in written and "Microsoft" not in written


FUZZED_S = float(os.environ.get("FUZZED_S", 100))


def pages_of(server: Process) -> int:
    """Resident memory in pages."""
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])


@pytest.mark.long
def test_a_fuzz_of_a_hundred_seconds(folder: Path) -> None:
    server = Process(folder, connections=64).ready()
    fuzz_under_load(server.port, 5)  # buffers grow to what is needed
    before, log = pages_of(server), len(server.log)
    found = fuzz_under_load(server.port, FUZZED_S)
    assert {*found.statuses} <= ALLOWED, found
    assert found.statuses.total() > 10 * FUZZED_S and found.longest_s < 15 and found.live_s < 1, found
    assert pages_of(server) < 1.2 * before + 10_000, "memory grows"
    lines = len(server.log[log:].splitlines())
    assert lines < found.statuses.total() + 30 * FUZZED_S and "Traceback" not in server.log
    server.idle()
    assert server.client.post("/generate", json=dict(text=TEXT)).json()["answers"][0]["texts"] == ["Je suis fatigué."]
    server.end()


@pytest.mark.long
def test_a_soak_at_three_times_its_capacity(folder: Path) -> None:
    """Of 20,000 requests a tenth is cancelled, a tenth vanishes, a tenth is malformed; none is lost or mixed up."""
    words = ("I am tired.", "Where is my bag?", "The house is small.", "We have two cats.", "She reads a book.")
    texts = [f"translate English to French: {text}" for text in words]
    waits = dict.fromkeys(("header_timeout_s", "body_timeout_s", "write_timeout_s"), 60)
    server = Process(folder, max_batch_rows=8, max_queue=16, max_new_tokens=64, **waits).ready()
    expected = {
        text: server.client.post("/generate", json=dict(text=text)).json()["answers"][0]["texts"] for text in texts
    }
    assert len(set(map(tuple, expected.values()))) == len(texts)
    counts: Counter[str] = Counter()
    sizes: list[int] = []

    async def soak(client: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(number)
        text, kind = rng.choice(texts), dict(enumerate(["cancel", "vanish", "bad", "stream"])).get(number % 10, "plain")
        fields: dict[str, Any] = dict(text=text, stream=kind == "stream")
        if kind == "bad":
            fields = rng.choice([dict(text=5), dict(), dict(text="a", num_beams=-1), dict(text="b " * 500)])
        if kind == "cancel":
            with suppress(TimeoutError):
                await asyncio.wait_for(client.post("/generate", json=fields), rng.random() * 0.05)
            return
        if kind == "vanish":
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request(fields))
            await writer.drain()
            await asyncio.sleep(rng.random() * 0.02)
            writer.transport.abort()
            return
        response = await client.post("/generate", json=fields)
        counts[f"{kind} {response.status_code}"] += 1
        if kind == "bad":
            assert response.status_code in (413, 422, 429)
        elif response.status_code == 429:
            assert int(response.headers["retry-after"]) >= 1
        elif kind == "stream":
            assert "".join(event["text"] for event in events_of(response)) == expected[text][0]
        else:
            assert response.json()["answers"][0]["texts"] == expected[text]

    async def soak_all() -> None:
        limits = httpx.Limits(max_connections=300, max_keepalive_connections=100, keepalive_expiry=1)
        numbers = iter(range(20_000))

        async def one_after_another(client: httpx.AsyncClient) -> None:
            for number in numbers:
                await soak(client, number)
                if number % 2_000 == 1_999:
                    sizes.append(pages_of(server))

        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
            await asyncio.gather(*[one_after_another(client) for _ in range(200)])

    asyncio.run(soak_all())
    server.idle()
    metrics = server.client.get("/metrics").text
    assert "t5accel_engine_failures 0.0" in metrics and "Traceback" not in server.log
    assert sum(count for what, count in counts.items() if what.endswith("200")) > 500 and counts["plain 429"] > 100
    assert np.median(sizes[-4:]) < 1.05 * sizes[2], f"memory grows: {sizes}"  # one may see buffers as they grow
    assert server.client.post("/generate", json=dict(text=texts[0])).json()["answers"][0]["texts"] == expected[texts[0]]
    server.end()
