"""The frozen evaluation sets: what is in them, how they are read, and what happens when a file is broken."""

import json
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from refused import refused

from bench import evaluation
from t5accel.errors import InputError, MissingPackageError
from t5accel.metrics import UNANSWERABLE

GOOD = {
    "translation": {"id": "translation-001", "source": "It rains.", "references": ["Il pleut."]},
    "summaries": {"id": "summaries-seen-001", "source": "It rains.", "references": ["Rain."]},
    "questions": {"id": "questions-seen-001", "question": "Who?", "context": "Ann came.", "answers": ["Ann"]},
}


def texts_of(row: dict) -> list[str]:
    return [text for value in row.values() for text in (value if isinstance(value, list) else [value])]


@pytest.mark.parametrize(("name", "count"), [("translation", 300), ("summaries", 200), ("questions", 200)])
def test_counts_ids_and_texts(name: str, count: int) -> None:
    rows = evaluation.rows(name)
    assert len(rows) == count == len({row["id"] for row in rows})
    assert all(text == text.strip() != "" for row in rows for text in texts_of(row))
    fields = {"questions": {"question", "context", "answers"}}.get(name, {"source", "references"})
    assert all(row.keys() == {"id", *fields} for row in rows)
    assert all(row["references"] for row in rows if "references" in row)
    assert len({evaluation.source_text(name, row) for row in rows}) == count
    parts = [""] if name == "translation" else ["seen-", "unseen-"]
    each = count // len(parts)
    assert [row["id"] for row in rows] == [f"{name}-{part}{n:03d}" for part in parts for n in range(1, each + 1)]


def test_a_hundred_translations_of_each_length_have_one_to_three_references() -> None:
    rows = evaluation.rows("translation")
    assert Counter(evaluation.group("translation", row) for row in rows) == {"3-5": 100, "6-8": 100, "9-14": 100}
    for row in rows:
        low, high = evaluation.LENGTH_BUCKETS[evaluation.group("translation", row)]
        assert low <= len(row["source"].split()) <= high
        assert len(set(row["references"])) == len(row["references"])
    counts = Counter(len(row["references"]) for row in rows)
    assert set(counts) == {1, 2, 3} and counts[1] < 100 <= counts[2] <= counts[3]


def test_about_a_quarter_of_the_questions_is_unanswerable() -> None:
    rows = evaluation.rows("questions")
    for half in ("seen", "unseen"):
        assert 15 <= sum(evaluation.half(row) == half and not row["answers"] for row in rows) <= 35
    # a first answer that the context does not hold could not be learned from it
    assert all(row["answers"][0] in row["context"] for row in rows if row["answers"])


def test_limit_takes_the_first_of_each_group() -> None:
    for name, groups in (("translation", 3), ("summaries", 2), ("questions", 2)):
        some, every = evaluation.rows(name, limit=4), evaluation.rows(name)
        counts = Counter(evaluation.group(name, row) for row in some)
        assert counts.keys() == {evaluation.group(name, row) for row in every} and {*counts.values()} == {4}
        assert len(some) == 4 * groups and some == [row for row in every if row in some]
        assert some[:4] == every[:4]
        assert evaluation.rows(name, limit=1000) == every


@pytest.mark.parametrize("name", evaluation.NAMES)
def test_load_holds_the_same_rows_and_each_time_they_are_fresh(name: str) -> None:
    datasets = pytest.importorskip("datasets")
    table = evaluation.dataset(name)
    assert isinstance(table, datasets.Dataset) and table.to_list() == evaluation.rows(name)
    evaluation.rows(name)[0]["id"] = "spoilt"
    assert evaluation.rows(name) == table.to_list()


def test_load_without_datasets_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPackageError, match=r"\[course\]"):
        evaluation.dataset("translation")
    assert len(evaluation.rows("translation")) == 300


def test_source_text_uses_the_prefixes_t5_learned_and_references_are_copies() -> None:
    assert evaluation.source_text("translation", GOOD["translation"]) == "translate English to French: It rains."
    assert evaluation.source_text("summaries", GOOD["summaries"]) == "summarize: It rains."
    assert evaluation.source_text("questions", GOOD["questions"]) == "question: Who? context: Ann came."
    evaluation.references("summaries", GOOD["summaries"]).append("spoilt")
    assert GOOD["summaries"]["references"] == ["Rain."]
    assert evaluation.references("questions", {"answers": []}) == [UNANSWERABLE]


def test_unknown_sets_and_limits_are_refused() -> None:
    calls = [evaluation.rows, evaluation.dataset]
    calls += [partial(call, row={}) for call in (evaluation.source_text, evaluation.references, evaluation.group)]
    for call in calls:
        refused(call, "name", "squad", "", "../eval/translation", None, match="translation, summaries, questions")
    refused(partial(evaluation.rows, "translation"), "limit", 0, -1, 2.0, "3", True)


def test_rare_separators_stay_inside_a_text_and_a_missing_file_is_named(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "eval").mkdir()
    monkeypatch.setattr(evaluation, "DATA", tmp_path)
    row = GOOD["translation"] | {"source": "one\u2028two\u0085"}
    lines = [json.dumps(one, ensure_ascii=False) + "\n" for one in (GOOD["translation"], row)]
    (tmp_path / "eval" / "translation.jsonl").write_text("".join(lines), encoding="utf-8", newline="")
    assert evaluation.rows("translation") == [GOOD["translation"], row]
    with pytest.raises(InputError, match=r"summaries\.jsonl"):
        evaluation.rows("summaries")
