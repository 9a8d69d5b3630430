"""Recurrent networks of a CUDA build: operators, cells, layers, cuDNN's kernels, packed sequences."""
