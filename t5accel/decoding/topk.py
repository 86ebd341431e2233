"""Top-k over the beams of each source, without sorting the vocabulary or a full log-softmax."""

from __future__ import annotations

from math import isqrt

import numpy as np

from t5accel.decoding.backend import SuppressedTokens

_BLOCK = 2**17  # scores processed at a time: half a megabyte, which stays in a core's L2 cache


class BeamTopK:
    """Find the best of each source's K * V continuations; holds the working memory.

    A row of V logits is read as a matrix of W columns; column w holds the tokens w, w + W, w + 2W, … The n columns of
    a source's rows with the highest maxima hold its n best continuations. So one pass over V finds the maxima, a second
    one sums the exponentials for the log-softmax, and only the n columns, a few hundred numbers, are looked at further.

    >>> logits = np.log([[[0.5, 0.3, 0.2], [0.89, 0.1, 0.01]]])  # one source with two rows
    >>> scores, rows, tokens = BeamTopK(3).best(logits, np.log([[0.4, 0.6]]), 3)
    >>> [f"{probability:.2f}" for probability in np.exp(scores[0])], rows.tolist(), tokens.tolist()
    (['0.53', '0.20', '0.12'], [[1, 0, 0]], [[0, 0, 1]])
    """

    def __init__(self, vocab_size: int):
        # Few long columns leave much to look at, many short ones many maxima to choose from. Equal lengths are best.
        root = isqrt(vocab_size)
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
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The n = ``count`` best continuations of each source, best first, or all K * V if these are fewer.

        Args:
            logits: (B, K, V) of the next token; not written to.
            scores: (B, K), the summed log-probabilities of each row.
            suppressed: never chosen. They keep their share of the probability, as in transformers.
            renormalized: the probabilities of the other tokens sum to 1 instead.

        Returns:
            Scores (B, n) float32 with the new token's log-probability, the row 0 … K - 1 that is continued, and the
            token, both (B, n) int64. Equal scores come in any order.
        """
        batch, rows, vocab_size = logits.shape
        flat = np.ascontiguousarray(logits, dtype=np.float32).reshape(batch * rows, vocab_size)
        first_rows = np.arange(0, batch * rows, rows)[:, None]
        if suppressed is None:
            never = ()
        else:
            never = suppressed if isinstance(suppressed, tuple) else (suppressed,)
        if renormalized and never:
            flat = flat.copy()
            flat[:, never] = -np.inf
        maxima, highest, shift = self._passes(flat)
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
        for token in never:
            values[tokens == token] = -np.inf
        values = values.reshape(batch, -1)
        best = np.argsort(values, axis=1)[:, : -1 - min(count, rows * vocab_size) : -1]
        best = best + np.arange(0, values.size, values.shape[1])[:, None]
        return values.ravel().take(best), row.ravel().take(best // len(self._column)), tokens.ravel().take(best)

    def _passes(self, flat: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(R, V) logits -> column maxima (R, W), the highest logit x of each row, log(sum(exp(logits - x)))."""
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
    """``np.take_along_axis(array, index, axis=1)``, in less time: (B, m), (B, n) -> (B, n)."""
    return array.ravel().take(index + np.arange(0, array.size, array.shape[1])[:, None])


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Positions of the ``count`` largest values of each row, in any order: (B, m) -> (B, n); all if m is less."""
    first = max(values.shape[1] - count, 0)
    return np.argpartition(values, first, axis=1)[:, first:]
