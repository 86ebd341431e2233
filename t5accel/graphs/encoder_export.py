"""Export the encoder of a model alone, in a stream: one weight at a time is in memory, and no decoder's."""

from __future__ import annotations

import copy
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from t5accel import machine
from t5accel.checks import as_count
from t5accel.decoding.token_constraints import NO_CONSTRAINTS
from t5accel.errors import ExportError, ModelUnavailableError, NotT5Error
from t5accel.graphs.builder import OPSET
from t5accel.graphs.contract import ENCODER_ONLY, MODULES, as_folder
from t5accel.graphs.export import (
    FP32,
    TOLERANCE,
    hash_of,
    model_weights,
    require_tokenizer,
    save_tokenizer,
    t5_weights_of,
)
from t5accel.graphs.export_cache import (
    FileHashes,
    cache_entry,
    cache_folder,
    clear_damaged,
    hub_download,
    key_of_name,
    tokenizer_hash,
)
from t5accel.graphs.export_folder import (
    ExportPlan,
    WeightsLayout,
    require_free,
    resolve_target,
    write_export,
    write_graphs,
)
from t5accel.graphs.layers import encoder_only_graph
from t5accel.graphs.manifest import Manifest
from t5accel.graphs.ort_levels import plain_session
from t5accel.graphs.weights import T5Weights, as_array, require_values
from t5accel.models.families import family_of, family_of_model
from t5accel.models.load import (
    BUNDLED,
    data_folder,
    has_tokenizer,
    hub_id,
    hub_resolves,
    hub_snapshot,
    load_model,
    load_pretrained,
    load_tokenizer,
    refuse_instead,
    require_torch,
)
from t5accel.models.sizes import CLASS_PREFIXES, T5Dims
from t5accel.models.spec import ModelSpec
from t5accel.models.stored_weights import read_weights, weight_files
from t5accel.parity import ParityError, assert_close
from t5accel.precision.integers import IntegerRewriter
from t5accel.precision.recipes import Recipe, as_encoder_recipe

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# By any of these names files hold the one embedding: MADLAD-400's by the decoder's alone.
EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# The comparison with transformers' own encoder: bytes of layers in fp32, entries of the vocabulary.
CHECKED_BYTES, CHECKED_ENTRIES = 3 * 10**8, 1000
LENGTHS = (9, 5)  # tokens of the two sources in it


@dataclass(frozen=True)
class EncoderSource:
    """An encoder's weights, which may still be in their files, and what an export holds beside them."""

    name: str
    config: Any  # transformers'
    weights: T5Weights  # of which the encoder's graph reads all
    family: Mapping[str, Any]  # the manifest's entry
    tokenizer: PreTrainedTokenizerBase | None
    module: PreTrainedModel | None = None  # the encoder of a model object, with whatever hooks it has
    folder: Path | None = None  # of the files

    @classmethod
    def of(cls, model: Any) -> EncoderSource:
        """Read a model object, or find the files of a name that `models.load.load_model` knows.

        T5's checkpoints may be whole models or encoders alone (``T5EncoderModel``), and are not loaded; those of other
        families are whole models, which are. Errors are those of `load_model`.
        """
        require_torch("An export")
        if not isinstance(model, str | os.PathLike):
            return cls._of_object(model, None, type(model).__name__)
        label = os.fspath(model)
        folder = _folder_of_files(label)
        if folder is None:  # random weights
            return cls._of_object(*load_model(label), label)
        refuse_instead(folder, label)
        from transformers import AutoConfig

        config = load_pretrained(AutoConfig.from_pretrained, folder)
        if not family_of(config, label).is_relative or getattr(config, "layer_widths", None):
            return cls._of_object(*load_model(label), label, folder)
        arrays = dict(read_weights(folder, lambda key: key.startswith("encoder.") or key in EMBEDDINGS))
        if not arrays:
            raise ModelUnavailableError(f"{label} holds no weights for PyTorch, in safetensors or pytorch_model.bin.")
        weights = _t5_weights(config, arrays, label)
        _require_shapes(config, weights, label)
        return cls(label, config, weights, {}, load_tokenizer(folder), folder=folder)

    @classmethod
    def _of_object(cls, model: Any, tokenizer: Any, name: str, folder: Path | None = None) -> EncoderSource:
        config = getattr(model, "config", None)
        if config is None or not hasattr(model, "state_dict") or not family_of(config, name).is_relative:
            family_of_model(model)  # refuses all but whole models of other families
            weights, spec = model_weights(model), ModelSpec.of(model)
            arrays = {key: array for key, array in weights.arrays.items() if key.startswith("encoder.")}
            if EMBEDDINGS[1] not in arrays:
                arrays[EMBEDDINGS[0]] = weights.arrays[EMBEDDINGS[0]]
            width = arrays[next(key for key in EMBEDDINGS if key in arrays)].shape[1]  # not of every T5Gemma's decoder
            dims = replace(weights.dims, d_model=width, d_kv=weights.encoder_d_kv)
            weights = replace(weights, arrays=arrays, dims=_encoder_dims(dims))
            return cls(name, config, weights, spec.family_entry(), tokenizer, model.model.encoder, folder)
        stack = getattr(model, "encoder", None)
        if not hasattr(stack, "block"):
            raise NotT5Error(f"{name} must have an encoder of T5's layers, got a {type(model).__name__}.")
        require_values(stack)
        named = stack.named_parameters(prefix="encoder", remove_duplicate=False)
        arrays = {key: as_array(weight, key) for key, weight in (*named, *stack.named_buffers(prefix="encoder"))}
        return cls(name, config, _t5_weights(config, arrays, name), {}, tokenizer, stack, folder)

    @cached_property
    def sha256(self) -> str:
        """The hash of sizes, constants and weights, in whatever file format."""
        weights = self.weights
        names = {field.name for field in fields(weights)} - {"arrays", "dims", "family", "read"}
        facts = {name: getattr(weights, name) for name in names}
        facts |= {"encoder alone": asdict(weights.dims), "family": self.family}
        return hash_of(facts, weights)

    @property
    def spec(self) -> ModelSpec:
        tokens = {"pad_token_id": self.weights.pad_token_id}
        if isinstance(self.config.eos_token_id, int):
            tokens["eos_token_id"] = self.config.eos_token_id
        positions, entries = self.family.get("positions"), self.family.get("source_vocab_size")
        return ModelSpec(self.weights.family, self.weights.dims, tokens, NO_CONSTRAINTS, entries, positions)


