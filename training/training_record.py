"""Record how the bundled model was trained: the losses of all stages, its quality, and the picture of its card.

The logs are `log.jsonl` of the folders that `t5accel train` wrote, in order; the quality is what
`t5accel evaluate --json` wrote. `data/results/training-mini.json` is where the record belongs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.figures import plot_losses
from bench.results import Row, scores, write_rows

COMMAND = (
    "t5accel train --pairs tatoeba-eng-fra.tsv --out build/mini --steps 9000; "
    "t5accel train --pairs tatoeba-eng-fra.tsv --stage 2 --start build/mini/model --out build/mini-2; "
    "t5accel train --pairs tatoeba-eng-fra-2019.tsv --stage 3 --start build/mini-2/model --out build/mini-3; "
    "t5accel train --pairs tatoeba-eng-fra-2019.tsv --stage 4 --start build/mini-3/model --out build/mini-4; "
    "t5accel evaluate --model mini --pairs tatoeba-eng-fra-2019.tsv"
)


def joined(logs: list[Path]) -> list[Row]:
    """The rows of all stages, their steps counted on from stage to stage."""
    rows, before = [], 0
    for stage, log in enumerate(logs, 1):
        for line in log.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rows.append({"measured": "training", "model": "mini", **row, "step": before + row["step"], "stage": stage})
        before = rows[-1]["step"]
    return rows


def quality_rows(report: dict[str, Any]) -> list[Row]:
    """The scores on the bundled sets, and those on held-out sentences, of any length and long."""
    about = {"measured": "quality", "model": report["model"], "precision": "fp32"}
    rows = [{**about, **scores(report)}]
    for task, name in (("held-out translation", "held_out"), ("held-out long translation", "held_out_long")):
        if kept_out := report.get(name):
            rows.append({**about, "task": task, "texts": kept_out["sentences"], "bleu": kept_out["bleu"],
                         "chrf": kept_out["chrf"], "settings": {"references": kept_out["references"]}})  # fmt: skip
    return rows


def main() -> None:
    """Join, write and draw."""
    parser = argparse.ArgumentParser(description="Record how the bundled model was trained.")
    parser.add_argument("logs", type=Path, nargs="+", help="log.jsonl of every stage, in order")
    parser.add_argument("--quality", type=Path, required=True, help="what `t5accel evaluate --json` wrote")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--plot", type=Path, required=True)
    args = parser.parse_args()
    rows = joined(args.logs)
    report = json.loads(args.quality.read_text(encoding="utf-8"))
    write_rows(args.json, [*rows, *quality_rows(report)], command=COMMAND)
    plot_losses(rows, args.plot)


if __name__ == "__main__":
    main()
