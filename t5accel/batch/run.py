"""Run a batch job: files of texts in, the same rows with answers out, shard by shard, by an engine of one's choice."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from hashlib import sha256
from time import perf_counter

from tqdm import tqdm

from t5accel.batch.job import FORMAT, Done, Model, Settings, do_shard, shards, sources
from t5accel.batch.on_ray import on_ray
from t5accel.batch.output import Output
from t5accel.errors import InputError

ENGINES = ("local", "ray")
DEFAULT, MINI = Settings(), Model()


def run(
    given: str | os.PathLike[str], out: str | os.PathLike[str], model: Model = MINI, settings: Settings = DEFAULT, *,
    engine: str = "local", address: str | None = None, progress: bool = False,
) -> tuple[Done, int]:  # fmt: skip
    """Answer every row that has no answer yet; called again after an interruption, it goes on.

    Args:
        given: a file, a folder or a glob; kinds of files are those of `rows.KINDS`.
        out: the folder for shards, manifest and rejects; made if it is missing.
        model, settings: who answers, and what is asked.
        engine: ``"local"``, this process; or ``"ray"``, actors of `on_ray` that each hold the model. Both write the
            same files, and either goes on with what the other began.
        address: of a Ray cluster, whose machines see ``given``, ``out`` and the model under the same paths; by default
            one is started on this machine.
        progress: a bar on standard error, with tokens per second and the time that is left.

    Returns:
        What was done now, and how many rows had been done before.

    Raises:
        InputError: an argument is wrong, or ``out`` is another job's, or another is at it.
        JobError: the input vanished or changed, or the disk is full; what is done is kept.
        ExportError, UnknownModelError, …: there is no such model.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     given, out = Path(folder, "in.txt"), Path(folder, "out")
    ...     _ = given.write_text("I am tired.\\n\\n")
    ...     run(given, out, settings=Settings(prefix="translate English to French: "))
    ...     print((out / "part-000000.jsonl").read_text(), end="")
    ...     run(given, out, settings=Settings(prefix="translate English to French: "))
    (Done(answered=1, rejected=1, tokens=5), 0)
    {"text": "I am tired.", "answer": "Je suis fatigué."}
    (Done(answered=0, rejected=0, tokens=0), 2)
    """
    if engine not in ENGINES or (address is not None and engine != "ray"):
        raise InputError(
            f"engine is {engine!r} and address {address!r}: give one of {', '.join(ENGINES)}; ray has one."
        )
    output = Output(out)
    found = sources(os.fspath(given), output.folder)
    planned = [*shards(found, settings)]
    answerer, what = model.open(settings)
    rows = sum(shard.rows for shard in planned)
    files = {source.name: source.sha256 for source in found}
    read = {"files": len(found), "rows": rows, "sha256": sha256(json.dumps(files).encode()).hexdigest()}
    with output.locked():
        output.begin({"format": FORMAT, "model": what, "settings": asdict(settings), "input": read})
        pending = [shard for shard in planned if not output.has(shard.output)]
        before, done = rows - sum(shard.rows for shard in pending), Done()
        with Progress(rows, before, shown=progress) as bar:
            if engine == "ray":
                for made in on_ray(pending, model, settings, output, what, address):
                    bar.add(made.answered + made.rejected, made.tokens)
                    done += made
            else:
                for shard in pending:
                    made = do_shard(answerer, settings, output, shard, bar.add)
                    bar.add(made.rejected, 0)
                    done += made
    return done, before


class Progress:
    """A bar of rows, with tokens per second and the time that is left."""

    def __init__(self, rows: int, before: int, *, shown: bool):
        self.bar = tqdm(total=rows, initial=before, unit=" rows", disable=not shown, smoothing=0.1)
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
