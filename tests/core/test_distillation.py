"""Distilling at toy size: every loss falls, an interrupted run ends as an uninterrupted one, and the student is kept.

All pairs here are made up for the tests.
"""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from made_up import CORPUS, PAIRS, log
from refused import refused
from test_export import histories, teacher_forced
from test_pruned_models import narrowed

import t5accel.distillation.checkpointing as resumable
import t5accel.distillation.student as module
from t5accel.distillation.batches import Mixture, Phase, TaskShare
from t5accel.distillation.checkpointing import run_training
from t5accel.distillation.losses import OBJECTIVES
from t5accel.distillation.model_card import save_student
from t5accel.distillation.optimizer import optimizer_step
from t5accel.distillation.student import DistillConfig, distill, shrink_decoder
from t5accel.distillation.validation import make_validator
from t5accel.errors import ExportError, InputError, JobError
from t5accel.models.load import load_model
from t5accel.models.prefixes import TRANSLATE
from t5accel.models.sizes import T5Dims
from training.vocabulary import train_tokenizer

MIXTURE = Mixture(
    {"translation": [(TRANSLATE + english, french) for english, french in PAIRS[:20]]},
    (Phase(0, (TaskShare("translation", 300),)),), steps_per_block=4, by_teacher=True,
)  # fmt: skip
ROWS = [{"source": TRANSLATE + english, "target": french} for english, french in PAIRS]
TOY = DistillConfig(
    layers=(0, 2), loss="logits", steps=8, learning_rate=1e-2, matrix_learning_rate=1e-2, warmup_steps=2
)  # fmt: skip
NEW = histories(6, 2, 7)

pytestmark = pytest.mark.usefixtures("random_state_put_back")


@cache
def toy_tokenizer() -> Any:
    return train_tokenizer(CORPUS, vocab_size=230)


def stored(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same_weights(model: Any, other: Any) -> bool:
    theirs = other if isinstance(other, dict) else other.state_dict()
    mine = model.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in mine.items())


def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints after every second step, a look at the student after every fourth."""
    monkeypatch.setattr(module, "run_training", partial(run_training, save_every=2, validate_every=4))


def looking() -> Any:
    """At rows that are held out."""
    return make_validator(ROWS[-4:], toy_tokenizer())


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The process is killed when it would take one more step than that."""
    steps: list[int] = []

    def killed(*arguments: Any, **options: Any) -> float:
        if len(steps) == after:
            raise KeyboardInterrupt
        steps.append(1)
        return optimizer_step(*arguments, **options)

    monkeypatch.setattr(resumable, "optimizer_step", killed)


def run(teacher: Any, folder: Path, config: DistillConfig = TOY, **options: Any) -> Any:
    return distill(teacher, toy_tokenizer(), MIXTURE, folder, config, **options)


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", OBJECTIVES)
def test_each_loss_falls_and_the_teacher_stays_as_it_was(tiny_t5, tmp_path: Path, monkeypatch, loss: str) -> None:
    teacher, losses = copy.deepcopy(tiny_t5()), []
    before, config = stored(teacher), teacher.config.to_dict()

    def noting(*arguments: Any, **options: Any) -> float:
        losses.append(optimizer_step(*arguments, **options))
        return losses[-1]

    monkeypatch.setattr(resumable, "optimizer_step", noting)
    student = run(teacher, tmp_path, replace(TOY, loss=loss, steps=16))
    assert len(losses) == 16 and np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4])
    assert same_weights(teacher, before) and teacher.config.to_dict() == config and not teacher.training
    assert type(student) is type(teacher) and not student.training and T5Dims.of(student).decoder_layers == 2
    assert not same_weights(student, shrink_decoder(teacher, (0, 2)))
    assert {weight.grad for weight in teacher.parameters()} == {None}


