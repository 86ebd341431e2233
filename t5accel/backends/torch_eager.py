"""transformers' own model in PyTorch's eager mode: the baseline of every comparison.

The K rows of a source each get a copy of its cross-attention cache, as in transformers; the ONNX backends share one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.rnn import pad_sequence
from torch.optim.optimizer import register_optimizer_step_post_hook

from t5accel.decoding.backend import PastLengths
from t5accel.errors import InputError
from t5accel.models.families import position_table
from t5accel.models.spec import ModelSpec
from t5accel.models.t5_math import cache_name

if TYPE_CHECKING:
    from transformers import EncoderDecoderCache, PreTrainedModel

_optimizer_steps = 0  # of any optimiser: fused ones change weights without raising their `_version`


def _count_optimizer_step(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_optimizer_step)


@dataclass(frozen=True)
class TorchSource:
    """Encoder output (B, S, d_model) and mask (B, S), on the model's device."""

    hidden: torch.Tensor
    mask: torch.Tensor


@dataclass
class TorchState:
    """A decoder state of R = B * K rows."""

    hidden: torch.Tensor  # (R, S, d_model), a copy of the source per row
    mask: torch.Tensor  # (R, S)
    rows: PastLengths
    tokens: torch.Tensor  # (R, P), all so far, right-aligned; only the uncached backend reads them
    cache: EncoderDecoderCache | None


