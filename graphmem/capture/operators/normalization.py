"""Normalizations that are composites, as a CUDA build resolves them: rms_norm, batch_norm, group_norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphmem.base import versions
from graphmem.capture.kernels.parts.script import Card
from graphmem.capture.operators.operators_by_version import composed_rms_norm
from graphmem.capture.torch_internals import suggest_memory_format

_aten = torch.ops.aten


def normalization_composites(card: Card) -> dict[Any, Callable[..., Any]]:
    """Composite normalizations -> their decompositions on CUDA."""
    table: dict[Any, Callable[..., Any]] = {
        _aten.rms_norm.default: _rms_norm_of(card),
        _aten.batch_norm.default: _batch_norm,
    }
    if versions.GROUP_NORM_COPIES_INSIDE.holds(card.torch_version):
        table[_aten.group_norm.default] = _group_norm
    return table


def _rms_norm_of(card: Card) -> Callable[..., Tensor]:
    if not versions.FUSED_RMS_NORM.holds(card.torch_version) or not hasattr(_aten, "_fused_rms_norm"):
        return composed_rms_norm(card.torch_version)
    return _rms_norm


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """``at::rms_norm`` is one fused kernel on CUDA (ATen/native/layer_norm.cpp, 2.9 and later)."""
    return _aten._fused_rms_norm.default(input, normalized_shape, weight, eps)[0]


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """``at::group_norm`` since 2.14 on CUDA: the kernel is given the input as it lies (ATen/native/group_norm.cpp)."""
    if input.is_contiguous() and suggest_memory_format(input) is torch.contiguous_format:
        return _aten.group_norm.default.decompose(input, num_groups, weight, bias, eps, cudnn_enabled)
    batch, channels = input.shape[:2]
    spatial = input.shape[2:].numel()
    return _aten.native_group_norm.default(input, weight, bias, batch, channels, spatial, num_groups, eps)[0]


#: ``CUDNN_BN_MIN_EPSILON``, and the largest batches cuDNN takes (ATen/native/Normalization.cpp).
_CUDNN_MIN_EPSILON = 1e-5
_CUDNN_MAX_BATCH = {True: 880801, False: 65535}


def _batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """``at::_batch_norm_impl_index``: cuDNN where its conditions hold, the native kernel elsewhere."""
    if cudnn_enabled and _cudnn_takes(input, weight, bias, running_mean, running_var, training, eps):
        input = input.contiguous(memory_format=_suggested_format(input))
        return _aten.cudnn_batch_norm.default(input, weight, bias, running_mean, running_var, training, momentum, eps)[
            0
        ]
    return _aten.native_batch_norm.default(input, weight, bias, running_mean, running_var, training, momentum, eps)[0]


def _cudnn_takes(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, eps: float) -> bool:
    return (
        torch.backends.cudnn.enabled
        and x.dtype is not torch.bfloat16
        and weight is not None
        and bias is not None
        and weight.dtype is not torch.bfloat16
        and (x.dtype is not torch.float16 or weight.dtype is torch.float32)
        and ((mean is not None and var is not None) or (mean is None and var is None and training))
        and x.dim() >= 3
        and x.shape[0] <= _CUDNN_MAX_BATCH[training]
        and eps >= _CUDNN_MIN_EPSILON
        and x.numel() < 2**31
    )


def _suggested_format(tensor: Tensor) -> torch.memory_format:
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous():
        return torch.channels_last
    return torch.contiguous_format
