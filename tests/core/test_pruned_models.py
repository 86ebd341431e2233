"""T5s whose layers differ in width: saved, loaded, generating as transformers' own do, refused if they are wrong."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import own_generate
from silence import quiet
from test_export import histories, same_logits, teacher_forced
from transformers import DynamicCache, EncoderDecoderCache

from t5accel.errors import InputError, ModelUnavailableError
from t5accel.models.load import load_model
from t5accel.models.pruned import layer_widths, prunable_modules, resize
from t5accel.models.t5_math import cache_name
from t5accel.parity import ParityError, assert_varied

NARROW = ["deeper-decoder", "gated-untied", "mt5", "umt5"]
SIZES: dict[str, list[int]] = dict(
    encoder_heads=[3, 1], decoder_heads=[1, 4, 2], cross_heads=[2, 1, 3], encoder_ff=[40, 8], decoder_ff=[24, 64, 5]
)
FULL = dict(encoder_heads=[4] * 2, decoder_heads=[4] * 3, cross_heads=[4] * 3, encoder_ff=[64] * 2, decoder_ff=[64] * 3)
NEW = histories(6, 2, 7)


def narrowed(model: Any, sizes: dict[str, list[int]] = SIZES) -> Any:
    """A copy of these sizes that holds the beginnings of the model's matrices; biases that it had none of are drawn."""
    small = copy.deepcopy(model)
    resize(small, sizes)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, _, name, module in prunable_modules(small):
            old = model.get_submodule(name)
            for key, weight in module.named_parameters():
                if key.startswith("relative") and not hasattr(old, "relative_attention_bias"):
                    weight.normal_(generator=generator)
                else:
                    weight.copy_(old.get_parameter(key)[: weight.shape[0], : weight.shape[1]])
    return small.eval()


def generated(model: Any, ids: np.ndarray, mask: np.ndarray, **options: Any) -> np.ndarray:
    """What transformers' own generate() writes; with a cache unless ``use_cache`` is false."""
    return own_generate(model, ids, mask, max_new_tokens=8, **options).numpy()


@pytest.mark.parametrize("kind", NARROW)
def test_a_narrow_model_is_saved_and_loaded(tiny_t5, padded_batch, tmp_path: Path, kind: str) -> None:
    whole = tiny_t5(kind)
    model, at = narrowed(whole), tmp_path / "once"
    expected = teacher_forced(model, *padded_batch, NEW)
    with pytest.raises(ParityError):
        same_logits(teacher_forced(whole, *padded_batch, NEW), expected)
    for folder in (at, tmp_path / "twice"):
        model.save_pretrained(folder)
        with quiet() if kind == "deeper-decoder" else nullcontext():  # of untied heads transformers 5 always speaks
            model, tokenizer = load_model(folder)
        assert tokenizer is None and type(model) is type(whole) and not model.training
        assert layer_widths(model) == SIZES == model.config.layer_widths
        np.testing.assert_array_equal(teacher_forced(model, *padded_batch, NEW), expected)
        assert json.loads((folder / "config.json").read_text())["architectures"] == [type(whole).__name__]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("kind", NARROW)
def test_generate_with_its_cache_and_without(tiny_t5, padded_batch, kind: str, beams: int) -> None:
    model = narrowed(tiny_t5(kind))
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with_cache = generated(model, *padded_batch, num_beams=beams, **{cache_name(): cache})
    assert_varied(with_cache)
    np.testing.assert_array_equal(with_cache, generated(model, *padded_batch, num_beams=beams, use_cache=False))
    held = [layer.keys.shape[1] for layer in cache.self_attention_cache.layers]
    assert held == SIZES["decoder_heads"]
    assert [layer.keys.shape[1] for layer in cache.cross_attention_cache.layers] == SIZES["cross_heads"]


def test_a_narrow_model_can_be_trained(tiny_t5, padded_batch) -> None:
    model = narrowed(tiny_t5()).train()
    ids, mask = map(torch.as_tensor, padded_batch)
    model(input_ids=ids, attention_mask=mask, labels=torch.as_tensor(NEW[:, 0].copy())).loss.backward()
    without = [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert without == []


def test_new_matrices_are_of_the_old_ones_type_and_a_second_time_adds_no_hook(tiny_t5) -> None:
    model = copy.deepcopy(tiny_t5()).to(torch.bfloat16)
    for sizes in (SIZES, FULL):
        resize(model, sizes)
        assert layer_widths(model) == sizes == model.config.layer_widths
        assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
        hooks = [len(m._forward_pre_hooks) for kind, _, _, m in prunable_modules(model) if kind.endswith("heads")]
        assert hooks == [1] * 8


WRONG: list[Any] = [
    None, 5, [], {}, "encoder_heads", {**SIZES, "more": [1]}, {k: v for k, v in SIZES.items() if k != "cross_heads"},
    *({**SIZES, "decoder_heads": wrong} for wrong in ([1, 4], [1, 4, 2, 2], [], 4, "142", None, {1: 1, 2: 2, 3: 3})),
    *({**SIZES, "encoder_ff": [40, wrong]} for wrong in (0, -8, 1.5, True, "8", None)),
]  # fmt: skip


@pytest.mark.parametrize("sizes", WRONG, ids=str)
def test_wrong_widths_are_refused_and_change_nothing(tiny_t5, sizes: Any) -> None:
    model = copy.deepcopy(tiny_t5())
    with pytest.raises(InputError, match="layer_widths"):
        resize(model, sizes)
    assert layer_widths(model) == FULL and not hasattr(model.config, "layer_widths")


@pytest.fixture
def saved(tiny_t5, tmp_path: Path) -> Path:
    """The folder of a narrow model."""
    narrowed(tiny_t5()).save_pretrained(tmp_path / "narrow")
    return tmp_path / "narrow"


def test_widths_that_are_not_those_of_the_weights_are_refused(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    for kind, sizes, error in (
        ("decoder_heads", [2, 4, 2], ModelUnavailableError), ("decoder_ff", [24, 64, 6], ModelUnavailableError),
        ("decoder_ff", [24, 64], InputError), ("encoder_heads", [0, 1], InputError),
    ):  # fmt: skip
        changed = {**config, "layer_widths": {**config["layer_widths"], kind: sizes}}
        (saved / "config.json").write_text(json.dumps(changed))
        with pytest.raises(error, match="narrow cannot be loaded|layer_widths"):
            load_model(saved)
