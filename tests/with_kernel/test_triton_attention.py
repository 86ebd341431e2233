"""Our attention kernel, interpreted on the CPU and compiled for GPUs that are not here: `make test-kernel`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch.nn import functional
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.baselines import triton_attention
from bench.baselines.triton_attention import TorchTriton
from t5accel.backends.torch_eager import TorchEager
from t5accel.decoding.beam import beam_search
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import InputError
from t5accel.models.random_init import random_t5
from t5accel.parity import assert_close, assert_varied

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="compiled in this process: TRITON_INTERPRET is not 1")
compiled = pytest.mark.skipif(INTERPRETED, reason="interpreted in this process: TRITON_INTERPRET is 1")
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}


def exact(query: Any, memory: Any, bias: Any) -> Any:
    """PyTorch's attention in fp32: (N, H, n, d)."""
    query, bias = query.float(), bias.float()
    return functional.scaled_dot_product_attention(query, *memory.float(), attn_mask=bias, scale=1.0)


@interpreted
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("width", [64, 150])
def test_self_attention_writes_its_position_and_reads_the_real_ones(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    heads, d, max_distance = 3, 16, 40
    lengths = torch.tensor([0, 1, 63, width - 1])
    rows = len(lengths)
    memory, projected = torch.randn(2, rows, heads, width, d).to(dtype), torch.randn(rows, 3, heads, d).to(dtype)
    biases = torch.randn(heads, max_distance + 2).to(dtype)
    biases[:, 0] = torch.finfo(dtype).min
    expected = memory.clone()
    expected[:, torch.arange(rows), :, lengths] = projected[:, 1:].transpose(1, 0).transpose(0, 1)
    distance = (lengths[:, None] - (torch.arange(width) - 1)).clamp(0, max_distance + 1)
    attended = exact(projected[:, 0, :, None], expected, biases[:, distance].transpose(0, 1)[:, :, None])
    for row, length in enumerate(lengths):
        memory[:, row, :, length:] = float("nan")  # not even multiplied by 0
    out = triton_attention.self_attention(projected, memory, lengths, biases)
    assert_close(out.float().numpy(), attended[:, :, 0].flatten(1).numpy(), atol=CLOSE[dtype])
    for row, length in enumerate(lengths):
        assert torch.equal(memory[:, row, :, length], expected[:, row, :, length])
        assert memory[:, row, :, length + 1 :].isnan().all(), "nothing else is written"


@interpreted
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("rows", [1, 3])
def test_cross_attention_of_rows_that_share_a_source(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(1)
    batch, heads, source, d = 2, 3, 77, 16
    memory, query = torch.randn(2, batch, heads, source, d).to(dtype), torch.randn(batch * rows, heads, d).to(dtype)
    bias = torch.zeros(batch, 1, 1, source, dtype=dtype)
    bias[0, ..., 50:] = torch.finfo(dtype).min
    expected = exact(query.view(batch, rows, heads, d).transpose(1, 2), memory, bias).transpose(1, 2)
    out = triton_attention.cross_attention(query, memory, bias)
    assert_close(out.float().numpy(), expected.reshape(batch * rows, -1).numpy(), atol=CLOSE[dtype])
    memory[:, 0, :, 60:] *= 100
    again = triton_attention.cross_attention(query, memory, bias)
    assert torch.equal(again, out), "masked positions have no weight"


@interpreted
@pytest.mark.parametrize("kind", ["t5", "umt5"])
def test_decoding_with_it_gives_eager_tokens(kind: str) -> None:
    model = random_t5(dict(d_model=32, d_kv=8, d_ff=64, num_heads=4, num_layers=2, vocab_size=300), kind=kind)
    ids, mask = np.random.default_rng(0).integers(3, 300, (2, 9)), np.array([[1] * 9, [1] * 5 + [0] * 4])
    ours, eager = TorchTriton(model, buckets=(4, 16)), TorchEager(model)
    for search in (greedy, lambda *arguments, **options: beam_search(*arguments, num_beams=2, **options)):
        length = dict(min_new_tokens=9, max_new_tokens=9)
        expected, found = (search(one, ids, mask, **length).sequences for one in (eager, ours))
        assert_varied(expected)
        np.testing.assert_array_equal(found, expected)


def test_heads_that_are_no_power_of_two_are_refused() -> None:
    model = random_t5(dict(d_model=12, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    with pytest.raises(InputError, match="d_kv"):
        TorchTriton(model)


@compiled
@pytest.mark.parametrize("capability", [75, 80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_it_compiles_for_gpus_that_are_not_here(capability: int, dtype: str) -> None:
    tensors = {
        triton_attention._self_attention_kernel: ("projected", "keys", "values", "biases", "out"),
        triton_attention._cross_attention_kernel: ("queries", "keys", "values", "bias", "out"),
    }
    for kernel, floats in tensors.items():
        known = dict.fromkeys(floats, f"*{dtype}") | {"lengths": "*i64", "d": "constexpr", "block": "constexpr"}
        signature = {name: known.get(name, "i32") for name in kernel.arg_names}
        source = ASTSource(kernel, signature=signature, constexprs={"d": 64, "block": triton_attention.BLOCK})
        if (capability, dtype) == (75, "bf16"):
            continue  # such cards have none, and the suite leaves it out there
        assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
