"""The two graphs on ONNX Runtime through IOBinding: nothing is handed over twice.

The tensors of cross-attention are bound once for all steps; keys and values of self-attention go from one step's outputs
to the next one's inputs as they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from t5accel.backends.ort import OrtNumpy, OrtState


class OrtBound(OrtNumpy):
    """A `Backend` like `OrtNumpy`, with the same arguments and the same numbers, that binds instead of feeding.

    >>> from tempfile import TemporaryDirectory
    >>> from t5accel.decoding.greedy import greedy
    >>> from t5accel.graphs.export import export_t5
    >>> with TemporaryDirectory() as folder:
    ...     _ = export_t5("mini", f"{folder}/mini")
    ...     greedy(OrtBound(f"{folder}/mini"), [[100, 200, 1]], max_new_tokens=5).sequences.shape
    (1, 5)
    """

    def _run_encoder(self, ids: np.ndarray, mask: np.ndarray) -> list[Any]:
        binding = self.encoder.io_binding()
        binding.bind_cpu_input("input_ids", ids)
        binding.bind_cpu_input("attention_mask", mask)
        for name in self.cross_names:
            binding.bind_output(name)
        self.encoder.run_with_iobinding(binding)
        return binding.get_outputs()

    def _bind(self, state: OrtState) -> OrtState:
        state.bound = self.decoder.io_binding()
        state.bound.bind_cpu_input("attention_mask", state.source.mask)
        for name, tensor in zip(self.cross_names, state.source.cross, strict=True):
            state.bound.bind_ortvalue_input(name, tensor)
        return state

    def _run_decoder(self, state: OrtState, new: np.ndarray) -> tuple[np.ndarray, list[Any]]:
        binding = state.bound
        binding.bind_cpu_input("input_ids", new)
        binding.bind_cpu_input("past_mask", state.rows.mask())
        for name, value in zip(self.past_names, state.past, strict=True):
            binding.bind_ortvalue_input(name, value)
        for name in self.outputs:  # anew: a binding keeps the last run's outputs, which are of another shape
            binding.bind_output(name)
        self.decoder.run_with_iobinding(binding)
        logits, *present = binding.get_outputs()
        return logits.numpy(), present

    def _hold(self, array: np.ndarray) -> Any:
        from onnxruntime import OrtValue

        return OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))

    def _array(self, value: Any) -> np.ndarray:
        return value.numpy()
