"""Export a model to the two-graph layout, and compare the graphs' logits with the model's."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from t5accel import machine
from t5accel.checks import as_count
from t5accel.decoding.backend import Backend
from t5accel.errors import ExportError, InputError, NotT5Error
from t5accel.graphs.builder import OPSET
from t5accel.graphs.contract import (
    DECODER,
    ENCODER,
    SHORTLIST,
    STEP,
    decoder_spec,
    empty_past,
    kv_names,
    shortlist_spec,
    step_spec,
)
from t5accel.graphs.export_folder import LARGEST_INSIDE, ExportPlan, require_free, resolve_target, write_export
from t5accel.graphs.fused_step import step_graph
from t5accel.graphs.gemma_layers import gemma_weights
from t5accel.graphs.layers import decoder_graph, encoder_graph
from t5accel.graphs.manifest import Manifest
from t5accel.graphs.ort_levels import plain_session
from t5accel.graphs.shortlist_head import maybe_quantize_head, shortlist_graph
from t5accel.graphs.weights import T5Weights, as_array, bart_like_weights, require_values
from t5accel.models.families import Family, family_of_model
from t5accel.models.load import load_model
from t5accel.models.sizes import T5Dims
from t5accel.models.spec import ModelSpec
from t5accel.models.t5_math import logit_scale
from t5accel.parity import ParityError, assert_close

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FP32 = {"name": "fp32"}
# (B, S) input_ids and attention_mask, (B, T) decoder_input_ids -> (B, T, V) logits
Logits = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
SOURCE, TARGET = 9, 4  # tokens of the batch whose logits are compared
TOLERANCE = 1e-3  # of the largest logit; fp32 on two runtimes differs by a hundredth of it


def export_model(
    model: PreTrainedModel | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    name: str | None = None,
    external_threshold_bytes: int = LARGEST_INSIDE,
    shortlist: bool | None = False,
    step: bool | None = False,
    overwrite: bool = False,
    progress: bool = False,
    check_logits: bool = True,
) -> Manifest:
    """Write ``encoder.onnx``, ``decoder.onnx`` and all that running them without torch needs, in fp32.

    The folder is there whole or not at all, even if the process is killed; processes exporting the same model to it do
    the work once. An export of the same model that is already there is verified and kept.

    Args:
        model: an encoder-decoder, or a name that `models.load.load_model` knows.
        tokenizer: saved beside the graphs; by default that of a model given by name.
        name: of the checkpoint in the manifest; by default the name given, or the class.
        external_threshold_bytes: above it, all graphs' weights lie in one file beside them, each once; at most 2 GB,
            the size of an ONNX file.
        shortlist: add ``decoder_shortlist.onnx`` (`shortlist_head`), for faster greedy steps on a CPU, at a quarter of
            the head's bytes; ``None``: where it pays. All weights then lie beside the graphs.
        step: add ``decoder_step.onnx`` (`fused_step`), which `backends.ort_static` runs; ``None``: where the family
            has one, as all but the T5Gemmas have. All weights then lie beside the graphs.
        overwrite: replace another export; never a folder that holds anything else.
        check_logits: compare the graphs' logits with the model's on a small batch before anything is kept.

    Raises:
        ExportError: the folder is taken or not writable, or the logits differ; nothing is left of the attempt.
        NotT5Error: the model has weights that no graph reads.

    >>> from tempfile import TemporaryDirectory
    >>> from t5accel.models.random_init import random_t5
    >>> model = random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    >>> with TemporaryDirectory() as folder:
    ...     export_model(model, f"{folder}/tiny").files.keys()
    dict_keys(['config.json', 'decoder.onnx', 'encoder.onnx', 'generation_config.json'])
    """
    threshold = as_count(external_threshold_bytes, "external_threshold_bytes", at_least=0)
    if threshold > LARGEST_INSIDE:
        raise InputError(f"external_threshold_bytes must be at most {LARGEST_INSIDE}, got {threshold}.")
    if step is not None and not isinstance(step, bool):
        raise InputError(f"step must be True, False, or None for where there is one, got {step!r:.80}.")
    target = resolve_target(folder)
    if name is not None and not isinstance(name, str):
        raise InputError(f"name must be a text, got {name!r}.")
    if isinstance(model, str | os.PathLike):
        name = name or os.fspath(model)
        require_free(target, name, overwrite=overwrite)
        model, own_tokenizer = load_model(model)
        tokenizer = own_tokenizer if tokenizer is None else tokenizer
    name = name or type(model).__name__
    require_tokenizer(tokenizer)
    weights = model_weights(model)
    if weights.family.is_gemma and step:
        raise InputError(f"step must be left out for a {weights.family.model_type}, which has no fused step.")
    step = not weights.family.is_gemma if step is None else step
    # Building the graphs refuses other architectures before anything is written.
    head = maybe_quantize_head(weights, shortlist)
    graphs = {ENCODER: encoder_graph(weights), DECODER: decoder_graph(weights, head_by_rows=head is not None)}
    spec = ModelSpec.of(model)
    manifest = Manifest(
        source={"name": name, "sha256": source_hash(model, weights)},
        dims=weights.dims,
        tokens=spec.tokens,
        recipe=FP32,
        opset=OPSET,
        versions=machine.versions(),
        rules=spec.rules.to_json(),
        family=spec.family_entry(),
    )
    exact: dict[str, str] = {}
    if step:
        graphs[STEP] = shortlist_graph(weights, head, step=True) if head else step_graph(weights)
        manifest = replace(manifest, step=asdict(step_spec(weights.dims, shortlist=head is not None)))
    if head:
        graphs[SHORTLIST] = shortlist_graph(weights, head)
        exact = {"rows": weights.head} | ({"bias": weights.head_bias} if weights.head_bias else {})
        manifest = replace(manifest, shortlist={**asdict(shortlist_spec(weights.dims)), **head.bounds})

    def add_files(partial: Path) -> None:
        # Not save_pretrained: it warns of, or refuses, settings that published models have.
        model.config.to_json_file(partial / "config.json")
        model.generation_config.to_json_file(partial / "generation_config.json")
        if tokenizer is not None:
            save_tokenizer(tokenizer, partial)

    weights.require_all_read()
    if step or head:
        threshold = 0
    check = partial(check_export, model, weights) if check_logits else None
    plan = ExportPlan(manifest, graphs, threshold, add_files, exact, check)
    return write_export(target, plan, overwrite=overwrite, progress=progress)


def model_weights(model: PreTrainedModel, family: Family | None = None) -> T5Weights:
    """A model's weights, whichever family it is of; another ``family`` gives other graphs of the same weights."""
    found = family_of_model(model)
    if found.is_gemma:
        return gemma_weights(model, family or found)
    return t5_weights(model) if found.is_relative else bart_like_weights(model, family or found)


