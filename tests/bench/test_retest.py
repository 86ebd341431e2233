"""The script that measures the claims again, at toy size: its rows, and that unequal outputs are never timed."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from bench.record import retest
from bench.results import checked


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
