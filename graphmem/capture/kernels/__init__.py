"""CUDA kernels: what they allocate beyond what a fake operator shows."""
