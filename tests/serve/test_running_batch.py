"""Rows in flight on `TorchStatic`, here without graphs: each result is that of its request alone.

Rows join, leave and are cancelled in buffers that grow and shrink; beams and samples run beside greedy rows; and rows
end in the middle of a run of steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import decoded, play, run
from test_torch_static import Replay

from t5accel.backends import torch_static, torch_static_rows
from t5accel.backends.torch_eager import TorchEager
from t5accel.backends.torch_static import TorchStatic
from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.sampling import SamplingParams
from t5accel.decoding.token_constraints import NO_CONSTRAINTS, TokenConstraints, truncate_at_eos
from t5accel.errors import EngineError, InputError
from t5accel.serve.device_batch import DeviceRunningBatch
from t5accel.serve.limits import KVCacheBytes, SchedulerLimits
from t5accel.serve.request import GenerationRequest
from t5accel.serve.running_batch import sequences_for
from t5accel.serve.scheduler import Scheduler

SMALL = (4, 8, 16, 32)
ENDING = TokenConstraints(eos_token_ids=tuple(range(1, 40)))  # an answer of a tiny model ends after some eight tokens
RULES = {
    "none": NO_CONSTRAINTS,
    "ends": ENDING,
    "suppresses": replace(ENDING, suppress_tokens=(50, 60, *range(100, 130)), min_new_tokens=3),
    "forces": replace(ENDING, forced_bos_token_id=250, forced_eos_token_id=1),
}


@pytest.fixture(scope="module", autouse=True)
def few_rows() -> Any:
    """Capacities that a few requests outgrow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_static_rows, "ROWS", (2, 4, 8))
        patch.setattr("t5accel.serve.device_batch.SHRINK_AFTER_STEPS", 6)
        yield


@pytest.fixture(scope="module")
def backends(tiny_t5) -> Callable[[str], tuple[TorchStatic, TorchEager]]:
    """By the name of rules, the backend under test and transformers' own."""
    found = {}
    for name, rules in RULES.items():
        found[name] = TorchStatic(tiny_t5(), buckets=SMALL), TorchEager(tiny_t5())
        for backend in found[name]:
            backend.rules = rules
    return found.__getitem__


def flight(backend: TorchStatic, **limits: Any) -> Scheduler:
    return Scheduler(backend, SchedulerLimits(**limits), thread=False)


def alone(job: GenerationRequest, backend: Any) -> list[list[int]]:
    """The results of the decoding algorithms for that source alone."""
    ends = backend.rules.eos_tokens(backend.eos_token_id)
    return [truncate_at_eos(row, ends) for row in decoded(job, backend).sequences.tolist()]


def tokens(ticket: Any) -> list[list[int]]:
    return [answer.tokens for answer in ticket.result(0)]


def new_job(number: int, most: int, source: int = 6, **options: Any) -> GenerationRequest:
    return GenerationRequest(np.random.default_rng(number).integers(3, 300, source), max_new_tokens=most, **options)


