"""Seeded random models of published sizes whose greedy output varies, so that equality tests can fail."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from t5accel.errors import InputError
from t5accel.models.families import Family, require_class
from t5accel.models.sizes import CLASS_PREFIXES, T5_LIKE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def random_model(family: Family, sizes: Mapping[str, Any], *, seed: int = 0) -> PreTrainedModel:
    """A seeded model of a BART-like family or a T5Gemma; ``sizes`` are keyword arguments of its configuration.

    Leaves the global random state unchanged. Raises ``InputError`` if the sizes make no model, and
    ``ModelUnavailableError`` if the installed transformers does not know it.
    """
    require_class(family.model_type, family.model_class)
    with _seeded(seed):
        if family.is_gemma:  # a copy: transformers writes into nested sizes
            model = _build(family.model_class, {"dropout_rate": 0.0, "attention_dropout": 0.0}, copy.deepcopy(sizes))
            if family.has_soft_caps:
                model.set_attn_implementation("eager")  # as in `load`
            _randomize_gemma(model)
            return model
        model = _build(family.model_class, {"dropout": 0.0, "attention_dropout": 0.0}, sizes)
        config = model.config
        _randomize_family(model, silent_pad="bad_words_ids" not in family.generation)
    special = {"pad": config.pad_token_id, "eos": config.eos_token_id, "pads": [[config.pad_token_id]]}
    for name, value in family.generation.items():
        setattr(model.generation_config, name, special[value])
    return model


def _randomize_family(model: PreTrainedModel, *, silent_pad: bool) -> None:
    import torch

    # transformers draws zero biases, unit norms and weights so small that one token is repeated for ever. Here
    # attention is sharp, and random signs in the last norm keep a tied head from favouring the token just read.
    d_model, scaled = model.config.d_model, model.config.scale_embedding
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.requires_grad:
                continue  # sinusoids
            if "embed_positions" in name:
                weight.normal_(0.0, 2.0 if scaled else 2 * d_model**-0.5)
            elif "norm" in name and name.endswith("weight"):
                weight.normal_(1.0, 0.2)
            elif name.endswith("bias"):
                weight.normal_(0.0, 0.02)
            else:  # of embeddings, too: their rows are d_model wide
                weight.normal_(0.0, weight.shape[1] ** -0.5)
                if "q_proj" in name:
                    weight.mul_(5.0)  # sharper attention: the output depends on which token stands where
                elif "out_proj" in name or "fc2" in name:
                    weight.mul_(0.5)
                if "fc2" in name:  # what comes out of relu has a mean, whose image would be the same for every token
                    weight.sub_(weight.mean(dim=1, keepdim=True))
        if silent_pad:  # as in published checkpoints, where no text has one
            model.model.shared.weight[model.config.pad_token_id] = 0.0
        decoder = model.model.decoder
        last = getattr(decoder, "layer_norm", None) or decoder.layers[-1].final_layer_norm
        last.weight.mul_(torch.randint(2, last.weight.shape) * 2.0 - 1.0)
        if (bias := getattr(model, "final_logits_bias", None)) is not None and model.config.model_type == "marian":
            bias.normal_(0.0, 0.2)


def _randomize_gemma(model: PreTrainedModel) -> None:
    import torch

    # Attention is twice as sharp and parts are half as loud: so the output of 36 layers varies, and integers, which
    # move every weight by a hundredth, still change it little.
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # 1 is added to it
                weight.normal_(1.0 if "q_norm" in name else -0.5 if ".post_" in name else 0.0, 0.2)
            elif weight.dim() == 1:  # biases, and the embedding of an image's end
                weight.normal_(0.0, 1.0 if "eoi" in name else 0.1)
            elif "vision" not in name and "projector" not in name:
                weight.normal_(0.0, weight.shape[1] ** -0.5)
                if "q_proj" in name and not hasattr(model.model.decoder.layers[0].self_attn, "q_norm"):
                    weight.mul_(2.0)
                elif "down_proj" in name:
                    weight.sub_(weight.mean(dim=1, keepdim=True))
        last = model.model.decoder.norm.weight
        last.copy_((last + 1.0) * (torch.randint(2, last.shape) * 2.0 - 1.0) - 1.0)


# Configurations of published checkpoints (google-t5/*, google/flan-t5-*, google/mt5-small …): what shapes a model.
_T5 = dict(vocab_size=32128, d_kv=64, feed_forward_proj="relu", tie_word_embeddings=True)
_FLAN = dict(vocab_size=32128, d_kv=64, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
RANDOM_SIZES: dict[str, dict[str, Any]] = {
    "t5-small": dict(_T5, d_model=512, d_ff=2048, num_heads=8, num_layers=6),
    "t5-base": dict(_T5, d_model=768, d_ff=3072, num_heads=12, num_layers=12),
    "t5-large": dict(_T5, d_model=1024, d_ff=4096, num_heads=16, num_layers=24),
    "flan-t5-small": dict(_FLAN, d_model=512, d_ff=1024, num_heads=6, num_layers=8),
    "flan-t5-base": dict(_FLAN, d_model=768, d_ff=2048, num_heads=12, num_layers=12),
    "flan-t5-large": dict(_FLAN, d_model=1024, d_ff=2816, num_heads=16, num_layers=24),
    "flan-t5-xl": dict(_FLAN, d_model=2048, d_ff=5120, num_heads=32, num_layers=24),
    "mt5-small": dict(_FLAN, vocab_size=250112, d_model=512, d_ff=1024, num_heads=6, num_layers=8),
    "umt5-small": dict(_FLAN, vocab_size=256384, d_model=512, d_ff=1024, num_heads=6, num_layers=8),
    "byt5-small": dict(
        _FLAN, vocab_size=384, d_model=1472, d_ff=3584, num_heads=6, num_layers=12, num_decoder_layers=4
    ),
    "madlad400-3b-mt": dict(_FLAN, vocab_size=256000, d_model=1024, d_kv=128, d_ff=8192, num_heads=16, num_layers=32),
}


def kind_of(size: str) -> str:
    """The ``kind`` for `random_t5` of a published size."""
    return next((kind for kind in ("umt5", "mt5") if size.startswith(kind)), "t5")


def random_t5(sizes: dict[str, Any], *, seed: int = 0, kind: str = "t5") -> PreTrainedModel:
    """A seeded model of kind "t5", "mt5" or "umt5"; ``sizes`` are keyword arguments of ``T5Config``.

    Leaves the global random state unchanged. Raises ``InputError`` for an unknown kind or sizes that make no model.

    >>> random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32)).config.model_type
    't5'
    """
    if kind not in T5_LIKE:
        raise InputError(f"kind must be one of {', '.join(T5_LIKE)}, got {kind!r}.")
    defaults = {"decoder_start_token_id": 0, "dropout_rate": 0.0, "tie_word_embeddings": kind != "mt5"}
    with _seeded(seed):
        model = _build(f"{CLASS_PREFIXES[kind]}ForConditionalGeneration", defaults, sizes)
        if not (defaults | dict(sizes))["tie_word_embeddings"]:
            _untie(model)
        _randomize(model)
    return model


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    import torch

    if not hasattr(seed, "__index__") or not 0 <= operator.index(seed) < 2**63:
        raise InputError(f"seed must be an integer from 0 to 2**63 - 1, got {seed!r}.")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(operator.index(seed))  # torch.manual_seed would also seed the GPUs
        yield


def _build(name: str, defaults: dict[str, Any], sizes: Any) -> PreTrainedModel:
    import transformers

    if not isinstance(sizes, Mapping):
        raise InputError(f"sizes must be keyword arguments of the configuration, got {sizes!r:.200}.")
    model_class = getattr(transformers, name)
    try:
        return model_class(model_class.config_class(**{**defaults, **sizes})).eval()
    except Exception as error:  # of many kinds, some of them huggingface_hub's own
        raise InputError(f"These sizes make no {name}: {error}") from error


def _untie(model: PreTrainedModel) -> None:
    import torch

    # transformers 5 ties the head whatever the configuration says, and unties it only when it loads a checkpoint.
    if model.lm_head.weight is model.shared.weight:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
        model.all_tied_weights_keys.pop("lm_head.weight", None)  # so that it is saved, too


def _randomize(model: PreTrainedModel) -> None:
    import torch

    # A default-initialised T5 repeats one token, so that "all tokens equal" would prove nothing. Wider position
    # biases make the output depend on the order of the source's tokens.
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("Attention.q.weight"):
                weight.mul_(3.0)  # sharper attention: the output depends on which token stands where
            elif name.endswith("DenseReluDense.wo.weight"):
                # relu outputs have a mean; its image, the same for every token, would decide the output.
                weight.sub_(weight.mean(dim=1, keepdim=True))
            elif "relative_attention_bias" in name:
                weight.normal_(0.0, 1.0)
        # With tied embeddings the last token's own embedding, still in the residual stream, would win for ever.
        signs = torch.randint(2, model.decoder.final_layer_norm.weight.shape) * 2.0 - 1.0
        model.decoder.final_layer_norm.weight.copy_(signs)
