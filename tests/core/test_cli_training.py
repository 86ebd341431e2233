"""`t5accel distill` and `t5accel prune` at toy size: what they write, what they print, and what they refuse.

What they call is tested in its own module.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_up import PAIRS, log
from test_cli import call, refused, said

import t5accel.distillation.pruning as pruning
import t5accel.distillation.student as module
import t5accel.distillation.teacher_outputs as texts
from t5accel import api
from t5accel.distillation.teacher_outputs import read_teacher_outputs
from t5accel.models.load import load_model
from t5accel.models.prefixes import TRANSLATE
from t5accel.models.pruned import layer_widths
from t5accel.models.random_init import random_t5
from t5accel.models.sizes import T5Dims

pytestmark = pytest.mark.usefixtures("cache_of_its_own", "threads_put_back", "random_state_put_back")

SIZES = dict(vocab_size=8000, d_model=16, d_kv=8, d_ff=128, num_heads=2, num_layers=2, num_decoder_layers=3)


@pytest.fixture(scope="module")
def teacher(saved) -> Path:
    return saved(random_t5(SIZES, seed=1), "teacher")


def rows_file(path: Path, pairs: Any) -> Path:
    rows = [{"source": TRANSLATE + english, "target": french} for english, french in pairs]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return rows_file(tmp_path / "train.jsonl", PAIRS[:60])


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    return rows_file(tmp_path / "dev.jsonl", PAIRS[-6:])


@pytest.fixture
def stranger(tmp_path: Path, teacher: Path) -> Path:
    """The folder of a model with fewer words than the others."""
    load_model(teacher)[1].save_pretrained(tmp_path / "stranger")
    random_t5({**SIZES, "vocab_size": 600}).save_pretrained(tmp_path / "stranger")
    return tmp_path / "stranger"


SMALL = ("--threads", 1, "--batch-tokens", 120)


def written(result: Any, folder: Path) -> Any:
    """The model in the folder that the command says it wrote."""
    assert (result.exit_code, result.stdout.splitlines()[0]) == (0, f"Wrote {folder}"), result.output
    model, tokenizer = load_model(folder)
    assert tokenizer is not None
    return model


# --- distill ----------------------------------------------------------------------------------------------------------


def test_distill_writes_a_student_that_loads_with_its_card(teacher: Path, data: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["t5accel", "distill", "--layers", "1,2", "--data", "my data"])
    options = ("distill", "--data", data, "--out", tmp_path / "out", "--teacher", teacher, *SMALL, "--layers", "1,2")
    student = written(call(*options, "--steps", 2, "--seed", 3), tmp_path / "out" / "model")
    assert T5Dims.of(student).decoder_layers == 2
    card = (tmp_path / "out" / "model" / "README.md").read_text(encoding="utf-8")
    assert (
        "t5accel distill --layers 1,2 --data 'my data'\n" in card
        and "- layers: (1, 2)" in card
        and "- loss: logits" in card
    )
    assert f"`{teacher}`" in card and "- steps: 2" in card and "- seed: 3" in card
    state = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert (state["step"], state["config"]["seed"]) == (2, 3)
    # The same command with more steps goes on; with another loss it does not.
    written(call(*options, "--steps", 3, "--seed", 3), tmp_path / "out" / "model")
    assert torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)["step"] == 3
    assert "was made with" in refused(*options, "--steps", 3, "--seed", 3, "--loss", "labels")


@pytest.mark.parametrize("metric", ["rougeL", None])
def test_students_are_scored_on_rows_that_are_not_trained_on(teacher, data, dev, tmp_path, metric: str | None) -> None:
    leaking = rows_file(tmp_path / "leaking.jsonl", [*PAIRS[:9], *PAIRS[-2:]])
    result = call(
        "distill", "--teacher", teacher, "--data", data, "--weight", 3, "--data", leaking, "--weight", 1, "--eval", dev,
        *(("--metric", metric) if metric else ()), "--out", tmp_path / "out", "--steps", 1, *SMALL,
    )  # fmt: skip
    written(result, tmp_path / "out" / "model")
    assert any("2 rows of --data" in line for line in said(result))
    names = {"loss", metric or "loss"}
    (row,) = log(tmp_path / "out")
    assert row.keys() == {"step", "train_loss", "seconds", *names}
    _, whole, student = result.stdout.splitlines()
    assert whole.startswith("whole model: loss ") and student.startswith("student: loss ")
    assert all(name in line for name in names for line in (whole, student))


def test_distill_lets_the_teacher_write_first_where_that_is_the_loss(teacher, saved, tmp_path, monkeypatch) -> None:
    out, data = tmp_path / "out", rows_file(tmp_path / "few.jsonl", PAIRS[:6])
    seen = []
    own = module.train_student
    monkeypatch.setattr(module, "train_student", lambda *given, **named: seen.append(given[3]) or own(*given, **named))
    options = ("distill", "--data", data, "--out", out, "--teacher", teacher, *SMALL, "--loss", "sequence")
    written(call(*options, "--steps", 1), out / "model")
    (found,) = map(dict, read_teacher_outputs(out / "teacher.jsonl").values())
    assert set(found) == {TRANSLATE + english for english, _ in PAIRS[:6]}
    rng = random.Random(0)
    drawn = dict(seen[0].examples["examples"](rng) for _ in range(200))
    assert drawn == found and not set(found.values()) & {french for _, french in PAIRS}
    before = (out / "teacher.jsonl").read_bytes().strip()
    written(call(*options, "--steps", 2), out / "model")
    assert (out / "teacher.jsonl").read_bytes().strip() == before, "what is written is not written again"
    other = ("--teacher", saved(random_t5(SIZES, seed=2), "other"))
    assert "was written by another teacher" in refused(*options, *other, "--steps", 2)
    assert (out / "teacher.jsonl").read_bytes().strip() == before


@pytest.mark.parametrize(("command", "name"), [("distill", "--teacher"), ("prune", "--model")])
def test_a_run_goes_on_with_the_same_model_and_rows_alone(command, name, teacher, data, dev, saved, tmp_path) -> None:
    other, out = saved(random_t5(SIZES, seed=2), "other"), tmp_path / "out"
    options = (command, "--out", out, name, teacher, "--data", data, *SMALL, "--steps")
    written(call(*options, 1, "--loss", "labels"), out / "model")
    before = (out / "checkpoint.pt").read_bytes()
    of_command = () if command == "distill" else (("--teacher", other),)
    for more in ((name, other), ("--data", dev), ("--batch-tokens", 60), *of_command):
        assert "was made with" in refused(*options, 1, "--loss", "labels", *more)
    assert (out / "checkpoint.pt").read_bytes() == before
    written(call(*options, 2, "--loss", "labels", "--eval", dev, "--longest", 100), out / "model")


def test_distill_without_layers_spreads_them_evenly(teacher: Path, data: Path, tmp_path: Path, monkeypatch) -> None:
    configs = []
    monkeypatch.setattr(module, "distill", lambda model, *given, **_: configs.append(given[-1]) or model)
    for count, layers in ((1, (2,)), (2, (0, 2)), (3, (0, 1, 2))):
        options = ("--data", data, "--out", tmp_path / "out", "--teacher", teacher, "--decoder-layers", count)
        assert call("distill", *options, "--loss", "hidden", "--threads", 1).exit_code == 0
        assert (configs[-1].layers, configs[-1].loss, configs[-1].steps) == (layers, "hidden", 2000)


def test_the_teacher_may_write_as_long_texts_as_the_rows_have(teacher: Path, tmp_path: Path, monkeypatch) -> None:
    """Twice the longest target, as validation cuts them, within --longest; no number of the bundled model's."""
    found, threads, own = [], [], api.open_backend
    monkeypatch.setattr(
        api, "open_backend", lambda name, **given: threads.append(given["threads"]) or own(name, **given)
    )
    monkeypatch.setattr(module, "train_student", lambda student, *_, **__: student)
    monkeypatch.setattr(
        "t5accel.backends.model_defaults.beam_search",
        lambda backend, ids, mask, *, max_new_tokens, **_: (
            found.append(max_new_tokens) or SimpleNamespace(sequences=ids)
        ),
    )
    data = rows_file(tmp_path / "long.jsonl", [("Go!", "Va ! " * 40)])
    count = len(load_model(teacher)[1]("Va ! " * 40)["input_ids"])
    options = ("distill", "--data", data, "--teacher", teacher, "--threads", 1, "--loss", "sequence", "--steps", 1)
    for name, longest in (("free", 512), ("bounded", count + 1)):
        assert call(*options, "--out", tmp_path / name, "--longest", longest).exit_code == 0
    assert found == [2 * count, count + 1] and found[1] > 64 and threads == [1, 1]


