"""Teacher outputs as labels for sequence-level distillation (Kim and Rush, 2016).

They are simpler and more uniform than references, of which a small student cannot learn everything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from t5accel import machine
from t5accel.distillation.batches import Example
from t5accel.errors import InputError

GROUP = 2000  # sources sorted by length and decoded between two writes


def write_teacher_outputs(
    file: Path, generate: Callable[[list[str]], list[str]], wanted: list[tuple[str, str]], *, batch_size: int = 32,
    by: str | None = None,
) -> None:  # fmt: skip
    """Append a JSON line ``{"task", "source", "target"}`` for each wanted (task, source) that the file lacks.

    ``by`` says in the first line who writes, and how; raises ``InputError`` for a file by another, or by somebody
    unknown.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder) / "teacher.jsonl"
    ...     write_teacher_outputs(file, lambda texts: [text.upper() for text in texts], [("shout", "hello")])
    ...     read_teacher_outputs(file)
    {'shout': [('hello', 'HELLO')]}
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = list(_rows(file)) if file.is_file() else []
    if rows and rows[0].get("by") != by:
        raise InputError(f"{file} was written by another teacher, or otherwise. Delete it, or use another folder.")
    there = {(row.get("task"), row.get("source")) for row in rows}
    is_cut = file.is_file() and file.read_bytes()[-1:] not in (b"", b"\n")  # by a kill
    first = "" if rows or by is None else json.dumps({"by": by}) + "\n"
    with file.open("ab") as out:
        out.write(b"\n" * is_cut + first.encode())
    missing = [pair for pair in wanted if pair not in there]
    done = len(wanted) - len(missing)
    with machine.progress_bar(total=len(wanted), initial=done, desc="the teacher writes", unit="text") as bar:
        for first in range(0, len(missing), GROUP):
            group = missing[first : first + GROUP]
            group.sort(key=lambda pair: len(pair[1]))  # similar lengths: less padding
            lines = []
            for start in range(0, len(group), batch_size):
                batch = group[start : start + batch_size]
                targets = generate([source for _, source in batch])
                for (task, source), target in zip(batch, targets, strict=True):
                    lines.append(json.dumps({"task": task, "source": source, "target": target}, ensure_ascii=False))
                bar.update(len(batch))
            with file.open("a", encoding="utf-8") as out:
                out.write("".join(line + "\n" for line in lines))


def read_teacher_outputs(file: Path) -> dict[str, list[Example]]:
    """Read the teacher's examples by task."""
    if not file.is_file():
        raise InputError(f"No teacher's texts at {file}. Let write_teacher_outputs() make them.")
    found: dict[str, list[Example]] = {}
    for row in _rows(file):
        if "task" in row:
            found.setdefault(row["task"], []).append((row["source"], row["target"]))
    if not found:
        raise InputError(f"{file} holds no texts. Delete it, and let write_teacher_outputs() make it again.")
    return found


def _rows(file: Path) -> Iterator[dict[str, str]]:
    for line in file.read_bytes().split(b"\n"):
        try:
            yield json.loads(line)
        except ValueError:  # a line truncated by a kill
            continue
