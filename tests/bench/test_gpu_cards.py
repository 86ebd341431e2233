"""GPUs by name, on made-up files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.cards import DATASHEET, bandwidth, recorded_cards, slug
from t5accel.errors import InputError


@pytest.mark.parametrize(("name", "expected"), [
    ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA H100 NVL", "h100-nvl"),
    ("NVIDIA H200", "h200"), ("NVIDIA H20", "h20"), ("Tesla T4", "t4"), ("NVIDIA T4", "t4"),
    ("NVIDIA A100-SXM4-40GB", "a100"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA A100 80GB PCIe", "a100-pcie"),
    ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090-laptop"),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx-4070-ti-super"), ("NVIDIA L40S", "l40s"), ("NVIDIA L4", "l4"),
    ("NVIDIA A10", "a10"), ("NVIDIA A10G", "a10g"), ("Tesla V100-SXM2-16GB", "v100"),
    ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"), ("AMD Instinct MI300X", "mi300x"),
    ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "h100-mig-3g-40gb"), ("NVIDIA Graphics", "nvidia-graphics"),
])  # fmt: skip
def test_slug(name: str, expected: str) -> None:
    assert slug(name) == expected


def test_bandwidth_is_the_driver_s_then_the_datasheet_s() -> None:
    assert bandwidth({"name": "NVIDIA H100 80GB HBM3"}) == DATASHEET["h100"] == 3.35e12
    assert bandwidth({"name": "NVIDIA H100 PCIe"}) == 2.0e12
    assert bandwidth({"name": "NVIDIA H200", "bus_bytes_per_s": 4.9e12}) == 4.9e12
    assert bandwidth({"name": "NVIDIA H200", "bus_bytes_per_s": None}) == 4.8e12
    assert bandwidth({"name": "NVIDIA A100-SXM4-40GB", "memory_bytes": 42_300_000_000}) == 1.555e12
    assert bandwidth({"name": "NVIDIA A100-SXM4-80GB", "memory_bytes": 85_100_000_000}) == 2.039e12
    assert bandwidth({"name": "NVIDIA H100 80GB HBM3 MIG 3g.40gb"}) is None, "a part of a card is not the card"
    with pytest.raises(InputError, match="name"):
        slug(" - ")


def test_recorded_cards_are_those_of_files_named_after_them(tmp_path: Path) -> None:
    assert recorded_cards(tmp_path) == {}
    for file, gpu in {
        "gpu-h200.json": {"name": "NVIDIA H200"}, "gpu-h100.json": {"name": "NVIDIA H100 80GB HBM3"},
        "gpu-h100-4f0-1700000000.json": {"name": "NVIDIA H100 80GB HBM3"},  # put aside
        "gpu-rehearsal.json": None, "scoreboard.json": {"name": "NVIDIA H200"},
    }.items():  # fmt: skip
        (tmp_path / file).write_text(json.dumps({"machine": {"gpu": gpu}, "commit": file, "rows": []}))
    cards = recorded_cards(tmp_path)
    assert {card: record["commit"] for card, record in cards.items()} == {
        "h100": "gpu-h100.json", "h200": "gpu-h200.json",
    }  # fmt: skip


def test_importing_it_is_light() -> None:
    asked = "import sys, bench.gpu.cards; print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
