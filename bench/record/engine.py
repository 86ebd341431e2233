"""Measure what the engine costs besides time per token: export, warm starts, memory, loops, imports, disk.

Run by `make bench`; `data/results/engine.json` is a recorded run. Each row says what was measured and in which unit.
``--only "warm start"`` measures a part.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from packaging.requirements import Requirement
from tqdm import tqdm

from bench.baselines.ort_iobinding import OrtBound
from bench.harness import Contender, run_comparison
from bench.results import Row, record_parser, write_rows
from t5accel import machine
from t5accel.api import accelerate
from t5accel.decoding.backend import Backend
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import InputError
from t5accel.graphs.export import export_model
from t5accel.graphs.export_cache import cached_export
from t5accel.models.load import load_model
from t5accel.timing import Work


def growth(resident_bytes: Sequence[int], settled_after: int) -> float:
    """The most memory after warming up over that at its end, less one: 0.05 is five per cent.

    >>> growth((80, 100, 101, 104, 102), settled_after=2)
    0.04
    """
    settled = resident_bytes[settled_after - 1 :]
    return round(max(settled) / settled[0] - 1, 6)


def soak(
    backend: Backend, *, generations: int, settled_after: int, largest_batch: int = 8,
    longest_source: int = 128, longest_answer: int = 32, seed: int = 0,
    on_generation: Callable[[], None] = lambda: None,
) -> list[int]:  # fmt: skip
    """Memory of this process after each greedy generation; batch, source and forced length are drawn anew for each.

    The largest of each is drawn before ``settled_after`` ends, so later generations need no more memory.
    """
    if generations <= settled_after:
        raise InputError(f"generations must be more than settled_after, {settled_after}, got {generations}.")
    if machine.resident_memory_bytes() is None:
        raise InputError("This system does not report the memory of a process. Install psutil.")
    rng = np.random.default_rng(seed)
    resident = []
    for number in range(generations):
        batch, source, answer = (
            int(rng.integers(1, most + 1)) for most in (largest_batch, longest_source, longest_answer)
        )
        if number == settled_after // 2:
            batch, source, answer = largest_batch, longest_source, longest_answer
        ids = rng.integers(3, backend.vocab_size, (batch, source))
        greedy(backend, ids, np.ones_like(ids), min_new_tokens=answer, max_new_tokens=answer)
        resident.append(machine.resident_memory_bytes() or 0)
        on_generation()
    return resident


SETTLED_AFTER = 200  # generations
EXPORTED = ("mini", "random:t5-small", "random:t5-base")
WAYS = {  # what each way of running the bundled model has to import, and the packages that a user installs for it
    "ONNX Runtime, numpy and tokenizers alone": (
        "from t5accel.backends.ort_numpy import OrtNumpy; from t5accel.decoding.greedy_search import greedy; "
        "from t5accel.tokenization import TokenizerFile; import onnxruntime, tokenizers",
        ("numpy", "onnxruntime", "tokenizers"),
    ),
    "torch and transformers": (
        "import torch; from transformers import AutoTokenizer, T5ForConditionalGeneration",
        ("torch", "transformers"),
    ),
}
THEIRS = "generate(), in transformers' loop"
STARTS = {  # a warm start, once all that it needs is imported: that is in `WAYS`
    "accelerate()": (
        "from t5accel.api import accelerate; import t5accel.backends.hf_generate, t5accel.backends.ort_static; "
        "import onnxruntime",
        "accelerate(name)",
    ),
    "open_backend(), without torch": (
        "from t5accel.api import open_backend; import t5accel.backends.ort_static, onnxruntime, tokenizers",
        "open_backend(name)",
    ),
}


def export_rows() -> list[Row]:
    """Seconds from a loaded model to a whole, flushed export."""
    rows = []
    for name in EXPORTED:
        model, tokenizer = load_model(name)
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            manifest = export_model(model, Path(folder) / "export", tokenizer=tokenizer, name=name)
            seconds = time.perf_counter() - started
        rows.append(
            {"measured": "export", "model": name, "seconds": round(seconds, 2), "size_bytes": manifest.size_bytes}
        )
    return rows


def start_rows(names: tuple[str, ...] = ("mini", "random:t5-small"), repeats: int = 5) -> list[Row]:
    """Seconds of a program's own work until a model answers whose export is kept, beyond imports; medians.

    By the clock, and of the processor, which other programs beside it change little.
    """
    rows = []
    for name in names:
        cached_export(name)
        for system, (imports, start) in STARTS.items():
            for cell, clock in (("by the clock", "perf_counter"), ("of the processor", "process_time")):
                program = f"{imports}; name = {name!r}; from time import {clock} as now; t = now(); {start}; "
                seconds = [_printed_seconds(program + "print(now() - t)") for _ in range(repeats + 1)][1:]
                rows.append({"measured": "warm start", "cell": cell, "system": system, "model": name,
                             "seconds": round(median(seconds), 3)})  # fmt: skip
    return rows


def soak_row(generations: int) -> Row:
    """How much the memory of a process grows while it generates with changing batch and lengths."""
    with tempfile.TemporaryDirectory() as folder, tqdm(total=generations, desc="soak", unit="gen") as bar:
        export_model("mini", Path(folder) / "export", external_threshold_bytes=0)
        resident = soak(OrtBound(Path(folder) / "export"), generations=generations, settled_after=SETTLED_AFTER,
                        on_generation=bar.update)  # fmt: skip
    return {
        "measured": "soak", "model": "mini", "backend": "backends.ort.bound",
        "growth": growth(resident, SETTLED_AFTER),
        "settings": {"generations": generations, "settled_after": SETTLED_AFTER},
        "resident_bytes": resident[SETTLED_AFTER - 1 :: max(1, generations // 20)],
    }  # fmt: skip


class TimedSession:
    """A session that adds up the seconds of its runs."""

    def __init__(self, session: Any):
        self.session, self.seconds = session, 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.session, name)
        if not name.startswith("run"):
            return found

        def timed(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return found(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


def overhead_rows(tokens: int = 64, rounds: int = 7) -> list[Row]:
    """Where a token's time goes: in the session, in our code around it, and in the loop around that.

    The same export, source and forced length behind our greedy loop and behind `generate()`, alternating; medians.
    `generate()` runs our loop where only tokens are asked for, and transformers' where more is.
    """
    import torch

    model = accelerate("random:t5-small", progress=False)
    ids = np.random.default_rng(0).integers(3, 32128, (1, 64))
    session = model.backend.fused.session = TimedSession(model.backend.fused.session)
    forward = 0.0
    original = model.forward

    def timed_forward(*arguments: Any, **options: Any) -> Any:
        nonlocal forward
        started = time.perf_counter()
        try:
            return original(*arguments, **options)
        finally:
            forward += time.perf_counter() - started

    def in_their_loop() -> np.ndarray:
        model.forward = timed_forward  # with which generate() would be theirs, too
        try:
            return model.generate(**tensors, **bounds, return_dict_in_generate=True).sequences[:, 1:].numpy()
        finally:
            del model.forward

    tensors = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.ones_like(torch.from_numpy(ids))}
    bounds = dict(min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False, num_beams=1)
    loops = {
        "greedy()": lambda: (
            greedy(model.backend, ids, np.ones_like(ids), min_new_tokens=tokens, max_new_tokens=tokens).sequences
        ),
        "generate()": lambda: model.generate(**tensors, **bounds)[:, 1:].numpy(),
        THEIRS: in_their_loop,
    }
    inner: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}

    def watched(name: str) -> Callable[[], np.ndarray]:
        def run() -> np.ndarray:
            nonlocal forward
            session.seconds = forward = 0.0
            found = loops[name]()
            inner[name].append((session.seconds, forward))
            return found

        return run

    ways = [Contender(name, partial(watched, name)) for name in loops]
    rows = []
    for row in run_comparison(ways, Work(1, 64, tokens), rounds=rounds):
        name = row["system"]
        parts = {"in all": row["latency_s"]}
        parts["in the decoder session"], parts["in our forward"] = zip(*inner[name][-rounds:], strict=True)
        for cell, column in parts.items():
            if any(column):  # our loop calls no forward
                micros = round(median(column) / tokens * 1e6)
                rows.append({"measured": "overhead", "cell": cell, "system": name, "model": "random:t5-small",
                             "new_tokens": tokens, "us_per_token": micros})  # fmt: skip
    return rows


def footprint_row(way: str) -> Row:
    """Import time in a fresh process, the median of five, and bytes of the packages that this way needs."""
    imports, packages = WAYS[way]
    seconds = [_import_seconds(imports) for _ in range(6)][1:]  # the first one fills the disk's cache
    needed = sorted(_with_dependencies(packages))
    return {
        "measured": "footprint", "system": way, "seconds": round(median(seconds), 3), "latency_s": seconds,
        "size_bytes": sum(_installed_bytes(name) for name in needed), "packages": needed,
    }  # fmt: skip


def _import_seconds(imports: str) -> float:
    return _printed_seconds(f"import time; t = time.perf_counter(); {imports}; print(time.perf_counter() - t)")


def _printed_seconds(program: str) -> float:
    return round(float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout), 4)


def _with_dependencies(packages: tuple[str, ...]) -> set[str]:
    found: set[str] = set()
    waiting = list(packages)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for text in metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name.lower().replace("_", "-"))
    return found


def _installed_bytes(name: str) -> int:
    files = (file.locate() for file in metadata.files(name) or [])
    return sum(path.stat().st_size for path in map(Path, files) if path.is_file())


def main() -> None:
    """Measure everything and write the rows."""
    parser = record_parser(__doc__)
    parser.add_argument("--generations", type=int, default=2000)
    parts = {
        "export": export_rows, "warm start": start_rows, "soak": lambda: [soak_row(options.generations)],
        "overhead": overhead_rows, "footprint": lambda: [*map(footprint_row, WAYS)],
    }  # fmt: skip
    parser.add_argument("--only", choices=parts)
    options = parser.parse_args()
    chosen = [options.only] if options.only else [*parts]
    rows = [row for name in chosen for row in parts[name]()]
    write_rows(options.json, rows, command=f"python -m bench.record.engine --generations {options.generations}")
    for row in rows:
        shown = {key: value for key, value in row.items() if not isinstance(value, list)}
        print(", ".join(f"{key} {value}" for key, value in shown.items()))


if __name__ == "__main__":
    main()
