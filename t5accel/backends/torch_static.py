"""PyTorch on static buffers, with one CUDA graph per step: many greedy steps before the host reads the tokens.

On a GPU the encoder and the step are captured once for each shape and replayed; the likeliest token stays on the
device, where the next step reads it. On a CPU, which has no graphs, the same steps are called one by one, for tests
and comparisons.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from t5accel.backends.torch_static_buffers import (
    KEPT_BYTES,
    MAX_QUEUED_STEPS,
    KVCache,
    StaticBuffers,
    capture_graph,
    in_plain_mode,
    made,
)
from t5accel.backends.torch_static_loops import keeps_state, run_beams, run_samples, step_tokens
from t5accel.backends.torch_static_model import StaticT5
from t5accel.checks import as_count
from t5accel.decoding.backend import PastLengths, SuppressedTokens
from t5accel.errors import InputError
from t5accel.models.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from t5accel.backends.torch_static_rows import TorchStaticRows

BUCKETS = (64, 128, 256, 512, 1024)  # of source positions and of places for new ones; beyond, multiples of the last


@dataclass(frozen=True)
class StaticSource:
    """Encoder output for B sources: the cross-attention cache with N = B and P = S; and the mask (B, S)."""

    cross_kv: KVCache
    mask: torch.Tensor


@dataclass
class CapturedEncoder:
    """The inputs (B, S) and the output of one captured encoder, and its graph."""

    ids: torch.Tensor
    mask: torch.Tensor
    cross_kv: KVCache
    graph: Any


@dataclass
class StaticState:
    """A decoder state. ``lease`` gives its buffers back when it is called, or when the state is gone."""

    source: StaticSource
    rows: PastLengths
    buffers: StaticBuffers
    lease: Any = None


class TorchStatic:
    """A `Backend` over a PyTorch model of any family, with static buffers.

    A row's positions begin at its first place, so rows of unequal length need no padding, and `rollback` moves nothing.
    Buffers come in buckets of lengths and are used again by the next state of the same shape, with the graph that was
    captured on them. Threads may share a backend, on one CUDA stream; a state belongs to one of them. The model's
    weights must not change. ``torch.autocast`` changes nothing.

    Args:
        buckets: ascending lengths of buffers.
        graphs: capture CUDA graphs; by default if the model is on a GPU.

    Raises:
        InputError: ``buckets`` do not ascend, or graphs are asked for on a CPU. From ``encode``: a source is longer
            than the model's table of positions.

    >>> from t5accel.models.load import load_model
    >>> from t5accel.decoding.greedy_search import greedy
    >>> backend = TorchStatic(load_model("random:t5-small")[0])
    >>> greedy(backend, [[100, 200, 1]], max_new_tokens=5).sequences.shape
    (1, 5)
    """

    vocab_size: int
    pad_token_id: int
    eos_token_id: int
    decoder_start_token_id: int

    def __init__(self, model: PreTrainedModel, *, buckets: Sequence[int] = BUCKETS, graphs: bool | None = None):
        self.model, self.decoder = model.eval(), StaticT5(model)
        self.device = self.decoder.device
        ModelSpec.of(model).describe(self)
        self.buckets = tuple(as_count(bucket, "a bucket", at_least=1) for bucket in buckets)
        if not self.buckets or list(self.buckets) != sorted({*self.buckets}):
            raise InputError(f"buckets must be ascending lengths, got {buckets!r}.")
        self.graphs = self.device.type == "cuda" if graphs is None else graphs
        if self.graphs and self.device.type != "cuda":
            raise InputError(f"The model must be on a GPU with graphs=True, got one on {self.device}. Leave it out.")
        self._longest_source = math.inf
        if (table := self.decoder.encoder.positions) is not None:
            self._longest_source = len(table) - self.decoder.encoder.first
        self.captured = self.captured_encoders = 0  # graphs of a step, and of an encoder
        self._free: list[StaticBuffers] = []  # the last given back is the last
        self._encoders: dict[tuple[int, int], CapturedEncoder] = {}  # the last used is the last
        self._lock = threading.RLock()  # of both, and of the encoders' memory

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy by the model: the copy captures for itself."""
        return partial(type(self), buckets=self.buckets, graphs=self.graphs), (self.model,)

    @in_plain_mode
    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray, *, graph: bool = True) -> StaticSource:
        if input_ids.shape[1] > self._longest_source:
            raise InputError(
                f"A source must have at most {self._longest_source} tokens, got {input_ids.shape[1]}. Cut it shorter."
            )
        given = [torch.from_numpy(np.array(array, order="C")) for array in (input_ids, attention_mask)]
        if not (self.graphs and graph):
            ids, mask = (array.to(self.device) for array in given)
            return StaticSource(self.decoder.encode(ids, mask), mask)
        batch, length = input_ids.shape
        with self._lock:
            encoder = self._encoder((batch, self._bucket(length)))  # ids and mask (B, S), S >= length
            for place, array, rest in zip((encoder.ids, encoder.mask), given, (self.pad_token_id, 0), strict=True):
                place[:, :length] = array
                place[:, length:] = rest
            encoder.graph.replay()
            return self._made(lambda: StaticSource(encoder.cross_kv.clone(), encoder.mask.clone()))

    @torch.inference_mode()
    def new_state(self, source: StaticSource, rows_per_source: int = 1) -> StaticState:
        rows = PastLengths.empty(len(source.mask), rows_per_source)
        state = StaticState(source, rows, self._acquire(*rows.shape, source, self.buckets[0]))
        state.buffers.token.fill_(self.decoder_start_token_id)
        self._take_lease(state)
        return state

    @keeps_state
    def step(self, state: StaticState, input_ids: np.ndarray) -> np.ndarray:
        self._make_room(state, input_ids.shape[2])
        buffers = state.buffers
        if input_ids.shape[2] == 1:  # as greedy steps, so that beams and samples have the graph, too
            buffers.token.copy_(self._on_device(input_ids))
            self._advance(buffers, suppressed=None)
            logits = buffers.logits  # (R, V)
        else:
            logits = self.decoder.logits(self.decoder.read(buffers, self._on_device(input_ids)))  # (R, T, V)
        state.rows = state.rows.appended(input_ids.shape[2])
        return logits.to("cpu", copy=True).numpy().reshape(*input_ids.shape, self.vocab_size)

    @keeps_state
    def next_tokens(
        self, state: StaticState, input_ids: np.ndarray, *, suppressed: SuppressedTokens = None
    ) -> np.ndarray:
        self._make_room(state, input_ids.shape[2])
        buffers = state.buffers
        if input_ids.shape[2] == 1:
            buffers.token.copy_(self._on_device(input_ids))
            self._advance(buffers, suppressed)
        else:
            hidden = self.decoder.read(buffers, self._on_device(input_ids))  # (R, T, d_model)
            buffers.begin_run(suppressed)
            self.decoder.choose(buffers, hidden)
        state.rows = state.rows.appended(input_ids.shape[2])
        return buffers.token.to("cpu", copy=True).numpy().reshape(input_ids.shape[:2])

    @keeps_state
    def run_greedy(self, state: StaticState, k: int, *, suppressed: SuppressedTokens = None) -> np.ndarray:
        """Take up to ``k`` greedy steps, at most `MAX_QUEUED_STEPS`; the host reads tokens (B, K, n) once, at the end.

        The first step reads the start token, or the last choice of `next_tokens` or `run_greedy`. Rows do not stop at
        an end token.
        """
        count = min(k, MAX_QUEUED_STEPS)
        self._make_room(state, count)
        buffers = state.buffers
        self._advance(buffers, suppressed, count)
        state.rows = state.rows.appended(count)
        return buffers.generated[:, :count].to("cpu", copy=True).numpy().reshape(*state.rows.shape, count)

    run_beams = run_beams
    run_samples = run_samples
    step_tokens = step_tokens

    def reorder(self, state: StaticState, rows: np.ndarray) -> None:
        histories, flat = state.rows.reordered(rows)
        if flat is not None:
            self._gather(state.buffers, state.buffers, flat)
        state.rows = histories

    @torch.inference_mode()
    def rollback(self, state: StaticState, accepted: np.ndarray) -> None:
        """Shorten the rows: places beyond a row's length are masked, and written over later."""
        histories, _ = state.rows.trimmed(accepted)
        state.buffers.lengths.copy_(torch.as_tensor(histories.lengths.ravel()))
        state.rows = histories

    def select_sources(self, state: StaticState, sources: np.ndarray) -> None:
        histories, kept = state.rows.kept(sources)
        index = torch.tensor(kept, device=self.device)
        source = StaticSource(state.source.cross_kv.rows(index), state.source.mask[index])
        rows = histories.shape[1]
        self._move(state, source, histories, (kept[:, None] * rows + np.arange(rows)).ravel(), state.buffers.width)

    def require_device(self) -> None:
        """Raise ``RuntimeError`` after an error from which this process cannot recover, as a fault in a kernel."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # no other: another thread may be capturing

    def in_flight(self) -> TorchStaticRows:
        """Rows that requests join and leave while others run, for `serve.device_batch.DeviceRunningBatch`."""
        from t5accel.backends.torch_static_rows import TorchStaticRows

        return TorchStaticRows(self)

    # Buffers

    def _acquire(self, batch: int, rows: int, source: StaticSource, width: int) -> StaticBuffers:
        """Buffers that are free, or new ones, filled with the source."""
        shape = (batch, rows, self._bucket(source.mask.shape[1]), self._bucket(width))
        with self._lock:
            buffers = next((held for held in reversed([*self._free]) if held.shape == shape), None)
            if buffers is None:
                new = partial(self.decoder.new_buffers, batch=batch, rows=rows, source=shape[2], width=shape[3])
                buffers = self._made(new)
            else:
                with suppress(ValueError):  # a state that ends right now may let go of them
                    self._free.remove(buffers)
        self.decoder.fill(buffers, source.cross_kv, source.mask)
        return buffers

    def _made(self, make: Callable[[], Any], *unused: Any) -> Any:
        """What ``make`` returns, which may take the memory of what is not in use."""
        with self._lock:
            return made(make, *unused, self._free, self._encoders)

    def _give_back(self, buffers: StaticBuffers) -> None:
        """At the end of a state: in any thread, between any two lines of it, so without the lock."""
        self._free.append(buffers)
        while len(self._free) > 1 and sum(held.size_bytes for held in self._free) > KEPT_BYTES:
            del self._free[:1]

    def _bucket(self, length: int) -> int:
        last = self.buckets[-1]
        return next((bucket for bucket in self.buckets if bucket >= length), -(-length // last) * last)

    def _take_lease(self, state: StaticState) -> None:
        state.lease = weakref.finalize(state, self._give_back, state.buffers)

    def _make_room(self, state: StaticState, count: int) -> None:
        longest = int(state.rows.lengths.max()) + count
        if longest > state.buffers.width:
            batch, rows = state.rows.shape
            self._move(state, state.source, state.rows, np.arange(batch * rows), longest)

    @torch.inference_mode()
    def _move(
        self, state: StaticState, source: StaticSource, histories: PastLengths, flat: np.ndarray, width: int
    ) -> None:
        """Go on with these rows in other buffers. Without memory for them the state stays as it was."""
        old, give_back = state.buffers, state.lease
        new = self._acquire(*histories.shape, source, width)
        self._gather(old, new, flat)
        state.source, state.buffers, state.rows = source, new, histories
        self._take_lease(state)
        give_back()

    @torch.inference_mode()
    def _gather(self, old: StaticBuffers, new: StaticBuffers, flat: np.ndarray) -> None:
        """Copy rows (R,) of one state's buffers into another's, or into the same ones."""
        index = torch.as_tensor(flat, device=self.device)
        new.self_kv.gather_(old.self_kv, index)
        new.lengths.copy_(old.lengths[index])
        new.token.copy_(old.token[index])

    # Steps

    def _on_device(self, tokens: np.ndarray) -> torch.Tensor:
        """(B, K, T) -> (R, T)."""
        return torch.as_tensor(np.array(tokens.reshape(-1, tokens.shape[2]), order="C"), device=self.device)

    def _advance(self, buffers: StaticBuffers, suppressed: SuppressedTokens, count: int = 1) -> None:
        """Take greedy steps from the buffers' token on."""
        if self.graphs and buffers.graph is None:
            self._capture(buffers)
        buffers.begin_run(suppressed)
        for _ in range(count):
            if buffers.graph is None:
                self.decoder.advance(buffers)
            else:
                buffers.graph.replay()

    def _encoder(self, shape: tuple[int, int]) -> CapturedEncoder:
        """The encoder captured for B sources of S positions, at its first use."""
        encoder = self._encoders.pop(shape, None) or self._made(partial(self._new_encoder, shape))
        self._encoders[shape] = encoder
        held = self._encoders.values()
        while len(held) > 1 and sum(one.cross_kv.memory.nbytes + one.graph.size_bytes for one in held) > KEPT_BYTES:
            del self._encoders[next(iter(self._encoders))]
        return encoder

    def _new_encoder(self, shape: tuple[int, int]) -> CapturedEncoder:
        ids, mask = torch.zeros((2, *shape), dtype=torch.int64, device=self.device)
        mask[:, 0] = 1
        cross_kv = self.decoder.cross_memory(*shape)
        graph = capture_graph(lambda: self.decoder.encode(ids, mask, cross_kv), lambda: None, self.device)
        self.captured_encoders += 1
        return CapturedEncoder(ids, mask, cross_kv, graph)

    def _capture(self, buffers: StaticBuffers) -> None:
        lengths, token = buffers.lengths.clone(), buffers.token.clone()

        def undo() -> None:  # the cache needs none: warming up wrote to places that are not real
            buffers.lengths.copy_(lengths)
            buffers.token.copy_(token)
            buffers.count.zero_()

        step = partial(self.decoder.advance, buffers)
        buffers.graph = self._made(lambda: capture_graph(step, undo, self.device))
        self.captured += 1
