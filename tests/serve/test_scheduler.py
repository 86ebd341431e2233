"""The scheduler on an exact toy: admission, results and failures.

`ToyBackend`'s next token depends on the source and on every token so far, so a row that reads another's history or
source writes something else. That the real engine keeps rows apart is in `test_serving_tokens`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_drafting import ToyBackend
from test_layout import loaded_by

from t5accel.decoding.beam import beam_search
from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.sampling import SamplingParams, sample
from t5accel.decoding.token_constraints import NO_CONSTRAINTS, TokenConstraints
from t5accel.errors import CancelledError, DeadlineError, EngineError, InputError, QueueFullError, ShuttingDownError
from t5accel.serve.limits import SchedulerLimits
from t5accel.serve.request import GenerationRequest, GenerationResult, RequestHandle
from t5accel.serve.scheduler import Scheduler


class Alone(ToyBackend):
    """A `ToyBackend` that cannot be joined. A source that is kept twice branches."""

    def select_sources(self, state: dict[str, Any], sources: np.ndarray) -> None:
        super().select_sources(state, sources)
        state["pasts"] = [copy.deepcopy(pasts) for pasts in state["pasts"]]

    def reorder(self, state: dict[str, Any], rows: np.ndarray) -> None:
        state["pasts"] = [[list(pasts[row]) for row in of] for pasts, of in zip(state["pasts"], rows, strict=True)]


class Joining(Alone):
    """One that rows join, and whose sources can be kept for later."""

    def add_sources(self, state: dict[str, Any], source: list[list[int]]) -> None:
        state["sources"] = state["sources"] + source
        state["pasts"] += [[[]] for _ in source]

    def split(self, source: list[list[int]]) -> list[list[list[int]]]:
        return [[row] for row in source]

    def join(self, sources: list[list[list[int]]]) -> list[list[int]]:
        return [row for source in sources for row in source]

    def source_bytes(self, source: list[list[int]]) -> int:
        return sum(8 * len(row) for row in source)

    def fingerprint(self) -> int:
        return self.seed


class Replacing(Joining):
    """One whose ended rows stay until others take their places."""

    def replace_sources(self, state: dict[str, Any], source: list[list[int]], places: np.ndarray) -> None:
        for place, one in zip(places.tolist(), source, strict=True):
            state["sources"][place : place + 1], state["pasts"][place : place + 1] = [one], [[[]]]


class Clock:
    """A clock that tests advance."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(Joining):
    """One whose encoder and steps take time of a clock."""

    def __init__(self, clock: Clock, encode_s: Callable[[np.ndarray], float], step_s: float = 0.0):
        super().__init__(ends=0)
        self.clock, self.encode_s, self.step_s, self.encoded = clock, encode_s, step_s, []

    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> list[list[int]]:
        self.clock.now += self.encode_s(input_ids)
        self.encoded.append(len(input_ids))
        return super().encode(input_ids, attention_mask)

    def step(self, state: dict[str, Any], input_ids: np.ndarray) -> np.ndarray:
        self.clock.now += self.step_s
        return super().step(state, input_ids)


def stepped(backend: Any = None, **limits: Any) -> tuple[Scheduler, Clock]:
    """A scheduler without a thread, and its clock."""
    clock = Clock()
    return Scheduler(backend or Joining(), SchedulerLimits(**limits), clock=clock, thread=False), clock


def submit(scheduler: Scheduler, ids: list[int], **options: Any) -> RequestHandle:
    return scheduler.submit(GenerationRequest(ids, **options))


def run(scheduler: Scheduler, most: int = 10_000) -> int:
    """Step until no work remains; return the number of steps."""
    for count in range(1, most):
        if not scheduler.step():
            return count
    raise AssertionError("it does not end")


