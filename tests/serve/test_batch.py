"""Batch jobs: every row exactly once and the same answers, whatever happens on the way."""

from __future__ import annotations

import csv
import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pyarrow
import pytest
from filelock import FileLock
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from made_up import panicking_tokenizer
from pyarrow import parquet
from typer.testing import CliRunner

from bench import tasks
from t5accel.api import open_backend
from t5accel.cli import app
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import InputError, JobError
from t5accel.graphs.manifest import describe_file
from t5accel.serve.batch import job as running
from t5accel.serve.batch import output
from t5accel.serve.batch.formats import JsonRows, RejectedRow
from t5accel.serve.batch.generate import Answer, BatchGenerator, batches
from t5accel.serve.batch.job import Model, Settings, ShardStats, run
from t5accel.serve.batch.output import Output, ShardRecord

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "translate English to French: "
TEXTS = [row["source"] for row in tasks.rows("translation", limit=20)]


def upper(texts: Sequence[str], on_batch: Callable[..., Any] | None = None) -> list[Answer | RejectedRow]:
    """A toy in place of a model: no text of more than 40 characters."""
    if on_batch:
        on_batch(len(texts), len(texts))
    return [Answer(text.upper(), 1) if len(text) <= 40 else RejectedRow("too long") for text in texts]


upper.beams = 1


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upper, "backend", None, raising=False)
    monkeypatch.setattr(Model, "open", lambda self, settings: (upper, {"name": self.name, "sha256": self.name}))


