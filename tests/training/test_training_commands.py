"""The commands of `python -m training`: what they refuse, pass on, and write; and the record of a training."""

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import test_cli
import torch

import training.train as training
from bench.figures import plot_losses
from bench.results import checked, load_results
from training.__main__ import app

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
        refused("train", *wrong, "--out", out, "--extend-run")
        assert (out / "checkpoint.pt").read_text() == "finished"
    calls = []

    def reproduce(*arguments, stage, start, prolong, device):
        calls.append((*arguments, stage, start, prolong, device))
        return out / "model"

    monkeypatch.setattr(training, "reproduce", reproduce)
    result = call("train", "--pairs", pairs, "--out", out, "--extend-run", "--steps", 9, "--seed", 3, "--threads", 1)
    assert (result.exit_code, result.stdout) == (0, f"Wrote {out / 'model'}\n")
    assert calls == [(pairs, out, training.TrainConfig(steps=9, seed=3), 1, None, True, "cpu")]
    for stage, planned in ((2, training.SECOND_STAGE), (3, training.THIRD_STAGE), (4, training.FOURTH_STAGE)):
        result = call("train", "--pairs", pairs, "--out", out, "--stage", stage, "--start", "mini", "--seed", 3)
        assert result.exit_code == 0
        assert calls[stage - 1] == (pairs, out, replace(planned, seed=3), stage, "mini", False, "cpu")


def test_held_out_scores_are_printed_and_written(tmp_path, monkeypatch):
    held_out = {"held_out": dict(sentences=1000, references=1234, bleu=12.34, chrf=45.6),
                "held_out_long": dict(sentences=77, references=88, bleu=9.87, chrf=23.4)}  # fmt: skip
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


def written(path: Path, *rows: tuple[int, float]) -> Path:
    lines = [{"step": step, "translation": loss, "summaries": 1.0, "questions": loss} for step, loss in rows]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    return path


def test_the_steps_of_the_second_stage_go_on_from_the_first(tmp_path: Path) -> None:
    logs = [written(tmp_path / "1.jsonl", (10, 3.0), (20, 2.0)), written(tmp_path / "2.jsonl", (10, 4.0), (30, 1.0))]
    rows = training.join_logs(logs)
    assert [(row["step"], row["stage"], row["translation"]) for row in rows] == [
        (10, 1, 3.0), (20, 1, 2.0), (30, 2, 4.0), (50, 2, 1.0),
    ]  # fmt: skip
    axes = plot_losses(rows).axes[0]
    assert [line.get_xdata()[0] for line in axes.lines[3:]] == [20], "a line where the second stage begins"
    *ends, stage = axes.texts
    assert stage.get_text() == "stage 2" and [text.get_text() for text in ends] == ["1.00"] * 3
    heights = [text.xy[1] for text in ends]
    assert min(b - a for a, b in pairwise(heights)) > 0.1, "equal losses, and each can be read"


def test_quality_is_recorded_as_rows() -> None:
    held_out = {"sentences": 5, "references": 9, "bleu": 20.0, "chrf": 40.0}
    report = {"model": "mini", "questions": {"all": {"exact_match": 49.5, "f1": 50.0}, "seen": None}, "limit": None}
    rows = training.quality_rows(
        {**report, "held_out": held_out, "held_out_long": {**held_out, "sentences": 3, "bleu": 10.0}}
    )
    assert [checked(row)["measured"] for row in rows] == ["quality"] * 3
    assert rows[0]["exact_match"] == 49.5
    assert [(row["task"], row["texts"], row["bleu"]) for row in rows[1:]] == [
        ("held-out translation", 5, 20.0), ("held-out long translation", 3, 10.0),
    ]  # fmt: skip
    assert training.quality_rows({**report, "held_out": held_out}) == rows[:2]
    assert training.quality_rows({**report, "held_out": None, "held_out_long": None}) == rows[:1]
    kept = [row.get("task") for row in load_results("training-mini.json")["rows"] if row["measured"] == "quality"]
    assert kept == [row.get("task") for row in rows][: len(kept)]  # a file of short pairs has no long ones
