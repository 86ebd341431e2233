"""Servers as processes of this machine: started, asked until they are ready, watched, and ended."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from fastapi import FastAPI, HTTPException, Request

from t5accel.decoding.backend import Backend
from t5accel.errors import PeerError
from t5accel.serve.limits import SchedulerLimits
from t5accel.serve.request import GenerationRequest
from t5accel.serve.scheduler import Scheduler

# A static batch: requests that begin together and end together, as most servers that batch do it.


@dataclass(frozen=True)
class Asked:
    """A text and the bounds of its answer."""

    text: str
    max_new_tokens: int = 64
    min_new_tokens: int = 0


Answered = tuple[str, int]  # a text, and how many tokens it has


def together(backend: Backend, tokenizer: Any, asked: Sequence[Asked]) -> list[Answered]:
    """Answer all as one batch, which ends with its longest answer; rows that have ended leave it."""
    batch = tokenizer([one.text for one in asked], return_tensors="np", padding=True)
    rows = [ids[mask == 1] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    limits = SchedulerLimits(rows=len(asked), source_tokens=10**6, new_tokens=10**6, encoder_cache_bytes=0)
    scheduler = Scheduler(backend, limits, thread=False)
    tickets = scheduler.submit_all([
        GenerationRequest(row, max_new_tokens=one.max_new_tokens, min_new_tokens=one.min_new_tokens)
        for row, one in zip(rows, asked, strict=True)
    ])  # fmt: skip
    while scheduler.step():
        pass
    tokens = [ticket.result(0)[0].tokens for ticket in tickets]
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return [(text, len(row)) for text, row in zip(texts, tokens, strict=True)]


# A **static batch** is collected while the one before it runs, and for a window after its first request came. A
# later request waits until the whole batch is done, and so does an answer that was done first.


MOST_ROWS, WINDOW_S = 32, 0.02


Answer = Callable[[Sequence[Asked]], list[Answered]]


class Batches:
    """Requests wait until a batch begins; the next one begins when all of it is done.

    Args:
        window_s: a batch that is not full begins so long after its first request came.
    """

    def __init__(self, answer: Answer, *, most: int = 1, window_s: float = 0.0):
        self._answer, self._most, self._window_s = answer, most, window_s
        self._waiting: asyncio.Queue[tuple[float, Asked, asyncio.Future[Answered]]] = asyncio.Queue()

    async def __call__(self, asked: Asked) -> Answered:
        """Its answer, when its batch is done; raises what the batch fails with."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.put_nowait((loop.time(), asked, future))
        return await future

    async def work(self) -> None:
        """Batch after batch, until it is cancelled."""
        while True:
            batch = await self._collected()
            try:
                found = await asyncio.to_thread(self._answer, [asked for _, asked, _ in batch])
            except Exception as error:
                for _, _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, _, future), answered in zip(batch, found, strict=True):
                if not future.done():  # its client is there
                    future.set_result(answered)

    async def _collected(self) -> list[tuple[float, Asked, asyncio.Future[Answered]]]:
        batch = [await self._waiting.get()]
        ends = batch[0][0] + self._window_s
        while len(batch) < self._most:
            left = ends - asyncio.get_running_loop().time()
            if self._waiting.empty() and left <= 0:
                break
            try:
                batch.append(await asyncio.wait_for(self._waiting.get(), max(left, 1e-3)))
            except TimeoutError:
                break
        return batch


