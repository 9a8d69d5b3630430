"""Outputs that CUDA's kernels lay out otherwise than PyTorch's decompositions do. Sources are of PyTorch 2.13."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import compute_elementwise_output_strides

_aten = torch.ops.aten

#: Contiguous, whatever the inputs are: ``dX = empty_like(X, contiguous)`` in layer_norm_kernel.cu, for both norms;
#: outputs without strides (``set_output_raw_strided``) in SoftMax.cpp; ``LEGACY_CONTIGUOUS_MEMORY_FORMAT`` in Loss.cpp
#: and RreluWithNoise.cu.
_CONTIGUOUS = {
    getattr(_aten, name).default
    for name in (
        "native_layer_norm_backward", "_fused_rms_norm_backward", "_log_softmax_backward_data", "mse_loss_backward",
        "smooth_l1_loss_backward", "huber_loss_backward", "rrelu_with_noise",
    )
    if hasattr(_aten, name)
}  # fmt: skip
#: Laid out by ``TensorIterator`` for these arguments in this order (Activation.cpp, BinaryOps.cpp), or by
#: ``empty_like`` of one (Loss.cu).
#: The decompositions have other operands first, and the first one with distinct strides decides.
_ITERATED: dict[Any, tuple[int, ...]] = {
    _aten.softplus_backward.default: (0, 1),
    _aten.elu_backward.default: (0, 5),
    _aten.hardtanh_backward.default: (0, 1),
    _aten.hardswish_backward.default: (0, 1),
    _aten.hardsigmoid_backward.default: (0, 1),
    _aten.logit_backward.default: (0, 1),
    _aten.copysign.Tensor: (0, 1),
    _aten.xlogy.Tensor: (0, 1),
    _aten.special_xlog1py.default: (0, 1),
    _aten.floor_divide.default: (0, 1),
    _aten.binary_cross_entropy.default: (0,),
    _aten.binary_cross_entropy_backward.default: (1,),
}
#: ``noise.mul(grad)`` in training, otherwise that of ``leaky_relu`` (RreluWithNoise.cu, Activation.cpp).
_RRELU = _aten.rrelu_with_noise_backward.default
RELAID = {*_CONTIGUOUS, *_ITERATED, _RRELU}


def as_on_card(func: Any, args: Sequence[Any], outputs: Any) -> Any:
    """The outputs of ``func``, one of :data:`RELAID`, with the strides that a CUDA build gives them."""
    if func in _CONTIGUOUS:
        return _made_contiguous(outputs)
    positions = _ITERATED[func] if func is not _RRELU else (2, 0) if args[5] else (1, 0)
    operands = [args[position] for position in positions if position < len(args)]
    operands = [operand for operand in operands if isinstance(operand, torch.Tensor)]
    if not isinstance(outputs, torch.Tensor) or any(operand.dim() != outputs.dim() for operand in operands):
        return outputs  # a mean or a sum; a number
    strides = compute_elementwise_output_strides(*(operand.expand(outputs.shape) for operand in operands))
    if strides == outputs.stride():
        return outputs
    return torch.empty_strided(outputs.shape, strides, dtype=outputs.dtype, device=outputs.device)


def _made_contiguous(outputs: Any) -> Any:
    """The outputs of an operator, new ones in place of those that are not contiguous."""
    if isinstance(outputs, torch.Tensor):
        is_laid_out = outputs.is_contiguous()
        return outputs if is_laid_out else torch.empty_like(outputs, memory_format=torch.contiguous_format)
    if isinstance(outputs, (list, tuple)):
        return type(outputs)(_made_contiguous(output) for output in outputs)
    return outputs
