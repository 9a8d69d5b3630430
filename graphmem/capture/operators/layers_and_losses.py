"""Decompositions of composite layers and losses (linear, dropout, cosine similarity, …), as a CUDA build has them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graphmem.capture.operators import Decomposition
from graphmem.capture.torch_internals import OpOverload

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
