"""Answers as spans: what may be an answer, when a reader abstains, and how its threshold is found."""

from typing import Any

import numpy as np
import pytest

from bench import evaluation
from bench.bert.spans import answerer, answers, best_spans, read, threshold_from
from t5accel.errors import InputError
from t5accel.metrics import UNANSWERABLE
from training.reader import train_wordpiece


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_wordpiece(["Who came to Tillbury on Monday?", "It was Ann McCoy.", "Nobody came. Where?"] * 5, 120)


def test_a_span_lies_in_the_text_ends_behind_its_beginning_and_is_not_too_long() -> None:
    rng = np.random.default_rng(0)
    start, end = rng.normal(size=(2, 40, 12)).astype(np.float32)
    inside = np.zeros((40, 12), bool)
    inside[:, 4:11] = True
    spans, difference = best_spans(start, end, inside, longest=3)
    for row, (first, last) in enumerate(spans):
        assert 4 <= first <= last <= 10 and last - first < 3
        tried = [start[row, i] + end[row, j] for i in range(4, 11) for j in range(i, min(i + 3, 11))]
        assert start[row, first] + end[row, last] == max(tried)
        assert difference[row] == pytest.approx(start[row, 0] + end[row, 0] - max(tried), abs=1e-6)
    free, _ = best_spans(start, end, np.ones((40, 12), bool), longest=12)
    assert (free != spans).any(), "limits that change nothing test nothing"


def test_questions_and_texts_become_one_row_each_and_only_the_text_may_answer(tokenizer: Any) -> None:
    batch = read(tokenizer, ["Who came?", "Where?"], ["Ann came.", "In Tillbury, on Monday."])
    assert {array.shape for array in batch.inputs.values()} == {batch.in_context.shape}
    for row, text in enumerate(batch.contexts):
        places = batch.places[row][batch.in_context[row]]
        assert "".join(text[a:b] for a, b in places) == text.replace(" ", "")
        assert batch.inputs["token_type_ids"][row][batch.in_context[row]].all()
    long = read(tokenizer, ["Who?"], ["Ann came. " * 600])
    assert long.inputs["input_ids"].shape == (1, 512) and long.inputs["attention_mask"].all()
    with pytest.raises(InputError, match="2 questions on 1 texts"):
        read(tokenizer, ["Who?", "Where?"], ["Ann came."])


def test_answers_are_cut_out_letter_by_letter_or_none_is_given(tokenizer: Any) -> None:
    batch = read(tokenizer, ["Who came?"] * 2, ["It was Ann  McCoy.", "Nobody came."])
    start, end = np.zeros((2, *batch.in_context.shape), np.float32)
    name = np.flatnonzero(batch.in_context[0] & (batch.places[0, :, 0] >= 7) & (batch.places[0, :, 1] <= 17))
    start[0, name[0]] = end[0, name[-1]] = 5.0
    start[1, 0] = end[1, 0] = 3.0
    assert answers(batch, start, end, threshold=0.0) == ["Ann  McCoy", UNANSWERABLE]
    assert answers(batch, start, end, threshold=-11.0)[0] == UNANSWERABLE
    assert answers(batch, start, end, threshold=7.0)[1] != UNANSWERABLE


def test_the_threshold_is_the_best_of_all() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        none = rng.random(50) < 0.3
        differences = rng.normal(np.where(none, 1.0, -1.0), 1.5)
        f1 = np.where(none, 0.0, rng.choice([0.0, 50.0, 100.0], 50))

        def total(threshold: float, none=none, differences=differences, f1=f1) -> float:
            return float(np.where(differences > threshold, none * 100.0, np.where(none, 0.0, f1)).sum())

        best = max(total(value) for value in (-np.inf, *differences, np.inf))
        assert total(threshold_from(differences, f1, none)) == pytest.approx(best)


def test_a_reader_is_scored_like_any_other_model(tokenizer: Any) -> None:

    def never(inputs):
        start = np.zeros(inputs["input_ids"].shape, np.float32)
        start[:, 0] = 1.0
        return start, start

    report = evaluation.evaluate(answerer(tokenizer, never, threshold=0.0), names=["questions"], limit=20)
    assert report.questions.no_answer.exact_match == 100 and report.questions.has_answer.f1 == 0
    always = answerer(tokenizer, never, threshold=9.0)
    assert evaluation.evaluate(always, names=["questions"], limit=20).questions.no_answer.exact_match == 0
    with pytest.raises(InputError, match=r"context: …"):
        always(["translate English to French: Hello."])
