"""A smaller model as a drafter: it guesses token by token, and its state is kept in step with what was accepted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from t5accel.decoding.backend import Backend
from t5accel.decoding.distribution import Sampling, draw, probabilities
from t5accel.decoding.drafting import Drafts, without
from t5accel.decoding.request import Request
from t5accel.decoding.speculation import DraftLength


class Guesser:
    """A `drafts.Drafter` that guesses the tokens that are likeliest to a model of the same vocabulary.

    A backend can go back by its last call only. Therefore the first call of a draft reads what is known, for good; each
    further one forgets the guesses that the last one read and reads all of them, one more than before. What was
    accepted of the last call's stays. So a draft of m tokens takes m calls that read 1, 1, 2, … m - 1 tokens, and what
    the state lacks in the end (the last guess, and what came in place of a wrong one) is read by the next draft.

    Args:
        backend: of the smaller model.
        request: as of the larger one.
        most: upper bound on the guesses of one row.
    """

    def __init__(self, backend: Backend, request: Request, most: int):
        self._backend, self._ends = backend, request.ends
        self._state = backend.start(backend.encode(request.ids, request.mask))
        self._lengths = [DraftLength(most) for _ in request.ids]  # by row of the result
        self._unread = request.prefix.tolist()  # by row of the state: what it has not read
        self._guesses: list[np.ndarray] = []  # (n,) each

    def guess(self, rows: Sequence[int], rooms: Sequence[int], blocked: Sequence[int]) -> Drafts:
        self._guesses = []
        wanted = [min(room, self._lengths[row].next()) if room else 0 for row, room in zip(rows, rooms, strict=True)]
        drafts: Drafts = [[] for _ in rows]
        open_places = [place for place, most in enumerate(wanted) if most]
        if not open_places:
            return drafts
        logits = self._read_what_is_known()
        while True:
            allowed = [count - len(self._guesses) for count in blocked]
            logits = without(logits[:, None], self._ends, allowed)[:, 0]
            guesses = self._pick(logits, rows, open_places)
            self._guesses.append(guesses)
            for place in open_places:
                drafts[place].append(int(guesses[place]))
            open_places = [
                place
                for place in open_places
                if len(drafts[place]) < wanted[place] and drafts[place][-1] not in self._ends
            ]
            if not open_places:
                return drafts
            if len(self._guesses) > 1:
                self._backend.trim(self._state, np.zeros((len(rows), 1), dtype=np.int64))
            logits = self._backend.step(self._state, np.stack(self._guesses, axis=1)[:, None])[:, 0, -1]

    def learn(self, rows: Sequence[int], drafts: Drafts, found: Drafts) -> None:
        if not self._guesses:
            for unread, answer in zip(self._unread, found, strict=True):
                unread += answer
            return
        read = len(self._guesses) - 1
        kept = [min(len(answer) - 1, read) for answer in found]
        for row, draft, answer in zip(rows, drafts, found, strict=True):
            if draft:
                self._lengths[row].learn(len(draft), len(answer) - 1)
        if min(kept) < read:
            self._backend.trim(self._state, np.array(kept)[:, None])
        self._unread = [answer[count:] for answer, count in zip(found, kept, strict=True)]

    def keep(self, places: np.ndarray) -> None:
        self._backend.keep(self._state, places)
        self._unread = [self._unread[place] for place in places]

    def _read_what_is_known(self) -> np.ndarray:
        """The logits (n, V) after each row's last known token. Rows lack different numbers of tokens, at least one."""
        counts = np.array([len(unread) for unread in self._unread])
        tokens = np.full((len(counts), counts.max()), self._backend.pad_token_id, dtype=np.int64)
        tokens[np.arange(counts.max()) < counts[:, None]] = [token for unread in self._unread for token in unread]
        logits = self._backend.step(self._state, tokens[:, None])[np.arange(len(counts)), 0, counts - 1]
        if counts.min() < counts.max():
            self._backend.trim(self._state, counts[:, None])
        return logits

    def _pick(self, logits: np.ndarray, rows: Sequence[int], places: Sequence[int]) -> np.ndarray:
        """The guesses (n,), from logits (n, V); only those at ``places`` matter."""
        return logits.argmax(axis=1)


class RandomGuesser(Guesser):
    """A `drafts.Drafter` that draws its guesses from a model's distribution.

    Args:
        backend, request, most: as of `Guesser`.
        sampling: what is changed in the distribution.
        draws: the random generator of each row.

    Attributes:
        odds: of the last draft, for each guess the distributions (n, V) that it was drawn from.
        texts: each row's tokens so far, with the start token.
    """

    def __init__(
        self, backend: Backend, request: Request, most: int, sampling: Sampling, draws: Sequence[np.random.Generator]
    ):
        super().__init__(backend, request, most)
        self.sampling, self.draws = sampling, draws
        self.texts, self.odds = request.prefix.tolist(), []

    def guess(self, rows: Sequence[int], rooms: Sequence[int], blocked: Sequence[int]) -> Drafts:
        self.odds: list[np.ndarray] = []
        return super().guess(rows, rooms, blocked)

    def learn(self, rows: Sequence[int], drafts: Drafts, found: Drafts) -> None:
        super().learn(rows, drafts, found)
        for row, answer in zip(rows, found, strict=True):
            self.texts[row] += answer

    def _pick(self, logits: np.ndarray, rows: Sequence[int], places: Sequence[int]) -> np.ndarray:
        said = [guesses.tolist() for guesses in self._guesses]
        histories = ([*self.texts[row], *(each[place] for each in said)] for place, row in enumerate(rows))
        odds = odds_after(logits, histories, self.sampling)
        self.odds.append(odds)
        uniform = np.zeros(len(rows))  # rows that guess nothing draw nothing: their draws do not depend on the others
        for place in places:
            uniform[place] = self.draws[rows[place]].random()
        return draw(odds, uniform)


def odds_after(logits: np.ndarray, histories: Iterable[Sequence[int]], sampling: Sampling) -> np.ndarray:
    """`distribution.probabilities` after histories of unequal lengths, which are only looked at if that matters.

    Args:
        logits: (R, V).
        histories: R of them.
        sampling: what is changed.

    >>> odds_after(np.zeros((2, 2)), [[0], [1, 1]], Sampling(temperature=2.0)).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    if sampling.repetition_penalty == 1:
        return probabilities(logits, None, sampling)
    texts = list(histories)
    lengths = np.array([len(text) for text in texts])
    mask = np.arange(lengths.max()) < lengths[:, None]
    tokens = np.zeros(mask.shape, dtype=np.int64)
    tokens[mask] = [token for text in texts for token in text]
    return probabilities(logits, tokens, sampling, history_mask=mask)
