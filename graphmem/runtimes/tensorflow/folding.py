"""The part of a step that TensorFlow computes beforehand, when it makes the function that runs.

Grappler leaves a result of constants alone that would be larger than 100 KB (``kMaxConstantSize``, constant_folding.cc
of grappler/optimizers). The function's own pass takes those up to 10 MiB (``ConstantFold``, constant_folding.cc of
common_runtime): such a tensor is made once, on the card, and stays.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """The step with constants in the place of what depends on constants alone, numbered last. What others only wait
    for runs all the same. A step that runs eagerly is left as it is."""
    if step.eager:
        return step
    constants = _constants(step)
    rest = [node for node in step.nodes if node.name not in constants]
    read = {name for node in rest for name, _ in node.inputs} | {name for name, _ in step.fetched}
    wanted = [name for name in read if name in constants and constants[name].op == "Const"]
    wanted += (name for node in rest for name in node.after if name in constants)
    kept: dict[str, Node] = {}
    while wanted:
        node = constants[wanted.pop()]
        kept[node.name] = node
        before = (*(name for name, _ in node.inputs), *node.after)
        wanted += (name for name in before if name in constants and name not in kept)
    made = {name: _constant(node) for name, node in constants.items() if node.op != "Const" and name in read}
    left = [
        kept.get(node.name) or _with_constants(node, made)
        for node in step.nodes if node.name in kept or node.name not in constants
    ]  # fmt: skip
    fetched = tuple((made[name].name if name in made else name, output) for name, output in step.fetched)
    return replace(step, nodes=(*left, *made.values()), fetched=fetched)


def _constants(step: Step) -> dict[str, Node]:
    """The nodes that depend on constants alone, and those themselves."""
    constants = {node.name: node for node in step.nodes if node.op == "Const"}
    rest = [node for node in step.nodes if node.op in _PURE]
    grown = True
    while grown:
        found = {node.name: node for node in rest if _is_foldable(node, constants)}
        constants |= found
        rest = [node for node in rest if node.name not in found]
        grown = bool(found)
    return constants


def _is_foldable(node: Node, constants: Mapping[str, Node]) -> bool:
    size = sum(tensor.bytes for tensor in node.outputs)
    known = all(tensor.shape is not None for tensor in node.outputs)
    return (
        bool(node.inputs) and known and size <= MAX_CONSTANT_BYTES and all(name in constants for name, _ in node.inputs)
    )


def _constant(node: Node) -> Node:
    return replace(node, op="Const", name=f"{node.name}/_folded", inputs=(), after=(), host_inputs=frozenset())


def _with_constants(node: Node, made: Mapping[str, Node]) -> Node:
    if all(name not in made for name, _ in node.inputs):
        return node
    inputs = tuple((made[name].name if name in made else name, output) for name, output in node.inputs)
    return replace(node, inputs=inputs)