def test_the_losses_lead_to_different_students(tiny_t5, tmp_path: Path) -> None:
    students = [run(tiny_t5(), tmp_path / loss, replace(TOY, loss=loss, steps=2)) for loss in OBJECTIVES]
    labels, logits, hidden, sequence = students
    assert not same_weights(labels, logits) and not same_weights(logits, hidden)
    assert same_weights(labels, sequence)  # which differ in who wrote the labels, and here that is the same


def test_an_interrupted_run_ends_with_exactly_the_weights_of_an_uninterrupted_one(
    tiny_t5, tmp_path: Path, monkeypatch
) -> None:
    often(monkeypatch)
    config = replace(TOY, dropout=0.1)
    teacher = tiny_t5(dropout_rate=0.1)
    whole = run(teacher, tmp_path / "whole", config, validate=looking())
    assert [row["step"] for row in log(tmp_path / "whole")] == [4, 8]
    assert set(log(tmp_path / "whole")[0]) == {"step", "train_loss", "loss", "seconds"}
    assert torch.load(tmp_path / "whole" / "checkpoint.pt", weights_only=True)["config"] == asdict(config)

    interrupt(monkeypatch, after=5)
    with pytest.raises(KeyboardInterrupt):
        run(teacher, tmp_path / "cut", config, validate=looking())
    assert torch.load(tmp_path / "cut" / "checkpoint.pt", weights_only=True)["step"] == 4
    interrupt(monkeypatch, after=4)
    assert same_weights(whole, resumed := run(teacher, tmp_path / "cut", config, validate=looking()))
    assert same_weights(whole, run(teacher, tmp_path / "cut", config)), "a finished run is not trained on"
    logs = [[{**row, "seconds": 0} for row in log(tmp_path / name)] for name in ("whole", "cut")]
    assert logs[0] == logs[1], "the mean of the training loss goes on, too"
    monkeypatch.setattr(resumable, "optimizer_step", optimizer_step)
    assert not same_weights(resumed, run(teacher, tmp_path / "other", replace(config, seed=1)))


