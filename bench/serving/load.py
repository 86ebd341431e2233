"""Load on a server, in an open or a closed loop, with every latency kept."""

# An open loop sends at moments that were drawn beforehand, as people do who know nothing of each other; a latency
# counts from the intended moment. A closed loop sends when an answer has come: while a server stands still it sends
# nothing, so that a stall of a second is one slow request, not all those that would have come: it flatters the slow.

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np

from t5accel.checks import as_count, is_number
from t5accel.errors import InputError, MissingPackageError, install

HERE = ("127.0.0.1", "localhost", "::1")
MOST_REQUESTS = 100_000
LATE_S = 60.0  # after the last one was sent, answers are waited for so long


@dataclass(frozen=True)
class Load:
    """What is sent.

    >>> bool(Load("http://127.0.0.1:8000", [{"text": "a"}], rate_per_s=1000.0, seconds=2.0).moments()[-1] < 2)
    True
    """

    url: str  # of a server on this machine, such as ``"http://127.0.0.1:8000"``
    requests: Sequence[dict[str, Any]]  # JSON bodies; which one comes when is drawn
    rate_per_s: float | None = None  # of the open loop, on average; its gaps are exponential (a Poisson process)
    seconds: float = 10.0  # during which requests are sent
    clients: int | None = None  # in place of a rate: so many that each wait for their answers, the closed loop
    seed: int = 0  # of what is drawn. Two systems under equal loads get the same requests at the same moments
    path: str = "/generate"  # where they are posted, below the URL

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or not self.url.startswith(("http://", "https://")):
            raise InputError(f"url must begin with http://, got {self.url!r:.80}. Give one like http://127.0.0.1:8000.")
        if urlsplit(self.url).hostname not in HERE:
            raise InputError(f"url must be of a server on this machine ({', '.join(HERE)}), got {self.url!r:.80}.")
        if not self.requests:
            raise InputError("requests must hold at least one body, got none.")
        if (self.rate_per_s is None) == (self.clients is None):
            raise InputError("Give rate_per_s for an open loop, or clients for a closed one.")
        for name in ("seconds", "rate_per_s"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 0 < value < math.inf):
                raise InputError(f"{name} must be a number above 0, got {value!r}.")
        if self.clients is not None:
            as_count(self.clients, "clients", at_least=1)
        if self.rate_per_s is not None and (total := self.rate_per_s * self.seconds) > MOST_REQUESTS:
            raise InputError(f"rate_per_s * seconds must be at most {MOST_REQUESTS} requests, got {total:.0f}.")

    def moments(self) -> np.ndarray:
        """(n,) seconds from the start at which the open loop sends."""
        rng, most = np.random.default_rng(self.seed), int(2 * self.rate_per_s * self.seconds) + 100
        times = rng.exponential(1 / self.rate_per_s, most).cumsum()
        return times[times < self.seconds]


@dataclass
class Outcome:
    """What came of it."""

    latency_s: list[float] = field(default_factory=list)  # of the answers, from the intended moment to the last byte
    asked: list[int] = field(default_factory=list)  # for each of these, which of the requests it answers
    first_s: list[float] = field(default_factory=list)  # of answers that stream, to the first event
    # how many requests ended so; 0 for those that got no answer
    statuses: Counter[int] = field(default_factory=Counter)
    tokens: int = 0  # in all answers
    wall_s: float = 0.0  # from the first intended moment to the last answer
    generator_cpu: float = 0.0  # the share of one core that the generator took, which the server may have lacked
    sent_late_s: float = 0.0  # the most by which the generator itself was late

    def percentile_s(self, percent: float, among: Collection[int] | None = None) -> float:
        """Of the latencies, or of those of some requests; NaN without any."""
        found = self.latency_s if among is None else [
            latency for latency, number in zip(self.latency_s, self.asked, strict=True) if number in among
        ]  # fmt: skip
        return float(np.percentile(found, percent)) if found else math.nan

    def goodput_per_s(self, limit_s: float) -> float:
        """Answers a second that came within a limit."""
        return sum(latency <= limit_s for latency in self.latency_s) / self.wall_s

    def __str__(self) -> str:
        ends = ", ".join(f"{count} x {status or 'no answer'}" for status, count in sorted(self.statuses.items()))
        times = f"p50 {self.percentile_s(50) * 1e3:.0f} ms, p99 {self.percentile_s(99) * 1e3:.0f} ms; "
        return (
            f"{len(self.latency_s) / self.wall_s:.1f} answers/s, {self.tokens / self.wall_s:.0f} tokens/s, "
            f"{times if self.latency_s else ''}{ends}; generator: "
            f"{self.generator_cpu:.0%} of a core, at most {self.sent_late_s * 1e3:.0f} ms late"
        )


