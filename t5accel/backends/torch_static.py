"""torch on keys and values of fixed size, with one CUDA graph for a step: many greedy steps without asking the host.

On a GPU the encoder and the step are captured once for each shape and replayed; the likeliest token is found on the
device and read there by the next step. On a CPU, which has no graphs, the same steps are called one by one: there this
backend is for tests and for comparison.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from t5accel.backends import torch_static_beams, torch_static_sampling
from t5accel.backends.cuda_graphs import captured
from t5accel.backends.torch_static_model import LONGEST_RUN, KeysAndValues, Slot, StaticT5
from t5accel.checks import as_count
from t5accel.decoding.backend import PastLengths, SuppressedTokens
from t5accel.decoding.token_constraints import constraints_from_config, special_tokens
from t5accel.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from t5accel.backends.torch_static_rows import TorchStaticRows


BUCKETS = (64, 128, 256, 512, 1024)  # of source positions and of places for new ones; beyond, multiples of the last


# What the compiler is asked for: one graph for each shape, and products of one row as reductions that take in what
# surrounds them (PyTorch's gpt-fast found that option to matter most for one text).
COMPILE = dict(fullgraph=True, dynamic=False, options={"coordinate_descent_tuning": True})
MOST_SHAPES = 64  # that one process compiles; torch gives up after eight


@dataclass(frozen=True)
class StaticSource:
    """The encoder's work on B sources: cross-attention's keys and values, N = B and P = S; and the mask (B, S)."""

    cross: KeysAndValues
    mask: torch.Tensor


@dataclass
class EncoderSlot:
    """Where a captured encoder reads and writes, for one shape (B, S); ``graph`` is replayed."""

    ids: torch.Tensor
    mask: torch.Tensor
    cross: KeysAndValues
    graph: Any


@dataclass
class StaticState:
    """A decoder state: its source, how long each row's past is, and the memory that it has for itself.

    ``lease`` gives that memory back when it is called, or when the state is gone.
    """

    source: StaticSource
    rows: PastLengths
    slot: Slot
    lease: Any = None


class TorchStatic:
    """A `Backend` over a model of torch of any family, whose keys and values lie in memory of fixed size.

    A row's positions begin at its first place, so rows of unequal length need no padding, and `rollback` moves nothing.
    Memory comes in buckets of lengths and is used again by the next state of the same shape, with the graph that was
    captured on it. States of one backend run one after the other: it is for one thread.

    Args:
        model: on a GPU or on the CPU, in fp32, bf16 or fp16; put into evaluation mode. Its weights must not change.
        buckets: ascending lengths that memory is made for.
        graphs: capture CUDA graphs; by default where the model is on a GPU.
        compile: run greedy steps through ``torch.compile``, which takes a minute or so at the first use of each shape.
            With graphs, what is captured is the compiled step. Steps of `run_beams` and `run_samples` stay as they are.

    Attributes:
        captured: how many graphs of a step were captured.

    Raises:
        InputError: ``buckets`` are not ascending lengths, or graphs are asked for on a CPU. From ``encode``: a source
            is longer than the model's table of positions.

    >>> from t5accel.models.load import load_model
    >>> from t5accel.decoding.greedy_search import greedy
    >>> backend = TorchStatic(load_model("random:t5-small")[0])
    >>> greedy(backend, [[100, 200, 1]], max_new_tokens=5).sequences.shape
    (1, 5)
    """

    runs: type[StaticT5] = StaticT5
    pad_token_id: int
    eos_token_id: int
    decoder_start_token_id: int

    def __init__(
        self, model: PreTrainedModel, *, buckets: Sequence[int] = BUCKETS, graphs: bool | None = None,
        compile: bool = False,
    ):  # fmt: skip
        self.model, self.decoder = model.eval(), self.runs(model)
        self.device, self.vocab_size = self.decoder.device, self.decoder.dims.vocab_size
        self.buckets = tuple(as_count(bucket, "a bucket", at_least=1) for bucket in buckets)
        if not self.buckets or list(self.buckets) != sorted({*self.buckets}):
            raise InputError(f"buckets is {buckets!r}; give different lengths, ascending.")
        self.graphs = self.device.type == "cuda" if graphs is None else graphs
        if self.graphs and self.device.type != "cuda":
            raise InputError(f"graphs=True needs a model on a GPU, and this one is on {self.device}: leave it out.")
        self.rules, self._compile = constraints_from_config(model), compile
        for name, token in special_tokens(model).items():
            setattr(self, name, token)
        self._longest_source = math.inf
        if (table := self.decoder.encoder.positions) is not None:
            self.source_vocab_size = len(self.decoder.encoder.embedding)
            self.positions = len(self.decoder.decoder.positions) - self.decoder.decoder.first
            self._longest_source = len(table) - self.decoder.encoder.first
        self.captured = 0
        self._step = self._compiled() if compile else self.decoder.advance
        self._free: defaultdict[tuple[int, ...], list[Slot]] = defaultdict(list)
        self._encoders: dict[tuple[int, int], EncoderSlot] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and copied by its model: the copy captures and compiles for itself."""
        again = partial(type(self), buckets=self.buckets, graphs=self.graphs, compile=self._compile)
        return again, (self.model,)

    @torch.inference_mode()
    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray, *, graph: bool = True) -> StaticSource:
        if input_ids.shape[1] > self._longest_source:
            raise InputError(
                f"A source must have at most {self._longest_source} tokens, got {input_ids.shape[1]}. Cut it shorter."
            )
        given = [torch.from_numpy(np.array(array, order="C")) for array in (input_ids, attention_mask)]
        if not (self.graphs and graph):
            on_device = [array.to(self.device) for array in given]
            return StaticSource(self.decoder.encode(*on_device), on_device[1])
        batch, length = input_ids.shape
        slot = self._encoder((batch, self._bucket(length)))  # ids and mask (B, S), S >= length
        for place, array in zip((slot.ids, slot.mask), given, strict=True):
            place[:, :length] = array
        slot.mask[:, length:] = 0  # whatever token stands there
        slot.graph.replay()
        return StaticSource(slot.cross.clone(), slot.mask.clone())

    @torch.inference_mode()
    def new_state(self, source: StaticSource, rows_per_source: int = 1) -> StaticState:
        rows = PastLengths.empty(len(source.mask), rows_per_source)
        state = StaticState(source, rows, self._slot(*rows.shape, source, self.buckets[0]))
        state.slot.token.fill_(self.decoder_start_token_id)
        self._take(state)
        return state

    @torch.inference_mode()
    def step(self, state: StaticState, input_ids: np.ndarray) -> np.ndarray:
        self._make_room(state, input_ids.shape[2])
        slot = state.slot
        if input_ids.shape[2] == 1:  # as greedy steps, so that beams and samples have the graph, too
            self._feed(slot, input_ids)
            self._advance(slot, suppressed=None)
            logits = slot.logits  # (R, V)
        else:
            logits = self.decoder.logits(self.decoder.read(slot, self._on_device(input_ids)))  # (R, T, V)
        state.rows = state.rows.appended(input_ids.shape[2])
        return logits.to("cpu", copy=True).numpy().reshape(*input_ids.shape, self.vocab_size)

    @torch.inference_mode()
    def next_tokens(
        self, state: StaticState, input_ids: np.ndarray, *, suppressed: SuppressedTokens = None
    ) -> np.ndarray:
        self._make_room(state, input_ids.shape[2])
        slot = state.slot
        if input_ids.shape[2] == 1:
            self._feed(slot, input_ids)
            self._advance(slot, suppressed)
        else:
            hidden = self.decoder.read(slot, self._on_device(input_ids))  # (R, T, d_model)
            self._prepare(slot, suppressed)
            self.decoder.choose(slot, hidden)
        state.rows = state.rows.appended(input_ids.shape[2])
        return slot.token.to("cpu", copy=True).numpy().reshape(input_ids.shape[:2])

    @torch.inference_mode()
    def run_greedy(self, state: StaticState, k: int, *, suppressed: SuppressedTokens = None) -> np.ndarray:
        """Up to ``k`` greedy steps; the host looks at the tokens once, at the end.

        The first step reads the start token, or what the last `next_tokens` or `run_greedy` chose.

        Args:
            state: gets one position for each step.
            k: how many; no more than `LONGEST_RUN` are taken.
            suppressed: tokens that shall not be chosen.

        Returns:
            (B, K, n) int64, n <= k: what was chosen. Rows do not stop at an end token.
        """
        count = min(k, LONGEST_RUN)
        self._make_room(state, count)
        slot = state.slot
        self._advance(slot, suppressed, count)
        state.rows = state.rows.appended(count)
        return slot.chosen[:, :count].to("cpu", copy=True).numpy().reshape(*state.rows.shape, count)

    def run_beams(
        self, state: StaticState, input_ids: np.ndarray, scores: np.ndarray, k: int, **options: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Up to ``k`` steps of beam search without the host, as `Backend` documents them."""
        return torch_static_beams.run_beams(self, state, input_ids, scores, k, **options)

    def run_samples(self, state: StaticState, input_ids: np.ndarray, uniform: np.ndarray, **options: Any) -> np.ndarray:
        """Up to n steps that draw without the host, as `Backend` documents them."""
        return torch_static_sampling.run_samples(self, state, input_ids, uniform, **options)

    def reorder(self, state: StaticState, rows: np.ndarray) -> None:
        histories, flat = state.rows.reordered(rows)
        if flat is not None:
            self._gather(state.slot, state.slot, flat)
        state.rows = histories

    @torch.inference_mode()
    def rollback(self, state: StaticState, accepted: np.ndarray) -> None:
        """Only how long each row is changes: what is beyond is masked, and written over later."""
        histories, _ = state.rows.trimmed(accepted)
        state.slot.lengths.copy_(torch.as_tensor(histories.lengths.ravel()))
        state.rows = histories

    def select_sources(self, state: StaticState, sources: np.ndarray) -> None:
        histories, kept = state.rows.kept(sources)
        index = torch.tensor(kept, device=self.device)
        source = StaticSource(state.source.cross.rows(index), state.source.mask[index])
        rows = histories.shape[1]
        self._move(state, source, histories, (kept[:, None] * rows + np.arange(rows)).ravel(), state.slot.width)

    def in_flight(self) -> TorchStaticRows:
        """Rows that requests join and leave while others run, for `serve.device_batch.DeviceRunningBatch`."""
        from t5accel.backends.torch_static_rows import TorchStaticRows

        return TorchStaticRows(self)

    # Memory

    def _slot(self, batch: int, rows: int, source: StaticSource, width: int) -> Slot:
        """Memory that is free or new; it is given back when the state that it is for is gone."""
        shape = (batch, rows, self._bucket(source.mask.shape[1]), self._bucket(width))
        free = self._free[shape]
        slot = free.pop() if free else self.decoder.slot(
            batch=batch, rows=rows, source=shape[2], width=shape[3])  # fmt: skip
        self.decoder.fill(slot, source.cross, source.mask)
        return slot

    def _bucket(self, length: int) -> int:
        last = self.buckets[-1]
        return next((bucket for bucket in self.buckets if bucket >= length), -(-length // last) * last)

    def _take(self, state: StaticState) -> None:
        state.lease = weakref.finalize(state, self._free[state.slot.shape].append, state.slot)

    def _make_room(self, state: StaticState, count: int) -> None:
        longest = int(state.rows.lengths.max()) + count
        if longest > state.slot.width:
            batch, rows = state.rows.shape
            self._move(state, state.source, state.rows, np.arange(batch * rows), longest)

    @torch.inference_mode()
    def _move(
        self, state: StaticState, source: StaticSource, histories: PastLengths, flat: np.ndarray, width: int
    ) -> None:
        """Go on with these rows in other memory; if there is none, the state is as it was."""
        old = state.slot
        slot = self._slot(*histories.shape, source, width)
        self._gather(old, slot, flat)
        state.lease()  # the old memory is free
        state.source, state.slot, state.rows = source, slot, histories
        self._take(state)

    @torch.inference_mode()
    def _gather(self, old: Slot, new: Slot, flat: np.ndarray) -> None:
        """Rows of one slot, by their numbers, into another, or into the same one."""
        index = torch.as_tensor(flat, device=self.device)  # (R,)
        new.own.gather_(old.own, index)
        new.lengths.copy_(old.lengths[index])
        new.token.copy_(old.token[index])

    # Steps

    def _on_device(self, tokens: np.ndarray) -> torch.Tensor:
        """(B, K, T) -> (R, T)."""
        return torch.as_tensor(np.array(tokens.reshape(-1, tokens.shape[2]), order="C"), device=self.device)

    def _feed(self, slot: Slot, new: np.ndarray) -> None:
        slot.token.copy_(self._on_device(new))

    def _advance(self, slot: Slot, suppressed: SuppressedTokens, count: int = 1) -> None:
        """Greedy steps from the slot's token on, by the graph where there is one."""
        if self.graphs and slot.graph is None:
            self._capture(slot)
        self._prepare(slot, suppressed)
        for _ in range(count):
            if slot.graph is None:
                self._step(slot)
            else:
                slot.graph.replay()

    def _prepare(self, slot: Slot, suppressed: SuppressedTokens) -> None:
        slot.count.zero_()
        slot.penalty.zero_()
        if suppressed is not None:
            slot.penalty[torch.as_tensor(suppressed)] = -torch.inf

    def _compiled(self) -> Any:
        step = torch.compile(self.decoder.advance, **COMPILE)

        compiled: set[tuple[int, ...]] = set()

        def run(slot: Slot) -> None:
            if slot.shape in compiled:
                return step(slot)
            with torch._dynamo.config.patch(recompile_limit=MOST_SHAPES):
                step(slot)
            compiled.add(slot.shape)

        return run

    def _encoder(self, shape: tuple[int, int]) -> EncoderSlot:
        """The encoder captured for B sources of S positions, at its first use."""
        if shape not in self._encoders:
            ids, mask = torch.zeros((2, *shape), dtype=torch.int64, device=self.device)
            mask[:, 0] = 1
            cross = self.decoder.cross_memory(*shape)
            graph = captured(lambda: self.decoder.encode(ids, mask, cross), lambda: None, self.device)
            self._encoders[shape] = EncoderSlot(ids, mask, cross, graph)
        return self._encoders[shape]

    def _capture(self, slot: Slot) -> None:
        """One step as a graph. What the steps of warming up did is undone: they wrote beyond what is real."""
        before = slot.lengths.clone(), slot.token.clone()

        def undo() -> None:
            slot.lengths.copy_(before[0])
            slot.token.copy_(before[1])
            slot.count.zero_()

        slot.graph = captured(lambda: self._step(slot), undo, self.device)
        self.captured += 1