def make_app(batches: Batches) -> FastAPI:
    """FastAPI in front of it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        work = asyncio.create_task(batches.work())
        yield
        work.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.post("/generate")
    async def generate(request: Request) -> dict[str, Any]:
        try:
            asked = Asked(**await request.json())
        except (TypeError, ValueError) as error:
            raise HTTPException(422, f"Not a request: {error}") from error
        text, tokens = await batches(asked)
        return {"answers": [{"texts": [text], "tokens": [tokens]}]}

    @app.get("/health/ready")
    async def ready() -> dict[str, bool]:
        return {"ready": True}

    return app


def of_transformers(model: str, threads: int) -> Answer:
    """``generate()`` of a model of transformers in fp32 with its cache, for one text."""
    import torch

    from t5accel.models.load import BUNDLED, data_folder, load_model
    from t5accel.tokenization import tokenizer_of

    torch.set_num_threads(threads)
    loaded, _ = load_model(model)
    tokenizer = tokenizer_of(data_folder() / BUNDLED[model] if model in BUNDLED else model)

    def answer(asked: Sequence[Asked]) -> list[Answered]:
        (one,) = asked
        batch = {name: torch.from_numpy(array) for name, array in tokenizer([one.text]).items()}
        with torch.inference_mode():
            found = loaded.generate(**batch, do_sample=False, num_beams=1, max_new_tokens=one.max_new_tokens,
                                    min_new_tokens=one.min_new_tokens)[:, 1:]  # fmt: skip
        return [(tokenizer.batch_decode(found.numpy(), skip_special_tokens=True)[0], found.shape[1])]

    return answer


def of_our_engine(model: str, threads: int) -> Answer:
    """Our engine in fp32, for a batch; ``model`` may be the folder of an export."""
    from t5accel.api import open_backend

    backend, tokenizer, _ = open_backend(model, threads=threads, progress=False)
    return partial(together, backend, tokenizer)


def of_reader(args: argparse.Namespace) -> Answer:
    """A reader: a graph (``.onnx``) on ONNX Runtime, else PyTorch. The text is "question: … context: …"."""
    from bench.bert.reader import reader_of

    read = reader_of(args.model, args.tokenizer, args.threshold, threads=args.threads, bound=args.bound)
    return lambda asked: [(text, len(text.split())) for text in read([one.text for one in asked])]


ROOT = Path(__file__).resolve().parents[2]
READY_WITHIN_S = 120.0


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass(frozen=True)
class Server:
    """How a server is started, and how it is asked."""

    name: str  # what a reader calls it
    command: Sequence[str]  # ``{port}`` stands for the port, in arguments and in ``environment``
    base: str = ""  # of the URL, behind the port
    path: str = "/generate"  # where requests are posted, behind that; and ``ready`` is where it says that it is ready
    ready: str = "/health/ready"
    streams: bool = False  # whether it can hand out a token before the answer is complete
    # what the process has beyond ours; ``None`` takes away
    environment: Mapping[str, str | None] = field(default_factory=dict)
    precision: str = "fp32"  # of the weights. In fp32 its answers have to be those of our engine


def ours(model: str, *, precision: str = "fp32", name: str | None = None, **flags: Any) -> Server:
    """``t5accel serve``: continuous batching.

    >>> ours("mini", max_batch_rows=8).command[2:]
    ['t5accel', 'serve', '--model=mini', '--precision=fp32', '--port={port}', '--max-batch-rows=8']
    """
    given = [f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items()]
    options = [f"--model={model}", f"--precision={precision}", "--port={port}"]
    command = [sys.executable, "-m", "t5accel", "serve", *options]
    return Server(name or "t5accel serve", [*command, *given], streams=True, precision=precision)


def kind_command(kind: str, model: str, *, threads: int, python: str = sys.executable) -> list[str]:
    """Start one of `KINDS`, or "ray"."""
    return [python, "-m", "bench.serving.servers", kind, model, "--port={port}", f"--threads={threads}"]


def other(kind: str, model: str, *, name: str, threads: int) -> Server:
    """One of `KINDS`, by the name that rows have."""
    return Server(name, kind_command(kind, model, threads=threads))


class Running:
    """A server that runs, until the ``with`` block ends.

    Attributes:
        url: what requests go to, without the path.
        started_s: from the start of the process until it was ready.
    """

    def __init__(self, server: Server, log: Path, port: int | None = None):
        self.server, self.log, self.port = server, log, port or free_port()
        self.url = f"http://127.0.0.1:{self.port}{server.base}"
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment: dict[str, str | None] = {**os.environ, "PYTHONPATH": path, **server.environment}
        began = time.perf_counter()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [part.replace("{port}", str(self.port)) for part in server.command],
                stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env={name: value for name, value in environment.items() if value is not None},
            )  # fmt: skip
        try:
            self._until_ready()
        except BaseException:
            self.end()
            raise
        self.started_s = time.perf_counter() - began

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()

    def _until_ready(self) -> None:
        ends = time.perf_counter() + READY_WITHIN_S
        while time.perf_counter() < ends:
            if (status := self.process.poll()) is not None:
                said = self.log.read_text(errors="replace")[-2000:]
                raise PeerError(f"{self.server.name} ended with exit status {status} before it was ready: {said}")
            try:
                with urlopen(f"http://127.0.0.1:{self.port}{self.server.ready}", timeout=5) as response:
                    if response.status == 200:
                        return
            except (URLError, OSError):
                time.sleep(0.02)
        raise PeerError(f"{self.server.name} was not ready within {READY_WITHIN_S:g} s.")

    def kill(self) -> None:
        """At once, as a machine that fails."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """In order, if it ends within twenty seconds; else at once."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()


