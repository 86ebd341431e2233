"""Measure batch jobs: texts sorted by length in batches by a token budget, beside 32 at a time as the file has them.

Answers have their natural length, and are compared before anything is timed. Two files: the evaluation sets one behind
the other, as they are bundled (each task has texts of about one length), and the same texts mixed.
`data/results/batch.json` is where a recorded run belongs.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from t5accel import machine, tasks
from t5accel.api import open_backend
from t5accel.batch.answers import Answerer
from t5accel.graphs.numbers.recipes import RECIPES
from t5accel.lab.harness import Way, measured
from t5accel.lab.rows import Row, write_rows
from t5accel.timing import Work

MODEL, LONGEST, NAIVE = "mini", 64, "32 at a time, in file order"
BUDGETS = (1024, 4096, 16384)


class InFileOrder(Answerer):
    """As many texts at a time as there are, whatever their length; all else is the same."""

    def __init__(self, *given: Any, rows: int, **options: Any):
        super().__init__(*given, **options)
        self.rows = rows

    def tokens(self, sources: list[np.ndarray]) -> Iterator[tuple[list[int], np.ndarray]]:
        for first in range(0, len(sources), self.rows):
            chosen = [*range(first, min(first + self.rows, len(sources)))]
            yield chosen, self._generated([sources[i] for i in chosen])


def files(limit: int | None) -> Iterator[tuple[str, list[str]]]:
    """Texts, and how they lie in their file."""
    texts = [tasks.source_text(task, row) for task in tasks.NAMES for row in tasks.rows(task, limit=limit)]
    yield "task by task", texts
    yield "mixed", random.Random(0).sample(texts, len(texts))


def padded(answerer: Answerer, sources: list[np.ndarray]) -> np.ndarray:
    """The tokens of every text, 0 behind their end: (N, LONGEST) int64."""
    found = np.zeros((len(sources), LONGEST), dtype=np.int64)
    for chosen, tokens in answerer.tokens(sources):
        found[chosen, : tokens.shape[1]] = tokens
    return found


def rows_of(precision: str, limit: int | None, rounds: int, budgets: tuple[int, ...] = BUDGETS) -> Iterator[Row]:
    """Both files in one precision. Integers round over a whole batch, so that answers may differ there."""
    threads = machine.cpu_threads()
    backend, tokenizer, _ = open_backend(MODEL, precision=precision, threads=threads)
    for order, texts in files(limit):
        naive = InFileOrder(backend, tokenizer, rows=32, max_new_tokens=LONGEST)
        sources = [ids for _, ids in sorted(naive._tokenised(texts), key=lambda one: one[0])]
        ways: dict[str, Callable[[], np.ndarray]] = {NAIVE: partial(padded, naive, sources)}
        for budget in budgets:
            answerer = Answerer(backend, tokenizer, max_new_tokens=LONGEST, batch_tokens=budget)
            ways[f"sorted, {budget} tokens"] = partial(padded, answerer, sources)
        exact = precision == "fp32"
        given = [Way(name, partial(lambda run: run, run), exact=exact) for name, run in ways.items()]
        work = Work(32, max(map(len, sources)), LONGEST, threads=threads, forced_length=False)
        facts = {"model": MODEL, "cell": order, "precision": precision, "recipe_hash": RECIPES[precision].hash}
        # A batch has another size in each way, and source tokens are those of the longest text.
        facts |= {"batch": None, "encoder": "included", "texts": len(texts)}
        yield from measured(given, work, rounds=rounds, **facts)


def main() -> None:
    """Measure, and write the rows in one piece."""
    parser = argparse.ArgumentParser(description="Measure sorted batches beside batches in file order.")
    parser.add_argument("--json", type=Path, required=True, help="where the rows go")
    parser.add_argument("--limit", type=int, help="texts of each group of a task (all)")
    parser.add_argument("--rounds", type=int, default=7, help="of the interleaved timing (7)")
    args = parser.parse_args()
    rows = [row for precision in ("fp32", "int8") for row in rows_of(precision, args.limit, args.rounds)]
    limit = f" --limit {args.limit}" if args.limit else ""
    write_rows(args.json, rows, command=f"python scripts/batch.py{limit} --rounds {args.rounds}")
    for row in rows:
        low, high = min(row["ratio_samples"]), max(row["ratio_samples"])
        print(
            f"{row['precision']:5} {row['cell']:12} {row['system']:28} {row['ratio']:.2f}x ({low:.2f}–{high:.2f}), "
            f"{row['tokens_per_s']:.0f} tokens/s, {median(row['latency_s']):.1f} s, {row['equal']} of {row['of']} equal"
        )


if __name__ == "__main__":
    main()
