"""The likeliest token, proven from near logits and a handful of exact ones: the same as the arg-max of all of them.

Near logits are computed from a copy of the head in 8 bits. They tell which tokens could be the likeliest, given how far
a near logit can be from the exact one; those few are computed exactly. That a scan of small approximations with bounds
leaves little to look at exactly is the idea of the VA-file (Weber, Schek and Blott, 1998); FEXIPRO (Li, Chan, Yiu and
Mamoulis, 2017) has it for largest inner products. Here the bounds also cover what floats round off.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from t5accel.decoding.backend import Forbidden

UNIT = 2.0**-24  # what rounding to float32 changes a number by, at most and relatively
TINY = 2.0**-90  # more than all that can underflow, even where a CPU takes the smallest numbers for zeros
HUGE = 1e37  # sums below cannot overflow on their way
LOST = 2.0**-54  # more than the norm of up to 2**16 numbers whose squares underflow
MOST = 256  # candidates of a row; to look at more takes longer than to compute all logits
MOST_ROWS = 64  # of a step; what is beyond was not measured
# It is given up for steps of so many rows of which more than 16 and one in 8 had to be taken again: near logits save
# less than that. Where the order of additions decides one token in 200, as in random weights, 32 rows are too many.
PATIENCE, SHARE = 16, 8


@dataclass(frozen=True)
class OutputHead:
    """What is known of an output head and of its copy in 8 bits.

    Attributes:
        rows: (V, d_model) float32, the exact weights.
        largest_row: at least the Euclidean norm of every row of the copy.
        largest_error: at least that of every difference between a row and its copy.
        bias: (V,) float32, what is added to the logits, near ones included; ``None`` if nothing is.
    """

    rows: np.ndarray
    largest_row: float
    largest_error: float
    bias: np.ndarray | None = None

    @cached_property
    def largest_bias(self) -> float:
        """The largest absolute value of a bias."""
        return 0.0 if self.bias is None else float(np.abs(self.bias).max())

    def logits(self, tokens: np.ndarray, products: np.ndarray) -> np.ndarray:
        """Those of ``tokens`` (n,), from the products (n,) of their rows with a hidden state."""
        return products if self.bias is None else products + self.bias[tokens]


class ApproxLogits(NamedTuple):
    """What a graph says about some rows, as float32, with any axes in front.

    Attributes:
        logits: (…, V): the copy of the head times the quantised hidden state, summed in integers, plus the bias.
        hidden: (…, d_model), what the head reads.
        norms: (…), the Euclidean norms of ``hidden``.
        errors: (…), those of what was lost when it was quantised.
    """

    logits: np.ndarray
    hidden: np.ndarray
    norms: np.ndarray
    errors: np.ndarray


def certify_argmax(head: OutputHead, near: ApproxLogits, forbidden: Forbidden = None) -> np.ndarray | None:
    """The token of the largest exact logit in each row, where that is certain in all of them.

    Let w be a row of the head and v its copy, h the hidden state and g its quantised form, and γ = `rounding`.

    1. A near logit differs from w·h by at most b = `|v| |h - g| + |w - v| |h| + 4 u |v| |g|`: since w·h - v·g is
       v·(h - g) + (w - v)·h, and turning the integer sum v·g into a float rounds three times.
    2. A float32 product computes w·h to within n = `γ Σ|w_k h_k| <= γ |w| |h|`, in whatever order it adds.
    3. The token whose near logit is largest is computed, in float32. Its logit, wherever that is computed, is within
       2 n of it. So a token whose near logit is smaller by more than 3 n + b cannot have the largest logit.
    4. Of the others w·h is computed. One that exceeds each other by more than both their n, and by what we rounded off
       ourselves, has the largest logit. If there is none, the order of additions decides, or a tie: then no token is
       certain.

    A bias c of the logits is one more product, c times 1, in all three of w·h, n and the near logit. The copy has it
    exactly, so b grows only by what its addition rounds, and n by `γ |c|`.

    Nor is any where numbers are not finite or near overflow, or more than ``MOST`` tokens are left by step 3.

    Args:
        head: the exact rows, and the bounds of `|v|` and `|w - v|` over all of them.
        near: of R rows in all; to ``logits`` is written.
        forbidden: tokens that shall not be chosen.

    Returns:
        (R,) int64 tokens, or ``None``.

    >>> head = OutputHead(np.array([[1, 0], [0, 1], [1, 1]], np.float32), largest_row=1.5, largest_error=0.01)
    >>> hidden, norms, errors = np.array([[2, 1]], np.float32), np.array([2.24]), np.array([0.01])
    >>> near = ApproxLogits(hidden @ head.rows.T, hidden, norms, errors)
    >>> certify_argmax(head, near), certify_argmax(head, near, forbidden=2)
    (array([2]), array([0]))
    """
    logits, hidden = (array.reshape(-1, array.shape[-1]) for array in near[:2])
    if forbidden is not None:
        logits[:, forbidden] = -np.inf
    tokens = []
    # Row by row: what is left of a row is so little that arrays of all rows would cost more than they save.
    for row in zip(logits, hidden, near.norms.ravel().tolist(), near.errors.ravel().tolist(), strict=True):
        token = _certain(head, *row)
        if token is None:
            return None
        tokens.append(token)
    return np.array(tokens, dtype=np.int64)


def _certain(head: OutputHead, logits: np.ndarray, hidden: np.ndarray, norm: float, error: float) -> int | None:
    """The token of one row: (V,) near logits, (d_model,) hidden state and its norms.

    A step has just read all weights, and each call of numpy that is new after it has to come from memory: so there are
    few, and numbers are Python's.
    """
    norm, error = rounded_up(norm, len(hidden)), rounded_up(error, len(hidden))
    reach = (head.largest_row + head.largest_error) * norm + head.largest_bias  # at least |w| |h| + |c|
    bound, noise = error_bound(head, norm, error), rounding(len(hidden)) * reach + TINY
    if not bound + reach < HUGE:
        return None
    favourite = int(logits.argmax())
    exact = float(head.logits(favourite, np.einsum("d,d->", head.rows[favourite], hidden)))
    # That the favourite keeps its bound costs nothing to see, and would not hold on a runtime that counts wrongly.
    if not abs(exact - float(logits[favourite])) <= bound + noise:
        return None
    lowest = exact - 3 * noise - bound
    left = (logits >= lowest - 4 * UNIT * abs(lowest)).nonzero()[0]  # the comparison rounds its number to float32
    if len(left) == 1 or len(left) > MOST:
        return favourite if len(left) == 1 else None
    rows = head.rows[left]
    exact = head.logits(left, np.einsum("nd,d->n", rows, hidden))
    best = exact.argmax()
    rivals = (exact >= float(exact[best]) - 4 * noise).nonzero()[0]
    return int(left[best]) if len(rivals) == 1 else _largest(head, left[rivals], hidden)


def _largest(head: OutputHead, tokens: np.ndarray, hidden: np.ndarray) -> int | None:
    """Which of n tokens has the largest logit, by float64 and the sharper n of step 2."""
    products = head.rows[tokens] * hidden.astype(np.float64)  # exact: 24 bits times 24 bits
    sums, sizes = head.logits(tokens, products.sum(axis=1)), np.abs(products).sum(axis=1) + head.largest_bias
    noise = rounding(len(hidden)) * sizes + TINY
    best = sums.argmax()
    return int(tokens[best]) if (sums + noise >= sums[best] - noise[best]).sum() == 1 else None


def error_bound(head: OutputHead, norm: float, error: float) -> float:
    """How far a near logit can be from w·h at most: step 1 of `certify_argmax`.

    Nothing is assumed of how hidden states were quantised: what that lost was computed, in float32, and the rounding
    of the differences is covered, too, and that of a bias that is added, by 8 u in place of 4 u.

    Args:
        head: the bounds of `|v|` and `|w - v|`.
        norm, error: `|h|` and `|h - g|`, `rounded_up`.

    >>> error_bound(OutputHead(np.zeros((3, 2), np.float32), largest_row=2.0, largest_error=0.5), norm=3.0, error=0.25)
    2.00000...
    """
    rounded = 8 * UNIT * (head.largest_row * (norm + error) + head.largest_bias)
    return head.largest_row * error + rounded + head.largest_error * norm + TINY


def rounded_up(norm: float, width: int) -> float:
    """At least the norm of ``width`` numbers, given what a float32 engine made of it.

    >>> 5 < rounded_up(5.0, 512) < 5.001
    True
    """
    return norm * (1 + rounding(width)) + LOST


def rounding(width: int) -> float:
    """What ``width`` products and their sum, in float32 and any order, are off by, as a part of the sum of sizes.

    It is the γ of Higham (Accuracy and Stability of Numerical Algorithms, 2002, section 3.1), for two more than there
    are: so that it also covers a bias, and what we round off in float64.

    >>> rounding(512) * 2**24
    514.0157...
    """
    return (width + 2) * UNIT / (1 - (width + 2) * UNIT)


class Shortlist:
    """An export's shortlist, how often it was enough, and for which steps it pays.

    A step that is not certain is taken again with all exact logits. One session holds the layers and both heads for
    that, which is 66 MB more in memory than near logits need (of t5-small's shape); two sessions would hold the layers
    twice, and open the second one in the middle of an answer.

    Attributes:
        head: the exact rows of the head, mapped from the file of weights, and the bounds of its copy.

    >>> shortlist = Shortlist(OutputHead(np.eye(2, dtype=np.float32), largest_row=1.0, largest_error=0.0))
    >>> shortlist.is_worthwhile(rows=1), shortlist.is_worthwhile(rows=1000), shortlist.steps, shortlist.fallbacks
    (True, False, 0, 0)
    """

    def __init__(self, head: OutputHead):
        self.head = head
        self._steps: Counter[int] = Counter()  # by their number of rows
        self._fallbacks: Counter[int] = Counter()
        self._lock = threading.Lock()

    @property
    def steps(self) -> int:
        """How many were tried with it."""
        return self._steps.total()

    @property
    def fallbacks(self) -> int:
        """How many of these were taken again with all exact logits."""
        return self._fallbacks.total()

    def is_worthwhile(self, rows: int) -> bool:
        """Whether to try it on a step of so many rows."""
        return rows <= MOST_ROWS and self._fallbacks[rows] <= PATIENCE + self._steps[rows] / SHARE

    def choose(self, near: Sequence[np.ndarray], forbidden: Forbidden) -> np.ndarray | None:
        """(R,) tokens from the arrays of `ApproxLogits`, or ``None`` where one of them is not certain; counted."""
        near = ApproxLogits(*near)
        tokens = certify_argmax(self.head, near, forbidden)
        with self._lock:
            self._steps[near.norms.size] += 1
            self._fallbacks[near.norms.size] += tokens is None
        return tokens
