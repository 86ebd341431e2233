"""The random inputs of a decoding step."""

from __future__ import annotations

from functools import partial

import numpy as np
from refused import refused

from bench.profiling import step_feeds
from t5accel.backends.ort_session import SessionSettings, open_session
from t5accel.graphs.contract import DECODER, decoder_spec
from t5accel.graphs.manifest import read_manifest


def test_feeds_are_those_of_the_contract(exported, kind: str) -> None:
    dims = read_manifest(exported(kind)).dims
    feeds = step_feeds(dims, batch=2, rows=3, past=0, new=2, source=5)
    sizes = dict(B=2, K=3, P=0, T=2, S=5)
    assert {name: (array.dtype.name, array.shape) for name, array in feeds.items()} == {
        tensor.name: (tensor.dtype, tuple(sizes.get(size, size) for size in tensor.shape))
        for tensor in decoder_spec(dims).inputs
    }
    logits = open_session(exported(kind) / DECODER, SessionSettings(threads=1)).run(["logits"], feeds)[0]
    assert logits.shape == (2, 3, 2, 300) and np.isfinite(logits).all()


def test_wrong_sizes(exported) -> None:
    dims = read_manifest(exported()).dims
    for name in ("batch", "rows", "past", "new", "source"):
        refused(partial(step_feeds, dims), name, -1, 1.5, "3", None)
