"""Beam search, equal to transformers' ``generate(num_beams=K)``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from t5accel.checks import as_count, is_number
from t5accel.decoding.backend import NOT_FINITE, Backend, Generated, State, SuppressedTokens, shrunk
from t5accel.decoding.request import GenerationInputs
from t5accel.decoding.token_constraints import NO_CONSTRAINTS, TokenConstraints, is_eos
from t5accel.errors import EngineError, InputError

DEFAULT_BEAMS = 4
# Steps of `run_beams` and `run_samples` between two checks for ended sources: first few, for short answers, then twice
# as many each time.
FIRST_RUN, MAX_RUN_STEPS = 8, 32
_LARGEST_EXPONENT = 70.0  # scores times or over exp(70) are still far from the ends of float32
_BLOCK = 2**17  # scores processed at a time: half a megabyte, which stays in a core's L2 cache
# From the sequences so far (n, K, L) and logits (n, K, V) to log-probabilities that are no more normalised.
Process = Callable[[np.ndarray, np.ndarray], np.ndarray]
START = 0  # the root of the tree; as a hypothesis, an empty one


class BackpointerTree:
    """All tokens of all beams, each with its predecessor.

    A beam is a node, so copying one costs nothing. The nodes of one step are numbered in the order of its tokens.
    """

    def __init__(self) -> None:
        self._tokens, self._parents, self._size = [np.zeros(1, dtype=np.int64)], [np.array([START])], 1

    def grow(self, parents: np.ndarray, tokens: np.ndarray) -> int:
        """Add a node for each token; return the number of the first."""
        self._parents.append(parents)
        self._tokens.append(tokens)
        self._size += tokens.size
        return self._size - tokens.size

    def sequences(self, nodes: np.ndarray, *, pad_token_id: int) -> np.ndarray:
        """Return the tokens from the root to N nodes: (N, L) int64, right-padded."""
        tokens, parents = (np.concatenate([part.ravel() for part in parts]) for parts in (self._tokens, self._parents))
        backwards = []
        while (nodes != START).any():
            backwards.append(nodes)
            nodes = parents[nodes]  # START is its own parent
        paths = np.array(backwards[::-1], dtype=np.int64).reshape(-1, len(nodes)).T  # aligned to the right
        real = paths != START
        sequences = np.full(paths.shape, pad_token_id, dtype=np.int64)
        sequences[np.arange(paths.shape[1]) < real.sum(axis=1, keepdims=True)] = tokens[paths[real]]
        return sequences


class FinishedHypotheses:
    """The best K finished hypotheses of each source, and the open sources.

    The rules are those of transformers 4.57 and 5.x (``_update_finished_beams`` and ``_check_early_stop_heuristic`` in
    ``generation/utils.py``):

    - A hypothesis of n tokens scores the sum of their log-probabilities over ``n ** length_penalty``.
    - A source with K hypotheses stops at once if ``early_stopping`` is ``True``; otherwise when its best beam, if it
      ended now, would not beat the worst of them. ``"never"`` with a penalty above 0 divides that beam's score as at
      the longest length instead, because longer hypotheses may still score better.
    - Hypotheses found after a source has stopped do not count.
    """

    def __init__(
        self, shape: tuple[int, int], *, length_penalty: float, early_stopping: bool | str, max_new_tokens: int
    ):
        self.scores = np.full(shape, -np.inf, dtype=np.float32)  # (B, K), best first; -inf if there is none yet
        self.nodes = np.full(shape, START)  # (B, K) of the tree
        self.is_open = np.ones(shape[0], dtype=bool)  # (B,)
        self._is_full = np.zeros(shape[0], dtype=bool)
        self._length_penalty, self._early_stopping = length_penalty, early_stopping
        self._scores_at_longest = early_stopping == "never" and length_penalty > 0
        self._max_new_tokens = max_new_tokens

    def add(self, sources: np.ndarray, scores: np.ndarray, nodes: np.ndarray, length: int) -> None:
        """Add hypotheses of one length to n different sources.

        ``scores`` (n, m) are sums of log-probabilities, -inf for none, and ``nodes`` (n, m) their last tokens.
        """
        scores = np.concatenate([self.scores[sources], scores / self._penalty(length)], axis=1)
        nodes = np.concatenate([self.nodes[sources], nodes], axis=1)
        best = np.argsort(-scores, axis=1, kind="stable")[:, : self.scores.shape[1]]
        self.scores[sources], self.nodes[sources] = take_rows(scores, best), take_rows(nodes, best)
        self._is_full[sources] = (self.nodes[sources] != START).all(axis=1)

    def update_done(self, sources: np.ndarray, best_open: np.ndarray, length: int) -> bool:
        """Close sources that cannot improve on their best open beam; whether any closed."""
        stops = self._is_full[sources] & self.is_open[sources]
        if not stops.any():
            return False
        if self._early_stopping is not True:
            attainable = best_open / self._penalty(self._max_new_tokens if self._scores_at_longest else length)
            stops &= ~(attainable > self.scores[sources, -1])
        self.is_open[sources[stops]] = False
        return bool(stops.any())

    def _penalty(self, length: int) -> np.float32:
        return np.float32(float(length) ** self._length_penalty)


def beam_search(
    backend: Backend,
    input_ids: Any,
    attention_mask: Any = None,
    *,
    num_beams: int | None = None,
    max_new_tokens: int = 64,
    min_new_tokens: int | None = None,
    length_penalty: float | None = None,
    early_stopping: bool | str | None = None,
    num_return_sequences: int = 1,
    decoder_input_ids: Any = None,
    forced_bos_token_id: int | None = None,
    decoder_start_token_id: int | None = None,
) -> Generated:
    """Search for the likeliest answers with K beams for each source.

    Sequences and scores are those of transformers 4.57 and 5.x, except that an answer is padded with the pad id after
    its end, where transformers repeats the end token if the pad id is 0, and that no score is too low: below -1e9
    transformers answers nothing. Between exactly equal scores the choice is free. Arguments that are not listed here
    are those of `greedy`. Raises ``InputError`` as it does, for an option out of range, and if no answer has a score.

    Args:
        num_beams: K, less than the vocabulary. By default the model's, or 4 if it names none.
        length_penalty: divides the score of n new tokens by ``n ** length_penalty``: above 0 it favours long answers.
            By default the model's.
        early_stopping: when a source with K answers stops (see `FinishedHypotheses`). By default the model's.
        num_return_sequences: N, at most K. Where a source has fewer answers, padding with a score of -inf follows.
        decoder_input_ids, forced_bos_token_id, decoder_start_token_id: as in `greedy`; not scored.

    Returns:
        ``sequences`` (B * N, L) int64, the N best of the first source first, and their ``scores`` (B * N,) float32.

    >>> import numpy as np
    >>> class Chain:  # a toy backend: the next token depends on the last one alone, and 3 ends
    ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 4, 0, 3, 0
    ...     odds = np.array([[0, 0.6, 0.4, 0], [0.4, 0, 0.3, 0.3], [0.1, 0, 0, 0.9], [1, 0, 0, 0]]) + 1e-9
    ...     def encode(self, input_ids, attention_mask): return input_ids
    ...     def new_state(self, source, rows_per_source=1): return None
    ...     def step(self, state, input_ids): return np.log(self.odds)[input_ids]
    ...     def reorder(self, state, rows): pass
    ...     def select_sources(self, state, sources): pass
    >>> best = beam_search(Chain(), [[1]], num_beams=2, max_new_tokens=5)  # greedy search would take 1
    >>> best.sequences.tolist(), f"{np.exp(2 * best.scores[0]):.2f}"
    ([[2, 3]], '0.36')
    """
    request = GenerationInputs.checked(
        backend, input_ids, attention_mask, max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens,
        decoder_input_ids=decoder_input_ids, forced_bos_token_id=forced_bos_token_id,
        decoder_start_token_id=decoder_start_token_id, methods=("reorder", "select_sources"),
    )  # fmt: skip
    if num_beams is None:
        num_beams = request.rules.num_beams if request.rules.num_beams > 1 else DEFAULT_BEAMS
    search = BeamState(
        len(request.ids), num_beams, vocab_size=backend.vocab_size, eos_token_id=backend.eos_token_id,
        max_new_tokens=request.max_new_tokens, min_new_tokens=request.min_new_tokens, length_penalty=length_penalty,
        early_stopping=early_stopping, rules=request.rules, has_prefix=request.prefix.shape[1] > 1,
    )  # fmt: skip
    returned = as_count(num_return_sequences, "num_return_sequences", at_least=1)
    if returned > num_beams:
        raise InputError(f"num_return_sequences must be at most num_beams, {num_beams}, got {returned}.")
    state = backend.new_state(backend.encode(request.ids, request.mask), rows_per_source=int(num_beams))
    search.run(backend, state, request.prefix)
    new, scores = search.best(returned, pad_token_id=backend.pad_token_id)  # (B * N, L)
    given = np.repeat(request.prefix[:, 1:], returned, axis=0)
    return Generated(np.concatenate([given, new], axis=1), decoder_calls=search.length, scores=scores)


class BeamUpdate(NamedTuple):
    """Changes of the decoder's state before its next step, in this order."""

    kept: np.ndarray | None  # (n',) the sources that stay, if any leave
    rows: np.ndarray | None  # (n', K) the row of its source that each beam continues, if any moves
    tokens: np.ndarray  # (n', K) int64, the next input


