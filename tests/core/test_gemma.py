"""T5Gemma and T5Gemma 2: transformers' own logits and tokens, beyond their sliding windows, from our own graphs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from programs import own_generate
from test_families import Built, check_rows_that_join_and_leave, reference, texts

from bench.baselines.ort_iobinding import OrtBound
from bench.profiling import logits_of
from t5accel.api import accelerate
from t5accel.backends.hf_generate import AcceleratedT5
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.ort_static import OrtStatic
from t5accel.backends.tensorrt import plan
from t5accel.backends.torch_eager import TorchEager
from t5accel.backends.torch_static import TorchStatic
from t5accel.decoding.beam import beam_search
from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.ngram_lookup import prompt_lookup
from t5accel.decoding.sampling import sample
from t5accel.decoding.speculation import speculative
from t5accel.distillation.pruning import PruneConfig, prune
from t5accel.distillation.student import shrink_decoder
from t5accel.errors import InputError, ModelUnavailableError, NotT5Error
from t5accel.graphs.export import export_model, model_weights
from t5accel.models.families import GEMMAS, T5GEMMA, T5GEMMA_2
from t5accel.models.load import load_model
from t5accel.models.random_init import random_model
from t5accel.precision.convert import convert_export
from t5accel.serve.request import GenerationRequest
from t5accel.serve.running_batch import RunningBatch, RunningSequence, sequences_for

VOCABULARY, LONGEST, WINDOW, TOLERANCE = 97, 16, 5, 2e-5
HAS_2 = hasattr(transformers, T5GEMMA_2.model_class)
KINDS = [kind for kind in GEMMAS if kind != "t5gemma2" or HAS_2]
ONE_THREAD = SessionSettings(threads=1)
ENGINES = (OrtNumpy, OrtStatic)
IMAGE_END = 9  # the token with an embedding of its own
ROUNDED = {"int8": 0.1, "int4": 0.5}  # how far logits are from those in fp32, in their standard deviations


def sizes(kind: str, **changed: Any) -> dict[str, Any]:
    """Two stacks that differ in all that may differ; both types of layers, and a decoder that is deeper."""
    both = dict(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40, num_attention_heads=4, head_dim=12,
        query_pre_attn_scalar=12, sliding_window=WINDOW, attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
        max_position_embeddings=200, attention_bias=kind == "t5gemma2",
    ) | changed  # fmt: skip
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    encoder = both | dict(num_hidden_layers=2, num_key_value_heads=1, layer_types=types[:2])
    decoder = both | dict(num_hidden_layers=3, num_key_value_heads=2, layer_types=types, sliding_window=WINDOW - 1)
    if kind == "t5gemma":
        return dict(encoder=encoder, decoder=decoder | dict(hidden_size=32), vocab_size=VOCABULARY)
    vision = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    text = dict(text_config=encoder, vision_config=vision, eoi_token_index=IMAGE_END)
    return dict(encoder=text, decoder=decoder, eoi_token_index=IMAGE_END)


def ids_of(model: Any) -> tuple[np.ndarray, np.ndarray]:
    """Four sources, two of them longer than the window, padded on the right, and their mask."""
    mask = (np.arange(17) < np.array([[17], [4], [12], [2]])).astype(np.int64)
    ids = np.random.default_rng(5).integers(3, VOCABULARY, mask.shape)
    ids[0, 3] = IMAGE_END
    return ids * mask, mask


def transformers_own(model: Any, ids: np.ndarray, mask: np.ndarray, **options: Any) -> np.ndarray:
    """transformers' tokens (B, L) without the start token."""
    if HAS_2:
        return reference(model, ids, mask, **options)
    # The cache that 4.57 makes loses the first tokens of a source that is longer than the decoder's window.
    return own_generate(model, ids, mask, **options)[:, 1:].numpy()


@cache
def lively(kind: str) -> Any:
    """A model that writes its end token, so that answers have different lengths."""
    for seed in itertools.count():
        model = random_model(GEMMAS[kind], sizes(kind), seed=seed)
        found = transformers_own(model, *ids_of(model), max_new_tokens=2 * LONGEST, min_new_tokens=2 * LONGEST)
        common = np.bincount(found[:, 5:-1].ravel(), minlength=VOCABULARY)
        common[:3] = 0
        end = int(common.argmax())
        if len(np.unique(found)) > 25 and len({(*row,) for row in texts(found[:, :LONGEST], end)}) == 4:
            model.config.eos_token_id = model.generation_config.eos_token_id = end
            return model


