"""Workspaces of convolutions: asked from the cuDNN that the user named, else as :mod:`prediction` has them."""

from __future__ import annotations

from dataclasses import replace

import torch

from graphmem.capture.kernels.cudnn import prediction
from graphmem.capture.kernels.parts.conv_backend import ConvParams, View
from graphmem.capture.kernels.parts.script import Card
from graphmem.cudnn.plans import Convolution
from graphmem.cudnn.predicted.problem import Direction, Problem
from graphmem.cudnn.predicted.workspaces import Workspace

#: Bytes; what PyTorch gives cuDNN for an address that 32 divides, as those of copies and results do: they are blocks.
_LARGEST_ALIGNMENT = 32


def first_workspace(problem: Problem, direction: Direction, card: Card, question: Convolution) -> Workspace:
    """Workspace, in bytes, of the plan that PyTorch takes without ``cudnn.benchmark``, and of those it takes where that
    one's is refused. Predicted ones end with a plan without any, as all lists of cuDNN 9.20 did that were looked at."""
    if problem.is_empty:
        return Workspace(0)
    answer = card.cudnn.workspaces(question) if card.cudnn is not None else None
    if answer is not None:
        return Workspace(answer[0], later=answer[1:])
    card.predicted.add(question)
    predicted = prediction.convolution_workspace(problem, direction, card)
    return replace(predicted, later=(0,)) if predicted.size else predicted


def largest_workspace(problem: Problem, direction: Direction, card: Card, question: Convolution) -> Workspace:
    """Workspace, in bytes, in which ``cudnn.benchmark`` times all plans: the largest that one of them asks for."""
    answer = card.cudnn.largest_workspace(question) if card.cudnn is not None else None
    if answer is not None:
        return Workspace(answer)
    card.predicted.add(question)
    return prediction.largest_workspace(problem, direction, card)


def question_of(
    inner: View, outer: View, weight: View, params: ConvParams, channels_last: bool, direction: Direction
) -> Convolution:
    """The convolution from ``inner`` to ``outer`` as PyTorch describes it to cuDNN (``build_opgraph``)."""
    produced = {Direction.FORWARD: outer, Direction.BACKWARD_DATA: inner, Direction.BACKWARD_WEIGHT: weight}[direction]
    aligned = [
        _LARGEST_ALIGNMENT if view is produced or not view.is_dense(channels_last) else _alignment(view.offset)
        for view in (inner, weight, outer)
    ]
    cudnn = torch.backends.cudnn
    return Convolution(
        direction=direction.value,
        dtype=str(inner.dtype).removeprefix("torch."),
        input=inner.shape,
        filter=weight.shape,
        output=outer.shape,
        stride=params.stride,
        padding=params.padding,
        dilation=params.dilation,
        channels_last=channels_last,
        tf32=cudnn.allow_tf32,
        deterministic=cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
        alignments=(aligned[0], aligned[1], aligned[2]),
    )


def _alignment(offset: int) -> int:
    """The largest power of two, at most 32, that divides an address (``getAlignment``). The allocator's blocks begin at
    multiples of 512 bytes, so the offset in the block decides."""
    return min(offset & -offset or _LARGEST_ALIGNMENT, _LARGEST_ALIGNMENT)
