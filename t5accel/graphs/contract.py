"""The two-graph layout: an export's files, and its graphs' inputs and outputs.

Shapes: B sources in the batch, K rows (beams, samples, drafts) per source, S source positions, T new and P past decoder
positions, V vocabulary entries, H_i heads of layer i.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from t5accel.errors import InputError
from t5accel.models.sizes import T5Dims

ENCODER, DECODER = "encoder.onnx", "decoder.onnx"
ENCODER_ONLY = "encoder_only.onnx"  # in place of both: the encoder's hidden states
SHORTLIST = "decoder_shortlist.onnx"  # optional: the decoder with a second head, in 8 bits
STEP = "decoder_step.onnx"  # optional: one new token in ONNX Runtime's fused operators
SHORTLIST_EXTRAS = ("hidden", "norm", "error")  # computed with approximate logits alone
SHORTLIST_OUTPUTS = ("logits", *SHORTLIST_EXTRAS)
WEIGHTS = "weights.data"  # all graphs' large weights, unless they are inside the graphs
MANIFEST = "manifest.json"
MODULES = "modules.json"  # sentence-transformers' list of what follows an encoder


@dataclass(frozen=True)
class TensorSpec:
    """A graph's input or output; strings in ``shape`` name dimensions that vary."""

    name: str
    dtype: str
    shape: tuple[str | int, ...]


@dataclass(frozen=True)
class GraphSpec:
    """A graph's inputs and outputs, in order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


_SOURCE = tuple(TensorSpec(name, "int64", ("B", "S")) for name in ("input_ids", "attention_mask"))


def kv_names(prefix: str, layers: int) -> list[str]:
    """The key and value tensors of one kind, layer by layer.

    >>> kv_names("past", 2)
    ['past_key_0', 'past_value_0', 'past_key_1', 'past_value_1']
    """
    return [f"{prefix}_{part}_{layer}" for layer in range(layers) for part in ("key", "value")]


def encoder_spec(dims: T5Dims, dtype: str = "float32") -> GraphSpec:
    """``encoder.onnx``: tokens -> the cross-attention keys and values of each decoder layer."""
    return GraphSpec(_SOURCE, _cross(dims, dtype))


def encoder_only_spec(dims: T5Dims) -> GraphSpec:
    """``encoder_only.onnx``: tokens -> hidden states, float32 in every recipe."""
    return GraphSpec(_SOURCE, (TensorSpec("last_hidden_state", "float32", ("B", "S", dims.d_model)),))


def decoder_spec(dims: T5Dims, dtype: str = "float32") -> GraphSpec:
    """``decoder.onnx``: T new tokens for K rows of each source, on a history of P -> logits, longer history.

    P may be 0, T more than 1; attention is causal. Histories are right-aligned: ``past_mask`` hides the columns in
    front of a shorter one.
    """
    return GraphSpec(
        inputs=(
            TensorSpec("input_ids", "int64", ("B", "K", "T")),
            TensorSpec("attention_mask", "int64", ("B", "S")),
            TensorSpec("past_mask", "int64", ("B", "K", "P")),
            *_own("past", ("B", "K"), "P", dims, dtype),
            *_cross(dims, dtype),
        ),
        outputs=(
            TensorSpec("logits", "float32", ("B", "K", "T", dims.vocab_size)),
            *_own("present", ("B", "K"), "P + T", dims, dtype),
        ),
    )


def shortlist_spec(dims: T5Dims) -> GraphSpec:
    """``decoder_shortlist.onnx``: the decoder with exact or approximate logits.

    With ``exact``, ``logits`` are those of ``decoder.onnx``, N = T, and the other new outputs are empty. Without, they
    are the last position's, N = 1, from 8-bit weights (`shortlist_head`), beside the head's input ``hidden`` there, its
    Euclidean norm, and the norm of its rounding ``error``.
    """
    decoder = decoder_spec(dims)
    return GraphSpec(
        inputs=(*decoder.inputs, TensorSpec("exact", "bool", ())),
        outputs=(
            TensorSpec("logits", "float32", ("B", "K", "N", dims.vocab_size)),
            TensorSpec("hidden", "float32", ("B", "K", 1, dims.d_model)),
            TensorSpec("norm", "float32", ("B", "K", 1)),
            TensorSpec("error", "float32", ("B", "K", 1)),
            *decoder.outputs[1:],
        ),
    )


def step_spec(dims: T5Dims, *, shortlist: bool = False) -> GraphSpec:
    """``decoder_step.onnx``: one new token for each of R = B * K rows, on buffers of M columns (`fused_step`).

    ``past_*_i`` and ``present_*_i`` are the same memory; the new token's key and value are written to column P,
    ``past_length``. ``past_mask`` is 1 in columns that are real or still to be written, and 0 in front of a shorter
    history, where buffers must hold finite numbers. The operators take mask and length as int32. With ``shortlist`` the
    results are those of `shortlist_spec`.
    """
    results = shortlist_spec(dims).outputs[: 1 + len(SHORTLIST_EXTRAS)] if shortlist else decoder_spec(dims).outputs[:1]
    exact = (TensorSpec("exact", "bool", ()),) if shortlist else ()
    return GraphSpec(
        inputs=(
            TensorSpec("input_ids", "int64", ("R", 1)),
            TensorSpec("attention_mask", "int32", ("B", "S")),
            TensorSpec("past_mask", "int32", ("R", "M")),
            TensorSpec("past_length", "int32", (1,)),
            *_own("past", ("R",), "M", dims),
            *_cross(dims),
            *exact,
        ),
        outputs=(
            *(replace(tensor, shape=("R", 1, *tensor.shape[3:])) for tensor in results),
            *_own("present", ("R",), "M", dims),
        ),
    )


def _cross(dims: T5Dims, dtype: str = "float32") -> tuple[TensorSpec, ...]:
    shapes = [("B", heads, "S", dims.d_kv) for heads in dims.cross_heads]
    return _keys_and_values("cross", shapes, dtype)


def _own(
    prefix: str, rows: tuple[str, ...], length: str, dims: T5Dims, dtype: str = "float32"
) -> tuple[TensorSpec, ...]:
    shapes = [(*rows, heads, length, dims.d_kv) for heads in dims.decoder_heads]
    return _keys_and_values(prefix, shapes, dtype)


def _keys_and_values(prefix: str, shapes: list[tuple[str | int, ...]], dtype: str) -> tuple[TensorSpec, ...]:
    names = kv_names(prefix, len(shapes))
    return tuple(TensorSpec(name, dtype, shapes[number // 2]) for number, name in enumerate(names))


def empty_past(spec: GraphSpec, batch: int) -> dict[str, np.ndarray]:
    """The decoder's inputs of an empty history, for one row per source."""
    sizes = {"B": batch, "K": 1, "P": 0}
    return {
        tensor.name: np.zeros([sizes.get(size, size) for size in tensor.shape], dtype=tensor.dtype)
        for tensor in spec.inputs
        if tensor.name.startswith("past_")
    }


def as_folder(value: Any) -> Path:
    """``value`` as an absolute path; raises ``InputError`` for what no file system accepts as a name."""
    try:
        text = os.fspath(value)
        if isinstance(text, str) and text and b"\0" not in os.fsencode(text):
            return Path(text).absolute()  # the working folder may change before all files are read
    except (TypeError, UnicodeEncodeError):
        pass
    raise InputError(f"folder must be the path of a folder as text or a Path, got {value!r}.")
