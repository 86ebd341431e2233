"""Encoder-decoders in torch on memory that never moves or grows: what captured CUDA graphs can be replayed on.

A graph of the device holds addresses and sizes, so nothing may depend on how long an answer is: keys and values have a
place for every position that there will be, each row knows how many of them are real, and what lies beyond is masked.
Attention reads all places of a `Slot`, real or not. That is the price; the gain is that the host, which takes longer to
ask for a small decoder's kernels than a GPU to run them, asks once for all of a step. (The idea of gpt-fast, PyTorch
team 2023, and of transformers' StaticCache.)

A step also asks for as little as it can: projections that read the same input are one product, keys and values are
written together, residuals are added inside the product, and a table of biases knows what lies in the future. Families
differ by the switches of `families.family.Family`; a switch that T5 lacks adds no operator to T5's step.

Shapes: B sources, K rows that share one, R = B * K, T new tokens, S source positions, W places for positions, d = d_kv.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from t5accel.backends.static_layers import Layer, Linear, Norm, Stack, lowest_of, stacks_of
from t5accel.families.registry import dims_of, family_of_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LONGEST_RUN = 64  # tokens that a slot notes down before the host has to read them


class KeysAndValues:
    """Keys and values of every layer in one piece of memory, so that one operator copies them all.

    Args:
        heads: H_i of each layer.
        rows, places, width: N, P and d.
        memory: (numel,) to lie in; by default new, of zeros. ``options`` are its device and dtype.

    Attributes:
        memory: all of it, flat.
        layers: for each layer a view (2, N, H_i, P, d): keys first.
    """

    def __init__(
        self, heads: Sequence[int], rows: int, places: int, width: int, *, memory: torch.Tensor | None = None,
        **options: Any,
    ):  # fmt: skip
        self._sizes = (tuple(heads), rows, places, width)
        counts = [2 * rows * count * places * width for count in heads]
        self.memory = torch.zeros(sum(counts), **options) if memory is None else memory
        shapes = [(2, rows, count, places, width) for count in heads]
        self.layers = [part.view(shape) for part, shape in zip(self.memory.split(counts), shapes, strict=True)]

    def clone(self) -> KeysAndValues:
        """The same elsewhere."""
        return KeysAndValues(*self._sizes, memory=self.memory.clone())

    def copy_(self, other: KeysAndValues) -> None:
        """Take over the other's first places; places beyond them become zero."""
        if self._sizes == other._sizes:
            self.memory.copy_(other.memory)
            return
        for held, new in zip(self.layers, other.layers, strict=True):
            held[:, :, :, : new.shape[3]] = new
            held[:, :, :, new.shape[3] :] = 0

    def gather_(self, other: KeysAndValues, index: torch.Tensor) -> None:
        """Row i takes over row ``index[i]`` of the other, which may be this one, into its first places."""
        if self._sizes == other._sizes and len({*self._sizes[0]}) == 1:  # as one operator
            together = self.layers[0].shape[1:]
            self.memory.view(-1, *together).copy_(other.memory.view(-1, *together).index_select(1, index))
            return
        for held, given in zip(self.layers, other.layers, strict=True):
            held[:, :, :, : given.shape[3]] = given.index_select(1, index)

    def rows(self, index: torch.Tensor) -> KeysAndValues:
        """Only those rows, in new memory."""
        heads, _, places, width = self._sizes
        parts = [layer.index_select(1, index).flatten() for layer in self.layers]
        return KeysAndValues(heads, len(index), places, width, memory=torch.cat(parts))


