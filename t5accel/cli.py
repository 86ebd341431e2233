"""The command line: parse, call, print. Everything that it does can be imported from the module it names."""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # no command reports to the maker of ONNX Runtime, unless told to

import sys
import time
import warnings
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from t5accel.cli_serving import ForcedBos, SkipSpecialTokens, SourceLanguage, TargetLanguage, serving
from t5accel.cli_training import training
from t5accel.errors import InputError, ModelUnavailableError, T5AccelError

TRACEBACK = "T5ACCEL_TRACEBACK"


class _Group(typer.core.TyperGroup):
    """Whatever goes wrong is one sentence on standard error: no warning and no line of a program on a user's screen.

    With ``T5ACCEL_TRACEBACK=1`` in the environment Python shows all it has.
    """

    def invoke(self, ctx):  # noqa: ANN001
        if os.environ.get(TRACEBACK):
            return super().invoke(ctx)
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        with warnings.catch_warnings():
            warnings.showwarning = lambda *_, **__: None  # filters are set by libraries, too
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt as error:
                typer.echo(
                    "\nt5accel: interrupted. Nothing is half written; the same command goes on from its last "
                    "checkpoint, if it keeps any.", err=True,
                )  # fmt: skip
                raise typer.Exit(130) from error
            except (BrokenPipeError, SystemExit):
                raise
            except BaseException as error:  # a panic of a Rust library is no Exception
                if hasattr(error, "exit_code") or isinstance(error, typer.Abort):  # typer's own
                    raise
                typer.echo(f"t5accel: {_sentence(error)}", err=True)
                raise typer.Exit(2 if isinstance(error, T5AccelError | OSError) else 1) from error


def _sentence(error: BaseException) -> str:
    if isinstance(error, T5AccelError):
        return " ".join(str(error).split("\n"))
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
    what = (str(error).strip().splitlines() or ["nothing more is known"])[0]
    return f"unexpected {type(error).__name__}: {what} ({TRACEBACK}=1 in the environment shows where.)"


app = typer.Typer(
    cls=_Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Make T5-like models fast: run, measure, train. `t5accel COMMAND --help` explains each.",
)  # fmt: skip

cache = typer.Typer(no_args_is_help=True, help="The exports that accelerate() keeps in the user's cache folder.")
app.add_typer(cache, name="cache")
app.add_typer(serving)
app.add_typer(training)


class Runtime(StrEnum):
    """What runs the model."""

    TORCH = "torch"
    ONNX = "onnx"
    OPENVINO = "openvino"


class Suite(StrEnum):
    """A list of measurements of its own."""

    GPU = "gpu"


ModelOption = Annotated[str, typer.Option(help="mini, mini-d1, mini-d1p, random:t5-small, a folder, or a hub id.")]


