"""Exact arg-max from approximate logits of an 8-bit output head.

A bound of their error leaves a few candidates, whose logits are computed exactly: a VA-file (Weber, Schek and Blott
1998), used for largest inner products by FEXIPRO (Li, Chan, Yiu and Mamoulis 2017), here also covering float rounding.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from t5accel.decoding.backend import SuppressedTokens

UNIT = 2.0**-24  # u: the largest relative change by rounding to float32
TINY = 2.0**-90  # more than all that can underflow, even where a CPU flushes the smallest numbers to zero
HUGE = 1e37  # sums below this cannot overflow on their way
LOST = 2.0**-54  # more than the norm of up to 2**16 numbers whose squares underflow
MAX_CANDIDATES = 256  # of a row; computing more exactly takes longer than all logits
MAX_ROWS = 64  # of a step; larger ones were not measured
# The shortlist is given up for steps of a number of rows if more than 16 of them and one in 8 were repeated: it saves
# less than that. Where the order of additions decides one token in 200, as in random weights, 32 rows are too many.
MIN_FALLBACKS, MAX_FALLBACK_SHARE = 16, 1 / 8


@dataclass(frozen=True)
class OutputHead:
    """The exact output head, and bounds of its 8-bit copy."""

    rows: np.ndarray  # (V, d_model) float32
    largest_row: float  # at least the Euclidean norm of every row of the copy
    largest_error: float  # at least the norm of every difference between a row and its copy
    bias: np.ndarray | None = None  # (V,) float32, added to the logits, approximate ones included

    @cached_property
    def largest_bias(self) -> float:
        return 0.0 if self.bias is None else float(np.abs(self.bias).max())

    def logits(self, tokens: np.ndarray, products: np.ndarray) -> np.ndarray:
        """Add the bias to ``products`` (n,) of the rows of ``tokens`` (n,)."""
        return products if self.bias is None else products + self.bias[tokens]


class ApproxLogits(NamedTuple):
    """The graph's output for some rows, float32, with any axes in front."""

    logits: np.ndarray  # (…, V): the copy times the quantised hidden state, summed in integers, plus the bias
    hidden: np.ndarray  # (…, d_model), the head's input
    norms: np.ndarray  # (…), Euclidean norms of ``hidden``
    errors: np.ndarray  # (…), Euclidean norms of what its quantisation lost


# Let w be a row of the head and v its copy, h the hidden state and g its quantised form, u = `UNIT`, γ = `rounding`.
#
# 1. An approximate logit differs from w·h by at most b = |v| |h - g| + |w - v| |h| + 4 u |v| |g|: since w·h - v·g is
#    v·(h - g) + (w - v)·h, and turning the integer sum v·g into a float rounds three times.
# 2. A float32 product computes w·h to within n = γ Σ|w_k h_k| <= γ |w| |h|, in whatever order it adds.
# 3. The token with the largest approximate logit is computed in float32. Its logit, wherever that is computed, is
#    within 2 n of it. So a token whose approximate logit is smaller by more than 3 n + b cannot have the largest logit.
# 4. Of the other tokens w·h is computed. One that exceeds each other by more than both their n, and by what we rounded
#    off ourselves, has the largest logit. If none does, the order of additions decides, or a tie: no token is certain.
#
# A bias c of the logits is one more product, c times 1, in w·h, n and the approximate logit. The copy has it exactly,
# so b grows only by what its addition rounds, and n by γ |c|.
def certify_argmax(head: OutputHead, approx: ApproxLogits, suppressed: SuppressedTokens = None) -> np.ndarray | None:
    """Return the arg-max of the exact logits, (R,) int64; ``None`` unless all are certain.

    No token is certain where numbers are not finite or near overflow, or more than `MAX_CANDIDATES` remain. Writes to
    ``approx.logits``.

    >>> head = OutputHead(np.array([[1, 0], [0, 1], [1, 1]], np.float32), largest_row=1.5, largest_error=0.01)
    >>> hidden, norms, errors = np.array([[2, 1]], np.float32), np.array([2.24]), np.array([0.01])
    >>> approx = ApproxLogits(hidden @ head.rows.T, hidden, norms, errors)
    >>> certify_argmax(head, approx), certify_argmax(head, approx, suppressed=2)
    (array([2]), array([0]))
    """
    logits, hidden = (array.reshape(-1, array.shape[-1]) for array in approx[:2])
    if suppressed is not None:
        logits[:, suppressed] = -np.inf
    tokens = []
    # Row by row: a row's candidates are so few that arrays of all rows would cost more than they save.
    for row in zip(logits, hidden, approx.norms.ravel().tolist(), approx.errors.ravel().tolist(), strict=True):
        token = _certain(head, *row)
        if token is None:
            return None
        tokens.append(token)
    return np.array(tokens, dtype=np.int64)


