"""Distillation losses on labels, the teacher's probabilities and its decoder states.

Sequence-level distillation (Kim and Rush, 2016) uses the labels' loss, on the teacher's outputs (`teacher_outputs`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from t5accel.distillation.optimizer import IGNORED, cross_entropy, model_inputs
from t5accel.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from t5accel.distillation.batches import Batch


@dataclass(frozen=True)
class Objective:
    """A weighted sum of three losses, each per label."""

    labels: float = 0.0  # weight of the cross-entropy with the labels
    # Weight of the Kullback-Leibler divergence of the student's next-token distribution from the teacher's, both at
    # ``temperature``, times its square (Hinton, Vinyals and Dean, 2015).
    logits: float = 0.0
    # Weight of the mean squared difference between decoder states of student and teacher, each divided by its root mean
    # square, summed over the student's layers.
    hidden: float = 0.0
    temperature: float = 2.0  # divides the logits of both
    smoothing: float = 0.1  # of the labels, 0 … 1

    def __post_init__(self) -> None:
        weights = (self.labels, self.logits, self.hidden)
        if min(weights) < 0 or not sum(weights) > 0:
            raise InputError(f"labels, logits and hidden must be weights of 0 or more, one above 0, got {weights}.")
        if not self.temperature > 0 or not 0 <= self.smoothing < 1:
            raise InputError(
                f"temperature must be above 0 and smoothing in 0 … 1, got {self.temperature!r} and {self.smoothing!r}."
            )

    @property
    def needs_teacher(self) -> bool:
        return self.logits > 0 or self.hidden > 0


# What the course compares. "sequence" differs from "labels" in who wrote the labels.
OBJECTIVES = {
    "labels": Objective(labels=1.0),
    "logits": Objective(labels=0.3, logits=0.7),
    "hidden": Objective(labels=0.3, logits=0.7, hidden=0.5),
    "sequence": Objective(labels=1.0),
}


def matched_layers(teacher_layers: int, student_layers: int) -> tuple[int, ...]:
    """The teacher's layer that each student layer must match: the last of those it replaces.

    >>> matched_layers(4, 2)
    (1, 3)
    """
    return tuple((layer + 1) * teacher_layers // student_layers - 1 for layer in range(student_layers))


def student_loss(
    student: PreTrainedModel, teacher: PreTrainedModel | None, batch: Batch, objective: Objective
) -> tuple[torch.Tensor, int]:
    """The summed loss of a batch and its number of labels; ``teacher`` must be in evaluation mode."""
    if objective.needs_teacher and teacher is None:
        raise InputError("teacher must be a model, got None. Give one, or an Objective of labels alone.")
    inputs, labels = model_inputs(batch, student)
    device = labels.device
    options = dict(use_cache=False, output_hidden_states=objective.hidden > 0)
    with torch.autocast(device.type, torch.bfloat16):
        output = student(**inputs, **options)
    loss = torch.zeros((), device=device)
    if objective.labels:
        loss = loss + objective.labels * cross_entropy(output.logits, labels, objective.smoothing)
    if objective.needs_teacher:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            expected = teacher(**inputs, **options)
        counts = labels != IGNORED
        if objective.logits:
            loss = loss + objective.logits * _divergence(output.logits, expected.logits, counts, objective.temperature)
        if objective.hidden:
            loss = loss + objective.hidden * _distance(output, expected, counts)
    return loss, sum(map(len, batch[1]))


def _divergence(found: torch.Tensor, expected: torch.Tensor, counts: torch.Tensor, temperature: float) -> torch.Tensor:
    """KL(expected || found) of logits (B, T, V), summed over the positions with a label."""
    log_found, log_expected = (
        torch.log_softmax(logits[counts].float() / temperature, dim=-1) for logits in (found, expected)
    )
    return temperature**2 * torch.nn.functional.kl_div(log_found, log_expected, reduction="sum", log_target=True)


def _distance(output: Any, expected: Any, counts: torch.Tensor) -> torch.Tensor:
    # The first state is the embedding, the last one is normed.
    own, theirs = output.decoder_hidden_states[1:], expected.decoder_hidden_states[1:]
    total = torch.zeros((), device=counts.device)
    for state, layer in zip(own, matched_layers(len(theirs), len(own)), strict=True):
        found, wanted = (_unit(hidden[counts].float()) for hidden in (state, theirs[layer]))
        total = total + (found - wanted).square().mean(dim=-1).sum()
    return total


def _unit(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + 1e-6)
