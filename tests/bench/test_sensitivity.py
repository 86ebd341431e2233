"""The sweep: each group of weights once, that one alone in integers."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from test_export import MODELS, histories
from test_gate import Sensitive

from bench.precision import agreement, groups_of, only, sweep
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.errors import InputError
from t5accel.graphs.contract import DECODER, ENCODER
from t5accel.graphs.manifest import read_manifest
from t5accel.precision.calibration import CalibrationSample
from t5accel.precision.convert import quantize_export
from t5accel.precision.gate import quantize
from t5accel.precision.recipes import RECIPES, Recipe, Scheme, group_of, recipe_from_json

TWO_AND_THREE = [
    "embedding",
    *(f"encoder.{layer}.{kind}" for layer in range(2) for kind in ("attention", "feed_forward", "wo")),
    *(f"decoder.{layer}.{kind}" for layer in range(3) for kind in ("attention", "feed_forward", "wo")),
    "lm_head",
]


def weights_in(folder: Path) -> dict[str, np.ndarray]:
    """Of both graphs, by name."""
    found = {}
    for name in (ENCODER, DECODER):
        for tensor in onnx.load(folder / name).graph.initializer:
            found[f"{name} {tensor.name}"] = numpy_helper.to_array(tensor)
    return found


def groups_in_integers(folder: Path) -> set[str]:
    """Read off the names and types of the weights."""
    integers = {name.split()[1] for name, array in weights_in(folder).items() if array.dtype in (np.int8, np.uint8)}
    large = {name.split(".8bits")[0].split(".4bits")[0] for name in integers if "bits" in name}
    kinds = {node.op_type for name in (ENCODER, DECODER) for node in onnx.load(folder / name).graph.node}
    return {str(group_of(name)) for name in large} | ({"embedding"} if "GatherBlockQuantized" in kinds else set())


def test_the_groups_of_a_model(exported) -> None:
    assert groups_of(exported()) == TWO_AND_THREE
    assert groups_of(str(exported("shallower-decoder")))[-4:] == [
        "decoder.0.attention", "decoder.0.feed_forward", "decoder.0.wo", "lm_head"]  # fmt: skip
    assert len(groups_of(exported("gated-untied", **MODELS["byt5"][1]))) == 1 + 3 * (6 + 2) + 1


@pytest.mark.parametrize("recipe", ["int4", "int8-dynamic"])
def test_each_group_once_and_that_one_alone(exported, monkeypatch, tmp_path: Path, recipe: str) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before, changed, seen = weights_in(exported()), [], []

    def score(folder: Path) -> dict[str, float]:
        if folder != exported():
            after = weights_in(folder)
            missing = {name.split()[1] for name in before.keys() - after.keys()}
            changed.append((recipe_from_json(read_manifest(folder).recipe).name, groups_in_integers(folder), missing))
            assert all(np.array_equal(before[name], after[name]) for name in before.keys() & after.keys())
        return {"bleu": 30.0 - len(changed)}

    found = sweep(exported(), recipe, score, on_group=seen.append)
    assert [one.group for one in found] == TWO_AND_THREE and seen == found
    assert [name for name, _, _ in changed] == [f"{recipe}-{group}" for group in TWO_AND_THREE]
    for group, (_, integers, missing) in zip(TWO_AND_THREE, changed, strict=True):
        tied = {"lm_head", "embedding"}  # the head's copy is made of the embedding's array
        assert (integers - tied if group == "embedding" else integers) == ({group} - {"embedding"})
        assert {group_of(name) for name in missing} <= {group, *(tied if group in tied else ())}
        assert missing or group == "lm_head", "what was rounded is not there in floats any more"
    assert [one.scores["bleu"] for one in found] == [29.0 - number for number in range(17)]
    assert [one.losses["bleu"] for one in found] == [1.0 + number for number in range(17)]
    sizes, whole = {one.group: one.size_bytes for one in found}, read_manifest(exported()).size_bytes
    assert len(set(sizes.values())) > 3 and all(sizes[group] < whole for group in sizes if "wo" in group)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("groups", [["lm_head", "decoder.3.attention"], ["wo"], "lm_head"], ids=str)
def test_groups_that_the_model_has_not(exported, groups: Any) -> None:
    score = Sensitive()
    with pytest.raises(InputError, match="groups_of"):
        sweep(exported(), "int8", score, groups=groups)
    assert not score.asked


PARTS: dict[str, tuple[Recipe, list[str]]] = {
    "decoder": (Recipe("x", decoder=Scheme()), [group for group in TWO_AND_THREE if group.startswith("decoder")]),
    # With keys and values of the source, which the encoder's graph computes.
    "encoder": (Recipe("x", encoder=Scheme()), [group for group in TWO_AND_THREE if group.startswith("encoder")
                                                or "decoder" in group and "attention" in group]),
    "all but one": (RECIPES["int8"].without(["decoder.1.wo"]),
                    [group for group in TWO_AND_THREE if group != "decoder.1.wo"]),
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_what_a_recipe_leaves_in_floats_is_left_out(exported, part: str) -> None:
    recipe, expected = PARTS[part]
    found = [group for group in TWO_AND_THREE if only(recipe, group, chosen_from=TWO_AND_THREE) is not None]
    assert found == expected
    some = sweep(exported(), recipe, lambda _: {"bleu": 1.0}, groups=TWO_AND_THREE[::4])
    assert [one.group for one in some] == [group for group in TWO_AND_THREE[::4] if group in expected]


def test_by_real_scores_into_the_gate(exported, padded_batch, tmp_path: Path) -> None:
    """What four bits cost most is what the gate takes out first, and that is better than the other way round."""
    examples = [CalibrationSample(*padded_batch, histories(6, 1, 9)[:, 0])]
    score = agreement(exported(), examples, threads=1)
    found = sweep(exported(), "int4", score)
    order = [one.group for one in sorted(found, key=lambda one: -one.losses["closeness"])]
    assert sorted(order) == sorted(TWO_AND_THREE)
    first, last = RECIPES["int4"].without(order[:5]), RECIPES["int4"].without(order[-5:])
    losses = []
    for number, recipe in enumerate((first, last)):
        quantize_export(exported(), tmp_path / str(number), recipe)
        losses.append(-score(tmp_path / str(number))["closeness"])
    assert losses[0] < 0.8 * losses[1]
    report = quantize(exported(), tmp_path / "gated", "int4", score=score, groups=order,
                      max_loss={"closeness": (losses[0] + losses[1]) / 2})  # fmt: skip
    assert 1 <= len(report.chosen.recipe.overrides) <= 5
    assert OrtNumpy(tmp_path / "gated", settings=SessionSettings(threads=1)).manifest.recipe["gated"] is True
