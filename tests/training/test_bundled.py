"""The bundled models, students and readers are what their cards say: small, loaded plainly, as good as recorded."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, T5ForConditionalGeneration

from bench import evaluation
from bench.bert.ladder import GATE
from bench.bert.model import PRUNED, READER, load_bert, threshold_of, widths
from bench.bert.spans import answerer, torch_run
from bench.evaluation import QuestionQuality
from bench.results import DATA, filter_rows, load_results
from t5accel.api import accelerate
from t5accel.backends.torch_eager import TorchEager
from t5accel.decoding.greedy_search import greedy
from t5accel.graphs.export_cache import cached_export
from t5accel.graphs.manifest import read_manifest
from t5accel.models.load import BUNDLED, data_folder, load_model
from t5accel.models.sizes import T5Dims
from t5accel.tokenization import text_to_text

RECORDED = {"mini-d1": ("distillation.json", "1 layer, hidden, longer"),
            "mini-d1p": ("pruning.json", "mini-d1, movement")}  # fmt: skip
STUDENTS = sorted(BUNDLED.keys() - {"mini"})  # test_bench has that each of them is measured, on equal tokens
READERS = (READER, PRUNED)

pytestmark = pytest.mark.usefixtures("cache_of_its_own")
each_student = pytest.mark.parametrize("name", STUDENTS)


def row_of(name: str) -> dict[str, Any]:
    if name == "mini":
        rows = filter_rows(load_results("training-mini.json")["rows"], measured="quality")
        (found,) = (row for row in rows if "task" not in row)
    else:
        file, model = RECORDED[name]
        (found,) = filter_rows(load_results(file)["rows"], measured="speed", model=model, precision="fp32")
    return found


def card_of(folder: Path) -> tuple[str, dict[str, list[str]]]:
    """A card, whose links lead somewhere, and the cells of its tables by the first one of their line."""
    card = (folder / "README.md").read_text(encoding="utf-8")
    for link in re.findall(r"\]\((\.\./[^)]+)\)", card):
        assert (folder / link).exists(), link
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in card.splitlines() if line.startswith("| ")]
    return card, {first: cells for first, *cells in lines}


def test_the_model_is_small_and_of_its_shape(mini: tuple[Any, Any]) -> None:
    assert (data_folder() / BUNDLED["mini"] / "model.safetensors").stat().st_size <= 25e6
    dims = T5Dims.of(mini[0])
    assert (dims.encoder_layers, dims.decoder_layers, dims.tied, dims.gated) == (6, 4, True, False)
    assert 10e6 < mini[0].num_parameters() < 12e6
    assert dims.vocab_size == len(mini[1]) == 8000


@pytest.mark.parametrize("name", ["mini", "mini-d1"])
def test_transformers_alone_loads_it(name: str) -> None:
    model = T5ForConditionalGeneration.from_pretrained(data_folder() / BUNDLED[name], dtype=torch.float32).eval()
    ours, tokenizer = load_model(name)
    theirs = dict(model.named_parameters())
    assert all(torch.equal(weight, theirs[key]) for key, weight in ours.named_parameters())
    assert AutoTokenizer.from_pretrained(data_folder() / BUNDLED[name]).get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("name", ["mini", *(pytest.param(name, marks=pytest.mark.long) for name in STUDENTS)])
def test_recorded_quality_is_what_one_gets(name: str) -> None:
    """The full sets, on both lines of transformers: neither the French nor the record can rot unnoticed."""
    model, tokenizer = load_model(name)
    backend, kept = TorchEager(model), row_of(name)
    generate = text_to_text(tokenizer, lambda ids, mask: greedy(backend, ids, mask, max_new_tokens=64).sequences)
    report = evaluation.evaluate(generate, names=["translation", "questions"])
    # A near tie may fall to the other side on another processor; half a point is room for a few of them.
    assert report.translation.bleu == pytest.approx(kept["bleu"], abs=0.5)
    assert report.questions.seen.exact_match == pytest.approx(kept["exact_match_seen"], abs=2)


@each_student
def test_a_student_is_small_and_of_its_recorded_shape(name: str) -> None:
    assert (data_folder() / BUNDLED[name] / "model.safetensors").stat().st_size <= 20e6
    file, model = RECORDED[name]
    (kept,) = filter_rows(load_results(file)["rows"], measured="size", model=model)
    dims = T5Dims.of(load_model(name)[0])
    assert kept["bundled"] == name and (dims.encoder_layers, dims.decoder_layers) == (6, 1)
    found = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(dims).items()}
    assert found == kept["settings"]


def test_the_distilled_one_keeps_nine_tenths_of_its_teacher_s_scores_and_its_card_says_how_much() -> None:
    rows = load_results("distillation.json")["rows"]
    (teacher,) = filter_rows(rows, measured="speed", model="mini", precision="fp32")
    kept = {name: row_of("mini-d1")[name] / teacher[name] for name in evaluation.MAIN_SCORES}
    assert min(kept.values()) >= 0.9
    card = " ".join(card_of(data_folder() / BUNDLED["mini-d1"])[0].split())
    assert f"{kept['exact_match']:.0%} of its teacher's right answers" in card


@pytest.mark.filterwarnings("ignore:This model's quality in fewer bits was not measured")
@each_student
def test_one_line_runs_a_student_in_int8(name: str) -> None:
    model = accelerate(name, precision="int8", progress=False)
    sentences = [f"translate English to French: {text}" for text in ("Where is my bag?", "I am tired.")]
    inputs = model.tokenizer(sentences, return_tensors="pt", padding=True)
    out = model.generate(**inputs, max_new_tokens=24, num_beams=1, do_sample=False)
    answers = model.tokenizer.batch_decode(out, skip_special_tokens=True)
    assert answers[0] == "Où est mon sac ?" and answers[1].startswith("Je suis fatigué")
    small, large = (read_manifest(cached_export(name, precision=precision)) for precision in ("int8", "fp32"))
    assert small.recipe["name"] == "int8" and small.size_bytes < 0.4 * large.size_bytes


@each_student
def test_a_student_s_card_tells_its_recorded_quality(name: str) -> None:
    (card, lines), report = card_of(data_folder() / BUNDLED[name]), row_of(name)
    expected = {"300 sentences: BLEU": "bleu", "200 reports: ROUGE-L": "rougeL",
                "200 questions: exact match": "exact_match"}  # fmt: skip
    for start, score in expected.items():
        assert lines[start][-1] == f"{report[score]:.1f}", start
    assert "Tatoeba" in card and "CC BY 2.0 FR" in card


@pytest.fixture(scope="module")
def scores() -> dict[str, QuestionQuality]:
    found = {}
    for name in READERS:
        model, tokenizer = load_bert(name)
        answer = answerer(tokenizer, torch_run(model), threshold=threshold_of(model))
        found[name] = evaluation.evaluate(answer, names=["questions"]).questions
    return found


@pytest.mark.parametrize("name", READERS)
def test_a_reader_is_small_and_its_card_says_what_it_scores(name: str, scores: dict[str, QuestionQuality]) -> None:
    assert (DATA / name / "model.safetensors").stat().st_size <= 8e6
    _, lines = card_of(DATA / name)
    expected = {
        "200 questions: F1": lambda found: found.all.f1,
        "… exact match": lambda found: found.all.exact_match,
        "… of seen templates: F1": lambda found: found.seen.f1,
        "… of unseen templates: F1": lambda found: found.unseen.f1,
        "… with an answer: F1": lambda found: found.has_answer.f1,
        "… without one: abstains right": lambda found: found.no_answer.exact_match,
    }
    for start, value in expected.items():
        assert lines[start] == [f"{value(scores[each]):.1f}" for each in READERS], start


def test_the_reader_reads_and_abstains_and_the_pruned_one_is_smaller_and_inside_the_gate(scores: Any) -> None:
    assert scores[READER].seen.f1 >= 75 and scores[READER].no_answer.exact_match >= 80
    assert scores[READER].all.f1 - scores[PRUNED].all.f1 <= GATE
    whole, pruned = (widths(load_bert(name)[0]) for name in READERS)
    assert sum(pruned["heads"]) <= 0.7 * sum(whole["heads"]) and sum(pruned["neurons"]) <= 0.5 * sum(whole["neurons"])
