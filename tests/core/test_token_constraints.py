"""Constraints of a model's generation_config are applied as by transformers, or refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from programs import own_generate
from transformers import GenerationConfig
from typer.testing import CliRunner

from t5accel.api import open_backend
from t5accel.backends.hf_generate import AcceleratedT5
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.ort_static import OrtStatic
from t5accel.backends.torch_eager import TorchEager
from t5accel.backends.torch_static import TorchStatic
from t5accel.cli import app
from t5accel.decoding.beam import beam_search
from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.ngram_lookup import prompt_lookup
from t5accel.decoding.sampling import SamplingParams, sample
from t5accel.decoding.speculation import speculative
from t5accel.decoding.streaming import stream
from t5accel.decoding.token_constraints import (
    NO_CONSTRAINTS,
    TokenConstraints,
    constraints_from_config,
    special_tokens,
    truncate_at_eos,
)
from t5accel.errors import ExportError, InputError
from t5accel.graphs.export import export_model, source_hash, t5_weights
from t5accel.graphs.manifest import read_manifest, write_manifest
from t5accel.models.load import load_model
from t5accel.serve.batch.generate import BatchGenerator
from t5accel.serve.request import GenerationRequest
from t5accel.serve.scheduler import Scheduler
from t5accel.serve.schemas import Completion, Generate
from t5accel.serve.server import create_app
from t5accel.serve.settings import Settings

pytestmark = pytest.mark.usefixtures("cache_of_its_own")

LONGEST = 14
ONE = SessionSettings(threads=1)
Batch = tuple[np.ndarray, np.ndarray]


def with_config(model: Any, **fields: Any) -> Any:
    """A copy of a model whose generation_config has these fields."""
    changed = copy.deepcopy(model)
    for name, value in fields.items():
        setattr(changed.generation_config, name, value)
    return changed


@pytest.fixture(scope="module")
def several_ends(tiny_t5, padded_batch: Batch) -> list[int]:
    """Two tokens, each of which ends some of the six answers of `tiny_t5`, at different lengths; not its own end."""
    options = dict(max_new_tokens=LONGEST, min_new_tokens=LONGEST)
    seen = own_generate(tiny_t5(), *padded_batch, **options)[:, 1:].tolist()
    tokens = sorted({token for row in seen for token in row[3:11]} - {0, 1}, reverse=True)
    for pair in ([one, other] for one in tokens for other in tokens if one > other):
        cut = [truncate_at_eos(row, tuple(pair)) for row in seen]
        ends, lengths = {row[-1] for row in cut if len(row) < LONGEST}, {len(row) for row in cut}
        if ends == {*pair} and len(lengths) >= 4 and min(lengths) > 2 and max(lengths) == LONGEST:
            return pair
    raise AssertionError("no two tokens end answers at different lengths")


def expected_of(model: Any, batch: Batch, ends: Sequence[int], **options: Any) -> list[list[int]]:
    """The new tokens of transformers' own answers, each up to its end: beams of transformers pad with an end."""
    beams = model.generation_config.num_beams or 1
    found = own_generate(model, *batch, max_new_tokens=LONGEST, **{"num_beams": beams, **options})[:, 1:].tolist()
    return [truncate_at_eos(row, tuple(ends)) for row in found]


def answers(sequences: np.ndarray, ends: Sequence[int]) -> list[list[int]]:
    """The same of ours, whose padding is checked."""
    found = [truncate_at_eos(row, tuple(ends)) for row in sequences.tolist()]
    for row, kept in zip(sequences.tolist(), found, strict=True):
        assert not any(row[len(kept) :])
    return found


# --------------------------------------------------------------------------------------------------------- several ends


def streamed(backend: Any, *batch: np.ndarray, **options: Any) -> Any:
    rows = [np.concatenate(parts) for parts in zip(*stream(backend, *batch, **options), strict=True)]
    sequences = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for place, row in zip(sequences, rows, strict=True):
        place[: len(row)] = row
    return SimpleNamespace(sequences=sequences)


