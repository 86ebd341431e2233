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


def test_size() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 25e6
    assert json.loads((FOLDER / "config.json").read_text())["model_type"] == "t5"


def test_shape(mini) -> None:
    dims = T5Dims.of(mini[0])
    assert (dims.encoder_layers, dims.decoder_layers, dims.tied, dims.gated) == (6, 4, True, False)
    assert 10e6 < mini[0].num_parameters() < 12e6
    assert dims.vocab_size == len(mini[1]) == 8000


@pytest.mark.parametrize(
    ("english", "french"),
    [("Where is my bag?", {"Où est mon sac ?"}), ("She lost her red umbrella.", {"Elle a perdu son parapluie rouge."})],
)
def test_french(mini, english: str, french: set[str]) -> None:
    inputs = mini[1](f"translate English to French: {english}", return_tensors="pt")
    tokens = mini[0].generate(**inputs, max_new_tokens=24, num_beams=1, do_sample=False)
    assert mini[1].decode(tokens[0], skip_special_tokens=True) in french


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
