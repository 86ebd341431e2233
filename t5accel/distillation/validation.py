"""Loss and text scores on held-out rows during training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from t5accel.backends.torch_eager import TorchEager
from t5accel.distillation.batches import LONGEST, Rows, encode_and_pack, read_examples
from t5accel.distillation.optimizer import evaluating, validation_losses
from t5accel.errors import InputError
from t5accel.metrics import ROW_SCORES
from t5accel.tokenization import generate_texts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

METRICS = ("loss", *ROW_SCORES)


def make_validator(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    metric: str = "loss",
    *,
    batch_size: int = 32,
    longest: int = LONGEST,
) -> Callable[[PreTrainedModel], dict[str, float]]:
    """Make a function from a model to its loss (nats per token) and the metric of its greedy outputs.

    ``rows`` and ``longest`` are those of `read_examples`; the metric "loss" generates nothing. Raises
    ``InputError`` for an unknown metric or a wrong row, ``MissingPackageError`` if the metric's package is missing.

    >>> from t5accel.models.load import load_model
    >>> model, tokenizer = load_model("mini")
    >>> rows = [{"source": "translate English to French: I am tired.", "target": "Je suis fatigué."}]
    >>> make_validator(rows, tokenizer, "exact_match")(model)["exact_match"]
    100.0
    """
    if metric not in METRICS:
        raise InputError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}.")
    examples = read_examples(rows, tokenizer, longest=longest)
    examples.sort(key=lambda example: len(example[0]))  # similar lengths: less padding
    sources, references = [source for source, _ in examples], [[target] for _, target in examples]
    sets = {"loss": encode_and_pack(examples, lambda texts: tokenizer(texts)["input_ids"], 6000)}
    max_new_tokens = 2 * max(len(target) for _, targets in sets["loss"] for target in targets)
    if metric != "loss":
        ROW_SCORES[metric](["a"], [["a"]])  # a missing package is reported now and not after the first 250 steps

    def validate(model: PreTrainedModel) -> dict[str, float]:
        found = validation_losses(model, sets)
        if metric != "loss":
            with evaluating(model):
                answers = generate_texts(
                    TorchEager(model), tokenizer, sources, max_new_tokens=max_new_tokens, num_beams=1,
                    batch_size=batch_size,
                )  # fmt: skip
            found[metric] = round(ROW_SCORES[metric](answers, references), 2)
        return found

    return validate
