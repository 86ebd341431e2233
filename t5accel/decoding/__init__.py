"""Turn next-token scores into sequences. Numpy in, numpy out; knows no runtime (see `backend.Backend`)."""

from t5accel.decoding.backend import Backend, Generated
from t5accel.decoding.beam import beam_search
from t5accel.decoding.encoder_cache import EncoderCache
from t5accel.decoding.greedy import greedy

__all__ = ["Backend", "EncoderCache", "Generated", "beam_search", "greedy"]
