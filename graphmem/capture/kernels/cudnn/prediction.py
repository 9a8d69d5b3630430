"""Workspaces of cuDNN's convolutions: those of the plan that cuDNN's heuristics rank first.

PyTorch runs the first plan that builds (ATen/native/cudnn/Conv_v8.cpp, ``cudnn.benchmark`` off) and gives it a
workspace for the time of the call. cuDNN publishes no sizes, but its plans report them, and the sizes have few causes,
which are in :mod:`workspaces`. Which plan cuDNN puts first is a question to the trees of :mod:`choice`. All of
it was learnt from cuDNN 9.20, which PyTorch 2.13 brings.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from graphmem.capture.kernels.parts.script import Card
from graphmem.cudnn.predicted.choice import Plan, choose, is_unordered
from graphmem.cudnn.predicted.packed import Leaf
from graphmem.cudnn.predicted.problem import Direction, Problem
from graphmem.cudnn.predicted.workspaces import Workspace, workspace_bytes

#: A form that fits at least this percentage of what cuDNN was seen to choose for such shapes is no estimate.
_CERTAIN_PERCENT = 90
#: A plan of a kind that has no tree, which is of fp64 on some cards: most ask for nothing, none for more than 170 KiB.
_UNKNOWN = Leaf("none", 0)
#: Without answers of such a card nearly always one of the plans copies all three tensors.
_UNKNOWN_LARGEST = Leaf("all", 0)


def convolution_workspace(problem: Problem, direction: Direction, card: Card) -> Workspace:
    """Workspace, in bytes, of the plan that cuDNN's heuristics put first."""
    if problem.is_empty:
        return Workspace(0)
    leaf = _leaf(problem, direction, card, Plan.FIRST) or _UNKNOWN
    if torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled():
        leaf = _deterministic(leaf, problem, direction, card)
    return _workspace(leaf, problem, direction)


def _deterministic(first: Leaf, problem: Problem, direction: Direction, card: Card) -> Leaf:
    """The leaf in deterministic mode, where PyTorch passes over plans that add in any order (filterEngineConfigs of
    Conv_v8.cpp)."""
    size = workspace_bytes(first.form, problem, direction)
    if not is_unordered(problem, direction, size, first.form):
        return first
    return _leaf(problem, direction, card, Plan.DETERMINISTIC) or replace(first, percent=0)


def largest_workspace(problem: Problem, direction: Direction, card: Card) -> Workspace:
    """The largest workspace, in bytes, of all plans that cuDNN offers: those of its heuristics and of its fallback
    list, which PyTorch times in one workspace (get_plans_from_find and generate_and_filter_plans of Conv_v8.cpp)."""
    if problem.is_empty:
        return Workspace(0)
    first = convolution_workspace(problem, direction, card)
    largest = _workspace(_leaf(problem, direction, card, Plan.LARGEST) or _UNKNOWN_LARGEST, problem, direction)
    return largest if largest.size >= first.size else Workspace(first.size, certain=False)


def _leaf(problem: Problem, direction: Direction, card: Card, which: Plan) -> Leaf | None:
    if not card.limits.bfloat16:
        problem = replace(problem, tf32=False)  # TF32 came with Ampere, as bfloat16 did
    return choose(card.limits.cudnn_trees, problem, direction, which)


def _workspace(leaf: Leaf, problem: Problem, direction: Direction) -> Workspace:
    return Workspace(workspace_bytes(leaf.form, problem, direction), leaf.percent >= _CERTAIN_PERCENT)
