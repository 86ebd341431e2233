"""The families of encoder-decoders: their architectures as switches, and which family a model belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from t5accel.errors import InputError, ModelUnavailableError, NotT5Error
from t5accel.models.sizes import CLASS_PREFIXES, T5_LIKE, T5Dims


@dataclass(frozen=True)
class Family:
    """Architecture switches of one family; sizes and activations are in each model's configuration."""

    model_type: str  # transformers' name, in config.json
    model_class: str  # transformers' class with a language-model head
    norm: str = "layer"  # or "rms", which subtracts no mean and adds no bias
    norm_first: bool = False  # norms before each part and after the last layer; else after each part
    norm_embedding: bool = False
    position_offset: int | None = 0  # row of the first position in its table; None: distances in attention scores
    positions_skip_padding: bool = False  # positions count real tokens only, and the offset starts at the pad id
    biases: bool = True  # of linear layers
    has_scaled_attention: bool = True  # scores are divided by the root of the heads' width
    scales_embedding: bool = True  # by the root of d_model, where the configuration says so
    head_bias: bool = True  # of the logits; 0 in most checkpoints
    # Published checkpoints by their name behind "random:": keyword arguments of the configuration.
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # Their generation_config: "eos" stands for that token's id, "pads" for the pad as the only bad word.
    generation: Mapping[str, Any] = field(default_factory=dict)
    is_gemma = has_soft_caps = False  # `graphs.gemma_layers` builds its graphs; its scores are capped

    @property
    def is_relative(self) -> bool:
        """Whether positions are distances in the attention scores, as in T5."""
        return self.position_offset is None

    def first_position(self, pad_token_id: int) -> int:
        """The first token's row in the table of positions."""
        return (self.position_offset or 0) + (pad_token_id if self.positions_skip_padding else 0)


@dataclass(frozen=True)
class GemmaFamily(Family):
    """An encoder-decoder made of two Gemmas: rotary positions, grouped queries, norms around each part."""

    merges_attention: bool = True  # the decoder attends to its own and to the encoder's keys in one softmax
    has_soft_caps: bool = False  # attention scores are capped, as the configuration says
    is_gemma = True


def _sizes(d_model: int, layers: int, heads: int, ff: int, **others: Any) -> dict[str, Any]:
    return dict(
        d_model=d_model,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=ff,
        decoder_ffn_dim=ff,
        **others,
    )


_BART_LARGE = _sizes(1024, 12, 16, 4096, vocab_size=50265)
_RELU = dict(activation_function="relu", scale_embedding=True)
_NLLB = _sizes(1024, 12, 16, 4096, **_RELU)
_PEGASUS = _sizes(1024, 16, 16, 4096, vocab_size=96103, **_RELU)

