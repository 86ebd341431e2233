"""What a student learns from: the labels, its teacher's probabilities, its teacher's inner states.

A fourth way needs no loss of its own: sequence-level distillation (Kim and Rush, 2016) trains on labels that the
teacher wrote (`teacher_texts`).
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
    """A weighted sum of three losses, each per label.

    Attributes:
        labels: weight of the cross-entropy with the labels.
        logits: weight of the divergence (Kullback and Leibler) of the student's next-token distribution from the
            teacher's, both at ``temperature``, times its square (Hinton, Vinyals and Dean, 2015).
        hidden: weight of the mean squared difference between decoder states of student and teacher, each divided by its
            root mean square, summed over the student's layers.
        temperature: divides the logits of both.
        smoothing: of the labels, 0 … 1.

    Raises ``InputError`` for a negative weight, none at all, or a temperature of 0 or less.
    """

    labels: float = 0.0
    logits: float = 0.0
    hidden: float = 0.0
    temperature: float = 2.0
    smoothing: float = 0.1

    def __post_init__(self) -> None:
        weights = (self.labels, self.logits, self.hidden)
        if min(weights) < 0 or not sum(weights) > 0:
            raise InputError(f"The weights of labels, logits and hidden are {weights}; give 0 or more, one above 0.")
        if not self.temperature > 0 or not 0 <= self.smoothing < 1:
            raise InputError(
                f"temperature is {self.temperature!r} and smoothing {self.smoothing!r}; give more than 0, and 0 … 1."
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


def as_objective(value: Any) -> Objective:
    """An objective, or the one of that name; raises ``InputError`` for anything else.

    >>> as_objective("logits").temperature
    2.0
    """
    if isinstance(value, Objective):
        return value
    if not isinstance(value, str) or value not in OBJECTIVES:
        raise InputError(f"The loss is {value!r}; give one of {', '.join(OBJECTIVES)}, or an Objective.")
    return OBJECTIVES[value]


def matched_layers(teacher_layers: int, student_layers: int) -> tuple[int, ...]:
    """For each layer of the student the teacher's whose output it shall match: the last of those it stands for.

    >>> matched_layers(4, 2), matched_layers(4, 1)
    ((1, 3), (3,))
    """
    return tuple((layer + 1) * teacher_layers // student_layers - 1 for layer in range(student_layers))


def student_loss(
    student: PreTrainedModel, teacher: PreTrainedModel | None, batch: Batch, objective: Objective
) -> tuple[torch.Tensor, int]:
    """The summed loss of a batch and the number of its labels.

    Args:
        student: whose gradients are wanted.
        teacher: in evaluation mode; may be ``None`` if the objective needs none.
        batch: token ids of sources and of labels.

    Raises:
        InputError: the objective needs a teacher and there is none.
    """
    if objective.needs_teacher and teacher is None:
        raise InputError("There is no teacher: give one, or an Objective of labels alone.")
    device = next(student.parameters()).device
    inputs, labels = model_inputs(batch, device)
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
    """KL(expected || found), summed over the positions that count: logits (B, T, V)."""
    log_found, log_expected = (
        torch.log_softmax(logits[counts].float() / temperature, dim=-1) for logits in (found, expected)
    )
    return temperature**2 * torch.nn.functional.kl_div(log_found, log_expected, reduction="sum", log_target=True)


def _distance(output: Any, expected: Any, counts: torch.Tensor) -> torch.Tensor:
    """Between decoder states, the first of which is the embedding, and the last of which is normed."""
    own, theirs = output.decoder_hidden_states[1:], expected.decoder_hidden_states[1:]
    total = torch.zeros((), device=counts.device)
    for state, layer in zip(own, matched_layers(len(theirs), len(own)), strict=True):
        found, wanted = (_unit(hidden[counts].float()) for hidden in (state, theirs[layer]))
        total = total + (found - wanted).square().mean(dim=-1).sum()
    return total


def _unit(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + 1e-6)
