"""A model and those made from it, side by side: quality, bytes and the time of a step, in each recipe."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bench import evaluation as quality
from bench import tasks
from bench.harness import Way, measured
from bench.precision import backend_scores
from bench.results import Row, at_path, chosen, here, rows_so_far, write_rows
from bench.techniques import bytes_of
from t5accel import machine
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.ort_static import OrtStatic
from t5accel.backends.torch_eager import TorchEager
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import InputError
from t5accel.graphs.export import export_t5, source_hash, t5_weights
from t5accel.models.load import load_t5
from t5accel.models.sizes import T5Dims
from t5accel.precision.convert import convert_export
from t5accel.precision.recipes import as_recipe
from t5accel.roofline import decoder_weights_per_step
from t5accel.timing import Work
from t5accel.tokenization import TokenizerFile

Name = TypeVar("Name")


def family_rows(
    members: Mapping[str, str | os.PathLike[str]], *, recipes: Sequence[str] = ("fp32", "int8"), rounds: int = 5,
    batch: int = 1, source_tokens: int = 64, new_tokens: int = 64, limit: int | None = None,
    scored: Collection[str] | None = None, on_model: Callable[[str], None] | None = None,
) -> list[Row]:  # fmt: skip
    """For each member a row of its sizes; for each of its recipes text scores, bytes, and its time against the first's.

    Every export in fp32 is shown to give its checkpoint's tokens before it is timed; all are timed interleaved,
    greedily, at a forced length.

    Args:
        members: by what the rows call them, names or folders that `checkpoints.load_t5` knows, with tokenizers; the
            first is what the others are compared with, in the first recipe.
        recipes: some of `recipes.RECIPES`.
        rounds: of the timing; ratios are formed within each.
        batch, source_tokens, new_tokens: what is timed.
        limit: rows of each length bucket or half that are scored; by default all, and with 0 none.
        scored: members that are scored; by default all.
        on_model: is called with the name of each member once it is exported.

    Raises:
        InputError: there are no two rows to compare, or a member has no tokenizer, or says one token again and again.
        ParityError: an export in fp32 gives other tokens than its checkpoint.

    >>> rows = family_rows({"mini": "mini"}, recipes=["fp32", "int8"], rounds=1, new_tokens=4, limit=0)
    >>> [row["measured"] for row in rows], rows[1]["size_bytes"] > 2 * rows[2]["size_bytes"]
    (['size', 'speed', 'speed'], True)
    """
    if len(members) * len({*recipes}) < 2:
        raise InputError("There is nothing to compare: give two members, or a member and two recipes.")
    threads = machine.cpu_threads()
    ids = None  # of the first member's tokenizer; the others read the same
    engines: dict[str, OrtStatic] = {}
    ways: list[Way] = []
    about: list[Row] = []
    with tempfile.TemporaryDirectory() as root:
        for number, (name, where) in enumerate(members.items()):
            model, tokenizer = load_t5(where)
            if tokenizer is None:
                raise InputError(f"{name} ({where}) has no tokenizer: save one beside it.")
            if ids is None:
                ids = np.array(tasks.sources_of_length(tokenizer, batch, source_tokens), dtype=np.int64)
            dims = T5Dims.of(model)
            weights = {"weights_per_step": decoder_weights_per_step(dims)}
            about.append(
                {"measured": "size", "model": name, **weights, "settings": asdict(dims), "sha256": _hash(model)}
            )
            in_fp32 = Path(root) / f"{number}-fp32"
            export_t5(model, in_fp32, tokenizer=tokenizer, name=name, step=True)
            for recipe in map(as_recipe, recipes):
                folder = in_fp32 if recipe.name == "fp32" else Path(root) / f"{number}-{recipe.name}"
                if folder != in_fp32:
                    convert_export(in_fp32, folder, recipe)
                engine = engines[f"{name}, {recipe.name}"] = OrtStatic(
                    folder, settings=SessionSettings(threads=threads)
                )
                if recipe.name == "fp32":
                    _prove_equal(TorchEager(model), engine, tokenizer)
                facts = {"model": name, "precision": recipe.name, "recipe_hash": recipe.hash, **weights,
                         "size_bytes": bytes_of(folder)}  # fmt: skip
                run = partial(_sequences, engine, ids, new_tokens)
                ways.append(Way(f"{name}, {recipe.name}", lambda run=run: run, exact=False, facts=facts))
            if on_model is not None:
                on_model(name)
        rows = measured(ways, Work(batch, source_tokens, new_tokens, threads=threads), rounds=rounds)
        if limit != 0:
            for row in rows if scored is None else [row for row in rows if row["model"] in scored]:
                engine = engines[row["system"]]
                row |= backend_scores(engine, TokenizerFile(engine.folder), limit=limit)
    return [found for one in about for found in (one, *chosen(rows, model=one["model"]))]


def recorded_family(
    path: str | os.PathLike[str], whole: str, members: Mapping[str, str | os.PathLike[str]], *, command: str,
    told: Callable[[str, list[Row]], list[Row]], **options: Any,
) -> list[Row]:  # fmt: skip
    """A file of `family_rows`, which grows: each member is measured beside the whole model, in a run of its own.

    So nothing is lost with a member's weights once it is written down. A member is measured again if it has other
    weights than in the file, and only then, as long as the whole model's weights, CPU, libraries and command are the
    same; else the file is put aside. Rows of different members are compared by their ratios.

    Args:
        path: of the file. Commit it before it is gone on with, or what is added is said to come of a dirty checkout.
        whole: the name of the model that all were made from, which comes first in the file, from its first run.
        members: by name, where they lie.
        command: that wrote the file.
        told: takes a member's name and its rows, and returns what is written of it.
        options: as of `family_rows`.

    Returns:
        All rows of the file.
    """
    about = here() | {"whole_sha256": _hash(load_t5(whole)[0])}
    libraries = [f"versions.{name}" for name in ("torch", "transformers", "onnxruntime")]
    same = {name: at_path(about, name) for name in ("whole_sha256", "machine.cpu", *libraries)}
    rows: list[Row] = rows_so_far(path, {**same, "command": command})
    for name, where in members.items():
        known = {row["model"]: row["sha256"] for row in rows if row["measured"] == "size"}
        if known.get(name) == _hash(load_t5(where)[0]):
            continue
        scored = {name} if whole in known else {whole, name}
        found = family_rows({whole: whole, name: where}, scored=scored, **options)
        found = [row | {"commit": about["commit"] or "unknown"} for row in found if row["model"] in scored]
        rows = [row for row in rows if row["model"] != name] + [row for row in found if row["model"] == whole]
        rows += told(name, [row for row in found if row["model"] == name])
        write_rows(path, rows, command=command, **about)
    return rows


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


def _hash(model: Any) -> str:
    return source_hash(model, t5_weights(model))


def _sequences(engine: OrtStatic, ids: np.ndarray, new_tokens: int) -> np.ndarray:
    return greedy(engine, ids, min_new_tokens=new_tokens, max_new_tokens=new_tokens).sequences


def _prove_equal(checkpoint: TorchEager, export: OrtStatic, tokenizer: Any) -> None:
    """On texts of all tasks: what was pruned and not yet trained may say one token again and again in some of them."""
    texts = [tasks.source_text(task, row) for task in tasks.NAMES for row in tasks.rows(task, limit=1)]
    found = tokenizer(texts, return_tensors="np", padding=True)
    given = {key: found[key] for key in ("input_ids", "attention_mask")}
    expected, same = (greedy(engine, **given, max_new_tokens=16).sequences for engine in (checkpoint, export))
    quality.assert_varied(expected)
    quality.parity(same, expected, atol=0)
