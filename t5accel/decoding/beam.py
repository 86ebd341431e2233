"""Beam search: the K best beginnings of an answer side by side, as transformers' ``generate(num_beams=K)``."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from t5accel.checks import as_count, is_number
from t5accel.decoding.backend import Backend, Generated, State, SuppressedTokens
from t5accel.decoding.request import GenerationInputs
from t5accel.decoding.token_constraints import NO_CONSTRAINTS, TokenConstraints, is_eos
from t5accel.decoding.topk import BeamTopK, take_rows
from t5accel.errors import InputError

# The hypotheses of a beam search: what the open beams have written so far, and the best answers that have ended.


START = 0  # the node in front of all first tokens; as an answer, one of no tokens


class Tree:
    """All tokens that any beam has written, each with the one before it: a beam is a node, and copying one is free.

    Beams share their beginnings, and a step adds one node for each of its tokens, however long the beams are. The nodes
    of one step are numbered in the order of its tokens.

    >>> tree = Tree()
    >>> first = tree.grow(np.array([START, START]), np.array([7, 8]))
    >>> second = tree.grow(np.array([first + 1, first + 1]), np.array([5, 6]))
    >>> tree.sequences(np.array([second + 1, first]), pad_token_id=0).tolist()
    [[8, 6], [7, 0]]
    """

    def __init__(self) -> None:
        self._tokens, self._parents, self._size = [np.zeros(1, dtype=np.int64)], [np.array([START])], 1

    def grow(self, parents: np.ndarray, tokens: np.ndarray) -> int:
        """A new node for each token, after its parent, both int64 of any one shape; returns the number of the first."""
        self._parents.append(parents)
        self._tokens.append(tokens)
        self._size += tokens.size
        return self._size - tokens.size

    def sequences(self, nodes: np.ndarray, *, pad_token_id: int) -> np.ndarray:
        """(N,) nodes -> (N, L) int64: the tokens from the start to each of them, padded on the right."""
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
    """The best K answers of each of B sources that have ended, and which sources may still find better ones.

    The rules are those of transformers 4.57 and 5.x (``_update_finished_beams`` and ``_check_early_stop_heuristic`` in
    its ``generation/utils.py``), in our own words:

    - An answer of n tokens scores the sum of their log-probabilities over ``n ** length_penalty``. Of each source the
      best K are kept.
    - A source with fewer than K answers goes on. With K of them it stops at once if ``early_stopping`` is ``True``;
      else as soon as its best beam, if it ended now, would not beat the worst of them. Long answers may score better:
      therefore ``"never"``, with a penalty above 0, asks this of that beam's score divided as at the longest length.
    - What would be found after a source has stopped does not count.

    Args:
        shape: (B, K).
        length_penalty, early_stopping, max_new_tokens: as of `beam.beam_search`.

    Attributes:
        scores: (B, K) float32, best first; -inf where there is none yet.
        nodes: (B, K) int64 of the `Tree`; `START` where there is none yet.
        is_open: (B,) bool, which sources go on.
    """

    def __init__(
        self, shape: tuple[int, int], *, length_penalty: float, early_stopping: bool | str, max_new_tokens: int
    ):
        self.scores = np.full(shape, -np.inf, dtype=np.float32)
        self.nodes = np.full(shape, START)
        self.is_open = np.ones(shape[0], dtype=bool)
        self._is_full = np.zeros(shape[0], dtype=bool)
        self._length_penalty, self._early_stopping = length_penalty, early_stopping
        self._patient = early_stopping == "never" and length_penalty > 0
        self._max_new_tokens = max_new_tokens

    def add(self, sources: np.ndarray, scores: np.ndarray, nodes: np.ndarray, length: int) -> None:
        """Answers of one length.

        Args:
            sources: (n,) which sources; none twice.
            scores: (n, m) sums of log-probabilities, -inf for what is no answer.
            nodes: (n, m) of the tree.
            length: tokens in each answer.
        """
        scores = np.concatenate([self.scores[sources], scores / self._penalty(length)], axis=1)
        nodes = np.concatenate([self.nodes[sources], nodes], axis=1)
        best = np.argsort(-scores, axis=1, kind="stable")[:, : self.scores.shape[1]]
        self.scores[sources], self.nodes[sources] = take_rows(scores, best), take_rows(nodes, best)
        self._is_full[sources] = (self.nodes[sources] != START).all(axis=1)

    def close(self, sources: np.ndarray, best_open: np.ndarray, length: int) -> bool:
        """Find out whether any of these sources stop, and which.

        Args:
            sources: (n,) which sources.
            best_open: (n,) the best sum of log-probabilities of their open beams.
            length: tokens in each open beam.
        """
        stops = self._is_full[sources] & self.is_open[sources]
        if not stops.any():
            return False
        if self._early_stopping is not True:
            hoped_for = best_open / self._penalty(self._max_new_tokens if self._patient else length)
            stops &= ~(hoped_for > self.scores[sources, -1])
        self.is_open[sources[stops]] = False
        return bool(stops.any())

    def _penalty(self, length: int) -> np.float32:
        return np.float32(float(length) ** self._length_penalty)


DEFAULT_BEAMS = 4
# Steps between two looks at which sources have ended, where a backend takes several without the host: few at first, for
# short answers, then twice as many each time.
FIRST_RUN, LONGEST_RUN = 8, 32
_LARGEST_EXPONENT = 70.0  # scores times or over exp(70) are still far from the ends of float32


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
    """Search for the likeliest answers with K beams for each source, and return the best.

    Every step ranks all continuations of a source's beams by one token. Those among the best K that end are answers,
    the best K that do not end are the next beams. `FinishedHypotheses` says which answers stay, and when a source
    stops. Rules and numbers are those of transformers 4.57 and 5.x (``_beam_search`` in ``generation/utils.py``), the
    code is not. One thing differs: after its end an answer is padded with the pad id, where transformers repeats the
    end token if the pad id is 0.

    The K rows of a source share its cross-attention. Only the cache of self-attention is reordered, and only when the
    order changes. A backend that offers ``run_beams`` is asked for up to `LONGEST_RUN` steps at once; what it took
    beyond the end of a search is dropped.

    Args:
        backend, input_ids, attention_mask, max_new_tokens, min_new_tokens: as of `greedy.greedy`.
        num_beams: K, less than the vocabulary. 1 is greedy search, as in transformers. By default that of the model's
            ``generation_config``, or 4 where that says nothing.
        length_penalty: an answer of n new tokens scores the sum of their log-probabilities over
            ``n ** length_penalty``: above 0 this favours long answers, below 0 short ones. By default the model's.
        early_stopping: when a source that has K answers stops. ``True``: at once. ``False``: when its best beam would
            not be one of them if it ended now. ``"never"``: the same, but with a ``length_penalty`` above 0 when it
            would not be one of them even if it reached ``max_new_tokens`` without losing any likelihood. By default the
            model's.
        num_return_sequences: N, at most K.
        decoder_input_ids, forced_bos_token_id, decoder_start_token_id: see `greedy.greedy`; they are not scored.

    Returns:
        ``sequences`` (B * N, L) int64, the N best of the first source, best first, then those of the next, and their
        ``scores`` (B * N,) float32, transformers' ``sequences_scores``. Sources that stop leave the batch as soon as a
        quarter of it has. Between continuations of exactly equal scores the choice is free.

    Raises:
        InputError: a shape, type or bound is wrong.

    >>> import numpy as np
    >>> class Chain:  # a toy backend: what comes next depends on the last token alone, and 3 ends
    ...     vocab_size, pad_token_id, eos_token_id, decoder_start_token_id = 4, 0, 3, 0
    ...     odds = np.array([[0, 0.6, 0.4, 0], [0.4, 0, 0.3, 0.3], [0.1, 0, 0, 0.9], [1, 0, 0, 0]]) + 1e-9
    ...     def encode(self, input_ids, attention_mask): return input_ids
    ...     def new_state(self, source, rows_per_source=1): return None
    ...     def step(self, state, input_ids): return np.log(self.odds)[input_ids]
    ...     def reorder(self, state, rows): pass
    ...     def select_sources(self, state, sources): pass
    >>> beam_search(Chain(), [[1]], num_beams=1, max_new_tokens=5).sequences.tolist()  # 1 is likelier than 2
    [[1, 0, 1, 0, 1]]
    >>> best = beam_search(Chain(), [[1]], num_beams=2, max_new_tokens=5)
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
    batch, beams = len(request.ids), as_count(num_beams, "num_beams", at_least=1)
    returned = as_count(num_return_sequences, "num_return_sequences", at_least=1)
    if returned > beams:
        raise InputError(f"num_return_sequences is {returned}: give at most num_beams, {beams}, or raise that.")
    search = BeamState(
        batch, beams, vocab_size=backend.vocab_size, eos_token_id=backend.eos_token_id,
        max_new_tokens=request.max_new_tokens, min_new_tokens=request.min_new_tokens, length_penalty=length_penalty,
        early_stopping=early_stopping, rules=request.rules, begun=request.prefix.shape[1] > 1,
    )  # fmt: skip
    state = backend.new_state(backend.encode(request.ids, request.mask), rows_per_source=beams)
    search.run(backend, state, request.prefix)
    # (B * N, L)
    new, scores = search.best(returned, pad_token_id=backend.pad_token_id)
    given = np.repeat(request.prefix[:, 1:], returned, axis=0)
    return Generated(np.concatenate([given, new], axis=1), decoder_calls=search.length, scores=scores)


