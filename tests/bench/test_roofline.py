"""The roofline, checked by hand."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from refused import refused

from bench.roofline import decoder_weights_per_step, step_roofline
from t5accel.models.sizes import T5Dims


def dims(layers=6, **changes) -> SimpleNamespace:
    """t5-small, unless told otherwise."""
    sizes = {"d_model": 512, "d_kv": 64, "vocab_size": 32128, "gated": False, "tied": True}
    per_layer = {"decoder_heads": (8,) * layers, "cross_heads": (8,) * layers, "decoder_ff": (2048,) * layers}
    return SimpleNamespace(**(sizes | per_layer | changes))


def test_t5_small_by_hand_and_a_batch_that_shares_the_weights():
    layer = 4 * 512 * 512 + 2 * 512 * 512 + 2 * 512 * 2048 + 3 * 512
    assert decoder_weights_per_step(dims()) == 6 * layer + 512 + 32128 * 512
    step = step_roofline(dims(), bandwidth=60e9, gemm=214e9, source_tokens=64, position=32)
    assert step.weight_bytes == pytest.approx(154e6, rel=1e-3)
    assert step.bytes_per_step - step.weight_bytes == 6 * 2 * 8 * 64 * (64 + 32) * 4
    assert step.flops_per_step == 2 * (6 * layer + 512 + 32128 * 512) + 6 * 8 * (64 + 32) * (2 * 64 + 2 * 64)
    assert step.bound == "bandwidth" and step.floor_s == step.read_s
    one, many = (step_roofline(dims(), batch=batch, bandwidth=60e9, gemm=214e9) for batch in (1, 64))
    assert many.weight_bytes == one.weight_bytes and many.flops_per_step == 64 * one.flops_per_step
    assert (one.bound, many.bound) == ("bandwidth", "compute")
    assert many.floor_s == many.compute_s > many.read_s


def test_the_count_equals_the_weights_of_a_real_decoder():
    config = transformers.T5Config(
        vocab_size=96, d_model=24, d_kv=10, d_ff=40, num_layers=1, num_decoder_layers=3, num_heads=2,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(config)
    left_out = ("embed_tokens", "relative_attention_bias", "EncDecAttention.k", "EncDecAttention.v")
    counted = [w.numel() for name, w in model.decoder.named_parameters() if not any(part in name for part in left_out)]
    assert decoder_weights_per_step(T5Dims.of(model)) == sum(counted) + model.lm_head.weight.numel()


def test_pruned_layers_count_what_they_kept():
    full = decoder_weights_per_step(dims(2))
    pruned = dims(2, decoder_heads=(8, 5), cross_heads=(6, 8), decoder_ff=(2048, 1000))
    assert full - decoder_weights_per_step(pruned) == 512 * (3 * 64 * 4 + 2 * 64 * 2 + 1048 * 2)
    assert decoder_weights_per_step(dims(2, gated=True)) - full == 2 * 512 * 2048
    call = partial(step_roofline, dims(), bandwidth=1, gemm=1)
    refused(call, "precision", "fp8")
    for name, value in (("batch", 0), ("position", 1.5), ("bandwidth", 0), ("gemm", math.nan)):
        refused(call, name, value)


@pytest.mark.parametrize(
    ("precision", "weight", "cache"),
    [("fp32", 4.0, 4), ("fp16", 2.0, 2), ("bf16", 2.0, 2), ("int8", 1.0, 4), ("int4", 0.5, 4)],
)
def test_bytes_of_a_precision_with_and_without_a_shortlist(precision: str, weight: float, cache: int) -> None:
    whole, shortlist = (
        step_roofline(dims(), precision, bandwidth=1, gemm=1, shortlist=wanted) for wanted in (False, True)
    )
    assert whole.weight_bytes == decoder_weights_per_step(dims()) * weight
    assert whole.bytes_per_step - whole.weight_bytes == 2 * 6 * 8 * 64 * (64 + 32) * cache
    saved = max(0, 32128 * 512 * (weight - 1) - 4 * 32128)
    assert whole.weight_bytes - shortlist.weight_bytes == saved and (saved > 0) == (weight > 1)
