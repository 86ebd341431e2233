"""Bench on a tiny seeded model, with rivals that cheat; once on the bundled model. No speed is asserted anywhere."""

import json
from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

import t5accel.bench as module
import t5accel.techniques
from t5accel import machine, tasks
from t5accel.bench import BenchConfig, bench, random_batch, source_batch
from t5accel.checkpoints import BUNDLED
from t5accel.errors import InputError, UnequalWorkError
from t5accel.lively import random_t5
from t5accel.parity import ParityError
from t5accel.scoreboard import Results, Row
from t5accel.techniques import REFERENCE, TECHNIQUES, Subject, Technique, choose, graph_bytes, weight_bytes

pytestmark = pytest.mark.usefixtures("cache_of_its_own")

SIZES = dict(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_heads=4, num_layers=2)
CONFIG = BenchConfig(
    model="random:tiny", batch=2, source_tokens=7, new_tokens=9, rounds=2, threads=1, peak_memory=False, seed=1
)  # fmt: skip
OURS = TECHNIQUES[3]
(BOUND,) = [technique for technique in TECHNIQUES if technique.backend == "backends.ort_bound"]
ALIKE = [technique for technique in TECHNIQUES if technique.name == REFERENCE]


@pytest.fixture(autouse=True)
def _thread_count_put_back():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def subject_of(model) -> Subject:
    """A subject whose model is there already."""
    subject = Subject("random:tiny", 1, 1)  # of another seed than 0, so that the export is made of the object
    subject._loaded = model, None
    return subject


@pytest.fixture(scope="module")
def lively_seed() -> int:
    """The first seed whose tiny model says several things; transformers' lines initialise differently."""

    def is_lively(seed: int) -> bool:
        generate = ALIKE[0].build(subject_of(random_t5(SIZES, seed=seed)))
        rows = generate(*random_batch(SIZES["vocab_size"], CONFIG), CONFIG.new_tokens, CONFIG.new_tokens).tolist()
        return min(len(set(row) - {0, 1}) for row in rows) >= 4 and rows[0] != rows[1]

    return next(filter(is_lively, range(50)))


@pytest.fixture
def tiny(monkeypatch, lively_seed):
    """The model that bench loads; no tokenizer, as with all random weights."""
    model = random_t5(SIZES, seed=lively_seed)
    monkeypatch.setattr(t5accel.techniques, "load_t5", lambda name, seed: (model, None))
    return model


def altered(change, name="a rival"):
    """Our cached loop, whose output goes through ``change(output, call)`` with call = 1, 2, …; counts in `calls`."""
    calls = Counter()

    def build(subject):
        honest = OURS.build(subject)

        def generate(ids, mask, shortest, longest):
            calls[name] += 1
            return change(honest(ids, mask, shortest, longest), calls[name])

        return generate

    return Technique(name, "a test", build, weight_bytes), calls


def test_the_techniques_are_named_once_and_hold_the_reference():
    names = [technique.name for technique in TECHNIQUES]
    assert REFERENCE in names and len(set(names)) == len(names)


def test_every_row_says_all_that_a_reader_must_know(tiny, tmp_path):
    results = bench(CONFIG, command="the command")
    own = [technique for technique in TECHNIQUES if technique.student is None]  # it has no students
    assert [row.technique for row in results.rows] == [technique.name for technique in own]
    for row, technique in zip(results.rows, own, strict=True):
        assert (row.backend, row.precision) == (technique.backend, technique.recipe.name)
        assert row.recipe == technique.recipe.hash
        assert (row.model, row.batch, row.beams) == ("random:tiny", 2, 1)
        assert (row.source_tokens, row.new_tokens, row.threads) == (7, 9, 1)
        assert len(row.latency_s) == CONFIG.rounds and min(row.latency_s) > 0
        assert row.tokens_per_s == pytest.approx(2 * 9 / np.median(row.latency_s))
        subject = subject_of(tiny)
        graphs = technique.name.startswith("ONNX")
        assert row.bytes_on_disk == (graph_bytes(subject, row.precision) if graphs else weight_bytes(subject)) > 0
        assert row.base_memory_bytes is row.peak_memory_bytes is row.quality is None  # not asked for; no tokenizer
        assert row.reference == REFERENCE and row.equality.endswith(" distinct")
        equal = int(row.equality.split(f" of 18 greedy tokens equal to {REFERENCE}, ")[0])
        assert equal == 18 if row.precision == "fp32" else 0 <= equal <= 18
        assert "1 threads" in row.machine and row.versions == machine.versions()
        if row.technique == REFERENCE:
            assert row.ratio is None and row.ratio_median == 1.0
        else:
            assert len(row.ratio["samples"]) == CONFIG.rounds
            assert row.ratio["min"] <= row.ratio["median"] == row.ratio_median <= row.ratio["max"]
    assert results.machine["usable_threads"] >= 1 and results.versions["torch"]
    assert results.command == "the command" and len(results.date) == 10
    results.write(tmp_path / "rows.json")
    assert Results.read(tmp_path / "rows.json") == results
    assert set(json.loads((tmp_path / "rows.json").read_text())["rows"][0]) == {field.name for field in fields(Row)}


