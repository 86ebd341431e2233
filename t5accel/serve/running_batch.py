"""A continuous batch: rows join and leave one decoder state."""

# The K beams of a text are K sources, with K copies of one cross-attention cache. That is the price of one step call
# for all requests, which reads the decoder's weights once.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from t5accel.decoding.backend import Backend, Source, SuppressedTokens
from t5accel.decoding.beam import BeamState, BeamTopK
from t5accel.decoding.greedy_search import argmax_tokens
from t5accel.decoding.sampling import SamplingParams, generator, probabilities, sample_token
from t5accel.decoding.token_constraints import NO_CONSTRAINTS, truncate_at_eos
from t5accel.serve.request import GenerationRequest, GenerationResult

ENDS = (KeyboardInterrupt, SystemExit)  # any other exception concerns one request, even one that is no `Exception`

# A sequence turns the logits of its own rows into their next tokens. The results are those of `decoding`: of `greedy`,
# `sample` and `beam_search` for the request's source alone.


class RunningSequence:
    """What a batch knows of every sequence; a base class."""

    count = 1  # of its rows
    rows = np.empty(0, dtype=np.int64)  # in the batch
    is_greedy = is_done = False  # greedy: arg-max tokens are all that it needs
    owner: Any = None
    error: BaseException | None = None

    def __init__(self, backend: Backend, request: GenerationRequest):
        own = request.decoder_start_token_id
        self.start = backend.decoder_start_token_id if own is None else own
        self._rules = getattr(backend, "rules", NO_CONSTRAINTS).with_bos(request.forced_bos_token_id)
        self._ends = self._rules.eos_tokens(backend.eos_token_id)


class GreedySequence(RunningSequence):
    """One row of greedy search, whose arg-max the batch computes."""

    is_greedy = True

    def __init__(self, backend: Backend, request: GenerationRequest):
        super().__init__(backend, request)
        self._longest = request.max_new_tokens
        self.shortest = self._rules.min_new(request.min_new_tokens, longest=self._longest)  # no end token before
        self._criterion = request.stopping_criterion
        forced = (self._rules.forced_bos_token_id, self._rules.forced_eos_token_id)
        self._forces = forced != (None, None)
        self._suppressed = self._rules.suppressed(self._ends), self._rules.suppressed(())
        self.tokens: list[int] = []
        self._has_ended = False

    @property
    def suppressed(self) -> SuppressedTokens:
        """What may not be the next token."""
        return self._suppressed[len(self.tokens) >= self.shortest]

    @property
    def missing(self) -> int:
        return self._longest - len(self.tokens)

    @property
    def forced_token(self) -> int | None:
        return self._rules.forced_token(len(self.tokens), longest=self._longest) if self._forces else None

    def append(self, token: int) -> None:
        """Append a token, or the forced one in its place."""
        if self._forces and (forced := self.forced_token) is not None:
            token = forced
        self.tokens.append(token)
        self._has_ended = token in self._ends or bool(self._criterion and self._criterion(self.tokens))
        self.is_done = self._has_ended or len(self.tokens) == self._longest

    def answers(self) -> list[GenerationResult]:
        return [GenerationResult(self.tokens, self._has_ended)]


class SampledSequence(GreedySequence):
    """One sampled row with its own random generator."""

    is_greedy = False

    def __init__(self, backend: Backend, request: GenerationRequest, number: int):
        super().__init__(backend, request)
        self._sampling: SamplingParams = request.sampling
        self._generator = generator(request.seed, request.index, number)

    def advanced(self, logits: np.ndarray) -> tuple[int, np.ndarray]:
        """Return from (1, V) logits, which are overwritten, the next token, and which row it continues."""
        if (suppressed := self.suppressed) is not None:
            logits[:, np.atleast_1d(suppressed)] = -np.inf
        history = [[self.start, *self.tokens]] if self._sampling.repetition_penalty != 1 else None
        odds = probabilities(logits, None if history is None else np.array(history), self._sampling)
        self.append(int(sample_token(odds, self._generator.random())[0]))
        return self.tokens[-1], self.rows


