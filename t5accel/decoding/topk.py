"""The likeliest continuations of many beams, without sorting a vocabulary or writing down its log-probabilities."""

from __future__ import annotations

from math import isqrt

import numpy as np

from t5accel.decoding.backend import Forbidden

_BLOCK = 2**17  # scores worked on at a time: half a megabyte, which stays in a core's second cache


class BeamTopK:
    """Finds the best among K * V continuations of each source, and holds the working memory for it.

    A row of V logits is read as a matrix whose columns are *lanes*: lane w holds the tokens w, w + W, w + 2W, … Of all
    lanes of a source's rows, the n with the highest maxima hold the n best continuations, since a lane with a higher
    maximum holds a better one. So one pass finds the maxima, and after it only n lanes, a few hundred numbers, are
    looked at. A second pass sums the exponentials for the log-softmax. Nothing else touches all of V.

    Args:
        vocab_size: V.

    >>> logits = np.log([[[0.5, 0.3, 0.2], [0.89, 0.1, 0.01]]])  # one source with two rows
    >>> scores, rows, tokens = BeamTopK(3).best(logits, np.log([[0.4, 0.6]]), 3)
    >>> [f"{probability:.2f}" for probability in np.exp(scores[0])], rows.tolist(), tokens.tolist()
    (['0.53', '0.20', '0.12'], [[1, 0, 0]], [[0, 0, 1]])
    """

    def __init__(self, vocab_size: int):
        # Few long lanes leave much to look at, many short ones many maxima to choose from. Best all are equally long.
        root = isqrt(vocab_size)
        widths = range(min(4 * root, vocab_size), 8 * root)
        self._width = next((width for width in widths if vocab_size % width == 0), widths[0])
        self._lane = np.arange(0, vocab_size, self._width)
        self._memory = np.empty((max(1, _BLOCK // vocab_size), vocab_size), dtype=np.float32)

    def best(
        self,
        logits: np.ndarray,
        scores: np.ndarray,
        count: int,
        *,
        forbidden: Forbidden = None,
        renormalized: bool = False,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The ``count`` likeliest continuations of each source, best first.

        Args:
            logits: (B, K, V) of the next token; not written to.
            scores: (B, K), the sum of the log-probabilities of each row's tokens so far.
            count: n; fewer come back where K * V is less.
            forbidden: tokens that are not chosen. They keep their share of the probability, as in transformers.
            renormalized: they do not keep it: the others' probabilities sum to 1.

        Returns:
            Three arrays (B, n): the scores, now with the new token's log-probability, float32; which of the K rows it
            continues; and the token, both int64. Equal scores come in any order.
        """
        batch, rows, vocab_size = logits.shape
        flat = np.ascontiguousarray(logits, dtype=np.float32).reshape(batch * rows, vocab_size)
        first_rows = np.arange(0, batch * rows, rows)[:, None]
        never = () if forbidden is None else forbidden if isinstance(forbidden, tuple) else (forbidden,)
        if renormalized and never:
            flat = flat.copy()
            flat[:, never] = -np.inf
        maxima, highest, shift = self._passes(flat)
        np.subtract(np.asarray(scores, dtype=np.float32).ravel(), shift, out=shift)
        # A lane whose maximum is a forbidden token is overrated: one of each row, so as many more are looked at.
        looked_at = count + rows * len(never)
        maxima -= highest[:, None]  # before the rest is added: large logits are close, and their difference is exact
        maxima += shift[:, None]
        row, lane = np.divmod(_largest(maxima.reshape(batch, -1), looked_at), self._width)
        flat_row = row + first_rows
        tokens = lane[:, :, None] + self._lane
        values = flat.ravel().take(tokens + (flat_row * vocab_size)[:, :, None], mode="clip")
        values -= highest.take(flat_row)[:, :, None]
        values += shift.take(flat_row)[:, :, None]
        if vocab_size % self._width:  # past the end of its row a shorter lane was read from the next one
            values[tokens >= vocab_size] = -np.inf
        for token in never:
            values[tokens == token] = -np.inf
        values = values.reshape(batch, -1)
        best = np.argsort(values, axis=1)[:, : -1 - min(count, rows * vocab_size) : -1]
        best = best + np.arange(0, values.size, values.shape[1])[:, None]
        return values.ravel().take(best), row.ravel().take(best // len(self._lane)), tokens.ravel().take(best)

    def _passes(self, flat: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(R, V) logits -> the maxima of the lanes (R, W), the highest logit x of each row, log(sum(exp(… - x)))."""
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
    """``np.take_along_axis(array, index, axis=1)`` of two matrices, (B, m) and (B, n) -> (B, n), in less time.

    >>> take_rows(np.array([[5, 6], [7, 8]]), np.array([[1], [0]])).tolist()
    [[6], [7]]
    """
    return array.ravel().take(index + np.arange(0, array.size, array.shape[1])[:, None])


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """(B, m) -> (B, n): where the n largest of each row stand, in any order; all of them where n >= m."""
    first = max(values.shape[1] - count, 0)
    return np.argpartition(values, first, axis=1)[:, first:]
