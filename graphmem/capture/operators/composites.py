"""Composite operators, and formulas of gradients, that C++ resolves otherwise for a fake tensor than for one on a card.

Three reasons, three tables:

* Some fused kernels exist only in a CUDA build, and the dispatcher of another build falls back to what they are made
  of: :data:`FUSED_ON_CUDA`.
* Some composites ask whether a tensor "is like a subclass" and then avoid writing in place. As operators they are
  replaced by :func:`composite_substitutes`.
* Formulas of gradients ask the same and are no operators: :data:`IN_PLACE_IN_BACKWARD` says which call of which node
  writes into its first argument on a card (``torch/csrc/autograd/FunctionsManual.cpp``,
  ``areAnyTensorSubclassLike``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphmem.capture.kernels.parts.script import Card

_aten = torch.ops.aten
_MEAN, _SUM = 1, 2

#: Operators with a CUDA kernel *and* a composite fallback; the three that the dispatcher of 2.13's CUDA build lists.
FUSED_ON_CUDA = tuple(
    getattr(_aten, name).default
    for name in ("_fused_rms_norm", "mish_backward", "silu_backward")
    if hasattr(_aten, name)
)

_EVENLY_DISTRIBUTED = frozenset({"MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"})
_CLAMPED = frozenset({"ClampBackward0"})
#: Out-of-place operator -> (what a card runs, names of the autograd nodes that call it so).
IN_PLACE_IN_BACKWARD: dict[Any, tuple[Any, frozenset[str]]] = {
    _aten.index_put.default: (_aten.index_put_.default, frozenset({"IndexBackward0"})),
    _aten.put.default: (_aten.put_.default, frozenset({"TakeBackward0"})),
    _aten.logical_and.default: (_aten.logical_and_.default, _EVENLY_DISTRIBUTED | _CLAMPED),
    _aten.logical_or.default: (_aten.logical_or_.default, _EVENLY_DISTRIBUTED | _CLAMPED),
    _aten.masked_fill.Scalar: (_aten.masked_fill_.Scalar, frozenset({"Atan2Backward0"})),
    _aten.sub.Tensor: (_aten.sub_.Tensor, frozenset({"BinaryCrossEntropyWithLogitsBackward0"})),
    _aten.mul.Tensor: (_aten.mul_.Tensor, frozenset({"BinaryCrossEntropyWithLogitsBackward0"})),
}

#: Nodes whose formulas end in a sum of temporaries, which must not be taken for the engine's fan-in of gradients.
ADDED_OUT_OF_PLACE = frozenset({"Atan2Backward0", "LogcumsumexpBackward0", "StdMeanBackward0", "VarMeanBackward0"})


def composite_substitutes(card: Card) -> dict[Any, Callable[..., Any]]:
    """By operator: what CUDA's version of a composite calls."""
    del card
    return {
        _aten.gather_backward.default: _gather_backward,
        _aten.value_selecting_reduction_backward.default: _value_selecting_reduction_backward,
        _aten.index_select_backward.default: _index_select_backward,
        _aten.cummaxmin_backward.default: _cummaxmin_backward,
        _aten.trace_backward.default: _trace_backward,
        _aten.cumprod_backward.default: _cumprod_backward,
        _aten.one_hot.default: _one_hot,
        _aten.masked_select_backward.default: _masked_select_backward,
        _aten.ctc_loss.IntList: _ctc_loss,
        _aten.ctc_loss.Tensor: _ctc_loss_of_tensors,
    }


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` is active; its tensors are like subclasses on a card too."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _gather_backward(grad: Tensor, self: Tensor, dim: int, index: Tensor, sparse_grad: bool) -> Tensor:
    if sparse_grad:
        return _aten._gather_sparse_backward.default(self, dim, index, grad)
    zeros = grad.new_zeros(self.shape)
    return zeros.scatter_add(dim, index, grad) if is_transformed() else zeros.scatter_add_(dim, index, grad)


def _value_selecting_reduction_backward(grad: Tensor, dim: int, indices: Tensor, sizes: Any, keepdim: bool) -> Tensor:
    """The values that ``max(dim)``, ``topk``, ``sort`` and the like selected get the gradient."""
    if not keepdim and len(sizes):
        grad, indices = grad.unsqueeze(dim), indices.unsqueeze(dim)
    if is_transformed():
        return grad.new_zeros(sizes).scatter(dim, indices, grad)
    return torch.zeros(sizes, dtype=grad.dtype, device=grad.device).scatter_(dim, indices, grad)


def _index_select_backward(grad: Tensor, self_sizes: Any, dim: int, index: Tensor) -> Tensor:
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


def _trace_backward(grad: Tensor, sizes: Any) -> Tensor:
    result = torch.zeros(sizes[0] * sizes[1], dtype=grad.dtype, device=grad.device)
    indices = torch.arange(0, result.numel(), sizes[1] + 1, dtype=torch.int64, device=grad.device)
    return result.index_fill_(0, indices, grad).view(sizes)


def _masked_select_backward(grad: Tensor, input: Tensor, mask: Tensor) -> Tensor:
    """Zeros of the shape of both, the gradient scattered into them (ATen/native/TensorAdvancedIndexing.cpp)."""
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    return torch.zeros(shape, dtype=grad.dtype, device=grad.device).masked_scatter_(mask, grad)


def _one_hot(self: Tensor, num_classes: int = -1) -> Tensor:
    """Zeros, then ones scattered into them (ATen/native/Onehot.cpp)."""
    if num_classes == -1:
        num_classes = int(self.max().item()) + 1
    result = torch.zeros((*self.shape, num_classes), dtype=torch.int64, device=self.device)
    return result.scatter_(-1, self.unsqueeze(-1), 1)


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> Tensor:
    """The native kernel (ATen/native/LossCTC.cpp); cuDNN's takes 32-bit targets on the host only."""
    losses = _aten._ctc_loss.default(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)[0]
    if zero_infinity:
        losses = torch.where(losses == float("inf"), losses.new_zeros(()), losses)
    if reduction == _MEAN:
        return (losses / losses.detach().new_empty(losses.shape).clamp_min(1)).mean()
    return losses.sum() if reduction == _SUM else losses


def _ctc_loss_of_tensors(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, *rest: Any
) -> Tensor:
    """Lengths in tensors are read back and used as numbers. Their values are unknown here, so every target is taken to
    be as long as the padded row, and targets one after the other to be of one length."""
    count = target_lengths.numel()
    if targets.dim() == 2:
        lengths = [int(targets.shape[1])] * count
    else:
        each, rest_of_all = divmod(targets.numel(), max(count, 1))
        lengths = [each + (index < rest_of_all) for index in range(count)]
    return _ctc_loss(log_probs, targets, [int(log_probs.shape[0])] * input_lengths.numel(), lengths, *rest)
