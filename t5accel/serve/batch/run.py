"""Run a batch job: files of texts in, the same rows with answers out, shard by shard, in this process or by others."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from time import perf_counter
from typing import Any

from bench.tasks import prefix_hint, prefixes_of
from t5accel import machine
from t5accel.serve.batch.formats import read_range
from t5accel.serve.batch.generate import Answerer
from t5accel.serve.batch.job import FORMAT, Model, Settings, Shard, do_shard, shards, sources
from t5accel.serve.batch.output import Done, Output, ShardRecord, some

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
