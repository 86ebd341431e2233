"""What the graphs are built from: a checkpoint's weights as numpy arrays, its sizes and what else shapes a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from t5accel.errors import NotT5Error
from t5accel.models.families import Family
from t5accel.models.sizes import T5Dims
from t5accel.models.t5 import T5


@dataclass(frozen=True)
class T5Weights:
    """What the graphs are built from. Models of other families are here under T5's names (`export.weights`).

    Attributes:
        arrays: by transformers' names (``decoder.block.0.layer.1.EncDecAttention.q.weight`` …), fp32.
        dims: the sizes.
        activation: ``"relu"``, ``"gelu_new"``, ``"gelu"`` or ``"silu"``.
        norm_epsilon: of every layer norm.
        buckets, max_distance: of the relative position biases.
        logit_scale: what the decoder's output is multiplied by before the head.
        pruned_heads: for decoder and encoder layers that lost heads, which: ``{"decoder.0": (1, 5)}``.
        family: how the weights are put together.
        embedding_scale: of the embedded tokens, before their positions are added.
        pad_token_id: the token that has no position, where the family says so.
        encoder_d_kv: where it is another than the decoder's.
        read: names of the arrays that a graph was built from so far.
    """

    arrays: Mapping[str, np.ndarray]
    dims: T5Dims
    activation: str
    norm_epsilon: float
    buckets: int
    max_distance: int
    logit_scale: float
    pruned_heads: Mapping[str, tuple[int, ...]]
    family: Family = T5
    embedding_scale: float = 1.0
    pad_token_id: int = 0
    encoder_d_kv: int | None = None
    read: set[str] = field(default_factory=set, compare=False)

    @property
    def head(self) -> str:
        """The name of the output head's weight (V, d_model), which is the embedding where the two are tied."""
        return "shared.weight" if self.dims.tied else "lm_head.weight"

    @property
    def head_bias(self) -> str | None:
        """The name of what is added to the logits (V,), if anything is."""
        return "final_logits_bias" if "final_logits_bias" in self.arrays else None

    def array(self, name: str) -> np.ndarray:
        """The weight of that name; raises ``NotT5Error`` if the model lacks it.

        >>> dims = T5Dims(300, 8, 6, (2,), (2,), (2,), (16,), (16,), gated=False, tied=True)
        >>> arrays = {"shared.weight": np.zeros((300, 8), dtype=np.float32)}
        >>> T5Weights(arrays, dims, "relu", 1e-6, 32, 128, 1.0, {}).array("shared.weight").shape
        (300, 8)
        """
        if name not in self.arrays:
            raise NotT5Error(
                f"There is no weight {name}: unwrap the model, merge its adapters, or load it without quantisation."
            )
        self.read.add(name)
        return self.arrays[name]

    def require_all_read(self) -> None:
        """Raise ``NotT5Error`` if there are weights that no graph was built from.

        >>> dims = T5Dims(300, 8, 6, (2,), (2,), (2,), (16,), (16,), gated=False, tied=True)
        >>> T5Weights({"lm_head.bias": np.zeros(300)}, dims, "relu", 1e-6, 32, 128, 1.0, {}).require_all_read()
        Traceback (most recent call last):
        t5accel.errors.NotT5Error: The model computes with lm_head.bias, which this architecture does not have: ...
        """
        if unread := sorted(self.arrays.keys() - self.read):
            more = f" and {len(unread) - 1} more weights" if len(unread) > 1 else ""
            raise NotT5Error(
                f"The model computes with {unread[0]}{more}, which this architecture does not have: merge adapters "
                "into the model, or remove them, first."
            )

    def bias(self, weight: str) -> str | None:
        """The name of the bias that belongs to a weight, if there is one."""
        name = f"{weight.removesuffix('weight')}bias"
        return name if name in self.arrays else None

    def d_kv(self, weight: str) -> int:
        """The width of the heads that this weight projects to."""
        own = self.encoder_d_kv if weight.startswith("encoder.") else None
        return own or self.dims.d_kv
