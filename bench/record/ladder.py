"""Climb both ladders: random weights of t5-small's size, and the bundled model on real texts.

python -m bench.record.ladder --json data/results/ladder-amd.json
python -m bench.record.ladder --draw data/results/ladder-amd.json --plot docs/ladder.png --only 256 summaries
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from bench.figures import plot_ladders, table
from bench.ladder import (
    GATE,
    MODEL,
    Rung,
    account,
    by_ladder,
    climb,
    fastest,
    forced_rungs,
    natural_rungs,
    with_quality_of,
)
from bench.results import Row, write_rows
from bench.scoreboard import Forced, Job, Natural

SIZE = "random:t5-small"
LENGTHS = (64, 256)
SUMMARIES = "summaries"


def measured(texts: int, rounds: int, student: str | None, lengths: list[int]) -> Iterator[Row]:
    """The rows of all ladders; that of real texts is climbed first, because it tells what the others' recipes lose."""
    rungs = natural_rungs(student)
    # What it answers are summaries, so it is their score that must stay; the others are in the rows.
    max_loss = {"rougeL": GATE["rougeL"]}
    title = f"{MODEL}, {texts} {SUMMARIES} at natural length"
    natural = _climbed(rungs, Natural(SUMMARIES, texts), MODEL, title, rounds, max_loss)
    for tokens in lengths:
        title = f"{SIZE}, {tokens} forced tokens"
        yield from with_quality_of(_climbed(forced_rungs(), Forced(tokens), SIZE, title, rounds, GATE), natural)
    yield from natural


def _climbed(
    rungs: tuple[Rung, ...], job: Job, model: str, ladder: str, rounds: int, max_loss: dict[str, float]
) -> list[Row]:
    with tqdm(total=len(rungs), desc=ladder, unit="rung") as bar:
        return climb(
            rungs, job, model=model, ladder=ladder, rounds=rounds, max_loss=max_loss, on_rung=lambda _: bar.update()
        )


def main() -> None:
    """Measure and write, or draw what was measured."""
    parser = argparse.ArgumentParser(description="Climb the ladders from the naive loop to the fastest way.")
    parser.add_argument("--json", type=Path, help="measure, and write the rows here")
    parser.add_argument("--draw", type=Path, help="show the rows of this file, and draw them with --plot")
    parser.add_argument("--plot", type=Path, help="where the picture goes")
    parser.add_argument("--only", nargs="*", default=[], help="draw ladders whose title has one of these texts")
    parser.add_argument("--texts", type=int, default=64, help="summaries that are timed (64)")
    parser.add_argument("--rounds", type=int, default=3, help="of the interleaved timing (3)")
    parser.add_argument("--student", help="a name or a folder; by default the bundled one, if there is one")
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS), help="forced new tokens (64 256)")
    args = parser.parse_args()
    if not args.json and not args.draw:
        parser.error("give --json to measure, or --draw to show what was measured")
    if args.json:
        rows = list(measured(args.texts, args.rounds, args.student, args.lengths))
        command = f"python -m bench.record.ladder --texts {args.texts} --rounds {args.rounds}"
        write_rows(args.json, rows, command=command)
    ladders = by_ladder(json.loads((args.draw or args.json).read_text(encoding="utf-8"))["rows"])
    for title, own in ladders.items():
        print(f"\n{title}\n\n{table(own)}\n")
        for at_once in sorted({row["batch"] > 1 for row in own}):
            end = fastest(own, at_once=at_once)
            print(f"{'many at once' if at_once else 'one at a time'}: {account(own, end['rung'])}")
    if args.plot:
        chosen = [title for title in ladders if not args.only or any(text in title for text in args.only)]
        plot_ladders({title: ladders[title] for title in chosen}, args.plot)


if __name__ == "__main__":
    main()
