"""Gates and importance scores: by hand, against removal, against training; and which heads and neurons stay."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import refused
from test_export import histories, teacher_forced
from test_pruned_models import narrowed

from t5accel.distillation.importance import (
    Gates,
    gated,
    magnitude,
    movement,
    normalize_scores,
    select_kept,
    taylor,
)
from t5accel.distillation.optimizer import model_inputs
from t5accel.models.pruned import prunable_modules

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


def test_every_head_and_neuron_has_a_factor_that_changes_nothing_at_first(tiny_t5, padded_batch, kind: str) -> None:
    model = tiny_t5(kind)
    gates = Gates(model)
    heads = [4 if name.endswith("Attention") else 64 for name in gates.names]
    assert [len(factor) for factor in gates.factors] == [len(m) for m in gates.movement] == heads
    assert gates.names == [name for _, _, name, _ in prunable_modules(model)]
    before = teacher_forced(model, *padded_batch, NEW)
    with gated(model, gates):
        np.testing.assert_array_equal(teacher_forced(model, *padded_batch, NEW), before)


def test_gates_work_in_16_bits(tiny_t5, padded_batch) -> None:
    model = tiny_t5()
    gates = Gates(model)
    with gated(model, gates), torch.autocast("cpu", torch.bfloat16):
        ids, mask = map(torch.as_tensor, padded_batch)
        loss = model(input_ids=ids, attention_mask=mask, labels=torch.as_tensor(NEW[:, 0].copy())).loss
        gradients = torch.autograd.grad(loss, list(gates.factors))
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    assert all(torch.isfinite(gradient).all() and gradient.any() for gradient in gradients)


def model_logits(model: Any, batch: Any) -> np.ndarray:
    ids, mask = map(torch.as_tensor, batch)
    with torch.inference_mode():
        return model(input_ids=ids, attention_mask=mask, decoder_input_ids=torch.as_tensor(NEW[:, 0])).logits.numpy()


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


def test_wrong_choices_are_refused_and_change_nothing(tiny_t5) -> None:
    gates = Gates(tiny_t5())
    before, other = some_kept(gates), some_kept(gates, seed=1)
    gates.close(before)
    missing = {name: indices for name, indices in other.items() if name != ATTENTION}
    indices = [{**other, ATTENTION: (0, index)} for index in (4, -1, 100)]
    refused(gates.close, "kept", {}, missing, {**other, "lm_head": (0,)}, *indices)
    assert gates.kept() == before


# --- scores ---------------------------------------------------------------------------------------------------

BATCH = ([[5, 6, 7, 8, 1], [9, 10, 1], [40, 41, 42, 1]], [[20, 21, 1], [22, 23, 24, 25, 1], [30, 31, 1]])
OTHER = ([[50, 51, 52, 1], [60, 61, 62, 63, 1]], [[70, 71, 72, 1], [80, 81, 1]])


def exact_loss(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
    """Summed over the labels, in fp32: what is left out one by one changes little."""
    inputs, labels = model_inputs(batch, model)
    logits = model(**inputs, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss, sum(map(len, batch[1]))


@pytest.mark.parametrize("kind", ["deeper-decoder", "gated-untied", "umt5"])
def test_magnitude_is_the_norm_of_what_would_be_removed(tiny_t5, kind: str) -> None:
    model = tiny_t5(kind)
    scores = magnitude(model)
    assert list(scores) == [name for _, _, name, _ in prunable_modules(model)]
    for name, values in scores.items():
        module = model.get_submodule(name)
        weights = {key: weight.detach().double().numpy() for key, weight in module.named_parameters()}
        for index, value in enumerate(values.tolist()):
            if name.endswith("Attention"):
                rows = slice(12 * index, 12 * (index + 1))
                gone = [weights[f"{x}.weight"][rows] for x in "qkv"] + [weights["o.weight"][:, rows]]
            else:
                gone = [weight[index] for key, weight in weights.items() if key.startswith("wi")]
                gone.append(weights["wo.weight"][:, index])
                assert len(gone) == (3 if kind != "deeper-decoder" else 2)
            assert value == pytest.approx(np.sqrt(sum((part**2).sum() for part in gone)), rel=1e-5)
        assert len(set(values.tolist())) == len(values)


def test_taylor_foretells_what_leaving_out_does(tiny_t5) -> None:
    """The change of the loss and its first-order estimate agree where what is left out is small."""
    model = copy.deepcopy(tiny_t5()).double()
    with torch.no_grad():
        for kind, _, _, module in prunable_modules(model):
            (module.o if kind.endswith("heads") else module.wo).weight.mul_(0.02)
        model.decoder.block[2].layer[2].DenseReluDense.wo.weight[:, 7] = 0.0
    scores = taylor(model, [BATCH], lambda batch: exact_loss(model, batch))
    gates = Gates(model)
    compared = []
    with gated(model, gates), torch.no_grad():
        whole = exact_loss(model, BATCH)[0].item() / 11
        for name, factor in zip(gates.names, gates.factors, strict=True):
            for index in scores[name].argsort(descending=True)[:4].tolist():
                factor[index] = 0.0
                change = abs(exact_loss(model, BATCH)[0].item() / 11 - whole)
                factor[index] = 1.0
                compared.append((scores[name][index].item(), change))
    estimates, changes = np.array(compared).T
    large = changes > 0.1 * changes.max()  # the others drown in rounding
    assert large.sum() >= 5
    np.testing.assert_allclose(estimates[large], changes[large], rtol=0.1)
    assert np.corrcoef(np.log(estimates + 1e-7), np.log(changes + 1e-7))[0, 1] > 0.9
    assert scores["decoder.block.2.layer.2.DenseReluDense"][7] == 0
    assert (scores["decoder.block.2.layer.2.DenseReluDense"] > 0).sum() > 20


def test_taylor_is_the_mean_over_batches_without_their_signs(tiny_t5) -> None:
    model = tiny_t5()

    def loss_of(batch: Any) -> tuple[torch.Tensor, int]:
        return exact_loss(model, batch)

    one, other, both = (taylor(model, batches, loss_of) for batches in ([BATCH], [OTHER], iter([BATCH, OTHER])))
    signs = iter((1, -1))
    cancelled = taylor(model, [BATCH, BATCH], lambda batch: (next(signs) * exact_loss(model, batch)[0], 11))
    for name in both:
        torch.testing.assert_close(both[name], (one[name] + other[name]) / 2)
        torch.testing.assert_close(cancelled[name], one[name])
        assert (one[name] >= 0).all() and not torch.allclose(one[name], other[name])
    assert not any(hooks(model)) and all(weight.grad is None for weight in model.parameters())


def test_movement_is_high_where_training_makes_weights_grow(tiny_t5) -> None:
    model = copy.deepcopy(tiny_t5()).double()
    gates, before = Gates(model), {}
    with gated(model, gates):
        exact_loss(model, BATCH)[0].backward()
    gates.collect()
    scores = movement(gates)
    for kind, _, name, module in prunable_modules(model):
        last, width = (module.o, 12) if kind.endswith("heads") else (module.wo, 1)
        along = (last.weight * last.weight.grad).sum(dim=0).unflatten(0, (-1, width)).sum(dim=1)
        torch.testing.assert_close(scores[name], -along.detach().float(), rtol=1e-3, atol=1e-4)
        before[name] = last.weight.detach().square().sum(dim=0).unflatten(0, (-1, width)).sum(dim=1)
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 1e-7 * weight.grad
    rising = falling = 0
    for kind, _, name, module in prunable_modules(model):
        last, width = (module.o, 12) if kind.endswith("heads") else (module.wo, 1)
        grown = last.weight.detach().square().sum(dim=0).unflatten(0, (-1, width)).sum(dim=1) - before[name]
        clear = scores[name].abs() > 0.05
        assert torch.equal(grown[clear] > 0, scores[name][clear] > 0)
        rising, falling = rising + int((grown[clear] > 0).sum()), falling + int((grown[clear] < 0).sum())
    assert rising > 3 and falling > 3
    scores[name][:] = 0.0
    assert gates.movement[-1].any(), "the scores are a copy"


def test_scores_of_equal_norm_keep_their_order() -> None:
    scores = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0, 0.0, 0.0]), "c": torch.tensor([-5.0, 12.0])}
    found = normalize_scores(scores)
    assert found["a"].tolist() == pytest.approx([0.6, 0.8]) and found["c"].tolist() == pytest.approx([-5 / 13, 12 / 13])
    assert found["b"].tolist() == [0.0] * 3


# --- the choice -------------------------------------------------------------------------------------------------------

HEADS = {
    "0.SelfAttention": torch.tensor([5.0, 1.0, 8.0, 2.0]),
    "1.SelfAttention": torch.tensor([0.1, 0.2, 0.3, 0.4]),
    "1.EncDecAttention": torch.tensor([7.0, 6.0, 9.0, 3.0]),
}
NEURONS = {"0.DenseReluDense": torch.arange(8.0), "1.DenseReluDense": 10.0 + torch.arange(8.0).flip(0)}


def test_the_least_important_heads_of_all_layers_go_and_one_of_each_stays() -> None:
    assert select_kept(HEADS) == dict.fromkeys(HEADS, (0, 1, 2, 3))
    kept = {
        0.25: ((0, 1, 2, 3), (3,), (0, 1, 2, 3)),  # 3 of 12
        0.5: ((0, 2), (3,), (0, 1, 2, 3)),  # 6 of 12, of which layer 1 may lose only 3
        0.75: ((2,), (3,), (0, 2)),
        0.99: ((2,), (3,), (2,)),
    }
    for share, expected in kept.items():
        assert select_kept(HEADS, heads=share, neurons=0.9) == dict(zip(HEADS, expected, strict=True))


def test_neurons_stay_in_multiples() -> None:
    def found(share: float, multiple: int) -> tuple[tuple[int, ...], ...]:
        return tuple(select_kept(NEURONS, neurons=share, multiple_of=multiple).values())

    assert found(0.25, 1) == ((4, 5, 6, 7), tuple(range(8)))
    assert found(0.25, 4) == ((4, 5, 6, 7), tuple(range(8)))
    assert found(0.5, 2) == ((6, 7), tuple(range(8)))  # never a layer without any
    assert found(0.75, 4) == ((4, 5, 6, 7), (0, 1, 2, 3))
    assert found(0.75, 32) == found(0.0, 32) == (tuple(range(8)), tuple(range(8)))
    assert select_kept(NEURONS, heads=0.9) == dict.fromkeys(NEURONS, tuple(range(8)))


values = st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=12)


@settings(deadline=None)
@given(st.lists(values, min_size=1, max_size=5), st.floats(0, 0.99), st.sampled_from([1, 2, 4, 8]))
def test_what_stays_in_a_layer_is_its_best(layers: list[list[float]], share: float, multiple: int) -> None:
    for ending, options in (("SelfAttention", dict(heads=share)), ("Dense", dict(neurons=share, multiple_of=multiple))):
        scores = {f"{i}.{ending}": torch.tensor(layer) for i, layer in enumerate(layers)}
        for name, kept in select_kept(scores, **options).items():
            layer = scores[name]
            assert kept and list(kept) == sorted({*kept}) and set(kept) <= set(range(len(layer)))
            gone = [index for index in range(len(layer)) if index not in kept]
            assert not gone or max(layer[gone]) <= min(layer[list(kept)])
            if ending == "Dense":
                assert len(kept) % multiple == 0 or len(kept) == len(layer)
        total = sum(map(len, layers))
        if ending == "SelfAttention":
            stay = sum(map(len, select_kept(scores, **options).values()))
            assert total - round(share * total) <= stay <= max(total - round(share * total), 0) + len(layers)
