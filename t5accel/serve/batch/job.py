"""Batch jobs that write the rows of files with their answers."""

# The input and the settings alone decide which rows go together, so that a resumed job gives the same answers.

from __future__ import annotations

import glob
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

from t5accel import machine
from t5accel.api import open_backend
from t5accel.checks import as_count, check_utf8
from t5accel.errors import InputError, JobError
from t5accel.graphs.contract import WEIGHTS
from t5accel.graphs.manifest import describe_file
from t5accel.models.load import BUNDLED, require_tokenizer
from t5accel.models.prefixes import prefix_hint, prefixes_of
from t5accel.precision.recipes import as_recipe, recipe_from_json
from t5accel.serve.batch.formats import KINDS, RejectedRow, facts_of, kind_of, read_range
from t5accel.serve.batch.generate import BatchGenerator, GeneratedText
from t5accel.serve.batch.output import REJECTS, Output, ShardRecord, ShardStats, some

FORMAT = 2  # of the folder and its records; a change by which other rows would go together raises it, too


@dataclass(frozen=True)
class JobSettings:
    """Settings of a job, with the options of `BatchGenerator`."""

    column: str = "text"  # of the texts, in files with columns
    prefix: str = ""  # in front of every text
    output_column: str = "answer"
    beams: int | None = None
    max_new_tokens: int = 64
    max_source_tokens: int = 512
    batch_tokens: int = 4096
    shard_rows: int = 200  # per output file, which a kill may cost; larger shards need less padding
    src_lang: str | None = None
    tgt_lang: str | None = None
    forced_bos_token: str | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:  # `BatchGenerator` checks its own options
        as_count(self.shard_rows, "shard_rows", at_least=1)
        if self.shard_rows > sys.maxsize:
            raise InputError(f"shard_rows must be at most {sys.maxsize}, got {self.shard_rows}.")
        for name in ("column", "prefix", "output_column"):
            check_utf8(getattr(self, name), name)
        if not self.column or not self.output_column or self.column == self.output_column:
            raise InputError(
                f"column and output_column must be two different names, got {self.column!r} and {self.output_column!r}."
            )


@dataclass(frozen=True)
class Source:
    """An input file at the time of its hash."""

    name: str  # the path relative to the input
    path: Path
    sha256: str
    facts: tuple[int, ...]

    @classmethod
    def of(cls, name: str, path: Path) -> Source:
        facts = facts_of(path)  # before the hash: what changes meanwhile is noticed
        return cls(name, path, describe_file(path)["sha256"], facts)

    def check(self) -> None:
        """Raise ``JobError`` if the file is gone or was written to."""
        try:
            facts = facts_of(self.path)
        except OSError as error:
            raise JobError(f"{self.path} cannot be read: {error.strerror}. What is done is kept.") from error
        if facts != self.facts:
            raise JobError(
                f"{self.path} was written to since the job began. What is done is kept, and the same command goes on "
                "if its content is the same."
            )


@dataclass(frozen=True)
class Shard:
    """A range of rows of one file, for one output file."""

    index: int
    source: Source
    offset: int  # in bytes; in Parquet in rows
    first: int  # number of its first row in the file, from 1
    rows: int

    @property
    def output(self) -> str:
        return f"part-{self.index:06}{kind_of(self.source.path).suffix}"

    @property
    def rejects(self) -> str:
        return f"{REJECTS}/part-{self.index:06}.jsonl"


@dataclass(frozen=True)
class ModelSource:
    """A model to open, in this process or another; see `api.open_backend`."""

    name: str = "mini"
    precision: str | None = None
    threads: int | None = None

    def absolute(self) -> ModelSource:
        """The same with an absolute path, for processes in other folders."""
        is_folder = self.name not in BUNDLED and os.path.isdir(self.name)
        return replace(self, name=os.path.abspath(self.name)) if is_folder else self

    def open(self, settings: JobSettings) -> tuple[BatchGenerator, dict[str, str]]:
        """Return the generator, and the model's identity in a manifest."""
        if self.precision is not None and as_recipe(self.precision).dtype == "bfloat16":
            raise InputError(f"precision must be fp32, fp16, int8 or int4, got {self.precision}, which runs in torch.")
        require_tokenizer(self.name)
        backend, tokenizer, _ = open_backend(self.name, precision=self.precision, threads=self.threads)
        own = ("column", "prefix", "output_column", "shard_rows")
        options = {name: value for name, value in asdict(settings).items() if name not in own}
        answerer = BatchGenerator(backend, tokenizer, **options)
        manifest = backend.manifest
        # Tokenizer and generation settings decide answers, too; graphs and weights are the checkpoint by the recipe.
        beside = {
            name: file["sha256"]
            for name, file in manifest.files.items()
            if name not in ("config.json", WEIGHTS) and not name.endswith(".onnx")
        }
        facts = [manifest.source["sha256"], recipe_from_json(manifest.recipe).hash, beside]
        digest = sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return answerer, {"name": manifest.source["name"], "precision": manifest.recipe["name"], "sha256": digest}


