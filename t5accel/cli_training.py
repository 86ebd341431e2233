"""The commands that make models smaller."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import typer

from t5accel.cli_options import Device, DeviceOption, ThreadsOption, kept, status, warn
from t5accel.errors import InputError

training = typer.Typer()

DataOption = Annotated[
    list[Path], typer.Option(help='JSON Lines, {"source": …, "target": …}, the source with its prefix. Repeatable.')
]
WeightOption = Annotated[list[float] | None, typer.Option(help="How often to draw from a --data. Default: its rows.")]
EvalOption = Annotated[Path | None, typer.Option("--eval", help="Such rows to score on, which are not trained on.")]
MetricOption = Annotated[str | None, typer.Option(help="Of --eval: loss (default), bleu, chrf, rougeL, exact_match.")]
BatchOption = Annotated[int, typer.Option(help="Padded tokens of a step, sources and targets together.")]
LongestOption = Annotated[int, typer.Option(help="The most tokens that a source or a target may have.")]
OutOption = Annotated[Path, typer.Option(help="The folder for model, log, and a checkpoint of a few times its size.")]
StepsOption = Annotated[int, typer.Option(help="Training steps. Give more later, and the run goes on.")]
SeedOption = Annotated[int, typer.Option(help="The seed of everything random.")]
KEPT = "A checkpoint that was saved is kept in {}; the same command goes on from it."


@training.command()
def distill(
    teacher: Annotated[str, typer.Option(help="The model to learn from: a folder, a hub id, or mini.")],
    data: DataOption,
    out: OutOption,
    weight: WeightOption = None,
    eval_: EvalOption = None,
    metric: MetricOption = None,
    decoder_layers: Annotated[int | None, typer.Option(help="Decoder layers of the student. Default: 1.")] = None,
    layers: Annotated[str | None, typer.Option(help="Layers to copy, as in 0,3. Default: evenly spread.")] = None,
    loss: Annotated[str, typer.Option(help="What is learnt: labels, logits, hidden or sequence.")] = "logits",
    steps: StepsOption = 2000,
    batch_tokens: BatchOption = 5000,
    longest: LongestOption = 512,
    seed: SeedOption = 0,
    device: DeviceOption = Device.CPU,
    threads: ThreadsOption = None,
) -> None:
    """Train a student, with fewer decoder layers, to write what its teacher writes; interrupted, it goes on."""
    from t5accel.distillation.checkpointing import require_device
    from t5accel.distillation.student import DistillConfig, layer_map, shrink_decoder
    from t5accel.distillation.student import distill as run
    from t5accel.models.sizes import T5Dims

    if layers is not None and decoder_layers is not None:
        raise InputError("--layers names the decoder layers: leave --decoder-layers out.")
    model, tokenizer = _opened(teacher, out, threads)
    count = 1 if decoder_layers is None else decoder_layers
    chosen = _numbers(layers) if layers is not None else layer_map(T5Dims.of(model).decoder_layers, count)
    config = DistillConfig(layers=chosen, loss=loss, steps=steps, seed=seed)
    require_device(device.value)
    shrink_decoder(model, chosen)  # layers that there are not are refused before the teacher writes
    own = _UserRows.read(data, weight, eval_, metric, tokenizer, longest)
    is_written = loss == "sequence"
    with kept(KEPT.format(out)):
        if is_written:
            opened = cache(partial(_beams, teacher, model, tokenizer, device.value, own.most, threads))
            by = f"{_sha256(model, tokenizer)}, {own.most} tokens"
            own = own.written_by(lambda texts: opened()(texts), out / "teacher.jsonl", by)
        student = run(
            model, tokenizer, own.mixture(batch_tokens, by_teacher=is_written), out, config,
            validate=own.validate, device=device.value,
        )  # fmt: skip
    own.keep(student, tokenizer, out / "model", model, teacher_name=teacher, how="distilled", settings=asdict(config))


@training.command()
def prune(
    model: Annotated[str, typer.Option(help="The model to prune: a folder, a hub id, or mini.")],
    data: DataOption,
    out: OutOption,
    weight: WeightOption = None,
    eval_: EvalOption = None,
    metric: MetricOption = None,
    heads: Annotated[float, typer.Option(help="The share of all attention heads that is removed.")] = 0.25,
    neurons: Annotated[float, typer.Option(help="The share of all feed-forward neurons that is removed.")] = 0.5,
    importance: Annotated[str, typer.Option(help="magnitude, taylor or movement.")] = "taylor",
    steps: Annotated[int, typer.Option(help="Training steps, during which ever more is removed; 0: none.")] = 1000,
    loss: Annotated[str | None, typer.Option(help="What is learnt: labels, logits or hidden. Default: logits.")] = None,
    teacher: Annotated[str | None, typer.Option(help="The model to learn from. Default: the whole model.")] = None,
    batch_tokens: BatchOption = 5000,
    longest: LongestOption = 512,
    seed: SeedOption = 0,
    device: DeviceOption = Device.CPU,
    threads: ThreadsOption = None,
) -> None:
    """Remove heads and neurons for good, and train the smaller model; interrupted, it goes on."""
    from t5accel.distillation.pruning import PruneConfig
    from t5accel.distillation.pruning import prune as run

    if not steps and (teacher or loss):
        raise InputError("--teacher and --loss are for training, and --steps is 0: leave them out.")
    config = PruneConfig(
        heads=heads, neurons=neurons, importance=importance, steps=steps,
        training=replace(PruneConfig().training, loss=loss or "logits", seed=seed),
    )  # fmt: skip
    whole, tokenizer = _opened(model, out, threads)
    of, of_tokenizer = (None, tokenizer) if teacher is None else _with_tokenizer(teacher)
    if of_tokenizer.get_vocab() != tokenizer.get_vocab():  # its probabilities would be of other words
        raise InputError(f"--teacher must have the tokenizer of {model}, got {teacher} with another one.")
    own = _UserRows.read(data, weight, eval_, metric, tokenizer, longest)
    with kept(KEPT.format(out)) if steps else nullcontext():
        student = run(
            whole, tokenizer, own.mixture(batch_tokens), out, config, teacher=of, validate=own.validate,
            device=device.value,
        )  # fmt: skip
    settings = asdict(config)
    training = settings.pop("training")  # of which pruning chooses the layers and the steps by itself
    if steps:
        settings |= {f"training_{name}": value for name, value in training.items() if name not in ("layers", "steps")}
    own.keep(student, tokenizer, out / "model", whole, teacher_name=model, how="pruned", settings=settings)


@dataclass(frozen=True)
class _UserRows:
    """The user's rows to train on, by file, and a function that scores models on others."""

    examples: list[list[tuple[str, str]]]
    weights: list[float] | None
    evaluated: frozenset[str]
    validate: Callable[[Any], dict[str, float]] | None
    most: int  # tokens of an output: twice the longest target, within what is allowed

    @classmethod
    def read(cls, files, weights, evaluation, metric, tokenizer, longest) -> _UserRows:  # noqa: ANN001
        from t5accel.distillation.batches import read_examples
        from t5accel.distillation.validation import make_validator

        if weights and len(weights) != len(files):
            raise InputError(f"--weight is given {len(weights)} times for {len(files)} of --data: give one for each.")
        if metric and not evaluation:
            raise InputError(f"--metric {metric} needs rows to score on: give --eval FILE.")
        validate, sources = None, frozenset()
        if evaluation:
            # Read once: it may be a pipe.
            rows = [dict(source=source, target=target) for source, target in read_examples(evaluation)]
            validate = make_validator(rows, tokenizer, metric or "loss", longest=longest)
            sources = frozenset(row["source"] for row in rows)
        examples = [read_examples(file, tokenizer, longest=longest) for file in files]
        targets = tokenizer([target for rows in examples for _, target in rows], verbose=False)["input_ids"]
        return cls(examples, weights, sources, validate, min(longest, 2 * max(map(len, targets))))

    def written_by(self, generate: Callable[[list[str]], list[str]], file: Path, by: str) -> _UserRows:
        """The same sources with the teacher's outputs, which are kept in ``file``."""
        from t5accel.distillation.teacher_outputs import read_teacher_outputs, write_teacher_outputs

        wanted = {("examples", source): None for rows in self.examples for source, _ in rows}
        write_teacher_outputs(file, generate, list(wanted), by=by)
        texts = dict(read_teacher_outputs(file)["examples"])
        return replace(self, examples=[[(source, texts[source]) for source, _ in rows] for rows in self.examples])

    def mixture(self, tokens: int, *, by_teacher: bool = False):  # noqa: ANN201
        from t5accel.distillation.batches import mix_examples

        if known := sum(source in self.evaluated for rows in self.examples for source, _ in rows):
            typer.echo(f"{known} rows of --data have a source of --eval and are left out.", err=True)
        return mix_examples(
            self.examples, self.weights, tokens=tokens, excluded_sources=self.evaluated, by_teacher=by_teacher
        )

    def keep(self, student, tokenizer, folder, whole, **facts) -> None:  # noqa: ANN001, ANN003
        """Save the student with its card, and print its scores and the whole model's."""
        from t5accel.distillation.model_card import save_student
        from t5accel.metrics import floor_warning

        command = shlex.join(["t5accel", *sys.argv[1:]])
        typer.echo(f"Wrote {save_student(student, tokenizer, folder, teacher=whole, command=command, **facts)}")
        for name, model in (("whole model", whole), ("student", student)) if self.validate else ():
            status(f"Scoring the {name} …")
            scores = self.validate(model)
            typer.echo(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in scores.items()))
            warn(floor_warning(scores, f"The {name}"))