def _certain(head: OutputHead, logits: np.ndarray, hidden: np.ndarray, norm: float, error: float) -> int | None:
    """The token of one row, from (V,) approximate logits, the (d_model,) hidden state and its norms."""
    # A step has just read all weights, so each numpy function must come from memory: few are called, on Python numbers.
    norm, error = rounded_up(norm, len(hidden)), rounded_up(error, len(hidden))
    reach = (head.largest_row + head.largest_error) * norm + head.largest_bias  # at least |w| |h| + |c|
    bound, noise = error_bound(head, norm, error), rounding(len(hidden)) * reach + TINY
    if not bound + reach < HUGE:
        return None
    favourite = int(logits.argmax())
    exact = float(head.logits(favourite, np.einsum("d,d->", head.rows[favourite], hidden)))
    # Checking that the favourite keeps its bound costs nothing, and would fail on a runtime that computes wrongly.
    if not abs(exact - float(logits[favourite])) <= bound + noise:
        return None
    lowest = exact - 3 * noise - bound
    candidates = (logits >= lowest - 4 * UNIT * abs(lowest)).nonzero()[0]  # the comparison rounds its number to float32
    if len(candidates) == 1 or len(candidates) > MAX_CANDIDATES:
        return favourite if len(candidates) == 1 else None
    rows = head.rows[candidates]
    exact = head.logits(candidates, np.einsum("nd,d->n", rows, hidden))
    best = exact.argmax()
    rivals = (exact >= float(exact[best]) - 4 * noise).nonzero()[0]
    return int(candidates[best]) if len(rivals) == 1 else _largest(head, candidates[rivals], hidden)


def _largest(head: OutputHead, tokens: np.ndarray, hidden: np.ndarray) -> int | None:
    """Which of n tokens has the largest logit, by float64 and the sharper n of step 2."""
    products = head.rows[tokens] * hidden.astype(np.float64)  # exact: 24 bits times 24 bits
    sums, sizes = head.logits(tokens, products.sum(axis=1)), np.abs(products).sum(axis=1) + head.largest_bias
    noise = rounding(len(hidden)) * sizes + TINY
    best = sums.argmax()
    return int(tokens[best]) if (sums + noise >= sums[best] - noise[best]).sum() == 1 else None


def error_bound(head: OutputHead, norm: float, error: float) -> float:
    """Bound the error of approximate logits: b of step 1, from `|h|` and `|h - g|`."""
    # Nothing is assumed of how hidden states were quantised: the loss was computed, in float32. 8 u in place of 4 u
    # also covers the rounding of the differences, and that of an added bias.
    rounded = 8 * UNIT * (head.largest_row * (norm + error) + head.largest_bias)
    return head.largest_row * error + rounded + head.largest_error * norm + TINY


def rounded_up(norm: float, width: int) -> float:
    """Bound the norm of ``width`` numbers from the computed float32 norm."""
    return norm * (1 + rounding(width)) + LOST


def rounding(width: int) -> float:
    """γ of a float32 sum of ``width`` products in any order (Higham 2002, section 3.1)."""
    width += 2  # for a bias, and for what we round off in float64
    return width * UNIT / (1 - width * UNIT)


class Shortlist:
    """Certified arg-max for one export, with statistics of whether it is worthwhile.

    An uncertain step is repeated with all exact logits.
    """

    # One session holds the layers and both heads, which is 66 MB more in memory than approximate logits need (at
    # t5-small's size). Two sessions would hold the layers twice, and open the second one in the middle of an answer.

    def __init__(self, head: OutputHead):
        self.head = head  # its rows are mapped from the file of weights
        self.steps: Counter[int] = Counter()  # by their number of rows
        self.fallbacks: Counter[int] = Counter()
        self._lock = threading.Lock()

    def is_worthwhile(self, rows: int) -> bool:
        """Whether to try it on a step of this many rows."""
        allowed = MIN_FALLBACKS + MAX_FALLBACK_SHARE * self.steps[rows]
        return rows <= MAX_ROWS and self.fallbacks[rows] <= allowed

    def choose(self, results: Sequence[np.ndarray], suppressed: SuppressedTokens) -> np.ndarray | None:
        """Certify the arrays of `ApproxLogits`, and count the step."""
        approx = ApproxLogits(*results)
        tokens = certify_argmax(self.head, approx, suppressed)
        with self._lock:
            self.steps[approx.norms.size] += 1
            self.fallbacks[approx.norms.size] += tokens is None
        return tokens
