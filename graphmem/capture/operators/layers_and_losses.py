"""Decompositions of composite layers, losses and normalizations, as a CUDA build has them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graphmem.base import versions
from graphmem.capture.kernels.parts.script import Arguments, Card, named
from graphmem.capture.operators import Decomposition
from graphmem.capture.operators.operators_by_version import composed_rms_norm
from graphmem.capture.torch_internals import OpOverload, suggest_memory_format

_aten = torch.ops.aten


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``at::linear``, because C++ adds the bias out of place to anything that looks like a tensor subclass, and in
    place on a card (ATen/native/Linear.cpp)."""
    if bias is not None and input.dim() == 2:
        return torch.addmm(bias, input, weight.t())
    if bias is not None and (input.dim() == 1 or (input.dim() > 2 and input.is_contiguous())):
        flat = torch.addmm(bias, input.reshape(-1, input.shape[-1]), weight.t())
        return flat.view(*input.shape[:-1], flat.shape[-1])
    if input.dim() > 2 and weight.requires_grad and torch.is_inference_mode_enabled():
        # matmul folds a batch where the matrix requires a gradient (should_fold in LinearAlgebra.cpp). A view of such a
        # weight does so too (DifferentiableViewMeta::requires_grad in csrc/autograd/variable.h), but not down here.
        flat = torch.mm(input.reshape(-1, input.shape[-1]), weight.t())
        output = torch.ops.aten._unsafe_view(flat, (*input.shape[:-1], flat.shape[-1]))
    else:
        output = torch.matmul(input, weight.t())
    return output if bias is None else output.add_(bias)


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """``at::dropout``: the fused kernel keeps a mask of one byte an element (ATen/native/Dropout.cpp)."""
    if train and 0 < p < 1 and input.numel() > 0:
        return _aten.native_dropout.default(input, p, train)[0]
    if p == 0 or not train or input.numel() == 0:
        return input
    return input.mul(torch.zeros((), dtype=input.dtype, device=input.device))


def _softmax_like(kernel: OpOverload) -> Callable[..., Tensor]:
    """``at::softmax(x, dim, dtype)``: half to float is fused into the kernel (ATen/native/SoftMax.cpp)."""

    def softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        if self.dtype is torch.float16 and dtype is torch.float32:
            return kernel(self, dim, True)
        converted = self if dtype is None or dtype is self.dtype else self.to(dtype)
        return kernel(converted, dim, False)

    return softmax


def _one_hot(self: Tensor, num_classes: int = -1) -> Tensor:
    """Zeros, then ones scattered into them (ATen/native/Onehot.cpp)."""
    if num_classes == -1:
        num_classes = int(self.max().item()) + 1
    result = torch.zeros((*self.shape, num_classes), dtype=torch.int64, device=self.device)
    return result.scatter_(-1, self.unsqueeze(-1), 1)


#: Composite layers and losses -> their decompositions on CUDA.
LAYERS_AND_LOSSES: dict[OpOverload, Decomposition] = {
    _aten.linear.default: linear,
    _aten.dropout.default: _dropout,
    _aten.softmax.int: _softmax_like(_aten._softmax.default),
    _aten.log_softmax.int: _softmax_like(_aten._log_softmax.default),
    _aten.one_hot.default: _one_hot,
}


# --- normalizations ---------------------------------------------------------------------------------------------------


@named("aten.rms_norm.default")
def _rms_norm(card: Card, call: Arguments) -> Tensor:
    """``at::rms_norm`` is one fused kernel on CUDA (ATen/native/layer_norm.cpp, 2.9 and later), but for a weight of
    another type, complex numbers and channels last."""
    fused = versions.FUSED_RMS_NORM.holds(card.torch_version) and hasattr(_aten, "_fused_rms_norm")
    mixed = call.weight is not None and call.weight.dtype is not call.input.dtype
    contiguous = suggest_memory_format(call.input) is torch.contiguous_format
    if not fused or mixed or call.input.is_complex() or not contiguous:
        return composed_rms_norm(card.torch_version, call.input, call.normalized_shape, call.weight, call.eps)
    return _aten._fused_rms_norm.default(call.input, call.normalized_shape, call.weight, call.eps)[0]


@named("aten.group_norm.default")
def _group_norm(call: Arguments) -> Tensor:
    """``at::group_norm`` since 2.14 on CUDA: the kernel is given the input as it lies (ATen/native/group_norm.cpp)."""
    input, groups, affine = call.input, call.num_groups, (call.weight, call.bias)
    if input.is_contiguous() and suggest_memory_format(input) is torch.contiguous_format:
        return _aten.group_norm.default.decompose(input, groups, *affine, call.eps, call.cudnn_enabled)
    sizes = (*input.shape[:2], input.shape[2:].numel())
    return _aten.native_group_norm.default(input, *affine, *sizes, groups, call.eps)[0]


#: ``CUDNN_BN_MIN_EPSILON``, and the largest batches cuDNN takes (ATen/native/Normalization.cpp).
_CUDNN_MIN_EPSILON = 1e-5
_CUDNN_MAX_BATCH = {True: 880801, False: 65535}


@named("aten.batch_norm.default")
def _batch_norm(call: Arguments) -> Tensor:
    """``at::_batch_norm_impl_index``: cuDNN where its conditions hold, the native kernel elsewhere."""
    input, kernel = call.input, _aten.native_batch_norm.default
    if call.cudnn_enabled and _cudnn_takes(call):
        kernel, input = _aten.cudnn_batch_norm.default, input.contiguous(memory_format=_suggested_format(input))
    statistics = call.running_mean, call.running_var
    return kernel(input, call.weight, call.bias, *statistics, call.training, call.momentum, call.eps)[0]


def _cudnn_takes(call: Arguments) -> bool:
    x, weight = call.input, call.weight
    given = [statistics is not None for statistics in (call.running_mean, call.running_var)]
    return (
        torch.backends.cudnn.enabled
        and x.dtype is not torch.bfloat16
        and weight is not None
        and call.bias is not None
        and weight.dtype is not torch.bfloat16
        and (x.dtype is not torch.float16 or weight.dtype is torch.float32)
        and (all(given) or (not any(given) and call.training))
        and x.dim() >= 3
        and x.shape[0] <= _CUDNN_MAX_BATCH[call.training]
        and call.eps >= _CUDNN_MIN_EPSILON
        and x.numel() < 2**31
    )


def _suggested_format(tensor: Tensor) -> torch.memory_format:
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous():
        return torch.channels_last
    return torch.contiguous_format


#: Composite normalizations -> their decompositions on CUDA, on a card, and since a change of versions.
BATCH_NORM: dict[OpOverload, Decomposition] = {_aten.batch_norm.default: _batch_norm}
RMS_NORM: dict[OpOverload, Decomposition] = {_aten.rms_norm.default: _rms_norm}
GROUP_NORM: dict[OpOverload, Decomposition] = {_aten.group_norm.default: _group_norm}
