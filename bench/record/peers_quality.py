"""Score the bundled model in every peer's integers and in ours, beside fp32.

``data/results/peers-quality.json`` is a run; the environments are those of `make peers`. Answers are greedy, text by
text, so that none needs padding. An interrupted run goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.evaluation import MAIN_SCORES
from bench.peers import OURS, PEERS, REFERENCE, PeerSystem
from bench.precision import generated_scores
from bench.record.peers import ROOT, save_model, start, versions_of
from bench.results import Row, environment, format_table, record_parser, rows_so_far, write_rows
from t5accel import machine
from t5accel.models.load import load_model
from t5accel.timing import Work

MODEL = "mini"
SYSTEMS = {one.name: one for one in PEERS if one.precision != "fp32" or one.name in (REFERENCE, OURS)}


def score(system: PeerSystem, build: Path, tokenizer: Any, *, limit: int | None = None) -> Row:
    """A row with a system's scores on all three sets, on one thread; what is compiled for speed runs as it is."""
    worker = start(replace(system, engine=system.engine.removesuffix("-compiled")), build, 1, MODEL)

    def generate(ids: np.ndarray, mask: np.ndarray, shortest: int, longest: int) -> np.ndarray:
        return worker(ids, Work(1, ids.shape[1], longest, forced_length=False))

    try:
        found = generated_scores(generate, tokenizer, batch_size=1, limit=limit)
    finally:
        worker.close()
    return {"measured": "quality", "system": system.name, "model": MODEL, "threads": 1, **system.facts, **found}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each system: its main scores, and what they lost against the reference's in fp32."""
    reference = next(row for row in rows if row["system"] == REFERENCE)
    lines = [["system", "precision", "BLEU", "ROUGE-L", "EM", "against fp32"]]
    for row in rows:
        shown = [f"{row[name]:.1f}" for name in MAIN_SCORES]
        lost = " ".join(f"{round(row[name] - reference[name], 1) + 0:+.1f}" for name in MAIN_SCORES)
        lines.append([row["system"], row["precision"], *shown, "" if row is reference else lost])
    return "\n".join(format_table(lines, left=(0, 1), rule=True))


def main() -> None:
    """Score the systems, as many at once as there are cores, and print the table."""
    parser = record_parser(__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build/peers", help="environments and converted models")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=[*SYSTEMS], help="some systems alone, by name")
    args = parser.parse_args()
    threads, tokenizer = machine.cpu_threads(), load_model(MODEL)[1]
    conditions = environment()
    conditions["versions"] |= versions_of([*SYSTEMS.values()], args.build, threads)
    rows = rows_so_far(args.json, conditions)
    save_model(MODEL, args.build / "models" / MODEL)
    done = {row["system"] for row in rows}
    left = [SYSTEMS[name] for name in args.systems if name not in done]
    with ThreadPoolExecutor(threads) as pool:
        scored = [pool.submit(score, system, args.build, tokenizer) for system in left]
        for future in tqdm(as_completed(scored), total=len(left), unit="system"):
            rows.append(future.result())
            rows.sort(key=lambda row: [*SYSTEMS].index(row["system"]))
            write_rows(args.json, rows, command="python -m bench.record.peers_quality", **conditions)
    if any(row["system"] == REFERENCE for row in rows):
        print(table(rows))


if __name__ == "__main__":
    main()
