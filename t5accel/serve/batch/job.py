"""What a batch job consists of: settings, a model, files, and shards of these, each of which is done by itself.

A shard is a range of at most so many rows of one file. Which rows go together is decided by the input and the settings
alone, so that a job that was killed and went on gives the answers of one that was not.
"""

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
from typing import Any

from t5accel import machine
from t5accel.api import open_backend
from t5accel.checks import as_count
from t5accel.errors import InputError, JobError
from t5accel.graphs.contract import WEIGHTS
from t5accel.graphs.manifest import describe_file
from t5accel.models.load import BUNDLED, require_tokenizer
from t5accel.models.prefixes import prefix_hint, prefixes_of
from t5accel.precision.recipes import as_recipe, recipe_from_json
from t5accel.serve.batch.formats import KINDS, Unfit, kind_of, read_range
from t5accel.serve.batch.generate import Answer, Answerer
from t5accel.serve.batch.output import REJECTS, Done, Output, ShardRecord, some

FORMAT = 2  # of the folder and its records; a change by which other rows would go together raises it, too


@dataclass(frozen=True)
class Settings:
    """What is asked of every row; a job that goes on has to be given the same.

    Attributes:
        column: of the texts, where files have columns.
        prefix: stands in front of every text, as in ``"translate English to French: "``.
        into: the name of the answers' column.
        beams, max_new_tokens, max_source_tokens, batch_tokens: as of `answers.Answerer`.
        src_lang, tgt_lang, forced_bos_token, skip_special_tokens: likewise.
        shard_rows: of a shard, at most: what a kill may cost. Larger shards leave fewer files, and their batches less
            padding.

    Raises:
        InputError: a value is out of bounds.

    >>> Settings(beams=4).column
    'text'
    """

    column: str = "text"
    prefix: str = ""
    into: str = "answer"
    beams: int | None = None
    max_new_tokens: int = 64
    max_source_tokens: int = 512
    batch_tokens: int = 4096
    shard_rows: int = 200
    src_lang: str | None = None
    tgt_lang: str | None = None
    forced_bos_token: str | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.beams is not None:
            as_count(self.beams, "beams", at_least=1)
        for name in ("max_new_tokens", "max_source_tokens", "batch_tokens", "shard_rows"):
            as_count(getattr(self, name), name, at_least=1)
        for name in ("column", "prefix", "into"):
            try:
                getattr(self, name).encode()
            except UnicodeEncodeError as error:  # bytes of a command line that are not UTF-8
                raise InputError(f"{name} must be UTF-8, got {getattr(self, name)!r}. Convert it.") from error
        if not self.column or not self.into or self.column == self.into:
            raise InputError(f"column is {self.column!r} and into {self.into!r}: give two names that differ.")


@dataclass(frozen=True)
class Source:
    """A file to be read.

    Attributes:
        name: by which the job knows it, wherever it lies.
        size_bytes, changed_ns: when it was hashed. The latter are the times of content and of inode: programs set the
            first one back, the second one they cannot.
    """

    name: str
    path: Path
    sha256: str
    size_bytes: int
    changed_ns: tuple[int, int]

    @classmethod
    def of(cls, name: str, path: Path) -> Source:
        """The file as it is now."""
        facts = path.stat()
        return cls(name, path, describe_file(path)["sha256"], facts.st_size, (facts.st_mtime_ns, facts.st_ctime_ns))

    def check(self) -> None:
        """Raise ``JobError`` if it is gone, or was written to."""
        try:
            facts = self.path.stat()
        except OSError as error:
            raise JobError(f"{self.path} cannot be read: {error.strerror}. What is done is kept.") from error
        if (facts.st_size, (facts.st_mtime_ns, facts.st_ctime_ns)) != (self.size_bytes, self.changed_ns):
            raise JobError(
                f"{self.path} was written to since the job began. What is done is kept, and is of the file as it was: "
                "the same command goes on if its content is the same."
            )


@dataclass(frozen=True)
class Shard:
    """A range of rows of one file: ``rows`` of them from ``offset`` on; the first one is the file's row ``first``."""

    index: int
    source: Source
    offset: int
    first: int
    rows: int

    @property
    def output(self) -> str:
        """The file that holds it when it is done."""
        return f"part-{self.index:06}{kind_of(self.source.path).suffix}"

    @property
    def rejects(self) -> str:
        """The file with those of its rows that could not be done, if there are any."""
        return f"{REJECTS}/part-{self.index:06}.jsonl"


