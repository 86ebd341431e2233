"""Train the bundled T5, which translates, summarises and answers, in four resumable stages.

The second stage teaches whose fact a question asks for; the third grows the model and adds longer and composed
texts; the fourth continues the third.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.figures import plot_losses
from bench.results import Row, scores, write_rows
from t5accel.distillation.batches import Batch, Encode, Example, Mixture, Phase, TaskBatch, encode_and_pack
from t5accel.distillation.checkpointing import require_device, run_training
from t5accel.distillation.optimizer import (
    batch_loss,
    learning_rate_factor,
    new_optimizers,
    set_dropout,
    validation_losses,
)
from t5accel.errors import InputError
from t5accel.metrics import bleu, chrf
from t5accel.models.load import load_model, load_pretrained
from t5accel.models.prefixes import TRANSLATE
from training.curriculum import (
    CONTEXT,
    CURRICULUM,
    FOURTH_CURRICULUM,
    HIDE_WHAT_IS_ASKED,
    SECOND_CURRICULUM,
    THIRD_CURRICULUM,
    composed_question_example,
    composed_summary_example,
    mini_mixture,
    question_example,
    summary_example,
)
from training.grow import grow_model
from training.head_init import HeadInit, choose_head_inits, init_heads
from training.pairs import HeldOut, Pair, read_pairs, split_pairs, to_british
from training.vocabulary import train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SETTINGS = "settings.json"  # beside a model that was trained for a comparison


def held_out_quality(
    generate: Callable[[list[str]], list[str]], pairs_file: str | Path, *, held_out: int = 1000
) -> dict[str, dict[str, float] | None]:
    """Corpus BLEU and chrF on the sentences that `split_pairs` holds out: of any length, and long ones.

    The second score is ``None`` if ``pairs_file``, on which the model was trained, has no long sentences.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".tsv", delete=False) as file:
    ...     _ = file.write("A b c d e.\\tF g h i j.\\nK l m n o.\\tP q r s t.\\n")
    >>> found = held_out_quality(lambda texts: ["nothing"], file.name, held_out=1)
    >>> found["held_out"], found["held_out_long"]
    ({'sentences': 1, 'references': 1, 'bleu': 0.0, 'chrf': 11.27}, None)
    """
    split = split_pairs(read_pairs(pairs_file), held_out)
    parts = {"held_out": split.held_out, "held_out_long": split.held_out_long}
    return {name: _scored(generate, rows) if rows else None for name, rows in parts.items()}


def _scored(generate: Callable[[list[str]], list[str]], rows: HeldOut) -> dict[str, float]:
    rows = sorted(rows, key=lambda row: len(row[0]))  # batches of alike length waste no padding
    predictions: list[str] = []
    for first in range(0, len(rows), 64):
        predictions += generate([TRANSLATE + english for english, _ in rows[first : first + 64]])
    expected = [list(frenches) for _, frenches in rows]
    scores = {"bleu": bleu(predictions, expected), "chrf": chrf(predictions, expected)}
    count = sum(map(len, expected))
    return {"sentences": len(rows), "references": count, **{name: round(one, 2) for name, one in scores.items()}}


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the outcome. ``steps`` may grow between runs; the rest must stay."""

    steps: int = 6500
    seed: int = 0
    learning_rate: float = 2e-3  # AdamW's, of embeddings, biases and norms
    matrix_learning_rate: float = 2.5e-3  # Muon's
    warmup_steps: int = 300
    decay_share: float = 0.25
    label_smoothing: float = 0.1
    dropout: float = 0.1
    d_model: int = 256
    d_kv: int = 32
    d_ff: int = 1024
    num_heads: int = 8
    num_layers: int = 4  # of encoder and decoder; of the encoder alone from the third stage on
    vocab_size: int = 6000
    head_inits: tuple[HeadInit, ...] | None = ()  # None: `choose_head_inits` finds them

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InputError(f"steps must be at least 1, got {self.steps}.")

    def factor(self, step: int) -> float:
        """Multiplier of the peak learning rates at ``step``."""
        return learning_rate_factor(step, self.steps, warmup_steps=self.warmup_steps, decay_share=self.decay_share)


