"""What the GPU suite measures, in the order of what matters most: a run that is cut short has the first cells."""

from __future__ import annotations

from dataclasses import dataclass

from bench.systems import (
    BOUND,
    CAPTURED,
    COMPILED,
    FED,
    GRAPH,
    KERNEL,
    NAIVE,
    RECOMPUTE,
    REFERENCE,
    STATIC,
    TENSORRT,
)

SMALL = "random:t5-small"
HAS_BF16 = (8, 0)  # compute capability from which bf16 is arithmetic of the card's own: not on a T4, which is (7, 5)


@dataclass(frozen=True)
class Cell:
    """One comparison; the first system is the reference.

    Attributes:
        measured: ``"equality"``, ``"speed"``, ``"floor"`` or ``"compile"``.
        least_s: it is not begun with less time left.
    """

    name: str
    measured: str
    model: str = SMALL
    dtype: str = "bfloat16"
    systems: tuple[str, ...] = (REFERENCE, STATIC, GRAPH)
    batch: int = 1
    source_tokens: int = 64
    new_tokens: int = 128
    beams: int = 1
    least_s: float = 15.0


ON_TORCH = (REFERENCE, NAIVE, STATIC, GRAPH, RECOMPUTE)
RUNTIMES = (FED, BOUND, CAPTURED, TENSORRT)
LENGTHS = (16, 64, 256, 512)  # at which the claim about the cache is tested


def cells_for(capability: tuple[int, int] | None) -> tuple[Cell, ...]:
    """All cells for a card of this compute capability; without bf16 of its own fp16 leads, and no cell is in bf16.

    >>> sorted({cell.dtype for cell in cells_for((7, 5))}), cells_for((9, 0))[1].dtype
    (['float16', 'float32'], 'bfloat16')
    """
    lead = "bfloat16" if capability is None or tuple(capability) >= HAS_BF16 else "float16"

    def cell(name: str, measured: str = "speed", **more: object) -> Cell:
        return Cell(name, measured, **{"dtype": lead, **more})

    def runtimes(dtype: str, *ours: str) -> tuple[Cell, ...]:
        proven = (REFERENCE, *ours, *RUNTIMES)
        return (
            cell(f"equality of runtimes, {dtype}", "equality", dtype=dtype, systems=proven, batch=4, new_tokens=48,
                 least_s=30),
            cell(f"runtimes, {dtype}", dtype=dtype, systems=(REFERENCE, GRAPH, *RUNTIMES), least_s=30),
        )  # fmt: skip

    compiled = (REFERENCE, GRAPH, COMPILED)
    return (
        cell("equality, float32", "equality", dtype="float32", systems=ON_TORCH, batch=4, new_tokens=48),
        cell(f"equality, {lead}", "equality", systems=ON_TORCH, batch=4, new_tokens=48),
        cell("t5-small"),
        cell("t5-small, floor", "floor"),
        cell("equality of the own kernel", "equality", systems=(REFERENCE, GRAPH, KERNEL), batch=4, new_tokens=48),
        cell("t5-small, own kernel", systems=(REFERENCE, GRAPH, KERNEL)),
        # Of one shape, (1, 1, 64, 64), and so compiled once for both.
        cell("equality of the compiled step", "equality", systems=compiled, new_tokens=48, least_s=120),
        cell("t5-small, torch.compile", "compile", systems=compiled, new_tokens=64, least_s=30),
        *(cell(f"cache, {length} tokens", systems=(REFERENCE, NAIVE, RECOMPUTE, GRAPH), new_tokens=length)
          for length in LENGTHS),
        cell("t5-base", model="random:t5-base", new_tokens=64),
        cell("flan-t5-large", model="random:flan-t5-large", new_tokens=64, least_s=40),
        cell("t5-small, batch 8", batch=8, new_tokens=64),
        cell("t5-small, batch 64", batch=64, new_tokens=64),
        cell("t5-small, 4 beams", beams=4, new_tokens=64),
        cell("t5-small, source 512", source_tokens=512, new_tokens=64),
        # Late, for an error on the device leaves nothing to go on with in this process.
        *runtimes("float32"),
        *runtimes("float16", STATIC, GRAPH),
    )  # fmt: skip
