"""Measured sessions of ONNX Runtime on the CPU: its C API, sessions, and the process that runs a case."""
