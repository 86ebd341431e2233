"""What is pruned is gone, and what is left computes what the whole model does with the rest multiplied by zero."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from made_up import log
from programs import forced
from refused import refused
from test_distillation import (
    MIXTURE,
    TOY,
    interrupt,
    looking,
    often,
    same_weights,
    stored,
    toy_tokenizer,
)
from test_export import histories, same_logits, teacher_forced
from test_importance import some_kept
from test_pruned_models import generated, narrowed

import t5accel.distillation.pruning as module
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.torch_eager import TorchEager
from t5accel.decoding.greedy_search import greedy
from t5accel.distillation.importance import Gates, Kept, gated, select_kept
from t5accel.distillation.pruning import PruneConfig, prune, prune_to
from t5accel.distillation.student import shrink_decoder
from t5accel.errors import InputError
from t5accel.graphs.export import export_model, t5_weights
from t5accel.graphs.layers import decoder_graph, encoder_graph
from t5accel.graphs.manifest import read_manifest
from t5accel.models.load import load_model
from t5accel.models.pruned import layer_widths, prunable_modules
from t5accel.models.sizes import T5Dims
from t5accel.parity import ParityError, assert_close, assert_varied

V5 = int(transformers.__version__.split(".")[0]) >= 5
ALL = ["deeper-decoder", "shallower-decoder", "gated-untied", "mt5", "umt5"]
NEW = histories(6, 2, 7)
SECOND = "encoder.block.1.layer.0.SelfAttention"

pytestmark = pytest.mark.usefixtures("random_state_put_back")


def equal(actual: np.ndarray, expected: np.ndarray) -> None:
    """Within 1e-5, or more where the logits themselves are larger than 1."""
    assert_close(actual, expected, atol=1e-5 * max(1.0, float(expected.std())))


def masked(model: Any, kept: Kept, batch: Any) -> np.ndarray:
    """Logits of the whole model, its other heads and neurons multiplied by zero."""
    gates = Gates(model)
    gates.close(kept)
    with gated(model, gates):
        return teacher_forced(model, *batch, NEW)


def sizes_of(kept: Kept, model: Any) -> dict[str, list[int]]:
    sizes: dict[str, list[int]] = {}
    for kind, _, name, _ in prunable_modules(model):
        sizes.setdefault(kind, []).append(len(kept[name]))
    return sizes


# --- removing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
def test_a_pruned_model_equals_the_masked_one(tiny_t5, padded_batch, kind: str) -> None:
    model = tiny_t5(kind)
    before, config = stored(model), model.config.to_dict()
    kept = some_kept(Gates(model), len(kind), at_least=1)
    small = prune_to(model, kept)
    expected = masked(model, kept, padded_batch)
    equal(teacher_forced(small, *padded_batch, NEW), expected)
    with pytest.raises(ParityError):
        equal(teacher_forced(model, *padded_batch, NEW), expected)
    assert layer_widths(small) == sizes_of(kept, model) and T5Dims.of(small).cross_heads == tuple(
        layer_widths(small)["cross_heads"]
    )
    assert type(small) is type(model) and not small.training
    assert same_weights(model, before) and model.config.to_dict() == config


@pytest.mark.parametrize("kind", ["deeper-decoder", "umt5"])
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_layers_look_up_the_biases_of_one_table_once(tiny_t5, kind: str, stack: str) -> None:
    """As long as their tables hold the same columns: after more training, or in UMT5, each layer has its own."""
    model = tiny_t5(kind)
    first, second = (f"{stack}.block.{layer}.layer.0.SelfAttention" for layer in (0, 1))
    small = prune_to(model, {**Gates(model).kept(), first: (0, 2, 3), second: (1, 2)})
    build = {"encoder": encoder_graph, "decoder": decoder_graph}[stack]
    layers, shares = len(layer_widths(model)[f"{stack}_heads"]), kind != "umt5"

    def tables(t5: Any) -> list[tuple[int, ...]]:
        graph = build(t5_weights(t5))
        names = [node.input[0] for node in graph.nodes if node.op_type == "Gather" and "by_distance" in node.input[0]]
        return [graph.weights[name].shape for name in names]

    assert len(tables(model)) == (1 if shares else layers)
    assert [heads for heads, _ in tables(small)] == ([4] if shares else [3, 2, *[4] * (layers - 2)])
    with torch.no_grad():
        for layer in range(layers):
            own = small.get_submodule(f"{stack}.block.{layer}.layer.0.SelfAttention").relative_attention_bias.weight
            own += layer  # so that no two layers have a column in common
    assert len(tables(small)) == layers


def test_it_is_really_smaller(tiny_t5, tmp_path: Path) -> None:
    sizes, counts = [], []
    for name, model in (
        ("whole", tiny_t5()),
        ("small", prune_to(tiny_t5(), some_kept(Gates(tiny_t5()), 1, at_least=1))),
    ):
        model.save_pretrained(tmp_path / name)
        sizes.append((tmp_path / name / "model.safetensors").stat().st_size)
        counts.append(model.num_parameters())
    assert counts[1] < 0.8 * counts[0]
    assert sizes[0] - sizes[1] == pytest.approx(4 * (counts[0] - counts[1]), abs=2000)  # the headers


def test_pruned_models_are_pruned_and_shrunk_again(tiny_t5, padded_batch, tmp_path: Path) -> None:
    model = narrowed(tiny_t5())
    model.save_pretrained(tmp_path)
    for start in (model, load_model(tmp_path)[0], shrink_decoder(tiny_t5(), [1, 2]), shrink_decoder(model, [0, 2])):
        kept = some_kept(Gates(start), 2, at_least=1)
        small = prune_to(start, kept)
        expected = masked(start, kept, padded_batch)
        equal(teacher_forced(small, *padded_batch, NEW), expected)
        assert layer_widths(small) == sizes_of(kept, start) == small.config.layer_widths
        last = shrink_decoder(small, [1])
        assert layer_widths(last)["decoder_heads"] == last.config.layer_widths["decoder_heads"]


@pytest.mark.skipif(V5, reason="transformers 5 prunes no heads")
def test_heads_that_transformers_4_pruned_keep_their_biases(tiny_t5, padded_batch) -> None:
    model = copy.deepcopy(tiny_t5())
    model.get_submodule(SECOND).prune_heads({0, 2})
    model.decoder.block[0].layer[0].SelfAttention.prune_heads({1})
    kept = some_kept(Gates(model), 3, at_least=1) | {SECOND: (1,), "decoder.block.0.layer.0.SelfAttention": (0, 2)}
    equal(teacher_forced(prune_to(model, kept), *padded_batch, NEW), masked(model, kept, padded_batch))


def test_heads_that_there_are_not_and_modules_that_are_not_named_are_refused(tiny_t5) -> None:
    whole = Gates(tiny_t5()).kept()
    call = partial(prune_to, tiny_t5())
    indices = ((), (0, 0), (1, 0), (0, 4), (-1, 0), (4,))
    refused(call, "kept", *({**whole, SECOND: chosen} for chosen in indices), match=SECOND)
    without = {name: chosen for name, chosen in whole.items() if name != SECOND}
    refused(call, "kept", {}, {**whole, "lm_head": (0,)}, without, match="kept")


# --- on ONNX Runtime --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["deeper-decoder", "umt5"])
def pruned(request: pytest.FixtureRequest, tiny_t5, tmp_path_factory) -> tuple[Any, Path]:
    """A pruned model, every layer of another width, and its export."""
    model = tiny_t5(request.param)
    small = prune_to(model, some_kept(Gates(model), 4, at_least=1))
    assert len(set(map(tuple, layer_widths(small).values()))) == 5
    folder = tmp_path_factory.mktemp("pruned") / request.param
    export_model(small, folder)
    return small, folder


def test_its_export_gives_its_logits_and_tokens(pruned, padded_batch) -> None:
    model, folder = pruned
    new = histories(6, 3, 9)
    same_logits(forced(folder, padded_batch, new, [3, 4]), teacher_forced(model, *padded_batch, new))
    assert read_manifest(folder).dims == T5Dims.of(model)
    tokens = generated(model, *padded_batch, num_beams=1)[:, 1:]
    assert_varied(tokens)
    for backend in (OrtNumpy(folder), TorchEager(model)):
        np.testing.assert_array_equal(greedy(backend, *padded_batch, max_new_tokens=8).sequences, tokens)


# --- the whole road ---------------------------------------------------------------------------------------------------

CONFIG = PruneConfig(
    heads=0.25, neurons=0.5, importance="taylor", steps=8, rising=0.75, every=2, multiple_of=8, examine=2, training=TOY
)  # fmt: skip
IMPORTANCE_METHODS = ["magnitude", "taylor", "movement"]


def run(model: Any, folder: Path, config: PruneConfig = CONFIG, **options: Any) -> Any:
    return prune(model, toy_tokenizer(), MIXTURE, folder, config, **options)


def heads(model: Any) -> int:
    return sum(sum(layers) for kind, layers in layer_widths(model).items() if kind.endswith("heads"))


def neurons(model: Any) -> list[int]:
    return [width for kind, layers in layer_widths(model).items() if kind.endswith("ff") for width in layers]


@pytest.mark.parametrize("importance", IMPORTANCE_METHODS)
def test_ever_more_is_masked_while_the_rest_learns_and_then_removed(
    tiny_t5, tmp_path: Path, padded_batch, monkeypatch, importance: str
) -> None:
    model, seen, closed = copy.deepcopy(tiny_t5()).train(), [], []
    before, config = stored(model), model.config.to_dict()
    own_remove, own_close = module.prune_to, Gates.close
    monkeypatch.setattr(module, "prune_to", lambda *given: seen.append(given) or own_remove(*given))
    monkeypatch.setattr(Gates, "close", lambda gates, kept: closed.append(kept) or own_close(gates, kept))
    student = run(model, tmp_path, replace(CONFIG, importance=importance))

    counts = [sum(len(kept) for kept in choice.values()) for choice in closed]
    assert counts[0] == 32 + 5 * 64 > counts[1] > counts[-1]
    if importance != "movement":  # whose scores change
        pairs = zip(closed, closed[1:], strict=False)
        assert all(set(later[name]) <= set(earlier[name]) for earlier, later in pairs for name in later)
    assert 24 <= heads(student) <= 27 and all(width % 8 == 0 for width in neurons(student))
    assert sum(neurons(student)) == pytest.approx(160, abs=5 * 4 + 8)

    ((trained, kept),) = seen
    assert kept == closed[-1] and same_weights(student, own_remove(trained, kept))
    equal(teacher_forced(student, *padded_batch, NEW), masked(trained, kept, padded_batch))
    with pytest.raises(ParityError):
        equal(teacher_forced(student, *padded_batch, NEW), teacher_forced(own_remove(model, kept), *padded_batch, NEW))
    assert not any(len(part._forward_pre_hooks) for part in trained.modules())
    assert same_weights(model, before) and model.config.to_dict() == config and model.training
    assert not student.training and {weight.grad for weight in model.parameters()} == {None}


@pytest.mark.parametrize("importance", ["taylor", "movement"])
def test_an_interrupted_run_ends_with_exactly_the_model_of_an_uninterrupted_one(
    tiny_t5, tmp_path: Path, monkeypatch, importance: str
) -> None:
    often(monkeypatch)
    config = replace(CONFIG, importance=importance)
    whole = run(tiny_t5(), tmp_path / "whole", config, validate=looking())
    assert [row["step"] for row in log(tmp_path / "whole")] == [4, 8]
    interrupt(monkeypatch, after=5)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_t5(), tmp_path / "cut", config, validate=looking())
    interrupt(monkeypatch, after=4)
    resumed = run(tiny_t5(), tmp_path / "cut", config, validate=looking())
    assert layer_widths(resumed) == layer_widths(whole) and same_weights(resumed, whole)
    assert log(tmp_path / "cut")[-1]["loss"] == log(tmp_path / "whole")[-1]["loss"]


def test_another_models_run_is_not_gone_on_from(tiny_t5, tmp_path: Path) -> None:
    config, teacher = replace(CONFIG, steps=2, importance="magnitude"), tiny_t5(seed=3)
    run(tiny_t5(), tmp_path, config, teacher=teacher)
    for model, other in ((tiny_t5(seed=2), teacher), (tiny_t5(), None)):
        with pytest.raises(InputError, match="another model or teacher"):
            run(model, tmp_path, config, teacher=other)


def test_a_checkpoint_holds_the_movement_of_every_step_before_it(tiny_t5, tmp_path: Path, monkeypatch) -> None:
    """What the last step before a kill brought is not lost: the next ranking would be another one."""
    often(monkeypatch)
    config = replace(CONFIG, importance="movement", heads=0.0, neurons=0.0)
    run(tiny_t5(), tmp_path / "whole", config)
    interrupt(monkeypatch, after=4)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_t5(), tmp_path / "cut", config)
    interrupt(monkeypatch, after=4)
    run(tiny_t5(), tmp_path / "cut", config)
    states = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["model"] for name in ("whole", "cut")]
    moved = [key for key in states[0] if "movement" in key]
    assert len(moved) == 13 and all(torch.equal(states[0][key], states[1][key]) for key in moved)
    assert all(states[0][key].any() for key in moved)


def test_without_steps_all_is_removed_at_once_and_nothing_trained(tiny_t5, tmp_path: Path) -> None:
    for importance in ("magnitude", "taylor"):
        config = replace(CONFIG, steps=0, importance=importance)
        student = run(tiny_t5(), tmp_path / "out", config)
        kept = select_kept(module._scores(tiny_t5(), toy_tokenizer(), MIXTURE, config), heads=0.25, neurons=0.5)
        assert same_weights(student, prune_to(tiny_t5(), kept)) and heads(student) < 28
    assert not (tmp_path / "out").exists()


def test_what_is_left_learns_from_the_whole_model_or_from_another_teacher(tiny_t5, tmp_path: Path) -> None:
    model, other = tiny_t5(), tiny_t5(seed=2)
    by_itself, told = (run(model, tmp_path / name, **given) for name, given in (("a", {}), ("b", {"teacher": model})))
    by_another = run(model, tmp_path / "c", teacher=other)
    assert same_weights(by_itself, told) and layer_widths(by_another) == layer_widths(told)
    assert not same_weights(by_another, told)


@pytest.mark.parametrize(
    "config", [dict(steps=1), dict(steps=3, every=25), dict(steps=4, rising=1.0, every=3)], ids=str
)
def test_few_steps_remove_all_that_was_asked_for(tiny_t5, tmp_path: Path, config: dict[str, Any]) -> None:
    student = run(tiny_t5(), tmp_path, replace(CONFIG, importance="magnitude", **config))
    kept = select_kept(
        module._scores(tiny_t5(), None, MIXTURE, replace(CONFIG, importance="magnitude")), heads=0.25, neurons=0.5
    )
    assert layer_widths(student) == sizes_of(kept, tiny_t5())


@given(st.integers(2, 3000), st.floats(0.01, 1.0))
def test_the_masked_share_rises_from_nothing_to_all_at_the_last_step(steps: int, rising: float) -> None:
    config = PruneConfig(steps=steps, rising=rising)
    shares = [config.share(step) for step in range(steps)]
    assert shares[0] == 0.0 and shares[-1] == 1.0 and shares == sorted(shares)
    reached = shares.index(1.0)
    assert reached <= max(1, int(np.ceil(steps * rising))) and all(share < 1.0 for share in shares[:reached])


@pytest.mark.parametrize("config", [dict(steps=0), dict(steps=1), dict(steps=100, rising=0.0)], ids=str)
def test_without_time_to_rise_all_is_masked_at_once(config: dict[str, Any]) -> None:
    assert PruneConfig(**config).share(0) == 1.0
    with pytest.raises(InputError, match="movement"):
        PruneConfig(importance="movement", **config)


def test_what_cannot_be_run_is_refused_and_nothing_written(tiny_t5, tmp_path: Path) -> None:
    out, mixture = tmp_path / "out", replace(MIXTURE, by_teacher=False)
    call = partial(prune, tiny_t5(), toy_tokenizer(), mixture, out)
    refused(partial(call, config=CONFIG), "device", "abacus")
    for wrong, match in (
        (dict(heads=1.0), "heads"), (dict(neurons=-0.5), "neurons"),
        (dict(multiple_of=0), "multiple_of"), (dict(training=replace(TOY, loss="sequence")), "by_teacher"),
    ):  # fmt: skip
        refused(lambda config: call(config=replace(CONFIG, **config)), "config", wrong, match=match)
    assert not out.exists()
