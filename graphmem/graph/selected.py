"""How much operators return whose output's size is decided by data: at most what they select from.

Without the data nobody knows, so the bound is taken, or the share of it that the user names (``--data-dependent``).
What is below it is cut off in rounding, never to less than one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import onnx

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
    bound = _BOUNDS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    if bound is None:
        return {}

    def selected(candidates: int) -> int:
        return candidates if share is None or not candidates else max(1, math.floor(share * candidates))

    return bound(node, specs, values, selected)


def _non_max_suppression(node: onnx.NodeProto, specs: Any, values: Any, selected: Any) -> Shapes:
    """[selected, 3]: of every class of every image as many as ``max_output_boxes_per_class``, 0 by default, says, and
    no more than there are boxes."""
    batch, classes, boxes = specs[node.input[1]].shape
    most = node.input[2] if len(node.input) > 2 else ""
    known = values.get(most)
    if most and known is None:
        return {node.output[0]: (selected(batch * classes * boxes), 3)}
    return {node.output[0]: (selected(batch * classes * min(boxes, max(0, int(known.flat[0])))) if most else 0, 3)}


def _non_zero(node: onnx.NodeProto, specs: Any, values: Any, selected: Any) -> Shapes:
    """[rank, selected]."""
    spec = specs[node.input[0]]
    return {node.output[0]: (max(1, len(spec.shape)), selected(spec.elements))}


def _axis(node: onnx.NodeProto) -> int | None:
    return next((attribute.i for attribute in node.attribute if attribute.name == "axis"), None)


def _compress(node: onnx.NodeProto, specs: Any, values: Any, selected: Any) -> Shapes:
    """As many slices along ``axis``, or elements without one, as the condition has, if there are so many."""
    spec, condition = specs[node.input[0]], specs[node.input[1]].elements
    known, axis = values.get(node.input[1]), _axis(node)
    slices = spec.elements if axis is None else spec.shape[axis]
    count = selected(min(slices, condition)) if known is None else min(slices, int(known.sum()))
    if axis is None:
        return {node.output[0]: (count,)}
    return {node.output[0]: (*spec.shape[:axis], count, *spec.shape[axis:][1:])}


def _unique(node: onnx.NodeProto, specs: Any, values: Any, selected: Any) -> Shapes:
    """(Y, indices, inverse_indices, counts): as many as there are slices along ``axis``, or elements without one."""
    spec = specs[node.input[0]]
    axis = _axis(node)
    slices = spec.elements if axis is None else spec.shape[axis]
    count = selected(slices)
    first = (count,) if axis is None else (*spec.shape[:axis], count, *spec.shape[axis:][1:])
    shapes = (first, (count,), (slices,), (count,))
    return {name: shape for name, shape in zip(node.output, shapes, strict=False) if name}


_BOUNDS = {
    "NonMaxSuppression": _non_max_suppression,
    "NonZero": _non_zero,
    "Compress": _compress,
    "Unique": _unique,
}
