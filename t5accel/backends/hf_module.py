"""The `torch.nn.Module` interface of an accelerated model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

from t5accel import machine
from t5accel.errors import InputError
from t5accel.graphs.contract import WEIGHTS
from t5accel.models.pruned import resize
from t5accel.models.sizes import T5_LIKE

_LOOP: ContextVar[torch.device | None] = ContextVar("_LOOP", default=None)


class Closed:
    """Takes the place of a freed backend; any use raises ``InputError``."""

    def __getattr__(self, name: str) -> Any:
        raise InputError("This model is closed: open it again.")


class WeightlessModule(PreTrainedModel):
    """A transformers model without parameters; its backend holds the weights."""

    accepts_loss_kwargs = False  # so that Trainer gives forward() no num_items_in_batch
    backend: Any
    encoder: Any

    @property
    def device(self) -> torch.device:
        """The backend's device; while transformers' loop runs, the loop's, since a backend takes tensors from any."""
        if (loop := _LOOP.get()) is not None:
            return loop
        settings = getattr(self.backend, "settings", None)
        device = torch.device(getattr(self.backend, "device", None) or getattr(settings, "device", "cpu"))
        return torch.empty(0, device=device).device if device.type == "cuda" else device  # with its number

    @contextmanager
    def looping_on(self, device: torch.device) -> Iterator[None]:
        """Report this device meanwhile: transformers expects a model where its tensors are."""
        token = _LOOP.set(device)
        try:
            yield
        finally:
            _LOOP.reset(token)

    @property
    def is_looping(self) -> bool:
        """Whether transformers' ``generate`` runs."""
        return _LOOP.get() is not None

    @property
    def dtype(self) -> torch.dtype:
        """The type of the backend's floats; logits are float32 everywhere."""
        if (model := getattr(self.backend, "model", None)) is not None:
            return model.dtype
        recipe = getattr(getattr(self.backend, "manifest", None), "recipe", {})
        return getattr(torch, recipe.get("floats", "float32"))

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """One empty parameter, from which callers read device and dtype."""
        yield torch.nn.Parameter(torch.empty(0, dtype=self.dtype, device=self.device), requires_grad=False)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Number of parameters of transformers' own model; none is trainable."""
        if only_trainable:
            return 0
        own = getattr(self.backend, "model", None)
        if own is None:
            with torch.device("meta"):
                own = AutoModelForSeq2SeqLM.from_config(self.config)
            if widths := getattr(self.config, "layer_widths", None):
                resize(own, widths)
            dims = getattr(self.backend, "dims", None)
            if dims and not dims.tied and self.config.model_type in T5_LIKE:  # 5.x ties whatever is configured
                own.lm_head.weight = torch.nn.Parameter(torch.empty_like(own.lm_head.weight))
        return own.num_parameters(exclude_embeddings=exclude_embeddings)

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes of the backend's weights; of an export, those of its graphs and weights on disk."""
        if (own := getattr(self.backend, "model", None)) is not None:
            return own.get_memory_footprint(return_buffers)
        files = getattr(getattr(self.backend, "manifest", None), "files", {})
        return sum(entry["size_bytes"] for name, entry in files.items() if name == WEIGHTS or name.endswith(".onnx"))

    def __repr__(self) -> str:
        if isinstance(self.backend, Closed):
            return f"{type(self).__name__}(closed)"
        facts = [self.config.model_type, *self._runtime(), str(self.device)]
        if self.device.type == "cpu":
            settings = getattr(self.backend, "settings", None)
            count = (settings.threads or machine.cpu_threads()) if settings else torch.get_num_threads()
            facts.append(f"{count} threads")
        facts.append(f"{self.get_memory_footprint() / 1e6:.1f} MB")
        if (folder := getattr(self.backend, "folder", None)) is not None:
            facts.append(str(folder))
        return f"{type(self).__name__}({', '.join(facts)})"

    def _runtime(self) -> tuple[str, str]:
        """What runs the model, and its precision."""
        if (manifest := getattr(self.backend, "manifest", None)) is None:
            kind = "torch" if hasattr(self.backend, "model") else type(self.backend).__name__
            return kind, str(self.dtype).removeprefix("torch.")
        kind = "TensorRT" if hasattr(self.backend, "trt") else "ONNX Runtime"
        if self.backend.settings.openvino:
            kind += " with OpenVINO" + " in bf16" * (self.backend.settings.encoder_precision == "bf16")
        return kind, manifest.recipe["name"]

    def train(self, mode: bool = True) -> Any:
        if mode:
            raise InputError("This model is for inference only: train transformers' own model, then accelerate that.")
        return super().train(mode)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        # to(), cuda(), half() … come here with what they would do to a weight.
        weight, failure = next(self.parameters()).data, None
        try:
            moved = fn(weight)
        except (AssertionError, RuntimeError) as error:  # the device is not there
            moved, failure = None, error
        if moved is None or (moved.device, moved.dtype) != (weight.device, weight.dtype):
            raise InputError(
                f"This model runs in {self.dtype} on {self.device} and holds no weights to move: choose device and "
                "precision where it is made, as in accelerate(…, device='cuda', precision='fp16')."
            ) from failure
        return super()._apply(fn, *args, **kwargs)

    def state_dict(self, *_: Any, **__: Any) -> Any:
        raise InputError(
            "The weights of this model are its backend's, and a state_dict would be empty: use save_pretrained(), "
            "which copies the export, or the state_dict() of transformers' own model."
        )

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        raise InputError(
            "The weights of this model are its backend's, and none would be loaded: load them into transformers' own "
            "model, then accelerate that."
        )

    def close(self) -> None:
        """Free the backend's sessions, weights and buffers; any later use but ``close`` raises ``InputError``."""
        if not isinstance(self.backend, Closed):
            getattr(self.backend, "close", bool)()
            self.backend = self.encoder.backend = Closed()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
