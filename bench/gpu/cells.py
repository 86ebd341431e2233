"""What the GPU suite measures, in the order of what matters most: a run that is cut short has the first cells."""

from __future__ import annotations

from dataclasses import dataclass

from bench.systems import (
    BATCHES,
    BOUND,
    CAPTURED,
    COMPILED,
    DRAWN,
    EAGER,
    FED,
    FLIGHT,
    GRAPH,
    KERNEL,
    NAIVE,
    RECOMPUTE,
    REFERENCE,
    SMALL,
    STATIC,
    TENSORRT,
    THEIR_BATCHES,
    THEIR_DRAWS,
)

HAS_BF16 = (8, 0)  # compute capability from which bf16 is arithmetic of the card's own: not on a T4, which is (7, 5)


@dataclass(frozen=True)
class Cell:
    """One comparison; the first system is the reference.

    Attributes:
        measured: ``"equality"``, ``"speed"``, ``"floor"``, ``"compile"``, ``"draws"``, ``"requests"`` or
            ``"throughput"``.
        shortest_source: sources have from so many tokens to ``source_tokens``; ``None``: all have ``source_tokens``.
        rows: of a running batch.
        requests: that are answered in one run.
        rounds: of the timing, at most.
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
    shortest_source: int | None = None
    rows: int = 0
    requests: int = 0
    rounds: int = 5
    least_s: float = 15.0


ON_TORCH = (REFERENCE, NAIVE, STATIC, GRAPH, RECOMPUTE)
RUNTIMES = (FED, BOUND, CAPTURED, TENSORRT)
LENGTHS = (16, 64, 256, 512)  # at which the claim about the cache is tested
FAMILIES = ("bart-base", "opus-mt", "nllb-200-distilled-600M", "umt5-small", "byt5-small")
# By the rows of a running batch; transformers takes seconds, and does not depend on them.
IN_FLIGHT = {64: (THEIR_BATCHES, BATCHES, FLIGHT), 256: (BATCHES, FLIGHT)}
PUBLISHED_BATCHES = (32, 64, 128)

# Tokens a second, by batch. Published figures of another machine of the same make, and no measurement of ours.
PUBLISHED_BY = (
    "TensorRT-LLM's documentation of encoder-decoder models (2026): H100 80 GB, bf16, 260 to 440 source tokens, up to "
    "128 new ones"
)
PUBLISHED: dict[str, dict[str, tuple[float, ...]]] = {
    "flan-t5-xl": {
        "TensorRT-LLM, its PyTorch backend": (3312, 4184, 4768),
        "TensorRT-LLM, its former engines": (3153, 3863, 4601),
    },
    "bart-large": {
        "TensorRT-LLM, its PyTorch backend": (10662, 16209, 23518),
        "TensorRT-LLM, its former engines": (12611, 22007, 31544),
    },
}


def cells_for(capability: tuple[int, int] | None) -> tuple[Cell, ...]:
    """All cells for a card of this compute capability; without bf16 of its own fp16 leads, and no cell is in bf16.

    >>> sorted({cell.dtype for cell in cells_for((7, 5))}), cells_for((9, 0))[1].dtype
    (['float16', 'float32'], 'bfloat16')
    """
    lead = "bfloat16" if capability is None or tuple(capability) >= HAS_BF16 else "float16"
    pair = (REFERENCE, GRAPH)

    def cell(name: str, measured: str = "speed", **more: object) -> Cell:
        return Cell(name, measured, **{"dtype": lead, **more})

    def exactly(name: str, measured: str = "equality", **more: object) -> Cell:
        return cell(name, measured, **{"dtype": "float32", "systems": pair, "batch": 4, "new_tokens": 48, **more})

    def published(model: str) -> tuple[Cell, ...]:
        sizes = dict(model=f"random:{model}", source_tokens=440, shortest_source=260, rounds=3)
        # In fp32: random weights of that size amplify the rounding of 16 bits until nothing is left to compare.
        compared = exactly(f"equality, {model}, float32", model=f"random:{model}", new_tokens=16, least_s=40)
        # transformers stands beside one batch alone: it takes seconds.
        return (compared, *(cell(f"{model}, batch {batch}", "throughput", batch=batch, least_s=25,
                                 systems=pair if batch == 64 else (GRAPH,), **sizes)
                            for batch in PUBLISHED_BATCHES))  # fmt: skip

    def family(size: str) -> tuple[Cell, ...]:
        model = dict(model=f"random:{size}", new_tokens=32)
        ways = (REFERENCE, EAGER, GRAPH)
        return (exactly(f"equality, {size}, float32", systems=ways, **model),
                cell(size, systems=ways, rounds=3, **model))  # fmt: skip

    def runtimes(dtype: str, *ours: str) -> tuple[Cell, ...]:
        proven = (REFERENCE, *ours, *RUNTIMES)
        return (
            cell(f"equality of runtimes, {dtype}", "equality", dtype=dtype, systems=proven, batch=4, new_tokens=48,
                 least_s=30),
            cell(f"runtimes, {dtype}", dtype=dtype, systems=(REFERENCE, GRAPH, *RUNTIMES), least_s=30),
        )  # fmt: skip

    compiled = (REFERENCE, GRAPH, COMPILED)
    return (
        exactly("equality, float32", systems=ON_TORCH),
        exactly(f"equality, {lead}", dtype=lead, systems=ON_TORCH),
        cell("t5-small"),
        exactly("equality of beams", beams=4),
        cell("t5-small, 4 beams", beams=4, new_tokens=64, systems=pair),
        cell("t5-small, 8 x 4 beams", batch=8, beams=4, new_tokens=64, systems=pair),
        exactly("equality of draws", "draws", batch=1, new_tokens=3, systems=(THEIR_DRAWS, DRAWN)),
        cell("t5-small, sampling", new_tokens=64, systems=(THEIR_DRAWS, DRAWN)),
        exactly("equality in flight", batch=24, systems=(REFERENCE, FLIGHT)),
        *(cell(f"in flight, {rows} rows", "requests", systems=ways, batch=64, rows=rows, requests=1280, rounds=3,
               least_s=25) for rows, ways in IN_FLIGHT.items()),
        *published("flan-t5-xl"),
        *published("bart-large"),
        *(one for size in FAMILIES for one in family(size)),
        cell("t5-small, batch 64", batch=64, new_tokens=64, systems=pair, rounds=3),
        cell("t5-base", model="random:t5-base", new_tokens=64, systems=pair, rounds=3),
        cell("flan-t5-large", model="random:flan-t5-large", new_tokens=64, systems=pair, rounds=3, least_s=25),
        cell("t5-small, floor", "floor"),
        cell("t5-small, batch 8", batch=8, new_tokens=64, systems=pair, rounds=3),
        cell("t5-small, source 512", source_tokens=512, new_tokens=64, systems=pair, rounds=3),
        cell("equality of the own kernel", "equality", systems=(*pair, KERNEL), batch=4, new_tokens=48),
        cell("t5-small, own kernel", systems=(*pair, KERNEL), rounds=3),
        *(cell(f"cache, {length} tokens", systems=(REFERENCE, NAIVE, RECOMPUTE, GRAPH), new_tokens=length, rounds=3)
          for length in LENGTHS),
        # Of one shape, (1, 1, 64, 64), and so compiled once for both.
        cell("equality of the compiled step", "equality", systems=compiled, new_tokens=48, least_s=120),
        cell("t5-small, torch.compile", "compile", systems=compiled, new_tokens=64, least_s=30),
        # Late, for an error on the device leaves nothing to go on with in this process.
        *runtimes("float32"),
        *runtimes("float16", STATIC, GRAPH),
    )  # fmt: skip