def decoded(job: GenerationRequest, backend: Any) -> Any:
    """What the decoding algorithms give for that source alone."""
    ids, count = job.input_ids[None], job.num_return_sequences
    options = dict(attention_mask=np.ones_like(ids), **job.bounds)
    if job.sampling:
        return sample(backend, ids, sampling=job.sampling, seed=job.seed, num_return_sequences=count, **options)
    if job.num_beams == 1:
        return greedy(backend, ids, **options)
    options |= dict(length_penalty=job.length_penalty, early_stopping=job.early_stopping)
    return beam_search(backend, ids, num_beams=job.num_beams, num_return_sequences=count, **options)


def by_itself(job: GenerationRequest, backend: Any = None) -> list[tuple[list[int], float | None]]:
    """Tokens without padding and scores of the decoding algorithms for that source alone."""
    found = decoded(job, backend or Joining())
    rows = [[token for token in row if token != Joining.pad_token_id] for row in found.sequences.tolist()]
    return list(zip(rows, [None] * len(rows) if found.scores is None else found.scores.tolist(), strict=True))


def pairs(answers: list[GenerationResult]) -> list[tuple[list[int], float | None]]:
    """In the form of `by_itself`: an empty beam of score -inf may consist of padding."""
    return [([token for token in answer.tokens if token != Joining.pad_token_id], answer.score) for answer in answers]


@st.composite
def jobs(draw: st.DrawFn, longest: int = 12) -> GenerationRequest:
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    most = draw(st.integers(1, longest))
    options: dict[str, Any] = dict(max_new_tokens=most, min_new_tokens=draw(st.integers(0, most)))
    kind = draw(st.sampled_from(["greedy", "greedy", "beams", "drawn"]))
    if kind == "beams":
        beams = draw(st.integers(1, 4))
        options.update(num_beams=beams, num_return_sequences=draw(st.integers(1, beams)))
        options.update(length_penalty=draw(st.sampled_from([1.0, 0.0, 2.0])))
        options.update(early_stopping=draw(st.sampled_from([False, True, "never"])))
    if kind == "drawn":
        params = [SamplingParams(), SamplingParams(top_k=3), SamplingParams(repetition_penalty=1.5)]
        options.update(sampling=draw(st.sampled_from(params)))
        options.update(seed=draw(st.integers(0, 9)), num_return_sequences=draw(st.integers(1, 3)))
    ids = rng.integers(2, 12, draw(st.integers(1, 20)))
    return GenerationRequest(ids, priority=draw(st.integers(-1, 1)), **options)


Event = tuple[str, Any]
EVENTS = st.lists(
    st.tuples(st.just("come"), jobs()) | st.tuples(st.just("cancel"), st.integers(0, 9)) | st.tuples(
        st.just("rounds"), st.integers(1, 6)), max_size=16)  # fmt: skip


def play(scheduler: Scheduler, events: list[Event]) -> tuple[list[RequestHandle], set[int]]:
    """Play events, then step to the end; return the handles, and the numbers of cancelled ones."""
    tickets: list[RequestHandle] = []
    cancelled: set[int] = set()
    for what, which in events:
        if what == "come":
            tickets.append(scheduler.submit(which))
        elif what == "cancel" and which < len(tickets) and not tickets[which].is_done:
            tickets[which].cancel()
            cancelled.add(which)
        elif what == "rounds":
            for _ in range(which):
                scheduler.step()
    run(scheduler)
    return tickets, cancelled


