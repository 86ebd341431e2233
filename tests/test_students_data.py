"""The generated reports and stories: frozen by the evaluation sets, split cleanly, and answerable from their text."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from functools import cache
from itertools import pairwise, product

import pytest

from t5accel import tasks
from t5accel.students import report_templates, story_templates
from t5accel.mini.reports import Report, make_report, reports
from t5accel.mini.stories import Question, make_crowd, make_question, questions

EVAL_SEED = 20261121  # of the bundled evaluation sets: changing a template or a draw would orphan their scores
HALVES = [pytest.param(False, id="seen"), pytest.param(True, id="unseen")]


@cache
def some_reports(held_out: bool) -> list[Report]:
    return list(reports(1000, 3, held_out=held_out))


@cache
def some_questions(held_out: bool) -> list[Question]:
    return list(questions(2000, 3, held_out=held_out))


def joined(*parts: Iterable[str]) -> set[str]:
    return set(map("".join, product(*parts)))


def names(held_out: bool) -> report_templates.Names:
    return report_templates.NAMES_HELD_OUT if held_out else report_templates.NAMES_SEEN


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+(?::\d+)?", text))  # 42, and 7:35 as one


# --- the bundled sets


@pytest.mark.parametrize("held_out", HALVES)
def test_the_evaluation_set_of_summaries_is_generated(held_out: bool) -> None:
    half = "unseen" if held_out else "seen"
    assert tasks.rows("summaries")[100 * held_out :][:100] == [
        {"id": f"summaries-{half}-{i:03d}", "source": report.source, "references": [report.summary]}
        for i, report in enumerate(reports(100, EVAL_SEED, held_out=held_out), start=1)
    ]


@pytest.mark.parametrize("held_out", HALVES)
def test_the_evaluation_set_of_questions_is_generated(held_out: bool) -> None:
    half = "unseen" if held_out else "seen"
    assert tasks.rows("questions")[100 * held_out :][:100] == [
        {"id": f"questions-{half}-{i:03d}", "question": q.question, "context": q.context, "answers": list(q.answers)}
        for i, q in enumerate(questions(100, EVAL_SEED, held_out=held_out), start=1)
    ]


def test_the_evaluation_sets_hold_nothing_else() -> None:
    assert [len(tasks.rows(name)) for name in ("summaries", "questions")] == [200, 200]


# --- the halves


def test_reports_of_the_halves_share_no_family_and_no_filler() -> None:
    seen, unseen = report_templates.SEEN, report_templates.HELD_OUT
    assert not {f.name for f in seen} & {f.name for f in unseen}
    assert not {f.summary for f in seen} & {f.summary for f in unseen}
    fillers = report_templates.FILLERS_SEEN, report_templates.FILLERS_HELD_OUT
    assert not set(fillers[0].split("|")) & set(fillers[1].split("|"))
    # and all of them are drawn, from their own half only
    assert {r.template for r in some_reports(False)} == {f.name for f in seen}
    assert {r.template for r in some_reports(True)} == {f.name for f in unseen}


def test_stories_of_the_halves_share_no_family_and_no_question() -> None:
    seen, unseen = (story_templates.HALVES[held_out].families for held_out in (False, True))
    assert not {f.name for f in seen} & {f.name for f in unseen}
    assert not {s for f in seen for s in f.sentences} & {s for f in unseen for s in f.sentences}
    assert {q.template.split("/")[0] for q in some_questions(False)} == {f.name for f in seen}
    assert {q.template.split("/")[0] for q in some_questions(True)} == {f.name for f in unseen}


def test_the_halves_share_no_name() -> None:
    seen, unseen = names(False), names(True)
    assert not set(seen.first) & set(unseen.first)
    assert not joined(*seen.surname) & joined(*unseen.surname)
    assert not joined(*seen.town) & joined(*unseen.town)
    seen, unseen = story_templates.HALVES[False], story_templates.HALVES[True]
    assert not set(seen.names) & set(unseen.names)
    for kind in ("town", "surname"):
        assert not joined(*seen.parts[kind]) & joined(*unseen.parts[kind])


@pytest.mark.parametrize("made", [some_reports, some_questions])
def test_the_halves_share_no_number(made) -> None:
    seen, unseen = (
        {n for one in made(held_out) for n in numbers(one.source if made is some_reports else one.context)}
        for held_out in (False, True)
    )
    assert min(len(seen), len(unseen)) > 80 and not seen & unseen


# --- the texts


@pytest.mark.parametrize("held_out", HALVES)
def test_names_and_numbers_of_a_summary_stand_in_its_source(held_out: bool) -> None:
    first, surnames, towns = set(names(held_out).first), joined(*names(held_out).surname), joined(*names(held_out).town)
    for report in some_reports(held_out):
        words = re.findall(r"\w+", report.summary)
        people = {f"{a} {b}" for a, b in pairwise(words) if a in first and b in surnames}
        facts = people | numbers(report.summary) | {word for word in words if word in towns | surnames}
        assert len(facts) >= 3, report
        for fact in facts:
            assert re.search(rf"\b{fact}\b", report.source), (fact, report)


@pytest.mark.parametrize("held_out", HALVES)
def test_an_answer_stands_in_its_context(held_out: bool) -> None:
    for one in some_questions(held_out):
        assert one.question.endswith("?") and one.context.endswith(".")
        # a template that ends in a reason has no answer, every other has one
        assert bool(one.answers) == (one.template.count("/") == 1), one
        for answer in one.answers:
            assert re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", one.context), one


@pytest.mark.parametrize("held_out", HALVES)
def test_a_quarter_of_the_questions_has_no_answer(held_out: bool) -> None:
    asked = some_questions(held_out)
    assert len(asked) == 2000
    assert 0.22 <= sum(not one.answers for one in asked) / len(asked) <= 0.28


# --- chance


@pytest.mark.parametrize("held_out", HALVES)
def test_short_stories_are_shorter_and_their_questions_as_well_formed(held_out):
    rng = random.Random(1)
    for _ in range(1000):
        made = make_question(rng, held_out=held_out, short=True)
        assert made.question.endswith("?") and all(answer in made.context for answer in made.answers)
        assert 2 <= len(made.context.split(". ")) <= 4


def test_crowds_are_large_told_alike_and_of_seen_families_and_one_in_four_has_no_answer() -> None:
    rng = random.Random(1)
    crowds = [make_crowd(rng) for _ in range(1500)]
    assert {q.template.split("/")[0] for q in crowds} == {f.name for f in story_templates.HALVES[False].families}
    assert {q.template.split("/")[2] for q in crowds if not q.answers} == {"fresh", "mixed"}
    assert 0.22 <= sum(not q.answers for q in crowds) / len(crowds) <= 0.28
    for one in crowds:
        assert one.question.endswith("?") and 3 <= len(one.context.split(". ")) <= 12
        assert all(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", one.context) for answer in one.answers)
        assert bool(one.answers) == (one.template.count("/") == 1)


@pytest.mark.parametrize("held_out", HALVES)
@pytest.mark.parametrize(("many", "one"), [(reports, make_report), (questions, make_question)])
def test_the_seed_decides_everything(many, one, held_out: bool) -> None:
    expected = list(many(30, 11, held_out=held_out))
    random.seed(5)
    state = random.getstate()
    assert list(many(60, 11, held_out=held_out))[:30] == expected  # how many are wanted does not matter
    rng = random.Random(11)
    assert [one(rng, held_out=held_out) for _ in range(30)] == expected
    assert random.getstate() == state, "drew from the global generator"
    assert len(set(expected)) == 30 and list(many(30, 12, held_out=held_out)) != expected
