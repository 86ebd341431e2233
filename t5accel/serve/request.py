"""A validated generation request, its result, and the handle of a submitted request."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from t5accel.checks import as_count, as_integers, is_number
from t5accel.decoding.sampling import SamplingParams
from t5accel.errors import CancelledError, DeadlineError, InputError

MOST_PRIORITY = 1_000_000


@dataclass(frozen=True)
class GenerationRequest:
    """One source and its generation options, named as in `greedy`, `beam_search` and `sample`.

    Attributes:
        input_ids: (S,) integers without padding.
        seed: the same request draws the same tokens, whatever else runs.
        num_return_sequences: the best of the beams, or the number of samples.
        deadline_s: seconds from submission to the complete result.
        stream: whether the handle gets each token. Not for beams.
        stopping_criterion: called with the tokens after each new one; ``True`` ends the result. Not for beams.

    Raises:
        InputError: a value is wrong, or two contradict each other.

    >>> GenerationRequest([100, 200, 1], num_beams=2).rows
    2
    """

    input_ids: Any
    max_new_tokens: int = 64
    min_new_tokens: int | None = None
    num_beams: int = 1
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    sampling: SamplingParams | None = None
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
        if self.sampling is not None and not isinstance(self.sampling, SamplingParams):
            raise InputError(
                f"sampling is {self.sampling!r:.80}; give a SamplingParams, or None for the likeliest tokens."
            )
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
        """Arguments of `GenerationInputs.checked`, by name."""
        names = ("max_new_tokens", "min_new_tokens", "forced_bos_token_id", "decoder_start_token_id")
        return {name: getattr(self, name) for name in names}

    @property
    def rows(self) -> int:
        """Rows that the request takes in the batch."""
        return self.num_return_sequences if self.sampling is not None else self.num_beams


@dataclass(frozen=True)
class GenerationResult:
    """One generated sequence, with its end token, and its score for beams.

    ``ended``: by an end token or the stopping criterion, not by the maximum length.
    """

    tokens: list[int]
    ended: bool
    score: float | None = None


@dataclass(eq=False)
class RequestHandle:
    """Handle to a submitted request; filled in by the engine's thread, readable from any.

    Attributes:
        submitted_s, deadline_s, joined_s, first_token_s, done_s: times of the scheduler's clock; ``None``: not reached.
        reused: whether the encoder output came from the cache.
        tokens: so far, if the request streams.
        answers: best first, when done.
        listener: called by the engine's thread at every update; it must return soon and not raise.
        next_event_at: earliest time of the next stream event.

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
        """Whether there are results or an error."""
        return self._done.is_set()

    def is_over(self, now: float) -> bool:
        """Whether the request was cancelled or its deadline has passed."""
        return self.is_cancelled or (self.deadline_s is not None and now >= self.deadline_s)

    def cancel(self) -> None:
        """Free the request's rows at the next step."""
        self.is_cancelled = True

    def result(self, timeout_s: float | None = None) -> list[GenerationResult]:
        """Wait for the results.

        Raises:
            DeadlineError, CancelledError, ShuttingDownError, EngineError: the request failed.
            TimeoutError: not done within ``timeout_s``; the request continues.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"Request {self.number} is not done after {timeout_s} s.")
        if self.error is not None:
            raise self.error
        return self.answers

    def finish(self, now: float, answers: list[GenerationResult] | None = None, error: Exception | None = None) -> None:
        """Set the results or the error; called by the scheduler."""
        self.answers, self.error, self.done_s = answers or [], error, now
        self._done.set()

    def cancellation_error(self, now: float) -> Exception | None:
        """The error of a cancelled or late request."""
        if self.is_cancelled:
            return CancelledError(f"Request {self.number} was cancelled.")
        if self.is_over(now):
            return DeadlineError(f"Request {self.number} was not done within its {self.job.deadline_s:g} s.")
        return None
