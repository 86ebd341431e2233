"""Weights of an encoder-decoder as a static step multiplies by them: of T5, and of BART and its relatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from t5accel.families.family import Family
from t5accel.t5.rules import logit_scale, relative_position_bucket

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Activation = Callable[[torch.Tensor], torch.Tensor]


class Linear(NamedTuple):
    """Weight (out, in) and bias (out,), ``None`` in a T5."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


class Norm(NamedTuple):
    """Weight and bias (d_model,); without a bias it is an RMS norm."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    epsilon: float

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return functional.rms_norm(hidden, self.weight.shape, self.weight, self.epsilon)
        return functional.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.epsilon)


class Layer(NamedTuple):
    """A layer's weights, one above the other where they read the same input.

    Attributes:
        norms: of self-attention, of cross-attention in a decoder, and of the feed-forward part.
        width: d, of a head.
        qkv: (3 * H * d, d_model).
        biases: (H, distances), what self-attention adds to scores; (1, distances) where that is a mask alone.
        cross_kv: (2 * H * d, d_model); it and the other two are ``None`` in an encoder.
        wi: (d_ff, d_model); in a gated model (2 * d_ff, d_model), the gate first.
    """

    norms: tuple[Norm, ...]
    width: int
    qkv: Linear
    o: Linear
    biases: torch.Tensor
    cross_q: Linear | None
    cross_kv: Linear | None
    cross_o: Linear | None
    wi: Linear
    wo: Linear


@dataclass(frozen=True)
class Stack:
    """An encoder or a decoder.

    Attributes:
        embedding: (V, d_model).
        reach: the distance beyond which `Layer.biases` stay the same, 0 where positions are in a table.
        last_norm: behind the last layer, with the scale of T5's logits in it.
        positions: (positions, d_model), the table; ``first`` is the row of the first token.
        norm_embedding: behind the embedding.
    """

    layers: list[Layer]
    embedding: torch.Tensor
    activation: Activation
    reach: int
    last_norm: Norm | None
    positions: torch.Tensor | None = None
    first: int = 0
    norm_embedding: Norm | None = None


def stacks_of(model: PreTrainedModel, family: Family, *, residual: torch.dtype) -> tuple[Stack, Stack]:
    """Encoder and decoder of a model; norms are in the type of the residual stream.

    >>> from t5accel.families.t5 import T5
    >>> from t5accel.t5.lively import random_t5
    >>> model = random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    >>> encoder, decoder = stacks_of(model, T5, residual=torch.float32)
    >>> decoder.layers[0].qkv.weight.shape, encoder.layers[0].cross_q
    (torch.Size([36, 8]), None)
    """
    if family.is_relative:
        encoder, decoder = _t5(model, model.encoder, residual), _t5(model, model.decoder, residual)
        return encoder, decoder
    encoder, decoder = (_bart(model.config, family, stack, residual)
                        for stack in (model.model.encoder, model.model.decoder))  # fmt: skip
    return encoder, decoder


def lowest_of(dtype: torch.dtype) -> float:
    """Added to a score it makes the softmax ignore the position."""
    return torch.finfo(dtype).min


# T5


def _t5(model: Any, stack: Any, residual: torch.dtype) -> Stack:
    config, layers = model.config, []
    reach, is_decoder = config.relative_attention_max_distance, stack.is_decoder
    dtype, buckets = model.lm_head.weight.dtype, _buckets(config, is_decoder).to(model.lm_head.weight.device)
    table: torch.Tensor | None = None
    for block in stack.block:
        attention, dense = block.layer[0].SelfAttention, block.layer[-1].DenseReluDense
        across = block.layer[1].EncDecAttention if is_decoder else None
        # T5's first layer has the biases of all; in UMT5 and narrow models each layer has its own.
        if hasattr(attention, "relative_attention_bias"):
            table = attention.relative_attention_bias.weight.detach()[buckets].T.to(dtype).contiguous()
            if is_decoder:
                table = _with_future(table)
        gone = getattr(attention, "pruned_heads", ())
        kept = [head for head in range(len(table)) if head not in gone]
        layers.append(Layer(
            norms=tuple(_norm(layer.layer_norm, residual) for layer in block.layer), width=config.d_kv,
            qkv=_joined(attention.q, attention.k, attention.v), o=_joined(attention.o),
            biases=table[kept] if gone else table,
            cross_q=_joined(across.q) if across else None, cross_kv=_joined(across.k, across.v) if across else None,
            cross_o=_joined(across.o) if across else None,
            wi=_joined(dense.wi_0, dense.wi_1) if hasattr(dense, "wi_0") else _joined(dense.wi), wo=_joined(dense.wo),
        ))  # fmt: skip
    last = _norm(stack.final_layer_norm, residual)
    if is_decoder:
        last = last._replace(weight=last.weight * logit_scale(model))
    activation = _activation(stack.block[0].layer[-1].DenseReluDense.act)
    return Stack(layers, stack.embed_tokens.weight.detach(), activation, reach, last)


def _buckets(config: Any, is_decoder: bool) -> torch.Tensor:
    """T5's bucket for each distance that matters: 0 … reach back, or -reach … reach for an encoder."""
    reach = config.relative_attention_max_distance
    distances = -torch.arange(reach + 1) if is_decoder else torch.arange(-reach, reach + 1)
    buckets = relative_position_bucket(
        distances.numpy(), bidirectional=not is_decoder, buckets=config.relative_attention_num_buckets,
        max_distance=reach,
    )  # fmt: skip
    return torch.from_numpy(buckets)


