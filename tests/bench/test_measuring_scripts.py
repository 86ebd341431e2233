"""Scripts that measure, at toy size: what they write are rows of the one kind."""

from __future__ import annotations

import json
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.results import checked
from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.ngram_lookup import prompt_lookup
from t5accel.precision.recipes import RECIPES

pytestmark = pytest.mark.usefixtures("cache_of_its_own")


def test_drafts_are_timed_beside_greedy_search_with_and_without_the_encoder() -> None:
    script = import_module("bench.record.drafts")
    backend, texts = script.engine("mini", "fp32"), ["translate English to French: I am tired.", "summarize: Rain."]
    tokenizer = script.TokenizerFile(backend.folder)
    runs = {"greedy": lambda own, batch: greedy(own, *batch, max_new_tokens=8),
            "lookup": lambda own, batch: prompt_lookup(own, *batch, max_new_tokens=8)}  # fmt: skip
    given = script.batches(tokenizer, texts, 1)
    rows = [checked(row) for row in script.rows_of("summaries", "fp32", backend, runs, given, 2)]
    assert [(row["encoder"], row["system"]) for row in rows] == [
        (encoder, system) for encoder in ("included", "beforehand") for system in runs
    ]
    for row in rows:
        assert (row["equal"], row["of"], row["texts"], row["forced"]) == (2, 2, 2, False)
        assert row["decoder_calls"] > 0 and ("drafted" in row) == (row["system"] == "lookup")


def test_a_recipe_is_scored_with_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    script = import_module("bench.record.precision")
    monkeypatch.setattr(script, "LADDER", (RECIPES["int8"],))
    monkeypatch.setattr(script, "text_quality", lambda: lambda folder: {"bleu": float(len(str(folder)) > 0)})
    monkeypatch.setattr(script, "examples", partial(script.examples, rows=1))
    fp32, int8 = (checked(row) for row in script.quality_rows())
    assert fp32["agreement"] == 100 and fp32["closeness"] == 0 > int8["closeness"]
    assert (int8["precision"], int8["recipe_hash"]) == ("int8", RECIPES["int8"].hash)
    assert int8["size_bytes"] < fp32["size_bytes"] / 3


def test_the_engine_s_loops_are_taken_apart(monkeypatch: pytest.MonkeyPatch, tiny_t5: Any, tmp_path: Path) -> None:
    script = import_module("bench.record.engine")
    from t5accel.api import accelerate

    tiny_t5("shallower-decoder").save_pretrained(tmp_path)
    monkeypatch.setattr(script, "accelerate", lambda name, progress: accelerate(str(tmp_path), progress=progress))
    real = np.random.default_rng

    class Small:
        def integers(self, low: int, high: int, size: Any) -> np.ndarray:
            return real(0).integers(low, 300, size)

    monkeypatch.setattr(script.np.random, "default_rng", lambda seed: Small())
    rows = [checked(row) for row in script.overhead_rows(tokens=12, rounds=1)]
    parts = [(row["system"], row["cell"]) for row in rows]
    assert parts == [("greedy()", "in all"), ("greedy()", "in the decoder session"), ("generate()", "in all"),
                     ("generate()", "in the decoder session"), (script.THEIRS, "in all"),
                     (script.THEIRS, "in the decoder session"), (script.THEIRS, "in our forward")]  # fmt: skip
    assert all(row["us_per_token"] > 0 for row in rows)


def test_warm_starts_are_timed_in_processes_of_their_own_beyond_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    script = import_module("bench.record.engine")
    assert len(script.STARTS) == 2
    (way,) = ways = [name for name in script.STARTS if "without torch" in name]
    imports, start = script.STARTS[way]
    monkeypatch.setattr(script, "STARTS", {way: (imports, start)})
    rows = [checked(row) for row in script.start_rows(names=("mini",), repeats=1)]
    assert [(row["system"], row["cell"]) for row in rows] == [(*ways, "by the clock"), (*ways, "of the processor")]
    whole = script._printed_seconds(f"import time; {imports}; name = 'mini'; {start}; print(time.process_time())")
    assert 0 < rows[1]["seconds"] < whole and rows[0]["seconds"] > 0


