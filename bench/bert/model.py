"""Load a BERT for questions: the bundled reader, random weights, or a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.results import DATA
from t5accel.errors import InputError, ModelUnavailableError, UnknownModelError
from t5accel.models.load import load_pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

READER, PRUNED = "mini-bert", "mini-bert-pruned"  # folders under data/
RANDOM_SIZES: dict[str, dict[str, int]] = {
    "bert-base": {},  # the configuration's own defaults (Devlin et al. 2019)
    "bert-large": dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096),
}


def load_bert(
    name: str | os.PathLike[str] = READER, *, seed: int = 0
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """A ``BertForQuestionAnswering`` in fp32 and evaluation mode, and its tokenizer (``None`` for random weights).

    Args:
        name: ``"mini-bert"``, ``"mini-bert-pruned"``, ``"random:bert-base"``, ``"random:bert-large"``, or a folder
            that ``save_pretrained`` wrote.
    """
    from safetensors.torch import load_file
    from transformers import AutoTokenizer, BertConfig

    text = os.fspath(name)
    if text.startswith("random:"):
        size = text.removeprefix("random:")
        if size not in RANDOM_SIZES:
            raise UnknownModelError(f"The random size must be one of {', '.join(RANDOM_SIZES)}, got {size!r}.")
        return random_bert(RANDOM_SIZES[size], seed=seed), None
    folder = DATA / text if text in (READER, PRUNED) else Path(text)
    if text in (READER, PRUNED) and not folder.is_dir():
        raise ModelUnavailableError(f"{text!r} is not bundled here: training/reader.py trains it, in a checkout.")
    if not folder.is_dir():
        sizes = ", ".join(f"'random:{size}'" for size in RANDOM_SIZES)
        raise UnknownModelError(f"The BERT must be {READER!r}, {PRUNED!r}, {sizes}, or a folder, got {text!r}.")
    if not (folder / "model.safetensors").is_file():
        raise ModelUnavailableError(f"{folder} must hold model.safetensors, got none: give a save_pretrained() folder.")
    config = BertConfig.from_pretrained(folder)
    model = _new(config)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    has_tokenizer = (folder / "tokenizer.json").is_file()
    return model.eval(), load_pretrained(AutoTokenizer.from_pretrained, folder) if has_tokenizer else None


def random_bert(sizes: Mapping[str, Any], *, seed: int = 0) -> PreTrainedModel:
    """A seeded ``BertForQuestionAnswering``; for speed, since what it answers means nothing.

    Args:
        sizes: arguments of ``BertConfig``, and ``layer_widths`` where layers are to be narrower; see `resize`.

    >>> tiny = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    >>> random_bert(tiny).config.num_hidden_layers
    2
    """
    import torch
    from transformers import BertConfig

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return _new(BertConfig(**sizes)).eval()


def _new(config: Any) -> PreTrainedModel:
    from transformers import BertForQuestionAnswering

    model = BertForQuestionAnswering(config)
    if sizes := getattr(config, "layer_widths", None):
        resize(model, sizes)
    return model


def threshold_of(model: PreTrainedModel) -> float:
    """By how much no answer has to score higher than the best span for this reader to abstain; 0 where it says none."""
    return float(getattr(model.config, "null_score_diff_threshold", 0.0))


def widths(model: PreTrainedModel) -> dict[str, list[int]]:
    """The heads and the feed-forward neurons of each layer, read off the weights."""
    size = model.config.hidden_size // model.config.num_attention_heads
    layers = model.bert.encoder.layer
    return {
        "heads": [layer.attention.self.query.out_features // size for layer in layers],
        "neurons": [layer.intermediate.dense.out_features for layer in layers],
    }


def resize(model: PreTrainedModel, sizes: Mapping[str, Sequence[int]]) -> None:
    """Give every layer new matrices of these widths, in place; their values are not set.

    Raises ``InputError`` unless there is a count of 1 or more for each layer, under "heads" and "neurons".
    """
    import torch

    hidden, layers = model.config.hidden_size, model.bert.encoder.layer
    size = hidden // model.config.num_attention_heads
    for kind in ("heads", "neurons"):
        given = sizes.get(kind, ())
        if len(given) != len(layers) or min(given, default=0) < 1:
            raise InputError(f"{kind} must be {len(layers)} counts of 1 or more, got {list(given)}.")
    for layer, heads, neurons in zip(layers, sizes["heads"], sizes["neurons"], strict=True):
        attention = layer.attention.self
        for name in ("query", "key", "value"):
            setattr(attention, name, torch.nn.Linear(hidden, heads * size))
        layer.attention.output.dense = torch.nn.Linear(heads * size, hidden)
        attention.num_attention_heads, attention.all_head_size = heads, heads * size
        layer.intermediate.dense = torch.nn.Linear(hidden, neurons)
        layer.output.dense = torch.nn.Linear(neurons, hidden)
    model.config.layer_widths = {kind: list(sizes[kind]) for kind in ("heads", "neurons")}
