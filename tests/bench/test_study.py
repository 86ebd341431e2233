"""The two studies' rows: every rung proven before it is timed, scored, and written down part by part."""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.bert.graphs import fed_run
from bench.bert.ladder import ON_GPU, RUNGS, Readers, build, quality_rows, random_inputs, speed_rows
from bench.bert.model import random_bert, resize, widths
from bench.bert.reader import open_reader
from bench.bert.served import Protocol, Served, asked_of, numbered, served_rows, single_words
from bench.bert.spans import answerer, torch_run
from bench.gpt2 import OPTIMUM, WAYS
from bench.gpu.other_models import cells
from bench.gpu.suite import table
from bench.results import checked
from t5accel.errors import InputError
from t5accel.parity import ParityError
from training.reader import train_wordpiece

SIZES: dict[str, Any] = dict(
    vocab_size=150, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    initializer_range=0.2,
)  # fmt: skip
WITHOUT_OPTIMUM = [rung for rung in RUNGS if rung.kind != "optimum"]

pytestmark = pytest.mark.usefixtures("threads_put_back")


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Readers:
    pruned = random_bert(SIZES, seed=1)
    resize(pruned, {"heads": [1, 3], "neurons": [20, 40]})
    models = {"whole": random_bert(SIZES), "pruned": pruned.eval()}
    return Readers(models, tmp_path_factory.mktemp("study"), [random_inputs(150, 2, 24)], 1)


@pytest.fixture(scope="module")
def rows(readers: Readers) -> list[Any]:
    return speed_rows(WITHOUT_OPTIMUM, readers, model="tiny", batch=2, tokens=24, rounds=3)


def test_every_rung_has_a_row_that_a_file_takes(rows: list[Any], readers: Readers) -> None:
    assert [row["rung"] for row in map(checked, rows)] == [rung.name for rung in WITHOUT_OPTIMUM]
    by_name = {row["rung"]: row for row in rows}
    for rung in WITHOUT_OPTIMUM:
        row = by_name[rung.name]
        assert len(row["latency_s"]) == 3 and row["batch"] == 2 and row["source_tokens"] == 24
        assert row["tokens_per_s"] == pytest.approx(48 / np.median(row["latency_s"]))
        if rung.on:
            below = by_name[rung.on]["latency_s"]
            assert row["factor_samples"] == [a / b for a, b in zip(below, row["latency_s"], strict=True)]
        assert ("error" in row) == (not rung.exact) and 0 < row.get("error", 0.1) < 0.3
    assert not {"ONNX", "fused", "ONNX, whole"} & {name for name, row in by_name.items() if not row["exact"]}
    assert by_name["fused, whole"]["nodes"] < by_name["ONNX, whole"]["nodes"] / 3
    assert by_name["int8, whole"]["precision"] == "int8" and by_name["bf16, whole"]["precision"] == "bf16"
    assert by_name["int8, whole"]["size_bytes"] < by_name["fused, whole"]["size_bytes"]
    assert by_name["pruned"]["settings"] == {"reader": "pruned", "heads_left": 0.5, "neurons_left": 60 / 128}
    assert by_name["pruned"]["size_bytes"] < by_name["PyTorch"]["size_bytes"]
    weights = 4 * readers.models["whole"].num_parameters()
    sizes = {name: row["size_bytes"] for name, row in by_name.items()}
    assert sizes["PyTorch"] == 2 * sizes["bf16, whole"] == weights < sizes["ONNX, whole"] < 1.25 * weights


