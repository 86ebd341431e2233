"""The command line: it parses, calls the module that it names, and prints."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from t5accel.cli_options import (
    AnyModelOption,
    BeamsOption,
    Device,
    DeviceOption,
    ExportPrecision,
    ForcedBos,
    IntegerPrecision,
    KeepSpecialTokens,
    ModelOption,
    NewTokensOption,
    PrecisionOption,
    RuntimeOption,
    SourceLanguage,
    TargetLanguage,
    ThreadsOption,
    command_line,
    status,
    warn,
)
from t5accel.cli_training import training
from t5accel.errors import InputError

app = command_line(
    "Make T5-like models fast: run, serve, train. `t5accel COMMAND --help` explains each.", completion=True
)


def _version(asked: bool) -> None:
    if asked:
        from t5accel import __version__

        typer.echo(f"t5accel {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


cache = typer.Typer(no_args_is_help=True, help="The exports that accelerate() keeps in the user's cache folder.")
app.add_typer(cache, name="cache")
# The only way from here to what serves, by name: nothing else in the core knows that package.
app.add_typer(import_module("t5accel.serve.cli").serving)
app.add_typer(training)


OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace another export that is there.")]


@app.command()
def run(
    text: Annotated[
        str,
        typer.Argument(help="With T5's prefix: 'translate English to French: I am tired.' -: lines of standard input."),
    ],
    model: ModelOption = "mini",
    max_new_tokens: NewTokensOption = 64,
    beams: BeamsOption = None,
    precision: PrecisionOption = None,
    runtime: RuntimeOption = None,
    device: DeviceOption = Device.CPU,
    threads: ThreadsOption = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print words as they come.")] = False,
    prefix: Annotated[str, typer.Option(help="Text in front of every text: 'translate English to French: '.")] = "",
    src_lang: SourceLanguage = None,
    tgt_lang: TargetLanguage = None,
    forced_bos: ForcedBos = None,
    keep_special_tokens: KeepSpecialTokens = False,
) -> None:
    """Answer one text, or every line of standard input, with the time it took."""
    import numpy as np

    from t5accel.api import open_backend
    from t5accel.backends.model_defaults import by_defaults
    from t5accel.decoding.streaming import stream as streamed
    from t5accel.decoding.streaming import stream_text
    from t5accel.models.load import require_tokenizer
    from t5accel.models.prefixes import Languages, prefix_hint, prefixes_of
    from t5accel.tokenization import text_to_text

    if text == "-" and sys.stdin is None:
        raise InputError("Standard input must be open, got a closed one. Give a text in place of -.")
    require_tokenizer(model)
    backend, tokenizer, with_what = open_backend(
        model, precision=precision and precision.value, runtime=runtime and runtime.value, device=device.value,
        threads=threads,
    )  # fmt: skip
    used = backend.rules.num_beams if beams is None else beams
    if stream and used > 1:
        raise InputError(f"beams must be 1 with --stream, got {used}{' by default' * (beams is None)}. Give --beams 1.")
    first = Languages(tokenizer).target(backend, tgt_lang, forced_bos)
    bounds: dict[str, Any] = dict(max_new_tokens=max_new_tokens, **first)
    ends = backend.rules.eos_tokens(backend.eos_token_id)
    shown: dict[str, Any] = dict(skip_special_tokens=not keep_special_tokens, ends=ends)

    def print_pieces(ids, mask):  # noqa: ANN001, ANN202
        chunks: list[Any] = []
        coming = streamed(backend, ids, mask, **bounds)
        for piece in stream_text(tokenizer, (chunks.append(chunk) or chunk for chunk in coming), **shown):
            typer.echo(piece, nl=False)
        typer.echo()
        return np.concatenate([new for (new,) in chunks])[None]

    search = print_pieces if stream else by_defaults(backend, num_beams=beams, **bounds)
    count = 0

    def generate(ids, mask):  # noqa: ANN001, ANN202
        nonlocal count
        tokens = search(ids, mask)
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
    of = f"{_counted(texts, 'text')}, " if text == "-" else ""
    typer.echo(f"({of}{_counted(count, 'token')} in {seconds * 1e3:.0f} ms, {with_what})", err=True)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _lines() -> Iterator[str]:
    """The lines of standard input as they come, empty ones included, so that outputs line up with texts."""
    for number, line in enumerate(typer.get_binary_stream("stdin"), 1):
        try:  # a first line may begin with a byte order mark
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise InputError(f"Line {number} of standard input is not UTF-8: convert it first.") from error
        if "\r" in text:
            raise InputError(f"Line {number} of standard input holds a carriage return. End lines by \\n.")
        yield text


@app.command()
def export(
    context: typer.Context,
    model: AnyModelOption,
    out: Annotated[Path, typer.Option(help="The folder for the export; made if it is missing.")],
    overwrite: OverwriteOption = False,
    step: Annotated[
        bool,
        typer.Option(help="Add a graph that is faster on CPUs with ONNX Runtime; all graphs then share their weights."),
    ] = True,
    precision: Annotated[
        ExportPrecision, typer.Option(help="The precision to write. Its quality is measured by quantize, not here.")
    ] = ExportPrecision.FP32,
    check_logits: Annotated[
        bool, typer.Option(help="Compare the graphs with the model on one small batch before anything is kept.")
    ] = True,
    encoder: Annotated[
        bool, typer.Option("--encoder", help="Write the encoder alone, for embeddings, in fp32, int8 or int4.")
    ] = False,
) -> None:
    """Write a model as ONNX graphs, with all that is needed to run them without torch."""
    from t5accel.graphs.encoder_export import export_encoder
    from t5accel.graphs.export import export_model
    from t5accel.graphs.export_cache import find_export
    from t5accel.graphs.export_folder import require_free, resolve_target
    from t5accel.precision.convert import convert_export
    from t5accel.precision.recipes import as_encoder_recipe

    if find_export(model):
        raise InputError(f"{model} is an export already. Give the model that it was made from.")
    recipe = precision.value
    if encoder:
        if context.get_parameter_source("step").name == "COMMANDLINE":
            raise InputError("--step is for whole models, and --encoder is given: leave one out.")
        as_encoder_recipe(recipe)
    require_free(resolve_target(out), model, recipe, overwrite=overwrite)
    options: dict[str, Any] = dict(step=None if step else False, progress=True, check_logits=check_logits)
    status(f"Loading {model} …")
    if encoder:
        checked = dict(overwrite=overwrite, progress=True, check_outputs=check_logits)
        manifest = export_encoder(model, out, precision=recipe, **checked)
    elif recipe == "fp32":
        manifest = export_model(model, out, overwrite=overwrite, **options)
    else:
        with TemporaryDirectory() as temporary:
            export_model(model, Path(temporary) / "fp32", **options)
            status(f"Converting to {recipe} …")
            manifest = convert_export(Path(temporary) / "fp32", out, recipe, overwrite=overwrite)
    size = f"{manifest.size_bytes / 1e6:.0f} MB in {len(manifest.files)} files"
    typer.echo(f"{out}: {size}, {manifest.recipe['name']}")


@app.command()
def quantize(
    model: Annotated[str, typer.Option(help="The model: mini, a folder, a hub id, or an export in fp32.")],
    out: Annotated[Path, typer.Option(help="The folder for the export in integers; made if it is missing.")],
    eval_: Annotated[Path, typer.Option("--eval", help='Rows to score on: JSON Lines, {"source": …, "target": …}.')],
    max_loss: Annotated[float, typer.Option(help="What the score may lose against fp32, in points of the metric.")],
    precision: Annotated[
        IntegerPrecision, typer.Option(help="The integers that weights are stored in.")
    ] = IntegerPrecision.INT8,
    metric: Annotated[str, typer.Option(help="bleu, chrf, rougeL or exact_match, each from 0 to 100.")] = "bleu",
    overwrite: OverwriteOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Write a model in integers if it loses no more on your own rows than you allow, or nothing."""
    from t5accel.graphs.export_cache import cached_export, find_export
    from t5accel.graphs.export_folder import require_free, resolve_target
    from t5accel.models.load import require_tokenizer
    from t5accel.precision.gate import quantize as behind_a_gate
    from t5accel.precision.gate import text_score

    recipe = precision.value
    score = text_score(eval_, metric, threads=threads, progress=True)
    require_tokenizer(model)
    in_fp32 = find_export(model)
    if in_fp32 is None:
        require_free(resolve_target(out), model, recipe, overwrite=overwrite)
        in_fp32 = cached_export(model, progress=True)
    report = behind_a_gate(in_fp32, out, recipe, score=score, max_loss={metric: max_loss}, overwrite=overwrite)
    before, after = report.baseline[metric], report.chosen.scores[metric]
    typer.echo(f"{out}: {report.manifest.size_bytes / 1e6:.0f} MB, {report.chosen.recipe.name}")
    change = f"gains {after - before:.2f}" if after > before else f"loses {before - after:.2f}"
    typer.echo(f"{metric} {after:.2f}, in fp32 {before:.2f}: {change}, a loss of {max_loss:g} is allowed")
    warn(report.warning)


