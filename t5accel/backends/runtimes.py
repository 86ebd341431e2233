"""The backend that runs an export fastest."""


def export_backend(device: str) -> type:
    """The class for an export on ONNX Runtime: `OrtStatic` on a CPU, `OrtPointers` on a GPU.

    >>> export_backend("cpu").__name__
    'OrtStatic'
    """
    if device == "cpu":
        from t5accel.backends.ort_static import OrtStatic

        return OrtStatic
    from t5accel.backends.ort_cuda import OrtPointers

    return OrtPointers
