"""Distil a T5 into a student with fewer decoder layers.

The layers are copied from the teacher (Shleifer and Rush, 2020, "Pre-trained summarization distillation"): such a
decoder learns in a fraction of the steps that a random one needs. The encoder stays whole: it runs once per source.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from t5accel.checks import as_count
from t5accel.distillation.batches import Mixture, Rows, as_mixture
from t5accel.distillation.checkpointing import require_device, run_training
from t5accel.distillation.losses import OBJECTIVES, student_loss
from t5accel.distillation.optimizer import learning_rate_factor, new_optimizers, set_dropout
from t5accel.errors import InputError
from t5accel.models.sizes import T5Dims

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from t5accel.distillation.importance import Gates


def layer_map(teacher_layers: int, student_layers: int) -> tuple[int, ...]:
    """Choose the teacher's decoder layers for a student: evenly spread, first and last included.

    >>> [layer_map(4, count) for count in (3, 2, 1)]
    [(0, 1, 3), (0, 3), (3,)]
    """
    if not 1 <= student_layers <= teacher_layers:
        raise InputError(f"student_layers must be 1 … {teacher_layers} decoder layers, got {student_layers}.")
    # The head reads the last layer's output. Validation losses of the bundled model's student after 400 steps, begun
    # with the last or the first layer: questions 1.11 or 2.22 nats per token, summaries 0.93 or 1.17, translation 1.98
    # or 2.06.
    if student_layers == 1:
        return (teacher_layers - 1,)
    return tuple(layer * (teacher_layers - 1) // (student_layers - 1) for layer in range(student_layers))


def shrink_decoder(teacher: PreTrainedModel, layers: int | Sequence[int]) -> PreTrainedModel:
    """Copy a T5 with some of its decoder layers (ascending from 0, or a number for `layer_map`), in evaluation mode.

    Raises ``InputError`` for layers that it lacks, ``NotT5Error`` for another architecture.

    >>> from t5accel.models.random_init import random_t5
    >>> sizes = dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=2, num_decoder_layers=4, vocab_size=32)
    >>> T5Dims.of(shrink_decoder(random_t5(sizes), [0, 3])).decoder_layers
    2
    """
    count = T5Dims.of(teacher).decoder_layers
    chosen = layer_map(count, layers) if isinstance(layers, int) else layers
    kept = [as_count(layer, f"layers[{place}]", at_least=0) for place, layer in enumerate(chosen)]
    if not kept or kept[-1] >= count or kept != sorted({*kept}):
        raise InputError(f"layers must be ascending ones of 0 … {count - 1}, got {layers!r}.")
    student = copy.deepcopy(teacher)
    blocks = student.decoder.block
    first = blocks[kept[0]].layer[0].SelfAttention
    donor = blocks[0].layer[0].SelfAttention
    if not getattr(first, "has_relative_attention_bias", True):
        # T5's first layer holds the position biases of all layers.
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
    """Everything that decides the outcome besides the teacher and the texts. ``steps`` may grow between runs."""

    layers: tuple[int, ...] = (3,)  # the teacher's decoder layers that the student starts with; see `layer_map`
    loss: str = "logits"  # one of OBJECTIVES
    steps: int = 2000
    seed: int = 0
    learning_rate: float = 4e-3  # AdamW's, of embeddings, biases and norms
    matrix_learning_rate: float = 1e-2  # Muon's, of all other weights
    # Multiplies both rates for the encoder and the embedding. In trials of 400 steps the questions' loss was 1.19 with
    # 1, 0.90 with 0.1 and 1.28 with 0: at full rates the encoder forgets what took its teacher long to learn.
    encoder_share: float = 0.1
    warmup_steps: int = 50
    decay_share: float = 0.5
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.loss not in OBJECTIVES:
            raise InputError(f"loss must be one of {', '.join(OBJECTIVES)}, got {self.loss!r}.")
        if self.steps < 1:
            raise InputError(f"steps must be at least 1, got {self.steps}.")
        if as_count(self.seed, "seed", at_least=0) >= 2**32:
            raise InputError(f"seed must be below 2**32, got {self.seed}.")
        if not 0 <= self.encoder_share <= 1:
            raise InputError(f"encoder_share must be 0 … 1, got {self.encoder_share!r}.")

    def factor(self, step: int) -> float:
        """Multiplier of the peak learning rates at ``step``."""
        return learning_rate_factor(step, self.steps, warmup_steps=self.warmup_steps, decay_share=self.decay_share)


Validate = Callable[["PreTrainedModel"], dict[str, float]]  # from a model to numbers for ``log.jsonl``


def distill(
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Rows | Mixture,
    folder: Path,
    config: DistillConfig,
    *,
    validate: Validate | None = None,
    device: str = "cpu",
) -> PreTrainedModel:
    """Train a copy of the teacher with fewer decoder layers; return it in evaluation mode, on the CPU.

    ``examples`` are rows ``{"source", "target"}``, the source with its prefix, a JSON Lines file of such rows, or a
    `Mixture`; the loss "sequence" needs one with ``by_teacher``. A checkpoint in ``folder`` is continued from, if it
    was made from the same teacher, texts and batches. ``validate``, such as `make_validator` returns, adds scores to
    ``log.jsonl``.

    Raises ``InputError`` for a wrong row, layer or device, missing texts of the teacher, and a checkpoint of another
    run; ``JobError`` on a full disk.
    """
    require_device(device)
    student = shrink_decoder(teacher, config.layers)
    mixture = as_mixture(examples, tokenizer)
    return train_student(student, teacher, tokenizer, mixture, folder, config, validate=validate, device=device)


def train_student(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    mixture: Mixture,
    folder: Path,
    config: DistillConfig,
    *,
    validate: Validate | None = None,
    device: str = "cpu",
    gates: Gates | None = None,
    before_step: Callable[[int], None] | None = None,
    recorded: Any = None,
) -> PreTrainedModel:
    """Train a student of the same vocabulary (and ``d_model``, for the loss "hidden") in place; see `distill`.

    ``gates`` collect their gradients in every step and are saved with the checkpoint, whose configuration is
    ``recorded`` where that says more than ``config``.
    """
    for size in ("vocab_size", "d_model") if config.loss == "hidden" else ("vocab_size",):
        own, theirs = getattr(student.config, size), getattr(teacher.config, size)
        if own != theirs:
            raise InputError(f"{size} must be the same, got {own} for the student and {theirs} for the teacher.")
    own, theirs = (T5Dims.of(model).decoder_layers for model in (student, teacher))
    if config.loss == "hidden" and own > theirs:
        raise InputError(f"For the loss 'hidden' the teacher must have at least {own} decoder layers, got {theirs}.")
    if config.loss == "sequence" and not mixture.by_teacher:
        raise InputError(
            "The mixture must have texts of the teacher for the loss 'sequence'. Let write_teacher_outputs() make "
            "some, and mix them with by_teacher=True."
        )

    student.config.dropout_rate = config.dropout
    set_dropout(student, config.dropout)
    student.to(device).train()
    teacher = copy.deepcopy(teacher).to(device).eval()
    objective = OBJECTIVES[config.loss]
    optimizers = new_optimizers(
        student,
        learning_rate=config.learning_rate,
        matrix_learning_rate=config.matrix_learning_rate,
        encoder_share=config.encoder_share,
    )
    run_training(
        folder,
        recorded or config,
        student,
        optimizers,
        mixture,
        lambda texts: tokenizer(texts)["input_ids"],
        loss_of=lambda batch: student_loss(student, teacher, batch[1], objective),
        validate=lambda: validate(student) if validate else {},
        before_step=before_step,
        after_step=None if gates is None else gates.collect,  # before a checkpoint, which holds its gradients
        state=None if gates is None else torch.nn.ModuleDict({"model": student, "gates": gates}),
        made_from=(student, teacher),
        device=device,
        label=config.loss,
    )
    return student.eval().to("cpu")
