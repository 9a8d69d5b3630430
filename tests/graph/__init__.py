"""ONNX graphs: reading, order, liveness."""
