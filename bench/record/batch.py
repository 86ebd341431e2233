"""Measure batch jobs: texts sorted by length under a token budget, beside 32 at a time in file order.

Answers have their natural length, and are compared before anything is timed. Then `t5accel batch` itself, in a process
of its own, over few and many short texts. With ``--ray`` whole jobs of the local engine and of Ray instead (installed
by `make test-ray`). Runs: `data/results/batch.json`, `data/results/batch-ray.json`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np

from bench import evaluation
from bench.harness import Contender, run_comparison
from bench.results import Row, environment, record_parser, rows_so_far, write_rows
from t5accel import machine
from t5accel.api import open_backend
from t5accel.graphs.export_cache import cached_export_and_manifest
from t5accel.precision.recipes import RECIPES
from t5accel.serve.batch.generate import BatchGenerator
from t5accel.timing import Work

MODEL, LONGEST, NAIVE = "mini", 64, "32 at a time, in file order"
BUDGETS = (1024, 4096, 16384)
SHORT = {"model": "mini-d1", "precision": "int8"}  # for the many short texts …
SHORT_ANSWER = 24  # … and their answers: a student that does not find the end is cut off there
MANY_ROWS = 2000  # of their shards
ROOT = Path(__file__).resolve().parents[2]
RAY = ROOT / "build/servers/ray/bin/python"
COPIES, SHARD_ROWS = (1, 8), 100  # of the mixed texts, and of a shard
JOB = """
import sys
from t5accel.serve.batch.job import JobSettings, ModelSource
from t5accel.serve.batch.job import in_this_process, run
from t5accel.serve.ray_batch import on_ray
given, out, model, engine, threads, longest, rows = sys.argv[1:]
settings = JobSettings(max_new_tokens=int(longest), shard_rows=int(rows))
run(given, out, ModelSource(model, None, int(threads)), settings, engine=on_ray if engine == "ray" else in_this_process)
"""


class InFileOrder(BatchGenerator):
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
    texts = [
        evaluation.source_text(task, row) for task in evaluation.NAMES for row in evaluation.rows(task, limit=limit)
    ]
    yield "task by task", texts
    yield "mixed", random.Random(0).sample(texts, len(texts))


def padded(answerer: BatchGenerator, sources: list[np.ndarray]) -> np.ndarray:
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
            answerer = BatchGenerator(backend, tokenizer, max_new_tokens=LONGEST, batch_tokens=budget)
            ways[f"sorted, {budget} tokens"] = partial(padded, answerer, sources)
        exact = precision == "fp32"
        given = [Contender(name, partial(lambda run: run, run), exact=exact) for name, run in ways.items()]
        work = Work(32, max(map(len, sources)), LONGEST, threads=threads, forced_length=False)
        facts = {"model": MODEL, "cell": order, "precision": precision, "recipe_hash": RECIPES[precision].hash}
        # A batch has another size in each way, and source tokens are those of the longest text.
        facts |= {"batch": None, "encoder": "included", "texts": len(texts)}
        yield from run_comparison(given, work, rounds=rounds, **facts)


def many(count: int, folder: Path) -> Iterator[Row]:
    """Run `t5accel batch` over ``count`` short texts: seconds with loading, memory and files."""
    sentences = [evaluation.source_text("translation", row) for row in evaluation.rows("translation")]
    given, out = folder / f"{count}.jsonl", folder / f"answers-{count}"
    with given.open("w", encoding="utf-8") as file:
        for place, text in enumerate(random.Random(0).choices(sentences, k=count)):
            file.write(json.dumps({"id": place, "text": text}, ensure_ascii=False) + "\n")
    options = [f"--{name}={value}" for name, value in SHORT.items()]
    options += [f"--max-new-tokens={SHORT_ANSWER}", f"--shard-rows={MANY_ROWS}"]
    command = [sys.executable, "-m", "t5accel", "batch", str(given), "--out", str(out), *options]
    began = perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    said = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)  # of this process alone
    seconds = perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    parts = sorted(out.glob("part-*.jsonl"))
    answers = [json.loads(line) for part in parts for line in part.read_text(encoding="utf-8").splitlines()]
    if process.returncode or [row["id"] for row in answers] != [*range(count)] or not all(r["answer"] for r in answers):
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode} and {len(answers)} rows: {said}")
    tokens = int(said.split(" rows answered, ")[1].split()[0])
    yield {
        "measured": "job", "cell": f"{count:,} short texts", "system": "t5accel batch", **SHORT,
        "recipe_hash": RECIPES[SHORT["precision"]].hash, "texts": count, "answered": len(answers),
        "distinct": len({row["answer"] for row in answers}), "new_tokens": tokens, "forced": False,
        "threads": machine.cpu_threads(), "seconds": seconds, "answers_per_s": count / seconds,
        "tokens_per_s": tokens / seconds, "settings": {"max_new_tokens": SHORT_ANSWER},
        "peak_memory_bytes": used.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "input_bytes": given.stat().st_size, "output_bytes": sum(part.stat().st_size for part in parts),
    }  # fmt: skip


def job(python: Path, texts: list[str], model: Path, engine: str, threads: int) -> np.ndarray:
    """A whole job in a new folder -> its answers as bytes, 0 behind their end: (N, L) int64."""
    with TemporaryDirectory() as folder:
        given, out = Path(folder, "in.jsonl"), Path(folder, "out")
        given.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        command = [python, "-c", JOB, given, out, model, engine, threads, LONGEST, SHARD_ROWS]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([*map(str, command)], env=environment, check=True, stderr=subprocess.DEVNULL)
        lines = [line for part in sorted(out.glob("part-*")) for line in part.read_text(encoding="utf-8").splitlines()]
    answers = [json.loads(line)["answer"].encode() for line in lines]
    found = np.zeros((len(answers), max(map(len, answers))), dtype=np.int64)
    for row, answer in zip(found, answers, strict=True):
        row[: len(answer)] = [*answer]
    return found


def engine_rows(limit: int | None, rounds: int, python: Path = RAY, copies: tuple[int, ...] = COPIES) -> Iterator[Row]:
    """Jobs of the local engine and of Ray, in fp32."""
    threads, model = machine.cpu_threads(), cached_export_and_manifest(MODEL)[0]
    given = {"local engine": ("local", threads), "Ray, one actor": ("ray", threads)}
    given |= {"Ray, an actor for each core": ("ray", 1)} if threads > 1 else {}
    mixed = [texts for order, texts in files(limit) if order == "mixed"][0]
    for times in copies:
        texts = mixed * times
        ways = [Contender(name, partial(lambda run: run, partial(job, python, texts, model, *how)),
                    facts={"settings": {"threads of each": how[1], "rows of a shard": SHARD_ROWS}})
                for name, how in given.items()]  # fmt: skip
        work = Work(1, 1, LONGEST, threads=threads, forced_length=False)
        facts = {"model": MODEL, "cell": "whole jobs", "precision": "fp32", "recipe_hash": RECIPES["fp32"].hash}
        facts |= {"batch": None, "source_tokens": None, "encoder": "included", "texts": len(texts)}
        for row in run_comparison(ways, work, rounds=rounds, **facts):
            del row["new_tokens"], row["tokens_per_s"]  # what was compared are bytes
            yield row


def main() -> None:
    """Measure, and write the rows in one piece."""
    parser = record_parser("Measure sorted batches beside batches in file order.", rounds=7)
    parser.add_argument("--limit", type=int, help="texts of each group of a task (all)")
    parser.add_argument("--short", type=int, default=100_000, help="short texts; a tenth of them first (100000)")
    parser.add_argument("--ray", action="store_true", help="whole jobs alone: the local engine beside Ray's")
    args = parser.parse_args()
    if args.ray and not RAY.exists():
        sys.exit(f"{RAY} is missing: `make test-ray` installs it.")
    limit = f" --limit {args.limit}" if args.limit else ""
    what = "--ray" if args.ray else f"--short {args.short}"
    command = f"python -m bench.record.batch{limit} --rounds {args.rounds} {what}"
    rows = rows_so_far(args.json, {**environment(), "command": command})

    def add(cell: str, precision: str, measure: Callable[[], Iterable[Row]]) -> None:
        if not any((row["cell"], row["precision"]) == (cell, precision) for row in rows):
            rows.extend(measure())
            write_rows(args.json, rows, command=command)

    if args.ray:
        add("whole jobs", "fp32", partial(engine_rows, args.limit, args.rounds))
    else:
        with TemporaryDirectory() as folder:
            for count in (args.short // 10, args.short):
                add(f"{count:,} short texts", SHORT["precision"], partial(many, count, Path(folder)))
        for precision in ("fp32", "int8"):
            add("mixed", precision, partial(rows_of, precision, args.limit, args.rounds))
    for row in rows:
        if row["measured"] == "job":
            print(
                f"{row['precision']:5} {row['cell']}: {row['answers_per_s']:.0f} rows/s, {row['tokens_per_s']:.0f} "
                f"tokens/s, {row['seconds']:.1f} s, {row['peak_memory_bytes'] / 1e6:.0f} MB at most"
            )
            continue
        low, high = min(row["ratio_samples"]), max(row["ratio_samples"])
        print(
            f"{row['precision']:5} {row['cell']:12} {row['system']:28} {row['ratio']:.2f}x ({low:.2f}–{high:.2f}), "
            f"{row['texts']} texts, {median(row['latency_s']):.1f} s, {row['equal']} of {row['of']} equal"
        )


if __name__ == "__main__":
    main()