@dataclass
class Slot:
    """Memory for one batch of a given shape, at addresses that stay.

    Attributes:
        shape: (B, K, S, W).
        cross: of the sources; N = B, P = S.
        source_bias: (B, 1, 1, S), 0 where a source has a token.
        own: of what was written; N = R, P = W.
        before: (W,) int64, each place less one: a position minus this is its distance to the place, plus one.
        lengths: (R,) int64, how many positions of each row are real.
        token: (R, 1) int64, chosen and not read yet.
        chosen: (R, LONGEST_RUN) int64, the tokens of a run; ``count`` (1,) int64 says how many.
        logits: (R, V) float32, after the last position.
        penalty: (V,) float32, added to logits before the likeliest is taken.
        graph: a captured ``torch.cuda.CUDAGraph`` of `StaticT5.advance`, if there is one.
        loops: other steps on this memory, by what they are like (`torch_static_beams.Loop`).
    """

    shape: tuple[int, int, int, int]
    cross: KeysAndValues
    source_bias: torch.Tensor
    own: KeysAndValues
    before: torch.Tensor
    lengths: torch.Tensor
    token: torch.Tensor
    chosen: torch.Tensor
    count: torch.Tensor
    logits: torch.Tensor
    penalty: torch.Tensor
    graph: Any = field(default=None, repr=False)
    loops: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def width(self) -> int:
        """W."""
        return self.shape[3]


