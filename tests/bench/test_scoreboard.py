"""A family side by side: a row for each member and recipe, equal before it is timed. No speed is asserted here."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from refused import refused

import bench.scoreboard as module
from bench import harness
from bench.results import checked
from bench.scoreboard import family_rows, recorded_family
from t5accel.backends.torch_eager import TorchEager
from t5accel.distillation.importance import Gates
from t5accel.distillation.pruning import prune_to
from t5accel.distillation.student import shrink_decoder
from t5accel.models.load import load_model
from t5accel.models.random_init import random_t5
from t5accel.models.sizes import T5Dims
from t5accel.parity import ParityError
from t5accel.precision.recipes import RECIPES

TINY = dict(vocab_size=8000, d_model=16, d_kv=8, d_ff=32, num_heads=2, num_layers=2)
QUICK = dict(rounds=2, source_tokens=6, new_tokens=3)


@pytest.fixture(scope="module")
def tiny(saved) -> tuple[Path, Path]:
    """The folders of a tiny model with the bundled one's tokenizer, and of what pruning left of it."""
    model = random_t5(TINY, seed=3)
    kept = {name: those[: len(those) // 2] for name, those in Gates(model).kept().items()}
    return saved(model, "whole"), saved(prune_to(model, kept), "pruned")


def test_there_is_a_row_for_each_member_and_one_for_each_recipe_of_it_with_its_own_quality(mini, saved) -> None:
    """The bundled model and what shrinking makes of it, without any training."""
    folder, said = saved(shrink_decoder(mini[0], [1, 2]), "student"), []
    found = family_rows({"teacher": "mini", "student": folder}, limit=1, on_model=said.append, **QUICK)
    assert said == ["teacher", "student"] and json.loads(json.dumps([checked(row) for row in found]))
    assert [(row["measured"], row["model"], row.get("precision")) for row in found] == [
        ("size", "teacher", None), ("speed", "teacher", "fp32"), ("speed", "teacher", "int8"),
        ("size", "student", None), ("speed", "student", "fp32"), ("speed", "student", "int8"),
    ]  # fmt: skip
    teacher, student = found[::3]
    assert [len(row["settings"]["decoder_heads"]) for row in (teacher, student)] == [4, 2]
    assert teacher["settings"]["encoder_ff"] == T5Dims.of(mini[0]).encoder_ff
    assert teacher["weights_per_step"] > student["weights_per_step"]
    speeds = [row for row in found if row["measured"] == "speed"]
    assert [row["recipe_hash"] for row in speeds] == 2 * [RECIPES["fp32"].hash, RECIPES["int8"].hash]
    teacher, quantized, student, both = speeds
    assert teacher["size_bytes"] > student["size_bytes"] > quantized["size_bytes"] > both["size_bytes"] > 2e6
    assert teacher["weights_per_step"] == quantized["weights_per_step"] > student["weights_per_step"]
    for row in speeds:
        assert (row["batch"], row["source_tokens"], row["new_tokens"]) == (1, 6, 3) and row["threads"] >= 1
        assert len(row["latency_s"]) == 2 and row["reference"] == "teacher, fp32" and row["limit"] == 1
        expected = [a / b for a, b in zip(teacher["latency_s"], row["latency_s"], strict=True)]
        assert row["ratio_samples"] == expected and row["ratio"] > 0
    best, worst = min(row["chrf"] for row in speeds[:2]), max(row["chrf"] for row in speeds[2:])
    assert best > 2 * worst, "the bundled model translates, half of its decoder without training does not"


def test_an_export_that_is_not_equal_is_not_measured(tiny: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    other = random_t5(TINY, seed=4)
    timed: list[Any] = []
    monkeypatch.setattr(harness, "compare", lambda *given, **options: timed.append(given))
    monkeypatch.setattr("t5accel.backends.torch_eager.TorchEager", lambda model: TorchEager(other))
    with pytest.raises(ParityError):
        family_rows({"whole": tiny[0], "pruned": tiny[1]}, limit=0, **QUICK)
    assert not timed


def test_too_few_members_and_one_without_a_tokenizer_are_refused(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    one = {"mini": "mini"}
    refused(partial(family_rows, recipes=["fp32", "int8"]), "members", {}, match="two members")
    refused(partial(family_rows, one), "recipes", ["fp32"], [], ["fp32", "fp32"], match="two members")
    load_model(tiny[0])[0].save_pretrained(tmp_path)
    members = {"whole": tiny[0], "mute": tmp_path}
    call = partial(family_rows, limit=0, **QUICK)
    refused(partial(call, recipes=["fp32"]), "members", members, match=r"mute \(.*\) has no tokenizer")
    refused(partial(call, {"whole": tiny[0]}), "recipes", ["fp32", "fp64"], match="fp64")


def test_a_recorded_family_grows_and_nothing_is_measured_twice(tmp_path: Path, monkeypatch) -> None:
    asked: list[tuple[list[str], set[str]]] = []

    def measured(members: dict[str, Any], *, scored: set[str], **_: Any) -> list[dict[str, Any]]:
        asked.append(([*members], scored))
        sizes = [{"measured": "size", "model": name, "sha256": f"hash of {where}"} for name, where in members.items()]
        return sizes + [{"measured": "speed", "model": name, "system": name, "bleu": 1.0} for name in members]

    def told(name: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"measured": "training", "model": name, "steps": 3}, *(row | {"made_from": "whole"} for row in rows)]

    monkeypatch.setattr(module, "family_rows", measured)
    monkeypatch.setattr(module, "load_model", lambda where: (where, None))
    monkeypatch.setattr(module, "_hash", lambda where: f"hash of {where}")
    path, of = tmp_path / "family.json", dict(command="python scripts/x.py", told=told)
    recorded_family(path, "whole", {"a": "there"}, **of)
    rows = recorded_family(path, "whole", {"b": "there"}, **of)  # the weights of "a" are gone, its rows are not
    assert rows == recorded_family(path, "whole", {"b": "there", "a": "there"}, **of)
    assert asked == [(["whole", "a"], {"whole", "a"}), (["whole", "b"], {"b"})]
    seen = [(row["measured"], row["model"], row.get("made_from")) for row in rows if row["measured"] != "size"]
    assert seen == [
        ("speed", "whole", None), ("training", "a", None), ("speed", "a", "whole"), ("training", "b", None),
        ("speed", "b", "whole"),
    ]  # fmt: skip
    assert all(row["commit"] for row in rows if row["measured"] == "speed")
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["rows"] == rows and content["whole_sha256"] == "hash of whole"
    again = recorded_family(path, "whole", {"a": "trained anew"}, **of)
    assert asked[-1] == (["whole", "a"], {"a"}) and len(again) == len(rows), "in place of the old ones"
