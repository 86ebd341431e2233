"""The two graphs on ONNX Runtime through IOBinding: tensors stay in the runtime between steps.

On a CPU this saves nothing: `ort_numpy` moves no data there either, and binding forty names takes longer than naming
them in a dictionary.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from t5accel.backends.ort_numpy import OrtNumpy, OrtState


class OrtBound(OrtNumpy):
    """A `Backend` like `OrtNumpy`, with the same arguments, that binds its inputs; for the CPU only.

    >>> from tempfile import TemporaryDirectory
    >>> from t5accel.decoding.greedy_search import greedy
    >>> from t5accel.graphs.export import export_model
    >>> with TemporaryDirectory() as folder:
    ...     _ = export_model("mini", f"{folder}/mini")
    ...     greedy(OrtBound(f"{folder}/mini"), [[100, 200, 1]], min_new_tokens=5, max_new_tokens=5).sequences.shape
    (1, 5)
    """

    devices = ("cpu",)

    def _run_encoder(self, ids: np.ndarray, mask: np.ndarray) -> list[Any]:
        binding = self.encoder.io_binding()
        binding.bind_cpu_input("input_ids", ids)
        binding.bind_cpu_input("attention_mask", mask)
        return self._run(self.encoder, binding, self.cross_names)

    def _run_step(
        self, state: OrtState, new: np.ndarray, past_mask: np.ndarray, results: list[str], exact: bool = True
    ) -> tuple[list[np.ndarray], list[Any]]:
        # Two bindings take turns: in older releases (1.20) `get_outputs` returns views of the binding's own slots. The
        # next step empties them, and if that step fails the past is lost.
        binding, other = state.binding or (self._bound(state), self._bound(state))
        binding.bind_cpu_input("input_ids", new)
        binding.bind_cpu_input("past_mask", past_mask)
        for name, value in zip(self.past_names, state.past, strict=True):
            binding.bind_ortvalue_input(name, value)
        if self.shortlist:
            binding.bind_cpu_input("exact", np.array(exact))
        found = self._run(self.decoder, binding, [*results, *self.outputs[1:]])
        # Else both hold the past that this step has read until their next turns.
        other.clear_binding_outputs()
        for name in self.past_names:
            binding.bind_ortvalue_input(name, self._nothing)
        state.binding = other, binding
        return [value.numpy() for value in found[: len(results)]], found[len(results) :]

    def _bound(self, state: OrtState) -> Any:
        """A binding with the source's tensors, once for all steps."""
        binding = self.decoder.io_binding()
        for name, value in state.source.inputs.items():
            binding.bind_ortvalue_input(name, value)
        return binding

    def _run(self, session: Any, binding: Any, outputs: list[str]) -> list[Any]:
        for name in outputs:  # anew each time: a binding keeps the outputs of the last run, which are of another shape
            binding.bind_output(name)
        session.run_with_iobinding(binding)
        return binding.get_outputs()

    @cached_property
    def _nothing(self) -> Any:
        return self._hold(np.zeros(0, dtype=self.dtype))

    def _hold(self, array: np.ndarray) -> Any:
        from onnxruntime import OrtValue

        return OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))

    def _array(self, held: Any) -> np.ndarray:
        return held.numpy()
