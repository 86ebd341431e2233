"""The commands: what they print, where, and how they end; what they call is tested in its own module."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_draw import ROWS
from typer.testing import CliRunner

import bench.advise
import bench.course
import bench.scoreboard
import t5accel.cli
import t5accel.doctor
import training.train as training
import training.train as validate
from bench.advise import Advice, Need
from bench.course import NotebookError, NotebookRun
from bench.figures import board
from bench.precision import text_quality
from bench.scoreboard import Forced
from bench.tasks import rows, source_text
from bench.techniques import REFERENCE, choose
from t5accel.backends.ort_numpy import OrtNumpy
from t5accel.backends.ort_static import OrtStatic
from t5accel.cli import app
from t5accel.cli_options import ExportPrecision, IntegerPrecision, Precision
from t5accel.cli_training import training as training_commands
from t5accel.decoding.greedy_search import greedy
from t5accel.doctor import Check
from t5accel.errors import InputError
from t5accel.graphs.manifest import read_manifest
from t5accel.precision.gate import quantize_export
from t5accel.precision.recipes import RECIPES
from t5accel.serve.cli import serving as serving_commands
from t5accel.tokenization import TokenizerFile, text_to_text
from training.train import HeldOutQuality

ROOT = Path(__file__).resolve().parent.parent
GROUPS = (app, serving_commands, training_commands)
CALLBACKS = {command.callback.__name__: command.callback for group in GROUPS for command in group.registered_commands}
COMMANDS = sorted(CALLBACKS)

pytestmark = pytest.mark.usefixtures("cache_of_its_own", "threads_put_back")

TEXT = "translate English to French: I am tired."
COUNTS = ("batch", "source-tokens", "new-tokens", "rounds", "threads")


def call(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def said(result) -> list[str]:
    """The lines on standard error, without the progress bar with which transformers 5 loads weights."""
    return [line for line in result.stderr.splitlines() if line and not line.startswith("Loading weights")]


def refused(*arguments: object) -> str:
    """The one line on standard error with which a command refuses; nothing else is printed."""
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = said(result)
    assert line.startswith("t5accel: ")
    return line


# --- help -------------------------------------------------------------------------------------------------------------


def test_these_are_the_commands():
    others = {"distill", "doctor", "evaluate", "export", "prune", "quantize", "run", "serve", "train"}
    assert {"advise", "bench", "course", *others} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_its_options(command):
    result = call(command, "--help")
    assert result.exit_code == 0 and "Usage" in result.stdout
    plain = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", result.stdout).split())
    assert CALLBACKS[command].__doc__.split(":")[0].split(",")[0] in plain


def test_the_version_is_told_and_h_is_help():
    assert call("--version").stdout == f"t5accel {t5accel.__version__}\n"
    for words in ([], ["run"], ["cache"], ["cache", "clear"]):
        assert call(*words, "-h").stdout == call(*words, "--help").stdout


def test_a_shell_completes_commands_options_and_values(monkeypatch):
    for words, index, found in (
        ("eva", 1, "evaluate"),
        ("run --dev", 2, "--device"),
        ("run --precision in", 3, "int8"),
    ):
        monkeypatch.setenv("_T5ACCEL_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", f"t5accel {words}")
        monkeypatch.setenv("COMP_CWORD", str(index))
        result = CliRunner().invoke(app, [], prog_name="t5accel")
        assert found in result.stdout.split(), result.output


def test_the_choices_of_precision_are_the_recipes():
    assert [*map(str, Precision)] == [*RECIPES]
    assert {*ExportPrecision} == RECIPES.keys() - {"bf16"}
    assert {*IntegerPrecision} == {name for name, recipe in RECIPES.items() if recipe.integers}


def test_without_arguments_the_help_is_shown():
    result = call()
    assert result.exit_code in (0, 2) and "Usage" in result.output  # click 8.2 changed the code
    assert all(command in result.output for command in COMMANDS)


NOT_BELOW_ONE = (
    "run x",
    "bench",
    "advise",
    "evaluate",
    "batch in --out out",
    "triton --out x",
    "train --pairs a --out b",
)


def test_usage_errors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bad = ("run x --precision int9", "run x --beams 0", "run x --max-new-tokens 0", "evaluate --limit 0", "export",
           "export --model mini --out x --precision bf16", "triton --out x --precision bf16",
           "load http://a --clients 0",
           "quantize --model mini --out x --eval x --max-loss 1 --precision fp16")  # fmt: skip
    for line in ("runn", "run", "train", *bad, *(f"bench --{option} many" for option in COUNTS),
                 *(f"{command} --threads 0" for command in NOT_BELOW_ONE)):  # fmt: skip
        assert call(*line.split()).exit_code == 2, line
    assert not os.listdir(tmp_path)


# --- what is refused --------------------------------------------------------------------------------------------------

REFUSED = {
    "run x --model nope": "Allowed: 'mini', ", "bench --model random:t5-tiny --json x": "random:t5-small",
    "export --model nope --out x": "'nope'",
    "export --model mini --out x --external-threshold-bytes -1": "--external-threshold-bytes is -1",
    "bench --technique magic --json x": "'magic'", "bench --quality-limit -1 --json x": "limit is -1",
    "bench --model nope --threads 1 --json x": "'nope'",
    **{f"bench --{name} {n} --json x": f"--{name} is {n}; give" for name in COUNTS[:-1] for n in (0, -3)},
    "advise --task poems": "--task is 'poems'; give one of translation", "advise --matters speed": "matters is 'speed'",
    "advise --batch 0": "batch is 0", "advise --max-loss little": "--max-loss is 'little'",
    "advise --max-loss chrf=1": "--max-loss is", "advise --model nope": "'nope'",
    "advise --results nowhere.json": "No results at", "course --notebooks . --out x": "No numbered notebook",
    "train --pairs pairs.tsv --out x --threads 1": "pairs.tsv",
    "train --pairs a --out b": "t5accel: No translation pairs at a. Give a UTF-8 file",
    "evaluate --model nope": "'nope'", "evaluate --pairs missing.tsv --json x": "tatoeba.org",
    "evaluate --metric bleu": "--metric is for the rows of --data", "evaluate --data x --limit 1": "Leave --pairs",
    "evaluate --data missing.jsonl": "missing.jsonl", "evaluate --data x --metric luck": "--metric is 'luck'",
    "batch in.jsonl": "Give --out FOLDER", "batch in.jsonl one --out two": "Give --out FOLDER",
    "batch in.jsonl --out x --address a": "Give --engine ray",
    "load 127.0.0.1:8123 --rate 5": "url must begin with http://, got '127.0.0.1:8123'",
    "load http://127.0.0.1:1": "--rate and --clients",
    "load http://127.0.0.1:1 --rate 20 --seconds -1": "--seconds is -1.0",
    "demo --port 1": "gradio is missing. Gradio needs transformers 5: run `make demo`",
}  # fmt: skip


@pytest.mark.parametrize("line", REFUSED)
def test_what_a_command_refuses_is_said_in_a_sentence_and_nothing_is_written(tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    assert REFUSED[line] in refused(*line.split()) and not os.listdir(tmp_path)


# --- run --------------------------------------------------------------------------------------------------------------


def test_the_package_runs_as_a_module_in_a_process_of_its_own(tmp_path):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, "-m", "t5accel", "run", TEXT], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() and len(result.stdout.splitlines()) == 1
    assert re.search(r"\(\d+ tokens in \d+ ms", result.stderr)


def test_the_answer_alone_is_on_standard_output_and_its_length_is_bounded():
    result = call("run", TEXT, "--max-new-tokens", 1)
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 1
    assert said(result)[-1].startswith("(1 token in ")


def test_a_model_that_cannot_be_had_has_no_tokenizer_or_no_length_is_refused(tmp_path, tiny_t5):
    assert "config.json" in refused("run", TEXT, "--model", tmp_path)
    assert call("run", TEXT).exit_code == 0
    tiny_t5().save_pretrained(tmp_path / "mute")
    for _ in range(2):
        result = call("run", TEXT, "--model", tmp_path / "mute")
        assert result.exit_code == 2 and "no tokenizer" in said(result)[-1]


@pytest.fixture(scope="module")
def answer(mini):
    """What transformers' own model says."""
    batch = mini[1]([TEXT], return_tensors="pt")
    return mini[1].decode(mini[0].generate(**batch, max_new_tokens=64)[0], skip_special_tokens=True)


