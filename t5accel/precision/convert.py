"""Convert an export by any recipe, to integers or to fp16, without measuring what it loses."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from t5accel.errors import InputError
from t5accel.graphs.manifest import Manifest
from t5accel.precision.calibration import CalibrationSample, collect_ranges, ranges_by_graph
from t5accel.precision.fp16 import export_fp16
from t5accel.precision.integers import IntegerRewriter, Ranges
from t5accel.precision.recipes import Recipe, as_recipe
from t5accel.precision.source_export import Fp32Export


def convert_export(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    recipe: Recipe | str,
    *,
    examples: Iterable[CalibrationSample] = (),
    overwrite: bool = False,
) -> Manifest:
    """Write a copy of an fp32 export by ``recipe``.

    "static" schemes need ``examples`` for calibration; in fp16 they tell what must stay in fp32. Errors are those of
    `fp16.export_fp16`, and ``InputError`` for a recipe without an ONNX graph (fp32, bf16).

    >>> from tempfile import TemporaryDirectory
    >>> from t5accel.graphs.export import export_model
    >>> with TemporaryDirectory() as folder:
    ...     _ = export_model("mini", f"{folder}/fp32")
    ...     convert_export(f"{folder}/fp32", f"{folder}/fp16", "fp16").recipe["floats"]
    'float16'
    """
    recipe, examples = as_recipe(recipe), list(examples)
    if recipe.integers:
        seen = collect_ranges(folder, examples) if examples else []
        return quantize_export(folder, out, recipe, ranges=ranges_by_graph(seen), overwrite=overwrite)
    if recipe.dtype == "float16":
        return export_fp16(folder, out, recipe, examples=examples, overwrite=overwrite)
    raise InputError(
        f"recipe must have integers or dtype='float16', got {recipe.name}. An export is in fp32 already; bfloat16 runs "
        "in torch: accelerate(model, precision='bf16')."
    )


def quantize_export(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    recipe: Recipe | str,
    *,
    ranges: Mapping[str, Ranges] | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Write a copy of an fp32 export in integers (``"gated": false``).

    "static" schemes need ``ranges`` (`calibration.ranges_by_graph`). Errors are those of `fp16.export_fp16`, and
    ``InputError`` for a recipe without integers and for weights that are not finite.
    """
    source, recipe = Fp32Export.read(folder), as_integer_recipe(recipe)
    return write_integers(source, source.target(out), recipe, ranges, overwrite=overwrite)


def as_integer_recipe(recipe: Any) -> Recipe:
    """`as_recipe`, for recipes in integers and fp32 alone."""
    recipe = as_recipe(recipe)
    if not recipe.integers or recipe.dtype != "float32":
        raise InputError(f"recipe must have integers and dtype='float32', got {recipe.name} in {recipe.dtype}.")
    return recipe


def write_integers(
    source: Fp32Export,
    target: Path,
    recipe: Recipe,
    ranges: Mapping[str, Ranges] | None,
    *,
    gate: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Manifest:
    """`quantize_export` with its arguments checked, and a ``gate``'s findings for the manifest."""
    # Calibration sees values of the two portable graphs, so static schemes leave out the step graph.
    static = any(scheme.method == "static" for scheme in recipe.schemes)
    graphs = source.graphs(step=not static)
    rewriter = IntegerRewriter(recipe, ranges or {})
    for part, graph in graphs.items():
        rewriter.rewrite(graph, "decoder" if part == "step" else part)
    notes: dict[str, Any] = {"gated": bool(gate), "gate": dict(gate or {})}
    if static:  # other ranges give another export
        notes["ranges"] = hashlib.sha256(json.dumps(ranges, sort_keys=True, default=float).encode()).hexdigest()
    return source.write(target, graphs, recipe, notes, overwrite=overwrite)
