"""GPUs by name: short name, memory bandwidth, and the recorded runs, one file per card."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.results import DATA
from t5accel.errors import InputError
from t5accel.machine import nvidia_smi

# Vendors, product lines, memory sizes and form factors. What tells faster cards from slower ones stays: PCIe, NVL, Ti.
_DROPPED = re.compile(r"nvidia|amd|tesla|geforce|quadro|radeon|instinct|graphics|gpu|generation|\d+gb|hbm\d*e?|sxm\d*")

# Bytes per second, from the makers' datasheets; nothing here is measured.
DATASHEET = {
    "h200": 4.8e12, "h100": 3.35e12, "h100-nvl": 3.9e12, "h100-pcie": 2.0e12, "a100": 1.555e12, "a100-pcie": 1.555e12,
    "v100": 900e9, "v100-pcie": 900e9, "l40s": 864e9, "l4": 300e9, "a10": 600e9, "t4": 320e9, "rtx-4090": 1.008e12,
}  # fmt: skip
_WITH_80_GB = {"a100": 2.039e12, "a100-pcie": 1.935e12}  # sold under the same name as those with 40 GB


def slug(name: str) -> str:
    """The short name of a card, by which its files are called.

    ``name`` is what torch or the driver reports. Raises ``InputError`` where it has no letter or digit.

    >>> slug("NVIDIA H100 80GB HBM3"), slug("NVIDIA H100 PCIe"), slug("NVIDIA A100-SXM4-40GB")
    ('h100', 'h100-pcie', 'a100')
    >>> slug("Tesla T4"), slug("NVIDIA GeForce RTX 4090"), slug("NVIDIA L40S")
    ('t4', 'rtx-4090', 'l40s')
    """
    words = [word for word in re.split(r"[\s_-]+", name.lower()) if word]
    kept = [word for word in words if not _DROPPED.fullmatch(word)] or words
    found = re.sub(r"[^a-z0-9]+", "-", " ".join(kept)).strip("-")
    if not found:
        raise InputError(f"The GPU's name must be that which torch reports, such as 'NVIDIA H200', got {name!r}.")
    return found


def bandwidth(gpu: Mapping[str, Any]) -> float | None:
    """The theoretical memory bandwidth of a recorded card, in bytes per second; ``None`` for one without a datasheet.

    ``gpu`` is ``machine["gpu"]`` of a file of results. The driver's own figure, ``bus_bytes_per_s``, goes first.

    >>> bandwidth({"name": "NVIDIA H200"}), bandwidth({"name": "an unknown card"})
    (4800000000000.0, None)
    """
    if gpu.get("bus_bytes_per_s"):
        return float(gpu["bus_bytes_per_s"])
    card = slug(gpu["name"])
    if card in _WITH_80_GB and (gpu.get("memory_bytes") or 0) > 60e9:
        return _WITH_80_GB[card]
    return DATASHEET.get(card)


def recorded_cards(folder: str | os.PathLike[str] | None = None) -> dict[str, dict[str, Any]]:
    """The content of every ``gpu-<card>.json`` in a folder, by default ``data/results``, that bears its card's name.

    Others, such as runs that were put aside, are left out.
    """
    folder = Path(folder) if folder is not None else DATA / "results"
    cards = {}
    for path in sorted(folder.glob("gpu-*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        gpu = record["machine"].get("gpu")
        if gpu and path.stem == f"gpu-{slug(gpu['name'])}":
            cards[slug(gpu["name"])] = record
    return cards


def gpu_clocks_mhz() -> dict[str, int]:
    """The GPU's current clocks, ``{"sm", "memory"}`` in MHz, so ask under load; empty if unknown."""
    found = nvidia_smi("clocks.sm", "clocks.mem")
    return {name: int(value) for name, value in zip(("sm", "memory"), found, strict=False) if value.isdigit()}