def export_encoder(
    model: PreTrainedModel | EncoderSource | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    precision: Recipe | str = "fp32",
    tokenizer: PreTrainedTokenizerBase | None = None,
    overwrite: bool = False,
    progress: bool = False,
    check_outputs: bool = True,
    check: Callable[[Path], None] | None = None,
    max_loss: Mapping[str, float] | None = None,
) -> Manifest:
    """Write ``encoder_only.onnx``, its weights, and what `AcceleratedEncoder` needs beside them.

    Weights in files are read, converted and written one at a time: a model in bfloat16 becomes an export in 8 bits on a
    machine with less memory than its fp32. The folder is there whole or not at all.

    Args:
        model: an encoder or encoder-decoder of a family in `models.families`, or its name, folder or hub id.
        precision: fp32, int8, int4, or a `Recipe` without "dynamic" schemes, by which texts would depend on each other.
        check_outputs: compare the fp32 graph with transformers' own encoder on a small batch; of files, the first
            layers, 0.3 GB of them, as the others are built in the same way.
        check: may refuse the finished folder by an exception; ``max_loss`` are the losses that it allows.

    Raises:
        ExportError: the folder is taken or not writable, or the outputs differ; nothing is left of the attempt.
        NotT5Error: another architecture, or weights that the graph does not read.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     export_encoder("mini", f"{folder}/int8", precision="int8").recipe["name"]
    'int8'
    """
    recipe, target = as_encoder_recipe(precision), resolve_target(as_folder(folder))
    require_tokenizer(tokenizer)
    if isinstance(model, str | os.PathLike):
        require_free(target, os.fspath(model), recipe.name, overwrite=overwrite)
    source = model if isinstance(model, EncoderSource) else EncoderSource.of(model)
    graph = encoder_only_graph(source.weights)
    source.weights.require_all_read()
    if check_outputs:
        check_encoder(source)
    if recipe.integers:
        IntegerRewriter(recipe).rewrite(graph, "encoder")
    tokenizer = source.tokenizer if tokenizer is None else tokenizer

    def add_files(partial: Path) -> None:
        source.config.to_json_file(partial / "config.json")
        if source.folder and (source.folder / MODULES).is_file():
            shutil.copyfile(source.folder / MODULES, partial / MODULES)
        if tokenizer is not None:
            save_tokenizer(tokenizer, partial)

    limits = {"max_loss": dict(max_loss)} if max_loss else {}
    manifest = Manifest(
        source={"name": source.name, "sha256": source.sha256},
        dims=source.weights.dims,
        tokens=source.spec.tokens,
        recipe=FP32 if recipe.name == "fp32" else {**recipe.to_json(), "gated": bool(limits), "gate": limits},
        opset=OPSET,
        versions=machine.versions(),
        family=source.family,
    )
    plan = ExportPlan(manifest, {ENCODER_ONLY: graph}, 0, add_files, check=check)
    return write_export(target, plan, overwrite=overwrite, progress=progress)


