"""The bundled model is what its card says: it loads plainly, it is small, and its French is French."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, T5ForConditionalGeneration

from bench import evaluation
from t5accel.backends.torch_eager import TorchEager
from t5accel.decoding.greedy_search import greedy
from t5accel.models.sizes import T5Dims
from t5accel.tokenization import text_to_text

FOLDER = Path(__file__).resolve().parents[2] / "data/mini-t5"
RECORD = Path(__file__).resolve().parents[2] / "data/results/training-mini.json"


@pytest.fixture(scope="module")
def mini():
    """The model and tokenizer, loaded by transformers alone."""
    model = T5ForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(FOLDER)


def test_it_is_small_and_of_its_shape(mini) -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 25e6
    dims = T5Dims.of(mini[0])
    assert (dims.encoder_layers, dims.decoder_layers, dims.tied, dims.gated) == (6, 4, True, False)
    assert 10e6 < mini[0].num_parameters() < 12e6
    assert dims.vocab_size == len(mini[1]) == 8000


def test_recorded_quality_is_what_one_gets(mini) -> None:
    """The full sets, on both lines of transformers: neither the French nor the record can rot unnoticed."""
    backend = TorchEager(mini[0])
    generate = text_to_text(mini[1], lambda ids, mask: greedy(backend, ids, mask).sequences)
    report = evaluation.evaluate(generate, names=["translation", "questions"])
    rows = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]
    (recorded,) = (row for row in rows if row["measured"] == "quality" and "task" not in row)
    # A near tie may fall to the other side on another processor; half a point is room for a few of them.
    assert report.translation.bleu == pytest.approx(recorded["bleu"], abs=0.5)
    assert report.questions.seen.exact_match == pytest.approx(recorded["exact_match_seen"], abs=2)