@cache.command("list")
def list_cache() -> None:
    """Show the cached exports."""
    from t5accel.graphs.export_cache import cache_folder, list_exports

    found = list_exports()
    for one in found:
        typer.echo(f"{one.size_bytes / 1e6:8.0f} MB   {one.folder.name}   ({one.what})")
    typer.echo(f"{_sum(found)}, in {cache_folder()}")


@cache.command("clear")
def clear_cache(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Exports as `cache list` names them. Default: all.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete all without asking.")] = False,
) -> None:
    """Delete cached exports. They are recreated on demand."""
    from t5accel.graphs.export_cache import clear_exports, list_exports

    if not names and not yes and (found := list_exports()):
        if sys.stdin is None or not sys.stdin.isatty():
            raise InputError(
                "Without a terminal, cache clear deletes only what is named. Give names, or --yes for all."
            )
        typer.confirm(f"Delete {_sum(found)}?", abort=True, err=True)
    typer.echo(f"Deleted: {_sum(clear_exports(names or None))}")


def _sum(exports: list[Any]) -> str:
    return f"{_counted(len(exports), 'export')}, {sum(one.size_bytes for one in exports) / 1e6:.0f} MB"


@app.command()
def doctor() -> None:
    """Check the installation: what it has, what it lacks, and what for."""
    from t5accel.doctor import diagnose, report

    checks = diagnose()
    typer.echo(report(checks))
    if any(check.ok is False for check in checks):
        raise typer.Exit(1)
