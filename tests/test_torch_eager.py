"""The torch backend: its logits are transformers' own, whatever mixture of steps, trims and reorderings led there."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import ATOL, BAD_CALLS, PROGRAM, check_program, junk, operations, teacher_forced
from torch.overrides import TorchFunctionMode

from t5accel.backends.torch_eager import TorchEager
from t5accel.decoding import Backend
from t5accel.decoding.histories import Histories
from t5accel.errors import InputError, NotT5Error
from t5accel.parity import parity

cached_and_not = pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "uncached"])


@cached_and_not
def test_satisfies_the_protocol(tiny_t5, use_cache: bool) -> None:
    assert isinstance(TorchEager(tiny_t5(), use_cache=use_cache), Backend)


def test_takes_its_numbers_from_the_configuration(tiny_t5) -> None:
    backend = TorchEager(tiny_t5(eos_token_id=7))
    assert (backend.vocab_size, backend.pad_token_id, backend.eos_token_id) == (300, 0, 7)
    assert backend.decoder_start_token_id == 0 and backend.device == torch.device("cpu")


# Logits under teacher forcing


@cached_and_not
@pytest.mark.parametrize("rows", [1, 3])
def test_chunks_give_the_logits_of_the_whole(tiny_t5, kind: str, padded_batch, use_cache: bool, rows: int) -> None:
    model, (ids, mask) = tiny_t5(kind), padded_batch
    new = np.random.default_rng(1).integers(3, 300, (len(ids), rows, 9))
    expected = teacher_forced(model, ids.repeat(rows, 0), mask.repeat(rows, 0), new.reshape(-1, 9))
    expected = expected.reshape(len(ids), rows, 9, 300)
    assert len(np.unique(expected.argmax(-1))) > 8, "the reference should vary"
    backend = TorchEager(model, use_cache=use_cache)
    state = backend.start(backend.encode(ids, mask), rows)
    chunks = [backend.step(state, chunk) for chunk in np.split(new, [3, 4], axis=2)]
    assert [chunk.shape for chunk in chunks] == [(6, rows, n, 300) for n in (3, 1, 5)]
    assert all(chunk.dtype == np.float32 for chunk in chunks)
    parity(np.concatenate(chunks, axis=2), expected, atol=ATOL)


@cached_and_not
def test_a_step_of_several_tokens_is_causal(tiny_t5, kind: str, padded_batch, use_cache: bool) -> None:
    backend = TorchEager(tiny_t5(kind), use_cache=use_cache)
    source = backend.encode(*padded_batch)
    rng = np.random.default_rng(2)
    new = rng.integers(3, 300, (6, 1, 5))
    other = np.concatenate([new[:, :, :3], rng.integers(3, 300, (6, 1, 2))], axis=2)
    logits, changed = (backend.step(backend.start(source), tokens) for tokens in (new, other))
    parity(changed[:, :, :3], logits[:, :, :3], atol=ATOL)
    assert (np.abs(changed - logits)[:, :, 3:].max(axis=-1) > 0.01).all(), "later positions should depend on them"


@cached_and_not
def test_the_encoder_runs_once(tiny_t5, padded_batch, use_cache: bool) -> None:
    model = tiny_t5()
    calls: list[int] = []
    hook = model.encoder.register_forward_hook(lambda *_: calls.append(1))
    try:
        backend = TorchEager(model, use_cache=use_cache)
        state = backend.start(backend.encode(*padded_batch), 2)
        for _ in range(3):
            backend.step(state, np.full((6, 2, 1), 5))
    finally:
        hook.remove()
    assert len(calls) == 1


def test_a_source_can_be_started_twice(tiny_t5, padded_batch) -> None:
    backend = TorchEager(tiny_t5())
    source = backend.encode(*padded_batch)
    tokens = np.random.default_rng(3).integers(3, 300, (6, 1, 4))
    first, second = backend.start(source), backend.start(source)
    backend.step(first, tokens[:, :, :2])
    parity(backend.step(second, tokens), backend.step(backend.start(source), tokens), atol=ATOL)


def test_takes_views_and_keeps_none(tiny_t5, padded_batch) -> None:
    backend = TorchEager(tiny_t5())
    tokens = np.random.default_rng(3).integers(3, 300, (6, 1, 4))
    expected = backend.step(backend.start(backend.encode(*padded_batch)), tokens)
    backwards = [array[::-1].copy()[::-1] for array in padded_batch]
    frozen = [array.copy() for array in padded_batch]
    for array in frozen:
        array.setflags(write=False)
    for ids, mask in (backwards, frozen):
        parity(backend.step(backend.start(backend.encode(ids, mask)), tokens), expected, atol=ATOL)
    lent = [array.copy() for array in padded_batch]
    source = backend.encode(*lent)
    for array in lent:
        array[:] = 1
    parity(backend.step(backend.start(source), tokens), expected, atol=ATOL)


def test_bfloat16_gives_float32_logits(tiny_t5, padded_batch) -> None:
    backend = TorchEager(copy.deepcopy(tiny_t5()).to(torch.bfloat16))
    assert backend.step(backend.start(backend.encode(*padded_batch)), np.full((6, 1, 1), 5)).dtype == np.float32


# Any mixture of steps, trims, reorderings and leaving sources


@cached_and_not
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_any_program_of_operations(tiny_t5, padded_batch, use_cache: bool, data: st.DataObject) -> None:
    ids, mask = padded_batch
    sources, rows = data.draw(st.integers(1, 4), "sources"), data.draw(st.integers(1, 3), "rows")
    program = [*data.draw(st.lists(operations, max_size=7), "program"), ("step", 0)]
    model = tiny_t5()
    check_program(TorchEager(model, use_cache=use_cache), model, ids[:sources], mask[:sources], rows, program)


@cached_and_not
def test_the_program_on_every_kind(tiny_t5, kind: str, padded_batch, use_cache: bool) -> None:
    model, (ids, mask) = tiny_t5(kind), padded_batch
    check_program(TorchEager(model, use_cache=use_cache), model, ids, mask, 3, PROGRAM)


@cached_and_not
def test_everything_rejected_at_first(tiny_t5, padded_batch, use_cache: bool) -> None:
    model, (ids, mask) = tiny_t5(), padded_batch
    backend = TorchEager(model, use_cache=use_cache)
    state = backend.start(backend.encode(ids, mask))
    tokens = np.random.default_rng(4).integers(3, 300, (6, 1, 3))
    backend.step(state, tokens[:, :, ::-1])
    backend.trim(state, np.zeros((6, 1), dtype=np.int64))
    parity(backend.step(state, tokens)[:, 0], teacher_forced(model, ids, mask, tokens[:, 0]), atol=ATOL)


class NoMask(TorchEager):
    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> Any:
        return super().encode(input_ids, np.ones_like(attention_mask))


class NoReorder(TorchEager):
    def reorder(self, state: Any, rows: np.ndarray) -> None:
        pass


class NoTrim(TorchEager):
    def trim(self, state: Any, accepted: np.ndarray) -> None:
        pass


def without_padding(rows: Histories) -> Histories:
    """Says of all positions that they are real."""
    return replace(rows, padding=np.zeros_like(rows.padding), ragged=False)


class NoPastMask(TorchEager):
    """After a ragged trim it attends to the garbage in front of the shorter histories."""

    def trim(self, state: Any, accepted: np.ndarray) -> None:
        super().trim(state, accepted)
        state.rows = without_padding(state.rows)


class LeftAligned(TorchEager):
    """After a ragged trim the shorter histories end too early: their relative positions are wrong."""

    @torch.inference_mode()
    def trim(self, state: Any, accepted: np.ndarray) -> None:
        super().trim(state, accepted)
        width = state.tokens.shape[1]
        for row, length in enumerate(state.rows.lengths.ravel()):
            roll = width - int(length)
            state.tokens[row] = state.tokens[row].roll(-roll, 0)
            for layer in state.cache.self_attention_cache.layers:
                layer.keys[row], layer.values[row] = (t[row].roll(-roll, 1) for t in (layer.keys, layer.values))
        state.rows = without_padding(state.rows)


class KeepsTheFirst(TorchEager):
    def keep(self, state: Any, sources: np.ndarray) -> None:
        super().keep(state, np.arange(len(sources)))


def bias_changed(model: Any, change: Any) -> TorchEager:
    other = copy.deepcopy(model)
    bias = other.decoder.block[0].layer[0].SelfAttention.relative_attention_bias
    with torch.no_grad():
        bias.weight.copy_(change(bias.weight))
    return TorchEager(other)


BROKEN = {
    "no mask": NoMask,
    "no reorder": NoReorder,
    "no trim": NoTrim,
    "no mask of the past": NoPastMask,
    "left-aligned past": LeftAligned,
    "keeps the wrong sources": KeepsTheFirst,
    "bias shifted": lambda model: bias_changed(model, lambda weight: weight.roll(1, 0)),
    "bias zero": lambda model: bias_changed(model, torch.zeros_like),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_backend_is_caught(tiny_t5, padded_batch, broken: str) -> None:
    model = tiny_t5()
    check_program(TorchEager(model), model, *padded_batch, 3, PROGRAM)
    with pytest.raises(AssertionError, match="not close"):
        check_program(BROKEN[broken](model), model, *padded_batch, 3, PROGRAM)


# Bad input


@pytest.mark.parametrize("thing", [None, "mini", 5, torch.nn.Linear(1, 1)])
def test_no_model(thing: Any) -> None:
    with pytest.raises(NotT5Error, match="type"):
        TorchEager(thing)


def test_a_model_without_a_head() -> None:
    from transformers import T5Config, T5EncoderModel, T5Model

    config = T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_heads=2, num_layers=1)
    for kind in (T5EncoderModel, T5Model):
        with pytest.raises(NotT5Error, match="ForConditionalGeneration"):
            TorchEager(kind(config))


@pytest.mark.parametrize("name", ["pad_token_id", "eos_token_id", "decoder_start_token_id"])
def test_a_configuration_without_its_tokens(tiny_t5, name: str) -> None:
    model = copy.deepcopy(tiny_t5())
    setattr(model.config, name, None)
    with pytest.raises(InputError, match=f"model.config.{name} is None"):
        TorchEager(model)


@pytest.fixture(params=[True, False], ids=["cached", "uncached"])
def begun(request: pytest.FixtureRequest, tiny_t5, padded_batch) -> tuple[TorchEager, Any]:
    """A backend and a state of 6 sources and 2 rows after a step of 3 tokens."""
    backend = TorchEager(tiny_t5(), use_cache=request.param)
    state = backend.start(backend.encode(*padded_batch), 2)
    backend.step(state, np.full((6, 2, 3), 5))
    return backend, state


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_bad_call_raises_and_leaves_the_state_as_it_was(begun, tiny_t5, padded_batch, case: str) -> None:
    (backend, state), (method, argument, match) = begun, BAD_CALLS[case]
    with pytest.raises(InputError, match=match):
        getattr(backend, method)(state, argument)
    new = np.random.default_rng(6).integers(3, 300, (6, 2, 2))
    whole = np.concatenate([np.full((6, 2, 3), 5), new], axis=2).reshape(12, 5)
    expected = teacher_forced(tiny_t5(), *(array.repeat(2, 0) for array in padded_batch), whole)[:, 3:]
    parity(backend.step(state, new).reshape(expected.shape), expected, atol=ATOL)


class FailsAt(TorchFunctionMode):
    """The call into torch with this number fails, counted from 0."""

    def __init__(self, number: int):
        super().__init__()
        self.left = number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == -1:
            raise MemoryError
        return func(*args, **(kwargs or {}))


@cached_and_not
@pytest.mark.parametrize("stride", [7, 11])
def test_a_failure_on_the_way_leaves_the_state_as_it_was(tiny_t5, padded_batch, use_cache: bool, stride: int) -> None:
    """Whichever call into torch it is, of a step every 7th or 11th."""
    new = np.random.default_rng(8).integers(3, 300, (6, 2, 3))
    calls = [("step", new), ("trim", np.arange(12).reshape(6, 2) % 4), ("step", new[:, :, :1]), ("step", new)]
    calls += [("trim", np.full((6, 2), 1)), ("reorder", [[1, 1]] * 6), ("keep", [4, 0])]
    backend = TorchEager(tiny_t5(), use_cache=use_cache)
    undisturbed, state = (backend.start(backend.encode(*padded_batch), 2) for _ in range(2))
    for method, argument in calls:
        getattr(backend, method)(undisturbed, argument)
        for number in count(0, stride if method == "step" else 1):
            try:
                with FailsAt(number):
                    getattr(backend, method)(state, argument)
            except MemoryError:
                continue
            break
        assert number, f"nothing of {method} failed"
    parity(backend.step(state, new[:2]), backend.step(undisturbed, new[:2]), atol=ATOL)


def test_only_the_last_step_can_be_trimmed(begun) -> None:
    backend, state = begun
    backend.trim(state, np.full((6, 2), 2))
    with pytest.raises(InputError, match="0 … 0"):
        backend.trim(state, np.full((6, 2), 1))


@pytest.mark.parametrize("rows", [0, -1, 1.0, "2", None, True])
def test_no_number_of_rows(tiny_t5, padded_batch, rows: Any) -> None:
    backend = TorchEager(tiny_t5())
    with pytest.raises(InputError, match="rows_per_source"):
        backend.start(backend.encode(*padded_batch), rows)


def test_sources_and_states_of_others_are_refused(tiny_t5, padded_batch) -> None:
    cached, uncached = TorchEager(tiny_t5()), TorchEager(tiny_t5(), use_cache=False)
    other = TorchEager(tiny_t5(seed=4))
    for source in (None, "source", other.encode(*padded_batch)):
        with pytest.raises(InputError, match="another model"):
            cached.start(source)
    new = np.full((6, 1, 1), 5)
    for state in (None, {}, other.start(other.encode(*padded_batch)), uncached.start(uncached.encode(*padded_batch))):
        for method, argument in (("step", new), ("reorder", new[:, 0] * 0), ("trim", new[:, 0] * 0), ("keep", [0])):
            with pytest.raises(InputError, match="not started by this backend"):
                getattr(cached, method)(state, argument)


@pytest.mark.parametrize(
    ("ids", "mask"),
    [(None, None), ([[300]], [[1]]), ([[-1]], [[1]]), ([[0.5]], [[1]]), ([[3]], [[2]]), ([[3]], [[1, 1]]), ([], [])],
)
def test_encode_takes_only_a_batch(tiny_t5, ids: Any, mask: Any) -> None:
    with pytest.raises(InputError, match="input_ids|attention_mask"):
        TorchEager(tiny_t5()).encode(ids, mask)


@settings(deadline=None, max_examples=60)
@given(method=st.sampled_from(["start", "step", "reorder", "trim", "keep"]), argument=junk)
def test_methods_raise_input_error_at_most(tiny_t5, padded_batch, method: str, argument: Any) -> None:
    backend = TorchEager(tiny_t5())
    source = backend.encode(*(array[:2] for array in padded_batch))
    state = backend.start(source, 2)
    if isinstance(argument, int) and method == "start":
        argument = min(argument, 50)  # a million rows are a legal wish
    try:
        getattr(backend, method)(source if method == "start" else state, argument)
    except InputError:
        logits = backend.step(state, np.full((2, 2, 1), 5))
        assert np.isfinite(logits).all()
