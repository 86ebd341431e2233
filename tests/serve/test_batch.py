"""Batch jobs answer each row exactly once, with equal bytes, whatever interrupts them."""

from __future__ import annotations

import copy
import csv
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow
import pytest
from filelock import FileLock
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from made_up import panicking_tokenizer
from pyarrow import parquet
from typer.testing import CliRunner

from bench import evaluation
from t5accel.api import open_backend
from t5accel.cli import app
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import InputError, JobError
from t5accel.graphs.atomic_write import flush
from t5accel.serve.batch import job as running
from t5accel.serve.batch import output
from t5accel.serve.batch.formats import JsonRows, RejectedRow
from t5accel.serve.batch.generate import BatchGenerator, GeneratedText, batches
from t5accel.serve.batch.job import JobSettings, ModelSource, ShardStats, run
from t5accel.serve.batch.output import Output, ShardRecord

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "translate English to French: "
PIPE = object()
TEXTS = [row["source"] for row in evaluation.rows("translation", limit=20)]


def upper(texts: Sequence[str], on_batch: Callable[..., Any] | None = None) -> list[GeneratedText | RejectedRow]:
    """A toy in place of a model: no text of more than 40 characters."""
    if on_batch:
        on_batch(len(texts), len(texts))
    return [GeneratedText(text.upper(), 1) if len(text) <= 40 else RejectedRow("too long") for text in texts]


upper.beams, upper.draws = 1, False


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upper, "backend", None, raising=False)
    monkeypatch.setattr(ModelSource, "open", lambda self, settings: (upper, {"name": self.name, "sha256": self.name}))