def files(folder: Path) -> dict[str, bytes]:
    """All that a job wrote, by name."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def rows_in(folder: Path) -> list[dict[str, Any]]:
    paths = sorted(folder.glob("part-*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def rejects_in(folder: Path) -> list[dict[str, Any]]:
    paths = sorted(folder.glob("_rejects/*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


# --- answers ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200))
def test_batches_hold_every_text_once_and_keep_to_the_budget(lengths: list[int], budget: int) -> None:
    found = list(batches(lengths, budget))
    assert sorted(i for batch in found for i in batch) == list(range(len(lengths)))
    for batch in found:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget
    mins = [min(lengths[i] for i in batch) for batch in found]
    assert all(mins[k] >= max(lengths[i] for i in found[k + 1]) for k in range(len(found) - 1))


@pytest.fixture(scope="module")
def opened_mini(exported_mini: Path) -> tuple[Any, Any]:
    return open_backend(exported_mini, threads=1)[:2]


@pytest.mark.parametrize("beams", [1, 3])
def test_texts_answered_in_sorted_batches_are_what_each_is_answered_alone(opened_mini: Any, beams: int) -> None:
    texts = [PREFIX + text for text in TEXTS[:: 3 * beams]] + [
        tasks.source_text("questions", tasks.rows("questions")[0])
    ]
    answer = BatchGenerator(*opened_mini, beams=beams, max_new_tokens=24, batch_tokens=120 * beams)
    sizes: list[int] = []
    found = answer(texts, lambda rows, tokens: sizes.append(rows))
    assert found == [answer([text])[0] for text in texts] and len({one.text for one in found}) == len(texts)
    assert sum(sizes) == len(texts) and len(sizes) > 2 and max(sizes) > 1
    if beams == 1:
        backend, tokenizer = opened_mini
        for text, one in zip(texts, found, strict=True):
            batch = tokenizer([text])
            (tokens,) = greedy(backend, batch["input_ids"], batch["attention_mask"], max_new_tokens=24).sequences
            assert one == Answer(tokenizer.batch_decode([tokens], skip_special_tokens=True)[0], len(tokens))


def test_an_answer_in_another_row_s_place_would_be_noticed(opened_mini: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [PREFIX + text for text in TEXTS[:20:4]]
    answer = BatchGenerator(*opened_mini, max_new_tokens=24)
    expected = answer(texts)
    monkeypatch.setattr("t5accel.serve.batch.generate.batches", lambda lengths, most: [[*range(len(lengths))][::-1]])
    assert answer(texts) == expected
    monkeypatch.setattr(answer, "_generated", lambda sources: BatchGenerator._generated(answer, sources[::-1]))
    assert answer(texts) != expected


def test_texts_that_the_model_cannot_read_have_a_reason(opened_mini: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = BatchGenerator(*opened_mini, max_source_tokens=9, max_new_tokens=8)
    short, long = answer([PREFIX + "No.", PREFIX + "Never again and never before, I said to them all."])
    assert isinstance(short, Answer) and isinstance(long, RejectedRow) and "at most 9" in long.reason
    monkeypatch.setattr(answer, "entries", 50)
    assert "no entry" in answer([PREFIX + "No."])[0].reason
    assert answer([]) == []
    with pytest.raises(InputError, match="no tokenizer"):
        BatchGenerator(opened_mini[0], None)
    for name in ("beams", "max_new_tokens", "max_source_tokens", "batch_tokens"):
        with pytest.raises(InputError, match=name):
            BatchGenerator(*opened_mini, **{name: 0})


def test_a_text_on_which_the_tokenizer_panics_costs_no_other_its_answer(opened_mini: Any, tmp_path: Path) -> None:
    answer = BatchGenerator(opened_mini[0], panicking_tokenizer(tmp_path), max_new_tokens=4)
    fine, bad, none, also_fine = answer(["a a", "a\n a", "\t", "a"])
    assert isinstance(fine, Answer) and isinstance(also_fine, Answer)
    assert bad == RejectedRow("The tokenizer fails on a text (PanicException: AddedVocabulary bad split).")
    assert none == RejectedRow("a text of which the tokenizer makes no token")


class Foreign(BaseException):
    """What a native library raises, and no Exception."""


@pytest.mark.parametrize("error", [Foreign("no"), MemoryError(), ValueError("no")], ids=repr)
def test_whatever_fails_on_one_text_is_the_reason_of_one_reject(
    opened_mini: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    texts = [PREFIX + text for text in TEXTS[:6]]
    answer = BatchGenerator(*opened_mini, max_new_tokens=8)
    expected = [answer([text])[0] for text in texts]
    generated, decoded, tokenizer = answer._generated, opened_mini[1].batch_decode, opened_mini[1]
    lengths = [len(ids) for _, ids in sorted(answer._tokenised(texts))]
    (longest,) = [i for i, length in enumerate(lengths) if length == max(lengths)]

    def not_so_long(sources: list[np.ndarray]) -> np.ndarray:
        if max(map(len, sources)) == max(lengths):
            raise error
        return generated(sources)

    def not_the_third(ids: np.ndarray, **options: Any) -> list[str]:
        found = decoded(ids, **options)
        if expected[2].text in found:
            raise error
        return found

    for owner, name, fails, where in (
        (answer, "_generated", not_so_long, longest), (tokenizer, "batch_decode", not_the_third, 2),
    ):  # fmt: skip
        counts: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fails)
            found = answer(texts, lambda rows, tokens, counts=counts: counts.append(rows))
        assert isinstance(found[where], RejectedRow) and type(error).__name__ in found[where].reason
        assert [one for i, one in enumerate(found) if i != where] == [
            one for i, one in enumerate(expected) if i != where
        ]
        assert sum(counts) == len(texts) - 1


def test_a_model_that_fails_on_any_text_ends_the_job_and_rejects_nothing(
    opened_mini: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = BatchGenerator(*opened_mini)
    for error, kind, sentence in (
        (Foreign("gone"), JobError, r"fails on any text \(Foreign: gone\)"), (InputError("beams"), InputError, "beams"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ):  # fmt: skip

        def fails(sources: list[np.ndarray], error: BaseException = error) -> np.ndarray:
            raise error

        monkeypatch.setattr(answer, "_generated", fails)
        with pytest.raises(kind, match=sentence):
            answer(TEXTS[:3])


# --- formats ----------------------------------------------------------------------------------------------------------

cells = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
tables = st.lists(st.fixed_dictionaries({"id": cells, "text": cells}), max_size=9)


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=tables, most=st.integers(1, 4))
@example(
    rows=[{"id": 'a "b", c', "text": "two\r\nlines\n"}, {"id": "\r", "text": "  "}, {"id": "", "text": "é\u2028"}],
    most=1,
)
def test_every_row_comes_back_once_with_its_answer_or_its_reason(
    tmp_path_factory: pytest.TempPathFactory, kind: str, rows: list[dict[str, str]], most: int
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    path = folder / f"in{kind}"
    if kind == ".jsonl":
        write_lines(path, rows)
    elif kind == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, ["id", "text"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        schema = pyarrow.schema({"id": pyarrow.string(), "text": pyarrow.string()})
        parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path, row_group_size=3)
    done, before = run(path, folder / "out", settings=Settings(shard_rows=most))
    found = []
    for part in sorted((folder / "out").glob("part-*")):
        if kind == ".jsonl":
            found += [json.loads(line) for line in part.read_bytes().split(b"\n") if line]
        elif kind == ".csv":
            with part.open(encoding="utf-8", newline="") as file:
                found += list(csv.DictReader(file))
        else:
            found += parquet.read_table(part).to_pylist()
    good = [i for i, row in enumerate(rows) if row["text"].strip()]
    assert found == [{**rows[i], "answer": rows[i]["text"].upper()} for i in good]
    assert [reject["row"] - 1 for reject in rejects_in(folder / "out")] == [
        i for i in range(len(rows)) if i not in good
    ]
    assert (done.answered, done.rejected, before) == (len(good), len(rows) - len(good), ShardStats())


@pytest.mark.usefixtures("toy")
def test_rows_that_cannot_be_done_are_rejected_with_their_number_and_reason(tmp_path: Path) -> None:
    deep = "[" * 200_000
    lines = ['{"text": "one", "n": 1.50}', "not JSON", '{"text": 7}', '["text"]', '{"other": "x"}', ""]
    lines += [f'{{"text": "{"x" * 50}"}}', '{"text": "\\ud800"}', '{"text": "a", "answer": "b"}', f'{{"text": {deep}']
    lines += ['{"text": "two"} ']
    path = tmp_path / "in.jsonl"
    path.write_bytes("\n".join(lines).encode() + b'\n{"text": "\xff"}')
    done, _ = run(path, tmp_path / "out", settings=Settings(shard_rows=4))
    parts = b"".join(file.read_bytes() for file in sorted((tmp_path / "out").glob("part-*")))
    assert parts == b'{"text": "one", "n": 1.50, "answer": "ONE"}\n{"text": "two", "answer": "TWO"}\n'
    rejects = rejects_in(tmp_path / "out")
    assert [reject["row"] for reject in rejects] == [2, 3, 4, 5, 6, 7, 8, 9, 10, 12] and done == ShardStats(2, 10, 2)
    expected = ("not JSON", "not a text but 7", "not an object", "no field 'text'", "not JSON", "too long", "surrogate",
                "a field 'answer'", "not JSON", "not UTF-8")  # fmt: skip
    assert all(part in reject["reason"] for part, reject in zip(expected, rejects, strict=True))
    assert rejects[0]["content"] == "not JSON" and {reject["file"] for reject in rejects} == {"in.jsonl"}
    assert max(len(reject["content"]) for reject in rejects) <= 1000


@pytest.mark.usefixtures("toy")
def test_broken_records_of_csv_and_odd_values_of_parquet_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(
        b'\xef\xbb\xbfid,text\n1,one\n2\n3,"two\nlines"\n4,"a"b\n\n5,\xff\n6,six\n7,"open\n'
    )
    run(tmp_path / "a.csv", tmp_path / "csv", settings=Settings(shard_rows=3))
    assert [reject["row"] for reject in rejects_in(tmp_path / "csv")] == [2, 4, 5, 6, 8]
    parts = [file.read_text(encoding="utf-8") for file in sorted((tmp_path / "csv").glob("part-*"))]
    assert all(part.startswith("id,text,answer\n") for part in parts)
    assert [line for part in parts for line in part.splitlines()[1:]] == [
        "1,one,ONE",
        '3,"two',
        'lines","TWO',
        'LINES"',
        "6,six,SIX",
    ]
    table = pyarrow.table(
        {"text": pyarrow.array(["one", None, "two"]).dictionary_encode(), "n": pyarrow.array([1, 2, 3], "int8")}
    )
    parquet.write_table(table, tmp_path / "b.parquet")
    run(tmp_path / "b.parquet", tmp_path / "table")
    written = parquet.read_table(tmp_path / "table")
    assert written.to_pylist() == [{"text": "one", "n": 1, "answer": "ONE"}, {"text": "two", "n": 3, "answer": "TWO"}]
    assert written.schema.field("n").type == "int8" and rejects_in(tmp_path / "table")[0]["row"] == 2


@pytest.mark.usefixtures("toy")
def test_values_that_python_cannot_hold_and_damaged_pages_of_parquet_are_told(tmp_path: Path) -> None:
    far = pyarrow.array([10**15, 0], pyarrow.timestamp("s"))
    parquet.write_table(pyarrow.table({"text": [" ", "two"], "when": far}), tmp_path / "a.parquet")
    assert run(tmp_path / "a.parquet", tmp_path / "column")[0] == ShardStats(1, 1, 1)
    parquet.write_table(pyarrow.table({"text": far}), tmp_path / "b.parquet")
    assert run(tmp_path / "b.parquet", tmp_path / "text")[0] == ShardStats(0, 2, 0)
    assert "not a text but timestamp[ms]: OverflowError" in rejects_in(tmp_path / "text")[0]["reason"]
    texts = [f"text {i}" for i in range(50)]
    parquet.write_table(
        pyarrow.table({"text": texts}), tmp_path / "c.parquet", compression="gzip", use_dictionary=False
    )
    content = bytearray((tmp_path / "c.parquet").read_bytes())
    content[60:160] = bytes(100)
    (tmp_path / "c.parquet").write_bytes(content)
    with pytest.raises(JobError, match=r"c\.parquet cannot be read: .*What is done is kept"):
        run(tmp_path / "c.parquet", tmp_path / "damaged")


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".csv"])
def test_texts_in_another_encoding_are_refused_before_a_row_is_answered(tmp_path: Path, kind: str) -> None:
    path, rows = tmp_path / f"in{kind}", {".txt": "I am tired.\n", ".jsonl": '{"text": "a"}\n', ".csv": "text\na\n"}
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"):
        path.write_bytes((rows[kind] * 9).encode(encoding))
        with pytest.raises(InputError, match=r"looks like UTF-16 or UTF-32: convert it to UTF-8"):
            run(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    path.write_bytes(b"\xef\xbb\xbf" + rows[kind].replace("a", "a\0b").encode() * 9)
    run(path, tmp_path / "out")  # a zero here and there is a character


@pytest.mark.usefixtures("toy")
def test_a_carriage_return_alone_ends_no_row_of_csv_and_hides_none(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"id,text\n1,one\r2,two\n3,three\n")
    assert run(tmp_path / "a.csv", tmp_path / "out")[0] == ShardStats(1, 1, 1)
    assert rejects_in(tmp_path / "out")[0]["reason"] == "not CSV: new-line character seen in unquoted field"
    (tmp_path / "b.csv").write_bytes(b"text\rone\rtwo\r")
    with pytest.raises(InputError, match=r"\(new-line character seen in unquoted field\): give CSV"):
        run(tmp_path / "b.csv", tmp_path / "none")


@pytest.mark.usefixtures("toy")
def test_the_lines_of_a_long_field_of_csv_are_no_rows(tmp_path: Path) -> None:
    long = "".join(f"line,{i}\n" for i in range(20_000))
    assert len(long) > 131_072, "Python's own limit"
    (tmp_path / "in.csv").write_text(f'id,text\n1,"{long}"\n2,two\n', encoding="utf-8")
    assert run(tmp_path / "in.csv", tmp_path / "out")[0] == ShardStats(1, 1, 1)
    assert rejects_in(tmp_path / "out")[0]["reason"] == "too long"


@pytest.mark.usefixtures("toy")
def test_folders_and_patterns_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "in" / "b").mkdir(parents=True)
    (tmp_path / "in" / "b" / "c.txt").write_bytes(b"three\r\nfour")
    write_lines(tmp_path / "in" / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    (tmp_path / "in" / "notes.md").write_text("not read")
    expected = ["ONE", "TWO", "THREE", "FOUR"]
    for name, where in (("folder", tmp_path / "in"), ("pattern", tmp_path / "in" / "**" / "*.[jt]*")):
        run(where, tmp_path / name)
        assert [row["answer"] for row in rows_in(tmp_path / name)] == expected
    assert rows_in(tmp_path / "folder")[2] == {"text": "three", "answer": "THREE"}
    again = tmp_path / "moved"
    (tmp_path / "in").rename(again)
    assert run(again, tmp_path / "folder") == (ShardStats(), ShardStats(4, 0, 4)), (
        "the same files elsewhere are the same input"
    )


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("toy")
def test_other_settings_another_model_and_another_input_are_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"text": "one", "other": "x"}])
    run(path, tmp_path / "out")
    before = files(tmp_path / "out")
    for changed in (
        dict(beams=2),
        dict(prefix="x: "),
        dict(column="other"),
        dict(max_new_tokens=7),
        dict(batch_tokens=9),
        dict(shard_rows=9),
    ):
        (name,) = changed
        with pytest.raises(InputError, match=f"its {name} is .*, here it is {changed[name]!r}"):
            run(path, tmp_path / "out", settings=Settings(**changed))
    with pytest.raises(InputError, match="its name is 'mini', here it is 'mini-d1'; its sha256"):
        run(path, tmp_path / "out", Model("mini-d1"))
    write_lines(path, [{"text": "two", "other": "x"}])
    with pytest.raises(InputError, match="its sha256 is"):
        run(path, tmp_path / "out")
    assert files(tmp_path / "out") == before


@pytest.mark.usefixtures("toy")
def test_what_is_no_input_and_no_output_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in.jsonl", [{"text": "one"}])
    (tmp_path / "a.csv").write_text("id,answer\n1,2\n")
    (tmp_path / "b.csv").write_text("text,answer\n1,2\n")
    (tmp_path / "a.parquet").write_text("no table")
    (tmp_path / "a.doc").write_text("x")
    for where, sentence in (
        ("nowhere", "no file, no folder"), ("a.doc", "of no kind"), ("a.csv", "no column 'text' but id, answer"),
        ("b.csv", "column 'answer', where"), ("a.parquet", "as Parquet"), (".", "lies in ., which is read"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=sentence):
            run(where, "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="where the answers go"):
        run("in.jsonl", ".")
    with pytest.raises(InputError, match="holds a.txt, and no job"):
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "a.txt").touch()
        run("in.jsonl", "full")
    with pytest.raises(JobError, match="cannot be written to"):
        run("in.jsonl", "a.doc/out")
    for wrong in (
        dict(shard_rows=0),
        dict(column=""),
        dict(output_column="text"),
        dict(prefix="\udcff"),
        dict(output_column="\udcff"),
    ):
        with pytest.raises(InputError):
            Settings(**wrong)


def test_a_precision_that_runs_in_torch_is_refused() -> None:
    with pytest.raises(InputError, match="runs in torch"):
        Model(precision="bf16").open(Settings())


@pytest.mark.usefixtures("toy")
def test_two_jobs_on_one_output_are_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"text": "one"}])
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".lock"), pytest.raises(InputError, match="Another job is writing"):
        run(path, tmp_path / "out")
    assert run(path, tmp_path / "out")[0].answered == 1


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("depth", [900, 100_000])
def test_no_manifest_of_any_content_ends_a_job_with_an_error_of_python_s(tmp_path: Path, depth: int) -> None:
    path, out = write_lines(tmp_path / "in.jsonl", [{"text": "one"}]), tmp_path / "out"
    out.mkdir()
    nested = "[" * depth + "]" * depth
    for content in (nested, f'{{"model": {nested}}}', "", "null", "[1]", '{"model": {}}', "\0"):
        (out / "_manifest.json").write_text(content)
        with pytest.raises(InputError, match="is no manifest of a job|holds another job"):
            run(path, out)
    assert [*files(out)] == ["_manifest.json"]


@pytest.mark.usefixtures("toy")
def test_no_pipe_among_the_files_is_waited_for(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"text": "one"}, {"text": "two"}, {"text": 3}])
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(InputError, match="no file, no folder"):
        run(tmp_path / "pipe.jsonl", tmp_path / "out")
    run(path, tmp_path / "expected", settings=Settings(shard_rows=1))
    for name, sentence in (
        ("_manifest.json", "is no manifest of a job"), (".lock", ".lock is no regular file"),
        ("_done.jsonl", "_done.jsonl cannot be read"),
    ):  # fmt: skip
        run(path, out := tmp_path / name, settings=Settings(shard_rows=1))
        (out / name).unlink()
        os.mkfifo(out / name)
        with pytest.raises((InputError, JobError), match=sentence):
            run(path, out, settings=Settings(shard_rows=1))
    for name in ("part-000001.jsonl", "_rejects/part-000002.jsonl"):
        run(path, out := tmp_path / Path(name).name, settings=Settings(shard_rows=1))
        (out / name).unlink()
        os.mkfifo(out / name)
        run(path, out, settings=Settings(shard_rows=1))
        assert files(out) == files(tmp_path / "expected")


# --- what may happen on the way ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("toy")
def test_a_vanished_or_changed_input_and_a_full_disk_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"text": f"text {i}"} for i in range(9)])
    run(path, tmp_path / "expected", settings=Settings(shard_rows=2))
    content, real = path.read_bytes(), running.process_shard

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name, trouble, sentence in (
        ("gone", lambda: path.unlink(), "No such file"),
        ("changed", lambda: path.write_bytes(b"{}\n" * 9), "was written to since"),
        ("full", lambda: setattr(output, "flush", full), "No space left on device. What is done is kept"),
    ):
        turns = iter([lambda: None, trouble])
        with monkeypatch.context() as patch, pytest.raises(JobError, match=sentence):
            patch.setattr(output, "flush", output.flush)  # put back after the block
            patch.setattr(running, "process_shard", lambda *given, turns=turns: (next(turns)(), real(*given))[1])
            run(path, tmp_path / name, settings=Settings(shard_rows=2))
        assert len(files(tmp_path / name)) == 3, "the manifest, a shard and its record, nothing half written"
        path.write_bytes(content)
        done, before = run(path, tmp_path / name, settings=Settings(shard_rows=2))
        assert (done.answered, before) == (7, ShardStats(2, 0, 2)) and files(tmp_path / name) == files(
            tmp_path / "expected"
        )


@pytest.mark.usefixtures("toy")
def test_bytes_that_change_while_a_job_runs_are_noticed_though_the_times_are_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "in.txt", running.process_shard
    path.write_text("one\ntwo\nsix\n")
    times = path.stat()

    def alter() -> None:
        path.write_text("one\ntwo\nten\n")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    turns = iter([lambda: None, alter])
    monkeypatch.setattr(running, "process_shard", lambda *given: (next(turns)(), real(*given))[1])
    time.sleep(0.02)  # the clock of a file system ticks
    with pytest.raises(JobError, match="was written to since the job began"):
        run(path, tmp_path / "out", settings=Settings(shard_rows=1))
    assert [row["answer"] for row in rows_in(tmp_path / "out")] == ["ONE"]


@pytest.mark.usefixtures("toy")
def test_a_folder_that_vanishes_or_becomes_another_job_s_is_not_filled_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "in.txt", running.process_shard
    path.write_text("one\n\nthree\nfour\n")
    (tmp_path / "other.txt").write_text("five\n")
    out, one_each = tmp_path / "out", Settings(shard_rows=1)

    def replaced() -> None:
        shutil.rmtree(out)
        with monkeypatch.context() as patch:
            patch.setattr(running, "process_shard", real)
            run(tmp_path / "other.txt", out)

    def cut() -> None:
        (out / "part-000000.jsonl").write_bytes(b"")

    for trouble, sentence in (
        (lambda: shutil.rmtree(out), "is not the job's folder any more"),
        (replaced, "is not the job's folder any more"),
        (lambda: (out / "_manifest.json").unlink(), "is not the job's folder any more"),
        (lambda: (out / "part-000000.jsonl").unlink(), r"out lacks part-000000\.jsonl: 1 shards"),
        (cut, r"out lacks part-000000\.jsonl: 1 shards"),
        (lambda: shutil.rmtree(out / "_rejects"), r"out lacks part-000001\.jsonl: 1 shards"),
    ):
        for at in (2, 3):  # before the last but one, and the last
            turns = iter(range(4))
            monkeypatch.setattr(
                running, "process_shard",
                lambda *given, turns=turns, at=at, trouble=trouble: (next(turns) == at and trouble(), real(*given))[1],
            )  # fmt: skip
            with pytest.raises(JobError, match=sentence):
                run(path, out, settings=one_each)
            if trouble is replaced:
                assert [row["answer"] for row in rows_in(out)] == ["FIVE"]
            shutil.rmtree(out, ignore_errors=True)


@pytest.mark.usefixtures("toy")
def test_files_that_were_cut_altered_or_lost_are_made_again_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, one_each = tmp_path / "in.txt", Settings(shard_rows=1)
    path.write_text("one\n\nthree\nfour\n")
    run(path, tmp_path / "expected", settings=one_each)
    expected, whole = files(tmp_path / "expected"), ShardStats(3, 1, 3)
    part, rejects, done = "part-000002.jsonl", "_rejects/part-000001.jsonl", "_done.jsonl"
    lines = expected[done].splitlines(keepends=True)
    for name, content, named, rows in (
        (part, expected[part][:-3], part, 1), (part, b"", part, 1), (part, None, part, 1),
        (part, expected[part].replace(b"THREE", b"NEVER"), part, 1),
        (rejects, None, "part-000001.jsonl", 1), (rejects, b"", "part-000001.jsonl", 1),
        (done, b"".join(lines)[:-9], "part-000003.jsonl", 1), (done, None, "part-000000.jsonl, part-000001.jsonl", 4),
        (done, b"\n".join([b"[" * 9999, b"{}", b"\xff", *lines[:2]]), "part-000002.jsonl", 2),
        (done, lines[0].replace(b"part-000000", b"part-000003") * 2, "part-000000.jsonl", 4),
    ):  # fmt: skip
        out = tmp_path / "out"
        shutil.copytree(tmp_path / "expected", out)
        if content is None:
            (out / name).unlink()
        else:
            (out / name).write_bytes(content)
        now, before = run(path, out, settings=one_each)
        assert now.answered + now.rejected == rows and now + before == whole and files(out) == expected, name
        said = capsys.readouterr().err
        assert named in said and "answered again" in said and len(said.splitlines()) == 1
        shutil.rmtree(out)
    run(path, tmp_path / "expected", settings=one_each)
    assert not capsys.readouterr().err


@pytest.mark.usefixtures("toy")
def test_rejects_of_an_interrupted_try_do_not_outlive_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that memory did not suffice for is answered by the next try."""
    path, put = tmp_path / "in.txt", Output.put
    path.write_text("one\ntwo\n")

    def killed_at_the_part(self: Output, name: str, write: Callable[[Path], Any]) -> Any:
        if name.startswith("part"):
            raise Killed
        return put(self, name, write)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        short = [RejectedRow("no memory"), Answer("TWO", 1)]
        answerer = Mock(return_value=short, beams=1)
        patch.setattr(Model, "open", lambda self, settings: (answerer, {"name": "mini", "sha256": "mini"}))
        patch.setattr(Output, "put", killed_at_the_part)
        run(path, tmp_path / "out")
    assert rejects_in(tmp_path / "out")
    assert run(path, tmp_path / "out") == (ShardStats(2, 0, 2), ShardStats()) and not rejects_in(tmp_path / "out")


