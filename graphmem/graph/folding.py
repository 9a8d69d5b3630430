"""Compute small tensors whose inputs are all known: how a Reshape gets to know its target shape.

ONNX's own data propagation stops at Div, Range, Where and the like, which exporters write between Shape and Reshape.
Values of at most 1 KiB are evaluated with ONNX's reference implementation, one node at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

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
    from onnx.reference import ReferenceEvaluator

    names = [name for name in node.input if name]
    ins = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
           for n, a in zip(names, arrays, strict=True)]  # fmt: skip
    outs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    graph = helper.make_graph([node], "fold", list({i.name: i for i in ins}.values()), outs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    with np.errstate(all="ignore"):
        results = ReferenceEvaluator(model).run(None, dict(zip(names, arrays, strict=True)))
    return {out.name: np.asarray(result) for out, result in zip(outs, results, strict=True)}
