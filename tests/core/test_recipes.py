"""Recipes: what may stand in one, how it is written down and read again, and which weight belongs to which group."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_export import MODELS

from t5accel.errors import InputError
from t5accel.graphs.export import t5_weights
from t5accel.graphs.layers import decoder_graph, encoder_graph
from t5accel.graphs.manifest import KNOWN
from t5accel.graphs.rewriting import find_matmuls
from t5accel.models.sizes import T5Dims
from t5accel.precision.recipes import DTYPES, NOTES, RECIPES, Recipe, Scheme, as_recipe, group_of, recipe_from_json

INT8, INT4, DYNAMIC = Scheme(), Scheme(bits=4, block_size=32), Scheme("dynamic")


# Schemes


@pytest.mark.parametrize("method", ["dynamic", "static"])
def test_four_bits_are_for_weights_alone(method: str) -> None:
    with pytest.raises(InputError, match="^bits"):
        Scheme(method, bits=4)


def test_numbers_of_numpy_are_written_down_all_the_same() -> None:
    """As a loop over ``np.array([16, 32])`` gives them."""
    recipe = Recipe("numpy", decoder=Scheme(block_size=np.int64(32), bits=np.int32(4)))
    assert recipe.hash == Recipe("numpy", decoder=INT4).hash and recipe_from_json(recipe.to_json()) == recipe


# Recipes


def test_which_scheme_a_group_has() -> None:
    recipe = Recipe(
        "x", encoder=DYNAMIC, decoder=INT8, head=INT4, overrides=(("decoder.1.wo", None), ("lm_head", INT8))
    )
    assert recipe.scheme("encoder.0.wo", "encoder") == DYNAMIC and recipe.scheme("decoder.0.wo", "decoder") == INT8
    assert recipe.scheme("decoder.0.attention", "encoder") == DYNAMIC, "keys and values of the source"
    assert recipe.scheme("decoder.1.wo", "decoder") is None and recipe.scheme("embedding", "encoder") is None
    assert recipe.scheme("lm_head", "decoder") == INT8
    assert replace(recipe, overrides=()).scheme("lm_head", "decoder") == INT4


def test_groups_are_taken_out() -> None:
    before = RECIPES["int8"]
    after = before.without(["decoder.0.wo", "lm_head"])
    assert after.name == "int8+2" and before.overrides == ()
    for group in ("decoder.0.wo", "lm_head"):
        assert after.scheme(group, "decoder") is None and before.scheme(group, "decoder") == INT8
    assert after.scheme("decoder.1.wo", "decoder") == after.scheme("embedding", "decoder") == INT8
    assert before.without(("lm_head", "decoder.0.wo")).hash == after.hash != before.hash, "in whatever order"
    once_more = after.without(["encoder.1.attention"])
    assert dict(once_more.overrides).keys() == {"decoder.0.wo", "lm_head", "encoder.1.attention"}
    others = Recipe("x", overrides=(("lm_head", INT4),), decoder=INT8).without(["lm_head"])
    assert others.overrides == (("lm_head", None),), "instead of what was said of it"


def test_the_recipes_in_plain_words() -> None:
    assert {name: recipe.name for name, recipe in RECIPES.items()} == {name: name for name in RECIPES}
    assert {name: recipe.dtype for name, recipe in RECIPES.items() if recipe.dtype != "float32"} == {
        "fp16": "float16", "bf16": "bfloat16"}  # fmt: skip
    assert RECIPES["fp32"] == Recipe("fp32")
    int8, per_token, dynamic, int4 = (RECIPES[n] for n in ("int8", "int8-per-token", "int8-dynamic", "int4"))
    assert (int8.encoder, int8.decoder, int8.head, int8.embedding) == (DYNAMIC, INT8, INT8, INT8)
    assert (dynamic.encoder, dynamic.decoder, dynamic.head, dynamic.embedding) == (DYNAMIC, DYNAMIC, DYNAMIC, INT8)
    assert per_token == replace(int8, name="int8-per-token", encoder=Scheme("per-token", reduce_range=True))
    assert [int8.batch_dependent_stacks, per_token.batch_dependent_stacks] == [{"encoder"}, set()]
    assert (int4.encoder, int4.decoder) == (DYNAMIC, replace(INT4, block_size=64))
    assert int4.head == int4.embedding == INT4


def test_recipes_by_name() -> None:
    for name, recipe in RECIPES.items():
        assert as_recipe(name) is as_recipe(recipe) is recipe
    for junk in ("int2", "INT8", None, INT8, ["int8"]):
        with pytest.raises(InputError, match="^precision"):
            as_recipe(junk)


# How it is written down

schemes = st.builds(Scheme, st.just("weight-only"), st.sampled_from([4, 8]), st.sampled_from([16, 32, 64]),
                    st.integers(0, 4), st.booleans(), st.booleans())  # fmt: skip
any_scheme = schemes | st.builds(Scheme, st.sampled_from(["dynamic", "static"]), reduce_range=st.booleans())
groups = st.sampled_from(["lm_head", "encoder.0.wo", "encoder.11.attention", "decoder.1.feed_forward", "decoder.2.wo"])
overrides = st.dictionaries(groups, st.none() | any_scheme, max_size=3).map(lambda found: tuple(found.items()))
recipes = st.builds(
    Recipe, st.from_regex(r"[\w.+-]{1,60}", fullmatch=True), st.sampled_from(DTYPES), st.none() | any_scheme,
    st.none() | any_scheme, st.none() | any_scheme, st.none() | schemes, overrides,
)  # fmt: skip


@given(recipe=recipes)
def test_what_is_written_is_read_again(recipe: Recipe) -> None:
    content = recipe.to_json()
    on_disk = json.loads(json.dumps(content))
    assert on_disk == content, "plain values, which compare as those of a file"
    again = recipe_from_json(on_disk)
    assert again == recipe and again.hash == recipe.hash == content["hash"] and hash(again) == hash(recipe)
    assert re.fullmatch("[0-9a-f]{16}", recipe.hash)


def test_every_difference_is_in_the_hash() -> None:
    one = Recipe("x", encoder=INT8, decoder=INT8, head=INT8, embedding=INT8)
    differences: list[dict[str, Any]] = [dict(name="y"), dict(dtype="float16"), dict(overrides=(("lm_head", None),)),
                                         dict(overrides=(("lm_head", INT4),))]  # fmt: skip
    others = dict(bits=4, block_size=32, accuracy_level=1, per_channel=False, reduce_range=True)
    changed = [replace(INT8, **{name: value}) for name, value in others.items()]
    for name in ("encoder", "decoder", "head", "embedding"):
        differences += [{name: scheme} for scheme in (None, *changed)]
    for name in ("encoder", "decoder", "head"):
        differences += [{name: DYNAMIC}, {name: Scheme("static")}]
    hashes = {replace(one, **difference).hash for difference in differences} | {one.hash}
    assert len(hashes) == len(differences) + 1


def test_notes_are_left_aside_and_what_a_later_release_adds_is_refused() -> None:
    recipe = RECIPES["int4"].without(["lm_head"])
    content = {**recipe.to_json(), "gated": False, "in_fp32": ["x"]}
    assert recipe_from_json(content) == recipe
    assert recipe_from_json({"name": "fp32"}) == RECIPES["fp32"], "as the manifests of exports in fp32 have it"
    of_scheme = {"head": {**content["decoder"], "outliers": 8}}
    for later, what in (({"outliers": 8}, "recipe"), (of_scheme, "scheme")):
        with pytest.raises(InputError, match=f"^{what} has the unknown entry 'outliers': it was written by a newer"):
            recipe_from_json(content | later)


def test_recipes_of_recorded_results_are_read() -> None:
    recorded = Path(__file__).resolve().parents[2] / "data/results/quantization-aware.json"
    recipe = json.loads(recorded.read_text(encoding="utf-8"))["recipe"]
    assert recipe_from_json(recipe).hash == recipe["hash"]


def test_manifests_know_what_recipes_write() -> None:
    written = RECIPES["int8"].to_json()
    assert KNOWN["recipe"].keys() == {*written, *NOTES} and KNOWN["recipe"]["encoder"].keys() == {*written["encoder"]}


# Groups


def three(stack: str, layer: int) -> list[str]:
    return [f"{stack}.{layer}.{kind}" for kind in ("attention", "feed_forward", "wo")]


@pytest.mark.parametrize("name", ["shallower-decoder", "gated-untied", "umt5"])
def test_every_product_of_the_graphs_belongs_to_a_group(tiny_t5, name: str) -> None:
    kind, sizes = MODELS[name]
    model = tiny_t5(kind, **sizes)
    weights, dims = t5_weights(model), T5Dims.of(model)
    counted = {
        stack: Counter(group_of(product.weight) for product in find_matmuls(graph))
        for stack, graph in (("encoder", encoder_graph(weights)), ("decoder", decoder_graph(weights)))
    }
    expected = {"encoder": Counter(), "decoder": Counter({"lm_head": 1})}
    for layer in range(dims.encoder_layers):
        expected["encoder"] |= dict(zip(three("encoder", layer), (4, 1 + dims.gated, 1), strict=True))
    for layer in range(dims.decoder_layers):
        expected["encoder"][f"decoder.{layer}.attention"] = 2  # keys and values of the source
        expected["decoder"] |= dict(zip(three("decoder", layer), (6, 1 + dims.gated, 1), strict=True))
    assert counted == expected
