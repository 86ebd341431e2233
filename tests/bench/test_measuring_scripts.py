"""Scripts that measure, at toy size: what they write are rows of the one kind."""

import json
import sys
from collections import Counter
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import TINY

from bench.record import encoders, peers_quality, retest
from bench.record.engine import growth, soak
from bench.record.peers import save_model
from bench.results import checked
from t5accel.backends.torch_eager import TorchEager
from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.ngram_lookup import prompt_lookup
from t5accel.models.load import load_model
from t5accel.models.random_init import random_t5
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


def test_cosines_are_by_token_and_the_least_counts() -> None:
    states = np.array([[[1.0, 0.0], [0.0, 2.0]]])
    assert encoders.least_cosine(states, 3 * states) == pytest.approx(1)
    assert encoders.least_cosine(states, np.array([[[1.0, 0.0], [2.0, 0.0]]])) == pytest.approx(0)


def test_a_row_of_encoders_says_time_memory_and_how_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "load_model", lambda name: (random_t5(TINY | dict(vocab_size=32_000)), None))
    encoders.save_encoder("random:tiny", tmp_path / "model")
    names = ("torch", "t5accel", "t5accel bf16", "t5accel int8")
    workers = {name: encoders.start(name, tmp_path / "model", tmp_path, threads=1) for name in names}
    rows = encoders.measure(workers, ((1, 8), (2, 5)), tmp_path, rounds=2, model="random:tiny", threads=1)
    for worker in workers.values():
        worker.close()
    assert len(rows) == 8 and all(checked(row) for row in rows)
    for row in rows:
        assert row["cosine"] > (0.9999 if row["precision"] == "fp32" else 0.9)
        assert row["peak_memory_bytes"] > 30e6 and len(row["latency_s"]) == 2 and row["ratio"] > 0
    assert "onnxruntime" in workers["t5accel"].versions


def test_a_row_of_quality_has_the_scores_of_answers_that_end_by_themselves(tmp_path: Path) -> None:
    model = peers_quality.MODEL
    save_model(model, tmp_path / "models" / model)
    system, tokenizer = peers_quality.SYSTEMS["t5accel int8"], load_model(model)[1]
    row = checked(peers_quality.score(system, tmp_path, tokenizer, limit=2))
    assert row["bleu"] > 20 and row["rougeL"] > 40 and row["recipe_hash"] and row["limit"] == 2


def test_the_table_says_what_integers_cost() -> None:
    scores = dict(bleu=50.0, rougeL=70.0, exact_match=60.0)
    rows = [dict(system="transformers 4.57", precision="fp32", **scores),
            dict(system="other", precision="int8", **scores | dict(bleu=48.5, exact_match=61.0))]  # fmt: skip
    assert peers_quality.table(rows).splitlines()[2:] == [
        "transformers 4.57  fp32       50.0     70.0  60.0",
        "other              int8       48.5     70.0  61.0  -1.5 +0.0 +1.0",
    ]


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(peers_quality, "versions_of", lambda *_: {})
    monkeypatch.setattr(peers_quality, "save_model", lambda *_: None)
    monkeypatch.setattr(peers_quality, "score", lambda system, *_: asked.append(system.name) or {"system": system.name})
    for names in (["torchao int4, compiled", "CTranslate2 int8"], ["CTranslate2 int8", "llama.cpp q8_0"]):
        monkeypatch.setattr(sys, "argv", ["peers_quality", "--json", str(tmp_path / "rows.json"), "--systems", *names])
        peers_quality.main()
    assert sorted(asked) == ["CTranslate2 int8", "llama.cpp q8_0", "torchao int4, compiled"]


SMALL = dict(generations=6, settled_after=3, largest_batch=3, longest_source=5, longest_answer=2)


class Watched(TorchEager):
    """Remembers the batches, and may leak."""

    def __init__(self, model: Any, leak: int = 0):
        super().__init__(model)
        self.shapes, self.kept, self.leak = [], [], leak

    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> Any:
        self.shapes.append(input_ids.shape)
        self.kept.append(np.ones(self.leak))
        return super().encode(input_ids, attention_mask)


def test_batches_vary_by_the_seed_and_the_largest_comes_before_it_counts(tiny_t5: Any) -> None:
    first, second, other = (Watched(tiny_t5()) for _ in range(3))
    ticks: list[int] = []
    resident = soak(first, **SMALL, on_generation=lambda: ticks.append(1))
    assert len(resident) == len(ticks) == len(first.shapes) == 6
    assert (3, 5) in first.shapes[:3] and len(set(first.shapes)) > 2
    assert min(resident) > 1_000_000
    for backend, seed in ((second, 0), (other, 1)):
        soak(backend, **SMALL, seed=seed)
    assert first.shapes == second.shapes != other.shapes


def test_a_leak_is_seen_and_growth_counts_from_the_end_of_the_warm_up(tiny_t5: Any) -> None:
    resident = soak(Watched(tiny_t5(), leak=4_000_000), **SMALL)
    assert growth(resident, SMALL["settled_after"]) > 0.9 * 3 * 32_000_000 / max(resident)  # three times 32 MB
    assert growth((10, 100, 100, 90), settled_after=2) == 0
    assert growth((10, 100, 110, 90), settled_after=2) == 0.1


