"""Small ONNX models for the tests, and the real ones kept beside them."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests import places

MODELS = places.ONNXRUNTIME / "models"
REAL_MODELS = ("resnet50", "bert_mini", "unet")


def unpack(name: str, directory: Path) -> Path:
    """The real model ``name``, unpacked into ``directory``."""
    path = directory / f"{name}.onnx"
    path.write_bytes(gzip.decompress((MODELS / f"{name}.onnx.gz").read_bytes()))
    return path


def value(name: str, shape: Sequence[Any] | None, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def constant(name: str, array: Any, dtype: Any = np.int64) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(array, dtype=dtype), name)


def weights(name: str, shape: Sequence[int]) -> onnx.TensorProto:
    return numpy_helper.from_array(np.zeros(shape, dtype=np.float32), name)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: Sequence[onnx.TensorProto] = (),
    *,
    opset: int = 18,
    domains: Sequence[str] = (),
    **options: Any,
) -> onnx.ModelProto:
    graph = helper.make_graph(list(nodes), "sample", list(inputs), list(outputs), list(initializers), **options)
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def save(proto: onnx.ModelProto, directory: Path, name: str = "model.onnx") -> Path:
    path = directory / name
    path.write_bytes(proto.SerializeToString())
    return path


def perceptron(batch: Any = "batch") -> onnx.ModelProto:
    """x[batch,8] -> MatMul -> Relu -> MatMul -> y[batch,4]: 16x8 and 16x4 weights in float32."""
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"], name="first"),
        helper.make_node("Relu", ["h"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "w2"], ["y"], name="second"),
    ]
    ends = [value("x", [batch, 8])], [value("y", [batch, 4])]
    return model(nodes, *ends, [weights("w1", (8, 16)), weights("w2", (16, 4))])


def dynamic_reshape() -> onnx.ModelProto:
    """Shape -> Gather -> Div -> Concat -> Reshape, as exporters write ``x.view(x.shape[0] // 2, -1)``."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], name="shape"),
        helper.make_node("Gather", ["s", "zero"], ["n"], name="gather"),
        helper.make_node("Div", ["n", "two"], ["half"], name="div"),
        helper.make_node("Concat", ["half", "minus"], ["target"], name="concat", axis=0),
        helper.make_node("Relu", ["x"], ["r"], name="relu"),
        helper.make_node("Reshape", ["r", "target"], ["v"], name="reshape"),
        helper.make_node("Neg", ["v"], ["y"], name="neg"),
    ]
    constants = [constant("zero", [0]), constant("two", [2]), constant("minus", [-1])]
    return model(nodes, [value("x", ["batch", 6])], [value("y", None)], constants)
