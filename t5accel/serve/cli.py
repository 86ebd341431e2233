"""The commands `serve`, `batch` and `embed`."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from inspect import Parameter, Signature
from typing import Annotated, Any, get_args

import typer
import typer.main
from typer.core import TyperCommand

from t5accel.cli_options import (
    BeamsOption,
    EncoderPrecision,
    ExportPrecisionOption,
    ForcedBos,
    KeepSpecialTokens,
    ModelOption,
    NewTokensOption,
    SourceLanguage,
    TargetLanguage,
    ThreadsOption,
    kept,
)
from t5accel.errors import InputError, MissingPackageError, install

serving = typer.Typer()


class Engine(StrEnum):
    """Where the work is done."""

    local = "local"
    ray = "ray"


class SettingsCommand(TyperCommand):
    """A command with one option for each field of the server's `Settings`."""

    def get_params(self, ctx: typer.Context) -> list[Any]:
        if not self.params:  # made at their first use: `t5accel --help` needs no package of the server
            self.params = _setting_options()
        return super().get_params(ctx)

    def invoke(self, ctx: typer.Context) -> Any:
        # Only the given options: the settings read the environment and the defaults.
        ctx.obj = {name: value for name, value in ctx.params.items() if value is not None}
        ctx.params = {}
        return super().invoke(ctx)


def _server_settings() -> Any:
    try:
        from t5accel.serve.settings import Settings
    except ImportError as error:
        raise MissingPackageError(f"{error.name} is missing: {install('serving')}.") from error
    return Settings


def _setting_options() -> list[Any]:
    def command() -> None:
        pass

    fields = _server_settings().model_fields.items()
    options = {name: _option(name, field) for name, field in fields if name != "api_key"}  # a key is no argument: `ps`
    command.__annotations__ = options
    command.__signature__ = Signature(
        [Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind) for name, kind in options.items()]
    )
    made = typer.Typer(add_completion=False)
    made.command()(command)
    return typer.main.get_command(made).params


def _option(name: str, field: Any) -> Any:
    kinds = (field.annotation, *get_args(field.annotation))
    kind = next((kind for kind in (bool, int, float) if kind in kinds), str)
    text = field.description
    if field.default not in (None, "", False) and "Default" not in text:
        text += f" Default: {field.default:g}." if kind is float else f" Default: {field.default}."
    return Annotated[kind | None, typer.Option("--" + name.replace("_", "-"), help=text)]


@serving.command(cls=SettingsCommand)
def serve(context: typer.Context) -> None:
    """Answer requests over HTTP in a continuous batch. Options are environment variables, too, such as T5ACCEL_PORT."""
    settings_class = _server_settings()
    from pydantic import ValidationError

    from t5accel.serve import ray_router, server

    try:
        settings = settings_class(**context.obj)
    except ValidationError as error:
        (name, *_), message, value = (error.errors()[0][key] for key in ("loc", "msg", "input"))
        raise InputError(f"{name} {message.replace('Input should', 'must', 1)}, got {value!r:.80}.") from error
    (ray_router if settings.engine == Engine.ray else server).serve(settings)


