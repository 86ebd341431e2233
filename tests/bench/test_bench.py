"""Bench and its jobs on a tiny seeded model; once on the bundled model. No speed is asserted anywhere."""

import json
from dataclasses import replace

import numpy as np
import pytest
from refused import refused

from bench import evaluation, systems
from bench.results import checked
from bench.scoreboard import Forced, Natural, bench, sizes
from bench.systems import BOARD, CPU_REFERENCE, BenchModel, System, select_systems, weight_bytes
from t5accel.errors import InputError
from t5accel.models.load import BUNDLED
from t5accel.models.random_init import random_t5
from t5accel.parity import ParityError

pytestmark = pytest.mark.usefixtures("cache_of_its_own", "threads_put_back")

SIZES = dict(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_heads=4, num_layers=2)
JOB = Forced(batch=2, source_tokens=7, new_tokens=9, seed=1)
QUICK = dict(rounds=2, threads=1, peak_memory=False, seed=1)
OURS = BOARD[3]
(BOUND,) = [system for system in BOARD if system.backend == "backends.ort.bound"]
ALIKE = [system for system in BOARD if system.name == CPU_REFERENCE]


def subject_of(model) -> BenchModel:
    """A subject whose model is there already."""
    subject = BenchModel("random:tiny", 1, 1)  # of another seed than 0, so that the export is made of the object
    subject._loaded = model, None
    return subject


@pytest.fixture(scope="module")
def lively_seed() -> int:
    """The first seed whose tiny model says several things; transformers' lines initialise differently."""

    def is_lively(seed: int) -> bool:
        generate = ALIKE[0].build(subject_of(random_t5(SIZES, seed=seed)))
        rows = JOB.answers(subject_of(random_t5(SIZES)))(generate, 2).tolist()
        return min(len(set(row) - {0, 1}) for row in rows) >= 4 and rows[0] != rows[1]

    return next(filter(is_lively, range(50)))


@pytest.fixture
def tiny(monkeypatch, lively_seed):
    """The model that bench loads; no tokenizer, as with all random weights."""
    model = random_t5(SIZES, seed=lively_seed)
    monkeypatch.setattr(systems, "load_model", lambda name, seed: (model, None))
    return model


def test_every_row_says_all_that_a_reader_must_know(tiny):
    rows = bench("random:tiny", JOB, **QUICK)
    own = [system for system in BOARD if system.student is None]  # it has no students
    assert [row["system"] for row in rows] == [system.name for system in own]
    subject = subject_of(tiny)
    for row, system in zip(rows, own, strict=True):
        assert (row["backend"], row["precision"]) == (system.backend, system.recipe.name)
        assert (row["recipe_hash"], row["model"]) == (system.recipe.hash, "random:tiny")
        assert (row["batch"], row["beams"], row["source_tokens"], row["new_tokens"], row["threads"]) == (2, 1, 7, 9, 1)
        assert len(row["latency_s"]) == 2 and row["reference"] == CPU_REFERENCE
        assert row["size_bytes"] == system.bytes_on_disk(subject) > 0
        assert not {"base_memory_bytes", "peak_memory_bytes", "bleu"} & row.keys()  # not asked for; no tokenizer
        assert row["of"] == 18 and (row["equal"] == 18 if row["precision"] == "fp32" else 0 <= row["equal"] <= 18)
        assert json.loads(json.dumps(checked(row))) == row


def test_a_rival_of_ones_own_is_measured_and_one_with_other_tokens_refused(tiny):
    def rival(change):
        def build(subject):
            honest = OURS.build(subject)
            return lambda *given: change(honest(*given))

        return System("a rival", build)

    rows = bench("random:tiny", JOB, systems=[rival(lambda out: out), *ALIKE], **QUICK)
    assert [row["system"] for row in rows] == ["a rival", CPU_REFERENCE]
    with pytest.raises(ParityError):
        bench("random:tiny", JOB, systems=[rival(lambda out: out[::-1]), *ALIKE], **QUICK)
    with pytest.raises(InputError, match="reference"):
        bench("random:tiny", JOB, systems=[OURS], **QUICK)
    with pytest.raises(InputError, match="peak_memory"):  # another process cannot find it
        bench("random:tiny", JOB, systems=[rival(lambda out: out), *ALIKE], **QUICK | dict(peak_memory=True))


def test_a_bad_bound_is_named():
    for job, names in ((Forced, ("batch", "source_tokens", "new_tokens")), (Natural, ("texts", "longest"))):
        for name in names:
            refused(job, name, 0, -1, 1.5, True, "2", match=f"^{name} ")


def sources_of(job, subject):
    """The ids that a forced job gives to a way of generating."""
    seen = []
    job.answers(subject)(lambda ids, mask, shortest, longest: seen.append((ids, mask)) or ids, job.batch)
    return seen[0]