def test_every_precision_and_runtime_answers_and_the_fast_engine_is_the_default(tmp_path, monkeypatch, answer):
    monkeypatch.setenv("T5ACCEL_CACHE", str(tmp_path))
    for options, what in (
        ((), "ONNX Runtime, fp32"), (("--precision", "int8"), "ONNX Runtime, int8"),
        (("--precision", "bf16"), "torch with cache, bf16"), (("--runtime", "torch"), "torch with cache, fp32"),
        (("--runtime", "onnx", "--precision", "fp16"), "ONNX Runtime, fp16"),
    ):  # fmt: skip
        for more in ((), ("--stream",)):
            result = call("run", TEXT, *options, *more)
            assert (result.exit_code, result.stdout) == (0, f"{answer}\n"), result.output
            assert re.fullmatch(r"\(5 tokens in \d+ ms, " + re.escape(what) + r"\)", said(result)[-1])
        assert len(said(result)) == 1, "the second time it just answers"
    assert "'int8' runs on onnx, not on torch" in refused("run", TEXT, "--runtime", "torch", "--precision", "int8")
    listed = call("cache", "list").stdout
    assert "(mini)" in listed and re.search(rf"3 exports, \d+ MB, in {tmp_path}", listed)
    names = [path.name for path in (tmp_path / "exports").iterdir() if (path / "manifest.json").is_file()]
    assert "Give names, or --yes for all" in refused("cache", "clear")
    assert "no export 'nothing'" in refused("cache", "clear", names[0], "nothing")
    assert call("cache", "list").stdout.endswith(listed.splitlines()[-1] + "\n"), "nothing was deleted"
    assert call("cache", "clear", names[0]).stdout.startswith("Deleted: 1 export, ")
    assert names[0] not in call("cache", "list").stdout and names[1] in call("cache", "list").stdout
    assert call("cache", "clear", "--yes").stdout.startswith("Deleted: 2 exports, ")
    assert call("cache", "list").stdout.startswith("0 exports, 0 MB") and call("cache", "clear").exit_code == 0


