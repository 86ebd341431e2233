"""Simulated servers: a queue that mathematics knows, no job lost or answered twice, and what a choice is worth."""

from __future__ import annotations

import numpy as np
import pytest

from bench.scale import Failures, Pace, simulate
from t5accel.errors import InputError

MIXED = [4, 5, 6, 7, 8, 4, 5, 6, 7, 128]
PACE = Pace(step_s=0.0015, row_s=0.0001, join_s=0.002)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_one_row_and_one_token_wait_as_pollaczek_and_khinchine_say(load: float) -> None:
    """Jobs of one length s that come at random: a mean wait of load * s / (2 * (1 - load))."""
    latency = simulate(Pace(0.01, rows=1), load / 0.01, [1], seconds=600).latency_s
    assert np.mean(latency) - 0.01 == pytest.approx(load * 0.01 / (2 * (1 - load)), rel=0.06)


def test_nobody_waits_where_hardly_anybody_comes() -> None:
    latency = simulate(PACE, 0.5, [10], seconds=100).latency_s
    alone = 10 * (0.0015 + 0.0001) + 0.002
    assert min(latency) == pytest.approx(alone) and np.median(latency) == pytest.approx(alone)


def test_rows_share_rounds() -> None:
    one, many = (simulate(Pace(0.002, rows=rows), 100.0, [20], seconds=20).latency_s for rows in (1, 32))
    assert np.median(one) > 20 * np.median(many)


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


def test_a_job_that_was_lost_begins_anew() -> None:
    """One long job, and the only replica fails: it takes its whole time once more, and the restart."""
    long = simulate(Pace(0.01), 0.02, [1000], seconds=900, failures=Failures(every_s=20, restart_s=2))
    assert long.repeated and max(long.latency_s) > 10 + 2


def test_two_choices_wait_less_than_one() -> None:
    one, two = (
        np.percentile(simulate(PACE, 20 * 60.0, MIXED, replicas=20, seconds=10, looked_at=looked_at).latency_s, 99)
        for looked_at in (1, 2)
    )
    assert two < 0.9 * one


def test_the_same_seed_has_the_same_latencies() -> None:
    first, again, other = (simulate(PACE, 50.0, MIXED, seconds=5, seed=seed).latency_s for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("wrong", [
    {"rate_per_s": 0}, {"tokens": []}, {"tokens": [0]}, {"replicas": 0}, {"seconds": -1}, {"looked_at": 0},
    {"pace": Pace(0)}, {"pace": Pace(0.1, rows=0)},
])  # fmt: skip
def test_nonsense_is_refused(wrong: dict) -> None:
    with pytest.raises(InputError, match=r"rows|step_s" if "pace" in wrong else next(iter(wrong))):
        simulate(**{"pace": PACE, "rate_per_s": 1.0, "tokens": [1], **wrong})
