"""Turn next-token scores into sequences. Numpy in, numpy out; knows no runtime (see `backend.Backend`)."""

from t5accel.decoding.backend import Backend, Generated
from t5accel.decoding.beam import beam_search
from t5accel.decoding.distribution import Sampling
from t5accel.decoding.encoder_cache import EncoderCache
from t5accel.decoding.greedy import greedy
from t5accel.decoding.lookup import lookup
from t5accel.decoding.sampling import sample
from t5accel.decoding.speculative import speculative
from t5accel.decoding.streaming import stream, stream_text

__all__ = [
    "Backend",
    "EncoderCache",
    "Generated",
    "Sampling",
    "beam_search",
    "greedy",
    "lookup",
    "sample",
    "speculative",
    "stream",
    "stream_text",
]
