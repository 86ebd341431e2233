"""The weights of BART and its relatives under T5's names, so that one builder, and every recipe, serves them all."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from t5accel.errors import InputError, NotT5Error
from t5accel.families.family import Family
from t5accel.families.registry import dims_of
from t5accel.graphs.build.t5_weights import T5Weights

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_ADVICE = "unwrap the model, merge adapters first."
_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(.+)\.(weight|bias)")
# Of a layer; {} is the number of its feed-forward part, which stands behind one or two attentions.
_PARTS = {f"{theirs}.{part}_proj": f"{ours}.{part[0]}"
          for theirs, ours in (("self_attn", "0.SelfAttention"), ("encoder_attn", "1.EncDecAttention"))
          for part in ("q", "k", "v", "out")}  # fmt: skip
_PARTS |= {"self_attn_layer_norm": "0.layer_norm", "encoder_attn_layer_norm": "1.layer_norm",
           "fc1": "{}.DenseReluDense.wi", "fc2": "{}.DenseReluDense.wo",
           "final_layer_norm": "{}.layer_norm"}  # fmt: skip


def bart_like_weights(model: PreTrainedModel, family: Family) -> T5Weights:
    """A model's weights as fp32 numpy arrays, which share memory with it where they can, and its sizes.

    The root by which attention scores are divided goes into the weights and biases of the queries.

    Args:
        model: of the family, with a language-model head.
        family: how it is put together.

    Raises:
        NotT5Error: it has no head, or weights that the family knows nothing of.
        InputError: its weights are on the meta device, where they have no values.
    """
    if any(weight.is_meta for weight in model.parameters()):
        raise InputError("The model's weights are on torch's meta device, where they have no values: load them first.")
    beside = {name for name, _ in (*model.named_parameters(), *model.named_buffers()) if not name.startswith("model.")}
    if unknown := sorted(beside - {"lm_head.weight", "final_logits_bias"}):
        raise NotT5Error(
            f"There is a weight {unknown[0]}, which no family has: unwrap the model, merge adapters first."
        )
    config, inner = model.config, model.model
    below, above = inner.encoder.embed_tokens.weight, inner.decoder.embed_tokens.weight
    arrays = {"shared.weight": _array(above)}
    if below is not above:
        arrays["encoder.embed_tokens.weight"] = _array(below)
    dims = dims_of(model, family)
    if not dims.tied:
        arrays["lm_head.weight"] = _array(model.lm_head.weight)
    for name, weight in (*inner.named_parameters(), *inner.named_buffers()):
        if "embed_tokens" not in name and "embed_positions" not in name and name != "shared.weight":
            arrays[_renamed(name)] = _array(weight)
    for stack in ("encoder", "decoder"):
        table = getattr(inner, stack).embed_positions
        arrays[f"{stack}.embed_positions.weight"] = _array(getattr(table, "weight", getattr(table, "weights", None)))
    logits_bias = getattr(model, "final_logits_bias", None)
    if family.head_bias and logits_bias is not None and logits_bias.any():
        arrays["final_logits_bias"] = _array(logits_bias).reshape(-1)
    if not family.biases:
        arrays = {name: array for name, array in arrays.items() if not name.endswith(".bias") or "norm" in name}
    heads, d_model = (config.encoder_attention_heads, config.decoder_attention_heads), config.d_model
    if family.scales_attention:
        for name in [name for name in arrays if ".q." in name]:
            width = d_model // heads[name.startswith("decoder.")]
            arrays[name] = arrays[name] * np.float32(width**-0.5)
    scaled = family.scales_embedding and config.scale_embedding
    return T5Weights(
        arrays=arrays, dims=dims, activation=config.activation_function, norm_epsilon=1e-5, buckets=0, max_distance=0,
        logit_scale=1.0, pruned_heads={}, family=family, embedding_scale=d_model**0.5 if scaled else 1.0,
        pad_token_id=config.pad_token_id, encoder_d_kv=d_model // heads[0],
    )  # fmt: skip


def _array(weight: torch.Tensor) -> np.ndarray:
    import torch

    return weight.detach().to("cpu", torch.float32).numpy()


def _renamed(name: str) -> str:
    """T5's name for a weight.

    >>> _renamed("decoder.layers.3.fc2.bias")
    'decoder.block.3.layer.2.DenseReluDense.wo.bias'
    """
    if found := _LAYER.fullmatch(name):
        stack, layer, part, kind = found.groups()
        if part in _PARTS:
            return f"{stack}.block.{layer}.layer.{_PARTS[part].format(2 if stack == 'decoder' else 1)}.{kind}"
    elif ".layer_norm." in name:
        return name.replace(".layer_norm.", ".final_layer_norm.")
    elif ".layernorm_embedding." in name:
        return name
    raise NotT5Error(f"There is a weight {name}, which no family has: {_ADVICE}")


def source_vocabulary(weights: T5Weights) -> int:
    """How many entries the encoder's embedding has, which may be its own."""
    own: Any = weights.arrays.get("encoder.embed_tokens.weight")
    return weights.dims.vocab_size if own is None else len(own)