def test_ratios_are_of_samples_of_the_same_round(tiny):
    results = bench(CONFIG)
    reference = next(row for row in results.rows if row.technique == REFERENCE)
    for row in results.rows:
        if row is not reference:
            pairs = zip(reference.latency_s, row.latency_s, strict=True)
            assert row.ratio["samples"] == [theirs / ours for theirs, ours in pairs]


def shift_first(out, call):
    return np.concatenate([out[:, :1] % 60 + 1, out[:, 1:]], axis=1)


def shift_last(out, call):
    return np.concatenate([out[:, :-1], out[:, -1:] % 60 + 1], axis=1)


def swap_rows(out, call):
    return out[::-1]


@pytest.mark.parametrize("change", [shift_first, shift_last, swap_rows, lambda out, call: out[:, :-1]])
def test_other_tokens_are_refused_before_anything_is_timed(tiny, monkeypatch, change):
    rival, calls = altered(change)
    monkeypatch.setattr(module, "compare", lambda *_, **__: pytest.fail("timed before proven equal"))
    with pytest.raises(ParityError):
        bench(CONFIG, techniques=[*ALIKE, rival])
    assert calls["a rival"] == 1


def test_an_honest_rival_of_ones_own_is_measured(tiny):
    rival, calls = altered(lambda out, call: out)
    rows = bench(CONFIG, techniques=[rival, *ALIKE]).rows
    assert [row.technique for row in rows] == ["a rival", REFERENCE]
    assert calls["a rival"] == 1 + 1 + CONFIG.rounds  # proven, warmed up, timed


@pytest.mark.parametrize("cut", [lambda out: out[:, :-1], lambda out: out[:1]], ids=["fewer tokens", "fewer rows"])
def test_less_work_while_timing_is_refused(tiny, cut):
    rival, calls = altered(lambda out, call: out if call == 1 else cut(out))
    with pytest.raises(UnequalWorkError, match="a rival.*(new_tokens is 9 and 8|batch is 2 and 1)"):
        bench(CONFIG, techniques=[*ALIKE, rival])


def test_a_degenerate_model_is_refused_however_equal_its_outputs_are(tiny):
    with torch.no_grad():
        for weight in tiny.parameters():
            weight.zero_()
    rival, calls = altered(lambda out, call: out)
    with pytest.raises(InputError, match="degenerate output is no evidence"):
        bench(CONFIG, techniques=[*ALIKE, rival])
    assert calls["a rival"] == 1


def test_a_list_without_the_reference_or_without_a_rival_is_refused(tiny):
    with pytest.raises(InputError, match="lack the reference"):
        bench(CONFIG, techniques=[OURS])
    with pytest.raises(InputError, match="at least one rival"):
        bench(CONFIG, techniques=ALIKE)


def test_peak_memory_of_a_technique_that_another_process_cannot_find_is_refused_at_once(tiny):
    rival, calls = altered(lambda out, call: out)
    with pytest.raises(InputError, match="peak_memory.*a rival"):
        bench(replace(CONFIG, peak_memory=True), techniques=[*ALIKE, rival])
    assert not calls


@pytest.mark.parametrize("name", ["batch", "source_tokens", "new_tokens", "rounds", "threads", "quality_limit", "seed"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "2"])
def test_a_bad_bound_is_named(name, value):
    with pytest.raises(InputError, match=f"^{name} is {value!r}; give an integer of at least"):
        BenchConfig(**{name: value})


@pytest.mark.parametrize("name", ["batch", "source_tokens", "new_tokens", "rounds", "threads"])
def test_zero_is_too_little_of_anything_but_quality(name):
    with pytest.raises(InputError, match=f"^{name} is 0"):
        BenchConfig(**{name: 0})
    assert BenchConfig(quality_limit=0).quality_limit == 0