# The usual servers, each a kind: request by request, in static batches, behind Ray, and the BERT study's reader. All
# answer the ``POST /generate`` of ``t5accel serve``, one text at a time and without beams:
#     python -m bench.serving.servers static mini --port 8001


def serve_by_ray(args: argparse.Namespace) -> None:
    """Our engine behind Ray Serve's ``@serve.batch``, until SIGTERM; by the Python of its environment."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before ray is imported
    import ray
    from ray import serve
    from starlette.responses import JSONResponse

    @serve.deployment(max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0.5})
    class Batched:
        def __init__(self, export: str, threads: int):
            from bench.serving.servers import of_our_engine  # in the replica, which does not know this program

            self.answer = of_our_engine(export, threads)

        @serve.batch(max_batch_size=MOST_ROWS, batch_wait_timeout_s=WINDOW_S)
        async def answers(self, asked: list[dict[str, Any]]) -> list[Answered]:
            from bench.serving.servers import Asked

            return self.answer([Asked(**fields) for fields in asked])

        async def __call__(self, request: Any) -> JSONResponse:
            if request.method == "GET":
                return JSONResponse({"ready": True})
            text, tokens = await self.answers(await request.json())
            return JSONResponse({"answers": [{"texts": [text], "tokens": [tokens]}]})

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": args.port})
    serve.run(Batched.bind(args.model, args.threads), route_prefix="/")
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ended.wait()
    serve.shutdown()
    ray.shutdown()


KINDS: dict[str, Callable[[argparse.Namespace], Answer]] = {
    "transformers": lambda args: of_transformers(args.model, args.threads),
    "one-by-one": lambda args: of_our_engine(args.model, args.threads),
    "static": lambda args: of_our_engine(args.model, args.threads),
    "bert": of_reader,
}


def main() -> None:
    """Serve one of them, until it is ended."""
    import uvicorn

    from t5accel import machine

    parser = argparse.ArgumentParser(description="Serve a model in one of the usual ways, on 127.0.0.1.")
    parser.add_argument("kind", choices=[*KINDS, "ray"])
    parser.add_argument("model", help="t5accel serve's --model; with ray an export; with bert also a graph (.onnx)")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=machine.cpu_threads())
    parser.add_argument("--tokenizer", help="of bert: its folder")
    parser.add_argument("--threshold", type=float, default=0.0, help="of bert: by which no answer must score higher")
    parser.add_argument("--bound", action="store_true", help="of bert: a graph on memory that stays")
    args = parser.parse_args()
    if args.kind == "ray":
        return serve_by_ray(args)
    how = {"most": MOST_ROWS, "window_s": WINDOW_S} if args.kind == "static" else {}  # else request by request
    app = make_app(Batches(KINDS[args.kind](args), **how))
    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
