"""The manifest of an export.

It is written last and read first, so that missing, truncated and altered files are noticed before they are run.
Programs in other languages need nothing else to run the graphs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from t5accel.checks import check_file, read_json_object
from t5accel.decoding.token_constraints import TokenConstraints
from t5accel.errors import ExportError, InputError
from t5accel.graphs.contract import (
    DECODER,
    ENCODER,
    ENCODER_ONLY,
    MANIFEST,
    MODULES,
    SHORTLIST,
    STEP,
    WEIGHTS,
    GraphSpec,
    TensorSpec,
    as_folder,
    decoder_spec,
    encoder_only_spec,
    encoder_spec,
    shortlist_spec,
    step_spec,
)
from t5accel.models.families import FAMILIES
from t5accel.models.sizes import T5Dims
from t5accel.models.spec import ModelSpec

FORMAT = 2  # of the manifest and of the graphs' contract; a change that older code cannot read raises it
LAYOUT = "two graphs"
ELEMENT_BYTES = {"float32": 4, "float16": 2, "int8": 1, "uint8": 1}
# All files that an export may hold, for when its manifest is damaged.
WRITTEN = set(
    f"""
    {ENCODER} {DECODER} {SHORTLIST} {STEP} {ENCODER_ONLY} {WEIGHTS} {MANIFEST} {MODULES} config.json
    generation_config.json
    tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json spiece.model sentencepiece.bpe.model
    source.spm target.spm vocab.json target_vocab.json merges.txt vocab.txt dict.txt tokenizer.model
    chat_template.jinja
    """.split()
)
# What a manifest may hold: an entry that is not read could change answers. `None` leaves open what is inside.
# The keys of a recipe are written here because inference does not load `precision.recipes`.
_PLACE = dict.fromkeys(("offset", "shape", "dtype"))
_TENSORS = dict.fromkeys(("name", "dtype", "shape"))
_GRAPH = {"inputs": _TENSORS, "outputs": _TENSORS}
_SCHEME = dict.fromkeys(("method", "bits", "block_size", "accuracy_level", "per_channel", "reduce_range"))
KNOWN: dict[str, Any] = {
    **dict.fromkeys(("format", "layout", "opset", "versions")),
    "source": dict.fromkeys(("name", "sha256")),
    "dims": dict.fromkeys(entry.name for entry in fields(T5Dims)),
    "tokens": dict.fromkeys(("pad_token_id", "eos_token_id", "decoder_start_token_id")),
    "recipe": {
        **dict.fromkeys(("name", "floats", "kept", "hash", "gated", "gate", "in_fp32", "probed", "ranges")),
        **dict.fromkeys(("encoder", "decoder", "head", "embedding", "overrides"), _SCHEME),
    },
    "shared": {"*": _PLACE},
    "optimized": dict.fromkeys(("tool", "level", "onnxruntime", "machine", "contrib_operators")),
    "shortlist": {**_GRAPH, "rows": _PLACE, "bias": _PLACE, "largest_row": None, "largest_error": None},
    "step": _GRAPH,
    "family": dict.fromkeys(("model_type", "positions", "source_vocab_size")),
    "rules": dict.fromkeys(entry.name for entry in fields(TokenConstraints)),
    "graphs": {"*": _GRAPH},
    "files": {"*": dict.fromkeys(("sha256", "size_bytes"))},
}
# What JSON of another shape raises when it is read.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, RecursionError)


class _UnknownEntry(ValueError):
    pass


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``."""

    source: Mapping[str, str]  # "name" and "sha256" of the checkpoint, over its configuration and weights
    dims: T5Dims
    tokens: Mapping[str, int]
    recipe: Mapping[str, Any]
    opset: int
    versions: Mapping[str, str]  # of the libraries that wrote it
    # Offset, shape and dtype in weights.data of each weight that both graphs read, so that sessions map it once.
    shared: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    optimized: Mapping[str, Any] = field(default_factory=dict)  # how and for which machine (`ort_levels`)
    # Inputs and outputs of decoder_shortlist.onnx, where the head's "rows" and "bias" lie, and the bounds
    # "largest_row" and "largest_error" of its 8-bit copy.
    shortlist: Mapping[str, Any] = field(default_factory=dict)
    step: Mapping[str, Any] = field(default_factory=dict)  # inputs and outputs of decoder_step.onnx
    family: Mapping[str, Any] = field(default_factory=dict)  # empty for T5
    rules: Mapping[str, Any] = field(default_factory=dict)  # `decoding.token_constraints.TokenConstraints.to_json`
    graphs: Mapping[str, GraphSpec] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # sha256 and size_bytes, but for the manifest

    @property
    def is_encoder_only(self) -> bool:
        """Whether this is an encoder without a decoder, `BackendEncoder`'s."""
        return not self.dims.decoder_layers

    def require_whole_model(self, folder: str | os.PathLike[str]) -> None:
        """Raise ``InputError`` for the export of an encoder alone."""
        if self.is_encoder_only:
            raise InputError(f"{folder} is the export of an encoder alone: give it to AcceleratedEncoder.")

    @property
    def size_bytes(self) -> int:
        return sum(entry["size_bytes"] for entry in self.files.values())

    @property
    def graph_bytes(self) -> int:
        """Bytes of the graphs and of the weights beside them."""
        graphs = (ENCODER_ONLY, ENCODER, DECODER, SHORTLIST, STEP, WEIGHTS)
        return sum(self.files[name]["size_bytes"] for name in graphs if name in self.files)

    def write(self, folder: Path) -> None:
        """Hash the files in ``folder`` and write ``manifest.json`` beside them.

        Raises ``ExportError`` if it could not be read again, as with token ids outside the vocabulary.
        """
        files = {path.name: describe_file(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST}
        graphs = {name: asdict(spec) for name, spec in _specs(self.dims, self.recipe).items()}
        content = {"format": FORMAT, "layout": LAYOUT, **asdict(self), "graphs": graphs, "files": files}
        try:
            _manifest(json.loads(json.dumps(content)))
        except MALFORMED as error:
            raise ExportError(f"{self.source['name']} cannot be exported: {error}.") from error
        write_manifest(folder, content)


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write ``manifest.json`` with its ``"sha256"``, over all other entries as sorted JSON without spaces."""
    entries = {key: value for key, value in content.items() if key != "sha256"}
    text = json.dumps({**entries, "sha256": _sha256(entries)}, indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _sha256(entries: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def describe_file(path: Path) -> dict[str, Any]:
    """``{"sha256", "size_bytes"}`` of a file.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder) / "empty"
    ...     path.touch()
    ...     describe_file(path)
    {'sha256': 'e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855', 'size_bytes': 0}
    """
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "size_bytes": path.stat().st_size}


def read_manifest(folder: str | os.PathLike[str], *, verify: bool = True) -> Manifest:
    """Read an export's manifest and check every file against it.

    With ``verify`` every file is hashed (about a second per gigabyte), else only their sizes are compared. Raises
    ``ExportError`` for a folder without an export, another format, and missing, truncated or altered files.
    """
    folder = as_folder(folder)
    again = "Export again with overwrite=True (t5accel export --model MODEL --out FOLDER --overwrite)."
    path = folder / MANIFEST
    try:
        content = read_json_object(path, ExportError, again)
    except ExportError as error:
        if not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise
        raise ExportError(
            f"{folder} holds no {MANIFEST}, so it is no export of t5accel: make one with t5accel export --model MODEL "
            f"--out {folder}."
        ) from error
    try:
        if (found := content.get("format")) != FORMAT:
            if isinstance(found, int) and found > FORMAT:
                again = "Install the newer t5accel that wrote it."
            raise ExportError(f"{path} must have format {FORMAT}, got {found!r:.80}. {again}")
        if content.pop("sha256", None) != _sha256(content):
            raise ExportError(f"{path} was altered: its hash is not the one of its content. {again}")
        manifest = _manifest(content)
        for name, entry in manifest.files.items():
            _check_file(folder / name, entry, verify=verify, again=again)
    except _UnknownEntry as error:
        raise ExportError(f"{path} has the {error}: it was written by a newer t5accel. Install that one.") from error
    except MALFORMED as error:
        raise ExportError(f"{path} is damaged ({type(error).__name__}: {error}). {again}") from error
    return manifest


def listed_files(folder: Path) -> set[str]:
    """The files that the manifest of an export names; empty for any other ``manifest.json``."""
    try:
        content = read_json_object(folder / MANIFEST, ExportError)
        return set(content["files"]) if {"format", "layout"} <= content.keys() else set()
    except (ExportError, LookupError, TypeError):
        return set()


def files_of_export(folder: Path) -> set[str]:
    """The files that an export in ``folder``, whole or damaged, may have; empty if there is none."""
    listed = listed_files(folder)
    damaged = os.path.isfile(folder / MANIFEST) and any(
        os.path.isfile(folder / name) for name in (ENCODER, DECODER, ENCODER_ONLY)
    )
    return listed | WRITTEN if listed or damaged else set()


def _manifest(content: dict[str, Any]) -> Manifest:
    """Read a JSON object; raises one of `MALFORMED` where it would lead a runtime astray.

    Its hash is right, so `write_manifest` made it: sizes and types are trusted. Files, the places that a runtime maps,
    and tokens are checked all the same.
    """
    layout = content["layout"]
    for name in ("source", "tokens", "recipe", "rules", "family", "optimized"):
        if not isinstance(content.get(name, {}), dict):
            raise TypeError(f"{name} must be an object, got {content[name]!r:.80}")
    _require_known(content, KNOWN)
    if content.get("family") and (kind := content["family"]["model_type"]) not in FAMILIES:
        raise _UnknownEntry(f"unknown entry family.model_type = {kind!r:.80}")
    dims = T5Dims(**{name: tuple(size) if isinstance(size, list) else size for name, size in content["dims"].items()})
    content = {key: value for key, value in content.items() if key not in ("format", "layout")}
    content |= {"dims": dims, "graphs": {name: _graph(spec) for name, spec in content["graphs"].items()}}
    manifest = Manifest(**content)
    ModelSpec.of_manifest(manifest)  # refuses rules of another shape
    files = manifest.files
    if layout != LAYOUT or manifest.graphs != _specs(dims, manifest.recipe):
        raise ValueError("its graphs are not those of its sizes")
    if not manifest.graphs.keys() <= files.keys() or any(
        name in ("", "..") or Path(name).name != name for name in files
    ):
        raise ValueError(f"its files are {list(files)}")
    shortlist = manifest.shortlist
    if shortlist and (SHORTLIST not in files or _graph(shortlist) != shortlist_spec(dims)):
        raise ValueError(f"its {SHORTLIST} is missing, or not that of its sizes")
    if manifest.step and (STEP not in files or _graph(manifest.step) != step_spec(dims, shortlist=bool(shortlist))):
        raise ValueError(f"its {STEP} is missing, or not that of its sizes")
    for place in (*manifest.shared.values(), *(shortlist[part] for part in ("rows", "bias") if part in shortlist)):
        end = place["offset"] + math.prod(place["shape"]) * ELEMENT_BYTES[place["dtype"]]
        if min(place["offset"] + 1, *place["shape"]) < 1 or end > files[WEIGHTS]["size_bytes"]:
            raise ValueError(f"a weight outside of {WEIGHTS} is described by {place}")
    for name, value in {**manifest.tokens, **manifest.rules}.items():
        if name.endswith(("token_id", "token_ids", "_tokens")) and name != "min_new_tokens":
            for token in value if isinstance(value, list) else [value]:
                if not 0 <= token < dims.vocab_size:
                    raise ValueError(f"{name} is {token!r:.80}, and the vocabulary has {dims.vocab_size} tokens")
    return manifest


def _require_known(content: Any, known: Mapping[str, Any] | None, where: str = "") -> None:
    """Raise ``_UnknownEntry`` with the path of an entry that is not in `KNOWN`; a list's elements are all alike."""
    if isinstance(content, list):
        for element in content:
            _require_known(element, known, where)
    elif isinstance(content, dict) and known is not None:
        for name, entry in content.items():
            if name not in known and "*" not in known:
                raise _UnknownEntry(f"unknown entry {f'{where}{name}'!r:.80}")
            _require_known(entry, known.get(name, known.get("*")), f"{where}{name}.")


def _specs(dims: T5Dims, recipe: Mapping[str, Any]) -> dict[str, GraphSpec]:
    """The graphs' inputs and outputs; the KV cache has the recipe's float type."""
    if not dims.decoder_layers:
        return {ENCODER_ONLY: encoder_only_spec(dims)}
    dtype = recipe.get("floats", "float32")
    return {ENCODER: encoder_spec(dims, dtype), DECODER: decoder_spec(dims, dtype)}


def _graph(content: Mapping[str, Any]) -> GraphSpec:
    sides = (
        tuple(TensorSpec(tensor["name"], tensor["dtype"], tuple(tensor["shape"])) for tensor in content[side])
        for side in ("inputs", "outputs")
    )
    return GraphSpec(*sides)


def _check_file(path: Path, entry: Mapping[str, Any], *, verify: bool, again: str) -> None:
    size = check_file(path, ExportError, again)
    if size != entry["size_bytes"]:
        raise ExportError(f"{path} has {size} bytes instead of {entry['size_bytes']}. {again}")
    try:
        altered = verify and describe_file(path)["sha256"] != entry["sha256"]
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror or error}. {again}") from error
    if altered:
        raise ExportError(f"{path} was altered: its hash is not the one in {MANIFEST}. {again}")