# The second stage goes on with a finished model, more gently.
SECOND_STAGE = TrainConfig(
    steps=4500, learning_rate=1e-3, matrix_learning_rate=1.25e-3, warmup_steps=30, decay_share=0.35, head_inits=None
)

# The third adds two encoder layers and a separate vocabulary.
THIRD_STAGE = TrainConfig(
    steps=6600, learning_rate=1.5e-3, matrix_learning_rate=2e-3, warmup_steps=100, decay_share=0.3, num_layers=6,
    vocab_size=8000,
)  # fmt: skip

FOURTH_STAGE = replace(THIRD_STAGE, steps=8300, decay_share=0.24)


def stage_plan(stage: int, start: str | None) -> tuple[TrainConfig, tuple[Phase, ...]]:
    """Configuration and curriculum of stage 1, which begins with no model, 2, 3 or 4."""
    stages = {
        1: (TrainConfig(), CURRICULUM), 2: (SECOND_STAGE, SECOND_CURRICULUM),
        3: (THIRD_STAGE, THIRD_CURRICULUM), 4: (FOURTH_STAGE, FOURTH_CURRICULUM),
    }  # fmt: skip
    if stage not in stages or (start is None) != (stage == 1):
        raise InputError(
            f"stage must be 1, without a start, or 2 to 4 with the model made before, got {stage} and start {start}."
        )
    return stages[stage]


