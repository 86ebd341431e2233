"""Which families there are, and which one a model belongs to."""

from __future__ import annotations

from typing import Any

from t5accel.errors import InputError, NotT5Error
from t5accel.families import bart, m2m_100, marian, mbart, pegasus
from t5accel.families.family import Family
from t5accel.families.t5 import T5
from t5accel.t5.sizes import CLASS_PREFIXES, T5_LIKE, T5Dims

BEYOND_T5 = {one.FAMILY.model_type: one.FAMILY for one in (bart, mbart, marian, m2m_100, pegasus)}
FAMILIES = dict.fromkeys(T5_LIKE, T5) | BEYOND_T5
# Published sizes by the name that they have behind "random:"; T5's own are in `t5.lively`.
SIZES = {size: (family, numbers) for family in BEYOND_T5.values() for size, numbers in family.sizes.items()}


def family_of(config: Any, name: str) -> Family:
    """The family of a configuration; raises ``NotT5Error`` for other kinds of models, which it calls ``name``.

    >>> from types import SimpleNamespace
    >>> family_of(SimpleNamespace(model_type="mbart"), "mine").norm_first
    True
    """
    kind = getattr(config, "model_type", type(config).__name__)
    if kind not in FAMILIES:
        raise NotT5Error(
            f"{name} is of type {kind!r}, {_shape(config)}; t5accel handles encoder-decoders: {', '.join(T5_LIKE)} "
            f"(flan, ByT5 and MADLAD-400 are of type t5), {', '.join(BEYOND_T5)} (m2m_100 is NLLB, too)."
        )
    return FAMILIES[kind]


def family_of_model(model: Any) -> Family:
    """The family of a model that can generate; another object is refused with what to give in its place.

    Raises:
        InputError: it is no model, such as a pipeline or a trainer.
        NotT5Error: it is of another kind, wrapped, sharded, or without an encoder, a decoder or the head above it.

    >>> family_of_model(("model", "tokenizer"))
    Traceback (most recent call last):
    t5accel.errors.InputError: model must be a name, a folder or a model of transformers, got an object of class tuple.
    """
    kind, config = type(model).__name__, getattr(model, "config", None)
    if hasattr(model, "merge_and_unload"):
        raise NotT5Error(f"{kind} holds adapters beside the model: give what its merge_and_unload() returns.")
    if kind.startswith(("FSDP", "FullyShardedDataParallel")):
        raise NotT5Error(f"{kind} holds the model in shards: save it with save_pretrained(), and give that folder.")
    for name in ("_orig_mod", "module", "model"):  # of torch.compile; of data parallelism; of pipelines and trainers
        inner = getattr(getattr(model, name, None), "config", None)
        if getattr(inner, "model_type", None) in FAMILIES and (name == "_orig_mod" or inner is not config):
            raise NotT5Error(f"{kind} is no model, but holds one: give its .{name}.")
    if hasattr(model, "backend"):
        raise InputError(f"This {kind} is accelerated already: use it as it is, or give the model that it came from.")
    is_module = hasattr(model, "state_dict") and not isinstance(model, type)
    if config is None or not is_module:
        raise (NotT5Error if is_module else InputError)(
            f"model must be a name, a folder or a model of transformers, got an object of class {kind}."
        )
    family = family_of(config, kind)
    stacks = model if family.is_relative else getattr(model, "model", None)
    if not (hasattr(model, "lm_head") and hasattr(stacks, "encoder") and hasattr(stacks, "decoder")):
        raise NotT5Error(no_head(kind, config))
    return family


def dims_of(model: Any, family: Family) -> T5Dims:
    """The sizes of a model of a family; ``d_kv`` is the decoder's.

    >>> from t5accel.families.lively import random_model
    >>> family, sizes = SIZES["opus-mt"]
    >>> model = random_model(family, dict(sizes, vocab_size=58102, encoder_layers=1, decoder_layers=2, d_model=16))
    >>> dims_of(model, family).decoder_heads
    (8, 8)
    """
    if family.is_relative:
        return T5Dims.of(model)
    config, below, above = model.config, len(model.model.encoder.layers), len(model.model.decoder.layers)
    heads = config.decoder_attention_heads
    return T5Dims(
        vocab_size=model.lm_head.out_features, d_model=config.d_model, d_kv=config.d_model // heads,
        encoder_heads=(config.encoder_attention_heads,) * below, decoder_heads=(heads,) * above,
        cross_heads=(heads,) * above, encoder_ff=(config.encoder_ffn_dim,) * below,
        decoder_ff=(config.decoder_ffn_dim,) * above, gated=False,
        tied=model.lm_head.weight is model.model.decoder.embed_tokens.weight,
    )  # fmt: skip


def no_head(what: str, config: Any) -> str:
    """A sentence for errors: a model of a family that cannot generate, and the class of those that can.

    >>> from types import SimpleNamespace
    >>> no_head("BartForQuestionAnswering", SimpleNamespace(model_type="bart"))
    'BartForQuestionAnswering cannot generate text: give a BartForConditionalGeneration.'
    """
    able = FAMILIES[config.model_type].model_class
    able = able if config.model_type in BEYOND_T5 else f"{CLASS_PREFIXES[config.model_type]}ForConditionalGeneration"
    return f"{what} cannot generate text: give a {able}."


def _shape(config: Any) -> str:
    """Which stacks a model of another kind has."""
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
