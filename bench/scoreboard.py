"""Measure systems, or a model and its students, on one job: equality, then time, memory and quality."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench import evaluation
from bench.harness import Contender, memory_alone, run_comparison
from bench.precision import backend_scores, generated_scores
from bench.results import Row, environment, filter_rows, format_table, get_path, rows_so_far, step_ms, write_rows
from bench.roofline import decoder_weights_per_step
from bench.systems import CPU_REFERENCE, SYSTEMS, BenchModel, Generate, System, by_our_loop, select_systems
from t5accel import machine
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.ort_static import OrtStatic
from t5accel.checks import as_count, read_json_object
from t5accel.decoding.backend import Backend
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import InputError
from t5accel.graphs.export import export_model, source_hash, t5_weights
from t5accel.graphs.manifest import read_manifest
from t5accel.models.load import BUNDLED, load_model
from t5accel.models.sizes import T5Dims
from t5accel.parity import assert_close, assert_varied
from t5accel.precision.convert import convert_export
from t5accel.precision.recipes import as_recipe
from t5accel.timing import Work
from t5accel.tokenization import TokenizerFile


def family_rows(
    members: Mapping[str, str | os.PathLike[str]], *, recipes: Sequence[str] = ("fp32", "int8"), rounds: int = 5,
    batch: int = 1, source_tokens: int = 64, new_tokens: int = 64, limit: int | None = None,
    scored: Collection[str] | None = None, on_model: Callable[[str], None] | None = None,
) -> list[Row]:  # fmt: skip
    """A row of sizes for each member; for each of its recipes scores, bytes, and its time over the first's.

    Every fp32 export is proven equal to its checkpoint, then all are timed interleaved, greedily, at a forced length.

    Args:
        members: names or folders of models with tokenizers, by their names in the rows. The first one, in the first
            recipe, is the reference.
        limit: rows to score of each length bucket or half; by default all, and with 0 none.
    """
    if len(members) * len({*recipes}) < 2:
        raise InputError("members and recipes must make two or more. Give two members, or a member and two recipes.")
    threads = machine.cpu_threads()
    ids = None  # by the first member's tokenizer; the others read the same
    engines: dict[str, OrtStatic] = {}
    entries: list[Contender] = []
    about: list[Row] = []
    with tempfile.TemporaryDirectory() as root:
        for number, (name, where) in enumerate(members.items()):
            model, tokenizer = load_model(where)
            if tokenizer is None:
                raise InputError(f"{name} ({where}) has no tokenizer: save one beside it.")
            if ids is None:
                ids = np.array(evaluation.sources_of_length(tokenizer, batch, source_tokens), dtype=np.int64)
            dims = T5Dims.of(model)
            weights = {"weights_per_step": decoder_weights_per_step(dims)}
            about.append(
                {"measured": "size", "model": name, **weights, "settings": asdict(dims), "sha256": _hash(model)}
            )
            in_fp32 = Path(root) / f"{number}-fp32"
            export_model(model, in_fp32, tokenizer=tokenizer, name=name, step=True)
            for recipe in map(as_recipe, recipes):
                folder = in_fp32
                if recipe.name != "fp32":
                    folder = Path(root) / f"{number}-{recipe.name}"
                    convert_export(in_fp32, folder, recipe)
                engine = OrtStatic(folder, settings=SessionSettings(threads=threads))
                if recipe.name == "fp32":
                    from t5accel.backends.torch_eager import TorchEager  # importing this module loads no torch

                    _prove_equal(TorchEager(model), engine, tokenizer)
                facts = {"model": name, "precision": recipe.name, "recipe_hash": recipe.hash, **weights,
                         "size_bytes": read_manifest(folder, verify=False).graph_bytes}  # fmt: skip
                run = partial(_forced, ids, new_tokens, by_our_loop(engine), batch)
                entries.append(Contender(f"{name}, {recipe.name}", lambda run=run: run, exact=False, facts=facts))
                engines[entries[-1].name] = engine
            if on_model is not None:
                on_model(name)
        rows = run_comparison(entries, Work(batch, source_tokens, new_tokens, threads=threads), rounds=rounds)
        for row in rows:
            if limit != 0 and (scored is None or row["model"] in scored):
                engine = engines[row["system"]]
                row |= backend_scores(engine, TokenizerFile(engine.folder), limit=limit)
    return [found for one in about for found in (one, *filter_rows(rows, model=one["model"]))]


def recorded_family(
    path: str | os.PathLike[str], whole: str, members: Mapping[str, str | os.PathLike[str]], *, command: str,
    told: Callable[[str, list[Row]], list[Row]], **options: Any,
) -> list[Row]:  # fmt: skip
    """A growing file of `family_rows`: each member is measured beside the whole model, in a separate run.

    So its rows outlive a member's weights. Only a member with new weights is measured again, while the whole model's
    weights, CPU, libraries and command stay the same; else the file is put aside. Ratios compare different members.

    Args:
        path: of the file. Commit it before it grows, or its new rows name a dirty checkout.
        told: takes a member's name and its rows, and returns the rows to write.
    """
    about = environment() | {"whole_sha256": _hash(load_model(whole)[0])}
    libraries = [f"versions.{name}" for name in ("torch", "transformers", "onnxruntime")]
    same = {name: get_path(about, name) for name in ("whole_sha256", "machine.cpu", *libraries)}
    rows: list[Row] = rows_so_far(path, {**same, "command": command})
    for name, where in members.items():
        known = {row["model"]: row["sha256"] for row in rows if row["measured"] == "size"}
        if known.get(name) == _hash(load_model(where)[0]):
            continue
        scored = {name} if whole in known else {whole, name}
        found = family_rows({whole: whole, name: where}, scored=scored, **options)
        found = [row | {"commit": about["commit"] or "unknown"} for row in found if row["model"] in scored]
        rows = [row for row in rows if row["model"] != name] + [row for row in found if row["model"] == whole]
        rows += told(name, [row for row in found if row["model"] == name])
        write_rows(path, rows, command=command, **about)
    return rows


def _hash(model: Any) -> str:
    return source_hash(model, t5_weights(model))


def _prove_equal(checkpoint: Backend, export: OrtStatic, tokenizer: Any) -> None:
    # A pruned model that is not yet trained may repeat one token, so all tasks are compared.
    texts = [evaluation.source_text(task, row) for task in evaluation.NAMES for row in evaluation.rows(task, limit=1)]
    found = tokenizer(texts, return_tensors="np", padding=True)
    given = {key: found[key] for key in ("input_ids", "attention_mask")}
    expected, same = (greedy(engine, **given, max_new_tokens=16).sequences for engine in (checkpoint, export))
    assert_varied(expected)
    assert_close(same, expected, atol=0)


# (generate, texts at once) -> tokens (N, L) int64, padded with 0. Picklable, for the process that measures memory.
Answers = Callable[[Generate, int], np.ndarray]


class Job(Protocol):
    """The work of every system, or of every rung of a ladder."""

    def answers(self, subject: BenchModel) -> Answers:
        """The job on the subject's tokens."""

    def work(self, subject: BenchModel) -> Work:
        """Its size."""

    def once(self, batch: int) -> Job:
        """The same job with a single batch, for the memory."""


