"""Encoders and decoder steps in torch on static buffers, by as few operators as possible.

Shapes: as in `torch_static_buffers`, and T new tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from t5accel.backends.torch_static_buffers import MAX_QUEUED_STEPS, KVCache, StaticBuffers
from t5accel.errors import NotT5Error
from t5accel.models.families import Family, dims_of, family_of_model, position_table
from t5accel.models.t5_math import logit_scale, relative_position_bucket

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Activation = Callable[[torch.Tensor], torch.Tensor]


# Weights


class Linear(NamedTuple):
    """A linear layer's weights."""

    weight: torch.Tensor  # (out, in)
    bias: torch.Tensor | None = None  # (out,), None in a T5


class Norm(NamedTuple):
    """A layer norm, or without a bias an RMS norm."""

    weight: torch.Tensor  # (d_model,)
    bias: torch.Tensor | None
    epsilon: float

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return functional.rms_norm(hidden, self.weight.shape, self.weight, self.epsilon)
        return functional.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.epsilon)


class Layer(NamedTuple):
    """One layer's weights, joined where they read the same input."""

    norms: tuple[Norm, ...]  # of self-attention, of a decoder's cross-attention, and of the feed-forward part
    width: int  # d, of a head
    qkv: Linear  # (3 * H * d, d_model)
    o: Linear
    biases: torch.Tensor  # (H, distances), added to self-attention's scores; (1, distances) if it is a mask alone
    wi: Linear  # (d_ff, d_model), or in a gated model (2 * d_ff, d_model) with the gate first
    wo: Linear
    cross_q: Linear | None = None
    cross_kv: Linear | None = None  # (2 * H * d, d_model)
    cross_o: Linear | None = None


@dataclass(frozen=True)
class Stack:
    """An encoder or a decoder."""

    layers: list[Layer]
    embedding: torch.Tensor  # (V, d_model)
    activation: Activation
    max_distance: int  # beyond which `Layer.biases` stay constant; 0 where positions are in a table
    last_norm: Norm | None  # with the scale of T5's logits in it
    positions: torch.Tensor | None = None  # the table (positions, d_model)
    first: int = 0  # the row of the first token in that table
    norm_embedding: Norm | None = None


def _t5_stack(model: Any, stack: Any, residual: torch.dtype) -> Stack:
    config, is_decoder = model.config, stack.is_decoder
    dtype, device = model.lm_head.weight.dtype, model.lm_head.weight.device
    max_distance = config.relative_attention_max_distance
    distances = -np.arange(max_distance + 1) if is_decoder else np.arange(-max_distance, max_distance + 1)
    numbers = dict(buckets=config.relative_attention_num_buckets, max_distance=max_distance)
    buckets = relative_position_bucket(distances, bidirectional=not is_decoder, **numbers)
    layers, projections = [], attrgetter("q", "k", "v", "o")
    biases: torch.Tensor | None = None
    for block in stack.block:
        attention, dense = block.layer[0].SelfAttention, block.layer[-1].DenseReluDense
        # T5's first layer has the biases of all; in UMT5 and narrow models each layer has its own.
        if hasattr(attention, "relative_attention_bias"):
            table = attention.relative_attention_bias.weight.detach()
            biases = table[torch.from_numpy(buckets).to(device)].T.to(dtype).contiguous()
            if is_decoder:
                biases = _with_future(biases)
        gone = getattr(attention, "pruned_heads", ())
        layers.append(
            _layer(
                norms=[_norm(layer.layer_norm, residual) for layer in block.layer],
                width=config.d_kv,
                attention=projections(attention),
                biases=biases[[head for head in range(len(biases)) if head not in gone]] if gone else biases,
                cross=projections(block.layer[1].EncDecAttention) if is_decoder else None,
                wi=[dense.wi_0, dense.wi_1] if hasattr(dense, "wi_0") else [dense.wi],
                wo=dense.wo,
            )
        )
    last_norm = _norm(stack.final_layer_norm, residual)
    if is_decoder:
        last_norm = last_norm._replace(weight=last_norm.weight * logit_scale(model))
    activation = _activation(stack.block[0].layer[-1].DenseReluDense.act)
    return Stack(layers, stack.embed_tokens.weight.detach(), activation, max_distance, last_norm)


