"""A backend behind generate(): the tokens, scores and losses of transformers' own model, in each of its modes."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
import transformers
from refused import refused
from silence import quiet
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, LogitsProcessor, TextIteratorStreamer
from transformers.generation import (
    EosTokenCriteria,
    ForcedEOSTokenLogitsProcessor,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
)

from bench.evaluation import rows as task_rows
from bench.evaluation import source_text
from t5accel.backends.hf_cache import DecoderCache
from t5accel.backends.hf_generate import AcceleratedT5
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.torch_eager import TorchEager
from t5accel.decoding.encoder_cache import EncoderCache
from t5accel.decoding.greedy_search import greedy
from t5accel.errors import InputError, T5AccelError
from t5accel.graphs.export import export_model
from t5accel.models.t5_math import cache_name
from t5accel.parity import assert_close, assert_varied
from t5accel.tokenization import tokenizer_of

V5 = int(transformers.__version__.split(".")[0]) >= 5
ATOL = 1e-4

EXPORTS = tempfile.TemporaryDirectory()  # gone when the process ends
EXPORTED: WeakKeyDictionary[Any, Path] = WeakKeyDictionary()


def on_onnx(own: Any) -> OrtNumpy:
    """A new ONNX Runtime backend of a model, which is exported once."""
    if own not in EXPORTED:
        EXPORTED[own] = Path(EXPORTS.name) / uuid4().hex
        export_model(own, EXPORTED[own])
    return OrtNumpy(EXPORTED[own], settings=SessionSettings(threads=1), verify=False)


BACKENDS: dict[str, Callable[[Any], Any]] = {"torch": TorchEager, "onnx": on_onnx}


class Log:
    """What a backend was asked to do: arguments of ``new_state``, shapes of what it read, counts of the rest."""

    def __init__(self, backend: Any):
        self.started: list[int] = []
        self.stepped: list[tuple[int, ...]] = []
        self.counts = dict.fromkeys(("encode", "reorder", "rollback", "select_sources"), 0)
        for name in ("new_state", "step", "next_tokens", *self.counts):
            if hasattr(backend, name):
                setattr(backend, name, self.logged(name, getattr(backend, name)))

    def logged(self, name: str, method: Any) -> Any:
        def call(first: Any, *rest: Any, **options: Any) -> Any:
            if name == "new_state":
                self.started += rest
            elif name in ("step", "next_tokens"):
                self.stepped.append(rest[0].shape)
            else:
                self.counts[name] += 1
            return method(first, *rest, **options)

        return call


@pytest.fixture(params=BACKENDS)
def build(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """From transformers' model to a backend of each runtime."""
    return BACKENDS[request.param]


def behind(backend: Any, own: Any) -> AcceleratedT5:
    return AcceleratedT5(backend, own.config, own.generation_config)


@pytest.fixture
def pair(tiny_t5) -> tuple[Any, AcceleratedT5]:
    """transformers' own model and ours, on PyTorch: `test_conformance` compares the backends."""
    own = tiny_t5()
    return own, behind(TorchEager(own), own)


@pytest.fixture
def each_pair(tiny_t5, build) -> tuple[Any, AcceleratedT5]:
    """The same of each runtime."""
    own = tiny_t5()
    return own, behind(build(own), own)


@pytest.fixture(scope="module")
def batch(padded_batch) -> dict[str, torch.Tensor]:
    ids, mask = padded_batch
    return {"input_ids": torch.as_tensor(ids), "attention_mask": torch.as_tensor(mask)}


def reference(own: Any, batch: dict[str, torch.Tensor], *, seed: int = 5, **options: Any) -> Any:
    """What transformers' own model generates; a decoder deeper than the encoder needs its cache made for it."""
    if options.get("use_cache", True):
        options[cache_name()] = EncoderDecoderCache(DynamicCache(), DynamicCache())
    torch.manual_seed(seed)
    return own.generate(**batch, **options)


def check(own: Any, ours: Any, batch: dict[str, torch.Tensor], *, distinct: int = 3, **options: Any) -> torch.Tensor:
    """Both generate the same, which varies; returns it."""
    expected = reference(own, batch, **options)
    assert_varied(expected, distinct)
    left = torch.get_rng_state()
    torch.manual_seed(5)
    with quiet():
        sequences = ours.generate(**batch, **options)
    assert sequences.dtype == torch.int64 and torch.equal(torch.get_rng_state(), left)
    assert torch.equal(sequences, expected), "the tokens differ"
    return expected


# ---------------------------------------------------------------------------------------------- each mode of generate()


