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
    """True if one dimension of all values can be a view of the tensor."""
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
    """Shape and strides of a buffer that no fake tensor stands for. Contiguous where no ``strides`` are given."""

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


def channels_last_order(dims: int) -> tuple[int, ...]:
    """The order, slowest first, of the dimensions of a batch whose channels lie innermost."""
    return (0, *range(2, dims), 1)


def last_order(dims: int, last: int) -> tuple[int, ...]:
    """The order of dimensions in which ``last`` is the innermost."""
    return (*(dim for dim in range(dims) if dim != last), last)


def lies_in_order(shape: Sequence[int], strides: Sequence[int], order: Sequence[int] | None = None) -> bool:
    """True if the strides are those of a dense tensor whose dimensions, slowest first, are ``order``. Dimensions of one
    element do not count."""
    dense = contiguous_strides(shape, order)
    return all(size == 1 or stride == wanted for size, stride, wanted in zip(shape, strides, dense, strict=True))


def iteration_order(shape: Sequence[int], strides: Sequence[Sequence[int]], reduced: int = 0) -> list[int]:
    """Dimensions in the order in which ``TensorIterator`` walks them, innermost first (``reorder_dimensions``).

    ``strides``: of each operand; 0 where it is repeated. The first ``reduced`` operands are results of a reduction, in
    which the reduced dimensions, those of stride 0, come first.
    """

    order = list(reversed(range(len(shape))))
    for place in range(1, len(order)):
        for inner in reversed(range(place)):
            answer = _comes_after(shape, strides, reduced, order[inner], order[place])
            if answer is False:
                break
            if answer:
                order[inner], order[place] = order[place], order[inner]
                place = inner
    return order


def _comes_after(
    shape: Sequence[int], strides: Sequence[Sequence[int]], reduced: int, one: int, other: int
) -> bool | None:
    """True if the dimension ``one`` is walked after the ``other``; None where the operands leave it open."""
    for number, operand in enumerate(strides):
        first, second = operand[one], operand[other]
        if number < reduced and (first == 0) != (second == 0):
            return second == 0
        if first == 0 or second == 0:
            continue
        if first != second:
            return first > second
        if shape[one] > shape[other]:
            return True
    return None


def contiguous_strides(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Strides of a dense tensor whose dimensions, slowest first, are ``order``; those of a contiguous one without."""
    strides, expected = [1] * len(shape), 1
    for dim in reversed(range(len(shape)) if order is None else order):
        strides[dim] = expected
        expected *= max(shape[dim], 1)
    return tuple(strides)
