"""`t5accel distill` and `t5accel prune` at toy size: what they write, what they print, and what they refuse.

What they call is tested in its own module; `train` and `evaluate` are tested with the other commands.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import call, refused

import t5accel.students.distill as module
import t5accel.students.prune as pruning
import t5accel.students.teacher_texts as texts
from t5accel.checkpoints import T5Dims, load_t5
from t5accel.lively import random_t5
from t5accel.narrow import widths
from t5accel.students.distill import DistillConfig
from t5accel.students.mixture import Part, Phase
from t5accel.students.teacher_texts import read_teacher_texts

pytestmark = pytest.mark.usefixtures("cache_of_its_own")

SIZES = dict(vocab_size=6000, d_model=16, d_kv=8, d_ff=128, num_heads=2, num_layers=2, num_decoder_layers=3)


@pytest.fixture(autouse=True)
def _global_state_put_back():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few texts a step, and none for validation."""
    monkeypatch.setattr(module, "STUDENTS_MIXTURE", (Phase(0, (Part("translation", 120),)),))
    monkeypatch.setattr(module, "validation_sets", lambda held_out, encode: {})


@pytest.fixture(scope="module")
def teacher(mini: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model with the bundled one's tokenizer."""
    folder = tmp_path_factory.mktemp("teacher") / "teacher"
    random_t5(SIZES, seed=1).save_pretrained(folder)
    mini[1].save_pretrained(folder)
    return folder


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Made-up pairs, a few more than are held out."""
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"Word {i}.\tMot {i}.\n" for i in range(1040)), encoding="utf-8")
    return path


@pytest.fixture
def stranger(tmp_path: Path, teacher: Path) -> Path:
    """The folder of a model with fewer words than the others."""
    load_t5(teacher)[1].save_pretrained(tmp_path / "stranger")
    random_t5({**SIZES, "vocab_size": 600}).save_pretrained(tmp_path / "stranger")
    return tmp_path / "stranger"


def written(result: Any, folder: Path) -> Any:
    """The model in the folder that the command says it wrote."""
    assert (result.exit_code, result.stdout) == (0, f"Wrote {folder}\n"), result.output
    model, tokenizer = load_t5(folder)
    assert tokenizer is not None
    return model


# --- distill ----------------------------------------------------------------------------------------------------------


def test_distill_writes_a_student_that_loads_with_its_card(
    teacher: Path, pairs: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("sys.argv", ["t5accel", "distill", "--layers", "1,2"])
    options = ("--pairs", pairs, "--out", tmp_path / "out", "--teacher", teacher, "--threads", 1)
    student = written(
        call("distill", *options, "--layers", "1,2", "--steps", 2, "--seed", 3), tmp_path / "out" / "model"
    )
    assert T5Dims.of(student).decoder_layers == 2
    card = (tmp_path / "out" / "model" / "README.md").read_text(encoding="utf-8")
    assert "t5accel distill --layers 1,2\n" in card and "- layers: (1, 2)" in card and "- loss: logits" in card
    assert f"`{teacher}`" in card and "- steps: 2" in card and "- seed: 3" in card
    state = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert (state["step"], state["config"]["seed"]) == (2, 3)
    # The same command with more steps goes on; with another loss it does not.
    written(call("distill", *options, "--layers", "1,2", "--steps", 3, "--seed", 3), tmp_path / "out" / "model")
    assert torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)["step"] == 3
    line = refused("distill", *options, "--layers", "1,2", "--steps", 3, "--seed", 3, "--loss", "labels")
    assert "was made with" in line and "use another folder" in line


def test_distill_without_layers_spreads_them_evenly(teacher: Path, pairs: Path, tmp_path: Path, monkeypatch) -> None:
    configs = []

    def noting(model: Any, tokenizer: Any, mixture: Any, folder: Path, config: Any, **options: Any) -> Any:
        configs.append(config)
        return model

    monkeypatch.setattr(module, "distill", noting)
    for count, layers in ((1, (2,)), (2, (0, 2)), (3, (0, 1, 2))):
        options = ("--pairs", pairs, "--out", tmp_path / "out", "--teacher", teacher, "--decoder-layers", count)
        assert call("distill", *options, "--loss", "hidden", "--threads", 1).exit_code == 0
        assert (configs[-1].layers, configs[-1].loss, configs[-1].steps) == (layers, "hidden", 2000)


def test_distill_lets_the_teacher_write_first_where_that_is_the_loss(
    teacher: Path, pairs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ("--pairs", pairs, "--out", out, "--teacher", teacher, "--threads", 1, "--loss", "sequence", "--texts", 6)
    written(call("distill", *options, "--steps", 1), out / "model")
    found = read_teacher_texts(out / "teacher.jsonl")
    assert sum(map(len, found.values())) == 6 and "translation" in found
    before = (out / "teacher.jsonl").read_bytes().strip()
    written(call("distill", *options, "--steps", 2), out / "model")
    assert (out / "teacher.jsonl").read_bytes().strip() == before, "what is written is not written again"


def test_distill_refuses_what_it_cannot_do_and_writes_nothing(
    teacher: Path, pairs: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(texts, "write_teacher_texts", lambda *given: pytest.fail("the teacher writes for nothing"))
    out = tmp_path / "out"
    options = ("distill", "--pairs", pairs, "--out", out, "--teacher", teacher, "--threads", 1)
    assert "The loss is 'magic'; give one of labels, logits, hidden, sequence" in refused(*options, "--loss", "magic")
    assert "layers is (0, 3); give different ones of 0 … 2" in refused(*options, "--layers", "0,3")
    assert "layers is (2, 0)" in refused(*options, "--layers", "2,0", "--loss", "sequence")
    assert "--layers is 'first'; give numbers with commas" in refused(*options, "--layers", "first")
    assert "4 decoder layers of 3; give 1 … 3" in refused(*options, "--decoder-layers", 4)
    assert "0 decoder layers of 3" in refused(*options, "--decoder-layers", 0)
    assert "steps is 0; give at least 1" in refused(*options, "--steps", 0)
    assert "device 'abacus'" in refused(*options, "--device", "abacus")
    assert not out.exists()


@pytest.mark.parametrize("command", ["distill", "prune"])
def test_pairs_models_and_tokenizers_that_are_missing_are_named(
    command: str, teacher: Path, pairs: Path, tmp_path: Path
) -> None:
    out, name = tmp_path / "out", {"distill": "--teacher", "prune": "--model"}[command]
    line = refused(command, "--pairs", tmp_path / "missing.tsv", "--out", out, name, teacher)
    assert "missing.tsv" in line and "tatoeba.org" in line
    assert "'nope'" in refused(command, "--pairs", pairs, "--out", out, name, "nope")
    load_t5(teacher)[0].save_pretrained(tmp_path / "mute")
    assert "mute has no tokenizer" in refused(command, "--pairs", pairs, "--out", out, name, tmp_path / "mute")
    few = tmp_path / "few.tsv"
    few.write_text("We sing.\tNous chantons.\n", encoding="utf-8")
    assert "Cannot hold out 1000 of 1" in refused(command, "--pairs", few, "--out", out, name, teacher)
    assert call(command, "--pairs", pairs).exit_code == 2 and not out.exists()


# --- prune ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("importance", "steps"), [("magnitude", 0), ("taylor", 0), ("movement", 3)])
def test_prune_writes_a_narrow_model_that_loads(
    teacher: Path, pairs: Path, tmp_path: Path, importance: str, steps: int
) -> None:
    out = tmp_path / "out"
    result = call(
        "prune", "--pairs", pairs, "--out", out, "--model", teacher, "--heads", 0.25, "--neurons", 0.5,
        "--importance", importance, "--steps", steps, "--loss", "labels", "--threads", 1,
    )  # fmt: skip
    model = written(result, out / "model")
    found = widths(model)
    assert 12 <= sum(sum(found[kind]) for kind in found if kind.endswith("heads")) < 16
    neurons = [width for kind in found if kind.endswith("ff") for width in found[kind]]
    assert sum(neurons) < 5 * 128 - 100 and all(width % 32 == 0 for width in neurons)
    card = (out / "model" / "README.md").read_text(encoding="utf-8")
    assert "load_t5(folder)" in card and f"- importance: {importance}" in card and "| neurons of the decoder |" in card
    assert (out / "checkpoint.pt").exists() == (steps > 0)


def test_prune_trains_gently_and_with_another_teacher_if_one_is_given(
    teacher: Path, pairs: Path, tmp_path: Path, monkeypatch
) -> None:
    seen = []

    def noting(model: Any, tokenizer: Any, mixture: Any, folder: Path, config: Any, *, teacher: Any, **_: Any) -> Any:
        seen.append((config.training, teacher))
        return model

    monkeypatch.setattr(pruning, "prune", noting)
    options = ("prune", "--pairs", pairs, "--out", tmp_path / "out", "--model", teacher, "--threads", 1, "--seed", 5)
    assert call(*options, "--loss", "hidden").exit_code == 0 and call(*options, "--teacher", "mini").exit_code == 0
    (training, nobody), (_, mini) = seen
    assert training == replace(pruning.PruneConfig().training, loss="hidden", seed=5) and nobody is None
    assert training.matrix_learning_rate < DistillConfig().matrix_learning_rate
    assert mini.config.vocab_size == 6000


def test_prune_refuses_what_it_cannot_do_and_writes_nothing(
    teacher: Path, stranger: Path, pairs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ("prune", "--pairs", pairs, "--out", out, "--model", teacher, "--threads", 1)
    assert "importance is 'luck'; give one of magnitude, taylor, movement" in refused(*options, "--importance", "luck")
    assert "heads is 1.0; give the share" in refused(*options, "--heads", 1)
    assert "neurons is -0.5; give the share" in refused(*options, "--neurons", -0.5)
    assert "steps is -1" in refused(*options, "--steps", -1)
    assert "with movement at least 2" in refused(*options, "--steps", 0, "--importance", "movement")
    assert "The loss is 'magic'" in refused(*options, "--loss", "magic")
    assert "no texts of the teacher" in refused(*options, "--loss", "sequence", "--importance", "magnitude")
    assert "'nope'" in refused(*options, "--teacher", "nope")
    assert "give a teacher of the same" in refused(*options, "--teacher", stranger)
    assert "device 'abacus'" in refused(*options, "--device", "abacus")
    assert not out.exists()
