"""The folder that a job writes: a manifest, a file for each shard that is done, and what could not be answered.

A shard is done when its file is there, for that is written beside its place and renamed. So a job may be killed at any
moment: what is there is whole, and what is not there is done again. The manifest says of what input, by which model and
with which settings, and is never written twice.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from t5accel.errors import InputError, JobError
from t5accel.graphs.export.staging import flush, reason

# Arrow, Spark and datasets, given the folder, read what begins with neither "_" nor ".": the shards alone.
MANIFEST = "_manifest.json"
REJECTS = "_rejects"
LOCK = ".lock"


class Output:
    """A job's folder.

    Args:
        folder: is made if it is missing.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     output = Output(folder)
    ...     with output.locked():
    ...         output.begin({"model": "mini"})
    ...         output.put("part-000000.jsonl", lambda path: path.write_text("{}"))
    ...     output.has("part-000000.jsonl"), output.has("part-000001.jsonl")
    (True, False)
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other jobs away. The kernel lets go of the lock when this process ends, however that happens.

        Raises:
            InputError: another job is at it.
            JobError: the folder cannot be made or written to.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / LOCK).open("a").close()  # where no file can be made, the lock would try for ever
            lock = FileLock(self.folder / LOCK)
            lock.acquire(timeout=0)
        except Timeout as error:
            raise InputError(
                f"Another job is writing to {self.folder}: wait for its end, or give another folder."
            ) from error
        except (OSError, NotImplementedError) as error:
            raise JobError(f"{self.folder} cannot be written to: {reason(error)}.") from error
        try:
            yield
        finally:
            lock.release()

    def begin(self, manifest: Mapping[str, Any]) -> None:
        """Begin a job, or go on with the same one; what a killed one left half written is cleared away.

        Raises:
            InputError: the folder is that of a job that differs, or holds something else.
        """
        path = self.folder / MANIFEST
        try:
            there = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            there = None
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is no manifest of a job ({error}): give another folder.") from error
        if there is None:
            if other := sorted(found.name for found in self.folder.iterdir() if not found.name.startswith(".")):
                raise InputError(f"{self.folder} holds {other[0]}, and no job: give a new folder, or an empty one.")
            content = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
            self.put(MANIFEST, lambda partial: partial.write_text(content, encoding="utf-8"))
        elif there != json.loads(json.dumps(manifest)):
            raise InputError(
                f"{self.folder} holds another job: {'; '.join(_differences(there, manifest))}. Give what it was begun "
                "with, and it goes on, or another folder."
            )
        for above in (self.folder, self.folder / REJECTS):
            for partial in above.glob(".*.partial"):
                partial.unlink(missing_ok=True)

    def absolute(self) -> Output:
        """The same for a process that works elsewhere."""
        return Output(self.folder.absolute())

    def has(self, name: str) -> bool:
        """Whether that file was written."""
        return (self.folder / name).is_file()

    def put(self, name: str, write: Callable[[Path], Any]) -> None:
        """Write a file whole or not at all.

        Args:
            name: may lie in a folder below.
            write: is called with the path of an empty place beside it.

        Raises:
            JobError: the disk is full, or refuses.
        """
        target = self.folder / name
        # Of this process alone: an actor whose job was killed may be at the same shard for a moment.
        partial = target.with_name(f".{target.name}.{socket.gethostname()}-{os.getpid()}.partial")
        try:
            target.parent.mkdir(exist_ok=True)
            write(partial)
            flush(partial)
            os.replace(partial, target)
            flush(target.parent)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise JobError(
                f"{target} could not be written: {reason(error)}. What is done is kept, and the same command goes on."
            ) from error


def _differences(there: Any, given: Mapping[str, Any]) -> list[str]:
    """In words, by the names of what differs, one or two levels deep."""
    there, found = there if isinstance(there, dict) else {}, []
    for name in sorted(given.keys() | there.keys()):
        old, new = there.get(name), given.get(name)
        if isinstance(old, dict) and isinstance(new, Mapping):
            found += _differences(old, new)
        elif old != new:
            found.append(f"its {name} is {old!r:.80}, here it is {new!r:.80}")
    return found
