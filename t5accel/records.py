"""Files of results: where rows are from, written in one piece, gone on with if interrupted, described and tabulated."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from t5accel import machine
from t5accel.checkpoints import data_folder
from t5accel.errors import InputError

LIBRARIES = ("torch", "transformers", "onnxruntime")  # whose versions a reader asks for first


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write a file of results in one piece: an interrupted write leaves the old file.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     write_json(f"{folder}/new/rows.json", {"rows": []})
    ...     json.loads(Path(f"{folder}/new/rows.json").read_text())
    {'rows': []}
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def write_rows(path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]], *, command: str, **more: Any) -> None:
    """Write a file of results: rows with the machine, versions, commit, date and command that they are from."""
    write_json(path, {**here(), "date": today(), "command": command, **more, "rows": list(rows)})


def rows_so_far(path: str | os.PathLike[str], conditions: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of an interrupted run, if it was one under the same conditions; else its file is put aside.

    Args:
        path: of its file, which may be missing.
        conditions: what the file has to say of itself, such as `here`; ``"machine.gpu.name"`` is a key on the way down.

    Raises:
        InputError: the file is no file of results.
    """
    path = Path(path)
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, Mapping):
            raise ValueError(f"it holds a {type(found).__name__}")
        changed = [name for name, value in conditions.items() if at_path(found, name) != value]
        if not changed:
            return found["rows"]
    except (ValueError, KeyError, AttributeError) as error:
        raise InputError(f"{path} is no file of results ({error!r}): give another name, or delete it.") from error
    aside = path.with_name(f"{path.stem}-{found.get('commit')}-{int(path.stat().st_mtime)}{path.suffix}")
    os.replace(path, aside)
    print(f"The rows that are there were measured with another {', '.join(changed)}: they are in {aside} now.")
    return []


def recorded(file: str) -> dict[str, Any]:
    """A file under ``data/results``; with no rows where nothing is recorded yet.

    >>> recorded("claims.json")["rows"][0]["id"], recorded("nothing.json")
    ('C01', {'rows': []})
    """
    path = data_folder() / "results" / file
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"rows": []}


def described(record: Mapping[str, Any], libraries: Sequence[str] = LIBRARIES) -> str:
    """Where a file of results is from, in two lines: machine, versions, date and commit; and the command.

    >>> about = {"machine": {"cpu": "a CPU", "usable_threads": 2}, "versions": {"torch": "2.13.0"}, "commit": "4f0"}
    >>> print(described({**about, "date": "2026-11-22", "command": "make bench", "rows": [{}]}))
    a CPU, 2 threads; torch 2.13.0; 2026-11-22, commit 4f0
    make bench
    >>> described({"rows": []})
    'Nothing is recorded yet.'
    """
    if not record["rows"]:
        return "Nothing is recorded yet."
    facts, versions = record["machine"], record["versions"]
    gpu = facts.get("gpu")
    on = gpu["name"] if gpu else f"{facts['cpu']}, {facts['usable_threads']} threads"
    with_what = ", ".join(f"{name} {versions[name]}" for name in libraries if name in versions)
    return f"{on}; {with_what}; {record['date']}, commit {record['commit']}\n{record['command']}"


def aligned(lines: Sequence[Sequence[str]], *, left: Collection[int] = (0,), rule: bool = False) -> list[str]:
    """Cells of text as lines of a table.

    Args:
        lines: equally many cells each; the first one is the header.
        left: the columns that begin at the left; the others end at the right.
        rule: dashes below the header.

    >>> print("\\n".join(aligned([("name", "MB"), ("a", "35"), ("longer", "9")], rule=True)))
    name    MB
    ------  --
    a       35
    longer   9
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    dashes = [tuple("-" * width for width in widths)] if rule else []
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (lines[0], *dashes, *lines[1:])
    ]


def here() -> dict[str, Any]:
    """This machine, the versions of what is installed, and the commit."""
    return {"machine": machine.facts(), "versions": machine.versions(), "commit": commit()}


def today() -> str:
    """The date, as files of results have it."""
    return datetime.now(UTC).strftime("%Y-%m-%d")


def commit() -> str | None:
    """``T5ACCEL_COMMIT``, else the checkout's commit, with ``-dirty`` where it was changed; else ``None``."""
    if named := os.environ.get("T5ACCEL_COMMIT"):
        return named  # of what was copied here without its history
    folder = Path(__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return None  # as in an installed wheel
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:  # no git on this machine
        return None


def at_path(found: Any, path: str) -> Any:
    """``found["a"]["b"]`` for ``"a.b"``; ``None`` where there is nothing.

    >>> at_path({"machine": {"gpu": None}}, "machine.gpu.name") is None
    True
    """
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
