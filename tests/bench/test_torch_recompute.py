"""Baselines on static buffers, without a cache and compiled: the tokens of the loop with a cache."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from refused import refused
from test_torch_static import SMALL, check_eager_tokens

from bench import systems
from bench.baselines.torch_recompute import TorchRecompute
from bench.profiling import kernels, operators, prices, step_feeds
from bench.systems import compile_steps
from t5accel.backends.ort_session import SessionSettings, open_session
from t5accel.backends.torch_eager import TorchEager
from t5accel.backends.torch_static import TorchStatic
from t5accel.decoding.greedy_search import greedy
from t5accel.graphs.contract import DECODER, decoder_spec
from t5accel.graphs.manifest import read_manifest
from t5accel.models.random_init import random_t5
from t5accel.parity import assert_varied


def test_it_gives_the_tokens_of_a_cache(tiny_t5, kind: str, padded_batch) -> None:
    model = tiny_t5(kind)
    expected = greedy(TorchEager(model), *padded_batch, min_new_tokens=24, max_new_tokens=24).sequences
    backend = TorchRecompute(model)
    assert_varied(expected)
    np.testing.assert_array_equal(backend.generate(*padded_batch, new_tokens=24), expected)
    other = padded_batch[0][::-1], padded_batch[1][::-1]  # the same memory again, for other texts
    np.testing.assert_array_equal(backend.generate(*other, new_tokens=24), expected[::-1])
    assert len(backend.texts) == 1
    np.testing.assert_array_equal(backend.generate(*padded_batch, new_tokens=1), expected[:, :1])


def test_a_token_that_came_later_would_show_and_bad_arguments_are_refused(tiny_t5, padded_batch) -> None:
    """Every step decodes all places, and must not attend to those beyond the present one."""
    model = tiny_t5()
    backend = TorchRecompute(model)
    expected = backend.generate(*padded_batch, new_tokens=12)
    begin = backend.begin

    def noisy(texts: Any) -> None:
        begin(texts)
        texts.tokens[:, 1:] = 77

    backend.begin = noisy
    np.testing.assert_array_equal(backend.generate(*padded_batch, new_tokens=12), expected)
    backend.begin = lambda texts: (begin(texts), texts.tokens.fill_(77))
    assert (backend.generate(*padded_batch, new_tokens=12) != expected).any()
    generate = TorchRecompute(tiny_t5()).generate
    refused(partial(generate, *padded_batch), "new_tokens", 0)
    refused(partial(generate, new_tokens=1), "input_ids", [1, 2])
    refused(partial(generate, new_tokens=1), "input_ids", [[5, 300]])  # on a GPU its lookup would end the process


@pytest.mark.parametrize("kind", ["deeper-decoder", "umt5"])
def test_the_step_is_one_graph_to_the_compiler(tiny_t5, kind: str, padded_batch, monkeypatch) -> None:
    """``fullgraph`` raises where a step would leave it. The compiler's own code is another's to test."""
    monkeypatch.setitem(systems.COMPILE, "backend", "eager")
    monkeypatch.delitem(systems.COMPILE, "options")
    torch._dynamo.reset()
    backend = compile_steps(TorchStatic(tiny_t5(kind), buckets=SMALL))
    check_eager_tokens(backend, tiny_t5(kind), padded_batch, min_new_tokens=20, max_new_tokens=20)


@pytest.mark.long
@pytest.mark.skipif(" " in torch.__file__, reason="torch gives the linker its own path without quotes")
def test_the_compiled_step_is_equal(tiny_t5, padded_batch) -> None:
    """By the compiler itself, for this processor."""
    torch._dynamo.reset()
    backend = compile_steps(TorchStatic(tiny_t5()))
    check_eager_tokens(backend, tiny_t5(), padded_batch, min_new_tokens=20, max_new_tokens=20)


def test_operators_of_a_step_and_what_a_layer_and_a_gate_add_are_counted_and_views_are_not(
    tiny_t5, padded_batch
) -> None:
    model = tiny_t5()
    layers = len(model.decoder.block)
    backend = TorchStatic(model)
    state = backend.new_state(backend.encode(*padded_batch))
    found = operators(lambda: backend.decoder.advance(state.buffers))
    assert not {name for name in found if "transpose" in name or "view" in name or "expand" in name}
    assert found["aten.mm"] == 3 * layers + 1 and found["aten.addmm_"] == 3 * layers  # 6 products a layer, and the head
    assert sum(count for name, count in found.items() if "attention" in name) == 2 * layers
    assert found["aten.argmax"] == 1 and found["aten.scatter_"] == layers + 1
    assert found["aten.rms_norm"] == 3 * layers + 1 and not found["aten.pow"]

    # The gate's product joins the other one; transformers' own GELU would be eight operators.
    def count(**sizes: Any) -> int:
        model = random_t5(dict(d_model=32, d_kv=8, d_ff=64, num_heads=4, num_layers=2, vocab_size=300) | sizes)
        backend = TorchStatic(model)
        buffers = backend.new_state(backend.encode(*padded_batch)).buffers
        return operators(lambda: backend.decoder.advance(buffers)).total()

    assert count(num_layers=3) - count() == count() - count(num_layers=1) == 13
    assert count(feed_forward_proj="gated-gelu") - count(feed_forward_proj="relu") == 2


@pytest.mark.gpu
def test_kernels_and_prices_on_a_gpu(tiny_t5, padded_batch) -> None:
    backend = TorchStatic(tiny_t5().cuda())
    buffers = backend.new_state(backend.encode(*padded_batch)).buffers
    assert kernels(lambda: backend.decoder.advance(buffers)).total() > 20
    found = prices(torch.device("cuda", 0), count=100, repeats=3)
    assert 0 < found.replayed_s < found.launch_s < 1e-3 and found.bytes_per_s > 1e10


def test_feeds_of_a_step_are_those_of_the_contract(exported, kind: str) -> None:
    dims = read_manifest(exported(kind)).dims
    feeds = step_feeds(dims, batch=2, rows=3, past=0, new=2, source=5)
    sizes = dict(B=2, K=3, P=0, T=2, S=5)
    assert {name: (array.dtype.name, array.shape) for name, array in feeds.items()} == {
        tensor.name: (tensor.dtype, tuple(sizes.get(size, size) for size in tensor.shape))
        for tensor in decoder_spec(dims).inputs
    }
    logits = open_session(exported(kind) / DECODER, SessionSettings(threads=1)).run(["logits"], feeds)[0]
    assert logits.shape == (2, 3, 2, 300) and np.isfinite(logits).all()
    for name in ("batch", "rows", "past", "new", "source"):
        refused(partial(step_feeds, dims), name, -1, 1.5, "3", None)
