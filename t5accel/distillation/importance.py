"""Importance of attention heads and feed-forward neurons: magnitude, Taylor, movement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from t5accel.checks import as_count, is_number
from t5accel.distillation.gates import Gates, gated
from t5accel.errors import InputError
from t5accel.models.pruned import prunable_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from t5accel.distillation.batches import Batch

IMPORTANCE_METHODS = ("magnitude", "taylor", "movement")
Scores = dict[str, torch.Tensor]  # by module name: one per head or neuron
Kept = dict[str, tuple[int, ...]]  # by module name: the heads or neurons that stay, ascending


def magnitude(model: PreTrainedModel) -> Scores:
    """Score by the Euclidean norm of all weights that belong to a head or neuron.

    >>> from t5accel.models.random_init import random_t5
    >>> model = random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    >>> {name: len(scores) for name, scores in magnitude(model).items() if name.startswith("encoder")}
    {'encoder.block.0.layer.0.SelfAttention': 2, 'encoder.block.0.layer.1.DenseReluDense': 16}
    """
    scores, d_kv = {}, model.config.d_kv
    for kind, _, name, module in prunable_modules(model):
        attends = kind.endswith("heads")
        rows = [module.q, module.k, module.v] if attends else _inner(module)
        matrices = [layer.weight for layer in rows] + [(module.o if attends else module.wo).weight.T]
        width = d_kv if attends else 1
        squares = sum(matrix.detach().float().square().sum(dim=1).unflatten(0, (-1, width)) for matrix in matrices)
        scores[name] = squares.sum(dim=1).sqrt().cpu()
    return scores


def taylor(
    model: PreTrainedModel, batches: Iterable[Batch], loss_of: Callable[[Batch], tuple[torch.Tensor, int]]
) -> Scores:
    """Score by the first-order change of the loss without a head or neuron: the mean over batches of `|dL/dg|`.

    g is a factor of `Gates` (Michel, Levy and Neubig, 2019; Molchanov et al., 2017). ``loss_of`` returns a batch's
    summed loss and its number of labels. Small batches tell more: within one, changes of opposite sign cancel.
    """
    gates = Gates(model).to(next(model.parameters()).device)
    sums = [torch.zeros_like(factor) for factor in gates.factors]
    count = 0
    with gated(model, gates):
        for batch in batches:
            loss, labels = loss_of(batch)
            for total, gradient in zip(sums, torch.autograd.grad(loss / labels, list(gates.factors)), strict=True):
                total += gradient.abs()
            count += 1
    if not count:
        raise InputError("There are no batches to look at: give at least one.")
    return {name: (total / count).detach().cpu() for name, total in zip(gates.names, sums, strict=True)}


def movement(gates: Gates) -> Scores:
    """Score by training: high where it moved weights away from zero, low where towards zero.

    Minus a gate's gradient is minus the sum over its weights of w dL/dw (Sanh, Wolf and Rush, 2020; by blocks: Lagunas
    et al., 2021).
    """
    return {name: value.detach().cpu().clone() for name, value in zip(gates.names, gates.movement, strict=True)}


def normalize_scores(scores: Scores) -> Scores:
    """Divide the scores of each module by their Euclidean norm, so that layers can be ranked together."""
    return {name: values / values.norm().clamp(min=1e-30) for name, values in scores.items()}


def select_kept(scores: Scores, *, heads: float = 0.0, neurons: float = 0.0, multiple_of: int = 8) -> Kept:
    """Select what stays when the least important shares of ``heads`` and ``neurons`` are removed.

    Each kind is ranked over all layers together. Every layer keeps at least one head, and a multiple of
    ``multiple_of`` neurons: odd widths are slow. Raises ``InputError`` for a share outside 0 ≤ share < 1.
    """
    for what, share in (("heads", heads), ("neurons", neurons)):
        if not is_number(share) or not 0 <= share < 1:
            raise InputError(f"{what} must be the share to remove, at least 0 and below 1, got {share!r}.")
    multiple_of = as_count(multiple_of, "multiple_of", at_least=1)
    of_heads = {name: values for name, values in scores.items() if name.endswith("Attention")}
    of_neurons = {name: values for name, values in scores.items() if not name.endswith("Attention")}
    chosen = _ranked(of_heads, heads, 1) | _ranked(of_neurons, neurons, multiple_of)
    return {name: chosen[name] for name in scores}


def _ranked(scores: Scores, share: float, multiple_of: int) -> Kept:
    if not scores:
        return {}
    ranked = torch.cat(list(scores.values())).argsort(stable=True)
    removed = round(share * len(ranked))
    stays = torch.ones(len(ranked), dtype=torch.bool)
    stays[ranked[:removed]] = False
    kept, start = {}, 0
    for name, values in scores.items():
        count = int(stays[start : start + len(values)].sum())
        count = max(multiple_of, round(count / multiple_of) * multiple_of) if removed else count
        best = values.argsort(descending=True, stable=True)[: min(count, len(values))]
        kept[name], start = tuple(sorted(best.tolist())), start + len(values)
    return kept


def _inner(module: torch.nn.Module) -> list[torch.nn.Linear]:
    return [getattr(module, name) for name in ("wi", "wi_0", "wi_1") if hasattr(module, name)]


def keep_all(scores: Mapping[str, torch.Tensor]) -> Kept:
    """All heads and neurons, by module."""
    return {name: tuple(range(len(values))) for name, values in scores.items()}
