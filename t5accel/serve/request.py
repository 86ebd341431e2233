"""What a source is to be answered with: one job, checked at the door, and its answers."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from t5accel.checks import as_count, as_integers, is_number
from t5accel.decoding.sampling import Sampling
from t5accel.errors import CancelledError, DeadlineError, InputError

MOST_PRIORITY = 1_000_000


@dataclass(frozen=True)
class GenerationRequest:
    """One source and how it is to be answered.

    Attributes:
        input_ids: (S,) integers, the source's tokens without padding.
        max_new_tokens, min_new_tokens, length_penalty, early_stopping: as of `beam.beam_search`.
        num_beams: 1 is greedy search.
        sampling: where given, tokens are drawn (`sampling.sample`), and there is one beam.
        seed: of what is drawn. The same job draws the same tokens, whatever runs beside it.
        num_return_sequences: the best answers of as many beams, or so many drawn ones.
        priority: the higher goes first; among equals the first to come.
        deadline_s: from the moment it is submitted until its answer must be complete.
        stream: whether the ticket tells of each token, and not only of the end. Beams cannot.
        stopping_criterion: called with an answer's tokens after each; ``True`` ends the answer. Not for beams.
        forced_bos_token_id, decoder_start_token_id: see `greedy.greedy`.

    Raises:
        InputError: a value is wrong, or two of them contradict each other.

    >>> GenerationRequest([100, 200, 1], num_beams=2).rows
    2
    """

    input_ids: Any
    max_new_tokens: int = 64
    min_new_tokens: int | None = None
    num_beams: int = 1
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    sampling: Sampling | None = None
    seed: int = 0
    num_return_sequences: int = 1
    priority: int = 0
    deadline_s: float | None = None
    stream: bool = False
    stopping_criterion: Callable[[Sequence[int]], bool] | None = None
    forced_bos_token_id: int | None = None
    decoder_start_token_id: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_beams", 1), ("num_return_sequences", 1), ("seed", 0)):
            as_count(getattr(self, name), name, at_least=least)
        as_count(self.priority, "priority", at_least=-MOST_PRIORITY)
        if self.priority > MOST_PRIORITY:
            raise InputError(f"priority is {self.priority}; give {-MOST_PRIORITY} … {MOST_PRIORITY}.")
        object.__setattr__(self, "input_ids", np.array(as_integers(self.input_ids, "input_ids", rank=1)))
        if self.deadline_s is not None and not (is_number(self.deadline_s) and 0 < self.deadline_s < 1e9):
            raise InputError(f"deadline_s is {self.deadline_s!r}; give seconds, more than 0, or None.")
        if self.sampling is not None and not isinstance(self.sampling, Sampling):
            raise InputError(f"sampling is {self.sampling!r:.80}; give a Sampling, or None for the likeliest tokens.")
        if self.sampling is not None and self.num_beams > 1:
            raise InputError("sampling and num_beams are given: tokens are drawn, or beams are searched.")
        if self.sampling is None and self.num_return_sequences > self.num_beams:
            raise InputError(
                f"num_return_sequences is {self.num_return_sequences}: give at most num_beams, {self.num_beams}, or a "
                "sampling."
            )
        if self.stream and (self.num_beams > 1 or self.num_return_sequences > 1):
            raise InputError(
                "stream is for one answer without beams: which of several beams wins is not certain before the end."
            )
        if self.stopping_criterion is not None and self.num_beams > 1:
            raise InputError("stop is for answers without beams: set num_beams to 1, or leave stop out.")

    @property
    def bounds(self) -> dict[str, int | None]:
        """What `GenerationInputs.checked` checks of it, by name."""
        names = ("max_new_tokens", "min_new_tokens", "forced_bos_token_id", "decoder_start_token_id")
        return {name: getattr(self, name) for name in names}

    @property
    def rows(self) -> int:
        """How many rows of the batch it takes."""
        return self.num_return_sequences if self.sampling is not None else self.num_beams


@dataclass(frozen=True)
class GenerationResult:
    """One answer: its tokens, the end token included where there is one, and the score that beams give it.

    ``ended`` is whether it ended before its upper bound: by an end token, or by the job's stopping criterion.
    """

    tokens: list[int]
    ended: bool
    score: float | None = None


# A job on its way: what whoever submitted it holds, and the engine fills while others run.


@dataclass(eq=False)
class RequestHandle:
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
        next_event_at: of whoever hands out news: more tokens before that moment can wait for others.

    >>> ticket = RequestHandle(GenerationRequest([5, 1]), number=1, submitted_s=0.0)
    >>> ticket.cancel()
    >>> ticket.is_cancelled, ticket.is_done
    (True, False)
    """

    job: GenerationRequest
    number: int
    submitted_s: float
    deadline_s: float | None = None
    joined_s: float | None = None
    first_token_s: float | None = None
    done_s: float | None = None
    reused: bool = False
    tokens: list[int] = field(default_factory=list)
    answers: list[GenerationResult] = field(default_factory=list)
    error: Exception | None = None
    listener: Callable[[], None] | None = field(default=None, repr=False)
    next_event_at: float = field(default=-math.inf, repr=False)
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

    def result(self, timeout_s: float | None = None) -> list[GenerationResult]:
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

    def finish(self, now: float, answers: list[GenerationResult] | None = None, error: Exception | None = None) -> None:
        """Of the scheduler: the last news."""
        self.answers, self.error, self.done_s = answers or [], error, now
        self._done.set()

    def cancellation_error(self, now: float) -> Exception | None:
        """Why nobody waits any more, if `is_over`."""
        if self.is_cancelled:
            return CancelledError(f"Request {self.number} was cancelled.")
        if self.is_over(now):
            return DeadlineError(f"Request {self.number} was not done within its {self.job.deadline_s:g} s.")
        return None
