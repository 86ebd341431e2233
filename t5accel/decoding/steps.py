"""What each call of the decoder adds to which rows, and all of it as one result: what every sampler and search yields.

An algorithm that never takes a token back is written as a generator of steps. Put together they are its `Generated`;
handed out as they come they are a stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from t5accel.decoding.backend import Generated


class Step(NamedTuple):
    """What one call of the decoder added: ``tokens[i]`` goes to the end of row ``rows[i]`` of the result.

    Attributes:
        rows: (n,) int64; a row that got several tokens stands there several times, in their order.
        tokens: (n,) int64.
        drafted: how many tokens were guessed beforehand.
        accepted: how many of these turned out right, and are among the new ones.
    """

    rows: np.ndarray
    tokens: np.ndarray
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Steps:
    """An algorithm under way; it goes on when the next step is asked for.

    Attributes:
        given: (N, T) int64, what every row of the result starts with; not among the steps.
        pad_token_id: fills up shorter rows.
        steps: one for each call of the decoder, at least one.
    """

    given: np.ndarray
    pad_token_id: int
    steps: Iterator[Step]

    def generated(self) -> Generated:
        """All steps put together.

        >>> first = Step(np.array([0, 1]), np.array([7, 9]))
        >>> second = Step(np.array([1, 1]), np.array([5, 6]), drafted=3, accepted=1)
        >>> Steps(np.zeros((2, 0), dtype=np.int64), 0, iter([first, second])).generated().sequences.tolist()
        [[7, 0, 0], [9, 5, 6]]
        """
        rows, tokens, drafted, accepted = zip(*self.steps, strict=True)
        flat_rows, flat_tokens = np.concatenate(rows), np.concatenate(tokens)
        counts = np.bincount(flat_rows, minlength=len(self.given))
        begin, longest = self.given.shape[1], counts.max()
        sequences = np.full((len(self.given), begin + longest), self.pad_token_id, dtype=np.int64)
        sequences[:, :begin] = self.given
        # Row by row, and within each in the order of the steps.
        sequences[:, begin:][np.arange(longest) < counts[:, None]] = flat_tokens[flat_rows.argsort(kind="stable")]
        return Generated(sequences, decoder_calls=len(rows), drafted=sum(drafted), accepted=sum(accepted))

    def chunks(self) -> Iterator[list[np.ndarray]]:
        """For each step the new tokens of every row: N arrays (n,) int64, empty where a row got none."""
        for step in self.steps:
            yield [step.tokens[step.rows == row] for row in range(len(self.given))]
