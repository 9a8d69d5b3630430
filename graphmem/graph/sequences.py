"""Sequences, optionals and maps: what their operators give, as far as sizes go.

ONNX's own inference knows the type of a sequence and neither its length nor the shapes in it; those follow here from
the shapes that are known. Maps (``ZipMap`` of scikit-learn's exports) live in the heap of the host, in no arena.
Rules of the operators: https://onnx.ai/onnx/operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from graphmem.errors import ShapeError
from graphmem.graph.model import Dimension, Node, TensorSpec

if TYPE_CHECKING:
    from graphmem.graph.folding import Value
    from graphmem.graph.shapes import Propagation

Shape = tuple[Dimension, ...]
Outputs = list[tuple[TensorSpec, "Value | None"]]


def sequence_outputs(state: Propagation, node: Node) -> Outputs | None:
    """The outputs of a node that makes or reads something that is no tensor; None for any other."""
    rule = _RULES.get(node.operator)
    if rule is None:
        return None
    try:
        return rule(_Reader(state, node))
    except (IndexError, KeyError):
        raise ShapeError(f"{node} lacks an input that {node.op_type} has, or is given one of another type") from None


class _Reader:
    """The inputs of a node."""

    def __init__(self, state: Propagation, node: Node) -> None:
        self.state, self.node = state, node

    def spec(self, position: int = 0) -> TensorSpec:
        return self.state.specs[self.node.inputs[position]]

    def items(self, position: int = 0) -> tuple[Shape, ...]:
        items = self.spec(position).items
        if items is None:
            raise KeyError(position)
        return items

    def number(self, position: int) -> int | None:
        name = self.node.inputs[position] if position < len(self.node.inputs) else ""
        value = self.state.values.get(name) if name else None
        return None if value is None else int(value.flat[0])

    def attribute(self, name: str, default: int) -> int:
        return int(self.node.attributes.get(name, default))

    def sequence(self, dtype: str, items: tuple[Shape, ...]) -> Outputs:
        return [(TensorSpec(self.node.outputs[0], dtype, (), items), None)]

    def tensor(self, dtype: str, shape: Shape, value: Value | None = None) -> Outputs:
        return [(TensorSpec(self.node.outputs[0], dtype, shape), value)]

    @property
    def where(self) -> str:
        return str(self.node)


def _construct(read: _Reader) -> Outputs:
    shapes = tuple(read.spec(i).shape for i in range(len(read.node.inputs)))
    return read.sequence(read.spec().dtype, shapes)


def _empty(read: _Reader) -> Outputs:
    from graphmem.graph.onnx_import import dtype_name

    return read.sequence(dtype_name(read.attribute("dtype", 1), read.node.outputs[0]), ())


def _insert(read: _Reader) -> Outputs:
    items = list(read.items())
    place = read.number(2)
    items.insert(len(items) if place is None else place, read.spec(1).shape)
    return read.sequence(read.spec(1).dtype, tuple(items))


def _erase(read: _Reader) -> Outputs:
    items = list(read.items())
    place = read.number(1)
    del items[-1 if place is None else place]
    return read.sequence(read.spec().dtype, tuple(items))


def _at(read: _Reader) -> Outputs:
    """One of the tensors; where it is not known which, the largest."""
    items, place = read.items(), read.number(1)
    if not items:
        raise ShapeError(f"{read.where}: it reads from an empty sequence")
    shape = items[place] if place is not None else max(items, key=lambda one: TensorSpec("", "bool", one).elements)
    return read.tensor(read.spec().dtype, shape)


def _length(read: _Reader) -> Outputs:
    return read.tensor("int64", (), np.array(len(read.items()), dtype=np.int64))


def _concat(read: _Reader) -> Outputs:
    items, axis = read.items(), read.attribute("axis", 0)
    if not items:
        raise ShapeError(f"{read.where}: it puts together an empty sequence")
    first = items[0]
    if read.attribute("new_axis", 0):
        place = axis % (len(first) + 1)
        return read.tensor(read.spec().dtype, (*first[:place], len(items), *first[place:]))
    place = axis % len(first)
    whole = sum(int(shape[place]) for shape in items)
    return read.tensor(read.spec().dtype, (*first[:place], whole, *first[place + 1 :]))


def _split(read: _Reader) -> Outputs:
    spec = read.spec()
    place = read.attribute("axis", 0) % len(spec.shape)
    whole = int(spec.shape[place])
    keeps = len(read.node.inputs) > 1 and bool(read.node.inputs[1])
    sizes: list[int | None] = [1] * whole
    if keeps:
        value = read.state.values.get(read.node.inputs[1])
        if value is None:
            raise ShapeError(f"{read.where}: how it splits depends on data")
        each = int(value.flat[0])
        sizes = list(map(int, value)) if value.ndim else [min(each, whole - at) for at in range(0, whole, max(1, each))]
    elif not read.attribute("keepdims", 1):
        sizes = [None] * whole
    items = tuple((*spec.shape[:place], *([] if s is None else [s]), *spec.shape[place + 1 :]) for s in sizes)
    return read.sequence(spec.dtype, items)


def _same(read: _Reader) -> Outputs:
    """An optional is what it holds; one that holds nothing is an empty sequence."""
    if not any(read.node.inputs):
        return read.sequence("float32", ())
    spec = read.spec()
    return [(TensorSpec(read.node.outputs[0], spec.dtype, spec.shape, spec.items), None)]


def _has_element(read: _Reader) -> Outputs:
    return read.tensor("bool", (), np.array(any(read.node.inputs)))


def _maps(read: _Reader) -> Outputs:
    return read.sequence("float32", ())


_RULES: Mapping[str, Callable[[_Reader], Outputs]] = {
    "SequenceConstruct": _construct,
    "SequenceEmpty": _empty,
    "SequenceInsert": _insert,
    "SequenceErase": _erase,
    "SequenceAt": _at,
    "SequenceLength": _length,
    "ConcatFromSequence": _concat,
    "SplitToSequence": _split,
    "Optional": _same,
    "OptionalGetElement": _same,
    "OptionalHasElement": _has_element,
    "ai.onnx.ml.ZipMap": _maps,
}