@pytest.mark.parametrize("which", ["whole", "pruned"])
def test_a_graph_of_other_weights_is_not_timed(readers: Readers, which: str) -> None:
    for rung in RUNGS:
        if rung.which == which and rung.kind == "fed":
            readers.graph(which, rung.graph)
    models = {**readers.models, which: random_bert({**SIZES, "layer_widths": widths(readers.models[which])}, seed=9)}
    other = replace(readers, models=models)  # whose graphs are there already, of other weights
    first = [rung for rung in RUNGS if rung.kind == "torch"]
    for rung in RUNGS:
        if rung.which != which or rung.kind not in ("fed", "bound"):
            continue
        with pytest.raises(ParityError):
            speed_rows([*first, rung], other, model="tiny", batch=1, tokens=16, rounds=3)
        row = speed_rows([*first, rung], other, model="tiny", batch=1, tokens=16, rounds=3, keep_going=True)[2]
        assert "ParityError" in row["failed"] and "latency_s" not in row


def test_optimum_s_graph_has_its_bytes(readers: Readers) -> None:
    pytest.importorskip("optimum.onnxruntime")
    rungs = [rung for rung in RUNGS if rung.name in ("PyTorch", "optimum, whole")]
    row = speed_rows(rungs, readers, model="tiny", batch=1, tokens=16, rounds=3)[1]
    assert row["size_bytes"] > 4 * readers.models["whole"].num_parameters()


def test_bert_large_is_drawn_alike_whatever_was_drawn_before(tmp_path: Path, readers: Readers, monkeypatch) -> None:
    study = import_module("bench.record.other_models")
    monkeypatch.setattr(study, "LARGE", "random:tiny")
    monkeypatch.setitem(study.RANDOM_SIZES, "tiny", SIZES)
    monkeypatch.setitem(study.RANDOM_SIZES, "bert-large", SIZES)
    monkeypatch.setattr(study, "small", lambda *_: (readers, None, {}))
    one, other = (study.large(tmp_path / name, 1).models["pruned"] for name in ("one", "other"))
    assert widths(one) == {"heads": [2, 2], "neurons": [30, 30]}
    for weight, again in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(weight, again)


def test_scores_belong_to_the_rung_and_the_gate_judges_them(readers: Readers) -> None:
    tokenizer = train_wordpiece(["Who came to Tillbury on Monday?", "It was Ann McCoy."] * 5, 120)
    never = {"whole": -1e9, "pruned": 1e9}  # the whole one abstains always, the pruned one never
    rungs = [rung for rung in RUNGS if rung.name in ("PyTorch", "pruned", "bound", "int8, whole")]
    rows = [checked(row) for row in quality_rows(rungs, readers, tokenizer, never, model="tiny", limit=12)]
    whole, pruned, bound, int8 = rows
    assert whole["exact_match_no_answer"] == int8["exact_match_no_answer"] == 100 and whole["inside"] and int8["inside"]
    for row in (pruned, bound):  # an article alone counts as no answer
        assert row["exact_match_no_answer"] < 50
    assert pruned["inside"] == (whole["f1"] - pruned["f1"] <= 1.0)
    assert whole["limit"] == 12


def test_bound_memory_serves_every_length_from_one_session(readers: Readers) -> None:
    tokenizer, graph = numbered(150), readers.graph("pruned", "int8")
    fed = answerer(tokenizer, fed_run(graph, readers.settings()), threshold=0.0)
    bound = answerer(tokenizer, open_reader(str(graph), threads=1, bound=True), threshold=0.0)
    texts = [asked_of(single_words(tokenizer), tokens, seed=tokens) for tokens in (16, 40, 16, 200, 40)]
    found = [bound([text])[0] for text in texts]
    assert found == [fed([text])[0] for text in texts] and len({*found}) > 2


