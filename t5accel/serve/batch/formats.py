"""File formats of batch jobs, read in ranges of rows."""

# A range begins at a byte offset (in Parquet at a row), so that any process can read it alone.

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, groupby, islice
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from t5accel.errors import InputError, JobError, MissingPackageError, T5AccelError, first_line, install

MOST_SHOWN = 1000  # characters of a rejected row
MOST_CHARACTERS = 1 << 24  # of a field of CSV, so that an unclosed quote does not fill the memory
BOM = b"\xef\xbb\xbf"
SNIFFED = 1 << 16  # bytes at the beginning of a file that show its encoding


@dataclass(frozen=True)
class RejectedRow:
    """A row or text that cannot be answered, with the reason."""

    reason: str


def text_of(value: Any) -> str | RejectedRow:
    """Return a text for the tokenizer, or the rejection of the value.

    >>> text_of("Hello."), text_of(7), text_of("  ")
    ('Hello.', RejectedRow(reason='not a text but 7'), RejectedRow(reason='an empty text'))
    """
    if not isinstance(value, str):
        return RejectedRow(f"not a text but {value!r:.80}")
    if not value.strip():
        return RejectedRow("an empty text")
    try:
        value.encode()
    except UnicodeEncodeError:
        return RejectedRow("half of a surrogate pair in the text")
    return value


class RowRange:
    """A range of rows of one file, in memory; here one text per line.

    ``column`` is the name of the texts, ``into`` that of the answers, if there will be any. Answers may have several
    lines: they are written in JSON Lines.
    """

    suffix: ClassVar[str] = ".jsonl"  # of output files

    def __init__(self, records: list[bytes], fields: Sequence[str] = ()):
        self.records, self.fields = records, fields

    @classmethod
    def check(cls, path: Path, column: str, into: str | None) -> None:
        """Raise ``InputError`` for an unreadable file or wrong columns."""
        with path.open("rb") as file:
            beginning = file.read(SNIFFED)
        # UTF-16 of a Latin text has a zero in every second byte, which UTF-8 would take for a character.
        if beginning[:2] in (b"\xff\xfe", b"\xfe\xff") or beginning.count(0) > len(beginning) / 8:
            raise InputError(f"{path} must be UTF-8, got what looks like UTF-16 or UTF-32. Convert it.")

    @staticmethod
    def split(file: BinaryIO) -> Iterator[bytes]:
        """Yield the records from the current position."""
        return iter(file)

    @classmethod
    def begin(cls, file: BinaryIO) -> tuple[int, Sequence[str]]:
        """Offset of the first record, and the field names of a header."""
        return (len(BOM) if file.read(len(BOM)) == BOM else 0), ()

    @classmethod
    def ranges(cls, path: Path, most: int) -> Iterator[tuple[int, int]]:
        """Yield offset and size of ranges of at most ``most`` rows."""
        with path.open("rb") as file:
            offset, _ = cls.begin(file)
            file.seek(offset)
            records = cls.split(file)
            while sizes := [*map(len, islice(records, most))]:
                yield offset, len(sizes)
                offset += sum(sizes)

    @classmethod
    def read(cls, path: Path, offset: int, rows: int) -> RowRange:
        with path.open("rb") as file:
            _, fields = cls.begin(file)
            file.seek(offset)
            return cls([*islice(cls.split(file), rows)], fields)

    def __len__(self) -> int:
        return len(self.records)

    def texts(self, column: str, into: str | None) -> list[str | RejectedRow]:
        found: list[str | RejectedRow] = []
        for record in self.records:
            try:
                found.append(self.text(record.decode("utf-8"), column, into))
            except UnicodeDecodeError:
                found.append(RejectedRow("not UTF-8"))
        return found

    def text(self, record: str, column: str, into: str | None) -> str | RejectedRow:
        line = record.rstrip("\r\n")
        # Several texts of a file whose lines end so would be one.
        return RejectedRow("a carriage return within the line") if "\r" in line else text_of(line)

    def table(self, column: str, schema: Any = None) -> Any:
        """The rows as an Arrow table, of ``schema`` if it is given."""
        pyarrow = import_pyarrow()
        if len({*self.fields}) < len(self.fields):
            raise InputError("two columns have one name")
        found = [self.values(record.decode("utf-8"), column) for record in self.records]
        if schema is not None:
            return pyarrow.Table.from_pylist(found, schema=schema)
        names = dict.fromkeys([*self.fields, *(name for row in found for name in row)])
        return pyarrow.table({name: [row.get(name) for row in found] for name in names})

    def values(self, record: str, column: str) -> dict[str, Any]:
        return {column: record.rstrip("\r\n")}

    def shown(self, row: int) -> str:
        """The beginning of a row, for the file of rejects."""
        return self.records[row][: 4 * MOST_SHOWN].decode("utf-8", "replace").rstrip("\r\n")[:MOST_SHOWN]

    def write(self, path: Path, answers: Sequence[str | None], column: str, into: str) -> None:
        with path.open("wb") as file:
            file.write(self.header(into).encode())
            for record, answer in zip(self.records, answers, strict=True):
                if answer is not None:
                    file.write(self.answered(record.decode("utf-8"), answer, column, into).encode())

    def header(self, into: str) -> str:
        return ""

    def answered(self, record: str, answer: str, column: str, into: str) -> str:
        return json.dumps({**self.values(record, column), into: answer}, ensure_ascii=False) + "\n"