class TorchEager:
    """A `Backend` over a model of transformers, which is put into evaluation mode.

    Without ``use_cache`` every step runs the decoder over all tokens so far; the encoder still runs once.

    >>> from t5accel.models.load import load_model
    >>> from t5accel.decoding.greedy_search import greedy
    >>> backend = TorchEager(load_model("random:t5-small")[0])
    >>> greedy(backend, [[100, 200, 1]], max_new_tokens=5).sequences.shape
    (1, 5)
    """

    vocab_size: int
    pad_token_id: int
    eos_token_id: int
    decoder_start_token_id: int

    def __init__(self, model: PreTrainedModel, *, use_cache: bool = True):
        spec = ModelSpec.of(model)
        spec.describe(self)
        self.model, self.use_cache, self._family = model.eval(), use_cache, spec.family

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @torch.inference_mode()
    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> TorchSource:
        ids, mask = self._tensor(input_ids), self._tensor(attention_mask)
        return TorchSource(self._run_encoder(ids, mask), mask)

    @torch.inference_mode()
    def split(self, source: TorchSource) -> list[TorchSource]:
        """One source per row, a copy of its unmasked positions: cross-attention has no positions."""
        rows = zip(source.hidden, source.mask, source.mask.bool(), strict=True)
        return [TorchSource(hidden[real][None], mask[real][None]) for hidden, mask, real in rows]

    @torch.inference_mode()
    def join(self, sources: Sequence[TorchSource]) -> TorchSource:
        """One new batch of all rows, padded on the right with zeros and masked there."""
        hidden = pad_sequence([row for source in sources for row in source.hidden], batch_first=True)
        mask = pad_sequence([row for source in sources for row in source.mask], batch_first=True)
        return TorchSource(hidden, mask)

    def source_bytes(self, source: TorchSource) -> int:
        return source.hidden.nbytes + source.mask.nbytes

    def fingerprint(self) -> Hashable:
        """A value that changes with the encoder's weights.

        It notices writes that autograd counts, any optimiser, ``.to()`` and new tensors; not writes through ``.data``
        or a numpy view, by another process, a replayed CUDA graph or a custom kernel.
        """
        encoder = self.model.get_encoder()
        weights = [*encoder.parameters(), *encoder.buffers()]
        if any(weight.is_inference() for weight in weights):  # autograd does not count the writes to them
            raise InputError("These weights were made in inference mode, which hides changes: load them outside of it.")
        # Storages count by identity: an address may be that of freed memory, given out again.
        storages = tuple(StorageWeakRef(weight.untyped_storage()) for weight in weights)
        views = tuple((w._version, w.dtype, w.shape, w.stride(), w.storage_offset()) for w in weights)
        return _optimizer_steps, encoder.training, storages, views

    def new_state(self, source: TorchSource, rows_per_source: int = 1) -> TorchState:
        rows = PastLengths.empty(len(source.hidden), rows_per_source)
        hidden, mask = (tensor.repeat_interleave(rows.shape[1], 0) for tensor in (source.hidden, source.mask))
        tokens = torch.empty((len(hidden), 0), dtype=torch.long, device=self.device)
        return TorchState(hidden, mask, rows, tokens, self._empty_cache())

    @torch.inference_mode()
    def step(self, state: TorchState, input_ids: np.ndarray) -> np.ndarray:
        count = input_ids.shape[2]
        rows, flat = state.rows.appended(count), self._tensor(input_ids.reshape(-1, count))
        tokens = torch.cat([state.tokens, flat], dim=1)
        past_mask = torch.as_tensor(rows.mask().reshape(tokens.shape), device=self.device) if rows.ragged else None
        try:
            logits = self._run_decoder(state, flat if self.use_cache else tokens, past_mask, count)
        except BaseException:
            self._take_back(state)
            raise
        state.tokens, state.rows = tokens, rows
        return logits.reshape(*input_ids.shape, self.vocab_size)

    def reorder(self, state: TorchState, rows: np.ndarray) -> None:
        histories, flat = state.rows.reordered(rows)
        if flat is not None:
            self._select(state, flat)
        state.rows = histories

    def select_sources(self, state: TorchState, sources: np.ndarray) -> None:
        histories, kept = state.rows.kept(sources)
        rows_per_source = histories.shape[1]
        self._select(state, (kept[:, None] * rows_per_source + np.arange(rows_per_source)).ravel())
        state.rows = histories

    @torch.inference_mode()
    def rollback(self, state: TorchState, accepted: np.ndarray) -> None:
        histories, old_positions = state.rows.trimmed(accepted)
        if old_positions is not None:
            index = torch.as_tensor(old_positions.reshape(len(state.hidden), histories.width), device=self.device)
            tokens, where = state.tokens.gather(1, index), index[:, None, :, None]
            _replace(_layers(state)[0], lambda held: held.gather(2, where.expand(-1, held.shape[1], -1, held.shape[3])))
            state.tokens = tokens
        state.rows = histories

    # Subclasses run these two by other runtimes.

    def _run_encoder(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model.get_encoder()(input_ids=ids, attention_mask=mask, return_dict=True).last_hidden_state

    def _run_decoder(
        self, state: TorchState, tokens: torch.Tensor, past_mask: torch.Tensor | None, count: int
    ) -> np.ndarray:
        """Tokens (R, n) -> the last ``count`` logits (R, T, V), on the host. The cache grows in place."""
        from transformers.modeling_outputs import BaseModelOutput

        options = {}
        if past_mask is not None and self._family.is_gemma:
            options["decoder_position_ids"] = (past_mask.cumsum(dim=1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        with self._positions_from(past_mask, tokens.shape[1]):
            outputs = self.model(
                encoder_outputs=BaseModelOutput(last_hidden_state=state.hidden),
                attention_mask=state.mask,
                decoder_input_ids=tokens,
                decoder_attention_mask=past_mask,
                **{cache_name(): state.cache},
                use_cache=self.use_cache,
                return_dict=True,
                **options,
            )
        return outputs.logits[:, -count:].float().cpu().numpy()

    @contextmanager
    def _positions_from(self, mask: torch.Tensor | None, count: int) -> Iterator[None]:
        """Give the last ``count`` columns of a mask (R, n) positions that count real tokens, not columns."""
        if mask is None or self._family.is_relative or self._family.is_gemma:
            yield
            return
        numbers = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -count:] + self._family.first_position(self.pad_token_id)
        table, module = position_table(self.model.model.decoder), self.model.model.decoder.embed_positions
        found = table[numbers.clamp(max=len(table) - 1)]  # ended rows may be longer
        module.forward = lambda *_, **__: found
        try:
            yield
        finally:
            del module.forward

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        # A copy, because torch takes no reversed view, warns of a read-only one and would share memory with any other.
        return torch.as_tensor(np.array(array, order="C"), device=self.device)

    def _empty_cache(self) -> EncoderDecoderCache | None:
        from transformers import DynamicCache, EncoderDecoderCache

        # Given explicitly because transformers would size it by the encoder's depth (4.57 and 5.x alike).
        return EncoderDecoderCache(DynamicCache(), DynamicCache()) if self.use_cache else None

    def _take_back(self, state: TorchState) -> None:
        """Undo a failed step: the model lengthens the cache in place, layer by layer."""
        width = state.rows.width
        if not width:
            state.cache = self._empty_cache()  # the first step writes the part of cross-attention, too
        else:
            _replace(_layers(state)[0], lambda held: held[:, :, :width])

    @torch.inference_mode()
    def _select(self, state: TorchState, flat_rows: np.ndarray) -> None:
        """Go on with the tensors of these rows; the caller sets their lengths."""
        index = torch.as_tensor(flat_rows, device=self.device)
        hidden, mask, tokens = state.hidden[index], state.mask[index], state.tokens[index]
        own, cross = _layers(state)
        _replace([*own, *cross], lambda held: held[index])
        state.hidden, state.mask, state.tokens = hidden, mask, tokens


def _layers(state: TorchState) -> tuple[Sequence[Any], Sequence[Any]]:
    """The cache's layers for self-attention and for cross-attention."""
    if state.cache is None:
        return (), ()
    return state.cache.self_attention_cache.layers, state.cache.cross_attention_cache.layers


def _replace(layers: Iterable[Any], part: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace keys and values (R, H, n, d_kv); no layer changes before the new ones of all are there."""
    for layer, keys, values in [(layer, part(layer.keys), part(layer.values)) for layer in layers]:
        layer.keys, layer.values = keys, values
