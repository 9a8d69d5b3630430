"""Changes of a graph that ONNX Runtime's optimizer makes for the CUDA provider and not in its CPU build.

``HardSwish`` has a kernel on CUDA and none on the CPU, where it becomes the nodes of its function: it is optimized
under another name. ``BiasSoftmaxFusion`` (``core/optimizer/bias_softmax_fusion.cc``) is for GPUs: an addition and the
softmax of its sum along the last axis become one kernel, where the second operand is broadcast in a way it knows.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

import onnx
from onnx import helper

from graphmem.graph.model import Dimension, TensorSpec
from graphmem.graph.onnx_import import spec_of_tensor

_MARK = "graphmem HardSwish "
_SOFTMAX_ONE_AXIS = 13
_FLOATS = ("float32", "float16", "float64")


def hidden(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of ``model`` whose HardSwish nodes are named otherwise; itself where there are none."""
    if not any(node.op_type == "HardSwish" and not node.domain for node in model.graph.node):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for index, node in enumerate(copy.graph.node):
        if node.op_type == "HardSwish" and not node.domain:
            node.op_type, node.name = "Neg", f"{_MARK}{index} {node.name}"
    return copy


def shown(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model``, which was optimized after :func:`hidden`, with the names that it had."""
    for node in model.graph.node:
        if node.name.startswith(_MARK):
            node.op_type, node.name = "HardSwish", node.name.removeprefix(_MARK).partition(" ")[2]
    return model


def fuse_bias_softmax(model: onnx.ModelProto, symbolic: Mapping[str, TensorSpec]) -> onnx.ModelProto:
    """``model`` with additions before softmax in one node with it, as far as the shapes in ``symbolic`` tell."""
    specs = {**symbolic, **{tensor.name: spec_of_tensor(tensor) for tensor in model.graph.initializer}}
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)
    makers = {name: node for node in model.graph.node for name in node.output}
    readers = Counter(name for node in model.graph.node for name in node.input)
    readers.update(value.name for value in model.graph.output)
    gone = set()
    for node in model.graph.node:
        added = makers.get(node.input[0]) if node.op_type == "Softmax" and not node.domain else None
        if added is None or added.op_type != "Add" or readers[node.input[0]] != 1:
            continue
        operands = _operands(added, node, opset, specs)
        if operands is None:
            continue
        gone.add(added.output[0])
        del node.input[:]
        node.input.extend(operands)
        node.op_type, node.domain = "BiasSoftmax", "com.microsoft"
    kept = [node for node in model.graph.node if not (node.op_type == "Add" and node.output[0] in gone)]
    if gone:
        del model.graph.node[:]
        model.graph.node.extend(kept)
        if not any(entry.domain == "com.microsoft" for entry in model.opset_import):
            model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def _operands(
    added: onnx.NodeProto, softmax: onnx.NodeProto, opset: int, symbolic: Mapping[str, TensorSpec]
) -> tuple[str, str] | None:
    """Input and mask, either way round; None where the kernel does not know the broadcast."""
    specs = [symbolic.get(name) for name in added.input]
    if any(spec is None or spec.dtype not in _FLOATS for spec in specs):
        return None
    axis = next((a.i for a in softmax.attribute if a.name == "axis"), -1 if opset >= _SOFTMAX_ONE_AXIS else 1)
    first, second = added.input
    for data, mask in ((first, second), (second, first)):
        if _is_known(symbolic[data].shape, symbolic[mask].shape, axis, opset):
            return data, mask
    return None


def _is_known(data: tuple[Dimension, ...], mask: tuple[Dimension, ...], axis: int, opset: int) -> bool:
    """``TrySelectInputAndMaskWithAlignment``: along and behind the axis both are alike; before it dimensions of the
    mask are broadcast all together, the innermost or the outermost ones."""
    rank, axis = len(data), axis % max(1, len(data))
    if not rank or (opset >= _SOFTMAX_ONE_AXIS and axis != rank - 1) or len(mask) > rank or len(mask) < rank - axis:
        return False
    padded = (1,) * (rank - len(mask)) + tuple(mask)
    if any(a != b or a == "" for a, b in zip(data[axis:], padded[axis:], strict=True)):
        return False
    alike = [a == b and a != "" for a, b in zip(data[:axis], padded[:axis], strict=True)]
    if any(not same and size != 1 for same, size in zip(alike, padded[:axis], strict=True)):
        return False
    return sum(a != b for a, b in itertools.pairwise(alike)) <= 1
