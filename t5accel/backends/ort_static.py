"""ONNX Runtime on static KV buffers: a fused step writes keys and values where it reads them.

A step gets one token and its column, and copies no past. Several tokens at once need the portable graph, opened on
demand: a long prefix, then written to the buffers, and drafts, whose states stay there: few steps are single tokens.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from t5accel.backends.ort_memory import BufferPool, KVBuffers, PendingCopy
from t5accel.backends.ort_numpy import OrtNumpy, OrtSource, OrtState
from t5accel.decoding.backend import PastLengths, SuppressedTokens
from t5accel.decoding.greedy_search import argmax_tokens
from t5accel.graphs.contract import SHORTLIST_OUTPUTS, STEP
from t5accel.graphs.ort_levels import import_onnxruntime

COLUMNS = 64  # of the smallest buffers, which double when they are full
SOURCE_COLUMNS = 16  # sources that others may join are padded to multiples of it
MAX_SPARE_COLUMNS = 512  # of new buffers, where unused memory has room for more
MIN_ONNXRUNTIME = (1, 31)  # before, the operator returned garbage for an empty past and wrote beyond its buffers
MAX_STEPWISE_PREFIX = 8  # tokens; opening the portable graph takes longer than so many steps


@dataclass
class StaticState(OrtState):
    """A decoder state with its past in ``buffers``, or in ``past`` once it is on the portable graph."""

    buffers: KVBuffers | None = None
    # (B, K, K) int64: how many first columns two rows of a source have in common, which a reordering does not copy.
    common_columns: np.ndarray | None = None
    cross_capacity: list[np.ndarray] | None = None  # (B', H_i, S', d_kv), once sources were added


class OrtStatic(OrtNumpy):
    """A `Backend` like `OrtNumpy`, with the same arguments, on the fused step of an export that has one.

    In fp32 its logits differ from those of `OrtNumpy` by the order of additions only. In integers every step rounds
    activations, so that another order of additions moves logits a little.
    """

    devices = ("cpu",)
    why_portable = ""  # why all steps run on the portable graph; empty if they do not

    def _open_decoder(self) -> None:
        self._portable: Any = None
        self._opening = threading.Lock()
        if not self.manifest.step:
            self.why_portable = f"the export has no {STEP}"
            if self.manifest.recipe.get("floats", "float32") != "float32":
                self.why_portable += ", whose operators compute in float32"
        elif tuple(map(int, import_onnxruntime().__version__.split(".")[:2])) < MIN_ONNXRUNTIME:
            self.why_portable = f"{STEP} needs onnxruntime {'.'.join(map(str, MIN_ONNXRUNTIME))} or later"
        if self.why_portable:
            super()._open_decoder()
        else:
            self.fused = FusedDecoder(self._open(STEP), self)

    @property
    def decoder(self) -> Any:
        """The portable graph's session, opened on first use."""
        with self._opening:
            if self._portable is None:
                super()._open_decoder()
        return self._portable

    @decoder.setter
    def decoder(self, session: Any) -> None:
        self._portable = session

    def new_state(self, source: OrtSource, rows_per_source: int = 1) -> StaticState:
        if not self.why_portable:
            return self.fused.new_state(source, rows_per_source)
        empty = super().new_state(source, rows_per_source)
        return StaticState(source, empty.rows, empty.past)

    def step(self, state: StaticState, input_ids: np.ndarray) -> np.ndarray:
        if self._is_long_prefix(state, input_ids):
            return self._prefill(state, input_ids)
        return self._decoder_of(state, input_ids.shape[2]).step(state, input_ids)

    def next_tokens(
        self, state: StaticState, input_ids: np.ndarray, *, suppressed: SuppressedTokens = None
    ) -> np.ndarray:
        if self._is_long_prefix(state, input_ids):
            return argmax_tokens(self._prefill(state, input_ids)[:, :, -1], suppressed)
        return self._decoder_of(state, input_ids.shape[2]).next_tokens(state, input_ids, suppressed=suppressed)

    def reorder(self, state: StaticState, rows: np.ndarray) -> None:
        self._decoder_of(state).reorder(state, rows)

    def rollback(self, state: StaticState, accepted: np.ndarray) -> None:
        if state.buffers is not None and self.fused.leaves_gaps(state, accepted):
            self.fused.unload(state)
        self._decoder_of(state).rollback(state, accepted)

    def select_sources(self, state: StaticState, sources: np.ndarray) -> None:
        self._decoder_of(state).select_sources(state, sources)

    def add_sources(self, state: StaticState, source: OrtSource) -> None:
        self._decoder_of(state).add_sources(state, source)

    def replace_sources(self, state: StaticState, source: OrtSource, places: np.ndarray) -> None:
        self._decoder_of(state).replace_sources(state, source, places)

    def reorder_sources(self, state: StaticState, sources: np.ndarray) -> None:
        self._decoder_of(state).reorder_sources(state, sources)

    def _decoder_of(self, state: StaticState, count: int = 1) -> Any:
        """What reads the next ``count`` tokens: the fused decoder, or the portable one, which `OrtNumpy` is."""
        if state.buffers is not None and state.rows.width and count > 1:
            self.fused.unload(state)
        return super() if state.buffers is None else self.fused

    def _is_long_prefix(self, state: StaticState, input_ids: np.ndarray) -> bool:
        return state.buffers is not None and not state.rows.width and input_ids.shape[2] > MAX_STEPWISE_PREFIX

    def _prefill(self, state: StaticState, input_ids: np.ndarray) -> np.ndarray:
        """A prefix (B, K, T) -> logits (B, K, T, V): read at once by the portable graph, kept in the buffers."""
        portable = super().new_state(state.source, input_ids.shape[1])
        logits = super().step(portable, input_ids)
        self.fused.load(state, portable.past, input_ids)
        return logits