# BART and its relatives


def _bart(config: Any, family: Family, stack: Any, residual: torch.dtype) -> Stack:
    embedding, is_decoder = stack.embed_tokens.weight.detach(), hasattr(stack.layers[0], "encoder_attn")
    biases = torch.zeros((1, 1), dtype=embedding.dtype, device=embedding.device)  # distances add nothing to scores
    if is_decoder:
        biases = _with_future(biases)
    layers = []
    for block in stack.layers:
        attention, across = block.self_attn, block.encoder_attn if is_decoder else None
        names = ("self_attn_layer_norm", *["encoder_attn_layer_norm"][: int(is_decoder)], "final_layer_norm")
        layers.append(Layer(
            norms=tuple(_norm(getattr(block, name), residual) for name in names), width=attention.head_dim,
            qkv=_joined(attention.q_proj, attention.k_proj, attention.v_proj), o=_joined(attention.out_proj),
            biases=biases,
            cross_q=_joined(across.q_proj) if across else None,
            cross_kv=_joined(across.k_proj, across.v_proj) if across else None,
            cross_o=_joined(across.out_proj) if across else None,
            wi=_joined(block.fc1), wo=_joined(block.fc2),
        ))  # fmt: skip
    table = stack.embed_positions
    return Stack(
        layers, embedding, _activation(stack.layers[0].activation_fn), 0,
        last_norm=_norm(stack.layer_norm, residual) if family.norm_first else None,
        positions=getattr(table, "weight", getattr(table, "weights", None)).detach().to(embedding),
        first=family.first_position(config.pad_token_id),
        norm_embedding=_norm(stack.layernorm_embedding, embedding.dtype) if family.norm_embedding else None,
    )  # fmt: skip


# Parts


def _with_future(biases: torch.Tensor) -> torch.Tensor:
    """(H, distances) -> (H, 1 + distances): the first column is the future's."""
    return functional.pad(biases, (1, 0), value=lowest_of(biases.dtype))


def _norm(module: Any, residual: torch.dtype) -> Norm:
    weight, bias = module.weight.detach().to(residual), getattr(module, "bias", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))  # T5's own; torch's
    return Norm(weight, None if bias is None else bias.detach().to(residual), epsilon)


def _joined(*modules: Any) -> Linear:
    """One product in place of several; of a single one the model's own weight."""
    weights, biases = [module.weight.detach() for module in modules], [module.bias for module in modules]
    if len(modules) == 1:
        return Linear(weights[0], None if biases[0] is None else biases[0].detach())
    return Linear(torch.cat(weights), None if biases[0] is None else torch.cat([bias.detach() for bias in biases]))


def _activation(act: Any) -> Activation:
    """A layer's activation; what transformers writes out as eight operators for T5 v1.1 is one in torch."""
    if type(act).__name__ == "NewGELUActivation":
        return lambda x: functional.gelu(x, approximate="tanh")
    return act
