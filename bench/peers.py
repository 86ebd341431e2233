"""Our engine and its peers on one grid, each in a worker process: their environments exclude each other."""

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

from bench.harness import Contender, paired_ratio, run_comparison
from bench.results import Row, format_table, step_ms
from t5accel.backends.ort_memory import SLICE_TOKENS
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
class PeerSystem:
    """A system of the grid."""

    name: str  # in rows
    engine: str  # in ``bench/peer_worker.py``
    environment: str  # its list of packages under ``requirements/peers/``; "ours": the project's own
    precision: str = "fp32"  # a recipe of ours; of others that of weights and arithmetic
    cells: Callable[[Work], bool] = lambda _: True  # the cells that it takes part in
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)  # for its rows

    @property
    def ours(self) -> bool:
        return self.environment == "ours"

    @property
    def facts(self) -> Row:
        """What its rows say of it beside its name."""
        found: Row = {"precision": self.precision}
        if self.ours:
            found["recipe_hash"] = RECIPES[self.precision].hash
        if self.settings:
            found["settings"] = dict(self.settings)
        return found


OURS, OURS_GENERATE, OURS_EXACT = "t5accel", "t5accel, generate()", "t5accel, all logits"
OURS_OPENVINO = "t5accel, OpenVINO's encoder"
OURS_INT8, OURS_INT8_THROUGHPUT, OURS_INT4 = "t5accel int8", "t5accel int8 for throughput", "t5accel int4"
OPTIMUM = "optimum-onnx"
BEAM_SEARCH, LLAMA_CPP, TRANSFORMERS_JS = "ONNX Runtime's BeamSearch", "llama.cpp", "transformers.js"


def _compiled(cell: Work) -> bool:
    """A new shape is a new compilation of a minute: one cell shows what it brings."""
    return (cell.batch, cell.source_tokens, cell.beams) == (1, 128, 1)


def _greedy(cell: Work) -> bool:
    return cell.beams == 1


def _one_text(cell: Work) -> bool:
    """llama.cpp has no beams, and is asked text by text."""
    return cell.batch == cell.beams == 1