@settings(max_examples=60, deadline=None)
@given(
    events=EVENTS, rows=st.integers(4, 9), kind=st.sampled_from([Joining, Alone, Replacing]),
    cache=st.sampled_from([0, 10**6]),
    rules=st.sampled_from([
        NO_CONSTRAINTS, NO_CONSTRAINTS, TokenConstraints(4, 1, (5, 6)), TokenConstraints(forced_eos_token_id=1),
        TokenConstraints(suppress_tokens=(3,)),
    ]),
)  # fmt: skip
def test_results_are_those_of_each_request_alone(events: list[Event], rows: int, kind, cache: int, rules) -> None:
    backend = kind()
    backend.rules = rules
    scheduler, _ = stepped(backend, rows=rows, encoder_cache_bytes=cache)
    tickets, cancelled = play(scheduler, events)
    for number, ticket in enumerate(tickets):
        assert ticket.is_done
        if number in cancelled:
            with pytest.raises(CancelledError):
                ticket.result(0)
        else:
            assert pairs(ticket.result(0)) == by_itself(ticket.request, backend)
    assert (scheduler.rows, scheduler.running, scheduler.waiting, scheduler.failures) == (0, 0, 0, 0)
    assert scheduler.queued_tokens == 0
    assert scheduler.encoded + scheduler.reused >= len(tickets) - len(cancelled)


def test_rows_of_every_kind_share_one_step() -> None:
    scheduler, _ = stepped()
    submit(scheduler, [5, 6])
    submit(scheduler, [7, 3], num_beams=4)
    submit(scheduler, [2], sampling=SamplingParams(), num_return_sequences=2)
    scheduler.step()
    assert scheduler.backend.shapes == [(7, 1)], "one greedy row, four beams and two samples"


def test_requests_join_and_leave_between_steps() -> None:
    scheduler, _ = stepped(Joining(ends=0))
    first = submit(scheduler, [5, 6], max_new_tokens=9)
    scheduler.step()
    second = submit(scheduler, [7, 8], max_new_tokens=2)
    run(scheduler)
    assert [count for count, _ in scheduler.backend.shapes] == [1, 2, 2] + [1] * 6
    assert second.done_s is not None and pairs(first.result(0)) == by_itself(first.request, Joining(ends=0))


def test_ended_rows_stay_for_a_few_steps_and_newcomers_take_their_places() -> None:
    scheduler, _ = stepped(Replacing(ends=0))
    first, second, third = (submit(scheduler, [5, 6], max_new_tokens=most) for most in (14, 2, 3))
    for _ in range(3):
        scheduler.step()
    assert scheduler.rows == 1 and second.is_done and third.is_done
    fourth = submit(scheduler, [7, 8], max_new_tokens=4)
    run(scheduler)
    assert [count for count, _ in scheduler.backend.shapes] == [3] * 7 + [1] * 7
    for handle in (first, second, third, fourth):
        assert pairs(handle.result(0)) == by_itself(handle.request, Joining(ends=0))


def test_sources_are_encoded_with_those_of_about_their_length() -> None:
    scheduler, _ = stepped()
    handles = scheduler.submit_all([GenerationRequest([5] * length) for length in (30, 6, 64, 5, 31, 7)])
    groups = scheduler._encoded_together(handles)
    assert [[len(handle.request.input_ids) for handle in group] for group in groups] == [[5, 6, 7], [30, 31], [64]]


def test_static_batches_do_not_mix() -> None:
    scheduler, _ = stepped(Alone(ends=0))
    assert "Alone has no add_sources()" in scheduler.static_reason and not stepped()[0].static_reason
    submit(scheduler, [5, 6], max_new_tokens=3)
    submit(scheduler, [5, 6], max_new_tokens=5)
    scheduler.step()
    submit(scheduler, [7, 8], max_new_tokens=2)
    run(scheduler)
    assert [count for count, _ in scheduler.backend.shapes] == [2, 2, 2, 1, 1, 1, 1], "the third one waits for both"


def test_no_request_overtakes_a_larger_one() -> None:
    scheduler, _ = stepped(Joining(ends=0), rows=5)
    submit(scheduler, [5], max_new_tokens=4)
    submit(scheduler, [5], max_new_tokens=8, sampling=SamplingParams(), num_return_sequences=2)
    beams = submit(scheduler, [6], num_beams=4, max_new_tokens=3)
    later = submit(scheduler, [7], max_new_tokens=1)
    scheduler.step()
    assert (scheduler.rows, scheduler.waiting) == (3, 2), "one more row would fit, but four stand before it"
    run(scheduler)
    assert beams.joined_s is not None and later.result(0) and max(count for count, _ in scheduler.backend.shapes) == 5


