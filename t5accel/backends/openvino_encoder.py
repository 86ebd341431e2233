"""An export's encoder on OpenVINO, whose matrix products are faster in large batches.

Decoder steps wait for memory and gain nothing: ``data/results/encoder-runtimes.json``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from t5accel import machine
from t5accel.errors import ExportError, InputError, MissingPackageError, install

BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # of a CPU that multiplies bf16: one of these


class OpenvinoEncoder:
    """``encoder.onnx`` compiled in fp32 or bf16 for this CPU; threads may share it. Raises ``ExportError``."""

    def __init__(self, path: Path, *, threads: int | None, precision: str = "fp32"):
        flags = machine.facts(gpu=False)["cpu_flags"]
        if precision == "bf16" and flags is not None and not BF16_FLAGS & {*flags}:
            raise InputError("encoder_precision must be 'fp32' on this CPU, which does not multiply bf16, got 'bf16'.")
        core = _import_openvino().Core()
        settings = {
            # Unasked it computes in bf16 where the CPU is faster in it.
            "INFERENCE_PRECISION_HINT": {"fp32": "f32"}.get(precision, precision),
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads or machine.cpu_threads(),
        }
        try:
            self._compiled = core.compile_model(core.read_model(str(path)), "CPU", settings)
        except Exception as error:  # of its own kinds, none of them documented
            raise ExportError(f"{path} cannot be run by OpenVINO: {error}") from error

    def run_into(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None:
        """Write ``outputs`` (B, H, S, d_kv) for ``input_ids`` and ``attention_mask`` (B, S) to the arrays given."""
        request, tensor = self._compiled.create_infer_request(), _import_openvino().Tensor
        for name, array in outputs.items():
            request.set_tensor(name, tensor(array, shared_memory=True))
        # A shape that it has not met before costs it some milliseconds, once.
        request.infer(dict(inputs), share_inputs=True, share_outputs=True)


def _import_openvino() -> Any:
    sys.modules.setdefault("openvino_telemetry", None)  # else its import reports to Google Analytics
    try:
        import openvino
    except ImportError as error:
        raise MissingPackageError(f"OpenVINO is not installed: {install('openvino')}.") from error
    return openvino
