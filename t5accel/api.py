"""The one-liner: a T5, BART, Marian, NLLB or Pegasus on the runtime that suits it, behind transformers' ``generate()``.

Our own loops run on it as well.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5accel import machine
from t5accel.backends.ort_session import SessionSettings
from t5accel.errors import InputError, MissingPackageError
from t5accel.graphs.export_cache import cached_export_and_manifest, find_export, verified_manifest
from t5accel.graphs.logit_check import backend_logits
from t5accel.graphs.logit_check import check_logits as compare_logits
from t5accel.graphs.manifest import Manifest
from t5accel.models.load import require_torch
from t5accel.models.registry import family_of_model
from t5accel.precision.recipes import RECIPES, Recipe, as_recipe
from t5accel.tokenization import tokenizer_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from t5accel.backends.hf_generate import AcceleratedT5
    from t5accel.decoding.backend import Backend

# By what it is tuned for, the recipe in place of another.
TUNED_FOR = {"latency": {}, "throughput": {"int8": "int8-dynamic"}}
# Largest difference of logits, as a share of the largest one: two ways of adding up differ by that at most.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
# torch's types, and their names in transformers' ``dtype=``.
FLOATS = {f"{prefix}{floats}": name for prefix in ("", "torch.")
          for floats, name in (("float32", "fp32"), ("float16", "fp16"), ("bfloat16", "bf16"))}  # fmt: skip
RUNTIMES = ("onnx", "openvino", "torch", "tensorrt")


def accelerate(
    model: PreTrainedModel | str | os.PathLike[str],
    *,
    precision: str | Recipe | torch.dtype | None = None,
    tuned_for: str = "latency",
    device: str | torch.device = "cpu",
    runtime: str | None = None,
    threads: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_source_tokens: int | None = None,
    progress: bool = True,
    check_logits: bool = True,
) -> AcceleratedT5:
    """Run an encoder-decoder where it is fast, as the model that transformers knows: on a CPU that is ONNX Runtime.

    Args:
        model: ``"mini"``, ``"random:t5-small"``, a hub id, a folder written by ``save_pretrained`` or by
            `export.export_model`, or a model object, of a family that `models.registry` has. A hub id may be that of an
            export, which is downloaded once. What is no export yet is exported once, into the user's cache
            (`graphs.export_cache`; ``t5accel cache list``).
        precision: ``"fp32"``, ``"fp16"``, ``"bf16"`` (which runs in torch), ``"int8"``, ``"int4"``, a
            `recipes.Recipe`, or a type of torch such as ``torch.float16``; by default fp32, or that of a given export,
            which runs in no other. What a recipe costs in quality is not measured here: `gate.quantize` lets a
            model pass only if it loses no more than allowed (``t5accel quantize``).
        tuned_for: ``"latency"``, for batches of few rows, or ``"throughput"``, for many: another way of computing with
            8 bits is faster there.
        device: ``"cpu"`` or ``"cuda"``, also as a ``torch.device``. It is the first GPU that the process sees.
        runtime: ``"onnx"``, ``"torch"`` or, for ``device="cuda"``, ``"tensorrt"``; by default the one that suits: on a
            GPU torch with captured steps for floats, else ONNX Runtime, which alone runs integers and given exports.
            ``"openvino"`` is ONNX Runtime with an encoder that is faster for large batches in fp32
            (`openvino_encoder`).
        threads: of the CPU; by default those that this process may really use.
        tokenizer: saved with the export; by default that of a model given by name.
        max_source_tokens: refuse longer inputs.
        progress: when a model is exported for the first time, say where it is kept and show a bar.
        check_logits: compare the graphs with the model on one small batch, when they are made and for every model
            object; a hook, an overridden ``forward()`` or an adapter is found by that.

    Returns:
        An object with ``generate()``; with ``backend`` for our own loops, as in ``greedy(model.backend, …)``; and with
        ``tokenizer``, ``None`` for models without one.

    Raises:
        ExportError: the export cannot be written, is damaged, was optimised for another machine, or computes something
            else than the model.
        InputError, NotT5Error, UnknownModelError, ModelUnavailableError: there is no such model.
        MissingPackageError: there is no GPU for ``device="cuda"``, or the runtime is not installed for it.

    >>> model = accelerate("mini")
    >>> batch = model.tokenizer(["translate English to French: I am tired."], return_tensors="pt")
    >>> model.tokenizer.batch_decode(model.generate(**batch, max_new_tokens=20), skip_special_tokens=True)
    ['Je suis fatigué.']
    """
    require_torch("accelerate()", "open_backend() runs an export without it.")
    from t5accel.backends.hf_generate import AcceleratedT5

    device = _as_device(device)
    settings = SessionSettings(threads=threads, device=device, openvino=runtime == "openvino")
    recipe = tuned(_as_recipe(precision), tuned_for)
    is_path = isinstance(model, str | os.PathLike)
    if not is_path:
        family_of_model(model)
    folder = find_export(model)
    chosen = _runtime(runtime, device, recipe, is_export=folder is not None)
    if device == "cuda":
        _require_gpu()
    if chosen == "torch":
        if max_source_tokens is not None:
            raise InputError("max_source_tokens is not for torch: leave it out, or give runtime='onnx'.")
        return _in_torch(model, recipe, settings, tokenizer, check_logits=check_logits)
    if folder is not None:
        manifest = _in_precision(folder, None if precision is None else recipe)
    else:
        folder, manifest = cached_export_and_manifest(
            model, precision=recipe, tokenizer=tokenizer, progress=progress, check_logits=check_logits
        )
    options: dict[str, Any] = {"settings": settings, "manifest": manifest}
    if chosen == "tensorrt":
        from t5accel.backends.tensorrt import TensorRT

        options = {"backend": TensorRT, "verify": False}
    if not is_path:  # the export may be that of an earlier object of equal weights, whose defaults were others
        options |= {"config": model.config, "generation_config": model.generation_config}
    return AcceleratedT5.from_pretrained(folder, tokenizer=tokenizer, max_source_tokens=max_source_tokens, **options)


def open_backend(
    model: str | os.PathLike[str], *, precision: str | Recipe | None = None, runtime: str | None = None,
    device: str = "cpu", threads: int | None = None, progress: bool = True,
) -> tuple[Backend, Any, str]:  # fmt: skip
    """A backend for our own loops, its tokenizer, and both in words: `accelerate` without ``generate()``.

    Where the export is there, neither torch nor transformers is imported: the start takes a tenth of the time.

    Args:
        model, runtime, device, threads, progress: see `accelerate`.
        precision: by default fp32, or that of a given export; an export in another precision is refused.

    Returns:
        The backend; its tokenizer, or ``None``; and what runs it, such as ``"ONNX Runtime, int8"``.

    Raises:
        ExportError, InputError, NotT5Error, UnknownModelError, ModelUnavailableError: as of `accelerate`.

    >>> backend, tokenizer, what = open_backend("mini", progress=False)
    >>> tokenizer(["I am tired."])["input_ids"].shape, what
    ((1, 5), 'ONNX Runtime, fp32')
    """
    from t5accel.backends.ort_static import OrtStatic

    recipe = _as_recipe(precision)
    device = _as_device(device)
    folder = find_export(model)
    chosen = _runtime(runtime, device, recipe, is_export=folder is not None)
    manifest = None if folder is None else _in_precision(folder, None if precision is None else recipe)
    if chosen == "torch" or device != "cpu":
        accelerated = accelerate(
            model, precision=recipe, runtime=runtime, device=device, threads=threads, progress=progress
        )
        what = {"torch": "torch with cache", "onnx": "ONNX Runtime", "tensorrt": "TensorRT"}[chosen]
        what += f", {manifest.recipe['name'] if manifest else recipe.name}" + f", {device}" * (device != "cpu")
        return accelerated.backend, accelerated.tokenizer, what
    if manifest is None:
        folder, manifest = cached_export_and_manifest(model, precision=recipe, progress=progress)
    has_tokenizer = "tokenizer_config.json" in manifest.files or "tokenizer.json" in manifest.files
    tokenizer = tokenizer_of(folder) if has_tokenizer else None
    settings = SessionSettings(threads=threads, openvino=runtime == "openvino")
    backend = OrtStatic(folder, manifest=manifest, settings=settings)
    return backend, tokenizer, f"ONNX Runtime, {manifest.recipe['name']}"


def _as_recipe(precision: Any) -> Recipe:
    """The recipe of a name or of torch's type; fp32 where none was given."""
    return as_recipe("fp32" if precision is None else FLOATS.get(str(precision), precision))


