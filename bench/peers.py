"""Our engine and its peers on one grid: equal tokens first, then interleaved.

Peers need environments that exclude each other, so each runs in a worker (``bench/peer_worker.py``) that stays loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Way, measured, pairwise
from bench.results import Row, aligned, step_ms
from t5accel.backends.ort_memory import TOKENS
from t5accel.errors import PeerError
from t5accel.precision.recipes import RECIPES
from t5accel.timing import Work

REFERENCE = "transformers 4.57"
# Fewer new tokens where a step is longer, so that the whole grid stays within an hour on two cores.
GRID = tuple(
    Work(batch, source, tokens, beams)
    for batch, tokens in ((1, 64), (8, 32), (32, 16))
    for source in (32, 128, 512)
    for beams in (1, 4)
)
QUICK = tuple(cell for cell in GRID if cell.batch == 1 and cell.source_tokens < 512)


def cell_label(cell: Work) -> str:
    """A cell of the grid in words."""
    return f"batch {cell.batch}, source {cell.source_tokens}, beams {cell.beams}"


@dataclass(frozen=True)
class System:
    """Something that generates."""

    name: str  # what a reader calls it
    engine: str  # what ``bench/peer_worker.py`` calls it
    environment: str  # the name of its list of packages under ``requirements/peers/``; ours run in the project's own
    precision: str = "fp32"  # of ours the recipe's name; of others that of the weights and of the arithmetic
    cells: Callable[[Work], bool] = lambda _: True  # those that it takes part in

    @property
    def ours(self) -> bool:
        return self.environment == "ours"


OURS, OURS_GENERATE, OURS_EXACT = "t5accel", "t5accel, generate()", "t5accel, all logits"
OURS_OPENVINO = "t5accel, OpenVINO's encoder"
OURS_INT8, OURS_INT8_THROUGHPUT, OURS_INT4 = "t5accel int8", "t5accel int8 for throughput", "t5accel int4"
OPTIMUM = "optimum-onnx"
SYSTEMS = (
    System(REFERENCE, "eager", "transformers4"),
    System("transformers 5", "eager", "transformers5"),
    # A new shape is a new compilation of a minute: one cell shows what it brings.
    System("torch.compile, static cache", "compiled", "transformers4",
           cells=lambda cell: (cell.batch, cell.source_tokens, cell.beams) == (1, 128, 1)),
    System(OPTIMUM, "optimum-onnx", "optimum"),
    System("OpenVINO", "openvino", "openvino"),
    System("CTranslate2", "ctranslate2", "ctranslate2"),
    System("torch dynamic int8", "dynamic-int8", "transformers4", "int8"),
    System("optimum-onnx int8", "optimum-onnx-int8", "optimum", "int8"),
    System("OpenVINO int8", "openvino-int8", "openvino", "int8"),
    System("CTranslate2 int8", "ctranslate2-int8", "ctranslate2", "int8"),
    System(OURS, "ours", "ours"),
    System(OURS_GENERATE, "ours-generate", "ours"),
    System(OURS_EXACT, "ours-exact", "ours", cells=lambda cell: cell.beams == 1),  # beams have no shortlist
    # Smaller batches it leaves to the encoder of the others.
    System(OURS_OPENVINO, "ours-openvino", "ours", cells=lambda cell: cell.batch * cell.source_tokens > TOKENS),
    System(OURS_INT8, "ours-int8", "ours", "int8"),
    System(OURS_INT8_THROUGHPUT, "ours-int8-dynamic", "ours", "int8-dynamic"),
    System(OURS_INT4, "ours-int4", "ours", "int4"),
)  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """What is measured: models times cells, by systems."""

    models: tuple[str, ...]  # names that `models.load.load_model` knows
    cells: tuple[Work, ...]  # of each model, but for those that a system leaves out
    quick: tuple[Work, ...]  # a corner of it, for a few minutes
    # of systems by name. Those of one group are loaded and interleaved together, each with the reference in front: as
    # many as the largest model leaves memory for. By default all systems are one group
    groups: tuple[tuple[str, ...], ...] = ((),)
    environments: Mapping[str, str] = field(default_factory=dict)  # in place of those that systems have elsewhere

    def systems(self, wanted: Sequence[str] | None = None) -> list[list[System]]:
        """The systems of each group, or of these the ``wanted`` ones; the reference is the first in any case."""
        groups = [group or tuple(system.name for system in SYSTEMS) for group in self.groups]
        chosen = [{name for name in group if not wanted or name in wanted} - {REFERENCE} for group in groups]
        moved = [replace(one, environment=self.environments.get(one.environment, one.environment)) for one in SYSTEMS]
        return [[system for system in moved if system.name in (REFERENCE, *names)] for names in chosen if names]


GRIDS = {
    "cpu": Grid(("random:t5-small",), GRID, QUICK),
    "families": Grid(
        tuple(f"random:{size}" for size in ("opus-mt", "bart-base", "mt5-small", "pegasus-large",
                                            "nllb-200-distilled-600M")),
        tuple(Work(batch, 128, tokens, beams) for batch, tokens in ((1, 64), (8, 32)) for beams in (1, 4)),
        (Work(1, 128, 64),),
        ((OPTIMUM, "OpenVINO", "CTranslate2", OURS, OURS_EXACT),
         ("optimum-onnx int8", "OpenVINO int8", "CTranslate2 int8", OURS_INT8, OURS_INT8_THROUGHPUT)),
        {"openvino": "openvino4"},
    ),
}  # fmt: skip
Generate = Callable[[np.ndarray, Work], np.ndarray]  # from input_ids (B, S) to the new tokens (B, L)


class Worker:
    """One system in a process of its own, loaded and waiting."""

    def __init__(self, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None):
        self.log = log
        self._name = " ".join(Path(part).name for part in command[:3])  # without the paths of this machine
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env={**os.environ, **(environment or {})},
            )  # fmt: skip
        self.versions: dict[str, str] = self._read()["versions"]

    def __call__(self, ids: np.ndarray, cell: Work) -> np.ndarray:
        """The new tokens (B, L) for ``ids`` (B, S). Raises ``PeerError`` if the system fails."""
        asked = {"ids": ids.tolist(), "new_tokens": cell.new_tokens, "beams": cell.beams}
        try:
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:  # it has ended, perhaps for want of memory
            self.process.wait()
            raise PeerError(f"{self._name} ended with exit status {self.process.returncode}.") from error
        return np.array(self._read()["tokens"])

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _read(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": self.log.read_text(errors="replace")[-2000:]}
        if "error" in answer:
            raise PeerError(f"{self._name} failed:\n{answer['error']}")
        return answer


def measure_cell(
    cell: Work, systems: Mapping[System, Generate], *, rounds: int, model: str, threads: int | None = None,
    seed: int = 0,
) -> list[Row]:  # fmt: skip
    """A row for each system in one cell; one that fails, before or while it is timed, has no time and says why.

    The first of ``systems`` is the reference: where it fails, ``PeerError`` is raised. ``seed`` draws the sources; else
    as `harness.measured`.
    """
    ids = np.random.default_rng(seed).integers(3, 32_000, (cell.batch, cell.source_tokens))

    def way(system: System, generate: Generate) -> Way:
        facts = {"precision": system.precision}
        facts |= {"recipe_hash": RECIPES[system.precision].hash} if system.ours else {}
        return Way(system.name, lambda: partial(generate, ids, cell), exact=False, facts=facts)

    about = {"model": model} | ({} if threads is None else {"threads": threads})
    ways = [way(*each) for each in systems.items()]
    return measured(ways, cell, rounds=rounds, keep_going=True, **about)


def cell_of(row: Mapping[str, Any]) -> Work:
    """The cell that a row was measured in."""
    return Work(*(row[name] for name in ("batch", "source_tokens", "new_tokens", "beams")))


def model_and_cell(row: Mapping[str, Any]) -> tuple[str, Work]:
    """The model and the cell that a row was measured in."""
    return row["model"], cell_of(row)


@dataclass(frozen=True)
class Standing:
    """How we stand in a cell: the peer that comes nearest, and its time over ours (above 1 we are faster)."""

    cell: Work
    peer: str
    ratio: float
    model: str = ""


def standings(
    rows: Sequence[Mapping[str, Any]],
    *,
    ours: str | Callable[[Work], str] = OURS,
    precision: str = "fp32",
    peers: Sequence[str] | None = None,
) -> Iterator[Standing]:
    """For each measured cell of each model the best peer of this precision, whether it is behind us or ahead.

    ``ours`` stands for us, in all cells or by cell; ``peers`` are by default all systems that are not ours.
    """
    mine = {system.name for system in SYSTEMS if system.ours}
    for model, cell in dict.fromkeys(map(model_and_cell, rows)):
        here = [row for row in rows if model_and_cell(row) == (model, cell)]
        names = [row["system"] for row in here if row["precision"] == precision and row["system"] not in mine]
        own = ours if isinstance(ours, str) else ours(cell)
        ratios = {name: pairwise(here, own, name) for name in names if peers is None or name in peers}
        if found := {name: ratio for name, ratio in ratios.items() if ratio is not None}:
            peer, ratio = min(found.items(), key=lambda pair: pair[1])
            yield Standing(cell, peer, ratio, model.removeprefix("random:"))


def int8_for(cell: Work) -> str:
    """Which of our ways with 8 bits stands for us in a cell: each batch has the one that it was tuned for.

    >>> int8_for(Work(1, 32, 64, beams=4)), int8_for(Work(8, 32, 32))
    ('t5accel int8', 't5accel int8 for throughput')
    """
    return OURS_INT8 if cell.batch == 1 else OURS_INT8_THROUGHPUT


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Milliseconds per step (new token of each sequence), a line for each cell; ``!`` marks what failed.

    A ``*`` marks fp32 systems whose tokens are not all the reference's.
    """
    names = list(dict.fromkeys(row["system"] for row in rows))
    cells = list(dict.fromkeys(map(cell_of, rows)))
    lines = [["cell", *names]]
    for cell in cells:
        here = {row["system"]: row for row in rows if cell_of(row) == cell}
        lines.append([cell_label(cell), *(_per_step(here[name]) if name in here else "" for name in names)])
    return "\n".join(aligned(lines))


def _per_step(row: Mapping[str, Any]) -> str:
    if "latency_s" not in row:
        return "!" if "failed" in row else "–"  # alone, a system is not timed
    mark = "*" if row["precision"] == "fp32" and row["equal"] < row["of"] else ""
    return f"{mark}{step_ms(row):.2f}"
