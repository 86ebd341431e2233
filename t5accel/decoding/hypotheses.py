"""The hypotheses of a beam search: what the open beams have written so far, and the best answers that have ended."""

from __future__ import annotations

import numpy as np

from t5accel.decoding.topk import pick

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


class Answers:
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
        self.scores[sources], self.nodes[sources] = pick(scores, best), pick(nodes, best)
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
