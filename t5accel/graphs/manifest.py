"""The manifest of an export: where it comes from, what goes in and out, and the hash of every file.

It is written last and read first, so that a program in any language can run the graphs without reading our code, and so
that a file which is missing, cut short or altered is noticed before it gives a wrong answer. A hash of its own covers
the manifest itself.
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

from t5accel.checks import as_count, check_file, read_json_object
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
TOKENS = ("pad_token_id", "eos_token_id", "decoder_start_token_id")
# Of `token_constraints.TokenConstraints`: the fields with one token, those with several, and the others by their types.
RULE_TOKEN, RULE_TOKENS = {"forced_bos_token_id", "forced_eos_token_id"}, {"suppress_tokens", "eos_token_ids"}
RULES = {"min_length": int, "min_new_tokens": int, "num_beams": int, "length_penalty": float, "unsupported": list,
         "renormalize_logits": bool}  # fmt: skip
OPTIMIZED = {"tool": str, "level": str, "onnxruntime": str, "machine": dict, "contrib_operators": list}
# What an export may hold, for when its manifest cannot be asked any more.
WRITTEN = {ENCODER, DECODER, SHORTLIST, STEP, WEIGHTS, MANIFEST, "config.json", "generation_config.json",
           "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
           "spiece.model", "sentencepiece.bpe.model", "source.spm", "target.spm", "vocab.json", "target_vocab.json",
           "merges.txt", "vocab.txt", "tokenizer.model"}  # fmt: skip


@dataclass(frozen=True)
class Manifest:
    """An export's own description, the content of ``manifest.json``.

    Attributes:
        source: ``{"name", "sha256"}`` of the checkpoint; the hash covers its configuration and its weights.
        dims: the model's sizes.
        tokens: ``pad_token_id``, ``eos_token_id`` and ``decoder_start_token_id``.
        recipe: how the weights are stored, ``{"name": "fp32"}``.
        opset: of both graphs.
        versions: of the libraries that wrote it.
        shared: where in ``weights.data`` those weights lie that both graphs read, by name ``{"offset", "shape",
            "dtype"}``: one mapping of them into memory serves both sessions.
        optimized: how the graphs were optimised after they were built, and where that may run: see `portability`.
            Empty if they were not.
        shortlist: what goes into ``decoder_shortlist.onnx`` and out of it, ``"inputs"`` and ``"outputs"``; where in
            ``weights.data`` the head's ``"rows"`` lie, and its ``"bias"`` if it has one, as in ``shared``; and the
            ``"largest_row"`` and ``"largest_error"`` of its copy in 8 bits. Empty if there is no such graph.
        step: what goes into ``decoder_step.onnx`` and out of it; empty likewise.
        family: of a model that is not T5-shaped, its ``"model_type"``, for how many ``"positions"`` it is made, and the
            ``"source_vocab_size"``, which may be another than that of the logits. Empty likewise.
        rules: what the model asks of every answer, as `TokenConstraints.to_json` writes it: forced,
            suppressed and further end tokens, lengths, beams, and what our own loops do not apply; empty if it asks
            nothing.
        graphs: by file name what goes into the two graphs and out of them.
        files: by name ``{"sha256", "size_bytes"}`` of every file in the folder but this one.
    """

    source: Mapping[str, str]
    dims: T5Dims
    tokens: Mapping[str, int]
    recipe: Mapping[str, Any]
    opset: int
    versions: Mapping[str, str]
    shared: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    optimized: Mapping[str, Any] = field(default_factory=dict)
    shortlist: Mapping[str, Any] = field(default_factory=dict)
    step: Mapping[str, Any] = field(default_factory=dict)
    family: Mapping[str, Any] = field(default_factory=dict)
    rules: Mapping[str, Any] = field(default_factory=dict)
    graphs: Mapping[str, GraphSpec] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

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
        """Hash what is in ``folder`` and write ``manifest.json`` beside it.

        Raises:
            ExportError: the model is not one that can be read again, as with token ids outside its vocabulary.
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
    """Write ``manifest.json`` with the hash of ``content``, which may have been edited.

    The hash, ``"sha256"``, is of all other entries as JSON with sorted keys and without spaces.
    """
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

    Args:
        folder: what `export.export_model` wrote.
        verify: hash every file (about a second per gigabyte); without it only their sizes are compared.

    Raises:
        ExportError: there is no export, it is of another format, or one of its files is missing, cut short or altered;
            the file is named.
        InputError: ``folder`` is no path.
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
            raise ExportError(f"{path} has format {found!r:.80}, and this t5accel reads {FORMAT}. {again}")
        if content.pop("sha256", None) != _sha256(content):
            raise ExportError(f"{path} was altered: its hash is not the one of its content. {again}")
        manifest = _manifest(content)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:  # JSON of another shape
        raise ExportError(f"{path} is damaged ({type(error).__name__}: {error}). {again}") from error
    for name, entry in manifest.files.items():
        _check_file(folder / name, entry, verify=verify, again=again)
    return manifest


