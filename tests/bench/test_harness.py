"""The harness, with entries that cheat, fail and end early: what is not equal is not timed. No speed is asserted."""

import json
from typing import Any

import numpy as np
import pytest

from bench import harness
from bench.harness import FEWEST_ROUNDS, Contender, run_comparison
from bench.results import checked
from t5accel.errors import InputError, UnequalWorkError
from t5accel.parity import ParityError
from t5accel.timing import Work

TOKENS = np.array([[5, 6, 7, 8], [9, 10, 11, 12]])
WORK = Work(2, 7, 4, threads=1)


def entry(name: str, *outputs: Any, diary: list[str] | None = None, **options: Any) -> Contender:
    """A contender that returns these outputs, the last one again and again, or raises an exception among them."""
    diary = [] if diary is None else diary

    def run() -> Any:
        output = outputs[min(diary.count(name), len(outputs) - 1)]
        diary.append(name)
        if isinstance(output, Exception):
            raise output
        return output

    return Contender(name, lambda: run, **options)


def test_every_entry_runs_once_and_the_rounds_go_forth_and_back() -> None:
    diary: list[str] = []
    entries = [entry("a", TOKENS, diary=diary), entry("b", TOKENS, diary=diary, facts={"backend": "x"})]
    rows = run_comparison(entries, WORK, rounds=3, model="toy")
    assert "".join(diary) == "ab" + "ab" + "ba" + "ab"
    for row in rows:
        assert (row["measured"], row["reference"], row["model"]) == ("speed", "a", "toy")
        assert (row["batch"], row["beams"], row["source_tokens"], row["new_tokens"], row["threads"]) == (2, 1, 7, 4, 1)
        assert (row["equal"], row["of"], row["distinct"]) == (8, 8, 8) and "forced" not in row
        assert len(row["latency_s"]) == 3 and row["tokens_per_s"] == pytest.approx(8 / np.median(row["latency_s"]))
        pairs = zip(rows[0]["latency_s"], row["latency_s"], strict=True)
        assert row["ratio_samples"] == [theirs / ours for theirs, ours in pairs]
        assert row["ratio"] == np.median(row["ratio_samples"])
        assert json.loads(json.dumps(checked(row))) == row
    assert rows[0]["ratio"] == 1 and rows[1]["backend"] == "x" and "backend" not in rows[0]


OTHER = {"another token": TOKENS + np.eye(2, 4, dtype=int), "rows swapped": TOKENS[::-1], "too few": TOKENS[:1]}


@pytest.mark.parametrize("output", OTHER.values(), ids=OTHER)
def test_other_tokens_are_refused_before_anything_is_timed(output: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "compare", lambda *_, **__: pytest.fail("timed before proven equal"))
    with pytest.raises(ParityError):
        run_comparison([entry("a", TOKENS), entry("b", output)], WORK)


def test_tokens_of_an_inexact_system_are_counted() -> None:
    row = run_comparison([entry("a", TOKENS), entry("b", OTHER["another token"], exact=False)], WORK, rounds=1)[1]
    assert (row["equal"], row["of"]) == (6, 8)
    with pytest.raises(InputError, match="must be tokens, as the reference's is, got None"):
        run_comparison([entry("a", TOKENS), entry("b", None, exact=False)], WORK, rounds=1)
    with pytest.raises(InputError, match="shape"):  # fewer tokens are no comparison, exact or not
        run_comparison([entry("a", TOKENS), entry("b", TOKENS[:, :2], exact=False)], WORK, rounds=1)


@pytest.mark.parametrize("cut", [TOKENS[:, :-1], TOKENS[:1]], ids=["fewer tokens", "fewer rows"])
def test_less_work_while_timing_is_refused(cut: np.ndarray) -> None:
    with pytest.raises(UnequalWorkError, match="'b'"):
        run_comparison([entry("a", TOKENS), entry("b", TOKENS, cut)], WORK)
    rows = run_comparison([entry("a", TOKENS), entry("b", TOKENS, cut), entry("c", TOKENS)], WORK, keep_going=True)
    assert ["failed" in row for row in rows] == [False, True, False] and "latency_s" in rows[2]


def test_other_tokens_while_timing_are_refused() -> None:
    for later, error in ((OTHER["another token"], ParityError), (None, InputError)):
        entries = [[entry("a", TOKENS), entry("b", TOKENS, later), entry("c", TOKENS)] for _ in range(2)]
        with pytest.raises(error):
            run_comparison(entries[0], WORK, rounds=2)
        _, b, c = run_comparison(entries[1], WORK, rounds=2, keep_going=True)
        assert error.__name__ in b["failed"] and "ratio" not in b and "ratio" in c
    run_comparison([entry("a", TOKENS), entry("b", TOKENS, OTHER["another token"], exact=False)], WORK, rounds=2)