class Killed(BaseException):
    """In place of a process's end."""


def crashes(folder: Path, monkeypatch: pytest.MonkeyPatch, but: str = "") -> list[int]:
    """Let a job end at each of the moments between two operations on files; at which is the outcome another one?

    A file called ``but`` is not compared.
    """
    path = write_lines(folder / "in.jsonl", [{"text": f"text {i}" if i % 3 else ""} for i in range(7)])
    run(path, folder / "expected", settings=Settings(shard_rows=3))
    expected, differ, moment, ended = files(folder / "expected") | {but: b""}, [], 0, True
    while ended:
        left, ended, moment = moment, False, moment + 1

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any, **named: Any) -> Any:
                nonlocal left, ended
                left -= 1
                if left < 0:
                    ended = True
                    raise Killed
                return real(*given, **named)

            return call

        with monkeypatch.context() as patch:
            for owner, name in ((output, "flush"), (output.os, "replace"), (Path, "write_text"), (Path, "mkdir"),
                                (Output, "record")):  # fmt: skip
                patch.setattr(owner, name, counted(getattr(owner, name)))
            patch.setattr(JsonRows, "write", counted(JsonRows.write))
            try:
                run(path, folder / f"out-{moment}", settings=Settings(shard_rows=3))
            except Killed:
                pass
        try:
            run(path, folder / f"out-{moment}", settings=Settings(shard_rows=3))
        except InputError:  # it is no job any more
            differ.append(moment)
            continue
        if files(folder / f"out-{moment}") | {but: b""} != expected:
            differ.append(moment)
    assert moment > 15
    return differ