def sources(given: str, out: Path) -> list[Source]:
    """Hash a file, a glob, or all known files below a folder."""
    if os.path.isdir(given):
        base = Path(given)
        # Names that begin with "." or "_" are skipped, as in Arrow and Spark.
        every = [Path(top, name) for top, *names in os.walk(base, onerror=_unreadable) for name in sum(names, [])]
        below = [path for path in every if not any(part[0] in "._" for part in path.relative_to(base).parts)]
        paths = [path for path in below if path.suffix.lower() in KINDS and path.is_file()]
    else:  # perhaps a file whose name looks like a pattern
        found = [given] if os.path.isfile(given) else glob.glob(given, recursive=True)
        below = [Path(path) for path in found]
        paths = [Path(path) for path in {*found} if os.path.isfile(path)]
        paths = [path for path in paths if out.resolve() not in path.resolve().parents] or paths  # its own answers
        base = Path(os.path.commonpath([path.parent for path in paths])) if paths else Path()
    for path in below:
        if path.is_symlink() and (path.is_dir() or path.suffix.lower() in KINDS and not path.exists()):
            raise InputError(f"{path} must lead to a file, got a link to {os.readlink(path)}. Remove or replace it.")
    if not paths:
        raise InputError(f"The input must be a file, a folder or a pattern of {', '.join(KINDS)}, got {given}.")
    for path in paths:
        kind_of(path)
        if out.resolve() in path.resolve().parents:
            raise InputError(f"{path} must not lie in {out}, where the answers go. Give another folder.")
    if os.path.isdir(given) and base.resolve() in out.resolve().parents:
        raise InputError(f"{out} must not lie in {given}, which is read. Give another folder.")
    try:
        return [Source.of(path.relative_to(base).as_posix(), path) for path in sorted(paths)]
    except OSError as error:
        _unreadable(error)


def _unreadable(error: OSError) -> NoReturn:
    raise JobError(f"{error.filename} cannot be read: {error.strerror}.") from error


def shards(found: Iterable[Source], settings: JobSettings) -> Iterator[Shard]:
    """Split files into shards; ``InputError``: unreadable, or without the column."""
    index = 0
    for source in found:
        kind = kind_of(source.path)
        try:
            kind.check(source.path, settings.column, settings.output_column)
            first = 1
            for offset, rows in kind.ranges(source.path, settings.shard_rows):
                yield Shard(index, source, offset, first, rows)
                index, first = index + 1, first + rows
        except OSError as error:
            raise JobError(f"{source.path} cannot be read: {error.strerror or error}.") from error


def process_shard(
    answer: BatchGenerator,
    settings: JobSettings,
    output: Output,
    shard: Shard,
    on_batch: Callable[[int, int], Any] | None = None,
) -> ShardRecord:
    """Answer a shard and write its files; `Output.record` completes it."""
    shard.source.check()
    rows = read_range(shard.source.path, shard.offset, shard.rows)
    shard.source.check()  # nor has it changed while it was read
    texts = rows.texts(settings.column, settings.output_column)
    places = [place for place, text in enumerate(texts) if not isinstance(text, RejectedRow)]
    found: list[GeneratedText | RejectedRow] = [*texts]
    for place, answered in zip(places, answer([settings.prefix + texts[i] for i in places], on_batch), strict=True):
        found[place] = answered
    rejected = {place: one.reason for place, one in enumerate(found) if isinstance(one, RejectedRow)}
    files = {}
    if rejected:
        lines = (
            {"file": shard.source.name, "row": shard.first + place, "reason": reason, "content": rows.shown(place)}
            for place, reason in rejected.items()
        )
        content = "".join(json.dumps(line) + "\n" for line in lines)
        files[shard.rejects] = output.put_text(shard.rejects, content)
    else:
        output.drop(shard.rejects)
    answers = [None if isinstance(one, RejectedRow) else one.text for one in found]
    write = partial(rows.write, answers=answers, column=settings.column, into=settings.output_column)
    files[shard.output] = output.put(shard.output, write)
    tokens = sum(one.tokens for one in found if isinstance(one, GeneratedText))
    return ShardRecord(shard.output, ShardStats(len(found) - len(rejected), len(rejected), tokens), files)


DEFAULT, MINI = JobSettings(), ModelSource()


