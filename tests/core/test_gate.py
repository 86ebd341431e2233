"""Exports in integers: near the one in fp32 for every kind of model, written by a recipe, and let through by a gate."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from programs import forced
from refused import refused
from silence import quiet
from test_export import MODELS as ALL_MODELS
from test_export import histories, references, size_bytes

from bench.baselines.optimized_export import optimize_export
from bench.precision import agreement, groups_of
from t5accel.api import accelerate, tuned
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import ExportError, GateError, InputError
from t5accel.graphs.contract import DECODER, ENCODER, MANIFEST, WEIGHTS
from t5accel.graphs.export import export_model
from t5accel.graphs.export_cache import cached_export
from t5accel.graphs.manifest import describe_file, read_manifest, write_manifest
from t5accel.graphs.rewriting import check_external_data, contrib_operators, count_nodes
from t5accel.parity import ParityError, assert_close
from t5accel.precision.calibration import CalibrationSample, collect_ranges, ranges_by_graph
from t5accel.precision.convert import convert_export, quantize_export
from t5accel.precision.fp16 import export_fp16
from t5accel.precision.gate import quantize
from t5accel.precision.recipes import RECIPES, Recipe, Scheme, recipe_from_json
from t5accel.tokenization import TokenizerFile

ONE_THREAD = SessionSettings(threads=1)
MODELS = {name: ALL_MODELS[name] for name in
          ("deeper-decoder", "shallower-decoder", "gated-untied", "mt5", "umt5", "byt5")}  # fmt: skip


def everywhere(name: str, scheme: Scheme, embedding: Scheme | None = None) -> Recipe:
    return Recipe(name, encoder=scheme, decoder=scheme, head=scheme, embedding=embedding)


WEIGHTS_ALONE = everywhere("weights", Scheme(accuracy_level=1), Scheme())
STATIC = everywhere("static", Scheme("static"))
SMALL_BLOCKS = Scheme(bits=4, block_size=16)
# What each recipe may lose on the tiny models: the root of the mean square of the error, in units of the logits' own
# spread, and the share of positions at which another token is the likeliest. Half as much again as was measured.
LADDER: dict[str, tuple[Recipe, float, float]] = {
    "int8": (RECIPES["int8"], 0.09, 0.2),
    "int8-per-token": (RECIPES["int8-per-token"], 0.09, 0.2),
    "int8-dynamic": (RECIPES["int8-dynamic"], 0.1, 0.2),
    "int4": (RECIPES["int4"], 0.6, 0.65),
    "weights": (WEIGHTS_ALONE, 0.06, 0.16),
    "per-tensor": (everywhere("per-tensor", Scheme("dynamic", per_channel=False)), 0.1, 0.2),
    "reduced": (everywhere("reduced", Scheme("dynamic", reduce_range=True)), 0.12, 0.2),
    "blocks-of-16": (everywhere("blocks-of-16", SMALL_BLOCKS, SMALL_BLOCKS), 0.65, 0.75),
}  # fmt: skip


@pytest.fixture(scope="module")
def quantized(exported, tmp_path_factory) -> Callable[..., Path]:
    """``quantized(recipe, model)``: that tiny model's export in integers. Shared: do not write."""

    @cache
    def convert(recipe: Recipe, model: str = "deeper-decoder") -> Path:
        kind, sizes = MODELS[model]
        folder = tmp_path_factory.mktemp("integers") / recipe.name
        quantize_export(exported(kind, **sizes), folder, recipe)
        return folder

    return convert


@pytest.fixture(scope="module")
def fp32(exported) -> Callable[..., Path]:
    """``fp32(model)``: its export as it was. Shared: do not write."""
    return lambda model="deeper-decoder": exported(MODELS[model][0], **MODELS[model][1])


