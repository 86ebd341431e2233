"""A factor for every attention head and every feed-forward neuron: 1 lets it through, 0 is as if it were not there.

The gradient of a loss by a factor tells, to first order, what leaving its head or neuron out would change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from t5accel.errors import InputError
from t5accel.models.pruned import prunable_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Gates(torch.nn.Module):
    """The factors of a model, all 1 at first, and what was gathered of their gradients.

    Attributes:
        names: of the attention and feed-forward modules, in the order of `narrow.parts`.
        factors: for each of them, one for every head or neuron.
        movement: the same shapes: minus the sum of all gradients that `collect` has seen.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.names, self.factors, movement = [], torch.nn.ParameterList(), []
        for kind, _, name, module in prunable_modules(model):
            size = module.n_heads if kind.endswith("heads") else module.wo.in_features
            self.names.append(name)
            self.factors.append(torch.nn.Parameter(torch.ones(size)))
            movement.append(torch.zeros(size))
        self.movement = torch.nn.ParameterList(torch.nn.Parameter(m, requires_grad=False) for m in movement)

    def collect(self) -> None:
        """Take the gradients since the last time into ``movement``, and forget them."""
        for factor, movement in zip(self.factors, self.movement, strict=True):
            if factor.grad is not None:
                movement -= factor.grad
                factor.grad = None

    def close(self, kept: Mapping[str, tuple[int, ...]]) -> None:
        """Set the factors to 1 for the heads and neurons that are kept, by module, and to 0 for the others.

        Raises ``InputError`` for modules that are none of the model's, or indices that are none of theirs.
        """
        if set(kept) != set(self.names):
            raise InputError(f"kept names {sorted(kept)[:3]} …; give a list for each of {len(self.names)} modules.")
        factors = dict(zip(self.names, self.factors, strict=True))
        for name, factor in factors.items():
            if not all(0 <= index < len(factor) for index in kept[name]):
                raise InputError(f"kept[{name!r}] is {kept[name]}; give indices of 0 … {len(factor) - 1}.")
        with torch.no_grad():
            for name, factor in factors.items():
                factor.zero_()
                factor[list(kept[name])] = 1.0

    def kept(self) -> dict[str, tuple[int, ...]]:
        """By module, the heads and neurons whose factor is not 0."""
        return {
            name: tuple(factor.detach().nonzero().flatten().tolist())
            for name, factor in zip(self.names, self.factors, strict=True)
        }


@contextmanager
def gated(model: PreTrainedModel, gates: Gates) -> Iterator[None]:
    """In the ``with`` block every head and neuron of the model is multiplied by its factor.

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
        hooks.append(last.register_forward_pre_hook(_Multiply(factor, model.config.d_kv if attends else 1)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Multiply:
    """A hook in front of the matrix that a head's or a neuron's result enters last."""

    def __init__(self, factor: torch.nn.Parameter, width: int):
        self.factor, self.width = factor, width

    def __call__(self, _: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        factor = self.factor.repeat_interleave(self.width) if self.width > 1 else self.factor
        return (args[0] * factor.to(args[0].dtype), *args[1:])
