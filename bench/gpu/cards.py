"""The short name of a GPU, by which its file of results is called, and its clocks."""

from __future__ import annotations

import re

from t5accel.errors import InputError
from t5accel.machine import nvidia_smi

# Vendors, product lines, memory sizes and form factors. What tells faster cards from slower ones stays: PCIe, NVL, Ti.
_DROPPED = re.compile(r"nvidia|amd|tesla|geforce|quadro|radeon|instinct|graphics|gpu|generation|\d+gb|hbm\d*e?|sxm\d*")


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
        raise InputError(f"The GPU's name is {name!r}; give the name that torch reports, such as 'NVIDIA H200'.")
    return found


def gpu_clocks_mhz() -> dict[str, int]:
    """The GPU's current clocks, ``{"sm", "memory"}`` in MHz, so ask under load; empty if unknown."""
    found = nvidia_smi("clocks.sm", "clocks.mem")
    return {name: int(value) for name, value in zip(("sm", "memory"), found, strict=False) if value.isdigit()}
