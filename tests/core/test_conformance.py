"""Every backend keeps the protocol: transformers' own logits by whatever mixture of steps, trims and reorderings.

What only one runtime has (its graphs, its memory, how it fails) is in that runtime's own tests.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnxruntime import InferenceSession
from programs import (
    ATOL,
    PROGRAM,
    Watched,
    broken,
    check_as_it_was,
    check_program,
    histories_of,
    operations,
    pruned_and_silenced,
)
from test_encoder_cache import check, masked_variants
from test_greedy_search import check_equals_generate

from bench.baselines.layout_backends import HybridOnnxT5, MergedGraphs, ThreeGraphs, WholeGraph
from bench.baselines.layouts import export_layout
from bench.baselines.ort_iobinding import OrtBound
from t5accel.backends.ort_cuda import OrtPointers
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.ort_static import FusedDecoder, OrtStatic
from t5accel.backends.torch_eager import TorchEager
from t5accel.backends.torch_static import TorchStatic
from t5accel.decoding.backend import Backend
from t5accel.decoding.encoder_cache import EncoderCache
from t5accel.graphs.export import export_model
from t5accel.parity import assert_close

ONE_THREAD = SessionSettings(threads=1)
Make = Callable[[Any, Path], Any]  # from a model and an empty folder to a backend


def of_export(runtime: type[OrtNumpy], model: Any, folder: Path) -> OrtNumpy:
    export_model(model, folder, step=runtime is OrtStatic, check_logits=False)
    return runtime(folder, settings=ONE_THREAD)


def of_layout(runtime: Any, model: Any, folder: Path) -> Any:
    export_layout(model, folder, runtime.layout)
    return runtime(folder, settings=ONE_THREAD)


def hybrid(model: Any, folder: Path) -> HybridOnnxT5:
    export_layout(model, folder, "onnxt5")
    return HybridOnnxT5(folder, model, settings=ONE_THREAD)


ON_ONNX = (OrtNumpy, OrtBound, OrtPointers, OrtStatic)
EXPORTS: dict[str, Make] = {kind.__name__: partial(of_export, kind) for kind in ON_ONNX}
LAYOUTS: dict[str, Make] = {kind.__name__: partial(of_layout, kind) for kind in (ThreeGraphs, MergedGraphs, WholeGraph)}
TORCH: dict[str, Make] = {
    "TorchEager": lambda model, _: TorchEager(model),
    "uncached": lambda model, _: TorchEager(model, use_cache=False),
    "TorchStatic": lambda model, _: TorchStatic(model, buckets=(8, 16, 32)),
    "HybridOnnxT5": hybrid,
}
BACKENDS = {**EXPORTS, **LAYOUTS, **TORCH}
# Whose pasts grow, and whose batches shrink; what TorchStatic does instead is in its own tests.
GROWING = [name for name in (*EXPORTS, *TORCH) if name != "TorchStatic"]
Opened = Callable[..., Any]


@pytest.fixture(scope="session")
def opened(tiny_t5, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """``opened(name, kind)``: that backend of that ``tiny_t5``. Shared: patch one of your own."""

    @cache
    def open_(name: str, kind: str = "deeper-decoder", **sizes: Any) -> Any:
        return BACKENDS[name](tiny_t5(kind, **sizes), tmp_path_factory.mktemp(f"{name}-{kind}"))

    return open_


@pytest.fixture(scope="session", params=BACKENDS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_satisfies_the_protocol(opened, name: str) -> None:
    backend = opened(name, eos_token_id=7)
    assert isinstance(backend, Backend)
    assert (backend.vocab_size, backend.pad_token_id, backend.eos_token_id) == (300, 0, 7)
    assert backend.decoder_start_token_id == 0


# Logits under teacher forcing


def test_a_source_can_be_started_twice(opened, name: str, padded_batch) -> None:
    backend = opened(name)
    source, tokens = backend.encode(*padded_batch), histories_of(6, 1, 4)
    first, second = backend.new_state(source), backend.new_state(source)
    backend.step(first, tokens[:, :, :2])
    backend.select_sources(first, np.array([5, 1]))
    assert_close(backend.step(second, tokens), backend.step(backend.new_state(source), tokens), atol=ATOL)


def test_takes_views_and_keeps_none_of_the_tokens(opened, name: str, padded_batch) -> None:
    backend, tokens = opened(name), histories_of(6, 2, 4)
    expected = backend.step(backend.new_state(backend.encode(*padded_batch), 2), tokens)
    backwards = [array[::-1].copy()[::-1] for array in (*padded_batch, tokens)]
    frozen = [array.copy() for array in (*padded_batch, tokens)]
    for array in frozen:
        array.setflags(write=False)
    for ids, mask, new in (backwards, frozen):
        state = backend.new_state(backend.encode(ids, mask), 2)
        np.testing.assert_array_equal(backend.step(state, new), expected)
        for method, argument in (("rollback", [[3, 4]] * 6), ("reorder", [[1, 0]] * 6), ("select_sources", [1, 0])):
            array = np.array(argument)
            array.setflags(write=False)
            getattr(backend, method)(state, array)
    state = backend.new_state(backend.encode(*padded_batch), 2)
    lent = tokens.copy()
    first = backend.step(state, lent[:, :, :2])
    lent[:, :, :2] = 7
    assert_close(first, expected[:, :, :2], atol=ATOL)
    assert_close(backend.step(state, lent[:, :, 2:]), expected[:, :, 2:], atol=ATOL)


def test_who_writes_to_logits_changes_nothing(opened, name: str, padded_batch) -> None:
    backend, new = opened(name), histories_of(6, 1, 5)
    source = backend.encode(*padded_batch)
    clean, written = backend.new_state(source), backend.new_state(source)
    for chunk in np.split(new, [2, 3], axis=2):
        expected, logits = backend.step(clean, chunk), backend.step(written, chunk)
        np.testing.assert_array_equal(logits, expected)
        if logits.flags.writeable:
            logits[:] = np.nan


# Any mixture of steps, trims, reorderings and leaving sources


@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_any_program_of_operations(opened, name: str, tiny_t5, padded_batch, data: st.DataObject) -> None:
    ids, mask = padded_batch
    sources, rows = data.draw(st.integers(1, 4), "sources"), data.draw(st.integers(1, 3), "rows")
    program = [*data.draw(st.lists(operations, max_size=7), "program"), ("step", 0)]
    check_program(opened(name), tiny_t5(), ids[:sources], mask[:sources], rows, program)


def test_the_program_on_every_kind(opened, name: str, tiny_t5, kind: str, padded_batch) -> None:
    check_program(opened(name, kind), tiny_t5(kind), *padded_batch, 3, PROGRAM)


PRUNED = {"encoder.block.1.layer.0.SelfAttention": {3}, "decoder.block.1.layer.0.SelfAttention": {0, 2},
          "decoder.block.2.layer.1.EncDecAttention": {1}}  # fmt: skip


@pytest.mark.parametrize("name", [*EXPORTS, *LAYOUTS])
def test_the_program_on_a_pruned_model(name: str, tiny_t5, padded_batch, tmp_path: Path) -> None:
    """Layers of unequal heads, in either attention: as a whole model whose other heads are silent."""
    pruned, silenced = pruned_and_silenced(tiny_t5(), PRUNED)
    backend = BACKENDS[name](pruned, tmp_path)
    dims = backend.dims
    assert (dims.encoder_heads, dims.decoder_heads, dims.cross_heads) == ((4, 3), (4, 2, 4), (4, 4, 3))
    check_program(backend, silenced, *padded_batch, 3, PROGRAM)
    if name in EXPORTS:
        check(EncoderCache(backend), TorchEager(silenced), [padded_batch])


# A failure on the way


def with_runs(backend: Any, around: Callable[..., Any]) -> dict[str, Any]:
    """The attributes of a backend that hold sessions, each watched."""
    found: dict[str, Any] = {}
    for name, value in vars(backend).items():
        if isinstance(value, FusedDecoder):
            found[name] = copy.copy(value)
            found[name].session = Watched(value.session, around)
        if isinstance(value, InferenceSession):
            found[name] = Watched(value, around)
        elif isinstance(value, dict) and any(isinstance(item, InferenceSession) for item in value.values()):
            found[name] = {key: Watched(session, around) for key, session in value.items()}
    return found


@pytest.mark.parametrize(("number", "name"), [*enumerate([*EXPORTS, *LAYOUTS, "HybridOnnxT5"])])
def test_a_step_that_fails_leaves_the_state_as_it_was(opened, tiny_t5, padded_batch, number: int, name: str) -> None:
    """Before the graph has run, or, of every second backend, after it."""
    own, late = copy.copy(opened(name)), number % 2
    error = KeyboardInterrupt() if late else RuntimeError("no memory")

    def fail(run: Callable[..., Any], *arguments: Any) -> None:
        if late:
            run(*arguments)
        raise error

    getattr(own, "decoder", None)  # which one backend opens only when it is needed
    failing = with_runs(own, fail)
    assert failing
    working, state = {name: vars(own)[name] for name in failing}, own.new_state(own.encode(*padded_batch), 2)
    for length in (3, 1, 2):  # a first step, and later ones
        vars(own).update(failing)
        for _ in range(2):
            with pytest.raises(type(error)):
                own.step(state, np.full((6, 2, length), 9))
        vars(own).update(working)
        if length == 3:
            own.step(state, np.full((6, 2, 3), 5))
    own.reorder(state, np.array([[1, 0]] * 6))  # reads the past of before
    check_as_it_was(own, state, tiny_t5(), padded_batch)


# What `check_program` catches


def attends_to_what_was_rolled_back(self: TorchEager, state: Any, accepted: np.ndarray) -> None:
    TorchEager.rollback(self, state, accepted)
    state.rows = replace(state.rows, padding=np.zeros_like(state.rows.padding), ragged=False)


def with_a_wrong_bias(model: Any) -> TorchEager:
    other = copy.deepcopy(model)
    bias = other.decoder.block[0].layer[0].SelfAttention.relative_attention_bias
    bias.weight.data = bias.weight.data.roll(1, 0)
    return TorchEager(other)


BROKEN: dict[str, Callable[[Any], TorchEager]] = {
    "a mask of ones": broken(encode=lambda self, ids, mask: TorchEager.encode(self, ids, np.ones_like(mask))),
    "no reorder": broken(reorder=lambda self, state, rows: None),
    "lengths alone reordered": broken(
        reorder=lambda self, state, rows: setattr(state, "rows", state.rows.reordered(rows)[0])
    ),
    "no rollback": broken(rollback=lambda self, state, accepted: None),
    "no mask of the past": broken(rollback=attends_to_what_was_rolled_back),
    "keeps the wrong sources": broken(
        select_sources=lambda self, state, sources: TorchEager.select_sources(self, state, np.arange(len(sources)))
    ),
    "a wrong bias": with_a_wrong_bias,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_backend_is_caught(tiny_t5, padded_batch, name: str) -> None:
    with pytest.raises(AssertionError, match="not close"):
        check_program(BROKEN[name](tiny_t5()), tiny_t5(), *padded_batch, 3, PROGRAM)


# Tokens


@pytest.mark.parametrize("kind", ["deeper-decoder", "umt5"])
def test_greedy_equals_generate(opened, name: str, tiny_t5, kind: str, padded_batch) -> None:
    """Of other kinds, the logits are compared above."""
    for options in (dict(max_new_tokens=12), dict(max_new_tokens=6, decoder_input_ids=[[9, 8]] * 6)):
        check_equals_generate(opened(name, kind), tiny_t5(kind), *padded_batch, **options)


@pytest.mark.parametrize("name", [*GROWING, *LAYOUTS])
def test_greedy_equals_generate_where_rows_end_early(opened, name: str, tiny_t5, ending, padded_batch) -> None:
    sizes, left = ending(), []
    backend = opened(name, **sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            backend,
            "select_sources",
            lambda s, kept: (left.append(len(kept)), type(backend).select_sources(backend, s, kept)),
        )
        check_equals_generate(backend, tiny_t5(**sizes), *padded_batch, max_new_tokens=14)
    assert left, "sources should have left the batch"


@pytest.mark.parametrize("name", GROWING)
def test_the_encoder_cache_works_on_it(opened, name: str, tiny_t5, padded_batch) -> None:
    backend = opened(name)
    check(EncoderCache(backend), TorchEager(tiny_t5()), [*masked_variants(list(range(5, 12))), padded_batch])
    assert hash(backend.fingerprint()) == hash(backend.fingerprint())
    assert backend.fingerprint() != opened(name, seed=4).fingerprint()
