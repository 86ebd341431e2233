"""Turn next-token scores into sequences. Numpy in, numpy out; knows no runtime (see `backend.Backend`)."""