def lost(actual: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """The error in units of the spread, and the share of other tokens; the reference is checked to vary."""
    assert len(np.unique(expected.argmax(-1))) > 8, "a reference that does not vary is no evidence"
    error = float(np.sqrt(np.square(actual.astype(np.float64) - expected).mean()) / expected.std())
    return error, float((actual.argmax(-1) != expected.argmax(-1)).mean())


@pytest.fixture(scope="module")
def examples(padded_batch) -> list[CalibrationSample]:
    """The padded batch with tokens for the decoder."""
    return [CalibrationSample(*padded_batch, histories(6, 1, 9)[:, 0])]


# As near as the recipe allows


@pytest.mark.parametrize(("name", "model"), [*zip(LADDER, itertools.cycle(MODELS), strict=False), ("int4", "umt5")])
def test_logits_and_tokens_are_near_those_of_fp32(quantized, fp32, padded_batch, model: str, name: str) -> None:
    """Each recipe on some model, each model in some recipe."""
    recipe, most, others = LADDER[name]
    new = histories(6, 2, 9)
    actual, expected = (forced(folder, padded_batch, new, [3, 4]) for folder in (quantized(recipe, model), fp32(model)))
    assert actual.dtype == np.float32 and actual.shape == expected.shape
    error, other = lost(actual, expected)
    assert error < most and other <= others
    assert error > most / 100, "something should have been rounded"


# What else is in the batch


def alone(folder: Path, batch: Any, new: np.ndarray) -> np.ndarray:
    """The same row by row, without padding."""
    ids, mask = batch
    rows = []
    for row, length in enumerate(mask.sum(axis=1)):
        rows.append(forced(folder, (ids[row : row + 1, :length], mask[row : row + 1, :length]), new[row : row + 1]))
    return np.concatenate(rows)


@pytest.mark.parametrize("model", ["deeper-decoder", "umt5"])
def test_weights_alone_do_not_mind_what_else_is_in_the_batch(quantized, padded_batch, model: str) -> None:
    folder, new = quantized(WEIGHTS_ALONE, model), histories(6, 1, 9)
    together = forced(folder, padded_batch, new)
    assert_close(together, alone(folder, padded_batch, new), atol=1e-4 * max(1.0, float(together.std())))
    blind = [padded_batch[0], np.ones_like(padded_batch[1])]
    with pytest.raises(ParityError):
        assert_close(forced(folder, blind, new), together, atol=1e-2)


def test_dynamic_scales_depend_on_the_batch_by_no_more_than_the_rounding(quantized, fp32, padded_batch) -> None:
    """One scale for all rows that are multiplied at once: another row may be larger."""
    recipe, most, _ = LADDER["int8-dynamic"]
    folder, new = quantized(recipe), histories(6, 1, 9)
    together, one_by_one = forced(folder, padded_batch, new), alone(folder, padded_batch, new)
    assert 1e-3 < lost(together, one_by_one)[0] < min(most, 0.06)
    assert lost(one_by_one, forced(fp32(), padded_batch, new))[0] < most


def test_the_bundled_model_says_the_same(exported_mini, tmp_path: Path) -> None:
    """Freely generated: one token that differs changes all that follow, so most of them is much."""
    tokenizer = TokenizerFile(exported_mini)
    batch = tokenizer([f"translate English to French: {text}" for text in (
        "Where is my bag?", "I am tired.", "She lost her red umbrella.", "We have time.", "The house is small.",
        "He gave me a book yesterday.", "It rains.", "Do you want to eat with us tonight?")])  # fmt: skip
    ids, mask = batch["input_ids"], batch["attention_mask"]
    expected = greedy(OrtNumpy(exported_mini, settings=ONE_THREAD), ids, mask, max_new_tokens=20).sequences
    before = size_bytes(exported_mini)
    for name, at_least, ratio in (("int8", 0.8, 0.29), ("int8-dynamic", 0.7, 0.33)):
        manifest = quantize_export(exported_mini, tmp_path / name, name)
        actual = greedy(OrtNumpy(tmp_path / name, settings=ONE_THREAD), ids, mask, max_new_tokens=20).sequences
        a, b = (np.pad(tokens, ((0, 0), (0, 20 - tokens.shape[1]))) for tokens in (actual, expected))
        assert (a == b)[(a | b) > 0].mean() >= at_least, name  # padding in both is left out
        assert manifest.size_bytes < ratio * before
        assert (tmp_path / name / "tokenizer.json").read_bytes() == (exported_mini / "tokenizer.json").read_bytes()


# Scales found beforehand


@pytest.fixture(scope="module")
def calibrated(fp32, examples) -> dict[str, dict[str, tuple[float, float]]]:
    return ranges_by_graph(collect_ranges(fp32(), examples))


def test_static_scales_from_a_probe(fp32, padded_batch, calibrated, tmp_path: Path) -> None:
    quantize_export(fp32(), tmp_path / "static", STATIC, ranges=calibrated)
    for name in (ENCODER, DECODER):
        assert contrib_operators(tmp_path / "static" / name) == [], "operators of the standard alone"
        onnx.checker.check_model(str(tmp_path / "static" / name), full_check=True)
        assert count_nodes(tmp_path / "static" / name)["QuantizeLinear"] > 5
    new = histories(6, 1, 9)
    expected = forced(fp32(), padded_batch, new)
    error, other = lost(forced(tmp_path / "static", padded_batch, new), expected)
    assert 1e-3 < error < 0.06 and other < 0.1
    together, one_by_one = forced(tmp_path / "static", padded_batch, new), alone(tmp_path / "static", padded_batch, new)
    assert lost(together, one_by_one)[0] < 0.02, "the scales do not depend on the batch"
    narrow = {stack: {name: (low / 4, high / 4) for name, (low, high) in of_stack.items()}
              for stack, of_stack in calibrated.items()}  # fmt: skip
    quantize_export(fp32(), tmp_path / "narrow", STATIC, ranges=narrow)
    assert lost(forced(tmp_path / "narrow", padded_batch, new), expected)[0] > 4 * error, "the ranges should matter"


@pytest.mark.parametrize("given", [None, {}, {"encoder": {}, "decoder": {}}, "the decoder's alone"], ids=str)
def test_static_scales_without_a_probe(fp32, calibrated, tmp_path: Path, given: Any) -> None:
    given = {"decoder": calibrated["decoder"]} if isinstance(given, str) else given
    with pytest.raises(InputError, match="ranges"):
        quantize_export(fp32(), tmp_path / "static", STATIC, ranges=given)
    assert not list(tmp_path.iterdir())


def test_the_way_by_examples(fp32, examples, calibrated, padded_batch, tmp_path: Path) -> None:
    quantize_export(fp32(), tmp_path / "by ranges", STATIC, ranges=calibrated)
    assert convert_export(fp32(), tmp_path / "by examples", STATIC, examples=iter(examples)).recipe["name"] == "static"
    for name in (ENCODER, DECODER):
        assert (tmp_path / "by ranges" / name).read_bytes() == (tmp_path / "by examples" / name).read_bytes()
    assert convert_export(fp32(), tmp_path / "int8", "int8").recipe["gated"] is False
    assert convert_export(fp32(), tmp_path / "fp16", "fp16", examples=examples).recipe["probed"] is True
    for name in ("fp32", "bf16"):
        with pytest.raises(InputError, match="recipe"):
            convert_export(fp32(), tmp_path / name, name)


# What is written


@pytest.mark.parametrize("name", ["int8", "int8-dynamic", "int4", "per-tensor"])
def test_the_manifest_says_what_was_done(quantized, fp32, name: str) -> None:
    recipe = LADDER[name][0]
    before, after = read_manifest(fp32()), read_manifest(quantized(recipe))
    assert recipe_from_json(after.recipe) == recipe and after.recipe["hash"] == recipe.hash
    assert after.recipe["gated"] is False and after.recipe["gate"] == {} and after.shortlist == {} == after.optimized
    assert after.graphs == before.graphs and after.files.keys() == before.files.keys()
    assert (after.source, after.dims, after.tokens, after.opset) == (
        before.source, before.dims, before.tokens, before.opset)  # fmt: skip
    assert OrtNumpy(quantized(recipe), settings=ONE_THREAD).fingerprint() != OrtNumpy(fp32()).fingerprint()


def test_the_graphs_keep_the_contract(quantized, fp32) -> None:
    def declared(folder: Path) -> list[Any]:
        backend = OrtNumpy(folder, settings=ONE_THREAD)
        return [(value.name, value.type, value.shape) for session in (backend.encoder, backend.decoder)
                for value in (*session.get_inputs(), *session.get_outputs())]  # fmt: skip

    for recipe, _, _ in LADDER.values():
        assert declared(quantized(recipe)) == declared(fp32())


@pytest.mark.parametrize("name", ["int8", "int4", "int8-dynamic"])
def test_what_both_graphs_read_is_stored_once(tiny_t5, exported, padded_batch, tmp_path: Path, name: str) -> None:
    sizes = dict(vocab_size=3000)
    inside, beside = exported("deeper-decoder", **sizes), tmp_path / "beside"
    export_model(tiny_t5(**sizes), beside, external_threshold_bytes=0)
    for source, out in ((inside, "int inside"), (beside, "int beside")):
        quantize_export(source, tmp_path / out, name)
    manifest, block = read_manifest(tmp_path / "int beside"), RECIPES[name].embedding.block_size
    stem = f"shared.weight.{RECIPES[name].embedding.bits}bits.{block}"
    assert manifest.shared.keys() == {f"{stem}.blocks", f"{stem}.scales"}
    encoder, decoder = references(tmp_path / "int beside" / ENCODER), references(tmp_path / "int beside" / DECODER)
    assert encoder.keys() & decoder.keys() == manifest.shared.keys()
    assert all(encoder[shared] == decoder[shared] for shared in manifest.shared)
    assert WEIGHTS not in read_manifest(tmp_path / "int inside").files
    rows = 3000 * (block * RECIPES[name].embedding.bits // 8 + 4)
    saved = size_bytes(tmp_path / "int inside") - size_bytes(tmp_path / "int beside")
    assert saved > rows - 10 * 4096, "but for what some are filled up with to whole pages"
    heads = {tensor for tensor in decoder if tensor.startswith(("shared.", "lm_head."))}
    assert heads == manifest.shared.keys() | (
        {"shared.weight.8bits.channels.integers", "shared.weight.8bits.channels.scales"} if "dynamic" in name else set()
    ), "and where the head is in the same blocks, it is the embedding"
    assert len(OrtNumpy(tmp_path / "int beside", settings=ONE_THREAD)._weights) == 2
    new = histories(6, 2, 5)
    logits = [forced(tmp_path / folder, padded_batch, new) for folder in ("int inside", "int beside")]
    np.testing.assert_array_equal(*logits)


def test_a_shortlist_does_not_come_along(tiny_t5, padded_batch, tmp_path: Path) -> None:
    export_model(tiny_t5(), tmp_path / "fp32", shortlist=True)
    manifest = quantize_export(tmp_path / "fp32", tmp_path / "int8", "int8")
    assert read_manifest(tmp_path / "fp32").shortlist and not manifest.shortlist
    assert not [name for name in manifest.files if "shortlist" in name]
    backend = OrtNumpy(tmp_path / "int8", settings=ONE_THREAD)
    assert backend.shortlist is None and greedy(backend, *padded_batch, max_new_tokens=3).sequences.shape == (6, 3)


@pytest.mark.parametrize(
    "recipe", ["fp32", "fp16", "int3", Recipe("mixed", dtype="float16", decoder=Scheme())], ids=str
)
def test_recipes_that_are_not_of_integers(fp32, tmp_path: Path, recipe: Any) -> None:
    with pytest.raises(InputError, match="recipe|precision"):
        quantize_export(fp32(), tmp_path / "new", recipe)
    with pytest.raises(InputError, match="recipe|precision"):
        quantize(fp32(), tmp_path / "new", recipe, score=lambda _: {"x": 1.0}, max_loss={"x": 1})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "value"), [("int8", np.nan), ("int8-dynamic", np.inf)])
