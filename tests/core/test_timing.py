"""Timing is tested with fake runs and a fake clock: no test here depends on how fast anything is."""

import gc
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t5accel import timing
from t5accel.errors import UnequalWorkError
from t5accel.timing import Candidate, Latency, Work, compare, measure

WORK = Work(batch=1, source_tokens=64, new_tokens=32)
seconds = st.floats(1e-9, 1e6)


class Clock:
    """A clock that only moves when a fake run says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def run(self, *durations: float, returns=None, log=None, name=""):
        left = list(durations)

        def go():
            self.now += left.pop(0) if len(left) > 1 else left[0]
            if log is not None:
                log.append(name)
            return returns

        return go


@pytest.fixture
def clock(monkeypatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(timing, "perf_counter", fake)
    return fake


# --- values -----------------------------------------------------------------------------------------------------------


@given(st.lists(seconds, min_size=1, max_size=9))
def test_latency_orders_its_statistics(samples):
    latency = Latency(samples)
    assert latency.min_s <= latency.median_s <= latency.max_s
    assert f"n={len(samples)}" in str(latency)


# --- measure ----------------------------------------------------------------------------------------------------------


def test_measure_synchronizes_before_the_clock_starts_and_before_it_stops(clock):
    queued = [9.0]  # work that an earlier caller left on the device

    def launch():  # returns at once; the device works on
        queued.append(2.0)

    def synchronize():
        clock.now += sum(queued)
        queued.clear()

    assert measure(launch, warmup=0, repeats=2, synchronize=synchronize).samples_s == (2.0, 2.0)


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_paused_and_put_back_even_when_a_run_fails(was_enabled):
    seen = []

    def fails():
        seen.append(gc.isenabled())
        raise RuntimeError("from the run itself")

    before = gc.isenabled()
    try:
        (gc.enable if was_enabled else gc.disable)()
        with pytest.raises(RuntimeError, match="from the run itself"):
            measure(fails)
        assert seen == [False]
        assert gc.isenabled() is was_enabled
    finally:
        (gc.enable if before else gc.disable)()


# --- compare ----------------------------------------------------------------------------------------------------------


def test_compare_interleaves_and_turns_round_every_second_time(clock):
    log = []
    candidates = [Candidate(name, clock.run(1.0, log=log, name=name), WORK) for name in "abc"]
    compare(*candidates, warmup=1, rounds=3)
    assert "".join(log) == "abc" + "abc" + "cba" + "abc"


@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)), min_size=1, max_size=7))
def test_ratios_are_taken_within_each_round(pairs):
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "perf_counter", clock)
        patch.setattr(timing.gc, "collect", lambda: 0)  # a second for each example, in a process that has torch
        base = Candidate("base", clock.run(*(a for a, _ in pairs)), WORK)
        ours = Candidate("ours", clock.run(*(b for _, b in pairs)), WORK)
        found = compare(base, ours, warmup=0, rounds=len(pairs))
    ratio = found.ratios["ours"]
    assert ratio.samples == pytest.approx([a / b for a, b in pairs], rel=1e-6)
    assert ratio.min <= found.ratio("ours") == ratio.median <= ratio.max
    assert set(found.latencies) == {"base", "ours"} and set(found.ratios) == {"ours"}


other_values = {"batch": 8, "source_tokens": 65, "new_tokens": 31, "beams": 4, "threads": 2, "forced_length": False}


@given(st.sets(st.sampled_from(sorted(other_values)), min_size=1))
def test_unequal_work_is_refused_before_anything_runs_naming_each_field(names):
    calls = []
    other = replace(WORK, **{name: other_values[name] for name in names})
    with pytest.raises(UnequalWorkError) as raised:
        compare(Candidate("a", lambda: calls.append("a"), WORK), Candidate("b", lambda: calls.append("b"), other))
    assert not calls
    for name in other_values:
        told = f"{name} is {getattr(WORK, name)!r} and {other_values[name]!r}"
        assert (told in str(raised.value)) == (name in names)


@pytest.mark.parametrize("early", [0, 1, 3])
def test_work_really_done_is_checked_at_every_call(early):
    calls = []

    def stops_early():
        calls.append(1)
        return replace(WORK, new_tokens=7) if len(calls) == early + 1 else WORK

    with pytest.raises(UnequalWorkError, match="'b'.*new_tokens"):
        compare(Candidate("a", lambda: WORK, WORK), Candidate("b", stops_early, WORK), warmup=1, rounds=4)
    assert len(calls) == early + 1


def test_neither_module_needs_a_heavy_library():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'onnxruntime']))\n"
        "from t5accel import machine, timing\n"
        "assert machine.facts()['gpu'] is None and machine.gemm_flops_per_s(16) > 0\n"
        "try: machine.gemm_flops_per_s(16, 'bfloat16')\n"
        "except ImportError as error: assert 'torch' in str(error)\n"
        "else: raise SystemExit('bfloat16 without torch went through')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
