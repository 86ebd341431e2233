"""Write a folder or file atomically, one process at a time."""

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

from t5accel.errors import ExportError, T5AccelError

PATIENCE_S = 5  # waiting for the lock in silence
_REMNANT = re.compile(r"\.(?P<target>.+)\.[0-9a-f]{32}\.(?:partial|old)", re.DOTALL)
_LOCK = re.compile(r"\.(?P<target>.+)\.lock", re.DOTALL)


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the lock of ``target``, a hidden file beside it; on entry clear the remnants of killed processes.

    Raises ``ExportError`` where the folder above cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        path = target.parent / f".{target.name}.lock"
        path.open("a").close()  # fails at once where no file can be made; the lock would keep trying
        lock = FileLock(path)  # the kernel releases it when its process ends, however it ends
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
    """Delete the remnants of killed processes in a folder, except those of ``but``; running processes' are locked.

    With ``locks``, lock files that nobody holds are deleted, too.
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
    """Delete the remnants of one target, under its lock, and restore a folder that was about to be replaced."""
    # Exactly our names: remnants of a neighbour model.v2 must not look like those of model.
    ours = f".{escape(target.name)}.{'[0-9a-f]' * 32}"
    for old in target.parent.glob(f"{ours}.old"):
        if not target.exists():  # killed between the two renames
            old.rename(target)
    for remnant in [*target.parent.glob(f"{ours}.partial"), *target.parent.glob(f"{ours}.old")]:
        shutil.rmtree(remnant, ignore_errors=True)


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A temporary folder that replaces ``target`` when the block succeeds, and is deleted when it fails.

    Call it under `locked`, once the old folder may be replaced. Raises ``ExportError`` where the disk refuses.

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


@contextmanager
def staged_file(target: Path) -> Iterator[Path]:
    """As `staged`, of one file; it replaces a file that is there."""
    folder = target.parent / f".{target.name}.{uuid4().hex}.partial"
    try:
        try:
            folder.mkdir()
            yield folder / target.name
            flush(folder / target.name)
            os.replace(folder / target.name, target)
            flush(target.parent)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except T5AccelError:
        raise
    except OSError as error:
        raise ExportError(f"{target} could not be written: {reason(error)}. Nothing was left behind.") from error


def flush(path: Path) -> None:
    """Flush a file or folder to disk, so that a rename does not get there before the content."""
    # Windows opens no folders, and some file systems do not flush them. Windows flushes only files open for writing.
    is_folder = path.is_dir()
    with suppress(*[OSError] if is_folder else []):
        descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def reason(error: BaseException) -> str:
    """The system's message, without number and file name."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