@dataclass(frozen=True)
class Job:
    """Everything that a process needs to do a shard."""

    model: ModelSource
    settings: JobSettings
    output: Output
    what: dict[str, str]  # the identity of the model


# The job, the pending shards, this process's generator, and a callback for rows and tokens.
Engine = Callable[[Job, Sequence[Shard], BatchGenerator, Callable[[int, int], Any]], Iterator[ShardRecord]]


def in_this_process(
    job: Job, pending: Sequence[Shard], answer: BatchGenerator, on_batch: Callable[[int, int], Any]
) -> Iterator[ShardRecord]:
    """Process one shard after the other."""
    for shard in pending:
        yield process_shard(answer, job.settings, job.output, shard, on_batch)


def run(
    given: str | os.PathLike[str],
    out: str | os.PathLike[str],
    model: ModelSource = MINI,
    settings: JobSettings = DEFAULT,
    *,
    engine: Engine = in_this_process,
    progress: bool = False,
) -> tuple[ShardStats, ShardStats]:
    """Answer every row without an answer; resume after an interruption.

    ``given`` is a file, a folder or a glob, ``out`` the folder of shards, manifest and rejects, and ``engine``
    `in_this_process` or `ray_batch.on_ray`; each can resume the other's job. ``progress`` shows a bar, and a hint for
    texts without the prefix that the model expects. Returns the counts of this call, and those of earlier ones; shards
    with missing or altered files are done again.

    ``InputError``: ``out`` belongs to another job. ``JobError``: the input changed, the disk is full, the output was
    damaged meanwhile, or the model fails on any text; finished shards are kept.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     given, out = Path(folder, "in.txt"), Path(folder, "out")
    ...     _ = given.write_text("I am tired.\\n\\n")
    ...     run(given, out, settings=JobSettings(prefix="translate English to French: "))
    ...     print((out / "part-000000.jsonl").read_text(), end="")
    ...     run(given, out, settings=JobSettings(prefix="translate English to French: "))
    (ShardStats(answered=1, rejected=1, tokens=5), ShardStats(answered=0, rejected=0, tokens=0))
    {"text": "I am tired.", "answer": "Je suis fatigué."}
    (ShardStats(answered=0, rejected=0, tokens=0), ShardStats(answered=1, rejected=1, tokens=5))
    """
    output = Output(out)
    found = sources(os.fspath(given), output.folder)
    planned = [*shards(found, settings)]
    answerer, what = model.open(settings)
    prefixes = prefixes_of(answerer.backend, what["name"]) if progress else ()
    # A manifest calls the output column "into".
    asked = {"into" if name == "output_column" else name: value for name, value in asdict(settings).items()}
    if settings.beams is None and not answerer.draws:
        asked["beams"] = answerer.beams  # the model's own number
    rows = sum(shard.rows for shard in planned)
    files = {source.name: source.sha256 for source in found}
    read = {"files": len(found), "rows": rows, "sha256": sha256(json.dumps(files).encode()).hexdigest()}
    with output.locked():
        output.begin({"format": FORMAT, "model": what, "settings": asked, "input": read})
        parts = [shard.output for shard in planned]
        records, lost = output.finished(parts)
        if lost:
            files_of = f"In {output.folder} files are missing, altered or not recorded: {some(lost)}."
            print(f"{files_of} Their rows are answered again.", file=sys.stderr)
        pending = [shard for shard in planned if shard.output not in records]
        if progress and pending and (hint := _first_hint(pending[0], settings, prefixes)):
            print(f"t5accel: {hint}", file=sys.stderr)
        before, done = sum((record.done for record in records.values()), ShardStats()), ShardStats()
        already = before.answered + before.rejected
        began, tokens = perf_counter(), 0
        with machine.progress_bar(shown=progress, total=rows, initial=already, unit=" rows", smoothing=0.1) as bar:

            def count(rows: int, new_tokens: int) -> None:
                nonlocal tokens
                tokens += new_tokens
                bar.set_postfix_str(f"{tokens / (perf_counter() - began):.0f} tokens/s", refresh=False)
                bar.update(rows)

            work = engine(Job(model, settings, output, what), pending, answerer, count)
            del answerer  # an engine may have no need for it
            for made in work:
                output.record(made)
                records[made.part] = made
                count(made.done.rejected, 0)
                done += made.done
        output.finish(records, parts)
    return done, before


def _first_hint(shard: Shard, settings: JobSettings, prefixes: tuple[str, ...]) -> str:
    if not prefixes:
        return ""
    shard.source.check()
    rows = read_range(shard.source.path, shard.offset, shard.rows).texts(settings.column, settings.output_column)
    hints = (prefix_hint(settings.prefix + row, prefixes) for row in rows if isinstance(row, str))
    return next(filter(None, hints), "")