def _bart_stack(config: Any, family: Family, stack: Any, residual: torch.dtype) -> Stack:
    embedding, is_decoder = stack.embed_tokens.weight.detach(), hasattr(stack.layers[0], "encoder_attn")
    biases = torch.zeros((1, 1), dtype=embedding.dtype, device=embedding.device)  # distances add nothing to scores
    if is_decoder:
        biases = _with_future(biases)
    layers, projections = [], attrgetter("q_proj", "k_proj", "v_proj", "out_proj")
    for block in stack.layers:
        norms = [block.self_attn_layer_norm, block.final_layer_norm]
        if is_decoder:
            norms.insert(1, block.encoder_attn_layer_norm)
        layers.append(
            _layer(
                norms=[_norm(norm, residual) for norm in norms],
                width=block.self_attn.head_dim,
                attention=projections(block.self_attn),
                biases=biases,
                cross=projections(block.encoder_attn) if is_decoder else None,
                wi=[block.fc1],
                wo=block.fc2,
            )
        )
    return Stack(
        layers,
        embedding,
        _activation(stack.layers[0].activation_fn),
        max_distance=0,
        last_norm=_norm(stack.layer_norm, residual) if family.norm_first else None,
        positions=position_table(stack).detach().to(embedding),
        first=family.first_position(config.pad_token_id),
        norm_embedding=_norm(stack.layernorm_embedding, embedding.dtype) if family.norm_embedding else None,
    )


def _layer(
    norms: list[Norm], width: int, attention: tuple[Any, ...], biases: Any, cross: Any, wi: list[Any], wo: Any
) -> Layer:
    """A layer from transformers' modules; ``attention`` and ``cross`` are their q, k, v and o."""
    q, k, v, o = attention
    layer = Layer(tuple(norms), width, _join(q, k, v), _join(o), biases, _join(*wi), _join(wo))
    if cross is None:
        return layer
    q, k, v, o = cross
    return layer._replace(cross_q=_join(q), cross_kv=_join(k, v), cross_o=_join(o))


def _with_future(biases: torch.Tensor) -> torch.Tensor:
    """(H, distances) -> (H, 1 + distances): the first column is the future's."""
    return functional.pad(biases, (1, 0), value=torch.finfo(biases.dtype).min)


def _norm(module: Any, residual: torch.dtype) -> Norm:
    weight, bias = module.weight.detach().to(residual), getattr(module, "bias", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))  # T5's own; torch's
    return Norm(weight, None if bias is None else bias.detach().to(residual), epsilon)


def _join(*modules: Any) -> Linear:
    """One product in place of several; of a single one the model's own weight."""
    weights, biases = [module.weight.detach() for module in modules], [module.bias for module in modules]
    if len(modules) == 1:
        return Linear(weights[0], None if biases[0] is None else biases[0].detach())
    return Linear(torch.cat(weights), None if biases[0] is None else torch.cat([bias.detach() for bias in biases]))


def _activation(act: Any) -> Activation:
    """What transformers writes out as eight operators for T5 v1.1 is one in torch."""
    if type(act).__name__ == "NewGELUActivation":
        return lambda x: functional.gelu(x, approximate="tanh")
    return act


# The model