PEERS = (
    PeerSystem(REFERENCE, "eager", "transformers4"),
    PeerSystem("transformers 5", "eager", "transformers5"),
    PeerSystem("torch.compile, static cache", "compiled", "transformers4", cells=_compiled),
    PeerSystem(OPTIMUM, "optimum-onnx", "optimum"),
    PeerSystem("OpenVINO", "openvino", "openvino"),
    PeerSystem("CTranslate2", "ctranslate2", "ctranslate2"),
    PeerSystem(BEAM_SEARCH, "beam-search", "onnxruntime-beam-search"),
    PeerSystem(LLAMA_CPP, "llama-cpp", "llama-cpp", cells=_one_text, settings={"weights": "F32"}),
    PeerSystem(TRANSFORMERS_JS, "transformers-js", "transformers-js", cells=_greedy, settings={"dtype": "fp32"}),
    PeerSystem("torch dynamic int8", "dynamic-int8", "transformers4", "int8"),
    PeerSystem("optimum-onnx int8", "optimum-onnx-int8", "optimum", "int8"),
    PeerSystem("OpenVINO int8", "openvino-int8", "openvino", "int8"),
    PeerSystem("CTranslate2 int8", "ctranslate2-int8", "ctranslate2", "int8"),
    PeerSystem(f"{BEAM_SEARCH} int8", "beam-search-int8", "onnxruntime-beam-search", "int8",
               settings={"weights": "int8 per channel", "activations": "uint8 per tensor"}),
    PeerSystem(f"{LLAMA_CPP} q8_0", "llama-cpp-int8", "llama-cpp", "int8", _one_text, {"weights": "Q8_0"}),
    PeerSystem(f"{TRANSFORMERS_JS} q8", "transformers-js-int8", "transformers-js", "int8", _greedy,
               {"dtype": "q8", "weights": "int8 per channel"}),
    PeerSystem("torchao int8, compiled", "torchao-int8-compiled", "torchao", "int8", _compiled,
               {"configuration": "Int8WeightOnlyConfig", "activations": "bf16", "cache": "static"}),
    PeerSystem("torchao int4, compiled", "torchao-int4-compiled", "torchao", "int4", _compiled,
               {"configuration": "PrototypeInt4WeightOnlyConfig", "group_size": 32, "activations": "bf16",
                "cache": "static"}),
    PeerSystem(OURS, "ours", "ours"),
    PeerSystem(OURS_GENERATE, "ours-generate", "ours"),
    PeerSystem(OURS_EXACT, "ours-exact", "ours", cells=lambda cell: cell.beams == 1),  # beams have no shortlist
    # Smaller batches it leaves to the encoder of the others.
    PeerSystem(
        OURS_OPENVINO, "ours-openvino", "ours", cells=lambda cell: cell.batch * cell.source_tokens > SLICE_TOKENS
    ),
    PeerSystem(OURS_INT8, "ours-int8", "ours", "int8"),
    PeerSystem(OURS_INT8_THROUGHPUT, "ours-int8-dynamic", "ours", "int8-dynamic"),
    PeerSystem(OURS_INT4, "ours-int4", "ours", "int4"),
)  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """Models times cells, by groups of systems."""

    models: tuple[str, ...]  # names that `models.load.load_model` knows
    cells: tuple[Work, ...]
    quick: tuple[Work, ...]  # a corner of it, for a few minutes
    # Systems of one group are loaded and interleaved together, behind the reference: as many as the largest model
    # leaves memory for. () is all systems.
    groups: tuple[tuple[str, ...], ...] = ((),)
    environments: Mapping[str, str] = field(default_factory=dict)  # replacements, by the systems' own ones
    reference: str = REFERENCE

    def systems(self, wanted: Sequence[str] | None = None) -> list[list[PeerSystem]]:
        """The (``wanted``) systems of each group, the reference first."""
        groups = [group or tuple(system.name for system in PEERS) for group in self.groups]
        chosen = [{name for name in group if not wanted or name in wanted} - {self.reference} for group in groups]
        moved = [replace(one, environment=self.environments.get(one.environment, one.environment)) for one in PEERS]
        return [[system for system in moved if system.name in (self.reference, *names)] for names in chosen if names]


GRIDS = {
    "cpu": Grid(
        ("random:t5-small",), GRID, QUICK,
        tuple(tuple(one.name for one in PEERS if (one.precision == "fp32") == fp32) for fp32 in (True, False)),
    ),
    "families": Grid(
        tuple(f"random:{size}" for size in ("opus-mt", "bart-base", "mt5-small", "pegasus-large",
                                            "nllb-200-distilled-600M")),
        tuple(Work(batch, 128, tokens, beams) for batch, tokens in ((1, 64), (8, 32)) for beams in (1, 4)),
        (Work(1, 128, 64),),
        ((OPTIMUM, "OpenVINO", "CTranslate2", OURS, OURS_EXACT),
         ("optimum-onnx int8", "OpenVINO int8", "CTranslate2 int8", OURS_INT8, OURS_INT8_THROUGHPUT)),
        {"openvino": "openvino4"},
    ),
    # transformers 4 does not read T5Gemma 2, nor do optimum's exporters read either.
    "gemma": Grid(
        ("random:t5gemma-2-270m-270m", "random:t5gemma-b-b"),
        tuple(Work(batch, 128, tokens, beams) for batch, tokens in ((1, 32), (8, 16)) for beams in (1, 4)),
        (Work(1, 128, 32),),
        (("CTranslate2", "CTranslate2 int8", OURS, OURS_EXACT, OURS_INT8, OURS_INT8_THROUGHPUT, OURS_INT4),),
        {"ctranslate2": "ctranslate2-v5"},
        "transformers 5",
    ),
}  # fmt: skip
Generate = Callable[[np.ndarray, Work], np.ndarray]  # from input_ids (B, S) to the new tokens (B, L)