# T5, FLAN, mT5, UMT5, ByT5, MADLAD-400. Their sizes are in `models.random_init`.
T5 = Family(
    "t5",
    "T5ForConditionalGeneration",
    norm="rms",
    norm_first=True,
    position_offset=None,
    biases=False,
    has_scaled_attention=False,
    scales_embedding=False,
    head_bias=False,
)
# Lewis et al. 2019: learned positions, the first two rows unused.
BART = Family(
    "bart",
    "BartForConditionalGeneration",
    norm_embedding=True,
    position_offset=2,
    sizes={
        "bart-base": _sizes(768, 6, 12, 3072, vocab_size=50265),
        "bart-large": _BART_LARGE,
        "distilbart-12-6": dict(_BART_LARGE, decoder_layers=6),
    },
    generation=dict(forced_eos_token_id="eos"),
)
# Liu et al. 2020, and mBART-50: the first token of an output is its language.
MBART = Family(
    "mbart",
    "MBartForConditionalGeneration",
    norm_first=True,
    norm_embedding=True,
    position_offset=2,
    sizes={"mbart-large-50": _sizes(1024, 12, 16, 4096, vocab_size=250054, decoder_start_token_id=2, **_RELU)},
    generation=dict(forced_eos_token_id="eos"),
)
# OPUS-MT: sinusoidal positions. It starts with its padding token, which must not be generated. Source and target may
# have separate vocabularies and embeddings.
MARIAN = Family(
    "marian",
    "MarianMTModel",
    sizes={
        "opus-mt": _sizes(
            512,
            6,
            8,
            2048,
            vocab_size=58101,
            activation_function="swish",
            scale_embedding=True,
            max_position_embeddings=512,
            pad_token_id=58100,
            eos_token_id=0,
            decoder_start_token_id=58100,
        )
    },
    generation=dict(forced_eos_token_id="eos", bad_words_ids="pads"),
)
# M2M-100 and NLLB-200: sinusoidal positions. The first token of an output is its language, given with each call.
M2M_100 = Family(
    "m2m_100",
    "M2M100ForConditionalGeneration",
    norm_first=True,
    position_offset=1,
    positions_skip_padding=True,
    head_bias=False,
    sizes={
        "nllb-200-distilled-600M": dict(_NLLB, vocab_size=256206),
        "m2m100_418M": dict(_NLLB, vocab_size=128112),
    },
)
# Zhang et al. 2020: sinusoidal positions.
PEGASUS = Family(
    "pegasus",
    "PegasusForConditionalGeneration",
    norm_first=True,
    sizes={"pegasus-large": _PEGASUS, "pegasus-xsum": dict(_PEGASUS, max_position_embeddings=512)},
    generation=dict(forced_eos_token_id="eos"),
)

_GEMMA = dict(norm="rms", norm_first=True, biases=False, head_bias=False)
_GEMMA_3_270M = dict(vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18,
                     num_attention_heads=4, num_key_value_heads=1, sliding_window=512)  # fmt: skip
_GEMMA_B = dict(vocab_size=256000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
                num_attention_heads=12, num_key_value_heads=12, head_dim=64, query_pre_attn_scalar=64)  # fmt: skip
_LITTLE = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
# Zhang et al. 2025, text alone: no graph reads the vision tower, of which random weights have the least that there is.
T5GEMMA_2 = GemmaFamily(
    "t5gemma2",
    "T5Gemma2ForConditionalGeneration",
    **_GEMMA,
    sizes={
        "t5gemma-2-270m-270m": dict(
            encoder=dict(text_config=_GEMMA_3_270M, vision_config=_LITTLE), decoder=_GEMMA_3_270M
        )
    },
)
# Zhang et al. 2025: separate cross-attention, and soft caps.
T5GEMMA = GemmaFamily(
    "t5gemma",
    "T5GemmaForConditionalGeneration",
    **_GEMMA,
    merges_attention=False,
    has_soft_caps=True,
    sizes={"t5gemma-b-b": dict(encoder=_GEMMA_B, decoder=_GEMMA_B)},
)

BEYOND_T5 = {family.model_type: family for family in (BART, MBART, MARIAN, M2M_100, PEGASUS)}
GEMMAS = {family.model_type: family for family in (T5GEMMA, T5GEMMA_2)}
FAMILIES = dict.fromkeys(T5_LIKE, T5) | BEYOND_T5 | GEMMAS
SIZES = {size: (family, numbers) for family in FAMILIES.values() for size, numbers in family.sizes.items()}
# What works in place of other encoder-decoders.
NEAREST = {
    "longt5": "a T5 or UMT5, with full attention",
    "pegasus_x": "a Pegasus, for shorter sources",
    "led": "a BART, for shorter sources",
    "switch_transformers": "a T5 or FLAN-T5",
    "codet5p": "a CodeT5+ of 220M or 770M, of type t5",
    "whisper": "faster-whisper, another package",
}


def family_of(config: Any, name: str) -> Family:
    """The family of a configuration; raises ``NotT5Error`` for another kind of model, called ``name``.

    >>> from types import SimpleNamespace
    >>> family_of(SimpleNamespace(model_type="mbart"), "mine").norm_first
    True
    """
    kind = getattr(config, "model_type", type(config).__name__)
    if kind not in FAMILIES:
        nearest = f" The nearest that works is {NEAREST[kind]}." if kind in NEAREST else ""
        raise NotT5Error(
            f"{name} is of type {kind!r}, {_architecture(config)}; t5accel handles encoder-decoders: "
            f"{', '.join(T5_LIKE)} (flan, ByT5 and MADLAD-400 are of type t5), {', '.join(BEYOND_T5)} (m2m_100 is "
            f"NLLB, too), {', '.join(GEMMAS)}.{nearest}"
        )
    return FAMILIES[kind]


