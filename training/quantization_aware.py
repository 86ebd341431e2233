"""Quantisation-aware fine-tuning: train a model on weights rounded as a recipe rounds them.

The backward pass takes the rounding for the identity: the straight-through estimator (Bengio, Léonard and Courville,
2013). Weights are rounded for good by `precision.gate` afterwards; activations are not rounded here. A recorded run
belongs in `data/results/quantization-aware.json`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import parametrize
from tqdm import tqdm

from bench.precision import text_quality
from bench.results import Row, write_json, write_rows
from t5accel.distillation.batches import TaskBatch, steps_from
from t5accel.distillation.optimizer import new_optimizers, optimizer_step
from t5accel.errors import InputError
from t5accel.graphs.atomic_write import locked, staged
from t5accel.graphs.export import export_model
from t5accel.models.load import load_model
from t5accel.precision.convert import quantize_export
from t5accel.precision.integers import quantize_blocks
from t5accel.precision.recipes import EMBEDDING, Recipe, Scheme, as_recipe, group_of
from training.curriculum import FOURTH_CURRICULUM, mini_mixture
from training.pairs import read_pairs, split_pairs
from training.train import FOURTH_STAGE, SETTINGS, require_settings, settings_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Rounded(torch.nn.Module):
    """A weight (N, K) as a recipe stores it, with the gradient of the weight itself.

    >>> weight = torch.tensor([[-8.0, 7.0, 0.6, 0.0]], requires_grad=True)
    >>> found = Rounded(weight, Scheme(bits=4, block_size=16))(weight)
    >>> found.sum().backward()
    >>> found.tolist(), weight.grad.tolist()
    ([[-8.0, 7.0, 1.0, 0.0]], [[1.0, 1.0, 1.0, 1.0]])
    """

    def __init__(self, weight: torch.Tensor, scheme: Scheme):
        super().__init__()
        self.scheme = scheme
        if scheme.method == "weight-only":
            # Each block keeps the share of its largest weight that `quantize_blocks` finds best at first: searching
            # again at every step would take longer than the step.
            scales = quantize_blocks(weight.detach().float().cpu().numpy(), scheme.bits, scheme.block_size).scales
            reached = self._reaching(self._in_blocks(weight.detach()))
            share = torch.from_numpy(scales)[:, :, None].to(reached) / torch.where(reached == 0, 1, reached)
            self.register_buffer("share", share, persistent=False)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + (self.rounded(weight.detach()) - weight.detach())

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """(N, K) -> (N, K)."""
        if self.scheme.method != "weight-only":
            largest = weight.abs().amax(dim=1, keepdim=True) if self.scheme.per_channel else weight.abs().max()
            levels = 64 if self.scheme.reduce_range else 127
            scale = torch.where(largest > 0, largest / levels, torch.ones_like(largest))
            return (weight / scale).round().clamp(-levels, levels) * scale
        blocks, half = self._in_blocks(weight), 1 << (self.scheme.bits - 1)
        scale = self._reaching(blocks) * self.share
        scale = torch.where(scale == 0, 1, scale)
        rounded = (blocks / scale).round().clamp(-half, half - 1) * scale
        return rounded.flatten(1)[:, : weight.shape[1]]

    def _in_blocks(self, weight: torch.Tensor) -> torch.Tensor:
        size = self.scheme.block_size
        return torch.nn.functional.pad(weight, (0, -weight.shape[1] % size)).unflatten(1, (-1, size))

    def _reaching(self, blocks: torch.Tensor) -> torch.Tensor:
        """The scale with which the largest weight of each block is the lowest integer: (N, blocks, 1)."""
        extreme = blocks.gather(2, blocks.abs().argmax(dim=2, keepdim=True))
        return extreme / -(1 << (self.scheme.bits - 1))


@contextmanager
def rounded_weights(model: PreTrainedModel, recipe: Recipe | str) -> Iterator[None]:
    """Let the model compute with rounded weights inside the ``with`` block.

    >>> from t5accel.models.random_init import random_t5
    >>> model = random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    >>> before = model.shared.weight.clone()
    >>> with rounded_weights(model, "int4"):
    ...     bool((model.shared.weight == before).all())
    False
    >>> bool((model.shared.weight == before).all()), model.lm_head.weight is model.shared.weight
    (True, True)
    """
    recipe = as_recipe(recipe)
    if not recipe.integers:
        raise InputError(f"recipe must have integers, got {recipe.name}.")
    schemes = {module: _scheme(name, module, recipe) for name, module in model.named_modules()}
    rounding = {module: Rounded(module.weight, scheme) for module, scheme in schemes.items() if scheme is not None}
    for module, rounded in rounding.items():
        parametrize.register_parametrization(module, "weight", rounded)
    try:
        yield
    finally:
        for module in rounding:
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)


def fine_tune(
    model: PreTrainedModel,
    recipe: Recipe | str | None,
    batches: Iterator[list[TaskBatch]],
    *,
    steps: int,
    learning_rate: float = 2e-4,
    smoothing: float = 0.1,
    on_step: Callable[[float], None] | None = None,
) -> None:
    """Train a model in place with weights rounded by a recipe, at a rate that falls to zero.

    Without a recipe nothing is rounded. ``batches`` are those of `steps_from`; ``on_step`` gets each loss, in nats per
    token.
    """
    model.train()
    optimizers = new_optimizers(model, learning_rate=learning_rate, matrix_learning_rate=None)
    try:
        with nullcontext() if recipe is None else rounded_weights(model, recipe):
            for step in range(steps):
                chosen = next(batches)
                loss = optimizer_step(
                    model, optimizers, [batch for _, batch in chosen], (1 / len(chosen),) * len(chosen),
                    factor=1 - step / steps, smoothing=smoothing,
                )  # fmt: skip
                if on_step is not None:
                    on_step(loss)
    finally:
        model.eval()


def _scheme(name: str, module: torch.nn.Module, recipe: Recipe) -> Scheme | None:
    """That of a module's weight, as `precision.integers` would store it."""
    if isinstance(module, torch.nn.Embedding) and (name == "shared" or name.endswith("embed_tokens")):
        return recipe.scheme(EMBEDDING, "decoder")
    group = group_of(f"{name}.weight") if isinstance(module, torch.nn.Linear) else None
    if group is None:
        return None
    # The decoder's keys and values of the source are computed in the encoder's graph.
    in_encoder = name.startswith("encoder.") or name.endswith(("EncDecAttention.k", "EncDecAttention.v"))
    return recipe.scheme(group, "encoder" if in_encoder else "decoder")


