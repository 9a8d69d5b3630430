"""Shapes of the operators of ``ai.onnx.ml``, of whose outputs ONNX's own inference often knows the rank alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
from onnx import TensorProto, helper

Types = Mapping[str, onnx.TypeProto]
#: The attributes that list the classes of a classifier, and the type of a label.
_CLASSES = {
    "classlabels_int64s": TensorProto.INT64, "classlabels_ints": TensorProto.INT64,
    "classlabels_strings": TensorProto.STRING,
}  # fmt: skip


def learner_outputs(node: onnx.NodeProto, types: Types) -> dict[str, onnx.TypeProto]:
    """Types of the outputs of ``node``; empty where no rule is known or an input's shape is not."""
    rule = _RULES.get(node.op_type)
    if rule is None or node.domain != "ai.onnx.ml":
        return {}
    shapes = [_shape(types[name]) for name in node.input]
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    outputs = rule(attributes, shapes, types[node.input[0]].tensor_type.elem_type)
    made = (helper.make_tensor_type_proto(kind, shape) for kind, shape in outputs)
    return {name: kind for name, kind in zip(node.output, made, strict=False) if name}


def _shape(kind: onnx.TypeProto) -> list[int]:
    return [dimension.dim_value for dimension in kind.tensor_type.shape.dim]


Shapes = Sequence[Sequence[int]]
Outputs = list[tuple[int, list[int]]]


def _rows(shape: Sequence[int]) -> int:
    return shape[0] if len(shape) > 1 else 1


def _classifier(attributes: Mapping[str, Any], shapes: Shapes, kind: int) -> Outputs:
    """A label a row, and a score for each class."""
    name, classes = next((name, attributes[name]) for name in _CLASSES if attributes.get(name))
    return [(_CLASSES[name], [_rows(shapes[0])]), (TensorProto.FLOAT, [_rows(shapes[0]), max(2, len(classes))])]


def _vector_machine(attributes: Mapping[str, object], shapes: Shapes, kind: int) -> Outputs:
    """As a classifier; without probabilities a score for each pair of classes (``ml/svmclassifier.cc``)."""
    label, (scored, (rows, count)) = _classifier(attributes, shapes, kind)
    is_paired = count > 2 and not attributes.get("prob_a") and bool(attributes.get("vectors_per_class"))
    return [label, (scored, [rows, count * (count - 1) // 2 if is_paired else count])]


def _regressor(attributes: Mapping[str, Any], shapes: Shapes, kind: int) -> Outputs:
    """A number a row for each target."""
    return [(TensorProto.FLOAT, [_rows(shapes[0]), attributes.get("n_targets", attributes.get("targets", 1))])]


def _extracted(attributes: Mapping[str, object], shapes: Shapes, kind: int) -> Outputs:
    """So many of the last dimension as there are indices (``ml/array_feature_extractor.cc``)."""
    values, indices = shapes
    return [(kind, [*(values[:-1] or [1]), math.prod(indices)])]


_RULES: dict[str, Callable[[Mapping[str, Any], Shapes, int], Outputs]] = {
    **dict.fromkeys(("TreeEnsembleClassifier", "LinearClassifier"), _classifier),
    "SVMClassifier": _vector_machine,
    **dict.fromkeys(("TreeEnsembleRegressor", "LinearRegressor", "SVMRegressor"), _regressor),
    "ArrayFeatureExtractor": _extracted,
    # a number for each element: a float, or of the type that came
    **dict.fromkeys(("Scaler", "Normalizer"), lambda attributes, shapes, kind: [(TensorProto.FLOAT, list(shapes[0]))]),
    **dict.fromkeys(("Imputer", "Binarizer"), lambda attributes, shapes, kind: [(kind, list(shapes[0]))]),
}
