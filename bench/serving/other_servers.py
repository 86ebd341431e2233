"""The usual ways to put a T5 behind FastAPI, to be measured beside ours: request by request, and in static batches.

All answer the ``POST /generate`` of ``t5accel serve``, one text at a time and without beams:

    python -m bench.serving.other_servers static mini --port 8001

A **static batch** is collected while the one before it runs, and for a window after its first request came. Whoever
comes later waits until all of it is done, and so does whoever was done first.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, HTTPException, Request

from bench.serving.static_batch import Answered, Asked, together

MOST_ROWS, WINDOW_S = 32, 0.02


Answer = Callable[[Sequence[Asked]], list[Answered]]


class Batches:
    """Requests wait until a batch begins; the next one begins when all of it is done.

    Args:
        answer: answers a batch.
        most: requests in one.
        window_s: a batch that is not full begins so long after its first request came.

    >>> async def three() -> list[Answered]:
    ...     batches = Batches(lambda asked: [(one.text, len(asked)) for one in asked], most=2)
    ...     work = asyncio.create_task(batches.work())
    ...     found = await asyncio.gather(*[batches(Asked(text)) for text in "abc"])
    ...     work.cancel()
    ...     return found
    >>> asyncio.run(three())
    [('a', 2), ('b', 2), ('c', 1)]
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

    from t5accel.models.load import BUNDLED, data_folder, load_t5
    from t5accel.tokenization import tokenizer_of

    torch.set_num_threads(threads)
    loaded, _ = load_t5(model)
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
    """Our engine in fp32, for a batch."""
    from t5accel.api import open_backend

    backend, tokenizer, _ = open_backend(model, threads=threads, progress=False)
    return partial(together, backend, tokenizer)


KINDS: dict[str, Callable[[str, int], Batches]] = {
    "transformers": lambda model, threads: Batches(of_transformers(model, threads)),
    "one-by-one": lambda model, threads: Batches(of_our_engine(model, threads)),
    "static": lambda model, threads: Batches(of_our_engine(model, threads), most=MOST_ROWS, window_s=WINDOW_S),
}


def serve(batches: Batches, port: int) -> None:
    """On 127.0.0.1, until it is ended."""
    import uvicorn

    uvicorn.run(make_app(batches), host="127.0.0.1", port=port, log_level="warning", access_log=False)


def main() -> None:
    """Serve one of them."""
    from t5accel import machine

    parser = argparse.ArgumentParser(description="Serve a T5 in one of the usual ways, on 127.0.0.1.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("model", help="as of t5accel serve")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=machine.cpu_threads())
    args = parser.parse_args()
    serve(KINDS[args.kind](args.model, args.threads), args.port)


if __name__ == "__main__":
    main()
