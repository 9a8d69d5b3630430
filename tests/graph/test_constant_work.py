"""How much the constants of a graph would make, asked without making it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, shape_inference

from graphmem.errors import ShapeError
from graphmem.graph.constant_work import UNKNOWN, constant_work
from graphmem.graph.onnx_import import spec_of_tensor


def _model(*more: onnx.NodeProto) -> onnx.ModelProto:
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        helper.make_node("Add", ["zeros", "zeros"], ["sum"]),
        *more,
        helper.make_node("Add", ["sum", "x"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    shape = numpy_helper.from_array(np.array([10**11], dtype=np.int64), "shape")
    graph = helper.make_graph(nodes, "large", values[:1], values[1:], [shape])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def test_sizes_are_told_by_shapes_alone() -> None:
    assert constant_work(_model()).made_bytes == 2 * 4 * 10**11


def test_values_are_not_followed_where_an_operator_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Onnx 1.23 lists every element of what is added: 400 GB here."""
    infer = shape_inference.infer_shapes

    def without_values(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
        assert not options.get("data_prop")
        return infer(model, **options)

    monkeypatch.setattr(shape_inference, "infer_shapes", without_values)
    made = constant_work(_model(helper.make_node("Nobodys", ["sum"], ["z"]))).made_bytes
    assert 2 * 4 * 10**11 <= made <= UNKNOWN


@pytest.mark.parametrize(("length", "right"), [("64", True), ("0", True), ("3", False), ("128", False), ("-4", False)])
def test_external_data_have_the_length_of_their_tensor(length: str, right: bool) -> None:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4, 4], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="weights.bin")
    tensor.external_data.add(key="length", value=length)
    if right:
        assert spec_of_tensor(tensor).nbytes == 64
    else:
        with pytest.raises(ShapeError, match=r"constant 'w' .* has 64 bytes; length of its external data"):
            spec_of_tensor(tensor)