@pytest.mark.usefixtures("toy")
def test_a_job_ended_between_any_two_operations_goes_on_to_the_same_files(tmp_path: Path, monkeypatch: Any) -> None:
    assert not crashes(tmp_path, monkeypatch)


@pytest.mark.usefixtures("toy")
def test_shards_written_in_place_and_known_by_their_names_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_place(self: Output, name: str, write: Callable[[Path], Any]) -> dict[str, Any]:
        (self.folder / name).parent.mkdir(exist_ok=True)
        (self.folder / name).write_text("")
        write(self.folder / name)
        return describe_file(self.folder / name)

    def by_name(self: Output, parts: list[str]) -> tuple[dict[str, ShardRecord], list[str]]:
        return {part: ShardRecord(part, ShardStats(), {}) for part in parts if (self.folder / part).exists()}, []

    monkeypatch.setattr(Output, "put", in_place)
    monkeypatch.setattr(Output, "finished", by_name)
    assert len(crashes(tmp_path, monkeypatch, but="_done.jsonl")) > 2


PROGRAM = """
import sys
from t5accel.serve.batch.job import Model, Settings
from t5accel.serve.batch.job import run
settings = Settings(prefix=sys.argv[4], max_new_tokens=24, shard_rows=10)
run(sys.argv[1], sys.argv[2], Model(sys.argv[3], threads=1), settings)
"""


