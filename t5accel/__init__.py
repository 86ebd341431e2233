"""t5accel: make T5-like encoder-decoder models fast, each technique proven equal before it is timed.

Importing the package loads nothing heavy; the names below are fetched from their module when first used.
"""

from importlib import import_module

__version__ = "0.1.0"

_WHERE = {"accelerate": "t5accel.api", "load_t5": "t5accel.models.load", "T5Dims": "t5accel.models.sizes"}

__all__ = ["T5Dims", "__version__", "accelerate", "load_t5"]

TYPE_CHECKING = False  # editors and type checkers take it for true; the one of typing costs an import

if TYPE_CHECKING:
    from t5accel.api import accelerate
    from t5accel.models.load import load_t5
    from t5accel.models.sizes import T5Dims
else:

    def __getattr__(name: str) -> object:
        if name in _WHERE:
            return getattr(import_module(_WHERE[name]), name)
        raise AttributeError(f"module 't5accel' has no attribute {name!r}; it offers {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
