"""What a source is to be answered with: one job, checked at the door, and its answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from t5accel.checks import as_count, as_integers, is_number
from t5accel.decoding.distribution import Sampling
from t5accel.errors import InputError

MOST_PRIORITY = 1_000_000


@dataclass(frozen=True)
class Job:
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

    >>> Job([100, 200, 1], num_beams=2).rows
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
        """What `Request.checked` checks of it, by name."""
        names = ("max_new_tokens", "min_new_tokens", "forced_bos_token_id", "decoder_start_token_id")
        return {name: getattr(self, name) for name in names}

    @property
    def rows(self) -> int:
        """How many rows of the batch it takes."""
        return self.num_return_sequences if self.sampling is not None else self.num_beams


@dataclass(frozen=True)
class Answer:
    """One answer: its tokens, the end token included where there is one, and the score that beams give it.

    ``ended`` is whether it ended before its upper bound: by an end token, or by the job's stopping criterion.
    """

    tokens: list[int]
    ended: bool
    score: float | None = None
