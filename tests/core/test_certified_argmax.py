"""Certified tokens are those of all exact logits, for any weights; uncertain ones are computed in full."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from programs import Watched
from refused import refused
from test_greedy_search import check_equals_generate

from bench.baselines.optimized_export import optimized_graph
from bench.baselines.ort_iobinding import OrtBound
from t5accel.backends.ort_cuda import OrtPointers
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.decoding import certified_argmax as shortlist
from t5accel.decoding.certified_argmax import (
    MAX_CANDIDATES,
    ApproxLogits,
    OutputHead,
    certify_argmax,
    error_bound,
    rounded_up,
)
from t5accel.decoding.encoder_cache import EncoderCache
from t5accel.decoding.greedy_search import argmax_tokens, greedy
from t5accel.errors import ExportError
from t5accel.graphs import shortlist_head as graphs_shortlist
from t5accel.graphs.builder import GraphBuilder
from t5accel.graphs.contract import (
    DECODER,
    MANIFEST,
    SHORTLIST,
    shortlist_spec,
)
from t5accel.graphs.export import export_model
from t5accel.graphs.export_cache import cached_export
from t5accel.graphs.layers import T5Layers
from t5accel.graphs.manifest import read_manifest, write_manifest
from t5accel.graphs.rewriting import count_nodes
from t5accel.graphs.shortlist_head import LEVELS, add_heads, maybe_quantize_head, quantize_head
from t5accel.graphs.weights import T5Weights
from t5accel.models.sizes import T5Dims

ONE_THREAD = SessionSettings(threads=1)
WITHOUT = SessionSettings(threads=1, shortlist=False)


# Both heads without a model


class Heads:
    """Both heads of a weight (V, d_model), and of a bias (V,) if there is one, on ONNX Runtime."""

    def __init__(self, rows: np.ndarray, bias: np.ndarray | None = None):
        dims = T5Dims(*rows.shape, 2, (1,), (1,), (1,), (4,), (4,), gated=False, tied=False)
        weights, head, graph = weights_of(rows, bias), quantize_head(rows), GraphBuilder("heads")
        graph.input("decoded", "float32", ["B", "K", "T", rows.shape[1]])
        graph.input("exact", "bool", [])
        add_heads(T5Layers(graph, weights, "decoder"), "decoded", shortlist_spec(weights.dims), head)
        for tensor in shortlist_spec(dims).outputs[:4]:
            graph.output(tensor.name, tensor.dtype, tensor.shape)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(
            graph.proto().SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self.rows, self.head = rows, OutputHead(rows, **head.bounds, bias=bias)
        self.bias = np.zeros(len(rows), np.float32) if bias is None else bias

    def near(self, hidden: np.ndarray) -> ApproxLogits:
        return ApproxLogits(*self._run(hidden, exact=False))

    def exact(self, hidden: np.ndarray) -> np.ndarray:
        return self._run(hidden, exact=True)[0][:, 0, 0]

    def _run(self, hidden: np.ndarray, *, exact: bool) -> list[np.ndarray]:
        return self.session.run(None, {"decoded": hidden[:, None, None], "exact": np.array(exact)})


def weights_of(rows: np.ndarray, bias: np.ndarray | None = None) -> T5Weights:
    dims = T5Dims(*rows.shape, 2, (1,), (1,), (1,), (4,), (4,), gated=False, tied=False)
    arrays = {"lm_head.weight": rows} | ({} if bias is None else {"final_logits_bias": bias})
    return T5Weights(arrays, dims, "relu", 1e-6, 32, 128, 1.0, {})


def engines(heads: Heads, hidden: np.ndarray) -> dict[str, np.ndarray]:
    """The logits (R, V) of engines that add in different orders, all in float32."""
    products = hidden[:, None] * heads.rows
    forwards = np.zeros(products.shape[:2], dtype=np.float32) + heads.bias
    backwards = np.zeros_like(forwards)
    for k in range(hidden.shape[1]):
        forwards += products[..., k]
        backwards += products[..., -1 - k]
    return {
        "ONNX Runtime": heads.exact(hidden), "BLAS": hidden @ heads.rows.T + heads.bias,
        "by size": np.sort(products).sum(axis=2) + heads.bias, "forwards": forwards,
        "backwards": backwards + heads.bias, "rounded once": float64_logits(heads, hidden).astype(np.float32),
    }  # fmt: skip


def float64_logits(heads: Heads, hidden: np.ndarray) -> np.ndarray:
    return hidden.astype(np.float64) @ heads.rows.T.astype(np.float64) + heads.bias


def check(heads: Heads, hidden: np.ndarray, suppressed: int | None = None) -> np.ndarray | None:
    """What is certified is the arg-max of every engine; and no near logit is further off than its bound."""
    near = heads.near(hidden)
    far = np.abs(near.logits[:, 0, 0] - float64_logits(heads, hidden))
    norms = ([rounded_up(float(norm), hidden.shape[1]) for norm in of.flat] for of in (near.norms, near.errors))
    bounds = np.array([error_bound(heads.head, *both) for both in zip(*norms, strict=True)])
    tokens = certify_argmax(heads.head, near, suppressed)
    if tokens is not None:
        assert tokens.dtype == np.int64 and tokens.shape == (len(hidden),)
        assert (far <= bounds[:, None] * 1.001).all(), "the near logits are not that near"
        for engine, logits in engines(heads, hidden).items():
            np.testing.assert_array_equal(tokens, argmax_tokens(logits, suppressed), err_msg=engine)
    return tokens


def gaussian(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def scaled_rows(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    return gaussian(rng, count, width) * np.float32(10) ** rng.integers(-30, 30, (count, 1)).astype(np.float32)


def outliers(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    """One dimension is far larger than the others."""
    array = gaussian(rng, count, width)
    array[:, rng.integers(width)] *= np.float32(10.0 ** rng.integers(1, 6))
    return array


def twins(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    """Every row stands there more than once, or nearly so."""
    array = gaussian(rng, -(-count // 3), width).repeat(3, axis=0)[:count]
    return array * (1 + np.float32(2) ** -23 * rng.integers(-1, 2, (count, 1)).astype(np.float32))


def one_enormous(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    array = gaussian(rng, count, width)
    array[rng.integers(count)] *= np.float32(10.0 ** rng.integers(3, 38))
    return array


def tiny(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    return gaussian(rng, count, width) * np.float32(10.0 ** rng.integers(-44, -30))


MAKERS = [gaussian, scaled_rows, outliers, twins, one_enormous, tiny]


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 2**32 - 1), sizes=st.tuples(st.integers(1, 400), st.integers(1, 48), st.integers(1, 4)),
    makers=st.tuples(st.sampled_from(MAKERS), st.sampled_from(MAKERS)), data=st.data(),
)  # fmt: skip
def test_certified_tokens_are_the_arg_max_of_any_engine(seed: int, sizes: Any, makers: Any, data: Any) -> None:
    rng, (vocabulary, width, count) = np.random.default_rng(seed), sizes
    rows, hidden = (
        np.ascontiguousarray(m(rng, n, width), np.float32) for m, n in zip(makers, (vocabulary, count), strict=True)
    )
    suppressed = data.draw(st.none() | st.integers(0, vocabulary - 1))
    biased = data.draw(st.none() | st.sampled_from(MAKERS))
    bias = None if biased is None else np.ascontiguousarray(biased(rng, vocabulary, 1)[:, 0], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        tokens = check(Heads(rows, bias), hidden, suppressed)
    event("not certain" if tokens is None else "certain")


def test_too_many_candidates_are_left_to_the_exact_head() -> None:
    rng = np.random.default_rng(1)
    for count in (MAX_CANDIDATES, MAX_CANDIDATES + 1):
        rows = np.concatenate(
            [gaussian(rng, 1, 64) + gaussian(rng, count, 64) * np.float32(1e-3), gaussian(rng, 99, 64)]
        )
        near = Heads(rows).near(rows[:1].copy())
        assert (certify_argmax(OutputHead(rows, **quantize_head(rows).bounds), near) is None) == (
            count > MAX_CANDIDATES
        )


def test_ties_are_not_certain() -> None:
    """Whichever order an engine adds in decides between equal rows; so does which of two equal logits comes first."""
    rows = gaussian(np.random.default_rng(3), 50, 16)
    hidden = rows[[7]].copy()
    assert check(Heads(rows), hidden).tolist() == [7]
    rows[30] = rows[7]
    assert check(Heads(rows), hidden) is None
    assert check(Heads(rows), hidden, suppressed=7).tolist() == [30]
    assert check(Heads(np.zeros_like(rows)), hidden) is None


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_numbers_that_are_not_finite_are_not_certain(value: float) -> None:
    heads, hidden = Heads(gaussian(np.random.default_rng(4), 50, 16)), np.ones((2, 16), dtype=np.float32)
    hidden[1, 3] = value
    assert certify_argmax(heads.head, heads.near(hidden)) is None
    near = heads.near(np.ones((2, 16), dtype=np.float32))
    near.logits[0, 0, 0, 5] = np.abs(value)
    assert certify_argmax(heads.head, near) is None, "nor is it where the near logits are broken"


@pytest.mark.parametrize("vocabulary", [1, 2])
def test_hardly_any_tokens(vocabulary: int) -> None:
    heads, hidden = Heads(gaussian(np.random.default_rng(2), vocabulary, 8)), np.ones((3, 8), dtype=np.float32)
    assert check(heads, hidden) is not None
    assert (check(heads, hidden, suppressed=0) is None) == (vocabulary == 1), "nothing is left to choose"


def test_sums_of_two_products_fit_into_16_bits() -> None:
    """CPUs without VNNI sum in 16 bits; all products of a row need 32."""
    assert 2 * 255 * LEVELS < 2**15
    assert graphs_shortlist.WIDEST * 255 * LEVELS < 2**31


def underrated(width: int = 64) -> tuple[Heads, np.ndarray]:
    """Token 0 is the likeliest, and its near logit is almost as much too small as the bound allows."""
    step = np.float32(1 / 128)  # of the quantised rows, whose largest number is LEVELS steps
    rows = np.full((3, width), 20 * step)
    rows[:, 0] = LEVELS * step
    rows[0] += np.where(np.arange(width) > 0, 0.49 * step, 0).astype(np.float32)  # all of it is lost
    rows[1, 1:30] += step  # nothing is lost
    rows[2] *= -1
    return Heads(rows.astype(np.float32)), np.ones((1, width), dtype=np.float32)


def test_the_bound_is_as_tight_as_it_can_be() -> None:
    heads, hidden = underrated()
    near, logits = heads.near(hidden), heads.exact(hidden)[0]
    bound = error_bound(heads.head, near.norms.item(), near.errors.item())
    assert 0.97 < (logits - near.logits.ravel())[0] / bound < 1
    assert logits[0] > logits[1] and near.logits.ravel()[0] < near.logits.ravel()[1], "near logits mislead"
    assert check(heads, hidden).tolist() == [0]


BROKEN: dict[str, Callable[..., float]] = {
    "half of it": lambda head, norm, error: error_bound(head, norm, error) / 2,
    "the head's own error forgotten": lambda head, norm, error: head.largest_row * error + 1e-3,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_bound_is_caught(monkeypatch, name: str) -> None:
    monkeypatch.setattr(shortlist, "error_bound", BROKEN[name])
    with pytest.raises(AssertionError, match="Mismatched elements"):
        check(*underrated())


def test_the_bias_decides() -> None:
    """A token wins by its bias alone. What a sum may round away decides nothing."""
    rng = np.random.default_rng(6)
    rows, hidden = gaussian(rng, 300, 64), gaussian(rng, 1, 64)
    bias = np.zeros(300, np.float32)
    bias[5] = 100
    assert check(Heads(rows, bias), hidden).tolist() == [5] != check(Heads(rows), hidden).tolist()
    rows[6], bias[6] = rows[5], np.nextafter(bias[5], np.float32(1000))
    assert check(Heads(rows, bias), hidden) is None
    bias[6] = 101
    assert check(Heads(rows, bias), hidden).tolist() == [6]
    assert check(Heads(rows, gaussian(rng, 300) * np.float32(0.1)), gaussian(rng, 50, 64)) is not None
    even = gaussian(rng, 1, 16) + gaussian(rng, 200, 16) * np.float32(1e-5)
    large = np.full(200, 1e3, np.float32)  # where logits are rounded far more coarsely than products are
    assert check(Heads(even, large), gaussian(rng, 1, 16)) is None


def test_wrong_approximate_logits_are_noticed() -> None:
    """As one that saturates in 16 bits."""
    rng = np.random.default_rng(5)
    heads, hidden = Heads(gaussian(rng, 300, 32)), gaussian(rng, 1, 32)
    near = heads.near(hidden)
    near.logits[0, 0, 0, 123] = near.logits.max() + 10
    assert certify_argmax(heads.head, near) is None


# The quantised head


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1), maker=st.sampled_from(MAKERS), count=st.integers(1, 90), at_once=st.integers(1, 99)
)
def test_the_bounds_of_a_quantised_head_hold(seed: int, maker: Any, count: int, at_once: int) -> None:
    rows = np.ascontiguousarray(maker(np.random.default_rng(seed), count, 24), dtype=np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs_shortlist, "ROWS_AT_ONCE", at_once)
        head = quantize_head(rows)
    assert head.integers.shape == (24, count) and head.integers.dtype == np.int8 and head.scales.dtype == np.float32
    assert np.abs(head.integers.astype(int)).max() <= LEVELS and (head.scales > 0).all()
    copied = head.integers.T * head.scales[:, None].astype(np.float64)
    assert np.linalg.norm(copied, axis=1).max() <= head.largest_row
    assert np.linalg.norm(rows - copied, axis=1).max() <= head.largest_error


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_head_that_is_not_finite(value: float) -> None:
    rows = np.ones((300, 8), dtype=np.float32)
    rows[299, 7] = value
    refused(quantize_head, "rows", rows, match="infinity or NaN")
    refused(partial(maybe_quantize_head, weights_of(rows)), "wanted", True, match="infinity or NaN")
    assert maybe_quantize_head(weights_of(rows), None) is None and maybe_quantize_head(weights_of(rows), False) is None


def test_which_heads_get_a_shortlist(monkeypatch) -> None:
    rows = np.ones((300, 8), dtype=np.float32)
    assert maybe_quantize_head(weights_of(rows), None) is None
    monkeypatch.setattr(graphs_shortlist, "SMALLEST_BYTES", rows.nbytes)
    assert (
        maybe_quantize_head(weights_of(rows), None) is not None and maybe_quantize_head(weights_of(rows), False) is None
    )
    monkeypatch.setattr(graphs_shortlist, "WIDEST", 7)
    assert maybe_quantize_head(weights_of(rows), None) is None
    refused(partial(maybe_quantize_head, weights_of(rows)), "wanted", True, match="d_model")
    refused(partial(maybe_quantize_head, weights_of(rows[:3])), "wanted", True, match="A head of 96 bytes")
    refused(partial(maybe_quantize_head, weights_of(rows)), "wanted", "yes", 2, [], np.ones(3), match="shortlist")
    monkeypatch.setattr(graphs_shortlist, "WIDEST", 8)
    refused(partial(maybe_quantize_head, weights_of(rows, rows[:, 0])), "wanted", True, match="A bias of 1200 bytes")
    many = np.ones((1024, 8), dtype=np.float32)
    assert maybe_quantize_head(weights_of(many, many[:, 0]), None) is not None
    assert maybe_quantize_head(weights_of(many, many[:, 0] * np.float32(np.inf)), None) is None


# In an export


@pytest.fixture(scope="module")
def shortlisted(exported) -> Callable[..., Path]:
    """As `exported`, with a shortlist."""
    return partial(exported, shortlist=True)


@pytest.fixture(scope="module")
def opened(opened) -> Callable[..., OrtNumpy]:
    return partial(opened, shortlist=True)


@pytest.fixture
def own(shortlisted) -> OrtNumpy:
    """A backend that the test may patch, or count on."""
    return OrtNumpy(shortlisted(), settings=ONE_THREAD)


def test_its_graph_keeps_its_contract(shortlisted, kind: str) -> None:
    folder = shortlisted(kind)
    onnx.checker.check_model(str(folder / SHORTLIST), full_check=True)
    model, spec = onnx.load(folder / SHORTLIST, load_external_data=False), shortlist_spec(read_manifest(folder).dims)
    assert {node.domain for node in model.graph.node} == {""}, "nothing but standard operators"
    assert [entry.domain for entry in model.opset_import] == [""]
    for declared, tensors in ((model.graph.input, spec.inputs), (model.graph.output, spec.outputs)):
        assert [value.name for value in declared] == [tensor.name for tensor in tensors]
    with optimized_graph(folder / SHORTLIST) as optimized:
        nodes = count_nodes(optimized)
    assert nodes["com.microsoft.MatMulIntegerToFloat"] == 1 and nodes["If"] == 1, "one pass over the quantised head"


def test_the_rows_are_those_of_the_model_and_mapped_once(tiny_t5, opened, kind: str) -> None:
    backend = opened(OrtNumpy, kind)
    rows = backend.shortlist.head.rows
    np.testing.assert_array_equal(rows, tiny_t5(kind).lm_head.weight.detach().numpy())
    embedding = backend._weights["shared.weight"].numpy()
    assert np.shares_memory(rows, embedding) == backend.dims.tied


def test_the_export_cache_adds_a_shortlist_to_large_heads(tiny_t5, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("T5ACCEL_CACHE", str(tmp_path))
    assert not read_manifest(cached_export(tiny_t5())).shortlist
    monkeypatch.setattr(graphs_shortlist, "SMALLEST_BYTES", 300 * 32 * 4)
    folder = cached_export(tiny_t5(seed=2))
    assert read_manifest(folder).shortlist and OrtNumpy(folder, settings=ONE_THREAD).shortlist


@pytest.mark.parametrize("wrong", [
    {"rows": None}, {"rows": {}}, {"rows": dict(offset=-1, shape=[300, 32], dtype="float32")},
    {"rows": dict(offset=10**9, shape=[300, 32], dtype="float32")},
    {"rows": dict(offset=0, shape=[], dtype="float32")}, {"inputs": []}, {"inputs": None}, {"outputs": [{}]},
], ids=str)  # fmt: skip
def test_a_damaged_manifest_entry_is_refused(shortlisted, tmp_path: Path, wrong: dict[str, Any]) -> None:
    folder = shutil.copytree(shortlisted(), tmp_path / "copy")
    content = json.loads((folder / MANIFEST).read_text())
    write_manifest(folder, content | {"shortlist": content["shortlist"] | wrong})
    with pytest.raises(ExportError, match="damaged"):
        read_manifest(folder, verify=False)


# Equal tokens


def test_greedy_equals_generate_where_rows_end_early(tiny_t5, shortlisted, ending, padded_batch) -> None:
    sizes = ending()
    backend = OrtNumpy(shortlisted(**sizes), settings=ONE_THREAD)
    for shortest in (0, 5):
        check_equals_generate(backend, tiny_t5(**sizes), *padded_batch, max_new_tokens=14, min_new_tokens=shortest)
    assert backend.shortlist.fallbacks <= backend.shortlist.steps / 10


operations = st.tuples(
    st.sampled_from(["step", "next", "next", "rollback", "reorder", "select_sources"]), st.integers(0, 2**16)
)


@pytest.mark.parametrize("runtime", [OrtNumpy, OrtBound])
@settings(deadline=None, max_examples=30)
@given(
    program=st.lists(operations, max_size=8), rows=st.integers(1, 3), kind=st.sampled_from(["deeper-decoder", "umt5"])
)
def test_random_programs_equal_a_backend_without_a_shortlist(
    opened, runtime, padded_batch, program: Any, rows: int, kind: str
) -> None:
    """Beside a backend without a shortlist, to the last bit."""
    backends = opened(runtime, kind), opened(runtime, kind, WITHOUT)
    states = [backend.new_state(backend.encode(*padded_batch), rows) for backend in backends]
    last, batch = 0, 6
    for name, seed in [*program, ("next", 1), ("step", 2)]:
        rng = np.random.default_rng(seed)
        if name in ("step", "next"):
            last, suppressed = int(rng.integers(1, 4)), rng.choice([None, 1, 250])
            new = rng.integers(3, 300, (batch, rows, last))
            logits = backends[1].step(states[1], new)
            if name == "step":
                np.testing.assert_array_equal(backends[0].step(states[0], new), logits)
            else:
                suppressed = argmax_tokens(logits[:, :, -1]).item(0) if suppressed == 250 else suppressed
                tokens = backends[0].next_tokens(states[0], new, suppressed=suppressed)
                assert tokens.dtype == np.int64 and tokens.shape == (batch, rows)
                np.testing.assert_array_equal(tokens, argmax_tokens(logits[:, :, -1], suppressed))
            continue
        argument = {
            "rollback": rng.integers(0, last + 1, (batch, rows)), "reorder": rng.integers(0, rows, (batch, rows)),
            "select_sources": rng.permutation(batch)[: max(1, batch - 1)],
        }[name]  # fmt: skip
        for backend, state in zip(backends, states, strict=True):
            getattr(backend, name)(state, argument)
        last, batch = (0 if name == "rollback" else last), states[0].rows.shape[0]
    for one, other in zip(*(state.past for state in states), strict=True):
        np.testing.assert_array_equal(backends[0]._array(one), backends[1]._array(other))


# When it is used


def steps_of(backend: OrtNumpy, batch: Any, rows: int, count: int = 1) -> int:
    """How many of some greedy steps were tried with the shortlist."""
    before, state = backend.shortlist.steps, backend.new_state(backend.encode(*batch), rows)
    for _ in range(count):
        backend.next_tokens(state, np.full((len(batch[0]), rows, 1), 7))
    return backend.shortlist.steps - before


def test_large_batches_use_the_exact_head(own, padded_batch) -> None:
    single = [array[:1] for array in padded_batch]
    most = shortlist.MAX_ROWS
    assert steps_of(own, single, most) == 1 and steps_of(own, single, most + 1) == 0


HARD: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "every row twice": ("deeper-decoder", lambda weight: weight[150:].copy_(weight[:150])),
    "zero": ("gated-untied", lambda weight: weight.zero_()),
    "one enormous row": ("deeper-decoder", lambda weight: weight[222].mul_(1e5)),
    "one enormous dimension": ("gated-untied", lambda weight: weight[:, 5].mul_(1e4)),
    "one sign": ("deeper-decoder", lambda weight: weight.abs_()),
}


@pytest.mark.parametrize("hard", HARD)
def test_heads_that_are_hard_to_certify(tiny_t5, padded_batch, tmp_path: Path, hard: str) -> None:
    kind, change = HARD[hard]
    model = copy.deepcopy(tiny_t5(kind))
    with torch.no_grad():
        change(model.lm_head.weight)
    export_model(model, tmp_path / "hard", shortlist=True)
    near, exact = (OrtNumpy(tmp_path / "hard", settings=settings_) for settings_ in (ONE_THREAD, WITHOUT))
    options = dict(max_new_tokens=12, min_new_tokens=12)
    tokens = greedy(near, *padded_batch, **options).sequences
    np.testing.assert_array_equal(tokens, greedy(exact, *padded_batch, **options).sequences)
    if hard in ("every row twice", "zero"):
        assert (tokens < 150).all(), "the lowest id of equal logits"
        assert near.shortlist.fallbacks == near.shortlist.steps == 12
    assert near.shortlist.steps == 12


def test_frequent_fallbacks_disable_it(own, padded_batch, monkeypatch) -> None:
    monkeypatch.setattr(shortlist, "certify_argmax", lambda *_: None)
    single = [array[:1] for array in padded_batch]
    tried = steps_of(own, single, 1, count=60)
    assert tried == own.shortlist.fallbacks < 30
    assert steps_of(own, single, 1) == 0 and steps_of(own, single, 2) == 1, "of so many rows"


def test_rare_fallbacks_do_not_disable_it(own, padded_batch, monkeypatch) -> None:
    answers = iter([*[None] * 16, *[np.array([5])] * 100])
    monkeypatch.setattr(shortlist, "certify_argmax", lambda *_: next(answers))
    assert steps_of(own, [array[:1] for array in padded_batch], 1, count=100) == 100


def test_next_tokens_without_a_shortlist(exported, opened, shortlisted, padded_batch) -> None:
    plain = OrtNumpy(exported("deeper-decoder"), settings=ONE_THREAD)
    pointers = OrtPointers(shortlisted(), settings=ONE_THREAD)
    assert plain.shortlist is pointers.shortlist is opened(OrtNumpy, settings=WITHOUT).shortlist is None
    expected = greedy(opened(OrtNumpy), *padded_batch, max_new_tokens=6).sequences
    for backend in (plain, pointers, opened(OrtNumpy, settings=WITHOUT)):
        assert Path(backend.decoder._model_path).name == DECODER
        np.testing.assert_array_equal(greedy(backend, *padded_batch, max_new_tokens=6).sequences, expected)


def test_the_encoder_cache_keeps_the_shortlist(own, padded_batch) -> None:
    cached = EncoderCache(own)
    tokens = [greedy(backend, *padded_batch, max_new_tokens=6).sequences for backend in (own, cached, cached)]
    np.testing.assert_array_equal(tokens[0], tokens[2])
    assert cached.hits == 6 and cached.shortlist.steps == 18


# Failures


@pytest.mark.parametrize("runs", [0, 1])
def test_a_step_that_fails_leaves_the_state_as_it_was(own, padded_batch, monkeypatch, runs: int) -> None:
    """The first run, of near logits, or the second, of exact ones."""
    monkeypatch.setattr(shortlist, "certify_argmax", lambda *_: None)
    state, left = own.new_state(own.encode(*padded_batch)), [runs]

    def fail(run: Callable[..., Any], *arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("no memory")
        return run(*arguments)

    own.next_tokens(state, np.full((6, 1, 2), 5))
    rows, past = state.rows, state.past
    own.decoder = Watched(own.decoder, fail)
    with pytest.raises(RuntimeError, match="no memory"):
        own.next_tokens(state, np.full((6, 1, 1), 5))
    assert state.rows is rows and state.past is past
