"""The output folder of a batch job."""

# Files are written atomically, and a shard is done when ``_done.jsonl`` holds its record, with sizes and hashes.
# So a job may be killed at any moment: shards without a matching record are done again.

from __future__ import annotations

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
RESUME = "What is done is kept, and the same command goes on."  # in errors of a job


@dataclass(frozen=True)
class ShardStats:
    """Counts of answered rows, rejected rows and new tokens."""

    answered: int = 0
    rejected: int = 0
    tokens: int = 0

    def __add__(self, other: ShardStats) -> ShardStats:
        return ShardStats(*(getattr(self, name) + getattr(other, name) for name in ("answered", "rejected", "tokens")))


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard, with the hashes and sizes of its files."""

    part: str
    done: ShardStats
    files: Mapping[str, Mapping[str, Any]]  # by name: {"sha256", "size_bytes"}

    @classmethod
    def parsed(cls, line: bytes) -> ShardRecord | None:
        """Parse a line; ``None`` for a damaged one."""
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
    """The output folder of a job, made if missing."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder).absolute()  # for processes that work elsewhere
        self._manifest: bytes | None = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for one job; ``InputError``: another job holds the lock."""
        # The kernel releases the lock when the process ends, however that happens.
        path = self.folder / LOCK
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if path.exists() and not path.is_file():  # to open a pipe is to wait for its reader
                raise FileExistsError(errno.EEXIST, f"{LOCK} is no regular file")
            path.open("a").close()  # where no file can be made, the lock would try for ever
            lock = FileLock(path).acquire(timeout=0)
        except Timeout as error:
            message = f"Another job is writing to {self.folder}. Wait for it, or give another folder."
            raise InputError(message) from error
        except (OSError, NotImplementedError) as error:
            raise JobError(f"{self.folder} cannot be written to: {reason(error)}.") from error
        with lock:
            yield

    def begin(self, manifest: Mapping[str, Any]) -> None:
        """Begin or resume a job; delete partial files of a killed process.

        ``InputError``: the folder belongs to another job, or holds other files.
        """
        path = self.folder / MANIFEST
        try:
            there = _read(path)
            wanted = json.loads(json.dumps(manifest))
            differ = [] if there is None else _differences(json.loads(there), wanted)
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{path} is no manifest of a job ({error}). Give another folder.") from error
        if differ:
            raise InputError(f"{self.folder} holds another job: {'; '.join(differ)}. Give these, or another folder.")
        if there is None:
            if other := sorted(found.name for found in self.folder.iterdir() if not found.name.startswith(".")):
                raise InputError(f"{self.folder} must be empty or hold a job, got {other[0]}. Give another folder.")
            there = (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode()
            self.put_text(MANIFEST, there.decode())
        self._manifest = there
        for above in (self.folder, self.folder / REJECTS):
            for partial in above.glob(".*.partial"):
                partial.unlink(missing_ok=True)

    def finished(self, parts: Iterable[str]) -> tuple[dict[str, ShardRecord], list[str]]:
        """Hash every file and drop records that do not match.

        Returns the records of finished shards by part, and the parts with missing, altered or unrecorded files.
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
        # No flush to disk: a shard whose line is lost is done again.
        try:
            with (self.folder / DONE).open("a", encoding="utf-8", newline="\n") as file:
                file.write(f"{made}\n")
        except OSError as error:
            raise self._unwritten(DONE, error) from error

    def finish(self, records: Mapping[str, ShardRecord], parts: Iterable[str]) -> None:
        """End the job; ``JobError``: a shard or its files are missing."""
        self.check()
        if lost := [part for part in parts if part not in records or not self._has_files(records[part])]:
            raise JobError(
                f"{self.folder} lacks {some(lost)}: {len(lost)} shards were not done, or their files were removed or "
                "cut short while the job ran. Start the same command again."
            )
        self._put_records(records)

    def check(self) -> None:
        """Raise ``JobError`` if the manifest was removed or altered."""
        try:
            there = _read(self.folder / MANIFEST)
        except (OSError, ValueError):
            there = None
        if there != self._manifest:
            raise JobError(
                f"{self.folder} is not the job's folder any more: its {MANIFEST} was removed or altered. Start the "
                "same command again."
            )

    def put(self, name: str, write: Callable[[Path], Any]) -> dict[str, Any]:
        """Write a file atomically, by ``write(temporary path)``; return its hash and size.

        ``JobError``: the disk is full or refuses, or the folder was removed or taken by another job.
        """
        if self._manifest is not None:
            self.check()
        target = self.folder / name
        # Of this process alone: an actor whose job was killed may be at the same shard for a moment.
        partial = target.with_name(f".{target.name}.{socket.gethostname()}-{os.getpid()}.partial")
        try:
            if target.parent != self.folder:  # a second folder for the job would hold half of it
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
        """Delete a file that an interrupted attempt may have written."""
        try:
            (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise self._unwritten(name, error) from error

    def _unwritten(self, name: str, error: OSError) -> JobError:
        return JobError(f"{self.folder / name} could not be written: {reason(error)}. {RESUME}")

    def _put_records(self, records: Mapping[str, ShardRecord]) -> None:
        # Sorted: a resumed job leaves the same bytes as one without interruption.
        content = "".join(f"{records[part]}\n" for part in sorted(records))
        self.put_text(DONE, content)

    def put_text(self, name: str, content: str) -> dict[str, Any]:
        """`put` a text, on every system with the same line ends."""
        return self.put(name, lambda path: path.write_text(content, encoding="utf-8", newline="\n"))

    def _has_files(self, record: ShardRecord, *, hashed: bool = False) -> bool:
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
    """A file's content, or ``None`` without a file."""
    if path.exists() and not path.is_file():
        raise ValueError("it is no regular file")  # a pipe or device may never end
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _differences(there: Any, given: Mapping[str, Any]) -> list[str]:
    """In words by name, one or two levels deep."""
    there, found = there if isinstance(there, dict) else {}, []
    for name in sorted(given.keys() | there.keys()):
        old, new = there.get(name), given.get(name)
        if isinstance(old, dict) and isinstance(new, Mapping):
            found += _differences(old, new)
        elif old != new:
            found.append(f"its {name} is {old!r:.80}, here it is {new!r:.80}")
    return found