def test_a_run_of_slow_steps_is_saved_by_the_clock_and_says_from_where_it_goes_on(
    tiny_t5, tmp_path: Path, monkeypatch, capfd
) -> None:
    """Each step takes 20 seconds and each checkpoint one: after two steps more than 30 have passed without one."""
    seconds, saved = [0.0], []

    def slow(*arguments: Any, **options: Any) -> float:
        seconds[0] += 20
        return optimizer_step(*arguments, **options)

    def save(self: Any, path: Path, step: int) -> None:
        seconds[0] += 1
        saved.extend([step] * (path == self.file))
        own(self, path, step)

    own = resumable.Checkpoint.save
    monkeypatch.setattr(resumable, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    monkeypatch.setattr(resumable.Checkpoint, "save", save)
    monkeypatch.setattr(resumable, "optimizer_step", slow)
    run(tiny_t5(), tmp_path, replace(TOY, steps=5, decay_share=0.0))
    assert saved == [2, 4, 5] and "Going on" not in capfd.readouterr().err
    run(tiny_t5(), tmp_path, replace(TOY, steps=6, decay_share=0.0))
    assert saved[3:] == [6] and f"Going on after step 5, from {tmp_path}" in capfd.readouterr().err
    saved.clear()
    monkeypatch.setattr(resumable, "SAVE_SHARE", 0.01)  # a second in a hundred
    run(tiny_t5(), tmp_path / "slow", replace(TOY, steps=12, decay_share=0.0))
    assert saved == [2, 8, 12], "saving takes no larger share than that, once it is known how long it takes"


@contextmanager
def limited_files(size_bytes: int) -> Iterator[None]:
    """The kernel lets no file of this process grow beyond that, as on a full disk."""
    import resource

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_full_disk_is_a_sentence_and_the_run_goes_on_from_its_last_checkpoint(
    tiny_t5, tmp_path: Path, monkeypatch
) -> None:
    often(monkeypatch)
    whole, folder = run(tiny_t5(), tmp_path / "whole"), tmp_path / "cut"
    interrupt(monkeypatch, after=5)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_t5(), folder)
    monkeypatch.setattr(resumable, "optimizer_step", optimizer_step)
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    with limited_files(len(kept["checkpoint.pt"]) // 2):
        with pytest.raises(JobError, match=r"\.pt could not be written"):
            run(tiny_t5(), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == kept
    (folder / "log.jsonl").unlink()
    (folder / "log.jsonl").symlink_to("/dev/full")
    with pytest.raises(JobError, match=r"log\.jsonl"):
        run(tiny_t5(), folder)
    (folder / "log.jsonl").unlink()
    assert same_weights(whole, run(tiny_t5(), folder))


def test_a_line_of_the_log_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file, row = tmp_path / "log.jsonl", {"step": 1, "loss": 0.5}
    resumable._log(file, row)
    with (
        limited_files(file.stat().st_size + 5),
        pytest.raises(JobError, match=r"log\.jsonl could not be written: No space"),
    ):
        resumable._log(file, row)
    resumable._log(file, row)
    assert log(tmp_path) == [row, row]


def test_a_checkpoint_reaches_the_disk_before_it_has_its_name_and_remnants_are_cleared(
    tiny_t5, tmp_path: Path, monkeypatch
) -> None:
    done: list[str] = []
    for owner, name in ((os, "fsync"), (os, "replace")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, real=real, name=name: (done.append(name), real(*given))[1])
    for name in ("checkpoint.partial", "stable.partial"):
        (tmp_path / name).write_bytes(b"of a run that was killed")
    run(tiny_t5(), tmp_path, replace(TOY, steps=1, decay_share=0.0))
    assert done[:3] == ["fsync", "replace", "fsync"] and not list(tmp_path.glob("*.partial"))

    def interrupted(state: Any, file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_t5(), tmp_path, replace(TOY, steps=2, decay_share=0.0))
    assert not list(tmp_path.glob("*.partial"))


def test_a_damaged_checkpoint_is_named_and_kept(tiny_t5, tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"
    for state in (None, [1], {"step": 1}, {"config": None}):
        if state is None:
            file.write_bytes(b"half of a")
        else:
            torch.save(state, file)
        before = file.read_bytes()
        with pytest.raises(InputError, match=r"checkpoint\.pt"):
            run(tiny_t5(), tmp_path)
        assert file.read_bytes() == before


def test_another_configuration_is_refused_and_the_checkpoint_kept(tiny_t5, tmp_path: Path) -> None:
    run(tiny_t5(), tmp_path, replace(TOY, steps=1))
    before = (tmp_path / "checkpoint.pt").read_bytes()
    for other in (dict(seed=1), dict(loss="labels"), dict(layers=(0, 1)), dict(dropout=0.1), dict(learning_rate=1e-3)):
        with pytest.raises(InputError, match="was made with"):
            run(tiny_t5(), tmp_path, replace(TOY, steps=1, **other))
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_another_run_is_refused_and_the_checkpoint_kept(tiny_t5, tmp_path: Path) -> None:
    """The same configuration with other weights, texts or batches, and fewer steps than were taken."""
    run(tiny_t5(), tmp_path, replace(TOY, steps=2))
    before = (tmp_path / "checkpoint.pt").read_bytes()
    call = partial(distill, tiny_t5(), toy_tokenizer(), MIXTURE, tmp_path, replace(TOY, steps=3))
    given = call.args
    fewer = {"translation": MIXTURE.examples["translation"][:-1]}
    smaller = (Phase(0, (TaskShare("translation", 200),)),)
    others = {
        "another model or teacher": [(tiny_t5(seed=2), *given[1:]), (tiny_t5(d_ff=32), *given[1:])],
        "other texts": [(*given[:2], replace(MIXTURE, examples=fewer), *given[3:]),
                        (*given[:2], replace(MIXTURE, curriculum=smaller), *given[3:])],
        "at least the 2": [(*given[:4], replace(TOY, steps=1))],
    }  # fmt: skip
    for said, calls in others.items():
        for arguments in calls:
            with pytest.raises(InputError, match=said):
                distill(*arguments)
            assert (tmp_path / "checkpoint.pt").read_bytes() == before
    call()
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    torch.save({**state, "made_from": {}, "model": {}}, tmp_path / "checkpoint.pt")
    with pytest.raises(InputError, match="cannot be read"):  # of before there were digests, of a model of another shape
        call()


def test_rows_of_steps_that_are_taken_again_leave_the_log(tiny_t5, tmp_path: Path, monkeypatch) -> None:
    often(monkeypatch)
    run(tiny_t5(), tmp_path, replace(TOY, steps=4))
    rows = (tmp_path / "log.jsonl").read_text()
    (tmp_path / "log.jsonl").write_text(rows + rows.replace('"step": 4', '"step": 8') + "a torn line\n")
    run(tiny_t5(), tmp_path)
    kept = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [line[:10] for line in kept] == ['{"step": 4', "a torn lin", '{"step": 8']


@pytest.mark.parametrize("kind", ["mt5", "umt5"])
def test_no_dropout_means_none_in_attention_either(tiny_t5, tmp_path: Path, kind: str) -> None:
    teacher = tiny_t5(kind, dropout_rate=0.4)
    student = run(teacher, tmp_path, replace(TOY, steps=1)).train()
    ids, labels = torch.tensor([[5, 6, 7, 1]]), torch.tensor([[20, 21, 1]])
    first, second = (student(input_ids=ids, labels=labels).logits for _ in range(2))
    assert torch.equal(first, second) and student.config.dropout_rate == 0.0
    teacher = copy.deepcopy(teacher).train()
    assert not torch.equal(*(teacher(input_ids=ids, labels=labels).logits for _ in range(2)))


def test_the_encoder_moves_by_its_share_of_the_rates(tiny_t5, tmp_path: Path) -> None:
    config, share = replace(TOY, steps=1, warmup_steps=1), 0.1
    begun = stored(shrink_decoder(tiny_t5(), config.layers))
    whole, slow = (run(tiny_t5(), tmp_path / str(s), replace(config, encoder_share=s)) for s in (1.0, share))
    for name, value in slow.state_dict().items():
        full = whole.state_dict()[name] - begun[name]
        of_encoder = name.startswith(("encoder.", "shared.", "lm_head.", "decoder.embed_tokens"))  # these two are tied
        expected = (share if of_encoder else 1.0) * full
        assert torch.allclose(value - begun[name], expected, atol=1e-6), name


def test_a_narrow_student_is_trained_as_it_is(tiny_t5, tmp_path: Path, padded_batch) -> None:
    student = narrowed(tiny_t5())
    before = stored(student)
    trained = module.train_student(
        student, tiny_t5(), toy_tokenizer(), MIXTURE, tmp_path / "run", replace(TOY, steps=2)
    )
    changed = [name for name, value in trained.state_dict().items() if not torch.equal(value, before[name])]
    assert trained is student and set(changed) == set(before)
    student.save_pretrained(tmp_path / "model")
    loaded, _ = load_model(tmp_path / "model")
    found, expected = (teacher_forced(model, *padded_batch, NEW) for model in (loaded, student))
    np.testing.assert_allclose(found, expected, atol=1e-4)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_cannot_be_run_is_refused_and_nothing_written(tiny_t5, tmp_path: Path) -> None:
    out = tmp_path / "out"
    call = partial(distill, tiny_t5(), toy_tokenizer(), examples=MIXTURE, folder=out, config=TOY)
    refused(call, "config", replace(TOY, layers=(0, 3)), match="layers")
    refused(call, "config", replace(TOY, layers=()), match="layers")
    refused(call, "device", "abacus")
    deeper = partial(module.train_student, tiny_t5(), shrink_decoder(tiny_t5(), 2), toy_tokenizer(), MIXTURE, out)
    refused(deeper, "config", replace(TOY, loss="hidden"), match="at least 3 decoder layers, got 2")
    call = partial(call, examples=replace(MIXTURE, by_teacher=False))
    refused(call, "config", replace(TOY, loss="sequence"), match="by_teacher")
    assert not out.exists()


# --- what is kept -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(tiny_t5, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A student, and the folder that was made of it."""
    folder = tmp_path_factory.mktemp("student")
    student = run(tiny_t5(), folder / "run", replace(TOY, layers=(2,), steps=4))
    facts = dict(teacher_name="a teacher", how="distilled", command="t5accel distill --steps 4", settings={"loss": "x"})
    return student, save_student(student, toy_tokenizer(), folder / "model", teacher=tiny_t5(), **facts)


def test_the_student_is_an_ordinary_checkpoint_in_16_bits(kept: tuple[Any, Path], padded_batch) -> None:
    student, folder = kept
    assert next(student.parameters()).dtype == torch.float32
    loaded, tokenizer = load_model(folder)
    assert tokenizer(PAIRS[0][0]).input_ids == toy_tokenizer()(PAIRS[0][0]).input_ids
    plain = transformers.T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    expected = teacher_forced(copy.deepcopy(student).half().float(), *padded_batch, NEW)
    for model in (loaded, plain):
        assert model.config.num_decoder_layers == 1 and not hasattr(model.config, "layer_widths")
        np.testing.assert_array_equal(teacher_forced(model, *padded_batch, NEW), expected)
    assert (folder / "model.safetensors").stat().st_size < 2.2 * student.num_parameters()


def test_its_card_says_what_it_is_and_how_it_was_made(kept: tuple[Any, Path], tiny_t5, tmp_path: Path) -> None:
    student, folder = kept
    card = (folder / "README.md").read_text(encoding="utf-8")
    header, text = card.removeprefix("---\n").split("---\n", 1)
    assert "tags: [t5, distilled]" in header and "license" not in header
    assert "# model\n" in text and "`a teacher`" in text and "t5accel distill --steps 4" in text and "- loss: x" in text
    assert "| decoder layers | 3 | 1 |" in text and "| heads of the decoder | 4, 4, 4 | 4 |" in text
    assert "`T5ForConditionalGeneration.from_pretrained` loads it." in text and "{" not in text
    facts = dict(teacher_name="a teacher", how="distilled", command="c", settings={})
    other = save_student(tiny_t5("umt5"), toy_tokenizer(), tmp_path / "umt5", teacher=student, **facts)
    assert "`UMT5ForConditionalGeneration.from_pretrained`" in (other / "README.md").read_text(encoding="utf-8")
    narrow = narrowed(tiny_t5())
    facts = dict(teacher_name="a teacher", how="pruned", command="c", settings={})
    other = save_student(narrow, toy_tokenizer(), tmp_path / "narrow", teacher=student, **facts)
    text = (other / "README.md").read_text(encoding="utf-8")
    assert "load_model(folder)" in text and "| neurons of the decoder | 64 | 24, 64, 5 |" in text
    assert T5Dims.of(load_model(other)[0]) == T5Dims.of(narrow)


def test_a_student_replaces_a_student_and_nothing_else(kept, tiny_t5, tmp_path: Path, monkeypatch) -> None:
    student, tokenizer, facts = tiny_t5(), toy_tokenizer(), dict(teacher_name="t", how="copied", settings={})

    def save(name: str, command: str) -> str:
        made = save_student(student, tokenizer, tmp_path / name, teacher=student, command=command, **facts)
        return (made / "README.md").read_text(encoding="utf-8")

    assert "first" in save("model", "first") and "second" in (card := save("model", "second"))
    monkeypatch.setattr(toy_tokenizer(), "save_pretrained", lambda folder: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(ExportError, match="Nothing was left behind"):
        save("model", "third")
    assert (tmp_path / "model" / "README.md").read_text(encoding="utf-8") == card and load_model(tmp_path / "model")
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "README.md").write_text("a letter")
    with pytest.raises(InputError, match="letters"):
        save("letters", "fourth")
    assert {path.name for path in tmp_path.iterdir() if path.suffix != ".lock"} == {"model", "letters"}
