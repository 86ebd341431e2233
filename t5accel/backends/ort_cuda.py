"""The two graphs on ONNX Runtime, which reads and writes torch's tensors where they lie: the way for a GPU.

torch allocates every input and output on the device, their shapes being known ahead, and the session is told addresses.
So keys and values never leave the device, and torch gathers them there when beams are reordered. The past of the step
before last is free when the next one is allocated: two sets of memory take turns. Tokens and masks go in, logits come
out, of greedy steps only tokens. This is the one ONNX backend that needs torch. It runs on the CPU too, for tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from t5accel.backends.ort_numpy import OrtNumpy, OrtState
from t5accel.decoding.backend import SuppressedTokens
from t5accel.errors import InputError, MissingPackageError

ELEMENT_TYPES = {torch.float32: np.float32, torch.float16: np.float16, torch.int64: np.int64}
_OTHERS = dict.fromkeys(("input_ids", "attention_mask", "past_mask"), torch.int64) | {"logits": torch.float32}


def bind_tensor(
    binding: Any, name: str, tensor: torch.Tensor, *, dtype: torch.dtype, device: torch.device, is_output: bool = False
) -> None:
    """Tell a binding the address of a tensor, after checking that what lies there is what the session will take it for.

    An address says nothing about strides, type or device. A transposed tensor would be read as if it were not, and one
    of another type as other numbers: wrong results without an error. Whoever binds keeps the tensor alive until the
    run has ended; the binding does not.

    Args:
        binding: an ``onnxruntime.IOBinding``.
        name: of the graph's input or output.
        tensor: any shape. An empty one has no address: in its place an empty one of ONNX Runtime's own is bound.
        dtype: what the graph wants.
        device: where the session runs.
        is_output: the session writes to it.

    Raises:
        InputError: it is no tensor, of another type, on another device, or not contiguous.

    >>> cpu, rows = torch.device("cpu"), torch.zeros(2, 3)
    >>> bind_tensor(None, "past_key_0", rows.T, dtype=torch.float32, device=cpu)
    Traceback (most recent call last):
    t5accel.errors.InputError: past_key_0 has strides (1, 3) at shape (3, 2): an address can be bound only of a ...
    """
    if not isinstance(tensor, torch.Tensor) or dtype not in ELEMENT_TYPES:
        raise InputError(
            f"{name} is a {type(tensor).__name__} to be bound as {dtype}: give a tensor of float or int64."
        )
    if tensor.dtype != dtype:
        raise InputError(f"{name} is of type {tensor.dtype}; the graph takes {dtype}: convert it with .to().")
    if tensor.device != device:
        raise InputError(f"{name} is on {tensor.device}; the session runs on {device}: move it there with .to().")
    if not tensor.is_contiguous():
        raise InputError(
            f"{name} has strides {tensor.stride()} at shape {tuple(tensor.shape)}: an address can be bound only of a "
            "contiguous tensor, so give tensor.contiguous()."
        )
    shape, element, place = tuple(tensor.shape), ELEMENT_TYPES[dtype], (device.type, device.index or 0)
    if not tensor.numel():
        from onnxruntime import OrtValue

        empty = OrtValue.ortvalue_from_shape_and_type(shape, element, *place)
        (binding.bind_ortvalue_output if is_output else binding.bind_ortvalue_input)(name, empty)
    else:
        bind = binding.bind_output if is_output else binding.bind_input
        bind(name, *place, element, shape, tensor.data_ptr())


class OrtPointers(OrtNumpy):
    """A `Backend` like `OrtNumpy`, with the same arguments and the same numbers, on torch tensors bound by address.

    ``settings=SessionSettings(device="cuda")`` runs it on the first GPU.

    Raises:
        MissingPackageError: for that device, this torch or this onnxruntime has no CUDA.

    >>> from tempfile import TemporaryDirectory
    >>> from t5accel.decoding.greedy_search import greedy
    >>> from t5accel.graphs.export import export_model
    >>> with TemporaryDirectory() as folder:
    ...     _ = export_model("mini", f"{folder}/mini")
    ...     greedy(OrtPointers(f"{folder}/mini"), [[100, 200, 1]], min_new_tokens=5, max_new_tokens=5).sequences.shape
    (1, 5)
    """

    _takes_shortlist = False  # it is for a GPU, where heads of integers are not the ones that are fast

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        if self.settings.device == "cuda" and not torch.cuda.is_available():
            raise MissingPackageError("OrtPointers on 'cuda' needs a torch with CUDA and a GPU that it sees.")
        self.device = torch.device("cuda", 0) if self.settings.device == "cuda" else torch.device("cpu")
        self._dtype = torch.from_numpy(np.empty(0, dtype=self.dtype)).dtype

    def _run_encoder(self, ids: np.ndarray, mask: np.ndarray) -> list[torch.Tensor]:
        shapes = [(len(ids), heads, ids.shape[1], self.dims.d_kv) for heads in self.cross_heads]
        cross = [self._empty(shape) for shape in shapes]
        inputs = {"input_ids": self._from_host(ids), "attention_mask": self._from_host(mask)}
        self._run(self.encoder, self.encoder.io_binding(), inputs, dict(zip(self.cross_names, cross, strict=True)))
        return cross

    def next_tokens(self, state: OrtState, input_ids: np.ndarray, *, suppressed: SuppressedTokens = None) -> np.ndarray:
        """The likeliest is found where the logits are: of them only its number comes to the host."""
        new = np.ascontiguousarray(input_ids)
        logits, past = self._decode(state, new, state.rows.mask())
        last = logits[:, :, -1]  # of memory that nobody else reads
        if suppressed is not None:
            last[..., suppressed] = -torch.inf
        tokens = self._to_host(last.argmax(dim=-1))
        state.rows, state.past = state.rows.appended(new.shape[2]), past
        return tokens

    def _run_decoder(
        self, state: OrtState, new: np.ndarray, past_mask: np.ndarray
    ) -> tuple[np.ndarray, list[torch.Tensor]]:
        logits, present = self._decode(state, new, past_mask)
        return self._to_host(logits), present

    def _decode(
        self, state: OrtState, new: np.ndarray, past_mask: np.ndarray
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The same, but the logits stay on the device."""
        batch, rows, count = new.shape
        length = past_mask.shape[2] + count
        logits = torch.empty((batch, rows, count, self.vocab_size), dtype=torch.float32, device=self.device)
        present = [self._empty((batch, rows, heads, length, self.dims.d_kv)) for heads in self.past_heads]
        inputs = {"input_ids": self._from_host(new), "past_mask": self._from_host(past_mask)}
        inputs.update(zip(self.past_names, state.past, strict=True))
        binding = state.binding
        if binding is None:
            binding, inputs = self.decoder.io_binding(), {**inputs, **state.source.inputs}
        self._run(self.decoder, binding, inputs, dict(zip(self.outputs, [logits, *present], strict=True)))
        # Kept for the next step, where cross-attention is bound already, to tensors that the source keeps alive. All
        # else is bound anew by every step; between steps these addresses may be of tensors that are gone.
        state.binding = binding
        return logits, present

    def _run(
        self, session: Any, binding: Any, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
    ) -> None:
        if self.device.type == "cuda":
            # torch and the session queue their work on the device in streams of their own, which do not wait for each
            # other. Inputs have to be there before they are bound, since binding may copy one that a node on the CPU
            # reads. All else that torch has queued must be done, too: a fresh output may have the memory of a freed
            # tensor that a queued gather has yet to read.
            torch.cuda.synchronize(self.device)
        self._bind(binding, inputs, outputs)
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()  # torch must not read before the session has written; on a CPU it has

    def _bind(self, binding: Any, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        for tensors, is_output in ((inputs, False), (outputs, True)):
            for name, tensor in tensors.items():
                dtype = _OTHERS.get(name, self._dtype)
                bind_tensor(binding, name, tensor, dtype=dtype, device=self.device, is_output=is_output)

    def _to_host(self, tensor: torch.Tensor) -> np.ndarray:
        if tensor.device.type == "cpu":
            return tensor.numpy()
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)  # which the GPU can write to directly
        return pinned.copy_(tensor).numpy()  # waits for the copy; the array keeps the memory

    def _from_host(self, array: np.ndarray) -> torch.Tensor:
        # A copy, because torch warns of a read-only array and would share memory with any other.
        return torch.from_numpy(np.array(array, order="C")).to(self.device)

    def _hold(self, array: torch.Tensor) -> torch.Tensor:
        return array.contiguous()

    def _empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self.device)

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=self.device)

    def _reordered(self, state: OrtState, index: torch.Tensor) -> list[torch.Tensor]:
        return [self._gathered(past, 2, index, past.shape[:2]) for past in state.past]

    def _trimmed(
        self, state: OrtState, shape: tuple[int, ...], by_heads: Mapping[int, np.ndarray]
    ) -> list[torch.Tensor]:
        index = {heads: self._from_host(flat) for heads, flat in by_heads.items()}
        (batch, rows, width), heads_of = shape, zip(state.past, self.past_heads, strict=True)
        return [self._gathered(past, 4, index[heads], (batch, rows, heads, width)) for past, heads in heads_of]

    def _take(self, array: torch.Tensor, axes: int, index: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        block = array.shape[axes:]
        return array.reshape(math.prod(array.shape[:axes]), *block).index_select(0, index).reshape(*shape, *block)
