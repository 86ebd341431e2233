"""The benchmark for a GPU: what is measured there, in which order, and how it is shown."""
