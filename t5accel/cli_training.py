"""The commands that make models smaller or new ones, and score them: parse, call, print."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

training = typer.Typer()

PairsOption = Annotated[Path, typer.Option(help="UTF-8, one 'English<TAB>French' pair a line.")]
OutOption = Annotated[Path, typer.Option(help="Folder for checkpoints, log and the finished model.")]
StepsOption = Annotated[int, typer.Option(help="May be raised later; the run goes on.")]
DeviceOption = Annotated[str, typer.Option(help="cpu or cuda.")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="Default: all cores that this process may use.")]


@training.command()
def train(
    pairs: PairsOption,
    out: OutOption,
    steps: Annotated[
        int | None, typer.Option(help="May be raised later; the run goes on. Default: 6500; with --start 4500.")
    ] = None,
    start: Annotated[
        str | None, typer.Option(help="mini, a folder, or a hub id: the second stage, from this model on.")
    ] = None,
    seed: int = 0,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    prolong: Annotated[bool, typer.Option(help="Go back to before the learning rate fell, then on.")] = False,
) -> None:
    """Reproduce the bundled model; interrupted, the same command goes on."""
    import torch

    from t5accel import machine
    from t5accel.students import train as training
    from t5accel.students.pairs import read_pairs
    from t5accel.students.resumable import prolong as go_back

    stage = training.SECOND_STAGE if start else training.TrainConfig()
    config = replace(stage, steps=stage.steps if steps is None else steps, seed=seed)
    torch.set_num_threads(threads or machine.cpu_threads())
    if prolong:
        read_pairs(pairs)  # a missing file must not cost the state that prolong() replaces
        go_back(out)
    typer.echo(f"Wrote {training.reproduce(pairs, out, config, start=start, device=device)}")


@training.command()
def distill(
    pairs: PairsOption,
    out: OutOption,
    teacher: Annotated[str, typer.Option(help="mini, a folder, or a hub id.")] = "mini",
    decoder_layers: Annotated[int, typer.Option(help="Of the student; it begins with as many of its teacher's.")] = 1,
    layers: Annotated[str | None, typer.Option(help="Which ones, as in 0,3. Default: spread evenly.")] = None,
    loss: Annotated[str, typer.Option(help="labels, logits, hidden or sequence.")] = "logits",
    texts: Annotated[int, typer.Option(help="With sequence: how many texts the teacher writes.")] = 20000,
    steps: StepsOption = 2000,
    seed: int = 0,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
) -> None:
    """Train a student, with fewer decoder layers, to write what its teacher writes; interrupted, it goes on."""
    import torch

    from t5accel import machine
    from t5accel.checkpoints import T5Dims
    from t5accel.students.distill import DistillConfig, student_mixture
    from t5accel.students.distill import distill as run
    from t5accel.students.resumable import require_device
    from t5accel.students.shrink import layer_map, shrink_decoder
    from t5accel.students.student_card import save_student
    from t5accel.students.teacher_texts import read_teacher_texts, sources, write_teacher_texts

    torch.set_num_threads(threads or machine.cpu_threads())
    model, tokenizer = _with_tokenizer(teacher)
    chosen = _numbers(layers) if layers else layer_map(T5Dims.of(model).decoder_layers, decoder_layers)
    config = DistillConfig(layers=chosen, loss=loss, steps=steps, seed=seed)
    require_device(device)
    shrink_decoder(model, chosen)  # layers that there are not are refused before the teacher writes
    mixture, held_out = student_mixture(pairs)
    if loss == "sequence":
        file = out / "teacher.jsonl"
        write_teacher_texts(file, _beams(teacher, model, tokenizer, device), sources(mixture, texts, seed))
        mixture = replace(mixture, given=read_teacher_texts(file))
    student = run(model, tokenizer, mixture, out, config, held_out=held_out, device=device)
    folder = save_student(
        student, tokenizer, out / "model", teacher=model, teacher_name=teacher, how="distilled", command=_command(),
        settings=asdict(config),
    )  # fmt: skip
    typer.echo(f"Wrote {folder}")


@training.command()
def prune(
    pairs: PairsOption,
    out: OutOption,
    model: Annotated[str, typer.Option(help="mini, a folder, or a hub id.")] = "mini",
    heads: Annotated[float, typer.Option(help="The share of all attention heads that is removed.")] = 0.25,
    neurons: Annotated[float, typer.Option(help="The share of all feed-forward neurons that is removed.")] = 0.5,
    importance: Annotated[str, typer.Option(help="magnitude, taylor or movement.")] = "taylor",
    steps: Annotated[int, typer.Option(help="Of training, while ever more is removed; 0: none.")] = 1000,
    loss: Annotated[str, typer.Option(help="labels, logits or hidden: from the teacher.")] = "logits",
    teacher: Annotated[str | None, typer.Option(help="Default: the whole model.")] = None,
    seed: int = 0,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
) -> None:
    """Remove heads and neurons for good, and train what is left; interrupted, it goes on."""
    import torch

    from t5accel import machine
    from t5accel.students.distill import student_mixture
    from t5accel.students.prune import PruneConfig
    from t5accel.students.prune import prune as run
    from t5accel.students.student_card import save_student

    torch.set_num_threads(threads or machine.cpu_threads())
    config = PruneConfig(
        heads=heads, neurons=neurons, importance=importance, steps=steps,
        training=replace(PruneConfig().training, loss=loss, seed=seed),
    )  # fmt: skip
    whole, tokenizer = _with_tokenizer(model)
    of = None if teacher is None else _with_tokenizer(teacher)[0]
    mixture, held_out = student_mixture(pairs)
    student = run(whole, tokenizer, mixture, out, config, teacher=of, held_out=held_out, device=device)
    folder = save_student(
        student, tokenizer, out / "model", teacher=whole, teacher_name=model, how="pruned", command=_command(),
        settings=asdict(config),
    )  # fmt: skip
    typer.echo(f"Wrote {folder}")


def _command() -> str:
    return " ".join(["t5accel", *sys.argv[1:]])


def _with_tokenizer(name: str):  # noqa: ANN202
    from t5accel.checkpoints import load_t5
    from t5accel.errors import InputError

    model, tokenizer = load_t5(name)
    if tokenizer is None:
        raise InputError(f"{name} has no tokenizer: save one beside it, training reads texts.")
    return model, tokenizer


def _numbers(text: str) -> tuple[int, ...]:
    """What stands behind ``--layers``.

    >>> _numbers("0,3")
    (0, 3)
    """
    from t5accel.errors import InputError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"--layers is {text!r}; give numbers with commas between, as in 0,3.") from error


def _beams(name, model, tokenizer, device):  # noqa: ANN001, ANN202
    """The teacher, from texts to the best of four beams."""
    from t5accel.api import accelerate
    from t5accel.backends.torch_eager import TorchEager
    from t5accel.decoding.beam import beam_search
    from t5accel.decoding.text import text_to_text

    backend = accelerate(name).backend if device == "cpu" else TorchEager(model.to(device))
    return text_to_text(
        tokenizer, lambda ids, mask: beam_search(backend, ids, mask, num_beams=4, max_new_tokens=64).sequences
    )


@training.command()
def evaluate(
    model: Annotated[str, typer.Option(help="mini, a folder, or a hub id.")] = "mini",
    pairs: Annotated[Path | None, typer.Option(help="Score the sentences held out of this file, too.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report to this file.")] = None,
    limit: Annotated[int | None, typer.Option(help="Rows per length bucket or half. Default: all.")] = None,
) -> None:
    """Score a model on the bundled evaluation sets, greedily."""
    from json import dumps

    from t5accel import quality
    from t5accel.backends.torch_eager import TorchEager
    from t5accel.checkpoints import load_t5
    from t5accel.decoding.greedy import greedy
    from t5accel.decoding.text import text_to_text
    from t5accel.students.validate import held_out_quality

    t5, tokenizer = load_t5(model)
    backend = TorchEager(t5)
    generate = text_to_text(tokenizer, lambda ids, mask: greedy(backend, ids, mask).sequences)
    held_out = held_out_quality(generate, pairs) if pairs else None
    report = quality.evaluate(generate, limit=limit)
    typer.echo(report)
    if held_out:
        typer.echo(f"held-out pairs   {held_out.sentences}  BLEU {held_out.bleu:.1f}  chrF {held_out.chrf:.1f}")
    if json:
        json.parent.mkdir(parents=True, exist_ok=True)
        document = {"model": model, **report.to_json(), "held_out": held_out.to_json() if held_out else None}
        json.write_text(dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
