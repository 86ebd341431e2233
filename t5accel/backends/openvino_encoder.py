"""Our encoder's graph on OpenVINO's runtime: for large batches, where products take the time and its own are faster.

The graph is the one in the export, unchanged. Of a decoder step OpenVINO has nothing to gain: steps wait for memory.
What was measured is in ``data/results/encoder-runtimes.json``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from t5accel import machine
from t5accel.checks import as_count
from t5accel.errors import ExportError, MissingPackageError, install


class OpenvinoEncoder:
    """``encoder.onnx`` in float32, compiled for this CPU. Threads may share it.

    A shape that it has not met before costs it some milliseconds, once.

    Args:
        path: the graph; its weights may lie in a file beside it.
        threads: by default those that this process may really use.

    Raises:
        ExportError: OpenVINO cannot read the graph.
        MissingPackageError: openvino is not installed.
    """

    def __init__(self, path: str | os.PathLike[str], *, threads: int | None = None):
        core = import_openvino().Core()
        # It would compute in bfloat16 on CPUs that multiply faster in it.
        settings = {
            "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": as_count(threads or machine.cpu_threads(), "threads", at_least=1),
        }  # fmt: skip
        try:
            self._compiled = core.compile_model(core.read_model(os.fspath(path)), "CPU", settings)
        except Exception as error:  # of its own kinds, none of them documented
            raise ExportError(f"{path} cannot be run by OpenVINO: {error}") from error

    def run_into(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None:
        """Compute ``outputs`` (B, H, S, d_kv) from ``input_ids`` and ``attention_mask`` (B, S) in the arrays given."""
        request, tensor = self._compiled.create_infer_request(), import_openvino().Tensor
        for name, array in outputs.items():
            request.set_tensor(name, tensor(array, shared_memory=True))
        request.infer(dict(inputs), share_inputs=True, share_outputs=True)


def import_openvino() -> Any:
    """The package, or a ``MissingPackageError`` that says how to get it.

    >>> import_openvino().__name__
    'openvino'
    """
    try:
        import openvino
    except ImportError as error:
        raise MissingPackageError(f"OpenVINO is not installed: {install('openvino')}.") from error
    return openvino
