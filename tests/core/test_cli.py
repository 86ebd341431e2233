"""The commands: what they print, where, and how they end; what they call is tested in its own module."""

import json
import os
import re
import signal
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import t5accel.cli
import t5accel.doctor
from t5accel.backends.ort_static import OrtStatic
from t5accel.cli import app
from t5accel.cli_options import ExportPrecision, IntegerPrecision
from t5accel.cli_training import training as training_commands
from t5accel.doctor import Check
from t5accel.errors import InputError
from t5accel.graphs.manifest import read_manifest
from t5accel.precision.convert import quantize_export
from t5accel.precision.gate import text_score
from t5accel.precision.recipes import RECIPES
from t5accel.serve.cli import serving as serving_commands

ROOT = Path(__file__).resolve().parents[2]
GROUPS = (app, serving_commands, training_commands)
CALLBACKS = {command.callback.__name__: command.callback for group in GROUPS for command in group.registered_commands}
COMMANDS = sorted(CALLBACKS)

pytestmark = pytest.mark.usefixtures("cache_of_its_own", "threads_put_back")

TEXT = "translate English to French: I am tired."


def call(*arguments: object, app: Any = app):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def said(result) -> list[str]:
    """The lines on standard error, without the progress bar with which transformers 5 loads weights."""
    return [line for line in result.stderr.splitlines() if line and not line.startswith("Loading weights")]


def refused(*arguments: object, app: Any = app) -> str:
    """The one line on standard error with which a command refuses; nothing else is printed."""
    result = call(*arguments, app=app)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = said(result)
    assert line.startswith("t5accel: ")
    return line


# --- help -------------------------------------------------------------------------------------------------------------


def test_these_are_the_commands():
    assert {"batch", "distill", "doctor", "embed", "export", "prune", "quantize", "run", "serve"} == set(COMMANDS)


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


def test_the_choices_of_precision_are_the_recipes():
    assert {*ExportPrecision} == RECIPES.keys() - {"bf16"}
    assert {*IntegerPrecision} == {name for name, recipe in RECIPES.items() if recipe.integers}


# --- what is refused --------------------------------------------------------------------------------------------------

REFUSED = {
    "run x --model nope": "Allowed: 'mini', ", "export --model nope --out x": "'nope'",
    "batch in.jsonl": "Give --out FOLDER", "batch in.jsonl one --out two": "Give --out FOLDER",
    "batch in.jsonl --out x --address a": "Give --engine ray",
}  # fmt: skip


