"""BART, mBART, Marian, M2M100, Pegasus and T5Gemma: transformers' own logits and tokens from graphs that no one traced.

Models are tiny, seeded, and of odd sizes: encoder and decoder differ in depth, heads and width.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from programs import own_generate
from safetensors.torch import save_file

from bench.profiling import logits_of
from t5accel.api import accelerate
from t5accel.backends.hf_generate import AcceleratedT5
from t5accel.backends.ort_cuda import OrtPointers
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.ort_static import OrtStatic
from t5accel.backends.tensorrt import plan
from t5accel.backends.torch_eager import TorchEager
from t5accel.backends.torch_static import TorchStatic
from t5accel.decoding.beam import beam_search
from t5accel.decoding.encoder_cache import EncoderCache
from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.ngram_lookup import prompt_lookup
from t5accel.decoding.sampling import sample
from t5accel.decoding.speculation import speculative
from t5accel.decoding.token_constraints import TokenConstraints, special_tokens
from t5accel.distillation.pruning import PruneConfig, prune
from t5accel.distillation.student import shrink_decoder
from t5accel.encoder import AcceleratedEncoder
from t5accel.errors import ExportError, InputError, ModelUnavailableError, NotT5Error
from t5accel.graphs.export import export_model, model_weights
from t5accel.graphs.manifest import write_manifest
from t5accel.models.families import BEYOND_T5, FAMILIES, GEMMAS, SIZES, T5GEMMA, T5GEMMA_2, Family, family_of
from t5accel.models.load import load_model
from t5accel.models.random_init import random_model
from t5accel.models.t5_math import cache_name
from t5accel.parity import assert_close
from t5accel.precision.calibration import CalibrationSample, collect_ranges
from t5accel.precision.convert import convert_export
from t5accel.precision.gate import text_score
from t5accel.tokenization import TokenizerFile, tokenizer_of

VOCABULARY, LONGEST, TOLERANCE = 83, 12, 2e-5
TOKENS = ("pad_token_id", "eos_token_id", "decoder_start_token_id")
V5 = int(transformers.__version__.split(".")[0]) >= 5
TWO = "marian, two vocabularies"
KINDS = (*BEYOND_T5, TWO)
HAS_2 = hasattr(transformers, T5GEMMA_2.model_class)
GEMMA_KINDS = [kind for kind in GEMMAS if kind != "t5gemma2" or HAS_2]
IMAGE_END, WINDOW = 9, 5  # T5Gemma 2's token with an embedding of its own; all T5Gemmas' sliding window
ONE_THREAD = SessionSettings(threads=1)
ENGINES = (OrtNumpy, OrtStatic)
IN_TORCH = {TorchEager: TorchEager, TorchStatic: partial(TorchStatic, buckets=(4, 16, 64))}
# How far logits are from those in fp32, in their standard deviations: tiny models are rounded more than large ones.
ROUNDED = {"int8": 0.15, "int8-per-token": 0.15, "int8-dynamic": 0.15, "int4": 0.6}


def odd_sizes(kind: str, seed: int = 0) -> dict[str, Any]:
    """Drawn anew for each kind and seed; no two of encoder and decoder are alike."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    layers, heads = (rng.choice(choice, 2, replace=False) for choice in ([1, 2, 3], [2, 3, 4, 6]))
    ff = rng.choice(range(20, 60), 2, replace=False)
    sizes = dict(
        vocab_size=VOCABULARY, d_model=12 * int(rng.integers(2, 4)), max_position_embeddings=40, scale_embedding=True,
        encoder_layers=int(layers[0]), decoder_layers=int(layers[1]), encoder_attention_heads=int(heads[0]),
        decoder_attention_heads=int(heads[1]), encoder_ffn_dim=int(ff[0]), decoder_ffn_dim=int(ff[1]),
    )  # fmt: skip
    if kind.startswith("marian"):
        last = VOCABULARY - 1
        sizes |= dict(activation_function="swish", pad_token_id=last, eos_token_id=0, decoder_start_token_id=last)
    if kind == TWO:
        more = 7 if V5 else 0  # before, both had to be of one size
        sizes |= dict(
            share_encoder_decoder_embeddings=False, vocab_size=VOCABULARY + more, decoder_vocab_size=VOCABULARY
        )
    return sizes


def gemma_sizes(kind: str, **changed: Any) -> dict[str, Any]:
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


def is_gemma(model: Any) -> bool:
    return model.config.model_type in GEMMAS


def ids_of(model: Any) -> tuple[np.ndarray, np.ndarray]:
    """Four sources padded on the right, which M2M100 sees by the pad token, and their mask.

    Of a T5Gemma, two are longer than the window.
    """
    lengths = [17, 4, 12, 2] if is_gemma(model) else [9, 4, 7, 2]
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    ids = np.random.default_rng(5).integers(3, VOCABULARY - 3, mask.shape)
    ids[0, 3] = IMAGE_END if is_gemma(model) else ids[0, 3]
    return np.where(mask, ids, model.config.pad_token_id), mask


def reference(model: Any, ids: np.ndarray, mask: np.ndarray, **options: Any) -> np.ndarray:
    """transformers' tokens (B, L) without the start token."""
    options = {"num_beams": 1, "max_new_tokens": LONGEST, **options}
    if is_gemma(model) and not HAS_2 and not isinstance(model, AcceleratedT5):
        # The cache that 4.57 makes loses the first tokens of a source that is longer than the decoder's window.
        return own_generate(model, ids, mask, **options)[:, 1:].numpy()
    tensors = {"input_ids": torch.as_tensor(ids), "attention_mask": torch.as_tensor(mask)}
    if "decoder_input_ids" in options:
        options["decoder_input_ids"] = torch.as_tensor(options["decoder_input_ids"])
    return model.generate(**tensors, do_sample=False, **options)[:, 1:].numpy()


