"""Texts in, texts out: the ten lines for transformers' pipelines of translation and summaries, which 5.x dropped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from t5accel.checks import as_count
from t5accel.errors import InputError
from t5accel.tokenization import text_to_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def text2text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: str | Iterable[str],
    *,
    batch_size: int = 8,
    prefix: str | None = None,
    task: str | None = None,
    **generate_options: Any,
) -> Any:
    """What ``model.generate`` answers to ``texts``: a list in their order, or one str for one str.

    Texts of like length share a batch, so that little is padded. Nothing is cut off.

    Args:
        model: has ``generate`` and a ``device``, and is in evaluation mode (dropout would make the answers random).
        tokenizer: a transformers tokenizer with a padding token.
        batch_size: at most so many texts at a time.
        prefix: goes before each text, such as ``"summarize: "``. By default that of ``task``, or nothing.
        task: a key of the configuration's ``task_specific_params``, such as ``"summarization"``: its prefix and options
            are used where none are given.
        generate_options: passed on to ``generate``, such as ``max_new_tokens`` and ``num_beams``.

    Raises:
        InputError: no texts, no tokenizer, a batch size below 1, a model in training mode, a task that the
            configuration does not name, or options that ask for more than one answer to a text.

    >>> from t5accel.models.load import load_t5
    >>> model, tokenizer = load_t5("mini")
    >>> texts = ["I am tired.", "Where is the station?"]
    >>> answers = text2text(model, tokenizer, texts, prefix="translate English to French: ", num_beams=2)
    >>> answers[0] == text2text(model, tokenizer, "translate English to French: I am tired.", num_beams=2)
    True
    """
    as_count(batch_size, "batch_size", at_least=1)
    given = [texts] if isinstance(texts, str) else list(texts) if isinstance(texts, Iterable) else []
    if not given or not all(isinstance(text, str) for text in given):
        raise InputError(f"Give a text, or a list of at least one; {texts!r} was given.")
    if prefix is not None and not isinstance(prefix, str):
        raise InputError(f"prefix is {prefix!r}; give the text that goes before each of the others.")
    if not hasattr(model, "generate"):
        raise InputError(f"{type(model).__name__} has no generate(): give a model of transformers or optimum.")
    if getattr(model, "training", False):
        raise InputError("The model is in training mode, where dropout makes answers random: call model.eval() first.")

    if task is not None:
        own = _options_of(model, task)
        own_prefix = own.pop("prefix", "")
        prefix = own_prefix if prefix is None else prefix
        if "max_new_tokens" in generate_options:
            own.pop("max_length", None)  # which transformers would warn of
        generate_options = {**own, **generate_options}

    def generate_ids(input_ids: Any, attention_mask: Any) -> Any:
        ids, mask = (torch.as_tensor(array, device=model.device) for array in (input_ids, attention_mask))
        with torch.no_grad():
            answers = model.generate(input_ids=ids, attention_mask=mask, **generate_options)
        answers = getattr(answers, "sequences", answers)  # with return_dict_in_generate they come in a larger object
        if len(answers) != len(ids):
            raise InputError(
                f"generate gave {len(answers)} answers to {len(ids)} texts: leave num_return_sequences at 1."
            )
        return answers

    answer = text_to_text(tokenizer, generate_ids, prefix=prefix or "")
    longest_first = sorted(range(len(given)), key=lambda number: len(given[number]), reverse=True)
    answers: dict[int, str] = {}
    for start in range(0, len(given), batch_size):
        numbers = longest_first[start : start + batch_size]
        answers.update(zip(numbers, answer([given[number] for number in numbers]), strict=True))
    return answers[0] if isinstance(texts, str) else [answers[number] for number in range(len(given))]


def _options_of(model: Any, task: str) -> dict[str, Any]:
    known = getattr(model.config, "task_specific_params", None) or {}
    if task not in known:
        named = f"one of {', '.join(known)}" if known else "a prefix, for this model's configuration names no tasks"
        raise InputError(f"task must be a key of the model's task_specific_params, got {task!r:.80}. Give {named}.")
    return dict(known[task])