def test_servers_answer_as_their_models_before_they_are_timed(readers: Readers, tmp_path: Path) -> None:
    tokenizer = numbered(150)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    readers.models["whole"].save_pretrained(tmp_path / "whole")
    right = answerer(tokenizer, torch_run(readers.models["whole"]), threshold=0.0)
    one = Served("torch", str(tmp_path / "whole"), str(tmp_path / "tokenizer"), 0.0, right)
    other = replace(one, name="graph", model=str(readers.graph("whole", "fused")), bound=True)
    how = dict(words=single_words(tokenizer), protocol=Protocol((16, 24), 3, 1.0), threads=1, logs=tmp_path)
    rows = [checked(row) for row in served_rows([one, other], **how, model="tiny")]
    kinds = ["equality", "sequential", "sequential", "open loop"]
    assert [(row["system"], row["measured"]) for row in rows] == [(w, k) for w in ("torch", "graph") for k in kinds]
    assert all(row["equal"] == row["of"] == 6 and row["distinct"] > 1 for row in rows if "equal" in row)
    lengths = [(row["source_tokens"], len(row["latency_s"])) for row in rows if "source_tokens" in row]
    assert lengths == [(16, 3), (24, 3)] * 2
    loops = [row for row in rows if row["measured"] == "open loop"]
    assert loops[0]["rate_per_s"] == loops[1]["rate_per_s"] and all(row["answered"] > 0 for row in loops)
    with pytest.raises(ParityError, match="wrong: . of 6"):
        served_rows([replace(other, name="wrong", model=str(readers.graph("pruned")))], **how)


def test_a_recording_goes_on_with_the_part_that_is_missing(tmp_path: Path, monkeypatch, capsys) -> None:
    study, done = import_module("bench.record.other_models"), []

    def parts(*_: Any):  # noqa: ANN202
        for name in ("one", "two"):
            yield name, lambda name=name: done.append(name) or [{"measured": "speed", "system": name}]

    def stop(*_: Any):  # noqa: ANN202
        yield next(parts())
        yield "two", lambda: 1 / 0

    monkeypatch.setattr("sys.argv", ["study.py", "gpt2", "--json", str(tmp_path / "rows.json")])
    monkeypatch.setattr(study, "gpt2_parts", stop)
    with pytest.raises(ZeroDivisionError):
        study.main()
    monkeypatch.setattr(study, "gpt2_parts", parts)
    study.main()
    content = json.loads((tmp_path / "rows.json").read_text())
    assert done == ["one", "two"] and [row["cell"] for row in content["rows"]] == ["one", "two"]
    assert content["command"] == "python -m bench.record.other_models gpt2"


def test_the_parts_of_the_recordings_are_named_once(tmp_path: Path) -> None:
    study = import_module("bench.record.other_models")
    for parts in (study.bert_parts, study.gpt2_parts):
        names = [name for name, _ in parts(tmp_path, 1)]
        assert len({*names}) == len(names) > 1


def test_as_on_a_gpu_gpt2_writes_transformers_tokens_and_bert_is_near_in_fp16_and_half_as_large(tmp_path) -> None:
    gpt2 = dict(vocab_size=200, n_embd=32, n_layer=1, n_head=4, n_positions=300)
    parts = cells(tmp_path, device="cpu", sizes={"gpt2": gpt2, "bert": {**SIZES, "max_position_embeddings": 512}})
    found = [*map(checked, parts["random:gpt2, 64 tokens"]())]
    assert [row["system"] for row in found] == [way for way in WAYS if way != OPTIMUM]
    assert all(row["equal"] == row["of"] == 64 for row in found)
    assert table(found).count("random:gpt2, 64 tokens") == len(found)
    name = "random:bert-large, pruned, 1 × 512"
    rows = {row["system"]: checked(row) for row in parts[name]()}
    assert rows.keys() == {rung.name for rung in ON_GPU} and not [row for row in rows.values() if "failed" in row]
    half, fused = rows["fp16"], rows["fused"]
    assert half["precision"] == "fp16" and half["size_bytes"] < 0.7 * fused["size_bytes"]
    assert 0 < half["error"] < 0.05, "rounded, and near"
    assert table([row | {"cell": name} for row in rows.values()]).count(name) == len(rows)


def test_what_runs_on_a_cpu_alone_is_refused_elsewhere(readers: Readers) -> None:
    for rung in (rung for rung in RUNGS if rung.kind in ("bound", "optimum")):
        with pytest.raises(InputError, match="runs on the CPU alone"):
            build(rung, replace(readers, device="cuda"), 1, 8)
