"""What the server counts, in the words of Prometheus. Tokens a second are ``rate(t5accel_tokens_total[1m])``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from t5accel.serve.scheduler import Scheduler

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TIMES = {
    "step_s": ("t5accel_token_seconds", "One step of the batch: what each running answer waits for its next token"),
    "first_token_s": ("t5accel_first_token_seconds", "From a request to its first token"),
    "total_s": ("t5accel_request_seconds", "From a request to the end of its answer"),
    "queue_s": ("t5accel_queue_seconds", "From a request until its source is encoded"),
    "stall_s": ("t5accel_stall_seconds", "Running answers waited for newcomers to be encoded"),
}


class Metrics:
    """Counters of one server; its registry is its own, so that a process may have several.

    >>> metrics = Metrics()
    >>> metrics.observe("tokens", 3)
    >>> "t5accel_tokens_total 3.0" in metrics.text().decode()
    True
    """

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._times = {name: Histogram(*words, buckets=SECONDS, registry=registry) for name, words in TIMES.items()}
        self._tokens = Counter("t5accel_tokens", "Of all rows, each beam counted", registry=registry)
        self._answered = Counter("t5accel_answers", "Requests whose answers are complete", registry=registry)
        self._failed = Counter("t5accel_failed", "Requests without an answer, by reason", ["reason"], registry=registry)
        self._responses = Counter("t5accel_responses", "By route and status", ["route", "status"], registry=registry)

    def watch(self, scheduler: Scheduler) -> None:
        """Show what a scheduler knows at the moment it is asked."""
        for name, what, value in (
            ("queue", "Requests that wait", lambda: scheduler.waiting),
            ("running", "Requests at work", lambda: scheduler.running),
            ("rows", "Rows of the batch", lambda: scheduler.rows),
            ("encoder_hits", "Sources whose encoder output was there", lambda: scheduler.reused),
            ("encoder_misses", "Sources that were encoded", lambda: scheduler.encoded),
            ("engine_failures", "Rounds in which the engine raised", lambda: scheduler.failures),
        ):
            Gauge(f"t5accel_{name}", what, registry=self._registry).set_function(value)

    def observe(self, name: str, value: float) -> None:
        """As the scheduler's ``observe``: a time, ``tokens``, ``finished``, or the name of an error."""
        if name in self._times:
            self._times[name].observe(value)
        elif name in ("tokens", "finished"):
            (self._tokens if name == "tokens" else self._answered).inc(value)
        else:
            self._failed.labels(name).inc(value)

    def responded(self, route: str, status: int) -> None:
        """A response has begun."""
        self._responses.labels(route, str(status)).inc()

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)