def files_of_export(folder: Path) -> set[str]:
    """The names of all that an export, whole or damaged, may have put into ``folder``; empty if there is none."""
    try:
        content = read_json_object(folder / MANIFEST, ExportError)
        listed = set(content["files"]) if {"format", "layout"} <= content.keys() else set()
    except (ExportError, LookupError, TypeError):
        listed = set()
    damaged = os.path.isfile(folder / MANIFEST) and any(os.path.isfile(folder / name) for name in (ENCODER, DECODER))
    return listed | WRITTEN if listed or damaged else set()


def _manifest(content: dict[str, Any]) -> Manifest:
    """Checked for the layout and for shapes: what a runtime is told to read has to lie where it says."""
    files, dims = content["files"], _dims(content["dims"])
    entries = ("source", "recipe", "opset", "versions", "shared", "optimized", "shortlist", "step", "family", "rules")
    manifest = Manifest(
        dims=dims,
        tokens={name: content["tokens"][name] for name in TOKENS},
        graphs={name: _graph(spec) for name, spec in content["graphs"].items()},
        files=files,
        **{key: content[key] for key in entries},
    )
    _require({"name": str, "sha256": str}, manifest.source)
    _require({"name": str}, manifest.recipe)
    _require({"opset": int, "versions": dict}, vars(manifest))
    if manifest.recipe.get("floats", "float32") not in ("float32", "float16"):
        raise ValueError(f"its recipe is {manifest.recipe!r:.200}")
    if content["layout"] != LAYOUT or manifest.graphs != _specs(dims, manifest.recipe):
        raise ValueError("its graphs are not those of its sizes")
    if not {ENCODER, DECODER} <= files.keys() or any(name in ("", "..") or Path(name).name != name for name in files):
        raise ValueError(f"its files are {list(files)}")
    for entry in files.values():
        _require({"sha256": str, "size_bytes": int}, entry)
    for entry in manifest.shared.values():
        _require_place(entry, files)
    _require_optimized(manifest.optimized)
    _require_shortlist(manifest.shortlist, dims, files)
    _require_step(manifest.step, dims, files, shortlist=bool(manifest.shortlist))
    _require({"family": dict, "rules": dict}, vars(manifest))
    if manifest.family:
        _require({"model_type": str}, manifest.family)
        for name in ("positions", "source_vocab_size"):
            as_count(manifest.family[name], name, at_least=1)
    _require_rules(manifest.rules)
    _require(dict.fromkeys(TOKENS, int), manifest.tokens)
    _require_tokens({**manifest.tokens, **manifest.rules}, dims.vocab_size)
    return manifest


def _dims(sizes: Mapping[str, Any]) -> T5Dims:
    """Positive sizes, as many of them as a stack has layers."""
    dims = T5Dims(**{name: tuple(size) if isinstance(size, list) else size for name, size in sizes.items()})
    _require({"gated": bool, "tied": bool}, sizes)
    for name in ("vocab_size", "d_model", "d_kv"):
        as_count(sizes[name], name, at_least=1)
    for stack in (("encoder_heads", "encoder_ff"), ("decoder_heads", "cross_heads", "decoder_ff")):
        _require(dict.fromkeys(stack, list), sizes)
        if not sizes[stack[0]] or len({len(sizes[name]) for name in stack}) > 1:
            raise ValueError(f"its layers are { ({name: sizes[name] for name in stack})!r:.200}")
        for name in stack:
            for size in sizes[name]:
                as_count(size, name, at_least=1)
    return dims


