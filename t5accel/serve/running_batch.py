"""The running batch: rows of one decoder state, and whose they are. Rows join behind the last and leave from anywhere.

The state has one row for each source. The K beams of a text are K sources, whose cross-attention is the same memory K
times: that is the price. It buys **one step call for all**: however many jobs there are, and whatever they ask for, a
step reads the decoder's weights once.

A place that becomes free is taken by the last row, so that nobody else moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from t5accel.decoding.backend import Backend, Source
from t5accel.decoding.greedy_search import likeliest
from t5accel.serve.writers import Drawn, Greedy, Writer


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
