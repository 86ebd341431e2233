"""A student with some of its teacher's decoder layers computes what the teacher does without the others."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refused import refused
from test_export import histories, same_logits, teacher_forced
from test_pruned_models import generated

from t5accel.distillation.student import layer_map, shrink_decoder
from t5accel.errors import InputError, NotT5Error
from t5accel.models.load import load_model
from t5accel.models.sizes import T5Dims
from t5accel.models.t5_math import cache_name
from t5accel.parity import ParityError, assert_varied

NEW = histories(6, 2, 7)


def skipping(teacher: Any, kept: Sequence[int]) -> Any:
    """A copy whose other decoder layers add nothing to what passes through them."""
    model = copy.deepcopy(teacher)
    with torch.no_grad():
        for layer, block in enumerate(model.decoder.block):
            if layer not in kept:
                block.layer[0].SelfAttention.o.weight.zero_()
                block.layer[1].EncDecAttention.o.weight.zero_()
                block.layer[2].DenseReluDense.wo.weight.zero_()
    return model


def state(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@given(st.integers(2, 40), st.data())
def test_the_first_and_the_last_are_among_them(teacher: int, data: st.DataObject) -> None:
    student = data.draw(st.integers(2, teacher))
    layers = layer_map(teacher, student)
    assert len(set(layers)) == student and list(layers) == sorted(layers)
    assert (layers[0], layers[-1]) == (0, teacher - 1)
    gaps = np.diff(layers)
    assert gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize("count", [0, -1, 4])
def test_more_layers_than_there_are_and_none_are_refused(tiny_t5, count: int) -> None:
    for ask in (lambda: layer_map(3, count), lambda: shrink_decoder(tiny_t5(), count)):
        with pytest.raises(InputError, match=f"got {count}"):
            ask()


@pytest.mark.parametrize("kept", [[2], [0, 2], [1, 2], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("kind", ["gated-untied", "umt5"])
def test_a_student_is_its_teacher_without_the_other_layers(tiny_t5, padded_batch, kind: str, kept: list[int]) -> None:
    teacher = tiny_t5(kind)
    before, config = state(teacher), teacher.config.to_dict()
    student = shrink_decoder(teacher, kept)
    found = teacher_forced(student, *padded_batch, NEW)
    same_logits(found, teacher_forced(skipping(teacher, kept), *padded_batch, NEW))
    if len(kept) < 3:
        with pytest.raises(ParityError):
            same_logits(found, teacher_forced(teacher, *padded_batch, NEW))

    assert type(student) is type(teacher) and not student.training
    assert (student.config.num_decoder_layers, student.config.num_layers) == (len(kept), 2)
    assert T5Dims.of(student).decoder_layers == len(kept) == student.decoder.config.num_layers
    assert [block.layer[0].SelfAttention.layer_idx for block in student.decoder.block] == list(range(len(kept)))
    assert teacher.config.to_dict() == config and teacher.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    theirs = {weight.data_ptr() for weight in teacher.parameters()}
    assert not any(weight.data_ptr() in theirs for weight in student.parameters())


@pytest.mark.parametrize("kind", ["deeper-decoder", "gated-untied", "umt5"])
def test_a_student_is_an_ordinary_checkpoint(tiny_t5, padded_batch, tmp_path: Path, kind: str) -> None:
    student = shrink_decoder(tiny_t5(kind), [2])
    student.save_pretrained(tmp_path)
    expected = teacher_forced(student, *padded_batch, NEW)
    loaded, tokenizer = load_model(tmp_path)
    assert tokenizer is None and T5Dims.of(loaded) == T5Dims.of(student)
    for model in (type(student).from_pretrained(tmp_path).eval(), loaded):
        np.testing.assert_array_equal(teacher_forced(model, *padded_batch, NEW), expected)
    for beams in (1, 3):
        # With the cache that transformers makes, which has a place for each layer of the encoder.
        found = generated(loaded, *padded_batch, num_beams=beams, **{cache_name(): None})
        assert_varied(found)
        np.testing.assert_array_equal(found, generated(loaded, *padded_batch, num_beams=beams, use_cache=False))


def test_layers_that_there_are_not_are_refused(tiny_t5) -> None:
    wrong = ([], [0, 0], [2, 0], [3], [-1, 0], ["0"], [0.0], [True], [0, None], (0, 1, 2, 3))
    refused(partial(shrink_decoder, tiny_t5()), "layers", *wrong)
    refused(lambda model: shrink_decoder(model, 1), "model", torch.nn.Linear(2, 2), match="Linear", error=NotT5Error)