def test_a_floor_is_measured_at_the_size_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    script, sizes = import_module("bench.record.floors"), []
    monkeypatch.setattr(script.machine, "read_rates", lambda size, passes: sizes.append(size) or [1e9, 4e9, 2e9])
    whole, short = (checked(row) for row in script.floor_rows("random:t5-small", "fp32", 3))
    assert sizes == [whole["weight_bytes"], short["weight_bytes"]] == [153_917_440, 104_697_344]
    assert [row["system"] for row in (whole, short)] == ["all logits", "shortlist"]
    for row in (whole, short):
        assert row["bytes_per_s"] == 4e9 and row["floor_s"] == row["bytes_per_step"] / 4e9
        assert row["settings"] == {"passes": 3, "median_bytes_per_s": 2e9, "slowest_bytes_per_s": 1e9}
    assert len([*script.floor_rows("mini", "fp32", 3)]) == len([*script.floor_rows("random:t5-small", "int8", 3)]) == 1


def test_sorted_batches_are_timed_beside_batches_in_file_order_on_equal_answers() -> None:
    script = import_module("bench.record.batch")
    rows = [checked(row) for row in script.rows_of("fp32", 2, 1, budgets=(200,))]
    assert [(row["cell"], row["system"]) for row in rows] == [
        (order, system) for order in ("task by task", "mixed") for system in (script.NAIVE, "sorted, 200 tokens")
    ]
    for row in rows:
        assert row["equal"] == row["of"] == row["texts"] and row["tokens_per_s"] > 0 and row["forced"] is False
    sizes = [len(chosen) for chosen, _ in script.InFileOrder(*opened(), rows=3).tokens([np.array([5, 1])] * 7)]
    assert sizes == [3, 3, 1]


def test_the_command_is_timed_over_short_texts_and_every_row_has_to_be_there(tmp_path: Path, monkeypatch) -> None:
    script = import_module("bench.record.batch")
    (row,) = map(checked, script.many(6, tmp_path))
    assert row["answered"] == row["texts"] == 6 and 2 < row["distinct"] <= 6 < row["new_tokens"] <= 6 * 24
    assert row["peak_memory_bytes"] > 5e7 and row["output_bytes"] > row["input_bytes"] > 6 * 30
    again = tmp_path / "again"
    again.mkdir()
    read = SimpleNamespace(dumps=json.dumps, loads=lambda line: {"id": 0, "answer": "Oui."})
    monkeypatch.setattr(script, "json", read)
    with pytest.raises(RuntimeError, match="6 rows"):
        [*script.many(6, again)]


def test_whole_jobs_are_timed_beside_each_other_on_equal_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    script = import_module("bench.record.batch")
    real, engines = script.job, []

    def without_ray(python: Path, texts: list[str], model: Path, engine: str, threads: int) -> np.ndarray:
        engines.append((engine, threads, len(texts)))
        return real(Path(sys.executable), texts, model, "local", threads)

    monkeypatch.setattr(script, "job", without_ray)
    monkeypatch.setattr(script.machine, "cpu_threads", lambda: 2)
    rows = [checked(row) for row in script.engine_rows(1, 1, copies=(1,))]
    assert [row["system"] for row in rows] == ["local engine", "Ray, one actor", "Ray, an actor for each core"]
    assert all(row["equal"] == row["of"] == row["texts"] and "tokens_per_s" not in row for row in rows)
    assert [*dict.fromkeys(engines)] == [("local", 2, rows[0]["texts"]), ("ray", 2, rows[0]["texts"]),
                                         ("ray", 1, rows[0]["texts"])]  # fmt: skip


def opened() -> Any:
    from t5accel.api import open_backend

    return open_backend("mini", progress=False)[:2]
