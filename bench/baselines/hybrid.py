"""The encoder and the head on ONNX Runtime, the decoder between them in torch: the layout of the class OnnxT5 of 2020.

A graph takes no missing history, so a single decoder graph could have no cache; transformers' decoder has one. At every
step the decoder's output goes from torch to the runtime, and the logits come back: on a CPU neither is copied.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np
import torch

from bench.baselines.layout_backends import open_layout
from bench.baselines.layout_graphs import LM_HEAD
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.torch_eager import TorchEager, TorchState
from t5accel.errors import InputError
from t5accel.graphs.contract import ENCODER
from t5accel.graphs.export import source_hash, t5_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HybridOnnxT5(TorchEager):
    """A `Backend` like `TorchEager` with its cache, whose encoder and head are graphs.

    Args:
        folder: what ``layouts.export_layout(model, folder, "onnxt5")`` wrote.
        model: the same model, for its decoder; put into evaluation mode.
        settings: threads, memory and device of both sessions; the decoder's threads are torch's.

    Raises:
        ExportError: there is no such layout, or it is damaged.
        InputError: the graphs were written from another model, or from this one before its weights changed.
        MissingPackageError: onnxruntime is not installed, or not the one for the device.

    >>> from tempfile import TemporaryDirectory
    >>> from t5accel.models.load import load_t5
    >>> from t5accel.decoding.greedy_search import greedy
    >>> from bench.baselines.layouts import export_layout
    >>> model, _ = load_t5("mini")
    >>> with TemporaryDirectory() as folder:
    ...     _ = export_layout(model, f"{folder}/mini", "onnxt5")
    ...     backend = HybridOnnxT5(f"{folder}/mini", model)
    ...     greedy(backend, [[100, 200, 1]], min_new_tokens=5, max_new_tokens=5).sequences.shape
    (1, 5)
    """

    def __init__(
        self, folder: str | os.PathLike[str], model: PreTrainedModel, *, settings: SessionSettings | None = None
    ):
        super().__init__(model)
        self.description, self.sessions = open_layout(folder, "onnxt5", settings)
        if source_hash(model, t5_weights(model)) != self.description.source["sha256"]:
            raise InputError(
                f"The graphs in {folder} were written from {self.description.source['name']!r} with other weights than "
                "this model's: write them again with export_layout."
            )

    def fingerprint(self) -> Hashable:
        """Always the same: the weights of a session do not change."""
        return self.description.source["sha256"]

    def _run_encoder(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        inputs = {"input_ids": ids.cpu().numpy(), "attention_mask": mask.cpu().numpy()}
        (hidden,) = self.sessions[ENCODER].run(["last_hidden_state"], inputs)
        return torch.from_numpy(hidden).to(self.device, self.model.dtype)

    def _run_decoder(
        self, state: TorchState, tokens: torch.Tensor, past_mask: torch.Tensor | None, count: int
    ) -> np.ndarray:
        hidden = self.model.decoder(
            input_ids=tokens,
            attention_mask=past_mask,
            encoder_hidden_states=state.hidden,
            encoder_attention_mask=state.mask,
            past_key_values=state.cache,
            use_cache=True,
        ).last_hidden_state
        (logits,) = self.sessions[LM_HEAD].run(["logits"], {"hidden_states": hidden.float().cpu().numpy()})
        return logits
