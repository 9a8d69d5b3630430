"""ONNX models in memory as graphs to plan, and orders written back."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphmem.errors import GraphError, GraphmemError
from graphmem.plan_memory import apply_onnx_order, from_onnx, remat
from tests.plan_memory.graphs import peak_of


def _model(*nodes: onnx.NodeProto, outputs: tuple[str, ...] = ("y", "z")) -> onnx.ModelProto:
    weight = numpy_helper.from_array(np.zeros((4, 8), np.float32), "w")
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 8]) for name in outputs]
    graph = helper.make_graph(nodes, "net", given, made, [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def _small() -> onnx.ModelProto:
    shape = helper.make_node("Constant", [], ["s"], value=numpy_helper.from_array(np.array([-1, 8])))
    return _model(
        helper.make_node("MatMul", ["x", "w"], ["a"], name="product"),
        shape,
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("Reshape", ["a", "s"], ["v"]),
        helper.make_node("Sigmoid", ["v"], ["y"]),
        helper.make_node("Neg", ["r"], ["z"]),
    )


def test_nodes_views_and_sizes() -> None:
    graph = from_onnx(_small(), batch=3)
    assert [node.name for node in graph.nodes] == [
        "product (MatMul)",
        "r (Relu)",
        "v (Reshape)",
        "y (Sigmoid)",
        "z (Neg)",
    ]
    assert {one.name: one.bytes for one in graph.buffers} == {
        "w": 128, "s": 16, "x": 48, "a": 96, "r": 96, "y": 96, "z": 96,
    }  # fmt: skip
    assert graph.nodes[2].makes == ()
    assert graph.nodes[3].after == (2,)
    assert peak_of(graph) == 192 + 3 * 96


def test_orders_are_written_back_and_run() -> None:
    runtime = pytest.importorskip("onnxruntime")
    model = _small()
    written = apply_onnx_order(model, [0, 2, 3, 1, 4], batch=3)
    assert [node.op_type for node in written.graph.node] == ["Constant", "MatMul", "Reshape", "Sigmoid", "Relu", "Neg"]
    onnx.checker.check_model(written)
    x = np.ones((3, 4), np.float32)
    results = [runtime.InferenceSession(one.SerializeToString()).run(None, {"x": x}) for one in (model, written)]
    assert all(map(np.array_equal, *results))
    with pytest.raises(GraphError, match="the order runs node 4"):
        apply_onnx_order(model, [0, 4, 1, 2, 3], batch=3)


def test_what_is_random_is_not_made_again() -> None:
    noise = helper.make_node("RandomNormalLike", ["x"], ["y"])
    assert not from_onnx(_model(noise, outputs=("y",)), batch=2).nodes[0].repeatable


def test_body_of_a_branch_is_scratch() -> None:
    made = helper.make_tensor_value_info("b", TensorProto.FLOAT, None)
    body = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["c"]), helper.make_node("Neg", ["c"], ["b"])], "body", [], [made]
    )
    condition = helper.make_node("Constant", [], ["yes"], value=numpy_helper.from_array(np.array(True)))
    branch = helper.make_node("If", ["yes"], ["y"], then_branch=body, else_branch=body)
    node = from_onnx(_model(condition, branch, outputs=("y",)), batch=1).nodes[0]
    assert node.scratch == 64
    assert node.cost == 32


def test_budget_of_a_model() -> None:
    graph = from_onnx(_small(), batch=3)
    with pytest.raises(GraphError, match="no schedule"):
        remat(graph, 479)


def _cyclic() -> onnx.ModelProto:
    return _model(helper.make_node("Add", ["x", "z"], ["y"]), helper.make_node("Neg", ["y"], ["z"]))


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        (None, {}, "a NoneType is no ONNX model; give"),
        ("model.onnx", {}, "a str is no ONNX model; give"),
        (onnx.ModelProto(), {}, "the ONNX model is not an ONNX model: it holds no graph"),
        (_small(), {}, ""),
        (_small(), {"batch": -3}, ""),
        (_small(), {"dims": {"width": 3}}, ""),
        (_small(), {"input_shapes": {"x": (3, 5)}}, ""),
        (_small(), {"batch": 1 << 62}, ""),
        (_cyclic(), {"batch": 1}, ""),
        (_model(helper.make_node("Neg", ["lost"], ["y"])), {"batch": 1}, ""),
        (_model(helper.make_node("Unheard", ["x"], ["y"])), {"batch": 1}, ""),
    ],
)
def test_hostile_models_are_one_line(model: object, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphmemError) as caught:
        from_onnx(model, **sizes)
    assert str(caught.value).startswith(message)
    assert str(caught.value).isprintable()


def test_model_of_onnx_ir_is_the_same_graph() -> None:
    onnx_ir = pytest.importorskip("onnx_ir")
    assert from_onnx(onnx_ir.from_proto(_small()), batch=3) == from_onnx(_small(), batch=3)
