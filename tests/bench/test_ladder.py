"""Ladders: their rungs, the climb on a tiny model with rungs that cheat, how rows are shown. No speed is asserted."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refused import refused

from bench import harness, ladder
from bench.evaluation import MAIN_SCORES
from bench.ladder import GATE, Rung, by_ladder, climb, forced_rungs, natural_rungs, way_to
from bench.results import checked
from bench.scoreboard import Forced, Natural
from bench.systems import SYSTEMS, BenchModel
from t5accel.errors import InputError, UnequalWorkError
from t5accel.models.random_init import random_t5
from t5accel.parity import ParityError

pytestmark = pytest.mark.usefixtures("cache_of_its_own", "threads_put_back")

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "data/results/ladder-amd.json"
SIZES = dict(vocab_size=8000, d_model=32, d_kv=8, d_ff=64, num_heads=4, num_layers=2)
JOB = Natural(texts=3, longest=6)
QUICK: dict[str, Any] = dict(rounds=2, threads=1, limit=0, peak_memory=False)
BY_NAME = {rung.name: rung for rung in natural_rungs()}
NAIVE, CACHE = BY_NAME["naive"], BY_NAME["cache"]
LOOP, INT8 = replace(BY_NAME["loop"], on="naive"), replace(BY_NAME["int8"], on="loop")


@pytest.fixture(scope="module")
def tiny(saved) -> str:
    """The folder of a tiny model whose output varies, with the bundled one's tokenizer."""

    def is_lively(seed: int) -> bool:
        subject = BenchModel("tiny", seed, 1)
        subject._loaded = random_t5(SIZES, seed=seed), None
        ids = np.random.default_rng(0).integers(3, SIZES["vocab_size"], (2, 9))
        rows = NAIVE.system.build(subject)(ids, np.ones_like(ids), 6, 6).tolist()
        return min(len({*row} - {0, 1}) for row in rows) >= 4 and rows[0] != rows[1]

    return str(saved(random_t5(SIZES, seed=next(filter(is_lively, range(50))))))


@pytest.fixture(scope="module")
def student(saved) -> str:
    """The folder of a model with fewer layers."""
    return str(saved(random_t5(SIZES | dict(num_decoder_layers=1), seed=99)))


def altered(
    change: Callable[[np.ndarray, int], np.ndarray], *, like: Rung = LOOP, **different: Any
) -> tuple[Rung, Counter]:
    """A rung whose answers go through ``change(output, call)`` with call = 1, 2, …; and how often it was called."""
    calls: Counter[str] = Counter()

    def build(subject: BenchModel):
        honest = like.system.build(subject)

        def generate(*given: Any) -> np.ndarray:
            calls["in all"] += 1
            return change(honest(*given), calls["in all"])

        return generate

    return replace(like, name="a rival", system=replace(like.system, build=build), **different), calls


@pytest.mark.parametrize("rungs", [forced_rungs(), natural_rungs()])
def test_every_rung_adds_one_idea_to_one_below_it(rungs: tuple[Rung, ...]) -> None:
    names = [rung.name for rung in rungs]
    assert len(set(names)) == len(names) and names[:2] == ["naive", "cache"] and rungs[0].on is None
    for place, rung in enumerate(rungs[1:], start=1):
        below = rungs[names.index(rung.on, 0, place)]
        different = [rung.system is not below.system, rung.model != below.model, rung.batch != below.batch]
        assert different.count(True) == 1, f"{rung.name} adds {different.count(True)} ideas to {below.name}"
        assert rung.system is SYSTEMS[rung.system.name]


def test_bad_ladders_are_refused_before_a_model_is_loaded() -> None:
    refused(partial(replace, LOOP), "batch", 0, match="^batch")
    call = partial(climb, job=JOB, model="no such model", **QUICK)
    bad = ([NAIVE], [NAIVE, LOOP, LOOP], [CACHE, LOOP], [replace(INT8, on=None), LOOP], [NAIVE, INT8])
    refused(partial(call, max_loss=GATE), "rungs", *bad)
    refused(partial(call, [NAIVE, LOOP]), "max_loss", {"speed": 1.0})


