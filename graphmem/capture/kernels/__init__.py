"""CUDA kernels: what they allocate beyond what a fake operator shows. Importing this package fills ``script.RULES``."""

from graphmem.capture.kernels import reduce as reduce
