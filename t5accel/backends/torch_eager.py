"""transformers' own T5 in torch's eager mode, with its key/value cache or without: the baseline of every comparison.

The K rows of a source each get a copy of its cross-attention cache, as transformers does; the ONNX backends share one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.rnn import pad_sequence
from torch.optim.optimizer import register_optimizer_step_post_hook

from t5accel.checkpoints import T5Dims
from t5accel.decoding.backend import as_batch, as_count, as_integers, right_aligned
from t5accel.errors import InputError

if TYPE_CHECKING:
    from transformers import EncoderDecoderCache, PreTrainedModel

_optimizer_steps = 0  # of any optimiser: fused ones change weights without raising their `_version`


def _count_optimizer_step(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_optimizer_step)


@dataclass(frozen=True)
class TorchSource:
    """Encoder output (B, S, d_model) and mask (B, S), on the model's device; ``owner`` is the backend's model."""

    hidden: torch.Tensor
    mask: torch.Tensor
    owner: Any


@dataclass
class TorchState:
    """A decoder state of R = B * K rows.

    Attributes:
        owner: the backend that started it.
        hidden, mask: the source, one copy per row: (R, S, d_model), (R, S).
        tokens: (R, P) every token so far, right-aligned; only the uncached backend reads it.
        lengths: (R,) how many of these are real; those to their left are padding.
        cache: transformers' cache, ``None`` without one.
        last: T of the last step.
    """

    owner: TorchEager
    hidden: torch.Tensor
    mask: torch.Tensor
    rows_per_source: int
    tokens: torch.Tensor
    lengths: np.ndarray
    cache: EncoderDecoderCache | None
    last: int = 0


class TorchEager:
    """A `Backend` over ``T5ForConditionalGeneration``.

    Args:
        model: a T5-like model; put into evaluation mode.
        use_cache: with ``False`` every step runs the decoder over all tokens so far (the naive way; the encoder still
            runs once).

    >>> from t5accel.checkpoints import load_t5
    >>> from t5accel.decoding.greedy import greedy
    >>> backend = TorchEager(load_t5("random:t5-small")[0])
    >>> greedy(backend, [[100, 200, 1]], max_new_tokens=5).sequences.shape
    (1, 5)
    """

    def __init__(self, model: PreTrainedModel, *, use_cache: bool = True):
        dims = T5Dims.of(model)
        config = model.config
        self.model, self.use_cache = model.eval(), use_cache
        self.vocab_size = dims.vocab_size
        self.pad_token_id, self.eos_token_id = config.pad_token_id, config.eos_token_id
        self.decoder_start_token_id = config.decoder_start_token_id
        for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id"):
            as_count(getattr(config, name), f"model.config.{name}", at_least=0)

    @property
    def device(self) -> torch.device:
        return self.model.lm_head.weight.device

    @torch.inference_mode()
    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> TorchSource:
        checked_ids, checked_mask = as_batch(input_ids, attention_mask, pad_token_id=self.pad_token_id)
        self._check_vocabulary(checked_ids)
        ids, mask = self._tensor(checked_ids), self._tensor(checked_mask)
        hidden = self.model.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        return TorchSource(hidden, mask, self.model)

    @torch.inference_mode()
    def split(self, source: TorchSource) -> list[TorchSource]:
        """One source per row with its own copy of the unmasked positions (cross-attention knows no positions)."""
        self._check_source(source)
        rows = zip(source.hidden, source.mask, source.mask.bool(), strict=True)
        return [TorchSource(hidden[real][None], mask[real][None], source.owner) for hidden, mask, real in rows]

    @torch.inference_mode()
    def join(self, sources: Sequence[TorchSource]) -> TorchSource:
        """The rows of all of them as one new batch, padded on the right with zeros and masked there."""
        for source in sources:
            self._check_source(source)
        if not sources:
            raise InputError("There are no sources to join: give at least one.")
        hidden = pad_sequence([row for source in sources for row in source.hidden], batch_first=True)
        mask = pad_sequence([row for source in sources for row in source.mask], batch_first=True)
        return TorchSource(hidden, mask, self.model)

    def source_bytes(self, source: TorchSource) -> int:
        return source.hidden.nbytes + source.mask.nbytes

    def fingerprint(self) -> Hashable:
        """Changes with the encoder's weights: by writes that autograd counts, any optimiser, ``.to()``, new tensors.

        Unnoticed are writes through ``.data`` or a numpy view, by another process, a replayed CUDA graph or a kernel of
        one's own. Storages count by identity: an address may be that of freed memory, given out again.

        Raises:
            InputError: weights made in inference mode; autograd does not count the writes to them.
        """
        encoder = self.model.encoder
        weights = [*encoder.parameters(), *encoder.buffers()]
        if any(weight.is_inference() for weight in weights):
            raise InputError("These weights were made in inference mode, which hides changes: load them outside of it.")
        storages = tuple(StorageWeakRef(weight.untyped_storage()) for weight in weights)
        views = tuple((w._version, w.dtype, w.shape, w.stride(), w.storage_offset()) for w in weights)
        return _optimizer_steps, encoder.training, storages, views

    def start(self, source: TorchSource, rows_per_source: int = 1) -> TorchState:
        from transformers import DynamicCache, EncoderDecoderCache

        self._check_source(source)
        rows_per_source = as_count(rows_per_source, "rows_per_source", at_least=1)
        rows = len(source.hidden) * rows_per_source
        return TorchState(
            owner=self,
            hidden=source.hidden.repeat_interleave(rows_per_source, 0),
            mask=source.mask.repeat_interleave(rows_per_source, 0),
            rows_per_source=rows_per_source,
            tokens=torch.empty((rows, 0), dtype=torch.long, device=self.device),
            lengths=np.zeros(rows, dtype=np.int64),
            # Given explicitly because transformers would size it by the encoder's depth (4.57 and 5.x alike).
            cache=EncoderDecoderCache(DynamicCache(), DynamicCache()) if self.use_cache else None,
        )

    @torch.inference_mode()
    def step(self, state: TorchState, input_ids: np.ndarray) -> np.ndarray:
        self._check_owner(state)
        new = as_integers(input_ids, "input_ids", rank=3)
        batch, rows, count = new.shape
        if (batch * rows, rows) != (len(state.hidden), state.rows_per_source) or not count:
            expected = (len(state.hidden) // state.rows_per_source, state.rows_per_source)
            raise InputError(f"input_ids has shape {new.shape}; this state takes {(*expected, 'T >= 1')}.")
        self._check_vocabulary(new)
        flat = self._tensor(new.reshape(batch * rows, count))
        tokens = torch.cat([state.tokens, flat], dim=1)
        lengths = state.lengths + count
        ragged = lengths.min() < tokens.shape[1]
        past_mask = torch.as_tensor(right_aligned(lengths, tokens.shape[1]), device=self.device) if ragged else None
        outputs = self.model(
            encoder_outputs=(state.hidden,),
            attention_mask=state.mask,
            decoder_input_ids=flat if self.use_cache else tokens,
            decoder_attention_mask=past_mask,
            past_key_values=state.cache,
            use_cache=self.use_cache,
        )
        state.tokens, state.lengths, state.last = tokens, lengths, count
        logits = outputs.logits[:, -count:].float().cpu().numpy()
        return logits.reshape(batch, rows, count, self.vocab_size)

    def reorder(self, state: TorchState, rows: np.ndarray) -> None:
        self._check_owner(state)
        rows = self._per_row(state, rows, "rows", highest=state.rows_per_source - 1)
        first = np.arange(len(rows))[:, None] * state.rows_per_source
        self._select(state, (first + rows).reshape(-1))

    def keep(self, state: TorchState, sources: np.ndarray) -> None:
        self._check_owner(state)
        sources = as_integers(sources, "sources", rank=1)
        batch = len(state.hidden) // state.rows_per_source
        if not sources.size or sources.min() < 0 or sources.max() >= batch:
            raise InputError(f"sources is {sources.tolist()}; give at least one index in 0 … {batch - 1}.")
        self._select(state, (sources[:, None] * state.rows_per_source + np.arange(state.rows_per_source)).reshape(-1))

    @torch.inference_mode()
    def trim(self, state: TorchState, accepted: np.ndarray) -> None:
        self._check_owner(state)
        accepted = self._per_row(state, accepted, "accepted", highest=state.last).reshape(-1)
        lengths = state.lengths - state.last + accepted
        dropped = state.last - accepted  # real positions to leave out at the right end of each row
        width = int(lengths.max())
        # Position j of the new, right-aligned history of a row is position j + shift of its old one.
        old_width = state.tokens.shape[1]
        index = np.arange(width)[None, :] + (old_width - dropped - width)[:, None]
        index = torch.as_tensor(np.maximum(index, 0), device=self.device)
        state.tokens = state.tokens.gather(1, index)
        if state.cache is not None:
            for layer in state.cache.self_attention_cache.layers:
                heads, d_kv = layer.keys.shape[1], layer.keys.shape[3]
                where = index[:, None, :, None].expand(-1, heads, -1, d_kv)
                layer.keys, layer.values = layer.keys.gather(2, where), layer.values.gather(2, where)
        state.lengths, state.last = lengths, 0

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        # A copy, because torch takes no reversed view, warns of a read-only one and would share memory with any other.
        return torch.as_tensor(np.array(array, order="C"), device=self.device)

    def _check_source(self, source: TorchSource) -> None:
        if getattr(source, "owner", None) is not self.model:
            raise InputError("This source was encoded by another model or backend: encode it with this one.")

    def _check_owner(self, state: TorchState) -> None:
        if getattr(state, "owner", None) is not self:
            raise InputError("This state was not started by this backend: give what its start() returned.")

    def _check_vocabulary(self, ids: np.ndarray) -> None:
        # Looked up unchecked, such an id is an IndexError on a CPU and the end of the process's CUDA context on a GPU.
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise InputError(f"input_ids must lie in 0 … {self.vocab_size - 1}; {ids.min()} … {ids.max()} were given.")

    def _per_row(self, state: TorchState, values: np.ndarray, name: str, *, highest: int) -> np.ndarray:
        values = as_integers(values, name, rank=2)
        shape = (len(state.hidden) // state.rows_per_source, state.rows_per_source)
        if values.shape != shape or values.min() < 0 or values.max() > highest:
            raise InputError(f"{name} of shape {values.shape}: give shape {shape} with values in 0 … {highest}.")
        return values

    @torch.inference_mode()
    def _select(self, state: TorchState, flat_rows: np.ndarray) -> None:
        index = torch.as_tensor(flat_rows, device=self.device)
        state.hidden, state.mask, state.tokens = state.hidden[index], state.mask[index], state.tokens[index]
        state.lengths = state.lengths[flat_rows]
        if state.cache is not None:
            for part in (state.cache.self_attention_cache, state.cache.cross_attention_cache):
                for layer in part.layers:
                    layer.keys, layer.values = layer.keys[index], layer.values[index]
