"""T5 models whose layers have different numbers of heads and neurons, as pruning produces.

A pruned model is transformers' own class with smaller matrices, its sizes saved in the configuration as
``layer_widths``: transformers has one number of heads for all layers, and since 5.x prunes none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from t5accel.checks import as_count
from t5accel.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# In the configuration, for each layer of a stack: heads, heads of cross-attention, neurons of the feed-forward part.
KINDS = ("encoder_heads", "decoder_heads", "cross_heads", "encoder_ff", "decoder_ff")
Widths = Mapping[str, Sequence[int]]


def prunable_modules(model: PreTrainedModel) -> Iterator[tuple[str, int, str, Any]]:
    """Yield every attention and feed-forward module as (kind of `KINDS`, layer, name, module)."""
    for stack_name in ("encoder", "decoder"):
        for layer, block in enumerate(getattr(model, stack_name).block):
            prefix = f"{stack_name}.block.{layer}.layer"
            yield f"{stack_name}_heads", layer, f"{prefix}.0.SelfAttention", block.layer[0].SelfAttention
            if stack_name == "decoder":
                yield "cross_heads", layer, f"{prefix}.1.EncDecAttention", block.layer[1].EncDecAttention
            last = len(block.layer) - 1
            yield f"{stack_name}_ff", layer, f"{prefix}.{last}.DenseReluDense", block.layer[last].DenseReluDense


def layer_widths(model: PreTrainedModel) -> dict[str, list[int]]:
    """The numbers of heads and neurons of each layer, read off the weights.

    >>> from t5accel.models.random_init import random_t5
    >>> layer_widths(random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=2, vocab_size=9)))["decoder_ff"]
    [16, 16]
    """
    found: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for kind, _, _, module in prunable_modules(model):
        attends = kind.endswith("heads")
        found[kind].append(module.q.out_features // model.config.d_kv if attends else module.wo.in_features)
    return found


def resize(model: PreTrainedModel, sizes: Widths) -> None:
    """Give every layer new, uninitialised matrices of these sizes, in place.

    Raises ``InputError`` for a missing kind, a wrong number of layers or a size below 1.
    """
    # Each self-attention layer gets its own position biases: the first layer's, which transformers shares, fit no other
    # number of heads.
    import torch

    _check(model, sizes)
    d_kv, d_model, buckets = model.config.d_kv, model.config.d_model, model.config.relative_attention_num_buckets
    for kind, layer, _, module in prunable_modules(model):
        size = sizes[kind][layer]
        like = next(module.parameters())
        options = dict(device=like.device, dtype=like.dtype)
        if kind.endswith("ff"):
            for name in ("wi", "wi_0", "wi_1"):
                if hasattr(module, name):
                    setattr(module, name, torch.nn.Linear(d_model, size, bias=False, **options))
            module.wo = torch.nn.Linear(size, d_model, bias=False, **options)
            continue
        for name in ("q", "k", "v"):
            setattr(module, name, torch.nn.Linear(d_model, size * d_kv, bias=False, **options))
        module.o = torch.nn.Linear(size * d_kv, d_model, bias=False, **options)
        module.n_heads, module.inner_dim = size, size * d_kv
        if hasattr(module, "pruned_heads"):  # transformers 4; the new biases are those of the heads that are there
            module.pruned_heads = set()
        if kind != "cross_heads":
            module.has_relative_attention_bias = True
            module.relative_attention_bias = torch.nn.Embedding(buckets, size, **options)
        if not any(hook is _own_bias for hook in module._forward_pre_hooks.values()):
            module.register_forward_pre_hook(_own_bias, with_kwargs=True)
    model.config.layer_widths = {kind: list(sizes[kind]) for kind in KINDS}


def load_pruned(model_class: type[PreTrainedModel], where: str, **options: Any) -> Any:
    """``model_class.from_pretrained`` for a checkpoint whose configuration has ``layer_widths``."""

    class Narrow(model_class):
        def __init__(self, config: Any, *args: Any, **kwargs: Any):
            super().__init__(config, *args, **kwargs)
            resize(self, config.layer_widths)

    # transformers finds some settings by the name of the class, and writes it to the configuration.
    Narrow.__name__, Narrow.__module__ = model_class.__name__, model_class.__module__
    loaded = Narrow.from_pretrained(where, **options)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    model.__class__ = model_class
    return loaded


def _own_bias(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Drop the shared position biases, so that the layer adds its own (and the mask, passed separately)."""
    return args, {**kwargs, "position_bias": None} if "position_bias" in kwargs else kwargs


def _check(model: PreTrainedModel, sizes: Widths) -> None:
    now = layer_widths(model)
    if not isinstance(sizes, Mapping) or set(sizes) != set(KINDS):
        raise InputError(f"layer_widths must hold a list for each of {', '.join(KINDS)}, got {sizes!r:.200}.")
    for kind, there in sizes.items():
        if not isinstance(there, list | tuple) or len(there) != len(now[kind]):
            raise InputError(f"layer_widths[{kind!r}] must be {len(now[kind])} integers of 1 or more, got {there!r}.")
        for layer, size in enumerate(there):
            as_count(size, f"layer_widths[{kind!r}][{layer}]", at_least=1)
