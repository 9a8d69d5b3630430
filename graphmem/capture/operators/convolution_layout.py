"""The memory format of a convolution's outputs, decided as for a card with cuDNN."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphmem.capture.kernels.parts.conv_backend import Backend, ConvParams, View, runs_channels_last, select_backend
from graphmem.capture.patches import Patches
from graphmem.torch_names import private, private_names


def patch_convolution_layout(patches: Patches) -> None:
    """Convolutions keep channels_last as cuDNN does; C++ would decide for the ``meta`` device, which has no cuDNN."""
    lost = "what convolutions give is not channels_last where cuDNN would make it so"
    names = private_names(lost, "torch._C._select_conv_backend", "torch._C._conv_determine_backend_memory_format")
    found = [private(name, lost, None) for name in names]
    if None not in found:  # the one gives what the other takes
        for name, function in zip(names, (select_convolution_backend, _convolution_format), strict=True):
            patches.replace(name, lost, function)


def select_convolution_backend(
    input: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int, **_: object,
) -> Backend:  # fmt: skip
    """The backend of a convolution, forward and backward, by its arguments."""
    params = ConvParams.of(input.dim() - 2, stride, padding, dilation, transposed, output_padding, groups)
    return select_backend(View.of(input), View.of(weight), params, torch.backends.cudnn.enabled)


def _convolution_format(input: torch.Tensor, weight: torch.Tensor, backend: Backend) -> torch.memory_format:
    """``determine_backend_memory_format`` (ATen/native/Convolution.cpp): only cuDNN leaves outputs channels_last."""
    in_cudnn = backend in (Backend.CUDNN, Backend.CUDNN_TRANSPOSE)
    if not in_cudnn or not runs_channels_last(View.of(input), View.of(weight)):
        return torch.contiguous_format
    return torch.channels_last if input.dim() == 4 else torch.channels_last_3d
