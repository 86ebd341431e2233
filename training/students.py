"""Distil the bundled model in all ways that the course compares, at equal budgets, and score every student.

`data/results/distillation.json` is where a recorded run belongs. Runs that were interrupted go on; finished ones are
not trained again. `--train` makes some of them, `--json` scores all that are finished and not yet in that file: what is
written down needs its weights no more.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.results import Row
from bench.scoreboard import recorded_family
from t5accel.api import accelerate
from t5accel.decoding.beam import beam_search
from t5accel.distillation.model_card import save_student
from t5accel.distillation.student import DistillConfig, distill
from t5accel.distillation.teacher_outputs import read_teacher_outputs, write_teacher_outputs
from t5accel.models.load import load_model
from t5accel.tokenization import text_to_text
from training.curriculum import draw_sources, student_mixture
from training.train import make_loss_validator

TEACHER, STUDENT = "mini", "mini-d1"  # the second one is the longer run's
TEXTS = 6_000  # that the teacher writes, for the loss "sequence"
DEEPER = ("logits", "hidden")  # the losses of students with two layers: those that ask the teacher at every step
LONGER = "hidden"  # the loss of the long run: of the four at equal budget it leads
ROUNDS = 15  # of the timing: a decoder of this size takes milliseconds, and so small disturbances show


@dataclass(frozen=True)
class Run:
    """A student: what it begins with and learns from."""

    name: str
    config: DistillConfig


def runs(steps: int, longer: int) -> list[Run]:
    """All losses for one layer; `DEEPER` for two layers; `LONGER` with more steps."""
    base = DistillConfig(steps=steps)
    losses = [Run(f"1 layer, {loss}", replace(base, loss=loss)) for loss in ("labels", "logits", "hidden", "sequence")]
    deeper = [Run(f"2 layers, {loss}", replace(base, loss=loss, layers=(0, 3))) for loss in DEEPER]
    return [*losses, *deeper, Run(f"1 layer, {LONGER}, longer", replace(base, loss=LONGER, steps=longer))]


def train(run: Run, pairs: Path, out: Path, device: str = "cpu") -> None:
    """Train one student, unless it is finished."""
    folder = out / run.name.replace(", ", "-").replace(" ", "-")
    if (folder / "model" / "config.json").is_file():
        return
    model, tokenizer = load_model(TEACHER)
    mixture, held_out = student_mixture(pairs)
    if run.config.loss == "sequence":
        file = out / "teacher.jsonl"
        backend = accelerate(TEACHER, device=device).backend
        write = text_to_text(
            tokenizer, lambda ids, mask: beam_search(backend, ids, mask, num_beams=4, max_new_tokens=64).sequences
        )
        write_teacher_outputs(file, write, draw_sources(mixture, TEXTS, run.config.seed))
        mixture = mixture.with_teacher_outputs(read_teacher_outputs(file))
    validate = make_loss_validator(held_out, tokenizer)
    student = distill(model, tokenizer, mixture, folder, run.config, validate=validate, device=device)
    save_student(
        student, tokenizer, folder / "model", teacher=model, teacher_name=TEACHER, how="distilled",
        command="python -m training.students", settings=asdict(run.config),
    )  # fmt: skip


def log(folder: Path) -> list[Row]:
    """The validation losses of a run."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Train what is asked for, then score what is finished."""
    parser = argparse.ArgumentParser(description="Distil the bundled model in all ways that the course compares.")
    parser.add_argument("pairs", type=Path, help="the file of training pairs")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--steps", type=int, default=400, help="of every run but the longer one")
    parser.add_argument("--longer", type=int, default=5000, help="of the longer one")
    parser.add_argument("--train", nargs="*", default=[], help="train the students of these names")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="to train on")
    parser.add_argument("--json", type=Path, help="score all that are finished and write the rows here")
    args = parser.parse_args()
    planned = runs(args.steps, args.longer)
    unknown = {*args.train} - {run.name for run in planned}
    if unknown:
        parser.error(f"--train has {sorted(unknown)}; there are {[run.name for run in planned]}")
    for run in planned:
        if run.name in args.train:
            train(run, args.pairs, args.out, args.device)
    if not args.json:
        return
    folders = {run.name: args.out / run.name.replace(", ", "-").replace(" ", "-") for run in planned}
    finished = {name: folder for name, folder in folders.items() if (folder / "model" / "config.json").is_file()}

    def told(name: str, rows: list[Row]) -> list[Row]:
        run = next(run for run in planned if run.name == name)
        about = {"measured": "training", "model": name}
        steps = [{**about, "made_from": TEACHER, "steps": run.config.steps, "settings": asdict(run.config)}]
        steps += [{**about, **line} for line in log(finished[name])]
        more = {"made_from": TEACHER} | ({"bundled": STUDENT} if run is planned[-1] else {})
        return [*steps, *(row | more for row in rows)]

    command = f"python -m training.students PAIRS --out FOLDER --steps {args.steps} --longer {args.longer}"
    recorded_family(
        args.json, TEACHER, {name: folder / "model" for name, folder in finished.items()}, told=told, rounds=ROUNDS,
        on_model=print, command=f"{command} --json FILE",
    )  # fmt: skip


if __name__ == "__main__":
    main()
