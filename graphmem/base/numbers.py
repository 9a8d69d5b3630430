"""Rounding of whole numbers as CUDA kernels do it: up to a multiple, up in a division, down to a power of 2."""

from __future__ import annotations


def div_up(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)


def round_up(n: int, multiple: int) -> int:
    """The next multiple."""
    return -(-n // multiple) * multiple


def last_pow2(n: int) -> int:
    """The largest power of 2 up to ``n``, at least 1 (``last_pow2`` of ATen/native/cuda/Reduce.cuh)."""
    return 1 << max(n.bit_length() - 1, 0)