@app.command()
def run(
    text: Annotated[
        str,
        typer.Argument(help="With T5's prefix: 'translate English to French: I am tired.' -: lines of standard input."),
    ],
    model: ModelOption = "mini",
    max_new_tokens: Annotated[int, typer.Option(help="Upper bound on the length of an answer.")] = 64,
    num_beams: Annotated[
        int | None, typer.Option(min=1, help="1: greedy search. Default: that of the model's generation_config.")
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32, fp16, bf16, int8 or int4.")] = "fp32",
    runtime: Annotated[
        Runtime | None, typer.Option(help="Default: onnx, which exports the model once; for bf16 torch.")
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print words as they come.")] = False,
    prefix: Annotated[str, typer.Option(help="Text in front of every text: 'translate English to French: '.")] = "",
    src_lang: SourceLanguage = None,
    tgt_lang: TargetLanguage = None,
    forced_bos: ForcedBos = None,
    skip_special_tokens: SkipSpecialTokens = True,
) -> None:
    """Answer one text, or every line of standard input, with the time it took."""
    import numpy as np

    from t5accel.api import open_backend
    from t5accel.backends.model_defaults import by_defaults
    from t5accel.decoding.rules import NONE
    from t5accel.decoding.streaming import stream as streamed
    from t5accel.decoding.streaming import stream_text
    from t5accel.tasks import prefix_hint, prefixes_of
    from t5accel.text.languages import Languages
    from t5accel.text.text_to_text import text_to_text

    backend, tokenizer, with_what = open_backend(model, precision=precision, runtime=runtime and runtime.value)
    beams = getattr(backend, "rules", NONE).num_beams if num_beams is None else num_beams
    if stream and beams > 1:
        whose = "the model's generation_config sets" if num_beams is None else "you gave"
        raise InputError(f"--stream is for greedy search, and {whose} num_beams={beams}: give --num-beams 1.")
    first = Languages(tokenizer).target(backend, tgt_lang, forced_bos)
    bounds: dict[str, Any] = dict(max_new_tokens=max_new_tokens, **first)
    ends = getattr(backend, "rules", NONE).ends(backend.eos_token_id)
    search = None if stream else by_defaults(backend, num_beams=num_beams, **bounds)
    shown: dict[str, Any] = dict(skip_special_tokens=skip_special_tokens, ends=ends)
    count = 0

    def generate(ids, mask):  # noqa: ANN001, ANN202
        nonlocal count
        if search is not None:
            tokens = search(ids, mask)
        else:
            chunks: list[Any] = []
            coming = streamed(backend, ids, mask, **bounds)
            for piece in stream_text(tokenizer, (chunks.append(chunk) or chunk for chunk in coming), **shown):
                typer.echo(piece, nl=False)
            typer.echo()
            tokens = np.concatenate([new for (new,) in chunks])[None]
        count += tokens.shape[1]
        return tokens

    answer = text_to_text(tokenizer, generate, prefix=prefix, src_lang=src_lang, **shown)
    texts, seconds, is_hinted = 0, 0.0, False
    prefixes = prefixes_of(backend, model)
    for line in _lines() if text == "-" else [text]:
        if line.strip() and not is_hinted and (hint := prefix_hint(prefix + line, prefixes)):
            typer.echo(f"t5accel: {hint}", err=True)
            is_hinted = True
        started = time.perf_counter()
        (result,) = answer([line]) if line.strip() else [""]
        seconds += time.perf_counter() - started
        texts += 1
        if not stream or not line.strip():
            typer.echo(result)
    of = f"{texts} texts, " if text == "-" else ""
    typer.echo(f"({of}{count} tokens in {seconds * 1e3:.0f} ms, {with_what})", err=True)


def _lines() -> Iterator[str]:
    """Those of standard input, as they come; an empty one stays one, so that answers stand beside their texts."""
    for number, line in enumerate(typer.get_binary_stream("stdin"), 1):
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise InputError(f"Line {number} of standard input is not UTF-8: convert it first.") from error


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="mini, mini-d1, mini-d1p, random:t5-small, a folder, or a hub id.")],
    folder: Annotated[Path, typer.Argument(help="Takes the export; made if it is missing.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another export that is there.")] = False,
    external_threshold_bytes: Annotated[
        int, typer.Option(help="With --no-step: weights of a graph beyond that lie in one file beside both; 0: always.")
    ] = 2_000_000_000,
    step: Annotated[
        bool,
        typer.Option(help="A third graph, faster on a CPU with ONNX Runtime; all weights lie in one file beside them."),
    ] = True,
    precision: Annotated[
        str,
        typer.Option(help="fp32, fp16, int8, int8-dynamic or int4. What that costs in quality is not measured here."),
    ] = "fp32",
    check_logits: Annotated[
        bool, typer.Option(help="Compare the graphs with the model on one small batch before anything is kept.")
    ] = True,
) -> None:
    """Write a model as ONNX graphs, with all that is needed to run them without torch."""
    from t5accel.graphs.export.t5 import export_t5
    from t5accel.graphs.numbers.convert import convert_export
    from t5accel.graphs.numbers.recipes import as_recipe

    recipe = as_recipe(precision)
    options: dict[str, Any] = dict(step=step, progress=True, check_logits=check_logits)
    options["external_threshold_bytes"] = external_threshold_bytes
    if recipe.name == "fp32":
        manifest = export_t5(model, folder, overwrite=overwrite, **options)
    else:
        with TemporaryDirectory() as temporary:
            export_t5(model, Path(temporary) / "fp32", **options)
            manifest = convert_export(Path(temporary) / "fp32", folder, recipe, overwrite=overwrite)
    size = f"{manifest.size_bytes / 1e6:.0f} MB in {len(manifest.files)} files"
    typer.echo(f"{folder}: {size}, {manifest.recipe['name']}")


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="mini, a folder, a hub id, or an export in fp32.")],
    folder: Annotated[Path, typer.Argument(help="Takes the export in integers; made if it is missing.")],
    eval_: Annotated[Path, typer.Option("--eval", help='JSON Lines, {"source": …, "target": …}, to score on.')],
    max_loss: Annotated[float, typer.Option(help="What the score may lose against fp32, in points of the metric.")],
    precision: Annotated[str, typer.Option(help="int8, int8-dynamic or int4.")] = "int8",
    metric: Annotated[str, typer.Option(help="bleu, chrf, rougeL or exact_match, each from 0 to 100.")] = "bleu",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another export that is there.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: all cores that this process may use.")] = None,
) -> None:
    """Write a model in integers if it loses no more on your own rows than you allow, or nothing."""
    from t5accel.graphs.contract import MANIFEST
    from t5accel.graphs.export.cache import cached_export
    from t5accel.graphs.numbers.quantize import quantize as behind_a_gate
    from t5accel.graphs.numbers.recipes import as_recipe
    from t5accel.lab.scoring import text_quality
    from t5accel.text.text_to_text import tokenizer_of

    if not as_recipe(precision).integers:
        raise InputError(f"--precision is {precision}; give int8, int8-dynamic or int4: the others have no integers.")
    score = text_quality(eval_, metric, threads=threads)
    in_fp32 = Path(model) if (Path(model) / MANIFEST).is_file() else cached_export(model, progress=True)
    try:
        tokenizer_of(in_fp32)
    except ModelUnavailableError as error:
        raise InputError(f"{model} has no tokenizer: save one beside it, the gate reads texts.") from error
    report = behind_a_gate(
        in_fp32, folder, precision, score=score, max_loss={metric: max_loss}, overwrite=overwrite
    )  # fmt: skip
    before, after = report.baseline[metric], report.chosen.scores[metric]
    typer.echo(f"{folder}: {report.manifest.size_bytes / 1e6:.0f} MB, {report.chosen.recipe.name}")
    change = f"gains {after - before:.2f}" if after > before else f"loses {before - after:.2f}"
    typer.echo(f"{metric} {after:.2f}, in fp32 {before:.2f}: {change}, a loss of {max_loss:g} is allowed")
    if report.warning:
        typer.echo(f"Warning: {report.warning}", err=True)