class JsonRows(RowRange):
    """One JSON object per line; the answer becomes its last field."""

    def text(self, record: str, column: str, into: str | None) -> str | RejectedRow:
        try:
            row = json.loads(record)
        except json.JSONDecodeError as error:
            return RejectedRow(f"not JSON: {error.msg}, column {error.pos + 1}")
        except (ValueError, RecursionError) as error:  # a number of more digits than Python reads; too deep
            return RejectedRow(f"not JSON that can be read: {error}")
        if not isinstance(row, dict):
            return RejectedRow(f"not an object but {row!r:.80}")
        if column not in row:
            return RejectedRow(f"no field {column!r}")
        return RejectedRow(f"a field {into!r}, where the answer belongs") if into in row else text_of(row[column])

    def values(self, record: str, column: str) -> dict[str, Any]:
        return json.loads(record)

    def answered(self, record: str, answer: str, column: str, into: str) -> str:
        field = f"{json.dumps(into, ensure_ascii=False)}: {json.dumps(answer, ensure_ascii=False)}"
        return f"{record.rstrip().removesuffix('}')}, {field}}}\n"  # there is a field before it, that of the text


class CsvRows(RowRange):
    """CSV with a header (RFC 4180); a quoted field may hold line ends."""

    suffix = ".csv"

    @staticmethod
    def split(file: BinaryIO) -> Iterator[bytes]:
        taken: list[bytes] = []

        def lines() -> Iterator[str]:
            for line in file:
                taken.append(line)
                yield line.decode("latin-1")  # commas, quotes and line ends are the same bytes in UTF-8

        records = _reader(lines())
        while True:
            with suppress(csv.Error):  # the record's rejection says it
                if next(records, None) is None:
                    return
            yield b"".join(taken)
            taken.clear()

    @classmethod
    def begin(cls, file: BinaryIO) -> tuple[int, Sequence[str]]:
        header = next(cls.split(file), b"")
        try:
            return len(header), _fields(header.removeprefix(BOM).decode("utf-8"))
        except (ValueError, csv.Error) as error:
            raise InputError(
                f"{file.name} must be CSV in UTF-8 with a header and lines that end in a line feed, got {_why(error)}."
            ) from error

    @classmethod
    def check(cls, path: Path, column: str, into: str | None) -> None:
        super().check(path, column, into)
        with path.open("rb") as file:
            _check_columns(path, cls.begin(file)[1], column, into)

    def text(self, record: str, column: str, into: str | None) -> str | RejectedRow:
        try:
            values = _fields(record)
        except csv.Error as error:
            lines = record.count("\n")  # an unclosed quote takes those behind it, too
            return RejectedRow(f"not CSV: {_why(error)}" + f", in a record of {lines} lines" * (lines > 1))
        if len(values) != len(self.fields):
            return RejectedRow(f"{len(values)} fields where the header has {len(self.fields)}")
        return text_of(values[self.fields.index(column)])

    def values(self, record: str, column: str) -> dict[str, Any]:
        return dict(zip(self.fields, _fields(record), strict=True))

    def header(self, into: str) -> str:
        return _line([*self.fields, into])

    def answered(self, record: str, answer: str, column: str, into: str) -> str:
        return _line([*_fields(record), answer])


def _reader(lines: Iterable[str]) -> Iterator[list[str]]:
    csv.field_size_limit(max(csv.field_size_limit(), MOST_CHARACTERS))  # a longer field ends its record
    return csv.reader(lines, strict=True)


def _fields(record: str) -> list[str]:
    # A second record behind a lone carriage return raises instead of being dropped.
    return next(_reader([record]), [])


def _line(values: list[str]) -> str:
    line = io.StringIO()
    csv.writer(line).writerow(values)
    return line.getvalue()


def _why(error: Exception) -> str:
    return str(error).partition(" - ")[0]  # behind the dash is advice to programmers


