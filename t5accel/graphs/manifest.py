"""The manifest of an export: its origin, its graphs' inputs and outputs, and the hash of every file.

It is written last and read first, so that missing, truncated and altered files are noticed before they are run.
Programs in other languages need nothing else to run the graphs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from t5accel.checks import check_file, read_json_object
from t5accel.errors import ExportError
from t5accel.graphs.contract import (
    DECODER,
    ENCODER,
    MANIFEST,
    SHORTLIST,
    STEP,
    WEIGHTS,
    GraphSpec,
    TensorSpec,
    as_folder,
    decoder_spec,
    encoder_spec,
    shortlist_spec,
    step_spec,
)
from t5accel.models.sizes import T5Dims

FORMAT = 2  # of the manifest and of the graphs' contract; a change that older code cannot read raises it
LAYOUT = "two graphs"
ELEMENT_BYTES = {"float32": 4, "float16": 2, "int8": 1, "uint8": 1}
# All files that an export may hold, for when its manifest is damaged.
WRITTEN = set(
    f"""
    {ENCODER} {DECODER} {SHORTLIST} {STEP} {WEIGHTS} {MANIFEST} config.json generation_config.json
    tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json spiece.model sentencepiece.bpe.model
    source.spm target.spm vocab.json target_vocab.json merges.txt vocab.txt tokenizer.model
    """.split()
)
# The JSON types of what a runtime reads: `...` stands for every key of an object, a list for its elements.
_TYPES = {
    "source": {"name": str, "sha256": str},
    "dims": {
        **dict.fromkeys(("vocab_size", "d_model", "d_kv"), int),
        **dict.fromkeys(("encoder_heads", "decoder_heads", "cross_heads", "encoder_ff", "decoder_ff"), [int]),
        **dict.fromkeys(("gated", "tied"), bool),
    },
    "tokens": dict.fromkeys(("pad_token_id", "eos_token_id", "decoder_start_token_id"), int),
    "recipe": {"name": str},
    "opset": int,
    "versions": dict,
    "shared": {...: {"offset": int, "shape": [int], "dtype": str}},
    **dict.fromkeys(("optimized", "shortlist", "step", "family", "rules"), dict),
    "graphs": {...: dict},
    "files": {...: {"sha256": str, "size_bytes": int}},
}
_OPTIMIZED = {"tool": str, "level": str, "onnxruntime": str, "machine": {...: str}, "contrib_operators": [str]}
_SHORTLIST = {"rows": dict, "largest_row": float, "largest_error": float}
_FAMILY = {"model_type": str, "positions": int, "source_vocab_size": int}
_RULES = {  # each is optional, as in `decoding.token_constraints.TokenConstraints`
    "forced_bos_token_id": int,
    "forced_eos_token_id": int,
    "suppress_tokens": [int],
    "eos_token_ids": [int],
    "min_length": int,
    "min_new_tokens": int,
    "num_beams": int,
    "length_penalty": float,
    "renormalize_logits": bool,
    "unsupported": [str],
}


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
    def size_bytes(self) -> int:
        """Of all files together."""
        return sum(entry["size_bytes"] for entry in self.files.values())

    @property
    def graph_bytes(self) -> int:
        """Of the graphs and of the weights beside them."""
        graphs = (ENCODER, DECODER, SHORTLIST, STEP, WEIGHTS)
        return sum(self.files[name]["size_bytes"] for name in graphs if name in self.files)

    def write(self, folder: Path) -> None:
        """Hash the files in ``folder`` and write ``manifest.json`` beside them.

        Raises ``ExportError`` for a model whose export could not be read again, such as one with token ids outside its
        vocabulary.
        """
        files = {path.name: describe_file(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST}
        graphs = _specs(self.dims, self.recipe)
        content = {"format": FORMAT, "layout": LAYOUT, **asdict(self)}
        content |= {"graphs": {name: asdict(spec) for name, spec in graphs.items()}, "files": files}
        try:
            _manifest(json.loads(json.dumps(content)))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
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
            raise ExportError(f"{path} must have format {FORMAT}, got {found!r:.80}. {again}")
        if content.pop("sha256", None) != _sha256(content):
            raise ExportError(f"{path} was altered: its hash is not the one of its content. {again}")
        manifest = _manifest(content)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:  # JSON of another shape
        raise ExportError(f"{path} is damaged ({type(error).__name__}: {error}). {again}") from error
    for name, entry in manifest.files.items():
        _check_file(folder / name, entry, verify=verify, again=again)
    return manifest


def files_of_export(folder: Path) -> set[str]:
    """The files that an export in ``folder``, whole or damaged, may have; empty if there is none."""
    try:
        content = read_json_object(folder / MANIFEST, ExportError)
        listed = set(content["files"]) if {"format", "layout"} <= content.keys() else set()
    except (ExportError, LookupError, TypeError):
        listed = set()
    damaged = os.path.isfile(folder / MANIFEST) and any(os.path.isfile(folder / name) for name in (ENCODER, DECODER))
    return listed | WRITTEN if listed or damaged else set()


def _manifest(content: dict[str, Any]) -> Manifest:
    """The manifest in a JSON object whose hash is right; raises what JSON of another shape leads to."""
    _check_type("manifest", content, _TYPES)
    dims = T5Dims(**{name: tuple(size) if isinstance(size, list) else size for name, size in content["dims"].items()})
    files = content["files"]
    for stack in ((dims.encoder_heads, dims.encoder_ff), (dims.decoder_heads, dims.cross_heads, dims.decoder_ff)):
        if not stack[0] or len({len(layers) for layers in stack}) > 1 or min(map(min, stack)) < 1:
            raise ValueError(f"its layers are {stack!r:.200}")
    if min(dims.vocab_size, dims.d_model, dims.d_kv) < 1:
        raise ValueError(f"its sizes are {dims!r:.200}")
    names = ("source", "recipe", "opset", "versions", "shared", "optimized", "shortlist", "step", "family", "rules")
    manifest = Manifest(
        dims=dims,
        tokens={name: content["tokens"][name] for name in _TYPES["tokens"]},
        graphs={name: _graph(spec) for name, spec in content["graphs"].items()},
        files=files,
        **{name: content[name] for name in names},
    )
    if manifest.recipe.get("floats", "float32") not in ("float32", "float16"):
        raise ValueError(f"its recipe is {manifest.recipe!r:.200}")
    if content["layout"] != LAYOUT or manifest.graphs != _specs(dims, manifest.recipe):
        raise ValueError("its graphs are not those of its sizes")
    if not {ENCODER, DECODER} <= files.keys() or any(name in ("", "..") or Path(name).name != name for name in files):
        raise ValueError(f"its files are {list(files)}")
    for entry in manifest.shared.values():
        _check_place(entry, files)
    if manifest.optimized:
        _check_type("optimized", manifest.optimized, _OPTIMIZED)
    if manifest.shortlist:
        _check_shortlist(manifest.shortlist, dims, files)
    if manifest.step and (
        STEP not in files or _graph(manifest.step) != step_spec(dims, shortlist=bool(manifest.shortlist))
    ):
        raise ValueError(f"its {STEP} is missing, or not that of its sizes")
    if manifest.family:
        _check_type("family", manifest.family, _FAMILY)
        if min(manifest.family["positions"], manifest.family["source_vocab_size"]) < 1:
            raise ValueError(f"its family is {manifest.family!r:.200}")
    _check_rules(manifest.rules)
    _check_tokens({**manifest.tokens, **manifest.rules}, dims.vocab_size)
    return manifest


def _check_type(name: str, value: Any, kind: Any) -> None:
    if isinstance(kind, dict):
        _check_type(name, value, dict)
        for key, inner in kind.items():
            for one in value if key is ... else [key]:
                _check_type(f"{name}.{one}", value[one], inner)
    elif isinstance(kind, list):
        _check_type(name, value, list)
        for one in value:
            _check_type(name, one, kind[0])
    elif type(value) is not kind:  # not isinstance: true is no number
        raise TypeError(f"{name:.80} must be of type {kind.__name__}, got {value!r:.80}")


def _check_place(entry: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """What a runtime maps must lie within the file of weights."""
    _check_type("place", entry, {"offset": int, "shape": [int], "dtype": str})
    if not entry["shape"] or min(entry["offset"] + 1, *entry["shape"]) < 1:
        raise ValueError(f"a shared weight is described by {entry}")
    if entry["offset"] + math.prod(entry["shape"]) * ELEMENT_BYTES[entry["dtype"]] > files[WEIGHTS]["size_bytes"]:
        raise ValueError(f"a shared weight lies outside of {WEIGHTS}")


def _check_shortlist(entry: Mapping[str, Any], dims: T5Dims, files: Mapping[str, Any]) -> None:
    _check_type("shortlist", entry, _SHORTLIST)
    shapes = {"rows": [dims.vocab_size, dims.d_model], "bias": [dims.vocab_size]}
    for part in shapes.keys() & entry.keys():
        _check_place(entry[part], files)
        if entry[part]["shape"] != shapes[part] or entry[part]["dtype"] != "float32":
            raise ValueError(f"the {part} of its shortlist is described by {entry[part]}")
    bounds = entry["largest_row"], entry["largest_error"]
    if SHORTLIST not in files or not all(math.isfinite(bound) and bound >= 0 for bound in bounds):
        raise ValueError(f"its shortlist has no {SHORTLIST}, or the bounds {bounds}")
    if _graph(entry) != shortlist_spec(dims):
        raise ValueError("the graph of its shortlist is not that of its sizes")


def _check_rules(rules: Mapping[str, Any]) -> None:
    for name, value in rules.items():
        if name != "early_stopping":
            _check_type(name, value, _RULES[name])
        elif value != "never" and type(value) is not bool:
            raise TypeError(f"early_stopping must be true, false or 'never', got {value!r:.80}")
    if min((rules.get(name, 0) for name in ("min_length", "min_new_tokens", "num_beams")), default=0) < 0:
        raise ValueError(f"its rules are {rules!r:.200}")


def _check_tokens(entry: Mapping[str, Any], vocab_size: int) -> None:
    for name, value in entry.items():
        if name.endswith(("token_id", "token_ids", "_tokens")) and name != "min_new_tokens":
            for token in value if isinstance(value, list) else [value]:
                if not 0 <= token < vocab_size:
                    raise ValueError(f"{name} is {token!r:.80}, and the vocabulary has {vocab_size} tokens")


def _specs(dims: T5Dims, recipe: Mapping[str, Any]) -> dict[str, GraphSpec]:
    """The two graphs' inputs and outputs; the KV cache has the recipe's float type."""
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
