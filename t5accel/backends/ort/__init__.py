"""ONNX Runtime: sessions and their settings, fed with numpy arrays, bound, or captured."""

from typing import Any


def __getattr__(name: str) -> Any:
    """``OrtNumpy``, the backend that most programs want, when somebody asks for it here."""
    if name == "OrtNumpy":
        from t5accel.backends.ort.numpy import OrtNumpy

        return OrtNumpy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