@cache.command("list")
def list_cache() -> None:
    """Show the exports that were kept."""
    from t5accel.graphs.export.cache import cache_folder, list_exports

    found = list_exports()
    for kept in found:
        typer.echo(f"{kept.size_bytes / 1e6:8.0f} MB   {kept.folder.name}   ({kept.what})")
    typer.echo(f"{len(found)} exports, {sum(kept.size_bytes for kept in found) / 1e6:.0f} MB, in {cache_folder()}")


@cache.command("clear")
def clear_cache() -> None:
    """Delete them all. They are made again when they are needed."""
    from t5accel.graphs.export.cache import clear_exports

    cleared = clear_exports()
    typer.echo(f"{len(cleared)} exports deleted, {sum(kept.size_bytes for kept in cleared) / 1e6:.0f} MB freed")


@app.command()
def bench(
    model: ModelOption = "mini",
    json: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the picture to this file (.png, .svg).")] = None,
    batch: int = 1,
    source_tokens: int = 64,
    new_tokens: Annotated[
        list[int], typer.Option(help="Forced: every technique generates exactly that many. Several: one board each.")
    ] = [64],  # noqa: B006 (typer reads it, nobody changes it)
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; ratios are formed within each.")] = 5,
    threads: Annotated[int | None, typer.Option(help="Default: all cores that this process may use.")] = None,
    quality_limit: Annotated[
        int | None, typer.Option(help="Rows per length bucket or half; 0: no quality. Default: all.")
    ] = None,
    peak_memory: Annotated[bool, typer.Option(help="One more process per technique.")] = True,
    technique: Annotated[
        list[str] | None, typer.Option(help="Only techniques whose name holds this (and the reference).")
    ] = None,
    suite: Annotated[
        Suite | None, typer.Option(help="gpu: what is measured on a GPU, with --json, --minutes and --only.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Of the suite: it ends by then, and goes on when called again.")] = 8.0,
    only: Annotated[str, typer.Option(help="Of the suite: cells whose name fits this pattern, as 'runtimes*'.")] = "*",
) -> None:
    """Measure every technique that exists: equal output first, then speed, memory and quality."""
    if suite is Suite.GPU:
        from t5accel.lab.gpu.suite import run_in_time

        if json is None:
            raise InputError("--suite gpu keeps each result as it comes: give --json FILE.")
        return run_in_time(json, minutes, only=only)
    from t5accel.lab import draw
    from t5accel.lab.bench import Forced
    from t5accel.lab.bench import bench as measure_all
    from t5accel.lab.rows import write_rows
    from t5accel.lab.techniques import choose

    chosen, rows = choose(technique or [], model=model), []
    for count in new_tokens:
        job = Forced(new_tokens=count, source_tokens=source_tokens, batch=batch)
        found = measure_all(
            model, job, techniques=chosen, rounds=rounds, threads=threads, limit=quality_limit, peak_memory=peak_memory
        )
        typer.echo(draw.board(found))
        rows += found
        if json:  # after each length, so that an interrupted run keeps what it has
            write_rows(json, rows, command=" ".join(["t5accel", *sys.argv[1:]]))
    if plot:
        draw.plot_board(found, plot)


