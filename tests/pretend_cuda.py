"""Tensors that pretend to be on a GPU: host code that touches them without moving them fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda", 0)
_MOVES = (torch.Tensor.to, torch.Tensor.cuda)
_MIXES = (torch.Tensor.copy_, torch.Tensor.__getitem__, torch.Tensor.__setitem__)


class OnCuda(torch.Tensor):
    """A CPU tensor that names another device."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnCuda:
        found = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=CUDA)
        found.held = held
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func}: such tensors are for PretendCuda's block only")


class PretendCuda(TorchFunctionMode):
    """A context with a GPU: tensors made or moved there are `OnCuda`, and do not mix with others."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        there = any(isinstance(one, OnCuda) for one in tensors)
        if func == torch.Tensor.device.__get__:
            return CUDA if there else torch.device("cpu")
        if there and func in (torch.Tensor.numpy, torch.Tensor.__array__):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if func in _MOVES or func is torch.Tensor.cpu:
            return self._move(func, args, kwargs)
        if there and func not in _MIXES and not all(isinstance(one, OnCuda) for one in tensors if one.dim()):
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, cuda:0 and cpu are there")
        if kwargs.get("device") is not None:
            there = torch.device(kwargs["device"]).type == "cuda"
            kwargs["device"] = "cpu" if there else kwargs["device"]
        found = func(*tree_map(_held, args), **tree_map(_held, kwargs))
        if args and isinstance(args[0], OnCuda) and found is args[0].held:  # in place
            return args[0]
        return tree_map(_as_there, found) if there else found

    def _move(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        tensor, *rest = args
        there = isinstance(tensor, OnCuda) if func is torch.Tensor.to else func is torch.Tensor.cuda
        if func is not torch.Tensor.to:
            rest, kwargs = [], {}
        elif rest and isinstance(rest[0], torch.Tensor):
            rest = [rest[0].device, rest[0].dtype]
        if kwargs.get("device") is not None:
            rest = [kwargs.pop("device"), *rest]
        if rest and isinstance(rest[0], str | torch.device):
            there = torch.device(rest[0]).type == "cuda"
            rest[0] = "cpu" if there else rest[0]
        moved = _held(tensor).to(*rest, **kwargs) if rest or kwargs else _held(tensor)
        if moved is _held(tensor) and there == isinstance(tensor, OnCuda):
            return tensor
        return OnCuda(moved) if there else moved


def _as_there(one: Any) -> Any:
    return OnCuda(one) if isinstance(one, torch.Tensor) and not isinstance(one, OnCuda) else one


def _held(one: Any) -> Any:
    if isinstance(one, slice):
        return slice(_held(one.start), _held(one.stop), _held(one.step))
    return one.held if isinstance(one, OnCuda) else one