def texts(sequences: Any, end: int) -> list[list[int]]:
    """Rows up to their end: padding differs."""
    rows = [row.tolist() for row in np.asarray(sequences)]
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


@dataclass(frozen=True, eq=False)
class Built:
    """A tiny model, where its export lies, and a batch for it."""

    model: Any
    folder: Path
    ids: np.ndarray
    mask: np.ndarray
    opened: dict[Any, Any] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.model.config.eos_token_id

    @property
    def engines(self) -> tuple[type, ...]:
        return (*ENGINES, TorchEager) if is_gemma(self.model) else (*ENGINES, *IN_TORCH)

    def tokens(self, length: int = 13) -> np.ndarray:
        """(4, length) for the decoder, the start token first; longer than a window."""
        tokens = np.random.default_rng(6).integers(3, VOCABULARY - 3, (4, length))
        tokens[:, 0] = special_tokens(self.model)["decoder_start_token_id"]
        tokens[1, -1] = IMAGE_END if is_gemma(self.model) else tokens[1, -1]
        return tokens

    def open(self, engine: type = OrtStatic, part: str = "fp32") -> Any:
        if (engine, part) not in self.opened:
            if engine not in IN_TORCH and not (self.folder / part).is_dir():
                convert_export(self.folder / "fp32", self.folder / part, part)
            if engine in IN_TORCH:
                self.opened[engine, part] = IN_TORCH[engine](self.model)
            else:
                self.opened[engine, part] = engine(self.folder / part, settings=ONE_THREAD)
        return self.opened[engine, part]

    def logits(self, tokens: np.ndarray, ids: np.ndarray | None = None, mask: np.ndarray | None = None) -> np.ndarray:
        """transformers' of what follows each token, (B, T, V)."""
        given = (self.ids if ids is None else ids, self.mask if mask is None else mask, tokens)
        with torch.inference_mode():
            source, kept, new = map(torch.as_tensor, given)
            return self.model(input_ids=source, attention_mask=kept, decoder_input_ids=new).logits.numpy()


@cache
def lively(kind: str, seed: int = 0) -> Any:
    """A model that writes its end token, so that answers have different lengths."""
    family = GEMMAS.get(kind) or BEYOND_T5[kind.split(",")[0]]
    for attempt in itertools.count(seed):
        sizes = gemma_sizes(kind) if kind in GEMMAS else odd_sizes(kind, attempt)
        model = random_model(family, sizes, seed=attempt)
        found = reference(model, *ids_of(model), max_new_tokens=2 * LONGEST, min_new_tokens=2 * LONGEST)
        common = np.bincount(found[:, 3:-1].ravel(), minlength=VOCABULARY)
        common[[*{special_tokens(model)[name] for name in TOKENS}]] = 0
        end = int(common.argmax())
        answers = texts(found[:, :LONGEST], end) if is_gemma(model) else found[:, 3:].tolist()
        if len(np.unique(found[:, 3:])) >= 10 and len({(*row,) for row in answers}) == 4:  # some loop all the same
            break
    model.config.eos_token_id = model.generation_config.eos_token_id = end
    if "forced_eos_token_id" in family.generation:
        model.generation_config.forced_eos_token_id = end
    return model


@pytest.fixture(scope="module", params=[*KINDS, *GEMMA_KINDS])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    model, folder = lively(request.param), tmp_path_factory.mktemp("family")
    export_model(model, folder / "fp32", step=not is_gemma(model))
    return Built(model, folder, *ids_of(model))


beyond_t5 = pytest.mark.parametrize("built", KINDS, indirect=True)  # but for T5Gemmas


# Logits


def test_logits_are_those_of_transformers(built: Built) -> None:
    """At once and token by token; sources with padding behind them, and one with padding in front."""
    tokens, pad = built.tokens(), built.model.config.pad_token_id
    ids, mask = np.roll(built.ids, 2, axis=1), np.roll(built.mask, 2, axis=1)
    for source, kept in ((built.ids, built.mask), (np.where(mask, ids, pad), mask)):
        expected = built.logits(tokens, source, kept)
        for backend in (built.open(engine) for engine in built.engines if engine is not TorchEager):
            state, other = (backend.new_state(backend.encode(source, kept)) for _ in range(2))
            singly = [backend.step(other, tokens[:, None, i : i + 1]) for i in range(tokens.shape[1])]
            for found in (backend.step(state, tokens[:, None]), np.concatenate(singly, axis=2)):
                np.testing.assert_allclose(found[:, 0], expected, atol=TOLERANCE)
            assert is_gemma(built.model) or not getattr(backend, "why_portable", "")