# The claims, measured again; unequal outputs are never timed


def ratios(rows: list[dict[str, Any]]) -> list[str]:
    """The systems that have a ratio to the first one."""
    for row in map(checked, rows):
        assert row["measured"] == "speed" and len(row["ratio_samples"]) == len(row["latency_s"])
    return [row["system"] for row in rows if row["system"] != row["reference"]]


def test_layouts_give_transformers_tokens_and_are_timed_in_both_loops(tiny_t5: Any) -> None:
    rows = list(retest.layout_rows(tiny_t5("shallower-decoder"), "toy", 1, source=8, tokens=6))
    assert Counter(row["beams"] for row in rows) == {1: 9, 4: 9}
    assert {row["reference"] for row in rows} == {"transformers with cache"}
    assert set(ratios(rows)) == {
        "transformers without cache", "PyTorch, our loop", "onnxt5, our loop", "onnxt5, generate()", "whole, our loop",
        "fastt5, our loop", "fastt5, generate()", "two graphs, our loop",
    }  # fmt: skip


def test_naive_bookkeeping_finds_the_same_answers(tiny_t5: Any) -> None:
    rows = list(retest.beam_rows(tiny_t5(), "toy", 1, source=8, tokens=6, batches=(1, 3)))
    assert [row["batch"] for row in rows] == [1, 1, 1, 3, 3, 3]
    assert ratios(rows) == ["vectorised", "steps alone"] * 2


@pytest.mark.long
def test_what_is_kept_changes_no_token(tiny_t5: Any) -> None:
    rows = list(retest.reuse_rows(tiny_t5(), "toy", 1, short=6, long=12))
    assert set(ratios(rows)) == {"kept"}
    assert [(row["cell"], row["backend"], row["source_tokens"]) for row in rows if row["system"] == "kept"] == [
        ("keys and values of the source", "PyTorch", 6), ("keys and values of the source", "PyTorch", 12),
        ("encoder output", "PyTorch", 12), ("encoder output", "PyTorch", 6),
        ("encoder output", "ONNX Runtime", 12), ("encoder output", "ONNX Runtime", 6),
    ]  # fmt: skip


def test_forgetting_the_source_computes_it_at_every_step(tiny_t5: Any) -> None:
    model, ids = tiny_t5(), np.array([[5, 6, 7, 1]])
    computed = []
    attention = model.decoder.block[0].layer[1].EncDecAttention
    hook = attention.k.register_forward_hook(lambda *_: computed.append(1))
    for backend, expected in ((retest.TorchEager(model), 1), (retest.ForgetsCross(model), 5)):
        computed.clear()
        retest.our_loop(backend, ids, 5)()
        assert len(computed) == expected
    hook.remove()


def test_torchs_int8_is_smaller_and_scored_on_the_bundled_model(mini: Any) -> None:
    model, tokenizer = mini
    rows = list(retest.torch_int8_rows({"mini": model}, tokenizer, limit=1))
    fp32, int8 = rows
    assert int8["size_bytes"] < 0.8 * fp32["size_bytes"]
    assert fp32["limit"] == int8["limit"] == 1 and fp32["bleu"] > 0


@pytest.mark.long
def test_graphs_are_compared_at_every_level(tiny_t5: Any) -> None:
    pytest.importorskip("sympy")  # which the package for transformers needs
    rows = list(retest.graph_rows(tiny_t5("shallower-decoder"), "toy", 1, sources=(8,)))
    levels = {row["system"]: row for row in rows if row["cell"] == "graph level"}
    assert levels["basic"]["contrib_operators"] == [] and levels["all"]["contrib_operators"]
    assert levels["disable"]["nodes"] >= levels["basic"]["nodes"] > levels["all"]["nodes"]
    assert Counter(row["cell"] for row in rows) == {"encoder": 3, "graph level": 4, "opening": 2}
    assert len(ratios(rows)) == 6 and not any("new_tokens" in row for row in rows), "nothing is generated"


def test_weights_in_another_processors_order_give_wrong_numbers() -> None:
    rows = {checked(row)["system"]: row for row in retest.moved_rows()}
    if rows:  # on a processor that keeps the weights of a convolution in blocks
        assert rows["as here"]["largest_difference"] < 1e-3 < 1 < rows["as elsewhere"]["largest_difference"]


def test_tokenizers_are_equal_and_their_share_is_one() -> None:
    rows = list(retest.tokenizer_rows(1, every=60))
    speeds = [row for row in rows if row["cell"] == "tokenizer"]
    shares = [row for row in rows if row["cell"] == "tokenizer share" and "share" in row]
    assert len(ratios(speeds)) == 4 and all(row["us_per_token"] > 0 for row in speeds)
    assert {(row["backend"], row["system"]) for row in map(checked, shares)} == {
        (engine, kind) for engine in ("PyTorch", "ONNX Runtime, int8") for kind in ("Python", "Rust")
    }
    assert all(0 < row["share"] < 1 for row in shares)