def test_higher_priority_goes_first_then_the_older_request() -> None:
    scheduler, clock = stepped(Joining(ends=0), rows=1)
    tickets = [submit(scheduler, [5], max_new_tokens=2, priority=priority) for priority in (0, 1, 0, 5, 1)]
    while scheduler.step():
        clock.now += 1
    assert sorted(range(5), key=lambda i: tickets[i].done_s) == [3, 1, 4, 0, 2]


def test_low_priority_does_not_starve() -> None:
    """Each second a request of the highest priority arrives, and one is done."""
    scheduler, clock = stepped(Joining(ends=0), rows=1)
    low = submit(scheduler, [5], max_new_tokens=1)
    for _ in range(30):
        submit(scheduler, [6], max_new_tokens=1, priority=10**6)
        scheduler.step()
        clock.now += 1
    assert low.is_done and 9 <= low.done_s <= 11


def test_the_queue_counts_tokens() -> None:
    scheduler, _ = stepped(Joining(ends=0), rows=32, queue=10, queued_tokens=1000)
    large = GenerationRequest([5] * 10, num_beams=8, max_new_tokens=90)  # 800 tokens
    scheduler.submit(large)
    with pytest.raises(QueueFullError, match="800 tokens are waiting and 1000 may"):
        scheduler.submit(large)
    with pytest.raises(QueueFullError, match="800 tokens"):
        scheduler.require_place(GenerationRequest([5], max_new_tokens=49), 5)
    with pytest.raises(InputError, match="at most 1000 tokens, got 1600"):
        scheduler.submit_all([large, large])
    with pytest.raises(InputError, match="at most 10 requests, got 11"):
        scheduler.submit_all([GenerationRequest([5], max_new_tokens=1)] * 11)
    small = scheduler.submit_all([GenerationRequest([5], max_new_tokens=39)] * 5)
    assert scheduler.waiting == 6
    run(scheduler)
    assert all(ticket.is_done for ticket in small)


def test_numbers_of_numpy_are_those_of_python() -> None:
    scheduler, clock = stepped(Joining(), rows=32)
    clock.now = 9e6
    for small in (np.uint8, np.int16):
        first = scheduler.submit(GenerationRequest(
            [5, 6], max_new_tokens=small(8), min_new_tokens=small(2), forced_bos_token_id=small(7),
            deadline_s=np.float32(0.25),
        ))  # fmt: skip
        assert first.deadline_s == 9e6 + 0.25
        many = [submit(scheduler, [5] * 500, max_new_tokens=500) for _ in range(80)]
        assert scheduler.queued_tokens == 10 + 80_000
        run(scheduler)
        assert first.result(0)[0].tokens[0] == 7 and {type(token) for token in first.result(0)[0].tokens} == {int}
        assert all(ticket.is_done for ticket in many)


def test_a_deadline_ends_waiting_and_working() -> None:
    scheduler, clock = stepped(Joining(ends=0), rows=1)
    working = submit(scheduler, [5], max_new_tokens=500, deadline_s=10.0)
    waiting = submit(scheduler, [6], deadline_s=5.0)
    in_time = submit(scheduler, [7], max_new_tokens=3, deadline_s=20.0)
    for _ in range(15):
        scheduler.step()
        clock.now += 1
    for ticket, seconds in ((working, 10), (waiting, 5)):
        assert ticket.done_s == seconds
        with pytest.raises(DeadlineError, match=f"within its {seconds} s"):
            ticket.result(0)
    assert waiting.joined_s is None and len(in_time.result(0)[0].tokens) == 3


