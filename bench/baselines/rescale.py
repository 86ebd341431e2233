"""Scale a T5's residual stream without changing its answers, to numbers beyond fp16."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

from t5accel.checks import is_number
from t5accel.errors import InputError
from t5accel.models.sizes import T5Dims

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def scale_residual_stream(model: PreTrainedModel, factor: float = 256.0) -> PreTrainedModel:
    """A copy whose residual streams are ``factor`` times as large, and which computes the same.

    What enters the stream is multiplied: the embedding, and the weights by which attention (``o``) and feed-forward
    (``wo``) end. Every norm divides by the size of the stream, so all between stays as it is; where the embedding also
    is the head, the decoder's last norm takes the factor out again. With a power of two not even the rounding changes,
    but for the tiny number that norms add.

    >>> import torch
    >>> from t5accel.models.random_init import random_t5
    >>> own = random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    >>> ids = dict(input_ids=torch.tensor([[5, 6, 1]]), decoder_input_ids=torch.tensor([[0, 7]]))
    >>> with torch.inference_mode():
    ...     torch.allclose(own(**ids).logits, scale_residual_stream(own)(**ids).logits, rtol=1e-4, atol=1e-4)
    True
    """
    import torch

    if not is_number(factor) or not 0 < factor < math.inf:
        raise InputError(f"factor must be a number above 0, best a power of two, got {factor!r}.")
    dims = T5Dims.of(model)
    larger = copy.deepcopy(model)
    ends = (".o.weight", ".wo.weight", "embed_tokens.weight")
    with torch.no_grad():
        for name, weight in larger.named_parameters():  # tied ones once, as shared.weight
            if name == "shared.weight" or name.endswith(ends):
                weight *= factor
        if dims.tied:
            larger.decoder.final_layer_norm.weight /= factor
    return larger
