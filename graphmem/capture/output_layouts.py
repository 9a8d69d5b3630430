"""Outputs that CUDA's kernels make contiguous where PyTorch's decompositions follow the layout of the inputs."""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten

#: ``dX = empty_like(X, contiguous)`` in layer_norm_kernel.cu, for both norms; outputs without strides
#: (``set_output_raw_strided``) in SoftMax.cpp. PyTorch 2.13.
CONTIGUOUS = {
    getattr(_aten, name).default
    for name in ("native_layer_norm_backward", "_fused_rms_norm_backward", "_log_softmax_backward_data")
    if hasattr(_aten, name)
}


def made_contiguous(outputs: Any) -> Any:
    """The outputs of an operator, new ones in place of those that are not contiguous."""
    if isinstance(outputs, torch.Tensor):
        is_laid_out = outputs.is_contiguous()
        return outputs if is_laid_out else torch.empty_like(outputs, memory_format=torch.contiguous_format)
    if isinstance(outputs, (list, tuple)):
        return type(outputs)(made_contiguous(output) for output in outputs)
    return outputs