def test_the_random_batch_is_seeded_and_holds_ordinary_tokens_only():
    config = BenchConfig(batch=3, source_tokens=50)
    ids, mask = random_batch(10, config)
    assert ids.shape == mask.shape == (3, 50) and mask.all() and ids.dtype == mask.dtype == np.int64
    assert set(ids.reshape(-1).tolist()) == set(range(3, 10))
    assert (random_batch(10, config)[0] == ids).all()
    assert (random_batch(10, replace(config, seed=1))[0] != ids).any()


def test_a_trained_model_reads_text_of_that_length():
    config = BenchConfig(batch=3, source_tokens=50, seed=1)
    ids, mask = source_batch(Subject("mini", 0, 1), config)
    assert ids.shape == mask.shape == (3, 50) and mask.all() and ids.dtype == mask.dtype == np.int64
    assert len({tuple(row) for row in ids.tolist()}) == 3 and (ids[:, -1] == 1).all()
    assert (source_batch(Subject("mini", 0, 1), replace(config, seed=2))[0] != ids).any()
    assert (source_batch(subject_of(random_t5(SIZES)), config)[0] == random_batch(SIZES["vocab_size"], config)[0]).all()


@pytest.mark.parametrize("name", sorted(BUNDLED))
def test_every_bundled_model_can_be_measured(name):
    """On noise a student says one token again and again, and equality on that would be no evidence."""
    config = BenchConfig(model=name, source_tokens=16, new_tokens=8, rounds=1, threads=1, quality_limit=1,
                         peak_memory=False)  # fmt: skip
    rows = bench(config, techniques=[*ALIKE, OURS]).rows
    assert {row.model for row in rows} == {name} and all(row.quality["limit"] == 1 for row in rows)


def test_shared_weights_count_once():
    models = (random_t5({**SIZES, "tie_word_embeddings": tie}) for tie in (True, False))
    tied, untied = (weight_bytes(subject_of(model)) for model in models)
    assert untied - tied == 4 * SIZES["vocab_size"] * SIZES["d_model"]


def test_the_bundled_model_from_end_to_end():
    """How good it is, is not asserted: only that speed, memory and quality stand in the same row."""
    config = BenchConfig(source_tokens=16, new_tokens=12, rounds=1, threads=1, quality_limit=1)
    results = bench(config, techniques=[*ALIKE, BOUND])
    sizes = {name: len(tasks.rows(name, limit=1)) for name in tasks.NAMES}
    for row in results.rows:
        assert row.peak_memory_bytes > row.base_memory_bytes + row.bytes_on_disk / 2
        assert row.bytes_on_disk > 1_000_000
        assert row.quality["limit"] == 1
        assert row.quality["translation"]["rows"] == sizes["translation"]
        assert row.quality["summaries"]["all"]["rows"] == sizes["summaries"]
        assert row.quality["questions"]["all"]["rows"] == sizes["questions"]
        assert 0 <= row.quality["translation"]["bleu"] <= 100
    theirs, ours = results.rows
    assert theirs.quality == ours.quality  # equal tokens, equal scores
    assert ours.base_memory_bytes < theirs.base_memory_bytes / 2  # it was measured in a process without torch


def test_every_technique_finds_its_subject_alone(tiny):
    ids, mask = random_batch(SIZES["vocab_size"], CONFIG)
    outputs = {technique: technique.build(subject_of(tiny))(ids, mask, 9, 9) for technique in TECHNIQUES}
    expected = outputs[TECHNIQUES[0]]
    for technique, output in outputs.items():
        assert output.shape == expected.shape
        assert technique.recipe.name != "fp32" or (output == expected).all()


def test_students_are_measured_in_their_teachers_place_and_beside_nobody_else():
    students = [technique for technique in TECHNIQUES if technique.student]
    assert {technique.student for technique in students} == BUNDLED.keys() - {"mini"}
    assert set(TECHNIQUES) - set(choose([], model="random:t5-small")) == set(students)
    subject = Subject("mini", 0, 1)
    for technique in students:
        assert not technique.exact and technique.measured_on(subject) == Subject(technique.student, 0, 1)
        assert technique.student in technique.name and technique.teacher == "mini"
    assert next(technique for technique in TECHNIQUES if not technique.student).measured_on(subject) is subject


def test_techniques_are_chosen_by_a_part_of_their_name():
    assert [technique.name for technique in choose(["bound"])] == [REFERENCE, BOUND.name]
    assert choose([]) == choose([], model="mini") == TECHNIQUES
    with pytest.raises(InputError, match="No technique is called 'TensorFlow'"):
        choose(["TensorFlow"])
