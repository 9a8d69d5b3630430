"""ONNX Runtime and TensorFlow against their recordings."""
