"""What the GPU suite measures, in the order of what matters most: whoever has little time has the first cells."""

from __future__ import annotations

from dataclasses import dataclass

from t5accel.gpu.systems import (
    BOUND,
    CAPTURED,
    COMPILED,
    FED,
    GRAPH,
    NAIVE,
    RECOMPUTE,
    REFERENCE,
    STATIC,
    TENSORRT,
)

SMALL = "random:t5-small"


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
    floats: str = "bfloat16"
    systems: tuple[str, ...] = (REFERENCE, STATIC, GRAPH)
    batch: int = 1
    source_tokens: int = 64
    new_tokens: int = 128
    beams: int = 1
    least_s: float = 15.0


ON_TORCH = (REFERENCE, NAIVE, STATIC, GRAPH, RECOMPUTE)
RUNTIMES = (FED, BOUND, CAPTURED, TENSORRT)
LENGTHS = (16, 64, 256, 512)  # at which the claim about the cache is tested

CELLS = (
    Cell("equality, float32", "equality", floats="float32", systems=ON_TORCH, batch=4, new_tokens=48),
    Cell("equality, bfloat16", "equality", systems=ON_TORCH, batch=4, new_tokens=48),
    Cell("t5-small", "speed"),
    Cell("t5-small, floor", "floor"),
    *(Cell(f"cache, {length} tokens", "speed", systems=(REFERENCE, NAIVE, RECOMPUTE, GRAPH), new_tokens=length)
      for length in LENGTHS),
    Cell("t5-base", "speed", model="random:t5-base", new_tokens=64),
    Cell("flan-t5-large", "speed", model="random:flan-t5-large", new_tokens=64, least_s=40),
    Cell("t5-small, batch 8", "speed", batch=8, new_tokens=64),
    Cell("t5-small, batch 64", "speed", batch=64, new_tokens=64),
    Cell("t5-small, 4 beams", "speed", beams=4, new_tokens=64),
    Cell("t5-small, source 512", "speed", source_tokens=512, new_tokens=64),
    # Late, for an error on the device leaves nothing to go on with in this process.
    Cell("equality of runtimes, float32", "equality", floats="float32", systems=(REFERENCE, *RUNTIMES), batch=4,
         new_tokens=48, least_s=30),
    Cell("runtimes, float32", "speed", floats="float32", systems=(REFERENCE, GRAPH, *RUNTIMES), least_s=30),
    Cell("equality of runtimes, float16", "equality", floats="float16",
         systems=(REFERENCE, STATIC, GRAPH, *RUNTIMES), batch=4, new_tokens=48, least_s=30),
    Cell("runtimes, float16", "speed", floats="float16", systems=(REFERENCE, GRAPH, *RUNTIMES), least_s=30),
    Cell("t5-small, torch.compile", "compile", systems=(REFERENCE, GRAPH, COMPILED), least_s=120),
)  # fmt: skip