@app.command()
def advise(
    model: ModelOption = "mini",
    task: Annotated[str | None, typer.Option(help="translation, summaries or questions. Default: all.")] = None,
    matters: Annotated[str, typer.Option(help="latency, throughput, memory or quality.")] = "latency",
    batch: Annotated[int | None, typer.Option(help="Texts at a time. Default: 1, for throughput 32.")] = None,
    beams: Annotated[int, typer.Option(help="1: greedy search.")] = 1,
    source_tokens: Annotated[int, typer.Option(help="Of a typical source.")] = 64,
    new_tokens: Annotated[int, typer.Option(help="Of a typical answer.")] = 64,
    max_loss: Annotated[
        list[str] | None, typer.Option(help="What a score may lose, as in bleu=0.5. Default: 1 of each of the task.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="Default: all cores that this process may use.")] = None,
    results: Annotated[
        list[Path] | None, typer.Option(help="More results: a file of `bench --json`, or a folder of such.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show what it was chosen from.")] = False,
) -> None:
    """Recommend a configuration, with the measured row that it rests on."""
    from t5accel.lab.advise import Need, report
    from t5accel.lab.advise import advise as advice_for

    limits = {}
    for text in max_loss or []:
        name, _, value = text.partition("=")
        try:
            limits[name.strip()] = float(value)
        except ValueError as error:
            raise InputError(f"--max-loss is {text!r}; give a score and a number, as in bleu=0.5.") from error
    need = Need(
        model=model, task=task, matters=matters, batch=batch, beams=beams, source_tokens=source_tokens,
        new_tokens=new_tokens, max_loss=limits, device=device, threads=threads,
    )  # fmt: skip
    typer.echo(report(advice_for(need, results=results or []), explain=explain))


@app.command()
def course(
    notebooks: Annotated[Path, typer.Option(help="Folder of the numbered notebooks.")] = Path("notebooks"),
    out: Annotated[Path, typer.Option(help="Folder for executed copies and the scoreboard.")] = Path("build/course"),
) -> None:
    """Run every notebook in order and print a first scoreboard."""
    from t5accel.lab.course import run_course, summary

    runs, board = run_course(notebooks, out)
    typer.echo(f"\n{summary(runs)}\n\n{board}\n\nExecuted copies and scoreboard.html: {out}")


@app.command()
def doctor() -> None:
    """Check the installation: what is there, what is missing, and what for."""
    from t5accel.doctor import diagnose, report

    checks = diagnose()
    typer.echo(report(checks))
    if any(check.ok is False for check in checks):
        raise typer.Exit(1)
