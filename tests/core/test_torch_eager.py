"""`TorchEager`: its logits are transformers' own, after any mixture of steps, rollbacks and reorderings."""

from __future__ import annotations

import copy
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from programs import ATOL
from refused import refused
from torch.overrides import TorchFunctionMode

from t5accel.backends.torch_eager import TorchEager
from t5accel.errors import NotT5Error
from t5accel.parity import assert_close

cached_and_not = pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "uncached"])


# Logits under teacher forcing


@cached_and_not
def test_the_encoder_runs_once(tiny_t5, padded_batch, use_cache: bool) -> None:
    model = tiny_t5()
    calls: list[int] = []
    hook = model.encoder.register_forward_hook(lambda *_: calls.append(1))
    try:
        backend = TorchEager(model, use_cache=use_cache)
        state = backend.new_state(backend.encode(*padded_batch), 2)
        for _ in range(3):
            backend.step(state, np.full((6, 2, 1), 5))
    finally:
        hook.remove()
    assert len(calls) == 1


def test_bfloat16_gives_float32_logits(tiny_t5, padded_batch) -> None:
    backend = TorchEager(copy.deepcopy(tiny_t5()).to(torch.bfloat16))
    assert backend.step(backend.new_state(backend.encode(*padded_batch)), np.full((6, 1, 1), 5)).dtype == np.float32


# Bad input


def test_no_model(tiny_t5) -> None:
    from transformers import T5Config, T5EncoderModel, T5Model

    config = T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_heads=2, num_layers=1)
    refused(TorchEager, "model", None, "mini", 5)
    refused(TorchEager, "model", torch.nn.Linear(1, 1), error=NotT5Error)
    headless = (T5EncoderModel(config), T5Model(config))
    refused(TorchEager, "model", *headless, match="ForConditionalGeneration", error=NotT5Error)
    for name in ("eos_token_id", "decoder_start_token_id"):
        model = copy.deepcopy(tiny_t5())
        setattr(model.config, name, None)
        setattr(model.generation_config, name, None)
        refused(TorchEager, "model", model, match=f"model.config.{name}")


class FailsAt(TorchFunctionMode):
    """The call into torch with this number fails, counted from 0."""

    def __init__(self, number: int):
        super().__init__()
        self.left = number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == -1:
            raise MemoryError
        return func(*args, **(kwargs or {}))


@cached_and_not
def test_a_failure_on_the_way_leaves_the_state_as_it_was(tiny_t5, padded_batch, use_cache: bool) -> None:
    """A failure of any call into torch, or of every 11th in a step."""
    new = np.random.default_rng(8).integers(3, 300, (6, 2, 3))
    calls = [
        ("step", new),
        ("rollback", np.arange(12).reshape(6, 2) % 4),
        ("step", new[:, :, :1]),
        ("step", new),
        ("rollback", np.full((6, 2), 1)),
        ("reorder", np.array([[1, 1]] * 6)),
        ("select_sources", np.array([4, 0])),
    ]
    backend = TorchEager(tiny_t5(), use_cache=use_cache)
    undisturbed, state = (backend.new_state(backend.encode(*padded_batch), 2) for _ in range(2))
    for method, argument in calls:
        getattr(backend, method)(undisturbed, argument)
        for number in count(0, 11 if method == "step" else 1):
            try:
                with FailsAt(number):
                    getattr(backend, method)(state, argument)
            except MemoryError:
                continue
            break
        assert number, f"nothing of {method} failed"
    assert_close(backend.step(state, new[:2]), backend.step(undisturbed, new[:2]), atol=ATOL)
