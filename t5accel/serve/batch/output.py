"""The folder that a job writes: a manifest, a file for each shard, rejected rows, and a record of what is done.

A file is written beside its place and renamed, and a shard is done when ``_done.jsonl`` has its record: its counts, and
size and hash of its files. So a job may be killed at any moment: a shard without a record, or with other files than it
says, is done again. The manifest names input, model and settings, and is never written twice.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from t5accel.errors import InputError, JobError
from t5accel.graphs.atomic_write import flush, reason
from t5accel.graphs.manifest import describe_file

# Arrow, Spark and datasets, given the folder, read what begins with neither "_" nor ".": the shards alone.
MANIFEST = "_manifest.json"
DONE = "_done.jsonl"
REJECTS = "_rejects"
LOCK = ".lock"


@dataclass(frozen=True)
class ShardStats:
    """Counts of finished rows: answered, rejected, and the tokens that were written."""

    answered: int = 0
    rejected: int = 0
    tokens: int = 0

    def __add__(self, other: ShardStats) -> ShardStats:
        return ShardStats(*(getattr(self, name) + getattr(other, name) for name in ("answered", "rejected", "tokens")))


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard, a line of ``_done.jsonl``.

    Attributes:
        part: the file with its rows.
        done: its counts.
        files: ``{"sha256", "size_bytes"}`` of each file that it wrote, by name.

    >>> print(ShardRecord("part-000000.jsonl", ShardStats(1, 0, 5), {"part-000000.jsonl": {"sha256": "0a", "size_bytes": 9}}))
    {"part": "part-000000.jsonl", "done": {"answered": 1, "rejected": 0, "tokens": 5}, "files": {"part-000000.jsonl": \
{"sha256": "0a", "size_bytes": 9}}}
    """

    part: str
    done: ShardStats
    files: Mapping[str, Mapping[str, Any]]

    @classmethod
    def parsed(cls, line: bytes) -> ShardRecord | None:
        """A record from its line; ``None`` for a line that was cut short, or is no record."""
        try:
            given = json.loads(line)
            record = cls(given["part"], ShardStats(**given["done"]), given["files"])
            numbers = [*asdict(record.done).values(), *(file["size_bytes"] for file in record.files.values())]
            is_whole = record.part in record.files and all(isinstance(number, int) for number in numbers)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return record if is_whole else None

    def __str__(self) -> str:
        return json.dumps(asdict(self))


