"""The builder's input: a checkpoint's weights as numpy arrays, its sizes and constants."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from t5accel.errors import InputError, NotT5Error
from t5accel.models.families import T5, Family, dims_of, norms, position_table
from t5accel.models.sizes import T5Dims

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class T5Weights:
    """A model's weights by T5's names, whatever its family, and the constants of its graphs."""

    layers: ClassVar[Any] = None  # the class that builds its graphs, if it is not `layers.T5Layers`
    arrays: Mapping[str, np.ndarray]  # fp32, by name ("decoder.block.0.layer.1.EncDecAttention.q.weight")
    dims: T5Dims
    activation: str  # "relu", "gelu_new", "gelu", "silu" or "swish"
    norm_epsilon: float
    buckets: int = 0  # of relative positions
    max_distance: int = 0
    logit_scale: float = 1.0  # of the decoder's output, before the head
    pruned_heads: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # removed by layer: {"decoder.0": (1, 5)}
    family: Family = T5
    embedding_scale: float = 1.0
    pad_token_id: int = 0  # without a position, where the family says so
    encoder_d_kv: int | None = None  # where it differs from the decoder's
    read: set[str] = field(default_factory=set, compare=False)  # names of arrays that a graph was built from

    @property
    def head(self) -> str:
        """The name of the output head's weight (V, d_model), the embedding where they are tied."""
        return "shared.weight" if self.dims.tied else "lm_head.weight"

    @property
    def head_bias(self) -> str | None:
        """The name of the logits' bias (V,), if there is one."""
        return "final_logits_bias" if "final_logits_bias" in self.arrays else None

    def array(self, name: str) -> np.ndarray:
        """The weight of that name; raises ``NotT5Error`` if the model lacks it."""
        if name not in self.arrays:
            raise NotT5Error(
                f"The model must have the weight {name or 'of biases by distance in layer 0'}: unwrap the model, "
                "merge its adapters, or load it without quantisation."
            )
        self.read.add(name)
        return self.arrays[name]

    def require_all_read(self) -> None:
        """Raise ``NotT5Error`` for weights that no graph was built from."""
        if unread := sorted(self.arrays.keys() - self.read):
            more = f" and {len(unread) - 1} more weights" if len(unread) > 1 else ""
            raise NotT5Error(
                f"The model computes with {unread[0]}{more}, which this architecture does not have: merge adapters "
                "into the model, or remove them, first."
            )

    def bias(self, weight: str) -> str | None:
        """The name of a weight's bias, if there is one."""
        name = f"{weight.removesuffix('weight')}bias"
        return name if name in self.arrays else None

    def d_kv(self, weight: str) -> int:
        """The width of a head of this weight's stack."""
        own = self.encoder_d_kv if weight.startswith("encoder.") else None
        return own or self.dims.d_kv

    @property
    def source_vocab_size(self) -> int:
        """Entries of the encoder's embedding, which may be its own."""
        return len(self.arrays.get("encoder.embed_tokens.weight", range(self.dims.vocab_size)))


ADVICE = "unwrap the model, merge adapters first."
_TABLES = re.compile(r"shared\.weight|(en|de)coder\.embed_(tokens|positions)\.weights?")  # read apart
_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(.+)\.(weight|bias)")
# T5's names of a BART-like layer's weights; {} is the number of its feed-forward part, behind one or two attentions.
_PARTS = {
    f"{theirs}.{part}_proj": f"{ours}.{part[0]}"
    for theirs, ours in (("self_attn", "0.SelfAttention"), ("encoder_attn", "1.EncDecAttention"))
    for part in ("q", "k", "v", "out")
} | {
    "self_attn_layer_norm": "0.layer_norm",
    "encoder_attn_layer_norm": "1.layer_norm",
    "fc1": "{}.DenseReluDense.wi",
    "fc2": "{}.DenseReluDense.wo",
    "final_layer_norm": "{}.layer_norm",
}


