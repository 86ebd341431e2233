"""Decoding algorithms: next-token scores to sequences, numpy in and out, on any `backend.Backend`."""

from importlib import import_module

_MODULES = {
    "beam_search": "beam", "greedy": "greedy_search", "prompt_lookup": "ngram_lookup", "sample": "sampling",
    "speculative": "speculation", "stream": "streaming",
}  # fmt: skip
__all__ = ["beam_search", "greedy", "prompt_lookup", "sample", "speculative", "stream"]

TYPE_CHECKING = False

if TYPE_CHECKING:
    from t5accel.decoding.beam import beam_search
    from t5accel.decoding.greedy_search import greedy
    from t5accel.decoding.ngram_lookup import prompt_lookup
    from t5accel.decoding.sampling import sample
    from t5accel.decoding.speculation import speculative
    from t5accel.decoding.streaming import stream
else:

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module 't5accel.decoding' has no attribute {name!r}")
        return getattr(import_module(f"t5accel.decoding.{_MODULES[name]}"), name)
