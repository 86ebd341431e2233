"""Continuous batch over one decoder state: rows are appended when a request starts and removed when it ends.

The K beams of a text are K sources, with K copies of one cross-attention cache. That is the price of one step call for
all requests, which reads the decoder's weights once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from t5accel.decoding.backend import Backend, Source, SuppressedTokens
from t5accel.decoding.beam import BeamState
from t5accel.decoding.greedy_search import argmax_tokens
from t5accel.decoding.sampling import SamplingParams, draw, generators, probabilities
from t5accel.decoding.token_constraints import NO_CONSTRAINTS, TokenConstraints, truncate_at_eos
from t5accel.decoding.topk import BeamTopK
from t5accel.serve.request import GenerationRequest, GenerationResult

# A sequence turns the logits of its own rows into their next tokens. The results are those of `decoding`: of `greedy`,
# `sample` and `beam_search` for the request's source alone.


class Model(Protocol):
    """What a sequence reads of a backend, beside its optional ``rules``."""

    vocab_size: int
    pad_token_id: int
    eos_token_id: int
    decoder_start_token_id: int


def _rules_and_start(model: Model, job: GenerationRequest) -> tuple[TokenConstraints, int]:
    """The constraints and the decoder start token; the request's own values win."""
    start = model.decoder_start_token_id if job.decoder_start_token_id is None else job.decoder_start_token_id
    return getattr(model, "rules", NO_CONSTRAINTS).with_bos(job.forced_bos_token_id), start


class GreedySequence:
    """One row of greedy search; the batch computes the arg-max of all such rows at once."""

    rows = 1

    def __init__(self, model: Model, job: GenerationRequest):
        self._rules, self.start = _rules_and_start(model, job)
        self._ends, self._longest = self._rules.eos_tokens(model.eos_token_id), job.max_new_tokens
        self._shortest = self._rules.min_new(job.min_new_tokens, longest=self._longest)
        self._criterion, forced = (
            job.stopping_criterion,
            (self._rules.forced_bos_token_id, self._rules.forced_eos_token_id),
        )
        self._asks_each = self._criterion is not None or forced != (None, None)
        self.tokens: list[int] = []
        self.is_done = self._has_ended = False

    @property
    def suppressed(self) -> SuppressedTokens:
        """Suppressed next tokens."""
        return self._rules.suppressed(self._ends if len(self.tokens) < self._shortest else ())

    @property
    def shortest(self) -> int:
        """Minimum number of tokens: no end token before."""
        return self._shortest

    @property
    def missing(self) -> int:
        """Tokens up to the maximum."""
        return self._longest - len(self.tokens)

    @property
    def forced(self) -> int | None:
        """The next token, if it is forced."""
        return self._rules.forced_token(len(self.tokens), longest=self._longest)

    def append_all(self, tokens: list[int]) -> None:
        """Append tokens up to the first that ends the sequence.

        >>> class Toy: vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 9, 0, 3, 0
        >>> writer = GreedySequence(Toy(), GenerationRequest([5], max_new_tokens=8))
        >>> writer.append_all([7, 3, 8])
        >>> writer.tokens, writer.is_done
        ([7, 3], True)
        """
        if self._asks_each:
            for token in tokens:
                self.append(token)
                if self.is_done:
                    break
            return
        room = self.missing
        end = next((count for count, token in enumerate(tokens[:room], 1) if token in self._ends), 0)
        self.tokens += tokens[: end or room]
        self._has_ended = end > 0
        self.is_done = self._has_ended or len(self.tokens) == self._longest

    def append(self, token: int) -> None:
        """Append a token, or the forced one in its place."""
        forced = self.forced
        self.tokens.append(token if forced is None else forced)
        self._has_ended = self.tokens[-1] in self._ends or bool(self._criterion and self._criterion(self.tokens))
        self.is_done = self._has_ended or len(self.tokens) == self._longest

    def answers(self) -> list[GenerationResult]:
        """The finished sequence."""
        return [GenerationResult(self.tokens, self._has_ended)]


