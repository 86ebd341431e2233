"""Measure a step and a newcomer, simulate up to 1,000 replicas of that server, and draw the tables of docs/scale.md.

    python -m bench.record.scale --json data/results/scale.json    # measures on two threads, then simulates
    python -m bench.record.scale --page docs/scale.md              # draws its tables again from what is recorded

The load is that of the serving chapter: nine answers in ten have 4 to 8 tokens, one has 128 (`bench.serving.rates`).
"""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict
from pathlib import Path

from bench.results import Row, environment, file_path, rows_so_far, write_rows
from bench.scale import Failures, Pace, costs, knee, knees_table, measured_pace, measured_speeds, speeds
from bench.serving.rates import LONG, SHARE_LONG, SHORT
from t5accel import machine
from t5accel.api import open_backend

COMMAND = "python -m bench.record.scale"
MODEL, LIMIT_S = "mini", 1.0
TEXT = "translate English to French: " + "very " * 17 + "old"  # as long as the mean of that load
TOKENS = [*range(SHORT[0], SHORT[1] + 1)] * ((SHARE_LONG - 1) * 2) + [LONG] * 10
REPLICAS, SECONDS = (1, 10, 100, 1000), 7.0  # of each simulated load, as in measured loads (`bench/record/serving.py`)
FAILURES = Failures(every_s=120.0, restart_s=10.0)  # hundreds of times as often as machines fail


def simulation(measured: Pace, replicas: int, failures: Failures | None) -> Row:
    """The knee of so many replicas, each on a separate machine."""
    closer = 5 if replicas < 100 else 3
    row = knee(measured, TOKENS, LIMIT_S, replicas=replicas, seconds=SECONDS, failures=failures, closer=closer)
    more = {"replicas": replicas, "seconds": SECONDS} | (asdict(failures) if failures else {})
    return row | {"cell": "knee", "model": MODEL, "settings": more}


def drawn(page: str) -> str:
    """The page with every block drawn anew: what stands between `<!-- plan: NAME -->` and the end of its fence."""
    tables = {"speeds": measured_speeds(speeds()), "costs": costs(speeds()), "knees": knees_table()}

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}{tables[found[2]]}\n```"

    return re.sub(r"(<!-- plan: (\w+) -->\n```text\n).*?```", block, page, flags=re.DOTALL)


def main() -> None:
    """Measure and simulate, or draw the page."""
    parser = argparse.ArgumentParser(description="Measure a pace, simulate many replicas, draw the page on scale.")
    parser.add_argument("--json", type=file_path, help="where the rows go; called again at the same commit, it goes on")
    parser.add_argument("--page", type=Path, help="whose tables are drawn from what is recorded")
    args = parser.parse_args()
    if args.json:
        rows: list[Row] = rows_so_far(args.json, {**environment(), "command": COMMAND})
        if not rows:
            threads = machine.cpu_threads()
            measured = measured_pace(*open_backend(MODEL, threads=threads, progress=False)[:2], TEXT, repeats=81)
            about = {"measured": "pace", "cell": "pace", "system": "t5accel serve", "model": MODEL, "precision": "fp32"}
            rows.append(about | {"threads": threads, "settings": asdict(measured)})
            write_rows(args.json, rows, command=COMMAND)
        kinds = [(count, fail) for count in REPLICAS for fail in (None, FAILURES) if not fail or count > 1]
        for kind in kinds[len(rows) - 1 :]:
            rows.append(simulation(Pace(**rows[0]["settings"]), *kind))
            write_rows(args.json, rows, command=COMMAND)
    if args.page:
        args.page.write_text(drawn(args.page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