def t5_weights(model: PreTrainedModel) -> T5Weights:
    """A T5's weights as fp32 numpy arrays, which share memory with it where they can.

    Raises ``NotT5Error`` for another architecture, ``InputError`` for weights on torch's meta device.
    """
    dims = T5Dims.of(model)
    require_values(model)
    # Tied embeddings and heads are shared.weight; layers may share weights, which each names. A T5 has no buffers, but
    # an adapter may: they count as arrays, so that `require_all_read` notices that no graph reads them.
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    own = [(name, weight) for name, weight in named if name == "shared.weight" or weight is not model.shared.weight]
    arrays = {name: as_array(weight, name) for name, weight in own}
    pruned = {
        f"{name}.{layer}": tuple(sorted(getattr(block.layer[0].SelfAttention, "pruned_heads", ())))
        for name, stack in (("encoder", model.encoder), ("decoder", model.decoder))
        for layer, block in enumerate(stack.block)
    }
    return t5_weights_of(model.config, arrays, dims, logit_scale=logit_scale(model), pruned_heads=pruned)


def t5_weights_of(config: Any, arrays: Mapping[str, Any], dims: T5Dims, **others: Any) -> T5Weights:
    """A T5's arrays with the constants of its configuration; ``others`` are fields of `T5Weights`."""
    numbers = ("relative_attention_num_buckets", "relative_attention_max_distance")
    buckets, reach = (as_count(getattr(config, name), f"config.{name}", at_least=1) for name in numbers)
    if buckets < 4:
        raise NotT5Error(f"relative_attention_num_buckets must be at least 4, got {buckets}.")
    # Up to this distance each has a bucket, and only then do larger ones share the last (`relative_position_bucket`).
    if reach <= (exact := buckets // (2 if dims.decoder_layers else 4)):
        raise NotT5Error(f"relative_attention_max_distance must be above {exact} with {buckets} buckets, got {reach}.")
    return T5Weights(
        arrays=arrays,
        dims=dims,
        activation=config.dense_act_fn,
        norm_epsilon=float(config.layer_norm_epsilon),
        buckets=buckets,
        max_distance=reach,
        **others,
    )


def source_hash(model: PreTrainedModel, weights: T5Weights) -> str:
    """The sha256 of a checkpoint: its sizes, constants, special tokens and weights, in whatever file format."""
    names = {field.name for field in fields(weights)} - {"arrays", "family", "read"}
    if weights.family.is_relative:  # a T5's hash is older than these fields
        names -= {"embedding_scale", "pad_token_id", "encoder_d_kv"}
    facts = {name: getattr(weights, name) for name in names}
    spec = ModelSpec.of(model)
    facts |= {"dims": asdict(spec.dims), "tokens": spec.tokens}
    facts |= {"family": entry} if (entry := spec.family_entry()) else {}
    facts |= {"rules": rules} if (rules := spec.rules.to_json()) else {}
    return hash_of(facts, weights)


def hash_of(facts: Mapping[str, Any], weights: T5Weights) -> str:
    """The sha256 of facts and of all weights with their names."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for key in sorted(weights.arrays):
        digest.update(key.encode())
        digest.update(np.ascontiguousarray(weights.arrays[key]).data)
    return digest.hexdigest()


def require_tokenizer(tokenizer: Any) -> None:
    """Raise ``InputError`` for any object but ``None`` and a tokenizer of transformers."""
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise InputError(f"tokenizer must be one of transformers, got {tokenizer!r:.80}.")


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer's files; raises ``ExportError`` where its library fails."""
    try:
        if backend := getattr(tokenizer, "backend_tokenizer", None):  # else the last call's padding would be saved
            backend.no_padding()
            backend.no_truncation()
        tokenizer.save_pretrained(folder)
        for path in folder.iterdir():  # chat templates, which an encoder-decoder does not use
            if path.is_dir():
                shutil.rmtree(path)
    except OSError:
        raise
    except Exception as error:  # a full disk, too: the library raises nothing more exact
        raise ExportError(f"The tokenizer could not be saved: {error}. Nothing was left behind.") from error


# The comparison of logits


def check_logits(model: PreTrainedModel, run: Logits, *, tolerance: float = TOLERANCE) -> None:
    """Raise ``ExportError`` unless a runtime's logits equal the model's on one seeded batch.

    ``tolerance`` is the largest difference, as a share of the largest logit. The model's training mode is restored.
    """
    # It finds changes that have no weight: a hook, an overridden forward, a changed constant.
    rng = np.random.default_rng(0)
    spec = ModelSpec.of(model)
    pad = spec.tokens["pad_token_id"]
    positions = getattr(model.config, "max_position_embeddings", SOURCE)  # T5 has none

    def drawn(entries: int, length: int) -> np.ndarray:
        ids = rng.integers(0, entries - 1, (2, length))
        return ids + (ids >= pad)  # any token but padding

    entries = spec.dims.vocab_size
    ids, tokens = drawn(spec.source_vocab_size or entries, min(SOURCE, positions)), drawn(entries, TARGET)
    mask = np.ones_like(ids)
    ids[1, -1], mask[1, -1] = pad, 0
    tokens[:, 0] = spec.tokens["decoder_start_token_id"]
    own = _own_logits(model, ids, mask, tokens)
    found = run(ids, mask, tokens)
    finite = np.isfinite(own)  # a model that overflows is no fault of the runtime
    try:
        if finite.any():
            assert_close(found[finite], own[finite], atol=tolerance * max(1.0, float(np.abs(own[finite]).max())))
    except ParityError as error:
        raise ExportError(
            f"{type(model).__name__}: the graphs compute other logits than the model itself ({error}). A hook, an "
            "overridden forward() or an adapter is not exported. Merge or remove it; check_logits=False exports the "
            "weights as they are."
        ) from error


def _own_logits(model: PreTrainedModel, ids: np.ndarray, mask: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    import torch

    device = next(model.parameters()).device
    modes = [(module, module.training) for module in model.modules()]
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": tokens}
    inputs = {name: torch.from_numpy(array).to(device) for name, array in inputs.items()}
    try:
        model.eval()
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            output = model(**inputs, use_cache=False, return_dict=True)
        return output.logits.float().cpu().numpy()
    except Exception as error:
        raise ExportError(
            f"{type(model).__name__} cannot be run, so its export cannot be compared with it ({error}). "
            "check_logits=False exports it all the same."
        ) from error
    finally:
        for module, training in modes:
            module.training = training


def backend_logits(backend: Backend) -> Logits:
    """A backend's logits, in one step from an empty history."""
    return lambda ids, mask, tokens: backend.step(backend.new_state(backend.encode(ids, mask)), tokens[:, None])[:, 0]


def check_export(model: PreTrainedModel, weights: T5Weights, folder: Path) -> None:
    """`check_logits` of a model and its fp32 export in ``folder``, on ONNX Runtime's CPU, without optimisation."""
    import torch

    def outputs(graph: str, wanted: list[str], feeds: dict[str, Any]) -> list[np.ndarray]:
        return plain_session(folder / graph, once=True).run(wanted, feeds)

    def run(ids: np.ndarray, mask: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        source, cross = {"input_ids": ids, "attention_mask": mask}, kv_names("cross", weights.dims.decoder_layers)
        feeds = dict(zip(cross, outputs(ENCODER, cross, source), strict=True), attention_mask=mask)
        feeds |= {"input_ids": tokens[:, None], **empty_past(decoder_spec(weights.dims), len(ids))}
        return outputs(DECODER, ["logits"], feeds)[0][:, 0]

    if any(weight.dtype != torch.float32 for weight in model.parameters()):
        model = copy.deepcopy(model).float()  # as its weights were exported
    check_logits(model, run)
