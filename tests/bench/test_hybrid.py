"""OnnxT5's layout: encoder and head are graphs, the decoder is torch's, and together their logits are transformers'."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import PROGRAM, check_program, histories_of
from test_encoder_cache import logits_of

from bench.baselines.layout_backends import HybridOnnxT5
from bench.baselines.layout_graphs import LM_HEAD
from bench.baselines.layouts import export_layout
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.torch_eager import TorchEager
from t5accel.errors import ExportError, InputError, NotT5Error
from t5accel.graphs.contract import ENCODER
from t5accel.parity import assert_close

ONE_THREAD = SessionSettings(threads=1)


@pytest.fixture
def own(laid_out, tiny_t5) -> HybridOnnxT5:
    """A backend that the test may patch."""
    return HybridOnnxT5(laid_out("onnxt5"), copy.deepcopy(tiny_t5()), settings=ONE_THREAD)


def test_the_program_on_a_pruned_model(tiny_t5, padded_batch, tmp_path: Path) -> None:
    pruned = copy.deepcopy(tiny_t5())
    attention = [pruned.encoder.block[1].layer[0].SelfAttention, pruned.decoder.block[1].layer[0].SelfAttention]
    if not hasattr(attention[0], "prune_heads"):
        pytest.skip("transformers 5.x prunes no heads, and its decoder knows no layers of unequal heads")
    for module in attention:
        module.prune_heads({0, 2})
    export_layout(pruned, tmp_path / "pruned", "onnxt5")
    backend = HybridOnnxT5(tmp_path / "pruned", pruned, settings=ONE_THREAD)
    assert backend.description.dims.decoder_heads == (4, 2, 4)
    check_program(backend, pruned, *padded_batch, 3, PROGRAM)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_smaller_type_gives_float32_logits(tiny_t5, padded_batch, tmp_path: Path, dtype: torch.dtype) -> None:
    model = copy.deepcopy(tiny_t5()).to(dtype)
    export_layout(model, tmp_path / "small", "onnxt5")
    backend = HybridOnnxT5(tmp_path / "small", model, settings=ONE_THREAD)
    logits = logits_of(backend, padded_batch)
    assert logits.dtype == np.float32 and backend.encode(*padded_batch).hidden.dtype == dtype
    assert_close(logits, logits_of(TorchEager(tiny_t5()), padded_batch), atol=0.2)  # their standard deviation is 1


def test_what_runs_where(own, padded_batch, monkeypatch) -> None:
    """torch's own encoder and head are not called."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("this part is a graph")

    monkeypatch.setattr(own.model.encoder, "forward", fail)
    monkeypatch.setattr(own.model.lm_head, "forward", fail)
    state = own.new_state(own.encode(*padded_batch))
    own.step(state, histories_of(6, 1, 3))
    monkeypatch.setattr(own.model.decoder, "forward", fail)
    with pytest.raises(AssertionError, match="this part is a graph"):
        own.step(state, histories_of(6, 1, 3))


# Broken ones are caught


def no_past_mask(backend: HybridOnnxT5) -> dict[str, Callable[..., Any]]:
    def run_decoder(state: Any, tokens: Any, past_mask: Any, count: int) -> np.ndarray:
        return HybridOnnxT5._run_decoder(backend, state, tokens, None, count)

    return {"_run_decoder": run_decoder}


def forgotten_past(backend: HybridOnnxT5) -> dict[str, Callable[..., Any]]:
    def run_decoder(state: Any, *arguments: Any) -> np.ndarray:
        logits = HybridOnnxT5._run_decoder(backend, state, *arguments)
        for layer in state.cache.self_attention_cache.layers:
            layer.values = torch.zeros_like(layer.values)
        return logits

    return {"_run_decoder": run_decoder}


def positions_in_another_order(backend: HybridOnnxT5) -> dict[str, Callable[..., Any]]:
    """The encoder's output is another one."""
    return {"_run_encoder": lambda ids, mask: HybridOnnxT5._run_encoder(backend, ids, mask).flip(-1)}


BROKEN: dict[str, Callable[[HybridOnnxT5], dict[str, Callable[..., Any]]]] = {
    "no mask of the past": no_past_mask,
    "a forgotten past": forgotten_past,
    "another encoder": positions_in_another_order,
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_backend_is_caught(own, tiny_t5, padded_batch, broken: str) -> None:
    check_program(own, tiny_t5(), *padded_batch, 3, PROGRAM)
    vars(own).update(BROKEN[broken](own))
    with pytest.raises(AssertionError, match="not close"):
        check_program(own, tiny_t5(), *padded_batch, 3, PROGRAM)


# Bad input


def test_the_graphs_have_to_be_the_models(laid_out, tiny_t5) -> None:
    for other in (tiny_t5("gated-untied"), tiny_t5(seed=2), tiny_t5(eos_token_id=7)):
        with pytest.raises(InputError, match="other weights"):
            HybridOnnxT5(laid_out("onnxt5"), other, settings=ONE_THREAD)
    changed = copy.deepcopy(tiny_t5())
    HybridOnnxT5(laid_out("onnxt5"), changed, settings=ONE_THREAD)
    with torch.no_grad():
        changed.decoder.block[2].layer[2].DenseReluDense.wo.weight[3, 4] += 1
    with pytest.raises(InputError, match="export_layout"):
        HybridOnnxT5(laid_out("onnxt5"), changed, settings=ONE_THREAD)


def test_no_model_no_folder_and_no_settings(laid_out, tiny_t5, tmp_path: Path) -> None:
    for error, match, folder, model, options in (
        (NotT5Error, "", laid_out("onnxt5"), torch.nn.Linear(1, 1), {}),
        *((InputError, "^model must be", laid_out("onnxt5"), model, {}) for model in (None, "mini")),
        (ExportError, "holds no whole layout", tmp_path, tiny_t5(), {}),
        (ExportError, "'whole'.*onnxt5", laid_out("whole"), tiny_t5(), {}),
        (InputError, "SessionSettings", laid_out("onnxt5"), tiny_t5(), dict(settings="cpu")),
        (InputError, "SessionSettings", laid_out("onnxt5"), tiny_t5(), dict(settings={"threads": 1})),
    ):
        with pytest.raises(error, match=match):
            HybridOnnxT5(folder, model, **options)


def test_the_graphs_are_those_of_the_settings(laid_out, tiny_t5, padded_batch) -> None:
    backend = HybridOnnxT5(laid_out("onnxt5"), tiny_t5(), settings=SessionSettings(threads=2, spinning=False))
    assert backend.sessions.keys() == {ENCODER, LM_HEAD}
    assert all(session.get_session_options().intra_op_num_threads == 2 for session in backend.sessions.values())