def test_weights_that_are_not_finite(tiny_t5, tmp_path: Path, name: str, value: float) -> None:
    model = copy.deepcopy(tiny_t5())
    with torch.no_grad():
        model.decoder.block[1].layer[2].DenseReluDense.wo.weight[3, 5] = value
    export_model(model, tmp_path / "fp32")
    with pytest.raises(InputError, match="finite numbers"):
        quantize_export(tmp_path / "fp32", tmp_path / "new", name)
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == ["fp32"]


# Weights that lie elsewhere


WRITERS: dict[str, Callable[[Path, Path], Any]] = {
    "int8": lambda folder, out: convert_export(folder, out, "int8"),
    "optimized": optimize_export,
    "checked": lambda folder, _: check_external_data(folder / ENCODER),
}
written = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)


@pytest.fixture
def pointed(exported, tmp_path: Path) -> Callable[[str], Path]:
    """An export, hashes and all, whose encoder names another file as that of its weights."""

    def point(location: str) -> Path:
        folder = Path(shutil.copytree(exported(external_threshold_bytes=0), tmp_path / "fp32"))
        model = onnx.load(folder / ENCODER, load_external_data=False)
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                entry.value = location if entry.key == "location" else entry.value
        onnx.save(model, folder / ENCODER)
        with_its_hash(folder)
        return folder

    return point