@pytest.mark.parametrize("command", ["distill", "prune"])
def test_a_model_that_lies_where_the_student_would_is_not_replaced(command: str, teacher, data: Path, tmp_path) -> None:
    shutil.copytree(teacher, tmp_path / "out" / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out" / "model").iterdir()}
    name = {"distill": "--teacher", "prune": "--model"}[command]
    options = (command, "--data", data, "--out", tmp_path / "out", name, tmp_path / "out" / "model", *SMALL)
    assert "older student" in refused(*options, "--steps", 1)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out" / "model").iterdir()} == before
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"], "and nothing was trained"


def test_distill_refuses_what_it_cannot_do_and_writes_nothing(teacher, data, dev: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(texts, "write_teacher_outputs", lambda *given: pytest.fail("the teacher writes for nothing"))
    out = tmp_path / "out"
    options = ("distill", "--data", data, "--out", out, "--teacher", teacher, "--threads", 1)
    for what, wrong in {
        "--loss": ("--loss", "magic"), "layers": ("--layers", "0,3"),
        "got (2, 0)": ("--layers", "2,0", "--loss", "sequence"), "'first'": ("--layers", "first"),
        "leave --decoder-layers out": ("--layers", "0,1", "--decoder-layers", 2),
        "--layers must be numbers": ("--layers", ""), "seed must be below 2**32": ("--seed", 10**20),
        "got 4": ("--decoder-layers", 4), "got 0": ("--decoder-layers", 0),
        "metric must": ("--eval", dev, "--metric", "luck"), "give --eval FILE": ("--metric", "bleu"),
        "more than 5": ("--longest", 5), "--weight is given 2 times": ("--weight", 1, "--weight", 1),
    }.items():  # fmt: skip
        assert what in refused(*options, *wrong)
    assert call(*options, "--device", "abacus").exit_code == 2
    assert "--eval" in said(call(*options, "--eval", data))[0] and not out.exists()


@pytest.mark.parametrize("command", ["distill", "prune"])
def test_data_models_and_tokenizers_that_are_missing_are_named(command: str, teacher, data: Path, tmp_path) -> None:
    out, name = tmp_path / "out", {"distill": "--teacher", "prune": "--model"}[command]
    assert "missing.jsonl" in refused(command, "--data", tmp_path / "missing.jsonl", "--out", out, name, teacher)
    broken = tmp_path / "broken.jsonl"
    broken.write_text(data.read_text(encoding="utf-8") + '{"source": "a", "text": "b"}\n', encoding="utf-8")
    assert "broken.jsonl, line 61" in refused(command, "--data", broken, "--out", out, name, teacher)
    assert "broken.jsonl, line 61" in refused(command, "--data", data, "--eval", broken, "--out", out, name, teacher)
    assert "'nope'" in refused(command, "--data", data, "--out", out, name, "nope")
    load_model(teacher)[0].save_pretrained(tmp_path / "mute")
    assert "mute has no tokenizer" in refused(command, "--data", data, "--out", out, name, tmp_path / "mute")
    assert call(command, "--data", data).exit_code == 2 and not out.exists()


# --- prune ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("importance", "steps"), [("magnitude", 0), ("taylor", 0), ("movement", 3)])
def test_prune_writes_a_narrow_model_that_loads(teacher, data: Path, tmp_path, importance: str, steps: int) -> None:
    out = tmp_path / "out"
    result = call(
        "prune", "--data", data, "--out", out, "--model", teacher, *SMALL, "--heads", 0.25, "--neurons", 0.5,
        "--importance", importance, "--steps", steps, *(("--loss", "labels") if steps else ()),
    )  # fmt: skip
    model = written(result, out / "model")
    found = layer_widths(model)
    assert 12 <= sum(sum(found[kind]) for kind in found if kind.endswith("heads")) < 16
    neurons = [width for kind in found if kind.endswith("ff") for width in found[kind]]
    assert sum(neurons) < 5 * 128 - 100 and all(width % 32 == 0 for width in neurons)
    card = (out / "model" / "README.md").read_text(encoding="utf-8")
    assert (
        "load_model(folder)" in card and f"- importance: {importance}" in card and "| neurons of the decoder |" in card
    )
    assert (out / "checkpoint.pt").exists() == (steps > 0)
    assert ("- training_loss: labels" in card) == (steps > 0) and f"- steps: {steps}\n" in card and "2000" not in card


def test_prune_trains_gently_and_with_another_teacher_if_one_is_given(teacher, data, tmp_path, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(
        pruning, "prune", lambda model, *given, teacher, **_: seen.append((given[-1].training, teacher)) or model
    )
    options = ("prune", "--data", data, "--out", tmp_path / "out", "--model", teacher, "--threads", 1, "--seed", 5)
    assert call(*options, "--loss", "hidden").exit_code == 0 and call(*options, "--teacher", "mini").exit_code == 0
    (training, whole), (_, mini) = seen
    assert training == replace(pruning.PruneConfig().training, loss="hidden", seed=5) and whole is None
    assert training.matrix_learning_rate < module.DistillConfig().matrix_learning_rate
    assert mini.config.d_model != SIZES["d_model"]


def test_prune_refuses_what_it_cannot_do_and_writes_nothing(teacher: Path, stranger, data: Path, tmp_path) -> None:
    out = tmp_path / "out"
    options = ("prune", "--data", data, "--out", out, "--model", teacher, "--threads", 1)
    assert "heads must be" in refused(*options, "--heads", 1)
    assert "at least 2" in refused(*options, "--steps", 0, "--importance", "movement")
    for useless in (("--loss", "labels"), ("--teacher", stranger)):
        assert "--steps is 0: leave them out" in refused(*options, "--steps", 0, *useless)
    assert "--loss" in refused(*options, "--loss", "magic")
    assert "texts of the teacher" in refused(*options, "--loss", "sequence", "--importance", "magnitude")
    assert "'nope'" in refused(*options, "--teacher", "nope")
    assert "vocab_size must be the same" in refused(*options, "--teacher", stranger)
    shutil.copytree(teacher, other := tmp_path / "other")
    words = json.loads((other / "tokenizer.json").read_text())
    pieces = words["model"]["vocab"]
    pieces[10][0], pieces[11][0] = pieces[11][0], pieces[10][0]
    (other / "tokenizer.json").write_text(json.dumps(words))
    assert "--teacher must have the tokenizer of" in refused(*options, "--teacher", other)
    assert call(*options, "--device", "abacus").exit_code == 2
    assert not out.exists()