@pytest.fixture(scope="module", params=KINDS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    model, folder = lively(request.param), tmp_path_factory.mktemp("gemma")
    export_model(model, folder / "fp32")
    return Built(model, folder, *ids_of(model))


def some_tokens(length: int = 13) -> np.ndarray:
    tokens = np.random.default_rng(6).integers(3, VOCABULARY, (4, length))
    tokens[:, 0], tokens[1, -1] = 2, IMAGE_END
    return tokens


@pytest.mark.parametrize("engine", [*ENGINES, OrtBound])
def test_logits_are_those_of_transformers(built: Built, engine: type) -> None:
    """At once and token by token; sources with padding behind them, and one with padding in front."""
    tokens, backend = some_tokens(), built.open(engine)
    for shift in (0, 2):
        source, kept = np.roll(built.ids, shift, axis=1), np.roll(built.mask, shift, axis=1)
        expected = built.logits(tokens, source, kept)
        state, other = (backend.new_state(backend.encode(source, kept)) for _ in range(2))
        singly = [backend.step(other, tokens[:, None, i : i + 1]) for i in range(tokens.shape[1])]
        for found in (backend.step(state, tokens[:, None]), np.concatenate(singly, axis=2)):
            np.testing.assert_allclose(found[:, 0], expected, atol=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_constant_is_caught(kind: str) -> None:
    model, tokens = lively(kind), some_tokens()
    weights, (ids, mask) = model_weights(model), ids_of(model)
    expected = Built(model, Path(), ids, mask).logits(tokens)
    np.testing.assert_allclose(logits_of(weights, ids, mask, tokens), expected, atol=TOLERANCE)
    weights.require_all_read()
    (before, behind), (past, _) = weights.windows["encoder"], weights.windows["decoder"]
    kinds, types = (weights.layer_types[stack][::-1] for stack in ("encoder", "decoder")), weights.layer_types
    wrong: dict[str, dict[str, Any]] = {
        "before": dict(windows=dict(weights.windows, encoder=(before - 1, behind))),
        "behind": dict(windows=dict(weights.windows, encoder=(before, behind + 1))),
        "past": dict(windows=dict(weights.windows, decoder=(past + 1, 0))),
        "encoder's types": dict(layer_types=dict(types, encoder=next(kinds))),
        "decoder's types": dict(layer_types=dict(types, decoder=("full_attention", "sliding_attention") * 2)),
        "cap": dict(logit_cap=None),
        "width": dict(norm_epsilon=0.1),
        "activation": dict(activation="silu"),
    }  # fmt: skip
    if kind == "t5gemma":
        for stack in types:
            wrong[f"{stack}'s scores"] = dict(score_caps=dict(weights.score_caps, **{stack: None}))
    else:
        wrong["image"] = dict(image_end=None)
    wrong["decoder's types"]["layer_types"]["decoder"] = ("sliding_attention",) * 3
    for name, change in wrong.items():
        found = logits_of(replace(weights, **change), ids, mask, tokens)
        assert np.abs(found - expected).max() > 100 * TOLERANCE, name


@pytest.mark.parametrize("num_beams", [1, 3])
def test_tokens_are_those_of_transformers(built: Built, num_beams: int) -> None:
    """By our own loops and by transformers' on our engines, with answers of different lengths."""
    for penalty, early in ((1.0, False), (0.6, True)) if num_beams > 1 else ((1.0, False),):
        options: dict[str, Any] = dict(num_beams=num_beams, max_new_tokens=LONGEST)
        if num_beams > 1:
            options |= dict(length_penalty=penalty, early_stopping=early)
        expected = texts(transformers_own(built.model, built.ids, built.mask, **options), built.end)
        assert num_beams > 1 or len({*map(len, expected)}) > 1
        search = beam_search if num_beams > 1 else partial(greedy)
        given = options if num_beams > 1 else dict(max_new_tokens=LONGEST)
        for engine in (*ENGINES, OrtBound, TorchEager):
            found = search(built.open(engine), built.ids, built.mask, **given).sequences
            assert texts(found, built.end) == expected, engine
        served = AcceleratedT5(built.open(OrtStatic), built.model.config, built.model.generation_config)
        assert texts(reference(served, built.ids, built.mask, **options), built.end) == expected


@pytest.mark.parametrize("engine", [*ENGINES, TorchEager])
def test_drafts_and_draws(built: Built, engine: type) -> None:
    """Rows accept different numbers of guesses, so their histories become unequal: positions come from the mask."""
    backend, shape = built.open(engine), dict(max_new_tokens=24, min_new_tokens=20)
    expected = greedy(built.open(OrtNumpy), built.ids, built.mask, **shape).sequences
    for found in (
        prompt_lookup(backend, built.ids, built.mask, max_ngram=1, **shape),
        speculative(backend, built.open(OrtNumpy, "int4"), built.ids, built.mask, **shape),
    ):
        np.testing.assert_array_equal(found.sequences, expected)
    assert found.drafted > found.accepted > 0
    draws = [sample(one, built.ids, built.mask, seed=4, temperature=0.7, num_return_sequences=2, **shape).sequences
             for one in (backend, built.open(OrtNumpy))]  # fmt: skip
    np.testing.assert_array_equal(*draws)


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_that_join_and_leave(built: Built, engine: type) -> None:
    check_rows_that_join_and_leave(built, engine, some_tokens()[:, :13], TOLERANCE)


@pytest.mark.parametrize("precision", ROUNDED)
def test_in_integers(built: Built, precision: str) -> None:
    tokens = some_tokens(8)
    backend, expected = built.open(OrtStatic, precision), built.logits(tokens)
    found = backend.step(backend.new_state(backend.encode(built.ids, built.mask)), tokens[:, None])[:, 0]
    away = np.sqrt(np.square(found - expected).mean()) / expected.std()
    assert 0 < away < ROUNDED[precision]
    stored = (built.folder / precision / "decoder.onnx").read_bytes()
    assert b"shared.weight." in stored and b"MatMulNBits" in stored  # embedding and head are one tensor


def test_the_shortlist(built: Built, tmp_path: Path) -> None:
    export_model(built.model, tmp_path / "short", shortlist=True)
    shape = dict(max_new_tokens=24, min_new_tokens=24)
    expected = greedy(built.open(OrtNumpy), built.ids, built.mask, **shape).sequences
    for engine in ENGINES:
        backend = engine(tmp_path / "short", settings=ONE_THREAD)
        np.testing.assert_array_equal(greedy(backend, built.ids, built.mask, **shape).sequences, expected)
        assert backend.shortlist.steps > backend.shortlist.fallbacks


def test_from_a_folder_by_the_one_liner(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("T5ACCEL_CACHE", str(tmp_path / "cache"))
    built.model.save_pretrained(tmp_path / "saved")
    loaded, tokenizer = load_model(tmp_path / "saved")
    assert tokenizer is None and type(loaded) is type(built.model)
    model = accelerate(tmp_path / "saved", threads=1, progress=False)
    assert "decoder_step.onnx" in model.backend.why_portable
    for num_beams in (1, 4):
        expected = transformers_own(built.model, built.ids, built.mask, num_beams=num_beams, max_new_tokens=12)
        found = reference(model, built.ids, built.mask, num_beams=num_beams)
        assert texts(found, built.end) == texts(expected, built.end)
    assert accelerate(loaded, precision="int8", threads=1, progress=False).backend.manifest.recipe["name"] == "int8"
    bf16 = accelerate(loaded, precision="bf16", threads=1)
    assert bf16.generate(torch.as_tensor(built.ids[:1]), max_new_tokens=4).shape[1] <= 5
    with pytest.raises(InputError, match="pixel_values must be left out"):
        model.generate(torch.as_tensor(built.ids[:1]), pixel_values=torch.zeros(1, 3, 8, 8))


def test_served_with_others(built: Built) -> None:
    """Requests that join a running batch, one of them with beams, get what each gets alone."""
    backend, waiting = built.open(OrtStatic), [1, 3, 1, 1]
    batch, done, step = RunningBatch(backend), {}, 0
    while len(done) < 4:
        if step % 2 == 0 and step // 2 < 4:
            row, beams = step // 2, waiting[step // 2]
            source = [built.ids[row : row + 1, : built.mask[row].sum()].repeat(beams, axis=0)]
            request = GenerationRequest(source[0][0].tolist(), num_beams=beams, max_new_tokens=LONGEST)
            (writer,) = sequences_for(backend, request)
            batch.add(backend.encode(source[0], np.ones_like(source[0])), [RunningSequence(writer, row)])
        ended = batch.step()
        done |= {part.owner: part.writer.answers()[0].tokens for part in ended}
        batch.remove(ended)
        step += 1
    for row, beams in enumerate(waiting):
        alone = beam_search if beams > 1 else greedy
        given = dict(num_beams=beams) if beams > 1 else {}
        found = alone(backend, built.ids[row : row + 1], built.mask[row : row + 1], max_new_tokens=LONGEST, **given)
        assert done[row] == texts(found.sequences, built.end)[0]


def test_what_it_cannot_do_is_refused(built: Built, tmp_path: Path) -> None:
    model, kind = built.model, built.model.config.model_type
    with pytest.raises(InputError, match="step must be left out"):
        export_model(model, tmp_path / "out", step=True)
    with pytest.raises(NotT5Error, match="device='cpu'"):
        TorchStatic(model)
    with pytest.raises(InputError, match=f"fp16 is not for a {kind}"):
        convert_export(built.folder / "fp32", tmp_path / "fp16", "fp16")
    with pytest.raises(InputError, match=f"TensorRT runs no {kind}"):
        plan(built.open(OrtNumpy).manifest)
    for attempt in (partial(shrink_decoder, model, [0]), partial(prune, model, None, [], tmp_path, PruneConfig())):
        with pytest.raises(NotT5Error, match=f"'{kind}'"):
            attempt()
    served = AcceleratedT5(built.open(OrtStatic), model.config, model.generation_config)
    prefix, mask = torch.as_tensor(some_tokens(3)), torch.tensor([[0, 1, 1]] * 4)
    with pytest.raises(InputError, match="absolute positions"):
        served(torch.as_tensor(built.ids), torch.as_tensor(built.mask), prefix, mask)
    with pytest.raises(InputError, match="at most max_source_tokens, 200"):
        built.open(OrtStatic).encode(*np.ones((2, 1, 201), dtype=np.int64))


def test_attention_without_soft_caps_is_refused(tmp_path: Path) -> None:
    """That of torch, which transformers 4.57 takes by default."""
    model = random_model(T5GEMMA, sizes("t5gemma"))
    model.config._attn_implementation = "sdpa"
    with pytest.raises(InputError, match="must be 'eager', got 'sdpa'"):
        export_model(model, tmp_path / "out")


@pytest.mark.skipif(not HAS_2, reason="T5Gemma 2 is in transformers 5 alone")
def test_other_positions_are_refused(tmp_path: Path) -> None:
    yarn = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=50)
    ropes = dict(full_attention=yarn, sliding_attention=dict(rope_type="default", rope_theta=10000.0))
    model = random_model(T5GEMMA_2, sizes("t5gemma2", rope_parameters=ropes))
    with pytest.raises(NotT5Error, match="'default' or 'linear', got 'yarn'"):
        export_model(model, tmp_path / "out")
    ropes["full_attention"] = dict(rope_type="linear", rope_theta=10000.0, factor=8.0)
    export_model(random_model(T5GEMMA_2, sizes("t5gemma2", rope_parameters=ropes)), tmp_path / "out")


@pytest.mark.skipif(HAS_2, reason="transformers 5 knows it")
def test_an_older_transformers_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5gemma2"}')
    for name in (tmp_path, "random:t5gemma-2-270m-270m"):
        with pytest.raises(ModelUnavailableError, match="install transformers 5"):
            load_model(name)


@pytest.mark.skipif(not HAS_2, reason="T5Gemma 2 is in transformers 5 alone")
def test_published_size() -> None:
    with torch.device("meta"):  # shapes without memory
        model, tokenizer = load_model("random:t5gemma-2-270m-270m")
    text, vision = (
        sum(weight.numel() for weight in part.parameters()) / 1e6
        for part in (model.model.decoder, model.model.encoder.vision_tower)
    )
    assert tokenizer is None and round(text, 1) == 268.1 and vision < 0.1
