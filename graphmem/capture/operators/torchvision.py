"""Decompositions of torchvision's own CUDA operators.

They call PyTorch's operators around kernels that take nothing, so they run here as those calls. Sources:
``torchvision/csrc/ops/cuda/nms_kernel.cu``, ``deform_conv2d_kernel.cu`` and ``box_iou_rotated_kernel.cu`` of 0.28;
orders observed on its CUDA build.
The pooling of regions needs no more than copies: ``kernels/rules/regions.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphmem.capture.values.selection import Selection

#: Boxes that one thread block compares (``threadsPerBlock`` of nms_kernel.cu).
_BOXES_OF_A_BLOCK = 64
#: What a grid has at most in its second dimension, and the boxes of a block there (``BLOCK_DIM_Y`` of
#: box_iou_rotated_kernel.cu): with more, the kernel changes the sides.
_MOST_BLOCKS_DOWN, _BOXES_DOWN = 65535, 16
#: Most images that are convolved at once (``kMaxParallelImgs`` of deform_conv2d_kernel.cu).
_MOST_IMAGES = 32


def _nms(_: Selection, dets: Tensor, scores: Tensor, iou_threshold: float) -> Any:
    """Every pair of boxes is compared into a mask of bits; what is kept is selected in the order of the scores."""
    del iou_threshold
    if dets.device.type != "cuda":
        return NotImplemented
    if dets.numel() == 0:
        return dets.new_empty((0,), dtype=torch.int64)
    order = torch.sort(scores, stable=True, dim=0, descending=True)[1]
    ordered = dets.index_select(0, order).contiguous()
    boxes = dets.shape[0]
    overlaps = dets.new_empty((boxes * -(-boxes // _BOXES_OF_A_BLOCK),), dtype=torch.int64)
    keep = dets.new_empty((boxes,), dtype=torch.bool)  # written by the kernel: zeros that are not to be known
    kept = torch.masked_select(order, keep)
    del keep, overlaps, ordered
    return kept


def _box_iou_rotated(_: Selection, boxes1: Tensor, boxes2: Tensor) -> Any:
    """A number for every pair, in single precision whatever the boxes are, and nothing beside."""
    if boxes1.device.type != "cuda":
        return NotImplemented
    first, second = len(boxes1), len(boxes2)
    overlaps = boxes1.new_empty((first * second,), dtype=torch.float32)
    if first and second > _MOST_BLOCKS_DOWN * _BOXES_DOWN:
        return overlaps.view(second, first).t()
    return overlaps.view(first, second)


class _Blocks:
    """A deformable convolution in blocks of images: as many at once as divide the batch."""

    def __init__(self, input: Tensor, weight: Tensor, output: Tensor | tuple[int, int], groups: int) -> None:
        self.images = next(count for count in range(_MOST_IMAGES, 0, -1) if input.shape[0] % count == 0)
        self.count = input.shape[0] // self.images
        self.groups = groups
        self.height, self.width = output if isinstance(output, tuple) else output.shape[-2:]
        self.columns = (
            input.shape[1] * weight.shape[2] * weight.shape[3], self.images * self.height * self.width
        )  # fmt: skip

    def of_gradient(self, gradient: Tensor) -> Tensor:
        """The output's gradient as (block, group, channel, image, height, width)."""
        channels = gradient.shape[1] // self.groups
        split = gradient.view(self.count, self.images, self.groups, channels, self.height, self.width)
        return split.permute(0, 2, 3, 1, 4, 5)


def _deform_conv2d(
    _: Selection,
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor,
    bias: Tensor,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    groups: int,
    offset_groups: int,
    use_mask: bool,
) -> Any:
    del stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, offset_groups, use_mask
    if input.device.type != "cuda":
        return NotImplemented
    copies = [tensor.contiguous() for tensor in (input, offset, weight, mask, bias)]
    input, offset, weight, mask, bias = copies
    blocks = _Blocks(input, weight, (offset.shape[2], offset.shape[3]), groups)
    shape = (input.shape[0], weight.shape[0], blocks.height, blocks.width)
    out = input.new_zeros(shape)
    buffer = input.new_zeros((blocks.count, shape[1], blocks.images * blocks.height, blocks.width))
    columns = input.new_zeros(blocks.columns)
    _products(blocks, columns, buffer.view(blocks.count, groups, shape[1] // groups, -1), weight)
    split = buffer.view(blocks.count, shape[1], blocks.images, blocks.height, blocks.width)
    out.view(blocks.count, blocks.images, *shape[1:]).copy_(split.transpose(1, 2))
    result = out + bias.view(1, -1, 1, 1)
    del columns, split, buffer, out
    return result


def _products(blocks: _Blocks, columns: Tensor, buffer: Tensor, weight: Tensor) -> None:
    rows = weight.view(blocks.groups, weight.shape[0] // blocks.groups, -1)
    by_group = columns.view(blocks.groups, -1, columns.shape[1])
    for block in range(blocks.count):
        for group in range(blocks.groups):
            buffer[block][group].addmm_(rows[group], by_group[group])


def _deform_conv2d_backward(
    _: Selection,
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor,
    bias: Tensor,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    groups: int,
    offset_groups: int,
    use_mask: bool,
) -> Any:
    del stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, offset_groups, use_mask
    if input.device.type != "cuda":
        return NotImplemented
    copies = [tensor.contiguous() for tensor in (grad, input, weight, offset, mask, bias)]
    grad, input, weight, offset, mask, bias = copies
    blocks = _Blocks(input, weight, grad, groups)
    of_inputs = [torch.zeros_like(tensor) for tensor in (input, offset, mask)]
    _input_gradients(blocks, input, weight, grad)
    of_weight = _weight_gradient(blocks, input, weight, grad)
    total = grad.sum((0, 2, 3))
    ones = torch.ones_like(bias)
    of_bias = ones * total
    del ones, total
    return of_inputs[0], of_weight, of_inputs[1], of_inputs[2], of_bias


def _input_gradients(blocks: _Blocks, input: Tensor, weight: Tensor, grad: Tensor) -> None:
    """Columns from the output's gradient, of which every group of every block is copied where images lie between."""
    columns = input.new_empty(blocks.columns)
    by_group = columns.view(blocks.groups, -1, columns.shape[1])
    rows = weight.view(blocks.groups, weight.shape[0] // blocks.groups, -1)
    split = blocks.of_gradient(grad)
    for block in range(blocks.count):
        for group in range(blocks.groups):
            torch.mm(rows[group].t(), split[block][group].flatten(1), out=by_group[group])


def _weight_gradient(blocks: _Blocks, input: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    of_weight = torch.zeros_like(weight)
    by_rows = of_weight.view(blocks.groups, weight.shape[0] // blocks.groups, -1)
    split = blocks.of_gradient(grad).contiguous()
    columns = input.new_empty(blocks.columns)
    by_group = columns.view(blocks.groups, -1, columns.shape[1])
    for block in range(blocks.count):
        for group in range(blocks.groups):
            by_rows[group].addmm_(split[block][group].flatten(1), by_group[group].t())
    del by_group, columns, split
    return of_weight


#: Operator by full name -> its decomposition. torchvision is not imported by this, so there are no objects to name.
DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "torchvision.nms.default": _nms,
    "torchvision.box_iou_rotated.default": _box_iou_rotated,
    "torchvision.deform_conv2d.default": _deform_conv2d,
    "torchvision._deform_conv2d_backward.default": _deform_conv2d_backward,
}
