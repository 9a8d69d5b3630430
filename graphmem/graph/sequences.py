"""Sequences, optionals and maps: what their operators give, as far as sizes go.

ONNX's own inference knows the type of a sequence and neither its length nor the shapes in it; those follow here from
the shapes that are known. Maps (``ZipMap`` of scikit-learn's exports) live in the heap of the host, in no arena.
Rules of the operators: https://onnx.ai/onnx/operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
    """The inputs of a node, and its output."""

    def __init__(self, state: Propagation, node: Node) -> None:
        self.state, self.node = state, node

    def spec(self, position: int = 0) -> TensorSpec:
        return self.state.specs[self.node.inputs[position]]

    def items(self) -> list[Shape]:
        items = self.spec().items
        if items is None:
            raise KeyError(self.node.inputs[0])
        return list(items)

    def value(self, position: int) -> Value | None:
        return self.state.values.get(self.node.inputs[position]) if position < len(self.node.inputs) else None

    def place(self, position: int) -> int | None:
        """The number that an input holds, where it is there and known."""
        value = self.value(position)
        return None if value is None else int(value.flat[0])

    def attribute(self, name: str, default: int) -> int:
        return int(self.node.attributes.get(name, default))

    def sequence(self, items: Iterable[Shape], dtype: str = "") -> Outputs:
        return [(TensorSpec(self.node.outputs[0], dtype or self.spec().dtype, (), tuple(items)), None)]

    def tensor(self, shape: Shape, dtype: str = "", value: Value | None = None) -> Outputs:
        return [(TensorSpec(self.node.outputs[0], dtype or self.spec().dtype, shape), value)]


def _empty(read: _Reader) -> Outputs:
    from graphmem.graph.onnx_import import dtype_name

    return read.sequence((), dtype_name(read.attribute("dtype", 1), read.node.outputs[0]))


def _insert(read: _Reader) -> Outputs:
    items, place = read.items(), read.place(2)
    items.insert(len(items) if place is None else place, read.spec(1).shape)
    return read.sequence(items, read.spec(1).dtype)


def _erase(read: _Reader) -> Outputs:
    items, place = read.items(), read.place(1)
    del items[-1 if place is None else place]
    return read.sequence(items)


def _at(read: _Reader) -> Outputs:
    """One of the tensors; where it is not known which, the largest."""
    items, place = read.items(), read.place(1)
    if not items:
        raise ShapeError(f"{read.node}: it reads from an empty sequence")
    return read.tensor(
        items[place] if place is not None else max(items, key=lambda one: TensorSpec("", "bool", one).elements)
    )


def _concat(read: _Reader) -> Outputs:
    items, axis = read.items(), read.attribute("axis", 0)
    if not items:
        raise ShapeError(f"{read.node}: it puts together an empty sequence")
    first = items[0]
    if read.attribute("new_axis", 0):
        place = axis % (len(first) + 1)
        return read.tensor((*first[:place], len(items), *first[place:]))
    place = axis % len(first)
    whole = sum(int(shape[place]) for shape in items)
    return read.tensor((*first[:place], whole, *first[place + 1 :]))


def _split(read: _Reader) -> Outputs:
    shape = read.spec().shape
    place = read.attribute("axis", 0) % len(shape)
    whole = int(shape[place])
    parts: list[Shape] = [(1,) if read.attribute("keepdims", 1) else ()] * whole
    if len(read.node.inputs) > 1 and read.node.inputs[1]:
        value = read.value(1)
        if value is None:
            raise ShapeError(f"{read.node}: how it splits depends on data")
        each = max(1, int(value.flat[0]))
        parts = [(int(n),) for n in value] if value.ndim else [(min(each, whole - at),) for at in range(0, whole, each)]
    return read.sequence((*shape[:place], *part, *shape[place + 1 :]) for part in parts)


def _same(read: _Reader) -> Outputs:
    """An optional is what it holds; one that holds nothing is an empty sequence."""
    if not any(read.node.inputs):
        return read.sequence((), "float32")
    spec = read.spec()
    return [(TensorSpec(read.node.outputs[0], spec.dtype, spec.shape, spec.items), None)]


_RULES: Mapping[str, Callable[[_Reader], Outputs]] = {
    "SequenceConstruct": lambda read: read.sequence(read.spec(i).shape for i in range(len(read.node.inputs))),
    "SequenceEmpty": _empty,
    "SequenceInsert": _insert,
    "SequenceErase": _erase,
    "SequenceAt": _at,
    "SequenceLength": lambda read: read.tensor((), "int64", np.array(len(read.items()), dtype=np.int64)),
    "ConcatFromSequence": _concat,
    "SplitToSequence": _split,
    "Optional": _same,
    "OptionalGetElement": _same,
    "OptionalHasElement": lambda read: read.tensor((), "bool", np.array(any(read.node.inputs))),
    "ai.onnx.ml.ZipMap": lambda read: read.sequence((), "float32"),
}
