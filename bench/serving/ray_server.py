"""Our engine behind Ray Serve's ``@serve.batch``, to be measured beside ours: run by the Python of its environment.

``make serving`` installs what stands in requirements/servers/ray.txt. Requests and answers are those of
``bench/serving/servers.py``, and so is the batch: at most 32 rows, collected for 20 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before ray is imported

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

ROWS, WINDOW_S = 32, 0.02


@serve.deployment(max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0.5})
class Batched:
    """One replica."""

    def __init__(self, export: str, threads: int):
        from t5accel.backends.ort_session import SessionSettings
        from t5accel.backends.ort_static import OrtStatic
        from t5accel.tokenization import tokenizer_of

        self.backend = OrtStatic(Path(export), settings=SessionSettings(threads=threads))
        self.tokenizer = tokenizer_of(export)

    @serve.batch(max_batch_size=ROWS, batch_wait_timeout_s=WINDOW_S)
    async def answers(self, asked: list[dict[str, Any]]) -> list[tuple[str, int]]:
        """One batch."""
        from bench.serving.servers import Asked, together

        return together(self.backend, self.tokenizer, [Asked(**fields) for fields in asked])

    async def __call__(self, request: Request) -> JSONResponse:
        """A request, or whether it is ready."""
        if request.method == "GET":
            return JSONResponse({"ready": True})
        text, tokens = await self.answers(json.loads(await request.body()))
        return JSONResponse({"answers": [{"texts": [text], "tokens": [tokens]}]})


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description="Serve an export by Ray, on 127.0.0.1.")
    parser.add_argument("export")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": args.port})
    serve.run(Batched.bind(args.export, args.threads), route_prefix="/")
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ended.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
