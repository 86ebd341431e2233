"""The graphs of T5Gemma and T5Gemma 2: two Gemmas as encoder and decoder.

Shapes are those of `layers`. Each of the H heads of keys and values serves G heads of queries, which are folded into
the axis of queries: (…, H, G * n, d).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from onnx import TensorProto

from t5accel.errors import InputError, NotT5Error
from t5accel.graphs.builder import GraphBuilder
from t5accel.graphs.layers import LOWEST, T5Layers, mask_with_new
from t5accel.graphs.weights import ADVICE, T5Weights, as_array, require_values
from t5accel.models.families import Family, dims_of, gemma_configs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What sees images, and what is read elsewhere.
_SKIPPED = re.compile(
    r"model\.encoder\.(vision_tower|multi_modal_projector)\..*|.*\.embed_tokens\.(weight|embed_scale|eoi_embedding)|"
    r".*\.rotary_emb\.\w*inv_freq|lm_head\.out_proj\.weight"
)
_LAYER = re.compile(r"model\.(encoder|decoder)\.(?:text_model\.)?layers\.(\d+)\.(.+)\.(weight|bias)")
# T5's names of a layer's weights; {} is the number of its feed-forward part, behind one or two attentions.
_PARTS = {
    f"{theirs}.{part}_{kind}": f"{ours}.{part}" + ("_norm" if kind == "norm" else "")
    for theirs, ours in (("self_attn", "0.SelfAttention"), ("cross_attn", "1.EncDecAttention"))
    for part in "qkvo"
    for kind in ("proj", "norm")
} | {
    f"{place}_{theirs}_layernorm": f"{ours}.{'post_' * (place == 'post')}layer_norm"
    for theirs, ours in (("self_attn", "0"), ("cross_attn", "1"), ("feedforward", "{}"))
    for place in ("pre", "post")
}
_PARTS |= {f"mlp.{theirs}_proj": f"{{}}.DenseReluDense.{ours}" for theirs, ours in
           (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo"))}  # fmt: skip


class GemmaLayers(T5Layers):
    """The layers of one stack as nodes of one graph; the decoder's rows have their own axis."""

    weights: GemmaWeights

    def __init__(self, graph: GraphBuilder, weights: GemmaWeights, stack: str):
        super().__init__(graph, weights, stack)
        self.axes = 3 if stack == "decoder" else 2  # of hidden states, without d_model: (B, K, T) or (B, S)
        query, key = (weights.array(f"{stack}.block.0.layer.0.SelfAttention.{part}.weight") for part in "qk")
        self.groups = len(query) // len(key)  # G

    # Whole stacks

    def embed(self, tokens: str = "input_ids", numbers: str | None = None) -> str:
        """Token ids (…) -> (…, d_model), scaled; the end of an image has an embedding that is not."""
        graph, own, end = self.graph, f"{self.stack}.embed_tokens.weight", f"{self.stack}.image_end"
        table = own if own in self.weights.arrays else "shared.weight"
        scale = np.float32(self.weights.array(table).shape[1] ** 0.5)
        hidden = graph.op("Mul", graph.op("Gather", self.weight(table), tokens), graph.constant(scale))
        if self.weights.image_end is None:
            return hidden
        is_end = graph.op("Equal", tokens, graph.constant(self.weights.image_end))
        return graph.op("Where", graph.op("Unsqueeze", is_end, graph.constant([-1])), self.weight(end), hidden)

    def encoder(self, output: str | None = None) -> str:
        graph = self.graph
        hidden, real = self.embed(), graph.op("Cast", "attention_mask", to=TensorProto.BOOL)
        columns = graph.op("Range", graph.constant(0), graph.size("input_ids", 1), graph.constant(1))
        bias_of = self.biases_by_type(graph.op("Unsqueeze", real, graph.constant([1, 2])), columns, columns)
        turn_of = self.rotations(graph.op("Unsqueeze", columns, graph.constant([0])))
        for layer, kind in enumerate(self.weights.layer_types["encoder"]):
            prefix = f"encoder.block.{layer}.layer.0.SelfAttention"
            query, key, value = self.projections(hidden, prefix, turn_of[kind])
            hidden = self.add_attended(hidden, self.attend(query, key, value, bias_of[kind]), prefix)
            hidden = self.feed_forward(hidden, f"encoder.block.{layer}.layer.1")
        return self.norm(hidden, "encoder.final_layer_norm.weight", output=output)

    def cross_keys_and_values(self, encoded: str, prefix: str) -> None:
        """As in `T5Layers`; where attention is merged by the weights of self-attention, and without rotation."""
        place = "0.SelfAttention" if self.weights.family.merges_attention else "1.EncDecAttention"
        for layer in range(self.weights.dims.decoder_layers):
            for name in ("key", "value"):
                projection = f"decoder.block.{layer}.layer.{place}.{name[0]}"
                self.keys(encoded, projection, output=f"{prefix}_{name}_{layer}")

    def step(self) -> str:
        graph, merged = self.graph, self.weights.family.merges_attention
        hidden, axis = self.embed(), graph.constant([1])
        past, new = graph.size("past_mask", 2), graph.size("input_ids", 2)
        zero, one, total = graph.constant(0), graph.constant(1), graph.op("Add", past, new)
        mask = mask_with_new(graph, 2)  # (B, K, P + T)
        real = graph.op("Cast", mask, to=TensorProto.BOOL)
        queries, columns = graph.op("Range", past, total, one), graph.op("Range", zero, total, one)
        bias_of = self.biases_by_type(graph.op("Unsqueeze", real, graph.constant([2, 3])), queries, columns)
        # Columns in front of a shorter history are masked, so a token's position is the number of real ones before it.
        end = graph.op("ReduceSum", mask, graph.constant([-1]), keepdims=1)  # not of an empty past
        turn_of = self.rotations(graph.op("Add", end, graph.op("Range", graph.op("Neg", new), zero, one)))
        source_bias = self.biases.mask_bias("attention_mask", axes=(1, 2, 3))  # (B, 1, 1, 1, S)
        for layer, kind in enumerate(self.weights.layer_types["decoder"]):
            prefix = f"decoder.block.{layer}.layer.0.SelfAttention"
            query, *added = self.projections(hidden, prefix, turn_of[kind])
            own = [
                graph.op("Concat", f"past_{name}_{layer}", part, axis=3, output=f"present_{name}_{layer}")
                for name, part in zip(("key", "value"), added, strict=True)
            ]
            cross = [graph.op("Unsqueeze", f"cross_{name}_{layer}", axis) for name in ("key", "value")]
            if merged:
                attended = self.attend_to_both(query, own, cross, bias_of[kind], source_bias)
            else:
                attended = self.attend(query, *own, bias_of[kind])
            hidden = self.add_attended(hidden, attended, prefix)
            if not merged:
                prefix = f"decoder.block.{layer}.layer.1.EncDecAttention"
                query = self.queries(self.part_norm(hidden, prefix), prefix)
                hidden = self.add_attended(hidden, self.attend(query, *cross, source_bias), prefix)
            hidden = self.feed_forward(hidden, f"decoder.block.{layer}.layer.{1 if merged else 2}")
        return self.norm(hidden, "decoder.final_layer_norm.weight")

    def logits(self, graph: GraphBuilder, kind: str, *inputs: str, output: str) -> None:
        # The cap keeps the order of logits that are not above four caps, where it makes them equal in fp32. Approximate
        # ones (of another kind) go without, as their bounds do.
        cap = self.weights.logit_cap if kind == "MatMul" else None
        products = graph.op(kind, *inputs, output=output if cap is None else None)
        if cap is not None:
            self._capped(graph, products, cap, output)

    # Parts of a layer

    def part_norm(self, hidden: str, prefix: str) -> str:
        """The norm before a layer's part, whose weights have this prefix."""
        return self.norm(hidden, f"{prefix.rpartition('.')[0]}.layer_norm.weight")

    def add_residual(self, hidden: str, branch: str, norm: str) -> str:
        """The sum with a part's normed output."""
        return self.graph.op("Add", hidden, self.norm(branch, norm.replace(".layer_norm", ".post_layer_norm")))

    def projections(self, hidden: str, prefix: str, turn: tuple[str, str]) -> tuple[str, str, str]:
        """Queries, keys and values of self-attention."""
        normed = self.part_norm(hidden, prefix)
        keys, values = self.keys(normed, f"{prefix}.k", turn), self.keys(normed, f"{prefix}.v")
        return self.queries(normed, prefix, turn), keys, values

    def queries(self, normed: str, prefix: str, turn: tuple[str, str] | None = None) -> str:
        """(B, [K,] n, d_model) -> (B, [K,] H, G * n, d), normed and rotated."""
        graph, axes, d_kv = self.graph, self.axes, self.weights.d_kv(prefix)
        shape = graph.constant([0] * axes + [-1, self.groups, d_kv])
        grouped = graph.op("Reshape", self.split(normed, f"{prefix}.q", turn), shape)
        order = [*range(axes - 1), axes, axes + 1, axes - 1, axes + 2]
        flat = graph.op("Transpose", grouped, perm=order)  # (B, [K,] H, G, n, d)
        return graph.op("Reshape", flat, graph.constant([0] * axes + [-1, d_kv]))

    def keys(self, normed: str, name: str, turn: tuple[str, str] | None = None, output: str | None = None) -> str:
        """Keys or values: (B, [K,] n, d_model) -> (B, [K,] H, n, d)."""
        axes = self.axes
        order = [*range(axes - 1), axes, axes - 1, axes + 1]
        return self.graph.op("Transpose", self.split(normed, name, turn), perm=order, output=output)

    def split(self, normed: str, name: str, turn: tuple[str, str] | None) -> str:
        """Project (…, d_model) to heads (…, heads, d), normed where the model does, and rotated."""
        graph = self.graph
        shape = [0] * self.axes + [-1, self.weights.d_kv(name)]
        heads = graph.op("Reshape", self.linear(normed, f"{name}.weight"), graph.constant(shape))
        if f"{name}_norm.weight" in self.weights.arrays:
            heads = self.norm(heads, f"{name}_norm.weight")
        if turn is None:
            return heads
        halves, (cos, sin) = [graph.fresh("half") for _ in range(2)], turn
        graph.multi_output_op("Split", [heads], halves, axis=-1, num_outputs=2)
        swapped = graph.op("Concat", *reversed(halves), axis=-1)
        return graph.op("Add", graph.op("Mul", heads, cos), graph.op("Mul", swapped, sin))

    def add_attended(self, hidden: str, attended: str, prefix: str) -> str:
        """(B, [K,] H, G * n, d), merged and projected, in the residual stream (B, [K,] n, d_model)."""
        graph, axes, name = self.graph, self.axes, f"{prefix}.o.weight"
        width = self.weights.array(name).shape[1]
        parts = graph.constant([0] * axes + [self.groups, -1, self.weights.d_kv(prefix)])
        order = [*range(axes - 1), axes + 1, axes - 1, axes, axes + 2]
        together = graph.op("Transpose", graph.op("Reshape", attended, parts), perm=order)  # (B, [K,] n, H, G, d)
        merged = graph.op("Reshape", together, graph.constant([0] * axes + [width]))
        return self.add_residual(hidden, self.linear(merged, name), f"{prefix.rpartition('.')[0]}.layer_norm.weight")

    # Operators

    def scores(self, query: str, key: str) -> str:
        """q k', capped where the model does: (B, [K,] H, G * n, m). The weights contain the scale."""
        graph, axes, cap = self.graph, self.axes, self.weights.score_caps[self.stack]
        flipped = graph.op("Transpose", key, perm=[*range(axes), axes + 1, axes])
        products = graph.op("MatMul", query, flipped)
        return products if cap is None else self._capped(graph, products, cap)

    def attend(self, query: str, key: str, value: str, bias: str, *, rows: bool = False) -> str:
        scores = self.graph.op("Add", self.scores(query, key), bias)
        return self.graph.op("MatMul", self.graph.op("Softmax", scores, axis=-1), value)

    def attend_to_both(self, query: str, own: list[str], cross: list[str], bias: str, source_bias: str) -> str:
        """Attention to the history and to the source in one softmax; the K rows of a source share its keys."""
        graph, parts = self.graph, [self.graph.fresh("part") for _ in range(2)]
        scores = [graph.op("Add", self.scores(query, own[0]), bias)]
        scores.append(graph.op("Add", self.scores(query, cross[0]), source_bias))
        probabilities = graph.op("Softmax", graph.op("Concat", *scores, axis=-1), axis=-1)
        lengths = graph.op("Concat", *(graph.op("Shape", part, start=4) for part in scores), axis=0)
        graph.multi_output_op("Split", [probabilities, lengths], parts, axis=-1)
        return graph.op("Add", graph.op("MatMul", parts[0], own[1]), graph.op("MatMul", parts[1], cross[1]))

    def biases_by_type(self, real: str, queries: str, columns: str) -> dict[str, str]:
        """Biases by the type of a layer: (…, 1, G * n, m), or 1 in place of G * n where all queries see the same.

        ``real`` (…, 1, 1, m) are columns that are no padding; ``queries`` (n,) and ``columns`` (m,) are numbers.
        """
        graph, (before, behind) = self.graph, self.weights.windows[self.stack]
        axis_0, axis_1 = graph.constant([0]), graph.constant([1])
        distance = graph.op("Sub", graph.op("Unsqueeze", queries, axis_1), graph.op("Unsqueeze", columns, axis_0))
        found = {}
        for kind in dict.fromkeys(self.weights.layer_types[self.stack]):
            visible, is_sliding = real, kind == "sliding_attention"
            if is_sliding or self.stack == "decoder":
                nearest = graph.op("GreaterOrEqual", distance, graph.constant(-behind if is_sliding else 0))
                visible = graph.op("And", visible, nearest)
            if is_sliding:
                visible = graph.op("And", visible, graph.op("LessOrEqual", distance, graph.constant(before)))
            bias = graph.op("Where", visible, graph.constant(np.float32(0)), graph.constant(np.float32(LOWEST)))
            found[kind] = bias if visible == real else graph.op("Concat", *[bias] * self.groups, axis=-2)
        return found

    def rotations(self, positions: str) -> dict[str, tuple[str, str]]:
        """By the type of a layer, what `split` multiplies heads and swapped halves by: (…, 1, d), for positions (…)."""
        graph, found = self.graph, {}
        numbers = graph.op("Unsqueeze", graph.op("Cast", positions, to=TensorProto.FLOAT), graph.constant([-2, -1]))
        for kind in dict.fromkeys(self.weights.layer_types[self.stack]):
            angles = graph.op("Mul", numbers, self.weight(f"{self.stack}.rope.{kind}"))
            cos, sin = graph.op("Cos", angles), graph.op("Sin", angles)
            sines = graph.op("Concat", graph.op("Neg", sin), sin, axis=-1)
            found[kind] = graph.op("Concat", cos, cos, axis=-1), sines
        return found

    def _capped(self, graph: GraphBuilder, value: str, cap: float, output: str | None = None) -> str:
        """A value squeezed into -cap … cap."""
        limit = graph.constant(np.float32(cap))
        return graph.op("Mul", graph.op("Tanh", graph.op("Div", value, limit)), limit, output=output)