def test_a_climb_gives_a_row_for_each_rung(tiny: str, student: str) -> None:
    rungs = [
        NAIVE, CACHE, replace(LOOP, on="cache"), INT8, BY_NAME["lookup"],
        Rung("batches", "3 texts at once", "loop", LOOP.system, batch=3),
        replace(BY_NAME["dynamic, batches"], batch=3), replace(LOOP, name="student", on="loop", model=student),
    ]  # fmt: skip
    said: list[str] = []
    rows = climb(rungs, JOB, model=tiny, ladder="toy", on_rung=said.append, **QUICK)
    assert said == [row["rung"] for row in rows] == [rung.name for rung in rungs]
    by_rung = {row["rung"]: row for row in rows}
    for rung, row in zip(rungs, rows, strict=True):
        assert (row["cell"], row["adds"], row.get("on"), row["batch"]) == ("toy", rung.adds, rung.on, rung.batch)
        assert (row["model"], row["system"]) == (rung.model or tiny, rung.system.name)
        assert (row["precision"], row["recipe_hash"]) == (rung.system.recipe.name, rung.system.recipe.hash)
        assert (row["texts"], row["forced"], row["threads"], row["of"]) == (3, False, 1, 3)
        assert row["source_tokens"] > 20 and row["reference"] == NAIVE.system.name
        assert len(row["latency_s"]) == 2
        assert row["tokens_per_s"] == pytest.approx(row["new_tokens"] / np.median(row["latency_s"]))
        for key, other in (("factor", by_rung[rung.on or "naive"]), ("ratio", rows[0])):
            samples = [there / here for there, here in zip(other["latency_s"], row["latency_s"], strict=True)]
            assert row[f"{key}_samples"] == samples and row[key] == np.median(samples)
        assert not {"peak_memory_bytes", "bleu"} & row.keys()
        if rung.is_exact:
            assert (row["equal"], row["inside"]) == (3, True)
            assert row["new_tokens"] == rows[0]["new_tokens"] > 3
        else:
            assert "inside" not in row and 0 <= row["equal"] <= 3
        assert json.loads(json.dumps(checked(row))) == row
    sizes = {name: row["size_bytes"] for name, row in by_rung.items()}
    assert sizes["int8"] == sizes["lookup"] < sizes["student"] < sizes["loop"] == sizes["batches"]
    assert by_rung["student"]["equal"] == 0, "another model gives other answers"


def shifted(out: np.ndarray, call: int) -> np.ndarray:
    return np.concatenate([out[:, :1] % 60 + 1, out[:, 1:]], axis=1)


