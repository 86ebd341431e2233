"""Movement pruning of a BERT: heads and neurons are masked in training, then removed.

Movement (Sanh, Wolf and Rush 2020) sums minus gradient times weight over the steps; parts that are pulled towards zero
go first.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.utils import parametrize

from bench.bert.model import resize, widths
from t5accel.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KINDS = ("heads", "neurons")


class Mask(torch.nn.Module):
    """A factor for every (rows, columns) block of a weight, 1 at first; 0 is as if the block were not there.

    Attributes:
        factor: (weight rows / rows, weight columns / columns).
        movement: of the same shape: minus the sum of all gradients of the factor so far.
    """

    def __init__(self, weight: torch.Tensor, rows: int, columns: int):
        super().__init__()
        self.rows, self.columns = rows, columns
        shape = (weight.shape[0] // rows, weight.shape[1] // columns)
        self.factor = torch.nn.Parameter(torch.ones(shape))
        self.register_buffer("movement", torch.zeros(shape))
        self.factor.register_post_accumulate_grad_hook(self._move)

    def _move(self, factor: torch.nn.Parameter) -> None:
        self.movement -= factor.grad
        factor.grad = None  # no optimiser trains it, and no clipping must count it

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        wide = self.factor.repeat_interleave(self.rows, 0).repeat_interleave(self.columns, 1)
        return weight * wide


@dataclass(frozen=True)
class Pruning:
    """What is masked in the end: shares of all heads and of all neurons, 0 to below 1."""

    heads: float = 0.0
    neurons: float = 0.0

    def __post_init__(self) -> None:
        for kind in KINDS:
            if not 0 <= getattr(self, kind) < 1:
                raise InputError(f"{kind} must be 0 to below 1, got {getattr(self, kind)!r}.")


def attach(model: PreTrainedModel, pruning: Pruning) -> dict[str, list[Mask]]:
    """Masks for every part that may go, by kind; from now on the model computes with masked weights."""
    hidden = model.config.hidden_size
    size = hidden // model.config.num_attention_heads
    masks: dict[str, list[Mask]] = {kind: [] for kind in KINDS}

    def add(kind: str, linear: torch.nn.Linear, rows: int, columns: int) -> None:
        mask = Mask(linear.weight, rows, columns)
        parametrize.register_parametrization(linear, "weight", mask)
        masks[kind].append(mask)

    for layer in model.bert.encoder.layer:
        attention = layer.attention
        if pruning.heads:
            add("heads", attention.output.dense, hidden, size)
        if pruning.neurons:
            add("neurons", layer.output.dense, hidden, 1)
    return masks


def close(masks: Mapping[str, list[Mask]], pruning: Pruning, share: float) -> None:
    """Mask the parts with the least movement: ``share`` of what goes in the end. Each layer keeps one of each."""
    for kind in KINDS:
        if not masks[kind]:
            continue
        movement = torch.cat([mask.movement.flatten() for mask in masks[kind]])
        order = movement.argsort(stable=True)
        gone = torch.zeros(len(movement), dtype=torch.bool)
        gone[order[: int(round(share * getattr(pruning, kind) * len(movement)))]] = True
        begin = 0
        for mask in masks[kind]:
            count = mask.factor.numel()
            here = gone[begin : begin + count].clone()
            if here.all():
                here[mask.movement.flatten().argmax()] = False
            with torch.no_grad():
                mask.factor.copy_((~here).float().view_as(mask.factor))
            begin += count


def closing(step: int, steps: int, rising: float = 0.6) -> float:
    """The share of what goes that is masked at ``step``: a cubic curve (Zhu and Gupta 2017) up to ``rising``.

    >>> closing(0, 100), round(closing(30, 100), 3), closing(60, 100)
    (0.0, 0.875, 1.0)
    """
    return 1.0 - (1.0 - min(1.0, step / max(1.0, rising * steps))) ** 3


def removed(model: PreTrainedModel) -> PreTrainedModel:
    """A copy without masks and without the heads and neurons that contribute nothing; it computes the same.

    A head goes where no column of attention's output matrix reads it, or where all its values are their bias: what that
    adds is the same for every token, and becomes part of the output's bias.
    """
    weights = {name: p.detach().cpu() for name, p in model.named_parameters() if ".parametrizations." not in name}
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module):
            weights[f"{name}.weight"] = module.weight.detach().cpu()
    whole = type(model)(copy.deepcopy(model.config))  # a copy would share the masks' class with the model
    resize(whole, widths(model))
    whole.load_state_dict(weights)
    config, layers = whole.config, whole.bert.encoder.layer
    size = config.hidden_size // config.num_attention_heads
    kept: dict[str, list[torch.Tensor]] = {"heads": [], "neurons": []}
    with torch.no_grad():
        for layer in layers:
            value, output = layer.attention.self.value, layer.attention.output.dense
            constant = (value.weight.view(-1, size, config.hidden_size) == 0).all(2).all(1)
            unread = (output.weight.view(config.hidden_size, -1, size) == 0).all(2).all(0)
            dead = constant.repeat_interleave(size)
            output.bias += output.weight[:, dead] @ value.bias[dead]
            output.weight[:, dead] = 0.0  # should the layer's last head stay, to have a shape
            kept["heads"].append(_at_least_one(~(constant | unread)))
            kept["neurons"].append(_at_least_one((layer.output.dense.weight != 0).any(0)))
    weights = {name: weight.detach().clone() for name, weight in whole.named_parameters()}
    resize(whole, {kind: [int(keep.sum()) for keep in keeps] for kind, keeps in kept.items()})
    for i, (heads, neurons) in enumerate(zip(kept["heads"], kept["neurons"], strict=True)):
        columns = heads.repeat_interleave(size)
        for name, keep in (("attention.self.query", columns), ("attention.self.key", columns),
                           ("attention.self.value", columns), ("intermediate.dense", neurons)):  # fmt: skip
            for part in ("weight", "bias"):
                key = f"bert.encoder.layer.{i}.{name}.{part}"
                weights[key] = weights[key][keep]
        for name, keep in (("attention.output.dense", columns), ("output.dense", neurons)):
            key = f"bert.encoder.layer.{i}.{name}.weight"
            weights[key] = weights[key][:, keep]
    whole.load_state_dict(weights)
    return whole.eval()


def _at_least_one(keep: torch.Tensor) -> torch.Tensor:
    keep = keep.clone()
    if not keep.any():
        keep[0] = True
    return keep
