"""The commands that measure, advise, score and show, ``python -m bench COMMAND``: parse, call, print."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from t5accel.cli_options import (
    AnyModelOption,
    Device,
    DeviceOption,
    ExportPrecision,
    ModelOption,
    NewTokensOption,
    PrecisionOption,
    RuntimeOption,
    ThreadsOption,
    command_line,
    kept,
    status,
    warn,
)
from t5accel.errors import InputError

app = command_line("Measure T5-like models, and what serves them. `python -m bench COMMAND --help` explains each.")


@app.command()
def board(
    model: AnyModelOption = "mini",
    json: Annotated[Path | None, typer.Option(help="Write the rows to this file.", dir_okay=False)] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write the picture to this file (.png, .svg).", dir_okay=False)
    ] = None,
    batch: Annotated[int, typer.Option(help="Texts that are answered at once.")] = 1,
    source_tokens: Annotated[int, typer.Option(help="The exact number of tokens of each source.")] = 64,
    new_tokens: Annotated[
        list[int], typer.Option(help="The exact number of tokens of each answer. Repeat it for one board each.")
    ] = [64],  # noqa: B006 (typer reads it, nobody changes it)
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; ratios are formed within each.")] = 5,
    threads: ThreadsOption = None,
    quality_limit: Annotated[
        int | None, typer.Option(help="Rows to score in each length bucket or half; 0: none. Default: all.")
    ] = None,
    peak_memory: Annotated[
        bool, typer.Option(help="Measure the peak memory of each technique in a separate process.")
    ] = True,
    technique: Annotated[
        list[str] | None, typer.Option(help="Measure only techniques whose name contains this, and the reference.")
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(help="Show the same board of this file beside it, such as data/results/scoreboard-mini-amd.json."),
    ] = None,
) -> None:
    """Measure every system on a CPU: equal output first, then speed, memory and quality.

    On a GPU: `python -m bench.gpu.suite --json FILE`.
    """
    from bench import figures as draw
    from bench.results import write_rows
    from bench.scoreboard import Forced, RecordedBoard, bench
    from bench.systems import select_systems

    if plot and plot.suffix[1:].lower() not in draw.blank_figure(1, 1).canvas.get_supported_filetypes():
        raise InputError(f"plot must be a file with the ending of a picture, such as .png, got {plot}.")
    chosen, rows = select_systems(technique or [], model=model), []
    jobs = [Forced(new_tokens=count, source_tokens=source_tokens, batch=batch) for count in new_tokens]
    others = [RecordedBoard(compare, model, job) if compare else None for job in jobs]  # refused before the slow part
    for job, other in zip(jobs, others, strict=True):
        with kept(f"Finished boards are in {json}." if json and rows else ""):
            found = bench(
                model, job, systems=chosen, rounds=rounds, threads=threads, limit=quality_limit,
                peak_memory=peak_memory, progress=True,
            )  # fmt: skip
        rows += found
        if json:  # after each length, so that an interrupted run keeps what it has
            write_rows(json, rows, command=f"python -m bench {shlex.join(sys.argv[1:])}")
        typer.echo(draw.board(found))
        if other:
            typer.echo(f"\n{other.beside(found)}")
        if scattered := draw.scattered(found):
            typer.echo(
                f"Warning: the rounds of {', '.join(scattered)} differ widely (column range). Measure again on a quiet "
                "machine, or with more --rounds.", err=True,
            )  # fmt: skip
    if plot:
        draw.plot_board(found, plot)


@app.command()
def advise(
    model: ModelOption = "mini",
    task: Annotated[str | None, typer.Option(help="translation, summaries or questions. Default: all.")] = None,
    matters: Annotated[str, typer.Option(help="latency, throughput, memory or quality.")] = "latency",
    batch: Annotated[int | None, typer.Option(help="Texts answered at once. Default: 1, for throughput 32.")] = None,
    beams: Annotated[int, typer.Option(min=1, help="Beams; 1 is greedy search.")] = 1,
    source_tokens: Annotated[int, typer.Option(help="The typical number of tokens of a source.")] = 64,
    new_tokens: Annotated[int, typer.Option(help="The typical number of tokens of an answer.")] = 64,
    max_loss: Annotated[
        list[str] | None, typer.Option(help="What a score may lose, as in bleu=0.5. Default: 1 of each of the task.")
    ] = None,
    device: DeviceOption = Device.CPU,
    threads: ThreadsOption = None,
    results: Annotated[
        list[Path] | None, typer.Option(help="More results: a file that `board --json` wrote, or a folder of them.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show the measured rows it was chosen from.")] = False,
) -> None:
    """Recommend a configuration, with the measured row that it rests on."""
    from bench.advise import Need, recommend, report

    limits = {}
    for text in max_loss or []:
        name, _, value = text.partition("=")
        try:
            limits[name.strip()] = float(value)
        except ValueError as error:
            raise InputError(f"--max-loss must be a score and a number, as in bleu=0.5, got {text!r}.") from error
    need = Need(
        model=model, task=task, matters=matters, batch=batch, beams=beams, source_tokens=source_tokens,
        new_tokens=new_tokens, max_loss=limits, device=device.value, threads=threads,
    )  # fmt: skip
    typer.echo(report(recommend(need, results=results or []), explain=explain))


@app.command()
def evaluate(
    model: ModelOption = "mini",
    data: Annotated[
        Path | None, typer.Option(help='Score these rows, {"source": …, "target": …}, not the bundled sets.')
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option(help="With --data: bleu, chrf, rougeL or exact_match. Default: all of them.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report to this file.", dir_okay=False)] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Rows of the bundled sets in each length bucket or half. Default: all.")
    ] = None,
    precision: PrecisionOption = None,
    runtime: RuntimeOption = None,
    device: DeviceOption = Device.CPU,
    threads: ThreadsOption = None,
    beams: Annotated[int, typer.Option(min=1, help="Beams; 1 is greedy search.")] = 1,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="The most tokens of an answer. Default: 64; with --data, twice the longest target's."),
    ] = None,
) -> None:
    """Score a model or an export, on the bundled evaluation sets or on rows of yours."""
    from bench import evaluation
    from bench.results import write_json
    from t5accel.api import open_backend
    from t5accel.backends.model_defaults import by_defaults
    from t5accel.metrics import ROW_SCORES, floor_warning
    from t5accel.models.load import require_tokenizer
    from t5accel.precision.gate import row_scores, scored_rows
    from t5accel.tokenization import text_to_text

    if data and limit is not None:
        raise InputError("--data scores its rows alone. Leave --limit out.")
    if metric and not data:
        raise InputError("--metric is for the rows of --data: the bundled sets have their own. Leave it out.")
    metrics = metric or [*ROW_SCORES]
    examples = scored_rows(data, metrics) if data else []
    require_tokenizer(model)
    status(f"Loading {model} …")
    backend, tokenizer, what = open_backend(
        model, precision=precision and precision.value, runtime=runtime and runtime.value, device=device.value,
        threads=threads,
    )  # fmt: skip
    if tokenizer is None:
        raise InputError(f"{model} has no tokenizer: save one beside it, scores are of texts.")
    document: dict[str, Any] = {"model": model, "runs_on": what}
    if data:
        scores = row_scores(
            backend, tokenizer, examples, metrics, max_new_tokens=max_new_tokens, beams=beams, progress=True
        )
        typer.echo(f"{len(examples)} rows: " + ", ".join(f"{name} {score:.2f}" for name, score in scores.items()))
        warn(floor_warning(scores, "The model"))
        document |= {"data": str(data), "rows": len(examples), **scores}
    else:
        generate = text_to_text(tokenizer, by_defaults(backend, max_new_tokens=max_new_tokens or 64, num_beams=beams))
        report = evaluation.evaluate(generate, limit=limit, progress=True)
        typer.echo(report)
        warn(report.warning)
        document |= report.to_json()
    if json:
        write_json(json, document)


@app.command()
def course(
    notebooks: Annotated[Path, typer.Option(help="Folder of the numbered notebooks.")] = Path("notebooks"),
    out: Annotated[Path, typer.Option(help="Folder for executed copies and the scoreboard.")] = Path("build/course"),
) -> None:
    """Run every notebook in order, print a first scoreboard, and say which notebooks failed.

    The exit status is 1 if one failed; the others are run all the same.
    """
    from bench.course import run_course, summary

    with kept(f"Executed copies are in {out}."):
        runs, board = run_course(notebooks, out)
    for run in runs:
        if run.details:
            typer.echo(f"\n{run.name}\n{run.details}", err=True)
    typer.echo(f"\n{board}\n\nExecuted copies, report.json and scoreboard.html: {out}\n\n{summary(runs)}")
    if any(run.failed for run in runs):
        raise typer.Exit(1)


@app.command()
def workshop(
    numbers: Annotated[list[str] | None, typer.Argument(help="Notebooks, such as 00 01. Default: all.")] = None,
    notebooks: Annotated[Path, typer.Option(help="Folder of the participant's notebooks.")] = Path("notebooks"),
    run: Annotated[bool, typer.Option("--run", help="Execute the notebooks whose stub was edited.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for executed copies.")] = Path("build/workshop"),
) -> None:
    """Say which tasks ("Your turn") are solved, by the notebooks as they were saved, or executed anew."""
    from bench.workshop import report, task_states

    states, compared = task_states(notebooks, numbers or [], run_into=out if run else None)
    typer.echo(report(states, compared=compared, executed=run))


@app.command()
def load(
    url: Annotated[str, typer.Argument(help="The address of a server on this machine: http://127.0.0.1:8000.")],
    rate: Annotated[float | None, typer.Option(help="Requests a second, sent whether answers come or not.")] = None,
    clients: Annotated[
        int | None,
        typer.Option(min=1, help="Instead of --rate: clients that each wait for an answer, which flatters the server."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Seconds during which requests are sent.")] = 10.0,
    text: Annotated[
        list[str] | None, typer.Option(help="A text to send; may be repeated. Default: a few sentences to translate.")
    ] = None,
    max_new_tokens: NewTokensOption = 64,
    forced: Annotated[
        bool, typer.Option("--forced", help="Ask for answers of exactly --max-new-tokens tokens.")
    ] = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Stream the answers, and measure the time to the first event.")
    ] = False,
    seed: Annotated[int, typer.Option(help="The seed of the moments and the texts that are drawn.")] = 0,
) -> None:
    """Send requests to a server on this machine, at random moments: how long did each really take?

    The exit status is 2 if no request was answered.
    """
    import asyncio

    from bench.serving.load import Load, offer

    if (rate is None) == (clients is None):
        raise InputError("load needs one of --rate and --clients. Give --rate 5 for five requests a second.")

    sentences = ("I am tired.", "Where is my bag?", "We have two cats.", "She reads a book.")
    texts = text or [f"translate English to French: {sentence}" for sentence in sentences]
    least = max_new_tokens if forced else 0
    bodies = [dict(text=one, max_new_tokens=max_new_tokens, min_new_tokens=least, stream=stream) for one in texts]
    outcome = asyncio.run(offer(Load(url, bodies, rate, seconds, clients, seed)))
    typer.echo(str(outcome))
    if not outcome.latency_s:
        raise InputError(f"{url} answered no request. Start a server there (t5accel serve), or read its log.")


@app.command()
def triton(
    out: Annotated[str, typer.Option(help="The folder for the model repository; made if it is missing.")],
    model: ModelOption = "mini",
    precision: Annotated[
        ExportPrecision, typer.Option(help="The precision to run in. Versions may differ in it.")
    ] = ExportPrecision.FP32,
    name: Annotated[str | None, typer.Option(help="The model's name in Triton. Default: --model.")] = None,
    version: Annotated[int, typer.Option(help="The version to write or replace; the others stay.")] = 1,
    rows: Annotated[int, typer.Option("--max-batch-rows", help="The most rows of a batch.")] = 32,
    window_ms: Annotated[float, typer.Option(help="Milliseconds for which Triton collects a batch.")] = 20.0,
    instances: Annotated[int, typer.Option(help="Processes that each hold the model.")] = 1,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of each process. Default: an equal share of the cores.")
    ] = None,
) -> None:
    """Write a model repository for NVIDIA's Triton Inference Server, whose models run our ONNX sessions."""
    from bench.serving.triton import write_repository

    where = write_repository(
        out, model, precision=precision.value, name=name, version=version, rows=rows, window_ms=window_ms,
        instances=instances, threads=threads, progress=True,
    )  # fmt: skip
    for path in sorted(Path(where).glob("*/config.pbtxt")):
        typer.echo(f"{path.parent.name}: POST /v2/models/{path.parent.name}/"
                   f"{'generate_stream' if 'iterative' in path.read_text() else 'generate'}")  # fmt: skip
    typer.echo(f"tritonserver --model-repository={where} --disable-auto-complete-config")


@app.command()
def demo(
    model: Annotated[
        str, typer.Option(help="The model: mini, a folder, or a hub id; visitors may name another one.")
    ] = "mini",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="The port to listen on. Default: the first free one from 7860.")
    ] = None,
    share: Annotated[
        bool, typer.Option("--share", help="Let Gradio make a public address; visitors cannot name another model then.")
    ] = False,
) -> None:
    """Serve a page on which several ways answer one text at once: time, size, and whether the answers are the same."""
    from bench.demo.page import launch

    launch(model, port=port, share=share)


if __name__ == "__main__":
    app()