FLIPPED: dict[str, Callable[[Family], Any]] = {
    "norm": lambda family: "rms",
    "norm_first": lambda family: not family.norm_first,
    "norm_embedding": lambda family: not family.norm_embedding,
    "position_offset": lambda family: family.position_offset + 1,
    "positions_skip_padding": lambda family: not family.positions_skip_padding,
    "biases": lambda family: False,
    "has_scaled_attention": lambda family: False,
    "scales_embedding": lambda family: False,
    "head_bias": lambda family: False,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_description_that_is_wrong_in_one_switch_is_caught(kind: str) -> None:
    model = lively(kind)
    (ids, mask), family = (np.roll(one, 1, axis=1) for one in ids_of(model)), family_of(model.config, kind)
    tokens = np.random.default_rng(2).integers(3, VOCABULARY - 3, (4, 5))
    expected = Built(model, Path(), ids, mask).logits(tokens)
    right = logits_of(model_weights(model), ids, mask, tokens)
    np.testing.assert_allclose(right, expected, atol=TOLERANCE)
    caught = {}
    for switch, flip in FLIPPED.items():
        if flip(family) == getattr(family, switch) or (switch == "head_bias" and not model.final_logits_bias.any()):
            continue  # nothing of it is in the weights
        try:
            weights = model_weights(model, replace(family, **{switch: flip(family)}))
            caught[switch] = np.abs(logits_of(weights, ids, mask, tokens) - expected).max() > 1000 * TOLERANCE
        except (NotT5Error, InvalidArgument):  # there is no weight for it, or no such row
            caught[switch] = True
    assert all(caught.values()) and len(caught) >= 8 - (not family.head_bias), caught
    told = {field.name for field in fields(Family)} - {"model_type", "model_class", "sizes", "generation"}
    assert told == FLIPPED.keys()


# Tokens


@pytest.mark.parametrize("num_beams", [1, 3])
def test_tokens_are_those_of_transformers(built: Built, num_beams: int) -> None:
    """By our own loops and by transformers' on our engines, with the checkpoint's constraints."""
    rules = built.open().rules
    for penalty, early in ((1.0, False), (0.6, True), (2.0, "never")) if num_beams > 1 else ((1.0, False),):
        options: dict[str, Any] = dict(num_beams=num_beams)
        if num_beams > 1:
            options |= dict(length_penalty=penalty, early_stopping=early)
        expected = texts(reference(built.model, built.ids, built.mask, **options), built.end)
        assert num_beams > 1 or not is_gemma(built.model) or len({*map(len, expected)}) > 1
        for engine in built.engines if penalty == 1 else (OrtStatic,):
            backend = built.open(engine)
            assert backend.rules == rules
            search = greedy if num_beams == 1 else beam_search
            given = options if num_beams > 1 else {}
            found = search(backend, built.ids, built.mask, max_new_tokens=LONGEST, **given).sequences
            assert texts(found, built.end) == expected, engine
        for engine in {OrtStatic, TorchStatic} & {*built.engines}:
            served = AcceleratedT5(built.open(engine), built.model.config, built.model.generation_config)
            assert texts(reference(served, built.ids, built.mask, **options), built.end) == expected
        if rules.forced_eos_token_id is not None:
            assert {row[-1] for row in expected} == {built.end}
        assert not {token for row in expected for token in row} & {*rules.suppress_tokens}


@pytest.mark.parametrize("kind", ["m2m_100", "bart"])
@pytest.mark.parametrize("runtime", ["onnx", "torch", "torch behind a cache"])
def test_a_seed_gives_the_samples_of_transformers(kind: str, runtime: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("T5ACCEL_CACHE", str(tmp_path))
    own = random_model(FAMILIES[kind], odd_sizes(kind), seed=1)
    ours = accelerate(own, runtime=runtime[:5].strip(), progress=False)
    if "cache" in runtime:
        ours = AcceleratedT5(EncoderCache(ours.backend, max_bytes=10**6), own.config, own.generation_config)
    ids, found = torch.tensor([[5, 6, 7, 2], [9, 8, 7, 2]]), ([], [])
    calls = (
        dict(do_sample=True), dict(do_sample=True, num_beams=2), dict(do_sample=True, return_dict_in_generate=True),
        dict(do_sample=False), dict(num_beams=3), dict(do_sample=True, num_return_sequences=2),
    )  # fmt: skip
    states: dict[Any, torch.Tensor] = {}
    for number, options in enumerate(calls):  # one after the other: what each leaves of the generator counts, too
        for model, answers in zip((own, ours), found, strict=True):
            torch.set_rng_state(states[model]) if number else torch.manual_seed(0)
            answer = model.generate(ids + number, attention_mask=torch.ones_like(ids), max_new_tokens=9, **options)
            answers.append(getattr(answer, "sequences", answer).tolist())
            states[model] = torch.get_rng_state()
    assert found[0] == found[1] and len({str(answer) for answer in found[0]}) > 4


@beyond_t5
def test_constraints_of_a_checkpoint_matter(built: Built) -> None:
    """Without them there are other tokens: a forced end, and in Marian a pad that is suppressed."""
    rules, family = built.open().rules, family_of(built.model.config, "")
    assert rules == TokenConstraints(
        forced_eos_token_id=built.end if family.generation else None,
        suppress_tokens=(VOCABULARY - 1,) if family.model_type == "marian" else (),
    )
    if not family.generation:
        return
    free = OrtNumpy(built.folder / "fp32", settings=ONE_THREAD)
    free.rules = TokenConstraints()
    assert greedy(free, built.ids, built.mask, max_new_tokens=3).sequences[0, -1] != built.end
    obeying = greedy(built.open(), built.ids, built.mask, max_new_tokens=3).sequences
    assert [row[-1] for row in texts(obeying, built.end)] == [built.end] * 4
    likely = int(greedy(free, built.ids, built.mask, max_new_tokens=1).sequences[0, 0])
    free.rules = TokenConstraints(suppress_tokens=(likely, 7))
    never = dict(suppress_tokens=[likely, 7], forced_eos_token_id=None, bad_words_ids=None)
    for num_beams in (1, 4):
        expected = texts(reference(built.model, built.ids, built.mask, num_beams=num_beams, **never), built.end)
        found = beam_search(free, built.ids, built.mask, num_beams=num_beams, max_new_tokens=LONGEST).sequences
        assert texts(found, built.end) == expected and likely not in itertools.chain(*expected)


@beyond_t5
@pytest.mark.parametrize("num_beams", [1, 4])
def test_the_language_is_given_with_each_call(built: Built, num_beams: int) -> None:
    """``forced_bos_token_id``, as NLLB and mBART-50 want it; it is a new token and costs nothing."""
    for language in {11, 23, 35} - {built.end}:
        options = dict(forced_bos_token_id=language, min_new_tokens=3)
        expected = texts(reference(built.model, built.ids, built.mask, num_beams=num_beams, **options), built.end)
        assert {row[0] for row in expected} == {language}
        for engine in built.engines:
            search = greedy if num_beams == 1 else beam_search
            found = search(built.open(engine), built.ids, built.mask, max_new_tokens=LONGEST, **options)
            assert texts(found.sequences, built.end) == expected, engine
    drawn = sample(built.open(), built.ids, built.mask, max_new_tokens=3, forced_bos_token_id=language)
    assert set(drawn.sequences[:, 0]) == {language}
    with pytest.raises(InputError, match="forced_bos_token_id"):
        greedy(built.open(), built.ids, forced_bos_token_id=VOCABULARY, max_new_tokens=3)


@beyond_t5
def test_prefixes(built: Built) -> None:
    start = special_tokens(built.model)["decoder_start_token_id"]
    prefix = np.column_stack([np.full(4, start), np.random.default_rng(3).integers(3, VOCABULARY - 3, (4, 3))])
    for num_beams in (1, 3):
        options = dict(num_beams=num_beams, decoder_input_ids=prefix, forced_bos_token_id=9)  # which it then is not
        expected = texts(reference(built.model, built.ids, built.mask, **options)[:, 3:], built.end)
        for engine in (*ENGINES, TorchStatic):
            found = beam_search(built.open(engine), built.ids, built.mask, max_new_tokens=LONGEST, **options)
            assert texts(found.sequences[:, 3:], built.end) == expected
    served = AcceleratedT5(built.open(), built.model.config, built.model.generation_config)
    assert texts(reference(served, built.ids, built.mask, **options)[:, 3:], built.end) == expected
    with pytest.raises(InputError, match="absolute positions"):
        mask = torch.tensor([[0, 1, 1, 1]] * 4)
        served(torch.as_tensor(built.ids), torch.as_tensor(built.mask), torch.as_tensor(prefix), mask)


def test_drafts_and_draws(built: Built) -> None:
    """Rows accept different numbers of guesses, so their histories become unequal: positions come from the mask."""
    shape, batch = dict(max_new_tokens=24, min_new_tokens=20), (built.ids, built.mask)
    for language in (None, 11 if built.end != 11 else 12):
        shape["forced_bos_token_id"] = language
        expected = greedy(built.open(), *batch, **shape).sequences
        for backend in map(built.open, built.engines):
            found = prompt_lookup(backend, *batch, max_ngram=1, **shape)
            np.testing.assert_array_equal(found.sequences, expected)
            guessed = speculative(backend, built.open(OrtNumpy, "int4"), *batch, **shape)
            np.testing.assert_array_equal(guessed.sequences, expected)
            assert guessed.drafted > guessed.accepted > 0
    draws = [sample(backend, *batch, seed=4, temperature=0.7, num_return_sequences=2, **shape).sequences
             for backend in map(built.open, built.engines)]  # fmt: skip
    for drawn in draws[1:]:
        np.testing.assert_array_equal(drawn, draws[0])


# Rows that join, leave and change places


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_that_join_and_leave(built: Built, engine: type) -> None:
    """A source joins at whatever column the others have reached, and its positions begin at its own beginning."""
    backend, tokens = built.open(engine), built.tokens()
    expected, leaving = built.logits(tokens), tokens.shape[1] - 4
    state = backend.new_state(backend.encode(built.ids[:2], built.mask[:2]))
    for place in range(3):
        backend.step(state, tokens[:2, None, place : place + 1])
    backend.add_sources(state, backend.encode(built.ids[2:], built.mask[2:]))
    for place in range(3, leaving):
        new = np.concatenate([tokens[:2, place], tokens[2:, place - 3]])
        found = backend.step(state, new[:, None, None])[:, 0, 0]
        own = np.concatenate([expected[:2, place], expected[2:, place - 3]])
        np.testing.assert_allclose(found, own, atol=TOLERANCE)
    backend.select_sources(state, np.array([3, 1]))
    for place in range(leaving, leaving + 4):
        new = np.array([tokens[3, place - 3], tokens[1, place]])
        found = backend.step(state, new[:, None, None])[:, 0, 0]
        np.testing.assert_allclose(found, [expected[3, place - 3], expected[1, place]], atol=TOLERANCE)
    backend.replace_sources(state, backend.encode(built.ids[:1], built.mask[:1]), np.array([1]))
    for place in range(3):
        found = backend.step(state, np.array([5, tokens[0, place]])[:, None, None])[1, 0, 0]
        np.testing.assert_allclose(found, expected[0, place], atol=TOLERANCE)


@beyond_t5
def test_by_pointers(built: Built) -> None:
    backend = OrtPointers(built.folder / "fp32", settings=ONE_THREAD)
    for search in (greedy, beam_search):
        found, expected = (search(one, built.ids, built.mask, max_new_tokens=LONGEST, forced_bos_token_id=9)
                           for one in (backend, built.open()))  # fmt: skip
        np.testing.assert_array_equal(found.sequences, expected.sequences)


# Other precisions


@pytest.mark.parametrize("precision", ROUNDED)
def test_in_integers(built: Built, precision: str) -> None:
    tokens = built.tokens(8)
    expected = built.logits(tokens)
    for engine in ENGINES:
        backend = built.open(engine, precision)
        state = backend.new_state(backend.encode(built.ids, built.mask))
        found = np.concatenate([backend.step(state, tokens[:, None, i : i + 1]) for i in range(8)], axis=2)[:, 0]
        away = np.sqrt(np.square(found - expected).mean()) / expected.std()
        assert 0 < away < ROUNDED[precision], (engine, away)
        assert is_gemma(built.model) or not getattr(backend, "why_portable", "")
        answers = greedy(backend, built.ids, built.mask, max_new_tokens=LONGEST).sequences
        assert not {*answers.ravel()} & {*backend.rules.suppress_tokens} - {backend.pad_token_id}


@beyond_t5
def test_in_fp16(built: Built) -> None:
    tokens = built.tokens(8)
    backend = built.open(OrtNumpy, "fp16")
    found = backend.step(backend.new_state(backend.encode(built.ids, built.mask)), tokens[:, None])[:, 0]
    assert np.abs(found - built.logits(tokens)).max() < 0.05


def test_the_shortlist(built: Built, tmp_path: Path) -> None:
    """Suppressed tokens are no candidates."""
    if model_weights(built.model).head_bias:
        with pytest.raises(InputError, match="bias"):  # a larger one has a test of its own
            export_model(built.model, tmp_path / "short", shortlist=True)
        return
    export_model(built.model, tmp_path / "short", shortlist=True, step=not is_gemma(built.model))
    for engine in ENGINES:
        backend = engine(tmp_path / "short", settings=ONE_THREAD)
        backend.rules = replace(backend.rules, suppress_tokens=(5, 6))
        free = built.open(OrtNumpy).rules
        plain = OrtNumpy(built.folder / "fp32", settings=ONE_THREAD)
        plain.rules = replace(free, suppress_tokens=(5, 6))
        found, expected = (greedy(one, built.ids, built.mask, max_new_tokens=LONGEST) for one in (backend, plain))
        np.testing.assert_array_equal(found.sequences, expected.sequences)
        assert backend.shortlist.steps.total() > backend.shortlist.fallbacks.total()


def test_the_shortlist_of_a_head_with_a_bias(tmp_path: Path) -> None:
    """Marian's, with a vocabulary whose bias fills a page of the file of weights; without it there are other tokens."""
    sizes = odd_sizes("marian") | dict(vocab_size=1100, pad_token_id=1099, decoder_start_token_id=1099)
    model = random_model(BEYOND_T5["marian"], sizes, seed=3)
    ids, mask = ids_of(model)
    shape = dict(max_new_tokens=30, min_new_tokens=30)
    expected = reference(model, ids, mask, **shape)
    assert len(np.unique(expected)) > 10
    manifest = export_model(model, tmp_path / "short", shortlist=True, step=True)
    assert manifest.shortlist["bias"]["shape"] == [1100]
    for engine in ENGINES:
        backend = engine(tmp_path / "short", settings=ONE_THREAD)
        np.testing.assert_array_equal(greedy(backend, ids, mask, **shape).sequences, expected)
        assert backend.shortlist.steps.total() == 30 and backend.shortlist.fallbacks.total() < 5
        short, head = backend.shortlist, backend.shortlist.head
        short.head, choose = replace(head, bias=None), short.choose
        short.choose = lambda near, suppressed: choose([near[0] - head.bias, *near[1:]], suppressed)  # noqa: B023
        assert not np.array_equal(greedy(backend, ids, mask, **shape).sequences, expected)
    convert_export(tmp_path / "short", tmp_path / "int8", "int8")
    steps = [greedy(engine(tmp_path / "int8", settings=ONE_THREAD), ids, mask, **shape).sequences for engine in ENGINES]
    np.testing.assert_array_equal(*steps)
    content = json.loads((tmp_path / "short/manifest.json").read_text())
    for wrong in (None, {}, {**content["shortlist"]["bias"], "offset": -1}):
        content["shortlist"]["bias"] = wrong
        write_manifest(tmp_path / "short", content)
        with pytest.raises(ExportError, match="damaged"):
            OrtNumpy(tmp_path / "short", settings=ONE_THREAD)


# Loading, the one-liner, and what is refused


def test_from_a_folder_by_the_one_liner(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("T5ACCEL_CACHE", str(tmp_path / "cache"))
    built.model.save_pretrained(tmp_path / "saved")
    loaded, tokenizer = load_model(tmp_path / "saved")
    assert tokenizer is None and type(loaded) is type(built.model)
    model = accelerate(tmp_path / "saved", threads=1, progress=False)
    for num_beams in (1, 4):
        expected = reference(built.model, built.ids, built.mask, num_beams=num_beams)
        found = reference(model, built.ids, built.mask, num_beams=num_beams)
        assert texts(found, built.end) == texts(expected, built.end)
    assert accelerate(loaded, precision="int8", threads=1, progress=False).backend.manifest.recipe["name"] == "int8"
    in_torch = accelerate(loaded, precision="bf16", threads=1).generate(
        torch.as_tensor(built.ids[:1]), max_new_tokens=4
    )
    assert in_torch.shape[1] <= 5


@beyond_t5
def test_more_tokens_than_positions_are_refused(built: Built) -> None:
    assert built.open(TorchEager).positions == 40
    for engine in (OrtStatic, TorchStatic):
        backend, source = built.open(engine), np.full((1, 41), 5)
        assert (backend.positions, backend.source_vocab_size) == (40, built.model.config.vocab_size)
        with pytest.raises(InputError, match="41 tokens|got 41"):
            backend.encode(source, np.ones_like(source))
        with pytest.raises(InputError, match="positions"):
            greedy(backend, built.ids, max_new_tokens=41)
        found = greedy(backend, source[:, :40], max_new_tokens=40, min_new_tokens=40).sequences
        expected = greedy(built.open(TorchEager), source[:, :40], max_new_tokens=40, min_new_tokens=40).sequences
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("size", [size for size, (family, _) in SIZES.items() if not family.is_gemma])
def test_published_sizes(size: str) -> None:
    millions = {
        "bart-base": 139.4, "bart-large": 406.3, "distilbart-12-6": 305.5, "mbart-large-50": 610.9, "opus-mt": 74.4,
        "nllb-200-distilled-600M": 615.1, "m2m100_418M": 483.9, "pegasus-large": 570.8, "pegasus-xsum": 569.7,
    }  # fmt: skip
    with torch.device("meta"):  # shapes without memory
        model, tokenizer = load_model(f"random:{size}")
    assert tokenizer is None and round(model.num_parameters() / 1e6, 1) == millions[size]


def test_a_resized_model_can_be_opened(tmp_path: Path) -> None:
    model = copy.deepcopy(lively("marian"))
    size = model.config.vocab_size + 30
    model.resize_token_embeddings(size)  # transformers 5 leaves the head's `out_features` as they were
    export_model(model, tmp_path / "export")
    assert OrtStatic(tmp_path / "export", settings=ONE_THREAD).vocab_size == size


def test_padding_inside_a_prefix_of_an_m2m100_is_refused() -> None:
    model = lively("m2m_100")
    ours, ids = accelerate(model, progress=False), torch.tensor([[5, 6, 7]])
    pad, start = model.config.pad_token_id, model.config.decoder_start_token_id
    for ask in (ours, ours.generate):
        with pytest.raises(InputError, match="no padding before other tokens"):
            ask(input_ids=ids, attention_mask=torch.ones_like(ids), decoder_input_ids=torch.tensor([[start, pad, 8]]))


def test_other_families_are_refused_by_a_list_of_ours(tmp_path: Path) -> None:
    whisper = transformers.WhisperConfig(
        d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=1, decoder_attention_heads=1,
        vocab_size=32, encoder_ffn_dim=8, decoder_ffn_dim=8, num_mel_bins=4, max_source_positions=8, pad_token_id=0,
    )  # fmt: skip
    for config in (whisper, transformers.GPT2Config()):
        config.save_pretrained(tmp_path / config.model_type)
        with pytest.raises(NotT5Error, match=f"'{config.model_type}'.*t5, .*bart, .*NLLB"):
            load_model(tmp_path / config.model_type)
    with pytest.raises(NotT5Error, match="whisper"):
        export_model(transformers.WhisperForConditionalGeneration(whisper), tmp_path / "out")
    headless = lively("bart").model
    with pytest.raises(NotT5Error, match="BartForConditionalGeneration"):
        export_model(headless, tmp_path / "out")


def test_features_for_t5s_refuse_other_families(tmp_path: Path) -> None:
    for attempt in (
        lambda: shrink_decoder(lively("bart"), [0]),
        lambda: prune(lively("bart"), None, [], tmp_path, PruneConfig()),
    ):
        with pytest.raises(NotT5Error, match="'bart'"):
            attempt()


TABLES = [f"model.{name}.weight" for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens")]
TABLES += ["lm_head.weight"]
POSITIONS = ["model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"]


@pytest.mark.parametrize("held", [TABLES + POSITIONS, TABLES[:1], TABLES[1:3], TABLES[2:3], TABLES[::3], TABLES[3:]])
def test_one_embedding_of_marian_under_any_of_its_names(tmp_path: Path, held: list[str]) -> None:
    """As opus-mt checkpoints of several years hold it, with positions or without."""
    model = random_model(BEYOND_T5["marian"], odd_sizes("marian"), seed=3)
    every = model.state_dict()
    weights = {name: weight.clone() for name, weight in every.items() if name in held or name not in TABLES + POSITIONS}
    model.save_pretrained(tmp_path)
    if len(held) == 1:
        (tmp_path / "model.safetensors").unlink()
        torch.save(weights, tmp_path / "pytorch_model.bin")
    else:
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if held == TABLES[3:] and not V5:
        with pytest.raises(ModelUnavailableError, match="is incomplete"):  # which 4.57 leaves without any embedding
            load_model(tmp_path)
        return
    ids = torch.tensor([[5, 6, 7, 0]])
    found, expected = (one(input_ids=ids, decoder_input_ids=ids).logits for one in (load_model(tmp_path)[0], model))
    torch.testing.assert_close(found, expected)
    assert expected[0].argmax(dim=-1).unique().numel() > 1


def test_marian_s_tokenizer_is_that_of_transformers(tmp_path: Path) -> None:
    """Two sentencepiece files, which `TokenizerFile` refuses."""
    sentencepiece = pytest.importorskip("sentencepiece")

    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"the house {word} is small and the street is long" for word in "abcdefghij"))
    options = dict(input=str(text), vocab_size=40, hard_vocab_limit=False, minloglevel=2, bos_id=-1)
    sentencepiece.SentencePieceTrainer.train(model_prefix=str(tmp_path / "source"), **options)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "source.model"))
    vocabulary = {"</s>": 0, "<unk>": 1}
    for number in range(pieces.get_piece_size()):
        vocabulary.setdefault(pieces.id_to_piece(number), len(vocabulary))
    vocabulary["<pad>"] = len(vocabulary)
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    for name in ("source.spm", "target.spm"):
        (tmp_path / name).write_bytes((tmp_path / "source.model").read_bytes())
    files = [str(tmp_path / name) for name in ("source.spm", "target.spm", "vocab.json")]
    tokenizer = transformers.MarianTokenizer(*files, source_lang="en", target_lang="de")
    count = len(vocabulary)
    sizes = odd_sizes("marian") | dict(vocab_size=count, pad_token_id=count - 1, decoder_start_token_id=count - 1)
    model = random_model(BEYOND_T5["marian"], sizes)
    export_model(model, tmp_path / "export", tokenizer=tokenizer)
    with pytest.raises(ModelUnavailableError, match="Marian's tokenizer"):
        TokenizerFile(tmp_path / "export")
    ours, texts = tokenizer_of(tmp_path / "export"), ["the house is small", "a"]
    assert ours(texts)["input_ids"] == (rows := tokenizer(texts)["input_ids"])
    assert ours.batch_decode(rows) == tokenizer.batch_decode(rows)


