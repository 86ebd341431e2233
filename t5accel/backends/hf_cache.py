"""Encoder outputs and KV cache of a backend, as transformers' ``generate`` passes them around."""

# `generate` repeats, reorders and crops tensors with a row per hypothesis. A backend keeps one source for its K rows:
# so `generate` gets row numbers to repeat, and a cache with the backend's methods.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import transformers

from t5accel.checks import as_batch, as_integers, check_vocabulary
from t5accel.decoding.backend import Backend, right_aligned
from t5accel.decoding.encoder_cache import EncoderCache
from t5accel.decoding.request import check_positions
from t5accel.errors import InputError
from t5accel.models.t5_math import cache_name

IS_V5 = int(transformers.__version__.split(".")[0]) >= 5
CACHE = cache_name()


def _stays_in_the_backend(*_: Any, **__: Any) -> Any:
    raise InputError(
        "The encoder's hidden states stay in the backend. Give this object to generate() or forward() as "
        "encoder_outputs, and use transformers' own model where hidden states are wanted."
    )


def discard_draws(count: int) -> None:
    """Draw as many numbers as M2M100's layers do in transformers 4.57, which use none: a seed gives its samples."""
    for _ in range(count):
        torch.rand([])


@dataclass(frozen=True, eq=False)
class EncodedBatch:
    """The reusable ``encoder_outputs`` of `BackendEncoder`; access to hidden states raises ``InputError``."""

    backend: Backend
    source: Any  # the backend's
    ids: np.ndarray  # (B, S) that it was encoded from, and the mask (B, S)
    mask: np.ndarray
    rows: np.ndarray  # (R,) int64, the source 0 … B - 1 of each row of a batch, repeated for K beams
    device: torch.device  # of the input ids, and so of the tokens that `generate` returns

    last_hidden_state = hidden_states = attentions = property(_stays_in_the_backend)
    __getitem__ = __iter__ = get = keys = values = items = to_tuple = _stays_in_the_backend

    def __deepcopy__(self, memo: Any) -> EncodedBatch:
        return self  # it never changes, and a copy of its backend would open the model again

    def start(self, backend: Backend, attention_mask: torch.Tensor | None = None) -> DecoderCache:
        """An empty cache for these rows, which must be K consecutive ones for each source."""
        rows = as_integers(self.rows, "rows", rank=1)
        if self.backend is not backend:
            raise InputError("These encoder_outputs are of another model. Encode with get_encoder() of this one.")
        count = len(np.unique(rows))
        rows_per_source = len(rows) // max(count, 1)
        sources = rows[:: max(rows_per_source, 1)]
        if (
            len(sources) != count
            or not np.isin(rows, np.arange(len(self.mask))).all()
            or not count
            or not np.array_equal(rows, sources.repeat(rows_per_source))
        ):
            raise InputError(
                f"The rows of encoder_outputs must be sources 0 … {len(self.mask) - 1}, each repeated equally often "
                f"(repeat_interleave), got {rows.tolist()}. Encode the batch that is wanted."
            )
        if attention_mask is not None:
            mask = as_mask(attention_mask, "attention_mask")
            if not np.array_equal(mask, self.mask[rows]):
                raise InputError("attention_mask must be that of the encoder_outputs. Give that one, or none.")
        return DecoderCache(self, sources, rows_per_source)

    def repeated(self, count: int) -> EncodedBatch:
        """Repeat every row ``count`` times, as ``torch.repeat_interleave``."""
        return replace(self, rows=np.repeat(self.rows, count))


class BackendEncoder:
    """A backend's encoder, called as transformers calls an encoder."""

    main_input_name = "input_ids"

    def __init__(self, backend: Backend, *, masks_padding: bool = False, draws: int = 0):
        self.backend, self.masks_padding, self.draws = backend, masks_padding, draws

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, return_dict: bool | None = None, **unsupported: Any
    ) -> EncodedBatch:
        """Encode (B, S) token ids. Without a mask every position counts, as in transformers' own encoder."""
        reject_unsupported({**unsupported, "return_dict=False": return_dict is False})
        if input_ids is None:
            raise InputError("There is nothing to encode. Give input_ids (B, S), or encoder_outputs of get_encoder().")
        reject_text(input_ids)
        ids = as_integers(input_ids, "input_ids", rank=2)
        # T5Gemma's own encoder masks padding, its cross-attention does not: no mask says both.
        if attention_mask is None and self.masks_padding and (ids == self.backend.pad_token_id).any():
            raise InputError("attention_mask must be given to a T5Gemma whose input_ids hold padding.")
        mask = np.ones_like(ids) if attention_mask is None else as_mask(attention_mask, "attention_mask")
        entries = getattr(self.backend, "source_vocab_size", self.backend.vocab_size)
        masked = ~mask.any(axis=1) & self._hides_whole_rows()
        ids, mask = as_batch(ids, np.where(masked[:, None], 1, mask), vocab_size=entries)
        mask[masked] = 0
        discard_draws(self.draws)
        source, device = self.backend.encode(ids, mask), torch.device(getattr(input_ids, "device", "cpu"))
        return EncodedBatch(self.backend, source, ids, mask, np.arange(len(ids)), device)

    __call__ = forward

    def _hides_whole_rows(self) -> bool:
        """Whether a row without tokens attends to all positions alike, as in transformers; else it is refused."""
        if isinstance(self.backend, EncoderCache):  # without tokens it has nothing to keep
            return False
        # On 5.x transformers' own models with absolute positions attend to nothing there, and our graphs to everything.
        return hasattr(self.backend, "model") or not IS_V5 or not hasattr(self.backend, "positions")