@dataclass(frozen=True)
class Model:
    """A model and how it is run; opened where it is needed, in this process or another.

    Attributes:
        name: as of `api.open_backend`.
        precision: all but bf16, which runs in torch; by default fp32, or that of an export.
        threads: by default those that this process may really use.
    """

    name: str = "mini"
    precision: str | None = None
    threads: int | None = None

    def absolute(self) -> Model:
        """The same for a process that works elsewhere: of a folder, where it lies."""
        is_folder = self.name not in BUNDLED and os.path.isdir(self.name)
        return replace(self, name=os.path.abspath(self.name)) if is_folder else self

    def open(self, settings: Settings) -> tuple[Answerer, dict[str, str]]:
        """What answers texts, and what it is: the manifest's facts, by which the same model is known again."""
        if self.precision is not None and as_recipe(self.precision).dtype == "bfloat16":
            raise InputError(f"precision is {self.precision!r}, which runs in torch: give fp32, fp16, int8 or int4.")
        require_tokenizer(self.name)
        backend, tokenizer, _ = open_backend(self.name, precision=self.precision, threads=self.threads)
        answerer = Answerer(
            backend, tokenizer, beams=settings.beams, max_new_tokens=settings.max_new_tokens,
            max_source_tokens=settings.max_source_tokens, batch_tokens=settings.batch_tokens,
            src_lang=settings.src_lang, tgt_lang=settings.tgt_lang, forced_bos_token=settings.forced_bos_token,
            skip_special_tokens=settings.skip_special_tokens,
        )  # fmt: skip
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
    """The files that are meant, hashed: a file, all files of known kinds in a folder and those below, or a glob.

    In a folder, what begins with ``.`` or ``_`` is left aside, as Arrow and Spark do.

    Raises:
        InputError: there are none, one is of another kind, or the output lies among them.
    """
    if os.path.isdir(given):
        base = Path(given)
        below = (path for path in base.rglob("*") if path.suffix.lower() in KINDS and path.is_file())
        paths = [path for path in below if not any(part[0] in "._" for part in path.relative_to(base).parts)]
    else:
        paths = [Path(path) for path in glob.glob(given, recursive=True) if os.path.isfile(path)]
        paths = paths or [Path(given)] * os.path.isfile(given)  # a file whose name looks like a pattern
        base = Path(os.path.commonpath([path.parent for path in paths])) if paths else Path()
    if not paths:
        raise InputError(f"{given} is no file, no folder with files of {', '.join(KINDS)}, and no pattern of such.")
    for path in paths:
        kind_of(path)
        if out.resolve() in path.resolve().parents:
            raise InputError(f"{path} lies in {out}, where the answers go: give another folder for one of them.")
    if os.path.isdir(given) and base.resolve() in out.resolve().parents:
        raise InputError(f"{out} lies in {given}, which is read: give a folder elsewhere.")
    try:
        return [Source.of(path.relative_to(base).as_posix(), path) for path in sorted(paths)]
    except OSError as error:
        raise JobError(f"{error.filename} cannot be read: {error.strerror}.") from error


def shards(found: Iterable[Source], settings: Settings) -> Iterator[Shard]:
    """All files in ranges.

    Raises:
        InputError: a file lacks the column, or cannot be read at all.
    """
    index = 0
    for source in found:
        kind = kind_of(source.path)
        try:
            kind.check(source.path, settings.column, settings.into)
            first = 1
            for offset, rows in kind.ranges(source.path, settings.shard_rows):
                yield Shard(index, source, offset, first, rows)
                index, first = index + 1, first + rows
        except OSError as error:
            raise JobError(f"{source.path} cannot be read: {error.strerror or error}.") from error


def do_shard(
    answer: Answerer,
    settings: Settings,
    output: Output,
    shard: Shard,
    on_batch: Callable[[int, int], Any] | None = None,
) -> ShardRecord:
    """Read a shard, answer it, and write its rejects and its rows; it is done when `Output.record` has its record.

    Raises:
        JobError: the input is gone, the disk is full, or the output is not the job's any more.
    """
    shard.source.check()
    rows = read_range(shard.source.path, shard.offset, shard.rows)
    shard.source.check()  # nor has it changed while it was read
    texts = rows.texts(settings.column, settings.into)
    places = [place for place, text in enumerate(texts) if not isinstance(text, Unfit)]
    found: list[Answer | Unfit] = [*texts]
    for place, answered in zip(places, answer([settings.prefix + texts[i] for i in places], on_batch), strict=True):
        found[place] = answered
    unfit = {place: one.reason for place, one in enumerate(found) if isinstance(one, Unfit)}
    files = {}
    if unfit:
        lines = (
            {"file": shard.source.name, "row": shard.first + place, "reason": reason, "content": rows.shown(place)}
            for place, reason in unfit.items()
        )
        content = "".join(json.dumps(line) + "\n" for line in lines)
        files[shard.rejects] = output.put(shard.rejects, lambda path: path.write_text(content, encoding="utf-8"))
    else:
        output.drop(shard.rejects)
    answers = [None if isinstance(one, Unfit) else one.text for one in found]
    write = partial(rows.write, answers=answers, column=settings.column, into=settings.into)
    files[shard.output] = output.put(shard.output, write)
    tokens = sum(one.tokens for one in found if isinstance(one, Answer))
    return ShardRecord(shard.output, Done(len(found) - len(unfit), len(unfit), tokens), files)


# Run a batch job: files of texts in, the same rows with answers out, shard by shard, in this process or by others.


DEFAULT, MINI = Settings(), Model()


@dataclass(frozen=True)
class Job:
    """What any process has to know to do a shard of it; ``what`` is the model as of `job.Model.open`."""

    model: Model
    settings: Settings
    output: Output
    what: dict[str, str]


