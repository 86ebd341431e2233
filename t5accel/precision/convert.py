"""A copy of an export by any recipe: in integers, or in fp16."""

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
    """Write a copy of an export in fp32 as the recipe says, without looking at what it loses.

    Args:
        folder, out, overwrite: as of `fp16.export_fp16`.
        recipe: of integers or of fp16, or its name.
        examples: to probe. "static" schemes need some; in fp16 they tell what has to stay in fp32.

    Raises:
        ExportError, InputError: as of `fp16.export_fp16`; or no ONNX graph is written for the recipe (fp32, bf16).

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
        f"Recipe {recipe.name} is not one that an export is converted to: fp32 is what it is in, and bfloat16 runs in "
        "torch, by accelerate(model, precision='bf16')."
    )
