"""Greedy search without a KV cache, in one CUDA graph.

It is the fairest form of a claim that a cache brings nothing on a GPU: shapes are fixed, nothing else is launched, and
the encoder runs once. On a CPU the same steps are called one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from t5accel.backends.torch_static import TorchStatic
from t5accel.backends.torch_static_buffers import StaticBuffers, capture_graph
from t5accel.checks import as_batch, as_count

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class TextBuffers:
    """Memory for B texts of W places, and on a GPU the captured step."""

    buffers: StaticBuffers
    tokens: torch.Tensor  # (B, W + 1) int64, the start token first
    count: torch.Tensor  # (1,) int64, the tokens written
    graph: Any = None


class TorchRecompute:
    """Greedy generation of a forced length, in which every step decodes the whole text again.

    The model's weights must not change. ``texts`` are the buffers for each size (B, S, W) that was used.

    >>> from t5accel.models.load import load_model
    >>> TorchRecompute(load_model("random:t5-small")[0]).generate([[100, 200, 1]], new_tokens=5).shape
    (1, 5)
    """

    def __init__(self, model: PreTrainedModel):
        self._encoder = TorchStatic(model)
        rules = self._encoder.rules
        rules.require_supported()
        self._suppressed = rules.suppressed(rules.eos_tokens(self._encoder.eos_token_id))
        self.decoder, self.device = self._encoder.decoder, self._encoder.device
        self.texts: dict[tuple[int, int, int], TextBuffers] = {}

    @torch.inference_mode()
    def generate(self, input_ids: Any, attention_mask: Any = None, *, new_tokens: int) -> np.ndarray:
        """Generate exactly ``new_tokens`` tokens for each source (B, S), no end token among them: (B, W) int64."""
        count = as_count(new_tokens, "new_tokens", at_least=1)
        vocabulary = dict(pad_token_id=self._encoder.pad_token_id, vocab_size=self._encoder.vocab_size)
        source = self._encoder.encode(*as_batch(input_ids, attention_mask, **vocabulary))
        batch, length = source.mask.shape
        key = (batch, length, count)
        if key not in self.texts:
            buffers = self.decoder.new_buffers(batch=batch, rows=1, source=length, width=count)
            tokens = torch.zeros((batch, count + 1), dtype=torch.int64, device=self.device)
            self.texts[key] = TextBuffers(buffers, tokens, torch.zeros(1, dtype=torch.int64, device=self.device))
        texts = self.texts[key]
        self.decoder.fill(texts.buffers, source.cross_kv, source.mask)
        texts.buffers.begin_run(self._suppressed)
        if self.device.type == "cuda" and texts.graph is None:
            texts.graph = capture_graph(lambda: self.advance(texts), lambda: self.begin(texts), self.device)
        self.begin(texts)
        for _ in range(count):
            if texts.graph is None:
                self.advance(texts)
            else:
                texts.graph.replay()
        return texts.tokens[:, 1:].to("cpu", copy=True).numpy()

    @torch.inference_mode()
    def begin(self, texts: TextBuffers) -> None:
        """The start token alone."""
        texts.tokens.fill_(self._encoder.decoder_start_token_id)
        texts.count.zero_()

    @torch.inference_mode()
    def advance(self, texts: TextBuffers) -> None:
        """Decode all W places, of which the first ``count + 1`` are real, and write one token more."""
        buffers = texts.buffers
        buffers.lengths.zero_()
        hidden = self.decoder.read(buffers, texts.tokens[:, :-1])
        self.decoder.choose(buffers, hidden.index_select(1, texts.count))
        texts.count += 1
        texts.tokens.index_copy_(1, texts.count, buffers.token)
        buffers.count.zero_()