def killed(tmp_path: Path, model: Path, times: int, texts: Sequence[str]) -> None:
    """A real process, killed so often at random moments: every row once, and the bytes of an undisturbed run."""
    rows = [{"id": i, "text": text} for i, text in enumerate(texts)]
    rows[3]["text"], rows[17]["text"] = 5, "word " * 600
    path = write_lines(tmp_path / "in.jsonl", rows)
    path.write_text(path.read_text(encoding="utf-8") + "broken\n", encoding="utf-8")

    def start(out: str) -> subprocess.Popen:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        return subprocess.Popen([sys.executable, "-c", PROGRAM, path, tmp_path / out, model, PREFIX], env=environment)

    begun = time.perf_counter()
    assert start("expected").wait(timeout=300) == 0
    whole, rng, ended, halfway = time.perf_counter() - begun, random.Random(times), 0, 0
    for _ in range(times):
        process = start("out")
        try:
            process.wait(timeout=rng.uniform(0.4, 0.8) * whole)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        ended += process.wait(timeout=60) == -signal.SIGKILL
        halfway += 0 < len(list((tmp_path / "out").glob("part-*"))) < 1 + len(rows) // 10
    assert start("out").wait(timeout=300) == 0
    assert ended, "no moment was early enough"
    assert files(tmp_path / "out") == files(tmp_path / "expected")
    found = rows_in(tmp_path / "out")
    assert [row["id"] for row in found] == [row["id"] for row in rows if row["id"] not in (3, 17)]
    assert [reject["row"] for reject in rejects_in(tmp_path / "out")] == [4, 18, len(rows) + 1]
    assert len({row["answer"] for row in found}) > len({row["text"] for row in found}) / 2