class BeamState:
    """The K beams of each of B sources, without the decoder.

    `length` counts the tokens of each open beam, and the steps. Searches of one thread may share a `BeamTopK`.
    Raises ``InputError`` if an option is invalid.
    """

    def __init__(
        self,
        batch: int,
        num_beams: int,
        *,
        vocab_size: int,
        eos_token_id: int,
        max_new_tokens: int,
        min_new_tokens: int = 0,
        length_penalty: float | None = None,
        early_stopping: bool | str | None = None,
        rules: TokenConstraints = NO_CONSTRAINTS,
        has_prefix: bool = False,
        topk: BeamTopK | None = None,
    ):
        beams = as_count(num_beams, "num_beams", at_least=1)
        ends = rules.eos_tokens(eos_token_id)
        if beams > vocab_size - len(ends):  # the first step takes as many tokens that do not end
            raise InputError(
                f"num_beams must be at most {vocab_size - len(ends)}, the tokens that end no answer, got {beams}."
            )
        length_penalty = rules.length_penalty if length_penalty is None else length_penalty
        early_stopping = rules.early_stopping if early_stopping is None else early_stopping
        self._finished = FinishedHypotheses(
            (batch, beams),
            length_penalty=_length_penalty(length_penalty, max_new_tokens),
            early_stopping=_early_stopping(early_stopping) or beams == 1,  # greedy search ends with its first answer
            max_new_tokens=max_new_tokens,
        )
        self._tree, self._topk = BackpointerTree(), topk or BeamTopK(vocab_size)
        self._longest, self._shortest = max_new_tokens, min_new_tokens
        self._ends, self._vocab_size = ends, vocab_size
        self._ranked = (1 + len(ends)) * beams  # m: each beam may end in any of these ways, and K must go on
        self._order, self._rules, self._has_prefix = np.arange(beams), rules, has_prefix
        self._rows_are_equal = True  # whether the K rows of a source have read the same tokens
        self._active = np.arange(batch)  # (n,) the sources that are still searched
        self._scores = np.zeros((batch, 1), dtype=np.float32)  # one column until the rows of a source differ
        self._nodes = np.full((batch, 1), START)  # of the first row of each source; the other rows' follow it
        self.length = 0

    def run(self, backend: Backend, state: State, prefix: np.ndarray, process: Process | None = None) -> None:
        """Search to the end from an empty state and a ``prefix`` (B, T)."""
        step_input = sequences = np.repeat(prefix[:, None], len(self._order), axis=1)  # (B, K, T)
        if process is None and hasattr(backend, "run_beams") and self._ranked <= self._vocab_size:
            return self._run_on_device(backend, state, step_input)
        while True:
            scores = backend.step(state, step_input)[:, :, -1]
            scores = scores if process is None else process(sequences, scores)
            if (update := self.advance(scores, processed=process is not None)) is None:
                return None
            if update.kept is not None:
                backend.select_sources(state, update.kept)
                sequences = sequences[update.kept]
            if update.rows is not None:
                backend.reorder(state, update.rows)
                sequences = sequences[np.arange(len(sequences))[:, None], update.rows]
            step_input = update.tokens[:, :, None]  # (n, K, 1)
            sequences = np.concatenate([sequences, step_input], axis=2)

    def _run_on_device(self, backend: Any, state: State, unread: np.ndarray) -> None:
        """Search by ``run_beams``: the backend ranks and reorders; its candidates are replayed here afterwards."""
        going, steps = np.arange(len(unread)), FIRST_RUN  # the places of the searched sources in the state
        scores = np.zeros(unread.shape[:2], dtype=np.float32)
        while True:
            if (forced := self._forced()) is not None:  # the first token, or the last one
                update = self._take(*self._continue_with(forced))
                unread = np.concatenate([unread, np.full((*unread.shape[:2], 1), forced)], axis=2)
            else:
                count = self._rules.steps_until_change(self.length, shortest=self._shortest, longest=self._longest)
                scores[going] = -np.inf  # except one row: before the first step all are equal
                scores[going, : self._scores.shape[1]] = self._scores
                found = backend.run_beams(
                    state, unread, scores, min(count, steps), ends=self._ends, suppressed=self._suppressed(),
                    renormalized=self._rules.renormalize_logits,
                )  # fmt: skip
                for ranked, rows, tokens in zip(*found, strict=True):  # (B, m) each
                    rows = np.minimum(rows[going], self._scores.shape[1] - 1)
                    if (update := self._take(ranked[going], rows, tokens[going])) is None:
                        return
                    if update.kept is not None:
                        going = going[update.kept]
                batch, steps = len(unread), min(2 * steps, MAX_RUN_STEPS)
                if (kept := shrunk(going, batch)) is not None:
                    backend.select_sources(state, kept)
                    batch, going = len(kept), np.searchsorted(kept, going)
                unread = np.zeros((batch, len(self._order), 1), dtype=np.int64)
                unread[going] = update.tokens[:, :, None]
                scores = np.zeros((batch, len(self._order)), dtype=np.float32)
            if update is None:
                return

    def advance(self, logits: np.ndarray, *, processed: bool = False) -> BeamUpdate | None:
        """Take a step with next-token logits (n, K, V), or processed log-probabilities; ``None`` ends the search."""
        if (forced := self._forced()) is not None:
            return self._take(*self._continue_with(forced))
        return self._take(*self._topk.best(
            logits[:, : self._scores.shape[1]], self._scores, self._ranked, suppressed=self._suppressed(),
            renormalized=self._rules.renormalize_logits, processed=processed,
        ))  # fmt: skip

    def _forced(self) -> int | None:
        return self._rules.forced_token(self.length, longest=self._longest, has_prefix=self._has_prefix)

    def _suppressed(self) -> SuppressedTokens:
        return self._rules.suppressed(self._ends if self.length < self._shortest else ())

    def _continue_with(self, token: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Continue each beam with a forced token, which is not scored: (n, K) scores, rows and tokens."""
        shape = self._scores.shape
        return self._scores, np.broadcast_to(self._order[: shape[1]], shape), np.full(shape, token, dtype=np.int64)

    def _take(self, scores: np.ndarray, rows: np.ndarray, tokens: np.ndarray) -> BeamUpdate | None:
        """Take the likeliest continuations, (n, m) each and best first."""
        beams, nodes, active = len(self._order), self._nodes, self._active
        parents = nodes + rows  # (n, m)
        self.length += 1
        ends = is_eos(tokens, self._ends) | (self.length == self._longest)
        if ends.any():
            done = ends[:, :beams] & self._finished.is_open[active, None]  # (n, K)
            if done.any():
                leaves = self._tree.grow(parents[:, :beams], tokens[:, :beams])
                found = np.where(done, scores[:, :beams], -np.inf)
                self._finished.add(active, found, leaves + np.arange(found.size).reshape(found.shape), self.length)
            going_on = np.argsort(ends, axis=1, kind="stable")
            scores, rows, tokens, parents = (take_rows(array, going_on) for array in (scores, rows, tokens, parents))
        if ends.all():  # by a forced end token before the longest length, too
            return None
        scores, rows, tokens = scores[:, :beams], rows[:, :beams], tokens[:, :beams]  # (n, K)
        first_rows = np.arange(0, tokens.size, tokens.shape[1])[:, None]
        nodes = self._tree.grow(parents[:, :beams], tokens) + first_rows  # (n, 1)
        kept = None
        if self._finished.update_done(active, scores[:, 0], self.length):
            staying = np.flatnonzero(self._finished.is_open[active])  # (n',)
            if not staying.size:
                return None
            if 4 * staying.size <= 3 * len(active):
                kept = staying
                active, nodes, scores, rows, tokens = (array[kept] for array in (active, nodes, scores, rows, tokens))
        self._active, self._nodes, self._scores = active, nodes, scores
        if tokens.shape[1] == 1:  # one beam, or a forced first token: all rows stay equal
            return BeamUpdate(kept, None, np.repeat(tokens, beams, axis=1))
        moved = not self._rows_are_equal and (rows != self._order).any()
        self._rows_are_equal = False
        return BeamUpdate(kept, rows if moved else None, tokens)

    def best(self, count: int, *, pad_token_id: int) -> tuple[np.ndarray, np.ndarray]:
        """Return each source's ``count`` best answers (B * n, L), and their scores (B * n,)."""
        nodes = self._finished.nodes[:, :count]
        if (nodes[:, 0] == START).any():
            raise EngineError(NOT_FINITE)
        return self._tree.sequences(nodes.ravel(), pad_token_id=pad_token_id), self._finished.scores[:, :count].ravel()


def _length_penalty(value: Any, longest: int) -> float:
    most = _LARGEST_EXPONENT / math.log(max(longest, 2))
    if not is_number(value) or not abs(value) <= most:
        raise InputError(f"length_penalty must be a number from {-most:.1f} to {most:.1f}, got {value!r}.")
    return float(value)


def _early_stopping(value: Any) -> bool | str:
    if not isinstance(value, bool) and not (isinstance(value, str) and value == "never"):
        raise InputError(f"early_stopping must be False, True or 'never', got {value!r}.")
    return value


class BeamTopK:
    """Top-k over the K * V continuations of each source.

    A row of V logits is read as W columns; column w holds the tokens w, w + W, w + 2W, … The n columns with the highest
    maxima of a source hold its n best continuations. So one pass over V finds the maxima, a second one sums the
    exponentials, and only n columns, a few hundred numbers, are examined further.
    """

    def __init__(self, vocab_size: int):
        # Few long columns are much to examine, many short ones many maxima to rank. Equal lengths are best.
        root = math.isqrt(vocab_size)
        widths = range(min(4 * root, vocab_size), 8 * root)
        self._width = next((width for width in widths if vocab_size % width == 0), widths[0])
        self._column = np.arange(0, vocab_size, self._width)
        self._memory = np.empty((max(1, _BLOCK // vocab_size), vocab_size), dtype=np.float32)

    def best(
        self,
        logits: np.ndarray,
        scores: np.ndarray,
        count: int,
        *,
        suppressed: SuppressedTokens = None,
        renormalized: bool = False,
        processed: bool = False,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the best n = ``count`` continuations of each source, at most K * V.

        ``logits`` (B, K, V) are of the next token, ``scores`` (B, K) the sums of log-probabilities so far. Suppressed
        tokens keep their share of the probability, as in transformers, unless ``renormalized``; ``processed`` logits
        are added as they are. Returns new scores (B, n) float32, best first, the continued row and the token, both
        (B, n) int64; equal scores come in any order.
        """
        batch, rows, vocab_size = logits.shape
        flat = np.ascontiguousarray(logits, dtype=np.float32).reshape(batch * rows, vocab_size)
        first_rows = np.arange(0, batch * rows, rows)[:, None]
        never = suppressed if isinstance(suppressed, tuple) else () if suppressed is None else (suppressed,)
        if renormalized and never:
            flat = flat.copy()
            flat[:, never] = -np.inf
        maxima, highest, shift = self._passes(flat)
        if processed and not renormalized:
            highest[:], shift[:] = 0, 0
        np.subtract(np.asarray(scores, dtype=np.float32).ravel(), shift, out=shift)
        # A column whose maximum is suppressed is overrated. There is one for each token and row: look at as many more.
        candidates = count + rows * len(never)
        maxima -= highest[:, None]  # before the shift is added: large logits are close, and their difference is exact
        maxima += shift[:, None]
        row, column = np.divmod(_largest(maxima.reshape(batch, -1), candidates), self._width)
        flat_row = row + first_rows
        tokens = column[:, :, None] + self._column
        values = flat.ravel().take(tokens + (flat_row * vocab_size)[:, :, None], mode="clip")
        values -= highest.take(flat_row)[:, :, None]
        values += shift.take(flat_row)[:, :, None]
        if vocab_size % self._width:  # past the end of its row a shorter column was read from the next one
            values[tokens >= vocab_size] = -np.inf
            tokens = np.minimum(tokens, vocab_size - 1)  # where nothing better is left, a beam reads a real token
        if never:
            values[np.isin(tokens, never)] = -np.inf
        values = values.reshape(batch, -1)
        best = np.argsort(values, axis=1)[:, : -1 - min(count, rows * vocab_size) : -1]
        best = best + np.arange(0, values.size, values.shape[1])[:, None]
        return values.ravel().take(best), row.ravel().take(best // len(self._column)), tokens.ravel().take(best)

    def _passes(self, flat: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """From (R, V) logits: column maxima (R, W), each row's maximum x and log(sum(exp(logits - x)))."""
        count, vocab_size = flat.shape
        even = vocab_size - vocab_size % self._width
        maxima = np.empty((count, self._width), dtype=np.float32)
        highest, total = np.empty((2, count), dtype=np.float32)
        for first in range(0, count, len(self._memory)):
            block = slice(first, first + len(self._memory))
            logits, top = flat[block], maxima[block]
            memory = self._memory[: len(logits)]
            logits[:, :even].reshape(len(logits), -1, self._width).max(axis=1, out=top)
            if even < vocab_size:
                head = top[:, : vocab_size - even]
                np.maximum(head, logits[:, even:], out=head)
            top.max(axis=1, out=highest[block])
            np.subtract(logits, highest[block, None], out=memory)
            np.exp(memory, out=memory)
            np.einsum("ij->i", memory, out=total[block])  # four times as fast as sum(), and no less exact than torch's
        return maxima, highest, np.log(total, out=total)


def take_rows(array: np.ndarray, index: np.ndarray) -> np.ndarray:
    """``np.take_along_axis(array, index, axis=1)`` of (B, m) and (B, n), but faster."""
    return array.ravel().take(index + np.arange(0, array.size, array.shape[1])[:, None])


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Positions (B, n) of the ``count`` largest of (B, m) values, in any order; all if m is less."""
    first = max(values.shape[1] - count, 0)
    return np.argpartition(values, first, axis=1)[:, first:]
