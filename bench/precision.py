"""Scores of an export, for gates and sweeps: text quality on rows or bundled sets, agreement with fp32."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import evaluation as quality
from bench import tasks
from bench.results import Row, scores
from t5accel import machine
from t5accel.backends.model_defaults import by_defaults
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.ort_static import OrtStatic
from t5accel.checks import as_count
from t5accel.decoding.backend import Backend
from t5accel.distillation.examples import Rows, read_examples
from t5accel.errors import InputError
from t5accel.metrics import ROW_SCORES
from t5accel.precision.calibration import Example, checked_example
from t5accel.tokenization import text_to_text, tokenizer_of

LONGEST = 64  # tokens of an answer that is scored
Score = Callable[[Path], dict[str, float]]


def text_quality(
    rows: Rows | None = None, metric: str = "bleu", *, names: Sequence[str] = tasks.NAMES, limit: int | None = None,
    threads: int | None = None, batch_size: int = 32, progress: bool = False,
) -> Score:  # fmt: skip
    """A function from the folder of an export to its scores, greedily decoded: on your rows, or on the bundled sets.

    On rows it returns one number, named as the metric is; an answer is cut at twice the tokens of the longest target.
    On the bundled evaluation sets it returns ``"bleu"``, ``"rougeL"`` and ``"exact_match"``, of those asked for.

    Args:
        rows: dicts ``{"source", "target"}``, T5's prefix included in the source, or a JSON Lines file of such rows.
        metric: of rows, one of `metrics.ROW_SCORES`.
        names: of the bundled sets, some of `tasks.NAMES`; with rows not used, as ``limit``.
        limit: rows of each length bucket or half; by default all.
        threads: of ONNX Runtime.
        batch_size: texts that are decoded together.
        progress: of rows, show a bar on standard error.

    Raises:
        InputError: an unknown metric, or a wrong row, which the message names.
        MissingPackageError: the metric's package is not installed.

    >>> from tempfile import TemporaryDirectory
    >>> from t5accel.models.load import load_t5
    >>> from t5accel.graphs.export import export_t5
    >>> rows = [{"source": "translate English to French: I am tired.", "target": "Je suis fatigué."}]
    >>> with TemporaryDirectory() as folder:
    ...     _ = export_t5("mini", f"{folder}/mini")
    ...     text_quality(rows, "exact_match")(f"{folder}/mini")
    ...     text_quality(names=["questions"], limit=4)(f"{folder}/mini").keys()
    {'exact_match': 100.0}
    dict_keys(['exact_match'])
    """
    if rows is not None:
        return _on_rows(rows, metric, threads=threads, batch_size=batch_size, progress=progress)

    def score(folder: str | os.PathLike[str]) -> dict[str, float]:
        found = backend_scores(
            _opened(folder, threads), tokenizer_of(folder), names=names, limit=limit, batch_size=batch_size
        )
        return {name: found[name] for name in quality.MAIN_SCORES if name in found}

    return score


def _on_rows(rows: Rows, metric: str, *, threads: int | None, batch_size: int, progress: bool) -> Score:
    examples = scored_rows(rows, [metric])
    as_count(batch_size, "batch_size", at_least=1)

    def score(folder: str | os.PathLike[str]) -> dict[str, float]:
        backend, tokenizer = _opened(folder, threads), tokenizer_of(folder)
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


def backend_scores(backend: Backend, tokenizer: Any, **options: Any) -> Row:
    """All scores of a backend's answers, greedily decoded; ``options`` of `quality.evaluate`."""
    answer = by_defaults(backend, max_new_tokens=LONGEST, num_beams=1)
    return generated_scores(lambda ids, mask, *_: answer(ids, mask), tokenizer, **options)


def generated_scores(generate: Callable[..., np.ndarray], tokenizer: Any, **options: Any) -> Row:
    """All scores of what a function (ids, mask, shortest, longest) -> tokens writes, up to `LONGEST` tokens each."""
    texts = text_to_text(tokenizer, lambda ids, mask: generate(ids, mask, 0, LONGEST))
    return scores(quality.evaluate(texts, **options).to_json())


def agreement(reference: str | os.PathLike[str], examples: Sequence[Example], *, threads: int | None = None) -> Score:
    """A function from the folder of an export to how far it agrees with ``reference``, both given the same tokens.

    It returns ``"agreement"``, the percentage of positions at which both would choose the same next token, and
    ``"closeness"``, minus the mean divergence of the two distributions (Kullback and Leibler), in nats: that moves
    before any token does.

    Args:
        reference: the folder of the export in fp32.
        examples: of sources and of what the decoder is given.
        threads: of ONNX Runtime.
    """
    if not examples:
        raise InputError("There are no examples: give at least one.")
    in_fp32 = _opened(reference, threads)
    examples = [
        checked_example(example, vocab_size=in_fp32.vocab_size, pad_token_id=in_fp32.pad_token_id)
        for example in examples
    ]
    expected = [_log_probabilities(in_fp32, example) for example in examples]

    def score(folder: str | os.PathLike[str]) -> dict[str, float]:
        backend = _opened(folder, threads)
        equal, divergence, count = 0, 0.0, 0
        for example, there in zip(examples, expected, strict=True):
            here = _log_probabilities(backend, example)
            equal += int((here.argmax(-1) == there.argmax(-1)).sum())
            divergence += float((np.exp(there) * (there - here)).sum())
            count += there[..., 0].size
        return {"agreement": 100 * equal / count, "closeness": -divergence / count}

    return score


def _opened(folder: str | os.PathLike[str], threads: int | None) -> OrtStatic:
    return OrtStatic(folder, settings=SessionSettings(threads=threads, shortlist=False), verify=False)


def _log_probabilities(backend: OrtStatic, example: Example) -> np.ndarray:
    """(B, T, V) float64."""
    state = backend.start(backend.encode(example.input_ids, example.attention_mask))
    logits = backend.step(state, example.decoder_input_ids[:, None])[:, 0].astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
