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
from t5accel.checks import as_count
from t5accel.encoder import AcceleratedEncoder
from t5accel.errors import InputError, JobError, first_line
from t5accel.graphs.atomic_write import locked, staged_file
from t5accel.serve.batch.formats import RejectedRow, Rows, import_pyarrow, kind_of, read_range
from t5accel.serve.batch.generate import batches, padded, token_ids
from t5accel.tokenization import tokenize

COLUMN = "embedding"  # of Parquet
AT_ONCE = 2000  # rows in memory; texts of similar length among them share a batch
NOTHING = "Nothing was written."

Write = Callable[[Rows, np.ndarray], None]


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
    path, target = Path(given), Path(out)
    as_count(batch_tokens, "batch_tokens", at_least=1)
    encoder.embed([], pooling=pooling)  # raises what it would raise of any text
    if pooling == "none":
        raise InputError("pooling must be mean or first, got 'none', which gives texts matrices of different sizes.")
    if target.suffix not in (".npy", ".parquet") or target.is_dir():
        raise InputError(f"{target} must be a file, .npy or .parquet.")
    if target.resolve() == path.resolve():
        raise InputError(f"{target} must not be the file that is read. Give another one.")
    kind = kind_of(path)
    kind.check(path, column, None)
    facts = _facts(path)
    # All rows are read once before the first is embedded: a job of hours does not fail at its last row.
    ranges, first, schemas = [], 1, []
    for offset, count in [*kind.ranges(path, AT_ONCE)] or [(0, 0)]:
        rows = read_range(path, offset, count, NOTHING)
        _texts(path, rows, column, first)
        if target.suffix == ".parquet":
            schemas.append(_schema(path, rows, column, first))
        ranges.append((offset, count, first))
        first += count
    width, total = encoder.dims.d_model, first - 1
    writer = _parquet(path, schemas, column, width) if schemas else _npy(total, width)
    with locked(target), staged_file(target) as partial:
        with writer(partial) as write, machine.progress_bar(shown=progress, total=total, unit=" rows") as bar:
            for offset, count, first in ranges:
                rows = read_range(path, offset, count, NOTHING)
                texts = [prefix + text for text in _texts(path, rows, column, first)]
                sources = token_ids(
                    texts,
                    lambda texts: tokenize(encoder.tokenizer, texts),
                    most=encoder.max_source_tokens,
                    entries=encoder.source_vocab_size,
                )
                _check(path, sources, first)
                vectors = np.empty((count, width), np.float32)
                for places in batches([*map(len, sources)], batch_tokens):
                    ids, mask = padded([sources[place] for place in places], encoder.pad_token_id)
                    vectors[places] = encoder.embed_ids(ids, mask, pooling, normalize)
                    bar.update(len(places))
                finite = np.isfinite(vectors).all(axis=1)
                _check(path, [one or RejectedRow("an embedding that is not finite") for one in finite.tolist()], first)
                write(rows, vectors)
        if _facts(path) != facts:
            raise JobError(f"{path} was written to while it was read. {NOTHING} Start again.")
    return total


def _facts(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_size, facts.st_mtime_ns


def _texts(path: Path, rows: Rows, column: str, first: int) -> list[str]:
    found = rows.texts(column, None)
    _check(path, found, first)
    return found


def _check(path: Path, found: list[Any], first: int) -> None:
    for place, one in enumerate(found, first):
        if isinstance(one, RejectedRow):
            raise InputError(f"{path}, row {place}: {one.reason}. {NOTHING}")


def _schema(path: Path, rows: Rows, column: str, first: int) -> Any:
    fields = rows.fields if hasattr(rows, "fields") else rows.content.schema.names
    try:
        schema = rows.table(column).schema
    except Exception as error:  # Arrow's of values of several types; it has many kinds
        raise InputError(
            f"{path}, rows {first} to {first + len(rows) - 1}: its fields are no columns of Parquet "
            f"({first_line(error)}). Give .npy."
        ) from error
    if len({*fields}) < len(fields) or COLUMN in schema.names:
        raise InputError(f"{path} must have columns of different names, none of them {COLUMN!r}: rename, or give .npy.")
    return schema


def _npy(total: int, width: int) -> Callable[[Path], Any]:
    @contextmanager
    def writer(path: Path) -> Iterator[Write]:
        with path.open("wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": (total, width)}
            np.lib.format.write_array_header_1_0(file, header)
            yield lambda _, vectors: file.write(vectors.astype("<f4", copy=False).tobytes())

    return writer


def _parquet(path: Path, schemas: list[Any], column: str, width: int) -> Callable[[Path], Any]:
    pyarrow = import_pyarrow()
    try:
        schema = pyarrow.unify_schemas(schemas, promote_options="permissive")
    except pyarrow.ArrowException as error:
        raise InputError(f"{path} has a field of several types ({first_line(error)}). Give .npy.") from error

    @contextmanager
    def writer(target: Path) -> Iterator[Write]:
        whole = schema.append(pyarrow.field(COLUMN, pyarrow.list_(pyarrow.float32(), width)))

        def write(rows: Rows, vectors: np.ndarray) -> None:
            lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors.reshape(-1)), width)
            file.write_table(rows.table(column, schema).append_column(whole.field(COLUMN), lists))

        with pyarrow.parquet.ParquetWriter(target, whole) as file:
            yield write

    return writer
