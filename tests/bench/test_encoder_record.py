"""Encoders beside each other: workers in processes of their own, cosines, memory."""

import numpy as np
import pytest
from conftest import TINY

from bench.record import encoders
from bench.record.encoders import EncoderWorker, least_cosine, measure, save_encoder, start
from bench.results import checked
from t5accel.models.random_init import random_t5


def test_cosines_are_by_token_and_the_least_counts():
    states = np.array([[[1.0, 0.0], [0.0, 2.0]]])
    assert least_cosine(states, 3 * states) == pytest.approx(1)
    assert least_cosine(states, np.array([[[1.0, 0.0], [2.0, 0.0]]])) == pytest.approx(0)


@pytest.mark.once
def test_a_row_says_time_memory_and_how_close(tmp_path, monkeypatch):
    monkeypatch.setattr(encoders, "load_model", lambda name: (random_t5(TINY | dict(vocab_size=32_000)), None))
    save_encoder("random:tiny", tmp_path / "model")
    names = ("torch", "t5accel", "t5accel bf16", "t5accel int8")
    workers = {name: start(name, tmp_path / "model", tmp_path, threads=1) for name in names}
    rows = measure(workers, ((1, 8), (2, 5)), tmp_path, rounds=2, model="random:tiny", threads=1)
    for worker in workers.values():
        worker.close()
    assert len(rows) == 8 and all(checked(row) for row in rows)
    for row in rows:
        assert row["cosine"] > (0.9999 if row["precision"] == "fp32" else 0.9)
        assert row["peak_memory_bytes"] > 30e6 and len(row["latency_s"]) == 2 and row["ratio"] > 0
    assert isinstance(workers["t5accel"], EncoderWorker) and "onnxruntime" in workers["t5accel"].versions
