"""Write a folder so that it is there whole or not at all, and by one process at a time."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from uuid import uuid4

from filelock import FileLock, Timeout

from t5accel.errors import ExportError

PATIENCE_S = 5  # of waiting without a word
_REMNANT = re.compile(r"\.(?P<target>.+)\.[0-9a-f]{32}\.(?:partial|old)", re.DOTALL)
_LOCK = re.compile(r"\.(?P<target>.+)\.lock", re.DOTALL)


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Wait for whoever is writing ``target``, then keep others from it. The lock file lies hidden beside the folder.

    The kernel lets go of the lock when its process ends, however that happens. What that process left is cleared away,
    and a folder that it was about to replace is put back; so is what others left that were killed beside this folder.

    Raises:
        ExportError: the folder above cannot be made or written to.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        path = target.parent / f".{target.name}.lock"
        path.open("a").close()  # where no file can be made this fails at once; the lock would go on trying
        lock = FileLock(path)
        try:
            lock.acquire(timeout=PATIENCE_S)
        except Timeout:
            print(f"Another process is writing {target}: waiting for its end.", file=sys.stderr, flush=True)
            lock.acquire()
    except (OSError, NotImplementedError) as error:
        raise ExportError(f"{target} cannot be written to: {reason(error)}") from error
    try:
        _clear(target)
        clear_remnants(target.parent, but=target.name)
        yield
    finally:
        lock.release()


def clear_remnants(above: Path, *, but: str = "", locks: bool = False) -> None:
    """Clear away what killed processes left in a folder; what a living one is writing is locked, and left alone.

    Args:
        above: the folder in which they wrote.
        but: the name of one folder that is not looked after.
        locks: delete lock files that nobody holds, too.

    >>> clear_remnants(Path("no/such/folder"))
    """
    listed = [path.name for path in above.iterdir()] if above.is_dir() else []
    kinds = (_REMNANT, _LOCK) if locks else (_REMNANT,)
    found = {match["target"] for name in listed for kind in kinds if (match := kind.fullmatch(name))}
    for name in found - {but}:
        lock = FileLock(above / f".{name}.lock")
        with suppress(OSError, NotImplementedError, Timeout), lock.acquire(timeout=0):
            _clear(above / name)
            if locks:
                Path(lock.lock_file).unlink(missing_ok=True)


def _clear(target: Path) -> None:
    """What was left of writing ``target``, by whoever holds its lock."""
    # Exactly our names: those of the folder beside it that is called model.v2 must not look like model's.
    ours = f".{escape(target.name)}.{'[0-9a-f]' * 32}"
    for old in target.parent.glob(f"{ours}.old"):
        if not target.exists():  # killed after the old folder had left its place, and before the new one took it
            old.rename(target)
    for remnant in [*target.parent.glob(f"{ours}.partial"), *target.parent.glob(f"{ours}.old")]:
        shutil.rmtree(remnant, ignore_errors=True)


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A temporary folder beside ``target`` that takes its place when the block ends well, and goes when it does not.

    Whether the old folder may be replaced is the caller's question. Call it under `locked`.

    Raises:
        ExportError: the disk is full, or refuses.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as above:
    ...     target = Path(above) / "export"
    ...     with locked(target), staged(target) as folder:
    ...         _ = (folder / "graph.onnx").write_bytes(b"...")
    ...         assert not target.exists()
    ...     [path.name for path in target.iterdir()]
    ['graph.onnx']
    """
    folder, old = (target.parent / f".{target.name}.{uuid4().hex}.{state}" for state in ("partial", "old"))
    try:
        try:
            folder.mkdir()
            yield folder
            for path in [*folder.iterdir(), folder]:
                flush(path)
            if target.exists():
                target.rename(old)
            folder.rename(target)
            flush(target.parent)
        finally:
            if old.exists() and not target.exists():
                old.rename(target)
            for remnant in (folder, old):
                shutil.rmtree(remnant, ignore_errors=True)
    except ExportError:
        raise
    except OSError as error:
        raise ExportError(f"{target} could not be written: {reason(error)}. Nothing was left behind.") from error


def flush(path: Path) -> None:
    """From the machine's memory to its disk, a file or a folder: a rename must not get there before the content does.

    Raises ``OSError`` where the disk is full, or refuses.
    """
    # Windows opens no folders, and some file systems do not flush them; of files it flushes those open for writing.
    flags, tolerated = (os.O_RDONLY, (OSError,)) if path.is_dir() else (os.O_RDWR, ())
    with suppress(*tolerated):
        descriptor = os.open(path, flags)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def reason(error: BaseException) -> str:
    """What the system says, without its number and the file's name.

    >>> reason(FileNotFoundError(2, "No such file or directory", "a.txt"))
    'No such file or directory'
    """
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
