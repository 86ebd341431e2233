"""Scores of an export, for gates and sweeps: text quality on the bundled sets, agreement with fp32."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench import evaluation as quality
from bench import tasks
from bench.results import Row, scores
from t5accel.backends.model_defaults import by_defaults
from t5accel.backends.ort_static import OrtStatic
from t5accel.decoding.backend import Backend
from t5accel.errors import InputError
from t5accel.precision.calibration import CalibrationSample, as_calibration_sample
from t5accel.precision.text_score import Score, open_for_scores
from t5accel.tokenization import text_to_text, tokenizer_of

LONGEST = 64  # tokens of an answer that is scored


def text_quality(
    *, names: Sequence[str] = tasks.NAMES, limit: int | None = None, threads: int | None = None, batch_size: int = 32
) -> Score:
    """A function from the folder of an export to its scores on the bundled evaluation sets, greedily decoded.

    It returns ``"bleu"``, ``"rougeL"`` and ``"exact_match"``, of those asked for.

    Args:
        names: of the sets, some of `tasks.NAMES`.
        limit: rows of each length bucket or half; by default all.
        threads: of ONNX Runtime.
        batch_size: texts that are decoded together.

    >>> from tempfile import TemporaryDirectory
    >>> from t5accel.graphs.export import export_model
    >>> with TemporaryDirectory() as folder:
    ...     _ = export_model("mini", f"{folder}/mini")
    ...     text_quality(names=["questions"], limit=4)(f"{folder}/mini").keys()
    dict_keys(['exact_match'])
    """

    def score(folder: str | os.PathLike[str]) -> dict[str, float]:
        found = backend_scores(
            open_for_scores(folder, threads), tokenizer_of(folder), names=names, limit=limit, batch_size=batch_size
        )
        return {name: found[name] for name in quality.MAIN_SCORES if name in found}

    return score


def backend_scores(backend: Backend, tokenizer: Any, **options: Any) -> Row:
    """All scores of a backend's answers, greedily decoded; ``options`` of `quality.evaluate`."""
    answer = by_defaults(backend, max_new_tokens=LONGEST, num_beams=1)
    return generated_scores(lambda ids, mask, *_: answer(ids, mask), tokenizer, **options)


def generated_scores(generate: Callable[..., np.ndarray], tokenizer: Any, **options: Any) -> Row:
    """All scores of what a function (ids, mask, shortest, longest) -> tokens writes, up to `LONGEST` tokens each."""
    texts = text_to_text(tokenizer, lambda ids, mask: generate(ids, mask, 0, LONGEST))
    return scores(quality.evaluate(texts, **options).to_json())


def agreement(
    reference: str | os.PathLike[str], examples: Sequence[CalibrationSample], *, threads: int | None = None
) -> Score:
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
    in_fp32 = open_for_scores(reference, threads)
    examples = [
        as_calibration_sample(example, vocab_size=in_fp32.vocab_size, pad_token_id=in_fp32.pad_token_id)
        for example in examples
    ]
    expected = [_log_probabilities(in_fp32, example) for example in examples]

    def score(folder: str | os.PathLike[str]) -> dict[str, float]:
        backend = open_for_scores(folder, threads)
        equal, divergence, count = 0, 0.0, 0
        for example, there in zip(examples, expected, strict=True):
            here = _log_probabilities(backend, example)
            equal += int((here.argmax(-1) == there.argmax(-1)).sum())
            divergence += float((np.exp(there) * (there - here)).sum())
            count += there[..., 0].size
        return {"agreement": 100 * equal / count, "closeness": -divergence / count}

    return score


def _log_probabilities(backend: OrtStatic, example: CalibrationSample) -> np.ndarray:
    """(B, T, V) float64."""
    state = backend.start(backend.encode(example.input_ids, example.attention_mask))
    logits = backend.step(state, example.decoder_input_ids[:, None])[:, 0].astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
