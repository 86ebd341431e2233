"""Gates: a factor for every attention head and feed-forward neuron (1 keeps it, 0 masks it).

The gradient of the loss by a gate is, to first order, the effect of removing its head or neuron.
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
    """The gates of a model, all open (1) at first, by module in the order of `prunable_modules`.

    ``factors`` has a vector per module, one number for every head or neuron; ``movement``, of the same shapes, is minus
    the sum of the gradients that `collect` has seen.
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
        """Set the factors of kept heads and neurons, by module, to 1 and all others to 0.

        Raises ``InputError`` for an unknown module or an index out of range.
        """
        if set(kept) != set(self.names):
            raise InputError(f"kept must hold a list for each of {len(self.names)} modules, got {sorted(kept)[:3]} ….")
        factors = dict(zip(self.names, self.factors, strict=True))
        for name, factor in factors.items():
            if not all(0 <= index < len(factor) for index in kept[name]):
                raise InputError(f"kept[{name!r}] must hold indices of 0 … {len(factor) - 1}, got {kept[name]}.")
        with torch.no_grad():
            for name, factor in factors.items():
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
        hooks.append(last.register_forward_pre_hook(_Multiply(factor, model.config.d_kv if attends else 1)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Multiply:
    """Pre-hook of the output projection of an attention or feed-forward module."""

    def __init__(self, factor: torch.nn.Parameter, width: int):
        self.factor, self.width = factor, width

    def __call__(self, _: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        factor = self.factor.repeat_interleave(self.width) if self.width > 1 else self.factor
        return (args[0] * factor.to(args[0].dtype), *args[1:])
