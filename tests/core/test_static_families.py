"""BART and its relatives on static buffers, by replays and in fewer bits; and T5's step has no more operators.

`test_families` compares their logits and tokens with transformers'.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from test_families import KINDS, LONGEST, VOCABULARY, ids_of, lively, reference, texts
from test_torch_static import SMALL, with_graphs
from torch.utils._python_dispatch import TorchDispatchMode

from t5accel import api
from t5accel.backends.torch_eager import TorchEager
from t5accel.backends.torch_static import TorchStatic
from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.token_constraints import special_tokens
from t5accel.models.families import BEYOND_T5, family_of_model
from t5accel.models.random_init import random_model, random_t5

__all__ = ["with_graphs"]  # a fixture
TOLERANCE = 2e-5


def prefixes(model: Any, length: int) -> np.ndarray:
    """(4, length) tokens, the start token first."""
    tokens = np.random.default_rng(1).integers(3, VOCABULARY - 3, (4, length))
    tokens[:, 0] = special_tokens(model)["decoder_start_token_id"]
    return tokens


def logits(model: Any, ids: np.ndarray, mask: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """transformers' of what follows each token, (B, T, V)."""
    source, kept, new = map(torch.as_tensor, (ids, mask, tokens))
    with torch.inference_mode():
        found = model(input_ids=source, attention_mask=kept, decoder_input_ids=new).logits
    return found.float().numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_a_replayed_step_and_encoder_give_transformers_tokens(kind: str, with_graphs) -> None:
    """In padded buckets that held longer texts before."""
    model = lively(kind)
    (ids, mask), end = ids_of(model), model.config.eos_token_id
    backend, rng = with_graphs(model, buckets=(16, 32)), np.random.default_rng(3)
    backend.encode(rng.integers(3, VOCABULARY - 3, (4, 15)), np.ones((4, 15), dtype=int))
    for options in ({}, dict(min_new_tokens=20, max_new_tokens=20)):
        expected = reference(model, ids, mask, **options)
        found = greedy(backend, ids, mask, **{"max_new_tokens": LONGEST, **options}).sequences
        assert texts(found, end) == texts(expected, end)
    assert len(backend._encoders) == 1 and backend.captured


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_bits_stay_near(kind: str) -> None:
    model = lively(kind)
    (ids, mask), tokens, half = ids_of(model), prefixes(model, 6), copy.deepcopy(model).bfloat16()
    backend = TorchStatic(half, buckets=SMALL)
    expected, rounded = (logits(one, ids, mask, tokens) for one in (model, half))
    found = backend.step(backend.new_state(backend.encode(ids, mask)), tokens[:, None])[:, 0]
    error, theirs = (np.linalg.norm(one - expected) / np.linalg.norm(expected) for one in (found, rounded))
    assert 0 < error < 1.5 * theirs + 0.01


@pytest.mark.parametrize(
    ("activation", "scaled"),
    [("gelu", True), ("gelu_new", False), ("relu", True), ("swish", False), ("gelu_fast", True)],
)
def test_options_of_configurations(activation: str, scaled: bool) -> None:
    sizes = dict(
        vocab_size=VOCABULARY, d_model=24, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=3, encoder_ffn_dim=20, decoder_ffn_dim=30, max_position_embeddings=40,
    )  # fmt: skip
    model = random_model(BEYOND_T5["mbart"], dict(sizes, activation_function=activation, scale_embedding=scaled))
    backend, tokens = TorchStatic(model, buckets=SMALL), prefixes(model, 5)
    found = backend.step(backend.new_state(backend.encode(*ids_of(model))), tokens[:, None])[:, 0]
    np.testing.assert_allclose(found, logits(model, *ids_of(model), tokens), atol=TOLERANCE)


def test_padding_in_what_the_decoder_reads() -> None:
    """M2M100 gives it no position of its own; the tokens behind it are numbered by how many there are in front."""
    model, tokens = lively("m2m_100"), prefixes(lively("m2m_100"), 6)
    tokens[:, 3] = model.config.pad_token_id
    ids, mask = ids_of(model)
    backend, eager = TorchStatic(model), TorchEager(model)
    singly = [[one.step(state, tokens[:, None, i : i + 1]) for i in range(6)]
              for one in (backend, eager) for state in [one.new_state(one.encode(ids, mask))]]  # fmt: skip
    np.testing.assert_allclose(*(np.concatenate(steps, axis=2) for steps in singly), atol=TOLERANCE)


# What T5 pays for the other families: nothing


class Operators(TorchDispatchMode):
    """Counts PyTorch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


STEP = {"t5": 109, "umt5": 115, "mt5": 113}  # as many as before the step knew other families


@pytest.mark.parametrize("kind", STEP)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_of_t5_asks_for_no_more_operators(kind: str, dtype: torch.dtype) -> None:
    sizes = dict(d_model=32, d_kv=8, d_ff=64, num_heads=4, num_layers=2, vocab_size=300)
    backend = TorchStatic(random_t5(sizes, kind=kind).to(dtype))
    buffers = backend.new_state(backend.encode(np.full((2, 5), 7), np.ones((2, 5), dtype=int))).buffers
    with torch.inference_mode(), Operators() as operators:
        backend.decoder.advance(buffers)
    assert sum(operators.asked.values()) == STEP[kind], operators.asked
    products = 6 if dtype == torch.float32 else operators.asked["addmm_"]
    assert operators.asked["addmm_"] == products and not operators.asked["layer_norm"]


# The door


@pytest.mark.parametrize("kind", KINDS)
def test_accelerate_captures_every_family_on_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it chooses, on a CPU that it takes for a GPU; the logits are compared on the way."""
    model = lively(kind)
    monkeypatch.setattr(api, "require_gpu", lambda: None)
    cast, compared = [], []
    monkeypatch.setattr("t5accel.models.load.cast_model", lambda *given: cast.append(given[1:]) or given[0])
    compare = api.compare_logits
    monkeypatch.setattr(api, "compare_logits", lambda *given, **said: compared.append(said) or compare(*given, **said))
    ours = api.accelerate(model, device="cuda")
    with monkeypatch.context() as patch:  # where TF32 is allowed
        patch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
        api.accelerate(model, device="cuda:0")
        patch.setattr(torch, "get_float32_matmul_precision", MagicMock(side_effect=RuntimeError))  # by newer names
        api.accelerate(model, device="cuda:0")
    assert cast == [("float32", "cuda:0")] * 3 and [said["tolerance"] for said in compared] == [1e-3, 0.05, 0.05]
    assert type(ours.backend) is TorchStatic
    assert family_of_model(ours.backend.model) is BEYOND_T5[kind.split(",")[0]]
    end, batch = model.config.eos_token_id, ids_of(model)
    assert texts(reference(ours, *batch), end) == texts(reference(model, *batch), end)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_captured_on_a_gpu(kind: str) -> None:
    model = lively(kind)
    batch, end = ids_of(model), model.config.eos_token_id
    ours = api.accelerate(copy.deepcopy(model), device="cuda")
    for _ in range(2):
        for beams in (1,) if "," in kind else (1, 3):  # some releases cannot search with two vocabularies
            assert texts(reference(ours, *batch, num_beams=beams), end) == texts(
                reference(model, *batch, num_beams=beams), end
            )
    assert ours.backend.captured
    halved = api.accelerate(copy.deepcopy(model), device="cuda", precision="bf16")
    given = map(torch.as_tensor, (*batch, prefixes(model, 4)))
    assert halved(*given).logits.isfinite().all()
