"""The ways of generating that are measured against each other: transformers, our loop on torch, our engines on ONNX.

Each is a `Technique`; `bench.bench` measures those in ``TECHNIQUES``, `ladder.climb` stacks them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from t5accel.decoding.greedy_search import greedy
from t5accel.decoding.ngram_lookup import prompt_lookup
from t5accel.errors import InputError
from t5accel.graphs.export_cache import cached_export
from t5accel.graphs.manifest import read_manifest
from t5accel.models.load import load_model
from t5accel.precision.recipes import RECIPES, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from t5accel.decoding.backend import Backend, Generated

# (input_ids (B, S), attention_mask (B, S), shortest, longest) -> new tokens (B, L), all int64 numpy
Generate = Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]


@dataclass
class Subject:
    """The model that is measured, in the forms that techniques need; each is made when it is first asked for.

    Attributes:
        name: as `models.load.load_model` knows it.
        seed: of random weights.
        threads: that every technique shall use.
    """

    name: str
    seed: int
    threads: int

    @cached_property
    def _loaded(self) -> tuple[PreTrainedModel, Any]:
        return load_model(self.name, seed=self.seed)

    @property
    def model(self) -> PreTrainedModel:
        return self._loaded[0]

    @property
    def tokenizer(self) -> Any:
        return self._loaded[1]

    def export(self, precision: str = "fp32") -> Path:
        """The folder of its ONNX export; from the cache without loading the model where that is possible."""
        if self.seed == 0:
            return cached_export(self.name, precision=precision)
        return cached_export(self.model, precision=precision, tokenizer=self.tokenizer)


@dataclass(frozen=True)
class Technique:
    """A way of generating.

    Attributes:
        name: what a reader calls it; ``backend`` is the module or library that runs it.
        build: takes the subject and returns the function that is timed.
        bytes_on_disk: of the weights, in the form that it loads.
        libraries: what it imports; the memory that these take by themselves is measured apart.
        recipe: in which numbers.
        student: a smaller model that takes the subject's place, if any; ``teacher`` is the subject that it was made of,
            and it is measured beside that one only.
    """

    name: str
    backend: str
    build: Callable[[Subject], Generate]
    bytes_on_disk: Callable[[Subject], int]
    libraries: tuple[str, ...] = ("torch", "transformers")
    recipe: Recipe = RECIPES["fp32"]
    student: str | None = None
    teacher: str = "mini"

    @property
    def exact(self) -> bool:
        """Whether it has to give the reference's tokens; others are asked how many they share."""
        return self.recipe.name == "fp32" and self.student is None

    def measured_on(self, subject: Subject) -> Subject:
        """The subject, or the student in its place."""
        return subject if self.student is None else Subject(self.student, subject.seed, subject.threads)


def weight_bytes(subject: Subject) -> int:
    """Bytes of the weights as ``save_pretrained`` writes them at the model's type: shared tensors count once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in subject.model.parameters())


def graph_bytes(subject: Subject, precision: str = "fp32") -> int:
    """Bytes of the subject's export in these numbers."""
    return read_manifest(subject.export(precision), verify=False).graph_bytes


def _generate(model: Any, use_cache: bool = True, **asked: bool) -> Generate:
    """``generate()`` of a model of transformers, or of ours that looks like one."""
    import torch

    def generate(ids: np.ndarray, mask: np.ndarray, shortest: int, longest: int) -> np.ndarray:
        out = model.generate(
            input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), use_cache=use_cache, num_beams=1,
            do_sample=False, min_new_tokens=shortest, max_new_tokens=longest, **asked,
        )  # fmt: skip
        return getattr(out, "sequences", out)[:, 1:].numpy()

    return generate


def _decoding(backend: Backend, decode: Callable[..., Generated] = greedy) -> Generate:
    def generate(ids: np.ndarray, mask: np.ndarray, shortest: int, longest: int) -> np.ndarray:
        return decode(backend, ids, mask, min_new_tokens=shortest, max_new_tokens=longest).sequences

    return generate


def _eager(subject: Subject, use_cache: bool) -> Generate:
    from t5accel.backends.torch_eager import TorchEager

    return _decoding(TorchEager(subject.model, use_cache=use_cache))