@pytest.mark.parametrize("kind", ["bart", "m2m_100"])
def test_weights_that_are_no_floats_or_nobodys_are_refused(kind: str) -> None:
    """Codes of 8 bits, as bitsandbytes has them; a table of changed tokens, as peft adds one."""
    model = copy.deepcopy(lively(kind))
    model.model.decoder.embed_tokens.register_buffer("delta", torch.ones(3))
    with pytest.raises(NotT5Error, match="There is a weight decoder.embed_tokens.delta"):
        model_weights(model)
    model = copy.deepcopy(lively(kind))
    codes = torch.ones_like(model.model.encoder.layers[0].fc1.weight, dtype=torch.int8)
    model.model.encoder.layers[0].fc1.weight = torch.nn.Parameter(codes, requires_grad=False)
    with pytest.raises(NotT5Error, match="encoder.layers.0.fc1.weight must be in floating point, got torch.int8"):
        model_weights(model)


def test_a_model_with_a_copied_configuration_and_shared_weights(tmp_path: Path) -> None:
    model = copy.deepcopy(lively("bart"))
    model.config = copy.deepcopy(model.config)
    layer = next(stack for stack in (model.model.encoder, model.model.decoder) if len(stack.layers) > 1).layers
    layer[1].fc1.weight = layer[0].fc1.weight
    assert export_model(model, tmp_path / "x").files, "compared with the model"


