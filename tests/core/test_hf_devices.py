"""Tensors of a GPU given to an accelerated model, masks, prefixes, processors and all; tokens come out where ids lie.

Without a GPU, tensors only say that they are on one (`pretend_cuda`): what touches them without moving them fails.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from pretend_cuda import CUDA, PretendCuda
from silence import quiet
from test_hf import LOOKUP, MODES, SHORT, decoder_ids, reference
from transformers import LogitsProcessor, LogitsProcessorList

from t5accel.api import accelerate
from t5accel.backends.hf_generate import AcceleratedT5
from t5accel.backends.torch_eager import TorchEager
from t5accel.errors import InputError
from t5accel.parity import assert_close, assert_varied


@pytest.fixture(scope="module")
def batch(padded_batch) -> dict[str, torch.Tensor]:
    ids, mask = padded_batch
    return {"input_ids": torch.as_tensor(ids), "attention_mask": torch.as_tensor(mask)}


class FarAway:
    """A backend that says it is on a GPU; arrays go in and out as ever."""

    device = CUDA

    def __init__(self, model: Any):
        self._near = TorchEager(model)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._near, name)
        return partial(outside, found) if callable(found) and name != "model" else found


def outside(function: Any, *given: Any, **more: Any) -> Any:
    """What a function finds where nothing pretends, as a backend's own code is."""
    with torch._C.DisableTorchFunction():
        return function(*given, **more)


def far_away(own: Any) -> AcceleratedT5:
    with PretendCuda():
        return AcceleratedT5(FarAway(own), own.config, own.generation_config)


class Bias(LogitsProcessor):
    """Adds a tensor of its own, as logits processors may, where scores are."""

    def __init__(self, device: Any):
        self.bias = torch.linspace(-3, 3, 300).to(device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + self.bias


def moved(given: dict[str, Any], device: Any) -> dict[str, Any]:
    return {name: one.to(device) if isinstance(one, torch.Tensor) else one for name, one in given.items()}


def check_where(own: Any, ours: AcceleratedT5, batch: Any, device: Any, **options: Any) -> None:
    """The tokens of transformers on the CPU, on the device of the ids, and without a word."""
    expected = outside(reference, own, batch, **options)
    assert_varied(expected)
    torch.manual_seed(5)
    with quiet():
        found = ours.generate(**moved(batch, device), **moved(options, device))
    assert found.device == torch.device(device)
    assert torch.equal(found.cpu(), expected)


ALONE = dict(assisted=dict(max_new_tokens=30), lookup=LOOKUP)
PLACES = ["cpu", CUDA]


@pytest.mark.parametrize("device", PLACES, ids=str)
@pytest.mark.parametrize("mode", ["greedy", "four beams", "sampling", "forced", "source's tokens", *ALONE])
def test_tokens_come_out_where_ids_lie(tiny_t5, batch, device: Any, mode: str) -> None:
    own, options = tiny_t5(), ALONE.get(mode) or {**SHORT, **MODES[mode]}
    ours = far_away(own)
    if mode in ALONE:
        batch = {name: tensor[:1] for name, tensor in batch.items()}
    with PretendCuda():
        if mode == "assisted":
            expected = outside(reference, own, batch, **options)
            found = ours.generate(**moved(batch, device), **options, assistant_model=far_away(own))
            assert found.device == torch.device(device) and torch.equal(found.cpu(), expected)
        else:
            check_where(own, ours, batch, device, **options)


@pytest.mark.parametrize("device", PLACES, ids=str)
def test_prefixes_processors_and_what_was_encoded(tiny_t5, batch, device: Any) -> None:
    own = tiny_t5()
    ours, prefix = far_away(own), dict(decoder_input_ids=torch.cat([torch.zeros(6, 1).long(), decoder_ids(6, 3)], 1))
    with PretendCuda():
        check_where(own, ours, batch, device, **prefix, **SHORT)
        near, there = (LogitsProcessorList([Bias(place)]) for place in ("cpu", device))
        expected = outside(reference, own, batch, logits_processor=near, num_beams=2, **SHORT)
        found = ours.generate(**moved(batch, device), logits_processor=there, num_beams=2, **SHORT)
        assert torch.equal(found.cpu(), expected)
        encoded = ours.encoder(**moved(batch, device))
        found = ours.generate(encoder_outputs=encoded, **moved(prefix, "cpu"), num_beams=3, **SHORT)
        assert found.device == torch.device(device)
        assert torch.equal(found.cpu(), outside(reference, own, batch, **prefix, num_beams=3, **SHORT))


def test_logits_and_loss_come_out_where_decoder_ids_lie(tiny_t5, batch) -> None:
    own, tokens, labels = tiny_t5(), decoder_ids(6, 4), decoder_ids(6, 4, seed=2)
    expected = own(**batch, decoder_input_ids=tokens, labels=labels)
    ours = far_away(own)
    with PretendCuda(), torch.no_grad():
        for given in (tokens.to(CUDA), tokens):
            found = ours(**moved(batch, CUDA), decoder_input_ids=given, labels=labels.to(CUDA))
            assert found.logits.device == found.loss.device == given.device
            assert_close(found.logits.cpu(), expected.logits.detach(), atol=1e-4)
            assert_close(found.loss.cpu(), expected.loss.detach(), atol=1e-4)
        assert ours(**moved(batch, CUDA), labels=labels.to(CUDA)).loss.device == CUDA


def test_a_model_stays_where_it_was_made(tiny_t5, batch) -> None:
    ours = far_away(tiny_t5())
    with PretendCuda():
        assert (ours.device, ours.dtype) == (CUDA, torch.float32)
        assert next(ours.parameters()).device == CUDA
        for same in (ours.to(ours.device), ours.to("cuda"), ours.cuda(), ours.to(CUDA, torch.float32), ours.eval()):
            assert same is ours
        for move in (ours.cpu, ours.half, lambda: ours.to("cpu"), lambda: ours.to("meta")):
            with pytest.raises(InputError, match="holds no weights to move"):
                move()
        ours.generate(batch["input_ids"], **SHORT)
        assert ours.device == CUDA, "which it said of another only to transformers' loop"


def test_a_model_that_is_prepared(tiny_t5, batch) -> None:
    huggingface = pytest.importorskip("accelerate")
    own = tiny_t5()
    ours = accelerate(own, runtime="torch", progress=False)
    prepared = huggingface.Accelerator(cpu=True).prepare(ours)
    assert prepared is ours and torch.equal(prepared.generate(**batch, **SHORT), reference(own, batch, **SHORT))
