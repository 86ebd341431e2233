"""T5 in torch on memory that never moves or grows: what captured CUDA graphs can be replayed on.

A graph of the device holds addresses and sizes, so nothing may depend on how long an answer is: keys and values have a
place for every position that there will be, each row knows how many of them are real, and what lies beyond is masked.
Attention reads all places of a `Slot`, real or not. That is the price; the gain is that the host, which takes longer to
ask for a small decoder's kernels than a GPU to run them, asks once for all of a step. (The idea of gpt-fast, PyTorch
team 2023, and of transformers' StaticCache.)

A step also asks for as little as it can: projections that read the same input are one product, keys and values are
written together, residuals are added inside the product, and a table of biases knows what lies in the future.

Shapes: B sources, K rows that share one, R = B * K, T new tokens, S source positions, W places for positions, d = d_kv.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from t5accel.errors import InputError, MissingPackageError
from t5accel.t5.rules import logit_scale, relative_position_bucket
from t5accel.t5.sizes import T5Dims

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


@dataclass(frozen=True)
class Layer:
    """A layer's weights as its products take them, (out, in); one above the other where they read the same input.

    Attributes:
        norms: of self-attention, of cross-attention in a decoder, and of the feed-forward part.
        qkv: (3 * H * d, d_model).
        biases: (H, distances), what self-attention adds to scores.
        cross_kv: (2 * H * d, d_model); it and the other two are ``None`` in an encoder.
        wi: (d_ff, d_model); in a gated model (2 * d_ff, d_model), the gate first.
    """

    norms: tuple[torch.Tensor, ...]
    qkv: torch.Tensor
    o: torch.Tensor
    biases: torch.Tensor
    cross_q: torch.Tensor | None
    cross_kv: torch.Tensor | None
    cross_o: torch.Tensor | None
    wi: torch.Tensor
    wo: torch.Tensor


class StaticT5:
    """The encoder and the decoder step of a T5-like model, over its own weights and joined copies of some.

    The residual stream is in the weights' type, but for fp16 in fp32: it is what outgrows fp16 in published T5s.

    Args:
        model: a ``T5ForConditionalGeneration`` or its like, on any device, of any type of float.
        kernel: steps of one token attend by `triton_attention` in place of PyTorch's operators.

    Raises:
        InputError: for ``kernel`` the size of a head is no power of two.
        MissingPackageError: for ``kernel`` Triton is not installed.

    >>> from t5accel.t5.lively import random_t5
    >>> model = random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    >>> t5 = StaticT5(model)
    >>> slot, mask = t5.slot(batch=1, rows=1, source=4, width=8), torch.ones(1, 4, dtype=torch.int64)
    >>> t5.fill(slot, t5.encode(torch.tensor([[5, 6, 7, 1]]), mask), mask)
    >>> t5.read(slot, torch.tensor([[0, 5]])).shape, slot.lengths.tolist()
    (torch.Size([1, 2, 8]), [2])
    """

    def __init__(self, model: PreTrainedModel, *, kernel: bool = False):
        self.dims, self.config = T5Dims.of(model), model.config
        self.kernel = self._kernel() if kernel else None
        self.head, self.embedding = model.lm_head.weight.detach(), model.decoder.embed_tokens.weight.detach()
        self.source_embedding = model.encoder.embed_tokens.weight.detach()
        self.device, self.dtype, self.epsilon = self.head.device, self.head.dtype, self.config.layer_norm_epsilon
        self.residual = torch.float32 if self.dtype == torch.float16 else self.dtype
        self.lowest = torch.finfo(self.dtype).min  # added to a score it makes the softmax ignore the position
        self.reach = self.config.relative_attention_max_distance
        self.activation = _activation(model.decoder.block[0].layer[-1].DenseReluDense)
        self.layers = self._layers(model.decoder)
        self.encoder_layers = self._layers(model.encoder)
        self.last_norm = model.decoder.final_layer_norm.weight.detach().to(self.residual) * logit_scale(model)
        self.encoder_norm = model.encoder.final_layer_norm.weight.detach().to(self.residual)

    # Weights

    def _kernel(self) -> ModuleType:
        if self.dims.d_kv & (self.dims.d_kv - 1):
            raise InputError(f"d_kv is {self.dims.d_kv}; our kernel takes heads of a power of two: leave it out.")
        try:
            from t5accel.backends import triton_attention
        except ImportError as error:
            raise MissingPackageError("Our kernel needs Triton, which PyTorch's builds for CUDA bring.") from error
        return triton_attention

    def _layers(self, stack: Any) -> list[Layer]:
        buckets, layers = self._buckets(stack.is_decoder), []
        table: torch.Tensor | None = None
        for block in stack.block:
            attention, dense = block.layer[0].SelfAttention, block.layer[-1].DenseReluDense
            across = block.layer[1].EncDecAttention if stack.is_decoder else None
            # T5's first layer has the biases of all; in UMT5 and narrow models each layer has its own.
            if hasattr(attention, "relative_attention_bias"):
                table = attention.relative_attention_bias.weight.detach()[buckets].T.to(self.dtype).contiguous()
                if stack.is_decoder:  # the first column is the future's
                    table = functional.pad(table, (1, 0), value=self.lowest)
            gone = getattr(attention, "pruned_heads", ())
            kept = [head for head in range(len(table)) if head not in gone]
            gated = hasattr(dense, "wi_0")
            layers.append(Layer(
                norms=tuple(layer.layer_norm.weight.detach().to(self.residual) for layer in block.layer),
                qkv=_joined(attention.q, attention.k, attention.v), o=attention.o.weight.detach(),
                biases=table[kept] if gone else table,
                cross_q=across.q.weight.detach() if across else None,
                cross_kv=_joined(across.k, across.v) if across else None,
                cross_o=across.o.weight.detach() if across else None,
                wi=_joined(dense.wi_0, dense.wi_1) if gated else dense.wi.weight.detach(), wo=dense.wo.weight.detach(),
            ))  # fmt: skip
        return layers

    def _buckets(self, is_decoder: bool) -> torch.Tensor:
        """T5's bucket for each distance that matters: 0 … reach back, or -reach … reach for an encoder."""
        distances = -torch.arange(self.reach + 1) if is_decoder else torch.arange(-self.reach, self.reach + 1)
        buckets = relative_position_bucket(
            distances.numpy(), bidirectional=not is_decoder, buckets=self.config.relative_attention_num_buckets,
            max_distance=self.reach,
        )  # fmt: skip
        return torch.from_numpy(buckets).to(self.device)

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
        places = torch.arange(ids.shape[1], device=self.device)
        index = (places - places[:, None]).clamp_(-self.reach, self.reach) + self.reach  # (S, S)
        hidden = functional.embedding(ids, self.source_embedding).to(self.residual)
        real, biases = mask[:, None, None].bool(), {}
        for layer in self.encoder_layers:
            if id(layer.biases) not in biases:
                biases[id(layer.biases)] = torch.where(real, layer.biases[:, index], self.lowest)  # (B, H, S, S)
            query, key, value = self._projected(self._norm(hidden, layer.norms[0]), layer.qkv, 3)
            self._add(hidden, self._attend(query, key, value, biases[id(layer.biases)]), layer.o)
            self._feed_forward(hidden, layer)
        encoded = self._norm(hidden, self.encoder_norm)
        for layer, place in zip(self.layers, into.layers, strict=True):
            place.copy_(self._projected(encoded, layer.cross_kv, 2))
        return into

    # A step of the decoder

    def read(self, slot: Slot, tokens: torch.Tensor) -> torch.Tensor:
        """Append tokens (R, T) to every row -> what the head reads, (R, T, d_model), normed and scaled.

        The caller sees to it that there is room: no row may get more than W positions.
        """
        if self.kernel is not None and tokens.shape[1] == 1:
            return self._read_one(slot, tokens)
        batch, rows, _, _ = slot.shape
        count = tokens.shape[1]
        positions = slot.lengths[:, None]  # (R, T)
        if count > 1:
            positions = positions + torch.arange(count, device=self.device)
        index = (positions[:, :, None] - slot.before).clamp_(0, self.reach + 1)  # (R, T, W), 0 where it is the future
        where = positions[None, :, None, :, None]
        hidden = functional.embedding(tokens, self.embedding).to(self.residual)
        biases: dict[int, torch.Tensor] = {}
        for layer, own, cross in zip(self.layers, slot.own.layers, slot.cross.layers, strict=True):
            if id(layer.biases) not in biases:
                biases[id(layer.biases)] = layer.biases[:, index].transpose(0, 1)  # (R, H, T, W)
            projected = self._projected(self._norm(hidden, layer.norms[0]), layer.qkv, 3)  # (3, R, H, T, d)
            new = projected[1:]
            own.scatter_(3, where.expand(new.shape), new)
            self._add(hidden, self._attend(projected[0], *own, biases[id(layer.biases)]), layer.o)
            # Rows of one source fold into the axis of queries: nothing of the source is copied for each row.
            normed = self._norm(hidden, layer.norms[1]).view(batch, rows * count, -1)
            (query,) = self._projected(normed, layer.cross_q, 1)
            self._add(hidden, self._attend(query, *cross, slot.source_bias), layer.cross_o)
            self._feed_forward(hidden, layer)
        slot.lengths.add_(count)
        return self._norm(hidden, self.last_norm)

    def _read_one(self, slot: Slot, tokens: torch.Tensor) -> torch.Tensor:
        """`read` of one token (R, 1) for each row, by our own kernels."""
        heads, hidden = (-1, self.dims.d_kv), functional.embedding(tokens, self.embedding).to(self.residual)
        for layer, own, cross in zip(self.layers, slot.own.layers, slot.cross.layers, strict=True):
            projected = functional.linear(self._norm(hidden, layer.norms[0])[:, 0], layer.qkv).unflatten(
                -1, (3, *heads)
            )
            self._add(hidden, self.kernel.attend_own(projected, own, slot.lengths, layer.biases), layer.o)
            query = functional.linear(self._norm(hidden, layer.norms[1])[:, 0], layer.cross_q).unflatten(-1, heads)
            self._add(hidden, self.kernel.attend_cross(query, cross, slot.source_bias), layer.cross_o)
            self._feed_forward(hidden, layer)
        slot.lengths.add_(1)
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
        slot.count.add_(1)

    def advance(self, slot: Slot) -> None:
        """One greedy step: read the slot's token, choose the next. Touches nothing but the slot."""
        self.choose(slot, self.read(slot, slot.token))

    # Parts of a layer

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self.epsilon).to(self.dtype)

    def _projected(self, normed: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
        """(N, n, d_model) by weights (parts * H * d, d_model) -> (parts, N, H, n, d), a view of one product."""
        joined = functional.linear(normed, weight)
        return joined.unflatten(-1, (parts, -1, self.dims.d_kv)).permute(2, 0, 3, 1, 4)

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor) -> Any:
        """(N, H, n, d) -> (N, n, H * d). T5 does not divide scores by the root of d."""
        attended = functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=1.0)
        return attended.transpose(1, 2).flatten(2)

    def _add(self, hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
        """``hidden += x @ weight.T``, in place, as one operator where all are of one type."""
        rows, x = hidden.view(-1, hidden.shape[-1]), x.reshape(-1, x.shape[-1]).to(weight.dtype)
        if rows.dtype == weight.dtype:
            rows.addmm_(x, weight.T)
        else:
            rows.add_(functional.linear(x, weight))

    def _feed_forward(self, hidden: torch.Tensor, layer: Layer) -> None:
        """Added to ``hidden``. transformers keeps ``wo`` in fp32 where the model is in fp16."""
        inner = functional.linear(self._norm(hidden, layer.norms[-1]), layer.wi)
        if self.dims.gated:
            gate, inner = inner.chunk(2, dim=-1)
            inner = self.activation(gate) * inner
        else:
            inner = self.activation(inner)
        self._add(hidden, inner, layer.wo)


def _joined(*modules: Any) -> torch.Tensor:
    return torch.cat([module.weight.detach() for module in modules])


def _activation(dense: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A layer's activation; what transformers writes out as eight operators for T5 v1.1 is one in torch."""
    if type(dense.act).__name__ == "NewGELUActivation":
        return lambda x: functional.gelu(x, approximate="tanh")
    return dense.act
