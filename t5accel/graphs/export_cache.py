"""A cache of exports: one folder per model and recipe, made on first use.

A folder's key (`cache_entry`) covers all that changes an answer, but for a model object's configuration and tokenizer,
which `api.accelerate` hands on itself.
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
from uuid import uuid4

from t5accel import machine
from t5accel.errors import ExportError, InputError, ModelUnavailableError, first_line
from t5accel.graphs.atomic_write import clear_remnants, locked, reason
from t5accel.graphs.builder import OPSET
from t5accel.graphs.contract import ENCODER, MANIFEST, as_folder
from t5accel.graphs.export import (
    FP32,
    check_export,
    export_model,
    model_weights,
    require_tokenizer,
    save_tokenizer,
    source_hash,
)
from t5accel.graphs.manifest import FORMAT, MALFORMED, WRITTEN, Manifest, describe_file, listed_files, read_manifest
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

ENVIRONMENT = "T5ACCEL_CACHE"  # overrides the cache's location
HASHES = ".hashes.json"
LARGE = 1 << 20  # bytes
ENGINES = "tensorrt-"  # prefix of the folders with TensorRT engines
SETTLED_NS = 2_000_000_000  # the coarsest tick of a file system's clock: younger files may change and keep their times
# Files beside a model that loading does not read; all others are part of its key.
UNREAD = tuple(
    """
    .* *.md LICENSE* *.h5 *.msgpack *.ot *.onnx *.onnx_data *.log training_args.bin trainer_state.json optimizer.*
    scheduler.pt scaler.pt rng_state*.pth
    """.split()
)
_EXPORT_NAME = re.compile(rf"^{ENGINES}|-[0-9a-f]{{16}}(-\w+)?$")  # names of cached exports, whole or not


@dataclass(frozen=True)
class CachedExport:
    """A folder of the cache; ``manifest`` is ``None`` for a damaged export and for TensorRT engines."""

    folder: Path
    manifest: Manifest | None
    size_bytes: int

    @property
    def what(self) -> str:
        """The model's name, ``"TensorRT engines"`` or ``"damaged"``."""
        if self.manifest is not None:
            return self.manifest.source["name"]
        return "TensorRT engines" if self.folder.name.startswith(ENGINES) else "damaged"


def cache_folder() -> Path:
    """``exports`` in ``$T5ACCEL_CACHE`` or in the system's cache folder (``~/.cache/t5accel`` …).

    Raises ``InputError`` where the user has no home directory and the variable is not set.
    """
    folder = os.environ.get(ENVIRONMENT)
    try:
        if not folder:
            from platformdirs import user_cache_path

            folder = user_cache_path("t5accel", appauthor=False)
        return Path(folder).expanduser().absolute() / "exports"
    except RuntimeError as error:  # a container's user: no HOME, no line in /etc/passwd
        raise InputError(f"{ENVIRONMENT} must be set to a folder: this user has no home directory.") from error


def cached_export(model: PreTrainedModel | str | os.PathLike[str], **options: Any) -> Path:
    """The folder of `cached_export_and_manifest`, with its options."""
    return cached_export_and_manifest(model, **options)[0]


