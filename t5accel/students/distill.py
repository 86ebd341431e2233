"""Distil a T5: a student with fewer decoder layers learns to write what its teacher writes.

Needs torch, transformers, tokenizers and safetensors only. Interrupted at any moment, it goes on from its last
checkpoint with the batches it would have seen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from t5accel.errors import InputError
from t5accel.students.mixture import Batch, Mixture, Part, Phase, TaskBatch, evaluation_sources
from t5accel.students.objectives import OBJECTIVES, as_objective, student_loss
from t5accel.students.optimise import (
    PooledDropout,
    learning_rate_factor,
    new_optimizers,
    optimiser_step,
    use_pooled_dropout,
)
from t5accel.students.pairs import read_pairs, split_pairs
from t5accel.students.resumable import RunConfig, require_device, run_steps
from t5accel.students.shrink import shrink_decoder
from t5accel.students.train import steps_from, validation_losses, validation_sets
from t5accel.tasks import TRANSLATE

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from t5accel.students.gates import Gates

# A student meets all tasks in every step, in the shares in which they are scored, and stories of many people besides:
# one decoder layer has to learn anew to find what the encoder marks as asked for. In trials of 400 steps the questions'
# loss was 0.90 without them, and 0.81 with a third of the weight. A longer run goes on with more questions: after 5,000
# steps of the first phase alone, a student of the model's version 2 had 29 right answers where that had 35.
STUDENTS_MIXTURE = (
    Phase(0, (Part("translation", 2000, weight=0.45), Part("summaries", 1200, 0.5, 0.15),
              Part("questions", 1500, weight=0.25), Part("crowds", 1500, weight=0.15))),
    Phase(1000, (Part("translation", 1500, weight=0.35), Part("summaries", 1200, 0.5, 0.15),
                 Part("questions", 2000, weight=0.3), Part("crowds", 1200, weight=0.2))),
)  # fmt: skip


@dataclass(frozen=True)
class DistillConfig:
    """Everything that decides the outcome, but for the teacher and the texts. ``steps`` may grow between runs.

    Attributes:
        layers: the teacher's decoder layers that the student begins with; `shrink.layer_map` chooses well.
        loss: one of `objectives.OBJECTIVES`.
        learning_rate: AdamW's, of embeddings, biases and norms; ``matrix_learning_rate``: Muon's, of all else.
        encoder_share: what multiplies both for the encoder and the embedding, which the student has from its teacher.
            In trials of 400 steps the questions' loss was 1.19 with 1, 0.90 with 0.1 and 1.28 with 0: at full rates the
            encoder forgets what took its teacher long to learn.
        dropout: of the student, 0 … 1.

    Raises ``InputError`` for an unknown loss, fewer than one step, or a share that is none.
    """

    layers: tuple[int, ...] = (3,)
    loss: str = "logits"
    steps: int = 2000
    seed: int = 0
    learning_rate: float = 4e-3
    matrix_learning_rate: float = 1e-2
    encoder_share: float = 0.1
    warmup_steps: int = 50
    decay_share: float = 0.5
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.loss not in OBJECTIVES:
            raise InputError(f"The loss is {self.loss!r}; give one of {', '.join(OBJECTIVES)}.")
        if self.steps < 1:
            raise InputError(f"steps is {self.steps}; give at least 1.")
        if not 0 <= self.encoder_share <= 1:
            raise InputError(f"encoder_share is {self.encoder_share!r}; give 0 … 1.")

    def factor(self, step: int) -> float:
        """What multiplies the peak learning rates at ``step``.

        >>> [DistillConfig(steps=100, warmup_steps=10).factor(step) for step in (4, 50, 75)]
        [0.5, 1.0, 0.5]
        """
        return learning_rate_factor(step, self.steps, warmup_steps=self.warmup_steps, decay_share=self.decay_share)


def student_mixture(pairs_file: str | Path, *, held_out: int = 1000) -> tuple[Mixture, list[tuple[str, str]]]:
    """What students are trained on, and the (source, target) texts that are held out, for the validation loss.

    Args:
        pairs_file: the file that the bundled model was trained on.
        held_out: English sentences that no model is trained on.

    Raises:
        FileNotFoundError, InputError: as `pairs.read_pairs`.
    """
    split = split_pairs(read_pairs(pairs_file), held_out)
    mixture = Mixture(split.train, evaluation_sources(), curriculum=STUDENTS_MIXTURE)
    return mixture, [(TRANSLATE + english, references[0]) for english, references in split.held_out]


def distill(
    teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, mixture: Mixture, folder: Path,
    config: DistillConfig, *, held_out: list[tuple[str, str]] = (), device: str = "cpu",
) -> PreTrainedModel:  # fmt: skip
    """Shrink a teacher's decoder and train what is left of it; return the student in evaluation mode, on the CPU.

    Args:
        teacher: a T5-like model; it is not changed.
        mixture: what is trained on; with the loss "sequence", texts of the teacher must be ``given`` in it.
        folder: for the checkpoint and the log; one that is there is gone on from.
        held_out: (source, target) texts for the validation loss.
        device: ``"cpu"`` or ``"cuda"``.

    Raises:
        InputError: the layers are not the teacher's, the texts of the teacher are missing, the checkpoint was made with
            another configuration, or the device is not there.
    """
    require_device(device)
    student = shrink_decoder(teacher, config.layers)
    return train_student(student, teacher, tokenizer, mixture, folder, config, held_out=held_out, device=device)


def train_student(
    student: PreTrainedModel, teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, mixture: Mixture,
    folder: Path, config: DistillConfig, *, held_out: list[tuple[str, str]] = (), device: str = "cpu",
    gates: Gates | None = None, before_step: Callable[[int], None] | None = None, recorded: RunConfig | None = None,
) -> PreTrainedModel:  # fmt: skip
    """Train a student that is already there, in place; the other arguments are those of `distill`.

    Args:
        student: of the teacher's vocabulary, and with the loss "hidden" of its ``d_model``.
        gates: gather their gradients in every step; their state belongs to the run's.
        before_step: is called with the number of each step.
        recorded: the configuration that the checkpoint is of, where that says more than ``config``.

    Raises:
        InputError: the texts of the teacher are missing, the sizes differ, or the checkpoint was made with another
            configuration.
    """
    for size in ("vocab_size", "d_model") if config.loss == "hidden" else ("vocab_size",):
        own, theirs = getattr(student.config, size), getattr(teacher.config, size)
        if own != theirs:
            raise InputError(f"{size} of the student is {own}, of the teacher {theirs}: give a teacher of the same.")
    if config.loss == "sequence" and not mixture.given:
        raise InputError(
            "The loss is 'sequence' and the mixture has no texts of the teacher: give read_teacher_texts()."
        )

    def encode(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts)["input_ids"]

    student.config.dropout_rate = config.dropout
    for module in student.modules():
        if isinstance(module, torch.nn.Dropout | PooledDropout):
            module.p = config.dropout
    use_pooled_dropout(student)
    student.to(device).train()
    teacher = copy.deepcopy(teacher).to(device).eval()
    objective = as_objective(config.loss)
    optimizers = new_optimizers(
        student,
        learning_rate=config.learning_rate,
        matrix_learning_rate=config.matrix_learning_rate,
        encoder_share=config.encoder_share,
    )
    sets = validation_sets(list(held_out), encode) if held_out else {}

    def loss_of(batch: Batch) -> tuple[torch.Tensor, int]:
        return student_loss(student, teacher, batch, objective)

    def update(step: int, batches: list[TaskBatch]) -> float:
        if before_step is not None:
            before_step(step)
        loss = optimiser_step(
            student, optimizers, [batch for _, batch in batches], mixture.phase(step).weights(batches),
            factor=config.factor(step), loss_of=loss_of,
        )  # fmt: skip
        if gates is not None:
            gates.collect()  # at once: a checkpoint after this step has to hold what it brought
        return loss

    state = student if gates is None else torch.nn.ModuleDict({"model": student, "gates": gates})
    run_steps(
        folder, recorded or config, state, optimizers,
        batches_from=lambda step: steps_from(mixture, encode, config.seed, step), update=update,
        validate=lambda: validation_losses(student, sets), device=device, label=config.loss,
    )  # fmt: skip
    return student.eval().to("cpu")