def test_a_full_queue_says_when_to_retry() -> None:
    scheduler, clock = stepped(Joining(ends=0), rows=1, queue=3)
    for _ in range(2):
        submit(scheduler, [5], max_new_tokens=1)
    with pytest.raises(QueueFullError) as refused:
        scheduler.submit_all([GenerationRequest([5]), GenerationRequest([6])])
    assert refused.value.retry_after_s == 1 and scheduler.waiting == 2, "all of them or none"
    while scheduler.step():
        clock.now += 4
    clock.now += 3600  # idle time is no rate
    submit(scheduler, [5], max_new_tokens=1)
    while scheduler.step():
        clock.now += 4
    for _ in range(3):
        submit(scheduler, [5], max_new_tokens=1)
    with pytest.raises(QueueFullError, match="3 requests are waiting and 3 may: try again in 6 s"):
        submit(scheduler, [5])


def test_streams_report_each_token_and_others_only_the_end() -> None:
    scheduler, _ = stepped(Joining(ends=0))
    heard: list[tuple[str, int]] = []
    tickets = {
        "stream": submit(scheduler, [5], max_new_tokens=3, stream=True),
        "whole": submit(scheduler, [6], max_new_tokens=3),
    }
    for name, ticket in tickets.items():
        ticket.listener = lambda name=name, ticket=ticket: heard.append((name, len(ticket.tokens)))
    run(scheduler)
    assert heard == [("stream", 1), ("stream", 2), ("stream", 3), ("whole", 0)]
    assert tickets["stream"].tokens == tickets["stream"].result(0)[0].tokens


def test_equal_sources_are_encoded_once() -> None:
    scheduler, _ = stepped()
    for ids in ([5, 6], [5, 6], [7]):
        submit(scheduler, ids, num_beams=3)
    run(scheduler)
    again = submit(scheduler, [5, 6])
    run(scheduler)
    assert (scheduler.encoded, scheduler.reused, again.reused) == (2, 2, True)


def test_prefill_stalls_are_bounded() -> None:
    """Encoding takes 10 ms a token here."""
    clock = Clock()
    backend = Timed(clock, lambda ids: 0.01 * ids.size)
    scheduler = Scheduler(backend, SchedulerLimits(max_prefill_stall_s=0.1), clock=clock, thread=False)
    submit(scheduler, [5], max_new_tokens=200)
    scheduler.step()
    stalls = []
    for number in range(40):
        submit(scheduler, [5 + number % 6, *([2] * (1 + number % 3)), number % 5 + 3], max_new_tokens=3)
    submit(scheduler, [9] * 20, max_new_tokens=3)
    while scheduler.waiting:
        before = clock.now
        scheduler.step()
        stalls.append(clock.now - before)
    assert max(stalls) == pytest.approx(0.2), "a single source that needs more, alone"
    assert sorted(stalls)[-2] <= 0.1 + 1e-9
    assert sum(stalls) / len(stalls) > 0.05, "and not one at a time"


@pytest.mark.parametrize(("share", "least", "most"), [(1.0, 0.45, 0.55), (0.2, 0.15, 0.25)])
def test_prefill_takes_its_share_of_the_time(share: float, least: float, most: float) -> None:
    """A request arrives before each step; encoding any number takes 10 ms, as a step does."""
    backend = Timed(clock := Clock(), lambda ids: 0.01, 0.01)
    limits = SchedulerLimits(rows=64, prefill_share=share, max_prefill_stall_s=1, encoder_cache_bytes=0)
    scheduler = Scheduler(backend, limits, clock=clock, thread=False)
    submit(scheduler, [5], max_new_tokens=400)
    tickets = []
    for number in range(100):
        tickets.append(submit(scheduler, [5, 2 + number % 10], max_new_tokens=2))
        scheduler.step()
    assert least < 0.01 * len(backend.encoded) / clock.now < most
    assert np.median(backend.encoded) >= 0.8 / share and all(ticket.is_done for ticket in tickets[:90])