def cached_export_and_manifest(
    model: PreTrainedModel | str | os.PathLike[str],
    *,
    precision: Recipe | str = "fp32",
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: bool = False,
    check_logits: bool = True,
) -> tuple[Path, Manifest]:
    """The folder of ``model``'s export, made now if missing or damaged, and its manifest.

    The folder's files were verified against the manifest.

    A name is not loaded when its export is cached. A hub id stands for the commit in the hub's cache: the hub is not
    asked for a newer one. Other precisions are converted from the fp32 export, which is kept as well.

    Args:
        model: an encoder-decoder, or a name that `models.load.load_model` knows.
        tokenizer: saved beside the graphs; by default that of a model given by name.
        progress: report on standard error.
        check_logits: compare the fp32 graphs with the model, when they are made and for every model object.

    Raises:
        ExportError: the cache cannot be written, or the graphs' logits differ from the model's.
    """
    recipe, fp32 = as_recipe(precision), RECIPES["fp32"]
    require_tokenizer(tokenizer)
    named = isinstance(model, str | os.PathLike)
    label = os.fspath(model) if named else type(model).__name__

    def say(sentence: str) -> None:
        if progress:
            print(sentence, file=sys.stderr, flush=True)

    with FileHashes() as hashes:
        weights = None if named else model_weights(model)
        key = key_of_name(label, hashes) if named else source_hash(model, weights)
        folder_of = None if key is None else partial(cache_entry, label, key, tokenizer_hash(tokenizer))
        if folder_of and (named or not check_logits) and (manifest := hashes.lookup(folder_of(recipe))):
            return folder_of(recipe), manifest
        if named and not (folder_of and hashes.lookup(folder_of(fp32))):
            if machine.watches_stderr():
                say(f"Loading {label} …")
            model, own_tokenizer = load_model(model)
            loaded = key_of_name(label, hashes)  # again: it may have been downloaded only now
            if os.path.isdir(label) and loaded != key:
                raise ExportError(f"{label} changed while it was read: try again when it is whole.")
            given, tokenizer = tokenizer, own_tokenizer if tokenizer is None else tokenizer
            key = source_hash(model, model_weights(model)) if loaded is None else loaded
            folder_of = partial(cache_entry, label, key, tokenizer_hash(tokenizer if loaded is None else given))

        in_fp32, folder = folder_of(fp32), folder_of(recipe)
        manifest = hashes.lookup(in_fp32)
        if manifest is None:
            clear_damaged(in_fp32, hashes)
            say(f"{label} is exported once, and kept in {cache_folder()} (t5accel cache clear empties that).")
            made = export_model(
                model,
                in_fp32,
                tokenizer=tokenizer,
                name=label,
                external_threshold_bytes=0,  # one file of weights for both graphs: memory and disk hold them once
                shortlist=None,
                step=None,
                overwrite=True,
                progress=progress,
                check_logits=check_logits,
            )
            manifest = hashes.remember(in_fp32, made)
        elif weights is not None and check_logits:  # a hook or an overridden forward() leaves the key as it is
            check_export(model, weights, in_fp32)
        if recipe == fp32:
            return in_fp32, manifest
        if manifest := hashes.lookup(folder):
            return folder, manifest
        clear_damaged(folder, hashes)
        say(f"{label} is kept in {recipe.name}, too. Its quality was not measured: t5accel quantize does that.")
        return folder, hashes.remember(folder, convert_export(in_fp32, folder, recipe, overwrite=True))


def key_of_name(name: str, hashes: FileHashes) -> str | None:
    """The key of a model by name, found without loading it; ``None`` if it must be loaded."""
    if name.startswith("random:"):  # the name, and the versions that its weights depend on
        return " ".join([name, *(f"{one} {_versions().get(one)}" for one in ("torch", "transformers", "t5accel"))])
    folder = data_folder() / BUNDLED[name] if name in BUNDLED else hub_snapshot(name) or Path(name)
    return _folder_key(folder, hashes) if os.path.isdir(folder) else None


def _folder_key(folder: Path, hashes: FileHashes) -> str:
    """The key of a folder: the hashes of all files that loading may read."""
    files = {path for path in folder.iterdir() if path.is_file() and not any(map(path.match, UNREAD))}
    parts = {path for index in files if index.name.endswith(".index.json") for path in _shards(index)}
    return " ".join(
        f"{path.relative_to(folder)} {_published_hash(path) or hashes.sha256(path)}" for path in sorted(files | parts)
    )


def _published_hash(path: Path) -> str | None:
    """Hash and size of a large file in the hub's cache, a link to one that is named by its sha256; else ``None``."""
    target = path.resolve()
    if not path.is_symlink() or target.parent.name != "blobs" or not re.fullmatch("[0-9a-f]{64}", target.name):
        return None
    size = target.stat().st_size  # a small file is soon hashed, and may have been edited by hand
    return f"{target.name} {size}" if size >= LARGE else None


