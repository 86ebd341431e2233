"""T5's decoder step in torch on memory that never moves or grows: what a captured CUDA graph can be replayed on.

A graph of the device holds addresses and sizes, so nothing may depend on how long an answer is: keys and values have a
place for every position that there will be, each row knows how many of them are real, and what lies beyond is masked.
Attention reads all places of a `Slot`, real or not. That is the price; the gain is that the host, which takes longer to
ask for a small decoder's kernels than a GPU to run them, asks once for all of a step. (The idea of gpt-fast, PyTorch
team 2023, and of transformers' StaticCache.)

Shapes: B sources, K rows that share one, R = B * K, T new tokens, S source positions, W places for positions, d = d_kv.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from t5accel.checkpoints import T5Dims
from t5accel.graphs.t5_weights import logit_scale, relative_position_bucket

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LONGEST_RUN = 64  # tokens that a slot notes down before the host has to read them

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values


@dataclass
class Slot:
    """Memory for one batch of a given shape, at addresses that stay.

    Attributes:
        cross: for each layer keys and values of the sources, (B, H_i, S, d).
        source_bias: (B, 1, 1, S), 0 where a source has a token.
        own: for each layer keys and values of what was written, (R, H_i, W, d).
        lengths: (R,) int64, how many positions of each row are real.
        token: (R, 1) int64, chosen and not read yet.
        chosen: (R, LONGEST_RUN) int64, the tokens of a run; ``count`` (1,) int64 says how many.
        logits: (R, V) float32, after the last position.
        penalty: (V,) float32, added to logits before the likeliest is taken.
        graph: a captured ``torch.cuda.CUDAGraph`` of `StaticDecoder.advance`, if there is one.
    """

    shape: tuple[int, int, int, int]
    cross: list[Pair]
    source_bias: torch.Tensor
    own: list[Pair]
    lengths: torch.Tensor
    token: torch.Tensor
    chosen: torch.Tensor
    count: torch.Tensor
    logits: torch.Tensor
    penalty: torch.Tensor
    graph: Any = field(default=None, repr=False)

    @property
    def width(self) -> int:
        """W."""
        return self.shape[3]


class StaticDecoder:
    """The decoder of a T5-like model, over the model's own weights; fused copies of a layer's three projections.

    The residual stream is in the weights' type, but for fp16 in fp32: it is what outgrows fp16 in published T5s.

    Args:
        model: a ``T5ForConditionalGeneration`` or its like, on any device, of any type of float.

    >>> from t5accel.lively import random_t5
    >>> model = random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    >>> decoder = StaticDecoder(model)
    >>> slot = decoder.slot(batch=1, rows=1, source=4, width=8)
    >>> decoder.fill(slot, decoder.cross_of(torch.zeros(1, 4, 8)), torch.ones(1, 4))
    >>> decoder.read(slot, torch.tensor([[0, 5]])).shape, slot.lengths.tolist()
    (torch.Size([1, 2, 8]), [2])
    """

    def __init__(self, model: PreTrainedModel):
        self.dims, config = T5Dims.of(model), model.config
        self.head, self.embedding = model.lm_head.weight, model.decoder.embed_tokens.weight
        self.device, self.dtype, self.epsilon = self.head.device, self.head.dtype, config.layer_norm_epsilon
        self.residual = torch.float32 if self.dtype == torch.float16 else self.dtype
        self.lowest = torch.finfo(self.dtype).min  # added to a score it makes the softmax ignore the position
        self.reach = config.relative_attention_max_distance
        distances = torch.arange(self.reach + 1).numpy()
        bucket = torch.from_numpy(
            relative_position_bucket(
                -distances, bidirectional=False, buckets=config.relative_attention_num_buckets, max_distance=self.reach
            )
        )
        self.layers: list[dict[str, Any]] = []
        table: torch.Tensor | None = None
        for block in model.decoder.block:
            own, across, last = block.layer[0], block.layer[1], block.layer[2]
            attention, dense = own.SelfAttention, last.DenseReluDense
            if hasattr(
                attention, "relative_attention_bias"
            ):  # of T5's first layer; of each one in UMT5 and narrow ones
                biases = attention.relative_attention_bias.weight.detach()
                table = biases[bucket.to(self.device)].T.to(self.dtype).contiguous()  # (H, distances)
            gone = getattr(attention, "pruned_heads", ())
            kept = [head for head in range(len(table)) if head not in gone]
            self.layers.append({
                "qkv": torch.cat([getattr(attention, name).weight.detach() for name in "qkv"]),
                "o": attention.o.weight, "table": table[kept] if gone else table,
                "cross_q": across.EncDecAttention.q.weight, "cross_o": across.EncDecAttention.o.weight,
                "cross_kv": (across.EncDecAttention.k.weight, across.EncDecAttention.v.weight), "dense": dense,
                "norms": [layer.layer_norm.weight.detach().to(self.residual) for layer in (own, across, last)],
            })  # fmt: skip
        self.last_norm = model.decoder.final_layer_norm.weight.detach().to(self.residual) * logit_scale(model)

    def slot(self, *, batch: int, rows: int, source: int, width: int) -> Slot:
        """Memory for B, K, S and W; nothing is written yet."""
        options: dict[str, Any] = dict(device=self.device, dtype=self.dtype)
        whole, dims = batch * rows, self.dims

        def pairs(heads: tuple[int, ...], first: int, places: int) -> list[Pair]:
            shapes = [(first, count, places, dims.d_kv) for count in heads]
            return [(torch.zeros(shape, **options), torch.zeros(shape, **options)) for shape in shapes]

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=self.device)

        return Slot(
            (batch, rows, source, width), pairs(dims.cross_heads, batch, source),
            torch.zeros((batch, 1, 1, source), **options), pairs(dims.decoder_heads, whole, width), integers(whole),
            integers(whole, 1), integers(whole, LONGEST_RUN), integers(1),
            *(torch.zeros(shape, dtype=torch.float32, device=self.device)
              for shape in ((whole, dims.vocab_size), (dims.vocab_size,))),
        )  # fmt: skip

    def cross_of(self, encoded: torch.Tensor) -> list[Pair]:
        """The encoder's output (B, S, d_model) -> for each layer keys and values, (B, H_i, S, d)."""
        encoded = encoded.to(self.dtype)
        return [tuple(self._heads(functional.linear(encoded, weight)) for weight in layer["cross_kv"])
                for layer in self.layers]  # fmt: skip

    def fill(self, slot: Slot, cross: list[Pair], mask: torch.Tensor) -> None:
        """Begin anew, on these sources: cross (B, H_i, S', d) and mask (B, S') with S' <= S; the rest is masked."""
        given = mask.shape[1]
        slot.source_bias.fill_(self.lowest)
        slot.source_bias[..., :given] = (1 - mask[:, None, None].to(slot.source_bias)) * self.lowest
        for held, new in zip(slot.cross, cross, strict=True):
            for where, what in zip(held, new, strict=True):
                where[:, :, :given] = what
                where[:, :, given:] = 0
        slot.lengths.zero_()
        slot.count.zero_()

    def read(self, slot: Slot, tokens: torch.Tensor) -> torch.Tensor:
        """Append tokens (R, T) to every row -> what the head reads, (R, T, d_model), normed and scaled.

        The caller sees to it that there is room: no row may get more than W positions.
        """
        batch, rows, _, width = slot.shape
        count = tokens.shape[1]
        positions = slot.lengths[:, None] + torch.arange(count, device=self.device)  # (R, T)
        distance = positions[:, :, None] - torch.arange(width, device=self.device)  # (R, T, W)
        later, index = (distance < 0)[:, None], distance.clamp(0, self.reach)
        where = positions[:, None, :, None]
        hidden = functional.embedding(tokens, self.embedding).to(self.residual)
        biases: dict[int, torch.Tensor] = {}
        for layer, (keys, values), cross in zip(self.layers, slot.own, slot.cross, strict=True):
            table = layer["table"]
            if id(table) not in biases:
                biases[id(table)] = table[:, index].transpose(0, 1).masked_fill(later, self.lowest)  # (R, H, T, W)
            normed = self._norm(hidden, layer["norms"][0])
            query, key, value = (self._heads(x) for x in functional.linear(normed, layer["qkv"]).chunk(3, dim=-1))
            place = where.expand(-1, key.shape[1], -1, key.shape[3])
            keys.scatter_(2, place, key)
            values.scatter_(2, place, value)
            attended = self._attend(query, keys, values, biases[id(table)])
            hidden = hidden + functional.linear(attended, layer["o"])
            # Rows of one source fold into the axis of queries: nothing of the source is copied for each row.
            query = functional.linear(self._norm(hidden, layer["norms"][1]), layer["cross_q"])
            query = self._heads(query.view(batch, rows * count, -1))
            attended = self._attend(query, *cross, slot.source_bias)
            hidden = hidden + functional.linear(attended, layer["cross_o"]).view(hidden.shape)
            hidden = hidden + self._feed_forward(layer["dense"], self._norm(hidden, layer["norms"][2]))
        slot.lengths += count
        return self._norm(hidden, self.last_norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(…, d_model) -> (…, V) float32."""
        return functional.linear(hidden, self.head).float()

    def choose(self, slot: Slot, hidden: torch.Tensor) -> None:
        """The likeliest token after the last of (R, T, d_model) becomes the slot's ``token``, and is noted down."""
        slot.logits.copy_(functional.linear(hidden[:, -1], self.head))
        token = (slot.logits + slot.penalty).argmax(dim=-1, keepdim=True)
        slot.token.copy_(token)
        slot.chosen.scatter_(1, slot.count.expand(len(token), 1), token)
        slot.count += 1

    def advance(self, slot: Slot) -> None:
        """One greedy step: read the slot's token, choose the next. Touches nothing but the slot."""
        self.choose(slot, self.read(slot, slot.token))

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self.epsilon).to(self.dtype)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """(N, n, H * d) -> (N, H, n, d)."""
        return x.unflatten(-1, (-1, self.dims.d_kv)).transpose(1, 2)

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor) -> Any:
        """(N, H, n, d) -> (N, n, H * d). T5 does not divide scores by the root of d."""
        attended = functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=1.0)
        return attended.transpose(1, 2).flatten(2)

    def _feed_forward(self, dense: Any, normed: torch.Tensor) -> torch.Tensor:
        """transformers keeps ``wo`` in fp32 where the model is in fp16."""
        if hasattr(dense, "wi_0"):
            inner = dense.act(dense.wi_0(normed)) * dense.wi_1(normed)
        else:
            inner = dense.act(dense.wi(normed))
        return dense.wo(inner.to(dense.wo.weight.dtype)).to(self.residual)
