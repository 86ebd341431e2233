"""Embeddings over HTTP: those of the encoder alone, whatever else is computed; limits, and OpenAI's client."""

from __future__ import annotations

import asyncio
import base64
import gc
import re
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from test_server import Process, client_of, error_of
from typer.testing import CliRunner

import t5accel.serve.server
from t5accel.cli import app as commands
from t5accel.encoder import AcceleratedEncoder
from t5accel.serve.embeddings import EmbeddingService, EmbeddingsResponse, make_app
from t5accel.serve.settings import EMBED_PRECISIONS, Settings

TEXTS = ["I am tired.", "The house is small and old, and so is the boat beside it.", "No", ""]


@pytest.fixture(scope="module")
def encoder() -> AcceleratedEncoder:
    return AcceleratedEncoder.from_pretrained("mini", threads=1, progress=False)


@asynccontextmanager
async def served(encoder: Any, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, EmbeddingService]]:
    """A client of the application without sockets, and its scheduler."""
    app = make_app(encoder, Settings(task="embed", **settings))
    async with client_of(app) as client:
        yield client, app.state.service.scheduler


def asked(encoder: Any, settings: dict[str, Any] | None = None, **fields: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with served(encoder, **settings or {}) as (client, _):
            return await client.post("/v1/embeddings", json={"model": "mini", **fields})

    return asyncio.run(ask())


class Held:
    """The encoder, of which each call waits until it is released, and the shapes that it was given."""

    def __init__(self, encoder: AcceleratedEncoder, held: bool = True):
        self._encoder, self.go, self.begun, self.masks = encoder, threading.Event(), threading.Event(), []
        if not held:
            self.go.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def embed_ids(self, ids: np.ndarray, mask: np.ndarray, **options: Any) -> list[np.ndarray]:
        self.masks.append(mask)
        self.begun.set()
        assert self.go.wait(30)
        return self._encoder.embed_ids(ids, mask, **options)


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    "settings", [{}, dict(pooling="first"), dict(normalize=True, prefix="query: ", served_model_name="mini")], ids=str
)
@pytest.mark.parametrize("encoding_format", ["base64", None])
def test_embeddings_are_the_encoder_s(encoder, settings, encoding_format) -> None:
    options = dict(pooling=settings.get("pooling", "mean"), normalize=settings.get("normalize", False))
    expected = encoder.embed([settings.get("prefix", "") + text for text in TEXTS], **options)
    response = asked(encoder, settings, input=TEXTS, encoding_format=encoding_format, user="me", dimensions=None)
    found = response.json()
    assert response.status_code == 200 and EmbeddingsResponse.model_validate(found).model_dump() == found
    assert [one["index"] for one in found["data"]] == [0, 1, 2, 3] and found["model"] == "mini"
    vectors = [one["embedding"] for one in found["data"]]
    if encoding_format == "base64":
        vectors = [np.frombuffer(base64.b64decode(text), "<f4") for text in vectors]
    np.testing.assert_allclose(np.array(vectors, np.float32), expected, atol=1e-5)
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > 20


