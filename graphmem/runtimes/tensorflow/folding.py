"""What TensorFlow computes of a step beforehand, when it makes the function that runs.

Grappler leaves a result of constants alone that would be larger than 100 KB (``kMaxConstantSize``, constant_folding.cc
of grappler/optimizers). The function's own pass takes those up to 10 MiB (``ConstantFold``, constant_folding.cc of
common_runtime): such a tensor is made once, on the card, and stays.
"""

from __future__ import annotations

from dataclasses import replace

from graphmem.runtimes.tensorflow.step import Node, Step

MAX_CONSTANT_BYTES = 10 << 20
#: Operators without state that are met behind constants alone: gradients of means, masks, positions.
_PURE = frozenset((
    "Tile", "Reshape", "Transpose", "Fill", "BroadcastTo", "ExpandDims", "Squeeze", "Cast", "Neg", "Mul", "RealDiv",
    "DivNoNan", "AddV2", "Sub", "Maximum", "Minimum", "Pack", "ConcatV2", "ZerosLike", "OnesLike", "Range", "Slice",
    "StridedSlice", "Select", "SelectV2", "GreaterEqual", "LessEqual", "Less", "Greater", "LogicalAnd", "LogicalOr",
    "LogicalNot", "Sum", "Rsqrt", "Sqrt", "Pow", "Exp",
))  # fmt: skip


def folded(step: Step) -> Step:
    """The step with constants in the place of what depends on constants alone; without those that nobody reads then.
    A step that runs eagerly is left as it is."""
    if step.eager:
        return step
    constants = {node.name for node in step.nodes if node.op == "Const"}
    rest = [node for node in step.nodes if node.op in _PURE]
    grown = True
    while grown:
        found = [node for node in rest if _is_foldable(node, constants)]
        constants.update(node.name for node in found)
        rest = [node for node in rest if node.name not in constants]
        grown = bool(found)
    read = {name for node in step.nodes if node.name not in constants for name, _ in node.inputs}
    read.update(name for name, _ in step.fetched)
    waited = {name for node in step.nodes for name in node.after}
    return replace(
        step,
        nodes=tuple(
            _constant(node) if node.name in constants else node
            for node in step.nodes
            if node.name not in constants or node.name in read or node.name in waited
        ),
    )


def _is_foldable(node: Node, constants: set[str]) -> bool:
    size = sum(tensor.bytes for tensor in node.outputs)
    known = all(tensor.shape is not None for tensor in node.outputs)
    return (
        bool(node.inputs) and known and size <= MAX_CONSTANT_BYTES and all(name in constants for name, _ in node.inputs)
    )


def _constant(node: Node) -> Node:
    return node if node.op == "Const" else replace(node, op="Const", inputs=(), host_inputs=frozenset())
