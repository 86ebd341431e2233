"""Decoding algorithms: next-token scores to sequences, numpy in and out, on any `backend.Backend`."""
