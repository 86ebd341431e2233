"""Position-bias buckets and logit scale of T5, and where releases of transformers differ."""

from __future__ import annotations

import inspect
import math
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def relative_position_bucket(
    distance: np.ndarray, *, bidirectional: bool, buckets: int, max_distance: int
) -> np.ndarray:
    """T5's bucket, 0 … buckets - 1, for each distance (key position minus query position; int64, any shape).

    Half of the buckets hold one distance each; the others grow logarithmically up to ``max_distance``, and larger
    distances share the last one (Raffel et al. 2020, section 2.1).

    >>> distances = np.array([0, -3, -20, -500])
    >>> relative_position_bucket(distances, bidirectional=False, buckets=32, max_distance=128).tolist()
    [0, 3, 17, 31]
    """
    side = np.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        side, distance = (distance > 0) * buckets, np.abs(distance)
    else:
        distance = -np.minimum(distance, 0)
    exact = buckets // 2
    # In fp32, as transformers computes it: in fp64 a distance on the border of two buckets may fall into the other.
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact)) / np.float32(
        math.log(max_distance / exact)
    )
    far = np.minimum(exact + (ratio * np.float32(buckets - exact)).astype(np.int64), buckets - 1)
    return side + np.where(distance < exact, distance, far)


def logit_scale(model: PreTrainedModel) -> float:
    """Factor of the decoder's output before the head: d_model ** -0.5 or 1."""
    import transformers

    # transformers 4.57 scales where the head is tied to the embedding. In 5.x T5 has a setting, false for untied
    # checkpoints, which umT5 has from 5.24 on; mT5 never scales.
    config = model.config
    scales = config.tie_word_embeddings
    if int(transformers.__version__.split(".")[0]) >= 5:
        scales = config.model_type != "mt5" and getattr(config, "scale_decoder_outputs", scales)
    return config.d_model**-0.5 if scales else 1.0


@cache
def cache_name() -> str:
    """The KV cache's name among arguments and outputs of transformers' models: ``"cache"`` from 5.24 on."""
    from transformers import GenerationMixin

    names = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return "cache" if "cache" in names else "past_key_values"