def test_a_text_alone_counts_its_tokens(encoder) -> None:
    found = asked(encoder, input=TEXTS[0], dimensions=256).json()
    tokens = len(encoder.tokenizer([TEXTS[0]])["input_ids"][0])
    assert len(found["data"]) == 1 and found["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_mixed_lengths_under_load_are_as_each_alone(encoder) -> None:
    rng, watched = np.random.default_rng(0), Held(encoder, held=False)
    words = ["house", "tired", "the", "boat", "old", "small", "where"]
    texts = [" ".join(rng.choice(words, count)) for count in rng.choice([1, 3, 8, 30, 90], 120)]

    async def ask() -> list[list[float]]:
        async with served(watched, batch_tokens=400) as (client, _):
            sent = (client.post("/v1/embeddings", json={"model": "mini", "input": text}) for text in texts)
            return [one.json()["data"][0]["embedding"] for one in await asyncio.gather(*sent)]

    expected = np.concatenate([encoder.embed([text]) for text in texts])
    np.testing.assert_allclose(np.array(asyncio.run(ask())), expected, atol=1e-5)
    assert len(watched.masks) < 80, "texts share batches"
    for mask in watched.masks:
        lengths = mask.sum(axis=1)
        assert mask.size <= 400 or len(mask) == 1
        assert lengths.max() <= 2 * max(lengths.min(), 16)


def test_the_oldest_goes_first_with_those_that_fit_beside_it(encoder) -> None:
    held = Held(encoder)

    async def ask() -> None:
        async with served(held, batch_tokens=100) as (client, scheduler):

            def send(words: int) -> asyncio.Task[httpx.Response]:
                return asyncio.create_task(client.post("/v1/embeddings", json={"model": "mini", "input": "a " * words}))

            sent = [send(1)]
            await until(held.begun.is_set)
            for waiting, words in enumerate((300, 4, 40, 20, 5, 45), 1):
                sent.append(send(words))
                await until(lambda waiting=waiting: scheduler.waiting == waiting)
            held.go.set()
            assert {one.status_code for one in await asyncio.gather(*sent)} == {200}

    asyncio.run(ask())
    alone, longest, short, long = [mask.sum(axis=1).tolist() for mask in held.masks]
    assert len(alone) == len(longest) == 1 and longest[0] > 250
    assert len(short) == 3 and max(short) < 30 and len(long) == 2 and min(long) > 35


@pytest.mark.parametrize(("fields", "match", "param"), [
    (dict(input=[[5, 6]]), "input must be a text .* Token ids are not supported", "input"),
    (dict(input=[5, 6]), "input must be a text .* Token ids are not supported", "input"),
    (dict(input=5), "input", None), (dict(), "input", "input"), (dict(input=[]), "1 to 64 texts, got 0", "input"),
    (dict(input=["a"] * 65), "1 to 64 texts, got 65", "input"),
    (dict(input="word " * 99), "at most 20 tokens, got ", "input"),
    (dict(input="a" * 700), "at most 640 characters, got 700", "input"),
    (dict(input="a", dimensions=64), "dimensions must be 256 or null, got 64", "dimensions"),
    (dict(input="a", encoding_format="int8"), "encoding_format", "encoding_format"),
    (dict(input="a", truncate=True), "truncate is not supported", "truncate"),
    (dict(input="a", deadline_s=-1.0), "deadline_s", "deadline_s"),
    (dict(input="a", deadline_s=0), "deadline_s", "deadline_s"),
    (dict(input=["a"] * 30), "count as at most 29 texts, got 30", None),
], ids=lambda value: str(value)[:30])  # fmt: skip
def test_mistakes_are_refused_by_name(encoder, fields, match, param) -> None:
    response = asked(encoder, dict(max_source_tokens=20, max_queue=29), **fields)
    error = error_of(response)
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert re.search(match, error["message"]) and (param is None or error["param"] == param)


def test_the_other_routes(encoder) -> None:
    async def ask() -> list[httpx.Response]:
        async with served(encoder) as (client, _):
            await client.post("/v1/embeddings", json={"model": "mini", "input": TEXTS})
            paths = ["/health/live", "/health/ready", "/v1/models/mini", "/", "/docs", "/metrics", "/openapi.json"]
            other = await client.post("/v1/embeddings", json={"model": "gpt", "input": "a"})
            return [other, await client.post("/generate", json={}), *[await client.get(path) for path in paths]]

    other, missing, live, ready, model, about, docs, metrics, _ = asyncio.run(ask())
    assert other.status_code == 404 and error_of(other)["code"] == "model_not_found"
    assert missing.status_code == 404 and "POST /v1/embeddings" in error_of(missing)["message"]
    assert live.json()["alive"] and ready.json() == dict(ready=True, waiting=0, running=0, rows=0, continuous=False)
    assert model.json()["id"] == "mini" and "POST /v1/embeddings" in about.json()["routes"]
    assert "/v1/embeddings" in docs.text and "encoding_format" in docs.text
    assert "t5accel_answers_total 1.0" in metrics.text and "t5accel_encoder_misses 4.0" in metrics.text
    assert 't5accel_responses_total{route="/v1/embeddings",status="200"} 1.0' in metrics.text


def test_a_full_queue_a_late_request_and_a_client_that_has_gone(encoder, caplog) -> None:
    held = Held(encoder)

    async def ask() -> None:
        async with served(held, max_queue=3) as (client, scheduler):

            def send(**fields: Any) -> asyncio.Task[httpx.Response]:
                return asyncio.create_task(client.post("/v1/embeddings", json={"model": "mini", **fields}))

            running = send(input="one")
            await until(held.begun.is_set)
            gone, late = send(input=["two", "three"]), send(input="four", deadline_s=0.4)
            await until(lambda: scheduler.waiting == 3)
            full = await send(input="five")
            assert full.status_code == 429 and error_of(full)["type"] == "rate_limit_error"
            assert int(full.headers["retry-after"]) >= 1
            gone.cancel()
            await asyncio.sleep(0.5)
            held.go.set()
            assert (await running).status_code == 200
            assert (await late).status_code == 504 and "within its 0.4 s" in error_of(await late)["message"]
            await until(lambda: not scheduler.waiting)
            assert len(held.masks) == 1 and scheduler.encoded == 1, "neither was computed"
            assert (await send(input="six")).status_code == 200
            gc.collect()

    asyncio.run(ask())
    assert "never retrieved" not in caplog.text


def test_a_shutdown_finishes_what_runs(encoder) -> None:
    held = Held(encoder)

    async def ask() -> None:
        async with served(held) as (client, scheduler):
            body = {"model": "mini", "input": TEXTS * 2}
            running = asyncio.create_task(client.post("/v1/embeddings", json=body))
            await until(held.begun.is_set)
            scheduler.drain(20)
            refused = await client.post("/v1/embeddings", json=body)
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            held.go.set()
            assert len((await running).json()["data"]) == 8
            await until(lambda: not scheduler.running and not scheduler.waiting)

    asyncio.run(ask())


def test_an_error_is_that_of_its_text_alone(encoder, caplog) -> None:
    special = {text: encoder.tokenizer([text])["input_ids"][0][0] for text in ("house", "boat")}

    class Failing(Held):
        def embed_ids(self, ids: np.ndarray, mask: np.ndarray, **options: Any) -> list[np.ndarray]:
            vectors = super().embed_ids(ids, mask, **options)
            if (ids == special["house"]).any():
                raise ValueError("the secret text")
            return [
                vector * np.nan if special["boat"] in row else vector for row, vector in zip(ids, vectors, strict=True)
            ]

    async def ask() -> list[httpx.Response]:
        async with served(Failing(encoder, held=False)) as (client, scheduler):
            sent = (client.post("/v1/embeddings", json={"model": "mini", "input": text}) for text in texts)
            found = await asyncio.gather(*sent)
            assert scheduler.failures >= 2 and scheduler.is_alive
            refused = await client.post("/v1/embeddings", json={"model": "mini", "input": "tired " * 900})
            assert error_of(refused)["code"] == "context_length_exceeded"
            return [*found, await client.get("/metrics")]

    texts = ["tired", "house", "boat", "old"]
    first, bad, endless, last, metrics = asyncio.run(ask())
    assert first.status_code == last.status_code == 200 and bad.status_code == endless.status_code == 500
    assert error_of(bad)["message"] == "The engine failed: ValueError." and "secret" not in caplog.text
    assert "not finite" in error_of(endless)["message"] and error_of(endless)["type"] == "server_error"
    assert re.findall("t5accel_failed_total{.*", metrics.text) == ['t5accel_failed_total{reason="EngineError"} 2.0']


@pytest.mark.parametrize(("arguments", "match"), [
    (["--task", "embed", "--max-beams", "3"], "--max-beams must be unset with task embed, got 3"),
    (["--task", "embed", "--device", "cuda"], "--device must be unset with task embed"),
    (["--task", "embed", "--engine", "ray"], "--engine must be unset with task embed"),
    (["--task", "embed", "--precision", "int8-dynamic"], "--precision must be one of fp32, bf16, .*'int8-dynamic'"),
    (["--pooling", "first"], "--pooling must be unset with task generate, got 'first'"),
    (["--normalize"], "--normalize must be unset"), (["--precision", "auto"], "--precision|precision must"),
    (["--task", "embed", "--pooling", "none"], "--pooling must .*'none'"), (["--task", "classify"], "--task must be"),
], ids=str)  # fmt: skip
def test_settings_of_another_task_are_refused(arguments, match, monkeypatch) -> None:
    monkeypatch.setattr(t5accel.serve.server, "create_app", lambda _: pytest.fail("opened"))
    result = CliRunner().invoke(commands, ["serve", *arguments])
    assert result.exit_code == 2 and re.search(match, result.stderr) and result.stderr.count("\n") == 1


@pytest.mark.parametrize("precision", EMBED_PRECISIONS)
def test_every_precision_is_opened(precision, encoder) -> None:
    app = t5accel.serve.server.create_app(Settings(task="embed", precision=precision, threads=1))
    assert precision in (app.state.service.encoder.precision, "auto")

    async def ask() -> list[float]:
        async with client_of(app) as client:
            found = await client.post("/v1/embeddings", json={"model": "mini", "input": TEXTS[1]})
            return found.json()["data"][0]["embedding"]

    found, (expected,) = np.array(asyncio.run(ask())), encoder.embed(TEXTS[1:2])
    assert found @ expected > 0.98 * np.linalg.norm(found) * np.linalg.norm(expected)


def test_openai_s_client_and_a_process_that_ends_in_good_order(encoder, tmp_path: Path) -> None:
    own = dict(task="embed", max_batch_rows=32, max_new_tokens=512, precision="fp32")
    server = Process(tmp_path, **own).ready()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    expected = encoder.embed(TEXTS)
    for options in ({}, dict(encoding_format="float", user="me", dimensions=256)):
        found = client.embeddings.create(model="mini", input=TEXTS, **options)
        np.testing.assert_allclose(np.array([one.embedding for one in found.data]), expected, atol=1e-5)
    assert found.usage.total_tokens == found.usage.prompt_tokens > 20
    with pytest.raises(openai.BadRequestError) as error:
        client.embeddings.create(model="mini", input="word " * 100)
    assert (error.value.param, error.value.code) == ("input", "context_length_exceeded")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="gpt", input="a")
    client.close()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) in (0, -signal.SIGTERM) and "Traceback" not in server.log
    assert "tired" not in server.log
    server.end()