class Output:
    """A job's folder.

    Args:
        folder: is made if it is missing.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     output, names = Output(folder), ["part-000000.jsonl", "part-000001.jsonl"]
    ...     with output.locked():
    ...         output.begin({"model": "mini"})
    ...         file = output.put(names[0], lambda path: path.write_text("{}"))
    ...         output.record(ShardRecord(names[0], ShardStats(answered=1), {names[0]: file}))
    ...         records, lost = output.finished(names)
    ...     list(records), lost
    (['part-000000.jsonl'], [])
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self._manifest: bytes | None = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other jobs away. The kernel lets go of the lock when this process ends, however that happens.

        Raises:
            InputError: another job is at it.
            JobError: the folder cannot be made or written to.
        """
        path = self.folder / LOCK
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if path.exists() and not path.is_file():  # to open a pipe is to wait for its reader
                raise FileExistsError(errno.EEXIST, f"{LOCK} is no regular file")
            path.open("a").close()  # where no file can be made, the lock would try for ever
            lock = FileLock(path)
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
            JobError: the folder cannot be written to.
        """
        path = self.folder / MANIFEST
        try:
            there = _read(path)
            wanted = json.loads(json.dumps(manifest))
            found = wanted if there is None else json.loads(there)
            differ = [] if found == wanted else _differences(found, wanted)
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{path} is no manifest of a job ({error}): give another folder.") from error
        if differ:
            raise InputError(
                f"{self.folder} holds another job: {'; '.join(differ)}. Give what it was begun with, and it goes on, "
                "or another folder."
            )
        if there is None:
            if other := sorted(found.name for found in self.folder.iterdir() if not found.name.startswith(".")):
                raise InputError(f"{self.folder} holds {other[0]}, and no job: give a new folder, or an empty one.")
            there = (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode()
            self._put_text(MANIFEST, there.decode())
        self._manifest = there
        for above in (self.folder, self.folder / REJECTS):
            for partial in above.glob(".*.partial"):
                partial.unlink(missing_ok=True)

    def finished(self, parts: Iterable[str]) -> tuple[dict[str, ShardRecord], list[str]]:
        """Look at what is done: every file is hashed, and records that are not true are dropped.

        Args:
            parts: those of all shards.

        Returns:
            The records of finished shards by part, and the parts that were written and have to be done again, because a
            file of theirs is missing or altered, or because there is no record of them.

        Raises:
            JobError: the folder cannot be read or written to.
        """
        try:
            lines = (_read(self.folder / DONE) or b"").splitlines()
        except (OSError, ValueError) as error:
            raise JobError(f"{self.folder / DONE} cannot be read: {reason(error)}.") from error
        known = {record.part: record for line in lines if (record := ShardRecord.parsed(line))}
        found, lost = {}, []
        for part in parts:
            if part in known and self._has_files(known[part], hashed=True):
                found[part] = known[part]
            elif part in known or (self.folder / part).exists():
                lost.append(part)
        self._put_records(found)
        return found, lost

    def record(self, made: ShardRecord) -> None:
        """A shard is done. The line need not reach the disk before the next one: without it the shard is done again."""
        try:
            with (self.folder / DONE).open("a", encoding="utf-8") as file:
                file.write(f"{made}\n")
        except OSError as error:
            raise self._unwritten(DONE, error) from error

    def finish(self, records: Mapping[str, ShardRecord], parts: Iterable[str]) -> None:
        """The job ends: all shards must be done, and their files must be there.

        Raises:
            JobError: a shard was not done, or a file of one is missing or has another size.
        """
        self.check()
        if lost := [part for part in parts if part not in records or not self._has_files(records[part])]:
            raise JobError(
                f"{self.folder} lacks {some(lost)}: {len(lost)} shards were not done, or their files were removed or "
                "cut short while the job ran. Start the same command again, which does them."
            )
        self._put_records(records)

    def check(self) -> None:
        """Raise ``JobError`` if this is not the folder any more in which the job began."""
        try:
            there = _read(self.folder / MANIFEST)
        except (OSError, ValueError):
            there = None
        if there != self._manifest:
            raise JobError(
                f"{self.folder} is not the job's folder any more: its {MANIFEST} was removed or altered. Start the "
                "same command again, which answers the rows that are not there."
            )

    def absolute(self) -> Output:
        """The same for a process that works elsewhere."""
        output = copy.copy(self)
        output.folder = self.folder.absolute()
        return output

    def put(self, name: str, write: Callable[[Path], Any]) -> dict[str, Any]:
        """Write a file whole or not at all.

        Args:
            name: of a file in the folder or in that of the rejects.
            write: is called with the path of an empty place beside it.

        Returns:
            Its ``{"sha256", "size_bytes"}``.

        Raises:
            JobError: the disk is full, or refuses, or the folder was removed or is another job's now.
        """
        if self._manifest is not None:
            self.check()
        target = self.folder / name
        # Of this process alone: an actor whose job was killed may be at the same shard for a moment.
        partial = target.with_name(f".{target.name}.{socket.gethostname()}-{os.getpid()}.partial")
        try:
            if target.parent != self.folder:  # the job's own folder is made once: made again, it would hold half a job
                target.parent.mkdir(exist_ok=True)
            write(partial)
            flush(partial)
            facts = describe_file(partial)
            os.replace(partial, target)
            flush(target.parent)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise self._unwritten(name, error) from error
        return facts

    def drop(self, name: str) -> None:
        """Delete a file, if it is there: one that an interrupted try has written, and this one has not."""
        try:
            (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise self._unwritten(name, error) from error

    def _unwritten(self, name: str, error: OSError) -> JobError:
        return JobError(
            f"{self.folder / name} could not be written: {reason(error)}. What is done is kept, and the same command "
            "goes on."
        )

    def _put_records(self, records: Mapping[str, ShardRecord]) -> None:
        """In the order of their parts, so that a job that was killed leaves the bytes of one that was not."""
        content = "".join(f"{records[part]}\n" for part in sorted(records))
        self._put_text(DONE, content)

    def _put_text(self, name: str, content: str) -> None:
        self.put(name, lambda path: path.write_text(content, encoding="utf-8"))

    def _has_files(self, record: ShardRecord, *, hashed: bool = False) -> bool:
        """Whether they have the recorded sizes, and hashes."""
        try:
            return all(
                os.path.isfile(path := self.folder / name)
                and path.stat().st_size == facts["size_bytes"]
                and (not hashed or describe_file(path)["sha256"] == facts["sha256"])
                for name, facts in record.files.items()
            )
        except (OSError, KeyError):
            return False


def some(names: list[str]) -> str:
    """The first few of many names.

    >>> some(["a", "b", "c", "d"])
    'a, b, c …'
    """
    return ", ".join(names[:3]) + " …" * (len(names) > 3)


def _read(path: Path) -> bytes | None:
    """A file's content, or ``None`` if there is none; ``ValueError`` for a pipe or device, which may never end."""
    if path.exists() and not path.is_file():
        raise ValueError("it is no regular file")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


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
