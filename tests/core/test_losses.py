"""What a student learns from: each loss against the same thing computed by hand, and padding that changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from t5accel.distillation.losses import OBJECTIVES, Objective, matched_layers, student_loss
from t5accel.distillation.optimizer import batch_loss, model_inputs
from t5accel.distillation.student import shrink_decoder
from t5accel.errors import InputError

BATCH = ([[5, 6, 7, 8, 1], [9, 10, 1]], [[20, 21, 1], [22, 23, 24, 25, 1]])
LABELS = 8
EACH = {"labels": Objective(labels=1.0), "logits": Objective(logits=1.0), "hidden": Objective(hidden=1.0)}


def loss(student: Any, teacher: Any, objective: Objective, batch: Any = BATCH) -> float:
    with torch.no_grad():
        summed, count = student_loss(student, teacher, batch, objective)
    assert count == sum(map(len, batch[1]))
    return summed.item()


@torch.no_grad()
def outputs(model: Any, **options: Any) -> Any:
    """As a training step computes them, and which positions hold a label."""
    inputs, labels = model_inputs(BATCH, model)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(**inputs, use_cache=False, **options)
    return found, (labels >= 0).numpy()


def log_softmax(logits: torch.Tensor, temperature: float) -> np.ndarray:
    scaled = logits.double().numpy() / temperature
    scaled -= scaled.max(axis=-1, keepdims=True)
    return scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))


def test_a_model_reads_its_own_start_and_padding(tiny_t5) -> None:
    """As transformers feeds it labels, where neither is 0 and 0 is a word."""
    model = copy.deepcopy(tiny_t5())
    for config in (model.config, model.generation_config):
        config.decoder_start_token_id, config.pad_token_id = 5, 9
    inputs, _ = model_inputs(([[7, 0, 1], [8, 1]], [[6, 0, 1], [4, 1]]), model)
    assert inputs["input_ids"].tolist() == [[7, 0, 1], [8, 1, 9]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert inputs["decoder_input_ids"].tolist() == [[5, 6, 0], [5, 4, 1]]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_the_labels_is_the_one_of_training(tiny_t5, smoothing: float) -> None:
    model = tiny_t5()
    with torch.no_grad():
        expected, count = batch_loss(model, BATCH, smoothing)
    assert count == LABELS
    assert loss(model, None, Objective(labels=1.0, smoothing=smoothing)) == pytest.approx(expected.item(), rel=1e-6)
    assert loss(model, None, Objective(labels=0.25, smoothing=smoothing)) == pytest.approx(
        expected.item() / 4, rel=1e-6
    )
    assert loss(model, None, Objective(labels=1.0, smoothing=0.3)) != pytest.approx(expected.item(), rel=1e-3)


@pytest.mark.parametrize("kind", ["deeper-decoder", "gated-untied", "umt5"])
@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_the_divergence_is_the_one_of_the_books(tiny_t5, kind: str, temperature: float) -> None:
    teacher, student = tiny_t5(kind), tiny_t5(kind, seed=2)
    objective = Objective(logits=1.0, temperature=temperature)
    (own, counts), (theirs, _) = outputs(student), outputs(teacher)
    p, q = (log_softmax(output.logits[torch.as_tensor(counts)], temperature) for output in (theirs, own))
    expected = temperature**2 * (np.exp(p) * (p - q)).sum()
    assert loss(student, teacher, objective) == pytest.approx(expected, rel=1e-4) and expected > 0.1
    assert loss(teacher, student, objective) != pytest.approx(expected, rel=1e-3), "it has a direction"


@pytest.mark.parametrize("name", ["logits", "hidden"])
@pytest.mark.parametrize("kind", ["deeper-decoder", "mt5", "umt5"])
def test_whoever_does_the_same_has_nothing_to_learn(tiny_t5, kind: str, name: str) -> None:
    teacher = tiny_t5(kind)
    assert loss(copy.deepcopy(teacher), teacher, EACH[name]) == pytest.approx(0.0, abs=1e-6)
    for other in (tiny_t5(kind, seed=2), shrink_decoder(teacher, [0]), shrink_decoder(teacher, [0, 2])):
        assert loss(other, teacher, EACH[name]) > 0.1


@pytest.mark.parametrize("kind", ["deeper-decoder", "gated-untied", "umt5"])
def test_hidden_states_are_the_outputs_of_the_layers_and_the_last_is_normed(tiny_t5, kind: str) -> None:
    """What `_distance` relies on, in both lines of transformers."""
    model, seen = tiny_t5(kind), []
    modules = [*model.decoder.block, model.decoder.final_layer_norm]
    hooks = [
        module.register_forward_hook(lambda _, __, out: seen.append(out[0] if isinstance(out, tuple) else out))
        for module in modules
    ]
    try:
        states = outputs(model, output_hidden_states=True)[0].decoder_hidden_states
    finally:
        for hook in hooks:
            hook.remove()
    assert len(states) == 1 + 3 and len(seen) == 3 + 1
    for state, expected in zip(states[1:], [*seen[:2], seen[3]], strict=True):
        assert torch.equal(state, expected)


@pytest.mark.parametrize("kind", ["deeper-decoder", "umt5"])
@pytest.mark.parametrize("kept", [[0], [0, 2], [0, 1, 2]], ids=str)
def test_the_distance_is_that_of_normed_states_of_matched_layers(tiny_t5, kind: str, kept: list[int]) -> None:
    teacher, student = tiny_t5(kind), shrink_decoder(tiny_t5(kind, seed=2), kept)
    own, counts = outputs(student, output_hidden_states=True)
    theirs, _ = outputs(teacher, output_hidden_states=True)

    def normed(state: torch.Tensor) -> np.ndarray:
        rows = state.double().numpy()[counts]
        return rows / np.sqrt((rows**2).mean(axis=1, keepdims=True))

    layers = {1: (2,), 2: (0, 2), 3: (0, 1, 2)}[len(kept)]
    pairs = zip(own.decoder_hidden_states[1:], [theirs.decoder_hidden_states[1 + i] for i in layers], strict=True)
    expected = sum(((normed(a) - normed(b)) ** 2).mean(axis=1).sum() for a, b in pairs)
    assert loss(student, teacher, EACH["hidden"]) == pytest.approx(expected, rel=1e-3) and expected > 1.0


@pytest.mark.parametrize("name", EACH)
def test_losses_are_summed_over_labels_and_padding_changes_nothing(tiny_t5, name: str) -> None:
    teacher, student = tiny_t5(), tiny_t5(seed=2)
    both = loss(student, teacher, EACH[name])
    apart = [loss(student, teacher, EACH[name], ([s], [t])) for s, t in zip(*BATCH, strict=True)]
    assert both == pytest.approx(sum(apart), rel=0.02) and min(apart) > 0.05 * both  # in bf16


def test_the_weights_add_up(tiny_t5) -> None:
    teacher, student = tiny_t5(), tiny_t5(seed=2)
    parts = {name: loss(student, teacher, objective) for name, objective in EACH.items()}
    mixed = loss(student, teacher, Objective(labels=0.3, logits=0.7, hidden=0.5))
    assert mixed == pytest.approx(0.3 * parts["labels"] + 0.7 * parts["logits"] + 0.5 * parts["hidden"], rel=1e-5)


def test_only_the_teachers_losses_need_a_teacher(tiny_t5) -> None:
    needs = {name: objective.needs_teacher for name, objective in OBJECTIVES.items()}
    assert needs == {"labels": False, "logits": True, "hidden": True, "sequence": False}
    for name in ("logits", "hidden"):
        with pytest.raises(InputError, match="teacher"):
            student_loss(tiny_t5(), None, BATCH, EACH[name])


@pytest.mark.parametrize(
    ("teacher", "student", "expected"),
    [(4, 4, (0, 1, 2, 3)), (4, 3, (0, 1, 3)), (4, 2, (1, 3)), (4, 1, (3,)), (6, 2, (2, 5)), (12, 5, (1, 3, 6, 8, 11))],
)
def test_a_layer_answers_for_the_last_of_those_it_stands_for(teacher: int, student: int, expected: Any) -> None:
    assert matched_layers(teacher, student) == expected
