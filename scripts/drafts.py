"""Measure lookup, and speculative decoding where there is a draft, against greedy search on the bundled model.

Answers have their natural length: forced to go on, a model repeats itself, and guessing would win for free. For that
reason texts whose answer does not end by itself are left out. Every run goes through the same texts of a task; it is
timed whole, and with sources that were encoded beforehand.
`data/results/drafts.json` is where a recorded run belongs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from tqdm import tqdm

from t5accel import machine, tasks
from t5accel.backends.ort import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.decoding.backend import Backend, Generated
from t5accel.decoding.encoder_cache import EncoderCache
from t5accel.decoding.greedy import greedy
from t5accel.decoding.lookup import lookup
from t5accel.decoding.speculative import speculative
from t5accel.decoding.tokenizer_file import TokenizerFile
from t5accel.graphs.export_cache import cached_export
from t5accel.graphs.recipes import RECIPES
from t5accel.records import write_rows
from t5accel.timing import Candidate, Work, compare

MODEL = "mini"
PRECISIONS = ("fp32", "int8")
BATCHES = (1, 8)
LONGEST = 96  # tokens; an answer that has not ended by then is left out
Batch = tuple[np.ndarray, np.ndarray]
Run = Callable[[Backend, Batch], Generated]


def engine(model: str, precision: str) -> OrtNumpy:
    """The model's export in that precision, on all threads that we may use."""
    folder = cached_export(model, precision=precision)
    return OrtNumpy(folder, settings=SessionSettings(threads=machine.cpu_threads()))


def ending(backend: Backend, tokenizer: TokenizerFile, task: str, limit: int) -> list[str]:
    """Of the first texts of each group of a task those whose answer ends by itself."""
    texts = [tasks.source_text(task, row) for row in tasks.rows(task, limit=limit)]
    ended = []
    for ids, mask in batches(tokenizer, texts, 8):
        ended += (
            (greedy(backend, ids, mask, max_new_tokens=LONGEST).sequences == backend.eos_token_id).any(axis=1).tolist()
        )
    return [text for text, one in zip(texts, ended, strict=True) if one]


def batches(tokenizer: TokenizerFile, texts: list[str], size: int) -> list[Batch]:
    """Texts in batches, in their order."""
    tokenized = (tokenizer(texts[first : first + size]) for first in range(0, len(texts), size))
    return [(batch["input_ids"], batch["attention_mask"]) for batch in tokenized]


def answers(run: Run, backend: Backend, given: list[Batch]) -> list[Generated]:
    """Of all batches."""
    return [run(backend, batch) for batch in given]


def tokens(found: list[Generated], pad: int) -> list[list[int]]:
    """Each answer without its padding."""
    return [[token for token in row if token != pad] for one in found for row in one.sequences.tolist()]


def rows_of(
    task: str, precision: str, backend: Backend, runs: dict[str, Run], given: list[Batch], rounds: int
) -> Iterator[dict[str, Any]]:
    """Greedy search and what guesses, interleaved: whole, and after the encoder."""
    found = {name: answers(run, backend, given) for name, run in runs.items()}
    texts = {name: tokens(one, backend.pad_token_id) for name, one in found.items()}
    reference, *others = runs
    count = sum(map(len, texts[reference]))
    work = Work(
        batch=len(given[0][0]), source_tokens=max(ids.shape[1] for ids, _ in given), new_tokens=count,
        threads=machine.cpu_threads(), forced_length=False,
    )  # fmt: skip
    encoded = EncoderCache(backend)
    for encoder, timed in (("included", backend), ("beforehand", encoded)):
        candidates = [Candidate(name, partial(answers, run, timed, given), work) for name, run in runs.items()]
        timings = compare(*candidates, rounds=rounds)
        for name in others:
            ratio = timings.ratios[name]
            equal = sum(a == b for a, b in zip(texts[reference], texts[name], strict=True))
            yield {
                "measured": "drafts", "model": MODEL, "task": task, "recipe": precision,
                "hash": RECIPES[precision].hash, "batch": work.batch, "encoder": encoder, "system": name,
                "answers": len(texts[reference]), "new_tokens": count, "equal": equal,
                "calls": {one: sum(x.decoder_calls for x in found[one]) for one in (reference, name)},
                "drafted": sum(x.drafted for x in found[name]), "accepted": sum(x.accepted for x in found[name]),
                "latency_s": {one: list(timings.latencies[one].samples_s) for one in (reference, name)},
                "ratio": ratio.to_json(),
            }  # fmt: skip


