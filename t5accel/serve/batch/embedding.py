"""A batch job that writes the embeddings of a file's rows as one file."""

# A row without an embedding ends the job: a hole in a matrix would move every row behind it.

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from t5accel import machine
from t5accel.encoder import AcceleratedEncoder
from t5accel.errors import InputError, JobError, first_line
from t5accel.graphs.atomic_write import locked, staged_file
from t5accel.serve.batch.formats import RejectedRow, RowRange, facts_of, import_pyarrow, kind_of, read_range
from t5accel.serve.batch.generate import CHARACTERS, batches
from t5accel.tokenization import tokenize

COLUMN = "embedding"  # of Parquet
AT_ONCE = 2000  # rows in memory; texts of similar length among them share a batch
NOTHING = "Nothing was written."


def check_files(given: str | os.PathLike[str], out: str | os.PathLike[str], column: str) -> tuple[Path, Path]:
    """Both paths; raises what `embed_file` raises of them, before a model is opened."""
    path, target = Path(given), Path(os.path.realpath(out))  # a link keeps leading to the file
    kind = kind_of(path)
    if not path.is_file():  # to open a pipe is to wait for its writer
        raise InputError(f"The input must be a file, got {path}.")
    kind.check(path, column, None)
    if target.suffix not in (".npy", ".parquet") or target.is_dir() or target.resolve() == path.resolve():
        raise InputError(f"{target} must be a file of its own, .npy or .parquet.")
    if target.suffix == ".parquet":
        import_pyarrow()
    return path, target


def embed_file(
    given: str | os.PathLike[str],
    out: str | os.PathLike[str],
    encoder: AcceleratedEncoder,
    *,
    column: str = "text",
    prefix: str = "",
    pooling: str = "mean",
    normalize: bool = False,
    batch_tokens: int = 2048,
    progress: bool = False,
) -> int:
    """Write the embeddings of the N rows of a file, as `AcceleratedEncoder.embed` makes them; returns N.

    ``given`` is .jsonl, .csv, .parquet or .txt, with the texts in ``column``. ``out`` is .npy, (N, d_model) float32, or
    .parquet, the columns of ``given`` and one of fixed-size lists. It is replaced whole, or left as it was.

    ``InputError``: a file or argument is wrong, or a row has no embedding. ``JobError``: the input changed.
    ``ExportError``: the output cannot be written.

    >>> from tempfile import TemporaryDirectory
    >>> encoder = AcceleratedEncoder.from_pretrained("mini", progress=False)
    >>> with TemporaryDirectory() as folder:
    ...     given, out = Path(folder, "in.txt"), Path(folder, "out.npy")
    ...     _ = given.write_text("I am tired.\\nNo\\n")
    ...     embed_file(given, out, encoder), np.load(out).shape
    (2, (2, 256))
    """
    path, target = check_files(given, out, column)
    if pooling not in ("mean", "first"):
        raise InputError(f"pooling must be mean or first, got {pooling!r:.80}: a row has one embedding.")
    encoder.embed([], pooling=pooling, batch_tokens=batch_tokens)  # raises what it would raise of any text
    in_parquet, facts, first, ranges = target.suffix == ".parquet", facts_of(path), 1, []
    schema = import_pyarrow().schema([]) if in_parquet else None
    # All rows are read and tokenised before the first is embedded: a job of hours does not fail at its last row.
    for offset, count in [*kind_of(path).ranges(path, AT_ONCE)] or [(0, 0)]:
        rows = read_range(path, offset, count, NOTHING)
        _check(path, first, encoder, [prefix + text for text in _texts(path, rows, column, first)])
        schema = _with_columns(path, schema, rows, column) if in_parquet else None
        ranges.append((offset, count, first))
        first += count
    for offset, count, _ in ranges if in_parquet else ():  # a type that later rows changed may not hold them
        _with_columns(path, schema, read_range(path, offset, count, NOTHING), column, schema)
    total, width = first - 1, encoder.dims.d_model
    with locked(target), staged_file(target) as partial:
        with (
            _writer(partial, total, width, schema) as write,
            machine.progress_bar(shown=progress, total=total, unit=" rows") as bar,
        ):
            for offset, count, first in ranges:
                rows = read_range(path, offset, count, NOTHING)
                texts = [prefix + text for text in _texts(path, rows, column, first)]
                vectors = encoder.embed(texts, pooling=pooling, normalize=normalize, batch_tokens=batch_tokens)
                for place in np.flatnonzero(~np.isfinite(vectors).all(axis=1)):
                    raise InputError(f"{path}, row {first + place}: its embedding is not finite. {NOTHING}")
                write(rows.table(column, schema) if in_parquet else None, vectors)
                bar.update(count)
        if facts_of(path) != facts:
            raise JobError(f"{path} was written to while it was read. {NOTHING} Start again.")
    return total


def _texts(path: Path, rows: RowRange, column: str, first: int) -> list[str]:
    found = rows.texts(column, None)
    for place, one in enumerate(found, first):
        if isinstance(one, RejectedRow):
            raise InputError(f"{path}, row {place}: {one.reason}. {NOTHING}")
    return found


def _check(path: Path, first: int, encoder: AcceleratedEncoder, texts: list[str]) -> None:
    for places in batches([*map(len, texts)], CHARACTERS):
        try:
            encoder.checked(*tokenize(encoder.tokenizer, [texts[place] for place in places]))
        except InputError as error:
            for place in sorted(places) if len(places) > 1 else ():
                _check(path, first + place, encoder, [texts[place]])
            raise InputError(f"{path}, row {first + places[0]}: {error} {NOTHING}") from error


def _with_columns(path: Path, schema: Any, rows: RowRange, column: str, given: Any = None) -> Any:
    try:
        made = rows.table(column, given).schema
        pyarrow = import_pyarrow()
        found = pyarrow.unify_schemas([schema, made], promote_options="permissive")
        found = found.with_metadata(schema.metadata or made.metadata)  # such as pandas' index
        pyarrow.parquet.ParquetWriter(pyarrow.BufferOutputStream(), found).close()  # raises of what it cannot hold
    except Exception as error:  # of fields of several types; Arrow's are of many kinds
        raise InputError(f"{path} makes no Parquet ({first_line(error)}). Give .npy.") from error
    if COLUMN in found.names:
        raise InputError(f"{path} must have no column {COLUMN!r}, where the embeddings belong. Rename it.")
    return found


@contextmanager
def _writer(path: Path, total: int, width: int, schema: Any) -> Iterator[Callable[[Any, np.ndarray], Any]]:
    if schema is None:
        with path.open("wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": (total, width)}
            np.lib.format.write_array_header_1_0(file, header)
            yield lambda _, vectors: file.write(vectors.astype("<f4").tobytes())
        return
    pyarrow = import_pyarrow()
    field = pyarrow.field(COLUMN, pyarrow.list_(pyarrow.float32(), width))

    def write(table: Any, vectors: np.ndarray) -> None:
        lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors.reshape(-1)), width)
        file.write_table(table.append_column(field, lists))

    with pyarrow.parquet.ParquetWriter(path, schema.append(field)) as file:
        yield write
