"""What lies in an export's folder, written whole or not at all, checked, and kept between programs."""

from typing import Any


def __getattr__(name: str) -> Any:
    """``export_t5``, which most programs want, when somebody asks for it here."""
    if name == "export_t5":
        from t5accel.graphs.export.t5 import export_t5

        return export_t5
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
