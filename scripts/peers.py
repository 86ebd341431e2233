"""Measure our engine beside its peers on a grid of batches, sources and beams: `make peers` calls this.

Each peer's environment lies in build/peers/NAME, made from requirements/peers/NAME.txt. What was measured is kept after
every cell, so an interrupted run goes on where it stopped; ``data/results/peers-cpu.json`` is a recorded run.
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

from t5accel import machine
from t5accel.checkpoints import load_t5
from t5accel.errors import InputError, PeerError
from t5accel.lab.draw import plot_standings
from t5accel.lab.peers import (
    GRID,
    OPTIMUM,
    OURS_EXACT,
    OURS_GENERATE,
    QUICK,
    REFERENCE,
    SYSTEMS,
    System,
    Worker,
    cell_of,
    int8_for,
    measure_cell,
    named,
    standings,
    table,
)
from t5accel.lab.rows import Row, here, rows_so_far, write_rows
from t5accel.timing import Work

ROOT = Path(__file__).resolve().parents[1]
MODEL = "random:t5-small"
SHORT_OF_MEMORY = 0.6  # of all there is; the largest cells take more than half


def save_model(folder: Path) -> None:
    """What every system reads: random weights at t5-small's size, as `save_pretrained` writes them."""
    if not (folder / "config.json").exists():
        load_t5(MODEL)[0].save_pretrained(folder)


def start(system: System, build: Path, threads: int) -> Worker:
    """The system's worker, loaded."""
    python = Path(sys.executable) if system.ours else build / system.environment / "bin/python"
    if not python.exists():
        raise PeerError(f"{python} is missing: `make peers` makes the environment.")
    converted = build / "converted" / system.engine.removesuffix("-int8")
    command = [python, ROOT / "scripts/peer_worker.py", system.engine, build / "model", "--scratch", converted]
    return Worker(
        [*map(str, command), "--threads", str(threads)], log=build / f"{system.engine}-{system.environment}.log",
        environment={"OMP_NUM_THREADS": str(threads), "T5ACCEL_CACHE": str(build / "converted/t5accel")},
    )  # fmt: skip


def start_all(stack: ExitStack, systems: Sequence[System], build: Path, threads: int) -> dict[System, Worker]:
    """The systems' workers; the stack closes them."""
    workers = {}
    for system in tqdm(systems, desc="starting", unit="system"):
        workers[system] = start(system, build, threads)
        stack.callback(workers[system].close)
    return workers


def chosen_cells(wanted: str | None, grid: Sequence[Work]) -> list[Work]:
    """The cells of the grid, or the one that was asked for."""
    cells = [cell for cell in grid if wanted in (None, f"{cell.batch},{cell.source_tokens},{cell.beams}")]
    if not cells:
        raise InputError(f"--cell is {wanted!r}; give batch, source tokens and beams of the grid, as in 32,512,4.")
    return cells


def chosen_systems(wanted: Sequence[str] | None) -> list[System]:
    """All systems, or those that were asked for and the reference."""
    unknown = {*(wanted or ())} - {system.name for system in SYSTEMS}
    if unknown:
        raise InputError(f"--systems has {sorted(unknown)}; there are {[system.name for system in SYSTEMS]}.")
    return [system for system in SYSTEMS if not wanted or system.name in (REFERENCE, *wanted)]


