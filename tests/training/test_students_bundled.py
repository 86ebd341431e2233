"""The bundled students are what their cards say: small, of their recorded shape, and as good as recorded."""

import re
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, T5ForConditionalGeneration

from bench import evaluation
from bench.results import filter_rows, load_results
from t5accel.api import accelerate
from t5accel.backends.torch_eager import TorchEager
from t5accel.decoding.greedy_search import greedy
from t5accel.graphs.export_cache import cached_export
from t5accel.graphs.manifest import read_manifest
from t5accel.models.load import BUNDLED, data_folder, load_model
from t5accel.models.sizes import T5Dims
from t5accel.tokenization import text_to_text

RECORDED = {
    "mini-d1": ("distillation.json", "1 layer, hidden, longer"),
    "mini-d1p": ("pruning.json", "mini-d1, movement"),
}
STUDENTS = sorted(BUNDLED.keys() - {"mini"})  # test_bench has that each of them is measured, on equal tokens
SENTENCES = ["translate English to French: Where is my bag?", "translate English to French: I am tired.",
             "translate English to French: She lost her red umbrella."]  # fmt: skip

pytestmark = pytest.mark.usefixtures("cache_of_its_own")
each_student = pytest.mark.parametrize("name", STUDENTS)


def row_of(name: str) -> dict[str, Any]:
    file, model = RECORDED[name]
    (found,) = filter_rows(load_results(file)["rows"], measured="speed", model=model, precision="fp32")
    return found


@each_student
def test_it_is_small_and_of_its_recorded_shape(name: str) -> None:
    folder = data_folder() / BUNDLED[name]
    assert (folder / "model.safetensors").stat().st_size <= 20e6
    file, model = RECORDED[name]
    (kept,) = filter_rows(load_results(file)["rows"], measured="size", model=model)
    dims = T5Dims.of(load_model(name)[0])
    assert kept["bundled"] == name
    assert (dims.encoder_layers, dims.decoder_layers) == (6, 1)
    found = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(dims).items()}
    assert found == kept["settings"]


def test_transformers_alone_loads_the_distilled_one() -> None:
    model = T5ForConditionalGeneration.from_pretrained(data_folder() / BUNDLED["mini-d1"], dtype=torch.float32).eval()
    ours, tokenizer = load_model("mini-d1")
    theirs = dict(model.named_parameters())
    assert all(torch.equal(weight, theirs[key]) for key, weight in ours.named_parameters())
    assert AutoTokenizer.from_pretrained(data_folder() / BUNDLED["mini-d1"]).get_vocab() == tokenizer.get_vocab()


@each_student
@pytest.mark.long
def test_recorded_quality_is_what_one_gets(name: str) -> None:
    model, tokenizer = load_model(name)
    backend, kept = TorchEager(model), row_of(name)
    generate = text_to_text(tokenizer, lambda ids, mask: greedy(backend, ids, mask, max_new_tokens=64).sequences)
    report = evaluation.evaluate(generate, names=["translation", "questions"])
    # A near tie may fall to the other side on another processor; half a point is room for a few of them.
    assert report.translation.bleu == pytest.approx(kept["bleu"], abs=0.5)
    assert report.questions.seen.exact_match == pytest.approx(kept["exact_match_seen"], abs=2)


def test_the_distilled_one_keeps_nine_tenths_of_its_teacher_s_scores_and_its_card_says_how_much() -> None:
    rows = load_results("distillation.json")["rows"]
    (teacher,) = filter_rows(rows, measured="speed", model="mini", precision="fp32")
    kept = {name: row_of("mini-d1")[name] / teacher[name] for name in evaluation.MAIN_SCORES}
    assert min(kept.values()) >= 0.9
    card = " ".join((data_folder() / BUNDLED["mini-d1"] / "README.md").read_text(encoding="utf-8").split())
    assert f"{kept['exact_match']:.0%} of its teacher's right answers" in card


@pytest.mark.filterwarnings("ignore:This model's quality in fewer bits was not measured")
@each_student
def test_one_line_runs_it_in_int8(name: str) -> None:
    model = accelerate(name, precision="int8", progress=False)
    inputs = model.tokenizer(SENTENCES, return_tensors="pt", padding=True)
    out = model.generate(**inputs, max_new_tokens=24, num_beams=1, do_sample=False)
    answers = model.tokenizer.batch_decode(out, skip_special_tokens=True)
    assert answers[0] == "Où est mon sac ?" and answers[1].startswith("Je suis fatigué")
    small, large = (read_manifest(cached_export(name, precision=precision)) for precision in ("int8", "fp32"))
    assert small.recipe["name"] == "int8" and small.size_bytes < 0.4 * large.size_bytes


@each_student
def test_its_card_tells_its_recorded_quality(name: str) -> None:
    card = (data_folder() / BUNDLED[name] / "README.md").read_text(encoding="utf-8")
    lines = {line.split("|")[1].strip(): line for line in card.splitlines() if line.startswith("| ")}
    report = row_of(name)
    expected = {
        "300 sentences: BLEU": report["bleu"],
        "200 reports: ROUGE-L": report["rougeL"],
        "200 questions: exact match": report["exact_match"],
    }
    for start, value in expected.items():
        assert lines[start].split("|")[-2].strip() == f"{value:.1f}", start
    assert "Tatoeba" in card and "CC BY 2.0 FR" in card
    for link in re.findall(r"\]\((\.\./[^)]+)\)", card):
        assert (data_folder() / BUNDLED[name] / link).exists(), link
