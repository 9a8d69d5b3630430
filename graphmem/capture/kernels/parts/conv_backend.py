"""Which implementation at::_convolution picks on CUDA, as a pure function of shapes, types and layouts.

Source: ``aten/src/ATen/native/Convolution.cpp`` (use_cudnn, use_cudnn_depthwise, _select_conv_backend,
determine_backend_memory_format) and ``ConvUtils.h`` (cudnn_conv_suggest_memory_format) of PyTorch 2.13, whose wheels
bring cuDNN 9.20: tests for older cuDNN versions are always true there and left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch

from graphmem.capture.kernels.parts.layout import channels_last_order, contiguous_strides, lies_in_order
from graphmem.devices.capabilities import Capability

_MAX_INT32 = 2**31 - 1


class Backend(Enum):
    """``at::native::ConvBackend``, the members that CUDA reaches."""

    CUDNN = "Cudnn"
    CUDNN_TRANSPOSE = "CudnnTranspose"
    DEPTHWISE_2D = "CudaDepthwise2d"
    DEPTHWISE_3D = "CudaDepthwise3d"
    SLOW_2D = "Slow2d"
    SLOW_DILATED_2D = "SlowDilated2d"
    SLOW_DILATED_3D = "SlowDilated3d"
    SLOW_TRANSPOSE_2D = "SlowTranspose2d"
    SLOW_TRANSPOSE_3D = "SlowTranspose3d"
    EMPTY = "Empty"


@dataclass(frozen=True, slots=True)
class View:
    """Shape and strides of a tensor, which decide layouts, and ``offset``: bytes of the storage before it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @staticmethod
    def of(tensor: torch.Tensor) -> View:
        """The view of a tensor; a 1-D convolution's becomes that of the 2-D one with one row (``view4d``)."""
        shape, strides = tuple(int(n) for n in tensor.shape), tuple(int(n) for n in tensor.stride())
        if len(shape) == 3:
            shape, strides = (*shape[:2], 1, shape[2]), (*strides[:2], shape[2] * strides[2], strides[2])
        return View(shape, strides, tensor.dtype, int(tensor.storage_offset()) * int(tensor.dtype.itemsize))

    @property
    def bytes(self) -> int:
        """Bytes of a dense copy."""
        return math.prod(self.shape) * int(self.dtype.itemsize)

    def is_dense(self, channels_last: bool) -> bool:
        """``is_contiguous(memory_format)``."""
        order = channels_last_order(len(self.shape)) if channels_last else None
        return 0 in self.shape or lies_in_order(self.shape, self.strides, order)

    def dense(self, channels_last: bool) -> View:
        """A dense copy."""
        order = channels_last_order(len(self.shape)) if channels_last else None
        return View(self.shape, contiguous_strides(self.shape, order), self.dtype)

    def suggests_channels_last(self) -> bool:
        """``suggest_memory_format`` is not contiguous (is_channels_last_strides of c10/core/MemoryFormat.h)."""
        if len(self.shape) not in (4, 5) or self.strides[1] == 0:
            return False
        least = 0
        for dim in (1, *range(len(self.shape) - 1, 1, -1), 0):
            if self.shape[dim] == 0 or self.strides[dim] < least or (dim == 0 and least == self.strides[1]):
                return False
            least = self.strides[dim] * max(self.shape[dim], 1)
        return True


@dataclass(frozen=True, slots=True)
class ConvParams:
    """Arguments of a convolution over two or three dimensions."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @staticmethod
    def of(
        dims: int, stride: object, padding: object, dilation: object, transposed: bool, extra: object, groups: int
    ) -> ConvParams:
        """From an operator's arguments; ``dims`` is the number of spatial dimensions (1 becomes 2)."""
        return ConvParams(
            _expand(stride, dims, 1), _expand(padding, dims, 0), _expand(dilation, dims, 1), transposed,
            _expand(extra, dims, 0), groups,
        )  # fmt: skip

    @property
    def is_dilated(self) -> bool:
        return any(d != 1 for d in self.dilation)

    @property
    def output_padding_is_big(self) -> bool:
        return any(extra >= step for extra, step in zip(self.output_padding, self.stride, strict=True))