def _shards(index: Path) -> Iterator[Path]:
    """The weight files that an index names, which may lie in subfolders."""
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        yield from (path for name in names if (path := index.parent / name).is_file())
    except (OSError, *MALFORMED):
        return  # loading reports what is wrong with it


@cache
def _versions() -> dict[str, str]:
    """Read once: it takes longer than everything else when nothing is hashed."""
    return machine.versions()


def cache_entry(label: str, key: str, tokenizer: str, recipe: Recipe, *, layout: str = "shortlist step") -> Path:
    """The cache folder of a model's key, its tokenizer's hash and a recipe."""
    # transformers' version counts, because releases load one folder differently.
    how = f"{FP32} {FORMAT} {OPSET} {_versions().get('t5accel')} {_versions().get('transformers')} {layout}"
    digest = hashlib.sha256(f"{key} {how} {tokenizer}".encode()).hexdigest()[:16]
    readable = re.sub(r"[^\w.-]+", "-", Path(label).name or "model", flags=re.ASCII)[:60]
    suffix = "" if recipe == RECIPES["fp32"] else f"-{recipe.hash}"
    return cache_folder() / f"{readable}-{recipe.name}-{digest}{suffix}"


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """The sha256 of all that a tokenizer saves; empty for ``None``."""
    if tokenizer is None:
        return ""
    with TemporaryDirectory() as folder:
        save_tokenizer(tokenizer, Path(folder))
        files = {path.name: describe_file(path)["sha256"] for path in Path(folder).iterdir()}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def find_export(model: Any) -> Path | None:
    """The export that a name stands for, a folder or a hub repository; else ``None``.

    The files of a hub repository's manifest are downloaded, unless the hub's cache has them. Raises
    ``ModelUnavailableError`` if some cannot be had.

    >>> find_export("mini") is None
    True
    """
    if not isinstance(model, str | os.PathLike) or (isinstance(model, str) and model in BUNDLED):
        return None
    folder = Path(model)
    has_graphs = os.path.isfile(folder / ENCODER)
    if os.path.isfile(folder / MANIFEST) and has_graphs and has_weights(folder):
        raise InputError(
            f"{folder} holds an export and a model's weights, which may be of another model: move one of them away."
        )
    if os.path.isfile(folder / MANIFEST) and (has_graphs or not has_weights(folder)):
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
    listed = listed_files(folder)
    if not listed:
        return None
    if foreign := listed - WRITTEN:
        raise ModelUnavailableError(f"{repository} lists {min(foreign)!r:.80}, which is no file of an export.")

    def missing() -> list[str]:
        return [name for name in sorted(listed) if not (folder / name).is_file()]

    if missing() and hub_resolves():
        hub_download(repository, sorted({*listed, MANIFEST}), revision=folder.name)  # the commit of that manifest
    if lacking := missing():
        raise ModelUnavailableError(
            f"The export {repository} lacks {lacking[0]} in the hub's cache, and it cannot be had from the hub."
        )
    return folder


def hub_download(repository: str, patterns: list[str], *, revision: str | None) -> None:
    """Download the files of a hub repository that match; raises ``ModelUnavailableError`` where that fails."""
    from huggingface_hub import constants, snapshot_download

    try:
        snapshot_download(repository, cache_dir=constants.HF_HUB_CACHE, revision=revision, allow_patterns=patterns)
    except Exception as error:
        raise ModelUnavailableError(f"{repository} cannot be downloaded: {first_line(error)}.") from error


def verified_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """`read_manifest` with remembered hashes: files that did not change are not read again."""
    with FileHashes() as hashes:
        return hashes.verify(as_folder(folder))


