"""Keep half precision through ONNX Runtime's CPU optimizer.

The CPU provider has few float16 kernels, so its optimizer leaves float16 nodes alone and finally casts around each of
them, taking out casts of the model's own on the way (``insert_cast_transformer.cc``); a GPU provider does neither. So
a model with float16 is optimized with float32 in its place and narrowed afterwards. Its own casts between the two,
which would then do nothing, stand in as Neg nodes meanwhile, so fusions across a cast are not seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

_HALF, _SINGLE = TensorProto.FLOAT16, TensorProto.FLOAT
_MARK = "graphmem cast to "  # begins the names of nodes that stand in for casts
_PAYLOADS = ("raw_data", "float_data", "int32_data")
#: Of the formulas of GELU that are fused (``gelu_fusion.cc``, ``fast_gelu_fusion.cc``).
_CONSTANTS = (math.sqrt(2), math.sqrt(0.5), math.sqrt(2 / math.pi), 0.044715)
#: Operators whose output type an input or an attribute chooses in ways that widening would change.
_CONVERTING = frozenset(("CastLike", "QuantizeLinear", "DequantizeLinear"))


def has_half(model: onnx.ModelProto) -> bool:
    """Whether anything in the model is float16."""
    return any(tensor.data_type == _HALF for tensor in _tensors(model)) or any(
        value.type.tensor_type.elem_type == _HALF for value in _values(model)
    )


def widened(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """A copy of ``model`` with float32 for float16, or None where that cannot be undone."""
    types = _types(model)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for index, node in enumerate(copy.graph.node):
        chooses = any(a.name == "dtype" or a.type == onnx.AttributeProto.GRAPH for a in node.attribute)
        if node.op_type in _CONVERTING or chooses or (node.op_type == "Cast" and not _widen_cast(node, index, types)):
            return None
    for tensor in _tensors(copy):
        if tensor.data_type == _HALF:
            _widen(tensor)
    for value in _values(copy):
        if value.type.tensor_type.elem_type == _HALF:
            value.type.tensor_type.elem_type = _SINGLE
    return copy


def _types(model: onnx.ModelProto) -> dict[str, int]:
    try:
        inferred = onnx.shape_inference.infer_shapes(model)
    except Exception:  # whatever onnx's C++ throws; casts of unknown input then stop us
        inferred = model
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    types.update((value.name, value.type.tensor_type.elem_type) for value in _values(inferred))
    return types


def _widen_cast(node: onnx.NodeProto, index: int, types: dict[str, int]) -> bool:
    target = next((a for a in node.attribute if a.name == "to"), None)
    given = types.get(node.input[0], 0)
    if target is None or not given:
        return False
    if {given, target.i} == {_HALF, _SINGLE}:
        node.name, node.op_type = f"{_MARK}{target.i} {index}", "Neg"
        del node.attribute[:]
    elif target.i == _HALF:
        node.name = f"{_MARK}{target.i} {index}"
        target.i = _SINGLE
    return True


def _widen(tensor: onnx.TensorProto) -> None:
    has_values = any(len(getattr(tensor, field)) for field in _PAYLOADS)
    if has_values and tensor.data_location != TensorProto.EXTERNAL:
        tensor.CopyFrom(numpy_helper.from_array(_single(numpy_helper.to_array(tensor)), tensor.name))
    del tensor.external_data[:]  # its length is that of float16
    tensor.data_type = _SINGLE


def _single(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """``values`` in fp32; one that is a constant of a formula, rounded, is that constant: fusions round what they
    expect of float16 (``IsInitializerWithExpectedValue``, ``optimizer/utils.cc``)."""
    known = [] if values.size != 1 else [c for c in _CONSTANTS if np.float16(c) == values.reshape(-1)[0]]
    return np.full(values.shape, known[0], np.float32) if known else values.astype(np.float32)


def narrowed(model: onnx.ModelProto, original: onnx.ModelProto) -> onnx.ModelProto:
    """``model``, which was optimized after :func:`widened`, with the types of ``original``.

    Constants that the optimizer made are taken for float16.
    """
    single = {tensor.name for tensor in _tensors(original) if tensor.data_type == _SINGLE}
    single |= {value.name for value in _values(original) if value.type.tensor_type.elem_type == _SINGLE}
    for node in model.graph.node:
        if node.name.startswith(_MARK):
            node.op_type = "Cast"
            del node.attribute[:]
            node.attribute.append(helper.make_attribute("to", int(node.name.removeprefix(_MARK).split()[0])))
    for tensor in _tensors(model):
        if tensor.data_type == _SINGLE and tensor.name not in single:
            for field in (*_PAYLOADS, "external_data", "data_location"):  # their lengths are those of float32
                tensor.ClearField(field)  # no shape is a float
            tensor.data_type = _HALF
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == _SINGLE and value.name not in single:
            value.type.tensor_type.elem_type = _HALF
    made = {name for node in model.graph.node for name in node.output}
    known = [value for value in original.graph.value_info if value.name in made]  # the exporter's names of dimensions
    del model.graph.value_info[:]
    model.graph.value_info.extend(known)
    return model


def _values(model: onnx.ModelProto) -> Iterator[onnx.ValueInfoProto]:
    yield from model.graph.input
    yield from model.graph.output
    yield from model.graph.value_info


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    yield from model.graph.initializer
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                yield attribute.t