class Favour(LogitsProcessor):
    """Raises the scores of the even tokens."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, ::2] += 1.5
        return scores


SHORT = dict(max_new_tokens=10)
LOOKUP = dict(max_new_tokens=40, prompt_lookup_num_tokens=3, max_matching_ngram_size=1)
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "two beams": dict(num_beams=2),
    "four beams": dict(num_beams=4, length_penalty=2.0, early_stopping=True),
    "short is better": dict(num_beams=3, length_penalty=-1.0, early_stopping="never", eos_token_id=list(range(1, 20))),
    "beams returned": dict(num_beams=4, num_return_sequences=3),
    "sampling": dict(do_sample=True, top_k=30, top_p=0.9, temperature=1.3),
    "samples returned": dict(do_sample=True, num_return_sequences=3, typical_p=0.9),
    "beams sampled": dict(do_sample=True, num_beams=3, top_k=0),
    "repetition_penalty": dict(repetition_penalty=1.7),
    "no_repeat_ngram_size": dict(no_repeat_ngram_size=1, num_beams=2),
    "source's tokens": dict(encoder_repetition_penalty=3.0, encoder_no_repeat_ngram_size=2),
    "forced": dict(forced_bos_token_id=17, forced_eos_token_id=1),
    "min_new_tokens": dict(min_new_tokens=9, eos_token_id=list(range(1, 100))),
    "rows that end": dict(eos_token_id=list(range(1, 60))),
    "samples that end": dict(do_sample=True, num_return_sequences=2, top_k=0, eos_token_id=list(range(1, 60))),
    "beams that end": dict(num_beams=3, eos_token_id=list(range(1, 60)), num_return_sequences=2),
    "suppressed": dict(suppress_tokens=list(range(0, 300, 3)), begin_suppress_tokens=list(range(0, 300, 5))),
    "no suppressed token": dict(suppress_tokens=list(range(-299, 0, 3))),  # transformers counts none from the end
    "sequence_bias": dict(sequence_bias=[[[40], 1.2], [[41, 42], 3.0]], renormalize_logits=True),
    "logits_processor": dict(logits_processor=[Favour()], num_beams=2),
    "stopping_criteria": dict(stopping_criteria=[lambda ids, scores, **_: ids[:, -1] % 4 == 0]),
    "allowed tokens": dict(prefix_allowed_tokens_fn=lambda row, ids: list(range(3 + row, 200)), num_beams=2),
    "without an end": dict(eos_token_id=[], repetition_penalty=1.7),
    "no cache": dict(use_cache=False),
    "beams without a cache": dict(use_cache=False, num_beams=3),
}
if not V5:  # which refuses it
    MODES["forced and suppressed"] = dict(forced_bos_token_id=17, suppress_tokens=[17])


SAME_AS_GREEDY = {"greedy", "no cache", "no suppressed token"}


@pytest.mark.parametrize("mode", MODES)
def test_each_mode(each_pair, batch, mode: str) -> None:
    own, ours = each_pair
    expected = check(own, ours, batch, **SHORT, **MODES[mode])
    plain = reference(own, batch, **SHORT)
    assert torch.equal(expected, plain) == (mode in SAME_AS_GREEDY), "a mode should change something here"


def test_greedy_search_without_an_end_and_a_stored_kind_of_cache(pair, batch) -> None:
    own, _ = pair
    stored = copy.deepcopy(own.generation_config)
    stored.cache_implementation, stored.return_legacy_cache, stored.prefill_chunk_size = "static", True, 4
    ours = AcceleratedT5(TorchEager(own), own.config, stored)
    check(own, ours, batch, max_new_tokens=8, eos_token_id=[])
    with pytest.raises(InputError, match="return_dict must be left out"):
        ours.generate(**batch, return_dict=False)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_the_bundled_model(mini, build, num_beams: int) -> None:
    own, tokenizer = mini
    texts = [source_text(name, row) for name in ("translation", "questions") for row in task_rows(name, limit=1)]
    batch = dict(tokenizer(texts, return_tensors="pt", padding=True))
    assert not batch["attention_mask"].all()
    check(own, behind(build(own), own), batch, distinct=6, num_beams=num_beams, max_new_tokens=20)


@pytest.mark.parametrize("options", [{}, dict(num_beams=3), dict(do_sample=True)], ids=["greedy", "beams", "sampling"])
def test_a_prefix_is_read_in_one_step(pair, batch, options: dict[str, Any]) -> None:
    own, ours = pair
    prefix = torch.as_tensor(np.random.default_rng(3).integers(3, 300, (6, 4)))
    log = Log(ours.backend)
    sequences = check(own, ours, {**batch, "decoder_input_ids": prefix}, **SHORT, **options)
    assert torch.equal(sequences[:, 1:5], prefix)  # transformers puts the start token in front
    rows = options.get("num_beams", 1)
    assert log.stepped == [(6, rows, 5)] + [(6, rows, 1)] * 9


# ------------------------------------------------------------------------------------------ what the backend is asked


def test_nothing_of_a_source_is_repeated(pair, batch) -> None:
    _, ours = pair
    log = Log(ours.backend)
    ours.generate(**batch, num_beams=4, **SHORT)
    assert log.counts["encode"] == 1 and log.started == [4] and log.counts["select_sources"] == 0
    assert log.stepped == [(6, 4, 1)] * 10 and 0 < log.counts["reorder"] < 10
    log = Log(ours.backend)
    ours.generate(**batch, do_sample=True, num_return_sequences=3, max_new_tokens=2)
    assert log.started == [3] and log.stepped == [(6, 3, 1)] * 2


@pytest.mark.parametrize("num_beams", [1, 3])
def test_an_answer_does_not_depend_on_the_batch(pair, batch, num_beams: int) -> None:
    _, ours = pair
    together = ours.generate(**batch, num_beams=num_beams, **SHORT)
    assert_varied(together)
    for row, (ids, mask) in enumerate(zip(*batch.values(), strict=True)):
        alone = ours.generate(ids[mask.bool()][None], num_beams=num_beams, **SHORT)[0]
        assert torch.equal(alone, together[row, : len(alone)]) and not together[row, len(alone) :].any()


def test_the_encoder_cache_stands_behind_it(tiny_t5, batch) -> None:
    own = tiny_t5()
    ours = behind(EncoderCache(TorchEager(own)), own)
    for _ in range(2):
        check(own, ours, batch, num_beams=3, **SHORT)
    check(own, ours, {name: tensor[:1] for name, tensor in batch.items()}, **LOOKUP)


# ------------------------------------------------------------------------------------------------- scores and streamers


@pytest.mark.parametrize(
    "options",
    [{}, dict(do_sample=True, top_k=9), dict(num_beams=3, num_return_sequences=2), dict(num_beams=2, do_sample=True)],
    ids=["greedy", "sampling", "beams", "beams sampled"],
)
def test_scores(pair, batch, options: dict[str, Any]) -> None:
    own, ours = pair
    options = {**SHORT, **options, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected = reference(own, batch, **options)
    assert_varied(expected.sequences)
    torch.manual_seed(5)
    with quiet():
        actual = ours.generate(**batch, **options)
    assert torch.equal(actual.sequences, expected.sequences)
    for name in ("scores", "logits"):
        assert len(actual[name]) == len(expected[name]) == 10
        assert_close(torch.stack(actual[name]), torch.stack(expected[name]), atol=ATOL)
    assert actual.keys() - {cache_name()} == expected.keys() - {cache_name()}
    if "num_beams" in options:
        assert_close(actual.sequences_scores, expected.sequences_scores, atol=ATOL)
        assert torch.equal(actual.beam_indices, expected.beam_indices)
    indices = expected.get("beam_indices")
    transitions = [m.compute_transition_scores(expected.sequences, out.scores, indices, normalize_logits=True)
                   for m, out in ((ours, actual), (own, expected))]  # fmt: skip
    assert_close(*transitions, atol=ATOL)


def test_a_streamer(mini) -> None:
    model, tokenizer = mini
    streamer = TextIteratorStreamer(tokenizer, skip_special_tokens=True)
    batch = tokenizer("translate English to German: Where is the station?", return_tensors="pt")
    behind(TorchEager(model), model).generate(**batch, streamer=streamer, max_new_tokens=16)
    expected = model.generate(**batch, max_new_tokens=16)[0]
    assert "".join(streamer) == tokenizer.decode(expected, skip_special_tokens=True)


# ----------------------------------------------------------------------------------------------- encode once, use often


def test_encoder_outputs_are_used_again(pair, batch) -> None:
    own, ours = pair
    log = Log(ours.backend)
    with quiet():
        encoded = ours.get_encoder()(**batch)
        for options in (dict(num_beams=3), {}, dict(num_beams=3), dict(do_sample=True, num_return_sequences=2)):
            expected = reference(own, batch, **SHORT, **options)
            for mask in ({}, {"attention_mask": batch["attention_mask"]}):
                torch.manual_seed(5)
                assert torch.equal(ours.generate(encoder_outputs=encoded, **mask, **SHORT, **options), expected)
    assert encoded.rows.tolist() == list(range(6)) and log.counts["encode"] == 1


def test_rows_of_encoder_outputs_are_chosen(pair, batch) -> None:
    own, ours = pair
    chosen = [4, 0, 3]
    encoded = replace(ours.encoder(**batch), rows=np.array(chosen))
    some = {name: tensor[chosen] for name, tensor in batch.items()}
    options = dict(num_beams=3, **SHORT)
    expected = reference(own, some, **options)
    assert_varied(expected)
    assert torch.equal(ours.generate(encoder_outputs=encoded, **options), expected)


def test_encoder_outputs_that_are_of_no_source_or_another_mask(pair, batch) -> None:
    def call(rows: list[int]) -> Any:
        encoded = replace(pair[1].encoder(**batch), rows=np.array(rows, dtype=np.int64))
        return pair[1](encoder_outputs=encoded, decoder_input_ids=torch.zeros(len(rows), 1, dtype=torch.int64))

    refused(call, "rows", [0, 1, 0, 1], [0, 0, 1], [0, 0, 0, 1, 1], [6], [-1], [], match="encoder_outputs")
    generate = partial(pair[1].generate, encoder_outputs=pair[1].encoder(**batch), **SHORT)
    refused(generate, "attention_mask", torch.ones_like(batch["input_ids"]))


def test_hidden_states_are_not_handed_out(pair, batch) -> None:
    """Nor row numbers in their place, which would be pooled without an error."""
    encoded = pair[1].get_encoder()(**batch)
    for use in (lambda: encoded.last_hidden_state, lambda: encoded[0], lambda: encoded.to_tuple(), lambda: [*encoded]):
        with pytest.raises(InputError, match="stay in the backend"):
            use()


def test_without_a_mask_as_transformers_own(pair, batch) -> None:
    """4.57 takes padding for padding, 5.x takes it for text."""
    own, ours = pair
    ids = {"input_ids": batch["input_ids"]}
    expected = check(own, ours, ids, num_beams=2, **SHORT)
    assert torch.equal(expected, reference(own, batch, num_beams=2, **SHORT)) != V5
    with torch.no_grad():
        assert_close(*(model(**ids, decoder_input_ids=decoder_ids(6, 3)).logits for model in (ours, own)), atol=ATOL)


# ------------------------------------------------------------------------------------------------------- guessing ahead


def test_prompt_lookup(pair, batch) -> None:
    own, ours = pair
    varied = 0
    for row in range(6):
        one = {name: tensor[row : row + 1] for name, tensor in batch.items()}
        greedy = reference(own, one, max_new_tokens=40)
        if len(greedy.unique()) < 8:
            continue  # a row that repeats one token for ever
        varied += 1
        log = Log(ours.backend)
        answer = check(own, ours, one, **LOOKUP)
        assert torch.equal(answer[:, : greedy.shape[1]], greedy)  # 4.57 may give more tokens than it is asked for
        assert log.counts["rollback"] and max(shape[2] for shape in log.stepped) > 1, (
            "something should have been guessed"
        )
        assert log.started == [1]
    assert varied > 2


ASSISTANTS = {"itself": 1, "another model": 2}


@pytest.mark.parametrize("ours_assists", [True, False], ids=["ours", "torch's"])
@pytest.mark.parametrize("seed", ASSISTANTS.values(), ids=ASSISTANTS.keys())
def test_an_assistant(tiny_t5, batch, seed: int, ours_assists: bool) -> None:
    kind = "shallower-decoder"  # its own generate() needs no cache made for it
    own, assistant = tiny_t5(kind), copy.deepcopy(tiny_t5(kind, seed=seed))
    ours = behind(TorchEager(own), own)
    helper = behind(TorchEager(assistant), assistant) if ours_assists else assistant
    helper.generation_config.update(num_assistant_tokens=4, assistant_confidence_threshold=0.0)
    one = {name: tensor[:1] for name, tensor in batch.items()}
    expected = reference(own, one, max_new_tokens=20)
    assert_varied(expected)
    log, assistants_log = Log(ours.backend), Log(helper.backend) if ours_assists else None
    answer = ours.generate(**one, assistant_model=helper, max_new_tokens=20)  # both lines warn of how they do this
    assert torch.equal(answer, expected)
    if seed == ASSISTANTS["itself"]:
        assert len(log.stepped) < 12, "guesses should have been right"
    else:
        assert log.counts["rollback"], "guesses should have been wrong"
        assert not ours_assists or len(assistants_log.started) > 1, "it should have gone back by more than a step"


# ------------------------------------------------------------------------------------------------------- forward itself


def decoder_ids(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.as_tensor(np.random.default_rng(seed).integers(3, 300, (rows, length)))


@torch.no_grad()
def test_forward_gives_the_logits(tiny_t5, kind: str, batch) -> None:
    own = tiny_t5(kind)
    ours, tokens = behind(TorchEager(own), own), decoder_ids(6, 7)
    expected = own(**batch, decoder_input_ids=tokens).logits
    assert len(expected.argmax(-1).unique()) > 8
    whole = ours(**batch, decoder_input_ids=tokens, use_cache=False)
    assert whole.past_key_values is None and whole.loss is None and whole.logits.dtype == torch.float32
    assert_close(whole.logits, expected, atol=ATOL)
    first = ours(encoder_outputs=ours.encoder(**batch), decoder_input_ids=tokens[:, :3])
    second = ours(cache=first[cache_name()], decoder_input_ids=tokens[:, 3:6].to(torch.int32))
    third = ours(past_key_values=second.past_key_values, decoder_input_ids=tokens[:, 6:])
    chunks = torch.cat([first.logits, second.logits, third.logits], 1)  # none was written over
    assert_close(chunks, expected, atol=ATOL)
    assert third.past_key_values.get_seq_length() == 7


@torch.no_grad()
def test_labels(pair, batch) -> None:
    own, ours = pair
    labels = decoder_ids(6, 5)
    labels[1, 3:] = labels[4, 2:] = -100
    expected, actual = own(**batch, labels=labels), ours(**batch, labels=labels)
    assert_close(actual.loss, expected.loss, atol=1e-5)
    assert_close(actual.logits, expected.logits, atol=ATOL)
    other = ours(**batch, labels=labels.roll(1, 0)).loss
    assert abs(other - expected.loss) > 1e-3
    shifted = own.prepare_decoder_input_ids_from_labels(labels)
    assert torch.equal(ours.prepare_decoder_input_ids_from_labels(labels), shifted)
    loss, logits, cache = ours(**batch, labels=labels, return_dict=False)
    assert torch.equal(loss, actual.loss) and torch.equal(logits, actual.logits) and isinstance(cache, DecoderCache)


PADDING = torch.tensor([0, 2, 1, 3, 0, 2])


@torch.no_grad()
@pytest.mark.parametrize("num_beams", [1, 3])
def test_prefixes_of_unequal_length(pair, batch, num_beams: int) -> None:
    own, ours = pair
    mask = (torch.arange(5) >= PADDING[:, None]).long()
    prefix = decoder_ids(6, 5) * mask
    prefix[torch.arange(6), PADDING] = 0  # the start token
    both = dict(decoder_input_ids=prefix, decoder_attention_mask=mask)
    expected, actual = own(**batch, **both).logits, ours(**batch, **both).logits
    real = mask.bool()
    assert_close(actual[real], expected[real], atol=ATOL)
    sequences = check(own, ours, {**batch, **both}, num_beams=num_beams, **SHORT)
    assert torch.equal(sequences[:, :5], prefix)
    unmasked = reference(own, {**batch, "decoder_input_ids": prefix}, num_beams=num_beams, **SHORT)
    assert not torch.equal(sequences, unmasked)


def test_masks_of_the_decoder_that_it_does_not_take(pair, batch) -> None:
    ours, tokens, name = pair[1], decoder_ids(6, 3), "decoder_attention_mask"
    wrong = [torch.tensor([mask] * 6) for mask in ([1, 1, 0], [1, 0, 1], [0, 0, 0], [1, 1])]
    refused(partial(ours, **batch, decoder_input_ids=tokens), name, *wrong)
    cache = ours(**batch, decoder_input_ids=tokens).past_key_values
    wrong = [torch.tensor([mask] * 6) for mask in ([1, 1, 1, 0, 1], [1, 1, 1, 1, 0], [1, 1])]
    refused(partial(ours, past_key_values=cache, decoder_input_ids=tokens[:, :2]), name, *wrong)


# ------------------------------------------------------------------------------------------------------------ the cache


def check_program(own: Any, ours: Any, batch: dict[str, torch.Tensor], program: list[tuple[str, int]]) -> None:
    """Operations on a cache and on whole sequences, for generate() has both; the logits must be the sequences' own."""
    rows = 2
    encoded = ours.encoder(**batch).repeated(rows)
    cache = encoded.start(ours.backend)
    source = {name: tensor.repeat_interleave(rows, 0) for name, tensor in batch.items()}
    tokens = torch.zeros((len(source["input_ids"]), 0), dtype=torch.int64)
    for name, seed in program:
        rng = np.random.default_rng(seed)
        if name == "step":
            tokens = torch.cat([tokens, decoder_ids(len(tokens), 1 + seed % 3, seed)], 1)
            given = ours.prepare_inputs_for_generation(tokens, past_key_values=cache)
            expected = own(**source, decoder_input_ids=tokens).logits[:, cache.length :]
            assert_close(ours(**given).logits, expected, atol=ATOL)
        elif name == "crop":
            count = seed % (tokens.shape[1] + 1)
            if cache.history is None or cache.history.shape[1] < tokens.shape[1]:
                count = 0  # after a reordering generate() steps before it goes back
            if count:
                cache.crop(-count)
                tokens = tokens[:, : tokens.shape[1] - count]
        elif name == "reorder":
            index = torch.as_tensor(rng.integers(0, rows, len(tokens)) + np.arange(len(tokens)) // rows * rows)
            cache.reorder_cache(index)
            tokens = tokens[index]
        else:
            sources = rng.permutation(len(tokens) // rows)[: max(1, len(tokens) // rows - 1)]
            index = torch.as_tensor((sources[:, None] * rows + np.arange(rows)).reshape(-1))
            cache.batch_select_indices(index)
            tokens, source = tokens[index], {name: tensor[index] for name, tensor in source.items()}
        assert cache.get_seq_length() == tokens.shape[1]


# "step" n reads 1 + n % 3 tokens. Back by less than the last step, and by more; each followed by everything else.
PROGRAM = [("step", 2), ("crop", 1), ("step", 3), ("step", 1), ("crop", 3), ("step", 4), ("crop", 1), ("step", 0),
           ("reorder", 1), ("step", 2), ("step", 6), ("crop", 2), ("reorder", 2), ("step", 1), ("step", 7), ("crop", 3),
           ("select", 1), ("step", 9), ("crop", 1), ("step", 5), ("crop", 9), ("crop", 1), ("step", 2)]  # fmt: skip


@torch.no_grad()
def test_a_program_of_operations(each_pair, batch) -> None:
    check_program(*each_pair, batch, PROGRAM)


@torch.no_grad()
def test_crop_reads_its_argument_as_transformers_does(pair, batch) -> None:
    own, ours = pair
    one = {name: tensor[:1] for name, tensor in batch.items()}
    theirs = EncoderDecoderCache(DynamicCache(), DynamicCache())
    own(**one, decoder_input_ids=decoder_ids(1, 5), **{cache_name(): theirs})
    cache = ours.encoder(**one).start(ours.backend)
    ours(**ours.prepare_inputs_for_generation(decoder_ids(1, 5), past_key_values=cache))
    for argument in (-1, -2, 0) if V5 else (7, -1, 3, 0):
        theirs.crop(argument)
        cache.crop(argument)
        assert cache.get_seq_length() == theirs.get_seq_length()


def test_a_crop_beyond_what_is_known(pair, batch) -> None:
    _, ours = pair
    cache = ours(**batch, decoder_input_ids=decoder_ids(6, 3)).past_key_values
    ours(decoder_input_ids=decoder_ids(6, 2), past_key_values=cache)
    with pytest.raises(InputError, match="crop"):
        cache.crop(-3)
    cache.crop(-5)
    assert cache.get_seq_length() == 0
    for length in (3, 4):
        tokens = decoder_ids(6, length)
        ours(**ours.prepare_inputs_for_generation(tokens, past_key_values=cache))
    cache.reorder_cache(torch.arange(6))
    with pytest.raises(InputError, match="crop"):
        cache.crop(-2)  # the rows of the tokens that were seen may be others now


def test_a_crop_after_padding(pair, batch) -> None:
    _, ours = pair
    cache = ours.encoder(**batch).start(ours.backend)
    tokens, mask = decoder_ids(6, 4), torch.ones(6, 4, dtype=torch.int64)
    mask[2, :2] = 0
    given = dict(past_key_values=cache, decoder_attention_mask=mask)
    ours(**ours.prepare_inputs_for_generation(tokens, **given))
    with pytest.raises(InputError, match="crop"):
        cache.crop(-1)
    logits = ours(past_key_values=cache, decoder_input_ids=tokens[:, :1]).logits
    cache.crop(-1)
    assert torch.allclose(ours(past_key_values=cache, decoder_input_ids=tokens[:, :1]).logits, logits, atol=ATOL)
    with pytest.raises(InputError, match="crop"):
        cache.crop(-2)


def test_rows_that_cannot_be_reordered_or_selected(pair, batch) -> None:
    encoded = pair[1].encoder(**batch).repeated(2)
    cache = pair[1](encoder_outputs=encoded, decoder_input_ids=decoder_ids(12, 2)).past_key_values
    refused(cache.reorder_cache, "beam_idx", *map(torch.tensor, ([*range(10), 0, 1], list(range(11)), [0] * 12)))
    refused(cache.batch_select_indices, "indices", *map(torch.tensor, ([0], [1, 0], [0, 1, 0, 1], [0, 2])))


@torch.no_grad()
def test_a_cache_goes_on_in_another_call(pair, batch) -> None:
    own, ours = pair
    begun = ours.generate(**batch, max_new_tokens=5, return_dict_in_generate=True)
    log = Log(ours.backend)
    options = dict(decoder_input_ids=begun.sequences, max_new_tokens=5)
    sequences = ours.generate(**batch, **options, past_key_values=begun.past_key_values)
    assert torch.equal(sequences, reference(own, batch, **SHORT)) and log.stepped == [(6, 1, 1)] * 5


PLAIN = [
    {}, dict(min_new_tokens=4), dict(min_length=4), dict(min_new_tokens=8), dict(eos_token_id=5),
    dict(eos_token_id=[1, 5]), dict(eos_token_id=[5, 1, 17], min_new_tokens=3), dict(eos_token_id=list(range(1, 60))),
    dict(decoder_input_ids=torch.full((6, 3), 7)), dict(decoder_input_ids=torch.full((6, 3), 7), min_length=6),
    dict(bad_words_ids=[[9]], forced_eos_token_id=1, suppress_tokens=list(range(0, 300, 3))),
    dict(forced_bos_token_id=17, min_new_tokens=2, renormalize_logits=True),
]  # fmt: skip
PLAIN_BEAMS = [
    dict(num_beams=2), dict(num_beams=4, num_return_sequences=4, length_penalty=2.0, early_stopping="never"),
    dict(decoder_input_ids=torch.full((6, 3), 7), min_length=6), dict(forced_bos_token_id=17, renormalize_logits=True),
    dict(bad_words_ids=[[9]], forced_eos_token_id=1, suppress_tokens=list(range(0, 300, 3))),
    dict(no_repeat_ngram_size=2), dict(repetition_penalty=1.7, no_repeat_ngram_size=1, num_return_sequences=3),
    dict(no_repeat_ngram_size=1, eos_token_id=list(range(1, 60)), early_stopping=True, renormalize_logits=True),
    dict(repetition_penalty=3.0, decoder_input_ids=torch.full((6, 3), 7), min_new_tokens=4, forced_eos_token_id=1),
]  # fmt: skip


@pytest.mark.parametrize("options", [*PLAIN, *(dict(num_beams=3) | each for each in PLAIN_BEAMS)])
def test_plain_searches_are_our_own_loops(pair, batch, monkeypatch, options: dict[str, Any]) -> None:
    own, ours = pair
    monkeypatch.setattr(DecoderCache, "append", None)  # which any other loop would call
    check(own, ours, batch, max_new_tokens=8, **options)


@pytest.mark.parametrize(
    "options",
    [
        dict(do_sample=True), dict(repetition_penalty=1.5), dict(max_time=60.0), dict(eos_token_id=[1, 300]),
        dict(pad_token_id=5, eos_token_id=list(range(1, 60))), dict(begin_suppress_tokens=list(range(0, 300, 2))),
        dict(do_sample=True, num_return_sequences=2, logits_processor=[Favour()], min_new_tokens=3),
        dict(stopping_criteria=[lambda ids, scores: ids[:, -1] % 3 == 0], eos_token_id=5),
    ],
)  # fmt: skip
def test_greedy_search_and_sampling_with_anything_else_run_step_by_step(pair, batch, monkeypatch, options) -> None:
    own, ours = pair
    monkeypatch.setattr("t5accel.backends.hf_loops.greedy_steps", None)
    monkeypatch.setattr(AcceleratedT5, "__call__", None, raising=False)  # as transformers' loop would
    check(own, ours, batch, max_new_tokens=8, **options)


@pytest.mark.parametrize(
    "options",
    [
        dict(return_dict_in_generate=True), dict(output_scores=True, return_dict_in_generate=True),
        dict(use_cache=False), dict(decoder_attention_mask=torch.ones(6, 1, dtype=torch.int64)),
        dict(num_beams=2, sequence_bias=[[[40], 1.2]]), dict(num_beams=2, do_sample=True),
        dict(num_beams=2, output_scores=True, return_dict_in_generate=True),
        dict(num_beams=2, bad_words_ids=[[]] if V5 else [[4, 5]]),
    ],
)  # fmt: skip
def test_whatever_else_is_asked_runs_in_transformers_loop(pair, batch, monkeypatch, options: dict[str, Any]) -> None:
    own, ours = pair
    for name in ("greedy_steps", "BeamState", "BackendLoops._steps"):
        monkeypatch.setattr(f"t5accel.backends.hf_loops.{name}", None)
    expected = reference(own, batch, max_new_tokens=5, **options)
    torch.manual_seed(5)
    found = ours.generate(**batch, max_new_tokens=5, **options)
    assert torch.equal(*(getattr(each, "sequences", each) for each in (found, expected)))


@pytest.mark.parametrize(
    "forced", [["forced_bos_token_id"], ["forced_eos_token_id"], ["forced_bos_token_id", "forced_eos_token_id"]]
)
def test_a_forced_answer_is_returned_as_often_as_transformers_does(pair, batch, forced: list[str]) -> None:
    own, ours = pair
    options = {"max_new_tokens": len(forced), "num_beams": 3, "num_return_sequences": 3, **dict.fromkeys(forced, 54)}
    assert torch.equal(ours.generate(**batch, **options), reference(own, batch, **options))


@pytest.mark.parametrize("num_beams", [1, 2])
@pytest.mark.parametrize("way", ["hook", "forward", "prepare_inputs_for_generation"])
def test_what_is_changed_of_an_object_is_called(tiny_t5, batch, way: str, num_beams: int) -> None:
    own, calls = tiny_t5(), []
    ours = behind(TorchEager(own), own)
    if way == "hook":
        ours.register_forward_hook(lambda *_: calls.append(1))
    else:
        usual = getattr(ours, way)

        @functools.wraps(usual)  # transformers reads its parameters
        def counted(*given: Any, **options: Any) -> Any:
            calls.append(1)
            return usual(*given, **options)

        setattr(ours, way, counted)
    check(own, ours, batch, num_beams=num_beams, **SHORT)
    assert len(calls) == 10


class StopAt(StoppingCriteria):
    def __init__(self, eos_token_id: Any) -> None:
        self.eos_token_id = eos_token_id

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.isin(input_ids[:, -1], torch.tensor(self.eos_token_id or 5))


OWN_BOUNDS = {
    "its own length, and a forced end of generate()'s": dict(
        stopping_criteria=[MaxLengthCriteria(4)], forced_eos_token_id=1
    ),
    "a forced end before the last token": dict(logits_processor=[ForcedEOSTokenLogitsProcessor(4, 1)]),
    "its own ends": dict(stopping_criteria=[EosTokenCriteria([*range(1, 60)])]),
    "one end, no tensor": dict(stopping_criteria=[StopAt(5)]),
    "several ends, no tensor": dict(stopping_criteria=[StopAt([5, 17, 33])]),
    "no end": dict(stopping_criteria=[StopAt(None)]),
    "several forced first tokens": dict(forced_bos_token_id=[7, 9]),
    "a forced first token counted from the end": dict(forced_bos_token_id=-5),
    "a prefix in 32 bits": dict(decoder_input_ids=torch.tensor([[0, 5, 7]] * 6, dtype=torch.int32)),
}


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", OWN_BOUNDS)
def test_bounds_that_are_not_those_of_generate(pair, batch, name: str, num_beams: int) -> None:
    """A caller's criterion or processor takes the place of generate()'s, whose numbers are others."""
    options = dict(num_beams=num_beams, max_new_tokens=8, **OWN_BOUNDS[name])
    expected = reference(pair[0], batch, **options)
    assert_varied(expected, 2)
    assert torch.equal(pair[1].generate(**batch, **options), expected)


def test_a_length_that_is_no_whole_number(pair, batch) -> None:
    for options in ({}, dict(do_sample=True), dict(suppress_tokens=[1])):
        assert check(*pair, batch, max_new_tokens=3.5, **options).shape[1] == 5


def test_prefixes_and_encoder_outputs_of_another_number_of_rows(pair, batch) -> None:
    encoded = pair[1].encoder(**batch)
    for options in ({}, dict(num_beams=3)):
        with pytest.raises((InputError, ValueError), match=r"rows|batch"):
            pair[1].generate(**batch, decoder_input_ids=torch.tensor([[0, 5]]), **SHORT, **options)
        with pytest.raises((InputError, ValueError), match=r"rows|batch"):
            pair[1].generate(batch["input_ids"][:1], encoder_outputs=encoded, **SHORT, **options)


class Recorder(LogitsProcessor):
    """Keeps what it is given, as a processor and as a criterion, and bans the token that it saw last."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, Any]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        self.seen.append((input_ids.clone(), scores))
        if scores is None:
            return (input_ids[:, -1] % 7 == 0) & (len(self.seen) > 3)
        self.seen[-1] = (input_ids.clone(), scores.clone())
        return scores.scatter_(1, input_ids[:, -1:], -torch.inf)  # in place


@pytest.mark.parametrize("options", [{}, dict(do_sample=True, num_return_sequences=2)], ids=["greedy", "sampling"])
def test_processors_and_criteria_see_what_transformers_shows(pair, batch, options: dict[str, Any]) -> None:
    seen = []
    for generate in (partial(reference, pair[0], batch), partial(pair[1].generate, **batch)):
        processor, criterion = Recorder(), Recorder()
        torch.manual_seed(5)
        generate(**SHORT, **options, logits_processor=[processor], stopping_criteria=[criterion])
        seen.append((processor.seen, criterion.seen))
    for expected, found in zip(*seen, strict=True):
        assert len(expected) == len(found) > 3
        for (ids, scores), (own_ids, own_scores) in zip(found, expected, strict=True):
            assert torch.equal(ids, own_ids) and (scores is None) == (own_scores is None)
            if scores is not None:
                assert scores.dtype == own_scores.dtype == torch.float32
                assert_close(scores, own_scores, atol=ATOL)


def test_processors_of_beams_share_no_cores_with_the_runtime(tiny_t5, batch, monkeypatch) -> None:
    """Torch computes in one thread meanwhile, and neither other threads nor later calls notice."""
    own, seen, before = tiny_t5(), [], torch.get_num_threads()
    torch.set_num_threads(2)
    call = RepetitionPenaltyLogitsProcessor.__call__

    def counted(*arguments: Any) -> torch.Tensor:
        with ThreadPoolExecutor(1) as new:
            seen.append((torch.get_num_threads(), new.submit(torch.get_num_threads).result()))
        if len(seen) == 12:
            raise KeyboardInterrupt
        return call(*arguments)

    monkeypatch.setattr(RepetitionPenaltyLogitsProcessor, "__call__", counted)
    options: dict[str, Any] = dict(num_beams=3, repetition_penalty=1.5, max_new_tokens=3, do_sample=False)
    try:
        for backend in (on_onnx(own), TorchEager(own)):  # torch's own threads run the second one
            behind(backend, own).generate(**batch, **options)
        behind(on_onnx(own), own).generate(**batch, **options, logits_processor=[Favour()])  # which may be a model
        assert seen == [(1, 2)] * 3 + [(2, 2)] * 6
        with pytest.raises(KeyboardInterrupt):
            behind(on_onnx(own), own).generate(**batch, **options)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------------------------------------- as a transformers model


def test_what_is_asked_of_a_model(pair, batch) -> None:
    own, ours = pair
    assert ours.can_generate() and ours.num_parameters() == own.num_parameters() and ours.config.is_encoder_decoder
    for same in (ours.to(torch.float32), ours.float(), ours.cpu()):
        assert same is ours and not same.training
    with pytest.raises(InputError, match="save_pretrained"):
        ours.state_dict()
    with pytest.raises(InputError, match="none would be loaded"):
        ours.load_state_dict({})
    before = own.config.to_dict()
    ours.config.vocab_size = 7
    assert own.config.to_dict() == before and own.config is not ours.config


def test_defaults_of_generation(tiny_t5, batch) -> None:
    own = copy.deepcopy(tiny_t5())
    own.generation_config.update(max_length=7, num_beams=3, length_penalty=0.4)
    ours = behind(TorchEager(own), own)
    expected = check(own, ours, batch)
    assert expected.shape == (6, 7)
    given = GenerationConfig(num_beams=2, max_new_tokens=9, decoder_start_token_id=0, eos_token_id=1, pad_token_id=0)
    assert torch.equal(ours.generate(**batch, generation_config=given), reference(own, batch, generation_config=given))
    own.generation_config.max_length = 5
    assert ours.generation_config.max_length == 7
    without = AcceleratedT5(TorchEager(own), own.config)
    assert without.generation_config.eos_token_id == 1 and without.generation_config.max_length in (20, None)


# ------------------------------------------------------------------------------------------------------------ bad input


def test_no_backend_and_configurations_of_other_models(tiny_t5) -> None:
    config = tiny_t5().config
    things = (None, "mini", torch.nn.Linear(1, 1))
    refused(partial(AcceleratedT5, config=config), "backend", *things, match="backend")
    refused(partial(AcceleratedT5, TorchEager(tiny_t5())), "config", None, match="config.vocab_size")
    for name, value in (("vocab_size", 301), ("eos_token_id", 2), ("pad_token_id", None)):
        other = copy.deepcopy(config)
        setattr(other, name, value)
        refused(partial(AcceleratedT5, TorchEager(tiny_t5())), "config", other, match=f"config.{name}")


def test_what_generate_cannot_be_asked(pair, batch) -> None:
    call, hidden = partial(pair[1].generate, **batch, **SHORT), torch.zeros(6, 9, 32)
    refused(call, "output_attentions", True)
    refused(partial(call, return_dict_in_generate=True), "output_hidden_states", True)
    refused(partial(call, input_ids=None), "inputs_embeds", hidden)
    refused(call, "decoder_inputs_embeds", hidden)
    refused(call, "head_mask", torch.ones(2, 4))
    refused(call, "cache_implementation", "static", "quantized")
    refused(call, "prefill_chunk_size", 2)
    refused(call, "assistant_early_exit", 1)
    for name in ("past_key_values", "cache"):
        refused(call, name, DynamicCache(), match=f"{cache_name()} .*DynamicCache")
    refused(call, "encoder_outputs", (hidden,), match="encoder_outputs .*tuple")
    refused(call, "decoder_input_ids", torch.full((6, 2), 300), match="0 … 299")
    for name in ("num_beams", "num_return_sequences"):
        refused(partial(call, do_sample=True), name, 0, -1, 1.5, True, match=f"{name} ")
    refused(pair[1].generate, "max_new_tokens", 3, match="nothing to answer")
    refused(pair[1].generate_batch, "inputs", batch["input_ids"].tolist(), match="Continuous batching")


def test_what_forward_cannot_be_given(pair) -> None:
    ids, model = decoder_ids(2, 3), pair[1]
    call, hidden = partial(model, input_ids=ids, decoder_input_ids=ids), torch.zeros(2, 3, 32)
    refused(model, "input_ids", None, match="nothing to encode")
    refused(model, "input_ids", ids, match="nothing to decode")
    refused(partial(model, decoder_input_ids=ids), "input_ids", None, match="nothing to encode")
    refused(call, "output_attentions", True)
    refused(call, "use_cash", True)
    refused(partial(call, input_ids=None), "inputs_embeds", hidden)
    refused(partial(call, input_ids=None), "encoder_outputs", (hidden,), match="encoder_outputs .*tuple")
    refused(partial(call, input_ids=None), "past_key_values", DynamicCache(), match="DynamicCache")


def test_encoder_outputs_and_caches_of_other_models(pair, tiny_t5, batch) -> None:
    _, ours = pair
    model = tiny_t5(seed=4)
    other = behind(TorchEager(model), model)
    with pytest.raises(InputError, match="encoder_outputs"):
        ours.generate(encoder_outputs=other.encoder(**batch), **SHORT)
    cache = other(**batch, decoder_input_ids=decoder_ids(6, 1)).past_key_values
    with pytest.raises(InputError, match=cache_name()):
        ours(past_key_values=cache, decoder_input_ids=decoder_ids(6, 1))
    with pytest.raises(InputError, match="past_key_values or cache"):
        ours(past_key_values=cache, cache=cache, decoder_input_ids=decoder_ids(6, 1))
    if not V5:  # 5.x encodes then; 4.57 does where the argument is absent
        with pytest.raises(InputError, match="encoder_outputs .*NoneType"):
            ours.generate(**batch, encoder_outputs=None, **SHORT)
    with pytest.raises(InputError, match="return_dict=False"):
        ours.encoder(**batch, return_dict=False)
    encoded = ours.encoder(**batch)
    assert copy.deepcopy(encoded) is encoded
    with pytest.raises(InputError, match="has no copy"):
        copy.deepcopy(encoded.start(ours.backend))


# -------------------------------------------------------------------------------------------------------------- folders


@pytest.fixture
def exported(tiny_t5, tmp_path: Path) -> AcceleratedT5:
    """A model whose backend came from a folder."""
    export_model(tiny_t5(), tmp_path / "export", external_threshold_bytes=0)
    ours = AcceleratedT5.from_pretrained(tmp_path / "export")
    ours.generation_config.update(max_length=9, num_beams=2)
    return ours


def test_a_saved_export_is_one(exported, tiny_t5, batch, tmp_path: Path) -> None:
    """Its manifest knows the hashes of what was written anew: it is checked before anything is loaded."""
    expected = reference(tiny_t5(), batch, max_length=9, num_beams=2)
    assert_varied(expected)
    made = {path.name for path in (tmp_path / "export").iterdir()}
    (tmp_path / "export" / "README.md").write_text("what came with a download is not copied")
    (tmp_path / "export" / ".cache").mkdir()
    (tmp_path / "empty").mkdir()
    with quiet():
        for folder in (tmp_path / "new" / "deep", str(tmp_path / "empty")):
            exported.save_pretrained(folder)
            assert {path.name for path in Path(folder).iterdir()} == made
            assert transformers.AutoConfig.from_pretrained(folder).num_decoder_layers == 3
            assert GenerationConfig.from_pretrained(folder).max_length == 9
        for model in (exported, AcceleratedT5.from_pretrained(tmp_path / "new" / "deep")):
            assert torch.equal(model.generate(**batch), expected)
    assert {path.name for path in tmp_path.iterdir() if path.suffix != ".lock"} == {"export", "new", "empty"}
    modes = {(tmp_path / name).stat().st_mode for name in ("export", "empty", "new/deep")}
    assert len(modes) == 1
    (tmp_path / "empty" / "generation_config.json").write_text("{}")
    with pytest.raises(T5AccelError, match="generation_config.json"):
        AcceleratedT5.from_pretrained(tmp_path / "empty")


def test_save_pretrained_refuses(exported, tiny_t5, tmp_path: Path) -> None:
    own = tiny_t5()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for folder in (tmp_path, tmp_path / "export", tmp_path / "export" / "encoder.onnx"):
        with pytest.raises(InputError, match="no empty folder"):
            exported.save_pretrained(folder)
    with pytest.raises(InputError, match="lies inside"):
        exported.save_pretrained(tmp_path / "export" / "more" / "copy")
    with pytest.raises(InputError, match="came from no folder"):
        behind(TorchEager(own), own).save_pretrained(tmp_path / "new")
    with pytest.raises(InputError, match="state_dict"):
        exported.save_pretrained(tmp_path / "new", state_dict={})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_save_pretrained_keeps_a_file_that_came_meanwhile(exported, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(exported.generation_config, "save_pretrained", lambda _: (tmp_path / "empty" / "x").touch())
    with pytest.raises(OSError, match="could not be written"):
        exported.save_pretrained(tmp_path / "empty")
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["x"]
    assert {path.name for path in tmp_path.iterdir() if path.suffix != ".lock"} == {"export", "empty"}


def test_a_damaged_export_is_not_saved_with_hashes_of_the_damage(exported, tmp_path: Path) -> None:
    weights = tmp_path / "export" / "weights.data"
    content = bytearray(weights.read_bytes())
    content[100] ^= 1
    weights.with_suffix(".new").write_bytes(content)
    weights.with_suffix(".new").replace(weights)
    with pytest.raises(T5AccelError, match="weights.data was altered"):
        exported.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_changed_defaults_are_saved_for_every_loop(tiny_t5, tmp_path: Path) -> None:
    own = copy.deepcopy(tiny_t5("shallower-decoder"))
    export_model(own, tmp_path / "export")
    ours, ids = AcceleratedT5.from_pretrained(tmp_path / "export"), torch.tensor([[5, 17, 44, 8, 1]])
    second_end = int(greedy(ours.backend, ids, max_new_tokens=6).sequences[0, 2])
    for model in (own, ours):
        model.generation_config.eos_token_id = [own.config.eos_token_id, second_end]
    ours.save_pretrained(tmp_path / "new")
    found = greedy(OrtNumpy(tmp_path / "new"), ids, max_new_tokens=6).sequences[0].tolist()
    expected = own.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6)[0, 1:].tolist()
    assert found == expected and found[-1] == second_end and len(found) <= 3


def test_the_tokenizer_comes_with_the_folder(tiny_t5, mini, tmp_path: Path) -> None:
    own = transformers.ByT5Tokenizer()
    for tokenizer in (mini[1], own, None):
        folder = tmp_path / type(tokenizer).__name__
        export_model(tiny_t5(), folder, tokenizer=tokenizer)
        found = AcceleratedT5.from_pretrained(folder).tokenizer
        assert AcceleratedT5.from_pretrained(folder, tokenizer=own).tokenizer is own, "the argument comes first"
        if tokenizer is None:
            assert found is None
        else:
            expected = tokenizer("Où est-il ?").input_ids
            assert found("Où est-il ?").input_ids == expected
            assert tokenizer_of(folder)(["Où est-il ?"], return_tensors="np")["input_ids"].tolist() == [expected]
