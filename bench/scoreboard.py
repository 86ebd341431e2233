"""Measure every technique on one job: equal output first, then time, memory and quality, as rows."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from bench import tasks
from bench.harness import Way, measured, memory_alone
from bench.precision import backend_scores, generated_scores
from bench.results import Row, at_path, chosen, here, rows_so_far, write_rows
from bench.techniques import NAMED, REFERENCE, Generate, Subject, Technique, choose
from t5accel import machine
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.ort_static import OrtStatic
from t5accel.checks import as_count
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
from t5accel.roofline import decoder_weights_per_step
from t5accel.timing import Work
from t5accel.tokenization import TokenizerFile

# A model and those made from it, side by side: quality, bytes and the time of a step, in each recipe.


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
        members: by what the rows call them, names or folders that `models.load.load_model` knows, with tokenizers; the
            first is what the others are compared with, in the first recipe.
        limit: rows of each length bucket or half that are scored; by default all, and with 0 none.
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
            model, tokenizer = load_model(where)
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
            export_model(model, in_fp32, tokenizer=tokenizer, name=name, step=True)
            for recipe in map(as_recipe, recipes):
                folder = in_fp32 if recipe.name == "fp32" else Path(root) / f"{number}-{recipe.name}"
                if folder != in_fp32:
                    convert_export(in_fp32, folder, recipe)
                engine = engines[f"{name}, {recipe.name}"] = OrtStatic(
                    folder, settings=SessionSettings(threads=threads)
                )
                if recipe.name == "fp32":
                    # torch, which our engines are measured without
                    from t5accel.backends.torch_eager import TorchEager

                    _prove_equal(TorchEager(model), engine, tokenizer)
                facts = {"model": name, "precision": recipe.name, "recipe_hash": recipe.hash, **weights,
                         "size_bytes": read_manifest(folder, verify=False).graph_bytes}  # fmt: skip
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
        told: takes a member's name and its rows, and returns what is written of it.
    """
    about = here() | {"whole_sha256": _hash(load_model(whole)[0])}
    libraries = [f"versions.{name}" for name in ("torch", "transformers", "onnxruntime")]
    same = {name: at_path(about, name) for name in ("whole_sha256", "machine.cpu", *libraries)}
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


def _prove_equal(checkpoint: Backend, export: OrtStatic, tokenizer: Any) -> None:
    """On texts of all tasks: what was pruned and not yet trained may say one token again and again in some of them."""
    texts = [tasks.source_text(task, row) for task in tasks.NAMES for row in tasks.rows(task, limit=1)]
    found = tokenizer(texts, return_tensors="np", padding=True)
    given = {key: found[key] for key in ("input_ids", "attention_mask")}
    expected, same = (greedy(engine, **given, max_new_tokens=16).sequences for engine in (checkpoint, export))
    assert_varied(expected)
    assert_close(same, expected, atol=0)


# From a way of generating and how many texts it gets at once to its tokens, (N, L) int64, padded with 0. It can be
# sent to another process, where the memory is measured.
Answers = Callable[[Generate, int], np.ndarray]


class Job(Protocol):
    """What every technique, or every rung of a ladder, does."""

    def answers(self, subject: Subject) -> Answers:
        """The job on the subject's tokens."""

    def work(self, subject: Subject) -> Work:
        """What it amounts to."""

    def once(self, batch: int) -> Job:
        """The same for a single batch, as the memory is measured on."""


@dataclass(frozen=True)
class Forced:
    """Sources of an exact length, and so many new tokens for each: text where the model has a tokenizer, else noise."""

    new_tokens: int = 64
    source_tokens: int = 64
    batch: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("new_tokens", "source_tokens", "batch"):
            as_count(getattr(self, name), name, at_least=1)

    def answers(self, subject: Subject) -> Answers:
        """As `Job` has it; ``InputError`` where another number of texts is wanted at once."""
        if subject.tokenizer is None:
            random = np.random.default_rng(self.seed)  # from 3 up, ids are ordinary tokens
            ids = random.integers(3, subject.model.config.vocab_size, (self.batch, self.source_tokens))
        else:  # a trained model need not answer noise with more than one token, again and again
            texts = tasks.sources_of_length(subject.tokenizer, self.batch, self.source_tokens, seed=self.seed)
            ids = np.array(texts, dtype=np.int64)
        return partial(_forced, ids, self.new_tokens)

    def work(self, subject: Subject) -> Work:
        return Work(self.batch, self.source_tokens, self.new_tokens, threads=subject.threads)

    def once(self, batch: int) -> Forced:
        return self


def _forced(ids: np.ndarray, new_tokens: int, generate: Generate, batch: int) -> np.ndarray:
    if batch != len(ids):
        raise InputError(f"batch is {batch}; this forced job has {len(ids)} sources, which are answered at once.")
    return generate(ids, np.ones_like(ids), new_tokens, new_tokens)


