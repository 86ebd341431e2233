"""Extractive answers: from questions to a BERT's inputs, and from its scores to spans.

Every token is scored as the first and the last one of the answer. As in SQuAD 2.0 (Rajpurkar, Jia and Liang 2018),
``[CLS]`` stands for no answer: where it beats the best span by more than a threshold, the reader abstains.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from t5accel.errors import InputError
from t5accel.metrics import UNANSWERABLE
from t5accel.models.load import data_folder
from t5accel.models.prefixes import CONTEXT, QUESTION

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

PAD, UNK, CLS, SEP = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
# From a BERT's inputs, by name, each (B, S) int64, to its start and end logits, each (B, S).
Run = Callable[[Mapping[str, np.ndarray]], tuple[np.ndarray, np.ndarray]]
MOST_TOKENS = 512  # that a BERT of the published sizes has positions for
LONGEST_ANSWER = 8  # tokens; of the stories that a reader is trained on, none has more than 5


def calibration_texts() -> list[tuple[str, str]]:
    """Questions and their texts, which no reader was trained or is scored on: a checkout has them.

    >>> len(calibration_texts())
    64
    """
    lines = (data_folder() / "reader-calibration.jsonl").read_text(encoding="utf-8").splitlines()
    return [(row["question"], row["context"]) for row in map(json.loads, lines)]


class Read(NamedTuple):
    """Questions and their texts as tokens."""

    inputs: dict[str, np.ndarray]  # ``input_ids``, ``token_type_ids`` and ``attention_mask``, each (B, S) int64
    in_context: np.ndarray  # (B, S) bool: the tokens of the text that may answer
    places: np.ndarray  # (B, S, 2): first and last character of each token, in its own text
    contexts: Sequence[str]  # the texts


def read(tokenizer: PreTrainedTokenizerBase, questions: Sequence[str], contexts: Sequence[str]) -> Read:
    """A batch for a BERT; a text that is too long loses its end."""
    if not questions or len(questions) != len(contexts):
        raise InputError(f"{len(questions)} questions on {len(contexts)} texts: give a text for each, at least one.")
    encoded = tokenizer(
        list(questions), list(contexts), truncation="only_second", max_length=MOST_TOKENS, padding=True,
        return_offsets_mapping=True, return_token_type_ids=True,
    )  # fmt: skip
    names = ("input_ids", "token_type_ids", "attention_mask")
    inputs = {name: np.array(encoded[name], dtype=np.int64) for name in names}
    in_context = np.array([[part == 1 for part in encoded.sequence_ids(i)] for i in range(len(questions))])
    return Read(inputs, in_context, np.array(encoded["offset_mapping"]), contexts)


def as_berts(tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    """A tokenizer that holds BERT's four special tokens, so that pairs become ``[CLS] question [SEP] text [SEP]``."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    ids = [(token, tokenizer.token_to_id(token)) for token in (CLS, SEP)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}", pair=f"{CLS} $A {SEP} $B:1 {SEP}:1", special_tokens=ids
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, unk_token=UNK, cls_token=CLS, sep_token=SEP,
        model_max_length=MOST_TOKENS, model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


def best_spans(
    start: np.ndarray, end: np.ndarray, in_context: np.ndarray, *, longest: int = LONGEST_ANSWER
) -> tuple[np.ndarray, np.ndarray]:
    """First and last token of the likeliest span of each row, (B, 2), and how much less it scores than no answer, (B,).

    Args:
        start, end: logits, (B, S); those of token 0 are of no answer.
        in_context: (B, S): where a span may begin and end.
    """
    columns = np.arange(start.shape[1])
    length = columns[None, :] - columns[:, None]
    allowed = in_context[:, :, None] & in_context[:, None, :] & (length >= 0) & (length < longest)
    scores = np.where(allowed, start[:, :, None] + end[:, None, :], -np.inf)
    flat = scores.reshape(len(start), -1)
    best = flat.argmax(1)
    spans = np.stack(np.divmod(best, start.shape[1]), axis=1)
    return spans, start[:, 0] + end[:, 0] - flat[np.arange(len(flat)), best]


def answers(batch: Read, start: np.ndarray, end: np.ndarray, *, threshold: float) -> list[str]:
    """The answers to a batch, letter by letter from its texts, or "unanswerable".

    Args:
        threshold: abstain where no answer scores higher than the best span by more than this
            (``null_score_diff_threshold`` in SQuAD's own scripts).
    """
    spans, difference = best_spans(start, end, batch.in_context)
    found = []
    for row, (first, last) in enumerate(spans):
        begins, ends = batch.places[row, first, 0], batch.places[row, last, 1]
        found.append(UNANSWERABLE if difference[row] > threshold else batch.contexts[row][begins:ends])
    return found


def answerer(tokenizer: PreTrainedTokenizerBase, run: Run, *, threshold: float) -> Callable[[list[str]], list[str]]:
    """A function from T5's texts, "question: … context: …", to answers, as `evaluation.evaluate` takes it."""

    def answer(texts: list[str]) -> list[str]:
        parts = [text.removeprefix(QUESTION).split(CONTEXT, 1) for text in texts]
        if wrong := [text for text, part in zip(texts, parts, strict=True) if len(part) != 2]:
            raise InputError(f"{wrong[0]!r:.80} is no 'question: … context: …'.")
        batch = read(tokenizer, [part[0] for part in parts], [part[1] for part in parts])
        return answers(batch, *run(batch.inputs), threshold=threshold)

    return answer


def threshold_from(differences: Sequence[float], f1: Sequence[float], unanswerable: Sequence[bool]) -> float:
    """The threshold with the best F1 over all questions, as SQuAD's evaluation script searches it.

    Args:
        differences: of each question, as `best_spans` gives it.
        f1: what the best span of each would score; for those without an answer it does not matter.
        unanswerable: which questions have no answer.
    """
    order = np.argsort(differences)
    gained = np.where(np.array(unanswerable)[order], -100.0, np.array(f1)[order])
    answered = np.concatenate([[0.0], np.cumsum(gained)])  # by how many of the surest are answered
    cut = int(answered.argmax())
    edges = np.concatenate([[-np.inf], np.array(differences)[order], [np.inf]])
    low, high = edges[cut], edges[cut + 1]
    return float((low + high) / 2 if np.isfinite(low + high) else high - 1 if np.isfinite(high) else low + 1)


def torch_run(model: Any) -> Run:
    """A ``BertForQuestionAnswering`` as a function of numpy arrays, on its own device."""
    import torch

    def run(inputs: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        with torch.inference_mode():
            given = {name: torch.from_numpy(np.asarray(array)).to(model.device) for name, array in inputs.items()}
            outputs = model(**given)
        return tuple(logits.float().cpu().numpy() for logits in (outputs.start_logits, outputs.end_logits))

    return run