def test_key_value_bytes_count_each_row_as_long_as_the_longest() -> None:
    class Sized(Joining):
        class dims:
            cross_heads, decoder_heads, d_kv = (1,), (1,), 1

    scheduler, _ = stepped(Sized(ends=0), key_value_bytes=4 * 2 * 4 * (64 + 64), source_tokens=100)
    for length in (5, 5, 100, 5):
        submit(scheduler, [7] * length, max_new_tokens=9)
    scheduler.step()
    assert scheduler.rows == 2, "with the long one three rows of 128 and 64 positions would be too many"
    with pytest.raises(InputError, match="at most 4096 bytes of KV cache, got 6144"):
        submit(scheduler, [7] * 100, num_beams=4, max_new_tokens=9)
    run(scheduler)


# What goes wrong


class Failing(Joining):
    """Raises at the calls of ``method`` whose numbers are in ``fails``, before it does anything."""

    def __init__(self, method: str, fails: set[int], **options: Any):
        super().__init__(**options)
        self.count = 0
        real = getattr(self, method)

        def call(*arguments: Any) -> Any:
            self.count += 1
            if self.count in fails:
                raise MemoryError("no room for the secret text")
            return real(*arguments)

        setattr(self, method, call)


def outcomes(tickets: list[RequestHandle]) -> str:
    """One letter for each handle: a(nswered) or f(ailed)."""
    for ticket in tickets:
        assert ticket.is_done, "nobody may wait for ever"
        if ticket.error is None:
            assert pairs(ticket.result(0)) == by_itself(ticket.request, Joining(ends=0))
        else:
            assert isinstance(ticket.error, EngineError) and "secret" not in str(ticket.error)
            assert isinstance(ticket.error.__cause__, MemoryError | Panic)
    return "".join("a" if ticket.error is None else "f" for ticket in tickets)


@pytest.mark.parametrize(
    ("method", "fails", "expected"),
    [
        ("step", {3}, "aaf"),  # the last to come goes, the others go on
        ("step", {3, 4}, "aff"),
        ("encode", {2}, "aaa"),  # two together fail, each alone does not
        ("encode", {2, 3}, "afa"),
        ("add_sources", {1}, "aaa"),
        ("add_sources", {1, 2, 3}, "aff"),
        ("select_sources", {1}, "fff"),  # the state may be in any condition
        ("new_state", {1}, "faa"),
    ],
)
def test_a_failure_ends_as_few_requests_as_possible(method: str, fails: set[int], expected: str) -> None:
    scheduler, _ = stepped(Failing(method, fails, ends=0))
    lengths = (4, 6, 9)
    tickets = [submit(scheduler, [5, 6], max_new_tokens=lengths[0])]
    scheduler.step()
    tickets += [submit(scheduler, [7 + i, 3], max_new_tokens=n) for i, n in enumerate(lengths[1:])]
    run(scheduler)
    assert outcomes(tickets) == expected and scheduler.failures >= 1
    later = submit(scheduler, [9], max_new_tokens=3)
    run(scheduler)
    assert outcomes([later]) == "a", "the scheduler goes on"


def test_a_batch_that_is_too_large_ends_the_last_request_alone() -> None:
    class Small(Replacing):
        def step(self, state: dict[str, Any], input_ids: np.ndarray) -> np.ndarray:
            if len(input_ids) > 7:
                raise MemoryError("no room for the secret text")
            return super().step(state, input_ids)

    scheduler, _ = stepped(Small(ends=0))
    tickets = [submit(scheduler, [5, 3 + i], max_new_tokens=6) for i in range(8)]
    run(scheduler)
    assert outcomes(tickets) == "aaaaaaaf", "a row that has ended leaves before the next step"


class Panic(BaseException):
    """As of a library in Rust."""


@pytest.mark.parametrize("error", [MemoryError, Panic])
def test_a_failed_branch_ends_only_its_beams(error: type[BaseException]) -> None:
    class Branching(Joining):
        def reorder_sources(self, state: dict[str, Any], sources: np.ndarray) -> None:
            raise error("no room for the secret text")

    scheduler, _ = stepped(Branching(ends=0))
    tickets = [submit(scheduler, [5, 6], max_new_tokens=9), submit(scheduler, [5, 6], num_beams=4)]
    run(scheduler)
    assert outcomes(tickets) == "af"


