"""What the graphs are built from: a checkpoint's weights as numpy arrays, its sizes and what else shapes a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from t5accel.errors import InputError, NotT5Error
from t5accel.models.families import Family
from t5accel.models.registry import dims_of
from t5accel.models.sizes import T5Dims
from t5accel.models.t5 import T5

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class T5Weights:
    """What the graphs are built from. Models of other families are here under T5's names (`export.weights`).

    Attributes:
        arrays: by transformers' names (``decoder.block.0.layer.1.EncDecAttention.q.weight`` …), fp32.
        dims: the sizes.
        activation: ``"relu"``, ``"gelu_new"``, ``"gelu"`` or ``"silu"``.
        norm_epsilon: of every layer norm.
        buckets, max_distance: of the relative position biases.
        logit_scale: what the decoder's output is multiplied by before the head.
        pruned_heads: for decoder and encoder layers that lost heads, which: ``{"decoder.0": (1, 5)}``.
        family: how the weights are put together.
        embedding_scale: of the embedded tokens, before their positions are added.
        pad_token_id: the token that has no position, where the family says so.
        encoder_d_kv: where it is another than the decoder's.
        read: names of the arrays that a graph was built from so far.
    """

    arrays: Mapping[str, np.ndarray]
    dims: T5Dims
    activation: str
    norm_epsilon: float
    buckets: int
    max_distance: int
    logit_scale: float
    pruned_heads: Mapping[str, tuple[int, ...]]
    family: Family = T5
    embedding_scale: float = 1.0
    pad_token_id: int = 0
    encoder_d_kv: int | None = None
    read: set[str] = field(default_factory=set, compare=False)

    @property
    def head(self) -> str:
        """The name of the output head's weight (V, d_model), which is the embedding where the two are tied."""
        return "shared.weight" if self.dims.tied else "lm_head.weight"

    @property
    def head_bias(self) -> str | None:
        """The name of what is added to the logits (V,), if anything is."""
        return "final_logits_bias" if "final_logits_bias" in self.arrays else None

    def array(self, name: str) -> np.ndarray:
        """The weight of that name; raises ``NotT5Error`` if the model lacks it.

        >>> dims = T5Dims(300, 8, 6, (2,), (2,), (2,), (16,), (16,), gated=False, tied=True)
        >>> arrays = {"shared.weight": np.zeros((300, 8), dtype=np.float32)}
        >>> T5Weights(arrays, dims, "relu", 1e-6, 32, 128, 1.0, {}).array("shared.weight").shape
        (300, 8)
        """
        if name not in self.arrays:
            raise NotT5Error(
                f"There is no weight {name}: unwrap the model, merge its adapters, or load it without quantisation."
            )
        self.read.add(name)
        return self.arrays[name]

    def require_all_read(self) -> None:
        """Raise ``NotT5Error`` if there are weights that no graph was built from.

        >>> dims = T5Dims(300, 8, 6, (2,), (2,), (2,), (16,), (16,), gated=False, tied=True)
        >>> T5Weights({"lm_head.bias": np.zeros(300)}, dims, "relu", 1e-6, 32, 128, 1.0, {}).require_all_read()
        Traceback (most recent call last):
        t5accel.errors.NotT5Error: The model computes with lm_head.bias, which this architecture does not have: ...
        """
        if unread := sorted(self.arrays.keys() - self.read):
            more = f" and {len(unread) - 1} more weights" if len(unread) > 1 else ""
            raise NotT5Error(
                f"The model computes with {unread[0]}{more}, which this architecture does not have: merge adapters "
                "into the model, or remove them, first."
            )

    def bias(self, weight: str) -> str | None:
        """The name of the bias that belongs to a weight, if there is one."""
        name = f"{weight.removesuffix('weight')}bias"
        return name if name in self.arrays else None

    def d_kv(self, weight: str) -> int:
        """The width of the heads that this weight projects to."""
        own = self.encoder_d_kv if weight.startswith("encoder.") else None
        return own or self.dims.d_kv


# The weights of BART and its relatives under T5's names, so that one builder, and every recipe, serves them all.


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