class Worker:
    """One system in a separate process, loaded and waiting."""

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
        least = cell.new_tokens if cell.forced_length else 0
        asked = {"ids": ids.tolist(), "least": least, "most": cell.new_tokens, "beams": cell.beams}
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
    cell: Work, systems: Mapping[PeerSystem, Generate], *, rounds: int, model: str, threads: int | None = None,
    seed: int = 0,
) -> list[Row]:  # fmt: skip
    """A row for each system in one cell, as by `harness.run_comparison`; a failed one has no time and says why.

    The first of ``systems`` is the reference: its failure is raised. ``seed`` draws the sources.
    """
    ids = np.random.default_rng(seed).integers(3, 32_000, (cell.batch, cell.source_tokens))

    def entry(system: PeerSystem, generate: Generate) -> Contender:
        return Contender(system.name, lambda: partial(generate, ids, cell), exact=False, facts=system.facts)

    about = {"model": model} | ({} if threads is None else {"threads": threads})
    entries = [entry(*each) for each in systems.items()]
    return run_comparison(entries, cell, rounds=rounds, keep_going=True, **about)


def cell_of(row: Mapping[str, Any]) -> Work:
    """The cell that a row was measured in."""
    return Work(*(row[name] for name in ("batch", "source_tokens", "new_tokens", "beams")))


def model_and_cell(row: Mapping[str, Any]) -> tuple[str, Work]:
    """The model and the cell that a row was measured in."""
    return row["model"], cell_of(row)


@dataclass(frozen=True)
class PeerResult:
    """Our result in a cell: the nearest peer, and its time over ours (above 1 we are faster)."""

    cell: Work
    peer: str
    ratio: float  # the median of all rounds
    model: str = ""
    samples: tuple[float, ...] = field(default=(), compare=False)  # of each round

    def __str__(self) -> str:
        """As ``1.29x (1.20–1.40)``, with the least and the largest of all rounds."""
        spread = f" ({min(self.samples):.2f}–{max(self.samples):.2f})" if self.samples else ""
        return f"{self.ratio:.2f}x{spread}"


def peer_results(
    rows: Sequence[Mapping[str, Any]], *, ours: str | Callable[[Work], str] = OURS, precision: str = "fp32",
    peers: Sequence[str] | None = None,
) -> Iterator[PeerResult]:  # fmt: skip
    """For each measured cell of each model the best peer of this precision, behind us or ahead.

    ``ours`` is the system to compare, in all cells or by cell; ``peers`` are by default all systems of others.
    """
    mine = {system.name for system in PEERS if system.ours}
    for model, cell in dict.fromkeys(map(model_and_cell, rows)):
        here = [row for row in rows if model_and_cell(row) == (model, cell)]
        names = [row["system"] for row in here if row["precision"] == precision and row["system"] not in mine]
        own = ours if isinstance(ours, str) else ours(cell)
        ratios = {name: paired_ratio(here, own, name) for name in names if peers is None or name in peers}
        if found := {name: ratio for name, ratio in ratios.items() if ratio is not None}:
            peer, best = min(found.items(), key=lambda pair: pair[1]["ratio"])
            yield PeerResult(cell, peer, best["ratio"], model.removeprefix("random:"), tuple(best["ratio_samples"]))


def int8_for(cell: Work) -> str:
    """Our int8 system for a cell: one row, or several of texts and beams, which have a recipe each.

    >>> int8_for(Work(1, 32, 64)), int8_for(Work(1, 32, 64, beams=4))
    ('t5accel int8', 't5accel int8 for throughput')
    """
    return OURS_INT8 if cell.batch * cell.beams == 1 else OURS_INT8_THROUGHPUT


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Milliseconds per step (new token of each sequence), a line for each cell.

    ``!`` marks failures, ``*`` fp32 systems with other tokens than the reference's.
    """
    names = list(dict.fromkeys(row["system"] for row in rows))
    cells = list(dict.fromkeys(map(cell_of, rows)))
    lines = [["cell", *names]]
    for cell in cells:
        here = {row["system"]: row for row in rows if cell_of(row) == cell}
        lines.append([cell_label(cell), *(_per_step(here[name]) if name in here else "" for name in names)])
    return "\n".join(format_table(lines))


def _per_step(row: Mapping[str, Any]) -> str:
    if "latency_s" not in row:
        return "!" if "failed" in row else "–"  # alone, a system is not timed
    mark = "*" if row["precision"] == "fp32" and row["equal"] < row["of"] else ""
    return f"{mark}{step_ms(row):.2f}"
