"""How large a model is, from its configuration alone: nothing is loaded, and the hub is not asked."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from t5accel.checkpoints import BUNDLED, HUB_ALIASES, T5Dims, allowed_names, data_folder
from t5accel.errors import InputError, ModelUnavailableError, UnknownModelError
from t5accel.graphs.contract import MANIFEST
from t5accel.lively import RANDOM_SIZES
from t5accel.machine import decoder_weights_per_step

# Published checkpoints that have the shapes of RANDOM_SIZES.
PUBLISHED = {f"{'google-t5' if size.startswith('t5') else 'google'}/{size}": size for size in RANDOM_SIZES}


def weights_per_step(name: str) -> int | None:
    """How many decoder weights a step of a model reads (`machine.decoder_weights_per_step`), by the model's name.

    Args:
        name: as `checkpoints.load_t5` knows it. A hub id is known if its sizes are published ones of ``RANDOM_SIZES``,
            or if its configuration was downloaded before.

    Returns:
        The number, or ``None`` for a hub id whose configuration is not on this machine.

    Raises:
        UnknownModelError: the name is no model's.
        ModelUnavailableError: a folder has no configuration, or an incomplete one.
        NotT5Error: the configuration is of another kind.
        InputError: the folder is an export.

    >>> weights_per_step("mini"), weights_per_step("google-t5/t5-small") == weights_per_step("random:t5-small")
    (5209344, True)
    """
    config = _config(name)
    return None if config is None else decoder_weights(config, name)


def decoder_weights(config: Mapping[str, Any], name: str = "The configuration") -> int:
    """The same from a configuration as ``config.json`` holds it; ``layer_widths`` of a pruned model count.

    Raises:
        ModelUnavailableError: a size is missing or no positive integer; ``name`` is what the message calls it.
        NotT5Error: it is of another kind.

    >>> decoder_weights(RANDOM_SIZES["t5-small"])
    38479360
    """
    return decoder_weights_per_step(T5Dims.from_config(config, name))


def _config(name: str) -> Mapping[str, Any] | None:
    if name in BUNDLED:
        return _read(data_folder() / BUNDLED[name])
    if name.startswith("random:") and name.removeprefix("random:") in RANDOM_SIZES:
        return RANDOM_SIZES[name.removeprefix("random:")]
    if os.path.isdir(name):
        if (Path(name) / MANIFEST).is_file():
            raise InputError(f"{name} is an export: give the model that it was made from.")
        return _read(Path(name))
    hub_id = HUB_ALIASES.get(name, name)
    if hub_id in PUBLISHED:
        return RANDOM_SIZES[PUBLISHED[hub_id]]
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", hub_id, re.ASCII):
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(hub_id, "config.json")
        return _read(Path(found).parent) if isinstance(found, str) else None
    raise UnknownModelError(f"No model {name!r}. {allowed_names()}")


def _read(folder: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelUnavailableError(f"{folder} holds no config.json: give a folder of save_pretrained().") from error
    except ValueError as error:
        raise ModelUnavailableError(f"{folder / 'config.json'} cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise ModelUnavailableError(f"{folder / 'config.json'} is no configuration.")
    return config
