"""Scores of an export, and the sensitivity of its weight groups to quantisation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bench import evaluation as quality
from bench import tasks
from bench.results import Row, scores
from t5accel.backends.model_defaults import by_defaults
from t5accel.backends.ort_static import OrtStatic
from t5accel.decoding.backend import Backend
from t5accel.errors import InputError
from t5accel.graphs.manifest import read_manifest
from t5accel.precision.calibration import CalibrationSample, as_calibration_sample
from t5accel.precision.gate import quantize_export
from t5accel.precision.recipes import EMBEDDING, HEAD, KINDS, Recipe, as_recipe
from t5accel.precision.scoring import Score, open_for_scores
from t5accel.tokenization import text_to_text, tokenizer_of

LONGEST = 64  # tokens of an answer that is scored


def text_quality(
    *, names: Sequence[str] = tasks.NAMES, limit: int | None = None, threads: int | None = None, batch_size: int = 32
) -> Score:
    """A function from the folder of an export to its scores on the bundled evaluation sets, greedily decoded.

    It returns ``"bleu"``, ``"rougeL"`` and ``"exact_match"``, of those asked for.

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
    state = backend.new_state(backend.encode(example.input_ids, example.attention_mask))
    logits = backend.step(state, example.decoder_input_ids[:, None])[:, 0].astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


# Sensitivity: quantise one group of weights at a time, score each model, and rank the groups.


@dataclass(frozen=True)
class GroupScores:
    """What came of a model in floats but for one group."""

    group: str  # as `recipes.group_of` names it
    scores: Mapping[str, float]  # of the model
    losses: Mapping[str, float]  # against the model in floats
    size_bytes: int  # of all files


def groups_of(folder: str | os.PathLike[str]) -> list[str]:
    """All groups of weights of an export's model, from the encoder's first layer to the head."""
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
    """Quantise one group of weights after the other, all others in floats, and score each model.

    Args:
        folder: an export in fp32.
        recipe: of whose schemes each group takes its own; one that has none is left out.
        score: from the folder of an export to named numbers, the higher the better.
    """
    recipe, chosen = as_recipe(recipe), list(groups_of(folder) if groups is None else groups)
    if unknown := sorted({*chosen} - {*groups_of(folder)}):
        raise InputError(f"{unknown[0]!r} is no group of this model; `groups_of` lists them.")
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


def ranked(found: Sequence[GroupScores], name: str) -> list[str]:
    """The groups, that which loses most of one score first, as `gate.quantize` takes them."""
    if bad := [one.group for one in found if name not in one.losses]:
        raise InputError(f"There is no score {name!r} of {bad[0]}.")
    return [one.group for one in sorted(found, key=lambda one: -one.losses[name])]


def only(recipe: Recipe, group: str, *, chosen_from: Iterable[str]) -> Recipe | None:
    """The recipe for one group alone; ``None`` if it leaves that in floats anyway."""
    # A layer's weights are in its own graph; the decoder's keys and values of the source are in the encoder's, too.
    own = ["encoder"] if group.startswith("encoder") else ["decoder"]
    if group.startswith("decoder") and group.endswith("attention"):
        own.append("encoder")
    if not any(recipe.scheme(group, stack) for stack in own):
        return None
    others = [other for other in chosen_from if other != group]
    return replace(recipe.without(others), name=f"{recipe.name}-{group}")
