"""Stop strings, which end an answer before its end token, and streams that hold them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from t5accel.decoding.streaming import IncrementalDetokenizer
from t5accel.serve.request import RequestHandle

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


class TextStream:
    """The text of a ticket that streams, piece by piece; ``index`` says which of a request's texts it answers."""

    def __init__(self, index: int, ticket: RequestHandle, pieces: IncrementalDetokenizer):
        self.index, self._ticket, self._sent, self._text = index, ticket, 0, pieces
        self._stops, self._kept = ticket.job.stopping_criterion, ""
        self.is_done = self._has_stopped = False

    def piece(self) -> str | None:
        """The new text, if there is news; the end of it, which may begin a stop string, is held back."""
        done, new = self._ticket.is_done, self._ticket.tokens[self._sent :]  # in this order
        is_first = bool(new) and not self._sent
        self._sent += len(new)
        piece = self._text.add(new)
        if done:
            self._ticket.result(0)
            self.is_done = True
            piece += self._text.flush()
        if self._stops is not None:
            piece = self._before_stops(piece)
        return piece if piece or done or is_first else None

    def _before_stops(self, piece: str) -> str:
        if self._has_stopped:
            return ""
        whole = self._kept + piece
        text = self._stops.cut(whole)
        self._has_stopped = text != whole
        certain = len(text) - (0 if self.is_done or self._has_stopped else self._stops.held(text))
        self._kept = text[certain:]
        return text[:certain]
