"""What very many texts cost: arithmetic checked by hand, and docs/scale.md held against the recorded rows."""

from __future__ import annotations

import random
import re
from importlib import import_module
from math import exp
from pathlib import Path

import pytest

from bench.results import checked, chosen, recorded
from bench.scale import (
    MACHINE_PRICES,
    Failures,
    MachinePrice,
    Pace,
    Speed,
    attempts,
    costs,
    job_cost,
    knee,
    knees_table,
    speeds,
)
from bench.serving.rates import keeps_up
from t5accel.errors import InputError

PAGE = (Path(__file__).resolve().parents[2] / "docs/scale.md").read_text(encoding="utf-8")
SPEED = Speed("short", 100.0, 700.0, threads=2, read_bytes=50, written_bytes=80, file="")


def test_the_page_has_the_tables_of_what_is_recorded() -> None:
    assert len(re.findall("<!-- plan: ", PAGE)) == 3
    assert import_module("bench.record.scale").drawn(PAGE) == PAGE, "python -m bench.record.scale --page docs/scale.md"


def test_the_numbers_in_the_pages_sentences_are_recorded() -> None:
    rows = recorded("batch.json")["rows"]
    sorted_by = {
        (row["cell"], row["precision"]): f"{row['ratio']:.2f}" for row in chosen(rows, system="sorted, 4096 tokens")
    }
    mixed = re.search(r"answered (\S+) times as fast in fp32 and (\S+) in int8", PAGE)
    by_task = re.search(r"one task behind the other, (\S+) and (\S+):", PAGE)
    for cell, found in (("mixed", mixed), ("task by task", by_task)):
        assert found.groups() == (sorted_by[cell, "fp32"], sorted_by[cell, "int8"])
    few, many = (row["peak_memory_bytes"] for row in chosen(rows, measured="job"))
    assert f"that of 10,000 plus {many / few - 1:.0%}" in PAGE and many < 1.1 * few
    assert f"takes {many / 1e6:.0f} MB" in PAGE
    assert f"{attempts(120 / 3600, 12):.3f} times" in PAGE and f"without shards {attempts(48, 12):.0f} times" in PAGE
    sentences = job_cost(speeds()[0], MACHINE_PRICES[0], 10**9)
    assert re.search(rf"A billion sentences are\s+{sentences.machine_hours:.0f} hours of one machine", PAGE)
    for rent in MACHINE_PRICES:
        assert f"${rent.dollars_per_h:.2f}" in PAGE and f"{rent.fails_every_h:,.0f} hours" in PAGE


def test_what_failures_cost_is_what_they_cost_when_drawn() -> None:
    """A shard is begun until no failure comes before its end: the mean of 20,000 draws, and the formula's."""
    rent, rng = MachinePrice("bad", cores=2, dollars_per_h=1.0, fails_every_h=0.01), random.Random(0)
    begun = hours = 0.0
    for _ in range(20_000):
        while (failure_h := rng.expovariate(1 / rent.fails_every_h)) < 20 / 3600:
            begun, hours = begun + 1, hours + failure_h
        begun, hours = begun + 1, hours + 20 / 3600
    found = job_cost(SPEED, rent, 20_000 * 2000)
    assert found.shard_s == 20 and found.shards == 20_000
    assert found.repeated == pytest.approx(begun - 20_000, rel=0.03)
    assert found.machine_hours == pytest.approx(hours, rel=0.03)


def test_a_machine_that_never_fails_repeats_nothing() -> None:
    found = job_cost(SPEED, MachinePrice("good", 4, 2.0, 1e9), 3600 * 100)
    assert found.core_hours == pytest.approx(2) and found.dollars == pytest.approx(1.0)
    assert found.repeated < 1e-5 and found.read_bytes_per_s == 100 / 2 * 4 * 50
    assert found.storage_dollars == pytest.approx(3600 * 100 * 130 / 1e9 * 0.023)
    assert attempts(1, 2) == exp(0.5)
    with pytest.raises(InputError, match="texts"):
        job_cost(SPEED, MACHINE_PRICES[0], 0)


def test_a_table_has_a_line_for_each_speed_on_each_machine() -> None:
    assert len(costs([SPEED, SPEED]).splitlines()) == 2 + 2 * len(MACHINE_PRICES)
    assert {speed.file for speed in speeds()} == {"batch.json", "ladder.json", "peers-cpu.json"}


def test_a_knee_is_kept_up_with_and_little_more_is_not() -> None:
    pace = Pace(0.002, row_s=0.0002, join_s=0.002, rows=8)
    one = knee(pace, [20], 0.4, seconds=20)
    assert keeps_up(checked(one)) and one["answered"] > 20 * one["rate_per_s"] * 0.9
    ten = knee(pace, [20], 0.4, replicas=10, seconds=10, closer=4)
    assert 9 * one["rate_per_s"] < ten["rate_per_s"] < 13 * one["rate_per_s"]
    failing = knee(pace, [20], 0.4, replicas=10, seconds=10, failures=Failures(2.0, 1.0), closer=4)
    assert failing["rate_per_s"] < 0.8 * ten["rate_per_s"]
    with pytest.raises(InputError, match="limit_s"):
        knee(pace, [20], 0.01)


def test_the_measured_knee_stands_beside_the_simulated_ones_when_it_is_there(monkeypatch) -> None:
    point = dict(measured="open loop", cell="curve", model="mini", system="t5accel serve", p99_s=0.1, limit_s=1.0)
    simulated = dict(measured="simulation", rate_per_s=120.0, p99_s=0.9, settings={"replicas": 10})
    files = {"scale.json": [{"measured": "pace", "settings": {}}, simulated], "serving.json": []}
    monkeypatch.setattr("bench.scale.recorded", lambda file: {"rows": files[file]})
    assert "not recorded yet" in knees_table() and re.search(r"10, simulated +120 +12 +0.90 +–", knees_table())
    files["serving.json"] = [{**point, "rate_per_s": 41.0, "answered": 200, "unanswered": 0}]
    assert "not recorded" not in knees_table() and re.search(r"1, measured +41 +41", knees_table())
