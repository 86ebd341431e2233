"""Scores for gates and sweeps: they are what plain numpy and the evaluation sets say, and they move."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_export import export_model, histories
from test_export import teacher_forced as torch_logits

from bench import evaluation
from bench.precision import agreement, text_quality
from t5accel.backends.torch_eager import TorchEager
from t5accel.decoding.greedy_search import greedy
from t5accel.distillation.validation import make_validator
from t5accel.errors import InputError
from t5accel.metrics import ROW_SCORES
from t5accel.precision.calibration import CalibrationSample
from t5accel.precision.gate import text_score
from t5accel.tokenization import text_to_text


@pytest.fixture(scope="module")
def examples(padded_batch) -> list[CalibrationSample]:
    """Two, of different sizes."""
    ids, mask = padded_batch
    new = histories(6, 1, 9)[:, 0]
    return [CalibrationSample(ids, mask, new), CalibrationSample(ids[:2, :4], mask[:2, :4], new[2:4])]


def changed(model: Any, change: Callable[[Any], Any]) -> Any:
    other = copy.deepcopy(model)
    with torch.no_grad():
        change(other)
    return other


def by_numpy(one: Any, other: Any, examples: list[CalibrationSample]) -> dict[str, float]:
    """The same from transformers' logits, in plain words."""
    equal, divergences = [], []
    for ids, mask, given in examples:
        p, q = (torch_logits(model, ids, mask, given[:, None])[:, 0].astype(np.float64) for model in (one, other))
        equal += (p.argmax(-1) == q.argmax(-1)).ravel().tolist()
        p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (p, q))
        divergences += (p * np.log(p / q)).sum(-1).ravel().tolist()
    return {"agreement": 100 * np.mean(equal), "closeness": -np.mean(divergences)}


# Agreement


@pytest.mark.parametrize("kind", ["deeper-decoder", "mt5"])
def test_agreement_as_numpy_has_it(tiny_t5, exported, examples, tmp_path: Path, kind: str) -> None:
    def blur(model: Any) -> None:
        wo = model.decoder.block[-1].layer[-1].DenseReluDense.wo.weight
        wo += 0.05 * torch.randn(wo.shape, generator=torch.Generator().manual_seed(0))

    other = changed(tiny_t5(kind), blur)
    export_model(other, tmp_path / "other")
    expected = by_numpy(tiny_t5(kind), other, examples)
    assert 20 < expected["agreement"] < 100 and expected["closeness"] < -1e-4
    actual = agreement(exported(kind), examples, threads=1)(tmp_path / "other")
    assert actual["agreement"] == pytest.approx(expected["agreement"], abs=0.1)
    assert actual["closeness"] == pytest.approx(expected["closeness"], rel=1e-2)


# Texts


def test_text_quality_is_that_of_the_evaluation_sets(mini, exported_mini) -> None:
    model, tokenizer = mini
    backend = TorchEager(model)
    texts = text_to_text(tokenizer, lambda ids, mask: greedy(backend, ids, mask, max_new_tokens=64).sequences)
    expected = evaluation.evaluate(texts, limit=2)
    scores = text_quality(limit=2, threads=1)(exported_mini)
    assert scores == {"bleu": pytest.approx(expected.translation.bleu), "rougeL": pytest.approx(
        expected.summaries.all.rougeL), "exact_match": pytest.approx(expected.questions.all.exact_match)}  # fmt: skip
    assert scores["bleu"] > 5 and scores["rougeL"] > 20


def test_the_score_on_rows_or_a_file_of_them_is_that_of_validation(mini, exported_mini, tmp_path: Path) -> None:
    """The same number as distillation logs, from torch there and from an export here; answers as long as targets."""
    texts = ["Where is my bag?", "I am tired.", "She is at home now.", "We have to go."]
    rows = [{"source": f"translate English to French: {text}", "target": f"Il {i} a un été là."}
            for i, text in enumerate(texts)]  # fmt: skip
    file = tmp_path / "dev.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for metric in ROW_SCORES:
        expected = make_validator(rows, mini[1], metric)(mini[0].eval())[metric]
        found = [text_score(given, metric, threads=1, batch_size=3)(exported_mini) for given in (rows, file)]
        assert found[0] == found[1] == {metric: pytest.approx(expected, abs=0.006)}
    mini[0].eval()
    assert found[0] == {"exact_match": 0} and text_score(rows, "chrf", threads=1)(exported_mini)["chrf"] > 5
    for given, options, message in (([], {}, "holds no rows"), ([{"source": "a"}], {}, r"examples\[0\]: no 'target'"),
                                    (rows, dict(metric="luck"), "luck"),
                                    (rows, dict(batch_size=0), "batch_size")):  # fmt: skip
        with pytest.raises(InputError, match=message):
            text_score(given, **options)
