"""Compare a runtime's logits with those of the model that it came from.

It finds what has no weight of its own: a hook, an overridden ``forward`` or a changed constant.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from t5accel.decoding.backend import Backend
from t5accel.decoding.token_constraints import special_tokens
from t5accel.errors import ExportError
from t5accel.graphs.contract import DECODER, ENCODER, decoder_spec, kv_names
from t5accel.graphs.ort_levels import import_onnxruntime
from t5accel.graphs.weights import T5Weights
from t5accel.models.sizes import T5Dims
from t5accel.parity import ParityError, assert_close

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# (B, S) input_ids and attention_mask, (B, T) decoder_input_ids -> (B, T, V) logits
Logits = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
SOURCE, TARGET = 9, 4  # tokens of the batch
TOLERANCE = 1e-3  # of the largest logit; fp32 on two runtimes differs by a hundredth of it


def check_logits(
    model: PreTrainedModel,
    run: Logits,
    *,
    vocab_size: int,
    source_vocab_size: int | None = None,
    tolerance: float = TOLERANCE,
) -> None:
    """Raise ``ExportError`` unless a runtime's logits equal the model's on one seeded batch.

    ``tolerance`` is the largest difference, as a share of the largest logit. The model's training mode is restored.

    >>> from t5accel.backends.torch_eager import TorchEager
    >>> from t5accel.models.random_init import random_t5
    >>> model = random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    >>> check_logits(model, backend_logits(TorchEager(model)), vocab_size=32)
    """
    rng = np.random.default_rng(0)
    special = special_tokens(model)
    pad = special["pad_token_id"]
    positions = getattr(model.config, "max_position_embeddings", SOURCE)  # T5 has none

    def drawn(entries: int, length: int) -> np.ndarray:
        ids = rng.integers(0, entries - 1, (2, length))
        return ids + (ids >= pad)  # any token but padding

    ids, tokens = drawn(source_vocab_size or vocab_size, min(SOURCE, positions)), drawn(vocab_size, TARGET)
    mask = np.ones_like(ids)
    ids[1, -1], mask[1, -1] = pad, 0
    tokens[:, 0] = special["decoder_start_token_id"]
    own = _own_logits(model, ids, mask, tokens)
    found = run(ids, mask, tokens)
    finite = np.isfinite(own)  # a model that overflows is no fault of the runtime
    try:
        if finite.any():
            assert_close(found[finite], own[finite], atol=tolerance * max(1.0, float(np.abs(own[finite]).max())))
    except ParityError as error:
        raise ExportError(
            f"{type(model).__name__}: the graphs compute other logits than the model itself ({error}). A hook, an "
            "overridden forward() or an adapter is not exported. Merge or remove it; check_logits=False exports the "
            "weights as they are."
        ) from error


def _own_logits(model: PreTrainedModel, ids: np.ndarray, mask: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    import torch

    device = next(model.parameters()).device
    modes = [(module, module.training) for module in model.modules()]
    given = [torch.from_numpy(array).to(device) for array in (ids, mask, tokens)]
    try:
        model.eval()
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            output = model(
                input_ids=given[0],
                attention_mask=given[1],
                decoder_input_ids=given[2],
                use_cache=False,
                return_dict=True,
            )
        return output.logits.float().cpu().numpy()
    except Exception as error:
        raise ExportError(
            f"{type(model).__name__} cannot be run, so its export cannot be compared with it ({error}). "
            "check_logits=False exports it all the same."
        ) from error
    finally:
        for module, training in modes:
            module.training = training


def backend_logits(backend: Backend) -> Logits:
    """A backend's logits, in one step from an empty history."""
    return lambda ids, mask, tokens: backend.step(backend.new_state(backend.encode(ids, mask)), tokens[:, None])[:, 0]


def check_export(model: PreTrainedModel, weights: T5Weights, folder: Path) -> None:
    """`check_logits` of a model and its fp32 export in ``folder``."""
    import torch

    if any(weight.dtype != torch.float32 for weight in model.parameters()):
        model = copy.deepcopy(model).float()  # as its weights were exported
    sizes = dict(vocab_size=weights.dims.vocab_size, source_vocab_size=weights.source_vocab_size)
    check_logits(model, _graph_logits(folder, weights.dims), **sizes)


def _graph_logits(folder: Path, dims: T5Dims) -> Logits:
    """The logits of an fp32 export, on ONNX Runtime's CPU, without optimisation."""

    def run(ids: np.ndarray, mask: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        onnxruntime = import_onnxruntime()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        # Read once: preparing weights for many runs would cost more than this run, and their memory again.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")

        def outputs(graph: str, wanted: list[str], feeds: dict[str, Any]) -> list[np.ndarray]:
            path = str(folder / graph)
            return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(wanted, feeds)

        source, cross = {"input_ids": ids, "attention_mask": mask}, kv_names("cross", dims.decoder_layers)
        feeds: dict[str, Any] = dict(zip(cross, outputs(ENCODER, cross, source), strict=True))
        sizes = {"B": len(ids), "K": 1, "P": 0}
        for tensor in decoder_spec(dims).inputs:
            if tensor.name.startswith("past_"):
                shape = [sizes.get(size, size) for size in tensor.shape]
                feeds[tensor.name] = np.zeros(shape, dtype=tensor.dtype)
        return outputs(DECODER, ["logits"], {**feeds, "attention_mask": mask, "input_ids": tokens[:, None]})[0][:, 0]

    return run
