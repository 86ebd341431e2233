"""How many tokens to guess next, from how the last guesses did: no clock, so that the same text is guessed the same."""

from __future__ import annotations

FIRST = 4
LONGEST_PAUSE = 15


class DraftLength:
    """The length of one row's next draft.

    - A draft that was right to its end lets the next one be twice as long.
    - Else the next one is as long as what was accepted and one more.
    - A draft that was wrong from the start is followed by a pause: of 1 step after one of them, 3 after two in a row,
      then 7, then 15. Text that cannot be guessed is therefore hardly ever guessed at, and text that can be guessed
      again is noticed.

    Args:
        most: upper bound.

    >>> length = DraftLength(most=16)
    >>> length.next(), length.learn(4, accepted=4), length.next(), length.learn(8, accepted=2), length.next()
    (4, None, 8, None, 3)
    >>> length.learn(3, accepted=0), length.next(), length.next()
    (None, 0, 1)
    """

    __slots__ = ("_failures", "_length", "_most", "_pause")

    def __init__(self, most: int):
        self._most, self._length, self._failures, self._pause = most, min(FIRST, most), 0, 0

    def next(self) -> int:
        """For the next step; asked once for each. 0 in a pause."""
        if self._pause:
            self._pause -= 1
            return 0
        return self._length

    def learn(self, drafted: int, accepted: int) -> None:
        """Of a draft of ``drafted`` tokens the first ``accepted`` were right."""
        if accepted:
            self._failures = 0
            self._length = min(2 * self._length if accepted == drafted else accepted + 1, self._most)
        else:
            self._failures += 1
            self._length, self._pause = 1, min(2**self._failures - 1, LONGEST_PAUSE)