def test_calibration_knows_both_vocabularies_and_the_positions(built: Built) -> None:
    backend = built.open()
    last, start = getattr(backend, "source_vocab_size", backend.vocab_size) - 1, backend.decoder_start_token_id

    def ranges(ids: Any, tokens: Any) -> Any:
        sample = CalibrationSample(np.array([ids]), np.ones((1, len(ids)), np.int64), np.array([tokens]))
        return collect_ranges(built.folder / "fp32", [sample])

    assert ranges([5, last], [start, 5])
    beyond = [([5] * 41, [start], "at most 40 tokens"), ([5], [5] * 41, "at most 40 tokens")]
    if built.model.config.model_type in GEMMAS:  # whose positions have no end
        beyond = []
    for ids, tokens, message in (([5, last + 1], [start], f"input_ids must lie in 0 … {last}"), *beyond):
        with pytest.raises(InputError, match=message):
            ranges(ids, tokens)


def test_scores_are_of_answers_that_the_positions_allow(tmp_path: Path, mini) -> None:
    """Twice the tokens of the longest target may be more than there are positions."""
    tokenizer, sizes = mini[1], odd_sizes("bart") | dict(max_position_embeddings=16, vocab_size=len(mini[1]))
    export_model(random_model(BEYOND_T5["bart"], sizes), tmp_path / "x", tokenizer=tokenizer)
    target = "The house is small and old, and the door is green."
    assert 9 <= len(tokenizer(target)["input_ids"]) <= 16
    rows = [{"source": "No", "target": target}]
    assert text_score(rows, "exact_match", threads=1)(tmp_path / "x") == {"exact_match": 0}


