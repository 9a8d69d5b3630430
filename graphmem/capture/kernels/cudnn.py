"""Workspaces of cuDNN's convolutions: asked of the cuDNN that the user named, else predicted.

PyTorch runs the first plan that builds (ATen/native/cudnn/Conv_v8.cpp, ``cudnn.benchmark`` off) and gives it a
workspace for the time of the call. cuDNN publishes no sizes, but its plans report them, and the sizes have few causes,
which are in :mod:`graphmem.cudnn.predicted.workspaces`. Which plan cuDNN puts first is a question to the trees of
:mod:`graphmem.cudnn.predicted.choice`. All of it was learnt from cuDNN 9.20, which PyTorch 2.13 brings.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from graphmem.capture.kernels.parts.conv_backend import ConvParams, View
from graphmem.capture.kernels.parts.script import Card
from graphmem.cudnn.plans import Convolution
from graphmem.cudnn.predicted.choice import Plan, choose_on, is_unordered
from graphmem.cudnn.predicted.packed import Leaf
from graphmem.cudnn.predicted.problem import Direction, Problem
from graphmem.cudnn.predicted.workspaces import Workspace, workspace_bytes

#: Bytes; what PyTorch gives cuDNN for an address that 32 divides, as those of copies and results do: they are blocks.
_LARGEST_ALIGNMENT = 32
#: A form that fits at least this percentage of what cuDNN was seen to choose for such shapes is no estimate.
_CERTAIN_PERCENT = 90
#: A plan of a kind that has no tree, which is of fp64 on some cards: most ask for nothing, none for more than 170 KiB.
_UNKNOWN = Leaf("none", 0)
#: Without answers of such a card nearly always one of the plans copies all three tensors.
_UNKNOWN_LARGEST = Leaf("all", 0)


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


def first_workspace(question: Convolution, card: Card) -> Workspace:
    """Workspace, in bytes, of the plan that PyTorch takes without ``cudnn.benchmark``, and of those it takes where that
    one's is refused. Predicted ones end with a plan without any, as all lists of cuDNN 9.20 did that were looked at."""
    problem = Problem.of(question)
    if problem.is_empty:
        return Workspace(0)
    answer = card.cudnn.workspaces(question) if card.cudnn is not None else None
    if answer is not None:
        return Workspace(answer[0], later=answer[1:])
    card.predicted.add(question)
    predicted = predicted_first(problem, Direction(question.direction), card)
    return replace(predicted, later=(0,)) if predicted.size else predicted


def largest_workspace(question: Convolution, card: Card) -> Workspace:
    """Workspace, in bytes, in which ``cudnn.benchmark`` times all plans: the largest that one of them asks for."""
    answer = card.cudnn.largest_workspace(question) if card.cudnn is not None else None
    if answer is not None:
        return Workspace(answer)
    card.predicted.add(question)
    return predicted_largest(Problem.of(question), Direction(question.direction), card)


# --- predictions ------------------------------------------------------------------------------------------------------


def predicted_first(problem: Problem, direction: Direction, card: Card) -> Workspace:
    """Workspace, in bytes, of the plan that cuDNN's heuristics put first."""
    if problem.is_empty:
        return Workspace(0)
    leaf = choose_on(card.limits, problem, direction) or _UNKNOWN
    if torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled():
        leaf = _deterministic(leaf, problem, direction, card)
    return _workspace(leaf, problem, direction)


def _deterministic(first: Leaf, problem: Problem, direction: Direction, card: Card) -> Leaf:
    """The leaf in deterministic mode, where PyTorch passes over plans that add in any order (filterEngineConfigs of
    Conv_v8.cpp)."""
    size = workspace_bytes(first.form, problem, direction)
    if not is_unordered(problem, direction, size, first.form):
        return first
    return choose_on(card.limits, problem, direction, Plan.DETERMINISTIC) or replace(first, percent=0)


def predicted_largest(problem: Problem, direction: Direction, card: Card) -> Workspace:
    """The largest workspace, in bytes, of all plans that cuDNN offers: those of its heuristics and of its fallback
    list, which PyTorch times in one workspace (get_plans_from_find and generate_and_filter_plans of Conv_v8.cpp)."""
    if problem.is_empty:
        return Workspace(0)
    first = predicted_first(problem, direction, card)
    leaf = choose_on(card.limits, problem, direction, Plan.LARGEST) or _UNKNOWN_LARGEST
    largest = _workspace(leaf, problem, direction)
    return largest if largest.size >= first.size else Workspace(first.size, certain=False)


def _workspace(leaf: Leaf, problem: Problem, direction: Direction) -> Workspace:
    return Workspace(workspace_bytes(leaf.form, problem, direction), leaf.percent >= _CERTAIN_PERCENT)