def test_a_job_killed_three_times_answers_every_row_once(tmp_path: Path, exported_mini: Path) -> None:
    killed(tmp_path, exported_mini, 3, TEXTS)


@pytest.mark.long
def test_a_job_killed_twenty_times_answers_every_row_once(tmp_path: Path, exported_mini: Path) -> None:
    killed(tmp_path, exported_mini, 20, TEXTS * 3)


@pytest.mark.long
def test_a_job_that_is_killed_every_second_or_two_ends(tmp_path: Path, exported_mini: Path) -> None:
    """By the command and its defaults: a shard takes less time than there is between two kills.

    Seconds are those of the process on one core, so that a busy machine changes nothing.
    """
    texts = np.random.default_rng(0).choice([PREFIX + text for text in TEXTS], 1600).tolist()
    path = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    write_lines(tmp_path / "one.jsonl", [{"text": texts[0]}])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}

    def end_of(given: Path, out: str, limit_s: float = 1e9) -> int:
        options = ["--model", exported_mini, "--threads", 1]
        command = [*map(str, [sys.executable, "-m", "t5accel", "batch", given, tmp_path / out, *options])]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            times = psutil.Process(process.pid).cpu_times()
            if times.user + times.system > limit_s:
                process.kill()
            time.sleep(0.02)
        return process.returncode

    assert end_of(path, "expected") == 0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert end_of(tmp_path / "one.jsonl", "one") == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    starting_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    rng, ends = random.Random(0), []
    while 0 not in ends and len(ends) < 60:
        ends.append(end_of(path, "out", starting_s + rng.uniform(1, 2.5)))
    assert set(ends) == {0, -signal.SIGKILL} and len(ends) > 3
    assert files(tmp_path / "out") == files(tmp_path / "expected") and len(rows_in(tmp_path / "out")) == len(texts)