class FusedDecoder:
    """Decoding with ``decoder_step.onnx``, one token of every row at a time, of states with buffers."""

    def __init__(self, session: Any, backend: OrtNumpy):
        # No reference to the backend: in a cycle its sessions would outlive their last use.
        self.session, self.shortlist = session, backend.shortlist
        self.takes_exact = bool(backend.manifest.shortlist)
        self.dims, self.outputs = backend.dims, backend.outputs
        self.cross_names, self.cross_heads = backend.cross_names, backend.cross_heads
        self.past_names, self.past_heads = backend.past_names, backend.past_heads
        self.head_counts = sorted(Counter(self.past_heads).items())
        self._kv_pool, self._result_pool, self._logit_pool = BufferPool(), BufferPool(), BufferPool()

    def new_state(self, source: OrtSource, rows_per_source: int) -> StaticState:
        rows = PastLengths.empty(len(source.mask), rows_per_source)
        buffers = self._view(self._allocate(rows.padding.size, 0), rows.padding.size, source)
        common = np.zeros((*rows.shape, rows_per_source), dtype=np.int64)
        return StaticState(source, rows, [], buffers=buffers, common_columns=common)

    def step(self, state: StaticState, input_ids: np.ndarray) -> np.ndarray:
        logits = self._token_by_token(state, input_ids, self._logits)
        return logits[0] if len(logits) == 1 else np.concatenate(logits, axis=2)

    def next_tokens(
        self, state: StaticState, input_ids: np.ndarray, *, suppressed: SuppressedTokens = None
    ) -> np.ndarray:
        return self._token_by_token(state, input_ids, partial(self._choose, suppressed=suppressed))[-1]

    def reorder(self, state: StaticState, rows: np.ndarray) -> None:
        lengths, index = state.rows.reordered(rows)
        if index is not None:
            sources = np.arange(len(rows))[:, None, None]
            common = state.common_columns[sources, rows[:, :, None], rows[:, None, :]]
            same = np.take_along_axis(state.common_columns, rows[:, :, None], axis=2)  # each row and the one it becomes
            copies = self._row_copies(state, index, int(same.min()))
            state.rows, state.common_columns, state.buffers.pending_copies = lengths, common, copies

    def leaves_gaps(self, state: StaticState, accepted: np.ndarray) -> bool:
        """Whether `rollback` would have to move positions within rows, which only the portable past can."""
        lengths, index = state.rows.trimmed(accepted)
        return index is not None and (lengths.ragged or state.rows.ragged)

    def rollback(self, state: StaticState, accepted: np.ndarray) -> None:
        lengths, _ = state.rows.trimmed(accepted)
        state.rows, state.common_columns = lengths, np.minimum(state.common_columns, lengths.width)

    def select_sources(self, state: StaticState, sources: np.ndarray) -> None:
        state.buffers.flush()
        lengths, kept = state.rows.kept(sources)
        source, cross_capacity, copies = self._select_cross(state, kept)
        rows = np.arange(state.rows.padding.size).reshape(state.rows.shape)[kept].ravel()
        copies += self._row_copies(state, rows, 0)
        buffers = self._view(state.buffers.capacity, rows.size, source)
        buffers.pending_copies = copies
        common = state.common_columns[kept]
        state.source, state.rows, state.common_columns, state.buffers = source, lengths, common, buffers
        state.cross_capacity = cross_capacity
        self._drop_unused(state)

    def reorder_sources(self, state: StaticState, sources: np.ndarray) -> None:
        """Copy only the rows that change, and only the columns of their pasts."""
        (lengths, kept), per_source = state.rows.kept(sources), state.rows.shape[1]
        changed = np.flatnonzero(kept != np.arange(kept.size))
        if changed.size:
            rows = (kept[:, None] * per_source + np.arange(per_source)).ravel()
            copies = self._row_copies(state, rows, int(lengths.padding[changed].min()))
            common = state.common_columns[kept]
            state.rows, state.common_columns, state.buffers.pending_copies = lengths, common, copies

    def add_sources(self, state: StaticState, source: OrtSource) -> None:
        self.replace_sources(state, source, len(state.rows.padding) + np.arange(len(source.mask)))

    def replace_sources(self, state: StaticState, source: OrtSource, places: np.ndarray) -> None:
        """Copy no past, unless the buffers hold too few rows: then their capacity doubles."""
        state.buffers.flush()
        lengths, width = state.rows.placed(places), state.rows.width
        before, total = state.rows.padding.size, lengths.padding.size
        buffers, capacity = state.buffers, state.buffers.capacity
        if (most := next(iter(capacity.values())).shape[1]) < total:
            capacity = self._enlarged(state, max(total, 2 * most), width)
        for group in capacity.values():
            group[:, before:total, :, :width] = 0  # these columns are masked, but a NaN in them would spread
        source, cross_capacity = self._place_cross(state, source, places)
        if cross_capacity is not state.cross_capacity or total > before:
            buffers = self._view(capacity, total, source)
        common = np.full((*lengths.shape, lengths.shape[1]), width)
        common[: state.rows.shape[0]] = state.common_columns
        common[places] = width
        state.source, state.rows, state.common_columns, state.buffers = source, lengths, common, buffers
        state.cross_capacity = cross_capacity
        self._drop_unused(state)

    def _drop_unused(self, state: StaticState) -> None:
        """Move all pasts to the left, if at least a third of their columns is masked in every row."""
        lengths, unused = state.rows.narrowed()
        if unused and 3 * unused >= state.rows.width:
            try:
                copies = self._row_copies(state, np.arange(lengths.padding.size), 0, unused)
            except MemoryError:  # the state is right with them, too
                return
            common = np.maximum(state.common_columns - unused, 0)
            state.rows, state.common_columns, state.buffers.pending_copies = lengths, common, copies

    def load(self, state: StaticState, past: list[np.ndarray], input_ids: np.ndarray) -> None:
        """Write the past of a prefix that the portable graph has read to the buffers of an empty state."""
        while input_ids.shape[2] > state.buffers.mask.shape[1]:
            self._grow(state)
        for array, columns in zip(self.past_arrays(state.buffers), past, strict=True):
            array[:, :, : input_ids.shape[2]] = columns.reshape(-1, *columns.shape[2:])
        self._append(state, input_ids)

    def unload(self, state: StaticState) -> None:
        """Move the past out of the buffers: the state is then on the portable graph."""
        state.buffers.flush()
        arrays = [np.ascontiguousarray(a[:, :, : state.rows.width]) for a in self.past_arrays(state.buffers)]
        state.past = [array.reshape(*state.rows.shape, *array.shape[1:]) for array in arrays]
        state.buffers = state.common_columns = None

    def past_arrays(self, buffers: KVBuffers) -> list[np.ndarray]:
        """Keys and values layer by layer, (R, H_i, M, d_kv)."""
        groups = {heads: iter(group) for heads, group in buffers.kv.items()}
        return [next(groups[heads]) for heads in self.past_heads]

    # One token

    def _choose(self, state: StaticState, new: np.ndarray, *, suppressed: SuppressedTokens) -> np.ndarray:
        """(B, K, 1) -> the likeliest next tokens (B, K)."""
        tokens, results = None, self._feed(state, new).results
        if self.shortlist and self.shortlist.is_worthwhile(len(results["logits"])):
            self.session.run_with_iobinding(self._binding(state, "near"))
            tokens = self.shortlist.choose([results[name] for name in SHORTLIST_OUTPUTS], suppressed)
        if tokens is None:
            self.session.run_with_iobinding(self._binding(state, "exact"))
            if suppressed is not None:
                results["logits"][..., suppressed] = -np.inf  # nobody else reads them
            tokens = argmax_tokens(results["logits"])
        self._append(state, new)
        return tokens.reshape(new.shape[:2])

    def _logits(self, state: StaticState, new: np.ndarray) -> np.ndarray:
        """(B, K, 1) -> logits (B, K, 1, V), in memory that is used again after the caller's last reference."""
        buffers = self._feed(state, new)
        (logits,) = self._logit_pool.arrays([(len(buffers.tokens), 1, self.dims.vocab_size)], np.float32)
        binding = self._binding(state, "handed out")
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self.session.run_with_iobinding(binding)
        self._append(state, new)
        return logits.reshape(*new.shape, -1)

    def _feed(self, state: StaticState, new: np.ndarray) -> KVBuffers:
        buffers, width = state.buffers, state.rows.width
        buffers.flush()
        buffers.tokens[:] = new.reshape(-1, 1)
        buffers.length[0] = width
        if buffers.padding is not state.rows.padding:  # rows have come, gone or moved
            buffers.mask[:] = np.arange(buffers.mask.shape[1]) >= state.rows.padding.reshape(-1, 1)
            buffers.source_mask[:] = state.source.mask
            buffers.padding = state.rows.padding
        return buffers

    def _append(self, state: StaticState, new: np.ndarray) -> None:
        count = new.shape[2]
        if new.shape[1] > 1:
            same = (new[:, :, None] == new[:, None]).all(axis=3)  # (B, K, K)
            state.common_columns = state.common_columns + count * (same & (state.common_columns == state.rows.width))
        state.rows = state.rows.appended(count)

    def _token_by_token(
        self, state: StaticState, input_ids: np.ndarray, read: Callable[[StaticState, np.ndarray], np.ndarray]
    ) -> list[np.ndarray]:
        """Call ``read`` for each of T tokens. If one fails, the state is as it was before all of them."""
        rows, common, results = state.rows, state.common_columns, []
        try:
            for position in range(input_ids.shape[2]):
                if state.rows.width == state.buffers.mask.shape[1]:
                    self._grow(state)
                results.append(read(state, input_ids[:, :, position : position + 1]))
        except BaseException:
            state.rows, state.common_columns = rows, common
            raise
        state.rows = rows.appended(len(results))  # `rollback` may drop any of them
        return results

    def _binding(self, state: StaticState, wanted: str) -> Any:
        """All inputs, and the outputs: the shortlist's ``"near"``, ``"exact"`` or ``"handed out"`` logits."""
        buffers = state.buffers
        if wanted not in buffers.bindings:
            from onnxruntime import OrtValue

            past = self.past_arrays(buffers)
            inputs = {
                "input_ids": buffers.tokens,
                "attention_mask": buffers.source_mask,
                "past_mask": buffers.mask,
                "past_length": buffers.length,
                **{name: state.source.inputs[name] for name in self.cross_names},
                **dict(zip(self.past_names, past, strict=True)),
            }
            if self.takes_exact:
                inputs["exact"] = np.array(wanted != "near")
            names = {"near": SHORTLIST_OUTPUTS, "exact": SHORTLIST_OUTPUTS[:1]}.get(wanted, ())
            outputs = {name: buffers.results[name] for name in names}
            outputs.update(zip(self.outputs[1:], past, strict=True))
            binding, values = self.session.io_binding(), []
            for arrays, bind in ((inputs, binding.bind_ortvalue_input), (outputs, binding.bind_ortvalue_output)):
                for name, array in arrays.items():
                    values.append(OrtValue.ortvalue_from_numpy(array))  # shares the array's memory and keeps it
                    bind(name, values[-1])
            buffers.bindings[wanted] = binding, values
        return buffers.bindings[wanted][0]

    # Memory

    def _grow(self, state: StaticState) -> None:
        """Double the columns."""
        state.buffers.flush()
        rows = len(state.buffers.tokens)
        capacity = self._enlarged(state, rows, 2 * state.buffers.mask.shape[1] - 1)
        state.buffers = self._view(capacity, rows, state.source)

    def _enlarged(self, state: StaticState, rows: int, columns: int) -> dict[int, np.ndarray]:
        """New capacity for these rows and more than ``columns`` columns, with the past of the rows in use."""
        capacity, used, width = self._allocate(rows, columns), len(state.buffers.tokens), state.rows.width
        for heads, group in state.buffers.kv.items():
            capacity[heads][:, :used, :, :width] = group[:, :, :, :width]
        return capacity

    def _allocate(self, rows: int, columns: int) -> dict[int, np.ndarray]:
        """Capacity for more than ``columns`` columns, and for as many as unused memory has room for."""
        sizes = [count * rows * heads * self.dims.d_kv for heads, count in self.head_counts]
        spare = min((free // size for free, size in zip(self._kv_pool.unused(), sizes, strict=False)), default=0)
        most = COLUMNS
        while most <= columns:
            most *= 2
        most = max(most, min(spare, MAX_SPARE_COLUMNS))
        shapes = [(count, rows, heads, most, self.dims.d_kv) for heads, count in self.head_counts]
        groups = self._kv_pool.arrays(shapes, np.float32)
        return {heads: group for (heads, _), group in zip(self.head_counts, groups, strict=True)}

    def _view(self, capacity: dict[int, np.ndarray], rows: int, source: OrtSource) -> KVBuffers:
        """Buffers of the first ``rows`` rows."""
        columns = next(iter(capacity.values())).shape[3]
        shapes = [(rows, 1, self.dims.vocab_size), (rows, 1, self.dims.d_model), (rows, 1), (rows, 1)]
        results = dict(zip(SHORTLIST_OUTPUTS, self._result_pool.arrays(shapes, np.float32), strict=True))
        mask, source_mask = np.empty((rows, columns), np.int32), np.empty(source.mask.shape, np.int32)
        tokens, length = np.zeros((rows, 1), np.int64), np.zeros(1, np.int32)
        return KVBuffers(capacity, mask, source_mask, tokens, length, results)

    def _row_copies(self, state: StaticState, rows: np.ndarray, first: int, shift: int = 0) -> list[PendingCopy]:
        """Copies that make each row the one numbered ``rows`` from column ``first`` on, moved left by ``shift``."""
        state.buffers.flush()
        changed = np.arange(rows.size) if shift else np.flatnonzero(rows != np.arange(rows.size))
        last, columns = state.rows.width, np.s_[:, changed, :, first : state.rows.width - shift]
        groups = state.buffers.capacity.values()
        return [(group, columns, group[:, rows[changed], :, first + shift : last]) for group in groups]

    def _select_cross(
        self, state: StaticState, kept: np.ndarray
    ) -> tuple[OrtSource, list[np.ndarray] | None, list[PendingCopy]]:
        """The kept sources, their capacity, and the copies that it waits for."""
        mask, capacity = state.source.mask[kept], state.cross_capacity
        if capacity is None:
            cross = [state.source.inputs[name].take(kept, axis=0) for name in self.cross_names]
            return self._source(cross, mask), None, []
        copies = []
        longest = _round_up(1 + int(np.flatnonzero(mask.any(axis=0))[-1]))
        if 2 * longest <= mask.shape[1]:  # a long source has left, and each step would read the others padded to it
            mask, capacity = mask[:, :longest], self._cross_arrays(len(capacity[0]), longest)
            for array, before in zip(capacity, state.cross_capacity, strict=True):
                array[: kept.size] = before[kept, :, :longest]
        else:
            changed = np.flatnonzero(kept != np.arange(kept.size))
            copies = [(array, changed, array[kept[changed]]) for array in capacity]
        return self._source([array[: kept.size] for array in capacity], mask), capacity, copies

    def _place_cross(
        self, state: StaticState, source: OrtSource, places: np.ndarray
    ) -> tuple[OrtSource, list[np.ndarray]]:
        """The sources with others at ``places``, and their capacity, which is new where the old one has no room."""
        old = [state.source.inputs[name] for name in self.cross_names]
        (before, longest), length = state.source.mask.shape, source.mask.shape[1]
        capacity, total = state.cross_capacity, max(before, 1 + int(places.max()))
        most = len(capacity[0]) if capacity else 0
        if most < total or capacity[0].shape[2] < length:
            most = most if total <= most else max(total, 2 * most)
            capacity = self._cross_arrays(most, _round_up(max(longest, length)))
            for array, held in zip(capacity, old, strict=True):
                array[:before, :, : held.shape[2]] = held
        mask = np.zeros((total, capacity[0].shape[2]), dtype=np.int64)
        mask[:before, :longest] = state.source.mask
        mask[places, :length], mask[places, length:] = source.mask, 0
        for array, name in zip(capacity, self.cross_names, strict=True):
            array[places, :, :length], array[places, :, length:] = source.inputs[name], 0
        return self._source([array[:total] for array in capacity], mask), capacity

    def _cross_arrays(self, rows: int, length: int) -> list[np.ndarray]:
        return [np.zeros((rows, heads, length, self.dims.d_kv), np.float32) for heads in self.cross_heads]

    def _source(self, cross: list[np.ndarray], mask: np.ndarray) -> OrtSource:
        inputs = dict(zip(self.cross_names, cross, strict=True), attention_mask=np.ascontiguousarray(mask))
        return OrtSource(inputs, mask)


def _round_up(length: int) -> int:
    return -(-length // SOURCE_COLUMNS) * SOURCE_COLUMNS