# The job, the shards that are not done, what answers in this process, and who is told of rows and tokens.
Engine = Callable[[Job, Sequence[Shard], Answerer, Callable[[int, int], Any]], Iterator[ShardRecord]]


def in_this_process(
    job: Job, pending: Sequence[Shard], answer: Answerer, on_batch: Callable[[int, int], Any]
) -> Iterator[ShardRecord]:
    """One shard after the other."""
    for shard in pending:
        yield do_shard(answer, job.settings, job.output, shard, on_batch)


def run(
    given: str | os.PathLike[str], out: str | os.PathLike[str], model: Model = MINI, settings: Settings = DEFAULT, *,
    engine: Engine = in_this_process, progress: bool = False,
) -> tuple[Done, Done]:  # fmt: skip
    """Answer every row that has no answer yet; called again after an interruption, it goes on.

    Args:
        given: a file, a folder or a glob; kinds of files are those of `rows.KINDS`.
        out: the folder for shards, manifest and rejects; made if it is missing.
        model, settings: who answers, and what is asked.
        engine: who does the shards; `serve.ray_batch.on_ray` is another one. All write the same files, and any goes on
            with what another began.
        progress: a bar on standard error, with tokens per second and the time that is left, and a hint where a
            model gets a text without the prefix that it expects.

    Returns:
        What was done now, and what had been done before. Shards whose files are missing or altered are done again, and
        a line on standard error says so.

    Raises:
        InputError: an argument is wrong, or ``out`` is another job's, or another is at it.
        JobError: the input vanished or changed, the disk is full, the output was removed or cut while the job ran, or
            the model fails on any text; what is done is kept.
        ExportError, UnknownModelError, …: there is no such model.
        MissingPackageError, ClusterError: as the engine says.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     given, out = Path(folder, "in.txt"), Path(folder, "out")
    ...     _ = given.write_text("I am tired.\\n\\n")
    ...     run(given, out, settings=Settings(prefix="translate English to French: "))
    ...     print((out / "part-000000.jsonl").read_text(), end="")
    ...     run(given, out, settings=Settings(prefix="translate English to French: "))
    (Done(answered=1, rejected=1, tokens=5), Done(answered=0, rejected=0, tokens=0))
    {"text": "I am tired.", "answer": "Je suis fatigué."}
    (Done(answered=0, rejected=0, tokens=0), Done(answered=1, rejected=1, tokens=5))
    """
    output = Output(out)
    found = sources(os.fspath(given), output.folder)
    planned = [*shards(found, settings)]
    answerer, what = model.open(settings)
    prefixes = prefixes_of(answerer.backend, what["name"]) if progress else ()
    asked = asdict(settings)
    if settings.beams is None:
        asked["beams"] = answerer.beams  # the model's own number
    rows = sum(shard.rows for shard in planned)
    files = {source.name: source.sha256 for source in found}
    read = {"files": len(found), "rows": rows, "sha256": sha256(json.dumps(files).encode()).hexdigest()}
    with output.locked():
        output.begin({"format": FORMAT, "model": what, "settings": asked, "input": read})
        parts = [shard.output for shard in planned]
        records, lost = output.finished(parts)
        if lost:
            what_of = f"In {output.folder} files are missing, altered or not recorded: {some(lost)}."
            print(f"{what_of} Their rows are answered again.", file=sys.stderr)
        pending = [shard for shard in planned if shard.output not in records]
        if progress and pending and (hint := _first_hint(pending[0], settings, prefixes)):
            print(f"t5accel: {hint}", file=sys.stderr)
        before, done = sum((record.done for record in records.values()), Done()), Done()
        with Progress(rows, before.answered + before.rejected, shown=progress) as bar:
            work = engine(Job(model, settings, output, what), pending, answerer, bar.add)
            del answerer  # an engine may have no need for it
            for made in work:
                output.record(made)
                records[made.part] = made
                bar.add(made.done.rejected, 0)
                done += made.done
        output.finish(records, parts)
    return done, before


def _first_hint(shard: Shard, settings: Settings, prefixes: tuple[str, ...]) -> str:
    """What to say of the first row without a prefix; an unreadable shard says so itself, later."""
    if not prefixes:
        return ""
    shard.source.check()
    rows = read_range(shard.source.path, shard.offset, shard.rows).texts(settings.column, settings.into)
    hints = (prefix_hint(settings.prefix + row, prefixes) for row in rows if isinstance(row, str))
    return next(filter(None, hints), "")


class Progress:
    """A bar of rows, with tokens per second and the time that is left."""

    def __init__(self, rows: int, before: int, *, shown: bool):
        self.bar = machine.progress_bar(shown=shown, total=rows, initial=before, unit=" rows", smoothing=0.1)
        self.tokens, self.began = 0, perf_counter()

    def add(self, rows: int, tokens: int) -> None:
        """So many more are done."""
        self.tokens += tokens
        self.bar.set_postfix_str(f"{self.tokens / (perf_counter() - self.began):.0f} tokens/s", refresh=False)
        self.bar.update(rows)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
