"""Malformed and oversized requests for fuzzing the server."""

from __future__ import annotations

import itertools
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

KINDS = 33
LONGEST_S = 30.0  # without a byte
# What a client sends that then neither writes nor reads: nothing, half a head, half a body, many small requests.
SILENT = (
    b"", b"GET /v1/models HTTP/1.1\r\nho", b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{",
    b"GET /health/ready HTTP/1.1\r\nhost: localhost\r\n\r\n" * 600,
)  # fmt: skip


@dataclass(frozen=True)
class FuzzReport:
    """What came of it."""

    statuses: Counter[int]  # of the answers
    cut_off: int  # requests that were answered by the end of the connection
    longest_s: float  # until the first byte, or the end
    live_s: float = 0.0  # the longest until ``/health/live`` was answered meanwhile, where that was asked


def fuzz_server(port: int, count: int = 200, *, at_once: int = 8) -> FuzzReport:
    """Send so many hostile requests to a server on this machine; each has to end within half a minute.

    >>> fuzz_server(9, 2).cut_off  # nobody listens there
    2
    """

    def one(seed: int) -> tuple[bytes, float]:
        began = time.perf_counter()
        return send(port, malformed_request(seed)), time.perf_counter() - began

    with ThreadPoolExecutor(at_once) as pool:
        return _survived(list(pool.map(one, range(count))))


def fuzz_under_load(port: int, seconds: float, *, at_once: int = 6, silent: int = 40) -> FuzzReport:
    """Send malformed requests beside connections that stall, and probe the health all the time."""
    contents = [malformed_request(seed) for seed in range(8 * KINDS)]  # beforehand: making them would delay the probe
    ends, numbers, answers, live = time.monotonic() + seconds, itertools.count(), [], []

    def attack() -> None:
        while time.monotonic() < ends:
            content, began = contents[next(numbers) % len(contents)], time.perf_counter()
            answers.append((send(port, content), time.perf_counter() - began))

    def hold() -> None:
        while time.monotonic() < ends:
            with ExitStack() as held:
                for number in range(silent):
                    with suppress(OSError):
                        held.enter_context(_silent(port, SILENT[number % len(SILENT)]))
                time.sleep(min(3.0, max(0.0, ends - time.monotonic())))

    def probe() -> None:
        while time.monotonic() < ends:
            began = time.perf_counter()
            answer = send(port, b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            live.append(time.perf_counter() - began)
            if b" 200 " not in answer[:16]:
                raise ConnectionError(f"/health/live is answered {answer[:80]!r}")
            time.sleep(0.05)

    with ThreadPoolExecutor(at_once + 2) as pool:
        for work in [pool.submit(one) for one in (probe, hold, *[attack] * at_once)]:
            work.result()
    return replace(_survived(answers), live_s=max(live))


def _survived(answers: list[tuple[bytes, float]]) -> FuzzReport:
    statuses = Counter(int(answer.split()[1]) for answer, _ in answers if answer)
    return FuzzReport(statuses, sum(not answer for answer, _ in answers), max(seconds for _, seconds in answers))


def _silent(port: int, content: bytes) -> socket.socket:
    """A connection that sends that, or as much as is taken, and reads nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    try:
        connection.connect(("127.0.0.1", port))
        connection.setblocking(False)
        with suppress(BlockingIOError):
            connection.send(content)
    except OSError:
        connection.close()
        raise
    return connection


def send(port: int, content: bytes) -> bytes:
    """The beginning of the answer; nothing where the server cut the connection. Raises ``TimeoutError``."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=LONGEST_S) as connection:
            connection.sendall(content)
            return connection.recv(65536)
    except TimeoutError:
        raise
    except OSError:
        return b""


def request(fields: dict[str, Any], path: str = "/generate") -> bytes:
    """A well-formed request with this body."""
    body = json.dumps(fields).encode()
    return head(f"content-length: {len(body)}", path=path) + body


def head(*lines: str, path: str = "/generate") -> bytes:
    """Of a request for an answer, with further lines."""
    first = (f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json")
    return "\r\n".join((*first, *lines, "", "")).encode()


def malformed_request(seed: int) -> bytes:
    """The request of this number; each of some thirty kinds comes again with other sizes."""
    rng = random.Random(seed)
    junk = bytes(rng.randrange(256) for _ in range(rng.choice([1, 40, 3000])))
    sizes = [0, 1, 255, 65_536, 70_000, 300_000]
    get = b"GET %s HTTP/1.1\r\nhost: localhost\r\n\r\n"
    chunked = head("transfer-encoding: chunked")
    kinds: list[Callable[[], bytes]] = [
        lambda: junk,
        lambda: get % (b"/" + junk.replace(b"\r", b"").replace(b"\n", b"")),
        lambda: get % b"/../../../../etc/passwd",
        lambda: get % b"/v1/models/..%2f..%2fetc%2fpasswd",
        lambda: head(f"content-length: {rng.choice([-1, 10**30, 99])}") + b"{}",
        lambda: head("content-length: 3", "content-length: 5") + b"{}   ",
        lambda: chunked + b"zz\r\n" + junk,
        lambda: chunked + b"ffffffff\r\n" + b"a" * 90_000,
        lambda: b"GET / HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(rng.choice([500, 9000]))) + b"\r\n",
        lambda: b"GET / HTTP/1.1\r\nhost: " + b"h" * 100_000 + b"\r\n\r\n",
        lambda: request(dict(text="a" * rng.choice(sizes))),
        lambda: request(dict(text=["a"] * rng.choice(sizes[:5]))),
        lambda: request(dict(text="\U0001f600\u202e\x00\ufeff" * rng.randrange(200), stream=rng.random() < 0.5)),
        lambda: request(dict(text="a", **{junk.decode("latin-1")[:40]: 1})),
        lambda: request(dict(text="a", num_beams=rng.choice([0, -1, 7, 10**9, 1e300, None, "4", [4], {"a": 1}]))),
        lambda: request(dict(text="a", max_new_tokens=rng.choice([0, 10**18, 2**63, -5]), do_sample=True, top_k=2**62)),
        lambda: request(
            dict(model="mini", prompt=rng.choice([None, {}, [[1, 2]], 7, "x" * 60_000])), "/v1/completions"
        ),
        lambda: request(json.loads('{"text":' + "[" * 200 + "]" * 200 + "}")),
        lambda: head("content-length: 60000") + b"[" * 60_000,
        lambda: head("connection: upgrade", "upgrade: websocket"),
        lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        lambda: b"TRACE /generate HTTP/1.0\r\n\r\n",
        lambda: request(dict(text="a", priority=10**6, deadline_s=1e-9)) * 9,
        # What costs a server the most for the fewest bytes.
        lambda: request(dict(text="\ufdfa" * rng.choice([100, 2_000, 300_000]), truncate=rng.random() < 0.5)),
        lambda: request(dict(text=["\ufdfa" * 9_000] * 9, truncate=True)),
        lambda: request(dict(text=[5] * 300_000)),
        lambda: request({f"field{i}": 1 for i in range(40_000)}),
        lambda: chunked + b"1\r\na\r\n" * 100_000,
        lambda: (
            get.replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n") % b"/health/live"
            + b"1\r\na\r\n" * 100_000
        ),
        lambda: head("content-length: 4", "transfer-encoding: chunked") + b"0\r\n\r\n",
        lambda: get.replace(b"localhost", b"evil.example") % b"/v1/models",
        lambda: request(dict(text="a")).replace(b"application/json", b"text/plain"),
        lambda: request(dict(text="a", num_beams=8, max_new_tokens=10**4)),
    ]
    return kinds[seed % KINDS]()