async def offer(load: Load) -> Outcome:
    """Send the load and wait for what comes of it."""
    try:
        import aiohttp
    except ImportError as error:
        raise MissingPackageError(f"aiohttp is missing: {install('serving')}.") from error
    outcome, rng = Outcome(), np.random.default_rng([load.seed, 1])
    timeout = aiohttp.ClientTimeout(total=load.seconds + LATE_S)
    started, cpu = time.perf_counter(), time.process_time()

    async def send(session: aiohttp.ClientSession, number: int, intended: float) -> None:
        outcome.sent_late_s = max(outcome.sent_late_s, time.perf_counter() - started - intended)
        try:
            async with session.post(load.url + load.path, json=load.requests[number]) as response:
                status = response.status
                if status == 200 and response.content_type == "text/event-stream":
                    last = await _last_event(response, outcome.first_s, started + intended)
                    if "error" in last:
                        status = 0
                    tokens = last.get("tokens", 0)
                else:
                    tokens = _said(json.loads(await response.read()))[1]
        except (aiohttp.ClientError, TimeoutError, ValueError):
            status, tokens = 0, 0
        outcome.statuses[status] += 1
        if status == 200:
            outcome.latency_s.append(time.perf_counter() - started - intended)
            outcome.asked.append(number)
            outcome.tokens += tokens

    def drawn() -> int:
        return int(rng.integers(len(load.requests)))

    async def ask_again_and_again(session: aiohttp.ClientSession) -> None:
        while (now := time.perf_counter() - started) < load.seconds and outcome.statuses.total() < MOST_REQUESTS:
            await send(session, drawn(), now)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        if load.clients is not None:
            await asyncio.gather(*[ask_again_and_again(session) for _ in range(load.clients)])
        else:
            async with asyncio.TaskGroup() as group:
                for moment in load.moments().tolist():
                    await asyncio.sleep(max(0.0, started + moment - time.perf_counter()))
                    group.create_task(send(session, drawn(), moment))
    outcome.wall_s = time.perf_counter() - started
    outcome.generator_cpu = (time.process_time() - cpu) / outcome.wall_s
    return outcome


async def _last_event(response: Any, first_s: list[float], intended: float) -> dict[str, Any]:
    """The last event of a stream; notes when the first one came."""
    last: dict[str, Any] = {}
    async for line in response.content:
        if line.startswith(b"data: "):
            if not last:
                first_s.append(time.perf_counter() - intended)
            last = json.loads(line[6:])
    return last


def ask(url: str, body: dict[str, Any], *, timeout_s: float = 60.0) -> tuple[str, int]:
    """One request, and the text and the number of tokens that it is answered with; of streams, all pieces joined.

    Args:
        timeout_s: without a byte.
    """
    asked = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(asked, timeout=timeout_s) as response:
        if response.headers.get_content_type() != "text/event-stream":
            return _said(json.load(response))
        events = [json.loads(line[6:]) for line in response if line.startswith(b"data: ")]
    return "".join(event.get("text", "") for event in events), _said(events[-1])[1]


def _said(content: dict[str, Any]) -> tuple[str, int]:
    """Text and tokens of an answer: of ours, which has one for each text, or of Triton's."""
    answers = content.get("answers") or [{"texts": [content.get("text", "")], "tokens": [content.get("tokens", 0)]}]
    return " ".join(text for one in answers for text in one["texts"]), sum(sum(one["tokens"]) for one in answers)