def test_no_token_is_read_twice_where_logits_cannot_be_copied() -> None:
    class Logits(np.ndarray):
        def __getitem__(self, key: Any) -> Any:
            if isinstance(key, np.ndarray) and steps == [2]:
                raise MemoryError
            return super().__getitem__(key)

    class Short(Joining):
        def step(self, state: dict[str, Any], input_ids: np.ndarray) -> np.ndarray:
            steps[0] += 1
            return super().step(state, input_ids).view(Logits)

    steps = [0]
    scheduler, _ = stepped(Short(ends=0))
    tickets = [submit(scheduler, [5, 6], max_new_tokens=count) for count in (1, 2, 3)]
    tickets.append(submit(scheduler, [5, 6], sampling=SamplingParams(), max_new_tokens=4))
    run(scheduler)
    assert outcomes(tickets) == "aaff", "the state has read the tokens of those that go on"


@pytest.mark.parametrize("kind", [Joining, Alone])
def test_beams_without_an_answer_fail_alone_and_nobody_waits(kind: type[ToyBackend]) -> None:
    class Endless(kind):
        def next(self, source: Any, past: Any) -> Any:
            return np.full(12, np.nan) if source[0] == 9 else super().next(source, past)

    scheduler, _ = stepped(Endless(ends=0))
    bad, good = scheduler.submit_all([
        GenerationRequest([9], num_beams=2, max_new_tokens=3), GenerationRequest([3, 4], max_new_tokens=9),
    ])  # fmt: skip
    run(scheduler)
    with pytest.raises(EngineError, match="logits must be finite.*fp32"):
        bad.result(0)
    assert pairs(good.result(0)) == by_itself(good.request, kind(ends=0)) and scheduler.failures == 1


def test_no_request_waits_for_a_dead_thread(monkeypatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)

    def fail(tickets: Any) -> None:
        raise RuntimeError("the listener's mistake")

    scheduler = Scheduler(Joining(ends=0), notify=fail)
    short, long = scheduler.submit_all([GenerationRequest([5], max_new_tokens=count) for count in (2, 400)])
    assert short.result(30)
    with pytest.raises(EngineError, match="thread has ended"):
        long.result(30)
    assert not scheduler.is_open
    with pytest.raises(ShuttingDownError):
        submit(scheduler, [5])


def test_a_lost_device_ends_the_engine_so_that_the_server_is_started_again(monkeypatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    lost: list[bool] = []

    class OnDevice(Joining):
        def step(self, state: dict[str, Any], input_ids: np.ndarray) -> np.ndarray:
            if 9 in input_ids:
                raise RuntimeError("an illegal memory access")
            return super().step(state, input_ids)

        def require_device(self) -> None:
            if lost:
                raise RuntimeError("an illegal memory access")

    scheduler = Scheduler(OnDevice(ends=0))
    fatal = GenerationRequest([5], max_new_tokens=3, decoder_start_token_id=9)
    with pytest.raises(EngineError):
        scheduler.submit(fatal).result(30)
    assert submit(scheduler, [5], max_new_tokens=3).result(30), "the device was there"
    lost.append(True)
    with pytest.raises(EngineError):
        scheduler.submit(fatal).result(30)
    scheduler._thread.join(30)
    assert not scheduler.is_alive and not scheduler.is_open


# Threads, and the end


def test_requests_of_many_threads() -> None:
    wanted = [GenerationRequest([2 + i % 9, 3, 2 + i % 7], num_beams=1 + i % 4, max_new_tokens=9) for i in range(60)]
    with Scheduler(Joining(), SchedulerLimits(rows=9)) as scheduler, ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda job: pairs(scheduler.submit(job).result(60)), wanted))
    assert not scheduler.is_alive and found == [by_itself(job) for job in wanted]


