"""Export a T5 to the two-graph layout: a folder with both graphs, the configuration, the tokenizer and a manifest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from t5accel import machine
from t5accel.checkpoints import T5Dims, load_t5
from t5accel.decoding.backend import as_count
from t5accel.errors import ExportError, InputError
from t5accel.graphs.builder import OPSET, GraphBuilder
from t5accel.graphs.contract import DECODER, ENCODER, WEIGHTS, as_folder
from t5accel.graphs.manifest import Manifest, files_of_export, read_manifest
from t5accel.graphs.staging import locked, staged
from t5accel.graphs.t5_graphs import T5Weights, decoder_graph, encoder_graph

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LARGEST_INSIDE = 2_000_000_000  # bytes; one ONNX file cannot hold more than 2 GiB
ALIGNMENT = 4096  # so that weights in their own file can be mapped into memory page by page
FP32 = {"name": "fp32"}


def export_t5(
    model: PreTrainedModel | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    name: str | None = None,
    external_threshold_bytes: int = LARGEST_INSIDE,
    overwrite: bool = False,
    progress: bool = False,
) -> Manifest:
    """Write ``encoder.onnx`` and ``decoder.onnx`` in fp32, with all that is needed to run them without torch.

    The folder is there whole or not at all, whenever the process is killed. Two processes that export the same model to
    the same folder do the work once. An export of the same model that is already there is checked and kept.

    Args:
        model: a T5-like model, or a name that `checkpoints.load_t5` knows.
        folder: takes the export; made if it is missing.
        tokenizer: saved beside the graphs; by default that of a model given by name.
        name: of the checkpoint, for the manifest; by default the name given, or the class.
        external_threshold_bytes: if the weights of a graph are more, those of both graphs lie in one file beside them,
            each once; at most 2 GB, which is what an ONNX file can hold.
        overwrite: replace another export that is there. A folder that is none, or that holds other files too, is never
            replaced.
        progress: show a bar on standard error.

    Raises:
        ExportError: the folder is taken, or cannot be written (no space, no permission, beneath a file); nothing is
            left of the attempt.
        InputError: another argument is wrong.
        NotT5Error, UnknownModelError, ModelUnavailableError: there is no such model.

    >>> from tempfile import TemporaryDirectory
    >>> from t5accel.lively import random_t5
    >>> model = random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    >>> with TemporaryDirectory() as folder:
    ...     export_t5(model, f"{folder}/tiny").files.keys()
    dict_keys(['config.json', 'decoder.onnx', 'encoder.onnx', 'generation_config.json'])
    """
    threshold = as_count(external_threshold_bytes, "external_threshold_bytes", at_least=0)
    if threshold > LARGEST_INSIDE:
        raise InputError(f"external_threshold_bytes is {threshold}; an ONNX file holds at most {LARGEST_INSIDE}.")
    target = _target(folder)
    if name is not None and not isinstance(name, str):
        raise InputError(f"name is {name!r}; give a text.")
    if isinstance(model, str | os.PathLike):
        name = name or os.fspath(model)
        model, own_tokenizer = load_t5(model)
        tokenizer = own_tokenizer if tokenizer is None else tokenizer
    name = name or type(model).__name__
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise InputError(f"tokenizer is {tokenizer!r:.80}; give one of transformers, which can be saved.")
    weights = t5_weights(model)
    # What is no T5 is noticed here, before anything is written.
    graphs = {ENCODER: encoder_graph(weights), DECODER: decoder_graph(weights)}
    layout = WeightsFile.plan(graphs, threshold)
    manifest = Manifest(
        source={"name": name, "sha256": source_hash(model, weights)}, dims=weights.dims, tokens=_tokens(model),
        recipe=FP32, opset=OPSET, versions=machine.versions(), shared=layout.shared(graphs),
    )  # fmt: skip
    with locked(target):
        if _occupied(target):
            if _same(target, manifest, external=bool(layout.places), tokenizer=tokenizer is not None):
                return read_manifest(target, verify=False)
            _refuse_unless_replaceable(target, overwrite)
        with staged(target) as partial, _bar(progress, f"exporting {name}") as bar:
            _write_graphs(partial, graphs, layout, bar)
            # Not save_pretrained: it warns of, or refuses, settings that published models have.
            model.config.to_json_file(partial / "config.json")
            model.generation_config.to_json_file(partial / "generation_config.json")
            if tokenizer is not None:
                _save_tokenizer(tokenizer, partial)
            manifest.write(partial)
        return read_manifest(target, verify=False)


def t5_weights(model: PreTrainedModel) -> T5Weights:
    """A model's weights as fp32 numpy arrays, which share memory with it where they can, and its sizes.

    Raises:
        NotT5Error: the model is of another kind.
        InputError: its weights are on the meta device, where they have no values.
    """
    import torch

    dims = T5Dims.of(model)
    if any(weight.is_meta for weight in model.parameters()):
        raise InputError("The model's weights are on torch's meta device, where they have no values: load them first.")
    # Each parameter once, under its first name: tied ones are shared.weight.
    arrays = {
        key: value.detach().to("cpu", torch.float32).numpy()
        for key, value in model.named_parameters()
        if value.is_floating_point()
    }
    stacks = (("encoder", model.encoder), ("decoder", model.decoder))
    attentions = {f"{n}.{i}": b.layer[0].SelfAttention for n, stack in stacks for i, b in enumerate(stack.block)}
    config = model.config
    return T5Weights(
        arrays=arrays, dims=dims, activation=config.dense_act_fn, norm_epsilon=config.layer_norm_epsilon,
        buckets=config.relative_attention_num_buckets, max_distance=config.relative_attention_max_distance,
        logit_scale=logit_scale(model),
        pruned_heads={key: tuple(sorted(getattr(a, "pruned_heads", ()))) for key, a in attentions.items()},
    )  # fmt: skip


def logit_scale(model: PreTrainedModel) -> float:
    """What this model multiplies the decoder's output by before its head: d_model ** -0.5 or 1.

    Which one depends on the kind, on the configuration and on the release of transformers, so the model is asked.
    """
    from unittest.mock import patch

    import torch
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

    # Ones in place of the decoder's output, and in fp64, whatever the precision, the mode and the heads of the model.
    ones = torch.ones((1, 1, model.config.d_model), dtype=torch.float64)
    decoded = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=ones)
    start = torch.zeros((1, 1), dtype=torch.long)
    with (
        torch.inference_mode(),
        patch.object(model.decoder, "forward", lambda *_, **__: decoded),
        patch.object(model.lm_head, "forward", lambda hidden: hidden),
    ):
        scaled = model(encoder_outputs=(ones,), decoder_input_ids=start, return_dict=True).logits
    return float(scaled[0, 0, 0])


def source_hash(model: PreTrainedModel, weights: T5Weights) -> str:
    """The sha256 of a checkpoint: its sizes, what shapes its graphs, its special tokens and all its weights.

    It is that of the values and not of a file, so that a model saved in another format has the same one.
    """
    facts = {field.name: getattr(weights, field.name) for field in fields(weights) if field.name != "arrays"}
    facts |= {"dims": asdict(weights.dims), "tokens": _tokens(model)}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for key in sorted(weights.arrays):
        digest.update(key.encode())
        digest.update(np.ascontiguousarray(weights.arrays[key]).data)
    return digest.hexdigest()


def _tokens(model: PreTrainedModel) -> dict[str, int]:
    keys = ("pad_token_id", "eos_token_id", "decoder_start_token_id")
    return {key: as_count(getattr(model.config, key), f"model.config.{key}", at_least=0) for key in keys}


def _target(folder: str | os.PathLike[str]) -> Path:
    """Where links lead to, so that one folder has one lock, and it is the folder that is replaced and not a link."""
    try:
        target = as_folder(folder).resolve()
        around = Path.cwd().is_relative_to(target)
    except (OSError, RuntimeError) as error:  # a loop of links, a working folder that is gone
        raise ExportError(f"{folder} cannot be written to: {error}") from error
    if around:
        raise ExportError(f"{target} is where this process works, and cannot be replaced: give another folder.")
    return target


def _occupied(target: Path) -> bool:
    try:
        return target.exists() and (not target.is_dir() or any(target.iterdir()))
    except OSError as error:
        raise ExportError(f"{target} cannot be read: {error}") from error


def _same(target: Path, manifest: Manifest, *, external: bool, tokenizer: bool) -> bool:
    """Whether an export of this very model lies there, whole, and with all that is asked for."""
    try:
        there = read_manifest(target)
    except ExportError:
        return False
    if (WEIGHTS in there.files) != external or (tokenizer and "tokenizer_config.json" not in there.files):
        return False
    deciding = [
        (m.source["sha256"], m.recipe, m.opset, m.versions.get("t5accel")) for m in (there, manifest)
    ]  # fmt: skip
    return deciding[0] == deciding[1]


def _refuse_unless_replaceable(target: Path, overwrite: bool) -> None:
    ours = files_of_export(target)
    if not ours:
        raise ExportError(f"{target} is no export of t5accel and not empty, so it is kept: give another folder.")
    others = sorted({path.name for path in target.iterdir()} - ours)
    if others:
        raise ExportError(f"{target} also holds {', '.join(others[:3])}, so it is kept: give another folder.")
    if not overwrite:
        raise ExportError(
            f"{target} holds another export, or a damaged one: give another folder, or overwrite=True (--overwrite)."
        )


def _bar(progress: bool, description: str) -> Any:
    from tqdm import tqdm

    return tqdm(total=0, unit="B", unit_scale=True, unit_divisor=1000, desc=description, disable=not progress)


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # a full disk, too: the library raises nothing more exact
        raise ExportError(f"The tokenizer could not be saved: {error}. Nothing was left behind.") from error


def _write_graphs(folder: Path, graphs: Mapping[str, GraphBuilder], layout: WeightsFile, bar: Any) -> None:
    sizes = {name: 0 if layout.places else graph.size_bytes for name, graph in graphs.items()}
    bar.reset(total=sum(sizes.values()) + sum(array.nbytes for array, _ in layout.places.values()))
    if layout.places:
        layout.write(folder / WEIGHTS, bar)
    for name, graph in graphs.items():
        (folder / name).write_bytes(graph.proto(layout.references()).SerializeToString())
        bar.update(sizes[name])


@dataclass
class WeightsFile:
    """Where each weight of several graphs lies in the one file that they share; nowhere if all are in the graphs."""

    places: dict[str, tuple[np.ndarray, int]] = field(default_factory=dict)
    size_bytes: int = 0

    @classmethod
    def plan(cls, graphs: Mapping[str, GraphBuilder], threshold: int) -> WeightsFile:
        """One after the other, each name once. Small ones stay inside: shapes have to be known when a graph is read."""
        layout = cls()
        if max(graph.size_bytes for graph in graphs.values()) <= threshold:
            return layout
        for graph in graphs.values():
            for name, array in graph.weights.items():
                if array.nbytes >= ALIGNMENT and name not in layout.places:
                    layout.places[name] = array, layout.size_bytes
                    layout.size_bytes += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        return layout

    def references(self) -> dict[str, tuple[str, int, int]]:
        """For `GraphBuilder.proto`: file, offset and length of each."""
        return {name: (WEIGHTS, offset, array.nbytes) for name, (array, offset) in self.places.items()}

    def shared(self, graphs: Mapping[str, GraphBuilder]) -> dict[str, dict[str, Any]]:
        """For `Manifest`: where those lie that every graph reads."""
        return {
            name: {"offset": offset, "shape": list(array.shape), "dtype": array.dtype.name}
            for name, (array, offset) in self.places.items()
            if all(name in graph.weights for graph in graphs.values())
        }

    def write(self, path: Path, bar: Any) -> None:
        """Write them in order, and say how far it is."""
        with path.open("wb") as file:
            for array, offset in self.places.values():
                file.seek(offset)
                file.write(np.ascontiguousarray(array).data)
                bar.update(array.nbytes)
            file.truncate(self.size_bytes)
