"""OnnxT5's layout: encoder and head are graphs, the decoder is torch's, and together their logits are transformers'."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import PROGRAM, check_program, histories_of
from refused import refused
from test_encoder_cache import logits_of

from bench.baselines.layout_backends import HybridOnnxT5
from bench.baselines.layouts import export_layout
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.torch_eager import TorchEager
from t5accel.errors import ExportError, InputError, NotT5Error
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


def test_the_graphs_must_be_of_the_model(laid_out, tiny_t5, tmp_path: Path) -> None:
    changed = copy.deepcopy(tiny_t5())
    with torch.no_grad():
        changed.decoder.block[2].layer[2].DenseReluDense.wo.weight[3, 4] += 1
    for other in (tiny_t5("gated-untied"), tiny_t5(eos_token_id=7), changed):
        with pytest.raises(InputError, match="other weights"):
            HybridOnnxT5(laid_out("onnxt5"), other, settings=ONE_THREAD)
    folder, model = laid_out("onnxt5"), tiny_t5()
    refused(partial(HybridOnnxT5, folder), "model", None, "mini")
    refused(partial(HybridOnnxT5, folder), "model", torch.nn.Linear(1, 1), match="", error=NotT5Error)
    refused(partial(HybridOnnxT5, folder, model), "settings", "cpu", {"threads": 1})
    refused(partial(HybridOnnxT5, model=model), "folder", tmp_path, laid_out("whole"), match="layout|onnxt5",
            error=ExportError)  # fmt: skip
