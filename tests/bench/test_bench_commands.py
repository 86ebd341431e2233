"""The commands of `python -m bench`: what they print, where, and how they end."""

import json
import os
import re
import socket
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_cli
from test_cli import said
from test_figures import ROWS

import bench.advise
import bench.course
from bench import scoreboard
from bench.__main__ import app
from bench.advise import Advice, Need
from bench.course import NotebookRun
from bench.figures import board
from bench.scoreboard import Forced
from bench.systems import CPU_REFERENCE, select_systems
from t5accel.precision.convert import quantize_export
from t5accel.precision.gate import text_score

pytestmark = pytest.mark.usefixtures("cache_of_its_own", "threads_put_back")

call, refused = partial(test_cli.call, app=app), partial(test_cli.refused, app=app)
COUNTS = ("batch", "source-tokens", "new-tokens", "rounds", "threads")


def test_usage_errors_and_help(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    below_one = ("board", "advise", "evaluate", "triton --out x")
    for line in ("boards", "evaluate --limit 0", "triton --out x --precision bf16", "load http://a --clients 0",
                 "evaluate --limit 1 --json .",
                 *(f"board --{option} many" for option in COUNTS),
                 *(f"{command} --threads 0" for command in below_one)):  # fmt: skip
        assert call(*line.split()).exit_code == 2, line
    assert not os.listdir(tmp_path)
    for command in app.registered_commands:
        result = call(command.callback.__name__, "--help")
        assert result.exit_code == 0 and "Usage" in result.stdout


REFUSED = {
    "board --model random:t5-tiny --json x": "random:t5-small", "board --technique magic --json x": "'magic'",
    "board --quality-limit -1 --json x": "limit", "board --model nope --threads 1 --json x": "'nope'",
    **{f"board --{name} {n} --json x": f"--{name} " for name in COUNTS[:-1] for n in (0,)},
    "advise --task poems": "--task ", "advise --matters speed": "matters ",
    "advise --batch 0": "batch", "advise --max-loss little": "bleu=0.5, got 'little'",
    "advise --max-loss chrf=1": "--max-loss ", "advise --model nope": "'nope'",
    "advise --task questions --max-loss bleu=1": "--max-loss must be numbers of 0 or more for exact_match, ",
    "triton --out x --window-ms -5": "--window-ms must be a number of 0 or more, got -5.0",
    "advise --results nowhere.json": "nowhere.json", "course --notebooks . --out x": "No numbered notebook",
    "evaluate --model nope": "'nope'", "evaluate --data x --limit 1": "Leave --limit",
    "evaluate --metric bleu": "--metric is for the rows of --data",
    "evaluate --data missing.jsonl": "missing.jsonl", "evaluate --data x --metric luck": "--metric",
    "load 127.0.0.1:8123 --rate 5": "url must begin with http://, got '127.0.0.1:8123'",
    "load http://127.0.0.1:1": "--rate and --clients",
    "load http://127.0.0.1:1 --rate 20 --seconds -1": "--seconds must be a number above 0, got -1.0",
    "demo --port 1": "gradio is missing. Gradio needs transformers 5: run `make demo`",
}  # fmt: skip


@pytest.mark.parametrize("line", REFUSED)
def test_what_a_command_refuses_is_said_in_a_sentence_and_nothing_is_written(tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    assert REFUSED[line] in refused(*line.split()) and not os.listdir(tmp_path)


def test_triton_refuses_a_model_without_a_tokenizer_before_it_is_exported(tmp_path, tiny_t5, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_t5().save_pretrained("mute")
    for name in ("load_model", "export_model"):
        monkeypatch.setattr(f"t5accel.graphs.export_cache.{name}", lambda *_, **__: pytest.fail("loaded or exported"))
    for model in ("random:t5-small", "mute"):
        line = refused("triton", "--out", "models", "--name", "mute", "--model", model)
        assert f"{model} has " in line and "no tokenizer" in line


@pytest.fixture
def measured(monkeypatch):
    calls = []

    def bench(model, job, *, systems, **options):
        calls.append((model, job, [system.name for system in systems], options))
        return ROWS

    monkeypatch.setattr(scoreboard, "bench", bench)
    return calls


def test_bench_passes_every_option_on_and_writes_what_it_is_told(measured, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench", "board", "--batch", "2"])
    rows, picture = tmp_path / "new" / "rows.json", tmp_path / "new" / "board.svg"
    result = call(
        "board", "--model", "random:t5-small", "--json", rows, "--plot", picture, "--batch", 2, "--source-tokens", 3,
        "--new-tokens", 4, "--rounds", 5, "--threads", 6, "--quality-limit", 7, "--no-peak-memory",
    )  # fmt: skip
    assert (result.exit_code, result.stdout) == (0, board(ROWS) + "\n")
    names = [technique.name for technique in select_systems([], model="random:t5-small")]
    options = dict(rounds=5, threads=6, limit=7, peak_memory=False, progress=True)
    (warning,) = said(result)
    assert warning.startswith("Warning: the rounds of our loop differ widely")
    assert measured == [("random:t5-small", Forced(4, 3, 2), names, options)]
    written = json.loads(rows.read_text(encoding="utf-8"))
    assert written["command"] == "python -m bench board --batch 2" and written["rows"] == ROWS
    assert "<svg" in picture.read_text()


def test_bench_measures_several_lengths_into_one_file_and_only_the_techniques_asked_for(measured, tmp_path):
    rows = tmp_path / "rows.json"
    result = call("board", "--new-tokens", 4, "--new-tokens", 8, "--technique", "transformers without", "--json", rows)
    assert (result.exit_code, result.stdout) == (0, 2 * (board(ROWS) + "\n"))
    assert [job.new_tokens for _, job, _, _ in measured] == [4, 8]
    assert measured[0][2] == ["transformers without cache", CPU_REFERENCE]
    assert json.loads(rows.read_text(encoding="utf-8"))["rows"] == 2 * ROWS


def test_a_board_is_shown_beside_the_same_board_of_another_machine_or_refused_before_it_is_measured(measured, tmp_path):
    there = tmp_path / "there.json"
    changes = {"ratio": 3.0, "ratio_samples": [2.0, 4.0], "latency_s": [1.5], "reference": CPU_REFERENCE}
    rows = [row | changes for row in ROWS]
    about = {"machine": {"cpu": "Another CPU"}, "date": "2026-01-02"}
    there.write_text(json.dumps({**about, "rows": [*rows, rows[0] | {"batch": 9, "ratio": 7.0}]}), encoding="utf-8")
    alike = ["--model", ROWS[0]["model"], "--batch", ROWS[0]["batch"], "--source-tokens", ROWS[0]["source_tokens"]]
    alike += ["--new-tokens", ROWS[0]["new_tokens"]]
    result = call("board", *alike, "--compare", there)
    shown = result.stdout.removeprefix(board(ROWS)).split("\n")
    assert result.exit_code == 0 and shown[2] == "Beside Another CPU, 2026-01-02:" and "7.00x" not in result.stdout
    assert [line.split("  ")[0] for line in shown[5:-1]] == [row["system"] for row in ROWS]
    per_token = 1500 / ROWS[0]["new_tokens"]
    assert all(line.endswith(f"{per_token:.2f}  3.00x  (2.00–4.00)") for line in shown[5:-1])
    measured.clear()
    assert "has no board of model" in refused("board", *alike, "--batch", 5, "--compare", there)
    untimed = [{key: value for key, value in row.items() if key != "latency_s"} for row in rows]
    for content in ({"rows": []}, *(about | {"rows": bad} for bad in ([1], {"a": 1}, untimed))):
        there.write_text(json.dumps(content), encoding="utf-8")
        assert "--compare must be a file" in refused("board", *alike, "--compare", there) and not measured
    for option in ("--json", "--plot"):
        assert call("board", option, tmp_path).exit_code == 2 and not measured
    assert "--plot must be a file with the ending of a picture" in refused("board", "--plot", "x.xyz") and not measured


@pytest.mark.parametrize("broken", ["board", "plot_board"])
def test_what_was_measured_is_not_lost_where_it_cannot_be_shown(measured, tmp_path, monkeypatch, broken):
    monkeypatch.setattr(f"bench.figures.{broken}", lambda *_: 1 / 0)
    result = call("board", "--json", tmp_path / "rows.json", "--plot", tmp_path / "board.png")
    assert result.exit_code == 1 and "ZeroDivisionError" in said(result)[-1]
    assert json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["rows"] == ROWS


def test_advise_passes_every_option_on_and_prints_the_advice(monkeypatch, tmp_path):
    calls = []

    def advise(need, *, results):
        calls.append((need, results))
        return Advice(need)

    monkeypatch.setattr(bench.advise, "recommend", advise)
    result = call(
        "advise", "--model", "me/mine", "--task", "questions", "--matters", "throughput", "--batch", 3, "--beams", 2,
        "--source-tokens", 5, "--new-tokens", 6, "--max-loss", "exact_match=0.5", "--device", "cuda",
        "--threads", 7, "--results", tmp_path, "--results", "mine.json", "--explain",
    )  # fmt: skip
    assert result.exit_code == 0 and result.stdout.startswith("me/mine, questions, for throughput: batch 3, 2 beams")
    need = Need("me/mine", "questions", "throughput", 3, 2, 5, 6, {"exact_match": 0.5}, "cuda", 7)
    assert calls == [(need, [tmp_path, Path("mine.json")])]
    assert call("advise", "--max-loss", "exact_match=0.5", "--max-loss", "bleu=2").exit_code == 0
    assert calls[1] == (Need(max_loss={"exact_match": 0.5, "bleu": 2.0}), [])
    monkeypatch.undo()
    long = call("advise", "--task", "translation", "--explain")
    assert 'model = accelerate("mini"' in long.stdout
    assert re.search(r"^\* +[\w-]+, our loop .* \d+\.\d\dx ", long.stdout, re.MULTILINE)


def test_course_prints_the_time_of_each_notebook_and_the_board_and_says_last_what_failed(monkeypatch, tmp_path):
    calls, first = [], NotebookRun("00_start.ipynb", 7.0, tmp_path / "00_start.ipynb")
    runs = [first]
    monkeypatch.setattr(bench.course, "run_course", lambda *where: calls.append(where) or (runs, "the board"))
    result = call("course", "--notebooks", tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 0 and calls == [(tmp_path, tmp_path / "out")]
    assert "00_start.ipynb: 7 s, 0 MB\n" in result.stdout and "the board" in result.stdout
    failed = replace(first, copy="copy", failed="ValueError: no", details="cell and traceback")
    runs[:] = [failed, NotebookRun("01_next.ipynb", 2.0, "copy")]
    result = call("course")
    assert result.exit_code == 1 and "cell and traceback" in result.stderr
    assert result.stdout.splitlines()[-1] == "00_start.ipynb: FAILED after 7 s, ValueError: no; see copy"


def test_evaluate_prints_the_report_and_writes_what_it_is_told(tmp_path):
    file = tmp_path / "new" / "quality.json"
    result = call("evaluate", "--limit", 1, "--json", file)
    assert result.exit_code == 0 and result.stdout.startswith("LIMITED")
    document = json.loads(file.read_text(encoding="utf-8"))
    assert (document["model"], document["limit"]) == ("mini", 1)
    assert document["translation"]["rows"] == 3 and document["questions"]["all"]["rows"] == 2


def test_progress_is_for_those_who_watch(monkeypatch, dev):
    options = ("evaluate", "--data", dev, "--metric", "exact_match")
    quiet = call(*options)
    assert (quiet.exit_code, quiet.stderr) == (0, "")
    monkeypatch.setattr("t5accel.machine.watches_stderr", lambda: True)
    result = call(*options)
    assert result.stdout == "30 rows: exact_match 100.00\n"
    assert result.stderr.startswith("Loading mini …\n")
    assert "scoring: 100%" in result.stderr and "30/30" in result.stderr


def test_evaluate_scores_an_export_on_rows_of_the_users(tmp_path, exported_mini, dev):
    quantize_export(exported_mini, tmp_path / "int4", "int4")
    expected = text_score(dev, "exact_match", threads=1)(tmp_path / "int4")["exact_match"]
    assert expected < 100
    file, options = tmp_path / "scores.json", ("--data", dev, "--metric", "exact_match", "--threads", 1)
    for folder, score in ((exported_mini, 100.0), (tmp_path / "int4", expected)):
        result = call("evaluate", "--model", folder, *options, "--json", file)
        assert result.stdout == f"30 rows: exact_match {score:.2f}\n"
        document = json.loads(file.read_text(encoding="utf-8"))
        assert (document["model"], document["rows"], document["exact_match"]) == (str(folder), 30, score)
    assert "--precision" in refused("evaluate", "--model", exported_mini, *options, "--precision", "int8")
    every = call("evaluate", "--model", exported_mini, "--data", dev).stdout
    assert re.fullmatch(r"30 rows: bleu \S+, chrf \S+, rougeL \S+, exact_match 100.00\n", every)


def test_load_fails_where_no_server_answers():
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{port.getsockname()[1]}"
        result = call("load", url, "--rate", 20, "--seconds", 0.3)
    assert result.exit_code == 2 and "no answer" in result.stdout and "nan" not in result.stdout
    (line,) = said(result)
    assert line.startswith(f"t5accel: {url} answered no request.")


def test_a_demo_on_a_port_in_use_is_refused_before_a_model_loads(monkeypatch):
    monkeypatch.setattr("bench.demo.page._gradio", lambda: None)
    monkeypatch.setattr("bench.demo.page.load_system", lambda *given: pytest.fail("loaded for nothing"))
    monkeypatch.setitem(sys.modules, "starlette.middleware", SimpleNamespace(Middleware=None))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"--port must be free, got {port}" in refused("demo", "--port", port)