def served(backend: Any, ids: np.ndarray, mask: np.ndarray, *, max_new_tokens: int, **options: Any) -> Any:
    with Scheduler(backend) as scheduler:
        jobs = [GenerationRequest(row[real == 1], max_new_tokens=max_new_tokens, **options)
                for row, real in zip(ids, mask, strict=True)]  # fmt: skip
        found = [ticket.result(60)[0] for ticket in scheduler.submit_all(jobs)]
    ends = backend.rules.eos_tokens(backend.eos_token_id)
    assert [one.ended for one in found] == [one.tokens[-1] in ends for one in found]
    sequences = np.zeros((len(found), max_new_tokens), dtype=np.int64)
    for place, one in zip(sequences, found, strict=True):
        place[: len(one.tokens)] = one.tokens
    return SimpleNamespace(sequences=sequences)


def drawn(backend: Any, *batch: np.ndarray, **options: Any) -> Any:
    return sample(backend, *batch, top_k=1, **options)  # of one token there is nothing to draw


LIKELIEST = SamplingParams(top_k=1)
LOOPS: dict[str, Callable[..., Any]] = {
    "greedy": greedy,
    "prompt_lookup": prompt_lookup,
    "sample": drawn,
    "stream": streamed,
    "served": served,
    "served draws": lambda *a, **o: served(*a, sampling=LIKELIEST, **o),
}


@pytest.mark.parametrize(
    ("loop", "least"),
    [*((loop, {}) for loop in LOOPS), ("greedy", dict(min_length=8)), ("served", dict(min_new_tokens=6))],
)
def test_each_loop_stops_at_any_end(tiny_t5, padded_batch, several_ends, loop: str, least: dict[str, int]) -> None:
    model = with_config(tiny_t5(), eos_token_id=several_ends, **least)
    expected = expected_of(model, padded_batch, several_ends)
    assert {row[-1] for row in expected} >= {*several_ends}
    found = LOOPS[loop](TorchEager(model), *padded_batch, max_new_tokens=LONGEST)
    assert answers(found.sequences, several_ends) == expected


@pytest.mark.parametrize("sampling", [None, LIKELIEST], ids=["likeliest", "drawn"])
def test_speculation_stops_at_any_end(tiny_t5, padded_batch, several_ends, sampling) -> None:
    """Whether its draft knows of these ends, or not, or is a model that may not be run on its own."""
    model = with_config(tiny_t5(), eos_token_id=[1, *several_ends])
    expected = expected_of(model, padded_batch, [1, *several_ends])
    for draft in (tiny_t5(), tiny_t5(seed=2), with_config(tiny_t5(), no_repeat_ngram_size=2, min_length=5)):
        found = speculative(
            TorchEager(model), TorchEager(draft), *padded_batch, max_new_tokens=LONGEST, sampling=sampling
        )
        assert answers(found.sequences, [1, *several_ends]) == expected and found.drafted


@pytest.mark.parametrize("runtime", [OrtNumpy, OrtStatic, TorchStatic])
def test_each_runtime_stops_at_any_end(tiny_t5, padded_batch, several_ends, tmp_path: Path, runtime: Any) -> None:
    """A shorter minimum than an answer has, so that buffers, graphs and the shortlist forbid all ends for a while."""
    model = with_config(tiny_t5(), eos_token_id=several_ends, min_new_tokens=5)
    if runtime is not TorchStatic:
        export_model(model, tmp_path / "export", step=runtime is OrtStatic)
    backend: Any = TorchStatic(model) if runtime is TorchStatic else runtime(tmp_path / "export", settings=ONE)
    expected = expected_of(model, padded_batch, several_ends)
    found = greedy(backend, *padded_batch, max_new_tokens=LONGEST)
    assert answers(found.sequences, several_ends) == expected
    found = beam_search(backend, *padded_batch, num_beams=3, max_new_tokens=LONGEST)
    assert answers(found.sequences, several_ends) == expected_of(model, padded_batch, several_ends, num_beams=3)


