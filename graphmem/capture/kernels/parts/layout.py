"""Shapes, strides and bytes of tensors, as the rules of kernels ask for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

#: Floating-point types of two bytes.
HALF_TYPES = (torch.float16, torch.bfloat16)


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's values, wherever they lie."""
    return int(tensor.numel() * tensor.element_size())


def is_dense(tensor: torch.Tensor) -> bool:
    """Non-overlapping and dense: some order of the dimensions is contiguous."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def has_flat_view(tensor: torch.Tensor) -> bool:
    """Whether one dimension of all values can be a view of the tensor."""
    expected = None
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if size == 1:
            continue
        if expected is not None and stride != expected:
            return False
        expected = stride * size
    return True


class Strided(Protocol):
    """The shape and strides of a tensor that is to be reduced."""

    @property
    def shape(self) -> Sequence[int]: ...
    def stride(self) -> Sequence[int]: ...
    def dim(self) -> int: ...
    def numel(self) -> int: ...
    def storage_offset(self) -> int: ...


class Layout:
    """Shape and strides of a buffer that no fake tensor stands for. Contiguous unless ``strides`` say otherwise."""

    def __init__(self, shape: Sequence[int], strides: Sequence[int] | None = None) -> None:
        self.shape = tuple(shape)
        self._strides = tuple(strides) if strides is not None else contiguous_strides(self.shape)

    @classmethod
    def dense_like(cls, tensor: Strided) -> Layout:
        """The layout of a copy: dense, dimensions in the same order of strides (``torch.preserve_format``)."""
        strides = tuple(tensor.stride())
        if any(stride == 0 and size > 1 for stride, size in zip(strides, tensor.shape, strict=True)):
            return cls(tensor.shape)  # expanded tensors are copied contiguously
        order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
        return cls(tensor.shape, contiguous_strides(tuple(tensor.shape), order))

    def stride(self) -> Sequence[int]:
        return self._strides

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    def storage_offset(self) -> int:
        return 0


def contiguous_strides(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Strides of a dense tensor whose dimensions, slowest first, are ``order``; those of a contiguous one without."""
    strides, expected = [1] * len(shape), 1
    for dim in reversed(range(len(shape)) if order is None else order):
        strides[dim] = expected
        expected *= max(shape[dim], 1)
    return tuple(strides)
