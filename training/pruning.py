"""Prune the bundled model to several sizes and in several ways, and score what is left.

`data/results/pruning.json` is where a recorded run belongs. Runs that were interrupted go on; finished ones are not
trained again. `--train` makes some of them, `--json` scores all that are finished and not yet in that file: what is
written down needs its weights no more.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.results import Row
from bench.scoreboard import recorded_family
from t5accel.distillation.importance import IMPORTANCE_METHODS
from t5accel.distillation.model_card import save_student
from t5accel.distillation.pruning import PruneConfig, prune
from t5accel.models.load import load_model
from training.curriculum import student_mixture
from training.train import make_loss_validator

WHOLE, STUDENT = "mini", "mini-d1"
ROUNDS = 15  # of the timing: a decoder of this size takes milliseconds, and so small disturbances show


@dataclass(frozen=True)
class Run:
    """A smaller model: how, and what of."""

    name: str
    config: PruneConfig
    of: str = WHOLE


def runs(steps: int, best: str) -> list[Run]:
    """At one size all ways, untrained and trained; the best way at other sizes, and for the distilled student."""
    found = []
    for way in IMPORTANCE_METHODS:
        if way != "movement":  # which needs training
            found.append(Run(f"{way}, untrained", PruneConfig(heads=0.25, neurons=0.5, importance=way, steps=0)))
        found.append(Run(way, PruneConfig(heads=0.25, neurons=0.5, importance=way, steps=steps)))
    for heads, neurons in ((0.1, 0.25), (0.6, 0.85)):
        name = f"{best}, {heads:.0%} of heads, {neurons:.0%} of neurons"
        found.append(Run(name, PruneConfig(heads=heads, neurons=neurons, importance=best, steps=steps)))
    together = PruneConfig(heads=0.25, neurons=0.5, importance=best, steps=2 * steps)
    return [*found, Run(f"{STUDENT}, {best}", together, of=STUDENT)]


def folder_of(run: Run, out: Path) -> Path:
    """Where a run's checkpoint, log and model lie."""
    return out / run.name.replace("%", "").replace(", ", "-").replace(" ", "-")


def train(run: Run, pairs: Path, out: Path, device: str = "cpu") -> None:
    """Make one model, unless it is finished."""
    folder = folder_of(run, out)
    if (folder / "model" / "config.json").is_file():
        return
    (teacher, tokenizer), (model, _) = load_model(WHOLE), load_model(run.of)
    mixture, held_out = student_mixture(pairs)
    validate = make_loss_validator(held_out, tokenizer)
    pruned = prune(model, tokenizer, mixture, folder, run.config, teacher=teacher, validate=validate, device=device)
    save_student(
        pruned, tokenizer, folder / "model", teacher=model, teacher_name=run.of, how="pruned",
        command="python -m training.pruning", settings=asdict(run.config),
    )  # fmt: skip


def main() -> None:
    """Make what is asked for, then score what is finished."""
    parser = argparse.ArgumentParser(description="Prune the bundled model to several sizes and in several ways.")
    parser.add_argument("pairs", type=Path, help="the file of training pairs")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--steps", type=int, default=300, help="of every run that trains")
    parser.add_argument("--best", default="movement", help="the importance for other sizes, and for the student")
    parser.add_argument("--train", nargs="*", default=[], help="make the models of these names")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="to train on")
    parser.add_argument("--json", type=Path, help="score all that are finished and write the rows here")
    args = parser.parse_args()
    planned = runs(args.steps, args.best)
    unknown = {*args.train} - {run.name for run in planned}
    if unknown:
        parser.error(f"--train has {sorted(unknown)}; there are {[run.name for run in planned]}")
    for run in planned:
        if run.name in args.train:
            train(run, args.pairs, args.out, args.device)
    if not args.json:
        return
    finished = {run.name: run for run in planned if (folder_of(run, args.out) / "model" / "config.json").is_file()}

    def told(name: str, rows: list[Row]) -> list[Row]:
        run = finished[name]
        settings = asdict(run.config)
        settings |= {f"training_{key}": value for key, value in settings.pop("training").items()}
        how: Row = {"measured": "training", "model": name, "made_from": run.of, "steps": run.config.steps,
                    "settings": settings}  # fmt: skip
        more = {"made_from": run.of} | ({"bundled": f"{STUDENT}p"} if run.of == STUDENT else {})
        return [how, *(row | more for row in rows)]

    recorded_family(
        args.json, WHOLE, {name: folder_of(run, args.out) / "model" for name, run in finished.items()}, told=told,
        rounds=ROUNDS, on_model=print,
        command=f"python -m training.pruning PAIRS --out FOLDER --steps {args.steps} --best {args.best} --json FILE",
    )  # fmt: skip


if __name__ == "__main__":
    main()
