"""Measure lookup and speculative decoding against greedy search on the bundled model.

Answers have their natural length, and texts whose answer does not end by itself are left out: forced to go on, a model
repeats itself, and guessing would win for free. A run: `data/results/drafts.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np
from tqdm import tqdm

from bench import evaluation
from bench.harness import Contender, run_comparison
from bench.results import Row, record_parser, write_rows
from t5accel import machine
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.ort_static import OrtStatic
from t5accel.decoding.backend import Backend, Generated
from t5accel.decoding.encoder_cache import EncoderCache
from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.ngram_lookup import prompt_lookup
from t5accel.decoding.speculation import speculative
from t5accel.graphs.export_cache import cached_export
from t5accel.precision.recipes import RECIPES
from t5accel.timing import Work
from t5accel.tokenization import TokenizerFile

MODEL = "mini"
PRECISIONS = ("fp32", "int8")
BATCHES = (1, 8)
LONGEST = 96  # tokens; an answer that has not ended by then is left out
Batch = tuple[np.ndarray, np.ndarray]
Run = Callable[[Backend, Batch], Generated]


def engine(model: str, precision: str) -> OrtStatic:
    """The model's export in that precision, on all threads that we may use."""
    folder = cached_export(model, precision=precision)
    return OrtStatic(folder, settings=SessionSettings(threads=machine.cpu_threads()))


def ending(backend: Backend, tokenizer: TokenizerFile, task: str, limit: int) -> list[str]:
    """Of the first texts of each group of a task those whose answer ends by itself."""
    texts = [evaluation.source_text(task, row) for row in evaluation.rows(task, limit=limit)]
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


def rows_of(
    task: str, precision: str, backend: Backend, runs: dict[str, Run], given: list[Batch], rounds: int
) -> Iterator[Row]:
    """Greedy search and what guesses, interleaved: whole, and after the encoder."""
    longest = max(ids.shape[1] for ids, _ in given)
    work = Work(len(given[0][0]), longest, LONGEST, threads=machine.cpu_threads(), forced_length=False)
    texts = sum(len(ids) for ids, _ in given)
    facts = {"model": MODEL, "task": task, **recipe_of(precision), "texts": texts}
    for encoder, timed in (("included", backend), ("beforehand", EncoderCache(backend))):
        found: dict[str, list[Generated]] = {}

        def answers(name: str, timed: Backend = timed, found: dict[str, list[Generated]] = found) -> np.ndarray:
            found[name] = [runs[name](timed, batch) for batch in given]
            padded = [np.pad(x, ((0, 0), (0, LONGEST - x.shape[1]))) for x in (one.sequences for one in found[name])]
            return np.concatenate(padded)

        ways = [Contender(name, partial(partial, answers, name), exact=False) for name in runs]
        for row in run_comparison(ways, work, rounds=rounds, encoder=encoder, **facts):
            own = found[row["system"]]
            row["decoder_calls"] = sum(one.decoder_calls for one in own)
            if row["system"] != row["reference"]:
                row |= {key: sum(getattr(one, key) for one in own) for key in ("drafted", "accepted")}
            yield row


def recipe_of(precision: str) -> Row:
    """As rows have it."""
    return {"precision": precision, "recipe_hash": RECIPES[precision].hash}


def call_rows(precision: str, backend: OrtStatic, rounds: int) -> Iterator[Row]:
    """What a call that reads several tokens takes beside one that reads a single token, and forgetting them."""
    rng = np.random.default_rng(0)
    for batch in BATCHES:
        ids = rng.integers(3, backend.vocab_size, (batch, 100))
        counts = (1, 2, 3, 4, 6, 8, 12, 16)
        seconds: dict[int, list[float]] = {count: [] for count in counts}
        cuts: list[float] = []
        state = backend.new_state(backend.encode(ids, np.ones_like(ids)))
        backend.step(state, rng.integers(3, backend.vocab_size, (batch, 1, 20)))
        for _ in range(10 * rounds):
            for count in counts:
                new = rng.integers(3, backend.vocab_size, (batch, 1, count))
                begin = perf_counter()
                backend.step(state, new).argmax(axis=-1)
                middle = perf_counter()
                backend.rollback(state, np.zeros((batch, 1), dtype=np.int64))
                seconds[count].append(middle - begin)
                cuts.append(perf_counter() - middle)
        one = median(seconds[1])
        about = {"measured": "call", "model": MODEL, **recipe_of(precision), "batch": batch, "past_tokens": 20}
        for count, samples in seconds.items():
            price = {"new_tokens": count, "price": median(samples) / one}
            yield {**about, "system": "step", **price} | ({"ms_per_step": one * 1e3} if count == 1 else {})
        yield {**about, "system": "trim", "price": median(cuts) / one}


def all_rows(draft: str | None, limit: int, rounds: int) -> Iterator[Row]:
    """All rows."""
    tokenizer = TokenizerFile(cached_export(MODEL))
    for precision in PRECISIONS:
        backend = engine(MODEL, precision)
        runs: dict[str, Run] = {
            "greedy": lambda own, batch: greedy(own, *batch, max_new_tokens=LONGEST),
            "lookup": lambda own, batch: prompt_lookup(own, *batch, max_new_tokens=LONGEST),
        }
        if draft is not None:
            small = EncoderCache(engine(draft, precision))
            runs["speculative"] = lambda own, batch, small=small: speculative(
                own, small if isinstance(own, EncoderCache) else small.backend, *batch, max_new_tokens=LONGEST
            )
        yield from call_rows(precision, backend, rounds)
        texts = {task: ending(backend, tokenizer, task, limit) for task in evaluation.NAMES}
        for size in BATCHES:
            for task in tqdm(evaluation.NAMES, desc=f"{precision}, batch {size}", unit="task"):
                given = batches(tokenizer, texts[task], size)
                yield from rows_of(task, precision, backend, runs, given, rounds)


def main() -> None:
    """Measure everything and write the rows to a file, in one piece."""
    parser = record_parser("Measure lookup and speculative decoding against greedy search.", rounds=5)
    parser.add_argument("--draft", help="a model of the same vocabulary that guesses: a name or a folder")
    parser.add_argument("--limit", type=int, default=16, help="texts of each group of a task (16)")
    args = parser.parse_args()
    rows = list(all_rows(args.draft, args.limit, args.rounds))
    draft = f" --draft {args.draft}" if args.draft else ""
    command = f"python -m bench.record.drafts{draft} --limit {args.limit} --rounds {args.rounds}"
    write_rows(args.json, rows, command=command)
    for row in rows:
        if "drafted" in row:
            low, high = min(row["ratio_samples"]), max(row["ratio_samples"])
            print(
                f"{row['precision']:5} batch {row['batch']} {row['task']:12} {row['encoder']:10} {row['system']:11} "
                f"{row['ratio']:.2f}x ({low:.2f}–{high:.2f}), {row['accepted']} of {row['drafted']} guesses accepted, "
                f"{row['equal']} of {row['of']} answers equal"
            )
    print(f"{len(rows)} rows in {args.json}")


if __name__ == "__main__":
    main()