def with_its_hash(folder: Path) -> None:
    """Have the manifest describe an encoder that was changed."""
    content = json.loads((folder / MANIFEST).read_text())
    content["files"][ENCODER] = describe_file(folder / ENCODER)
    write_manifest(folder, content)


@written
@pytest.mark.parametrize("kind", ["../secret.bin", "absolute", "link.bin", "..", "absent"])
def test_no_file_from_elsewhere_is_copied(pointed, tmp_path: Path, write: Any, kind: str) -> None:
    secret = tmp_path / "secret.bin"
    secret.write_bytes(np.full(1 << 20, 7, np.uint8).tobytes())
    folder = pointed(str(secret) if kind == "absolute" else kind)
    (folder / "link.bin").symlink_to(secret)
    with pytest.raises(ExportError, match=rf"{ENCODER} names|link\.bin is a link out of its folder|absent is missing"):
        write(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@written
def test_a_link_out_of_the_folder_is_not_followed(exported, tmp_path: Path, write: Any) -> None:
    """Not even where the manifest has the hash of what it leads to."""
    folder = Path(shutil.copytree(exported(external_threshold_bytes=0), tmp_path / "fp32"))
    (folder / WEIGHTS).rename(tmp_path / "secret.bin")
    (folder / WEIGHTS).symlink_to(tmp_path / "secret.bin")
    with pytest.raises(ExportError, match=r"weights\.data is a link out of its folder"):
        write(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("write", [WRITERS["int8"], optimize_export])
def test_an_export_in_the_cache_of_the_hub_is_read(exported, tmp_path: Path, write: Any) -> None:
    """There all files are links to those in one other folder, named by their hashes."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for number, path in enumerate(exported(external_threshold_bytes=0).iterdir()):
        shutil.copy(path, tmp_path / "blobs" / str(number))
        (tmp_path / "snapshot" / path.name).symlink_to(f"../blobs/{number}")
    write(tmp_path / "snapshot", tmp_path / "out")


@pytest.mark.parametrize(("key", "value"), [("offset", "x"), ("offset", str(10**12))])
def test_weights_that_lie_nowhere(exported, tmp_path: Path, key: str, value: str) -> None:
    folder = Path(shutil.copytree(exported(external_threshold_bytes=0), tmp_path / "fp32"))
    model = onnx.load(folder / ENCODER, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = value if entry.key == key else entry.value
    onnx.save(model, folder / ENCODER)
    with_its_hash(folder)
    with pytest.raises(ExportError, match=r"The weight '.*' of .*encoder\.onnx cannot be read"):
        convert_export(folder, tmp_path / "out", "int8")


def test_nothing_is_said_unasked(fp32, calibrated, examples, tmp_path: Path, capfd) -> None:
    """By whatever makes one export of another."""
    with quiet():
        for recipe in (RECIPES["int8"], RECIPES["int4"], STATIC):
            quantize_export(fp32(), tmp_path / recipe.name, recipe, ranges=calibrated)
        export_fp16(fp32(), tmp_path / "fp16", examples=examples)
        optimize_export(fp32(), tmp_path / "optimized")
        for folder in tmp_path.glob("[!.]*"):
            OrtNumpy(folder, settings=ONE_THREAD)
    assert capfd.readouterr() == ("", "")


# The gate


@pytest.fixture
def temporary(tmp_path_factory, monkeypatch) -> Iterator[Path]:
    """Where temporary files lie, of which none may be left."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "1")  # else onnxruntime puts the number of its session there
    yield folder
    assert not list(folder.iterdir())


class Sensitive:
    """A score of 30 that falls by 2 for each of these groups that is in integers; what it was asked of is noted."""

    def __init__(self, *groups: str):
        self.groups, self.asked = groups, []

    def __call__(self, folder: Path) -> dict[str, float]:
        manifest = read_manifest(folder)
        recipe = recipe_from_json(manifest.recipe)
        self.asked.append(recipe.name)
        stack = {group: "encoder" if group.startswith("encoder") else "decoder" for group in self.groups}
        rounded = [group for group in self.groups if recipe.scheme(group, stack[group]) is not None]
        return {"bleu": 30.0 - 2 * len(rounded), "size": float(manifest.size_bytes)}


def test_what_passes_is_written(fp32, temporary: Path, tmp_path: Path) -> None:
    score = Sensitive()
    report = quantize(fp32(), tmp_path / "int8", "int8", score=score, max_loss={"bleu": 0})
    assert score.asked == ["fp32", "int8"] and len(report.attempts) == 1
    assert report.chosen.recipe == RECIPES["int8"] and report.chosen.losses == {"bleu": 0}
    assert report.baseline["bleu"] == 30 and report.max_loss == {"bleu": 0}
    assert report.manifest == read_manifest(tmp_path / "int8")
    assert report.manifest.recipe["gated"] is True and recipe_from_json(report.manifest.recipe) == RECIPES["int8"]
    gate = report.manifest.recipe["gate"]
    assert gate["max_loss"] == {"bleu": 0} and gate["baseline"] == report.baseline and gate["scores"]["bleu"] == 30
    assert gate["scores"]["size"] < gate["baseline"]["size"], "what was scored was in integers"
    assert greedy(OrtNumpy(tmp_path / "int8"), [[5, 6, 1]], max_new_tokens=3).decoder_calls == 3


@pytest.mark.parametrize("sensitive", [0, 1, 4, 7])
def test_as_few_groups_as_pass_stay_in_floats(fp32, temporary: Path, tmp_path: Path, sensitive: int) -> None:
    order = groups_of(fp32())[:7]
    score = Sensitive(*order[:sensitive])
    report = quantize(fp32(), tmp_path / "out", "int8", score=score, max_loss={"bleu": 0.5}, groups=iter(order))
    expected = RECIPES["int8"].without(order[:sensitive]) if sensitive else RECIPES["int8"]
    assert report.chosen.recipe == expected == recipe_from_json(report.manifest.recipe)
    assert report.manifest.recipe["name"] == (f"int8+{sensitive}" if sensitive else "int8")
    assert score.asked[0] == "fp32" and len(score.asked) == len(set(score.asked)) <= 8, "each once"
    assert sorted(one.recipe.name for one in report.attempts) == sorted(score.asked[1:])
    assert all(one.losses["bleu"] > 0.5 for one in report.attempts if len(one.recipe.overrides) < sensitive)
    graphs = [onnx.load(tmp_path / "out" / name).graph for name in (ENCODER, DECODER)]
    names = {tensor.name for graph in graphs for tensor in graph.initializer}
    assert ("shared.weight" in names) == (sensitive > 0), "the embedding is the first of the order"
    assert any(".wo.weight.T" in name and name.endswith(".T") for name in names) == (sensitive >= 4)


def test_groups_that_are_taken_out_may_take_more_bits_instead(fp32, temporary: Path, tmp_path: Path) -> None:
    order = groups_of(fp32())[:3]

    def score(folder: Path) -> dict[str, float]:
        recipe = read_manifest(folder).recipe
        four_bits = [recipe_from_json(recipe).scheme(group, "encoder") == everywhere.encoder for group in order]
        return {"bleu": 30.0 - (recipe["name"] != "fp32") * sum(four_bits)}

    everywhere = Recipe("four", encoder=Scheme(bits=4), decoder=Scheme(bits=4), embedding=Scheme(bits=4))
    report = quantize(
        fp32(), tmp_path / "out", everywhere, score=score, max_loss={"bleu": 1}, groups=order, instead=Scheme()
    )
    assert report.chosen.recipe == everywhere.without(order[:2], instead=Scheme())
    graph = onnx.load(tmp_path / "out" / ENCODER).graph
    products = [node for node in graph.node if node.op_type == "MatMulNBits"]
    bits = [next(a.i for a in node.attribute if a.name == "bits") for node in products]
    assert set(bits) == {4, 8}, "the first layer's attention has more bits than the rest"


@pytest.mark.parametrize(("metric", "baseline", "warned"), [
    ("rougeL", 4.99, True), ("bleu", 5.0, False), ("closeness", -0.01, False),
])  # fmt: skip
def test_a_gate_on_a_model_that_knows_nothing_says_so(fp32, tmp_path, metric: str, baseline: float, warned) -> None:
    report = quantize(fp32(), tmp_path / "new", "int8", score=lambda _: {metric: baseline}, max_loss={metric: 0.5})
    assert bool(report.warning) == warned


def test_a_limit_may_be_reached(fp32, temporary: Path, tmp_path: Path) -> None:
    score = Sensitive("lm_head", "decoder.0.wo")
    report = quantize(fp32(), tmp_path / "out", "int8", score=score, max_loss={"bleu": 2}, groups=["decoder.0.wo"])
    assert report.chosen.recipe.name == "int8+1" and report.chosen.losses == {"bleu": 2}


@pytest.mark.parametrize("groups", [None, ["decoder.0.wo", "decoder.1.wo"]])
def test_what_does_not_pass_leaves_nothing(fp32, temporary: Path, tmp_path: Path, groups: Any) -> None:
    score = Sensitive("lm_head", "decoder.0.wo")
    fewer = 2 if groups else 4
    closest = r"int8\+1" if groups else "int8"
    with pytest.raises(GateError, match=rf"The closest, {closest}, lost bleu {fewer} \(allowed 0\.5\)"):
        quantize(fp32(), tmp_path / "new", "int8", score=score, max_loss={"bleu": 0.5}, groups=groups)
    assert not list(tmp_path.iterdir())
    assert len(score.asked) >= 2


def test_a_bad_recipe_does_not_pass_by_real_scores(fp32, examples, temporary: Path, tmp_path: Path) -> None:
    """Four bits for a model of 32 dimensions, at 98 of 100 tokens; eight bits pass at 90, and near enough."""
    score = agreement(fp32(), examples, threads=1)
    with pytest.raises(GateError, match="Recipe int4 does not pass .* lost agreement"):
        quantize(fp32(), tmp_path / "int4", "int4", score=score, max_loss={"agreement": 2})
    assert not list(tmp_path.iterdir())
    report = quantize(fp32(), tmp_path / "int8", "int8", score=score, max_loss={"agreement": 10, "closeness": 0.05})
    assert report.baseline == {"agreement": 100, "closeness": pytest.approx(0, abs=1e-9)}
    assert 0 < report.chosen.losses["closeness"] < 0.05


def test_an_export_that_was_there_survives_what_does_not_pass(fp32, temporary: Path, tmp_path: Path) -> None:
    manifest = quantize_export(fp32(), tmp_path / "out", "int8")
    with pytest.raises(GateError):
        quantize(fp32(), tmp_path / "out", "int4", score=Sensitive("lm_head"), max_loss={"bleu": 1}, overwrite=True)
    assert read_manifest(tmp_path / "out") == manifest
    with pytest.raises(ExportError, match="overwrite=True"):
        quantize(fp32(), tmp_path / "out", "int4", score=Sensitive(), max_loss={"bleu": 1})
    report = quantize(fp32(), tmp_path / "out", "int4", score=Sensitive(), max_loss={"bleu": 1}, overwrite=True)
    again = quantize(fp32(), tmp_path / "out", "int4", score=Sensitive(), max_loss={"bleu": 1})
    assert report.manifest == again.manifest == read_manifest(tmp_path / "out")


def test_limits_scores_and_groups_that_are_none(fp32, temporary: Path, tmp_path: Path) -> None:
    """Whatever is wrong, nothing is written; wrong limits and groups are noticed before anything is scored."""
    call = partial(quantize, fp32(), tmp_path / "new", "int8")
    score = Sensitive()
    junk = (None, {}, 0.5, {"bleu": "1"}, {"bleu": float("nan")}, {"bleu": True})
    refused(partial(call, score=score), "max_loss", *junk, match="^max_loss")
    call = partial(call, max_loss={"bleu": 1})
    for groups in (["lm head"], ["lm_head", "lm head"]):
        refused(partial(call, score=score), "groups", groups, match="lm head")
    assert not score.asked
    refused(partial(call, score=Sensitive("lm_head")), "groups", ["lm head"], match="lm head")
    scores = (None, {"rougeL": 1.0}, [("bleu", 1.0)], {"bleu": None}, {"bleu": "43"})
    refused(call, "score", *(lambda _, found=found: found for found in scores), match="max_loss")
    values = iter([30.0, float("nan")])
    refused(call, "score", lambda _: {"bleu": next(values)}, match="lost bleu nan", error=GateError)
    fails = lambda folder: {"bleu": 1.0 if folder == fp32() else 1 / 0}  # noqa: E731
    refused(call, "score", fails, match="division", error=ZeroDivisionError)
    assert not list(tmp_path.iterdir())


# In the cache, and in one line


def test_that_quality_was_not_measured_is_said_where_it_is_made(cache_of_its_own, tiny_t5, capfd) -> None:
    """A sentence for each export when it is made, then silence; no warning of Python's, which shows source lines."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("fp32", "int8", "int4", "fp16"):
            accelerate(tiny_t5(seed=29), precision=name)
            told = capfd.readouterr()
            assert ("is exported once, and kept in" in told.err) == (name == "fp32")
            assert (f"kept in {name}, too. Its quality was not measured" in told.err) == (name != "fp32")
            accelerate(tiny_t5(seed=29), precision=name)
            assert (told.out, *capfd.readouterr()) == ("", "", "")
        accelerate(tiny_t5(seed=30), precision="int8", progress=False)
        assert (*capfd.readouterr(),) == ("", "")


@pytest.mark.parametrize(("precision", "tuned_for", "name"), [
    ("int8", "latency", "int8"), ("int8", "throughput", "int8-dynamic"), ("int4", "throughput", "int4"),
    ("fp16", "throughput", "fp16"), (RECIPES["int8"].without(["lm_head"]), "throughput", "int8+1"),
])  # fmt: skip
def test_precision_in_one_line(
    cache_of_its_own, tiny_t5, padded_batch, precision: Any, tuned_for: str, name: str
) -> None:
    model = tiny_t5(seed=24)
    accelerated = accelerate(model, precision=precision, tuned_for=tuned_for, threads=1, progress=False)
    assert accelerated.backend.manifest.recipe["name"] == name
    assert accelerated.backend.manifest.recipe.get("gated", False) is False
    ids, mask = padded_batch
    folder = cached_export(model, precision=tuned(precision if isinstance(precision, Recipe) else RECIPES[precision],
                                                  tuned_for))  # fmt: skip
    assert accelerated.backend.folder == folder
    expected = greedy(OrtNumpy(folder, settings=ONE_THREAD), ids, mask, min_new_tokens=8, max_new_tokens=8).sequences
    tokens = accelerated.generate(
        torch.as_tensor(ids), attention_mask=torch.as_tensor(mask), min_new_tokens=8, max_new_tokens=8)  # fmt: skip
    np.testing.assert_array_equal(tokens[:, 1:].numpy(), expected)


def test_an_export_runs_in_the_precision_that_it_has(quantized, fp32, capfd) -> None:
    folder = quantized(RECIPES["int8"])
    accelerate(folder)
    assert (*capfd.readouterr(),) == ("", ""), "who made it knows"
    for precision in (None, "int8", RECIPES["int8"]):
        assert accelerate(folder, precision=precision, progress=False).backend.folder == folder
    for given, precision in ((folder, "fp32"), (folder, "int4"), (folder, "fp16"), (fp32(), "int8")):
        with pytest.raises(InputError, match="^precision must be"):
            accelerate(given, precision=precision)