BEAMS = [
    dict(num_beams=2), dict(num_beams=4), dict(num_beams=4, length_penalty=-1.5), dict(num_beams=3, min_length=9),
    dict(num_beams=4, early_stopping=True), dict(num_beams=4, early_stopping="never", length_penalty=2.0),
    dict(num_beams=2, min_new_tokens=6, suppress_tokens=[5, 9]),
    dict(num_beams=3, min_length=8, renormalize_logits=True, bad_words_ids=[[5], [9]]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("loop", "fields"), [*((beam_search, fields) for fields in BEAMS), *((served, fields) for fields in BEAMS[3:6])]
)
def test_beams_with_several_ends_and_the_models_defaults(
    tiny_t5, padded_batch, several_ends, loop: Any, fields: dict[str, Any]
) -> None:
    for ends in (several_ends, [1, *several_ends, 17]):
        model = with_config(tiny_t5(), eos_token_id=ends, **fields)
        expected = expected_of(model, padded_batch, ends)
        beams = {} if loop is beam_search else {"num_beams": fields["num_beams"]}
        found = loop(TorchEager(model), *padded_batch, max_new_tokens=LONGEST, **beams)
        assert answers(found.sequences, ends) == expected


@pytest.mark.parametrize("fields", [{}, dict(min_length=9, renormalize_logits=True)], ids=["", "renormalized"])
def test_scores_and_further_sequences_with_several_ends(tiny_t5, padded_batch, several_ends, fields: Any) -> None:
    model = with_config(tiny_t5(), eos_token_id=several_ends, length_penalty=0.5, **fields)
    options = dict(num_beams=4, num_return_sequences=3)
    expected = own_generate(
        model, *padded_batch, max_new_tokens=LONGEST, return_dict_in_generate=True, output_scores=True, **options
    )
    found = beam_search(TorchEager(model), *padded_batch, max_new_tokens=LONGEST, **options)
    theirs = [truncate_at_eos(row, tuple(several_ends)) for row in expected.sequences[:, 1:].tolist()]
    assert answers(found.sequences, several_ends) == theirs
    np.testing.assert_allclose(found.scores, expected.sequences_scores.numpy(), atol=1e-4)


def test_arguments_override_the_models_defaults(tiny_t5, padded_batch, several_ends) -> None:
    model = with_config(tiny_t5(), eos_token_id=several_ends, min_length=9, num_beams=3, length_penalty=-2.0)
    for options in (dict(min_new_tokens=0), dict(min_new_tokens=2, num_beams=2, length_penalty=0.0)):
        expected = expected_of(model, padded_batch, several_ends, **options)
        found = beam_search(TorchEager(model), *padded_batch, max_new_tokens=LONGEST, **options)
        assert answers(found.sequences, several_ends) == expected
    expected = expected_of(model, padded_batch, several_ends, num_beams=1, min_new_tokens=0)
    found = greedy(TorchEager(model), *padded_batch, max_new_tokens=LONGEST, min_new_tokens=0)
    assert answers(found.sequences, several_ends) == expected  # whoever calls greedy() has chosen the search


def test_a_forced_end_token_ends_a_beam_search(tiny_t5, padded_batch) -> None:
    backend = TorchEager(with_config(tiny_t5(), forced_bos_token_id=1))
    found = beam_search(backend, *padded_batch, num_beams=3, num_return_sequences=2, max_new_tokens=6)
    assert found.sequences.tolist() == [[1], [0]] * len(padded_batch[0]) and found.decoder_calls == 1


def test_a_pad_that_is_an_end_token_hides_no_token_of_a_source(tiny_t5) -> None:
    """As in transformers; the last token of these sources is such a one."""
    model = with_config(tiny_t5(), pad_token_id=None)
    model.config.pad_token_id = None
    ids = np.random.default_rng(2).integers(3, 300, (4, 6))
    ids[:, -1] = 1
    expected = model.generate(torch.as_tensor(ids), max_new_tokens=8, do_sample=False, use_cache=False)[:, 1:]
    found = greedy(TorchEager(model), ids, max_new_tokens=8).sequences
    np.testing.assert_array_equal(found, expected)
    hidden = greedy(TorchEager(model), ids, ids != 1, max_new_tokens=8).sequences
    assert found.shape != hidden.shape or (found != hidden).any(), "the mask should matter"


# ------------------------------------------------------------------------------------------------ what a model asks for


def test_usual_models_have_no_constraints(tiny_t5, mini) -> None:
    """So their manifests and hashes are what they were."""
    for model in (mini[0], tiny_t5("mt5"), load_model("random:t5-small")[0]):
        assert constraints_from_config(model) == NO_CONSTRAINTS and not constraints_from_config(model).to_json()


CHANGED: dict[str, Any] = dict(
    no_repeat_ngram_size=3, repetition_penalty=1.2, encoder_repetition_penalty=1.1, encoder_no_repeat_ngram_size=2,
    bad_words_ids=[[5, 6]], forced_eos_token_id=[1, 2], forced_bos_token_id=[4, 5], begin_suppress_tokens=[7],
    do_sample=True, exponential_decay_length_penalty=(3, 1.1), num_beam_groups=2,
    constraints=[object()], force_words_ids=[[5]], forced_decoder_ids=[[1, 5]], sequence_bias=[[[5], 1.0]],
    guidance_scale=2.0, watermarking_config=object(), token_healing=True, stop_strings=["."], max_time=2.0,
    penalty_alpha=0.6, dola_layers="high", of_next_year=3,
)  # fmt: skip


def test_unsupported_fields_are_refused_by_name(tiny_t5, padded_batch) -> None:
    """By every loop; which fields are unsupported is tested below."""
    backend, plain = TorchEager(with_config(tiny_t5(), guidance_scale=2.0)), TorchEager(tiny_t5())
    for loop in (greedy, beam_search, sample, prompt_lookup, stream, lambda *a: speculative(a[0], plain, *a[1:]),
                 lambda *a: Scheduler(a[0], thread=False)):  # fmt: skip
        with pytest.raises(InputError, match="sets guidance_scale=2.0.*own decoding loops"):
            loop(backend, *padded_batch)


def test_every_field_of_generation_config_is_classified(tiny_t5) -> None:
    """A value of its own in every field that the installed version has, and in one that it has not."""
    from t5accel.decoding import token_constraints as rules

    for name in {**vars(GenerationConfig()), **CHANGED}:
        if not name.startswith("_"):
            model = with_config(tiny_t5(), **{name: CHANGED.get(name, [7])})
            if name in rules._HARMLESS:
                assert constraints_from_config(model) == NO_CONSTRAINTS
            elif name not in rules._APPLIED or name in CHANGED:
                assert any(text.startswith(f"{name}=") for text in constraints_from_config(model).unsupported), name


def test_neutral_values_are_not_refused(tiny_t5) -> None:
    neutral = dict(
        no_repeat_ngram_size=0, repetition_penalty=1.0, encoder_repetition_penalty=1, guidance_scale=1.0,
        do_sample=False, num_beam_groups=1, penalty_alpha=0.0, bad_words_ids=None, suppress_tokens=[],
        temperature=0.3, top_k=5, max_length=200, num_return_sequences=2,
        forced_eos_token_id=None, early_stopping=None, num_beams=None,
    )  # fmt: skip
    assert constraints_from_config(with_config(tiny_t5(), **neutral)) == NO_CONSTRAINTS
    found = constraints_from_config(
        with_config(tiny_t5(), forced_eos_token_id=[1], suppress_tokens=[-1, 7, 900], bad_words_ids=[[1], [9]])
    )
    assert found == TokenConstraints(forced_eos_token_id=1, suppress_tokens=(7, 9))


def test_constraints_that_a_caller_takes_away_are_not_refused(tiny_t5, padded_batch) -> None:
    backend = TorchEager(with_config(tiny_t5(), no_repeat_ngram_size=2))
    backend.rules = replace(backend.rules, unsupported=())
    expected = own_generate(tiny_t5(), *padded_batch, max_new_tokens=5)[:, 1:]
    assert greedy(backend, *padded_batch, max_new_tokens=5).sequences.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "config,generation,expected",
    [
        (dict(eos_token_id=1), dict(eos_token_id=[25, 1, 25]), dict(eos_token_id=1)),
        (dict(eos_token_id=1), dict(eos_token_id=[25, 3]), dict(eos_token_id=25)),
        (dict(eos_token_id=[1, 25]), dict(eos_token_id=None), dict(eos_token_id=1)),
        (dict(eos_token_id=2), dict(eos_token_id=5), dict(eos_token_id=5)),
        (dict(eos_token_id=[900, 3]), dict(eos_token_id=None), dict(eos_token_id=3)),
        (dict(pad_token_id=None), dict(pad_token_id=None), dict(pad_token_id=1)),
        (dict(pad_token_id=None), dict(pad_token_id=4), dict(pad_token_id=4)),
        (dict(decoder_start_token_id=0), dict(decoder_start_token_id=6), dict(decoder_start_token_id=6)),
        (dict(decoder_start_token_id=None, bos_token_id=3), dict(decoder_start_token_id=None, bos_token_id=None),
         dict(decoder_start_token_id=3)),
    ],
)  # fmt: skip
def test_special_tokens_equal_those_of_generate(tiny_t5, config, generation, expected) -> None:
    model = with_config(tiny_t5(), **generation)
    for name, value in config.items():
        setattr(model.config, name, value)
    assert special_tokens(model) == dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0) | expected
    found = TorchEager(model)
    assert AcceleratedT5(found, model.config, model.generation_config).backend.eos_token_id == found.eos_token_id


