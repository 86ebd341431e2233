"""Fine-tune the bundled model with rounded weights, and without as a control, and score both in integers.

`data/results/quantization-aware.json` is where a recorded run belongs.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench.precision import text_quality
from bench.results import Row, write_rows
from t5accel.distillation.batches import steps_from
from t5accel.graphs.export import export_t5
from t5accel.models.load import load_t5
from t5accel.precision.gate import quantize_export
from t5accel.precision.recipes import as_recipe
from training.curriculum import FOURTH_CURRICULUM, mini_mixture
from training.pairs import read_pairs, split_pairs
from training.quantization_aware import fine_tune
from training.train import FOURTH_STAGE


def rows_of(trained: str, steps: int, model: Any, tokenizer: Any, recipe: Any) -> list[Row]:
    """Text scores of a model in fp32 and by the recipe; ``trained`` says how."""
    score = text_quality()
    about = {"measured": "quality", "system": trained, "model": "mini", "steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        export_t5(model, Path(folder) / "fp32", tokenizer=tokenizer)
        quantize_export(Path(folder) / "fp32", Path(folder) / recipe.name, recipe)
        return [{**about, "precision": name, **score(Path(folder) / name)} for name in ("fp32", recipe.name)]


def train(rounding: Any, folder: Path, args: argparse.Namespace) -> None:
    """Fine-tune the bundled model, unless that is done already."""
    if (folder / "config.json").is_file():
        return
    model, tokenizer = load_t5("mini")
    mixture = mini_mixture(split_pairs(read_pairs(args.pairs), 1000).train, FOURTH_CURRICULUM)
    # Steps that the model has not seen: the curriculum's last phase goes on.
    batches = steps_from(mixture, lambda texts: tokenizer(texts)["input_ids"], 1, FOURTH_STAGE.steps)
    with tqdm(total=args.steps, desc=folder.name, unit="step") as bar:

        def shown(loss: float) -> None:
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)

        model.to(args.device)
        fine_tune(model, rounding, batches, steps=args.steps, learning_rate=args.learning_rate, on_step=shown)
    model.to("cpu", torch.float16).save_pretrained(folder)


def main() -> None:
    """Train twice what is not trained yet; then score both, and the model as it was."""
    parser = argparse.ArgumentParser(description="Fine-tune with rounded weights, and without, and compare.")
    parser.add_argument("pairs", type=Path, help="the file of training pairs")
    parser.add_argument("--out", type=Path, required=True, help="folder for the fine-tuned models")
    parser.add_argument("--json", type=Path, help="score all and write the rows here")
    parser.add_argument("--recipe", default="int4")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--device", default="cpu", help="to train on: cpu or cuda")
    args = parser.parse_args()
    recipe = as_recipe(args.recipe)
    folders = {name: args.out / name.replace(" ", "-") for name in ("with rounded weights", "without rounding")}
    for folder, rounding in zip(folders.values(), (recipe, None), strict=True):
        train(rounding, folder, args)
    if not args.json:
        return
    _, tokenizer = load_t5("mini")
    rows: list[Row] = []
    for name, steps, where in (("not", 0, "mini"), *((name, args.steps, folder) for name, folder in folders.items())):
        rows += rows_of(name, steps, load_t5(where)[0], tokenizer, recipe)
        print(*rows[-2:], sep="\n")
    write_rows(
        args.json, rows, recipe=recipe.to_json(), learning_rate=args.learning_rate,
        command=f"python -m training.quantization_aware_script PAIRS --out FOLDER --recipe {args.recipe} --steps {args.steps}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
