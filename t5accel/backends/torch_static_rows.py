"""Rows of one captured step that requests join and leave while others run: continuous batching on `TorchStatic`.

A graph of the device has a fixed number of rows. So a newcomer's encoder output is copied into a free row, and a row
whose request has ended is idle: it computes what nobody reads until it is given away. The host uploads which token each
row reads and at which position, has the graph replayed several times, and reads the tokens of all of these steps.

Shapes: R rows of capacity, S source positions, W places for keys and values, V vocabulary entries, m newcomers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from t5accel.backends.cuda_graphs import captured
from t5accel.backends.torch_static_model import KeysAndValues, Slot

if TYPE_CHECKING:
    from t5accel.backends.torch_static import StaticSource, TorchStatic

ROWS = (8, 32, 128, 256)  # capacities; beyond, multiples of the last
ENCODED_AT_ONCE = 16_384  # padded source tokens of one call of the encoder
CAPTURED_BYTES = 256 * 2**20  # of cross-attention: for more, the encoder is not captured, as its products take longer
LOWEST = torch.finfo(torch.float32).min  # added to a logit
KEPT_BYTES = 2 * 2**30  # of buffers in shapes that are not in use


@dataclass(frozen=True)
class EncodedRows:
    """Encoder outputs of m newcomers; equal sources were encoded once.

    Attributes:
        calls: what each call of the encoder returned.
        at: (m,) int64, which call has a newcomer's source.
        rows: (m,) int64, in which row.
        width: the longest source, in tokens.
    """

    calls: list[StaticSource]
    at: np.ndarray
    rows: np.ndarray
    width: int


@dataclass
class RowBuffers:
    """Memory of one capacity, and its graph.

    Attributes:
        slot: of R sources with a row each; its ``lengths`` and ``token`` are rows of ``plan``.
        plan: (3, R) int64: how many positions each row has, which token it reads next, and how many tokens its answer
            has at least, none if that is negative.
        logits: (R, V) float32, of the last step.
        graph: a captured step, if steps are captured.
    """

    slot: Slot
    plan: torch.Tensor
    logits: torch.Tensor | None = None
    graph: Any = None

    @property
    def size_bytes(self) -> int:
        """Of keys and values, and of logits."""
        slot = self.slot
        return sum(held.numel() * held.element_size() for held in (slot.cross.memory, slot.own.memory, slot.logits))


class TorchStaticRows:
    """The device's half of a running batch; `serve.device_batch.DeviceRunningBatch` is the host's.

    Args:
        backend: what the rows run on; it may serve other calls in between, on the same thread.

    Attributes:
        shape: (R, S, W); zeros before the first `fit`.
        captures: graphs made so far, of steps and of encoders.
        dims, dtype: as `serve.limits.KVCacheBytes` reads them.

    >>> from t5accel.models.load import load_model
    >>> from t5accel.backends.torch_static import TorchStatic
    >>> rows = TorchStaticRows(TorchStatic(load_model("random:t5-small")[0]))
    >>> rows.fit(rows.shape_for(rows=1, source=3, width=5), np.empty(0, dtype=np.int64))
    >>> rows.admit(np.array([2]), rows.encode(np.array([[100, 200, 1]]), np.ones((1, 3), dtype=np.int64)))
    >>> rows.run(np.zeros((3, 8), dtype=np.int64), 5).shape
    (8, 5)
    """

    def __init__(self, backend: TorchStatic):
        self.backend, self.decoder, self.device = backend, backend.decoder, backend.device
        self.dims, self.dtype = backend.decoder.dims, backend.decoder.dtype
        self.shape = (0, 0, 0)
        self._captured = 0
        self._ends = torch.tensor(backend.rules.eos_tokens(backend.eos_token_id), device=self.device)
        self._penalty = None  # (V,) of the tokens that no answer holds
        if backend.rules.suppress_tokens:
            self._penalty = torch.zeros(backend.vocab_size, device=self.device)
            self._penalty[list(backend.rules.suppress_tokens)] = -torch.inf
        self._held: RowBuffers | None = None
        self._kept: dict[tuple[int, int, int], RowBuffers] = {}  # the last used is the last

    @property
    def captures(self) -> int:
        return self._captured + len(self.backend._encoders)

    # Shapes

    def shape_for(self, rows: int, source: int, width: int) -> tuple[int, int, int]:
        """The smallest (R, S, W) for that many rows, source positions and places.

        >>> from t5accel.models.load import load_model
        >>> from t5accel.backends.torch_static import TorchStatic
        >>> TorchStaticRows(TorchStatic(load_model("random:t5-small")[0])).shape_for(9, 65, 300)
        (32, 128, 512)
        """
        most = ROWS[-1]
        capacity = next((count for count in ROWS if count >= rows), -(-rows // most) * most)
        return capacity, self.backend._bucket(source), self.backend._bucket(width)

    @torch.inference_mode()
    def fit(self, shape: tuple[int, int, int], kept: np.ndarray) -> None:
        """Go on in memory of another shape. If there is none, everything is as it was.

        Args:
            shape: (R, S, W), as of `shape_for`, large enough for the rows that go on.
            kept: (n,) int64, the rows that go on; they become rows 0 … n - 1.
        """
        old = self._held
        new = self._kept.pop(shape, None) or self._made(shape)
        if old is not None and len(kept):
            index = torch.as_tensor(kept, device=self.device)
            for into, given in ((new.slot.cross, old.slot.cross), (new.slot.own, old.slot.own)):
                for held, one in zip(_stacked(into), _stacked(given), strict=True):
                    places = min(held.shape[3], one.shape[3])
                    held[:, : len(kept), :, :places] = one[:, :, :, :places].index_select(1, index)
            bias, places = new.slot.source_bias, min(shape[1], self.shape[1])
            bias[: len(kept)] = self.decoder.lowest
            bias[: len(kept), ..., :places] = old.slot.source_bias[index, ..., :places]
        if old is not None:
            self._kept[self.shape] = old
            while sum(held.size_bytes for held in self._kept.values()) > KEPT_BYTES:
                del self._kept[next(iter(self._kept))]
        self._held, self.shape = new, shape

    def _made(self, shape: tuple[int, int, int]) -> RowBuffers:
        try:
            return self._new(shape)
        except torch.cuda.OutOfMemoryError:
            if not self._kept:
                raise
        self._kept.clear()
        torch.cuda.empty_cache()
        return self._new(shape)

    def _new(self, shape: tuple[int, int, int]) -> RowBuffers:
        rows, source, width = shape
        slot = self.decoder.slot(batch=rows, rows=1, source=source, width=width)
        plan = torch.zeros((3, rows), dtype=torch.int64, device=self.device)
        slot.lengths, slot.token = plan[0], plan[1][:, None]
        made = RowBuffers(slot, plan)
        if self.backend.graphs:

            def undo() -> None:
                plan.zero_()
                slot.count.zero_()

            made.graph = captured(lambda: self._step(made), undo, self.device)
            self._captured += 1
        return made

    def warm(self, rows: int) -> None:
        """Capture, if steps are captured, what short requests need: nobody waits for it then."""
        if not self.backend.graphs:
            return
        most = self.shape_for(rows, 1, 1)
        for count in (*(count for count in ROWS if count < most[0]), most[0]):
            self.fit(self.shape_for(count, 1, 1), np.empty(0, dtype=np.int64))
        for power in range((min(most[0], self._at_once(1)) - 1).bit_length() + 1):
            self._encoded(*np.ones((2, 1 << power, 1), dtype=np.int64))

    # Newcomers

    @torch.inference_mode()
    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> EncodedRows:
        """(m, S') int64 both. Done when it returns, so that a caller's clock is right."""
        sources = np.where(attention_mask == 1, input_ids, -1)
        seen: dict[bytes, int] = {}
        same = np.array([seen.setdefault(source.tobytes(), len(seen)) for source in sources])
        first = np.unique(same, return_index=True)[1]
        width = sources.shape[1]
        most = self._at_once(width)
        calls = []
        for begin in range(0, len(first), most):
            chosen = first[begin : begin + most]
            count = 1 << (len(chosen) - 1).bit_length()  # few shapes are captured: powers of two
            padded = np.resize(chosen, count)
            calls.append(self._encoded(input_ids[padded], attention_mask[padded]))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        at, rows = np.divmod(same, most)
        return EncodedRows(calls, at, rows, width)

    def _at_once(self, width: int) -> int:
        """How many sources of that length one call of the encoder takes: a power of two."""
        return 1 << max(0, (ENCODED_AT_ONCE // self.backend._bucket(width)).bit_length() - 1)

    def _encoded(self, ids: np.ndarray, mask: np.ndarray) -> StaticSource:
        backend, dims = self.backend, self.dims
        per_token = 2 * sum(dims.cross_heads) * dims.d_kv * self.dtype.itemsize
        return backend.encode(ids, mask, graph=len(ids) * backend._bucket(ids.shape[1]) * per_token <= CAPTURED_BYTES)

    @torch.inference_mode()
    def admit(self, where: np.ndarray, encoded: EncodedRows) -> None:
        """Newcomers take these rows, (m,) int64. What they have is overwritten."""
        slot = self._held.slot
        for number, source in enumerate(encoded.calls):
            chosen = encoded.at == number
            into, rows = (torch.as_tensor(one[chosen], device=self.device) for one in (where, encoded.rows))
            for held, given in zip(_stacked(slot.cross), _stacked(source.cross), strict=True):
                held[:, :, :, : given.shape[3]].index_copy_(1, into, given.index_select(1, rows))
            mask = source.mask.index_select(0, rows)  # (m', S')
            bias = torch.full((len(into), *slot.source_bias.shape[1:]), self.decoder.lowest, device=self.device,
                              dtype=slot.source_bias.dtype)  # fmt: skip
            bias[..., : mask.shape[1]] *= (1 - mask)[:, None, None]
            slot.source_bias.index_copy_(0, into, bias)

    # Steps

    @torch.inference_mode()
    def run(self, plan: np.ndarray, count: int, forced: tuple[Sequence[int], Sequence[int]] = ((), ())) -> np.ndarray:
        """Some steps of every row; the host waits once, at the end.

        Args:
            plan: (3, R) int64, as of `RowBuffers`. No row may get more than W positions.
            count: how many steps, up to `torch_static_model.LONGEST_RUN`.
            forced: rows, and the token that each reads after the first step in place of the likeliest.

        Returns:
            (R, count) int64: the likeliest tokens. Rows do not stop at an end token.
        """
        held = self._held
        held.plan.copy_(torch.from_numpy(plan))
        held.slot.count.zero_()
        for number in range(count):
            if held.graph is None:
                self._step(held)
            else:
                held.graph.replay()
            if not number and len(forced[0]):
                rows, tokens = (torch.tensor(one, device=self.device) for one in forced)
                held.slot.token.index_copy_(0, rows, tokens[:, None])
        return held.slot.chosen[:, :count].to("cpu", copy=True).numpy()

    @torch.inference_mode()
    def logits(self, rows: np.ndarray) -> np.ndarray:
        """(n,) rows -> (n, V) float32 after the last step, before any token was excluded, but ends of short answers."""
        index = torch.as_tensor(rows, device=self.device)
        return self._held.logits.index_select(0, index).to("cpu", copy=True).numpy()

    @torch.inference_mode()
    def branch(self, into: np.ndarray, given: np.ndarray) -> None:
        """Rows (n,) go on from the histories of other rows (n,), whose sources are theirs."""
        places, rows = (torch.as_tensor(one, device=self.device) for one in (into, given))
        for held in _stacked(self._held.slot.own):
            held.index_copy_(1, places, held.index_select(1, rows))

    def _step(self, held: RowBuffers) -> None:
        slot = held.slot
        held.logits = self.decoder.logits(self.decoder.read(slot, slot.token)[:, -1])  # (R, V)
        scores = held.logits if self._penalty is None else held.logits + self._penalty
        # A row that read as many tokens as its answer has at least chooses the one after these.
        early = (slot.lengths <= held.plan[2]) * LOWEST  # (R,)
        scores.index_add_(1, self._ends, early[:, None].expand(-1, len(self._ends)))
        token = scores.argmax(dim=-1, keepdim=True)
        slot.token.copy_(token)
        slot.chosen.scatter_(1, slot.count.expand(len(token), 1), token)
        slot.count.add_(1)


def _stacked(held: KeysAndValues) -> list[torch.Tensor]:
    """Views (n, N, H, P, d) of all layers: a single one where all have as many heads."""
    if len({layer.shape for layer in held.layers}) > 1:
        return held.layers
    return [held.memory.view(-1, *held.layers[0].shape[1:])]
