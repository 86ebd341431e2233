"""Open an encoder-decoder on the fastest runtime: for our own loops, or behind transformers' ``generate()``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from t5accel import machine
from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.runtimes import export_backend
from t5accel.errors import InputError
from t5accel.graphs.export import backend_logits
from t5accel.graphs.export import check_logits as compare_logits
from t5accel.graphs.export_cache import cached_export_and_manifest, find_export, verified_manifest
from t5accel.models.families import family_of_model
from t5accel.models.load import require_gpu, require_torch
from t5accel.precision.recipes import RECIPES, Recipe, as_recipe
from t5accel.tokenization import tokenizer_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from t5accel.backends.hf_generate import AcceleratedT5
    from t5accel.decoding.backend import Backend

# Recipe substitutions by tuning goal. With many rows, activations are quantised once for all of them, and integers
# multiply faster than weights are read.
TUNED_FOR = {"latency": {}, "throughput": {"int8": "int8-dynamic"}}
# Largest difference of logits, as a share of the largest one, between two orders of summation.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
_PRECISIONS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}  # by torch's and transformers' names
RUNTIMES = {"onnx": "ONNX Runtime", "openvino": "ONNX Runtime", "torch": "torch with cache", "tensorrt": "TensorRT"}


def accelerate(
    model: PreTrainedModel | str | os.PathLike[str],
    *,
    precision: str | Recipe | torch.dtype | None = None,
    tuned_for: str = "latency",
    device: str | torch.device = "cpu",
    runtime: str | None = None,
    encoder_precision: str = "fp32",
    threads: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_source_tokens: int | None = None,
    progress: bool = True,
    check_logits: bool = True,
) -> AcceleratedT5:
    """Open an encoder-decoder as a transformers model with ``generate()``, ``backend`` and ``tokenizer``.

    Args:
        model: ``"mini"``, ``"random:t5-small"``, a hub id, a folder written by ``save_pretrained`` or by
            `export.export_model`, or a model object, of a family in `models.families`. The hub id may be an export's,
            which is downloaded once. Other models are exported once, into the user's cache (`graphs.export_cache`;
            ``t5accel cache list``).
        precision: ``"fp32"``, ``"fp16"``, ``"bf16"`` (in torch only), ``"int8"``, ``"int8-per-token"`` (texts do not
            depend on their batch), ``"int4"``, a `recipes.Recipe`, or a torch type; by default fp32, or that of a
            given export. Quality is not measured here: `gate.quantize` accepts a model only within a given loss.
        tuned_for: ``"latency"``, for one text, or ``"throughput"``, for several or for beams: int8 computes otherwise.
        device: ``"cpu"`` or ``"cuda"``, the first GPU that the process sees.
        runtime: ``"onnx"``, ``"torch"``, ``"tensorrt"`` (on a GPU) or ``"openvino"``, which is ONNX Runtime with an
            encoder that is faster for large batches in fp32 (`openvino_encoder`). By default torch for bf16 and for
            floats on a GPU, else ONNX Runtime.
        encoder_precision: ``"bf16"`` with ``runtime="openvino"``, on a CPU that multiplies it: long sources are encoded
            twice as fast, with keys and values some 2 % off. Check the quality on data of your own.
        threads: of the CPU; by default those that this process may really use.
        tokenizer: saved with the export; by default that of a model given by name.
        max_source_tokens: refuse longer inputs, for attention grows with the square of the length.
        progress: show the first export of a model and where it is kept.
        check_logits: compare the graphs with the model on one small batch, at the first export and for every model
            object; it finds hooks, overridden ``forward()`` methods and adapters. An own ``generate()`` is refused.

    Returns:
        A model whose ``generate()`` takes ``input_ids`` (B, S) and returns tokens (B, L), as transformers' does.

    Raises:
        ExportError: the export cannot be written, is damaged, was optimised for another machine, or its logits differ.
        InputError, NotT5Error, UnknownModelError, ModelUnavailableError: there is no such model.
        MissingPackageError: there is no GPU for ``device="cuda"``, or the runtime is not installed.

    >>> model = accelerate("mini")
    >>> batch = model.tokenizer(["translate English to French: I am tired."], return_tensors="pt")
    >>> model.tokenizer.batch_decode(model.generate(**batch, max_new_tokens=20), skip_special_tokens=True)
    ['Je suis fatigué.']
    """
    require_torch("accelerate()", "open_backend() runs an export without it.")
    from t5accel.backends.hf_generate import AcceleratedT5, require_own_methods

    backend, tokenizer, _ = _open(
        model, precision=precision, tuned_for=tuned_for, device=device, runtime=runtime, threads=threads,
        encoder_precision=encoder_precision, tokenizer=tokenizer, max_source_tokens=max_source_tokens,
        progress=progress, check_logits=check_logits,
    )  # fmt: skip
    configs = {}
    if not isinstance(model, str | os.PathLike):
        require_own_methods(model)
        # An earlier object of equal weights may have had other defaults.
        configs = {"config": model.config, "generation_config": model.generation_config}
    return AcceleratedT5.around(backend, tokenizer=tokenizer, **configs)


def open_backend(
    model: PreTrainedModel | str | os.PathLike[str], *, precision: str | Recipe | torch.dtype | None = None,
    runtime: str | None = None, device: str | torch.device = "cpu", threads: int | None = None, progress: bool = True,
    encoder_precision: str = "fp32",
) -> tuple[Backend, Any, str]:  # fmt: skip
    """Open a backend for our own loops, its tokenizer or ``None``, and a description.

    An export that is there runs without torch and transformers. Arguments and errors are those of `accelerate`.

    >>> backend, tokenizer, what = open_backend("mini", progress=False)
    >>> tokenizer(["I am tired."])["input_ids"].shape, what
    ((1, 5), 'ONNX Runtime, fp32')
    """
    backend, tokenizer, what = _open(
        model, precision=precision, device=device, runtime=runtime, threads=threads, progress=progress,
        encoder_precision=encoder_precision,
    )  # fmt: skip
    manifest = getattr(backend, "manifest", None)
    if manifest is not None and {"tokenizer_config.json", "tokenizer.json"} & manifest.files.keys():
        tokenizer = tokenizer_of(backend.folder)
    return backend, tokenizer, what


def _open(
    model: Any, *, precision: Any, device: Any, runtime: str | None, threads: int | None, progress: bool,
    tuned_for: str = "latency", tokenizer: Any = None, max_source_tokens: int | None = None, check_logits: bool = True,
    encoder_precision: str = "fp32",
) -> tuple[Backend, Any, str]:  # fmt: skip
    """The backend, the tokenizer that was given or loaded with a model for torch, and a description."""
    device = _as_device(device)
    settings = SessionSettings(
        threads=threads, device=device, openvino=runtime == "openvino", encoder_precision=encoder_precision
    )
    name = str(precision).removeprefix("torch.")
    recipe = tuned(as_recipe("fp32" if precision is None else _PRECISIONS.get(name, precision)), tuned_for)
    if not isinstance(model, str | os.PathLike):
        family_of_model(model)
    folder = find_export(model)
    runtime = _choose_runtime(runtime, device, recipe, is_export=folder is not None)
    if device == "cuda":
        require_gpu()
    name = recipe.name
    if runtime == "torch":
        if max_source_tokens is not None:
            raise InputError(f"max_source_tokens must be None in torch, got {max_source_tokens}: give runtime='onnx'.")
        from t5accel.graphs.export import require_tokenizer

        require_tokenizer(tokenizer)
        backend, own_tokenizer = _in_torch(model, recipe, settings, check_logits=check_logits)
        tokenizer = own_tokenizer if tokenizer is None else tokenizer
    else:
        if folder is None:
            folder, manifest = cached_export_and_manifest(
                model, precision=recipe, tokenizer=tokenizer, progress=progress, check_logits=check_logits
            )
        else:
            manifest = verified_manifest(folder)
            if precision is not None and manifest.recipe["name"] != name:
                raise InputError(
                    f"precision must be that of the export {folder}, {manifest.recipe['name']!r}, got {name!r}. Give "
                    "the model, or convert the export in fp32 (t5accel.precision.gate, t5accel.precision.fp16)."
                )
        name = manifest.recipe["name"]
        if runtime == "tensorrt":
            from t5accel.backends.tensorrt import TensorRT

            backend = TensorRT(folder, verify=False, max_source_tokens=max_source_tokens)
        else:
            options = dict(settings=settings, manifest=manifest, max_source_tokens=max_source_tokens)
            backend = export_backend(device)(folder, **options)
    more = f", encoder in {encoder_precision}" * (encoder_precision != "fp32") + f", {device}" * (device != "cpu")
    return backend, tokenizer, f"{RUNTIMES[runtime]}, {name}{more}"


def _as_device(device: Any) -> Any:
    """``"cpu"`` or ``"cuda"``; `SessionSettings` refuses other values."""
    kind, _, number = str(device).partition(":")
    if kind == "cuda" and number.isdigit() and int(number):
        raise InputError(
            f"device must be the first GPU, got {str(device)!r}: set CUDA_VISIBLE_DEVICES={number} before Python "
            "starts, and give device='cuda'."
        )
    return kind if kind in ("cpu", "cuda") and number in ("", "0") else device


def _choose_runtime(runtime: str | None, device: str, recipe: Recipe, *, is_export: bool) -> str:
    """The runtime asked for, if it can do that, or by default the fastest one."""
    if runtime is None:
        in_torch = recipe.dtype == "bfloat16" or (device == "cuda" and not recipe.integers)
        return "torch" if in_torch and not is_export else "onnx"
    if not isinstance(runtime, str) or runtime not in RUNTIMES:
        raise InputError(f"runtime must be one of {', '.join(RUNTIMES)}, got {runtime!r}. Or leave it out.")
    if runtime == "tensorrt" and device != "cuda":
        raise InputError(f"device must be 'cuda' with runtime='tensorrt', got {device!r}.")
    if runtime == "torch" and is_export:
        raise InputError("model must not be an export with runtime='torch', got one. Give the model or its name.")
    if runtime == "openvino" and (recipe.name != "fp32" or device != "cpu"):
        raise InputError(f"runtime='openvino' must have fp32 on cpu, got {recipe.name} on {device}. Leave runtime out.")
    if (runtime == "torch" and recipe.integers) or (runtime != "torch" and recipe.dtype == "bfloat16"):
        other = "onnx" if runtime == "torch" else "torch"
        raise InputError(f"runtime must be {other!r} for precision {recipe.name!r}, got {runtime!r}. Leave it out.")
    return runtime


def tuned(recipe: Recipe, tuned_for: str) -> Recipe:
    """The recipe that is fastest for one row (``"latency"``) or for many texts or beams (``"throughput"``).

    >>> tuned(as_recipe("int8"), "throughput").name
    'int8-dynamic'
    """
    if not isinstance(tuned_for, str) or tuned_for not in TUNED_FOR:
        raise InputError(f"tuned_for must be one of {', '.join(TUNED_FOR)}, got {tuned_for!r}.")
    return RECIPES.get(TUNED_FOR[tuned_for].get(recipe.name, ""), recipe)


def _allows_tf32() -> bool:
    import torch

    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # it was set by torch's newer names
        return True


def _in_torch(model: Any, recipe: Recipe, settings: SessionSettings, *, check_logits: bool) -> tuple[Backend, Any]:
    """On a GPU with captured steps; on a CPU transformers' own model. And the tokenizer of a model given by name."""
    require_torch("runtime='torch'")
    import torch

    from t5accel.backends.torch_eager import TorchEager
    from t5accel.backends.torch_static import TorchStatic
    from t5accel.models.load import cast_model, load_model

    model, tokenizer = load_model(model) if isinstance(model, str | os.PathLike) else (model, None)
    torch.set_num_threads(settings.threads or machine.cpu_threads())
    # Not the current one, which torch.cuda.set_device changes: ONNX Runtime takes the first, too.
    moved = cast_model(model, recipe.dtype, "cuda:0" if settings.device == "cuda" else settings.device)
    if settings.device == "cpu":
        return TorchEager(moved), tokenizer
    backend = TorchStatic(moved)
    if check_logits:
        # TF32, which a process may allow, has no more digits than fp16.
        dtype = "float16" if recipe.dtype == "float32" and _allows_tf32() else recipe.dtype
        compare_logits(moved, backend_logits(backend), tolerance=TOLERANCES[dtype])
    return backend, tokenizer
