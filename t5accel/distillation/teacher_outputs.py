"""Sequence-level distillation: the training sources again, with what the teacher writes for them as their labels.

A student is too small to learn all that references do; what its teacher writes is simpler and more uniform (Kim and
Rush, 2016). The texts are written once, to a file that an interrupted run goes on with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from t5accel import machine
from t5accel.distillation.batches import Example
from t5accel.errors import InputError

GROUP = 2000  # sources that are sorted by length and decoded before any of them is written down


def write_teacher_outputs(
    file: Path, generate: Callable[[list[str]], list[str]], wanted: list[tuple[str, str]], *, batch_size: int = 32
) -> None:
    """Let the teacher write to each source, as lines of JSON; what is in the file already is not written again.

    Args:
        file: with a line ``{"task", "source", "target"}`` for each source.
        generate: the teacher, from texts to texts.
        wanted: tasks (any names) and sources.
        batch_size: texts that are given to it together.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder) / "teacher.jsonl"
    ...     write_teacher_outputs(file, lambda texts: [text.upper() for text in texts], [("shout", "hello")])
    ...     read_teacher_outputs(file)
    {'shout': [('hello', 'HELLO')]}
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    there = set()
    if file.is_file():
        there = {row["source"] for row in _rows(file)}
        with file.open("ab") as out:
            out.write(b"\n")  # ends a line that a kill cut short
    missing = [(task, source) for task, source in wanted if source not in there]
    done = len(wanted) - len(missing)
    with machine.progress_bar(total=len(wanted), initial=done, desc="the teacher writes", unit="text") as bar:
        for first in range(0, len(missing), GROUP):
            group = sorted(missing[first : first + GROUP], key=lambda pair: len(pair[1]))  # alike lengths: less padding
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
    """By task, the sources and what the teacher wrote; raises ``InputError`` if the file is missing or holds none."""
    if not file.is_file():
        raise InputError(f"No teacher's texts at {file}: let write_teacher_outputs make them.")
    found: dict[str, list[Example]] = {}
    for row in _rows(file):
        found.setdefault(row["task"], []).append((row["source"], row["target"]))
    if not found:
        raise InputError(f"{file} holds no texts: delete it, and let write_teacher_outputs make it again.")
    return found


def _rows(file: Path) -> Iterator[dict[str, str]]:
    """Its lines; a last one that a kill cut short is left out."""
    for line in file.read_bytes().split(b"\n"):
        try:
            yield json.loads(line)
        except ValueError:
            continue
