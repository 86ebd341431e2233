"""A model and those made from it, side by side: quality, bytes and the time of a step, in each recipe."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

from t5accel import machine, quality, tasks
from t5accel.backends.ort import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.torch_eager import TorchEager
from t5accel.checkpoints import T5Dims, load_t5
from t5accel.decoding.greedy import greedy
from t5accel.decoding.text import text_to_text
from t5accel.decoding.tokenizer_file import TokenizerFile
from t5accel.errors import InputError
from t5accel.graphs.contract import DECODER, ENCODER, SHORTLIST, WEIGHTS
from t5accel.graphs.convert import convert_export
from t5accel.graphs.export import export_t5
from t5accel.graphs.manifest import read_manifest
from t5accel.graphs.recipes import as_recipe
from t5accel.timing import Candidate, Work, compare

Name = TypeVar("Name")
GRAPHS = (ENCODER, DECODER, SHORTLIST, WEIGHTS)


def family_rows(
    members: Mapping[str, str | os.PathLike[str]], *, recipes: Sequence[str] = ("fp32", "int8"), rounds: int = 5,
    batch: int = 1, source_tokens: int = 64, new_tokens: int = 64, limit: int | None = None,
    on_model: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each member and recipe: text scores, bytes, and its time against the first one's, in the first recipe.

    Every export in fp32 is shown to give its checkpoint's tokens before it is timed; all are timed interleaved,
    greedily, at a forced length.

    Args:
        members: by what the rows call them, names or folders that `checkpoints.load_t5` knows, with tokenizers; the
            first is what the others are compared with.
        recipes: some of `recipes.RECIPES`.
        rounds: of the timing; ratios are formed within each.
        batch, source_tokens, new_tokens: what is timed.
        limit: rows of each length bucket or half that are scored; by default all, and with 0 none.
        on_model: is called with the name of each member that is exported and scored.

    Raises:
        InputError: there are no two rows to compare, or a member has no tokenizer, or says one token again and again.
        ParityError: an export in fp32 gives other tokens than its checkpoint.

    >>> rows = family_rows({"mini": "mini"}, recipes=["fp32", "int8"], rounds=1, new_tokens=4, limit=0)
    >>> [row["recipe"] for row in rows], rows[0]["size_bytes"] > 2 * rows[1]["size_bytes"]
    (['fp32', 'int8'], True)
    """
    if len(members) * len({*recipes}) < 2:
        raise InputError("There is nothing to compare: give two members, or a member and two recipes.")
    threads = machine.cpu_threads()
    settings = SessionSettings(threads=threads)
    ids = None  # of the first member's tokenizer; the others read the same
    engines: dict[tuple[str, str], OrtNumpy] = {}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as root:
        for number, (name, where) in enumerate(members.items()):
            model, tokenizer = load_t5(where)
            if tokenizer is None:
                raise InputError(f"{name} ({where}) has no tokenizer: save one beside it.")
            if ids is None:
                ids = np.array(tasks.sources_of_length(tokenizer, batch, source_tokens), dtype=np.int64)
            dims = T5Dims.of(model)
            in_fp32 = Path(root) / f"{number}-fp32"
            export_t5(model, in_fp32, tokenizer=tokenizer, name=name, external_threshold_bytes=0)  # weights once
            for precision in recipes:
                recipe = as_recipe(precision)
                folder = in_fp32 if recipe.name == "fp32" else Path(root) / f"{number}-{recipe.name}"
                if folder != in_fp32:
                    convert_export(in_fp32, folder, recipe)
                engine = OrtNumpy(folder, settings=settings)
                if recipe.name == "fp32":
                    _prove_equal(TorchEager(model), engine, tokenizer)
                rows[name, precision] = {
                    "model": name, "recipe": recipe.name, "hash": recipe.hash, "dims": asdict(dims),
                    "size_bytes": _bytes(folder), "weights_per_step": machine.decoder_weights_per_step(dims),
                    "quality": None if limit == 0 else _quality(engine, folder, limit),
                }  # fmt: skip
                engines[name, precision] = engine
            if on_model is not None:
                on_model(name)
        work = Work(batch=batch, source_tokens=source_tokens, new_tokens=new_tokens, threads=threads)

        def candidate(key: tuple[str, str]) -> Candidate:
            def run() -> Work:
                out = greedy(engines[key], ids, min_new_tokens=new_tokens, max_new_tokens=new_tokens).sequences
                return Work(batch=len(out), source_tokens=source_tokens, new_tokens=out.shape[1], threads=threads)

            return Candidate("/".join(key), run, work)

        first, *others = engines
        timed = compare(candidate(first), *map(candidate, others), rounds=rounds)
    for key, row in rows.items():
        latency, ratio = timed.latencies["/".join(key)], timed.ratios.get("/".join(key))
        row |= {
            "batch": batch, "source_tokens": source_tokens, "new_tokens": new_tokens, "threads": threads,
            "latency_s": list(latency.samples_s), "tokens_per_s": batch * new_tokens / median(latency.samples_s),
            "ratio": None if ratio is None else ratio.to_json(),
        }  # fmt: skip
    return list(rows.values())


def pareto(points: Mapping[Name, tuple[float, float]], *, level: float = 0.02) -> list[Name]:
    """The names of those points that no other one beats in both numbers, the largest first number first.

    Args:
        points: such as (tokens a second, score): more is better, in both.
        level: first numbers that differ by no more than this share count as equal.

    >>> pareto({"whole": (1.0, 90.0), "small": (2.0, 80.0), "bad": (1.5, 70.0), "hardly faster": (2.01, 60.0)})
    ['small', 'whole']
    """
    found: list[Name] = []
    for name in sorted(points, key=points.__getitem__, reverse=True):
        first, second = points[name]
        if not found or second > points[found[-1]][1]:
            if found and points[found[-1]][0] <= (1 + level) * first:
                found.pop()
            found.append(name)
    return found


def _prove_equal(checkpoint: TorchEager, export: OrtNumpy, tokenizer: Any) -> None:
    """On texts of all tasks: what was pruned and not yet trained may say one token again and again in some of them."""
    texts = [tasks.source_text(task, row) for task in tasks.NAMES for row in tasks.rows(task, limit=1)]
    found = tokenizer(texts, return_tensors="np", padding=True)
    given = {key: found[key] for key in ("input_ids", "attention_mask")}
    expected, same = (greedy(engine, **given, max_new_tokens=16).sequences for engine in (checkpoint, export))
    quality.assert_varied(expected)
    quality.parity(same, expected, atol=0)


def _quality(engine: OrtNumpy, folder: Path, limit: int | None) -> dict[str, Any]:
    generate = text_to_text(
        TokenizerFile(folder), lambda ids, mask: greedy(engine, ids, mask, max_new_tokens=64).sequences
    )
    return quality.evaluate(generate, limit=limit).to_json()


def _bytes(folder: Path) -> int:
    files = read_manifest(folder, verify=False).files
    return sum(files[name]["size_bytes"] for name in GRAPHS if name in files)
