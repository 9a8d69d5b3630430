"""Keep half precision through ONNX Runtime's CPU optimizer.

The CPU provider has few float16 kernels, so its optimizer leaves float16 nodes alone and finally casts around each of
them (``insert_cast_transformer.cc``), which a GPU provider does not. Two ways around that: a model in which float16 and
float32 never meet in a Cast is optimized as a float32 model and narrowed afterwards; in any other model the inserted
casts are taken out again, and its float16 nodes stay unfused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import onnx
from onnx import TensorProto

from graphmem.graph.model import TensorSpec

_HALF, _SINGLE = TensorProto.FLOAT16, TensorProto.FLOAT
_INSERTED = "InsertedPrecisionFreeCast_"
_CONVERTING = frozenset(("Cast", "CastLike", "QuantizeLinear", "DequantizeLinear"))
_PAYLOADS = ("raw_data", "float_data", "int32_data")


def can_be_widened(model: onnx.ModelProto) -> bool:
    """Whether the model has float16 tensors and none of its nodes converts to or from other types."""
    if not any(tensor.data_type == _HALF for tensor in _tensors(model)) and not any(
        value.type.tensor_type.elem_type == _HALF for value in model.graph.input
    ):
        return False
    return not any(node.op_type in _CONVERTING or _has_type(node) for node in model.graph.node)


def _has_type(node: onnx.NodeProto) -> bool:
    """Whether an attribute chooses a type, or holds a graph of its own."""
    return any(a.name == "dtype" or a.type == onnx.AttributeProto.GRAPH for a in node.attribute)


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of ``model`` with float32 for float16; the values of small constants are kept."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in _tensors(copy):
        if tensor.data_type == _HALF:
            _widen(tensor)
    for value in (*copy.graph.input, *copy.graph.output, *copy.graph.value_info):
        if value.type.tensor_type.elem_type == _HALF:
            value.type.tensor_type.elem_type = _SINGLE
    return copy


def _widen(tensor: onnx.TensorProto) -> None:
    has_values = any(len(getattr(tensor, field)) for field in _PAYLOADS)
    if has_values and tensor.data_location != TensorProto.EXTERNAL:
        wide = onnx.numpy_helper.to_array(tensor).astype("float32")
        name = tensor.name
        tensor.CopyFrom(onnx.numpy_helper.from_array(wide, name))
    tensor.data_type = _SINGLE


def narrowed(model: onnx.ModelProto, original: onnx.ModelProto) -> onnx.ModelProto:
    """``model``, which was optimized after :func:`widened`, with float16 back where ``original`` had no float32."""
    single = _single_names(original)
    for tensor in _tensors(model):
        if tensor.data_type == _SINGLE and tensor.name not in single:
            for field in _PAYLOADS:
                tensor.ClearField(field)  # no shape is a float
            tensor.data_type = _HALF
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.type.tensor_type.elem_type == _SINGLE and value.name not in single:
            value.type.tensor_type.elem_type = _HALF
    return model


def narrowed_specs(specs: Mapping[str, TensorSpec], original: onnx.ModelProto) -> dict[str, TensorSpec]:
    """The same for specs."""
    single = _single_names(original)
    return {
        name: replace(spec, dtype="float16") if spec.dtype == "float32" and name not in single else spec
        for name, spec in specs.items()
    }


def without_inserted_casts(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` without the casts that ONNX Runtime put around nodes for which it has no float16 kernel."""
    source = {
        node.output[0]: node.input[0]
        for node in model.graph.node
        if node.op_type == "Cast" and node.name.startswith(_INSERTED)
    }
    if not source:
        return model
    outputs = {value.name for value in model.graph.output}
    renamed = {given: made for made, given in source.items() if made in outputs}  # the producer makes it directly
    source = {made: given for made, given in source.items() if made not in outputs}
    kept = [n for n in model.graph.node if not (n.op_type == "Cast" and n.name.startswith(_INSERTED))]
    for node in kept:
        node.input[:] = [renamed.get(source.get(name, name), source.get(name, name)) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model


def _single_names(model: onnx.ModelProto) -> frozenset[str]:
    names = {tensor.name for tensor in _tensors(model) if tensor.data_type == _SINGLE}
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.type.tensor_type.elem_type == _SINGLE:
            names.add(value.name)
    return frozenset(names)


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    yield from model.graph.initializer
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                yield attribute.t