class DecoderCache:
    """A backend's decoder state with the methods of transformers' ``past_key_values``, or ``cache``."""

    is_compileable, is_croppable, is_linear = False, True, (False,)

    def __init__(self, encoded: EncodedBatch, sources: np.ndarray, rows_per_source: int):
        self.backend = encoded.backend
        self.encoded, self.sources = encoded, sources  # (B,), rows of what was encoded
        self.shape = (len(sources), rows_per_source)  # B and K
        self.length = 0  # P: in the whole sequences that `generate` gives, tokens from position P on are new
        self.is_private = False  # `generate` made it for itself, and no caller reads it afterwards
        # (R, >= P), the sequences so far, if known. A backend rolls back its last step only: to go back further, a new
        # state reads them again.
        self.history: torch.Tensor | None = None
        self._restart()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError(f"{CACHE} stays in its backend and has no copy: give the tokens again as decoder_input_ids.")

    def append(self, input_ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Read T new tokens per row: (R, T) integers -> logits (R, T, V).

        ``mask`` (R, P + T) is 0 for padding, which is allowed only to the left of the first tokens.
        """
        new = as_integers(input_ids, "decoder_input_ids", rank=2)
        (batch, per_source), (rows, count) = self.shape, new.shape
        if rows != batch * per_source or not count:
            raise InputError(
                f"decoder_input_ids must have {batch * per_source} rows with at least one new token beyond the "
                f"{self.length} known, got {rows} rows with {count}."
            )
        check_vocabulary(new, self.backend.vocab_size, "decoder_input_ids")
        check_positions(self.backend, self.length + count)
        padding = None if mask is None else self._padding(mask, count)
        if padding is not None:  # read the tokens first, then the padding, and roll that back: so pasts end together
            new = np.take_along_axis(new, (np.arange(count) + padding) % count, axis=1)
        unread = 0
        if self._unread is not None:
            unread = self._unread.shape[1]
            new = np.concatenate([self._unread, new], axis=1)
        logits = self.backend.step(self.state, new.reshape(batch, per_source, -1))[:, :, unread:]
        self.length, self._last, self._unread = self.length + count, unread + count, None
        logits = logits.reshape(rows, count, -1)
        if padding is not None:
            logits = np.take_along_axis(logits, ((np.arange(count) - padding) % count)[..., None], axis=1)
            self.backend.rollback(self.state, (count - padding).reshape(batch, per_source))
            self._last, self._padded = 0, True
        return torch.from_numpy(logits if logits.flags.writeable else logits.copy())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Continue row r from the past of row ``beam_idx[r]``, which has the same source. (R,) integers."""
        batch, per_source = self.shape
        flat = as_integers(beam_idx, "beam_idx", rank=1)
        if len(flat) != batch * per_source:
            raise InputError(f"beam_idx must have {batch * per_source} rows, got {len(flat)}.")
        rows = flat.reshape(batch, per_source) - np.arange(batch)[:, None] * per_source
        if rows.min() < 0 or rows.max() >= per_source:
            raise InputError(f"beam_idx must stay within the {per_source} rows of each source, got {flat.tolist()}.")
        self._read()
        self.backend.reorder(self.state, rows)
        self.history = None

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows, in this order, all K of a source together. (n,) integers, n >= 1."""
        per_source = self.shape[1]
        flat = as_integers(indices, "indices", rank=1)
        kept = flat[::per_source] // per_source
        whole = (kept[:, None] * per_source + np.arange(per_source)).reshape(-1)
        if not np.array_equal(flat, whole) or len(np.unique(kept)) < len(kept):
            raise InputError(f"indices must name all {per_source} rows of a source, in order, got {flat.tolist()}.")
        self._read()
        self.backend.select_sources(self.state, kept)
        self.sources, self.shape, self.history = self.sources[kept], (len(kept), per_source), None

    def activate_past_recording(self) -> None:
        """Do nothing: transformers 5.x calls this before it crops."""

    def crop(self, length: int) -> None:
        """Keep the first ``length`` positions, or drop the last ``-length``; 0 keeps none (on 5.x: all)."""
        if length == 0 and IS_V5:
            return
        length = max(0, self.length + length) if length < 0 else length
        dropped = self.length - length
        if dropped <= 0:
            return
        if dropped <= self._last:
            self.backend.rollback(self.state, np.full(self.shape, self._last - dropped))
            self._last = 0
        elif not length:
            self._restart()
        elif self.history is None or self.history.shape[1] < length or self._padded:
            raise InputError(
                f"crop({length}) goes back by {dropped} positions, beyond the last step, and earlier tokens are not "
                "known. Decode with generate() and without padding, or from the first token again."
            )
        else:
            self._restart(as_integers(self.history[:, :length], "history", rank=2))
        self.length = length

    def _restart(self, unread: np.ndarray | None = None) -> None:
        """Start a new state, whose next step reads these tokens (R, T) before its own."""
        state = self.backend.new_state(self.encoded.source, self.shape[1])
        if not np.array_equal(self.sources, np.arange(len(self.encoded.mask))):
            self.backend.select_sources(state, self.sources)
        self.state, self._unread, self._last, self._padded = state, unread, 0, False

    def _read(self) -> None:
        if self._unread is not None:
            self.backend.step(self.state, self._unread.reshape(*self.shape, -1))
            self._last, self._unread = self._unread.shape[1], None

    def _padding(self, mask: torch.Tensor, count: int) -> np.ndarray | None:
        """The number of padding positions among the new ones, (R, 1); ``None`` without any."""
        checked = as_mask(mask, "decoder_attention_mask")
        rows = self.shape[0] * self.shape[1]
        if checked.shape != (rows, self.length + count):
            raise InputError(
                f"decoder_attention_mask must have shape {(rows, self.length + count)}, for {self.length} known and "
                f"{count} new tokens, got {checked.shape}."
            )
        new = checked[:, self.length :]
        if new.all():
            return None
        lengths = new.sum(axis=1)
        if self.length or not lengths.all() or not np.array_equal(new, right_aligned(lengths, count)):
            raise InputError(
                "decoder_attention_mask must hide padding on the left of the first tokens only, and leave one in each "
                "row. Padding on the right needs no mask: no token looks to its right."
            )
        if hasattr(self.backend, "positions"):  # absolute ones leave open whether padding counts
            raise InputError(
                "decoder_attention_mask must hide no padding for a model with absolute positions. Give prefixes of one "
                "length."
            )
        return count - lengths[:, None]


def as_encoded(encoder_outputs: Any) -> EncodedBatch:
    """Check that ``encoder_outputs`` are a backend's."""
    if not isinstance(encoder_outputs, EncodedBatch):
        raise InputError(
            f"encoder_outputs must be what this model's get_encoder() returned, got {type(encoder_outputs).__name__}."
        )
    return encoder_outputs


def as_cache(cache: Any, backend: Backend) -> DecoderCache:
    """Check that a cache is this backend's."""
    if not isinstance(cache, DecoderCache):
        raise InputError(
            f"{CACHE} must be what this model returned, got {type(cache).__name__}. Leave it out: "
            "the backend has its own cache, also where the decoder is deeper than the encoder."
        )
    if cache.backend is not backend:
        raise InputError(f"{CACHE} must be what this model returned, got another model's.")
    return cache


def named_cache(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the cache under transformers' present name, whichever of the two it was given by."""
    others = dict(arguments)
    given = [cache for cache in (others.pop("past_key_values", None), others.pop("cache", None)) if cache is not None]
    if len(given) > 1:
        raise InputError("Give past_key_values or cache, not both: they are two names of one argument.")
    return others | {CACHE: given[0]} if given else others


def as_mask(mask: Any, name: str) -> np.ndarray:
    """Convert a mask to int64 (R, n); like transformers, accept floats of 0 and 1.

    >>> as_mask(torch.tensor([[1.0, 0.0]]), "attention_mask")
    array([[1, 0]])
    """
    if isinstance(mask, torch.Tensor) and mask.is_floating_point():
        floats, mask = mask, mask.long()
        if not torch.equal(mask.to(floats.dtype), floats):
            raise InputError(f"{name} must hold 0 (padding) and 1 (token) only, got other numbers.")
    return as_integers(mask, name, rank=2)


def reject_text(input_ids: Any) -> None:
    """Raise ``InputError`` for text, or a tokenizer's whole output, in place of token ids."""
    first = input_ids[0] if isinstance(input_ids, list | tuple) and input_ids else input_ids
    if isinstance(input_ids, Mapping):
        raise InputError(f"input_ids must be token ids, got a {type(input_ids).__name__}: unpack it, as in (**batch).")
    if isinstance(first, str):
        raise InputError(
            "input_ids must be token ids, got text. Tokenize it first:\n"
            '    batch = model.tokenizer(texts, return_tensors="pt", padding=True)\n'
            "    tokens = model.generate(**batch)"
        )


def reject_unsupported(arguments: dict[str, Any]) -> None:
    """Raise ``InputError`` if one of these arguments is neither ``None`` nor ``False``."""
    given = [name for name, value in arguments.items() if value is not None and value is not False]
    if given:
        raise InputError(
            f"{', '.join(given)} must be left out: a backend takes token ids and masks, and returns logits. Use "
            "transformers' own model for it."
        )
