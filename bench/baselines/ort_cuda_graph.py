"""Greedy steps on ONNX Runtime at fixed sizes, captured as a CUDA graph.

A captured graph holds addresses and sizes, while the past of the two-graph layout grows. Padded on its left it always
has W positions, and moves left by one after a step, so that ONNX Runtime can capture it (``enable_cuda_graph``).
Choosing a token and moving the past is a second graph, of torch. On a CPU the same steps are called one by one.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from t5accel.backends.ort_cuda import OrtPointers
from t5accel.backends.ort_numpy import OrtSource, OrtState
from t5accel.backends.ort_session import open_session
from t5accel.backends.torch_static_buffers import capture_graph, side_stream
from t5accel.decoding.backend import SuppressedTokens, right_aligned
from t5accel.graphs.contract import DECODER

MAX_QUEUED_STEPS = 64  # steps that are queued before the host reads the tokens
MULTIPLE = 64  # source positions and the past come in multiples of that many: one captured graph for all in between


class Fixed:
    """The decoder's inputs and outputs at addresses that stay, for B sources of K rows, S and W positions.

    Attributes:
        inputs, outputs: by the names of the contract, the past (B, K, H_i, W, d), what is present one longer.
        penalty: (V,) float32, added to logits before the likeliest is taken.
        chosen: (B, K, MAX_QUEUED_STEPS) int64; ``count`` (1,) says how many.
        binding: of the captured session, to all of them; ``options`` of a run say which captured graph is theirs.
        between: a captured ``torch.cuda.CUDAGraph`` of `choose_and_move`, on a GPU.
    """

    def __init__(self, backend: OrtCaptured, batch: int, rows: int, source: int, width: int):
        dims, device = backend.dims, backend.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def floats(heads: int, length: int, *first: int) -> torch.Tensor:
            return zeros(*first, heads, length, dims.d_kv, dtype=backend._dtype)

        past = {name: floats(heads, width, batch, rows)
                for name, heads in zip(backend.past_names, backend.past_heads, strict=True)}  # fmt: skip
        cross = {name: floats(heads, source, batch)
                 for name, heads in zip(backend.cross_names, backend.cross_heads, strict=True)}  # fmt: skip
        tokens, masks = zeros(batch, rows, 1), (zeros(batch, source), zeros(batch, rows, width))
        self.inputs = {"input_ids": tokens, "attention_mask": masks[0], "past_mask": masks[1], **past, **cross}
        logits = zeros(batch, rows, 1, dims.vocab_size, dtype=torch.float32)
        longer = [floats(heads, width + 1, batch, rows) for heads in backend.past_heads]
        self.outputs = dict(zip(backend.outputs, [logits, *longer], strict=True))
        self.moves = list(zip(past.values(), longer, strict=True))
        self.penalty = zeros(dims.vocab_size, dtype=torch.float32)
        self.chosen, self.count = zeros(batch, rows, MAX_QUEUED_STEPS), zeros(1)
        self.binding: Any = None
        self.options: Any = None
        self.between: Any = None

    def choose_and_move(self) -> None:
        """What comes after a run of the decoder: its likeliest tokens are read by the next one, the past moves left."""
        token = (self.outputs["logits"] + self.penalty).argmax(dim=-1)
        self.inputs["input_ids"].copy_(token)
        self.chosen.scatter_(2, self.count.expand(*token.shape[:2], 1), token)
        self.count += 1
        mask = self.inputs["past_mask"]
        mask.copy_(torch.cat([mask[..., 1:], torch.ones_like(mask[..., :1])], dim=-1))
        for past, longer in self.moves:
            past.copy_(longer[..., 1:, :])


class OrtCaptured(OrtPointers):
    """A `Backend` like `OrtPointers`, with the same arguments and the same numbers, that offers ``run_greedy``.

    On CUDA the decoder has a separate session for that, and a stream that it shares with torch. It is for one thread.

    Attributes:
        fixed: the memory of each size (B, K, S, W) that was used.

    >>> from tempfile import TemporaryDirectory
    >>> from t5accel.decoding.greedy_search import greedy
    >>> from t5accel.graphs.export import export_model
    >>> with TemporaryDirectory() as folder:
    ...     _ = export_model("mini", f"{folder}/mini")
    ...     greedy(OrtCaptured(f"{folder}/mini"), [[100, 200, 1]], min_new_tokens=5, max_new_tokens=5).sequences.shape
    (1, 5)
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.fixed: dict[tuple[int, int, int, int], Fixed] = {}
        self._captured, self._stream = self.decoder, None
        if self.device.type == "cuda":
            self._stream = side_stream(self.device)  # the default one cannot be captured
            self._captured = open_session(
                self.folder / DECODER, self.settings,
                provider_options={"enable_cuda_graph": "1", "user_compute_stream": str(self._stream.cuda_stream)},
            )  # fmt: skip

    def new_state(self, source: OrtSource, rows_per_source: int = 1) -> OrtState:
        state = super().new_state(source, rows_per_source)
        state.token = np.full(state.rows.shape, self.decoder_start_token_id)
        return state

    def next_tokens(self, state: OrtState, input_ids: np.ndarray, *, suppressed: SuppressedTokens = None) -> np.ndarray:
        state.token = super().next_tokens(state, input_ids, suppressed=suppressed)
        return state.token

    def reorder(self, state: OrtState, rows: np.ndarray) -> None:
        super().reorder(state, rows)
        state.token = np.take_along_axis(state.token, np.asarray(rows), axis=1)

    def select_sources(self, state: OrtState, sources: np.ndarray) -> None:
        super().select_sources(state, sources)
        state.token = state.token[np.asarray(sources)]

    @torch.inference_mode()
    def run_greedy(self, state: OrtState, k: int, *, suppressed: SuppressedTokens = None) -> np.ndarray:
        """Up to ``k`` greedy steps; the host looks at the tokens once, at the end.

        Arguments and result (B, K, n) int64 are those of `torch_static.TorchStatic.run_greedy`; n is at most
        `MAX_QUEUED_STEPS`.
        """
        count = min(k, MAX_QUEUED_STEPS)
        rows, given = state.rows, state.source.mask.shape[1]
        width = rows.width + count
        key = (*rows.shape, _rounded(given), _rounded(width))
        if key not in self.fixed:
            self.fixed[key] = Fixed(self, *key)
        fixed = self.fixed[key]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if fixed.binding is None:
                self._prepare(fixed)
            self._fill(fixed, state, suppressed)
            for _ in range(count):
                self._captured.run_with_iobinding(fixed.binding, fixed.options)
                fixed.choose_and_move() if fixed.between is None else fixed.between.replay()
            past = [held[..., held.shape[3] - width :, :].clone() for held, _ in fixed.moves]
            chosen = fixed.chosen[..., :count].to("cpu", copy=True).numpy()  # waits for the stream
        state.rows, state.past, state.token = rows.appended(count), past, chosen[..., -1]
        return chosen

    def _fill(self, fixed: Fixed, state: OrtState, suppressed: SuppressedTokens) -> None:
        """The state's tensors where the steps expect them: sources on the left of their places, the past on the right.

        What lies beyond is masked, and was written by nobody or by steps like these: finite numbers, times nothing.
        """
        given, held, width = fixed.inputs, state.rows.width, fixed.inputs["past_mask"].shape[2]
        given["input_ids"].copy_(torch.from_numpy(state.token[..., None].copy()))
        given["past_mask"].copy_(torch.from_numpy(right_aligned(state.rows.lengths, width)))
        for name, tensor in state.source.inputs.items():
            if name == "attention_mask":
                given[name].zero_()[:, : tensor.shape[1]] = tensor
            else:
                given[name][:, :, : tensor.shape[2]] = tensor
        for past, (place, _) in zip(state.past, fixed.moves, strict=True):
            place[..., width - held :, :] = past
        fixed.count.zero_()
        fixed.penalty.zero_()
        if suppressed is not None:
            fixed.penalty[torch.as_tensor(suppressed)] = -torch.inf

    def _prepare(self, fixed: Fixed) -> None:
        """Bind every tensor, once; on a GPU capture a run of the decoder, and what comes after it."""
        from onnxruntime import RunOptions

        binding, options = self._captured.io_binding(), RunOptions()
        self._bind(binding, fixed.inputs, fixed.outputs)
        if self._stream is not None:
            options.add_run_config_entry("gpu_graph_id", str(len(self.fixed)))
            # The host must queue the next step, not wait for this one. (Releases before mid-2026 wait all the same.)
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
            for _ in range(2):  # the first run is for warming up
                self._captured.run_with_iobinding(binding, options)
                fixed.choose_and_move()
            fixed.between = capture_graph(fixed.choose_and_move, fixed.count.zero_, self.device)
        fixed.binding, fixed.options = binding, options


def _rounded(length: int) -> int:
    return -(-length // MULTIPLE) * MULTIPLE
