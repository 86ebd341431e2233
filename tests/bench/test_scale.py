"""Cost of large jobs, docs/scale.md against the recorded rows, and simulated servers against queueing theory."""

import random
import re
from importlib import import_module
from math import exp
from pathlib import Path

import numpy as np
import pytest

from bench.results import checked, filter_rows, load_results
from bench.scale import MACHINE_PRICES, Failures, MachinePrice, Pace, Speed, job_cost, knee, simulate, speeds
from bench.serving.rates import keeps_up
from t5accel.errors import InputError

PAGE = (Path(__file__).resolve().parents[2] / "docs/scale.md").read_text(encoding="utf-8")
MIXED = [4, 5, 6, 7, 8, 4, 5, 6, 7, 128]
PACE = Pace(step_s=0.0015, row_s=0.0001, join_s=0.002)
SPEED = Speed("short", 100.0, 700.0, threads=2, read_bytes=50, written_bytes=80, file="")


def test_the_page_has_the_tables_of_what_is_recorded() -> None:
    assert len(re.findall("<!-- plan: ", PAGE)) == 3
    assert import_module("bench.record.scale").drawn(PAGE) == PAGE, "python -m bench.record.scale --page docs/scale.md"


def test_the_numbers_in_the_pages_sentences_are_recorded() -> None:
    rows = load_results("batch.json")["rows"]
    sorted_by = {
        (row["cell"], row["precision"]): f"{row['ratio']:.2f}"
        for row in filter_rows(rows, system="sorted, 4096 tokens")
    }
    mixed = re.search(r"answered (\S+) times as fast in fp32 and (\S+) in int8", PAGE)
    by_task = re.search(r"one task behind the other, (\S+) and (\S+):", PAGE)
    for cell, found in (("mixed", mixed), ("task by task", by_task)):
        assert found.groups() == (sorted_by[cell, "fp32"], sorted_by[cell, "int8"])
    few, many = (row["peak_memory_bytes"] for row in filter_rows(rows, measured="job"))
    assert f"that of 10,000 plus {many / few - 1:.0%}" in PAGE and many < 1.1 * few
    assert f"takes {many / 1e6:.0f} MB" in PAGE
    assert f"{exp(120 / 3600 / 12):.3f} times" in PAGE and f"without shards {exp(48 / 12):.0f} times" in PAGE
    sentences = job_cost(speeds()[0], MACHINE_PRICES[0], 10**9)
    assert re.search(rf"A billion sentences are\s+{sentences['machine_hours']:.0f} hours of one machine", PAGE)
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
    assert found["shard_s"] == 20
    assert found["repeated_shards"] == pytest.approx(begun - 20_000, rel=0.03)
    assert found["machine_hours"] == pytest.approx(hours, rel=0.03)
    found = job_cost(SPEED, MachinePrice("good", 4, 2.0, 1e9), 3600 * 100)
    assert found["machine_hours"] == pytest.approx(0.5) and found["dollars"] == pytest.approx(1.0)
    assert found["repeated_shards"] < 1e-5 and found["read_bytes_per_s"] == 100 / 2 * 4 * 50
    assert found["storage_dollars"] == pytest.approx(3600 * 100 * 130 / 1e9 * 0.023)
    with pytest.raises(InputError, match="texts"):
        job_cost(SPEED, MACHINE_PRICES[0], 0)


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


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_the_mean_wait_is_that_of_pollaczek_and_khinchine(load: float) -> None:
    """Jobs of one length s that come at random: a mean wait of load * s / (2 * (1 - load))."""
    latency = simulate(Pace(0.01, rows=1), load / 0.01, [1], seconds=600).latency_s
    assert np.mean(latency) - 0.01 == pytest.approx(load * 0.01 / (2 * (1 - load)), rel=0.06)


def test_rows_share_rounds_lost_jobs_begin_anew_and_two_choices_wait_less_than_one() -> None:
    one, many = (simulate(Pace(0.002, rows=rows), 100.0, [20], seconds=20).latency_s for rows in (1, 32))
    assert np.median(one) > 20 * np.median(many)
    # One long job, and the only replica fails: it takes its whole time once more, and the restart.
    long = simulate(Pace(0.01), 0.02, [1000], seconds=900, failures=Failures(every_s=20, restart_s=2))
    assert long.repeated and max(long.latency_s) > 10 + 2
    one, two = (
        np.percentile(simulate(PACE, 20 * 60.0, MIXED, replicas=20, seconds=10, looked_at=looked_at).latency_s, 99)
        for looked_at in (1, 2)
    )
    assert two < 0.9 * one
    first, again, other = (simulate(PACE, 50.0, MIXED, seconds=5, seed=seed).latency_s for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("replicas", [1, 4])
def test_with_failures_every_job_is_answered_once(replicas: int) -> None:
    told = dict(replicas=replicas, seconds=60, seed=3)
    calm = simulate(PACE, 20.0 * replicas, MIXED, **told)
    failing = simulate(PACE, 20.0 * replicas, MIXED, failures=Failures(every_s=5, restart_s=1), **told)
    assert failing.failures > 5 * replicas and failing.repeated > 0 and not calm.failures and not calm.repeated
    assert len(calm.latency_s) == pytest.approx(20 * replicas * 60, rel=0.1)
    assert len(failing.latency_s) == pytest.approx(20 * replicas * 60, rel=0.1)
    slowest = max(failing.latency_s)
    assert slowest > 1 if replicas == 1 else slowest < 5, "the queue of one that is down waits for its restart"


@pytest.mark.parametrize("wrong", [{"rate_per_s": 0}, {"tokens": [0]}, {"replicas": 0}, {"looked_at": 0}])
def test_bad_arguments_of_a_simulation_are_named(wrong: dict) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        simulate(**{"pace": PACE, "rate_per_s": 1.0, "tokens": [1], **wrong})