class StaticT5:
    """The encoder and the decoder step of a T5, a BART or a relative, over its own weights and joined copies of some.

    The residual stream has the weights' type, but fp32 if that is fp16, which it outgrows in published T5s. A switch of
    `Family` that T5 lacks adds no operator to T5's step.

    >>> from t5accel.models.random_init import random_t5
    >>> model = random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    >>> t5, mask = StaticT5(model), torch.ones(1, 4, dtype=torch.int64)
    >>> buffers = t5.new_buffers(batch=1, rows=1, source=4, width=8)
    >>> t5.fill(buffers, t5.encode(torch.tensor([[5, 6, 7, 1]]), mask), mask)
    >>> t5.read(buffers, torch.tensor([[0, 5]])).shape, buffers.lengths.tolist()
    (torch.Size([1, 2, 8]), [2])
    """

    def __init__(self, model: PreTrainedModel):
        self.family, self.config = family_of_model(model), model.config
        if self.family.is_gemma:
            raise NotT5Error(f"TorchStatic runs no {self.family.model_type}: give accelerate() device='cpu'.")
        self.dims = dims_of(model, self.family)
        self.head, bias = model.lm_head.weight.detach(), getattr(model, "final_logits_bias", None)
        self.device, self.dtype = self.head.device, self.head.dtype
        has_bias = self.family.head_bias and bias is not None and bias.any()
        self.head_bias = bias.detach().reshape(-1).to(self.dtype) if has_bias else None
        self.residual = torch.float32 if self.dtype == torch.float16 else self.dtype
        self.lowest = torch.finfo(self.dtype).min  # added to a score: the softmax ignores that position
        if self.family.is_relative:
            self.encoder = _t5_stack(model, model.encoder, self.residual)
            self.decoder = _t5_stack(model, model.decoder, self.residual)
        else:
            self.encoder = _bart_stack(self.config, self.family, model.model.encoder, self.residual)
            self.decoder = _bart_stack(self.config, self.family, model.model.decoder, self.residual)
        scaled = self.family.scales_embedding and self.config.scale_embedding
        self.embedding_scale = self.dims.d_model**0.5 if scaled else 1.0

    def cross_memory(self, batch: int, source: int) -> KVCache:
        """A cross-attention cache for B sources of S positions."""
        return KVCache(self.dims.cross_heads, batch, source, self.dims.d_kv, device=self.device, dtype=self.dtype)

    def new_buffers(self, *, batch: int, rows: int, source: int, width: int) -> StaticBuffers:
        """Zeroed buffers for B, K, S and W."""
        whole, dims = batch * rows, self.dims
        in_dtype: dict[str, Any] = dict(device=self.device, dtype=self.dtype)
        floats: dict[str, Any] = dict(device=self.device, dtype=torch.float32)
        integers: dict[str, Any] = dict(device=self.device, dtype=torch.int64)
        return StaticBuffers(
            shape=(batch, rows, source, width),
            cross_kv=self.cross_memory(batch, source),
            source_bias=torch.zeros((batch, 1, 1, source), **in_dtype),
            self_kv=KVCache(dims.decoder_heads, whole, width, dims.d_kv, **in_dtype),
            offsets=torch.arange(width, device=self.device) - 1,
            lengths=torch.zeros(whole, **integers),
            token=torch.zeros((whole, 1), **integers),
            generated=torch.zeros((whole, MAX_QUEUED_STEPS), **integers),
            count=torch.zeros(1, **integers),
            logits=torch.zeros((whole, dims.vocab_size), **floats),
            logit_bias=torch.zeros(dims.vocab_size, **floats),
        )

    def fill(self, buffers: StaticBuffers, cross_kv: KVCache, mask: torch.Tensor) -> None:
        """Start on new sources: ``cross_kv`` for (B, S') and ``mask`` (B, S') with S' <= S; the rest is masked."""
        buffers.cross_kv.copy_(cross_kv)
        buffers.self_kv.memory.zero_()  # a text before may have left NaN, which no mask hides
        buffers.source_bias.fill_(self.lowest)
        buffers.source_bias[..., : mask.shape[1]] = (1 - mask[:, None, None].to(buffers.source_bias)) * self.lowest
        buffers.lengths.zero_()
        buffers.count.zero_()

    def encode(self, ids: torch.Tensor, mask: torch.Tensor, into: KVCache | None = None) -> KVCache:
        """Tokens and mask (B, S) -> the cross-attention cache, in ``into`` or in new memory."""
        into = self.cross_memory(*ids.shape) if into is None else into
        places, max_distance = torch.arange(ids.shape[1], device=self.device), self.encoder.max_distance
        index = (places - places[:, None]).clamp_(-max_distance, max_distance) + max_distance  # (S, S)
        hidden = self._embed(self.encoder, ids, places.expand(ids.shape), whole=True)
        real, biases = mask[:, None, None].bool(), {}
        for layer in self.encoder.layers:
            if id(layer.biases) not in biases:
                biases[id(layer.biases)] = torch.where(real, layer.biases[:, index], self.lowest)  # (B, H or 1, S, S)
            query, key, value = self._project(self._before(hidden, layer.norms[0]), layer.qkv, 3, layer.width)
            attended = self._attend(query, key, value, biases[id(layer.biases)])
            hidden = self._after(hidden, attended, layer.o, layer.norms[0])
            hidden = self._feed_forward(hidden, layer)
        encoded = self._before(hidden, self.encoder.last_norm)
        for layer, place in zip(self.decoder.layers, into.layers, strict=True):
            place.copy_(self._project(encoded, layer.cross_kv, 2, layer.width))
        return into

    def read(self, buffers: StaticBuffers, tokens: torch.Tensor) -> torch.Tensor:
        """Append tokens (R, T) to every row -> the head's input (R, T, d_model), normed and scaled.

        The caller makes sure that no row gets more than W positions.
        """
        batch, rows, _, _ = buffers.shape
        count = tokens.shape[1]
        positions = buffers.lengths[:, None]  # (R, T)
        if count > 1:
            positions = positions + torch.arange(count, device=self.device)
        # (R, T, W), 0 in the future
        index = (positions[:, :, None] - buffers.offsets).clamp_(0, self.decoder.max_distance + 1)
        where = positions[None, :, None, :, None]
        hidden = self._embed(self.decoder, tokens, positions)
        biases: dict[int, torch.Tensor] = {}
        caches = zip(self.decoder.layers, buffers.self_kv.layers, buffers.cross_kv.layers, strict=True)
        for layer, self_kv, cross_kv in caches:
            if id(layer.biases) not in biases:
                biases[id(layer.biases)] = layer.biases[:, index].transpose(0, 1)  # (R, H or 1, T, W)
            projected = self._project(self._before(hidden, layer.norms[0]), layer.qkv, 3, layer.width)
            new = projected[1:]  # of (3, R, H, T, d)
            # Keys and values in one operator.
            self_kv.scatter_(3, where.expand(new.shape), new)
            attended = self._attend(projected[0], *self_kv, biases[id(layer.biases)])
            hidden = self._after(hidden, attended, layer.o, layer.norms[0])
            # Rows of one source fold into the axis of queries: nothing of the source is copied for each row.
            folded = self._before(hidden, layer.norms[1]).view(batch, rows * count, -1)
            (query,) = self._project(folded, layer.cross_q, 1, layer.width)
            attended = self._attend(query, *cross_kv, buffers.source_bias)
            hidden = self._after(hidden, attended, layer.cross_o, layer.norms[1])
            hidden = self._feed_forward(hidden, layer)
        buffers.lengths.add_(count)
        return self._before(hidden, self.decoder.last_norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(…, d_model) -> (…, V) float32."""
        return functional.linear(hidden, self.head, self.head_bias).float()

    def choose(self, buffers: StaticBuffers, hidden: torch.Tensor) -> None:
        """Append the likeliest token after the last of (R, T, d_model)."""
        buffers.logits.copy_(functional.linear(hidden[:, -1], self.head, self.head_bias))
        buffers.append((buffers.logits + buffers.logit_bias).argmax(dim=-1, keepdim=True))

    def advance(self, buffers: StaticBuffers) -> None:
        """One greedy step: read the token, choose the next. Touches nothing but the buffers."""
        self.choose(buffers, self.read(buffers, buffers.token))

    def _embed(self, stack: Stack, tokens: torch.Tensor, places: torch.Tensor, *, whole: bool = False) -> Any:
        """Tokens and their places in the text, counted from 0, (N, n) -> the residual stream (N, n, d_model).

        ``whole`` texts are counted here if a family gives padding no position.
        """
        hidden = functional.embedding(tokens, stack.embedding)
        if stack.positions is not None:
            if self.family.positions_skip_padding and whole:
                places = (tokens != self.config.pad_token_id).cumsum(1) - 1
            # Beyond the table are only the places of a bucket that no token has, and rows that have ended.
            numbers = (places + stack.first).clamp_(max=len(stack.positions) - 1)
            if self.family.positions_skip_padding:
                numbers = numbers.masked_fill(tokens == self.config.pad_token_id, self.config.pad_token_id)
            hidden = torch.add(functional.embedding(numbers, stack.positions), hidden, alpha=self.embedding_scale)
            if stack.norm_embedding is not None:
                hidden = stack.norm_embedding(hidden)
        return hidden.to(self.residual)

    def _before(self, hidden: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """A part's input: the normed stream, or where norms stand behind the parts, the stream itself."""
        return (norm(hidden) if self.family.norm_first else hidden).to(self.dtype)

    def _after(self, hidden: torch.Tensor, x: torch.Tensor, linear: Linear, norm: Norm) -> torch.Tensor:
        """The stream behind a part. It may be written to in place: ``hidden += x @ weight.T``."""
        rows, x = hidden.view(-1, hidden.shape[-1]), x.reshape(-1, x.shape[-1]).to(linear.weight.dtype)
        if rows.dtype == linear.weight.dtype and linear.bias is None:
            rows.addmm_(x, linear.weight.T)  # one operator
        else:
            rows.add_(functional.linear(x, *linear))
        return hidden if self.family.norm_first else norm(hidden)

    def _project(self, normed: torch.Tensor, linear: Linear, parts: int, width: int) -> torch.Tensor:
        """(N, n, d_model) by weights (parts * H * d, d_model) -> (parts, N, H, n, d), a view of one product."""
        joined = functional.linear(normed, *linear)
        return joined.unflatten(-1, (parts, -1, width)).permute(2, 0, 3, 1, 4)

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor) -> Any:
        """(N, H, n, d) -> (N, n, H * d). T5 does not divide scores by the root of d."""
        scale = query.shape[-1] ** -0.5 if self.family.has_scaled_attention else 1.0
        attended = functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scale)
        return attended.transpose(1, 2).flatten(2)

    def _feed_forward(self, hidden: torch.Tensor, layer: Layer) -> torch.Tensor:
        inner = functional.linear(self._before(hidden, layer.norms[-1]), *layer.wi)
        if self.dims.gated:
            gate, inner = inner.chunk(2, dim=-1)
            inner = self.decoder.activation(gate) * inner
        else:
            inner = self.decoder.activation(inner)  # the encoder's, too
        # `_after` takes wo's own type: transformers keeps it in fp32 where the model is in fp16.
        return self._after(hidden, inner, layer.wo, layer.norms[-1])
