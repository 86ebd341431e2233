"""Batches: packed within their budget, drawn as the curriculum says, and the same whenever they are drawn."""

import random
from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import PAIRS, characters, texts_of

from t5accel.distillation.batches import Mixture, Part, Phase, draw_batches, draw_block, pack, steps_from
from t5accel.errors import InputError
from t5accel.models.prefixes import TRANSLATE
from training.curriculum import mini_examples

lengths = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), max_size=30)


@settings(deadline=None)
@given(lengths, st.integers(1, 60))
def test_every_example_is_packed_once_within_the_budget(sizes, budget):
    sources = [[i] * source for i, (source, _) in enumerate(sizes)]
    targets = [[i] * target for i, (_, target) in enumerate(sizes)]
    batches = pack(sources, targets, budget)
    for rows, answers in batches:
        assert len(rows) == len(answers) > 0
        assert len(rows) == 1 or (max(map(len, rows)) + max(map(len, answers))) * len(rows) <= budget
        assert [row[0] for row in rows] == [answer[0] for answer in answers]  # each source beside its own target
    packed = [
        (row[0], len(row), len(answer)) for rows, answers in batches for row, answer in zip(rows, answers, strict=True)
    ]
    assert sorted(packed) == [(i, source, target) for i, (source, target) in enumerate(sizes)]


PHASES = (
    Phase(0, (Part("translation", 400), Part("summaries", 1500, 0.5), Part("questions", 1500, 0.5))),
    Phase(4, (Part("translation", 300, weight=0.5), Part("summaries", 1200, weight=0.2),
              Part("questions", 1200, weight=0.1), Part("short questions", 900, weight=0.1),
              Part("repetition", 200, weight=0.1))),
)  # fmt: skip
SMALL = Mixture(mini_examples(PAIRS, joined_share=0.5), PHASES, steps_per_block=4)


def test_a_phase_holds_from_its_step_until_the_next():
    assert [SMALL.phase(step) for step in (0, 3, 4, 99)] == [PHASES[0], PHASES[0], PHASES[1], PHASES[1]]


def test_a_phase_that_begins_within_a_block_or_out_of_turn_is_refused():
    for starts in ((), (4,), (0, 3), (0, 8, 4), (0, 0)):
        with pytest.raises(InputError, match="multiples of 4"):
            replace(SMALL, curriculum=tuple(replace(PHASES[0], from_step=start) for start in starts))


@given(st.lists(st.lists(st.lists(st.just(5), min_size=1, max_size=9), min_size=1, max_size=4), min_size=2, max_size=4))
def test_weights_sum_to_one_and_follow_the_labels_or_the_phase(targets):
    batches = [(("translation", "summaries")[i > 0], ([], rows)) for i, rows in enumerate(targets)]
    labels = [sum(map(len, rows)) for rows in targets]
    alike, by_batch = (phase.weights(batches) for phase in PHASES)
    assert sum(alike) == pytest.approx(1.0) and sum(by_batch) == pytest.approx(1.0)
    assert [weight / count for weight, count in zip(alike, labels, strict=True)] == pytest.approx(
        [1 / sum(labels)] * len(labels)
    )
    assert [weight / by_batch[0] for weight in by_batch[1:]] == pytest.approx([0.2 / 0.5] * (len(targets) - 1))


def test_a_block_is_a_function_of_seed_and_number():
    first = list(draw_block(SMALL, characters, 0, 0))
    assert first == list(draw_block(SMALL, characters, 0, 0))
    assert first != list(draw_block(SMALL, characters, 0, 1)) and first != list(draw_block(SMALL, characters, 1, 0))


@pytest.mark.parametrize("number", [0, 1])
def test_each_step_sees_translation_and_the_other_tasks_as_its_phase_says(number):
    parts = {part.task: part for part in PHASES[number].parts}
    starts = {"translation": TRANSLATE, "summaries": "summarize: ", "repetition": "repeat: "}
    steps = list(draw_block(SMALL, characters, 0, number))
    assert [step[0][0] for step in steps] == ["translation"] * 4
    assert {len(step) for step in steps} == {round(sum(part.per_step for part in parts.values()))}
    for task, (sources, targets) in [batch for step in steps for batch in step]:
        assert all(text.startswith(starts.get(task, "question: ")) for text in texts_of(sources))
        padded_tokens = (max(map(len, sources)) + max(map(len, targets))) * len(sources)
        assert len(sources) == 1 or padded_tokens <= parts[task].tokens
    drawn = Counter(task for step in steps for task, _ in step)
    assert drawn == {task: round(4 * part.per_step) for task, part in parts.items()}


def test_steps_go_on_from_the_middle_of_a_block():
    whole = list(islice(steps_from(SMALL, characters, 0, 0), 9))
    assert whole[:4] == list(draw_block(SMALL, characters, 0, 0)) and whole[4:8] == list(
        draw_block(SMALL, characters, 0, 1)
    )
    for start in (1, 4, 6):
        assert list(islice(steps_from(SMALL, characters, 0, start), 9 - start)) == whole[start:]


def test_forbidden_sources_are_never_drawn():
    def drawn(mixture):
        steps = [step for number in range(2) for step in draw_block(mixture, characters, 0, number)]
        return {text for step in steps for _, (sources, _) in step for text in texts_of(sources)}

    free = drawn(SMALL)
    forbidden = frozenset(sorted(free)[::3])
    starts = {text.split(":")[0] for text in forbidden}
    assert starts == {"translate English to French", "summarize", "question", "repeat"}
    restricted = drawn(replace(SMALL, forbidden=forbidden))
    assert restricted and not restricted & forbidden


def test_when_every_source_is_forbidden_drawing_stops():
    single = mini_examples(PAIRS, joined_share=0.0)
    mixture = replace(SMALL, examples=single, forbidden=frozenset(TRANSLATE + english for english, _ in PAIRS))
    with pytest.raises(InputError, match="are in the evaluation sets"):
        next(draw_block(mixture, characters, 0, 0))


def test_as_many_batches_are_drawn_as_asked_and_each_within_its_budget():
    rng = random.Random(0)

    def draw():
        return SMALL.examples["translation"](rng)

    batches = draw_batches(draw, characters, 400, 5, frozenset(), rng)
    assert len(batches) == 5
    assert all((max(map(len, s)) + max(map(len, t))) * len(s) <= 400 for s, t in batches if len(s) > 1)
    assert draw_batches(draw, characters, 400, 0, frozenset(), rng) == []


def test_what_the_teacher_wrote_takes_the_place_of_fresh_examples():
    phases = (Phase(0, (Part("translation", 300), Part("questions", 1500))),)
    written = [(TRANSLATE + f"Text {i}.", f"Texte {i}.") for i in range(9)]
    fresh = replace(SMALL, curriculum=phases, forbidden=frozenset([written[4][0]]))
    mixture = fresh.with_teacher_outputs({"translation": written})
    assert mixture.by_teacher and not fresh.by_teacher
    drawn: dict[str, set[tuple[str, str]]] = {"translation": set(), "questions": set()}
    for step in draw_block(mixture, characters, 0, 0):
        for task, (sources, targets) in step:
            drawn[task] |= set(zip(texts_of(sources), texts_of(targets), strict=True))
    assert drawn["translation"] == {*written[:4], *written[5:]}
    assert drawn["questions"] and all(source.startswith("question: ") for source, _ in drawn["questions"])