def files(folder: Path) -> dict[str, bytes]:
    """The files that a job wrote, by name."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def lines_in(folder: Path, pattern: str = "part-*.jsonl") -> list[dict[str, Any]]:
    paths = sorted(folder.glob(pattern))
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def rejects_in(folder: Path) -> list[dict[str, Any]]:
    return lines_in(folder, "_rejects/*.jsonl")


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def at_shard(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], Any]], None]:
    """``at_shard(number, event)`` calls ``event`` before a job does that shard."""
    real = running.process_shard

    def arrange(number: int, event: Callable[[], Any]) -> None:
        turns = iter(range(99))

        def process_shard(*given: Any) -> ShardRecord:
            if next(turns) == number:
                monkeypatch.setattr(running, "process_shard", real)
                event()
            return real(*given)

        monkeypatch.setattr(running, "process_shard", process_shard)

    return arrange


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
def test_sorted_batches_give_the_answers_of_each_text_alone(opened_mini: Any, beams: int) -> None:
    question = evaluation.source_text("questions", evaluation.rows("questions")[0])
    texts = [*(PREFIX + text for text in TEXTS[:: 3 * beams]), question]
    answer = BatchGenerator(*opened_mini, beams=beams, max_new_tokens=24, batch_tokens=120 * beams)
    sizes: list[int] = []
    found = answer(texts, lambda rows, tokens: sizes.append(rows))
    assert found == [answer([text])[0] for text in texts] and len({one.text for one in found}) == len(texts)
    assert sum(sizes) == len(texts) and len(sizes) > 2 and max(sizes) > 1
    if beams == 1:
        backend, tokenizer = opened_mini
        batch = tokenizer(texts[:1])
        (tokens,) = greedy(backend, batch["input_ids"], batch["attention_mask"], max_new_tokens=24).sequences
        assert found[0] == GeneratedText(tokenizer.batch_decode([tokens], skip_special_tokens=True)[0], len(tokens))


def test_unreadable_texts_are_rejected_with_a_reason(opened_mini: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = BatchGenerator(*opened_mini, max_source_tokens=9, max_new_tokens=8)
    short, long = answer([PREFIX + "No.", PREFIX + "Never again and never before, I said to them all."])
    assert isinstance(short, GeneratedText) and isinstance(long, RejectedRow) and "at most 9" in long.reason
    assert answer(["a " * 5000]) == [RejectedRow("10000 characters, and at most 9000 are allowed")]
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
    assert isinstance(fine, GeneratedText) and isinstance(also_fine, GeneratedText)
    assert bad == RejectedRow("The tokenizer fails on a text (PanicException: AddedVocabulary bad split).")
    assert none == RejectedRow("a text of which the tokenizer makes no token")


class Foreign(BaseException):
    """An error of a native library that is no ``Exception``."""


@pytest.mark.parametrize(("error", "where"), [(Foreign("no"), "model"), (ValueError("no"), "tokenizer")], ids=str)
def test_an_error_of_one_text_rejects_one_row(opened_mini: Any, monkeypatch, error: BaseException, where: str) -> None:
    texts = [PREFIX + text for text in TEXTS[:6]]
    answer, tokenizer = BatchGenerator(*opened_mini, max_new_tokens=8), opened_mini[1]
    expected = [answer([text])[0] for text in texts]
    generated, decoded = answer._generated, tokenizer.batch_decode
    lengths = [len(tokenizer([text])["input_ids"][0]) for text in texts]
    bad = lengths.index(max(lengths)) if where == "model" else 2

    def generate(sources: list[np.ndarray]) -> np.ndarray:
        if where == "model" and max(map(len, sources)) == max(lengths):
            raise error
        return generated(sources)

    def batch_decode(ids: np.ndarray, **options: Any) -> list[str]:
        found = decoded(ids, **options)
        if where == "tokenizer" and expected[bad].text in found:
            raise error
        return found

    monkeypatch.setattr(answer, "_generated", generate)
    monkeypatch.setattr(tokenizer, "batch_decode", batch_decode)
    counts: list[int] = []
    found = answer(texts, lambda rows, tokens: counts.append(rows))
    rejected = found.pop(bad)
    assert isinstance(rejected, RejectedRow) and type(error).__name__ in rejected.reason
    assert found == expected[:bad] + expected[bad + 1 :] and sum(counts) == len(texts) - 1


@pytest.mark.parametrize(("error", "kind", "sentence"), [
    (Foreign("gone"), JobError, r"fails on any text \(Foreign: gone\)"), (InputError("beams"), InputError, "beams"),
    (KeyboardInterrupt(), KeyboardInterrupt, None),
])  # fmt: skip
def test_a_model_that_fails_on_any_text_ends_the_job_and_rejects_nothing(
    opened_mini: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, kind: Any, sentence: str | None
) -> None:
    answer = BatchGenerator(*opened_mini)
    monkeypatch.setattr(answer, "_generated", Mock(side_effect=error))
    with pytest.raises(kind, match=sentence):
        answer(TEXTS[:3])


# --- formats ----------------------------------------------------------------------------------------------------------

cells = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
tables = st.lists(st.fixed_dictionaries({"id": cells, "text": cells}), max_size=9)


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet"])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=tables, most=st.integers(1, 4))
@example(
    rows=[{"id": 'a "b", c', "text": "two\r\nlines\n"}, {"id": "\r", "text": "  "}, {"id": "", "text": "é\u2028"}],
    most=1,
)
def test_every_row_comes_back_once_with_its_answer_or_its_reason(tmp_path_factory, kind: str, rows, most: int) -> None:
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
    done, before = run(path, folder / "out", settings=JobSettings(shard_rows=most))
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
    bad = [i for i in range(len(rows)) if i not in good]
    assert [reject["row"] - 1 for reject in rejects_in(folder / "out")] == bad
    assert (done.answered, done.rejected, before) == (len(good), len(rows) - len(good), ShardStats())


@pytest.mark.usefixtures("toy")
def test_bad_json_rows_are_rejected_with_number_and_reason(tmp_path: Path) -> None:
    deep = "[" * 200_000
    lines = ['{"text": "one", "n": 1.50}', "not JSON", '{"text": 7}', '["text"]', '{"other": "x"}', ""]
    lines += [f'{{"text": "{"x" * 50}"}}', '{"text": "\\ud800"}', '{"text": "a", "answer": "b"}', f'{{"text": {deep}']
    lines += ['{"text": "two"} ']
    path = tmp_path / "in.jsonl"
    path.write_bytes("\n".join(lines).encode() + b'\n{"text": "\xff"}')
    done, _ = run(path, tmp_path / "out", settings=JobSettings(shard_rows=4))
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
def test_lines_that_end_with_a_carriage_return_alone_are_not_taken_for_one_text(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"one\rtwo\r\nthree\r\n")
    done, _ = run(tmp_path / "in.txt", tmp_path / "out")
    assert "carriage return" in rejects_in(tmp_path / "out")[0]["reason"] and (done.answered, done.rejected) == (1, 1)


@pytest.mark.usefixtures("toy")
def test_broken_records_of_csv_are_rejected(tmp_path: Path) -> None:
    long = "".join(f"line,{i}\n" for i in range(20_000))
    assert len(long) > 131_072, "Python's limit of a field"
    (tmp_path / "a.csv").write_bytes(
        b'\xef\xbb\xbfid,text\n1,one\n2\n3,"two\nlines"\n4,"a"b\n\n5,\xff\n6,six\n1,one\r2,two\n'
        + f'7,"{long}"\n8,"open\n'.encode()
    )
    run(tmp_path / "a.csv", tmp_path / "csv", settings=JobSettings(shard_rows=3))
    assert [reject["row"] for reject in rejects_in(tmp_path / "csv")] == [2, 4, 5, 6, 8, 9, 10]
    reasons = [reject["reason"] for reject in rejects_in(tmp_path / "csv")]
    assert reasons[-3:-1] == ["not CSV: new-line character seen in unquoted field", "too long"]
    (tmp_path / "c.csv").write_text('text\n"open\none\ntwo\n')
    run(tmp_path / "c.csv", tmp_path / "open")
    assert rejects_in(tmp_path / "open")[0]["reason"] == "not CSV: unexpected end of data, in a record of 3 lines"
    parts = [file.read_bytes() for file in sorted((tmp_path / "csv").glob("part-*"))]
    header, rows = b"id,text,answer\r\n", b'1,one,ONE\r\n3,"two\nlines","TWO\nLINES"\r\n6,six,SIX\r\n'
    assert all(part.startswith(header) for part in parts) and b"".join(part[len(header) :] for part in parts) == rows
    (tmp_path / "b.csv").write_bytes(b"text\rone\rtwo\r")
    with pytest.raises(InputError, match="got new-line character seen in unquoted field"):
        run(tmp_path / "b.csv", tmp_path / "none")


@pytest.mark.usefixtures("toy")
def test_parquet_keeps_its_types(tmp_path: Path) -> None:
    texts, numbers = pyarrow.array(["one", None, "two"]).dictionary_encode(), pyarrow.array([1, 2, 3], "int8")
    parquet.write_table(pyarrow.table({"text": texts, "n": numbers}), tmp_path / "b.parquet")
    run(tmp_path / "b.parquet", tmp_path / "table")
    written = parquet.read_table(tmp_path / "table")
    assert written.to_pylist() == [{"text": "one", "n": 1, "answer": "ONE"}, {"text": "two", "n": 3, "answer": "TWO"}]
    assert written.schema.field("n").type == "int8" and rejects_in(tmp_path / "table")[0]["row"] == 2
    views = pyarrow.array([" ", "one", "two", None, "three"], pyarrow.string_view())  # which Arrow cannot filter
    parquet.write_table(pyarrow.table({"text": views}), tmp_path / "c.parquet")
    assert run(tmp_path / "c.parquet", tmp_path / "views")[0] == ShardStats(3, 2, 3)
    assert parquet.read_table(tmp_path / "views")["answer"].to_pylist() == ["ONE", "TWO", "THREE"]


@pytest.mark.usefixtures("toy")
def test_odd_values_and_damaged_pages_of_parquet(tmp_path: Path) -> None:
    far = pyarrow.array([10**15, 0], pyarrow.timestamp("s"))
    parquet.write_table(pyarrow.table({"text": [" ", "two"], "when": far}), tmp_path / "a.parquet")
    assert run(tmp_path / "a.parquet", tmp_path / "column")[0] == ShardStats(1, 1, 1)
    parquet.write_table(pyarrow.table({"text": far}), tmp_path / "b.parquet")
    assert run(tmp_path / "b.parquet", tmp_path / "text")[0] == ShardStats(0, 2, 0)
    assert "not a text but timestamp[ms]: OverflowError" in rejects_in(tmp_path / "text")[0]["reason"]
    texts = [f"text {i}" for i in range(50)]
    texts = pyarrow.table({"text": texts})
    parquet.write_table(texts, tmp_path / "c.parquet", compression="gzip", use_dictionary=False)
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
        with pytest.raises(InputError, match="must be UTF-8"):
            run(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    path.write_bytes(b"\xef\xbb\xbf" + rows[kind].replace("a", "a\0b").encode() * 9)
    run(path, tmp_path / "out")  # a zero here and there is a character


@pytest.mark.usefixtures("toy")
def test_folders_and_patterns_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "in" / "b").mkdir(parents=True)
    (tmp_path / "in" / "b" / "c.txt").write_bytes(b"three\r\nfour")
    write_lines(tmp_path / "in" / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    (tmp_path / "in" / "notes.md").write_text("not read")
    expected = ["ONE", "TWO", "THREE", "FOUR"]
    for name, where in (("folder", tmp_path / "in"), ("pattern", tmp_path / "in" / "**" / "*.[jt]*")):
        run(where, tmp_path / name)
        assert [row["answer"] for row in lines_in(tmp_path / name)] == expected
    assert lines_in(tmp_path / "folder")[2] == {"text": "three", "answer": "THREE"}
    within = tmp_path / "in" / "b" / "answers"
    for count in (4, 0):  # the second time the pattern matches what the first has written
        assert run(tmp_path / "in" / "**" / "**" / "*.[jt]*", within)[0] == ShardStats(count, 0, count)
    shutil.rmtree(within)
    again = tmp_path / "moved"
    (tmp_path / "in").rename(again)
    assert run(again, tmp_path / "folder") == (ShardStats(), ShardStats(4, 0, 4)), "elsewhere, but the same input"
    link = again / "d.txt"
    for target in (tmp_path / "gone.txt", again / "b"):  # what it hides would be left out silently
        link.symlink_to(target)
        for where in (again, again / "*.txt"):
            with pytest.raises(InputError, match=r"d\.txt must lead to a file, got a link to "):
                run(where, tmp_path / "linked")
        link.unlink()


@pytest.mark.usefixtures("toy")
def test_a_file_whose_name_looks_like_a_pattern_is_read_and_an_unreadable_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in" / "closed").mkdir(parents=True)
    for name in ("data1.txt", "data[1].txt"):
        (tmp_path / "in" / name).write_text(name)
    run(tmp_path / "in" / "data[1].txt", tmp_path / "out")
    assert [row["answer"] for row in lines_in(tmp_path / "out")] == ["DATA[1].TXT"]
    usual = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path).name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return usual(path)

    with monkeypatch.context() as patch, pytest.raises(JobError, match="closed cannot be read: Permission denied"):
        patch.setattr(os, "scandir", scandir)
        run(tmp_path / "in", tmp_path / "none")


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("toy")
def test_a_model_that_draws_is_no_search_by_its_number_of_beams(tmp_path: Path, opened_mini: Any, monkeypatch) -> None:
    backend = copy.copy(opened_mini[0])
    backend.rules = replace(backend.rules, unsupported=("do_sample=True",))
    assert [BatchGenerator(backend, opened_mini[1], beams=beams).draws for beams in (None, 1)] == [True, False]
    path = write_lines(tmp_path / "in.jsonl", [{"text": "one"}])
    monkeypatch.setattr(upper, "draws", True)
    run(path, tmp_path / "out")
    monkeypatch.setattr(upper, "draws", False)
    with pytest.raises(InputError, match="its beams is None, here it is 1"):
        run(path, tmp_path / "out", settings=JobSettings(beams=1))


@pytest.mark.usefixtures("toy")
def test_other_settings_another_model_and_another_input_are_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"text": "one", "other": "x"}])
    run(path, tmp_path / "out")
    before = files(tmp_path / "out")
    changes = dict(beams=2, prefix="x: ", column="other", max_new_tokens=7, batch_tokens=9, shard_rows=9)
    for name, value in changes.items():
        with pytest.raises(InputError, match=f"its {name} is .*, here it is {value!r}"):
            run(path, tmp_path / "out", settings=JobSettings(**{name: value}))
    with pytest.raises(InputError, match="its name is 'mini', here it is 'mini-d1'; its sha256"):
        run(path, tmp_path / "out", ModelSource("mini-d1"))
    write_lines(path, [{"text": "two", "other": "x"}])
    with pytest.raises(InputError, match="its sha256 is"):
        run(path, tmp_path / "out")
    assert files(tmp_path / "out") == before


@pytest.mark.usefixtures("toy")
def test_bad_inputs_outputs_and_settings_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in.jsonl", [{"text": "one"}])
    (tmp_path / "a.csv").write_text("id,answer\n1,2\n")
    (tmp_path / "b.csv").write_text("text,answer\n1,2\n")
    (tmp_path / "a.parquet").write_text("no table")
    (tmp_path / "a.doc").write_text("x")
    for where, sentence in (
        ("nowhere", "must be a file, a folder"), ("a.doc", "must be one of .jsonl"),
        ("a.csv", "one column 'text', got id, answer"), ("b.csv", "no column 'answer'"), ("a.parquet", "as Parquet"),
        (".", "must not lie in ., which is read"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=sentence):
            run(where, "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").touch()
    with pytest.raises(InputError, match="where the answers go"):
        run("in.jsonl", ".")
    with pytest.raises(InputError, match="full must be empty or hold a job, got a.txt"):
        run("in.jsonl", "full")
    with pytest.raises(JobError, match="cannot be written to"):
        run("in.jsonl", "a.doc/out")
    junk = [("shard_rows", 0), ("shard_rows", 10**20), ("column", ""), ("output_column", "text"), ("prefix", "\udcff")]
    for name, wrong in junk:
        with pytest.raises(InputError, match=name):
            JobSettings(**{name: wrong})
    with FileLock(tmp_path / "full" / ".lock"), pytest.raises(InputError, match="Another job is writing"):
        run("in.jsonl", "full")
    monkeypatch.undo()
    with pytest.raises(InputError, match="precision"):
        ModelSource(precision="bf16").open(JobSettings())


@pytest.mark.usefixtures("toy")
def test_damaged_manifests_are_refused(tmp_path: Path) -> None:
    path, out = write_lines(tmp_path / "in.jsonl", [{"text": "one"}]), tmp_path / "out"
    out.mkdir()
    nested = ["[" * depth + "]" * depth for depth in (900, 100_000)]
    for content in (*nested, f'{{"model": {nested[0]}}}', "", "null", "[1]", '{"model": {}}', "\0"):
        (out / "_manifest.json").write_text(content)
        with pytest.raises(InputError, match="is no manifest of a job|holds another job"):
            run(path, out)
    assert [*files(out)] == ["_manifest.json"]


@pytest.mark.usefixtures("toy")
def test_pipes_do_not_block_a_job(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"text": "one"}])
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(InputError, match="must be a file, a folder"):
        run(tmp_path / "pipe.jsonl", tmp_path / "out")
    for name, sentence in (
        ("_manifest.json", "is no manifest of a job"), (".lock", ".lock is no regular file"),
        ("_done.jsonl", "_done.jsonl cannot be read"),
    ):  # fmt: skip
        run(path, out := tmp_path / name)
        (out / name).unlink()
        os.mkfifo(out / name)
        with pytest.raises((InputError, JobError), match=sentence):
            run(path, out)


# --- what may happen on the way ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("toy")
def test_a_vanished_or_changed_input_and_a_full_disk_lose_nothing(tmp_path: Path, monkeypatch, at_shard: Any) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"text": f"text {i}"} for i in range(9)])
    run(path, tmp_path / "expected", settings=JobSettings(shard_rows=2))
    content, times = path.read_bytes(), path.stat()

    def altered() -> None:
        time.sleep(0.02)  # the clock of a file system ticks
        path.write_bytes(content.replace(b"text 8", b"text 7"))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    no_space = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    for name, trouble, sentence in (
        ("gone", path.unlink, "No such file"),
        ("changed", lambda: path.write_bytes(b"{}\n" * 9), "was written to since"),
        ("changed, and its time put back", altered, "was written to since"),
        ("full", lambda: monkeypatch.setattr(output, "flush", no_space), "No space left on device. What is done is"),
    ):
        at_shard(1, trouble)
        with pytest.raises(JobError, match=sentence):
            run(path, tmp_path / name, settings=JobSettings(shard_rows=2))
        monkeypatch.setattr(output, "flush", flush)
        assert len(files(tmp_path / name)) == 3, "the manifest, a shard and its record, nothing half written"
        path.write_bytes(content)
        done, before = run(path, tmp_path / name, settings=JobSettings(shard_rows=2))
        assert (done.answered, before) == (7, ShardStats(2, 0, 2))
        assert files(tmp_path / name) == files(tmp_path / "expected")


@pytest.mark.usefixtures("toy")
def test_a_removed_or_replaced_output_folder_ends_the_job(tmp_path: Path, at_shard: Any) -> None:
    path, out = tmp_path / "in.txt", tmp_path / "out"
    path.write_text("one\n\nthree\nfour\n")
    (tmp_path / "other.txt").write_text("five\n")

    def replaced() -> None:
        shutil.rmtree(out)
        run(tmp_path / "other.txt", out)

    for trouble, sentence in (
        (lambda: shutil.rmtree(out), "is not the job's folder any more"),
        (replaced, "is not the job's folder any more"),
        ((out / "_manifest.json").unlink, "is not the job's folder any more"),
        ((out / "part-000000.jsonl").unlink, r"out lacks part-000000\.jsonl: 1 shards"),
        (lambda: (out / "part-000000.jsonl").write_bytes(b""), r"out lacks part-000000\.jsonl: 1 shards"),
        (lambda: shutil.rmtree(out / "_rejects"), r"out lacks part-000001\.jsonl: 1 shards"),
    ):
        for number in (2, 3):  # the last but one, and the last
            at_shard(number, trouble)
            with pytest.raises(JobError, match=sentence):
                run(path, out, settings=JobSettings(shard_rows=1))
            if trouble is replaced:
                assert [row["answer"] for row in lines_in(out)] == ["FIVE"]
            shutil.rmtree(out, ignore_errors=True)


@pytest.mark.usefixtures("toy")
def test_damaged_output_files_are_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, one_each = tmp_path / "in.txt", JobSettings(shard_rows=1)
    path.write_text("one\n\nthree\nfour\n")
    run(path, tmp_path / "expected", settings=one_each)
    expected, whole = files(tmp_path / "expected"), ShardStats(3, 1, 3)
    part, rejects, done = "part-000002.jsonl", "_rejects/part-000001.jsonl", "_done.jsonl"
    lines = expected[done].splitlines(keepends=True)
    for name, content, named, rows in (
        (part, expected[part][:-3], part, 1), (part, b"", part, 1), (part, None, part, 1),
        (part, expected[part].replace(b"THREE", b"NEVER"), part, 1), (part, PIPE, part, 1),
        (rejects, PIPE, "part-000001.jsonl", 1),
        (rejects, None, "part-000001.jsonl", 1), (rejects, b"", "part-000001.jsonl", 1),
        (done, b"".join(lines)[:-9], "part-000003.jsonl", 1), (done, None, "part-000000.jsonl, part-000001.jsonl", 4),
        (done, b"\n".join([b"[" * 9999, b"{}", b"\xff", *lines[:2]]), "part-000002.jsonl", 2),
        (done, lines[0].replace(b"part-000000", b"part-000003") * 2, "part-000000.jsonl", 4),
    ):  # fmt: skip
        out = tmp_path / "out"
        shutil.copytree(tmp_path / "expected", out)
        (out / name).unlink()
        if content is PIPE:
            os.mkfifo(out / name)
        elif content is not None:
            (out / name).write_bytes(content)
        now, before = run(path, out, settings=one_each)
        assert now.answered + now.rejected == rows and now + before == whole and files(out) == expected, name
        said = capsys.readouterr().err
        assert named in said and "answered again" in said and len(said.splitlines()) == 1
        shutil.rmtree(out)
    run(path, tmp_path / "expected", settings=one_each)
    assert not capsys.readouterr().err


@pytest.mark.usefixtures("toy")
def test_rejects_of_an_interrupted_run_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run answers a row for which memory was short."""
    path, put = tmp_path / "in.txt", Output.put
    path.write_text("one\ntwo\n")

    def killed_at_the_part(self: Output, name: str, write: Callable[[Path], Any]) -> Any:
        if name.startswith("part"):
            raise Killed
        return put(self, name, write)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        short = [RejectedRow("no memory"), GeneratedText("TWO", 1)]
        answerer = Mock(return_value=short, beams=1, draws=False)
        patch.setattr(ModelSource, "open", lambda self, settings: (answerer, {"name": "mini", "sha256": "mini"}))
        patch.setattr(Output, "put", killed_at_the_part)
        run(path, tmp_path / "out")
    assert rejects_in(tmp_path / "out")
    assert run(path, tmp_path / "out") == (ShardStats(2, 0, 2), ShardStats()) and not rejects_in(tmp_path / "out")