class BeamUpdate(NamedTuple):
    """What the decoder is to do before it is asked for the next logits, in this order.

    Attributes:
        kept: (n',) which of the n sources stay, where some have stopped and leave; ``None`` where all stay.
        rows: (n', K) from which row of its source each beam goes on; ``None`` where all stay as they are.
        tokens: (n', K) int64, what each beam reads next.
    """

    kept: np.ndarray | None
    rows: np.ndarray | None
    tokens: np.ndarray


class BeamState:
    """The K beams of each of B sources: all of a beam search but the decoder, which whoever owns it asks for logits.

    Args:
        batch, num_beams: B and K.
        vocab_size, eos_token_id: of the backend.
        max_new_tokens, min_new_tokens: bounds on the number of tokens.
        length_penalty, early_stopping: as of `beam_search`.
        rules, begun: what the model asks of every answer, and whether a prefix was given; as of `TokenConstraints`.
        continuations: where several searches of one thread share their working memory.

    Attributes:
        length: tokens in each open beam, and how often the decoder was asked.

    Raises:
        InputError: a type or bound is wrong.

    >>> beams = BeamState(1, 2, vocab_size=4, eos_token_id=3, max_new_tokens=2)
    >>> beams.advance(np.log([[[0.1, 0.5, 0.3, 0.1], [0.1, 0.5, 0.3, 0.1]]])).tokens.tolist()
    [[1, 2]]
    >>> beams.advance(np.log([[[0.3, 0.3, 0.3, 0.1], [0.01, 0.01, 0.01, 0.97]]])) is None
    True
    >>> beams.best(1, pad_token_id=0)[0].tolist()
    [[2, 3]]
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
        begun: bool = False,
        continuations: BeamTopK | None = None,
    ):
        beams = as_count(num_beams, "num_beams", at_least=1)
        ends = rules.eos_tokens(eos_token_id)
        if beams > vocab_size - len(ends):  # the first step takes as many tokens that do not end
            raise InputError(
                f"num_beams is {beams}; give less than the vocabulary has entries, {vocab_size}: at most "
                f"{vocab_size - len(ends)}, which end no answer."
            )
        length_penalty = rules.length_penalty if length_penalty is None else length_penalty
        early_stopping = rules.early_stopping if early_stopping is None else early_stopping
        self._answers = FinishedHypotheses(
            (batch, beams),
            length_penalty=_penalty(length_penalty, max_new_tokens),
            early_stopping=_rule(early_stopping) or beams == 1,  # greedy search ends with its first answer
            max_new_tokens=max_new_tokens,
        )
        self._tree, self._continuations = Tree(), continuations or BeamTopK(vocab_size)
        self._longest, self._shortest, self._ends, self._vocab_size = max_new_tokens, min_new_tokens, ends, vocab_size
        self._ranked = (1 + len(ends)) * beams  # m: each beam may end in any of these ways, and K have to go on
        self._order, self._rules, self._begun = np.arange(beams), rules, begun
        self._read_alike = True  # what the K rows of a source have read
        self._active = np.arange(batch)  # (n,) which source each one is that is still searched
        # One column: before the first step all rows of a source are equal.
        self._scores = np.zeros((batch, 1), dtype=np.float32)
        # In the tree, of the first row of each source; those of the others follow it.
        self._nodes = np.full((batch, 1), START)
        self.length = 0

    def run(self, backend: Backend, state: State, prefix: np.ndarray) -> None:
        """The whole search, from a state without a history, whose rows all begin with ``prefix`` (B, T)."""
        step_input = np.repeat(prefix[:, None], len(self._order), axis=1)  # (B, K, T)
        if hasattr(backend, "run_beams") and self._ranked <= self._vocab_size:
            return self._run_at_once(backend, state, step_input)
        while (move := self.advance(backend.step(state, step_input)[:, :, -1])) is not None:
            if move.kept is not None:
                backend.select_sources(state, move.kept)
            if move.rows is not None:
                backend.reorder(state, move.rows)
            step_input = move.tokens[:, :, None]  # (n, K, 1)

    def _run_at_once(self, backend: Backend, state: State, unread: np.ndarray) -> None:
        """The same by ``run_beams``: the backend ranks and reorders, and its candidates are taken over afterwards."""
        going, steps = np.arange(len(unread)), FIRST_RUN  # where the sources that are searched stand in the state
        scores = np.zeros(unread.shape[:2], dtype=np.float32)
        while True:
            if (forced := self._forced()) is not None:  # the first token, or the last one
                move = self._take(*self._all(forced))
                unread = np.concatenate([unread, np.full((*unread.shape[:2], 1), forced)], axis=2)
            else:
                count = self._rules.steps_alike(self.length, shortest=self._shortest, longest=self._longest)
                scores[going] = -np.inf
                scores[going, : self._scores.shape[1]] = (
                    self._scores
                )  # before the first step rows are equal: one counts
                found = backend.run_beams(
                    state, unread, scores, min(count, steps), ends=self._ends, suppressed=self._suppressed(),
                    renormalized=self._rules.renormalize_logits,
                )  # fmt: skip
                for ranked, rows, tokens in zip(*found, strict=True):  # (B, m) each
                    rows = np.minimum(rows[going], self._scores.shape[1] - 1)
                    if (move := self._take(ranked[going], rows, tokens[going])) is None:
                        return
                    if move.kept is not None:
                        going = going[move.kept]
                batch, steps = len(unread), min(2 * steps, LONGEST_RUN)
                if (kept := shrunk(going, batch)) is not None:
                    backend.select_sources(state, kept)
                    batch, going = len(kept), np.searchsorted(kept, going)
                unread = np.zeros((batch, len(self._order), 1), dtype=np.int64)
                unread[going] = move.tokens[:, :, None]
                scores = np.zeros((batch, len(self._order)), dtype=np.float32)
            if move is None:
                return

    def advance(self, logits: np.ndarray) -> BeamUpdate | None:
        """One step: the next-token logits (n, K, V) of all beams -> how they go on; ``None`` where all is found."""
        if (forced := self._forced()) is not None:
            return self._take(*self._all(forced))
        return self._take(*self._continuations.best(
            logits[:, : self._scores.shape[1]], self._scores, self._ranked, suppressed=self._suppressed(),
            renormalized=self._rules.renormalize_logits,
        ))  # fmt: skip

    def _forced(self) -> int | None:
        return self._rules.forced_token(self.length, longest=self._longest, has_prefix=self._begun)

    def _suppressed(self) -> SuppressedTokens:
        return self._rules.suppressed(self._ends if self.length < self._shortest else ())

    def _all(self, token: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each beam goes on as it has to, at no cost: (n, K) scores, rows and tokens."""
        shape = self._scores.shape
        return self._scores, np.broadcast_to(self._order[: shape[1]], shape), np.full(shape, token, dtype=np.int64)

    def _take(self, scores: np.ndarray, rows: np.ndarray, tokens: np.ndarray) -> BeamUpdate | None:
        """The likeliest continuations, (n, m) each and best first -> how the beams go on."""
        beams, nodes, active = len(self._order), self._nodes, self._active
        parents = nodes + rows  # (n, m)
        self.length += 1
        ends = is_eos(tokens, self._ends)
        if self.length == self._longest:
            ends[:] = True
        if ends.any():
            done = ends[:, :beams] & self._answers.is_open[active, None]  # (n, K)
            if done.any():
                leaves = self._tree.grow(parents[:, :beams], tokens[:, :beams])
                found = np.where(done, scores[:, :beams], -np.inf)
                self._answers.add(active, found, leaves + np.arange(found.size).reshape(found.shape), self.length)
            going_on = np.argsort(ends, axis=1, kind="stable")
            scores, rows, tokens, parents = (take_rows(array, going_on) for array in (scores, rows, tokens, parents))
        if self.length == self._longest:
            return None
        scores, rows, tokens = scores[:, :beams], rows[:, :beams], tokens[:, :beams]  # (n, K)
        first_rows = np.arange(0, tokens.size, tokens.shape[1])[:, None]
        nodes = self._tree.grow(parents[:, :beams], tokens) + first_rows  # (n, 1)
        kept = None
        if self._answers.close(active, scores[:, 0], self.length):
            staying = np.flatnonzero(self._answers.is_open[active])  # (n',)
            if not staying.size:
                return None
            if 4 * staying.size <= 3 * len(active):
                kept = staying
                active, nodes, scores, rows, tokens = (array[kept] for array in (active, nodes, scores, rows, tokens))
        self._active, self._nodes, self._scores = active, nodes, scores
        if tokens.shape[1] == 1:  # there is one beam, or the first token was forced: all rows go on alike
            return BeamUpdate(kept, None, np.repeat(tokens, beams, axis=1))
        moved = not self._read_alike and (rows != self._order).any()
        self._read_alike = False
        return BeamUpdate(kept, rows if moved else None, tokens)

    def best(self, count: int, *, pad_token_id: int) -> tuple[np.ndarray, np.ndarray]:
        """The ``count`` best answers of each source, best first: (B * n, L) int64, and their scores (B * n,)."""
        nodes = self._answers.nodes[:, :count].ravel()
        return self._tree.sequences(nodes, pad_token_id=pad_token_id), self._answers.scores[:, :count].ravel()


def shrunk(going: np.ndarray, batch: int) -> np.ndarray | None:
    """Which of B sources stay if only those are needed, ascending; ``None`` for all, where at least half would stay.

    Some stay for company: the new size is a power of two, so that memory and graphs for few sizes are made.

    >>> shrunk(np.array([1, 4, 5]), 9), shrunk(np.array([1, 4, 5]), 7)
    (array([0, 1, 4, 5]), None)
    """
    size = 1 << (len(going) - 1).bit_length()
    if 2 * size > batch:
        return None
    others = np.setdiff1d(np.arange(batch), going)
    return np.sort(np.concatenate([going, others[: size - len(going)]]))


def _penalty(value: Any, longest: int) -> float:
    most = _LARGEST_EXPONENT / math.log(max(longest, 2))
    if not is_number(value) or not abs(value) <= most:
        raise InputError(f"length_penalty is {value!r}; give a number from {-most:.1f} to {most:.1f}, 0 for none.")
    return float(value)


def _rule(value: Any) -> bool | str:
    if not isinstance(value, bool) and not (isinstance(value, str) and value == "never"):
        raise InputError(f"early_stopping is {value!r}; give False, True or 'never'.")
    return value