MEMORY = PROGRAM + "from t5accel import machine\nprint(machine.peak_memory_bytes())\n"


@pytest.mark.long
@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet"])
def test_ten_times_the_rows_take_no_more_memory(tmp_path: Path, exported_mini: Path, kind: str) -> None:
    peaks = []
    for copies in (20, 200):
        path = tmp_path / f"in{copies}{kind}"
        texts = np.random.default_rng(0).permutation(TEXTS[:20] * copies).tolist()
        if kind == ".parquet":
            parquet.write_table(pyarrow.table({"text": texts}), path)
        elif kind == ".csv":
            path.write_text("text\n" + "".join(f'"{text}"\n' for text in texts), encoding="utf-8")
        else:
            write_lines(path, [{"text": text} for text in texts])
        program = MEMORY.replace("shard_rows=10", "shard_rows=100")
        command = [sys.executable, "-c", program, path, tmp_path / f"out{copies}", exported_mini, PREFIX]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        peaks.append(int(subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout))
    assert peaks[1] < 1.1 * peaks[0]


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_answers_says_so_and_goes_on(tmp_path: Path, exported_mini: Path, monkeypatch) -> None:
    monkeypatch.setattr("t5accel.machine.watches_stderr", lambda: True)
    path = write_lines(tmp_path / "in.jsonl", [{"source": "I am tired."}, {"source": None}])
    command = [
        "batch",
        path,
        tmp_path / "out",
        "--model",
        exported_mini,
        "--column",
        "source",
        "--prefix",
        PREFIX,
        "--output-column",
        "french",
    ]
    result = CliRunner().invoke(app, [*map(str, command)])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{tmp_path}/out: 1 rows answered, 5 tokens; rejected: 1, see {tmp_path}/out/_rejects\n"
    assert "tokens/s" in result.stderr and "2/2" in result.stderr
    assert rows_in(tmp_path / "out") == [{"source": "I am tired.", "french": "Je suis fatigué."}]
    again = CliRunner().invoke(app, [*map(str, command)])
    assert again.exit_code == 0
    assert again.stdout == f"{tmp_path}/out: 0 rows answered, 0 tokens, 2 were done before\n"
    other = CliRunner().invoke(app, [*map(str, command), "--beams", "4"])
    assert other.exit_code == 2 and "its beams is 1, here it is 4" in other.stderr.splitlines()[-1]
    shards = CliRunner().invoke(app, [*map(str, command), "--shard-rows", "7"])
    assert shards.exit_code == 2 and "its shard_rows is 200, here it is 7" in shards.stderr.splitlines()[-1]


@pytest.mark.usefixtures("toy")
def test_a_job_without_an_answer_ends_with_a_status_that_is_not_zero(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"text": 1}, {"text": None}])
    for earlier in ("", ", 2 were done before"):
        result = CliRunner().invoke(app, ["batch", str(path), str(tmp_path / "out")])
        assert result.exit_code == 2 and f"0 rows answered, 0 tokens{earlier}" in result.stdout
        assert "t5accel: Every row was rejected, 2 of them: see" in result.stderr.splitlines()[-1]
    path.write_bytes(b"")
    assert CliRunner().invoke(app, ["batch", str(path), str(tmp_path / "empty")]).exit_code == 0
