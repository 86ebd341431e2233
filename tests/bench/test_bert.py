"""BERTs: loaded by name, pruned and really smaller, exported, fused and in integers: always the same function."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.bert.graphs import bound_to, dynamic_int8, export_bert, fed_run, fuse_bert, static_int8
from bench.bert.model import load_bert, random_bert, resize, widths
from bench.bert.pruning import KINDS, Pruning, attach, close, closing, removed
from bench.bert.spans import torch_run
from t5accel.backends.ort_session import SessionSettings, open_session
from t5accel.errors import InputError, ModelUnavailableError, UnknownModelError
from t5accel.graphs.rewriting import count_nodes
from t5accel.parity import ParityError, assert_close

SIZES: dict[str, Any] = dict(
    vocab_size=90, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=64, initializer_range=0.2,
)  # fmt: skip


def inputs(batch: int = 3, tokens: int = 20) -> dict[str, np.ndarray]:
    """Rows of unequal length: what is padding differs between them."""
    rng = np.random.default_rng(batch * tokens)
    mask = np.ones((batch, tokens), np.int64)
    mask[-1, tokens // 2 :] = 0
    kinds = np.repeat((np.arange(tokens) > 6)[None], batch, 0).astype(np.int64)
    return {"input_ids": rng.integers(4, 90, (batch, tokens)), "token_type_ids": kinds, "attention_mask": mask}


def real(found: tuple[np.ndarray, np.ndarray], given: dict[str, np.ndarray]) -> np.ndarray:
    """Both logits where there is text."""
    return np.stack(found)[:, given["attention_mask"] > 0]


@pytest.fixture(scope="module")
def model() -> Any:
    return random_bert(SIZES, seed=3)


@pytest.fixture(scope="module")
def graph(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_bert(model, tmp_path_factory.mktemp("bert") / "bert.onnx")


@pytest.fixture(scope="module")
def fused(model: Any, graph: Path) -> Path:
    fuse_bert(graph, graph.with_name("fused.onnx"))
    return graph.with_name("fused.onnx")


def test_random_weights_are_the_seed_s_and_names_are_checked(tmp_path: Path) -> None:
    one, same, other = (random_bert(SIZES, seed=seed).qa_outputs.weight for seed in (0, 0, 1))
    assert torch.equal(one, same) and not torch.equal(one, other)
    with pytest.raises(UnknownModelError, match="bert-large"):
        load_bert("random:bert-huge")
    with pytest.raises(UnknownModelError, match="mini-bert"):
        load_bert(tmp_path / "nothing")
    with pytest.raises(ModelUnavailableError, match="safetensors"):
        load_bert(tmp_path)


@pytest.mark.parametrize("shape", [(1, 9), (3, 20), (2, 64)])
def test_the_graphs_compute_what_the_model_does(model: Any, graph: Path, fused: Path, shape: tuple[int, int]) -> None:
    given = inputs(*shape)
    expected = real(torch_run(model)(given), given)
    assert expected.std() > 0.1
    for path in (graph, fused):
        for run in (fed_run(path), bound_to(open_session(path, SessionSettings()), *shape)):
            for _ in range(2):  # memory that stays is written twice
                assert_close(real(run(given), given), expected, atol=1e-4)
    without_mask = {**given, "attention_mask": np.ones_like(given["attention_mask"])}
    with pytest.raises(ParityError):
        assert_close(real(fed_run(fused)(without_mask), given), expected, atol=1e-4)


def test_integers_are_smaller_close_and_made_of_products(graph: Path, fused: Path, model: Any, tmp_path: Path) -> None:
    given = inputs()
    expected = real(torch_run(model)(given), given)
    dynamic = dynamic_int8(fused, tmp_path / "dynamic.onnx")
    static = static_int8(graph, tmp_path / "static.onnx", [inputs(), inputs(2, 12)])
    for path in (dynamic, static):
        found = real(fed_run(path)(given), given)
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert 0 < error < 0.15, path.name
    assert count_nodes(dynamic)["com.microsoft.QAttention"] + count_nodes(dynamic)["MatMulInteger"] > 0
    assert count_nodes(static)["QuantizeLinear"] > 0
    assert dynamic.stat().st_size < fused.stat().st_size


def moved(model: Any, pruning: Pruning, share: float = 1.0) -> Any:
    """A copy whose masks have seen one gradient, and are closed."""
    pruned = copy.deepcopy(model)
    masks = attach(pruned, pruning)
    given = {name: torch.from_numpy(array) for name, array in inputs().items()}
    pruned(**given).start_logits.square().sum().backward()
    close(masks, pruning, share)
    return pruned, masks


@pytest.mark.parametrize("pruning", [Pruning(heads=0.5, neurons=0.5), Pruning(neurons=0.3), Pruning(heads=0.4)])
def test_what_is_left_computes_what_was_masked(model: Any, pruning: Pruning) -> None:
    given = inputs()
    masked, _ = moved(model, pruning)
    small = removed(masked)
    expected = torch_run(masked)(given)
    assert_close(np.stack(torch_run(small)(given)), np.stack(expected), atol=1e-5)
    with pytest.raises(ParityError):
        assert_close(np.stack(torch_run(model)(given)), np.stack(expected), atol=1e-3)
    kept = widths(small)
    if pruning.heads:
        assert sum(kept["heads"]) <= round(12 * (1 - pruning.heads)) + 1
    if pruning.neurons:
        assert sum(kept["neurons"]) == 192 - round(192 * pruning.neurons)
    assert small.num_parameters() <= model.num_parameters()


def test_the_least_movement_goes_first_nothing_goes_at_a_share_of_zero_and_no_layer_loses_all(model: Any) -> None:
    pruning = Pruning(neurons=0.5)
    _, masks = moved(model, pruning)
    movement = torch.cat([mask.movement.flatten() for mask in masks["neurons"]])
    factor = torch.cat([mask.factor.flatten() for mask in masks["neurons"]])
    assert movement[factor == 0].max() <= movement[factor == 1].min() and movement.std() > 0
    close(masks, pruning, 0.0)
    assert all(bool(mask.factor.all()) for mask in masks["neurons"])
    masks = attach(copy.deepcopy(model), Pruning(heads=0.9, neurons=0.99))
    for kind in ("heads", "neurons"):
        masks[kind][0].movement -= 100.0  # all of the first layer matters least
    close(masks, Pruning(heads=0.9, neurons=0.99), 1.0)
    for kind in ("heads", "neurons"):
        assert all(mask.factor.sum() >= 1 for mask in masks[kind])


def test_movement_is_minus_gradient_times_weight(model: Any) -> None:
    _, masks = moved(model, Pruning(heads=0.5), share=0.0)
    plain = copy.deepcopy(model)
    plain(**{name: torch.from_numpy(array) for name, array in inputs().items()}).start_logits.square().sum().backward()
    output = plain.bert.encoder.layer[1].attention.output.dense.weight
    by_head = (output.grad * output.detach()).view(32, 4, 8).sum((0, 2))
    assert torch.allclose(masks["heads"][1].movement[0], -by_head, atol=1e-4, rtol=1e-3)
    assert masks["heads"][1].factor.grad is None


def test_a_narrow_model_is_saved_loaded_and_exported(model: Any, tmp_path: Path) -> None:
    small = removed(moved(model, Pruning(heads=0.5, neurons=0.5))[0])
    small.save_pretrained(tmp_path)
    loaded, tokenizer = load_bert(tmp_path)
    given = inputs()
    expected = np.stack(torch_run(small)(given))
    assert tokenizer is None and widths(loaded) == widths(small)
    assert_close(np.stack(torch_run(loaded)(given)), expected, atol=1e-6)
    path = export_bert(loaded, tmp_path / "narrow.onnx")
    counts = fuse_bert(path, tmp_path / "fused.onnx")
    assert (counts["Attention"], counts["SkipLayerNormalization"]) == (3, 6)
    assert counts.get("BiasGelu", 0) + counts.get("Gelu", 0) == 3
    found = fed_run(tmp_path / "fused.onnx")(given)
    assert_close(real(found, given), real(tuple(expected), given), atol=1e-4)


def test_widths_and_shares_that_cannot_be_are_refused(model: Any) -> None:
    with pytest.raises(InputError, match="heads"):
        resize(random_bert(SIZES), {"heads": [4, 4], "neurons": [64] * 3})
    with pytest.raises(InputError, match="neurons"):
        resize(random_bert(SIZES), {"heads": [4] * 3, "neurons": [64, 0, 64]})
    for kind in KINDS:
        with pytest.raises(InputError, match=kind):
            Pruning(**{kind: 1.0})
    assert [closing(step, 100) for step in (0, 60, 99)] == [0.0, 1.0, 1.0]