def test_other_tokens_are_refused_before_anything_is_timed(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rival, calls = altered(shifted, batch=3)
    monkeypatch.setattr(harness, "compare", lambda *_, **__: pytest.fail("timed before proven equal"))
    with pytest.raises(ParityError):
        climb([NAIVE, rival], JOB, model=tiny, **QUICK)
    assert calls["in all"] == 1


def test_forced_work_is_checked_while_it_is_timed(tiny: str) -> None:
    job = Forced(new_tokens=8, source_tokens=9)
    rows = climb([NAIVE, LOOP], job, model=tiny, **QUICK)
    assert {(row["texts"], row["new_tokens"], row["source_tokens"], row["of"]) for row in rows} == {(1, 8, 9, 8)}
    assert not any("forced" in row for row in rows)
    lazy, _ = altered(lambda out, call: out if call == 1 else out[:, :-1])
    with pytest.raises(UnequalWorkError, match="a rival"):
        climb([NAIVE, lazy], job, model=tiny, **QUICK)
    with pytest.raises(InputError, match="^batch "):
        climb([NAIVE, replace(LOOP, batch=2)], job, model=tiny, **QUICK)


def test_quality_is_that_of_the_rungs_own_answers() -> None:
    sizes: set[int] = set()

    def mute(out: np.ndarray, call: int) -> np.ndarray:
        sizes.add(len(out))
        return np.ones_like(out)

    rival, _ = altered(mute, like=replace(INT8, on="loop"), batch=2)
    rows = climb(
        [NAIVE, LOOP, INT8, rival], Natural(texts=3, longest=4), model="mini", max_loss={"rougeL": 20.0},
        **QUICK | dict(limit=1),
    )  # fmt: skip
    naive, loop, int8, mute_row = rows
    assert [naive[name] for name in MAIN_SCORES] == [loop[name] for name in MAIN_SCORES]
    assert naive["rougeL"] > 20 and mute_row["rougeL"] == 0 and sizes == {1, 2}
    assert [row["inside"] for row in rows] == [True, True, naive["rougeL"] - int8["rougeL"] <= 20, False]
    assert {row["settings"]["max_loss_rougeL"] for row in rows} == {20.0}


def test_the_quality_of_a_recipe_is_found_by_its_hash_and_a_gate_is_kept_to_the_point() -> None:
    def scored(system: str, recipe: str, **different: Any) -> dict[str, Any]:
        return {"system": system, "recipe_hash": recipe, "model": "mini", "batch": 1, "exact": False} | different

    there = [scored("loop", "fp32", bleu=28.0, exact=True), scored("loop", "8", bleu=27.5),
             scored("loop", "8", bleu=20.0, model="a student"), scored("loop", "8", bleu=21.0, batch=32)]  # fmt: skip
    here = [scored("cache", "fp32", exact=True, inside=True), scored("loop", "8"), scored("loop", "4")]
    exact, eight, four = ladder.with_quality_of(here, there, max_loss={"bleu": 0.4})
    assert (exact["bleu"], exact["inside"]) == (28.0, True) and (eight["bleu"], eight["inside"]) == (27.5, False)
    assert eight["quality_of"] == "mini" and four == here[2]
    assert ladder.with_quality_of(here, here) == here
    expected = {"bleu": 28.0, "rougeL": 58.0}
    for bleu, inside in ((27.0, True), (26.9, False)):
        found = ladder.judged({"bleu": bleu, "rougeL": 0.0}, expected, {"bleu": 1.0}, exact=False)
        assert found["inside"] is inside and found["bleu"] == bleu
    assert "inside" not in ladder.judged(None, None, GATE, exact=False)


def shown(rung: str, on: str | None, ratio: float, **different: Any) -> dict[str, Any]:
    """A row as `climb` makes it, with what is shown of it."""
    return {
        "measured": "speed", "cell": "a toy", "rung": rung, "adds": f"the {rung}", "model": "mini", "system": rung,
        "precision": "fp32", "recipe_hash": rung, "batch": 1, "texts": 2, "new_tokens": 80,
        "latency_s": [0.8 / ratio], "tokens_per_s": 100 * ratio, "factor": ratio, "ratio": ratio,
        "ratio_samples": [ratio * 0.9, ratio, ratio * 1.1], "size_bytes": 36e6, "peak_memory_bytes": 440e6,
        "exact": on is None, "bleu": 28.0, "rougeL": 58.0, "exact_match": 35.0, "inside": True,
    } | ({} if on is None else {"on": on}) | different  # fmt: skip


TOY = [
    shown("naive", None, 1.0),
    shown("cache", "naive", 2.5),
    shown("eight", "cache", 20.0, factor=8.1),
    shown("four", "eight", 15.0, factor=0.75),
    shown("student", "eight", 40.0, inside=False),
    shown("batches", "eight", 160.0, batch=32),
]


def test_the_fastest_rung_inside_the_gate_and_the_path_to_it() -> None:
    assert ladder.fastest(TOY)["rung"] == "eight"
    assert ladder.fastest(TOY, at_once=True)["rung"] == "batches"
    with pytest.raises(InputError, match="gate"):
        ladder.fastest(TOY[:-1], at_once=True)
    assert [row["rung"] for row in way_to(TOY, "batches")] == ["naive", "cache", "eight", "batches"]
    with pytest.raises(InputError, match="'five'"):
        way_to(TOY, "five")
    said = "2.50 (the cache) x 8.10 (the eight) = 20.2; measured from end to end: 20.0 times"
    assert ladder.account(TOY, "eight") == said


def test_the_script_climbs_all_ladders_and_writes(tmp_path: Path, monkeypatch, capsys) -> None:
    script, climbed = import_module("bench.record.ladder"), []

    def fake(rungs: Any, job: Any, *, model: str, ladder: str, **options: Any) -> list[dict[str, Any]]:
        climbed.append((model, job))
        for rung in rungs:
            options["on_rung"](rung.name)
        return [
            shown(rung.name, rung.on, 1.0 + place, cell=ladder, model=rung.model or model, batch=rung.batch,
                  exact=rung.is_exact, recipe_hash=rung.system.recipe.hash, system=rung.system.name)
            for place, rung in enumerate(rungs)
        ]  # fmt: skip

    monkeypatch.setattr(script, "climb", fake)
    path = tmp_path / "ladder.json"
    monkeypatch.setattr(sys, "argv", ["ladder.py", "--json", str(path), "--texts", "5", "--rounds", "1"])
    script.main()
    assert [(model, job) for model, job in climbed] == [
        ("mini", Natural(texts=5)), ("random:t5-small", Forced(64)), ("random:t5-small", Forced(256)),
    ]  # fmt: skip
    content = json.loads(path.read_text(encoding="utf-8"))
    assert {"machine", "versions", "commit", "date", "rows"} <= content.keys()
    assert content["command"] == "python -m bench.record.ladder --texts 5 --rounds 1"
    ladders = by_ladder(content["rows"])
    assert [*ladders] == ["random:t5-small, 64 forced tokens", "random:t5-small, 256 forced tokens",
                          "mini, 5 summaries at natural length"]  # fmt: skip
    for title, rows in ladders.items():
        assert all(row.get("quality_of", "mini") == "mini" and "bleu" in row for row in rows), title
    said = capsys.readouterr().out
    assert said.count("one at a time: ") == 3 and said.count("many at once: ") == 1


@pytest.mark.skipif(not RECORDED.is_file(), reason="the ladders are not recorded yet")
def test_the_recorded_ladders_are_whole_and_proven() -> None:
    ladders = by_ladder(json.loads(RECORDED.read_text(encoding="utf-8"))["rows"])
    expected = [[rung.name for rung in rungs] for rungs in (forced_rungs(), forced_rungs(), natural_rungs())]
    assert [[row["rung"] for row in rows] for rows in ladders.values()] == expected
    for rows in ladders.values():
        for row in rows:
            assert len(row["latency_s"]) >= 3 and row["peak_memory_bytes"] > row["size_bytes"] / 2
            assert not row["exact"] or row["equal"] == row["of"]
            lost = {name: rows[0][name] - row[name] for name in MAIN_SCORES}
            limits = {name.removeprefix("max_loss_"): most for name, most in row["settings"].items()}
            assert row["inside"] == all(lost[name] <= most for name, most in limits.items())
        assert way_to(rows, ladder.fastest(rows)["rung"])[0]["rung"] == "naive"
