"""A factor for every head and neuron: what it multiplies, what its gradient is, and that it leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from test_export import histories, same_logits, teacher_forced
from test_pruned_models import SIZES, narrowed

from t5accel.distillation.gates import Gates, gated
from t5accel.errors import InputError
from t5accel.models.pruned import prunable_modules
from t5accel.parity import ParityError

ATTENTION = "decoder.block.2.layer.1.EncDecAttention"
NEW = histories(6, 2, 7)


def some_kept(gates: Gates, seed: int = 0, at_least: int = 0) -> dict[str, tuple[int, ...]]:
    """Any heads and neurons of every module."""
    rng = np.random.default_rng(seed)
    chosen = {}
    for name, factor in zip(gates.names, gates.factors, strict=True):
        count = rng.integers(at_least, len(factor) + 1)
        chosen[name] = tuple(sorted(rng.choice(len(factor), count, replace=False).tolist()))
    return chosen


def hooks(model: Any) -> list[int]:
    return [len(module._forward_pre_hooks) for module in model.modules()]


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    ids, mask = map(torch.as_tensor, batch)
    return model(input_ids=ids, attention_mask=mask, labels=torch.as_tensor(NEW[:, 0].copy())).loss


def test_every_head_and_neuron_has_a_factor_that_changes_nothing_at_first(tiny_t5, padded_batch, kind: str) -> None:
    model = tiny_t5(kind)
    gates = Gates(model)
    heads = [4 if name.endswith("Attention") else 64 for name in gates.names]
    assert [len(factor) for factor in gates.factors] == [len(m) for m in gates.movement] == heads
    assert gates.names == [name for _, _, name, _ in prunable_modules(model)]
    before = teacher_forced(model, *padded_batch, NEW)
    with gated(model, gates):
        np.testing.assert_array_equal(teacher_forced(model, *padded_batch, NEW), before)


@pytest.mark.parametrize("kind", ["deeper-decoder", "gated-untied", "umt5"])
def test_a_closed_gate_is_a_result_that_nobody_reads(tiny_t5, padded_batch, kind: str) -> None:
    model = tiny_t5(kind)
    gates, unread = Gates(model), copy.deepcopy(model)
    kept = some_kept(gates)
    gates.close(kept)
    with torch.no_grad():
        for name, indices in kept.items():
            module = unread.get_submodule(name)
            last, width = (module.o, 12) if name.endswith("Attention") else (module.wo, 1)
            factor = torch.zeros(last.in_features // width)
            factor[list(indices)] = 1.0
            last.weight.mul_(factor.repeat_interleave(width))
    expected = teacher_forced(unread, *padded_batch, NEW)
    with pytest.raises(ParityError):
        same_logits(teacher_forced(model, *padded_batch, NEW), expected)
    with gated(model, gates):
        same_logits(teacher_forced(model, *padded_batch, NEW), expected)


def test_narrow_models_have_as_many_gates_as_heads_and_neurons(tiny_t5, padded_batch) -> None:
    model = narrowed(tiny_t5())
    gates = Gates(model)
    expected = {"encoder": iter(SIZES["encoder_heads"]), "decoder": iter(SIZES["decoder_heads"])}
    found = [
        (n.split(".")[0], len(f))
        for n, f in zip(gates.names, gates.factors, strict=True)
        if n.endswith("SelfAttention")
    ]
    assert found == [(stack, next(expected[stack])) for stack, _ in found]
    before = teacher_forced(model, *padded_batch, NEW)
    with gated(model, gates):
        np.testing.assert_array_equal(teacher_forced(model, *padded_batch, NEW), before)
        gates.close({name: () for name in gates.names})
        with pytest.raises(ParityError):
            same_logits(model_logits(model, padded_batch), before[:, 0])


def model_logits(model: Any, batch: Any) -> np.ndarray:
    ids, mask = map(torch.as_tensor, batch)
    with torch.inference_mode():
        return model(input_ids=ids, attention_mask=mask, decoder_input_ids=torch.as_tensor(NEW[:, 0])).logits.numpy()


@pytest.mark.parametrize("kind", ["deeper-decoder", "gated-untied", "umt5"])
def test_the_gradient_of_a_factor_is_the_slope_of_the_loss(tiny_t5, padded_batch, kind: str) -> None:
    model = tiny_t5(kind)
    gates = Gates(model)
    step, compared = 1e-2, 0
    with gated(model, gates):
        gradients = torch.autograd.grad(loss_of(model, padded_batch), list(gates.factors))
        for factor, gradient in zip(gates.factors, gradients, strict=True):
            index = int(gradient.abs().argmax())  # the slope of a small one drowns in rounding
            losses = []
            for sign in (1, -1):
                with torch.no_grad():
                    factor[index] += sign * step
                    losses.append(loss_of(model, padded_batch).item())
                    factor[index] -= sign * step
            slope = (losses[0] - losses[1]) / (2 * step)
            assert slope == pytest.approx(gradient[index].item(), rel=0.03, abs=2e-4)
            compared += abs(slope) > 1e-2
    assert compared > len(gates.factors) // 2


def test_hooks_are_gone_afterwards_also_after_an_error(tiny_t5, padded_batch) -> None:
    model = narrowed(tiny_t5())  # which has hooks of its own
    gates, before = Gates(model), hooks(model)
    gates.close({name: () for name in gates.names})
    logits = model_logits(model, padded_batch)
    with gated(model, gates):
        assert sum(hooks(model)) == sum(before) + len(gates.names)
    assert hooks(model) == before
    with pytest.raises(RuntimeError, match="stop"), gated(model, gates):
        raise RuntimeError("stop")
    assert hooks(model) == before
    np.testing.assert_array_equal(model_logits(model, padded_batch), logits)


def test_what_is_closed_is_what_is_not_kept(tiny_t5) -> None:
    gates = Gates(tiny_t5())
    everything = gates.kept()
    assert everything[ATTENTION] == (0, 1, 2, 3) and len(everything["encoder.block.0.layer.1.DenseReluDense"]) == 64
    for seed in range(3):
        kept = some_kept(gates, seed)
        gates.close(kept)
        assert gates.kept() == kept != everything
    gates.close(everything)
    assert gates.kept() == everything and all((factor == 1).all() for factor in gates.factors)


def wrong_choices() -> Iterator[Any]:
    yield pytest.param(lambda kept: {}, "13 modules", id="none")
    yield pytest.param(lambda kept: {**kept, "lm_head": (0,)}, "modules", id="unknown")
    yield pytest.param(lambda kept: {n: k for n, k in kept.items() if n != ATTENTION}, "modules", id="missing")
    for index in (4, -1, 100):
        yield pytest.param(lambda kept, i=index: {**kept, ATTENTION: (0, i)}, "0 … 3", id=str(index))


@pytest.mark.parametrize(("change", "match"), [*wrong_choices()])
def test_choices_of_what_there_is_not_are_refused_and_change_nothing(tiny_t5, change: Any, match: str) -> None:
    gates = Gates(tiny_t5())
    before = some_kept(gates)
    gates.close(before)
    with pytest.raises(InputError, match=match):
        gates.close(change(some_kept(gates, seed=1)))
    assert gates.kept() == before


def test_gradients_are_collected_once_with_their_sign_turned(tiny_t5, padded_batch) -> None:
    model = copy.deepcopy(tiny_t5())
    gates = Gates(model)
    gates.collect()
    assert not any(moved.any() for moved in gates.movement)
    with gated(model, gates):
        (2.0 * loss_of(model, padded_batch)).backward()
        first = [factor.grad.clone() for factor in gates.factors]
        assert all(gradient.any() for gradient in first)
        gates.collect()
        assert all(factor.grad is None for factor in gates.factors)
        gates.collect()
        assert all(torch.equal(moved, -grad) for moved, grad in zip(gates.movement, first, strict=True))
        loss_of(model, padded_batch).backward()
        gates.collect()
    for moved, gradient in zip(gates.movement, first, strict=True):
        torch.testing.assert_close(moved.data, -1.5 * gradient)
    state = gates.state_dict()
    assert sum("movement" in key for key in state) == sum("factors" in key for key in state) == len(gates.names)


def test_gates_work_in_16_bits(tiny_t5, padded_batch) -> None:
    model = tiny_t5()
    gates = Gates(model)
    with gated(model, gates), torch.autocast("cpu", torch.bfloat16):
        gradients = torch.autograd.grad(loss_of(model, padded_batch), list(gates.factors))
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    assert all(torch.isfinite(gradient).all() and gradient.any() for gradient in gradients)
