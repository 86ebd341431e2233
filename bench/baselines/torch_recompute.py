"""Greedy search without a key/value cache, in one CUDA graph.

It is the fairest form of a claim that a cache brings nothing on a GPU: shapes are fixed, nothing else is launched, and
the encoder runs once. On a CPU the same steps are called one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from t5accel.backends.cuda_graphs import captured
from t5accel.backends.torch_static import TorchStatic
from t5accel.backends.torch_static_model import Slot
from t5accel.checks import as_batch, as_count

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Texts:
    """B texts of W places: ``tokens`` (B, W + 1) int64, the start token first; ``count`` (1,) are written.

    ``graph`` is the captured step on a GPU.
    """

    slot: Slot
    tokens: torch.Tensor
    count: torch.Tensor
    graph: Any = None


class TorchRecompute:
    """Greedy generation of a forced length over a T5-like model, everything decoded again for every token.

    Args:
        model: on a GPU or on the CPU, in fp32, bf16 or fp16; put into evaluation mode. Its weights must not change.

    Attributes:
        texts: the memory for each size (B, S, W) that was used.

    >>> from t5accel.models.load import load_model
    >>> TorchRecompute(load_model("random:t5-small")[0]).generate([[100, 200, 1]], new_tokens=5).shape
    (1, 5)
    """

    def __init__(self, model: PreTrainedModel):
        self._encoder = TorchStatic(model)
        rules = self._encoder.rules
        rules.require_supported()
        self._forbidden = rules.suppressed(rules.eos_tokens(self._encoder.eos_token_id))
        self.model, self.decoder, self.device = model, self._encoder.decoder, self._encoder.device
        self.texts: dict[tuple[int, int, int], Texts] = {}

    @torch.inference_mode()
    def generate(self, input_ids: Any, attention_mask: Any = None, *, new_tokens: int) -> np.ndarray:
        """Exactly ``new_tokens`` tokens for each source, no end token among them.

        Args:
            input_ids: (B, S) integers, numpy or torch.
            attention_mask: (B, S), by default 1 where ``input_ids`` is not the pad id.
            new_tokens: W. Shapes, and so graphs, are made for each B, S and W and kept.

        Returns:
            (B, W) int64.
        """
        count = as_count(new_tokens, "new_tokens", at_least=1)
        ids, mask = as_batch(input_ids, attention_mask, pad_token_id=self._encoder.pad_token_id,
                             vocab_size=self._encoder.vocab_size)  # fmt: skip
        source = self._encoder.encode(ids, mask)
        batch, length = source.mask.shape
        key = (batch, length, count)
        if key not in self.texts:
            slot = self.decoder.slot(batch=batch, rows=1, source=length, width=count)
            tokens = torch.zeros((batch, count + 1), dtype=torch.int64, device=self.device)
            self.texts[key] = Texts(slot, tokens, torch.zeros(1, dtype=torch.int64, device=self.device))
        texts = self.texts[key]
        self.decoder.fill(texts.slot, source.cross, source.mask)
        texts.slot.penalty.zero_()
        texts.slot.penalty[torch.as_tensor(self._forbidden)] = -torch.inf
        if self.device.type == "cuda" and texts.graph is None:
            texts.graph = captured(lambda: self.advance(texts), lambda: self.begin(texts), self.device)
        self.begin(texts)
        for _ in range(count):
            if texts.graph is None:
                self.advance(texts)
            else:
                texts.graph.replay()
        return texts.tokens[:, 1:].to("cpu", copy=True).numpy()

    @torch.inference_mode()
    def begin(self, texts: Texts) -> None:
        """The start token alone."""
        texts.tokens.fill_(self._encoder.decoder_start_token_id)
        texts.count.zero_()

    @torch.inference_mode()
    def advance(self, texts: Texts) -> None:
        """Decode all W places, of which the first ``count + 1`` are real, and write one token more."""
        slot = texts.slot
        slot.lengths.zero_()
        hidden = self.decoder.read(slot, texts.tokens[:, :-1])
        self.decoder.choose(slot, hidden.index_select(1, texts.count))
        texts.count += 1
        texts.tokens.index_copy_(1, texts.count, slot.token)
        slot.count.zero_()
