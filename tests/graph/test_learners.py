"""Shapes of ``ai.onnx.ml``'s operators beside those of the arrays that ONNX Runtime computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from graphmem.graph.learners import learner_outputs

ROWS, COLUMNS = 5, 4
VECTORS = {
    "coefficients": [0.5] * 6, "kernel_params": [0.1, 0.0, 3.0], "kernel_type": "LINEAR", "rho": [0.1] * 3,
    "support_vectors": [0.5] * 12, "vectors_per_class": [1, 1, 1],
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": (
        "LinearClassifier",
        {"coefficients": [0.1] * 12, "intercepts": [0.0] * 3, "classlabels_ints": [0, 1, 2]},
    ),
    "of two": ("LinearClassifier", {"coefficients": [0.1] * 8, "intercepts": [0.0] * 2, "classlabels_ints": [0, 1]}),
    "strings": (
        "LinearClassifier",
        {"coefficients": [0.1] * 12, "intercepts": [0.0] * 3, "classlabels_strings": ["a", "b", "c"]},
    ),
    "vectors": ("SVMClassifier", {**VECTORS, "classlabels_ints": [0, 1, 2]}),
    "probable": ("SVMClassifier", {**VECTORS, "classlabels_ints": [0, 1, 2], "prob_a": [0.1] * 3, "prob_b": [0.1] * 3}),
    "regressor": ("LinearRegressor", {"coefficients": [0.1] * 8, "intercepts": [0.0] * 2, "targets": 2}),
    "scaler": ("Scaler", {"offset": [0.0], "scale": [1.0]}),
    "normalizer": ("Normalizer", {"norm": "L2"}),
    "imputer": ("Imputer", {"imputed_value_floats": [0.0]}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rule_gives_the_shape_that_the_kernel_makes(name: str) -> None:
    operator, attributes = CASES[name]
    made = ["y", "scores"] if operator.endswith("Classifier") else ["y"]
    node = helper.make_node(operator, ["x"], made, domain="ai.onnx.ml", **attributes)
    compare(node, {"x": np.zeros((ROWS, COLUMNS), np.float32)})


@pytest.mark.parametrize("shape", [(3,), (2, 3), (4, 2, 3)])
@pytest.mark.parametrize("indices", [(2,), (1, 2)])
def test_features_are_extracted_from_the_last_dimension(shape: tuple[int, ...], indices: tuple[int, ...]) -> None:
    node = helper.make_node("ArrayFeatureExtractor", ["x", "i"], ["y"], domain="ai.onnx.ml")
    compare(node, {"x": np.zeros(shape, np.float32), "i": np.zeros(indices, np.int64)})


def compare(node: onnx.NodeProto, feeds: dict[str, Any]) -> None:
    runtime = pytest.importorskip("onnxruntime")
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feeds.items()}
    inputs = [helper.make_tensor_value_info(name, kinds[name], array.shape) for name, array in feeds.items()]
    types = {value.name: value.type for value in inputs}
    found = learner_outputs(node, types)
    outputs = [
        helper.make_tensor_value_info(name, found[name].tensor_type.elem_type or TensorProto.FLOAT, None)
        for name in node.output
    ]
    graph = helper.make_graph([node], "one", inputs, outputs)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for name, array in zip(node.output, session.run(None, feeds), strict=True):
        assert [d.dim_value for d in found[name].tensor_type.shape.dim] == list(np.asarray(array).shape), name


def test_what_is_not_known_has_no_rule() -> None:
    kind = helper.make_tensor_type_proto(TensorProto.FLOAT, (2, 3))
    assert learner_outputs(helper.make_node("Scaler", ["x"], ["y"]), {"x": kind}) == {}
    assert learner_outputs(helper.make_node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml"), {"x": kind}) == {}
