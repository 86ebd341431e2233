"""Continuous batching on `TorchStatic`: rows of one captured step that requests join and leave while others run.

A graph has a fixed number of rows. So a newcomer's encoder output is copied into a free row, and a row whose request
has ended computes what nobody reads until the next newcomer takes it. The host uploads which token each row reads and
at which position, replays the graph several times, and reads the tokens of all these steps.

Shapes: R rows of capacity, S source positions, W places for keys and values, V vocabulary entries, m newcomers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from t5accel.backends.torch_static_buffers import KEPT_BYTES, StaticBuffers, capture_graph, in_plain_mode

if TYPE_CHECKING:
    from t5accel.backends.torch_static import StaticSource, TorchStatic

ROWS = (8, 32, 64, 128, 256)  # capacities; beyond, multiples of the last
ENCODED_AT_ONCE = 16_384  # padded source tokens of one call of the encoder
CAPTURED_BYTES = 256 * 2**20  # of cross-attention: for more, the encoder is not captured, as its products take longer
LOWEST = torch.finfo(torch.float32).min  # added to a logit


@dataclass(frozen=True)
class EncodedRows:
    """Encoder outputs of m newcomers; equal sources were encoded once."""

    calls: list[StaticSource]  # the outputs of each call of the encoder
    at: np.ndarray  # (m,) int64, which call has a newcomer's source
    rows: np.ndarray  # (m,) int64, in which row
    width: int  # the longest source, in tokens


@dataclass
class RowBuffers:
    """Buffers of one capacity, R sources with a row each, and the captured step on them.

    ``plan`` (3, R) int64 holds each row's number of positions, the token that it reads next, and the least number of
    tokens of its answer, negative for none. The first two are the buffers' ``lengths`` and ``token``.
    """

    buffers: StaticBuffers
    plan: torch.Tensor
    logits: torch.Tensor | None = None  # (R, V) float32, of the last step
    graph: Any = None

    @property
    def size_bytes(self) -> int:
        return self.buffers.size_bytes + (self.graph.size_bytes if self.graph else 0)


class TorchStaticRows:
    """The device's half of a running batch; `serve.device_batch.DeviceRunningBatch` is the host's.

    One thread uses it; the backend may serve other calls in between. ``shape`` is (R, S, W), zeros before the first
    `fit`.

    >>> from t5accel.models.load import load_model
    >>> from t5accel.backends.torch_static import TorchStatic
    >>> rows = TorchStaticRows(TorchStatic(load_model("random:t5-small")[0]))
    >>> rows.fit(rows.shape_for(rows=1, source=3, width=5), np.empty(0, dtype=np.int64))
    >>> rows.add_sources(np.array([2]), rows.encode(np.array([[100, 200, 1]]), np.ones((1, 3), dtype=np.int64)))
    >>> rows.run(np.zeros((3, 8), dtype=np.int64), 5).shape
    (8, 5)
    """

    def __init__(self, backend: TorchStatic):
        self.backend, self.decoder, self.device = backend, backend.decoder, backend.device
        self.dims, self.dtype = backend.decoder.dims, backend.decoder.dtype
        self.shape = (0, 0, 0)
        self._captured = 0
        self._ends = torch.tensor(backend.rules.eos_tokens(backend.eos_token_id), device=self.device)
        self._logit_bias = None  # (V,) of the tokens that no answer holds
        if backend.rules.suppress_tokens:
            self._logit_bias = torch.zeros(backend.vocab_size, device=self.device)
            self._logit_bias[list(backend.rules.suppress_tokens)] = -torch.inf
        self._held: RowBuffers | None = None
        self._kept: dict[tuple[int, int, int], RowBuffers] = {}  # the last used is the last

    @property
    def captures(self) -> int:
        """Graphs made so far, of steps and of encoders."""
        return self._captured + self.backend.captured_encoders

    def shape_for(self, rows: int, source: int, width: int) -> tuple[int, int, int]:
        """The smallest (R, S, W) for that many rows, source positions and places."""
        most = ROWS[-1]
        capacity = next((count for count in ROWS if count >= rows), -(-rows // most) * most)
        return capacity, self.backend._bucket(source), self.backend._bucket(width)

    @torch.inference_mode()
    def fit(self, shape: tuple[int, int, int], kept: np.ndarray) -> None:
        """Move the rows ``kept`` (n,) to rows 0 … n - 1 of buffers of another shape, large enough for them.

        Without memory for these everything stays as it was.
        """
        old = self._held
        new = self._kept.pop(shape, None) or self.backend._made(partial(self._new, shape), self._kept)
        new.buffers.cross_kv.memory.zero_()  # what was there before: a mask hides any number, but not NaN
        new.buffers.self_kv.memory.zero_()
        if old is not None and len(kept):
            index = torch.as_tensor(kept, device=self.device)
            new.buffers.cross_kv.gather_(old.buffers.cross_kv, index)
            new.buffers.self_kv.gather_(old.buffers.self_kv, index)
            bias, places = new.buffers.source_bias, min(shape[1], self.shape[1])
            bias[: len(kept)] = self.decoder.lowest
            bias[: len(kept), ..., :places] = old.buffers.source_bias[index, ..., :places]
        if old is not None:
            self._kept[self.shape] = old
            while sum(held.size_bytes for held in self._kept.values()) > KEPT_BYTES:
                del self._kept[next(iter(self._kept))]
        self._held, self.shape = new, shape

    def _new(self, shape: tuple[int, int, int]) -> RowBuffers:
        rows, source, width = shape
        buffers = self.decoder.new_buffers(batch=rows, rows=1, source=source, width=width)
        plan = torch.zeros((3, rows), dtype=torch.int64, device=self.device)
        buffers.lengths, buffers.token = plan[0], plan[1][:, None]
        new = RowBuffers(buffers, plan)
        if self.backend.graphs:

            def undo() -> None:
                plan.zero_()
                buffers.count.zero_()

            new.graph = capture_graph(lambda: self._step(new), undo, self.device)
            self._captured += 1
        return new

    def warm(self, rows: int) -> None:
        """Capture the graphs of short requests, so that nobody waits for them later."""
        if not self.backend.graphs:
            return
        most = self.shape_for(rows, 1, 1)
        for count in (*(count for count in ROWS if count < most[0]), most[0]):
            self.fit(self.shape_for(count, 1, 1), np.empty(0, dtype=np.int64))
        for power in range((min(most[0], self._at_once(1)) - 1).bit_length() + 1):
            self._encoded(*np.ones((2, 1 << power, 1), dtype=np.int64))

    @in_plain_mode
    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> EncodedRows:
        """Encode (m, S') int64 both. The device is done when it returns, so that a caller's clock is right."""
        sources = np.where(attention_mask == 1, input_ids, -1)
        seen: dict[bytes, int] = {}
        same = np.array([seen.setdefault(source.tobytes(), len(seen)) for source in sources])
        first = np.unique(same, return_index=True)[1]
        width = sources.shape[1]
        most = self._at_once(width)
        calls = []
        for begin in range(0, len(first), most):
            batch = first[begin : begin + most]
            count = 1 << (len(batch) - 1).bit_length()  # few shapes are captured: powers of two
            padded = np.resize(batch, count)
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
    def add_sources(self, where: np.ndarray, encoded: EncodedRows) -> None:
        """Start the newcomers in the rows ``where`` (m,) int64, whose content is overwritten."""
        buffers, newcomers = self._held.buffers, torch.as_tensor(where.copy(), device=self.device)
        for held in (*buffers.cross_kv.stacked(), *buffers.self_kv.stacked()):
            held.index_fill_(1, newcomers, 0)
        for number, source in enumerate(encoded.calls):
            chosen = encoded.at == number
            into, rows = (torch.as_tensor(one[chosen], device=self.device) for one in (where, encoded.rows))
            buffers.cross_kv.scatter_(source.cross_kv, into, rows)
            mask = source.mask.index_select(0, rows)  # (m', S')
            shape, dtype = (len(into), *buffers.source_bias.shape[1:]), buffers.source_bias.dtype
            bias = torch.full(shape, self.decoder.lowest, device=self.device, dtype=dtype)
            bias[..., : mask.shape[1]] *= (1 - mask)[:, None, None]
            buffers.source_bias.index_copy_(0, into, bias)

    @torch.inference_mode()
    def reorder_sources(self, into: np.ndarray, given: np.ndarray) -> None:
        """Rows ``into`` (n,) go on from the histories of the rows ``given`` (n,), whose sources are theirs."""
        places, rows = (torch.as_tensor(one, device=self.device) for one in (into, given))
        self_kv = self._held.buffers.self_kv
        self_kv.scatter_(self_kv, places, rows)

    @in_plain_mode
    def run(self, plan: np.ndarray, count: int, forced: tuple[Sequence[int], Sequence[int]] = ((), ())) -> np.ndarray:
        """Take ``count`` steps of every row, at most `MAX_QUEUED_STEPS`; the host waits once, at the end.

        Args:
            plan: (3, R) int64, as in `RowBuffers`. No row may get more than W positions.
            forced: rows, and the token that each reads after the first step in place of the likeliest.

        Returns:
            (R, count) int64: the likeliest tokens. Rows do not stop at an end token.
        """
        held = self._held
        held.plan.copy_(torch.from_numpy(plan))
        held.buffers.count.zero_()
        for number in range(count):
            if held.graph is None:
                self._step(held)
            else:
                held.graph.replay()
            if not number and len(forced[0]):
                rows, tokens = (torch.tensor(one, device=self.device) for one in forced)
                held.buffers.token.index_copy_(0, rows, tokens[:, None])
        return held.buffers.generated[:, :count].to("cpu", copy=True).numpy()

    @torch.inference_mode()
    def logits(self, rows: np.ndarray) -> np.ndarray:
        """(n,) rows -> (n, V) float32 after the last step; ends of short answers are excluded, no other token."""
        index = torch.as_tensor(rows, device=self.device)
        return self._held.logits.index_select(0, index).to("cpu", copy=True).numpy()

    def _step(self, held: RowBuffers) -> None:
        buffers = held.buffers
        held.logits = self.decoder.logits(self.decoder.read(buffers, buffers.token)[:, -1])  # (R, V)
        scores = held.logits if self._logit_bias is None else held.logits + self._logit_bias
        # A row that read as many tokens as its answer has at least chooses the one after these.
        early = (buffers.lengths <= held.plan[2]) * LOWEST  # (R,)
        scores.index_add_(1, self._ends, early[:, None].expand(-1, len(self._ends)))
        buffers.append(scores.argmax(dim=-1, keepdim=True))