class BeamSequence(RunningSequence):
    """The K rows of a beam search."""

    def __init__(self, backend: Backend, request: GenerationRequest, continuations: BeamTopK | None = None):
        super().__init__(backend, request)
        self.count, self._returned = request.num_beams, request.num_return_sequences
        self._pad = backend.pad_token_id
        self._beams = BeamState(
            1,
            request.num_beams,
            vocab_size=backend.vocab_size,
            eos_token_id=backend.eos_token_id,
            max_new_tokens=request.max_new_tokens,
            min_new_tokens=self._rules.min_new(request.min_new_tokens, longest=request.max_new_tokens),
            length_penalty=request.length_penalty,
            early_stopping=request.early_stopping,
            rules=self._rules,
            topk=continuations,
        )
        self._answers: list[GenerationResult] = []

    def advanced(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return from (K, V) logits the next tokens, and which rows they continue."""
        move = self._beams.advance(logits[None])
        if move is None:
            self._finish()
            return np.full(self.count, self._pad), self.rows
        return move.tokens[0], self.rows if move.rows is None else self.rows[move.rows[0]]

    def answers(self) -> list[GenerationResult]:
        """The finished sequences, best first; where the search found fewer, empty ones with score -inf."""
        return self._answers

    def _finish(self) -> None:
        sequences, scores = self._beams.best(self._returned, pad_token_id=self._pad)  # an error is this request's alone
        for row, score in zip(sequences.tolist(), scores.tolist(), strict=True):
            # A sequence without an end token has the full length, so none ends in padding.
            tokens = truncate_at_eos(row, self._ends) if np.isfinite(score) else []
            self._answers.append(GenerationResult(tokens, bool(tokens) and tokens[-1] in self._ends, score))
        self.is_done = True


def sequences_for(
    backend: Backend, request: GenerationRequest, continuations: BeamTopK | None = None
) -> list[RunningSequence]:
    """The sequences of a request, in the order of its results.

    >>> class Toy: vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 9, 0, 3, 0
    >>> [sequence.count for sequence in sequences_for(Toy(), GenerationRequest([5], num_beams=4))]
    [4]
    """
    if request.sampling is not None:
        return [SampledSequence(backend, request, number) for number in range(request.num_return_sequences)]
    if request.num_beams > 1:
        return [BeamSequence(backend, request, continuations)]
    return [GreedySequence(backend, request)]


# Ended rows that stay cost each step less than moving and binding the others; newcomers take their places. After so
# many steps, summed over these rows, they leave together.
COMPACT_AFTER_STEPS = 6


class RunningBatch:
    """Running sequences over one decoder state; without ``backend.add_sources`` all must start together."""

    call_tokens = 16  # an encoder call takes as long as so many more tokens of another one

    def __init__(self, backend: Backend):
        self.encoder = self.backend = backend
        self.joins_running = hasattr(backend, "add_sources")
        self.parts: list[RunningSequence] = []
        self.steps, self.tokens = 1, 0  # of the last `step`; tokens of all rows
        self._state: Any = None
        self._next = np.empty(0, dtype=np.int64)  # (R,) what each row reads
        self._ended = np.empty(0, dtype=np.int64)  # rows without a sequence, in order
        self._ended_steps = 0  # that these have read since the last one left
        self._replace = getattr(backend, "replace_sources", None)
        self._next_tokens = getattr(backend, "next_tokens", None)
        # To keep a source twice branches, too; it copies cross-attention on the way.
        self._branch = getattr(backend, "reorder_sources", None) or getattr(backend, "select_sources", None)

    @property
    def rows(self) -> int:
        """Number of rows with a sequence."""
        return self._next.size - self._ended.size

    def add(self, source: Source, parts: Sequence[RunningSequence]) -> None:
        """Start sequences; the source has their rows in order."""
        start = np.concatenate([np.full(part.count, part.start) for part in parts])
        places = np.concatenate([self._ended, self._next.size + np.arange(start.size)])[: start.size]
        if self._state is None:
            self._state = self.backend.new_state(source)
        elif self._replace:
            self._replace(self._state, source, places)
        else:
            self.backend.add_sources(self._state, source)
        self._ended = self._ended[start.size :]
        self._next = np.concatenate([self._next, start])[: max(self._next.size, 1 + int(places.max()))]
        self._next[places] = start
        place_rows(parts, places)
        self.parts += parts

    def remove(self, parts: Sequence[RunningSequence]) -> None:
        if not parts:
            return
        self.parts = [part for part in self.parts if part not in parts]
        self._ended = np.sort(np.concatenate([self._ended, *(part.rows for part in parts)]))
        if not (self.parts or self._replace):
            self.clear()
        elif not (self.parts and self._replace):
            self._drop_ended()

    def _drop_ended(self) -> None:
        stays = np.ones(self._next.size, dtype=bool)
        stays[self._ended] = False
        stays[0] |= not self.parts  # a state has a row at least, and keeps the memory of those that were there
        count = int(stays.sum())
        kept = np.arange(count)  # the last rows fill the gaps, so that no other row moves
        kept[~stays[:count]] = count + np.flatnonzero(stays[count:])
        self.backend.select_sources(self._state, kept)
        place = np.empty(self._next.size, dtype=np.int64)
        place[kept] = np.arange(count)
        self._next, self._ended, self._ended_steps = self._next[kept], np.arange(count - self.rows), 0
        for part in self.parts:
            part.rows = place[part.rows]

    def clear(self) -> None:
        self.parts, self._state, self._next = [], None, self._next[:0]
        self._ended, self._ended_steps = self._ended[:0], 0

    def step(self) -> list[RunningSequence]:
        """Decode one token per row; return done and failed sequences.

        An error of the backend is raised and leaves the batch unchanged.
        """
        self._ended_steps = self._ended_steps + self._ended.size if self._ended.size else 0
        if self._ended_steps > COMPACT_AFTER_STEPS:
            self._drop_ended()
        self.tokens = self.rows
        waited, self._ended_steps = self._ended_steps, COMPACT_AFTER_STEPS  # if it fails, the next step has fewer rows
        greedy = [part for part in self.parts if part.is_greedy]
        others = [part for part in self.parts if not part.is_greedy]
        suppressed = {part.suppressed for part in greedy}
        logits = best = None
        if self._next_tokens and not others and len(suppressed) == 1:
            best = self._next_tokens(self._state, self._next[:, None, None], suppressed=suppressed.pop())[:, 0]
        else:
            logits = self.backend.step(self._state, self._next[:, None, None])[:, 0, -1]
        self._ended_steps = waited
        try:
            self._append(greedy, others, logits, best)
        except ENDS:
            raise
        except BaseException as error:  # the state has read the tokens, and would read them twice
            for part in self.parts:
                part.error = None if part.is_done else error
        return self._finished()

    def _append(self, greedy: list[Any], others: list[Any], logits: np.ndarray | None, best: np.ndarray | None) -> None:
        """Give each sequence its next tokens: the ``best`` (R,), or by its rows of the ``logits`` (R, V)."""
        if best is None:
            for part in greedy:
                if (tokens := part.suppressed) is not None:
                    logits[part.rows, tokens] = -np.inf
            best = argmax_tokens(logits) if greedy else self._next
        chosen, self._next = best.tolist(), np.array(best)

        def append(part: RunningSequence) -> None:
            row = part.rows[0]
            part.append(chosen[row])
            self._next[row] = part.tokens[-1]  # perhaps another one was forced

        each_alone(greedy, append)
        if others:
            self._advance(others, logits[np.concatenate([part.rows for part in others])], self._next)

    def _advance(self, parts: Sequence[RunningSequence], logits: np.ndarray, following: np.ndarray) -> None:
        """Give samples and beams their rows of ``logits``, in order; ``following`` gets what they read next."""
        order = np.arange(following.size)
        own = dict(zip(parts, np.split(logits, np.cumsum([part.rows.size for part in parts])[:-1]), strict=True))

        def advance(part: RunningSequence) -> None:
            following[part.rows], order[part.rows] = part.advanced(own[part])

        each_alone(parts, advance)
        moved = np.flatnonzero(order != np.arange(order.size))
        try:
            if moved.size:
                self._reorder(moved, order)
        except ENDS:
            raise
        except BaseException as error:  # all histories are as they were: right for those that did not move
            for part in parts:
                if np.isin(part.rows, moved).any():
                    part.error = error

    def _reorder(self, moved: np.ndarray, order: np.ndarray) -> None:
        self._branch(self._state, order)

    def _finished(self) -> list[RunningSequence]:
        return [part for part in self.parts if part.is_done or part.error is not None]


def place_rows(parts: Sequence[RunningSequence], rows: np.ndarray) -> None:
    """Give sequences their rows, in order."""
    for part in parts:
        part.rows, rows = rows[: part.count], rows[part.count :]


def each_alone(parts: Sequence[RunningSequence], write: Callable[[RunningSequence], None]) -> None:
    """Write to each sequence; an error ends that one alone."""
    for part in parts:
        try:
            write(part)
        except ENDS:
            raise
        except BaseException as error:  # of a stopping criterion; a panic of a Rust library is no Exception
            part.error = error