def import_pyarrow() -> Any:
    """The package that Parquet needs."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingPackageError(f"Parquet needs pyarrow: {install('batch')}.") from error
    return pyarrow


class ParquetRows(RowRange):
    """An Arrow table; the output adds a column of strings."""

    suffix = ".parquet"

    def __init__(self, content: Any):
        self.content = content

    @staticmethod
    def open(path: Path) -> Any:
        """The file, of which only the end is read."""
        pyarrow = import_pyarrow()
        try:
            return pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20)  # not whole columns at once
        except pyarrow.ArrowInvalid as error:
            raise InputError(f"{path} cannot be read as Parquet: {error}") from error

    @classmethod
    def check(cls, path: Path, column: str, into: str | None) -> None:
        with cls.open(path) as file:
            _check_columns(path, file.schema_arrow.names, column, into)

    @classmethod
    def ranges(cls, path: Path, most: int) -> Iterator[tuple[int, int]]:
        with cls.open(path) as file:
            rows = file.metadata.num_rows
        yield from ((first, min(most, rows - first)) for first in range(0, rows, most))

    @classmethod
    def read(cls, path: Path, offset: int, rows: int) -> ParquetRows:
        import pyarrow

        with cls.open(path) as file:
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
            ends = [*accumulate(sizes)]
            touched = [group for group, end in enumerate(ends) if end > offset and end - sizes[group] < offset + rows]
            # Within a group rows can only be read from its first one on: decoding them again is cheap beside answers.
            before, pieces = offset - sum(sizes[: touched[0]]) if touched else 0, []
            for batch in file.iter_batches(batch_size=max(rows, 1), row_groups=touched):
                pieces.append(batch.slice(max(before, 0), max(rows + min(before, 0), 0)))
                before -= len(batch)
                if before + rows <= 0:
                    break
            return cls(pyarrow.Table.from_batches(pieces, schema=file.schema_arrow))

    def __len__(self) -> int:
        return len(self.content)

    def texts(self, column: str, into: str | None) -> list[str | RejectedRow]:
        found: list[str | RejectedRow] = []
        for value in self.content.column(column):
            try:
                found.append(text_of(value.as_py()))
            except UnicodeDecodeError:
                found.append(RejectedRow("not UTF-8"))
            except Exception as error:  # Arrow holds what Python cannot: times of far years, zones without a name
                found.append(RejectedRow(f"not a text but {value.type}: {first_line(error)}"))
        return found

    def table(self, column: str, schema: Any = None) -> Any:
        return self.content

    def shown(self, row: int) -> str:
        try:
            return str(self.content.slice(row, 1).to_pylist()[0])[:MOST_SHOWN]
        except Exception:  # as above, in any column
            return ""

    def write(self, path: Path, answers: Sequence[str | None], column: str, into: str) -> None:
        pyarrow = import_pyarrow()
        table = self.content.append_column(into, pyarrow.array(answers, pyarrow.string()))
        pieces, first = [table.slice(0, 0)], 0
        for is_answered, run in groupby(answer is not None for answer in answers):  # not every type has a filter
            count = len([*run])
            pieces += [table.slice(first, count)] * is_answered
            first += count
        pyarrow.parquet.write_table(pyarrow.concat_tables(pieces), path)


def _check_columns(path: Path, columns: Sequence[str], column: str, into: str | None) -> None:
    if columns.count(column) != 1:
        raise InputError(f"{path} must have one column {column!r}, got {', '.join(columns)}. Give --column.")
    if into in columns:
        raise InputError(f"{path} must have no column {into!r}, where the answers go. Give another --output-column.")


KINDS = {".jsonl": JsonRows, ".ndjson": JsonRows, ".csv": CsvRows, ".parquet": ParquetRows, ".txt": RowRange}


def facts_of(path: Path) -> tuple[int, ...]:
    """Size, and times of content and inode, by which a change is noticed."""
    facts = path.stat()
    return facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns  # programs can set back the second alone


def kind_of(path: Path) -> type[RowRange]:
    """The format of a file, by its suffix."""
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        raise InputError(f"{path} must be one of {', '.join(KINDS)}.")
    return kind


def read_range(path: Path, offset: int, rows: int, kept: str = "What is done is kept.") -> RowRange:
    """Read a range; ``JobError``, whose last sentence is ``kept``: the file is gone, damaged or changed."""
    try:
        found = kind_of(path).read(path, offset, rows)
    except T5AccelError:
        raise
    except Exception as error:  # a damaged page of Parquet has errors of many kinds
        why = getattr(error, "strerror", None) or first_line(error)
        raise JobError(f"{path} cannot be read: {why}. {kept}") from error
    if len(found) != rows:
        raise JobError(f"{path} has other rows than when the job began. {kept}")
    return found
