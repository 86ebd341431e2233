"""Distil or prune the bundled model in all ways that the course compares, and score every student.

Recorded runs belong in `data/results/distillation.json` and, with ``--prune``, `data/results/pruning.json`. Interrupted
runs go on; finished ones are not trained again. ``--json`` scores finished students that the file lacks.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.results import Row, write_json
from bench.scoreboard import recorded_family
from t5accel.api import accelerate
from t5accel.decoding.beam import beam_search
from t5accel.distillation.checkpointing import weights_digest
from t5accel.distillation.importance import IMPORTANCE_METHODS
from t5accel.distillation.model_card import save_student
from t5accel.distillation.pruning import PruneConfig, prune
from t5accel.distillation.student import DistillConfig, distill
from t5accel.distillation.teacher_outputs import read_teacher_outputs, write_teacher_outputs
from t5accel.models.load import load_model
from t5accel.tokenization import text_to_text
from training.curriculum import draw_sources, student_mixture
from training.train import SETTINGS, make_loss_validator, require_settings, settings_of

TEACHER, STUDENT = "mini", "mini-d1"  # the second one is the longer run's
TEXTS = 6_000  # written by the teacher, for the loss "sequence"
DEEPER = ("logits", "hidden")  # the losses of students with two layers: those that ask the teacher at every step
LONGER = "hidden"  # the loss of the long run: of the four at equal budget it leads
ROUNDS = 15  # of the timing: a decoder of this size takes milliseconds, and so small disturbances show


@dataclass(frozen=True)
class Run:
    """A student: its training, the model that it begins with, and its name among the bundled models."""

    name: str
    config: DistillConfig | PruneConfig
    start: str = TEACHER
    bundled: str | None = None

    def folder(self, out: Path) -> Path:
        return out / self.name.replace("%", "").replace(", ", "-").replace(" ", "-")

    def is_finished(self, out: Path, pairs: Path) -> bool:
        folder = self.folder(out)
        return (folder / "model" / "config.json").is_file() and require_settings(folder, self.settings(pairs))

    def settings(self, pairs: Path) -> dict[str, Any]:
        return settings_of(pairs, **asdict(self.config))


def distillation_runs(steps: int, longer: int) -> list[Run]:
    """All losses for one layer; `DEEPER` for two layers; `LONGER` with more steps."""
    base = DistillConfig(steps=steps)
    losses = [Run(f"1 layer, {loss}", replace(base, loss=loss)) for loss in ("labels", "logits", "hidden", "sequence")]
    deeper = [Run(f"2 layers, {loss}", replace(base, loss=loss, layers=(0, 3))) for loss in DEEPER]
    long_run = Run(f"1 layer, {LONGER}, longer", replace(base, loss=LONGER, steps=longer), bundled=STUDENT)
    return [*losses, *deeper, long_run]


def pruning_runs(steps: int, best: str) -> list[Run]:
    """All importances at one size, untrained and trained; the best one at other sizes and for the distilled student."""
    found = []
    for method in IMPORTANCE_METHODS:
        config = PruneConfig(heads=0.25, neurons=0.5, importance=method, steps=steps)
        if method != "movement":  # which needs training
            found.append(Run(f"{method}, untrained", replace(config, steps=0)))
        found.append(Run(method, config))
    for heads, neurons in ((0.1, 0.25), (0.6, 0.85)):
        name = f"{best}, {heads:.0%} of heads, {neurons:.0%} of neurons"
        found.append(Run(name, PruneConfig(heads=heads, neurons=neurons, importance=best, steps=steps)))
    config = PruneConfig(heads=0.25, neurons=0.5, importance=best, steps=2 * steps)
    return [*found, Run(f"{STUDENT}, {best}", config, start=STUDENT, bundled=f"{STUDENT}p")]


def train(run: Run, pairs: Path, out: Path, device: str = "cpu") -> None:
    """Train one student, unless it is finished."""
    folder = run.folder(out)
    if run.is_finished(out, pairs):
        return
    write_json(folder / SETTINGS, run.settings(pairs))
    (teacher, tokenizer), (start, _) = load_model(TEACHER), load_model(run.start)
    mixture, held_out = student_mixture(pairs)
    options = dict(validate=make_loss_validator(held_out, tokenizer), device=device)
    command = "python -m training.students"
    if isinstance(run.config, PruneConfig):
        how, command = "pruned", f"{command} --prune"
        student = prune(start, tokenizer, mixture, folder, run.config, teacher=teacher, **options)
    else:
        how = "distilled"
        if run.config.loss == "sequence":
            file = out / "teacher.jsonl"
            backend = accelerate(TEACHER, device=device).backend
            write = text_to_text(
                tokenizer, lambda ids, mask: beam_search(backend, ids, mask, num_beams=4, max_new_tokens=64).sequences
            )
            by = weights_digest([teacher])
            write_teacher_outputs(file, write, draw_sources(mixture, TEXTS, run.config.seed), by=by)
            mixture = mixture.with_teacher_outputs(read_teacher_outputs(file))
        student = distill(start, tokenizer, mixture, folder, run.config, **options)
    save_student(
        student,
        tokenizer,
        folder / "model",
        teacher=start,
        teacher_name=run.start,
        how=how,
        command=command,
        settings=asdict(run.config),
    )


def training_rows(run: Run, out: Path) -> list[Row]:
    """How a student was trained, and for a distilled one its validation losses."""
    about = {"measured": "training", "model": run.name}
    settings = asdict(run.config)
    if isinstance(run.config, PruneConfig):
        settings |= {f"training_{key}": value for key, value in settings.pop("training").items()}
        log = []
    else:
        log = (run.folder(out) / "log.jsonl").read_text(encoding="utf-8").splitlines()
    how = {**about, "made_from": run.start, "steps": run.config.steps, "settings": settings}
    return [how, *({**about, **json.loads(line)} for line in log)]


def main() -> None:
    """Train the students asked for, then score the finished ones."""
    parser = argparse.ArgumentParser(description="Distil or prune the bundled model as the course compares.")
    parser.add_argument("pairs", type=Path, help="the file of training pairs")
    parser.add_argument("--prune", action="store_true", help="prune instead of distilling")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--steps", type=int, help="of every run but the longer one (400; with --prune 300)")
    parser.add_argument("--longer", type=int, default=5000, help="of the longer distillation")
    parser.add_argument("--best", default="movement", help="the importance for other sizes, and for the student")
    parser.add_argument("--train", nargs="*", default=[], help="train the students of these names")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="to train on")
    parser.add_argument("--json", type=Path, help="score all that are finished and write the rows here")
    args = parser.parse_args()
    if args.prune:
        steps = 300 if args.steps is None else args.steps
        planned, choice = pruning_runs(steps, args.best), f"--prune --out FOLDER --steps {steps} --best {args.best}"
    else:
        steps = 400 if args.steps is None else args.steps
        planned, choice = distillation_runs(steps, args.longer), f"--out FOLDER --steps {steps} --longer {args.longer}"
    by_name = {run.name: run for run in planned}
    unknown = {*args.train} - by_name.keys()
    if unknown:
        parser.error(f"--train has {sorted(unknown)}; there are {[*by_name]}")
    for run in planned:
        if run.name in args.train:
            train(run, args.pairs, args.out, args.device)
    if not args.json:
        return

    def told(name: str, rows: list[Row]) -> list[Row]:
        run = by_name[name]
        more = {"made_from": run.start} | ({"bundled": run.bundled} if run.bundled else {})
        return [*training_rows(run, args.out), *(row | more for row in rows)]

    recorded_family(
        args.json,
        TEACHER,
        {run.name: run.folder(args.out) / "model" for run in planned if run.is_finished(args.out, args.pairs)},
        told=told,
        rounds=ROUNDS,
        on_model=print,
        command=f"python -m training.students PAIRS {choice} --json FILE",
    )


if __name__ == "__main__":
    main()
