"""What a runtime must offer so that every decoding algorithm works on it, and what an algorithm returns.

`PastLengths` keeps the lengths of a batch's pasts for it, apart from any tensors.

Shapes: B sources in the batch, K rows (beams, samples, drafts) that share one source, S source positions, T new and P
past decoder positions, V vocabulary entries.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from t5accel.checks import as_count
from t5accel.errors import InputError

Source = Any  # what `encode` returns: belongs to the backend, opaque to the algorithms
State = Any  # the same for the decoder's state; methods that take one change it in place
SuppressedTokens = int | tuple[int, ...] | None  # a token that shall not be chosen, or several


@runtime_checkable
class Backend(Protocol):
    """One encoder-decoder on one runtime. Arrays are numpy, on the host.

    Its methods **trust their arguments**: types and shapes as below, tokens in the vocabulary, rows, positions and
    sources that exist, sources and states of this very backend. What comes from outside is checked once, by those
    who call them: the decoding algorithms (`request.GenerationInputs`) and `hf`. Whoever calls a backend directly
    answers for that; a runtime may read what lies beyond an array, or end the process. A method that fails on the way,
    for want of memory or by an interrupt, leaves the state as it was.

    A backend may also offer ``run_greedy(state, k, *, suppressed=None) -> (B, K, n)``, n <= k greedy steps without
    returning to the host, of which the first reads what ``next_tokens`` or ``run_greedy`` chose last;
    ``next_tokens(state, input_ids, *, suppressed=None)``, a ``step`` that returns the likeliest next token of each row,
    (B, K) int64, as `argmax_tokens` would find it in the logits at the last position; ``run_beams`` and
    ``run_samples``, as below; and the four methods that `encoder_cache.EncoderCache` builds on:

    - ``split(source) -> list[Source]``: one source per row, without its padding, in memory of its own.
    - ``join(sources) -> Source``: the rows of all of them as one batch, padded on the right with zeros and masked
      there, in new memory.
    - ``source_bytes(source) -> int``: the memory that it takes, on whichever device.
    - ``fingerprint() -> Hashable``: compares unequal to an earlier one if the encoder's weights were changed since.

    And it may know more about its model: ``rules``, what is asked of every answer (`TokenConstraints`); ``positions``,
    how many tokens its decoder can read; and ``source_vocab_size``, where sources have a vocabulary of their own.

    ``run_beams(state, input_ids, scores, k, *, ends, suppressed=None, renormalized=False)`` takes n <= k steps of beam
    search. First every row reads its tokens (B, K, T), which stand behind histories of one length. A step ranks the
    continuations of all K beams of a source by ``scores`` (B, K) float32 plus the new token's log-probability, never
    ``suppressed``, which is left out of the distribution if ``renormalized``. Rows go on with the best K that are none
    of ``ends``. Returns the best m = K * (1 + len(ends)) of every step, best first, m being at most V: their scores
    float32, the beams that they continue and their tokens, both int64, (n, B, m) each. Afterwards the rows' last tokens
    are not read yet: the next call gets them.

    ``run_samples(state, input_ids, uniform, *, sampling, suppressed=None, history=None)`` takes n steps that draw, at
    most `beam.LONGEST_RUN`, and begins as ``run_beams`` does. The tokens are those of `sampling.draw`, by
    ``uniform`` (B, K, n) float64, from `sampling.probabilities` of ``sampling``, never ``suppressed``. ``history``
    (B, K, L) int64 is what each row has so far; it is needed, and goes on with the drawn tokens, where repetitions are
    penalised. Returns them, (B, K, n) int64.

    For serving there is, beside ``select_sources``, by which rows leave a running state, ``add_sources(state,
    source) -> None``: the
    sources of another batch join it, behind those that are there, with K rows each that have no history yet. A state
    of one row for each source may hold the K beams of a text as K sources; ``reorder_sources(state, sources) ->
    None`` reorders
    them: the row of source b goes on from the history of source ``sources[b]``, (B,) int64, which is the same text.
    """

    vocab_size: int
    pad_token_id: int
    eos_token_id: int
    decoder_start_token_id: int

    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> Source:
        """Run the encoder once. Both arguments (B, S) int64; the mask is 1 for real tokens and 0 for padding.

        A source may keep the arrays: nobody writes to them any more.
        """

    def new_state(self, source: Source, rows_per_source: int = 1) -> State:
        """An empty decoder state (P = 0) with K = ``rows_per_source`` rows that share each source."""

    def step(self, state: State, input_ids: np.ndarray) -> np.ndarray:
        """Append T >= 1 tokens to every row: (B, K, T) int64 -> logits (B, K, T, V) float32, causal among the new."""

    def reorder(self, state: State, rows: np.ndarray) -> None:
        """Row k of source b goes on from the history of row ``rows[b, k]`` of the same source. (B, K) int64."""

    def rollback(self, state: State, accepted: np.ndarray) -> None:
        """Of the positions of the last step keep the first ``accepted[b, k]`` (0 … T) in each row. (B, K) int64.

        PastLengths of unequal length are aligned to the right and masked, so that T5's relative positions stay right.
        """

    def select_sources(self, state: State, sources: np.ndarray) -> None:
        """Only these sources, in this order, stay in the batch (finished ones leave it). (n,) int64, n >= 1."""


_NUMBERS = ("vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id")


def check_backend(backend: Any, methods: Iterable[str] = ()) -> None:
    """Raise ``InputError`` for what is no backend, lacks one of these methods, or has a special token that is no token.

    Args:
        backend: anything.
        methods: beside ``encode``, ``new_state`` and ``step``.

    >>> check_backend("mini")
    Traceback (most recent call last):
    t5accel.errors.InputError: str is no backend, it lacks vocab_size, pad_token_id, eos_token_id, ...
    """
    missing = [name for name in (*_NUMBERS, "encode", "new_state", "step", *methods) if not hasattr(backend, name)]
    if missing:
        raise InputError(
            f"{type(backend).__name__} is no backend, it lacks {', '.join(missing)}: wrap a model in TorchEager."
        )
    for name in _NUMBERS[1:]:
        if as_count(getattr(backend, name), name, at_least=0) >= backend.vocab_size:
            raise InputError(f"{name} is {getattr(backend, name)}; the vocabulary has {backend.vocab_size} entries.")


@dataclass(frozen=True)
class Generated:
    """What an algorithm produced.

    Attributes:
        sequences: (N, L) int64, without the decoder's start token, right-padded with the pad id.
        scores: (N,) float, for beams the numbers of transformers' ``sequences_scores``; ``None`` without scores.
        decoder_calls: how often the decoder ran.
        drafted: how many tokens were guessed before the decoder saw them, by `prompt_lookup` or `speculative`.
        accepted: how many of these turned out right.
    """

    sequences: np.ndarray
    decoder_calls: int
    scores: np.ndarray | None = None
    drafted: int = 0
    accepted: int = 0


def right_aligned(lengths: np.ndarray, width: int) -> np.ndarray:
    """The mask of rows that end together: (…) lengths -> (…, width) int64, 1 on the last ``length`` positions.

    >>> right_aligned(np.array([1, 3]), 3).tolist()
    [[0, 0, 1], [1, 1, 1]]
    """
    return (np.arange(width) >= width - np.asarray(lengths)[..., None]).astype(np.int64)


@dataclass(frozen=True)
class PastLengths:
    """B sources of K rows each, whose pasts end together at the right of ``width`` positions (P).

    It never changes. A method returns what the histories are afterwards, and where that moves
    anything, an index to gather the runtime's tensors by. So a runtime gathers first, and takes over both at the end:
    if something fails between (no memory, an interrupt), its state is still the one from before.

    Attributes:
        padding: (B, K) int64, how many positions in front of each row's past are not real.
        width: P.
        last: T of the last step, of which `trimmed` may drop some.
        ragged: whether there is any padding.

    >>> rows = PastLengths.empty(batch=1, rows_per_source=2).appended(3)
    >>> rows, index = rows.trimmed(np.array([[1, 3]]))  # row 0 keeps one of three positions, moved to the right end
    >>> index.tolist(), rows.mask().tolist()
    ([[[0, 0, 0], [0, 1, 2]]], [[[0, 0, 1], [1, 1, 1]]])
    """

    padding: np.ndarray
    width: int = 0
    last: int = 0
    ragged: bool = False

    @classmethod
    def empty(cls, batch: int, rows_per_source: int) -> PastLengths:
        """Nothing yet."""
        return cls(np.zeros((batch, rows_per_source), dtype=np.int64))

    @property
    def shape(self) -> tuple[int, int]:
        """(B, K)."""
        return self.padding.shape

    @property
    def lengths(self) -> np.ndarray:
        """(B, K) int64, how many of the last positions are real."""
        return self.width - self.padding

    def mask(self) -> np.ndarray:
        """(B, K, P) int64: 1 where a past position is real."""
        if not self.ragged:
            return np.ones((*self.padding.shape, self.width), dtype=np.int64)
        return right_aligned(self.lengths, self.width)

    def appended(self, count: int) -> PastLengths:
        """Every row has ``count`` more positions."""
        return PastLengths(self.padding, self.width + count, count, self.ragged)

    def reordered(self, rows: np.ndarray) -> tuple[PastLengths, np.ndarray | None]:
        """Row k of source b goes on as row ``rows[b, k]`` of the same source.

        Returns:
            The histories, and (B * K,) int64: for each row which one of all rows it was; ``None`` where all stay.
        """
        if (rows == np.arange(self.shape[1])).all():
            return self, None
        flat = (np.arange(self.shape[0])[:, None] * self.shape[1] + rows).ravel()
        return self._with_padding(self.padding.ravel()[flat].reshape(self.shape)), flat

    def kept(self, sources: np.ndarray) -> tuple[PastLengths, np.ndarray]:
        """Only these sources (n,) stay, in this order; returns the histories, and ``sources`` to gather by."""
        return self._with_padding(self.padding[sources]), sources

    def joined(self, sources: int) -> PastLengths:
        """So many more sources, whose rows have no history yet.

        >>> PastLengths.empty(batch=1, rows_per_source=1).appended(2).joined(1).mask().tolist()
        [[[1, 1]], [[0, 0]]]
        """
        new = np.full((sources, self.shape[1]), self.width)
        return self._with_padding(np.concatenate([self.padding, new]))

    def trimmed(self, accepted: np.ndarray) -> tuple[PastLengths, np.ndarray | None]:
        """Of the last step keep the first ``accepted[b, k]`` positions.

        Returns:
            The histories, and (B, K, P') int64: the old position of each new one; ``None`` where all stay. In front of
            a shorter history it points anywhere, and `mask` is 0 there.
        """
        dropped = self.last - accepted
        if not dropped.any():
            return PastLengths(self.padding, self.width, 0, self.ragged), None
        ends = self.width - dropped  # of the rows' pasts; all of them move to the new right end
        lengths = ends - self.padding
        width = int(lengths.max())
        index = np.maximum(np.arange(width) + (ends - width)[..., None], 0)
        padding = width - lengths
        return PastLengths(padding, width, 0, bool(padding.any())), index

    def _with_padding(self, padding: np.ndarray) -> PastLengths:
        return PastLengths(padding, self.width, self.last, bool(padding.any()))


def expand_index_to_heads(index: np.ndarray, heads: int, width: int) -> np.ndarray:
    """Positions within rows -> the same positions of each head, counted through (R, H, width): (R, n) -> (R * H * n,).

    >>> expand_index_to_heads(np.array([[0, 2]]), heads=2, width=3).tolist()
    [0, 2, 3, 5]
    """
    first = np.arange(len(index) * heads).reshape(len(index), heads, 1) * width
    return (first + index[:, None, :]).ravel()