def call_rows(precision: str, backend: OrtNumpy, rounds: int) -> Iterator[dict[str, Any]]:
    """What a call that reads several tokens takes beside one that reads a single token, and forgetting them."""
    rng = np.random.default_rng(0)
    for batch in BATCHES:
        ids = rng.integers(3, backend.vocab_size, (batch, 100))
        counts = (1, 2, 3, 4, 6, 8, 12, 16)
        seconds: dict[int, list[float]] = {count: [] for count in counts}
        cuts: list[float] = []
        state = backend.start(backend.encode(ids, np.ones_like(ids)))
        backend.step(state, rng.integers(3, backend.vocab_size, (batch, 1, 20)))
        for _ in range(10 * rounds):
            for count in counts:
                new = rng.integers(3, backend.vocab_size, (batch, 1, count))
                begin = perf_counter()
                backend.step(state, new).argmax(axis=-1)
                middle = perf_counter()
                backend.trim(state, np.zeros((batch, 1), dtype=np.int64))
                seconds[count].append(middle - begin)
                cuts.append(perf_counter() - middle)
        one = median(seconds[1])
        yield {
            "measured": "call", "model": MODEL, "recipe": precision, "hash": RECIPES[precision].hash, "batch": batch,
            "past": 20, "ms": one * 1e3, "trim": median(cuts) / one,
            "of_one": {str(count): median(samples) / one for count, samples in seconds.items()},
        }  # fmt: skip


def measured(draft: str | None, limit: int, rounds: int) -> Iterator[dict[str, Any]]:
    """All rows."""
    tokenizer = TokenizerFile(cached_export(MODEL))
    for precision in PRECISIONS:
        backend = engine(MODEL, precision)
        runs: dict[str, Run] = {
            "greedy": lambda own, batch: greedy(own, *batch, max_new_tokens=LONGEST),
            "lookup": lambda own, batch: lookup(own, *batch, max_new_tokens=LONGEST),
        }
        if draft is not None:
            small = EncoderCache(engine(draft, precision))
            runs["speculative"] = lambda own, batch, small=small: speculative(
                own, small if isinstance(own, EncoderCache) else small.backend, *batch, max_new_tokens=LONGEST
            )
        yield from call_rows(precision, backend, rounds)
        texts = {task: ending(backend, tokenizer, task, limit) for task in tasks.NAMES}
        for size in BATCHES:
            for task in tqdm(tasks.NAMES, desc=f"{precision}, batch {size}", unit="task"):
                given = batches(tokenizer, texts[task], size)
                yield from rows_of(task, precision, backend, runs, given, rounds)


def main() -> None:
    """Measure everything and write the rows to a file, in one piece."""
    parser = argparse.ArgumentParser(description="Measure lookup and speculative decoding against greedy search.")
    parser.add_argument("--json", type=Path, required=True, help="where the rows go")
    parser.add_argument("--draft", help="a model of the same vocabulary that guesses: a name or a folder")
    parser.add_argument("--limit", type=int, default=16, help="texts of each group of a task (16)")
    parser.add_argument("--rounds", type=int, default=5, help="of the interleaved timing (5)")
    args = parser.parse_args()
    rows = list(measured(args.draft, args.limit, args.rounds))
    draft = f" --draft {args.draft}" if args.draft else ""
    command = f"python scripts/drafts.py{draft} --limit {args.limit} --rounds {args.rounds}"
    write_rows(args.json, rows, command=command)
    for row in rows:
        if row["measured"] == "drafts":
            ratio = row["ratio"]
            print(
                f"{row['recipe']:5} batch {row['batch']} {row['task']:12} {row['encoder']:10} {row['system']:11} "
                f"{ratio['median']:.2f}x ({ratio['min']:.2f}–{ratio['max']:.2f}), {row['accepted']} of "
                f"{row['drafted']} guesses accepted, {row['equal']} of {row['answers']} answers equal"
            )
    print(f"{len(rows)} rows in {args.json}")


if __name__ == "__main__":
    main()