@dataclass(frozen=True)
class Forced:
    """Sources and answers of exact lengths: text where the model has a tokenizer, else noise."""

    new_tokens: int = 64
    source_tokens: int = 64
    batch: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("new_tokens", "source_tokens", "batch"):
            as_count(getattr(self, name), name, at_least=1)

    def answers(self, subject: BenchModel) -> Answers:
        if subject.tokenizer is None:
            random = np.random.default_rng(self.seed)  # from 3 up, ids are ordinary tokens
            ids = random.integers(3, subject.model.config.vocab_size, (self.batch, self.source_tokens))
        else:  # a trained model need not answer noise with more than one token, again and again
            texts = evaluation.sources_of_length(subject.tokenizer, self.batch, self.source_tokens, seed=self.seed)
            ids = np.array(texts, dtype=np.int64)
        return partial(_forced, ids, self.new_tokens)

    def work(self, subject: BenchModel) -> Work:
        return Work(self.batch, self.source_tokens, self.new_tokens, threads=subject.threads)

    def once(self, batch: int) -> Forced:
        return self


def _forced(ids: np.ndarray, new_tokens: int, generate: Generate, batch: int) -> np.ndarray:
    if batch != len(ids):
        raise InputError(f"batch must be {len(ids)}, the sources of this forced job, got {batch}.")
    return generate(ids, np.ones_like(ids), new_tokens, new_tokens)