def test_answers_of_natural_length_are_compared_whole_and_their_tokens_counted() -> None:
    longer = np.array([[5, 6, 7, 8, 0], [9, 10, 11, 12, 13]])
    work = Work(2, 7, 5, forced_length=False)
    a, b = run_comparison([entry("a", TOKENS), entry("b", longer, exact=False)], work, rounds=1)
    assert (a["new_tokens"], a["equal"], a["of"], a["forced"]) == (8, 2, 2, False)
    assert (b["new_tokens"], b["equal"], b["of"]) == (9, 1, 2) and "threads" not in b
    assert b["tokens_per_s"] == pytest.approx(9 / b["latency_s"][0])
    with pytest.raises(ParityError):
        run_comparison([entry("a", TOKENS), entry("b", longer)], work)
    short = np.array([[5, 1], [6, 1], [7, 1]])
    assert run_comparison([entry("a", short), entry("b", short)], work, rounds=1)[1]["equal"] == 3
    with pytest.raises(InputError, match="degenerate"):
        run_comparison([entry("a", short[[0, 0, 0]]), entry("b", short[[0, 0, 0]])], work)


def test_numbers_are_compared_within_a_tolerance_and_other_things_not_at_all() -> None:
    entries = [entry("a", TOKENS * 1.0), entry("b", TOKENS + 1e-4)]
    facts = dict.fromkeys(("batch", "beams", "new_tokens"))
    row = run_comparison(entries, WORK, rounds=1, atol=1e-3, **facts)[1]
    assert not {"equal", "tokens_per_s", *facts} & row.keys() and row["latency_s"]
    with pytest.raises(ParityError):
        run_comparison(entries, WORK, rounds=1, atol=1e-5)
    assert len(run_comparison([entry("a", "one"), entry("b", ["another"])], WORK, rounds=1, atol=None)) == 2


def test_a_failure_is_a_row_with_its_reason_and_the_others_go_on() -> None:
    def missing() -> Any:
        raise ModuleNotFoundError("no runtime\nhere")

    entries = [
        entry("a", TOKENS), Contender("missing", missing), entry("unequal", OTHER["rows swapped"]),
        entry("dies", TOKENS, TOKENS, RuntimeError("killed")), entry("b", TOKENS),
    ]  # fmt: skip
    diary: list[str] = []
    found = run_comparison(entries, WORK, rounds=3, keep_going=True, on_built=diary.append)
    rows = {row["system"]: row for row in found}
    assert [*rows] == diary == ["a", "missing", "unequal", "dies", "b"]
    assert rows["missing"]["failed"] == "ModuleNotFoundError: no runtime … here"
    assert rows["unequal"]["failed"].startswith("ParityError") and "killed" in rows["dies"]["failed"]
    for name, row in rows.items():
        assert ("failed" in row) == (name not in "ab") == ("latency_s" not in row) == ("ratio" not in row)
    for bad in ([entry("a", RuntimeError("no reference")), entry("b", TOKENS)],
                [entry("a", TOKENS, RuntimeError("no reference")), entry("b", TOKENS)]):  # fmt: skip
        with pytest.raises(RuntimeError, match="no reference"):
            run_comparison(bad, WORK, keep_going=True)


def test_rounds_fit_into_the_time_and_too_little_gives_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(harness, "perf_counter", lambda: next(clock))  # every look at it is a second later
    assert run_comparison([entry("a", TOKENS), entry("b", TOKENS)], WORK, seconds=7 + FEWEST_ROUNDS - 1) == []
    for seconds, asked, rounds in ((7 + 4, 5, 4), (1000, 5, 5), (1000, 2, 2)):
        clock = iter(range(1000))
        rows = run_comparison([entry("a", TOKENS), entry("b", TOKENS)], WORK, seconds=seconds, rounds=asked)
        assert {len(row["latency_s"]) for row in rows} == {rounds}


def test_a_failure_while_the_time_is_estimated_is_a_row_too() -> None:
    entries = [entry("a", TOKENS), entry("dies", TOKENS, RuntimeError("killed")), entry("b", TOKENS)]
    rows = run_comparison(entries, WORK, rounds=3, keep_going=True, seconds=60)
    assert ["failed" in row for row in rows] == [False, True, False] and len(rows[2]["latency_s"]) == 3


def test_one_entry_alone_equal_names_and_a_degenerate_reference_are_refused() -> None:
    for entries in ([], [entry("a", TOKENS)], [entry("a", TOKENS), entry("a", TOKENS)]):
        with pytest.raises(InputError, match="entries"):
            run_comparison(entries, WORK)
    dull = np.full((2, 4), 7)
    with pytest.raises(InputError, match="degenerate"):
        run_comparison([entry("a", dull), entry("b", dull)], WORK)


def test_a_device_is_waited_for() -> None:
    calls: list[int] = []
    run_comparison([entry("a", TOKENS), entry("b", TOKENS)], WORK, rounds=2, synchronize=lambda: calls.append(1))
    assert len(calls) == 2 * 2 * 2  # before and after each of four samples