@pytest.mark.parametrize("line", REFUSED)
def test_what_a_command_refuses_is_said_in_a_sentence_and_nothing_is_written(tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    assert REFUSED[line] in refused(*line.split()) and not os.listdir(tmp_path)


# --- run --------------------------------------------------------------------------------------------------------------


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
    assert "for precision 'int8', got 'torch'" in refused("run", TEXT, "--runtime", "torch", "--precision", "int8")
    listed = call("cache", "list").stdout
    assert "(mini)" in listed and re.search(rf"3 exports, \d+ MB, in {tmp_path}", listed)
    names = [path.name for path in (tmp_path / "exports").iterdir() if (path / "manifest.json").is_file()]
    assert "Give names, or --yes for all" in refused("cache", "clear")
    with monkeypatch.context() as closed:
        closed.setattr(t5accel.cli, "sys", SimpleNamespace(stdin=None))  # as by <&-
        assert "Give names, or --yes for all" in refused("cache", "clear")
        assert "Standard input must be open, got a closed one." in refused("run", "-")
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
        refusal = "--precision must be that of the export"
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
     ["quantize", "--eval", "rows.jsonl", "--max-loss", 1, "--out", "new", "--model"]],
)  # fmt: skip
def test_a_model_without_a_tokenizer_is_refused_before_it_is_exported(tmp_path, tiny_t5, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text(TEXT)
    Path("rows.jsonl").write_text(json.dumps({"source": TEXT, "target": "x"}))
    tiny_t5().save_pretrained("mute")
    for name in ("load_model", "export_model"):
        monkeypatch.setattr(f"t5accel.graphs.export_cache.{name}", lambda *_, **__: pytest.fail("loaded or exported"))
    for model in ("random:t5-small", "mute"):
        assert f"{model} has " in refused(*command, model) and "no tokenizer" in refused(*command, model)


@pytest.mark.parametrize("options", [(), ("--stream",)])
def test_lines_of_standard_input_are_answered_one_by_one(answer, options):
    given = f"\ufeff{TEXT}\n\n  \r\n{TEXT}".encode()  # as some editors begin a file
    result = CliRunner().invoke(app, ["run", "-", *options], input=given)
    assert (result.exit_code, result.stdout) == (0, f"{answer}\n\n\n{answer}\n")
    assert said(result)[-1].startswith("(4 texts, 10 tokens in ")
    assert CliRunner().invoke(app, ["run", "-"], input=b"").stdout == ""
    result = CliRunner().invoke(app, ["run", "-", *options], input=TEXT.encode() + b"\n\xff\n")
    assert (result.exit_code, result.stdout) == (2, f"{answer}\n")
    assert "Line 2 of standard input is not UTF-8" in said(result)[-1]
    result = CliRunner().invoke(app, ["run", "-", *options], input=b"a\rb\r")
    assert (result.exit_code, result.stdout) == (2, "") and "holds a carriage return" in said(result)[-1]


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


def test_words_of_a_stream_are_printed_before_the_last_step(monkeypatch):
    printed, steps = [], []
    own, step = t5accel.cli.typer.echo, OrtStatic.next_tokens
    monkeypatch.setattr(OrtStatic, "next_tokens", lambda *given, **named: steps.append(1) or step(*given, **named))
    monkeypatch.setattr(
        t5accel.cli.typer, "echo", lambda *given, **named: printed.append(len(steps)) or own(*given, **named)
    )
    assert call("run", "translate English to French: Where is my bag?", "--stream").exit_code == 0
    assert len({*printed}) > 2 and printed == sorted(printed)


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT")
def test_an_interrupted_process_says_so_in_a_sentence():
    assert call("run", TEXT).exit_code == 0
    with subprocess.Popen(
        [sys.executable, "-m", "t5accel", "run", "-"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    ) as process:  # fmt: skip
        process.stdin.write(TEXT + "\n")
        process.stdin.flush()
        process.stdout.readline()  # it is at work
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130 and "t5accel: interrupted." in told and "Traceback" not in told


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


def test_progress_is_for_those_who_watch_and_not_for_files(tmp_path, monkeypatch):
    options = ("export", "--model", "mini", "--precision", "int8", "--out")
    assert call(*options, tmp_path / "quiet").stderr == ""
    monkeypatch.setattr("t5accel.machine.watches_stderr", lambda: True)
    result = call(*options, tmp_path / "out")
    assert all(text in result.stderr for text in ("Loading mini …", "exporting mini", "Converting to int8 …"))


# --- export -----------------------------------------------------------------------------------------------------------


def test_export_writes_a_folder_and_replaces_only_what_it_may(tmp_path):
    result = call("export", "--model", "mini", "--out", tmp_path / "one")
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
    monkeypatch.setattr("t5accel.graphs.export.load_model", lambda name: pytest.fail("loaded for nothing"))
    for precision in ("fp32", "int8"):
        options = ("export", "--model", "mini-d1", "--precision", precision, "--out")
        assert "so it is kept" in refused(*options, tmp_path / "letters", "--overwrite")
        assert "holds another export" in refused(*options, exported_mini)
    assert "holds another export" in refused("export", "--model", "mini", "--precision", "int8", "--out", exported_mini)
    assert "is an export already" in refused("export", "--model", exported_mini, "--out", tmp_path / "again")


# --- quantize ---------------------------------------------------------------------------------------------------------


INT4 = ("--precision", "int4", "--metric", "exact_match", "--threads", 1)


def test_a_model_passes_the_gate_on_the_users_rows_and_runs(tmp_path, exported_mini, dev):
    out = tmp_path / "int8"
    result = call("quantize", "--model", exported_mini, "--out", out, "--eval", dev, *INT4, "--max-loss", 80)
    first, second = result.stdout.splitlines()
    assert result.exit_code == 0 and re.fullmatch(rf"{re.escape(str(out))}: \d+ MB, int4", first)
    score = text_score(dev, "exact_match", threads=1)(out)["exact_match"]
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
    monkeypatch.setattr("t5accel.precision.gate.text_score", lambda *_, **__: lambda _: {"exact_match": next(rising)})
    result = call("quantize", "--model", exported_mini, "--out", tmp_path / "more", *options)
    assert "exact_match 40.50, in fp32 40.00: gains 0.50, a loss of 1 is allowed" in result.stdout
    assert "Warning" not in result.stderr


def test_a_model_that_loses_more_is_refused_in_a_sentence_and_nothing_is_left(tmp_path, exported_mini, dev):
    quantize_export(exported_mini, tmp_path / "other", "int4")
    lost = 100 - text_score(dev, "exact_match", threads=1)(tmp_path / "other")["exact_match"]
    assert lost > 1
    options = ("--eval", dev, *INT4, "--max-loss", 1)
    line = refused("quantize", "--model", exported_mini, "--out", tmp_path / "above" / "int4", *options)
    assert f"lost exact_match {lost:.3g} (allowed 1)" in line and "--max-loss" in line
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
    assert "luck" in refused("quantize", "--model", "mini", "--out", out, *options, "--metric", "luck")
    assert not (tmp_path / "cache").exists()
    tiny_t5().save_pretrained(tmp_path / "mute")
    assert "mute has no tokenizer" in said(call("quantize", "--model", tmp_path / "mute", "--out", out, *options))[-1]
    out.mkdir()
    (out / "letter.txt").write_text("a letter")
    monkeypatch.setattr("t5accel.precision.gate.open_for_scores", lambda *given: pytest.fail("scored for nothing"))
    assert "so it is kept" in refused("quantize", "--model", exported_mini, "--out", out, *options, "--overwrite")
    assert [path.name for path in out.iterdir()] == ["letter.txt"]


# --- batch ------------------------------------------------------------------------------------------------------------


def test_a_strict_batch_ends_with_2_where_a_row_was_rejected(tmp_path, exported_mini):
    (tmp_path / "in.txt").write_text(f"{TEXT}\n\n")
    options = ("batch", tmp_path / "in.txt", "--out", tmp_path / "out", "--model", exported_mini)
    assert call(*options).exit_code == 0
    for _ in range(2):  # a job that is done is no better
        result = call(*options, "--strict")
        assert result.exit_code == 2 and "1 rows were rejected" in said(result)[-1]
    (tmp_path / "in.txt").write_text(f"{TEXT}\n")
    assert call("batch", tmp_path / "in.txt", tmp_path / "good", "--model", exported_mini, "--strict").exit_code == 0


# --- doctor -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ok", "code"), [(False, 1), (None, 0)])
def test_doctor_fails_on_what_is_wrong_and_not_on_what_is_optional(monkeypatch, ok, code):
    odd = Check("gears", ok, "missing", "turning", "oil them")
    monkeypatch.setattr(t5accel.doctor, "CHECKS", (t5accel.doctor._python, lambda: odd))
    result = call("doctor")
    assert result.exit_code == code and "gears" in result.stdout and "to get it: oil them" in result.stdout
