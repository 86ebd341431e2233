"""Measure every recipe of the ladder: quality on the bundled model, speed and bytes at t5-small's size, and the sweep.

`data/results/precision.json` is where a recorded run belongs. A row of quality and a row of speed belong together by a
recipe's hash.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tqdm import tqdm

from t5accel import machine, tasks
from t5accel.backends.ort import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.checkpoints import load_t5
from t5accel.decoding.greedy import greedy
from t5accel.decoding.tokenizer_file import TokenizerFile
from t5accel.graphs.convert import convert_export
from t5accel.graphs.export_cache import cached_export
from t5accel.graphs.manifest import read_manifest
from t5accel.graphs.probe import Example
from t5accel.graphs.recipes import RECIPES, Recipe, Scheme
from t5accel.graphs.sensitivity import sweep
from t5accel.records import write_rows
from t5accel.lab.scoring import agreement, text_quality
from t5accel.timing import Candidate, Work, compare

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


def examples(folder: Path, rows: int = 24) -> list[Example]:
    """Sentences of all three tasks with a reference each, for calibration and for agreement."""
    tokenizer, found = TokenizerFile(folder), []
    for name in tasks.NAMES:
        chosen = tasks.rows(name)[:rows]
        sources = tokenizer([tasks.source_text(name, row) for row in chosen])
        answers = tokenizer([(tasks.references(name, row) or ["unanswerable"])[0] for row in chosen])["input_ids"]
        given = np.concatenate([np.zeros((len(chosen), 1), dtype=np.int64), answers[:, :-1]], axis=1)
        found.append(Example(sources["input_ids"], sources["attention_mask"], given))
    return found


def convert(folder: Path, out: Path, recipe: Recipe, given: list[Example]) -> dict[str, int]:
    """Write a copy; the bytes of its graphs and weights, by file."""
    convert_export(folder, out, recipe, examples=given)
    return _files(out)


def quality_rows() -> Iterator[dict[str, Any]]:
    """Each recipe on the bundled model: text scores over all three sets, and agreement given the same tokens."""
    folder = cached_export("mini")
    given = examples(folder)
    texts, agrees = text_quality(), agreement(folder, given)
    yield {"measured": "quality", **_of(RECIPES["fp32"]), "files": _files(folder), **texts(folder), **agrees(folder)}
    for recipe in tqdm(LADDER, desc="quality", unit="recipe"):
        with tempfile.TemporaryDirectory() as out:
            files = convert(folder, Path(out) / "copy", recipe, given)
            scores = {**texts(Path(out) / "copy"), **agrees(Path(out) / "copy")}
        yield {"measured": "quality", **_of(recipe), "files": files, **scores}


def speed_rows(rounds: int) -> Iterator[dict[str, Any]]:
    """Each recipe at t5-small's size beside transformers with its cache, interleaved, greedy, source 64."""
    import torch

    threads = machine.cpu_threads()
    torch.set_num_threads(threads)
    model, folder = load_t5(SIZE)[0], cached_export(SIZE)
    ids = np.random.default_rng(0).integers(3, 32_000, (max(BATCHES), 64))
    given = [Example(ids[:4], np.ones_like(ids[:4]), ids[:4, :16])]
    dims = read_manifest(folder, verify=False).dims
    # The best of several: what else runs on the machine makes each lower, and a floor is what nothing goes below.
    bandwidth = max(machine.bandwidth_bytes_per_s(threads=threads) for _ in range(5))
    rates = dict(bandwidth=bandwidth, gemm=max(machine.gemm_flops_per_s() for _ in range(5)))
    for precision in ("fp32", "int8", "int4"):  # at batch 1 all are bound by bandwidth, whatever the arithmetic
        yield {"measured": "floor", "model": SIZE, **rates, **asdict(machine.roofline(dims, precision, **rates))}
    with tempfile.TemporaryDirectory() as root:
        engines = {"fp32": OrtNumpy(folder, settings=SessionSettings(threads=threads))}
        files = {"fp32": _files(folder)}
        recipes = {"fp32": RECIPES["fp32"]}
        for recipe in tqdm(LADDER, desc="converting", unit="recipe"):
            files[recipe.name] = convert(folder, Path(root) / recipe.name, recipe, given)
            settings = SessionSettings(threads=threads)
            engines[recipe.name] = OrtNumpy(Path(root) / recipe.name, settings=settings, verify=False)
            recipes[recipe.name] = recipe
        int8 = torch.ao.quantization.quantize_dynamic(load_t5(SIZE)[0], {torch.nn.Linear}, dtype=torch.qint8)
        bf16 = load_t5(SIZE)[0].to(torch.bfloat16)
        for batch, tokens in BATCHES.items():
            work = Work(batch=batch, source_tokens=64, new_tokens=tokens, threads=threads)

            def candidate(name: str, run: Callable[[], np.ndarray], work: Work = work) -> Candidate:
                def done() -> Work:
                    out = run()
                    return Work(batch=len(out), source_tokens=64, new_tokens=out.shape[1], threads=threads)

                return Candidate(name, done, work)

            def theirs(own: Any, rows: np.ndarray = ids[:batch], count: int = tokens) -> np.ndarray:
                tensor = torch.from_numpy(rows)
                with torch.inference_mode():
                    return own.generate(
                        tensor, attention_mask=torch.ones_like(tensor), min_new_tokens=count, max_new_tokens=count,
                        do_sample=False, num_beams=1,
                    )[:, 1:].numpy()  # fmt: skip

            def ours(own: OrtNumpy, rows: np.ndarray = ids[:batch], count: int = tokens) -> np.ndarray:
                return greedy(own, rows, min_new_tokens=count, max_new_tokens=count).sequences

            others = [candidate(name, lambda own=own: ours(own)) for name, own in engines.items()]
            others.append(candidate("torch dynamic int8", lambda: theirs(int8)))
            others.append(candidate("torch bf16", lambda: theirs(bf16)))
            reference = candidate("transformers with cache", lambda: theirs(model))
            found = compare(reference, *others, rounds=rounds)
            for name, latency in found.latencies.items():
                ratio = found.ratios.get(name)
                yield {
                    "measured": "speed", "model": SIZE, "batch": batch, "source_tokens": 64, "new_tokens": tokens,
                    "system": name, **(_of(recipes[name]) if name in recipes else {}), "files": files.get(name),
                    "latency_s": list(latency.samples_s), "ms_per_step": median(latency.samples_s) / tokens * 1e3,
                    "ratio": None if ratio is None else ratio.to_json(),
                }  # fmt: skip