@dataclass(frozen=True)
class Natural:
    """Texts of a bundled evaluation set, drawn by a seed, with answers of natural length; tokenizing counts."""

    task: str = "summaries"  # one of `evaluation.NAMES`
    texts: int = 64  # how many are drawn
    longest: int = 64  # an answer has no more tokens
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("texts", "longest"):
            as_count(getattr(self, name), name, at_least=1)
        if self.texts > len(evaluation.rows(self.task)):
            raise InputError(
                f"texts must be at most {len(evaluation.rows(self.task))}, those of {self.task}, got {self.texts}."
            )

    def sources(self) -> list[str]:
        """The drawn texts in the order of the set, T5's prefix included."""
        rows = evaluation.rows(self.task)
        drawn = np.random.default_rng(self.seed).choice(len(rows), self.texts, replace=False)
        return [evaluation.source_text(self.task, rows[place]) for place in sorted(drawn.tolist())]

    def answers(self, subject: BenchModel) -> Answers:
        return partial(_natural, subject.export(), self.sources(), self.longest)

    def work(self, subject: BenchModel) -> Work:
        longest = _tokenizer(subject.export())(self.sources())["input_ids"].shape[1]
        return Work(self.texts, longest, self.longest, threads=subject.threads, forced_length=False)

    def once(self, batch: int) -> Natural:
        return replace(self, texts=min(batch, self.texts))


_tokenizer = cache(TokenizerFile)


def _natural(folder: Path, texts: Sequence[str], longest: int, generate: Generate, batch: int) -> np.ndarray:
    tokenizer, found = _tokenizer(folder), np.zeros((len(texts), longest), dtype=np.int64)
    for first in range(0, len(texts), batch):
        given = tokenizer(texts[first : first + batch])
        rows = generate(given["input_ids"], given["attention_mask"], 0, longest)
        tokenizer.batch_decode(rows, skip_special_tokens=True)
        found[first : first + len(rows), : rows.shape[1]] = rows
    return found


def bench(
    model: str = "mini", job: Forced = Forced(), *, systems: Sequence[System] | None = None, rounds: int = 5,  # noqa: B008
    threads: int | None = None, limit: int | None = None, peak_memory: bool = True, seed: int = 0,
    progress: bool = False,
) -> list[Row]:  # fmt: skip
    """Prove the systems equal on one job, then time them interleaved, and score them on the bundled model.

    Students, and systems in other precisions than fp32, may differ: their rows count the shared tokens.

    Args:
        limit: rows to score of each length bucket or half; by default all, and with 0 none.
        peak_memory: measure it too, each system in a separate process.
    """
    import torch

    systems = select_systems([], model=model) if systems is None else systems
    names = [system.name for system in systems]
    if CPU_REFERENCE not in names:
        raise InputError(f"systems must hold the reference, {CPU_REFERENCE!r}, got {names}.")
    if peak_memory and (own := {*names} - SYSTEMS.keys()):  # another process finds systems by their names
        raise InputError(f"peak_memory must be False for systems outside the registry, got {sorted(own)}.")
    as_count(rounds, "rounds", at_least=1)
    threads = machine.cpu_threads() if threads is None else as_count(threads, "threads", at_least=1)
    if limit is not None:
        as_count(limit, "limit", at_least=0)
    torch.set_num_threads(threads)
    subject = BenchModel(model, seed, threads)
    answers, generators = job.answers(subject), {}
    entries = [as_contender(one, one.name, one.measured_on(subject), answers, job.batch, generators) for one in systems]
    entries.sort(key=lambda entry: entry.name != CPU_REFERENCE)  # the reference is the first one
    with machine.progress_bar(shown=progress, total=len(entries) * (rounds + 2), unit="step") as bar:

        def tell(doing: str, name: str) -> None:
            bar.set_description(f"{doing} {name}", refresh=False)
            bar.update()

        rows = run_comparison(
            entries, job.work(subject), rounds=rounds, model=model, on_built=partial(tell, "built"),
            on_run=partial(tell, "timing"),
        )  # fmt: skip
        found = {row["system"]: row for row in rows}
        for system in systems:
            tell("scoring", system.name)
            row = found[system.name]
            row |= sizes(system, system.measured_on(subject), answers, job.batch, peak_memory)
            if subject.tokenizer is not None and limit != 0 and model in BUNDLED:  # the sets are of their tasks
                row |= generated_scores(generators[system.name], subject.tokenizer, limit=limit)
    return [found[name] for name in names]