def test_requests_finish_within_the_grace_period() -> None:
    scheduler, clock = stepped(Joining(ends=0), rows=2)
    short, long = submit(scheduler, [5], max_new_tokens=3), submit(scheduler, [6], max_new_tokens=400)
    queued = submit(scheduler, [7], max_new_tokens=2)
    scheduler.drain(grace_s=8.0)
    with pytest.raises(ShuttingDownError, match="takes no more requests"):
        submit(scheduler, [5])
    while scheduler.step():
        clock.now += 1
    assert clock.now == 8 and len(short.result(0)[0].tokens) == 3 and len(queued.result(0)[0].tokens) == 2
    with pytest.raises(ShuttingDownError, match="before this request was done"):
        long.result(0)


def test_observations() -> None:
    seen: dict[str, list[float]] = {}
    clock = Clock()
    observe: Callable[[str, float], None] = lambda name, value: seen.setdefault(name, []).append(value)  # noqa: E731
    scheduler = Scheduler(Joining(ends=0), SchedulerLimits(rows=4), clock=clock, thread=False, observe=observe)
    submit(scheduler, [5], max_new_tokens=3)
    submit(scheduler, [6], max_new_tokens=2, deadline_s=1.0)
    while scheduler.step():
        clock.now += 1
    assert seen["first_token_s"] == [0, 0] and seen["total_s"] == [2] and seen["DeadlineError"] == [1]
    assert sum(seen["tokens"]) == 4 and len(seen["queue_s"]) == 2


# What is refused


@pytest.mark.parametrize(("options", "match"), [
    (dict(input_ids=[]), "input_ids"), (dict(input_ids=[[5]]), "input_ids"), (dict(input_ids=[12]), "input_ids"),
    (dict(input_ids=[5] * 41), "input_ids must be at most 40, got 41"), (dict(max_new_tokens=0), "max_new_tokens"),
    (dict(max_new_tokens=71), "max_new_tokens must be at most 70"),
    (dict(min_new_tokens=9, max_new_tokens=8), "min_new_tokens"), (dict(num_beams=5), "num_beams must be at most 4"),
    (dict(sampling=SamplingParams(), num_return_sequences=5), "num_return_sequences must be at most 4"),
    (dict(num_beams=0), "num_beams"), (dict(num_return_sequences=2), "num_return_sequences"),
    (dict(num_beams=2, length_penalty=float("nan")), "length_penalty"),
    (dict(num_beams=2, early_stopping="x"), "early_stopping"),
    (dict(sampling=SamplingParams(), num_beams=2), "num_beams"), (dict(sampling="hot"), "sampling"),
    (dict(seed=-1), "seed"), (dict(priority=0.5), "priority"), (dict(priority=10**7), "priority"),
    (dict(deadline_s=float("nan")), "deadline_s"), (dict(stream=True, num_beams=2), "num_beams must be 1 with stream"),
], ids=str)  # fmt: skip
def test_requests_that_no_model_or_limit_allows(options: dict[str, Any], match: str) -> None:
    scheduler, _ = stepped(rows=4, source_tokens=40, new_tokens=70)
    with pytest.raises(InputError, match=match):
        scheduler.submit(GenerationRequest(**{"input_ids": [5], **options}))
    assert not scheduler.step() and not scheduler.backend.calls


@pytest.mark.parametrize(
    ("name", "value"),
    [("rows", 0), ("queue", 1.5), ("max_prefill_stall_s", -1), ("key_value_bytes", 0), ("prefill_share", 0)],
)
def test_limits_out_of_bounds(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=name):
        SchedulerLimits(**{name: value})


def test_the_engine_needs_no_web_and_no_torch() -> None:
    modules = loaded_by("import t5accel.serve.scheduler, t5accel.backends.ort_static")
    assert not {"torch", "transformers", "fastapi", "pydantic", "prometheus_client", "uvicorn"} & modules
