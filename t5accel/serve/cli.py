"""The commands that serve, and answer whole files: parse, call, print."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import typer

from t5accel.cli_options import (
    BeamsOption,
    ExportPrecisionOption,
    ForcedBos,
    KeepSpecialTokens,
    ModelOption,
    NewTokensOption,
    SourceLanguage,
    TargetLanguage,
    kept,
)
from t5accel.errors import InputError

serving = typer.Typer()


class Engine(StrEnum):
    """Where the work is done."""

    local = "local"
    ray = "ray"


def _local_without_address(engine: Engine | None, address: str | None) -> None:
    if address is not None and engine != Engine.ray:
        raise InputError(f"--address {address} is for Ray, and the engine is local. Give --engine ray.")


@serving.command()
def serve(
    model: Annotated[
        str | None, typer.Option(help="mini, mini-d1, mini-d1p, a folder, or a hub id. Default: mini.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="fp32, fp16, bf16, int8 or int4; on a GPU one of the first three. Default: fp32; an export's own."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, or cuda: the first GPU, by PyTorch. Default: cpu.")] = None,
    prefix: Annotated[
        str | None, typer.Option(help="Text in front of every source whose request has no prefix field.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads of the engine. Default: all cores that this process may use.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name for clients. Default: --model, or the last part of its folder.")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen at. Any but this machine's needs T5ACCEL_API_KEY. Default: 127.0.0.1."),
    ] = None,
    allow_unauthenticated: Annotated[
        bool | None, typer.Option("--allow-unauthenticated", help="Serve other machines without an API key.")
    ] = None,
    allowed_hosts: Annotated[
        str | None,
        typer.Option(help="Further Host headers to accept, separated by commas; *: any. Default: this machine's."),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen at; 0: any free port. Default: 8000.")] = None,
    rows: Annotated[
        int | None,
        typer.Option(help="Maximum rows in the running batch (one per answer, K per K-beam request). Default: 32."),
    ] = None,
    key_value_mb: Annotated[
        int | None, typer.Option(help="Maximum megabytes of the KV cache. Default: no limit.")
    ] = None,
    queue: Annotated[int | None, typer.Option(help="Maximum requests in the queue. Default: 256.")] = None,
    max_queued_tokens: Annotated[
        int | None,
        typer.Option(
            help="Maximum source and new tokens, times rows, in the queue. Default: --queue of the longest requests."
        ),
    ] = None,
    max_beams: Annotated[
        int | None, typer.Option(help="Maximum beams, or drawn answers, per text. Default: 8.")
    ] = None,
    max_source_tokens: Annotated[int | None, typer.Option(help="Maximum tokens of a source. Default: 512.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Maximum tokens of an answer. Default: 512.")] = None,
    texts: Annotated[int | None, typer.Option(help="Maximum texts per request. Default: 64.")] = None,
    stall_ms: Annotated[
        float | None,
        typer.Option(help="Maximum milliseconds that running answers wait while new sources are encoded. Default: 50."),
    ] = None,
    join_share: Annotated[
        float | None,
        typer.Option(help="Maximum share of the time spent on new requests while others run. Default: 0.25."),
    ] = None,
    encoder_cache_mb: Annotated[
        int | None, typer.Option(help="Megabytes of encoder outputs kept for repeated sources. Default: 256.")
    ] = None,
    connections: Annotated[int | None, typer.Option(help="Maximum open connections. Default: 1000.")] = None,
    body_kb: Annotated[int | None, typer.Option(help="Maximum kilobytes of a request's body. Default: 1024.")] = None,
    head_s: Annotated[
        float | None, typer.Option(help="Seconds within which a request's head must arrive. Default: 10.")
    ] = None,
    body_s: Annotated[
        float | None, typer.Option(help="Seconds within which a request's body must arrive. Default: 10.")
    ] = None,
    write_s: Annotated[
        float | None,
        typer.Option(help="Close the connection if the client stops reading for this many seconds. Default: 10."),
    ] = None,
    deadline_s: Annotated[
        float | None, typer.Option(help="Deadline in seconds of requests that do not set their own. Default: 120.")
    ] = None,
    grace_s: Annotated[
        float | None, typer.Option(help="Seconds that running requests have to finish after SIGTERM. Default: 30.")
    ] = None,
    stuck_s: Annotated[
        float | None,
        typer.Option(help="Report unhealthy when one step takes longer than this many seconds. Default: 60."),
    ] = None,
    log_texts: Annotated[bool | None, typer.Option("--log-texts", help="Write texts and answers to the log.")] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning, error or critical; debug also logs probes. Default: info.")
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="text, or json: one object per line. Default: text.")] = None,
    engine: Annotated[Engine | None, typer.Option(help="local, or ray: replicas of the model. Default: local.")] = None,
    address: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster, for --engine ray. Default: one on this machine.")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Maximum replicas with --engine ray; more start as requests wait. Default: 2.")
    ] = None,
    replicas_min: Annotated[int | None, typer.Option(help="Minimum replicas with --engine ray. Default: 1.")] = None,
) -> None:
    """Answer requests over HTTP in a continuous batch. Options are environment variables, too, such as T5ACCEL_PORT."""
    given: dict[str, Any] = {name: value for name, value in locals().items() if value is not None}
    try:
        from pydantic import ValidationError

        from t5accel.serve import ray_router as front
        from t5accel.serve import server
        from t5accel.serve.settings import Settings
    except ImportError as error:
        from t5accel.errors import MissingPackageError, install

        raise MissingPackageError(f"{error.name} is missing: {install('serving')}.") from error
    try:
        settings = Settings(**given)
    except ValidationError as error:
        found = error.errors()[0]
        raise InputError(f"{found['loc'][0]} is {found['input']!r:.80}: {found['msg']}.") from error
    _local_without_address(settings.engine, settings.address)
    (front if settings.engine == Engine.ray else server).serve(settings)


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
    stuck_s: Annotated[
        float, typer.Option(help="End the job if no actor of Ray was heard of for this many seconds.")
    ] = 600.0,
) -> None:
    """Answer every row of files; killed at any moment, the same command goes on.

    The exit status is 2 if every row was rejected, and with --strict if any was.
    """
    from t5accel.serve.batch.job import Model, Settings, in_this_process, run
    from t5accel.serve.ray_batch import on_ray

    _local_without_address(engine, address)
    if (out is None) == (folder is None):
        raise InputError("batch needs one folder for the answers. Give --out FOLDER.")
    out = out or folder
    settings = Settings(
        column=column, prefix=prefix, output_column=output_column, beams=beams, max_new_tokens=max_new_tokens,
        max_source_tokens=max_source_tokens, batch_tokens=batch_tokens, shard_rows=shard_rows,
        src_lang=src_lang, tgt_lang=tgt_lang, forced_bos_token=forced_bos, skip_special_tokens=not keep_special_tokens,
    )  # fmt: skip
    chosen = partial(on_ray, address=address, stuck_s=stuck_s) if engine == Engine.ray else in_this_process
    runs = Model(model, precision and precision.value, threads)
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
