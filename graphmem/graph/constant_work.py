"""How much work it would be to fold the constants of an ONNX graph, in bytes and multiplications, before it is done.

A file of 200 bytes may expand a scalar to gigabytes and multiply them. onnxruntime folds whatever it can, so this is
asked first, from shapes alone: the nodes that see nothing but constants are taken out of the graph, and ONNX's own
shape inference gives the sizes of their outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx
from onnx import helper, shape_inference

from graphmem.base.records import dataclass
from graphmem.errors import GraphmemError
from graphmem.graph.binding import Binding
from graphmem.graph.model import ELEMENT_BITS
from graphmem.graph.shapes import facts_of, propagate

#: Operators that compute every element of their output from a row of others.
_PRODUCTS = frozenset(("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "MatMulInteger", "QLinearMatMul"))
#: Operators whose output is at most as large as an input.
_SAME_SIZE = frozenset((
    "Cast", "CastLike", "Constant", "Flatten", "Gather", "Identity", "Neg", "Reshape", "Shape", "Size", "Slice",
    "Split", "Sqrt", "Squeeze", "Transpose", "Unsqueeze",
))  # fmt: skip
#: Operators whose output may be larger than all inputs by any factor.
_GROWING = frozenset((
    "CenterCropPad", "ConstantOfShape", "Expand", "EyeLike", "OneHot", "Pad", "RandomNormal", "RandomUniform", "Range",
    "Resize", "Tile", "Upsample",
))  # fmt: skip
#: Stands for a size that nobody knows before it is computed.
UNKNOWN = 1 << 62


@dataclass(frozen=True)
class ConstantWork:
    """``made_bytes`` are outputs larger than their inputs, or made of such; :data:`UNKNOWN` where no shape is known."""

    made_bytes: int = 0
    multiplications: int = 0


def constant_work(model: onnx.ModelProto) -> ConstantWork:
    """The work of computing all constants of ``model``."""
    nodes = list(_constant_nodes(model.graph))
    if all(node.op_type in _SAME_SIZE for node in nodes):
        return ConstantWork()
    sizes = _sizes(model, nodes)
    grown: set[str] = set()  # tensors larger than what they were made of, and those made of them
    made = multiplications = 0
    for node in nodes:
        inputs = sum(sizes.get(name, 0) for name in node.input if name)
        otherwise = UNKNOWN if node.op_type in _GROWING or node.op_type in _PRODUCTS else inputs
        outputs = sum(sizes.get(name, otherwise) for name in node.output if name)
        if (outputs > inputs and node.op_type != "Constant") or not grown.isdisjoint(node.input):
            grown.update(node.output)
            made += outputs
        if node.op_type in _PRODUCTS:
            multiplications += _multiplications(inputs, outputs)
    return ConstantWork(min(made, UNKNOWN), min(multiplications, UNKNOWN))


def _multiplications(inputs: int, outputs: int) -> int:
    """About as many as a product of matrices takes whose operands and result have so many bytes of 4 for an element:
    of n x n elements each, n^3."""
    return outputs // 4 * math.isqrt(inputs // 8)


def _constant_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes that see nothing but constants, in an order in which they can be computed."""
    known = {tensor.name for tensor in graph.initializer} - {value.name for value in graph.input}
    for node in graph.node:  # an ONNX graph is sorted, and onnxruntime refuses one that is not
        if all(name in known for name in node.input if name) and not _has_graphs(node):
            known.update(node.output)
            yield node


def _has_graphs(node: onnx.NodeProto) -> bool:
    kinds = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
    return any(attribute.type in kinds for attribute in node.attribute)


def _sizes(model: onnx.ModelProto, nodes: list[onnx.NodeProto]) -> dict[str, int]:
    """Bytes of every tensor that the nodes read or make, as far as they are known without computing large ones."""
    read = {name for node in nodes for name in node.input}
    made = dict.fromkeys(name for node in nodes for name in node.output if name)
    constants = [tensor for tensor in model.graph.initializer if tensor.name in read]
    part = helper.make_graph(nodes, "constants", [], [], constants)
    alone = helper.make_model(part, opset_imports=list(model.opset_import), ir_version=model.ir_version)
    try:
        specs = propagate(facts_of(alone), Binding((), {})).specs
        return {name: min(spec.nbytes, UNKNOWN) for name, spec in specs.items()}
    except GraphmemError:  # one of the nodes is not understood
        pass
    sizes = {tensor.name: _bytes(tensor.data_type, list(tensor.dims)) for tensor in constants}
    alone.graph.output.extend(onnx.ValueInfoProto(name=name) for name in made)
    try:
        # without data_prop, which makes a list of every element of a ConstantOfShape that is added to another
        inferred = shape_inference.infer_shapes(alone).graph
    except Exception:  # whatever onnx's C++ throws: nothing is known
        return sizes
    for value in (*inferred.value_info, *inferred.output):
        tensor = value.type.tensor_type
        if tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim):
            sizes[value.name] = _bytes(tensor.elem_type, [dim.dim_value for dim in tensor.shape.dim])
    return sizes


def _bytes(kind: int, dims: list[int]) -> int:
    try:
        name = onnx.TensorProto.DataType.Name(kind).lower()
    except ValueError:
        return UNKNOWN
    bits = ELEMENT_BITS.get({"float": "float32", "double": "float64"}.get(name, name), 64)
    return min(max(0, math.prod(dims)) * bits // 8, UNKNOWN)