@serving.command()
def batch(
    given: Annotated[
        str, typer.Argument(metavar="IN", help="A file, a folder, or a quoted pattern: .jsonl, .csv, .parquet, .txt.")
    ],
    folder: Annotated[str | None, typer.Argument(metavar="[OUT]", help="The same as --out.")] = None,
    out: Annotated[
        str | None, typer.Option(help="The folder for the same rows with their answers; made if it is missing.")
    ] = None,
    model: ModelOption = "mini",
    column: Annotated[str, typer.Option(help="The column of the texts.")] = "text",
    prefix: Annotated[str, typer.Option(help="Put this before every text: 'translate English to French: '.")] = "",
    output_column: Annotated[str, typer.Option(help="The column of the answers.")] = "answer",
    precision: ExportPrecisionOption = None,
    beams: BeamsOption = None,
    max_new_tokens: NewTokensOption = 64,
    max_source_tokens: Annotated[
        int, typer.Option(min=1, help="The most tokens that a text may have; longer texts are rejected.")
    ] = 512,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="The most padded source tokens, times the beams, that are computed at once.")
    ] = 4096,
    shard_rows: Annotated[
        int,
        typer.Option(min=1, help="Rows per output file, which a kill may cost. Large jobs: 2000, for less padding."),
    ] = 200,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads. Default: all cores that this process may use; 1 for each actor of Ray."),
    ] = None,
    src_lang: SourceLanguage = None,
    tgt_lang: TargetLanguage = None,
    forced_bos: ForcedBos = None,
    keep_special_tokens: KeepSpecialTokens = False,
    strict: Annotated[bool, typer.Option("--strict", help="End with status 2 if any row was rejected.")] = False,
    engine: Annotated[
        Engine, typer.Option(help="Work in this process (local), or in actors of Ray that each hold the model (ray).")
    ] = Engine.local,
    address: Annotated[
        str | None, typer.Option(help="The address of a Ray cluster. Default: one that is started on this machine.")
    ] = None,
    unhealthy_after_s: Annotated[
        float | None,
        typer.Option(help="End the job if no actor of Ray was heard of for this many seconds. Default: 600."),
    ] = None,
) -> None:
    """Answer every row of files; killed at any moment, the same command goes on.

    The exit status is 2 if every row was rejected, and with --strict if any was.
    """
    from t5accel.serve.batch.job import JobSettings, ModelSource, in_this_process, run
    from t5accel.serve.ray_batch import on_ray

    of_ray = {k: v for k, v in dict(address=address, unhealthy_after_s=unhealthy_after_s).items() if v is not None}
    for name, value in of_ray.items() if engine == Engine.local else ():
        raise InputError(f"{name} must be unset with engine local, got {value!r}. Give --engine ray, or omit it.")
    if (out is None) == (folder is None):
        raise InputError("batch needs one folder for the answers. Give --out FOLDER.")
    out = out or folder
    settings = JobSettings(
        column=column,
        prefix=prefix,
        output_column=output_column,
        beams=beams,
        max_new_tokens=max_new_tokens,
        max_source_tokens=max_source_tokens,
        batch_tokens=batch_tokens,
        shard_rows=shard_rows,
        src_lang=src_lang,
        tgt_lang=tgt_lang,
        forced_bos_token=forced_bos,
        skip_special_tokens=not keep_special_tokens,
    )
    chosen = partial(on_ray, **of_ray) if engine == Engine.ray else in_this_process
    runs = ModelSource(model, precision and precision.value, threads)
    with kept(f"Finished files of answers are kept in {out}; the same command goes on."):
        done, before = run(given, out, runs, settings, engine=chosen, progress=True)
    rows = before.answered + before.rejected
    earlier = f", {rows} were done before" * bool(rows)
    rejected = f"; rejected: {done.rejected}, see {out}/_rejects" if done.rejected else ""
    typer.echo(f"{out}: {done.answered} rows answered, {done.tokens} tokens{earlier}{rejected}")
    whole = before + done
    if whole.rejected and not whole.answered:
        raise InputError(f"Every row was rejected, {whole.rejected} of them: see {out}/_rejects for the reasons.")
    if strict and whole.rejected:
        raise InputError(f"{whole.rejected} rows were rejected: see {out}/_rejects for the reasons.")


@serving.command()
def embed(
    given: Annotated[str, typer.Argument(metavar="IN", help="A file: .jsonl, .csv, .parquet, .txt.")],
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="The file to write or replace: .npy, or .parquet with all columns.")
    ],
    model: ModelOption = "mini",
    column: Annotated[str, typer.Option(help="The column of the texts.")] = "text",
    precision: Annotated[
        EncoderPrecision | None,
        typer.Option(help="The precision to run in; auto: bf16 where it is faster. Default: fp32; an export's own."),
    ] = None,
    pooling: Annotated[str, typer.Option(help="mean of a text's tokens, or first.")] = "mean",
    normalize: Annotated[bool, typer.Option("--normalize", help="Scale embeddings to length 1.")] = False,
    prefix: Annotated[str, typer.Option(help="Put this before every text: 'query: '.")] = "",
    threads: ThreadsOption = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="The most padded tokens that are computed at once.")] = 2048,
    max_source_tokens: Annotated[
        int, typer.Option(min=1, help="The most tokens that a text may have; a longer one ends the job.")
    ] = 512,
) -> None:
    """Write the embeddings of all rows of a file, by the model's encoder alone; a row without one ends the job."""
    from t5accel.encoder import AcceleratedEncoder
    from t5accel.models.load import require_tokenizer
    from t5accel.serve.batch.embedding import check_files, embed_file

    check_files(given, out, column)
    require_tokenizer(model)
    encoder = AcceleratedEncoder.from_pretrained(
        model, precision=precision and precision.value, threads=threads, max_source_tokens=max_source_tokens
    )
    options = dict(column=column, prefix=prefix, pooling=pooling, normalize=normalize, batch_tokens=batch_tokens)
    with kept(f"{out} was not written."):
        rows = embed_file(given, out, encoder, progress=True, **options)
    typer.echo(f"{out}: {rows} rows of {encoder.dims.d_model} numbers, {encoder.precision}")