def test_a_model_without_an_end_or_a_start_is_refused(tiny_t5) -> None:
    model = with_config(tiny_t5(), eos_token_id=None)
    model.config.eos_token_id = None
    with pytest.raises(InputError, match="eos_token_id"):
        TorchEager(model)


# ------------------------------------------------------------------------------------------------------------ manifests


def test_an_export_records_all_constraints(tiny_t5, tmp_path: Path) -> None:
    fields = dict(
        eos_token_id=[1, 9], min_length=4, num_beams=3, length_penalty=2, early_stopping="never", min_new_tokens=2,
        no_repeat_ngram_size=3, suppress_tokens=[8], forced_eos_token_id=1, renormalize_logits=True,
    )  # fmt: skip
    model = with_config(tiny_t5(), **fields)
    export_model(model, tmp_path / "export", step=False, shortlist=False)
    backend = OrtNumpy(tmp_path / "export", settings=ONE)
    assert backend.rules == constraints_from_config(model) == TokenConstraints(
        forced_eos_token_id=1, suppress_tokens=(8,), eos_token_ids=(1, 9), min_length=4, min_new_tokens=2, num_beams=3,
        length_penalty=2.0, early_stopping="never", renormalize_logits=True, unsupported=("no_repeat_ngram_size=3",),
    )  # fmt: skip
    weights, hashes = t5_weights(model), set()
    for changed in ({}, *({name: None} for name in fields)):
        hashes.add(source_hash(with_config(model, **changed), weights))
    assert len(hashes) == 1 + len(fields)  # so that none of them is served by the export of another
    manifest = tmp_path / "export" / "manifest.json"
    content = json.loads(manifest.read_text())
    for damage in (dict(eos_token_ids=[1, 300]), dict(suppress_tokens=[10**9]), dict(forced_bos_token_id=-5)):
        write_manifest(tmp_path / "export", content | {"rules": content["rules"] | damage})
        with pytest.raises(ExportError, match="damaged"):
            read_manifest(tmp_path / "export", verify=False)


