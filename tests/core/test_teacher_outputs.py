"""What the teacher writes: a file that goes on after any interruption."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import t5accel.distillation.teacher_outputs as module
from t5accel.distillation.teacher_outputs import read_teacher_outputs, write_teacher_outputs
from t5accel.errors import InputError
from t5accel.models.prefixes import SUMMARIZE, TRANSLATE

WANTED = [("translation", f"{TRANSLATE}Text {'x' * (i % 7)} {i}.") for i in range(23)] + [
    ("questions", "question: Où\u2028est-il\u2029? context: « Là »\n\tet là."),
    ("summaries", SUMMARIZE + "\u0085 \U0001f600 \"q\""),
]  # fmt: skip


class Teacher:
    """Writes each source backwards, and remembers what it was asked; ``patience``: after so many batches it fails."""

    def __init__(self, patience: int | None = None):
        self.batches: list[list[str]] = []
        self.patience = patience

    def __call__(self, texts: list[str]) -> list[str]:
        if len(self.batches) == self.patience:
            raise KeyboardInterrupt
        self.batches.append(texts)
        return [text[::-1] for text in texts]

    @property
    def asked(self) -> list[str]:
        return [text for batch in self.batches for text in batch]


def lines(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_bytes().split(b"\n") if line]


EXPECTED = {
    task: {(source, source[::-1]) for other, source in WANTED if other == task} for task in {task for task, _ in WANTED}
}


def check_complete(file: Path) -> None:
    found = read_teacher_outputs(file)
    assert {task: set(examples) for task, examples in found.items()} == EXPECTED
    assert sum(map(len, found.values())) == len(WANTED), "nothing is written twice"


# --- the file ---------------------------------------------------------------------------------------------------------


def test_every_source_is_written_once_in_batches_of_alike_lengths(tmp_path: Path) -> None:
    teacher, file = Teacher(), tmp_path / "new" / "teacher.jsonl"
    write_teacher_outputs(file, teacher, WANTED, batch_size=4)
    assert [len(batch) for batch in teacher.batches] == [4] * 6 + [1]
    lengths = list(map(len, teacher.asked))
    assert lengths == sorted(lengths) and sorted(teacher.asked) == sorted(source for _, source in WANTED)
    check_complete(file)
    assert all(set(line) == {"task", "source", "target"} for line in lines(file))
    again = Teacher()
    write_teacher_outputs(file, again, WANTED)
    assert not again.batches
    check_complete(file)


@pytest.mark.parametrize("cut", [1, 2, 40, 300])
def test_a_file_that_was_cut_short_is_gone_on_with(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "teacher.jsonl"
    write_teacher_outputs(file, Teacher(), WANTED[:12], batch_size=4)
    before = file.read_bytes()
    file.write_bytes(before[:-cut])  # 1: the end of the line alone
    teacher = Teacher()
    write_teacher_outputs(file, teacher, WANTED, batch_size=4)
    lost = 0 if cut == 1 else 12 - before[:-cut].count(b"\n")
    assert len(teacher.asked) == len(WANTED) - 12 + lost and len(set(teacher.asked)) == len(teacher.asked)
    check_complete(file)


def test_what_was_written_before_an_interruption_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GROUP", 8)
    file = tmp_path / "teacher.jsonl"
    with pytest.raises(KeyboardInterrupt):
        write_teacher_outputs(file, Teacher(patience=5), WANTED, batch_size=4)
    assert {line["source"] for line in lines(file)} == {source for _, source in WANTED[:16]}
    teacher = Teacher()
    write_teacher_outputs(file, teacher, WANTED, batch_size=4)
    assert set(teacher.asked) == {source for _, source in WANTED[16:]}
    check_complete(file)


def test_another_teacher_does_not_go_on_in_the_file(tmp_path: Path) -> None:
    file, teacher = tmp_path / "teacher.jsonl", Teacher()
    write_teacher_outputs(file, Teacher(), WANTED[:12], by="one, 64 tokens")
    write_teacher_outputs(file, teacher, WANTED, by="one, 64 tokens")
    assert len(teacher.asked) == len(WANTED) - 12
    check_complete(file)
    before = file.read_bytes()
    (tmp_path / "unsigned.jsonl").write_bytes(before.split(b"\n", 2)[2])
    for other, by in (
        (file, "another"),
        (file, "one, 32 tokens"),
        (tmp_path / "unsigned.jsonl", "one, 64 tokens"),
        (file, None),
    ):
        with pytest.raises(InputError, match="another teacher"):
            write_teacher_outputs(other, Teacher(patience=0), WANTED, by=by)
    assert file.read_bytes() == before


def test_a_source_of_two_tasks_is_written_for_each(tmp_path: Path) -> None:
    file = tmp_path / "teacher.jsonl"
    for task in "ab":
        write_teacher_outputs(file, lambda texts: [text.upper() for text in texts], [(task, "x")])
    assert read_teacher_outputs(file) == {"a": [("x", "X")], "b": [("x", "X")]} and b"\n\n" not in file.read_bytes()


def test_a_missing_file_and_one_without_texts_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "teacher.jsonl"
    with pytest.raises(InputError, match="write_teacher_outputs"):
        read_teacher_outputs(file)
    for content in (b"", b"\n\n", b'{"task": "transl'):
        file.write_bytes(content)
        with pytest.raises(InputError, match="teacher.jsonl"):
            read_teacher_outputs(file)
