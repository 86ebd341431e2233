"""Exports kept between programs: one folder per model and recipe in the user's cache, made when first asked for."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from t5accel import machine
from t5accel.checkpoints import BUNDLED, data_folder, load_t5
from t5accel.errors import ExportError, InputError
from t5accel.graphs.build.builder import OPSET
from t5accel.graphs.contract import MANIFEST
from t5accel.graphs.export.manifest import FORMAT, Manifest, describe_file, read_manifest
from t5accel.graphs.export.t5 import FP32, export_t5, source_hash, t5_weights
from t5accel.graphs.numbers.convert import convert_export
from t5accel.graphs.numbers.recipes import RECIPES, Recipe, as_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ENVIRONMENT = "T5ACCEL_CACHE"  # where to keep exports instead
ENGINES = "tensorrt-"  # how the folders of `tensorrt_engines` begin
_DRAWN_BY = ("torch", "transformers", "t5accel")


@dataclass(frozen=True)
class CachedExport:
    """One folder of the cache; ``manifest`` is ``None`` where it is damaged, or holds an export's TensorRT engines."""

    folder: Path
    manifest: Manifest | None
    size_bytes: int

    @property
    def what(self) -> str:
        """What lies there, in a word or two."""
        if self.manifest is not None:
            return self.manifest.source["name"]
        return "TensorRT engines" if self.folder.name.startswith(ENGINES) else "damaged"


def cache_folder() -> Path:
    """Where exports are kept: ``$T5ACCEL_CACHE``, or the place for caches on this system (``~/.cache/t5accel`` …)."""
    if chosen := os.environ.get(ENVIRONMENT):
        return Path(chosen).expanduser() / "exports"
    from platformdirs import user_cache_path

    return user_cache_path("t5accel", appauthor=False) / "exports"


def cached_export(
    model: PreTrainedModel | str | os.PathLike[str],
    *,
    precision: Recipe | str = "fp32",
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: bool = False,
) -> Path:
    """The folder with the export of ``model``, which is made now if it is not there, or damaged.

    A model given as the name of a folder or as ``"random:…"`` is not loaded when its export is there. Weights lie in a
    file that the graphs share: less on disk, and in memory only once. Where it pays, there is a shortlist. An export in
    another precision is made from that in fp32, which is kept, too.

    Args:
        model: a T5-like model, or a name that `checkpoints.load_t5` knows.
        precision: a recipe, or the name of one of `recipes.RECIPES`.
        tokenizer: as of `export.export_t5`.
        progress: show a bar when it is made.

    Raises:
        ExportError: the cache cannot be written.
        InputError, NotT5Error, UnknownModelError, ModelUnavailableError: there is no such model.
    """
    return checked_export(model, precision=precision, tokenizer=tokenizer, progress=progress)[0]


def checked_export(
    model: PreTrainedModel | str | os.PathLike[str],
    *,
    precision: Recipe | str = "fp32",
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: bool = False,
) -> tuple[Path, Manifest]:
    """`cached_export` and its manifest, against which every file of that folder was checked, and no other's."""
    recipe = as_recipe(precision)
    if tokenizer is not None and not hasattr(tokenizer, "get_vocab"):
        raise InputError(f"tokenizer is {tokenizer!r:.80}; give one of transformers.")
    named = isinstance(model, str | os.PathLike)
    label = os.fspath(model) if named else type(model).__name__
    key = _key_of_name(label) if named else None
    if key is None:
        if named:
            model, own_tokenizer = load_t5(model)
            tokenizer = tokenizer or own_tokenizer
        key = source_hash(model, t5_weights(model))
    tokenizer_key = "" if tokenizer is None else repr(sorted(tokenizer.get_vocab().items()))
    made_by = machine.versions().get("t5accel")
    how = f"{FP32} {FORMAT} {OPSET} {made_by} shortlist step"
    digest = hashlib.sha256(f"{key} {how} {tokenizer_key}".encode()).hexdigest()[:16]
    readable = re.sub(r"[^\w.-]+", "-", Path(label).name or "model", flags=re.ASCII)[:60]
    in_fp32 = cache_folder() / f"{readable}-{FP32['name']}-{digest}"

    def exported() -> Manifest:
        return export_t5(
            model, in_fp32, tokenizer=tokenizer, name=label, external_threshold_bytes=0, shortlist=None, step=True,
            overwrite=True, progress=progress,
        )  # fmt: skip

    if recipe == RECIPES["fp32"]:
        return in_fp32, _found_or_made(in_fp32, exported)
    folder = cache_folder() / f"{readable}-{recipe.name}-{digest}-{recipe.hash}"

    def converted() -> Manifest:
        _found_or_made(in_fp32, exported)
        return convert_export(in_fp32, folder, recipe, overwrite=True)

    return folder, _found_or_made(folder, converted)


def _found_or_made(folder: Path, make: Callable[[], Manifest]) -> Manifest:
    try:
        return read_manifest(folder)
    except ExportError:
        return make()


def list_exports() -> list[CachedExport]:
    """What the cache holds, by name. Damaged exports are listed too, and TensorRT engines that were built from exports.

    >>> all(export.folder.parent == cache_folder() for export in list_exports())
    True
    """
    return [CachedExport(folder, _manifest(folder), _size_bytes(folder)) for folder in _folders()]


def clear_exports() -> list[CachedExport]:
    """Delete all cached exports, and say which. Other files in that folder stay.

    Raises:
        ExportError: one cannot be deleted.
    """
    found = list_exports()
    try:
        for export in found:
            shutil.rmtree(export.folder)
        for remnant in [*cache_folder().glob(".*.partial"), *cache_folder().glob(".*.lock")]:
            shutil.rmtree(remnant, ignore_errors=True) if remnant.is_dir() else remnant.unlink(missing_ok=True)
    except OSError as error:
        raise ExportError(f"{error.filename} cannot be deleted: {error.strerror}.") from error
    return found


def _key_of_name(name: str) -> str | None:
    """What decides the export of a model by name, found without loading it; ``None`` where it has to be loaded."""
    if name.startswith("random:"):
        installed = machine.versions()  # that draw the weights
        return " ".join([name, *(f"{package} {installed.get(package)}" for package in _DRAWN_BY)])
    folder = data_folder() / BUNDLED[name] if name in BUNDLED else Path(name)
    if not os.path.isdir(folder):
        return None
    patterns = ("*.json", "*.safetensors", "*.bin", "*.model")
    files = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    return " ".join(f"{path.name} {describe_file(path)['sha256']}" for path in files)


def _folders() -> Iterator[Path]:
    root = cache_folder()
    if root.is_dir():
        yield from sorted(
            path for path in root.iterdir() if (path / MANIFEST).is_file() or path.name.startswith(ENGINES)
        )


def _manifest(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder, verify=False)
    except ExportError:
        return None


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
