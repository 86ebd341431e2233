"""The one-liner: any T5, exported once, behind transformers' ``generate()`` and our own loops."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from t5accel.backends.ort_session import SessionSettings
from t5accel.errors import InputError
from t5accel.graphs.contract import MANIFEST
from t5accel.graphs.export_cache import cached_export

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from t5accel.backends.hf import OrtT5ForConditionalGeneration


def accelerate(
    model: PreTrainedModel | str | os.PathLike[str],
    *,
    device: str = "cpu",
    threads: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_source_tokens: int | None = None,
    progress: bool = True,
) -> OrtT5ForConditionalGeneration:
    """Run a T5 on ONNX Runtime, as the model that transformers knows.

    Args:
        model: ``"mini"``, ``"random:t5-small"``, a hub id, a folder written by ``save_pretrained`` or by
            `export.export_t5`, or a model object. What is no export yet is exported once, into the user's cache
            (`export_cache`; ``t5accel cache list``).
        device: ``"cpu"`` or ``"cuda"``.
        threads: of ONNX Runtime; by default those that this process may really use.
        tokenizer: saved with the export; by default that of a model given by name.
        max_source_tokens: refuse longer inputs.
        progress: show a bar while exporting.

    Returns:
        An object with ``generate()``; with ``backend`` for our own loops, as in ``greedy(model.backend, …)``; and with
        ``tokenizer``, ``None`` for models without one.

    Raises:
        ExportError: the export cannot be written, is damaged, or was optimised for another machine.
        InputError, NotT5Error, UnknownModelError, ModelUnavailableError: there is no such model.
        MissingPackageError: onnxruntime is not installed, or not the one for this device.

    >>> model = accelerate("mini")
    >>> batch = model.tokenizer(["translate English to French: I am tired."], return_tensors="pt")
    >>> model.tokenizer.batch_decode(model.generate(**batch, max_new_tokens=20), skip_special_tokens=True)
    ['Je suis fatigué.']
    """
    from transformers import AutoTokenizer

    from t5accel.backends.hf import OrtT5ForConditionalGeneration

    settings = SessionSettings(threads=threads, device=device)
    is_path = isinstance(model, str | os.PathLike)
    if not is_path and not hasattr(model, "state_dict"):
        raise InputError(f"model is {model!r}; give a name, a folder or a T5 model.")
    is_export = is_path and (Path(model) / MANIFEST).is_file()
    folder = Path(model) if is_export else cached_export(model, tokenizer=tokenizer, progress=progress)
    accelerated = OrtT5ForConditionalGeneration.from_pretrained(
        folder, settings=settings, max_source_tokens=max_source_tokens, verify=is_export
    )
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "spiece.model"))
    accelerated.tokenizer = AutoTokenizer.from_pretrained(folder) if has_tokenizer else tokenizer
    return accelerated


class _CallableModule(ModuleType):
    """So that ``t5accel.accelerate(…)`` also works once this module, which has the same name, was imported."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return accelerate(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