@st.composite
def jobs(draw: st.DrawFn) -> GenerationRequest:
    most = draw(st.integers(1, 10))
    options: dict[str, Any] = dict(min_new_tokens=draw(st.sampled_from([None, None, 0, most // 2, most])))
    match draw(st.sampled_from(["greedy", "greedy", "greedy", "language", "beams", "drawn"])):
        case "language":
            options |= dict(forced_bos_token_id=draw(st.integers(200, 202)), decoder_start_token_id=5)
        case "beams":
            options |= dict(num_beams=draw(st.integers(2, 3)), length_penalty=draw(st.sampled_from([1.0, 0.0])))
        case "drawn":
            options |= dict(sampling=SamplingParams(temperature=2.0), seed=draw(st.integers(0, 3)),
                            num_return_sequences=draw(st.integers(1, 2)))  # fmt: skip
    return new_job(draw(st.integers(0, 99)), most, draw(st.integers(1, 12)), **options)


EVENTS = st.lists(
    st.tuples(st.just("come"), jobs()) | st.tuples(st.just("come"), jobs()) | st.tuples(
        st.just("cancel"), st.integers(0, 9)) | st.tuples(st.just("rounds"), st.integers(1, 4)),
    max_size=12)  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(events=EVENTS, rows=st.integers(3, 9), name=st.sampled_from([*RULES]), kept=st.sampled_from([0, 2**30]))
def test_results_are_those_of_each_request_alone(backends, events: Any, rows: int, name: str, kept: int) -> None:
    backend, eager = backends(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_static_rows, "KEPT_BYTES", kept)
        scheduler = flight(backend, rows=rows)
        tickets, cancelled = play(scheduler, events)
    for number, ticket in enumerate(tickets):
        assert ticket.is_done
        if number not in cancelled:
            assert tokens(ticket) == alone(ticket.request, eager)
    assert (scheduler.rows, scheduler.running, scheduler.waiting, scheduler.failures) == (0, 0, 0, 0)


def test_many_greedy_requests_end_within_runs_of_steps(backends) -> None:
    backend, eager = backends("ends")
    scheduler = flight(backend, rows=64)
    seen: list[tuple[str, float]] = []
    scheduler._observe = lambda *what: seen.append(what)
    tickets = [scheduler.submit(new_job(seed, 12, seed % 9 + 1)) for seed in range(20)]
    assert not scheduler.static_reason and run(scheduler) < 12, "several steps in a round"
    expected = [alone(ticket.request, eager) for ticket in tickets]
    assert [tokens(ticket) for ticket in tickets] == expected
    lengths = [len(answer) for (answer,) in expected]
    assert len({*lengths}) > 3, "they end where they will"
    assert sum(value for name, value in seen if name == "tokens") == sum(lengths)


def test_captured_steps_and_encoders_give_the_same_and_are_warm_before_anybody_comes(
    tiny_t5, backends, monkeypatch
) -> None:
    for module in (torch_static, torch_static_rows):
        monkeypatch.setattr(module, "capture_graph", torch.inference_mode()(lambda *given: Replay(*given)))
    backend, (_, eager) = TorchStatic(tiny_t5(), buckets=SMALL), backends("ends")
    backend.rules, backend.graphs = ENDING, True
    scheduler = flight(backend, rows=5)
    device = scheduler._batch.encoder
    warm = device.captures
    assert warm == 3 + 4 and device.shape == (8, 4, 4), "three capacities; 1, 2, 4 and 8 sources at a time"
    tickets = [scheduler.submit(new_job(seed, 3, 3)) for seed in range(9)]
    run(scheduler)
    assert device.captures == warm and not scheduler.failures
    tickets += [scheduler.submit(new_job(seed, 14, 9)) for seed in range(9)]
    run(scheduler)
    assert [tokens(ticket) for ticket in tickets] == [alone(ticket.request, eager) for ticket in tickets]
    monkeypatch.setattr(torch_static_rows, "CAPTURED_BYTES", 0)
    large = scheduler.submit(new_job(50, 14, 30))
    captured = device.captures
    scheduler.step()
    assert device.captures == captured + 1, "a step for the longer source, and no encoder"
    run(scheduler)
    assert tokens(large) == alone(large.request, eager)


@pytest.mark.parametrize(("rows", "steps"), [(1, 1), (7, 1), (8, 2), (40, 8)])
def test_the_host_reads_each_token_of_few_rows_and_every_eighth_of_many(tiny_t5, rows: int, steps: int) -> None:
    backend = TorchStatic(tiny_t5())
    batch = DeviceRunningBatch(backend, clock=lambda: 0.0)
    jobs = [new_job(seed, 16, min_new_tokens=16) for seed in range(rows)]
    parts = [sequences_for(backend, job)[0] for job in jobs]
    ids = np.stack([job.input_ids for job in jobs])
    batch.add(batch.encoder.encode(ids, np.ones_like(ids)), parts)
    batch.step()
    assert (batch.steps, batch.tokens) == (steps, rows * steps)
    batch._step_s = 1.0  # a slow device
    batch.step()
    assert batch.steps == 1


def test_rows_are_carried_over_into_larger_buffers_and_back(backends) -> None:
    backend, eager = backends("none")
    scheduler = flight(backend, rows=32)
    shapes = lambda: scheduler._batch.encoder.shape  # noqa: E731
    first = scheduler.submit(new_job(1, 30, 3, min_new_tokens=30))
    scheduler.step()
    assert shapes() == (2, 4, 4)
    others = [scheduler.submit(new_job(seed, 3, source)) for seed, source in ((2, 9), (3, 2), (4, 4))]
    scheduler.step()
    scheduler.step()
    assert shapes() == (4, 16, 4), "more rows and a longer source"
    run(scheduler)
    assert shapes() == (2, 4, 32), "a long answer, and nobody beside it"
    for ticket in (first, *others):
        assert tokens(ticket) == alone(ticket.request, eager)


def test_a_stream_gets_every_token_and_a_stop_criterion_ends_within_a_run(backends) -> None:
    backend, eager = backends("none")
    scheduler = flight(backend, rows=64)
    stream = scheduler.submit(new_job(1, 20, stream=True))
    stop = scheduler.submit(new_job(2, 20, stopping_criterion=lambda so_far: len(so_far) == 5))
    for seed in range(12):
        scheduler.submit(new_job(seed, 20))
    run(scheduler)
    assert stream.tokens == tokens(stream)[0] == alone(stream.request, eager)[0]
    (answer,) = stop.result(0)
    assert answer.tokens == alone(replace(stop.request, stopping_criterion=None), eager)[0][:5] and answer.ended


@pytest.mark.parametrize("where", ["run", "fit", "encode", "add_sources", "logits", "reorder_sources"])
def test_a_device_error_ends_few_requests(backends, where: str) -> None:
    backend, eager = backends("none")
    scheduler = flight(backend, rows=32)
    device = scheduler._batch.encoder
    old = [scheduler.submit(new_job(seed, 8)) for seed in range(3)]
    scheduler.step()
    right, failing = getattr(device, where), []

    def fails_once(*arguments: Any) -> Any:
        # New requests are tried again one by one.
        if len(failing) < (2 if where in ("encode", "add_sources", "fit") else 1):
            failing.append(1)
            raise torch.cuda.OutOfMemoryError("no memory")
        return right(*arguments)

    setattr(device, where, fails_once)
    new = [scheduler.submit(new_job(9, 4, 12, num_beams=2)), scheduler.submit(new_job(8, 6, 12))]
    run(scheduler)
    failed = [ticket for ticket in (*old, *new) if ticket.error]
    assert failing and 1 <= len(failed) <= 2 and not any(ticket.error for ticket in old[:2])
    for ticket in (*old, *new):
        if ticket.error:
            assert isinstance(ticket.error, EngineError)
        else:
            assert tokens(ticket) == alone(ticket.request, eager)


def test_a_text_whose_numbers_overflow_spoils_no_later_one(tiny_t5) -> None:
    """In rows and in buffers that it used: a mask hides any number, but not NaN."""
    model = copy.deepcopy(tiny_t5("gated-untied"))
    model.shared.weight.data[7] = torch.inf
    scheduler = flight(TorchStatic(model, buckets=SMALL), rows=2)
    texts = [20, 21, 22, 23, 7, 1], [30, 31, 1], [30, 31, 32, 33, 1]
    bad, *good = (GenerationRequest(text, max_new_tokens=20) for text in texts)
    for _ in range(2):
        scheduler.submit(bad)
    run(scheduler)
    tickets = [scheduler.submit(good[0])]
    scheduler.step()  # in buffers of its own, and carried over into larger ones
    tickets.append(scheduler.submit(good[1]))
    run(scheduler)
    quick = scheduler.submit(replace(bad, max_new_tokens=3))
    tickets.append(scheduler.submit(good[1]))
    while not quick.is_done:
        scheduler.step()
    tickets.append(scheduler.submit(good[0]))  # in the row of ``quick``
    run(scheduler)
    assert [tokens(ticket) for ticket in tickets] == [alone(job, TorchEager(model)) for job in [*good, *good[::-1]]]


def test_equal_sources_are_encoded_once_and_many_in_slices(backends, monkeypatch) -> None:
    backend, _ = backends("none")
    rows, calls = backend.in_flight(), []
    monkeypatch.setattr(torch_static_rows, "ENCODED_AT_ONCE", 16)
    encode = backend.encode
    noting = lambda ids, mask, **how: calls.append(ids.shape) or encode(ids, mask, **how)  # noqa: E731
    monkeypatch.setattr(backend, "encode", noting)
    ids = np.array([[5, 6, 7], [8, 9, 0], [5, 6, 7], [9, 9, 9], [3, 4, 5], [6, 7, 8], [8, 9, 0]])
    mask = (ids > 0).astype(np.int64)
    encoded = rows.encode(ids, mask)
    assert calls == [(4, 3), (1, 3)], "five of seven, and no batch of three: few shapes are captured"
    rows.fit(rows.shape_for(7, 3, 4), np.empty(0, dtype=np.int64))
    rows.add_sources(np.arange(7)[::-1], encoded)
    plan = np.zeros((3, 8), dtype=np.int64)
    found = rows.run(plan, 4)[:7][::-1]
    np.testing.assert_array_equal(found, greedy(backend, ids, mask, max_new_tokens=4).sequences)


def test_memory_is_counted_in_fixed_shapes(backends) -> None:
    backend, _ = backends("none")
    counted = KVCacheBytes(backend.in_flight())
    assert counted(3, 5, 9) == counted(4, 8, 16) > counted(2, 8, 16)
    scheduler = flight(backend, rows=8, key_value_bytes=counted(4, 8, 16))
    tickets = [scheduler.submit(new_job(seed, 16)) for seed in range(6)]
    scheduler.step()
    assert (scheduler.running, scheduler.waiting) == (4, 2)
    run(scheduler)
    assert all(ticket.answers for ticket in tickets)
    with pytest.raises(InputError, match="bytes of KV cache"):
        scheduler.submit(new_job(1, 40))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_on_a_gpu_answers_are_those_of_a_request_alone(precision: str) -> None:
    from t5accel.models.load import cast_model, load_model

    backend = TorchStatic(cast_model(load_model("random:t5-small")[0], precision, "cuda"))
    wanted = [new_job(seed, 4 + 7 * seed % 86, 1 + 37 * seed % 99) for seed in range(48)]
    with Scheduler(backend, SchedulerLimits(rows=32)) as scheduler:
        answers = [ticket.result(120)[0].tokens for ticket in scheduler.submit_all(wanted)]
    assert scheduler.failures == 0 and [len(answer) for answer in answers] == [job.max_new_tokens for job in wanted]
    if precision == "float32":
        assert answers == [alone(job, backend)[0] for job in wanted]