def as_contender(
    system: System, name: str, subject: BenchModel, answers: Answers, batch: int, generators: dict[str, Generate],
    *, exact: bool | None = None,
) -> Contender:  # fmt: skip
    """A system on a job; once built, ``generators`` holds its way of generating by ``name``."""

    def build() -> Callable[[], np.ndarray]:
        generators[name] = system.build(subject)
        return partial(answers, generators[name], batch)

    facts = {"backend": system.backend, "precision": system.recipe.name, "recipe_hash": system.recipe.hash}
    return Contender(name, build, system.exact if exact is None else exact, facts)


def sizes(system: System, subject: BenchModel, answers: Answers, batch: int, peak_memory: bool) -> Row:
    """Bytes on disk and, if asked for, of memory: in a separate process that generates once."""
    row: Row = {"size_bytes": system.bytes_on_disk(subject)}
    if peak_memory:
        given = (system.name, subject.name, subject.seed, subject.threads, answers, batch)
        base, peak = memory_alone(system.libraries, subject.threads, _generate_once, *given)
        row |= {} if base is None or peak is None else {"base_memory_bytes": base, "peak_memory_bytes": peak}
    return row


def _generate_once(system: str, model: str, seed: int, threads: int, answers: Answers, batch: int) -> None:
    answers(SYSTEMS[system].build(BenchModel(model, seed, threads)), batch)


class RecordedBoard:
    """The board of one job in a file that ``python -m bench board --json`` wrote, perhaps on another machine."""

    def __init__(self, path: str | os.PathLike[str], model: str, job: Forced):
        content = read_json_object(Path(path), InputError)
        wanted = {"model": model, "batch": job.batch, "beams": 1, "source_tokens": job.source_tokens,
                  "new_tokens": job.new_tokens, "reference": CPU_REFERENCE}  # fmt: skip
        try:
            self.machine = f"{content['machine']['cpu']}, {content['date']}"
            known = [row for row in filter_rows(content["rows"], **wanted) if "ratio" in row]
            self.cells = {row["system"]: _time_and_ratio(row) for row in known}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"--compare must be a file that `board --json` wrote, got {path}.") from error
        if not self.cells:
            raise InputError(f"{path} has no board of {', '.join(f'{key} {value}' for key, value in wanted.items())}.")

    def beside(self, rows: Sequence[Row]) -> str:
        """Time a token and ratio to the reference, here and there, of every system that both have."""
        lines = [
            [row["system"], *_time_and_ratio(row), *self.cells[row["system"]]]
            for row in rows if row["system"] in self.cells
        ]  # fmt: skip
        head = ["technique", "ms/token", "ratio", "(min–max)", "there", "ratio", "(min–max)"]
        return "\n".join([f"Beside {self.machine}:", *format_table([head, *lines], rule=True)])


def _time_and_ratio(row: Mapping[str, Any]) -> tuple[str, str, str]:
    samples = row.get("ratio_samples") or [row["ratio"]]
    return f"{step_ms(row):.2f}", f"{row['ratio']:.2f}x", f"({min(samples):.2f}–{max(samples):.2f})"
