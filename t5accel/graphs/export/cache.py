"""Exports kept between programs: one folder per model and recipe in the user's cache, made when first asked for."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5accel import machine
from t5accel.checkpoints import BUNDLED, data_folder, hub_snapshot, load_t5
from t5accel.errors import ExportError, InputError
from t5accel.graphs.build.builder import OPSET
from t5accel.graphs.contract import MANIFEST, as_folder
from t5accel.graphs.export.manifest import FORMAT, Manifest, describe_file, read_manifest
from t5accel.graphs.export.staging import clear_remnants
from t5accel.graphs.export.t5 import FP32, export_t5, model_weights, source_hash
from t5accel.graphs.numbers.convert import convert_export
from t5accel.graphs.numbers.recipes import RECIPES, Recipe, as_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ENVIRONMENT = "T5ACCEL_CACHE"  # where to keep exports instead
HASHES = ".hashes.json"
ENGINES = "tensorrt-"  # how the folders of `tensorrt_engines` begin
SETTLED_NS = 2_000_000_000  # a file that was written longer ago does not change without a change of its times
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

    A model given by name is not loaded when its export is there. A hub id stands for the commit in the hub's cache:
    while there is an export of that, the hub is not asked for a newer one. Weights lie in a file that the graphs share:
    less on disk, and in memory only once. Where it pays, there is a shortlist. An export in another precision is made
    from that in fp32, which is kept, too.

    Args:
        model: an encoder-decoder of a family that there is, or a name that `checkpoints.load_t5` knows.
        precision: a recipe, or the name of one of `recipes.RECIPES`.
        tokenizer: as of `export.export_t5`.
        progress: when it is made, say where it is kept, and show a bar, on standard error.

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
    with KnownHashes() as hashes:
        key = _key_of_name(label, hashes) if named else source_hash(model, model_weights(model))
        place = None if key is None else partial(_folder_of, label, key, tokenizer)
        if place and (manifest := hashes.kept(place(recipe))):
            return place(recipe), manifest
        if named and not (place and hashes.kept(place(RECIPES["fp32"]))):
            model, own_tokenizer = load_t5(model)
            loaded = _key_of_name(label, hashes)  # again: what is published may have been downloaded only now
            if os.path.isdir(label) and loaded != key:
                raise ExportError(f"{label} changed while it was read: try again when it is whole.")
            key = source_hash(model, model_weights(model)) if loaded is None else loaded
            place = partial(_folder_of, label, key, own_tokenizer if loaded is None else tokenizer)
            tokenizer = own_tokenizer if tokenizer is None else tokenizer
        in_fp32, folder = place(RECIPES["fp32"]), place(recipe)

        def exported() -> Manifest:
            if manifest := hashes.kept(in_fp32):
                return manifest
            if progress:
                _say(f"{label} is exported once, and kept in {cache_folder()} (t5accel cache clear empties that).")
            made = export_t5(
                model, in_fp32, tokenizer=tokenizer, name=label, external_threshold_bytes=0, shortlist=None, step=True,
                overwrite=True, progress=progress,
            )  # fmt: skip
            return hashes.remember(in_fp32, made)

        if recipe == RECIPES["fp32"]:
            return in_fp32, exported()
        if manifest := hashes.kept(folder):
            return folder, manifest
        exported()
        if progress:
            _say(f"{label} is kept in {recipe.name}, too. Its quality was not measured: t5accel quantize does that.")
        return folder, hashes.remember(folder, convert_export(in_fp32, folder, recipe, overwrite=True))


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def checked_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """`read_manifest`, with every file checked against it; what was hashed before and did not change is not read again.

    Raises:
        ExportError: as `read_manifest`.
    """
    with KnownHashes() as hashes:
        return hashes.checked(as_folder(folder))


class KnownHashes:
    """The sha256 of files, remembered beside size, times and inode: what has changed since is hashed again.

    A file that was written in the last two seconds is not remembered, for it may change again without a change of its
    times (clocks of file systems tick that slowly at worst); what this program itself has just written is.
    """

    def __init__(self) -> None:
        self.file, self.new = cache_folder() / HASHES, {}

    def __enter__(self) -> KnownHashes:
        self.known = self._read()
        return self

    def __exit__(self, *_: object) -> None:
        if self.new:
            there = {path: entry for path, entry in self._read().items() if os.path.isfile(path)}
            partial_file = self.file.with_name(f"{HASHES}.{os.getpid()}")
            with suppress(OSError):  # a cache that cannot be written costs time only
                self.file.parent.mkdir(parents=True, exist_ok=True)
                partial_file.write_text(json.dumps(there | self.new), encoding="utf-8")
                os.replace(partial_file, self.file)

    def sha256(self, path: Path) -> str:
        """Of a file; raises ``OSError`` where there is none."""
        name, facts, now = str(path.resolve()), _facts(path), time.time_ns()
        if self.known.get(name, [])[:1] == [facts]:
            return self.known[name][1]
        found = describe_file(path)["sha256"]
        if _facts(path) == facts and max(facts[1:3]) < now - SETTLED_NS:
            self.known[name] = self.new[name] = [facts, found]
        return found

    def remember(self, folder: Path, manifest: Manifest) -> Manifest:
        """Take the hashes of files just written from their manifest, which is returned."""
        for name, entry in manifest.files.items():
            self.new[str((folder / name).resolve())] = [_facts(folder / name), entry["sha256"]]
        self.known |= self.new
        return manifest

    def checked(self, folder: Path) -> Manifest:
        """The manifest of an export, every file of which is as it says; raises ``ExportError``."""
        manifest = read_manifest(folder, verify=False)
        try:
            altered = [name for name, entry in manifest.files.items() if self.sha256(folder / name) != entry["sha256"]]
        except OSError as error:
            raise ExportError(f"{error.filename} cannot be read: {error.strerror}.") from error
        return read_manifest(folder) if altered else manifest  # which raises, and says what to do

    def kept(self, folder: Path) -> Manifest | None:
        """The manifest of a whole export, if there is one."""
        try:
            return self.checked(folder)
        except ExportError:
            return None

    def _read(self) -> dict[str, list[Any]]:
        try:
            content = json.loads(self.file.read_text(encoding="utf-8"))
            return {path: entry for path, entry in content.items() if isinstance(entry, list) and len(entry) == 2}
        except (OSError, ValueError, AttributeError):  # none yet, or no JSON object
            return {}


def _facts(path: Path) -> list[int]:
    facts = path.stat()
    return [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]


def _folder_of(label: str, key: str, tokenizer: PreTrainedTokenizerBase | None, recipe: Recipe) -> Path:
    """Where the export of a model by its key is kept; a tokenizer that was given makes it another."""
    vocabulary = "" if tokenizer is None else repr(sorted(tokenizer.get_vocab().items()))
    how = f"{FP32} {FORMAT} {OPSET} {_versions().get('t5accel')} shortlist step"
    digest = hashlib.sha256(f"{key} {how} {vocabulary}".encode()).hexdigest()[:16]
    readable = re.sub(r"[^\w.-]+", "-", Path(label).name or "model", flags=re.ASCII)[:60]
    suffix = "" if recipe == RECIPES["fp32"] else f"-{recipe.hash}"
    return cache_folder() / f"{readable}-{recipe.name}-{digest}{suffix}"


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
        clear_remnants(cache_folder(), locks=True)
        for file in cache_folder().glob(f"{HASHES}*"):
            file.unlink(missing_ok=True)
    except OSError as error:
        raise ExportError(f"{error.filename} cannot be deleted: {error.strerror}.") from error
    return found


def _key_of_name(name: str, hashes: KnownHashes) -> str | None:
    """What decides the export of a model by name, found without loading it; ``None`` where it has to be loaded.

    Of a published model the hub's cache knows the hashes: each file there is a link to one that is named by its hash.
    """
    if name.startswith("random:"):
        installed = _versions()  # that draw the weights
        return " ".join([name, *(f"{package} {installed.get(package)}" for package in _DRAWN_BY)])
    folder = data_folder() / BUNDLED[name] if name in BUNDLED else hub_snapshot(name) or Path(name)
    if not os.path.isdir(folder):
        return None
    patterns = ("*.json", "*.safetensors", "*.bin", "*.model", "*.spm")
    files = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    return " ".join(f"{path.name} {_blob(path) or hashes.sha256(path)}" for path in files)


@cache
def _versions() -> dict[str, str]:
    """Read once: it takes longer than all else where nothing has to be hashed."""
    return machine.versions()


def _blob(path: Path) -> str | None:
    """The hash by which the hub's cache names the file that this one is a link to, with its size."""
    if not path.is_symlink() or (target := path.resolve()).parent.name != "blobs":
        return None
    return f"{target.name} {target.stat().st_size}"


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