class StaticT5:
    """The encoder and the decoder step of a T5, a BART or a relative, over its own weights and joined copies of some.

    The residual stream is in the weights' type, but for fp16 in fp32: it is what outgrows fp16 in published T5s.

    Args:
        model: of a family that `families.registry` has, on any device, of any type of float.

    >>> from t5accel.t5.lively import random_t5
    >>> model = random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    >>> t5 = StaticT5(model)
    >>> slot, mask = t5.slot(batch=1, rows=1, source=4, width=8), torch.ones(1, 4, dtype=torch.int64)
    >>> t5.fill(slot, t5.encode(torch.tensor([[5, 6, 7, 1]]), mask), mask)
    >>> t5.read(slot, torch.tensor([[0, 5]])).shape, slot.lengths.tolist()
    (torch.Size([1, 2, 8]), [2])
    """

    def __init__(self, model: PreTrainedModel):
        self.family, self.config = family_of_model(model), model.config
        self.dims = dims_of(model, self.family)
        self.head, bias = model.lm_head.weight.detach(), getattr(model, "final_logits_bias", None)
        self.device, self.dtype = self.head.device, self.head.dtype
        has_bias = self.family.head_bias and bias is not None and bias.any()
        self.head_bias = bias.detach().reshape(-1).to(self.dtype) if has_bias else None
        self.residual = torch.float32 if self.dtype == torch.float16 else self.dtype
        self.lowest = lowest_of(self.dtype)
        self.encoder, self.decoder = stacks_of(model, self.family, residual=self.residual)
        self.layers, self.reach = self.decoder.layers, self.decoder.reach
        scaled = self.family.scales_embedding and model.config.scale_embedding
        self.embedding_scale = self.dims.d_model**0.5 if scaled else 1.0

    # Memory

    def cross_memory(self, batch: int, source: int) -> KeysAndValues:
        """For the keys and values of B sources of S positions."""
        options = dict(device=self.device, dtype=self.dtype)
        return KeysAndValues(self.dims.cross_heads, batch, source, self.dims.d_kv, **options)

    def slot(self, *, batch: int, rows: int, source: int, width: int) -> Slot:
        """Memory for B, K, S and W; nothing is written yet."""
        options: dict[str, Any] = dict(device=self.device, dtype=self.dtype)
        whole, dims = batch * rows, self.dims

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=self.device)

        return Slot(
            (batch, rows, source, width), self.cross_memory(batch, source),
            torch.zeros((batch, 1, 1, source), **options),
            KeysAndValues(dims.decoder_heads, whole, width, dims.d_kv, **options),
            torch.arange(width, device=self.device) - 1, integers(whole), integers(whole, 1),
            integers(whole, LONGEST_RUN), integers(1),
            *(torch.zeros(shape, dtype=torch.float32, device=self.device)
              for shape in ((whole, dims.vocab_size), (dims.vocab_size,))),
        )  # fmt: skip

    def fill(self, slot: Slot, cross: KeysAndValues, mask: torch.Tensor) -> None:
        """Begin anew, on these sources: ``cross`` for (B, S') and ``mask`` (B, S') with S' <= S; the rest is masked."""
        slot.cross.copy_(cross)
        slot.source_bias.fill_(self.lowest)
        slot.source_bias[..., : mask.shape[1]] = (1 - mask[:, None, None].to(slot.source_bias)) * self.lowest
        slot.lengths.zero_()
        slot.count.zero_()

    # The encoder

    def encode(self, ids: torch.Tensor, mask: torch.Tensor, into: KeysAndValues | None = None) -> KeysAndValues:
        """Tokens and mask (B, S) -> cross-attention's keys and values, in ``into`` or in new memory."""
        into = self.cross_memory(*ids.shape) if into is None else into
        places, reach = torch.arange(ids.shape[1], device=self.device), self.encoder.reach
        index = (places - places[:, None]).clamp_(-reach, reach) + reach  # (S, S)
        hidden = self._embedded(self.encoder, ids, places.expand(ids.shape), whole=True)
        real, biases = mask[:, None, None].bool(), {}
        for layer in self.encoder.layers:
            if id(layer.biases) not in biases:
                biases[id(layer.biases)] = torch.where(real, layer.biases[:, index], self.lowest)  # (B, H or 1, S, S)
            query, key, value = self._projected(self._before(hidden, layer.norms[0]), layer.qkv, 3, layer.width)
            found = self._attend(query, key, value, biases[id(layer.biases)])
            hidden = self._after(hidden, found, layer.o, layer.norms[0])
            hidden = self._feed_forward(hidden, layer)
        encoded = self._before(hidden, self.encoder.last_norm)
        for layer, place in zip(self.layers, into.layers, strict=True):
            place.copy_(self._projected(encoded, layer.cross_kv, 2, layer.width))
        return into

    # A step of the decoder

    def read(self, slot: Slot, tokens: torch.Tensor) -> torch.Tensor:
        """Append tokens (R, T) to every row -> what the head reads, (R, T, d_model), normed and scaled.

        The caller sees to it that there is room: no row may get more than W positions.
        """
        batch, rows, _, _ = slot.shape
        count = tokens.shape[1]
        positions = slot.lengths[:, None]  # (R, T)
        if count > 1:
            positions = positions + torch.arange(count, device=self.device)
        index = (positions[:, :, None] - slot.before).clamp_(0, self.reach + 1)  # (R, T, W), 0 where it is the future
        where = positions[None, :, None, :, None]
        hidden = self._embedded(self.decoder, tokens, positions)
        biases: dict[int, torch.Tensor] = {}
        for layer, own, cross in zip(self.layers, slot.own.layers, slot.cross.layers, strict=True):
            if id(layer.biases) not in biases:
                biases[id(layer.biases)] = layer.biases[:, index].transpose(0, 1)  # (R, H or 1, T, W)
            projected = self._projected(self._before(hidden, layer.norms[0]), layer.qkv, 3, layer.width)
            new = projected[1:]  # of (3, R, H, T, d)
            own.scatter_(3, where.expand(new.shape), new)
            found = self._attend(projected[0], *own, biases[id(layer.biases)])
            hidden = self._after(hidden, found, layer.o, layer.norms[0])
            # Rows of one source fold into the axis of queries: nothing of the source is copied for each row.
            asking = self._before(hidden, layer.norms[1]).view(batch, rows * count, -1)
            (query,) = self._projected(asking, layer.cross_q, 1, layer.width)
            found = self._attend(query, *cross, slot.source_bias)
            hidden = self._after(hidden, found, layer.cross_o, layer.norms[1])
            hidden = self._feed_forward(hidden, layer)
        slot.lengths.add_(count)
        return self._before(hidden, self.decoder.last_norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(…, d_model) -> (…, V) float32."""
        return self._scores(hidden).float()

    def choose(self, slot: Slot, hidden: torch.Tensor) -> None:
        """The likeliest token after the last of (R, T, d_model) becomes the slot's ``token``, and is noted down."""
        slot.logits.copy_(self._scores(hidden[:, -1]))
        token = (slot.logits + slot.penalty).argmax(dim=-1, keepdim=True)
        slot.token.copy_(token)
        slot.chosen.scatter_(1, slot.count.expand(len(token), 1), token)
        slot.count.add_(1)

    def advance(self, slot: Slot) -> None:
        """One greedy step: read the slot's token, choose the next. Touches nothing but the slot."""
        self.choose(slot, self.read(slot, slot.token))

    # Parts of a layer

    def _embedded(self, stack: Stack, tokens: torch.Tensor, places: torch.Tensor, *, whole: bool = False) -> Any:
        """Tokens and their places in the text, counted from 0, (N, n) -> (N, n, d_model), the residual stream.

        With ``whole`` these are all tokens of a text, so that a family whose padding has no position can count.
        """
        hidden = functional.embedding(tokens, stack.embedding)
        if stack.positions is not None:
            if self.family.skips_padding and whole:
                places = (tokens != self.config.pad_token_id).cumsum(1) - 1
            # Beyond the table are only the places of a bucket that no token has, and rows that have ended.
            numbers = (places + stack.first).clamp_(max=len(stack.positions) - 1)
            if self.family.skips_padding:
                numbers = numbers.masked_fill(tokens == self.config.pad_token_id, self.config.pad_token_id)
            hidden = torch.add(functional.embedding(numbers, stack.positions), hidden, alpha=self.embedding_scale)
            if stack.norm_embedding is not None:
                hidden = stack.norm_embedding(hidden)
        return hidden.to(self.residual)

    def _before(self, hidden: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """What a part reads of the stream: normed, or where norms stand behind the parts, as it is."""
        return (norm(hidden) if self.family.norm_first else hidden).to(self.dtype)

    def _after(self, hidden: torch.Tensor, x: torch.Tensor, linear: Linear, norm: Norm) -> torch.Tensor:
        """The stream behind a part. It may be written to in place: ``hidden += x @ weight.T``."""
        rows, x = hidden.view(-1, hidden.shape[-1]), x.reshape(-1, x.shape[-1]).to(linear.weight.dtype)
        if rows.dtype == linear.weight.dtype and linear.bias is None:
            rows.addmm_(x, linear.weight.T)  # one operator
        else:
            rows.add_(functional.linear(x, *linear))
        return hidden if self.family.norm_first else norm(hidden)

    def _projected(self, normed: torch.Tensor, linear: Linear, parts: int, width: int) -> torch.Tensor:
        """(N, n, d_model) by weights (parts * H * d, d_model) -> (parts, N, H, n, d), a view of one product."""
        joined = functional.linear(normed, *linear)
        return joined.unflatten(-1, (parts, -1, width)).permute(2, 0, 3, 1, 4)

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor) -> Any:
        """(N, H, n, d) -> (N, n, H * d). T5 does not divide scores by the root of d."""
        scale = query.shape[-1] ** -0.5 if self.family.scales_attention else 1.0
        attended = functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scale)
        return attended.transpose(1, 2).flatten(2)

    def _feed_forward(self, hidden: torch.Tensor, layer: Layer) -> torch.Tensor:
        """The stream behind it. transformers keeps ``wo`` in fp32 where the model is in fp16."""
        activation = self.decoder.activation  # the encoder's, too
        inner = functional.linear(self._before(hidden, layer.norms[-1]), *layer.wi)
        if self.dims.gated:
            gate, inner = inner.chunk(2, dim=-1)
            inner = activation(gate) * inner
        else:
            inner = activation(inner)
        return self._after(hidden, inner, layer.wo, layer.norms[-1])

    def _scores(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, self.head, self.head_bias)