def _as_device(device: Any) -> Any:
    """``"cpu"`` or ``"cuda"`` where that is meant; other values are for `SessionSettings` to refuse."""
    kind, _, number = str(device).partition(":")
    if kind == "cuda" and number.isdigit() and int(number):
        raise InputError(
            f"device must be the first GPU, got {str(device)!r}: set CUDA_VISIBLE_DEVICES={number} before Python "
            "starts, and give device='cuda'."
        )
    return kind if kind in ("cpu", "cuda") and number in ("", "0") else device


def _runtime(runtime: str | None, device: str, recipe: Recipe, *, is_export: bool) -> str:
    """The runtime that was asked for, if it can do that, or the one that suits."""
    if runtime is not None and runtime not in RUNTIMES:
        raise InputError(f"runtime is {runtime!r}; give one of {', '.join(RUNTIMES)}, or leave it out.")
    if runtime is None:
        in_torch = recipe.dtype == "bfloat16" or (device == "cuda" and not recipe.integers)
        return "torch" if in_torch and not is_export else "onnx"
    if runtime == "tensorrt" and device != "cuda":
        raise InputError("runtime='tensorrt' is for device='cuda'.")
    if runtime == "torch" and is_export:
        raise InputError("runtime='torch' runs a model, and this folder is an export: give the model or its name.")
    if runtime == "openvino" and (recipe.name != "fp32" or device != "cpu"):
        raise InputError("runtime='openvino' is for device='cpu' and precision='fp32': leave runtime out.")
    if (runtime == "torch" and recipe.integers) or (runtime != "torch" and recipe.dtype == "bfloat16"):
        other = "onnx" if runtime == "torch" else "torch"
        raise InputError(f"precision {recipe.name!r} runs on {other}, not on {runtime}: leave runtime out.")
    return "onnx" if runtime == "openvino" else runtime


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise MissingPackageError("device='cuda' needs a GPU and a torch that sees it: give device='cpu' here.")