def family_of_model(model: Any) -> Family:
    """The family of a model object that can generate.

    Raises ``InputError`` for another object, such as a pipeline, and for a T5 with two embeddings; ``NotT5Error`` for a
    model of another kind, a wrapped or sharded one, or one without encoder, decoder or language-model head.
    """
    kind, config = type(model).__name__, getattr(model, "config", None)
    if hasattr(model, "merge_and_unload"):
        raise NotT5Error(f"{kind} holds adapters beside the model: give what its merge_and_unload() returns.")
    if kind.startswith(("FSDP", "FullyShardedDataParallel")):
        raise NotT5Error(f"{kind} holds the model in shards: save it with save_pretrained(), and give that folder.")
    # Of torch.compile; of data parallelism; of pipelines and trainers, but a BART has a .model, too.
    for name in ("_orig_mod", "module", *([] if hasattr(model, "lm_head") else ["model"])):
        inner = getattr(getattr(model, name, None), "config", None)
        if getattr(inner, "model_type", None) in FAMILIES and (name == "_orig_mod" or inner is not config):
            raise NotT5Error(f"{kind} is no model, but holds one: give its .{name}.")
    if hasattr(model, "backend"):
        raise InputError(f"This {kind} is accelerated already: use it, or give the model that it came from.")
    is_module = hasattr(model, "state_dict") and not isinstance(model, type)
    if config is None or not is_module:
        raise (NotT5Error if is_module else InputError)(
            f"model must be a name, a folder or a model of transformers, got an object of class {kind}."
        )
    for settings in (config, getattr(model, "generation_config", None) or config):
        try:
            settings.to_json_string()
        except (TypeError, ValueError) as error:  # NumPy's numbers, sets
            message = f"{type(settings).__name__} must hold values that JSON can hold, got others: {error}."
            raise InputError(message) from error
    family = family_of(config, kind)
    stacks = model if family.is_relative else getattr(model, "model", None)
    if not (hasattr(model, "lm_head") and hasattr(stacks, "encoder") and hasattr(stacks, "decoder")):
        raise NotT5Error(no_head(kind, config))
    if family.is_relative:
        own, other = model.encoder.embed_tokens.weight, model.decoder.embed_tokens.weight
        if own is not other and not own.is_meta and (own != other).any():
            raise InputError(
                f"{kind} must have one embedding for encoder and decoder, got two. transformers 5.0 to 5.17 load a "
                "MADLAD-400 so: give its folder or hub id, or load it with another release."
            )
    if family.is_relative or family.is_gemma:
        _require_built_constants(model, family)
    return family


def _require_built_constants(model: Any, family: Family) -> None:
    """Raise ``InputError`` where the configuration names other constants than the modules were built with."""
    # transformers' modules keep what they were built with, and the graphs are built from the configuration.
    constants = _gemma_constants(model) if family.is_gemma else _t5_constants(model)
    for name, told, built in constants:
        if built not in (None, told):
            raise InputError(f"config.{name} must be {built}, as the model was built, got {told}: load it again.")


def norms(model: Any) -> list[Any]:
    """The norms among a model's modules."""
    return [module for name, module in model.named_modules() if "norm" in name.rpartition(".")[2]]


def _t5_constants(model: Any) -> Iterator[tuple[str, Any, Any]]:
    config = model.config
    for attention in (block.layer[0].SelfAttention for block in (*model.encoder.block, *model.decoder.block)):
        for name in ("relative_attention_num_buckets", "relative_attention_max_distance"):
            yield name, getattr(config, name), getattr(attention, name, None)
    for norm in norms(model):
        # By the names of transformers' own norms and of apex's, which may take their place.
        built = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        yield "layer_norm_epsilon", config.layer_norm_epsilon, built


