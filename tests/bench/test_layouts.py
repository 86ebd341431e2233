"""The layouts of the past: folders whole or not there, graphs with transformers' own logits, and what each costs."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from programs import PROGRAM, Watched, check_program, histories_of

from bench.baselines import layouts
from bench.baselines.layout_backends import MergedGraphs, RowBackend, ThreeGraphs, WholeGraph
from bench.baselines.layout_graphs import INIT_DECODER, LAYOUTS, LM_HEAD, MERGED_DECODER, WHOLE
from bench.baselines.layouts import DESCRIPTION, LayoutSizes, export_layout, layout_sizes, read_layout
from bench.profiling import StepTraffic, bytes_per_step
from t5accel.backends.hf_generate import AcceleratedT5
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.errors import ExportError, InputError, NotT5Error
from t5accel.graphs.builder import GraphBuilder
from t5accel.graphs.contract import DECODER, ENCODER, WEIGHTS
from t5accel.graphs.export import export_model, t5_weights
from t5accel.models.random_init import random_t5

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


# The graphs


def test_the_graphs_are_valid_and_the_folder_holds_nothing_else(laid_out, kind: str, layout: str) -> None:
    folder = laid_out(layout, kind)
    for file in LAYOUTS[layout]:
        onnx.checker.check_model(folder / file, full_check=True)
    assert beside(folder) == {*LAYOUTS[layout], DESCRIPTION}
    assert read_layout(folder).files == {file: (folder / file).stat().st_size for file in sorted(LAYOUTS[layout])}


CROSS = ["cross_key_0", "cross_value_0"]
ENDS = {  # of a model with one decoder layer: what goes in, what comes out
    ("whole", WHOLE): (
        ["input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"],
        ["logits"],
    ),
    ("onnxt5", ENCODER): (["input_ids", "attention_mask"], ["last_hidden_state"]),
    ("onnxt5", LM_HEAD): (["hidden_states"], ["logits"]),
    ("fastt5", INIT_DECODER): (
        ["input_ids", "attention_mask", "encoder_hidden_states"],
        ["logits", "present_key_0", "present_value_0", "present_cross_key_0", "present_cross_value_0"],
    ),
    ("fastt5", DECODER): (
        ["input_ids", "attention_mask", "past_mask", "past_key_0", "past_value_0", *CROSS],
        ["logits", "present_key_0", "present_value_0"],
    ),
    ("merged", MERGED_DECODER): (
        ["input_ids", "attention_mask", "encoder_hidden_states", "past_mask", "past_key_0", "past_value_0", *CROSS,
         "use_cache_branch"],
        ["logits", "present_key_0", "present_value_0", "present_cross_key_0", "present_cross_value_0"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS, ids="/".join)
def test_what_goes_in_and_out(laid_out, end: tuple[str, str]) -> None:
    graph = onnx.load(laid_out(end[0], "shallower-decoder") / end[1]).graph
    assert ([tensor.name for tensor in graph.input], [tensor.name for tensor in graph.output]) == ENDS[end]


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


# Broken ones are caught

Patches = dict[str, Callable[..., Any]]


def forgotten_past(backend: RowBackend) -> Patches:
    def after(*arguments: Any) -> Any:
        source, past = type(backend)._after(backend, *arguments)
        return source, {name: np.zeros_like(array) for name, array in past.items()}

    return {"_after": after}


def no_past_mask(backend: RowBackend) -> Patches:
    def inputs(*arguments: Any) -> Any:
        file, handed = type(backend)._inputs(backend, *arguments)
        masks = {"past_mask", "decoder_attention_mask"} & handed.keys()
        return file, {**handed, **{name: np.ones_like(handed[name]) for name in masks}}

    return {"_inputs": inputs}


def blocks_of_rows(backend: RowBackend) -> Patches:
    """Rows of one source do not stand together."""

    def new_state(source: Any, rows: int) -> Any:
        state = type(backend).new_state(backend, source, rows)
        state.source = {name: np.concatenate([array] * rows) for name, array in source.inputs.items()}
        return state

    return {"new_state": new_state}


def source_stays(backend: RowBackend) -> Patches:
    """The histories of the kept sources go on, with the first sources."""

    def select_sources(state: Any, sources: np.ndarray) -> None:
        rows = len(sources) * state.rows.shape[1]
        first = {name: array[:rows] for name, array in state.source.items()}
        type(backend).select_sources(backend, state, sources)
        state.source = first

    return {"select_sources": select_sources}


BROKEN: dict[str, Callable[[RowBackend], Patches]] = {
    "a forgotten past": forgotten_past,
    "no mask of the past": no_past_mask,
    "rows in another order": blocks_of_rows,
    "the source stays": source_stays,
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_backend_is_caught(laid_out, runtime, tiny_t5, padded_batch, broken: str) -> None:
    own = runtime(laid_out(runtime.layout), settings=ONE_THREAD)
    check_program(own, tiny_t5(), *padded_batch, 3, PROGRAM)
    vars(own).update(BROKEN[broken](own))
    with pytest.raises(AssertionError, match="not close"):
        check_program(own, tiny_t5(), *padded_batch, 3, PROGRAM)


def test_the_wrong_branch_is_caught(laid_out, tiny_t5, padded_batch) -> None:
    own = MergedGraphs(laid_out("merged"), settings=ONE_THREAD)

    def inputs(*arguments: Any) -> Any:
        file, handed = MergedGraphs._inputs(own, *arguments)
        return file, {**handed, "use_cache_branch": np.array([False])}

    own._inputs = inputs
    with pytest.raises(AssertionError, match="not close"):
        check_program(own, tiny_t5(), *padded_batch, 3, PROGRAM)


@pytest.mark.parametrize("runtime", [ThreeGraphs, MergedGraphs])
def test_cross_attention_of_another_layer_is_caught(laid_out, runtime, tiny_t5, padded_batch) -> None:
    own = runtime(laid_out(runtime.layout), settings=ONE_THREAD)

    def after(state: Any, inputs: Any, outputs: Any) -> Any:
        cross = [name for name in outputs if name.startswith("present_cross")]
        swapped = dict(zip(cross, [outputs[name] for name in [*cross[2:], *cross[:2]]], strict=True))
        return runtime._after(own, state, inputs, {**outputs, **swapped})

    own._after = after
    with pytest.raises(AssertionError, match="not close"):
        check_program(own, tiny_t5(), *padded_batch, 3, PROGRAM)


# Tokens


def test_beams_behind_generate(opened, runtime, tiny_t5, padded_batch) -> None:
    model, options = tiny_t5("shallower-decoder"), dict(num_beams=3, do_sample=False, max_new_tokens=8)
    ids, mask = (torch.as_tensor(array) for array in padded_batch)
    expected = model.generate(input_ids=ids, attention_mask=mask, **options)
    assert len(np.unique(expected)) > 8
    ours = AcceleratedT5(opened(runtime, "shallower-decoder"), model.config)
    np.testing.assert_array_equal(ours.generate(input_ids=ids, attention_mask=mask, **options), expected)


# What it costs


def sizes_of(folder: Path) -> LayoutSizes:
    sizes = layout_sizes(folder)
    assert sizes.size_bytes == sum(path.stat().st_size for path in folder.iterdir() if path.suffix != ".json")
    assert sizes.weight_bytes < sizes.size_bytes and sizes.graphs == len(list(folder.glob("*.onnx")))
    return sizes


def weights_in(path: Path) -> dict[str, int]:
    """Bytes of each weight in a graph; not of its constants."""
    tensors = onnx.load(path).graph.initializer
    return {tensor.name: onnx.numpy_helper.to_array(tensor).nbytes for tensor in tensors if "." in tensor.name}


@pytest.mark.parametrize("kind", ["deeper-decoder", "mt5", "umt5"])
def test_merged_is_smaller_than_three_graphs_by_the_decoder(laid_out, kind: str) -> None:
    three, merged = (sizes_of(laid_out(name, kind)) for name in ("fastt5", "merged"))
    first, later = (weights_in(laid_out("fastt5", kind) / name) for name in (INIT_DECODER, DECODER))
    assert set(later) < set(first), "the first step also computes the keys and values of cross-attention"
    assert weights_in(laid_out("merged", kind) / MERGED_DECODER) == first
    twice = sum(later.values())
    assert three.weight_bytes - merged.weight_bytes == twice > 50_000
    assert three.files[ENCODER] == merged.files[ENCODER]
    decoder = sum(size for name, size in later.items() if name.startswith(("decoder.", "lm_head.")))
    assert three.repeated_decoder_bytes == decoder and merged.repeated_decoder_bytes == 0
    assert three.decoder_bytes - merged.decoder_bytes == decoder
    embedding = later["shared.weight"]  # in all three graphs, or in both
    assert three.repeated_bytes == decoder + 2 * embedding and merged.repeated_bytes == embedding


def test_the_files_differ_by_the_decoder(tmp_path: Path) -> None:
    """Where the weights are large enough for the nodes not to matter."""
    sizes = dict(d_model=128, d_kv=32, d_ff=512, num_heads=4, num_layers=1, num_decoder_layers=2, vocab_size=400)
    model = random_t5(sizes)
    for layout in ("fastt5", "merged"):
        export_layout(model, tmp_path / layout, layout)
    three, merged = (sizes_of(tmp_path / layout) for layout in ("fastt5", "merged"))
    twice = sum(weights_in(tmp_path / "fastt5" / DECODER).values())
    assert three.size_bytes - merged.size_bytes == pytest.approx(twice, rel=0.01) and twice > 1.5e6


def test_of_each_layout_what_a_table_shows(laid_out, exported, tiny_t5, tmp_path: Path) -> None:
    export_model(tiny_t5(), tmp_path / "shared", external_threshold_bytes=0)
    folders = {name: laid_out(name) for name in LAYOUTS} | {"two": exported(), "shared": tmp_path / "shared"}
    sizes = {name: layout_sizes(folder) for name, folder in folders.items()}
    graphs = {"whole": 1, "onnxt5": 2, "fastt5": 3, "merged": 2, "two": 2, "shared": 2}
    assert {name: size.graphs for name, size in sizes.items()} == graphs
    runs = {name: size.encoder_runs_per_step for name, size in sizes.items()}
    assert runs == {**dict.fromkeys(graphs, 0), "whole": 1}
    once = sizes["whole"].decoder_bytes
    assert {name: size.decoder_bytes / once for name, size in sizes.items() if name != "fastt5"} == {
        "whole": 1, "onnxt5": 0, "merged": 1, "two": 1, "shared": 1
    }  # fmt: skip
    assert 1.8 < sizes["fastt5"].decoder_bytes / once < 2, "the keys and values of the source are computed by one only"
    embedding = 300 * 32 * 4
    assert {name: size.repeated_bytes for name, size in sizes.items() if name not in ("fastt5", "merged")} == {
        "whole": 0, "onnxt5": embedding, "two": embedding, "shared": 0
    }  # fmt: skip
    assert WEIGHTS in sizes["shared"].files


def test_traffic_is_counted_from_the_arrays(opened, padded_batch) -> None:
    ids, mask = (array.repeat(2, 0) for array in padded_batch)  # B = 12 sources of S = 9 tokens
    steps = {}
    for runtime in RUNTIMES:
        for rows in (1, 3):
            backend = opened(runtime)
            state = backend.new_state(backend.encode(ids, mask), rows)
            assert state.traffic is None
            backend.step(state, histories_of(12, rows, 4))
            backend.step(state, histories_of(12, rows, 2))
            steps[runtime, rows] = StepTraffic(*state.traffic)
    for rows in (1, 3):
        ours = bytes_per_step(backend.dims, batch=12, rows=rows, past=4, new=2, source=9)["fed"]
        tiled = {name: ours.handed_in[name] * rows for name in ("cross_attention", "attention_mask")}
        three, merged, whole = (steps[runtime, rows] for runtime in RUNTIMES)
        assert three.handed_in == {**ours.handed_in, **tiled}
        assert three.taken_back == ours.taken_back and merged.taken_back == {**ours.taken_back, "cross_attention": 0}
        unread = {"encoder_hidden_states": 12 * rows * 9 * 32 * 4, "use_cache_branch": 1}
        assert merged.handed_in == {**three.handed_in, **unread}
        assert whole.handed_in == dict.fromkeys(("input_ids", "attention_mask"), 12 * rows * 9 * 8) | dict.fromkeys(
            ("decoder_input_ids", "decoder_attention_mask"), 12 * rows * 6 * 8
        )
        assert whole.taken_back == {"logits": 12 * rows * 6 * 300 * 4}


def test_what_cannot_be_weighed(tmp_path: Path) -> None:
    for junk in (None, "", 5):
        with pytest.raises(InputError, match="folder"):
            layout_sizes(junk)
    for folder, match in ((tmp_path, "holds no graphs"), (tmp_path / "missing", "cannot be read")):
        with pytest.raises(ExportError, match=match):
            layout_sizes(folder)
    (tmp_path / "decoder.onnx").write_bytes(b"no graph at all")
    with pytest.raises(ExportError, match="cannot be read"):
        layout_sizes(tmp_path)


# The folder


def test_weights_beside_the_graphs(laid_out, layout: str, tiny_t5, padded_batch, tmp_path: Path) -> None:
    """As where they are more than an ONNX file can hold. Each graph has its own file: the layout costs the same."""
    export_layout(tiny_t5(), tmp_path / "out", layout, external_threshold_bytes=0)
    files = {file: [file, f"{file}.data"] for file in LAYOUTS[layout]}
    assert beside(tmp_path / "out") == {*sum(files.values(), []), DESCRIPTION}
    inside, out = layout_sizes(laid_out(layout)), layout_sizes(tmp_path / "out")
    for name in ("graphs", "weight_bytes", "repeated_bytes", "decoder_bytes", "repeated_decoder_bytes"):
        assert getattr(out, name) == getattr(inside, name)
    for runtime in (r for r in RUNTIMES if r.layout == layout):
        check_program(runtime(tmp_path / "out", settings=ONE_THREAD), tiny_t5(), *padded_batch, 3, PROGRAM)
    for file in files:
        onnx.checker.check_model(tmp_path / "out" / file)


def test_a_model_by_name(tmp_path: Path) -> None:
    written = export_layout("mini", tmp_path / "mini", "onnxt5")
    assert written.source["name"] == "mini" and read_layout(tmp_path / "mini") == written


def test_the_description_names_the_checkpoint(exported, laid_out, layout: str) -> None:
    found = read_layout(laid_out(layout))
    ours = OrtNumpy(exported(), settings=ONE_THREAD).manifest
    assert (found.name, found.source, found.dims) == (layout, ours.source, ours.dims)
    assert found.tokens == ours.tokens


WRONG: dict[str, tuple[Any, ...]] = {
    "layout": ("two", "", "FastT5", None, 3, ["whole"], {}),
    "external_threshold_bytes": (-1, 2**31, 1.5, "0", None, True),
    "folder": (None, 5, "", b"x", "a\0b"),
    "model": (torch.nn.Linear(2, 2), 5, None),
}


@pytest.mark.parametrize(("name", "wrong"), [(name, value) for name in WRONG for value in WRONG[name]], ids=str)
def test_what_is_not_written(tiny_t5, tmp_path: Path, name: str, wrong: Any) -> None:
    arguments = dict(model=tiny_t5(), folder=tmp_path / "out", layout="whole") | {name: wrong}
    with pytest.raises(NotT5Error if name == "model" else InputError, match="" if name == "model" else name):
        export_layout(**arguments)
    assert beside(tmp_path) == set()


def test_a_missing_weight_is_noticed_before_anything_is_written(tiny_t5, layout: str, tmp_path, monkeypatch) -> None:
    weights = t5_weights(tiny_t5())
    arrays = {name: array for name, array in weights.arrays.items() if name != "shared.weight"}
    monkeypatch.setattr(layouts, "t5_weights", lambda model: dataclasses.replace(weights, arrays=arrays))
    with pytest.raises(NotT5Error, match=r"no weight shared\.weight"):
        export_layout(tiny_t5(), tmp_path / "out", layout)
    assert beside(tmp_path) == set()


def test_a_folder_that_holds_something_is_kept(tiny_t5, layout: str, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        with pytest.raises(ExportError, match=rf"{name} is not empty"):
            export_layout(tiny_t5(), tmp_path / name, layout)
    assert beside(tmp_path) == {"full", "file"} and (tmp_path / "file").read_text() == "mine"
    assert beside(tmp_path / "full") == {"note.txt"}
    (tmp_path / "empty").mkdir()
    export_layout(tiny_t5(), tmp_path / "empty", layout)
    with pytest.raises(ExportError, match="not empty"):
        export_layout(tiny_t5(), tmp_path / "empty", layout)
    assert read_layout(tmp_path / "empty").name == layout


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_export_leaves_nothing(tiny_t5, layout: str, tmp_path: Path, monkeypatch, error: Any) -> None:
    """It fails at the last graph, when all others are written."""
    proto, left = GraphBuilder.proto, [len(LAYOUTS[layout])]

    def fail_at_last(self: GraphBuilder, *arguments: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise error
        return proto(self, *arguments)

    monkeypatch.setattr(GraphBuilder, "proto", fail_at_last)
    expected = ExportError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        export_layout(tiny_t5(), tmp_path / "out", layout)
    assert beside(tmp_path) == set() and left == [0]


def test_another_layout_is_refused(laid_out, runtime, exported) -> None:
    for other in LAYOUTS.keys() - {runtime.layout}:
        with pytest.raises(ExportError, match=rf"'{other}'.*{runtime.layout}"):
            runtime(laid_out(other))
    with pytest.raises(ExportError, match="holds no whole layout"):
        runtime(exported())
    with pytest.raises(ExportError, match="no export of t5accel"):
        OrtNumpy(laid_out(runtime.layout))
    for wrong in ("cpu", {"threads": 1}, 1):
        with pytest.raises(InputError, match="SessionSettings"):
            runtime(laid_out(runtime.layout), settings=wrong)


def test_a_damaged_folder_is_refused(tiny_t5, tmp_path: Path) -> None:
    export_layout(tiny_t5(), tmp_path / "out", "merged")
    graph, description = tmp_path / "out" / MERGED_DECODER, tmp_path / "out" / DESCRIPTION
    whole, text = graph.read_bytes(), description.read_text()
    graph.write_bytes(whole[:-1])
    with pytest.raises(ExportError, match=r"merged_decoder\.onnx is not of \d+ bytes.*export_layout"):
        MergedGraphs(tmp_path / "out")
    graph.unlink()
    with pytest.raises(ExportError, match=r"merged_decoder\.onnx"):
        MergedGraphs(tmp_path / "out")
    graph.write_bytes(b"\0" * len(whole))
    with pytest.raises(ExportError, match=r"merged_decoder\.onnx cannot be run"):
        MergedGraphs(tmp_path / "out", settings=ONE_THREAD)
    content = json.loads(text)
    damaged = ["", "{", "[]", "null", "7", "[" * 99999, text.replace("d_model", "model")]
    damaged += [json.dumps({key: value for key, value in content.items() if key != name}) for name in content]
    damaged += [json.dumps({**content, name: None}) for name in ("dims", "files")]
    for broken in damaged:
        description.write_text(broken)
        with pytest.raises(ExportError, match=r"layout\.json (is damaged|must hold a JSON object)"):
            read_layout(tmp_path / "out")
    description.unlink()
    with pytest.raises(ExportError, match="holds no whole layout"):
        read_layout(tmp_path / "out")


def test_every_weight_is_used(tiny_t5, kind: str) -> None:
    """What a layout holds is what it needs: no initializer stands in a graph without a node that reads it."""
    weights = t5_weights(tiny_t5(kind))
    for files in LAYOUTS.values():
        for build in files.values():
            graph = build(weights).proto().graph
            read = set()
            graphs = [graph]
            while graphs:
                for node in graphs.pop().node:
                    read |= set(node.input)
                    graphs += [attribute.g for attribute in node.attribute if attribute.HasField("g")]
            assert {tensor.name for tensor in graph.initializer} <= read
