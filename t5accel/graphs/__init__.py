"""ONNX graphs of encoder-decoders: their contract, export, and what is done to them afterwards."""
