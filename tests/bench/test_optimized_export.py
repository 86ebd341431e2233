"""Optimised exports: the same numbers, the nodes that they should have, and refused where they were not made for."""

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from programs import PROGRAM, check_program
from refused import refused
from silence import quiet
from test_export import references, size_bytes
from test_greedy_search import check_equals_generate

from bench.baselines import optimized_export as optimize
from bench.baselines.optimized_export import optimize_export, optimized_graph
from bench.baselines.ort_iobinding import OrtBound
from t5accel import machine
from t5accel.api import accelerate
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings, open_session
from t5accel.errors import ExportError, InputError, MissingPackageError
from t5accel.graphs import ort_levels as portability
from t5accel.graphs.contract import DECODER, ENCODER, MANIFEST, WEIGHTS
from t5accel.graphs.manifest import describe_file, read_manifest, write_manifest
from t5accel.graphs.ort_levels import LEVELS, require_runnable_here, this_machine
from t5accel.graphs.rewriting import contrib_operators, count_nodes, load_graphs

ONE_THREAD = SessionSettings(threads=1)
NORM, TRANSPOSED, SKIP = (
    "SimplifiedLayerNormalization", "com.microsoft.FusedMatMul", "com.microsoft.SkipSimplifiedLayerNormalization",
)  # fmt: skip
Optimized = Callable[..., Path]


@pytest.fixture(scope="module")
def portable(exported) -> Callable[..., Path]:
    """``portable(kind, external)``: an export. Shared: do not write."""
    beside: dict[str, Any] = dict(external_threshold_bytes=0)
    return lambda kind="deeper-decoder", external=True: exported(kind, **(beside if external else {}))


@pytest.fixture(scope="module")
def optimized(portable, tmp_path_factory) -> Optimized:
    """``optimized(kind, external, level=…, tool=…)``: that export, optimised. Shared: do not write."""

    @cache
    def export(
        kind: str = "deeper-decoder", external: bool = True, level: str = "all", tool: str = "onnxruntime"
    ) -> Path:
        folder = tmp_path_factory.mktemp("optimized") / "tiny"
        optimize_export(portable(kind, external), folder, level=level, tool=tool)
        return folder

    return export