@dataclass(frozen=True)
class GemmaWeights(T5Weights):
    """A T5Gemma's weights: in norms 1 is added, in queries the scale of scores is multiplied."""

    layers: ClassVar[Any] = GemmaLayers
    layer_types: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by stack
    # By stack, how many tokens before a query and behind it the sliding layers see.
    windows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    score_caps: Mapping[str, float | None] = field(default_factory=dict)  # by stack
    logit_cap: float | None = None
    image_end: int | None = None  # a token with a separate embedding


def gemma_weights(model: PreTrainedModel, family: Family) -> GemmaWeights:
    """The weights of a T5Gemma under T5's names. What sees images is left out: the graphs read text.

    Raises ``NotT5Error`` for weights and positions that the family lacks, ``InputError`` for an attention that leaves
    out the soft caps that the configuration asks for.
    """
    require_values(model)
    configs, inner = gemma_configs(model.config), model.model
    stacks = {"encoder": getattr(inner.encoder, "text_model", inner.encoder), "decoder": inner.decoder}
    encoder, decoder = configs.values()
    for name in ("rms_norm_eps", "hidden_activation"):
        if getattr(encoder, name) != getattr(decoder, name):
            raise NotT5Error(f"{name} must be the same in encoder and decoder of a {family.model_type}.")
    merged, capped = family.merges_attention, family.has_soft_caps
    caps = {stack: config.attn_logit_softcapping if capped else None for stack, config in configs.items()}
    if any(caps.values()) and (attention := model.config._attn_implementation) != "eager":
        raise InputError(
            f"The attention of a {family.model_type} must be 'eager', got {attention!r}, which leaves out its soft "
            "caps: call model.set_attn_implementation('eager')."
        )
    tables = {stack: module.embed_tokens.weight for stack, module in stacks.items()}
    dims, arrays = dims_of(model, family), {"shared.weight": as_array(tables["decoder"])}
    if tables["encoder"] is not tables["decoder"]:
        arrays["encoder.embed_tokens.weight"] = as_array(tables["encoder"])
    if not dims.tied:
        arrays["lm_head.weight"] = as_array(model.lm_head.out_proj.weight)
    image_end = None
    for stack, module in stacks.items():
        if (end := getattr(module.embed_tokens, "eoi_embedding", None)) is not None:
            arrays[f"{stack}.image_end"], image_end = as_array(end), module.embed_tokens.eoi_token_index
        arrays |= _frequencies(stack, module.rotary_emb, configs[stack].layer_types)
    for name, weight in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        if not _SKIPPED.fullmatch(name):
            ours, array = _renamed(name, merged=merged), as_array(weight, name)
            arrays[ours] = array + np.float32(1) if ours.endswith("norm.weight") else array
    normed = any(".q_norm." in name for name in arrays)  # a norm would undo a scale of what comes before it
    for name in [name for name in arrays if (".q_norm." if normed else ".q.") in name]:
        arrays[name] = arrays[name] * np.float32(configs[name[:7]].query_pre_attn_scalar ** -0.5)
    return GemmaWeights(
        arrays=arrays,
        dims=dims,
        activation=decoder.hidden_activation,
        norm_epsilon=decoder.rms_norm_eps,
        family=family,
        pad_token_id=model.config.pad_token_id,
        encoder_d_kv=encoder.head_dim,
        layer_types={stack: tuple(config.layer_types) for stack, config in configs.items()},
        windows={"encoder": _window(encoder.sliding_window, merged), "decoder": (decoder.sliding_window - 1, 0)},
        score_caps=caps,
        logit_cap=decoder.final_logit_softcapping,
        image_end=image_end,
    )


