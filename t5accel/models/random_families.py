"""Seeded random models of BART's kind whose greedy output varies, so that a test of equality can fail."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from t5accel.errors import InputError
from t5accel.models.families import Family

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def random_model(family: Family, sizes: Mapping[str, Any], *, seed: int = 0) -> PreTrainedModel:
    """A seeded model of the given sizes that a family's other models are like: every switch matters in its weights.

    transformers would draw biases of zero, norms of one and weights so small that one token comes for ever. Here
    attention is sharp, and the last norm has random signs, so that a tied head does not favour the token just read.

    Args:
        family: of BART's kind; for T5s there is `models.random_init.random_t5`.
        sizes: keyword arguments of the family's configuration, one of its ``sizes``.
        seed: of torch's generator; the global random state is left as it was.

    Raises:
        InputError: the sizes make no model, or the seed is no integer.

    >>> from t5accel.models.bart import FAMILY
    >>> sizes = dict(d_model=8, vocab_size=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2)
    >>> random_model(FAMILY, dict(sizes, decoder_attention_heads=2)).generation_config.forced_eos_token_id
    2
    """
    import torch
    import transformers

    if not isinstance(sizes, Mapping) or not hasattr(seed, "__index__") or not 0 <= operator.index(seed) < 2**63:
        raise InputError(f"sizes is {sizes!r:.200}, seed {seed!r}; give keyword arguments, and an integer from 0 on.")
    model_class = getattr(transformers, family.model_class)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(operator.index(seed))  # torch.manual_seed would also seed the GPUs
        try:
            config = model_class.config_class(**{"dropout": 0.0, "attention_dropout": 0.0, **sizes})
            model = model_class(config).eval()
        except Exception as error:  # of many kinds
            raise InputError(f"These sizes make no {family.model_class}: {error}") from error
        _enliven(model, silent_pad="bad_words_ids" not in family.generation)
    special = {"pad": config.pad_token_id, "eos": config.eos_token_id, "pads": [[config.pad_token_id]]}
    for name, value in family.generation.items():
        setattr(model.generation_config, name, special[value])
    return model


def _enliven(model: PreTrainedModel, *, silent_pad: bool) -> None:
    import torch

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
