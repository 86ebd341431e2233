"""The commands that serve, put load on a server, and answer whole files: parse, call, print."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import typer

from t5accel.errors import InputError

serving = typer.Typer()


class Engine(StrEnum):
    """Where work is done."""

    local = "local"
    ray = "ray"


def _local_without_address(engine: Engine | None, address: str | None) -> None:
    if address is not None and engine != Engine.ray:
        raise InputError(f"address is {address!r}, and the engine is local: give --engine ray, or no address.")


@serving.command()
def serve(
    model: Annotated[str | None, typer.Option(help="mini, mini-d1, mini-d1p, a folder, or a hub id.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, fp16, int8 or int4. Default: fp32.")] = None,
    threads: Annotated[int | None, typer.Option(help="Default: all cores that this process may use.")] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name for clients. Default: --model, of a folder its last part.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Default: 127.0.0.1. Any other needs T5ACCEL_API_KEY.")] = None,
    allow_unauthenticated: Annotated[
        bool | None, typer.Option("--allow-unauthenticated", help="Serve other machines without an API key.")
    ] = None,
    allowed_hosts: Annotated[
        str | None,
        typer.Option(help="Further Host headers to accept, separated by commas; *: any. Default: this machine's."),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Default: 8000; 0: any that is free.")] = None,
    rows: Annotated[
        int | None, typer.Option(help="Of the batch: an answer takes one, K beams take K. Default: 32.")
    ] = None,
    key_value_mb: Annotated[int | None, typer.Option(help="Of keys and values of all rows. Default: no limit.")] = None,
    queue: Annotated[int | None, typer.Option(help="Requests that may wait. Default: 256.")] = None,
    max_queued_tokens: Annotated[
        int | None,
        typer.Option(help="Source and new tokens, times rows, that may wait. Default: --queue of the longest."),
    ] = None,
    max_beams: Annotated[
        int | None, typer.Option(help="Maximum beams, or drawn answers, per text. Default: 8.")
    ] = None,
    source_tokens: Annotated[int | None, typer.Option(help="Of a source, at most. Default: 512.")] = None,
    new_tokens: Annotated[int | None, typer.Option(help="Of an answer, at most. Default: 512.")] = None,
    texts: Annotated[int | None, typer.Option(help="Of one request, at most. Default: 64.")] = None,
    stall_ms: Annotated[
        float | None, typer.Option(help="Running answers wait so long at most for newcomers' encoders. Default: 50.")
    ] = None,
    join_share: Annotated[float | None, typer.Option(help="Of the time, for newcomers at most. Default: 0.25.")] = None,
    encoder_cache_mb: Annotated[int | None, typer.Option(help="For encoder outputs. Default: 256.")] = None,
    connections: Annotated[int | None, typer.Option(help="Open at a time. Default: 1000.")] = None,
    body_kb: Annotated[int | None, typer.Option(help="Of a request, at most. Default: 1024.")] = None,
    head_s: Annotated[float | None, typer.Option(help="For a request's head to arrive. Default: 10.")] = None,
    body_s: Annotated[float | None, typer.Option(help="For its body. Default: 10.")] = None,
    write_s: Annotated[
        float | None, typer.Option(help="Close a connection whose answer stays unread for this long. Default: 10.")
    ] = None,
    deadline_s: Annotated[
        float | None, typer.Option(help="Deadline of requests that do not set their own. Default: 120.")
    ] = None,
    grace_s: Annotated[float | None, typer.Option(help="After SIGTERM, for what runs. Default: 30.")] = None,
    stuck_s: Annotated[float | None, typer.Option(help="A step that long, and it is not alive. Default: 60.")] = None,
    log_texts: Annotated[bool | None, typer.Option("--log-texts", help="Write texts and answers to the log.")] = None,
    engine: Annotated[Engine | None, typer.Option(help="local, or ray: replicas of the model. Default: local.")] = None,
    address: Annotated[str | None, typer.Option(help="Of a cluster of Ray. Default: one on this machine.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Of ray, at most: as requests wait. Default: 2.")] = None,
    replicas_min: Annotated[int | None, typer.Option(help="Of ray, at least. Default: 1.")] = None,
) -> None:
    """Answer requests over HTTP, which join and leave a running batch; --rows may also be T5ACCEL_ROWS, and so on."""
    given: dict[str, Any] = {name: value for name, value in locals().items() if value is not None}
    try:
        from pydantic import ValidationError

        from t5accel.cluster import front
        from t5accel.serving import server
        from t5accel.serving.settings import Settings
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
def demo(
    model: Annotated[str, typer.Option(help="mini, a folder, or a hub id; visitors may name another one.")] = "mini",
    port: Annotated[int | None, typer.Option(help="Default: 7860, or the next one that is free.")] = None,
    share: Annotated[
        bool,
        typer.Option("--share", help="A public address by Gradio; visitors cannot name another model then."),
    ] = False,
) -> None:
    """Serve a page on which several ways answer one text at once: time, size, and whether the answers are the same."""
    from t5accel.demo.page import launch

    launch(model, port=port, share=share)


@serving.command()
def batch(
    given: Annotated[
        str, typer.Argument(metavar="IN", help="A file, a folder, or a quoted pattern: .jsonl, .csv, .parquet, .txt.")
    ],
    out: Annotated[str, typer.Argument(help="Folder for the same rows with their answers; made if it is missing.")],
    model: Annotated[str, typer.Option(help="mini, mini-d1, mini-d1p, a folder, or a hub id.")] = "mini",
    column: Annotated[str, typer.Option(help="Of the texts.")] = "text",
    prefix: Annotated[str, typer.Option(help="In front of every text: 'translate English to French: '.")] = "",
    into: Annotated[str, typer.Option(help="The answers' column.")] = "answer",
    precision: Annotated[str, typer.Option(help="fp32, fp16, int8, int8-dynamic or int4.")] = "fp32",
    beams: Annotated[
        int | None, typer.Option(help="1: greedy search. Default: that of the model's generation_config.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Upper bound on the length of an answer.")] = 64,
    max_source_tokens: Annotated[int, typer.Option(help="Of a text; longer ones are rejected.")] = 512,
    batch_tokens: Annotated[int, typer.Option(help="Of a batch's padded sources, times the beams.")] = 4096,
    shard_rows: Annotated[
        int, typer.Option(help="Rows per output file: what a kill may cost. Large jobs: 2000, for less padding.")
    ] = 200,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Default: all cores that this process may use; of each actor of ray 1.")
    ] = None,
    engine: Annotated[Engine, typer.Option(help="local, or ray: actors that each hold the model.")] = Engine.local,
    address: Annotated[str | None, typer.Option(help="Of a cluster of Ray. Default: one on this machine.")] = None,
    stuck_s: Annotated[float, typer.Option(help="Nothing heard of any actor of ray for so long ends the job.")] = 600.0,
) -> None:
    """Answer every row of files; killed at any moment, the same command goes on.

    The exit status is 2 if every row was rejected.
    """
    from t5accel.batch.job import Model, Settings
    from t5accel.batch.run import in_this_process, run
    from t5accel.cluster.shards import on_ray

    _local_without_address(engine, address)

    settings = Settings(
        column=column, prefix=prefix, into=into, beams=beams, max_new_tokens=max_new_tokens,
        max_source_tokens=max_source_tokens, batch_tokens=batch_tokens, shard_rows=shard_rows,
    )  # fmt: skip
    chosen = partial(on_ray, address=address, stuck_s=stuck_s) if engine == Engine.ray else in_this_process
    done, before = run(given, out, Model(model, precision, threads), settings, engine=chosen, progress=True)
    rows = before.answered + before.rejected
    earlier = f", {rows} were done before" * bool(rows)
    rejected = f"; rejected: {done.rejected}, see {out}/_rejects" if done.rejected else ""
    typer.echo(f"{out}: {done.answered} rows answered, {done.tokens} tokens{earlier}{rejected}")
    whole = before + done
    if whole.rejected and not whole.answered:
        raise InputError(f"Every row was rejected, {whole.rejected} of them: see {out}/_rejects for the reasons.")


@serving.command()
def load(
    url: Annotated[str, typer.Argument(help="Of a server on this machine, such as http://127.0.0.1:8000.")],
    rate: Annotated[float | None, typer.Option(help="Requests a second, sent whether answers come or not.")] = None,
    clients: Annotated[
        int | None, typer.Option(help="In place of a rate: so many wait for their answers, and flatter the server.")
    ] = None,
    seconds: float = 10.0,
    text: Annotated[
        list[str] | None, typer.Option(help="What is asked; may be repeated. Default: a few sentences to translate.")
    ] = None,
    max_new_tokens: int = 64,
    forced: Annotated[bool, typer.Option("--forced", help="Every answer has exactly --max-new-tokens.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="And note the time to the first event.")] = False,
    seed: int = 0,
) -> None:
    """Send requests to a server on this machine, at random moments: how long did each really take?"""
    import asyncio

    from t5accel.lab.load import Load, offer

    sentences = ("I am tired.", "Where is my bag?", "We have two cats.", "She reads a book.")
    texts = text or [f"translate English to French: {sentence}" for sentence in sentences]
    least = max_new_tokens if forced else 0
    bodies = [dict(text=one, max_new_tokens=max_new_tokens, min_new_tokens=least, stream=stream) for one in texts]
    typer.echo(str(asyncio.run(offer(Load(url, bodies, rate, seconds, clients, seed)))))


@serving.command()
def triton(
    folder: Annotated[str, typer.Argument(help="Of the model repository; made if it is missing.")],
    model: Annotated[str, typer.Option(help="mini, mini-d1, mini-d1p, a folder, or a hub id.")] = "mini",
    precision: Annotated[str, typer.Option(help="fp32, fp16, int8 or int4. Versions may differ in it.")] = "fp32",
    name: Annotated[str | None, typer.Option(help="Of the model in Triton. Default: --model.")] = None,
    version: Annotated[int, typer.Option(help="Written or replaced; the others stay.")] = 1,
    rows: Annotated[int, typer.Option(help="Of a batch, at most.")] = 32,
    window_ms: Annotated[float, typer.Option(help="For which Triton collects a batch.")] = 20.0,
    instances: Annotated[int, typer.Option(help="Processes that each hold the model.")] = 1,
    threads: Annotated[int | None, typer.Option(help="Of each. Default: the cores that there are, shared.")] = None,
) -> None:
    """Write a model repository for NVIDIA's Triton Inference Server, whose models run our ONNX sessions."""
    from pathlib import Path

    from t5accel.lab.triton import write_repository

    where = write_repository(
        folder, model, precision=precision, name=name, version=version, rows=rows, window_ms=window_ms,
        instances=instances, threads=threads, progress=True,
    )  # fmt: skip
    for path in sorted(Path(where).glob("*/config.pbtxt")):
        typer.echo(f"{path.parent.name}: POST /v2/models/{path.parent.name}/"
                   f"{'generate_stream' if 'iterative' in path.read_text() else 'generate'}")  # fmt: skip
    typer.echo(f"tritonserver --model-repository={where} --disable-auto-complete-config")
