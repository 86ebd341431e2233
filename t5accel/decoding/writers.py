"""What becomes of the logits of a job's rows. One step call serves greedy, drawn and beam rows alike.

A writer owns some rows of the batch and knows nothing of the others. It is handed the logits of its rows, as far as it
wants them, and says what they read next. The algorithms are those of `decoding`: a job's answers are those of `greedy`,
`sampling.sample` and `beam.beam_search` for its source alone.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from t5accel.decoding.backend import Forbidden
from t5accel.decoding.beam import Beams
from t5accel.decoding.continuations import Continuations
from t5accel.decoding.distribution import Sampling, draw, probabilities
from t5accel.decoding.job import Answer, Job
from t5accel.decoding.rules import NONE, Rules, until_end
from t5accel.decoding.sampling import generators


class Model(Protocol):
    """What a writer has to know of the backend, and where it has them its ``rules``."""

    vocab_size: int
    pad_token_id: int
    eos_token_id: int
    decoder_start_token_id: int


def _rules_and_start(model: Model, job: Job) -> tuple[Rules, int]:
    """What the model asks of every answer and the token that its decoder reads first, or what the job says of both."""
    start = model.decoder_start_token_id if job.decoder_start_token_id is None else job.decoder_start_token_id
    return getattr(model, "rules", NONE).with_bos(job.forced_bos_token_id), start


class Greedy:
    """One row that takes the likeliest token; whoever runs the step finds that for all such rows at once."""

    rows = 1

    def __init__(self, model: Model, job: Job):
        self._rules, self.start = _rules_and_start(model, job)
        self._ends, self._longest = self._rules.ends(model.eos_token_id), job.max_new_tokens
        self._shortest = self._rules.shortest(job.min_new_tokens, longest=self._longest)
        self._criterion, forced = (
            job.stopping_criterion,
            (self._rules.forced_bos_token_id, self._rules.forced_eos_token_id),
        )
        self._asks_each = self._criterion is not None or forced != (None, None)
        self.tokens: list[int] = []
        self.is_done = self._has_ended = False

    @property
    def forbidden(self) -> Forbidden:
        """What the next token may not be."""
        return self._rules.forbidden(self._ends if len(self.tokens) < self._shortest else ())

    @property
    def shortest(self) -> int:
        """Tokens that it has at least: before these, no end may be chosen."""
        return self._shortest

    @property
    def missing(self) -> int:
        """Tokens that it may still get."""
        return self._longest - len(self.tokens)

    @property
    def forced(self) -> int | None:
        """The next token, if it is not for the model to choose."""
        return self._rules.forced(len(self.tokens), longest=self._longest)

    def take_all(self, tokens: list[int]) -> None:
        """The next tokens, as many of them as there are before the end.

        >>> class Toy: vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 9, 0, 3, 0
        >>> writer = Greedy(Toy(), Job([5], max_new_tokens=8))
        >>> writer.take_all([7, 3, 8])
        >>> writer.tokens, writer.is_done
        ([7, 3], True)
        """
        if self._asks_each:
            for token in tokens:
                self.take(token)
                if self.is_done:
                    break
            return
        room = self.missing
        end = next((count for count, token in enumerate(tokens[:room], 1) if token in self._ends), 0)
        self.tokens += tokens[: end or room]
        self._has_ended = end > 0
        self.is_done = self._has_ended or len(self.tokens) == self._longest

    def take(self, token: int) -> None:
        """The next token, if the model does not force another."""
        forced = self.forced
        self.tokens.append(token if forced is None else forced)
        self._has_ended = self.tokens[-1] in self._ends or bool(self._criterion and self._criterion(self.tokens))
        self.is_done = self._has_ended or len(self.tokens) == self._longest

    def answers(self) -> list[Answer]:
        """Those that are there when it is done."""
        return [Answer(self.tokens, self._has_ended)]


class Drawn(Greedy):
    """One row whose tokens are drawn, by a generator of its own.

    >>> class Toy: vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 4, 0, 3, 0
    >>> writer = Drawn(Toy(), Job([5], sampling=Sampling(), max_new_tokens=1), 0)
    >>> writer.draw(np.log([1e-9, 1e-9, 1, 1e-9])), writer.is_done
    (2, True)
    """

    def __init__(self, model: Model, job: Job, number: int):
        super().__init__(model, job)
        self._sampling: Sampling = job.sampling
        self._generator = generators(job.seed, 1, number + 1)[number]

    def draw(self, logits: np.ndarray) -> int:
        """(V,) logits, in which it may write -> the next token."""
        if (forbidden := self.forbidden) is not None:
            logits[np.atleast_1d(forbidden)] = -np.inf
        history = [[self.start, *self.tokens]] if self._sampling.repetition_penalty != 1 else None
        odds = probabilities(logits[None], None if history is None else np.array(history), self._sampling)
        self.take(int(draw(odds, self._generator.random())[0]))
        return self.tokens[-1]


class Searched:
    """The K rows of a beam search."""

    def __init__(self, model: Model, job: Job, continuations: Continuations | None = None):
        self.rows, self._returned = job.num_beams, job.num_return_sequences
        rules, self.start = _rules_and_start(model, job)
        self._ends, self._pad = rules.ends(model.eos_token_id), model.pad_token_id
        self._beams = Beams(
            1, job.num_beams, vocab_size=model.vocab_size, eos_token_id=model.eos_token_id,
            max_new_tokens=job.max_new_tokens,
            min_new_tokens=rules.shortest(job.min_new_tokens, longest=job.max_new_tokens),
            length_penalty=job.length_penalty, early_stopping=job.early_stopping, rules=rules,
            continuations=continuations,
        )  # fmt: skip
        self.is_done = False

    @property
    def length(self) -> int:
        """Tokens of each beam."""
        return self._beams.length

    def advance(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """(K, V) logits -> (K,) what the rows read next, and from which of them each goes on, ``None`` if it stays."""
        move = self._beams.advance(logits[None])
        if move is None:
            self.is_done = True
            return np.full(self.rows, self._pad), None
        return move.tokens[0], None if move.rows is None else move.rows[0]

    def answers(self) -> list[Answer]:
        """Best first. An answer without an end has the full length, so that no pad token need be told from padding."""
        sequences, scores = self._beams.best(self._returned, pad_token_id=self._pad)
        found = []
        for row, score in zip(sequences.tolist(), scores.tolist(), strict=True):
            tokens = until_end(row, self._ends)
            found.append(Answer(tokens, tokens[-1] in self._ends, score))
        return found


Writer = Greedy | Drawn | Searched


def writers_of(model: Model, job: Job, continuations: Continuations | None = None) -> list[Writer]:
    """A job's writers, in the order of its answers; K drawn answers are K writers.

    Raises:
        InputError: the job does not fit the model.

    >>> class Toy: vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 9, 0, 3, 0
    >>> [writer.rows for writer in writers_of(Toy(), Job([5], num_beams=4))]
    [4]
    """
    if job.sampling is not None:
        return [Drawn(model, job, number) for number in range(job.num_return_sequences)]
    return [Greedy(model, job)] if job.num_beams == 1 else [Searched(model, job, continuations)]
