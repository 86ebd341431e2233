"""Junk at every public entry of the engine: our own errors come out, nothing else, and nothing is lost by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bench.baselines.ort_iobinding import OrtBound
from t5accel.api import accelerate
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.errors import T5AccelError
from t5accel.graphs.export import export_model

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
