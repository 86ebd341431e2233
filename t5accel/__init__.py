"""Make T5-like encoder-decoder models fast, each technique proven equal before it is timed."""

# The names below are imported from their module on first use, so that `import t5accel` loads neither torch nor numpy.

from importlib import import_module

__version__ = "0.1.0"

_MODULES = {
    "AcceleratedEncoder": "encoder",
    "T5Dims": "models.sizes",
    "accelerate": "api",
    "beam_search": "decoding.beam",
    "export_model": "graphs.export",
    "greedy": "decoding.greedy_search",
    "load_model": "models.load",
    "prompt_lookup": "decoding.ngram_lookup",
    "quantize": "precision.gate",
    "sample": "decoding.sampling",
    "speculative": "decoding.speculation",
    "stream": "decoding.streaming",
}
_ALIASES = {"load_t5": "load_model"}

__all__ = [
    "AcceleratedEncoder",
    "T5Dims",
    "__version__",
    "accelerate",
    "beam_search",
    "export_model",
    "greedy",
    "load_model",
    "load_t5",
    "prompt_lookup",
    "quantize",
    "sample",
    "speculative",
    "stream",
]

TYPE_CHECKING = False  # type checkers and editors take it for true; importing it from typing would cost time

if TYPE_CHECKING:
    from t5accel.api import accelerate
    from t5accel.decoding.beam import beam_search
    from t5accel.decoding.greedy_search import greedy
    from t5accel.decoding.ngram_lookup import prompt_lookup
    from t5accel.decoding.sampling import sample
    from t5accel.decoding.speculation import speculative
    from t5accel.decoding.streaming import stream
    from t5accel.encoder import AcceleratedEncoder
    from t5accel.graphs.export import export_model
    from t5accel.models.load import load_model
    from t5accel.models.load import load_model as load_t5
    from t5accel.models.sizes import T5Dims
    from t5accel.precision.gate import quantize
else:

    def __getattr__(name: str) -> object:
        name = _ALIASES.get(name, name)
        if name not in _MODULES:
            raise AttributeError(f"module 't5accel' has no attribute {name!r}; it offers {', '.join(__all__)}")
        return getattr(import_module(f"t5accel.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