def _expand(value: object, dims: int, neutral: int) -> tuple[int, ...]:
    values = [int(v) for v in value] if isinstance(value, (list, tuple)) else [int(value)]  # type: ignore[call-overload]
    if len(values) == 1:
        values *= dims
    return (neutral, *values) if dims == 1 else tuple(values)


def runs_channels_last(input: View, weight: View) -> bool:
    """``cudnn_conv_suggest_memory_format``: cuDNN runs channels_last if input or weight is, except in fp64."""
    if input.dtype == torch.float64 or weight.dtype == torch.float64:
        return False
    return input.suggests_channels_last() or weight.suggests_channels_last()


def cudnn_takes(dtype: torch.dtype, limits: Capability) -> bool:
    """cuDNN convolves bfloat16 from capability 8.0 on (supportsBFloat16ConvolutionWithCuDNNv8)."""
    return dtype != torch.bfloat16 or limits.bfloat16


def select_backend(input: View, weight: View, params: ConvParams, cudnn_enabled: bool) -> Backend:
    """``_select_conv_backend`` on CUDA. A 1-D convolution is given as a 2-D one.

    ``cudnn_enabled``: ``torch.backends.cudnn.enabled``, and the device lets cuDNN take the type (:func:`cudnn_takes`).
    """
    three = len(input.shape) == 5
    if input.shape[0] == 0 or input.shape[1] == 0:
        return Backend.EMPTY
    depthwise = (
        not params.transposed
        and params.groups > 1
        and input.shape[1] == params.groups
        and weight.shape[0] % input.shape[1] == 0
    )
    if depthwise:
        if cudnn_enabled and _cudnn_takes_depthwise(input, weight, params):
            return Backend.CUDNN
        return Backend.DEPTHWISE_3D if three else Backend.DEPTHWISE_2D
    if cudnn_enabled and not params.output_padding_is_big:
        return Backend.CUDNN_TRANSPOSE if params.transposed else Backend.CUDNN
    if params.transposed:
        return Backend.SLOW_TRANSPOSE_3D if three else Backend.SLOW_TRANSPOSE_2D
    if three:
        return Backend.SLOW_DILATED_3D
    return Backend.SLOW_DILATED_2D if params.is_dilated else Backend.SLOW_2D


def _cudnn_takes_depthwise(input: View, weight: View, params: ConvParams) -> bool:
    """``use_cudnn_depthwise``."""
    if max(math.prod(input.shape), math.prod(weight.shape)) > _MAX_INT32:
        return True
    if runs_channels_last(input, weight):
        return True
    suits = (
        input.dtype == weight.dtype == torch.float16
        and len(input.shape) == 4
        and not params.is_dilated
        and (params.stride[0] == params.stride[1] or input.shape[2] == 1)
        and input.shape[1] >= 32
        and not params.output_padding_is_big
    )
    return suits and _fast_in_cudnn(input.shape, weight.shape, params.stride[1])


def _fast_in_cudnn(shape: tuple[int, ...], weight: tuple[int, ...], stride: int) -> bool:
    """``check_cudnn_depthwise_workload_with_filter``: where fp16 depthwise kernels of cuDNN were measured faster."""
    batch, channels, height, width = shape
    if height == 1 and stride == 1:
        return True
    size = weight[3]
    if weight[2] != size or size not in (1, 3, 5) or width < 7 or stride not in (1, 2):
        return False
    if stride == 1:
        return True
    if batch == 1:
        return width <= 28 if size == 1 else True
    if size == 1:
        return batch <= 16 and channels >= 128 and width <= 7
    return channels >= 512 or (channels >= 256 and width >= 28)
