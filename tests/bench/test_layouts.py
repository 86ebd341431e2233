"""Folders of older layouts: their graphs, sizes and refusals. `test_conformance` compares their logits."""

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from programs import PROGRAM, Watched, check_program, histories_of
from refused import refused

from bench.baselines.layout_backends import MergedGraphs, RowBackend, ThreeGraphs, WholeGraph
from bench.baselines.layout_graphs import LAYOUTS, MERGED_DECODER
from bench.baselines.layouts import DESCRIPTION, export_layout, read_layout
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.errors import ExportError, NotT5Error
from t5accel.graphs.builder import GraphBuilder

ONE_THREAD = SessionSettings(threads=1)
RUNTIMES = [ThreeGraphs, MergedGraphs, WholeGraph]


@pytest.fixture(scope="session", params=RUNTIMES, ids=lambda runtime: runtime.__name__)
def runtime(request: pytest.FixtureRequest) -> type[RowBackend]:
    return request.param


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


def beside(folder: Path) -> set[str]:
    """What lies in a folder, but for lock files."""
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")}


@pytest.mark.parametrize("kind", ["shallower-decoder", "gated-untied", "umt5"])
def test_the_graphs_are_valid_and_the_folder_holds_nothing_else(laid_out, kind: str, layout: str) -> None:
    folder = laid_out(layout, kind)
    for file in LAYOUTS[layout]:
        onnx.checker.check_model(folder / file, full_check=True)
    assert beside(folder) == {*LAYOUTS[layout], DESCRIPTION}
    assert read_layout(folder).files == {file: (folder / file).stat().st_size for file in sorted(LAYOUTS[layout])}


def test_later_steps_give_no_cross_tensors_but_empty_ones(opened, padded_batch) -> None:
    backend = opened(MergedGraphs)
    state = backend.new_state(backend.encode(*padded_batch))
    seen = []

    def watch(run: Callable[..., Any], outputs: list[str], inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        seen.append(dict(zip(outputs, results := run(outputs, inputs), strict=True)))
        return results

    own = copy.copy(backend)
    own.sessions = {**backend.sessions, MERGED_DECODER: Watched(backend.sessions[MERGED_DECODER], watch)}
    for _ in range(2):
        own.step(state, histories_of(6, 1, 1))
    assert [outputs["present_cross_key_2"].shape for outputs in seen] == [(6, 4, 9, 12), (0, 4, 1, 12)]


def test_fast_t5_alone_stores_the_decoder_twice(laid_out) -> None:
    decoders = {layout: sorted(name for file in files for name in weights_in(laid_out(layout) / file))
                for layout, files in LAYOUTS.items()}  # fmt: skip
    once = sorted({*decoders["whole"]})
    assert decoders["whole"] == decoders["merged"] == once and not decoders["onnxt5"]
    assert sorted({*decoders["fastt5"]}) == once and len(decoders["fastt5"]) > 1.8 * len(once)


def weights_in(graph: Path) -> list[str]:
    """The names of the decoder's weights in a graph."""
    stored = onnx.load(graph, load_external_data=False).graph.initializer
    return [tensor.name for tensor in stored if tensor.name.startswith("decoder.")]


def test_weights_beside_the_graphs(laid_out, layout: str, tiny_t5, padded_batch, tmp_path: Path) -> None:
    """As where they are more than an ONNX file can hold. Each graph has its own file."""
    export_layout(tiny_t5(), tmp_path / "out", layout, external_threshold_bytes=0)
    files = {file: [file, f"{file}.data"] for file in LAYOUTS[layout]}
    assert beside(tmp_path / "out") == {*sum(files.values(), []), DESCRIPTION}
    for file in LAYOUTS[layout]:
        assert weights_in(tmp_path / "out" / file) == weights_in(laid_out(layout) / file)
    for runtime in (r for r in RUNTIMES if r.layout == layout):
        check_program(runtime(tmp_path / "out", settings=ONE_THREAD), tiny_t5(), *padded_batch, 3, PROGRAM)
    for file in files:
        onnx.checker.check_model(tmp_path / "out" / file)


def test_the_description_names_the_checkpoint(exported, laid_out, layout: str, tmp_path: Path) -> None:
    found = read_layout(laid_out(layout))
    ours = OrtNumpy(exported(), settings=ONE_THREAD).manifest
    assert (found.name, found.source, found.dims, found.tokens) == (layout, ours.source, ours.dims, ours.tokens)
    if layout == "onnxt5":
        written = export_layout("mini", tmp_path / "mini", layout)
        assert written.source["name"] == "mini" and read_layout(tmp_path / "mini") == written


def test_nothing_is_written_for_invalid_arguments(tiny_t5, tmp_path: Path, monkeypatch) -> None:
    export = partial(export_layout, **dict(model=tiny_t5(), folder=tmp_path / "out", layout="whole"))
    refused(export, "layout", "two", "FastT5", None, 3)
    refused(export, "external_threshold_bytes", -1, 2**31, "0")
    refused(export, "folder", None, 5, "", b"x")
    refused(export, "model", torch.nn.Linear(2, 2), match="", error=NotT5Error)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").write_text("mine")
    refused(export, "folder", tmp_path / "full", match="not empty", error=ExportError)
    monkeypatch.setattr(GraphBuilder, "proto", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export()
    assert beside(tmp_path) == {"full"} and beside(tmp_path / "full") == {"note.txt"}


def test_another_layout_is_refused(laid_out, runtime, exported, tmp_path: Path) -> None:
    for other in LAYOUTS.keys() - {runtime.layout}:
        with pytest.raises(ExportError, match=rf"{runtime.layout}, got '{other}'"):
            runtime(laid_out(other))
    with pytest.raises(ExportError, match="holds no whole layout"):
        runtime(exported())
    with pytest.raises(ExportError, match="no export of t5accel"):
        OrtNumpy(laid_out(runtime.layout))
    refused(partial(runtime, laid_out(runtime.layout)), "settings", "cpu", {"threads": 1})


def test_a_damaged_folder_is_refused(tiny_t5, tmp_path: Path) -> None:
    export_layout(tiny_t5(), tmp_path / "out", "merged")
    graph, description = tmp_path / "out" / MERGED_DECODER, tmp_path / "out" / DESCRIPTION
    whole, text = graph.read_bytes(), description.read_text()
    for damaged in (whole[:-1], b"\0" * len(whole)):
        graph.write_bytes(damaged)
        with pytest.raises(ExportError, match=r"merged_decoder\.onnx"):
            MergedGraphs(tmp_path / "out", settings=ONE_THREAD)
    for broken in ("", "[]", text.replace("d_model", "model"), json.dumps({**json.loads(text), "files": None})):
        description.write_text(broken)
        with pytest.raises(ExportError, match=r"layout\.json"):
            read_layout(tmp_path / "out")
