"""The two-graph layout: which files an export has, and the name, type and shape of everything that goes in and out.

Shapes: B sources in the batch, K rows (beams, samples, drafts) per source, S source positions, T new and P past decoder
positions, V vocabulary entries, H_i heads of layer i.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from t5accel.errors import InputError
from t5accel.models.sizes import T5Dims

ENCODER, DECODER = "encoder.onnx", "decoder.onnx"
SHORTLIST = "decoder_shortlist.onnx"  # an optional third graph: the decoder with a second, smaller head
STEP = "decoder_step.onnx"  # another: one new token on buffers that stay, in ONNX Runtime's fused operators
SHORTLIST_EXTRAS = ("hidden", "norm", "error")  # its outputs that only near logits come with
SHORTLIST_OUTPUTS = ("logits", *SHORTLIST_EXTRAS)
WEIGHTS = "weights.data"  # both graphs' large weights, where they are not inside the graphs
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class TensorSpec:
    """A graph's input or output; texts in ``shape`` name the dimensions that vary from call to call."""

    name: str
    dtype: str
    shape: tuple[str | int, ...]


@dataclass(frozen=True)
class GraphSpec:
    """What goes into a graph and what comes out of it, in this order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def kv_names(prefix: str, layers: int) -> list[str]:
    """The tensors of one kind, layer by layer.

    >>> kv_names("past", 2)
    ['past_key_0', 'past_value_0', 'past_key_1', 'past_value_1']
    """
    return [f"{prefix}_{part}_{layer}" for layer in range(layers) for part in ("key", "value")]


def encoder_spec(dims: T5Dims, dtype: str = "float32") -> GraphSpec:
    """``encoder.onnx``: tokens -> the keys and values of each decoder layer's cross-attention, computed once.

    >>> dims = T5Dims(300, 8, 6, (2,), (2,), (2,), (16,), (16,), gated=False, tied=True)
    >>> encoder_spec(dims).outputs[0]
    TensorSpec(name='cross_key_0', dtype='float32', shape=('B', 2, 'S', 6))
    """
    tokens = ("B", "S")
    return GraphSpec(
        inputs=(TensorSpec("input_ids", "int64", tokens), TensorSpec("attention_mask", "int64", tokens)),
        outputs=_cross(dims, dtype),
    )


def decoder_spec(dims: T5Dims, dtype: str = "float32") -> GraphSpec:
    """``decoder.onnx``: T new tokens for K rows of each source, on a history of P -> logits and the longer history.

    P may be 0 (the first step). T may be more than 1; the new positions see those before them only. Histories of
    unequal length end together: what is left of a shorter one is masked by ``past_mask``.

    >>> dims = T5Dims(300, 8, 6, (2,), (2,), (2,), (16,), (16,), gated=False, tied=True)
    >>> [tensor.name for tensor in decoder_spec(dims).outputs]
    ['logits', 'present_key_0', 'present_value_0']
    """
    return GraphSpec(
        inputs=(
            TensorSpec("input_ids", "int64", ("B", "K", "T")),
            TensorSpec("attention_mask", "int64", ("B", "S")),
            TensorSpec("past_mask", "int64", ("B", "K", "P")),
            *_self(dims, "past", "P", dtype),
            *_cross(dims, dtype),
        ),
        outputs=(
            TensorSpec("logits", "float32", ("B", "K", "T", dims.vocab_size)),
            *_self(dims, "present", "P + T", dtype),
        ),
    )


def shortlist_spec(dims: T5Dims, dtype: str = "float32") -> GraphSpec:
    """``decoder_shortlist.onnx``: the decoder, which is asked at each step for its exact logits or for near ones.

    With ``exact`` its ``logits`` are those of ``decoder.onnx``, N = T. Without, they are near those of the last
    position, N = 1, computed from weights of 8 bits (`shortlist`). Then what the head reads at that position comes out
    as well, ``hidden``, with its Euclidean norm and that of what it lost in 8 bits; otherwise these are empty.

    >>> dims = T5Dims(300, 8, 6, (2,), (2,), (2,), (16,), (16,), gated=False, tied=True)
    >>> shortlist_spec(dims).inputs[-1], [tensor.name for tensor in shortlist_spec(dims).outputs][:4]
    (TensorSpec(name='exact', dtype='bool', shape=()), ['logits', 'hidden', 'norm', 'error'])
    """
    decoder = decoder_spec(dims, dtype)
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
    """``decoder_step.onnx``: one new token for each of R = B * K rows, on buffers of M columns (`step`).

    ``past_key_i`` and ``present_key_i`` are the same memory. The keys and values of the new token are written to column
    P, ``past_length``. ``past_mask`` is 1 where a column is real, or yet to be written, and 0 in front of a row whose
    history is shorter; what lies under a 0 has to be finite. Mask and length are int32, as the operators take them.
    With ``shortlist`` the results are those of `shortlist_spec`.

    >>> dims = T5Dims(300, 8, 6, (2,), (2,), (2,), (16,), (16,), gated=False, tied=True)
    >>> step_spec(dims).inputs[4]
    TensorSpec(name='past_key_0', dtype='float32', shape=('R', 2, 'M', 6))
    >>> [tensor.name for tensor in step_spec(dims).outputs]
    ['logits', 'present_key_0', 'present_value_0']
    """

    def buffers(prefix: str) -> tuple[TensorSpec, ...]:
        return tuple(replace(tensor, shape=("R", *tensor.shape[2:])) for tensor in _self(dims, prefix, "M", "float32"))

    results = shortlist_spec(dims).outputs[: 1 + len(SHORTLIST_EXTRAS)] if shortlist else decoder_spec(dims).outputs[:1]
    exact = (TensorSpec("exact", "bool", ()),) if shortlist else ()
    return GraphSpec(
        inputs=(
            TensorSpec("input_ids", "int64", ("R", 1)),
            TensorSpec("attention_mask", "int32", ("B", "S")),
            TensorSpec("past_mask", "int32", ("R", "M")),
            TensorSpec("past_length", "int32", (1,)),
            *buffers("past"),
            *_cross(dims, "float32"),
            *exact,
        ),
        outputs=(
            *(replace(tensor, shape=("R", 1, *tensor.shape[3:])) for tensor in results),
            *buffers("present"),
        ),
    )


def _cross(dims: T5Dims, dtype: str) -> tuple[TensorSpec, ...]:
    heads = [heads for heads in dims.cross_heads for _ in range(2)]
    return tuple(
        TensorSpec(name, dtype, ("B", count, "S", dims.d_kv))
        for name, count in zip(kv_names("cross", dims.decoder_layers), heads, strict=True)
    )


def _self(dims: T5Dims, prefix: str, length: str, dtype: str) -> tuple[TensorSpec, ...]:
    heads = [heads for heads in dims.decoder_heads for _ in range(2)]
    return tuple(
        TensorSpec(name, dtype, ("B", "K", count, length, dims.d_kv))
        for name, count in zip(kv_names(prefix, dims.decoder_layers), heads, strict=True)
    )


def as_folder(value: Any) -> Path:
    """``value`` as the path of an export; raises ``InputError`` for what no file system takes as a name.

    >>> as_folder("my-export").name
    'my-export'
    """
    try:
        text = os.fspath(value)
        if isinstance(text, str) and text and b"\0" not in os.fsencode(text):
            return Path(text)
    except (TypeError, UnicodeEncodeError):
        pass
    raise InputError(f"folder is {value!r}; give the path of a folder as text or a Path.")
