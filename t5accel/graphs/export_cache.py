"""Exports kept between programs: one folder per model and recipe in the user's cache, made when first asked for.

Everything that changes an answer is in the folder's key (`_folder_of`), or outside of the folder: `api.accelerate`
hands out a model object's own configuration and defaults of ``generate()``, and the tokenizer that it is given. The key
has

- the model: of a name the hash of every file that loading may read, of an object that of its weights, sizes, special
  tokens and what it demands of every answer (`export.t5.source_hash`);
- the tokenizer that is given: the hash of all that it saves;
- the versions of transformers, which load one folder differently, and of t5accel; the format and the recipe.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from t5accel import machine
from t5accel.checks import read_json_object
from t5accel.errors import ExportError, InputError, ModelUnavailableError, first_line
from t5accel.graphs.atomic_write import clear_remnants, locked, reason
from t5accel.graphs.builder import OPSET
from t5accel.graphs.contract import ENCODER, MANIFEST, as_folder
from t5accel.graphs.export import FP32, export_model, model_weights, save_tokenizer, source_hash
from t5accel.graphs.logit_check import check_export
from t5accel.graphs.manifest import FORMAT, WRITTEN, Manifest, describe_file, read_manifest
from t5accel.models.load import (
    BUNDLED,
    data_folder,
    has_weights,
    hub_file,
    hub_id,
    hub_resolves,
    hub_snapshot,
    load_model,
)
from t5accel.precision.convert import convert_export
from t5accel.precision.recipes import RECIPES, Recipe, as_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ENVIRONMENT = "T5ACCEL_CACHE"  # where to keep exports instead
HASHES = ".hashes.json"
ENGINES = "tensorrt-"  # how the folders of `tensorrt_engines` begin
SETTLED_NS = 2_000_000_000  # a file that was written longer ago does not change without a change of its times
# What lies beside a model and is not read: all else decides its export.
UNREAD = (".*", "*.md", "LICENSE*", "*.h5", "*.msgpack", "*.ot", "*.onnx", "*.onnx_data", "*.log", "training_args.bin",
          "trainer_state.json", "optimizer.*", "scheduler.pt", "scaler.pt", "rng_state*.pth")  # fmt: skip
_OURS = re.compile(rf"^{ENGINES}|-[0-9a-f]{{16}}(-\w+)?$")  # names of cached exports, whole or not
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
    check_logits: bool = True,
) -> Path:
    """The folder with the export of ``model``, which is made now if it is not there, or damaged.

    A model given by name is not loaded when its export is there. A hub id stands for the commit in the hub's cache:
    while there is an export of that, the hub is not asked for a newer one. Weights lie in a file that the graphs share:
    less on disk, and in memory only once. Where it pays, there is a shortlist. An export in another precision is made
    from that in fp32, which is kept, too.

    Args:
        model: an encoder-decoder of a family that there is, or a name that `checkpoints.load_model` knows.
        precision: a recipe, or the name of one of `recipes.RECIPES`.
        tokenizer: as of `export.export_model`.
        progress: when it is made, say where it is kept, and show a bar, on standard error.
        check_logits: compare the fp32 graphs with the model, when they are made and for every model object.

    Raises:
        ExportError: the cache cannot be written, or the graphs compute something else than the model.
        InputError, NotT5Error, UnknownModelError, ModelUnavailableError: there is no such model.
    """
    return cached_export_and_manifest(
        model, precision=precision, tokenizer=tokenizer, progress=progress, check_logits=check_logits
    )[0]


def cached_export_and_manifest(
    model: PreTrainedModel | str | os.PathLike[str],
    *,
    precision: Recipe | str = "fp32",
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: bool = False,
    check_logits: bool = True,
) -> tuple[Path, Manifest]:
    """`cached_export` and its manifest, against which every file of that folder was checked, and no other's."""
    recipe = as_recipe(precision)
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise InputError(f"tokenizer is {tokenizer!r:.80}; give one of transformers.")
    named = isinstance(model, str | os.PathLike)
    label = os.fspath(model) if named else type(model).__name__
    with FileHashes() as hashes:
        weights = None if named else model_weights(model)
        key = _key_of_name(label, hashes) if named else source_hash(model, weights)
        place = None if key is None else partial(_folder_of, label, key, tokenizer_hash(tokenizer))
        if place and (manifest := hashes.kept(place(recipe))) and (named or not check_logits):
            return place(recipe), manifest
        if named and not (place and hashes.kept(place(RECIPES["fp32"]))):
            if progress and machine.watches_stderr():
                _say(f"Loading {label} …")
            model, own_tokenizer = load_model(model)
            loaded = _key_of_name(label, hashes)  # again: what is published may have been downloaded only now
            if os.path.isdir(label) and loaded != key:
                raise ExportError(f"{label} changed while it was read: try again when it is whole.")
            given = tokenizer_hash(own_tokenizer if loaded is None else tokenizer)
            key = source_hash(model, model_weights(model)) if loaded is None else loaded
            place = partial(_folder_of, label, key, given)
            tokenizer = own_tokenizer if tokenizer is None else tokenizer
        in_fp32, folder = place(RECIPES["fp32"]), place(recipe)

        def exported() -> Manifest:
            if manifest := hashes.kept(in_fp32):
                if weights is not None and check_logits:  # a hook or an overridden forward() leaves the key as it is
                    check_export(model, weights, in_fp32)
                return manifest
            _clear_damaged(in_fp32, hashes)
            if progress:
                _say(f"{label} is exported once, and kept in {cache_folder()} (t5accel cache clear empties that).")
            made = export_model(
                model, in_fp32, tokenizer=tokenizer, name=label, external_threshold_bytes=0, shortlist=None, step=True,
                overwrite=True, progress=progress, check_logits=check_logits,
            )  # fmt: skip
            return hashes.remember(in_fp32, made)

        manifest = exported()
        if recipe == RECIPES["fp32"]:
            return in_fp32, manifest
        if manifest := hashes.kept(folder):
            return folder, manifest
        _clear_damaged(folder, hashes)
        if progress:
            _say(f"{label} is kept in {recipe.name}, too. Its quality was not measured: t5accel quantize does that.")
        return folder, hashes.remember(folder, convert_export(in_fp32, folder, recipe, overwrite=True))


