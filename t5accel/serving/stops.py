"""Stop strings: where an answer ends before its end token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MAX_STOPS, MAX_STOP_CHARACTERS = 4, 256


class StopStrings:
    """Whether tokens hold one of several texts, and the text of an answer up to the first of them.

    Args:
        texts: 1 or more, none of them empty.
        decode: rows of tokens to texts.

    >>> letters = StopStrings(["; "], lambda rows: ["".join(map(chr, row)) for row in rows])
    >>> letters([*b"one;"]), letters([*b"one; "]), letters.cut("one; two")
    (False, True, 'one')
    """

    def __init__(self, texts: Sequence[str], decode: Callable[[Sequence[Sequence[int]]], list[str]]):
        self._texts, self._decode = tuple(texts), decode
        # A token is a byte at least, but for spaces that decoding tidies away, and special tokens.
        self._longest = 8 + 2 * max(len(text.encode()) for text in texts)

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Whether an answer of these tokens is complete; asked after each token, so that the last ones decide."""
        return self._holds(tokens[-self._longest :]) and (len(tokens) <= self._longest or self._holds(tokens))

    def _holds(self, tokens: Sequence[int]) -> bool:
        (found,) = self._decode([tokens])
        return any(text in found for text in self._texts)

    def cut(self, found: str) -> str:
        """The text before the first stop string."""
        return found[: min((at for text in self._texts if (at := found.find(text)) >= 0), default=len(found))]

    def held(self, found: str) -> int:
        """How many characters at the end of a text may be the beginning of a stop string.

        >>> StopStrings(["</s>"], list).held("oui </"), StopStrings(["aab"], list).held("aaa")
        (2, 2)
        """
        most = min(len(found), max(map(len, self._texts)) - 1)
        return next((size for size in range(most, 0, -1) if self._begins(found[-size:])), 0)

    def _begins(self, end: str) -> bool:
        return any(text.startswith(end) for text in self._texts)