# ------------------------------------------------------------------------------------- run, batch and serve, with texts

VERY = "translate English to French: I am very, very, very tired."
BIRD = "translate English to French: The big cat and the big dog and the big bird are tired."


def text_of(mini: Any, model: Any, text: str, **options: Any) -> str:
    tokenizer = mini[1]
    batch = tokenizer([text], return_tensors="pt")
    return tokenizer.decode(model.generate(**batch, max_new_tokens=24, **options)[0], skip_special_tokens=True)


def ran(*arguments: Any) -> str:
    result = CliRunner().invoke(app, ["run", *map(str, arguments), "--max-new-tokens", "24"])
    assert result.exit_code == 0, result.stderr
    return result.stdout.strip()


DEFAULTS = {
    "no_repeat_ngram_size": (VERY, dict(no_repeat_ngram_size=2)),
    "min_length": (VERY, dict(min_length=12)),
    "beams": (BIRD, dict(num_beams=4, length_penalty=-2.0)),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_run_and_batch_write_what_generate_does(mini, saved, name: str, threads_put_back) -> None:
    text, fields = DEFAULTS[name]
    model = with_config(mini[0], **fields)
    expected = text_of(mini, model, text)
    assert expected != text_of(mini, mini[0], text)
    folder = saved(model)
    assert ran(text, "--model", folder) == expected
    backend, tokenizer, _ = open_backend(folder, threads=1, progress=False)
    texts = [text, "translate English to French: I am tired.", BIRD]
    found = BatchGenerator(backend, tokenizer, max_new_tokens=24)(texts)
    assert [one.text for one in found] == [text_of(mini, model, text) for text in texts]
    assert all(one.tokens <= 24 for one in found)
    if name == "beams":
        assert ran(text, "--model", folder, "--beams", 1) == text_of(mini, model, text, num_beams=1) != expected
        refusal = CliRunner().invoke(app, ["run", text, "--model", str(folder), "--stream"])
        assert refusal.exit_code == 2 and "Give --beams 1" in refusal.stderr
        assert ran(text, "--model", folder, "--stream", "--beams", 1) == text_of(mini, model, text, num_beams=1)
        assert [one.text for one in BatchGenerator(backend, tokenizer, beams=1, max_new_tokens=24)([text])] != [
            expected
        ]


def test_serve_refuses_before_it_listens(mini, saved, threads_put_back) -> None:
    folder = saved(with_config(mini[0], no_repeat_ngram_size=2, repetition_penalty=1.5))
    with pytest.raises(InputError, match="sets no_repeat_ngram_size=2, repetition_penalty=1.5"):
        create_app(Settings(model=str(folder)))
    refusal = CliRunner().invoke(app, ["run", VERY, "--model", str(folder), "--stream"])
    assert refusal.exit_code == 2 and "no_repeat_ngram_size=2" in refusal.stderr


def test_requests_default_to_the_models_beams() -> None:
    rules = TokenConstraints(num_beams=3, length_penalty=0.5, early_stopping=True)

    def job(asked: Generate) -> GenerationRequest:
        return asked.to_request([5, 1], deadline_s=None, rules=rules)

    assert job(Generate(text="a")).num_beams == job(Completion(model="m", prompt="a").generate()).num_beams == 3
    assert job(Generate(text="a", num_beams=2)).num_beams == 2
    assert job(Generate(text="a", do_sample=True)).num_beams == 1
    assert job(Generate(text="a", num_beams=1, stream=True)).stream
    assert job(Completion(model="m", prompt="a", num_beams=1, stream=True).generate()).stream
    for asked in (Generate(text="a", stream=True), Completion(model="m", prompt="a", stream=True).generate()):
        with pytest.raises(InputError, match="num_beams=3, and beams can neither stream nor stop at texts"):
            job(asked)


def test_do_sample_is_applied_by_run_and_batch_alone(mini, saved, threads_put_back) -> None:
    folder = saved(with_config(mini[0], do_sample=True, temperature=9.0))
    expected = text_of(mini, mini[0], VERY)
    assert ran(VERY, "--model", folder) != expected == ran(VERY, "--model", folder, "--beams", 1)
    with pytest.raises(InputError, match="sets do_sample=True"):
        create_app(Settings(model=str(folder)))
