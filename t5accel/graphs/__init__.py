"""ONNX graphs of T5-like models: their contract, export, and what is done to them afterwards."""
