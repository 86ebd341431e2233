"""The protocol between decoding algorithms and runtimes.

Shapes: B sources in the batch, K rows (beams, samples, drafts) that share one source, S source positions, T new and P
past decoder positions, V vocabulary entries. docs/contract.md explains the protocol.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from t5accel.checks import as_count
from t5accel.errors import InputError

Source = Any  # what `encode` returns; opaque to the algorithms
State = Any  # the decoder's state, opaque too; methods that take one change it in place
VOCABULARY = ("vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id")  # attributes of every backend
SuppressedTokens = int | tuple[int, ...] | None  # one or several tokens that must not be chosen
NOT_FINITE = "A model's logits must be finite, got NaN or infinity. Run it in fp32 or bf16."


@runtime_checkable
class Backend(Protocol):
    """One encoder-decoder on one runtime. Arrays are numpy, on the host.

    Methods **trust their arguments**: shapes, types, tokens and indices are checked once, by the algorithms
    (`request.GenerationInputs`) and by `hf_generate`. Wrong ones may read past an array or end the process. A method
    that fails midway (no memory, an interrupt) leaves the state unchanged.
    """

    vocab_size: int
    pad_token_id: int
    eos_token_id: int
    decoder_start_token_id: int

    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> Source:
        """Run the encoder on (B, S) int64 arrays, which the source may keep; 1 in the mask is real."""

    def new_state(self, source: Source, rows_per_source: int = 1) -> State:
        """Return an empty decoder state (P = 0) with K rows for each source."""

    def step(self, state: State, input_ids: np.ndarray) -> np.ndarray:
        """Append T >= 1 tokens: (B, K, T) int64 -> causal logits (B, K, T, V) float32."""

    def reorder(self, state: State, rows: np.ndarray) -> None:
        """Continue row k of source b from its row ``rows[b, k]``. (B, K) int64."""

    def rollback(self, state: State, accepted: np.ndarray) -> None:
        """Keep ``accepted[b, k]`` of the last step's T positions. (B, K) int64.

        Pasts of unequal length are aligned to the right and masked, so that relative positions stay right.
        """

    def select_sources(self, state: State, sources: np.ndarray) -> None:
        """Keep only these sources, in this order. (n,) int64, n >= 1."""


class OptionalBackend(Backend, Protocol):
    """Methods and attributes that a backend may also offer."""

    rules: Any  # the model's `TokenConstraints`
    positions: int | None  # how many tokens the decoder can read, if it has a table of positions
    source_vocab_size: int  # if sources have their own vocabulary

    def next_tokens(self, state: State, input_ids: np.ndarray, *, suppressed: SuppressedTokens = None) -> np.ndarray:
        """`step` and arg-max at the last position, of equal logits the lowest id: (B, K) int64."""

    def step_tokens(self, state: State, input_ids: np.ndarray, *, suppressed: SuppressedTokens = None) -> np.ndarray:
        """`step` and arg-max at every position: (B, K, T) int64."""

    def run_greedy(self, state: State, k: int, *, suppressed: SuppressedTokens = None) -> np.ndarray:
        """Take n <= k greedy steps from the last chosen tokens: (B, K, n) int64."""

    def run_beams(
        self, state: State, input_ids: np.ndarray, scores: np.ndarray, k: int, *, ends: tuple[int, ...],
        suppressed: SuppressedTokens = None, renormalized: bool = False,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
        """Take n <= k steps of beam search from ``scores`` (B, K) float32.

        Rows, whose pasts must be equally long, first read ``input_ids`` (B, K, T). Returns each step's best
        m = K * (1 + len(ends)) <= V continuations, best first: scores float32, continued rows and tokens int64,
        (n, B, m) each. Rows go on with the best K that are not in ``ends``. Suppressed tokens keep their share of the
        probability unless ``renormalized``. The last tokens are not read yet.
        """

    def run_samples(
        self, state: State, input_ids: np.ndarray, uniform: np.ndarray, *, sampling: Any,
        suppressed: SuppressedTokens = None, history: np.ndarray | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Draw n <= `beam.MAX_RUN_STEPS` tokens by ``uniform`` (B, K, n) float64: (B, K, n).

        Rows first read ``input_ids``, as in `run_beams`. The draws are those of `sampling.sample_token`, for a
        `SamplingParams`. ``history`` (B, K, L) int64, each row's tokens so far, is required where repetitions are
        penalised.
        """

    def add_sources(self, state: State, source: Source) -> None:
        """Append another batch's sources, with K empty rows each (for serving)."""

    def replace_sources(self, state: State, source: Source, places: np.ndarray) -> None:
        """Put another batch's sources at ``places`` (n,), of ended ones or behind the last, with empty rows."""

    def reorder_sources(self, state: State, sources: np.ndarray) -> None:
        """Continue source b from source ``sources[b]``, of the same text. (B,) int64."""

    def split(self, source: Source) -> list[Source]:
        """Return one unpadded source per row in its own memory (for `EncoderCache`)."""

    def join(self, sources: Sequence[Source]) -> Source:
        """Return one batch of all rows in new memory, right-padded and masked."""

    def source_bytes(self, source: Source) -> int:
        """Return the memory of a source, on its device."""

    def fingerprint(self) -> Hashable:
        """Return a value that changes when the encoder's weights do."""


