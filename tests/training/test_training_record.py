"""The record of how the bundled model was trained: steps go on from stage to stage, and the picture says where."""

import json
from importlib import import_module
from itertools import pairwise
from pathlib import Path

from bench.figures import plot_losses
from bench.results import checked, load_results


def written(path: Path, *rows: tuple[int, float]) -> Path:
    lines = [
        json.dumps({"step": step, "translation": loss, "summaries": 1.0, "questions": loss}) for step, loss in rows
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_the_steps_of_the_second_stage_go_on_from_the_first(tmp_path: Path) -> None:
    logs = [written(tmp_path / "1.jsonl", (10, 3.0), (20, 2.0)), written(tmp_path / "2.jsonl", (10, 4.0), (30, 1.0))]
    rows = import_module("training.train").join_logs(logs)
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
    quality_rows = import_module("training.train").quality_rows
    rows = quality_rows({**report, "held_out": held_out, "held_out_long": {**held_out, "sentences": 3, "bleu": 10.0}})
    assert [checked(row)["measured"] for row in rows] == ["quality"] * 3
    assert rows[0]["exact_match"] == 49.5
    assert [(row["task"], row["texts"], row["bleu"]) for row in rows[1:]] == [
        ("held-out translation", 5, 20.0), ("held-out long translation", 3, 10.0),
    ]  # fmt: skip
    assert quality_rows({**report, "held_out": held_out}) == rows[:2]
    assert quality_rows({**report, "held_out": None, "held_out_long": None}) == rows[:1]
    kept = [row.get("task") for row in load_results("training-mini.json")["rows"] if row["measured"] == "quality"]
    assert kept == [row.get("task") for row in rows][: len(kept)]  # a file of short pairs has no long ones