# T5Gemma


@pytest.mark.parametrize("built", GEMMA_KINDS, indirect=True)
def test_a_t5gemma_masks_padding_in_its_encoder_alone(built: Built) -> None:
    model, ids = built.model, torch.as_tensor(built.ids)
    ours, encoder = accelerate(model, progress=False), AcceleratedEncoder.from_pretrained(model, progress=False)
    start = torch.full((len(ids), 1), 2)
    expected, real = model.get_encoder()(ids).last_hidden_state.detach(), built.mask == 1
    np.testing.assert_allclose(encoder(ids).last_hidden_state[real], expected[real], atol=100 * TOLERANCE)
    if model.config.model_type == "t5gemma":
        for call in (partial(ours, decoder_input_ids=start), ours.get_encoder()):
            with pytest.raises(InputError, match="attention_mask must be given to a T5Gemma"):
                call(input_ids=ids)
        ids = ids[:1]
    found, expected = (each(ids, decoder_input_ids=start[: len(ids)]).logits.detach() for each in (ours, model))
    np.testing.assert_allclose(found, expected, atol=100 * TOLERANCE)


@pytest.mark.parametrize("built", GEMMA_KINDS, indirect=True)
def test_what_a_t5gemma_cannot_do_is_refused(built: Built, tmp_path: Path, monkeypatch) -> None:
    model, kind = built.model, built.model.config.model_type
    with pytest.raises(InputError, match="step must be left out"):
        export_model(model, tmp_path / "out", step=True)
    with pytest.raises(NotT5Error, match="device='cpu'"):
        TorchStatic(model)
    with pytest.raises(InputError, match=f"fp16 is not for a {kind}"):
        convert_export(built.folder / "fp32", tmp_path / "fp16", "fp16")
    with pytest.raises(InputError, match=f"no {kind} for TensorRT"):
        plan(built.open(OrtNumpy).manifest)
    for attempt in (partial(shrink_decoder, model, [0]), partial(prune, model, None, [], tmp_path, PruneConfig())):
        with pytest.raises(NotT5Error, match=f"'{kind}'"):
            attempt()
    served = AcceleratedT5(built.open(OrtStatic), model.config, model.generation_config)
    prefix, mask = torch.as_tensor(built.tokens(3)), torch.tensor([[0, 1, 1]] * 4)
    with pytest.raises(InputError, match="absolute positions"):
        served(torch.as_tensor(built.ids), torch.as_tensor(built.mask), prefix, mask)
    with pytest.raises(InputError, match="at most max_source_tokens, 200"):
        built.open(OrtStatic).encode(*np.ones((2, 1, 201), dtype=np.int64))
    monkeypatch.setenv("T5ACCEL_CACHE", str(tmp_path / "cache"))
    ours = accelerate(model, threads=1, progress=False)
    assert "decoder_step.onnx" in ours.backend.why_portable
    with pytest.raises(InputError, match="pixel_values must be left out"):
        ours.generate(torch.as_tensor(built.ids[:1]), pixel_values=torch.zeros(1, 3, 8, 8))
    built.open(OrtStatic, "int8")
    stored = (built.folder / "int8/decoder.onnx").read_bytes()
    assert b"shared.weight." in stored and b"MatMulNBits" in stored, "embedding and head are one tensor"


