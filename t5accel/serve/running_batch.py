"""The running batch: rows of one decoder state, and whose they are. Rows join behind the last and leave from anywhere.

The state has one row for each source. The K beams of a text are K sources, whose cross-attention is the same memory K
times: that is the price. It buys **one step call for all**: however many jobs there are, and whatever they ask for, a
step reads the decoder's weights once.

A place that becomes free is taken by the last row, so that nobody else moves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from t5accel.decoding.backend import Backend, Forbidden, Source
from t5accel.decoding.beam import Beams
from t5accel.decoding.greedy_search import argmax_tokens
from t5accel.decoding.sampling import Sampling, draw, generators, probabilities
from t5accel.decoding.token_constraints import NO_CONSTRAINTS, TokenConstraints, truncate_at_eos
from t5accel.decoding.topk import BeamTopK
from t5accel.serve.request import GenerationRequest, GenerationResult

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


def _rules_and_start(model: Model, job: GenerationRequest) -> tuple[TokenConstraints, int]:
    """What the model asks of every answer and the token that its decoder reads first, or what the job says of both."""
    start = model.decoder_start_token_id if job.decoder_start_token_id is None else job.decoder_start_token_id
    return getattr(model, "rules", NO_CONSTRAINTS).with_bos(job.forced_bos_token_id), start


class GreedySequence:
    """One row that takes the likeliest token; whoever runs the step finds that for all such rows at once."""

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
    def forbidden(self) -> Forbidden:
        """What the next token may not be."""
        return self._rules.suppressed(self._ends if len(self.tokens) < self._shortest else ())

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
        return self._rules.forced_token(len(self.tokens), longest=self._longest)

    def append_all(self, tokens: list[int]) -> None:
        """The next tokens, as many of them as there are before the end.

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
        """The next token, if the model does not force another."""
        forced = self.forced
        self.tokens.append(token if forced is None else forced)
        self._has_ended = self.tokens[-1] in self._ends or bool(self._criterion and self._criterion(self.tokens))
        self.is_done = self._has_ended or len(self.tokens) == self._longest

    def answers(self) -> list[GenerationResult]:
        """Those that are there when it is done."""
        return [GenerationResult(self.tokens, self._has_ended)]


