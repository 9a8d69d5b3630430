"""Shapes of outputs whose size depends on data (``NonZero``, ``Unique`` and others): the most that they can be.

Without the data nobody knows, so the bound is taken, or the share of it that the user names (``--data-dependent``).
What is below it is cut off in rounding, never to less than one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import onnx

from graphmem.base.records import dataclass
from graphmem.graph.folding import Value
from graphmem.graph.model import Dimension, TensorSpec

Shapes = dict[str, tuple[Dimension, ...]]


def shapes_of_selected(
    node: onnx.NodeProto, specs: Mapping[str, TensorSpec], values: Mapping[str, Value], share: float | None
) -> Shapes:
    """The shapes of the outputs of ``node`` that its data decides, by name; none where nothing bounds them.

    ``share`` is the part of the candidates that is selected, above 0 and at most 1; None for all. Rules of the
    operators: https://onnx.ai/onnx/operators.
    """
    rule = _RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    if rule is None:
        return {}

    def selected(candidates: int) -> int:
        return candidates if share is None or not candidates else max(1, math.floor(share * candidates))

    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), None)
    shapes = rule(_Inputs(node, specs, values, axis), selected)
    return {name: shape for name, shape in zip(node.output, shapes, strict=False) if name}


@dataclass(frozen=True)
class _Inputs:
    """The inputs of a node, of whose first one it selects slices along ``axis``, or elements where that is None."""

    node: onnx.NodeProto
    specs: Mapping[str, TensorSpec]
    values: Mapping[str, Value]
    axis: int | None

    def spec(self, position: int) -> TensorSpec:
        return self.specs[self.node.input[position]]

    @property
    def slices(self) -> int:
        return self.spec(0).elements if self.axis is None else int(self.spec(0).shape[self.axis])

    def shape(self, count: int) -> tuple[Dimension, ...]:
        """The shape of so many slices."""
        if self.axis is None:
            return (count,)
        whole = self.spec(0).shape
        return (*whole[: self.axis], count, *whole[self.axis :][1:])


Selected = Callable[[int], int]
Made = tuple[tuple[Dimension, ...], ...]


def _non_max_suppression(given: _Inputs, selected: Selected) -> Made:
    """[selected, 3]: of every class of every image as many as ``max_output_boxes_per_class``, 0 by default, and
    no more than there are boxes."""
    batch, classes, boxes = map(int, given.spec(1).shape)
    most = given.node.input[2] if len(given.node.input) > 2 else ""
    known = given.values.get(most)
    each = boxes if most and known is None else min(boxes, max(0, int(known.flat[0]))) if known is not None else 0
    return ((selected(batch * classes * each), 3),)


def _non_zero(given: _Inputs, selected: Selected) -> Made:
    """[rank, selected]."""
    return ((max(1, len(given.spec(0).shape)), selected(given.spec(0).elements)),)


def _compress(given: _Inputs, selected: Selected) -> Made:
    """As many slices as the condition has true values, if there are so many."""
    known = given.values.get(given.node.input[1])
    most = min(given.slices, given.spec(1).elements)
    return (given.shape(selected(most) if known is None else min(given.slices, int(known.sum()))),)


def _unique(given: _Inputs, selected: Selected) -> Made:
    """(Y, indices, inverse_indices, counts)."""
    count = selected(given.slices)
    return given.shape(count), (count,), (given.slices,), (count,)


_RULES: Mapping[str, Callable[[_Inputs, Selected], Made]] = {
    "NonMaxSuppression": _non_max_suppression,
    "NonZero": _non_zero,
    "Compress": _compress,
    "Unique": _unique,
}
