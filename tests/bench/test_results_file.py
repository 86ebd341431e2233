"""Files of results: nothing that was measured is lost, and where it is from can be read."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import results as rows
from bench.results import checked, load_results, provenance, record_parser, rows_so_far, write_json, write_rows
from t5accel import machine
from t5accel.errors import InputError

RECORDED = sorted((Path(__file__).resolve().parents[2] / "data/results").glob("*.json"))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_gpu", lambda: None)  # looking for one imports torch


def test_a_file_says_where_it_is_from_and_names_a_gpu_in_place_of_the_processor(no_gpu: None, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    write_rows(path, [{"system": "a"}], command=f"a command --json {path}", more=2)
    found = json.loads(path.read_text(encoding="utf-8"))
    assert {name: found[name] for name in ("command", "more", "rows")} == {
        "command": "a command --json rows.json", "more": 2, "rows": [{"system": "a"}],
    }  # fmt: skip
    assert {name: found[name] for name in rows.environment()} == rows.environment() and found["date"] == rows.today()
    assert found["machine"]["cpu"] in provenance(found) and provenance(found).endswith("--json rows.json")
    machine_facts = {"cpu": "a CPU", "usable_threads": 2, "gpu": {"name": "NVIDIA H200", "memory_bytes": 1}}
    record = {"machine": machine_facts, "versions": {"torch": "1"}, "date": "today", "commit": None, "command": "c"}
    said = provenance({**record, "rows": [{}]})
    assert said.startswith("NVIDIA H200; torch 1;") and "a CPU" not in said
    for whole, short in ((40 * "b", 7 * "b"), (40 * "b" + "-dirty", "bbbbbbb-dirty"), ("bbbbbbb", 7 * "b")):
        assert provenance({**record, "rows": [{}], "commit": whole}).endswith(f"commit {short}\nc")


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "rows.json", {"rows": [1]})

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rows.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_json(tmp_path / "rows.json", {"rows": [2]})
    assert json.loads((tmp_path / "rows.json").read_text(encoding="utf-8")) == {"rows": [1]}
    assert [*tmp_path.iterdir()] == [tmp_path / "rows.json"]


def test_a_folder_is_no_file_for_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert record_parser("").parse_args(["--json", "new/x.json"]).json == Path("new/x.json")
    with pytest.raises(SystemExit):
        record_parser("").parse_args(["--json", str(tmp_path)])
    assert f"must be a file, got the folder {tmp_path}." in capsys.readouterr().err


def test_rows_of_other_conditions_are_put_aside_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, conditions = tmp_path / "rows.json", {"commit": "abc", "rounds": 3}
    assert rows_so_far(path, conditions) == []
    write_json(path, {**conditions, "rows": [{"a": 1}]})
    assert rows_so_far(path, conditions) == [{"a": 1}]
    before = path.read_text(encoding="utf-8")
    assert rows_so_far(path, {"machine.gpu.name": None, **conditions}) == [{"a": 1}]
    assert rows_so_far(path, {**conditions, "commit": "def"}) == []
    (aside,) = tmp_path.iterdir()
    assert aside.read_text(encoding="utf-8") == before and not path.exists()
    assert "another commit" in (said := capsys.readouterr().out) and str(aside) in said


@pytest.mark.parametrize("text", ["{", '{"rounds": 3}'])
def test_what_is_no_file_of_results_is_left_where_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"mine\.json is no file of results"):
        rows_so_far(path, {"rounds": 3})
    assert path.read_text(encoding="utf-8") == text


def test_what_is_not_recorded_has_no_rows() -> None:
    assert provenance(load_results("nothing.json")) == "Nothing is recorded yet."


def test_the_commit_of_a_copy_is_what_it_was_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    monkeypatch.delenv("T5ACCEL_COMMIT", raising=False)
    assert rows.commit() is None
    monkeypatch.setenv("T5ACCEL_COMMIT", "d8e56ae")
    assert rows.commit() == rows.environment()["commit"] == "d8e56ae"


@pytest.mark.parametrize("row", [{"tehcnique": "a"}, {"ratio": None}, {"ratio": {"median": 2.0}}, {"latency_s": [[1]]},
                                 {"settings": {"a": {"b": 1}}}])  # fmt: skip
def test_an_unknown_key_and_a_value_that_is_not_flat_are_refused_and_nothing_is_written(row: Any, tmp_path) -> None:
    with pytest.raises(InputError, match=next(iter(row))):
        write_rows(tmp_path / "rows.json", [{"system": "a"}, row], command="a command")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", [path for path in RECORDED if path.stem != "claims"], ids=lambda path: path.stem)
def test_every_recorded_row_is_of_the_one_kind(path: Path) -> None:
    for row in load_results(path.name)["rows"]:
        assert checked(row)["measured"]
        for key in ("ratio", "factor"):
            if key in row:
                if f"{key}_samples" not in row:  # of medians: where one system was timed once
                    assert path.stem.startswith("gpu-")
                    assert row["cell"].startswith(("in flight", "flan-t5-xl", "bart-large"))
                    continue
                samples = row[f"{key}_samples"]
                times = row.get("latency_s", samples)  # a ratio of rates, such as that of streams, has none
                assert len(samples) == len(times) and min(times) > 0


def test_scores_of_all_parts_are_keys_of_rows_and_missing_ones_are_omitted() -> None:
    from bench.evaluation import evaluate

    report = evaluate(lambda texts: ["unanswerable"] * len(texts), limit=1).to_json()
    found = rows.scores(report)
    assert found.keys() <= rows.KEYS and found["limit"] == 1
    assert found["exact_match"] == report["questions"]["all"]["exact_match"]
    assert {"bleu_3-5", "rougeL_unseen", "f1_seen"} <= found.keys()
    assert "bleu" not in rows.scores({**report, "translation": None}) and rows.scores(None) == {}
