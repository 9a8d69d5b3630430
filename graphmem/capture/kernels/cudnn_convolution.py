"""Workspaces of cuDNN's convolutions: what the plan that cuDNN's heuristics put first asks for.

PyTorch runs the first plan that builds (ATen/native/cudnn/Conv_v8.cpp, ``cudnn.benchmark`` off) and gives it a
workspace for the time of the call. cuDNN publishes no sizes, but its plans tell them, and the sizes have few causes,
told in :mod:`cudnn_workspaces`. Which plan cuDNN puts first is a question to :mod:`cudnn_choice` on Hopper, and to the
rules of :mod:`cudnn_rules` elsewhere and for groups. All of it was learnt from cuDNN 9.20, which PyTorch 2.13 brings.
"""

from __future__ import annotations

from graphmem.capture.kernels.cudnn_choice import choose
from graphmem.capture.kernels.cudnn_problem import Direction, Problem
from graphmem.capture.kernels.cudnn_rules import Workspace, workspace_by_rule
from graphmem.capture.kernels.cudnn_workspaces import workspace_bytes
from graphmem.capture.kernels.script import Card

#: A form that fits at least this percentage of what cuDNN was seen to choose for such shapes is no estimate.
_CERTAIN_PERCENT = 90


def convolution_workspace(problem: Problem, direction: Direction, card: Card) -> Workspace:
    """Workspace, in bytes, of the plan that cuDNN's heuristics put first."""
    if problem.is_empty:
        return Workspace(0)
    if card.compute_capability[0] != 9 or problem.groups > 1 or problem.itemsize == 8:
        return workspace_by_rule(problem, direction, card)
    leaf = choose("hopper", problem, direction, card.sm_count)
    return Workspace(workspace_bytes(leaf.form, problem, direction), leaf.percent >= _CERTAIN_PERCENT)