class PooledDropout(torch.nn.Dropout):
    """Dropout with masks read at random offsets of a pool drawn once."""

    # On a CPU torch draws dropout's random bits on one thread, which took up to half of a training step.
    pools: dict[tuple[float, torch.device, torch.dtype, int], torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return x
        # The pool's size and values follow from x and p alone, so that a resumed run draws the same masks.
        size = max(1 << 24, 1 << (2 * x.numel()).bit_length())
        key = (self.p, x.device, x.dtype, size)
        pool = self.pools.get(key)
        if pool is None:
            drawn = torch.rand(size, device=x.device, generator=torch.Generator(x.device).manual_seed(0))
            pool = self.pools[key] = ((drawn >= self.p) / (1 - self.p)).to(x.dtype)
        start = int(torch.randint(pool.numel() - x.numel(), (1,)))
        return x * pool[start : start + x.numel()].view(x.shape)


def use_pooled_dropout(module: torch.nn.Module) -> None:
    """Replace every ``nn.Dropout`` below ``module``."""
    for name, child in module.named_children():
        if isinstance(child, torch.nn.Dropout):
            setattr(module, name, PooledDropout(child.p))
        else:
            use_pooled_dropout(child)


def new_model(config: TrainConfig) -> PreTrainedModel:
    """A randomly initialised ``T5ForConditionalGeneration`` of the configured size.

    >>> round(new_model(TrainConfig()).num_parameters() / 1e6, 1)
    8.9
    """
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(config.seed)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=config.vocab_size, d_model=config.d_model, d_kv=config.d_kv, d_ff=config.d_ff,
            num_heads=config.num_heads, num_layers=config.num_layers, num_decoder_layers=config.num_layers,
            dropout_rate=config.dropout, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    use_pooled_dropout(model)
    return model


def continued_model(start: PreTrainedModel, config: TrainConfig) -> PreTrainedModel:
    """A copy of a trained model in fp32, with ``config.head_inits``."""
    model = copy.deepcopy(start).float()
    use_pooled_dropout(model)
    init_heads(model, config.head_inits)
    return model


def validation_sets(held_out: list[Example], encode: Encode) -> dict[str, list[Batch]]:
    """Batches of held-out translation pairs, and of reports and questions of seen templates and composed ones."""
    rng = random.Random("validation")
    tasks = {
        "translation": held_out,
        "summaries": [summary_example(rng) for _ in range(64)],
        "questions": [question_example(rng) for _ in range(128)],
        "composed reports": [composed_summary_example(rng) for _ in range(64)],
        "composed questions": [composed_question_example(rng) for _ in range(128)],
    }
    return {name: encode_and_pack(examples, encode, 6000) for name, examples in tasks.items()}


def settings_of(pairs: Path, **settings: Any) -> dict[str, Any]:
    """What a training was asked for, as JSON: `SETTINGS` of a finished one."""
    with pairs.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return json.loads(json.dumps({**settings, "pairs": digest}))


def require_settings(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Return True, or raise ``InputError`` if the finished training in a folder had other settings."""
    file = folder / SETTINGS
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    if found != settings:
        raise InputError(f"{folder} holds a training with other settings, {found}. Delete it, or give another folder.")
    return True


def make_loss_validator(
    held_out: list[Example], tokenizer: PreTrainedTokenizerBase
) -> Callable[[PreTrainedModel], dict[str, float]]:
    """A function from a model to its losses on `validation_sets`, as `distill` and `prune` take it."""
    sets = validation_sets(held_out, lambda texts: tokenizer(texts)["input_ids"])
    return lambda model: validation_losses(model, sets)


def train_model(
    mixture: Mixture, tokenizer: PreTrainedTokenizerBase, held_out: list[Example], folder: Path,
    config: TrainConfig, *, start: PreTrainedModel | None = None, prolong: bool = False, device: str = "cpu",
    validate_every: int = 250, save_every: int = 250,
) -> PreTrainedModel:  # fmt: skip
    """Train a copy of ``start``, or a new model, until ``config.steps``; return it in evaluation mode.

    ``held_out`` are examples for the validation loss. A checkpoint in ``folder`` is continued from; ``prolong`` goes
    back to the state before the learning rate decayed, ``stable.pt``, so that a longer run can go on from there.
    """
    require_device(device)
    stable = folder / "stable.pt"
    if prolong and not stable.is_file():
        raise InputError(f"No {stable}: this run has not reached its decay, or is extended. Leave --extend-run out.")
    model = new_model(config) if start is None else continued_model(start, config)
    model = model.to(device).train()
    rates = dict(learning_rate=config.learning_rate, matrix_learning_rate=config.matrix_learning_rate)
    optimizers = new_optimizers(model, **rates)
    validate = make_loss_validator(held_out, tokenizer)
    context = tokenizer.convert_tokens_to_ids(CONTEXT)

    def loss_of(task_batch: TaskBatch) -> tuple[torch.Tensor, int]:
        task, batch = task_batch
        hidden_until = context if task in HIDE_WHAT_IS_ASKED else None
        return batch_loss(model, batch, config.label_smoothing, hidden_until=hidden_until)

    def before_step(step: int) -> None:
        dropout = mixture.phase(step).dropout
        set_dropout(model, config.dropout if dropout is None else dropout)

    run_training(
        folder,
        config,
        model,
        optimizers,
        mixture,
        lambda texts: tokenizer(texts)["input_ids"],
        loss_of=loss_of,
        validate=lambda: validate(model),
        before_step=before_step,
        made_from=() if start is None else (start,),
        stable=stable,
        goes_back=prolong,
        device=device,
        validate_every=validate_every,
        save_every=save_every,
    )
    return model.eval()


def vocabulary_texts(pairs: tuple[Pair, ...], seed: int) -> list[str]:
    """Texts for the tokenizer: the training pairs, in both spellings, and examples of the other two tasks."""
    rng = random.Random(f"{seed}/vocabulary")
    reports = [text for i in range(2000) for text in (composed_summary_example if i % 2 else summary_example)(rng)]
    stories = [text for i in range(4000) for text in (composed_question_example if i % 2 else question_example)(rng)]
    texts = [text for pair in pairs for text in pair]
    texts += [other for english, _ in pairs if (other := to_british(english)) != english] * 2
    return texts + reports + stories + [TRANSLATE + "."] * 2000


def reproduce(
    pairs_file: Path, folder: Path, config: TrainConfig, *, stage: int = 1, start: str | None = None,
    prolong: bool = False, device: str = "cpu", held_out: int = 1000,
) -> Path:  # fmt: skip
    """Run one stage (see `stage_plan`) from a file of pairs; returns ``folder/model``, in fp16.

    ``start`` is the name or folder of the previous stage's model; the third stage gives it a new vocabulary.
    """
    from transformers import AutoTokenizer

    curriculum = stage_plan(stage, start)[1]
    require_device(device)
    split = split_pairs(read_pairs(pairs_file), held_out)
    mixture = mini_mixture(split.train, curriculum)
    model = tokenizer = None
    if start is not None:
        model, tokenizer = load_model(start)
        if tokenizer is None:
            raise InputError(
                f"start must have a tokenizer, got {start}. Give the name or the folder of a trained model."
            )
    if stage in (1, 3):
        tokenizer_folder = folder / "tokenizer"
        if not (tokenizer_folder / "tokenizer.json").is_file():
            texts = vocabulary_texts(split.train, config.seed)
            train_tokenizer(texts, config.vocab_size).save_pretrained(tokenizer_folder)
        before, tokenizer = tokenizer, load_pretrained(AutoTokenizer.from_pretrained, tokenizer_folder)
        if model is not None:
            model = grow_model(model, before, tokenizer, num_layers=config.num_layers, vocab_size=config.vocab_size)
    held_out_pairs = [(TRANSLATE + english, references[0]) for english, references in split.held_out]
    if config.head_inits is None:
        sets = validation_sets(held_out_pairs, lambda texts: tokenizer(texts)["input_ids"])
        config = replace(
            config, head_inits=choose_head_inits(model, [batch for batches in sets.values() for batch in batches[:2]])
        )
    model = train_model(mixture, tokenizer, held_out_pairs, folder, config, start=model, prolong=prolong, device=device)
    model.to(torch.float16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


# Record how the bundled model was trained: the losses of all stages, its quality, and the picture of its card.
# The logs are `log.jsonl` of the folders that `python -m training train` wrote, in order; the quality is what `python
# -m bench evaluate --json` and `python -m training held-out --json` wrote. The record belongs in
# `data/results/training-mini.json`.


COMMAND = (
    "python -m training train --pairs tatoeba-eng-fra.tsv --out build/mini --steps 9000; "
    "python -m training train --pairs tatoeba-eng-fra.tsv --stage 2 --start build/mini/model --out build/mini-2; "
    "python -m training train --pairs tatoeba-eng-fra-2019.tsv --stage 3 "
    "--start build/mini-2/model --out build/mini-3; "
    "python -m training train --pairs tatoeba-eng-fra-2019.tsv --stage 4 "
    "--start build/mini-3/model --out build/mini-4; "
    "python -m training held-out --model mini --pairs tatoeba-eng-fra-2019.tsv"
)


def join_logs(logs: list[Path]) -> list[Row]:
    """The rows of all stages, with steps counted across stages."""
    rows, before = [], 0
    for stage, log in enumerate(logs, 1):
        for line in log.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rows.append({"measured": "training", "model": "mini", **row, "step": before + row["step"], "stage": stage})
        before = rows[-1]["step"]
    return rows


def quality_rows(report: dict[str, Any]) -> list[Row]:
    """Scores on the bundled sets and on held-out sentences."""
    about = {"measured": "quality", "model": report["model"], "precision": "fp32"}
    rows = [{**about, **scores(report)}]
    for task, name in (("held-out translation", "held_out"), ("held-out long translation", "held_out_long")):
        if kept_out := report.get(name):
            rows.append({**about, "task": task, "texts": kept_out["sentences"], "bleu": kept_out["bleu"],
                         "chrf": kept_out["chrf"], "settings": {"references": kept_out["references"]}})  # fmt: skip
    return rows


def main() -> None:
    """Record the training of the bundled model."""
    parser = argparse.ArgumentParser(description="Record how the bundled model was trained.")
    parser.add_argument("logs", type=Path, nargs="+", help="log.jsonl of every stage, in order")
    parser.add_argument("--quality", type=Path, required=True, help="what `python -m bench evaluate --json` wrote")
    parser.add_argument("--held-out", type=Path, required=True, help="what `python -m training held-out --json` wrote")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--plot", type=Path, required=True)
    args = parser.parse_args()
    rows = join_logs(args.logs)
    held_out, report = (json.loads(file.read_text(encoding="utf-8")) for file in (args.held_out, args.quality))
    write_rows(args.json, [*rows, *quality_rows(held_out | report)], command=COMMAND)
    plot_losses(rows, args.plot)


if __name__ == "__main__":
    main()
