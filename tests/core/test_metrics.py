"""Scores equal those of the libraries they rest on, answers follow SQuAD's rules, and every check here can fail."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import FrozenInstanceError
from functools import partial
from pathlib import Path

import pytest
from refused import refused

from bench import evaluation
from t5accel import metrics
from t5accel.errors import MissingPackageError

ROOT = Path(__file__).resolve().parents[2]
TEXT_SCORES = [metrics.bleu, metrics.chrf, metrics.rouge, metrics.exact_match, metrics.f1]

# in sources' order every known source and its first reference, so that a generate() can be right without a model
ANSWERS = {
    evaluation.source_text(name, row): evaluation.references(name, row)[0]
    for name in evaluation.NAMES
    for row in evaluation.rows(name)
}


def perfect(sources: list[str]) -> list[str]:
    return [ANSWERS[source] for source in sources]


def damaged(name: str) -> tuple[list[str], list[list[str]]]:
    """Predictions that are neither perfect nor hopeless, with the references of a whole set."""
    rng = random.Random(7)
    rows = evaluation.rows(name)
    predictions = [
        " ".join(w for w in evaluation.references(name, row)[-1].split() if rng.random() < 0.8) for row in rows
    ]
    return predictions, [evaluation.references(name, row) for row in rows]


@pytest.fixture(scope="module")
def scorers() -> None:
    """For tests that need the scoring libraries, which a bare GPU machine lacks."""
    pytest.importorskip("sacrebleu")
    pytest.importorskip("rouge_score")


# --- texts


@pytest.mark.parametrize(("ours", "theirs"), [(metrics.bleu, "corpus_bleu"), (metrics.chrf, "corpus_chrf")])
def test_bleu_and_chrf_equal_sacrebleu(ours, theirs: str) -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    predictions, references = damaged("translation")
    streams = [[row[i] if i < len(row) else None for row in references] for i in range(3)]
    expected = getattr(sacrebleu, theirs)(predictions, streams).score
    assert 20 < expected < 99
    assert ours(predictions, references) == expected
    # the further references must count, or the transposition lost them
    assert ours(predictions, [row[:1] for row in references]) < expected


def test_rouge_equals_rouge_score_with_the_best_reference() -> None:
    rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer")
    predictions, references = damaged("summaries")
    references = [[other[0], row[0]] for row, other in zip(references, references[1:] + references[:1], strict=True)]
    scorer = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"])
    for kind, score in metrics.rouge(predictions, references).items():
        best = [
            max(scorer.score(reference, text)[kind].fmeasure for reference in row)
            for text, row in zip(predictions, references, strict=True)
        ]
        assert 20 < score < 99 and score == pytest.approx(100 * sum(best) / len(best), abs=1e-9)


def test_scores_of_rows_are_of_any_language() -> None:
    """As published, ROUGE sees nothing but a-z and 0-9, and exact match drops English articles."""
    french, greek = ["élève âgé été"], ["το σπίτι μου"]
    assert metrics.rouge(greek, [greek])["rougeL"] == 0 == metrics.rouge(["σ"], [greek], any_script=True)["rougeL"]
    for texts in (french, greek):
        assert {name: score(texts, [texts]) for name, score in metrics.ROW_SCORES.items() if name != "bleu"} == {
            "chrf": pytest.approx(100), "rougeL": 100, "exact_match": 100}  # fmt: skip
    assert metrics.ROW_SCORES["rougeL"](["to spiti mou, é"], [["e spiti"]]) == pytest.approx(100 / 3)
    plain = "A strike is over; nobody_else came in 1998."
    assert metrics.rouge([plain], [["the strike was over"]], any_script=True) == metrics.rouge(
        [plain], [["the strike was over"]]
    )
    assert metrics.same_text(["Il a faim", "e\u0301te\u0301  "], [["Il faim"], ["été"]]) == 50
    assert metrics.exact_match(["Il a faim"], [["Il faim"]]) == 100


@pytest.mark.parametrize(("prediction", "references", "em", "overlap"), [
    ("The Eiffel Tower!", ["eiffel tower"], 100, 100),
    ("eiffel  tower", ["Paris", "the Eiffel Tower"], 100, 100),
    ("a tower of Eiffel", ["Eiffel Tower"], 0, 80),  # 2 common words of 3 and 2: 2·2 / 5
    ("pot pot", ["pot"], 0, 200 / 3),  # a repeated word counts once
    ("Rome", ["Paris"], 0, 0),
    ("theatre", ["the theatre"], 100, 100),  # articles are words, not beginnings
    ("U.S.", ["US"], 100, 100),
    ("", [], 100, 100),
    ("unanswerable", [], 100, 100),
    ("Unanswerable.", ["unanswerable"], 100, 100),
    ("the", [], 100, 100),  # SQuAD's script too: nothing is left of it
    ("Rome", [], 0, 0),
    ("unanswerable", ["Rome"], 0, 0),
    ("", ["Rome"], 0, 0),
    ("", ["the", "Rome"], 0, 0),  # an empty reference counts only alone
    ("unanswerable question", [], 0, 0),
])  # fmt: skip
def test_answers_follow_squad(prediction: str, references: list[str], em: float, overlap: float) -> None:
    assert metrics.exact_match([prediction], [references]) == em
    assert metrics.f1([prediction], [references]) == pytest.approx(overlap)


@pytest.mark.parametrize("score", TEXT_SCORES)
def test_bad_texts(score) -> None:
    for predictions, references, match in (
        ([], [], "1 or more"), (["a"], [], "got 1 and 0"), (None, [["a"]], "lists"),
        (["a"], [["a"], ["b"]], "got 1 and 2"), (["a"], ["a"], r"references\[0\]"),
        (["a"], [[None]], r"references\[0\]"), ("a", [["a"]], "predictions"), ([3], [["a"]], "predictions"),
        ([None], [["a"]], "predictions"),
    ):  # fmt: skip
        refused(partial(score, references=references), "predictions", predictions, match=match)
    if score in (metrics.bleu, metrics.chrf, metrics.rouge):  # where no reference has no meaning
        refused(partial(score, ["a", "b"]), "references", [["a"], []], match=r"references\[1\] must not be empty")


@pytest.mark.parametrize(("score", "module", "package"), [
    (metrics.bleu, "sacrebleu.metrics", "sacrebleu"), (metrics.chrf, "sacrebleu.metrics", "sacrebleu"),
    (metrics.rouge, "rouge_score.rouge_scorer", "rouge-score"),
])  # fmt: skip
def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, score, module: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match=f"pip install {package}"):
        score(["a"], [["a"]])
    assert metrics.f1(["a pot"], [["pot"]]) == 100  # the rest works without


# --- the report


@pytest.fixture(scope="module")
def full(scorers: None) -> evaluation.QualityReport:
    return evaluation.evaluate(perfect)


def test_a_perfect_generate_has_100_everywhere(full: evaluation.QualityReport) -> None:
    t, s, q = full.translation, full.summaries, full.questions
    assert [t.bleu, t.chrf, *t.bleu_by_length.values()] == pytest.approx([100] * 5)
    for part in (s.all, s.seen, s.unseen):
        assert [part.rouge1, part.rouge2, part.rougeL] == pytest.approx([100] * 3)
    for part in (q.all, q.seen, q.unseen, q.has_answer, q.no_answer):
        assert (part.exact_match, part.f1) == (100, 100)


def test_the_report_counts_its_rows(full: evaluation.QualityReport) -> None:
    t, s, q = full.translation, full.summaries, full.questions
    assert (t.rows, t.rows_by_length) == (300, {"3-5": 100, "6-8": 100, "9-14": 100})
    assert [part.rows for part in (s.all, s.seen, s.unseen)] == [200, 100, 100]
    assert [part.rows for part in (q.all, q.seen, q.unseen, q.has_answer, q.no_answer)] == [200, 100, 100, 153, 47]
    assert "version:" in t.bleu_signature and "tok:13a" in t.bleu_signature and "nrefs:var" in t.chrf_signature
    assert full.limit is None and "LIMITED" not in str(full)
    with pytest.raises(FrozenInstanceError):
        full.limit = 3


def test_halves_and_buckets_are_scored_on_their_own_rows(scorers: None) -> None:
    unseen = {
        evaluation.source_text("summaries", r) for r in evaluation.rows("summaries") if evaluation.half(r) == "unseen"
    }
    long = {evaluation.source_text("translation", r) for r in evaluation.rows("translation")[200:]}
    report = evaluation.evaluate(
        lambda sources: ["?" if s in unseen | long else ANSWERS[s] for s in sources], names=["summaries", "translation"]
    )
    assert report.summaries.seen.rouge1 == 100 and report.summaries.unseen.rouge1 == 0
    assert report.summaries.all.rouge1 == pytest.approx(50)
    assert report.translation.bleu_by_length["6-8"] == pytest.approx(100) and report.questions is None
    assert report.translation.bleu_by_length["9-14"] < 1


def test_what_evaluate_refuses() -> None:
    def unasked(sources: list[str]) -> list[str]:
        return pytest.fail("generate was called")

    call = partial(evaluation.evaluate, unasked)
    refused(call, "names", "translation", [], ["questions", "questions"])
    refused(call, "names", ["squad"], match="name")
    refused(call, "batch_size", 0, 1.5)
    refused(call, "limit", 0, "3")
    call = partial(evaluation.evaluate, names=["questions"])
    refused(call, "generate", lambda sources: sources[1:], lambda sources: [*sources, ""], match="generate")
    refused(call, "generate", lambda sources: None, lambda sources: "text", lambda sources: [3] * len(sources),
            lambda sources: [[s] for s in sources], match="list of texts")  # fmt: skip


# --- the local evaluate modules

SCRIPT = """
import json, sys
import evaluate
predictions, references = json.load(sys.stdin)
scores = {}
for name in ("bleu", "chrf", "rouge", "squad_v2"):
    scores |= evaluate.load(f"data/metrics/{name}").compute(predictions=predictions, references=references)
json.dump(scores, sys.stdout)
"""


def test_local_evaluate_modules_give_our_numbers_offline(tmp_path: Path) -> None:
    pytest.importorskip("evaluate")
    if not (ROOT / "data" / "metrics").is_dir():
        pytest.skip("the metric modules belong to a checkout, not to the wheel")
    predictions, references = damaged("translation")
    # a process of its own: the offline switch and the cache folder are read when the libraries are imported
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], input=json.dumps([predictions, references]), cwd=ROOT,
                          env=env, capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = {score.__name__: score(predictions, references) for score in TEXT_SCORES if score is not metrics.rouge}
    assert json.loads(done.stdout) == expected | metrics.rouge(predictions, references)
    assert all(0 < value < 100 for value in expected.values())