def _engine(
    subject: Subject, precision: str = "fp32", *, way: str = "static", shortlist: bool = True,
    decode: Callable[..., Generated] = greedy,
) -> Generate:  # fmt: skip
    from t5accel.backends.ort_iobinding import OrtBound
    from t5accel.backends.ort_numpy import OrtNumpy
    from t5accel.backends.ort_session import SessionSettings
    from t5accel.backends.ort_static import OrtStatic

    backend = {"numpy": OrtNumpy, "bound": OrtBound, "static": OrtStatic}[way]
    settings = SessionSettings(threads=subject.threads, shortlist=shortlist)
    return _decoding(backend(subject.export(precision), settings=settings), decode)


def _behind_generate(subject: Subject, **asked: bool) -> Generate:
    from t5accel.api import accelerate

    return _generate(accelerate(subject.export(), threads=subject.threads, progress=False), **asked)


def _in(precision: str, student: str | None = None) -> Technique:
    """Our engine in these numbers, with the subject's own model or a student of it."""
    return Technique(
        f"{student or 'ONNX Runtime'}, our loop, {precision}", "backends.ort.static",
        lambda subject: _engine(subject, precision), lambda subject: graph_bytes(subject, precision), _ORT,
        RECIPES[precision], student,
    )  # fmt: skip


REFERENCE = "transformers with cache"
_HF, _TORCH, _ORT = "transformers generate()", "backends.torch_eager", ("onnxruntime",)
_BEHIND_GENERATE = Technique("ONNX Runtime, generate()", "backends.hf", _behind_generate, graph_bytes,
                             ("onnxruntime", "torch", "transformers"))  # fmt: skip
TECHNIQUES = (
    Technique("transformers without cache", _HF, lambda subject: _generate(subject.model, False), weight_bytes),
    Technique(REFERENCE, _HF, lambda subject: _generate(subject.model), weight_bytes),
    Technique("our loop without cache", _TORCH, lambda subject: _eager(subject, False), weight_bytes),
    Technique("our loop with cache", _TORCH, lambda subject: _eager(subject, True), weight_bytes),
    _BEHIND_GENERATE,
    Technique("ONNX Runtime, our loop, all logits", "backends.ort.numpy",
              lambda subject: _engine(subject, way="numpy", shortlist=False), graph_bytes, _ORT),
    Technique("ONNX Runtime, our loop, numpy feeds", "backends.ort.numpy",
              lambda subject: _engine(subject, way="numpy"), graph_bytes, _ORT),
    Technique("ONNX Runtime, our loop, bound", "backends.ort.bound",
              lambda subject: _engine(subject, way="bound"), graph_bytes, _ORT),
    Technique("ONNX Runtime, our loop, fused step", "backends.ort.static", _engine, graph_bytes, _ORT),
    _in("int8"),
    _in("int4"),
    _in("fp32", "mini-d1"),
    _in("int8", "mini-d1"),
    _in("int8", "mini-d1p"),
)  # fmt: skip
# Beside them, not measured by `bench`: transformers' loop around our graphs, for `generate()` searches greedily in ours
# unless it is asked for more than tokens; integers for large batches; and drafts that need real texts.
THEIR_LOOP = replace(_BEHIND_GENERATE, name="ONNX Runtime, transformers' loop",
                     build=lambda subject: _behind_generate(subject, return_dict_in_generate=True))  # fmt: skip
THROUGHPUT = _in("int8-dynamic")
LOOKUP = replace(_in("int8"), name="ONNX Runtime, lookup, int8", backend="decoding.lookup",
                 build=lambda subject: _engine(subject, "int8", decode=prompt_lookup))  # fmt: skip


NAMED = {one.name: one for one in (*TECHNIQUES, THEIR_LOOP, LOOKUP, THROUGHPUT)}  # found by name elsewhere


def choose(parts: Sequence[str], *, model: str = "mini") -> tuple[Technique, ...]:
    """The techniques whose name holds one of ``parts``, and the reference; all without parts.

    Those of students are chosen for their teacher's ``model`` alone.

    Raises ``InputError`` for a part that no name holds.

    >>> [technique.name for technique in choose(["loop without"])]
    ['transformers with cache', 'our loop without cache']
    """
    for part in parts:
        if not any(part in technique.name for technique in TECHNIQUES):
            raise InputError(f"No technique is called {part!r}; there are {[t.name for t in TECHNIQUES]}.")
    named = (t for t in TECHNIQUES if not parts or t.name == REFERENCE or any(part in t.name for part in parts))
    return tuple(t for t in named if t.student is None or t.teacher == model)
