"""What every conversion of an export keeps to: the export that it is made of, and whatever else is there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refused import refused
from test_atomic_write import snapshot

from bench.baselines.optimized_export import optimize_export
from t5accel.errors import ExportError
from t5accel.graphs.contract import DECODER
from t5accel.graphs.manifest import read_manifest
from t5accel.precision.calibration import CalibrationSample
from t5accel.precision.convert import convert_export, quantize_export
from t5accel.precision.fp16 import export_fp16
from t5accel.precision.gate import quantize
from t5accel.precision.recipes import RECIPES, Recipe, Scheme

Convert = Callable[..., Any]
INT8 = partial(quantize_export, recipe="int8")
GATED = partial(quantize, recipe="int8", score=lambda _: {"x": 1}, max_loss={"x": 1})
KEPT: dict[str, tuple[Convert, list[dict[str, Any]]]] = {  # and what makes another export of it
    "int8": (INT8, [dict(recipe=RECIPES["int8"].without(["lm_head"])), dict(recipe="int4")]),
    "fp16": (export_fp16, [dict(recipe=Recipe("half", dtype="float16"))]),
    "optimised": (optimize_export, [dict(level="extended"), dict(level="basic")]),
}
NO_PATHS = (None, 5, "", b"x", "x\0", "\ud800")


def whole(folder: Path) -> dict[str, Any]:
    """All that is there, but for lock files."""
    return {name: found for name, found in snapshot(folder).items() if not name.endswith(".lock")}


@pytest.mark.parametrize("name", KEPT)
def test_kept_if_it_is_there_and_replaced_when_told(exported, tmp_path: Path, name: str) -> None:
    (convert, others), out = KEPT[name], tmp_path / "out"
    manifest = convert(exported(), out)
    before = whole(tmp_path)
    assert convert(str(exported()), str(out)) == manifest == read_manifest(out)
    for other in others:
        with pytest.raises(ExportError, match="overwrite=True"):
            convert(exported(), out, **other)
    assert whole(tmp_path) == before, "not a byte, a time or an inode has changed"
    replaced = convert(exported(), out, overwrite=True, **others[-1])
    assert replaced == read_manifest(out) != manifest


def test_other_examples_give_another_static_export(exported, padded_batch, tmp_path: Path) -> None:
    static = Scheme("static")
    recipe = Recipe("static", encoder=static, decoder=static, head=static)
    few, many = ([CalibrationSample(*padded_batch, np.full((6, 3), token))] for token in (5, 7))
    convert = partial(convert_export, exported(), tmp_path / "out", recipe)
    first = convert(examples=few)
    assert convert(examples=few) == first
    with pytest.raises(ExportError, match="overwrite=True"):
        convert(examples=many)
    assert convert(examples=many, overwrite=True).files[DECODER] != first.files[DECODER]


@pytest.fixture(scope="module")
def neighbours(exported, tmp_path_factory) -> Path:
    """An export, a link to it, what each conversion made of it, a damaged copy, and somebody's notes."""
    folder = tmp_path_factory.mktemp("neighbours")
    for name in ("fp32", "damaged"):
        shutil.copytree(exported(), folder / name)
    for name, (convert, _) in KEPT.items():
        convert(folder / "fp32", folder / name)
    (folder / "damaged" / DECODER).write_bytes(b"cut")
    (folder / "link").symlink_to("fp32")
    (folder / "notes").mkdir()
    (folder / "notes" / "notes.txt").write_text("mine")
    return folder


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("convert", [INT8, GATED, export_fp16, optimize_export], ids=["int8", "gated", "fp16", "all"])
def test_what_is_there_is_kept(neighbours: Path, convert: Convert, overwrite: bool) -> None:
    call, before = partial(convert, overwrite=overwrite), whole(neighbours)
    made_from = partial(call, out=neighbours / "new")
    refused(made_from, "folder", neighbours / "optimised", match="is optimised already: give the export")
    if convert is not optimize_export:  # which takes any numbers
        refused(made_from, "folder", neighbours / "int8", match="is in int8 already: give the export in fp32")
        refused(made_from, "folder", neighbours / "fp16", match="is in fp16 already")
    refused(made_from, "folder", neighbours / "notes", match="holds no manifest", error=ExportError)
    refused(made_from, "folder", neighbours / "damaged", match="has 3 bytes", error=ExportError)
    refused(made_from, "folder", *NO_PATHS, match="folder")
    call = partial(call, neighbours / "fp32")
    refused(call, "out", *NO_PATHS, match="folder")
    refused(
        call, "out", *(f"{neighbours}/{out}" for out in ("fp32", "link", "./fp32/")), match="export.*, which is kept"
    )
    refused(call, "out", neighbours / "notes", match="no export of t5accel and not empty", error=ExportError)
    assert whole(neighbours) == before
