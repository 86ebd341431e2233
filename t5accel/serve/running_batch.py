"""The running batch: rows of one decoder state, and whose they are. Rows join behind the last and leave from anywhere.

The state has one row for each source. The K beams of a text are K sources, whose cross-attention is the same memory K
times: that is the price. It buys **one step call for all**: however many jobs there are, and whatever they ask for, a
step reads the decoder's weights once.

A place that becomes free is taken by the last row, so that nobody else moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from t5accel.decoding.backend import Backend, Forbidden, Source
from t5accel.decoding.beam import Beams
from t5accel.decoding.greedy_search import likeliest
from t5accel.decoding.sampling import Sampling, draw, generators, probabilities
from t5accel.decoding.token_constraints import NONE, Rules, until_end
from t5accel.decoding.topk import Continuations
from t5accel.serve.request import Answer, Job

# What becomes of the logits of a job's rows. One step call serves greedy, drawn and beam rows alike.
# A writer owns some rows of the batch and knows nothing of the others. It is handed the logits of its rows, as far as
# it wants them, and says what they read next. The algorithms are those of `decoding`: a job's answers are those of
# `greedy`, `sampling.sample` and `beam.beam_search` for its source alone.


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
        self._criterion = job.stopping_criterion
        self.tokens: list[int] = []
        self.is_done = self._has_ended = False

    @property
    def forbidden(self) -> Forbidden:
        """What the next token may not be."""
        return self._rules.forbidden(self._ends if len(self.tokens) < self._shortest else ())

    def take(self, token: int) -> None:
        """The next token, if the model does not force another."""
        forced = self._rules.forced(len(self.tokens), longest=self._longest)
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


@dataclass(eq=False)
class Part:
    """A writer that takes part in a batch.

    Attributes:
        writer: who reads the logits of its rows.
        owner: whatever the caller knows it by.
        rows: (K,) int64, where they are.
        error: why it cannot go on.
    """

    writer: Writer
    owner: Any
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    error: BaseException | None = None


class RunningBatch:
    """Rows of one state of a backend.

    Args:
        backend: rows join while others run if it offers ``admit``; else all of a batch begin together.

    Attributes:
        joins_running: whether it does.
        parts: in the order in which they joined.
        logit_steps, token_steps: steps that computed all logits, and those that chose tokens only.

    >>> class Counter:  # a toy backend whose next token is the last one plus one
    ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 9, 0, 8, 0
    ...     def start(self, source, rows_per_source=1): return list(source)
    ...     def admit(self, state, source): state += source
    ...     def keep(self, state, sources): state[:] = [state[i] for i in sources]
    ...     def step(self, state, input_ids): return np.eye(9, dtype=np.float32)[input_ids + 1]
    >>> from t5accel.serve.request import Job
    >>> batch, toy = RunningBatch(Counter()), Counter()
    >>> one, other = (Part(Greedy(toy, Job([7], max_new_tokens=count)), count) for count in (3, 8))
    >>> batch.join(["a source"], [one])
    >>> _ = batch.step()
    >>> batch.join(["another"], [other])
    >>> _ = batch.step()
    >>> batch.step() == [one], one.writer.tokens, other.writer.tokens
    (True, [1, 2, 3], [1, 2])
    """

    def __init__(self, backend: Backend):
        self.backend = backend
        self.joins_running = hasattr(backend, "admit")
        self.parts: list[Part] = []
        self.logit_steps = self.token_steps = 0
        self._state: Any = None
        self._next = np.empty(0, dtype=np.int64)  # (R,) what each row reads
        self._next_tokens = getattr(backend, "next_tokens", None)
        # To keep a source twice branches, too; it copies cross-attention on the way.
        self._branch = getattr(backend, "branch", None) or getattr(backend, "keep", None)

    @property
    def rows(self) -> int:
        """R."""
        return self._next.size

    def join(self, source: Source, parts: Sequence[Part]) -> None:
        """Parts that begin. The source has a row for each of their rows, in order."""
        if self._state is None:
            self._state = self.backend.start(source)
        else:
            self.backend.admit(self._state, source)
        for part in parts:
            part.rows = np.arange(self.rows, self.rows + part.writer.rows)
            new = np.full(part.writer.rows, part.writer.start)
            self._next = np.concatenate([self._next, new])
            self.parts.append(part)

    def leave(self, parts: Sequence[Part]) -> None:
        """These end, whether they are done or not; their places are free."""
        if not parts:
            return
        stays = np.ones(self.rows, dtype=bool)
        for part in parts:
            stays[part.rows] = False
        count = int(stays.sum())
        remaining = [part for part in self.parts if part not in parts]
        if not count:
            self.clear()
            return
        kept = np.arange(count)
        kept[~stays[:count]] = count + np.flatnonzero(stays[count:])  # the last ones, in the places that are free
        self.backend.keep(self._state, kept)
        place = np.empty(self.rows, dtype=np.int64)
        place[kept] = np.arange(count)
        self.parts, self._next = remaining, self._next[kept]
        for part in remaining:
            part.rows = place[part.rows]

    def clear(self) -> None:
        """All leave, and the state goes with them."""
        self.parts, self._state, self._next = [], None, self._next[:0]

    def step(self) -> list[Part]:
        """One token more for every row; returns the parts that are done or cannot go on.

        Raises whatever the backend raises; then nothing has changed.
        """
        alike = all(type(part.writer) is Greedy for part in self.parts)
        forbidden = {part.writer.forbidden for part in self.parts} if alike else set()
        if self._next_tokens and len(forbidden) == 1:
            found = self._next_tokens(self._state, self._next[:, None, None], forbidden=forbidden.pop())[:, 0]
            self.token_steps += 1
            self._next = np.array(found)
            for part in self.parts:
                try:
                    part.writer.take(int(found[part.rows[0]]))
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # of its stopping criterion; a panic of a Rust library is no Exception
                    part.error = error
                self._next[part.rows] = part.writer.tokens[-1]
        else:
            self._advance(self.backend.step(self._state, self._next[:, None, None])[:, 0, -1])
            self.logit_steps += 1
        return [part for part in self.parts if part.writer.is_done or part.error is not None]

    def _advance(self, logits: np.ndarray) -> None:
        """By (R, V) logits."""
        for part in self.parts:
            if type(part.writer) is Greedy and (forbidden := part.writer.forbidden) is not None:
                logits[part.rows, forbidden] = -np.inf
        if any(type(part.writer) is Greedy for part in self.parts):
            best = likeliest(logits)
        tokens, order = np.array(self._next), np.arange(self.rows)
        for part in self.parts:
            try:
                if type(part.writer) is Greedy:
                    part.writer.take(int(best[part.rows[0]]))
                    tokens[part.rows] = part.writer.tokens[-1]
                elif isinstance(part.writer, Drawn):
                    tokens[part.rows] = part.writer.draw(logits[part.rows[0]])
                else:
                    tokens[part.rows], rows = part.writer.advance(logits[part.rows])
                    if rows is not None:
                        order[part.rows] = part.rows[rows]
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # this one's fault alone
                part.error = error
        moved = order != np.arange(order.size)
        try:
            if moved.any():
                self._branch(self._state, order)
        except Exception as error:  # all histories are as they were: right for those that did not move
            for part in self.parts:
                if moved[part.rows].any():
                    part.error = error
        self._next = tokens
