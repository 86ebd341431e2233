"""The ways of generating that are measured against each other: transformers, our loop on torch, our engines on ONNX.

Each is a `Technique` in ``TECHNIQUES``; what measures them is `bench.bench`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from t5accel.checkpoints import load_t5
from t5accel.decoding.greedy import greedy
from t5accel.errors import InputError
from t5accel.graphs.contract import DECODER, ENCODER, WEIGHTS
from t5accel.graphs.export_cache import cached_export
from t5accel.graphs.manifest import read_manifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from t5accel.backends.ort import OrtNumpy
    from t5accel.decoding.backend import Backend

# (input_ids (B, S), attention_mask (B, S), shortest, longest) -> new tokens (B, L), all int64 numpy
Generate = Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]


@dataclass
class Subject:
    """The model that is measured, in the forms that techniques need; each is made when it is first asked for.

    Attributes:
        name: as `checkpoints.load_t5` knows it.
        seed: of random weights.
        threads: that every technique shall use.
    """

    name: str
    seed: int
    threads: int

    @cached_property
    def _loaded(self) -> tuple[PreTrainedModel, Any]:
        return load_t5(self.name, seed=self.seed)

    @property
    def model(self) -> PreTrainedModel:
        return self._loaded[0]

    @property
    def tokenizer(self) -> Any:
        return self._loaded[1]

    @cached_property
    def export(self) -> Path:
        """The folder of its ONNX export; from the cache without loading the model where that is possible."""
        return cached_export(self.name) if self.seed == 0 else cached_export(self.model, tokenizer=self.tokenizer)


@dataclass(frozen=True)
class Technique:
    """A way of generating.

    Attributes:
        name: what a reader calls it; ``backend`` is the module or library that runs it.
        build: takes the subject and returns the function that is timed.
        bytes_on_disk: of the weights, in the form that it loads.
        libraries: what it imports; the memory that these take by themselves is measured apart.
    """

    name: str
    backend: str
    build: Callable[[Subject], Generate]
    bytes_on_disk: Callable[[Subject], int]
    libraries: tuple[str, ...] = ("torch", "transformers")
    precision: str = "fp32"
    recipe: str = "fp32"


def weight_bytes(subject: Subject) -> int:
    """Bytes of the weights as ``save_pretrained`` writes them at the model's type: shared tensors count once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in subject.model.parameters())


def graph_bytes(subject: Subject) -> int:
    """Bytes of both graphs and of the weights beside them."""
    files = read_manifest(subject.export, verify=False).files
    return sum(files[name]["size_bytes"] for name in (ENCODER, DECODER, WEIGHTS) if name in files)


def _generate(model: Any, use_cache: bool = True) -> Generate:
    """transformers' own loop around a model of theirs, or around ours that looks like one."""
    import torch

    def generate(ids: np.ndarray, mask: np.ndarray, shortest: int, longest: int) -> np.ndarray:
        out = model.generate(
            input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), use_cache=use_cache, num_beams=1,
            do_sample=False, min_new_tokens=shortest, max_new_tokens=longest,
        )  # fmt: skip
        return out[:, 1:].numpy()

    return generate


def _greedy(backend: Backend) -> Generate:
    def generate(ids: np.ndarray, mask: np.ndarray, shortest: int, longest: int) -> np.ndarray:
        return greedy(backend, ids, mask, min_new_tokens=shortest, max_new_tokens=longest).sequences

    return generate


def _eager(subject: Subject, use_cache: bool) -> Generate:
    from t5accel.backends.torch_eager import TorchEager

    return _greedy(TorchEager(subject.model, use_cache=use_cache))


def _numpy_feeds(subject: Subject) -> Generate:
    from t5accel.backends.ort import OrtNumpy

    return _engine(subject, OrtNumpy)


def _bound(subject: Subject) -> Generate:
    from t5accel.backends.ort_bound import OrtBound

    return _engine(subject, OrtBound)


def _engine(subject: Subject, kind: type[OrtNumpy]) -> Generate:
    from t5accel.backends.ort_session import SessionSettings

    return _greedy(kind(subject.export, settings=SessionSettings(threads=subject.threads)))


def _behind_generate(subject: Subject) -> Generate:
    from t5accel.accelerate import accelerate

    return _generate(accelerate(subject.export, threads=subject.threads, progress=False))


REFERENCE = "transformers with cache"
_HF, _TORCH, _ORT = "transformers generate()", "backends.torch_eager", ("onnxruntime",)
TECHNIQUES = (
    Technique("transformers without cache", _HF, lambda subject: _generate(subject.model, False), weight_bytes),
    Technique(REFERENCE, _HF, lambda subject: _generate(subject.model), weight_bytes),
    Technique("our loop without cache", _TORCH, lambda subject: _eager(subject, False), weight_bytes),
    Technique("our loop with cache", _TORCH, lambda subject: _eager(subject, True), weight_bytes),
    Technique("ONNX Runtime, generate()", "backends.hf", _behind_generate, graph_bytes,
              ("onnxruntime", "torch", "transformers")),
    Technique("ONNX Runtime, our loop, numpy feeds", "backends.ort", _numpy_feeds, graph_bytes, _ORT),
    Technique("ONNX Runtime, our loop, bound", "backends.ort_bound", _bound, graph_bytes, _ORT),
)  # fmt: skip


def choose(parts: Sequence[str]) -> tuple[Technique, ...]:
    """The techniques whose name holds one of ``parts``, and the reference; all without parts.

    Raises ``InputError`` for a part that no name holds.

    >>> [technique.name for technique in choose(["loop without"])]
    ['transformers with cache', 'our loop without cache']
    """
    for part in parts:
        if not any(part in technique.name for technique in TECHNIQUES):
            raise InputError(f"No technique is called {part!r}; there are {[t.name for t in TECHNIQUES]}.")
    return tuple(t for t in TECHNIQUES if not parts or t.name == REFERENCE or any(part in t.name for part in parts))
