"""Compute small tensors whose inputs are all known: how a Reshape gets to know its target shape.

ONNX's own data propagation stops at Div, Range, Where and the like, which exporters write between Shape and Reshape.
Values of at most 1 KiB are evaluated one node at a time: what arithmetic of shapes is made of with numpy, other
operators with ONNX's reference implementation, whose import takes longer than most graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from graphmem.graph.model import TensorSpec
from graphmem.graph.onnx_stream import KEPT_PAYLOAD_BYTES

Value = npt.NDArray[Any]

#: Deterministic operators whose work is bounded by their inputs and outputs: an allow-list, because a crafted Conv or
#: Loop could compute for ever on tiny tensors.
FOLDABLE = frozenset((
    "Abs", "Add", "And", "ArgMax", "ArgMin", "Cast", "CastLike", "Ceil", "Clip", "Concat", "ConstantOfShape",
    "CumSum", "Div", "Equal", "Expand", "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "Greater",
    "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "NonZero", "Not",
    "Or", "Range", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reciprocal", "Reshape", "Round",
    "ScatterElements", "ScatterND", "Sign", "Slice", "Split", "Sqrt", "Squeeze", "Sub", "Tile", "Transpose",
    "Trilu", "Unsqueeze", "Where", "Xor",
))  # fmt: skip
#: Their output's size is only known once computed, and no larger than a small multiple of the input.
_SIZE_IS_DATA = frozenset(("NonZero",))


def fold(
    node: onnx.NodeProto,
    domain: str,
    opset: int,
    inputs: Mapping[str, TensorSpec],
    values: Mapping[str, Value],
    outputs: Sequence[TensorSpec],
) -> dict[str, Value]:
    """Values of the outputs of ``node``, or nothing when they are unknown or not small."""
    if domain:
        return {}
    if node.op_type in ("Shape", "Size"):
        return _shape_value(node, inputs)
    names = [name for name in node.input if name]
    if node.op_type not in FOLDABLE or not names or any(name not in values for name in names):
        return {}
    if node.op_type not in _SIZE_IS_DATA and not all(is_small(spec) for spec in outputs):
        return {}
    try:
        computed = _evaluate(node, opset, [values[name] for name in names])
    except Exception:  # the reference implementation raises anything for bad inputs; unknown is a safe answer
        return {}
    return {name: array for name, array in computed.items() if array.nbytes <= KEPT_PAYLOAD_BYTES}


def may_fold(op_type: str, domain: str, outputs: Sequence[TensorSpec]) -> bool:
    """Whether :func:`fold` might compute a node with these outputs."""
    is_foldable = op_type in FOLDABLE or op_type in ("Shape", "Size", "Constant")
    return not domain and is_foldable and all(is_small(spec) for spec in outputs)


def is_small(spec: TensorSpec) -> bool:
    """Whether the elements of a tensor are few enough to be followed."""
    if any(isinstance(d, str) or not 0 <= d <= KEPT_PAYLOAD_BYTES for d in spec.shape):
        return False
    return spec.dtype != "string" and spec.nbytes <= KEPT_PAYLOAD_BYTES


def _shape_value(node: onnx.NodeProto, inputs: Mapping[str, TensorSpec]) -> dict[str, Value]:
    shape = inputs[node.input[0]].shape
    if any(isinstance(d, str) for d in shape):
        return {}
    if node.op_type == "Size":
        return {node.output[0]: np.array(inputs[node.input[0]].elements, dtype=np.int64)}
    bounds = {attribute.name: attribute.i for attribute in node.attribute}
    return {node.output[0]: np.array(shape[slice(bounds.get("start", 0), bounds.get("end"))], dtype=np.int64)}


def _evaluate(node: onnx.NodeProto, opset: int, arrays: list[Value]) -> dict[str, Value]:
    with np.errstate(all="ignore"):
        computed = _with_numpy(node, arrays)
        return _by_reference(node, opset, arrays) if computed is None else {node.output[0]: np.asarray(computed)}


def _with_numpy(node: onnx.NodeProto, arrays: list[Value]) -> Value | None:
    """The output of a node; None where there is no rule here for the operator, or for these attributes."""
    if "" in node.input or len(node.output) != 1:
        return None
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if node.op_type in _BY_ELEMENT and not attributes:  # older operator sets have attributes for broadcasting
        return np.asarray(_BY_ELEMENT[node.op_type](*arrays))
    rule = _WITH_NUMPY.get(node.op_type)
    return None if rule is None else rule(attributes, *arrays)


def _by_reference(node: onnx.NodeProto, opset: int, arrays: list[Value]) -> dict[str, Value]:
    from onnx.reference import ReferenceEvaluator

    names = [name for name in node.input if name]
    ins = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
           for n, a in zip(names, arrays, strict=True)]  # fmt: skip
    outs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    graph = helper.make_graph([node], "fold", list({i.name: i for i in ins}.values()), outs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    results = ReferenceEvaluator(model).run(None, dict(zip(names, arrays, strict=True)))
    return {out.name: np.asarray(result) for out, result in zip(outs, results, strict=True)}


def _axes(attributes: Mapping[str, Any], given: Sequence[Value]) -> tuple[int, ...] | None:
    """The axes of an operator: an input, in older operator sets an attribute, None where none are given."""
    axes = given[0] if given else attributes.get("axes")
    return None if axes is None else tuple(np.atleast_1d(axes).tolist())


def _cast(attributes: Mapping[str, Any], x: Value) -> Value | None:
    dtype = helper.tensor_dtype_to_np_dtype(attributes["to"])
    return x.astype(dtype) if dtype.isbuiltin == 1 and dtype.kind in "biuf" else None


def _divided(_: Mapping[str, Any], x: Value, y: Value) -> Value:
    """Whole numbers are rounded towards zero."""
    if x.dtype.kind not in "iu":
        return np.divide(x, y)
    quotient, rest = np.divmod(x, y)
    return np.asarray(quotient + ((rest != 0) & ((x < 0) ^ (y < 0))), quotient.dtype)


def _filled(attributes: Mapping[str, Any], shape: Value) -> Value:
    value = numpy_helper.to_array(attributes["value"]) if "value" in attributes else np.zeros(1, np.float32)
    return np.full(shape.tolist(), value.reshape(()))


def _reduced(by: Callable[..., Any]) -> Callable[..., Value | None]:
    def reduced(attributes: Mapping[str, Any], x: Value, *rest: Value) -> Value | None:
        axes = _axes(attributes, rest)
        if not x.size or (attributes.get("noop_with_empty_axes") and not axes):
            return None
        return np.asarray(by(x, axis=axes or None, keepdims=bool(attributes.get("keepdims", 1))), x.dtype)

    return reduced


def _reshaped(attributes: Mapping[str, Any], x: Value, shape: Value) -> Value:
    keeps = not attributes.get("allowzero")
    return x.reshape([x.shape[i] if keeps and not size else size for i, size in enumerate(shape.tolist())])


def _sliced(attributes: Mapping[str, Any], x: Value, *bounds: Value) -> Value:
    starts, ends, *rest = [b.tolist() for b in bounds] if bounds else [list(attributes[n]) for n in ("starts", "ends")]
    axes = rest[0] if rest else attributes.get("axes", range(len(starts)))
    steps = rest[1] if len(rest) > 1 else [1] * len(starts)
    slices = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        slices[axis] = slice(start, end, step)
    return x[tuple(slices)]


#: Operators without attributes.
_BY_ELEMENT: dict[str, Callable[..., Any]] = {
    "Add": np.add, "And": np.logical_and, "Equal": np.equal, "Greater": np.greater, "GreaterOrEqual": np.greater_equal,
    "Identity": np.asarray, "Less": np.less, "LessOrEqual": np.less_equal, "Max": lambda *all: reduce(np.maximum, all),
    "Min": lambda *all: reduce(np.minimum, all), "Mul": np.multiply, "Neg": np.negative, "Not": np.logical_not,
    "Or": np.logical_or, "Sub": np.subtract, "Where": np.where,
}  # fmt: skip
#: Operators as functions of their attributes and inputs.
_WITH_NUMPY: dict[str, Callable[..., Value | None]] = {
    "Cast": _cast,
    "Concat": lambda attributes, *inputs: np.concatenate(inputs, attributes["axis"]),
    "ConstantOfShape": _filled,
    "Div": _divided,
    "Expand": lambda _, x, shape: x * np.ones(shape.tolist(), x.dtype),
    "Gather": lambda attributes, x, indices: np.take(x, indices, attributes.get("axis", 0)),
    "Range": lambda _, first, end, step: np.arange(first.item(), end.item(), step.item()).astype(first.dtype),
    "ReduceMax": _reduced(np.max),
    "ReduceMin": _reduced(np.min),
    "ReduceProd": _reduced(np.prod),
    "ReduceSum": _reduced(np.sum),
    "Reshape": _reshaped,
    "Slice": _sliced,
    "Squeeze": lambda attributes, x, *rest: np.squeeze(x, _axes(attributes, rest)),
    "Transpose": lambda attributes, x: np.transpose(x, attributes.get("perm")),
    "Unsqueeze": lambda attributes, x, *rest: np.expand_dims(x, _axes(attributes, rest) or ()),
}
