"""The two graphs on ONNX Runtime, bound to torch's tensors by address, so that no past leaves the GPU.

It runs on the CPU, too, for tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from t5accel.backends.ort_numpy import OrtNumpy, OrtState, as_blocks
from t5accel.decoding.backend import SuppressedTokens
from t5accel.errors import InputError, MissingPackageError

ELEMENT_TYPES = {torch.float32: np.float32, torch.float16: np.float16, torch.int64: np.int64}
_OTHERS = dict.fromkeys(("input_ids", "attention_mask", "past_mask"), torch.int64) | {"logits": torch.float32}


def bind_tensor(
    binding: Any, name: str, tensor: torch.Tensor, *, dtype: torch.dtype, device: torch.device, is_output: bool = False
) -> None:
    """Bind a tensor by its address, to be kept alive until the run has ended.

    Raises ``InputError`` for another type or device and for a tensor that is not contiguous. An address says nothing
    about them: the session would read wrong numbers without an error.

    >>> cpu, rows = torch.device("cpu"), torch.zeros(2, 3)
    >>> bind_tensor(None, "past_key_0", rows.T, dtype=torch.float32, device=cpu)
    Traceback (most recent call last):
    t5accel.errors.InputError: past_key_0 must be contiguous, got strides (1, 3) at shape (3, 2). Give ...
    """
    if not isinstance(tensor, torch.Tensor) or dtype not in ELEMENT_TYPES:
        kinds = ", ".join(map(str, ELEMENT_TYPES))
        raise InputError(f"{name} must be a tensor of {kinds}, got {type(tensor).__name__} for {dtype}.")
    if tensor.dtype != dtype:
        raise InputError(f"{name} must be of {dtype}, got {tensor.dtype}. Convert it with .to().")
    if tensor.device != device:
        raise InputError(f"{name} must be on {device}, got {tensor.device}. Move it with .to().")
    if not tensor.is_contiguous():
        raise InputError(
            f"{name} must be contiguous, got strides {tensor.stride()} at shape {tuple(tensor.shape)}. "
            "Give tensor.contiguous()."
        )
    shape, element, place = tuple(tensor.shape), ELEMENT_TYPES[dtype], (device.type, device.index or 0)
    if not tensor.numel():  # it has no address
        from onnxruntime import OrtValue

        empty = OrtValue.ortvalue_from_shape_and_type(shape, element, *place)
        (binding.bind_ortvalue_output if is_output else binding.bind_ortvalue_input)(name, empty)
    else:
        bind = binding.bind_output if is_output else binding.bind_input
        bind(name, *place, element, shape, tensor.data_ptr())


class OrtPointers(OrtNumpy):
    """A `Backend` like `OrtNumpy`, with the same arguments, on torch tensors bound by address.

    ``settings=SessionSettings(device="cuda")`` runs it on the first GPU, and raises ``MissingPackageError`` where torch
    or onnxruntime has no CUDA.
    """

    _takes_shortlist = False  # on a GPU an integer head is not faster

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
        """The likeliest next tokens, found on the device: only they come to the host."""
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
        """Like `_run_decoder`, with the logits on the device."""
        batch, rows, count = new.shape
        length = past_mask.shape[2] + count
        logits = torch.empty((batch, rows, count, self.vocab_size), dtype=torch.float32, device=self.device)
        # The past of the step before last is free by now, so torch's allocator takes turns between two sets of memory.
        present = [self._empty((batch, rows, heads, length, self.dims.d_kv)) for heads in self.past_heads]
        inputs = {"input_ids": self._from_host(new), "past_mask": self._from_host(past_mask)}
        inputs.update(zip(self.past_names, state.past, strict=True))
        binding = state.binding
        if binding is None:
            binding, inputs = self.decoder.io_binding(), {**inputs, **state.source.inputs}
        self._run(self.decoder, binding, inputs, dict(zip(self.outputs, [logits, *present], strict=True)))
        # Cross-attention stays bound for the next step, to tensors that the source keeps alive. Each step binds all
        # others again, since their addresses may be of tensors that are gone.
        state.binding = binding
        return logits, present

    def _run(
        self, session: Any, binding: Any, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
    ) -> None:
        if self.device.type == "cuda":
            # torch and the session queue work in separate streams. Inputs must be there before they are bound, since
            # binding may copy one that a node on the CPU reads. So must everything else that torch has queued: a fresh
            # output may have the memory of a freed tensor that a queued gather has yet to read.
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
        # A copy: torch warns of a read-only array and shares memory with any other.
        return torch.from_numpy(np.array(array, order="C")).to(self.device)

    def _hold(self, array: torch.Tensor) -> torch.Tensor:
        return array.contiguous()

    def _empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self.device)

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=self.device)

    def _gather_past(
        self, state: OrtState, axes: int, indices: list[torch.Tensor], shapes: list[tuple[int, ...]]
    ) -> list[torch.Tensor]:
        tensors = zip(state.past, indices, shapes, strict=True)
        return [self._gathered(past, axes, index, shape) for past, index, shape in tensors]

    def _take(self, array: torch.Tensor, axes: int, index: torch.Tensor) -> torch.Tensor:
        return as_blocks(array, axes).index_select(0, index)
