"""Commands that make the bundled model: ``python -m training COMMAND``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from t5accel.cli_options import Device, DeviceOption, ModelOption, ThreadsOption, command_line, kept, status
from t5accel.cli_training import KEPT, OutOption, SeedOption

app = command_line("Make the bundled model again. `python -m training COMMAND --help` explains each.")

PairsOption = Annotated[Path, typer.Option(help="A UTF-8 file with one 'English<TAB>French' pair a line.")]


@app.command()
def train(
    pairs: PairsOption,
    out: OutOption,
    steps: Annotated[
        int | None,
        typer.Option(help="Training steps. Give more later, and the run goes on. Default: 6500, 4500, 6600, 8300."),
    ] = None,
    stage: Annotated[
        int, typer.Option(min=1, max=4, help="2: learn whose fact is asked for; 3: grow, longer sentences; 4: go on.")
    ] = 1,
    start: Annotated[
        str | None, typer.Option(help="The model of the stage before: mini, a folder, or a hub id.")
    ] = None,
    seed: SeedOption = 0,
    device: DeviceOption = Device.CPU,
    threads: ThreadsOption = None,
    prolong: Annotated[
        bool, typer.Option("--extend-run", help="Go back to the state before the learning rate fell, then train on.")
    ] = False,
) -> None:
    """Reproduce the bundled model; interrupted, the same command goes on."""
    import torch

    from t5accel import machine
    from training.train import reproduce, stage_plan

    config = stage_plan(stage, start)[0]
    config = replace(config, steps=config.steps if steps is None else steps, seed=seed)
    torch.set_num_threads(threads or machine.cpu_threads())
    with kept(KEPT.format(out)):
        made = reproduce(pairs, out, config, stage=stage, start=start, prolong=prolong, device=device.value)
    typer.echo(f"Wrote {made}")


@app.command("held-out")
def held_out(
    pairs: PairsOption,
    model: ModelOption = "mini",
    json: Annotated[Path | None, typer.Option(help="Write the scores to this file.")] = None,
    threads: ThreadsOption = None,
) -> None:
    """Score a model on the sentences held out of its training pairs."""
    from bench.results import write_json
    from t5accel.api import open_backend
    from t5accel.models.load import require_tokenizer
    from t5accel.tokenization import generate_texts
    from training.pairs import read_pairs
    from training.train import held_out_quality

    read_pairs(pairs)  # a missing file is reported before the model is loaded
    require_tokenizer(model)
    status(f"Loading {model} …")
    backend, tokenizer, what = open_backend(model, threads=threads)
    generate = partial(generate_texts, backend, tokenizer, num_beams=1)
    found = held_out_quality(generate, pairs)
    for part, name in (("all", "held_out"), ("9-20 words", "held_out_long")):
        if score := found[name]:
            scores = f"BLEU {score['bleu']:5.1f}  chrF {score['chrf']:5.1f}"
            typer.echo(f"held-out     {part:11s} {score['sentences']:4d}  {scores}")
    if json:
        write_json(json, {"model": model, "runs_on": what, **found})


if __name__ == "__main__":
    app()
