"""The bundled readers are what their cards say: small, loaded plainly, and as good as recorded."""

import re

import pytest

from bench import evaluation
from bench.bert.ladder import GATE
from bench.bert.model import PRUNED, READER, load_bert, threshold_of, widths
from bench.bert.spans import answerer, torch_run
from bench.evaluation import QuestionQuality
from bench.results import DATA

NAMES = (READER, PRUNED)


@pytest.fixture(scope="module")
def scores() -> dict[str, QuestionQuality]:
    found = {}
    for name in NAMES:
        model, tokenizer = load_bert(name)
        answer = answerer(tokenizer, torch_run(model), threshold=threshold_of(model))
        found[name] = evaluation.evaluate(answer, names=["questions"]).questions
    return found


@pytest.mark.parametrize("name", NAMES)
def test_it_is_small_and_its_card_says_what_it_scores(name: str, scores: dict[str, QuestionQuality]) -> None:
    folder = DATA / name
    assert (folder / "model.safetensors").stat().st_size <= 8e6
    card = (folder / "README.md").read_text(encoding="utf-8")
    lines = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in card.splitlines() if line.startswith("| ")}
    expected = {
        "200 questions: F1": lambda found: found.all.f1,
        "… exact match": lambda found: found.all.exact_match,
        "… of seen templates: F1": lambda found: found.seen.f1,
        "… of unseen templates: F1": lambda found: found.unseen.f1,
        "… with an answer: F1": lambda found: found.has_answer.f1,
        "… without one: abstains right": lambda found: found.no_answer.exact_match,
    }
    for start, value in expected.items():
        assert [cell.strip() for cell in lines[start]] == [f"{value(scores[each]):.1f}" for each in NAMES], start
    for link in re.findall(r"\]\((\.\./[^)]+)\)", card):
        assert (folder / link).exists(), link


def test_the_reader_reads_stories_and_abstains_and_the_pruned_one_is_smaller_and_inside_the_gate(
    scores: dict[str, QuestionQuality],
) -> None:
    assert scores[READER].all.f1 - scores[PRUNED].all.f1 <= GATE
    whole, pruned = (widths(load_bert(name)[0]) for name in NAMES)
    assert sum(pruned["heads"]) <= 0.7 * sum(whole["heads"]) and sum(pruned["neurons"]) <= 0.5 * sum(whole["neurons"])
    assert scores[READER].seen.f1 >= 75 and scores[READER].no_answer.exact_match >= 80