def check_backend(backend: Any, methods: Iterable[str] = (), name: str = "backend") -> None:
    """Raise ``InputError`` for a missing method or an invalid special token.

    ``methods`` are required besides ``encode``, ``new_state`` and ``step``.
    """
    missing = [name for name in (*VOCABULARY, "encode", "new_state", "step", *methods) if not hasattr(backend, name)]
    if missing:
        raise InputError(
            f"{name} must be a Backend, got {type(backend).__name__}, which lacks {', '.join(missing)}. Wrap a model: "
            "TorchEager(model)."
        )
    for token in VOCABULARY[1:]:
        if as_count(getattr(backend, token), token, at_least=0) >= backend.vocab_size:
            raise InputError(f"{token} must be below {backend.vocab_size}, got {getattr(backend, token)}.")


@dataclass(frozen=True)
class Generated:
    """The result of a decoding algorithm."""

    sequences: np.ndarray  # (N, L) int64, without the decoder's start token, right-padded with the pad id
    decoder_calls: int
    scores: np.ndarray | None = None  # (N,) float, of beam search alone: transformers' ``sequences_scores``
    drafted: int = 0  # tokens proposed by `prompt_lookup` or `speculative`
    accepted: int = 0  # proposed tokens that were right


def right_aligned(lengths: np.ndarray, width: int) -> np.ndarray:
    """Mask rows that end together: (…) lengths -> (…, width) int64.

    >>> right_aligned(np.array([1, 3]), 3).tolist()
    [[0, 0, 1], [1, 1, 1]]
    """
    return (np.arange(width) >= width - np.asarray(lengths)[..., None]).astype(np.int64)


@dataclass(frozen=True)
class PastLengths:
    """The lengths of pasts that all end at the right of ``width`` positions.

    Immutable: methods return new lengths and, where rows or positions move, an index to gather tensors by. A runtime
    gathers first and stores both at the end, so a failure between leaves its state unchanged.
    """

    padding: np.ndarray  # (B, K) int64, positions in front of each row's past
    width: int = 0  # P
    last: int = 0  # T of the last step
    ragged: bool = False  # whether there is any padding

    @classmethod
    def empty(cls, batch: int, rows_per_source: int) -> PastLengths:
        return cls(np.zeros((batch, rows_per_source), dtype=np.int64))

    @property
    def shape(self) -> tuple[int, int]:
        return self.padding.shape

    @property
    def lengths(self) -> np.ndarray:  # (B, K) int64
        return self.width - self.padding

    def mask(self) -> np.ndarray:
        """(B, K, P) int64: 1 where a past position is real."""
        if not self.ragged:
            return np.ones((*self.padding.shape, self.width), dtype=np.int64)
        return right_aligned(self.lengths, self.width)

    def appended(self, count: int) -> PastLengths:
        """After ``count`` more positions in every row."""
        return PastLengths(self.padding, self.width + count, count, self.ragged)

    def reordered(self, rows: np.ndarray) -> tuple[PastLengths, np.ndarray | None]:
        """After `Backend.reorder`; the index (B * K,) is ``None`` if no row moves."""
        if (rows == np.arange(self.shape[1])).all():
            return self, None
        flat = (np.arange(self.shape[0])[:, None] * self.shape[1] + rows).ravel()
        return self._with_padding(self.padding.ravel()[flat].reshape(self.shape)), flat

    def kept(self, sources: np.ndarray) -> tuple[PastLengths, np.ndarray]:
        """After `Backend.select_sources`, and ``sources`` as the index."""
        return self._with_padding(self.padding[sources]), sources

    def placed(self, places: np.ndarray) -> PastLengths:
        """After `OptionalBackend.replace_sources`."""
        padding = np.full((max(self.shape[0], 1 + int(places.max())), self.shape[1]), self.width)
        padding[: self.shape[0]] = self.padding
        padding[places] = self.width
        return self._with_padding(padding)

    def narrowed(self) -> tuple[PastLengths, int]:
        """Without the first positions, if they are padding in every row; and their number."""
        unused = int(self.padding.min())
        padding = self.padding - unused
        return PastLengths(padding, self.width - unused, self.last, bool(padding.any())), unused

    def trimmed(self, accepted: np.ndarray) -> tuple[PastLengths, np.ndarray | None]:
        """After `Backend.rollback`; the index (B, K, P') is ``None`` if no position moves.

        In front of a shorter past the index points anywhere; `mask` is 0 there.
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
    """Repeat positions (R, n) for each head, flat in (R, H, width): (R * H * n,)."""
    first = np.arange(len(index) * heads).reshape(len(index), heads, 1) * width
    return (first + index[:, None, :]).ravel()


def shrunk(going: np.ndarray, batch: int) -> np.ndarray | None:
    """Select the sources to keep; ``None`` unless at least half can go.

    Some ended sources stay: the new size is a power of two, so that memory and graphs for few sizes are made.
    """
    size = 1 << (len(going) - 1).bit_length()
    if 2 * size > batch:
        return None
    others = np.setdiff1d(np.arange(batch), going)
    return np.sort(np.concatenate([going, others[: size - len(going)]]))
