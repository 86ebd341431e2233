"""Older layouts, written from the same weights as our two graphs, and read."""

# - "whole": the complete T5 in one graph, without a cache.
# - "onnxt5": encoder and head as graphs; the decoder stays in torch, where it can have a cache (the class OnnxT5 of a
#   post in Hugging Face's forum, 2020; the package onnxt5 has another layout: a decoder graph without a cache).
# - "fastt5": three graphs, encoder, first step and later steps, because a graph takes no missing history (the package
#   fastT5, 2021). The decoder's weights stand there twice.
# - "merged": both decoders in one graph behind an If, so that the weights stand once (``decoder_model_merged`` of
#   Hugging Face's optimum).

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.baselines.layout_graphs import LAYOUTS
from t5accel.checks import as_count, check_file, read_json_object
from t5accel.decoding.token_constraints import constraints_from_config, special_tokens
from t5accel.errors import ExportError, InputError
from t5accel.graphs.atomic_write import locked, staged
from t5accel.graphs.builder import GraphBuilder
from t5accel.graphs.contract import as_folder
from t5accel.graphs.export import source_hash, t5_weights
from t5accel.graphs.export_folder import LARGEST_INSIDE, WeightsLayout, is_occupied, resolve_target
from t5accel.models.load import load_model
from t5accel.models.sizes import T5Dims

if TYPE_CHECKING:
    from transformers import PreTrainedModel


DESCRIPTION = "layout.json"


@dataclass(frozen=True)
class Layout:
    """What a folder says about itself, the content of ``layout.json``."""

    name: str  # of the layout
    source: Mapping[str, str]  # ``{"name", "sha256"}`` of the checkpoint, as in a `Manifest`
    dims: T5Dims  # the model's sizes
    tokens: Mapping[str, int]  # ``pad_token_id``, ``eos_token_id`` and ``decoder_start_token_id``
    files: Mapping[str, int]  # bytes of each file beside it
    rules: Mapping[str, Any]  # what the model asks of every answer, as in a `Manifest`


def export_layout(
    model: PreTrainedModel | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    layout: str,
    *,
    external_threshold_bytes: int = LARGEST_INSIDE,
) -> Layout:
    """Write the graphs of one of these layouts in fp32. The folder is there whole or not at all.

    Args:
        folder: takes the graphs; made if it is missing, and must be empty if it is there.
        layout: ``"whole"``, ``"onnxt5"``, ``"fastt5"`` or ``"merged"``.
        external_threshold_bytes: the weights of a larger graph lie in a file beside it, of its own: no graph of these
            projects shared one. At most 2 GB, which is what an ONNX file can hold.

    >>> from tempfile import TemporaryDirectory
    >>> from t5accel.models.random_init import random_t5
    >>> model = random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    >>> with TemporaryDirectory() as folder:
    ...     export_layout(model, f"{folder}/tiny", "fastt5").files.keys()
    dict_keys(['decoder.onnx', 'encoder.onnx', 'init_decoder.onnx'])
    """
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise InputError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r:.80}.")
    threshold = as_count(external_threshold_bytes, "external_threshold_bytes", at_least=0)
    if threshold > LARGEST_INSIDE:
        raise InputError(f"external_threshold_bytes must be at most {LARGEST_INSIDE} in an ONNX file, got {threshold}.")
    target = resolve_target(folder)
    name = type(model).__name__
    if isinstance(model, str | os.PathLike):
        name = os.fspath(model)
        model, _ = load_model(model)
    weights = t5_weights(model)
    # What is no T5 is noticed here, before anything is written.
    graphs = {file: build(weights) for file, build in LAYOUTS[layout].items()}
    source = {"name": name, "sha256": source_hash(model, weights)}
    with locked(target):
        if is_occupied(target):
            raise ExportError(f"{target} is not empty, so it is kept: give another folder.")
        with staged(target) as partial:
            for file, graph in graphs.items():
                _write(partial / file, graph, threshold)
            files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
            written = Layout(
                layout, source, weights.dims, special_tokens(model), files, constraints_from_config(model).to_json()
            )  # fmt: skip
            (partial / DESCRIPTION).write_text(json.dumps(asdict(written), indent=1) + "\n", encoding="utf-8")
    return written


def read_layout(folder: str | os.PathLike[str], *layouts: str) -> Layout:
    """Read what `export_layout` wrote, and check that its files are there and of their sizes."""
    folder = as_folder(folder)
    again = "Write it again with export_layout(model, an empty folder, layout)."
    try:
        content = read_json_object(folder / DESCRIPTION, ExportError)
        dims = T5Dims(**{key: tuple(size) if isinstance(size, list) else size for key, size in content["dims"].items()})
        found = Layout(**{**content, "dims": dims})
        for name, size in found.files.items():
            if check_file(folder / name, ExportError) != size:
                raise ExportError(f"{folder / name} is not of {size} bytes.")
    except ExportError as error:
        raise ExportError(f"{folder} holds no whole layout: {error} {again}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ExportError(f"{folder / DESCRIPTION} is damaged ({type(error).__name__}: {error}). {again}") from error
    if layouts and found.name not in layouts:
        raise ExportError(f"{folder} must be of the layout {' or '.join(layouts)}, got {found.name!r}.")
    return found


def _write(path: Path, graph: GraphBuilder, threshold: int) -> None:
    plan, beside = WeightsLayout.plan({path.name: graph}, threshold), f"{path.name}.data"
    if plan.places:
        plan.write(path.with_name(beside))
    places = {name: (beside, offset, length) for name, (_, offset, length) in plan.references().items()}
    path.write_bytes(graph.proto(places).SerializeToString())
