"""Profiles of graphs: every node that ran, none twice, and no more time than there was."""

from __future__ import annotations

import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from refused import refused

from bench.baselines.optimized_export import optimized_graph
from bench.profiling import profile_graph, step_feeds
from t5accel.backends.ort_session import SessionSettings, open_session
from t5accel.errors import ExportError, InputError
from t5accel.graphs.contract import DECODER, ENCODER, decoder_spec
from t5accel.graphs.manifest import read_manifest
from t5accel.graphs.rewriting import count_nodes


@pytest.mark.parametrize("level", ["disable", "all"])
def test_every_node_that_runs_is_there(exported, tmp_path: Path, monkeypatch, capfd, level: str) -> None:
    feeds = step_feeds(read_manifest(exported()).dims, batch=2, rows=3, past=4, new=2, source=5)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    settings = SessionSettings(threads=1, graph_optimization=level)
    profile = profile_graph(exported() / DECODER, feeds, settings=settings, runs=4)
    with optimized_graph(exported() / DECODER, level) as path:
        nodes = count_nodes(path)
    assert Counter(operator for operator, _ in profile.nodes.values()) == {
        name.removeprefix("com.microsoft."): count for name, count in nodes.items()
    }
    assert profile.by_type.keys() == {operator for operator, _ in profile.nodes.values()}
    assert list(profile.by_type.values()) == sorted(profile.by_type.values(), reverse=True)
    assert 0 < sum(profile.by_type.values()) == pytest.approx(profile.run_s - profile.between_s)
    assert not list(tmp_path.iterdir()) and capfd.readouterr() == ("", "")


def test_a_branch_counts_once(tmp_path: Path) -> None:
    """The time of an ``If`` is that of the nodes of the branch that ran."""
    x, y, z = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N"]) for name in "xyz")
    condition = helper.make_tensor_value_info("yes", TensorProto.BOOL, [])
    branches = {
        f"{branch}_branch": helper.make_graph([helper.make_node(kind, ["x"], ["z"])], kind, [], [z])
        for branch, kind in (("then", "Neg"), ("else", "Exp"))
    }
    graph = helper.make_graph([helper.make_node("If", ["yes"], ["y"], **branches)], "g", [x, condition], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(model, tmp_path / "if.onnx")
    for value, ran in ((True, "Neg"), (False, "Exp")):
        feeds = {"x": np.ones(9, np.float32), "yes": np.array(value)}
        profile = profile_graph(tmp_path / "if.onnx", feeds, settings=SessionSettings(threads=1), runs=2)
        assert [operator for operator, _ in profile.nodes.values()] == [ran]


@pytest.mark.parametrize(
    "change",
    [lambda feeds: feeds.pop("input_ids"), lambda feeds: feeds.update(more=feeds["input_ids"]),
     lambda feeds: feeds.update(input_ids=feeds["input_ids"][0]), lambda feeds: feeds.update(past_key_0="text"),
     lambda feeds: feeds.update(input_ids=feeds["input_ids"].astype(np.int32))],
)  # fmt: skip
def test_feeds_that_are_not_the_graphs(exported, change: Any) -> None:
    feeds = step_feeds(read_manifest(exported()).dims)
    change(feeds)
    with pytest.raises(InputError, match=r"decoder\.onnx cannot be run on these feeds"):
        profile_graph(exported() / DECODER, feeds, settings=SessionSettings(threads=1))


def test_feeds_are_those_of_the_contract(exported, kind: str) -> None:
    dims = read_manifest(exported(kind)).dims
    feeds = step_feeds(dims, batch=2, rows=3, past=0, new=2, source=5)
    sizes = dict(B=2, K=3, P=0, T=2, S=5)
    assert {name: (array.dtype.name, array.shape) for name, array in feeds.items()} == {
        tensor.name: (tensor.dtype, tuple(sizes.get(size, size) for size in tensor.shape))
        for tensor in decoder_spec(dims).inputs
    }
    logits = open_session(exported(kind) / DECODER, SessionSettings(threads=1)).run(["logits"], feeds)[0]
    assert logits.shape == (2, 3, 2, 300) and np.isfinite(logits).all()


def test_what_cannot_be_profiled(exported, tmp_path: Path, monkeypatch) -> None:
    dims = read_manifest(exported()).dims
    for name in ("batch", "rows", "past", "new", "source"):
        refused(partial(step_feeds, dims), name, -1, 1.5, "3", None)
    call = partial(profile_graph, exported() / DECODER, step_feeds(dims))
    refused(call, "runs", 0, -1, 1.5, "3", None, True)
    (tmp_path / ENCODER).write_bytes(b"no graph")
    with pytest.raises(ExportError, match=r"encoder\.onnx cannot be run"):
        profile_graph(tmp_path / ENCODER, step_feeds(dims))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(ExportError, match="profile of .* could not be written"):
        call()
