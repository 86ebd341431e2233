"""Fine-tuning with rounded weights: the rounding is the export's, the gradient is that of the weights themselves."""

import copy
from argparse import Namespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

import training.quantization_aware as module
from t5accel.errors import InputError
from t5accel.precision.integers import quantize_blocks, quantize_channels
from t5accel.precision.recipes import RECIPES, Recipe, Scheme
from training.quantization_aware import Rounded, fine_tune, rounded_weights

SOURCE, TARGET = [[5, 6, 7, 1], [8, 9, 1]], [[20, 21, 1], [22, 1]]


def batches():
    while True:
        yield [("translation", (SOURCE, TARGET))]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("inputs", [64, 33])
def test_blocks_are_rounded_as_the_export_rounds_them(bits: int, inputs: int):
    weight = np.random.default_rng(0).normal(size=(7, inputs)).astype(np.float32)
    weight[2] = 0
    found = Rounded(torch.from_numpy(weight), Scheme(bits=bits, block_size=32))(torch.from_numpy(weight)).numpy()
    np.testing.assert_allclose(found, quantize_blocks(weight, bits, 32).floats()[:, :inputs], atol=1e-6)
    assert np.abs(found - weight).max() > 1e-3


@pytest.mark.parametrize("options", [{}, {"per_channel": False}, {"reduce_range": True}], ids=str)
def test_channels_are_rounded_as_the_export_rounds_them(options: dict[str, bool]):
    weight = np.random.default_rng(0).normal(size=(7, 40)).astype(np.float32)
    found = Rounded(torch.from_numpy(weight), Scheme("dynamic", **options))(torch.from_numpy(weight)).numpy()
    channels = quantize_channels(weight.T, **options)  # there as a product takes it, (K, N)
    np.testing.assert_allclose(found, (channels.integers * channels.scales).T, atol=1e-6)


def test_only_the_groups_of_the_recipe_are_rounded_and_afterwards_none_is(tiny_t5):
    model = copy.deepcopy(tiny_t5())
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    recipe = Recipe("some", decoder=Scheme(bits=4, block_size=32)).without(["decoder.0.wo"])
    with rounded_weights(model, recipe):
        decoder, encoder = model.decoder.block[0], model.encoder.block[0]
        changed = {
            "q": decoder.layer[0].SelfAttention.q, "wi": decoder.layer[2].DenseReluDense.wi,
            "wo": decoder.layer[2].DenseReluDense.wo, "cross k": decoder.layer[1].EncDecAttention.k,
            "encoder": encoder.layer[0].SelfAttention.q, "embedding": model.shared,
        }  # fmt: skip
        rounded = {name for name, module in changed.items() if "parametrizations" in dict(module.named_children())}
    assert rounded == {"q", "wi"}  # the keys of the source are computed in the encoder's graph
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    with pytest.raises(InputError, match="recipe"), rounded_weights(model, RECIPES["fp16"]):
        pass  # it has nothing to round


@pytest.mark.parametrize("recipe", ["int4", None])
def test_fine_tuning_learns_with_rounded_weights_and_without(tiny_t5, recipe: str | None):
    model, losses = copy.deepcopy(tiny_t5()), []
    torch.manual_seed(0)
    fine_tune(model, recipe, batches(), steps=30, learning_rate=5e-3, smoothing=0.0, on_step=losses.append)
    assert len(losses) == 30 and np.mean(losses[-3:]) < 0.7 * losses[0]
    assert not model.training and model.lm_head.weight is model.shared.weight
    labels = torch.tensor([TARGET[0]])
    with torch.inference_mode():
        loss = model(input_ids=torch.tensor([SOURCE[0]]), labels=labels).loss
    assert torch.isfinite(loss)


def test_a_model_that_was_not_saved_whole_is_not_finished(tiny_t5, tmp_path, monkeypatch):
    """transformers writes the configuration before the weights, and the configuration says that a run is finished."""
    calls = []
    for name in ("read_pairs", "split_pairs", "mini_mixture", "steps_from"):
        monkeypatch.setattr(module, name, MagicMock())
    monkeypatch.setattr(module, "load_model", lambda name: (copy.deepcopy(tiny_t5()), None))
    monkeypatch.setattr(module, "fine_tune", lambda *given, **options: calls.append(given))
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("a\tb\n")
    args = Namespace(pairs=pairs, device="cpu", steps=1, learning_rate=0.1)
    with monkeypatch.context() as patch:
        patch.setattr(module.torch.nn.Module, "state_dict", MagicMock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            module.train(None, tmp_path / "model", args)
    assert not (tmp_path / "model").exists()
    for _ in range(2):
        module.train(None, tmp_path / "model", args)
    with pytest.raises(InputError, match="other settings"):
        module.train(None, tmp_path / "model", Namespace(**vars(args) | {"steps": 2}))
    assert len(calls) == 2 and (tmp_path / "model" / "model.safetensors").is_file()
