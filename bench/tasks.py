"""The bundled evaluation sets, frozen JSONL files under ``data/eval``."""

from __future__ import annotations

import json
import random
import re
from itertools import count
from typing import TYPE_CHECKING, Any

from bench.results import DATA
from t5accel.checks import as_count
from t5accel.errors import InputError, MissingPackageError, install
from t5accel.metrics import UNANSWERABLE
from t5accel.models.prefixes import CONTEXT, QUESTION, SUMMARIZE, TRANSLATE

if TYPE_CHECKING:
    import datasets

NAMES = ("translation", "summaries", "questions")

LENGTH_BUCKETS = {"3-5": (3, 5), "6-8": (6, 8), "9-14": (9, 14)}  # words of an English source, ends included

_TEXT_FIELDS = {"translation": ("source",), "summaries": ("source",), "questions": ("question", "context")}
_LIST_FIELD = {"translation": "references", "summaries": "references", "questions": "answers"}


def rows(name: str, *, limit: int | None = None) -> list[dict[str, Any]]:
    """The rows of one evaluation set, in the order of its file.

    ``translation`` and ``summaries`` have ``{"id", "source", "references": [...]}``, ``questions`` has ``{"id",
    "question", "context", "answers": [...]}``, where no answers means unanswerable. Texts are bare, without T5's
    prefix (`source_text` adds it).

    Args:
        limit: keep the first ``limit`` rows of each `group`, so that a short look stays as mixed as the whole.
    """
    _check_name(name)
    if limit is not None:
        limit = as_count(limit, "limit", at_least=1)
    path = DATA / "eval" / f"{name}.jsonl"
    if not path.is_file():
        raise InputError(f"the evaluation set {name!r} is not at {path}: reinstall t5accel or use a full checkout")
    result: list[dict[str, Any]] = []
    ids: set[str] = set()
    kept: dict[str | None, int] = {}
    # bytes are split at \n only: str.splitlines would also cut at U+2028 and its like, which JSON allows in a string
    for number, line in enumerate(path.read_bytes().removesuffix(b"\n").split(b"\n"), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:  # bad JSON and bad UTF-8 alike
            raise InputError(f"{path}, line {number}: not a JSON object in UTF-8 ({error})") from error
        problem = _problem(name, row) or ("its id was used before" if row["id"] in ids else None)
        if problem:
            raise InputError(f"{path}, line {number}: {problem}")
        ids.add(row["id"])
        key = group(name, row)
        kept[key] = kept.get(key, 0) + 1
        if limit is None or kept[key] <= limit:
            result.append(row)
    return result


def load(name: str) -> datasets.Dataset:
    """The same rows as a ``datasets.Dataset``, in memory, without a network.

    With a network, a set from the Hugging Face hub takes the place of the bundled one after one ``map``::

        squad = datasets.load_dataset("rajpurkar/squad_v2", split="validation")
        squad = squad.map(lambda row: {"answers": row["answers"]["text"]}, remove_columns=["title", "answers"])
        sources = [source_text("questions", row) for row in squad]

    >>> load("questions").column_names
    ['id', 'question', 'context', 'answers']
    """
    table = rows(name)
    try:
        import datasets
    except ImportError as error:
        raise MissingPackageError(f"datasets is not installed: {install('course')}. rows() does without.") from error
    # features are given, not inferred: a set that begins with unanswerable rows has no type for its answers yet
    fields = {field: datasets.Value("string") for field in ("id", *_TEXT_FIELDS[name])}
    return datasets.Dataset.from_list(
        table, features=datasets.Features(fields | {_LIST_FIELD[name]: datasets.Sequence(datasets.Value("string"))})
    )


def source_text(name: str, row: dict[str, Any]) -> str:
    """What the model reads: the text of a row behind T5's own prefix.

    Raises ``InputError`` for an unknown name, or a row without the text fields of that set.
    """
    _check_name(name)
    texts = [_field(row, field, str) for field in _TEXT_FIELDS[name]]
    if name == "questions":
        return f"{QUESTION}{texts[0]}{CONTEXT}{texts[1]}"
    return (TRANSLATE if name == "translation" else SUMMARIZE) + texts[0]


def sources_of_length(tokenizer: Any, batch: int, source_tokens: int, *, seed: int = 0) -> list[list[int]]:
    """Text of an exact length, to time a trained model on: one that reads noise may say one token again and again.

    Returns ``batch`` rows of ``source_tokens`` ids: the prefix, reports in an order drawn by ``seed``, cut to the
    length, and the end token. Each row begins with another report.
    """
    reports = [row["source"] for row in rows("summaries")]
    random.Random(seed).shuffle(reports)
    prefix, *encoded = tokenizer([SUMMARIZE, *reports])["input_ids"]
    found = []
    for first in range(batch):
        text, end = list(prefix[:-1]), prefix[-1]
        for place in count(first):
            if len(text) >= source_tokens - 1:
                break
            text += encoded[place % len(encoded)][:-1]
        found.append([*text[: source_tokens - 1], end])
    return found


def references(name: str, row: dict[str, Any]) -> list[str]:
    """What the model should write: every accepted text, at least one. Unanswerable questions have `UNANSWERABLE`.

    Raises ``InputError`` for an unknown name, or a row without that set's list of references or answers.
    """
    _check_name(name)
    accepted = list(_field(row, _LIST_FIELD[name], list))
    return accepted or [UNANSWERABLE] if name == "questions" else accepted


def half(row: dict[str, Any]) -> str | None:
    """``"seen"`` or ``"unseen"``: were the row's names and topics part of the bundled model's training? From its id.

    ``None`` for translations, which have no halves.

    Raises ``InputError`` for a row without an id.
    """
    match = re.search(r"-(seen|unseen)-\d+$", _field(row, "id", str))
    return match[1] if match else None


def group(name: str, row: dict[str, Any]) -> str | None:
    """The part of the set that a row is scored with: a key of `LENGTH_BUCKETS` for translations, else its `half`.

    Raises ``InputError`` for an unknown name, or a row without the field this needs.
    """
    _check_name(name)
    if name != "translation":
        return half(row)
    words = len(_field(row, "source", str).split())
    return next((bucket for bucket, (low, high) in LENGTH_BUCKETS.items() if low <= words <= high), None)


def _check_name(name: str) -> None:
    if name not in NAMES:
        raise InputError(f"unknown evaluation set {name!r}: choose one of {', '.join(NAMES)}")


def _field(row: dict[str, Any], field: str, kind: type) -> Any:
    value = row.get(field) if isinstance(row, dict) else None
    if not isinstance(value, kind):
        raise InputError(f"a row needs the field {field!r} as {kind.__name__}, not {value!r}: take rows from rows()")
    return value


def _problem(name: str, row: Any) -> str | None:
    """What is wrong with a row, in words; ``None`` for a good one."""
    texts, listed = ("id", *_TEXT_FIELDS[name]), _LIST_FIELD[name]
    if not isinstance(row, dict) or set(row) != {*texts, listed}:
        return f"expected exactly the fields {', '.join((*texts, listed))}"
    for field in texts:
        if not isinstance(row[field], str) or not row[field].strip():
            return f"{field!r} must be a text that is not empty"
    accepted = row[listed]
    if not isinstance(accepted, list) or not all(isinstance(text, str) and text.strip() for text in accepted):
        return f"{listed!r} must be a list of texts that are not empty"
    if not accepted and name != "questions":
        return f"{listed!r} needs at least one text"
    return None
