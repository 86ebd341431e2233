"""Measure our engine beside its peers on a grid: `make peers` calls this.

Environments lie in build/peers/NAME, made from requirements/peers/NAME.txt. An interrupted run goes on where it
stopped; ``data/results/peers-amd.json`` is a run. ``--grid families`` measures models of other families.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from bench.figures import plot_standings
from bench.peers import (
    GRIDS,
    OPTIMUM,
    OURS_EXACT,
    OURS_GENERATE,
    PeerSystem,
    Worker,
    cell_label,
    int8_for,
    measure_cell,
    model_and_cell,
    peer_results,
    table,
)
from bench.results import Row, environment, file_path, rows_so_far, write_rows
from t5accel import machine
from t5accel.errors import InputError, PeerError
from t5accel.models.families import BEYOND_T5, family_of
from t5accel.models.load import load_model
from t5accel.timing import Work

ROOT = Path(__file__).resolve().parents[2]
SHORT_OF_MEMORY = 0.7  # of what systems left free when they were loaded; the largest cells take half of it


def save_model(name: str, folder: Path) -> None:
    """What every system reads: a model of random weights, as `save_pretrained` writes it.

    Of BART and its kin it is like published checkpoints in what CTranslate2 counts on: the pad token's embedding is
    zero, and the configuration names where norms stand. No last token is forced, for the length is.
    """
    if (folder / "config.json").exists():
        return
    model = load_model(name)[0]
    family = family_of(model.config, name)
    if family.model_type in BEYOND_T5:
        model.get_input_embeddings().weight.data[model.config.pad_token_id] = 0.0
        model.config.update({"normalize_before": family.norm_first, "normalize_embedding": family.norm_embedding})
        model.config.forced_eos_token_id = model.generation_config.forced_eos_token_id = None
    model.save_pretrained(folder)


def start(system: PeerSystem, build: Path, threads: int, model: str | None = None) -> Worker:
    """The system's worker, with a model loaded, or without any."""
    python = Path(sys.executable) if system.ours else build / system.environment / "bin/python"
    if not python.exists():
        raise PeerError(f"{python} is missing: `make peers` makes the environment.")
    place = build / "models" / (model or "none").rpartition(":")[2].rpartition("/")[2]
    engine, converted = system.engine if model else "none", place / "converted"
    scratch = converted / system.engine.removesuffix("-int8")
    command = [python, ROOT / "bench/peer_worker.py", engine, place, "--scratch", scratch]
    build.mkdir(parents=True, exist_ok=True)
    return Worker(
        [*map(str, command), "--threads", str(threads)], log=build / f"{system.engine}-{system.environment}.log",
        environment={"OMP_NUM_THREADS": str(threads), "T5ACCEL_CACHE": str(converted / "t5accel")},
    )  # fmt: skip


def start_all(
    stack: ExitStack, systems: Sequence[PeerSystem], build: Path, threads: int, model: str
) -> dict[PeerSystem, Worker]:
    """The systems' workers; the stack closes them."""
    workers = {}
    for system in tqdm(systems, desc=f"starting on {model}", unit="system"):
        workers[system] = start(system, build, threads, model)
        stack.callback(workers[system].close)
    return workers


def versions_of(systems: Sequence[PeerSystem], build: Path, threads: int) -> dict[str, str]:
    """What is installed in each system's environment."""
    found = {}
    for system in systems:
        worker = start(system, build, threads)
        worker.close()
        found |= {f"{system.name}: {name}": version for name, version in worker.versions.items()}
    return found


def chosen_cells(wanted: str | None, grid: Sequence[Work]) -> list[Work]:
    """The cells of the grid, or the one that was asked for."""
    cells = [cell for cell in grid if wanted in (None, f"{cell.batch},{cell.source_tokens},{cell.beams}")]
    if not cells:
        raise InputError(f"--cell must be batch, source tokens and beams of the grid, as in 32,512,4, got {wanted!r}.")
    return cells


