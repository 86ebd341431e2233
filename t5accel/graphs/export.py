"""Export a T5 to the two-graph layout: a folder with both graphs, the configuration, the tokenizer and a manifest."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from t5accel import machine
from t5accel.checks import as_count
from t5accel.decoding.token_constraints import constraints_from_config, special_tokens
from t5accel.errors import ExportError, InputError, NotT5Error
from t5accel.graphs.builder import OPSET
from t5accel.graphs.contract import DECODER, ENCODER, SHORTLIST, STEP, shortlist_spec, step_spec
from t5accel.graphs.export_folder import LARGEST_INSIDE, ExportPlan, require_free, resolve_target, write_export
from t5accel.graphs.fused_step import step_graph
from t5accel.graphs.layers import decoder_graph, encoder_graph
from t5accel.graphs.logit_check import check_export
from t5accel.graphs.manifest import Manifest
from t5accel.graphs.shortlist_head import maybe_quantize_head, shortlist_graph
from t5accel.graphs.weights import T5Weights, bart_like_weights, source_vocabulary
from t5accel.models.families import Family
from t5accel.models.load import load_model
from t5accel.models.registry import family_of_model
from t5accel.models.sizes import T5Dims
from t5accel.models.t5_math import logit_scale

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FP32 = {"name": "fp32"}


def export_model(
    model: PreTrainedModel | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    name: str | None = None,
    external_threshold_bytes: int = LARGEST_INSIDE,
    shortlist: bool | None = False,
    step: bool = False,
    overwrite: bool = False,
    progress: bool = False,
    check_logits: bool = True,
) -> Manifest:
    """Write ``encoder.onnx`` and ``decoder.onnx`` in fp32, with all that is needed to run them without torch.

    The folder is there whole or not at all, whenever the process is killed. Two processes that export the same model to
    the same folder do the work once. An export of the same model that is already there is checked and kept.

    Args:
        model: a T5-like model, or a name that `checkpoints.load_model` knows.
        folder: takes the export; made if it is missing.
        tokenizer: saved beside the graphs; by default that of a model given by name.
        name: of the checkpoint, for the manifest; by default the name given, or the class.
        external_threshold_bytes: if the weights of a graph are more, those of both graphs lie in one file beside them,
            each once; at most 2 GB, which is what an ONNX file can hold.
        shortlist: write ``decoder_shortlist.onnx``, too, with which a backend on a CPU finds the likeliest token faster
            (`shortlist`); ``None``: where it pays. All weights then lie in the file beside the graphs, whatever
            ``external_threshold_bytes`` is, and a quarter of the head's bytes is added.
        step: write ``decoder_step.onnx``, too: the decoder for one new token on buffers that stay, in ONNX Runtime's
            fused operators (`graphs.fused_step`), which `backends.ort_static` runs. All weights lie in the file beside
            the graphs, and none is added.
        overwrite: replace another export that is there. A folder that is no export, or that holds other files, too, is
            never replaced.
        progress: show a bar on standard error.
        check_logits: compare the graphs' logits with the model's on one small batch before anything is kept.

    Raises:
        ExportError: the folder is taken, or cannot be written (no space, no permission, beneath a file), or the graphs
            compute something else than the model; nothing is left of the attempt.
        InputError: another argument is wrong.
        NotT5Error, UnknownModelError, ModelUnavailableError: there is no such model, or it has weights that no graph
            reads.
        MissingPackageError: ``check_logits`` needs onnxruntime.

    >>> from tempfile import TemporaryDirectory
    >>> from t5accel.models.random_init import random_t5
    >>> model = random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    >>> with TemporaryDirectory() as folder:
    ...     export_model(model, f"{folder}/tiny").files.keys()
    dict_keys(['config.json', 'decoder.onnx', 'encoder.onnx', 'generation_config.json'])
    """
    threshold = as_count(external_threshold_bytes, "external_threshold_bytes", at_least=0)
    if threshold > LARGEST_INSIDE:
        raise InputError(f"external_threshold_bytes is {threshold}; an ONNX file holds at most {LARGEST_INSIDE}.")
    if not isinstance(step, bool):
        raise InputError(f"step is {step!r:.80}; give True or False.")
    target = resolve_target(folder)
    if name is not None and not isinstance(name, str):
        raise InputError(f"name is {name!r}; give a text.")
    if isinstance(model, str | os.PathLike):
        name = name or os.fspath(model)
        require_free(target, name, overwrite=overwrite)
        model, own_tokenizer = load_model(model)
        tokenizer = own_tokenizer if tokenizer is None else tokenizer
    name = name or type(model).__name__
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise InputError(f"tokenizer is {tokenizer!r:.80}; give one of transformers, which can be saved.")
    weights = model_weights(model)
    # What is no T5 is noticed here, before anything is written.
    head = maybe_quantize_head(weights, shortlist)
    graphs = {ENCODER: encoder_graph(weights), DECODER: decoder_graph(weights, head_by_rows=head is not None)}
    manifest = Manifest(
        source={"name": name, "sha256": source_hash(model, weights)}, dims=weights.dims, tokens=special_tokens(model),
        recipe=FP32, opset=OPSET, versions=machine.versions(), rules=constraints_from_config(model).to_json(),
        family=_family_entry(weights),
    )  # fmt: skip
    exact: dict[str, str] = {}
    if step:
        graphs[STEP], threshold = shortlist_graph(weights, head, step=True) if head else step_graph(weights), 0
        manifest = replace(manifest, step=asdict(step_spec(weights.dims, shortlist=head is not None)))
    if head:
        graphs[SHORTLIST], threshold = shortlist_graph(weights, head), 0
        exact = {"rows": weights.head} | ({"bias": weights.head_bias} if weights.head_bias else {})
        manifest = replace(manifest, shortlist={**asdict(shortlist_spec(weights.dims)), **head.bounds})

    def add_files(partial: Path) -> None:
        # Not save_pretrained: it warns of, or refuses, settings that published models have.
        model.config.to_json_file(partial / "config.json")
        model.generation_config.to_json_file(partial / "generation_config.json")
        if tokenizer is not None:
            save_tokenizer(tokenizer, partial)

    weights.require_all_read()
    check = partial(check_export, model, weights) if check_logits else None
    plan = ExportPlan(manifest, graphs, threshold, tokenizer is not None, add_files, exact, check)
    return write_export(target, plan, overwrite=overwrite, progress=progress)


def model_weights(model: PreTrainedModel, family: Family | None = None) -> T5Weights:
    """What the graphs of a model are built from, whichever family it is of.

    Args:
        model: with a language-model head.
        family: by default that of its configuration; another description of the same weights gives other graphs.

    Raises:
        NotT5Error, InputError: as of `t5_weights`.
    """
    found = family_of_model(model)
    return t5_weights(model) if found.is_relative else bart_like_weights(model, family or found)


def t5_weights(model: PreTrainedModel) -> T5Weights:
    """A T5's weights as fp32 numpy arrays, which share memory with it where they can, and its sizes.

    Raises:
        NotT5Error: the model is of another kind.
        InputError: its weights are on the meta device, where they have no values.
    """
    import torch

    dims = T5Dims.of(model)
    if any(weight.is_meta for weight in model.parameters()):
        raise InputError("The model's weights are on torch's meta device, where they have no values: load them first.")
    # Each parameter once, under its first name: tied ones are shared.weight. A T5 has no buffers: one that an adapter
    # brings is an array, too, so that it is missed where no graph reads it.
    arrays = {}
    for key, value in (*model.named_parameters(), *model.named_buffers()):
        if not value.is_floating_point():
            raise NotT5Error(
                f"{key} must be in floating point, got {value.dtype}: load the model without quantisation."
            )
        arrays[key] = value.detach().to("cpu", torch.float32).numpy()
    stacks = (("encoder", model.encoder), ("decoder", model.decoder))
    attentions = {f"{n}.{i}": b.layer[0].SelfAttention for n, stack in stacks for i, b in enumerate(stack.block)}
    config = model.config
    return T5Weights(
        arrays=arrays, dims=dims, activation=config.dense_act_fn, norm_epsilon=config.layer_norm_epsilon,
        buckets=config.relative_attention_num_buckets, max_distance=config.relative_attention_max_distance,
        logit_scale=logit_scale(model),
        pruned_heads={key: tuple(sorted(getattr(a, "pruned_heads", ()))) for key, a in attentions.items()},
    )  # fmt: skip


def source_hash(model: PreTrainedModel, weights: T5Weights) -> str:
    """The sha256 of a checkpoint: its sizes, what shapes its graphs, its special tokens and all its weights.

    It is that of the values and not of a file, so that a model saved in another format has the same one.
    """
    names = {field.name for field in fields(weights)} - {"arrays", "family", "read"}
    if weights.family.is_relative:  # as before there were others
        names -= {"embedding_scale", "pad_token_id", "encoder_d_kv"}
    facts = {name: getattr(weights, name) for name in names}
    facts |= {"dims": asdict(weights.dims), "tokens": special_tokens(model)}
    facts |= {"family": entry} if (entry := _family_entry(weights)) else {}
    facts |= {"rules": rules} if (rules := constraints_from_config(model).to_json()) else {}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for key in sorted(weights.arrays):
        digest.update(key.encode())
        digest.update(np.ascontiguousarray(weights.arrays[key]).data)
    return digest.hexdigest()


def _family_entry(weights: T5Weights) -> dict[str, Any]:
    """For `Manifest`: empty for a T5."""
    if weights.family.is_relative:
        return {}
    positions = len(weights.array("encoder.embed_positions.weight")) - weights.family.first_position(
        weights.pad_token_id
    )
    return {
        "model_type": weights.family.model_type, "positions": positions,
        "source_vocab_size": source_vocabulary(weights),
    }  # fmt: skip


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer's files; raises ``ExportError`` where its library fails, on a full disk, too."""
    try:
        if backend := getattr(tokenizer, "backend_tokenizer", None):  # what the last call asked for would be saved, too
            backend.no_padding()
            backend.no_truncation()
        tokenizer.save_pretrained(folder)
        for path in folder.iterdir():  # of chat templates, which an encoder-decoder has no use for
            if path.is_dir():
                shutil.rmtree(path)
    except OSError:
        raise
    except Exception as error:  # a full disk, too: the library raises nothing more exact
        raise ExportError(f"The tokenizer could not be saved: {error}. Nothing was left behind.") from error