def rows_of(trained: str, steps: int, model: Any, tokenizer: Any, recipe: Any) -> list[Row]:
    """Text scores of a model in fp32 and by the recipe."""
    score = text_quality()
    about = {"measured": "quality", "system": trained, "model": "mini", "steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        export_model(model, Path(folder) / "fp32", tokenizer=tokenizer)
        quantize_export(Path(folder) / "fp32", Path(folder) / recipe.name, recipe)
        return [{**about, "precision": name, **score(Path(folder) / name)} for name in ("fp32", recipe.name)]


def train(rounding: Any, folder: Path, args: argparse.Namespace) -> None:
    """Fine-tune the bundled model, unless it is finished."""
    options = dict(recipe=rounding and rounding.name, steps=args.steps, learning_rate=args.learning_rate)
    settings = settings_of(args.pairs, **options)
    if (folder / "config.json").is_file() and require_settings(folder, settings):
        return
    model, tokenizer = load_model("mini")
    mixture = mini_mixture(split_pairs(read_pairs(args.pairs), 1000).train, FOURTH_CURRICULUM)
    # Steps that the model has not seen: the curriculum's last phase goes on.
    batches = steps_from(mixture, lambda texts: tokenizer(texts)["input_ids"], 1, FOURTH_STAGE.steps)
    with tqdm(total=args.steps, desc=folder.name, unit="step") as bar:

        def shown(loss: float) -> None:
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)

        model.to(args.device)
        fine_tune(model, rounding, batches, steps=args.steps, learning_rate=args.learning_rate, on_step=shown)
    with locked(folder), staged(folder) as there:  # which is finished if it is there
        model.to("cpu", torch.float16).save_pretrained(there)
        write_json(there / SETTINGS, settings)


def main() -> None:
    """Fine-tune with rounded weights and without; then score both, and the model as it was."""
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
    _, tokenizer = load_model("mini")
    rows: list[Row] = []
    for name, steps, where in (("not", 0, "mini"), *((name, args.steps, folder) for name, folder in folders.items())):
        rows += rows_of(name, steps, load_model(where)[0], tokenizer, recipe)
        print(*rows[-2:], sep="\n")
    write_rows(
        args.json, rows, recipe=recipe.to_json(), learning_rate=args.learning_rate,
        command=f"python -m training.quantization_aware PAIRS --out FOLDER --recipe {args.recipe} --steps {args.steps}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