def cached_encoder(
    model: PreTrainedModel | str | os.PathLike[str],
    *,
    precision: Recipe | str = "fp32",
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: bool = False,
    check_outputs: bool = True,
) -> tuple[Path, Manifest]:
    """The folder of ``model``'s encoder in `export_cache`, made now if it is missing or damaged, and its manifest."""
    recipe, named = as_encoder_recipe(precision), isinstance(model, str | os.PathLike)
    require_tokenizer(tokenizer)

    def check(_: Path) -> None:
        if named and key_of_name(label, hashes) != key:
            raise ExportError(f"{label} changed while it was read: try again when it is whole.")

    with FileHashes() as hashes:
        source = None if named else EncoderSource.of(model)
        label = os.fspath(model) if named else source.name
        if named:
            _folder_of_files(label)  # downloads it
        key = key_of_name(label, hashes) if named else source.sha256
        folder = cache_entry(f"{label}-encoder", key, tokenizer_hash(tokenizer), recipe, layout=ENCODER_ONLY)
        if manifest := hashes.lookup(folder):
            if source is not None and check_outputs:  # a hook or an overridden forward() leaves the key as it is
                check_encoder(source)
            return folder, manifest
        clear_damaged(folder, hashes)
        if progress:
            print(
                f"The encoder of {label} is exported once, and kept in {cache_folder()}.", file=sys.stderr, flush=True
            )
        options = dict(precision=recipe, tokenizer=tokenizer, progress=progress, check_outputs=check_outputs)
        made = export_encoder(source or label, folder, overwrite=True, check=check, **options)
        return folder, hashes.remember(folder, made)


def check_encoder(source: EncoderSource) -> None:
    """Raise ``ExportError`` unless the fp32 graph gives the hidden states of transformers' own encoder.

    Of an object all layers are compared; of files, the first ones (`CHECKED_BYTES`).
    """
    import torch

    weights, module = source.weights, source.module
    if module is None:
        weights = _first_layers(weights)
        module = encoder_module(source.config, weights)
    rng, pad, first = np.random.default_rng(0), weights.pad_token_id, weights.family.first_position(0)
    longest = min(LENGTHS[0], getattr(source.config, "max_position_embeddings", LENGTHS[0]))
    ids = rng.integers(first, weights.source_vocab_size - 1, (2, longest))
    ids += ids >= pad  # any token but padding
    mask = (np.arange(longest) < np.array(LENGTHS)[:, None]).astype(np.int64)
    ids[mask == 0] = min(pad, weights.source_vocab_size - 1)  # which `_first_layers` may have cut off
    graphs = {ENCODER_ONLY: encoder_only_graph(weights)}
    with TemporaryDirectory() as folder:
        write_graphs(Path(folder), graphs, WeightsLayout.plan(graphs, CHECKED_BYTES))
        session = plain_session(Path(folder) / ENCODER_ONLY, once=True)
        (found,) = session.run(None, {"input_ids": ids, "attention_mask": mask})
        del session  # Windows deletes no file that is mapped
    modes = [(part, part.training) for part in module.modules()]
    try:
        module.eval()
        device = next(module.parameters()).device
        with torch.no_grad():
            given = (torch.from_numpy(array).to(device) for array in (ids, mask))
            own = module(*given).last_hidden_state.float().cpu().numpy()
    finally:
        for part, training in modes:
            part.training = training
    real = (mask == 1) & np.isfinite(own).all(axis=-1)
    exact = all(weight.dtype == torch.float32 for weight in module.parameters())
    tolerance = (TOLERANCE if exact else 0.1) * max(1.0, float(np.abs(own[real]).max(initial=0)))
    try:
        if real.any():
            assert_close(found[real], own[real], atol=tolerance)
    except ParityError as error:
        raise ExportError(
            f"{source.name}: the graph computes other hidden states than transformers' own encoder ({error}). A hook, "
            "an overridden forward() or an adapter is not exported. Merge or remove it; check_outputs=False exports "
            "the weights as they are."
        ) from error


def encoder_module(config: Any, weights: T5Weights, floats: str = "float32", device: str = "cpu") -> PreTrainedModel:
    """transformers' own encoder of a T5 with these weights, in ``"float32"``, ``"bfloat16"`` or ``"float16"``.

    Its weights are read one at a time. In fp16 ``wo`` stays in fp32, as transformers keeps it.
    """
    import torch

    config = copy.deepcopy(config)
    config.num_layers, config.vocab_size = weights.dims.encoder_layers, weights.dims.vocab_size
    model = _empty_encoder(config)

    def values(name: str) -> torch.Tensor:
        array = weights.arrays[EMBEDDINGS[0] if name in EMBEDDINGS else name]
        wide = floats == "float16" and name.endswith(".wo.weight")
        dtype = torch.float32 if wide else getattr(torch, floats)
        return torch.tensor(np.asarray(array), dtype=dtype, device=device)

    for name, _ in list(model.named_parameters(remove_duplicate=True)):
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, torch.nn.Parameter(values(name), requires_grad=False))
    model.encoder.embed_tokens.weight = model.shared.weight
    return model.eval()


