"""Gates and importance scores of attention heads and feed-forward neurons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from t5accel.checks import as_count, is_number
from t5accel.errors import InputError
from t5accel.models.pruned import prunable_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from t5accel.distillation.batches import Batch

IMPORTANCE_METHODS = ("magnitude", "taylor", "movement")
Scores = dict[str, torch.Tensor]  # by module name: one per head or neuron
Kept = dict[str, tuple[int, ...]]  # by module name: the heads or neurons that stay, ascending


class Gates(torch.nn.Module):
    """A factor for every head and neuron: 1 keeps it, 0 masks it.

    ``factors`` has a vector per module of `prunable_modules`; ``movement``, of the same shapes, is minus the sum of the
    gradients that `collect` has seen.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.names = []
        self.factors = torch.nn.ParameterList()
        self.movement = torch.nn.ParameterList()
        for kind, _, name, module in prunable_modules(model):
            size = module.n_heads if kind.endswith("heads") else module.wo.in_features
            self.names.append(name)
            self.factors.append(torch.nn.Parameter(torch.ones(size)))
            self.movement.append(torch.nn.Parameter(torch.zeros(size), requires_grad=False))

    def collect(self) -> None:
        """Subtract the gradients from ``movement`` and reset them."""
        for factor, movement in zip(self.factors, self.movement, strict=True):
            if factor.grad is not None:
                movement -= factor.grad
                factor.grad = None

    def close(self, kept: Mapping[str, tuple[int, ...]]) -> None:
        """Set the factors of kept heads and neurons, by module, to 1 and all others to 0."""
        if set(kept) != set(self.names):
            raise InputError(f"kept must hold a list for each of {len(self.names)} modules, got {sorted(kept)[:3]} ….")
        for name, factor in zip(self.names, self.factors, strict=True):
            if not all(0 <= index < len(factor) for index in kept[name]):
                raise InputError(f"kept[{name!r}] must hold indices of 0 … {len(factor) - 1}, got {kept[name]}.")
        with torch.no_grad():
            for name, factor in zip(self.names, self.factors, strict=True):
                factor.zero_()
                factor[list(kept[name])] = 1.0

    def kept(self) -> dict[str, tuple[int, ...]]:
        """The heads and neurons with a factor other than 0, by module."""
        return {
            name: tuple(factor.detach().nonzero().flatten().tolist())
            for name, factor in zip(self.names, self.factors, strict=True)
        }


@contextmanager
def gated(model: PreTrainedModel, gates: Gates) -> Iterator[None]:
    """Multiply every head and neuron of the model by its gate inside the ``with`` block.

    >>> from t5accel.models.random_init import random_t5
    >>> model = random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    >>> gates, ids = Gates(model), dict(input_ids=torch.tensor([[5, 1]]), decoder_input_ids=torch.tensor([[0, 7]]))
    >>> before = model(**ids).logits
    >>> with gated(model, gates):
    ...     unchanged = model(**ids).logits
    ...     gates.close({name: () for name in gates.names})
    ...     changed = model(**ids).logits
    >>> bool((unchanged == before).all()), bool((changed == before).all())
    (True, False)
    """
    hooks = []
    for (kind, _, _, module), factor in zip(prunable_modules(model), gates.factors, strict=True):
        attends = kind.endswith("heads")
        last = module.o if attends else module.wo
        hooks.append(last.register_forward_pre_hook(partial(_multiply, factor, model.config.d_kv if attends else 1)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _multiply(factor: torch.nn.Parameter, width: int, _: Any, args: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    return (args[0] * factor.repeat_interleave(width).to(args[0].dtype), *args[1:])


def magnitude(model: PreTrainedModel) -> Scores:
    """Score by the Euclidean norm of all weights that belong to a head or neuron."""
    scores, d_kv = {}, model.config.d_kv
    for kind, _, name, module in prunable_modules(model):
        attends = kind.endswith("heads")
        rows = ("q", "k", "v") if attends else ("wi", "wi_0", "wi_1")
        matrices = [getattr(module, row).weight for row in rows if hasattr(module, row)]
        matrices.append((module.o if attends else module.wo).weight.T)
        width = d_kv if attends else 1
        squares = sum(matrix.detach().float().square().sum(dim=1).unflatten(0, (-1, width)) for matrix in matrices)
        scores[name] = squares.sum(dim=1).sqrt().cpu()
    return scores


def taylor(
    model: PreTrainedModel, batches: Iterable[Batch], loss_of: Callable[[Batch], tuple[torch.Tensor, int]]
) -> Scores:
    """Score by the mean over batches of `|dL/dg|`, g a factor of `Gates`: to first order, the cost of removal.

    After Michel, Levy and Neubig (2019) and Molchanov et al. (2017). ``loss_of`` returns a batch's summed loss and its
    number of labels. Small batches tell more: within one, changes of opposite sign cancel.
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
        raise InputError("batches must hold at least one batch, got none.")
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
