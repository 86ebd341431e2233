"""Embeddings of files: row for row those of the encoder, a whole file or none, and bad rows by name."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from t5accel.cli import app
from t5accel.encoder import AcceleratedEncoder
from t5accel.errors import ExportError, InputError, JobError, MissingPackageError
from t5accel.graphs import atomic_write
from t5accel.serve.batch import embedding
from t5accel.serve.batch.embedding import embed_file

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["I am tired.", "The house is small and old.", "No", "Où est « mon » sac ?", "one, two\tthree"]
TEXTS = [f"{word} {number}" for number in range(3) for word in WORDS]


@pytest.fixture(scope="module")
def encoder() -> AcceleratedEncoder:
    return AcceleratedEncoder.from_pretrained("mini", threads=1, progress=False, max_source_tokens=40)


@pytest.fixture(autouse=True)
def few_rows_at_once(monkeypatch) -> None:
    monkeypatch.setattr(embedding, "AT_ONCE", 4)


def written(path: Path, texts: list[Any] | None = None) -> Path:
    """A file of texts, with other columns where its format has any."""
    texts = TEXTS if texts is None else texts
    if path.suffix == ".parquet":
        table = pyarrow.table({"n": [*range(len(texts))], "text": texts})
        parquet.write_table(table.replace_schema_metadata({"pandas": "an index"}), path)
        return path
    lines = {
        ".txt": lambda n, text: text,
        ".jsonl": lambda n, text: json.dumps({"text": text, "n": n, **({"late": [n / 2]} if n > 6 else {})}),
        ".csv": lambda n, text: f'{n},"{text}"',
    }[path.suffix]
    content = ["n,text"] * (path.suffix == ".csv") + [lines(n, text) for n, text in enumerate(texts)]
    path.write_text("".join(f"{line}\n" for line in content), encoding="utf-8")
    return path


def not_reached(self: Any, texts: list[str], **_: Any) -> None:
    assert not texts, "embedded"


def left(folder: Path) -> list[str]:
    """The files of a folder but the locks."""
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize("options", [{}, dict(pooling="first", normalize=True, prefix="query: ", batch_tokens=30)])
def test_rows_are_those_of_the_encoder(tmp_path, encoder, kind, options) -> None:
    path = written(tmp_path / f"in{kind}")
    given = {name: value for name, value in options.items() if name != "prefix"}
    expected = encoder.embed([options.get("prefix", "") + text for text in TEXTS], **given)
    assert embed_file(path, tmp_path / "out.npy", encoder, **options) == len(TEXTS)
    found = np.load(tmp_path / "out.npy")
    assert found.dtype == np.float32 and found.flags.c_contiguous
    np.testing.assert_allclose(found, expected, atol=1e-5)
    embed_file(path, tmp_path / "out.parquet", encoder, **options)
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.schema.field("embedding").type == pyarrow.list_(pyarrow.float32(), 256)
    np.testing.assert_array_equal(np.stack(table["embedding"].to_pylist()).astype(np.float32), found)
    assert table["text"].to_pylist() == TEXTS
    if kind != ".txt":
        assert [int(number) for number in table["n"].to_pylist()] == [*range(len(TEXTS))]
    if kind == ".parquet":
        assert table.schema.metadata[b"pandas"] == b"an index"
    if kind == ".jsonl":  # a field that the first rows lack
        assert table["late"].to_pylist() == [None] * 7 + [[number / 2] for number in range(7, len(TEXTS))]
    assert left(tmp_path) == sorted([path.name, "out.npy", "out.parquet"])
    (tmp_path / "link.npy").symlink_to(tmp_path / "aim.npy")
    embed_file(path, tmp_path / "link.npy", encoder, **options)
    assert (tmp_path / "link.npy").is_symlink() and np.array_equal(np.load(tmp_path / "aim.npy"), found)


@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".csv", ".parquet"])
def test_a_file_without_rows_makes_a_matrix_without_rows(tmp_path, encoder, kind) -> None:
    path = written(tmp_path / f"in{kind}", [])
    for out in ("out.npy", "out.parquet"):
        assert embed_file(path, tmp_path / out, encoder) == 0
    assert np.load(tmp_path / "out.npy").shape == (0, 256)
    assert parquet.read_table(tmp_path / "out.parquet").num_rows == 0


@pytest.mark.parametrize(("texts", "match"), [
    ([*TEXTS[:9], " "], "in.jsonl, row 10: an empty text. Nothing was written."),
    ([*TEXTS[:5], 7], "in.jsonl, row 6: not a text but 7. Nothing"),
    ([*TEXTS[:6], "word " * 60, "a"], "in.jsonl, row 7: .*at most max_source_tokens, 40, got 61.* Nothing was"),
])  # fmt: skip
def test_a_row_without_an_embedding_ends_the_job_before_the_first_by_name(
    tmp_path, encoder, texts, match, monkeypatch
) -> None:
    monkeypatch.setattr(AcceleratedEncoder, "embed", not_reached)
    path, out = written(tmp_path / "in.jsonl", texts), tmp_path / "out.npy"
    out.write_bytes(b"of before")
    with pytest.raises(InputError, match=match):
        embed_file(path, out, encoder)
    assert out.read_bytes() == b"of before" and left(tmp_path) == ["in.jsonl", "out.npy"]


def test_a_huge_row_is_tokenised_alone(tmp_path, encoder, monkeypatch) -> None:
    """Among others it would be padding for each of them."""
    sizes, usual = [], embedding.tokenize
    monkeypatch.setattr(embedding, "tokenize", lambda by, texts: sizes.append(len(texts)) or usual(by, texts))
    with pytest.raises(InputError, match="row 2: .* at most max_source_tokens, 40, got 30001"):
        embed_file(written(tmp_path / "in.jsonl", ["a", "word " * 30_000, "b"]), tmp_path / "out.npy", encoder)
    assert sizes == [1]


def test_numbers_that_are_not_finite_and_a_changed_input_end_the_job(tmp_path, encoder, monkeypatch) -> None:
    path = written(tmp_path / "in.txt")
    usual = AcceleratedEncoder.embed

    def endless(self: Any, texts: list[str], **options: Any) -> np.ndarray:
        vectors = usual(self, texts, **options)
        vectors[[text == TEXTS[5] for text in texts], 3] = np.inf
        return vectors

    def writes(self: Any, texts: list[str], **options: Any) -> np.ndarray:
        if texts and texts[0] == TEXTS[8]:
            times = path.stat()
            path.write_text(path.read_text().replace("tired", "TIRED"))
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        return usual(self, texts, **options)

    for replaced, error, match in ((endless, InputError, "row 6: .*not finite"), (writes, JobError, "was written to")):
        monkeypatch.setattr(AcceleratedEncoder, "embed", replaced)
        with pytest.raises(error, match=match):
            embed_file(path, tmp_path / "out.npy", encoder)
    assert left(tmp_path) == ["in.txt"]


def test_what_cannot_be_read_or_written_is_refused_before_anything_is_embedded(tmp_path, encoder, monkeypatch) -> None:
    monkeypatch.setattr(AcceleratedEncoder, "embed", not_reached)
    path, mixed, twice = written(tmp_path / "in.csv"), tmp_path / "mixed.jsonl", tmp_path / "twice.csv"
    large, pipe, hollow = tmp_path / "large.jsonl", tmp_path / "pipe.txt", tmp_path / "hollow.jsonl"
    hollow.write_text('{"text": "a", "meta": {}}\n')
    large.write_text('{"text": "a", "n": 1152921504606846977}\n' * 4 + '{"text": "b", "n": 0.5}\n')
    os.mkfifo(pipe)
    mixed.write_text('{"text": "a", "n": 1}\n{"text": "b", "n": "x"}\n')
    twice.write_text("text,n,n\na,1,2\n")
    taken = written(tmp_path / "taken.parquet")
    parquet.write_table(parquet.read_table(taken).append_column("embedding", [[1] * len(TEXTS)]), taken)
    for given, out, options, match in (
        (path, "out.txt", {}, "out.txt must be a file of its own, .npy or .parquet"),
        (taken, "taken.parquet", {}, "taken.parquet must be a file of its own"),
        (path, "out.npy", dict(column="source"), "must have one column 'source', got n, text"),
        (path, "out.npy", dict(pooling="none"), "pooling must be mean or first"),
        (mixed, "out.parquet", {}, "mixed.jsonl makes no Parquet .* Give .npy"),
        (large, "out.parquet", {}, "large.jsonl makes no Parquet .* Give .npy"),
        (hollow, "out.parquet", {}, "hollow.jsonl makes no Parquet .*no child field.*Give .npy"),
        (pipe, "out.npy", {}, "must be a file, got .*pipe.txt"),
        (twice, "out.parquet", {}, "two columns have one name"),
        (taken, "out.parquet", {}, "must have no column 'embedding'"),
        (tmp_path / "in.xml", "out.npy", {}, "must be one of .jsonl"),
    ):
        with pytest.raises(InputError, match=match):
            embed_file(given, tmp_path / out, encoder, **options)
    with pytest.raises(ExportError, match="cannot be written to"):
        embed_file(path, path / "out.npy", encoder)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackageError, match="Parquet needs pyarrow"):
        embedding.check_files(path, tmp_path / "out.parquet", "text")


KILLED = """
import os, signal, sys
from t5accel.encoder import AcceleratedEncoder
from t5accel.serve.batch import embedding
embedding.AT_ONCE = 4
usual = AcceleratedEncoder.embed
def embed(self, texts, **options):
    if texts and texts[0].endswith(" 1"):
        os.kill(os.getpid(), signal.SIGKILL)
    return usual(self, texts, **options)