def _require_tokens(entry: Mapping[str, Any], vocab_size: int) -> None:
    """That each token id, alone or in a list, lies in the vocabulary."""
    for name, value in entry.items():
        if name.endswith(("token_id", "token_ids", "_tokens")) and name != "min_new_tokens":
            for token in value if isinstance(value, list) else [value]:
                if type(token) is not int or not 0 <= token < vocab_size:
                    raise ValueError(f"{name} is {token!r:.80}, and the vocabulary has {vocab_size} tokens")


def _specs(dims: T5Dims, recipe: Mapping[str, Any]) -> dict[str, GraphSpec]:
    """What goes in and out: keys and values are of the recipe's floats."""
    dtype = recipe.get("floats", "float32")
    return {ENCODER: encoder_spec(dims, dtype), DECODER: decoder_spec(dims, dtype)}


def _require_place(entry: Any, files: Mapping[str, Any]) -> None:
    """That it says where in the file of weights something lies."""
    numbers = [entry["offset"] + 1, *entry["shape"]]
    if len(numbers) < 2 or not all(type(number) is int and number > 0 for number in numbers):
        raise ValueError(f"a shared weight is described by {entry}")
    if entry["offset"] + math.prod(entry["shape"]) * ELEMENT_BYTES[entry["dtype"]] > files[WEIGHTS]["size_bytes"]:
        raise ValueError(f"a shared weight lies outside of {WEIGHTS}")


def _require_shortlist(entry: Any, dims: T5Dims, files: Mapping[str, Any]) -> None:
    _require({"shortlist": dict}, {"shortlist": entry})
    if not entry:
        return
    _require({"rows": dict, "largest_row": float, "largest_error": float}, entry)
    shapes = {"rows": [dims.vocab_size, dims.d_model], "bias": [dims.vocab_size]}
    for part in shapes.keys() & entry.keys():
        _require_place(entry[part], files)
        if entry[part]["shape"] != shapes[part] or entry[part]["dtype"] != "float32":
            raise ValueError(f"the {part} of its shortlist is described by {entry[part]}")
    bounds = entry["largest_row"], entry["largest_error"]
    if SHORTLIST not in files or not all(math.isfinite(bound) and bound >= 0 for bound in bounds):
        raise ValueError(f"its shortlist has no {SHORTLIST}, or the bounds {bounds}")
    if _graph(entry) != shortlist_spec(dims):
        raise ValueError("the graph of its shortlist is not that of its sizes")


def _require_step(entry: Any, dims: T5Dims, files: Mapping[str, Any], *, shortlist: bool) -> None:
    _require({"step": dict}, {"step": entry})
    if entry and (STEP not in files or _graph(entry) != step_spec(dims, shortlist=shortlist)):
        raise ValueError(f"its {STEP} is missing, or not that of its sizes")


def _require_rules(entry: Mapping[str, Any]) -> None:
    """Types and names alone: `_require_tokens` looks at the tokens."""
    _require(dict.fromkeys(entry.keys() & RULE_TOKENS, list) | dict.fromkeys(entry.keys() & RULE_TOKEN, int), entry)
    _require({name: RULES[name] for name in entry.keys() & RULES.keys()}, entry)
    texts = entry.get("unsupported", [])
    _require(dict.fromkeys(range(len(texts)), str), texts)
    counts = [entry[name] for name in ("min_length", "min_new_tokens", "num_beams") if name in entry]
    stops = entry.get("early_stopping", False)
    known = entry.keys() <= RULE_TOKEN | RULE_TOKENS | RULES.keys() | {"early_stopping"}
    if not (known and min(counts, default=0) >= 0 and (stops == "never" or type(stops) is bool)):
        raise ValueError(f"its rules are {entry!r:.200}")


def _require_optimized(entry: Any) -> None:
    _require({"optimized": dict}, {"optimized": entry})
    if entry:
        _require(OPTIMIZED, entry)
        _require(dict.fromkeys(entry["machine"], str), entry["machine"])
        _require(dict.fromkeys(range(len(entry["contrib_operators"])), str), entry["contrib_operators"])


def _require(kinds: Mapping[Any, type], values: Any) -> None:
    for name, kind in kinds.items():
        if type(values[name]) is not kind:  # not isinstance: true is no number
            raise TypeError(f"{name} is {values[name]!r:.80}")


def _graph(content: Mapping[str, Any]) -> GraphSpec:
    return GraphSpec(*(tuple(_tensor(tensor) for tensor in content[side]) for side in ("inputs", "outputs")))


def _tensor(content: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(content["name"], content["dtype"], tuple(content["shape"]))


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
