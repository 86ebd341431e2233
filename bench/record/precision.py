"""Measure every recipe of the ladder: quality on the bundled model, speed and bytes at t5-small's size, and the sweep.

`data/results/precision.json` is where a recorded run belongs. A row of quality and a row of speed belong together by a
recipe's hash.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bench import evaluation
from bench.harness import Contender, run_comparison
from bench.precision import agreement, sweep, text_quality
from bench.results import Row, record_parser, write_rows
from bench.systems import Generate, by_generate, by_our_loop
from t5accel import machine
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.ort_static import OrtStatic
from t5accel.graphs.export_cache import cached_export
from t5accel.graphs.manifest import read_manifest
from t5accel.models.load import load_model
from t5accel.precision.calibration import CalibrationSample
from t5accel.precision.convert import convert_export
from t5accel.precision.recipes import RECIPES, Recipe, Scheme
from t5accel.timing import Work
from t5accel.tokenization import TokenizerFile

SIZE = "random:t5-small"
BATCHES = {1: 64, 8: 32, 32: 16}  # and how many tokens are generated


def everywhere(name: str, scheme: Scheme, embedding: Scheme | None = None) -> Recipe:
    """One scheme for all products."""
    return Recipe(name, encoder=scheme, decoder=scheme, head=scheme, embedding=embedding)


def blocks(bits: int, size: int, level: int = 4) -> Recipe:
    """Weight-only, the embedding included."""
    scheme = Scheme(bits=bits, block_size=size, accuracy_level=level)
    return everywhere(f"weights-{bits}bit-{size}{'' if level == 4 else f'-level{level}'}", scheme, scheme)


def int4_in_blocks(size: int) -> Recipe:
    """int4 with blocks of one size in all that has 4 bits, to compare with."""
    scheme = Scheme(bits=4, block_size=size)
    return replace(RECIPES["int4"], name=f"int4-{size}", decoder=scheme, head=scheme, embedding=scheme)


DYNAMIC = Scheme("dynamic")
LADDER = (
    RECIPES["fp16"],
    everywhere("dynamic-per-tensor", Scheme("dynamic", per_channel=False)),
    everywhere("dynamic-per-channel", DYNAMIC),
    everywhere("dynamic-reduced-range", Scheme("dynamic", reduce_range=True)),
    everywhere("static-per-channel", Scheme("static")),
    Recipe("dynamic-without-head", encoder=DYNAMIC, decoder=DYNAMIC),
    blocks(8, 32),
    blocks(8, 64),
    blocks(8, 128),
    blocks(4, 16),
    blocks(4, 32),
    blocks(4, 64),
    blocks(4, 32, level=1),
    RECIPES["int8"],
    RECIPES["int8-dynamic"],
    RECIPES["int4"],
    int4_in_blocks(32),
    int4_in_blocks(64),
)


def examples(folder: Path, rows: int = 24) -> list[CalibrationSample]:
    """Sentences of all three tasks with a reference each, for calibration and for agreement."""
    tokenizer, found = TokenizerFile(folder), []
    for name in evaluation.NAMES:
        chosen = evaluation.rows(name)[:rows]
        sources = tokenizer([evaluation.source_text(name, row) for row in chosen])
        answers = tokenizer([(evaluation.references(name, row) or ["unanswerable"])[0] for row in chosen])["input_ids"]
        given = np.concatenate([np.zeros((len(chosen), 1), dtype=np.int64), answers[:, :-1]], axis=1)
        found.append(CalibrationSample(sources["input_ids"], sources["attention_mask"], given))
    return found


def quality_rows() -> Iterator[Row]:
    """Each recipe on the bundled model: text scores over all three sets, and agreement given the same tokens."""
    folder = cached_export("mini")
    given = examples(folder)
    texts, agrees = text_quality(), agreement(folder, given)

    def row(recipe: Recipe, place: Path) -> Row:
        sizes = {"size_bytes": read_manifest(place, verify=False).graph_bytes}
        return {"measured": "quality", "model": "mini", **_of(recipe), **sizes, **texts(place), **agrees(place)}

    yield row(RECIPES["fp32"], folder)
    for recipe in tqdm(LADDER, desc="quality", unit="recipe"):
        with tempfile.TemporaryDirectory() as out:
            convert_export(folder, Path(out) / "copy", recipe, examples=given)
            yield row(recipe, Path(out) / "copy")


def speed_rows(rounds: int) -> Iterator[Row]:
    """Each recipe at t5-small's size beside transformers with its cache, greedy, source 64; last, the long way."""
    import torch

    threads = machine.cpu_threads()
    torch.set_num_threads(threads)
    model, folder = load_model(SIZE)[0], cached_export(SIZE)
    ids = np.random.default_rng(0).integers(3, 32_000, (max(BATCHES), 64))
    given = [CalibrationSample(ids[:4], np.ones_like(ids[:4]), ids[:4, :16])]
    int8 = torch.ao.quantization.quantize_dynamic(load_model(SIZE)[0], {torch.nn.Linear}, dtype=torch.qint8)
    runs = {
        "transformers with cache": (by_generate(model), {}),
        "torch dynamic int8": (by_generate(int8), {}),
        "torch bf16": (by_generate(load_model(SIZE)[0].to(torch.bfloat16)), {}),
    }

    def forced(generate: Generate, batch: int, tokens: int) -> Callable[[], np.ndarray]:
        return partial(generate, ids[:batch], np.ones_like(ids[:batch]), tokens, tokens)

    with tempfile.TemporaryDirectory() as root:
        for recipe in tqdm((RECIPES["fp32"], *LADDER), desc="converting", unit="recipe"):
            place = folder if recipe.name == "fp32" else Path(root) / recipe.name
            if place != folder:
                convert_export(folder, place, recipe, examples=given)
            engine = OrtStatic(place, settings=SessionSettings(threads=threads), verify=place == folder)
            size_bytes = read_manifest(place, verify=False).graph_bytes
            runs[recipe.name] = by_our_loop(engine), {**_of(recipe), "size_bytes": size_bytes}
        for batch, tokens in BATCHES.items():
            ways = [
                Contender(name, partial(forced, run, batch, tokens), exact=name == "fp32", facts=facts)
                for name, (run, facts) in runs.items()
            ]
            work = Work(batch, 64, tokens, threads=threads)
            yield from run_comparison(ways, work, rounds=rounds, cell="recipes", model=SIZE)
        tokens, naive, int4 = 256, by_generate(model, use_cache=False), runs["int4"][0]
        long = [
            Contender("naive", partial(forced, naive, 1, tokens), facts=_of(RECIPES["fp32"])),
            Contender("int4", partial(forced, int4, 1, tokens), exact=False, facts=_of(RECIPES["int4"])),
        ]
        work = Work(1, 64, tokens, threads=threads)
        yield from run_comparison(long, work, rounds=rounds, cell=f"{tokens} new tokens", model=SIZE)


def sweep_rows() -> Iterator[Row]:
    """How far each group of weights, alone rounded, is from fp32, in int8-dynamic and in int4."""
    folder = cached_export("mini")
    score = agreement(folder, examples(folder))
    for name in ("int8-dynamic", "int4"):
        with tqdm(desc=f"sweep {name}", unit="group") as bar:
            for one in sweep(folder, name, score, on_group=lambda _, bar=bar: bar.update()):
                about = {"measured": "sweep", "model": "mini", **_of(RECIPES[name]), "group": one.group}
                yield {**about, **one.scores, "size_bytes": one.size_bytes}


def _of(recipe: Recipe) -> Row:
    return {"precision": recipe.name, "recipe_hash": recipe.hash}


def main() -> None:
    """Measure everything and write the rows to a file, in one piece."""
    parser = record_parser("Measure every recipe of the ladder.", rounds=5)
    args = parser.parse_args()
    rows = [*quality_rows(), *sweep_rows(), *speed_rows(args.rounds)]
    write_rows(args.json, rows, command=f"python -m bench.record.precision --rounds {args.rounds}")
    print(f"{len(rows)} rows in {args.json}")


if __name__ == "__main__":
    main()
