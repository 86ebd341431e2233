"""Scores of an export, and the sensitivity of its weight groups to quantisation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bench import evaluation
from bench.results import Row, scores
from bench.systems import by_generate
from t5accel.backends.model_defaults import by_defaults
from t5accel.backends.ort_static import OrtStatic
from t5accel.decoding.backend import Backend
from t5accel.errors import InputError
from t5accel.graphs.manifest import read_manifest
from t5accel.graphs.rewriting import load_graphs
from t5accel.precision.calibration import CalibrationSample, as_calibration_sample
from t5accel.precision.convert import quantize_export
from t5accel.precision.gate import Score, open_for_scores
from t5accel.precision.recipes import EMBEDDING, HEAD, KINDS, Recipe, as_recipe
from t5accel.precision.source_export import STACKS, Fp32Export
from t5accel.tokenization import text_to_text, tokenizer_of

LONGEST = 64  # tokens of an answer that is scored


def text_quality(
    *,
    names: Sequence[str] = evaluation.NAMES,
    limit: int | None = None,
    threads: int | None = None,
    batch_size: int = 32,
) -> Score:
    """Make a function that scores an export on the bundled evaluation sets, greedily decoded.

    It takes the export's folder and returns ``"bleu"``, ``"rougeL"`` and ``"exact_match"`` of the requested sets.

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
        return {name: found[name] for name in evaluation.MAIN_SCORES if name in found}

    return score


def backend_scores(backend: Backend, tokenizer: Any, **options: Any) -> Row:
    """Score a backend's greedy answers; ``options`` are those of `evaluation.evaluate`."""
    answer = by_defaults(backend, max_new_tokens=LONGEST, num_beams=1)
    return generated_scores(lambda ids, mask, *_: answer(ids, mask), tokenizer, **options)


def generated_scores(generate: Callable[..., np.ndarray], tokenizer: Any, **options: Any) -> Row:
    """Score a function (ids, mask, shortest, longest) -> tokens, up to `LONGEST` tokens each."""
    texts = text_to_text(tokenizer, lambda ids, mask: generate(ids, mask, 0, LONGEST))
    return scores(evaluation.evaluate(texts, **options).to_json())


def agreement(
    reference: str | os.PathLike[str], examples: Sequence[CalibrationSample], *, threads: int | None = None
) -> Score:
    """Make a function that compares an export with ``reference``, given the same tokens.

    It takes the export's folder and returns ``"agreement"``, the percentage of positions with the same next token, and
    ``"closeness"``, minus the mean Kullback-Leibler divergence in nats, which moves before any token does.
    """
    if not examples:
        raise InputError("examples must not be empty.")
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
    state = backend.new_state(backend.encode(example.input_ids, example.attention_mask))
    logits = backend.step(state, example.decoder_input_ids[:, None])[:, 0].astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@dataclass(frozen=True)
class GroupScores:
    """Scores of a model with one quantised group of weights."""

    group: str  # as `recipes.group_of` names it
    scores: Mapping[str, float]
    losses: Mapping[str, float]  # against the model in floats
    size_bytes: int  # of all files


def groups_of(folder: str | os.PathLike[str]) -> list[str]:
    """List the groups of weights of an export's model."""
    dims = read_manifest(folder, verify=False).dims
    layers = [("encoder", layer) for layer in range(dims.encoder_layers)]
    layers += [("decoder", layer) for layer in range(dims.decoder_layers)]
    return [EMBEDDING, *(f"{stack}.{layer}.{kind}" for stack, layer in layers for kind in KINDS), HEAD]


def sweep(
    folder: str | os.PathLike[str],
    recipe: Recipe | str,
    score: Score,
    *,
    groups: Iterable[str] | None = None,
    on_group: Callable[[GroupScores], None] | None = None,
) -> list[GroupScores]:
    """Quantise one group of weights at a time, and score each model.

    ``folder`` is an export in fp32. Each group takes its own scheme of ``recipe``; a group without one is left out.
    """
    recipe, chosen = as_recipe(recipe), list(groups_of(folder) if groups is None else groups)
    if unknown := sorted({*chosen} - {*groups_of(folder)}):
        raise InputError(f"groups must be groups of this model, got {unknown[0]!r}. groups_of() lists them.")
    baseline = dict(score(Path(folder)))
    found = []
    for group in chosen:
        single = only(recipe, group, chosen_from=groups_of(folder))
        if single is None:
            continue
        with TemporaryDirectory() as temporary:
            manifest = quantize_export(folder, Path(temporary) / "one", single)
            scores = dict(score(Path(temporary) / "one"))
        losses = {name: baseline[name] - value for name, value in scores.items()}
        found.append(GroupScores(group, scores, losses, manifest.size_bytes))
        if on_group is not None:
            on_group(found[-1])
    return found


def only(recipe: Recipe, group: str, *, chosen_from: Iterable[str]) -> Recipe | None:
    """Restrict a recipe to one group; ``None`` if it leaves that group in floats."""
    # A layer's weights are in its own graph; the decoder's keys and values of the source are in the encoder's, too.
    own = ["encoder"] if group.startswith("encoder") else ["decoder"]
    if group.startswith("decoder") and group.endswith("attention"):
        own.append("encoder")
    if not any(recipe.scheme(group, stack) for stack in own):
        return None
    others = [other for other in chosen_from if other != group]
    return replace(recipe.without(others), name=f"{recipe.name}-{group}")


def graph_quality(like: str | os.PathLike[str], **options: Any) -> Score:
    """Make a function that scores the graphs of other quantisers; ``options`` are those of `text_quality`.

    It takes a folder with ``encoder.onnx`` and ``decoder.onnx``, made from the fp32 export ``like``.
    """
    source, score = Fp32Export.read(like), text_quality(**options)

    def score_graphs(folder: str | os.PathLike[str]) -> Mapping[str, float]:
        graphs = load_graphs(Path(folder) / name for name in STACKS.values())
        with TemporaryDirectory() as temporary:
            target = Path(temporary) / "export"
            source.write(target, {part: graphs[name] for part, name in STACKS.items()}, Recipe("other"), {})
            return score(target)

    return score_graphs


def model_quality(model: Any, tokenizer: Any, **options: Any) -> Row:
    """Score a PyTorch model by its ``generate()``, greedy; ``options`` are those of `evaluation.evaluate`."""
    return generated_scores(by_generate(model), tokenizer, **options)
