"""Convert an export by any recipe, to integers or to fp16."""

from __future__ import annotations

import os
from collections.abc import Iterable

from t5accel.errors import InputError
from t5accel.graphs.manifest import Manifest
from t5accel.precision.calibration import CalibrationSample, collect_ranges, ranges_by_graph
from t5accel.precision.fp16 import export_fp16
from t5accel.precision.gate import quantize_export
from t5accel.precision.recipes import Recipe, as_recipe


def convert_export(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    recipe: Recipe | str,
    *,
    examples: Iterable[CalibrationSample] = (),
    overwrite: bool = False,
) -> Manifest:
    """Write a copy of an fp32 export by ``recipe``, without measuring what it loses.

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
