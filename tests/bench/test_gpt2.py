"""GPT-2: all ways of decoding give transformers' tokens, and the bytes that they hand over are those counted."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.gpt2 import (
    Moved,
    cached,
    export_gpt2,
    random_gpt2,
    recomputed,
    recomputed_on_tensors,
    torch_greedy,
)
from t5accel.backends.ort_session import SessionSettings, open_session
from t5accel.parity import assert_varied

SIZES: dict[str, Any] = dict(vocab_size=200, n_embd=64, n_layer=3, n_head=4, n_positions=64)
PROMPTS = np.random.default_rng(0).integers(1, 200, (2, 7))
NEW = 16


@pytest.fixture(scope="module")
def model() -> Any:
    return random_gpt2(SIZES)


@pytest.fixture(scope="module")
def expected(model: Any) -> np.ndarray:
    tokens = torch_greedy(model)(PROMPTS, NEW)
    assert_varied(tokens, 6)
    return tokens


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    for cache in (False, True):
        for last in (False, True):
            export_gpt2(model, folder / f"{cache}-{last}.onnx", cache=cache, last_logits=last)
    return folder


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("cache", [False, True])
def test_every_way_writes_transformers_tokens(folder: Path, expected, cache: bool, last: bool, bound: bool) -> None:
    graph, anew = folder / f"{cache}-{last}.onnx", partial(recomputed, last_logits=last)
    generate = (cached if cache else anew)(graph, bound=bound, moved=Moved())
    assert (generate(PROMPTS, NEW) == expected).all()
    assert (generate(PROMPTS[:1], NEW) == expected[:1]).all()  # the same session at another size


@pytest.mark.parametrize("last", [False, True])
def test_on_torch_s_memory_only_ids_and_tokens_are_handed_over(folder: Path, expected: np.ndarray, last: bool) -> None:
    session, moved = open_session(folder / f"False-{last}.onnx", SessionSettings()), Moved()
    generate = recomputed_on_tensors(session, "cpu", moved, last_logits=last)
    assert (generate(PROMPTS, NEW) == expected).all()
    assert moved.size_bytes == sum(2 * 8 * (length + 1) for length in range(7, 7 + NEW))


def test_the_bytes_that_are_handed_over_are_counted(folder: Path) -> None:
    moved = {}
    for cache in (False, True):
        for bound in (False, True):
            counter = Moved()
            (cached if cache else recomputed)(folder / f"{cache}-False.onnx", bound=bound, moved=counter)(PROMPTS, NEW)
            moved[cache, bound] = counter.size_bytes
    ids = sum(2 * length * 8 for length in range(7, 7 + NEW))
    logits = sum(2 * length * 200 * 4 for length in range(7, 7 + NEW))  # of all positions, in every step
    assert moved[False, False] == logits + ids
    position = 2 * 3 * 64 * 4 * 2  # keys and values, layers, width, fp32, rows
    history = sum((past + all_) * position for past, all_ in zip([0, *range(7, 22)], range(7, 23), strict=True))
    steps = 2 * 8 * (7 + NEW - 1) + 2 * 200 * 4 * (7 + NEW - 1)
    assert moved[True, False] == history + steps
    assert moved[True, True] == steps
    assert moved[False, True] == PROMPTS.nbytes + NEW * 2 * 200 * 4