def main() -> None:
    """Start every system, measure cell by cell, and show how we stand."""
    parser = argparse.ArgumentParser(description="Measure our engine beside its peers.")
    parser.add_argument("--json", type=Path, default=ROOT / "build/peers/peers-cpu.json", help="where the rows go")
    parser.add_argument("--plot", type=Path, help="where the heat map goes; by default beside the rows")
    parser.add_argument("--build", type=Path, default=ROOT / "build/peers", help="environments and converted models")
    parser.add_argument("--quick", action="store_true", help="a corner of the grid, a few minutes")
    parser.add_argument("--cell", help="one cell alone: its batch, source tokens and beams, as in 32,512,4")
    parser.add_argument("--systems", nargs="*", help="some systems alone, by name; the reference is one in any case")
    parser.add_argument("--rounds", type=int, default=3, help="pairs per cell (3)")
    parser.add_argument("--minutes", type=float, default=60, help="start no cell later than this (60)")
    parser.add_argument("--draw", nargs="+", type=Path, metavar="FILE", help="draw recorded files, and measure nothing")
    args = parser.parse_args()
    if args.draw:
        draw(args.draw, args.plot or Path("docs/peers-cpu.png"))
        return
    cells, systems = chosen_cells(args.cell, QUICK if args.quick else GRID), chosen_systems(args.systems)
    threads, started = machine.cpu_threads(), time.perf_counter()
    args.build.mkdir(parents=True, exist_ok=True)
    save_model(args.build / "model")
    chosen = [*(["--cell", args.cell] if args.cell else []), *(["--systems", *args.systems] if args.systems else [])]
    conditions = here() | {"threads": threads, "model": MODEL, "rounds": args.rounds}
    with ExitStack() as stack:
        workers = start_all(stack, systems, args.build, threads)
        versions = {f"{system.name}: {name}": v for system, w in workers.items() for name, v in w.versions.items()}
        conditions["versions"] |= versions
        rows = rows_so_far(args.json, conditions)
        done = {cell_of(row) for row in rows}
        for cell in tqdm([cell for cell in cells if cell not in done], desc="measuring", unit="cell"):
            if time.perf_counter() - started > args.minutes * 60:
                print(f"{args.minutes:g} minutes are over: the same command measures the other cells.")
                break
            if psutil.virtual_memory().available < SHORT_OF_MEMORY * psutil.virtual_memory().total:
                stack.close()  # processes keep what the cells before took
                workers = start_all(stack, systems, args.build, threads)
            taking_part = {system: worker for system, worker in workers.items() if system.cells(cell)}
            rows += measure_cell(cell, taking_part, rounds=args.rounds, model=MODEL, threads=threads)
            write(args.json, conditions, rows, chosen)
    show(rows, args.plot or args.json.with_suffix(".png"))


def write(path: Path, conditions: dict[str, Any], rows: list[Row], chosen: Sequence[str] = ()) -> None:
    """Rows in the order of the grid; the command says which part of it was ``chosen``."""
    order = {cell: number for number, cell in enumerate(GRID)}
    rows = sorted(rows, key=lambda row: order[cell_of(row)])
    write_rows(path, rows, command=shlex.join(["python", "scripts/peers.py", *chosen]), **conditions)


def draw(files: Sequence[Path], picture: Path) -> None:
    """Our engine over the best peers in fp32 and int8, from the recorded runs of several machines."""
    boards = {}
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        rows, cpu = found["rows"], found["machine"]["cpu"]
        boards[f"{cpu}: fp32 over the best fp32 peer"] = list(standings(rows))
        boards[f"{cpu}: int8 over the best int8 peer"] = list(standings(rows, ours=int8_for, precision="int8"))
    plot_standings(boards, picture)


def show(rows: list[Row], picture: Path) -> None:
    """Print the times and where we stand, and draw it."""
    print(table(rows))
    boards = {
        "our engine over the best fp32 peer": list(standings(rows)),
        "our engine with all logits over the best fp32 peer": list(standings(rows, ours=OURS_EXACT)),
        "our engine in int8 over the best int8 peer": list(standings(rows, ours=int8_for, precision="int8")),
        "generate() over our engine, over optimum-onnx": list(standings(rows, ours=OURS_GENERATE, peers=[OPTIMUM])),
    }
    for title, board in boards.items():
        print(f"\n{title}")
        for standing in board:
            print(f"  {named(standing.cell):34} {standing.ratio:5.2f}x  {standing.peer}")
    if any(boards.values()):  # there was a peer
        plot_standings(boards, picture)
        print(f"\n{picture}")


if __name__ == "__main__":
    main()