def long_row(rounds: int) -> dict[str, Any]:
    """256 new tokens: int4 against transformers without a cache."""
    import torch

    threads, tokens = machine.cpu_threads(), 256
    model, engine = load_t5(SIZE)[0], OrtNumpy(cached_export(SIZE, precision="int4"))
    ids = np.random.default_rng(0).integers(3, 32_000, (1, 64))
    tensor = torch.from_numpy(ids)
    work = Work(batch=1, source_tokens=64, new_tokens=tokens, threads=threads)

    def naive() -> Work:
        with torch.inference_mode():
            out = model.generate(
                tensor, attention_mask=torch.ones_like(tensor), use_cache=False, min_new_tokens=tokens,
                max_new_tokens=tokens, do_sample=False, num_beams=1,
            )  # fmt: skip
        return Work(batch=1, source_tokens=64, new_tokens=out.shape[1] - 1, threads=threads)

    def int4() -> Work:
        out = greedy(engine, ids, min_new_tokens=tokens, max_new_tokens=tokens).sequences
        return Work(batch=1, source_tokens=64, new_tokens=out.shape[1], threads=threads)

    found = compare(Candidate("naive", naive, work), Candidate("int4", int4, work), rounds=rounds)
    ratio = found.ratios["int4"]
    seconds = {name: list(latency.samples_s) for name, latency in found.latencies.items()}
    return {"measured": "256 new tokens", "model": SIZE, **_of(RECIPES["int4"]), "latency_s": seconds,
            "ratio": ratio.to_json()}  # fmt: skip


def sweep_rows() -> Iterator[dict[str, Any]]:
    """What each group of weights loses alone, in int8-dynamic and in int4."""
    folder = cached_export("mini")
    score = agreement(folder, examples(folder))
    for name in ("int8-dynamic", "int4"):
        with tqdm(desc=f"sweep {name}", unit="group") as bar:
            for one in sweep(folder, name, score, on_group=lambda _, bar=bar: bar.update()):
                yield {"measured": "sweep", **_of(RECIPES[name]), **asdict(one)}


def _of(recipe: Recipe) -> dict[str, str]:
    return {"recipe": recipe.name, "hash": recipe.hash}


def _files(folder: Path) -> dict[str, int]:
    files = read_manifest(folder, verify=False).files
    return {name: entry["size_bytes"] for name, entry in files.items() if not name.endswith(".json")}


def main() -> None:
    """Measure everything and write the rows to a file, in one piece."""
    parser = argparse.ArgumentParser(description="Measure every recipe of the ladder.")
    parser.add_argument("--json", type=Path, required=True, help="where the rows go")
    parser.add_argument("--rounds", type=int, default=5, help="of the interleaved timing (5)")
    args = parser.parse_args()
    rows = [*quality_rows(), *sweep_rows(), *speed_rows(args.rounds), long_row(args.rounds)]
    write_rows(args.json, rows, command=f"python scripts/precision.py --rounds {args.rounds}")
    print(f"{len(rows)} rows in {args.json}")


if __name__ == "__main__":
    main()
