"""Decompositions of operators that gradient formulas call: on a card they write in place, which a fake tensor forbids.

C++ asks whether a tensor "is like a subclass" (``areAnyTensorSubclassLike``), as every fake tensor is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphmem.capture.operators import Decomposition
from graphmem.capture.torch_internals import OpOverload
from graphmem.capture.values.callers import is_transformed

_aten = torch.ops.aten


def _gather_backward(grad: Tensor, self: Tensor, dim: int, index: Tensor, sparse_grad: bool) -> Tensor:
    if sparse_grad:
        return _aten._gather_sparse_backward.default(self, dim, index, grad)
    zeros = grad.new_zeros(self.shape)
    return zeros.scatter_add(dim, index, grad) if is_transformed() else zeros.scatter_add_(dim, index, grad)


def _value_selecting_reduction_backward(
    grad: Tensor, dim: int, indices: Tensor, sizes: Sequence[int], keepdim: bool
) -> Tensor:
    """The values that ``max(dim)``, ``topk``, ``sort`` and the like selected get the gradient."""
    if not keepdim and len(sizes):
        grad, indices = grad.unsqueeze(dim), indices.unsqueeze(dim)
    if is_transformed():
        return grad.new_zeros(sizes).scatter(dim, indices, grad)
    return torch.zeros(sizes, dtype=grad.dtype, device=grad.device).scatter_(dim, indices, grad)


def _index_select_backward(grad: Tensor, self_sizes: Sequence[int], dim: int, index: Tensor) -> Tensor:
    zeros = grad.new_zeros(self_sizes)
    return zeros.index_add(dim, index, grad) if is_transformed() else zeros.index_add_(dim, index, grad)


def _cummaxmin_backward(grad: Tensor, input: Tensor, indices: Tensor, dim: int) -> Tensor:
    if input.numel() == 0:
        return input
    if is_transformed():
        return grad.new_zeros(input.shape).scatter_add(dim, indices, grad)
    return torch.zeros(input.shape, dtype=input.dtype, device=input.device).scatter_add_(dim, indices, grad)


def _cumprod_backward(grad: Tensor, input: Tensor, dim: int, output: Tensor) -> Tensor:
    """The way of an input without zeros, which a card finds out by reading one back."""
    if input.dim() == 0 or input.numel() == 0:
        return grad.clone()
    if input.shape[dim] == 1:
        return grad
    weighted = output.conj() * grad
    is_zero = input == 0
    is_zero.any()
    flipped = weighted.flip(dim)
    summed = flipped.cumsum(dim)
    reversed_sum = summed.flip(dim)
    del summed, flipped  # the temporaries of one C++ expression
    return reversed_sum.div(input.conj())


def _trace_backward(grad: Tensor, sizes: Sequence[int]) -> Tensor:
    """As many indices as the diagonal is long (``trace_backward_symint``, ATen/native/TriangularOps.cpp, 2.13)."""
    result = torch.zeros(sizes[0] * sizes[1], dtype=grad.dtype, device=grad.device)
    step = sizes[1] + 1
    indices = torch.arange(0, min(sizes) * step, step, dtype=torch.int64, device=grad.device)
    return result.index_fill_(0, indices, grad).view(sizes)


def _masked_select_backward(grad: Tensor, input: Tensor, mask: Tensor) -> Tensor:
    """Zeros of the shape of both, the gradient scattered into them (ATen/native/TensorAdvancedIndexing.cpp)."""
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    return torch.zeros(shape, dtype=grad.dtype, device=grad.device).masked_scatter_(mask, grad)


#: The operators of gradients -> their decompositions on CUDA.
GRADIENT_OPERATORS: dict[OpOverload, Decomposition] = {
    _aten.gather_backward.default: _gather_backward,
    _aten.value_selecting_reduction_backward.default: _value_selecting_reduction_backward,
    _aten.index_select_backward.default: _index_select_backward,
    _aten.cummaxmin_backward.default: _cummaxmin_backward,
    _aten.trace_backward.default: _trace_backward,
    _aten.cumprod_backward.default: _cumprod_backward,
    _aten.masked_select_backward.default: _masked_select_backward,
}
