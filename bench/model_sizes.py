"""Sizes of a model by its name, its folder or the hub's cache, from its configuration alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.roofline import decoder_weights_per_step
from t5accel.checks import as_count, read_json_object
from t5accel.errors import InputError, ModelUnavailableError, T5AccelError, UnknownModelError
from t5accel.graphs.contract import MANIFEST
from t5accel.models.families import BEYOND_T5, SIZES, family_of
from t5accel.models.load import BUNDLED, HUB_ALIASES, data_folder, hub_snapshot, known_model_names
from t5accel.models.random_init import RANDOM_SIZES, kind_of
from t5accel.models.sizes import T5Dims

OWNERS = ("google-t5/", "google/", "facebook/", "Helsinki-NLP/")  # whose models have the sizes that their names say


def weights_per_step(name: str) -> int | None:
    """How many decoder weights a step of a model reads, from its configuration alone: nothing is loaded or downloaded.

    Where the configuration of a hub id is not on this machine, the published size that its name begins with counts;
    ``None`` without one.
    """
    config = config_of(name)
    if config is None:
        return None
    kind = config.get("model_type", "t5")
    family_of(SimpleNamespace(model_type=kind), name)
    if kind not in BEYOND_T5:
        return decoder_weights_per_step(T5Dims.from_config(config, name))
    sizes = [config.get(key) for key in ("vocab_size", "d_model", "decoder_layers", "decoder_ffn_dim")]
    try:
        vocab_size, width, layers, inner = (as_count(size, "a size", at_least=1) for size in sizes)
    except InputError as error:
        raise ModelUnavailableError(f"{name} does not describe a {kind}: {error}") from error
    heads = (1,) * layers  # all of them, as one of the model's width
    return decoder_weights_per_step(
        SimpleNamespace(vocab_size=vocab_size, d_model=width, d_kv=width, gated=False, decoder_heads=heads,
                        cross_heads=heads, decoder_ff=(inner,) * layers)
    )  # fmt: skip


def config_of(name: str) -> Mapping[str, Any] | None:
    """The configuration of a model, or of the published size that its name begins with; raises as `weights_per_step`.

    >>> config_of("Helsinki-NLP/opus-mt-en-fr")["model_type"], config_of("someone/their-model")
    ('marian', None)
    """
    folder = data_folder() / BUNDLED[name] if name in BUNDLED else Path(name) if os.path.isdir(name) else None
    if folder := folder or hub_snapshot(name):
        if (folder / MANIFEST).is_file():
            raise InputError(f"{name} is an export, whose precision is fixed. Give the model that it was made from.")
        return read_json_object(folder / "config.json", ModelUnavailableError)
    hub_id = HUB_ALIASES.get(name, name)
    size = published_size(hub_id)
    if size is None and ("/" not in hub_id or hub_id.startswith("random:")):
        raise UnknownModelError(f"No model {name!r}. {known_model_names()}")
    if size in SIZES:
        family, sizes = SIZES[size]
        return {**sizes, "model_type": family.model_type}
    return None if size is None else {**RANDOM_SIZES[size], "model_type": kind_of(size)}


def published_size(name: str) -> str | None:
    """The published size that a name is of: exactly for random weights, by its beginning for a hub id."""
    if name.startswith("random:"):
        size = name.removeprefix("random:")
        return size if size in RANDOM_SIZES or size in SIZES else None
    owner, _, last = name.rpartition("/")
    fitting = [size for size in (*RANDOM_SIZES, *SIZES) if owner and f"{last}-".startswith(f"{size}-")]
    return max(fitting, key=len, default=None)


def guessed_size(name: str) -> str | None:
    """The published size that a model is taken for by its name alone, where that is no certainty."""
    hub_id = HUB_ALIASES.get(name, name)
    if name in BUNDLED or name.startswith("random:") or os.path.isdir(name) or hub_snapshot(name):
        return None
    size = published_size(hub_id)
    return None if size is None or hub_id in {owner + size for owner in OWNERS} else size


def family_name(name: str) -> str | None:
    """The family of a model, by transformers' name; ``None`` where it is unknown."""
    try:
        config = config_of(name)
        return config and family_of(SimpleNamespace(model_type=config.get("model_type", "t5")), name).model_type
    except T5AccelError:  # a folder of another machine, for one
        return None


def weights_or_none(model: str) -> int | None:
    """`weights_per_step`, or ``None`` where that raises, as for a folder of another machine."""
    try:
        return weights_per_step(model)
    except T5AccelError:
        return None