def _window(width: int, merged: bool) -> tuple[int, int]:
    """How many tokens the encoder's sliding layers see before a query and behind it."""
    if merged:
        return (width + 1) // 2 - 1, width // 2
    from transformers.models.t5gemma import modeling_t5gemma

    # In transformers 5 they see one more on each side than in 4.57.
    reach = width if hasattr(modeling_t5gemma, "create_bidirectional_sliding_window_mask") else width - 1
    return reach, reach


def _frequencies(stack: str, rotary: Any, kinds: Any) -> dict[str, np.ndarray]:
    """The angles (d / 2,) by which one position turns the halves of a head, by the type of a layer."""
    found = {}
    for kind in dict.fromkeys(kinds):
        prefix = f"{kind}_" if hasattr(rotary, f"{kind}_inv_freq") else ""
        rope = rotary.rope_type[kind] if prefix else rotary.rope_type
        if rope not in ("default", "linear"):
            raise NotT5Error(f"rope_type must be 'default' or 'linear', got {rope!r} in the {stack}.")
        found[f"{stack}.rope.{kind}"] = as_array(getattr(rotary, f"{prefix}inv_freq"))
    return found


def _renamed(name: str, *, merged: bool) -> str:
    """T5's name for a weight."""
    if found := _LAYER.fullmatch(name):
        stack, layer, part, kind = found.groups()
        if part in _PARTS:
            last = 2 if stack == "decoder" and not merged else 1
            return f"{stack}.block.{layer}.layer.{_PARTS[part].format(last)}.{kind}"
    elif found := re.fullmatch(r"model\.(encoder|decoder)\.(?:text_model\.)?norm\.weight", name):
        return f"{found[1]}.final_layer_norm.weight"
    raise NotT5Error(f"There is a weight {name}, which no family has: {ADVICE}")
