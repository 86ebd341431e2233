"""How many bytes a decoding step hands over between Python and the runtime: all tensors, or only what is new."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from t5accel.checks import as_count
from t5accel.models.sizes import T5Dims

_INT64, _FLOAT32 = 8, 4  # bytes


@dataclass(frozen=True)
class StepTraffic:
    """Bytes of one decoding step.

    Attributes:
        handed_in: by kind of tensor, from Python to the session.
        taken_back: by kind of tensor, from the session to Python.
    """

    handed_in: Mapping[str, int]
    taken_back: Mapping[str, int]

    @property
    def size_bytes(self) -> int:
        """Of both directions together."""
        return sum(self.handed_in.values()) + sum(self.taken_back.values())


def bytes_per_step(
    dims: T5Dims, *, batch: int, rows: int, past: int, new: int, source: int, element_bytes: int = _FLOAT32
) -> dict[str, StepTraffic]:
    """Count what a step hands over when everything is fed from numpy, and when it is bound.

    Fed (`OrtNumpy`), the keys and values of self-attention (B, K, H_i, P, d_kv) and of cross-attention
    (B, H_i, S, d_kv) go in at every step, and the longer history comes back. Bound (`OrtBound`, `OrtPointers`), the
    session keeps them: tokens and the mask of the past go in, logits (B, K, T, V) come out.

    That much crosses the bus to a GPU. A session on the CPU reads contiguous numpy arrays where they lie and gives its
    results away without a copy: there the same tensors change hands, and no bytes move.

    Args:
        dims: the model's sizes.
        batch: B sources.
        rows: K rows per source.
        past: P positions so far, 0 in the first step.
        new: T new ones.
        source: S source positions.
        element_bytes: of a key or value; logits are always float32, tokens and masks int64.

    Returns:
        ``{"fed": …, "bound": …}``.

    Raises:
        InputError: a size is no count.

    >>> dims = T5Dims(300, 8, 6, (2,), (2,), (2,), (16,), (16,), gated=False, tied=True)
    >>> step = bytes_per_step(dims, batch=1, rows=1, past=10, new=1, source=20)
    >>> step["fed"].handed_in
    {'input_ids': 8, 'past_mask': 80, 'self_attention': 960, 'cross_attention': 1920, 'attention_mask': 160}
    >>> step["fed"].size_bytes, step["bound"].size_bytes
    (5384, 1288)
    """
    sizes = {"batch": batch, "rows": rows, "new": new, "source": source, "element_bytes": element_bytes}
    for name, value in sizes.items():
        as_count(value, name, at_least=1)
    as_count(past, "past", at_least=0)
    position = 2 * sum(dims.decoder_heads) * dims.d_kv * element_bytes  # keys and values of one row, of all layers
    source_position = 2 * sum(dims.cross_heads) * dims.d_kv * element_bytes
    tokens = {"input_ids": batch * rows * new * _INT64, "past_mask": batch * rows * past * _INT64}
    logits = {"logits": batch * rows * new * dims.vocab_size * _FLOAT32}
    tensors = {
        "self_attention": batch * rows * past * position,
        "cross_attention": batch * source * source_position,
        "attention_mask": batch * source * _INT64,
    }
    longer = {"self_attention": batch * rows * (past + new) * position}
    return {"fed": StepTraffic(tokens | tensors, logits | longer), "bound": StepTraffic(tokens, logits)}