class FileHashes:
    """A persistent cache of files' sha256, valid while size, times and inode stay the same."""

    def __init__(self) -> None:
        self.file, self.new = None, {}
        with suppress(InputError):  # no folder: nothing is remembered
            self.file = cache_folder() / HASHES

    def __enter__(self) -> FileHashes:
        self.known = self._read()
        return self

    def __exit__(self, *_: object) -> None:
        if self.new and self.file:
            there = {path: entry for path, entry in self._read().items() if os.path.isfile(path)}
            partial_file = self.file.with_name(f"{HASHES}.{os.getpid()}")
            with suppress(OSError):  # a cache that cannot be written costs time only
                self.file.parent.mkdir(parents=True, exist_ok=True)
                partial_file.write_text(json.dumps(there | self.new), encoding="utf-8")
                os.replace(partial_file, self.file)

    def sha256(self, path: Path) -> str:
        """The hash of a file; raises ``OSError`` if it is missing."""
        name = str(path.resolve())
        state = _file_state(path)
        now = time.time_ns()
        if self.known.get(name, [])[:1] == [state]:
            return self.known[name][1]
        found = describe_file(path)["sha256"]
        # A file written just now may change again within one tick of its times: its hash is not remembered.
        if _file_state(path) == state and max(state[1:3]) < now - SETTLED_NS:
            self.known[name] = self.new[name] = [state, found]
        return found

    def remember(self, folder: Path, manifest: Manifest) -> Manifest:
        """Remember the hashes of an export just written, and return its manifest."""
        for name, entry in manifest.files.items():
            self.new[str((folder / name).resolve())] = [_file_state(folder / name), entry["sha256"]]
        self.known |= self.new
        return manifest

    def verify(self, folder: Path) -> Manifest:
        """The manifest of an export whose files all match it; else raises ``ExportError``."""
        manifest = read_manifest(folder, verify=False)
        try:
            altered = [name for name, entry in manifest.files.items() if self.sha256(folder / name) != entry["sha256"]]
        except OSError as error:
            raise ExportError(f"{error.filename} cannot be read: {error.strerror}.") from error
        return read_manifest(folder) if altered else manifest  # read_manifest raises, and says what to do

    def lookup(self, folder: Path) -> Manifest | None:
        """`verify`, or ``None`` if there is no whole export."""
        try:
            return self.verify(folder)
        except ExportError:
            return None

    def _read(self) -> dict[str, list[Any]]:
        if self.file is None:
            return {}
        try:
            content = json.loads(self.file.read_text(encoding="utf-8"))
            return {path: entry for path, entry in content.items() if isinstance(entry, list) and len(entry) == 2}
        except (OSError, *MALFORMED):  # none yet, or no JSON object
            return {}


def _file_state(path: Path) -> list[int]:
    state = path.stat()
    return [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]


def list_exports() -> list[CachedExport]:
    """The cache's exports by name, damaged ones included, and TensorRT engines built from them."""
    root = cache_folder()
    if not root.is_dir():
        return []
    # Other processes' folders that are being written, or replaced, are no exports.
    settled = (path for path in root.iterdir() if path.suffix not in (".partial", ".old"))
    found = sorted(path for path in settled if (path / MANIFEST).is_file() or _EXPORT_NAME.search(path.name))
    exports = []
    for folder in found:
        try:
            manifest = read_manifest(folder, verify=False)
        except ExportError:
            manifest = None
        files = folder.iterdir() if folder.is_dir() else ()  # a link may lead nowhere
        exports.append(CachedExport(folder, manifest, sum(path.stat().st_size for path in files if path.is_file())))
    return exports


def clear_exports(names: Sequence[str] | None = None) -> list[CachedExport]:
    """Delete cached exports, all or those of these folder names, and return them.

    Raises ``InputError`` for a name that is not cached, before anything is deleted, and ``ExportError`` for an export
    that cannot be deleted.
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


def clear_damaged(folder: Path, hashes: FileHashes) -> None:
    """Delete a cached export that is not whole."""
    if not os.path.lexists(folder):
        return
    try:
        with locked(folder):
            if hashes.lookup(folder) is None:  # another process may just have made it
                _delete(folder)
    except OSError as error:
        raise ExportError(f"{folder} is damaged, and cannot be deleted: {reason(error)}.") from error


def _delete(folder: Path) -> None:
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink(missing_ok=True)
        return
    gone = folder.with_name(f".{folder.name}.{uuid4().hex}.partial")  # so that nobody opens one that is half deleted
    with suppress(FileNotFoundError):  # another process was faster
        folder.rename(gone)
        shutil.rmtree(gone)