class Killed(BaseException):
    """Stands for the end of a process."""


@pytest.mark.usefixtures("toy")
def test_a_job_killed_between_any_two_operations_resumes_to_equal_files(tmp_path: Path, monkeypatch: Any) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"text": f"text {i}" if i % 3 else ""} for i in range(7)])
    run(path, tmp_path / "expected", settings=JobSettings(shard_rows=3))
    moment, ended = 0, True
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
            with suppress(Killed):
                run(path, tmp_path / f"out-{moment}", settings=JobSettings(shard_rows=3))
        run(path, tmp_path / f"out-{moment}", settings=JobSettings(shard_rows=3))
        assert files(tmp_path / f"out-{moment}") == files(tmp_path / "expected"), moment
    assert moment > 15


PROGRAM = """
import sys
from t5accel.serve.batch.job import ModelSource, JobSettings
from t5accel.serve.batch.job import run
settings = JobSettings(prefix=sys.argv[4], max_new_tokens=24, shard_rows=10)
run(sys.argv[1], sys.argv[2], ModelSource(sys.argv[3], threads=1), settings)
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.long)])
def test_a_job_killed_at_random_moments_answers_every_row_once(tmp_path: Path, exported_mini: Path, times: int) -> None:
    rows = [{"id": i, "text": text} for i, text in enumerate(TEXTS * (1 + 2 * (times > 3)))]
    rows[3]["text"], rows[17]["text"] = 5, "word " * 600
    path = write_lines(tmp_path / "in.jsonl", rows)
    path.write_text(path.read_text(encoding="utf-8") + "broken\n", encoding="utf-8")

    def start(out: str) -> subprocess.Popen:
        command = [sys.executable, "-c", PROGRAM, path, tmp_path / out, exported_mini, PREFIX]
        return subprocess.Popen(command, env=environment())

    def names() -> set[str]:
        return {name for _, _, held in os.walk(tmp_path / "out") for name in held}

    assert start("expected").wait(timeout=300) == 0
    rng, ended = random.Random(times), 0
    for _ in range(times):
        process, seen, changes = start("out"), names(), rng.randint(1, 4)  # of the folder, before it is killed
        while changes and process.poll() is None:
            time.sleep(0.002)
            if (now := names()) != seen:
                seen, changes = now, changes - 1
        process.kill()
        ended += process.wait(timeout=60) == -signal.SIGKILL
    assert start("out").wait(timeout=300) == 0
    assert ended, "no moment was early enough"
    assert files(tmp_path / "out") == files(tmp_path / "expected")
    found = lines_in(tmp_path / "out")
    assert [row["id"] for row in found] == [row["id"] for row in rows if row["id"] not in (3, 17)]
    assert [reject["row"] for reject in rejects_in(tmp_path / "out")] == [4, 18, len(rows) + 1]
    assert len({row["answer"] for row in found}) > len({row["text"] for row in found}) / 2


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
        peaks.append(int(subprocess.run(command, env=environment(), capture_output=True, check=True, text=True).stdout))
    assert peaks[1] < 1.1 * peaks[0]


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_reports_and_resumes(tmp_path: Path, exported_mini: Path, monkeypatch) -> None:
    monkeypatch.setattr("t5accel.machine.watches_stderr", lambda: True)
    path, out = write_lines(tmp_path / "in.jsonl", [{"source": "I am tired."}, {"source": None}]), tmp_path / "out"
    options = {"--model": exported_mini, "--column": "source", "--prefix": PREFIX, "--output-column": "french"}

    def command(*more: str) -> Any:
        return CliRunner().invoke(app, ["batch", str(path), str(out), *map(str, sum(options.items(), ())), *more])

    result = command()
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{out}: 1 rows answered, 5 tokens; rejected: 1, see {out}/_rejects\n"
    assert "tokens/s" in result.stderr and "2/2" in result.stderr
    assert lines_in(out) == [{"source": "I am tired.", "french": "Je suis fatigué."}]
    again = command()
    assert again.exit_code == 0 and again.stdout == f"{out}: 0 rows answered, 0 tokens, 2 were done before\n"
    for flag, value, sentence in (
        ("--beams", "4", "its beams is 1, here it is 4"),
        ("--shard-rows", "7", "its shard_rows is"),
    ):
        other = command(flag, value)
        assert other.exit_code == 2 and sentence in other.stderr.splitlines()[-1]


@pytest.mark.usefixtures("toy")
def test_a_job_without_answers_fails(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"text": 1}, {"text": None}])
    for earlier in ("", ", 2 were done before"):
        result = CliRunner().invoke(app, ["batch", str(path), str(tmp_path / "out")])
        assert result.exit_code == 2 and f"0 rows answered, 0 tokens{earlier}" in result.stdout
        assert "t5accel: Every row was rejected, 2 of them: see" in result.stderr.splitlines()[-1]
    path.write_bytes(b"")
    assert CliRunner().invoke(app, ["batch", str(path), str(tmp_path / "empty")]).exit_code == 0
