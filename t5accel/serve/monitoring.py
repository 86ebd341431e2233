"""Log lines and Prometheus metrics of the server."""

# Tokens a second are ``rate(t5accel_tokens_total[1m])``.

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from t5accel.serve.scheduler import Scheduler

Level = Literal["debug", "info", "warning", "error", "critical"]
Form = Literal["text", "json"]
TEXT_FORMAT = "text/plain; version=0.0.4"  # of `Metrics.text`
TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
log = logging.getLogger("t5accel.serve")
open_log = logging.getLogger("t5accel.serve.open")  # refusals, and requests without a key: few lines a second

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TIMES = {
    "step_s": ("t5accel_token_seconds", "One step of the batch: what each running answer waits for its next token"),
    "first_token_s": ("t5accel_first_token_seconds", "From a request to its first token"),
    "total_s": ("t5accel_request_seconds", "From a request to the end of its answer"),
    "queue_s": ("t5accel_queue_seconds", "From a request until its source is encoded"),
    "stall_s": ("t5accel_stall_seconds", "Running answers waited for newcomers to be encoded"),
}
GAUGES = {  # by the scheduler's attribute
    "waiting": ("t5accel_queue", "Requests that wait"),
    "running": ("t5accel_running", "Requests at work"),
    "rows": ("t5accel_rows", "Rows of the batch"),
    "reused": ("t5accel_encoder_hits", "Sources whose encoder output was there"),
    "encoded": ("t5accel_encoder_misses", "Sources that were encoded"),
    "failures": ("t5accel_engine_failures", "Rounds in which the engine raised"),
}


class JsonFormatter(logging.Formatter):
    """One JSON object per line, tracebacks included; times are UTC."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        content = {
            "time": f"{moment}.{int(record.created % 1 * 1e3):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return json.dumps(content, ensure_ascii=False)


def configure(level: Level, form: Form) -> None:
    """Log to standard error, unless the process has handlers."""
    if logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    threading.excepthook = _log_uncaught


def _log_uncaught(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread else "?"
    error = (args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)
    log.critical("Thread %s ended.", name, exc_info=error)


class RateLimit(logging.Filter):
    """A limit of records per second: clients cannot fill a disk.

    >>> limit, record = RateLimit(most=2), logging.makeLogRecord({"msg": "bad request"})
    >>> [limit.filter(record) for _ in range(4)]
    [True, True, False, False]
    """

    def __init__(self, most: int = 5):
        super().__init__()
        self._most, self._since_s, self._seen = most, -1.0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write a record; the next one counts omitted lines."""
        now = time.monotonic()
        if now - self._since_s >= 1:
            left_out, self._since_s, self._seen = max(0, self._seen - self._most), now, 0
            if left_out:
                record.msg, record.args = f"{record.getMessage()} (and {left_out} lines before it)", ()
        self._seen += 1
        return self._seen <= self._most


class Metrics:
    """Counters of one server, in a registry for it alone: a process may have several."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._times = {name: Histogram(*words, buckets=SECONDS, registry=registry) for name, words in TIMES.items()}
        self._tokens = Counter("t5accel_tokens", "Of all rows, each beam counted", registry=registry)
        self._answered = Counter("t5accel_answers", "Requests whose answers are complete", registry=registry)
        self._failed = Counter("t5accel_failed", "Requests without an answer, by reason", ["reason"], registry=registry)
        self._responses = Counter("t5accel_responses", "By route and status", ["route", "status"], registry=registry)

    def watch(self, scheduler: Scheduler) -> None:
        for attribute, words in GAUGES.items():
            gauge = Gauge(*words, registry=self._registry)
            gauge.set_function(lambda attribute=attribute: getattr(scheduler, attribute))

    def observe(self, name: str, value: float) -> None:
        """Count an observation of the scheduler: a time, tokens, or an error."""
        if name in self._times:
            self._times[name].observe(value)
        elif name in ("tokens", "finished"):
            (self._tokens if name == "tokens" else self._answered).inc(value)
        else:
            self._failed.labels(name).inc(value)

    def responded(self, route: str, status: int) -> None:
        self._responses.labels(route, str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)
