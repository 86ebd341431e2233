"""Distil a T5: a student with fewer decoder layers learns to write what its teacher writes.

Needs torch, transformers, tokenizers and safetensors only. Interrupted at any moment, it goes on from its last
checkpoint with the batches it would have seen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from t5accel.checks import as_count
from t5accel.distillation.batches import Batch, Mixture, TaskBatch, steps_from
from t5accel.distillation.checkpointing import RunConfig, require_device, run_steps
from t5accel.distillation.examples import Rows, as_mixture
from t5accel.distillation.losses import OBJECTIVES, as_objective, student_loss
from t5accel.distillation.optimizer import (
    learning_rate_factor,
    new_optimizers,
    optimizer_step,
    set_dropout,
    use_pooled_dropout,
)
from t5accel.errors import InputError
from t5accel.models.sizes import T5Dims

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from t5accel.distillation.gates import Gates


# A student with fewer decoder layers, begun with some of its teacher's: shrink, then fine-tune.
# After Shleifer and Rush (2020, "Pre-trained summarization distillation"): a decoder whose layers are copied from the
# teacher learns in a fraction of the steps that random ones need. The encoder is kept whole: it runs once per source,
# the decoder once per token.


def layer_map(teacher_layers: int, student_layers: int) -> tuple[int, ...]:
    """Which of its teacher's decoder layers a student begins with: spread evenly, the first and the last among them.

    One layer alone is the last, whose output is what the head reads: after 400 steps the bundled model's student had a
    validation loss of 1.11 nats a token on questions, begun with the first one 2.22; on summaries 0.93 and 1.17, on
    translation 1.98 and 2.06. A caller who knows better gives `shrink_decoder` another list.

    Raises:
        InputError: the student has no layer, or more than its teacher.

    >>> [layer_map(4, count) for count in (3, 2, 1)]
    [(0, 1, 3), (0, 3), (3,)]
    """
    if not 1 <= student_layers <= teacher_layers:
        raise InputError(f"{student_layers} decoder layers of {teacher_layers}; give 1 … {teacher_layers}.")
    if student_layers == 1:
        return (teacher_layers - 1,)
    return tuple(layer * (teacher_layers - 1) // (student_layers - 1) for layer in range(student_layers))


def shrink_decoder(teacher: PreTrainedModel, layers: int | Sequence[int]) -> PreTrainedModel:
    """A copy of a T5 with some of its decoder layers, ready to be trained; the teacher is not changed.

    Args:
        teacher: a T5-like model.
        layers: those that are kept, ascending, counted from 0; or how many, which `layer_map` chooses.

    Returns:
        A model of the same class in evaluation mode, whose ``config.num_decoder_layers`` is right.

    Raises:
        InputError: there are no such layers.
        NotT5Error: the model is of another kind.

    >>> from t5accel.models.random_init import random_t5
    >>> sizes = dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=2, num_decoder_layers=4, vocab_size=32)
    >>> T5Dims.of(shrink_decoder(random_t5(sizes), [0, 3])).decoder_layers
    2
    """
    count = T5Dims.of(teacher).decoder_layers
    chosen = layer_map(count, layers) if isinstance(layers, int) else layers
    kept = [as_count(layer, f"layers[{place}]", at_least=0) for place, layer in enumerate(chosen)]
    if not kept or kept[-1] >= count or kept != sorted({*kept}):
        raise InputError(f"layers is {layers!r}; give different ones of 0 … {count - 1}, ascending.")
    student = copy.deepcopy(teacher)
    blocks = student.decoder.block
    first = blocks[kept[0]].layer[0].SelfAttention
    donor = blocks[0].layer[0].SelfAttention
    if not getattr(first, "has_relative_attention_bias", True):
        # T5's first layer holds the position biases of all.
        first.has_relative_attention_bias = True
        first.relative_attention_bias = donor.relative_attention_bias
    student.decoder.block = type(blocks)(blocks[layer] for layer in kept)
    for layer, block in enumerate(student.decoder.block):
        for part in block.layer[:2]:
            getattr(part, "SelfAttention", getattr(part, "EncDecAttention", None)).layer_idx = layer
    for config in {id(c): c for c in (student.config, student.decoder.config)}.values():
        config.num_decoder_layers = len(kept)
        narrow = getattr(config, "layer_widths", None)
        if narrow:
            config.layer_widths = {
                kind: [sizes[i] for i in kept] if kind in ("decoder_heads", "decoder_ff", "cross_heads") else sizes
                for kind, sizes in narrow.items()
            }
    student.decoder.config.num_layers = len(kept)  # the decoder's own copy counts them by this name
    return student.eval()


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

    Raises ``InputError`` for an unknown loss, fewer than one step, or a share outside 0 … 1.
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


Validate = Callable[["PreTrainedModel"], dict[str, float]]  # from a model to numbers for ``log.jsonl``


def distill(
    teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: Rows | Mixture, folder: Path,
    config: DistillConfig, *, validate: Validate | None = None, device: str = "cpu",
) -> PreTrainedModel:  # fmt: skip
    """Shrink a teacher's decoder and train what is left of it; return the student in evaluation mode, on the CPU.

    Args:
        teacher: a T5-like model; it is not changed.
        examples: rows ``{"source", "target"}``, T5's prefix included in the source, or a JSON Lines file of such rows;
            or a `Mixture`, which `mix_examples` makes of several files with weights. The loss "sequence" needs one
            whose targets the teacher wrote (``by_teacher``).
        folder: for the checkpoint and the log. A run whose checkpoint is there continues from it.
        validate: scores the student now and then, for ``log.jsonl``; `validation.make_validator` makes such a function
            from rows of yours.
        device: ``"cpu"`` or ``"cuda"``.

    Raises:
        InputError: a row is wrong (the message names it), the teacher has no such layers, the teacher's texts are
            missing, the checkpoint was made with another configuration, or the device does not exist.

    >>> from tempfile import TemporaryDirectory
    >>> from t5accel.models.load import load_model
    >>> from t5accel.models.random_init import random_t5
    >>> sizes = dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, num_decoder_layers=4, vocab_size=8000)
    >>> teacher, (_, tokenizer) = random_t5(sizes), load_model("mini")
    >>> rows = [{"source": "translate English to French: Go!", "target": "Va !"}]
    >>> with TemporaryDirectory() as folder:
    ...     student = distill(teacher, tokenizer, rows, Path(folder), DistillConfig(layers=(0, 3), steps=1))
    >>> student.config.num_decoder_layers
    2
    """
    require_device(device)
    student = shrink_decoder(teacher, config.layers)
    mixture = as_mixture(examples, tokenizer)
    return train_student(student, teacher, tokenizer, mixture, folder, config, validate=validate, device=device)


def train_student(
    student: PreTrainedModel, teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, mixture: Mixture,
    folder: Path, config: DistillConfig, *, validate: Validate | None = None, device: str = "cpu",
    gates: Gates | None = None, before_step: Callable[[int], None] | None = None, recorded: RunConfig | None = None,
) -> PreTrainedModel:  # fmt: skip
    """Train an existing student in place; the other arguments are those of `distill`.

    Args:
        student: with the teacher's vocabulary and, for the loss "hidden", its ``d_model``.
        gates: gather their gradients in every step; their state is part of the checkpoint.
        before_step: called with the number of each step.
        recorded: the configuration that the checkpoint is of, where that says more than ``config``.

    Raises:
        InputError: the texts of the teacher are missing, the sizes differ, or the checkpoint was made with another
            configuration.
    """
    for size in ("vocab_size", "d_model") if config.loss == "hidden" else ("vocab_size",):
        own, theirs = getattr(student.config, size), getattr(teacher.config, size)
        if own != theirs:
            raise InputError(f"{size} of the student is {own}, of the teacher {theirs}: give a teacher of the same.")
    if config.loss == "sequence" and not mixture.by_teacher:
        raise InputError(
            "The loss is 'sequence' and the mixture has no texts of the teacher: let write_teacher_outputs() make some, "
            "and mix them with by_teacher=True."
        )

    def encode(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts)["input_ids"]

    student.config.dropout_rate = config.dropout
    use_pooled_dropout(student)
    set_dropout(student, config.dropout)
    student.to(device).train()
    teacher = copy.deepcopy(teacher).to(device).eval()
    objective = as_objective(config.loss)
    optimizers = new_optimizers(
        student,
        learning_rate=config.learning_rate,
        matrix_learning_rate=config.matrix_learning_rate,
        encoder_share=config.encoder_share,
    )

    def loss_of(batch: Batch) -> tuple[torch.Tensor, int]:
        return student_loss(student, teacher, batch, objective)

    def update(step: int, batches: list[TaskBatch]) -> float:
        if before_step is not None:
            before_step(step)
        loss = optimizer_step(
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
        validate=lambda: validate(student) if validate else {}, device=device, label=config.loss,
    )  # fmt: skip
    return student.eval().to("cpu")