def test_random_weights_read_seeded_ordinary_tokens_and_a_trained_model_text_of_that_length():
    noisy = subject_of(random_t5(SIZES | dict(vocab_size=10)))
    job, found = Forced(batch=3, source_tokens=50, seed=1), []
    for subject in (noisy, BenchModel("mini", 0, 1)):
        ids, mask = sources_of(job, subject)
        assert ids.shape == mask.shape == (3, 50) and mask.all() and ids.dtype == mask.dtype == np.int64
        assert len({tuple(row) for row in ids.tolist()}) == 3
        assert (sources_of(job, subject)[0] == ids).all()
        assert (sources_of(replace(job, seed=2), subject)[0] != ids).any()
        found.append(ids)
        with pytest.raises(InputError, match="^batch "):
            job.answers(subject)(lambda *given: given[0], 2)
    noise, text = found
    assert set(noise.reshape(-1).tolist()) == set(range(3, 10)) and (text[:, -1] == 1).all()


def test_texts_are_drawn_by_the_seed_and_there_have_to_be_enough():
    everything = [evaluation.source_text("questions", row) for row in evaluation.rows("questions")]
    drawn = Natural("questions", texts=20, seed=3).sources()
    places = [everything.index(text) for text in drawn]
    assert len(drawn) == 20 and places == sorted({*places})
    assert Natural("questions", texts=20, seed=3).sources() == drawn
    assert Natural("questions", texts=20, seed=4).sources() != drawn
    with pytest.raises(InputError, match="^texts "):
        Natural("summaries", texts=201)
    with pytest.raises(InputError, match="poems"):
        Natural("poems")


@pytest.mark.parametrize("name", sorted(BUNDLED))
def test_every_bundled_model_can_be_measured(name):
    """On noise a student says one token again and again, and equality on that would be no evidence."""
    job, quick = Forced(source_tokens=16, new_tokens=8), QUICK | dict(rounds=1, seed=0)
    rows = bench(name, job, systems=[*ALIKE, OURS], limit=1, **quick)
    assert {row["model"] for row in rows} == {name} and all(row["limit"] == 1 for row in rows)


def test_shared_weights_count_once():
    models = (random_t5({**SIZES, "tie_word_embeddings": tie}) for tie in (True, False))
    tied, untied = (weight_bytes(subject_of(model)) for model in models)
    assert untied - tied == 4 * SIZES["vocab_size"] * SIZES["d_model"]


def test_the_bundled_model_from_end_to_end():
    """How good it is, is not asserted: only that speed, memory and quality stand in the same row."""
    job = Forced(source_tokens=16, new_tokens=12)
    theirs, ours = bench("mini", job, systems=[*ALIKE, BOUND], rounds=1, threads=1, limit=1)
    for row in (theirs, ours):
        assert row["peak_memory_bytes"] > row["base_memory_bytes"] + row["size_bytes"] / 2
        assert row["size_bytes"] > 1_000_000 and row["limit"] == 1
        assert 0 <= row["bleu"] <= 100 and 0 <= row["rougeL_seen"] <= 100 and 0 <= row["f1"] <= 100
    names = ("bleu", "chrf", "rougeL", "exact_match")
    assert [theirs[name] for name in names] == [ours[name] for name in names]  # equal tokens, equal scores
    assert ours["base_memory_bytes"] < theirs["base_memory_bytes"] / 2  # it was measured in a process without torch


def test_the_memory_of_natural_answers_is_that_of_one_batch():
    subject, (int8,) = BenchModel("mini", 0, 1), [t for t in BOARD if t.name == "ONNX Runtime, our loop, int8"]
    job = Natural(texts=3, longest=4).once(2)
    row = sizes(int8, subject, job.answers(subject), 2, peak_memory=True)
    assert job.texts == 2 and row["peak_memory_bytes"] > row["base_memory_bytes"] + row["size_bytes"] / 2


def test_systems_are_selected_by_a_part_of_their_name_and_students_in_place_of_their_teacher_alone():
    students = [system for system in BOARD if system.student]
    assert {system.student for system in students} == BUNDLED.keys() - {"mini"}
    assert set(BOARD) - set(select_systems([], model="random:t5-small")) == set(students)
    subject = BenchModel("mini", 0, 1)
    for system in students:
        assert not system.exact and system.measured_on(subject) == BenchModel(system.student, 0, 1)
    assert BOARD[0].measured_on(subject) is subject
    assert [system.name for system in select_systems(["bound"])] == [CPU_REFERENCE, BOUND.name]
    assert select_systems([]) == select_systems([], model="mini") == BOARD
    with pytest.raises(InputError, match="technique.*TensorFlow"):
        select_systems(["TensorFlow"])
