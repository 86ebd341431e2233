"""Quality of peers' integers: what is scored, by which worker, and the table of it."""

import sys
from pathlib import Path

import pytest

from bench.record import peers_quality
from bench.record.peers import save_model
from bench.record.peers_quality import MODEL, SYSTEMS, score, table
from bench.results import checked
from t5accel.models.load import load_model


def test_every_system_in_integers_is_scored_beside_fp32():
    assert {one.precision for one in SYSTEMS.values()} >= {"fp32", "int8", "int8-dynamic", "int4"}
    assert {"llama.cpp q8_0", "CTranslate2 int8", "torchao int4, compiled", "t5accel int8"} <= SYSTEMS.keys()


@pytest.mark.once
def test_a_row_has_the_scores_of_answers_that_end_by_themselves(tmp_path: Path):
    save_model(MODEL, tmp_path / "models" / MODEL)
    row = checked(score(SYSTEMS["t5accel int8"], tmp_path, load_model(MODEL)[1], limit=2))
    assert row["bleu"] > 20 and row["rougeL"] > 40 and row["recipe_hash"] and row["limit"] == 2


def test_the_table_says_what_integers_cost():
    scores = dict(bleu=50.0, rougeL=70.0, exact_match=60.0)
    rows = [dict(system="transformers 4.57", precision="fp32", **scores),
            dict(system="other", precision="int8", **scores | dict(bleu=48.5, exact_match=61.0))]  # fmt: skip
    assert table(rows).splitlines()[2:] == [
        "transformers 4.57  fp32       50.0     70.0  60.0",
        "other              int8       48.5     70.0  61.0  -1.5 +0.0 +1.0",
    ]


@pytest.mark.once
def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch):
    asked = []
    monkeypatch.setattr(peers_quality, "versions_of", lambda *_: {})
    monkeypatch.setattr(peers_quality, "save_model", lambda *_: None)
    monkeypatch.setattr(peers_quality, "score", lambda system, *_: asked.append(system.name) or {"system": system.name})
    for names in (["torchao int4, compiled", "CTranslate2 int8"], ["CTranslate2 int8", "llama.cpp q8_0"]):
        monkeypatch.setattr(sys, "argv", ["peers_quality", "--json", str(tmp_path / "rows.json"), "--systems", *names])
        peers_quality.main()
    assert sorted(asked) == ["CTranslate2 int8", "llama.cpp q8_0", "torchao int4, compiled"]
