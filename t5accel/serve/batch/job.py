"""What a batch job consists of: settings, a model, files, and shards of these, each of which is done by itself.

A shard is a range of at most so many rows of one file. Which rows go together is decided by the input and the settings
alone, so that a job that was killed and went on gives the answers of one that was not.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from t5accel.api import open_backend
from t5accel.checks import as_count
from t5accel.errors import InputError, JobError
from t5accel.graphs.contract import WEIGHTS
from t5accel.graphs.manifest import describe_file
from t5accel.models.load import BUNDLED, require_tokenizer
from t5accel.precision.recipes import as_recipe, recipe_of
from t5accel.serve.batch.formats import KINDS, Unfit, kind_of, read_range
from t5accel.serve.batch.generate import Answer, Answerer
from t5accel.serve.batch.output import REJECTS, Done, Output, ShardRecord

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
        facts = [manifest.source["sha256"], recipe_of(manifest.recipe).hash, beside]
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