class SampledSequence(GreedySequence):
    """One sampled row with its own random generator.

    >>> class Toy: vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 4, 0, 3, 0
    >>> writer = SampledSequence(Toy(), GenerationRequest([5], sampling=SamplingParams(), max_new_tokens=1), 0)
    >>> writer.sample(np.log([1e-9, 1e-9, 1, 1e-9])), writer.is_done
    (2, True)
    """

    def __init__(self, model: Model, job: GenerationRequest, number: int):
        super().__init__(model, job)
        self._sampling: SamplingParams = job.sampling
        self._generator = generators(job.seed, 1, number + 1)[number]

    def sample(self, logits: np.ndarray) -> int:
        """Sample the next token from (V,) logits, which are overwritten."""
        if (suppressed := self.suppressed) is not None:
            logits[np.atleast_1d(suppressed)] = -np.inf
        history = [[self.start, *self.tokens]] if self._sampling.repetition_penalty != 1 else None
        odds = probabilities(logits[None], None if history is None else np.array(history), self._sampling)
        self.append(int(draw(odds, self._generator.random())[0]))
        return self.tokens[-1]


class BeamSequence:
    """The K rows of a beam search."""

    def __init__(self, model: Model, job: GenerationRequest, continuations: BeamTopK | None = None):
        self.rows, self._returned = job.num_beams, job.num_return_sequences
        rules, self.start = _rules_and_start(model, job)
        self._ends, self._pad = rules.eos_tokens(model.eos_token_id), model.pad_token_id
        self._beams = BeamState(
            1,
            job.num_beams,
            vocab_size=model.vocab_size,
            eos_token_id=model.eos_token_id,
            max_new_tokens=job.max_new_tokens,
            min_new_tokens=rules.min_new(job.min_new_tokens, longest=job.max_new_tokens),
            length_penalty=job.length_penalty,
            early_stopping=job.early_stopping,
            rules=rules,
            continuations=continuations,
        )
        self.is_done = False

    @property
    def length(self) -> int:
        """Tokens of each beam."""
        return self._beams.length

    def advance(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return from (K, V) logits the (K,) next tokens, and the row that each continues (``None``: its own)."""
        move = self._beams.advance(logits[None])
        if move is None:
            self.is_done = True
            return np.full(self.rows, self._pad), None
        return move.tokens[0], None if move.rows is None else move.rows[0]

    def answers(self) -> list[GenerationResult]:
        """The finished sequences, best first."""
        sequences, scores = self._beams.best(self._returned, pad_token_id=self._pad)
        found = []  # a sequence without an end token has the full length, so none ends in padding
        for row, score in zip(sequences.tolist(), scores.tolist(), strict=True):
            tokens = truncate_at_eos(row, self._ends)
            found.append(GenerationResult(tokens, tokens[-1] in self._ends, score))
        return found


Writer = GreedySequence | SampledSequence | BeamSequence


def sequences_for(model: Model, job: GenerationRequest, continuations: BeamTopK | None = None) -> list[Writer]:
    """The sequences of a request, in the order of its results.

    Raises:
        InputError: the request does not fit the model.

    >>> class Toy: vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 9, 0, 3, 0
    >>> [writer.rows for writer in sequences_for(Toy(), GenerationRequest([5], num_beams=4))]
    [4]
    """
    if job.sampling is not None:
        return [SampledSequence(model, job, number) for number in range(job.num_return_sequences)]
    return [GreedySequence(model, job)] if job.num_beams == 1 else [BeamSequence(model, job, continuations)]


@dataclass(eq=False)
class RunningSequence:
    """A sequence in a batch: its owner, its (K,) int64 row numbers, and the error that ended it."""

    writer: Writer
    owner: Any
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    error: BaseException | None = None

    def advanced(self, logits: np.ndarray) -> tuple[Any, np.ndarray]:
        """Return from (K, V) logits of samples or beams the next tokens, and the row that each continues."""
        if isinstance(self.writer, SampledSequence):
            return self.writer.sample(logits[0]), self.rows
        tokens, rows = self.writer.advance(logits)
        return tokens, self.rows if rows is None else self.rows[rows]


class RunningBatch:
    """Running sequences over one decoder state; without ``backend.add_sources`` all must start together.

    Attributes:
        steps, tokens: steps and tokens of all rows in the last `step`.
        logit_steps, token_steps: steps that returned logits, and steps that returned tokens only.

    >>> class Counter:  # a toy backend whose next token is the last one plus one
    ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 9, 0, 8, 0
    ...     def new_state(self, source, rows_per_source=1): return list(source)
    ...     def add_sources(self, state, source): state += source
    ...     def select_sources(self, state, sources): state[:] = [state[i] for i in sources]
    ...     def step(self, state, input_ids): return np.eye(9, dtype=np.float32)[input_ids + 1]
    >>> from t5accel.serve.request import GenerationRequest
    >>> batch, toy = RunningBatch(Counter()), Counter()
    >>> requests = [GenerationRequest([7], max_new_tokens=count) for count in (3, 8)]
    >>> one, other = [RunningSequence(GreedySequence(toy, request), request) for request in requests]
    >>> batch.add(["a source"], [one])
    >>> _ = batch.step()
    >>> batch.add(["another"], [other])
    >>> _ = batch.step()
    >>> batch.step() == [one], one.writer.tokens, other.writer.tokens
    (True, [1, 2, 3], [1, 2])
    """

    def __init__(self, backend: Backend):
        self.backend = backend
        self.joins_running = hasattr(backend, "add_sources")
        self.encoder = backend
        self.parts: list[RunningSequence] = []
        self.steps, self.tokens = 1, 0
        self.logit_steps = self.token_steps = 0
        self._state: Any = None
        self._next = np.empty(0, dtype=np.int64)  # (R,) what each row reads
        self._next_tokens = getattr(backend, "next_tokens", None)
        # To keep a source twice branches, too; it copies cross-attention on the way.
        self._branch = getattr(backend, "reorder_sources", None) or getattr(backend, "select_sources", None)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self._next.size

    def add(self, source: Source, parts: Sequence[RunningSequence]) -> None:
        """Start sequences. The source has one row for each of their rows, in order."""
        if self._state is None:
            self._state = self.backend.new_state(source)
        else:
            self.backend.add_sources(self._state, source)
        for part in parts:
            part.rows = np.arange(self.rows, self.rows + part.writer.rows)
            new = np.full(part.writer.rows, part.writer.start)
            self._next = np.concatenate([self._next, new])
            self.parts.append(part)

    def remove(self, parts: Sequence[RunningSequence]) -> None:
        """Remove sequences, done or not."""
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
        kept[~stays[:count]] = count + np.flatnonzero(
            stays[count:]
        )  # the last rows fill the gaps, so that no other row moves
        self.backend.select_sources(self._state, kept)
        place = np.empty(self.rows, dtype=np.int64)
        place[kept] = np.arange(count)
        self.parts, self._next = remaining, self._next[kept]
        for part in remaining:
            part.rows = place[part.rows]

    def clear(self) -> None:
        """Remove all sequences and the state."""
        self.parts, self._state, self._next = [], None, self._next[:0]

    def step(self) -> list[RunningSequence]:
        """Decode one token per row; return the sequences that are done or failed.

        An error of the backend is raised and leaves the batch unchanged.
        """
        self.tokens = self.rows
        alike = all(type(part.writer) is GreedySequence for part in self.parts)
        suppressed = {part.writer.suppressed for part in self.parts} if alike else set()
        if self._next_tokens and len(suppressed) == 1:
            found = self._next_tokens(self._state, self._next[:, None, None], suppressed=suppressed.pop())[:, 0]
            self.token_steps += 1
            self._next = np.array(found)
            for part in self.parts:
                try:
                    part.writer.append(int(found[part.rows[0]]))
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
        for part in self.parts:
            if type(part.writer) is GreedySequence and (suppressed := part.writer.suppressed) is not None:
                logits[part.rows, suppressed] = -np.inf
        if any(type(part.writer) is GreedySequence for part in self.parts):
            best = argmax_tokens(logits)
        tokens, order = np.array(self._next), np.arange(self.rows)
        for part in self.parts:
            try:
                if type(part.writer) is GreedySequence:
                    part.writer.append(int(best[part.rows[0]]))
                    tokens[part.rows] = part.writer.tokens[-1]
                else:
                    tokens[part.rows], order[part.rows] = part.advanced(logits[part.rows])
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
