"""The commands of `python -m training`: what they refuse, pass on, and write."""

import json
from dataclasses import replace
from functools import partial

import pytest
import test_cli
import torch

import training.train as training
from training.__main__ import app
from training.train import HeldOutQuality

pytestmark = pytest.mark.usefixtures("cache_of_its_own", "threads_put_back")

call, refused = partial(test_cli.call, app=app), partial(test_cli.refused, app=app)


def test_what_cannot_be_trained_is_refused_and_nothing_is_written(tmp_path):
    missing, pairs, out = ("--pairs", tmp_path / "missing.tsv"), tmp_path / "pairs.tsv", tmp_path / "out"
    line = refused("train", *missing, "--out", out, "--threads", 1)
    assert "No translation pairs at" in line and "Give a UTF-8 file" in line
    assert "tatoeba.org" in refused("held-out", *missing)
    train = "train", "--pairs", pairs, "--out", out
    pairs.write_text("We sing.\tNous chantons.\nWe sing without a tab.\n")
    assert "pairs.tsv, line 2: no 'English<TAB>French' pair" in refused(*train)
    pairs.write_text("We sing.\tNous chantons.\n")
    assert "Cannot hold out 1000 of 1" in refused(*train)
    pairs.write_text("".join(f"Word {i}.\tMot {i}.\n" for i in range(1002)))
    assert "steps" in refused(*train, "--steps", 0)
    if not torch.cuda.is_available():
        assert "'cuda'" in refused(*train, "--device", "cuda")
    for usage in (["train"], [*train, "--threads", 0], [*train, "--device", "abacus"]):
        assert call(*usage).exit_code == 2
    assert not out.exists()


def test_train_prolongs_only_when_everything_else_is_right(tmp_path, monkeypatch):
    pairs, out = tmp_path / "pairs.tsv", tmp_path / "out"
    pairs.write_text("We sing.\tNous chantons.\n")
    out.mkdir()
    (out / "stable.pt").write_text("before the fall")
    (out / "checkpoint.pt").write_text("finished")
    for wrong in (["--pairs", tmp_path / "missing.tsv"], ["--pairs", pairs, "--steps", 0],
                  ["--pairs", pairs, "--stage", 3], ["--pairs", pairs, "--start", "mini"]):  # fmt: skip
        refused("train", *wrong, "--out", out, "--prolong")
        assert (out / "checkpoint.pt").read_text() == "finished"
    calls = []

    def reproduce(*arguments, stage, start, prolong, device):
        calls.append((*arguments, stage, start, prolong, device))
        return out / "model"

    monkeypatch.setattr(training, "reproduce", reproduce)
    result = call("train", "--pairs", pairs, "--out", out, "--prolong", "--steps", 9, "--seed", 3, "--threads", 1)
    assert (result.exit_code, result.stdout) == (0, f"Wrote {out / 'model'}\n")
    assert calls == [(pairs, out, training.TrainConfig(steps=9, seed=3), 1, None, True, "cpu")]
    for stage, planned in ((2, training.SECOND_STAGE), (3, training.THIRD_STAGE), (4, training.FOURTH_STAGE)):
        result = call("train", "--pairs", pairs, "--out", out, "--stage", stage, "--start", "mini", "--seed", 3)
        assert result.exit_code == 0
        assert calls[stage - 1] == (pairs, out, replace(planned, seed=3), stage, "mini", False, "cpu")


def test_held_out_scores_are_printed_and_written(tmp_path, monkeypatch):
    held_out = (HeldOutQuality(1000, 1234, 12.34, 45.6), HeldOutQuality(77, 88, 9.87, 23.4))
    calls = []
    monkeypatch.setattr(training, "held_out_quality", lambda generate, pairs: calls.append(pairs) or held_out)
    file, pairs = tmp_path / "new" / "held-out.json", tmp_path / "pairs.tsv"
    pairs.write_text("We sing.\tNous chantons.\n")
    result = call("held-out", "--pairs", pairs, "--json", file)
    assert result.exit_code == 0 and calls == [pairs]
    assert "held-out     all         1000  BLEU  12.3  chrF  45.6" in result.stdout
    assert "held-out     9-20 words    77  BLEU   9.9  chrF  23.4" in result.stdout
    document = json.loads(file.read_text(encoding="utf-8"))
    assert (document["model"], document["held_out"]["bleu"]) == ("mini", 12.34)
    assert document["held_out_long"] == {"sentences": 77, "references": 88, "bleu": 9.87, "chrf": 23.4}