def chosen_names(option: str, wanted: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """The known names, or of these what was asked for by the option."""
    if unknown := {*(wanted or ())} - {*known}:
        raise InputError(f"--{option} must be of {sorted(known)}, got {sorted(unknown)}.")
    return [name for name in known if not wanted or name in wanted]


def main() -> None:
    """Start every system, measure cell by cell, and show how we stand."""
    parser = argparse.ArgumentParser(description="Measure our engine beside its peers.")
    parser.add_argument("--grid", choices=GRIDS, default="cpu", help="which models, cells and systems (cpu)")
    parser.add_argument("--json", type=file_path, help="where the rows go (build/peers/peers-GRID.json)")
    parser.add_argument("--build", type=Path, default=ROOT / "build/peers", help="environments and converted models")
    parser.add_argument("--quick", action="store_true", help="a corner of the grid, a few minutes")
    parser.add_argument("--models", nargs="*", help="some models of the grid alone, by name")
    parser.add_argument("--cell", help="one cell alone: its batch, source tokens and beams, as in 32,512,4")
    parser.add_argument("--systems", nargs="*", help="some systems alone, by name; the reference is one in any case")
    parser.add_argument("--rounds", type=int, default=3, help="pairs per cell (3)")
    parser.add_argument("--minutes", type=float, default=60, help="start no cell later than this (60); 0: convert only")
    args = parser.parse_args()
    grid, json_file = GRIDS[args.grid], args.json or args.build / f"peers-{args.grid}.json"
    cells = chosen_cells(args.cell, grid.quick if args.quick else grid.cells)
    models = chosen_names("models", args.models, grid.models)
    known = [system for group in grid.systems() for system in group]
    groups = grid.systems(chosen_names("systems", args.systems, [system.name for system in known]))
    chosen = [*(["--grid", args.grid] if args.grid != "cpu" else []),
              *(["--models", *args.models] if args.models else []), *(["--cell", args.cell] if args.cell else []),
              *(["--systems", *args.systems] if args.systems else [])]  # fmt: skip
    threads, started = machine.cpu_threads(), time.perf_counter()
    conditions = environment() | {"threads": threads, "model": ", ".join(grid.models), "rounds": args.rounds}
    conditions["versions"] |= versions_of(known, args.build, threads)
    rows = rows_so_far(json_file, conditions)
    commands = json.loads(json_file.read_text(encoding="utf-8"))["command"].split("; ") if rows else []
    commands.append(shlex.join(["python", "-m", "bench.record.peers", *chosen]))
    for model in models:
        save_model(model, args.build / "models" / model.rpartition(":")[2].rpartition("/")[2])
        for systems in groups:
            done = {(row["system"], *model_and_cell(row)) for row in rows}
            left = [
                cell for cell in cells
                if any((system.name, model, cell) not in done for system in systems if system.cells(cell))
            ]  # fmt: skip
            if not left:
                continue
            with ExitStack() as stack:
                workers = start_all(stack, systems, args.build, threads, model)
                free = psutil.virtual_memory().available
                for cell in tqdm(left, desc=f"measuring {model}", unit="cell"):
                    if time.perf_counter() - started > args.minutes * 60:
                        print(f"{args.minutes:g} minutes are over: the same command measures the other cells.")
                        break
                    if psutil.virtual_memory().available < SHORT_OF_MEMORY * free:
                        stack.close()  # processes keep what the cells before took
                        workers = start_all(stack, systems, args.build, threads, model)
                    taking_part = {system: worker for system, worker in workers.items() if system.cells(cell)}
                    found = measure_cell(cell, taking_part, rounds=args.rounds, model=model, threads=threads)
                    rows += [row for row in found if (row["system"], model, cell) not in done]
                    write(json_file, conditions, rows, "; ".join(dict.fromkeys(commands)))
    show(rows, json_file.with_suffix(".png"))


def write(path: Path, conditions: dict[str, Any], rows: list[Row], command: str) -> None:
    """Rows in the order of the grids."""
    order = {
        (model, cell): number for number, (model, cell) in enumerate(
            (model, cell) for grid in GRIDS.values() for model in grid.models for cell in grid.cells
        )
    }  # fmt: skip
    rows = sorted(rows, key=lambda row: order.get(model_and_cell(row), len(order)))
    write_rows(path, rows, command=command, **conditions)


def show(rows: list[Row], picture: Path) -> None:
    """Print the times and where we stand, and draw it."""
    for model in dict.fromkeys(row["model"] for row in rows):
        print(f"{model}\n{table([row for row in rows if row['model'] == model])}\n")
    boards = {
        "our engine over the best fp32 peer": list(peer_results(rows)),
        "our engine with all logits over the best fp32 peer": list(peer_results(rows, ours=OURS_EXACT)),
        "our engine in int8 over the best int8 peer": list(peer_results(rows, ours=int8_for, precision="int8")),
        "generate() over our engine, over optimum-onnx": list(peer_results(rows, ours=OURS_GENERATE, peers=[OPTIMUM])),
    }
    for title, board in boards.items():
        print(f"\n{title}")
        for standing in board:
            print(f"  {standing.model:24} {cell_label(standing.cell):34} {standing}  {standing.peer}")
    if any(boards.values()):  # there was a peer
        plot_standings(boards, picture)
        print(f"\n{picture}")


if __name__ == "__main__":
    main()
