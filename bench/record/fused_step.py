"""Time the fused step beside the portable graph, whose history grows: greedy and beams, three precisions.

Answers of forced length to sources that were encoded beforehand, interleaved with a second portable engine as a
control. In fp32 the tokens are equal. In integers what is multiplied is rounded at each step, so the least difference
in floats may choose another token: there the logits of given tokens are compared, and may differ by no more than twice
what the portable graph differs from itself when it is optimised less. `data/results/fused-step.json`
is a recorded run:

    python -m bench.record.fused_step --json data/results/fused-step.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.harness import Way, measured
from bench.results import Row, write_rows
from t5accel import machine
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.ort_static import OrtStatic
from t5accel.decoding.beam import beam_search
from t5accel.decoding.greedy_search import greedy
from t5accel.graphs.export_cache import cached_export
from t5accel.timing import Work

MODEL, SOURCE = "random:t5-small", 64
CELLS = ((1, 64, 1), (1, 256, 1), (8, 64, 1), (8, 256, 1), (32, 64, 1), (1, 64, 4))  # batch, new tokens, beams
CONTROL = "portable graph, again"


class Encoded:
    """A backend whose ``encode`` returns what it has returned before: what is timed is the decoder."""

    def __init__(self, backend: OrtNumpy, ids: np.ndarray):
        self.backend, self.source = backend, backend.encode(ids, np.ones_like(ids))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> Any:
        return self.source


def cell_rows(precision: str, cell: tuple[int, int, int], rounds: int, model: str = MODEL) -> list[Row]:
    """One row each of the portable graph, of the same again, and of the fused step."""
    batch, new, beams = cell
    folder = cached_export(model, precision=precision)
    opened = {kind: kind(folder, settings=_settings()) for kind in (OrtNumpy, OrtStatic)}
    ids = np.random.default_rng(1).integers(3, opened[OrtNumpy].vocab_size, (batch, SOURCE))

    def ready(kind: type[OrtNumpy]) -> Callable[[], np.ndarray]:
        backend, bounds = Encoded(opened[kind], ids), dict(min_new_tokens=new, max_new_tokens=new)
        if beams > 1:
            return lambda: beam_search(backend, ids, num_beams=beams, **bounds).sequences
        return lambda: greedy(backend, ids, **bounds).sequences

    error, allowed = _errors(folder, opened)
    same = precision == "fp32"
    facts = {"error": error, "allowed_error": allowed}
    ways = [
        Way("portable graph", partial(ready, OrtNumpy)),
        Way(CONTROL, partial(ready, OrtNumpy)),
        Way("fused step", partial(ready, OrtStatic), exact=same, facts=facts),
    ]
    work = Work(batch, SOURCE, new, beams=beams, threads=machine.cpu_threads())
    return measured(ways, work, rounds=rounds, model=model, precision=precision, encoder="beforehand")


def _settings(level: str = "all") -> SessionSettings:
    return SessionSettings(graph_optimization=level)


def _errors(folder: Path, opened: dict[type[OrtNumpy], OrtNumpy]) -> tuple[float, float]:
    """How far the fused step's logits are from the portable graph's, and how far they may be."""
    portable, fused = opened[OrtNumpy], opened[OrtStatic]
    rng = np.random.default_rng(2)
    source = portable.encode(rng.integers(3, portable.vocab_size, (4, SOURCE)), np.ones((4, SOURCE), dtype=np.int64))
    tokens = rng.integers(3, portable.vocab_size, (4, 1, 24))

    def logits(backend: OrtNumpy) -> np.ndarray:
        state = backend.new_state(source)
        return np.concatenate([backend.step(state, tokens[:, :, i : i + 1]) for i in range(24)], axis=2)

    expected = logits(portable)
    less = logits(OrtNumpy(folder, settings=_settings("basic"), verify=False))
    error, other = (
        float(np.linalg.norm(found - expected) / np.linalg.norm(expected)) for found in (logits(fused), less)
    )
    allowed = 2 * max(other, 1e-6)
    if not error <= allowed:
        raise SystemExit(f"{folder}: the fused step's logits are off by {error:.2g}, and {allowed:.2g} is allowed.")
    return error, allowed


def rows(precisions: list[str], rounds: int) -> Iterator[Row]:
    """All cells of all precisions."""
    with tqdm(total=len(precisions) * len(CELLS), unit="cell") as bar:
        for precision in precisions:
            for cell in CELLS:
                yield from cell_rows(precision, cell, rounds)
                bar.update()


def line(row: Row) -> str:
    """A row as it is printed: how many times as fast as the portable graph, and over which rounds."""
    cell = f"{row['batch']} × {row['new_tokens']}" + (f", {row['beams']} beams" if row["beams"] > 1 else "")
    samples = row["ratio_samples"]
    spread = f"({min(samples):.2f}-{max(samples):.2f})"
    return f"{row['precision']:5} {cell:16} {row['system']:22} {row['ratio']:5.2f}x {spread}"


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--precision", nargs="*", default=["fp32", "int8", "int4"])
    arguments = parser.parse_args()
    found = []
    for row in rows(arguments.precision, arguments.rounds):
        found.append(row)
        print(line(row))
    if arguments.json:
        write_rows(arguments.json, found, command=f"python -m bench.record.fused_step --rounds {arguments.rounds}")


if __name__ == "__main__":
    main()
