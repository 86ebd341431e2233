"""Quantise an export behind a quality gate: what loses more than allowed is not written.

Scores come from the caller, as a function from an export's folder to named numbers, the higher the better.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from t5accel.errors import GateError, InputError
from t5accel.graphs.export_folder import require_free
from t5accel.graphs.manifest import Manifest
from t5accel.metrics import floor_warning
from t5accel.precision.integer_graphs import IntegerRewriter, Ranges
from t5accel.precision.recipes import Recipe, Scheme, as_recipe
from t5accel.precision.source_export import Fp32Export

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


def quantize_export(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    recipe: Recipe | str,
    *,
    ranges: Mapping[str, Ranges] | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Write a copy of an fp32 export in integers, without measuring what it loses (``"gated": false``).

    "static" schemes need ``ranges`` (`calibration.ranges_by_graph`). Errors are those of `fp16.export_fp16`, and
    ``InputError`` for a recipe without integers and for weights that are not finite.
    """
    source, recipe = Fp32Export.read(folder), _with_integers(recipe)
    return _converted(source, source.target(out), recipe, ranges, {}, overwrite)


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
        folder, out, recipe, ranges, overwrite: as in `quantize_export`.
        score: maps an export's folder to scores, such as ``{"bleu": 43.9}``.
        max_loss: what each watched score may lose against that of ``folder``.
        groups: groups of weights that may be excluded, the most sensitive first.
        instead: scheme of the excluded groups, such as 8 bits in a recipe of 4; by default floats.

    Raises:
        GateError: no recipe passed; the message names the closest one. Nothing was written.
    """
    source, recipe = Fp32Export.read(folder), _with_integers(recipe)
    target = source.target(out)
    require_free(target, source.manifest.source["name"], recipe.name, overwrite=overwrite)
    limits = _limits(max_loss)
    order = list(groups or ())
    recipe.without(order, instead=instead)  # refuses unknown groups before anything is scored
    baseline = _scores(score, source.folder, limits)
    attempts: list[Attempt] = []

    def candidate_of(count: int) -> Recipe:
        return recipe.without(order[:count], instead=instead) if count else recipe

    def passes(count: int) -> bool:
        candidate = candidate_of(count)
        with TemporaryDirectory() as temporary:
            _converted(source, Path(temporary) / "candidate", candidate, ranges, {})
            scores = _scores(score, Path(temporary) / "candidate", limits)
        losses = {name: baseline[name] - scores[name] for name in limits}
        attempts.append(Attempt(candidate, scores, losses))
        return all(losses[name] <= limits[name] for name in limits)

    count = _smallest_exclusion(passes, len(order))
    if count is None:
        raise GateError(_failure(recipe, attempts, limits))
    chosen = next(one for one in attempts if one.recipe == candidate_of(count))
    attempts.append(attempts.pop(attempts.index(chosen)))
    gate = {"baseline": dict(baseline), "scores": dict(chosen.scores), "max_loss": limits}
    manifest = _converted(source, target, chosen.recipe, ranges, gate, overwrite)
    return GateReport(baseline, limits, tuple(attempts), manifest)


def _converted(
    source: Fp32Export,
    target: Path,
    recipe: Recipe,
    ranges: Mapping[str, Ranges] | None,
    gate: Mapping[str, Any],
    overwrite: bool = False,
) -> Manifest:
    # Calibration sees values of the two portable graphs, so static schemes leave out the step graph.
    graphs = source.graphs(step=all(scheme.method != "static" for scheme in recipe.schemes))
    rewriter = IntegerRewriter(recipe, ranges or {})
    for part, graph in graphs.items():
        rewriter.rewrite(graph, "decoder" if part == "step" else part)
    return source.write(target, graphs, recipe, {"gated": bool(gate), "gate": dict(gate)}, overwrite=overwrite)


def _with_integers(recipe: Any) -> Recipe:
    recipe = as_recipe(recipe)
    if not recipe.integers or recipe.dtype != "float32":
        raise InputError(f"recipe must have integers and dtype='float32', got {recipe.name} in {recipe.dtype}.")
    return recipe


def _smallest_exclusion(passes: Callable[[int], bool], most: int) -> int | None:
    """The smallest count that passes, if larger ones pass too; ``None`` if not even ``most`` does.

    >>> _smallest_exclusion(lambda count: count >= 5, 20), _smallest_exclusion(lambda count: False, 3)
    (5, None)
    """
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
    closest = min(attempts, key=lambda one: max(one.losses[name] - limits[name] for name in limits))
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


def _limits(max_loss: Mapping[str, float]) -> dict[str, float]:
    good = isinstance(max_loss, Mapping) and max_loss
    if not good or not all(isinstance(value, int | float) and math.isfinite(value) for value in max_loss.values()):
        raise InputError(f"max_loss must map scores to what each may lose, {{'bleu': 0.5}}, got {max_loss!r}.")
    return dict(max_loss)


def _scores(score: Score, folder: Path, limits: Mapping[str, float]) -> dict[str, float]:
    scores = score(folder)
    if not isinstance(scores, Mapping) or not limits.keys() <= scores.keys():
        raise InputError(f"score must return {', '.join(limits)}, which max_loss names, got {scores!r:.200}.")
    return {name: float(value) for name, value in scores.items()}
