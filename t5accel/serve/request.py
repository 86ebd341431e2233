"""A generation request, its result, and the handle of a submitted request."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from t5accel.checks import as_count, as_integers, is_number
from t5accel.decoding.sampling import SamplingParams
from t5accel.errors import CancelledError, DeadlineError, InputError

MOST_PRIORITY = 1_000_000
_LEAST = dict(
    max_new_tokens=1, min_new_tokens=0, num_beams=1, num_return_sequences=1, seed=0, index=0, priority=-MOST_PRIORITY,
    forced_bos_token_id=0, decoder_start_token_id=0,
)  # fmt: skip
HEAD_START_S = 10.0  # of the highest priority: bounded, so that no request starves


def set_counts(own: Any, least: Mapping[str, int]) -> None:
    """Keep the integers of a frozen dataclass as Python's, whose sums are exact; None may be a field's default."""
    for name, at_least in least.items():
        value = getattr(own, name)
        if value is not None or getattr(type(own), name) is not None:
            object.__setattr__(own, name, as_count(value, name, at_least=at_least))


@dataclass(frozen=True)
class GenerationRequest:
    """One source and its options, named as in `greedy` and `beam_search`.

    >>> GenerationRequest([100, 200, 1], num_beams=2).rows
    2
    """

    input_ids: Any  # (S,) integers without padding
    max_new_tokens: int = 64
    min_new_tokens: int | None = None
    num_beams: int = 1
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    sampling: SamplingParams | None = None
    seed: int = 0  # the same request draws the same tokens, whatever else runs
    index: int = 0  # of the source among those that share the seed: each draws its own tokens, as in `sample`
    num_return_sequences: int = 1  # the best of the beams, or the number of samples
    priority: int = 0
    deadline_s: float | None = None  # from submission to the complete result
    stream: bool = False  # whether the handle gets each token
    stopping_criterion: Callable[[Sequence[int]], bool] | None = None  # asked after each token; True ends the result
    forced_bos_token_id: int | None = None
    decoder_start_token_id: int | None = None

    def __post_init__(self) -> None:
        set_counts(self, _LEAST)
        if self.priority > MOST_PRIORITY:
            raise InputError(f"priority must be {-MOST_PRIORITY} … {MOST_PRIORITY}, got {self.priority}.")
        object.__setattr__(self, "input_ids", np.array(as_integers(self.input_ids, "input_ids", rank=1)))
        if not self.input_ids.size:
            raise InputError("input_ids must have at least one token, got none.")
        if self.deadline_s is not None:
            if not (is_number(self.deadline_s) and 0 < self.deadline_s < 1e9):
                raise InputError(f"deadline_s must be seconds above 0, or None, got {self.deadline_s!r}.")
            object.__setattr__(self, "deadline_s", float(self.deadline_s))
        if self.sampling is not None and not isinstance(self.sampling, SamplingParams):
            raise InputError(f"sampling must be SamplingParams, or None for greedy search, got {self.sampling!r:.80}.")
        if self.sampling is not None and self.num_beams > 1:
            raise InputError(f"num_beams must be 1 with sampling, got {self.num_beams}. Leave one of them out.")
        if self.sampling is None and self.num_return_sequences > self.num_beams:
            raise InputError(
                f"num_return_sequences must be at most num_beams, {self.num_beams}, without sampling, got "
                f"{self.num_return_sequences}."
            )
        # Which of several beams wins is not certain before the end.
        for name, given in (("stream", self.stream), ("stop", self.stopping_criterion)):
            if given and self.num_beams > 1:
                raise InputError(f"num_beams must be 1 with {name}, got {self.num_beams}. Leave one of them out.")
        if self.stream and self.num_return_sequences > 1:
            raise InputError(f"num_return_sequences must be 1 with stream, got {self.num_return_sequences}.")

    @property
    def bounds(self) -> dict[str, int | None]:
        """Arguments of `checked_bounds`, by name."""
        names = ("max_new_tokens", "min_new_tokens", "forced_bos_token_id", "decoder_start_token_id")
        return {name: getattr(self, name) for name in names}

    @property
    def rows(self) -> int:
        return self.num_return_sequences if self.sampling is not None else self.num_beams

    @property
    def most_tokens(self) -> int:
        """Upper bound of the work: source and new tokens, times rows."""
        return self.rows * (len(self.input_ids) + self.max_new_tokens)


@dataclass(frozen=True)
class GenerationResult:
    """One generated sequence, with its end token, and its score for beams."""

    tokens: list[int]
    ended: bool  # by an end token or the stopping criterion, not by the maximum length
    score: float | None = None


@dataclass(eq=False)
class RequestHandle:
    """A submitted request; filled in by the engine's thread, readable from any.

    Times are those of the scheduler's clock; ``None``: not reached.
    """

    request: GenerationRequest
    number: int
    submitted_s: float
    deadline_s: float | None = None
    sequences: Sequence[Any] = field(default=(), repr=False)  # one for each result, or the K beams as one
    joined_s: float | None = None
    first_token_s: float | None = None
    done_s: float | None = None
    reused: bool = False  # the encoder output came from the cache
    tokens: list[int] = field(default_factory=list)  # so far, if the request streams
    answers: list[GenerationResult] = field(default_factory=list)  # best first, when done
    error: Exception | None = None
    # Called by the engine's thread at every update; it must return soon and not raise.
    listener: Callable[[], None] | None = field(default=None, repr=False)
    next_event_at: float = field(default=-math.inf, repr=False)  # earliest time of the next stream event
    is_cancelled: bool = False
    _done: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def place(self) -> tuple[float, int]:
        """The key that sorts the queue: the older first, after head starts."""
        priority = self.request.priority
        return self.submitted_s - HEAD_START_S * priority / (1 + abs(priority)), self.number

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def cancel(self) -> None:
        """Free the request's rows at the next step."""
        self.is_cancelled = True

    def result(self, timeout_s: float | None = None) -> list[GenerationResult]:
        """Wait for the results, or raise the request's error.

        ``TimeoutError``: not done within ``timeout_s``; the request continues.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"Request {self.number} is not done after {timeout_s} s.")
        if self.error is not None:
            raise self.error
        return self.answers

    def finish(self, now: float, answers: list[GenerationResult] | None = None, error: Exception | None = None) -> None:
        """Set the results or the error; called by the scheduler."""
        self.answers, self.error, self.done_s = answers or [], error, now
        self.sequences = ()  # whose owner this is: no circle keeps their memory
        self._done.set()

    def cancellation_error(self, now: float) -> Exception | None:
        """The error of a cancelled or late request."""
        if self.is_cancelled:
            return CancelledError(f"Request {self.number} was cancelled.")
        if self.deadline_s is not None and now >= self.deadline_s:
            return DeadlineError(f"Request {self.number} was not done within its {self.request.deadline_s:g} s.")
        return None


def padded(sources: Sequence[np.ndarray], pad_token_id: int) -> tuple[np.ndarray, np.ndarray]:
    """``input_ids`` and ``attention_mask``, both (B, S) int64, of B sources without padding."""
    lengths = np.array([*map(len, sources)])
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.full(mask.shape, pad_token_id, dtype=np.int64)
    ids[mask] = np.concatenate(sources)
    return ids, mask.astype(np.int64)