def tuned(recipe: Recipe, tuned_for: str) -> Recipe:
    """The recipe that is fastest for small batches (``"latency"``) or large ones (``"throughput"``).

    Only "int8" has another: with many rows, what is multiplied is quantised once for all of them, and
    integers multiply faster than weights are read.

    >>> tuned(as_recipe("int8"), "throughput").name
    'int8-dynamic'
    """
    if not isinstance(tuned_for, str) or tuned_for not in TUNED_FOR:
        raise InputError(f"tuned_for is {tuned_for!r}; give one of {', '.join(TUNED_FOR)}.")
    return RECIPES.get(TUNED_FOR[tuned_for].get(recipe.name, ""), recipe)


def _in_precision(folder: Path, recipe: Recipe | None) -> Manifest:
    """The manifest of a given export, if it is in the precision that was asked for; ``None`` asks for none."""
    manifest = verified_manifest(folder)
    there = manifest.recipe["name"]
    if recipe is not None and recipe.name != there:
        raise InputError(
            f"{folder} is an export in {there}, and precision is {recipe.name!r}: give the model or its name, "
            "or convert the export in fp32 (t5accel.precision.gate, t5accel.precision.fp16)."
        )
    return manifest


def _in_torch(
    model: Any, recipe: Recipe, settings: SessionSettings, tokenizer: Any, *, check_logits: bool
) -> AcceleratedT5:
    """On a GPU with captured steps; on a CPU, for bf16, transformers' own model."""
    import torch

    from t5accel.backends.hf_generate import AcceleratedT5
    from t5accel.backends.torch_eager import TorchEager
    from t5accel.backends.torch_static import TorchStatic
    from t5accel.models.load import cast_model, load_model

    if isinstance(model, str | os.PathLike):
        model, own_tokenizer = load_model(model)
        tokenizer = own_tokenizer if tokenizer is None else tokenizer
    torch.set_num_threads(settings.threads or machine.cpu_threads())
    moved = cast_model(model, recipe.dtype, settings.device)
    captured = settings.device != "cpu"
    backend = TorchStatic(moved) if captured else TorchEager(moved)
    if captured and check_logits:
        run = backend_logits(backend)
        sizes = dict(vocab_size=backend.vocab_size, source_vocab_size=getattr(backend, "source_vocab_size", None))
        compare_logits(moved, run, **sizes, tolerance=TOLERANCES[recipe.dtype])
    return AcceleratedT5(backend, model.config, model.generation_config, tokenizer)