def bart_like_weights(model: PreTrainedModel, family: Family) -> T5Weights:
    """The weights of BART or a relative under T5's names, so that one builder and every recipe serve it.

    Arrays share memory with the model where they can. Raises ``NotT5Error`` for weights that the family lacks.
    """
    require_values(model)
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    outside = {name for name in names if not name.startswith("model.")} - {"lm_head.weight", "final_logits_bias"}
    if outside:
        raise NotT5Error(f"There is a weight {min(outside)}, which no family has: {ADVICE}")
    config, inner = model.config, model.model
    encoder_table, decoder_table = inner.encoder.embed_tokens.weight, inner.decoder.embed_tokens.weight
    arrays = {"shared.weight": as_array(decoder_table)}
    if encoder_table is not decoder_table:
        arrays["encoder.embed_tokens.weight"] = as_array(encoder_table)
    dims = dims_of(model, family)
    if not dims.tied:
        arrays["lm_head.weight"] = as_array(model.lm_head.weight, "lm_head.weight")
    for name, weight in (*inner.named_parameters(remove_duplicate=False), *inner.named_buffers()):
        if not _TABLES.fullmatch(name):
            arrays[_renamed(name)] = as_array(weight, name)
    for stack in ("encoder", "decoder"):
        arrays[f"{stack}.embed_positions.weight"] = as_array(position_table(getattr(inner, stack)))
    logits_bias = getattr(model, "final_logits_bias", None)
    if family.head_bias and logits_bias is not None and logits_bias.any():
        arrays["final_logits_bias"] = as_array(logits_bias).reshape(-1)
    if not family.biases:
        arrays = {name: array for name, array in arrays.items() if not name.endswith(".bias") or "norm" in name}
    d_model = config.d_model
    encoder_heads, decoder_heads = config.encoder_attention_heads, config.decoder_attention_heads
    if family.has_scaled_attention:  # 1 / sqrt(d) goes into the weights and biases of the queries
        for name in [name for name in arrays if ".q." in name]:
            width = d_model // (decoder_heads if name.startswith("decoder.") else encoder_heads)
            arrays[name] = arrays[name] * np.float32(width**-0.5)
    return T5Weights(
        arrays=arrays,
        dims=dims,
        activation=config.activation_function,
        norm_epsilon=_norm_epsilon(inner),
        family=family,
        embedding_scale=d_model**0.5 if family.scales_embedding and config.scale_embedding else 1.0,
        pad_token_id=config.pad_token_id,
        encoder_d_kv=d_model // encoder_heads,
    )


def _norm_epsilon(model: Any) -> float:
    epsilons = {getattr(norm, "eps", None) for norm in norms(model)}
    if len(epsilons) != 1:
        raise NotT5Error(f"All norms must have the same eps, got {', '.join(sorted(map(str, epsilons)))}.")
    return epsilons.pop()


def require_values(model: PreTrainedModel) -> None:
    """Raise ``InputError`` for weights on torch's meta device."""
    if any(weight.is_meta for weight in model.parameters()):
        raise InputError("The model's weights are on torch's meta device, where they have no values: load them first.")


def as_array(weight: torch.Tensor, name: str = "A weight") -> np.ndarray:
    """A weight as fp32 numpy array, which shares memory with it where it can; ``NotT5Error`` if it is no float."""
    import torch

    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():  # a quantised layer's is a method
        kind = getattr(weight, "dtype", type(weight).__name__)
        raise NotT5Error(f"{name} must be in floating point, got {kind}: load the model without quantisation.")
    return weight.detach().to("cpu", torch.float32).numpy()


def _renamed(name: str) -> str:
    """T5's name for a weight: ``decoder.layers.3.fc2.bias`` -> ``decoder.block.3.layer.2.DenseReluDense.wo.bias``."""
    if found := _LAYER.fullmatch(name):
        stack, layer, part, kind = found.groups()
        if part in _PARTS:
            return f"{stack}.block.{layer}.layer.{_PARTS[part].format(2 if stack == 'decoder' else 1)}.{kind}"
    elif ".layer_norm." in name:
        return name.replace(".layer_norm.", ".final_layer_norm.")
    elif ".layernorm_embedding." in name:
        return name
    raise NotT5Error(f"There is a weight {name}, which no family has: {ADVICE}")
