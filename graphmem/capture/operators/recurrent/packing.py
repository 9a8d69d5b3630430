"""Packed sequences: packing and padding as CUDA runs them.

The lengths are values. Those that come from the host are known in an analysis, also when they were on the card in
between; others are refused. Source: ``aten/src/ATen/native/PackedSequence.cpp`` of PyTorch 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from graphmem.capture.torch_internals import FakeTensor, unset_fake_temporarily
from graphmem.errors import CaptureError

if TYPE_CHECKING:
    from graphmem.capture.operators.composites import Build


def known_lengths(tensor: Tensor | None) -> list[int]:
    """The numbers of a host tensor. Raises :class:`CaptureError` where an analysis does not have them."""
    if tensor is None or isinstance(tensor, FakeTensor):
        raise CaptureError(
            "the lengths of packed sequences are values of a tensor, and an analysis has only shapes; give "
            "pack_padded_sequence a list of numbers, or a tensor made of numbers on the host"
        )
    with unset_fake_temporarily():
        numbers: list[int] = tensor.tolist()
    return numbers


def pack(build: Build, input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    numbers = known_lengths(build.values.of(lengths))
    if min(numbers, default=1) <= 0:  # in PyTorch's words
        raise RuntimeError(
            "Length of all samples has to be greater than 0, but found an element in 'lengths' that is <= 0"
        )
    return _Pack.apply(input, numbers, batch_first)  # type: ignore[no-any-return]


class _Pack(torch.autograd.Function):  # type: ignore[misc]
    """``_pack_padded_sequence``: blocks of steps with one batch size are made contiguous, then joined."""

    @staticmethod
    def forward(ctx: FunctionCtx, input: Tensor, lengths: list[int], batch_first: bool) -> tuple[Tensor, Tensor]:
        steps = input.transpose(0, 1) if batch_first else input
        blocks, sizes, before = [], [], 0
        for index in range(len(lengths)):
            length, size = lengths[-1 - index], len(lengths) - index
            if length > before:
                block = steps[before:length, :size].contiguous()
                blocks.append(block.view(-1, *steps.shape[2:]))
                sizes += [size] * (length - before)
                before = length
        del block
        ctx.shape, ctx.sizes, ctx.batch_first = steps.shape, sizes, batch_first
        batch_sizes = torch.tensor(sizes)
        ctx.mark_non_differentiable(batch_sizes)
        packed = torch.cat(blocks)
        while blocks:  # C++ destroys a vector from the first element on
            del blocks[0]
        return packed, batch_sizes

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].new_zeros(ctx.shape)
        return (gradient.transpose(0, 1) if ctx.batch_first else gradient), None, None


def pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """``_pad_packed_sequence``: blocks of steps with one batch size are copied into a tensor full of the padding."""
    sizes = known_lengths(batch_sizes)
    length = max(total_length, len(sizes))
    output = torch.full((length, sizes[0], *data.shape[1:]), padding_value, dtype=data.dtype, device=data.device)
    lengths: list[int] = []
    before = offset = 0
    for step, size in enumerate([*sizes, 0]):
        last = sizes[max(0, step - 1)]
        if size == last:
            continue
        count = last * (step - before)
        block = data[offset : offset + count].view(step - before, last, *data.shape[1:])
        output[before:step].narrow(1, 0, last).copy_(block)
        lengths = [step] * (last - size) + lengths
        offset, before = offset + count, step
    return (output.transpose(0, 1) if batch_first else output), torch.tensor(lengths)