def find_export(model: Any) -> Path | None:
    """The folder of the export that a name stands for: that folder, or a hub repository's; else ``None``.

    An export on the hub is downloaded once, the files that its manifest names and no others. The hub is not asked about
    what is in its cache.

    Raises:
        ModelUnavailableError: the hub does not send the whole export.

    >>> find_export("mini") is None
    True
    """
    if not isinstance(model, str | os.PathLike):
        return None
    folder = Path(model)
    if os.path.isfile(folder / MANIFEST) and (os.path.isfile(folder / ENCODER) or not has_weights(folder)):
        return folder
    repository = hub_id(os.fspath(model))
    return _hub_export(repository) if repository else None


def _hub_export(repository: str) -> Path | None:
    folder = hub_snapshot(repository)
    if folder is None or not (folder / MANIFEST).is_file():
        if folder and has_weights(folder):
            return None
        if (manifest := hub_file(repository, MANIFEST)) is None:
            return None
        folder = manifest.parent
    try:
        content = read_json_object(folder / MANIFEST, ExportError)
        names = {*content["files"], MANIFEST} if {"format", "layout"} <= content.keys() else set()
    except (ExportError, LookupError, TypeError):
        names = set()
    if not names:  # a manifest of something else
        return None
    if foreign := names - WRITTEN:
        raise ModelUnavailableError(f"{repository} lists {min(foreign)!r:.80}, which is no file of an export.")

    def missing() -> list[str]:
        return [name for name in sorted(names) if not (folder / name).is_file()]

    if missing() and hub_resolves():
        from huggingface_hub import constants, snapshot_download

        only = {"revision": folder.name, "allow_patterns": sorted(names)}  # of the commit of that manifest
        try:
            snapshot_download(repository, cache_dir=constants.HF_HUB_CACHE, **only)
        except Exception as error:
            raise ModelUnavailableError(f"{repository} cannot be downloaded: {first_line(error)}.") from error
    if lacking := missing():
        raise ModelUnavailableError(
            f"The export {repository} lacks {lacking[0]} in the hub's cache, and it cannot be had from the hub."
        )
    return folder


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """The sha256 of all that a tokenizer saves: its class, its vocabulary and every setting; empty for none."""
    if tokenizer is None:
        return ""
    with TemporaryDirectory() as folder:
        save_tokenizer(tokenizer, Path(folder))
        files = {path.name: describe_file(path)["sha256"] for path in Path(folder).iterdir()}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _clear_damaged(folder: Path, hashes: FileHashes) -> None:
    """Delete what is left of a cached export that is not whole; the folder's name says that it is ours."""
    if not os.path.lexists(folder):
        return
    try:
        with locked(folder):
            if hashes.kept(folder) is None:  # else another process has just made it
                _delete(folder)
    except OSError as error:
        raise ExportError(f"{folder} is damaged, and cannot be deleted: {reason(error)}.") from error


