"""Workspaces of cuDNN's convolutions: what the plan that cuDNN's heuristics put first asks for.

PyTorch runs the first plan that builds (ATen/native/cudnn/Conv_v8.cpp, ``cudnn.benchmark`` off) and gives it a
workspace for the time of the call. cuDNN publishes no sizes, but its plans tell them, and the sizes have few causes,
told in :mod:`cudnn_workspaces`. Which plan cuDNN puts first is a question to the trees of :mod:`cudnn_choice`, and to
the rules of :mod:`cudnn_rules` where there is no tree. All of it was learnt from cuDNN 9.20, which PyTorch 2.13 brings.
"""

from __future__ import annotations

from dataclasses import replace

from graphmem.capture.kernels.cudnn_choice import RULE, Leaf, choose
from graphmem.capture.kernels.cudnn_problem import Direction, Problem
from graphmem.capture.kernels.cudnn_rules import Workspace, workspace_by_rule
from graphmem.capture.kernels.cudnn_workspaces import workspace_bytes
from graphmem.capture.kernels.script import Card

#: A form that fits at least this percentage of what cuDNN was seen to choose for such shapes is no estimate.
_CERTAIN_PERCENT = 90
#: Files of trees by compute capability, or by its major number. cuDNN chooses alike for all cards of a capability.
_FAMILIES: dict[int | tuple[int, int], str] = {
    (7, 5): "turing",
    (8, 0): "ampere",
    (8, 6): "ampere_geforce",
    (8, 7): "ampere_geforce",
    (8, 9): "ada",
    9: "hopper",
    10: "blackwell",
    11: "blackwell",
    12: "blackwell_geforce",
}


def convolution_workspace(problem: Problem, direction: Direction, card: Card) -> Workspace:
    """Workspace, in bytes, of the plan that cuDNN's heuristics put first."""
    if problem.is_empty:
        return Workspace(0)
    leaf = _leaf(problem, direction, card, largest=False)
    return _workspace(leaf, problem, direction, card) if leaf else workspace_by_rule(problem, direction, card)


def largest_workspace(problem: Problem, direction: Direction, card: Card) -> Workspace:
    """The largest workspace, in bytes, of all plans that cuDNN offers: those of its heuristics and of its fallback
    list, which PyTorch times in one workspace (get_plans_from_find and generate_and_filter_plans of Conv_v8.cpp)."""
    if problem.is_empty:
        return Workspace(0)
    first = convolution_workspace(problem, direction, card)
    leaf = _leaf(problem, direction, card, largest=True)
    # Without answers of such a card: nearly always one of the plans copies all three tensors.
    largest = _workspace(leaf or Leaf("all", 0), problem, direction, card)
    return largest if largest.size >= first.size else Workspace(first.size, certain=False)


def _leaf(problem: Problem, direction: Direction, card: Card, largest: bool) -> Leaf | None:
    name = family(card.compute_capability)
    if name is None:
        return None
    if card.compute_capability[0] < 8:
        problem = replace(problem, tf32=False)  # TF32 came with Ampere
    return choose(name, problem, direction, largest)


def family(compute_capability: tuple[int, int]) -> str | None:
    """Name of the trees for cards of a compute capability."""
    return _FAMILIES.get(compute_capability) or _FAMILIES.get(compute_capability[0])


def _workspace(leaf: Leaf, problem: Problem, direction: Direction, card: Card) -> Workspace:
    if leaf.form == RULE:
        size = workspace_by_rule(problem, direction, card).size
    else:
        size = workspace_bytes(leaf.form, problem, direction)
    return Workspace(size, leaf.percent >= _CERTAIN_PERCENT)
