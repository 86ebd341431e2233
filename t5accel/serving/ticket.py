"""A job on its way: what whoever submitted it holds, and the engine fills while others run."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from t5accel.decoding.job import Answer, Job
from t5accel.errors import CancelledError, DeadlineError


@dataclass(eq=False)
class Ticket:
    """The engine's thread writes, anybody may read.

    Attributes:
        job: what was asked.
        number: counts submitted jobs.
        submitted_s, deadline_s, joined_s, first_token_s, done_s: moments of the scheduler's clock; ``None``: not yet,
            or never.
        reused: its encoder output was there.
        tokens: of a job that streams, so far.
        answers: best first, when it is done.
        error: why there will be no answer.
        listener: called by the engine's thread when there is news; it must return soon and not raise.
        due_s: of whoever hands out news: more tokens before that moment can wait for others.

    >>> ticket = Ticket(Job([5, 1]), number=1, submitted_s=0.0)
    >>> ticket.cancel()
    >>> ticket.is_cancelled, ticket.is_done
    (True, False)
    """

    job: Job
    number: int
    submitted_s: float
    deadline_s: float | None = None
    joined_s: float | None = None
    first_token_s: float | None = None
    done_s: float | None = None
    reused: bool = False
    tokens: list[int] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    error: Exception | None = None
    listener: Callable[[], None] | None = field(default=None, repr=False)
    due_s: float = field(default=-math.inf, repr=False)
    is_cancelled: bool = False
    _done: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def is_done(self) -> bool:
        """Whether there are answers, or there is an error."""
        return self._done.is_set()

    def is_over(self, now: float) -> bool:
        """Whether nobody waits any more: it was cancelled, or its deadline has passed."""
        return self.is_cancelled or (self.deadline_s is not None and now >= self.deadline_s)

    def cancel(self) -> None:
        """Nobody waits any more: its rows are free from the next step on."""
        self.is_cancelled = True

    def result(self, timeout_s: float | None = None) -> list[Answer]:
        """Wait for the answers.

        Raises:
            DeadlineError, CancelledError, ShuttingDownError, EngineError: there are none.
            TimeoutError: not within ``timeout_s``; the job goes on.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"Request {self.number} is not done after {timeout_s} s.")
        if self.error is not None:
            raise self.error
        return self.answers

    def finish(self, now: float, answers: list[Answer] | None = None, error: Exception | None = None) -> None:
        """Of the scheduler: the last news."""
        self.answers, self.error, self.done_s = answers or [], error, now
        self._done.set()

    def reason_to_leave(self, now: float) -> Exception | None:
        """Why nobody waits any more, if `is_over`."""
        if self.is_cancelled:
            return CancelledError(f"Request {self.number} was cancelled.")
        if self.is_over(now):
            return DeadlineError(f"Request {self.number} was not done within its {self.job.deadline_s:g} s.")
        return None