def _gemma_constants(model: Any) -> Iterator[tuple[str, Any, Any]]:
    for stack, config in gemma_configs(model.config).items():
        module = getattr(model.model, stack)
        module = getattr(module, "text_model", module)
        for norm in norms(module):
            yield f"{stack}.rms_norm_eps", config.rms_norm_eps, getattr(norm, "eps", None)
        for layer, kind in zip(module.layers, config.layer_types, strict=False):
            yield f"{stack}.layer_types", kind, getattr(layer, "attention_type", None)


def dims_of(model: Any, family: Family) -> T5Dims:
    """The sizes of a model of a family; ``d_kv`` is the decoder's."""
    if family.is_relative:
        return T5Dims.of(model)
    if family.is_gemma:
        return _gemma_dims(model)
    config, encoder, decoder = model.config, model.model.encoder, model.model.decoder
    heads = (config.decoder_attention_heads,) * len(decoder.layers)
    return T5Dims(
        vocab_size=len(model.lm_head.weight),  # out_features keep an earlier size where a head was resized
        d_model=config.d_model,
        d_kv=config.d_model // config.decoder_attention_heads,
        encoder_heads=(config.encoder_attention_heads,) * len(encoder.layers),
        decoder_heads=heads,
        cross_heads=heads,
        encoder_ff=(config.encoder_ffn_dim,) * len(encoder.layers),
        decoder_ff=(config.decoder_ffn_dim,) * len(decoder.layers),
        gated=False,
        tied=model.lm_head.weight is decoder.embed_tokens.weight,
    )


def position_table(stack: Any) -> Any:
    """A stack's table of absolute positions (positions, d_model), learned or sinusoids, by whichever name it has."""
    table = stack.embed_positions
    return getattr(table, "weight", getattr(table, "weights", None))


def gemma_configs(config: Any) -> dict[str, Any]:
    """The configurations of a T5Gemma's stacks of text."""
    return {"encoder": getattr(config.encoder, "text_config", config.encoder), "decoder": config.decoder}


def _gemma_dims(model: Any) -> T5Dims:
    """With the heads of keys and values, which several heads of queries share."""
    encoder, decoder = gemma_configs(model.config).values()
    heads = (decoder.num_key_value_heads,) * decoder.num_hidden_layers
    return T5Dims(
        vocab_size=len(model.lm_head.out_proj.weight),
        d_model=decoder.hidden_size,
        d_kv=decoder.head_dim,
        encoder_heads=(encoder.num_key_value_heads,) * encoder.num_hidden_layers,
        decoder_heads=heads,
        cross_heads=heads,
        encoder_ff=(encoder.intermediate_size,) * encoder.num_hidden_layers,
        decoder_ff=(decoder.intermediate_size,) * decoder.num_hidden_layers,
        gated=True,
        tied=model.lm_head.out_proj.weight is model.model.decoder.embed_tokens.weight,
    )


def require_class(kind: str, what: str) -> None:
    """Raise ``ModelUnavailableError`` for a family that the installed transformers does not have."""
    import transformers

    if kind in FAMILIES and not hasattr(transformers, FAMILIES[kind].model_class):
        raise ModelUnavailableError(
            f"{what} is of type {kind!r}, which transformers {transformers.__version__} does not have: install "
            "transformers 5 (pip install -U transformers)."
        )


def no_head(what: str, config: Any) -> str:
    """An error's sentence for a model without a language-model head, with the class to give instead."""
    kind = config.model_type
    able = f"{CLASS_PREFIXES[kind]}ForConditionalGeneration" if kind in T5_LIKE else FAMILIES[kind].model_class
    return f"{what} cannot generate text: give a {able}, or open its encoder as AcceleratedEncoder."


def _architecture(config: Any) -> str:
    """The stacks of another kind of model."""
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder-decoder of another family"
    try:
        from transformers.models.auto import modeling_auto as known
    except ImportError:
        return "no family of ours"
    kind = getattr(config, "model_type", None)
    if kind in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return "an encoder without a decoder"
    return "a decoder without an encoder" if kind in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else "no encoder-decoder"