def _delete(folder: Path) -> None:
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink(missing_ok=True)
    else:
        shutil.rmtree(folder)


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def verified_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """`read_manifest`, with every file checked against it; what was hashed before and did not change is not read again.

    Raises:
        ExportError: as `read_manifest`.
    """
    with FileHashes() as hashes:
        return hashes.checked(as_folder(folder))


class FileHashes:
    """The sha256 of files, remembered beside size, times and inode: what has changed since is hashed again.

    A file that was written in the last two seconds is not remembered, for it may change again without a change of its
    times (clocks of file systems tick that slowly at worst); what this program itself has just written is.
    """

    def __init__(self) -> None:
        self.file, self.new = cache_folder() / HASHES, {}

    def __enter__(self) -> FileHashes:
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
        except (OSError, ValueError, RecursionError, AttributeError):  # none yet, or no JSON object
            return {}


def _facts(path: Path) -> list[int]:
    facts = path.stat()
    return [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]


def _folder_of(label: str, key: str, tokenizer: str, recipe: Recipe) -> Path:
    """Where the export is kept of a model by its key and that of the tokenizer that was given."""
    how = f"{FP32} {FORMAT} {OPSET} {_versions().get('t5accel')} {_versions().get('transformers')} shortlist step"
    digest = hashlib.sha256(f"{key} {how} {tokenizer}".encode()).hexdigest()[:16]
    readable = re.sub(r"[^\w.-]+", "-", Path(label).name or "model", flags=re.ASCII)[:60]
    suffix = "" if recipe == RECIPES["fp32"] else f"-{recipe.hash}"
    return cache_folder() / f"{readable}-{recipe.name}-{digest}{suffix}"


def list_exports() -> list[CachedExport]:
    """What the cache holds, by name. Damaged exports are listed too, and TensorRT engines that were built from exports.

    >>> all(export.folder.parent == cache_folder() for export in list_exports())
    True
    """
    return [CachedExport(folder, _manifest(folder), _size_bytes(folder)) for folder in _folders()]


def clear_exports(names: Sequence[str] | None = None) -> list[CachedExport]:
    """Delete cached exports, all or those of these folder names, and return them. Other files in that folder stay.

    Raises:
        InputError: a name is no cached export's; nothing is deleted.
        ExportError: one cannot be deleted; those before it are.
    """
    found = list_exports()
    if names is not None:
        if missing := [name for name in names if name not in {export.folder.name for export in found}]:
            raise InputError(f"The cache has no export {missing[0]!r}. Give names that `t5accel cache list` shows.")
        found = [export for export in found if export.folder.name in names]
    try:
        for export in found:
            _delete(export.folder)
        clear_remnants(cache_folder(), locks=True)
        if names is None:
            for file in cache_folder().glob(f"{HASHES}*"):
                file.unlink(missing_ok=True)
    except OSError as error:
        raise ExportError(f"{error.filename or cache_folder()} cannot be deleted: {reason(error)}.") from error
    return found


def _key_of_name(name: str, hashes: FileHashes) -> str | None:
    """What decides the export of a model by name, found without loading it; ``None`` where it has to be loaded.

    Of a published model the hub's cache knows the hashes: each file there is a link to one that is named by its hash.
    """
    if name.startswith("random:"):
        installed = _versions()  # that draw the weights
        return " ".join([name, *(f"{package} {installed.get(package)}" for package in _DRAWN_BY)])
    folder = data_folder() / BUNDLED[name] if name in BUNDLED else hub_snapshot(name) or Path(name)
    if not os.path.isdir(folder):
        return None
    files = sorted(path for path in folder.iterdir() if path.is_file() and not any(map(path.match, UNREAD)))
    parts = {path for index in files if index.name.endswith(".index.json") for path in _shards(index)}
    return " ".join(
        f"{path.relative_to(folder)} {_blob(path) or hashes.sha256(path)}" for path in sorted({*files, *parts})
    )


def _shards(index: Path) -> Iterator[Path]:
    """The files of weights that an index names, which may lie in folders below."""
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        yield from (path for name in names if (path := index.parent / name).is_file())
    except (OSError, ValueError, RecursionError, LookupError, AttributeError, TypeError):
        return  # loading says what is wrong with it


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
        yield from sorted(path for path in root.iterdir() if (path / MANIFEST).is_file() or _OURS.search(path.name))


def _manifest(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder, verify=False)
    except ExportError:
        return None


def _size_bytes(folder: Path) -> int:
    found = folder.iterdir() if folder.is_dir() else ()  # a link may lead nowhere
    return sum(path.stat().st_size for path in found if path.is_file())