def save(path: Path, nodes: list[Any], opsets: dict[str, int] | None = None, weights: Any = ()) -> Path:
    """A graph x (N,) -> y (N,) of a user's own."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N"]) for name in "xy")
    imports = [helper.make_opsetid(domain, version) for domain, version in (opsets or {"": 20}).items()]
    graph = helper.make_graph(nodes, "of a user", [x], [y], weights)
    path.write_bytes(helper.make_model(graph, opset_imports=imports, ir_version=9).SerializeToString())
    return path


def test_sets_of_operators_are_named_and_branches_are_counted_by_the_standard(tmp_path: Path) -> None:
    y = helper.make_tensor_value_info("z", TensorProto.FLOAT, ["N"])
    then, otherwise = (
        helper.make_graph([helper.make_node(kind, ["x"], ["z"], domain=domain)], kind, [], [y])
        for kind, domain in (("Neg", ""), ("QuickGelu", "com.microsoft"))
    )
    nodes = [
        helper.make_node("Constant", [], ["yes"], value=numpy_helper.from_array(np.array(True))),
        helper.make_node("If", ["yes"], ["chosen"], then_branch=then, else_branch=otherwise),
        helper.make_node("Neg", ["chosen"], ["y"]),
    ]
    path = save(tmp_path / "if.onnx", nodes, {"": 20, "com.microsoft": 1, "ai.onnx.ml": 5})
    assert count_nodes(path) == {"Constant": 1, "If": 1, "Neg": 2, "com.microsoft.QuickGelu": 1}
    assert contrib_operators(path) == ["com.microsoft.QuickGelu"]
    # The standard is asked by set and version: RMSNormalization came with opset 23.
    for kind, domain, is_standard in (
        ("Gelu", "", True), (NORM, "", False), ("RMSNormalization", "", False), ("Gelu", "com.microsoft", False),
    ):  # fmt: skip
        node = helper.make_node(kind, ["x"], ["y"], domain=domain)
        path = save(tmp_path / "one.onnx", [node], {"": 20, **({domain: 1} if domain else {})})
        assert (contrib_operators(path) == []) == is_standard, kind


@pytest.mark.parametrize("read", [count_nodes, contrib_operators, lambda path: optimized_graph(path).__enter__()])
def test_what_is_no_graph(tmp_path: Path, read: Callable[[Any], Any]) -> None:
    refused(read, "path", None, 5, "", b"x", "x\0", match="path")
    refused(read, "path", tmp_path, tmp_path / "no.onnx", match="", error=ExportError)
    for data in (b"", b"no graph", b"\xff" * 9):
        (tmp_path / "no.onnx").write_bytes(data)
        refused(read, "path", tmp_path / "no.onnx", match=r"no\.onnx", error=ExportError)


def test_what_each_level_makes_of_a_decoder(portable) -> None:
    """3 layers: 10 norms, 6 attentions, a tied head."""
    nodes, files = {}, {}
    for level in LEVELS:
        with optimized_graph(portable() / DECODER, level) as path:
            nodes[level], files[level] = count_nodes(path), path.read_bytes()
            assert bool(contrib_operators(path)) == (level in ("extended", "layout", "all"))
    assert nodes["disable"] == count_nodes(portable() / DECODER)
    assert nodes["basic"] < nodes["disable"] and nodes["disable"]["Transpose"] - nodes["basic"]["Transpose"] == 1
    assert nodes["disable"]["ReduceMean"] == nodes["basic"]["ReduceMean"] == nodes["extended"][NORM] == 10
    assert nodes["extended"][TRANSPOSED] == 6 and nodes["extended"]["ReduceMean"] == 0
    assert nodes["extended"].total() == nodes["basic"].total() - 10 * 5 - 6, "six nodes become one, two become one"
    assert files["extended"] == files["layout"] == files["all"] != files["basic"]


def test_an_optimized_graph_runs_and_goes(portable, monkeypatch, tmp_path: Path, padded_batch, capfd) -> None:
    feeds, outputs = dict(zip(("input_ids", "attention_mask"), padded_batch, strict=True)), ["cross_key_0"]
    expected = open_session(portable() / ENCODER, ONE_THREAD).run(outputs, feeds)[0]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with quiet(), optimized_graph(portable() / ENCODER) as path:
        assert list(tmp_path.iterdir()) == [path.parent]
        raw = dataclasses.replace(ONE_THREAD, graph_optimization="disable")
        np.testing.assert_array_equal(open_session(path, raw).run(outputs, feeds)[0], expected)
    assert not list(tmp_path.iterdir()) and capfd.readouterr() == ("", "")
    with pytest.raises(ZeroDivisionError), optimized_graph(portable() / ENCODER):
        1 / 0  # noqa: B018
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("level", ["disable", "extended"])
def test_a_session_optimises_as_it_is_told(tiny_t5, portable, padded_batch, level: str) -> None:
    backend = OrtNumpy(portable(), settings=SessionSettings(threads=1, graph_optimization=level))
    for session in (backend.encoder, backend.decoder):
        assert session.get_session_options().graph_optimization_level.name == LEVELS[level]
    check_program(backend, tiny_t5(), *padded_batch, 3, PROGRAM)


def test_wrong_options(portable, workplace: Path) -> None:
    levels = ("ALL", "", None, ["all"])
    call = partial(optimize_export, portable(), workplace / "new")
    refused(SessionSettings, "graph_optimization", *levels, match="^graph_optimization")
    refused(call, "level", *levels, match="^level")
    refused(lambda level: optimized_graph(portable() / DECODER, level).__enter__(), "level", *levels, match="^level")
    refused(call, "tool", "tensorrt", None, match="tool")
    refused(partial(call, tool="transformers"), "level", "layout", match="disable, basic, extended, all")
    assert not (workplace / "new").exists()


def test_a_level_that_an_older_onnxruntime_lacks(portable, tmp_path: Path, monkeypatch) -> None:
    class Older:
        ORT_ENABLE_ALL = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL

    monkeypatch.setattr(onnxruntime, "GraphOptimizationLevel", Older)
    open_session(portable() / DECODER, ONE_THREAD)
    with pytest.raises(InputError, match="'layout'"):
        open_session(portable() / DECODER, SessionSettings(graph_optimization="layout"))
    with pytest.raises(InputError, match="'layout'"):
        optimize_export(portable(), tmp_path / "x", level="layout")


def check_same(backend: OrtNumpy, model: Any, padded_batch: Any) -> None:
    check_program(backend, model, *padded_batch, 3, PROGRAM)
    check_equals_generate(backend, model, *padded_batch, max_new_tokens=12)


def test_optimised_by_onnxruntime(optimized, tiny_t5, kind: str, padded_batch) -> None:
    """With weights beside the graphs, and of one kind with weights inside, too."""
    for external in (True, False) if kind == "gated-untied" else (True,):
        check_same(OrtNumpy(optimized(kind, external), settings=ONE_THREAD), tiny_t5(kind), padded_batch)


@pytest.mark.parametrize("kind", ["deeper-decoder", "umt5"])
def test_optimised_by_the_package_for_transformers(optimized, tiny_t5, padded_batch, kind: str) -> None:
    folder = optimized(kind, tool="transformers", level="extended")
    check_same(OrtBound(folder, settings=ONE_THREAD), tiny_t5(kind), padded_batch)
    encoder, decoder = count_nodes(folder / ENCODER), count_nodes(folder / DECODER)
    layers = tiny_t5(kind).config.num_layers
    assert (encoder[NORM], encoder[SKIP]) == (1, 2 * layers), "each norm but the first takes the addition before it in"
    assert decoder[SKIP] == 0 and decoder[NORM] == 3 * tiny_t5(kind).config.num_decoder_layers + 1
    assert not any("Attention" in name for name in encoder | decoder)


@pytest.mark.parametrize("level", ["disable", "basic"])
def test_of_standard_operators(optimized, tiny_t5, padded_batch, level: str) -> None:
    folder = optimized(level=level)
    assert read_manifest(folder).optimized["contrib_operators"] == []
    for name in (ENCODER, DECODER):
        onnx.checker.check_model(str(folder / name), full_check=True)
        model = onnx.load(folder / name, load_external_data=False)
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 20)] and model.ir_version == 9
    check_same(OrtNumpy(folder, settings=ONE_THREAD), tiny_t5(), padded_batch)


def declared(path: Path) -> list[tuple[str, list[Any]]]:
    session = open_session(path, ONE_THREAD)
    return [(value.name, value.shape) for value in (*session.get_inputs(), *session.get_outputs())]


@pytest.mark.parametrize("options", [{}, dict(tool="transformers", level="extended")], ids=str)
def test_the_contract_is_kept(portable, optimized, options: dict[str, Any]) -> None:
    before, after = read_manifest(portable()), read_manifest(optimized(**options))
    for name in (ENCODER, DECODER):
        assert declared(optimized(**options) / name) == declared(portable() / name)
    written = {"optimized", "versions", "files", "shared"}
    same = {field.name for field in dataclasses.fields(before)} - written
    assert all(getattr(before, name) == getattr(after, name) for name in same)
    assert before.optimized == {} and after.versions == machine.versions()
    assert after.optimized == {
        "tool": "onnxruntime", "level": "all", "onnxruntime": onnxruntime.__version__, "machine": this_machine(),
        "contrib_operators": [NORM, SKIP if options else TRANSPOSED], **options,
    }  # fmt: skip


def test_weights_lie_where_they_lay(portable, optimized) -> None:
    inside, beside = optimized(external=False), optimized()
    assert read_manifest(inside).files.keys() == read_manifest(portable(external=False)).files.keys()
    assert WEIGHTS not in read_manifest(inside).files and not references(inside / DECODER)
    assert read_manifest(beside).files.keys() == read_manifest(portable()).files.keys()
    encoder, decoder = references(beside / ENCODER), references(beside / DECODER)
    assert encoder.keys() & decoder.keys() == {"shared.weight"} and encoder["shared.weight"] == decoder["shared.weight"]
    assert [*read_manifest(beside).shared] == ["shared.weight"] == [*OrtNumpy(beside, settings=ONE_THREAD)._weights]
    everything = {**encoder, **decoder}
    (head,) = everything.keys() - references(portable() / ENCODER).keys() - references(portable() / DECODER).keys()
    assert head in decoder and everything[head][2] == 300 * 32 * 4, "of tied embeddings the transpose"
    assert {location for location, _, _ in everything.values()} == {WEIGHTS}
    assert all(offset % 4096 == 0 for _, offset, _ in everything.values())
    assert 0 < size_bytes(beside) - size_bytes(portable()) - 300 * 32 * 4 < 4096


def test_made_up_names_are_told_apart(tmp_path: Path) -> None:
    """An optimiser calls what it computed in either graph "folded"; what is equal is stored once all the same."""
    weights = {"a": np.arange(2000.0, dtype=np.float32), "b": np.ones(2000, dtype=np.float32)}
    weights["c"] = weights["a"]
    paths = []
    for name, array in weights.items():
        tensors = [numpy_helper.from_array(array, "folded"), numpy_helper.from_array(np.float32(len(paths)), "small")]
        nodes = [helper.make_node("Add", ["x", "folded"], ["sum"]), helper.make_node("Mul", ["sum", "small"], ["y"])]
        paths.append(save(tmp_path / f"{name}.onnx", nodes, {"": 20, "ai.onnx.ml": 5, "com.microsoft": 1}, tensors))
    graphs = load_graphs(paths)
    assert [list(graph.weights) for graph in graphs.values()] == [
        ["folded", "small"], ["b.folded", "small"], ["folded", "small"],
    ]  # fmt: skip
    for number, (name, graph) in enumerate(graphs.items()):
        path = tmp_path / f"again {name}"
        path.write_bytes(graph.proto().SerializeToString())
        assert [entry.domain for entry in onnx.load(path).opset_import] == [""]
        (y,) = open_session(path, ONE_THREAD).run(None, {"x": np.ones(2000, dtype=np.float32)})
        np.testing.assert_array_equal(y, (weights[Path(name).stem] + 1) * number)


def test_a_tokenizer_and_all_other_files_come_along_and_a_copy_of_the_copy_says_the_same(
    exported_mini, tmp_path: Path
) -> None:
    manifest = optimize_export(exported_mini, tmp_path / "mini")
    assert manifest.files.keys() == read_manifest(exported_mini).files.keys() > {"tokenizer.json"}
    for name in manifest.files.keys() - {ENCODER, DECODER}:
        assert (tmp_path / "mini" / name).read_bytes() == (exported_mini / name).read_bytes()
    accelerate(tmp_path / "mini", progress=False).save_pretrained(tmp_path / "saved")
    assert read_manifest(tmp_path / "saved").optimized == manifest.optimized != {}
    OrtNumpy(tmp_path / "saved", settings=ONE_THREAD)


ELSEWHERE: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "cpu Other 9000": lambda patch: patch_facts(patch, cpu="Other 9000"),
    "instruction sets avx9": lambda patch: patch_facts(patch, cpu_flags=["avx9"]),
    "instruction sets unknown": lambda patch: patch_facts(patch, cpu_flags=None),
    "onnxruntime 9.9.9": lambda patch: patch.setattr(onnxruntime, "__version__", "9.9.9"),
}


def patch_facts(patch: pytest.MonkeyPatch, **changed: Any) -> None:
    facts = machine.facts(gpu=False)
    patch.setattr(machine, "facts", lambda **_: {**facts, **changed})


@pytest.mark.parametrize("where", ELSEWHERE)
def test_refused_elsewhere(portable, optimized, monkeypatch, where: str) -> None:
    folder = optimized()
    OrtNumpy(folder, settings=ONE_THREAD)
    ELSEWHERE[where](monkeypatch)
    for open_ in (OrtNumpy, OrtBound, partial(accelerate, progress=False)):
        with pytest.raises(ExportError, match=f"here is {where}"):
            open_(folder)
    for runs_anywhere in (portable(), optimized(level="basic")):
        OrtNumpy(runs_anywhere, settings=ONE_THREAD)


def test_refused_on_another_device(optimized) -> None:
    with pytest.raises(ExportError, match="for device cpu; here is device cuda"):
        OrtNumpy(optimized(), settings=SessionSettings(device="cuda"))
    require_runnable_here(read_manifest(optimized(level="basic")), optimized(level="basic"), "cuda")


@pytest.fixture
def workplace(portable, tmp_path: Path, monkeypatch) -> Path:
    """A folder with a portable export, and one for temporary files, of which none may be left."""
    shutil.copytree(portable(), tmp_path / "portable")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "1")  # else onnxruntime puts the number of its session there
    yield tmp_path
    assert not list((tmp_path / "temporary").iterdir())


def test_a_third_graph_is_not_forgotten(workplace: Path) -> None:
    """Its weights lie in the file that would be written anew."""
    third = workplace / "portable" / "third.onnx"
    shutil.copy(workplace / "portable" / DECODER, third)
    content = json.loads((workplace / "portable" / MANIFEST).read_text())
    content["files"][third.name] = describe_file(third)
    write_manifest(workplace / "portable", content)
    with pytest.raises(InputError, match=r"third\.onnx"):
        optimize_export(workplace / "portable", workplace / "new")


def test_a_package_that_fails_says_why(workplace: Path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(optimize, "PACKAGE", "import sys; print('on the way'); sys.exit('first\\nit does not fuse')")
    with pytest.raises(ExportError, match="could not optimise .* at level 'extended': it does not fuse"):
        optimize_export(workplace / "portable", workplace / "new", tool="transformers", level="extended")
    assert not (workplace / "new").exists() and capfd.readouterr() == ("", "")


def test_packages_that_are_not_installed(workplace: Path, monkeypatch) -> None:
    call = partial(optimize_export, workplace / "portable", workplace / "new")
    for package in ("torch", "sympy"):  # which the package for transformers needs
        monkeypatch.setattr(optimize, "find_spec", lambda name, package=package: None if name == package else object())
        refused(call, "tool", "transformers", match=f"pip install {package}", error=MissingPackageError)
    monkeypatch.setattr(portability, "find_spec", lambda name: None)
    refused(call, "tool", "onnxruntime", "transformers", match=r"\[cpu\]", error=MissingPackageError)
    refused(OrtNumpy, "folder", workplace / "portable", match=r"\[cpu\]", error=MissingPackageError)
    monkeypatch.undo()
    monkeypatch.setattr(optimize, "find_spec", lambda name: None if name in ("torch", "sympy") else object())
    call()


def test_no_place_for_temporary_files(portable, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(ExportError, match="temporary files.*TMPDIR"):
        optimize_export(portable(), tmp_path / "new")
    with pytest.raises(ExportError, match="temporary files.*TMPDIR"), optimized_graph(portable() / DECODER):
        pass