def _opened(name: str, out: Path, threads: int | None):  # noqa: ANN202
    """The model and its tokenizer, on these threads, if the student has a place in ``out``."""
    import torch

    from t5accel import machine
    from t5accel.distillation.model_card import require_student_folder

    torch.set_num_threads(threads or machine.cpu_threads())
    require_student_folder(out / "model")
    status(f"Loading {name} …")
    return _with_tokenizer(name)


def _sha256(model, tokenizer) -> str:  # noqa: ANN001
    from t5accel.graphs.export import model_weights, source_hash
    from t5accel.graphs.export_cache import tokenizer_hash

    return sha256((source_hash(model, model_weights(model)) + tokenizer_hash(tokenizer)).encode()).hexdigest()


def _with_tokenizer(name: str):  # noqa: ANN202
    from t5accel.models.load import load_model

    model, tokenizer = load_model(name)
    if tokenizer is None:
        raise InputError(f"{name} has no tokenizer: save one beside it, training reads texts.")
    return model, tokenizer


def _numbers(text: str) -> tuple[int, ...]:
    """The value of ``--layers``, such as 0,3."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"--layers must be numbers with commas between, as in 0,3, got {text!r}.") from error


def _beams(name, model, tokenizer, device, most, threads):  # noqa: ANN001, ANN202
    """The teacher's function from texts to the best of four beams."""
    from t5accel.api import open_backend
    from t5accel.backends.torch_eager import TorchEager
    from t5accel.tokenization import generate_texts

    backend = open_backend(name, threads=threads)[0] if device == "cpu" else TorchEager(model.to(device))
    return partial(generate_texts, backend, tokenizer, max_new_tokens=most, num_beams=4)