AcceleratedEncoder.embed = embed
embedding.embed_file(*sys.argv[1:], AcceleratedEncoder.from_pretrained("mini", threads=1, progress=False))
"""


@pytest.mark.parametrize("out", ["out.npy", "out.parquet"])
def test_a_killed_job_leaves_no_output_and_the_next_one_clears_its_remnant(tmp_path, encoder, out) -> None:
    path = written(tmp_path / "in.txt")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", KILLED, path, tmp_path / out]
    assert subprocess.run(command, env=environment).returncode == -signal.SIGKILL
    (remnant, rest) = left(tmp_path)
    assert remnant.startswith(f".{out}.") and rest == "in.txt"
    embed_file(path, tmp_path / out, encoder)
    assert left(tmp_path) == ["in.txt", out]


@pytest.mark.parametrize("operation", ["flush", "os.replace"])
def test_a_full_disk_leaves_what_was_there(tmp_path, encoder, operation, monkeypatch) -> None:
    path, out = written(tmp_path / "in.txt"), tmp_path / "out.npy"
    out.write_bytes(b"of before")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    owner = atomic_write.os if "os." in operation else atomic_write
    monkeypatch.setattr(owner, operation.removeprefix("os."), full)
    with pytest.raises(ExportError, match="out.npy could not be written: No space left on device. Nothing"):
        embed_file(path, out, encoder)
    assert out.read_bytes() == b"of before" and left(tmp_path) == ["in.txt", "out.npy"]


def test_the_commands(tmp_path, monkeypatch) -> None:
    """An encoder is exported, and embeds a file; what does not apply is refused by name."""
    monkeypatch.setenv("T5ACCEL_CACHE", str(tmp_path / "cache"))

    def call(*arguments: Any) -> Any:
        return CliRunner().invoke(app, [*map(str, arguments)])

    export = ("export", "--model", "mini", "--encoder", "--out", tmp_path / "encoder")
    for more, match in (
        (["--no-step"], "--step is for whole models"),
        (["--precision", "fp16"], "precision must be .* fp32, int8, int4, got 'fp16'"),
    ):
        result = call(*export, *more)
        assert result.exit_code == 2 and not (tmp_path / "encoder").exists()
        assert re.search(match, result.stderr), result.stderr
    result = call(*export, "--precision", "int8")
    assert result.exit_code == 0 and result.stdout.endswith(", int8\n"), result.output
    path = written(tmp_path / "in.csv")
    result = call("embed", path, tmp_path / "out.npy", "--model", tmp_path / "encoder", "--normalize", "--threads", 1)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{tmp_path / 'out.npy'}: {len(TEXTS)} rows of 256 numbers, int8\n"
    np.testing.assert_allclose(np.linalg.norm(np.load(tmp_path / "out.npy"), axis=1), 1, atol=1e-5)
    result = call("embed", path, tmp_path / "out.npy", "--pooling", "last")
    assert result.exit_code == 2 and "--pooling must be mean or first" in result.stderr
    monkeypatch.setattr(AcceleratedEncoder, "from_pretrained", lambda *_, **__: pytest.fail("opened"))
    result = call("embed", tmp_path / "missing.txt", tmp_path / "out.npy")
    assert result.exit_code == 2 and "missing.txt" in result.stderr and result.stderr.count("\n") == 1
