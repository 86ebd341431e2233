"""Junk at every public entry of the engine: our own errors come out, nothing else, and nothing is lost by it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from programs import Strict
from refused import refused

from bench.baselines.ort_iobinding import OrtBound
from t5accel import machine
from t5accel.api import accelerate
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.decoding.beam import beam_search
from t5accel.decoding.ngram_lookup import prompt_lookup
from t5accel.decoding.sampling import SamplingParams, sample
from t5accel.decoding.speculation import speculative
from t5accel.distillation.importance import select_kept
from t5accel.distillation.losses import Objective
from t5accel.distillation.pruning import PruneConfig
from t5accel.distillation.student import DistillConfig
from t5accel.errors import T5AccelError
from t5accel.graphs.export import export_model
from t5accel.models.random_init import random_t5
from t5accel.precision.recipes import RECIPES, Recipe, Scheme
from t5accel.timing import Candidate, Latency, Work, compare, measure

EXAMPLES = 60  # at each entry
often = settings(
    max_examples=EXAMPLES, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip

numbers = st.one_of(
    st.integers(-3, 400), st.sampled_from([2**31, 2**63, -(2**63), 2**64, 10**30]), st.booleans(),
    st.floats(allow_nan=True, allow_infinity=True), st.none(), st.just(1j),
)  # fmt: skip
texts = st.one_of(st.text(max_size=8), st.binary(max_size=8), st.just("mini\0"), st.just("\ud800"))
arrays = hnp.arrays(
    st.sampled_from(["int64", "int32", "uint8", "uint64", "float32", "float64", "bool", "complex64", "U3", "O"]),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    elements=None,
    fill=st.nothing(),
).map(lambda array: array) | st.sampled_from(
    [np.array(None), np.zeros((2, 3), "datetime64[s]"), np.zeros((2, 3), [("a", "i4")]), np.empty((0, 3)), np.zeros(0)]
)  # fmt: skip
tensors = st.sampled_from(
    [torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.bfloat16),
     torch.zeros(2, 3, device="meta"), torch.full((2, 3), -1), torch.zeros(2, 3).to_sparse(), torch.zeros(0, 2)]
)  # fmt: skip
lists = st.recursive(numbers, lambda inner: st.lists(inner, max_size=3), max_leaves=8)
# Nearly right: of the right type and rank, with a wrong size or value now and then.
nearly = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(-1, 310)).map(
    lambda given: np.full(given[:3], given[3])
) | st.tuples(st.integers(1, 7), st.integers(1, 4), st.integers(-1, 310)).map(lambda g: np.full(g[:2], g[2]))
junk = st.one_of(numbers, texts, arrays, tensors, lists, nearly, st.dictionaries(texts, numbers, max_size=2))


# What each door refuses, by argument; `Strict` fails if any of it reaches a backend.


NAN, INF = float("nan"), float("inf")
INT8, DYNAMIC = Scheme(), Scheme("dynamic")
GROUPS = ("decoder.0.q", "decoder.wo", "encoder.-1.wo", "decoder.0.wo ", "shared", "", "lm_head.weight", 5)
SIZES = dict(vocab_size=50, d_model=16, d_kv=6, d_ff=16, num_heads=2, num_layers=1)
WORK = Work(batch=1, source_tokens=64, new_tokens=32)
A, B = Candidate("a", print, WORK), Candidate("b", print, WORK)
COUNT = (0, -1, 1.5, True, "1")
REFUSED: list[tuple[Any, dict[str, tuple[Any, ...]]]] = [
    (partial(beam_search, Strict(), [[3]]), dict(
        num_beams=(0, -4, 2.0, True, 12), num_return_sequences=(0, 5), early_stopping=("x", 1, np.array(["never"])),
        length_penalty=("1", True, NAN, -INF, 10**400))),
    (partial(beam_search, Strict(), [[3]], num_beams=1), dict(num_return_sequences=(2,))),
    (partial(prompt_lookup, Strict(), [[3]]), dict(max_ngram=(0, 2.0, 10**9), max_draft=(0, None))),
    (partial(speculative, Strict(), input_ids=[[3]]), dict(draft=(None, "mini-d1", 5))),
    (partial(speculative, Strict(), Strict(), [[3]]), dict(max_draft=(0,), seed=(-1,), sampling=(0.7,))),
    (partial(sample, Strict(), [[3]]), dict(seed=(-1, 0.5, None), num_return_sequences=(0,), beams=(3,),
                                            temperature=(0,))),
    (partial(sample, Strict(), [[3]], top_k=3), dict(sampling=(SamplingParams(),))),
    (SamplingParams, dict(
        temperature=(0, -1.0, INF, NAN, "1", True), repetition_penalty=(0.0, None, 1e-310, 10**400), top_k=(-1, 2.0),
        top_p=(0.0, 1.01, [0.5]), min_p=(-0.1, 1.5, 1j))),
    (SessionSettings, dict(threads=(0, 1.5, 5000), device=("tpu", [], None), spinning=(1,), arena=("no",),
                           shortlist=(0, None, "no"))),
    (Scheme, dict(method=("int8", None, ["dynamic"]), bits=(2, 16, 8.0, True), block_size=(8, 48, -32, None),
                  accuracy_level=(-1, 5, 4.0), per_channel=(1, None), reduce_range=(1, None))),
    (Recipe, dict(name=(None, "", "two words", "a/b", "x" * 61, "int8\n"))),
    (partial(Recipe, "x"), dict(
        dtype=("fp16", None, np.float16), encoder=("int8", RECIPES["int8"]), decoder=("int8",), head=("int8",),
        embedding=("int8", DYNAMIC, Scheme("static")),
        overrides=(None, ("lm_head",), (("lm_head", "int8"),), {"lm_head": INT8}, (("embedding", DYNAMIC),),
                   *(((one, None),) for one in GROUPS)))),
    (RECIPES["int8"].without, dict(groups=tuple([one] for one in GROUPS))),
    (Objective, dict(labels=(0.0, -1.0, NAN))),
    (partial(Objective, labels=1.0), dict(hidden=(-0.1,), temperature=(0.0, -2.0, NAN), smoothing=(1.0, -0.1))),
    (DistillConfig, dict(loss=("magic", None), steps=(0, -5), encoder_share=(-0.1, 2))),
    (PruneConfig, dict(importance=("luck",), steps=(-1,), rising=(-0.1, 1.5), every=(0,), examine=(0,))),
    (partial(select_kept, {"0.SelfAttention": torch.ones(4)}), dict(
        heads=(1.0, 1, -0.1, NAN, True, "0.5", None), neurons=(1.0, -0.1), multiple_of=COUNT)),
    (random_t5, dict(sizes=(None, "t5-small", *(SIZES | one for one in (
        dict(num_heads=-1), dict(d_model="wide"), dict(feed_forward_proj="a-b-c")))))),
    (partial(random_t5, SIZES), dict(kind=("bart", ["t5"], None), seed=(-1, 2**63, 1.5, "1", None))),
    (machine.bandwidth_bytes_per_s, dict(size_bytes=(100,))), (partial(machine.read_rates, 1 << 20), dict(passes=(0,))),
    (machine.gemm_flops_per_s, dict(n=(0,))), (partial(machine.gemm_flops_per_s, 8), dict(dtype=("int8",))),
    (Latency, dict(samples_s=((), (0.0,), (1.0, -1.0), (NAN,), (1.0, INF)))),
    (partial(replace, WORK), dict.fromkeys(("batch", "source_tokens", "new_tokens", "beams", "threads"), COUNT)),
    (measure, dict(run=(42,))), (partial(compare, A, B), dict(rounds=(0,), synchronize=("cuda",))),
    (partial(Candidate, "a", work=WORK), dict(run=(None,))), (partial(Candidate, "a", print), dict(work=(5,))),
    (partial(Candidate, run=print, work=WORK), dict(name=("",))),
    (lambda candidates: compare(*candidates), dict(candidates=((A,), (A, B, A)))),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_each_door_names_the_argument_that_it_refuses(number: int) -> None:
    call, arguments = REFUSED[number]
    for argument, junk in arguments.items():
        match = {"groups": "group", "overrides": "overrides|group|embedding", "sizes": "T5|sizes",
                 "samples_s": "at least one|above 0", "candidates": "alone|used once",
                 "multiple_of": "multiple_of|neurons", "draft": "must be a Backend"}.get(argument)  # fmt: skip
        refused(call, argument, *junk, match=match)


@pytest.fixture(scope="module")
def folder(tiny_t5, tmp_path_factory) -> Path:
    export_model(tiny_t5(), tmp_path_factory.mktemp("bad") / "export")
    return tmp_path_factory.getbasetemp() / "bad0" / "export"


def only_ours(call: Any, *arguments: Any, **options: Any) -> None:
    """Call it; our errors pass, and so does an answer (junk may be right by chance)."""
    try:
        call(*arguments, **options)
    except T5AccelError as error:
        assert len(str(error)) > 15, f"an error should say what was given and what to do: {error!r}"


@often
@given(given_folder=st.one_of(texts, numbers, st.just("/"), st.just("/dev/null"), st.just("")), options=st.dictionaries(
    st.sampled_from(["settings", "max_source_tokens", "verify"]), junk, max_size=2))  # fmt: skip
def test_opening_an_export(given_folder: Any, options: dict[str, Any]) -> None:
    for kind in (OrtNumpy, OrtBound):
        only_ours(kind, given_folder, **options)


@often
@given(model=st.one_of(texts, numbers, lists, tensors), options=st.dictionaries(
    st.sampled_from(["external_threshold_bytes", "overwrite", "name", "tokenizer"]), junk, max_size=2))  # fmt: skip
def test_exporting_what_is_no_model(tmp_path: Path, offline, model: Any, options: dict[str, Any]) -> None:
    only_ours(export_model, model, tmp_path / "export", **options)
    assert not (tmp_path / "export").exists()


@settings(often, max_examples=15)
@given(target=st.one_of(numbers, texts, lists))
def test_exporting_to_what_is_no_folder(tiny_t5, tmp_path: Path, monkeypatch, target: Any) -> None:
    monkeypatch.chdir(tmp_path)
    if isinstance(target, str | bytes) and target:
        target = str(tmp_path / "x") + target if isinstance(target, str) else target
    only_ours(export_model, tiny_t5(), target)


@often
@given(model=st.one_of(texts, numbers, lists, tensors), options=st.dictionaries(
    st.sampled_from(["device", "threads", "max_source_tokens", "tokenizer"]), junk, max_size=2))  # fmt: skip
def test_accelerating_what_is_no_model(tmp_path: Path, monkeypatch, offline, model: Any, options: Any) -> None:
    monkeypatch.setenv("T5ACCEL_CACHE", str(tmp_path))
    only_ours(accelerate, model, progress=False, **options)


@often
@given(raw=st.binary(max_size=40))
def test_a_graph_file_of_any_bytes(folder: Path, tmp_path: Path, raw: bytes) -> None:
    from t5accel.backends.ort_session import open_session

    (tmp_path / "encoder.onnx").write_bytes(raw)
    with pytest.raises(T5AccelError, match=r"encoder\.onnx"):
        open_session(tmp_path / "encoder.onnx", SessionSettings(threads=1))
