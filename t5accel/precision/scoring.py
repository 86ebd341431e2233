"""Scores of an export's answers to your own rows, for the gate of `quantize`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from t5accel import machine
from t5accel.backends.model_defaults import by_defaults
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.ort_static import OrtStatic
from t5accel.checks import as_count
from t5accel.decoding.backend import Backend
from t5accel.distillation.examples import Rows, read_examples
from t5accel.errors import InputError
from t5accel.metrics import ROW_SCORES
from t5accel.tokenization import text_to_text, tokenizer_of

Score = Callable[[Path], dict[str, float]]


def text_score(
    rows: Rows, metric: str = "bleu", *, threads: int | None = None, batch_size: int = 32, progress: bool = False
) -> Score:
    """A function from the folder of an export to the score of its greedy answers, ``{metric: score}``.

    An answer is cut at twice the tokens of the longest target.

    Args:
        rows: dicts ``{"source", "target"}``, T5's prefix included in the source, or a JSON Lines file of such rows.
        metric: one of `metrics.ROW_SCORES`.
        threads: of ONNX Runtime.
        batch_size: texts that are decoded together.
        progress: show a bar on standard error.

    Raises:
        InputError: an unknown metric, or a wrong row, which the message names.
        MissingPackageError: the metric's package is not installed.

    >>> from tempfile import TemporaryDirectory
    >>> from t5accel.graphs.export import export_model
    >>> rows = [{"source": "translate English to French: I am tired.", "target": "Je suis fatigué."}]
    >>> with TemporaryDirectory() as folder:
    ...     _ = export_model("mini", f"{folder}/mini")
    ...     text_score(rows, "exact_match")(f"{folder}/mini")
    {'exact_match': 100.0}
    """
    examples = scored_rows(rows, [metric])
    as_count(batch_size, "batch_size", at_least=1)

    def score(folder: str | os.PathLike[str]) -> dict[str, float]:
        backend, tokenizer = open_for_scores(folder, threads), tokenizer_of(folder)
        return row_scores(backend, tokenizer, examples, [metric], batch_size=batch_size, progress=progress)

    return score


def scored_rows(rows: Rows, metrics: Sequence[str]) -> list[tuple[str, str]]:
    """Your rows, once it is sure that the metrics can be computed.

    Raises:
        InputError: an unknown metric, or a wrong row, which the message names.
        MissingPackageError: a metric's package is not installed.

    >>> scored_rows([{"source": "shout: hello", "target": "HELLO"}], ["exact_match"])
    [('shout: hello', 'HELLO')]
    """
    for metric in metrics:
        if metric not in ROW_SCORES:
            raise InputError(f"metric is {metric!r}; give one of {', '.join(ROW_SCORES)}.")
        ROW_SCORES[metric](["a"], [["a"]])
    return read_examples(rows)


def row_scores(
    backend: Backend, tokenizer: Any, examples: Sequence[tuple[str, str]], metrics: Sequence[str], *,
    max_new_tokens: int | None = None, beams: int = 1, batch_size: int = 32, progress: bool = False,
) -> dict[str, float]:  # fmt: skip
    """The scores of a backend's answers to your rows, by metric.

    An answer has at most ``max_new_tokens``, by default twice the tokens of the longest target.
    """
    examples = sorted(examples, key=lambda example: len(example[0]))  # alike lengths: less padding
    sources, targets = [source for source, _ in examples], [[target] for _, target in examples]
    if max_new_tokens is None:
        mask = tokenizer([target for (target,) in targets], return_tensors="np", padding=True)["attention_mask"]
        max_new_tokens = 2 * int(mask.sum(axis=1).max())
    answer = text_to_text(tokenizer, by_defaults(backend, max_new_tokens=max_new_tokens, num_beams=beams))
    answers: list[str] = []
    with machine.progress_bar(shown=progress, total=len(sources), desc="scoring", unit="row") as bar:
        for start in range(0, len(sources), batch_size):
            answers += answer(sources[start : start + batch_size])
            bar.update(len(answers) - bar.n)
    return {metric: ROW_SCORES[metric](answers, targets) for metric in metrics}


def open_for_scores(folder: str | os.PathLike[str], threads: int | None) -> OrtStatic:
    """An export as scores are taken from it: without a shortlist, its files unread."""
    return OrtStatic(folder, settings=SessionSettings(threads=threads, shortlist=False), verify=False)