@pytest.mark.parametrize("kind", GEMMA_KINDS)
def test_a_t5gemma_begins_labels_with_its_decoders_token_and_keeps_its_constants(
    kind: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("T5ACCEL_CACHE", str(tmp_path))
    model = random_model(FAMILIES[kind], gemma_sizes(kind), seed=1)
    model.generation_config.decoder_start_token_id = 5
    ids, labels, tokens = torch.tensor([[5, 6, 7]]), torch.tensor([[9, 10, 11, -100]]), torch.tensor([[2, 0, 33, 40]])
    ours = accelerate(model, progress=False)
    with torch.no_grad():
        assert_close(ours(ids, labels=labels).loss, model(ids, labels=labels).loss, atol=1e-5)
    model.config.use_cache = False  # its decoder's counts
    with torch.no_grad():
        found, expected = (each(ids, decoder_input_ids=tokens) for each in (accelerate(model, progress=False), model))
    assert_close(found.logits, expected.logits, atol=1e-5)
    if kind == "t5gemma":  # without a cache it masks padding
        with pytest.raises(InputError, match="use_cache must be left out for a T5Gemma"):
            ours(ids, decoder_input_ids=tokens, use_cache=False)
        model.config.decoder.use_cache = False
        with pytest.raises(InputError, match="use_cache must be left out for a T5Gemma"):
            accelerate(model, progress=False)(ids, decoder_input_ids=tokens)
        model.config.decoder.use_cache = True
        ids = ids.repeat(2, 1)
        ids[1] += 9
        whole = model.generate(ids, max_new_tokens=8, do_sample=False)
        ends = int(whole[0, 3])  # of one row before the other
        options = dict(max_new_tokens=8, do_sample=False, eos_token_id=ends, use_cache=False)
        assert torch.equal(ours.generate(ids, **options), model.generate(ids, **options))
    model.resize_token_embeddings(len(model.lm_head.out_proj.weight) + 6)
    larger = accelerate(model, progress=False)
    assert torch.equal(larger.generate(ids, max_new_tokens=5), model.generate(ids, max_new_tokens=5))
    model.config.decoder.rms_norm_eps = 1e-4
    with pytest.raises(InputError, match="decoder.rms_norm_eps must be 1e-06, as the model was built, got 0.0001"):
        accelerate(model, progress=False)
    model.config.decoder.rms_norm_eps = 1e-6
    if kind == "t5gemma":
        model.config.encoder.layer_types = [*reversed(model.config.encoder.layer_types)]
        with pytest.raises(InputError, match="encoder.layer_types must be sliding_attention, as the model was built"):
            accelerate(model, progress=False)


@pytest.mark.parametrize("kind", ["bart", "mbart", "marian", "pegasus", "m2m_100"])
def test_a_loss_comes_with_a_cache_where_transformers_returns_one(kind: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("T5ACCEL_CACHE", str(tmp_path))
    model, ids = random_model(FAMILIES[kind], odd_sizes(kind), seed=1), torch.tensor([[5, 6, 7, 2]])
    found, expected = (each(ids, labels=ids).get(cache_name()) for each in (accelerate(model, progress=False), model))
    assert (found is None) == (expected is None) == (kind != "m2m_100")


def test_norms_compute_with_what_they_hold(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("T5ACCEL_CACHE", str(tmp_path))
    model, ids = random_model(FAMILIES["bart"], odd_sizes("bart"), seed=1), torch.tensor([[5, 6, 7, 2]])
    norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    for norm in norms:
        norm.eps = 0.01
    with torch.no_grad():
        found, expected = (each(ids, decoder_input_ids=ids).logits for each in (accelerate(model), model))
    assert_close(found, expected, atol=1e-5)
    norms[0].eps = 0.1
    with pytest.raises(NotT5Error, match="must have the same eps, got 0.01, 0.1."):
        accelerate(model)


def test_attention_without_soft_caps_is_refused(tmp_path: Path) -> None:
    """That of torch, which transformers 4.57 takes by default."""
    model = random_model(T5GEMMA, gemma_sizes("t5gemma"))
    model.config._attn_implementation = "sdpa"
    with pytest.raises(InputError, match="must be 'eager', got 'sdpa'"):
        export_model(model, tmp_path / "out")


@pytest.mark.skipif(not HAS_2, reason="T5Gemma 2 is in transformers 5 alone")
def test_other_rotary_positions_are_refused(tmp_path: Path) -> None:
    yarn = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=50)
    ropes = dict(full_attention=yarn, sliding_attention=dict(rope_type="default", rope_theta=10000.0))
    model = random_model(T5GEMMA_2, gemma_sizes("t5gemma2", rope_parameters=ropes))
    with pytest.raises(NotT5Error, match="'default' or 'linear', got 'yarn'"):
        export_model(model, tmp_path / "out")
    ropes["full_attention"] = dict(rope_type="linear", rope_theta=10000.0, factor=8.0)
    export_model(random_model(T5GEMMA_2, gemma_sizes("t5gemma2", rope_parameters=ropes)), tmp_path / "out")


@pytest.mark.skipif(HAS_2, reason="transformers 5 knows it")
def test_an_older_transformers_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5gemma2"}')
    for name in (tmp_path, "random:t5gemma-2-270m-270m"):
        with pytest.raises(ModelUnavailableError, match="install transformers 5"):
            load_model(name)


@pytest.mark.skipif(not HAS_2, reason="T5Gemma 2 is in transformers 5 alone")
def test_published_size_of_t5gemma_2() -> None:
    with torch.device("meta"):  # shapes without memory
        model, tokenizer = load_model("random:t5gemma-2-270m-270m")
    text, vision = (
        sum(weight.numel() for weight in part.parameters()) / 1e6
        for part in (model.model.decoder, model.model.encoder.vision_tower)
    )
    assert tokenizer is None and round(text, 1) == 268.1 and vision < 0.1