@dataclass(frozen=True)
class Natural:
    """Texts of a bundled evaluation set, drawn by a seed; an answer ends where the model ends it.

    From texts to texts: the tokenizer's time is part of it.
    """

    task: str = "summaries"  # one of `tasks.NAMES`
    texts: int = 64  # how many are drawn
    longest: int = 64  # an answer has no more tokens
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("texts", "longest"):
            as_count(getattr(self, name), name, at_least=1)
        if self.texts > len(tasks.rows(self.task)):
            raise InputError(f"texts is {self.texts}; {self.task} has {len(tasks.rows(self.task))}.")

    def sources(self) -> list[str]:
        """The texts that are drawn, in the order of the set, T5's prefix included."""
        rows = tasks.rows(self.task)
        drawn = np.random.default_rng(self.seed).choice(len(rows), self.texts, replace=False)
        return [tasks.source_text(self.task, rows[place]) for place in sorted(drawn.tolist())]

    def answers(self, subject: Subject) -> Answers:
        return partial(_natural, subject.export(), self.sources(), self.longest)

    def work(self, subject: Subject) -> Work:
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
    model: str = "mini", job: Forced = Forced(), *, techniques: Sequence[Technique] | None = None, rounds: int = 5,  # noqa: B008
    threads: int | None = None, limit: int | None = None, peak_memory: bool = True, seed: int = 0,
    progress: bool = False,
) -> list[Row]:  # fmt: skip
    """Prove the techniques equal on one job, then time them interleaved, and score them on the bundled model.

    Those in other numbers than fp32, and students, do not have to be equal: their rows say how many tokens they share.

    Args:
        limit: rows of each length bucket or half that are scored; by default all, and with 0 none.
        peak_memory: measure it too, each technique in a process of its own.
    """
    import torch

    techniques = choose([], model=model) if techniques is None else techniques
    names = [technique.name for technique in techniques]
    if REFERENCE not in names:
        raise InputError(f"The techniques {names} lack the reference, {REFERENCE!r}.")
    if peak_memory and (own := {*names} - NAMED.keys()):
        raise InputError(f"peak_memory is for {REFERENCE!r} and its like, not for {sorted(own)}: set it to False.")
    as_count(rounds, "rounds", at_least=1)
    threads = machine.cpu_threads() if threads is None else as_count(threads, "threads", at_least=1)
    if limit is not None:
        as_count(limit, "limit", at_least=0)
    torch.set_num_threads(threads)
    subject = Subject(model, seed, threads)
    answers, generators = job.answers(subject), {}
    ways = [as_way(t, t.name, t.measured_on(subject), answers, job.batch, generators) for t in techniques]
    ways.sort(key=lambda way: way.name != REFERENCE)  # which has to be the first one
    with machine.progress_bar(shown=progress, total=len(ways) * (rounds + 2), unit="step") as bar:

        def tell(doing: str, name: str) -> None:
            bar.set_description(f"{doing} {name}", refresh=False)
            bar.update()

        rows = measured(
            ways, job.work(subject), rounds=rounds, model=model, on_way=partial(tell, "built"),
            on_run=partial(tell, "timing"),
        )  # fmt: skip
        found = {row["system"]: row for row in rows}
        for technique in techniques:
            tell("scoring", technique.name)
            row = found[technique.name]
            row |= sizes(technique, technique.measured_on(subject), answers, job.batch, peak_memory)
            if subject.tokenizer is not None and limit != 0 and model in BUNDLED:  # whose sets these are
                row |= generated_scores(generators[technique.name], subject.tokenizer, limit=limit)
    return [found[name] for name in names]


def as_way(
    technique: Technique, name: str, subject: Subject, answers: Answers, batch: int, generators: dict[str, Generate],
    *, exact: bool | None = None,
) -> Way:  # fmt: skip
    """A technique on a job; ``generators`` takes its way of generating by ``name``, once it is built."""

    def build() -> Callable[[], np.ndarray]:
        generators[name] = technique.build(subject)
        return partial(answers, generators[name], batch)

    facts = {
        "backend": technique.backend, "precision": technique.recipe.name, "recipe_hash": technique.recipe.hash,
    }  # fmt: skip
    return Way(name, build, technique.exact if exact is None else exact, facts)


def sizes(technique: Technique, subject: Subject, answers: Answers, batch: int, peak_memory: bool) -> Row:
    """Bytes on disk and, where it is wanted, of memory: in a process of its own, which generates once."""
    row: Row = {"size_bytes": technique.bytes_on_disk(subject)}
    if peak_memory:
        given = (technique.name, subject.name, subject.seed, subject.threads, answers, batch)
        base, peak = memory_alone(technique.libraries, subject.threads, _generate_once, *given)
        row |= {} if base is None or peak is None else {"base_memory_bytes": base, "peak_memory_bytes": peak}
    return row


def _generate_once(technique: str, model: str, seed: int, threads: int, answers: Answers, batch: int) -> None:
    answers(NAMED[technique].build(Subject(model, seed, threads)), batch)