class SampledSequence(GreedySequence):
    """One row whose tokens are drawn, by a generator of its own.

    >>> class Toy: vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 4, 0, 3, 0
    >>> writer = SampledSequence(Toy(), GenerationRequest([5], sampling=Sampling(), max_new_tokens=1), 0)
    >>> writer.sample(np.log([1e-9, 1e-9, 1, 1e-9])), writer.is_done
    (2, True)
    """

    def __init__(self, model: Model, job: GenerationRequest, number: int):
        super().__init__(model, job)
        self._sampling: Sampling = job.sampling
        self._generator = generators(job.seed, 1, number + 1)[number]

    def sample(self, logits: np.ndarray) -> int:
        """(V,) logits, in which it may write -> the next token."""
        if (forbidden := self.forbidden) is not None:
            logits[np.atleast_1d(forbidden)] = -np.inf
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
        self._beams = Beams(
            1, job.num_beams, vocab_size=model.vocab_size, eos_token_id=model.eos_token_id,
            max_new_tokens=job.max_new_tokens,
            min_new_tokens=rules.min_new(job.min_new_tokens, longest=job.max_new_tokens),
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

    def answers(self) -> list[GenerationResult]:
        """Best first. An answer without an end has the full length, so that no pad token need be told from padding."""
        sequences, scores = self._beams.best(self._returned, pad_token_id=self._pad)
        found = []
        for row, score in zip(sequences.tolist(), scores.tolist(), strict=True):
            tokens = truncate_at_eos(row, self._ends)
            found.append(GenerationResult(tokens, tokens[-1] in self._ends, score))
        return found


Writer = GreedySequence | SampledSequence | BeamSequence


def sequences_for(model: Model, job: GenerationRequest, continuations: BeamTopK | None = None) -> list[Writer]:
    """A job's writers, in the order of its answers; K drawn answers are K writers.

    Raises:
        InputError: the job does not fit the model.

    >>> class Toy: vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 9, 0, 3, 0
    >>> [writer.rows for writer in sequences_for(Toy(), GenerationRequest([5], num_beams=4))]
    [4]
    """
    if job.sampling is not None:
        return [SampledSequence(model, job, number) for number in range(job.num_return_sequences)]
    return [GreedySequence(model, job)] if job.num_beams == 1 else [BeamSequence(model, job, continuations)]


MOST_STEPS = 8  # between two looks of the host at a device's tokens
CHUNK_S = 0.02  # that they may take: newcomers wait for so long
PATIENCE = 256  # steps in shapes that are larger than needed, before rows move to a smaller one


@dataclass(eq=False)
class RunningSequence:
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

    def advanced(self, logits: np.ndarray) -> tuple[Any, np.ndarray]:
        """(K, V) logits of drawn rows or beams, written to -> what its rows read next, and which each goes on from."""
        if isinstance(self.writer, SampledSequence):
            return self.writer.sample(logits[0]), self.rows
        tokens, rows = self.writer.advance(logits)
        return tokens, self.rows if rows is None else self.rows[rows]


class RunningBatch:
    """Rows of one state of a backend.

    Args:
        backend: rows join while others run if it offers ``admit``; else all of a batch begin together.

    Attributes:
        joins_running: whether it does.
        parts: in the order in which they joined.
        steps, tokens: of the last `step`: how many steps it was, and how many tokens all rows got.
        logit_steps, token_steps: steps that computed all logits, and those that chose tokens only.

    >>> class Counter:  # a toy backend whose next token is the last one plus one
    ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 9, 0, 8, 0
    ...     def start(self, source, rows_per_source=1): return list(source)
    ...     def admit(self, state, source): state += source
    ...     def keep(self, state, sources): state[:] = [state[i] for i in sources]
    ...     def step(self, state, input_ids): return np.eye(9, dtype=np.float32)[input_ids + 1]
    >>> from t5accel.serve.request import GenerationRequest
    >>> batch, toy = RunningBatch(Counter()), Counter()
    >>> one, other = (RunningSequence(GreedySequence(toy, GenerationRequest([7], max_new_tokens=count)), count) for count in (3, 8))
    >>> batch.add(["a source"], [one])
    >>> _ = batch.step()
    >>> batch.add(["another"], [other])
    >>> _ = batch.step()
    >>> batch.step() == [one], one.writer.tokens, other.writer.tokens
    (True, [1, 2, 3], [1, 2])
    """

    def __init__(self, backend: Backend):
        self.backend = backend
        self.joins_running = hasattr(backend, "admit")
        self.encoder = backend
        self.parts: list[RunningSequence] = []
        self.steps, self.tokens = 1, 0
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

    def add(self, source: Source, parts: Sequence[RunningSequence]) -> None:
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

    def remove(self, parts: Sequence[RunningSequence]) -> None:
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

    def step(self) -> list[RunningSequence]:
        """One token more for every row; returns the parts that are done or cannot go on.

        Raises whatever the backend raises; then nothing has changed.
        """
        self.tokens = self.rows
        alike = all(type(part.writer) is GreedySequence for part in self.parts)
        forbidden = {part.writer.forbidden for part in self.parts} if alike else set()
        if self._next_tokens and len(forbidden) == 1:
            found = self._next_tokens(self._state, self._next[:, None, None], forbidden=forbidden.pop())[:, 0]
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
        """By (R, V) logits."""
        for part in self.parts:
            if type(part.writer) is GreedySequence and (forbidden := part.writer.forbidden) is not None:
                logits[part.rows, forbidden] = -np.inf
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


LENGTH, TOKEN, SHORTEST, SOURCE = range(4)  # what the host knows of each row; the device is told the first three
IDLE = np.array([[0], [0], [-1], [0]])


def _idle(rows: int) -> np.ndarray:
    return np.tile(IDLE, rows)


def _place(parts: Sequence[RunningSequence], rows: np.ndarray) -> None:
    """These rows are the parts', in order."""
    begin = 0
    for part in parts:
        end = begin + part.writer.rows
        part.rows = rows[begin:end]
        begin = end


class DeviceRunningBatch:
    """The same on a device that takes several steps without the host, in rows that are there before anybody joins.

    How many steps depends on the load: one where few rows run, so that nobody waits for tokens; `MOST_STEPS` of them,
    as far as they take no more than `CHUNK_S`, where many do. Rows that are drawn or beams need the host after each
    step; while there are any, all rows take one step at a time.

    Args:
        backend: with ``in_flight()``, see `torch_static_rows.TorchStaticRows`.
        clock: seconds that only grow.

    Attributes:
        encoder: encodes newcomers' sources for `join`.
        joins_running, parts, rows, steps, tokens, logit_steps, token_steps: as of `RunningBatch`.

    >>> from t5accel.backends.torch_static import TorchStatic
    >>> from t5accel.models.load import load_model
    >>> from t5accel.serve.request import GenerationRequest
    >>> batch = DeviceRunningBatch(backend := TorchStatic(load_model("random:t5-small")[0]))
    >>> part = RunningSequence(GreedySequence(backend, GenerationRequest([100, 1], max_new_tokens=2)), "an owner")
    >>> batch.add(batch.encoder.encode(np.array([[100, 1]]), np.ones((1, 2), dtype=np.int64)), [part])
    >>> batch.step(), batch.step() == [part], len(part.writer.tokens)
    ([], True, 2)
    """

    joins_running = True

    def __init__(self, backend: Any, *, clock: Callable[[], float] = time.perf_counter):
        self.encoder = self._device = backend.in_flight()
        self.parts: list[RunningSequence] = []
        self.rows, self.steps, self.tokens = 0, 1, 0
        self.logit_steps = self.token_steps = 0
        self._positions = getattr(backend, "positions", None) or math.inf
        self._clock, self._step_s = clock, 0.0
        self._table = _idle(0)
        self._too_large = 0  # steps in a row that a smaller shape would have done for

    def warm(self, rows: int) -> None:
        """Capture what up to so many rows of short requests need, before anybody joins."""
        self._device.warm(rows)
        self._table = _idle(self._device.shape[0])

    def add(self, source: Source, parts: Sequence[RunningSequence]) -> None:
        """As of `RunningBatch`; the source comes from ``encoder``."""
        count = sum(part.writer.rows for part in parts)
        self._fit(rows=self.rows + count, source=source.width, ahead=1)
        where = np.flatnonzero(self._table[SOURCE] == 0)[:count]
        self._device.admit(where, source)
        self._table[LENGTH, where], self._table[SOURCE, where] = 0, source.width
        self.rows += count
        greedy = [type(part.writer) is GreedySequence for part in parts]
        sizes = [part.writer.rows for part in parts]
        shortest = [part.writer.shortest if one else -1 for part, one in zip(parts, greedy, strict=True)]
        self._table[TOKEN, where] = np.repeat([part.writer.start for part in parts], sizes)
        self._table[SHORTEST, where] = np.repeat(shortest, sizes)
        _place(parts, where)
        self.parts += parts

    def remove(self, parts: Sequence[RunningSequence]) -> None:
        """These end, whether they are done or not; their rows are idle."""
        for part in parts:
            self._table[:, part.rows] = IDLE
            self.rows -= part.rows.size
        leaving = set(parts)
        self.parts = [part for part in self.parts if part not in leaving]

    def clear(self) -> None:
        """All leave."""
        self.leave(self.parts)

    def step(self) -> list[RunningSequence]:
        """Some tokens more for every row; returns the parts that are done or cannot go on.

        Raises whatever the backend raises; then nothing has changed.
        """
        others = [part for part in self.parts if type(part.writer) is not GreedySequence]
        count = 1 if others else self._count()
        self._fit(rows=self.rows, source=1, ahead=count)
        first = [part for part in self.parts if type(part.writer) is GreedySequence and not part.writer.tokens]
        forced = [(int(part.rows[0]), part.writer.forced) for part in first if part.writer.forced is not None]
        began = self._clock()
        found = self._device.run(self._table[:SOURCE], count, tuple(zip(*forced, strict=True)) or ((), ()))
        self._learn((self._clock() - began) / count)
        self._table[LENGTH, self._table[SOURCE] > 0] += count
        self.steps, self.tokens = count, 0
        self._table[TOKEN] = found[:, -1]
        for row, token in forced if count == 1 else ():
            self._table[TOKEN, row] = token
        tokens = found.tolist()
        for part in self.parts:
            if type(part.writer) is GreedySequence:
                before = part.writer.missing
                try:
                    part.writer.append_all(tokens[part.rows[0]])
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # of its stopping criterion; a panic of a Rust library is no Exception
                    part.error = error
                self.tokens += before - part.writer.missing
        if others:
            self._advance(others)
            self.logit_steps += 1
        else:
            self.token_steps += count
        return [part for part in self.parts if part.writer.is_done or part.error is not None]

    def _advance(self, parts: Sequence[RunningSequence]) -> None:
        """Drawn rows and beams, by their logits."""
        rows = np.concatenate([part.rows for part in parts])
        self.tokens += rows.size
        logits, order = self._device.logits(rows), np.arange(self._table.shape[1])
        for part in parts:
            its_own, logits = logits[: part.rows.size], logits[part.rows.size :]
            try:
                self._table[TOKEN, part.rows], order[part.rows] = part.advanced(its_own)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # this one's fault alone
                part.error = error
        moved = np.flatnonzero(order != np.arange(order.size))
        if moved.size:
            try:
                self._device.branch(moved, order[moved])
            except Exception as error:
                for part in parts:
                    if np.isin(part.rows, moved).any():
                        part.error = error

    def _count(self) -> int:
        """How many steps to take before the host looks."""
        count = min(MOST_STEPS, max(1, self.rows // 4), max(part.writer.missing for part in self.parts))
        # A row that ends within these steps goes on to their end: not into larger buffers, nor beyond all positions.
        room = min(self._device.shape[2], self._positions) - int(self._table[LENGTH].max())
        count = min(count, room) if room > 0 else 1
        return max(1, min(count, int(CHUNK_S / self._step_s))) if self._step_s else count

    def _learn(self, step_s: float) -> None:
        """The shortest step of late: a pause of the host is not the device's time."""
        old = self._step_s
        self._step_s = step_s if not old or step_s < old else old + 0.1 * (step_s - old)

    def _fit(self, rows: int, source: int, ahead: int) -> None:
        """See to it that there is memory for so many rows and source tokens, and for the next steps."""
        longest = int(self._table[LENGTH].max(initial=0)) + ahead
        wanted = self._device.shape_for(rows, max(source, int(self._table[SOURCE].max(initial=0))), longest)
        held = self._device.shape
        fits = all(new <= old for new, old in zip(wanted, held, strict=True))
        self._too_large = self._too_large + ahead if fits and wanted != held and self.rows else 0
        if fits and self.rows and self._too_large < PATIENCE:
            return
        if wanted != held:
            kept = np.concatenate([part.rows for part in self.parts]) if self.parts else np.empty(0, dtype=np.int64)
            self._device.fit(wanted, kept)
            table = _idle(wanted[0])
            table[:, : kept.size] = self._table[:, kept]
            self._table, self._too_large = table, 0
            _place(self.parts, np.arange(kept.size))


def running_batch(backend: Any, rows: int) -> RunningBatch | DeviceRunningBatch:
    """The one that a backend is made for, ready for so many rows.

    >>> from types import SimpleNamespace
    >>> type(running_batch(SimpleNamespace(), rows=8)).__name__
    'RunningBatch'
    """
    if not hasattr(backend, "in_flight"):
        return RunningBatch(backend)
    batch = DeviceRunningBatch(backend)
    batch.warm(rows)
    return batch
