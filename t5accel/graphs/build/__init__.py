"""How a decoder step is built: the contract, an ONNX graph node by node, T5's layers."""
