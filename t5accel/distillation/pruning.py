"""Structured pruning of a T5 with fine-tuning of the remaining weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from t5accel import machine
from t5accel.distillation.batches import Mixture, Rows, as_mixture, steps_from
from t5accel.distillation.checkpointing import require_device
from t5accel.distillation.importance import (
    IMPORTANCE_METHODS,
    Gates,
    Kept,
    Scores,
    gated,
    magnitude,
    movement,
    normalize_scores,
    select_kept,
    taylor,
)
from t5accel.distillation.losses import OBJECTIVES, student_loss
from t5accel.distillation.student import DistillConfig, Validate, train_student
from t5accel.errors import InputError
from t5accel.models.pruned import layer_widths, prunable_modules, resize
from t5accel.models.sizes import require_t5

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def prune_to(model: PreTrainedModel, kept: Kept) -> PreTrainedModel:
    """Copy a T5 with only the kept heads and neurons (by module of `prunable_modules`, ascending).

    The copy, in evaluation mode, equals the model with all others multiplied by zero. Raises ``InputError`` for a
    missing module and for wrong or no indices.

    >>> from t5accel.models.random_init import random_t5
    >>> model = random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    >>> small = prune_to(model, select_kept(magnitude(model), heads=0.9, neurons=0.9))
    >>> layer_widths(small)["decoder_heads"], layer_widths(small)["decoder_ff"], layer_widths(model)["decoder_ff"]
    ([1], [8], [16])
    """
    sizes: dict[str, list[int]] = {kind: [] for kind in layer_widths(model)}
    known = {name for _, _, name, _ in prunable_modules(model)}
    if set(kept) != known:
        raise InputError(f"kept must hold indices for each of {len(known)} modules, got {sorted(kept)[:3]} ….")
    small = copy.deepcopy(model)
    weights: dict[str, torch.Tensor] = {}
    bias: torch.Tensor | None = None
    for kind, _, name, module in prunable_modules(small):
        indices, attends = list(kept[name]), kind.endswith("heads")
        count = module.q.out_features // small.config.d_kv if attends else module.wo.in_features
        if not indices or indices != sorted({*indices}) or not 0 <= indices[0] <= indices[-1] < count:
            raise InputError(f"kept[{name!r}] must be ascending indices of 0 … {count - 1}, got {indices}.")
        sizes[kind].append(len(indices))
        index = torch.tensor(indices)
        if attends:
            d_kv = small.config.d_kv
            rows = (index[:, None] * d_kv + torch.arange(d_kv)).flatten()
            if hasattr(module, "relative_attention_bias"):
                bias = module.relative_attention_bias.weight.detach()
            if kind != "cross_heads":  # layers without own biases use the first one's
                gone = getattr(module, "pruned_heads", ())  # transformers 4 keeps the biases of pruned heads
                there = torch.tensor([head for head in range(bias.shape[1]) if head not in gone])
                weights[f"{name}.relative_attention_bias.weight"] = bias[:, there[index]]
        else:
            rows = index
        for key, weight in module.named_parameters():
            if not key.startswith("relative"):
                last = key in ("o.weight", "wo.weight")
                weights[f"{name}.{key}"] = weight.detach()[:, rows] if last else weight.detach()[rows]
    resize(small, sizes)
    with torch.no_grad():
        for key, weight in small.named_parameters():
            if key in weights:
                weight.copy_(weights[key])
    return small.eval()


@dataclass(frozen=True)
class PruneConfig:
    """Everything that decides the outcome besides the model and the texts."""

    heads: float = 0.25  # share of all heads to remove, from 0 to below 1
    neurons: float = 0.5  # share of all neurons to remove
    importance: str = "taylor"  # one of IMPORTANCE_METHODS
    steps: int = 1000  # of fine-pruning; with 0 everything is removed at once and nothing trained
    rising: float = 0.5  # share of the steps over which the mask grows (`share`); after it only the weights change
    every: int = 25  # steps between two rankings
    multiple_of: int = 32  # of a layer's neurons
    examine: int = 24  # steps whose batches "taylor" looks at
    # ``layers`` and ``steps`` of the training are unused. Low rates, as the model is trained already; lowest for the
    # encoder, whose knowledge took longest to learn.
    training: DistillConfig = DistillConfig(learning_rate=1e-3, matrix_learning_rate=2.5e-3, encoder_share=0.4)

    def __post_init__(self) -> None:
        select_kept({}, heads=self.heads, neurons=self.neurons, multiple_of=self.multiple_of)  # refuses bad numbers
        if self.importance not in IMPORTANCE_METHODS:
            raise InputError(f"importance must be one of {', '.join(IMPORTANCE_METHODS)}, got {self.importance!r}.")
        if not 0 <= self.rising <= 1 or min(self.every, self.examine) < 1:
            raise InputError(
                f"rising must be 0 … 1, every and examine 1 or more, got {self.rising!r}, {self.every!r} and "
                f"{self.examine!r}."
            )
        if self.steps < 0 or (self.importance == "movement" and self.share(0) == 1):
            raise InputError(
                f"steps must be 0 or more (movement needs training: at least 2, and rising above 0), got {self.steps} "
                f"and {self.rising!r}."
            )

    @property
    def seed(self) -> int:
        return self.training.seed

    def factor(self, step: int) -> float:
        """Multiplier of the peak learning rates at ``step``."""
        return replace(self.training, steps=self.steps).factor(step)

    def share(self, step: int) -> float:
        """Share of the final removal masked at ``step``, 1 at the last: a cubic curve (Zhu and Gupta, 2017)."""
        rising = min(self.steps * self.rising, self.steps - 1)
        return 1.0 - (1.0 - min(1.0, step / rising)) ** 3 if rising > 0 else 1.0


def prune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Rows | Mixture,
    folder: Path,
    config: PruneConfig,
    *,
    teacher: PreTrainedModel | None = None,
    validate: Validate | None = None,
    device: str = "cpu",
) -> PreTrainedModel:
    """Remove heads and neurons, fine-tune the remaining weights, and return a new model on the CPU.

    ``teacher``, whose probabilities are learnt, is by default the whole model. ``examples`` also measure importance.
    Other arguments and errors are those of `distill`.
    """
    require_device(device)
    require_t5(model.config, type(model).__name__)
    shares = dict(heads=config.heads, neurons=config.neurons)
    mixture = as_mixture(examples, tokenizer)
    student = copy.deepcopy(model).to(device).eval()
    gates = Gates(student).to(device)
    fixed = None if config.importance == "movement" else _scores(student, tokenizer, mixture, config)

    def kept_at(step: int) -> Kept:
        scores = movement(gates) if fixed is None else fixed
        now = {what: config.share(step) * share for what, share in shares.items()}
        return select_kept(scores, **now, multiple_of=config.multiple_of)

    def before_step(step: int) -> None:
        rising = step == 0 or config.share(step - 1) < 1
        if rising and (step % config.every == 0 or config.share(step) == 1):
            gates.close(kept_at(step))

    if not config.steps:
        return prune_to(student.to("cpu"), kept_at(0))
    with gated(student, gates):
        train_student(
            student,
            teacher or model,
            tokenizer,
            mixture,
            folder,
            replace(config.training, steps=config.steps),
            validate=validate,
            device=device,
            gates=gates,
            before_step=before_step,
            recorded=config,
        )
    return prune_to(student, gates.kept())


def _scores(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, mixture: Mixture, config: PruneConfig
) -> Scores:
    """Importance before training."""
    if config.importance == "magnitude":
        return normalize_scores(magnitude(model))
    batches = steps_from(mixture, lambda texts: tokenizer(texts)["input_ids"], config.seed, 0)
    few = [batch for _ in range(config.examine) for _, batch in next(batches)]
    shown = machine.progress_bar(few, desc="importance", unit="batch")
    objective = OBJECTIVES["labels"]
    return normalize_scores(taylor(model, shown, lambda batch: student_loss(model, None, batch, objective)))