def _empty_encoder(config: Any) -> PreTrainedModel:
    import torch
    import transformers

    config = copy.deepcopy(config)
    config.use_cache = False
    with torch.device("meta"):
        return getattr(transformers, f"{CLASS_PREFIXES[config.model_type]}EncoderModel")(config)


def _require_shapes(config: Any, weights: T5Weights, name: str) -> None:
    """Raise ``ModelUnavailableError`` unless files hold what their configuration says, as transformers does."""
    for own, weight in _empty_encoder(config).named_parameters():
        key = EMBEDDINGS[0] if own in EMBEDDINGS else own
        if key not in weights.arrays:
            raise ModelUnavailableError(f"{name} is incomplete: it lacks weights of its encoder, such as {key}.")
        if (shape := tuple(weights.arrays[key].shape)) != tuple(weight.shape):
            raise ModelUnavailableError(f"{name}: {key} must be {tuple(weight.shape)} by config.json, got {shape}.")


def _folder_of_files(name: str) -> Path | None:
    """The folder of a named model's files, downloaded if needed; ``None`` for random weights."""
    if name in BUNDLED:
        return data_folder() / BUNDLED[name]
    if os.path.isdir(name):
        return Path(name).absolute()  # the process may go elsewhere
    if (repository := hub_id(name)) is None:
        if not name.startswith("random:"):
            load_model(name)  # refuses it, and says which names there are
        return None
    folder = hub_snapshot(name)
    # Programs that read weights alone leave no tokenizer there, and a download that stopped left some weights out.
    if not (_is_whole(folder) and has_tokenizer(folder)) and hub_resolves():
        for weights in ("*.safetensors", "pytorch_model*.bin"):  # the second where there are none of the first
            hub_download(repository, ["*.json", "*.model", "*.txt", weights], revision=folder and folder.name)
            if _is_whole(folder := hub_snapshot(name)):
                break
    if folder is None:
        raise ModelUnavailableError(f"{name!r} is no folder here, and could not be had from the model hub.")
    return folder


def _is_whole(folder: Path | None) -> bool:
    files = weight_files(folder) if folder else []
    return bool(files) and all(path.is_file() for path in files)


def _t5_weights(config: Any, arrays: dict[str, Any], name: str) -> T5Weights:
    held = [key for key in EMBEDDINGS if key in arrays]
    if not held:
        raise ModelUnavailableError(f"{name} is incomplete: it lacks its embedding, {EMBEDDINGS[0]}.")
    # Two of one content are one: files hold it twice, and modules tie it.
    for other in held[1:]:
        if arrays[other] is not arrays[held[0]] and not np.array_equal(arrays[held[0]], arrays[other]):
            raise ModelUnavailableError(f"{name} must hold one embedding for encoder and decoder, got two.")
    arrays = {EMBEDDINGS[0]: arrays[held[0]]} | {key: arrays[key] for key in arrays if key not in EMBEDDINGS}
    dims = _encoder_dims(T5Dims.from_config(config.to_dict(), name))
    dims = replace(dims, gated=any(key.endswith(".wi_0.weight") for key in arrays))
    pad = as_count(config.pad_token_id or 0, "config.pad_token_id", at_least=0)
    return t5_weights_of(config, arrays, dims, pad_token_id=pad)


def _encoder_dims(dims: T5Dims) -> T5Dims:
    return replace(dims, decoder_heads=(), cross_heads=(), decoder_ff=(), tied=True)


def _first_layers(weights: T5Weights) -> T5Weights:
    """The first entries of the vocabulary, and as many of the first layers as `CHECKED_BYTES` hold, at least one."""
    sizes = [0] * weights.dims.encoder_layers
    for key, array in weights.arrays.items():
        if key.startswith("encoder.block."):
            sizes[int(key.split(".")[2])] += array.nbytes
    count = max(1, int((np.cumsum(sizes) <= CHECKED_BYTES).sum()))
    kept = {
        key: array
        for key, array in weights.arrays.items()
        if not key.startswith("encoder.block.") or int(key.split(".")[2]) < count
    }
    kept[EMBEDDINGS[0]] = np.asarray(kept[EMBEDDINGS[0]])[:CHECKED_ENTRIES].copy()
    dims = weights.dims
    heads, ff = dims.encoder_heads[:count], dims.encoder_ff[:count]
    dims = replace(dims, vocab_size=len(kept[EMBEDDINGS[0]]), encoder_heads=heads, encoder_ff=ff)
    return replace(weights, arrays=kept, dims=dims, read=set())
