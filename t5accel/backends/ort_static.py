"""ONNX Runtime on buffers that stay: the fused step, which writes keys and values where it reads them.

`numpy` hands a step all keys and values and takes all of them back, one token longer: each step copies them. Here they
lie in buffers of M columns, bound once; a step gets a token and the number of its column. The operators take one token.
Several at once run on the portable graph, opened when it is first needed: a long beginning, whose columns are written
to the buffers, and drafts. A state that drafts goes over to that graph and stays: its single tokens are few.

Rows end at the same column, and what lies in front of a shorter one is masked, as in every state of ours. Buffers grow
by doubling, and the next call gets them again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from t5accel.backends.ort_memory import Pool
from t5accel.backends.ort_numpy import OrtNumpy, OrtSource, OrtState
from t5accel.decoding.backend import PastLengths, SuppressedTokens, right_aligned
from t5accel.decoding.greedy_search import argmax_tokens
from t5accel.graphs.contract import SHORTLIST_OUTPUTS, STEP
from t5accel.graphs.ort_levels import import_onnxruntime

COLUMNS, MOST_COLUMNS = 64, 512  # of the first buffers: at least, and at most where spare memory has place for more
# Before, the operator computed nonsense of an empty history, and wrote beyond its buffers.
OLDEST = (1, 31)  # onnxruntime
Take = Callable[["StaticState", np.ndarray], np.ndarray]
BeamUpdate = tuple[np.ndarray, Any, np.ndarray]
ONE_BY_ONE = 8  # the longest beginning that is read token by token: opening the other graph takes longer


@dataclass
class Buffers:
    """The keys and values of R rows, M columns each, and what else is bound.

    Attributes:
        groups: by H, (n, R, H, M, d_kv) float32, the n arrays of all layers with H heads, keys and values in turn.
        room: the same with all rows that there is memory for.
        mask: (R, M) int32, 0 in front of a row's history.
        tokens: (R, 1) int64, of the next step.
        length: (1,) int32, the column that it writes.
        results: by name, what is computed to find the next token.
        moves: what is still to be written: an array, where in it, and what.
        bindings: by what is computed.
    """

    groups: dict[int, np.ndarray]
    room: dict[int, np.ndarray]
    mask: np.ndarray
    tokens: np.ndarray
    length: np.ndarray
    results: dict[str, np.ndarray]
    moves: list[BeamUpdate] = field(default_factory=list, repr=False)
    bindings: dict[str, tuple[Any, list[Any]]] = field(default_factory=dict, repr=False)

    def settle(self) -> None:
        """Write what is to be moved. It may be cut short and begun again."""
        while self.moves:
            array, where, new = self.moves[-1]
            array[where] = new
            self.moves.pop()


@dataclass
class StaticState(OrtState):
    """A decoder state whose past is in ``buffers``, once it has begun, or in ``past``, for the portable graph.

    Attributes:
        shared: (B, K, K) int64, how many columns two rows of a source have in common, from the first one on: rows that
            come from one another are not copied there.
        cross: of a state that sources have joined, its own keys and values of cross-attention, with room for more
            sources and longer ones: (B', H_i, S', d_kv).
        laid_anew_bytes: how much of them was copied because what joined was longer or more, or what stays much shorter.
    """

    buffers: Buffers | None = None
    shared: np.ndarray | None = None
    cross: list[np.ndarray] | None = None
    laid_anew_bytes: int = 0


class OrtStatic(OrtNumpy):
    """A `Backend` like `OrtNumpy`, with the same arguments, on the fused step of an export that has one.

    In fp32 its logits are those of `OrtNumpy` but for the order of additions. In integers what is multiplied is rounded
    at each step, so that even another order of additions moves logits a little, either way.

    Attributes:
        why_portable: why all steps run on the portable graph; empty if they do not.

    >>> from tempfile import TemporaryDirectory
    >>> from t5accel.decoding.greedy_search import greedy
    >>> from t5accel.graphs.export import export_model
    >>> with TemporaryDirectory() as folder:
    ...     _ = export_model("mini", f"{folder}/mini", step=True)
    ...     greedy(OrtStatic(f"{folder}/mini"), [[100, 200, 1]], min_new_tokens=5, max_new_tokens=5).sequences.shape
    (1, 5)
    """

    devices = ("cpu",)
    why_portable = ""

    def _open_decoder(self) -> None:
        self._portable: Any = None
        self._opening = threading.Lock()
        self._buffers, self._results, self._logits = Pool(), Pool(), Pool()
        if not self.manifest.step:
            half = self.manifest.recipe.get("floats", "float32") != "float32"
            self.why_portable = f"the export has no {STEP}" + ", whose operators compute in float32" * half
        elif tuple(map(int, import_onnxruntime().__version__.split(".")[:2])) < OLDEST:
            self.why_portable = f"{STEP} needs onnxruntime {'.'.join(map(str, OLDEST))} or later"
        if self.why_portable:
            super()._open_decoder()
        else:
            self.fused = self._open(STEP)

    @property
    def decoder(self) -> Any:
        """The portable graph's session, opened when it is first needed."""
        with self._opening:
            if self._portable is None:
                super()._open_decoder()
        return self._portable

    @decoder.setter
    def decoder(self, session: Any) -> None:
        self._portable = session

    def new_state(self, source: OrtSource, rows_per_source: int = 1) -> StaticState:
        past = super().new_state(source, rows_per_source).past if self.why_portable else []
        return StaticState(source, PastLengths.empty(len(source.mask), rows_per_source), past)

    def step(self, state: StaticState, input_ids: np.ndarray) -> np.ndarray:
        if self._is_portable(state, input_ids.shape[2]):
            return super().step(state, input_ids)
        if input_ids.shape[2] <= ONE_BY_ONE:
            logits = self._token_by_token(state, input_ids, self._advance)
            return logits[0] if len(logits) == 1 else np.concatenate(logits, axis=2)
        return self._at_once(state, np.ascontiguousarray(input_ids))

    def next_tokens(
        self, state: StaticState, input_ids: np.ndarray, *, suppressed: SuppressedTokens = None
    ) -> np.ndarray:
        if self._is_portable(state, input_ids.shape[2]):
            return super().next_tokens(state, input_ids, suppressed=suppressed)
        if input_ids.shape[2] <= ONE_BY_ONE:
            return self._token_by_token(state, input_ids, partial(self._choose, suppressed=suppressed))[-1]
        return argmax_tokens(self._at_once(state, np.ascontiguousarray(input_ids))[:, :, -1], suppressed)

    def reorder(self, state: StaticState, rows: np.ndarray) -> None:
        if state.buffers is None:
            super().reorder(state, rows)
            return
        histories, index = state.rows.reordered(rows)
        if index is not None:
            sources = np.arange(len(rows))[:, None, None]
            shared = state.shared[sources, rows[:, :, None], rows[:, None, :]]
            in_common = np.take_along_axis(state.shared, rows[:, :, None], axis=2)  # a row with the one it goes on as
            moves = self._moves(state, index, int(in_common.min()))
            state.buffers.mask[:] = 1  # the next step masks what is ragged then
            state.rows, state.shared, state.buffers.moves = histories, shared, moves

    def rollback(self, state: StaticState, accepted: np.ndarray) -> None:
        if state.buffers is None:
            super().rollback(state, accepted)
            return
        histories, index = state.rows.trimmed(accepted)
        if index is None or not (histories.ragged or state.rows.ragged):  # all keep all, or lose their last ones
            state.rows, state.shared = histories, np.minimum(state.shared, histories.width)
        else:
            self._leave_buffers(state)
            super().rollback(state, accepted)

    def select_sources(self, state: StaticState, sources: np.ndarray) -> None:
        if state.buffers is None:
            super().select_sources(state, sources)
            return
        state.buffers.settle()
        histories, kept = state.rows.kept(sources)
        moves, mask, room, anew = [], state.source.mask[kept], state.cross, 0
        if room is None:
            cross = [self._gathered(state.source.inputs[name], 1, kept, kept.shape) for name in self.cross_names]
        else:
            longest = _rounded(1 + int(np.flatnonzero(mask.any(axis=0))[-1]))
            if 2 * longest <= mask.shape[1]:  # a long source has left, and all others would be read as long as it
                mask, room = mask[:, :longest], self._cross_room(len(room[0]), longest)
                for array, before in zip(room, state.cross, strict=True):
                    array[: kept.size] = before[kept, :, :longest]
                anew = sum(array[: kept.size].nbytes for array in room)
            else:
                changed = np.flatnonzero(kept != np.arange(kept.size))
                moves = [(array, changed, array[kept[changed]]) for array in room]
            cross = [array[: kept.size] for array in room]
        rows = np.arange(state.rows.padding.size).reshape(state.rows.shape)[kept].ravel()
        unused = int(histories.padding.min())  # columns that are masked for all who stay
        unused *= 3 * unused >= histories.width
        moves += self._moves(state, rows, 0, unused)
        buffers = self._around(state.buffers.room, rows.size)
        buffers.moves = moves
        histories = replace(histories, padding=histories.padding - unused, width=histories.width - unused)
        source, shared = self._source(cross, mask), np.maximum(state.shared[kept] - unused, 0)
        state.source, state.rows, state.shared, state.buffers = source, histories, shared, buffers
        state.cross, state.laid_anew_bytes = room, state.laid_anew_bytes + anew

    def reorder_sources(self, state: StaticState, sources: np.ndarray) -> None:
        """Only the rows that change are copied, and of them what is theirs."""
        if state.buffers is None:
            super().reorder_sources(state, sources)
            return
        (histories, kept), per_source = state.rows.kept(sources), state.rows.shape[1]
        changed = np.flatnonzero(kept != np.arange(kept.size))
        if changed.size:
            rows = (kept[:, None] * per_source + np.arange(per_source)).ravel()
            moves = self._moves(state, rows, int(histories.padding[changed].min()))
            state.buffers.mask[:] = 1  # the next step masks what is ragged then
            state.rows, state.shared, state.buffers.moves = histories, state.shared[kept], moves

    def add_sources(self, state: StaticState, source: OrtSource) -> None:
        """No key and no value of self-attention is copied, unless there is no room for so many rows: it doubles."""
        if state.buffers is None and (state.past or self.why_portable):
            super().add_sources(state, source)
            return
        if state.buffers is None:
            self._enter_buffers(state)
        histories, width = state.rows.joined(len(source.mask)), state.rows.width
        (there, per_source), (total, _) = state.rows.shape, histories.shape
        state.buffers.settle()
        room = state.buffers.room
        if (rows := next(iter(room.values())).shape[1]) < histories.padding.size:
            room = self._new_buffers(max(histories.padding.size, 2 * rows), width).room
            for heads, group in state.buffers.groups.items():
                room[heads][:, : there * per_source, :, :width] = group[:, :, :, :width]
        for group in room.values():
            group[:, there * per_source : total * per_source, :, :width] = 0  # masked, but NaN would be seen
        cross, mask, anew = self._cross_with(state, source)
        shared = np.concatenate([state.shared, np.full((total - there, per_source, per_source), width)])
        buffers = self._around(room, histories.padding.size)
        state.source, state.rows, state.shared, state.buffers = self._source(cross, mask), histories, shared, buffers
        state.cross, state.laid_anew_bytes = [array.base for array in cross], state.laid_anew_bytes + anew

    # Several tokens

    def _is_portable(self, state: StaticState, count: int) -> bool:
        """Whether the next ``count`` tokens are for the portable graph, and its ``past``; else buffers are there."""
        if state.buffers is not None and state.rows.width and count > 1:
            self._leave_buffers(state)
        elif state.buffers is None and not state.past:
            self._enter_buffers(state)
        return state.buffers is None

    def _leave_buffers(self, state: StaticState) -> None:
        (batch, rows), width = state.rows.shape, state.rows.width
        state.buffers.settle()
        arrays = (np.ascontiguousarray(array[:, :, :width]) for array in self._arrays(state.buffers))
        state.past = [array.reshape(batch, rows, *array.shape[1:]) for array in arrays]
        state.buffers = state.shared = None

    def _at_once(self, state: StaticState, new: np.ndarray) -> np.ndarray:
        """A beginning (B, K, T) -> logits (B, K, T, V), by the portable graph."""
        while new.shape[2] > state.buffers.mask.shape[1]:
            self._grow(state)
        begun = super().new_state(state.source, new.shape[1])
        logits, present = self._run_decoder(begun, new, begun.rows.mask())
        for array, columns in zip(self._arrays(state.buffers), present, strict=True):
            array[:, :, : new.shape[2]] = columns.reshape(-1, *columns.shape[2:])
        self._appended(state, new)
        return logits

    # One token

    def _choose(self, state: StaticState, new: np.ndarray, *, suppressed: SuppressedTokens) -> np.ndarray:
        """(B, K, 1) -> (B, K), the likeliest next ones."""
        tokens, results = None, self._fed(state, new).results
        if self.shortlist and self.shortlist.is_worthwhile(len(results["logits"])):
            self._run_fused(state, "near")
            tokens = self.shortlist.choose([results[name] for name in SHORTLIST_OUTPUTS], suppressed)
        if tokens is None:
            self._run_fused(state, "exact")
            if suppressed is not None:
                results["logits"][..., suppressed] = -np.inf  # nobody else reads them
            tokens = argmax_tokens(results["logits"])
        self._appended(state, new)
        return tokens.reshape(new.shape[:2])

    def _advance(self, state: StaticState, new: np.ndarray) -> np.ndarray:
        """(B, K, 1) -> logits (B, K, 1, V), in memory that is used again when the caller has let go of them."""
        buffers = self._fed(state, new)
        (logits,) = self._logits.arrays([(len(buffers.tokens), 1, self.vocab_size)], np.float32)
        binding = self._binding(state, "handed out")
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self.fused.run_with_iobinding(binding)
        self._appended(state, new)
        return logits.reshape(*new.shape, -1)

    def _fed(self, state: StaticState, new: np.ndarray) -> Buffers:
        buffers = state.buffers
        buffers.settle()
        buffers.tokens[:] = new.reshape(-1, 1)
        buffers.length[0] = width = state.rows.width
        if state.rows.ragged:
            buffers.mask[:, :width] = right_aligned(state.rows.lengths.ravel(), width)
        return buffers

    def _appended(self, state: StaticState, new: np.ndarray) -> None:
        count = new.shape[2]
        if new.shape[1] > 1:
            same = (new[:, :, None] == new[:, None]).all(axis=3)  # (B, K, K)
            state.shared = state.shared + count * (same & (state.shared == state.rows.width))
        state.rows = state.rows.appended(count)

    def _token_by_token(self, state: StaticState, input_ids: np.ndarray, take: Take) -> list[np.ndarray]:
        """``take`` (B, K, 1) of (B, K, T) tokens T times. If one fails, the state is as it was before all of them."""
        before, found = (state.rows, state.shared), []
        try:
            for position in range(input_ids.shape[2]):
                if state.rows.width == state.buffers.mask.shape[1]:
                    self._grow(state)
                found.append(take(state, input_ids[:, :, position : position + 1]))
        except BaseException:
            state.rows, state.shared = before
            raise
        state.rows = before[0].appended(len(found))  # of which `rollback` may take back some
        return found

    def _run_fused(self, state: StaticState, kind: str) -> None:
        self.fused.run_with_iobinding(self._binding(state, kind))

    def _binding(self, state: StaticState, kind: str) -> Any:
        """Of all that goes in, and of what comes out: ``"near"`` or ``"exact"`` results, or logits bound elsewhere."""
        buffers = state.buffers
        if kind not in buffers.bindings:
            from onnxruntime import OrtValue

            arrays = self._arrays(buffers)
            inputs = {
                "input_ids": buffers.tokens, "attention_mask": state.source.mask.astype(np.int32),
                "past_mask": buffers.mask, "past_length": buffers.length,
                **{name: state.source.inputs[name] for name in self.cross_names},
                **dict(zip(self.past_names, arrays, strict=True)),
            }  # fmt: skip
            if self.manifest.shortlist:
                inputs["exact"] = np.array(kind != "near")
            wanted = {"near": SHORTLIST_OUTPUTS, "exact": SHORTLIST_OUTPUTS[:1]}.get(kind, ())
            outputs = {name: buffers.results[name] for name in wanted}
            outputs.update(zip(self.outputs[1:], arrays, strict=True))
            binding, kept = self.fused.io_binding(), []
            for side, bind in ((inputs, binding.bind_ortvalue_input), (outputs, binding.bind_ortvalue_output)):
                for name, array in side.items():
                    kept.append(OrtValue.ortvalue_from_numpy(array))  # of the same memory, which it keeps
                    bind(name, kept[-1])
            buffers.bindings[kind] = binding, kept
        return buffers.bindings[kind][0]

    # Buffers

    def _enter_buffers(self, state: StaticState) -> None:
        batch, rows = state.rows.shape
        buffers = self._new_buffers(batch * rows, 0)
        state.buffers, state.shared = buffers, np.zeros((batch, rows, rows), dtype=np.int64)

    def _grow(self, state: StaticState) -> None:
        """Twice the columns."""
        state.buffers.settle()
        old, width = state.buffers, state.rows.width
        new = self._new_buffers(len(old.tokens), 2 * old.mask.shape[1] - 1)
        for heads, group in new.groups.items():
            group[:, :, :, :width] = old.groups[heads][:, :, :, :width]
        state.buffers = new

    def _new_buffers(self, rows: int, width: int) -> Buffers:
        """With place for more than ``width`` columns, and for as many as spare memory has."""
        kinds = sorted(set(self.past_heads))
        sizes = {heads: self.past_heads.count(heads) * rows * heads * self.dims.d_kv for heads in kinds}
        spare = self._buffers.unused()
        there = min((size // sizes[heads] for heads, size in zip(kinds, spare, strict=True)), default=0) if spare else 0
        columns = COLUMNS
        while columns <= width:
            columns *= 2
        columns = max(columns, min(there, MOST_COLUMNS))
        shapes = [(self.past_heads.count(heads), rows, heads, columns, self.dims.d_kv) for heads in kinds]
        return self._around(dict(zip(kinds, self._buffers.arrays(shapes, np.float32), strict=True)), rows)

    def _around(self, room: dict[int, np.ndarray], rows: int) -> Buffers:
        """Buffers of the first ``rows`` of those that there is memory for."""
        groups = {heads: group[:, :rows] for heads, group in room.items()}
        columns = next(iter(groups.values())).shape[3]
        shapes = [(rows, 1, self.vocab_size), (rows, 1, self.dims.d_model), (rows, 1), (rows, 1)]
        results = dict(zip(SHORTLIST_OUTPUTS, self._results.arrays(shapes, np.float32), strict=True))
        tokens, length = np.zeros((rows, 1), dtype=np.int64), np.zeros(1, dtype=np.int32)
        return Buffers(groups, room, np.ones((rows, columns), dtype=np.int32), tokens, length, results)

    def _arrays(self, buffers: Buffers) -> list[np.ndarray]:
        """Layer by layer, (R, H_i, M, d_kv)."""
        parts = {heads: iter(group) for heads, group in buffers.groups.items()}
        return [next(parts[heads]) for heads in self.past_heads]

    def _moves(self, state: StaticState, rows: np.ndarray, first: int, shift: int = 0) -> list[BeamUpdate]:
        """That each row becomes the one numbered ``rows`` from column ``first`` on, and moves left; not yet written."""
        state.buffers.settle()
        changed = np.arange(rows.size) if shift else np.flatnonzero(rows != np.arange(rows.size))
        last, columns = state.rows.width, np.s_[:, changed, :, first : state.rows.width - shift]
        groups = state.buffers.room.values()
        return [(group, columns, group[:, rows[changed], :, first + shift : last]) for group in groups]

    def _cross_with(self, state: StaticState, source: OrtSource) -> tuple[list[np.ndarray], np.ndarray, int]:
        """Cross-attention's tensors and mask with those of another source behind, and how many bytes were laid anew.

        They are laid out anew if what comes is longer, or more, than there is room for: then there is twice as much.
        """
        old = [state.source.inputs[name] for name in self.cross_names]
        (there, longest), (count, length) = state.source.mask.shape, source.mask.shape
        room, total = state.cross or [], there + count
        if not room or len(room[0]) < total or room[0].shape[2] < length:
            rows = len(room[0]) if room else 0
            room = self._cross_room(rows if total <= rows else max(total, 2 * rows), _rounded(max(longest, length)))
            for array, before in zip(room, old, strict=True):
                array[:there, :, : before.shape[2]] = before
        anew = sum(array.nbytes for array in old) if state.cross is None or room[0] is not state.cross[0] else 0
        mask = np.zeros((total, room[0].shape[2]), dtype=np.int64)
        mask[:there, : state.source.mask.shape[1]], mask[there:, :length] = state.source.mask, source.mask
        for array, name in zip(room, self.cross_names, strict=True):
            array[there:total, :, :length], array[there:total, :, length:] = source.inputs[name], 0
        return [array[:total] for array in room], mask, anew

    def _cross_room(self, rows: int, length: int) -> list[np.ndarray]:
        return [np.zeros((rows, heads, length, self.dims.d_kv), np.float32) for heads in self.cross_heads]


def _rounded(length: int) -> int:
    """Of a source: room for a few more positions.

    >>> _rounded(1), _rounded(64), _rounded(65)
    (64, 64, 128)
    """
    return -(-length // COLUMNS) * COLUMNS
