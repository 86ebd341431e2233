"""Quantise an export behind a quality gate: what loses more than allowed is not written.

Scores come from the caller, as a function from an export's folder to named numbers, the higher the better;
`text_score` makes one from rows of texts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from t5accel import machine
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.ort_static import OrtStatic
from t5accel.checks import as_count, is_number
from t5accel.decoding.backend import Backend
from t5accel.distillation.batches import Rows, read_examples
from t5accel.errors import GateError, InputError
from t5accel.graphs.export_folder import require_free
from t5accel.graphs.manifest import Manifest
from t5accel.metrics import ROW_SCORES, floor_warning
from t5accel.models.prefixes import Languages
from t5accel.precision.convert import as_integer_recipe, write_integers
from t5accel.precision.integers import Ranges
from t5accel.precision.recipes import Recipe, Scheme
from t5accel.precision.source_export import Fp32Export
from t5accel.tokenization import generate_texts, tokenizer_of

Score = Callable[[Path], Mapping[str, float]]


@dataclass(frozen=True)
class Attempt:
    """A recipe that was scored, and what it lost of each score against fp32."""

    recipe: Recipe
    scores: Mapping[str, float]
    losses: Mapping[str, float]


@dataclass(frozen=True)
class GateReport:
    """How a recipe passed the gate; the last attempt is the one that was written."""

    baseline: Mapping[str, float]  # scores of the fp32 export
    max_loss: Mapping[str, float]
    attempts: tuple[Attempt, ...]
    manifest: Manifest

    @property
    def chosen(self) -> Attempt:
        return self.attempts[-1]

    @property
    def warning(self) -> str:
        """A sentence where fp32 scores too low for the gate to mean anything; else empty."""
        return floor_warning({name: self.baseline[name] for name in self.max_loss}, "The model in fp32")


def quantize(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    recipe: Recipe | str,
    *,
    score: Score,
    max_loss: Mapping[str, float],
    groups: Iterable[str] | None = None,
    instead: Scheme | None = None,
    ranges: Mapping[str, Ranges] | None = None,
    overwrite: bool = False,
) -> GateReport:
    """Write a copy of an fp32 export in integers if it loses no more than ``max_loss``, with few exceptions.

    The whole recipe is scored first. If it loses too much, 1, 2, 4, … of ``groups`` are excluded until it passes, then
    as few as a bisection finds.

    Args:
        folder, out, recipe, ranges, overwrite: as in `t5accel.precision.convert.quantize_export`.
        score: maps an export's folder to ``{"bleu": 43.9}``, as `t5accel.precision.gate.text_score` does.
        max_loss: what each watched score may lose against that of ``folder``.
        groups: groups of weights that may be excluded, the most sensitive first.
        instead: scheme of the excluded groups, such as 8 bits in a recipe of 4; by default floats.

    Raises:
        GateError: no recipe passed; the message names the closest one. Nothing was written.
        InputError, ExportError: an argument is invalid; ``folder`` is no fp32 export, or ``out`` is taken.

    >>> from t5accel.graphs.export import export_model
    >>> rows = [{"source": "translate English to French: I am tired.", "target": "Je suis fatigué."}]
    >>> with TemporaryDirectory() as folder:
    ...     _ = export_model("mini", f"{folder}/mini")
    ...     exact = text_score(rows, "exact_match")
    ...     report = quantize(f"{folder}/mini", f"{folder}/int8", "int8", score=exact, max_loss={"exact_match": 0})
    >>> report.baseline, report.chosen.losses
    ({'exact_match': 100.0}, {'exact_match': 0.0})
    """
    source, recipe = Fp32Export.read(folder), as_integer_recipe(recipe)
    target = source.target(out)
    require_free(target, source.manifest.source["name"], recipe.name, overwrite=overwrite)
    limits = checked_limits(max_loss)
    order = list(groups or ())
    recipe.without(order, instead=instead)  # refuses unknown groups before anything is scored
    baseline = _scores(score, source.folder, limits)
    attempts: list[Attempt] = []

    def candidate_of(count: int) -> Recipe:
        return recipe.without(order[:count], instead=instead) if count else recipe

    def passes(count: int) -> bool:
        candidate = candidate_of(count)
        with TemporaryDirectory() as temporary:
            write_integers(source, Path(temporary) / "candidate", candidate, ranges)
            scores = _scores(score, Path(temporary) / "candidate", limits)
        losses = {name: baseline[name] - scores[name] for name in limits}
        attempts.append(Attempt(candidate, scores, losses))
        return all(losses[name] <= limits[name] for name in limits)

    count = _smallest_exclusion(passes, len(order))
    if count is None:
        raise GateError(_failure(recipe, attempts, limits))
    chosen = next(attempt for attempt in attempts if attempt.recipe == candidate_of(count))
    attempts.append(attempts.pop(attempts.index(chosen)))
    gate = {"baseline": dict(baseline), "scores": dict(chosen.scores), "max_loss": limits}
    manifest = write_integers(source, target, chosen.recipe, ranges, gate=gate, overwrite=overwrite)
    return GateReport(baseline, limits, tuple(attempts), manifest)


def _smallest_exclusion(passes: Callable[[int], bool], most: int) -> int | None:
    """The smallest count that passes, if larger ones pass too; ``None`` if not even ``most`` does."""
    failed, count = -1, 0
    while not passes(count):
        if count == most:
            return None
        failed, count = count, min(max(2 * count, 1), most)
    while count - failed > 1:
        middle = (failed + count) // 2
        if passes(middle):
            count = middle
        else:
            failed = middle
    return count


def _failure(recipe: Recipe, attempts: list[Attempt], limits: Mapping[str, float]) -> str:
    closest = min(attempts, key=lambda attempt: max(attempt.losses[name] - limits[name] for name in limits))
    lost = ", ".join(
        f"{name} {loss:.3g} (allowed {limits[name]:g})"
        for name, loss in closest.losses.items()
        if not loss <= limits[name]  # NaN is a loss, too
    )
    return (
        f"Recipe {recipe.name} does not pass the gate. The closest, {closest.recipe.name}, lost {lost}. Nothing was "
        "written. Allow more (max_loss, --max-loss), take a gentler recipe (int8 for int4), or name groups of weights "
        "that may stay in floats (quantize(…, groups=…))."
    )


def checked_limits(max_loss: Mapping[str, float]) -> dict[str, float]:
    """The limits; raises ``InputError`` unless they are finite numbers by name."""
    good = isinstance(max_loss, Mapping) and max_loss
    if not good or not all(is_number(value) and math.isfinite(value) for value in max_loss.values()):
        raise InputError(f"max_loss must map scores to what each may lose, {{'bleu': 0.5}}, got {max_loss!r}.")
    return {name: float(value) for name, value in max_loss.items()}


def _scores(score: Score, folder: Path, limits: Mapping[str, float]) -> dict[str, float]:
    scores = score(folder)
    numbers = isinstance(scores, Mapping) and all(map(is_number, scores.values()))
    if not numbers or not limits.keys() <= scores.keys():
        raise InputError(f"score must return {', '.join(limits)}, which max_loss names, got {scores!r:.200}.")
    return {name: float(value) for name, value in scores.items()}


# Scores of texts


def text_score(
    rows: Rows, metric: str = "bleu", *, threads: int | None = None, batch_size: int = 32, progress: bool = False
) -> Score:
    """A function from the folder of an export to the score of its greedy outputs, ``{metric: score}``.

    An output is cut at twice the tokens of the longest target. Raises ``InputError`` for an unknown metric, a wrong row
    and outputs of no known language, ``MissingPackageError`` if the metric's package is not installed.

    Args:
        rows: dicts ``{"source", "target"}``, T5's prefix included in the source, or a JSON Lines file of such rows.
        metric: one of `metrics.ROW_SCORES`.
    """
    examples = scored_rows(rows, [metric])
    as_count(batch_size, "batch_size", at_least=1)

    def score(folder: str | os.PathLike[str]) -> dict[str, float]:
        backend, tokenizer = open_for_scores(folder, threads), tokenizer_of(folder)
        languages, first = Languages(tokenizer).ids.values(), backend.rules.forced_bos_token_id
        if languages and first is None and backend.decoder_start_token_id not in languages:
            raise InputError(f"{folder} must name its outputs' language: export it with a forced_bos_token_id.")
        return row_scores(backend, tokenizer, examples, [metric], batch_size=batch_size, progress=progress)

    return score


def scored_rows(rows: Rows, metrics: Sequence[str]) -> list[tuple[str, str]]:
    """Sources and targets, once the metrics can be computed; errors are those of `text_score`."""
    for metric in metrics:
        if metric not in ROW_SCORES:
            raise InputError(f"metric must be one of {', '.join(ROW_SCORES)}, got {metric!r}.")
        ROW_SCORES[metric](["a"], [["a"]])
    return read_examples(rows)


def row_scores(
    backend: Backend,
    tokenizer: Any,
    examples: Sequence[tuple[str, str]],
    metrics: Sequence[str],
    *,
    max_new_tokens: int | None = None,
    beams: int = 1,
    batch_size: int = 32,
    progress: bool = False,
) -> dict[str, float]:
    """The scores of a backend's outputs for these rows, by metric.

    An output has at most ``max_new_tokens``, by default twice the tokens of the longest target, if the model can.
    """
    sources, targets = [source for source, _ in examples], [[target] for _, target in examples]
    if max_new_tokens is None:
        mask = tokenizer([target for (target,) in targets], return_tensors="np", padding=True)["attention_mask"]
        longest = 2 * int(mask.sum(axis=1).max())
        max_new_tokens = min(longest, getattr(backend, "positions", None) or longest)
    with machine.progress_bar(shown=progress, total=len(sources), desc="scoring", unit="row") as bar:
        outputs = generate_texts(
            backend, tokenizer, sources, max_new_tokens=max_new_tokens, num_beams=beams, batch_size=batch_size,
            on_batch=bar.update,
        )  # fmt: skip
    return {metric: ROW_SCORES[metric](outputs, targets) for metric in metrics}


def open_for_scores(folder: str | os.PathLike[str], threads: int | None) -> OrtStatic:
    """Open an export as scores are taken from it: without a shortlist, its files unread."""
    return OrtStatic(folder, settings=SessionSettings(threads=threads, shortlist=False), verify=False)