def test_a_warm_run_needs_neither_torch_nor_transformers(tmp_path):
    assert call("run", TEXT).exit_code == 0
    program = (
        "import sys; from t5accel.cli import app\n"
        f"try: app(['run', {TEXT!r}])\n"
        "except SystemExit as end: assert not end.code\n"
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-W", "always", "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["Je suis fatigué.", "[]"], done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("(5 tokens in ")


def test_an_export_runs_in_its_own_precision_and_in_no_other(exported_mini, tmp_path, answer):
    quantize_export(exported_mini, tmp_path / "int8", "int8")
    for folder, own, other in ((tmp_path / "int8", "int8", "fp32"), (exported_mini, "fp32", "int8")):
        for options in ((), ("--precision", own)):
            result = call("run", TEXT, "--model", folder, *options)
            assert result.stdout == f"{answer}\n" and said(result)[-1].endswith(f"ONNX Runtime, {own})")
        refusal = f"is an export in {own}, and precision is '{other}'"
        assert refusal in refused("run", TEXT, "--model", folder, "--precision", other)
        (tmp_path / "in.txt").write_text(TEXT)
        batch = ("batch", tmp_path / "in.txt", "--out", tmp_path / f"out-{own}", "--model", folder)
        assert refusal in refused(*batch, "--precision", other) and call(*batch).exit_code == 0


def test_threads_reach_the_engine(monkeypatch):
    seen = []
    monkeypatch.setattr(OrtStatic, "__init__", lambda self, *_, settings, **__: seen.append(settings.threads) or 1 / 0)
    call("run", TEXT, "--threads", 3)
    assert seen == [3]


@pytest.mark.parametrize(
    "command",
    [["run", TEXT, "--model"], ["batch", "texts.txt", "out", "--model"], ["serve", "--port", 0, "--model"],
     ["quantize", "--eval", "rows.jsonl", "--max-loss", 1, "--out", "new", "--model"],
      ["triton", "--out", "models", "--name", "mute", "--model"]],
)  # fmt: skip
def test_a_model_without_a_tokenizer_is_refused_before_it_is_exported(tmp_path, tiny_t5, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text(TEXT)
    Path("rows.jsonl").write_text(json.dumps({"source": TEXT, "target": "x"}))
    tiny_t5().save_pretrained("mute")
    for name in ("load_t5", "export_t5"):
        monkeypatch.setattr(f"t5accel.graphs.export_cache.{name}", lambda *_, **__: pytest.fail("loaded or exported"))
    for model in ("random:t5-small", "mute"):
        assert f"{model} has " in refused(*command, model) and "no tokenizer" in refused(*command, model)


@pytest.mark.parametrize("options", [(), ("--stream",)])
def test_lines_of_standard_input_are_answered_one_by_one(answer, options):
    given = f"{TEXT}\n\n  \r\n{TEXT}".encode()
    result = CliRunner().invoke(app, ["run", "-", *options], input=given)
    assert (result.exit_code, result.stdout) == (0, f"{answer}\n\n\n{answer}\n")
    assert said(result)[-1].startswith("(4 texts, 10 tokens in ")
    assert CliRunner().invoke(app, ["run", "-"], input=b"").stdout == ""
    result = CliRunner().invoke(app, ["run", "-", *options], input=TEXT.encode() + b"\n\xff\n")
    assert (result.exit_code, result.stdout) == (2, f"{answer}\n")
    assert "Line 2 of standard input is not UTF-8" in said(result)[-1]


def test_a_line_is_answered_and_its_words_are_printed_before_more_comes(tmp_path):
    """Through pipes, to a process of its own: an answer stands there while standard input is still open."""
    assert call("run", TEXT).exit_code == 0
    command = [sys.executable, "-m", "t5accel", "run", "-", "--stream"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(TEXT.encode() + b"\n")
        process.stdin.flush()
        assert process.stdout.readline().decode() == "Je suis fatigué.\n"
        process.stdin.close()
        assert process.wait(60) == 0


def test_words_are_printed_as_they_come(monkeypatch):
    printed, steps = [], []
    own, step = t5accel.cli.typer.echo, OrtStatic.next_tokens
    monkeypatch.setattr(OrtStatic, "next_tokens", lambda *given, **named: steps.append(1) or step(*given, **named))
    monkeypatch.setattr(
        t5accel.cli.typer, "echo", lambda *given, **named: printed.append(len(steps)) or own(*given, **named)
    )
    assert call("run", "translate English to French: Where is my bag?", "--stream").exit_code == 0
    assert len({*printed}) > 2 and printed == sorted(printed), "some words stand there before the last step"


# --- nothing of Python's on the screen --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (ZeroDivisionError("a bug\nand more"), 1, "unexpected ZeroDivisionError: a bug (T5ACCEL_TRACEBACK=1"),
        (PermissionError(13, "Permission denied", "a/file"), 2, "a/file: Permission denied."),
        (OSError(28, "No space left on device"), 2, "No space left on device."),
        (OSError("torn"), 2, "unexpected OSError: torn"), (RuntimeError(), 1, "RuntimeError: nothing more is known"),
        (InputError("of two\nlines"), 2, "of two lines"), (KeyboardInterrupt(), 130, "t5accel: interrupted."),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_whatever_goes_wrong_is_a_sentence(monkeypatch, error, code, sentence):
    def broken(*_, **__):
        warnings.warn("a warning", stacklevel=1)
        raise error

    monkeypatch.setattr("t5accel.api.open_backend", broken)
    result = call("run", TEXT)
    (line,) = said(result)
    assert result.exit_code == code and line.startswith("t5accel: ") and sentence in line
    assert isinstance(result.exception, SystemExit) and "Traceback" not in result.output
    monkeypatch.setenv("T5ACCEL_TRACEBACK", "1")
    with pytest.warns(UserWarning, match="a warning"):
        found = call("run", TEXT).exception
    assert type(found) is (SystemExit if isinstance(error, KeyboardInterrupt) else type(error))


def test_a_panic_that_is_no_exception_is_a_sentence_too(monkeypatch):
    def panics(*_, **__):
        raise BaseException("bad split")

    monkeypatch.setattr("t5accel.api.open_backend", panics)
    result = call("run", TEXT)
    (line,) = said(result)
    assert result.exit_code == 1 and "t5accel: unexpected BaseException: bad split" in line


def test_no_command_shows_a_warning_and_filters_are_put_back(monkeypatch):
    def warns(*_, **__):
        warnings.simplefilter("always")
        warnings.warn("a library's", FutureWarning, stacklevel=1)
        return t5accel.doctor._python()

    monkeypatch.setattr(t5accel.doctor, "CHECKS", (warns,))
    before, shows = warnings.filters[:], warnings.showwarning
    result = call("doctor")
    assert result.exit_code == 0 and said(result) == []
    assert warnings.filters == before and warnings.showwarning is shows


def test_an_interrupted_command_says_what_it_has_kept(tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("t5accel.serve.batch.job.run", interrupt)
    monkeypatch.setattr("t5accel.api.open_backend", interrupt)
    (tmp_path / "in.txt").write_text(TEXT)
    result = call("batch", tmp_path / "in.txt", "--out", "answers")
    assert (result.exit_code, said(result)) == (
        130, ["t5accel: interrupted. Finished files of answers are kept in answers; the same command goes on."],
    )  # fmt: skip
    result = call("run", TEXT)
    assert (result.exit_code, said(result)) == (130, ["t5accel: interrupted."])


def test_progress_is_for_those_who_watch_and_not_for_files(tmp_path, monkeypatch, dev):
    options = ("evaluate", "--data", dev, "--metric", "exact_match")
    assert call(*options).exit_code == 0 and call(*options).stderr == ""
    monkeypatch.setattr("t5accel.machine.watches_stderr", lambda: True)
    result = call(*options)
    assert result.stdout == "30 rows: exact_match 100.00\n"
    assert (
        result.stderr.startswith("Loading mini …\n") and "scoring: 100%" in result.stderr and "30/30" in result.stderr
    )
    result = call("export", "--model", "mini", "--out", tmp_path / "out", "--precision", "int8")
    assert all(text in result.stderr for text in ("Loading mini …", "exporting mini", "Converting to int8 …"))


def test_an_interrupted_process_says_so_in_a_sentence(tmp_path):
    command = [sys.executable, "-m", "t5accel", "run", "-"]
    assert call("run", TEXT).exit_code == 0
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    ) as process:  # fmt: skip
        process.stdin.write(TEXT + "\n")
        process.stdin.flush()
        process.stdout.readline()  # it is at work
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130 and "t5accel: interrupted." in told and "Traceback" not in told


# --- export -----------------------------------------------------------------------------------------------------------


def test_export_writes_a_folder_and_replaces_only_what_it_may(tmp_path):
    result = call("export", "--model", "mini", "--out", tmp_path / "one", "--external-threshold-bytes", 0)
    assert result.exit_code == 0 and re.search("45 MB in [89] files, fp32", result.stdout)  # one less on 5.x
    assert (tmp_path / "one" / "weights.data").is_file() and result.stderr == ""
    assert call("export", "--model", "mini", "--out", tmp_path / "portable", "--no-step").exit_code == 0
    graphs = [{path.name for path in (tmp_path / name).glob("*.onnx")} for name in ("one", "portable")]
    assert graphs[0] - graphs[1] == {"decoder_step.onnx"} and not (tmp_path / "portable" / "weights.data").is_file()
    assert call("run", TEXT, "--model", tmp_path / "one").exit_code == 0
    (tmp_path / "one" / "manifest.json").write_text("{}")
    assert "--overwrite" in refused("export", "--model", "mini", "--out", tmp_path / "one")
    assert call("export", "--model", "mini", "--out", tmp_path / "one", "--overwrite").exit_code == 0
    before = (tmp_path / "one" / "manifest.json").read_bytes()
    assert call("export", "--model", "mini", "--out", tmp_path / "one").exit_code == 0, "the same export is kept"
    assert (tmp_path / "one" / "manifest.json").read_bytes() == before
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "letter.txt").write_text("a letter")
    assert "no export" in refused("export", "--model", "mini", "--out", tmp_path / "two", "--overwrite")
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["letter.txt"]


def test_export_refuses_before_it_loads(tmp_path, monkeypatch, exported_mini):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "letter.txt").write_text("a letter")
    monkeypatch.setattr("t5accel.graphs.export.load_t5", lambda name: pytest.fail("loaded for nothing"))
    for precision in ("fp32", "int8"):
        options = ("export", "--model", "mini-d1", "--precision", precision, "--out")
        assert "so it is kept" in refused(*options, tmp_path / "letters", "--overwrite")
        assert "holds another export" in refused(*options, exported_mini)
    assert "holds another export" in refused("export", "--model", "mini", "--precision", "int8", "--out", exported_mini)
    assert "is an export already" in refused("export", "--model", exported_mini, "--out", tmp_path / "again")


# --- quantize ---------------------------------------------------------------------------------------------------------


INT4 = ("--precision", "int4", "--metric", "exact_match", "--threads", 1)


@pytest.fixture
def dev(tmp_path, exported_mini):
    """What the bundled model writes in fp32 to thirty sentences: there it scores 100."""
    backend, tokenizer = OrtNumpy(exported_mini), TokenizerFile(exported_mini)
    answer = text_to_text(tokenizer, lambda ids, mask: greedy(backend, ids, mask, max_new_tokens=40).sequences)
    sources = [source_text("translation", row) for row in rows("translation", limit=10)]
    file = tmp_path / "dev.jsonl"
    pairs = zip(sources, answer(sources), strict=True)
    file.write_text("".join(json.dumps({"source": a, "target": b}) + "\n" for a, b in pairs), encoding="utf-8")
    return file


def test_a_model_passes_the_gate_on_the_users_rows_and_runs(tmp_path, exported_mini, dev):
    out = tmp_path / "int8"
    result = call("quantize", "--model", exported_mini, "--out", out, "--eval", dev, *INT4, "--max-loss", 80)
    first, second = result.stdout.splitlines()
    assert result.exit_code == 0 and re.fullmatch(rf"{re.escape(str(out))}: \d+ MB, int4", first)
    score = text_quality(dev, "exact_match", threads=1)(out)["exact_match"]
    assert 20 <= score < 100
    assert second == f"exact_match {score:.2f}, in fp32 100.00: loses {100 - score:.2f}, a loss of 80 is allowed"
    recipe = read_manifest(out).recipe
    assert recipe["gated"] and recipe["gate"]["max_loss"] == {"exact_match": 80}
    assert recipe["gate"]["baseline"] == {"exact_match": 100}
    assert call("run", TEXT, "--model", out).stdout.strip()


def test_a_gain_is_called_one_and_a_gate_that_proves_nothing_is_said_to(tmp_path, exported_mini, monkeypatch):
    row = {"source": "translate English to French: I am tired.", "target": "nothing like it at all"}
    (tmp_path / "dev.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    options = "--eval", tmp_path / "dev.jsonl", "--metric", "exact_match", "--max-loss", 1, "--threads", 1
    result = call("quantize", "--model", exported_mini, "--out", tmp_path / "none", *options)
    assert result.exit_code == 0 and "in fp32 0.00: loses 0.00" in result.stdout
    assert result.stderr.splitlines()[-1].startswith("Warning: The model in fp32 scores exact_match 0.00")
    rising = iter([40.0, 40.5])
    monkeypatch.setattr("bench.precision.text_quality", lambda *_, **__: lambda _: {"exact_match": next(rising)})
    result = call("quantize", "--model", exported_mini, "--out", tmp_path / "more", *options)
    assert "exact_match 40.50, in fp32 40.00: gains 0.50, a loss of 1 is allowed" in result.stdout
    assert "Warning" not in result.stderr


def test_a_model_that_loses_more_is_refused_in_a_sentence_and_nothing_is_left(tmp_path, exported_mini, dev):
    quantize_export(exported_mini, tmp_path / "other", "int4")
    lost = 100 - text_quality(dev, "exact_match", threads=1)(tmp_path / "other")["exact_match"]
    assert lost > 1
    line = refused(
        "quantize",
        "--model",
        exported_mini,
        "--out",
        tmp_path / "above" / "int4",
        "--eval",
        dev,
        *INT4,
        "--max-loss",
        1,
    )
    assert f"lost exact_match {lost:.3g} (allowed 1). Nothing was written: allow more" in line and "--max-loss" in line
    assert not (tmp_path / "above").exists()


def test_quantize_refuses_what_it_cannot_score_before_it_exports(tmp_path, monkeypatch, exported_mini, dev, tiny_t5):
    monkeypatch.setenv("T5ACCEL_CACHE", str(tmp_path / "cache"))
    out, wrong = tmp_path / "out", tmp_path / "wrong.jsonl"
    for text, what in (
        ("", "holds no rows"),
        ('{"source": "a", "text": "b"}\n', "line 1: no 'target' among its fields"),
    ):
        wrong.write_text(text)
        line = refused("quantize", "--model", "mini", "--out", out, "--eval", wrong, "--max-loss", 1)
        assert what in line and str(wrong) in line
    options = ("--eval", dev, "--max-loss", 1)
    assert "missing.jsonl cannot be read" in refused(
        "quantize", "--model", "mini", "--out", out, "--eval", "missing.jsonl", "--max-loss", 1
    )
    assert "metric is 'luck'; give one of bleu" in refused(
        "quantize", "--model", "mini", "--out", out, *options, "--metric", "luck"
    )
    assert not (tmp_path / "cache").exists()
    tiny_t5().save_pretrained(tmp_path / "mute")
    assert (
        "mute has no tokenizer"
        in call("quantize", "--model", tmp_path / "mute", "--out", out, *options).stderr.splitlines()[-1]
    )
    out.mkdir()
    (out / "letter.txt").write_text("a letter")
    monkeypatch.setattr("bench.precision._opened", lambda *given: pytest.fail("scored for nothing"))
    assert "so it is kept" in refused("quantize", "--model", exported_mini, "--out", out, *options, "--overwrite")
    assert [path.name for path in out.iterdir()] == ["letter.txt"]


# --- bench ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch):
    calls = []

    def bench(model, job, *, techniques, **options):
        calls.append((model, job, [technique.name for technique in techniques], options))
        return ROWS

    monkeypatch.setattr(bench.scoreboard, "bench", bench)
    return calls


def test_bench_passes_every_option_on_and_writes_what_it_is_told(measured, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["t5accel", "bench", "--batch", "2"])
    rows, picture = tmp_path / "new" / "rows.json", tmp_path / "new" / "board.svg"
    result = call(
        "bench", "--model", "random:t5-small", "--json", rows, "--plot", picture, "--batch", 2, "--source-tokens", 3,
        "--new-tokens", 4, "--rounds", 5, "--threads", 6, "--quality-limit", 7, "--no-peak-memory",
    )  # fmt: skip
    assert (result.exit_code, result.stdout) == (0, board(ROWS) + "\n")
    names = [technique.name for technique in choose([], model="random:t5-small")]
    options = dict(rounds=5, threads=6, limit=7, peak_memory=False, progress=True)
    assert said(result) == [
        "Warning: the rounds of our loop differ widely (column range). Measure again on a quiet machine, or with more "
        "--rounds."
    ]
    assert measured == [("random:t5-small", Forced(4, 3, 2), names, options)]
    written = json.loads(rows.read_text(encoding="utf-8"))
    assert written["command"] == "t5accel bench --batch 2" and written["rows"] == ROWS
    assert "<svg" in picture.read_text()


def test_bench_alone_measures_the_bundled_model_and_writes_no_file(measured, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("bench").exit_code == 0 and measured[0][:2] == ("mini", Forced()) and not os.listdir(tmp_path)


def test_bench_measures_several_lengths_into_one_file_and_only_the_techniques_asked_for(measured, tmp_path):
    rows = tmp_path / "rows.json"
    result = call("bench", "--new-tokens", 4, "--new-tokens", 8, "--technique", "transformers without", "--json", rows)
    assert (result.exit_code, result.stdout) == (0, 2 * (board(ROWS) + "\n"))
    assert [job.new_tokens for _, job, _, _ in measured] == [4, 8]
    assert measured[0][2] == ["transformers without cache", REFERENCE]
    assert json.loads(rows.read_text(encoding="utf-8"))["rows"] == 2 * ROWS


def test_what_was_measured_is_not_lost_where_it_cannot_be_drawn(measured, tmp_path):
    result = call("bench", "--json", tmp_path / "rows.json", "--plot", tmp_path / "board.xyz")
    assert result.exit_code == 2 and "board.xyz" in said(result)[-1]
    assert result.stdout == board(ROWS) + "\n"
    assert json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["rows"] == ROWS


# --- advise -----------------------------------------------------------------------------------------------------------


def test_advise_passes_every_option_on_and_prints_the_advice(monkeypatch, tmp_path):
    calls = []

    def advise(need, *, results):
        calls.append((need, results))
        return Advice(need)

    monkeypatch.setattr(bench.advise, "advise", advise)
    result = call(
        "advise", "--model", "me/mine", "--task", "questions", "--matters", "throughput", "--batch", 3, "--beams", 2,
        "--source-tokens", 5, "--new-tokens", 6, "--max-loss", "exact_match=0.5", "--max-loss", "bleu=2", "--device",
        "cuda", "--threads", 7, "--results", tmp_path, "--results", "mine.json", "--explain",
    )  # fmt: skip
    assert result.exit_code == 0 and result.stdout.startswith("me/mine, questions, for throughput: batch 3, 2 beams")
    limits = {"exact_match": 0.5, "bleu": 2.0}
    need = Need("me/mine", "questions", "throughput", 3, 2, 5, 6, limits, "cuda", 7)
    assert calls == [(need, [tmp_path, Path("mine.json")])]
    assert call("advise").exit_code == 0 and calls[1] == (Need(), [])


def test_advise_recommends_for_the_bundled_model_in_few_lines_and_explains_in_more():
    short, long = call("advise", "--task", "translation"), call("advise", "--task", "translation", "--explain")
    assert 'model = accelerate("mini"' in short.stdout and len(short.stdout.splitlines()) <= 15
    assert re.search(r"Rests on [\w-]+\.json, row \d+ \(", short.stdout)
    assert re.search(r"^\* +[\w-]+, our loop .* \d+\.\d\dx ", long.stdout, re.MULTILINE)


# --- course -----------------------------------------------------------------------------------------------------------


def test_course_prints_the_time_of_each_notebook_and_the_board(monkeypatch, tmp_path):
    calls = []
    run = NotebookRun("00_start.ipynb", 7.0, tmp_path / "00_start.ipynb")
    monkeypatch.setattr(bench.course, "run_course", lambda *where: calls.append(where) or ([run], "the board"))
    result = call("course", "--notebooks", tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 0 and calls == [(tmp_path, tmp_path / "out")]
    assert "00_start.ipynb: 7 s\n" in result.stdout and "the board" in result.stdout


def test_course_with_a_notebook_that_fails_ends_in_words(monkeypatch):
    def fail(*where):
        raise NotebookError("00_start.ipynb failed; the copy as far as it ran is out/00_start.ipynb.")

    monkeypatch.setattr(bench.course, "run_course", fail)
    assert "00_start.ipynb failed" in refused("course")


# --- train ------------------------------------------------------------------------------------------------------------


def test_train_refuses_a_malformed_file_and_too_few_pairs(tmp_path):
    pairs, out = tmp_path / "pairs.tsv", tmp_path / "out"
    pairs.write_text("We sing.\tNous chantons.\nWe sing without a tab.\n")
    assert "pairs.tsv, line 2: no 'English<TAB>French' pair" in refused("train", "--pairs", pairs, "--out", out)
    pairs.write_text("We sing.\tNous chantons.\n")
    assert "Cannot hold out 1000 of 1" in refused("train", "--pairs", pairs, "--out", out)
    assert not out.exists()


def test_train_refuses_bad_numbers_and_devices(tmp_path):
    pairs, out = tmp_path / "pairs.tsv", tmp_path / "out"
    pairs.write_text("".join(f"Word {i}.\tMot {i}.\n" for i in range(1002)))
    assert "steps is 0" in refused("train", "--pairs", pairs, "--out", out, "--steps", 0)
    assert call("train", "--pairs", pairs, "--out", out, "--device", "abacus").exit_code == 2
    if not torch.cuda.is_available():
        assert "device 'cuda'" in refused("train", "--pairs", pairs, "--out", out, "--device", "cuda")
    assert call("train", "--pairs", pairs, "--out", out, "--threads", 0).exit_code == 2
    assert not out.exists()


def test_train_prolongs_only_when_everything_else_is_right(tmp_path, monkeypatch):
    pairs, out = tmp_path / "pairs.tsv", tmp_path / "out"
    pairs.write_text("We sing.\tNous chantons.\n")
    assert "has not reached its decay" in refused("train", "--pairs", pairs, "--out", out, "--prolong")
    out.mkdir()
    (out / "stable.pt").write_text("before the fall")
    (out / "checkpoint.pt").write_text("finished")
    for wrong in (["--pairs", tmp_path / "missing.tsv"], ["--pairs", pairs, "--steps", 0],
                  ["--pairs", pairs, "--stage", 3], ["--pairs", pairs, "--start", "mini"]):  # fmt: skip
        refused("train", *wrong, "--out", out, "--prolong")
        assert (out / "checkpoint.pt").read_text() == "finished"
    calls = []

    def reproduce(*arguments, stage, start, device):
        calls.append((*arguments, stage, start, device))
        return out / "model"

    monkeypatch.setattr(training, "reproduce", reproduce)
    result = call("train", "--pairs", pairs, "--out", out, "--prolong", "--steps", 9, "--seed", 3, "--threads", 1)
    assert (result.exit_code, result.stdout) == (0, f"Wrote {out / 'model'}\n")
    assert calls == [(pairs, out, training.TrainConfig(steps=9, seed=3), 1, None, "cpu")]
    assert (out / "checkpoint.pt").read_text() == "before the fall" and not (out / "stable.pt").exists()
    for stage, planned in ((2, training.SECOND_STAGE), (3, training.THIRD_STAGE), (4, training.FOURTH_STAGE)):
        result = call("train", "--pairs", pairs, "--out", out, "--stage", stage, "--start", "mini", "--seed", 3)
        assert result.exit_code == 0
        assert calls[stage - 1] == (pairs, out, replace(planned, seed=3), stage, "mini", "cpu")


# --- evaluate ---------------------------------------------------------------------------------------------------------


def test_evaluate_prints_the_report_and_writes_what_it_is_told(tmp_path, monkeypatch):
    held_out = (HeldOutQuality(1000, 1234, 12.34, 45.6), HeldOutQuality(77, 88, 9.87, 23.4))
    calls = []
    monkeypatch.setattr(validate, "held_out_quality", lambda generate, pairs: calls.append(pairs) or held_out)
    file = tmp_path / "new" / "quality.json"
    (tmp_path / "pairs.tsv").write_text("We sing.\tNous chantons.\n")
    result = call("evaluate", "--limit", 1, "--pairs", tmp_path / "pairs.tsv", "--json", file)
    assert result.exit_code == 0 and calls == [tmp_path / "pairs.tsv"]
    assert result.stdout.startswith("LIMITED")
    assert "held-out     all         1000  BLEU  12.3  chrF  45.6" in result.stdout
    assert "held-out     9-20 words    77  BLEU   9.9  chrF  23.4" in result.stdout
    document = json.loads(file.read_text(encoding="utf-8"))
    assert (document["model"], document["limit"], document["held_out"]["bleu"]) == ("mini", 1, 12.34)
    assert document["held_out_long"] == {"sentences": 77, "references": 88, "bleu": 9.87, "chrf": 23.4}
    assert document["translation"]["rows"] == 3 and document["questions"]["all"]["rows"] == 2


def test_evaluate_scores_an_export_on_rows_of_the_users(tmp_path, exported_mini, dev):
    quantize_export(exported_mini, tmp_path / "int4", "int4")
    expected = text_quality(dev, "exact_match", threads=1)(tmp_path / "int4")["exact_match"]
    assert expected < 100
    file, options = tmp_path / "scores.json", ("--data", dev, "--metric", "exact_match", "--threads", 1)
    for folder, score in ((exported_mini, 100.0), (tmp_path / "int4", expected)):
        result = call("evaluate", "--model", folder, *options, "--json", file)
        assert result.stdout == f"30 rows: exact_match {score:.2f}\n"
        document = json.loads(file.read_text(encoding="utf-8"))
        assert (document["model"], document["rows"], document["exact_match"]) == (str(folder), 30, score)
    assert "precision is 'int8'" in refused("evaluate", "--model", exported_mini, *options, "--precision", "int8")
    every = call("evaluate", "--model", exported_mini, "--data", dev).stdout
    assert re.fullmatch(r"30 rows: bleu \S+, chrf \S+, rougeL \S+, exact_match 100.00\n", every)


# --- batch, load, demo ------------------------------------------------------------------------------------------------


def test_a_strict_batch_ends_with_2_where_a_row_was_rejected(tmp_path, exported_mini):
    (tmp_path / "in.txt").write_text(f"{TEXT}\n\n")
    options = ("batch", tmp_path / "in.txt", "--out", tmp_path / "out", "--model", exported_mini)
    assert call(*options).exit_code == 0
    for _ in range(2):  # a job that is done is no better
        result = call(*options, "--strict")
        assert result.exit_code == 2 and "1 rows were rejected" in said(result)[-1]
    (tmp_path / "in.txt").write_text(f"{TEXT}\n")
    assert call("batch", tmp_path / "in.txt", tmp_path / "good", "--model", exported_mini, "--strict").exit_code == 0


def test_load_fails_where_no_server_answers():
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{port.getsockname()[1]}"
        result = call("load", url, "--rate", 20, "--seconds", 0.3)
    assert result.exit_code == 2 and "no answer" in result.stdout and "nan" not in result.stdout
    assert said(result) == [
        f"t5accel: {url} answered no request. Start a server there (t5accel serve), or read its log."
    ]


def test_a_demo_on_a_port_in_use_is_refused_before_a_model_loads(monkeypatch):
    monkeypatch.setattr("bench.demo.page._gradio", lambda: None)
    monkeypatch.setattr("bench.demo.page.way", lambda *given: pytest.fail("loaded for nothing"))
    monkeypatch.setitem(sys.modules, "starlette.middleware", SimpleNamespace(Middleware=None))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"--port must be free, got {port}" in refused("demo", "--port", port)


# --- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor_finds_nothing_wrong_here():
    result = call("doctor")
    assert result.exit_code == 0 and "+ python" in result.stdout and "+ bundled model" in result.stdout


@pytest.mark.parametrize(("ok", "code"), [(False, 1), (None, 0)])
def test_doctor_fails_on_what_is_wrong_and_not_on_what_is_optional(monkeypatch, ok, code):
    odd = Check("gears", ok, "missing", "turning", "oil them")
    monkeypatch.setattr(t5accel.doctor, "CHECKS", (t5accel.doctor._python, lambda: odd))
    result = call("doctor")
    assert result.exit_code == code and "gears" in result.stdout and "to get it: oil them" in result.stdout
