"""Decompositions of torchvision's own CUDA operators.

They call PyTorch's operators around kernels that take nothing, so they run here as those calls. Sources:
``torchvision/csrc/ops/cuda/nms_kernel.cu``, ``deform_conv2d_kernel.cu`` and ``box_iou_rotated_kernel.cu`` of 0.28;
orders observed on its CUDA build.
The pooling of regions needs no more than copies: ``kernels/parts/operands.json``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from graphmem.capture.kernels.parts.script import Arguments, named
from graphmem.capture.operators import Decomposition, Perhaps
from graphmem.capture.values.assumed_values import Selection

#: Boxes that one thread block compares (``threadsPerBlock`` of nms_kernel.cu).
_BOXES_OF_A_BLOCK = 64
#: What a grid has at most in its second dimension, and the boxes of a block there (``BLOCK_DIM_Y`` of
#: box_iou_rotated_kernel.cu): with more, the kernel changes the sides.
_MOST_BLOCKS_DOWN, _BOXES_DOWN = 65535, 16
#: Most images that are convolved at once (``kMaxParallelImgs`` of deform_conv2d_kernel.cu).
_MOST_IMAGES = 32


def _nms(_: Selection, dets: Tensor, scores: Tensor, iou_threshold: float) -> Perhaps:
    """Every pair of boxes is compared into a mask of bits; kept boxes are selected in the order of the scores."""
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


def _box_iou_rotated(_: Selection, boxes1: Tensor, boxes2: Tensor) -> Perhaps:
    """A number for every pair, in single precision whatever the boxes are, and nothing beside."""
    if boxes1.device.type != "cuda":
        return NotImplemented
    first, second = len(boxes1), len(boxes2)
    overlaps = boxes1.new_empty((first * second,), dtype=torch.float32)
    if first and second > _MOST_BLOCKS_DOWN * _BOXES_DOWN:
        return overlaps.view(second, first).t()
    return overlaps.view(first, second)


class _Blocks:
    """A deformable convolution in blocks of images: as many at once as divide the batch. Iterates over the numbers of
    blocks and groups. ``columns``: the shape of unfolded patches, by group."""

    def __init__(self, call: Arguments, input: Tensor, weight: Tensor, output: Sequence[int]) -> None:
        self.images = next(count for count in range(_MOST_IMAGES, 0, -1) if input.shape[0] % count == 0)
        self.count = input.shape[0] // self.images
        self.groups, self.output = call.groups, tuple(output)
        taps = input.shape[1] * weight.shape[2] * weight.shape[3]
        self.columns = (self.groups, taps // self.groups, self.images * math.prod(output))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return itertools.product(range(self.count), range(self.groups))

    def rows(self, weight: Tensor) -> Tensor:
        """Weights, or their gradient, as (group, channel, the rest)."""
        return weight.view(self.groups, weight.shape[0] // self.groups, -1)

    def of_gradient(self, gradient: Tensor) -> Tensor:
        """The output's gradient as (block, group, channel, image, height, width)."""
        channels = gradient.shape[1] // self.groups
        split = gradient.view(self.count, self.images, self.groups, channels, *self.output)
        return split.permute(0, 2, 3, 1, 4, 5)


@named("torchvision.deform_conv2d.default")
def _deform_conv2d(_: Selection, call: Arguments) -> Perhaps:
    if call.input.device.type != "cuda":
        return NotImplemented
    copies = [tensor.contiguous() for tensor in (call.input, call.offset, call.weight, call.mask, call.bias)]
    input, offset, weight, _mask, bias = copies
    blocks = _Blocks(call, input, weight, offset.shape[-2:])
    height, width = blocks.output
    out = input.new_zeros((input.shape[0], weight.shape[0], height, width))
    buffer = input.new_zeros((blocks.count, weight.shape[0], blocks.images * height, width))
    columns = input.new_zeros(blocks.columns)
    rows = blocks.rows(weight)
    by_group = buffer.view(blocks.count, blocks.groups, weight.shape[0] // blocks.groups, -1)
    for block, group in blocks:
        by_group[block][group].addmm_(rows[group], columns[group])
    split = buffer.view(blocks.count, weight.shape[0], blocks.images, height, width)
    out.view(blocks.count, blocks.images, weight.shape[0], height, width).copy_(split.transpose(1, 2))
    result = out + bias.view(1, -1, 1, 1)
    del columns, split, by_group, buffer, out
    return result


@named("torchvision._deform_conv2d_backward.default")
def _deform_conv2d_backward(_: Selection, call: Arguments) -> Perhaps:
    if call.input.device.type != "cuda":
        return NotImplemented
    given = (call.grad, call.input, call.weight, call.offset, call.mask, call.bias)
    copies = [tensor.contiguous() for tensor in given]
    grad, input, weight, offset, mask, bias = copies
    blocks = _Blocks(call, input, weight, grad.shape[-2:])
    of_input, of_offset, of_mask = [torch.zeros_like(tensor) for tensor in (input, offset, mask)]
    _input_gradients(blocks, input, weight, grad)
    of_weight = _weight_gradient(blocks, input, weight, grad)
    total = grad.sum((0, 2, 3))
    ones = torch.ones_like(bias)
    of_bias = ones * total
    del ones, total
    return of_input, of_weight, of_offset, of_mask, of_bias


def _input_gradients(blocks: _Blocks, input: Tensor, weight: Tensor, grad: Tensor) -> None:
    """Columns from the output's gradient, of which every group of every block is copied where images lie between."""
    columns, rows, split = input.new_empty(blocks.columns), blocks.rows(weight), blocks.of_gradient(grad)
    for block, group in blocks:
        torch.mm(rows[group].t(), split[block][group].flatten(1), out=columns[group])


def _weight_gradient(blocks: _Blocks, input: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    of_weight = torch.zeros_like(weight)
    rows = blocks.rows(of_weight)
    split = blocks.of_gradient(grad).contiguous()
    columns = input.new_empty(blocks.columns)
    for block, group in blocks:
        rows[group].addmm_(split[block][group].flatten(1), columns[group].t())
    del columns, split
    return of_weight


#: Operator by full name -> its decomposition. torchvision is not imported by this, so there are no objects to name.
DECOMPOSITIONS: dict[str, Decomposition] = {
    "torchvision.nms.default": _nms,
    "torchvision.box_iou_rotated.default": _box_iou_rotated,
    "torchvision.deform_conv2d.default": _deform_conv2d,
    "torchvision._deform_conv2d_backward.default": _deform_conv2d_backward,
}
