"""The frozen evaluation sets: what is in them, how they are read, and what happens when a file is broken."""

from __future__ import annotations

import doctest
import json
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from refused import refused

from bench import tasks
from t5accel.errors import InputError, MissingPackageError
from t5accel.metrics import UNANSWERABLE

GOOD = {
    "translation": {"id": "translation-001", "source": "It rains.", "references": ["Il pleut."]},
    "summaries": {"id": "summaries-seen-001", "source": "It rains.", "references": ["Rain."]},
    "questions": {"id": "questions-seen-001", "question": "Who?", "context": "Ann came.", "answers": ["Ann"]},
}


def texts_of(row: dict) -> list[str]:
    return [text for value in row.values() for text in (value if isinstance(value, list) else [value])]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts lines (bytes, or values to dump as JSON) in place of a bundled set."""
    (tmp_path / "eval").mkdir()
    monkeypatch.setattr(tasks, "DATA", tmp_path)

    def put(name: str, *lines: object) -> None:
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        (tmp_path / "eval" / f"{name}.jsonl").write_bytes(b"\n".join(raw) + b"\n")

    return put


def test_doctests() -> None:
    pytest.importorskip("datasets")
    assert doctest.testmod(tasks).failed == 0


@pytest.mark.parametrize(("name", "count"), [("translation", 300), ("summaries", 200), ("questions", 200)])
def test_counts_ids_and_texts(name: str, count: int) -> None:
    rows = tasks.rows(name)
    assert len(rows) == count == len({row["id"] for row in rows})
    assert all(text == text.strip() != "" for row in rows for text in texts_of(row))
    assert len({tasks.source_text(name, row) for row in rows}) == count
    parts = [""] if name == "translation" else ["seen-", "unseen-"]
    each = count // len(parts)
    assert [row["id"] for row in rows] == [f"{name}-{part}{n:03d}" for part in parts for n in range(1, each + 1)]


def test_a_hundred_translations_of_each_length() -> None:
    rows = tasks.rows("translation")
    assert Counter(tasks.group("translation", row) for row in rows) == {"3-5": 100, "6-8": 100, "9-14": 100}
    for row in rows:
        low, high = tasks.LENGTH_BUCKETS[tasks.group("translation", row)]
        assert low <= len(row["source"].split()) <= high


def test_translations_accept_one_to_three_texts() -> None:
    counts = Counter(len(row["references"]) for row in tasks.rows("translation"))
    assert set(counts) == {1, 2, 3} and counts[1] < 100 <= counts[2] <= counts[3]
    assert all(len(set(row["references"])) == len(row["references"]) for row in tasks.rows("translation"))


@pytest.mark.parametrize("name", ["summaries", "questions"])
def test_two_halves_of_a_hundred(name: str) -> None:
    assert Counter(tasks.half(row) for row in tasks.rows(name)) == {"seen": 100, "unseen": 100}


def test_about_a_quarter_of_the_questions_is_unanswerable() -> None:
    rows = tasks.rows("questions")
    for half in ("seen", "unseen"):
        assert 15 <= sum(tasks.half(row) == half and not row["answers"] for row in rows) <= 35
    # a first answer that the context does not hold could not be learned from it
    assert all(row["answers"][0] in row["context"] for row in rows if row["answers"])


@pytest.mark.parametrize("name", tasks.NAMES)
def test_rows_are_fresh_each_time(name: str) -> None:
    tasks.rows(name)[0]["id"] = "spoilt"
    assert tasks.rows(name)[0]["id"] != "spoilt"


def test_limit_takes_the_first_of_each_group() -> None:
    for name, groups in (("translation", 3), ("summaries", 2), ("questions", 2)):
        some, every = tasks.rows(name, limit=4), tasks.rows(name)
        assert Counter(tasks.group(name, row) for row in some) == dict.fromkeys(
            (tasks.group(name, row) for row in every), 4
        )
        assert len(some) == 4 * groups and some == [row for row in every if row in some]
        assert some[:4] == every[:4]
        assert tasks.rows(name, limit=1000) == every


@pytest.mark.parametrize("name", tasks.NAMES)
def test_load_holds_the_same_rows(name: str) -> None:
    datasets = pytest.importorskip("datasets")
    table = tasks.load(name)
    assert isinstance(table, datasets.Dataset) and table.to_list() == tasks.rows(name)


def test_load_types_a_set_without_any_answer(write) -> None:
    datasets = pytest.importorskip("datasets")
    write("questions", GOOD["questions"] | {"answers": []})
    assert tasks.load("questions").features["answers"] == datasets.Sequence(datasets.Value("string"))


def test_load_without_datasets_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPackageError, match=r"\[course\]"):
        tasks.load("translation")
    assert len(tasks.rows("translation")) == 300


def test_source_text_uses_the_prefixes_t5_learned() -> None:
    assert tasks.source_text("translation", GOOD["translation"]) == "translate English to French: It rains."
    assert tasks.source_text("summaries", GOOD["summaries"]) == "summarize: It rains."
    assert tasks.source_text("questions", GOOD["questions"]) == "question: Who? context: Ann came."


def test_references_are_copies_and_never_empty() -> None:
    row = GOOD["summaries"] | {"references": ["Rain."]}
    tasks.references("summaries", row).append("spoilt")
    assert row["references"] == ["Rain."]
    assert all(tasks.references(name, row) for name in tasks.NAMES for row in tasks.rows(name))
    assert tasks.references("questions", {"answers": []}) == [UNANSWERABLE]


def test_what_is_refused() -> None:
    for call in (tasks.rows, tasks.load, partial(tasks.source_text, row={}), partial(tasks.references, row={}),
                 partial(tasks.group, row={"id": "x"})):  # fmt: skip
        refused(call, "name", "squad", "", "../eval/translation", None, match="translation, summaries, questions")
    refused(partial(tasks.rows, "translation"), "limit", 0, -1, 2.0, "3", True)
    for call, row, field in (
        (partial(tasks.source_text, "translation"), {"id": "x"}, "source"),
        (partial(tasks.source_text, "questions"), {"question": "Who?"}, "context"),
        (partial(tasks.source_text, "summaries"), "It rains.", "source"),
        (partial(tasks.references, "summaries"), {"references": "Rain."}, "references"),
        (partial(tasks.references, "questions"), {}, "answers"),
        (tasks.half, {"source": "x"}, "id"),
        (tasks.half, {"id": 3}, "id"),
        (partial(tasks.group, "translation"), {}, "source"),
    ):
        refused(call, "row", row, match=f"'{field}'")


def test_half_and_group_of_foreign_rows() -> None:
    assert tasks.half({"id": "squad-56be"}) is None
    assert tasks.group("translation", {"source": "Wait!"}) is None
    assert tasks.group("questions", {"id": "questions-unseen-009"}) == "unseen"


@pytest.mark.parametrize("line", [
    b"{", b"", b"[]", b"3", b'"id"', b'{"id": "\xff"}',
    {"id": "translation-002", "source": "It rains."},
    GOOD["translation"] | {"id": "translation-002", "extra": 1},
    GOOD["translation"] | {"id": ""},
    GOOD["translation"] | {"id": "translation-002", "source": "  "},
    GOOD["translation"] | {"id": "translation-002", "source": 3},
    GOOD["translation"] | {"id": "translation-002", "references": []},
    GOOD["translation"] | {"id": "translation-002", "references": [""]},
    GOOD["translation"] | {"id": "translation-002", "references": "Il pleut."},
    GOOD["translation"],
])  # fmt: skip
def test_a_broken_line_is_named_with_its_file(write, line) -> None:
    write("translation", GOOD["translation"], line)
    with pytest.raises(InputError, match=r"translation\.jsonl, line 2: "):
        tasks.rows("translation")


@pytest.mark.parametrize("name", tasks.NAMES)
def test_good_lines_pass_and_keep_rare_separators(write, name: str) -> None:
    row = GOOD[name] | {"id": f"{name}-seen-002"}
    field = "context" if name == "questions" else "source"
    raw = json.dumps(row | {field: "one\u2028two\u0085"}, ensure_ascii=False).encode()
    write(name, GOOD[name], raw)
    assert [tasks.rows(name)[0], tasks.rows(name)[1][field]] == [GOOD[name], "one\u2028two\u0085"]


def test_a_missing_file_is_named(write) -> None:
    with pytest.raises(InputError, match=r"summaries\.jsonl"):
        tasks.rows("summaries")
