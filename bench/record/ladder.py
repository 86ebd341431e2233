"""Climb both ladders: random weights of t5-small's size, and the bundled model on real texts.

python -m bench.record.ladder --json data/results/ladder-amd.json
"""

from __future__ import annotations

from collections.abc import Iterator

from tqdm import tqdm

from bench.figures import table
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
from bench.results import Row, record_parser, write_rows
from bench.scoreboard import Forced, Job, Natural

SIZE = "random:t5-small"
LENGTHS = (64, 256)
SUMMARIES = "summaries"


def measured(texts: int, rounds: int) -> Iterator[Row]:
    """The rows of all ladders; that of real texts is climbed first, because it tells what the others' recipes lose."""

    def climbed(rungs: tuple[Rung, ...], job: Job, model: str, ladder: str, max_loss: dict[str, float]) -> list[Row]:
        with tqdm(total=len(rungs), desc=ladder, unit="rung") as bar:
            return climb(rungs, job, model=model, ladder=ladder, rounds=rounds, max_loss=max_loss,
                         on_rung=lambda _: bar.update())  # fmt: skip

    # What it answers are summaries, so it is their score that must stay; the others are in the rows.
    max_loss = {"rougeL": GATE["rougeL"]}
    title = f"{MODEL}, {texts} {SUMMARIES} at natural length"
    natural = climbed(natural_rungs(), Natural(SUMMARIES, texts), MODEL, title, max_loss)
    for tokens in LENGTHS:
        title = f"{SIZE}, {tokens} forced tokens"
        yield from with_quality_of(climbed(forced_rungs(), Forced(tokens), SIZE, title, GATE), natural)
    yield from natural


def main() -> None:
    """Measure, write and show the rows."""
    parser = record_parser("Climb the ladders from the naive loop to the fastest way.", rounds=3)
    parser.add_argument("--texts", type=int, default=64, help="summaries that are timed (64)")
    args = parser.parse_args()
    rows = list(measured(args.texts, args.rounds))
    write_rows(args.json, rows, command=f"python -m bench.record.ladder --texts {args.texts} --rounds {args.rounds}")
    for title, own in by_ladder(rows).items():
        print(f"\n{title}\n\n{table(own)}\n")
        for at_once in sorted({row["batch"] > 1 for row in own}):
            end = fastest(own, at_once=at_once)
            print(f"{'many at once' if at_once else 'one at a time'}: {account(own, end['rung'])}")


if __name__ == "__main__":
    main()
