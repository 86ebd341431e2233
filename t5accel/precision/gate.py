"""Quantise an export by a recipe, behind a gate: what loses more quality than is allowed is not written.

Scores come from the caller, as a function from the folder of an export to named numbers, the higher the better: this
module runs no model. What has to stay in floats for a recipe to pass is found in the order of a sweep (`sensitivity`).
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
    """How a recipe came through the gate.

    Attributes:
        baseline: the scores of the export in floats.
        max_loss: what was allowed.
        tried: all recipes that were scored, in order; the last one is what was written.
        manifest: of what was written.
    """

    baseline: Mapping[str, float]
    max_loss: Mapping[str, float]
    tried: tuple[Attempt, ...]
    manifest: Manifest

    @property
    def chosen(self) -> Attempt:
        return self.tried[-1]

    @property
    def warning(self) -> str:
        """A sentence where the export in floats scores too low for the gate to mean anything; else empty."""
        return floor_warning({name: self.baseline[name] for name in self.max_loss}, "The model in fp32")


def quantize_export(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    recipe: Recipe | str,
    *,
    ranges: Mapping[str, Ranges] | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Write a copy of an export in integers, as the recipe says, without looking at what it loses.

    Its manifest has the recipe, with ``"gated": false``. A copy has no shortlist: near logits of 8 bits save nothing
    where the logits are of 8 bits.

    Args:
        folder, out, overwrite: as of `fp16.export_fp16`.
        recipe: one with integers.
        ranges: for "static" schemes, by graph (`probe.ranges`).

    Raises:
        ExportError, InputError: as of `fp16.export_fp16`; or a weight holds infinity or NaN.

    >>> from t5accel.graphs.export import export_model
    >>> with TemporaryDirectory() as folder:
    ...     before = export_model("mini", f"{folder}/fp32", external_threshold_bytes=0)
    ...     after = quantize_export(f"{folder}/fp32", f"{folder}/int8", "int8")
    >>> after.recipe["name"], round(after.size_bytes / before.size_bytes, 1)
    ('int8', 0.3)
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
    """Write a copy of an export in integers if it loses no more than is allowed, with as few exceptions as possible.

    First the whole recipe is scored. If it loses too much, groups of weights are taken out of it in the order of
    ``groups``, one, two, four, … of them, until it passes; then as few as a bisection finds.

    Args:
        folder, out, recipe, ranges, overwrite: as of `quantize_export`.
        score: from the folder of an export to named numbers, the higher the better, such as ``{"bleu": 43.9}``.
        max_loss: for each of them that shall be watched, what it may be lower than that of ``folder``.
        groups: of weights, the most sensitive first, as `sensitivity.ranked` orders them; by default none is taken out.
        instead: the scheme of those that are taken out, such as ``Scheme()``, 8 bits, beside a recipe of 4; by default
            they stay in floats.

    Raises:
        GateError: no recipe passed; it says which came closest. Nothing was written.
        ExportError, InputError: as of `quantize_export`; or ``score`` does not return what ``max_loss`` names.
    """
    source, recipe = Fp32Export.read(folder), _with_integers(recipe)
    target = source.target(out)
    require_free(target, source.manifest.source["name"], recipe.name, overwrite=overwrite)
    limits, order, tried = _limits(max_loss), list(groups or ()), []
    recipe.without(order, instead=instead)  # what is no group is refused before anything is scored
    baseline = _scores(score, source.folder, limits)

    def candidate_of(count: int) -> Recipe:
        return recipe.without(order[:count], instead=instead) if count else recipe

    def passes(count: int) -> bool:
        candidate = candidate_of(count)
        with TemporaryDirectory() as temporary:
            _converted(source, Path(temporary) / "candidate", candidate, ranges, {})
            scores = _scores(score, Path(temporary) / "candidate", limits)
        losses = {name: baseline[name] - scores[name] for name in limits}
        tried.append(Attempt(candidate, scores, losses))
        return all(losses[name] <= limits[name] for name in limits)

    count = _smallest_exclusion(passes, len(order))
    if count is None:
        closest = min(tried, key=lambda one: max(one.losses[name] - limits[name] for name in limits))
        lost = ", ".join(
            f"{name} {loss:.3g} (allowed {limits[name]:g})"
            for name, loss in closest.losses.items()
            if not loss <= limits[name]
        )
        raise GateError(
            f"Recipe {recipe.name} does not pass the gate. The closest, {closest.recipe.name}, lost {lost}. Nothing "
            "was written: allow more (max_loss, --max-loss), take a gentler recipe (int8 for int4), or name groups of "
            "weights that may stay in floats (quantize(…, groups=…))."
        )
    chosen = next(one for one in tried if one.recipe == candidate_of(count))
    tried.append(tried.pop(tried.index(chosen)))
    gate = {"baseline": dict(baseline), "scores": dict(chosen.scores), "max_loss": limits}
    manifest = _converted(source, target, chosen.recipe, ranges, gate, overwrite)
    return GateReport(baseline, limits, tuple(tried), manifest)


def _converted(
    source: Fp32Export, target: Path, recipe: Recipe, ranges: Mapping[str, Ranges] | None, gate: Mapping[str, Any],
    overwrite: bool = False,
) -> Manifest:  # fmt: skip
    # What calibration has seen are values of the other two graphs.
    graphs = source.graphs(step=all(scheme.method != "static" for scheme in recipe.schemes))
    integers = IntegerRewriter(recipe, ranges or {})
    for part, graph in graphs.items():
        integers.rewrite(graph, "decoder" if part == "step" else part)
    return source.write(target, graphs, recipe, {"gated": bool(gate), "gate": dict(gate)}, overwrite=overwrite)


def _with_integers(recipe: Any) -> Recipe:
    recipe = as_recipe(recipe)
    if not recipe.integers:
        raise InputError(f"Recipe {recipe.name} has no integers: there is nothing to quantise.")
    if recipe.dtype != "float32":
        raise InputError(f"Recipe {recipe.name} has integers beside dtype={recipe.dtype!r}: give them 'float32'.")
    return recipe


def _smallest_exclusion(passes: Callable[[int], bool], most: int) -> int | None:
    """The fewest groups with which it passes, if more of them never harm; ``None`` if not even all do.

    >>> _smallest_exclusion(lambda count: count >= 5, 20), _smallest_exclusion(lambda count: False, 3), _smallest_exclusion(lambda count: True, 0)
    (5, None, 0)
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


def _limits(max_loss: Mapping[str, float]) -> dict[str, float]:
    good = isinstance(max_loss, Mapping) and max_loss
    if not good or not all(isinstance(value, int | float) and math.isfinite(value) for value in max_loss.values()):
        raise InputError(f"max_loss is {max_loss!r}; give the names of scores and what each may lose, {{'bleu': 0.5}}.")
    return dict(max_loss)


def _scores(score: Score, folder: Path, limits: Mapping[str, float]) -> dict[str, float]:
    scores = score(folder)
    if not isinstance(scores, Mapping) or not limits.keys() <= scores.keys():
        raise InputError(f"score returned {scores!r:.200}; max_loss names {', '.join(limits)}.")
    return {name: float(value) for name, value in scores.items()}
